"""The few statements on which everything waits, at less cost than over a cursor of the driver's.

Invariant: what is sent, what is read and what is raised are the same as over a cursor; only the turns of the event loop
and the objects in between are fewer. To whoever is cancelled the server's answer is as lost as the driver makes it.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg import generators
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, Format, TransactionStatus

from interlock.store.database import translated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from psycopg.abc import Buffer
    from psycopg.pq.abc import PGconn, PGresult

    from interlock.store.database import Connection
    from interlock.store.statements import Statement

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
