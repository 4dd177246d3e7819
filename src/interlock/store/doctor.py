"""Looks an installation over: what is there, what is missing, and what waits for somebody to do something.

Invariant: looking changes nothing, and needs no more rights than a worker has. A finding says what, how many, and what
to do.
"""

from __future__ import annotations

from datetime import UTC, timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import MigrationError
from interlock.postgres.connection import transaction
from interlock.postgres.migrate import applied_migrations, known_migrations, pending_migrations, schema_version
from interlock.postgres.query import load_statements, run
from interlock.store.callbacks import list_given_up_callbacks
from interlock.store.explain import read_queue
from interlock.store.leader import read_clock
from interlock.store.schedules import list_schedules
from interlock.store.step_results import read_orchestration_failures
from interlock.store.workers import list_live_workers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.store.workers import LiveProcess

DOCTOR = load_statements("doctor")
EACH = 10_000  # due tasks of a namespace that are looked at
LISTED = 10  # of a kind, each with a line of its own
PATIENCE = timedelta(minutes=1)  # with what another process should do by itself
SILENCE = timedelta(minutes=5)  # after which a process that said nothing is gone
MEMORY = timedelta(days=1)  # for which it is told that one is gone


class Finding(NamedTuple):
    """One line: about what, whether somebody has to do something, what was found, and what there is to do."""

    about: str
    needs_attention: bool
    found: str
    todo: str | None = None
    details: dict[str, Any] = {}  # noqa: RUF012 - a default of a tuple, which nobody changes


def _fine(about: str, found: str, **details: Any) -> Finding:
    return Finding(about, needs_attention=False, found=found, details=details)


def _wrong(about: str, found: str, todo: str, **details: Any) -> Finding:
    return Finding(about, needs_attention=True, found=found, todo=todo, details=details)


async def diagnose(connection: Connection, *, now: datetime | None = None) -> list[Finding]:
    """Look everything over; without the schema of this release, only so far."""
    version = connection.info.server_version
    findings = [_fine("database", f"PostgreSQL {version // 10_000}.{version % 10_000}")]
    schema = await _schema(connection)
    findings.append(schema)
    if schema.needs_attention:
        return findings
    async with transaction(connection):
        moment = await read_clock(connection, now=now)
        processes = await list_live_workers(connection, now=now)
        due = await run(connection, DOCTOR["read_due_types"], {"each": EACH, "now": now})
        jobs = await run(connection, DOCTOR["read_oldest_jobs"], {})
        return [
            *findings,
            *await _queue(connection),
            *await _unheard(connection, moment, now),
            *await _holders(connection, moment, now),
            *_processes(processes, due, jobs),
            *_unserved(processes, due, moment),
            *_jobs(jobs, moment),
            *await _leases(connection, moment, now),
            *await _vanished(connection, moment, now),
            *await _schedules(connection),
            *await _callbacks(connection),
        ]


async def _schema(connection: Connection) -> Finding:
    applied = await applied_migrations(connection)
    try:
        missing = pending_migrations(known_migrations(), applied)
    except MigrationError as error:
        return _wrong("schema", str(error), "use the release that fits, or `interlock migrate`")
    if missing:
        found = f"{len(missing)} migrations of this release are missing, from {missing[0].name} on"
        return _wrong("schema", found, "run `interlock migrate`", missing=[migration.name for migration in missing])
    return _fine("schema", f"{schema_version(applied)}, that of this release")


async def _queue(connection: Connection) -> list[Finding]:
    queue = await read_queue(connection)
    if not queue["installed"] or not queue["there"]:
        missing = f"its queue {queue['name']!r}" if queue["installed"] else "PGMQ"
        todo = "run `interlock migrate` as a role that may create the schema pgmq"
        return [_wrong("queue", f"{missing} is missing; tasks work without it, jobs do not", todo, **queue)]
    oldest = queue["oldest_age"] or 0
    found = f"{queue['name']}: {_number(queue['waiting'], 'message')}"
    found += f", the oldest for {oldest:.0f} s" if queue["waiting"] else ""
    if oldest > PATIENCE.total_seconds():
        first = _wrong("queue", found, "see that orchestrators run, and what their logs say", **queue)
    else:
        first = _fine("queue", found, **queue)
    return [first, *(await _set_aside(connection, queue["archived"]) if queue["archived"] else [])]


