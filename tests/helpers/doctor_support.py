"""A database with work in every state, and writes past its guards, for tests of the doctor."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from factories import add_live_worker, enqueue, enqueue_by_sql, step
from interlock.lifecycle import TaskRowEvent
from interlock.store.tasks import Outcome, claim_pending_tasks, settle_running_tasks
from interlock.store.workers import RegisteredProcess, register_worker
from job_driver import JobDriver, name_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.postgres.connection import Connection

TYPES = ("a", "b", "c", "d", "m", "add")

_DISABLE = """
do $$
declare
    place record;
begin
    for place in select tgrelid::regclass as relation from pg_trigger join pg_class on pg_class.oid = tgrelid
        where relnamespace = 'interlock'::regnamespace and not tgisinternal group by tgrelid
    loop
        execute format('alter table only %s disable trigger user', place.relation);
    end loop;
end $$
"""

_ENABLE = """
do $$
declare
    place record;
begin
    for place in select tgrelid::regclass as relation, tgname from pg_trigger join pg_class on pg_class.oid = tgrelid
        where relnamespace = 'interlock'::regnamespace and not tgisinternal
    loop
        execute format('alter table only %s enable %s trigger %I', place.relation,
            case when place.tgname like 'notify%' then '' else 'always' end, place.tgname);
    end loop;
end $$
"""


@asynccontextmanager
async def unguarded(database: Connection) -> AsyncIterator[None]:
    """Let a superuser write what he likes: without triggers and foreign keys, which are back afterwards."""
    async with database.transaction():
        await database.execute("set local session_replication_role = replica")
        await database.execute(_DISABLE)
        yield
        await database.execute(_ENABLE)


async def plant(database: Connection, statements: str, names: dict[str, Any]) -> None:
    """Run statements past the guards; each must change a row. `%(name)s` stands for an id of `busy_database`."""
    async with unguarded(database):
        for statement in filter(None, (part.strip() for part in statements.split(";"))):
            cursor = await database.execute(statement.encode(), names)
            assert cursor.rowcount != 0, statement


async def busy_database(database: Connection) -> dict[str, Any]:
    """Fill a database by legal moves with tasks and jobs in many states; return their ids by name."""
    await add_live_worker(database)
    await database.execute("update interlock.workers set types = %s", [list(TYPES)])
    orchestrator = RegisteredProcess("o_1", "orchestrator", (), ())
    await register_worker(database, orchestrator, lease=timedelta(hours=1))
    await register_worker(database, RegisteredProcess("spare", "worker", (), ()), lease=timedelta(hours=1))
    driver = JobDriver(database)
    completed = await driver.submit(step("a"), step("b", "a"), name="chain")
    await driver.run()
    names: dict[str, Any] = {"completed": completed}
    # a is done, b runs on, c waits for both, d for c
    half = names["half"] = await driver.submit(step("a"), step("b"), step("c", "a", "b"), step("d", "c"), name="half")
    for claimed in await driver.claim():
        if name_of(claimed) == "a":
            await driver.settle(claimed)
    await driver.advance()
    over = step("m", kind="map", over_input="items")
    names["map"] = await driver.submit(over, name="maps", input={"items": [1, 2, 3]})
    (part, *_) = await driver.claim(1)
    await driver.settle(part)
    await driver.advance()
    names["done"] = await enqueue(database, "add")
    (claimed,) = await claim_pending_tasks(database, actor="w_1", types=["add"], limit=1)
    await settle_running_tasks(database, [Outcome(claimed.id, claimed.attempt, TaskRowEvent.SUCCEED)], actor="w_1")
    names["running"] = await enqueue(database, "add")
    await claim_pending_tasks(database, actor="w_1", types=["add"], limit=1)
    names["pending"] = await enqueue_by_sql(database, type="add")
    # tests that clone this database may begin when the leases would have ended
    await database.execute(
        "update interlock.tasks set lease_expires_at = now() + interval '1 hour' where state = 'running'"
    )
    names |= {f"half_{name}": row["id"] for name, row in (await driver.steps(half)).items()}
    names |= {f"map_{name}": row["id"] for name, row in (await driver.steps(names["map"])).items()}
    names |= {f"completed_{name}": row["id"] for name, row in (await driver.steps(completed)).items()}
    return names
