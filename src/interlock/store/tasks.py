"""The moves of task rows that attempts make: each function runs the statement of the same name in `sql/tasks.sql`.

Invariant: whoever settles, renews or saves names the attempt that it holds; an attempt that is no longer the one
that runs is answered with LostAttempt, and has written nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import orjson

from interlock.errors import StatementError
from interlock.postgres.connection import Unreadable, translated
from interlock.postgres.query import as_json, load_statements, run, run_prepared, written

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from interlock.lifecycle import TaskRowEvent
    from interlock.postgres.connection import Connection


# SECTION store/outcomes
# Outcomes as the parameters of the statement that writes them.
#
# Invariant: what is sent can be read by the server. PostgreSQL holds no larger JSON than MAX_JSON_BYTES, and closes the
# connection on a message of a gigabyte.

MIB = 1024 * 1024
MAX_JSON_BYTES = 256 * MIB - 1  # bytes that PostgreSQL holds of one JSON document
DEFAULT_MAX_RESULT_BYTES = 64 * MIB
LARGEST_TOGETHER = 64 * MIB  # characters of several outcomes; as many more are as well written one by one
LARGEST_ALONE = 640 * MIB  # twice the largest document, for what is escaped in it, and something around it


def encode_outcomes(outcomes: Sequence[Outcome], largest: int) -> dict[str, str]:
    """Write outcomes as parameters; StatementError tells of a result of more than `largest` bytes.

    A success is three values, which go in arrays; whatever has more to say goes in one JSON document. The driver is
    three times slower at arrays of nine columns, and so is the server at documents.
    """
    ids: list[UUID] = []
    attempts: list[int] = []
    outputs: list[str | None] = []
    others: list[dict[str, Any]] = []
    for outcome in outcomes:
        id_, attempt, event, output, _, _, cost, _, progress = outcome
        if event == "succeed" and cost is None and progress is None:
            ids.append(id_)
            attempts.append(attempt)
            outputs.append(None if output is None else _json(output))
        else:
            others.append(_said(outcome))
    written = {"ids": _array(ids), "attempts": _array(attempts), "outputs": _array(outputs), "others": _json(others)}
    size = len(written["outputs"]) + len(written["others"])
    # four bytes for a character at most: what is less than a quarter need not be looked at
    if size > min(largest // 4, LARGEST_TOGETHER):
        _check(outcomes, size, largest)
    return written


def _check(outcomes: Sequence[Outcome], size: int, largest: int) -> None:
    for outcome in outcomes:
        result = len(orjson.dumps(outcome.output, default=str))
        if result > largest:
            raise StatementError(
                f"the result has {result:,} bytes of JSON, and at most {largest:,} are stored (`largest_result` of the "
                "settings); keep it elsewhere, and return where it is"
            )
    most = LARGEST_ALONE if len(outcomes) == 1 else LARGEST_TOGETHER
    if size > most:
        raise StatementError(f"{size:,} characters are to be stored at once, and at most {most:,} can be")


def _json(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def _array(values: list[Any]) -> str:
    """Write an array as PostgreSQL reads it: JSON's, in which only the brackets differ, as no value is one itself."""
    return "{" + orjson.dumps(values).decode()[1:-1] + "}"


def _said(outcome: Outcome) -> dict[str, Any]:
    return {name: value for name, value in zip(outcome._fields, outcome, strict=True) if value is not None}


TASKS = load_statements("tasks")
DEFAULT_LEASE = timedelta(seconds=30)