async def _set_aside(connection: Connection, count: int) -> list[Finding]:
    """Tell of messages that failed again and again. One that names no job holds up nobody, and goes with time."""
    todo = "remove the cause; `interlock jobs replay` sends it again at once"
    findings = []
    for row in await read_orchestration_failures(connection, limit=LISTED):
        at = f"{row['failed_at'].astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        if row["job_id"] is None:
            found = f"message {row['msg_id']}, which names no job, at {at}: {row['error']}; retention deletes it"
            findings.append(_fine("set aside", found, **row))
        else:
            found = f"message {row['msg_id']} of job {row['job_id']}, at {at}: {row['error']}"
            findings.append(_wrong("set aside", found, todo, **row))
    if count > len(findings):
        more = f"{_number(count - len(findings), 'message')} more"
        is_wrong = findings[-1].needs_attention  # those that name no job come last
        findings.append(_wrong("set aside", more, todo) if is_wrong else _fine("set aside", more))
    return findings


async def _unheard(connection: Connection, moment: datetime, now: datetime | None) -> list[Finding]:
    (row,) = await run(connection, DOCTOR["count_unprocessed_results"], {"patience": PATIENCE, "now": now})
    if not row["steps"]:
        return []
    found = f"{_number(row['steps'], 'step')} of {_number(row['jobs'], 'job')} ended and led to nothing, the first "
    found += f"{_seconds(moment - row['oldest_at'])} ago"
    return [_wrong("results", found, "see that orchestrators run; `interlock jobs replay` sends them again", **row)]


async def _holders(connection: Connection, moment: datetime, now: datetime | None) -> list[Finding]:
    """Tell of transactions that hold jobs or tasks for so long that others stand still for it."""
    asked = {"patience": PATIENCE, "limit": LISTED, "now": now}
    return [
        _wrong(
            "locks",
            f"a transaction of {row['role']} ({row['application'] or 'unnamed'}, {row['state']}) has been open for "
            f"{_seconds(moment - row['since'])} and has locked or written {' and '.join(row['relations'])}: they stand "
            "still",
            f"let it end, or end it: select pg_terminate_backend({row['pid']})",
            **row,
        )
        for row in await run(connection, DOCTOR["read_long_transactions"], asked)
    ]


