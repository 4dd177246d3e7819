"""Temporal's samples as tests: signals, timers, sagas, child workflows, cancellation, retries.

The expectations are those of temporalio/samples-python (and its tests) and, where the name is in camel case, of
temporalio/samples-java (core/src/main/java/io/temporal/samples). Each docstring names the sample. An activity is a
step; a workflow that waits inside a function is a signal, approval or sleep step here.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from interlock import Backoff, StepContext
from interlock.errors import InterlockError, JobFailedError
from interlock.testing import drain

if TYPE_CHECKING:
    from interlock import JobHandle
    from workflow_case import WorkflowCase

pytestmark = pytest.mark.store


# Signals


async def test_signal_workflow(case: WorkflowCase) -> None:
    """hello/hello_signal.py, tests/hello/hello_signal_test.py: RUNNING until the exit signal, then both greetings."""
    case.wf.signal("first", signal="submit_greeting")
    case.wf.signal("second", signal="submit_greeting", after=["first"])
    case.wf.signal("exit")
    case.compute("greetings", lambda *names: [f"Hello, {name}" for name in names[:2]], ["first", "second", "exit"])
    job = await case.submit()
    await job.signal("submit_greeting", "user1")
    await job.signal("submit_greeting", "user2")
    assert (await case.drain(job)).status == "RUNNING"
    await job.signal("exit")
    seen = await case.drain(job)
    assert (seen.status, seen.output) == ("COMPLETED", {"greetings": ["Hello, user1", "Hello, user2"]})


async def test_signal_with_start(case: WorkflowCase) -> None:
    """HelloSignalWithStartAndWorkflowInit: a signal that is sent before anything runs is not lost."""
    case.steps("prepare")
    case.wf.signal("name", after=["prepare"])
    case.compute("greet", lambda name: f"Hello, {name}", after=["name"])
    job = await case.submit()
    await job.signal("name", "early bird")  # no worker has seen the job yet
    assert (await case.drain(job)).output == {"greet": "Hello, early bird"}


async def test_signal_after_the_workflow_waits(case: WorkflowCase) -> None:
    """hello/hello_signal.py: a waiting workflow goes on when the signal arrives, however late."""
    case.wf.signal("name")
    case.compute("greet", lambda name: f"Hello, {name}", after=["name"])
    job = await case.submit()
    assert (await case.drain(job, after=timedelta(days=400))).states == {"name": "waiting", "greet": "waiting"}
    await job.signal("name", "patience")
    assert (await case.drain(job)).output == {"greet": "Hello, patience"}


async def test_signal_to_a_closed_workflow_is_refused(case: WorkflowCase) -> None:
    """A signal to a closed workflow execution is an error (WorkflowNotFound in Temporal)."""
    case.wf.signal("name")
    job = await case.submit()
    await case.drain(job)
    await job.cancel()
    await case.drain(job)
    with pytest.raises(InterlockError, match="CANCELED"):
        await job.signal("name")


# Timers


async def test_sleep_for_days(case: WorkflowCase) -> None:
    """sleep_for_days: the timer of 30 days fires after 30 days and not before."""
    case.steps("send_email")
    case.wf.sleep("wait", timedelta(days=30), after=["send_email"])
    case.steps("next_email", after=["wait"])
    job = await case.submit()
    await case.drain(job)
    assert (await case.drain(job, after=timedelta(days=29, hours=23))).states["wait"] == "waiting"
    assert (await case.drain(job, after=timedelta(hours=1))).status == "COMPLETED"
    assert case.ran == ["send_email", "next_email"]


def declare_signal_or_timer(case: WorkflowCase) -> None:
    case.wf.signal("complete")
    case.wf.sleep("timer", timedelta(days=30))
    case.steps("done", after=["complete", "timer"], join="any", cancel_rest=True)


async def test_signal_wins_against_the_timer(case: WorkflowCase) -> None:
    """sleep_for_days: workflow.wait([sleep, condition], FIRST_COMPLETED), and the signal comes first."""
    declare_signal_or_timer(case)
    job = await case.submit()
    await case.drain(job)
    await job.signal("complete")
    seen = await case.drain(job, after=timedelta(days=1))
    assert (seen.status, seen.states) == ("COMPLETED", {"complete": "done", "timer": "canceled", "done": "done"})


async def test_timer_wins_against_the_signal(case: WorkflowCase) -> None:
    """HelloSignalWithTimer: the timer fires first, and the workflow goes on without the signal."""
    declare_signal_or_timer(case)
    job = await case.submit()
    await case.drain(job)
    seen = await case.drain(job, after=timedelta(days=30))
    assert (seen.status, seen.states) == ("COMPLETED", {"complete": "canceled", "timer": "done", "done": "done"})


@pytest.mark.parametrize(("answered", "greeting"), [(True, "Hello, Ada!"), (False, "Hello, World!")])
async def test_await_with_timeout(case: WorkflowCase, answered: bool, greeting: str) -> None:  # noqa: FBT001 - a parameter
    """HelloAwait: Workflow.await(Duration.ofSeconds(10), condition) is false when the signal did not come in time."""
    case.wf.signal("name", timeout=10)
    case.step("default_name", "World", recovers=["name"])
    case.compute("greet", lambda name: f"Hello, {name}!", after=["name"])
    job = await case.submit()
    await case.drain(job)
    if answered:
        await job.signal("name", "Ada")
    seen = await case.drain(job, after=10)
    results = {step.step: step.result for step in await job.steps()}
    assert (seen.status, results["greet"]) == ("COMPLETED", greeting)


async def test_await_with_timeout_that_nobody_handles(case: WorkflowCase) -> None:
    """A condition that times out raises asyncio.TimeoutError in the workflow, which fails it."""
    case.wf.signal("name", timeout=10)
    case.steps("greet", after=["name"])
    job = await case.submit()
    await case.drain(job)
    seen = await case.drain(job, after=10)
    assert (seen.status, seen.states) == ("FAILED", {"name": "failed", "greet": "upstream failed"})


async def test_workflow_run_timeout(case: WorkflowCase) -> None:
    """TerminateWorkflow, run timeout: a workflow that takes too long is closed, and later steps do not run."""
    case.wf.signal("name")
    case.steps("greet", after=["name"])
    job = await case.submit(timeout=60)
    await case.drain(job)
    seen = await case.drain(job, after=61)
    assert (seen.status, case.ran) == ("CANCELED", [])


async def test_timers_and_signals_need_no_worker_slot(live_case: WorkflowCase) -> None:
    """Timers, signals and child workflows are the server's work: a worker without a free slot does not delay them."""
    started, stop = asyncio.Event(), asyncio.Event()

    async def busy() -> None:
        started.set()
        await stop.wait()

    child = live_case.app.workflow("child")
    child.sleep("child_timer", 0.01)
    live_case.wf.step(busy)
    live_case.wf.sleep("timer", 0.01)
    live_case.wf.signal("go", after=["timer"])
    live_case.wf.approval("release", after=["go"])
    live_case.wf.child("run_child", child, after=["release"])
    live_case.wf.sleep("end", 0, after=["run_child"])
    async with live_case.processes(concurrency=1):
        job = await live_case.submit()
        await asyncio.wait_for(started.wait(), 30)
        await job.signal("go")
        await job.approve("release")
        async with asyncio.timeout(30):
            while (await live_case.report(job)).states["end"] != "done":
                await asyncio.sleep(0.02)
        assert (await live_case.report(job)).states["busy"] == "running"
        stop.set()
        await job.wait(30)


