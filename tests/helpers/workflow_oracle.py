"""Interprets workflow definitions by the documented rules alone: the independent oracle of the workflow tests.

`interpret` tells how every step and the job must end when the ends do not depend on timing; `possible_verdicts` lists
every allowed verdict when they do. The rules stand in the order of the documentation: how a step ends, when a step is
decided, how a job ends, compensation. `workflow_history.check_history` applies them to an observed job, for any timing.

The documentation leaves room in these places; the chosen reading is marked there with *Reading*:
a failed decision and a partial join; a branch whose decision was passed over; alternatives that are not known;
paths and recovery edges; topological ties; recoverers of recoverers; a canceled rest and absorption; a failed
compensation; the strategies of a map; the input of a child job; a ratio.
"""

from __future__ import annotations

import ast
import math
import operator
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Document = dict[str, Any]
DEPENDENCY_FIELDS = ("after", "on_failure", "always", "recovers")
KINDS = ("plain", "decision", "map", "child", "sleep", "signal", "approval")
COMPENSABLE_KINDS = ("plain", "decision", "child")


# --- Values ---------------------------------------------------------------------------------------------------------


class End(Enum):
    """The way in which a step ended; REST_CANCELED is the special case of passed over that `cancel_rest` causes."""

    DONE = "done"
    ERROR = "error"
    CANCELED = "canceled"
    SKIPPED = "skipped because of a failure"
    PASSED_OVER = "passed over"
    REST_CANCELED = "canceled by cancel_rest"

    @property
    def failed(self) -> bool:
        """Failed are error, canceled (unless by a cancel_rest) and skipped because of a failure."""
        return self in {End.ERROR, End.CANCELED, End.SKIPPED}

    @property
    def own_failure(self) -> bool:
        """A step's own failure is error, or canceled other than by cancel_rest."""
        return self in {End.ERROR, End.CANCELED}

    @property
    def passed_over(self) -> bool:
        """Skipped without failure: branch not chosen, `when` false, handler not needed, canceled by cancel_rest."""
        return self in {End.PASSED_OVER, End.REST_CANCELED}

    @property
    def ran(self) -> bool:
        """*Reading*: "any other way than being skipped" excludes a canceled rest, which is skipped without failure."""
        return self in {End.DONE, End.ERROR, End.CANCELED}


class Known(Enum):
    """The state of a dependency, of a group of alternatives or of a decision's choice."""

    UNKNOWN = "unknown"
    FAILED = "failed"
    PASSED_OVER = "passed over"
    MET = "met"


class Decided(Enum):
    """The decision about a step."""

    RUNS = "runs"
    SKIPPED = End.SKIPPED.value
    PASSED_OVER = End.PASSED_OVER.value


class JobStatus(Enum):
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"


@dataclass(frozen=True)
class Outcome:
    """The end of a step if it runs: its result, a failure, or a cancellation of that step alone.

    The result of a decision is the chosen branch or a list of them. `failing_parts` are the indexes of a map's parts
    that fail. A signal or approval fails when it times out or is rejected. A child step ends as its child job does.
    """

    result: Any = None
    end: End = End.DONE
    failing_parts: frozenset[int] = frozenset()
    compensation_fails: bool = False


SUCCESS = Outcome()
FAILURE = Outcome(end=End.ERROR)
Outcomes = dict[str, dict[str, Outcome]]
"""The outcomes by workflow name and step name; a step that is missing succeeds with the result None."""


@dataclass(frozen=True)
class JobVerdict:
    """The ends that the rules prescribe for a job, its steps and its child jobs (by child step)."""

    definition: Definition = field(repr=False)
    status: JobStatus
    ends: dict[str, End]
    children: dict[str, JobVerdict] = field(default_factory=dict)

    def compensations(self, completed: Sequence[str] | None = None) -> list[str]:
        """The steps to compensate, in order, if the steps completed in the given order.

        Steps of child jobs are named `child/step`. Without an order the steps complete in topological order.
        """
        return [] if self.status is JobStatus.COMPLETED else self.plan(completed)

    def plan(self, completed: Sequence[str] | None = None) -> list[str]:
        """The compensations of this job once it, or the job that it is part of, has to be compensated."""
        order = self.definition.topological if completed is None else completed
        plans = {}
        for step, child in self.children.items():
            if child.status is JobStatus.COMPLETED:
                inner = [name.removeprefix(f"{step}/") for name in order if name.startswith(f"{step}/")]
                plans[step] = child.plan(inner if completed is not None else None)
        return compensation_plan(self.definition, self.ends, [name for name in order if "/" not in name], plans)


