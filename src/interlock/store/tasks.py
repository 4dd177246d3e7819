"""Task rows: claim, renew, settle and read; each function runs the statement of its name in `tasks.sql`.

Invariant: a settle, a renewal and a checkpoint name the attempt that they belong to. An attempt that no longer holds
the task is returned as LostAttempt and has written nothing.

Result watchers (`waiters`) are hints: without them the end of a task is found by polling, a little later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import orjson

from interlock.errors import StatementError
from interlock.lifecycle import TaskRowEvent, TaskRowState
from interlock.postgres.connection import (
    NOT_IN_PREREQUISITE_STATE,
    UnreadableJson,
    is_in_transaction,
    read_committed_transaction,
    translated,
)
from interlock.postgres.query import array_literal, as_json, load_statements, run, run_prepared

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.postgres.query import Statement

TASKS = load_statements("tasks")
WAITERS = load_statements("waiters")
_BRANCH_OF_TYPE = re.compile(r"\(select ctid as place,.*?order by crashes, priority desc, run_at, id\)", re.DOTALL)
DEFAULT_LEASE = timedelta(seconds=30)
ANY_AGE = "6000 years"  # nearly as long as timestamps go back
MAX_CRASHES = 3  # leases in a row that a task may let run out, before it ends in error
MIB = 1024 * 1024
MAX_JSON_BYTES = 256 * MIB - 1  # of one JSON document in PostgreSQL
DEFAULT_MAX_RESULT_BYTES = 64 * MIB
# PostgreSQL closes the connection on a message of one gigabyte, so the size of a settle is bounded, in characters:
MAX_BATCH_CHARACTERS = 64 * MIB  # of several outcomes; more are settled one by one
MAX_SINGLE_CHARACTERS = 640 * MIB  # of one outcome: twice the largest document, for its escapes, and some more


class ClaimedTask(NamedTuple):
    """A claimed task; `attempt` is the fence of everything that the worker writes to it.

    Columns that few tasks use come in one JSON document, `extras`, which is null for the others.
    """

    id: UUID
    type: str
    namespace: str
    attempt: int
    tries: int
    max_tries: int
    stored_input: dict[str, Any] | None = None
    extras: dict[str, Any] | None = None
    waited_s: float = 0.0  # since it was due, before the claim

    @property
    def input(self) -> dict[str, Any]:
        """The arguments by name; UnreadableJson when the stored arguments or a result that they use is not readable."""
        if type(self.extras) is UnreadableJson:
            return self.extras
        return {} if self.stored_input is None else self.stored_input

    def own(self, name: str) -> Any:
        """Return a column of `extras`."""
        return None if self.extras is None else self.extras.get(name)

    @property
    def job_id(self) -> UUID | None:
        """The job of a step."""
        return _uuid(self.own("job_id"))

    @property
    def step(self) -> str | None:
        """The name of a step."""
        return None if self.extras is None else self.extras["step"]

    @property
    def correlation_id(self) -> UUID | None:
        """The correlation id, shared by the tasks of one request."""
        return _uuid(self.own("correlation_id"))

    @property
    def traceparent(self) -> str | None:
        """The span that made the task."""
        found: str | None = self.own("traceparent")
        return found


def _uuid(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)


class Outcome(NamedTuple):
    """The outcome of an attempt: succeed, fail, retry, return or cancel, with its values."""

    id: UUID
    attempt: int
    event: TaskRowEvent
    output: Any = None
    error: dict[str, Any] | None = None
    reason: str | None = None
    cost: float | None = None
    delay: float | None = None  # backoff in seconds, added to the server's time
    progress: Any = None
    weight: float | None = None  # replaces that with which the attempt counts against its limits


class NextRun(NamedTuple):
    """The time until the next scheduled task is due, None when there is none; and the server's clock."""

    remaining: timedelta | None
    server_time: datetime


class HeldAttempt(NamedTuple):
    """An attempt whose lease to renew, and its progress since the last renewal."""

    id: UUID
    attempt: int
    progress: Any = None


