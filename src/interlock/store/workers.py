"""The rows of supervised workers: making them, moving them, and telling what became of them.

Invariant: a row is moved under its lock and by the statement of its event alone; what the table does not allow is
refused with the sentence of the table, before anything is written.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from interlock.errors import IllegalTransition, UnknownWorkerError
from interlock.lifecycle import SUPERVISED_WORKER, SupervisedWorkerEvent, SupervisedWorkerState
from interlock.store.database import as_json, run, transaction
from interlock.store.presence import WORKERS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from interlock.store.database import Connection

Event = SupervisedWorkerEvent
State = SupervisedWorkerState

_STATEMENTS: Mapping[Event, str] = {
    Event.START_TASK: "start_idle_worker",
    Event.PAUSE: "pause_running_worker",
    Event.RESUME: "resume_paused_worker",
    Event.COMPLETE_TASKS: "complete_running_worker",
    Event.ERROR_UNRECOVERABLE: "fail_running_worker",
    Event.TERMINATE: "terminate_worker",
}
_TARGETS: Mapping[Event, State] = {event: target for _, event, target in SUPERVISED_WORKER.rows}
REFUSED = "IL001"  # the SQLSTATE with which the guards refuse such a move


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What the process of a worker is to be. What is None is left to the settings of its supervisor."""

    app: str | None = None
    namespaces: tuple[str, ...] | None = None
    concurrency: int | None = None
    memory_limit_mb: float | None = None
    lease: float | None = None
    grace: float | None = None

    def document(self) -> dict[str, Any]:
        """Give it as it is stored: under `spec` in the row's metadata."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class WorkerMove:
    """A move that a worker made."""

    worker_id: str
    event: str
    from_state: str
    to_state: str


async def create_worker(
    connection: Connection,
    *,
    workspace_id: str = "default",
    spec: WorkerSpec | None = None,
    labels: Mapping[str, Any] | None = None,
    worker_id: str | None = None,
    actor: str,
    now: datetime | None = None,
) -> str:
    """Make the row of a worker, IDLE until it is started; give its id."""
    metadata = {"role": "worker", "spec": (spec or WorkerSpec()).document(), "labels": dict(labels or {})}
    parameters = {
        "id": worker_id,
        "workspace_id": workspace_id,
        "metadata": as_json(metadata),
        "actor": actor,
        "now": now,
    }
    async with transaction(connection):
        (made,) = await run(connection, WORKERS["insert_worker"], parameters)
        await run(connection, WORKERS["notify_control"], {"payload": made["id"]})
    return str(made["id"])


async def move_worker(
    connection: Connection,
    worker_id: str,
    event: Event,
    *,
    actor: str,
    reason: str | None = None,
    now: datetime | None = None,
) -> WorkerMove:
    """Move a worker, and tell its process and its supervisor; IllegalTransition when its table does not allow it."""
    async with transaction(connection):
        rows = await run(connection, WORKERS["lock_worker"], {"id": worker_id})
        if not rows:
            raise UnknownWorkerError(f"there is no worker {worker_id}")
        source = State(rows[0]["status"])
        if not SUPERVISED_WORKER.can(source, event):
            raise refused_move(worker_id, source, event)
        parameters = {"id": worker_id, "reason": reason, "actor": actor, "now": now}
        await run(connection, WORKERS[_STATEMENTS[event]], parameters)
        await run(connection, WORKERS["notify_control"], {"payload": worker_id})
    return WorkerMove(worker_id, event, source, _TARGETS[event])


def refused_move(worker_id: str, source: State, event: Event) -> IllegalTransition:
    """Say why a worker cannot make a move, in the words of its table."""
    target = _TARGETS[event]
    sentence = SUPERVISED_WORKER.validate_transition(source, target)
    if sentence is None:  # another event leads there: a worker that was never started is not resumed
        instead = ", ".join(SUPERVISED_WORKER.events_between(source, target))
        sentence = f"Invalid state transition: {source} → {target} by {event}. It takes {instead}"
    return IllegalTransition(
        sentence,
        machine=SUPERVISED_WORKER.name,
        row=worker_id,
        from_state=source,
        to_state=target,
        allowed=SUPERVISED_WORKER.allowed_targets(source),
        sqlstate=REFUSED,
    )


async def read_worker(connection: Connection, worker_id: str) -> dict[str, Any]:
    """Read the whole row of a worker."""
    rows = await run(connection, WORKERS["read_worker"], {"id": worker_id})
    if not rows:
        raise UnknownWorkerError(f"there is no worker {worker_id}")
    return rows[0]


async def find_workers(
    connection: Connection,
    *,
    status: str | None = None,
    workspace_id: str | None = None,
    role: str | None = None,
    before: tuple[datetime, str] | None = None,
    limit: int = 100,
) -> list[dict[str, Any]]:
    """Find workers, newest first; `before` is the time and the id of the last one of the page before."""
    created_at, id_ = before or (None, None)
    parameters = {
        "status": status,
        "workspace_id": workspace_id,
        "role": role,
        "before_time": created_at,
        "before_id": id_,
        "limit": limit,
    }
    return await run(connection, WORKERS["find_workers"], parameters)


async def read_worker_moves(
    connection: Connection, worker_id: str, *, after: int = 0, limit: int = 100
) -> list[dict[str, Any]]:
    """Read moves that a worker made, oldest first; `after` is the last id of the page before."""
    return await run(connection, WORKERS["read_worker_moves"], {"id": worker_id, "after": after, "limit": limit})


async def read_last_worker_move(connection: Connection, worker_id: str) -> dict[str, Any] | None:
    """Read the latest move of a worker."""
    rows = await run(connection, WORKERS["read_last_worker_move"], {"id": worker_id})
    return rows[0] if rows else None
