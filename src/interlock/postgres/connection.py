"""Connections to PostgreSQL: the URL of the server, single connections, the pool, and connections of the user.

Invariant: the SQLSTATEs of the guards never reach a caller as errors of the driver, and no message shows a password.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID
from weakref import WeakKeyDictionary

import orjson
import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import DictRow, args_row, dict_row
from psycopg.types.array import ListDumper
from psycopg.types.json import set_json_loads
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from interlock.errors import (
    ConfigError,
    DisconnectedError,
    FenceError,
    IllegalTransition,
    ImmutableRecordError,
    InputError,
    InterlockError,
    JobConflictError,
    StatementError,
    UnfinishedWorkError,
)
from interlock.postgres.embedded.server import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from psycopg.abc import Buffer, DumperKey
    from psycopg.adapt import PyFormat
    from psycopg.types.array import BaseListDumper
    from typing_extensions import TypeIs

    from interlock.config import Config

Connection = psycopg.AsyncConnection[DictRow]
AsyncConnection = psycopg.AsyncConnection[Any]
SyncConnection = psycopg.Connection[Any]

PGBOUNCER_FLAG = "pgbouncer=true"  # a parameter of the URL that libpq does not know
CONNECT_TIMEOUT_S = 10
PREPARE_THRESHOLD = 5  # runs of a statement over a cursor, after which psycopg prepares it
POOL_TIMEOUT_S = 30.0  # to wait for a free connection
KEEP_IDLE_S = 60.0  # pooled connections beyond the first, which an app that only runs workers does not keep either
KEEP_AT_HAND_S = 10.0  # that a connection stays out of the pool, which ends its life some time
CHECK_AFTER_IDLE_S = 1.0  # a pooled connection that was idle for longer is checked before use
# The pool doubles its pauses between failed connects from one second on, for so long; then it begins anew.
RECONNECT_WINDOW_S = 5.0
REGROW_WAIT_S = 0.001  # in the queue of the pool, which makes it begin anew

# SQLSTATEs that callers handle
INSUFFICIENT_PRIVILEGE = "42501"
LOCK_NOT_AVAILABLE = "55P03"
DEADLOCK_DETECTED = "40P01"
QUERY_CANCELED = "57014"  # also by statement_timeout
UNIQUE_VIOLATION = "23505"
DATA_EXCEPTION_CLASS, INTEGRITY_VIOLATION_CLASS = "22", "23"
IN_FAILED_TRANSACTION = "25P02"
NOT_IN_PREREQUISITE_STATE = "55000"

# Refusals that the values of a statement cause: data, constraint, check option, size, an exception of a trigger.
_VALUE_CLASSES = frozenset({DATA_EXCEPTION_CLASS, INTEGRITY_VIOLATION_CLASS, "44", "54", "P0"})
_INTERNAL_ERROR, _TOO_LARGE = "XX000", "invalid memory alloc request size"  # of a value, whatever memory there is
# Refusals that another session may not give: of the connection and the transaction, a standby among them, and of a
# prepared statement that is gone, exists twice or has another result type.
_SESSION_CLASSES = frozenset({"08", "25"})
_SESSION_CODES = frozenset({"26000", "42P05", "0A000"})

_ILLEGAL_TRANSITIONS = frozenset({"IL001", "IL002", "IL003"})
_GUARD_ERRORS: Mapping[str, type[InterlockError]] = {
    "IL004": ImmutableRecordError,
    "IL005": FenceError,
    "IL006": UnfinishedWorkError,
    "IL007": InputError,
    "IL008": JobConflictError,
    "IL009": InputError,
}


# --- where the server is


@contextmanager
def database_url(config: Config, report_progress: Callable[[str], None] | None = None) -> Iterator[str]:
    """Give the URL of the configured server, or run the embedded one for as long as the context lasts."""
    if config.database_url is not None:
        yield validate_database_url(config.database_url)
        return
    server = embedded_server(config, report_progress)
    if report_progress is not None:
        report_progress(f"database: the embedded server in {server.data_dir}, as no database URL is set")
    with server:
        yield server.url()


def embedded_server(config: Config, report_progress: Callable[[str], None] | None = None) -> EmbeddedServer:
    """Return the embedded server; ConfigError if the settings do not allow it."""
    if not config.allows_embedded:
        cause = "embedded = false" if config.embedded is False else f"profile = {config.profile}"
        raise ConfigError(
            f"no database is configured, and the embedded server is not allowed ({cause}): set "
            "INTERLOCK_DATABASE_URL to postgresql://USER:PASSWORD@HOST/DATABASE, or `database_url` in interlock.toml"
        )
    return EmbeddedServer(config.data_dir, report_progress=report_progress)


def validate_database_url(url: str) -> str:
    """Raise ConfigError for a URL that libpq cannot parse; libpq's message is not shown, as it may quote a password."""
    try:
        ports = str(conninfo_to_dict(connection_arguments(url)["conninfo"]).get("port", "")).split(",")
    except psycopg.Error:
        ports = ["unknown"]
    if not all(port.isdecimal() or port == "" for port in ports):
        raise ConfigError("the database URL is not valid; it is not shown here, because it may hold a password")
    return url


