"""Interprets a workflow in memory: from a definition and the outcomes of its steps to the end of the job.

This is an independent statement of the workflow rules. It shares the definition (`model/graph.py`) with the engine, and
none of the engine's code: `resolve.py` and the SQL function `advance_plain_steps` are tested against it. Users call it
to try a definition without a database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from interlock.errors import PermanentError
from interlock.model.graph import (
    MAP,
    MAP_SOURCE_ERROR,
    MAX_MAP_PARTS,
    check_definition,
    chosen_branches,
    edges,
    require_approval,
    too_many_parts_error,
    topological_order,
)
from interlock.model.timing import wake_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.model.graph import Edge

State = Literal["done", "error", "skipped"]
Status = Literal["COMPLETED", "FAILED"]


@dataclass(frozen=True, slots=True)
class Failed:
    """Given as the outcome of a step instead of a result: the step fails for good."""

    message: str = "failed"


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one step. `chosen` is set for decisions; `reused` for results taken over from an earlier job.

    `poisoned` marks a step that was skipped because of a failure, and not because a branch was not chosen.
    """

    state: State
    poisoned: bool = False
    result: Any = None
    error: str | None = None
    reason: str | None = None
    chosen: tuple[str, ...] = ()
    reused: bool = False

    @property
    def has_result(self) -> bool:
        """Whether steps downstream can use its result."""
        return self.state == "done" or self.reused

    @property
    def is_failure(self) -> bool:
        """Whether steps downstream see it as failed."""
        return self.state == "error" or self.poisoned


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a job. `steps` includes the parts of maps; `compensated` lists the compensated steps, latest first."""

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
    """Return how a job ends whose steps have these outcomes: a result, or `Failed(message)`.

    A step without an outcome returns null, a decision all its branches, an approval `{"approved": true}`. The outcome
    of a decision is the names of its branches, that of an approval its answer, and a map has one outcome for each part,
    under `pack[0]`, `pack[1]` and so on. `reused` has the results that the job takes over from an earlier one.
    """
    check_definition(document)
    return _Interpreter(document, outcomes or {}, input or {}, reused or {}).run()


def split_map_source(value: Any) -> list[Any]:
    """List the parts of a map: the elements of a list, or the ranges of {"start", "stop", "size"}."""
    if isinstance(value, list | tuple):
        _check_part_count(len(value))
        return list(value)
    given = value if isinstance(value, Mapping) else {}
    numbers: list[Any] = [given.get(name) for name in ("start", "stop", "size")]
    if not all(type(number) in {int, float} and number % 1 == 0 for number in numbers) or numbers[2] < 1:
        raise ValueError(MAP_SOURCE_ERROR)
    start, stop, size = map(int, numbers)
    _check_part_count(-((start - stop) // size))
    return [{"start": at, "stop": min(at + size, stop)} for at in range(start, stop, size)]


def _check_part_count(parts: int) -> None:
    if parts > MAX_MAP_PARTS:
        raise ValueError(too_many_parts_error(parts))


def _is_satisfied(rule: Any, succeeded: int, failed: int) -> bool:
    """Tell whether a join or a strategy ("all", "any" or a ratio) is met."""
    if rule == "any":
        return succeeded >= 1
    return succeeded / (succeeded + failed) >= (1.0 if rule == "all" else rule)


class _Interpreter:
    """One job in memory; steps run in topological order."""

    def __init__(
        self,
        document: Mapping[str, Any],
        outcomes: Mapping[str, Any] | Callable[[str], Any],
        input_: Mapping[str, Any],
        reused: Mapping[str, Any],
    ) -> None:
        self._specs: dict[str, Mapping[str, Any]] = {step["name"]: step for step in document["steps"]}
        self._order = topological_order(document["steps"])
        self._outcomes = outcomes
        self._input = input_
        self._reused = reused
        self._edges_into: dict[str, list[Edge]] = {name: [] for name in self._specs}
        self._downstreams: dict[str, list[str]] = {name: [] for name in self._specs}
        for edge in edges(document):
            self._edges_into[edge.downstream].append(edge)
            self._downstreams[edge.upstream].append(edge.downstream)
        self._ended: dict[str, Ended] = {}
        self._failures: dict[str, str] = {}  # messages by step; a map stands for its parts

    def run(self) -> Verdict:
        for name in self._order:
            self._ended[name] = self._end_step(name)
        unhandled = {name: message for name, message in self._failures.items() if not self._is_handled(name)}
        return self._fail_job(unhandled) if unhandled else self._complete_job()

    def _complete_job(self) -> Verdict:
        ended = self._ended
        sinks = [name for name, downstreams in self._downstreams.items() if not downstreams and ended[name].has_result]
        return Verdict("COMPLETED", ended, output={name: ended[name].result for name in sinks})

    def _fail_job(self, unhandled: dict[str, str]) -> Verdict:
        first, first_message = next(iter(unhandled.items()))
        done = [name for name in self._order if self._ended[name].state == "done"]
        return Verdict(
            "FAILED",
            self._ended,
            error={"steps": {name: {"message": message} for name, message in unhandled.items()}},
            reason=f"step {first} failed: {first_message}",
            compensated=tuple(name for name in reversed(done) if self._specs[name].get("compensate")),
        )

    def _is_handled(self, name: str) -> bool:
        """Tell whether a step directly downstream of a failed one ran in spite of the failure."""
        downstreams = [self._ended[downstream] for downstream in self._downstreams[name]]
        return any(ended.state != "skipped" or ended.reused for ended in downstreams)

    def _end_step(self, name: str) -> Ended:
        spec = self._specs[name]
        if name in self._reused:
            result = self._reused[name]
            branches = chosen_branches(spec["branches"], result) if spec.get("kind") == "decision" else ()
            return Ended("skipped", result=result, reused=True, chosen=tuple(branches), reason="result reused")
        skip = self._skip_step(name)
        if skip is not None:
            return skip
        ended = self._run_map(name, spec) if spec.get("kind") == MAP else self._run_step(name, spec)
        if ended.is_failure:
            self._failures[name] = ended.error or ended.reason or ""
        return ended

    def _skip_step(self, name: str) -> Ended | None:
        """Skip a step whose dependencies are not met; None if it runs. All upstream steps have ended."""
        if not self._edges_into[name]:
            return None
        outcomes = [(edge, _edge_outcome(edge, self._ended[edge.upstream])) for edge in self._edges_into[name]]
        taken = sum(outcome == "taken" for _, outcome in outcomes)
        failed = [edge.upstream for edge, outcome in outcomes if outcome == "failed"]
        if taken + len(failed) == 0:
            return Ended("skipped", reason="branch not taken")
        if _is_satisfied(self._specs[name].get("join", "all"), taken, len(failed)):
            return None
        return Ended("skipped", poisoned=True, reason=f"step {failed[0]} failed")

    def _run_step(self, name: str, spec: Mapping[str, Any]) -> Ended:
        kind = spec.get("kind", "plain")
        if kind == "sleep":
            try:
                wake_at(spec, self._input.get(str(spec.get("until"))), datetime.now(UTC))
            except ValueError as error:
                return Ended("skipped", poisoned=True, reason=str(error))
        default = {"decision": spec.get("branches"), "approval": {"approved": True}}.get(kind)
        outcome = self._outcome_of(name, default)
        if isinstance(outcome, Failed):
            return Ended("error", error=outcome.message)
        try:
            branches = chosen_branches(spec["branches"], outcome) if kind == "decision" else ()
            result = require_approval(outcome) if kind == "approval" else outcome
        except PermanentError as error:
            return Ended("error", error=str(error))
        return Ended("done", result=result, chosen=tuple(branches))

    def _run_map(self, name: str, spec: Mapping[str, Any]) -> Ended:
        try:
            parts = split_map_source(self._map_source(spec))
        except ValueError as error:
            return Ended("skipped", poisoned=True, reason=str(error))
        results: list[Any] = []
        for index in range(len(parts)):
            part = f"{name}[{index}]"
            outcome = self._outcome_of(part, None)
            if isinstance(outcome, Failed):
                self._ended[part] = Ended("error", error=outcome.message)
            else:
                self._ended[part] = Ended("done", result=outcome)
                results.append(outcome)
        failed = len(parts) - len(results)
        if parts and not _is_satisfied(spec.get("strategy", "all"), len(results), failed):
            return Ended("skipped", poisoned=True, reason=f"{failed} of {len(parts)} parts failed")
        return Ended("done", result=results)

    def _map_source(self, spec: Mapping[str, Any]) -> Any:
        if "over_input" in spec:
            return self._input.get(spec["over_input"])
        upstream = self._ended[spec["over"]]
        return upstream.result if upstream.has_result else None

    def _outcome_of(self, name: str, default: Any) -> Any:
        if isinstance(self._outcomes, Mapping):
            return self._outcomes.get(name, default)
        return self._outcomes(name)


def _edge_outcome(edge: Edge, upstream: Ended) -> Literal["taken", "failed", "not taken"]:
    """Resolve an edge whose upstream step has ended."""
    if edge.condition == "failure":
        return "taken" if upstream.is_failure else "not taken"
    if upstream.is_failure:
        return "failed"
    if not upstream.has_result or (edge.branch and edge.downstream not in upstream.chosen):
        return "not taken"
    return "taken"
