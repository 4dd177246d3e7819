"""What becomes of a job, worked out in memory from a definition and the outcomes of its steps.

Invariant: the rules are those by which the orchestrator advances a job in the database; this is them in plain words,
to test it against and to try a definition without running anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from interlock.errors import PermanentError
from interlock.model.graph import MOST_PARTS, NO_LIST, approved, check, chosen, edges, in_order, too_many_parts
from interlock.model.timing import wake_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.model.graph import Edge

State = Literal["done", "error", "skipped"]
Status = Literal["COMPLETED", "FAILED"]
Taken = Literal["taken", "failed", "not taken"]


@dataclass(frozen=True, slots=True)
class Failed:
    """Said of a step in place of its result: it fails for good."""

    message: str = "failed"


@dataclass(frozen=True, slots=True)
class Ended:
    """How one step ended. `chosen` is for decisions; `reused` for steps that an earlier job had done."""

    state: State
    poisoned: bool = False
    result: Any = None
    error: str | None = None
    reason: str | None = None
    chosen: tuple[str, ...] = ()
    reused: bool = False

    @property
    def has_result(self) -> bool:
        """Whether others can use its result."""
        return self.state == "done" or self.reused


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a job ends. `steps` has the parts of maps too; `compensated` is what is undone, the last step first."""

    status: Status
    steps: dict[str, Ended]
    output: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    reason: str | None = None
    compensated: tuple[str, ...] = field(default=())


def dry_run(
    document: Mapping[str, Any],
    outcomes: Mapping[str, Any] | Callable[[str], Any] | None = None,
    *,
    input: Mapping[str, Any] | None = None,  # noqa: A002 - the name of the column
    reused: Mapping[str, Any] | None = None,
) -> Verdict:
    """Say how a job ends whose steps have these outcomes: a result, or `Failed(message)`.

    A step that is not mentioned gives null; a decision gives the names of its branches (all, if it is not mentioned),
    an approval its answer (yes), a map one outcome for each part, under `pack[0]`, `pack[1]` and so on. `reused` has
    the results of steps that an earlier job had done.
    """
    check(document)
    return _Run(document, outcomes or {}, input or {}, reused or {}).verdict()


