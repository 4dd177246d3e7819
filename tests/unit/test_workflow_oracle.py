"""The oracle of the workflow tests, by cases whose expectations come from the documented rules."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from random_definitions import RandomDefinition, random_definition, shrink, smaller_definitions
from workflow_history import History, ObservedCompensation, ObservedJob, ObservedStep, check_history
from workflow_oracle import (
    FAILURE,
    SUCCESS,
    Alternatives,
    Decided,
    Definition,
    Document,
    End,
    Facts,
    JobStatus,
    JobVerdict,
    Outcome,
    TimingDependentError,
    absorbed,
    child_end,
    child_input,
    decide,
    definition_problems,
    failure_stands,
    interpret,
    needed_dependencies,
    own_end,
    possible_verdicts,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

pytestmark = pytest.mark.unit

DONE, ERROR, SKIPPED, PASSED_OVER = End.DONE, End.ERROR, End.SKIPPED, End.PASSED_OVER
CANCELED, REST_CANCELED = End.CANCELED, End.REST_CANCELED
COMPLETED, FAILED = JobStatus.COMPLETED, JobStatus.FAILED


def step(name: str, **fields: Any) -> Document:
    return {"name": name, **fields}


def decision(name: str, *branches: str, **fields: Any) -> Document:
    return {"name": name, "kind": "decision", "branches": list(branches), **fields}


def outcomes_of(fails: Iterable[str] = (), returns: Mapping[str, Any] | None = None) -> dict[str, Outcome]:
    results = {name: Outcome(result) for name, result in (returns or {}).items()}
    return {**results, **dict.fromkeys(fails, FAILURE)}


def run(
    *steps: Document, fails: Iterable[str] = (), returns: Mapping[str, Any] | None = None, job_input: Any = None
) -> JobVerdict:
    """The only verdict about a job of these steps."""
    documents = {"job": {"name": "job", "steps": list(steps)}}
    assert definition_problems(documents, "job") == []
    return interpret(documents, "job", {"job": outcomes_of(fails, returns)}, job_input=job_input)


# --- The cases that were reproduced against an earlier engine --------------------------------------------------------


def refund_steps() -> list[Document]:
    return [
        step("price"),
        decision("route", "ship", "refund", after=["price"]),
        step("ship", after=["route"]),
        step("refund", after=["route", "price"]),
        step("refund_mail", after=["refund", "price"]),
    ]


def test_a_branch_that_was_not_chosen_does_not_run_though_its_other_dependency_is_done() -> None:
    verdict = run(*refund_steps(), returns={"route": "ship"})
    assert verdict.ends == {
        "price": DONE,
        "route": DONE,
        "ship": DONE,
        "refund": PASSED_OVER,
        "refund_mail": PASSED_OVER,
    }
    assert verdict.status is COMPLETED


@pytest.mark.parametrize(
    ("handler", "ship", "status", "compensations"),
    [
        ("on_failure", SKIPPED, FAILED, ["reserve"]),
        ("always", SKIPPED, FAILED, ["reserve"]),
        ("recovers", DONE, COMPLETED, []),
    ],
)
def test_only_recovers_replaces_a_failed_step(
    handler: str, ship: End, status: JobStatus, compensations: list[str]
) -> None:
    verdict = run(
        step("reserve", compensate="release"),
        step("charge", after=["reserve"]),
        step("notify", **{handler: ["charge"]}),
        step("ship", after=["charge"]),
        fails=["charge"],
    )
    assert verdict.ends == {"reserve": DONE, "charge": ERROR, "notify": DONE, "ship": ship}
    assert verdict.status is status
    assert verdict.compensations() == compensations


@pytest.mark.parametrize("fails", [[], ["work"]])
def test_a_finally_step_runs_after_success_and_after_failure(fails: list[str]) -> None:
    verdict = run(
        step("setup"), step("work", after=["setup"]), step("teardown", after=["setup"], always=["work"]), fails=fails
    )
    assert verdict.ends["teardown"] is DONE
    assert verdict.status is (FAILED if fails else COMPLETED)


def test_a_finally_step_is_skipped_when_its_setup_failed() -> None:
    steps = (step("setup"), step("work", after=["setup"]), step("teardown", after=["setup"], always=["work"]))
    verdict = run(*steps, fails=["setup"])
    assert verdict.ends == {"setup": ERROR, "work": SKIPPED, "teardown": SKIPPED}


SAGA = {
    "order": {
        "name": "order",
        "steps": [
            step("reserve", compensate="release"),
            step("pay", kind="child", workflow="payment", after=["reserve"], compensate="refund"),
            step("ship", after=["pay"]),
        ],
    },
    "payment": {
        "name": "payment",
        "steps": [
            step("hold", compensate="unhold"),
            step("check", kind="child", workflow="fraud", after=["hold"]),
            step("capture", after=["check"], compensate="uncapture"),
        ],
    },
    "fraud": {
        "name": "fraud",
        "steps": [step("score", compensate="forget"), step("mark", after=["score"], compensate="unmark")],
    },
}


def test_the_compensations_of_a_completed_child_run_at_the_place_of_the_child_step() -> None:
    verdict = interpret(SAGA, "order", {"order": {"ship": FAILURE}})
    assert verdict.status is FAILED
    assert verdict.compensations() == [
        "pay",
        "pay/capture",
        "pay/check/mark",
        "pay/check/score",
        "pay/hold",
        "reserve",
    ]
    assert verdict.children["pay"].status is COMPLETED
    assert verdict.children["pay"].compensations() == []


def test_a_failed_child_compensates_itself_and_not_as_part_of_its_parent() -> None:
    verdict = interpret(SAGA, "order", {"payment": {"capture": FAILURE}})
    assert verdict.ends == {"reserve": DONE, "pay": ERROR, "ship": SKIPPED}
    assert verdict.compensations() == ["reserve"]
    assert verdict.children["pay"].compensations() == ["check/mark", "check/score", "hold"]


def test_compensations_run_in_reverse_order_of_completion() -> None:
    steps = [step("a", compensate="x"), step("b", compensate="x"), step("c", after=["a", "b"])]
    verdict = run(*steps, fails=["c"])
    assert verdict.compensations(["b", "a"]) == ["a", "b"]
    assert verdict.compensations(["a", "b"]) == ["b", "a"]


def test_a_compensation_that_fails_does_not_keep_the_others_from_running() -> None:
    documents = {"fraud": {**SAGA["fraud"], "steps": [*SAGA["fraud"]["steps"], step("end", after=["mark"])]}}
    outcomes = {"fraud": {"mark": Outcome(compensation_fails=True), "end": FAILURE}}
    assert interpret(documents, "fraud", outcomes).compensations() == ["mark", "score"]


@pytest.mark.parametrize(
    ("items", "failing", "strategy", "end"),
    [
        (3, (), "all", DONE),
        (3, (1,), "all", ERROR),
        (0, (), "all", DONE),
        (3, (0, 1), "any", DONE),
        (2, (0, 1), "any", ERROR),
        (4, (0, 1), 0.5, DONE),
        (4, (0, 1, 2), 0.5, ERROR),
        (2, (2,), "all", DONE),
    ],
)
def test_a_map_ends_in_error_when_its_parts_do_not_meet_its_strategy(
    items: int, failing: tuple[int, ...], strategy: str | float, end: End
) -> None:
    steps = [step("each", kind="map", over_input="items", strategy=strategy), step("then", after=["each"])]
    documents = {"job": {"name": "job", "steps": steps}}
    outcomes = {"job": {"each": Outcome(failing_parts=frozenset(failing))}}
    verdict = interpret(documents, "job", outcomes, job_input={"items": list(range(items))})
    assert verdict.ends == {"each": end, "then": DONE if end is DONE else SKIPPED}
    assert verdict.status is (COMPLETED if end is DONE else FAILED)


@pytest.mark.parametrize(
    ("join", "fails", "end"),
    [
        ("any", ["a", "b"], DONE),
        ("any", ["a", "b", "c"], SKIPPED),
        (2, ["a"], DONE),
        (2, ["a", "b"], SKIPPED),
        (0.6, ["a"], DONE),
        (0.6, ["a", "b"], SKIPPED),
        (0.34, ["a"], DONE),
        ("all", ["a"], SKIPPED),
        ("all", [], DONE),
    ],
)
def test_a_join_needs_as_many_as_it_says(join: str | float, fails: list[str], end: End) -> None:
    verdict = run(step("a"), step("b"), step("c"), step("join", after=["a", "b", "c"], join=join), fails=fails)
    assert verdict.ends["join"] is end
    assert verdict.status is (COMPLETED if end is DONE else FAILED)


@pytest.mark.parametrize(
    ("join", "count", "needed"),
    [("any", 4, 1), ("all", 4, 4), (3, 4, 3), (0.5, 3, 2), (0.6, 5, 3), (0.55, 20, 11), (0.01, 3, 1)],
)
def test_a_ratio_is_rounded_up_to_whole_dependencies(join: str | float, count: int, needed: int) -> None:
    assert needed_dependencies(join, count) == needed


# --- Airflow's trigger rules ----------------------------------------------------------------------------------------

BRANCH = [decision("pick", "x", "y"), step("x", after=["pick"]), step("y", after=["pick"])]


@pytest.mark.parametrize(
    ("rule", "fails", "end"),
    [
        ({"after": ["a", "b"]}, [], DONE),  # all_success
        ({"after": ["a", "b"]}, ["a"], SKIPPED),
        ({"on_failure": ["a", "b"]}, ["a", "b"], DONE),  # all_failed
        ({"on_failure": ["a", "b"]}, ["a"], PASSED_OVER),
        ({"on_failure": ["a", "b"]}, [], PASSED_OVER),
        ({"always": ["a", "b"]}, ["a"], DONE),  # all_done
        ({"always": ["a", "b"]}, [], DONE),
        ({"after": ["a", "b"], "join": "any"}, ["a"], DONE),  # one_success
        ({"after": ["a", "b"], "join": "any"}, ["a", "b"], SKIPPED),
        ({"on_failure": ["a", "b"], "join": "any"}, ["a"], DONE),  # one_failed
        ({"on_failure": ["a", "b"], "join": "any"}, [], PASSED_OVER),
    ],
)
def test_trigger_rules(rule: Document, fails: list[str], end: End) -> None:
    assert run(step("a"), step("b"), step("t", **rule), fails=fails).ends["t"] is end


@pytest.mark.parametrize(
    ("chosen", "fails", "end"),
    [
        ("x", [], DONE),
        (["x", "y"], [], DONE),
        (["x", "y"], ["y"], SKIPPED),
        ("x", ["x"], SKIPPED),
        ([], [], PASSED_OVER),
    ],
)
def test_none_failed_min_one_success_joins_the_branches_of_a_decision(
    chosen: str | list[str], fails: list[str], end: End
) -> None:
    verdict = run(*BRANCH, step("t", after=["x", "y"]), fails=fails, returns={"pick": chosen})
    assert verdict.ends["t"] is end


def test_all_done_runs_after_branches_that_were_not_chosen() -> None:
    assert run(*BRANCH, step("t", always=["x", "y"]), returns={"pick": []}).ends["t"] is DONE


# --- The table of the dependencies ----------------------------------------------------------------------------------

UPSTREAM = {
    "done": [step("u")],
    "recovered": [step("bad_u"), step("rescue", recovers=["bad_u"])],
    "failed": [step("bad_u")],
    "passed over": [step("u", when="input.flag == true")],
    "skipped because of a failure": [step("bad"), step("u", after=["bad"])],
    "skipped and recovered": [step("bad"), step("u", after=["bad"]), step("rescue", recovers=["u"])],
}


@pytest.mark.parametrize(
    ("upstream", "kind", "end"),
    [
        ("done", "after", DONE),
        ("done", "on_failure", PASSED_OVER),
        ("done", "recovers", PASSED_OVER),
        ("done", "always", DONE),
        ("recovered", "after", DONE),
        ("recovered", "on_failure", DONE),
        ("recovered", "recovers", DONE),
        ("recovered", "always", DONE),
        ("failed", "after", SKIPPED),
        ("failed", "on_failure", DONE),
        ("failed", "recovers", DONE),
        ("failed", "always", DONE),
        ("passed over", "after", PASSED_OVER),
        ("passed over", "on_failure", PASSED_OVER),
        ("passed over", "recovers", PASSED_OVER),
        ("passed over", "always", DONE),
        ("skipped because of a failure", "after", SKIPPED),
        ("skipped because of a failure", "on_failure", DONE),
        ("skipped because of a failure", "recovers", DONE),
        ("skipped because of a failure", "always", DONE),
        ("skipped and recovered", "after", DONE),
    ],
)
def test_each_kind_of_dependency_on_each_end(upstream: str, kind: str, end: End) -> None:
    steps = UPSTREAM[upstream]
    name = next(each["name"] for each in steps if each["name"] in {"u", "bad_u"})
    verdict = run(*steps, step("t", **{kind: [name]}), fails=["bad", "bad_u"], job_input={"flag": False})
    assert verdict.ends["t"] is end


def test_a_failed_dependency_comes_before_one_that_was_passed_over() -> None:
    verdict = run(step("a"), step("b", when="false"), step("t", after=["a", "b"]), fails=["a"])
    assert verdict.ends["t"] is SKIPPED


def test_a_recoverer_that_is_recovered_recovers() -> None:
    steps = [step("f"), step("r", recovers=["f"]), step("r2", recovers=["r"]), step("t", after=["f"], when="f == 7")]
    verdict = run(*steps, fails=["f", "r"], returns={"r2": 7})
    assert verdict.ends == {"f": ERROR, "r": ERROR, "r2": DONE, "t": DONE}
    assert verdict.status is COMPLETED
    assert run(*steps, fails=["f", "r", "r2"]).ends["t"] is SKIPPED


def test_the_result_of_a_recovered_step_is_that_of_the_first_recoverer_in_the_definition() -> None:
    steps = [step("second", recovers=["f"]), step("f"), step("third", recovers=["f"]), step("t", after=["f"])]
    steps[-1]["when"] = "f == 2"
    assert run(*steps, fails=["f"], returns={"second": 2, "third": 3}).ends["t"] is DONE
    facts = Facts(Definition({"name": "job", "steps": steps}), {"third": Outcome(3)}, None, {"f": ERROR, "third": DONE})
    assert facts.result("f") == 3


def test_a_recoverer_of_two_steps_runs_when_both_failed() -> None:
    steps = [step("a"), step("b"), step("r", recovers=["a", "b"]), step("t", after=["a", "b"])]
    assert run(*steps, fails=["a", "b"]).status is COMPLETED
    alone = run(*steps, fails=["a"])
    assert (alone.ends["r"], alone.ends["t"], alone.status) == (PASSED_OVER, SKIPPED, FAILED)


def test_a_failed_recoverer_stands_although_another_one_recovered_the_step() -> None:
    verdict = run(step("f"), step("r", recovers=["f"]), step("r2", recovers=["f"]), fails=["f", "r"])
    assert verdict.status is FAILED


# --- Decisions and alternatives -------------------------------------------------------------------------------------


def test_a_step_after_a_decision_that_is_no_branch_runs_whatever_is_chosen() -> None:
    verdict = run(*BRANCH, step("log", after=["pick"]), returns={"pick": []})
    assert verdict.ends == {"pick": DONE, "x": PASSED_OVER, "y": PASSED_OVER, "log": DONE}


def test_a_branch_is_passed_over_even_if_another_dependency_failed() -> None:
    verdict = run(step("a"), decision("pick", "x"), step("x", after=["pick", "a"]), fails=["a"], returns={"pick": []})
    assert verdict.ends["x"] is PASSED_OVER


@pytest.mark.parametrize("join", ["any", 1, 2])
def test_a_branch_that_was_not_chosen_does_not_run_whatever_its_join_is(join: str | int) -> None:
    steps = [step("a"), decision("pick", "x"), step("x", after=["pick", "a"], join=join)]
    assert run(*steps, returns={"pick": []}).ends["x"] is PASSED_OVER
    assert run(*steps, returns={"pick": "x"}).ends["x"] is DONE


def test_a_branch_of_a_failed_decision_is_skipped_whatever_its_join_is() -> None:
    steps = [step("a"), decision("pick", "x"), step("x", after=["pick", "a"], join="any")]
    assert run(*steps, fails=["pick"]).ends["x"] is SKIPPED


@pytest.mark.parametrize("join", ["any", "all"])
def test_a_branch_of_a_decision_that_was_passed_over_is_passed_over(join: str) -> None:
    steps = [step("a"), decision("pick", "x", when="false"), step("x", after=["pick", "a"], join=join)]
    assert run(*steps, fails=["a"] if join == "all" else []).ends["x"] is PASSED_OVER


@pytest.mark.parametrize(("first", "second", "end"), [("x", "x", DONE), ("x", [], PASSED_OVER), ([], "x", PASSED_OVER)])
def test_a_branch_of_two_decisions_must_be_chosen_by_both(first: Any, second: Any, end: End) -> None:
    steps = [decision("p", "x"), decision("q", "x"), step("x", after=["p", "q"], join="any")]
    assert run(*steps, returns={"p": first, "q": second}).ends["x"] is end


def test_a_step_further_along_a_branch_lies_on_it_and_an_extra_path_takes_it_off() -> None:
    steps = [*BRANCH, step("x2", after=["x"]), step("log", after=["pick"]), step("off", after=["y", "log"])]
    definition = Definition({"name": "job", "steps": steps})
    assert [definition.branch_of("pick", name) for name in ("x", "x2", "log", "off", "pick")] == [
        "x",
        "x",
        None,
        None,
        None,
    ]
    # y is passed over, and so is off; it is no alternative to x2, so the join is passed over.
    assert run(*steps, step("t", after=["x2", "off"]), returns={"pick": "x"}).ends["t"] is PASSED_OVER


def test_alternatives_count_beside_other_dependencies() -> None:
    steps = [step("a"), *BRANCH, step("t", after=["x", "a", "y"])]
    assert run(*steps, returns={"pick": "y"}).ends["t"] is DONE
    assert run(*steps, returns={"pick": "y"}, fails=["a"]).ends["t"] is SKIPPED
    assert run(*steps, fails=["pick"]).ends["t"] is SKIPPED


def test_one_alternative_alone_is_an_ordinary_dependency() -> None:
    assert run(*BRANCH, step("t", after=["x", "pick"]), returns={"pick": "y"}).ends["t"] is PASSED_OVER


NESTED = [
    decision("outer", "inner", "z"),
    decision("inner", "x", "y", after=["outer"]),
    step("x", after=["inner"]),
    step("y", after=["inner"]),
    step("z", after=["outer"]),
    step("t", after=["z", "x", "y"]),
]


@pytest.mark.parametrize(
    ("outer", "inner", "end"),
    [
        ("z", "x", DONE),
        ("inner", "y", DONE),
        ("inner", [], PASSED_OVER),
        (["inner", "z"], "x", DONE),
        (["inner", "z"], [], PASSED_OVER),
        ([], "x", PASSED_OVER),
    ],
)
def test_the_alternatives_of_an_inner_decision_are_part_of_an_alternative_of_the_outer(
    outer: str | list[str], inner: str | list[str], end: End
) -> None:
    assert run(*NESTED, returns={"outer": outer, "inner": inner}).ends["t"] is end
    groups = Definition({"name": "job", "steps": NESTED}).alternatives("t")
    assert groups == (
        Alternatives("outer", {"z": ("z",), "inner": (Alternatives("inner", {"x": ("x",), "y": ("y",)}),)}),
    )


def test_alternatives_do_not_group_under_a_partial_join() -> None:
    steps = [*BRANCH, step("t", after=["x", "y"], join=2)]
    assert run(*steps, returns={"pick": "x"}).ends["t"] is PASSED_OVER
    assert run(*steps, returns={"pick": ["x", "y"]}).ends["t"] is DONE


def test_dependencies_of_other_kinds_are_no_alternatives() -> None:
    verdict = run(*BRANCH, step("t", after=["x"], on_failure=["y"]), returns={"pick": "x"})
    assert verdict.ends["t"] is PASSED_OVER


# --- Conditions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("a == 1", True),
        ("a != 1", False),
        ("input.flag == true", True),
        ("not a == 1", False),
        ("a == 2 or input.flag == true", True),
        ("a == 1 and not input.flag == true", False),
        ("a >= 1 and a < 2", True),
        ("a == null", False),
    ],
)
def test_a_step_whose_condition_is_false_is_passed_over(condition: str, holds: bool) -> None:  # noqa: FBT001 (a table)
    verdict = run(
        step("a"), step("t", after=["a"], when=condition), returns={"a": 1}, job_input={"flag": True, "items": []}
    )
    assert verdict.ends["t"] is (DONE if holds else PASSED_OVER)
    assert verdict.status is COMPLETED


# --- How a job ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "fails", "status"),
    [
        ([step("a"), step("b"), step("t", after=["a", "b"], join="any")], ["a"], COMPLETED),
        # a dependent that needed the failed step stands against its absorption
        ([step("a"), step("b"), step("t", after=["a", "b"], join="any"), step("u", after=["a"])], ["a"], FAILED),
        # a chain that ends in a race: the skipped step is absorbed, and the failed one with it
        ([step("a"), step("b", after=["a"]), step("c"), step("t", after=["b", "c"], join="any")], ["a"], COMPLETED),
        # the skipped step is recovered
        ([step("a"), step("b", after=["a"]), step("r", recovers=["b"])], ["a"], COMPLETED),
        # observers absorb nothing, not even over a partial join
        ([step("a"), step("b"), step("t", always=["a"], after=["b"], join="any")], ["a"], FAILED),
        ([step("a"), step("b"), step("t", on_failure=["a", "b"], join="any")], ["a"], FAILED),
        # all dependents were passed over: nothing did without it
        ([step("a"), step("t", after=["a"], when="false"), step("b", after=["t"])], ["a"], FAILED),
        # a partial join that ran and failed has done without it, but fails itself
        ([step("a"), step("b"), step("t", after=["a", "b"], join="any")], ["a", "t"], FAILED),
        # an own failure that nothing depends on
        ([step("a"), step("b")], ["a"], FAILED),
        ([step("a"), step("b")], [], COMPLETED),
    ],
)
def test_a_failure_stands_unless_it_is_absorbed(steps: list[Document], fails: list[str], status: JobStatus) -> None:
    assert run(*steps, fails=fails).status is status


def test_a_step_that_was_canceled_alone_counts_as_failed() -> None:
    documents = {"job": {"name": "job", "steps": [step("a"), step("t", after=["a"]), step("h", on_failure=["a"])]}}
    verdict = interpret(documents, "job", {"job": {"a": Outcome(end=CANCELED)}})
    assert verdict.ends == {"a": CANCELED, "t": SKIPPED, "h": DONE}
    assert verdict.status is FAILED


def test_a_rest_that_was_canceled_counts_as_passed_over() -> None:
    steps = [step("f"), step("g", after=["f"], join="any"), step("h", on_failure=["g"])]
    definition = Definition({"name": "job", "steps": steps})
    facts = Facts(definition, {}, None, {"f": ERROR, "g": REST_CANCELED})
    assert decide(facts, "h") == {Decided.PASSED_OVER}
    assert not absorbed(facts, "f")


def test_timing_decides_why_a_join_that_cannot_be_met_is_skipped() -> None:
    steps = [step("a", when="false"), step("b", when="false"), step("c"), step("t", after=["a", "b", "c"], join=2)]
    documents = {"job": {"name": "job", "steps": steps}}
    verdicts = possible_verdicts(documents, "job", {"job": {"c": FAILURE}})
    assert {verdict.ends["t"] for verdict in verdicts} == {SKIPPED, PASSED_OVER}
    with pytest.raises(TimingDependentError, match="2 verdicts"):
        interpret(documents, "job", {"job": {"c": FAILURE}})


def test_cancel_rest_is_left_to_the_check_of_a_history() -> None:
    steps = [step("a"), step("b"), step("t", after=["a", "b"], join="any", cancel_rest=True)]
    with pytest.raises(TimingDependentError, match="check_history"):
        interpret({"job": {"name": "job", "steps": steps}}, "job", {})


# --- Validity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([step("a"), step("a")], "named 2 times"),
        ([step("a", after=["b"])], "names b, which is no step"),
        ([step("a"), step("b", after=["a"], always=["a"])], "names a step more than once"),
        ([step("a", after=["b"]), step("b", always=["a"])], "cycle"),
        # t waits for r, which recovers f, and r depends on t
        ([step("f"), step("t", after=["f"]), step("r", recovers=["f"], always=["t"])], "cycle"),
        ([decision("d", "x"), step("x")], "does not name it in after"),
        ([decision("d"), step("x", after=["d"])], "a decision has branches"),
        ([decision("d", "x"), step("x", after=["d"]), step("r", recovers=["d"])], "recovers a decision"),
        ([step("a"), step("b", after=["a"], join=2)], "join 2 does not fit"),
        ([step("a"), step("b", after=["a"], cancel_rest=True)], "cancel_rest needs"),
        ([step("a", kind="sleep", seconds=0, compensate="x")], "no compensation"),
        ([step("a"), step("b", always=["a"], when="a == 1")], "not in after"),
        ([step("a", kind="map")], "either over or over_input"),
        ([step("a", kind="child", workflow="none")], "is not defined"),
    ],
)
def test_invalid_definitions_are_named(steps: list[Document], problem: str) -> None:
    problems = definition_problems({"job": {"name": "job", "steps": steps}}, "job")
    assert any(problem in each for each in problems), problems


# --- The check of a history -----------------------------------------------------------------------------------------


def ended(name: str, started: float | None, ended: float, end: End = DONE) -> ObservedStep:
    return ObservedStep(name, end, ended, started)


def violations(steps: list[Document], observed: ObservedJob, outcomes: dict[str, Outcome] | None = None) -> list[str]:
    return check_history({"job": {"name": "job", "steps": steps}}, "job", {"job": outcomes or {}}, observed)


CHAIN = [step("a", compensate="x"), step("b", after=["a"], compensate="x"), step("c", after=["b"])]
CHAIN_STEPS = (ended("a", 1, 2), ended("b", 3, 4), ended("c", 5, 6, ERROR))
UNDO = (ObservedCompensation("b", 7, 8), ObservedCompensation("a", 9, 10))


def test_a_history_that_keeps_the_rules_has_no_violations() -> None:
    assert violations(CHAIN, ObservedJob(FAILED, 11, CHAIN_STEPS, UNDO), {"c": FAILURE}) == []


@pytest.mark.parametrize(
    ("observed", "violation"),
    [
        (ObservedJob(COMPLETED, 11, CHAIN_STEPS), "the job is COMPLETED, expected FAILED"),
        (ObservedJob(FAILED, 11, CHAIN_STEPS), "compensated [], expected ['b', 'a']"),
        (ObservedJob(FAILED, 11, CHAIN_STEPS, UNDO[:1]), "compensated ['b'], expected"),
        (
            ObservedJob(FAILED, 12, CHAIN_STEPS, (ObservedCompensation("a", 7, 8), ObservedCompensation("b", 9, 10))),
            "compensated ['a', 'b'], expected ['b', 'a']",
        ),
        (ObservedJob(FAILED, 9, CHAIN_STEPS, UNDO), "the job ended at 9, before the compensation of a"),
        (ObservedJob(FAILED, 5, CHAIN_STEPS), "the job ended at 5, before its steps"),
        (
            ObservedJob(FAILED, 11, CHAIN_STEPS, (ObservedCompensation("b", 5, 8), UNDO[1])),
            "compensation started at 5, before all steps",
        ),
        (
            ObservedJob(FAILED, 11, CHAIN_STEPS, (ObservedCompensation("b", 7, 10), UNDO[1])),
            "compensation of a started at 9, before b's ended",
        ),
        (
            ObservedJob(FAILED, 11, (CHAIN_STEPS[0], ended("b", 1, 4), CHAIN_STEPS[2]), UNDO),
            "b: runs at 1, where the rules say: has to wait",
        ),
        (
            ObservedJob(FAILED, 11, (*CHAIN_STEPS[:2], ended("c", None, 6, SKIPPED)), UNDO),
            "c: skipped because of a failure at 6, where the rules say: runs",
        ),
        (ObservedJob(FAILED, 11, (*CHAIN_STEPS[:2], ended("c", 5, 6)), UNDO), "c: ended done, expected error"),
        (ObservedJob(FAILED, 11, (*CHAIN_STEPS[:2], ended("c", 5, 6, CANCELED)), UNDO), "c: ended canceled"),
        (ObservedJob(FAILED, 11, CHAIN_STEPS[:2], UNDO), "expected one end of each"),
        (
            ObservedJob(FAILED, 11, CHAIN_STEPS, (replace(UNDO[0], failed=True), UNDO[1])),
            "compensation of b failed against its handler",
        ),
    ],
)
def test_each_broken_rule_is_a_violation(observed: ObservedJob, violation: str) -> None:
    found = violations(CHAIN, observed, {"c": FAILURE})
    assert any(violation in each for each in found), found


def test_a_branch_that_ran_without_being_chosen_is_a_violation() -> None:
    steps = tuple(ended(each["name"], 2 * i, 2 * i + 1) for i, each in enumerate(refund_steps()))
    found = violations(refund_steps(), ObservedJob(COMPLETED, 20, steps), {"route": Outcome("ship")})
    assert found == ["refund: runs at 6, where the rules say: passed over; with all ends known: passed over"]


RACE = [step("a"), step("b"), step("t", after=["a", "b"], join="any", cancel_rest=True)]


@pytest.mark.parametrize(
    ("observed_b", "found"),
    [
        (ended("b", 1, 5, REST_CANCELED), []),
        (ended("b", None, 3, REST_CANCELED), []),
        (ended("b", 1, 5, ERROR), []),  # it failed while it was asked to stop
        (ended("b", 1, 5), []),  # it was done before it noticed
        (ended("b", 4, 5), ["b: started at 4, after t had canceled it at 3"]),
    ],
)
def test_the_rest_of_a_race_is_canceled(observed_b: ObservedStep, found: list[str]) -> None:
    job = ObservedJob(COMPLETED, 9, (ended("a", 0, 2), observed_b, ended("t", 3, 6)))
    assert violations(RACE, job) == found


def test_a_rest_that_nothing_canceled_is_a_violation() -> None:
    steps = [step("a"), step("b"), step("t", after=["a", "b"], join="any")]
    job = ObservedJob(COMPLETED, 9, (ended("a", 0, 2), ended("b", 1, 5, REST_CANCELED), ended("t", 3, 6)))
    assert violations(steps, job) == [
        "b: canceled as the rest of a join, but no step with cancel_rest that depends on it ran"
    ]


def test_a_partial_join_may_run_early_and_not_before_enough_are_met() -> None:
    steps = [step("a"), step("b"), step("c"), step("t", after=["a", "b", "c"], join=2)]
    upstream = (ended("a", 0, 2), ended("b", 0, 3), ended("c", 0, 9))
    assert violations(steps, ObservedJob(COMPLETED, 10, (*upstream, ended("t", 4, 5)))) == []
    assert "t: runs at 2" in violations(steps, ObservedJob(COMPLETED, 10, (*upstream, ended("t", 2, 5))))[0]


def test_the_order_of_the_ends_decides_why_a_join_was_skipped() -> None:
    steps = [step("a", when="false"), step("b", when="false"), step("c"), step("t", after=["a", "b", "c"], join=2)]

    def job(end_of_t: End, c_ended: float) -> ObservedJob:
        upstream = (ended("a", None, 1, PASSED_OVER), ended("b", None, 1, PASSED_OVER), ended("c", 0, c_ended, ERROR))
        return ObservedJob(FAILED, 9, (*upstream, ended("t", None, 2, end_of_t)))

    outcomes = {"c": FAILURE}
    assert violations(steps, job(PASSED_OVER, 5), outcomes) == []
    assert violations(steps, job(SKIPPED, 2), outcomes) == []
    assert "t: skipped because of a failure at 2" in violations(steps, job(SKIPPED, 5), outcomes)[0]


def test_a_step_waits_for_the_steps_that_recover_its_dependency() -> None:
    steps = [step("f"), step("r", recovers=["f"]), step("t", after=["f"])]
    upstream = (ended("f", 0, 1, ERROR), ended("r", 2, 4))
    outcomes = {"f": FAILURE}
    assert violations(steps, ObservedJob(COMPLETED, 9, (*upstream, ended("t", 5, 6))), outcomes) == []
    for early in (ended("t", 3, 6), ended("t", None, 3, SKIPPED)):
        assert "has to wait" in violations(steps, ObservedJob(COMPLETED, 9, (*upstream, early)), outcomes)[0]


CANCELED_STEPS = (ended("a", 1, 2), ended("b", 3, 6, CANCELED), ended("c", None, 5, CANCELED))


@pytest.mark.parametrize(
    ("changed", "violation"),
    [
        ({}, None),
        ({"status": FAILED}, "the job is FAILED, expected CANCELED"),
        ({"compensations": ()}, "compensated [], expected ['a']"),
        (
            {"steps": (*CANCELED_STEPS[:2], ended("c", None, 6, SKIPPED))},
            "c: skipped because of a failure at 6, after the job was canceled at 5",
        ),
        (
            {"steps": (CANCELED_STEPS[0], ended("b", 3, 5), ended("c", 6, 7))},
            "c: started at 6, after the job was canceled at 5",
        ),
        (
            {"steps": (CANCELED_STEPS[0], ended("b", 3, 6, REST_CANCELED), CANCELED_STEPS[2])},
            "no step with cancel_rest",
        ),
    ],
)
def test_nothing_new_runs_in_a_canceled_job_and_it_compensates(changed: dict[str, Any], violation: str | None) -> None:
    undo = (ObservedCompensation("a", 7, 8),)
    job = replace(ObservedJob(JobStatus.CANCELED, 9, CANCELED_STEPS, undo, cancel_requested=5), **changed)
    found = violations(CHAIN, job)
    assert any(violation in each for each in found) if violation else found == []


def saga_history() -> ObservedJob:
    """The parent is canceled at 10, while the first step of its child runs."""
    child_steps = (
        ended("hold", 5, 12),
        ObservedStep("check", CANCELED, 10),
        ObservedStep("capture", CANCELED, 10),
    )
    child_undo = (ObservedCompensation("hold", 13, 14),)
    child = ObservedJob(JobStatus.CANCELED, 15, child_steps, child_undo, cancel_requested=10)
    steps = (ended("reserve", 1, 2), ended("pay", 3, 16, CANCELED), ObservedStep("ship", CANCELED, 10))
    undo = (ObservedCompensation("reserve", 17, 18),)
    return ObservedJob(JobStatus.CANCELED, 19, steps, undo, {"pay": child}, cancel_requested=10)


def test_a_canceled_parent_compensates_after_its_child() -> None:
    job = saga_history()
    assert check_history(SAGA, "order", {}, job) == []
    early = replace(job, compensations=(ObservedCompensation("reserve", 11, 12),))
    assert check_history(SAGA, "order", {}, early) == [
        "compensation started at 11, before all steps and child jobs had ended"
    ]
    steps = (job.steps[0], ended("pay", 3, 10, CANCELED), job.steps[2])
    assert "pay: ended at 10, before its child job at 15" in check_history(SAGA, "order", {}, replace(job, steps=steps))
    uncanceled = {"pay": replace(job.children["pay"], cancel_requested=None)}
    found = check_history(SAGA, "order", {}, replace(job, children=uncanceled))
    assert "pay: its child job was not canceled, but the job was at 10" in found


def test_a_job_does_not_end_before_its_child() -> None:
    found = check_history(SAGA, "order", {}, replace(saga_history(), ended=11, compensations=()))
    assert "the job ended at 11, before its steps and child jobs at 16" in found


def test_a_completed_child_is_compensated_at_its_place() -> None:
    documents = {
        "order": {
            "name": "order",
            "steps": [
                step("a", compensate="x"),
                step("pay", kind="child", workflow="fraud", after=["a"]),
                step("b", after=["pay"], compensate="x"),
                step("c", after=["b"]),
            ],
        },
        "fraud": SAGA["fraud"],
    }
    outcomes = {"order": {"c": FAILURE}}

    def job(*order: str) -> ObservedJob:
        undo = {name: ObservedCompensation(name.split("/")[-1], 20 + i, 21 + i) for i, name in enumerate(order)}
        child = ObservedJob(
            COMPLETED,
            7,
            (ended("score", 3, 4), ended("mark", 5, 6)),
            tuple(each for name, each in undo.items() if "/" in name),
        )
        steps = (ended("a", 1, 2), ended("pay", 3, 8), ended("b", 9, 10), ended("c", 11, 12, ERROR))
        return ObservedJob(
            FAILED, 30, steps, tuple(each for name, each in undo.items() if "/" not in name), {"pay": child}
        )

    assert check_history(documents, "order", outcomes, job("b", "pay/mark", "pay/score", "a")) == []
    for wrong in [("b", "a", "pay/mark", "pay/score"), ("b", "pay/score", "pay/mark", "a"), ("b", "a")]:
        assert check_history(documents, "order", outcomes, job(*wrong)) == [
            f"compensated {list(wrong)}, expected ['b', 'pay/mark', 'pay/score', 'a']"
        ]


def test_the_parts_of_a_canceled_map_do_not_start() -> None:
    steps = [step("each", kind="map", over_input="items")]
    documents = {"job": {"name": "job", "steps": steps}}

    def found(second: ObservedStep) -> list[str]:
        each = ObservedStep("each", CANCELED, 5, 1, (ended("0", 2, 3), second))
        job = ObservedJob(JobStatus.CANCELED, 9, (each,), cancel_requested=4)
        return check_history(documents, "job", {}, job, job_input={"items": [0, 1]})

    assert found(ObservedStep("1", CANCELED, 5)) == []
    assert found(ended("1", 6, 7)) == ["each: part 1 started at 6, after the map was canceled at 5"]


# --- Random definitions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancel_rest", [False, True])
def test_random_definitions_are_valid_and_repeatable(cancel_rest: bool) -> None:  # noqa: FBT001 (both cases)
    for seed in range(150):
        generated = random_definition(seed, cancel_rest=cancel_rest)
        assert 3 <= len(generated.documents[generated.name]["steps"]) <= 14
        for name in generated.documents:
            assert definition_problems(generated.documents, name) == []
        if seed % 10 == 0:
            assert generated == random_definition(seed, cancel_rest=cancel_rest)


def test_300_random_definitions_are_interpretable_and_any_order_of_ends_is_allowed() -> None:
    statuses, ends = set(), set()
    for seed in range(300):
        generated = random_definition(seed)
        verdicts = possible_verdicts(
            generated.documents, generated.name, generated.outcomes, job_input=generated.job_input
        )
        for order in range(2):
            job = play(generated, random.Random(2 * seed + order))  # noqa: S311 (repeatable)
            observed = {each.name: each.end for each in job.steps}
            assert any((job.status, observed) == (verdict.status, verdict.ends) for verdict in verdicts), seed
            assert history_violations(generated, job) == [], seed
        statuses |= {verdict.status for verdict in verdicts}
        ends |= {end for verdict in verdicts for end in verdict.ends.values()}
    assert statuses == {COMPLETED, FAILED}
    assert ends == {DONE, ERROR, SKIPPED, PASSED_OVER}


def test_histories_with_canceled_rests_and_canceled_jobs_keep_the_rules() -> None:
    ends = set()
    for seed in range(300):
        generated = random_definition(seed, cancel_rest=True)
        rng = random.Random(seed)  # noqa: S311 (repeatable)
        job = play(generated, rng, cancel_after=rng.randrange(12) if seed % 2 else None)
        assert history_violations(generated, job) == [], seed
        ends |= {each.end for each in job.steps}
    assert ends == set(End)


def test_a_history_with_one_changed_end_breaks_a_rule() -> None:
    for seed in range(60):
        generated = random_definition(seed)
        job = play(generated, random.Random(seed))  # noqa: S311 (repeatable)
        verdicts = possible_verdicts(
            generated.documents, generated.name, generated.outcomes, job_input=generated.job_input
        )
        for index, each in enumerate(job.steps):
            for end in {DONE, ERROR, SKIPPED, PASSED_OVER} - {each.end}:
                started = each.ended if end in {DONE, ERROR} else None
                steps = (*job.steps[:index], replace(each, end=end, started=started), *job.steps[index + 1 :])
                ends = {other.name: other.end for other in steps}
                if not any(ends == verdict.ends for verdict in verdicts):
                    assert history_violations(generated, replace(job, steps=steps)), (seed, each.name, end)


def test_a_definition_shrinks_to_the_steps_that_matter() -> None:
    def has_recoverer(generated: RandomDefinition) -> bool:
        return any("recovers" in each for each in generated.documents[generated.name]["steps"])

    generated = next(each for each in map(random_definition, range(100)) if has_recoverer(each))
    shrunk = shrink(generated, has_recoverer)
    assert len(shrunk.documents[shrunk.name]["steps"]) == 2
    for seed in range(10):
        for smaller in smaller_definitions(random_definition(seed)):
            assert possible_verdicts(smaller.documents, smaller.name, smaller.outcomes, job_input=smaller.job_input)


def history_violations(generated: RandomDefinition, job: ObservedJob) -> list[str]:
    return check_history(generated.documents, generated.name, generated.outcomes, job, job_input=generated.job_input)


def play(generated: RandomDefinition, rng: random.Random, *, cancel_after: int | None = None) -> ObservedJob:
    """Runs a job in a random order of decisions and ends; cancels it after so many events."""
    player = Player(generated, generated.name, generated.job_input, rng, [0])
    job = player.play(cancel_after)
    return job if job.status is COMPLETED else with_compensations(generated, job)


def with_compensations(generated: RandomDefinition, job: ObservedJob) -> ObservedJob:
    history = History(generated.documents, generated.name, generated.outcomes, job, job_input=generated.job_input)
    return compensate(generated, generated.name, job, history.plan(), job.ended + 1)


def compensate(generated: RandomDefinition, name: str, job: ObservedJob, plan: list[str], moment: float) -> ObservedJob:
    """Adds the planned compensations, one at each moment, to the job and its child jobs."""
    outcomes = generated.outcomes[name]
    own = tuple(
        ObservedCompensation(each, moment + i, moment + i, outcomes.get(each, SUCCESS).compensation_fails)
        for i, each in enumerate(plan)
        if "/" not in each
    )
    children = dict(job.children)
    for child_step, child in job.children.items():
        inner = [each.removeprefix(f"{child_step}/") if each.startswith(f"{child_step}/") else "/" for each in plan]
        if child.status is COMPLETED:
            workflow = next(
                each["workflow"] for each in generated.documents[name]["steps"] if each["name"] == child_step
            )
            children[child_step] = replace(compensate(generated, workflow, child, inner, moment), ended=child.ended)
    return replace(job, compensations=own, children=children, ended=moment + len(plan))


class Player:
    """Plays one job: at each moment it takes one of the decisions that the rules allow, or ends a running step."""

    def __init__(
        self, generated: RandomDefinition, name: str, job_input: Any, rng: random.Random, clock: list[int]
    ) -> None:
        self.generated = generated
        self.name = name
        self.definition = Definition(generated.documents[name])
        self.outcomes = generated.outcomes[name]
        self.job_input = job_input
        self.rng = rng
        self.clock = clock
        self.started: dict[str, int] = {}
        self.ended: dict[str, ObservedStep] = {}
        self.stopping: set[str] = set()
        self.children: dict[str, ObservedJob] = {}

    def tick(self) -> int:
        self.clock[0] += 1
        return self.clock[0]

    def facts(self) -> Facts:
        ends = {name: each.end for name, each in self.ended.items()}
        return Facts(self.definition, self.outcomes, self.job_input, ends)

    def play(self, cancel_after: int | None = None) -> ObservedJob:
        events = 0
        requested = None
        while len(self.ended) < len(self.definition.steps):
            if events == cancel_after:
                requested = self.cancel()
                break
            events += 1
            waiting = [name for name in self.definition.steps if name not in self.ended and name not in self.started]
            options: list[tuple[str, Decided | None]] = [
                (name, decided) for name in waiting for decided in decide(self.facts(), name)
            ]
            options += [(name, None) for name in self.started if name not in self.ended]
            name, decided = self.rng.choice(sorted(options, key=str))
            if decided is None:
                self.finish(name)
            elif decided is Decided.RUNS:
                self.start(name)
            else:
                self.end(name, End(decided.value))
        status = FAILED if failure_stands(self.facts()) else COMPLETED
        steps = tuple(self.ended[name] for name in self.definition.steps)
        if requested is not None:
            status = JobStatus.CANCELED
        return ObservedJob(status, self.tick(), steps, children=self.children, cancel_requested=requested)

    def start(self, name: str) -> None:
        self.started[name] = self.tick()
        if self.definition.steps[name].get("cancel_rest"):
            for rest in self.definition.upstream(name):
                if rest in self.started:
                    self.stopping.add(rest)
                elif rest not in self.ended:
                    self.end(rest, REST_CANCELED)

    def finish(self, name: str) -> None:
        stopping = name in self.stopping
        if stopping and self.rng.random() < 0.6:
            self.stop_child(name)
            self.end(name, REST_CANCELED)
            return
        if self.definition.kind(name) == "child":
            declared = self.definition.steps[name]
            child = Player(self.generated, declared["workflow"], child_input(declared), self.rng, self.clock).play()
            self.children[name] = child = self.compensated(declared["workflow"], child)
            end = child_end(child.status)
        else:
            end = own_end(self.facts(), name)
        self.end(name, REST_CANCELED if stopping and end is ERROR else end)

    def compensated(self, workflow: str, child: ObservedJob) -> ObservedJob:
        if child.status is COMPLETED:
            return child
        outcomes, documents = self.generated.outcomes, self.generated.documents
        plan = History(documents, workflow, outcomes, child, job_input={}).plan()
        done = compensate(self.generated, workflow, child, plan, self.tick())
        self.clock[0] += len(plan)
        return done

    def stop_child(self, name: str) -> None:
        """Cancels the child job of a running child step before any of its steps started."""
        if self.definition.kind(name) == "child":
            workflow = self.definition.steps[name]["workflow"]
            requested = self.tick()
            steps = tuple(
                ObservedStep(each["name"], CANCELED, self.tick())
                for each in self.generated.documents[workflow]["steps"]
            )
            self.children[name] = ObservedJob(JobStatus.CANCELED, self.tick(), steps, cancel_requested=requested)

    def end(self, name: str, end: End) -> None:
        self.ended[name] = ObservedStep(name, end, self.tick(), self.started.get(name))

    def cancel(self) -> int:
        requested = self.tick()
        for name in self.definition.steps:
            if name in self.ended:
                continue
            if name in self.started and self.definition.kind(name) != "child" and self.rng.random() < 0.5:
                self.finish(name)
            else:
                if name in self.started:
                    self.stop_child(name)
                self.end(name, CANCELED)
        return requested
