"""Celery's canvas as tests: chain, group, chord, map, chunks, link and link_error.

The expectations are those of docs/userguide/canvas.rst and of t/integration/test_canvas.py. Each docstring names the
section or the test. A signature is a step; one that takes the result before it names that step in `after`.
"""

from __future__ import annotations

from datetime import timedelta
from operator import add, mul
from typing import TYPE_CHECKING, Any

import pytest

from interlock import Backoff, PermanentError, RetryableError, StepContext
from interlock.errors import JobFailedError

if TYPE_CHECKING:
    from workflow_case import WorkflowCase

pytestmark = pytest.mark.store


def total(*numbers: int) -> int:
    return sum(numbers)


def declare_chain(case: WorkflowCase, *links: Any, first: Any) -> None:
    """Declare link_0, which computes `first`, and one step per further link, each with the result before it."""
    case.compute("link_0", lambda: first)
    for number, link in enumerate(links, 1):
        case.compute(f"link_{number}", link, after=[f"link_{number - 1}"])


def declare_group(case: WorkflowCase, *functions: Any, name: str = "task", after: tuple[str, ...] = ()) -> list[str]:
    """Declare one step per function; return their names."""
    names = [f"{name}_{number}" for number in range(len(functions))]
    for each, function in zip(names, functions, strict=True):
        case.compute(each, function, after=after)
    return names


def fail(*_: Any) -> None:
    raise PermanentError("Task expected to fail")


# Chains


async def test_simple_chain(case: WorkflowCase) -> None:
    """canvas.rst: chain(add.s(2, 2), add.s(4), add.s(8)) gives 16."""
    declare_chain(case, lambda x: x + 4, lambda x: x + 8, first=add(2, 2))
    assert (await case.run()).output == {"link_2": 16}


async def test_chain_keeps_the_results_of_its_parents(case: WorkflowCase) -> None:
    """canvas.rst: chain(add.s(4, 4), mul.s(8), mul.s(10)) gives 640, res.parent 64, res.parent.parent 8."""
    declare_chain(case, lambda x: mul(x, 8), lambda x: mul(x, 10), first=add(4, 4))
    job = await case.submit()
    await case.drain(job)
    assert [step.result for step in await job.steps()] == [8, 64, 640]


async def test_immutable_signatures(case: WorkflowCase) -> None:
    """canvas.rst: add.si(2, 2) | add.si(4, 4) | add.si(8, 8) run in order and ignore the result before them."""
    case.step("a", 4)
    case.step("b", 8, after=["a"])
    case.step("c", 16, after=["b"])
    assert ((await case.run()).output, case.ran) == ({"c": 16}, ["a", "b", "c"])


async def test_single_chain(case: WorkflowCase) -> None:
    """test_single_chain."""
    declare_chain(case, first=add(3, 4))
    assert (await case.run()).output == {"link_0": 7}


async def test_chain_of_chains(case: WorkflowCase) -> None:
    """canvas.rst: add.s(4, 16) | mul.s(2) | (add.s(4) | mul.s(8)) gives 352; here the inner chain is a child job."""
    inner = case.app.workflow("inner", output="scaled")

    async def plus_four(number: int) -> int:
        return number + 4

    async def scaled(plus_four: int) -> int:
        return plus_four * 8

    inner.step(plus_four)
    inner.step(after=["plus_four"])(scaled)
    declare_chain(case, lambda x: x * 2, first=add(4, 16))
    case.wf.child("chain", inner, input={"number": "link_1"}, after=["link_1"])
    assert (await case.run()).output == {"chain": 352}


async def test_chain_whose_middle_fails(case: WorkflowCase) -> None:
    """test_chain_on_error: chain(add.s(1, 2), fail.s(), add.s(3, 4)) raises, and the last task never runs."""
    declare_chain(case, fail, lambda _: add(3, 4), first=add(1, 2))
    job = await case.submit()
    seen = await case.drain(job)
    assert seen.states == {"link_0": "done", "link_1": "failed", "link_2": "upstream failed"}
    assert case.ran == ["link_0", "link_1"]
    with pytest.raises(JobFailedError, match="link_1 failed: Task expected to fail"):
        await job.wait(1)


