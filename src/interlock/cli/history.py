"""`interlock history`: every recorded move of a task, a job or a worker, checked against its lifecycle."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated
from uuid import UUID

import typer

from interlock.cli.app_context import InJson, run_with_app
from interlock.cli.enqueue import parse_past_time
from interlock.cli.explain import AtTime, split_kind
from interlock.cli.format import (
    escape_control_characters,
    format_duration,
    format_json,
    format_table,
    format_time,
    print_note,
)
from interlock.client.app import Interlock
from interlock.client.job_handle import as_job_id
from interlock.errors import (
    ConfigError,
    InputError,
    StatementError,
    UnknownJobError,
    UnknownTaskError,
    UnknownWorkerError,
)
from interlock.postgres.retry import RetryState, retry
from interlock.store.history import MACHINES, HistoryRecord, read_history
from interlock.store.leader import read_clock

FOLLOW_INTERVAL_S = 0.5
COLOR = re.compile(r"\x1b\[[0-9;]*m")  # that a table gives to states
HEADER = ("time (UTC)", "from", "event", "to", "in state", "attempt", "actor", "role", "reason")
UNKNOWN_ERRORS = {"task": UnknownTaskError, "job": UnknownJobError, "worker": UnknownWorkerError}


def history(
    context: typer.Context,
    words: Annotated[
        list[str], typer.Argument(help=f"The kind ({', '.join(MACHINES)}) and the id.", metavar="[KIND] ID")
    ],
    at: AtTime = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new moves until the end, or until Ctrl-C is pressed.")
    ] = False,
    in_json: InJson = False,
) -> None:
    """Show the recorded moves of a task, a job or a worker, oldest first, checked against its lifecycle.

    `in state` is the time until the next move. A record that contradicts the lifecycle, the record before it or the row
    is shown in red with the reason, and the exit code is 1.

    Examples: `interlock history ID`, `interlock history worker NAME --at 2h`, `interlock history job ID --follow`.
    """
    kind, id_ = split_kind(words)
    if kind == "step":
        kind = "task"
    if kind is not None and kind not in MACHINES:
        raise ConfigError(f"the kind must be one of {', '.join(MACHINES)}, got {kind!r}")
    if follow and at is not None:
        raise ConfigError(
            "--follow shows what happens from now on, and --at what happened until then: give one of them"
        )
    used = Interlock(config=context.obj)
    try:
        has_problems = run_with_app(used, lambda app: _show(app, kind, id_, at, follow=follow, in_json=in_json))
    except KeyboardInterrupt:  # the normal end of --follow
        if not follow:
            raise
        print_note("")
        return
    if has_problems:
        raise typer.Exit(1)


async def _show(app: Interlock, kind: str | None, id_: str, at: str | None, *, follow: bool, in_json: bool) -> bool:
    async with app.connection() as connection:
        now = await read_clock(connection)
    moment = parse_past_time("--at", at, now)
    if moment is not None and moment > now:
        raise InputError(f"--at must not be in the future, got {at}")
    found, records = await _read(app, kind, id_, moment)
    if follow and in_json:
        for record in records:
            typer.echo(format_json(asdict(record), pretty=False))
    elif in_json:
        typer.echo(format_json([asdict(record) for record in records]))
    else:
        typer.echo(_format_history(found, records, moment or now, is_past=moment is not None))
    if not follow:
        return any(record.problem for record in records)
    return await _follow(app, found, id_, records, in_json=in_json)


async def _read(app: Interlock, kind: str | None, id_: str, at: datetime | None) -> tuple[str, list[HistoryRecord]]:
    """Read the records of what has this id; without a kind, those of a task, else of a job, else of a worker."""
    uuid = _as_uuid(id_)
    kinds = (kind,) if kind is not None else ("worker",) if uuid is None else ("task", "job")
    async with app.connection() as connection:
        for wanted in kinds:
            if wanted != "worker" and uuid is None:
                as_job_id(id_)  # raises InputError, which says what an id looks like
            records = await read_history(connection, wanted, id_ if wanted == "worker" else uuid or id_, at=at)
            if records:
                return wanted, records
            if at is not None and await read_history(connection, wanted, id_ if wanted == "worker" else uuid or id_):
                raise UNKNOWN_ERRORS[wanted](
                    f"there was no {wanted} {id_} at {format_time(at)} UTC: its records are later"
                )
    asked = " or ".join(kinds)
    message = f"there is no record of a {asked} {id_}: never stored, or deleted by retention"
    raise UNKNOWN_ERRORS[kinds[0]](message)


def _as_uuid(id_: str) -> UUID | None:
    try:
        return UUID(id_)
    except ValueError:
        return None


async def _follow(app: Interlock, kind: str, id_: str, records: Sequence[HistoryRecord], *, in_json: bool) -> bool:
    """Print new records as they come, until the last one is an end; return whether one has a problem.

    A lost connection is made again, until Ctrl-C is pressed.
    """
    wanted: UUID | str = id_ if kind == "worker" else UUID(id_)
    found: list[HistoryRecord] = []
    state = RetryState()

    async def read() -> None:
        nonlocal found
        async with app.connection() as connection:
            found = await read_history(connection, kind, wanted)
        state.reset()

    def on_failure(error: Exception, _: float) -> None:
        if state.failures == 1:
            print_note(f"{error}; trying again")

    while records[-1].to_state not in MACHINES[kind].final:
        await asyncio.sleep(FOLLOW_INTERVAL_S)
        await retry(read, on_failure=on_failure, state=state, give_up_on=(StatementError,))
        for record, before in zip(found[len(records) :], found[len(records) - 1 :], strict=False):
            if in_json:
                typer.echo(format_json(asdict(record), pretty=False))
            else:
                typer.echo(_format_new(record, before))
        records = found
    return any(record.problem for record in records)


def _format_history(kind: str, records: Sequence[HistoryRecord], now: datetime, *, is_past: bool) -> str:
    lines = format_table(HEADER, (_row(record, now) for record in records)).split("\n")
    for place, record in enumerate(records, start=1):
        if record.problem is not None:
            lines[place] = _in_red(f"{lines[place]}\n  ! {record.problem}")
    last = records[-1]
    verb = f"was {last.to_state} at {format_time(now)} UTC" if is_past else f"is {last.to_state}"
    lines.append("")
    lines.append(f"the {kind} {verb}, for {_format_lasted(now - last.recorded_at)}")
    return "\n".join([*lines, *_summary(records)])


def _summary(records: Iterable[HistoryRecord]) -> list[str]:
    problems = sum(record.problem is not None for record in records)
    if not problems:
        return ["every record follows from the lifecycle and the one before it"]
    return [
        _in_red(f"{problems} records contradict the lifecycle: `interlock doctor --full` checks the whole database")
    ]


def _in_red(text: str) -> str:
    plain = COLOR.sub("", text)
    escaped = "\n".join(escape_control_characters(line) for line in plain.split("\n"))
    return typer.style(escaped, fg=typer.colors.RED)


def _row(record: HistoryRecord, now: datetime) -> Sequence[object]:
    lasted = _format_lasted(record.lasted if record.lasted is not None else now - record.recorded_at)
    return (
        *(format_time(record.recorded_at), record.from_state, record.event, record.to_state, lasted),
        *(record.attempt, record.actor, record.database_role, record.reason),
    )


def _format_new(record: HistoryRecord, before: HistoryRecord) -> str:
    after = "" if before.lasted is None else f" after {_format_lasted(before.lasted)}"
    attempt = "" if record.attempt is None else f", attempt {record.attempt}"
    reason = f": {record.reason}" if record.reason else ""
    text = (
        f"{format_time(record.recorded_at)}  {record.from_state} -{record.event}-> {record.to_state}{after}{attempt}, "
        f"by {record.actor}{reason}"
    )
    return _in_red(f"{text}\n  ! {record.problem}") if record.problem else escape_control_characters(text)


def _format_lasted(time: timedelta) -> str:
    """Format the time in a state: exactly when it is short."""
    seconds = max(time.total_seconds(), 0.0)
    return f"{seconds:.3f} s" if seconds < 10 else format_duration(time)  # noqa: PLR2004 - seconds
