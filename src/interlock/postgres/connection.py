"""Where the database is, how to connect to it, and how its refusals become Python errors.

Invariant: the SQLSTATEs of the guards never reach a caller as driver errors; no message shows a password.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import orjson
from psycopg.types.array import ListDumper

if TYPE_CHECKING:
    from psycopg.abc import Buffer, DumperKey
    from psycopg.adapt import PyFormat
    from psycopg.types.array import BaseListDumper

from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
    from typing_extensions import TypeIs

import json
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import DictRow, args_row, dict_row
from psycopg.types.json import set_json_loads
from psycopg_pool import AsyncConnectionPool, PoolTimeout

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
from interlock.postgres.embedded.server import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from interlock.config import Config


Connection = psycopg.AsyncConnection[DictRow]

POOLED = "pgbouncer=true"

# SQLSTATEs that callers tell apart
INSUFFICIENT_PRIVILEGE = "42501"
LOCK_NOT_AVAILABLE = "55P03"
DEADLOCK_DETECTED = "40P01"
UNIQUE_VIOLATION = "23505"
DATA_EXCEPTION_CLASS, INTEGRITY_VIOLATION_CLASS = "22", "23"

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
        if refusal is None and connection.closed:
            refusal = DisconnectedError(_in_one_line(error))
        elif refusal is None:
            refusal = StatementError(_in_one_line(error), sqlstate=error.sqlstate or "")
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


# SECTION store/pool
# The connections of one app: opened as needed, given back after use, replaced when they died at rest.
#
# Invariant: a connection that is handed out was alive a moment ago, and is in no transaction.

TIMEOUT = 30.0  # to wait for a connection that is free
FRESH = 1.0  # a connection that was used this many seconds ago is not asked whether it lives


class Pool:
    """Hands out connections to one database."""

    def __init__(self, url: str, *, max_size: int = 10, timeout: float = TIMEOUT) -> None:
        self._used_at: WeakKeyDictionary[psycopg.AsyncConnection[Any], float] = WeakKeyDictionary()
        self._timeout = timeout
        arguments = dialling(url)
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection[DictRow]] = AsyncConnectionPool(
            arguments.pop("conninfo"),
            connection_class=psycopg.AsyncConnection[DictRow],
            kwargs=arguments,
            min_size=1,
            max_size=max_size,
            timeout=timeout,
            num_workers=2,
            open=False,
            configure=_configure,
            check=self._check,
        )

    async def open(self) -> None:
        """Begin to connect, without waiting for it."""
        await self._pool.open()

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Lend a connection that commits each statement unless told otherwise."""
        try:
            connection = await self._pool.getconn()
        except PoolTimeout:
            raise DisconnectedError(f"no connection to the database could be had in {self._timeout:g} s") from None
        try:
            yield connection
        finally:
            self._used_at[connection] = time.monotonic()
            await self._pool.putconn(connection)

    async def _check(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Ask a connection that rested whether it lives: a server that restarted meanwhile is no user's error."""
        if time.monotonic() - self._used_at.get(connection, 0.0) > FRESH:
            await self._pool.check_connection(connection)


async def _configure(connection: psycopg.AsyncConnection[Any]) -> None:
    prepare(connection)


# SECTION store/lending
# A user's own connection, used for a moment as one of ours.
#
# Invariant: it comes back as it was, in the same transaction: nothing here commits or rolls back what is the user's.


@asynccontextmanager
async def lent(connection: AsyncConnection | SyncConnection) -> AsyncIterator[Connection]:
    """Give a user's connection with the rows and cursors that our statements expect."""
    if is_blocking(connection):
        raise InputError("this needs an async psycopg connection (psycopg.AsyncConnection), not a blocking one")
    rows, cursors = connection.row_factory, connection.cursor_factory
    connection.row_factory = cast("Any", dict_row)
    connection.cursor_factory = psycopg.AsyncCursor
    try:
        with translated(connection):
            if not connection.autocommit:
                # begins the user's transaction, if it has not begun: blocks of ours are then parts of it
                await connection.execute("select 1")
            yield connection
    finally:
        connection.row_factory, connection.cursor_factory = rows, cursors


@asynccontextmanager
async def cursor_on(
    connection: AsyncConnection, make_row: Callable[..., Any] | None = None
) -> AsyncIterator[psycopg.AsyncCursor[Any]]:
    """Open a cursor on a user's connection, whatever its factories are; rows are dicts unless `make_row` is given."""
    with translated(connection):
        async with psycopg.AsyncCursor(connection, row_factory=_row_factory(make_row)) as cursor:
            yield cursor


@contextmanager
def blocking_cursor_on(
    connection: SyncConnection, make_row: Callable[..., Any] | None = None
) -> Iterator[psycopg.Cursor[Any]]:
    """Do the same on a blocking connection."""
    with translated(connection), psycopg.Cursor(connection, row_factory=_row_factory(make_row)) as cursor:
        yield cursor


def _row_factory(make_row: Callable[..., Any] | None) -> Any:
    return dict_row if make_row is None else args_row(make_row)


def is_in_transaction(connection: Connection) -> bool:
    """Tell whether a transaction is open on a connection."""
    return connection.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE


# SECTION store/pipeline
# Several statements in one trip to the database.
#
# Invariant: they run in the order in which they are given, in the transaction that is open; when one is refused, those
# behind it have not run.


AsyncConnection = psycopg.AsyncConnection[Any]


SyncConnection = psycopg.Connection[Any]


def is_blocking(connection: AsyncConnection | SyncConnection) -> TypeIs[SyncConnection]:
    """Tell which kind of psycopg connection this is; anything else is refused by name."""
    if isinstance(connection, psycopg.Connection):
        return True
    if isinstance(connection, psycopg.AsyncConnection):
        return False
    raise TypeError(
        f"a psycopg connection is needed, not {type(connection).__module__}.{type(connection).__qualname__}; "
        "for every other driver there is enqueue_statement()"
    )


class ArrayDumper(ListDumper):
    """Writes lists of ids and numbers, which every batch is full of, ten times as fast as the driver does."""

    def get_key(self, obj: list[Any], format: PyFormat) -> DumperKey:  # noqa: A002 - the driver's word
        """Take plain lists for what they are; of others the driver asks what is in them."""
        return self.cls if _is_plain(obj) else super().get_key(obj, format)

    def upgrade(self, obj: list[Any], format: PyFormat) -> BaseListDumper:  # noqa: A002 - the driver's word
        """Leave others to the driver."""
        return self if _is_plain(obj) else super().upgrade(obj, format)

    def dump(self, obj: list[Any]) -> Buffer | None:
        """Write a list."""
        # JSON's, in which only the brackets differ; which type it is follows from where it stands
        return b"{" + orjson.dumps(obj)[1:-1] + b"}" if _is_plain(obj) else super().dump(obj)


def _is_plain(values: list[Any]) -> bool:
    return bool(values) and type(values[0]) in _PLAIN and {*map(type, values)} <= _PLAIN


_PLAIN = frozenset({UUID, int})