async def test_chain_with_a_retried_task(case: WorkflowCase) -> None:
    """A task of a chain that calls retry() is tried again before the chain goes on."""

    async def flaky(ctx: StepContext) -> int:
        if ctx.attempt < 3:
            raise RetryableError("not yet")
        return ctx.attempt

    case.wf.step(max_tries=5, backoff=Backoff.linear(base=10))(flaky)
    case.compute("then", lambda attempt: attempt * 10, after=["flaky"])
    job = await case.submit()
    assert (await case.drain(job)).states == {"flaky": "pending", "then": "waiting"}
    await case.drain(job, after=timedelta(minutes=1))
    assert (await case.drain(job, after=timedelta(minutes=1))).output == {"then": 30}


async def test_chain_with_eta(case: WorkflowCase) -> None:
    """test_chain_error_handler_with_eta: a chain with a countdown of 10 s runs then, and its errback does not."""
    case.wf.sleep("eta", 10)
    header = declare_group(case, lambda _: 3, lambda _: 7, after=("eta",))
    case.compute("tsum", total, after=header)
    case.steps("errback", on_failure=["tsum"])
    job = await case.submit()
    await case.drain(job)
    assert case.ran == []
    seen = await case.drain(job, after=10)
    assert (seen.output, seen.states["errback"]) == ({"tsum": 10}, "skipped")


async def test_revoked_chain(case: WorkflowCase) -> None:
    """A revoked task is not run, and neither are the tasks that are chained to it."""
    case.wf.signal("gate")
    case.steps("revoked", after=["gate"])
    case.steps("rest", after=["revoked"])
    job = await case.submit()
    await case.drain(job)
    await case.cancel_step(job, "revoked")
    await job.signal("gate")
    seen = await case.drain(job)
    assert (seen.status, seen.states["rest"], case.ran) == ("FAILED", "upstream failed", [])


# Links and error links


async def test_link_is_called_with_the_result(case: WorkflowCase) -> None:
    """canvas.rst: add.apply_async((2, 2), link=mul.s(16)): the linked task is called with the result, 4 * 16."""
    case.compute("add", lambda: 4)
    case.compute("mul", lambda x: x * 16, after=["add"])
    case.compute("log_result", lambda x: f"got {x}", after=["add"])
    assert (await case.run()).output == {"mul": 64, "log_result": "got 4"}


async def test_link_error_gets_the_exception(case: WorkflowCase) -> None:
    """test_link_error: the errback gets the exception of the failed task; the task itself still raises."""
    case.compute("fail", fail)

    async def log_error(ctx: StepContext) -> str:
        error = ctx.get_dependency_error("fail")
        assert error is not None
        return str(error["message"])

    case.wf.step(on_failure=["fail"])(log_error)
    job = await case.submit()
    seen = await case.drain(job)
    results = {step.step: step.result for step in await job.steps()}
    assert (seen.status, results["log_error"]) == ("FAILED", "Task expected to fail")


async def test_link_error_is_not_called_on_success(case: WorkflowCase) -> None:
    """canvas.rst: errbacks are called only when the task fails."""
    case.steps("add")
    case.steps("log_error", on_failure=["add"])
    seen = await case.run()
    assert (seen.status, seen.states["log_error"]) == ("COMPLETED", "skipped")


async def test_link_and_link_error_together(case: WorkflowCase) -> None:
    """A failed task calls its errback and not its callback."""
    case.step("task", fails=True)
    case.steps("callback", after=["task"])
    case.steps("errback", on_failure=["task"])
    seen = await case.run()
    assert (case.ran, seen.states["callback"]) == (["task", "errback"], "upstream failed")


async def test_link_error_with_a_failed_errback(case: WorkflowCase) -> None:
    """A failing errback does not hide the error of its task."""
    case.step("task", fails="the cause")
    case.step("errback", fails="the second failure", on_failure=["task"])
    seen = await case.run()
    assert seen.status == "FAILED"
    assert "task failed: the cause" in (seen.reason or "")


