"""Checks of the running system: workers, orchestrators, due work, the queue, unstarted jobs, long transactions."""

from __future__ import annotations

from datetime import UTC, timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import JobState, SupervisedWorkerState
from interlock.postgres.query import load_statements, run
from interlock.store.doctor.findings import make_finding, number
from interlock.store.doctor.rows import STALL_THRESHOLD, VANISHED_AFTER
from interlock.store.step_results import read_orchestration_failures
from interlock.store.webhooks import list_given_up_webhooks

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.store.doctor.findings import Finding
    from interlock.store.workers import LiveProcess

DOCTOR = load_statements("doctor")
MAX_DUE_TASKS = 10_000  # due tasks that are examined per namespace and type
MAX_FINDINGS = 10  # of one kind that are named one by one
VANISHED_REPORTED_FOR = timedelta(days=1)


def check_queue(queue: dict[str, Any]) -> tuple[list[Finding], dict[str, str]]:
    """Check that the queue of step results exists and is read."""
    if queue["name"] is None:
        message = "the row of table settings is missing: no step can send its result"
        return [make_finding("settings_missing", message, sample=["settings"])], {}
    if not queue["installed"] or not queue["there"]:
        missing = f"its queue {queue['name']!r}" if queue["installed"] else "PGMQ"
        message = f"{missing} is missing; tasks work without it, jobs do not"
        return [make_finding("queue_missing", message, sample=[queue["name"]])], {}
    oldest = queue["oldest_age"] or 0
    found = f"{queue['name']}: {number(queue['waiting'], 'message')}"
    found += f", the oldest for {oldest:.0f} s" if queue["waiting"] else ""
    if oldest > STALL_THRESHOLD.total_seconds():
        return [make_finding("queue_stalled", found, rows=queue["waiting"], sample=[queue["name"]])], {}
    return [], {"queue": found}


async def check_failed_messages(connection: Connection, archived: int) -> list[Finding]:
    """Report messages that failed repeatedly."""
    if not archived:
        return []
    rows = await read_orchestration_failures(connection, limit=MAX_FINDINGS)
    findings = []
    for code, chosen in (
        ("message_failed", [row for row in rows if row["job_id"] is not None]),
        ("message_ownerless", [row for row in rows if row["job_id"] is None]),
    ):
        if chosen:
            first = chosen[0]
            at = f"{first['failed_at'].astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
            owner = f" of job {first['job_id']}" if first["job_id"] is not None else ", which names no job"
            count = archived - (len(rows) - len(chosen)) if chosen[-1] is rows[-1] else len(chosen)
            message = f"{number(count, 'message')} failed: message {first['msg_id']}{owner}, at {at}: {first['error']}"
            findings.append(make_finding(code, message, rows=count, sample=[row["msg_id"] for row in chosen]))
    return findings


async def check_transactions(connection: Connection, moment: datetime, now: datetime | None) -> list[Finding]:
    """Report long transactions that lock jobs or tasks and so block others."""
    parameters = {"threshold": STALL_THRESHOLD, "limit": MAX_FINDINGS, "now": now}
    return [
        make_finding(
            "transaction_long",
            f"a transaction of {row['role']} ({row['application'] or 'unnamed'}, {row['state']}) has been open for "
            f"{_seconds(moment - row['since'])} and locks rows of {' and '.join(row['relations'])}, which are blocked",
            sample=[row["pid"]],
            remedy=f"end that transaction, or its session: select pg_terminate_backend({row['pid']})",
        )
        for row in await run(connection, DOCTOR["read_long_transactions"], parameters)
    ]


async def check_processes(
    connection: Connection, processes: list[LiveProcess], moment: datetime, now: datetime | None
) -> tuple[list[Finding], dict[str, str]]:
    """Check that live processes serve the work that there is; none is a problem only while there is work."""
    due = await run(connection, DOCTOR["read_due_types"], {"each": MAX_DUE_TASKS, "now": now})
    jobs = await run(connection, DOCTOR["read_oldest_jobs"], {"now": now})
    (limited,) = await run(connection, DOCTOR["has_limited_tasks"], {"now": now})
    has_work = bool(due or jobs or limited["found"])
    findings: list[Finding] = []
    facts: dict[str, str] = {}
    for role, is_needed in (("worker", has_work), ("orchestrator", bool(jobs))):
        live = [process for process in processes if process.role == role]
        active = sum(process.status == SupervisedWorkerState.RUNNING for process in live)
        if active or not is_needed:
            facts[f"{role}s"] = f"{active} live" + (f", {len(live) - active} more paused" if len(live) > active else "")
        else:
            found = (
                f"none is active: {len(live)} paused, while there is work"
                if live
                else "none is live, while there is work"
            )
            remedy = "resume them: `interlock workers resume ID`" if live else f"run `interlock {role}`"
            ids = [process.id for process in live]
            findings.append(make_finding(f"{role}s_missing", f"{role}s: {found}", sample=ids, remedy=remedy))
    unstarted, counts = _check_jobs(jobs, moment)
    return [
        *findings,
        *unstarted,
        *_check_handlers(processes, due, moment),
        *_check_leaks(processes),
        *_check_retention(processes),
    ], facts | counts