# Activities: parallel, choice, errors, retries, polling


async def test_parallel_activities(case: WorkflowCase) -> None:
    """hello/hello_parallel_activity.py: asyncio.gather of five activities."""
    users = [f"user{number}" for number in range(1, 6)]
    for user in users:
        case.step(user, f"Hello, {user}!")
    case.compute("results", lambda *greetings: sorted(greetings), after=users)
    assert (await case.run()).output == {"results": [f"Hello, {user}!" for user in users]}


async def test_parallel_activities_run_at_the_same_time(live_case: WorkflowCase) -> None:
    """hello/hello_parallel_activity.py: "Run 5 activities at the same time"; each waits here for the other four."""
    together = asyncio.Barrier(5)
    for number in range(5):

        async def wait() -> None:
            await together.wait()

        live_case.wf.step(name=f"user{number}", timeout=30)(wait)
    async with live_case.processes():
        job = await live_case.submit()
        await job.wait(30)


@pytest.mark.parametrize("fruits", [["apples"], ["apples", "cherries"], []])
async def test_activity_choice(case: WorkflowCase, fruits: list[str]) -> None:
    """hello/hello_activity_choice.py, HelloActivityExclusiveChoice: the order decides which activities run."""

    async def choose(order: list[str]) -> list[str]:
        return [f"order_{fruit}" for fruit in order]

    branches = ["order_apples", "order_bananas", "order_cherries", "order_oranges"]
    case.wf.decision(branches=branches)(choose)
    case.steps(*branches, after=["choose"])
    case.steps("report", after=branches)
    seen = await case.run(input={"order": fruits})
    assert case.ran == [*(f"order_{fruit}" for fruit in fruits), *(["report"] if fruits else [])]
    assert seen.status == "COMPLETED"