def parts_of(value: Any) -> list[Any]:
    """Give the parts of a map: the elements of a list, or the ranges of {"start", "stop", "size"}."""
    if isinstance(value, list | tuple):
        _check_size(len(value))
        return list(value)
    given = value if isinstance(value, Mapping) else {}
    numbers: list[Any] = [given.get(name) for name in ("start", "stop", "size")]
    if not all(type(number) in {int, float} and number % 1 == 0 for number in numbers) or numbers[2] < 1:
        raise ValueError(NO_LIST)
    start, stop, size = map(int, numbers)
    _check_size(-((start - stop) // size))
    return [{"start": at, "stop": min(at + size, stop)} for at in range(start, stop, size)]


def _check_size(parts: int) -> None:
    if parts > MOST_PARTS:
        raise ValueError(too_many_parts(parts))


def enough(good: int, bad: int, rule: Any) -> bool:
    """Tell whether so many good ones of all are enough for a join or a strategy: all, any or a ratio."""
    if rule == "any":
        return good >= 1
    return good / (good + bad) >= (1.0 if rule == "all" else rule)


class _Run:
    """One job in memory."""

    def __init__(
        self,
        document: Mapping[str, Any],
        outcomes: Mapping[str, Any] | Callable[[str], Any],
        input_: Mapping[str, Any],
        reused: Mapping[str, Any],
    ) -> None:
        self._specs: dict[str, Mapping[str, Any]] = {step["name"]: step for step in document["steps"]}
        self._order = in_order(document["steps"])
        self._outcomes = outcomes
        self._input = input_
        self._reused = reused
        self._into: dict[str, list[Edge]] = {name: [] for name in self._specs}
        self._out_of: dict[str, list[str]] = {name: [] for name in self._specs}
        for edge in edges(document):
            self._into[edge.downstream].append(edge)
            self._out_of[edge.upstream].append(edge.downstream)
        self._ended: dict[str, Ended] = {}
        self._broken: dict[str, str] = {}  # what failed, with its message; a part counts as its map

    def verdict(self) -> Verdict:
        for name in self._order:
            self._ended[name] = self._end_of(name)
        unhandled = {name: told for name, told in self._broken.items() if not self._is_handled(name)}
        return self._failed(unhandled) if unhandled else self._completed()

    def _completed(self) -> Verdict:
        ended = self._ended
        sinks = [name for name, after in self._out_of.items() if not after and ended[name].has_result]
        return Verdict("COMPLETED", ended, output={name: ended[name].result for name in sinks})

    def _failed(self, unhandled: dict[str, str]) -> Verdict:
        first, message = next(iter(unhandled.items()))
        done = [name for name in self._order if self._ended[name].state == "done"]
        return Verdict(
            "FAILED",
            self._ended,
            error={"steps": {name: {"message": told} for name, told in unhandled.items()}},
            reason=f"step {first} failed: {message}",
            compensated=tuple(name for name in reversed(done) if self._specs[name].get("compensate")),
        )

    def _is_handled(self, name: str) -> bool:
        """Tell whether a step that comes right after a failed one was released in spite of it."""
        return any(self._ended[after].state != "skipped" or self._ended[after].reused for after in self._out_of[name])

    def _end_of(self, name: str) -> Ended:
        if name in self._reused:
            return self._taken_over(name)
        skip = self._skip_of(name)
        if skip is not None:
            return skip
        spec = self._specs[name]
        ended = self._mapped(name, spec) if spec.get("kind") == "map" else self._run(name, spec)
        if ended.state == "error" or ended.poisoned:
            self._broken[name] = ended.error or ended.reason or ""
        return ended

    def _skip_of(self, name: str) -> Ended | None:
        """Look at the edges of a step, all of which are resolved; nothing when it is released."""
        into = self._into[name]
        if not into:
            return None
        outcomes = [(edge, _outcome(edge, self._ended[edge.upstream])) for edge in into]
        taken = sum(outcome == "taken" for _, outcome in outcomes)
        failed = [edge.upstream for edge, outcome in outcomes if outcome == "failed"]
        if taken + len(failed) == 0:
            return Ended("skipped", reason="branch not taken")
        if enough(taken, len(failed), self._specs[name].get("join", "all")):
            return None
        return Ended("skipped", poisoned=True, reason=f"step {failed[0]} failed")

    def _run(self, name: str, spec: Mapping[str, Any]) -> Ended:
        kind = spec.get("kind", "plain")
        if kind == "sleep":
            try:
                wake_at(spec, self._input.get(str(spec.get("until"))), datetime.now(UTC))
            except ValueError as error:
                return Ended("skipped", poisoned=True, reason=str(error))
        unsaid = {"decision": spec.get("branches"), "approval": {"approved": True}}.get(kind)
        outcome = self._outcome_of(name, unsaid)
        if isinstance(outcome, Failed):
            return Ended("error", error=outcome.message)
        try:
            branches = chosen(spec["branches"], outcome) if kind == "decision" else ()
            return Ended("done", result=approved(outcome) if kind == "approval" else outcome, chosen=tuple(branches))
        except PermanentError as error:
            return Ended("error", error=str(error))

    def _mapped(self, name: str, spec: Mapping[str, Any]) -> Ended:
        try:
            parts = parts_of(self._mapped_over(spec))
        except ValueError as error:
            return Ended("skipped", poisoned=True, reason=str(error))
        done: list[Any] = []
        for index in range(len(parts)):
            part = f"{name}[{index}]"
            outcome = self._outcome_of(part, None)
            if isinstance(outcome, Failed):
                self._ended[part] = Ended("error", error=outcome.message)
            else:
                self._ended[part] = Ended("done", result=outcome)
                done.append(outcome)
        failed = len(parts) - len(done)
        if parts and not enough(len(done), failed, spec.get("strategy", "all")):
            return Ended("skipped", poisoned=True, reason=f"{failed} of {len(parts)} parts failed")
        return Ended("done", result=done)

    def _mapped_over(self, spec: Mapping[str, Any]) -> Any:
        if "over_input" in spec:
            return self._input.get(spec["over_input"])
        upstream = self._ended[spec["over"]]
        return upstream.result if upstream.has_result else None

    def _taken_over(self, name: str) -> Ended:
        result = self._reused[name]
        spec = self._specs[name]
        branches = chosen(spec["branches"], result) if spec.get("kind") == "decision" else ()
        return Ended("skipped", result=result, reused=True, chosen=tuple(branches), reason="result reused")

    def _outcome_of(self, name: str, unsaid: Any) -> Any:
        if isinstance(self._outcomes, Mapping):
            return self._outcomes.get(name, unsaid)
        return self._outcomes(name)


def _outcome(edge: Edge, upstream: Ended) -> Taken:
    """Say what an edge came to, once the step at its beginning has ended."""
    is_failure = upstream.state == "error" or upstream.poisoned
    if edge.condition == "failure":
        return "taken" if is_failure else "not taken"
    if is_failure:
        return "failed"
    if not upstream.has_result or (edge.branch and edge.downstream not in upstream.chosen):
        return "not taken"
    return "taken"