class TimingDependentError(Exception):
    """The rules allow several verdicts, depending on the order in which steps end."""


# --- The definition -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alternatives:
    """Dependencies on different branches of one decision, which count as one; each branch may hold inner groups."""

    decision: str
    branches: dict[str, tuple[str | Alternatives, ...]]


class Definition:
    """The graph of a definition document."""

    def __init__(self, document: Document) -> None:
        self.name: str = document["name"]
        self.steps: dict[str, Document] = {step["name"]: step for step in document["steps"]}
        self._alternatives: dict[str, tuple[str | Alternatives, ...]] = {}

    def dependencies(self, step: str) -> list[tuple[str, str]]:
        """The dependencies of a step as (field, upstream step)."""
        return [(kind, upstream) for kind in DEPENDENCY_FIELDS for upstream in self.steps[step].get(kind, ())]

    def upstream(self, step: str) -> list[str]:
        return [upstream for _, upstream in self.dependencies(step)]

    def kind(self, step: str) -> str:
        kind: str = self.steps[step].get("kind", "plain")
        return kind

    def join(self, step: str) -> str | float:
        join: str | float = self.steps[step].get("join", "all")
        return join

    def dependents(self, step: str, kind: str) -> list[str]:
        """The steps that name this one in the given field, in the order of the definition."""
        return [name for name, other in self.steps.items() if step in other.get(kind, ())]

    def recoverers(self, step: str) -> list[str]:
        return self.dependents(step, "recovers")

    def declaring_decisions(self, step: str) -> list[str]:
        """The decisions that declare this step as a branch."""
        return [name for name, other in self.steps.items() if step in other.get("branches", ())]

    def waits_for(self, step: str) -> set[str]:
        """A step with `f` in its `after` also waits for the steps that recover `f`.

        *Reading*: and for the steps that recover these, because `f` is recovered when its recoverer is.
        """
        recoverers: set[str] = set()
        recoverable = list(self.steps[step].get("after", ()))
        while recoverable:
            new = set(self.recoverers(recoverable.pop())) - recoverers
            recoverers |= new
            recoverable += new
        return recoverers.union(self.upstream(step))

    @cached_property
    def topological(self) -> list[str]:
        """*Reading*: always the earliest step of the definition whose upstream steps are all listed already."""
        order: list[str] = []
        while len(order) < len(self.steps):
            ready = (name for name in self.steps if name not in order and self.waits_for(name) <= set(order))
            step = next(ready, None)
            if step is None:
                cycle = [name for name in self.steps if name not in order]
                raise ValueError(f"workflow {self.name}: cycle among {cycle}")
            order.append(step)
        return order

    def has_path(self, source: str, target: str, *, avoiding: str | None = None) -> bool:
        """*Reading*: over the declared dependencies of all kinds; the waits for recoverers are no paths."""
        seen: set[str] = set()
        ahead = [target]
        while ahead:
            new = set(self.upstream(ahead.pop())) - seen - {avoiding}
            seen |= new
            ahead += new
        return source in seen

    def branch_of(self, decision: str, step: str) -> str | None:
        """A step lies on branch b of decision d when a path from d leads to it and every such path goes through b."""
        for branch in self.steps[decision].get("branches", ()):
            if step == branch:
                return step
            if self.has_path(decision, step) and not self.has_path(decision, step, avoiding=branch):
                return str(branch)
        return None

    def alternatives(self, step: str) -> tuple[str | Alternatives, ...]:
        """The dependencies in `after`, with alternatives grouped."""
        if step not in self._alternatives:
            decisions = [name for name in self.topological if self.kind(name) == "decision"]
            self._alternatives[step] = self.group(self.steps[step].get("after", ()), decisions)
        return self._alternatives[step]

    def group(self, dependencies: Iterable[str], decisions: Sequence[str]) -> tuple[str | Alternatives, ...]:
        """Groups by the first decision that has two dependencies on different branches.

        All dependencies on its branches form the group; within each branch they are grouped again by the remaining
        decisions. Repeat with the dependencies that are left.
        """
        for decision in decisions:
            by_branch: dict[str, list[str]] = {}
            rest: list[str] = []
            for dependency in dependencies:
                branch = self.branch_of(decision, dependency)
                (rest if branch is None else by_branch.setdefault(branch, [])).append(dependency)
            if len(by_branch) > 1:
                remaining = [other for other in decisions if other != decision]
                inner = {branch: self.group(names, remaining) for branch, names in by_branch.items()}
                return (Alternatives(decision, inner), *self.group(rest, remaining))
        return tuple(dependencies)