async def test_exception_after_the_last_attempt(case: WorkflowCase) -> None:
    """hello/hello_exception.py: RetryPolicy(maximum_attempts=2), then the workflow fails with the activity's error."""

    async def compose_greeting() -> None:
        raise RuntimeError("Greeting exception: Hello, World!")

    case.wf.step(max_tries=2, backoff=Backoff.linear(base=1))(compose_greeting)
    job = await case.submit()
    assert (await case.drain(job)).states == {"compose_greeting": "pending"}
    seen = await case.drain(job, after=60)
    assert ((await job.steps())[0].attempt, seen.status) == (2, "FAILED")
    with pytest.raises(JobFailedError, match="Greeting exception: Hello, World!"):
        await job.wait(1)


async def test_activity_retry(case: WorkflowCase) -> None:
    """hello/hello_activity_retry.py: fails three times and succeeds at the fourth attempt."""

    async def compose_greeting(ctx: StepContext) -> str:
        if ctx.attempt < 4:
            raise RuntimeError("Intentional failure")
        return "Hello, World!"

    case.wf.step(max_tries=10)(compose_greeting)
    job = await case.submit()
    for _ in range(3):
        await case.drain(job)
        case.clock.advance(timedelta(hours=1))
    assert (await case.drain(job)).output == {"compose_greeting": "Hello, World!"}


async def test_non_retryable_error(case: WorkflowCase) -> None:
    """ApplicationError(non_retryable=True): one attempt, whatever the retry policy says."""
    case.step("charge", fails="card declined", max_tries=10)
    seen = await case.run()
    assert (seen.status, case.ran) == ("FAILED", ["charge"])


async def test_infrequent_polling(case: WorkflowCase) -> None:
    """polling/infrequent: an activity that polls once a minute by its retry policy (coefficient 1, interval 60 s)."""
    polled_at = []

    async def poll() -> str:
        polled_at.append(case.clock())
        if len(polled_at) < 5:
            raise RuntimeError("service is down")
        return "Hello, World!"

    case.wf.step(max_tries=100, backoff=lambda _: 60.0)(poll)
    job = await case.submit()
    await case.drain(job)
    for _ in range(4):
        await case.drain(job, after=59)
        await case.drain(job, after=1)
    assert (await case.report(job)).output == {"poll": "Hello, World!"}
    assert [(at - polled_at[0]).total_seconds() for at in polled_at] == [0, 60, 120, 180, 240]


