"""Webhooks: signed, durable, retried until accepted or given up, and never sent to private addresses."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import shutil
import socket
import ssl
import subprocess
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from interlock.model.options import NewTask
from interlock.store.enqueue import enqueue_task
from interlock.store.task_admin import cancel_unfinished_tasks
from interlock.store.webhooks import (
    claim_due_webhooks,
    delete_delivered_webhooks,
    list_given_up_webhooks,
    retry_given_up_webhooks,
)
from interlock.worker.maintenance.webhooks import POLL_INTERVAL_S, WebhooksDuty, WebhookSettings, is_public, signature
from webhook_receiver import Receiver

if TYPE_CHECKING:
    from pathlib import Path
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

SECRET = "hunter2"  # noqa: S105 - what the test looks for in logs
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


class Post:
    """The webhooks duty with a clock that the test advances."""

    def __init__(self, **settings: Any) -> None:
        self.now = NOON
        settings = {"secret": SECRET, "allow_private": True, **settings}
        self.duty = WebhooksDuty(WebhookSettings(**settings))

    async def act(self, database: Connection, later: timedelta = timedelta(0)) -> float:
        self.now += later
        return await self.duty.run_once(database, now=self.now)


async def notice(database: Connection, url: str) -> UUID:
    """End a task with a callback URL: its webhook is stored with the outcome."""
    task = (await enqueue_task(database, NewTask("x", {}, callback_url=url), actor="me")).id
    await cancel_unfinished_tasks(database, [task], actor="me")
    return task


async def left(database: Connection, columns: str = "tries, error, given_up_at") -> list[tuple[Any, ...]]:
    found = await (await database.execute(f"select {columns} from interlock.callbacks order by id".encode())).fetchall()
    return [tuple(row.values()) for row in found]


async def test_a_notice_is_posted_signed_and_struck_off(database: Connection) -> None:
    async with Receiver().listen() as receiver:
        task = await notice(database, f"http://ada:pw@127.0.0.1:{receiver.port}/hook?token=t")
        assert await Post().act(database) == POLL_INTERVAL_S
    (got,) = receiver.received
    assert got.line == "POST /hook?token=t HTTP/1.1"
    assert json.loads(got.body) == {"task_id": str(task), "state": "canceled", "attempt": 0}
    assert got.headers["content-type"] == "application/json"
    assert got.headers["authorization"] == "Basic YWRhOnB3"
    stamp, digest = (part.split("=")[1] for part in got.headers["interlock-signature"].split(","))
    assert abs(time.time() - int(stamp)) < 60
    assert digest == hmac.new(SECRET.encode(), f"{stamp}.".encode() + got.body, hashlib.sha256).hexdigest()
    assert await left(database) == []


async def test_without_a_secret_nothing_is_signed(database: Connection) -> None:
    async with Receiver().listen() as receiver:
        await notice(database, f"http://127.0.0.1:{receiver.port}/")
        await Post(secret=None).act(database)
    assert "interlock-signature" not in receiver.received[0].headers


async def test_a_refused_webhook_is_retried_later(database: Connection) -> None:
    async with Receiver(503).listen() as receiver:
        await notice(database, f"http://127.0.0.1:{receiver.port}/")
        post = Post()
        rest = await post.act(database)
        assert 5 <= rest <= 10, "the first delay, with its jitter"
        assert await left(database) == [(1, "answered 503: not a success", None)]
        assert await post.act(database, timedelta(seconds=rest - 0.1)) > 0
        assert len(receiver.received) == 1
        await post.act(database, timedelta(seconds=1))
        assert len(receiver.received) == 2
    assert await left(database) == []


async def test_after_the_last_try_it_is_given_up_and_kept_until_someone_asks_again(database: Connection) -> None:
    async with Receiver(500, 404, 500).listen() as receiver:
        await notice(database, f"http://127.0.0.1:{receiver.port}/")
        post = Post(max_tries=3)
        for _ in range(5):
            await post.act(database, timedelta(hours=2))
        assert len(receiver.received) == 3
        (given_up,) = await list_given_up_webhooks(database)
        assert (given_up.tries, given_up.error) == (3, "answered 500: not a success")
        assert await retry_given_up_webhooks(database, [given_up.id], now=post.now) == [given_up.id]
        await post.act(database)
    assert await left(database) == []


async def test_redirects_are_not_followed(database: Connection) -> None:
    async with Receiver(302).listen() as receiver:
        await notice(database, f"http://127.0.0.1:{receiver.port}/")
        await Post().act(database)
    assert [got.line for got in receiver.received] == ["POST / HTTP/1.1"]
    assert await left(database) == [(1, "answered 302: a redirect, which is not followed", None)]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433"])  # noqa: S104 - nothing is bound
async def test_private_addresses_are_refused_unless_allowed(database: Connection, host: str) -> None:
    async with Receiver().listen() as receiver:
        await notice(database, f"http://{host}:{receiver.port}/")
        await Post(allow_private=False).act(database)
    assert receiver.received == []
    ((tries, error, given_up_at),) = await left(database)
    assert (tries, given_up_at) == (1, NOON)
    assert "address is not public" in error


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/", "file:///etc/passwd", "http://", "nonsense", "http://[::"])
async def test_only_http_urls_with_a_host_are_posted_to(database: Connection, target: str) -> None:
    await notice(database, target)
    await Post().act(database)
    assert [given_up_at for _, _, given_up_at in await left(database)] == [NOON]


def resolve(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Resolve receiver.test to these addresses; return the list of names that are looked up."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def answer(host: str, port: int, *rest: Any, **options: Any) -> Any:
        asked.append(host)
        if host != "receiver.test":
            return real(host, port, *rest, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return asked


async def test_one_private_address_of_several_is_refused(database: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, "93.184.215.14", "10.0.0.1")
    await notice(database, "http://receiver.test/")
    await Post(allow_private=False).act(database)
    assert "address is not public" in (await left(database))[0][1]


async def test_the_connection_uses_the_checked_address(database: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolve(monkeypatch, "127.0.0.1")
    async with Receiver().listen() as receiver:
        await notice(database, f"http://receiver.test:{receiver.port}/")
        await Post().act(database)
    assert asked == ["receiver.test"], "the name was resolved once"
    assert receiver.received[0].headers["host"] == f"receiver.test:{receiver.port}"


async def test_an_unreachable_address_is_skipped(database: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, "127.0.0.2", "127.0.0.1")
    async with Receiver().listen() as receiver:
        await notice(database, f"http://receiver.test:{receiver.port}/")
        await Post().act(database)
    assert len(receiver.received) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
@pytest.mark.parametrize(("name", "taken"), [("receiver.test", 1), ("other.test", 0)])
async def test_the_certificate_must_match_the_name(
    database: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, taken: int
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {certificate} -subj /CN={name}"
    await asyncio.to_thread(
        subprocess.run, [*make.split(), "-addext", f"subjectAltName=DNS:{name}"], check=True, capture_output=True
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    resolve(monkeypatch, "127.0.0.1")
    async with Receiver().listen(tls=tls) as receiver:
        await notice(database, f"https://receiver.test:{receiver.port}/")
        await Post().act(database)
    assert len(receiver.received) == taken
    assert len(await left(database)) == 1 - taken


@pytest.mark.chaos
async def test_a_slow_receiver_holds_up_only_itself(database: Connection) -> None:
    async with Receiver(0).listen() as slow, Receiver().listen() as quick:
        await notice(database, f"http://127.0.0.1:{slow.port}/")
        for _ in range(25):
            await notice(database, f"http://127.0.0.1:{quick.port}/")
        acting = asyncio.create_task(Post(timeout=8).act(database))
        async with asyncio.timeout(30):
            while len(quick.received) < 25:
                await asyncio.sleep(0.01)
        assert not acting.done()
        await acting
    assert await left(database, "error") == [("no answer within 8 s",)]


@pytest.mark.chaos
async def test_a_webhook_of_a_crashed_sender_is_due_again(database: Connection) -> None:
    async with Receiver(0).listen() as receiver:
        await notice(database, f"http://127.0.0.1:{receiver.port}/")
        post = Post()
        dying = asyncio.create_task(post.act(database))
        async with asyncio.timeout(30):
            while not receiver.received:
                await asyncio.sleep(0.01)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        assert await post.act(database, timedelta(seconds=29)) == 1, "out of sight meanwhile"
        await post.act(database, timedelta(seconds=1))
        assert len(receiver.received) == 2
    assert await left(database) == []


async def test_a_late_poster_does_not_strike_off_what_another_holds(database: Connection) -> None:
    await notice(database, "http://127.0.0.1:9/")
    (first,) = await claim_due_webhooks(database, limit=10, now=NOON)
    assert await claim_due_webhooks(database, limit=10, now=NOON) == []
    (second,) = await claim_due_webhooks(database, limit=10, now=NOON + timedelta(minutes=1))
    assert await delete_delivered_webhooks(database, [first]) == 0
    assert await delete_delivered_webhooks(database, [second]) == 1


async def test_neither_the_secret_nor_the_url_is_logged_or_kept_in_an_error(database: Connection) -> None:
    await notice(database, f"http://user:{SECRET}@127.0.0.1:9/{SECRET}?token={SECRET}")
    with capture_logs() as logs:
        await Post().act(database)
    assert [line["event"] for line in logs] == ["callback_failed"]
    assert SECRET not in f"{logs} {await left(database)}"
    assert await left(database) == [(1, "could not be posted: ConnectError", None)]


@pytest.mark.unit
def test_delays_grow_threefold_up_to_the_last_try_and_the_signature_is_stable() -> None:
    settings = WebhookSettings(secret=SECRET)
    for tries in range(1, 8):
        assert 5 * 3 ** (tries - 1) <= (settings.delay(tries) or 0) <= 10 * 3 ** (tries - 1)
    assert settings.delay(8) is None
    assert SECRET not in repr(settings)
    assert signature("k", b"{}", 1) == "t=1,v1=" + hmac.new(b"k", b"1.{}", hashlib.sha256).hexdigest()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        *((private, False) for private in ("10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1")),
        *((private, False) for private in ("127.1.2.3", "0.0.0.0", "224.0.0.1", "255.255.255.255", "::", "::1")),  # noqa: S104 - nothing is bound
        *((private, False) for private in ("fe80::1", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1")),
        *((private, False) for private in ("2002:7f00:1::", "64:ff9b::a00:1", "64:ff9b::7f00:1")),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:  # noqa: FBT001 - a table of the test
    assert is_public(address) is public
