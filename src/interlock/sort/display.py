"""Display of a sort: live bars in a terminal, log lines elsewhere, and final tables of phases and transitions.

Output that is not a terminal gets whole lines: one at the start of every phase, and one every few seconds.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol, Self

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from interlock.lifecycle import SortWorkerState
from interlock.sort.settings import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console, RenderableType

    from interlock.sort.settings import Progress, Report, TransitionRecord, WorkerProgress, WorkerReport

SIZE_UNITS = ("B", "kB", "MB", "GB", "TB")
LINE_INTERVAL_S = 5.0  # between two lines of one phase
BAR_WIDTH = 30  # columns
STATE_STYLES: Mapping[str, str] = {SortWorkerState.COMPLETED: "green", SortWorkerState.FAILED: "bold red"}
MINUTE_S, HOUR_S = 60, 3600


class SortView(Protocol):
    """Shows the progress of a sort while it runs."""

    def __enter__(self) -> Self:
        """Start to show progress."""

    def __exit__(self, *_: object) -> None:
        """Stop."""

    def show(self, progress: Progress) -> None:
        """Show the current progress."""


def open_view(console: Console) -> SortView:
    """Return the view that a console can show."""
    return SortLiveView(console) if console.is_terminal and not console.is_dumb_terminal else SortLineView(console)


class Throughput:
    """Measures the throughput of a phase and estimates the remaining time."""

    def __init__(self) -> None:
        self._phase = ""
        self._phase_start = (0.0, 0)  # seconds, bytes

    def describe(self, progress: Progress) -> str:
        """Format the bytes per second of this phase and the remaining time."""
        done = sum(worker.bytes_done for worker in progress.workers)
        if progress.state != self._phase:
            self._phase, self._phase_start = progress.state, (progress.elapsed, done)
        began, before = self._phase_start
        words = []
        if done > before and progress.elapsed > began:
            words.append(f"{format_size((done - before) / (progress.elapsed - began))}/s")
        percent = overall_percent(progress.workers)
        if 0 < percent < 100:  # noqa: PLR2004 - percent
            words.append(f"ETA {format_remaining_time(progress.elapsed * (100 - percent) / percent)}")
        return "  ".join(words)


class SortLineView:
    """Prints a line at the start of a phase, and every few seconds during it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._throughput = Throughput()
        self._phase = ""
        self._printed_at = 0.0

    def __enter__(self) -> Self:
        """Start to show progress."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""

    def show(self, progress: Progress) -> None:
        """Print a line if it is time for one."""
        now = time.monotonic()
        throughput = self._throughput.describe(progress)
        if progress.state == self._phase and now - self._printed_at < LINE_INTERVAL_S:
            return
        self._phase, self._printed_at = progress.state, now
        workers = ", ".join(f"{_name(worker)} {worker.state} {worker.percent:.0f} %" for worker in progress.workers)
        percent = f"{overall_percent(progress.workers):3.0f} %"
        words = [f"{progress.elapsed:7.1f} s", f"{progress.state:11}", percent, throughput, workers]
        self._console.print("  ".join(word for word in words if word), highlight=False, soft_wrap=True, markup=False)


class SortLiveView:
    """Shows a progress bar for every worker, in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._throughput = Throughput()

    def __enter__(self) -> Self:
        """Start to show progress."""
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bars."""
        self._live.__exit__(None, None, None)

    def show(self, progress: Progress) -> None:
        """Redraw the bars."""
        self._live.update(render_progress(progress, self._throughput.describe(progress)))


def render_progress(progress: Progress, throughput: str) -> RenderableType:
    """Draw a bar for every worker, and one for the whole sort beneath them."""
    table = Table.grid(padding=(0, 2))
    for worker in progress.workers:
        state = Text(worker.state, style=STATE_STYLES.get(worker.state, "cyan"))
        percent = f"{worker.percent:3.0f} %"
        table.add_row(_name(worker), state, _bar(worker.percent), percent, Text(worker.message))
    done = overall_percent(progress.workers)
    title = f"{progress.state}, {format_size(progress.bytes_total)}"
    table.add_row(
        Text("all", style="bold"),
        Text(title, style="bold"),
        _bar(done),
        f"{done:3.0f} %",
        f"{progress.elapsed:.1f} s  {throughput}",
    )
    return table


def overall_percent(workers: Sequence[WorkerProgress]) -> float:
    """Return the percentage of the whole sort: the mean of the workers."""
    return sum(worker.percent for worker in workers) / len(workers) if workers else 0.0


def report_tables(report: Report, *, history: bool = True) -> list[RenderableType]:
    """Draw the durations of the phases, the partitions and, with `history`, every transition of master and workers."""
    drawings: list[RenderableType] = [phase_table(report.workers, report.phases), _partition_table(report)]
    if history:
        named = [("master", report.history)] + [(f"worker {one.index}", one.history) for one in report.workers]
        drawings.append(history_table(named))
    return drawings


def summary_line(report: Report) -> str:
    """Summarize in a line the records, the throughput and the memory."""
    rate = format_size(report.size / report.seconds) if report.seconds else "-"
    peak = sum(worker.peak_memory for worker in report.workers)
    return (
        f"{report.records:,} records, {format_size(report.size)}, in {report.seconds:.2f} s ({rate}/s), "
        f"{len(report.partitions)} partitions, workers' peak memory {format_size(peak)} together"
    )


def phase_table(workers: Iterable[WorkerReport], whole: Mapping[str, float] | None = None) -> Table:
    """Draw how long each phase took, for every worker and, if given, for the whole sort."""
    table = _table("Phase durations", "phase")
    columns: list[Mapping[str, float]] = [] if whole is None else [whole]
    if whole is not None:
        table.add_column("all", justify="right")
    for worker in workers:
        table.add_column(f"worker {worker.index}", justify="right")
        columns.append(worker.phases)
    for phase in PHASES:
        took = (f"{column[phase]:.2f} s" if phase in column else "" for column in columns)
        table.add_row(str(phase), *took)
    return table


def history_table(named: Iterable[tuple[str, Iterable[TransitionRecord]]]) -> Table:
    """Draw every transition, with the seconds since the first one of the same process."""
    table = _table("State history", "machine", "time (UTC)", "", "from", "event", "to", "reason")
    for name, history in named:
        began: float | None = None
        for one in history:
            began = one.elapsed if began is None else began
            at = f"{datetime.fromtimestamp(one.timestamp, UTC):%H:%M:%S.%f}"[:-3]
            since = f"+{one.elapsed - began:.2f} s"
            target = Text(one.to_state, style=STATE_STYLES.get(one.to_state, ""))
            table.add_row(name, at, since, one.from_state, one.event, target, Text(one.reason))
    return table


def format_size(size: float) -> str:
    """Format a number of bytes with a decimal unit."""
    for unit in SIZE_UNITS:
        if size < 1000 or unit == SIZE_UNITS[-1]:  # noqa: PLR2004 - units are powers of 1000
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == SIZE_UNITS[0] else f"{size:.2f} {unit}"


def format_remaining_time(seconds: float) -> str:
    """Format a duration with its two largest units."""
    if seconds >= HOUR_S:
        return f"{seconds // HOUR_S:.0f} h {seconds % HOUR_S // MINUTE_S:.0f} min"
    return f"{seconds // MINUTE_S:.0f} min {seconds % MINUTE_S:.0f} s" if seconds >= MINUTE_S else f"{seconds:.0f} s"


def _name(worker: WorkerProgress) -> str:
    """Name a worker by its index, which it has only after registration."""
    return "worker" if worker.index < 0 else f"worker {worker.index}"


def _bar(percent: float) -> ProgressBar:
    return ProgressBar(total=100, completed=percent, width=BAR_WIDTH)


def _partition_table(report: Report) -> Table:
    table = _table("Partitions", "number", "worker", "records", "of even", "path")
    even = report.records / max(1, len(report.partitions))
    for worker in report.workers:
        for one in worker.partitions:
            share = f"{one.records / even:.0%}" if even else ""
            table.add_row(str(one.number), str(worker.index), f"{one.records:,}", share, Text(one.path))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name in ("records", "of even", "number") else "left")
    return table
