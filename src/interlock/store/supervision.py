"""A supervisor's side of `workers`: it leases rows, and records the one process that it runs for each.

Invariant: a supervisor writes to a row only while it holds the row's lease and names the row's present generation.
Otherwise nothing is written, and the result says so.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.postgres.connection import transaction
from interlock.postgres.query import run
from interlock.store.task_admin import recover_expired_tasks
from interlock.store.workers import SUPERVISION, WORKERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

SUPERVISION_LEASE = timedelta(seconds=10)


class HeldWorker(NamedTuple):
    """A row that this supervisor has leased."""

    id: str
    status: str
    spec: dict[str, Any]
    bound_to: str | None
    generation: int
    instance: str | None
    host: str | None
    pid: int | None
    birth: str | None
    process_started_at: datetime | None
    seen_until: datetime | None
    heartbeat_at: datetime | None
    crashes: int
    restart_at: datetime | None
    pool: str | None
    kill_requested: bool  # without a grace
    moment: datetime  # the server's time of the read
    holds: int  # tasks that the process of a paused worker still runs


class HeldTask(NamedTuple):
    """A task that a process held when it ended; `held` is the number of all of them."""

    id: UUID
    type: str
    held: int


class SilentWorker(NamedTuple):
    """A row that was terminated because its process sent no heartbeat."""

    id: str
    instance: str | None
    bound_to: str | None
    silent_for: timedelta


@dataclass(frozen=True, slots=True)
class Supervision:
    """The statements of one supervisor."""

    supervisor: str
    host: str
    lease: timedelta = SUPERVISION_LEASE

    async def lease_workers(self, connection: Connection, *, limit: int, now: datetime | None = None) -> list[str]:
        """Lease up to `limit` rows that need a process and whose lease is free or expired; return their ids."""
        given = self._given(now) | {"lease": self.lease, "host": self.host, "limit": limit}
        return [row["id"] for row in await run(connection, SUPERVISION["lease_workers"], given)]

    async def renew_held_workers(self, connection: Connection, *, now: datetime | None = None) -> None:
        """Renew the leases of all rows that this supervisor still holds."""
        await run(connection, SUPERVISION["renew_held_workers"], self._given(now) | {"lease": self.lease})

    async def read_held_workers(self, connection: Connection, *, now: datetime | None = None) -> list[HeldWorker]:
        """Read the rows that this supervisor holds, with the server's time."""
        rows = await run(connection, SUPERVISION["read_held_workers"], self._given(now))
        # any client can write the spec: one that is not an object means an empty spec
        return [HeldWorker(**row | {"spec": row["spec"] if isinstance(row["spec"], dict) else {}}) for row in rows]

    async def announce_process(
        self, connection: Connection, worker: HeldWorker, instance: str, *, now: datetime | None = None
    ) -> int | None:
        """Record that a process is about to start; return its generation, or None when it must not be started."""
        given = self._of(worker, now) | {"instance": instance, "host": self.host}
        rows = await run(connection, SUPERVISION["announce_process"], given)
        return rows[0]["generation"] if rows else None

    async def record_process(
        self, connection: Connection, worker_id: str, generation: int, pid: int, birth: str | None
    ) -> bool:
        """Record the pid and start time of a process; False when another supervisor or generation has the row."""
        given = {"id": worker_id, "generation": generation, "pid": pid, "birth": birth, "supervisor": self.supervisor}
        return bool(await run(connection, SUPERVISION["record_process"], given))

    async def record_memory(self, connection: Connection, used: Mapping[str, int]) -> None:
        """Record the memory that processes use, in bytes by worker id."""
        given = {"ids": list(used), "bytes": list(used.values()), "supervisor": self.supervisor}
        await run(connection, SUPERVISION["record_memory"], given)

    async def reset_crashes(self, connection: Connection, worker: HeldWorker) -> None:
        """Set the crash count to 0 after a process has run long enough."""
        await run(connection, SUPERVISION["reset_crashes"], self._of(worker, None))

    async def record_process_end(
        self,
        connection: Connection,
        worker: HeldWorker,
        note: str | None,
        *,
        crashes: int = 0,
        delay: float | None = None,
        suspects: Sequence[UUID] | None = None,
        now: datetime | None = None,
    ) -> None:
        """Record the end of a process and recover the tasks that it held. Must run in a transaction.

        `suspects` are the tasks that may have crashed it; None if it did not crash.
        """
        given = self._of(worker, now) | {
            "note": note,
            "crashes": crashes,
            "delay": delay,
            "suspects": None if suspects is None else list(suspects),
        }
        if await run(connection, SUPERVISION["record_process_end"], given) and worker.instance is not None:
            await recover_tasks_of(connection, [worker.instance], actor=self.supervisor, now=now)

    async def read_tasks_of_process(self, connection: Connection, worker: HeldWorker) -> list[HeldTask]:
        """Read the tasks that a process held at its end, at most ten, the latest first."""
        rows = await run(connection, SUPERVISION["read_tasks_of_process"], {"instance": worker.instance})
        return [HeldTask(**row) for row in rows]

    @asynccontextmanager
    async def lock_held_worker(
        self, connection: Connection, worker: HeldWorker, *, now: datetime | None = None
    ) -> AsyncIterator[bool]:
        """Open a transaction that locks the row; yield whether lease, status and generation are still as read."""
        async with transaction(connection):
            yield bool(await run(connection, SUPERVISION["lock_held_worker"], self._of(worker, now)))

    async def pause(self, connection: Connection, worker: HeldWorker, reason: str, *, now: datetime | None) -> bool:
        """Pause a worker: it claims nothing new."""
        return await self._move(connection, "pause_running_worker", worker.id, reason, now)

    async def resume(self, connection: Connection, worker: HeldWorker, reason: str, *, now: datetime | None) -> bool:
        """Resume a worker: another process is started for it."""
        return await self._move(connection, "resume_paused_worker", worker.id, reason, now)

    async def fail(self, connection: Connection, worker: HeldWorker, reason: str, *, now: datetime | None) -> bool:
        """Fail a worker; it is not restarted."""
        return await self._move(connection, "fail_running_worker", worker.id, reason, now)

    async def terminate(self, connection: Connection, worker: HeldWorker, reason: str, *, now: datetime | None) -> bool:
        """Terminate a worker and recover the tasks that its process holds. Must run in a transaction."""
        if worker.instance is not None:
            await recover_tasks_of(connection, [worker.instance], actor=self.supervisor, now=now)
        return await self._move(connection, "terminate_worker", worker.id, reason, now)

    async def terminate_silent_workers(
        self,
        connection: Connection,
        *,
        heartbeat_timeout: timedelta,
        watched_since: datetime,
        now: datetime | None = None,
    ) -> list[SilentWorker]:
        """Terminate rows whose heartbeat is older than `heartbeat_timeout`, and recover their tasks.

        Silence before `watched_since` does not count: the database or all supervisors may have been down.
        """
        async with transaction(connection):
            given = {"heartbeat_timeout": heartbeat_timeout, "watched_since": watched_since, "now": now}
            silent = [SilentWorker(**row) for row in await run(connection, SUPERVISION["read_silent_workers"], given)]
            for worker in silent:
                seconds = worker.silent_for.total_seconds()
                reason = f"no heartbeat for {seconds:.0f} s"
                if worker.bound_to is not None:
                    reason += f", and its supervisor {worker.bound_to} is gone"
                await self._move(connection, "terminate_worker", worker.id, reason, now)
            holders = [name for worker in silent for name in (worker.id, worker.instance) if name is not None]
            holders += [row["holder"] for row in await run(connection, SUPERVISION["read_ended_holders"], given)]
            await recover_tasks_of(connection, holders, actor=self.supervisor, now=now)
        return silent

    async def release_held_worker(self, connection: Connection, worker: HeldWorker) -> None:
        """Release the lease of a row that needs no process."""
        await run(connection, SUPERVISION["release_held_worker"], self._of(worker, None))

    async def release_held_workers(self, connection: Connection) -> None:
        """Release all leases."""
        await run(connection, SUPERVISION["release_held_workers"], {"supervisor": self.supervisor})

    async def _move(
        self, connection: Connection, statement: str, worker_id: str, reason: str, now: datetime | None
    ) -> bool:
        given = {"id": worker_id, "reason": reason, "actor": self.supervisor, "now": now}
        moved = bool(await run(connection, WORKERS[statement], given))
        if moved:
            await run(connection, WORKERS["notify_control"], {"payload": worker_id})
        return moved

    def _given(self, now: datetime | None) -> dict[str, Any]:
        return {"supervisor": self.supervisor, "now": now}

    def _of(self, worker: HeldWorker, now: datetime | None) -> dict[str, Any]:
        return self._given(now) | {"id": worker.id, "generation": worker.generation}


async def recover_tasks_of(
    connection: Connection, holders: Sequence[str], *, actor: str, now: datetime | None = None
) -> None:
    """Expire the leases of workers that are gone and recover their tasks; a late settle is refused by the fence."""
    if holders and await run(
        connection, SUPERVISION["expire_leases_of_workers"], {"holders": list(holders), "now": now}
    ):
        while await recover_expired_tasks(connection, actor=actor, now=now):
            pass
