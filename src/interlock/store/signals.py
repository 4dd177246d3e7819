"""Reads the signals of jobs and the inbox: the steps that wait for a signal or an approval.

The workflow engine (`interlock.workflow`) writes signals with the statements loaded here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from interlock.postgres.query import load_statements, run

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

SIGNALS = load_statements("signals")


@dataclass(frozen=True, slots=True)
class InboxFilter:
    """Conditions on steps that wait for a signal or an approval; None means any."""

    assignee: str | None = None
    workflow: str | None = None
    kind: str | None = None


async def read_signals(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    """Read the signals of a job in the order in which they were sent."""
    return await run(connection, SIGNALS["read_signals"], {"job_id": job_id})


async def read_inbox(
    connection: Connection, wanted: InboxFilter, *, after: tuple[datetime, UUID] | None = None, limit: int = 100
) -> list[dict[str, Any]]:
    """Read the steps that wait for a signal or an approval, longest wait first.

    `after` is the cursor: `wait_started_at` and id of the last step of the page before.
    """
    began, id_ = after or (None, None)
    parameters = {**asdict(wanted), "after": began, "after_id": id_, "limit": limit}
    return await run(connection, SIGNALS["read_inbox"], parameters, prepare=False)