async def test_periodic_polling(case: WorkflowCase) -> None:
    """polling/periodic_sequence: a child workflow polls and waits, over and over, until the service answers."""
    poll_once = case.app.workflow("poll_once", output={"answer": "poll"})
    polled_at = []

    async def poll() -> str | None:
        polled_at.append(case.clock())
        return "Hello, World!" if len(polled_at) == 3 else None

    poll_once.step(poll)
    poll_once.sleep("pause", 10, after=["poll"], when="poll == null")
    case.wf.repeat("polls", poll_once, until="output.answer != null", max_repeats=100)
    job = await case.submit()
    for _ in range(3):
        await case.drain(job)
        case.clock.advance(10)
    seen = await case.report(job)
    assert (seen.status, seen.output) == ("COMPLETED", {"polls": {"answer": "Hello, World!"}})
    assert [(at - polled_at[0]).total_seconds() for at in polled_at] == [0, 10, 20]


async def test_dsl_sequence_and_parallel(case: WorkflowCase) -> None:
    """dsl/workflow2.yaml: a sequence, then two parallel sequences, then one more activity."""
    case.steps("activity1")
    case.steps("activity2", "activity3", after=["activity1"])
    case.steps("activity2b", after=["activity2"])
    case.steps("activity3b", after=["activity3"])
    case.steps("activity4", after=["activity2b", "activity3b"])
    await case.run()
    assert (case.ran[0], case.ran[-1], len(case.ran)) == ("activity1", "activity4", 6)
    assert case.ran.index("activity2") < case.ran.index("activity2b")
    assert case.ran.index("activity3") < case.ran.index("activity3b")


# Approvals


@pytest.mark.parametrize(("answer", "status"), [(True, "COMPLETED"), (False, "FAILED"), (None, "FAILED")])
async def test_approval(case: WorkflowCase, answer: bool | None, status: str) -> None:  # noqa: FBT001 - a parameter
    """message_passing/introduction: the result is released after `approve`; refused or late, it is not."""
    case.wf.approval("approve", timeout=timedelta(days=1))
    case.steps("release", after=["approve"])
    job = await case.submit()
    await case.drain(job)
    if answer is not None:
        await job.approve("approve", answer, by="ada")
    seen = await case.drain(job, after=timedelta(days=1))
    assert (seen.status, "release" in case.ran) == (status, status == "COMPLETED")


# Sagas


def declare_trip(case: WorkflowCase, **flight: Any) -> None:
    case.step("reserve_car", "car-1", undo="cancel car")
    case.step("book_hotel", "hotel-1", undo="cancel hotel", after=["reserve_car"])
    case.step("book_flight", "flight-1", undo="cancel flight", after=["book_hotel"], **flight)


async def test_trip_booking_saga(case: WorkflowCase) -> None:
    """bookingsaga, bookingsyncsaga: the flight fails; hotel and car are canceled, in reverse order."""
    declare_trip(case, fails="Flight booking did not work")
    job = await case.submit()
    seen = await case.drain(job)
    assert seen.status == "FAILED"
    assert case.ran == ["reserve_car", "book_hotel", "book_flight", "cancel hotel", "cancel car"]
    with pytest.raises(JobFailedError, match="Flight booking did not work"):
        await job.wait(1)


async def test_trip_booking_without_failure(case: WorkflowCase) -> None:
    """bookingsaga: a booked trip is not compensated."""
    declare_trip(case)
    seen = await case.run()
    assert (seen.status, case.ran) == ("COMPLETED", ["reserve_car", "book_hotel", "book_flight"])


