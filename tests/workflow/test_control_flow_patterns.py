"""The workflow control-flow patterns (WCP) of van der Aalst, ter Hofstede, Russell and others as tests.

The definitions are those of "Workflow Control-Flow Patterns: A Revised View" (2006) and workflowpatterns.com; each
docstring names the pattern. Not expressible in a DAG of steps: arbitrary cycles (WCP10), thread split and merge (WCP41,
42), and multiple instances whose number grows while they run (WCP15). A signal step stands for a task that is not done
yet.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from interlock import PermanentError

if TYPE_CHECKING:
    from workflow_case import WorkflowCase

pytestmark = pytest.mark.store


# Basic control flow


async def test_wcp1_sequence(case: WorkflowCase) -> None:
    """WCP1: a task is enabled after the completion of a preceding task."""
    case.steps("a")
    case.steps("b", after=["a"])
    case.steps("c", after=["b"])
    await case.run()
    assert case.ran == ["a", "b", "c"]


async def test_wcp2_parallel_split(case: WorkflowCase) -> None:
    """WCP2: one thread of control splits into several that execute concurrently."""
    case.steps("a")
    case.wf.signal("b", after=["a"])
    case.steps("c", after=["a"])
    job = await case.submit()
    seen = await case.drain(job)
    assert (seen.states["b"], seen.states["c"]) == ("waiting", "done")  # c does not wait for b


async def test_wcp3_synchronization(case: WorkflowCase) -> None:
    """WCP3: the subsequent task starts when all incoming branches have completed."""
    case.wf.signal("b")
    case.wf.signal("c")
    case.steps("d", after=["b", "c"])
    job = await case.submit()
    for name, state in (("b", "waiting"), ("c", "done")):
        await job.signal(name)
        assert (await case.drain(job)).states["d"] == state


@pytest.mark.parametrize("chosen", ["b", "c"])
async def test_wcp4_exclusive_choice_and_wcp5_simple_merge(case: WorkflowCase, chosen: str) -> None:
    """WCP4, WCP5: one of several branches is chosen; where they merge, no synchronization is needed."""
    case.decision("a", chosen, ["b", "c"])
    case.steps("b", "c", after=["a"])
    case.steps("d", after=["b", "c"])
    seen = await case.run()
    assert (seen.status, case.ran) == ("COMPLETED", ["a", chosen, "d"])


# Advanced branching and synchronization


@pytest.mark.parametrize("chosen", [["b"], ["b", "c"], ["b", "c", "d"]])
async def test_wcp6_multi_choice_and_wcp7_synchronizing_merge(case: WorkflowCase, chosen: list[str]) -> None:
    """WCP6, WCP7: one or more branches are chosen; the merge waits for all that were chosen, and for no other."""
    case.decision("a", chosen, ["b", "c", "d"])
    for name in ("b", "c", "d"):
        case.wf.signal(name, after=["a"])
    case.steps("merge", after=["b", "c", "d"])
    job = await case.submit()
    for name in chosen:
        assert (await case.drain(job)).states["merge"] == "waiting"
        await job.signal(name)
    seen = await case.drain(job)
    assert (seen.status, seen.states["merge"]) == ("COMPLETED", "done")


async def test_wcp8_multi_merge(case: WorkflowCase) -> None:
    """WCP8: each branch starts the subsequent task once; here the task is declared once per branch."""
    case.steps("b", "c")
    case.steps("d_after_b", after=["b"])
    case.steps("d_after_c", after=["c"])
    await case.run()
    assert sorted(case.ran) == ["b", "c", "d_after_b", "d_after_c"]


async def test_wcp9_structured_discriminator(case: WorkflowCase) -> None:
    """WCP9: the first branch that completes starts the subsequent task; the others do not start it again."""
    case.wf.signal("b")
    case.wf.signal("c")
    case.steps("d", after=["b", "c"], join="any")
    job = await case.submit()
    for name in ("c", "b"):
        await job.signal(name)
        await case.drain(job)
    assert ((await case.report(job)).status, case.ran) == ("COMPLETED", ["d"])


async def test_wcp29_cancelling_discriminator(case: WorkflowCase) -> None:
    """WCP29: as the discriminator, and the remaining branches are canceled."""
    case.wf.signal("b")
    case.steps("after_b", after=["b"])
    case.wf.signal("c")
    case.steps("d", after=["after_b", "c"], join="any", cancel_rest=True)
    job = await case.submit()
    await job.signal("c")
    seen = await case.drain(job)
    assert seen.states == {"b": "waiting", "after_b": "canceled", "c": "done", "d": "done"}
    await job.signal("b")  # only the dependencies themselves are canceled, not what leads to them
    assert (await case.drain(job)).status == "COMPLETED"


async def test_wcp29_cancelling_discriminator_and_handlers(case: WorkflowCase) -> None:
    """WCP29: a canceled branch has not failed: nothing recovers it or handles its failure."""
    case.wf.signal("b")
    case.wf.signal("c")
    case.steps("d", after=["b", "c"], join="any", cancel_rest=True)
    case.steps("below_b", after=["b"])
    case.steps("instead_of_b", recovers=["b"])
    case.steps("b_failed", on_failure=["b"])
    case.steps("b_ended", always=["b"])
    job = await case.submit()
    await job.signal("c")
    seen = await case.drain(job)
    assert (seen.status, seen.states["b"]) == ("COMPLETED", "canceled")
    assert {seen.states[name] for name in ("below_b", "instead_of_b", "b_failed")} == {"skipped"}
    assert sorted(case.ran) == ["b_ended", "d"]


async def test_wcp29_cancelling_discriminator_over_a_retry(case: WorkflowCase) -> None:
    """WCP29: a branch that waits for its next try is canceled too."""

    async def flaky() -> None:
        case.ran.append("flaky")
        raise RuntimeError("later")

    case.wf.step(max_tries=5, backoff=lambda _: 100.0)(flaky)
    case.wf.signal("c")
    case.steps("d", after=["flaky", "c"], join="any", cancel_rest=True)
    job = await case.submit()
    await case.drain(job)
    await job.signal("c")
    seen = await case.drain(job, after=100)
    assert (seen.status, seen.states["flaky"], case.ran) == ("COMPLETED", "canceled", ["flaky", "d"])


async def test_wcp29_cancelling_discriminator_over_multiple_instances(case: WorkflowCase) -> None:
    """WCP29, WCP26: canceling a task with multiple instances withdraws the instances."""

    async def instance(item: int) -> None:
        case.ran.append(str(item))

    case.wf.map(over_input="numbers", namespace="paused")(instance)
    case.wf.signal("c")
    case.steps("d", after=["instance", "c"], join="any", cancel_rest=True)
    await case.app.open()
    await case.app.pause("paused", "so that the instances do not start")
    job = await case.submit(input={"numbers": [1, 2, 3]})
    await job.signal("c")
    await case.drain(job)
    await case.app.resume("paused")
    seen = await case.drain(job)
    assert (seen.status, seen.states["instance"], case.ran) == ("COMPLETED", "canceled", ["d"])
    assert {seen.states[f"instance[{index}]"] for index in range(3)} <= {"canceled"}


@pytest.mark.parametrize("kind", ["map", "child", "sleep", "signal", "approval"])
async def test_wcp4_exclusive_choice_between_kinds_of_steps(case: WorkflowCase, kind: str) -> None:
    """WCP4, WCP5: a branch can be a step of any kind; the merge waits for it."""
    child = case.app.workflow("child")
    case.step("inner", wf=child)

    async def echo(item: int) -> int:
        return item

    kinds = ["map", "child", "sleep", "signal", "approval"]
    case.decision("choose", kind, kinds)
    case.wf.map(name="map", over_input="numbers", after=["choose"])(echo)
    case.wf.child("child", child, after=["choose"])
    case.wf.sleep("sleep", 5, after=["choose"])
    case.wf.signal("signal", after=["choose"])
    case.wf.approval("approval", after=["choose"])
    case.steps("merge", after=kinds)
    job = await case.submit(input={"numbers": [1, 2]})
    await case.drain(job)
    if kind == "signal":
        await job.signal("signal")
    if kind == "approval":
        await job.approve("approval")
    seen = await case.drain(job, after=5)
    assert (seen.status, seen.states[kind], seen.states["merge"]) == ("COMPLETED", "done", "done")
    assert {each for each in kinds if seen.states[each] == "skipped"} == set(kinds) - {kind}


@pytest.mark.parametrize("join", [2, 0.6])
async def test_wcp30_structured_partial_join(case: WorkflowCase, join: float) -> None:
    """WCP30: the subsequent task starts when n of m branches have completed; the rest is ignored."""
    for name in ("a", "b", "c"):
        case.wf.signal(name)
    case.steps("d", after=["a", "b", "c"], join=join)
    job = await case.submit()
    for name, state in (("c", "waiting"), ("a", "done"), ("b", "done")):
        await job.signal(name)
        assert (await case.drain(job)).states["d"] == state
    assert ((await case.report(job)).status, case.ran) == ("COMPLETED", ["d"])


async def test_wcp32_cancelling_partial_join(case: WorkflowCase) -> None:
    """WCP32: as the partial join, and the remaining branches are canceled."""
    for name in ("a", "b", "c"):
        case.wf.signal(name)
    case.steps("d", after=["a", "b", "c"], join=2, cancel_rest=True)
    job = await case.submit()
    await job.signal("b")
    await job.signal("c")
    seen = await case.drain(job)
    assert (seen.status, seen.states["a"], seen.states["d"]) == ("COMPLETED", "canceled", "done")


async def test_wcp30_partial_join_that_became_impossible(case: WorkflowCase) -> None:
    """WCP30: two of three branches fail, so that two can no longer complete: the task never starts."""
    case.step("a", fails=True)
    case.step("b", fails=True)
    case.wf.signal("c")
    case.steps("d", after=["a", "b", "c"], join=2)
    job = await case.submit()
    seen = await case.drain(job)
    assert (seen.states["c"], seen.states["d"]) == ("waiting", "upstream failed")  # decided before c has ended
    await job.signal("c")
    assert (await case.drain(job)).status == "FAILED"


async def test_wcp33_generalized_and_join(case: WorkflowCase) -> None:
    """WCP33: the join may lie anywhere in the graph, across levels of nesting."""
    case.steps("a")
    case.steps("b", after=["a"])
    case.steps("c", after=["b"])
    case.steps("d", after=["a", "b", "c"])
    await case.run()
    assert case.ran == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("outer", "ran"), [("x", ["choose", "x", "end"]), ("y", ["choose", "y", "inner", "p", "end"])])
async def test_wcp37_local_synchronizing_merge(case: WorkflowCase, outer: str, ran: list[str]) -> None:
    """WCP37: choices nest, and the merge knows from the state of the case which branches are active."""
    case.decision("choose", outer, ["x", "y"])
    case.steps("x", "y", after=["choose"])
    case.decision("inner", "p", ["p", "q"], after=["y"])
    case.steps("p", "q", after=["inner"])
    case.steps("end", after=["x", "p", "q"])
    seen = await case.run()
    assert (seen.status, case.ran) == ("COMPLETED", ran)


# Multiple instances


def declare_instances(case: WorkflowCase, strategy: Any = "all") -> None:
    async def instance(item: int) -> int:
        if item < 0:
            raise ValueError("negative")
        return item * 10

    case.wf.map(over="numbers", strategy=strategy, max_tries=1)(instance)


async def test_wcp12_multiple_instances_without_synchronization(case: WorkflowCase) -> None:
    """WCP12: instances are started without a wait for them: child jobs with wait=False."""
    child = case.app.workflow("child")
    child.signal("never")
    for number in range(2):
        case.wf.child(f"start_{number}", child, wait=False)
    job = await case.submit()
    assert (await case.drain(job)).status == "COMPLETED"
    started = await case.app.find_jobs(parent=job)
    assert [each.status.value for each in started] == ["RUNNING"] * 2


async def test_wcp13_multiple_instances_known_at_design_time(case: WorkflowCase) -> None:
    """WCP13: the number is part of the definition, and all must complete."""
    case.steps("i_1", "i_2", "i_3")
    case.compute("then", lambda *results: list(results), after=["i_1", "i_2", "i_3"])
    assert (await case.run()).output == {"then": ["i_1", "i_2", "i_3"]}


async def test_wcp14_multiple_instances_known_at_run_time(case: WorkflowCase) -> None:
    """WCP14: the number is known when the instances are created, and all must complete."""
    case.step("numbers", [1, 2, 3, 4])
    declare_instances(case)
    case.compute("then", sum, after=["instance"])
    assert (await case.run()).output == {"then": 100}


@pytest.mark.parametrize(("strategy", "status"), [("any", "COMPLETED"), (0.5, "COMPLETED"), (0.9, "FAILED")])
async def test_wcp34_static_partial_join_for_multiple_instances(case: WorkflowCase, strategy: Any, status: str) -> None:
    """WCP34: n of m instances are enough for the subsequent task."""
    case.step("numbers", [1, -2, 3])
    declare_instances(case, strategy)
    case.steps("then", after=["instance"])
    seen = await case.run()
    assert (seen.status, "then" in case.ran) == (status, status == "COMPLETED")


async def test_wcp26_cancel_multiple_instance_task(case: WorkflowCase) -> None:
    """WCP26: instances that have not completed are withdrawn; those that have are unaffected."""
    case.app.limit("one", max_running=1)
    job_ids: list[str] = []

    async def instance(item: int) -> None:
        case.ran.append(str(item))
        if item == 1:
            await case.cancel_step(case.app.job(job_ids[0]), "instance")

    case.wf.map(over_input="numbers", limit_key="one")(instance)
    job = await case.submit(input={"numbers": [0, 1, 2, 3]})
    job_ids.append(str(job.id))
    seen = await case.drain(job)
    assert (seen.status, seen.states["instance"], case.ran) == ("FAILED", "canceled", ["0", "1"])
    assert {seen.states["instance[2]"], seen.states["instance[3]"]} == {"canceled"}


# State-based patterns


@pytest.mark.parametrize("first", ["accept", "decline"])
async def test_wcp16_deferred_choice(case: WorkflowCase, first: str) -> None:
    """WCP16: the environment chooses between branches; after the choice the alternatives are withdrawn."""
    case.wf.signal("accept")
    case.wf.signal("decline")
    case.steps("choice", after=["accept", "decline"], join="any", cancel_rest=True)
    case.steps("accepted", after=["accept"])
    case.steps("declined", after=["decline"])
    job = await case.submit()
    await case.drain(job)
    await job.signal(first)
    seen = await case.drain(job)
    assert seen.status == "COMPLETED"
    states = (seen.states["accepted"], seen.states["declined"])
    assert states == (("done", "skipped") if first == "accept" else ("skipped", "done"))


async def test_wcp17_interleaved_parallel_routing(live_case: WorkflowCase) -> None:
    """WCP17, WCP40: a partial order, no two tasks at the same time: a limit of 1."""
    live_case.app.limit("alone", max_running=1)
    at_once = 0
    most = 0

    async def work() -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.02)
        at_once -= 1

    for name, after in (("a", []), ("b", ["a"]), ("c", [])):
        live_case.wf.step(name=name, after=after, limit_key="alone")(work)
    async with live_case.processes():
        job = await live_case.submit()
        await job.wait(60)
    ended = {step.step: step.finished_at for step in await job.steps()}
    assert (most, str(ended["a"]) < str(ended["b"])) == (1, True)


async def test_wcp18_milestone(case: WorkflowCase) -> None:
    """WCP18: a task is enabled only while the case is in a state: after the milestone, and not after its deadline."""
    case.wf.signal("milestone")
    case.wf.sleep("deadline", 60)
    case.steps("first", after=["milestone", "deadline"], join="any", cancel_rest=True)
    case.steps("task", after=["milestone"])
    job = await case.submit()
    await case.drain(job)
    seen = await case.drain(job, after=60)  # the deadline comes first
    assert (seen.status, seen.states["task"]) == ("COMPLETED", "skipped")


async def test_wcp39_critical_section(live_case: WorkflowCase) -> None:
    """WCP39: sections of different branches are not active at the same time."""
    live_case.app.limit("section", max_running=1)
    inside: list[str] = []

    def section(name: str) -> Any:
        async def work() -> None:
            inside.append(f"{name} in")
            await asyncio.sleep(0.02)
            inside.append(f"{name} out")

        return work

    for name in ("left", "right"):
        live_case.step(f"before_{name}")
        live_case.wf.step(name=name, after=[f"before_{name}"], limit_key="section")(section(name))
    async with live_case.processes():
        await (await live_case.submit()).wait(60)
    assert inside in (
        ["left in", "left out", "right in", "right out"],
        ["right in", "right out", "left in", "left out"],
    )


# Iteration


def declare_loop(case: WorkflowCase, *, max_repeats: int = 10, fails_at: int | None = None) -> None:
    body = case.app.workflow("body", output={"count": "add_one"})

    async def add_one(count: int = 0) -> int:
        case.ran.append(f"do {count}")
        if count == fails_at:
            raise PermanentError(f"{count} is too many")
        return count + 1

    async def subtract_one(result: int) -> None:
        case.ran.append(f"undo {result - 1}")

    body.step(compensate=subtract_one)(add_one)
    case.wf.repeat("loop", body, until="output.count >= input.wanted", max_repeats=max_repeats)
    case.steps("then", after=["loop"])


@pytest.mark.parametrize(("wanted", "iterations"), [(1, 1), (3, 3), (0, 1)])
async def test_wcp21_structured_loop(case: WorkflowCase, wanted: int, iterations: int) -> None:
    """WCP21, repeat until (post-tested): the body runs at least once, and again until the condition holds."""
    declare_loop(case)
    seen = await case.run(input={"wanted": wanted})
    assert (seen.status, case.ran) == ("COMPLETED", [*(f"do {n}" for n in range(iterations)), "then"])


async def test_wcp21_loop_that_does_not_end(case: WorkflowCase) -> None:
    """WCP21: a loop is bounded here; a condition that does not hold in time fails it, and its work is undone."""
    declare_loop(case, max_repeats=3)
    seen = await case.run(input={"wanted": 100})
    assert (seen.status, seen.states["loop"], seen.states["then"]) == ("FAILED", "failed", "upstream failed")
    assert case.ran == ["do 0", "do 1", "do 2", "undo 2", "undo 1", "undo 0"]


async def test_wcp21_loop_with_a_failed_iteration(case: WorkflowCase) -> None:
    """WCP21: a body that fails ends the loop."""
    declare_loop(case, fails_at=1)
    seen = await case.run(input={"wanted": 3})
    assert (seen.status, seen.states["then"]) == ("FAILED", "upstream failed")
    assert case.ran == ["do 0", "do 1", "undo 0"]


# Cancellation


async def test_wcp19_cancel_task(case: WorkflowCase) -> None:
    """WCP19: an enabled task is withdrawn; here it counts as failed, unless another step recovers it."""
    case.wf.signal("task")
    case.steps("instead", recovers=["task"])
    case.steps("then", after=["task"])
    job = await case.submit()
    await case.drain(job)
    await case.cancel_step(job, "task")
    seen = await case.drain(job)
    assert (seen.status, seen.states["task"], seen.states["then"]) == ("COMPLETED", "canceled", "done")


async def test_wcp20_cancel_case(case: WorkflowCase) -> None:
    """WCP20: the whole instance is withdrawn, tasks to come and child processes included."""
    child = case.app.workflow("child")
    child.signal("never")
    case.wf.child("run_child", child)
    case.wf.signal("other")
    case.steps("then", after=["other"])
    case.steps("handler", on_failure=["other"])
    job = await case.submit()
    await case.drain(job)
    await job.cancel()
    seen = await case.drain(job)
    assert (seen.status, case.ran) == ("CANCELED", [])
    assert not {"waiting", "pending", "running"} & set(seen.states.values())


async def test_wcp25_cancel_region(case: WorkflowCase) -> None:
    """WCP25: a set of tasks is withdrawn together: a child job is the region."""
    region = case.app.workflow("region")
    region.signal("r_1")
    region.signal("r_2")
    case.wf.child("region", region)
    case.steps("instead", recovers=["region"])
    case.steps("outside")
    case.steps("then", after=["region", "outside"])
    job = await case.submit()
    await case.drain(job)
    await case.cancel_step(job, "region")
    seen = await case.drain(job)
    (child,) = await case.app.find_jobs(parent=job)
    assert (seen.status, seen.states["then"], child.status.value) == ("COMPLETED", "done", "CANCELED")


async def test_wcp27_complete_multiple_instance_task(case: WorkflowCase) -> None:
    """WCP27: go on without the instances that are not done: a partial join that cancels the rest."""
    case.steps("i_1")
    case.wf.signal("i_2")
    case.wf.signal("enough")
    case.steps("then", after=["i_2", "enough"], join="any", cancel_rest=True)
    job = await case.submit()
    await case.drain(job)
    await job.signal("enough")
    seen = await case.drain(job)
    assert (seen.status, seen.states["i_2"], seen.states["then"]) == ("COMPLETED", "canceled", "done")


# Termination and triggers


async def test_wcp11_implicit_termination(case: WorkflowCase) -> None:
    """WCP11: the case ends when nothing is left to do, without a final task."""
    case.steps("a")
    case.wf.signal("b")
    job = await case.submit()
    assert (await case.drain(job)).status == "RUNNING"
    await job.signal("b")
    assert (await case.drain(job)).status == "COMPLETED"


async def test_wcp22_recursion(case: WorkflowCase) -> None:
    """WCP22: a process invokes itself; here until the decision chooses nothing more, at most 5 levels deep."""

    async def more(depth: int) -> list[str]:
        case.ran.append(str(depth))
        return ["again"] if depth < 2 else []

    async def deeper(depth: int) -> int:
        return depth + 1

    case.wf.decision(branches=["again"])(more)
    case.wf.step(deeper)
    case.wf.child("again", "case", after=["more", "deeper"], input={"depth": "deeper"})
    seen = await case.run(input={"depth": 0})
    assert (seen.status, case.ran) == ("COMPLETED", ["0", "1", "2"])


async def test_wcp23_transient_trigger(case: WorkflowCase) -> None:
    """WCP23: a trigger acts on a waiting task only; after the wait has timed out it is too late."""
    case.wf.signal("trigger", timeout=10)
    job = await case.submit()
    await case.drain(job)
    assert (await case.drain(job, after=10)).states["trigger"] == "failed"


async def test_wcp24_persistent_trigger(case: WorkflowCase) -> None:
    """WCP24: a trigger is kept until the task that needs it is enabled."""
    case.wf.signal("gate")
    case.wf.signal("trigger", after=["gate"])
    job = await case.submit()
    await job.signal("trigger", "early")
    await case.drain(job)
    await job.signal("gate")
    assert (await case.drain(job)).output == {"trigger": "early"}


async def test_wcp43_explicit_termination(case: WorkflowCase) -> None:
    """WCP43: reaching a state ends the case, although other tasks could go on: the rest is canceled."""
    case.wf.signal("long")
    case.wf.signal("stop")
    case.steps("end", after=["long", "stop"], join="any", cancel_rest=True)
    job = await case.submit()
    await case.drain(job)
    await job.signal("stop")
    seen = await case.drain(job)
    assert (seen.status, seen.states["long"]) == ("COMPLETED", "canceled")
