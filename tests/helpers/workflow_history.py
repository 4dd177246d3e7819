"""Checks the history of an ended job against the documented rules, as `workflow_oracle` states them.

It works for any timing, with `cancel_rest` and cancellation: each decision is judged by what had ended at its moment.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from workflow_oracle import (
    SUCCESS,
    Decided,
    Definition,
    Document,
    End,
    Facts,
    JobStatus,
    Outcomes,
    child_end,
    child_input,
    compensation_plan,
    decide,
    failure_stands,
    own_end,
    part_count,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class ObservedStep:
    """The observed end of a step, or of a part of a map (its name is the index).

    Moments are numbers that grow over all jobs; events of one transaction may share a number. `started` is the moment
    of the first claim, or of the beginning of a wait; None if the step never started, or if that is not known. The end
    is REST_CANCELED also for a step that ended in error after a `cancel_rest` had asked it to stop. `cancel_requested`
    is the moment at which a user canceled this step alone.
    """

    name: str
    end: End
    ended: float
    started: float | None = None
    parts: tuple[ObservedStep, ...] = ()
    cancel_requested: float | None = None


@dataclass(frozen=True)
class ObservedCompensation:
    """An observed compensation of one step."""

    step: str
    started: float
    ended: float
    failed: bool = False


@dataclass(frozen=True)
class ObservedJob:
    """The history of an ended job: its steps, the compensations of its steps, and its child jobs by child step.

    `cancel_requested` is the moment at which this job was canceled, by a user or because its parent was.
    """

    status: JobStatus
    ended: float
    steps: tuple[ObservedStep, ...]
    compensations: tuple[ObservedCompensation, ...] = ()
    children: dict[str, ObservedJob] = field(default_factory=dict)
    cancel_requested: float | None = None


def check_history(
    documents: Mapping[str, Document], name: str, outcomes: Outcomes, observed: ObservedJob, *, job_input: Any = None
) -> list[str]:
    """The rules that an observed job and its child jobs broke, as sentences; empty when it kept all of them."""
    return list(History(documents, name, outcomes, observed, job_input=job_input).violations())


class History:
    """An observed job beside its definition."""

    def __init__(
        self,
        documents: Mapping[str, Document],
        name: str,
        outcomes: Outcomes,
        observed: ObservedJob,
        *,
        job_input: Any,
        is_child: bool = False,
    ) -> None:
        self.definition = Definition(documents[name])
        self.outcomes = outcomes.get(name, {})
        self.job_input = job_input
        self.job = observed
        # A COMPLETED child job is compensated as part of its parent; any other child has compensated itself.
        self.part_of_parent = is_child and observed.status is JobStatus.COMPLETED
        self.steps = {step.name: step for step in observed.steps}
        for step in observed.steps:
            # A step that fails while a cancel_rest asks it to stop is passed over.
            if step.end is End.ERROR and any(
                other.started is not None and other.started < step.ended for other in self._rest_cancelers(step.name)
            ):
                self.steps[step.name] = replace(step, end=End.REST_CANCELED)
        self.children: dict[str, History] = {}
        for step_name, child in observed.children.items():
            declared = self.definition.steps[step_name]
            self.children[step_name] = History(
                documents, declared["workflow"], outcomes, child, job_input=child_input(declared), is_child=True
            )

    def violations(self) -> Iterator[str]:
        """The rules that this job and its child jobs broke."""
        counts = Counter(step.name for step in self.job.steps)
        if counts != Counter(list(self.definition.steps)):
            yield f"observed the ends of {dict(counts)}, expected one end of each of {list(self.definition.steps)}"
            return
        checks = (
            self._decision_violations,
            self._end_violations,
            self._cancellation_violations,
            self._rest_violations,
            self._part_violations,
            self._child_violations,
        )
        for step in self.steps.values():
            for check in checks:
                yield from (f"{step.name}: {violation}" for violation in check(step))
        for name, child in self.children.items():
            yield from (f"{name}/{violation}" for violation in child.violations())
        yield from self._status_violations()
        if not self.part_of_parent:
            yield from self._compensation_violations()

    def _facts(self, moment: float = math.inf) -> Facts:
        ends = {name: step.end for name, step in self.steps.items() if step.ended <= moment}
        return Facts(self.definition, self.outcomes, self.job_input, ends)

    def _rest_cancelers(self, name: str) -> list[ObservedStep]:
        """With `cancel_rest` the dependencies that have not ended are canceled when the step runs."""
        return [
            self.steps[other]
            for other, declared in self.definition.steps.items()
            if declared.get("cancel_rest")
            and name in self.definition.upstream(other)
            and other in self.steps
            and self.steps[other].end not in {End.SKIPPED, End.PASSED_OVER}
        ]

    def _asked_to_stop(self, step: ObservedStep) -> bool:
        requests = (self.job.cancel_requested, step.cancel_requested)
        asked = any(requested is not None and requested <= step.ended for requested in requests)
        return asked or bool(self._rest_cancelers(step.name))

    def _decision_violations(self, step: ObservedStep) -> Iterator[str]:
        """A step runs, is skipped or is passed over only when, and only as, the rules decide it."""
        if step.end in {End.CANCELED, End.REST_CANCELED} and step.started is None:
            return
        skipped = step.end in {End.SKIPPED, End.PASSED_OVER}
        decided = Decided(step.end.value) if skipped else Decided.RUNS
        moment = step.ended if skipped or step.started is None else step.started
        allowed = decide(self._facts(moment), step.name)
        if decided not in allowed:
            now = " or ".join(sorted(each.value for each in allowed)) or "has to wait"
            later = " or ".join(sorted(each.value for each in decide(self._facts(), step.name)))
            yield f"{decided.value} at {moment}, where the rules say: {now}; with all ends known: {later}"
        if skipped and step.started is not None:
            yield f"{step.end.value} although it had started at {step.started}"

    def _end_violations(self, step: ObservedStep) -> Iterator[str]:
        """A step that runs ends as its handler does; only one that is asked to stop may end in another way."""
        if step.end is End.REST_CANCELED:
            if not self._rest_cancelers(step.name):
                yield "canceled as the rest of a join, but no step with cancel_rest that depends on it ran"
        elif step.end not in {End.SKIPPED, End.PASSED_OVER}:
            stopped = self._asked_to_stop(step) and step.end in {End.ERROR, End.CANCELED}
            expected = End.CANCELED if stopped else self._expected_end(step.name)
            if step.end is not expected and not stopped:
                yield f"ended {step.end.value}, expected {expected.value}"

    def _expected_end(self, name: str) -> End:
        if name in self.children:
            return child_end(self.children[name].job.status)
        return own_end(self._facts(), name)

    def _cancellation_violations(self, step: ObservedStep) -> Iterator[str]:
        """Canceling a job cancels its waiting and pending steps; nothing new runs, no handlers either."""
        requested = self.job.cancel_requested
        if requested is None:
            return
        if step.started is not None and step.started > requested:
            yield f"started at {step.started}, after the job was canceled at {requested}"
        if step.end in {End.SKIPPED, End.PASSED_OVER} and step.ended > requested:
            yield f"{step.end.value} at {step.ended}, after the job was canceled at {requested}"

    def _rest_violations(self, step: ObservedStep) -> Iterator[str]:
        """A dependency that has not started when the step with `cancel_rest` runs never starts."""
        for canceler in self._rest_cancelers(step.name):
            if step.started is not None and canceler.started is not None and step.started > canceler.started:
                yield f"started at {step.started}, after {canceler.name} had canceled it at {canceler.started}"

    def _part_violations(self, step: ObservedStep) -> Iterator[str]:
        """A map runs one part for each item; canceling a map cancels its parts, and it ends with the last of them."""
        if not step.parts:
            return
        failing = self.outcomes.get(step.name, SUCCESS).failing_parts
        stopped = self._asked_to_stop(step) or step.end is End.CANCELED
        count = part_count(self._facts(), step.name)
        if len(step.parts) != count:
            yield f"ran {len(step.parts)} parts of {count}"
        for part in step.parts:
            expected = End.ERROR if int(part.name) in failing else End.DONE
            if part.end is not expected and not (stopped and part.end.own_failure):
                yield f"part {part.name} ended {part.end.value}, expected {expected.value}"
            canceled = step.end in {End.CANCELED, End.REST_CANCELED}
            if canceled and part.started is not None and part.started > step.ended:
                yield f"part {part.name} started at {part.started}, after the map was canceled at {step.ended}"
            requested = self.job.cancel_requested
            if part.ended > step.ended and (requested is None or requested > step.ended):
                yield f"part {part.name} ended at {part.ended}, after its map at {step.ended}"

    def _child_violations(self, step: ObservedStep) -> Iterator[str]:
        """A child step has a child job when it runs, waits for its end, and cancels it when it is canceled."""
        child = self.job.children.get(step.name)
        if child is None:
            if self.definition.kind(step.name) == "child" and step.end in {End.DONE, End.ERROR}:
                yield "ran without a child job"
            return
        if step.end in {End.SKIPPED, End.PASSED_OVER}:
            yield f"{step.end.value}, but has a child job"
        if child.ended > step.ended:
            yield f"ended at {step.ended}, before its child job at {child.ended}"
        requested = self.job.cancel_requested
        # A child is canceled by a message. The result of a step that ended before the request may be taken first, and
        # with it a step without a handler may end, such as one whose signal has been sent.
        is_late = requested is not None and any(s.ended > requested for s in child.steps if s.started is not None)
        if is_late and child.cancel_requested is None:
            yield f"its child job was not canceled, but the job was at {requested}"

    def _status_violations(self) -> Iterator[str]:
        """The job is COMPLETED, or FAILED when a failure stands, or CANCELED; its steps and child jobs end before."""
        expected = {JobStatus.FAILED if failure_stands(self._facts()) else JobStatus.COMPLETED}
        requested = self.job.cancel_requested
        if requested is not None:
            unfinished = any(step.ended > requested for step in self.steps.values())
            expected = {JobStatus.CANCELED} if unfinished else expected | {JobStatus.CANCELED}
        if self.job.status not in expected:
            allowed = " or ".join(sorted(status.value for status in expected))
            yield f"the job is {self.job.status.value}, expected {allowed}"
        if self._all_ended() > self.job.ended:
            yield f"the job ended at {self.job.ended}, before its steps and child jobs at {self._all_ended()}"

    def _all_ended(self) -> float:
        steps = [step.ended for step in self.job.steps]
        parts = [part.ended for step in self.job.steps for part in step.parts]
        return max([*steps, *parts, *(child.ended for child in self.job.children.values())])

    def _compensation_violations(self) -> Iterator[str]:
        """Compensations run after everything that still ran has ended, in the planned order, one after the other."""
        observed = sorted(self.compensations(), key=lambda each: each.started)
        names = [each.step for each in observed]
        expected = [] if self.job.status is JobStatus.COMPLETED else self.plan()
        if names != expected:
            yield f"compensated {names}, expected {expected}"
        for earlier, later in itertools.pairwise(observed):
            if later.started < earlier.ended:
                yield f"compensation of {later.step} started at {later.started}, before {earlier.step}'s ended"
        if observed and observed[0].started < self._all_ended():
            yield f"compensation started at {observed[0].started}, before all steps and child jobs had ended"
        for each in observed:
            if each.ended > self.job.ended:
                yield f"the job ended at {self.job.ended}, before the compensation of {each.step} at {each.ended}"
        for each in self.job.compensations:
            if each.failed != self.outcomes.get(each.step, SUCCESS).compensation_fails:
                yield f"compensation of {each.step} {'failed' if each.failed else 'succeeded'} against its handler"

    def compensations(self) -> list[ObservedCompensation]:
        """The compensations of this job's steps and of its COMPLETED child jobs, which have the path as name."""
        return [
            *self.job.compensations,
            *(
                replace(inner, step=f"{name}/{inner.step}")
                for name, child in self.children.items()
                if child.part_of_parent
                for inner in child.compensations()
            ),
        ]

    def plan(self) -> list[str]:
        """The compensations that the rules prescribe; steps that ended at the same moment may take any order."""
        undone_at = {each.step.split("/")[0]: -each.started for each in self.compensations()}
        completed = sorted(self.steps, key=lambda name: (self.steps[name].ended, undone_at.get(name, 0)))
        ends = {name: step.end for name, step in self.steps.items()}
        plans = {name: child.plan() for name, child in self.children.items() if child.part_of_parent}
        return compensation_plan(self.definition, ends, completed, plans)