async def test_chain_link_error_is_called_for_any_link(case: WorkflowCase) -> None:
    """test_chain_children_with_errbacks: chain.link_error reacts to the failure of any task of the chain."""
    declare_chain(case, fail, lambda x: x, first=1)
    case.steps("errback", on_failure=["link_0", "link_1", "link_2"], join="any")
    await case.run()
    assert case.ran == ["link_0", "link_1", "errback"]


# Groups


async def test_simple_group(case: WorkflowCase) -> None:
    """canvas.rst: group(add.s(i, i) for i in range(10)) gives [0, 2, ..., 18], in order."""

    async def add_twice(item: int) -> int:
        return item + item

    case.wf.map(over_input="numbers")(add_twice)
    seen = await case.run(input={"numbers": list(range(10))})
    assert seen.output == {"add_twice": [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]}


async def test_large_group(case: WorkflowCase) -> None:
    """test_large_group, with 100 tasks: the results are in the order of the group."""

    async def identity(item: int) -> int:
        return item

    case.wf.map(over_input="numbers")(identity)
    assert (await case.run(input={"numbers": list(range(100))})).output == {"identity": list(range(100))}


async def test_group_of_different_tasks(case: WorkflowCase) -> None:
    """canvas.rst: group(add.s(2, 2), add.s(4, 4)) gives [4, 8]; a group of different tasks is a set of steps."""
    declare_group(case, lambda: 4, lambda: 8)
    assert (await case.run()).output == {"task_0": 4, "task_1": 8}


async def test_empty_group(case: WorkflowCase) -> None:
    """test_empty_group_result: the result of an empty group is []."""

    async def identity(item: int) -> int:
        return item

    case.wf.map(over_input="numbers")(identity)
    assert (await case.run(input={"numbers": []})).output == {"identity": []}


async def test_complex_chain(case: WorkflowCase) -> None:
    """test_complex_chain: a chain in front of a group gives its result to each task of the group: [64, ..., 67]."""
    declare_chain(case, *(lambda x, y=y: x + y for y in (4, 8, 16, 32)), first=add(2, 2))
    declare_group(case, *(lambda x, i=i: x + i for i in range(4)), after=("link_4",))
    assert list((await case.run()).output.values()) == [64, 65, 66, 67]


async def test_failed_task_of_a_group(case: WorkflowCase) -> None:
    """GroupResult.failed() if any subtask failed; the others complete (completed_count)."""
    declare_group(case, lambda: 1, fail, lambda: 3)
    seen = await case.run()
    assert seen.status == "FAILED"
    assert list(seen.states.values()) == ["done", "failed", "done"]


async def test_errback_of_a_group_is_called_for_each_failure(case: WorkflowCase) -> None:
    """test_errback_called_by_group_fail_multiple: group.link_error calls the errback once per failed task."""
    group = declare_group(case, fail, lambda: 42, fail)
    for name in group:
        case.steps(f"errback_{name}", on_failure=[name])
    await case.run()
    assert sorted(name for name in case.ran if "errback" in name) == ["errback_task_0", "errback_task_2"]


# Chords


async def test_simple_chord(case: WorkflowCase) -> None:
    """canvas.rst: chord((add.s(i, i) for i in range(10)), tsum.s()) gives 90."""

    async def header(item: int) -> int:
        return item + item

    async def tsum(header: list[int]) -> int:
        return sum(header)

    case.wf.map(over_input="numbers")(header)
    case.wf.step(after=["header"])(tsum)
    assert (await case.run(input={"numbers": list(range(10))})).output == {"tsum": 90}


async def test_chord_body_waits_for_the_whole_header(case: WorkflowCase) -> None:
    """canvas.rst: the body executes after all of the tasks in the header are complete."""
    case.steps("first")
    case.wf.signal("second")
    case.steps("body", after=["first", "second"])
    job = await case.submit()
    assert (await case.drain(job)).states["body"] == "waiting"
    await job.signal("second")
    assert (await case.drain(job)).states["body"] == "done"


