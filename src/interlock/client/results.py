"""Wakes whoever waits for the end of a task or a job: one listening connection for all of them, and looking beside it.

Invariant: a notification is a hint. When all are lost, or the listener is dead, the end is still found, by
looking about once a second at all that are waited for, in one statement.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from interlock.errors import StoreError
from interlock.postgres.connection import connect
from interlock.postgres.notifier import hear, listen, send_probe
from interlock.store.tasks import delete_waiters, find_ended, insert_waiters
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection

LOOK = 1.0  # seconds between two looks at everything that is waited for
# Seconds after which one looks again at what one has begun to wait for: whoever was just ending it may have looked for
# waiters before we came, and have committed after we looked.
SOON = (0.02, 0.1, 0.4)
MANY = 100  # waits that are over, after which they are forgotten even while others begin
SAY_AGAIN = 600.0  # seconds after which a waiter says that it still waits
PROBE = 15.0
PROBE_TIMEOUT = 5.0
_CHANNELS = ("interlock_done", "interlock_probe")


class Completions:
    """All that one app waits for."""

    def __init__(self, app: Interlock) -> None:
        self._app = app
        self._waiter = uuid4()
        self._futures: dict[UUID, set[asyncio.Future[None]]] = {}
        self._to_note: set[UUID] = set()
        self._to_look_at: set[UUID] = set()
        self._to_forget: set[UUID] = set()
        self._wake = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []
        self.rebuilt = 0  # how often the listening connection was lost

    async def wait(self, task_id: UUID) -> None:
        """Wait until a task or a job has ended, or is gone, or until somebody said so."""
        if not self._running:
            self._running = [asyncio.create_task(self._watch()), asyncio.create_task(self._listen())]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.setdefault(task_id, set()).add(future)
        self._to_note.add(task_id)
        self._wake.set()
        try:
            await future
        finally:
            others = self._futures.get(task_id, set())
            others.discard(future)
            if not others:
                self._futures.pop(task_id, None)
                self._to_forget.add(task_id)

    async def close(self) -> None:
        """Stop; whoever still waits is told so."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running = []
        known = self._to_forget | self._futures.keys()
        for future in [future for futures in self._futures.values() for future in futures]:
            if not future.done():
                future.set_exception(StoreError("the app was closed while a task was waited for"))
        if known:
            with suppress(StoreError):
                async with self._app.connection() as connection:
                    await delete_waiters(connection, known, self._waiter)

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        looked_at = said_at = clock()
        while True:
            await self._sleep()
            now = clock()
            if now - said_at > SAY_AGAIN:
                said_at = now
                self._to_note.update(self._futures)
            if now - looked_at >= LOOK:
                looked_at = now
                self._to_look_at.update(self._futures)
            try:
                await self._look()
            except Exception as error:  # noqa: BLE001 - whoever waits would wait for ever if nobody looked any more
                log.warning("completions_unread", error=repr(error))
                await asyncio.sleep(LOOK)

    async def _sleep(self) -> None:
        """Rest until there is something to do; for good while nobody waits."""
        rest = LOOK if self._futures or self._to_forget else None
        with suppress(TimeoutError):
            async with asyncio.timeout(rest):
                await self._wake.wait()
        self._wake.clear()

    async def _look(self) -> None:
        note, look = self._to_note & self._futures.keys(), self._to_look_at & self._futures.keys()
        forget = self._to_forget - self._futures.keys()
        if note and len(forget) < MANY:
            forget = set()  # not on the way of somebody who begins to wait: the next look will do
        if note or look or forget:
            async with self._app.connection() as connection:
                ended = await self._ask(connection, note, look, forget)
            for task_id in ended:
                self._tell(task_id)
            self._look_again_at(note.difference(ended))
        self._to_note = (self._to_note - note) & self._futures.keys()
        self._to_look_at = (self._to_look_at - look) & self._futures.keys()
        self._to_forget -= forget

    def _look_again_at(self, ids: set[UUID]) -> None:
        for seconds in SOON if ids else ():
            asyncio.get_running_loop().call_later(seconds, self._look_at, ids)

    async def _ask(self, connection: Connection, note: set[UUID], look: set[UUID], forget: set[UUID]) -> list[UUID]:
        """Say what is waited for and what is no more; give what has ended."""
        if note:
            await insert_waiters(connection, note, self._waiter)
        # after the note: what begins to end from here on is notified
        ended = await find_ended(connection, note | look) if note or look else []
        if forget:
            await delete_waiters(connection, forget, self._waiter)
        return ended

    def _tell(self, task_id: UUID) -> None:
        for future in self._futures.get(task_id, ()):
            if not future.done():
                future.set_result(None)

    async def _listen(self) -> None:
        pause = 0.1
        while True:
            try:
                async with connect(self._app.url) as connection:
                    await listen(connection, _CHANNELS)
                    pause = 0.1
                    self._look_at(self._futures)  # what ended before anybody listened
                    await self._attend(connection)
            except Exception as error:  # noqa: BLE001 - without a listener everybody waits for the next look
                log.warning("listener_lost", error=repr(error))
            self.rebuilt += 1
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)

    async def _attend(self, connection: Connection) -> None:
        """Hear notifications, and a probe of our own now and then: a connection can die without a word."""
        while True:
            await self._hear(connection, PROBE, None)
            token = secrets.token_hex(8)
            await send_probe(connection, token)
            if not await self._hear(connection, PROBE_TIMEOUT, token):
                raise StoreError("the listener did not hear its own probe")

    async def _hear(self, connection: Connection, seconds: float, until: str | None) -> bool:
        def heard(channel: str, payload: str) -> bool:
            if channel == "interlock_done":
                self._heard(payload)
                return False
            return payload == until

        return await hear(connection, seconds, heard)

    def _heard(self, payload: str) -> None:
        try:
            task_id = UUID(payload)
        except ValueError:
            return  # a stranger's notification
        self._tell(task_id)  # whoever waits looks for himself

    def _look_at(self, ids: Iterable[UUID]) -> None:
        awaited = self._futures.keys() & ids
        if awaited:
            self._to_look_at |= awaited
            self._wake.set()
