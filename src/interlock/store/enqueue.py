"""Stores new tasks over any connection: one of the app's pool, or one that holds a transaction of the user.

Columns, parameters and their conversions follow from the option table in `model/options.py`.

Invariant: nothing here commits a transaction that it did not begin. A user's connection may be async or blocking and
have any row factory and cursor class; tasks enqueued over it are stored when its transaction commits.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from datetime import UTC, datetime, timedelta
from itertools import chain
from operator import attrgetter, itemgetter
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.model.options import DELAY, OPTIONS, NewTask, Scope, options_in
from interlock.postgres.connection import AsyncConnection, SyncConnection, blocking_cursor_on, cursor_on
from interlock.postgres.ids import as_id, new_numbers
from interlock.postgres.query import PortableStatement, array_literal, as_json, load_statements, run_prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.postgres.query import Statement, StatementCall

_Query = tuple[str, dict[str, Any]]

ENQUEUE = load_statements("enqueue")
COPY_CHUNK_BYTES = 256 * 1024  # that are handed to the driver at once

_COLUMNS = tuple(option.column for option in OPTIONS.values())
_NEVER_NULL = frozenset(field.name for field in fields(NewTask) if field.default not in (None, MISSING))
_NULLABLE = tuple(column for column in _COLUMNS if column not in _NEVER_NULL)
_NOT_COPIED = tuple(option.column for option in OPTIONS.values() if Scope.COPY not in option.scopes)
# a delay is copied as the run_at that it leads to
_COPIED = tuple(option for option in options_in(Scope.COPY) if option.type is not DELAY)

_DOCUMENT_KEYS = ("type", "input", *_COLUMNS)

_values = attrgetter(*_COLUMNS)
_document_values = attrgetter(*_DOCUMENT_KEYS)
_nullable_values = attrgetter(*_NULLABLE)
_not_copied_values = attrgetter(*_NOT_COPIED)
_copied_values = attrgetter(*(option.column for option in _COPIED))
_ALL_NULL = (None,) * len(_NULLABLE)
_NONE_GIVEN = (None,) * len(_NOT_COPIED)


class Enqueued(NamedTuple):
    """The task that an enqueue led to: a new one, or the one that had its id, unique key or request id already."""

    id: UUID
    created: bool


class InsertedTask(NamedTuple):
    """A new task, and its row as JSON if that was asked for."""

    id: UUID
    document: dict[str, Any] | None


class CopyStart(NamedTuple):
    """The server's answer before a COPY: its time, and whether one of the namespaces is paused."""

    now: datetime
    actor: str
    paused: bool


# --- One task ---


async def enqueue_task(connection: Connection, task: NewTask, *, actor: str) -> Enqueued:
    """Store one task over a connection of the engine, in its transaction if it is in one."""
    statement, parameters = _single(task, actor)
    (stored,) = await run_prepared(connection, statement, parameters, Enqueued._make)
    return stored


async def enqueue_task_on(connection: AsyncConnection, task: NewTask, *, actor: str) -> Enqueued:
    """Store one task in the transaction of a user's async connection."""
    statement, parameters = _single(task, actor)
    async with cursor_on(connection, Enqueued) as cursor:
        await cursor.execute(statement.sql, parameters)
        stored: Enqueued = (await cursor.fetchall())[0]
    return stored


def enqueue_task_blocking(connection: SyncConnection, task: NewTask, *, actor: str) -> Enqueued:
    """Store one task in the transaction of a user's blocking connection."""
    statement, parameters = _single(task, actor)
    with blocking_cursor_on(connection, Enqueued) as cursor:
        cursor.execute(statement.sql, parameters)
        stored: Enqueued = cursor.fetchall()[0]
    return stored


_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {"jsonb": as_json, "text[]": list}
_CONVERTED = tuple(
    (option.column, _CONVERSIONS[option.type.sql_type])
    for option in OPTIONS.values()
    if option.type.sql_type in _CONVERSIONS
)


def _single(task: NewTask, actor: str) -> tuple[Statement, dict[str, Any]]:
    """Choose the statement that stores one task; most tasks have no option that can be null."""
    parameters: dict[str, Any] = {
        "type": task.type,
        "input": as_json(task.input),
        "namespace": task.namespace,
        "priority": task.priority,
        "max_tries": task.max_tries,
        "actor": actor,
    }
    nullable = _nullable_values(task)
    if nullable == _ALL_NULL:
        return ENQUEUE["enqueue_plain_task"], parameters
    parameters |= zip(_NULLABLE, nullable, strict=True)
    for column, convert in _CONVERTED:
        if parameters[column] is not None:
            parameters[column] = convert(parameters[column])
    return ENQUEUE["enqueue_task"], parameters


# --- Many tasks in one statement ---


