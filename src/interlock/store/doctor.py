"""Health checks of an installation, for `interlock doctor`.

Invariant: the checks only read, and need no more privileges than a worker has. A finding says what was found, how many,
and what to do about it.
"""

from __future__ import annotations

from datetime import UTC, timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import MigrationError
from interlock.lifecycle import JobState, SupervisedWorkerState
from interlock.postgres.connection import transaction
from interlock.postgres.migrate import applied_migrations, known_migrations, pending_migrations, schema_version
from interlock.postgres.query import load_statements, run
from interlock.store.explain import read_queue
from interlock.store.leader import read_clock
from interlock.store.schedules import list_schedules
from interlock.store.step_results import read_orchestration_failures
from interlock.store.webhooks import list_given_up_webhooks
from interlock.store.workers import list_live_workers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.store.workers import LiveProcess

DOCTOR = load_statements("doctor")
MAX_DUE_TASKS = 10_000  # due tasks that are examined per namespace
MAX_FINDINGS = 10  # of one kind, each on a line of its own
STALL_THRESHOLD = timedelta(minutes=1)  # after which work that another process should do counts as stalled
VANISHED_AFTER = timedelta(minutes=5)  # without a heartbeat
VANISHED_REPORTED_FOR = timedelta(days=1)


class Finding(NamedTuple):
    """One finding: its subject, whether it needs attention, what was found and what to do."""

    about: str
    needs_attention: bool
    found: str
    todo: str | None = None
    details: dict[str, Any] = {}  # noqa: RUF012 - the default of a NamedTuple; it is never changed


def _ok(about: str, found: str, **details: Any) -> Finding:
    return Finding(about, needs_attention=False, found=found, details=details)


def _problem(about: str, found: str, todo: str, **details: Any) -> Finding:
    return Finding(about, needs_attention=True, found=found, todo=todo, details=details)


async def diagnose(connection: Connection, *, now: datetime | None = None) -> list[Finding]:
    """Run all checks; without the schema of this release, only those of the database and the schema."""
    version = connection.info.server_version
    findings = [_ok("database", f"PostgreSQL {version // 10_000}.{version % 10_000}")]
    schema = await _check_schema(connection)
    findings.append(schema)
    if schema.needs_attention:
        return findings
    async with transaction(connection):
        moment = await read_clock(connection, now=now)
        processes = await list_live_workers(connection, now=now)
        due = await run(connection, DOCTOR["read_due_types"], {"each": MAX_DUE_TASKS, "now": now})
        jobs = await run(connection, DOCTOR["read_oldest_jobs"], {})
        return [
            *findings,
            *await _check_queue(connection),
            *await _check_results(connection, moment, now),
            *await _check_locks(connection, moment, now),
            *_check_processes(processes, due, jobs),
            *_check_handlers(processes, due, moment),
            *_check_leaks(processes),
            *_check_jobs(jobs, moment),
            *await _check_leases(connection, moment, now),
            *await _check_vanished(connection, moment, now),
            *await _check_limits(connection),
            *await _check_schedules(connection),
            *await _check_webhooks(connection),
        ]


async def _check_schema(connection: Connection) -> Finding:
    applied = await applied_migrations(connection)
    try:
        missing = pending_migrations(known_migrations(), applied)
    except MigrationError as error:
        return _problem("schema", str(error), "use the release that fits, or `interlock migrate`")
    if missing:
        found = f"{len(missing)} migrations of this release are missing, from {missing[0].name} on"
        return _problem("schema", found, "run `interlock migrate`", missing=[migration.name for migration in missing])
    return _ok("schema", f"{schema_version(applied)}, that of this release")


async def _check_queue(connection: Connection) -> list[Finding]:
    queue = await read_queue(connection)
    if not queue["installed"] or not queue["there"]:
        missing = f"its queue {queue['name']!r}" if queue["installed"] else "PGMQ"
        todo = "run `interlock migrate` as a role that may create the schema pgmq"
        return [_problem("queue", f"{missing} is missing; tasks work without it, jobs do not", todo, **queue)]
    oldest = queue["oldest_age"] or 0
    found = f"{queue['name']}: {_number(queue['waiting'], 'message')}"
    found += f", the oldest for {oldest:.0f} s" if queue["waiting"] else ""
    if oldest > STALL_THRESHOLD.total_seconds():
        first = _problem("queue", found, "check that orchestrators run, and read their logs", **queue)
    else:
        first = _ok("queue", found, **queue)
    return [first, *(await _check_failed_messages(connection, queue["archived"]) if queue["archived"] else [])]


