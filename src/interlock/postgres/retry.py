"""Retries with exponential backoff and jitter, and the reconnect loop that is built on them.

The delays come from `Backoff`, the policy that failed tasks use too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Required, TypedDict, Unpack

from interlock.errors import StoreError
from interlock.model.backoff import Backoff
from interlock.service import wait_for_event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from interlock.postgres.connection import Connection

# base 0.1 s, at most 5 s, half of each delay random: processes that lost one server do not all return at once
RECONNECT_BACKOFF = Backoff.exponential(0.1, cap=5.0, jitter=0.5)

# errors of the database and of the way to it; TimeoutError is an OSError
RETRYABLE_ERRORS: tuple[type[Exception], ...] = (StoreError, OSError)


class RetryState:
    """Counts failures in a row and computes the delay before the next try."""

    __slots__ = ("_backoff", "failures")

    def __init__(self, backoff: Backoff = RECONNECT_BACKOFF) -> None:
        self._backoff = backoff
        self.failures = 0

    def reset(self) -> None:
        """Record a success: the next failure starts again with the shortest delay."""
        self.failures = 0

    def next_delay_s(self) -> float:
        """Record a failure and return the seconds to wait before the next try."""
        self.failures += 1
        return self._backoff.delay(self.failures)


class RetryOptions(TypedDict, total=False):
    """The options of `retry`."""

    on_failure: Required[Callable[[Exception, float], None]]
    state: RetryState | None
    retry_on: tuple[type[Exception], ...]
    give_up_on: tuple[type[Exception], ...]
    stopping: asyncio.Event | None


async def retry(
    operation: Callable[[], Awaitable[None]],
    *,
    on_failure: Callable[[Exception, float], None],
    state: RetryState | None = None,
    retry_on: tuple[type[Exception], ...] = RETRYABLE_ERRORS,
    give_up_on: tuple[type[Exception], ...] = (),
    stopping: asyncio.Event | None = None,
) -> None:
    """Run an operation until it returns, or until `stopping` is set.

    After an error of `retry_on`, `on_failure` gets the error and the delay in seconds, and the next try follows after
    the delay. Errors of `give_up_on` and all others are raised. An operation that runs for long resets `state` once it
    works, because its next error is not a failure in a row.
    """
    state = state or RetryState()
    while stopping is None or not stopping.is_set():
        try:
            return await operation()
        except give_up_on:
            raise
        except retry_on as error:
            raise_if_canceled()
            delay_s = state.next_delay_s()
            on_failure(error, delay_s)
            if stopping is None:
                await asyncio.sleep(delay_s)
            else:
                await wait_for_event(stopping, delay_s)
    return None


async def keep_connected(
    connect: Callable[[], AbstractAsyncContextManager[Connection]],
    work: Callable[[Connection], Awaitable[None]],
    **options: Unpack[RetryOptions],
) -> None:
    """Run `work` over a connection, and over a new one after each error, until it returns; options as in `retry`."""

    async def connect_and_work() -> None:
        async with connect() as connection:
            await work(connection)

    await retry(connect_and_work, **options)


def raise_if_canceled() -> None:
    """Raise CancelledError if the current task was canceled.

    For `except` blocks around the driver: when a connection dies while its task is canceled, psycopg raises the
    connection's error in place of CancelledError, and a loop that retries would never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