def _processes(processes: list[LiveProcess], due: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> list[Finding]:
    """Say who is there; nobody is wrong only while there is something to do."""
    return [
        _present("worker", processes, is_needed=bool(due or jobs)),
        _present("orchestrator", processes, is_needed=bool(jobs)),
    ]


def _present(role: str, processes: Iterable[LiveProcess], *, is_needed: bool) -> Finding:
    live = [process for process in processes if process.role == role]
    active = sum(process.status == "RUNNING" for process in live)
    ids = [process.id for process in live]
    if active or not is_needed:
        paused = f", {len(live) - active} more paused" if len(live) > active else ""
        return _fine(f"{role}s", f"{active} live{paused}", ids=ids)
    if live:
        return _wrong(f"{role}s", f"none is active: {len(live)} paused, while there is work", "resume them", ids=ids)
    return _wrong(f"{role}s", "none is live, while there is work", f"run `interlock {role}`")


def _unserved(processes: Iterable[LiveProcess], due: Iterable[dict[str, Any]], now: datetime) -> list[Finding]:
    """Compare what is due with what the live workers serve."""
    types: dict[str, set[str]] = {}
    for process in processes:
        if process.role == "worker" and process.status == "RUNNING":
            for namespace in process.namespaces:
                types.setdefault(namespace, set()).update(process.types)
    findings = []
    for namespace, group in groupby(due, key=itemgetter("namespace")):
        rows = list(group)
        if namespace in types:
            findings += [_unhandled(row, now) for row in rows if row["type"] not in types[namespace]]
        else:
            found = f"{namespace}: {_due(rows, now)}, and no live worker serves it"
            todo = f"start a worker with --namespaces {namespace}"
            findings.append(_wrong("namespace", found, todo, namespace=namespace))
    return findings


def _unhandled(row: dict[str, Any], now: datetime) -> Finding:
    found = f"{row['type']} in {row['namespace']}: {_due([row], now)}, and no live worker has it"
    return _wrong("handler", found, "start a worker whose app has it, or cancel them", **row)


def _due(rows: list[dict[str, Any]], now: datetime) -> str:
    tasks = sum(row["tasks"] for row in rows)
    count = f"{tasks} or more tasks" if tasks >= EACH else _number(tasks, "task")
    return f"{count} due, the oldest for {_seconds(now - min(row['oldest_at'] for row in rows))}"


def _jobs(jobs: Iterable[dict[str, Any]], now: datetime) -> list[Finding]:
    """Tell of open jobs; one that has not started for a while is worth a look."""
    findings = []
    for row in jobs:
        age = now - row["created_at"]
        why = f": {row['reason']}" if row["reason"] else ""
        found = f"{_number(row['jobs'], 'job')} {row['status']}, the oldest is {row['id']}, {_seconds(age)} old{why}"
        if row["status"] != "RUNNING" and age > PATIENCE:
            findings.append(_wrong("jobs", found, f"`interlock explain {row['id']}`", **row))
        else:
            findings.append(_fine("jobs", found, **row))
    return findings


async def _leases(connection: Connection, moment: datetime, now: datetime | None) -> list[Finding]:
    (row,) = await run(connection, DOCTOR["count_unrecovered_tasks"], {"patience": PATIENCE, "now": now})
    if not row["tasks"]:
        return [_fine("leases", "all that ran out were recovered")]
    found = f"{_number(row['tasks'], 'lease')} ran out and nobody recovered the task, the first "
    found += f"{_seconds(moment - row['oldest_at'])} ago"
    return [_wrong("leases", found, "see that a worker runs: any live one recovers them", **row)]


async def _vanished(connection: Connection, moment: datetime, now: datetime | None) -> list[Finding]:
    asked = {"patience": SILENCE, "memory": MEMORY, "limit": LISTED, "now": now}
    return [
        _wrong(
            "vanished",
            f"{row['role']} {row['id']} was last heard of {_seconds(moment - row['seen_until'])} ago, and did not say "
            "that it stops",
            "see what became of its process; its tasks were put back",
            **row,
        )
        for row in await run(connection, DOCTOR["read_vanished_workers"], asked)
    ]


async def _schedules(connection: Connection) -> list[Finding]:
    schedules = await list_schedules(connection)
    broken = [schedule for schedule in schedules if schedule.error]
    if not broken:
        return [_fine("schedules", f"{len(schedules)}, none with an error")] if schedules else []
    return [
        _wrong(
            "schedule",
            f"{schedule.name} {'is stopped' if schedule.paused_at else 'failed when it fired last'}: {schedule.error}",
            "correct its declaration and restart the workers" if schedule.paused_at else "remove the cause",
            name=schedule.name,
        )
        for schedule in broken
    ]


async def _callbacks(connection: Connection) -> list[Finding]:
    (row,) = await run(connection, DOCTOR["count_given_up_callbacks"], {})
    if not row["callbacks"]:
        return []
    latest = await list_given_up_callbacks(connection, limit=LISTED)
    found = f"{_number(row['callbacks'], 'notice')} given up, the latest for: {row['error']}"
    todo = "see that the receiver answers; the notices are in interlock.callbacks"
    return [_wrong("callbacks", found, todo, **row, first=[notice._asdict() for notice in latest])]


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _seconds(time: timedelta) -> str:
    return f"{max(time.total_seconds(), 0):.0f} s"
