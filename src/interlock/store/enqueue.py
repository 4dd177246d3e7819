"""Storing tasks on whatever connection the caller has: its own pool's, or one with a transaction of the user's.

Invariant: nothing here commits what it did not begin. A user's connection may have any row factory, any cursor class
and be blocking or not; what was enqueued on it is stored when its transaction is, and not before.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from itertools import chain
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.postgres.connection import AsyncConnection, SyncConnection, blocking_cursor_on, cursor_on
from interlock.postgres.ids import new_id
from interlock.postgres.query import as_json, load_statements, run_prepared, written
from interlock.store.tasks import TASKS, Enqueued, enqueuing

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import NewTask

_Statement = tuple[str, dict[str, Any]]

ENQUEUE = load_statements("enqueue")
CHUNK = 256 * 1024  # bytes of a COPY that are handed to the driver at once
_PARAMETER = re.compile(r"%\((\w+)\)s")

# A COPY in binary, as PostgreSQL describes it: the server reads it faster than text, and nothing needs an escape.
_SHORT, _INT, _LONG, _DOUBLE = (Struct(kind).pack for kind in ("!h", "!i", "!q", "!d"))
_JSONB = b"\x01"  # the version of jsonb
_INPUT = Struct("!ib").pack
_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + _INT(0) + _INT(0)
_TRAILER = _SHORT(-1)
_COLUMNS = 12  # of the statement copy_tasks
_ROW = _SHORT(_COLUMNS) + _INT(16)
_NULL = _INT(-1)
_TEXT = 25  # the number of the type text
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

PARAMSTYLES: Mapping[str, Callable[[str, int], str]] = {
    "pyformat": lambda name, _: f"%({name})s",
    "format": lambda _, __: "%s",
    "named": lambda name, _: f":{name}",
    "qmark": lambda _, __: "?",
    "numeric": lambda _, place: f":{place}",
    "dollar": lambda _, place: f"${place}",
}
_BY_NAME = ("pyformat", "named")


class CopyBegun(NamedTuple):
    """What the server says before a COPY."""

    now: datetime
    actor: str
    paused: bool


async def enqueue_alone(connection: Connection, task: NewTask, *, actor: str) -> Enqueued:
    """Store one task in a transaction of its own, over a connection of the engine's own."""
    statement, parameters = enqueuing(task, actor)
    (stored,) = await run_prepared(connection, statement, parameters, Enqueued._make)
    return stored


async def enqueue_on(connection: AsyncConnection, task: NewTask, *, actor: str) -> Enqueued:
    """Store one task in the transaction of somebody's connection, which may be in whatever mode."""
    statement, parameters = enqueuing(task, actor)
    async with cursor_on(connection, Enqueued) as cursor:
        await cursor.execute(statement.sql, parameters)
        stored: Enqueued = (await cursor.fetchall())[0]
    return stored


def enqueue_blocking_on(connection: SyncConnection, task: NewTask, *, actor: str) -> Enqueued:
    """Store one task in the transaction of a blocking connection."""
    statement, parameters = enqueuing(task, actor)
    with blocking_cursor_on(connection, Enqueued) as cursor:
        cursor.execute(statement.sql, parameters)
        stored: Enqueued = cursor.fetchall()[0]
    return stored


async def enqueue_tasks(connection: AsyncConnection, tasks: Sequence[NewTask], *, actor: str) -> list[Enqueued]:
    """Store many tasks in one statement, or two where some are taken, with everything that can hold or merge them."""
    async with cursor_on(connection) as cursor:
        storing = _storing(tasks, actor)
        statement, parameters = next(storing)
        while True:
            await cursor.execute(statement, parameters)
            try:
                statement, parameters = storing.send(await cursor.fetchall())
            except StopIteration as end:
                return list(end.value)


def enqueue_tasks_blocking(connection: SyncConnection, tasks: Sequence[NewTask], *, actor: str) -> list[Enqueued]:
    """Do the same on a blocking connection."""
    with blocking_cursor_on(connection) as cursor:
        storing = _storing(tasks, actor)
        statement, parameters = next(storing)
        while True:
            cursor.execute(statement, parameters)
            try:
                statement, parameters = storing.send(cursor.fetchall())
            except StopIteration as end:
                return list(end.value)


def _storing(tasks: Sequence[NewTask], actor: str) -> Generator[_Statement, list[dict[str, Any]], list[Enqueued]]:
    """Yield the statements to run, without running them, and take their rows: there are two kinds of connections."""
    ids = [task.task_id or new_id() for task in tasks]
    objects = [{**_as_object(task), "task_id": id_} for task, id_ in zip(tasks, ids, strict=True)]
    stored = _first_of_each(ids, (yield _many("insert_tasks", objects, actor)))
    taken = {place: tasks[place] for place, (_, created) in enumerate(stored) if not created}
    if taken:
        rows = yield _many("enqueue_tasks", list(map(_as_object, taken.values())), actor)
        for place, row in zip(taken, rows, strict=True):
            stored[place] = Enqueued(**row)
    return stored


def _first_of_each(ids: list[UUID], rows: list[dict[str, Any]]) -> list[Enqueued]:
    """Tell which ids were inserted; one that is given twice was made once."""
    inserted = {row["id"] for row in rows}
    stored = []
    for id_ in ids:
        stored.append(Enqueued(id_, id_ in inserted))
        inserted.discard(id_)
    return stored


