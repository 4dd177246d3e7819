"""The rules by which a job ends, each by itself, and what holds of every job whatever its steps do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import workflow
from interlock import Interlock
from interlock.model.graph import edges
from interlock.workflow.dry_run import Ended, Failed, Verdict, dry_run, split_map_source

pytestmark = pytest.mark.unit

NO = Failed("no")


def step(name: str, *after: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "plain", "type": "t", "after": list(after), **more}


def states(verdict: Verdict) -> dict[str, str]:
    return {name: f"{ended.state}{'!' if ended.poisoned else ''}" for name, ended in verdict.steps.items()}


def test_a_chain_ends_with_the_results_of_its_last_steps() -> None:
    chain = workflow(step("a"), step("b", "a"), step("c", "b"), step("d", "b"))
    assert dry_run(chain, {"a": 1, "c": 3}) == Verdict(
        "COMPLETED",
        {"a": Ended("done", result=1), "b": Ended("done"), "c": Ended("done", result=3), "d": Ended("done")},
        output={"c": 3, "d": None},
    )


def test_a_failure_poisons_what_comes_after_it_and_fails_the_job() -> None:
    found = dry_run(workflow(step("a"), step("b", "a"), step("c", "b"), step("d")), {"a": NO, "d": 4})
    assert states(found) == {"a": "error", "b": "skipped!", "c": "skipped!", "d": "done"}
    assert found.steps["c"].reason == "step b failed"
    assert (found.status, found.output, found.reason) == ("FAILED", None, "step a failed: no")
    assert found.error == {"steps": {"a": {"message": "no"}}}


def test_a_step_after_a_failure_handles_it() -> None:
    handled = workflow(step("a"), step("b", "a"), step("c", after_failure=["a"]))
    found = dry_run(handled, {"a": NO, "c": 1})
    assert states(found) == {"a": "error", "b": "skipped!", "c": "done"}
    assert (found.status, found.output) == ("COMPLETED", {"c": 1})
    assert states(dry_run(handled)) == {"a": "done", "b": "done", "c": "skipped"}
    assert dry_run(handled, {"a": NO, "c": NO}).error == {"steps": {"c": {"message": "no"}}}


def test_a_failure_is_handled_only_by_a_step_right_after_it() -> None:
    found = dry_run(workflow(step("a"), step("b", "a"), step("c", after_failure=["b"])), {"a": NO})
    assert states(found) == {"a": "error", "b": "skipped!", "c": "done"}
    assert found.status == "FAILED"


@pytest.mark.parametrize(
    ("join", "failing", "state"),
    [
        ("all", "", "done"),
        ("all", "a", "skipped!"),
        ("any", "abc", "done"),
        ("any", "abcd", "skipped!"),
        (0.5, "ab", "done"),
        (0.5, "abc", "skipped!"),
        (0.75, "a", "done"),
        (0.75, "ab", "skipped!"),
        (1, "a", "skipped!"),
    ],
)
def test_a_join_looks_at_how_many_succeeded(join: Any, failing: str, state: str) -> None:
    joined = workflow(*(step(name) for name in "abcd"), step("e", *"abcd", join=join))
    found = dry_run(joined, dict.fromkeys(failing, NO))
    assert states(found)["e"] == state
    assert found.status == ("COMPLETED" if state == "done" else "FAILED")


def test_a_ratio_is_met_exactly() -> None:
    joined = workflow(*(step(f"s{n}") for n in range(100)), step("e", *(f"s{n}" for n in range(100)), join=0.07))
    assert states(dry_run(joined, {f"s{n}": NO for n in range(93)}))["e"] == "done"
    assert states(dry_run(joined, {f"s{n}": NO for n in range(94)}))["e"] == "skipped!"


ROUTED = workflow(
    step("route", kind="decision", branches=["express", "standard"]),
    step("express", "route"),
    step("standard", "route"),
    step("log", "route"),
    step("pack", "express", "standard"),
    step("fly", "express"),
)


@pytest.mark.parametrize(
    ("choice", "skipped"),
    [
        ("express", {"standard"}),
        (["standard"], {"express", "fly"}),
        (["express", "standard"], set()),
        ([], {"express", "standard", "pack", "fly"}),
    ],
)
def test_unchosen_branches_are_skipped_at_a_join(choice: Any, skipped: set[str]) -> None:
    found = dry_run(ROUTED, {"route": choice})
    assert {name for name, state in states(found).items() if state == "skipped"} == skipped
    assert {name for name, state in states(found).items() if state == "done"} == set(states(found)) - skipped
    assert found.status == "COMPLETED"


def test_a_choice_that_is_no_branch_fails_the_decision() -> None:
    found = dry_run(ROUTED, {"route": "log"})
    assert states(found)["route"] == "error"
    assert found.status == "FAILED"
    assert "none of its branches" in str(found.reason)


def test_a_join_counts_only_what_was_taken() -> None:
    joined = workflow(
        step("route", kind="decision", branches=["a", "b"]),
        step("a", "route"),
        step("b", "route"),
        step("c"),
        step("end", "a", "b", "c", join=0.6),
    )
    assert states(dry_run(joined, {"route": "a", "c": NO}))["end"] == "skipped!"
    assert states(dry_run(joined, {"route": ["a", "b"], "c": NO}))["end"] == "done"


MAPPED = workflow(step("plan"), step("pack", "plan", kind="map", over="plan"), step("ship", "pack"))


@pytest.mark.parametrize(
    ("strategy", "failing", "done"),
    [("all", [], True), ("all", [1], False), ("any", [0, 1], True), ("any", [0, 1, 2], False), (0.6, [2], True)],
)
def test_a_map_ends_by_its_strategy(strategy: Any, failing: list[int], done: bool) -> None:  # noqa: FBT001 - a parameter
    mapped = workflow(
        step("plan"), step("pack", "plan", kind="map", over="plan", strategy=strategy), step("ship", "pack")
    )
    outcomes = {"plan": ["x", "y", "z"], **{f"pack[{n}]": NO if n in failing else n for n in range(3)}}
    found = dry_run(mapped, outcomes)
    assert states(found)["pack"] == ("done" if done else "skipped!")
    assert states(found)["ship"] == ("done" if done else "skipped!")
    assert found.status == ("COMPLETED" if done else "FAILED")
    if done:
        assert found.steps["pack"].result == [n for n in range(3) if n not in failing]
    else:
        assert found.steps["pack"].reason == f"{len(failing)} of 3 parts failed"


def test_a_map_over_nothing_is_done() -> None:
    found = dry_run(MAPPED, {"plan": []})
    assert (found.status, found.steps["pack"].result) == ("COMPLETED", [])


def test_a_map_goes_over_ranges_and_over_the_input() -> None:
    assert split_map_source({"start": 0, "stop": 25, "size": 10}) == [
        {"start": 0, "stop": 10},
        {"start": 10, "stop": 20},
        {"start": 20, "stop": 25},
    ]
    assert split_map_source({"start": 3, "stop": 3, "size": 10.0}) == []
    found = dry_run(workflow(step("pack", kind="map", over_input="boxes")), lambda name: name, input={"boxes": [1, 2]})
    assert found.output == {"pack": ["pack[0]", "pack[1]"]}


@pytest.mark.parametrize("value", [None, 3, "abc", {"start": 0}, {"start": 0, "stop": 1, "size": 0}, {"a": True}])
def test_a_map_over_anything_else_fails(value: Any) -> None:
    found = dry_run(MAPPED, {"plan": value})
    assert found.status == "FAILED"
    assert states(found)["ship"] == "skipped!"
    assert [name for name in found.steps if "[" in name] == []


def test_a_map_that_lacks_parts_can_be_handled() -> None:
    handled = workflow(*MAPPED["steps"], step("repair", after_failure=["pack"]))
    found = dry_run(handled, {"plan": [1], "pack[0]": NO, "repair": "ok"})
    assert (found.status, found.output) == ("COMPLETED", {"repair": "ok"})


def test_an_approval_fails_when_it_is_refused() -> None:
    asked = workflow({"name": "ask", "kind": "approval"})
    assert dry_run(asked).output == {"ask": {"approved": True}}
    found = dry_run(asked, {"ask": {"approved": False, "by": "eva", "comment": "no"}})
    assert found.reason == "step ask failed: rejected by eva: no"


def test_done_steps_are_compensated_when_the_job_fails() -> None:
    undone = workflow(step("a", compensate="t"), step("b", "a"), step("c", "b", compensate="t"), step("d", "c"))
    assert dry_run(undone, {"d": NO}).compensated == ("c", "a")
    assert dry_run(undone, {"c": NO}).compensated == ("a",)
    assert dry_run(undone).compensated == ()


def test_results_that_are_reused_count_as_done() -> None:
    found = dry_run(ROUTED, {"pack": 1}, reused={"route": "express", "express": 2})
    assert states(found) == {
        "route": "skipped",
        "express": "skipped",
        "standard": "skipped",
        "log": "done",
        "pack": "done",
        "fly": "done",
    }
    assert found.output == {"log": None, "pack": 1, "fly": None}
    assert dry_run(workflow(step("a")), reused={"a": 5}).output == {"a": 5}


def test_a_workflow_can_be_tried_as_it_is_declared() -> None:
    wf = Interlock("postgresql://nowhere").workflow("w")

    @wf.step
    def first() -> int:
        return 1

    @wf.step(after=[first])
    def second(first: int) -> int:
        return first

    assert dry_run(wf.document, {"second": 2}).output == {"second": 2}


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Any workflow with decisions, joins and failure edges, and any outcomes of its steps."""
    count = draw(st.integers(1, 10))
    steps: list[dict[str, Any]] = []
    outcomes: dict[str, Any] = {}
    for n in range(count):
        upstream = draw(st.lists(st.integers(0, n - 1), unique=True, max_size=3)) if n else []
        bad = [m for m in upstream if draw(st.integers(0, 4)) == 0]
        join = draw(st.sampled_from(["all", "all", "any", 0.5]))
        steps.append(step(f"s{n}", *(f"s{m}" for m in upstream if m not in bad), join=join))
        steps[n]["after_failure"] = [f"s{m}" for m in bad]
        outcomes[f"s{n}"] = draw(st.sampled_from([n, n, n, NO]))
    for n, each in enumerate(steps):
        after = [other["name"] for other in steps if each["name"] in other["after"]]
        decides: bool = draw(st.booleans())
        if after and decides:
            branches = draw(st.lists(st.sampled_from(after), min_size=1, unique=True))
            steps[n] = {**each, "kind": "decision", "branches": branches}
            outcomes[each["name"]] = draw(st.one_of(st.just(NO), st.lists(st.sampled_from(branches), unique=True)))
    return workflow(*steps), outcomes