async def enqueue_tasks(connection: AsyncConnection, tasks: Sequence[NewTask], *, actor: str) -> list[Enqueued]:
    """Store many tasks in one statement, or two when some of their keys are taken."""
    async with cursor_on(connection) as cursor:
        queries = _bulk_queries(tasks, actor)
        statement, parameters = next(queries)
        while True:
            await cursor.execute(statement, parameters)
            try:
                statement, parameters = queries.send(await cursor.fetchall())
            except StopIteration as end:
                return list(end.value)


def enqueue_tasks_blocking(connection: SyncConnection, tasks: Sequence[NewTask], *, actor: str) -> list[Enqueued]:
    """Do the same over a blocking connection."""
    with blocking_cursor_on(connection) as cursor:
        queries = _bulk_queries(tasks, actor)
        statement, parameters = next(queries)
        while True:
            cursor.execute(statement, parameters)
            try:
                statement, parameters = queries.send(cursor.fetchall())
            except StopIteration as end:
                return list(end.value)


async def insert_task(
    connection: Connection, task: NewTask, *, actor: str, lock_timeout: str | None = None, whole: bool = False
) -> InsertedTask | None:
    """Store one task if it is new, as `insert_tasks` does; most tasks have no option that can be null."""
    if _nullable_values(task) != _ALL_NULL:
        (inserted,) = await insert_tasks(connection, [task], actor=actor, lock_timeout=lock_timeout, whole=whole)
        return inserted
    number = next(new_numbers(1))
    parameters = {
        "task_id": f"{number:032x}",
        "namespace": task.namespace,
        "type": task.type,
        "priority": task.priority,
        "max_tries": task.max_tries,
        "input": orjson.dumps(task.input).decode(),
        "actor": actor,
        "whole": whole,
    }
    rows = await run_prepared(connection, ENQUEUE["insert_plain_task"], parameters, itemgetter(0))
    return InsertedTask(as_id(number), rows[0]) if rows else None


async def insert_tasks(
    connection: Connection,
    tasks: Sequence[NewTask],
    *,
    actor: str,
    lock_timeout: str | None = None,
    whole: bool = False,
) -> list[InsertedTask | None]:
    """Store those of many tasks that are new, in one statement; None for each that `enqueue_task` must decide on.

    These are tasks whose id or key is taken, and tasks that are too large. `lock_timeout` limits how long the statement
    waits for a transaction that has inserted one of the keys. With `whole`, the rows are returned.
    """
    ids = _ids_of(tasks)
    statement, parameters = _insert_query(tasks, ids, actor, lock_timeout, whole=whole)
    rows = await run_prepared(connection, statement, parameters, InsertedTask._make)
    inserted = {row.id: row for row in rows}
    return [inserted.pop(id_, None) for id_ in ids]  # of two tasks with one id, the first one is new


def insert_task_call(task: NewTask, *, actor: str) -> StatementCall:
    """Return the statement that stores one task if it is new and returns its row, to be run among others."""
    return _insert_query([task], _ids_of([task]), actor, whole=True)


def _bulk_queries(tasks: Sequence[NewTask], actor: str) -> Generator[_Query, list[dict[str, Any]], list[Enqueued]]:
    """Yield queries for an async or a blocking caller to run, and receive their rows."""
    ids = _ids_of(tasks)
    statement, parameters = _insert_query(tasks, ids, actor)
    inserted = {row["id"] for row in (yield statement.sql, parameters)}
    stored = []
    for id_ in ids:
        stored.append(Enqueued(id_, id_ in inserted))
        inserted.discard(id_)  # the first of two tasks with one id is the new one
    taken = {place: tasks[place] for place, (_, created) in enumerate(stored) if not created}
    if taken:
        documents = list(map(_document, taken.values()))
        rows = yield ENQUEUE["enqueue_tasks"].sql, {"tasks": as_json(documents), "actor": actor}
        for place, row in zip(taken, rows, strict=True):
            stored[place] = Enqueued(**row)
    return stored


def _ids_of(tasks: Sequence[NewTask]) -> list[UUID]:
    return [task.task_id or as_id(number) for task, number in zip(tasks, new_numbers(len(tasks)), strict=True)]


def _insert_query(
    tasks: Sequence[NewTask], ids: Sequence[UUID], actor: str, lock_timeout: str | None = None, *, whole: bool = False
) -> tuple[Statement, dict[str, Any]]:
    documents = list(map(_document, tasks))
    for document, id_ in zip(documents, ids, strict=True):
        document["task_id"] = id_
    options = {"actor": actor, "lock_timeout": lock_timeout, "whole": whole}
    return ENQUEUE["insert_tasks"], {"tasks": as_json(documents), **options}


def _document(task: NewTask) -> dict[str, Any]:
    """Give a task as a JSON object whose keys are the columns of the recordset."""
    # without nulls: a missing key is null in the recordset, and costs neither side time
    values = zip(_DOCUMENT_KEYS, _document_values(task), strict=True)
    document = {key: value for key, value in values if value is not None}
    if task.delay is not None:
        document["delay"] = interval_text(task.delay)
    return document


def interval_text(delay: timedelta) -> str:
    """Write a duration as PostgreSQL reads it."""
    return f"{delay.total_seconds()} seconds"


