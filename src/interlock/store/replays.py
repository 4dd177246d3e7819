"""Sends again what should have carried a job on and did not: messages that were set aside, and such as were lost.

Invariant: nothing is sent twice while the first message may still be in the queue, and what fails again and again is
tried less and less often; a message that was not needed changes nothing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from interlock.store.database import run
from interlock.store.submission import ORCHESTRATION

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.store.database import Connection

AT_ONCE = 1_000  # messages, or jobs, that one transaction takes
PATIENCE = timedelta(minutes=1)  # with a step that has ended and was not carried on


async def resend_lost_results(connection: Connection, *, now: datetime | None = None) -> int:
    """Send again what was set aside and is due, and what ended and was not carried on for a while; give how many."""
    due = {"job_id": None, "asked": False, "limit": AT_ONCE, "now": now}
    (failures,) = await run(connection, ORCHESTRATION["resend_failures"], due)
    overlooked = {"patience": PATIENCE, "limit": AT_ONCE, "now": now}
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
    return len(await run(connection, ORCHESTRATION["refresh_pending_reasons"], {"limit": AT_ONCE, "now": now}))
