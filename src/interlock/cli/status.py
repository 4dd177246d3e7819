"""`interlock status`: the overview of the installation, and one task.

Invariant: nothing is inferred: everything shown of a task, including the reason why it waits, is stored in its row. A
page that leaves rows out says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any
from uuid import UUID

import typer

from interlock.cli.app_context import run_with_app
from interlock.cli.format import (
    format_duration,
    format_fields,
    format_json,
    format_period,
    format_relative_time,
    format_table,
    format_time_and_distance,
    print_note,
)
from interlock.client.app import Interlock
from interlock.errors import UnknownTaskError
from interlock.lifecycle import TASK_ROW, JobState, TaskRowState
from interlock.store.jobs import read_jobs
from interlock.store.leader import read_clock
from interlock.store.schedules import ScheduleState
from interlock.store.stats import (
    LimitUse,
    Overview,
    StateCount,
    estimated_jobs,
    jobs_by_namespace,
    overview_document,
    read_overview,
    read_task_details,
)
from interlock.store.tasks import MAX_CRASHES
from interlock.store.workers import LiveProcess

WATCH_INTERVAL_S = 1.0
CLEAR_SCREEN = "\x1b[H\x1b[2J"
ESTIMATE_NOTE = "\n~ is an estimate from a sample of the table; --all counts every row"
MAX_ROWS = 20  # of each table of the overview; --json has them all
LIMIT_HEADER = ("limit", "rule", "running", "starts", "weight", "cost", "waiting", "next", "override")
SCHEDULE_HEADER = ("schedule", "task or workflow", "rhythm", "next", "last", "state")
EVENT_SYSTEMS = ("handlers", "orchestration")
EVENT_COUNTERS = ("received", "dispatched", "completed", "failed", "mismatched", "fallback_hits")
TIMES = ("run_at", "lease_expires_at", "cancel_requested_at", "created_at", "started_at", "finished_at")
PLAIN_FIELDS = (
    *("priority", "attempt", "event", "worker_id", "cost", "job_id", "step"),
    *("limit_keys", "limit_weight", "unique_key", "request_id", "correlation_id"),
)
JSON_FIELDS = ("backoff", "input", "checkpoint", "output")

Look = Callable[[Interlock], Awaitable[tuple[str, bool]]]  # the text to print, and whether it can still change


def status(
    context: typer.Context,
    task_id: Annotated[
        str | None, typer.Argument(help="A task; the overview unless given.", metavar="ID", show_default=False)
    ] = None,
    in_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch one line each time.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat every second until the task has ended or Ctrl-C is pressed.")
    ] = False,
    whole: Annotated[bool, typer.Option("--all", help="Count every task and job; slow with millions of them.")] = False,
) -> None:
    """Show the overview of the installation, or one task: its state, progress and result, and why it waits.

    Examples: `interlock status`, `interlock status --watch`, `interlock status ID --json`.
    """
    pretty = not watch
    look: Look = (
        partial(_look_at_queue, in_json=in_json, whole=whole, pretty=pretty)
        if task_id is None
        else partial(_look_at_task, task_id=task_id, in_json=in_json, pretty=pretty)
    )
    if not watch:
        typer.echo(run_with_app(Interlock(config=context.obj), look)[0])
        return
    clear = CLEAR_SCREEN if typer.get_text_stream("stdout").isatty() and not in_json else ""
    try:
        run_with_app(Interlock(config=context.obj), partial(_watch, look=look, clear=clear))
    except KeyboardInterrupt:  # the normal end of --watch
        print_note("")


async def _unknown_task(app: Interlock, id_: UUID, message: str) -> UnknownTaskError:
    """Build the error of an unknown task; a job's id gets a hint."""
    async with app.connection() as connection:
        is_job = bool(await read_jobs(connection, [id_]))
    return UnknownTaskError(f"{id_} is a job, not a task: `interlock jobs show {id_}`" if is_job else message)


def format_overview(seen: Overview) -> str:
    """Format the overview as one page."""
    leader = (
        None
        if seen.leader is None
        else f"{seen.leader.holder}, for another {format_duration(seen.leader.expires_at - seen.now)}"
    )
    head = format_fields((("schema", seen.schema), ("leader", leader or "none: is a worker running?")))
    parts = [head, _tasks(seen), *_jobs(seen)]
    parts += _section("paused", ("namespace", "since", "by", "reason"), _paused(seen))
    parts += _section("limits", LIMIT_HEADER, map(limit_row, seen.limits))
    parts += _section(
        "schedules",
        SCHEDULE_HEADER,
        (schedule_row(schedule, seen.now) for schedule in seen.schedules),
    )
    parts += _section("processes", ("process", "role", "state", "namespaces", "seen"), _processes(seen))
    parts += _section("event systems", ("process", "events", *EVENT_COUNTERS), _event_counters(seen.processes))
    return "\n\n".join(parts)


