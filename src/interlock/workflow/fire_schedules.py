"""Fires schedules: enqueues the tasks and submits the jobs of ticks that are due.

Invariant: a tick makes at most one task or job. Making it and the advance to the next tick commit together under one
lock, and the tick is part of its request id. A schedule that fails records its error and holds up no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from interlock.errors import ConfigError, InputError, JobConflictError, StatementError
from interlock.postgres.connection import DATA_EXCEPTION_CLASS, INTEGRITY_VIOLATION_CLASS, transaction
from interlock.postgres.query import run
from interlock.store.enqueue import enqueue_tasks
from interlock.store.leader import duty_transaction, read_clock
from interlock.store.schedules import SCHEDULES, Schedule, ScheduleState, read_schedules
from interlock.store.workflows import read_workflow
from interlock.workflow.new_job import NewJob, describe_unknown_workflow
from interlock.workflow.submit import submit_jobs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.workflows import StoredWorkflow

MAX_MISSED_TICKS = 1_000  # ticks of a schedule that one round catches up on
MAX_TICKS = 10_000  # of all schedules in one round, and at most those of one schedule more
MAX_DUE_SCHEDULES = 1_000  # in one round
# A tick that is fired later than this counts as missed; `missed` of the schedule decides what happens then.
MISSED_AFTER = timedelta(seconds=60)


class FiredSchedule(NamedTuple):
    """The result of firing a due schedule: the tasks or jobs of its ticks, or the error."""

    name: str
    ids: list[UUID]
    error: str | None = None


@dataclass(slots=True)
class _Due:
    """A due schedule, the ticks of it that are fired, and what they have made."""

    schedule: Schedule
    wanted: Sequence[datetime]
    next_at: datetime
    made: list[UUID] = field(default_factory=list)
    error: str | None = None

    @property
    def last_at(self) -> datetime | None:
        return self.wanted[-1] if self.wanted and self.error is None else None


async def fire_due_schedules(
    connection: Connection, *, actor: str, limit: int = MAX_DUE_SCHEDULES, now: datetime | None = None
) -> list[FiredSchedule]:
    """Make the tasks and jobs of due schedules and advance to the next ticks, in one transaction under a lock."""
    async with duty_transaction(connection, "schedules", now=now) as moment:
        states = await run(connection, SCHEDULES["read_due_schedules"], {"limit": limit, "now": moment})
        fired, due = [], []
        ticks = 0
        for state in (ScheduleState(**row) for row in states):
            try:
                found = _find_ticks(state, moment)
            except ConfigError as error:
                parameters = {"name": state.name, "actor": actor, "error": str(error), "now": moment}
                await run(connection, SCHEDULES["stop_broken_schedule"], parameters)
                fired.append(FiredSchedule(state.name, [], str(error)))
                continue
            due.append(found)
            ticks += len(found.wanted)
            if ticks >= MAX_TICKS:
                break  # the others are still due in the next round
        await _fire(connection, due, actor, moment)
        return [*fired, *(FiredSchedule(each.schedule.name, each.made, each.error) for each in due)]


async def run_schedule(connection: Connection, name: str, *, actor: str, now: datetime | None = None) -> UUID | None:
    """Fire a schedule once now, also if it is paused; its ticks stay as they are. None if there is no such schedule."""
    found = await read_schedules(connection, [name])
    if not found:
        return None
    moment = await read_clock(connection, now=now)
    ((made,),) = await _make(connection, [_Due(found[0].declared(), [moment], moment)], actor, moment)
    return made


def _find_ticks(state: ScheduleState, now: datetime) -> _Due:
    schedule = state.declared()
    rhythm = schedule.rhythm()
    ticks = rhythm.due(state.next_at, now, MAX_MISSED_TICKS)
    return _Due(schedule, wanted_ticks(ticks, schedule.missed, now), rhythm.after(ticks[-1]))


async def _fire(connection: Connection, due: Sequence[_Due], actor: str, now: datetime) -> None:
    """Fire schedules together; one by one if one of them is refused."""
    if not due:
        return
    if not await _try_to_make(connection, due, actor, now):
        for each in due:
            each.error = None
            await _try_to_make(connection, [each], actor, now)
    step = {
        "names": [each.schedule.name for each in due],
        "next_ats": [each.next_at for each in due],
        "last_ats": [each.last_at for each in due],
        "errors": [each.error for each in due],
    }
    await run(connection, SCHEDULES["advance_schedules"], step)


async def _try_to_make(connection: Connection, due: Sequence[_Due], actor: str, now: datetime) -> bool:
    """Make the tasks and jobs of schedules, all or none; note the error of a refusal."""
    try:
        # A savepoint: a schedule whose task or job is refused must not undo the others.
        async with transaction(connection):
            made = await _make(connection, due, actor, now)
    except (InputError, JobConflictError) as error:
        refusal = str(error)
    except StatementError as error:
        # Only data the schedule itself supplied counts as its error; any other failure undoes the whole batch.
        if error.sqlstate[:2] not in {DATA_EXCEPTION_CLASS, INTEGRITY_VIOLATION_CLASS}:
            raise
        refusal = str(error)
    else:
        for each, ids in zip(due, made, strict=True):
            each.made = ids
        return True
    for each in due:
        each.error = refusal
    return False


async def _make(connection: Connection, due: Sequence[_Due], actor: str, now: datetime) -> list[list[UUID]]:
    """Enqueue the tasks, and submit the jobs, of these ticks; InputError says what does not fit."""
    tasks = [each.schedule.task(tick) for each in due if each.schedule.workflow is None for tick in each.wanted]
    jobs: list[NewJob] = []
    versions: dict[tuple[str, str | None], StoredWorkflow] = {}
    for each in due:
        if each.schedule.workflow is not None and each.wanted:
            version = await _checked_version(connection, each.schedule, versions)
            jobs += [_job(each.schedule, tick, version) for tick in each.wanted]
    enqueued = iter(await enqueue_tasks(connection, tasks, actor=actor) if tasks else [])
    submitted = iter(await submit_jobs(connection, jobs, actor=actor, now=now))
    return [
        [next(enqueued if each.schedule.workflow is None else submitted).id for _ in each.wanted]  # type: ignore[attr-defined]
        for each in due
    ]


def _job(schedule: Schedule, tick: datetime, version: str) -> NewJob:
    return NewJob(
        schedule.workflow or "",
        schedule.input,
        version=version,
        names_version=schedule.version is not None,
        request_id=schedule.request_id(tick),
        **schedule.options,
    )


async def _checked_version(
    connection: Connection, schedule: Schedule, versions: dict[tuple[str, str | None], StoredWorkflow]
) -> str:
    """Check the input of a job against the stored workflow, and return the version that was checked."""
    # not at the top: the schema library is slow to import, and most programs do not need it
    from interlock.model.json_schema import check_input  # noqa: PLC0415 - heavy, and seldom needed

    name = schedule.workflow or ""
    found = versions.get((name, schedule.version)) or await read_workflow(connection, name, schedule.version)
    if found is None:
        raise InputError(await describe_unknown_workflow(connection, name, schedule.version))
    versions[name, schedule.version] = found
    check_input(found.definition, schedule.input)
    return found.version


def wanted_ticks(ticks: Sequence[datetime], missed: str, now: datetime) -> Sequence[datetime]:
    """Choose the due ticks to fire: all, the latest, or the latest unless it was missed."""
    if missed == "all":
        return ticks
    if missed == "skip" and now - ticks[-1] > MISSED_AFTER:
        return ()
    return ticks[-1:]
