"""Periodic tasks: declared by name, and enqueued when their rhythm says so.

Invariant: a tick is enqueued at most once, whoever fires it: the firing and the step to the next tick commit together
under one lock, and the tick is part of the task's request id.
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
MISSED = ("skip", "once", "all")
MOST_MISSED = 1_000
# A tick that is fired later than this was missed: what happens then is the schedule's own choice.
ON_TIME = timedelta(seconds=60)
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
        if self.missed not in MISSED:
            raise ConfigError(f"schedule {self.name!r}: missed must be one of {', '.join(MISSED)}, not {self.missed!r}")
        unknown = sorted(self.options.keys() - OPTIONS)
        if unknown:
            known = ", ".join(sorted(OPTIONS))
            raise ConfigError(f"schedule {self.name!r}: unknown option {unknown[0]!r}; known are {known}")
        self.rhythm()

    def rhythm(self) -> Rhythm:
        """Give the rhythm, or raise an error that names the schedule."""
        try:
            return Rhythm(cron=self.cron, timezone=self.timezone, every=self.every)
        except ConfigError as error:
            raise ConfigError(f"schedule {self.name!r}: {error}") from None

    def task(self, tick: datetime) -> NewTask:
        """Make the task of one tick."""
        options = dict(self.options)
        if options.get("tags") is not None:
            options["tags"] = tuple(options["tags"])
        request_id = f"schedule:{self.name}:{tick.astimezone(UTC).isoformat()}"
        return NewTask(self.type, self.input, self.namespace, run_at=tick, request_id=request_id, **options)


class ScheduleState(NamedTuple):
    """A stored schedule as it stands; unlike a declared one, it may be broken."""

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
        """Give it as it was declared, or raise when somebody stored nonsense."""
        return Schedule(*self[:9])


class Fired(NamedTuple):
    """What became of a due schedule: the tasks that it enqueued, or why it could not."""

    name: str
    tasks: list[UUID]
    error: str | None = None


async def put_schedules(
    connection: Connection, schedules: Iterable[Schedule], *, now: datetime | None = None
) -> list[str]:
    """Store schedules by name; give those that are new or changed. An unchanged rhythm keeps its next tick."""
    wanted = list({schedule.name: schedule for schedule in schedules}.values())
    if not wanted:
        return []
    moment = await read_clock(connection, now=now)
    columns = [list(column) for column in zip(*(_row(schedule, moment) for schedule in wanted), strict=True)]
    parameters = {**dict(zip(_COLUMNS, columns, strict=True)), "now": moment}
    changed = [row["name"] for row in await run(connection, SCHEDULES["put_schedules"], parameters)]
    if changed:
        await _tell(connection)
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
    """Forget schedules; give those that there were."""
    return [row["name"] for row in await run(connection, SCHEDULES["delete_schedules"], {"names": list(names)})]


async def pause_schedules(connection: Connection, names: Iterable[str], *, now: datetime | None = None) -> list[str]:
    """Fire these no more until they are resumed; give those that there are."""
    parameters = {"names": list(names), "now": now}
    return [row["name"] for row in await run(connection, SCHEDULES["pause_schedules"], parameters)]


async def resume_schedules(connection: Connection, names: Iterable[str], *, now: datetime | None = None) -> list[str]:
    """Fire paused schedules again, from their next tick on; give those that were paused."""
    wanted = set(names)
    moment = await read_clock(connection, now=now)
    known = [state for state in await list_schedules(connection) if state.name in wanted]
    parameters = {
        "names": [state.name for state in known],
        "next_ats": [state.declared().rhythm().after(moment) for state in known],
    }
    resumed = [row["name"] for row in await run(connection, SCHEDULES["resume_schedules"], parameters)]
    if resumed:
        await _tell(connection)
    return resumed


async def list_schedules(connection: Connection) -> list[ScheduleState]:
    """List all schedules, with when each fired last and when it fires next."""
    return [ScheduleState(**row) for row in await run(connection, SCHEDULES["list_schedules"], {})]


async def next_schedule_at(connection: Connection) -> datetime | None:
    """Tell when the next schedule is due."""
    rows = await run(connection, SCHEDULES["next_schedule_at"], {})
    return rows[0]["next_at"] if rows else None


async def fire_due_schedules(
    connection: Connection, *, actor: str, limit: int = 100, now: datetime | None = None
) -> list[Fired]:
    """Enqueue what is due and step to the next ticks, in one transaction under the lock of this duty."""
    async with duty_transaction(connection, "schedules", now=now) as moment:
        due = await run(connection, SCHEDULES["read_due_schedules"], {"limit": limit, "now": moment})
        return [await _fire(connection, ScheduleState(**row), actor, moment) for row in due]


async def _fire(connection: Connection, state: ScheduleState, actor: str, now: datetime) -> Fired:
    try:
        schedule = state.declared()
        rhythm = schedule.rhythm()
    except ConfigError as error:
        parameters = {"name": state.name, "error": str(error), "now": now}
        await run(connection, SCHEDULES["stop_broken_schedule"], parameters)
        return Fired(state.name, [], str(error))
    ticks = rhythm.due(state.next_at, now, MOST_MISSED)
    wanted = wanted_ticks(ticks, schedule.missed, now)
    failure = None
    tasks: list[UUID] = []
    try:
        # A savepoint: one schedule that cannot be enqueued must not keep the others from it.
        async with transaction(connection):
            tasks = [(await enqueue_task(connection, schedule.task(tick), actor=actor)).id for tick in wanted]
    except InputError as error:
        failure = str(error)
    except StatementError as error:
        # What the schedule itself asks for is refused; anything else is not its fault, and undoes the whole batch.
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
    return Fired(state.name, tasks, failure)


def wanted_ticks(ticks: Sequence[datetime], missed: str, now: datetime) -> Sequence[datetime]:
    """Choose which of the due ticks are fired: all, the latest, or the latest unless it is too late."""
    if missed == "all":
        return ticks
    if missed == "skip" and now - ticks[-1] > ON_TIME:
        return ()
    return ticks[-1:]


async def _tell(connection: Connection) -> None:
    await run(connection, TASKS["notify_duties"], {"duties": ["schedules"]})
