"""The history of a job from the database's records: every attempt at every step, and the recoveries.

Invariant: all times are the database's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.client.job_handle import JobStatus, StepStatus, known_fields
from interlock.errors import UnknownJobError
from interlock.store.jobs import read_job_history, read_jobs, read_steps
from interlock.store.tasks import read_task_history

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import TaskRecord

LOST = "lost"

# the state of an attempt, by the event that ended it
ATTEMPT_STATES = {
    "succeed": "done",
    "fail": "error",
    "exhaust": LOST,
    "expire": LOST,
    "retry": "failed",
    "return": "returned",
    "cancel": "canceled",
}


class JobSnapshot(NamedTuple):
    """A job and its steps at one moment."""

    job: JobStatus
    steps: list[StepStatus]


@dataclass(frozen=True, slots=True)
class StepAttempt:
    """One attempt at a step; a step that was never claimed has one without worker and times."""

    step: StepStatus
    state: str
    worker: str = ""
    number: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    ended_by: str = ""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A lost attempt, and the attempt that replaced it, if there is one."""

    lost: StepAttempt
    next: StepAttempt | None


@dataclass(frozen=True, slots=True)
class JobTimeline:
    """A job with the states that it passed and all attempts, in the order of their start."""

    job: JobStatus
    states: tuple[str, ...]
    attempts: tuple[StepAttempt, ...]

    @property
    def recoveries(self) -> list[Recovery]:
        """The attempts whose lease expired, with their replacements."""
        return [
            Recovery(lost, next((a for a in self._attempts_of(lost.step.id) if a.number > lost.number), None))
            for lost in self.attempts
            if lost.state == LOST
        ]

    def _attempts_of(self, id_: UUID) -> list[StepAttempt]:
        return [attempt for attempt in self.attempts if attempt.step.id == id_]


async def read_snapshot(connection: Connection, job_id: UUID) -> JobSnapshot:
    """Read a job and its steps."""
    rows = await read_jobs(connection, [job_id])
    if not rows:
        raise UnknownJobError(f"job {job_id} does not exist any more")
    steps = [StepStatus(**known_fields(StepStatus, row)) for row in await read_steps(connection, job_id)]
    return JobSnapshot(JobStatus(**known_fields(JobStatus, rows[0])), steps)


async def read_timeline(connection: Connection, job_id: UUID) -> JobTimeline:
    """Read the history of a job and of all its steps."""
    job, steps = await read_snapshot(connection, job_id)
    transitions: list[dict[str, Any]] = await read_job_history(connection, job_id)
    attempts = [
        attempt for step in steps for attempt in _make_attempts(step, await read_task_history(connection, step.id))
    ]
    attempts.sort(key=lambda attempt: attempt.started_at or attempt.step.finished_at or attempt.step.created_at)
    return JobTimeline(job, tuple(transition["to_state"] for transition in transitions), tuple(attempts))


def _make_attempts(step: StepStatus, records: Sequence[TaskRecord]) -> Iterator[StepAttempt]:
    claims = [index for index, record in enumerate(records) if record.event == "claim"]
    if not claims:
        yield StepAttempt(step, step.state)
    for index in claims:
        claim, end = records[index], next(iter(records[index + 1 : index + 2]), None)
        yield StepAttempt(
            step,
            "running" if end is None else ATTEMPT_STATES.get(end.event, end.to_state),
            claim.actor,
            claim.attempt,
            claim.recorded_at,
            None if end is None else end.recorded_at,
            "" if end is None else end.actor,
        )
