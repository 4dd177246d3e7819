"""`interlock status` and `interlock history`: how the queue is, what one task is about, and how it came there.

Invariant: nothing is guessed. What is told of a task is what the database stores of it, the reason for which it waits
included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
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
    format_relative_time,
    format_table,
    format_time,
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
    jobs_by_namespace,
    overview_document,
    read_overview,
    read_task_details,
)
from interlock.store.workers import LiveProcess

# SECTION cli/overview
# The whole queue on one page: what `interlock status` prints without a task.
#
# Invariant: what is left out is said to be left out.

UNFINISHED = ("waiting", "pending", "running")
OPEN = (JobState.SUBMITTED, JobState.PENDING, JobState.RUNNING)
EVENTS = ("received", "dispatched", "completed", "failed", "mismatched", "fallback_hits")
SHOWN = 20  # limits and schedules; --json has them all


def overview(seen: Overview) -> str:
    """Write the page."""
    leader = (
        None
        if seen.leader is None
        else f"{seen.leader.holder}, for another {format_duration(seen.leader.expires_at - seen.now)}"
    )
    head = format_fields((("schema", seen.schema), ("leader", leader or "none: is a worker running?")))
    parts = [head, _tasks(seen), *_jobs(seen)]
    parts += _section("paused", ("namespace", "since", "by", "reason"), _paused(seen))
    parts += _section("limits", ("limit", "running", "starts", "waiting"), map(_limit, seen.limits))
    parts += _section(
        "schedules",
        ("schedule", "type", "rhythm", "next", "last", "state"),
        (_schedule(schedule, seen.now) for schedule in seen.schedules),
    )
    parts += _section("processes", ("process", "role", "state", "namespaces", "seen"), _processes(seen))
    parts += _section("event systems", ("process", "events", *EVENTS), _events(seen.processes))
    return "\n\n".join(parts)


def _tasks(seen: Overview) -> str:
    """Count the tasks of each namespace by state."""
    states = [str(state) for state in TaskRowState if seen.complete or state in UNFINISHED]
    counted: dict[str, dict[str, StateCount]] = {}
    for count in seen.counts:
        counted.setdefault(count.namespace, {})[count.state] = count
    left_out = "" if seen.complete else "\nended tasks are not counted; --all counts them"
    if not counted:
        return "no tasks" + left_out
    rows = (
        (name, *(_count(counts, state) for state in states), _oldest(counts, seen.now))
        for name, counts in sorted(counted.items())
    )
    return format_table(("namespace", *states, "oldest due"), rows) + left_out


def _jobs(seen: Overview) -> list[str]:
    """Count the jobs of each namespace by state, and what waits for an orchestrator."""
    counted = jobs_by_namespace(seen)
    queue = seen.orchestration
    if not counted and not queue["waiting"] and not queue["archived"]:
        return []
    return [*_counted_jobs(counted, complete=seen.complete), _orchestration(seen)]


def _counted_jobs(counted: Mapping[str, Mapping[str, int]], *, complete: bool) -> list[str]:
    if not counted:
        return []
    states = [str(state) for state in JobState if complete or state in OPEN]
    rows = ((name, *(counts.get(state, 0) for state in states)) for name, counts in counted.items())
    return [format_table(("jobs of", *states), rows)]


def _orchestration(seen: Overview) -> str:
    queue = seen.orchestration
    oldest = "" if queue["oldest_age"] is None else f", the oldest for {queue['oldest_age']:.1f} s"
    return format_fields(
        (
            ("orchestrators", sum(process.role == "orchestrator" for process in seen.processes)),
            ("step results", f"{queue['waiting']} wait for an orchestrator{oldest}"),
            ("set aside", f"{queue['archived']}, which failed repeatedly" if queue["archived"] else None),
        )
    )


def _processes(seen: Overview) -> Iterable[Sequence[object]]:
    for process in seen.processes:
        heard = None if process.heartbeat_at is None else format_relative_time(process.heartbeat_at, seen.now)
        yield process.id, process.role, process.status, ", ".join(process.namespaces), heard


def _events(processes: Iterable[LiveProcess]) -> Iterable[Sequence[object]]:
    for process in processes:
        for system, figures in sorted(process.statistics.items()):
            yield process.id, system, *(figures.get(kind, "-") for kind in EVENTS)


def _count(counts: Mapping[str, StateCount], state: str) -> int:
    return counts[state].tasks if state in counts else 0


def _oldest(counts: Mapping[str, StateCount], now: datetime) -> str | None:
    due = counts["pending"].oldest_due_at if "pending" in counts else None
    return None if due is None else format_duration(now - due)


def _section(name: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    every = list(rows)
    if not every:
        return []
    written = format_table(header, every[:SHOWN])
    more = len(every) - SHOWN
    return [f"{written}\n… and {more} more {name}; --json shows them all" if more > 0 else written]


def _paused(seen: Overview) -> Iterable[Sequence[object]]:
    return ((p.name, format_relative_time(p.paused_at, seen.now), p.paused_by, p.reason) for p in seen.paused)


def _limit(limit: LimitUse) -> Sequence[object]:
    running = "" if limit.max_running is None else f"{limit.taken} of {limit.max_running}"
    starts = (
        "" if limit.period is None else f"{limit.starts} of {limit.max_starts} per {limit.period.total_seconds():g} s"
    )
    return limit.key, running, starts, limit.waiting


def _schedule(schedule: ScheduleState, now: datetime) -> Sequence[object]:
    every = "" if schedule.every is None else f"every {schedule.every.total_seconds():g} s"
    rhythm = every or f"{schedule.cron} {schedule.timezone}"
    last = None if schedule.last_at is None else format_relative_time(schedule.last_at, now)
    state = "paused" if schedule.paused_at else "active"
    told = f"{state}: {schedule.error}" if schedule.error else state
    following = "" if schedule.paused_at else format_relative_time(schedule.next_at, now)
    return schedule.name, schedule.type, rhythm, following, last, told


INTERVAL = 1.0  # seconds between two looks of --watch
CLEAR = "\x1b[H\x1b[2J"
TIMES = ("run_at", "lease_expires_at", "cancel_requested_at", "created_at", "started_at", "finished_at")
PLAIN = (
    *("priority", "attempt", "event", "worker_id", "cost", "job_id", "step"),
    *("limit_key", "unique_key", "request_id", "correlation_id"),
)
DOCUMENTS = ("backoff", "input", "checkpoint", "output")

Look = Callable[[Interlock], Awaitable[tuple[str, bool]]]  # what to print, and whether there is more to come


def status(
    context: typer.Context,
    task_id: Annotated[
        str | None, typer.Argument(help="A task; the whole queue unless given.", metavar="ID", show_default=False)
    ] = None,
    in_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch a line each time.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again every second, until the task has ended or Ctrl-C is pressed.")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--all", help="Count ended tasks too, even where there are millions of them.")
    ] = False,
) -> None:
    """Show how the queue is, or everything about one task: its progress, its result, and why it waits."""
    pretty = not watch
    look: Look = (
        partial(_look_at_queue, in_json=in_json, whole=whole, pretty=pretty)
        if task_id is None
        else partial(_look_at_task, task_id=task_id, in_json=in_json, pretty=pretty)
    )
    if not watch:
        typer.echo(run_with_app(Interlock(config=context.obj), look)[0])
        return
    clear = CLEAR if typer.get_text_stream("stdout").isatty() and not in_json else ""
    try:
        run_with_app(Interlock(config=context.obj), partial(_watch, look=look, clear=clear))
    except KeyboardInterrupt:  # the way to end it
        print_note("")


def history(
    context: typer.Context,
    task_id: Annotated[str, typer.Argument(help="The task.", metavar="ID")],
    in_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every move that a task made, oldest first, as the database recorded it."""

    async def read(app: Interlock) -> str:
        handle = app.handle(task_id)
        records = await handle.history()
        if not records:
            told = f"there is no record of a task {handle.id}: never stored, or dropped by retention"
            raise await _unknown(app, handle.id, told)
        if in_json:
            return format_json([asdict(record) for record in records])
        header = ("time (UTC)", "from", "event", "to", "attempt", "actor", "reason")
        return format_table(
            header,
            (
                (format_time(r.recorded_at), r.from_state, r.event, r.to_state, r.attempt, r.actor, r.reason)
                for r in records
            ),
        )

    typer.echo(run_with_app(Interlock(config=context.obj), read))


