"""One LISTEN connection per app, shared by all subscribers; probed for liveness and rebuilt when it fails.

Invariant: notifications are hints. A lost one costs latency, never work: every subscriber also polls, and gets a
catch-up call whenever its channels begin to be listened to, because it may have missed notifications before.
"""

from __future__ import annotations

import asyncio
import secrets
from enum import StrEnum
from typing import TYPE_CHECKING

from psycopg import sql

from interlock.errors import StoreError
from interlock.postgres.connection import connect, translated
from interlock.postgres.retry import RetryState, keep_connected
from interlock.service import BackgroundService
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from psycopg.pq.abc import PGconn

    from interlock.postgres.connection import Connection

# The channels, which the functions and statements in interlock/sql notify; the payload follows.
TASKS_CHANNEL = "interlock_tasks"  # namespace with new due tasks, or BROADCAST
RELEASED_CHANNEL = "interlock_released"  # namespace with tasks that became pending long after they were due
DUE_CHANNEL = "interlock_due"  # time at which a task becomes due, in seconds since the epoch, and its namespace
LIMITED_CHANNEL = "interlock_limited"  # namespace with pending tasks that have a limit
CONTROL_CHANNEL = "interlock_control"  # worker id, BROADCAST after a changed pause, or a remote command (JSON)
ANSWERS_CHANNEL = "interlock_answers"  # answer to a remote command (JSON)
DUTIES_CHANNEL = "interlock_duties"  # name of the maintenance duty that is due
# id of a message of the queue of step results, "messages" for several; "workers", "jobs" or "due" for maintenance
ORCHESTRATION_CHANNEL = "interlock_orchestration"
DONE_CHANNEL = "interlock_done"  # id of a task or job that has ended
PROBE_CHANNEL = "interlock_probe"  # random token
BROADCAST = "*"  # in place of one namespace or one process: all of them

PROBE_INTERVAL_S = 10.0
PROBE_TIMEOUT_S = 5.0


class WakeMode(StrEnum):
    """How an idle process learns of new work: by notifications and polling, by notifications, or by polling."""

    HYBRID = "hybrid"
    EVENTS = "events"
    POLLING = "polling"


class Subscription:
    """One subscriber of a notifier; `close` unsubscribes."""

    def __init__(
        self,
        notifier: Notifier,
        handlers: Mapping[str, Callable[[str], None]],
        on_catch_up: Callable[[], None] | None,
    ) -> None:
        self._notifier = notifier
        self.handlers = handlers
        self.on_catch_up = on_catch_up
        self.is_listening = False

    def close(self) -> None:
        """End the subscription: no handler is called afterwards. Safe twice."""
        self._notifier.unsubscribe(self)