@pytest.mark.parametrize(("numbers", "expected"), [([7], [16]), ([], [])])
async def test_single_and_empty_header(case: WorkflowCase, numbers: list[int], expected: list[int]) -> None:
    """test_single_task_header, test_empty_header_chord: the body gets a list of one, or an empty list."""

    async def header(item: int) -> int:
        return item

    async def add_to_all(header: list[int]) -> list[int]:
        return [number + 9 for number in header]

    case.wf.map(over_input="numbers")(header)
    case.wf.step(after=["header"])(add_to_all)
    assert (await case.run(input={"numbers": numbers})).output == {"add_to_all": expected}


async def test_chord_error(case: WorkflowCase) -> None:
    """canvas.rst, "Error handling": the body does not run, the rest of the header does, the error names the task."""
    header = declare_group(case, lambda: 8, fail, lambda: 16)
    case.compute("body", total, after=header)
    job = await case.submit()
    seen = await case.drain(job)
    assert list(seen.states.values()) == ["done", "failed", "done", "upstream failed"]
    with pytest.raises(JobFailedError, match="task_1 failed: Task expected to fail"):
        await job.wait(1)


async def test_errback_of_a_chord_is_called_once(case: WorkflowCase) -> None:
    """canvas.rst: a chord calls its errback just once if any task in the header fails."""
    header = declare_group(case, lambda: 3, fail, fail)
    case.compute("body", total, after=header)
    case.steps("on_chord_error", on_failure=["body"])
    seen = await case.run()
    assert (seen.status, seen.states["body"]) == ("FAILED", "upstream failed")
    assert case.ran.count("on_chord_error") == 1


async def test_errback_of_a_chord_is_called_when_the_body_fails(case: WorkflowCase) -> None:
    """test_error_propagates_to_chord_from_simple: a failed body calls the errback too."""
    header = declare_group(case, lambda: 42)
    case.compute("body", fail, after=header)
    case.steps("on_chord_error", on_failure=["body"])
    seen = await case.run()
    assert (seen.status, case.ran) == ("FAILED", ["task_0", "body", "on_chord_error"])


async def test_errback_on_the_header_too(case: WorkflowCase) -> None:
    """task_allow_error_cb_on_chord_header: the errback is called for the header tasks that fail, and for the body."""
    header = declare_group(case, lambda: 1, fail)
    case.compute("body", total, after=header)
    for name in (*header, "body"):
        case.steps(f"errback_{name}", on_failure=[name])
    await case.run()
    assert sorted(case.ran[2:]) == ["errback_body", "errback_task_1"]


async def test_chord_of_chains(case: WorkflowCase) -> None:
    """test_error_propagates_to_chord_from_chain: an error inside a chain of the header stops the body."""
    case.steps("ok_1", "bad_0")
    case.compute("bad_1", fail, after=["bad_0"])
    case.steps("bad_2", after=["bad_1"])
    case.compute("body", total, after=["ok_1", "bad_2"])
    seen = await case.run()
    assert (seen.states["bad_2"], seen.states["body"]) == ("upstream failed", "upstream failed")


async def test_nested_chord(case: WorkflowCase) -> None:
    """test_nested_chord: [[3, 7, 5, 'A'], [13, 10, 'A']]."""
    left = declare_group(case, lambda: 3, lambda: 7, name="left")
    right = declare_group(case, lambda: 13, name="right")
    case.compute("left_body", lambda *got: [*got, 5], after=left)
    case.compute("right_body", lambda *got: [*got, 10], after=right)
    case.compute("body", lambda *lists: [[*each, "A"] for each in lists], after=["left_body", "right_body"])
    assert (await case.run()).output == {"body": [[3, 7, 5, "A"], [13, 10, "A"]]}


async def test_error_in_a_nested_chord(case: WorkflowCase) -> None:
    """test_nested_chord_header_link_error: an error in the inner header reaches the outer body and its errback."""
    inner = declare_group(case, fail, lambda: 1, name="inner")
    case.compute("inner_body", total, after=inner)
    case.steps("other")
    case.compute("outer_body", total, after=["inner_body", "other"])
    case.steps("errback", on_failure=["outer_body"])
    seen = await case.run()
    assert (seen.states["inner_body"], seen.states["outer_body"]) == ("upstream failed", "upstream failed")
    assert (seen.states["other"], seen.states["errback"]) == ("done", "done")


