"""Waits for the results of tasks and jobs: one watcher per app, woken by notifications and polling beside them.

Invariant: a notification is a hint. When all are lost, or the notifier has no connection, the end of a task is still
found by one statement about once a second for everything that is waited for.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from interlock.errors import StoreError
from interlock.model.backoff import Backoff
from interlock.postgres.notifier import DONE_CHANNEL
from interlock.postgres.retry import RetryState
from interlock.service import BackgroundService, wait_for_event
from interlock.store.tasks import delete_waiters, find_ended, insert_waiters
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection
    from interlock.postgres.notifier import Subscription

POLL_INTERVAL_S = 1.0
RETRY_BACKOFF = Backoff.exponential(0.1, cap=POLL_INTERVAL_S, jitter=0.5)
# Delays after which a new wait is polled again: a transaction that ends the task may have looked for waiters before our
# row was there, and commit after our first poll.
RECHECK_DELAYS_S = (0.02, 0.1, 0.4)
MAX_STALE_WAITERS = 100  # rows of waits that are over; above it they are deleted even while new waits begin
WAITER_RENEWAL_S = 600.0  # waiter rows are written again this often, because old ones are pruned


class ResultWatcher(BackgroundService):
    """Completes the waits of one app. It starts with the first wait."""

    def __init__(self, app: Interlock) -> None:
        super().__init__("result watcher")
        self._app = app
        self._waiter_id = uuid4()
        self._futures: dict[UUID, set[asyncio.Future[None]]] = {}
        self._to_register: set[UUID] = set()
        self._to_poll: set[UUID] = set()
        self._to_unregister: set[UUID] = set()
        self._wake = asyncio.Event()
        self._subscription: Subscription | None = None

    async def wait(self, id_: UUID) -> None:
        """Wait until a task or a job has ended or is gone; a notification may end the wait too early."""
        if not self.is_running:
            await self.start()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.setdefault(id_, set()).add(future)
        self._to_register.add(id_)
        self._wake.set()
        try:
            await future
        finally:
            others = self._futures.get(id_, set())
            others.discard(future)
            if not others:
                self._futures.pop(id_, None)
                self._to_unregister.add(id_)

    async def start(self) -> None:
        """Subscribe to the ends of tasks and start to poll."""
        if self._subscription is None:
            self._subscription = self._app.notifier.subscribe(
                {DONE_CHANNEL: self._on_done}, lambda: self._poll_soon(self._futures)
            )
        await super().start()

    async def stop(self) -> None:
        """Stop; waits that are not over raise StoreError."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
        await super().stop()
        registered = self._to_unregister | self._futures.keys()
        for future in [future for futures in self._futures.values() for future in futures]:
            if not future.done():
                future.set_exception(StoreError("the app was closed while a task was waited for"))
        if registered:
            with suppress(StoreError):
                async with self._app.connection() as connection:
                    await delete_waiters(connection, registered, self._waiter_id)
            self._to_unregister.clear()

    async def run(self) -> None:
        """Register waits, poll what may have ended, and delete the rows of waits that are over."""
        clock = asyncio.get_running_loop().time
        polled_at = renewed_at = clock()
        retries = RetryState(RETRY_BACKOFF)
        while True:
            has_work = self._futures or self._to_unregister
            await wait_for_event(self._wake, POLL_INTERVAL_S if has_work else None)
            self._wake.clear()
            now = clock()
            if now - renewed_at > WAITER_RENEWAL_S:
                renewed_at = now
                self._to_register.update(self._futures)
            if now - polled_at >= POLL_INTERVAL_S:
                polled_at = now
                self._to_poll.update(self._futures)
            try:
                await self._poll()
                retries.reset()
            except Exception as error:  # noqa: BLE001 - without the poll, waits could last for ever
                log.warning("completions_unread", error=repr(error))
                await asyncio.sleep(retries.next_delay_s())

    async def _poll(self) -> None:
        register, poll = self._to_register & self._futures.keys(), self._to_poll & self._futures.keys()
        unregister = self._to_unregister - self._futures.keys()
        if register and len(unregister) < MAX_STALE_WAITERS:
            unregister = set()  # a new wait is not delayed by it: the next poll deletes them
        if register or poll or unregister:
            async with self._app.connection() as connection:
                ended = await self._update_waiters(connection, register, poll, unregister)
            for id_ in ended:
                self._complete(id_)
            recheck = register.difference(ended)
            for delay_s in RECHECK_DELAYS_S if recheck else ():
                asyncio.get_running_loop().call_later(delay_s, self._poll_soon, recheck)
        self._to_register = (self._to_register - register) & self._futures.keys()
        self._to_poll = (self._to_poll - poll) & self._futures.keys()
        self._to_unregister -= unregister

    async def _update_waiters(
        self, connection: Connection, register: set[UUID], poll: set[UUID], unregister: set[UUID]
    ) -> list[UUID]:
        """Insert and delete waiter rows; return the ids that have ended."""
        if register:
            await insert_waiters(connection, register, self._waiter_id)
        # after the insert: every end that begins from here on sends a notification
        ended = await find_ended(connection, register | poll) if register or poll else []
        if unregister:
            await delete_waiters(connection, unregister, self._waiter_id)
        return ended

    def _on_done(self, payload: str) -> None:
        with suppress(ValueError):  # not an id: sent by another program
            self._complete(UUID(payload))

    def _complete(self, id_: UUID) -> None:
        for future in self._futures.get(id_, ()):
            if not future.done():
                future.set_result(None)

    def _poll_soon(self, ids: Iterable[UUID]) -> None:
        awaited = self._futures.keys() & ids
        if awaited:
            self._to_poll |= awaited
            self._wake.set()
