"""Schedules: periodic tasks that are enqueued at the ticks of a cron expression or a fixed interval.

Invariant: a tick is enqueued at most once. Enqueueing and the advance to the next tick commit together under one lock,
and the tick is part of the task's request id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import ConfigError, InputError, StatementError
from interlock.model.options import NewTask, Scope, options_in
from interlock.model.timing import Rhythm
from interlock.postgres.connection import DATA_EXCEPTION_CLASS, INTEGRITY_VIOLATION_CLASS, transaction
from interlock.postgres.query import as_json, load_statements, run
from interlock.store.enqueue import enqueue_task
from interlock.store.leader import duty_transaction, read_clock
from interlock.store.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

SCHEDULES = load_statements("schedules")
MISSED_POLICIES = ("skip", "once", "all")
MAX_MISSED_TICKS = 1_000  # ticks that one round catches up on
# A tick that is fired later than this counts as missed; `missed` of the schedule decides what happens then.
MISSED_AFTER = timedelta(seconds=60)
OPTIONS = frozenset(option.column for option in options_in(Scope.SCHEDULE))

_COLUMNS = (
    "names",
    "types",
    "namespaces",
    "crons",
    "timezones",
    "everies",
    "misseds",
    "inputs",
    "options",
    "next_ats",
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A periodic task: `type` with `input` and `options`, at the ticks of `cron` in `timezone`, or of `every`."""

    name: str
    type: str
    namespace: str = "default"
    cron: str | None = None
    timezone: str = "UTC"
    every: timedelta | None = None
    missed: str = "once"
    input: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.missed not in MISSED_POLICIES:
            policies = ", ".join(MISSED_POLICIES)
            raise ConfigError(f"schedule {self.name!r}: missed must be one of {policies}, not {self.missed!r}")
        unknown = sorted(self.options.keys() - OPTIONS)
        if unknown:
            known = ", ".join(sorted(OPTIONS))
            raise ConfigError(f"schedule {self.name!r}: unknown option {unknown[0]!r}; known are {known}")
        self.rhythm()

    def rhythm(self) -> Rhythm:
        """Return the rhythm; ConfigError names the schedule when the rhythm is invalid."""
        try:
            return Rhythm(cron=self.cron, timezone=self.timezone, every=self.every)
        except ConfigError as error:
            raise ConfigError(f"schedule {self.name!r}: {error}") from None

    def task(self, tick: datetime) -> NewTask:
        """Build the task of one tick."""
        options = dict(self.options)
        if options.get("tags") is not None:
            options["tags"] = tuple(options["tags"])
        request_id = f"schedule:{self.name}:{tick.astimezone(UTC).isoformat()}"
        return NewTask(self.type, self.input, self.namespace, run_at=tick, request_id=request_id, **options)


class ScheduleState(NamedTuple):
    """A stored schedule with its next and last tick; unlike a declared one, it may be invalid."""

    name: str
    type: str
    namespace: str
    cron: str | None
    timezone: str
    every: timedelta | None
    missed: str
    input: dict[str, Any]
    options: dict[str, Any]
    next_at: datetime
    last_at: datetime | None
    paused_at: datetime | None
    error: str | None

    def declared(self) -> Schedule:
        """Return the declared schedule; ConfigError when the stored values are invalid."""
        return Schedule(*self[:9])


class FiredSchedule(NamedTuple):
    """The result of firing a due schedule: the enqueued tasks, or the error."""

    name: str
    tasks: list[UUID]
    error: str | None = None


async def put_schedules(
    connection: Connection, schedules: Iterable[Schedule], *, now: datetime | None = None
) -> list[str]:
    """Store schedules by name; return the new and changed ones. An unchanged rhythm keeps its next tick."""
    wanted = list({schedule.name: schedule for schedule in schedules}.values())
    if not wanted:
        return []
    moment = await read_clock(connection, now=now)
    columns = [list(column) for column in zip(*(_row(schedule, moment) for schedule in wanted), strict=True)]
    parameters = {**dict(zip(_COLUMNS, columns, strict=True)), "now": moment}
    changed = [row["name"] for row in await run(connection, SCHEDULES["put_schedules"], parameters)]
    if changed:
        await run(connection, TASKS["notify_duties"], {"duties": ["schedules"]})
    return changed


