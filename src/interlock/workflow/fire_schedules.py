"""Fires schedules: enqueues the tasks and submits the jobs of ticks that are due.

Invariant: a tick makes at most one task or job. Making it and the advance to the next tick commit together under one
lock, and the tick is part of its request id. A schedule that fails records its error and holds up no other.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from interlock.errors import ConfigError, InputError, JobConflictError, StatementError
from interlock.postgres.connection import DATA_EXCEPTION_CLASS, INTEGRITY_VIOLATION_CLASS, transaction
from interlock.postgres.query import run
from interlock.store.enqueue import enqueue_task
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

MAX_MISSED_TICKS = 1_000  # ticks that one round catches up on
# A tick that is fired later than this counts as missed; `missed` of the schedule decides what happens then.
MISSED_AFTER = timedelta(seconds=60)


class FiredSchedule(NamedTuple):
    """The result of firing a due schedule: the tasks or jobs of its ticks, or the error."""

    name: str
    ids: list[UUID]
    error: str | None = None


async def fire_due_schedules(
    connection: Connection, *, actor: str, limit: int = 100, now: datetime | None = None
) -> list[FiredSchedule]:
    """Make the tasks and jobs of due schedules and advance to the next ticks, in one transaction under a lock."""
    async with duty_transaction(connection, "schedules", now=now) as moment:
        due = await run(connection, SCHEDULES["read_due_schedules"], {"limit": limit, "now": moment})
        return [await _fire(connection, ScheduleState(**row), actor, moment) for row in due]


async def run_schedule(connection: Connection, name: str, *, actor: str, now: datetime | None = None) -> UUID | None:
    """Fire a schedule once now, also if it is paused; its ticks stay as they are. None if there is no such schedule."""
    found = await read_schedules(connection, [name])
    if not found:
        return None
    moment = await read_clock(connection, now=now)
    (made,) = await _make(connection, found[0].declared(), [moment], actor, moment)
    return made


async def _fire(connection: Connection, state: ScheduleState, actor: str, now: datetime) -> FiredSchedule:
    try:
        schedule = state.declared()
        rhythm = schedule.rhythm()
    except ConfigError as error:
        parameters = {"name": state.name, "actor": actor, "error": str(error), "now": now}
        await run(connection, SCHEDULES["stop_broken_schedule"], parameters)
        return FiredSchedule(state.name, [], str(error))
    ticks = rhythm.due(state.next_at, now, MAX_MISSED_TICKS)
    wanted = wanted_ticks(ticks, schedule.missed, now)
    failure = None
    made: list[UUID] = []
    try:
        # A savepoint: a schedule whose task or job is refused must not undo the others.
        async with transaction(connection):
            made = await _make(connection, schedule, wanted, actor, now)
    except (InputError, JobConflictError) as error:
        failure = str(error)
    except StatementError as error:
        # Only data the schedule itself supplied counts as its error; any other failure undoes the whole batch.
        if error.sqlstate[:2] not in {DATA_EXCEPTION_CLASS, INTEGRITY_VIOLATION_CLASS}:
            raise
        failure = str(error)
    step = {
        "name": state.name,
        "next_at": rhythm.after(ticks[-1]),
        "last_at": wanted[-1] if wanted and failure is None else None,
        "error": failure,
    }
    await run(connection, SCHEDULES["advance_schedule"], step)
    return FiredSchedule(state.name, made, failure)


async def _make(
    connection: Connection, schedule: Schedule, ticks: Sequence[datetime], actor: str, now: datetime
) -> list[UUID]:
    """Enqueue the tasks, or submit the jobs, of these ticks; InputError says what does not fit."""
    if schedule.workflow is None:
        return [(await enqueue_task(connection, schedule.task(tick), actor=actor)).id for tick in ticks]
    if not ticks:
        return []
    version = await _checked_version(connection, schedule)
    jobs = [
        NewJob(
            schedule.workflow,
            schedule.input,
            version=version,
            names_version=schedule.version is not None,
            request_id=schedule.request_id(tick),
            **schedule.options,
        )
        for tick in ticks
    ]
    return [job.id for job in await submit_jobs(connection, jobs, actor=actor, now=now)]


async def _checked_version(connection: Connection, schedule: Schedule) -> str:
    """Check the input of a job against the stored workflow, and return the version that was checked."""
    # not at the top: the schema library is slow to import, and most programs do not need it
    from interlock.model.json_schema import check_input  # noqa: PLC0415 - heavy, and seldom needed

    name = schedule.workflow or ""
    found = await read_workflow(connection, name, schedule.version)
    if found is None:
        raise InputError(await describe_unknown_workflow(connection, name, schedule.version))
    check_input(found.definition, schedule.input)
    return found.version


def wanted_ticks(ticks: Sequence[datetime], missed: str, now: datetime) -> Sequence[datetime]:
    """Choose the due ticks to fire: all, the latest, or the latest unless it was missed."""
    if missed == "all":
        return ticks
    if missed == "skip" and now - ticks[-1] > MISSED_AFTER:
        return ()
    return ticks[-1:]
