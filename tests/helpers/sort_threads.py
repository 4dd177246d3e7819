"""A whole sort in the process of the test: master and workers in threads, with real RPCs between them."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from interlock.sort.master.master import run_master
from interlock.sort.settings import Settings
from interlock.sort.worker.worker import run_worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from interlock.sort.data.records import Source
    from interlock.sort.settings import Progress, Report


def sort_in_threads(
    source: Source,
    place: Path,
    workers: int = 2,
    on_progress: Callable[[Progress], None] | None = None,
    **settings: Any,
) -> Report:
    """Sort, each worker into an output directory of its own: place/out-0, place/out-1 and so on."""
    chosen = Settings(
        **{"block_records": 500, "window_records": 300, "lost_after_s": 20.0, "register_timeout_s": 20.0, **settings}
    )
    address: Future[str] = Future()
    stop = threading.Event()
    with ThreadPoolExecutor(workers + 1) as pool:
        master = pool.submit(
            run_master, workers, settings=chosen, on_listening=address.set_result, on_progress=on_progress, stop=stop
        )
        cluster = [
            pool.submit(
                run_worker,
                address.result(20),
                source.share(index, workers),
                place / f"out-{index}",
                settings=chosen,
                index=index,
            )
            for index in range(workers)
        ]
        for worker in cluster:
            if worker.exception() is not None and not master.done():
                stop.set()
        return master.result()
