"""What a worker is handed with a step: never more than it needs, and never so much that nothing can be claimed."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from interlock import Interlock
from interlock.client.step_context import bind, gather
from interlock.errors import PermanentError
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.query import run
from interlock.store.jobs import STEPS
from interlock.store.limits import LIMITS, pause_namespace, resume_namespace
from interlock.store.task_admin import recover_expired_tasks
from interlock.store.tasks import Outcome, read_task_history, settle_running_tasks
from interlock.store.workflows import put_workflow
from interlock.worker.attempt import TaskStateMachine
from interlock.worker.cancellation import cancel_tasks
from interlock.worker.settler import Settler
from interlock.workflow.cancel import cancel_job
from worker_support import until
from workflow_support import PASS, Failed, Hand, name_of, serve, step, workflow

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask

pytestmark = pytest.mark.store

# three of them are more than a JSON document of the database can hold; to copy one is faster than to make it
DONE = (
    "update interlock.tasks set state = 'done', event = 'succeed', lease_expires_at = null, finished_at = now(), output"
)
LARGE = f"{DONE} = jsonb_build_object('result', repeat('x', 95000000)) where id = %s"
AS_LARGE = f"{DONE} = (select output from interlock.tasks where id = %s) where id = any (%s)"


@pytest.fixture
async def hand(database: Connection) -> Hand:
    """Give a hand on a database with a live worker."""
    await serve(database)
    return Hand(database)


def job_of(claimed: ClaimedTask) -> dict[str, Any]:
    found: dict[str, Any] = claimed.own("job")
    return found


async def end_with_too_much(hand: Hand, parts: list[ClaimedTask]) -> None:
    """Have every part of a map done with results that are too large together."""
    first, *others = [part.id for part in parts]
    assert len(others) == 2
    await hand.connection.execute(LARGE.encode(), [first])
    await hand.connection.execute(AS_LARGE.encode(), [first, others])


async def end_parts_with_too_much(hand: Hand) -> None:
    """The same, and the map itself is done."""
    await end_with_too_much(hand, await hand.claim())
    assert (await hand.advance()).released == 1
    (map_,) = await hand.claim()
    assert map_.type == PASS
    await hand.settle(map_)
    await hand.advance()


async def compared(hand: Hand) -> dict[str, set[str]]:
    """Run a job by hand and hold what each step is handed against what the function says; give what has results."""
    seen: dict[str, set[str]] = {}
    while claimed := await hand.claim():
        for each in claimed:
            row = await (
                await hand.connection.execute(
                    "select interlock.step_inputs(tasks) as document from interlock.tasks where id = %s", [each.id]
                )
            ).fetchone()
            assert row is not None
            document = job_of(each)
            assert {key: row["document"][key] for key in document} == document
            assert not any(row["document"][key] for key in row["document"].keys() - document.keys() - {"wait"})
            seen[name_of(each)] = set(document["results"])
            await hand.settle(each)
        await hand.advance()
    return seen


@pytest.mark.parametrize("size", [10, 20_000])
@pytest.mark.parametrize("over", ["over", "over_input"])
async def test_so_it_does_for_the_parts_of_a_map(hand: Hand, size: int, over: str) -> None:
    text = random.Random(1).randbytes(size).hex()  # noqa: S311 - it must only be hard to compress
    hand.outcomes = {"items": [1, 2], "a": text}
    await hand.submit(
        step("items"),
        step("a"),
        step("m", "items", "a", kind="map", **{over: "items"}),
        step("last", "m"),
        input={"items": [text, 5], "name": text},
    )
    seen = await compared(hand)
    handed = {"a"} if over == "over" else {"a", "items"}
    assert seen["m[0]"] == seen["m[1]"] == handed
    assert seen["last"] == {"m"}


@pytest.mark.parametrize("size", [10, 20_000])
async def test_a_claim_gathers_what_the_function_for_all_kinds_would(hand: Hand, size: int) -> None:
    text = random.Random(1).randbytes(size).hex()  # noqa: S311 - it must only be hard to compress
    hand.outcomes = {"a": {"text": text}, "b": 2, "d": "left"}
    await hand.submit(
        step("a"),
        step("b", "a", config={"mode": "fast"}),
        step("d", "b", kind="decision", branches=["left", "right"]),
        step("left", "d"),
        step("right", "d"),
        step("last", "a", "left", "right", join="any"),
        input={"name": "x", "list": [text]},
    )
    seen = await compared(hand)
    assert seen == {"a": set(), "b": {"a"}, "d": {"b"}, "left": {"d"}, "last": {"a", "left"}}


async def settled(hand: Hand, claimed: ClaimedTask, error: PermanentError) -> None:
    document = {"type": "PermanentError", "message": str(error), "traceback": None, "retryable": False}
    outcome = Outcome(claimed.id, claimed.attempt, TaskRowEvent.FAIL, error=document, reason=str(error))
    await settle_running_tasks(hand.connection, [outcome], actor="w_1")


async def test_a_step_whose_results_are_too_large_fails_and_holds_up_no_other(hand: Hand) -> None:
    job = await hand.submit(
        step("m", kind="map", over_input="items"),
        step("z", "m"),
        step("mm", "m", kind="map", over="m"),
        input={"items": [1, 2, 3]},
    )
    await end_parts_with_too_much(hand)
    await hand.connection.execute("select interlock.enqueue('other')")
    claimed = {task.type: task for task in await hand.claim()}
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
    await settled(hand, claimed["z"], refused.value)
    await hand.advance()
    row = await hand.job(job)
    assert (row["status"], row["error"]["steps"].keys()) == ("FAILED", {"z", "mm"})
    query = f"select * from ({STEPS['read_steps'].sql}) as steps where step = 'm'"
    (map_,) = await (await hand.connection.execute(query.encode(), {"job_id": job})).fetchall()
    assert (map_["state"], map_["output"]["result"]) == ("done", None), "it can still be looked at"


async def test_a_job_whose_output_is_too_large_fails_after_its_compensations(hand: Hand) -> None:
    job = await hand.submit(
        step("a", compensate="undo"), step("m", "a", kind="map", over_input="items"), input={"items": [1, 2, 3]}
    )
    fine = await hand.submit(step("b"), name="fine")
    await hand.settle(next(task for task in await hand.claim(1) if name_of(task) == "a"))
    await hand.advance()
    b, *parts = await hand.claim()
    assert name_of(b) == "b"
    await end_with_too_much(hand, parts)
    await hand.settle(b)
    await hand.run()
    assert (await hand.job(fine))["status"] == "COMPLETED"
    row = await hand.job(job)
    assert (row["status"], hand.ran[-1]) == ("FAILED", "compensate:a")
    assert row["reason"].startswith("the output of the job is too large")
    assert row["error"]["message"] == row["reason"]
    assert row["output"] is None


async def handed(hand: Hand, items: int) -> tuple[UUID, list[ClaimedTask]]:
    given = {"items": [f"item number {i}" for i in range(items)], "order": 7}
    job = await hand.submit(step("m", kind="map", over_input="items"), name=f"w{items}", input=given)
    return job, (await hand.claim(30))[:10]  # a third of them for each namespace


async def test_a_part_is_handed_its_item_and_the_rest_of_the_input_but_not_the_list(hand: Hand) -> None:
    sizes = []
    for items in (10, 1000):
        _, parts = await handed(hand, items)
        assert [job_of(part)["job_input"] for part in parts] == [{"order": 7}] * 10
        assert parts[3].input == {"item": "item number 3", "index": 3}
        sizes.append(max(len(orjson.dumps(part.extras)) for part in parts))
        for part in parts:
            await hand.settle(part)
        await hand.connection.execute(
            "update interlock.tasks set state = 'canceled', event = 'cancel', held_by = null where state = 'pending'"
        )
    assert sizes[1] < sizes[0] + 100


async def test_the_steps_after_a_map_are_handed_the_whole_input(hand: Hand) -> None:
    await hand.submit(
        step("m", kind="map", over_input="items"), step("z", "m"), input={"items": [1], "order": 7}, name="whole"
    )
    await hand.run(until=lambda: "m" in hand.ran)
    (last,) = await hand.claim()
    assert (name_of(last), job_of(last)["job_input"]) == ("z", {"items": [1], "order": 7})


async def test_recovery_cancels_what_somebody_wants_canceled_whatever_tries_are_left(hand: Hand) -> None:
    job = await hand.submit(step("a"), step("b"))
    lost, _ = sorted(await hand.claim(), key=name_of)
    assert await cancel_job(hand.connection, job, actor="ada", reason="not wanted")
    later = datetime.now(UTC) + timedelta(hours=1)
    found = await recover_expired_tasks(hand.connection, actor="w_2", now=later)
    assert sorted(task.event for task in found) == ["cancel", "cancel"]
    assert await recover_expired_tasks(hand.connection, actor="w_2", now=later) == []
    await hand.advance()
    assert (await hand.job(job))["status"] == "CANCELED", "although nobody is there who could run its steps"
    last = (await read_task_history(hand.connection, lost.id))[-1]
    assert (last.event, last.actor, last.reason) == ("cancel", "w_2", "the job was canceled: not wanted")


async def test_a_step_whose_worker_died_on_the_last_try_has_a_document(hand: Hand) -> None:
    job = await hand.submit(step("a", max_tries=1))
    (task,) = await hand.claim()
    (found,) = await recover_expired_tasks(hand.connection, actor="w_2", now=datetime.now(UTC) + timedelta(hours=1))
    assert found.event == "exhaust"
    row = (await hand.steps(job))["a"]
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
    assert (metadata["worker_id"], metadata["attempt"], metadata["retryable"]) == ("w_1", task.attempt, True)
    assert datetime.fromisoformat(metadata["started_at"]) < datetime.fromisoformat(metadata["completed_at"])


async def test_a_sleep_takes_up_no_room_of_its_job(hand: Hand) -> None:
    job = await hand.submit(
        step("s", kind="sleep", seconds=86400, priority=9), step("a"), step("b", "a"), step("z", "s"), worker_count=1
    )
    await hand.run()
    assert hand.ran == ["a", "b"]
    assert await hand.states(job) == {"s": "pending", "a": "done", "b": "done", "z": "waiting"}
    hand.now = datetime.now(UTC) + timedelta(days=2)
    await hand.run()
    assert (await hand.job(job))["status"] == "COMPLETED"


async def test_a_child_whose_input_its_schema_does_not_allow_is_not_started(hand: Hand) -> None:
    schema = {"type": "object", "required": ["order"], "properties": {"order": {"type": "integer"}}}
    await put_workflow(hand.connection, workflow(step("x"), name="kid", input_schema=schema))
    wrong = await hand.submit(
        step("a"), step("c", "a", kind="child", workflow="kid", input={"order": "a"}), name="wrong"
    )
    fine = await hand.submit(step("c", kind="child", workflow="kid"), name="fine", input={"order": 7})
    hand.outcomes = {"a": "seven"}
    await hand.run()
    assert (await hand.job(fine))["status"] == "COMPLETED"
    row = await hand.job(wrong)
    assert row["status"] == "FAILED"
    assert row["error"]["steps"]["c"]["message"] == "workflow kid: input.order: must be of type integer"
    assert "seven" not in row["reason"]


async def test_a_step_whose_outcome_the_database_refuses_has_a_document(hand: Hand) -> None:
    job = await hand.submit(step("a"))
    (claimed,) = await hand.claim()

    @Interlock("postgresql://nowhere").task
    def handler() -> None: ...

    answers: list[bool] = []

    class Owner:
        def finish(self, _: TaskStateMachine, *, written: bool) -> None:
            answers.append(written)

    settler = Settler(Owner(), "w_1", max_batch=100)
    attempt = TaskStateMachine.of_claim(claimed, "w_1", handler, lease_until=0.0)
    attempt.outcome = Outcome(claimed.id, claimed.attempt, TaskRowEvent.SUCCEED, {"result": "\0"})
    settler.add(attempt)
    running = asyncio.create_task(settler.run(hand.connection))
    await until(lambda: answers == [True])
    await cancel_tasks(running)
    row = (await hand.steps(job))["a"]
    assert row["state"] == "error"
    assert row["error"]["message"].startswith("the outcome could not be stored")
    document = row["output"]
    assert (document["step"], document["success"], document["status"]) == ("a", False, "failed")
    assert (document["error"], document["metadata"]["attempt"]) == (row["error"], claimed.attempt)


async def test_a_paused_namespace_takes_up_no_room_of_a_job_and_its_resumption_does_not_go_beyond_it(
    hand: Hand,
) -> None:
    database = hand.connection
    await pause_namespace(database, "inventory", None, "ada")
    away = [step(f"p{i}", "a", namespace="inventory", priority=1) for i in range(3)]
    job = await hand.submit(
        step("r", namespace="inventory", priority=1), step("a"), *away, step("b", "a"), step("c", "b"), worker_count=1
    )
    await hand.run(until=lambda: "b" in hand.ran)
    assert hand.ran == ["a", "b"], "what is paused is passed over"
    (c,) = await hand.claim()
    await resume_namespace(database, "inventory", "ada")
    await hand.advance()
    assert await hand.claim() == [], "there is no room yet"
    await hand.settle(c)
    most = 0
    while (await hand.job(job))["status"] == "RUNNING":
        await hand.advance()
        claimed = await hand.claim()
        most = max(most, len(claimed))
        for task in claimed:
            await hand.settle(task)
    assert (most, sorted(hand.ran)) == (1, ["a", "b", "c", "p0", "p1", "p2", "r"])


async def test_a_step_that_a_pause_catches_leaves_its_room_to_others(hand: Hand) -> None:
    job = await hand.submit(step("p", namespace="inventory", priority=1), step("b"), worker_count=1)
    assert (await hand.states(job)) == {"p": "pending", "b": "waiting"}
    await pause_namespace(hand.connection, "inventory", None, "ada")
    await hand.run()
    assert hand.ran == ["b"]
    await resume_namespace(hand.connection, "inventory", "ada")
    await hand.run()
    assert (await hand.job(job))["status"] == "COMPLETED"


async def undoing(hand: Hand) -> UUID:
    """Have a job with a worker_count undo two steps, of which the first waits in a paused namespace."""
    hand.outcomes = {"c": Failed("no")}
    job = await hand.submit(
        step("a", compensate="undo"),
        step("b", "a", namespace="inventory", compensate="undo"),
        step("c", "b"),
        worker_count=1,
    )
    await hand.run(until=lambda: "c" in hand.ran)
    await pause_namespace(hand.connection, "inventory", None, "ada")
    await hand.advance()
    return job


async def test_a_pause_does_not_change_the_order_in_which_a_job_is_undone(hand: Hand) -> None:
    job = await undoing(hand)
    steps = await hand.steps(job)
    assert (steps["compensate:b"]["held_by"], steps["compensate:a"]["held_by"]) == ("namespace", "compensation")
    await resume_namespace(hand.connection, "inventory", "ada")
    await hand.run()
    assert hand.ran == ["a", "b", "c", "compensate:b", "compensate:a"]
    assert (await hand.job(job))["status"] == "FAILED"


async def test_a_compensation_that_crosses_with_a_resumption_is_not_left_to_its_job(hand: Hand) -> None:
    job = await undoing(hand)
    batch = {"name": "inventory", "batch": 10, "now": None}
    assert await run(hand.connection, LIMITS["move_hold_from_namespace_to_job"], batch) == [], (
        "nobody would let it in there"
    )
    await resume_namespace(hand.connection, "inventory", "ada")
    await hand.run()
    assert (await hand.job(job))["status"] == "FAILED"