async def _check_failed_messages(connection: Connection, count: int) -> list[Finding]:
    """Report messages that failed repeatedly. One without a job blocks nothing, and retention deletes it."""
    todo = "fix the cause; `interlock jobs replay` sends it again at once"
    findings = []
    for row in await read_orchestration_failures(connection, limit=MAX_FINDINGS):
        at = f"{row['failed_at'].astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        if row["job_id"] is None:
            found = f"message {row['msg_id']}, which names no job, at {at}: {row['error']}; retention deletes it"
            findings.append(_ok("dead letter", found, **row))
        else:
            found = f"message {row['msg_id']} of job {row['job_id']}, at {at}: {row['error']}"
            findings.append(_problem("dead letter", found, todo, **row))
    if count > len(findings):
        more = f"{_number(count - len(findings), 'message')} more"
        is_wrong = findings[-1].needs_attention  # those that name no job come last
        findings.append(_problem("dead letter", more, todo) if is_wrong else _ok("dead letter", more))
    return findings


async def _check_results(connection: Connection, moment: datetime, now: datetime | None) -> list[Finding]:
    (row,) = await run(connection, DOCTOR["count_unprocessed_results"], {"threshold": STALL_THRESHOLD, "now": now})
    if not row["steps"]:
        return []
    count = f"{_number(row['steps'], 'step')} of {_number(row['jobs'], 'job')}"
    found = f"{count} ended without advancing their jobs, the first {_seconds(moment - row['oldest_at'])} ago"
    return [
        _problem(
            "results", found, "check that orchestrators run; `interlock jobs replay` sends the results again", **row
        )
    ]


async def _check_locks(connection: Connection, moment: datetime, now: datetime | None) -> list[Finding]:
    """Report long transactions that lock jobs or tasks and so block others."""
    parameters = {"threshold": STALL_THRESHOLD, "limit": MAX_FINDINGS, "now": now}
    return [
        _problem(
            "locks",
            f"a transaction of {row['role']} ({row['application'] or 'unnamed'}, {row['state']}) has been open for "
            f"{_seconds(moment - row['since'])} and locks rows of {' and '.join(row['relations'])}, which are blocked",
            f"end that transaction, or its session: select pg_terminate_backend({row['pid']})",
            **row,
        )
        for row in await run(connection, DOCTOR["read_long_transactions"], parameters)
    ]


def _check_processes(
    processes: list[LiveProcess], due: list[dict[str, Any]], jobs: list[dict[str, Any]]
) -> list[Finding]:
    """Report live workers and orchestrators; none is a problem only while there is work."""
    return [
        _check_role("worker", processes, is_needed=bool(due or jobs)),
        _check_role("orchestrator", processes, is_needed=bool(jobs)),
    ]


def _check_role(role: str, processes: Iterable[LiveProcess], *, is_needed: bool) -> Finding:
    live = [process for process in processes if process.role == role]
    active = sum(process.status == SupervisedWorkerState.RUNNING for process in live)
    ids = [process.id for process in live]
    if active or not is_needed:
        paused = f", {len(live) - active} more paused" if len(live) > active else ""
        return _ok(f"{role}s", f"{active} live{paused}", ids=ids)
    if live:
        return _problem(f"{role}s", f"none is active: {len(live)} paused, while there is work", "resume them", ids=ids)
    return _problem(f"{role}s", "none is live, while there is work", f"run `interlock {role}`")


def _check_handlers(processes: Iterable[LiveProcess], due: Iterable[dict[str, Any]], now: datetime) -> list[Finding]:
    """Report due tasks whose namespace or type no live worker serves."""
    types: dict[str, set[str]] = {}
    for process in processes:
        if process.role == "worker" and process.status == SupervisedWorkerState.RUNNING:
            for namespace in process.namespaces:
                types.setdefault(namespace, set()).update(process.types)
    findings = []
    for namespace, group in groupby(due, key=itemgetter("namespace")):
        rows = list(group)
        if namespace in types:
            findings += [
                _problem(
                    "handler",
                    f"{row['type']} in {namespace}: {_due([row], now)}, and no live worker has a handler for it",
                    "start a worker whose app defines it, or cancel the tasks",
                    **row,
                )
                for row in rows
                if row["type"] not in types[namespace]
            ]
        else:
            found = f"{namespace}: {_due(rows, now)}, and no live worker serves it"
            todo = f"start a worker with --namespaces {namespace}"
            findings.append(_problem("namespace", found, todo, namespace=namespace))
    return findings


