"""The screen of `interlock top`: four tables, a cursor in one of them, and an overlay for help and explanations.

Invariant: the cursor stays on the same row when the figures change. Nothing is drawn beyond the size of the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from interlock.cli.format import escape_control_characters, format_duration, format_relative_time
from interlock.lifecycle import SupervisedWorkerState, TaskRowState

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import RenderableType

    from interlock.store.top import NamespaceFigures, TopSnapshot, WorkerFigures

HELP = (
    "↑ ↓ or j k     select a row",
    "Tab            the next table: namespaces, workers, running tasks, jobs",
    "p              pause the namespace or the worker",
    "r              resume it",
    "c              cancel the running task or the job, after a question",
    "e or Enter     explain what is selected: why it does not move, and the command that helps",
    "q              quit",
    "?              this help; Esc closes it",
    "",
    "Rates are moves per second over the last 5 seconds. wait: from due to claimed; run: from claimed to ended.",
)
KEYS_LINE = "↑↓ select  Tab table  p pause  r resume  c cancel  e explain  ? help  q quit"
MIN_HEIGHT_OF_ALL = 24  # lines; a smaller terminal shows the table with the cursor alone
HEAD_LINES, TABLE_LINES, FOOT_LINES = 2, 3, 2  # TABLE_LINES: title, header, an empty line
MIN_ROWS = 2


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: what it stands for, and its cells."""

    kind: str
    id: str
    cells: tuple[str, ...]
    style: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One table of the screen; columns that begin with > are aligned right."""

    name: str
    columns: tuple[str, ...]
    rows: Callable[[TopSnapshot], list[Row]]


def _latency(pair: tuple[float, float] | None) -> tuple[str, str]:
    return ("", "") if pair is None else (_seconds(pair[0]), _seconds(pair[1]))


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.0f} min"  # noqa: PLR2004 - seconds


def _rate(value: float) -> str:
    return "" if value == 0 else f"{value:.1f}" if value < 100 else f"{value:.0f}"  # noqa: PLR2004 - per second


def _namespace_rows(seen: TopSnapshot) -> list[Row]:
    return [Row("namespace", found.name, _namespace_cells(found, seen.now), _style(found)) for found in seen.namespaces]


def _style(found: NamespaceFigures) -> str:
    return "yellow" if found.paused_by else "red" if found.failed else ""


def _namespace_cells(found: NamespaceFigures, now: datetime) -> tuple[str, ...]:
    depth = found.depth
    oldest = "" if found.oldest_due_at is None else format_duration(now - found.oldest_due_at)
    name = f"{found.name} (paused by {found.paused_by})" if found.paused_by else found.name
    counts = (
        f"{'~' if state in found.estimated else ''}{depth.get(state, 0)}"
        for state in (TaskRowState.PENDING, TaskRowState.RUNNING, TaskRowState.WAITING)
    )
    rates = map(_rate, (found.arrived, found.ended, found.failed))
    return name, *counts, *rates, *_latency(found.waited), *_latency(found.ran), oldest


def _worker_rows(seen: TopSnapshot) -> list[Row]:
    return [Row("worker", worker.id, _worker_cells(worker, seen.now), _worker_style(worker)) for worker in seen.workers]


def _worker_style(worker: WorkerFigures) -> str:
    return "" if worker.status == SupervisedWorkerState.RUNNING else "yellow"


def _worker_cells(worker: WorkerFigures, now: datetime) -> tuple[str, ...]:
    slots = str(worker.running) if worker.slots is None else f"{worker.running}/{worker.slots}"
    beat = "" if worker.heartbeat_at is None else format_relative_time(worker.heartbeat_at, now)
    tasks = "" if worker.role == "orchestrator" else slots
    return worker.id, worker.role, worker.status, tasks, beat, ", ".join(worker.namespaces)


def _task_rows(seen: TopSnapshot) -> list[Row]:
    return [
        Row("task", str(task["id"]), _task_cells(task, seen.now), _task_style(task, seen.now)) for task in seen.tasks
    ]


def _task_style(task: dict[str, Any], now: datetime) -> str:
    if task["lease_expires_at"] <= now:
        return "red"
    return "yellow" if task["cancel_requested_at"] is not None else ""


def _task_cells(task: dict[str, Any], now: datetime) -> tuple[str, ...]:
    runs = "" if task["started_at"] is None else format_duration(now - task["started_at"])
    lease = format_relative_time(task["lease_expires_at"], now)
    name = task["step"] or task["type"]
    tries = f"{task['tries']}/{task['max_tries']}"
    return str(task["id"]), name, task["namespace"], tries, runs, lease, task["worker_id"] or ""


def _job_rows(seen: TopSnapshot) -> list[Row]:
    return [Row("job", str(job["id"]), _job_cells(job, seen.now)) for job in seen.jobs]


def _job_cells(job: dict[str, Any], now: datetime) -> tuple[str, ...]:
    workflow = "" if job["workflow"] is None else f"{job['workflow']} {job['version']}"
    status = job["status"] if job["ending"] is None else f"{job['status']}, becomes {job['ending']}"
    age = format_duration(now - job["created_at"])
    return str(job["id"]), workflow, status, str(job["open_steps"]), age, job["reason"] or ""


PANELS = (
    Panel(
        "namespaces",
        (
            *("namespace", ">pending", ">running", ">waiting", ">in/s", ">out/s", ">failed/s"),
            *(">wait p50", ">p99", ">run p50", ">p99", ">oldest due"),
        ),
        _namespace_rows,
    ),
    Panel("workers", ("process", "role", "state", ">tasks", "heartbeat", "namespaces"), _worker_rows),
    Panel("running tasks", ("task", "name", "namespace", ">try", ">runs for", "lease", "worker"), _task_rows),
    Panel("jobs", ("job", "workflow", "state", ">open steps", ">age", "reason"), _job_rows),
)


@dataclass(slots=True)
class TopView:
    """The contents of the screen: figures, cursor, a message or a question, and the overlay."""

    seen: TopSnapshot | None = None
    focus: int = 0
    selected: dict[int, str] = field(default_factory=dict)  # id of the row under the cursor, by panel
    message: str = ""
    overlay: tuple[str, ...] | None = None
    scrolled: int = 0  # lines of the overlay above the screen

    def rows(self, place: int) -> list[Row]:
        """Return the rows of a table."""
        return [] if self.seen is None else PANELS[place].rows(self.seen)

    def current(self) -> Row | None:
        """Return the row under the cursor."""
        rows = self.rows(self.focus)
        return rows[self._cursor(rows, self.focus)] if rows else None

    def _cursor(self, rows: Sequence[Row], place: int) -> int:
        wanted = self.selected.get(place)
        return next((index for index, row in enumerate(rows) if row.id == wanted), 0)

    def move(self, by: int) -> None:
        """Move the cursor, or scroll the overlay."""
        if self.overlay is not None:
            self.scrolled = max(0, min(self.scrolled + by, len(self.overlay) - 1))
            return
        rows = self.rows(self.focus)
        if rows:
            index = max(0, min(self._cursor(rows, self.focus) + by, len(rows) - 1))
            self.selected[self.focus] = rows[index].id

    def next_panel(self, by: int) -> None:
        """Move the cursor to another table."""
        self.focus = (self.focus + by) % len(PANELS)

    def show(self, lines: Sequence[str]) -> None:
        """Open the overlay."""
        self.overlay, self.scrolled = tuple(lines), 0

    def render(self, width: int, height: int) -> RenderableType:
        """Draw the screen in this size."""
        room = height - HEAD_LINES - FOOT_LINES
        if self.overlay is not None:
            body: list[RenderableType] = self._render_overlay(width, room)
        elif self.seen is None:
            body = [_line("reading …")]
        elif height < MIN_HEIGHT_OF_ALL:
            body = [*self._render_panel(self.focus, max(room - TABLE_LINES, 1))]
        else:
            body = [
                part for place in range(len(PANELS)) for part in self._render_panel(place, self._share(place, room))
            ]
        foot = _line(self.message, style="bold yellow") if self.message else _line(KEYS_LINE, style="dim")
        return Group(*self._render_head(), *body, foot)

    def _share(self, place: int, room: int) -> int:
        """Divide the rows of the screen: each table gets what it needs of its part, that with the cursor the rest."""
        every = room - TABLE_LINES * len(PANELS)
        part = max(every // (len(PANELS) + 1), MIN_ROWS)
        needed = [max(min(len(self.rows(other)), part), 1) for other in range(len(PANELS))]
        if place != self.focus:
            return needed[place]
        return max(every - (sum(needed) - needed[place]), MIN_ROWS)

    def _render_head(self) -> list[RenderableType]:
        if self.seen is None:
            return [_line("interlock top", style="bold"), _line("")]
        jobs = ", ".join(f"{count} {status}" for status, count in self.seen.jobs_by_state.items()) or "none open"
        figures = self.seen.namespaces
        text = (
            f"interlock top  {self.seen.now:%Y-%m-%d %H:%M:%S} UTC  "
            f"in {sum(f.arrived for f in figures):.1f}/s  out {sum(f.ended for f in figures):.1f}/s  "
            f"failed {sum(f.failed for f in figures):.1f}/s  jobs: {jobs}"
        )
        return [_line(text, style="bold"), _line("")]

    def _render_panel(self, place: int, most: int) -> list[RenderableType]:
        panel, rows = PANELS[place], self.rows(place)
        is_focused = place == self.focus
        cursor = self._cursor(rows, place)
        first = max(0, min(cursor - most + 1, len(rows) - most)) if len(rows) > most else 0
        table = Table(box=None, expand=True, padding=(0, 2, 0, 0), header_style="bold")
        for column in panel.columns:
            justify = "right" if column.startswith(">") else "left"
            table.add_column(column.lstrip(">"), justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
        for index, row in enumerate(rows[first : first + most], start=first):
            style = "reverse" if is_focused and index == cursor else row.style
            table.add_row(*(Text(escape_control_characters(cell)) for cell in row.cells), style=style)
        left = len(rows) - most
        more = f", {left} more" if left > 0 else ""
        title = f"{'▸ ' if is_focused else '  '}{panel.name} ({len(rows)}{more})"
        return [_line(title, style="bold cyan" if is_focused else "cyan"), table, _line("")]

    def _render_overlay(self, width: int, room: int) -> list[RenderableType]:
        lines = [part for line in self.overlay or () for part in _wrap(line, width)]
        shown = lines[self.scrolled : self.scrolled + room]
        return [_line(line) for line in shown]


def _line(text: str, style: str = "") -> Text:
    return Text(escape_control_characters(text), style=style, no_wrap=True, overflow="ellipsis")


def _wrap(line: str, width: int) -> list[str]:
    """Break a long line; the parts after the first keep its indentation, so that a command stays readable."""
    indent = line[: len(line) - len(line.lstrip())]
    parts = []
    rest = line
    while len(rest) > width > len(indent) + 1:
        place = rest.rfind(" ", len(indent) + 1, width)
        place = width if place <= len(indent) else place
        parts.append(rest[:place])
        rest = indent + rest[place:].lstrip()
    return [*parts, rest]
