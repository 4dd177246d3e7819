"""Interprets a workflow in memory: from a definition and the outcomes of its steps to the end of the job.

Users call it to try a definition without a database. Steps are decided by `model/joins.py`, as in the orchestrator; an
independent interpreter in the tests checks both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from interlock.errors import PermanentError
from interlock.model.conditions import parse_condition
from interlock.model.graph import (
    AFTER,
    MAP,
    MAP_SOURCE_ERROR,
    MAX_MAP_PARTS,
    check_definition,
    chosen_branches,
    dependencies,
    edges,
    recovering_steps,
    require_approval,
    too_many_parts_error,
    topological_order,
)
from interlock.model.joins import (
    BRANCH_NOT_CHOSEN,
    MAX_NAMED_PARTS,
    EndedJobStep,
    Ruling,
    StepEnd,
    UpstreamEnd,
    compile_joins,
    decide,
    describe_failed_parts,
    describe_unmet,
    is_share_met,
    met,
    required_share,
    standing_failures,
)
from interlock.model.timing import wake_at

if TYPE_CHECKING:
    from collections.abc import Callable

State = Literal["done", "error", "skipped"]
Status = Literal["COMPLETED", "FAILED"]


@dataclass(frozen=True, slots=True)
class Failed:
    """Given as the outcome of a step instead of a result: the step fails for good."""

    message: str = "failed"


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one step. `chosen` is set for decisions; `reused` for results taken over from an earlier job.

    `skipped_by_failure` is false for a step that was not needed: a branch, a condition, a failure handler.
    """

    state: State
    skipped_by_failure: bool = False
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
        return self.state == "error" or self.skipped_by_failure

    @property
    def as_upstream(self) -> UpstreamEnd:
        """The end as the rules of joins see it."""
        end = StepEnd.DONE if self.has_result else StepEnd.FAILED if self.is_failure else StepEnd.PASSED_OVER
        return UpstreamEnd(end, self.chosen)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a job. `steps` includes the parts of maps; `compensated` lists the compensated steps, latest first."""

    status: Status
    steps: dict[str, Ended]
    output: Any = None
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
    under `pack[0]`, `pack[1]` and so on. `reused` has the results that the job takes over from an earlier one. Steps
    end in topological order, so that `cancel_rest` cancels nothing.
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


class _Interpreter:
    """One job in memory; steps run in topological order."""

    def __init__(
        self,
        document: Mapping[str, Any],
        outcomes: Mapping[str, Any] | Callable[[str], Any],
        input_: Mapping[str, Any],
        reused: Mapping[str, Any],
    ) -> None:
        self._document = document
        self._specs: dict[str, Mapping[str, Any]] = {step["name"]: step for step in document["steps"]}
        self._order = topological_order(document)
        self._output: str | Mapping[str, str] | None = document.get("output")
        self._outcomes = outcomes
        self._input = input_
        self._reused = reused
        self._joins = compile_joins(document)
        self._recovering = recovering_steps(document)
        self._gates = {(step["name"], branch) for step in document["steps"] for branch in step.get("branches") or ()}
        self._upstreams = {edge.upstream for edge in edges(document) if edge.condition == AFTER}
        self._ended: dict[str, Ended] = {}
        self._failures: dict[str, str] = {}  # messages by step; a map stands for its parts

    def run(self) -> Verdict:
        for name in self._order:
            self._ended[name] = self._end_step(name)
        ends = {
            name: EndedJobStep(ended.as_upstream.end, ran=ended.state != "skipped" or ended.reused)
            for name, ended in self._ended.items()
            if name in self._specs
        }
        standing = standing_failures(self._document, ends)
        unhandled = {name: message for name, message in self._failures.items() if name in standing}
        return self._fail_job(unhandled) if unhandled else self._complete_job()

    def _complete_job(self) -> Verdict:
        ended = self._ended
        if isinstance(self._output, str):
            return Verdict("COMPLETED", ended, output=self._result_of(self._output))
        if self._output is not None:
            named = self._output
        else:
            named = {name: name for name in self._specs if name not in self._upstreams}
        output = {key: self._result_of(name) for key, name in named.items() if self._has_result(name)}
        return Verdict("COMPLETED", ended, output=output)

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

    def _end_step(self, name: str) -> Ended:
        spec = self._specs[name]
        if name in self._reused:
            result = self._reused[name]
            branches = chosen_branches(spec["branches"], result) if spec.get("kind") == "decision" else ()
            return Ended("skipped", result=result, reused=True, chosen=tuple(branches), reason="result reused")
        ruling = self._rule(name, spec)
        if ruling.end is not None:
            return Ended("skipped", skipped_by_failure=ruling.end is StepEnd.FAILED, reason=ruling.cause)
        ended = self._run_map(name, spec) if spec.get("kind") == MAP else self._run_step(name, spec)
        if ended.is_failure:
            self._failures[name] = ended.error or ""
        return ended

    def _rule(self, name: str, spec: Mapping[str, Any]) -> Ruling:
        """Decide whether a step runs; all upstream steps have ended."""
        upstreams = dependencies(spec)
        ends = {upstream: ended.as_upstream for upstream, ended in self._ended.items()}
        for upstream, _ in upstreams:
            if (upstream, name) not in self._gates:
                continue
            if ends[upstream].end is StepEnd.PASSED_OVER:
                return Ruling(StepEnd.PASSED_OVER, cause=describe_unmet(upstream, AFTER, StepEnd.PASSED_OVER))
            if ends[upstream].end is StepEnd.DONE and name not in ends[upstream].chosen:
                return Ruling(StepEnd.PASSED_OVER, cause=BRANCH_NOT_CHOSEN)
        join = self._joins[name]
        if join.rule is not None:
            ruling = decide(join.rule, ends)
        else:
            found = [(upstream, field, met(field, ends[upstream].end)) for upstream, field in upstreams]
            ruling = _count(found, join.needed)
        condition = spec.get("when")
        if ruling.end is not None or condition is None:
            return ruling
        values = {upstream: self._result_of(upstream) for upstream in spec.get(AFTER) or ()}
        if parse_condition(condition).is_met({**values, "input": dict(self._input)}):
            return ruling
        return Ruling(StepEnd.PASSED_OVER, cause=f"its condition is false: {condition}")

    def _result_of(self, name: str) -> Any:
        """Return the result of a step, or of the step that recovered it."""
        ended = self._ended[name]
        if ended.has_result or not ended.is_failure:
            return ended.result
        recoveries = (self._result_of(other) for other in self._recovering.get(name, ()) if self._has_result(other))
        return next(recoveries, None)

    def _has_result(self, name: str) -> bool:
        ended = self._ended[name]
        others = self._recovering.get(name, ())
        return ended.has_result or (ended.is_failure and any(self._has_result(other) for other in others))

    def _run_step(self, name: str, spec: Mapping[str, Any]) -> Ended:
        kind = spec.get("kind", "plain")
        if kind == "sleep":
            try:
                wake_at(spec, self._input.get(str(spec.get("until"))), datetime.now(UTC))
            except ValueError as error:
                return Ended("error", error=str(error))
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
            return Ended("error", error=str(error))
        results: list[Any] = []
        failed: list[str] = []
        for index in range(len(parts)):
            part = f"{name}[{index}]"
            outcome = self._outcome_of(part, None)
            if isinstance(outcome, Failed):
                self._ended[part] = Ended("error", error=outcome.message)
                failed.append(part)
            else:
                self._ended[part] = Ended("done", result=outcome)
                results.append(outcome)
        if parts and not is_share_met(required_share(spec.get("strategy")), len(results), len(parts)):
            return Ended("error", error=describe_failed_parts(failed[:MAX_NAMED_PARTS], len(failed), len(parts)))
        return Ended("done", result=results)

    def _map_source(self, spec: Mapping[str, Any]) -> Any:
        if "over_input" in spec:
            return self._input.get(spec["over_input"])
        return self._result_of(spec["over"])

    def _outcome_of(self, name: str, default: Any) -> Any:
        if isinstance(self._outcomes, Mapping):
            return self._outcomes.get(name, default)
        return self._outcomes(name)


def _count(found: list[tuple[str, str, StepEnd]], needed: int | None) -> Ruling:
    """Decide a step by the number of its dependencies that are met."""
    enough = len(found) if needed is None else needed
    if sum(outcome is StepEnd.DONE for *_, outcome in found) >= enough:
        return Ruling()
    unmet = [dependency for dependency in found if dependency[2] is not StepEnd.DONE]
    upstream, condition, end = next((each for each in unmet if each[2] is StepEnd.FAILED), unmet[0])
    return Ruling(end, cause=describe_unmet(upstream, condition, end))
