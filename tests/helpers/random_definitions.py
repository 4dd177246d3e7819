"""Generates random workflow definitions with outcomes for tests against the oracle, and shrinks the ones that fail."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from workflow_oracle import (
    COMPENSABLE_KINDS,
    DEPENDENCY_FIELDS,
    SUCCESS,
    Alternatives,
    Definition,
    Document,
    End,
    Outcome,
    Outcomes,
    condition_names,
    definition_problems,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAP_STRATEGIES: tuple[str | float | None, ...] = (None, None, "any", 0.5)
RATIOS = (0.25, 0.34, 0.5, 0.6, 0.75)
MAX_CHILDREN = 2


@dataclass(frozen=True)
class RandomDefinition:
    """A workflow, its child workflows, the outcomes of their steps and the input of the job.

    Each child step has a workflow of its own, so workflow and step name an outcome. The task type of a step is
    `workflow_step`, that of its compensation `workflow_step_undo`.
    """

    name: str
    documents: dict[str, Document]
    outcomes: Outcomes
    job_input: dict[str, Any]


def random_definition(seed: int, *, cancel_rest: bool = False, depth: int = 2) -> RandomDefinition:
    """A valid definition of 3 to 14 steps with child workflows down to the given depth; the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 (repeatable, not secret)
    while True:
        job_input = {"flag": rng.random() < 0.5, "items": list(range(rng.randrange(4)))}
        builder = _Builder(rng, f"random_{seed}", rng.randint(3, 14), cancel_rest=cancel_rest, depth=depth)
        documents, outcomes = builder.build(reads_input=True)
        generated = RandomDefinition(builder.name, documents, outcomes, job_input)
        if not any(grouping_depends_on_ties(document) for document in documents.values()):
            return generated


def grouping_depends_on_ties(document: Document) -> bool:
    """Whether the groups of alternatives change with the order among decisions that do not depend on each other.

    The documentation does not say precisely how such a tie is resolved, so no definition is generated that needs it.
    """
    definition, reverse = Definition(document), Definition({**document, "steps": document["steps"][::-1]})
    return any(
        _groups(definition.alternatives(step)) != _groups(reverse.alternatives(step)) for step in definition.steps
    )


def _groups(items: Sequence[str | Alternatives]) -> frozenset[Any]:
    return frozenset(
        item
        if isinstance(item, str)
        else (item.decision, frozenset((branch, _groups(inner)) for branch, inner in item.branches.items()))
        for item in items
    )


