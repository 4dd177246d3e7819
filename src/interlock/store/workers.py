"""Rows of `workers`: registration and heartbeats of processes, and the lifecycle of supervised workers.

Invariant: a row is live while it was started, has not ended and `seen_until` lies in the future. Losing a row costs no
task: the process registers again. A supervised row outlives its processes; a process of an earlier generation has been
replaced and cannot write to the row.

Invariant: a supervised worker is moved under its row lock, by the statement of its event. A move that
`lifecycle.SUPERVISED_WORKER` does not allow raises IllegalTransition before anything is written.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import IllegalTransition, InputError, UnknownWorkerError
from interlock.lifecycle import SUPERVISED_WORKER, SupervisedWorkerEvent, SupervisedWorkerState
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, load_statements, run
from interlock.store.lists import TimePage, collect_pages, run_time_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from interlock.postgres.connection import Connection

WORKERS = load_statements("workers")
SUPERVISION = load_statements("supervision")
HEARTBEAT_LEASE = timedelta(seconds=15)
HEARTBEATS_PER_LEASE = 3
GUARD_SQLSTATE = "IL001"  # with which the database guards refuse the same move

Event = SupervisedWorkerEvent
State = SupervisedWorkerState

STATEMENTS: Mapping[Event, str] = {
    Event.START_TASK: "start_idle_worker",
    Event.PAUSE: "pause_running_worker",
    Event.RESUME: "resume_paused_worker",
    Event.COMPLETE_TASKS: "complete_running_worker",
    Event.ERROR_UNRECOVERABLE: "fail_running_worker",
    Event.TERMINATE: "terminate_worker",
}
TARGETS: Mapping[Event, State] = {event: target for _, event, target in SUPERVISED_WORKER.rows}


@dataclass(frozen=True, slots=True)
class RegisteredProcess:
    """A process that registers itself. An orchestrator serves no namespaces and no types."""

    id: str
    role: str = "worker"
    namespaces: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    # by event system: received, dispatched, completed, failed, mismatched, fallback_hits
    statistics: Mapping[str, Any] = field(default_factory=dict)
    # set for a process that a supervisor started; None when the process registers a row of its own
    generation: int | None = None
    slots: int | None = None  # tasks that it runs at once; None for a process that runs none


class LiveProcess(NamedTuple):
    """A process whose heartbeat has not expired."""

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
        """`worker` or `orchestrator`."""
        return str(self.metadata.get("role", "worker"))

    @property
    def slots(self) -> int | None:
        """The number of tasks that it runs at once; None if its row does not have it."""
        slots: int | None = self.metadata.get("slots")
        return slots

    @property
    def statistics(self) -> dict[str, Any]:
        """The event-system counters of its last heartbeat."""
        found: dict[str, Any] = self.metadata.get("statistics") or {}
        return found


async def register_worker(
    connection: Connection,
    process: RegisteredProcess,
    *,
    lease: timedelta = HEARTBEAT_LEASE,
    now: datetime | None = None,
) -> bool:
    """Insert and start the row of a process, and notify jobs that wait for a worker; False when the row exists."""
    async with transaction(connection):
        made = await run(connection, WORKERS["insert_present_worker"], _parameters(process, lease, now))
        if made:
            reason = f"the {process.role} process has started"
            started = {"id": process.id, "reason": reason, "actor": process.id, "now": now}
            await run(connection, WORKERS["start_idle_worker"], started)
            await run(connection, WORKERS["notify_jobs_of_worker"], {})
    return bool(made)


async def record_heartbeat(
    connection: Connection,
    process: RegisteredProcess,
    *,
    lease: timedelta = HEARTBEAT_LEASE,
    now: datetime | None = None,
) -> str | None:
    """Extend the heartbeat of a process; return the status of its row, None when there is no row.

    A supervised process whose row has another generation, or is gone, gets TERMINATED: it has been replaced.
    """
    rows = await run(connection, WORKERS["record_heartbeat"], _parameters(process, lease, now))
    if rows or process.generation is None:
        return rows[0]["status"] if rows else await read_worker_status(connection, process.id)
    status = await read_worker_status(connection, process.id)
    return status if status in SUPERVISED_WORKER.final else State.TERMINATED


async def ensure_registered(
    connection: Connection,
    process: RegisteredProcess,
    *,
    lease: timedelta = HEARTBEAT_LEASE,
    now: datetime | None = None,
) -> str:
    """Extend the heartbeat of a process, registering it again when its row was lost; return the status."""
    status = await record_heartbeat(connection, process, lease=lease, now=now)
    if status is None:
        await register_worker(connection, process, lease=lease, now=now)
        status = await read_worker_status(connection, process.id)
    return status or State.IDLE


async def deregister_worker(connection: Connection, worker_id: str, *, now: datetime | None = None) -> None:
    """End the row of a process that stops; an ended or missing row is left alone."""
    await end_worker(connection, worker_id, reason="the process has stopped", actor=worker_id, now=now)


async def end_worker(
    connection: Connection, worker_id: str, *, reason: str, actor: str, now: datetime | None = None
) -> None:
    """Complete a RUNNING worker, terminate one that cannot complete; an ended or missing row is left alone."""
    ended = {"id": worker_id, "reason": reason, "actor": actor, "now": now}
    async with transaction(connection):
        if await run(connection, WORKERS["complete_running_worker"], ended):
            return
        status = await read_worker_status(connection, worker_id)
        if status is not None and not SUPERVISED_WORKER.is_terminal(State(status)):  # IDLE, PAUSED: cannot complete
            await run(connection, WORKERS["terminate_worker"], ended)


async def notify_jobs_of_worker(connection: Connection) -> None:
    """Notify jobs that wait for a worker that one takes tasks from now on."""
    await run(connection, WORKERS["notify_jobs_of_worker"], {})


async def detach_process(connection: Connection, process: RegisteredProcess, *, now: datetime | None = None) -> None:
    """End the heartbeat of a supervised process; its supervisor decides about the row."""
    parameters = {"id": process.id, "generation": process.generation, "now": now}
    await run(connection, SUPERVISION["detach_process"], parameters)


async def read_worker_status(connection: Connection, worker_id: str) -> str | None:
    """Read the status of a worker; None when it does not exist."""
    rows = await run(connection, WORKERS["read_worker_status"], {"id": worker_id})
    return rows[0]["status"] if rows else None


async def list_live_workers(connection: Connection, *, now: datetime | None = None) -> list[LiveProcess]:
    """List live processes, oldest first."""
    return [LiveProcess(**row) for row in await run(connection, WORKERS["list_live_workers"], {"now": now})]


def _parameters(process: RegisteredProcess, lease: timedelta, now: datetime | None) -> dict[str, Any]:
    return {
        "id": process.id,
        "actor": process.id,
        "metadata": as_json(
            {"role": process.role, "statistics": dict(process.statistics)}
            | ({} if process.slots is None else {"slots": process.slots})
        ),
        "namespaces": list(process.namespaces),
        "types": list(process.types),
        "generation": process.generation,
        "lease": lease,
        "now": now,
    }


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How a supervised worker's process runs; None leaves a value to the settings of its supervisor."""

    app: str | None = None
    namespaces: tuple[str, ...] | None = None
    concurrency: int | None = None
    memory_limit_mb: float | None = None
    lease: float | None = None
    grace: float | None = None

    def document(self) -> dict[str, Any]:
        """Return it as stored under `spec` in the row's metadata."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class WorkerMove:
    """A move of a worker."""

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
    """Insert a supervised worker, IDLE until it is started; return its id."""
    metadata = {"role": "worker", "spec": (spec or WorkerSpec()).document(), "labels": dict(labels or {})}
    parameters = {
        "id": worker_id,
        "workspace_id": workspace_id,
        "metadata": as_json(metadata),
        "actor": actor,
        "now": now,
    }
    async with transaction(connection):
        (row,) = await run(connection, WORKERS["insert_worker"], parameters)
        await run(connection, WORKERS["notify_control"], {"payload": row["id"]})
    return str(row["id"])


async def move_worker(
    connection: Connection,
    worker_id: str,
    event: Event,
    *,
    actor: str,
    reason: str | None = None,
    now: datetime | None = None,
) -> WorkerMove:
    """Move a worker and notify its process and its supervisor; IllegalTransition when the move is not allowed."""
    async with transaction(connection):
        source = State((await _lock_worker(connection, worker_id))["status"])
        if not SUPERVISED_WORKER.can(source, event):
            await _count_refused_move(connection, source, TARGETS[event])
            raise illegal_move(worker_id, source, TARGETS[event], event)
        parameters = {"id": worker_id, "reason": reason, "actor": actor, "now": now}
        await run(connection, WORKERS[STATEMENTS[event]], parameters)
        await run(connection, WORKERS["notify_control"], {"payload": worker_id})
    return WorkerMove(worker_id, event, source, TARGETS[event])


async def transition_worker(
    connection: Connection,
    worker_id: str,
    target: State,
    *,
    actor: str,
    reason: str | None = None,
    now: datetime | None = None,
) -> WorkerMove:
    """Move a worker to a state by the event that leads there; IllegalTransition when there is none."""
    async with transaction(connection):
        source = State((await _lock_worker(connection, worker_id))["status"])
        events = SUPERVISED_WORKER.events_between(source, target)
        if not events:
            await _count_refused_move(connection, source, target)
            raise illegal_move(worker_id, source, target)
        return await move_worker(connection, worker_id, events[0], actor=actor, reason=reason, now=now)


async def kill_worker(
    connection: Connection, worker_id: str, *, actor: str, reason: str | None = None, now: datetime | None = None
) -> WorkerMove:
    """Terminate a worker without a grace: its supervisor kills the process and everything in its process group.

    Also for a worker that is TERMINATED already while its process still stops. InputError for a worker that registered
    itself: no supervisor can kill its process.
    """
    async with transaction(connection):
        row = await _lock_worker(connection, worker_id)
        if not row["supervised"]:
            raise InputError(
                f"worker {worker_id} was not started by a supervisor, which could kill it: terminate it without force, "
                "or kill its process on its host"
            )
        if row["status"] == State.TERMINATED and row["pid"] is not None:
            move = WorkerMove(worker_id, Event.TERMINATE, State.TERMINATED, State.TERMINATED)
        else:
            move = await move_worker(connection, worker_id, Event.TERMINATE, actor=actor, reason=reason, now=now)
        await run(connection, WORKERS["request_kill"], {"id": worker_id, "now": now})
        await run(connection, WORKERS["notify_control"], {"payload": worker_id})
    return move


async def _lock_worker(connection: Connection, worker_id: str) -> dict[str, Any]:
    rows = await run(connection, WORKERS["lock_worker"], {"id": worker_id})
    if not rows:
        raise UnknownWorkerError(f"there is no worker {worker_id}")
    return rows[0]


async def _count_refused_move(connection: Connection, source: State, target: State) -> None:
    """Count a refusal that does not reach the guards; a rollback does not undo it."""
    given = {"machine": SUPERVISED_WORKER.name, "from_state": source, "to_state": target}
    await run(connection, WORKERS["count_refused_move"], given)


def illegal_move(worker_id: str, source: State, target: State, event: Event | None = None) -> IllegalTransition:
    """Build the error of a move that the lifecycle of workers does not allow."""
    sentence = SUPERVISED_WORKER.validate_transition(source, target)
    if sentence is None:  # another event leads to the target: an IDLE worker is started, not resumed
        instead = ", ".join(SUPERVISED_WORKER.events_between(source, target))
        sentence = f"Invalid state transition: {source} → {target} by {event}. It takes {instead}"
    return IllegalTransition(
        sentence,
        machine=SUPERVISED_WORKER.name,
        row=worker_id,
        from_state=source,
        to_state=target,
        allowed=SUPERVISED_WORKER.allowed_targets(source),
        sqlstate=GUARD_SQLSTATE,
    )


async def resolve_worker_id(connection: Connection, name: str) -> str:
    """Return the id of a worker by that, or by the instance under which a process of it holds, or held, tasks."""
    rows = await run(connection, WORKERS["resolve_worker_id"], {"name": name})
    return str(rows[0]["id"]) if rows else name


async def read_worker(connection: Connection, worker_id: str) -> dict[str, Any]:
    """Read the whole row of a worker, by its id or by the instance of a process of it."""
    rows = await run(connection, WORKERS["read_worker"], {"id": await resolve_worker_id(connection, worker_id)})
    if not rows:
        raise UnknownWorkerError(f"there is no worker {worker_id}")
    return rows[0]


async def find_worker_page(
    connection: Connection,
    *,
    statuses: Sequence[str] | None = None,
    workspace_id: str | None = None,
    role: str | None = None,
    pool: str | None = None,
    namespace: str | None = None,
    namespaces: Sequence[str] | None = None,
    host: str | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    before: tuple[datetime, str] | None = None,
    limit: int = 100,
) -> TimePage:
    """Find one page of workers, newest first; `before` is the `next` of the page before.

    A worker serves the `namespace` and one of the `namespaces`. A page may be short although others follow.
    """
    created_at, id_ = before or (None, None)
    parameters = {
        "statuses": None if statuses is None else [str(status) for status in statuses],
        "workspace_id": workspace_id,
        "role": role,
        "pool": pool,
        "namespace": namespace,
        "namespaces": None if namespaces is None else list(namespaces),
        "host": host,
        "created_after": created_after,
        "created_before": created_before,
        "before_time": created_at,
        "before_id": id_,
    }
    return await run_time_list(connection, WORKERS["find_workers"], parameters, time="created_at", limit=limit)


async def find_workers(
    connection: Connection,
    *,
    statuses: Sequence[str] | None = None,
    role: str | None = None,
    pool: str | None = None,
    limit: int = 100,
) -> list[dict[str, Any]]:
    """Find workers, newest first, page by page."""

    async def read_page(before: tuple[datetime, str] | None, left: int) -> TimePage:
        return await find_worker_page(connection, statuses=statuses, role=role, pool=pool, before=before, limit=left)

    return await collect_pages(read_page, limit)


async def read_last_worker_move(connection: Connection, worker_id: str) -> dict[str, Any] | None:
    """Read the latest move of a worker."""
    rows = await run(connection, WORKERS["read_last_worker_move"], {"id": worker_id})
    return rows[0] if rows else None
