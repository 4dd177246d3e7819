"""Retries of a job, from its failed steps or from a given one: what runs again, and what is kept."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from factories import add_live_worker, step, workflow
from interlock.errors import InputError, UnknownJobError
from interlock.store.workflows import put_workflow
from interlock.workflow.advance import start_waiting_jobs
from interlock.workflow.cancel import cancel_job
from interlock.workflow.new_job import NewJob
from interlock.workflow.retry_from import retry_job_from
from interlock.workflow.submit import reject_job
from job_driver import Failed, JobDriver

if TYPE_CHECKING:
    from uuid import UUID

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
    with pytest.raises(UnknownJobError, match="there is no job"):
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


# --- from the failed steps


async def retried_run(driver: JobDriver, old: UUID, step: str | None = None, **outcomes: Any) -> UUID:
    """Retry a job, run the new one with these outcomes, and return its id; `driver.ran` has what ran again."""
    driver.ran, driver.outcomes = [], outcomes
    retried = await retry_job_from(driver.connection, old, step, actor="ada")
    assert retried.created
    await driver.run()
    return retried.id


async def test_a_retry_without_a_step_runs_the_failed_steps_and_those_after_them(driver: JobDriver) -> None:
    driver.outcomes = {"b": Failed("no"), "x": Failed("no"), "a": 1, "free": 2}
    old = await driver.submit(
        step("a"), step("b", "a"), step("c", "b"), step("free"), step("x", "free"), step("end", "c", "x")
    )
    await driver.run()
    assert (await driver.job(old))["status"] == "FAILED"
    new = await retried_run(driver, old, end="end")
    assert sorted(driver.ran) == ["b", "c", "end", "x"]
    row = await driver.job(new)
    assert (row["status"], row["output"], row["retried_from"]) == ("COMPLETED", {"end": "end"}, old)


async def test_a_canceled_job_is_retried_from_where_it_was_canceled(driver: JobDriver) -> None:
    old = await driver.submit(step("a"), step("b", "a"), step("c", "b"))
    await driver.run(until=lambda: driver.ran == ["a"])
    assert await cancel_job(driver.connection, old, actor="ada")
    await driver.run()
    assert (await driver.job(old))["status"] == "CANCELED"
    new = await retried_run(driver, old)
    assert driver.ran == ["b", "c"]
    assert (await driver.job(new))["status"] == "COMPLETED"


async def test_a_canceled_job_whose_join_did_without_the_canceled_step_runs_that_step(driver: JobDriver) -> None:
    old = await driver.submit(step("a"), step("slow", kind="signal", signal="go"), step("c", "a", "slow", join="any"))
    await driver.run()
    assert await cancel_job(driver.connection, old, actor="ada")
    await driver.run()
    assert (await driver.states(old))["c"] == "done"
    new = await retried_run(driver, old)
    assert driver.ran == [], "c is kept"
    assert (await driver.states(new)) == {"a": "skipped", "slow": "waiting", "c": "skipped"}


async def test_a_job_that_waits_to_start_is_canceled_and_retried_from_the_beginning(driver: JobDriver) -> None:
    await driver.connection.execute("update interlock.workers set seen_until = now()")
    old = await driver.submit(step("a"), step("b", "a"))
    assert await cancel_job(driver.connection, old, actor="ada")
    await driver.run()
    await add_live_worker(driver.connection, worker="w_2")
    new = await retried_run(driver, old)
    assert driver.ran == ["a", "b"]
    assert (await driver.job(new))["status"] == "COMPLETED"


async def test_a_recovered_step_is_not_run_again(driver: JobDriver) -> None:
    driver.outcomes = {"card": Failed("declined"), "invoice": "paper", "mail": Failed("no")}
    steps = (
        step("card"),
        step("invoice", recovers=["card"]),
        step("tell", on_failure=["card"]),
        step("ship", "card"),
        step("mail", "ship"),
        step("late", "card", "mail"),
    )
    old = await driver.submit(*steps, output="card")
    await driver.run()
    assert (await driver.job(old))["status"] == "FAILED"
    new = await retried_run(driver, old)
    assert driver.ran == ["mail", "late"]
    row, found = await driver.job(new), await driver.steps(new)
    assert (row["status"], row["output"]) == ("COMPLETED", "paper"), "the result of the step that recovered it"
    assert (found["card"]["state"], found["card"]["skipped_by_failure"]) == ("skipped", True)
    assert found["card"]["reason"] == f"not run again: it was not needed in job {old}"
    assert {name for name, each in found.items() if each["reused"]} == {"invoice", "tell", "ship"}
    again = await retried_run(driver, new, "late")
    assert driver.ran == ["late"], "a retry of the retry does not run it either"
    assert (await driver.job(again))["status"] == "COMPLETED"


async def test_a_retry_from_a_recovered_step_runs_all_that_depends_on_it(driver: JobDriver) -> None:
    driver.outcomes = {"card": Failed("declined"), "invoice": "paper"}
    old = await driver.submit(step("card"), step("invoice", recovers=["card"]), step("ship", "card"))
    await driver.run()
    assert (await driver.job(old))["status"] == "COMPLETED"
    new = await retried_run(driver, old, "card", card="paid")
    assert driver.ran == ["card", "ship"]
    assert (await driver.states(new))["invoice"] == "skipped"
    assert (await driver.job(new))["status"] == "COMPLETED"


async def test_steps_that_a_partial_join_did_without_are_not_run_again(driver: JobDriver) -> None:
    driver.outcomes = {"a": 1, "b": Failed("no"), "mail": Failed("no")}
    old = await driver.submit(step("a"), step("b"), step("first", "a", "b", join="any"), step("mail", "first"))
    await driver.run()
    new = await retried_run(driver, old)
    assert driver.ran == ["mail"]
    assert (await driver.job(new))["status"] == "COMPLETED"
    explicit = await retried_run(driver, old, "b", b=Failed("again"))
    assert sorted(driver.ran) == ["b", "mail"], "the join is kept: it was done without b"
    assert (await driver.job(explicit))["status"] == "COMPLETED"


async def test_a_step_that_lost_a_race_is_not_run_again(driver: JobDriver) -> None:
    driver.outcomes = {"a": 1, "mail": Failed("no")}
    old = await driver.submit(
        step("a"),
        step("b", kind="signal", signal="go"),
        step("first", "a", "b", join="any", cancel_rest=True),
        step("mail", "first"),
    )
    await driver.run()
    assert (await driver.states(old))["b"] == "canceled"
    new = await retried_run(driver, old)
    assert driver.ran == ["mail"]
    assert (await driver.states(new))["b"] == "skipped"
    assert (await driver.job(new))["status"] == "COMPLETED"


async def test_branches_and_conditions_are_decided_again(driver: JobDriver) -> None:
    driver.outcomes = {"route": "x", "x": Failed("no"), "price": 5}
    steps = (
        step("price"),
        step("route", "price", kind="decision", branches=["x", "y"]),
        step("x", "route"),
        step("y", "route"),
        step("gift", "price", when="price > 100"),
        step("end", "x", "y"),
    )
    old = await driver.submit(*steps)
    await driver.run()
    assert (await driver.job(old))["status"] == "FAILED"
    new = await retried_run(driver, old)
    assert driver.ran == ["x", "end"]
    assert (await driver.states(new))["y"] == (await driver.states(new))["gift"] == "skipped"
    other = await retried_run(driver, old, "route", route="y")
    assert driver.ran == ["route", "y", "end"]
    assert (await driver.job(other))["status"] == "COMPLETED"


def mapped() -> list[dict[str, Any]]:
    return [step("find"), step("m", "find", kind="map", over="find"), step("end", "m")]


async def failed_map(driver: JobDriver) -> UUID:
    """Run a job whose map has one failed part of four."""
    driver.outcomes = {"find": [5, 6, 7, 8], "m[0]": "a", "m[1]": Failed("no"), "m[2]": "c", "m[3]": "d"}
    old = await driver.submit(*mapped())
    await driver.run()
    assert (await driver.job(old))["status"] == "FAILED"
    return old


@pytest.mark.parametrize("worker_count", [None, 1])
async def test_a_failed_map_runs_only_its_failed_parts_again(driver: JobDriver, worker_count: int | None) -> None:
    driver.outcomes = {"m[0]": "a", "m[1]": Failed("no"), "m[2]": Failed("no"), "m[3]": "d"}
    steps = [step("m", kind="map", over_input="list"), step("end", "m")]
    old = await driver.submit(*steps, input={"list": [5, 6, 7, 8], "other": 1}, worker_count=worker_count)
    await driver.run()
    outcomes: dict[str, Any] = {"m[1]": "b", "m[2]": Failed("no")}
    new = await retried_run(driver, old, **outcomes)
    assert sorted(driver.ran) == ["m[1]", "m[2]"]
    row = await driver.job(new)
    assert (row["status"], row["reason"]) == ("FAILED", "step m failed: 1 of 4 parts failed: m[2]")
    newest = await retried_run(driver, new, **{"m[2]": "c"})
    assert sorted(driver.ran) == ["end", "m[2]"]
    assert (await driver.job(newest))["status"] == "COMPLETED"
    found = await driver.steps(newest)
    assert (found["m[0]"]["state"], found["m[0]"]["reason"]) == ("skipped", f"result reused from job {new}")
    assert found["m"]["output"]["result"] == ["a", "b", "c", "d"]
    assert (await driver.inputs(found["end"]["id"]))["results"] == {"m": ["a", "b", "c", "d"]}
    assert (await driver.inputs(found["m[2]"]["id"]))["job_input"] == {"other": 1}


async def test_a_map_runs_as_a_whole_after_a_step_that_runs_again_or_when_it_is_named(driver: JobDriver) -> None:
    old = await failed_map(driver)
    new = await retried_run(driver, old, "find", find=[1, 2])
    assert sorted(driver.ran) == ["end", "find", "m[0]", "m[1]"]
    assert (await driver.job(new))["status"] == "COMPLETED"
    await retried_run(driver, old, "m")
    assert sorted(driver.ran) == ["end", "m[0]", "m[1]", "m[2]", "m[3]"]


async def test_a_retry_keeps_parts_that_a_canceled_retry_did_not_come_to(driver: JobDriver) -> None:
    old = await failed_map(driver)
    await driver.connection.execute("update interlock.workers set seen_until = '-infinity'")
    between = await retry_job_from(driver.connection, old, actor="ada")
    assert (await driver.job(between.id))["status"] == "PENDING"
    assert await cancel_job(driver.connection, between.id, actor="ada")
    await driver.connection.execute("update interlock.workers set seen_until = 'infinity'")
    new = await retried_run(driver, between.id, **{"m[1]": "b"})
    assert sorted(driver.ran) == ["end", "m[1]"]
    assert (await driver.steps(new))["m"]["output"]["result"] == ["a", "b", "c", "d"]


async def test_a_map_whose_parts_were_all_done_when_its_job_was_canceled_runs_none_again(driver: JobDriver) -> None:
    driver.outcomes = {"find": [5], "m[0]": "a"}
    old = await driver.submit(*mapped())
    await driver.run(until=lambda: "find" in driver.ran)
    (part,) = await driver.claim()
    await driver.settle(part)
    assert await cancel_job(driver.connection, old, actor="ada")
    await driver.run()
    new = await retried_run(driver, old)
    assert driver.ran == ["end"]
    assert (await driver.steps(new))["m"]["output"]["result"] == ["a"]
    assert (await driver.job(new))["status"] == "COMPLETED"


async def children_of(driver: JobDriver, job: UUID) -> list[dict[str, Any]]:
    """Read the child jobs of a job."""
    query = "select id, iteration, retried_from from interlock.jobs where parent_job_id = %s order by id"
    return await (await driver.connection.execute(query, [job])).fetchall()


async def test_a_failed_child_step_retries_its_child_job_and_that_its_own(driver: JobDriver) -> None:
    driver.outcomes = {"deep": Failed("no"), "kid": 1, "first": 2}
    await put_workflow(driver.connection, workflow(step("first"), step("deep", "first"), name="below"))
    child = workflow(step("kid"), step("inner", "kid", kind="child", workflow="below"), name="child")
    await put_workflow(driver.connection, child)
    old = await driver.submit(step("a"), step("c", "a", kind="child", workflow="child"), name="parent")
    await driver.run()
    assert (await driver.job(old))["status"] == "FAILED"
    # a retry keeps the version of the child
    await put_workflow(driver.connection, workflow(step("other"), name="child", version="2"))
    new = await retried_run(driver, old, deep="fine")
    assert driver.ran == ["deep"]
    assert (await driver.job(new))["output"] == {"c": {"inner": {"deep": "fine"}}}
    ((first,), (second,)) = await children_of(driver, old), await children_of(driver, new)
    assert second["retried_from"] == first["id"]
    ((first,), (second,)) = await children_of(driver, first["id"]), await children_of(driver, second["id"])
    assert second["retried_from"] == first["id"]


async def test_a_named_child_step_starts_a_new_child_job(driver: JobDriver) -> None:
    driver.outcomes = {"k2": Failed("no")}
    await put_workflow(driver.connection, workflow(step("k1"), step("k2", "k1"), name="child"))
    old = await driver.submit(step("c", kind="child", workflow="child"), name="parent")
    await driver.run()
    new = await retried_run(driver, old, "c")
    assert driver.ran == ["k1", "k2"]
    assert [child["retried_from"] for child in await children_of(driver, new)] == [None]


async def test_a_repeat_goes_on_with_the_iteration_that_failed(driver: JobDriver) -> None:
    sub = workflow(step("first"), step("poll", "first"), name="sub", output={"count": "poll"})
    await put_workflow(driver.connection, sub)
    loop = step("loop", kind="child", workflow="sub", repeat_until="output.count >= 3", max_repeats=5)
    driver.outcomes = {"poll": 1}
    old = await driver.submit(loop, name="main")
    await driver.run(until=lambda: "poll" in driver.ran)
    driver.outcomes = {"poll": Failed("no")}
    await driver.run()
    assert (await driver.job(old))["status"] == "FAILED"
    new = await retried_run(driver, old, poll=3)
    assert driver.ran == ["poll"]
    assert [child["iteration"] for child in await children_of(driver, new)] == [2]
    assert (await driver.job(new))["output"] == {"loop": {"count": 3}}


async def test_a_repeat_whose_iterations_were_compensated_starts_anew(driver: JobDriver) -> None:
    sub = workflow(step("poll", compensate="undo"), name="sub", output={"count": "poll"})
    await put_workflow(driver.connection, sub)
    loop = step("loop", kind="child", workflow="sub", repeat_until="output.count >= 3", max_repeats=5)
    driver.outcomes = {"poll": 1}
    old = await driver.submit(loop, name="main")
    await driver.run(until=lambda: "poll" in driver.ran)
    driver.outcomes = {"poll": Failed("no")}
    await driver.run()
    assert "compensate:loop/poll" in driver.ran
    new = await retried_run(driver, old, poll=3)
    assert [child["iteration"] for child in await children_of(driver, new)] == [1]


async def test_a_job_without_failed_steps_needs_a_step(driver: JobDriver) -> None:
    job = await driver.submit(step("a"))
    await driver.run()
    with pytest.raises(InputError, match="is COMPLETED, and no step of it failed; name the step to retry from"):
        await retry_job_from(driver.connection, job, actor="ada")


async def test_a_rejected_job_cannot_be_retried(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("a")))
    job = await reject_job(driver.connection, NewJob("w", {}), "does not fit", actor="ada")
    assert job is not None
    with pytest.raises(InputError, match="was rejected and cannot be retried: does not fit; submit it anew"):
        await retry_job_from(driver.connection, job, actor="ada")