def definition_problems(documents: Mapping[str, Document], name: str) -> list[str]:
    """The rules on the validity of a definition that it breaks."""
    counts = Counter(step["name"] for step in documents[name]["steps"])
    problems = [f"{step}: named {count} times" for step, count in counts.items() if count > 1]
    definition = Definition(documents[name])
    for step in definition.steps:
        named = {*definition.upstream(step), *definition.steps[step].get("branches", ())}
        problems += [f"{step}: names {other}, which is no step" for other in named - set(definition.steps)]
    if problems:
        return problems
    for step in definition.steps:
        problems += [f"{step}: {problem}" for problem in _step_problems(documents, definition, step)]
    try:
        order = definition.topological
    except ValueError as error:
        return [*problems, str(error)]
    return problems if order else [*problems, "no steps"]


def _step_problems(documents: Mapping[str, Document], definition: Definition, name: str) -> Iterator[str]:
    step, kind, upstream = definition.steps[name], definition.kind(name), definition.upstream(name)
    branches, after, join = step.get("branches", ()), step.get("after", ()), definition.join(name)
    rules = {
        f"kind {kind!r} is unknown": kind in KINDS,
        "names a step more than once": len(set(upstream)) == len(upstream),
        "a decision has branches, and only a decision": bool(branches) == (kind == "decision"),
        "a branch does not name it in after": all(name in definition.steps[b].get("after", ()) for b in branches),
        "recovers a decision": not any(definition.kind(other) == "decision" for other in step.get("recovers", ())),
        f"join {join!r} does not fit": join == "all" or 1 <= needed_dependencies(join, len(upstream)) <= len(upstream),
        "cancel_rest needs a join other than all": not step.get("cancel_rest") or join != "all",
        f"a {kind} step has no compensation": "compensate" not in step or kind in COMPENSABLE_KINDS,
        "when names a step that is not in after": condition_names(step.get("when", "true")) <= {"input", *after},
        "a map has either over or over_input": (kind == "map") == (("over" in step) != ("over_input" in step)),
        "over names a step that is not in after": step.get("over") in {None, *after},
    }
    yield from (problem for problem, kept in rules.items() if not kept)
    if kind == "child":
        yield from _child_problems(documents, step)


def _child_problems(documents: Mapping[str, Document], step: Document) -> Iterator[str]:
    if not step.get("wait", True):
        yield "the oracle does not interpret children that are not waited for"
    if step["workflow"] not in documents:
        yield f"the child workflow {step['workflow']} is not defined"
    else:
        yield from definition_problems(documents, step["workflow"])


# --- How a step ends ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """The ends of a job's steps at one moment; a step that has not ended is missing."""

    definition: Definition
    outcomes: Mapping[str, Outcome]
    job_input: Any
    ends: Mapping[str, End]

    def recovered(self, step: str) -> bool:
        """A failed step is recovered when a step that names it in `recovers` is done, or is itself recovered."""
        return self.ends[step].failed and any(self._stands_in(other) for other in self.definition.recoverers(step))

    def _stands_in(self, recoverer: str) -> bool:
        return recoverer in self.ends and (self.ends[recoverer] is End.DONE or self.recovered(recoverer))

    def recovery_known(self, step: str) -> bool:
        """Known when the steps that recover it have ended. *Reading*: and those that recover these, if they failed."""
        return all(
            other in self.ends and (not self.ends[other].failed or self.recovery_known(other))
            for other in self.definition.recoverers(step)
        )

    def result(self, step: str) -> Any:
        """The result of a recovered step is that of the first step in the definition that recovered it."""
        if self.ends.get(step) is End.DONE:
            return self.outcomes.get(step, SUCCESS).result
        if step in self.ends and self.recovered(step):
            return self.result(next(other for other in self.definition.recoverers(step) if self._stands_in(other)))
        return None

    def chosen(self, decision: str) -> set[str]:
        """A decision's result names the chosen branches: a name, or a list of names, which may be empty."""
        result = self.outcomes.get(decision, SUCCESS).result
        names = {result} if isinstance(result, str) else set(result)
        undeclared = names - set(self.definition.steps[decision]["branches"])
        if undeclared:
            raise ValueError(f"decision {decision} chose {sorted(undeclared)}, which are not among its branches")
        return names


