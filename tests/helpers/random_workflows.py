"""Random workflows with random outcomes, and the ends that the dry run expects of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from interlock.errors import PermanentError
from interlock.model.graph import check_definition, chosen_branches, require_approval
from interlock.workflow.dry_run import Failed, dry_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.workflow.dry_run import Verdict

MAIN, CHILD, GRANDCHILD = "main", "child", "grandchild"
UNKNOWN = "unknown"  # a workflow that is not declared
STARTED = {"job_id": "…"}  # the result of a child step that does not wait
NO = Failed("no")
LATE = Failed("late")  # a signal that never comes
YES = {"approved": True, "by": "eva", "comment": None}
REFUSED = {"approved": False, "by": "eva", "comment": "too dear"}
MOST_PARTS = 4
SIGNAL_TIMEOUT = timedelta(days=1)  # timeout of signals
PAST = "2020-01-01T00:00:00+00:00"
INPUT = {"items": ["x", "y", "z"], "range": {"start": 3, "stop": 10, "size": 3}, "empty": [], "past": PAST, "n": 5}
FIELDS = (*["items"] * 4, *["range"] * 4, "empty", "n", "missing")  # input fields that a map may use
JOINS = ("all", "all", "all", "any", 0.5, 0.6, 1)

plain_values: st.SearchStrategy[Any] = st.sampled_from([1, None, "text", {"a": 1}])
lists: st.SearchStrategy[Any] = st.sampled_from([["a", "b", "c"], [], [1], [1, None, {}, []]])
ranges: st.SearchStrategy[Any] = st.builds(
    lambda start, length, size: {"start": start, "stop": start + length, "size": size},
    st.integers(-5, 5),
    st.integers(-1, 8),
    st.sampled_from([2, 3.0, 100]),
)
# ranges that are invalid
no_ranges: st.SearchStrategy[Any] = st.sampled_from(
    [{"start": 0, "stop": 4, "size": 0}, {"start": 0, "stop": 4, "size": 1.5}, {"start": "0", "stop": 4, "size": 1}]
)
mappable = st.one_of(lists, ranges)
values = st.one_of(mappable, mappable, mappable, mappable, plain_values, no_ranges)
FAILING = [(), (), (), (0,), (1, 2), (0, 3), (0, 1, 2), (0, 1, 2, 3)]  # indexes of failing map parts


@dataclass(frozen=True, slots=True)
class Chances:
    """Percentages of injected faults."""

    crash: int = 0  # an orchestrator or a worker crashes between two statements
    lapse: int = 0  # a lease expires
    repeat: int = 0  # a message is repeated or delayed
    retry: int = 0  # an attempt is retried or returned
    pause: int = 0  # a namespace is paused
    together: int = 0  # several actions run concurrently


@dataclass(frozen=True, slots=True)
class Case:
    """Workflows by name, the outcomes of their steps, and the faults on the way."""

    documents: dict[str, dict[str, Any]]
    outcomes: dict[str, dict[str, Any]]
    again: dict[str, Any]  # outcomes of the main workflow when it is retried
    jobs: int
    worker_count: int | None
    chances: Chances
    seed: int
    steps: dict[str, dict[str, dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        found = {name: {step["name"]: step for step in document["steps"]} for name, document in self.documents.items()}
        object.__setattr__(self, "steps", found)


def renamed(document: dict[str, Any], own: Callable[[str], str]) -> dict[str, Any]:
    """Return a workflow with the names that are unique to a case."""
    steps = [
        {**step, **{key: own(step[key]) for key in ("namespace", "workflow") if key in step}}
        for step in document["steps"]
    ]
    return {**document, **{key: own(document[key]) for key in ("name", "namespace")}, "steps": steps}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw three workflows that start each other, and outcomes for all of their steps."""
    below: tuple[str, ...] = ()
    documents, outcomes = {}, {}
    misfortune = draw(st.sampled_from([0, 2, 6]))
    for name, least, most in ((GRANDCHILD, 1, 2), (CHILD, 1, 3), (MAIN, 5, 12)):
        documents[name] = draw(workflows(name, least, most, below))
        outcomes[name] = draw(outcomes_of(documents[name], misfortune))
        below = (name, *below)
    chance = st.sampled_from([0, 10, 30])
    return Case(
        documents,
        outcomes,
        draw(outcomes_of(documents[MAIN], misfortune)),
        jobs=draw(st.sampled_from([1, 1, 2])),
        worker_count=draw(st.sampled_from([None, None, 1, 2])),
        chances=Chances(*(draw(chance) for _ in range(6))),
        seed=draw(st.integers(0, 2**32)),
    )


@st.composite
def workflows(draw: st.DrawFn, name: str, least: int, most: int, children: tuple[str, ...]) -> dict[str, Any]:
    """Draw a workflow of a few steps."""
    steps: list[dict[str, Any]] = []
    for n in range(draw(st.integers(least, most))):
        before = [step["name"] for step in steps]
        fewest = min(len(before), draw(st.sampled_from([1, 0, 2])))
        upstream = draw(st.lists(st.sampled_from(before), unique=True, min_size=fewest, max_size=3)) if before else []
        failing = st.sampled_from([False] * 3 + [True])
        bad = [name for name in upstream if draw(failing)]
        after = [name for name in upstream if name not in bad]
        step = {"name": f"{name[0]}{n}", "after": after, "after_failure": bad, "join": draw(st.sampled_from(JOINS))}
        step |= draw(kinds({other["name"]: other["kind"] for other in steps if other["name"] in after}, children))
        if draw(st.booleans()):
            step["namespace"] = "blue"
        steps.append({key: value for key, value in step.items() if value not in ([], "all")})
    _decide(draw, steps)
    document = {"name": name, "version": "1", "namespace": "red", "steps": steps}
    check_definition(document)
    return document


