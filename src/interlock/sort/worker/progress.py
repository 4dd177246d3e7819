"""Looks after a running worker from outside: tells how far it is, and makes it give up when that is wanted."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from interlock.errors import SortError
from interlock.lifecycle import SortWorkerState
from interlock.sort.settings import Progress, WorkerProgress
from interlock.sort.wire_pb2 import WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.sort.settings import Told
    from interlock.sort.worker.worker import Worker


# SECTION sort/status
# How far a worker is, by its state: the phase, the percentage of the whole sort, and a sentence.


class Weight(NamedTuple):
    """The phase that a state belongs to, the percentage at which it begins, its width, and what is said."""

    phase: WorkerStatus.Phase
    begins: float
    width: float
    message: str


WEIGHTS = {
    SortWorkerState.INITIALIZING: Weight(WorkerStatus.INITIALIZING, 0.0, 0.0, "Initializing worker"),
    SortWorkerState.SAMPLING: Weight(WorkerStatus.SAMPLING, 10.0, 0.0, "Extracting samples"),
    SortWorkerState.WAITING_FOR_PARTITION_CONFIG: Weight(
        WorkerStatus.SAMPLING, 15.0, 0.0, "Waiting for partition config"
    ),
    SortWorkerState.SORTING: Weight(WorkerStatus.SORTING, 15.0, 40.0, "Sorting: {:.0f}%"),
    SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL: Weight(
        WorkerStatus.SORTING, 55.0, 0.0, "Sorting complete, waiting for shuffle signal"
    ),
    SortWorkerState.SHUFFLING: Weight(WorkerStatus.SHUFFLING, 55.0, 25.0, "Shuffling: {:.0f}%"),
    SortWorkerState.WAITING_FOR_MERGE_SIGNAL: Weight(
        WorkerStatus.SHUFFLING, 80.0, 0.0, "Shuffle complete, waiting for merge signal"
    ),
    SortWorkerState.MERGING: Weight(WorkerStatus.MERGING, 80.0, 20.0, "Merging: {:.0f}%"),
    SortWorkerState.COMPLETED: Weight(WorkerStatus.COMPLETED, 100.0, 0.0, "All phases completed"),
    SortWorkerState.FAILED: Weight(WorkerStatus.FAILED, 0.0, 0.0, "Worker failed"),
}


def status_of(state: SortWorkerState, share: float) -> WorkerStatus:
    """Say how far a worker is that has done this share, from 0 to 1, of its present phase."""
    weight = WEIGHTS[state]
    share = min(max(share, 0.0), 1.0)
    return WorkerStatus(
        current_phase=weight.phase,
        progress_percentage=weight.begins + weight.width * share,
        message=weight.message.format(100 * share),
        state=str(state),
    )


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
