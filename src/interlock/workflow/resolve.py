"""Decides the steps downstream of ended ones: ready, skipped because of a failure, or passed over.

The dependencies of a step are counted as they resolve (met, failed, the rest passed over). Where counts do not decide,
the step has a stored rule, and `activate.py` reads the ends of its upstream steps for `model/joins.py`. Nothing here
touches the database.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.lifecycle import TaskRowState
from interlock.model.graph import AFTER, RECOVERY
from interlock.model.joins import BRANCH_NOT_CHOSEN, Ruling, StepEnd, UpstreamEnd, describe_unmet, met

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

PART_CONDITION = "part"  # condition of the edge from a part to its map
FAILED_STATES = frozenset({TaskRowState.ERROR, TaskRowState.CANCELED})


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that has ended, as the steps downstream see it.

    `chosen` has the branches of a decision. `superseded` marks a step that `cancel_rest` canceled, `reused` one whose
    result was taken over from an earlier job.
    """

    id: UUID
    job_id: UUID
    step: str
    state: str
    part_of: UUID | None = None
    chosen: Any = None
    skipped_by_failure: bool = False
    superseded: bool = False
    reused: bool = False

    @property
    def end(self) -> StepEnd:
        """The end by the rules of `model/joins.py`."""
        return step_end(
            self.state, skipped_by_failure=self.skipped_by_failure, superseded=self.superseded, reused=self.reused
        )

    @property
    def has_failed_itself(self) -> bool:
        """Whether this failure may fail the job; that of a part counts as one of its map."""
        return self.state in FAILED_STATES and not self.superseded and self.part_of is None


def step_end(state: str, *, skipped_by_failure: bool, superseded: bool, reused: bool) -> StepEnd:
    """Classify the stored state of an ended step."""
    if state == TaskRowState.DONE or reused:
        return StepEnd.DONE
    if skipped_by_failure or (state in FAILED_STATES and not superseded):
        return StepEnd.FAILED
    return StepEnd.PASSED_OVER


def closed_branch(branch: str, decision: EndedStep) -> Ruling | None:
    """Pass over a declared branch that was not chosen, whatever else it depends on; None if it may run."""
    if decision.end is StepEnd.PASSED_OVER:
        return Ruling(StepEnd.PASSED_OVER, cause=describe_unmet(decision.step, AFTER, decision.end))
    if decision.end is StepEnd.DONE and branch not in chosen_names(decision.chosen):
        return Ruling(StepEnd.PASSED_OVER, cause=BRANCH_NOT_CHOSEN)
    return None


def chosen_names(chosen: Any) -> list[str]:
    """Return the branches that a decision chose, from its stored metadata."""
    return chosen if isinstance(chosen, list) else [] if chosen is None else [chosen]


@dataclass(slots=True)
class WaitingStep:
    """A waiting step with the counts of its dependencies, or of its parts if it is a map that has been activated."""

    id: UUID
    job_id: UUID
    step: str
    kind: str
    namespace: str
    priority: int = 0
    limit_keys: list[str] | None = None
    edges: int = 0
    needed: int | None = None
    rule: Mapping[str, Any] | None = None
    condition: str | None = None  # `when` of its definition
    cancel_rest: bool = False
    unresolved: int = 0
    taken: int = 0
    failed: int = 0
    waits_for_parts: bool = False
    unmet: str | None = None  # why the first dependency of this batch that is not met is not; failures come first


STEP_COLUMNS = (
    *("id", "job_id", "step", "kind", "namespace", "priority", "limit_keys", "edges", "needed", "rule", "condition"),
    *("cancel_rest", "unresolved", "taken", "failed"),
)


class SkippedStep(NamedTuple):
    """A step that will not run.

    The reason is None if the upstream step that caused it ended in an earlier batch; it is read from the database then.
    """

    step: WaitingStep
    skipped_by_failure: bool
    reason: str | None

    def as_ended(self) -> EndedStep:
        """Return the step as its own downstream steps see it."""
        return EndedStep(
            self.step.id,
            self.step.job_id,
            self.step.step,
            TaskRowState.SKIPPED,
            skipped_by_failure=self.skipped_by_failure,
        )