def dependency_state(facts: Facts, kind: str, upstream: str) -> Known:
    """Each dependency is, once it is known, met, failed or passed over (the table of the four kinds)."""
    end = facts.ends.get(upstream)
    failed = end is not None and end.failed
    if end is None or (kind == "after" and failed and not facts.recovery_known(upstream)):
        return Known.UNKNOWN
    if kind == "always":
        return Known.MET
    if kind in {"on_failure", "recovers"}:
        return Known.MET if failed else Known.PASSED_OVER
    if end is End.DONE or (failed and facts.recovered(upstream)):
        return Known.MET
    return Known.FAILED if failed else Known.PASSED_OVER


def all_of(states: Iterable[Known]) -> Known:
    """Decided when all are known; one failed: failed; one passed over: passed over; otherwise met."""
    states = set(states)
    return next((state for state in Known if state in states), Known.MET)


# --- When a step is decided, and how --------------------------------------------------------------------------------


def decide(facts: Facts, step: str) -> frozenset[Decided]:
    """The allowed decisions about a step at this moment; none while it must wait, several when timing decides."""
    decided = _decide_all(facts, step) if facts.definition.join(step) == "all" else _decide_some(facts, step)
    if Decided.RUNS in decided and not condition_holds(facts, step):
        return frozenset({Decided.PASSED_OVER})
    return decided


def choice_state(facts: Facts, decision: str, branch: str) -> Known:
    """A declared branch is passed over as soon as the decision is done and has not chosen it.

    If the decision failed, that is a failed dependency; if it was passed over, so is the branch.
    """
    end = facts.ends.get(decision)
    if end is End.DONE:
        return Known.MET if branch in facts.chosen(decision) else Known.PASSED_OVER
    return dependency_state(facts, "after", decision)


def _choices(facts: Facts, step: str) -> dict[str, Known]:
    """If a step is a branch of several decisions, each of them must choose it."""
    return {name: choice_state(facts, name, step) for name in facts.definition.declaring_decisions(step)}


def group_state(facts: Facts, item: str | Alternatives) -> Known:
    """Of the alternatives only those on chosen branches count; passed over when none was chosen.

    If the decision itself failed or was passed over, the whole group has failed or was passed over.
    *Reading*: the group is known when those on chosen branches are, for the step "waits for those that were chosen".
    """
    if isinstance(item, str):
        return dependency_state(facts, "after", item)
    decision = dependency_state(facts, "after", item.decision)
    if decision is not Known.MET:
        return decision
    counting = [names for branch, names in item.branches.items() if branch in facts.chosen(item.decision)]
    if not counting:
        return Known.PASSED_OVER
    return all_of(group_state(facts, name) for names in counting for name in names)


def _decide_all(facts: Facts, step: str) -> frozenset[Decided]:
    """join="all": one failed: skipped because of it; one passed over (alternatives aside): passed over; else it runs.

    *Reading*: a decision that was passed over takes its branch with it even if another dependency failed.
    """
    if Known.PASSED_OVER in _choices(facts, step).values():
        return frozenset({Decided.PASSED_OVER})
    groups = [group_state(facts, item) for item in facts.definition.alternatives(step)]
    others = [dependency_state(facts, *edge) for edge in facts.definition.dependencies(step) if edge[0] != "after"]
    decided = {
        Known.UNKNOWN: (),
        Known.FAILED: (Decided.SKIPPED,),
        Known.PASSED_OVER: (Decided.PASSED_OVER,),
        Known.MET: (Decided.RUNS,),
    }
    return frozenset(decided[all_of([*groups, *others])])


def needed_dependencies(join: str | float, count: int) -> int:
    """ "any" is 1; n is n; a ratio is rounded up to whole dependencies. *Reading*: the ratio is a decimal number."""
    if join == "any":
        return 1
    if join == "all":
        return count
    return join if isinstance(join, int) else math.ceil(Fraction(str(join)) * count)


