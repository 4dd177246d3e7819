"""DBOS' tests of idempotency and recovery, and Hatchet's examples, as tests.

The expectations are those of dbos-inc/dbos-transact-py (tests/test_dbos.py, test_queue.py, test_failures.py,
test_workflow_management.py) and hatchet-dev/hatchet (sdks/python/examples). Each docstring names the test or example. A
DBOS workflow id is a `request_id`, a queue is a limit, send and recv are a signal.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

import recovery_app
from interlock import StepContext, TaskContext, TaskRowState
from interlock.errors import JobConflictError, JobFailedError, RequestReusedError, UnknownJobError
from jobs_support import app_at, process_of
from workflow_case import WorkflowCase

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

QUICK = {"INTERLOCK_APP": "recovery_app:app", "INTERLOCK_LEASE": "2", "INTERLOCK_LOG_LEVEL": "warning"}


# Idempotency (DBOS, Hatchet).


async def test_simple_workflow_runs_once_per_id(case: WorkflowCase) -> None:
    """test_simple_workflow, "Test OAOO": the same workflow id gives the recorded result; no step runs again."""
    case.step("txn", "alice1")
    case.compute("join", lambda txn: f"{txn}alice", after=["txn"])
    first = await case.submit(input={"var": "alice"}, request_id="wfuuid")
    await case.drain(first)
    again = await case.submit(input={"var": "alice"}, request_id="wfuuid")
    await case.drain(again)
    assert (again.id, again.created, await again.wait(1)) == (first.id, False, {"join": "alice1alice"})
    assert case.ran == ["txn", "join"]


async def test_duplicate_workflow_id_of_another_workflow(case: WorkflowCase) -> None:
    """test_duplicate_workflow_id: "Workflow already exists with a different function name"."""
    case.steps("only")
    case.step("other", wf=case.app.workflow("dup"))
    await case.submit(request_id="wfid")
    with pytest.raises(RequestReusedError, match="wfid"):
        await case.submit("dup", request_id="wfid")


async def test_duplicate_workflow_id_with_another_input(case: WorkflowCase) -> None:
    """test_duplicate_workflow_id: DBOS keeps the recorded input and warns; here the request is refused."""
    case.steps("only")
    first = await case.submit(input={"var": "abc"}, request_id="wfid")
    with pytest.raises(RequestReusedError):
        await case.submit(input={"var": "def"}, request_id="wfid")
    assert (await first.status()).input == {"var": "abc"}


async def test_concurrent_starts_with_one_id(case: WorkflowCase) -> None:
    """tests/test_concurrency.py, test_concurrent_conflict_uuid: one of them runs, all get its result."""
    case.steps("only")
    await case.app.open()
    jobs = await asyncio.gather(*(case.submit(request_id="wfid") for _ in range(5)))
    await case.drain(jobs[0])
    assert (len({job.id for job in jobs}), [job.created for job in jobs].count(True)) == (1, 1)
    assert ([await job.wait(1) for job in jobs], case.ran) == ([{"only": "only"}] * 5, ["only"])


async def test_failed_workflow_raises_the_recorded_error_again(case: WorkflowCase) -> None:
    """test_exception_workflow: the same id raises the same error, and the step does not run again."""
    case.step("bad", fails="test error")
    for _ in range(2):
        job = await case.submit(request_id="wfuuid")
        await case.drain(job)
        with pytest.raises(JobFailedError, match="test error"):
            await job.wait(1)
    assert case.ran == ["bad"]


async def test_bulk_start_with_a_duplicate_id(case: WorkflowCase) -> None:
    """hatchet idempotency, test_idempotency_keys_prevent_duplicate_runs_bulk_trigger: one run for two triggers."""
    case.steps("only")
    await case.app.open()
    jobs = await case.app.submit_many([{"workflow": "case", "request_id": "key"} for _ in range(2)])
    assert len({job.id for job in jobs}) == 1
    assert len(await case.app.find_jobs()) == 1


# Steps (DBOS).


async def test_step_retries(case: WorkflowCase) -> None:
    """test_step_retries: max_attempts=2 means two attempts, then the workflow fails with the step's error."""

    async def failing_step() -> None:
        case.ran.append("failing_step")
        raise RuntimeError("fail")

    case.wf.step(max_tries=2, backoff="none")(failing_step)
    seen = await case.run()
    assert (seen.status, case.ran) == ("FAILED", ["failing_step"] * 2)
    assert "fail" in (seen.reason or "")