class ClaimedTask(NamedTuple):
    """What a worker gets with a claim: the task, and the attempt that fences everything it does to it.

    What few tasks have comes in one document, `extras`, and is null for the others.
    """

    id: UUID
    type: str
    namespace: str
    attempt: int
    tries: int
    max_tries: int
    stored_input: dict[str, Any] | None = None
    extras: dict[str, Any] | None = None

    @property
    def input(self) -> dict[str, Any]:
        """The arguments by name; unreadable ones if anything that they depend on is."""
        if type(self.extras) is Unreadable:
            return self.extras
        return {} if self.stored_input is None else self.stored_input

    def own(self, name: str) -> Any:
        """Give one of the columns that few tasks use."""
        return None if self.extras is None else self.extras.get(name)

    @property
    def job_id(self) -> UUID | None:
        """The job that the task is a step of."""
        return _uuid(self.own("job_id"))

    @property
    def step(self) -> str | None:
        """The name of the step that the task is."""
        return None if self.extras is None else self.extras["step"]

    @property
    def correlation_id(self) -> UUID | None:
        """What ties the task to others."""
        return _uuid(self.own("correlation_id"))


def _uuid(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)


class Outcome(NamedTuple):
    """How an attempt ended: one of succeed, fail, retry and return, and what goes with it."""

    id: UUID
    attempt: int
    event: TaskRowEvent
    output: Any = None
    error: dict[str, Any] | None = None
    reason: str | None = None
    cost: float | None = None
    delay: float | None = None  # seconds until the next try, by the server's clock
    progress: Any = None


class HeldAttempt(NamedTuple):
    """An attempt whose lease is to be prolonged, and the progress it made since the last time."""

    id: UUID
    attempt: int
    progress: Any = None


class RenewedLease(NamedTuple):
    """An attempt whose lease was prolonged; someone may have asked for its cancellation."""

    id: UUID
    cancel_requested_at: datetime | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """An attempt that does not hold the task any more: recovered, canceled or claimed anew in the meantime."""

    id: UUID
    attempt: int


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One line of a task's history."""

    from_state: str | None
    to_state: str
    event: str
    reason: str | None
    actor: str
    attempt: int
    recorded_at: datetime