async def _unknown(app: Interlock, id_: UUID, told: str) -> UnknownTaskError:
    """Say that there is no such task, or that it is a job."""
    async with app.connection() as connection:
        is_job = bool(await read_jobs(connection, [id_]))
    return UnknownTaskError(f"that is a job, and no task: `interlock jobs show {id_}`" if is_job else told)


async def _watch(app: Interlock, *, look: Look, clear: str) -> None:
    more = True
    while more:
        text, more = await look(app)
        typer.echo(clear + text)
        if more:
            await asyncio.sleep(INTERVAL)


async def _look_at_queue(app: Interlock, *, in_json: bool, whole: bool, pretty: bool) -> tuple[str, bool]:
    async with app.connection() as connection:
        seen = await read_overview(connection, whole=whole)
    return format_json(overview_document(seen), pretty=pretty) if in_json else overview(seen), True


async def _look_at_task(app: Interlock, *, task_id: str, in_json: bool, pretty: bool) -> tuple[str, bool]:
    id_ = app.handle(task_id).id
    async with app.connection() as connection:
        task = await read_task_details(connection, id_)
        now = await read_clock(connection)
    if task is None:
        raise await _unknown(app, id_, f"there is no task {id_}: not stored, not committed yet, or pruned")
    waits = _waits(task, now)
    text = format_json({**task, "waits": waits}, pretty=pretty) if in_json else _described(task, waits, now)
    return text, task["state"] not in TASK_ROW.final


