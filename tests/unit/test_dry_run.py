"""The rules by which a job ends, each by itself, and what holds of every job whatever its steps do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from factories import workflow
from interlock import Interlock
from interlock.model.graph import recovering_steps
from interlock.workflow.dry_run import Ended, Failed, Verdict, dry_run, split_map_source
from random_definitions import RandomDefinition, random_definition
from workflow_oracle import End, possible_verdicts

if TYPE_CHECKING:
    import random

pytestmark = pytest.mark.unit

NO = Failed("no")


def step(name: str, *after: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "plain", "type": "t", "after": list(after), **more}


def states(verdict: Verdict) -> dict[str, str]:
    return {name: f"{ended.state}{'!' if ended.skipped_by_failure else ''}" for name, ended in verdict.steps.items()}


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


def test_a_failure_handler_runs_and_the_job_still_fails() -> None:
    observed = workflow(step("a"), step("b", "a"), step("c", on_failure=["a"]), step("d", always=["a"]))
    found = dry_run(observed, {"a": NO})
    assert states(found) == {"a": "error", "b": "skipped!", "c": "done", "d": "done"}
    assert (found.status, found.error) == ("FAILED", {"steps": {"a": {"message": "no"}}})
    well = dry_run(observed)
    assert states(well) == {"a": "done", "b": "done", "c": "skipped", "d": "done"}
    assert (well.status, well.steps["c"].reason) == ("COMPLETED", "step a did not fail")


def test_a_recovering_step_replaces_the_failed_one() -> None:
    recovered = workflow(step("a"), step("b", "a"), step("c", recovers=["a"]))
    found = dry_run(recovered, {"a": NO, "b": 2, "c": 1})
    assert states(found) == {"a": "error", "b": "done", "c": "done"}
    assert (found.status, found.output) == ("COMPLETED", {"b": 2, "c": 1})
    assert states(dry_run(recovered)) == {"a": "done", "b": "done", "c": "skipped"}
    failed = dry_run(recovered, {"a": NO, "c": NO})
    assert states(failed)["b"] == "skipped!"
    assert failed.error == {"steps": {"a": {"message": "no"}, "c": {"message": "no"}}}


def test_a_step_skipped_because_of_a_failure_can_be_observed_and_recovered() -> None:
    for field, status in (("on_failure", "FAILED"), ("recovers", "COMPLETED")):
        found = dry_run(workflow(step("a"), step("b", "a"), step("c", **{field: ["b"]})), {"a": NO})
        assert states(found) == {"a": "error", "b": "skipped!", "c": "done"}
        assert found.status == status


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
        (1, "abc", "done"),
        (1, "abcd", "skipped!"),
        (3, "a", "done"),
        (3, "ab", "skipped!"),
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
    assert states(found)["pack"] == ("done" if done else "error")
    assert states(found)["ship"] == ("done" if done else "skipped!")
    assert found.status == ("COMPLETED" if done else "FAILED")
    if done:
        assert found.steps["pack"].result == [n for n in range(3) if n not in failing]
    else:
        names = ", ".join(f"pack[{n}]" for n in failing)
        assert found.steps["pack"].error == f"{len(failing)} of 3 parts failed: {names}"


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


def test_a_failed_map_can_be_recovered() -> None:
    recovered = workflow(*MAPPED["steps"], step("repair", recovers=["pack"]))
    found = dry_run(recovered, {"plan": [1], "pack[0]": NO, "repair": "ok"})
    assert states(found) == {"plan": "done", "pack": "error", "pack[0]": "error", "repair": "done", "ship": "done"}
    assert (found.status, found.output) == ("COMPLETED", {"repair": "ok", "ship": None})


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


ENDS = {End.DONE: "done", End.ERROR: "error", End.SKIPPED: "skipped!", End.PASSED_OVER: "skipped"}


def outcomes_of(generated: RandomDefinition) -> dict[str, Any]:
    """Translate the outcomes of a random definition: results, failures, and failures of parts."""
    outcomes: dict[str, Any] = {}
    for step_ in generated.documents[generated.name]["steps"]:
        name = step_["name"]
        outcome = generated.outcomes[generated.name][name]
        outcomes |= {f"{name}[{index}]": NO for index in outcome.failing_parts}
        if step_.get("kind") not in {"approval", "signal"}:
            outcomes[name] = NO if outcome.end is End.ERROR else outcome.result
    return outcomes


@given(st.integers(0, 1_000_000))
def test_a_dry_run_ends_as_the_documented_rules_say(seed: int) -> None:
    generated = random_definition(seed, depth=0)
    document = {"version": "1", "namespace": "default", **generated.documents[generated.name]}
    found = dry_run(document, outcomes_of(generated), input=generated.job_input)
    told = {name: state for name, state in states(found).items() if "[" not in name}
    verdicts = possible_verdicts(generated.documents, generated.name, generated.outcomes, job_input=generated.job_input)
    allowed = [
        ({name: ENDS[end] for name, end in verdict.ends.items()}, verdict.status.value, set(verdict.compensations()))
        for verdict in verdicts
    ]
    assert (told, found.status, set(found.compensated)) in allowed


@given(st.integers(0, 1_000_000), st.randoms(use_true_random=False))
def test_the_order_of_steps_does_not_matter(seed: int, chance: random.Random) -> None:
    generated = random_definition(seed, depth=0)
    document = {"version": "1", "namespace": "default", **generated.documents[generated.name]}
    other = {**document, "steps": chance.sample(document["steps"], len(document["steps"]))}
    # the first of several steps that recover one provides its result, which conditions and maps can read
    assume(all(len(by) == 1 for by in recovering_steps(document).values()))
    given_outcomes = outcomes_of(generated)
    first, second = (dry_run(each, given_outcomes, input=generated.job_input) for each in (document, other))
    assert (first.status, first.output, states(first)) == (second.status, second.output, states(second))
