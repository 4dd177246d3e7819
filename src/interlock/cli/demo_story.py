"""What happened to a job, from the records of the database: every attempt at every step, and what was recovered.

Invariant: all times are those of the database, whose clock alone counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.client.jobs import JobStatus, StepStatus, known_fields
from interlock.errors import UnknownJobError
from interlock.store.jobs import read_job_history, read_jobs, read_steps
from interlock.store.tasks import read_task_history

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.store.database import Connection
    from interlock.store.tasks import Record

LOST = "lost"
# what became of an attempt, by the event that ended it
ENDINGS = {
    "succeed": "done",
    "fail": "error",
    "exhaust": LOST,
    "expire": LOST,
    "retry": "failed",
    "return": "returned",
    "cancel": "canceled",
}


class Snapshot(NamedTuple):
    """A job as it is at one moment."""

    job: JobStatus
    steps: list[StepStatus]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a step; a step that was never claimed has one without a worker and without times."""

    step: StepStatus
    state: str
    worker: str = ""
    number: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    ended_by: str = ""


@dataclass(frozen=True, slots=True)
class Recovery:
    """An attempt whose worker fell silent, and the attempt that took its place, if there is one."""

    lost: Attempt
    then: Attempt | None


@dataclass(frozen=True, slots=True)
class Story:
    """A job with all attempts, in the order in which they began."""

    job: JobStatus
    moves: tuple[str, ...]
    attempts: tuple[Attempt, ...]

    @property
    def recoveries(self) -> list[Recovery]:
        """What fell back into the queue because a lease ran out, and who took it up."""
        return [
            Recovery(lost, next((a for a in self._of(lost.step.id) if a.number > lost.number), None))
            for lost in self.attempts
            if lost.state == LOST
        ]

    def _of(self, id_: UUID) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.step.id == id_]


def short(id_: str | None) -> str:
    """Give the name of a worker, which is the part of its id that people know it by."""
    return (id_ or "").rsplit("-", 2)[0]


async def look(connection: Connection, job_id: UUID) -> Snapshot:
    """Read a job and its steps."""
    rows = await read_jobs(connection, [job_id])
    if not rows:
        raise UnknownJobError(f"there is no job {job_id} any more")
    steps = [StepStatus(**known_fields(StepStatus, row)) for row in await read_steps(connection, job_id)]
    return Snapshot(JobStatus(**known_fields(JobStatus, rows[0])), steps)


async def tell_story(connection: Connection, job_id: UUID) -> Story:
    """Read everything that happened to a job."""
    job, steps = await look(connection, job_id)
    moves: list[dict[str, Any]] = await read_job_history(connection, job_id)
    attempts = [attempt for step in steps for attempt in _attempts(step, await read_task_history(connection, step.id))]
    attempts.sort(key=lambda attempt: attempt.started_at or attempt.step.finished_at or attempt.step.created_at)
    return Story(job, tuple(move["to_state"] for move in moves), tuple(attempts))


def _attempts(step: StepStatus, records: Sequence[Record]) -> Iterator[Attempt]:
    claims = [place for place, record in enumerate(records) if record.event == "claim"]
    if not claims:
        yield Attempt(step, step.state)
    for place in claims:
        claim, end = records[place], next(iter(records[place + 1 : place + 2]), None)
        yield Attempt(
            step,
            "running" if end is None else ENDINGS.get(end.event, end.to_state),
            claim.actor,
            claim.attempt,
            claim.recorded_at,
            None if end is None else end.recorded_at,
            "" if end is None else end.actor,
        )
