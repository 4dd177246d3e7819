"""Rows of supervised workers, as a supervisor keeps them: a lease on each, and what is known of its one process.

Invariant: whatever a supervisor writes of a row, it holds the row's lease, and what it knows of the process is of the
row's present generation; else nothing is written, and it is told so.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, run
from interlock.store.task_admin import recover_expired_tasks
from interlock.store.workers import SUPERVISION, WORKERS, deregister_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from datetime import datetime

    from interlock.postgres.connection import Connection

SUPERVISION_LEASE = timedelta(seconds=10)


class HeldWorker(NamedTuple):
    """A row that this supervisor keeps."""

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
    moment: datetime  # the server's clock when this was read
    holds: int  # tasks that its process still runs, if it is paused


class SilentWorker(NamedTuple):
    """A row that was ended because its process was not heard of."""

    id: str
    instance: str | None
    bound_to: str | None
    silent_for: timedelta


@dataclass(frozen=True, slots=True)
class Supervision:
    """One supervisor's hand in the rows."""

    supervisor: str
    host: str
    lease: timedelta = SUPERVISION_LEASE

    async def lease_workers(self, connection: Connection, *, limit: int, now: datetime | None = None) -> list[str]:
        """Take up to so many rows that nobody keeps and that need somebody; give their ids."""
        given = self._given(now) | {"lease": self.lease, "host": self.host, "limit": limit}
        return [row["id"] for row in await run(connection, SUPERVISION["lease_workers"], given)]

    async def renew_leases(self, connection: Connection, *, now: datetime | None = None) -> None:
        """Prolong the leases of all rows that are still this supervisor's."""
        await run(connection, SUPERVISION["renew_held_workers"], self._given(now) | {"lease": self.lease})

    async def read_held_workers(self, connection: Connection, *, now: datetime | None = None) -> list[HeldWorker]:
        """Read the rows that this supervisor keeps, with the server's clock."""
        rows = await run(connection, SUPERVISION["read_held_workers"], self._given(now))
        # anybody may have written the spec: one that is no object asks for nothing
        return [HeldWorker(**row | {"spec": row["spec"] if isinstance(row["spec"], dict) else {}}) for row in rows]

    async def announce_process(
        self, connection: Connection, worker: HeldWorker, instance: str, *, now: datetime | None = None
    ) -> int | None:
        """Announce a new process; give its generation, or None when it must not be started after all."""
        given = self._of(worker, now) | {"instance": instance, "host": self.host}
        rows = await run(connection, SUPERVISION["announce_process"], given)
        return rows[0]["generation"] if rows else None

    async def record_process(
        self, connection: Connection, worker_id: str, generation: int, pid: int, birth: str | None
    ) -> None:
        """Write which process it is."""
        given = {"id": worker_id, "generation": generation, "pid": pid, "birth": birth, "supervisor": self.supervisor}
        await run(connection, SUPERVISION["record_process"], given)

    async def record_memory(self, connection: Connection, used: Mapping[str, int]) -> None:
        """Write how much memory processes use."""
        given = {"ids": list(used), "bytes": list(used.values()), "supervisor": self.supervisor}
        await run(connection, SUPERVISION["record_memory"], given)

    async def reset_crashes(self, connection: Connection, worker: HeldWorker) -> None:
        """Write that a process has run long enough for what was before not to count."""
        await run(connection, SUPERVISION["reset_crashes"], self._of(worker, None))

    async def record_process_end(
        self,
        connection: Connection,
        worker: HeldWorker,
        note: str | None,
        *,
        crashes: int = 0,
        delay: float | None = None,
        now: datetime | None = None,
    ) -> None:
        """Write that the process is gone, and let others have the tasks that it held. Must run in a transaction."""
        given = self._of(worker, now) | {"note": note, "crashes": crashes, "delay": delay}
        if await run(connection, SUPERVISION["record_process_end"], given) and worker.instance is not None:
            await recover_tasks_of(connection, [worker.instance], actor=self.supervisor, now=now)

    @asynccontextmanager
    async def lock_held_worker(
        self, connection: Connection, worker: HeldWorker, *, now: datetime | None = None
    ) -> AsyncIterator[bool]:
        """Open a transaction in which the row is locked; tell whether it is still as it was read."""
        async with transaction(connection):
            yield bool(await run(connection, SUPERVISION["lock_held_worker"], self._of(worker, now)))

    async def pause(self, connection: Connection, worker: HeldWorker, reason: str, *, now: datetime | None) -> bool:
        """Have a worker take nothing new."""
        return await self._move(connection, "pause_running_worker", worker.id, reason, now)

    async def fail(self, connection: Connection, worker: HeldWorker, reason: str, *, now: datetime | None) -> bool:
        """Give a worker up."""
        return await self._move(connection, "fail_running_worker", worker.id, reason, now)

    async def terminate(self, connection: Connection, worker: HeldWorker, reason: str, *, now: datetime | None) -> bool:
        """End a worker, and let others have the tasks that its process holds. Must run in a transaction."""
        if worker.instance is not None:
            await recover_tasks_of(connection, [worker.instance], actor=self.supervisor, now=now)
        return await self._move(connection, "terminate_worker", worker.id, reason, now)

    async def terminate_silent_workers(
        self, connection: Connection, *, patience: timedelta, watched_since: datetime, now: datetime | None = None
    ) -> list[SilentWorker]:
        """End the rows of processes that were not heard of for too long while somebody listened; free their tasks."""
        async with transaction(connection):
            given = {"patience": patience, "watched_since": watched_since, "now": now}
            silent = [SilentWorker(**row) for row in await run(connection, SUPERVISION["read_silent_workers"], given)]
            for worker in silent:
                seconds = worker.silent_for.total_seconds()
                reason = f"no heartbeat for {seconds:.0f} s"
                if worker.bound_to is not None:
                    reason += f", and {worker.bound_to}, which it belonged to, is gone"
                await self._move(connection, "terminate_worker", worker.id, reason, now)
            holders = [name for worker in silent for name in (worker.id, worker.instance) if name is not None]
            holders += [row["holder"] for row in await run(connection, SUPERVISION["read_ended_holders"], given)]
            await recover_tasks_of(connection, holders, actor=self.supervisor, now=now)
        return silent

    async def add_bound_worker(
        self, connection: Connection, spec: Mapping[str, Any], *, now: datetime | None = None
    ) -> str:
        """Make a row that this supervisor alone keeps, and start it; give its id."""
        metadata = as_json({"spec": dict(spec), "bound_to": self.supervisor})
        given = {"id": None, "workspace_id": "default", "metadata": metadata, "actor": self.supervisor, "now": now}
        async with transaction(connection):
            (row,) = await run(connection, WORKERS["insert_worker"], given)
            await self._move(connection, "start_idle_worker", row["id"], "a worker of this supervisor", now)
        made: str = row["id"]
        return made

    async def release_worker(self, connection: Connection, worker: HeldWorker) -> None:
        """Keep a row no longer that needs nobody."""
        await run(connection, SUPERVISION["release_held_worker"], self._of(worker, None))

    async def release_workers(
        self, connection: Connection, bound: Iterable[str] = (), *, now: datetime | None = None
    ) -> None:
        """Leave all rows to others; those that are bound to this supervisor end with it."""
        async with transaction(connection):
            for worker_id in bound:
                await deregister_worker(connection, worker_id, reason="its supervisor has stopped", now=now)
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
    """Take back what processes hold that are gone, or are taken for it; a late word of theirs is fenced off."""
    if holders and await run(
        connection, SUPERVISION["expire_leases_of_workers"], {"holders": list(holders), "now": now}
    ):
        while await recover_expired_tasks(connection, actor=actor, now=now):
            pass
