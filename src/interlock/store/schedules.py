"""Schedules: tasks and jobs that are made at the ticks of a cron expression or a fixed interval.

`workflow/fire_schedules.py` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import ConfigError
from interlock.model.options import JOB_CHECKS, NewTask, Scope, options_in
from interlock.model.timing import Rhythm
from interlock.postgres.query import as_json, load_statements, run
from interlock.store.leader import read_clock
from interlock.store.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

SCHEDULES = load_statements("schedules")
MISSED_POLICIES = ("skip", "once", "all")
TASK_OPTIONS = frozenset(option.column for option in options_in(Scope.SCHEDULE))
JOB_OPTIONS = frozenset(JOB_CHECKS) - {"request_id", "correlation_id", "debounce", "debounce_max"}
DEFAULT_CALLBACK_URL = "default_callback_url"  # stored with the options: the setting of the app that has the schedule

_COLUMNS = (
    "names",
    "types",
    "workflows",
    "versions",
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
    """A task of a `type` or a job of a `workflow`, at the ticks of `cron` in `timezone`, or of `every`."""

    name: str
    type: str | None = None
    namespace: str = "default"
    cron: str | None = None
    timezone: str = "UTC"
    every: timedelta | None = None
    missed: str = "once"
    input: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    workflow: str | None = None
    version: str | None = None  # of the workflow; the newest at each tick unless given

    def __post_init__(self) -> None:
        if (self.type is None) == (self.workflow is None):
            raise ConfigError(f"schedule {self.name!r}: give either the type of a task or a workflow")
        if self.missed not in MISSED_POLICIES:
            policies = ", ".join(MISSED_POLICIES)
            raise ConfigError(f"schedule {self.name!r}: missed must be one of {policies}, not {self.missed!r}")
        allowed = TASK_OPTIONS if self.workflow is None else JOB_OPTIONS
        internal = set() if self.workflow is None else {DEFAULT_CALLBACK_URL}
        unknown = sorted(self.options.keys() - allowed - internal)
        if unknown:
            known = ", ".join(sorted(allowed))
            raise ConfigError(f"schedule {self.name!r}: unknown option {unknown[0]!r}; known are {known}")
        self.rhythm()

    def rhythm(self) -> Rhythm:
        """Return the rhythm; ConfigError names the schedule when the rhythm is invalid."""
        try:
            return Rhythm(cron=self.cron, timezone=self.timezone, every=self.every)
        except ConfigError as error:
            raise ConfigError(f"schedule {self.name!r}: {error}") from None

    def request_id(self, tick: datetime) -> str:
        """Make the request id of a tick: the same tick makes one task or job."""
        return tick_request_id(self.name, tick)

    def task(self, tick: datetime) -> NewTask:
        """Build the task of one tick."""
        options = dict(self.options)
        for name in ("tags", "limit_keys"):
            if options.get(name) is not None:
                options[name] = tuple(options[name])
        type_, request_id = self.type or "", self.request_id(tick)
        return NewTask(type_, self.input, self.namespace, run_at=tick, request_id=request_id, **options)


class ScheduleState(NamedTuple):
    """A stored schedule with its next and last tick; unlike a declared one, it may be invalid."""

    name: str
    type: str | None
    workflow: str | None
    version: str | None
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
    paused_by: str | None
    pause_reason: str | None
    resumed_by: str | None
    resume_reason: str | None
    error: str | None

    @property
    def paused(self) -> str | None:
        """Who paused it and why, as `paused by ada: stock-taking`; None while it is active."""
        return None if self.paused_at is None else _describe_change("paused", self.paused_by, self.pause_reason)

    @property
    def resumed(self) -> str | None:
        """Who resumed it last and why; None while it is paused, and if it never was."""
        return None if self.resumed_by is None else _describe_change("resumed", self.resumed_by, self.resume_reason)

    def declared(self) -> Schedule:
        """Return the declared schedule; ConfigError when the stored values are invalid."""
        return Schedule(**{each.name: getattr(self, each.name) for each in fields(Schedule)})


def _describe_change(change: str, actor: str | None, reason: str | None) -> str:
    return change + (f" by {actor}" if actor else "") + (f": {reason}" if reason else "")


def tick_request_id(name: str, tick: datetime) -> str:
    """Make the request id of a tick of the schedule with this name."""
    return f"schedule:{name}:{tick.astimezone(UTC).isoformat()}"


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
        schedule.workflow,
        schedule.version,
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


async def pause_schedules(
    connection: Connection, names: Iterable[str], *, actor: str, reason: str | None = None, now: datetime | None = None
) -> list[str]:
    """Stop firing schedules until they are resumed; return the names that exist. Another pause replaces the reason."""
    parameters = {"names": list(names), "actor": actor, "reason": reason, "now": now}
    return [row["name"] for row in await run(connection, SCHEDULES["pause_schedules"], parameters)]


async def resume_schedules(
    connection: Connection, names: Iterable[str], *, actor: str, reason: str | None = None, now: datetime | None = None
) -> list[str]:
    """Fire paused schedules again from their next tick on; return those that were paused."""
    wanted = set(names)
    moment = await read_clock(connection, now=now)
    known = await read_schedules(connection, wanted)
    parameters = {
        "names": [state.name for state in known],
        "next_ats": [state.declared().rhythm().after(moment) for state in known],
        "actor": actor,
        "reason": reason,
    }
    resumed = [row["name"] for row in await run(connection, SCHEDULES["resume_schedules"], parameters)]
    if resumed:
        await run(connection, TASKS["notify_duties"], {"duties": ["schedules"]})
    return resumed


async def list_schedules(connection: Connection) -> list[ScheduleState]:
    """List all schedules by name, with their last and next ticks."""
    return [ScheduleState(**row) for row in await run(connection, SCHEDULES["list_schedules"], {})]


async def read_schedules(connection: Connection, names: Iterable[str]) -> list[ScheduleState]:
    """Read schedules by name."""
    return [ScheduleState(**row) for row in await run(connection, SCHEDULES["read_schedules"], {"names": list(names)})]


class ScheduleOutcome(NamedTuple):
    """The task or job that a tick made, and its state."""

    kind: str  # task or job
    id: UUID
    state: str


async def read_schedule_outcomes(
    connection: Connection, schedules: Iterable[ScheduleState]
) -> dict[str, ScheduleOutcome]:
    """Read what the last ticks of schedules made, by the name of the schedule; without those that are deleted."""
    names = {}
    for schedule in schedules:
        if schedule.last_at is not None:
            names[tick_request_id(schedule.name, schedule.last_at)] = schedule.name
    rows = await run(connection, SCHEDULES["read_schedule_outcomes"], {"request_ids": list(names)})
    return {names[row["request_id"]]: ScheduleOutcome(row["kind"], row["id"], row["state"]) for row in rows}


async def next_schedule_at(connection: Connection) -> datetime | None:
    """Return the time at which the next schedule is due."""
    rows = await run(connection, SCHEDULES["next_schedule_at"], {})
    return rows[0]["next_at"] if rows else None