def _decide_some(facts: Facts, step: str) -> frozenset[Decided]:
    """join="any", n, ratio: runs as soon as enough are met; skipped as soon as met plus not known are too few.

    Skipped because of the failure if one of the known ones failed, passed over otherwise: that depends on timing. A
    declared branch waits for its decisions, and is passed over when one has not chosen it, whatever its join is.
    *Reading*: if a decision failed, the branch is skipped even if its join is met without the decision, because "a
    declared branch runs only when it was chosen, whatever else it depends on".
    """
    choices = _choices(facts, step)
    states = {
        upstream: dependency_state(facts, kind, upstream) for kind, upstream in facts.definition.dependencies(step)
    }
    spare = len(states) - needed_dependencies(facts.definition.join(step), len(states))
    missed = [
        state for name, state in states.items() if choices.get(name) is not Known.PASSED_OVER and state is not Known.MET
    ]
    failed, passed_over = missed.count(Known.FAILED), missed.count(Known.PASSED_OVER)
    decided = set()
    if Known.PASSED_OVER in choices.values() or passed_over > spare:
        decided.add(Decided.PASSED_OVER)
    if Known.FAILED in choices.values() or (failed and failed + passed_over > spare):
        decided.add(Decided.SKIPPED)
    met = list(states.values()).count(Known.MET)
    if not decided and met >= len(states) - spare and all_of(choices.values()) is Known.MET:
        decided.add(Decided.RUNS)
    return frozenset(decided)


def condition_holds(facts: Facts, step: str) -> bool:
    """`when` is a condition on the results of steps in `after` and on `input`."""
    condition = facts.definition.steps[step].get("when")
    if condition is None:
        return True
    results = {name: facts.result(name) for name in facts.definition.steps[step].get("after", ())}
    return bool(_evaluate(_parse(condition), {**results, "input": facts.job_input}))


def condition_names(condition: str) -> set[str]:
    """The steps, and `input`, that a condition mentions."""
    return {node.id for node in ast.walk(_parse(condition)) if isinstance(node, ast.Name)} - set(_LITERALS)


_LITERALS = {"true": True, "false": False, "null": None}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _parse(condition: str) -> ast.expr:
    return ast.parse(condition, mode="eval").body


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _LITERALS[name] if name in _LITERALS else names[name]
        case ast.Attribute(value=inner, attr=attribute):
            return _evaluate(inner, names)[attribute]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, names)
        case ast.BoolOp(op=op, values=values):
            combine = all if isinstance(op, ast.And) else any
            return combine(_evaluate(value, names) for value in values)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _COMPARISONS[type(op)](_evaluate(left, names), _evaluate(right, names))
    raise ValueError(f"condition not understood: {ast.unparse(node)}")


def map_end(facts: Facts, step: str) -> End:
    """A map whose parts do not meet its strategy ends in error; a map over 0 parts is done.

    *Reading*: a strategy has the values of `join`, and without one all parts must succeed.
    """
    count = part_count(facts, step)
    failing = len([index for index in facts.outcomes.get(step, SUCCESS).failing_parts if index < count])
    strategy = facts.definition.steps[step].get("strategy", "all")
    return End.DONE if not count or count - failing >= needed_dependencies(strategy, count) else End.ERROR


def part_count(facts: Facts, step: str) -> int:
    """The number of parts is the length of the list that `over` or `over_input` names."""
    declared = facts.definition.steps[step]
    items = facts.result(declared["over"]) if "over" in declared else facts.job_input[declared["over_input"]]
    return len(items or ())


def own_end(facts: Facts, step: str) -> End:
    """The end of a step that runs, other than a child; a sleep always ends done."""
    outcome = facts.outcomes.get(step, SUCCESS).end
    kind = facts.definition.kind(step)
    if outcome is End.CANCELED:
        return outcome
    if kind == "map":
        return map_end(facts, step)
    return End.DONE if kind == "sleep" else outcome


def child_end(status: JobStatus) -> End:
    """A child step fails when its child job fails or is canceled."""
    return End.DONE if status is JobStatus.COMPLETED else End.ERROR


def child_input(declared: Document) -> Any:
    """*Reading*: a child job gets the `input` that the step declares, or an empty object."""
    return declared.get("input", {})


# --- How a job ends -------------------------------------------------------------------------------------------------


def failure_stands(facts: Facts) -> bool:
    """A step's own failure stands unless it is absorbed."""
    return any(end.own_failure and not absorbed(facts, step) for step, end in facts.ends.items())


def absorbed(facts: Facts, step: str) -> bool:
    """A failed step is absorbed when it is recovered, or when a partial join did without it."""
    return facts.ends[step].failed and (facts.recovered(step) or _done_without(facts, step))