async def test_saga_compensates_with_the_result_of_the_activity(case: WorkflowCase) -> None:
    """bookingsyncsaga: cancelHotel gets the reservation id that bookHotel returned."""

    async def book() -> str:
        return "hotel-7"

    async def cancel(result: str) -> None:
        case.ran.append(f"cancel {result}")

    case.wf.step(compensate=cancel)(book)
    case.step("fly", fails=True, after=["book"])
    await case.run()
    assert case.ran == ["fly", "cancel hotel-7"]


async def test_saga_with_an_error_handler(case: WorkflowCase) -> None:
    """bookingsaga: catching the failure to send a notification does not switch the compensation off."""
    declare_trip(case, fails="Flight booking did not work")
    case.steps("notify", on_failure=["book_flight"])
    seen = await case.run()
    assert (seen.status, case.ran[-3:]) == ("FAILED", ["notify", "cancel hotel", "cancel car"])


async def test_saga_in_parallel_compensates_in_reverse_order_of_completion(case: WorkflowCase) -> None:
    """Saga without parallelCompensation: the last one that completed is undone first."""
    case.wf.signal("hotel_answer")
    case.step("hotel", undo="cancel hotel", after=["hotel_answer"])
    case.wf.signal("car_answer")
    case.step("car", undo="cancel car", after=["car_answer"])
    case.step("pay", fails=True, after=["hotel", "car"])
    job = await case.submit()
    for name in ("car_answer", "hotel_answer"):
        await job.signal(name)
        await case.drain(job, after=1)
    assert case.ran == ["car", "hotel", "pay", "cancel hotel", "cancel car"]


async def test_saga_continues_after_a_failed_compensation(case: WorkflowCase) -> None:
    """Saga.Options.continueWithError: the other compensations run, and the failed one is reported."""

    async def cancel_hotel() -> None:
        case.ran.append("cancel hotel")
        raise RuntimeError("the hotel does not answer")

    case.app.task(name="cancel_hotel", max_tries=1)(cancel_hotel)
    case.step("car", undo="cancel car")
    case.step("hotel", after=["car"], compensate="cancel_hotel")
    case.step("flight", fails=True, after=["hotel"])
    job = await case.submit()
    seen = await case.drain(job)
    assert (seen.status, case.ran[-2:]) == ("FAILED", ["cancel hotel", "cancel car"])
    assert "the hotel does not answer" in str((await job.status()).error)


async def test_saga_of_a_canceled_workflow(case: WorkflowCase) -> None:
    """bookingsaga: "Ensure that compensations are executed even if the workflow is canceled"."""
    case.step("car", undo="cancel car")
    case.step("hotel", undo="cancel hotel", after=["car"])
    case.wf.signal("confirm", after=["hotel"])
    job = await case.submit()
    await case.drain(job)
    await job.cancel()
    seen = await case.drain(job)
    assert (seen.status, case.ran) == ("CANCELED", ["car", "hotel", "cancel hotel", "cancel car"])


async def test_saga_that_compensates_is_not_canceled(case: WorkflowCase) -> None:
    """bookingsaga: the compensation runs in a detached scope, which a cancellation of the workflow does not reach."""
    declare_trip(case, fails="Flight booking did not work")
    job = await case.submit()
    while "cancel hotel" not in case.ran:
        await drain(case.app, limit=1)
    assert not await job.cancel()
    seen = await case.drain(job)
    assert (seen.status, case.ran[-2:]) == ("FAILED", ["cancel hotel", "cancel car"])


async def test_saga_compensates_what_replaced_a_failed_step(case: WorkflowCase) -> None:
    """A saga adds the compensation of whatever was done: here of the step that recovered the failed one."""
    case.step("book_flight", fails=True, undo="cancel flight")
    case.step("book_train", undo="cancel train", recovers=["book_flight"])
    case.step("book_hotel", undo="cancel hotel", after=["book_flight"])
    case.step("pay", fails=True, after=["book_hotel"])
    seen = await case.run()
    assert (seen.status, case.ran[-2:]) == ("FAILED", ["cancel hotel", "cancel train"])