def connection_arguments(url: str) -> dict[str, Any]:
    """Return the arguments with which psycopg connects to a URL.

    `pgbouncer=true` in the URL announces a pooler in transaction mode. Nothing is prepared then, because the next
    statement may run in another session.
    """
    pooled = PGBOUNCER_FLAG in url
    # not by a URL parser: libpq accepts URLs that others refuse
    plain = url
    if pooled:
        plain = url.replace(f"?{PGBOUNCER_FLAG}&", "?").replace(f"&{PGBOUNCER_FLAG}", "")
        plain = plain.replace(f"?{PGBOUNCER_FLAG}", "")
    return {
        "conninfo": plain,
        "prepare_threshold": None if pooled else PREPARE_THRESHOLD,
        "autocommit": True,
        "row_factory": dict_row,
        "fallback_application_name": "interlock",
        "connect_timeout": CONNECT_TIMEOUT_S,
    }


def _describe_server(url: str) -> str:
    """Name a server without its secrets."""
    try:
        parts = conninfo_to_dict(connection_arguments(url)["conninfo"])
    except psycopg.Error:
        return "the database"
    host, port = parts.get("host", "the local server"), parts.get("port")
    return f"{parts.get('dbname', 'the database')} at {host}{f':{port}' if port else ''}"


# --- single connections


@asynccontextmanager
async def connect(
    url: str, *, few_statements: bool = False, lock_timeout: str | None = None, idle_timeout: str | None = None
) -> AsyncIterator[Connection]:
    """Open one autocommit connection.

    A connection for a few statements that run again and again, such as claim and settle, uses generic plans: planning
    a claim takes the server longer than running it. The EXPLAIN tests hold that one plan suits all parameters.
    `idle_timeout` ends the session when a transaction stays open without a statement, as of a client that is frozen.
    Nothing of that is set behind a pooler, which gives the session to others.

    Transactions are read committed, whatever the role or the database has as its default: a statement after a lock must
    see what the last holder of the lock has committed. Behind a pooler this holds for transaction blocks only.

    No error of the driver leaves the context: those that are not caught inside become InterlockErrors.
    """
    validate_database_url(url)
    try:
        connection: Connection = await psycopg.AsyncConnection.connect(**connection_arguments(url))
    except psycopg.Error as error:
        raise DisconnectedError(f"cannot connect to {_describe_server(url)}: {str(error).strip()}") from None
    configure_adapters(connection)
    # Twice: leaving the inner context closes the connection, after which a lost one and a refusal look the same.
    with translated(connection):
        async with connection:
            with translated(connection):
                await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
                if PGBOUNCER_FLAG not in url:
                    await connection.execute("set default_transaction_isolation = 'read committed'")
                if few_statements and PGBOUNCER_FLAG not in url:
                    # enable_seqscan = off: a plan made while a table is small must not scan it once it has grown
                    await connection.execute("set plan_cache_mode = force_generic_plan; set enable_seqscan = off")
                for name, value in (
                    ("lock_timeout", lock_timeout),
                    ("idle_in_transaction_session_timeout", idle_timeout),
                ):
                    if value is not None and PGBOUNCER_FLAG not in url:
                        await connection.execute("select set_config(%s, %s, false)", [name, value])
                yield connection


