"""Posts completion notices to the URLs that tasks named, signed, a few at a time, until each is taken or given up.

Invariant: a notice is struck off only after a 2xx answer; neither the secret nor the path of a URL is ever logged.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from secrets import SystemRandom
from typing import TYPE_CHECKING, Final

import httpx
import orjson

from interlock.store.callbacks import (
    FailedDelivery,
    Webhook,
    claim_due_callbacks,
    delete_delivered_callbacks,
    next_callback_at,
    postpone_failed_callbacks,
)
from interlock.store.leader import read_clock
from interlock.telemetry import log

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable

    from interlock.postgres.connection import Connection


# SECTION worker/addresses
# Which addresses a completion notice may be sent to.
#
# Invariant: an address is judged after its name was resolved, and the connection goes to an address that was judged:
# a name that resolves differently the next moment gains nothing by it.

Address = IPv4Address | IPv6Address

_TRANSLATED = IPv6Network("64:ff9b::/96")  # an IPv4 address in its last 32 bits


_DOCUMENTED = IPv6Network("3fff::/20")  # for examples alone, which some versions of Python do not know


class RefusedAddressError(Exception):
    """The host is, or may be, one that notices must not go to."""


async def public_addresses(host: str, port: int, *, allow_private: bool = False) -> list[str]:
    """Resolve a host; raise if any of its addresses is not a public one, unless that is allowed."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not allow_private:
        for address in addresses:
            if not is_public(address):
                raise RefusedAddressError("the receiver's address is not public; see callback_allow_private")
    return addresses


def is_public(text: str) -> bool:
    """Tell whether an address belongs to the public internet, looking into addresses that carry another."""
    address = ip_address(text)
    return all(_is_plainly_public(each) for each in (address, *_carried(address)))


def _is_plainly_public(address: Address) -> bool:
    if isinstance(address, IPv6Address) and (address.is_site_local or address in _DOCUMENTED):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _carried(address: Address) -> list[IPv4Address]:
    if isinstance(address, IPv4Address):
        return []
    carried = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _TRANSLATED:
        carried.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in carried if each is not None]


IDLE = 30.0  # seconds between looks when nothing is due and no hint comes
_PORTS: Final = {"http": 80, "https": 443}
_random = SystemRandom()


@dataclass(frozen=True, slots=True)
class CallbackSettings:
    """How notices are posted. Delays between tries: `backoff`, three times as long each time, with jitter."""

    secret: str | None = field(default=None, repr=False)
    allow_private: bool = False
    max_tries: int = 8
    concurrency: int = 10
    timeout: float = 10.0
    backoff: float = 10.0

    @property
    def visibility(self) -> timedelta:
        """How long a notice is out of sight while it is posted: longer than any post can last."""
        return timedelta(seconds=self.timeout + 20)

    def delay(self, tries: int) -> float | None:
        """Give the seconds until the next try, or None when this was the last."""
        if tries >= self.max_tries:
            return None
        delay: float = self.backoff * 3 ** (tries - 1) * _random.uniform(0.5, 1)
        return delay


class RefusedUrlError(Exception):
    """The URL is none that a notice can be posted to."""


