"""Explains an earlier moment from what is stored: records of moves, and reasons that changed without a move.

Invariant: nothing is inferred from the present row that may have changed since. What is not stored is said so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interlock.client.explain.capacity import worker_facts
from interlock.client.explain.explanation import (
    Evidence,
    Explanation,
    Fact,
    FactCode,
    format_moment,
    move_evidence,
)
from interlock.errors import InputError, UnknownJobError, UnknownScheduleError, UnknownTaskError, UnknownWorkerError
from interlock.lifecycle import JOB, SUPERVISED_WORKER, TASK_ROW, JobState, SupervisedWorkerState, TaskRowState
from interlock.store.explain import (
    MAX_CAUSES,
    read_past_job,
    read_past_reason,
    read_past_steps,
    read_past_task,
    read_past_worker,
    read_past_workers,
)
from interlock.store.workers import resolve_worker_id

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

FINAL = {"task": TASK_ROW.final, "job": JOB.final, "worker": SUPERVISED_WORKER.final}
NOT_KEPT = "how busy they were then is not stored"


async def explain_past_work(connection: Connection, id_: UUID, at: datetime) -> Explanation | None:
    """Explain a task or a job at an earlier moment, for a job also its open steps; None without any record of it."""
    row = await read_past_task(connection, id_, at)
    if row["first_at"] is not None:
        if row["id"] is None:
            raise UnknownTaskError(_too_early("task", id_, row, at))
        return await _past_task(connection, id_, row, at)
    row = await read_past_job(connection, id_, at)
    if row["first_at"] is None:
        return None
    if row["id"] is None:
        raise UnknownJobError(_too_early("job", id_, row, at))
    facts = _stored_reason("job", row)
    if row["to_state"] == JobState.PENDING:
        facts.append(
            Fact(code=FactCode.NOT_STORED, text="it waited for a live worker of its first steps, or for its key")
        )
    steps = await read_past_steps(connection, id_, at, limit=MAX_CAUSES + 1) if row["to_state"] not in JOB.final else []
    if len(steps) > MAX_CAUSES:
        facts.append(Fact(code=FactCode.MORE_CAUSES, text=f"more than {MAX_CAUSES} of its steps were open"))
    causes = [
        await _past_task(connection, step, await read_past_task(connection, step, at), at)
        for step in steps[:MAX_CAUSES]
    ]
    name = f"{row['workflow']} {row['version']}" if row["workflow"] else str(id_)
    return _past("job", id_, name, row, facts, at, tuple(causes))


def _too_early(kind: str, id_: object, row: dict[str, Any], at: datetime) -> str:
    first = format_moment(row["first_at"])
    return f"there is no record of {kind} {id_} at {format_moment(at)}: its first one is of {first}"


def _past(
    kind: str,
    id_: UUID | str,
    name: str,
    row: dict[str, Any],
    facts: list[Fact],
    at: datetime,
    causes: tuple[Explanation, ...] = (),
) -> Explanation:
    return Explanation(
        kind=kind,
        id=id_,
        name=name,
        state=row["to_state"],
        since=row["recorded_at"],
        facts=tuple(replace(fact, remedy=None, command=None) for fact in facts),
        causes=causes,
        at=at,
    )


async def _past_task(connection: Connection, id_: UUID, row: dict[str, Any], at: datetime) -> Explanation:
    facts = _stored_reason("task", row)
    if row["to_state"] == TaskRowState.PENDING:
        facts = await _past_pending(connection, row, at) + facts
    kind = "step" if row["step"] else "task"
    return _past(kind, id_, str(row["step"] or row["type"] or id_), row, facts, at)


def _stored_reason(kind: str, row: dict[str, Any]) -> list[Fact]:
    """Return the reason that held at the moment, with the move into the state and the one out of it."""
    state = row["to_state"]
    evidence = list(move_evidence([row]))
    if row["next_at"] is not None:
        ended = f"{format_moment(row['next_at'])} -{row['next_event']}-> {row['next_state']} by {row['next_actor']}"
        evidence.append(Evidence("move", "", f"it stayed so until {ended}"))
    told = row.get("told")
    text = told or row["reason"]
    if text is None:
        text = f"{row['event']} by {row['actor']}" if state != TaskRowState.WAITING else "no reason is stored"
    code = FactCode.ENDED if state in FINAL[kind] else _PAST_CODES.get(state, FactCode.WAITS_FOR_RELEASE)
    return [Fact(code=code, text=text, since=row.get("told_since"), evidence=tuple(evidence))]


_PAST_CODES: dict[str, FactCode] = {
    TaskRowState.WAITING: FactCode.WAITS_FOR_RELEASE,
    TaskRowState.PENDING: FactCode.BACKLOG,
    TaskRowState.RUNNING: FactCode.RUNNING,
    JobState.RUNNING: FactCode.OPEN_STEPS,
    SupervisedWorkerState.IDLE: FactCode.NOT_STARTED,
    SupervisedWorkerState.PAUSED: FactCode.WORKERS_PAUSED,
}


_PAST_SCHEDULE_CODES = {
    "paused": FactCode.SCHEDULE_PAUSED,
    "failing": FactCode.SCHEDULE_FAILED,
    None: FactCode.SCHEDULE_ACTIVE,
}


async def _past_pending(connection: Connection, row: dict[str, Any], at: datetime) -> list[Fact]:
    """Describe who could have claimed a task then."""
    if row["namespace"] is None:
        return [
            Fact(code=FactCode.NOT_STORED, text="its row is deleted: its namespace and type are not known any more")
        ]
    if row["next_at"] is None and row["run_at"] > at:
        return [Fact(code=FactCode.NOT_DUE, text=f"it was not due before {format_moment(row['run_at'])}")]
    processes = await read_past_workers(connection, at)
    (fact,) = worker_facts(row["namespace"], row["type"], processes, {})
    if fact.code == FactCode.ABOUT_TO_BE_CLAIMED:
        able = ", ".join(evidence.id for evidence in fact.evidence)
        fact = replace(fact, code=FactCode.NOT_STORED, text=f"live workers could run it: {able}; {NOT_KEPT}")
    return [fact]


async def explain_past_resource(connection: Connection, kind: str, name: str, at: datetime) -> Explanation:
    """Explain a worker, a namespace or a schedule at an earlier moment."""
    if kind == "limit":
        raise InputError(
            "the use of a limit is not kept: explain a task that waited for it, whose stored reason names it"
        )
    if kind == "worker":
        return await _past_worker(connection, name, at)
    told = await read_past_reason(connection, kind, name, at)
    if kind == "schedule":
        if told is None:
            raise UnknownScheduleError(f"nothing is stored of schedule {name!r} at {format_moment(at)}")
        code = _PAST_SCHEDULE_CODES[told["cause"]]
        state, facts = told["cause"] or "active", [_told_fact(code, told)]
    else:
        is_paused = told is not None and told["cause"] == "paused"
        state = "paused" if is_paused else "active"
        facts = [_told_fact(FactCode.NAMESPACE_PAUSED, told)] if told is not None and is_paused else []
        facts.append(await _past_service(connection, name, at))
    return Explanation(
        kind=kind,
        id=name,
        name=name,
        state=state,
        since=None if told is None else told["since"],
        facts=tuple(replace(fact, remedy=None, command=None) for fact in facts),
        at=at,
    )


async def _past_service(connection: Connection, namespace: str, at: datetime) -> Fact:
    """Describe the workers that served a namespace then."""
    processes = await read_past_workers(connection, at)
    (fact,) = worker_facts(namespace, None, processes, {})
    if fact.code != FactCode.ABOUT_TO_BE_CLAIMED:
        return fact
    able = ", ".join(process.id for process in processes if namespace in process.namespaces)
    return Fact(code=FactCode.NOT_STORED, text=f"live workers served it: {able}; {NOT_KEPT}")


def _told_fact(code: FactCode, told: dict[str, Any]) -> Fact:
    return Fact(code=code, text=str(told["reason"]), since=told["since"])


async def _past_worker(connection: Connection, worker_id: str, at: datetime) -> Explanation:
    worker_id = await resolve_worker_id(connection, worker_id)
    row = await read_past_worker(connection, worker_id, at)
    if row["first_at"] is None:
        raise UnknownWorkerError(f"there is no record of a worker {worker_id}")
    if row["id"] is None:
        raise UnknownWorkerError(_too_early("worker", worker_id, row, at))
    facts = _stored_reason("worker", row)
    told = await read_past_reason(connection, "worker", worker_id, at)
    live = {process.id: process for process in await read_past_workers(connection, at)}
    if worker_id in live:
        process = live[worker_id]
        text = f"it served {', '.join(process.namespaces) or 'no namespace'} and had {len(process.types)} handlers"
        facts.append(Fact(code=FactCode.HEARTBEAT, text=text))
    elif row["to_state"] not in SUPERVISED_WORKER.final:
        until = f" until {format_moment(told['until'])}" if told is not None and told["until"] is not None else ""
        facts.insert(0, Fact(code=FactCode.NO_HEARTBEAT, text=f"its process sent no heartbeat{until}"))
    return _past("worker", worker_id, worker_id, row, facts, at)
