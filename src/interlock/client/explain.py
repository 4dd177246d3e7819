"""Says in sentences where a task or a job is, since when, and why it is not moving.

Invariant: every sentence is a fact that the database held at one moment; nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlock.client.jobs import job_id
from interlock.client.waits import at, ended_facts, pending_facts, running_facts, waiting_facts
from interlock.errors import UnknownTaskError
from interlock.store.explain import OPEN, read_explanation

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.store.explain import Cause, Explained

MORE = "there are more causes than are told here"
WAITS = {
    "dependency": "other steps",
    "parts": "their parts",
    "worker_count": "their turn",
    "compensation": "the compensations before them",
    "job": "a child job",
    "signal": "a signal",
    "namespace": "a paused namespace",
    "limit": "a limit",
    "start": "the job to start",
}
SHARED = "what it waits for is told elsewhere in this answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where a task or a job is, and why; `causes` are what holds it up, each by way of the steps in `through`."""

    kind: str
    id: UUID
    name: str
    state: str
    since: datetime
    facts: tuple[str, ...]
    through: tuple[str, ...]
    causes: tuple[Explanation, ...]


async def explain(app: Interlock, id_: UUID | str) -> Explanation:
    """Say why a task or a job, whichever has this id, is where it is."""
    wanted = job_id(id_)
    async with app.connection() as connection:
        found = await read_explanation(connection, wanted, now=app.now())
    if found is None:
        raise UnknownTaskError(f"there is no task and no job {wanted}: not stored, not committed yet, or pruned")
    return _explained(found.root, found, is_root=True)


def _explained(cause: Cause, seen: Explained, *, is_root: bool = False) -> Explanation:
    row = cause.row
    is_job = cause.kind == "job"
    facts = (_job_facts if is_job else _task_facts)(cause, seen, is_root=is_root)
    if cause.shared and not cause.causes:
        facts.append(SHARED)
    if cause.more:
        facts.append(MORE)
    return Explanation(
        kind="step" if row.get("step") else cause.kind,
        id=row["id"],
        name=_name(row, is_job=is_job),
        state=row["status"] if is_job else row["state"],
        since=row["since"],
        facts=tuple(facts),
        through=cause.through,
        causes=tuple(_explained(behind, seen) for behind in cause.causes),
    )


def _name(row: dict[str, Any], *, is_job: bool) -> str:
    if is_job:
        return f"{row['workflow']} {row['version']}" if row["workflow"] else str(row["id"])
    return str(row["step"] or row["type"])


def _task_facts(cause: Cause, seen: Explained, *, is_root: bool) -> list[str]:
    row = cause.row
    facts = _around(row) if is_root else []
    if row["cancel_requested_at"] is not None and row["state"] in {"pending", "running"}:
        facts.append(f"its cancellation was asked for at {at(row['cancel_requested_at'])}")
    if row["state"] == "waiting":
        return facts + waiting_facts(cause, seen)
    if row["state"] == "pending":
        return facts + pending_facts(row, seen)
    if row["state"] == "running":
        return facts + running_facts(row, seen)
    return facts + ended_facts(row, seen) + (_moves(seen) if is_root else [])


def _around(row: dict[str, Any]) -> list[str]:
    if row["job_id"] is None:
        return []
    told = f": {row['job_reason']}" if row["job_reason"] else ""
    return [f"it is a step of job {row['job_id']}, which is {row['job_status']}{told}"]


def _job_facts(cause: Cause, seen: Explained, *, is_root: bool) -> list[str]:
    row = cause.row
    if row["status"] not in OPEN:
        facts = [str(row["reason"])] if row["reason"] else []
        return facts + (_moves(seen) if is_root else [])
    facts = _start_facts(row, seen) if row["status"] != "RUNNING" else _course_facts(cause, seen, is_root=is_root)
    if row["deadline_at"] is not None and row["ending"] is None:
        facts.append(f"it is canceled if it has not ended at {at(row['deadline_at'])}")
    return facts


def _start_facts(row: dict[str, Any], seen: Explained) -> list[str]:
    """Say why a job has not started, as it is now and not as it was when it was submitted."""
    unserved = row["unserved"]
    if unserved:
        word = "namespaces" if len(unserved) > 1 else "namespace"
        return [f"no live worker serves {word} {', '.join(map(repr, unserved))}: start one that does"]
    return ["live workers serve its first steps: it starts when an orchestrator looks next", *_no_orchestrator(seen)]


def _course_facts(cause: Cause, seen: Explained, *, is_root: bool) -> list[str]:
    """Say how a job that runs goes on."""
    row = cause.row
    facts = []
    if row["compensating"]:
        facts.append(f"it compensates, and becomes {row['ending']} then: {row['ending_reason']}")
    elif row["ending"] is not None:
        facts.append(f"it becomes {row['ending']} once its last step has stopped: {row['ending_reason']}")
    facts.append(f"{_counted(seen) if is_root else row['open_steps']} of its steps are open")
    if row["aside"]:
        latest = f"the latest at {at(row['aside_at'])}: {row['aside_error']}"
        facts.append(f"{row['aside']} of its messages were set aside, {latest}")
        facts.append(f"when the cause is gone, `interlock jobs replay {row['id']}` sends them again at once")
    if not cause.causes and not cause.shared:
        facts.append("none of its steps is on its way, and it has not ended: a message of it was lost")
    return facts + _no_orchestrator(seen)


def _counted(seen: Explained) -> str:
    """Count the open steps of the job that was asked for, by what they wait for."""
    parts = [f"{counted['steps']} {_described(counted['state'], counted['held_by'])}" for counted in seen.steps]
    return f"{sum(counted['steps'] for counted in seen.steps)} ({', '.join(parts)})" if parts else "0"


def _described(state: str, held_by: str | None) -> str:
    if state == "unheard":
        return "ended, but not heard of by an orchestrator"
    if state != "waiting" or held_by is None:
        return state
    return f"waiting for {WAITS.get(held_by, held_by)}"


def _no_orchestrator(seen: Explained) -> list[str]:
    if any(process.role == "orchestrator" and process.status == "RUNNING" for process in seen.processes):
        return []
    return ["no orchestrator is live, and without one no job goes on: run `interlock orchestrator`"]


def _moves(seen: Explained) -> list[str]:
    return [
        f"{at(move['recorded_at'])} {move['from_state'] or ''} -{move['event']}-> {move['to_state']} by {move['actor']}"
        + (f": {move['reason']}" if move["reason"] else "")
        for move in seen.moves
    ]
