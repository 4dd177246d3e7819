"""Resolves dependencies: decides from ended steps which waiting steps become ready and which are skipped. No I/O.

The SQL function `advance_plain_steps` decides the common case by itself (every step done, no decision, no failure) and
leaves all others to this module. `dry_run.py` states the same rules independently.

Invariant: a step is decided once, when its last edge is resolved, and from the counts alone, so that the order in which
its upstream steps ended makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.lifecycle import TASK_ROW, TaskRowState
from interlock.model.graph import ALL, ANY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

PART_CONDITION = "part"  # of the implicit edge from a part to its map
FAILED_STATES = TASK_ROW.final - {TaskRowState.DONE, TaskRowState.SKIPPED}


class EndedStep(NamedTuple):
    """A step that has ended, as the steps downstream of it see it.

    `chosen` has the branches of a decision; `poisoned` marks a step that was skipped because of a failure; `reused` one
    whose result was taken over from an earlier job.
    """

    id: UUID
    job_id: UUID
    step: str
    state: str
    part_of: UUID | None = None
    chosen: Any = None
    poisoned: bool = False
    reused: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether it has a result."""
        return self.state == TaskRowState.DONE or self.reused

    @property
    def failed(self) -> bool:
        """Whether it failed, was canceled, or was skipped because of such a step."""
        return self.state in FAILED_STATES or self.poisoned


class EdgeOutcome(Enum):
    """The outcome of an edge whose upstream step has ended."""

    TAKEN = "taken"
    FAILED = "failed"
    NOT_TAKEN = "not taken"


@dataclass(slots=True)
class WaitingStep:
    """A waiting step with the counts of its edges, or of its parts if it is a map that has been activated."""

    id: UUID
    job_id: UUID
    step: str
    kind: str
    namespace: str
    priority: int = 0
    limit_key: str | None = None
    rule: float = ALL
    unresolved: int = 0
    taken: int = 0
    failed: int = 0
    waits_for_parts: bool = False
    failed_upstream: str | None = None  # the first one that failed in this batch


_ROW_COLUMNS = (
    *("id", "job_id", "step", "kind", "namespace", "priority", "limit_key", "rule", "unresolved", "taken", "failed"),
)


class SkippedStep(NamedTuple):
    """A step that will not run; `error` is set if it failed by itself, as a map does because of its parts.

    The reason is None if the failed upstream step ended in an earlier batch; it is read from the database then.
    """

    step: WaitingStep
    poisoned: bool
    reason: str | None
    error: dict[str, Any] | None = None

    def as_ended(self) -> EndedStep:
        """Return the step as its own downstream steps see it."""
        return EndedStep(self.step.id, self.step.job_id, self.step.step, TaskRowState.SKIPPED, poisoned=self.poisoned)


def is_rule_met(rule: float, taken: int, failed: int) -> bool:
    """Tell whether the outcomes of all edges or parts meet a join rule or a map strategy."""
    if rule == ANY:
        return taken >= 1
    return failed == 0 if rule == ALL else taken / max(taken + failed, 1) >= rule


def edge_outcome(ended: EndedStep, downstream: str, condition: str, *, branch: bool) -> EdgeOutcome:
    """Return the outcome of an edge from an ended step."""
    if condition == PART_CONDITION:
        return EdgeOutcome.TAKEN if ended.succeeded else EdgeOutcome.FAILED
    if condition == "failure":
        return EdgeOutcome.TAKEN if ended.failed else EdgeOutcome.NOT_TAKEN
    if ended.failed:
        return EdgeOutcome.FAILED
    if not ended.succeeded or (branch and not _is_chosen(ended.chosen, downstream)):
        return EdgeOutcome.NOT_TAKEN
    return EdgeOutcome.TAKEN


def _is_chosen(chosen: Any, branch: str) -> bool:
    return chosen == branch or (isinstance(chosen, list) and branch in chosen)


@dataclass(slots=True)
class Resolution:
    """The waiting steps of one batch, and the decisions about them."""

    steps: dict[UUID, WaitingStep] = field(default_factory=dict)
    ready: list[WaitingStep] = field(default_factory=list)
    skipped: list[SkippedStep] = field(default_factory=list)

    def resolve(self, ended: Mapping[UUID, EndedStep], rows: Iterable[Mapping[str, Any]]) -> dict[UUID, EndedStep]:
        """Resolve the edges of these rows, which lead from `ended` steps; return the steps that are skipped by it."""
        touched: dict[UUID, WaitingStep] = {}
        for row in rows:
            upstream = ended.get(row["upstream_id"])
            if upstream is not None and row["id"] is not None:
                step = self._waiting_step(row)
                touched[step.id] = step
                outcome = edge_outcome(upstream, step.step, row["condition"], branch=row["branch"])
                step.unresolved -= 1
                step.taken += outcome is EdgeOutcome.TAKEN
                if outcome is EdgeOutcome.FAILED:
                    step.failed += 1
                    step.failed_upstream = step.failed_upstream or upstream.step
        skipped = [skip for step in touched.values() if step.unresolved == 0 and (skip := self._decide(step))]
        self.skipped += skipped
        return {skip.step.id: skip.as_ended() for skip in skipped}

    @property
    def still_waiting(self) -> list[WaitingStep]:
        """The steps whose counts have changed, and that have unresolved edges or parts left."""
        return [step for step in self.steps.values() if step.unresolved > 0]

    def _waiting_step(self, row: Mapping[str, Any]) -> WaitingStep:
        step = self.steps.get(row["id"])
        if step is None:
            is_part = row["condition"] == PART_CONDITION
            step = WaitingStep(**{name: row[name] for name in _ROW_COLUMNS}, waits_for_parts=is_part)
            self.steps[step.id] = step
        return step

    def _decide(self, step: WaitingStep) -> SkippedStep | None:
        """Make a step ready whose edges are all resolved, or return why it is skipped."""
        if not step.waits_for_parts and step.taken + step.failed == 0:
            return SkippedStep(step, poisoned=False, reason="branch not taken")
        if is_rule_met(step.rule, step.taken, step.failed):
            self.ready.append(step)
            return None
        if step.waits_for_parts:
            reason = f"{step.failed} of {step.taken + step.failed} parts failed"
            error = {"type": "PartsFailed", "message": reason, "traceback": None, "retryable": False}
            return SkippedStep(step, poisoned=True, reason=reason, error=error)
        reason_or_none = f"step {step.failed_upstream} failed" if step.failed_upstream else None
        return SkippedStep(step, poisoned=True, reason=reason_or_none)