class RenewedLease(NamedTuple):
    """An attempt whose lease was renewed, and the request to cancel it, if any."""

    id: UUID
    cancel_requested_at: datetime | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """An attempt that no longer holds the task: it was recovered, canceled or claimed again."""

    id: UUID
    attempt: int


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One recorded move of a task."""

    id: int
    from_state: TaskRowState | None
    to_state: TaskRowState
    event: str
    reason: str | None
    actor: str
    database_role: str
    attempt: int
    recorded_at: datetime

    def __post_init__(self) -> None:
        object.__setattr__(self, "from_state", None if self.from_state is None else TaskRowState(self.from_state))
        object.__setattr__(self, "to_state", TaskRowState(self.to_state))  # the row has strings


async def claim_pending_tasks(
    connection: Connection,
    *,
    actor: str,
    types: Sequence[str],
    namespaces: Sequence[str] = ("default",),
    limit: int = 1,
    lease: timedelta = DEFAULT_LEASE,
    callback_url: str | None = None,
    suspected: bool = False,
    recent_s: float | None = None,
    now: datetime | None = None,
) -> list[ClaimedTask]:
    """Claim up to `limit` tasks without a limit key for the worker `actor`, in fair shares of the namespaces.

    `callback_url` is the webhook of steps that name none themselves. With `suspected`, only tasks that are suspected of
    killing their worker are claimed, and without it none of them. With `recent_s`, only tasks that became due within so
    many seconds are claimed.
    """
    parameters = _claim_parameters(actor, types, namespaces, limit, lease, callback_url, suspected, now)
    if recent_s is not None:
        parameters["recent"] = f"{recent_s} seconds"
    return await run_prepared(connection, claim_statement(len(types)), parameters, ClaimedTask._make)


@cache
def claim_statement(types: int) -> Statement:
    """Return the claim of a worker that runs so many types: its innermost SELECT, repeated for each of them."""
    claim = TASKS["claim_pending_tasks"]
    (branch,) = _BRANCH_OF_TYPE.findall(claim.sql)
    branches = [branch.replace("[1]", f"[{number}]") for number in range(1, types + 1)]
    sql = claim.sql.replace(branch, "\nunion all\n".join(branches or [branch]))
    return replace(claim, name=f"{claim.name} of {types}", sql=sql)


async def claim_limited_tasks(
    connection: Connection,
    *,
    actor: str,
    types: Sequence[str],
    namespaces: Sequence[str] = ("default",),
    limit: int = 1,
    lease: timedelta = DEFAULT_LEASE,
    callback_url: str | None = None,
    suspected: bool = False,
    now: datetime | None = None,
) -> list[ClaimedTask]:
    """Do the same for tasks with a limit, each of which takes a token of each of its limits.

    The tokens get their time in a second statement, after the commit of the claim: it must not be before the record of
    the claim, or a window could contain one start too many. Until then they count as used just now.

    The claim needs read committed. A session with another default, which cannot be changed behind a pooler, refuses it;
    it is repeated in a transaction of its own then.
    """
    parameters = _claim_parameters(actor, types, namespaces, limit, lease, callback_url, suspected, now)
    parameters |= {"namespaces": "{}", "limited_namespaces": parameters["namespaces"]}
    statement = claim_statement(1)  # its part for tasks without a limit finds nothing
    try:
        claimed = await run_prepared(connection, statement, parameters, ClaimedTask._make)
    except StatementError as error:
        if error.sqlstate != NOT_IN_PREREQUISITE_STATE or is_in_transaction(connection):
            raise
        async with read_committed_transaction(connection):
            claimed = await run_prepared(connection, statement, parameters, ClaimedTask._make)
    if claimed:
        await run(connection, TASKS["stamp_limit_starts"], {"now": now})
    return claimed


def _claim_parameters(
    actor: str,
    types: Sequence[str],
    namespaces: Sequence[str],
    limit: int,
    lease: timedelta,
    callback_url: str | None,
    suspected: bool,  # noqa: FBT001 - as in the functions that call it
    now: datetime | None,
) -> dict[str, Any]:
    return {
        "namespaces": array_literal(tuple(namespaces)),
        "limited_namespaces": None,
        "types": array_literal(tuple(types)),
        "limit": limit,
        "each": -(-limit // max(len(namespaces), 1)),
        "lease": f"{lease.total_seconds()} seconds",
        "actor": actor,
        "callback_url": callback_url,
        "least_crashes": 1 if suspected else 0,
        "most_crashes": MAX_CRASHES if suspected else 0,
        "recent": ANY_AGE,
        "now": now,
    }


async def has_suspected_tasks(
    connection: Connection, *, types: Sequence[str], namespaces: Sequence[str], now: datetime | None = None
) -> bool:
    """Tell whether due tasks of these namespaces are suspected of killing their worker."""
    parameters = {"namespaces": list(namespaces), "types": list(types), "now": now}
    (row,) = await run(connection, TASKS["has_suspected_tasks"], parameters)
    return bool(row["found"])


async def find_claims_without_reply(connection: Connection, worker: str, within: timedelta) -> list[ClaimedTask]:
    """Find the tasks that a worker has claimed within a time, without their inputs."""
    parameters = {"worker": worker, "within": within}
    return [ClaimedTask(**row) for row in await run(connection, TASKS["find_claims_without_reply"], parameters)]


async def until_next_run(
    connection: Connection, *, types: Sequence[str], namespaces: Sequence[str], now: datetime | None = None
) -> NextRun:
    """Return the time until the next scheduled task without a limit is due."""
    parameters = {"namespaces": list(namespaces), "types": list(types), "now": now}
    (row,) = await run(connection, TASKS["until_next_run"], parameters)
    return NextRun(**row)


async def until_limited_start(
    connection: Connection, *, types: Sequence[str], namespaces: Sequence[str], now: datetime | None = None
) -> timedelta | None:
    """Return the time until a pending task with a limit is due and has its tokens; None when none is pending."""
    parameters = {"namespaces": list(namespaces), "types": list(types), "now": now}
    (row,) = await run(connection, TASKS["until_limited_start"], parameters)
    remaining: timedelta | None = row["remaining"]
    return remaining


async def renew_running_tasks(
    connection: Connection,
    held: Sequence[HeldAttempt],
    *,
    lease: timedelta = DEFAULT_LEASE,
    now: datetime | None = None,
) -> tuple[list[RenewedLease], list[LostAttempt]]:
    """Renew leases and store progress; return the renewed and the lost attempts.

    An attempt whose row is locked by another transaction is neither: renew it again later.
    """
    parameters = {
        "ids": [attempt.id for attempt in held],
        "attempts": [attempt.attempt for attempt in held],
        "progresses": [as_json(attempt.progress) for attempt in held],
        "lease": lease,
        "now": now,
    }
    rows = await run(connection, TASKS["renew_running_tasks"], parameters)
    kept = {row["id"] for row in rows}
    renewed = [RenewedLease(row["id"], row["cancel_requested_at"], row["reason"]) for row in rows if row["renewed"]]
    return renewed, [LostAttempt(attempt.id, attempt.attempt) for attempt in held if attempt.id not in kept]


async def save_checkpoint(
    connection: Connection, task_id: UUID, attempt: int, checkpoint: Any, *, now: datetime | None = None
) -> bool:
    """Store a checkpoint for later attempts; False when this attempt has lost the task."""
    parameters = {"id": task_id, "attempt": attempt, "checkpoint": as_json(checkpoint), "now": now}
    return bool(await run(connection, TASKS["save_checkpoint"], parameters))


async def settle_running_tasks(
    connection: Connection,
    outcomes: Sequence[Outcome],
    *,
    actor: str,
    largest: int = DEFAULT_MAX_RESULT_BYTES,
    advance: bool = False,
    now: datetime | None = None,
) -> tuple[list[UUID], list[LostAttempt]]:
    """Settle attempts in one statement; return the tasks that result watchers wait for, and the lost attempts.

    A lost attempt has written nothing. A result of more than `largest` bytes is refused before anything is sent.
    With `advance`, the statement also advances the job of a single step, if that is simple; else an orchestrator does.
    """
    parameters = encode_outcomes(outcomes, largest)
    parameters |= {"expected": len(outcomes), "actor": actor, "advance": advance, "now": now}
    ((settled, awaited, ids),) = await run_prepared(connection, TASKS["settle_running_tasks"], parameters, tuple)
    if settled == len(outcomes):
        return awaited, []
    written = set(ids or ())
    return awaited, [LostAttempt(o.id, o.attempt) for o in outcomes if o.id not in written]


def encode_outcomes(outcomes: Sequence[Outcome], largest: int) -> dict[str, Any]:
    """Encode outcomes as statement parameters; StatementError when a result has more than `largest` bytes of JSON.

    A plain success is three values, sent as arrays; every other outcome goes into one JSON document. Arrays of nine
    columns would be three times slower in the driver, documents for all three times slower in the server.
    """
    ids: list[UUID] = []
    attempts: list[int] = []
    outputs: list[str | None] = []
    others: list[dict[str, Any]] = []
    for outcome in outcomes:
        id_, attempt, event, output, _, _, cost, _, progress, _ = outcome
        if event == "succeed" and cost is None and progress is None:
            ids.append(id_)
            attempts.append(attempt)
            outputs.append(None if output is None else _json(output))
        else:
            others.append(
                {name: value for name, value in zip(outcome._fields, outcome, strict=True) if value is not None}
            )
    written = {"ids": _array(ids), "attempts": _array(attempts), "outputs": _array(outputs), "others": _json(others)}
    size = len(written["outputs"]) + len(written["others"])
    # a character has at most four bytes: below a quarter of the limit no result can exceed it
    if size > min(largest // 4, MAX_BATCH_CHARACTERS):
        _check_size(outcomes, size, largest)
    return written


def _check_size(outcomes: Sequence[Outcome], size: int, largest: int) -> None:
    for outcome in outcomes:
        result = len(orjson.dumps(outcome.output, default=str))
        if result > largest:
            raise StatementError(
                f"the result has {result:,} bytes of JSON, and at most {largest:,} are stored (setting "
                "`largest_result`); store it elsewhere and return a reference to it"
            )
    limit = MAX_SINGLE_CHARACTERS if len(outcomes) == 1 else MAX_BATCH_CHARACTERS
    if size > limit:
        raise StatementError(f"a settle has {size:,} characters, and at most {limit:,} can be sent at once")


def _json(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def _array(values: list[Any]) -> str:
    """Encode a PostgreSQL array: for scalars it differs from a JSON array in the brackets only."""
    return "{" + orjson.dumps(values).decode()[1:-1] + "}"


async def insert_webhooks(connection: Connection, ids: Sequence[UUID]) -> None:
    """Insert the webhooks of ended tasks, in the transaction that ends them."""
    with translated(connection):
        await connection.execute(TASKS["insert_webhooks"].sql, {"ids": list(ids)})


async def notify_tasks(connection: Connection, namespaces: Iterable[str], *, limited: bool = False) -> None:
    """Notify idle workers of pending tasks in these namespaces, some of which may have a limit."""
    await run(connection, TASKS["notify_tasks"], {"namespaces": list(namespaces), "limited": limited})


async def notify_ended_tasks(connection: Connection, *, awaited: Sequence[UUID], limited: bool) -> None:
    """Notify result watchers of ended tasks, and the leader when a limit has room again."""
    if awaited:
        await run(connection, TASKS["notify_ended_tasks"], {"ids": [str(id_) for id_ in awaited]})
    if limited:
        await run(connection, TASKS["notify_duties"], {"duties": ["limits"]})


async def read_tasks(connection: Connection, ids: Sequence[UUID]) -> list[dict[str, Any]]:
    """Read whole tasks by id."""
    return await run(connection, TASKS["read_tasks"], {"ids": list(ids)})


async def read_task_history(connection: Connection, task_id: UUID) -> list[TaskRecord]:
    """Read the recorded moves of a task, oldest first."""
    rows = await read_task_moves(connection, task_id)
    return [TaskRecord(**row) for row in rows]


async def read_task_moves(
    connection: Connection, task_id: UUID, *, after: int = 0, limit: int | None = None
) -> list[dict[str, Any]]:
    """Read the recorded moves of a task, oldest first, after the record with the id `after`."""
    return await run(connection, TASKS["read_task_history"], {"id": task_id, "after": after, "limit": limit})


async def insert_waiters(connection: Connection, ids: Iterable[UUID], waiter: UUID) -> None:
    """Register or renew a result watcher of these tasks and jobs."""
    # sorted, so that two watchers of the same tasks lock their rows in one order
    await run_prepared(connection, WAITERS["insert_waiters"], {"ids": sorted(ids), "waiter": waiter}, tuple)


async def delete_waiters(connection: Connection, ids: Iterable[UUID], waiter: UUID) -> None:
    """Delete a result watcher of these tasks and jobs, and watchers that were not renewed for long."""
    with translated(connection):
        await connection.execute(WAITERS["delete_waiters"].sql, {"ids": sorted(ids), "waiter": waiter})


async def find_ended(connection: Connection, ids: Iterable[UUID]) -> list[UUID]:
    """Return those of these tasks and jobs that have ended or no longer exist."""
    return [id_ for (id_,) in await run_prepared(connection, WAITERS["find_ended"], {"ids": list(ids)}, tuple)]
