"""Named SQL statements: loading them from `sql/queries/<aggregate>.sql` and running them.

The hot path, claim and settle, uses `run_prepared`, which speaks to libpq below psycopg's cursors.

Invariant: `run_prepared` sends, reads and raises the same as a cursor would, with fewer turns of the event loop and
fewer objects. After a cancel, the server's answer is lost, as with a cursor.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import orjson
import psycopg
from psycopg import generators
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.types.json import Jsonb

from interlock.postgres.connection import Connection, transaction, translated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    from psycopg import AsyncCursor
    from psycopg.abc import Buffer
    from psycopg.pq.abc import PGconn, PGresult
    from psycopg.rows import DictRow

T = TypeVar("T")

CANCEL_TIMEOUT_S = 5.0  # for the server to answer the cancel of a statement

_HEADER = re.compile(r"^-- (name|moves): (.+)$")
_MOVE = re.compile(r"^(?P<machine>[a-z ]+?) (?P<source>\w+) -(?P<event>\w+)-> (?P<target>\w+)$")
_PARAMETER = re.compile(r"%(?:\((\w+)\)s|%)")
# SQLSTATEs of a prepared statement whose result type has changed, that is gone, or that another client has prepared
_STALE_STATEMENT = frozenset({"0A000", "26000", "42P05"})
_SUCCESS = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})


# --- loading


@dataclass(frozen=True, slots=True)
class WrittenMove:
    """A transition that a statement writes, as its `-- moves:` header declares."""

    machine: str
    source: str
    event: str
    target: str


@dataclass(frozen=True, slots=True)
class Statement:
    """One named statement. A test holds the moves of all statements to the lifecycle tables."""

    name: str
    sql: str
    moves: tuple[WrittenMove, ...]


def load_statements(aggregate: str) -> dict[str, Statement]:
    """Read all statements of one aggregate, by name; each begins with a `-- name:` header."""
    text = files("interlock").joinpath("sql", "queries", f"{aggregate}.sql").read_text(encoding="utf-8")
    found: dict[str, Statement] = {}
    for block in re.split(r"^(?=-- name: )", text, flags=re.MULTILINE)[1:]:
        statement = _parse_statement(block, aggregate)
        if statement.name in found:
            raise ValueError(f"{aggregate}.sql: statement {statement.name} is defined twice")
        found[statement.name] = statement
    return found


def _parse_statement(block: str, aggregate: str) -> Statement:
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
                raise ValueError(f"{aggregate}.sql: {name}: cannot parse the header {line!r}")
            moves.append(WrittenMove(**move.groupdict()))
    # without comments and empty lines: psycopg caches the parse of short queries only
    return Statement(name, "\n".join(line for line in body if line and not line.startswith("--")), tuple(moves))


# --- parameters


def as_json(value: Any) -> Jsonb | None:
    """Wrap a value for a jsonb column; None stays null."""
    return None if value is None else Jsonb(value, orjson.dumps)


@lru_cache(maxsize=256)
def array_literal(values: tuple[str, ...]) -> str:
    """Write an array of texts that is sent often, such as the namespaces of a worker; the statement has its type."""
    return "{" + ",".join('"' + value.replace("\\", r"\\").replace('"', r"\"") + '"' for value in values) + "}"


# --- statements for other drivers

PARAMSTYLES: Mapping[str, Callable[[str, int], str]] = {
    "pyformat": lambda name, _: f"%({name})s",
    "format": lambda _, __: "%s",
    "named": lambda name, _: f":{name}",
    "qmark": lambda _, __: "?",
    "numeric": lambda _, place: f":{place}",
    "dollar": lambda _, place: f"${place}",
}
_STYLES_BY_NAME = ("pyformat", "named")


class PortableStatement:
    """A statement that returns `id` and `created`, for any PostgreSQL driver; its parameters are text."""

    __slots__ = ("_statement", "_values", "parameters", "sql")

    def __init__(self, statement: Statement, values: dict[str, str | None]) -> None:
        self._statement = statement
        self._values = values
        self.sql, self.parameters = self.styled("pyformat")

    def __iter__(self) -> Iterator[Any]:
        return iter((self.sql, self.parameters))

    def styled(self, paramstyle: str) -> tuple[str, dict[str, Any] | tuple[Any, ...]]:
        """Write it in the driver's paramstyle: pyformat, format, named, qmark, numeric (:1) or dollar ($1)."""
        if paramstyle not in PARAMSTYLES:
            raise ValueError(f"paramstyle must be one of {', '.join(PARAMSTYLES)}, got {paramstyle!r}")
        names: list[str] = []

        def place(match: re.Match[str]) -> str:
            names.append(match[1])
            return PARAMSTYLES[paramstyle](match[1], len(names))

        sql = _PARAMETER.sub(place, self._statement.sql)
        values = self._values
        return sql, values if paramstyle in _STYLES_BY_NAME else tuple(values[name] for name in names)


