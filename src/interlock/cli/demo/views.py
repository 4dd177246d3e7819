"""How the demo shows a job: live in a terminal, as lines elsewhere, and in the end as a timeline.

Invariant: what is not a terminal gets whole lines only, each written once.
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

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console, RenderableType

    from interlock.cli.demo.processes import Crew, Member
    from interlock.cli.demo.workflow import Attempt, Snapshot, Story
    from interlock.client.job_handle import StepStatus

LOST = "lost"
STYLES = {
    "waiting": "dim",
    "pending": "blue",
    "running": "bold cyan",
    "done": "green",
    "error": "bold red",
    "canceled": "magenta",
    "skipped": "dim",
    LOST: "bold red",
}
BAR, LEAST_BAR, MOST_BAR = ("━", "="), 10, 40


Seen = tuple[str, int, str | None]


class View(Protocol):
    """Shows a job while it runs."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(self, *_: object) -> None:
        """End."""

    def show(self, seen: Snapshot, crew: Crew) -> None:
        """Show what was just seen."""

    def tell(self, text: str) -> None:
        """Say that something has happened."""


def view_on(console: Console) -> View:
    """Give the view that a console can show."""
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else LineView(console)


class _Clock:
    """Tells how long the view has been there."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __str__(self) -> str:
        return f"{time.monotonic() - self._began:5.2f} s"


class LineView:
    """Says in a line whenever a step has changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._clock = _Clock()
        self._seen: dict[str, Seen] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, seen: Snapshot, crew: Crew) -> None:
        """Write a line for each step that is not as it was."""
        del crew
        for step in seen.steps:
            now = step.state, step.attempt, step.held_by
            before = self._seen.get(step.step, ("waiting", 0, None))
            if now != before and now[:2] != ("pending", 0):  # that it is ready is no news where others start at once
                self._console.print(f"{self._clock}  {escape(f'{step.step:9}')} {_changed(step)}", soft_wrap=True)
            self._seen[step.step] = now

    def tell(self, text: str) -> None:
        """Write one more line."""
        self._console.print(f"{self._clock}  {text}", soft_wrap=True)


class LiveView:
    """A table that changes in its place; what is told stays above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._clock = _Clock()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, seen: Snapshot, crew: Crew) -> None:
        """Draw the table anew."""
        parts = (self._title(seen), _steps(seen, crew), Text(), *(_worker(member, seen) for member in crew.workers))
        self._live.update(Group(*parts), refresh=True)

    def tell(self, text: str) -> None:
        """Write a line above the table."""
        self._console.print(f"{self._clock}  {text}")

    def _title(self, seen: Snapshot) -> RenderableType:
        ended = sum(step.finished_at is not None for step in seen.steps)
        title = Table.grid(padding=(0, 2))
        bar = ProgressBar(len(seen.steps), ended, width=30)
        told = f"{ended} of {len(seen.steps)} steps have ended"
        title.add_row(str(self._clock), f"[bold]{seen.job.status}[/bold]", bar, told)
        return title


def _changed(step: StepStatus) -> str:
    state = _styled(step.state)
    if step.state == "running":
        return f"{state} on {short(step.worker_id)}, attempt {step.attempt}"
    if step.state == "done":
        return f"{state} by {short(step.worker_id or _settled_by(step))}"
    return f"{state}: {escape(step.reason)}" if step.reason else state


def _settled_by(step: StepStatus) -> str:
    metadata: dict[str, Any] = (step.output or {}).get("metadata") or {}
    return str(metadata.get("worker_id") or "")


def _styled(state: str) -> str:
    style = STYLES.get(state)
    return f"[{style}]{state}[/{style}]" if style else state


def _steps(seen: Snapshot, crew: Crew) -> Table:
    table = Table("step", "state", "worker", "attempt", "", box=None, header_style="bold", pad_edge=False)
    for step in seen.steps:
        name = f"  {step.step}" if step.kind == "part" else step.step
        worker = short(step.worker_id or _settled_by(step))
        number = f"[bold yellow]{step.attempt}[/bold yellow]" if step.attempt > 1 else str(step.attempt or "")
        table.add_row(escape(name), _styled(step.state), worker, number, _note(step, crew))
    return table


def _note(step: StepStatus, crew: Crew) -> str:
    if step.state == "running":
        member = crew.member(step.worker_id)
        return "[red]until the lease of a dead worker runs out[/red]" if member and member.killed else ""
    return f"[dim]{escape(step.reason)}[/dim]" if step.reason else ""


def _worker(member: Member, seen: Snapshot) -> Text:
    held = [step.step for step in seen.steps if step.state == "running" and member.is_called(step.worker_id)]
    does = "[bold red]killed[/bold red]" if member.killed else escape(", ".join(held)) or "[dim]idle[/dim]"
    return Text.from_markup(f"{member.name} [dim](pid {member.pid})[/dim]  {does}")


def timeline(console: Console, story: Story) -> Table:
    """Draw every attempt at every step, with a bar for the time that it took."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("step", "state", "worker"):
        table.add_column(name, no_wrap=True)
    for name in ("attempt", "start", "took"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("")
    width = max(LEAST_BAR, min(MOST_BAR, console.width - 62))
    mark = BAR[console.options.ascii_only]
    for attempt in story.attempts:
        table.add_row(*_times(attempt, story), _bar(attempt, story, width, mark))
    return table


def _times(attempt: Attempt, story: Story) -> list[str]:
    named = [escape(attempt.step.step), _styled(attempt.state), escape(short(attempt.worker))]
    if attempt.started_at is None:
        return [*named, "", "", ""]
    took = "" if attempt.ended_at is None else f"{since(attempt.started_at, attempt.ended_at):.2f} s"
    return [*named, str(attempt.number), f"{since(story.job.created_at, attempt.started_at):.2f} s", took]


def _bar(attempt: Attempt, story: Story, width: int, mark: str) -> str:
    job = story.job
    if attempt.started_at is None or attempt.ended_at is None:
        return f"[dim]{escape(attempt.step.reason or '')}[/dim]"
    scale = width / max(since(job.created_at, job.completed_at or attempt.ended_at), 0.001)
    begin = round(since(job.created_at, attempt.started_at) * scale)
    length = max(round(since(attempt.started_at, attempt.ended_at) * scale), 1)
    style = STYLES.get(attempt.state, "none")
    return f"{' ' * min(begin, width - 1)}[{style}]{mark * length}[/{style}]"


def since(begin: datetime, end: datetime) -> float:
    """Give the seconds from one time to another."""
    return (end - begin).total_seconds()


def short(id_: str | None) -> str:
    """Give the name of a worker, which is the part of its id that people know it by."""
    return (id_ or "").rsplit("-", 2)[0]
