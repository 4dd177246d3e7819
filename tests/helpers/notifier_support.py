"""A notifier for tests, with a subscription that records what arrives."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from interlock.postgres.notifier import Notifier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.postgres.notifier import Subscription


@asynccontextmanager
async def notifier_at(url: str, **options: Any) -> AsyncIterator[Notifier]:
    """Run a notifier in this process until the block ends."""
    notifier = Notifier(url, **options)
    await notifier.start()
    try:
        yield notifier
    finally:
        await notifier.stop()


def record(notifier: Notifier, channel: str) -> tuple[list[str], Subscription]:
    """Subscribe to a channel; give the list that grows with payloads, and with "catch-up" for catch-up calls."""
    received: list[str] = []
    return received, notifier.subscribe({channel: received.append}, lambda: received.append("catch-up"))
