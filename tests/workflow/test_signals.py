"""Signals are a queue per job and name, each consumed once and in order; typed payloads; the inbox."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import step, workflow
from interlock.errors import InputError, RequestReusedError
from interlock.model.graph import GraphError, check_definition
from interlock.postgres.connection import connect, transaction
from interlock.store.signals import InboxFilter, read_inbox, read_signals
from interlock.workflow.cancel import cancel_job
from interlock.workflow.signals import end_due_waits, send_signal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from job_driver import JobDriver

pytestmark = pytest.mark.store

NOW = datetime(2026, 1, 1, tzinfo=UTC)
EUROS = {"type": "object", "properties": {"euros": {"type": "integer"}}, "required": ["euros"]}


async def send(driver: JobDriver, job: UUID, name: str, payload: Any = None, **more: Any) -> bool:
    return await send_signal(driver.connection, job, name, payload, actor="ada", now=driver.now, **more)


async def consumed(driver: JobDriver, job: UUID) -> list[tuple[Any, str | None]]:
    """List the payloads in the order of sending, each with the step that consumed it."""
    return [(row["payload"], row["consumed_by"]) for row in await read_signals(driver.connection, job)]


async def inbox(driver: JobDriver, **wanted: Any) -> list[tuple[str, str, str, str | None]]:
    rows = await read_inbox(driver.connection, InboxFilter(**wanted))
    return [(row["step"], row["kind"], row["signal"], row["assignee"]) for row in rows]


def wait(name: str, *after: str, signal: str = "go", **more: Any) -> dict[str, Any]:
    return step(name, *after, kind="signal", signal=signal, **more)


async def test_steps_one_after_another_consume_signals_in_the_order_of_sending(driver: JobDriver) -> None:
    driver.now = NOW
    job = await driver.submit(step("a"), wait("first", "a"), wait("second", "first"))
    for payload in (1, 2, 3):
        assert await send(driver, job, "go", payload)
    assert await consumed(driver, job) == [(1, None), (2, None), (3, None)], "no step waits yet"
    await driver.run()
    row = await driver.job(job)
    assert (row["status"], row["output"]) == ("COMPLETED", {"second": 2})
    assert await consumed(driver, job) == [(1, "first"), (2, "second"), (3, None)]
    sent = (await read_signals(driver.connection, job))[0]
    assert (sent["sent_by"], sent["sent_at"], sent["consumed_at"], sent["request_id"]) == ("ada", NOW, NOW, None)


@pytest.mark.parametrize("early", [0, 1, 2])
async def test_steps_that_wait_at_once_consume_in_the_order_of_the_definition(driver: JobDriver, early: int) -> None:
    job = await driver.submit(step("a"), wait("z", "a"), wait("b", "a"), step("end", "z", "b"))
    for payload in range(early):
        await send(driver, job, "go", payload)
    await driver.run()
    for payload in range(early, 2):
        assert (await driver.job(job))["status"] == "RUNNING"
        await send(driver, job, "go", payload)
    await driver.run()
    assert await consumed(driver, job) == [(0, "z"), (1, "b")]
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_names_have_queues_of_their_own(driver: JobDriver) -> None:
    job = await driver.submit(wait("a"), wait("b", signal="other"), wait("c", signal="other"))
    await send(driver, job, "other", 1)
    assert await driver.states(job) == {"a": "waiting", "b": "done", "c": "waiting"}
    await send(driver, job, "go", 2)
    await send(driver, job, "other", 3)
    assert (await driver.job(job))["output"] == {"a": 2, "b": 1, "c": 3}


async def test_a_repeated_request_id_stores_one_signal(driver: JobDriver) -> None:
    job = await driver.submit(wait("a"), wait("b", "a"))
    assert await send(driver, job, "go", {"n": 1}, request_id="r")
    assert not await send(driver, job, "go", {"n": 1}, request_id="r")
    with pytest.raises(RequestReusedError, match=r"request id 'r' was used for a signal with another name or payload"):
        await send(driver, job, "go", {"n": 2}, request_id="r")
    assert await consumed(driver, job) == [({"n": 1}, "a")]
    assert await send(driver, job, "go", {"n": 1}, request_id="r2"), "the same payload may be sent again"
    assert (await driver.job(job))["status"] == "COMPLETED"
    assert not await send(driver, job, "go", {"n": 1}, request_id="r"), "also after the end of the job"
    other = await driver.submit(wait("a"), wait("b", "a"))
    assert await send(driver, other, "go", {"n": 2}, request_id="r"), "request ids are those of one job"


async def test_a_signal_for_no_step_or_an_ended_job_is_refused(driver: JobDriver) -> None:
    job = await driver.submit(wait("s", signal="paid"), step("ok", kind="approval"))
    with pytest.raises(InputError, match=r"no step that waits for a signal 'payed'; it waits for ok, paid"):
        await send(driver, job, "payed")
    with pytest.raises(InputError, match=r"the answer to approval 'ok' must be"):
        await send(driver, job, "ok", {"approved": "yes"})
    await cancel_job(driver.connection, job, actor="ada")
    with pytest.raises(InputError, match=r"is CANCELED: a signal cannot reach it any more"):
        await send(driver, job, "paid")
    assert await consumed(driver, job) == []


async def test_a_signal_is_not_for_a_step_that_has_timed_out(driver: JobDriver) -> None:
    driver.now = NOW
    job = await driver.submit(wait("a", timeout=60), step("more", kind="approval"), wait("b", signal="x", timeout=60))
    driver.now = NOW + timedelta(seconds=60)
    assert await end_due_waits(driver.connection, actor="o", now=driver.now) == 2
    with pytest.raises(InputError, match=r"does not wait for signal 'go' any more: its timeout has passed"):
        await send(driver, job, "go")
    assert await consumed(driver, job) == []
    assert (await driver.steps(job))["a"]["error"]["message"] == "no signal 'go' within 60 s"


async def test_a_later_step_consumes_what_an_earlier_one_did_not_wait_for(driver: JobDriver) -> None:
    driver.now = NOW
    job = await driver.submit(wait("a", timeout=60), wait("b", recovers=["a"]))
    driver.now = NOW + timedelta(seconds=60)
    await end_due_waits(driver.connection, actor="o", now=driver.now)
    assert await send(driver, job, "go", 7)
    assert await consumed(driver, job) == [(7, "b")]
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_an_approval_is_answered_once(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("ok", "a", kind="approval"), wait("end"))
    assert await send(driver, job, "ok", {"approved": True, "by": "eve"})
    assert not await send(driver, job, "ok", {"approved": False}), "answered, though the step does not wait yet"
    await driver.run()
    assert not await send(driver, job, "ok", {"approved": False})
    assert (await driver.steps(job))["ok"]["output"]["result"] == {"approved": True, "by": "eve"}
    assert await consumed(driver, job) == [({"approved": True, "by": "eve"}, "ok")]


async def test_a_rejection_is_consumed_and_fails_the_step(driver: JobDriver) -> None:
    job = await driver.submit(step("ok", kind="approval"))
    assert await send(driver, job, "ok", {"approved": False, "by": "eve", "comment": "hm"})
    row = await driver.job(job)
    assert (row["status"], row["reason"]) == ("FAILED", "step ok failed: rejected by eve: hm")
    assert [by for _, by in await consumed(driver, job)] == ["ok"]


async def test_a_signal_sent_in_a_transaction_that_rolls_back_was_never_sent(driver: JobDriver) -> None:
    job = await driver.submit(wait("a"))

    async def send_and_fail() -> None:
        async with transaction(driver.connection):
            assert await send(driver, job, "go", 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await send_and_fail()
    assert await driver.states(job) == {"a": "waiting"}
    assert await consumed(driver, job) == []
    assert await inbox(driver) == [("a", "signal", "go", None)]


# --- Concurrency ------------------------------------------------------------------------------------------------


async def test_signals_of_concurrent_senders_are_each_consumed_once_and_in_order(driver: JobDriver, url: str) -> None:
    steps = [wait(f"s{n}", *([f"s{n - 1}"] if n else [])) for n in range(12)]
    job = await driver.submit(*steps, wait("last", signal="end"))

    async def sender(number: int) -> None:
        async with connect(url) as connection:
            for count in range(4):
                payload = f"{number}.{count}"
                assert await send_signal(connection, job, "go", payload, actor=f"s_{number}")

    await asyncio.gather(*(sender(number) for number in range(4)))
    found = await consumed(driver, job)
    assert [by for _, by in found] == [f"s{n}" for n in range(12)] + [None] * 4
    rows = await driver.steps(job)
    assert [rows[f"s{n}"]["output"]["result"] for n in range(12)] == [payload for payload, _ in found[:12]]


async def test_one_of_several_concurrent_answers_and_repeated_requests_counts(driver: JobDriver, url: str) -> None:
    job = await driver.submit(step("ok", kind="approval"), wait("a"), wait("b"), wait("end", signal="end"))

    async def send_both(number: int) -> tuple[bool, bool]:
        async with connect(url) as connection:
            answer = {"approved": True, "by": str(number)}
            answered = await send_signal(connection, job, "ok", answer, actor="ada")
            return answered, await send_signal(connection, job, "go", 1, actor="ada", request_id="r")

    outcomes = await asyncio.gather(*(send_both(number) for number in range(4)))
    assert [sum(given) for given in zip(*outcomes, strict=True)] == [1, 1]
    assert await driver.states(job) == {"ok": "done", "a": "done", "b": "waiting", "end": "waiting"}


async def test_a_wait_ends_by_the_signal_or_by_the_timeout(driver: JobDriver, url: str) -> None:
    ends: set[str] = set()
    async with connect(url) as sending, connect(url) as timing:
        for round_ in range(20):
            job = await driver.submit(wait("a", timeout=0.001), step("x", kind="approval"), step("after", always=["a"]))
            started = asyncio.Event()

            async def signal(job: UUID = job, started: asyncio.Event = started) -> bool:
                await started.wait()
                try:
                    return await send_signal(sending, job, "go", 1, actor="ada")
                except InputError:  # its timeout has passed
                    return False

            async def expire(started: asyncio.Event = started) -> None:
                await started.wait()
                await end_due_waits(timing, actor="o")

            both = [
                asyncio.create_task(work) for work in ((signal(), expire()) if round_ % 2 else (expire(), signal()))
            ]
            started.set()
            results = await asyncio.gather(*both)
            # a timeout that gave way to the lock of the sender is met by the next look
            await end_due_waits(timing, actor="o")
            state = (await driver.steps(job))["a"]["state"]
            events = await (
                await driver.connection.execute(
                    "select audit_logs.event from interlock.audit_logs join interlock.tasks on tasks.id = task_id "
                    "where job_id = %s and step = 'a' and audit_logs.event <> 'create'",
                    [job],
                )
            ).fetchall()
            assert [row["event"] for row in events] == ["succeed" if state == "done" else "fail"]
            assert (True in results) == (state == "done")
            assert await consumed(driver, job) == ([(1, "a")] if state == "done" else [])
            ends.add(state)
    assert ends <= {"done", "error"}


@pytest.mark.parametrize("seed", range(12))
async def test_random_orders_keep_the_queue(driver: JobDriver, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - a test's random order
    steps: list[dict[str, Any]] = []
    for number in range(chance.randint(3, 9)):
        after = chance.sample([each["name"] for each in steps], min(len(steps), chance.randint(0, 2)))
        name = chance.choice(["go", "stop"])
        steps.append(step(f"s{number}", *after) if chance.random() < 0.3 else wait(f"s{number}", *after, signal=name))
    chance.shuffle(steps)
    job = await driver.submit(*steps, wait("end", signal="end"))
    names = [each["signal"] for each in steps if "signal" in each] * 2
    chance.shuffle(names)
    for number, name in enumerate(names):
        if chance.random() < 0.4:
            await driver.run()
        assert await send(driver, job, name, number)
    await driver.run()
    assert await driver.states(job) == {**{each["name"]: "done" for each in steps}, "end": "waiting"}
    rows = await driver.steps(job)
    for name in ("go", "stop"):
        sent = [row for row in await read_signals(driver.connection, job) if row["name"] == name]
        takers = [each["name"] for each in steps if each.get("signal") == name]
        assert {row["consumed_by"] for row in sent[: len(takers)]} == set(takers), "the oldest ones, one for each"
        assert {row["consumed_by"] for row in sent[len(takers) :]} <= {None}
        times = [row["consumed_at"] for row in sent[: len(takers)]]
        assert times == sorted(times)
        assert all(rows[row["consumed_by"]]["output"]["result"] == row["payload"] for row in sent[: len(takers)])


# --- Payloads ---------------------------------------------------------------------------------------------------


async def test_a_payload_that_does_not_fit_is_refused_and_not_stored(driver: JobDriver) -> None:
    job = await driver.submit(wait("a", payload_schema=EUROS))
    for payload, place in (({"euros": "7"}, r"payload\.euros: must be of type integer"), (None, "payload: must be")):
        with pytest.raises(InputError, match=rf"job {job}: signal 'go': {place}"):
            await send(driver, job, "go", payload)
    assert await consumed(driver, job) == []
    assert await driver.states(job) == {"a": "waiting"}
    assert await send(driver, job, "go", {"euros": 7})
    assert (await driver.job(job))["output"] == {"a": {"euros": 7}}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([wait("a", payload_schema=EUROS), wait("b")], "step 'b': payload_schema: step 'a' waits for the same signal"),
        ([wait("a", signal="ok"), step("ok", kind="approval")], "step 'a': signal: 'ok' is the name of the approval"),
        ([step("ok", kind="approval"), wait("a", signal="ok")], "step 'a': signal: 'ok' is the name of the approval"),
        ([wait("a", payload_schema={"type": "x"})], "step 'a': payload_schema: it is no JSON Schema"),
        ([wait("a", assignee="")], "step 'a': assignee: .*non-empty string"),
        ([wait("a", assignee="input..x")], "step 'a': assignee: .*must be a name or a path"),
        ([step("a", assignee="ops")], "step 'a': assignee: a step of kind plain has no such field"),
        ([step("a", kind="approval", payload_schema={})], "payload_schema: a step of kind approval has no such field"),
    ],
)
def test_a_contradictory_definition_is_refused(steps: Sequence[dict[str, Any]], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        check_definition(workflow(*steps))


# --- The inbox --------------------------------------------------------------------------------------------------


async def test_the_inbox_lists_what_waits_for_whom_since_when_and_until_when(driver: JobDriver) -> None:
    driver.now = NOW
    job = await driver.submit(
        step("ok", kind="approval", assignee="ops", timeout=3600),
        step("a"),
        wait("paid", "a", assignee="input.order.manager"),
        wait("plain", signal="x"),
        input={"order": {"manager": "eva"}},
    )
    assert await inbox(driver) == [("ok", "approval", "ok", "ops"), ("plain", "signal", "x", None)]
    driver.now = NOW + timedelta(seconds=5)
    await driver.run()
    rows = await read_inbox(driver.connection, InboxFilter())
    assert [row["step"] for row in rows] == ["ok", "plain", "paid"], "the longest wait first"
    assert [row["wait_started_at"] for row in rows] == [NOW, NOW, driver.now]
    assert [row["wait_until"] for row in rows] == [NOW + timedelta(hours=1), None, None]
    assert {(row["job_id"], row["workflow"], row["version"], row["namespace"]) for row in rows} == {
        (job, "w", "1", "default")
    }
    steps = await driver.steps(job)
    reasons = [steps[name]["reason"] for name in ("ok", "plain", "paid")]
    assert reasons == ["waits for approval by ops", "waits for signal 'x'", "waits for signal 'go' from eva"]
    assert await inbox(driver, assignee="eva") == [("paid", "signal", "go", "eva")]
    assert await inbox(driver, kind="approval") == [("ok", "approval", "ok", "ops")]
    assert await inbox(driver, workflow="other") == []
    await send(driver, job, "go", 1)
    await send(driver, job, "ok", {"approved": True})
    assert await inbox(driver) == [("plain", "signal", "x", None)]
    await cancel_job(driver.connection, job, actor="ada", now=driver.now)
    assert await inbox(driver) == []


async def test_the_inbox_is_read_in_pages(driver: JobDriver) -> None:
    for number in range(3):
        driver.now = NOW + timedelta(seconds=number // 2)
        await driver.submit(wait("a"), wait("b"))
    seen: list[UUID] = []
    after = None
    while page := await read_inbox(driver.connection, InboxFilter(), after=after, limit=2):
        seen += [row["id"] for row in page]
        after = (page[-1]["wait_started_at"], page[-1]["id"])
    assert seen == [row["id"] for row in await read_inbox(driver.connection, InboxFilter())]
    assert len(seen) == 6


async def test_an_assignee_of_the_input_may_be_missing_but_must_be_a_name(driver: JobDriver) -> None:
    steps = step("ok", kind="approval", assignee="input.boss")
    for given in ({}, {"boss": None}):
        await driver.submit(steps, input=given)
    assert await inbox(driver) == [("ok", "approval", "ok", None)] * 2
    job = await driver.submit(steps, input={"boss": ["eva"]})
    row = await driver.job(job)
    assert row["status"] == "FAILED"
    assert "assignee: input.boss must be a non-empty string" in row["reason"]
