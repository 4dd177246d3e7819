"""The SQL fast path `advance_plain_steps`: it advances plain batches like the full rules, and changes no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from factories import step
from interlock.postgres.query import run
from interlock.store.jobs import ORCHESTRATION, read_job_history
from interlock.store.limits import pause_namespace
from interlock.store.step_results import read_orchestration_failures
from interlock.store.tasks import read_task_history
from interlock.workflow.advance import Advanced
from interlock.workflow.cancel import cancel_job
from job_driver import Failed, JobDriver

if TYPE_CHECKING:
    from uuid import UUID


pytestmark = pytest.mark.store

SHAPES = {
    "chain": [step("a"), step("b", "a"), step("c", "b")],
    "diamond": [step("a"), step("b", "a"), step("c", "a"), step("d", "b", "c"), step("e", "d", "a")],
    "joins": [step("a"), step("b"), step("c"), step("two", "a", "b"), step("three", "a", "b", "c", join="all")],
    "alone": [step("a")],
}


async def advance_plain(driver: JobDriver) -> tuple[int | None, int | None, int | None]:
    """Run the fast path on a batch; return its counts: received, released, finalized."""
    parameters = {"actor": "o_1", "limit": 100, "msg_id": None, "lock_timeout": "500ms", "now": driver.now}
    (row,) = await run(driver.connection, ORCHESTRATION["advance_plain_steps"], parameters)
    return row["received"], row["released"], row["finalized"]


async def send(driver: JobDriver, content: str) -> None:
    """Send a message to the queue."""
    await driver.connection.execute("select pgmq.send('orchestration_step_results', %s::jsonb)", [content])


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
                    found[column]
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


async def everything(driver: JobDriver) -> list[Any]:
    """Read everything that a batch can change, messages included."""
    queries = ("interlock.tasks", "interlock.jobs", "pgmq.q_orchestration_step_results")
    return [
        await (await driver.connection.execute(f"select * from {q} order by 1".encode())).fetchall() for q in queries
    ]


@pytest.mark.parametrize(
    ("steps", "outcomes", "more"),
    [
        pytest.param([step("a"), step("b", "a")], {"a": Failed("no")}, {}, id="failure"),
        pytest.param([step("a", kind="decision", branches=["b"]), step("b", "a")], {"a": "b"}, {}, id="choice"),
        pytest.param([step("a"), step("b", on_failure=["a"])], {}, {}, id="on_failure"),
        pytest.param([step("a"), step("b", always=["a"])], {}, {}, id="always"),
        pytest.param([step("a"), step("b", recovers=["a"]), step("c", "a")], {}, {}, id="recovers"),
        pytest.param([step("a"), step("b", "a", join="any")], {}, {}, id="partial join"),
        pytest.param([step("a"), step("b", "a", when="input.x == 1")], {}, {}, id="condition"),
        pytest.param([step("a"), step("b", "a", kind="sleep", seconds=60)], {}, {}, id="sleep"),
        pytest.param([step("a"), step("b", "a")], {}, {"worker_count": 1}, id="worker_count"),
    ],
)
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
