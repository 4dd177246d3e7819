"""The kinds of steps in the database: maps, child jobs, sleeps, signals and approvals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from factories import step, workflow
from interlock.errors import InputError, UnknownJobError
from interlock.store.jobs import find_jobs
from interlock.store.task_admin import cancel_tasks, cancel_unfinished_tasks
from interlock.store.tasks import read_task_history
from interlock.store.workflows import put_workflow
from interlock.testing import dry_run
from interlock.workflow.cancel import cancel_job
from interlock.workflow.new_job import NewJob
from interlock.workflow.signals import end_due_waits, send_signal
from interlock.workflow.submit import submit_job
from job_driver import Failed, JobDriver

pytestmark = pytest.mark.store

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def mapped(**more: Any) -> list[dict[str, Any]]:
    return [step("find"), step("m", "find", kind="map", over="find", **more), step("end", "m")]


async def test_a_map_runs_a_part_for_each_element_and_joins_results_in_order(driver: JobDriver) -> None:
    driver.outcomes = {"find": ["x", {"y": 1}, None], "m[0]": "0", "m[1]": "1", "m[2]": "2"}
    job = await driver.submit(*mapped(priority=4))
    await driver.run(until=lambda: "find" in driver.ran)
    steps = await driver.steps(job)
    assert list(steps) == ["find", "m", "m[0]", "m[1]", "m[2]", "end"], "each map with its parts behind it"
    assert (steps["m"]["held_by"], steps["m"]["reason"]) == ("parts", "waits for 3 parts")
    assert [steps[f"m[{i}]"]["kind"] for i in range(3)] == ["part"] * 3
    parts = await driver.claim()
    assert [(part.type, part.input["item"], part.input["index"]) for part in parts] == [
        ("m", "x", 0),
        ("m", {"y": 1}, 1),
        ("m", None, 2),
    ]
    inputs = await driver.inputs(parts[1].id)
    assert (inputs["item"], inputs["index"], inputs["kind"]) == ({"y": 1}, 1, "map")
    assert inputs["results"] == {}, "the whole list is not handed to every part"
    for part in reversed(parts):
        await driver.settle(part)
    await driver.advance()
    joined = (await driver.steps(job))["m"]
    assert (joined["state"], joined["type"], joined["attempt"]) == ("done", "interlock.map", 0), "without a worker"
    (end,) = await driver.claim()
    assert (await driver.inputs(end.id))["results"] == {"m": ["0", "1", "2"]}
    await driver.settle(end)
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"
    assert (await driver.steps(job))["m"]["output"]["result"] == ["0", "1", "2"]


async def test_a_map_over_ranges_of_the_input_is_the_output_as_a_last_step(driver: JobDriver) -> None:
    job = await driver.submit(
        step("m", kind="map", over_input="rows"), input={"rows": {"start": 5, "stop": 26, "size": 10}}
    )
    parts = await driver.claim()
    assert [part.input["item"] for part in parts] == [
        {"start": 5, "stop": 15},
        {"start": 15, "stop": 25},
        {"start": 25, "stop": 26},
    ]
    driver.outcomes = {"m[0]": 0, "m[1]": 1, "m[2]": 2}
    for part in parts:
        await driver.settle(part)
    await driver.run()
    row = await driver.job(job)
    assert (row["status"], row["output"]) == ("COMPLETED", {"m": [0, 1, 2]})


@pytest.mark.parametrize("source", [[], {"start": 3, "stop": 3, "size": 5}])
async def test_a_map_over_nothing_is_done_at_once(driver: JobDriver, source: Any) -> None:
    driver.outcomes = {"find": source}
    job = await driver.submit(*mapped())
    await driver.run()
    assert driver.ran == ["find", "end"]
    assert (await driver.steps(job))["m"]["output"]["result"] == []


@pytest.mark.parametrize("source", [None, 7, {"start": 0, "stop": 9, "size": 0}, {"start": 0.5, "stop": 9, "size": 1}])
async def test_a_map_over_an_invalid_source_fails(driver: JobDriver, source: Any) -> None:
    driver.outcomes = {"find": source}
    job = await driver.submit(*mapped())
    await driver.run()
    assert await driver.states(job) == {"find": "done", "m": "error", "end": "skipped"}
    row = await driver.job(job)
    assert (row["status"], row["reason"].startswith("step m failed: a map goes over a list")) == ("FAILED", True)


@pytest.mark.parametrize(
    ("strategy", "failing", "good"),
    [("all", 1, False), ("all", 0, True), ("any", 4, True), ("any", 5, False), (0.6, 2, True), (0.6, 3, False)],
)
async def test_a_map_needs_its_share_of_parts(driver: JobDriver, strategy: Any, failing: int, good: Any) -> None:
    driver.outcomes = {"find": [0, 1, 2, 3, 4], **{f"m[{i}]": Failed("no") if i < failing else i for i in range(5)}}
    job = await driver.submit(*mapped(strategy=strategy))
    await driver.run()
    steps = await driver.steps(job)
    row = await driver.job(job)
    if good:
        assert (row["status"], steps["m"]["output"]["result"]) == ("COMPLETED", list(range(failing, 5)))
    else:
        error = f"{failing} of 5 parts failed: {', '.join(f'm[{i}]' for i in range(failing))}"
        assert (steps["m"]["state"], steps["end"]["state"]) == ("error", "skipped")
        assert (steps["m"]["error"]["type"], steps["m"]["error"]["message"]) == ("PartsFailed", error)
        assert steps["end"]["reason"] == "step m failed"
        assert (row["status"], row["reason"]) == ("FAILED", f"step m failed: {error}")
        assert row["error"]["steps"].keys() == {"m"}, "the map stands for its parts"


async def test_a_failed_map_names_its_first_failed_parts(driver: JobDriver) -> None:
    driver.outcomes = {"find": list(range(9)), **{f"m[{i}]": Failed("no") for i in range(1, 9)}}
    job = await driver.submit(*mapped())
    await driver.run()
    expected = "8 of 9 parts failed: m[1], m[2], m[3], m[4], m[5] and 3 more"
    assert (await driver.steps(job))["m"]["error"]["message"] == expected


async def test_a_failed_map_is_recovered_as_one_step(driver: JobDriver) -> None:
    driver.outcomes = {"find": [1], "m[0]": Failed("no"), "mend": ["mended"]}
    job = await driver.submit(*mapped(), step("mend", recovers=["m"]))
    await driver.run()
    assert await driver.states(job) == {
        "find": "done",
        "m": "error",
        "m[0]": "error",
        "mend": "done",
        "end": "done",
    }
    assert (await driver.job(job))["status"] == "COMPLETED"


@pytest.mark.parametrize("worker_count", [None, 1])
async def test_canceling_a_map_cancels_its_parts(driver: JobDriver, worker_count: int | None) -> None:
    driver.outcomes = {"find": [0, 1, 2]}
    job = await driver.submit(*mapped(), worker_count=worker_count)
    await driver.run(until=lambda: "find" in driver.ran)
    (running,) = await driver.claim(limit=1)
    map_id = (await driver.steps(job))["m"]["id"]
    assert await cancel_tasks(driver.connection, [map_id], actor="ada") == ([], [map_id])
    await driver.advance()
    await driver.advance()
    steps = await driver.steps(job)
    assert [steps[name]["state"] for name in ("m", "m[0]", "m[1]", "m[2]", "end")] == [
        *("waiting", "running", "canceled", "canceled"),
        "waiting",
    ], "the map ends with its last part"
    assert steps["m[1]"]["reason"] == "the map was canceled"
    query = "select cancel_requested_at is not null as is_asked from interlock.tasks where id = %s"
    (row,) = await (await driver.connection.execute(query, [running.id])).fetchall()
    assert row["is_asked"], "the running part is asked to stop"
    await driver.settle(running)
    await driver.run()
    assert driver.ran == ["find", "m[0]"]
    assert [(await driver.states(job))[name] for name in ("m", "end")] == ["canceled", "skipped"]
    row = await driver.job(job)
    assert (row["status"], row["reason"]) == ("FAILED", "step m was canceled by ada")


async def test_failure_handlers_of_a_canceled_map_run_after_its_parts_have_stopped(driver: JobDriver) -> None:
    driver.outcomes = {"find": [0, 1]}
    handlers = [step("rescue", recovers=["m"]), step("tell", on_failure=["m"])]
    job = await driver.submit(*mapped(), *handlers)
    await driver.run(until=lambda: "find" in driver.ran)
    first, second = await driver.claim()
    await cancel_tasks(driver.connection, [(await driver.steps(job))["m"]["id"]], actor="ada")
    for part in (first, second):
        await driver.run()
        assert driver.ran == ["find"], "the parts still run"
        await cancel_unfinished_tasks(driver.connection, [part.id], actor="w_1", attempts=[part.attempt], running=True)
    await driver.run()
    assert sorted(driver.ran) == ["end", "find", "rescue", "tell"]
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_map_whose_parts_are_all_done_when_it_is_canceled_is_done(driver: JobDriver) -> None:
    driver.outcomes = {"find": [0]}
    job = await driver.submit(*mapped())
    await driver.run(until=lambda: "find" in driver.ran)
    (part,) = await driver.claim()
    await cancel_tasks(driver.connection, [(await driver.steps(job))["m"]["id"]], actor="ada")
    await driver.settle(part)
    await driver.run()
    assert (await driver.states(job))["m"] == "done"
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_force_cancels_a_map_before_its_parts_have_stopped(driver: JobDriver) -> None:
    driver.outcomes = {"find": [0, 1]}
    job = await driver.submit(*mapped())
    await driver.run(until=lambda: "find" in driver.ran)
    (running,) = await driver.claim(limit=1)
    map_id = (await driver.steps(job))["m"]["id"]
    assert await cancel_tasks(driver.connection, [map_id], actor="ada", force=True) == ([map_id], [])
    await driver.advance()
    states = await driver.states(job)
    assert (states["m"], states["m[0]"], states["m[1]"], states["end"]) == (
        *("canceled", "running", "canceled"),
        "skipped",
    )
    await driver.settle(running)
    await driver.run()
    assert (await driver.job(job))["status"] == "FAILED"


async def test_a_child_job_gets_its_input_and_its_output_is_the_result(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("inner"), name="child"))
    driver.outcomes = {"first": {"n": 1}, "inner": "made"}
    mapping = {"from_step": "first", "field": "input.order", "whole": "input", "literal": 3, "word": "word"}
    job = await driver.submit(
        step("first"),
        step("c", "first", kind="child", workflow="child", input=mapping),
        step("end", "c"),
        input={"order": 7},
    )
    await driver.run(until=lambda: "first" in driver.ran)
    child, parent = await find_jobs(driver.connection)
    assert (parent["id"], child["parent_job_id"], child["depth"]) == (job, job, 1)
    found = (await driver.steps(job))["c"]
    assert (found["held_by"], found["reason"]) == ("job", f"waits for job {child['id']}")
    assert (await driver.job(child["id"]))["input"] == {
        "from_step": {"n": 1},
        "field": 7,
        "whole": {"order": 7},
        "literal": 3,
        "word": "word",
    }
    await driver.run()
    assert driver.ran == ["first", "inner", "end"], "the child step needs no worker"
    assert (await driver.steps(job))["c"]["output"]["result"] == {"inner": "made"}
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_child_job_that_fails_fails_its_step(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("inner"), name="child"))
    driver.outcomes = {"inner": Failed("boom")}
    job = await driver.submit(step("c", kind="child", workflow="child"))
    await driver.run()
    row = await driver.job(job)
    assert row["status"] == "FAILED"
    assert "failed: step inner failed: boom" in row["reason"]


async def test_a_child_step_need_not_wait_for_its_job(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("inner"), name="child"))
    job = await driver.submit(step("c", kind="child", workflow="child", wait=False))
    row = await driver.job(job)
    child = next(found for found in await find_jobs(driver.connection) if found["id"] != job)
    assert (row["status"], row["output"]) == ("COMPLETED", {"c": {"job_id": str(child["id"])}})
    assert child["status"] == "RUNNING"
    inner = await driver.connection.execute("select state from interlock.tasks where step = 'inner'")
    assert (await inner.fetchall())[0]["state"] in {"pending", "running"}


async def test_child_jobs_nest_five_deep_and_no_deeper(driver: JobDriver) -> None:
    job = await driver.submit(step("c", kind="child", workflow="w"))
    await driver.run()
    found = await find_jobs(driver.connection)
    assert sorted(row["depth"] for row in found) == [0, 1, 2, 3, 4, 5]
    assert {row["status"] for row in found} == {"FAILED"}
    assert "nest at most 5 deep" in (await driver.job(job))["reason"]


async def test_a_child_job_of_an_unknown_workflow_fails_its_step(driver: JobDriver) -> None:
    job = await driver.submit(step("c", kind="child", workflow="nowhere"))
    await driver.run()
    assert "there is no workflow 'nowhere'; known are w" in (await driver.job(job))["reason"]


async def test_canceling_a_job_cancels_its_children(driver: JobDriver) -> None:
    await put_workflow(
        driver.connection, workflow(step("inner", compensate="undo"), step("more", "inner"), name="leaf")
    )
    await put_workflow(driver.connection, workflow(step("c", kind="child", workflow="leaf"), name="branch"))
    job = await driver.submit(step("c", kind="child", workflow="branch"))
    await driver.run(until=lambda: "inner" in driver.ran)
    assert await cancel_job(driver.connection, job, actor="ada", reason="enough")
    for _ in range(2):  # a job asks its children, and these ask theirs
        await driver.advance()
    await driver.run()
    found = await find_jobs(driver.connection)
    assert {row["status"] for row in found} == {"CANCELED"}
    assert driver.ran == ["inner", "compensate:inner"]
    assert await driver.states(job) == {"c": "canceled"}
    leaf, branch = (next(row for row in found if row["workflow"] == name) for name in ("leaf", "branch"))
    assert leaf["reason"] == f"job {branch['id']}, which it belongs to, was canceled"
    assert branch["reason"] == f"job {job}, which it belongs to, was canceled"


async def test_a_sleep_waits_until_its_time_and_is_completed_by_the_orchestrator(driver: JobDriver) -> None:
    driver.now = NOW
    job = await driver.submit(
        step("s", kind="sleep", seconds=3600),
        step("t", kind="sleep", until="2026-01-02T00:00:00+00:00"),
        step("u", kind="sleep", until="when"),
        step("v", kind="sleep", until="nowhere"),
        input={"when": "2026-01-01T06:00:00Z"},
    )
    steps = await driver.steps(job)
    assert {name: (steps[name]["state"], steps[name]["held_by"], steps[name]["wait_until"]) for name in "stu"} == {
        "s": ("waiting", "sleep", NOW + timedelta(hours=1)),
        "t": ("waiting", "sleep", NOW + timedelta(days=1)),
        "u": ("waiting", "sleep", NOW + timedelta(hours=6)),
    }
    assert steps["s"]["reason"] == "sleeps until 2026-01-01 01:00:00 UTC"
    assert steps["v"]["state"] == "error"
    assert steps["v"]["error"]["message"] == "sleeps until 'nowhere', which is not a time in ISO 8601"
    assert await driver.claim() == []
    driver.now = NOW + timedelta(hours=7)
    assert await end_due_waits(driver.connection, actor="o", now=driver.now) == 2
    assert await driver.states(job) == {"s": "done", "t": "waiting", "u": "done", "v": "error"}
    assert [record.event for record in await read_task_history(driver.connection, steps["s"]["id"])][-1] == "succeed"
    driver.now = NOW + timedelta(days=1)
    assert await end_due_waits(driver.connection, actor="o", now=driver.now) == 1
    assert (await driver.job(job))["status"] == "FAILED"


async def test_a_sleep_of_no_seconds_or_until_a_past_time_ends_at_once(driver: JobDriver) -> None:
    job = await driver.submit(
        step("s", kind="sleep", seconds=0), step("t", "s", kind="sleep", until="2020-01-01T00:00:00Z"), step("z", "t")
    )
    assert await driver.states(job) == {"s": "done", "t": "done", "z": "pending"}


SLEEP, MAP = {"kind": "sleep", "until": "at"}, {"kind": "map", "over_input": "list"}
ODD_INPUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (SLEEP, {}),
    (SLEEP, {"at": None}),
    (SLEEP, {"at": 7}),
    (SLEEP, {"at": "9999-01-01T00:00:00+00:00"}),
    (SLEEP, {"at": "2020-01-01T00:00:00"}),
    (MAP, {}),
    (MAP, {"list": {"start": 0, "stop": 9, "size": 0}}),
    (MAP, {"list": {"start": 0, "stop": 9, "size": -1}}),
    (MAP, {"list": {"start": 0, "stop": 2.5, "size": 1}}),
    (MAP, {"list": {"start": 0, "stop": True, "size": 1}}),
    (MAP, {"list": {"start": 5, "stop": 1, "size": 2}}),
]


async def test_the_dry_run_agrees_with_the_database_on_unusual_inputs(driver: JobDriver) -> None:
    for number, (kind, given) in enumerate(ODD_INPUTS):
        steps = step("s", **kind), step("t", "s")
        job = await driver.submit(*steps, input=given, name=f"w{number}")
        await driver.run()
        told = dry_run(workflow(*steps), input=given)
        row = await driver.job(job)
        assert (row["status"], row["reason"]) == (told.status, told.reason), given
        assert await driver.states(job) == {name: ended.state for name, ended in told.steps.items()}, given


async def test_a_signal_counts_before_and_after_its_step_waits(driver: JobDriver) -> None:
    job = await driver.submit(
        step("late", kind="signal", signal="paid"), step("a"), step("early", "a", kind="signal", signal="packed")
    )
    steps = await driver.steps(job)
    assert (steps["late"]["held_by"], steps["late"]["reason"]) == ("signal", "waits for signal 'paid'")
    assert await send_signal(driver.connection, job, "packed", {"boxes": 2}, actor="ada")
    assert await send_signal(driver.connection, job, "paid", None, actor="ada")
    await driver.run()
    row = await driver.job(job)
    assert (row["status"], row["output"]) == ("COMPLETED", {"late": None, "early": {"boxes": 2}})
    with pytest.raises(InputError, match=r"is COMPLETED: a signal cannot reach it"):
        await send_signal(driver.connection, job, "paid", None, actor="ada")


async def test_a_signal_that_no_step_waits_for_is_refused(driver: JobDriver) -> None:
    job = await driver.submit(step("s", kind="signal", signal="paid"), step("ok", kind="approval"))
    with pytest.raises(InputError, match=r"no step that waits for a signal 'payed'; it waits for ok, paid"):
        await send_signal(driver.connection, job, "payed", None, actor="ada")
    with pytest.raises(UnknownJobError, match="there is no job"):
        await send_signal(driver.connection, uuid4(), "paid", None, actor="ada")
    with pytest.raises(InputError, match=r"the answer to approval 'ok' must be"):
        await send_signal(driver.connection, job, "ok", {"approved": "yes"}, actor="ada")


async def test_a_signal_timeout_fails_its_step(driver: JobDriver) -> None:
    driver.now = NOW
    job = await driver.submit(step("s", kind="signal", signal="paid", timeout=60), step("a"))
    other = await driver.submit(step("s", kind="signal", signal="paid"), name="patient")
    assert await end_due_waits(driver.connection, actor="o", now=NOW + timedelta(seconds=59)) == 0
    driver.now = NOW + timedelta(seconds=60)
    assert await end_due_waits(driver.connection, actor="o", now=driver.now) == 1
    assert await end_due_waits(driver.connection, actor="o", now=driver.now) == 0
    with pytest.raises(InputError, match="does not wait for signal 'paid' any more: its timeout has passed"):
        await send_signal(driver.connection, job, "paid", 1, actor="ada")
    await driver.run()
    row = await driver.job(job)
    assert (row["status"], row["reason"]) == ("FAILED", "step s failed: no signal 'paid' within 60 s")
    assert (await driver.job(other))["status"] == "RUNNING"


@pytest.mark.parametrize("approved", [True, False])
async def test_an_approval_activates_or_fails_its_step(driver: JobDriver, approved: Any) -> None:
    job = await driver.submit(step("ok", kind="approval"), step("end", "ok"))
    assert (await driver.steps(job))["ok"]["reason"] == "waits for approval"
    answer = {"approved": approved, "by": "eve", "comment": "hm"}
    assert await send_signal(driver.connection, job, "ok", answer, actor="ada")
    await driver.run()
    row = await driver.job(job)
    if approved:
        assert row["status"] == "COMPLETED"
        assert (await driver.steps(job))["ok"]["output"]["result"] == answer
    else:
        assert (row["status"], row["reason"]) == ("FAILED", "step ok failed: rejected by eve: hm")


async def test_a_signal_step_cannot_be_approved(driver: JobDriver) -> None:
    job = await driver.submit(step("s", kind="signal", signal="paid"), step("boss", kind="approval"))
    answer = {"approved": True}
    for name in ("s", "paid"):
        with pytest.raises(InputError, match=f"step 's' .* waits for signal 'paid'.*interlock jobs signal {job} paid"):
            await send_signal(driver.connection, job, name, answer, actor="eva", is_answer=True)
    assert await send_signal(driver.connection, job, "boss", answer, actor="eva", is_answer=True)
    assert await driver.states(job) == {"s": "waiting", "boss": "done"}


async def test_a_submit_in_a_transaction_that_rolls_back_leaves_nothing(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("s", kind="signal", signal="x")))
    async with driver.connection.transaction(force_rollback=True):
        made = await submit_job(driver.connection, NewJob("w", {}), actor="ada")
        assert isinstance(made.id, UUID)
    assert await find_jobs(driver.connection) == []