async def begin_copy(connection: AsyncConnection, namespaces: Sequence[str], *, actor: str) -> CopyBegun:
    """Prepare a transaction for a COPY of tasks."""
    async with cursor_on(connection, CopyBegun) as cursor:
        await cursor.execute(ENQUEUE["begin_copy"].sql, {"namespaces": list(namespaces), "actor": actor})
        begun: CopyBegun = (await cursor.fetchall())[0]
    return begun


async def copy_rows(connection: AsyncConnection, rows: Iterable[bytes]) -> None:
    """Store tasks that are already written as rows of a COPY, after `begin_copy` in the same transaction."""
    async with cursor_on(connection) as cursor, cursor.copy(TASKS["copy_tasks"].sql) as copy:
        for chunk in _chunks(chain((_SIGNATURE,), rows, (_TRAILER,))):
            await copy.write(chunk)


def copy_row_parts(task: NewTask, now: datetime) -> tuple[bytes, bytes]:
    """Write what stands between the id and the input in the row of a task, and after it; many tasks share it."""
    run_at = task.run_at or now + (task.delay or timedelta(0))
    before = [task.namespace.encode(), task.type.encode()]
    after = [
        _SHORT(task.priority),
        _LONG((run_at - _EPOCH) // _MICROSECOND),
        _INT(task.max_tries),
        None if task.timeout_seconds is None else _DOUBLE(task.timeout_seconds),
        None if task.backoff is None else _JSONB + orjson.dumps(task.backoff),
        None if task.tags is None else _text_array(task.tags),
        None if task.callback_url is None else task.callback_url.encode(),
        None if task.correlation_id is None else task.correlation_id.bytes,
    ]
    return b"".join(map(_field, before)), b"".join(map(_field, after))


def copy_row(number: int, parts: tuple[bytes, bytes], stored: dict[str, Any]) -> bytes:
    """Write one row; the number is its id."""
    text = orjson.dumps(stored)
    return b"".join((_ROW, number.to_bytes(16, "big"), parts[0], _INPUT(len(text) + 1, 1), text, parts[1]))


def enqueue_as_text(task: NewTask, *, actor: str, paramstyle: str) -> tuple[str, dict[str, Any] | tuple[Any, ...]]:
    """Give a statement and its parameters, all text, for any driver."""
    if paramstyle not in PARAMSTYLES:
        raise ValueError(f"the paramstyle must be one of {', '.join(PARAMSTYLES)}, not {paramstyle!r}")
    values = _text_parameters(task, actor)
    names: list[str] = []

    def placed(match: re.Match[str]) -> str:
        names.append(match[1])
        return PARAMSTYLES[paramstyle](match[1], len(names))

    statement = _PARAMETER.sub(placed, ENQUEUE["enqueue_as_text"].sql)
    return statement, values if paramstyle in _BY_NAME else tuple(values[name] for name in names)


def _many(name: str, objects: list[dict[str, Any]], actor: str) -> _Statement:
    return ENQUEUE[name].sql, {"tasks": as_json(objects), "actor": actor}


def _as_object(task: NewTask) -> dict[str, Any]:
    return {
        "type": task.type,
        "input": task.input,
        "namespace": task.namespace,
        "priority": task.priority,
        "run_at": task.run_at,
        "delay_seconds": None if task.delay is None else task.delay.total_seconds(),
        "max_tries": task.max_tries,
        "timeout_seconds": task.timeout_seconds,
        "backoff": task.backoff,
        "unique_key": task.unique_key,
        "request_id": task.request_id,
        "limit_key": task.limit_key,
        "tags": task.tags,
        "callback_url": task.callback_url,
        "correlation_id": task.correlation_id,
        "task_id": task.task_id,
    }


def _text_parameters(task: NewTask, actor: str) -> dict[str, str | None]:
    values = {name: None if value is None else str(value) for name, value in _as_object(task).items()}
    delay = values.pop("delay_seconds")
    return {
        **values,
        "input": orjson.dumps(task.input).decode(),
        "backoff": None if task.backoff is None else orjson.dumps(task.backoff).decode(),
        "run_at": None if task.run_at is None else task.run_at.isoformat(),
        "delay": None if delay is None else f"{delay} seconds",
        "tags": None if task.tags is None else written(tuple(task.tags)),
        "actor": actor,
    }


def _field(value: bytes | None) -> bytes:
    return _NULL if value is None else _INT(len(value)) + value


def _text_array(items: Sequence[str]) -> bytes:
    """Write an array of text in binary: its dimensions, whether it holds nulls, its type, its size and first index."""
    if not items:
        return _INT(0) + _INT(0) + _INT(_TEXT)
    head = _INT(1) + _INT(0) + _INT(_TEXT) + _INT(len(items)) + _INT(1)
    return head + b"".join(_field(item.encode()) for item in items)


def _chunks(rows: Iterable[bytes]) -> Iterator[bytes]:
    gathered: list[bytes] = []
    size = 0
    for row in rows:
        gathered.append(row)
        size += len(row)
        if size >= CHUNK:
            yield b"".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)