async def test_nonserializable_return(case: WorkflowCase) -> None:
    """test_nonserializable_return: a result that cannot be stored fails the workflow."""

    async def bad() -> Any:
        return object()

    case.wf.step(max_tries=1)(bad)
    case.steps("then", after=["bad"])
    seen = await case.run()
    assert (seen.status, seen.states["then"]) == ("FAILED", "upstream failed")


async def test_transaction_is_committed_with_its_step(case: WorkflowCase, database: Connection) -> None:
    """test_transaction_errors: the writes of failed attempts are rolled back; those of the last one are there once."""
    await database.execute("create table greetings (attempt int)")

    async def insert(ctx: TaskContext) -> None:
        assert ctx.connection is not None
        await ctx.connection.execute("insert into greetings values (%s)", [ctx.attempt])
        if ctx.attempt < 3:
            raise RuntimeError("serialization failure")

    case.wf.step(transactional=True, max_tries=5, backoff="none")(insert)
    assert (await case.run()).status == "COMPLETED"
    rows = await (await database.execute("select attempt from greetings")).fetchall()
    assert [row["attempt"] for row in rows] == [3]


# Cancel, resume, fork (DBOS).


async def test_cancel_and_resume(case: WorkflowCase) -> None:
    """test_cancel_resume: a canceled workflow stops after step one; resumed, it runs only what was not done."""
    case.step("step_one", 5)
    case.wf.signal("event", after=["step_one"])
    case.compute("step_two", lambda one, _: one, after=["step_one", "event"])
    job = await case.submit()
    await case.drain(job)
    await job.cancel()
    assert (await case.drain(job)).status == "CANCELED"
    resumed = await job.retry()
    await resumed.signal("event")
    seen = await case.drain(resumed)
    assert (seen.status, seen.output, case.ran) == ("COMPLETED", {"step_two": 5}, ["step_one", "step_two"])


async def test_cancel_after_the_final_step(case: WorkflowCase) -> None:
    """test_cancel_after_final_step: a workflow that has completed is not canceled."""
    case.steps("only")
    job = await case.submit()
    await case.drain(job)
    assert not await job.cancel()
    assert (await case.report(job)).status == "COMPLETED"


async def test_fork_from_a_step(case: WorkflowCase) -> None:
    """test_fork_steps: a fork from step 3 reuses the results of the steps before it."""
    mood = {"fails": True}

    async def three() -> str:
        case.ran.append("three")
        if mood["fails"]:
            raise RuntimeError("not today")
        return "three"

    case.steps("one")
    case.steps("two", after=["one"])
    case.wf.step(after=["two"], max_tries=1)(three)
    job = await case.submit()
    assert (await case.drain(job)).status == "FAILED"
    mood["fails"] = False
    forked = await job.retry_from("three")
    seen = await case.drain(forked)
    assert (seen.status, case.ran) == ("COMPLETED", ["one", "two", "three", "three"])
    assert (await case.report(job)).status == "FAILED"  # the original stays as it ended


async def test_cancel_workflow_children(case: WorkflowCase) -> None:
    """test_cancel_workflow_children: canceling a workflow cancels its children and theirs."""
    grandchild = case.app.workflow("grandchild")
    grandchild.signal("never")
    child = case.app.workflow("child")
    child.child("run_grandchild", grandchild)
    case.wf.child("run_child", child)
    job = await case.submit()
    await case.drain(job)
    await job.cancel()
    await case.drain(job)
    jobs = await case.app.find_jobs()
    assert [each.status.value for each in jobs] == ["CANCELED"] * 3


