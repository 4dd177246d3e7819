"""The webhooks duty: posts signed completion webhooks, a few at a time, until each is accepted or given up.

Invariant: a webhook is deleted only after a 2xx answer. Neither the secret nor the path of a URL is ever logged. An
address is checked after its name was resolved, and the connection goes to a checked address: a name that resolves
differently the next moment gains nothing by it.
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
from typing import TYPE_CHECKING, Any, Final

import httpx
import orjson

from interlock.model.backoff import Backoff
from interlock.store.leader import seconds_until
from interlock.store.webhooks import (
    FailedDelivery,
    Webhook,
    claim_due_webhooks,
    delete_delivered_webhooks,
    next_callback_at,
    postpone_failed_webhooks,
)
from interlock.telemetry import log

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    from interlock.postgres.connection import Connection

POLL_INTERVAL_S = 30.0  # when no webhook is due and no hint comes
VISIBILITY_MARGIN_S = 20.0
MAX_DELAY_S = 86_400.0  # between two tries
_PORTS: Final = {"http": 80, "https": 443}
_NAT64 = IPv6Network("64:ff9b::/96")  # carries an IPv4 address in its last 32 bits
_DOCUMENTATION = IPv6Network("3fff::/20")  # RFC 9637, which some versions of Python call global


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """How webhooks are posted. The delay between tries starts at `backoff` and triples each time, with jitter."""

    secret: str | None = field(default=None, repr=False)
    allow_private: bool = False
    max_tries: int = 8
    concurrency: int = 10
    timeout: float = 10.0
    backoff: float = 10.0

    @property
    def visibility_timeout(self) -> timedelta:
        """How long a claimed webhook is invisible to others: longer than any post can last."""
        return timedelta(seconds=self.timeout + VISIBILITY_MARGIN_S)

    def delay(self, tries: int) -> float | None:
        """Return the seconds until the next try, or None if this was the last."""
        if tries >= self.max_tries:
            return None
        return Backoff.exponential(self.backoff, cap=MAX_DELAY_S, jitter=0.5, factor=3).delay(tries)


class RefusedUrlError(Exception):
    """A webhook cannot be posted to this URL."""


class RefusedAddressError(Exception):
    """The host resolves to an address that webhooks must not reach."""


class WebhooksDuty:
    """Posts due webhooks, `concurrency` at a time; a slow receiver holds up only itself."""

    name = "callbacks"

    def __init__(self, settings: WebhookSettings) -> None:
        self._settings = settings
        self._tls: ssl.SSLContext | None = None

    async def run_once(self, connection: Connection, *, now: datetime | None = None) -> float:
        """Post all due webhooks; return the seconds until the next one is due."""
        posting: set[asyncio.Task[FailedDelivery | Webhook]] = set()
        try:
            while True:
                posting |= await self._claim(connection, self._settings.concurrency - len(posting), now)
                if not posting:
                    due = await next_callback_at(connection)
                    return await seconds_until(connection, due, limit=POLL_INTERVAL_S, now=now)
                posted, posting = await asyncio.wait(posting, timeout=1, return_when=asyncio.FIRST_COMPLETED)
                await self._record(connection, [task.result() for task in posted], now)
        finally:
            for task in posting:
                task.cancel()
            await asyncio.gather(*posting, return_exceptions=True)

    async def _claim(
        self, connection: Connection, free: int, now: datetime | None
    ) -> set[asyncio.Task[FailedDelivery | Webhook]]:
        if not free:
            return set()
        webhooks = await claim_due_webhooks(
            connection, limit=free, visibility=self._settings.visibility_timeout, now=now
        )
        return {asyncio.create_task(self._deliver(webhook)) for webhook in webhooks}

    async def _record(
        self, connection: Connection, results: Iterable[FailedDelivery | Webhook], now: datetime | None
    ) -> None:
        failures, delivered = [], []
        for result in results:
            if isinstance(result, FailedDelivery):
                failures.append(result)
            else:
                delivered.append(result)
        await delete_delivered_webhooks(connection, delivered)
        await postpone_failed_webhooks(connection, failures, now=now)

    async def _deliver(self, webhook: Webhook) -> FailedDelivery | Webhook:
        """Post one webhook; return it if it was accepted, else the failure with the delay of the next try."""
        delay = self._settings.delay(webhook.tries)
        try:
            async with asyncio.timeout(self._settings.timeout):
                status = await self._post(webhook)
        except (RefusedUrlError, RefusedAddressError) as error:
            return _logged(FailedDelivery(webhook, str(error), None))
        except TimeoutError:
            return _logged(FailedDelivery(webhook, f"no answer within {self._settings.timeout:g} s", delay))
        except Exception as error:  # noqa: BLE001 - one receiver must not hold up the others
            # Only the type: the text may contain the URL, and with it a secret.
            return _logged(FailedDelivery(webhook, f"could not be posted: {type(error).__name__}", delay))
        if httpx.codes.is_success(status):
            return webhook
        problem = "a redirect, which is not followed" if httpx.codes.is_redirect(status) else "not a success"
        return _logged(FailedDelivery(webhook, f"answered {status}: {problem}", delay))

    async def _post(self, webhook: Webhook) -> int:
        url, port = checked_url(webhook.url)
        host = url.raw_host.decode("ascii")
        addresses = await public_addresses(host, port, allow_private=self._settings.allow_private)
        body = orjson.dumps(webhook.payload())
        headers = {"Content-Type": "application/json", "User-Agent": "interlock", **_host_headers(url)}
        if self._settings.secret is not None:
            headers["Interlock-Signature"] = signature(self._settings.secret, body, int(time.time()))
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), self._settings.timeout)
        # The certificate must match the host name, although the connection goes to the checked address.
        extensions = {"sni_hostname": host, "timeout": timeouts}
        requests = [
            httpx.Request("POST", url.copy_with(host=address), content=body, headers=headers, extensions=extensions)
            for address in addresses
        ]
        return await self._send(requests)

    async def _send(self, requests: list[httpx.Request]) -> int:
        """Send to the first address that accepts a connection; the transport follows no redirect and logs nothing."""
        if self._tls is None:
            self._tls = await asyncio.to_thread(httpx.create_ssl_context)
        async with httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False) as transport:
            for request in requests[:-1]:
                with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                    return await _status(transport, request)
            return await _status(transport, requests[-1])


def signature(secret: str, body: bytes, at: int) -> str:
    """Sign a webhook together with its time, so that receivers can refuse forged and replayed ones."""
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def checked_url(text: str) -> tuple[httpx.URL, int]:
    """Return the URL of a webhook and its port; RefusedUrlError if it is not an HTTP URL with a host."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        raise RefusedUrlError("the URL cannot be read") from None
    if url.scheme not in _PORTS or not url.host:
        raise RefusedUrlError("the URL must begin with https:// or http:// and name a host")
    return url, url.port or _PORTS[url.scheme]


