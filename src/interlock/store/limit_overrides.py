"""Overrides of limits: an operator sets the rule of a key at run time, beside the declared one, and takes it back.

Invariant: every change by an operator leaves a record with the rule before and after, the actor and the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.postgres.query import run
from interlock.store.limits import LIMITS, as_float, change_limits

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.limits import Limit


async def override_limit(
    connection: Connection, limit: Limit, *, actor: str, reason: str | None = None, now: datetime | None = None
) -> None:
    """Set the rule of a key until `restore_limit` takes it back; what an app declares meanwhile is kept beside it."""
    parameters = {
        "key": limit.key,
        "max_running": limit.max_running,
        "max_starts": limit.max_starts,
        "max_weight": as_float(limit.max_weight),
        "max_cost": as_float(limit.max_cost),
        "period": limit.period,
        "share": 1.0 if limit.share is None else float(limit.share),
        "actor": actor,
        "reason": reason,
        "now": now,
    }
    await change_limits(connection, "override_limit", parameters)


async def restore_limit(
    connection: Connection, key: str, *, actor: str, reason: str | None = None, now: datetime | None = None
) -> bool:
    """Take an override back: the declared rule applies again, or none if none is declared. False if there is none."""
    parameters = {"key": key, "actor": actor, "reason": reason, "now": now}
    return bool(await change_limits(connection, "restore_limit", parameters))


class LimitChange(NamedTuple):
    """A recorded change of a limit by an operator: override, restore or delete."""

    event: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    reason: str | None
    actor: str
    database_role: str
    recorded_at: datetime


async def read_limit_changes(connection: Connection, key: str, *, limit: int = 100) -> list[LimitChange]:
    """Read what operators changed about a limit, newest first."""
    rows = await run(connection, LIMITS["read_limit_changes"], {"key": key, "limit": limit})
    return [LimitChange(**row) for row in rows]


class LimitHolder(NamedTuple):
    """A task that takes a place of a limit: running, or pending and about to start."""

    id: UUID
    namespace: str
    type: str
    state: str
    worker_id: str | None
    lease_expires_at: datetime | None
    attempt: int
    limit_keys: list[str]
    weight: float
    run_at: datetime
    started_at: datetime | None
    job_id: UUID | None
    step: str | None


async def read_limit_holders(connection: Connection, key: str, *, limit: int = 100) -> list[LimitHolder]:
    """Read the tasks that take a place of a key, or of the keys of a pattern; running ones first."""
    prefix = key.removesuffix("*") if key.endswith("*") else None
    parameters = {"key": key, "prefix": prefix, "limit": limit}
    return [LimitHolder(**row) for row in await run(connection, LIMITS["read_limit_holders"], parameters)]
