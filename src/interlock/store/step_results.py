"""The queue of step results: its metrics, dead letters (archived messages), and resending of lost or archived ones.

Invariant: no message is resent while the first one may still be in the queue; a message that keeps failing is resent at
growing intervals; a message that was not needed changes nothing.

It stands apart from `store/jobs.py`, which only reads.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from interlock.postgres.query import run
from interlock.store.jobs import ORCHESTRATION

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

MAX_RESEND_BATCH_SIZE = 1_000  # messages, or jobs, per transaction
LOST_RESULT_MIN_AGE = timedelta(minutes=1)  # since the end of a step that was not advanced


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
    """Update the reason of jobs that wait for workers, where the unserved namespaces have changed; return how many."""
    parameters = {"limit": MAX_RESEND_BATCH_SIZE, "now": now}
    return len(await run(connection, ORCHESTRATION["refresh_pending_reasons"], parameters))