async def test_chain_of_task_a_group_and_a_chord(case: WorkflowCase) -> None:
    """test_chain_of_task_a_group_and_a_chord: add.si(1, 0) | 2 x add.s(1) | 2 x tsum | tsum gives 8."""
    case.step("first", 1)
    adds = declare_group(case, *[lambda x: x + 1] * 2, name="add", after=("first",))
    sums = declare_group(case, total, total, name="tsum", after=tuple(adds))
    case.compute("last", total, after=sums)
    assert (await case.run()).output == {"last": 8}


async def test_parallel_chords(case: WorkflowCase) -> None:
    """test_parallel_chords: group(c1, c2) gives [10, 10]."""
    for chord in ("c1", "c2"):
        case.compute(chord, total, after=declare_group(case, lambda: 3, lambda: 7, name=f"{chord}_header"))
    assert (await case.run()).output == {"c1": 10, "c2": 10}


async def test_chain_chord_chain_chord(case: WorkflowCase) -> None:
    """test_chain_chord_chain_chord: identity 1 to 7; the last one runs last."""
    case.step("id_1", 1)
    case.step("id_2", 2, after=["id_1"])
    case.step("id_3", 3, after=["id_1"])
    case.step("id_4", 4, after=["id_3"])
    case.step("id_5", 5, after=["id_3"])
    case.step("id_6", 6, after=["id_4", "id_5"])
    case.step("id_7", 7, after=["id_2", "id_6"])
    assert ((await case.run()).output, case.ran[0], case.ran[-1]) == ({"id_7": 7}, "id_1", "id_7")


async def test_error_in_front_of_a_group(case: WorkflowCase) -> None:
    """test_error_propagates_from_chord: add.s(1, 1) | fail.s() | group(...): no task of the group runs."""
    declare_chain(case, fail, first=2)
    declare_group(case, lambda x: x, lambda x: x, after=("link_1",))
    await case.run()
    assert case.ran == ["link_0", "link_1"]


async def test_chord_in_a_child_job_fails_its_chain(case: WorkflowCase) -> None:
    """test_chord_error_in_nested_chain_does_not_crash: chain(chain(group(ok, fail), task), task) raises that error."""
    inner = case.app.workflow("inner")
    case.step("ok", 2, wf=inner)
    case.step("fail", fails="Task expected to fail", wf=inner)
    case.step("identity", wf=inner, after=["ok", "fail"])
    case.wf.child("chain", inner)
    case.steps("last", after=["chain"])
    seen = await case.run()
    assert (seen.status, seen.states) == ("FAILED", {"chain": "failed", "last": "upstream failed"})
    assert "Task expected to fail" in (seen.reason or "")


# Map, starmap, chunks


async def test_map(case: WorkflowCase) -> None:
    """canvas.rst: tsum.map([range(10), range(100)]) gives [45, 4950]."""

    async def tsum(item: list[int]) -> int:
        return sum(item)

    case.wf.map(over_input="lists")(tsum)
    assert (await case.run(input={"lists": [list(range(10)), list(range(100))]})).output == {"tsum": [45, 4950]}


async def test_starmap(case: WorkflowCase) -> None:
    """canvas.rst: add.starmap(zip(range(10), range(10))) gives [0, 2, ..., 18]."""

    async def star_add(item: tuple[int, int]) -> int:
        return item[0] + item[1]

    case.wf.map(over_input="pairs")(star_add)
    seen = await case.run(input={"pairs": [[i, i] for i in range(10)]})
    assert seen.output == {"star_add": list(range(0, 20, 2))}


async def test_chunks(case: WorkflowCase) -> None:
    """canvas.rst: add.chunks(zip(range(100), range(100)), 10) makes 10 tasks, each with 10 pairs."""

    async def add_chunk(item: dict[str, int]) -> list[int]:
        return [add(i, i) for i in range(item["start"], item["stop"])]

    case.wf.map(over_input="range")(add_chunk)
    seen = await case.run(input={"range": {"start": 0, "stop": 100, "size": 10}})
    assert seen.output["add_chunk"][0] == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert seen.output["add_chunk"][9] == [180, 182, 184, 186, 188, 190, 192, 194, 196, 198]
    assert len(seen.output["add_chunk"]) == 10
