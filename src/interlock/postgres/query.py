"""The few statements on which everything waits, at less cost than over a cursor of the driver's.

Invariant: what is sent, what is read and what is raised are the same as over a cursor; only the turns of the event loop
and the objects in between are fewer. To whoever is cancelled the server's answer is as lost as the driver makes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from psycopg.types.json import Jsonb

from interlock.postgres.connection import Connection, translated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from psycopg.rows import DictRow

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg import generators
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, Format, TransactionStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from psycopg.abc import Buffer
    from psycopg.pq.abc import PGconn, PGresult

    from interlock.postgres.connection import Connection


T = TypeVar("T")

_PARAMETER = re.compile(r"%(?:\((\w+)\)s|%)")
_STALE = frozenset({"0A000", "26000"})  # the statement is not there any more, or answers otherwise than it did
_ANSWERED = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})
_CANCELLING = 5.0  # seconds that the server has to hear that a statement is not wanted any more


class _Session:
    """What is known of one connection: how it writes and reads values, and what was prepared over it."""

    __slots__ = ("count", "names", "values")

    def __init__(self, connection: Connection) -> None:
        self.values = Transformer(connection)
        self.names: dict[str, bytes] = {}
        self.count = 0


_sessions: WeakKeyDictionary[Connection, _Session] = WeakKeyDictionary()


async def run_prepared(
    connection: Connection, statement: Statement, parameters: Mapping[str, Any], row: Callable[[Sequence[Any]], T]
) -> list[T]:
    """Run one named statement, prepared by its first run, and give its rows, each made of its values."""
    return await _run(connection, statement, parameters, lambda _: row)


async def read_prepared(
    connection: Connection, statement: Statement, parameters: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Do the same, and give rows by the names of their columns."""
    return await _run(connection, statement, parameters, _by_name)


def _by_name(result: PGresult) -> Callable[[Sequence[Any]], dict[str, Any]]:
    names = [(result.fname(column) or b"").decode() for column in range(result.nfields)]
    return lambda values: dict(zip(names, values, strict=True))


async def _run(
    connection: Connection,
    statement: Statement,
    parameters: Mapping[str, Any],
    made: Callable[[PGresult], Callable[[Sequence[Any]], T]],
) -> list[T]:
    session = _sessions.get(connection)
    if session is None:
        session = _sessions[connection] = _Session(connection)
    sql, names = _positional(statement.sql)
    with translated(connection):
        async with connection.lock:
            given = session.values.dump_sequence([parameters[name] for name in names], [PyFormat.TEXT] * len(names))
            try:
                result = await _ask(connection, session, statement.name, sql, given)
            except psycopg.Error as error:
                if error.sqlstate not in _STALE or not _is_idle(connection.pgconn):
                    raise
                # it has not run: over a cursor, the driver forgets all that is prepared whenever something rolls back
                session.names.pop(statement.name, None)
                result = await _ask(connection, session, statement.name, sql, given)
            session.values.set_pgresult(result)
            rows = session.values.load_rows(0, result.ntuples, made(result))
            session.values.set_pgresult(None)
            return rows


@cache
def _positional(sql: str) -> tuple[bytes, tuple[str, ...]]:
    """Write a statement with numbered parameters; tell their names in that order."""
    places: dict[str, int] = {}

    def placed(found: re.Match[str]) -> str:
        return "%" if found[1] is None else f"${places.setdefault(found[1], len(places) + 1)}"

    return _PARAMETER.sub(placed, sql).encode(), tuple(places)


async def _ask(
    connection: Connection, session: _Session, statement: str, sql: bytes, given: Sequence[Buffer | None]
) -> PGresult:
    pgconn = connection.pgconn
    # not behind a pooler; nor where a statement that is gone would spoil a transaction
    if connection.prepare_threshold is None or not _is_idle(pgconn):
        pgconn.send_query_params(sql, given, result_format=Format.BINARY)
        return await _answer(connection)
    name = session.names.get(statement)
    if name is None:
        session.count += 1
        name = f"interlock_{session.count}".encode()
        pgconn.send_prepare(name, sql)
        await _answer(connection)
        session.names[statement] = name
    pgconn.send_query_prepared(name, given, result_format=Format.BINARY)
    return await _answer(connection)


def _is_idle(pgconn: PGconn) -> bool:
    return pgconn.transaction_status == TransactionStatus.IDLE


async def _answer(connection: Connection) -> PGresult:
    """Wait for the answer to what was sent; raise it if it is a refusal."""
    pgconn = connection.pgconn
    # what is more than the server takes at once is left to the driver
    results = await (connection.wait(generators.execute(pgconn)) if pgconn.flush() else _results(connection))
    result: PGresult = results[-1]
    if result.status not in _ANSWERED:
        raise error_from_result(result)
    return result