class _Builder:
    """Builds one document step by step, each by a motif that leads to an interesting case."""

    def __init__(self, rng: random.Random, name: str, size: int, *, cancel_rest: bool, depth: int) -> None:
        self.rng = rng
        self.name = name
        self.size = size
        self.cancel_rest = cancel_rest
        self.depth = depth
        self.steps: list[Document] = []

    def build(self, *, reads_input: bool) -> tuple[dict[str, Document], Outcomes]:
        self._add({})
        motifs: list[tuple[Callable[[], None], int]] = [
            (self._root, 1),
            (self._chain, 4),
            (self._decision, 3),
            (self._nested_decisions, 3),
            (self._branch, 4),
            (self._decision_observer, 1),
            (self._alternatives_joiner, 4),
            (self._handler, 5),
            (self._recoverer_of_recoverer, 2),
            (self._partial_join, 3),
        ]
        while len(self.steps) < self.size:
            self.rng.choices([motif for motif, _ in motifs], [weight for _, weight in motifs])[0]()
        for step in self.steps:
            if step.get("branches") == []:
                del step["branches"], step["kind"]
        if self.rng.random() < 0.4:
            self.rng.shuffle(self.steps)
        return self._finish(reads_input=reads_input)

    # Motifs: each adds one step, or a decision with its branches; none if there is nothing to build on.

    def _root(self) -> None:
        self._add({})

    def _chain(self) -> None:
        self._add({"after": self._some(1, 2)})

    def _decision(self) -> None:
        decision = self._add({"kind": "decision", "branches": [], "after": self._some(0, 1)})
        for _ in range(self.rng.randint(1, 3)):
            if len(self.steps) < self.size:
                self._branch(decision)

    def _nested_decisions(self) -> None:
        """A decision on a branch of another one, and a step after all of their branches."""
        if len(self.steps) + 6 > self.size:
            return
        outer = self._add({"kind": "decision", "branches": [], "after": self._some(0, 1)})
        inner = self._add({"kind": "decision", "branches": [], "after": [outer["name"]]})
        outer["branches"].append(inner["name"])
        for decision in (outer, inner, inner):
            self._branch(decision)
        joiner: Document = {}
        self._depend(joiner, [*inner["branches"], *outer["branches"][1:]], "after")
        self._depend(joiner, self._some(0, 1), "after")
        self._add(joiner)

    def _branch(self, decision: Document | None = None) -> None:
        """A branch that often depends on other steps too, with any join; sometimes a decision or of two decisions."""
        decisions = self._decisions()
        if decision is None:
            if not decisions:
                return
            decision = self.rng.choice(decisions)
        others = [other for other in decisions if other is not decision]
        declaring = [decision, self.rng.choice(others)] if others and self.rng.random() < 0.15 else [decision]
        step: Document = {"after": [each["name"] for each in declaring]}
        if self.rng.random() < 0.6:
            self._depend(step, self._some(1, 2), self.rng.choice(("after", "after", "always", "on_failure")))
        if self.rng.random() < 0.25:
            self._join_some(step)
        if self.rng.random() < 0.2:
            step |= {"kind": "decision", "branches": []}
        added = self._add(step)
        for each in declaring:
            if each["name"] in added.get("after", ()):
                each["branches"].append(added["name"])

    def _decision_observer(self) -> None:
        """A step after a decision that is not one of its branches."""
        if self._decisions():
            step: Document = {"after": [self.rng.choice(self._decisions())["name"]]}
            self._depend(step, self._some(0, 2), "after")
            self._add(step)

    def _alternatives_joiner(self) -> None:
        """A step after steps on different branches of a decision, mostly with other dependencies too."""
        decisions = [step for step in self._decisions() if len(step["branches"]) > 1]
        if not decisions:
            return
        decision = self.rng.choice(decisions)["name"]
        definition = self._definition()
        by_branch: dict[str, list[str]] = {}
        for step in definition.steps:
            branch = definition.branch_of(decision, step)
            if branch is not None:
                by_branch.setdefault(branch, []).append(step)
        branches = self.rng.sample(list(by_branch), self.rng.randint(2, len(by_branch)))
        joiner: Document = {}
        for branch in branches:
            self._depend(joiner, self.rng.choices(by_branch[branch], k=2), "after")
        if self.rng.random() < 0.5:
            self._depend(joiner, self._some(1, 2), self.rng.choice(("after", "after", "always", "recovers")))
        self._add(joiner)

    def _handler(self) -> None:
        """A failure handler, alone or combined with `after`, with any join."""
        step: Document = {}
        self._depend(step, self._some(1, 2), self.rng.choice(("on_failure", "always", "recovers", "recovers")))
        if self.rng.random() < 0.4:
            self._depend(step, self._some(1, 2), "after")
        if self.rng.random() < 0.25:
            self._join_some(step)
        self._add(step)

    def _recoverer_of_recoverer(self) -> None:
        recoverers = [step["name"] for step in self.steps if "recovers" in step and step.get("kind") != "decision"]
        if recoverers:
            self._add({"recovers": [self.rng.choice(recoverers)]})

    def _partial_join(self) -> None:
        step: Document = {}
        for upstream in self._some(2, 5):
            self._depend(step, [upstream], self.rng.choice(("after", "after", "after", *DEPENDENCY_FIELDS)))
        self._join_some(step)
        self._add(step)

    # What the motifs are made of.

    def _definition(self) -> Definition:
        return Definition({"name": self.name, "steps": self.steps})

    def _decisions(self) -> list[Document]:
        return [step for step in self.steps if step.get("kind") == "decision"]

    def _some(self, least: int, most: int) -> list[str]:
        """A sample of the steps; late ones are more likely, so that the graph grows deep."""
        names = [step["name"] for step in self.steps]
        count = min(self.rng.randint(least, most), len(names))
        recent = names[-max(count, 5) :] if self.rng.random() < 0.6 else names
        return self.rng.sample(recent, count)

    def _depend(self, step: Document, names: Sequence[str], kind: str) -> None:
        """Adds dependencies; a name that the step has already is left out, and `recovers` leaves out decisions."""
        decisions = {other["name"] for other in self._decisions()}
        for name in names:
            named = any(name in step.get(other, ()) for other in DEPENDENCY_FIELDS)
            if not named and not (kind == "recovers" and name in decisions):
                step.setdefault(kind, []).append(name)

    def _join_some(self, step: Document) -> None:
        count = sum(len(step.get(kind, ())) for kind in DEPENDENCY_FIELDS)
        if count:
            step["join"] = self.rng.choice(("any", "any", self.rng.randint(1, count), self.rng.choice(RATIOS)))
            if self.cancel_rest and self.rng.random() < 0.5:
                step["cancel_rest"] = True

    def _add(self, step: Document) -> Document:
        """Adds a step; if that closes a cycle over the steps that recover another, a step without dependencies."""
        name = f"s{len(self.steps) + 1}"
        named = {"name": name, **{key: value for key, value in step.items() if value != [] or key == "branches"}}
        self.steps.append(named)
        try:
            self._definition().topological  # noqa: B018 (raises on a cycle)
        except ValueError:
            self.steps[-1] = named = {"name": name}
        return named

    # The kinds, conditions, compensations and outcomes, once the graph is complete.

    def _finish(self, *, reads_input: bool) -> tuple[dict[str, Document], Outcomes]:
        documents: dict[str, Document] = {self.name: {"name": self.name, "steps": self.steps}}
        outcomes: Outcomes = {self.name: {}}
        lists = self._vary_kinds(documents, outcomes, reads_input=reads_input)
        definition = self._definition()
        for step in self.steps:
            kind = definition.kind(step["name"])
            if kind in {"plain", "decision", "map"}:
                step["type"] = f"{self.name}_{step['name']}"
            if kind in COMPENSABLE_KINDS and self.rng.random() < 0.4:
                step["compensate"] = f"{self.name}_{step['name']}_undo"
            if self.rng.random() < 0.12:
                self._add_condition(step, definition, lists, reads_input=reads_input)
            outcomes[self.name][step["name"]] = self._outcome(step, definition, lists)
        return documents, outcomes

    def _vary_kinds(self, documents: dict[str, Document], outcomes: Outcomes, *, reads_input: bool) -> dict[str, int]:
        """Turns some plain steps into map, sleep and child steps; returns the lengths of the results that are lists."""
        lists: dict[str, int] = {}
        children = 0
        for step in self.steps:
            if "kind" in step:
                continue
            kind = self.rng.choices(("plain", "map", "sleep", "child"), (60, 15, 10, 15))[0]
            sources = self._certain_dependencies(step, self._definition(), without_recoverers=True)
            if kind == "map" and sources:
                source = self.rng.choice(sources)
                lists.setdefault(source, self.rng.randrange(5))
                step |= {"kind": "map", "over": source}
            elif kind == "map" and reads_input:
                step |= {"kind": "map", "over_input": "items"}
            elif kind == "sleep" and step["name"] not in lists:
                step |= {"kind": "sleep", "seconds": 0}
            elif kind == "child" and step["name"] not in lists and self.depth and children < MAX_CHILDREN:
                children += 1
                step |= {"kind": "child", "workflow": f"{self.name}_{step['name']}"}
                child = _Builder(
                    self.rng,
                    step["workflow"],
                    self.rng.randint(1, 5),
                    cancel_rest=self.cancel_rest and self.rng.random() < 0.3,
                    depth=self.depth - 1,
                )
                for built, into in zip(child.build(reads_input=False), (documents, outcomes), strict=True):
                    into.update(built)
            strategy = self.rng.choice(MAP_STRATEGIES)
            if step.get("kind") == "map" and strategy is not None:
                step["strategy"] = strategy
        return lists

    def _certain_dependencies(self, step: Document, definition: Definition, *, without_recoverers: bool) -> list[str]:
        """The plain steps in `after` whose result is there whenever the step runs."""
        if definition.join(step["name"]) != "all":
            return []
        certain = [name for name in definition.alternatives(step["name"]) if isinstance(name, str)]
        return [
            name
            for name in certain
            if definition.kind(name) == "plain"
            and not (without_recoverers and definition.recoverers(name))
            and all(definition.kind(other) == "plain" for other in _recoverers(definition, name))
        ]

    def _add_condition(
        self, step: Document, definition: Definition, lists: dict[str, int], *, reads_input: bool
    ) -> None:
        certain = self._certain_dependencies(step, definition, without_recoverers=False)
        numbers = [name for name in certain if lists.keys().isdisjoint({name, *_recoverers(definition, name)})]
        atoms = [f"{name} == 1" for name in numbers] + [f"{name} != 2" for name in numbers]
        if reads_input:
            atoms += ["input.flag == true", "input.flag == false"]
        if atoms:
            first, second = self.rng.choice(atoms), self.rng.choice(atoms)
            forms = (first, first, f"not {first}", f"{first} and {second}", f"{first} or not {second}")
            step["when"] = self.rng.choice(forms)

    def _outcome(self, step: Document, definition: Definition, lists: dict[str, int]) -> Outcome:
        name, kind = step["name"], definition.kind(step["name"])
        watched = any(definition.dependents(name, field) for field in ("on_failure", "recovers"))
        watched = watched or any(definition.join(other) != "all" for other in definition.dependents(name, "after"))
        chance = 0.5 if watched else 0.15 if definition.upstream(name) else 0.06
        fails = kind in {"plain", "decision"} and self.rng.random() < chance
        result: Any = self.rng.choice((0, 1, 1, 2))
        if name in lists:
            result = list(range(lists[name]))
        elif kind == "decision":
            branches = step["branches"]
            count = self.rng.choices((0, 1, len(branches), self.rng.randint(1, len(branches))), (1, 5, 2, 4))[0]
            chosen = self.rng.sample(branches, count)
            result = chosen[0] if len(chosen) == 1 and self.rng.random() < 0.5 else chosen
        failing_parts = frozenset(index for index in range(5) if kind == "map" and self.rng.random() < 0.25)
        undo_fails = "compensate" in step and self.rng.random() < 0.15
        return Outcome(result, End.ERROR if fails else End.DONE, failing_parts, undo_fails)