async def test_money_transfer(case: WorkflowCase) -> None:
    """moneytransfer: withdraw, then deposit; a deposit that fails refunds, and a handled failure does not."""
    case.step("withdraw", undo="refund")
    case.step("deposit", fails="account closed", after=["withdraw"])
    case.steps("deposit_elsewhere", recovers=["deposit"])
    case.steps("receipt", after=["deposit"])
    seen = await case.run()
    assert (seen.status, case.ran) == ("COMPLETED", ["withdraw", "deposit", "deposit_elsewhere", "receipt"])


# Child workflows


def declare_child(case: WorkflowCase, *, fails: bool = False) -> None:
    child = case.app.workflow("ComposeGreeting", output="compose")

    async def compose(greeting: str, name: str) -> str:
        if fails:
            raise ValueError("no greeting")
        return f"{greeting}, {name}!"

    child.step(max_tries=1)(compose)


async def test_child_workflow(case: WorkflowCase) -> None:
    """hello/hello_child_workflow.py: the parent returns "Hello, World!" of its child."""
    declare_child(case)
    case.wf.child("greet", "ComposeGreeting", input={"greeting": "Hello", "name": "input.name"})
    assert (await case.run(input={"name": "World"})).output == {"greet": "Hello, World!"}


async def test_failure_of_a_child_workflow(case: WorkflowCase) -> None:
    """ChildWorkflowError: the failure of the child is that of the parent, unless the parent handles it."""
    declare_child(case, fails=True)
    case.wf.child("greet", "ComposeGreeting", input={"greeting": "Hello", "name": "World"})
    seen = await case.run()
    assert (seen.status, seen.states) == ("FAILED", {"greet": "failed"})
    assert "no greeting" in (seen.reason or "")


async def test_failure_of_a_child_workflow_that_the_parent_handles(case: WorkflowCase) -> None:
    """try / except ChildWorkflowError in the parent."""
    declare_child(case, fails=True)
    case.wf.child("greet", "ComposeGreeting", input={"greeting": "Hello", "name": "World"})
    case.step("apologize", "Sorry", recovers=["greet"])
    case.compute("answer", lambda greeting: greeting, after=["greet"])
    seen = await case.run()
    assert (seen.status, seen.output["answer"]) == ("COMPLETED", "Sorry")


async def find_child(case: WorkflowCase, parent: JobHandle) -> JobHandle:
    (found,) = await case.app.find_jobs(parent=parent)
    return case.app.job(found.id)


async def test_async_child_outlives_its_parent(case: WorkflowCase) -> None:
    """asyncchild, ParentClosePolicy.ABANDON: the parent completes, and the child goes on."""
    child = case.app.workflow("child")
    child.signal("go")
    case.wf.child("start", child, wait=False)
    job = await case.submit()
    assert (await case.drain(job)).status == "COMPLETED"
    started = await find_child(case, job)
    assert (await case.report(started)).status == "RUNNING"
    await started.signal("go")
    assert (await case.drain(started)).status == "COMPLETED"


async def test_async_child_is_canceled_with_its_parent(case: WorkflowCase) -> None:
    """asyncchild, ParentClosePolicy.REQUEST_CANCEL: canceling a parent that still runs cancels the child."""
    child = case.app.workflow("child")
    child.signal("never")
    case.wf.child("start", child, wait=False)
    case.wf.signal("stay", after=["start"])
    job = await case.submit()
    await case.drain(job)
    await job.cancel()
    assert (await case.drain(job)).status == "CANCELED"
    assert (await case.report(await find_child(case, job))).status == "CANCELED"


