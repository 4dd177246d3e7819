"""Concurrent requests with one token share look-ups, and each is decided by one that began after the request."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from interlock import Interlock
from interlock.store.access import Principal, TokenScope, create_token, revoke_token
from interlock.supervisor.http.auth import TokenLookups

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store


class CountingApp(Interlock):
    """Counts how often a connection is taken from the pool, and gives it out when `free` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.taken = 0
        self.free = asyncio.Event()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        self.taken += 1
        async with super().connection() as connection:
            await self.free.wait()
            yield connection


@pytest.fixture
async def app(url: str) -> AsyncIterator[CountingApp]:
    async with CountingApp(url) as opened:
        yield opened


async def test_requests_during_a_look_up_share_the_next_one(app: CountingApp, database: Connection) -> None:
    _, secret = await create_token(database, "ada", TokenScope.READ, actor="admin")
    lookups = TokenLookups(app)
    requests = [asyncio.ensure_future(lookups.find(secret)) for _ in range(20)]
    other = asyncio.ensure_future(lookups.find("unknown"))
    await asyncio.sleep(0)
    requests[1].cancel()  # of those that share one
    app.free.set()
    found = await asyncio.gather(requests[0], *requests[2:])
    assert found == [Principal("ada", TokenScope.READ)] * 19
    assert await other is None
    assert app.taken == 3


async def test_a_request_after_a_revocation_is_refused_though_a_look_up_is_in_flight(
    app: CountingApp, database: Connection
) -> None:
    _, secret = await create_token(database, "ada", TokenScope.READ, actor="admin")
    lookups = TokenLookups(app)
    before = asyncio.ensure_future(lookups.find(secret))
    await asyncio.sleep(0)
    assert await revoke_token(database, "ada", actor="admin")
    after = asyncio.ensure_future(lookups.find(secret))
    await asyncio.sleep(0)
    app.free.set()
    await before
    assert await after is None
    assert app.taken == 2
