"""TODO docstring."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from interlock.postgres.query import run
from interlock.store.jobs import ORCHESTRATION

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection


async def queue_state(connection: Connection) -> dict[str, Any]:
    """Tell how many messages wait, how old the oldest is in seconds, and how many were put aside."""
    rows = await run(connection, ORCHESTRATION["read_queue_state"], {})
    return dict(rows[0]) if rows else {"waiting": 0, "oldest_age": None, "archived": 0}


async def read_orchestration_failures(connection: Connection, *, limit: int = 100) -> list[dict[str, Any]]:
    """Read the messages that were put aside, the latest first."""
    return await run(connection, ORCHESTRATION["read_orchestration_failures"], {"limit": limit})


REPLAY_BATCH_SIZE = 1_000  # messages, or jobs, that one transaction takes


LOST_RESULT_AGE = timedelta(minutes=1)  # with a step that has ended and was not carried on


async def resend_lost_results(connection: Connection, *, now: datetime | None = None) -> int:
    """Send again what was set aside and is due, and what ended and was not carried on for a while; give how many."""
    due = {"job_id": None, "asked": False, "limit": REPLAY_BATCH_SIZE, "now": now}
    (failures,) = await run(connection, ORCHESTRATION["resend_failures"], due)
    overlooked = {"patience": LOST_RESULT_AGE, "limit": REPLAY_BATCH_SIZE, "now": now}
    (lost,) = await run(connection, ORCHESTRATION["resend_lost_results"], overlooked)
    return int(failures["sent"] + lost["sent"])


async def replay_results(connection: Connection, job_id: UUID | None = None, *, now: datetime | None = None) -> int:
    """Send again at once what was set aside, of one job or of all; of one job, all that was not carried on."""
    asked = {"job_id": job_id, "asked": True, "limit": None, "now": now}
    (failures,) = await run(connection, ORCHESTRATION["resend_failures"], asked)
    if job_id is None:
        return int(failures["sent"])
    (lost,) = await run(connection, ORCHESTRATION["resend_results_of_job"], {"job_id": job_id, "now": now})
    return int(failures["sent"] + lost["sent"])


async def refresh_pending_reasons(connection: Connection, *, now: datetime | None = None) -> int:
    """Write down anew what jobs wait for that no worker serves, where that has changed; give how many."""
    return len(
        await run(connection, ORCHESTRATION["refresh_pending_reasons"], {"limit": REPLAY_BATCH_SIZE, "now": now})
    )
