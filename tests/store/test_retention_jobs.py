"""A job goes with all its steps when it is past its age, and the rows of processes that are long gone go, too."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import step, workflow
from interlock.store.retention import Retention, delete_ended_jobs, delete_ended_tasks, delete_ended_workers
from interlock.store.workers import RegisteredProcess, deregister_worker, read_worker_status, register_worker
from interlock.store.workflows import put_workflow
from interlock.worker.maintenance.retention import RetentionDuty
from interlock.workflow.signals import send_signal
from job_driver import Failed, JobDriver

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

DAY = timedelta(days=1)


def in_days(days: float) -> datetime:
    return datetime.now(UTC) + days * DAY


async def count(database: Connection, table: str) -> int:
    (row,) = await (await database.execute(f"select count(*) as rows from interlock.{table}".encode())).fetchall()
    found: int = row["rows"]
    return found


async def prune(database: Connection, days: float) -> int:
    """Run the retention of jobs as of some days from now; return the number of deleted jobs."""
    await delete_ended_tasks(database, Retention(), now=in_days(days))
    return (await delete_ended_jobs(database, Retention(), now=in_days(days))).deleted


async def test_the_steps_of_a_failed_job_stay_as_long_as_the_one_that_failed(driver: JobDriver) -> None:
    driver.outcomes = {"ship": Failed("no truck")}
    job = await driver.submit(step("charge"), step("ship", "charge"), step("mail", "ship"))
    await driver.run()
    assert await prune(driver.connection, 29) == 0
    assert await driver.states(job) == {"charge": "done", "ship": "error", "mail": "skipped"}
    assert await prune(driver.connection, 31) == 1
    assert [await count(driver.connection, table) for table in ("jobs", "tasks")] == [0, 0]


async def test_each_end_of_a_job_has_its_own_age_and_what_goes_on_stays(driver: JobDriver) -> None:
    done = await driver.submit(step("a"), step("s", "a", kind="signal", signal="go"), name="done")
    await send_signal(driver.connection, done, "go", None, actor="ada")
    await driver.run()
    going = await driver.submit(step("b"), step("t", "b", kind="signal", signal="go"), name="going")
    await driver.run()
    assert await prune(driver.connection, 6) == 0
    assert await count(driver.connection, "signals") == 1
    assert await prune(driver.connection, 100) == 1
    assert await driver.states(going) == {"b": "done", "t": "waiting"}, "it still needs what its steps have done"
    assert await count(driver.connection, "signals") == 0


async def test_a_child_job_is_deleted_before_its_parent(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("x"), name="kid"))
    parent = await driver.submit(
        step("c", kind="child", workflow="kid"), step("s", "c", kind="signal", signal="go"), name="parent"
    )
    await driver.run()
    assert await prune(driver.connection, 100) == 0, "the child has ended, its parent not"
    await send_signal(driver.connection, parent, "go", None, actor="ada")
    await driver.run()
    assert (await driver.job(parent))["status"] == "COMPLETED"
    assert [await prune(driver.connection, 100) for _ in range(3)] == [1, 1, 0]


async def test_a_large_job_goes_in_small_batches(driver: JobDriver) -> None:
    await driver.submit(step("m", kind="map", over_input="items"), input={"items": list(range(25))})
    await driver.run()
    small = await driver.submit(step("a"), name="small")
    await driver.run()
    duty = RetentionDuty(Retention(), batch_size=10)
    left = []
    while await duty.run_once(driver.connection, now=in_days(100)) >= 0 and duty.walks:
        left.append(await count(driver.connection, "tasks"))
        assert (await driver.job(small))["status"] == "COMPLETED", "the larger one is older"
    assert left == [27, 27, 17, 7], "the tasks are looked at first"
    assert [await count(driver.connection, table) for table in ("jobs", "tasks")] == [0, 0]


async def test_a_step_requeued_by_hand_keeps_its_job_and_holds_up_no_other(driver: JobDriver) -> None:
    driver.outcomes = {"a": Failed("no")}
    odd = await driver.submit(step("a"))
    await driver.run()
    other = await driver.submit(step("b"), name="other")
    await driver.run()
    await driver.connection.execute(
        "update interlock.tasks set state = 'pending', event = 'requeue', finished_at = null where job_id = %s", [odd]
    )
    assert await prune(driver.connection, 100) == 1
    assert (await driver.states(odd), await driver.states(other)) == ({"a": "pending"}, {})


async def workers(database: Connection) -> list[tuple[Any, ...]]:
    rows = await (await database.execute("select id, status from interlock.workers order by id")).fetchall()
    return [tuple(row.values()) for row in rows]


async def test_processes_that_ended_or_vanished_are_forgotten_and_live_ones_are_not(database: Connection) -> None:
    long_ago = in_days(-8)
    for name in ("ended", "vanished"):
        await register_worker(database, RegisteredProcess(name), now=long_ago)
    await deregister_worker(database, "ended", now=long_ago)
    for name in ("live", "left"):
        await register_worker(database, RegisteredProcess(name))
    await deregister_worker(database, "left")
    await database.execute("insert into interlock.workers (id, updated_at) values ('supervised', %s)", [long_ago])
    assert await delete_ended_workers(database, Retention(done=None)) == 0
    assert await read_worker_status(database, "vanished") == "RUNNING"
    assert await delete_ended_workers(database, Retention()) == 2
    assert await workers(database) == [("left", "COMPLETED"), ("live", "RUNNING"), ("supervised", "IDLE")]
    query = "select event, actor, reason from interlock.worker_state_transitions where worker_id = 'vanished'"
    last = (await (await database.execute(query)).fetchall())[-1]
    assert tuple(last.values()) == ("terminate", "retention", "no heartbeat: the process ended without deregistering")


async def test_a_round_of_the_duty_sees_to_jobs_and_workers(driver: JobDriver) -> None:
    await driver.submit(step("a"))
    await driver.run()
    await register_worker(driver.connection, RegisteredProcess("vanished"), now=in_days(-8))
    duty = RetentionDuty(Retention())
    await duty.run_once(driver.connection, now=in_days(8))
    assert not duty.walks
    assert [await count(driver.connection, table) for table in ("jobs", "tasks", "workers")] == [0, 0, 0]