# --- running over psycopg's cursors


StatementCall = tuple[Statement, "Mapping[str, Any]"]  # a statement and its parameters


async def run(
    connection: Connection, statement: Statement, parameters: Mapping[str, Any], *, prepare: bool | None = None
) -> list[DictRow]:
    """Run one statement and return its rows. By default, psycopg prepares a statement that is repeated."""
    with translated(connection):
        return await (await connection.execute(statement.sql, parameters, prepare=prepare)).fetchall()


async def run_pipeline(connection: Connection, calls: Sequence[StatementCall]) -> list[list[DictRow]]:
    """Run statements in one round trip and return the rows of each.

    They run in the given order and in the open transaction; after a refused one, the rest has not run.
    """
    with translated(connection):
        async with connection.pipeline():
            cursors = [await connection.execute(statement.sql, parameters) for statement, parameters in calls]
        return [await cursor.fetchall() if cursor.description is not None else [] for cursor in cursors]


@asynccontextmanager
async def pipelined_transaction(
    connection: Connection,
) -> AsyncIterator[Callable[[StatementCall], Awaitable[AsyncCursor[DictRow]]]]:
    """Open a transaction whose statements are sent without waiting; yield the function that sends one.

    The first fetch from a cursor waits for all statements that were sent before.
    """

    async def send(call: StatementCall) -> AsyncCursor[DictRow]:
        statement, parameters = call
        return await connection.execute(statement.sql, parameters)

    with translated(connection):
        async with connection.pipeline(), transaction(connection):
            yield send


async def run_in_order(connection: Connection, calls: Sequence[StatementCall]) -> None:
    """Run statements one after the other, without their rows; for one or two that is faster than a pipeline."""
    with translated(connection):
        for statement, parameters in calls:
            await connection.execute(statement.sql, parameters)


# --- running prepared, below the cursors


class _Session:
    """State of one connection: how it dumps and loads values, and the names of its prepared statements.

    `kept` are those that may be used in a transaction, because nothing but the user's SQL removes them.
    """

    __slots__ = ("count", "kept", "names", "values")

    def __init__(self, connection: Connection) -> None:
        self.values = Transformer(connection)
        self.names: dict[str, bytes] = {}
        self.kept: set[str] = set()
        self.count = 0


_sessions: WeakKeyDictionary[Connection, _Session] = WeakKeyDictionary()


async def run_prepared(
    connection: Connection, statement: Statement, parameters: Mapping[str, Any], row: Callable[[Sequence[Any]], T]
) -> list[T]:
    """Run one statement, which its first run prepares, and return its rows, each made by `row` from its values."""
    return await _run_prepared(connection, statement, parameters, lambda _: row)


