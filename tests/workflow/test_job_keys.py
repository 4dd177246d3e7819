"""Jobs with a key: one runs at a time, and each policy for a submit while another is unfinished; debounce."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from factories import step, workflow
from interlock.errors import InputError, JobConflictError, JobFailedError, RequestReusedError
from interlock.postgres.connection import connect
from interlock.postgres.notifier import WakeMode
from interlock.store.jobs import JobFilter, find_jobs, read_job_history
from interlock.store.step_results import refresh_pending_reasons
from interlock.store.workflows import put_workflow
from interlock.workflow.advance import start_waiting_jobs
from interlock.workflow.cancel import cancel_job
from interlock.workflow.new_job import NewJob, Submitted
from interlock.workflow.queued_jobs import cancel_replaced_jobs, start_queued_jobs, validate_submitted_jobs
from interlock.workflow.retry_from import retry_job_from
from interlock.workflow.submit import submit_job, submit_jobs
from job_driver import Failed, JobDriver
from jobs_support import manual_worker_at, orchestrator_at

if TYPE_CHECKING:
    from uuid import UUID

    from interlock import Interlock
    from interlock.client.job_handle import JobHandle
    from interlock.postgres.connection import Connection

MORNING = datetime(2030, 1, 1, 9, tzinfo=UTC)


@pytest.fixture(autouse=True)
async def stored_workflow(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("a", compensate="undo"), step("b", "a")))


async def submit(
    connection: Connection, n: int = 0, key: str | None = "k", *, now: datetime | None = None, **options: Any
) -> Submitted:
    return await submit_job(connection, NewJob("w", {"n": n}, key=key, **options), actor="ada", now=now)


async def statuses(driver: JobDriver, *ids: UUID) -> list[str]:
    return [(await driver.job(id_))["status"] for id_ in ids]


async def sweep(connection: Connection, now: datetime | None = None) -> None:
    """Do what an orchestrator does in one round."""
    for work in (cancel_replaced_jobs, validate_submitted_jobs, start_queued_jobs, start_waiting_jobs):
        await work(connection, actor="o", now=now)


async def test_queued_jobs_run_one_after_the_other_in_their_order(driver: JobDriver) -> None:
    jobs = [(await submit(driver.connection, n)).id for n in range(3)]
    other = (await submit(driver.connection, key="other")).id
    assert await statuses(driver, *jobs, other) == ["RUNNING", "PENDING", "PENDING", "RUNNING"]
    rows = [await driver.job(id_) for id_ in jobs]
    assert [row["reason"] for row in rows] == [
        None,
        f"waits for job {jobs[0]} with key 'k'",
        f"waits for job {jobs[1]} with key 'k'",
    ]
    assert [row["key"] for row in rows] == ["k"] * 3
    await sweep(driver.connection)
    assert await statuses(driver, *jobs) == ["RUNNING", "PENDING", "PENDING"], "not while the first one runs"
    for ended in (1, 2, 3):
        await driver.run()
        await sweep(driver.connection)
        expected = ["COMPLETED"] * ended + ["RUNNING", "PENDING"]
        assert await statuses(driver, *jobs) == expected[:3]


@pytest.mark.parametrize("end", ["fails", "is canceled"])
async def test_the_next_job_starts_however_the_one_before_ended(driver: JobDriver, end: str) -> None:
    first, second = [(await submit(driver.connection, n)).id for n in range(2)]
    if end == "fails":
        driver.outcomes["b"] = Failed("no")
        await driver.run(until=lambda: "b" in driver.ran)
        await sweep(driver.connection)
        assert await statuses(driver, first, second) == ["RUNNING", "PENDING"], "it compensates first"
        await driver.run()
    else:
        await cancel_job(driver.connection, first, actor="ada")
        await driver.run()
    await sweep(driver.connection)
    assert await statuses(driver, first, second) == ["FAILED" if end == "fails" else "CANCELED", "RUNNING"]


async def test_a_queued_job_that_is_canceled_makes_room_for_the_next(driver: JobDriver) -> None:
    jobs = [(await submit(driver.connection, n)).id for n in range(3)]
    await cancel_job(driver.connection, jobs[1], actor="ada")
    await sweep(driver.connection)
    assert await statuses(driver, *jobs) == ["RUNNING", "CANCELED", "PENDING"]
    await refresh_pending_reasons(driver.connection)
    assert (await driver.job(jobs[2]))["reason"] == f"waits for job {jobs[0]} with key 'k'"
    await driver.run()
    await sweep(driver.connection)
    assert await statuses(driver, *jobs) == ["COMPLETED", "CANCELED", "RUNNING"]


async def test_reject_refuses_a_second_unfinished_job(driver: JobDriver) -> None:
    first = (await submit(driver.connection, on_conflict="reject")).id
    with pytest.raises(JobConflictError, match=f"workflow w: job {first} has the key 'k' and has not ended"):
        await submit(driver.connection, on_conflict="reject")
    both = [NewJob("w", {}), NewJob("w", {}, key="k", on_conflict="reject")]
    with pytest.raises(JobConflictError):
        await submit_jobs(driver.connection, both, actor="ada")
    assert len(await find_jobs(driver.connection)) == 1, "all or none"
    await driver.run()
    assert (await submit(driver.connection, on_conflict="reject")).created, "free when it has ended"


async def test_return_existing_does_not_return_a_job_that_is_being_canceled(driver: JobDriver) -> None:
    first = (await submit(driver.connection)).id
    (running,) = await driver.claim()
    assert await cancel_job(driver.connection, first, actor="ada")
    second = await submit(driver.connection, 1, on_conflict="return_existing")
    assert second.created
    assert (await driver.job(second.id))["reason"].startswith(f"waits for job {first}")
    assert await submit(driver.connection, 2, on_conflict="return_existing") == (second.id, False)
    await driver.settle(running)
    await driver.run()
    await sweep(driver.connection)
    await driver.run()
    assert await statuses(driver, first, second.id) == ["CANCELED", "COMPLETED"]


async def test_a_conflict_within_a_list_names_the_entries_of_the_list(driver: JobDriver) -> None:
    jobs = [NewJob("w", {"n": n}, key=key, on_conflict="reject") for n, key in enumerate("abca")]
    with pytest.raises(JobConflictError, match="workflow w: job 3 of the list has the same key as job 0") as caught:
        await submit_jobs(driver.connection, jobs, actor="ada")
    assert caught.value.job_id is None
    assert await find_jobs(driver.connection, JobFilter()) == []


async def test_return_existing_returns_the_unfinished_job(driver: JobDriver) -> None:
    first = (await submit(driver.connection)).id
    assert await submit(driver.connection, 5, on_conflict="return_existing") == (first, False)
    waiting = (await submit(driver.connection)).id
    assert await submit(driver.connection, on_conflict="return_existing") == (waiting, False), "the last one"
    await driver.run()
    await sweep(driver.connection)
    await driver.run()
    assert (await submit(driver.connection, on_conflict="return_existing")).created


async def test_cancel_in_progress_cancels_running_and_queued_jobs_and_starts_when_they_have_ended(
    driver: JobDriver,
) -> None:
    running, queued = [(await submit(driver.connection, n)).id for n in range(2)]
    await driver.run(until=lambda: "a" in driver.ran)
    last = (await submit(driver.connection, 2, on_conflict="cancel_in_progress")).id
    await sweep(driver.connection)
    assert await statuses(driver, running, queued, last) == ["RUNNING", "CANCELED", "PENDING"], "it compensates first"
    assert (await driver.job(running))["ending"] == "CANCELED"
    assert (await driver.job(queued))["reason"] == f"replaced by job {last}"
    await driver.run()
    await sweep(driver.connection)
    assert await statuses(driver, running, queued, last) == ["CANCELED", "CANCELED", "RUNNING"]
    assert "compensate:a" in driver.ran
    assert (await driver.job(running))["reason"] == f"replaced by job {last}"


async def test_of_several_replacements_only_the_last_one_starts(driver: JobDriver) -> None:
    jobs = [(await submit(driver.connection, n, on_conflict="cancel_in_progress")).id for n in range(4)]
    await start_queued_jobs(driver.connection, actor="o")
    await sweep(driver.connection)
    await driver.run()
    await sweep(driver.connection)
    assert await statuses(driver, *jobs) == ["CANCELED", "CANCELED", "CANCELED", "RUNNING"]
    for replaced in jobs[1:3]:
        events = [row["event"] for row in await read_job_history(driver.connection, replaced)]
        assert events == ["create", "validate", "cancel"], "it never started"


async def test_a_key_belongs_to_its_workflow(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("a"), name="other"))
    await put_workflow(driver.connection, workflow(step("a"), version="2"))
    first = (await submit(driver.connection, version="1")).id
    elsewhere = await submit_job(driver.connection, NewJob("other", {}, key="k"), actor="ada")
    newer = (await submit(driver.connection, version="2")).id
    assert await statuses(driver, first, elsewhere.id, newer) == ["RUNNING", "RUNNING", "PENDING"]


async def test_the_workflow_declares_the_key_and_the_policy_of_its_jobs(driver: JobDriver) -> None:
    document = workflow(step("a"), name="sync", key="input.customer.id", on_conflict="reject")
    await put_workflow(driver.connection, document)

    async def sync(customer: Any, **options: Any) -> Submitted:
        return await submit_job(driver.connection, NewJob("sync", {"customer": customer}, **options), actor="ada")

    first = await sync({"id": 7})
    assert (await driver.job(first.id))["key"] == "7"
    with pytest.raises(JobConflictError, match=f"job {first.id} has the key '7'"):
        await sync({"id": 7})
    assert (await sync({"id": 8})).created
    assert (await sync({"id": 7}, key="by hand")).created
    assert (await sync({"id": 7}, on_conflict="queue")).created
    with pytest.raises(InputError, match=r"its key is input\.customer\.id, which the input does not have"):
        await sync({"name": "x"})
    with pytest.raises(InputError, match="has 2001 bytes; the limit is 2000"):
        await sync({"id": "x" * 2001})


async def test_a_constant_key_runs_one_job_of_the_workflow_at_a_time(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("a"), name="single", key="all"))
    jobs = [(await submit_job(driver.connection, NewJob("single", {"n": n}), actor="ada")).id for n in range(2)]
    assert await statuses(driver, *jobs) == ["RUNNING", "PENDING"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"on_conflict": "explode", "key": "k"}, "on_conflict must be one of reject, return_existing"),
        ({"on_conflict": "queue"}, "on_conflict and debounce need a key"),
        ({"debounce": 5.0}, "on_conflict and debounce need a key"),
        ({"debounce": 0.0, "key": "k"}, "debounce must be a positive number"),
        ({"debounce_max": 5.0, "key": "k"}, "debounce_max needs debounce"),
        ({"key": " "}, "key must be a non-empty string"),
    ],
)
async def test_invalid_options_are_refused(driver: JobDriver, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        await submit_job(driver.connection, NewJob("w", {}, **options), actor="ada")
    assert await find_jobs(driver.connection) == []


async def test_a_repeated_request_returns_its_job_whatever_the_policy(driver: JobDriver) -> None:
    first = await submit(driver.connection, on_conflict="reject", request_id="r")
    assert await submit(driver.connection, on_conflict="reject", request_id="r") == (first.id, False)
    assert await submit(driver.connection, on_conflict="cancel_in_progress", request_id="r") == (first.id, False)
    with pytest.raises(RequestReusedError, match="another input"):
        await submit(driver.connection, 1, on_conflict="cancel_in_progress", request_id="r")
    with pytest.raises(RequestReusedError, match="another key"):
        await submit(driver.connection, key="other", request_id="r")
    await sweep(driver.connection)
    assert await statuses(driver, first.id) == ["RUNNING"]
    assert len(await find_jobs(driver.connection)) == 1


async def test_two_submits_at_once_do_not_both_run(url: str, driver: JobDriver) -> None:
    async def one(n: int, policy: str) -> Submitted | JobConflictError:
        async with connect(url) as connection:
            try:
                return await submit(connection, n, on_conflict=policy)
            except JobConflictError as error:
                return error

    for policy in ("reject", "queue"):
        made = await asyncio.gather(*(one(n, policy) for n in range(8)))
        rows = await find_jobs(driver.connection)
        assert [row["status"] for row in rows].count("RUNNING") == 1
        assert sum(isinstance(each, Submitted) for each in made) == (1 if policy == "reject" else 8)
        await driver.run()


async def test_a_submit_waits_for_an_open_transaction_with_the_same_key(url: str, driver: JobDriver) -> None:
    async with connect(url) as one, connect(url) as two:
        async with one.transaction():
            first = await submit(one, 1)
            waiting = asyncio.create_task(submit(two, 2))
            assert (await submit(driver.connection, key="other")).created, "another key does not wait"
            assert not waiting.done()
        second = await asyncio.wait_for(waiting, 30)
    assert await statuses(driver, first.id, second.id) == ["RUNNING", "PENDING"]


async def test_a_submit_that_is_rolled_back_leaves_the_key_free(url: str, driver: JobDriver) -> None:
    async with connect(url) as doomed, connect(url) as next_:
        async with doomed.transaction(force_rollback=True):
            await submit(doomed, 1)
            waiting = asyncio.create_task(submit(next_, 2))
            await submit(driver.connection, key="other")
            assert not waiting.done()
        second = await asyncio.wait_for(waiting, 30)
    assert await statuses(driver, second.id) == ["RUNNING"]


async def test_the_database_refuses_a_second_running_job_of_a_key(driver: JobDriver) -> None:
    _, second = [(await submit(driver.connection, n)).id for n in range(2)]
    with pytest.raises(psycopg.errors.UniqueViolation, match="jobs_key_running"):
        await driver.connection.execute(
            "update interlock.jobs set status = 'RUNNING', event = 'allocate_resources' where id = %s", [second]
        )


async def test_two_orchestrators_start_one_job(url: str, driver: JobDriver) -> None:
    jobs = [(await submit(driver.connection, n)).id for n in range(3)]
    await driver.run()
    async with connect(url) as one, connect(url) as two:
        counts = await asyncio.gather(*(start_queued_jobs(each, actor="o") for each in (one, two)))
    assert sum(counts) == 1
    assert await statuses(driver, *jobs) == ["COMPLETED", "RUNNING", "PENDING"]


async def test_an_orchestrator_starts_the_next_job_without_a_notification(url: str, driver: JobDriver) -> None:
    jobs = [(await submit(driver.connection, n)).id for n in range(2)]
    await driver.run()  # it notified nobody: no orchestrator listened
    async with orchestrator_at(url, mode=WakeMode.POLLING, tick=0.05) as running:
        assert not running.is_listening
        async with asyncio.timeout(30):
            while await statuses(driver, jobs[1]) != ["RUNNING"]:
                await asyncio.sleep(0.01)


async def test_a_notification_wakes_the_orchestrator_when_a_key_becomes_free(url: str, driver: JobDriver) -> None:
    first, second = [(await submit(driver.connection, n)).id for n in range(2)]
    async with connect(url) as listening:
        await listening.execute("listen interlock_orchestration")
        await cancel_job(driver.connection, first, actor="ada")
        await driver.run()
        async with asyncio.timeout(30):
            async for note in listening.notifies():
                if note.payload == "jobs":
                    break
    assert await statuses(driver, second) == ["PENDING"]


async def test_debounce_starts_the_last_submit_after_the_pause(driver: JobDriver) -> None:
    async def put(n: int, at: float, **more: Any) -> UUID:
        now = MORNING + timedelta(seconds=at)
        return (await submit(driver.connection, n, debounce=10.0, now=now, **more)).id

    await driver.connection.execute("update interlock.workers set seen_until = '2100-01-01'")
    jobs = [await put(n, at) for n, at in enumerate((0, 6, 12))]
    first = await driver.job(jobs[0])
    assert first["status"] == "SUBMITTED"
    assert first["reason"] == "starts at 2030-01-01T09:00:10.000Z unless it is submitted again before (debounce)"
    for at in (15, 21.9):
        await sweep(driver.connection, MORNING + timedelta(seconds=at))
        assert await statuses(driver, *jobs) == ["CANCELED", "CANCELED", "SUBMITTED"]
    assert (await driver.job(jobs[0]))["reason"] == f"replaced by job {jobs[2]}"
    await sweep(driver.connection, MORNING + timedelta(seconds=22))
    assert await statuses(driver, jobs[2]) == ["RUNNING"]
    assert (await driver.job(jobs[2]))["input"] == {"n": 2}
    later = await put(3, 25)
    await sweep(driver.connection, MORNING + timedelta(seconds=40))
    assert await statuses(driver, jobs[2], later) == ["RUNNING", "PENDING"], "a running job is not replaced"
    assert (await driver.job(later))["reason"] == f"waits for job {jobs[2]} with key 'k'"


async def test_debounce_max_limits_how_long_a_burst_defers_the_start(driver: JobDriver) -> None:
    await driver.connection.execute("update interlock.workers set seen_until = '2100-01-01'")
    jobs = []
    for at in range(0, 28, 4):
        now = MORNING + timedelta(seconds=at)
        jobs.append((await submit(driver.connection, at, debounce=10.0, debounce_max=25.0, now=now)).id)
    await sweep(driver.connection, MORNING + timedelta(seconds=24.9))
    assert await statuses(driver, jobs[-1]) == ["SUBMITTED"]
    await sweep(driver.connection, MORNING + timedelta(seconds=25))
    assert await statuses(driver, *jobs) == ["CANCELED"] * 6 + ["RUNNING"]


async def test_a_debounced_submit_obeys_the_policy_for_other_jobs(driver: JobDriver) -> None:
    running = (await submit(driver.connection)).id
    with pytest.raises(JobConflictError, match=str(running)):
        await submit(driver.connection, debounce=10.0, on_conflict="reject")
    assert await submit(driver.connection, debounce=10.0, on_conflict="return_existing") == (running, False)
    await driver.run()
    first = await submit(driver.connection, debounce=10.0, on_conflict="reject")
    second = await submit(driver.connection, debounce=10.0, on_conflict="reject")
    assert first.created
    assert second.created, "the waiting one is replaced, and no conflict"


async def test_an_invalid_input_fails_a_job_that_was_stored_unchecked(driver: JobDriver) -> None:
    schema = {"type": "object", "required": ["order"]}
    await put_workflow(driver.connection, workflow(step("a"), name="strict", input_schema=schema))
    new = NewJob("strict", {}, key="k", debounce=0.001)
    job = (await submit_job(driver.connection, new, actor="ada")).id
    fine = (await submit(driver.connection, debounce=0.001)).id
    await asyncio.sleep(0.01)
    await sweep(driver.connection)
    assert await statuses(driver, job, fine) == ["FAILED", "RUNNING"]
    row = await driver.job(job)
    assert row["reason"] == "workflow strict: input: 'order' is a required property"
    assert row["error"]["type"] == "InputError"
    assert [each["event"] for each in await read_job_history(driver.connection, job)] == ["create", "reject"]


async def test_child_jobs_obey_the_key_of_their_workflow(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("x"), name="inner", key="input.n"))
    parents = [await driver.submit(step("c", kind="child", workflow="inner"), name="p", input={"n": 1}) for _ in "ab"]
    children = await find_jobs(driver.connection, JobFilter(workflow="inner"))
    assert [child["status"] for child in reversed(children)] == ["RUNNING", "PENDING"]
    for _ in parents:
        await driver.run()
        await sweep(driver.connection)
    await driver.run()
    assert await statuses(driver, *parents) == ["COMPLETED"] * 2


@pytest.mark.parametrize("policy", ["reject", "return_existing"])
async def test_a_child_step_fails_when_another_job_has_the_key(driver: JobDriver, policy: str) -> None:
    await put_workflow(driver.connection, workflow(step("x"), name="inner", key="one", on_conflict=policy))
    holder = (await submit_job(driver.connection, NewJob("inner", {}), actor="ada")).id
    parent = await driver.submit(step("c", kind="child", workflow="inner"), name="p")
    row = await driver.job(parent)
    assert row["status"] == "FAILED"
    assert f"job {holder} has the key 'one' and has not ended" in row["reason"]


async def test_a_child_that_would_wait_for_its_parent_is_refused(driver: JobDriver) -> None:
    parent = await driver.submit(step("c", kind="child", workflow="again"), name="again", key="k")
    assert (await driver.job(parent))["status"] == "RUNNING", "its child has no key"
    await cancel_job(driver.connection, parent, actor="ada")
    await driver.run()
    await put_workflow(driver.connection, workflow(step("c", kind="child", workflow="loop"), name="loop", key="one"))
    parent = (await submit_job(driver.connection, NewJob("loop", {}), actor="ada")).id
    row = await driver.job(parent)
    assert row["status"] == "FAILED"
    assert "has the key 'one', so that it would wait for itself" in row["reason"]


async def test_a_retry_keeps_the_key_and_waits_for_it(driver: JobDriver) -> None:
    driver.outcomes["a"] = Failed("no")
    failed = (await submit(driver.connection)).id
    await driver.run()
    running = (await submit(driver.connection)).id
    retried = (await retry_job_from(driver.connection, failed, "a", actor="ada")).id
    assert await statuses(driver, failed, running, retried) == ["FAILED", "RUNNING", "PENDING"]
    assert (await driver.job(retried))["key"] == "k"
    driver.outcomes.clear()
    await driver.run()
    await sweep(driver.connection)
    await driver.run()
    assert await statuses(driver, running, retried) == ["COMPLETED", "COMPLETED"]


async def test_an_orchestrator_starts_queued_replacing_and_debounced_jobs_by_itself(url: str, jobs: Interlock) -> None:
    async with connect(url) as database, orchestrator_at(url, tick=60.0), manual_worker_at(database) as worker:
        queued = [await jobs.submit("chain", {"n": n}, key="q") for n in range(5)]
        assert [await job.wait(60) for job in queued] == [{"third": "third"}] * 5
        started = [(await job.status()).started_at for job in queued]
        ended = [(await job.status()).completed_at for job in queued]
        assert all(end <= start for end, start in zip(ended[:-1], started[1:], strict=True))  # type: ignore[operator]
        blocked = await jobs.submit("gates", key="g")
        last = await jobs.submit("gates", key="g", on_conflict="cancel_in_progress")
        with pytest.raises(JobFailedError, match=f"was canceled: replaced by job {last.id}"):
            await blocked.wait(60)
        await last.cancel()
        burst = [await jobs.submit("chain", {"n": n}, key="d", debounce=0.3) for n in range(3)]
        assert await burst[-1].wait(60) == {"third": "third"}
        for job in burst[:-1]:
            with pytest.raises(JobFailedError, match="was canceled: replaced by job"):
                await job.wait(60)
        assert worker.done.count("first") == 6, "of the burst, the last one ran"


async def test_jobs_of_one_key_never_overlap_while_orchestrators_are_stopped(url: str, jobs: Interlock) -> None:
    async def submit_some(seed: int) -> list[JobHandle]:
        policies: Any = ("queue", "queue", "cancel_in_progress")
        return [
            await jobs.submit("chain", {"n": n}, key=f"k{(seed + n) % 2}", on_conflict=policies[(seed + n) % 3])
            for n in range(8)
        ]

    async with connect(url) as database, manual_worker_at(database), orchestrator_at(url):
        submitting = [asyncio.create_task(submit_some(seed)) for seed in range(3)]
        for _ in range(3):  # these roll their transactions back
            async with orchestrator_at(url, tick=0.01) as doomed:
                await asyncio.sleep(0.1)
                await doomed.stop(at_once=True)
        made = [job for each in submitting for job in await each]
        ends = await asyncio.gather(*(job.wait(60) for job in made), return_exceptions=True)
        assert all(end == {"third": "third"} or isinstance(end, JobFailedError) for end in ends)
        rows = await (await database.execute(OVERLAPPING_JOBS)).fetchall()
    assert rows == []
    statuses_ = [(await job.status()).status for job in made]
    assert set(statuses_) == {"COMPLETED", "CANCELED"}


# pairs of jobs of one key that ran at the same time, by their recorded moves
OVERLAPPING_JOBS = """
with runs as (
    select jobs.id, key, begun.recorded_at as begun, ended.recorded_at as ended
    from interlock.jobs
        join interlock.job_state_transitions as begun on begun.job_id = jobs.id and begun.to_state = 'RUNNING'
        join interlock.job_state_transitions as ended on ended.job_id = jobs.id and ended.from_state = 'RUNNING'
)
select one.id
from runs as one
    join runs as two on two.key = one.key and two.id <> one.id and two.begun < one.ended and one.begun < two.ended
"""
