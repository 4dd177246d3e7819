"""A notification that names a message: the orchestrator reads that one, with the semantics of PGMQ's own read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from factories import NAMESPACES, step
from interlock import Interlock, SimpleStepMessage
from interlock.errors import InputError
from interlock.orchestrator import process
from interlock.postgres.connection import connect
from interlock.service import wait_for_event
from interlock.store.remote_commands import Refresh
from interlock.workflow.advance import Advanced, advance
from job_driver import Failed, JobDriver
from jobs_support import manual_worker_at, orchestrator_at, register_idle_worker
from notifier_support import notifier_at, record
from worker_support import until

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

QUEUE = "orchestration_step_results"
NO_POLLING = {"tick": 60.0, "events_tick": 60.0}


async def send(database: Connection, message: str = "{}") -> int:
    rows = await (await database.execute("select pgmq.send(%s, %s::jsonb) as id", [QUEUE, message])).fetchall()
    return int(rows[0]["id"])


async def read(database: Connection, msg_id: int, visibility: int = 30) -> list[dict[str, Any]]:
    statement = "select * from interlock.read_specific_message(%s, %s)"
    return await (await database.execute(statement, [msg_id, visibility])).fetchall()


@pytest.mark.store
async def test_a_specific_message_is_read_like_the_next_one(url: str, database: Connection) -> None:
    first, second = await send(database, '{"n": 1}'), await send(database, '{"n": 2}')
    assert await read(database, second) == [{"msg_id": second, "read_ct": 1, "message": {"n": 2}}]
    assert await read(database, second) == [], "it is invisible"
    assert await read(database, second + 1) == [], "there is none"
    (found,) = await (await database.execute("select * from pgmq.read(%s, 30, 10)", [QUEUE])).fetchall()
    assert found["msg_id"] == first
    await database.execute("select pgmq.set_vt(%s, %s, 0)", [QUEUE, second])
    assert [row["read_ct"] for row in await read(database, second, visibility=0)] == [2]
    async with connect(url) as other, other.transaction():
        assert [row["read_ct"] for row in await read(other, second)] == [3]
        assert await read(database, second) == [], "another reader has locked it"


@pytest.mark.store
@pytest.mark.parametrize("outcome", [1, Failed("no")], ids=["by the database function", "by the full rules"])
async def test_advancing_one_message_leaves_the_others(driver: JobDriver, outcome: Any) -> None:
    driver.outcomes = {"a": outcome}
    jobs = [await driver.submit(step("a"), step("b", "a")) for _ in range(3)]
    for task in await driver.claim():
        await driver.settle(task)
    rows = await (
        await driver.connection.execute(
            "select msg_id, message ->> 'job_id' as job_id from interlock.orchestration_messages order by msg_id"
        )
    ).fetchall()
    chosen = rows[1]
    done = await advance(driver.connection, actor="o_1", msg_id=chosen["msg_id"])
    assert (done.received, done.advanced) == (1, 1)
    for job in jobs:
        state = (await driver.states(job))["b"]
        expected = "pending" if outcome == 1 else "skipped"
        assert state == (expected if str(job) == chosen["job_id"] else "waiting")
    assert await advance(driver.connection, actor="o_1", msg_id=chosen["msg_id"]) == Advanced()
    assert (await advance(driver.connection, actor="o_1")).received == 2


@pytest.mark.store
async def test_a_notification_names_a_message_that_was_sent_alone(url: str, driver: JobDriver) -> None:
    await driver.submit(step("a"), step("b"), step("c"))
    async with notifier_at(url) as notifier:
        received, _ = record(notifier, "interlock_orchestration")
        await until(lambda: notifier.is_listening)
        received.clear()
        first, *_ = await driver.claim()
        await driver.settle(first)
        await driver.connection.execute(
            "update interlock.tasks set state = 'canceled', event = 'cancel', lease_expires_at = null "
            "where state = 'running'"
        )
        await until(lambda: len(received) == 2)
    rows = await (await driver.connection.execute("select msg_id from interlock.orchestration_messages")).fetchall()
    assert received == [str(min(row["msg_id"] for row in rows)), "messages"]


@pytest.mark.flow
async def test_an_idle_orchestrator_reads_the_message_that_a_notification_names(
    url: str, driver: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[tuple[int | None, int]] = []  # the message that was asked for, and how many were received
    waiting = asyncio.Event()

    async def wait_for_message(event: asyncio.Event, timeout_s: float | None) -> bool:
        if event is running._messages_arrived and not event.is_set():  # noqa: SLF001 - to await the idle state
            waiting.set()
        return await wait_for_event(event, timeout_s)

    async def record_round(connection: Connection, *, msg_id: int | None, **options: Any) -> Advanced:
        done = await advance(connection, msg_id=msg_id, **options)
        rounds.append((msg_id, done.received))
        return done

    await register_idle_worker(driver.connection, *NAMESPACES)
    await driver.submit(step("a"), step("b", "a"), step("c", "b"))
    async with orchestrator_at(url, **NO_POLLING) as running:
        await until(lambda: running.is_listening)
        monkeypatch.setattr(process, "wait_for_event", wait_for_message)
        monkeypatch.setattr(process, "advance", record_round)
        running.execute(Refresh())  # so that it passes the patched wait
        for _ in "abc":
            await until(waiting.is_set)
            waiting.clear()
            rounds.clear()
            (task,) = await driver.claim()
            await driver.settle(task)
            await until(lambda: any(received for _, received in rounds))
            (message,) = [msg_id for msg_id, received in rounds if received]
            assert message is not None, "it read a batch instead of the message"


@pytest.mark.flow
async def test_notifications_that_arrive_together_lead_to_one_batch(
    url: str, database: Connection, jobs: Interlock
) -> None:
    async with orchestrator_at(url, **NO_POLLING) as running, manual_worker_at(database) as worker:
        await until(lambda: running.is_listening)
        handles = [await jobs.submit("chain") for _ in range(20)]
        for handle in handles:
            await handle.wait(30)
        assert len(worker.done) == 60
        assert running.statistics.fallback_hits == 0


@pytest.mark.unit
def test_a_message_has_ids_only() -> None:
    job, task = "01a1e2cf-6c0c-75b3-83a4-94f638565840", "01a1e2cf-6c0c-75b3-83a4-94f638565841"
    parsed = SimpleStepMessage.parse({"job_id": job, "task_id": task, "cancel": "now", "failure": 7})
    assert (str(parsed.job_id), str(parsed.task_id), parsed.failure) == (job, task, 7)
    assert parsed.document() == {"job_id": parsed.job_id, "task_id": parsed.task_id}
    malformed: list[Any] = [None, [], "x", {}, {"task_id": task}, {"job_id": "x"}, {"job_id": job, "task_id": "x"}]
    for content in malformed:
        with pytest.raises(InputError, match="it is not"):
            SimpleStepMessage.parse(content)