# --- Many tasks by COPY ---

# The binary format of PostgreSQL: the server reads it faster than text, and no value needs an escape.
_SHORT, _INT, _LONG, _DOUBLE = (Struct(kind).pack for kind in ("!h", "!i", "!q", "!d"))
_JSONB_VERSION = 1
_INPUT_HEAD = Struct("!ib").pack  # length of the field, version of jsonb
_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + _INT(0) + _INT(0)
_TRAILER = _SHORT(-1)
_ROW_HEAD = _SHORT(3 + len(_COPIED)) + _INT(16)  # number of fields (id, type, input, options), length of the id
_NULL = _INT(-1)
_TEXT_OID = 25
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def is_copyable(task: NewTask) -> bool:
    """Tell whether no option can hold this task or merge it with another one; its namespace may still be paused."""
    return bool(_not_copied_values(task) == _NONE_GIVEN)


async def begin_copy(connection: AsyncConnection, namespaces: Sequence[str], *, actor: str) -> CopyStart:
    """Prepare a transaction for a COPY of tasks."""
    async with cursor_on(connection, CopyStart) as cursor:
        await cursor.execute(ENQUEUE["begin_copy"].sql, {"namespaces": list(namespaces), "actor": actor})
        start: CopyStart = (await cursor.fetchall())[0]
    return start


async def copy_tasks(connection: AsyncConnection, rows: Iterable[bytes]) -> None:
    """Store rows of `copy_row`, after `begin_copy` in the same transaction."""
    async with cursor_on(connection) as cursor, cursor.copy(ENQUEUE["copy_tasks"].sql) as copy:
        for chunk in _chunks(chain((_SIGNATURE,), rows, (_TRAILER,))):
            await copy.write(chunk)


def copy_row_parts(task: NewTask, now: datetime) -> tuple[bytes, bytes]:
    """Encode the fields of a task before and after its input; tasks that differ only in their input share them."""
    values = list(_copied_values(task))
    if task.run_at is None:
        values[_RUN_AT] = now if task.delay is None else now + task.delay
    after = (_NULL if value is None else _field(encode(value)) for value, encode in zip(values, _ENCODERS, strict=True))
    return _field(task.type.encode()), b"".join(after)


def copy_row(number: int, parts: tuple[bytes, bytes], stored_input: dict[str, Any]) -> bytes:
    """Encode one row; the number is its id."""
    text = orjson.dumps(stored_input)
    head = (_ROW_HEAD, number.to_bytes(16, "big"), parts[0], _INPUT_HEAD(len(text) + 1, _JSONB_VERSION))
    return b"".join((*head, text, parts[1]))


def _field(value: bytes) -> bytes:
    return _INT(len(value)) + value


def _encode_time(moment: datetime) -> bytes:
    return _LONG((moment - _EPOCH) // _MICROSECOND)


def _encode_json(value: Any) -> bytes:
    return bytes((_JSONB_VERSION,)) + orjson.dumps(value)


def _encode_texts(items: Sequence[str]) -> bytes:
    """Encode text[]: number of dimensions, flag for nulls, OID of the elements, then size and lower bound."""
    if not items:
        return _INT(0) + _INT(0) + _INT(_TEXT_OID)
    head = _INT(1) + _INT(0) + _INT(_TEXT_OID) + _INT(len(items)) + _INT(1)
    return head + b"".join(_field(item.encode()) for item in items)


_BINARY: Mapping[str, Callable[[Any], bytes]] = {
    "smallint": _SHORT,
    "int": _INT,
    "float8": _DOUBLE,
    "text": str.encode,
    "text[]": _encode_texts,
    "timestamptz": _encode_time,
    "jsonb": _encode_json,
    "uuid": attrgetter("bytes"),
}
_ENCODERS = tuple(_BINARY[option.type.sql_type] for option in _COPIED)
_RUN_AT = [option.name for option in _COPIED].index("run_at")


def _chunks(rows: Iterable[bytes]) -> Iterator[bytes]:
    gathered: list[bytes] = []
    size = 0
    for row in rows:
        gathered.append(row)
        size += len(row)
        if size >= COPY_CHUNK_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)


# --- One task as a statement for any driver ---

_TEXT: Mapping[str, Callable[[Any], str]] = {
    "timestamptz": datetime.isoformat,
    "interval": interval_text,
    "jsonb": lambda value: orjson.dumps(value).decode(),
    "text[]": lambda value: array_literal(tuple(value)),
}


def enqueue_as_text(task: NewTask, *, actor: str) -> PortableStatement:
    """Give a statement that stores one task, and its parameters, all of them text."""
    values: dict[str, str | None] = {"type": task.type, "input": orjson.dumps(task.input).decode(), "actor": actor}
    for option, value in zip(OPTIONS.values(), _values(task), strict=True):
        values[option.column] = None if value is None else _TEXT.get(option.type.sql_type, str)(value)
    return PortableStatement(ENQUEUE["enqueue_as_text"], values)