def _decide(draw: st.DrawFn, steps: list[dict[str, Any]]) -> None:
    """Turn some plain steps with dependents into decisions."""
    for step in steps:
        after = [other["name"] for other in steps if step["name"] in other.get("after", ())]
        decides: bool = draw(st.booleans())
        if step["kind"] == "plain" and after and decides:
            branches = draw(st.lists(st.sampled_from(after), min_size=1, unique=True))
            step |= {"kind": "decision", "branches": branches}


@st.composite
def kinds(draw: st.DrawFn, after: dict[str, str], children: tuple[str, ...]) -> dict[str, Any]:
    """Draw the kind of a step and its options; `after` maps its dependencies to their kinds."""
    known = ["plain", "plain", "plain", "map", "map", "sleep", "signal", "approval", *["child"] * min(len(children), 1)]
    kind = draw(st.sampled_from(known))
    undo = {"compensate": "undo"} if draw(st.booleans()) else {}
    if kind == "map":
        likely = [name for name, kind_of in after.items() if kind_of in {"plain", "signal", "map"}]
        source = draw(st.sampled_from([*after, *likely * 9, *FIELDS]))
        over = {"over" if source in after else "over_input": source}
        return {"kind": kind, "type": "work", "max_tries": 90, "strategy": draw(st.sampled_from(JOINS)), **over}
    if kind == "child":
        single = [name for name, kind_of in after.items() if kind_of != "map"]
        mapping: dict[str, Any] = {"items": draw(st.sampled_from([*single, "input.items", "input.n"])), "past": PAST}
        return {
            "kind": kind,
            "workflow": draw(st.sampled_from([*children * 4, UNKNOWN])),
            "wait": draw(st.integers(0, 3)) > 0,
            "input": draw(st.sampled_from([None, mapping])),
            **undo,
        }
    if kind == "sleep":
        return {"kind": kind, **draw(st.sampled_from([{"seconds": 0.001}, {"until": PAST}, {"until": "past"}]))}
    if kind == "signal":
        return {
            "kind": kind,
            "signal": draw(st.sampled_from(["paid", "sent"])),
            "timeout": SIGNAL_TIMEOUT.total_seconds(),
        }
    if kind == "approval":
        return {"kind": kind, "timeout": SIGNAL_TIMEOUT.total_seconds()}
    return {"kind": "plain", "type": "work", "max_tries": 90, **undo}


@st.composite
def outcomes_of(draw: st.DrawFn, document: dict[str, Any], misfortune: int) -> dict[str, Any]:
    """Draw an outcome for every step, map part, compensation and signal, by name.

    `misfortune` of twenty outcomes are failures.
    """
    goes_wrong = st.sampled_from([False] * (20 - misfortune) + [True] * misfortune)

    def ends(good: st.SearchStrategy[Any], *bad: Any) -> Any:
        return draw(st.sampled_from(bad) if draw(goes_wrong) else good)

    found: dict[str, Any] = {f"signal {name}": ends(mappable, LATE) for name in ("paid", "sent")}
    for step in document["steps"]:
        name, kind = step["name"], step["kind"]
        found[f"compensate:{name}"] = ends(st.none(), NO) if "compensate" in step else None
        if kind == "decision":
            branches = st.sampled_from(step["branches"])
            found[name] = ends(st.one_of(branches, st.lists(branches, unique=True)), NO, "nowhere", ["nowhere"], 7)
        elif kind == "map":
            failing = draw(st.sampled_from(FAILING))
            found |= {f"{name}[{n}]": NO if n in failing else n for n in range(MOST_PARTS)}
        elif kind == "signal":
            found[name] = found[f"signal {step['signal']}"]
        elif kind == "approval":
            found[name] = found[f"signal {name}"] = ends(st.just(YES), REFUSED, LATE)
        elif kind == "plain":
            found[name] = ends(values, NO)
    return found


def expected(
    case: Case,
    workflow: str,
    given: dict[str, Any],
    outcomes: dict[str, dict[str, Any]],
    reused: dict[str, Any] | None = None,
) -> Verdict:
    """Return the dry run's verdict on a job; child jobs are dry-run when their step is reached."""
    known: dict[str, Any] = dict(reused or {})

    def outcome(name: str) -> Any:
        step = case.steps[workflow].get(name, {})
        kind = step.get("kind")
        told = child_outcome(case, step, given, known, outcomes) if kind == "child" else outcomes[workflow].get(name)
        if is_done(step, told):
            known[name] = told
        return told

    return dry_run(case.documents[workflow], outcome, input=given, reused=reused)


def is_done(step: dict[str, Any], told: Any) -> bool:
    """Return whether this outcome makes the step done."""
    try:
        if step.get("kind") == "decision":
            chosen_branches(step["branches"], told)
        if step.get("kind") == "approval":
            require_approval(told)
    except PermanentError:
        return False
    return not isinstance(told, Failed)


def child_outcome(
    case: Case, step: dict[str, Any], given: dict[str, Any], known: dict[str, Any], outcomes: dict[str, dict[str, Any]]
) -> Any:
    """Return the outcome of a child step."""
    if step["workflow"] == UNKNOWN:
        return Failed("unknown")
    if not step["wait"]:
        return STARTED
    verdict = expected(case, step["workflow"], input_of_child(step, given, known), outcomes)
    return verdict.output if verdict.status == "COMPLETED" else Failed(verdict.status)


def input_of_child(step: dict[str, Any], given: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return the input of a child: its parent's, or the mapped one."""
    if step["input"] is None:
        return given
    source = step["input"]["items"]
    if source.startswith("input."):
        return {"items": given.get(source.removeprefix("input.")), "past": PAST}
    return {"items": known.get(source, source), "past": PAST}
