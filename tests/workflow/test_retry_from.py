"""Retries of a job from a step: reused results and steps that run again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from interlock.errors import InputError
from interlock.workflow.advance import start_waiting_jobs
from interlock.workflow.retry_from import retry_job_from
from workflow_support import Failed, Hand, serve, step

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
async def hand(database: Connection) -> Hand:
    """Return a Hand on a database with a live worker."""
    await serve(database)
    return Hand(database)


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


async def test_a_retry_reuses_done_steps_and_runs_the_rest(hand: Hand) -> None:
    hand.outcomes = {"a": 1, "d": "x", "x": [5, 6], "m[0]": 50, "m[1]": 60, "fails": Failed("boom"), "end": "end"}
    old = await hand.submit(*long_way(), input={"i": 1}, worker_count=3)
    await hand.run()
    assert (await hand.job(old))["status"] == "FAILED"
    hand.ran, hand.outcomes = [], {"fails": "mended", "end": "end"}
    retried = await retry_job_from(hand.connection, old, "fails", actor="ada", request_id="again")
    assert retried.created
    again = await retry_job_from(hand.connection, old, "fails", actor="ada", request_id="again")
    assert again == (retried.id, False)
    (task,) = await hand.claim()
    assert (await hand.inputs(task.id))["results"] == {"m": [50, 60]}
    await hand.settle(task)
    await hand.run()
    assert hand.ran == ["fails", "end"]
    steps = await hand.steps(retried.id)
    assert {name for name, found in steps.items() if found["reused"]} == {"a", "d", "x", "m"}
    assert (steps["a"]["state"], steps["a"]["reason"]) == ("skipped", f"result reused from job {old}")
    assert (steps["y"]["state"], steps["y"]["reused"]) == ("skipped", False), "the decision stands"
    row = await hand.job(retried.id)
    assert (row["status"], row["output"], row["input"]) == ("COMPLETED", {"end": "end"}, {"i": 1})
    assert (row["retried_from"], row["worker_count"]) == (old, 3)
    assert (await hand.job(old))["status"] == "FAILED", "the old job stays as it ended"


async def test_a_retry_of_a_retry_and_of_the_first_step(hand: Hand) -> None:
    hand.outcomes = {"a": 1, "b": 2, "c": 3}
    first = await hand.submit(step("a"), step("b", "a"), step("c", "b"))
    await hand.run()
    second = await retry_job_from(hand.connection, first, "b", actor="ada")
    await hand.run()
    hand.ran = []
    third = await retry_job_from(hand.connection, second.id, "c", actor="ada")
    await hand.run()
    assert hand.ran == ["c"]
    fourth = await retry_job_from(hand.connection, third.id, "a", actor="ada")
    await hand.run()
    assert hand.ran == ["c", "a", "b", "c"]
    for job in (second, third, fourth):
        assert (await hand.job(job.id))["output"] == {"c": 3}


async def test_a_retry_runs_compensated_steps_again(hand: Hand) -> None:
    hand.outcomes = {"c": Failed("boom")}
    old = await hand.submit(step("a", compensate="undo"), step("b", "a"), step("free"), step("c", "b", "free"))
    await hand.run()
    hand.ran, hand.outcomes = [], {}
    retried = await retry_job_from(hand.connection, old, "c", actor="ada")
    await hand.run()
    assert hand.ran == ["a", "b", "c"]
    assert (await hand.job(retried.id))["status"] == "COMPLETED"


async def test_an_invalid_retry_is_refused(hand: Hand) -> None:
    job = await hand.submit(step("a"), step("b", "a"))
    with pytest.raises(InputError, match="is RUNNING: it can be retried once it has ended"):
        await retry_job_from(hand.connection, job, "a", actor="ada")
    await hand.run()
    with pytest.raises(InputError, match=r"has no step 'z'; it has a, b"):
        await retry_job_from(hand.connection, job, "z", actor="ada")
    with pytest.raises(InputError, match="there is no job"):
        await retry_job_from(hand.connection, uuid4(), "a", actor="ada")


async def test_a_retry_without_workers_waits_and_reuses_results_at_its_start(hand: Hand) -> None:
    old = await hand.submit(step("a"), step("b", "a"))
    await hand.run()
    await hand.connection.execute("update interlock.workers set seen_until = now()")
    retried = await retry_job_from(hand.connection, old, "b", actor="ada")
    assert (await hand.job(retried.id))["status"] == "PENDING"
    await serve(hand.connection, worker="w_2")
    assert await start_waiting_jobs(hand.connection, actor="o") == 1
    hand.ran = []
    await hand.run()
    assert hand.ran == ["b"]
    assert (await hand.job(retried.id))["status"] == "COMPLETED"


async def test_a_failed_retry_does_not_compensate_reused_steps(hand: Hand) -> None:
    old = await hand.submit(
        step("reserve", compensate="undo"), step("pack", "reserve", compensate="undo"), step("ship", "pack")
    )
    await hand.run()
    assert (await hand.job(old))["status"] == "COMPLETED"
    hand.ran, hand.outcomes = [], {"ship": Failed("no")}
    retried = await retry_job_from(hand.connection, old, "pack", actor="ada")
    await hand.run()
    assert (await hand.job(retried.id))["status"] == "FAILED"
    assert hand.ran == ["pack", "ship", "compensate:pack"], "what it took over belongs to the old job"
