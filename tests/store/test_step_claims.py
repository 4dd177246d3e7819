"""The inputs that a claim returns with a step: only what it needs, and bounded so that claims never fail."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from factories import step, workflow
from interlock import Interlock
from interlock.client.step_context import bind, gather
from interlock.errors import PermanentError
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.query import run
from interlock.service import cancel_and_wait
from interlock.store.jobs import STEPS
from interlock.store.limits import LIMITS, pause_namespace, resume_namespace
from interlock.store.task_admin import recover_expired_tasks
from interlock.store.tasks import Outcome, read_task_history, settle_running_tasks
from interlock.store.workflows import put_workflow
from interlock.worker.attempt import TaskStateMachine
from interlock.worker.settler import Settler
from interlock.workflow.cancel import cancel_job
from interlock.workflow.signals import end_due_waits
from job_driver import Failed, JobDriver, name_of
from worker_support import until

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.store.tasks import ClaimedTask

pytestmark = pytest.mark.store

# three of them are more than a JSON document of the database can hold; to copy one is faster than to make it
DONE = (
    "update interlock.tasks set state = 'done', event = 'succeed', settled_attempt = attempt, lease_expires_at = null, "
    "finished_at = now(), output"
)
LARGE = f"{DONE} = jsonb_build_object('result', repeat('x', 95000000)) where id = %s"
AS_LARGE = f"{DONE} = (select output from interlock.tasks where id = %s) where id = any (%s)"


def job_of(claimed: ClaimedTask) -> dict[str, Any]:
    found: dict[str, Any] = claimed.own("job")
    return found


async def end_with_too_much(driver: JobDriver, parts: list[ClaimedTask]) -> None:
    """Complete every part of a map with results that are too large together."""
    first, *others = [part.id for part in parts]
    assert len(others) == 2
    await driver.connection.execute(LARGE.encode(), [first])
    await driver.connection.execute(AS_LARGE.encode(), [first, others])


async def end_parts_with_too_much(driver: JobDriver) -> None:
    """The same, and the map itself is done."""
    await end_with_too_much(driver, await driver.claim())
    await driver.advance()


async def compared(driver: JobDriver) -> dict[str, set[str]]:
    """Run a job and compare each claim's inputs with the function's; return the steps with results."""
    seen: dict[str, set[str]] = {}
    while claimed := await driver.claim():
        for each in claimed:
            row = await (
                await driver.connection.execute(
                    "select interlock.step_inputs(tasks) as document from interlock.tasks where id = %s", [each.id]
                )
            ).fetchone()
            assert row is not None
            document = job_of(each)
            assert {key: row["document"][key] for key in document} == document
            assert not any(row["document"][key] for key in row["document"].keys() - document.keys() - {"wait"})
            seen[name_of(each)] = set(document["results"])
            await driver.settle(each)
        await driver.advance()
    return seen


@pytest.mark.parametrize("size", [10, 20_000])
@pytest.mark.parametrize("over", ["over", "over_input"])
async def test_so_it_does_for_the_parts_of_a_map(driver: JobDriver, size: int, over: str) -> None:
    text = random.Random(1).randbytes(size).hex()  # noqa: S311 - it must only be hard to compress
    driver.outcomes = {"items": [1, 2], "a": text}
    await driver.submit(
        step("items"),
        step("a"),
        step("m", "items", "a", kind="map", **{over: "items"}),
        step("last", "m"),
        input={"items": [text, 5], "name": text},
    )
    seen = await compared(driver)
    handed = {"a"} if over == "over" else {"a", "items"}
    assert seen["m[0]"] == seen["m[1]"] == handed
    assert seen["last"] == {"m"}


@pytest.mark.parametrize("size", [10, 20_000])
async def test_a_claim_gathers_what_the_function_for_all_kinds_would(driver: JobDriver, size: int) -> None:
    text = random.Random(1).randbytes(size).hex()  # noqa: S311 - it must only be hard to compress
    driver.outcomes = {"a": {"text": text}, "b": 2, "d": "left"}
    await driver.submit(
        step("a"),
        step("b", "a", config={"mode": "fast"}),
        step("d", "b", kind="decision", branches=["left", "right"]),
        step("left", "d"),
        step("right", "d"),
        step("last", "a", "left", "right"),
        input={"name": "x", "list": [text]},
    )
    seen = await compared(driver)
    assert seen == {"a": set(), "b": {"a"}, "d": {"b"}, "left": {"d"}, "last": {"a", "left"}}


async def settled(driver: JobDriver, claimed: ClaimedTask, error: PermanentError) -> None:
    document = {"type": "PermanentError", "message": str(error), "traceback": None, "retryable": False}
    outcome = Outcome(claimed.id, claimed.attempt, TaskRowEvent.FAIL, error=document, reason=str(error))
    await settle_running_tasks(driver.connection, [outcome], actor="w_1")


async def test_a_step_whose_results_are_too_large_fails_and_holds_up_no_other(driver: JobDriver) -> None:
    job = await driver.submit(
        step("m", kind="map", over_input="items"),
        step("z", "m"),
        step("mm", "m", kind="map", over="m"),
        input={"items": [1, 2, 3]},
    )
    await end_parts_with_too_much(driver)
    await driver.connection.execute("select interlock.enqueue('other')")
    claimed = {task.type: task for task in await driver.claim()}
    assert claimed.keys() == {"z", "other"}
    app = Interlock("postgresql://nowhere")

    @app.task
    def handler() -> None: ...

    with pytest.raises(
        PermanentError, match="the inputs of the step cannot be gathered: total size of jsonb"
    ) as refused:
        bind(handler, {}, job_of(claimed["z"]))
    with pytest.raises(PermanentError, match="the inputs of the step cannot be gathered: total size of jsonb"):
        gather(handler, {}, job_of(claimed["z"]))
    await settled(driver, claimed["z"], refused.value)
    await driver.advance()
    row = await driver.job(job)
    assert (row["status"], row["error"]["steps"].keys()) == ("FAILED", {"z", "mm"})
    query = f"select * from ({STEPS['read_steps'].sql}) as steps where step = 'm'"
    (map_,) = await (await driver.connection.execute(query.encode(), {"job_id": job, "ids": None})).fetchall()
    assert (map_["state"], map_["output"]["result"]) == ("done", None), "it can still be looked at"


async def test_a_job_whose_output_is_too_large_fails_after_its_compensations(driver: JobDriver) -> None:
    job = await driver.submit(
        step("a", compensate="undo"), step("m", "a", kind="map", over_input="items"), input={"items": [1, 2, 3]}
    )
    fine = await driver.submit(step("b"), name="fine")
    await driver.settle(next(task for task in await driver.claim(1) if name_of(task) == "a"))
    await driver.advance()
    b, *parts = await driver.claim()
    assert name_of(b) == "b"
    await end_with_too_much(driver, parts)
    await driver.settle(b)
    await driver.run()
    assert (await driver.job(fine))["status"] == "COMPLETED"
    row = await driver.job(job)
    assert (row["status"], driver.ran[-1]) == ("FAILED", "compensate:a")
    assert row["reason"].startswith("the output of the job is too large")
    assert row["error"]["message"] == row["reason"]
    assert row["output"] is None


async def handed(driver: JobDriver, items: int) -> tuple[UUID, list[ClaimedTask]]:
    given = {"items": [f"item number {i}" for i in range(items)], "order": 7}
    job = await driver.submit(step("m", kind="map", over_input="items"), name=f"w{items}", input=given)
    return job, (await driver.claim(30))[:10]  # a third of them for each namespace


async def test_a_part_is_handed_its_item_and_the_rest_of_the_input_but_not_the_list(driver: JobDriver) -> None:
    sizes = []
    for items in (10, 1000):
        _, parts = await handed(driver, items)
        assert [job_of(part)["job_input"] for part in parts] == [{"order": 7}] * 10
        assert parts[3].input == {"item": "item number 3", "index": 3}
        sizes.append(max(len(orjson.dumps(part.extras)) for part in parts))
        for part in parts:
            await driver.settle(part)
        await driver.connection.execute(
            "update interlock.tasks set state = 'canceled', event = 'cancel', held_by = null where state = 'pending'"
        )
    assert sizes[1] < sizes[0] + 100


async def test_the_steps_after_a_map_are_handed_the_whole_input(driver: JobDriver) -> None:
    await driver.submit(
        step("m", kind="map", over_input="items"), step("z", "m"), input={"items": [1], "order": 7}, name="whole"
    )
    await driver.run(until=lambda: "m[0]" in driver.ran)
    (last,) = await driver.claim()
    assert (name_of(last), job_of(last)["job_input"]) == ("z", {"items": [1], "order": 7})


async def test_recovery_cancels_a_task_with_a_cancel_request(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("b"))
    lost, _ = sorted(await driver.claim(), key=name_of)
    assert await cancel_job(driver.connection, job, actor="ada", reason="not wanted")
    later = datetime.now(UTC) + timedelta(hours=1)
    found = await recover_expired_tasks(driver.connection, actor="w_2", now=later)
    assert sorted(task.event for task in found) == ["cancel", "cancel"]
    assert await recover_expired_tasks(driver.connection, actor="w_2", now=later) == []
    await driver.advance()
    assert (await driver.job(job))["status"] == "CANCELED", "although no worker serves its steps"
    last = (await read_task_history(driver.connection, lost.id))[-1]
    assert (last.event, last.actor, last.reason) == ("cancel", "w_2", "the job was canceled: not wanted")


async def test_a_step_that_killed_its_workers_has_a_document(driver: JobDriver) -> None:
    job = await driver.submit(step("a", max_tries=1))
    later = datetime.now(UTC) + timedelta(hours=1)
    for event in ("expire", "expire", "exhaust"):
        assert await driver.claim()
        (found,) = await recover_expired_tasks(driver.connection, actor="w_2", now=later)
        assert found.event == event
    row = (await driver.steps(job))["a"]
    document = row["output"]
    assert document["error"] == row["error"]
    assert {key: document[key] for key in ("step", "success", "status", "result", "orchestration_metadata")} == {
        "step": "a",
        "success": False,
        "status": "failed",
        "result": None,
        "orchestration_metadata": {},
    }
    metadata = document["metadata"]
    assert (metadata["worker_id"], metadata["attempt"], metadata["retryable"]) == ("w_1", 3, True)
    assert datetime.fromisoformat(metadata["started_at"]) < datetime.fromisoformat(metadata["completed_at"])


async def test_a_sleep_takes_up_no_room_of_its_job(driver: JobDriver) -> None:
    job = await driver.submit(
        step("s", kind="sleep", seconds=86400, priority=9), step("a"), step("b", "a"), step("z", "s"), worker_count=1
    )
    await driver.run()
    assert driver.ran == ["a", "b"]
    assert await driver.states(job) == {"s": "waiting", "a": "done", "b": "done", "z": "waiting"}
    driver.now = datetime.now(UTC) + timedelta(days=2)
    assert await end_due_waits(driver.connection, actor="o_1", now=driver.now) == 1
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_child_whose_input_its_schema_does_not_allow_is_not_started(driver: JobDriver) -> None:
    schema = {"type": "object", "required": ["order"], "properties": {"order": {"type": "integer"}}}
    await put_workflow(driver.connection, workflow(step("x"), name="kid", input_schema=schema))
    wrong = await driver.submit(
        step("a"), step("c", "a", kind="child", workflow="kid", input={"order": "a"}), name="wrong"
    )
    fine = await driver.submit(step("c", kind="child", workflow="kid"), name="fine", input={"order": 7})
    driver.outcomes = {"a": "seven"}
    await driver.run()
    assert (await driver.job(fine))["status"] == "COMPLETED"
    row = await driver.job(wrong)
    assert row["status"] == "FAILED"
    assert row["error"]["steps"]["c"]["message"] == "workflow kid: input.order: must be of type integer"
    assert "seven" not in row["reason"]


async def test_a_step_whose_outcome_the_database_refuses_has_a_document(driver: JobDriver) -> None:
    job = await driver.submit(step("a"))
    (claimed,) = await driver.claim()

    @Interlock("postgresql://nowhere").task
    def handler() -> None: ...

    answers: list[bool] = []

    class Owner:
        is_idle = True

        def finish(self, _: TaskStateMachine, *, written: bool) -> None:
            answers.append(written)

    settler = Settler(Owner(), "w_1", max_batch=100)
    attempt = TaskStateMachine.of_claim(claimed, "w_1", handler, lease_until=0.0)
    attempt.outcome = Outcome(claimed.id, claimed.attempt, TaskRowEvent.SUCCEED, {"result": "\0"})
    settler.add(attempt)
    running = asyncio.create_task(settler.run(driver.connection))
    await until(lambda: answers == [True])
    await cancel_and_wait([running])
    row = (await driver.steps(job))["a"]
    assert row["state"] == "error"
    assert row["error"]["message"].startswith("the outcome could not be stored")
    document = row["output"]
    assert (document["step"], document["success"], document["status"]) == ("a", False, "failed")
    assert (document["error"], document["metadata"]["attempt"]) == (row["error"], claimed.attempt)


async def test_pause_and_resume_respect_worker_count(driver: JobDriver) -> None:
    database = driver.connection
    await pause_namespace(database, "inventory", None, "ada")
    away = [step(f"p{i}", "a", namespace="inventory", priority=1) for i in range(3)]
    job = await driver.submit(
        step("r", namespace="inventory", priority=1), step("a"), *away, step("b", "a"), step("c", "b"), worker_count=1
    )
    await driver.run(until=lambda: "b" in driver.ran)
    assert driver.ran == ["a", "b"], "what is paused is passed over"
    (c,) = await driver.claim()
    await resume_namespace(database, "inventory", "ada")
    await driver.advance()
    assert await driver.claim() == [], "there is no room yet"
    await driver.settle(c)
    most = 0
    while (await driver.job(job))["status"] == "RUNNING":
        await driver.advance()
        claimed = await driver.claim()
        most = max(most, len(claimed))
        for task in claimed:
            await driver.settle(task)
    assert (most, sorted(driver.ran)) == (1, ["a", "b", "c", "p0", "p1", "p2", "r"])


async def test_a_step_that_a_pause_catches_leaves_its_room_to_others(driver: JobDriver) -> None:
    job = await driver.submit(step("p", namespace="inventory", priority=1), step("b"), worker_count=1)
    assert (await driver.states(job)) == {"p": "pending", "b": "waiting"}
    await pause_namespace(driver.connection, "inventory", None, "ada")
    await driver.run()
    assert driver.ran == ["b"]
    await resume_namespace(driver.connection, "inventory", "ada")
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


async def undoing(driver: JobDriver) -> UUID:
    """Make a job with a worker_count compensate two steps, the first of which waits in a paused namespace."""
    driver.outcomes = {"c": Failed("no")}
    job = await driver.submit(
        step("a", compensate="undo"),
        step("b", "a", namespace="inventory", compensate="undo"),
        step("c", "b"),
        worker_count=1,
    )
    await driver.run(until=lambda: "c" in driver.ran)
    await pause_namespace(driver.connection, "inventory", None, "ada")
    await driver.advance()
    return job


async def test_a_pause_does_not_change_the_order_in_which_a_job_is_undone(driver: JobDriver) -> None:
    job = await undoing(driver)
    steps = await driver.steps(job)
    assert (steps["compensate:b"]["held_by"], steps["compensate:a"]["held_by"]) == ("namespace", "compensation")
    await resume_namespace(driver.connection, "inventory", "ada")
    await driver.run()
    assert driver.ran == ["a", "b", "c", "compensate:b", "compensate:a"]
    assert (await driver.job(job))["status"] == "FAILED"


async def test_a_compensation_that_crosses_with_a_resumption_is_not_left_to_its_job(driver: JobDriver) -> None:
    job = await undoing(driver)
    batch = {"name": "inventory", "batch": 10, "now": None}
    assert await run(driver.connection, LIMITS["move_hold_from_namespace_to_job"], batch) == [], (
        "nobody would let it in there"
    )
    await resume_namespace(driver.connection, "inventory", "ada")
    await driver.run()
    assert (await driver.job(job))["status"] == "FAILED"
