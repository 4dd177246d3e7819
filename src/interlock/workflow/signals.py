"""Sends signals and approvals to jobs, and ends the waits of steps that are due: sleeps, and signals that did not come.

Invariant: a signal is consumed by one step at most, and a step consumes the oldest one that is left, whether it was
sent before the step waits or after; a wait with a timeout ends by the signal or by the timeout, never by both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.errors import InputError, RequestReusedError, UnknownJobError
from interlock.model.graph import signal_name
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, run
from interlock.store.jobs import ORCHESTRATION
from interlock.store.signals import SIGNALS
from interlock.workflow.activate import apply_batch, consume_signal, resolve_ended_steps
from interlock.workflow.batch import INTERACTIVE_LOCK_TIMEOUT, lock_jobs, run_all_jobs, run_interactive
from interlock.workflow.resolve import WaitingStep

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.batch import Batch, LockedJob


async def send_signal(
    connection: Connection,
    job_id: UUID,
    name: str,
    payload: Any,
    *,
    actor: str,
    is_answer: bool = False,
    request_id: str | None = None,
    now: datetime | None = None,
) -> bool:
    """Store a signal for a job; the first of the steps that wait for it consumes it. True if it was stored.

    False if the request id was used for the same signal before, or if the approval has been answered. An answer is a
    signal with the name of the approval's step: {"approved": true or false, "by": …, "comment": …}. With `is_answer`,
    the step must be an approval.
    """
    signal = {"job_id": job_id, "name": name, "payload": as_json(payload), "request_id": request_id}

    async def send(own: bool) -> bool:  # noqa: FBT001 - the signature of `run_interactive`'s work
        async with transaction(connection):
            batch = await lock_jobs(
                connection, [job_id], actor=actor, now=now, own=own, lock_timeout=INTERACTIVE_LOCK_TIMEOUT
            )
            if request_id is not None and await _is_repeated(connection, signal):
                return False
            rows = await run(connection, SIGNALS["read_signal_steps"], {"job_id": job_id})
            if is_answer:
                _require_approval_step(job_id, name, rows)
            receivers = _find_receivers(batch.jobs.get(job_id), job_id, name, rows)
            _check_payload(job_id, receivers[0], payload)
            if receivers[0]["is_answered"]:
                return False
            if all(row["has_failed"] for row in receivers):
                raise InputError(f"job {job_id} does not wait for signal {name!r} any more: its timeout has passed")
            (stored,) = await run(connection, SIGNALS["insert_signal"], {**signal, "actor": actor, "now": now})
            await _wake_receiver(connection, batch, receivers, {**stored, "payload": payload, "sent_by": actor})
        return True

    return await run_interactive(connection, send)


async def _is_repeated(connection: Connection, signal: dict[str, Any]) -> bool:
    """Tell whether the request id was used for this signal before; RequestReusedError if it was for another one."""
    for row in await run(connection, SIGNALS["read_sent_signal"], signal):
        if not row["is_same"]:
            raise RequestReusedError(
                f"job {signal['job_id']}: request id {signal['request_id']!r} was used for a signal with another name "
                "or payload; give each signal its own"
            )
        return True
    return False


async def _wake_receiver(
    connection: Connection, batch: Batch, receivers: Sequence[dict[str, Any]], signal: dict[str, Any]
) -> None:
    """Let the first of the waiting steps, in the order of the definition, consume the signal, if one waits."""
    waiting = next((row for row in receivers if row["is_waiting"]), None)
    if waiting is not None:
        ended = consume_signal(batch, _waiting_step(waiting), signal)
        await resolve_ended_steps(connection, batch, [ended])
        await apply_batch(connection, batch)


async def end_due_waits(connection: Connection, *, actor: str, limit: int = 100, now: datetime | None = None) -> int:
    """Complete steps whose sleep is over, and fail steps whose signal did not come in time; return how many."""
    due = await _read_due(connection, limit, now)
    if not due:
        return 0

    async def end(ids: Collection[UUID]) -> int:
        async with transaction(connection):
            batch = await lock_jobs(connection, ids, actor=actor, now=now, own=True)
            # read again: a signal may have arrived before the lock was granted
            still = [row for row in await _read_due(connection, limit, now) if row["job_id"] in batch.jobs]
            ended = []
            for row in still:
                step = _waiting_step(row)
                if row["kind"] == "sleep":
                    ended.append(batch.succeed(step))
                else:
                    message = f"no signal {signal_name(row['spec'])!r} within {row['spec'].get('timeout'):g} s"
                    ended.append(batch.fail(step, message, "TimeoutError"))
            await resolve_ended_steps(connection, batch, ended)
            await apply_batch(connection, batch)
        return len(ended)

    job_ids = {row["job_id"] for row in due}
    return await run_all_jobs(connection, job_ids, end, name="advanced after a wait", now=now)


async def _read_due(connection: Connection, limit: int, now: datetime | None) -> list[dict[str, Any]]:
    return await run(connection, ORCHESTRATION["read_due_waits"], {"limit": limit, "now": now})


def _find_receivers(
    job: LockedJob | None, job_id: UUID, name: str, rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """List the steps that a signal is for; UnknownJobError, or InputError if there are none or the job is over."""
    if job is None:
        raise UnknownJobError(f"there is no job {job_id}")
    receivers = [row for row in rows if signal_name(row["spec"]) == name]
    if not receivers:
        names = ", ".join(sorted({signal_name(row["spec"]) for row in rows}))
        raise InputError(f"job {job_id} has no step that waits for a signal {name!r}; it waits for {names or 'none'}")
    if job.is_over:
        raise InputError(f"job {job_id} is {job.ending or job.status}: a signal cannot reach it any more")
    return receivers


def _require_approval_step(job_id: UUID, step: str, rows: Sequence[dict[str, Any]]) -> None:
    """Raise InputError if a signal step, which another command serves, is to be approved."""
    for row in rows:
        if row["kind"] == "signal" and step in {row["step"], row["spec"]["signal"]}:
            name = signal_name(row["spec"])
            raise InputError(
                f"step {row['step']!r} of job {job_id} waits for signal {name!r}, and not for approval; "
                f"`interlock jobs signal {job_id} {name}` sends it"
            )


def _check_payload(job_id: UUID, receiver: dict[str, Any], payload: Any) -> None:
    """Raise InputError if a payload is no answer to an approval, or does not fit the schema, which names the place."""
    name = signal_name(receiver["spec"])
    if receiver["kind"] == "approval":
        if not isinstance(payload, dict) or not isinstance(payload.get("approved"), bool):
            answer = '{"approved": true or false, …}'
            raise InputError(f"the answer to approval {name!r} must be {answer}, not {payload!r}")
        return
    schema = receiver["spec"].get("payload_schema")
    if schema is not None:
        # not at the top: the schema library is slow to import, and many signals have no schema
        from interlock.model.json_schema import find_fault  # noqa: PLC0415 - heavy, and seldom needed

        fault = find_fault(f"job {job_id}: signal {name!r}: payload", schema, payload)
        if fault is not None:
            raise InputError(fault)


def _waiting_step(row: dict[str, Any]) -> WaitingStep:
    return WaitingStep(**{key: row[key] for key in ("id", "job_id", "step", "kind", "namespace", "priority")})