def _row(schedule: Schedule, now: datetime) -> tuple[Any, ...]:
    return (
        schedule.name,
        schedule.type,
        schedule.namespace,
        schedule.cron,
        schedule.timezone,
        schedule.every,
        schedule.missed,
        as_json(schedule.input),
        as_json(schedule.options),
        schedule.rhythm().after(now),
    )


async def delete_schedules(connection: Connection, names: Iterable[str]) -> list[str]:
    """Delete schedules; return the names that existed."""
    return [row["name"] for row in await run(connection, SCHEDULES["delete_schedules"], {"names": list(names)})]


async def pause_schedules(connection: Connection, names: Iterable[str], *, now: datetime | None = None) -> list[str]:
    """Stop firing schedules until they are resumed; return the names that exist."""
    parameters = {"names": list(names), "now": now}
    return [row["name"] for row in await run(connection, SCHEDULES["pause_schedules"], parameters)]


async def resume_schedules(connection: Connection, names: Iterable[str], *, now: datetime | None = None) -> list[str]:
    """Fire paused schedules again from their next tick on; return those that were paused."""
    wanted = set(names)
    moment = await read_clock(connection, now=now)
    known = [state for state in await list_schedules(connection) if state.name in wanted]
    parameters = {
        "names": [state.name for state in known],
        "next_ats": [state.declared().rhythm().after(moment) for state in known],
    }
    resumed = [row["name"] for row in await run(connection, SCHEDULES["resume_schedules"], parameters)]
    if resumed:
        await run(connection, TASKS["notify_duties"], {"duties": ["schedules"]})
    return resumed


async def list_schedules(connection: Connection) -> list[ScheduleState]:
    """List all schedules by name, with their last and next ticks."""
    return [ScheduleState(**row) for row in await run(connection, SCHEDULES["list_schedules"], {})]


async def next_schedule_at(connection: Connection) -> datetime | None:
    """Return the time at which the next schedule is due."""
    rows = await run(connection, SCHEDULES["next_schedule_at"], {})
    return rows[0]["next_at"] if rows else None


async def fire_due_schedules(
    connection: Connection, *, actor: str, limit: int = 100, now: datetime | None = None
) -> list[FiredSchedule]:
    """Enqueue the tasks of due schedules and advance to the next ticks, in one transaction under the duty's lock."""
    async with duty_transaction(connection, "schedules", now=now) as moment:
        due = await run(connection, SCHEDULES["read_due_schedules"], {"limit": limit, "now": moment})
        return [await _fire(connection, ScheduleState(**row), actor, moment) for row in due]


async def _fire(connection: Connection, state: ScheduleState, actor: str, now: datetime) -> FiredSchedule:
    try:
        schedule = state.declared()
        rhythm = schedule.rhythm()
    except ConfigError as error:
        parameters = {"name": state.name, "error": str(error), "now": now}
        await run(connection, SCHEDULES["stop_broken_schedule"], parameters)
        return FiredSchedule(state.name, [], str(error))
    ticks = rhythm.due(state.next_at, now, MAX_MISSED_TICKS)
    wanted = wanted_ticks(ticks, schedule.missed, now)
    failure = None
    tasks: list[UUID] = []
    try:
        # A savepoint: a schedule whose task is refused must not undo the others.
        async with transaction(connection):
            tasks = [(await enqueue_task(connection, schedule.task(tick), actor=actor)).id for tick in wanted]
    except InputError as error:
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
    return FiredSchedule(state.name, tasks, failure)


def wanted_ticks(ticks: Sequence[datetime], missed: str, now: datetime) -> Sequence[datetime]:
    """Choose the due ticks to fire: all, the latest, or the latest unless it was missed."""
    if missed == "all":
        return ticks
    if missed == "skip" and now - ticks[-1] > MISSED_AFTER:
        return ()
    return ticks[-1:]
