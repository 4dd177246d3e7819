"""Checks of rows against each other: jobs, steps, counters, leases, messages, workflows, schedules, limits, webhooks.

`limit` bounds the unfinished rows that a quick examination reads; None reads all.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import orjson

from interlock.errors import ConfigError, InterlockError
from interlock.model.graph import edges
from interlock.postgres.query import load_statements, run
from interlock.store.doctor.findings import SAMPLE_SIZE, make_finding, number
from interlock.store.doctor.records import QUICK_ROWS, RECORDS
from interlock.store.schedules import list_schedules
from interlock.store.workflows import step_rows

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.doctor.findings import Finding
    from interlock.store.schedules import ScheduleState
    from interlock.store.workers import LiveProcess

ROWS = load_statements("doctor_rows")
QUICK_JOBS = 1_000
QUICK_WORKFLOWS = 200
MAX_NAMED_FAULTS = 5  # of one workflow
MAX_LEASE = timedelta(days=1, hours=1)  # a day is the longest that can be configured; an hour for clocks
MAX_WEBHOOK_DELAY = timedelta(days=1, hours=13)  # a day with its jitter, half of it; an hour for clocks
STALL_THRESHOLD = timedelta(minutes=1)  # after which work that another process should do counts as stalled
MESSAGE_THRESHOLD = timedelta(seconds=10)
OVERDUE_THRESHOLD = timedelta(minutes=5)
VANISHED_AFTER = timedelta(minutes=5)  # without a heartbeat

# The columns of a stored step that its definition says; others are derived from these and may differ between releases.
_STEP_COLUMNS = (
    "step", "position", "kind", "type", "namespace", "needed", "rule", "condition", "cancel_rest", "strategy", "edges",
    "compensate", "priority", "max_tries", "timeout_seconds", "backoff", "spec", "limit_keys", "limit_weight", "tags",
    "callback_url",
)  # fmt: skip
_MESSAGES = {
    "job_steps_missing": ("running job", "without a step of the workflow"),
    "job_not_finished": ("running job", "all of whose steps have ended"),
    "job_counters_wrong": ("job", "with a wrong number of open or failed steps"),
    "job_ended_with_open_steps": ("ended job", "with a step that has not ended"),
    "job_orphaned": ("job", "whose workflow or parent is gone"),
    "step_not_released": ("step", "still waiting for what has ended or is there"),
    "hold_outdated": ("waiting task", "held by a pause that has ended or by a limit that is gone"),
    "row_orphaned": ("row", "whose job, step, workflow or token is gone"),
    "step_counters_wrong": ("waiting step", "with a wrong count of dependencies or parts"),
    "step_orphaned": ("step", "whose job or map is gone, or which its workflow does not have"),
    "step_ended_early": ("unfinished step", "that counts as ended"),
    "hold_missing": ("waiting task", "without a reason that anything could end"),
    "lease_too_long": ("lease", f"longer than the {MAX_LEASE.days} day that a process can ask for"),
    "owner_gone": ("running task", "whose worker is gone while the lease lasts"),
    "message_unknown": ("message", "about steps that do not exist"),
    "result_not_sent": ("step", "ended without a message to the orchestrator"),
    "wait_overdue": ("wait", "of a step or a job past its sleep, timeout or deadline"),
    "job_postponed": ("running job", "hidden from orchestrators for longer than after any failure"),
    "key_duplicated": ("key", "used by two unfinished tasks or jobs"),
    "limit_usage_unknown": ("limit key", "with stored usage and without a limit"),
    "limit_usage_misplaced": ("row", "of limit usage in the future"),
    "webhook_overdue": ("webhook", "that should have been sent or is postponed for too long"),
}


async def _check(connection: Connection, name: str, **parameters: Any) -> list[Finding]:
    rows = await run(connection, ROWS[name], {"sample": SAMPLE_SIZE, **parameters}, prepare=False)
    findings = []
    for row in rows:
        noun, text = _MESSAGES[row["code"]]
        message = f"{number(row['rows'], noun)} {text}"
        findings.append(make_finding(row["code"], message, rows=row["rows"], sample=row["sample"]))
    return findings


async def check_jobs(connection: Connection, now: datetime | None, *, full: bool) -> list[Finding]:
    """Check workflows, jobs and their steps against each other."""
    damaged = await _read_damaged_workflows(connection, None if full else QUICK_WORKFLOWS)
    known: dict[str, Any] = {"workflows": list(damaged), "limit": None if full else QUICK_JOBS}
    jobs = None if full else await _read_ids(connection, "read_open_job_ids")
    tasks = None if full else await _read_ids(connection, "read_open_task_ids")
    counted = [
        *await _check(connection, "check_running_jobs", **known),
        *await _check(connection, "check_ended_jobs", ids=jobs),
    ]
    waiting = [
        *await _check(connection, "check_waiting_steps", **known),
        *await _check(connection, "check_compensations", limit=known["limit"]),
    ]
    return [
        *_describe_damaged_workflows(damaged),
        *_merge(counted),
        *_merge(waiting),
        *await _check(connection, "check_tasks", ids=tasks, workflows=known["workflows"]),
        *await _check(
            connection, "check_holds", threshold=STALL_THRESHOLD, limit=None if full else QUICK_ROWS, now=now
        ),
        *await _check(connection, "check_jobs", ids=jobs),
        *await _check(connection, "check_references"),
        *await _check(connection, "check_unique_keys"),
    ]


def _merge(findings: Iterable[Finding]) -> list[Finding]:
    """Add up the findings of one code."""
    merged: dict[str, Finding] = {}
    for finding in findings:
        known = merged.get(finding.code)
        rows = finding.rows + (known.rows if known else 0)
        sample = (*(known.sample if known else ()), *finding.sample)
        noun, text = _MESSAGES[finding.code]
        merged[finding.code] = make_finding(finding.code, f"{number(rows, noun)} {text}", rows=rows, sample=sample)
    return list(merged.values())


async def _read_ids(connection: Connection, name: str) -> list[UUID]:
    return [row["id"] for row in await run(connection, RECORDS[name], {"limit": QUICK_ROWS})]


async def _read_damaged_workflows(connection: Connection, limit: int | None) -> dict[UUID, str]:
    """Find workflows whose steps or edges are not those that their definition leads to."""
    damaged = {}
    for row in await run(connection, ROWS["read_workflow_graphs"], {"limit": limit}):
        faults = _damages(row["definition"], row["steps"], {tuple(edge) for edge in row["edges"]})
        if faults:
            damaged[row["id"]] = f"{row['name']} version {row['version']}: {', '.join(faults)}"
    return damaged


def _damages(definition: Any, steps: list[dict[str, Any]], stored_edges: set[tuple[Any, ...]]) -> list[str]:
    """Name what of a stored workflow differs from its definition."""
    try:
        wanted_edges = {(edge.upstream, edge.downstream, edge.condition, edge.branch) for edge in edges(definition)}
        # as the database returns them: JSON has no tuples
        wanted_steps = {row["step"]: row for row in orjson.loads(orjson.dumps(step_rows(definition)))}
    except (AttributeError, InterlockError, LookupError, TypeError, ValueError):
        return ["the definition is unreadable"]
    faults = _step_faults(wanted_steps, {row["step"]: row for row in steps})
    faults += [f"the edge {edge[0]} -> {edge[1]} is missing" for edge in sorted(wanted_edges - stored_edges)]
    faults += [
        f"the edge {edge[0]} -> {edge[1]} is not in the definition" for edge in sorted(stored_edges - wanted_edges)
    ]
    more = len(faults) - MAX_NAMED_FAULTS
    return faults[:MAX_NAMED_FAULTS] + ([f"{more} more"] if more > 0 else [])


def _step_faults(wanted: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]]) -> list[str]:
    faults = [f"step {name} is missing" for name in wanted if name not in found]
    faults += [f"step {name} is not in the definition" for name in found if name not in wanted]
    for name in sorted(wanted.keys() & found.keys()):
        changed = [column for column in _STEP_COLUMNS if found[name][column] != wanted[name][column]]
        faults += [f"step {name} has another {', '.join(changed)}"] if changed else []
    return faults


def _describe_damaged_workflows(damaged: dict[UUID, str]) -> list[Finding]:
    if not damaged:
        return []
    message = f"{number(len(damaged), 'workflow')} not stored as defined: {'; '.join(list(damaged.values())[:3])}"
    return [make_finding("workflow_damaged", message, rows=len(damaged), sample=damaged)]


async def check_leases(connection: Connection, now: datetime | None, *, full: bool) -> list[Finding]:
    """Check the leases of running tasks, and those of leaders, processes and supervisors."""
    limit = None if full else QUICK_ROWS
    times = {"longest": MAX_LEASE, "threshold": STALL_THRESHOLD, "vanished": VANISHED_AFTER}
    found = [
        *await _check(connection, "check_leases", **times, limit=limit, now=now),
        *await _check(connection, "check_other_leases", longest=MAX_LEASE, now=now),
    ]
    return _merge(found)


async def check_messages(connection: Connection, now: datetime | None, *, full: bool) -> list[Finding]:
    """Check the queue of step results against the steps, and waits that should be over."""
    limit = None if full else QUICK_ROWS
    return [
        *await _check(connection, "check_messages", threshold=MESSAGE_THRESHOLD, limit=limit, now=now),
        *await _check(connection, "check_results", threshold=STALL_THRESHOLD, limit=limit, now=now),
        *await _check(connection, "check_waits", threshold=STALL_THRESHOLD, limit=limit, now=now),
        *await _check(connection, "check_postponed_jobs", now=now),
    ]


async def check_deliveries(connection: Connection, now: datetime | None) -> list[Finding]:
    """Check webhooks and the usage of limits."""
    times = {"threshold": OVERDUE_THRESHOLD, "longest": MAX_WEBHOOK_DELAY}
    return [
        *await _check(connection, "check_webhooks", **times, limit=QUICK_ROWS, now=now),
        *await _check(connection, "check_limit_usage", now=now),
        *await _check(connection, "check_future_usage", now=now),
    ]


async def check_schedules(
    connection: Connection, now: datetime, processes: Iterable[LiveProcess], workflows: set[tuple[str, str]]
) -> tuple[list[Finding], dict[str, str]]:
    """Check that schedules are valid, due when they should be, and name something that exists."""
    schedules = await list_schedules(connection)
    types: dict[str, set[str]] = {}
    for process in processes:
        if process.role == "worker":
            for namespace in process.namespaces:
                types.setdefault(namespace, set()).update(process.types)
    found = [_check_schedule(schedule, now, types, workflows) for schedule in schedules]
    return [each for each in found if each is not None], {"schedules": str(len(schedules))} if schedules else {}


def _check_schedule(
    schedule: ScheduleState, now: datetime, types: dict[str, set[str]], workflows: set[tuple[str, str]]
) -> Finding | None:
    """Return the first fault of a schedule."""
    name = schedule.name
    code = "schedule_failed"
    if schedule.error:
        how = "is stopped" if schedule.paused_at else "failed at its last tick"
        return make_finding(code, f"schedule {name} {how}: {schedule.error}", sample=[name])
    if schedule.paused_at is not None:
        return None
    try:
        latest = schedule.declared().rhythm().after(now + STALL_THRESHOLD)
    except ConfigError as error:
        return make_finding(code, str(error), sample=[name])
    fault = None
    if schedule.next_at < now - OVERDUE_THRESHOLD:
        code, fault = "schedule_overdue", f"was due at {schedule.next_at:%Y-%m-%d %H:%M:%S %Z}"
    elif schedule.next_at > latest:
        fault = (
            f"is next due at {schedule.next_at:%Y-%m-%d %H:%M:%S %Z}, and should be by {latest:%Y-%m-%d %H:%M:%S %Z}"
        )
        code = "schedule_misplaced"
    elif schedule.workflow is not None and not any(
        workflow == schedule.workflow and schedule.version in {None, version} for workflow, version in workflows
    ):
        named = schedule.workflow + (f" version {schedule.version}" if schedule.version else "")
        code, fault = "schedule_unknown", f"submits jobs of the workflow {named}, which is not stored"
    elif schedule.type is not None and schedule.type not in types.get(schedule.namespace, {schedule.type}):
        fault = f"enqueues {schedule.type}, for which no live worker of {schedule.namespace} has a handler"
        code = "schedule_unknown"
    return None if fault is None else make_finding(code, f"schedule {name} {fault}", sample=[name])