async def test_workflow_timeout_cancels_its_children(case: WorkflowCase) -> None:
    """test_workflow_timeout: the timeout of the parent ends its children too."""
    child = case.app.workflow("child")
    child.signal("never")
    case.wf.child("run_child", child)
    job = await case.submit(timeout=1)
    await case.drain(job)
    assert (await case.drain(job, after=2)).status == "CANCELED"
    assert {each.status.value for each in await case.app.find_jobs()} == {"CANCELED"}


# Messages and sleep (DBOS).


async def test_send_to_an_unknown_workflow(case: WorkflowCase) -> None:
    """test_send_recv: "Non-existent `send` destination workflow ID"."""
    case.steps("only")
    await case.app.open()
    unknown = case.app.job(uuid4())
    for call in (unknown.signal("test"), unknown.approve("test"), unknown.cancel(), unknown.retry(), unknown.steps()):
        with pytest.raises(UnknownJobError):
            await call


async def test_send_recv(case: WorkflowCase) -> None:
    """test_send_recv: messages are received by topic, and those of one topic in the order in which they were sent."""
    case.wf.signal("msg1", signal="testtopic")
    case.wf.signal("msg2", signal="default", after=["msg1"])
    case.wf.signal("msg3", signal="default", after=["msg2"])
    case.compute("result", lambda *messages: "-".join(messages), after=["msg1", "msg2", "msg3"])
    job = await case.submit()
    for topic, message in (("default", "test1"), ("testtopic", "test2"), ("default", "test3")):
        await job.signal(topic, message)
    assert (await case.drain(job)).output == {"result": "test2-test1-test3"}


async def test_send_idempotency_key(case: WorkflowCase) -> None:
    """test_send_idempotency_key: the same key delivers one message; the second receiver times out."""
    case.wf.signal("msg1", signal="topic")
    case.wf.signal("msg2", signal="topic", after=["msg1"], timeout=2)
    job = await case.submit()
    sent = [await job.signal("topic", "hello", request_id="idem_key") for _ in range(2)]
    await case.drain(job)
    seen = await case.drain(job, after=2)
    assert (sent, seen.states) == (["sent", "already sent"], {"msg1": "done", "msg2": "failed"})


async def test_send_none(case: WorkflowCase) -> None:
    """test_send_recv, "Test send 'None'": a message without payload wakes the receiver."""
    case.wf.signal("message")
    job = await case.submit()
    await case.drain(job)
    await job.signal("message", None)
    assert (await case.drain(job)).output == {"message": None}


async def test_sleep_survives_a_restart(url: str, case: WorkflowCase) -> None:
    """test_sleep: the end of a sleep is recorded; an app that starts later does not begin it anew."""
    case.wf.sleep("rest", timedelta(days=7))
    job = await case.submit()
    await case.drain(job)
    await case.close()
    case.clock.advance(timedelta(days=6))
    restarted = WorkflowCase(url, clock=case.clock)
    restarted.wf.sleep("rest", timedelta(days=7))
    await restarted.app.open()
    job = restarted.app.job(job.id)
    assert (await restarted.drain(job)).states == {"rest": "waiting"}
    assert (await restarted.drain(job, after=timedelta(days=1))).status == "COMPLETED"
    await restarted.close()


# Recovery after a crash (DBOS).


@pytest.mark.chaos
async def test_recovery_after_a_crash_between_steps(url: str, tmp_path: Path) -> None:
    """test_recovery_workflow_step: recovery finishes the workflow and does not run recorded steps again.

    The worker is killed inside step two; that step runs again in another process, step one does not.
    """
    log, gate = tmp_path / "log", tmp_path / "gate"
    gate.touch()
    async with app_at(url, declared=recovery_app.app) as app:
        with process_of("interlock.orchestrator", url, **QUICK):
            with process_of("interlock.worker", url, **QUICK) as first:
                job = await app.submit("recovery", {"log": str(log), "gate": str(gate), "kill": True})
                assert await asyncio.to_thread(first.wait, 30) == -9
            with process_of("interlock.worker", url, **QUICK):
                assert await job.wait(60) == {"step_three": "one-two-three"}
        attempts = {step.step: step.attempt for step in await job.steps()}
    assert log.read_text(encoding="utf-8").split() == ["step_one", "step_two", "step_two", "step_three"]
    assert attempts == {"step_one": 1, "step_two": 2, "step_three": 1}