async def public_addresses(host: str, port: int, *, allow_private: bool = False) -> list[str]:
    """Resolve a host; RefusedAddressError if any of its addresses is not public, unless that is allowed."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not allow_private:
        for address in addresses:
            if not is_public(address):
                raise RefusedAddressError("the receiver's address is not public; see callback_allow_private")
    return addresses


def is_public(text: str) -> bool:
    """Tell whether an address, and every IPv4 address embedded in it, belongs to the public internet."""
    address = ip_address(text)
    return all(_is_global_unicast(each) for each in (address, *_embedded(address)))


def _is_global_unicast(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and (address.is_site_local or address in _DOCUMENTATION):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _embedded(address: IPv4Address | IPv6Address) -> list[IPv4Address]:
    if isinstance(address, IPv4Address):
        return []
    embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        embedded.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in embedded if each is not None]


def _host_headers(url: httpx.URL) -> dict[str, str]:
    """Return the Host header, and Authorization if the URL has credentials."""
    headers = {"Host": url.netloc.decode("ascii")}
    if url.username or url.password:
        credentials = f"{url.username}:{url.password}".encode()
        headers["Authorization"] = "Basic " + base64.b64encode(credentials).decode("ascii")
    return headers


async def _status(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> int:
    response = await transport.handle_async_request(request)
    await response.aclose()
    return response.status_code


def _logged(failure: FailedDelivery) -> FailedDelivery:
    webhook = failure.notice
    subject: dict[str, Any] = (
        {"task_id": str(webhook.task_id), "attempt": webhook.attempt}
        if webhook.job_id is None
        else {"job_id": str(webhook.job_id)}
    )
    log.warning(
        "callback_failed",
        callback_id=webhook.id,
        **subject,
        tries=webhook.tries,
        error=failure.error,
        given_up=failure.delay is None,
    )
    return failure