async def read_prepared(
    connection: Connection, statement: Statement, parameters: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Run one statement, which its first run prepares, and return its rows as dicts."""
    return await _run_prepared(connection, statement, parameters, _dict_maker)


def _dict_maker(result: PGresult) -> Callable[[Sequence[Any]], dict[str, Any]]:
    names = [(result.fname(column) or b"").decode() for column in range(result.nfields)]
    return lambda values: dict(zip(names, values, strict=True))


async def _run_prepared(
    connection: Connection,
    statement: Statement,
    parameters: Mapping[str, Any],
    row_maker: Callable[[PGresult], Callable[[Sequence[Any]], T]],
) -> list[T]:
    session = _session_of(connection)
    sql, names = _with_numbered_parameters(statement.sql)
    with translated(connection):
        async with connection.lock:
            values = session.values.dump_sequence([parameters[name] for name in names], [PyFormat.TEXT] * len(names))
            try:
                result = await _execute(connection, session, statement.name, sql, values)
            except psycopg.Error as error:
                if error.sqlstate not in _STALE_STATEMENT or not _is_idle(connection.pgconn):
                    raise
                # It has not run. psycopg's cursors deallocate all prepared statements after a rollback.
                session.names.pop(statement.name, None)
                result = await _execute(connection, session, statement.name, sql, values)
            session.values.set_pgresult(result)
            rows = session.values.load_rows(0, result.ntuples, row_maker(result))
            session.values.set_pgresult(None)
            return rows


def _session_of(connection: Connection) -> _Session:
    session = _sessions.get(connection)
    if session is None:
        session = _sessions[connection] = _Session(connection)
    return session


async def prepare(connection: Connection, statement: Statement) -> None:
    """Prepare a statement for use in later transactions of a connection, on which psycopg never rolls back.

    `run_prepared` prepares nothing in a transaction, which a stale statement would abort: psycopg's own rollback
    removes all prepared statements. Does nothing if it is prepared, or behind a pooler.
    """
    session = _session_of(connection)
    if connection.prepare_threshold is None or statement.name in session.kept:
        return
    sql, _ = _with_numbered_parameters(statement.sql)
    with translated(connection):
        async with connection.lock:
            await _prepare(connection, session, statement.name, sql)
    session.kept.add(statement.name)


def forget_prepared(connection: Connection) -> None:
    """Note that all prepared statements of a connection are removed."""
    session = _session_of(connection)
    session.names.clear()
    session.kept.clear()


@cache
def _with_numbered_parameters(sql: str) -> tuple[bytes, tuple[str, ...]]:
    """Replace named parameters by numbered ones; return the names in the order of the numbers."""
    numbers: dict[str, int] = {}

    def replace(found: re.Match[str]) -> str:
        return "%" if found[1] is None else f"${numbers.setdefault(found[1], len(numbers) + 1)}"

    return _PARAMETER.sub(replace, sql).encode(), tuple(numbers)


async def _execute(
    connection: Connection, session: _Session, statement: str, sql: bytes, values: Sequence[Buffer | None]
) -> PGresult:
    pgconn = connection.pgconn
    # Not prepared behind a pooler, nor in a transaction, which a stale statement would abort.
    if connection.prepare_threshold is None or not (_is_idle(pgconn) or statement in session.kept):
        pgconn.send_query_params(sql, values, result_format=Format.BINARY)
        return await _fetch_result(connection)
    name = session.names.get(statement) or await _prepare(connection, session, statement, sql)
    pgconn.send_query_prepared(name, values, result_format=Format.BINARY)
    return await _fetch_result(connection)


async def _prepare(connection: Connection, session: _Session, statement: str, sql: bytes) -> bytes:
    session.count += 1
    name = f"interlock_{session.count}".encode()
    connection.pgconn.send_prepare(name, sql)
    await _fetch_result(connection)
    session.names[statement] = name
    return name


def _is_idle(pgconn: PGconn) -> bool:
    return pgconn.transaction_status == TransactionStatus.IDLE


async def _fetch_result(connection: Connection) -> PGresult:
    """Wait for the result of the query that was sent; raise it if it is an error."""
    pgconn = connection.pgconn
    # flush() is not 0 when the socket took only a part of the query: psycopg sends the rest
    results = await (connection.wait(generators.execute(pgconn)) if pgconn.flush() else _fetch_all(connection))
    result: PGresult = results[-1]
    if result.status not in _SUCCESS:
        raise error_from_result(result)
    return result


async def _fetch_all(connection: Connection) -> Sequence[PGresult]:
    try:
        return await _read_results(connection)
    except asyncio.CancelledError:
        if connection.pgconn.transaction_status == TransactionStatus.ACTIVE:
            with suppress(psycopg.Error):
                await connection.cancel_safe(timeout=CANCEL_TIMEOUT_S)
                await connection.wait(generators.fetch_many(connection.pgconn), timeout=CANCEL_TIMEOUT_S)
        raise


async def _read_results(connection: Connection) -> Sequence[PGresult]:
    """Read results from the socket. Its reader is removed at once: another connection may get the same descriptor."""
    pgconn, socket = connection.pgconn, connection.pgconn.socket
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[PGresult]] = loop.create_future()
    loop.add_reader(socket, _read_available, pgconn, future, [])
    try:
        return await future
    finally:
        loop.remove_reader(socket)


def _read_available(pgconn: PGconn, future: asyncio.Future[list[PGresult]], results: list[PGresult]) -> None:
    """Consume the input that has arrived; complete the future with the last result."""
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
        if results:  # the server's own message, sent before it closed the connection
            future.set_result(results)
        else:
            future.set_exception(error)