class Callbacks:
    """The duty: post what is due, and say when the next notice is."""

    name = "callbacks"

    def __init__(self, settings: CallbackSettings, *, clock: Callable[[], datetime | None] = lambda: None) -> None:
        self._settings = settings
        self._clock = clock
        self._tls: ssl.SSLContext | None = None

    async def act(self, connection: Connection) -> float:
        """Post all that is due, `concurrency` at a time; a slow receiver holds up only itself."""
        flying: set[asyncio.Task[FailedDelivery | Webhook]] = set()
        try:
            while True:
                flying |= await self._take_off(connection, self._settings.concurrency - len(flying))
                if not flying:
                    return await self._rest(connection)
                landed, flying = await asyncio.wait(flying, timeout=1, return_when=asyncio.FIRST_COMPLETED)
                await self._settle(connection, [task.result() for task in landed])
        finally:
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)

    async def _take_off(self, connection: Connection, free: int) -> set[asyncio.Task[FailedDelivery | Webhook]]:
        if not free:
            return set()
        now, visibility = self._clock(), self._settings.visibility
        notices = await claim_due_callbacks(connection, limit=free, visibility=visibility, now=now)
        return {asyncio.create_task(self._deliver(notice)) for notice in notices}

    async def _settle(self, connection: Connection, results: Iterable[FailedDelivery | Webhook]) -> None:
        failures, delivered = [], []
        for result in results:
            if isinstance(result, FailedDelivery):
                failures.append(result)
            else:
                delivered.append(result)
        await delete_delivered_callbacks(connection, delivered)
        await postpone_failed_callbacks(connection, failures, now=self._clock())

    async def _rest(self, connection: Connection) -> float:
        due = await next_callback_at(connection)
        if due is None:
            return IDLE
        now = await read_clock(connection, now=self._clock())
        return min(max((due - now).total_seconds(), 0.0), IDLE)

    async def _deliver(self, notice: Webhook) -> FailedDelivery | Webhook:
        """Post one notice; give it back when it was taken, else why not and when to try again."""
        delay = self._settings.delay(notice.tries)
        try:
            async with asyncio.timeout(self._settings.timeout):
                status = await self._post(notice)
        except (RefusedUrlError, RefusedAddressError) as error:
            return self._failed(FailedDelivery(notice, str(error), None))
        except TimeoutError:
            return self._failed(FailedDelivery(notice, f"no answer within {self._settings.timeout:g} s", delay))
        except Exception as error:  # noqa: BLE001 - whatever one receiver does must not hold up the others
            # The text of the error may hold the URL, which may hold a secret: its kind says enough.
            return self._failed(FailedDelivery(notice, f"could not be posted: {type(error).__name__}", delay))
        if httpx.codes.is_success(status):
            return notice
        said = "a redirect, which is not followed" if httpx.codes.is_redirect(status) else "not a success"
        return self._failed(FailedDelivery(notice, f"answered {status}: {said}", delay))

    def _failed(self, failure: FailedDelivery) -> FailedDelivery:
        notice = failure.notice
        log.warning(
            "callback_failed",
            callback_id=notice.id,
            task_id=str(notice.task_id),
            attempt=notice.attempt,
            tries=notice.tries,
            error=failure.error,
            given_up=failure.delay is None,
        )
        return failure

    async def _post(self, notice: Webhook) -> int:
        url, port = checked_url(notice.url)
        host = url.raw_host.decode("ascii")
        addresses = await public_addresses(host, port, allow_private=self._settings.allow_private)
        body = orjson.dumps({"task_id": str(notice.task_id), "state": notice.state, "attempt": notice.attempt})
        headers = {"Content-Type": "application/json", "User-Agent": "interlock", **_addressed(url)}
        if self._settings.secret is not None:
            headers["Interlock-Signature"] = signature(self._settings.secret, body, int(time.time()))
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), self._settings.timeout)
        # The certificate must be that of the host's name, though the connection goes to the address that was judged.
        extensions = {"sni_hostname": host, "timeout": timeouts}
        requests = [
            httpx.Request("POST", url.copy_with(host=address), content=body, headers=headers, extensions=extensions)
            for address in addresses
        ]
        return await self._send(requests)

    async def _send(self, requests: list[httpx.Request]) -> int:
        """Send to the first address that lets itself be connected to; the bare transport follows and logs nothing."""
        if self._tls is None:
            self._tls = await asyncio.to_thread(httpx.create_ssl_context)
        async with httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False) as transport:
            for request in requests[:-1]:
                with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                    return await _status(transport, request)
            return await _status(transport, requests[-1])


async def _status(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> int:
    response = await transport.handle_async_request(request)
    await response.aclose()
    return response.status_code


def _addressed(url: httpx.URL) -> dict[str, str]:
    """Name the host, and who posts if the URL says so."""
    headers = {"Host": url.netloc.decode("ascii")}
    if url.username or url.password:
        credentials = f"{url.username}:{url.password}".encode()
        headers["Authorization"] = "Basic " + base64.b64encode(credentials).decode("ascii")
    return headers


def checked_url(text: str) -> tuple[httpx.URL, int]:
    """Read a URL that a notice can be posted to, and its port."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        raise RefusedUrlError("the URL cannot be read") from None
    if url.scheme not in _PORTS or not url.host:
        raise RefusedUrlError("the URL must begin with https:// or http:// and name a host")
    return url, url.port or _PORTS[url.scheme]


def signature(secret: str, body: bytes, at: int) -> str:
    """Sign a notice, and the time with it, so that a receiver can refuse what is forged or replayed."""
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"
