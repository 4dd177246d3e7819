"""The SQL fast path `advance_plain_steps`: it advances plain batches like the full rules, and changes no others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from factories import step
from interlock.postgres.connection import connect, transaction
from interlock.postgres.notifier import ORCHESTRATION_CHANNEL, listen, receive
from interlock.postgres.query import run
from interlock.store.jobs import ORCHESTRATION, read_job_history
from interlock.store.limits import pause_namespace
from interlock.store.step_results import read_orchestration_failures, read_queue_state
from interlock.store.tasks import read_task_history
from interlock.workflow.advance import Advanced
from interlock.workflow.cancel import cancel_job
from job_driver import Failed, JobDriver

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")
SHAPES = {
    "chain": [step("a"), step("b", "a"), step("c", "b")],
    "diamond": [step("a"), step("b", "a"), step("c", "a"), step("d", "b", "c"), step("e", "d", "a")],
    "joins": [step("a"), step("b"), step("c"), step("two", "a", "b"), step("three", "a", "b", "c", join="all")],
    "alone": [step("a")],
}
FOR_FULL_RULES = [
    pytest.param([step("a"), step("b", "a")], {"a": Failed("no")}, {}, id="failure"),
    pytest.param([step("a", kind="decision", branches=["b"]), step("b", "a")], {"a": "b"}, {}, id="choice"),
    pytest.param([step("a"), step("b", on_failure=["a"])], {}, {}, id="on_failure"),
    pytest.param([step("a"), step("b", always=["a"])], {}, {}, id="always"),
    pytest.param([step("a"), step("b", recovers=["a"]), step("c", "a")], {}, {}, id="recovers"),
    pytest.param([step("a"), step("b", "a", join="any")], {}, {}, id="partial join"),
    pytest.param([step("a"), step("b", "a", when="input.x == 1")], {}, {}, id="condition"),
    pytest.param([step("a"), step("b", "a", kind="sleep", seconds=60)], {}, {}, id="sleep"),
    pytest.param([step("a"), step("b", "a")], {}, {"worker_count": 1}, id="worker_count"),
]


async def advance_plain(driver: JobDriver) -> tuple[int | None, int | None, int | None]:
    """Run the fast path on a batch; return its counts: received, released, finalized."""
    parameters = {"actor": "o_1", "limit": 100, "msg_id": None, "lock_timeout": "500ms", "now": driver.now}
    (row,) = await run(driver.connection, ORCHESTRATION["advance_plain_steps"], parameters)
    return row["received"], row["released"], row["finalized"]


async def send(driver: JobDriver, content: str) -> None:
    """Send a message to the queue."""
    await driver.connection.execute("select pgmq.send('orchestration_step_results', %s::jsonb)", [content])


async def settle_and_advance(driver: JobDriver) -> bool:
    """Claim one step, and settle it as a worker does that holds nothing else; False when none is pending."""
    claimed = await driver.claim(limit=1)
    for task in claimed:
        await driver.settle(task, advance=True)
    return bool(claimed)


async def settle_all(driver: JobDriver) -> int:
    """Claim and settle all pending steps; return how many."""
    claimed = await driver.claim()
    for task in claimed:
        await driver.settle(task)
    return len(claimed)


async def story(driver: JobDriver, job: UUID) -> dict[str, Any]:
    """Describe a job and its history, without ids and times."""
    row = await driver.job(job)
    steps = await driver.steps(job)
    return {
        "job": [row[name] for name in ("status", "event", "reason", "output", "error", "open_steps")],
        "moves": [(move["event"], move["to_state"]) for move in await read_job_history(driver.connection, job)],
        "steps": {
            name: (
                [
                    TIME.sub("(time)", value) if isinstance(value := found[column], str) else value
                    for column in ("state", "event", "reason", "held_by", "unresolved", "skipped_by_failure")
                ],
                [
                    (move.event, move.reason, move.actor)
                    for move in await read_task_history(driver.connection, found["id"])
                ],
            )
            for name, found in steps.items()
        },
    }


async def settle_and_advance_apart(driver: JobDriver) -> bool:
    """Claim and settle one step; an orchestrator advances its job."""
    claimed = await driver.claim(limit=1)
    for task in claimed:
        await driver.settle(task)
        assert (await driver.advance()).received == 1
    return bool(claimed)


def without_actors(told: dict[str, Any]) -> dict[str, Any]:
    """Drop the actors of the moves: the same story, whoever made them."""
    steps = {name: (row, [move[:2] for move in moves]) for name, (row, moves) in told["steps"].items()}
    return {**told, "steps": steps}


async def received_numbers(listener: Connection) -> list[int]:
    """Return the numbers of messages that a listener is notified of; wait for one."""
    numbers: list[int] = []

    def on_notification(_: str, payload: str) -> bool:
        numbers.extend([int(payload)] if payload.isdecimal() else [])
        return bool(numbers)

    await receive(listener, 30, on_notification)
    return numbers


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_fast_path_gives_the_same_result_as_the_full_rules(driver: JobDriver, shape: str) -> None:
    by_database = await driver.submit(*SHAPES[shape], name=shape)
    done = Advanced()
    while settled := await settle_all(driver):
        received, released, finalized = await advance_plain(driver)
        assert received == settled, "all of it, in one statement"
        done = done._replace(released=done.released + (released or 0), finalized=done.finalized + (finalized or 0))
    assert done == Advanced(released=len([s for s in SHAPES[shape] if "after" in s]), finalized=1)
    by_rules = await driver.submit(*SHAPES[shape], name=shape)
    while await settle_all(driver):
        await send(driver, f'{{"job_id": "{by_rules}", "task_id": "{by_rules}"}}')  # something to judge in every batch
        assert (await advance_plain(driver))[0] is None
        await driver.advance()
    assert await story(driver, by_database) == await story(driver, by_rules)


async def test_parts_are_counted_by_the_fast_path_and_the_last_one_ends_the_map(driver: JobDriver) -> None:
    driver.outcomes = {"a": [1, 2, 3]}
    job = await driver.submit(step("a"), step("m", "a", kind="map", over="a"), step("z", "m"))
    await settle_all(driver)
    assert (await advance_plain(driver))[0] is None, "to open a map takes more"
    await driver.advance()
    first, *others = await driver.claim()
    await driver.settle(first)
    assert await advance_plain(driver) == (1, 0, 0)
    for task in others:
        await driver.settle(task)
    assert (await advance_plain(driver))[0] is None, "whether enough parts are done is decided by the full rules"
    assert (await driver.advance()).released == 1
    assert (await driver.states(job))["m"] == "done"
    await settle_all(driver)
    assert await advance_plain(driver) == (1, 0, 1)
    assert (await driver.job(job))["output"] == {"z": None}


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_settle_that_advances_its_job_gives_the_same_result_as_an_orchestrator(
    driver: JobDriver, shape: str
) -> None:
    by_worker = await driver.submit(*SHAPES[shape], name=shape)
    while await settle_and_advance(driver):
        assert (await read_queue_state(driver.connection))["waiting"] == 0, "the message was taken where it was sent"
    assert await driver.advance() == Advanced()
    by_orchestrator = await driver.submit(*SHAPES[shape], name=shape)
    while await settle_and_advance_apart(driver):
        pass
    told, expected = await story(driver, by_worker), await story(driver, by_orchestrator)
    assert without_actors(told) == without_actors(expected)
    assert told["job"][0] == "COMPLETED"
    released = {actor for _, moves in told["steps"].values() for event, _, actor in moves if event == "release"}
    assert released <= {"w_1"}, "the records name the worker that advanced the job"


@pytest.mark.parametrize(("steps", "outcomes", "more"), FOR_FULL_RULES)
async def test_a_settle_leaves_a_job_for_full_rules_to_the_orchestrator(
    driver: JobDriver, url: str, steps: Any, outcomes: Any, more: Any
) -> None:
    driver.outcomes = outcomes
    job = await driver.submit(*steps, **more)
    async with connect(url) as listener:
        await listen(listener, [ORCHESTRATION_CHANNEL])
        assert await settle_and_advance(driver)
        assert await received_numbers(listener), "an orchestrator is notified of the message"
    await driver.run()
    by_worker = await story(driver, job)
    job = await driver.submit(*steps, **more)
    await driver.run()
    assert without_actors(by_worker) == without_actors(await story(driver, job))


async def test_a_locked_job_or_an_error_does_not_keep_a_settle_from_being_written(driver: JobDriver, url: str) -> None:
    job = await driver.submit(step("a"), step("b", "a"), step("c", "b"))
    async with connect(url) as other, transaction(other):
        await other.execute("select from interlock.jobs for update")
        assert await settle_and_advance(driver)
        assert (await driver.states(job))["a"] == "done"
    assert (await driver.advance()).released == 1
    await driver.connection.execute("alter table interlock.jobs add constraint few check (open_steps > 1) not valid")
    assert await settle_and_advance(driver)
    assert await driver.states(job) == {"a": "done", "b": "done", "c": "waiting"}
    await driver.connection.execute("alter table interlock.jobs drop constraint few")
    assert (await driver.advance()).released == 1


async def test_a_settle_that_advances_its_job_is_committed_durably_and_waits_for_locks_as_long_as_any(
    driver: JobDriver,
) -> None:
    """The commit of a notification waits for those of others, which takes more than a millisecond now and then."""
    await driver.submit(step("a"), step("b", "a"))
    await driver.connection.execute("set synchronous_commit = on; set lock_timeout = '7s'")
    async with transaction(driver.connection):
        assert await settle_and_advance(driver)
        assert (await read_queue_state(driver.connection))["waiting"] == 0
        for name, value in (("synchronous_commit", "on"), ("lock_timeout", "7s")):
            (row,) = await (await driver.connection.execute(f"show {name}".encode())).fetchall()
            assert row[name] == value


async def everything(driver: JobDriver) -> list[Any]:
    """Read everything that a batch can change, messages included."""
    queries = ("interlock.tasks", "interlock.jobs", "pgmq.q_orchestration_step_results")
    return [
        await (await driver.connection.execute(f"select * from {q} order by 1".encode())).fetchall() for q in queries
    ]


@pytest.mark.parametrize(("steps", "outcomes", "more"), FOR_FULL_RULES)
async def test_a_batch_for_full_rules_is_not_changed(driver: JobDriver, steps: Any, outcomes: Any, more: Any) -> None:
    driver.outcomes = outcomes
    plain = await driver.submit(step("p"), step("q", "p"), name="plain")
    judged = await driver.submit(*steps, name="judged", **more)
    assert await settle_all(driver) == 2
    before = await everything(driver)
    assert await advance_plain(driver) == (None, None, None)
    assert await everything(driver) == before, "the other job of the batch waits with it"
    assert (await driver.advance()).received == 2
    assert (await driver.states(plain))["q"] == "pending"
    assert (await driver.states(judged))["a"] in {"done", "error"}


async def test_a_paused_namespace_a_cancellation_and_a_child_need_the_full_rules(driver: JobDriver) -> None:
    await driver.submit(step("a"), step("b", "a", namespace="inventory"), name="paused")
    await settle_all(driver)
    await pause_namespace(driver.connection, "inventory", "stocktaking", actor="ada")
    assert (await advance_plain(driver))[0] is None
    await driver.advance()
    ending = await driver.submit(step("a"), step("b"), name="ending")
    first, second = await driver.claim()
    await driver.settle(first)
    await cancel_job(driver.connection, ending, actor="ada")
    assert (await advance_plain(driver))[0] is None
    await driver.write(second)
    await driver.run()
    assert (await driver.job(ending))["status"] == "CANCELED"
    await driver.submit(step("a"), name="small")
    parent = await driver.submit(step("c", kind="child", workflow="small"), name="parent")
    await driver.run()
    assert (await driver.job(parent))["status"] == "COMPLETED", "the end of the child was told to its parent"


@pytest.mark.parametrize(
    "failure", ["-1", "1.5", str(2**63), str(2**200), "1e400", "true", '"7"', "[1]", '{"a": 1}', "null"]
)
async def test_a_forged_failure_number_in_a_message_is_ignored(driver: JobDriver, failure: str) -> None:
    job = await driver.submit(step("a"), step("b", "a"))
    (task,) = await driver.claim()
    await driver.settle(task)
    await driver.connection.execute(
        "update pgmq.q_orchestration_step_results set message = message || jsonb_build_object('failure', %s::jsonb)",
        [failure],
    )
    done = await driver.advance()
    assert (done.received, done.advanced, done.failed) == (1, 1, 0)
    assert (await driver.states(job))["b"] == "pending"
    assert await read_orchestration_failures(driver.connection) == []