async def _results(connection: Connection) -> Sequence[PGresult]:
    try:
        return await _heard(connection)
    except asyncio.CancelledError:
        if connection.pgconn.transaction_status == TransactionStatus.ACTIVE:
            with suppress(psycopg.Error):
                await connection.cancel_safe(timeout=_CANCELLING)
                await connection.wait(generators.fetch_many(connection.pgconn), timeout=_CANCELLING)
        raise


async def _heard(connection: Connection) -> Sequence[PGresult]:
    """Wait for results; the socket is let go of at once, since its number may be another connection's by and by."""
    pgconn, socket = connection.pgconn, connection.pgconn.socket
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[PGresult]] = loop.create_future()
    loop.add_reader(socket, _read, pgconn, future, [])
    try:
        return await future
    finally:
        loop.remove_reader(socket)


def _read(pgconn: PGconn, future: asyncio.Future[list[PGresult]], results: list[PGresult]) -> None:
    """Read what has arrived, and give the results when there are no more to come."""
    if future.done():
        return
    try:
        pgconn.consume_input()
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                future.set_result(results)
                return
            results.append(result)
    except psycopg.Error as error:
        if results:  # what the server said before it hung up
            future.set_result(results)
        else:
            future.set_exception(error)


# SECTION store/arrays
# Arrays as they go to the database.
#
# Invariant: what is sent means the same as what the driver would send; only its type is left to the statement.


@lru_cache(maxsize=256)
def written(values: tuple[str, ...]) -> str:
    """Write an array of texts that is sent again and again, such as the namespaces of a worker."""
    return "{" + ",".join('"' + value.replace("\\", r"\\").replace('"', r"\"") + '"' for value in values) + "}"


# SECTION store/statements
# Loads the named SQL statements: `sql/<aggregate>.sql`, in blocks that begin with `-- name:`.
#
# Invariant: a statement says in `-- moves:` headers which transitions it writes, so that a test can hold all of them
# to the lifecycle tables.

_HEADER = re.compile(r"^-- (name|moves): (.+)$")
_MOVE = re.compile(r"^(?P<machine>[a-z ]+?) (?P<source>\w+) -(?P<event>\w+)-> (?P<target>\w+)$")


@dataclass(frozen=True, slots=True)
class WrittenMove:
    """A transition that a statement says it writes."""

    machine: str
    source: str
    event: str
    target: str


@dataclass(frozen=True, slots=True)
class Statement:
    """One named statement and the moves that it writes."""

    name: str
    sql: str
    moves: tuple[WrittenMove, ...]


def load_statements(aggregate: str) -> dict[str, Statement]:
    """Read all statements of one aggregate, by name."""
    text = files("interlock").joinpath("sql", "queries", f"{aggregate}.sql").read_text(encoding="utf-8")
    found: dict[str, Statement] = {}
    for block in re.split(r"^(?=-- name: )", text, flags=re.MULTILINE)[1:]:
        statement = _parse(block, aggregate)
        if statement.name in found:
            raise ValueError(f"{aggregate}.sql: statement {statement.name} is defined twice")
        found[statement.name] = statement
    return found


def _parse(block: str, aggregate: str) -> Statement:
    name = ""
    moves = []
    body = []
    for line in block.splitlines():
        header = _HEADER.match(line)
        if header is None:
            body.append(line.strip())
        elif header[1] == "name":
            name = header[2].strip()
        else:
            move = _MOVE.match(header[2].strip())
            if move is None:
                raise ValueError(f"{aggregate}.sql: {name}: cannot read the header {line!r}")
            moves.append(WrittenMove(**move.groupdict()))
    # What is only for readers stays here: the driver keeps what it found in a statement only if that is a short one.
    return Statement(name, "\n".join(line for line in body if line and not line.startswith("--")), tuple(moves))


async def run(connection: Connection, statement: Statement, parameters: Mapping[str, Any]) -> list[DictRow]:
    """Run one named statement and give its rows."""
    with translated(connection):
        return await (await connection.execute(statement.sql, parameters)).fetchall()


def as_json(value: Any) -> Jsonb | None:
    """Wrap a value for a jsonb column; None stays null."""
    return None if value is None else Jsonb(value, orjson.dumps)


Asked = tuple["Statement", "Mapping[str, Any]"]


async def run_together(connection: Connection, asked: Sequence[Asked]) -> list[list[DictRow]]:
    """Run these statements and give the rows of each."""
    with translated(connection):
        async with connection.pipeline():
            cursors = [await connection.execute(statement.sql, parameters) for statement, parameters in asked]
        return [await cursor.fetchall() if cursor.description is not None else [] for cursor in cursors]


async def run_all(connection: Connection, asked: Sequence[Asked]) -> None:
    """Run these statements for what they do, one after the other; for one or two that is faster than a pipeline."""
    with translated(connection):
        for statement, parameters in asked:
            await connection.execute(statement.sql, parameters)
