"""Sends signals and approvals to jobs, and expires waits for them.

Invariant: the first signal of a name counts, whether a step waits for it already or not; a wait with a timeout ends by
the signal or by the timeout, never by both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.errors import InputError
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, run
from interlock.store.jobs import ORCHESTRATION, STEPS
from interlock.workflow.activate import apply_batch
from interlock.workflow.batch import INTERACTIVE_LOCK_TIMEOUT, lock_jobs, run_all_jobs, run_interactive
from interlock.workflow.resolve import WaitingStep

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.batch import LockedJob


async def send_signal(
    connection: Connection, job_id: UUID, name: str, payload: Any, *, actor: str, now: datetime | None = None
) -> bool:
    """Send a signal to a job and activate the steps that wait for it; False if one of that name was sent before.

    An approval is a signal with the name of its step: {"approved": true or false, "by": …, "comment": …}.
    """

    async def send(own: bool) -> bool:  # noqa: FBT001 - the signature of `run_interactive`'s work
        async with transaction(connection):
            batch = await lock_jobs(
                connection, [job_id], actor=actor, now=now, own=own, lock_timeout=INTERACTIVE_LOCK_TIMEOUT
            )
            rows = await run(connection, ORCHESTRATION["read_signal_steps"], {"job_id": job_id})
            receivers = _find_receivers(batch.jobs.get(job_id), job_id, name, rows)
            _check_payload(name, payload, {row["kind"] for row in receivers})
            parameters = {"job_id": job_id, "name": name, "payload": as_json(payload), "actor": actor, "now": now}
            sent = bool(await run(connection, ORCHESTRATION["insert_signal"], parameters))
            if sent:
                if all(row["is_timed_out"] for row in receivers):
                    raise InputError(f"job {job_id} does not wait for signal {name!r} any more: its timeout has passed")
                for row in receivers:
                    if row["is_waiting"]:
                        batch.activate(_waiting_step(row))
                await apply_batch(connection, batch)
        return sent

    return await run_interactive(connection, send)


async def expire_overdue_signals(
    connection: Connection, *, actor: str, limit: int = 100, now: datetime | None = None
) -> int:
    """Fail steps whose signal did not come in time; return how many."""
    overdue = await _read_overdue(connection, limit, now)
    if not overdue:
        return 0

    async def expire(ids: Collection[UUID]) -> int:
        async with transaction(connection):
            batch = await lock_jobs(connection, ids, actor=actor, now=now, own=True)
            # read again: a signal may have arrived before the lock was granted
            still = [row["id"] for row in await _read_overdue(connection, limit, now) if row["job_id"] in batch.jobs]
            for row in await run(connection, STEPS["read_special_steps"], {"ids": still}):
                seconds = row["spec"].get("timeout")
                refused = f"no signal {_signal_name(row)!r} within {seconds:g} s"
                batch.activate(_waiting_step(row), refused=refused)
            await apply_batch(connection, batch)
        return len(still)

    job_ids = {row["job_id"] for row in overdue}
    return await run_all_jobs(connection, job_ids, expire, name="failed after the timeout of a signal", now=now)


async def _read_overdue(connection: Connection, limit: int, now: datetime | None) -> list[dict[str, Any]]:
    return await run(connection, ORCHESTRATION["read_overdue_signals"], {"limit": limit, "now": now})


def _find_receivers(
    job: LockedJob | None, job_id: UUID, name: str, rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """List the steps that a signal is for; InputError if there are none or the job is over."""
    if job is None:
        raise InputError(f"there is no job {job_id}")
    receivers = [row for row in rows if _signal_name(row) == name]
    if not receivers:
        names = ", ".join(sorted(set(map(_signal_name, rows))))
        raise InputError(f"job {job_id} has no step that waits for a signal {name!r}; it waits for {names or 'none'}")
    if job.is_over:
        raise InputError(f"job {job_id} is {job.ending or job.status}: a signal cannot reach it any more")
    return receivers


def _check_payload(name: str, payload: Any, kinds: set[str]) -> None:
    is_answer = isinstance(payload, dict) and isinstance(payload.get("approved"), bool)
    if "approval" in kinds and not is_answer:
        raise InputError(f'the answer to approval {name!r} must be {{"approved": true or false, …}}, not {payload!r}')


def _signal_name(row: dict[str, Any]) -> str:
    return str(row["spec"]["signal"] if row["kind"] == "signal" else row["step"])


def _waiting_step(row: dict[str, Any]) -> WaitingStep:
    return WaitingStep(**{key: row[key] for key in ("id", "job_id", "step", "kind", "namespace", "priority")})