@pytest.mark.chaos
async def test_recovery_after_a_crash_of_the_orchestrator(url: str, tmp_path: Path) -> None:
    """test_recovery_workflow: what was recorded before the crash is used after it; every step runs once."""
    log, gate = tmp_path / "log", tmp_path / "gate"
    async with app_at(url, declared=recovery_app.app) as app:
        with ExitStack() as stack:
            killed = stack.enter_context(process_of("interlock.orchestrator", url, **QUICK))
            stack.enter_context(process_of("interlock.worker", url, **QUICK))
            job = await app.submit("recovery", {"log": str(log), "gate": str(gate), "kill": False})
            while (await job.steps())[0].state != "running":
                await asyncio.sleep(0.02)
            killed.kill()
            gate.touch()
            while (await job.steps())[0].state != "done":
                await asyncio.sleep(0.02)
            assert (await job.steps())[1].state == "waiting"
            stack.enter_context(process_of("interlock.orchestrator", url, **QUICK))
            assert await job.wait(60) == {"step_three": "one-two-three"}
    assert log.read_text(encoding="utf-8").split() == ["step_one", "step_two", "step_three"]


# Queues (DBOS).


async def test_one_at_a_time(case: WorkflowCase) -> None:
    """test_one_at_a_time: concurrency=1; the second does not start before the first has ended."""
    open_steps = []
    case.app.limit("test_queue", max_running=1)

    async def look(ctx: StepContext) -> None:
        states = [step.state for step in await case.app.job(str(ctx.job_id)).steps()]
        open_steps.append(sum(state in {TaskRowState.PENDING, TaskRowState.RUNNING} for state in states))

    for name in ("first", "second", "third"):
        case.wf.step(name=name, limit_key="test_queue")(look)
    assert (await case.run()).status == "COMPLETED"
    assert open_steps == [1, 1, 1]


async def test_limiter(case: WorkflowCase) -> None:
    """test_limiter: five starts in any 1.8 s; 15 workflows run in three waves."""
    case.app.limit("test_queue", max_starts=5, per=timedelta(seconds=1.8))

    async def count(item: int) -> int:
        case.ran.append(str(item))
        return item

    case.wf.map(over_input="numbers", limit_key="test_queue")(count)
    job = await case.submit(input={"numbers": list(range(15))})
    waves = []
    for _ in range(3):
        await case.drain(job)
        waves.append(len(case.ran))
        case.clock.advance(1.8)
    assert (waves, (await case.report(job)).status) == ([5, 10, 15], "COMPLETED")


async def test_priority_queue(case: WorkflowCase) -> None:
    """test_priority_queue: what is enqueued with a higher priority runs first, the rest in order."""
    case.steps("low_1", "low_2")
    case.steps("high", priority=10)
    await case.run()
    assert case.ran == ["high", "low_1", "low_2"]


# Keys of jobs: deduplication and debouncing (DBOS), concurrency (Hatchet).


async def test_queue_deduplication(case: WorkflowCase) -> None:
    """test_queue_deduplication: refused while a workflow with the same deduplication id is there, fine afterwards."""
    case.wf.signal("event")
    first = await case.submit(key="my_dedup_id", on_conflict="reject")
    await case.submit(key="my_other_dedup_id", on_conflict="reject")
    await case.submit()
    with pytest.raises(JobConflictError, match="my_dedup_id"):
        await case.submit(key="my_dedup_id", on_conflict="reject")
    await first.signal("event")
    assert (await case.drain(first)).status == "COMPLETED"
    assert (await case.submit(key="my_dedup_id", on_conflict="reject")).created


async def test_debouncer(case: WorkflowCase) -> None:
    """tests/test_debouncer.py: calls within the period run the workflow once, with the input of the last call."""

    async def work(value: int) -> int:
        case.ran.append(str(value))
        return value

    case.wf.step(work)
    jobs = []
    for value in (1, 2, 3):
        jobs.append(await case.submit(input={"value": value}, key="key", debounce=10))
        await case.drain(jobs[-1], after=5)
    assert case.ran == []
    assert (await case.drain(jobs[-1], after=5)).output == {"work": 3}
    assert case.ran == ["3"]


