"""The rules of DESIGN §4 in the database: branches, failure handlers, joins, conditions, sagas and cancellation."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import step, workflow
from interlock.store.jobs import read_jobs, until_next_due
from interlock.store.task_admin import cancel_unfinished_tasks
from interlock.store.workflows import put_workflow
from interlock.workflow.advance import cancel_overdue_jobs, resend_cancellations
from interlock.workflow.cancel import cancel_job
from interlock.workflow.new_job import NewJob
from interlock.workflow.queued_jobs import cancel_replaced_jobs, start_queued_jobs
from interlock.workflow.signals import end_due_waits, send_signal
from interlock.workflow.submit import submit_job
from job_driver import Failed, JobDriver, name_of

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.store.tasks import ClaimedTask

pytestmark = pytest.mark.store

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NO = Failed("no")


def decision(name: str, *after: str, branches: list[str], **more: Any) -> dict[str, Any]:
    return step(name, *after, kind="decision", branches=branches, **more)


async def finish(driver: JobDriver, *steps: dict[str, Any], **outcomes: Any) -> tuple[str, dict[str, str]]:
    """Run a job with these outcomes to its end; return its status and the states of its steps."""
    driver.outcomes = outcomes
    job = await driver.submit(*steps)
    await driver.run()
    return (await driver.job(job))["status"], await driver.states(job)


async def children_of(driver: JobDriver, job: UUID) -> list[dict[str, Any]]:
    """Read the child jobs of a job."""
    query = "select id from interlock.jobs where parent_job_id = %s order by id"
    rows = await (await driver.connection.execute(query, [job])).fetchall()
    return await read_jobs(driver.connection, [row["id"] for row in rows])


# --- branches


async def test_a_branch_that_is_not_chosen_does_not_run_because_of_an_earlier_step(driver: JobDriver) -> None:
    status, states = await finish(
        driver,
        step("price"),
        decision("route", "price", branches=["ship", "refund"]),
        step("ship", "route"),
        step("refund", "route", "price"),
        step("refund_mail", "refund", "price"),
        route="ship",
    )
    assert (status, driver.ran) == ("COMPLETED", ["price", "route", "ship"])
    assert states["refund"] == states["refund_mail"] == "skipped"


async def test_a_branch_with_a_partial_join_waits_for_its_decision(driver: JobDriver) -> None:
    steps = [
        step("a"),
        step("slow"),
        decision("route", "slow", branches=["x", "y"]),
        step("x", "route", "a", join="any"),
        step("y", "route", "a", join="any"),
    ]
    driver.outcomes = {"route": "y"}
    job = await driver.submit(*steps)
    first, slow = await driver.claim()
    await driver.settle(first)
    await driver.advance()
    assert (await driver.states(job))["x"] == "waiting", "its other dependency is met, but it is not chosen yet"
    await driver.settle(slow)
    await driver.run()
    states = await driver.states(job)
    assert (states["x"], states["y"]) == ("skipped", "done")


@pytest.mark.parametrize(("chosen", "end"), [("r", "done"), ("t", "done"), (["r", "t"], "done"), ([], "skipped")])
async def test_alternatives_of_a_nested_decision_count_as_one_dependency(
    driver: JobDriver, chosen: Any, end: str
) -> None:
    _, states = await finish(
        driver,
        decision("outer", branches=["p", "q"]),
        step("p", "outer"),
        step("q", "outer"),
        decision("inner", "p", branches=["r", "t"]),
        step("r", "inner"),
        step("t", "inner"),
        step("join", "r", "t", "q"),
        outer="p",
        inner=chosen,
    )
    assert states["join"] == end
    assert states["q"] == "skipped"


async def test_a_chosen_alternative_that_fails_fails_the_join(driver: JobDriver) -> None:
    status, states = await finish(
        driver,
        decision("d", branches=["a", "b"]),
        step("a", "d"),
        step("b", "d"),
        step("join", "a", "b"),
        d=["a", "b"],
        b=NO,
    )
    assert (status, states["join"]) == ("FAILED", "skipped")


# --- failure handlers


async def test_a_handler_observes_a_failure_and_the_job_still_fails_and_compensates(driver: JobDriver) -> None:
    status, states = await finish(
        driver,
        step("reserve", compensate="undo"),
        step("charge", "reserve"),
        step("ship", "charge"),
        step("notify", on_failure=["charge"]),
        charge=NO,
    )
    assert status == "FAILED"
    assert driver.ran == ["reserve", "charge", "notify", "compensate:reserve"]
    assert states["ship"] == "skipped"


async def test_a_recovering_step_stands_in_for_the_failed_one(driver: JobDriver) -> None:
    steps = [
        step("charge"),
        step("invoice", recovers=["charge"]),
        step("ship", "charge"),
        step("alarm", on_failure=["charge"]),
    ]
    driver.outcomes = {"charge": NO, "invoice": {"number": 7}}
    job = await driver.submit(*steps)
    await driver.run(until=lambda: "invoice" in driver.ran)
    (ship,) = [task for task in await driver.claim() if name_of(task) == "ship"]
    assert (await driver.inputs(ship.id))["results"] == {"charge": {"number": 7}}, "the result of the recovery"
    await driver.settle(ship)
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"
    assert sorted(driver.ran) == ["alarm", "charge", "invoice", "ship"]


async def test_a_recovery_that_fails_can_itself_be_recovered(driver: JobDriver) -> None:
    steps = [
        step("a"),
        step("b", recovers=["a"]),
        step("c", recovers=["b"]),
        step("z", "a"),
    ]
    assert (await finish(driver, *steps, a=NO, b=NO))[0] == "COMPLETED"
    assert driver.ran == ["a", "b", "c", "z"]


async def test_a_step_after_a_failed_recovery_is_skipped(driver: JobDriver) -> None:
    status, states = await finish(driver, step("a"), step("b", recovers=["a"]), step("z", "a"), a=NO, b=NO)
    assert (status, states["z"]) == ("FAILED", "skipped")


async def test_a_recovery_that_is_not_needed_is_passed_over(driver: JobDriver) -> None:
    steps = [step("a"), step("b", recovers=["a"]), step("z", "a"), step("after_b", "b")]
    driver.outcomes = {}
    job = await driver.submit(*steps)
    await driver.run()
    found = await driver.steps(job)
    assert (await driver.job(job))["status"] == "COMPLETED"
    assert {name: row["state"] for name, row in found.items()} == {
        **dict.fromkeys(["a", "z"], "done"),
        **dict.fromkeys(["b", "after_b"], "skipped"),
    }
    assert (found["b"]["reason"], found["after_b"]["reason"]) == ("step a did not fail", "step b was skipped")


@pytest.mark.parametrize(("outcome", "status"), [(None, "COMPLETED"), (NO, "FAILED")])
async def test_a_teardown_runs_after_its_setup_however_the_work_ended(
    driver: JobDriver, outcome: Any, status: str
) -> None:
    steps = [step("setup"), step("work", "setup"), step("teardown", "setup", always=["work"])]
    found, states = await finish(driver, *steps, work=outcome)
    assert (found, states["teardown"]) == (status, "done")


@pytest.mark.parametrize(("join", "end"), [("all", "skipped"), ("any", "done")])
async def test_a_join_counts_failure_handlers_too(driver: JobDriver, join: str, end: str) -> None:
    steps = [step("a"), step("b"), step("alarm", on_failure=["a", "b"], join=join)]
    status, states = await finish(driver, *steps, a=NO)
    assert (status, states["alarm"]) == ("FAILED", end)


# --- joins


@pytest.mark.parametrize(("join", "needed"), [("any", 1), (2, 2), (0.6, 2), (1, 1)])
async def test_a_partial_join_is_met_as_soon_as_enough_are_done(driver: JobDriver, join: Any, needed: int) -> None:
    job = await driver.submit(step("a"), step("b"), step("c"), step("end", "a", "b", "c", join=join))
    tasks = await driver.claim()
    for count, task in enumerate(tasks, 1):
        await driver.settle(task)
        await driver.advance()
        expected = "pending" if count >= needed else "waiting"
        assert (await driver.states(job))["end"] == expected, count
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_partial_join_is_skipped_as_soon_as_it_is_impossible(driver: JobDriver) -> None:
    driver.outcomes = {"a": NO, "b": NO}
    job = await driver.submit(step("a"), step("b"), step("c"), step("end", "a", "b", "c", join=2))
    first, second, third = await driver.claim()
    await driver.settle(first)
    await driver.advance()
    assert (await driver.states(job))["end"] == "waiting"
    await driver.settle(second)
    await driver.advance()
    assert (await driver.states(job))["end"] == "skipped", "although c still runs"
    await driver.settle(third)
    await driver.run()
    assert (await driver.job(job))["status"] == "FAILED"


async def test_a_failure_that_a_partial_join_does_without_does_not_fail_the_job(driver: JobDriver) -> None:
    steps = [step("a"), step("b"), step("b2", "b"), step("end", "a", "b2", join="any")]
    assert (await finish(driver, *steps, b=NO))[0] == "COMPLETED"


async def test_cancel_rest_cancels_what_is_not_needed_and_does_not_fail_the_job(driver: JobDriver) -> None:
    steps = [
        step("fast"),
        step("slow"),
        step("later", "slow"),
        step("beside", "slow"),
        step("end", "fast", "slow", "later", join="any", cancel_rest=True),
    ]
    job = await driver.submit(*steps)
    fast, slow = await driver.claim()
    await driver.settle(fast)
    await driver.advance()
    states = await driver.states(job)
    assert (states["end"], states["later"], states["slow"]) == ("pending", "canceled", "running")
    query = "select cancel_requested_at is not null as asked from interlock.tasks where id = %s"
    (row,) = await (await driver.connection.execute(query, [slow.id])).fetchall()
    assert row["asked"]
    await cancel_unfinished_tasks(driver.connection, [slow.id], actor="w_1", attempts=[slow.attempt], running=True)
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"
    assert (await driver.states(job))["beside"] == "skipped"


async def test_a_race_of_two_signals(driver: JobDriver) -> None:
    steps = [
        step("paid", kind="signal", signal="paid"),
        step("gone", kind="signal", signal="gone"),
        step("end", "paid", "gone", join="any", cancel_rest=True),
    ]
    job = await driver.submit(*steps)
    assert await send_signal(driver.connection, job, "gone", {"by": "eva"}, actor="eva")
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"
    assert await driver.states(job) == {"paid": "canceled", "gone": "done", "end": "done"}


# --- conditions


@pytest.mark.parametrize(("total", "end"), [(200, "done"), (50, "skipped"), (None, "skipped")])
async def test_a_step_runs_only_when_its_condition_is_true(driver: JobDriver, total: Any, end: str) -> None:
    steps = [step("price"), step("check", "price", when="price.total > 100 and input.country == 'CH'")]
    driver.outcomes = {"price": {"total": total}}
    job = await driver.submit(*steps, input={"country": "CH"})
    await driver.run()
    assert (await driver.states(job))["check"] == end
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_root_step_can_have_a_condition_on_the_input(driver: JobDriver) -> None:
    job = await driver.submit(step("a", when="input.go"), step("b", "a"), input={"go": False})
    await driver.run()
    found = await driver.steps(job)
    assert (found["a"]["state"], found["a"]["reason"]) == ("skipped", "its condition is false: input.go")
    assert (found["b"]["state"], (await driver.job(job))["status"]) == ("skipped", "COMPLETED")


# --- steps that need no worker


async def test_steps_without_a_handler_need_no_worker_slot(driver: JobDriver) -> None:
    driver.now = NOW
    steps = [
        step("busy"),
        step("nap", kind="sleep", seconds=10),
        step("none", kind="sleep", seconds=0),
        step("yes", "none", kind="approval"),
        step("paid", "yes", kind="signal", signal="paid"),
        step("empty", "paid", kind="map", over_input="rows"),
        step("last", "nap", "empty", kind="sleep", seconds=0),
    ]
    job = await driver.submit(*steps, input={"rows": []})
    (busy,) = await driver.claim()
    await send_signal(driver.connection, job, "yes", {"approved": True}, actor="eva", now=NOW)
    await send_signal(driver.connection, job, "paid", 7, actor="eva", now=NOW)
    driver.now = NOW + timedelta(seconds=10)
    assert await end_due_waits(driver.connection, actor="o_1", now=driver.now) == 1
    states = await driver.states(job)
    assert states.pop("busy") == "running"
    assert set(states.values()) == {"done"}
    assert not await driver.claim()
    await driver.settle(busy)
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_failed_map_is_an_error_that_names_the_parts(driver: JobDriver) -> None:
    driver.outcomes = {"m[1]": NO, "m[2]": NO}
    job = await driver.submit(step("m", kind="map", over_input="rows"), input={"rows": [1, 2, 3]})
    await driver.run()
    found = await driver.steps(job)
    assert found["m"]["state"] == "error"
    assert found["m"]["error"]["message"] == "2 of 3 parts failed: m[1], m[2]"
    assert (await driver.job(job))["reason"] == "step m failed: 2 of 3 parts failed: m[1], m[2]"


# --- sagas across jobs


async def test_a_canceled_parent_waits_for_its_child_and_undoes_it_first(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("c1", compensate="undo"), step("c2", "c1"), name="sub"))
    job = await driver.submit(
        step("p1", compensate="undo"), step("child", "p1", kind="child", workflow="sub"), name="main"
    )
    await driver.run(until=lambda: "c1" in driver.ran)
    (c2,) = await driver.claim()
    assert await cancel_job(driver.connection, job, actor="eva")
    await driver.run()
    assert (await driver.job(job))["status"] == "RUNNING", "the step of the child still runs"
    assert "compensate:p1" not in driver.ran
    await cancel_unfinished_tasks(driver.connection, [c2.id], actor="w_1", attempts=[c2.attempt], running=True)
    await driver.run()
    (child,) = await children_of(driver, job)
    parent = await driver.job(job)
    assert (child["status"], parent["status"]) == ("CANCELED", "CANCELED")
    assert driver.ran == ["p1", "c1", "compensate:c1", "compensate:p1"]
    assert child["completed_at"] <= parent["completed_at"]


async def test_a_completed_child_is_undone_when_its_parent_fails_later(driver: JobDriver) -> None:
    inner = workflow(step("i1", compensate="undo"), step("i2", "i1", compensate="undo"), name="inner")
    sub = workflow(
        step("c1", compensate="undo"),
        step("below", "c1", kind="child", workflow="inner", compensate="undo"),
        step("c2", "below", compensate="undo"),
        name="sub",
    )
    for document in (inner, sub):
        await put_workflow(driver.connection, document)
    driver.outcomes = {"p3": NO, "i1": "first"}
    job = await driver.submit(
        step("p1", compensate="undo"),
        step("child", "p1", kind="child", workflow="sub", compensate="undo"),
        step("p2", "child", compensate="undo"),
        step("p3", "p2"),
        name="main",
    )
    await driver.run()
    assert (await driver.job(job))["status"] == "FAILED"
    undone = [name.removeprefix("compensate:") for name in driver.ran if name.startswith("compensate:")]
    assert undone == ["p2", "child", "child/c2", "child/below", "child/below/i2", "child/below/i1", "child/c1", "p1"]
    found = await driver.steps(job)
    assert found["compensate:child/below/i1"]["input"] == {"result": "first"}
    inputs = await driver.inputs(found["compensate:child/below/i1"]["id"])
    assert (inputs["workflow"], inputs["kind"]) == ("inner", "compensation")


async def test_a_failed_job_waits_for_a_child_that_nobody_waits_for(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("c1", compensate="undo"), name="sub"))
    driver.outcomes = {"bad": NO}
    job = await driver.submit(
        step("child", kind="child", workflow="sub", wait=False), step("bad", "child"), name="main"
    )
    claimed = {name_of(task): task for task in await driver.claim()}
    await driver.settle(claimed["bad"])
    await driver.advance()
    row = await driver.job(job)
    assert (row["status"], row["ending"]) == ("RUNNING", "FAILED")
    assert row["reason"].startswith("waits for child job")
    await driver.settle(claimed["c1"])
    await driver.run()
    assert (await driver.job(job))["status"] == "FAILED"
    assert driver.ran == ["bad", "c1", "compensate:child/c1"]


async def failing_with_a_child(driver: JobDriver, **options: Any) -> tuple[UUID, UUID]:
    """Run a job until it has failed and waits for a child job of a step with `wait=False`, which waits for a signal."""
    below = workflow(step("deep", kind="signal", signal="s"), name="below")
    sub = workflow(
        step("c1", compensate="undo"),
        step("below", "c1", kind="child", workflow="below", wait=False),
        step("c2", "below", kind="signal", signal="s"),
        name="sub",
    )
    for document in (below, sub):
        await put_workflow(driver.connection, document)
    driver.outcomes = {"bad": NO}
    job = await driver.submit(
        step("p1", compensate="undo"),
        step("child", "p1", kind="child", workflow="sub", wait=False),
        step("bad", "child"),
        name="main",
        **options,
    )
    await driver.run()
    (child,) = await children_of(driver, job)
    row = await driver.job(job)
    assert (row["status"], row["ending"], child["status"]) == ("RUNNING", "FAILED", "RUNNING")
    return job, child["id"]


async def check_failed_with_canceled_children(driver: JobDriver, job: UUID, reason: str) -> None:
    assert (await driver.job(job))["reason"].endswith(f"is being canceled ({reason}), then: step bad failed: no")
    await driver.run()
    row = await driver.job(job)
    assert (row["status"], row["reason"]) == ("FAILED", "step bad failed: no")
    (child,) = await children_of(driver, job)
    (below,) = await children_of(driver, child["id"])
    assert (child["status"], below["status"]) == ("CANCELED", "CANCELED")
    assert child["reason"] == f"job {job}, which it belongs to, failed, and was canceled then: {reason}"
    assert driver.ran == ["p1", "c1", "bad", "compensate:c1", "compensate:p1"]


async def test_canceling_a_failed_job_cancels_the_children_that_it_waits_for(driver: JobDriver) -> None:
    job, _ = await failing_with_a_child(driver)
    assert await cancel_job(driver.connection, job, actor="eva")
    assert not await cancel_job(driver.connection, job, actor="eva"), "they are being canceled"
    await check_failed_with_canceled_children(driver, job, "canceled by eva")


async def test_the_timeout_of_a_failed_job_cancels_the_children_that_it_waits_for(driver: JobDriver) -> None:
    driver.now = NOW
    job, _ = await failing_with_a_child(driver, timeout=60)
    assert await until_next_due(driver.connection, now=NOW) == 60
    later = NOW + timedelta(seconds=61)
    assert await cancel_overdue_jobs(driver.connection, actor="o_1", now=later) == 1
    assert await cancel_overdue_jobs(driver.connection, actor="o_1", now=later) == 0
    await check_failed_with_canceled_children(driver, job, "the job's timeout of 60 s is over")


async def test_a_job_that_replaces_a_failed_one_cancels_the_children_that_it_waits_for(driver: JobDriver) -> None:
    job, _ = await failing_with_a_child(driver, key="k")
    new = NewJob("main", {}, key="k", on_conflict="cancel_in_progress")
    submitted = await submit_job(driver.connection, new, actor="eva")
    assert await cancel_replaced_jobs(driver.connection, actor="o_1") == 1
    assert await cancel_replaced_jobs(driver.connection, actor="o_1") == 0
    await check_failed_with_canceled_children(driver, job, f"replaced by job {submitted.id}")
    assert await start_queued_jobs(driver.connection, actor="o_1") == 1


async def test_canceling_a_parent_reaches_the_children_of_a_child_that_has_failed(driver: JobDriver) -> None:
    child = workflow(step("c", kind="child", workflow="leaf", wait=False), step("bad", "c"), name="mid")
    leaf = workflow(step("s", kind="signal", signal="s"), name="leaf")
    for document in (leaf, child):
        await put_workflow(driver.connection, document)
    driver.outcomes = {"bad": NO}
    job = await driver.submit(step("m", kind="child", workflow="mid"), name="top")
    await driver.run()
    assert await cancel_job(driver.connection, job, actor="eva")
    await driver.run()
    (mid,) = await children_of(driver, job)
    (below,) = await children_of(driver, mid["id"])
    assert [(await driver.job(job))["status"], mid["status"], below["status"]] == ["CANCELED", "FAILED", "CANCELED"]


async def test_a_lost_message_to_a_child_is_sent_again(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("c1"), name="sub"))
    job = await driver.submit(step("child", kind="child", workflow="sub"), name="main")
    await cancel_job(driver.connection, job, actor="eva")
    await driver.connection.execute("delete from interlock.orchestration_messages")
    assert (await driver.advance()).received == 0
    assert await resend_cancellations(driver.connection) == 2, "for the child job, and for the step that waits for it"
    await driver.advance()
    # the end of the canceled steps was lost too: the maintenance resends it
    await driver.connection.execute(
        "update interlock.tasks set updated_at = now() where job_id = %s and not advanced", [job]
    )
    await driver.run()
    (child,) = await children_of(driver, job)
    assert (child["status"], (await driver.job(job))["status"]) == ("CANCELED", "CANCELED")


# --- repeats


async def test_a_step_repeats_its_child_until_the_condition_is_true(driver: JobDriver) -> None:
    await put_workflow(
        driver.connection, workflow(step("poll", compensate="undo"), name="sub", output={"count": "poll"})
    )
    job = await driver.submit(
        step("p", compensate="undo"),
        step("loop", "p", kind="child", workflow="sub", repeat_until="output.count >= 3", max_repeats=5),
        step("bad", "loop"),
        name="main",
        input={"start": 1},
    )
    await driver.run(until=lambda: "p" in driver.ran)
    for count in (1, 2, 3):
        driver.outcomes = {"poll": count, "bad": NO}
        await driver.run(until=lambda: driver.ran.count("poll") == driver.outcomes["poll"])
    await driver.run()
    children = await children_of(driver, job)
    assert [child["status"] for child in children] == ["COMPLETED"] * 3
    assert [child["input"] for child in children] == [{"start": 1}, {"start": 1, "count": 1}, {"start": 1, "count": 2}]
    found = await driver.steps(job)
    assert found["loop"]["output"]["result"] == {"count": 3}
    undone = [name.removeprefix("compensate:") for name in driver.ran if name.startswith("compensate:")]
    assert undone == ["loop#3/poll", "loop#2/poll", "loop/poll", "p"]


async def test_a_repeat_is_bounded(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("poll"), name="sub"))
    job = await driver.submit(
        step("loop", kind="child", workflow="sub", repeat_until="output.poll == 'ready'", max_repeats=2), name="main"
    )
    await driver.run()
    assert driver.ran == ["poll", "poll"]
    row = await driver.job(job)
    assert (row["status"], row["reason"]) == (
        "FAILED",
        """step loop failed: "output.poll == 'ready'" is not true after 2 runs""",
    )


async def repeating(driver: JobDriver) -> tuple[UUID, ClaimedTask]:
    """Start a job with a repeat and a signal that makes it superfluous; return it with the step of the child."""
    await put_workflow(driver.connection, workflow(step("poll"), name="sub"))
    job = await driver.submit(
        step("loop", kind="child", workflow="sub", repeat_until="output.poll == 'ready'", max_repeats=9),
        step("stop", kind="signal", signal="stop"),
        step("end", "loop", "stop", join="any", cancel_rest=True),
        name="main",
    )
    (poll,) = await driver.claim()
    return job, poll


async def test_cancel_rest_stops_a_repeat_whose_child_completes_before_it_is_canceled(driver: JobDriver) -> None:
    job, poll = await repeating(driver)
    await driver.settle(poll)
    await send_signal(driver.connection, job, "stop", None, actor="eva")
    await driver.advance(limit=1)  # the end of the poll comes before the message that cancels the child
    await driver.run()
    assert driver.ran == ["poll", "end"]
    assert [child["status"] for child in await children_of(driver, job)] == ["COMPLETED"]
    assert await driver.states(job) == {"loop": "canceled", "stop": "done", "end": "done"}
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_canceled_job_stops_a_repeat_whose_child_completes_before_it_is_canceled(driver: JobDriver) -> None:
    job, poll = await repeating(driver)
    await driver.settle(poll)
    assert await cancel_job(driver.connection, job, actor="eva")
    await driver.advance(limit=1)
    await driver.run()
    assert driver.ran == ["poll"]
    assert (await driver.states(job))["loop"] == "canceled"
    assert (await driver.job(job))["status"] == "CANCELED"
