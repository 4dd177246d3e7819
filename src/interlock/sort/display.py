"""How a sort is shown: live in a terminal, as lines elsewhere, and in the end as tables of phases and moves.

Invariant: it only shows what it is told; what is not a terminal gets whole lines, one at every phase and a few between.
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console, RenderableType

    from interlock.sort.settings import Moved, Progress, Report, WorkerProgress, WorkerReport

PHASES = (SortWorkerState.SAMPLING, SortWorkerState.SORTING, SortWorkerState.SHUFFLING, SortWorkerState.MERGING)
UNITS = ("B", "kB", "MB", "GB", "TB")
THOUSAND = 1000
EVERY = 5.0  # seconds between two lines of one phase
BAR = 30
STYLES = {"Completed": "green", "Failed": "bold red"}
MINUTE, HOUR = 60, 3600


class View(Protocol):
    """Shows a sort while it runs."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(self, *_: object) -> None:
        """End."""

    def show(self, seen: Progress) -> None:
        """Show what was just told."""


def view_on(console: Console) -> View:
    """Give the view that a console can show."""
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else LineView(console)


class Pace:
    """Tells how fast a sort goes, and how long it may still take."""

    def __init__(self) -> None:
        self._phase = ""
        self._since = (0.0, 0)

    def of(self, seen: Progress) -> str:
        """Write the bytes a second of this phase and the time that is left."""
        done = sum(worker.bytes_done for worker in seen.workers)
        if seen.state != self._phase:
            self._phase, self._since = seen.state, (seen.elapsed, done)
        began, before = self._since
        words = []
        if done > before and seen.elapsed > began:
            words.append(f"{size_of((done - before) / (seen.elapsed - began))}/s")
        percent = overall(seen.workers)
        if 0 < percent < 100:  # noqa: PLR2004 - percent
            words.append(f"ETA {time_of(seen.elapsed * (100 - percent) / percent)}")
        return "  ".join(words)


class LineView:
    """Says in a line when a phase begins, and every few seconds how far it is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = Pace()
        self._phase = ""
        self._told_at = 0.0

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """End."""

    def show(self, seen: Progress) -> None:
        """Show what was just told."""
        now = time.monotonic()
        pace = self._pace.of(seen)
        if seen.state == self._phase and now - self._told_at < EVERY:
            return
        self._phase, self._told_at = seen.state, now
        workers = ", ".join(f"{_name(worker)} {worker.state} {worker.percent:.0f} %" for worker in seen.workers)
        words = [f"{seen.elapsed:7.1f} s", f"{seen.state:11}", f"{overall(seen.workers):3.0f} %", pace, workers]
        self._console.print("  ".join(word for word in words if word), highlight=False, soft_wrap=True, markup=False)


class LiveView:
    """Shows a bar for every worker, in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._pace = Pace()

    def __enter__(self) -> Self:
        """Begin."""
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._live.__exit__(None, None, None)

    def show(self, seen: Progress) -> None:
        """Show what was just told."""
        self._live.update(drawn(seen, self._pace.of(seen)))


def drawn(seen: Progress, pace: str) -> RenderableType:
    """Draw the workers, and the whole beneath them."""
    table = Table.grid(padding=(0, 2))
    for worker in seen.workers:
        table.add_row(*_worker_row(worker))
    done = overall(seen.workers)
    title = f"{seen.state}, {size_of(seen.bytes_total)}"
    table.add_row(
        Text("all", style="bold"),
        Text(title, style="bold"),
        _bar(done),
        f"{done:3.0f} %",
        f"{seen.elapsed:.1f} s  {pace}",
    )
    return table


def overall(workers: Sequence[WorkerProgress]) -> float:
    """Give the percent of the whole: the mean of the workers."""
    return sum(worker.percent for worker in workers) / len(workers) if workers else 0.0


def report_tables(report: Report, *, history: bool = True) -> list[RenderableType]:
    """Draw the durations of the phases, the partitions and, if wanted, every move of every machine."""
    drawings: list[RenderableType] = [phase_table(report.workers, report.phases), _partition_table(report)]
    if history:
        named = [("master", report.history)] + [(f"worker {one.index}", one.history) for one in report.workers]
        drawings.append(history_table(named))
    return drawings


def summary_line(report: Report) -> str:
    """Say in a line what was sorted, how fast, in how much memory."""
    rate = size_of(report.size / report.seconds) if report.seconds else "-"
    peak = sum(worker.peak_memory for worker in report.workers)
    return (
        f"{report.records:,} records, {size_of(report.size)}, in {report.seconds:.2f} s ({rate}/s), "
        f"{len(report.partitions)} partitions, workers' peak memory {size_of(peak)} together"
    )


def phase_table(workers: Iterable[WorkerReport], whole: Mapping[str, float] | None = None) -> Table:
    """Draw how long each phase took, for every worker and, where it is known, for the whole."""
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


def history_table(named: Iterable[tuple[str, Iterable[Moved]]]) -> Table:
    """Draw every move, with the seconds since the machine's first."""
    table = _table("State history", "machine", "time (UTC)", "", "from", "event", "to", "reason")
    for name, moves in named:
        began: float | None = None
        for move in moves:
            began = move.timestamp if began is None else began
            at = f"{datetime.fromtimestamp(move.timestamp, UTC):%H:%M:%S.%f}"[:-3]
            since = f"+{move.timestamp - began:.2f} s"
            target = Text(move.to_state, style=STYLES.get(move.to_state, ""))
            table.add_row(name, at, since, move.from_state, move.event, target, Text(move.reason))
    return table


def size_of(size: float) -> str:
    """Write bytes with the unit that fits."""
    for unit in UNITS:
        if size < THOUSAND or unit == UNITS[-1]:
            break
        size /= THOUSAND
    return f"{size:.0f} {unit}" if unit == UNITS[0] else f"{size:.2f} {unit}"


def time_of(seconds: float) -> str:
    """Write how long something takes, as exactly as a person wants to know."""
    if seconds >= HOUR:
        return f"{seconds // HOUR:.0f} h {seconds % HOUR // MINUTE:.0f} min"
    return f"{seconds // MINUTE:.0f} min {seconds % MINUTE:.0f} s" if seconds >= MINUTE else f"{seconds:.0f} s"


def _worker_row(worker: WorkerProgress) -> Sequence[RenderableType]:
    state = Text(worker.state, style=STYLES.get(worker.state, "cyan"))
    return _name(worker), state, _bar(worker.percent), f"{worker.percent:3.0f} %", Text(worker.message)


def _name(worker: WorkerProgress) -> str:
    """Name a worker by its place, which it has only when the master has given it one."""
    return "worker" if worker.index < 0 else f"worker {worker.index}"


def _bar(percent: float) -> ProgressBar:
    return ProgressBar(total=100, completed=percent, width=BAR)


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