async def test_concurrency_cancel_in_progress(case: WorkflowCase) -> None:
    """concurrency_cancel_in_progress: of ten runs of one group the last completes, the others are CANCELLED."""
    case.wf.signal("go")
    jobs = []
    for _ in range(4):
        jobs.append(await case.submit(key="A", on_conflict="cancel_in_progress"))
        await case.drain(jobs[-1])
    await jobs[-1].signal("go")
    await case.drain(jobs[-1])
    assert [(await case.report(job)).status for job in jobs] == ["CANCELED"] * 3 + ["COMPLETED"]


async def test_concurrency_cancel_newest(case: WorkflowCase) -> None:
    """concurrency_cancel_newest: the first run completes; runs that come while it runs do not run."""
    case.wf.signal("go")
    first = await case.submit(key="A", on_conflict="reject")
    for _ in range(3):
        with pytest.raises(JobConflictError):
            await case.submit(key="A", on_conflict="reject")
    await first.signal("go")
    assert (await case.drain(first)).status == "COMPLETED"


async def test_concurrency_group_round_robin(case: WorkflowCase) -> None:
    """concurrency_limit_rr: one run of each group at a time; the others wait for their turn, and all complete."""

    async def work(number: int) -> None:
        case.ran.append(str(number))

    case.wf.signal("go")
    case.wf.step(after=["go"])(work)
    jobs = [await case.submit(input={"number": n}, key=f"group {n % 2}", on_conflict="queue") for n in range(4)]
    await case.drain(jobs[0])
    assert [(await case.report(job)).status for job in jobs] == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    for job in jobs:
        await job.signal("go")
    await case.drain(jobs[0])
    assert [(await case.report(job)).status for job in jobs] == ["COMPLETED"] * 4
    assert sorted(case.ran[:2]) == ["0", "1"]


# Handlers of failure and success (Hatchet).


async def test_on_failure_task(case: WorkflowCase) -> None:
    """on_failure, test_on_failure.py: the run fails with "step1 failed", and on_failure completes."""
    case.step("step1", fails="step1 failed")
    case.steps("on_failure", on_failure=["step1"])
    seen = await case.run()
    assert (seen.status, seen.states) == ("FAILED", {"step1": "failed", "on_failure": "done"})
    assert "step1 failed" in (seen.reason or "")


async def test_on_failure_with_details(case: WorkflowCase) -> None:
    """on_failure, OnFailureWorkflowWithDetails: the handler reads the errors of the failed tasks."""
    case.step("details_step1", fails="step1 failed")
    case.steps("fine")

    async def details_on_failure(ctx: StepContext) -> dict[str, str]:
        return {name: error["message"] for name, error in ctx.errors.items()}

    case.wf.step(on_failure=["details_step1", "fine"], join="any")(details_on_failure)
    job = await case.submit()
    await case.drain(job)
    assert [step.result for step in await job.steps()][-1] == {"details_step1": "step1 failed"}


@pytest.mark.parametrize("failing", ["first", "second", None])
async def test_on_failure_of_a_whole_workflow(case: WorkflowCase, failing: str | None) -> None:
    """on_failure_task: runs once if any task of the workflow fails, and not otherwise."""
    case.step("first", fails=failing == "first")
    case.step("second", fails=failing == "second", after=["first"])
    case.steps("third", after=["second"])
    case.steps("on_failure", on_failure=["first", "second", "third"], join="any")
    await case.run()
    assert case.ran.count("on_failure") == (0 if failing is None else 1)


async def test_on_success_task(case: WorkflowCase) -> None:
    """on_success: runs after all tasks of the workflow."""
    case.steps("first_task")
    case.steps("second_task", after=["first_task"])
    case.steps("third_task", after=["first_task", "second_task"])
    case.steps("fourth_task")
    case.steps("on_success_task", after=["third_task", "fourth_task"])
    await case.run()
    assert (case.ran[-1], len(case.ran)) == ("on_success_task", 5)


# DAGs and conditions (Hatchet).


