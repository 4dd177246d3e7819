"""Shares of what clients use at once: concurrent requests, streams, memory for bodies, checks of unknown tokens.

Invariant: no client takes more than its share of a limit, so that one client alone never makes the server refuse the
others. A client is a token, or the address of a caller without a valid one.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from interlock.store.access import hash_token
from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

KNOWN_TOKEN_LIFETIME_S = 300.0
MAX_KNOWN_TOKENS = 10_000


class Shares:
    """An amount that clients use parts of at once: so much in total, so much by each client."""

    def __init__(self, total: int, per_client: int, name: str, headers: dict[str, str] | None = None) -> None:
        self._headers = headers  # of the response that refuses more
        self._total = total
        self._per_client = per_client
        self._name = name
        self._used = 0
        self._by_client: dict[str, int] = {}

    def add(self, client: str, amount: int) -> None:
        """Use more; raise 429, with nothing added, if the client or all together would use too much."""
        mine = self._by_client.get(client, 0)
        if mine + amount > self._per_client:
            raise self._refusal("this client has", mine, self._per_client)
        if self._used + amount > self._total:
            raise self._refusal("all clients have", self._used, self._total)
        self._used += amount
        self._by_client[client] = mine + amount

    def remove(self, client: str, amount: int) -> None:
        """Use less again."""
        self._used -= amount
        left = self._by_client.get(client, 0) - amount
        if left:
            self._by_client[client] = left
        else:
            self._by_client.pop(client, None)

    @contextmanager
    def take(self, client: str) -> Iterator[None]:
        """Use one for the time of the context; raise 429 if there is none."""
        self.add(client, 1)
        try:
            yield
        finally:
            self.remove(client, 1)

    def _refusal(self, who: str, used: int, limit: int) -> Problem:
        return too_many(f"{who} {used} {self._name}, and the limit is {limit}; try again in a moment", self._headers)


class BodyBuffer:
    """The part of one body that has arrived, which counts for the share of its client until it is released."""

    def __init__(self, shares: Shares, client: str) -> None:
        self._shares = shares
        self._client = client
        self.content = bytearray()

    def append(self, part: bytes) -> None:
        """Add a part; raise 429 if there is no memory for it."""
        self._shares.add(self._client, len(part))
        self.content += part

    def release(self) -> None:
        """Count the body no longer."""
        self._shares.remove(self._client, len(self.content))


class CheckQueue:
    """A queue for checks of tokens that are not known: so many at once, of one client so many, and others wait a while.

    Requests of one client with the same token take one place, however many they are: those that arrive during a check
    share the next one, which is not made if the token was valid.
    """

    def __init__(self, total: int, per_client: int, wait_s: float) -> None:
        self._all = asyncio.Semaphore(total)
        self._per_client = per_client
        self._wait_s = wait_s
        self._clients: dict[str, tuple[asyncio.Semaphore, int]] = {}
        self._running: dict[tuple[str, bytes], asyncio.Future[None]] = {}
        self._next: dict[tuple[str, bytes], asyncio.Future[None]] = {}

    async def run(self, client: str, credentials: str, check: Callable[[], Awaitable[None]]) -> bool:
        """Run a check in its turn and return True; return False if the check of another request has succeeded.

        Raises 429 if the turn takes too long, and the error of the check.
        """
        key = (client, hash_token(credentials))
        if key in self._next:
            await asyncio.shield(self._next[key])  # a request that ends early ends no other
            return False
        ended = self._next[key] = asyncio.get_running_loop().create_future()
        ended.add_done_callback(_has_succeeded)  # nobody may wait for it
        try:
            checks = key not in self._running or not await _wait_for(self._running[key])
            if checks:
                async with self._turn(client):
                    self._running[key] = self._next.pop(key)
                    await check()
        except Exception as error:
            ended.set_exception(error)
            raise
        except BaseException:
            ended.cancel()
            raise
        else:
            ended.set_result(None)
            return checks
        finally:
            for futures in (self._next, self._running):
                if futures.get(key) is ended:
                    del futures[key]

    @asynccontextmanager
    async def _turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it for the time of the context; raise 429 if it takes too long."""
        mine, present = self._clients.get(client) or (asyncio.Semaphore(self._per_client), 0)
        self._clients[client] = (mine, present + 1)
        waiting = asyncio.timeout(self._wait_s)
        try:
            async with waiting, mine, self._all:
                waiting.reschedule(None)
                yield
        except TimeoutError:
            if not waiting.expired():
                raise
            raise too_many("too many unknown tokens are being checked; try again in a moment") from None
        finally:
            _, present = self._clients[client]
            if present == 1:
                del self._clients[client]
            else:
                self._clients[client] = (mine, present - 1)


async def _wait_for(check: asyncio.Future[None]) -> bool:
    await asyncio.wait([check])
    return _has_succeeded(check)


def _has_succeeded(check: asyncio.Future[None]) -> bool:
    return not check.cancelled() and check.exception() is None


class KnownTokens:
    """The actors of tokens that were valid a short time ago, by the hash of the token.

    It decides only whether the next check of a token waits behind unknown ones; the check is made in the database.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._actors: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def find(self, credentials: str) -> str | None:
        """Return the actor of credentials that were valid."""
        actor, until = self._actors.get(hash_token(credentials), (None, 0.0))
        return actor if until > self._clock() else None

    def add(self, credentials: str, actor: str) -> None:
        """Remember credentials that are valid; the oldest ones are forgotten."""
        key = hash_token(credentials)
        self._actors[key] = (actor, self._clock() + KNOWN_TOKEN_LIFETIME_S)
        self._actors.move_to_end(key)
        if len(self._actors) > MAX_KNOWN_TOKENS:
            self._actors.popitem(last=False)

    def remove(self, credentials: str) -> None:
        """Forget credentials that are not valid, or no longer."""
        self._actors.pop(hash_token(credentials), None)


def too_many(detail: str, headers: dict[str, str] | None = None) -> Problem:
    """Return the problem of a client that is over a limit."""
    return Problem("too_many_requests", detail, headers={"Retry-After": "1", **(headers or {})})
