"""The rows of supervised workers: making them, moving them, and telling what became of them.

Invariant: a row is moved under its lock and by the statement of its event alone; what the table does not allow is
refused with the sentence of the table, before anything is written.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import IllegalTransition, UnknownWorkerError
from interlock.lifecycle import SUPERVISED_WORKER, SupervisedWorkerEvent, SupervisedWorkerState
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, load_statements, run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from interlock.postgres.connection import Connection


# SECTION store/presence
# Which processes are here: rows of `workers` that say until when they were last heard of.
#
# Invariant: a row is live while it was started, has not ended and `seen_until` lies ahead. Losing it costs nobody a
# task:
# a process whose row is gone says anew that it is here. A supervised row outlives its processes: one of an earlier
# generation than the row's has been replaced, and can write nothing of it.

WORKERS = load_statements("workers")
SUPERVISION = load_statements("supervision")
HEARTBEAT_LEASE = timedelta(seconds=15)
HEARTBEATS_PER_LEASE = 3  # heartbeats in the time for which one of them lasts
RUNNING = "RUNNING"
ENDED = ("COMPLETED", "FAILED", "TERMINATED")
UNSTARTED = ("IDLE", "PAUSED")
REPLACED = "TERMINATED"  # what a supervised process is told whose row has another process by now, or is gone


@dataclass(frozen=True, slots=True)
class RegisteredProcess:
    """A process that says that it is here. An orchestrator serves no namespaces and no types."""

    id: str
    role: str = "worker"
    namespaces: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    # by event system: received, dispatched, completed, failed, mismatched, fallback_hits
    statistics: Mapping[str, Any] = field(default_factory=dict)
    # of a process that a supervisor started for this row; None when the row is the process's own
    generation: int | None = None


class LiveProcess(NamedTuple):
    """A process that was heard of lately."""

    id: str
    status: str
    metadata: dict[str, Any]
    namespaces: list[str]
    types: list[str]
    heartbeat_at: datetime | None
    seen_until: datetime
    created_at: datetime

    @property
    def role(self) -> str:
        """What it does: it is a worker or an orchestrator."""
        return str(self.metadata.get("role", "worker"))

    @property
    def statistics(self) -> dict[str, Any]:
        """What went through its event systems, as it last said."""
        found: dict[str, Any] = self.metadata.get("statistics") or {}
        return found


async def register_worker(
    connection: Connection,
    process: RegisteredProcess,
    *,
    lease: timedelta = HEARTBEAT_LEASE,
    now: datetime | None = None,
) -> bool:
    """Say that a process is here, and wake the jobs that wait for it; False when a row of its id was there."""
    async with transaction(connection):
        made = await run(connection, WORKERS["insert_present_worker"], _parameters(process, lease, now))
        if made:
            reason = f"the {process.role} process has started"
            started = {"id": process.id, "reason": reason, "actor": process.id, "now": now}
            await run(connection, WORKERS["start_idle_worker"], started)
            await run(connection, WORKERS["notify_of_worker"], {})
    return bool(made)


async def record_heartbeat(
    connection: Connection,
    process: RegisteredProcess,
    *,
    lease: timedelta = HEARTBEAT_LEASE,
    now: datetime | None = None,
) -> str | None:
    """Say that a process is still here; give the status of its row, None when there is none."""
    rows = await run(connection, WORKERS["record_heartbeat"], _parameters(process, lease, now))
    if rows or process.generation is None:
        return rows[0]["status"] if rows else await read_worker_status(connection, process.id)
    status = await read_worker_status(connection, process.id)
    return status if status in ENDED else REPLACED


async def ensure_registered(
    connection: Connection,
    process: RegisteredProcess,
    *,
    lease: timedelta = HEARTBEAT_LEASE,
    now: datetime | None = None,
) -> str:
    """Say that a process is here, whether its row is there or was lost; give the status that the row has now."""
    status = await record_heartbeat(connection, process, lease=lease, now=now)
    if status is None:
        await register_worker(connection, process, lease=lease, now=now)
        status = await read_worker_status(connection, process.id)
    return status or "IDLE"


async def deregister_worker(
    connection: Connection, worker_id: str, *, reason: str | None = None, now: datetime | None = None
) -> None:
    """End the row of a process that stops; one that has ended, or is gone, is left as it is."""
    ended = {"id": worker_id, "reason": reason or "the process has stopped", "actor": worker_id, "now": now}
    async with transaction(connection):
        if await run(connection, WORKERS["complete_running_worker"], ended):
            return
        if await read_worker_status(connection, worker_id) in UNSTARTED:  # from there the table knows no completion
            await run(connection, WORKERS["terminate_worker"], ended)


async def notify_jobs_of_worker(connection: Connection) -> None:
    """Wake the jobs that may wait for a worker that takes tasks from now on."""
    await run(connection, WORKERS["notify_of_worker"], {})


async def detach_process(connection: Connection, process: RegisteredProcess, *, now: datetime | None = None) -> None:
    """Say that a supervised process is gone; what becomes of its row is for its supervisor to say."""
    parted = {"id": process.id, "generation": process.generation, "now": now}
    await run(connection, SUPERVISION["detach_process"], parted)


async def read_worker_status(connection: Connection, worker_id: str) -> str | None:
    """Read the status of a worker's row; None when there is none."""
    rows = await run(connection, WORKERS["read_worker_status"], {"id": worker_id})
    return rows[0]["status"] if rows else None


async def list_live_workers(connection: Connection, *, now: datetime | None = None) -> list[LiveProcess]:
    """List the processes that were heard of lately, oldest first."""
    return [LiveProcess(**row) for row in await run(connection, WORKERS["list_live_workers"], {"now": now})]


def _parameters(process: RegisteredProcess, lease: timedelta, now: datetime | None) -> dict[str, Any]:
    return {
        "id": process.id,
        "actor": process.id,
        "metadata": as_json({"role": process.role, "statistics": dict(process.statistics)}),
        "namespaces": list(process.namespaces),
        "types": list(process.types),
        "generation": process.generation,
        "lease": lease,
        "now": now,
    }


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
            raise illegal_move(worker_id, source, event)
        parameters = {"id": worker_id, "reason": reason, "actor": actor, "now": now}
        await run(connection, WORKERS[_STATEMENTS[event]], parameters)
        await run(connection, WORKERS["notify_control"], {"payload": worker_id})
    return WorkerMove(worker_id, event, source, _TARGETS[event])


def illegal_move(worker_id: str, source: State, event: Event) -> IllegalTransition:
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