async def test_dag(case: WorkflowCase) -> None:
    """dag, test_dag.py: step3 adds the results of step1 and step2; step4 runs after step1 and step3."""
    case.step("step1", 4)
    case.step("step2", 5)
    case.compute("step3", lambda one, two: one + two, after=["step1", "step2"])
    case.step("step4", "step4", after=["step1", "step3"])
    job = await case.submit()
    await case.drain(job)
    assert [step.result for step in await job.steps()] == [4, 5, 9, "step4"]


@pytest.mark.parametrize(("number", "expected"), [(60, ("skipped", "done")), (40, ("done", "skipped"))])
async def test_left_and_right_branch(case: WorkflowCase, number: int, expected: tuple[str, str]) -> None:
    """conditions, test_waits: skip_if > 50 and skip_if <= 50: exactly one of the branches runs, and sum after it."""
    case.step("start", number)

    async def side(start: int) -> str:
        return "right_branch" if start > 50 else "left_branch"

    case.wf.decision(branches=["left_branch", "right_branch"], after=["start"])(side)
    case.step("left_branch", 1, after=["side"])
    case.step("right_branch", 2, after=["side"])
    case.compute(
        "sum",
        lambda start, left, right: start + (left or 0) + (right or 0),
        after=["start", "left_branch", "right_branch"],
    )
    seen = await case.run()
    assert (seen.states["left_branch"], seen.states["right_branch"]) == expected
    assert seen.output == {"sum": number + (2 if number > 50 else 1)}


async def test_skip_if_a_parent_condition_holds(case: WorkflowCase) -> None:
    """conditions, test_skip_if_or_group_parent: skip_if is `when` with the opposite condition."""
    case.step("sio_start", {"random_number": 7})
    case.steps(
        "sio_target",
        after=["sio_start"],
        when="not (sio_start.random_number >= 1 or sio_start.random_number > 1000)",
    )
    seen = await case.run()
    assert (seen.status, seen.states["sio_target"]) == ("COMPLETED", "skipped")


def declare_skip_if_sleep(case: WorkflowCase) -> None:
    case.steps("start")
    case.wf.signal("proceed", after=["start"])
    case.wf.sleep("limit", 12, after=["start"])
    case.steps("first", after=["proceed", "limit"], join="any", cancel_rest=True)
    case.steps("target", after=["proceed"])


async def test_skip_if_sleep_skips_when_the_sleep_wins(case: WorkflowCase) -> None:
    """conditions, test_skip_if_sleep_skips_when_sleep_wins."""
    declare_skip_if_sleep(case)
    job = await case.submit()
    await case.drain(job)
    seen = await case.drain(job, after=12)
    assert (seen.status, seen.states["target"]) == ("COMPLETED", "skipped")


async def test_skip_if_sleep_runs_when_the_event_wins(case: WorkflowCase) -> None:
    """conditions, test_skip_if_sleep_runs_when_event_wins."""
    declare_skip_if_sleep(case)
    job = await case.submit()
    await case.drain(job)
    await job.signal("proceed")
    seen = await case.drain(job, after=1)
    assert (seen.status, seen.states["target"], seen.states["limit"]) == ("COMPLETED", "done", "canceled")


@pytest.mark.parametrize(("event", "after"), [(True, 0), (False, 60)])
async def test_wait_for_an_event_or_a_sleep(case: WorkflowCase, event: bool, after: int) -> None:  # noqa: FBT001 - parameters
    """conditions, wait_for_event: or_(SleepCondition(minutes=1), UserEventCondition)."""
    case.steps("start")
    case.wf.sleep("minute", 60, after=["start"])
    case.wf.signal("go", after=["start"])
    case.steps("wait_for_event", after=["minute", "go"], join="any")
    job = await case.submit()
    assert (await case.drain(job)).states["wait_for_event"] == "waiting"
    if event:
        await job.signal("go")
    assert (await case.drain(job, after=after)).states["wait_for_event"] == "done"