def _recoverers(definition: Definition, name: str) -> set[str]:
    """The steps that recover a step, those that recover these, and so on."""
    direct = definition.recoverers(name)
    return set(direct).union(*(_recoverers(definition, other) for other in direct))


# --- Shrinking ------------------------------------------------------------------------------------------------------


def shrink(definition: RandomDefinition, fails: Callable[[RandomDefinition], bool]) -> RandomDefinition:
    """The smallest definition found that still fails, by dropping steps one after the other."""
    smaller = next((each for each in smaller_definitions(definition) if fails(each)), None)
    return definition if smaller is None else shrink(smaller, fails)


def smaller_definitions(definition: RandomDefinition) -> Iterator[RandomDefinition]:
    """The valid definitions with one step less; steps of a child workflow can be dropped too."""
    for workflow, document in definition.documents.items():
        for step in document["steps"]:
            if len(document["steps"]) > 1:
                smaller = _without_step(definition, workflow, step["name"])
                ties = any(grouping_depends_on_ties(each) for each in smaller.documents.values())
                if not ties and not definition_problems(smaller.documents, smaller.name):
                    yield smaller


def _without_step(definition: RandomDefinition, workflow: str, name: str) -> RandomDefinition:
    documents = copy.deepcopy(definition.documents)
    outcomes = {each: dict(steps) for each, steps in definition.outcomes.items()}
    document, ends = documents[workflow], outcomes[workflow]
    document["steps"] = [step for step in document["steps"] if step["name"] != name]
    del ends[name]
    for step in document["steps"]:
        outcome = ends.get(step["name"], SUCCESS)
        if name in step.get("branches", ()):
            chosen = [outcome.result] if isinstance(outcome.result, str) else outcome.result
            ends[step["name"]] = replace(outcome, result=[branch for branch in chosen if branch != name])
        _forget(step, name)
        if step.get("branches") == []:
            del step["branches"], step["kind"]
            ends[step["name"]] = replace(outcome, result=0)
    reachable = _reachable(documents, definition.name)
    return replace(
        definition,
        documents={each: documents[each] for each in reachable},
        outcomes={each: outcomes[each] for each in reachable},
    )


def _forget(step: Document, name: str) -> None:
    """Removes every mention of another step from a step."""
    for key in (*DEPENDENCY_FIELDS, "branches"):
        if name in step.get(key, ()):
            step[key] = [other for other in step[key] if other != name]
            if not step[key] and key != "branches":
                del step[key]
    if name in condition_names(step.get("when", "true")):
        del step["when"]
    if step.get("over") == name:
        del step["over"], step["kind"]
        step.pop("strategy", None)
    count = sum(len(step.get(kind, ())) for kind in DEPENDENCY_FIELDS)
    if not count:
        step.pop("join", None)
        step.pop("cancel_rest", None)
    elif isinstance(step.get("join"), int):
        step["join"] = min(step["join"], count)


def _reachable(documents: dict[str, Document], name: str) -> list[str]:
    children = [step["workflow"] for step in documents[name]["steps"] if step.get("kind") == "child"]
    return [name, *(inner for child in children for inner in _reachable(documents, child))]
