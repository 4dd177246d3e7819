"""Where the database is, how to connect to it, and how its refusals become Python errors.

Invariant: the SQLSTATEs of the guards never reach a caller as driver errors; no message shows a password.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import orjson
import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import DictRow, dict_row
from psycopg.types.json import Jsonb, set_json_loads

from interlock.errors import (
    ConfigError,
    DisconnectedError,
    FenceError,
    IllegalTransition,
    ImmutableRecordError,
    InputError,
    InterlockError,
    StatementError,
    UnfinishedWorkError,
)
from interlock.store.arrays import ArrayDumper
from interlock.store.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from interlock.config import Config
    from interlock.store.statements import Statement

Connection = psycopg.AsyncConnection[DictRow]

POOLED = "pgbouncer=true"

_REFUSALS: Mapping[str, type[InterlockError]] = {
    "IL004": ImmutableRecordError,
    "IL005": FenceError,
    "IL006": UnfinishedWorkError,
    "IL007": InputError,
}


class Unreadable(dict[str, Any]):
    """Stands for JSON that PostgreSQL holds and Python cannot read; nothing is found in it."""

    def __init__(self) -> None:
        super().__init__(unreadable="JSON that is nested too deeply, or has a number of too many digits")

    def __missing__(self, key: str) -> None:
        return None


@contextmanager
def database_url(config: Config, note: Callable[[str], None] | None = None) -> Iterator[str]:
    """Give the URL of the configured server, or run the embedded one for as long as the context lasts."""
    if config.database_url is not None:
        yield checked_url(config.database_url)
        return
    with EmbeddedServer(config.data_dir, note=note) as server:
        yield server.url()


def checked_url(url: str) -> str:
    """Refuse a URL that libpq cannot read, in words of our own: libpq's repeat parts of it, which may be a password."""
    try:
        ports = str(conninfo_to_dict(dialling(url)["conninfo"]).get("port", "")).split(",")
    except psycopg.Error:
        ports = ["unknown"]
    if not all(port.isdecimal() or port == "" for port in ports):
        raise ConfigError("the database URL is not valid; it is not shown here, because it may hold a password")
    return url


def dialling(url: str) -> dict[str, Any]:
    """Give the arguments with which the driver connects to a URL.

    `pgbouncer=true` in it, which libpq does not know, says that a pooler in transaction mode is there: then nothing
    may be prepared, because the next statement may go to another session.
    """
    pooled = POOLED in url
    # by hand, and not by a parser of URLs: libpq reads some that no other does
    plain = url.replace(f"?{POOLED}&", "?").replace(f"&{POOLED}", "").replace(f"?{POOLED}", "") if pooled else url
    return {
        "conninfo": plain,
        "prepare_threshold": None if pooled else 5,
        "autocommit": True,
        "row_factory": dict_row,
        "fallback_application_name": "interlock",
        "connect_timeout": 10,
    }


@asynccontextmanager
async def connect(url: str, *, few_statements: bool = False) -> AsyncIterator[Connection]:
    """Open one connection that commits each statement unless told otherwise.

    One for few statements, again and again, plans each of them once: the same plan is right whatever they are given,
    as tests see to. To plan a claim takes the server longer than to claim a task.

    No error of the driver leaves the context: what nobody catches in it becomes one of ours.
    """
    checked_url(url)
    try:
        connection: Connection = await psycopg.AsyncConnection.connect(**dialling(url))
    except psycopg.Error as error:
        raise DisconnectedError(f"cannot connect to {_described(url)}: {str(error).strip()}") from None
    prepare(connection)
    # Twice, because leaving the inner context closes the connection, and with it the way to tell what happened.
    with translated(connection):
        async with connection:
            with translated(connection):
                if few_statements and POOLED not in url:
                    # and no plan that was made while a table was small may scan it when it has grown
                    await connection.execute("set plan_cache_mode = force_generic_plan; set enable_seqscan = off")
                yield connection


def prepare(connection: psycopg.AsyncConnection[Any]) -> None:
    """Make a connection read JSON and write arrays fast; for this one only, since the driver may be the user's too."""
    set_json_loads(_read_json, connection)
    connection.adapters.register_dumper(list, ArrayDumper)


def _read_json(data: str | bytes) -> Any:
    """Read JSON; PostgreSQL keeps numbers beyond all floats, which the fast reader refuses: those are infinite.

    What Python cannot read at all is Unreadable: it must not keep what came with it from being read.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):  # thousands of digits, or lists in lists
            return Unreadable()


async def run(connection: Connection, statement: Statement, parameters: Mapping[str, Any]) -> list[DictRow]:
    """Run one named statement and give its rows."""
    with translated(connection):
        return await (await connection.execute(statement.sql, parameters)).fetchall()


def as_json(value: Any) -> Jsonb | None:
    """Wrap a value for a jsonb column; None stays null."""
    return None if value is None else Jsonb(value, orjson.dumps)


@asynccontextmanager
async def transaction(connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[None]:
    """Open a transaction, or a savepoint in one that is open; its begin and its end may fail like any statement."""
    with translated(connection):
        async with connection.transaction():
            yield


@contextmanager
def translated(connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any]) -> Iterator[None]:
    """Turn the driver's errors into those that the engine's callers know; a lost connection is told from a refusal."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise StatementError(f"text must be valid Unicode, and {error.object[:100]!r} is not") from error
    except psycopg.Error as error:
        refusal = _refusal(error)
        if refusal is None:
            refusal = (DisconnectedError if connection.closed else StatementError)(_in_one_line(error))
        raise refusal from error


def _refusal(error: psycopg.Error) -> InterlockError | None:
    message, code = error.diag.message_primary or str(error), error.sqlstate or ""
    if code in _REFUSALS:
        return _REFUSALS[code](message)
    if code not in ("IL001", "IL002", "IL003"):
        return None
    detail = json.loads(error.diag.message_detail or "{}")
    return IllegalTransition(
        message,
        machine=detail["machine"],
        row=detail["row"],
        from_state=detail["from"],
        to_state=detail["to"],
        allowed=detail["allowed"],
        sqlstate=code,
    )


def _in_one_line(error: psycopg.Error) -> str:
    """Say what the server or the driver said, without the many lines in which libpq guesses what it means."""
    primary, detail = error.diag.message_primary, error.diag.message_detail
    text = primary or str(error).strip().partition("\n")[0] or type(error).__name__
    return f"{text}: {detail}" if detail else text


def _described(url: str) -> str:
    """Name a server without its secrets."""
    try:
        parts = conninfo_to_dict(dialling(url)["conninfo"])
    except psycopg.Error:
        return "the database"
    host, port = parts.get("host", "the local server"), parts.get("port")
    return f"{parts.get('dbname', 'the database')} at {host}{f':{port}' if port else ''}"
