"""Retries of a job from a step: reused results and steps that run again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from factories import add_live_worker, step
from interlock.errors import InputError
from interlock.workflow.advance import start_waiting_jobs
from interlock.workflow.retry_from import retry_job_from
from job_driver import Failed, JobDriver

pytestmark = pytest.mark.store

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def long_way() -> list[dict[str, Any]]:
    return [
        step("a"),
        step("d", "a", kind="decision", branches=["x", "y"]),
        step("x", "d"),
        step("y", "d"),
        step("m", "x", kind="map", over="x"),
        step("fails", "m"),
        step("end", "fails", "y", join="any"),
    ]


async def test_a_retry_reuses_done_steps_and_runs_the_rest(driver: JobDriver) -> None:
    driver.outcomes = {"a": 1, "d": "x", "x": [5, 6], "m[0]": 50, "m[1]": 60, "fails": Failed("boom"), "end": "end"}
    old = await driver.submit(*long_way(), input={"i": 1}, worker_count=3)
    await driver.run()
    assert (await driver.job(old))["status"] == "FAILED"
    driver.ran, driver.outcomes = [], {"fails": "mended", "end": "end"}
    retried = await retry_job_from(driver.connection, old, "fails", actor="ada", request_id="again")
    assert retried.created
    again = await retry_job_from(driver.connection, old, "fails", actor="ada", request_id="again")
    assert again == (retried.id, False)
    (task,) = await driver.claim()
    assert (await driver.inputs(task.id))["results"] == {"m": [50, 60]}
    await driver.settle(task)
    await driver.run()
    assert driver.ran == ["fails", "end"]
    steps = await driver.steps(retried.id)
    assert {name for name, found in steps.items() if found["reused"]} == {"a", "d", "x", "m"}
    assert (steps["a"]["state"], steps["a"]["reason"]) == ("skipped", f"result reused from job {old}")
    assert (steps["y"]["state"], steps["y"]["reused"]) == ("skipped", False), "the decision stands"
    row = await driver.job(retried.id)
    assert (row["status"], row["output"], row["input"]) == ("COMPLETED", {"end": "end"}, {"i": 1})
    assert (row["retried_from"], row["worker_count"]) == (old, 3)
    assert (await driver.job(old))["status"] == "FAILED", "the old job stays as it ended"


async def test_a_retry_of_a_retry_and_of_the_first_step(driver: JobDriver) -> None:
    driver.outcomes = {"a": 1, "b": 2, "c": 3}
    first = await driver.submit(step("a"), step("b", "a"), step("c", "b"))
    await driver.run()
    second = await retry_job_from(driver.connection, first, "b", actor="ada")
    await driver.run()
    driver.ran = []
    third = await retry_job_from(driver.connection, second.id, "c", actor="ada")
    await driver.run()
    assert driver.ran == ["c"]
    fourth = await retry_job_from(driver.connection, third.id, "a", actor="ada")
    await driver.run()
    assert driver.ran == ["c", "a", "b", "c"]
    for job in (second, third, fourth):
        assert (await driver.job(job.id))["output"] == {"c": 3}


async def test_a_retry_runs_compensated_steps_again(driver: JobDriver) -> None:
    driver.outcomes = {"c": Failed("boom")}
    old = await driver.submit(step("a", compensate="undo"), step("b", "a"), step("free"), step("c", "b", "free"))
    await driver.run()
    driver.ran, driver.outcomes = [], {}
    retried = await retry_job_from(driver.connection, old, "c", actor="ada")
    await driver.run()
    assert driver.ran == ["a", "b", "c"]
    assert (await driver.job(retried.id))["status"] == "COMPLETED"


async def test_an_invalid_retry_is_refused(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("b", "a"))
    with pytest.raises(InputError, match="is RUNNING: it can be retried once it has ended"):
        await retry_job_from(driver.connection, job, "a", actor="ada")
    await driver.run()
    with pytest.raises(InputError, match=r"has no step 'z'; it has a, b"):
        await retry_job_from(driver.connection, job, "z", actor="ada")
    with pytest.raises(InputError, match="there is no job"):
        await retry_job_from(driver.connection, uuid4(), "a", actor="ada")


async def test_a_retry_without_workers_waits_and_reuses_results_at_its_start(driver: JobDriver) -> None:
    old = await driver.submit(step("a"), step("b", "a"))
    await driver.run()
    await driver.connection.execute("update interlock.workers set seen_until = now()")
    retried = await retry_job_from(driver.connection, old, "b", actor="ada")
    assert (await driver.job(retried.id))["status"] == "PENDING"
    await add_live_worker(driver.connection, worker="w_2")
    assert await start_waiting_jobs(driver.connection, actor="o") == 1
    driver.ran = []
    await driver.run()
    assert driver.ran == ["b"]
    assert (await driver.job(retried.id))["status"] == "COMPLETED"


async def test_a_failed_retry_does_not_compensate_reused_steps(driver: JobDriver) -> None:
    old = await driver.submit(
        step("reserve", compensate="undo"), step("pack", "reserve", compensate="undo"), step("ship", "pack")
    )
    await driver.run()
    assert (await driver.job(old))["status"] == "COMPLETED"
    driver.ran, driver.outcomes = [], {"ship": Failed("no")}
    retried = await retry_job_from(driver.connection, old, "pack", actor="ada")
    await driver.run()
    assert (await driver.job(retried.id))["status"] == "FAILED"
    assert driver.ran == ["pack", "ship", "compensate:pack"], "what it took over belongs to the old job"