async def test_cancellation_reaches_the_child_first(case: WorkflowCase) -> None:
    """Cancellation propagates: the child is canceled and compensated before the parent compensates and is CANCELED."""
    child = case.app.workflow("child")
    case.step("child_step", undo="undo child_step", wf=child)
    child.signal("never", after=["child_step"])
    case.step("parent_step", undo="undo parent_step")
    case.wf.child("run_child", child, after=["parent_step"])
    job = await case.submit()
    await case.drain(job)
    started = await find_child(case, job)
    await job.cancel()
    seen = await case.drain(job)
    assert case.ran == ["parent_step", "child_step", "undo child_step", "undo parent_step"]
    assert (seen.status, (await case.report(started)).status) == ("CANCELED", "CANCELED")
    ended = [(await each.status()).completed_at for each in (started, job)]
    assert ended == sorted(ended, key=str)


async def test_canceled_child_fails_its_parent(case: WorkflowCase) -> None:
    """ChildWorkflowError caused by CancelledError: the parent fails when its child is canceled from outside."""
    child = case.app.workflow("child")
    child.signal("never")
    case.step("before", undo="undo before")
    case.wf.child("run_child", child, after=["before"])
    job = await case.submit()
    await case.drain(job)
    await (await find_child(case, job)).cancel()
    seen = await case.drain(job)
    assert (seen.status, seen.states["run_child"], case.ran) == ("FAILED", "failed", ["before", "undo before"])


@pytest.mark.parametrize("tick", [0.001, 0])
async def test_completed_child_is_compensated_with_its_parent(case: WorkflowCase, tick: float) -> None:
    """A saga over child workflows: what the child did is undone when the parent fails later, in reverse order."""
    case.tick = tick
    child = case.app.workflow("child")
    case.step("c1", undo="undo c1", wf=child)
    case.step("c2", undo="undo c2", wf=child, after=["c1"])
    case.step("first", undo="undo first")
    case.wf.child("run_child", child, after=["first"])
    case.step("third", undo="undo third", after=["run_child"])
    case.step("last", fails=True, after=["third"])
    seen = await case.run()
    assert seen.status == "FAILED"
    assert case.ran[-4:] == ["undo third", "undo c2", "undo c1", "undo first"]


# Cancellation


async def test_cancel_workflow_with_cleanup(live_case: WorkflowCase) -> None:
    """hello/hello_cancellation.py: the running activity is canceled, the cleanup runs, the status is CANCELED."""
    interrupted = asyncio.Event()
    running = asyncio.Event()

    async def never_complete() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            live_case.ran.append("interrupted")
            interrupted.set()

    live_case.step("begin", undo="cleanup")
    live_case.wf.step(after=["begin"])(never_complete)
    async with live_case.processes():
        job = await live_case.submit()
        await asyncio.wait_for(running.wait(), 30)
        assert await job.cancel()
        with pytest.raises(JobFailedError, match="was canceled"):
            await job.wait(30)
    assert (await live_case.report(job)).status == "CANCELED"
    assert live_case.ran == ["begin", "interrupted", "cleanup"]


async def test_cancellation_scope(live_case: WorkflowCase) -> None:
    """HelloCancellationScope: greetings in five languages; the first one that completes cancels the others."""
    languages = ["english", "french", "spanish", "portuguese", "german"]
    stopped = []

    def greet_in(language: str) -> Any:
        async def greet() -> str:
            if language != "spanish":
                try:
                    await asyncio.Event().wait()
                finally:
                    stopped.append(language)
            return "Hola, World!"

        return greet

    for language in languages:
        live_case.wf.step(name=language)(greet_in(language))
    live_case.compute("first", lambda *found: [each for each in found if each], languages, join="any", cancel_rest=True)
    async with live_case.processes():
        job = await live_case.submit()
        assert (await job.wait(30))["first"] == ["Hola, World!"]
    seen = await live_case.report(job)
    others = {language for language in languages if language != "spanish"}
    assert {name for name, state in seen.states.items() if state == "canceled"} == others
    assert (seen.status, set(stopped) <= others) == ("COMPLETED", True)


