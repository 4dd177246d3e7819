"""The queue of step results: messages, metrics, dead letters (archived messages), resending of lost and archived ones.

Invariant: no message is resent while the first one may still be in the queue; a message that keeps failing is resent at
growing intervals; a message that was not needed changes nothing.

It stands apart from `store/jobs.py`, which only reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import orjson

from interlock.errors import InputError
from interlock.postgres.query import run
from interlock.store.jobs import JOBS, ORCHESTRATION

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.postgres.query import StatementCall

MAX_RESEND_BATCH_SIZE = 1_000  # messages, or jobs, per transaction
LOST_RESULT_MIN_AGE = timedelta(minutes=1)  # since the end of a step that was not advanced


@dataclass(frozen=True, slots=True)
class SimpleStepMessage:
    """A message of the queue: ids, and the trace of its job. It decides nothing: the result stays in the task's row.

    `task_id` is a step that has ended, or whose child job has. Without it, the orchestrator looks at the job itself.
    """

    job_id: UUID
    task_id: UUID | None = None
    correlation_id: UUID | None = None
    traceparent: str | None = None
    failure: int | None = None  # the id under which it was archived before

    @classmethod
    def parse(cls, content: Any) -> SimpleStepMessage:
        """Parse a message that was read from the queue; InputError if it is malformed."""
        ids = parse_ids(content)
        if ids["job_id"] is None or (ids["task_id"] is None and content.get("task_id") is not None):
            raise InputError('it is not {"job_id": …} or {"job_id": …, "task_id": …}')
        traceparent = content.get("traceparent")
        return cls(**ids, traceparent=traceparent if isinstance(traceparent, str) else None)

    def document(self) -> dict[str, Any]:
        """Return the message as it is sent."""
        values = {
            "job_id": self.job_id,
            "task_id": self.task_id,
            "correlation_id": self.correlation_id,
            "traceparent": self.traceparent,
        }
        return {name: value for name, value in values.items() if value is not None}


def parse_ids(content: Any) -> dict[str, Any]:
    """Return the ids in the content of a message; None where there is none or a malformed one."""
    content = content if isinstance(content, dict) else {}
    ids: dict[str, Any] = {name: _parse_uuid(content.get(name)) for name in ("job_id", "task_id", "correlation_id")}
    failure = content.get("failure")
    return {**ids, "failure": failure if type(failure) is int and 0 <= failure < 1 << 63 else None}


def _parse_uuid(value: Any) -> UUID | None:
    try:
        return UUID(value)
    except (AttributeError, TypeError, ValueError):
        return None


def send_messages(messages: Iterable[SimpleStepMessage]) -> StatementCall:
    """Make the statement that sends messages; the ends of steps are sent by a trigger."""
    documents = [message.document() for message in messages]
    return ORCHESTRATION["send_messages"], {"messages": orjson.dumps(documents).decode()}


async def read_queue_state(connection: Connection) -> dict[str, Any]:
    """Read how many messages wait, the age of the oldest in seconds, and how many are archived."""
    rows = await run(connection, ORCHESTRATION["read_queue_state"], {})
    return dict(rows[0]) if rows else {"waiting": 0, "oldest_age": None, "archived": 0}


async def read_orchestration_failures(connection: Connection, *, limit: int = 100) -> list[dict[str, Any]]:
    """Read the dead letters (archived messages) with their errors, newest first."""
    return await run(connection, ORCHESTRATION["read_orchestration_failures"], {"limit": limit})


async def resend_lost_results(connection: Connection, *, now: datetime | None = None) -> int:
    """Resend dead letters that are due, and results of steps that ended a while ago and were not advanced."""
    due = {"job_id": None, "at_once": False, "limit": MAX_RESEND_BATCH_SIZE, "now": now}
    (failures,) = await run(connection, ORCHESTRATION["resend_failures"], due)
    overlooked = {"min_age": LOST_RESULT_MIN_AGE, "limit": MAX_RESEND_BATCH_SIZE, "now": now}
    (lost,) = await run(connection, ORCHESTRATION["resend_lost_results"], overlooked)
    return int(failures["sent"] + lost["sent"])


async def replay_results(connection: Connection, job_id: UUID | None = None, *, now: datetime | None = None) -> int:
    """Resend dead letters at once, of one job or of all; for one job, also every result that was not advanced."""
    every = {"job_id": job_id, "at_once": True, "limit": None, "now": now}
    (failures,) = await run(connection, ORCHESTRATION["resend_failures"], every)
    if job_id is None:
        return int(failures["sent"])
    (lost,) = await run(connection, ORCHESTRATION["resend_results_of_job"], {"job_id": job_id, "now": now})
    return int(failures["sent"] + lost["sent"])


async def refresh_pending_reasons(connection: Connection, *, now: datetime | None = None) -> int:
    """Update the reason of jobs that wait for workers or for their key, where it has changed; return how many."""
    parameters = {"limit": MAX_RESEND_BATCH_SIZE, "now": now}
    waiting_for_workers = await run(connection, ORCHESTRATION["refresh_pending_reasons"], parameters)
    return len(waiting_for_workers) + len(await run(connection, JOBS["refresh_key_reasons"], parameters))
