"""Views of a job: a live table in a terminal, lines elsewhere, and a timeline at the end.

Invariant: output that is not a terminal gets whole lines only, each written once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol, Self

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from interlock.cli.demo.timeline import LOST
from interlock.lifecycle import TaskRowState

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console, RenderableType

    from interlock.cli.demo.processes import DemoProcess, DemoProcesses
    from interlock.cli.demo.timeline import JobSnapshot, JobTimeline, StepAttempt
    from interlock.client.job_handle import StepStatus

STYLES = {
    TaskRowState.WAITING: "dim",
    TaskRowState.PENDING: "blue",
    TaskRowState.RUNNING: "bold cyan",
    TaskRowState.DONE: "green",
    TaskRowState.ERROR: "bold red",
    TaskRowState.CANCELED: "magenta",
    TaskRowState.SKIPPED: "dim",
    LOST: "bold red",
}
BAR_CHARACTERS = ("━", "=")  # Unicode, ASCII
MIN_BAR_WIDTH, MAX_BAR_WIDTH = 10, 40
OTHER_COLUMNS_WIDTH = 46  # without the names of the steps

StepState = tuple[str, int, str | None]


class View(Protocol):
    """Shows a job while it runs."""

    def __enter__(self) -> Self:
        """Start to show."""

    def __exit__(self, *_: object) -> None:
        """Stop to show."""

    def show(self, snapshot: JobSnapshot, processes: DemoProcesses) -> None:
        """Show a snapshot."""

    def print_event(self, text: str) -> None:
        """Print a line about an event."""


def make_view(console: Console) -> View:
    """Return a live view for a terminal, a line view otherwise."""
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else LineView(console)


class _Stopwatch:
    """Formats the time since the view was created."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()

    def __str__(self) -> str:
        return f"{time.monotonic() - self._started_at:5.2f} s"


