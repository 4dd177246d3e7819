"""How a step is decided from the ends of the steps that it depends on, and which failures a job ends with.

`compile_joins` turns the dependencies of a definition into stored rules; `decide` applies a rule. Nothing here touches
the database: the orchestrator and the dry run call the same functions.

A step ends DONE, FAILED or PASSED_OVER. FAILED includes steps that were skipped because of a failure. PASSED_OVER are
steps that were not needed: a branch that was not chosen, a condition that is false, a failure handler without a
failure, and a step that `cancel_rest` canceled.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.model.graph import AFTER, ALWAYS, dependencies, edges, recovering_steps, topological_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_NAMED_PARTS = 5  # failed parts that the error of a map names
ROUNDING = 1e-9  # 0.7 * 10 is 7.000000000000001 and means 7


class StepEnd(StrEnum):
    """How a step ended, as the steps that depend on it see it."""

    DONE = "done"
    FAILED = "failed"
    PASSED_OVER = "passed over"


class UpstreamEnd(NamedTuple):
    """The end of an upstream step; `chosen` are the branches that a decision chose."""

    end: StepEnd
    chosen: Sequence[str] = ()


class Join(NamedTuple):
    """The stored rule of one step.

    `needed` is the number of dependencies that must be met; None means all. `rule` is set where counting the met
    dependencies does not decide: alternatives of a decision, recovered dependencies, branches with a partial join.
    """

    needed: int | None
    rule: dict[str, Any] | None


class Ruling(NamedTuple):
    """The decision about a step: None as `end` means that it runs, or that it waits if `is_open`."""

    end: StepEnd | None = None
    is_open: bool = False
    cause: str | None = None  # the stored reason of a skipped step


RUNS = Ruling()
WAITS = Ruling(is_open=True)
BRANCH_NOT_CHOSEN = "branch not chosen"


def met(condition: str, end: StepEnd) -> StepEnd:
    """Return whether a dependency is met (DONE), failed or passed over, by the end of its upstream step alone."""
    if condition == ALWAYS:
        return StepEnd.DONE
    if condition == AFTER:
        return end
    return StepEnd.DONE if end is StepEnd.FAILED else StepEnd.PASSED_OVER


# --- From a definition to rules --------------------------------------------------------------------------------------


def needed_dependencies(join: str | float | None, dependencies: int) -> int | None:
    """Return how many dependencies must be met; None means all of them."""
    if join is None or join == "all" or (isinstance(join, float) and join >= 1):
        return None
    if join == "any":
        return 1
    if isinstance(join, float):
        return max(math.ceil(join * dependencies - ROUNDING), 1)
    return int(join)


def compile_joins(document: Mapping[str, Any]) -> dict[str, Join]:
    """Make the rule of every step."""
    recovering = recovering_steps(document)
    decisions = _branch_members(document)
    gates: dict[str, list[str]] = {}
    for step in document["steps"]:
        for branch in step.get("branches") or ():
            gates.setdefault(branch, []).append(step["name"])
    return {
        step["name"]: _compile_join(step, recovering, decisions, gates.get(step["name"], []))
        for step in document["steps"]
    }


def _compile_join(
    step: Mapping[str, Any],
    recovering: Mapping[str, list[str]],
    decisions: Sequence[tuple[str, dict[str, set[str]]]],
    gates: list[str],
) -> Join:
    upstreams = dependencies(step)
    needed = needed_dependencies(step.get("join"), len(upstreams))
    nodes = [_leaf(upstream, recovering, step["name"]) for upstream, field in upstreams if field == AFTER]
    if needed is None:
        nodes = _group_alternatives(nodes, decisions)
    is_counted = all("step" in node and "recovered_by" not in node for node in nodes)
    if is_counted and (needed is None or not gates):
        return Join(needed, None)
    nodes += [{"step": upstream, "condition": field} for upstream, field in upstreams if field != AFTER]
    return Join(needed, {"needed": needed, "gates": gates, "dependencies": nodes, "of": step["name"]})


def _leaf(upstream: str, recovering: Mapping[str, list[str]], dependent: str) -> dict[str, Any]:
    recovered_by = [
        _leaf(recoverer, recovering, dependent) for recoverer in recovering.get(upstream, ()) if recoverer != dependent
    ]
    return {"step": upstream, **({"recovered_by": recovered_by} if recovered_by else {})}


def _branch_members(document: Mapping[str, Any]) -> list[tuple[str, dict[str, set[str]]]]:
    """List the decisions in topological order, each with the steps that lie on each of its branches.

    A step lies on branch b of decision d if every path from d to it goes through b.
    """
    downstreams: dict[str, list[str]] = {}
    declared: dict[str, Sequence[str]] = {}
    for step in document["steps"]:
        if step.get("branches"):
            declared[step["name"]] = step["branches"]
        for upstream, _ in dependencies(step):
            downstreams.setdefault(upstream, []).append(step["name"])
    if not declared:
        return []
    members = []
    for name in topological_order(document):
        if name in declared:
            below = _reachable(downstreams, name, without=None)
            members.append(
                (name, {branch: below - _reachable(downstreams, name, without=branch) for branch in declared[name]})
            )
    return members


def _reachable(downstreams: Mapping[str, list[str]], start: str, *, without: str | None) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        for name in downstreams.get(left.pop(), ()):
            if name not in seen and name != without:
                seen.add(name)
                left.append(name)
    return seen


def _group_alternatives(
    nodes: list[dict[str, Any]], decisions: Sequence[tuple[str, dict[str, set[str]]]]
) -> list[dict[str, Any]]:
    """Group the dependencies that lie on different branches of one decision; outer decisions first."""
    grouped: list[dict[str, Any]] = []
    left = nodes
    for index, (decision, branches) in enumerate(decisions):
        if len(left) <= 1:
            break
        members = {
            branch: found
            for branch, steps in branches.items()
            if (found := [node for node in left if node["step"] in steps])
        }
        if len(members) > 1:
            inner = decisions[index + 1 :]
            alternatives = {branch: _group_alternatives(found, inner) for branch, found in members.items()}
            grouped.append({"decision": decision, "branches": alternatives})
            taken = {node["step"] for found in members.values() for node in found}
            left = [node for node in left if node["step"] not in taken]
    return [*grouped, *left]


def names_in(rule: Mapping[str, Any]) -> set[str]:
    """List the steps whose ends a rule needs."""
    names = set(rule["gates"])
    left = list(rule["dependencies"])
    while left:
        node = left.pop()
        names.add(node.get("decision") or node["step"])
        left += [inner for nodes in node.get("branches", {}).values() for inner in nodes]
        left += node.get("recovered_by", ())
    return names


def alternative_steps(join: Join) -> set[str]:
    """List the dependencies that are alternatives of a decision, so that the step can run without them."""
    groups = [node for node in (join.rule or {}).get("dependencies", ()) if "decision" in node]
    left = [inner for group in groups for nodes in group["branches"].values() for inner in nodes]
    names = set()
    while left:
        node = left.pop()
        if "decision" in node:
            left += [inner for nodes in node["branches"].values() for inner in nodes]
        else:
            names.add(node["step"])
    return names


# --- Deciding --------------------------------------------------------------------------------------------------------


def decide(rule: Mapping[str, Any], ends: Mapping[str, UpstreamEnd]) -> Ruling:
    """Decide a step by its rule; `ends` has the upstream steps that have ended."""
    for gate in rule["gates"]:
        end = ends.get(gate)
        if end is not None and end.end is StepEnd.DONE and rule["of"] not in end.chosen:
            return Ruling(StepEnd.PASSED_OVER, cause=BRANCH_NOT_CHOSEN)
        if end is not None and end.end is not StepEnd.DONE:
            return Ruling(end.end, cause=describe_unmet(gate, AFTER, end.end))
    outcomes = [_dependency(node, ends) for node in rule["dependencies"]]
    needed = rule["needed"]
    met_count = outcomes.count(StepEnd.DONE)
    if needed is None:
        if None in outcomes:
            return WAITS
        return RUNS if met_count == len(outcomes) else _skip(rule, outcomes)
    if met_count >= needed:
        return RUNS if all(gate in ends for gate in rule["gates"]) else WAITS
    return WAITS if met_count + outcomes.count(None) >= needed else _skip(rule, outcomes)


def _skip(rule: Mapping[str, Any], outcomes: Sequence[StepEnd | None]) -> Ruling:
    end = StepEnd.FAILED if StepEnd.FAILED in outcomes else StepEnd.PASSED_OVER
    node = rule["dependencies"][outcomes.index(end)]
    if "decision" in node:
        verb = "failed" if end is StepEnd.FAILED else "was skipped"
        return Ruling(end, cause=f"a step on the chosen branch of {node['decision']} {verb}")
    return Ruling(end, cause=describe_unmet(node["step"], node.get("condition", AFTER), end))


def describe_unmet(upstream: str, condition: str, end: StepEnd) -> str:
    """Say why a dependency is not met; `end` is the end of the upstream step."""
    if condition == AFTER:
        return f"step {upstream} failed" if end is StepEnd.FAILED else f"step {upstream} was skipped"
    return f"step {upstream} did not fail"


def _dependency(node: Mapping[str, Any], ends: Mapping[str, UpstreamEnd]) -> StepEnd | None:
    """Return the outcome of one dependency, or of a group of alternatives; None while it is not known."""
    if "decision" in node:
        return _alternatives(node, ends)
    upstream = ends.get(node["step"])
    if upstream is None:
        return None
    if node.get("condition", AFTER) != AFTER:
        return met(node["condition"], upstream.end)
    if upstream.end is not StepEnd.FAILED or not node.get("recovered_by"):
        return upstream.end
    recoveries = [_dependency(inner, ends) for inner in node["recovered_by"]]
    if None in recoveries:
        return None
    return StepEnd.DONE if StepEnd.DONE in recoveries else StepEnd.FAILED


def _alternatives(node: Mapping[str, Any], ends: Mapping[str, UpstreamEnd]) -> StepEnd | None:
    decision = ends.get(node["decision"])
    if decision is None or decision.end is not StepEnd.DONE:
        return None if decision is None else decision.end
    chosen = [nodes for branch, nodes in node["branches"].items() if branch in decision.chosen]
    outcomes = {_dependency(inner, ends) for nodes in chosen for inner in nodes}
    for outcome in (None, StepEnd.FAILED, StepEnd.PASSED_OVER):
        if outcome in outcomes:
            return outcome
    return StepEnd.DONE if chosen else StepEnd.PASSED_OVER


def is_share_met(share: float, done: int, total: int) -> bool:
    """Tell whether enough parts of a map are done: a share of 0 means at least one, 1 means all."""
    return done >= 1 if share == 0 else done >= share * total - ROUNDING


# --- The end of a job ------------------------------------------------------------------------------------------------


class EndedJobStep(NamedTuple):
    """A step of a job whose steps have all ended; `ran` is false for skipped steps."""

    end: StepEnd
    ran: bool


def standing_failures(document: Mapping[str, Any], steps: Mapping[str, EndedJobStep]) -> set[str]:
    """List the steps whose own failure fails the job: neither recovered, nor dispensable for a partial join.

    A failed step is dispensable if a step with a partial join that names it in `after` ran or is dispensable itself,
    and no step that names it in `after` was skipped for good because of it.
    """
    dependents = _wanting_dependents(document, steps)
    recovering = recovering_steps(document)
    succeeded = {name for name, step in steps.items() if step.end is StepEnd.DONE}  # or recovered
    # steps that do without a failed dependency
    absorbing = {name for name, join in compile_joins(document).items() if join.needed is not None and steps[name].ran}
    failed = [name for name in topological_order(document) if steps[name].end is StepEnd.FAILED]
    standing = set()
    for name in reversed(failed):  # downstream steps come first, so that what they absorb is known
        if not succeeded.isdisjoint(recovering.get(name, ())):
            succeeded.add(name)
            absorbing.add(name)
        elif name in dependents and dependents[name] <= absorbing:
            absorbing.add(name)
        else:
            standing.add(name)
    return {name for name in standing if steps[name].ran}


def _wanting_dependents(document: Mapping[str, Any], steps: Mapping[str, EndedJobStep]) -> dict[str, set[str]]:
    """Map each step to the steps that name it in `after` and were not passed over."""
    dependents: dict[str, set[str]] = {}
    for edge in edges(document):
        if edge.condition == AFTER and steps[edge.downstream].end is not StepEnd.PASSED_OVER:
            dependents.setdefault(edge.upstream, set()).add(edge.downstream)
    return dependents


def required_share(strategy: str | float | None) -> float:
    """Convert the `strategy` of a map to the share of parts that must be done: 1 is all, 0 is any."""
    return {"all": 1.0, "any": 0.0}[strategy] if isinstance(strategy, str) else float(strategy or 1.0)


def describe_failed_parts(names: Iterable[str], failed: int, total: int) -> str:
    """Return the error of a map whose parts did not meet its strategy."""
    listed = list(names)
    more = failed - len(listed)
    rest = f" and {more} more" if more > 0 else ""
    return f"{failed} of {total} parts failed: {', '.join(listed)}{rest}"
