"""Signals and approvals: what steps wait for that comes from outside.

Invariant: the first signal of a name counts, whether a step waits for it already or not; a wait with a timeout ends
by one of the two, never by both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.errors import InputError
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, run
from interlock.store.jobs import ORCHESTRATION, STEPS
from interlock.workflow.activate import carry_out
from interlock.workflow.batch import A_PERSON_S, ENDED, for_a_person, lock_jobs, together_or_apart
from interlock.workflow.resolve import Waiting

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.batch import LockedJob


async def send_signal(
    connection: Connection, job_id: UUID, name: str, payload: Any, *, actor: str, now: datetime | None = None
) -> bool:
    """Send a signal to a job, and let go what waits for it; False when one of that name was there.

    An approval is a signal with the name of its step: {"approved": true or false, "by": …, "comment": …}.
    """

    async def send(own: bool) -> bool:  # noqa: FBT001 - the one thing that it is told
        async with transaction(connection):
            batch = await lock_jobs(connection, [job_id], actor=actor, now=now, own=own, patience=A_PERSON_S)
            rows = await run(connection, ORCHESTRATION["read_waits_for_signal"], {"job_id": job_id})
            reached = _reached(batch.jobs.get(job_id), job_id, name, rows)
            _check_payload(name, payload, {row["kind"] for row in reached})
            parameters = {"job_id": job_id, "name": name, "payload": as_json(payload), "actor": actor, "now": now}
            sent = bool(await run(connection, ORCHESTRATION["insert_signal"], parameters))
            if sent:
                _check_time(job_id, name, reached)
                for row in reached:
                    if row["waits"]:
                        batch.release(_waiting(row))
                await carry_out(connection, batch)
        return sent

    return await for_a_person(connection, send)


async def expire_overdue_signals(
    connection: Connection, *, actor: str, limit: int = 100, now: datetime | None = None
) -> int:
    """Let steps go whose signal did not come in time, so that they fail; give how many."""
    overdue = await _read_overdue(connection, limit, now)
    if not overdue:
        return 0

    async def expire(ids: Collection[UUID]) -> int:
        async with transaction(connection):
            batch = await lock_jobs(connection, ids, actor=actor, now=now, own=True)
            # a signal may have come while the lock was waited for
            still = [row["id"] for row in await _read_overdue(connection, limit, now) if row["job_id"] in batch.jobs]
            for row in await run(connection, STEPS["read_openings"], {"ids": still}):
                seconds = row["spec"].get("timeout")
                batch.release(_waiting(row), refused=f"no signal {_name(row)!r} within {seconds:g} s")
            await carry_out(connection, batch)
        return len(still)

    jobs = {row["job_id"] for row in overdue}
    return await together_or_apart(connection, jobs, expire, name="told that a signal did not come", now=now)


async def _read_overdue(connection: Connection, limit: int, now: datetime | None) -> list[dict[str, Any]]:
    return await run(connection, ORCHESTRATION["read_overdue_signals"], {"limit": limit, "now": now})


def _reached(job: LockedJob | None, job_id: UUID, name: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the steps that a signal is for, or refuse it."""
    if job is None:
        raise InputError(f"there is no job {job_id}")
    reached = [row for row in rows if _name(row) == name]
    if not reached:
        names = ", ".join(sorted(set(map(_name, rows))))
        raise InputError(f"job {job_id} has no step that waits for a signal {name!r}; it waits for {names or 'none'}")
    if job.status in ENDED or job.ending is not None:
        raise InputError(f"job {job_id} is {job.ending or job.status}: a signal cannot reach it any more")
    return reached


def _check_time(job_id: UUID, name: str, reached: Sequence[dict[str, Any]]) -> None:
    if all(row["is_over"] for row in reached):
        raise InputError(f"job {job_id} does not wait for signal {name!r} any more: its time is over")


def _check_payload(name: str, payload: Any, kinds: set[str]) -> None:
    answers = isinstance(payload, dict) and isinstance(payload.get("approved"), bool)
    if "approval" in kinds and not answers:
        raise InputError(f'the answer to approval {name!r} must be {{"approved": true or false, …}}, not {payload!r}')


def _name(row: dict[str, Any]) -> str:
    return str(row["spec"]["signal"] if row["kind"] == "signal" else row["step"])


def _waiting(row: dict[str, Any]) -> Waiting:
    return Waiting(**{key: row[key] for key in ("id", "job_id", "step", "kind", "namespace", "priority")})
