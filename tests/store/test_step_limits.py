"""Steps are held by the limits of their tasks, like tasks of their own, and carry their tags and callbacks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import add_live_worker, step, task_events
from interlock import Interlock, WorkerSettings, serving
from interlock.client.explain import explain
from interlock.config import Config
from interlock.errors import JobFailedError
from interlock.lifecycle import TaskRowEvent
from interlock.orchestrator.run import orchestrating
from interlock.postgres.connection import connect
from interlock.postgres.query import run
from interlock.store.jobs import ORCHESTRATION
from interlock.store.limits import Limit, admit_limited_tasks, pause_namespace, put_limits, resume_namespace
from interlock.store.task_admin import recover_expired_tasks
from interlock.store.tasks import MAX_CRASHES, Outcome, settle_running_tasks
from interlock.testing import drain
from interlock.workflow.advance import cancel_overdue_jobs, start_waiting_jobs
from interlock.workflow.cancel import cancel_job
from job_driver import Failed, JobDriver

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

KEY = {"limit_key": "mail"}


@pytest.fixture
async def driver(driver: JobDriver) -> JobDriver:
    """Add a limit of one running task to the database of the driver."""
    await put_limits(driver.connection, [Limit("mail", max_running=1)])
    return driver


async def admit(driver: JobDriver) -> int:
    """Admit limited tasks as the leader does."""
    return (await admit_limited_tasks(driver.connection, actor="leader", now=driver.now)).released


async def held(driver: JobDriver, job: UUID) -> dict[str, str | None]:
    """Return what holds each waiting step."""
    steps = await driver.steps(job)
    return {name: found["held_by"] for name, found in steps.items() if found["state"] == "waiting"}


async def run_all(driver: JobDriver) -> int:
    """Run all there is, with a leader; give how many steps were active at once, at most."""
    most = 0
    while True:
        await admit(driver)
        claimed = await driver.claim()
        most = max(most, len(claimed))
        for task in claimed:
            await driver.settle(task)
        if not (await driver.advance()).received and not claimed:
            return most


async def test_first_steps_wait_for_their_limit(driver: JobDriver) -> None:
    job = await driver.submit(*(step(f"x{number}", **KEY) for number in range(4)))
    steps = await driver.steps(job)
    assert {(found["state"], found["held_by"], found["reason"]) for found in steps.values()} == {
        ("waiting", "limit", "limit mail")
    }
    assert await driver.claim() == []
    assert await run_all(driver) == 1
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_steps_after_others_wait_for_their_limit_and_are_left_to_the_rules(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("b", "a", **KEY), step("c", "a", **KEY), step("d", "b", "c"))
    await driver.settle((await driver.claim())[0])
    parameters = {"actor": "o_1", "limit": 100, "msg_id": None, "lock_timeout": "500ms", "now": None}
    (plain,) = await run(driver.connection, ORCHESTRATION["advance_plain_steps"], parameters)
    assert plain["received"] is None, "there is something to judge"
    await driver.advance()
    assert await held(driver, job) == {"b": "limit", "c": "limit", "d": "dependency"}
    assert await run_all(driver) == 1
    assert sorted(driver.ran) == ["a", "b", "c", "d"]
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_parts_of_a_map_wait_for_the_limit_and_the_map_does_not(driver: JobDriver) -> None:
    job = await driver.submit(step("m", kind="map", over_input="list", **KEY), input={"list": [1, 2, 3]})
    assert await held(driver, job) == {"m": "parts", "m[0]": "limit", "m[1]": "limit", "m[2]": "limit"}
    assert await run_all(driver) == 1
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_jobs_share_a_limit_with_each_other_and_with_tasks(driver: JobDriver) -> None:
    jobs = [await driver.submit(step("a", **KEY)) for _ in range(3)]
    await driver.connection.execute("select interlock.enqueue('a', limit_keys => '{mail}')")
    assert await admit(driver) == 1
    assert await admit(driver) == 0
    states = [(await driver.states(job))["a"] for job in jobs]
    assert states == ["pending", "waiting", "waiting"]


async def test_the_leader_is_notified_of_a_step_that_waits_for_a_limit(driver: JobDriver, url: str) -> None:
    async with connect(url) as listener:
        await listener.execute("listen interlock_duties")
        await driver.submit(step("a"), step("b", "a", **KEY))
        await driver.settle((await driver.claim())[0])
        await driver.advance()
        heard = [told.payload async for told in listener.notifies(timeout=30, stop_after=1)]
    assert heard == ["limits"]


@pytest.mark.parametrize("event", [TaskRowEvent.SUCCEED, TaskRowEvent.FAIL, TaskRowEvent.RETRY])
async def test_the_end_of_a_step_frees_its_place_and_a_try_keeps_it(driver: JobDriver, event: TaskRowEvent) -> None:
    await driver.submit(step("a", **KEY), step("b", **KEY))
    await admit(driver)
    (claimed,) = await driver.claim()
    outcome = Outcome(claimed.id, claimed.attempt, event, output={}, delay=3600.0)
    await settle_running_tasks(driver.connection, [outcome], actor="w_1")
    assert await admit(driver) == (0 if event is TaskRowEvent.RETRY else 1)


async def test_a_step_that_killed_its_workers_frees_its_place(driver: JobDriver) -> None:
    await driver.submit(step("a", max_tries=1, **KEY), step("b", **KEY))
    await admit(driver)
    (claimed,) = await driver.claim()
    for crashes in range(MAX_CRASHES):
        assert crashes == 0 or await driver.claim()
        await driver.connection.execute(
            "update interlock.tasks set lease_expires_at = now() - interval '1 second' where id = %s", [claimed.id]
        )
        recovered = await recover_expired_tasks(driver.connection, actor="w_2")
        assert [task.limit_keys for task in recovered] == [["mail"]]
    assert (await task_events(driver.connection, claimed.id))[-1] == "exhaust"
    assert await admit(driver) == 1


async def test_a_canceled_job_frees_its_places_and_waits_for_none(driver: JobDriver) -> None:
    job = await driver.submit(step("a", **KEY), step("b", **KEY))
    other = await driver.submit(step("a", **KEY), name="other")
    await admit(driver)
    assert await cancel_job(driver.connection, job, actor="ada")
    await driver.advance()
    assert (await driver.job(job))["status"] == "CANCELED"
    assert await admit(driver) == 1
    assert (await driver.states(other))["a"] == "pending"


async def test_a_job_whose_time_is_over_gives_up_steps_that_wait_for_a_limit(driver: JobDriver) -> None:
    job = await driver.submit(step("a", **KEY), step("b", **KEY), timeout=60)
    await admit(driver)
    later = datetime.now(UTC) + timedelta(minutes=2)
    assert await cancel_overdue_jobs(driver.connection, actor="o_1", now=later) == 1
    await driver.advance()
    assert (await driver.job(job))["status"] == "CANCELED"
    assert set((await driver.states(job)).values()) == {"canceled"}


async def test_a_worker_count_counts_steps_that_wait_for_their_limit(driver: JobDriver) -> None:
    job = await driver.submit(step("a", **KEY), step("b", **KEY), step("c"), step("d"), worker_count=2)
    assert await held(driver, job) == {"a": "limit", "b": "limit", "c": "worker_count", "d": "worker_count"}
    assert await run_all(driver) <= 2
    assert sorted(driver.ran) == ["a", "b", "c", "d"]
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_steps_of_a_job_with_a_worker_count_come_to_their_limit_in_turn(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), *(step(f"x{number}", "a", **KEY) for number in range(3)), worker_count=1)
    await driver.settle((await driver.claim())[0])
    await driver.advance()
    assert sorted(map(str, (await held(driver, job)).values())) == ["limit", "worker_count", "worker_count"]
    assert await run_all(driver) == 1
    assert (await driver.job(job))["status"] == "COMPLETED"


@pytest.mark.parametrize("worker_count", [None, 1])
async def test_a_pause_and_a_resumption_lead_back_to_the_limit(driver: JobDriver, worker_count: int | None) -> None:
    job = await driver.submit(
        step("a", namespace="inventory", **KEY),
        step("b", namespace="inventory", **KEY),
        step("c"),
        worker_count=worker_count,
    )
    await pause_namespace(driver.connection, "inventory", "stocktaking", "ada")
    await driver.run()
    assert driver.ran == ["c"], "it has the room of those that wait for the pause to end"
    assert "limit" not in (await held(driver, job)).values()
    await resume_namespace(driver.connection, "inventory", "ada")
    assert await run_all(driver) == 1
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_job_that_starts_in_a_paused_namespace_comes_to_its_limit_later(driver: JobDriver) -> None:
    await pause_namespace(driver.connection, "inventory", None, "ada")
    job = await driver.submit(step("a"), step("b", "a", namespace="inventory", **KEY))
    await driver.run()
    assert await held(driver, job) == {"b": "namespace"}
    await resume_namespace(driver.connection, "inventory", "ada")
    assert await held(driver, job) == {"b": "limit"}
    await run_all(driver)
    assert (await driver.job(job))["status"] == "COMPLETED"


@pytest.mark.parametrize("worker_count", [None, 1])
async def test_a_compensation_waits_for_the_limit_of_its_own_task(driver: JobDriver, worker_count: int | None) -> None:
    driver.outcomes = {"b": Failed("no")}
    undo = {"compensate": "undo", "compensate_limit_key": "mail", "compensate_tags": ["t"]}
    job = await driver.submit(step("a", **undo), step("b", "a"), worker_count=worker_count)
    await driver.run()
    assert await held(driver, job) == {"compensate:a": "limit"}
    await run_all(driver)
    assert driver.ran == ["a", "b", "compensate:a"]
    assert (await driver.job(job))["status"] == "FAILED"


async def test_a_job_that_starts_later_comes_to_its_limit_then(database: Connection) -> None:
    driver = JobDriver(database)
    await put_limits(database, [Limit("mail", max_running=1)])
    job = await driver.submit(step("a", **KEY), step("b", **KEY))
    assert await held(driver, job) == {"a": "start", "b": "start"}
    await add_live_worker(database)
    await start_waiting_jobs(database, actor="o_1")
    assert await held(driver, job) == {"a": "limit", "b": "limit"}
    assert await run_all(driver) == 1


async def test_a_step_says_of_its_rows_what_its_task_says(database: Connection, url: str) -> None:
    app = Interlock(config=Config(database_url=url))
    app.limit("k", max_running=1)

    @app.task(limit_key="k", tags=["red"], callback_url="http://localhost:9/told")
    async def limited() -> None: ...

    wf = app.workflow("takes_over")
    wf.task(limited, name="plain")
    wf.task("limited", name="other", limit_key="o", tags=("blue",), after="plain")
    wf.map(over_input="list", name="m", after="other")(limited)

    @wf.step(after="m", compensate=limited)
    def last() -> None: ...

    @wf.step(after=last, max_tries=1)
    def fails() -> None:
        raise ValueError("no")

    own: dict[str, Any] = {"limit_keys": ["k"], "tags": ["red"], "callback_url": "http://localhost:9/told"}
    async with app:
        job = await app.submit("takes_over", {"list": [1]})
        await drain(app)
        assert (await job.status()).status == "FAILED"
        query = "select step, limit_keys, tags, callback_url from interlock.tasks where job_id = %s"
        rows = {row.pop("step"): row for row in await (await database.execute(query, [job.id])).fetchall()}
        query = "select tasks.step from interlock.callbacks join interlock.tasks on tasks.id = callbacks.task_id"
        told = {row["step"] for row in await (await database.execute(query)).fetchall()}
    assert rows["plain"] == rows["m[0]"] == rows["compensate:last"] == own
    assert rows["other"] == {**own, "limit_keys": ["o"], "tags": ["blue"]}
    assert rows["m"] == {"limit_keys": None, "tags": ["red"], "callback_url": None}
    assert told == {"plain", "other", "m[0]", "compensate:last"}


async def test_step_webhooks_use_the_callback_url_of_the_worker_s_app(database: Connection, url: str) -> None:
    app = Interlock(url, callback_url="http://localhost:9/app")

    @app.task(callback_url="http://localhost:9/own")
    async def names_its_own() -> None: ...

    wf = app.workflow("told")
    wf.task(names_its_own, name="own")

    @wf.step(after="own", compensate=lambda: None)
    def plain() -> list[int]:
        return [1]

    @wf.map(over=plain)
    def part(item: int) -> int:
        return item

    wf.sleep("rest", 0.001, after=[part])

    @wf.step(after="rest", max_tries=1)
    def fails() -> None:
        raise ValueError("no")

    query = "select tasks.step, url from interlock.callbacks join interlock.tasks on tasks.id = callbacks.task_id"
    expected = dict.fromkeys(("plain", "part[0]", "fails", "compensate:plain"), "http://localhost:9/app")
    async with app, serving(app, WorkerSettings(duties=False, poll_cap=0.05)), orchestrating(app):
        job = await app.submit("told")
        with pytest.raises(JobFailedError):
            await job.wait(30)
        told = {row["step"]: row["url"] for row in await (await database.execute(query)).fetchall()}
        assert told == {**expected, "own": "http://localhost:9/own"}, "of what the engine itself does, nobody is"
        (row,) = await (await database.execute("select definition from interlock.workflows")).fetchall()
        assert "9/app" not in str(row), "a setting must not make another definition of it"


async def test_explain_names_the_limit_a_step_waits_for(driver: JobDriver, url: str) -> None:
    job = await driver.submit(step("a", **KEY), step("b", **KEY), step("c"), worker_count=2)
    await admit(driver)
    async with Interlock(config=Config(database_url=url)) as app:
        found = await explain(app, job)
        assert any("1 waiting for a limit" in fact.text for fact in found.facts)
        behind = {cause.name: [fact.text for fact in cause.facts] for cause in found.causes}
        assert "limit mail: 1 of 1 are pending or running, 1 of them admitted and not started yet" in next(
            facts for name, facts in behind.items() if name.endswith("b")
        )
        third = await explain(app, (await driver.steps(job))["c"]["id"])
        assert len(third.causes) == 2, "what takes up the room of its job"


async def test_limit_keys_of_steps_are_rendered_from_the_input_of_the_job_and_the_item(driver: JobDriver) -> None:
    await put_limits(driver.connection, [Limit("*", share=1)])
    keys = {"limit_key": ["t:{tenant}", "smtp"], "limit_weight": "{tokens}"}
    job = await driver.submit(
        step("a", compensate="undo", compensate_limit_key="u:{tenant}", **keys),
        step("m", "a", kind="map", over_input="rows", limit_key="row:{item}"),
        step("f", "m"),
        input={"tenant": "acme", "tokens": 4, "rows": ["x", 7, {"no": "scalar"}]},
    )
    driver.outcomes = {"f": Failed("no")}
    await run_all(driver)
    query = "select step, limit_keys, limit_weight from interlock.tasks where job_id = %s and limit_keys is not null"
    rows = await (await driver.connection.execute(query, [job])).fetchall()
    assert {row["step"]: (row["limit_keys"], row["limit_weight"]) for row in rows} == {
        "a": (["t:acme", "smtp"], 4.0),
        "m[0]": (["row:x"], None),
        "m[1]": (["row:7"], None),
        "m[2]": (["row:"], None),
        "compensate:a": (["u:acme"], None),
    }
