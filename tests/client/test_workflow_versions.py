"""Versions of workflows: derived from the definition or named, changed definitions, rolling deploys, replacement."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from factories import step, workflow
from interlock import Interlock, Workflow
from interlock.config import Config
from interlock.errors import DefinitionChangedError
from interlock.model.graph import VERSION_PATTERN
from interlock.model.versions import derive_version, describe_differences
from interlock.postgres.connection import connect
from interlock.store.schedules import list_schedules
from interlock.store.workflows import find_changed_workflows, list_workflows, put_workflow, read_workflow
from interlock.testing import drain
from interlock.workflow.new_job import NewJob
from interlock.workflow.submit import submit_job

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection
    from job_driver import JobDriver

pytestmark = pytest.mark.store

PRINT_VERSION = """
from interlock import Interlock
app = Interlock("postgresql://nowhere")
wf = app.workflow("orders", timeout=60)
@wf.step(after={"p", "q", "r", "s"}, tags={"a", "b", "c", "d"}, limit_key="mail", config={"y": 1, "x": [2.0]})
def charge(number: int) -> int: ...
for name in "pqrs":
    wf.sleep(name, 1)
print(wf.version)
"""


def shop(
    url: str = "postgresql://nowhere", *, max_tries: int = 3, version: str | None = None, **settings: Any
) -> Interlock:
    """Make an app with a task, a workflow that stays the same, and `orders` with a parent and the given tries."""
    app = Interlock(config=Config(database_url=url, **settings))

    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    same = app.workflow("same", version="1")

    @same.step
    def only() -> str:
        return "only"

    orders = app.workflow("orders", version=version)

    @orders.step(max_tries=max_tries)
    def charge() -> str:
        return f"charged with {max_tries} tries"

    parent = app.workflow("parent", version="1")
    parent.child("order", orders)
    return app


def orders_of(app: Interlock) -> Workflow:
    found = app.find_workflow("orders")
    assert found is not None
    return found


def test_the_version_of_a_workflow_is_derived_from_its_definition() -> None:
    first, same, other = (orders_of(shop(max_tries=tries)) for tries in (3, 3, 4))
    assert first.version == same.version != other.version
    assert re.fullmatch("[0-9a-f]{10}", first.version)
    assert VERSION_PATTERN.fullmatch(first.version)
    assert first.document["version"] == first.version
    assert orders_of(shop(version="2")).version == "2"


def test_a_derived_version_is_the_same_in_every_process_and_for_every_order_of_keys() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PRINT_VERSION], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1
    document = workflow(step("a", timeout=30), step("b", "a", config={"x": 1, "y": [2]}), timeout=None)
    turned = {key: document[key] for key in reversed(document)}
    turned["steps"] = [dict(reversed(each.items())) for each in document["steps"]]
    assert derive_version(turned) == derive_version(document) == derive_version({**document, "version": "9"})
    assert derive_version({**document, "steps": document["steps"][::-1]}) != derive_version(document)


def test_a_difference_names_the_step_the_field_and_both_values() -> None:
    old = workflow(step("a", max_tries=3), step("b", "a"), step("c", "a", backoff={"kind": "linear", "base": 1}))
    new = workflow(
        step("a", max_tries=5), step("c", "a", backoff={"kind": "linear", "base": 2}), step("d", "c"), timeout=60
    )
    assert describe_differences(old, new) == (
        "timeout: none -> 60; step 'b' was removed; step 'a': max_tries: 3 -> 5; "
        "step 'c': backoff.base: 1 -> 2; step 'd' was added"
    )
    assert describe_differences(old, workflow(*old["steps"][::-1])) == "the order of the steps: a, b, c -> c, b, a"
    many = [step(f"s{number}") for number in range(9)]
    assert describe_differences(workflow(), workflow(*many)).endswith("step 's4' was added; and 4 more")


async def test_a_changed_definition_under_a_named_version_blocks_only_that_workflow(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with shop(url, version="1"):
        pass
    async with shop(url, version="1", max_tries=5) as changed:
        logged = capsys.readouterr()
        assert "workflow_blocked" in logged.out + logged.err
        told = r"workflow 'orders' version '1' is stored with another definition: step 'charge': max_tries: 3 -> 5; "
        for name in ("orders", orders_of(changed), "parent"):
            with pytest.raises(DefinitionChangedError, match=told):
                await changed.submit(name)
        with pytest.raises(DefinitionChangedError, match="give the changed definition another version"):
            await changed.submit("orders", version="1")
        task = await changed.tasks["add"].enqueue(1, 2)
        job = await changed.submit("same")
        await drain(changed)
        assert await task.result(10) == 3
        assert await job.wait(10) == {"only": "only"}
    async with shop(url, version="1") as original:
        assert (await original.submit("orders")).created, "it is not blocked where it is unchanged"


async def test_a_schedule_of_a_blocked_workflow_is_not_stored(url: str, database: Connection) -> None:
    async with shop(url, version="1"):
        pass
    changed = shop(url, version="1", max_tries=5)
    for name in ("orders", "parent", "same"):
        changed.schedule(name, workflow=name, every=60)
    async with changed:
        assert [schedule.name for schedule in await list_schedules(database)] == ["same"]


async def test_an_app_without_that_workflow_submits_the_stored_definition(url: str) -> None:
    async with shop(url, version="1"):
        pass
    async with shop(url, version="1", max_tries=5), Interlock(config=Config(database_url=url)) as other:
        job = await other.submit("orders")
        assert (await job.steps())[0].max_tries == 3


async def test_in_a_rolling_deploy_each_app_submits_its_own_version_and_running_jobs_keep_theirs(url: str) -> None:
    old, new = shop(url, max_tries=3), shop(url, max_tries=4)
    async with old:
        running = await old.submit("orders")
        async with new:
            fresh = await new.submit("orders")
            before = [(row.version, row.registered_at) for row in await stored(new, "orders")]
            assert [version for version, _ in before] == [orders_of(new).version, orders_of(old).version]
            async with shop(url, max_tries=3) as restarted:  # a process of the old release starts again
                again = new.job((await restarted.submit("orders")).id)
                assert [(row.version, row.registered_at) for row in await stored(new, "orders")] == before
                newest = await read_newest(restarted, "orders")
                assert newest == orders_of(new).version, "the old release does not become the newest again"
            versions = [(await job.status()).version for job in (running, fresh, again)]
            assert versions == [orders_of(old).version, orders_of(new).version, orders_of(old).version]
            ran = await drain(new)
            assert {each.type for each in ran} == {"orders/charge"}, "the handler is found by the name of the step"
            for job in (running, fresh, again):
                assert await job.wait(10) == {"charge": "charged with 4 tries"}
            assert (await running.steps())[0].max_tries == 3, "a running job keeps its definition"


async def stored(app: Interlock, name: str) -> list[Any]:
    async with app.connection() as connection:
        return [row for row in await list_workflows(connection) if row.name == name]


async def read_newest(app: Interlock, name: str) -> str:
    async with app.connection() as connection:
        found = await read_workflow(connection, name)
    assert found is not None
    return found.version


async def test_a_development_setting_replaces_a_definition_that_no_unfinished_job_uses(url: str) -> None:
    async with shop(url, version="1") as app:
        finished = await app.submit("orders")
        await drain(app)
        await finished.wait(10)
    async with shop(url, version="1", max_tries=5, dev=True) as changed:
        job = await changed.submit("orders")
        assert ((await job.status()).version, (await job.steps())[0].max_tries) == ("1", 5)
        status = await changed.job(finished.id).status()
        assert re.fullmatch(r"1\+[0-9a-f]{10}", str(status.version)), "an ended job keeps the definition that it had"
        assert (await changed.job(finished.id).steps())[0].max_tries == 3
        assert [row.version for row in await stored(changed, "orders")] == ["1"]
        again = await changed.job(finished.id).retry_from("charge")
        assert (await again.steps())[0].max_tries == 3
    async with shop(url, version="1", max_tries=6, dev=True) as refused:
        with pytest.raises(DefinitionChangedError, match=r"5 -> 6; .*--dev does not .*: unfinished jobs use it, 1 of"):
            await refused.submit("orders")
        await drain(refused)
        assert await refused.job(job.id).wait(10)


async def test_a_definition_that_was_replaced_can_come_back(database: Connection) -> None:
    first = workflow(step("a"))
    second = workflow(step("a"), step("b", "a"))
    a = await put_workflow(database, first)
    registered = await read_workflow(database, "w")
    b = await put_workflow(database, second, replace=True)
    assert await put_workflow(database, first, replace=True) == a
    async with database.transaction(force_rollback=True):
        (job,) = await (await database.execute("select id from interlock.submit('w')")).fetchall()
        query = "select workflow_id from interlock.jobs where id = %s"
        assert await (await database.execute(query, [job["id"]])).fetchall() == [{"workflow_id": a}]
    assert await put_workflow(database, second, replace=True) == b
    assert await put_workflow(database, second) == b
    found = await read_workflow(database, "w")
    assert found is not None
    assert registered is not None
    assert (found.version, found.registered_at) == ("1", registered.registered_at), "replacing makes nothing newer"
    reasons = await find_changed_workflows(database, [first, second, workflow(step("x"), name="new")])
    assert list(reasons) == [("w", "1")]
    long = workflow(step("a"), version="v" * 100)
    await put_workflow(database, long)
    await put_workflow(database, {**long, "timeout": 5}, replace=True)


async def test_a_replacement_waits_for_a_submit_that_is_not_committed(url: str, driver: JobDriver) -> None:
    first, second = workflow(step("a")), workflow(step("b"))
    await put_workflow(driver.connection, first)
    async with connect(url) as submitting:
        async with submitting.transaction():
            await submit_job(submitting, NewJob("w", {}), actor="ada")
            replacing = asyncio.create_task(put_workflow(driver.connection, second, replace=True))
            await blocked_backend(url)
        with pytest.raises(DefinitionChangedError, match="unfinished jobs use it, 1 of them"):
            await replacing
    found = await read_workflow(driver.connection, "w")
    assert found is not None
    assert found.definition == first


async def test_a_submit_during_a_replacement_runs_one_of_the_definitions_whole(url: str, driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("a")))
    async with connect(url) as replacing, connect(url) as submitting:
        async with replacing.transaction():
            await put_workflow(replacing, workflow(step("b")), replace=True)
            submit = asyncio.create_task(submit_job(submitting, NewJob("w", {}), actor="ada"))
            await blocked_backend(url)
        job = (await submit).id
    assert list(await driver.steps(job)) == ["a"]
    assert (await driver.job(job))["version"].startswith("1+")
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_replacements_by_two_processes_leave_one_definition(url: str, database: Connection) -> None:
    await put_workflow(database, workflow(step("a")))
    async with connect(url) as one, connect(url) as two:
        async with one.transaction():
            await put_workflow(one, workflow(step("b")), replace=True)
            other = asyncio.create_task(put_workflow(two, workflow(step("c")), replace=True))
            await blocked_backend(url)
        id_ = await other
    found = await read_workflow(database, "w", "1")
    assert found is not None
    assert (found.id, found.definition["steps"][0]["name"]) == (id_, "c")


async def blocked_backend(url: str) -> None:
    """Wait until a backend of this database waits for a lock."""
    query = (
        "select count(*) as waiting from pg_stat_activity "
        "where datname = current_database() and wait_event_type = 'Lock'"
    )
    async with asyncio.timeout(30), connect(url) as connection:
        while not (await (await connection.execute(query)).fetchall())[0]["waiting"]:
            await asyncio.sleep(0.02)
