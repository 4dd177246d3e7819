"""Database sessions for the transactions of handlers: kept for a while after use, because connecting takes longer.

Invariant: a handler gets a session without any state that another one left, through a connection object of its own.
That object is closed when the handler's transaction ends, so that nothing can use the session through it later.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

import psycopg
from psycopg._preparing import PrepareManager
from psycopg.adapt import AdaptersMap
from psycopg.rows import dict_row

from interlock.errors import StoreError
from interlock.postgres.connection import PREPARE_THRESHOLD, connect, translated
from interlock.postgres.query import forget_prepared, prepare
from interlock.service import BackgroundTasks

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection
    from interlock.postgres.query import Statement

KEEP_IDLE_S = 10.0
_BEGIN = b"begin isolation level read committed"
# All that DISCARD ALL does, except that statements stay prepared; and the default of a new session.
_RESET = b"""
select pg_advisory_unlock_all(); close all; unlisten *; set session authorization default; reset all; discard temp;
discard sequences; set default_transaction_isolation = 'read committed'
"""
_CLOSED = psycopg.pq.PGconn.connect_start(b"")
_CLOSED.finish()


class HandlerTransaction:
    """The transaction of one handler: `connection` is for the handler, `session` for the engine after the handler."""

    __slots__ = ("_is_prepared", "_sessions", "_stack", "connection", "session")

    def __init__(self, sessions: TransactionSessions, session: Connection, stack: AsyncExitStack) -> None:
        self._sessions = sessions
        self._stack = stack
        self._is_prepared = sessions.prepares
        self.session = session
        self.connection = _lend(session)

    async def take_back(self) -> Connection:
        """Close the handler's connection object, once nothing runs on it; return the session with its transaction."""
        async with self.connection.lock:
            self.connection.pgconn = _CLOSED
        return self.session

    async def end(self, *, commit: bool) -> None:
        """Commit, which the database may refuse, or roll back; the session is kept for another handler."""
        try:
            await self.take_back()
            await self._sessions.finish(self.session, b"COMMIT" if commit else b"ROLLBACK")
        except BaseException:
            await self.abort()
            raise
        self._sessions.keep(self.session, self._stack, is_prepared=self._is_prepared)

    async def abort(self) -> None:
        """Close the session, which rolls back, without waiting for a leaked handler that is using it."""
        await self.session.close()
        with suppress(StoreError, OSError):
            await self._stack.aclose()


class _PreparedStatements(PrepareManager):
    """psycopg's prepared statements of a session, which it removes together with ours: after a rollback or a DROP."""

    def __init__(self, session: Connection) -> None:
        super().__init__()
        self._session = session

    def clear(self) -> bool:
        """Forget the statements that psycopg is about to remove from the session."""
        are_removed = super().clear()
        if are_removed:
            forget_prepared(self._session)
        return are_removed


def _lend(session: Connection) -> Connection:
    """Make a new connection object of a session, with the state of a new one."""
    lent: Connection = psycopg.AsyncConnection(session.pgconn, row_factory=dict_row)
    lent._adapters = AdaptersMap(session.adapters)  # noqa: SLF001 - set by connect() only
    lent._prepared = session._prepared  # noqa: SLF001 - the names of statements are the session's
    if session.prepare_threshold is not None:
        lent.prepare_threshold = PREPARE_THRESHOLD
    return lent


class TransactionSessions:
    """The sessions of a worker for transactional tasks, as many as run at once; idle ones are closed after a while."""

    def __init__(self, url: str, settle: Statement) -> None:
        self._url = url
        self._settle = settle
        self.prepares = True
        self._idle: list[tuple[float, Connection, AsyncExitStack]] = []
        self._closing: asyncio.TimerHandle | None = None
        self._leaving = BackgroundTasks()

    async def begin(self) -> HandlerTransaction:
        """Begin a transaction, in an idle session if there is one that still answers."""
        while self._idle:
            _, session, stack = self._idle.pop()
            try:
                await self._begin(session)
            except StoreError:
                await _close(session, stack)
            else:
                return HandlerTransaction(self, session, stack)
        async with AsyncExitStack() as opening:
            session = await opening.enter_async_context(connect(self._url))
            prepare_threshold = session.prepare_threshold
            session._prepared = _PreparedStatements(session)  # noqa: SLF001 - there is no other way
            session.prepare_threshold = prepare_threshold
            await self._begin(session)
            return HandlerTransaction(self, session, opening.pop_all())

    async def _begin(self, session: Connection) -> None:
        if self.prepares:
            await prepare(session, self._settle)
        await self._execute(session, _BEGIN)

    def stop_preparing(self) -> None:
        """Do not use prepared statements any more: something in the transactions of this worker removes them."""
        self.prepares = False
        while self._idle:
            self._leave(*self._idle.pop())

    async def finish(self, session: Connection, end: bytes) -> None:
        """End the transaction and reset the session, in one round trip."""
        is_pooled = session.prepare_threshold is None  # behind a pooler, another server session may follow
        await self._execute(session, end if is_pooled else end + b";" + _RESET)

    async def _execute(self, session: Connection, commands: bytes) -> None:
        with translated(session):
            await session.execute(commands, prepare=False)

    def keep(self, session: Connection, stack: AsyncExitStack, *, is_prepared: bool) -> None:
        """Keep a session for the next handler, for a while."""
        if is_prepared and not self.prepares:
            self._leave(0.0, session, stack)
            return
        self._idle.append((time.monotonic(), session, stack))
        if self._closing is None:
            self._closing = asyncio.get_running_loop().call_later(KEEP_IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        """Close the sessions that were idle for long, which are the first ones: the last one used is the next."""
        limit = time.monotonic() - KEEP_IDLE_S
        while self._idle and self._idle[0][0] <= limit:
            self._leave(*self._idle.pop(0))
        loop = asyncio.get_running_loop()
        self._closing = loop.call_later(KEEP_IDLE_S, self._close_idle) if self._idle else None

    def _leave(self, _: float, session: Connection, stack: AsyncExitStack) -> None:
        self._leaving.spawn("close session", _close(session, stack))

    async def close(self) -> None:
        """Close the idle sessions."""
        await self._leaving.stop()
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        while self._idle:
            _, session, stack = self._idle.pop()
            await _close(session, stack)


async def _close(session: Connection, stack: AsyncExitStack) -> None:
    await session.close()
    with suppress(StoreError, OSError):
        await stack.aclose()