def _check_jobs(jobs: Iterable[dict[str, Any]], moment: datetime) -> tuple[list[Finding], dict[str, str]]:
    """Report unfinished jobs by state; one that does not start is a finding."""
    findings: list[Finding] = []
    facts: dict[str, str] = {}
    for row in jobs:
        count = f"{number(row['jobs'], 'job')} {row['status']}"
        if row["id"] is None:
            facts[f"jobs {row['status']}"] = f"{count}, all of which wait for their time or for another job"
            continue
        age = moment - row["due_at"]
        why = f": {row['reason']}" if row["reason"] else ""
        found = f"{count}, the oldest is {row['id']}, {_seconds(age)} old{why}"
        if row["status"] != JobState.RUNNING and age > STALL_THRESHOLD:
            remedy = f"`interlock explain {row['id']}`"
            findings.append(make_finding("job_not_started", found, rows=row["jobs"], sample=[row["id"]], remedy=remedy))
        else:
            facts[f"jobs {row['status']}"] = found
    return findings, facts


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
                make_finding(
                    "type_unserved",
                    f"{row['type']} in {namespace}: {_due([row], now)}, and no live worker has a handler for it",
                    rows=row["tasks"],
                    sample=[row["type"]],
                )
                for row in rows
                if row["type"] not in types[namespace]
            ]
        else:
            message = f"{namespace}: {_due(rows, now)}, and no live worker serves it"
            remedy = f"`interlock worker --namespaces {namespace}`"
            tasks = sum(row["tasks"] for row in rows)
            findings.append(make_finding("namespace_unserved", message, rows=tasks, sample=[namespace], remedy=remedy))
    return findings


def _check_leaks(processes: Iterable[LiveProcess]) -> list[Finding]:
    """Report handlers that run on although their attempts were settled."""
    return [
        make_finding(
            "handler_leaked",
            f"{process.id}: {number(sum(leaked.values()), 'handler')} ignored being stopped and still "
            f"{'runs' if sum(leaked.values()) == 1 else 'run'}: "
            + ", ".join(f"{type_} ({count})" for type_, count in sorted(leaked.items())),
            rows=sum(leaked.values()),
            sample=[process.id],
        )
        for process in processes
        if (leaked := process.statistics.get("leaked"))
    ]


def _check_retention(processes: Iterable[LiveProcess]) -> list[Finding]:
    """Report that retention deletes slower than rows come of age, as the leader's heartbeat says."""
    return [
        make_finding(
            "retention_behind",
            f"the rows that {process.id} deletes are {_seconds(timedelta(seconds=overdue))} past their retention age",
            sample=[process.id],
        )
        for process in processes
        if (overdue := process.statistics.get("retention_overdue_s"))
    ]


def _due(rows: list[dict[str, Any]], now: datetime) -> str:
    tasks = sum(row["tasks"] for row in rows)
    count = f"{tasks} or more tasks" if tasks >= MAX_DUE_TASKS else number(tasks, "task")
    return f"{count} due, the oldest for {_seconds(now - min(row['oldest_at'] for row in rows))}"


async def check_expired_leases(connection: Connection, moment: datetime, now: datetime | None) -> list[Finding]:
    """Report leases that expired a while ago and whose tasks no worker recovered."""
    (row,) = await run(connection, DOCTOR["count_unrecovered_tasks"], {"threshold": STALL_THRESHOLD, "now": now})
    if not row["tasks"]:
        return []
    message = f"{number(row['tasks'], 'lease')} expired and no task was recovered, the first "
    message += f"{_seconds(moment - row['oldest_at'])} ago"
    return [make_finding("lease_expired", message, rows=row["tasks"], sample=row["sample"])]


async def check_vanished_workers(connection: Connection, moment: datetime, now: datetime | None) -> list[Finding]:
    """Report processes that sent no heartbeat for a while and did not deregister."""
    times = {"threshold": VANISHED_AFTER, "reported_for": VANISHED_REPORTED_FOR}
    rows = await run(connection, DOCTOR["read_vanished_workers"], {**times, "limit": MAX_FINDINGS, "now": now})
    if not rows:
        return []
    first = rows[0]
    message = (
        f"{first['role']} {first['id']} has sent no heartbeat for {_seconds(moment - first['seen_until'])} and did "
    )
    message += "not deregister" + (f", and {len(rows) - 1} others" if len(rows) > 1 else "")
    return [make_finding("worker_vanished", message, rows=len(rows), sample=[row["id"] for row in rows])]


async def check_limits(connection: Connection) -> list[Finding]:
    """Report limit keys of unfinished tasks for which no limit is declared: steps, or tasks of a deleted limit."""
    rows = await run(connection, DOCTOR["read_undeclared_keys"], {"limit": MAX_FINDINGS})
    if not rows:
        return []
    keys = ", ".join(row["key"] for row in rows)
    message = f"no limit is declared for the {'key' if len(rows) == 1 else 'keys'} {keys}; the tasks run without one"
    return [make_finding("limit_undeclared", message, rows=len(rows), sample=[row["key"] for row in rows])]


async def check_given_up_webhooks(connection: Connection) -> list[Finding]:
    """Report webhooks that were given up."""
    (row,) = await run(connection, DOCTOR["count_given_up_webhooks"], {})
    if not row["callbacks"]:
        return []
    latest = await list_given_up_webhooks(connection, limit=MAX_FINDINGS)
    message = f"{number(row['callbacks'], 'webhook')} given up, the latest error: {row['error']}"
    return [make_finding("webhook_given_up", message, rows=row["callbacks"], sample=[notice.id for notice in latest])]


def _seconds(time: timedelta) -> str:
    return f"{max(time.total_seconds(), 0):.0f} s"
