"""Reads the signals of jobs and the inbox: the steps that wait for a signal or an approval.

The workflow engine (`interlock.workflow`) writes signals with the statements loaded here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from interlock.postgres.query import load_statements, run
from interlock.store.lists import TimePage, collect_pages, run_time_list

if TYPE_CHECKING:
    from collections.abc import Sequence
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
    namespaces: Sequence[str] | None = None  # of jobs in one of these


async def read_signals(
    connection: Connection, job_id: UUID, *, after: int = 0, limit: int | None = None
) -> list[dict[str, Any]]:
    """Read the signals of a job in the order in which they were sent, after the signal with the id `after`."""
    return await run(connection, SIGNALS["read_signals"], {"job_id": job_id, "after": after, "limit": limit})


async def read_inbox_page(
    connection: Connection, wanted: InboxFilter, *, after: tuple[datetime, UUID] | None = None, limit: int = 100
) -> TimePage:
    """Read one page of the steps that wait for a signal or an approval, longest wait first.

    `after` is the `next` of the page before. A page may be short although others follow.
    """
    began, id_ = after or (None, None)
    parameters = {**asdict(wanted), "after": began, "after_id": id_}
    return await run_time_list(connection, SIGNALS["read_inbox"], parameters, time="wait_started_at", limit=limit)


async def read_inbox(
    connection: Connection, wanted: InboxFilter, *, after: tuple[datetime, UUID] | None = None, limit: int = 100
) -> list[dict[str, Any]]:
    """Read the steps that wait for a signal or an approval, longest wait first, page by page."""

    async def read_page(last: tuple[datetime, UUID] | None, left: int) -> TimePage:
        return await read_inbox_page(connection, wanted, after=last, limit=left)

    return await collect_pages(read_page, limit, after)