class Notifier(BackgroundService):
    """Receives the notifications of one database and calls the subscribers of their channels.

    It holds a connection only while there is a subscriber.
    """

    def __init__(
        self, url: str, *, probe_interval_s: float = PROBE_INTERVAL_S, probe_timeout_s: float = PROBE_TIMEOUT_S
    ) -> None:
        super().__init__("notifier")
        self._url = url
        self.probe_interval_s = probe_interval_s
        self._probe_timeout_s = probe_timeout_s
        self._subscriptions: list[Subscription] = []
        self._changed = asyncio.Event()  # the set of subscriptions did
        self._receiving: asyncio.Future[bool] | None = None
        self.channels: set[str] = set()  # that the connection listens to
        self._retries = RetryState()
        self.connection: Connection | None = None
        self.reconnects = 0

    @property
    def is_listening(self) -> bool:
        """Whether there is a connection that listens to the channels of all subscribers, as far as is known."""
        return bool(self._subscriptions) and all(subscription.is_listening for subscription in self._subscriptions)

    def subscribe(
        self, handlers: Mapping[str, Callable[[str], None]], on_catch_up: Callable[[], None] | None = None
    ) -> Subscription:
        """Call a handler with the payload of each notification on its channel.

        `on_catch_up` is called once the channels are listened to, and again after each reconnect. All calls come in the
        event loop of the notifier as soon as the notification arrives, so they must not block.
        """
        subscription = Subscription(self, dict(handlers), on_catch_up)
        self._subscriptions.append(subscription)
        self._apply_changes_soon()
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove a subscription; the same as its `close`."""
        subscription.is_listening = False
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._apply_changes_soon()

    def _apply_changes_soon(self) -> None:
        self._changed.set()
        if self._receiving is not None and not self._receiving.done():
            self._receiving.set_result(False)

    async def run(self) -> None:
        """Listen whenever there is a subscriber, over one connection after another."""
        self._changed.set()
        while True:
            await self._changed.wait()
            if self._subscriptions:
                await keep_connected(
                    lambda: connect(self._url),
                    self._listen,
                    on_failure=self._on_connection_lost,
                    state=self._retries,
                    retry_on=(Exception,),
                )
            else:
                self._changed.clear()

    async def _listen(self, connection: Connection) -> None:
        """Pass notifications on until there are no subscribers; raise when the connection is lost or deaf."""
        now = asyncio.get_running_loop().time
        try:
            self.connection = connection
            probe_at = now() + self.probe_interval_s
            while self._subscriptions:
                await self._update_channels(connection)
                self._retries.reset()
                await self._receive(connection, probe_at - now())
                if now() >= probe_at:
                    await self._probe(connection)
                    probe_at = now() + self.probe_interval_s
        finally:
            self.connection = None
            self.channels.clear()
            for subscription in self._subscriptions:
                subscription.is_listening = False

    def _on_connection_lost(self, error: Exception, delay_s: float) -> None:
        self.reconnects += 1
        log.warning("listener_lost", error=str(error) or type(error).__name__, retry_in=round(delay_s, 2))

    async def _update_channels(self, connection: Connection) -> None:
        """Make the connection listen to the channels of the current subscriptions, and call those that are new."""
        self._changed.clear()
        subscriptions = list(self._subscriptions)
        wanted = {PROBE_CHANNEL}.union(*(subscription.handlers for subscription in subscriptions))
        await listen(connection, sorted(wanted - self.channels))
        await unlisten(connection, sorted(self.channels - wanted))
        self.channels = wanted
        for subscription in subscriptions:
            if not subscription.is_listening and subscription in self._subscriptions:
                subscription.is_listening = True
                if subscription.on_catch_up is not None:
                    _call(subscription.on_catch_up)

    async def _probe(self, connection: Connection) -> None:
        """Send a notification to ourselves: a connection can die, or be deaf behind a pooler, without an error."""
        token = secrets.token_hex(8)
        await send_probe(connection, token)
        now = asyncio.get_running_loop().time
        give_up_at = now() + self._probe_timeout_s
        while not await self._receive(connection, give_up_at - now(), token):
            if now() >= give_up_at:
                raise StoreError("the listener did not receive its own probe")

    async def _receive(self, connection: Connection, timeout_s: float, token: str | None = None) -> bool:
        """Pass notifications on for a time or until the subscriptions change; True once the probe `token` arrives."""

        def on_notification(channel: str, payload: str) -> bool:
            if channel == PROBE_CHANNEL:
                return payload == token
            for subscription in list(self._subscriptions):
                handler = subscription.handlers.get(channel)
                if handler is not None:
                    _call(handler, payload)
            return False

        self._receiving = asyncio.get_running_loop().create_future()
        if self._changed.is_set() and token is None:
            return False
        return await receive(connection, timeout_s, on_notification, self._receiving)


def _call(handler: Callable[..., None], *arguments: str) -> None:
    try:
        handler(*arguments)
    except Exception as error:  # noqa: BLE001 - one subscriber's error must not end the connection of all
        log.error("notification_handler_failed", error=str(error) or type(error).__name__, exc_info=True)


async def listen(connection: Connection, channels: Sequence[str]) -> None:
    """Subscribe a connection to channels."""
    await _run_for_each(connection, "listen {}", channels)


async def unlisten(connection: Connection, channels: Sequence[str]) -> None:
    """Unsubscribe a connection from channels."""
    await _run_for_each(connection, "unlisten {}", channels)


async def _run_for_each(connection: Connection, statement: str, channels: Sequence[str]) -> None:
    if channels:
        statements = [sql.SQL(statement).format(sql.Identifier(channel)) for channel in channels]
        with translated(connection):
            await connection.execute(sql.SQL("; ").join(statements))


async def send_probe(connection: Connection, token: str) -> None:
    """Send a notification that its own sender recognizes."""
    with translated(connection):
        await connection.execute(sql.SQL("select pg_notify({}, %s)").format(PROBE_CHANNEL), [token])


async def receive(
    connection: Connection,
    timeout_s: float,
    on_notification: Callable[[str, str], bool | None],
    finished: asyncio.Future[bool] | None = None,
) -> bool:
    """Call `on_notification` with channel and payload of each notification; return True as soon as it returns True.

    False means that `timeout_s` passed, or that the caller completed the future `finished`. The calls come straight
    from the reader of the socket, one turn of the event loop earlier than from psycopg's generator.
    """
    with translated(connection):
        # those that arrived along with the answers to other statements
        early = [notification async for notification in connection.notifies(timeout=0)]
        answers = [on_notification(notification.channel, notification.payload) for notification in early]
        if any(answers):
            return True
        async with connection.lock:
            return await _receive_from_socket(connection.pgconn, timeout_s, on_notification, finished)


async def _receive_from_socket(
    pgconn: PGconn,
    timeout_s: float,
    on_notification: Callable[[str, str], bool | None],
    finished: asyncio.Future[bool] | None,
) -> bool:
    loop = asyncio.get_running_loop()
    result = finished or loop.create_future()

    def pass_on() -> None:
        while (notification := pgconn.notifies()) is not None:
            is_last = on_notification(notification.relname.decode(), notification.extra.decode())
            if is_last and not result.done():
                result.set_result(True)

    def read() -> None:
        if result.done():
            return
        try:
            pgconn.consume_input()
            pass_on()
        except Exception as error:  # noqa: BLE001 - the waiting task must receive it, whatever it is
            if not result.done():
                result.set_exception(error)

    socket = pgconn.socket
    pass_on()
    loop.add_reader(socket, read)
    try:
        async with asyncio.timeout(timeout_s):
            return await result
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(socket)