def _tasks(seen: Overview) -> str:
    """Format the tasks of each namespace by state."""
    counted: dict[str, dict[str, StateCount]] = {}
    for count in seen.counts:
        counted.setdefault(count.namespace, {})[count.state] = count
    if not counted:
        return "no tasks"
    rows = (
        (name, *(_count(counts, state) for state in TaskRowState), _oldest(counts, seen.now))
        for name, counts in sorted(counted.items())
    )
    table = format_table(("namespace", *map(str, TaskRowState), "oldest due"), rows)
    return table + (ESTIMATE_NOTE if any(count.is_estimate for count in seen.counts) else "")


def _jobs(seen: Overview) -> list[str]:
    """Format the jobs of each namespace by state, and the queue of step results."""
    counted = jobs_by_namespace(seen)
    queue = seen.orchestration
    if not counted and not queue["waiting"] and not queue["archived"]:
        return []
    parts = []
    if counted:
        estimated = estimated_jobs(seen)
        rows = (
            (name, *(_shown(counts.get(state, 0), state in estimated.get(name, ())) for state in JobState))
            for name, counts in counted.items()
        )
        parts.append(format_table(("jobs of", *map(str, JobState)), rows) + (ESTIMATE_NOTE if estimated else ""))

    oldest = "" if queue["oldest_age"] is None else f", the oldest for {queue['oldest_age']:.1f} s"
    orchestration = (
        ("orchestrators", sum(process.role == "orchestrator" for process in seen.processes)),
        ("step results", f"{queue['waiting']} wait for an orchestrator{oldest}"),
        ("dead letters", f"{queue['archived']}, which failed repeatedly" if queue["archived"] else None),
    )
    return [*parts, format_fields(orchestration)]


def _processes(seen: Overview) -> Iterable[Sequence[object]]:
    for process in seen.processes:
        heard = None if process.heartbeat_at is None else format_relative_time(process.heartbeat_at, seen.now)
        yield process.id, process.role, process.status, ", ".join(process.namespaces), heard


def _event_counters(processes: Iterable[LiveProcess]) -> Iterable[Sequence[object]]:
    for process in processes:
        for system in EVENT_SYSTEMS:
            if system in process.statistics:
                figures = process.statistics[system]
                yield process.id, system, *(figures.get(kind, "-") for kind in EVENT_COUNTERS)


def _count(counts: Mapping[str, StateCount], state: str) -> str:
    count = counts.get(state)
    return "0" if count is None else _shown(count.tasks, count.is_estimate)


def _shown(count: int, is_estimate: bool) -> str:
    return f"~{count}" if is_estimate else str(count)


def _oldest(counts: Mapping[str, StateCount], now: datetime) -> str | None:
    due = counts[TaskRowState.PENDING].oldest_due_at if TaskRowState.PENDING in counts else None
    return None if due is None else format_duration(now - due)