@dataclass(slots=True)
class Resolution:
    """The waiting steps of one batch, and the decisions about them."""

    steps: dict[UUID, WaitingStep] = field(default_factory=dict)
    ready: list[WaitingStep] = field(default_factory=list)
    skipped: list[SkippedStep] = field(default_factory=list)
    ruled: dict[UUID, WaitingStep] = field(default_factory=dict)  # to be decided by their stored rules
    ends: dict[tuple[UUID, str], UpstreamEnd] = field(default_factory=dict)  # of this batch, by job and step
    decided: set[UUID] = field(default_factory=set)  # steps of this batch, written or not

    def resolve(self, ended: Mapping[UUID, EndedStep], rows: Iterable[Mapping[str, Any]]) -> dict[UUID, EndedStep]:
        """Resolve the edges of these rows, which lead from `ended` steps; return the steps that are skipped by it."""
        for step in ended.values():
            self.ends[step.job_id, step.step] = UpstreamEnd(step.end, chosen_names(step.chosen))
        touched: dict[UUID, WaitingStep] = {}
        skipped = []
        for row in rows:
            upstream = ended.get(row["upstream_id"])
            if upstream is None or row["id"] is None:
                continue
            if row["id"] in self.decided:
                continue
            waiting = self._waiting_step(row)
            if row["branch"] and (closed := closed_branch(waiting.step, upstream)) is not None:
                skipped.append(self.skip(waiting, closed))
                continue
            touched[waiting.id] = waiting
            waiting.unresolved -= 1
            self._count(waiting, upstream, row["on_condition"])
        undecided = [step for step in touched.values() if step.id not in self.decided]
        skipped += [skip for step in undecided if (skip := self._decide(step))]
        return {skip.step.id: skip.as_ended() for skip in skipped}

    def apply(self, step: WaitingStep, ruling: Ruling) -> SkippedStep | None:
        """Apply the decision of a stored rule; return the step if it is skipped."""
        if ruling.is_open:
            return None
        if ruling.end is not None:
            return self.skip(step, ruling)
        self._make_ready(step)
        return None

    def skip(self, step: WaitingStep, ruling: Ruling) -> SkippedStep:
        """Skip a step."""
        self.decided.add(step.id)
        skipped = SkippedStep(step, skipped_by_failure=ruling.end is StepEnd.FAILED, reason=ruling.cause)
        self.skipped.append(skipped)
        return skipped

    @property
    def still_waiting(self) -> list[WaitingStep]:
        """The steps whose counts have changed, and that are not decided."""
        return [step for step in self.steps.values() if step.id not in self.decided]

    def _waiting_step(self, row: Mapping[str, Any]) -> WaitingStep:
        step = self.steps.get(row["id"])
        if step is None:
            is_part = row["on_condition"] == PART_CONDITION
            step = WaitingStep(**{name: row[name] for name in STEP_COLUMNS}, waits_for_parts=is_part)
            self.steps[step.id] = step
        return step

    def _count(self, step: WaitingStep, upstream: EndedStep, condition: str) -> None:
        if condition == RECOVERY:
            return
        if condition == PART_CONDITION:
            outcome = StepEnd.DONE if upstream.end is StepEnd.DONE else StepEnd.FAILED
        else:
            outcome = met(condition, upstream.end)
        if outcome is StepEnd.DONE:
            step.taken += 1
            return
        if outcome is StepEnd.FAILED and step.failed == 0:
            step.unmet = None
        step.failed += outcome is StepEnd.FAILED
        step.unmet = step.unmet or (
            describe_unmet(upstream.step, condition, upstream.end)
            if outcome is StepEnd.FAILED or step.failed == 0
            else None
        )

    def _decide(self, step: WaitingStep) -> SkippedStep | None:
        """Make a step ready or return why it is skipped, if its counts decide."""
        if step.waits_for_parts:
            if step.unresolved == 0:
                self._make_ready(step)
            return None
        if step.rule is not None:
            if step.needed is None and step.unresolved > 0:
                return None
            self.ruled[step.id] = step
            return None
        needed = step.edges if step.needed is None else step.needed
        if step.taken >= needed:
            self._make_ready(step)
            return None
        if step.unresolved > 0 and (step.needed is None or step.taken + step.unresolved >= needed):
            return None
        return self.skip(step, Ruling(StepEnd.FAILED if step.failed else StepEnd.PASSED_OVER, cause=step.unmet))

    def _make_ready(self, step: WaitingStep) -> None:
        self.decided.add(step.id)
        self.ready.append(step)