def _waits(task: dict[str, Any], now: datetime) -> str | None:
    """Say why a task does not run, in the words that are stored with it."""
    if task["state"] == "waiting":
        return task["reason"] or "for no reason that is stored"
    if task["state"] != "pending":
        return None
    if task["run_at"] > now:
        return f"until it is due, {format_relative_time(task['run_at'], now)}"
    return f"for a free worker that takes {task['type']} from namespace {task['namespace']}"


def _described(task: dict[str, Any], waits: str | None, now: datetime) -> str:
    timeout = task["timeout_seconds"]
    shown = {
        **{name: task[name] for name in ("id", "type", "namespace", "state")},
        "waits": waits,
        "reason": None if task["reason"] == waits else task["reason"],
        "progress": _progress(task["progress"]),
        "tries": f"{task['tries']} of {task['max_tries']}",
        **{name: task[name] for name in PLAIN},
        "timeout": None if timeout is None else f"{timeout:g} s",
        "tags": None if task["tags"] is None else ", ".join(task["tags"]),
        "callback": _callback(task),
        **{name: _time(task[name], now) for name in TIMES},
        **{name: _document(task[name]) for name in DOCUMENTS},
        "error": _error(task["error"]),
    }
    return format_fields((name.replace("_", " "), value) for name, value in shown.items())


def _time(at: datetime | None, now: datetime) -> str | None:
    return None if at is None else f"{format_time(at)} UTC, {format_relative_time(at, now)}"


def _document(value: Any) -> str | None:
    return None if value is None else format_json(value, pretty=False)


def _progress(said: Any) -> str | None:
    if not isinstance(said, dict):
        return _document(said)
    parts = dict(said)
    fraction, message = parts.pop("fraction", None), parts.pop("message", None)
    shown = [f"{fraction:.0%}"] if isinstance(fraction, int | float) else []
    shown += [str(message)] if message else []
    shown += [format_json(parts, pretty=False)] if parts else []
    return " ".join(shown) or None


def _callback(task: dict[str, Any]) -> str | None:
    notice = task["callback"]
    if notice is None:
        return None if task["callback_url"] is None else str(task["callback_url"])
    how = "given up" if notice["given_up_at"] else f"next try at {notice['next_try_at']}"
    why = f": {notice['error']}" if notice["error"] else ""
    return f"{task['callback_url']}\nnot delivered after {notice['tries']} tries, {how}{why}"


def _error(error: Any) -> str | None:
    if not isinstance(error, dict):
        return _document(error)
    told = ": ".join(str(error[part]) for part in ("type", "message") if error.get(part))
    trace = str(error.get("traceback") or "").strip()
    return f"{told}\n{trace}" if trace else told
