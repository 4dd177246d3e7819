"""The kinds of steps in the database: maps, child jobs, sleeps, signals and approvals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest

from interlock.errors import InputError
from interlock.store.jobs import find_jobs
from interlock.store.workflows import put_workflow
from interlock.testing import dry_run
from interlock.workflow.cancel import cancel_job
from interlock.workflow.new_job import NewJob
from interlock.workflow.signals import expire_overdue_signals, send_signal
from interlock.workflow.submit import submit_job
from workflow_support import PASS, Failed, Hand, name_of, serve, step, workflow

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
async def hand(database: Connection) -> Hand:
    """Return a Hand on a database with a live worker."""
    await serve(database)
    return Hand(database)


def mapped(**more: Any) -> list[dict[str, Any]]:
    return [step("find"), step("m", "find", kind="map", over="find", **more), step("end", "m")]


async def test_a_map_runs_a_part_for_each_element_and_joins_results_in_order(hand: Hand) -> None:
    hand.outcomes = {"find": ["x", {"y": 1}, None], "m[0]": "0", "m[1]": "1", "m[2]": "2"}
    job = await hand.submit(*mapped(priority=4))
    await hand.run(until=lambda: "find" in hand.ran)
    steps = await hand.steps(job)
    assert list(steps) == ["find", "m", "m[0]", "m[1]", "m[2]", "end"], "each map with its parts behind it"
    assert (steps["m"]["held_by"], steps["m"]["reason"]) == ("parts", "waits for 3 parts")
    assert [steps[f"m[{i}]"]["kind"] for i in range(3)] == ["part"] * 3
    parts = await hand.claim()
    assert [(part.type, part.input["item"], part.input["index"]) for part in parts] == [
        ("m", "x", 0),
        ("m", {"y": 1}, 1),
        ("m", None, 2),
    ]
    inputs = await hand.inputs(parts[1].id)
    assert (inputs["item"], inputs["index"], inputs["kind"]) == ({"y": 1}, 1, "map")
    assert inputs["results"] == {}, "the whole list is not handed to every part"
    for part in reversed(parts):
        await hand.settle(part)
    await hand.advance()
    (joined,) = await hand.claim()
    assert (name_of(joined), joined.type) == ("m", PASS)
    await hand.settle(joined)
    await hand.advance()
    (end,) = await hand.claim()
    assert (await hand.inputs(end.id))["results"] == {"m": ["0", "1", "2"]}
    await hand.settle(end)
    await hand.run()
    assert (await hand.job(job))["status"] == "COMPLETED"
    assert (await hand.steps(job))["m"]["output"]["result"] == ["0", "1", "2"]


async def test_a_map_over_ranges_of_the_input_is_the_output_as_a_last_step(hand: Hand) -> None:
    job = await hand.submit(
        step("m", kind="map", over_input="rows"), input={"rows": {"start": 5, "stop": 26, "size": 10}}
    )
    parts = await hand.claim()
    assert [part.input["item"] for part in parts] == [
        {"start": 5, "stop": 15},
        {"start": 15, "stop": 25},
        {"start": 25, "stop": 26},
    ]
    hand.outcomes = {"m[0]": 0, "m[1]": 1, "m[2]": 2}
    for part in parts:
        await hand.settle(part)
    await hand.run()
    row = await hand.job(job)
    assert (row["status"], row["output"]) == ("COMPLETED", {"m": [0, 1, 2]})


@pytest.mark.parametrize("source", [[], {"start": 3, "stop": 3, "size": 5}])
async def test_a_map_over_nothing_is_done_at_once(hand: Hand, source: Any) -> None:
    hand.outcomes = {"find": source}
    job = await hand.submit(*mapped())
    await hand.run()
    assert hand.ran == ["find", "m", "end"]
    assert (await hand.steps(job))["m"]["output"]["result"] == []


@pytest.mark.parametrize("source", [None, 7, {"start": 0, "stop": 9, "size": 0}, {"start": 0.5, "stop": 9, "size": 1}])
async def test_a_map_over_an_invalid_source_fails(hand: Hand, source: Any) -> None:
    hand.outcomes = {"find": source}
    job = await hand.submit(*mapped())
    await hand.run()
    assert await hand.states(job) == {"find": "done", "m": "skipped", "end": "skipped"}
    row = await hand.job(job)
    assert (row["status"], row["reason"].startswith("step m failed: a map goes over a list")) == ("FAILED", True)


@pytest.mark.parametrize(
    ("strategy", "failing", "good"),
    [("all", 1, False), ("all", 0, True), ("any", 4, True), ("any", 5, False), (0.6, 2, True), (0.6, 3, False)],
)
async def test_a_map_needs_its_share_of_parts(hand: Hand, strategy: Any, failing: int, good: Any) -> None:
    hand.outcomes = {"find": [0, 1, 2, 3, 4], **{f"m[{i}]": Failed("no") if i < failing else i for i in range(5)}}
    job = await hand.submit(*mapped(strategy=strategy))
    await hand.run()
    steps = await hand.steps(job)
    row = await hand.job(job)
    if good:
        assert (row["status"], steps["m"]["output"]["result"]) == ("COMPLETED", list(range(failing, 5)))
    else:
        assert (steps["m"]["state"], steps["m"]["poisoned"]) == ("skipped", True)
        assert steps["m"]["reason"] == f"{failing} of 5 parts failed"
        assert (row["status"], row["reason"]) == ("FAILED", f"step m failed: {failing} of 5 parts failed")


async def test_a_failed_map_is_handled_as_one_step(hand: Hand) -> None:
    hand.outcomes = {"find": [1], "m[0]": Failed("no")}
    job = await hand.submit(*mapped(), step("mend", after_failure=["m"]))
    await hand.run()
    assert (await hand.job(job))["status"] == "COMPLETED"


async def test_a_child_job_gets_its_input_and_its_output_is_the_result(hand: Hand) -> None:
    await put_workflow(hand.connection, workflow(step("inner"), name="child"))
    hand.outcomes = {"first": {"n": 1}, "inner": "made"}
    mapping = {"from_step": "first", "field": "input.order", "whole": "input", "literal": 3, "word": "word"}
    job = await hand.submit(
        step("first"),
        step("c", "first", kind="child", workflow="child", input=mapping),
        step("end", "c"),
        input={"order": 7},
    )
    await hand.run(until=lambda: "first" in hand.ran)
    child, parent = await find_jobs(hand.connection)
    assert (parent["id"], child["parent_job_id"], child["depth"]) == (job, job, 1)
    found = (await hand.steps(job))["c"]
    assert (found["held_by"], found["reason"]) == ("job", f"waits for job {child['id']}")
    assert (await hand.job(child["id"]))["input"] == {
        "from_step": {"n": 1},
        "field": 7,
        "whole": {"order": 7},
        "literal": 3,
        "word": "word",
    }
    await hand.run()
    assert hand.ran == ["first", "inner", "c", "end"]
    assert (await hand.steps(job))["c"]["output"]["result"] == {"inner": "made"}
    assert (await hand.job(job))["status"] == "COMPLETED"


async def test_a_child_job_that_fails_fails_its_step(hand: Hand) -> None:
    await put_workflow(hand.connection, workflow(step("inner"), name="child"))
    hand.outcomes = {"inner": Failed("boom")}
    job = await hand.submit(step("c", kind="child", workflow="child"))
    await hand.run()
    row = await hand.job(job)
    assert row["status"] == "FAILED"
    assert "failed: step inner failed: boom" in row["reason"]


async def test_a_child_step_need_not_wait_for_its_job(hand: Hand) -> None:
    await put_workflow(hand.connection, workflow(step("inner"), name="child"))
    job = await hand.submit(step("c", kind="child", workflow="child", wait=False))
    for task in await hand.claim():
        if name_of(task) == "c":
            await hand.settle(task)
    await hand.advance()
    row = await hand.job(job)
    child = next(found for found in await find_jobs(hand.connection) if found["id"] != job)
    assert (row["status"], row["output"]) == ("COMPLETED", {"c": {"job_id": str(child["id"])}})
    assert child["status"] == "RUNNING"
    inner = await hand.connection.execute("select state from interlock.tasks where step = 'inner'")
    assert (await inner.fetchall())[0]["state"] in {"pending", "running"}


async def test_child_jobs_nest_five_deep_and_no_deeper(hand: Hand) -> None:
    job = await hand.submit(step("c", kind="child", workflow="w"))
    await hand.run()
    found = await find_jobs(hand.connection)
    assert sorted(row["depth"] for row in found) == [0, 1, 2, 3, 4, 5]
    assert {row["status"] for row in found} == {"FAILED"}
    assert "nest at most 5 deep" in (await hand.job(job))["reason"]


async def test_a_child_job_of_an_unknown_workflow_fails_its_step(hand: Hand) -> None:
    job = await hand.submit(step("c", kind="child", workflow="nowhere"))
    await hand.run()
    assert "there is no workflow 'nowhere'; known are w" in (await hand.job(job))["reason"]


async def test_canceling_a_job_cancels_its_children(hand: Hand) -> None:
    await put_workflow(hand.connection, workflow(step("inner", compensate="undo"), step("more", "inner"), name="leaf"))
    await put_workflow(hand.connection, workflow(step("c", kind="child", workflow="leaf"), name="branch"))
    job = await hand.submit(step("c", kind="child", workflow="branch"))
    await hand.run(until=lambda: "inner" in hand.ran)
    assert await cancel_job(hand.connection, job, actor="ada", reason="enough")
    await hand.advance()
    await hand.run()
    found = await find_jobs(hand.connection)
    assert {row["status"] for row in found} == {"CANCELED"}
    assert hand.ran == ["inner", "compensate:inner"]
    leaf = next(row for row in found if row["workflow"] == "leaf")
    assert leaf["reason"] == f"job {job}, which it belongs to, was canceled"


async def test_a_sleep_is_a_pending_task_with_a_later_run_at(hand: Hand) -> None:
    hand.now = NOW
    job = await hand.submit(
        step("s", kind="sleep", seconds=3600),
        step("t", kind="sleep", until="2026-01-02T00:00:00+00:00"),
        step("u", kind="sleep", until="when"),
        step("v", kind="sleep", until="nowhere"),
        input={"when": "2026-01-01T06:00:00Z"},
    )
    steps = await hand.steps(job)
    assert {name: steps[name]["run_at"] for name in "stu"} == {
        "s": NOW + timedelta(hours=1),
        "t": NOW + timedelta(days=1),
        "u": NOW + timedelta(hours=6),
    }
    assert (steps["v"]["state"], steps["v"]["poisoned"]) == ("skipped", True)
    assert steps["v"]["reason"] == "sleeps until 'nowhere', which is not a time in ISO 8601"
    assert await hand.claim() == []
    hand.now = NOW + timedelta(hours=7)
    assert {name_of(task) for task in await hand.claim()} == {"s", "u"}


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


async def test_the_dry_run_agrees_with_the_database_on_unusual_inputs(hand: Hand) -> None:
    for number, (kind, given) in enumerate(ODD_INPUTS):
        steps = step("s", **kind), step("t", "s")
        job = await hand.submit(*steps, input=given, name=f"w{number}")
        await hand.run()
        told = dry_run(workflow(*steps), input=given)
        row = await hand.job(job)
        assert (row["status"], row["reason"]) == (told.status, told.reason), given
        assert await hand.states(job) == {name: ended.state for name, ended in told.steps.items()}, given


async def test_the_first_signal_counts_before_and_after_its_step_waits(hand: Hand) -> None:
    job = await hand.submit(
        step("late", kind="signal", signal="paid"), step("a"), step("early", "a", kind="signal", signal="packed")
    )
    steps = await hand.steps(job)
    assert (steps["late"]["held_by"], steps["late"]["reason"]) == ("signal", "waits for signal 'paid'")
    assert await send_signal(hand.connection, job, "packed", {"boxes": 2}, actor="ada")
    assert not await send_signal(hand.connection, job, "packed", {"boxes": 3}, actor="ada"), "the first one counts"
    assert await send_signal(hand.connection, job, "paid", None, actor="ada")
    await hand.run()
    row = await hand.job(job)
    assert (row["status"], row["output"]) == ("COMPLETED", {"late": None, "early": {"boxes": 2}})
    with pytest.raises(InputError, match=r"is COMPLETED: a signal cannot reach it"):
        await send_signal(hand.connection, job, "paid", None, actor="ada")


async def test_a_signal_that_no_step_waits_for_is_refused(hand: Hand) -> None:
    job = await hand.submit(step("s", kind="signal", signal="paid"), step("ok", kind="approval"))
    with pytest.raises(InputError, match=r"no step that waits for a signal 'payed'; it waits for ok, paid"):
        await send_signal(hand.connection, job, "payed", None, actor="ada")
    with pytest.raises(InputError, match="there is no job"):
        await send_signal(hand.connection, uuid4(), "paid", None, actor="ada")
    with pytest.raises(InputError, match=r"the answer to approval 'ok' must be"):
        await send_signal(hand.connection, job, "ok", {"approved": "yes"}, actor="ada")


async def test_a_signal_timeout_fails_its_step(hand: Hand) -> None:
    hand.now = NOW
    job = await hand.submit(step("s", kind="signal", signal="paid", timeout=60))
    other = await hand.submit(step("s", kind="signal", signal="paid"), name="patient")
    assert await expire_overdue_signals(hand.connection, actor="o", now=NOW + timedelta(seconds=59)) == 0
    hand.now = NOW + timedelta(seconds=60)
    assert await expire_overdue_signals(hand.connection, actor="o", now=hand.now) == 1
    assert await expire_overdue_signals(hand.connection, actor="o", now=hand.now) == 0
    with pytest.raises(InputError, match="does not wait for signal 'paid' any more: its timeout has passed"):
        await send_signal(hand.connection, job, "paid", 1, actor="ada")
    await hand.run()
    row = await hand.job(job)
    assert (row["status"], row["reason"]) == ("FAILED", "step s failed: no signal 'paid' within 60 s")
    assert (await hand.job(other))["status"] == "RUNNING"


@pytest.mark.parametrize("approved", [True, False])
async def test_an_approval_activates_or_fails_its_step(hand: Hand, approved: Any) -> None:
    job = await hand.submit(step("ok", kind="approval"), step("end", "ok"))
    assert (await hand.steps(job))["ok"]["reason"] == "waits for approval"
    answer = {"approved": approved, "by": "eve", "comment": "hm"}
    assert await send_signal(hand.connection, job, "ok", answer, actor="ada")
    await hand.run()
    row = await hand.job(job)
    if approved:
        assert row["status"] == "COMPLETED"
        assert (await hand.steps(job))["ok"]["output"]["result"] == answer
    else:
        assert (row["status"], row["reason"]) == ("FAILED", "step ok failed: rejected by eve: hm")


async def test_a_signal_counts_against_the_worker_count(hand: Hand) -> None:
    job = await hand.submit(step("a"), step("s", kind="signal", signal="go"), worker_count=1)
    await send_signal(hand.connection, job, "go", 1, actor="ada")
    assert (await hand.steps(job))["s"]["held_by"] == "worker_count"
    await hand.run()
    assert (await hand.job(job))["output"] == {"a": None, "s": 1}


async def test_a_submit_in_a_transaction_that_rolls_back_leaves_nothing(hand: Hand) -> None:
    await put_workflow(hand.connection, workflow(step("s", kind="signal", signal="x")))
    async with hand.connection.transaction(force_rollback=True):
        made = await submit_job(hand.connection, NewJob("w", {}), actor="ada")
        assert isinstance(made.id, UUID)
    assert await find_jobs(hand.connection) == []