def _done_without(facts: Facts, step: str) -> bool:
    """At least one step in whose `after` it stands ran or is absorbed.

    And each of its `after` dependents ran (over a join other than "all"), was passed over, or was skipped because of a
    failure and is absorbed itself.
    """
    dependents = facts.definition.dependents(step, "after")
    return any(facts.ends[other].ran or absorbed(facts, other) for other in dependents) and all(
        (facts.ends[other].ran and facts.definition.join(other) != "all")
        or facts.ends[other].passed_over
        or (facts.ends[other] is End.SKIPPED and absorbed(facts, other))
        for other in dependents
    )


# --- Compensation ---------------------------------------------------------------------------------------------------


def compensation_plan(
    definition: Definition,
    ends: Mapping[str, End],
    completed: Sequence[str],
    child_plans: Mapping[str, Sequence[str]],
) -> list[str]:
    """Each done step with `compensate`, in reverse order of completion.

    The compensations of a COMPLETED child job run at the place of the child step, after the child step's own
    `compensate` and before those of steps that completed earlier.
    *Reading*: a compensation that fails does not keep the others from running ("each done step").
    """
    plan = []
    for step in reversed(completed):
        if ends[step] is End.DONE and "compensate" in definition.steps[step]:
            plan.append(step)
        plan += [f"{step}/{inner}" for inner in child_plans.get(step, ())]
    return plan


# --- The verdict ----------------------------------------------------------------------------------------------------


def interpret(documents: Mapping[str, Document], name: str, outcomes: Outcomes, *, job_input: Any = None) -> JobVerdict:
    """The verdict about a job that is not canceled; raises `TimingDependentError` when the rules allow several."""
    verdicts = possible_verdicts(documents, name, outcomes, job_input=job_input)
    if len(verdicts) > 1:
        ends = [
            {end for end in verdict.ends.items() if any(end not in o.ends.items() for o in verdicts)}
            for verdict in verdicts
        ]
        raise TimingDependentError(f"workflow {name}: {len(verdicts)} verdicts, which differ in {ends}")
    return verdicts[0]


def possible_verdicts(
    documents: Mapping[str, Document], name: str, outcomes: Outcomes, *, job_input: Any = None
) -> list[JobVerdict]:
    """Every verdict that some order of the ends allows, for definitions without `cancel_rest`.

    Without `cancel_rest` and cancellation, timing decides only whether a partial join that cannot be met any more is
    skipped because of a failure or passed over.
    """
    definition = Definition(documents[name])
    if any(step.get("cancel_rest") for step in definition.steps.values()):
        raise TimingDependentError(f"workflow {name}: cancel_rest makes the ends depend on timing; use check_history")
    verdicts = [JobVerdict(definition, JobStatus.COMPLETED, {})]
    for step in definition.topological:
        extended: list[JobVerdict] = []
        for verdict in verdicts:
            facts = Facts(definition, outcomes.get(name, {}), job_input, verdict.ends)
            for decided in sorted(decide(facts, step), key=lambda decided: decided.value):
                extended += _with_end(documents, outcomes, facts, verdict, step, decided)
        verdicts = extended
    return [
        _with_status(verdict, Facts(definition, outcomes.get(name, {}), job_input, verdict.ends))
        for verdict in verdicts
    ]


def _with_end(
    documents: Mapping[str, Document],
    outcomes: Outcomes,
    facts: Facts,
    verdict: JobVerdict,
    step: str,
    decided: Decided,
) -> Iterator[JobVerdict]:
    declared = facts.definition.steps[step]
    if decided is not Decided.RUNS:
        yield replace(verdict, ends={**verdict.ends, step: End(decided.value)})
    elif facts.definition.kind(step) != "child":
        yield replace(verdict, ends={**verdict.ends, step: own_end(facts, step)})
    else:
        for child in possible_verdicts(documents, declared["workflow"], outcomes, job_input=child_input(declared)):
            ends = {**verdict.ends, step: child_end(child.status)}
            yield replace(verdict, ends=ends, children={**verdict.children, step: child})


def _with_status(verdict: JobVerdict, facts: Facts) -> JobVerdict:
    """When all steps have ended, the job is COMPLETED unless a failure stands; otherwise it becomes FAILED."""
    return replace(verdict, status=JobStatus.FAILED if failure_stands(facts) else JobStatus.COMPLETED)
