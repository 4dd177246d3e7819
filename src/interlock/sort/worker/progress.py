"""Progress of a worker by its state, and a thread that reports it and stops the worker on request."""

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

    from interlock.sort.settings import ProgressCallback
    from interlock.sort.worker.worker import Worker

REPORT_INTERVAL_S = 0.25


class StateProgress(NamedTuple):
    """The phase of a state, the percentage at which it begins, the percentage points it covers, and its message."""

    phase: WorkerStatus.Phase
    begins_at: float
    width: float
    message: str


STATE_PROGRESS = {
    SortWorkerState.INITIALIZING: StateProgress(WorkerStatus.INITIALIZING, 0.0, 0.0, "Initializing worker"),
    SortWorkerState.SAMPLING: StateProgress(WorkerStatus.SAMPLING, 10.0, 0.0, "Extracting samples"),
    SortWorkerState.WAITING_FOR_PARTITION_CONFIG: StateProgress(
        WorkerStatus.SAMPLING, 15.0, 0.0, "Waiting for partition config"
    ),
    SortWorkerState.SORTING: StateProgress(WorkerStatus.SORTING, 15.0, 40.0, "Sorting: {:.0f}%"),
    SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL: StateProgress(
        WorkerStatus.SORTING, 55.0, 0.0, "Sorting complete, waiting for shuffle signal"
    ),
    SortWorkerState.SHUFFLING: StateProgress(WorkerStatus.SHUFFLING, 55.0, 25.0, "Shuffling: {:.0f}%"),
    SortWorkerState.WAITING_FOR_MERGE_SIGNAL: StateProgress(
        WorkerStatus.SHUFFLING, 80.0, 0.0, "Shuffle complete, waiting for merge signal"
    ),
    SortWorkerState.MERGING: StateProgress(WorkerStatus.MERGING, 80.0, 20.0, "Merging: {:.0f}%"),
    SortWorkerState.COMPLETED: StateProgress(WorkerStatus.COMPLETED, 100.0, 0.0, "All phases completed"),
    SortWorkerState.FAILED: StateProgress(WorkerStatus.FAILED, 0.0, 0.0, "Worker failed"),
}


def make_status(state: SortWorkerState, share: float) -> WorkerStatus:
    """Create the status of a worker that has done this share, from 0 to 1, of its current phase."""
    progress = STATE_PROGRESS[state]
    share = min(max(share, 0.0), 1.0)
    return WorkerStatus(
        current_phase=progress.phase,
        progress_percentage=progress.begins_at + progress.width * share,
        message=progress.message.format(100 * share),
        state=str(state),
    )


@contextmanager
def watch_worker(worker: Worker, on_progress: ProgressCallback | None, stop: threading.Event | None) -> Iterator[None]:
    """Report the progress of a worker while the block runs, and fail the worker when `stop` is set."""
    if on_progress is None and stop is None:
        yield
        return
    ended = threading.Event()
    began_at = time.monotonic()

    def watch() -> None:
        while not ended.wait(REPORT_INTERVAL_S):
            if stop is not None and stop.is_set():
                worker.fail(SortError("the worker was stopped"))
            if on_progress is not None:
                on_progress(_progress(worker, began_at))

    thread = threading.Thread(target=watch, name="interlock-sort-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if on_progress is not None:
            on_progress(_progress(worker, began_at))


def _progress(worker: Worker, began_at: float) -> Progress:
    state = worker.machine.state
    status = make_status(state, worker.runner.progress(state))
    one = WorkerProgress(
        index=worker.index,
        address=worker.address,
        state=str(state),
        phase=WorkerStatus.Phase.Name(status.current_phase),
        percent=status.progress_percentage,
        message=status.message,
        bytes_done=worker.runner.bytes_done(state),
    )
    return Progress(str(state), (one,), worker.runner.source.size, time.monotonic() - began_at)