@asynccontextmanager
async def transaction(connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[None]:
    """Open a transaction, or a savepoint in an open one; errors of BEGIN and COMMIT are translated too."""
    with translated(connection):
        async with connection.transaction():
            yield


@asynccontextmanager
async def read_committed_transaction(connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[None]:
    """Open a transaction that is read committed, whatever the default of the session is."""
    async with transaction(connection):
        with translated(connection):
            await connection.execute("set transaction isolation level read committed")
        yield


def is_idle(connection: Connection) -> bool:
    """Tell whether a connection is open, in no transaction and runs no statement."""
    return connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE


def is_in_transaction(connection: Connection) -> bool:
    """Tell whether a transaction is open on a connection."""
    return not is_idle(connection)


# --- errors


@contextmanager
def translated(connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any]) -> Iterator[None]:
    """Turn errors of the driver into InterlockErrors; DisconnectedError if the connection is closed."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise StatementError(f"text must be valid Unicode, got {error.object[:100]!r}") from error
    except psycopg.Error as error:
        refusal = _guard_error(error)
        if refusal is None and connection.closed:
            refusal = DisconnectedError(_in_one_line(error))
        elif refusal is None:
            refusal = StatementError(_in_one_line(error), sqlstate=error.sqlstate or "")
        raise refusal from error


def _guard_error(error: psycopg.Error) -> InterlockError | None:
    message, code = error.diag.message_primary or str(error), error.sqlstate or ""
    if code in _GUARD_ERRORS:
        return _GUARD_ERRORS[code](message)
    if code not in _ILLEGAL_TRANSITIONS:
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
    """Return message and detail without the further lines in which libpq guesses at causes."""
    primary, detail = error.diag.message_primary, error.diag.message_detail
    text = primary or str(error).strip().partition("\n")[0] or type(error).__name__
    return f"{text}: {detail}" if detail else text


def is_fault_of_values(error: Exception) -> bool:
    """Tell whether an error of a statement is caused by its values, so that repeating it is of no use.

    Errors of encoders and refusals of the guards are. A lost connection, a lock, a full disk, a missing right, a
    statement that is no longer prepared and everything else that has a cause outside the statement is not.
    """
    if isinstance(error, DisconnectedError):
        return False
    if not isinstance(error, StatementError):
        return True
    if error.sqlstate == _INTERNAL_ERROR:
        return _TOO_LARGE in str(error)
    return (
        not error.sqlstate or error.sqlstate[:2] in _VALUE_CLASSES
    )  # without a code, it was refused before it was sent


def is_fault_of_session(error: Exception) -> bool:
    """Tell whether a new connection may help against a refusal."""
    code = error.sqlstate if isinstance(error, StatementError) else ""
    return code in _SESSION_CODES or code[:2] in _SESSION_CLASSES


# --- values


class UnreadableJson(dict[str, Any]):
    """Stands for JSON that PostgreSQL stores and Python cannot parse; every look-up in it gives None."""

    def __init__(self) -> None:
        super().__init__(unreadable="JSON that is nested too deeply, or has a number of too many digits")

    def __missing__(self, key: str) -> None:
        return None


def configure_adapters(connection: psycopg.AsyncConnection[Any]) -> None:
    """Make this connection load JSON and dump arrays fast. Not globally: the application may use psycopg itself."""
    set_json_loads(_load_json, connection)
    connection.adapters.register_dumper(list, ArrayDumper)


def _load_json(data: str | bytes) -> Any:
    """Parse JSON; UnreadableJson if Python cannot, so that the other columns and rows are still read.

    PostgreSQL stores numbers beyond the range of floats. orjson refuses them; the standard library reads infinity.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):  # thousands of digits, or lists nested thousands deep
            return UnreadableJson()


