"""Factories of tasks, workflows and worker rows, and readers of task rows, for tests on a real database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg

from interlock.model.options import NewTask
from interlock.store.enqueue import enqueue_task
from interlock.store.tasks import claim_limited_tasks, claim_pending_tasks, read_task_history, read_tasks

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask

NAMESPACES = ("default", "fulfillment", "inventory")


def run_sql(url: str, statement: str) -> None:
    """Run one statement on a connection of its own, in autocommit mode."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


async def enqueue(
    database: Connection, task_type: str = "x", arguments: dict[str, Any] | None = None, **options: Any
) -> UUID:
    """Enqueue one task as `enqueue_task` does; return its id. A `limit_key` without a limit is declared first."""
    key = options.pop("limit_key", None)
    if key is not None:
        await declare_limit_keys(database, key)
        options["limit_keys"] = (key,)
    return (await enqueue_task(database, NewTask(task_type, arguments or {}, **options), actor="me")).id


async def declare_limit_keys(database: Connection, *keys: str) -> None:
    """Declare keys that have no limit yet, without a bound."""
    await database.execute(
        "insert into interlock.limits (key) select unnest(%s::text[]) on conflict do nothing", [list(keys)]
    )


async def claim_tasks(database: Connection, *, limit: int = 1, **options: Any) -> list[ClaimedTask]:
    """Claim tasks with and without a limit, as a worker does."""
    claimed = await claim_pending_tasks(database, limit=limit, **options)
    if len(claimed) < limit:
        claimed += await claim_limited_tasks(database, limit=limit - len(claimed), **options)
    return claimed


async def enqueue_by_sql(database: Connection, **columns: Any) -> UUID:
    """Enqueue one task with the SQL function `interlock.enqueue`; return its id."""
    names = ", ".join(f"{name} => %s" for name in columns)
    cursor = await database.execute(f"select id from interlock.enqueue({names})".encode(), list(columns.values()))
    (row,) = await cursor.fetchall()
    id_: UUID = row["id"]
    return id_


async def rewrite(database: Connection, table: str, assignments: str) -> None:
    """Change recorded columns of all rows, as if they were older, which only the owner can do, without the guards."""
    guards = ("guard_fixed", "guard_outcome", "guard_documents")
    async with database.transaction():
        for guard in guards:
            await database.execute(f"alter table interlock.{table} disable trigger {guard}".encode())
        await database.execute(f"update interlock.{table} set {assignments}".encode())
        for guard in guards:
            await database.execute(f"alter table interlock.{table} enable always trigger {guard}".encode())


async def task_row(database: Connection, task: UUID) -> dict[str, Any]:
    """Read one task with the store's own statement."""
    return (await read_tasks(database, [task]))[0]


async def task_events(database: Connection, task: UUID) -> list[str]:
    """Read the events of a task's audit records, oldest first."""
    return [record.event for record in await read_task_history(database, task)]


def task_state(url: str, task: UUID) -> str:
    """Read the state of a task on a connection of its own, without an event loop."""
    with psycopg.connect(url) as connection:
        (found,) = connection.execute("select state from interlock.tasks where id = %s", [task]).fetchall()
    return str(found[0])


def step(name: str, *after: str, **more: Any) -> dict[str, Any]:
    """Build the document of a step; the type of its handler is its name unless given."""
    kind = more.get("kind", "plain")
    handler = {"type": name} if kind in {"plain", "decision", "map"} else {}
    return {"name": name, **handler, **({"after": list(after)} if after else {}), **more}


def workflow(*steps: dict[str, Any], name: str = "w", version: str = "1", **more: Any) -> dict[str, Any]:
    """Build the document of a workflow definition."""
    return {"name": name, "version": version, "namespace": "default", "steps": list(steps), **more}


async def add_live_worker(connection: Connection, *namespaces: str, worker: str = "w_1") -> None:
    """Insert the row of a RUNNING worker that is live for an hour."""
    await connection.execute(
        "insert into interlock.workers (id, namespaces, types, seen_until) "
        "values (%s, %s::text[], '{}', now() + interval '1 hour')",
        [worker, list(namespaces or NAMESPACES)],
    )
    await connection.execute(
        "update interlock.workers set status = 'RUNNING', event = 'start_task' where id = %s", [worker]
    )
