"""`interlock.sort.sort`: a sort from Python, awaited, also within a step of a workflow.

Invariant: when the call ends, in any way, no process of the sort is left. A sort that was killed is resumed by the same
call, as by the same command.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.sort.data.line_order import parse_line_order
from interlock.sort.engines.local import run_local, worker_settings
from interlock.sort.engines.prefork import default_worker_count
from interlock.sort.prepare import InputFormat, own_work_dir, prepared, remove_other_partitions
from interlock.sort.settings import Settings, parse_compression, parse_size

if TYPE_CHECKING:
    from os import PathLike

    from interlock.client.context import TaskContext
    from interlock.sort.data.records import Source
    from interlock.sort.settings import Compression, Progress, ProgressCallback, Report

DEFAULT_MEMORY = "2GB"


async def sort(
    inputs: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str],
    *,
    key: str | Sequence[str] = (),
    separator: str | None = None,
    numeric: bool = False,
    reverse: bool = False,
    unique: bool = False,
    stable: bool = False,
    skip_blanks: bool = False,
    fold: bool = False,
    lines: bool = False,
    record_length: int | None = None,
    key_length: int | None = None,
    memory: int | str = DEFAULT_MEMORY,
    workers: int | None = None,
    partitions: int | None = None,
    compression: Compression | str | None = None,
    temp: str | PathLike[str] | None = None,
    overwrite: bool = False,
    on_progress: ProgressCallback | None = None,
    context: TaskContext | None = None,
) -> Report:
    """Sort files or directories into partition files in an output directory; return the report.

    The options are those of `interlock sort run`: `key` is one key or more of GNU sort (`2,2n`), and lengths make the
    input records. With the `context` of a step, its progress is that of the sort, every state of the sort is a
    checkpoint with its history, and a step that is canceled or loses its lease stops the sort. `on_progress` runs in
    another thread. Raises SortInputError for wrong input, SortError if the sort fails.
    """
    order: dict[str, Any] = {
        "keys": [key] if isinstance(key, str) else list(key),
        "separator": separator,
        "numeric": numeric,
        "reverse": reverse,
        "unique": unique,
        "stable": stable,
        "skip_blanks": skip_blanks,
        "fold": fold,
    }
    input_format = InputFormat(
        record_length=record_length,
        key_length=key_length,
        lines=parse_line_order(**order) if lines or separator is not None or any(order.values()) else None,
    )
    settings = Settings(
        memory=parse_size("memory", memory) if isinstance(memory, str) else memory,
        partitions=partitions,
        compression=None if compression is None else parse_compression(compression),
    )
    stop = threading.Event()
    run = partial(
        _run,
        _paths(inputs),
        Path(output),
        own_work_dir(None if temp is None else Path(temp), Path(output)),
        input_format,
        settings,
        default_worker_count() if workers is None else workers,
        overwrite,
        _Reporter(stop, on_progress, context),
    )
    with ThreadPoolExecutor(1, "interlock-sort") as executor:
        ended = asyncio.get_running_loop().run_in_executor(executor, run)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait({ended})
            ended.exception()  # that it was stopped; else asyncio would log it
            raise


def _paths(inputs: str | PathLike[str] | Sequence[str | PathLike[str]]) -> list[Path]:
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return [Path(one) for one in inputs]
    return [Path(inputs)]


class _Reporter:
    """Passes progress and states of a sort on, and stops it when its step is canceled."""

    def __init__(
        self, stop: threading.Event, on_progress: ProgressCallback | None, context: TaskContext | None
    ) -> None:
        self.stop = stop
        self._on_progress = on_progress
        self._context = context

    def show(self, progress: Progress) -> None:
        """Report the progress, which is the mean of all workers'."""
        if self._on_progress is not None:
            self._on_progress(progress)
        if self._context is None:
            return
        if self._context.cancelled:
            self.stop.set()
        percent = [worker.percent for worker in progress.workers] or [0.0]
        self._context.progress(
            min(max(sum(percent) / len(percent) / 100, 0.0), 1.0),
            progress.state,
            bytes_total=progress.bytes_total,
            workers={str(worker.index): worker.state for worker in progress.workers},
        )

    def save(self, state: dict[str, Any]) -> None:
        """Store a state of the master, with the history up to it."""
        if self._context is not None:
            self._context.checkpoint(state)


def _run(
    inputs: list[Path],
    output: Path,
    work_dir: Path | None,
    input_format: InputFormat,
    settings: Settings,
    workers: int,
    overwrite: bool,  # noqa: FBT001 - called by partial only
    reporter: _Reporter,
) -> Report:
    def check_memory(source: Source) -> None:
        worker_settings(settings, workers, source)

    preparation = prepared(
        inputs, output, work_dir, input_format, overwrite=overwrite, check=check_memory, stop=reporter.stop
    )
    with preparation as (source, _):
        report = run_local(
            source,
            output,
            workers=workers,
            settings=settings,
            work_dir=work_dir,
            on_progress=reporter.show,
            stop=reporter.stop,
            on_save=reporter.save,
        )
        remove_other_partitions(output, [one.path for one in report.partitions])
    return report