def _section(name: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    every = list(rows)
    if not every:
        return []
    written = format_table(header, every[:MAX_ROWS])
    more = len(every) - MAX_ROWS
    return [f"{written}\n… and {more} more {name}; --json shows them all" if more > 0 else written]


def _paused(seen: Overview) -> Iterable[Sequence[object]]:
    return ((p.name, format_relative_time(p.paused_at, seen.now), p.paused_by, p.reason) for p in seen.paused)


def limit_row(limit: LimitUse) -> Sequence[object]:
    """Return the columns of a limit: key, rule, running, starts, weight, cost, waiting, next, override."""
    per = "" if limit.period is None else f" per {format_period(limit.period)}"

    def use(used: float, most: float | None, unit: str = per) -> str:
        return "" if most is None else f"{used:g} of {most:g}{unit}"

    rule = "none" if limit.rule is None else "" if limit.rule == limit.key else limit.rule
    running = use(limit.taken, limit.max_running, "")
    starts, weight = use(limit.starts, limit.max_starts), use(limit.weight, limit.max_weight)
    waiting = f"{limit.waiting}+" if limit.is_bound else limit.waiting
    next_at = "" if limit.next_at is None else f"{limit.next_at:%Y-%m-%d %H:%M:%S %Z}"
    cost, override = use(limit.cost, limit.max_cost), _format_override(limit)
    return limit.key, rule, running, starts, weight, cost, waiting, next_at, override


def _format_override(limit: LimitUse) -> str:
    """Say who overrides the declared rule, and its bounds."""
    if limit.overridden_at is None:
        return ""
    if limit.declared is None:
        return f"by {limit.overridden_by}, none declared"
    bounds = (f"{name} {value:g}" for name, value in sorted(limit.declared.items()) if value is not None)
    return f"by {limit.overridden_by}, declared: {', '.join(bounds)}"


def schedule_row(schedule: ScheduleState, now: datetime) -> Sequence[object]:
    """Return the columns of a schedule: name, what it makes, rhythm, next and last tick, state."""
    every = "" if schedule.every is None else f"every {format_period(schedule.every)}"
    rhythm = every or f"{schedule.cron} {schedule.timezone}"
    last = None if schedule.last_at is None else format_relative_time(schedule.last_at, now)
    state = schedule.paused or "active"
    state += f"; failed: {schedule.error}" if schedule.error else ""
    following = "" if schedule.paused_at else format_relative_time(schedule.next_at, now)
    version = "" if schedule.version is None else f" {schedule.version}"
    made = schedule.type if schedule.workflow is None else f"workflow {schedule.workflow}{version}"
    return schedule.name, made, rhythm, following, last, state


async def _watch(app: Interlock, *, look: Look, clear: str) -> None:
    more = True
    while more:
        text, more = await look(app)
        typer.echo(clear + text)
        if more:
            await asyncio.sleep(WATCH_INTERVAL_S)


async def _look_at_queue(app: Interlock, *, in_json: bool, whole: bool, pretty: bool) -> tuple[str, bool]:
    async with app.connection() as connection:
        seen = await read_overview(connection, whole=whole)
    return format_json(overview_document(seen), pretty=pretty) if in_json else format_overview(seen), True


async def _look_at_task(app: Interlock, *, task_id: str, in_json: bool, pretty: bool) -> tuple[str, bool]:
    id_ = app.handle(task_id).id
    async with app.connection() as connection:
        task = await read_task_details(connection, id_)
        now = await read_clock(connection)
    if task is None:
        raise await _unknown_task(app, id_, f"there is no task {id_}: not stored, not committed yet, or pruned")
    waits = _waits(task, now)
    text = format_json({**task, "waits": waits}, pretty=pretty) if in_json else _format_task(task, waits, now)
    return text, task["state"] not in TASK_ROW.final


def _waits(task: dict[str, Any], now: datetime) -> str | None:
    """Return why a task does not run, from its stored reason."""
    if task["state"] == TaskRowState.WAITING:
        return task["reason"] or "without a stored reason"
    if task["state"] != TaskRowState.PENDING:
        return None
    if task["run_at"] > now:
        return f"until it is due, {format_relative_time(task['run_at'], now)}"
    return f"for a free worker that takes {task['type']} from namespace {task['namespace']}"


def _format_task(task: dict[str, Any], waits: str | None, now: datetime) -> str:
    timeout = task["timeout_seconds"]
    shown = {
        **{name: task[name] for name in ("id", "type", "namespace", "state")},
        "waits": waits,
        "reason": None if task["reason"] == waits else task["reason"],
        "progress": _progress(task["progress"]),
        "tries": f"{task['tries']} of {task['max_tries']}",
        "crashes": f"{task['crashes']} of {MAX_CRASHES} in a row" if task["crashes"] else None,
        **{name: task[name] for name in PLAIN_FIELDS},
        "timeout": None if timeout is None else f"{timeout:g} s",
        "tags": None if task["tags"] is None else ", ".join(task["tags"]),
        "callback": format_callback(task["callback_url"], task["callback"]),
        **{name: format_time_and_distance(task[name], now) for name in TIMES},
        **{name: _document(task[name]) for name in JSON_FIELDS},
        "error": _error(task["error"]),
    }
    return format_fields((name.replace("_", " "), value) for name, value in shown.items())


def _document(value: Any) -> str | None:
    return None if value is None else format_json(value, pretty=False)


def _progress(progress: Any) -> str | None:
    if not isinstance(progress, dict):
        return _document(progress)
    parts = dict(progress)
    fraction, message = parts.pop("fraction", None), parts.pop("message", None)
    shown = [f"{fraction:.0%}"] if isinstance(fraction, int | float) else []
    shown += [str(message)] if message else []
    shown += [format_json(parts, pretty=False)] if parts else []
    return " ".join(shown) or None


def format_callback(url: str | None, webhook: dict[str, Any] | None) -> str | None:
    """Format the URL of a webhook, and why it is not delivered yet."""
    if webhook is None:
        return url
    how = "given up" if webhook["given_up_at"] else f"next try at {webhook['next_try_at']}"
    why = f": {webhook['error']}" if webhook["error"] else ""
    return f"{url}\nnot delivered after {webhook['tries']} tries, {how}{why}"


def _error(error: Any) -> str | None:
    if not isinstance(error, dict):
        return _document(error)
    message = ": ".join(str(error[part]) for part in ("type", "message") if error.get(part))
    trace = str(error.get("traceback") or "").strip()
    return f"{message}\n{trace}" if trace else message