class ArrayDumper(ListDumper):
    """Dumps lists of UUIDs and ints, of which batches consist, ten times as fast as psycopg's dumper."""

    def get_key(self, obj: list[Any], format: PyFormat) -> DumperKey:  # noqa: A002 - psycopg's name
        """Return one key for all lists of UUIDs and ints; psycopg inspects the elements of others."""
        return self.cls if _is_plain(obj) else super().get_key(obj, format)

    def upgrade(self, obj: list[Any], format: PyFormat) -> BaseListDumper:  # noqa: A002 - psycopg's name
        """Keep this dumper for lists of UUIDs and ints; psycopg chooses one for others."""
        return self if _is_plain(obj) else super().upgrade(obj, format)

    def dump(self, obj: list[Any]) -> Buffer | None:
        """Dump a list as an array literal."""
        # JSON with other brackets; the server derives the type from the statement
        return b"{" + orjson.dumps(obj)[1:-1] + b"}" if _is_plain(obj) else super().dump(obj)


def _is_plain(values: list[Any]) -> bool:
    return bool(values) and type(values[0]) in _PLAIN_TYPES and {*map(type, values)} <= _PLAIN_TYPES


_PLAIN_TYPES = frozenset({UUID, int})


# --- the pool of an app


@dataclass(slots=True)
class _Borrowed:
    """A connection that is out of the pool since a time, and when it was last used."""

    connection: Connection
    since: float
    used_at: float = 0.0


class _Loan:
    """The context in which a caller has a connection of the pool."""

    __slots__ = ("_borrowed", "_pool")

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    async def __aenter__(self) -> Connection:
        self._borrowed = await self._pool.borrow()
        return self._borrowed.connection

    async def __aexit__(self, *_: object) -> None:
        await self._pool.give_back(self._borrowed)