async def test_cancellation_scope_with_a_child(case: WorkflowCase) -> None:
    """HelloCancellationScope with a child workflow in the scope: it is canceled and compensated, the parent goes on."""
    child = case.app.workflow("child")
    case.step("child_step", undo="undo child_step", wf=child)
    child.signal("never", after=["child_step"])
    case.wf.child("run_child", child)
    case.wf.signal("enough")
    case.steps("end", after=["run_child", "enough"], join="any", cancel_rest=True)
    job = await case.submit()
    await case.drain(job)
    await job.signal("enough")
    seen = await case.drain(job)
    assert (seen.status, seen.states["run_child"]) == ("COMPLETED", "canceled")
    assert (await case.report(await find_child(case, job))).status == "CANCELED"
    assert "undo child_step" in case.ran


async def test_cancel_of_one_activity(case: WorkflowCase) -> None:
    """A canceled activity raises in the workflow: it counts as failed, and what does not depend on it goes on."""
    case.wf.signal("activity")
    case.steps("then", after=["activity"])
    case.steps("other")
    case.steps("cleanup", always=["activity"])
    job = await case.submit()
    await case.drain(job)
    await case.cancel_step(job, "activity")
    seen = await case.drain(job)
    assert (seen.status, seen.states["then"], seen.states["other"]) == ("FAILED", "upstream failed", "done")
    assert seen.states["cleanup"] == "done"


# Identity, versions, limits, search


async def test_workflow_id_is_used_once(case: WorkflowCase) -> None:
    """WorkflowIDConflictPolicy.USE_EXISTING: starting the same id again returns the running workflow."""
    case.wf.signal("go")
    first = await case.submit(request_id="hello-id")
    again = await case.submit(request_id="hello-id")
    assert (again.id, first.created, again.created) == (first.id, True, False)


async def test_running_workflow_keeps_its_version(case: WorkflowCase) -> None:
    """patching: a workflow that started with the old code finishes with the old code."""
    old = case.app.workflow("patched", version="old")
    new = case.app.workflow("patched", version="new")
    old.signal("go")
    case.step("pre_patch", wf=old, after=["go"])
    new.signal("go")
    case.step("post_patch", wf=new, after=["go"])
    before = await case.submit("patched", version="old")
    after = await case.submit("patched", version="new")
    for job in (before, after):
        await job.signal("go")
        assert (await case.drain(job)).status == "COMPLETED"
    assert case.ran == ["pre_patch", "post_patch"]


async def test_batch_sliding_window(live_case: WorkflowCase) -> None:
    """batch_sliding_window: all records are processed, never more than the size of the window at once."""
    running, most = 0, 0

    async def process(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return item

    live_case.wf.map(over_input="records")(process)
    async with live_case.processes():
        job = await live_case.submit(input={"records": list(range(12))}, worker_count=3)
        assert await job.wait(60) == {"process": list(range(12))}
    assert 1 <= most <= 3


async def test_mutex(live_case: WorkflowCase) -> None:
    """samples-typescript mutex: workflows that need the same resource use it one after the other."""
    holders: list[str] = []
    live_case.app.limit("resource", max_running=1)

    async def use(name: str) -> None:
        holders.append(f"{name} locks")
        await asyncio.sleep(0.01)
        holders.append(f"{name} unlocks")

    live_case.wf.step(limit_key="resource")(use)
    async with live_case.processes():
        jobs = [await live_case.submit(input={"name": name}) for name in ("a", "b", "c")]
        for job in jobs:
            await job.wait(60)
    assert len(holders) == 6
    assert all(lock.split()[0] == unlock.split()[0] for lock, unlock in zip(holders[::2], holders[1::2], strict=True))


async def test_search_attributes(case: WorkflowCase) -> None:
    """hello/hello_search_attributes.py: workflows are found by their attributes."""
    case.steps("only")
    await case.submit(attributes={"customer": 7})
    wanted = await case.submit(attributes={"customer": 8})
    assert [found.id for found in await case.app.find_jobs(attributes={"customer": 8})] == [wanted.id]