async def test_wait_for_or_groups(case: WorkflowCase) -> None:
    """conditions, wait_for_or_groups: sleep 30 s AND (sleep 90 s OR payment)."""
    case.wf.sleep("first", 30)
    case.wf.sleep("second", 90)
    case.wf.signal("payment")
    case.steps("either", after=["second", "payment"], join="any")
    case.steps("target", after=["first", "either"])
    job = await case.submit()
    await job.signal("payment")
    assert (await case.drain(job)).states["target"] == "waiting"
    assert (await case.drain(job, after=30)).states["target"] == "done"


# Fan-out, cancellation, timeouts, pauses (Hatchet).


async def test_fanout(case: WorkflowCase) -> None:
    """fanout, test_fanout.py: the parent spawns n children and collects their results."""

    async def spawn(item: int) -> str:
        return f"child {item}"

    case.wf.map(over_input="n")(spawn)
    assert (await case.run(input={"n": [0, 1]})).output == {"spawn": ["child 0", "child 1"]}


async def test_fanout_with_one_failed_child(case: WorkflowCase) -> None:
    """return_exceptions: the other children complete, and their results can be used; here strategy="any"."""

    async def child(item: int) -> int:
        if item % 2:
            raise ValueError("error in task")
        return item

    case.wf.map(over_input="numbers", strategy="any", max_tries=1)(child)
    seen = await case.run(input={"numbers": [0, 1, 2, 3]})
    assert (seen.status, seen.output) == ("COMPLETED", {"child": [0, 2]})


async def test_child_workflows_in_parallel(case: WorkflowCase) -> None:
    """child: one workflow spawned several times, with inputs of its own."""
    child = case.app.workflow("child", output="echo")

    async def echo(number: int) -> int:
        return number

    child.step(echo)
    for number in range(3):
        case.wf.child(f"child_{number}", child, input={"number": number})
    case.compute("total", lambda *numbers: sum(numbers), after=["child_0", "child_1", "child_2"])
    assert (await case.run()).output == {"total": 3}


async def test_cancellation(live_case: WorkflowCase) -> None:
    """cancellation, test_cancellation.py: a canceled run is CANCELLED, and its task was told."""
    started = asyncio.Event()

    async def check_flag(ctx: TaskContext) -> str:
        started.set()
        while not ctx.cancelled:
            await asyncio.sleep(0.01)
        live_case.ran.append("told")
        return "stopped"

    live_case.wf.step(check_flag)
    live_case.steps("never", after=["check_flag"])
    async with live_case.processes():
        job = await live_case.submit()
        await asyncio.wait_for(started.wait(), 30)
        await job.cancel()
        with pytest.raises(JobFailedError, match="was canceled"):
            await job.wait(30)
    assert ((await live_case.report(job)).status, live_case.ran) == ("CANCELED", ["told"])


async def test_execution_timeout(live_case: WorkflowCase) -> None:
    """timeout, ExecutionTimeout: a task that takes longer than its timeout fails."""

    async def timeout_task() -> None:
        await asyncio.sleep(30)

    live_case.wf.step(timeout=0.2, max_tries=1)(timeout_task)
    async with live_case.processes():
        job = await live_case.submit()
        with pytest.raises(JobFailedError, match="timeout_task failed"):
            await job.wait(30)


async def test_runs_of_a_paused_workflow_wait(case: WorkflowCase) -> None:
    """workflow_pause: a paused workflow starts nothing; resumed, it continues."""
    wf = case.app.workflow("paused", namespace="pausable")
    case.step("only", wf=wf)
    await case.app.open()
    await case.app.pause("pausable", "maintenance")
    job = await case.submit("paused")
    await case.drain(job)
    assert case.ran == []
    await case.app.resume("pausable")
    assert ((await case.drain(job)).status, case.ran) == ("COMPLETED", ["only"])


async def test_delayed_run(case: WorkflowCase) -> None:
    """delayed, scheduled: the work starts at the time that the input names."""
    case.wf.sleep("until", until="at")
    case.steps("work", after=["until"])
    at = case.clock() + timedelta(hours=5)
    job = await case.submit(input={"at": at.isoformat()})
    await case.drain(job, after=timedelta(hours=4, minutes=59))
    assert case.ran == []
    await case.drain(job, after=60)
    assert case.ran == ["work"]
