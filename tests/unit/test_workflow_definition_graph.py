"""Definition documents: every DAG is let pass, every circle is refused with the way around it, in linear time."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import workflow
from interlock.model.graph import GraphError, check_definition, edges, topological_order

pytestmark = pytest.mark.unit


def plain(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "plain", "type": "t", **more}


@st.composite
def dags(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Steps that wait for earlier ones, by success or failure, written down in any order."""
    count = draw(st.integers(1, 12))
    steps = []
    for n in range(count):
        upstream = draw(st.lists(st.integers(0, n - 1), unique=True, max_size=4)) if n else []
        success = draw(st.lists(st.booleans(), min_size=len(upstream), max_size=len(upstream)))
        after = [f"s{m}" for m, good in zip(upstream, success, strict=True) if good]
        steps.append(plain(f"s{n}", after=after, on_failure=[f"s{m}" for m in upstream if f"s{m}" not in after]))
    return draw(st.permutations(steps))


@given(dags())
def test_every_dag_is_let_pass_and_put_in_order(steps: list[dict[str, Any]]) -> None:
    check_definition(workflow(*steps))
    order = topological_order(workflow(*steps))
    assert sorted(order) == sorted(step["name"] for step in steps)
    found = list(edges(workflow(*steps)))
    assert all(order.index(edge.upstream) < order.index(edge.downstream) for edge in found)
    assert len(found) == sum(len(step["after"]) + len(step["on_failure"]) for step in steps)


@given(dags(), st.data())
def test_every_circle_is_refused_with_the_way_around_it(steps: list[dict[str, Any]], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from([step["name"] for step in steps]), min_size=1, unique=True))
    by_name = {step["name"]: step for step in steps}
    for name, upstream in zip(names, [names[-1], *names], strict=False):
        if upstream not in (*by_name[name]["after"], *by_name[name]["on_failure"]):
            by_name[name]["after"] = [*by_name[name]["after"], upstream]
    with pytest.raises(GraphError, match="form a cycle: ") as refused:
        check_definition(workflow(*steps))
    circle = str(refused.value).split("cycle: ")[1].split(" -> ")
    assert circle[0] == circle[-1]
    assert len(set(circle)) == len(circle) - 1
    for upstream, name in pairwise(circle):
        assert upstream in (*by_name[name]["after"], *by_name[name]["on_failure"])
    assert refused.value.step == circle[0]


def test_a_branch_is_marked_in_its_edge() -> None:
    found = edges(
        workflow(plain("a", kind="decision", branches=["b"]), plain("b", after=["a"]), plain("c", after=["a"]))
    )
    assert [(edge.downstream, edge.branch) for edge in found] == [("b", True), ("c", False)]


@pytest.mark.parametrize(
    ("given_document", "path", "told"),
    [
        ([], (), "workflow: a definition is a mapping of name, version"),
        ({**workflow(plain("a")), "stepz": []}, ("stepz",), "there is no such field; did you mean 'steps'?"),
        ({**workflow(plain("a")), "steps": {}}, ("steps",), "a workflow needs a list"),
        (workflow("a"), ("steps", 0), "step number 1 must be a mapping, not str"),  # type: ignore[arg-type]
        (workflow({"kind": "plain"}), ("steps", 0, "name"), "step 'number 1': name: a name consists of"),
        (workflow(plain("a"), plain("a")), ("steps", 1, "name"), "there are two steps of this name"),
        (workflow(plain("a", kind="loop")), ("steps", 0, "kind"), "must be one of plain"),
        (workflow(plain("a", kind=["plain"])), ("steps", 0, "kind"), "must be one of plain"),
        (workflow(plain("a", backoff={"kind": "wild"})), ("steps", 0, "backoff"), "the kind must be one of"),
        (workflow(plain("a", backoff="none")), ("steps", 0, "backoff"), "backoff must be an object"),
        (workflow(plain("a"), plain("b", after="a")), ("steps", 1, "after"), "after must be a list"),
        (
            workflow(plain("a", kind="map", over="b", after=["b"]), plain("b"), plain("c", over="a")),
            None,
            "no such field",
        ),
        (workflow(plain("b"), plain("a", kind="map", over="b")), ("steps", 1, "over"), "'b' must stand in after too"),
        (
            workflow(plain("b"), plain("a", kind="map", over="b", on_failure=["b"])),
            ("steps", 1, "over"),
            "'b' must stand in after too",
        ),
        (workflow(plain("a", kind="decision", branches=["b", "b"])), ("steps", 0, "branches"), "each once"),
    ],
)
def test_a_refusal_leads_to_the_field(given_document: Any, path: tuple[Any, ...] | None, told: str) -> None:
    with pytest.raises(GraphError, match=re.escape(told)) as refused:
        check_definition(given_document)
    assert path in {None, refused.value.path}


def test_absent_and_null_fields_mean_the_default() -> None:
    check_definition(workflow({"name": "a", "type": "t"}))
    everything = ("after", "on_failure", "join", "backoff", "timeout", "config", "compensate", "branches", "over")
    check_definition({**workflow(plain("a", **dict.fromkeys(everything))), "input_schema": None, "timeout": None})


def test_the_check_grows_with_the_steps() -> None:
    def seconds(count: int) -> float:
        chain = [plain(f"s{n}", after=[f"s{n - 1}"] if n else []) for n in range(count)]
        wide = [plain("join", after=[step["name"] for step in chain])]
        begun = time.thread_time()  # not what other processes take
        check_definition(workflow(*reversed(chain), *wide))
        return time.thread_time() - begun

    few, many = (min(seconds(count) for _ in range(5)) for count in (500, 10_000))  # but for garbage
    assert many < 100 * max(few, 0.001), "twenty times as many, and not four hundred times as long"


def test_a_step_cannot_recover_the_recovery_of_a_step_that_it_comes_after() -> None:
    steps = [plain("a"), plain("r", recovers=["a"]), plain("c", after=["a"], recovers=["r"])]
    with pytest.raises(GraphError, match="'c' would wait for itself"):
        check_definition(workflow(*steps))
