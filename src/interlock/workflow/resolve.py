"""What the end of steps means for the steps that wait for them. No I/O: rows in, verdicts out.

Invariant: a step is judged once, when the last of its edges is resolved, and by the counts alone, so that the order in
which its upstream steps ended makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.model.graph import ALL, ANY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

PART = "part"
FAILED_STATES = frozenset({"error", "canceled"})


class Ended(NamedTuple):
    """A step that has ended, and what others need to know of it."""

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
        return self.state == "done" or self.reused

    @property
    def failed(self) -> bool:
        """Whether it counts as failed: it did, it was canceled, or it was skipped for such a step."""
        return self.state in FAILED_STATES or self.poisoned


class EdgeOutcome(Enum):
    """What an edge says once the step that it comes from has ended."""

    TAKEN = "taken"
    FAILED = "failed"
    NOT_TAKEN = "not taken"


@dataclass(slots=True)
class Waiting:
    """A step that waits, and how many of its edges, or of its parts, are still open."""

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
    by_parts: bool = False
    culprit: str | None = None


_OF_A_ROW = (
    *("id", "job_id", "step", "kind", "namespace", "priority", "limit_key", "rule", "unresolved", "taken", "failed"),
)


class Skipped(NamedTuple):
    """A step that will not run, and why; `error` when it failed by itself, as a map does for its parts.

    Without a reason, it is for a step that failed in an earlier batch.
    """

    step: Waiting
    poisoned: bool
    reason: str | None
    error: dict[str, Any] | None = None


def enough(rule: float, taken: int, failed: int) -> bool:
    """Tell whether so many successes satisfy a rule."""
    if rule == ANY:
        return taken >= 1
    return failed == 0 if rule == ALL else taken / max(taken + failed, 1) >= rule


def edge_outcome(ended: Ended, downstream: str, condition: str, *, branch: bool) -> EdgeOutcome:
    """Tell what an edge says about its upstream step, which has ended."""
    if condition == PART:
        return EdgeOutcome.TAKEN if ended.succeeded else EdgeOutcome.FAILED
    if condition == "failure":
        return EdgeOutcome.TAKEN if ended.failed else EdgeOutcome.NOT_TAKEN
    if ended.failed:
        return EdgeOutcome.FAILED
    if not ended.succeeded or (branch and not _chose(ended.chosen, downstream)):
        return EdgeOutcome.NOT_TAKEN
    return EdgeOutcome.TAKEN


def _chose(chosen: Any, branch: str) -> bool:
    return chosen == branch or (isinstance(chosen, list) and branch in chosen)


@dataclass(slots=True)
class Resolution:
    """What became of the waiting steps of one batch."""

    steps: dict[UUID, Waiting] = field(default_factory=dict)
    ready: list[Waiting] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def follow(self, ended: Mapping[UUID, Ended], rows: Iterable[Mapping[str, Any]]) -> dict[UUID, Ended]:
        """Take note of what `ended` says to the steps of these rows; give those that are skipped for it."""
        touched: dict[UUID, Waiting] = {}
        for row in rows:
            upstream = ended.get(row["upstream_id"])
            if upstream is not None and row["id"] is not None:
                step = self._known(row)
                touched[step.id] = step
                outcome = edge_outcome(upstream, step.step, row["condition"], branch=row["branch"])
                self._count(step, upstream, outcome)
        skipped = [skip for step in touched.values() if step.unresolved == 0 and (skip := self._judge(step))]
        self.skipped += skipped
        return {
            skip.step.id: Ended(skip.step.id, skip.step.job_id, skip.step.step, "skipped", poisoned=skip.poisoned)
            for skip in skipped
        }

    @property
    def still_waiting(self) -> list[Waiting]:
        """The steps that know more than before, but not enough."""
        return [step for step in self.steps.values() if step.unresolved > 0]

    def _known(self, row: Mapping[str, Any]) -> Waiting:
        known = self.steps.get(row["id"])
        if known is None:
            known = Waiting(**{name: row[name] for name in _OF_A_ROW}, by_parts=row["condition"] == PART)
            self.steps[known.id] = known
        return known

    @staticmethod
    def _count(step: Waiting, upstream: Ended, outcome: EdgeOutcome) -> None:
        step.unresolved -= 1
        step.taken += outcome is EdgeOutcome.TAKEN
        step.failed += outcome is EdgeOutcome.FAILED
        if outcome is EdgeOutcome.FAILED:
            step.culprit = step.culprit or upstream.step

    def _judge(self, step: Waiting) -> Skipped | None:
        if step.by_parts:
            return self._judge_map(step)
        if step.taken + step.failed == 0:
            return Skipped(step, poisoned=False, reason="branch not taken")
        if enough(step.rule, step.taken, step.failed):
            self.ready.append(step)
            return None
        return Skipped(step, poisoned=True, reason=f"step {step.culprit} failed" if step.culprit else None)

    def _judge_map(self, step: Waiting) -> Skipped | None:
        if enough(step.rule, step.taken, step.failed):
            self.ready.append(step)
            return None
        reason = f"{step.failed} of {step.taken + step.failed} parts failed"
        error = {"type": "PartsFailed", "message": reason, "traceback": None, "retryable": False}
        return Skipped(step, poisoned=True, reason=reason, error=error)