def _check_leaks(processes: Iterable[LiveProcess]) -> list[Finding]:
    """Report handlers that run on although their attempts were settled."""
    return [
        _problem(
            "leaked handlers",
            f"{process.id}: {_number(sum(leaked.values()), 'handler')} ignored being stopped and still "
            f"{'runs' if sum(leaked.values()) == 1 else 'run'}: "
            + ", ".join(f"{type_} ({count})" for type_, count in sorted(leaked.items())),
            "make the handler end when it is cancelled (the log event handler_leaked says where it is), and restart "
            "the worker",
            worker=process.id,
            types=leaked,
        )
        for process in processes
        if (leaked := process.statistics.get("leaked"))
    ]


def _due(rows: list[dict[str, Any]], now: datetime) -> str:
    tasks = sum(row["tasks"] for row in rows)
    count = f"{tasks} or more tasks" if tasks >= MAX_DUE_TASKS else _number(tasks, "task")
    return f"{count} due, the oldest for {_seconds(now - min(row['oldest_at'] for row in rows))}"


def _check_jobs(jobs: Iterable[dict[str, Any]], now: datetime) -> list[Finding]:
    """Report unfinished jobs by state; one that does not start is a problem."""
    findings = []
    for row in jobs:
        age = now - row["created_at"]
        why = f": {row['reason']}" if row["reason"] else ""
        found = f"{_number(row['jobs'], 'job')} {row['status']}, the oldest is {row['id']}, {_seconds(age)} old{why}"
        if row["status"] != JobState.RUNNING and age > STALL_THRESHOLD:
            findings.append(_problem("jobs", found, f"`interlock explain {row['id']}`", **row))
        else:
            findings.append(_ok("jobs", found, **row))
    return findings


async def _check_leases(connection: Connection, moment: datetime, now: datetime | None) -> list[Finding]:
    (row,) = await run(connection, DOCTOR["count_unrecovered_tasks"], {"threshold": STALL_THRESHOLD, "now": now})
    if not row["tasks"]:
        return [_ok("leases", "all expired leases were recovered")]
    found = f"{_number(row['tasks'], 'lease')} expired and no task was recovered, the first "
    found += f"{_seconds(moment - row['oldest_at'])} ago"
    return [_problem("leases", found, "check that a worker runs: any live one recovers them", **row)]


async def _check_vanished(connection: Connection, moment: datetime, now: datetime | None) -> list[Finding]:
    parameters = {
        "threshold": VANISHED_AFTER,
        "reported_for": VANISHED_REPORTED_FOR,
        "limit": MAX_FINDINGS,
        "now": now,
    }
    return [
        _problem(
            "vanished",
            f"{row['role']} {row['id']} has sent no heartbeat for {_seconds(moment - row['seen_until'])} and did not "
            "deregister",
            "find out why its process ended; its tasks were recovered",
            **row,
        )
        for row in await run(connection, DOCTOR["read_vanished_workers"], parameters)
    ]


async def _check_limits(connection: Connection) -> list[Finding]:
    """Report limit keys of unfinished tasks for which no limit is declared: steps, or tasks of a deleted limit."""
    todo = "declare a limit with app.limit(...) or `interlock limits set`"
    return [
        _problem("limit", f"no limit is declared for the key {row['key']}; its tasks run without one", todo, **row)
        for row in await run(connection, DOCTOR["read_undeclared_keys"], {"limit": MAX_FINDINGS})
    ]


async def _check_schedules(connection: Connection) -> list[Finding]:
    schedules = await list_schedules(connection)
    broken = [schedule for schedule in schedules if schedule.error]
    if not broken:
        return [_ok("schedules", f"{len(schedules)}, none with an error")] if schedules else []
    return [
        _problem(
            "schedule",
            f"{schedule.name} {'is stopped' if schedule.paused_at else 'failed at its last tick'}: {schedule.error}",
            "correct its declaration and restart the workers" if schedule.paused_at else "fix the cause",
            name=schedule.name,
        )
        for schedule in broken
    ]


async def _check_webhooks(connection: Connection) -> list[Finding]:
    (row,) = await run(connection, DOCTOR["count_given_up_webhooks"], {})
    if not row["callbacks"]:
        return []
    latest = await list_given_up_webhooks(connection, limit=MAX_FINDINGS)
    found = f"{_number(row['callbacks'], 'webhook')} given up, the latest error: {row['error']}"
    todo = "check that the receiver answers, then `interlock webhooks retry`"
    return [_problem("callbacks", found, todo, **row, first=[notice._asdict() for notice in latest])]


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _seconds(time: timedelta) -> str:
    return f"{max(time.total_seconds(), 0):.0f} s"