class ConnectionPool:
    """The connections of one app: opened as needed, returned after use, replaced when they died while idle.

    The one that was used last is kept at hand for a second, because the pool's way to hand it out takes longer than the
    round trip of a small statement.

    Invariant: a connection that is handed out was alive within the last second and is in no transaction. No caller
    waits for the pool while a connection is kept at hand.
    """

    def __init__(
        self, url: str, *, max_size: int = 10, timeout_s: float = POOL_TIMEOUT_S, keep_one: bool = True
    ) -> None:
        self._used_at: WeakKeyDictionary[psycopg.AsyncConnection[Any], float] = WeakKeyDictionary()
        self._timeout_s = timeout_s
        self._spare: _Borrowed | None = None
        self._waiting = 0  # callers that wait for the pool
        self._is_open = True
        self._timer: asyncio.TimerHandle | None = None
        self._returning: asyncio.Task[None] | None = None
        arguments = connection_arguments(url)
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection[DictRow]] = AsyncConnectionPool(
            arguments.pop("conninfo"),
            connection_class=psycopg.AsyncConnection[DictRow],
            kwargs=arguments,
            min_size=int(keep_one),
            max_size=max_size,
            max_idle=KEEP_IDLE_S,
            timeout=timeout_s,
            reconnect_timeout=RECONNECT_WINDOW_S,
            reconnect_failed=self._connect_for_waiting,
            num_workers=2,
            open=False,
            configure=_configure_pooled,
            check=self._check_if_idle,
        )

    async def open(self) -> None:
        """Start to connect, without waiting for it."""
        await self._pool.open()

    async def close(self) -> None:
        """Close all connections."""
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self._return_spare()
        if self._returning is not None:
            await self._returning
        await self._pool.close()

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """Hand out an autocommit connection for the time of the context."""
        return _Loan(self)

    async def borrow(self) -> _Borrowed:
        """Take the connection that is kept at hand if there is one, else one of the pool."""
        spare, self._spare = self._spare, None
        if spare is not None:
            if time.monotonic() - spare.used_at < CHECK_AFTER_IDLE_S:
                return spare
            await self._put_back(spare)
        cancellations = _count_cancellations()
        self._waiting += 1
        try:
            connection = await self._pool.getconn()
        except PoolTimeout:
            raise DisconnectedError(f"no connection to the database could be had in {self._timeout_s:g} s") from None
        finally:
            self._waiting -= 1
        borrowed = _Borrowed(connection, time.monotonic())
        # psycopg_pool swallows a cancellation that arrives together with the connection. Cleanup code may run in a
        # task that was cancelled before.
        if _count_cancellations() > cancellations:
            await self._put_back(borrowed)
            raise asyncio.CancelledError
        return borrowed

    async def give_back(self, borrowed: _Borrowed) -> None:
        """Keep a connection at hand for the next caller, unless one waits; the pool gets it back now and then."""
        borrowed.used_at = now = time.monotonic()
        if (
            self._spare is not None
            or self._waiting
            or not self._is_open
            or now - borrowed.since > KEEP_AT_HAND_S
            or not is_idle(borrowed.connection)
        ):
            await self._put_back(borrowed)
            return
        self._spare = borrowed
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_AFTER_IDLE_S, self._return_if_idle)

    def _return_if_idle(self) -> None:
        self._timer = None
        if self._spare is None:
            return
        idle_s = time.monotonic() - self._spare.used_at
        if idle_s >= CHECK_AFTER_IDLE_S:
            self._return_spare()
        else:
            self._timer = asyncio.get_running_loop().call_later(CHECK_AFTER_IDLE_S - idle_s, self._return_if_idle)

    def _return_spare(self) -> None:
        if self._spare is not None:
            self._returning = asyncio.create_task(self._put_back(self._spare), name="interlock return connection")
            self._spare = None

    async def _connect_for_waiting(self, _: object) -> None:
        """Begin anew to connect if callers wait; for the next caller the pool does so by itself, without a pause."""
        if self._waiting:
            with suppress(PoolTimeout, PoolClosed):
                await self._pool.putconn(await self._pool.getconn(REGROW_WAIT_S))

    async def _put_back(self, borrowed: _Borrowed) -> None:
        self._used_at[borrowed.connection] = borrowed.used_at
        await self._pool.putconn(borrowed.connection)

    async def _check_if_idle(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Check a connection that was idle, so that a restart of the server meanwhile is not the caller's error."""
        if time.monotonic() - self._used_at.get(connection, 0.0) > CHECK_AFTER_IDLE_S:
            await self._pool.check_connection(connection)


def _count_cancellations() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def _configure_pooled(connection: psycopg.AsyncConnection[Any]) -> None:
    configure_adapters(connection)


# --- connections of the user


def is_blocking(connection: AsyncConnection | SyncConnection) -> TypeIs[SyncConnection]:
    """Tell whether a psycopg connection is a blocking one; raise TypeError for any other object."""
    if isinstance(connection, psycopg.Connection):
        return True
    if isinstance(connection, psycopg.AsyncConnection):
        return False
    raise TypeError(
        f"a psycopg connection is needed, not {type(connection).__module__}.{type(connection).__qualname__}; "
        "for every other driver there is enqueue_statement()"
    )


@asynccontextmanager
async def user_connection(connection: AsyncConnection | SyncConnection) -> AsyncIterator[Connection]:
    """Give a user's connection the row and cursor factories that our statements expect, for the time of the context.

    Its transaction stays the user's: nothing here commits or rolls it back.
    """
    if is_blocking(connection):
        raise InputError("this needs an async psycopg connection (psycopg.AsyncConnection), not a blocking one")
    rows, cursors = connection.row_factory, connection.cursor_factory
    connection.row_factory = cast("Any", dict_row)
    connection.cursor_factory = psycopg.AsyncCursor
    try:
        with translated(connection):
            if not connection.autocommit:
                # begins the user's transaction if it has not begun, so that our transaction blocks are savepoints in it
                await connection.execute("select 1")
            yield connection
    finally:
        connection.row_factory, connection.cursor_factory = rows, cursors


@asynccontextmanager
async def cursor_on(
    connection: AsyncConnection, make_row: Callable[..., Any] | None = None
) -> AsyncIterator[psycopg.AsyncCursor[Any]]:
    """Open a cursor on a user's connection, whatever its factories; rows are dicts unless `make_row` is given."""
    with translated(connection):
        async with psycopg.AsyncCursor(connection, row_factory=_row_factory(make_row)) as cursor:
            yield cursor


@contextmanager
def blocking_cursor_on(
    connection: SyncConnection, make_row: Callable[..., Any] | None = None
) -> Iterator[psycopg.Cursor[Any]]:
    """Open a cursor on a user's blocking connection, in the same way."""
    with translated(connection), psycopg.Cursor(connection, row_factory=_row_factory(make_row)) as cursor:
        yield cursor


def _row_factory(make_row: Callable[..., Any] | None) -> Any:
    return dict_row if make_row is None else args_row(make_row)
