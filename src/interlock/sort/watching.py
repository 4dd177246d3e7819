"""Looks after a running worker from outside: tells how far it is, and makes it give up when that is wanted."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from interlock.errors import SortError
from interlock.sort.job import Progress, WorkerProgress
from interlock.sort.status import status_of
from interlock.sort.wire_pb2 import WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.sort.job import Told
    from interlock.sort.worker import Worker

INTERVAL = 0.25


@contextmanager
def watching(worker: Worker, told: Told | None, stop: threading.Event | None) -> Iterator[None]:
    """Watch a worker while the block runs."""
    if told is None and stop is None:
        yield
        return
    ended = threading.Event()
    begun = time.monotonic()

    def watch() -> None:
        while not ended.wait(INTERVAL):
            if stop is not None and stop.is_set():
                worker.failed(SortError("it was told to give up"))
            if told is not None:
                told(_progress(worker, begun))

    thread = threading.Thread(target=watch, name="interlock-sort-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if told is not None:
            told(_progress(worker, begun))


def _progress(worker: Worker, begun: float) -> Progress:
    state = worker.machine.state
    status = status_of(state, worker.workshop.progress(state))
    one = WorkerProgress(
        index=worker.index,
        address=worker.address,
        state=str(state),
        phase=WorkerStatus.Phase.Name(status.current_phase),
        percent=status.progress_percentage,
        message=status.message,
        bytes_done=worker.workshop.bytes_done(state),
    )
    return Progress(str(state), (one,), worker.workshop.source.size, time.monotonic() - begun)