@given(jobs())
def test_whatever_happens_the_rules_hold(job: tuple[dict[str, Any], dict[str, Any]]) -> None:
    given_document, outcomes = job
    found = dry_run(given_document, outcomes)
    by_name = {each["name"]: each for each in given_document["steps"]}
    into: dict[str, list[Any]] = {name: [] for name in by_name}
    for edge in edges(given_document):
        into[edge.downstream].append(edge)
    assert found.steps.keys() == by_name.keys()
    for name, ended in found.steps.items():
        if ended.state != "skipped":
            assert ended.state == ("error" if outcomes[name] is NO else "done")
            assert not ended.poisoned
        if not into[name]:
            assert ended.state != "skipped"
        if ended.poisoned:
            assert any(
                edge.condition == "success"
                and (found.steps[edge.upstream].state == "error" or found.steps[edge.upstream].poisoned)
                for edge in into[name]
            )
    errors = {name for name, ended in found.steps.items() if ended.state == "error"}
    handled = {edge.upstream for name in by_name for edge in into[name] if found.steps[name].state != "skipped"}
    assert (found.status == "COMPLETED") == (errors <= handled)
    assert set((found.error or {"steps": {}})["steps"]) == errors - handled
    sinks = by_name.keys() - {edge.upstream for all_of in into.values() for edge in all_of}
    if found.status == "COMPLETED":
        assert (found.output or {}).keys() == {name for name in sinks if found.steps[name].state == "done"}


@given(jobs(), st.data())
def test_the_order_of_steps_does_not_matter(job: tuple[dict[str, Any], dict[str, Any]], data: st.DataObject) -> None:
    given_document, outcomes = job
    other = {**given_document, "steps": data.draw(st.permutations(given_document["steps"]))}
    first, second = dry_run(given_document, outcomes), dry_run(other, outcomes)
    assert (first.status, first.output, states(first)) == (second.status, second.output, states(second))


@given(jobs())
def test_without_failures_every_job_completes_without_poison(job: tuple[dict[str, Any], dict[str, Any]]) -> None:
    given_document, outcomes = job
    found = dry_run(given_document, {name: [] if value is NO else value for name, value in outcomes.items()})
    assert found.status == "COMPLETED"
    assert not any(ended.poisoned or ended.state == "error" for ended in found.steps.values())