class LineView:
    """Prints a line for each change of a step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._clock = _Stopwatch()
        self._seen: dict[str, StepState] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, snapshot: JobSnapshot, processes: DemoProcesses) -> None:
        """Print a line for each step that has changed."""
        del processes
        for step in snapshot.steps:
            now = step.state, step.attempt, step.held_by
            before = self._seen.get(step.step, ("waiting", 0, None))
            if now != before and now[:2] != ("pending", 0):  # a pending step starts at once: not worth a line
                self._console.print(
                    f"{self._clock}  {escape(f'{step.step:12}')} {_describe_step(step)}", soft_wrap=True
                )
            self._seen[step.step] = now

    def print_event(self, text: str) -> None:
        """Print a line."""
        self._console.print(f"{self._clock}  {text}", soft_wrap=True)


class LiveView:
    """A table that is redrawn in place; events stay above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._clock = _Stopwatch()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, snapshot: JobSnapshot, processes: DemoProcesses) -> None:
        """Redraw the table."""
        parts = (
            self._make_title(snapshot),
            _make_step_table(snapshot, processes),
            Text(),
            *(_describe_worker(worker, snapshot) for worker in processes.workers),
        )
        self._live.update(Group(*parts), refresh=True)

    def print_event(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(f"{self._clock}  {text}")

    def _make_title(self, snapshot: JobSnapshot) -> RenderableType:
        ended = sum(step.finished_at is not None for step in snapshot.steps)
        title = Table.grid(padding=(0, 2))
        bar = ProgressBar(len(snapshot.steps), ended, width=30)
        text = f"{ended} of {len(snapshot.steps)} steps have ended"
        title.add_row(str(self._clock), f"[bold]{snapshot.job.status}[/bold]", bar, text)
        return title


def _describe_step(step: StepStatus) -> str:
    state = _styled(step.state)
    if step.state == TaskRowState.RUNNING:
        return f"{state} on {short_name(step.worker_id)}, attempt {step.attempt}"
    if step.state == TaskRowState.DONE:
        return f"{state} by {short_name(step.worker_id or _settled_by(step)) or 'the orchestrator'}"
    return f"{state}: {escape(step.reason)}" if step.reason else state


def _settled_by(step: StepStatus) -> str:
    metadata: dict[str, Any] = (step.output or {}).get("metadata") or {}
    return str(metadata.get("worker_id") or "")


def _styled(state: str) -> str:
    style = STYLES.get(state)
    return f"[{style}]{state}[/{style}]" if style else state


def _make_step_table(snapshot: JobSnapshot, processes: DemoProcesses) -> Table:
    table = Table("step", "state", "worker", "attempt", "", box=None, header_style="bold", pad_edge=False)
    for step in snapshot.steps:
        name = f"  {step.step}" if step.kind == "part" else step.step
        worker = short_name(step.worker_id or _settled_by(step))
        number = f"[bold yellow]{step.attempt}[/bold yellow]" if step.attempt > 1 else str(step.attempt or "")
        table.add_row(escape(name), _styled(step.state), worker, number, _step_note(step, processes))
    return table


def _step_note(step: StepStatus, processes: DemoProcesses) -> str:
    if step.state == TaskRowState.RUNNING:
        worker = processes.find_worker(step.worker_id)
        return "[red]until the lease of the killed worker expires[/red]" if worker and worker.killed else ""
    return f"[dim]{escape(step.reason)}[/dim]" if step.reason else ""


def _describe_worker(worker: DemoProcess, snapshot: JobSnapshot) -> Text:
    held = [
        step.step for step in snapshot.steps if step.state == TaskRowState.RUNNING and worker.has_id(step.worker_id)
    ]
    activity = "[bold red]killed[/bold red]" if worker.killed else escape(", ".join(held)) or "[dim]idle[/dim]"
    return Text.from_markup(f"{worker.name} [dim](pid {worker.pid})[/dim]  {activity}")


def make_timeline_table(console: Console, timeline: JobTimeline) -> Table:
    """Make a table of all attempts, each with a bar for its time."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("step", "state", "worker"):
        table.add_column(name, no_wrap=True)
    for name in ("attempt", "start", "took"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("")
    names = max(len(attempt.step.step) for attempt in timeline.attempts)
    width = max(MIN_BAR_WIDTH, min(MAX_BAR_WIDTH, console.width - OTHER_COLUMNS_WIDTH - names))
    character = BAR_CHARACTERS[console.options.ascii_only]
    for attempt in timeline.attempts:
        table.add_row(*_attempt_cells(attempt, timeline), _make_bar(attempt, timeline, width, character))
    return table


def _attempt_cells(attempt: StepAttempt, timeline: JobTimeline) -> list[str]:
    cells = [escape(attempt.step.step), _styled(attempt.state), escape(short_name(attempt.worker))]
    if attempt.started_at is None:
        return [*cells, "", "", ""]
    took = "" if attempt.ended_at is None else f"{seconds_between(attempt.started_at, attempt.ended_at):.2f} s"
    return [*cells, str(attempt.number), f"{seconds_between(timeline.job.created_at, attempt.started_at):.2f} s", took]


def _make_bar(attempt: StepAttempt, timeline: JobTimeline, width: int, character: str) -> str:
    job = timeline.job
    if attempt.started_at is None or attempt.ended_at is None:
        return f"[dim]{escape(attempt.step.reason or '')}[/dim]"
    scale = width / max(seconds_between(job.created_at, job.completed_at or attempt.ended_at), 0.001)
    begin = round(seconds_between(job.created_at, attempt.started_at) * scale)
    length = max(round(seconds_between(attempt.started_at, attempt.ended_at) * scale), 1)
    style = STYLES.get(attempt.state, "none")
    return f"{' ' * min(begin, width - 1)}[{style}]{character * length}[/{style}]"


def seconds_between(begin: datetime, end: datetime) -> float:
    """Return the seconds from one time to another."""
    return (end - begin).total_seconds()


def short_name(id_: str | None) -> str:
    """Return the name of a worker: its id without process id and random part."""
    return (id_ or "").rsplit("-", 2)[0]
