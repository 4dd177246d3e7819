"""Pools: a desired number of supervised workers with one spec, which the supervisors of the database keep.

Invariant: members of a pool are added and ended in a transaction that holds the lock of the pool's row and has counted
them under it. So the number of unfinished members never exceeds the desired one, however many supervisors there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interlock.errors import InputError, UnknownPoolError
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, load_statements, run
from interlock.store.workers import WORKERS, WorkerSpec, end_worker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta

    from interlock.postgres.connection import Connection

POOLS = load_statements("pools")
MAX_DESIRED = 1000
MAX_NAME = 63
NAME_PATTERN = rf"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_NAME - 1}}}$"


@dataclass(frozen=True, slots=True)
class NewPool:
    """A pool to create."""

    name: str
    desired: int
    spec: WorkerSpec = field(default_factory=WorkerSpec)
    workspace_id: str = "default"
    labels: Mapping[str, Any] = field(default_factory=dict)


class PoolConflictError(InputError):
    """The pool cannot be created or deleted: its name is taken, or it belongs to a running supervisor."""


async def create_pool(connection: Connection, pool: NewPool, *, actor: str, now: datetime | None = None) -> None:
    """Insert a pool and notify the supervisors; PoolConflictError if there is one of this name."""
    given = {
        "name": pool.name,
        "desired": pool.desired,
        "spec": as_json(pool.spec.document()),
        "workspace_id": pool.workspace_id,
        "labels": as_json(dict(pool.labels)),
        "actor": actor,
        "now": now,
    }
    async with transaction(connection):
        if not await run(connection, POOLS["insert_pool"], given):
            raise PoolConflictError(f"there is a pool {pool.name} already; scale it, or choose another name")
        await _notify(connection, pool.name)


async def scale_pool(
    connection: Connection, name: str, desired: int, *, actor: str, now: datetime | None = None
) -> None:
    """Set the desired number of workers and notify the supervisors, which add or end members."""
    async with transaction(connection):
        given = {"name": name, "desired": desired, "actor": actor, "now": now}
        if not await run(connection, POOLS["scale_pool"], given):
            raise _unknown(name)
        await _notify(connection, name)


async def delete_pool(connection: Connection, name: str, *, actor: str, now: datetime | None = None) -> None:
    """Delete a pool and end its members gracefully. A pool of a running `interlock up` is refused."""
    async with transaction(connection):
        rows = await run(connection, POOLS["lock_pool"], {"name": name})
        if not rows:
            raise _unknown(name)
        if rows[0]["bound_to"] is not None:
            raise PoolConflictError(
                f"the pool {name} belongs to the supervisor {rows[0]['bound_to']} and ends with it; scale it to 0"
            )
        await _end_members(connection, rows[0], None, "its pool was deleted", actor=actor, now=now)
        await run(connection, POOLS["delete_pool"], {"name": name, "bound_to": None})


async def read_pool(connection: Connection, name: str, *, now: datetime | None = None) -> dict[str, Any]:
    """Read a pool with the numbers of its unfinished and of its live members."""
    rows = await run(connection, POOLS["read_pools"], {"name": name, "after": None, "limit": 1, "now": now})
    if not rows:
        raise _unknown(name)
    return rows[0]


async def list_pools(
    connection: Connection, *, after: str | None = None, limit: int = 1000, now: datetime | None = None
) -> list[dict[str, Any]]:
    """List pools by name; `after` is the cursor: the name of the last one of the previous page."""
    return await run(connection, POOLS["read_pools"], {"name": None, "after": after, "limit": limit, "now": now})


async def count_dead_pools(
    connection: Connection, *, supervisor: str | None, start_time: timedelta, now: datetime | None = None
) -> int:
    """Count pools that should have workers and have had no live one for longer than `start_time`.

    Pools that are bound to another supervisor than `supervisor` are not counted.
    """
    given = {"supervisor": supervisor, "start_time": start_time, "now": now}
    (row,) = await run(connection, POOLS["count_dead_pools"], given)
    count: int = row["pools"]
    return count


async def have_given_up(connection: Connection, *, now: datetime | None = None) -> bool:
    """Tell whether supervised workers of no pool have failed, and no worker is live to run the pending tasks."""
    (row,) = await run(connection, POOLS["have_given_up"], {"now": now})
    given_up: bool = row["given_up"]
    return given_up


async def even_out_pools(
    connection: Connection, supervisor: str, *, now: datetime | None = None
) -> list[tuple[str, int]]:
    """Add and end members until each pool has as many as desired; return the changes by pool."""
    changes = []
    for found in await run(connection, POOLS["find_uneven_pools"], {"supervisor": supervisor}):
        async with transaction(connection):
            given = {"name": found["name"], "supervisor": supervisor}
            for pool in await run(connection, POOLS["lock_uneven_pool"], given):
                change = await _even_out(connection, pool, supervisor, now)
                changes.append((pool["name"], change))
    return [(name, change) for name, change in changes if change]


async def hold_bound_pool(
    connection: Connection,
    name: str,
    desired: int,
    *,
    supervisor: str,
    lease: timedelta,
    now: datetime | None = None,
) -> bool:
    """Make a pool that ends with a supervisor, or renew its lease; False if the name is taken."""
    given = {
        "name": name,
        "desired": desired,
        "spec": as_json({}),
        "supervisor": supervisor,
        "lease": lease,
        "now": now,
    }
    return bool(await run(connection, POOLS["insert_bound_pool"], given))


async def end_bound_pool(connection: Connection, name: str, *, supervisor: str, now: datetime | None = None) -> None:
    """Delete the pool of a supervisor that stops, and end its members."""
    async with transaction(connection):
        for pool in await run(connection, POOLS["lock_pool"], {"name": name}):
            if pool["bound_to"] == supervisor:
                await _end_members(connection, pool, None, "its supervisor has stopped", actor=supervisor, now=now)
                await run(connection, POOLS["delete_pool"], {"name": name, "bound_to": supervisor})


async def delete_abandoned_pools(
    connection: Connection, *, heartbeat_timeout: timedelta, watched_since: datetime, now: datetime | None = None
) -> None:
    """Delete the pools that ended with a supervisor which is gone."""
    given = {"heartbeat_timeout": heartbeat_timeout, "watched_since": watched_since, "now": now}
    await run(connection, POOLS["delete_abandoned_pools"], given)


async def _even_out(connection: Connection, pool: dict[str, Any], supervisor: str, now: datetime | None) -> int:
    """Add or end members under the lock of the pool; return the change."""
    members = await run(connection, POOLS["read_pool_members"], {"name": pool["name"], "bound_to": pool["bound_to"]})
    missing: int = pool["desired"] - len(members)
    if missing < 0:
        reason = f"the pool {pool['name']} was scaled to {pool['desired']}"
        await _end_members(connection, pool, -missing, reason, actor=supervisor, now=now)
    document = {"role": "worker", "spec": pool["spec"], "labels": pool["labels"]}
    if pool["bound_to"] is not None:
        document["bound_to"] = pool["bound_to"]
    for _ in range(missing):
        given = {
            "name": pool["name"],
            "workspace_id": pool["workspace_id"],
            "metadata": as_json(document),
            "actor": supervisor,
            "now": now,
        }
        (row,) = await run(connection, POOLS["insert_pool_member"], given)
        reason = f"a worker of the pool {pool['name']}"
        started = {"id": row["id"], "reason": reason, "actor": supervisor, "now": now}
        await run(connection, WORKERS["start_idle_worker"], started)
    return missing


async def _end_members(
    connection: Connection,
    pool: dict[str, Any],
    count: int | None,
    reason: str,
    *,
    actor: str,
    now: datetime | None,
) -> None:
    """End members, all of them without a count: they finish their tasks within their grace."""
    given = {"name": pool["name"], "bound_to": pool["bound_to"]}
    for member in (await run(connection, POOLS["read_pool_members"], given))[:count]:
        await end_worker(connection, member["id"], reason=reason, actor=actor, now=now)
    await _notify(connection, pool["name"])


async def _notify(connection: Connection, name: str) -> None:
    await run(connection, WORKERS["notify_control"], {"payload": name})


def _unknown(name: str) -> UnknownPoolError:
    return UnknownPoolError(f"there is no pool {name}")