async def claim_pending_tasks(
    connection: Connection,
    *,
    actor: str,
    types: Sequence[str],
    namespaces: Sequence[str] = ("default",),
    limit: int = 1,
    lease: timedelta = DEFAULT_LEASE,
    callback_url: str | None = None,
    now: datetime | None = None,
) -> list[ClaimedTask]:
    """Claim up to `limit` tasks for the worker `actor`, in fair shares of the namespaces.

    `callback_url` is where steps are told of that name nothing themselves.
    """
    parameters = {
        "namespaces": written(tuple(namespaces)),
        "types": written(tuple(types)),
        "limit": limit,
        "each": -(-limit // max(len(namespaces), 1)),
        "lease": f"{lease.total_seconds()} seconds",
        "actor": actor,
        "callback_url": callback_url,
        "now": now,
    }
    return await run_prepared(connection, TASKS["claim_pending_tasks"], parameters, ClaimedTask._make)


async def until_next_run(
    connection: Connection, *, types: Sequence[str], namespaces: Sequence[str], now: datetime | None = None
) -> timedelta | None:
    """Tell how long it is until the next pending task that is not due yet becomes so."""
    parameters = {"namespaces": list(namespaces), "types": list(types), "now": now}
    (row,) = await run(connection, TASKS["until_next_run"], parameters)
    remaining: timedelta | None = row["remaining"]
    return remaining


async def renew_running_tasks(
    connection: Connection,
    held: Sequence[HeldAttempt],
    *,
    lease: timedelta = DEFAULT_LEASE,
    now: datetime | None = None,
) -> tuple[list[RenewedLease], list[LostAttempt]]:
    """Prolong the leases of these attempts and write their progress; give those kept and those lost."""
    parameters = {
        "ids": [attempt.id for attempt in held],
        "attempts": [attempt.attempt for attempt in held],
        "progresses": [as_json(attempt.progress) for attempt in held],
        "lease": lease,
        "now": now,
    }
    renewed = [RenewedLease(**row) for row in await run(connection, TASKS["renew_running_tasks"], parameters)]
    kept = {row.id for row in renewed}
    return renewed, [LostAttempt(attempt.id, attempt.attempt) for attempt in held if attempt.id not in kept]


async def save_checkpoint(
    connection: Connection, task_id: UUID, attempt: int, checkpoint: Any, *, now: datetime | None = None
) -> bool:
    """Store what a later attempt can go on from; False when this attempt is lost."""
    parameters = {"id": task_id, "attempt": attempt, "checkpoint": as_json(checkpoint), "now": now}
    return bool(await run(connection, TASKS["save_checkpoint"], parameters))


async def settle_running_tasks(
    connection: Connection,
    outcomes: Sequence[Outcome],
    *,
    actor: str,
    largest: int = DEFAULT_MAX_RESULT_BYTES,
    now: datetime | None = None,
) -> tuple[list[UUID], list[LostAttempt]]:
    """Write how these attempts ended, in one statement; give the tasks somebody waits for, and the attempts lost.

    A lost attempt has written nothing. A result of more than `largest` bytes is refused before anything is sent.
    """
    parameters = encode_outcomes(outcomes, largest) | {"expected": len(outcomes), "actor": actor, "now": now}
    ((settled, awaited, ids),) = await run_prepared(connection, TASKS["settle_running_tasks"], parameters, tuple)
    if settled == len(outcomes):
        return awaited, []
    written = set(ids or ())
    return awaited, [LostAttempt(o.id, o.attempt) for o in outcomes if o.id not in written]


async def insert_callbacks(connection: Connection, ids: Sequence[UUID]) -> None:
    """Note the completion notices of settled tasks, in the same transaction as the settle."""
    with translated(connection):
        await connection.execute(TASKS["insert_callbacks"].sql, {"ids": list(ids)})


async def notify_tasks(connection: Connection, namespaces: Iterable[str]) -> None:
    """Tell idle workers that there are tasks to claim in these namespaces."""
    await run(connection, TASKS["notify_tasks"], {"namespaces": list(namespaces)})


async def notify_ended(connection: Connection, *, awaited: Sequence[UUID], limited: bool) -> None:
    """Wake who waits for these tasks, and who admits the next ones under a limit."""
    if awaited:
        await run(connection, TASKS["notify_done"], {"ids": [str(id_) for id_ in awaited]})
    if limited:
        await run(connection, TASKS["notify_duties"], {"duties": ["limits"]})


async def read_tasks(connection: Connection, ids: Sequence[UUID]) -> list[dict[str, Any]]:
    """Read whole tasks by id."""
    return await run(connection, TASKS["read_tasks"], {"ids": list(ids)})


async def read_task_history(connection: Connection, task_id: UUID) -> list[TaskRecord]:
    """Read every move that a task made, oldest first."""
    return [TaskRecord(**row) for row in await run(connection, TASKS["read_task_history"], {"id": task_id})]


# SECTION store/waiters
# Who waits for the end of which task or job: each function runs the statement of the same name in `sql/waiters.sql`.
#
# Invariant: a row here is a hint. Without it the end is found by looking, a little later.

WAITERS = load_statements("waiters")


async def insert_waiters(connection: Connection, ids: Iterable[UUID], waiter: UUID) -> None:
    """Note that somebody waits for these tasks and jobs, or still does."""
    # sorted, so that two who wait for the same tasks lock their rows in one order
    await run_prepared(connection, WAITERS["insert_waiters"], {"ids": sorted(ids), "waiter": waiter}, tuple)


async def delete_waiters(connection: Connection, ids: Iterable[UUID], waiter: UUID) -> None:
    """Forget that somebody waited for these tasks and jobs, and those that have not said so for long."""
    with translated(connection):
        await connection.execute(WAITERS["delete_waiters"].sql, {"ids": sorted(ids), "waiter": waiter})


async def find_ended(connection: Connection, ids: Iterable[UUID]) -> list[UUID]:
    """Tell which of these tasks and jobs have ended, or are gone."""
    return [id_ for (id_,) in await run_prepared(connection, WAITERS["find_ended"], {"ids": list(ids)}, tuple)]
