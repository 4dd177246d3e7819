"""The notifier: one LISTEN connection for all subscribers, rebuilt when it is lost or deaf."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from interlock import Interlock
from interlock.orchestrator.run import orchestrating
from interlock.postgres.notifier import Notifier
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings
from notifier_support import notifier_at, record
from worker_support import until

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

LISTENERS = (
    "select count(*) as n from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() "
    "and (query like 'listen%' or query like 'unlisten%' or query like '%interlock_probe%')"
)


async def count_listeners(database: Connection) -> int:
    (row,) = await (await database.execute(LISTENERS)).fetchall()
    return int(row["n"])


async def notify(database: Connection, channel: str, payload: str) -> None:
    await database.execute("select pg_notify(%s, %s)", [channel, payload])


async def test_a_worker_an_orchestrator_and_results_share_one_listen_connection(url: str, database: Connection) -> None:
    app = Interlock(url)

    @app.task
    async def sleep() -> None:
        await asyncio.sleep(60)

    async with app, serving(app, WorkerSettings()) as worker, orchestrating(app) as orchestrator:
        waiting = asyncio.create_task((await sleep.enqueue()).result(60))
        await until(lambda: worker._components and worker.components.is_listening and orchestrator.is_listening)  # noqa: SLF001 - not connected yet
        await until(lambda: "interlock_done" in app.notifier.channels)
        assert await count_listeners(database) == 1
        worker.request_shutdown()
        worker.request_shutdown()
        waiting.cancel()
    while await count_listeners(database):  # a backend ends a moment after its connection is closed
        await asyncio.sleep(0.01)


async def test_subscribers_receive_the_payloads_of_their_channels(url: str, database: Connection) -> None:
    async with notifier_at(url) as notifier:
        first, _ = record(notifier, "a")
        second, _ = record(notifier, "b")
        also_second, subscription = record(notifier, "b")
        await until(lambda: notifier.is_listening)
        await notify(database, "a", "1")
        await notify(database, "b", "2")
        await until(lambda: "2" in also_second)
        subscription.close()
        await notify(database, "b", "3")
        await until(lambda: "3" in second)
        assert (first, second, also_second) == (["catch-up", "1"], ["catch-up", "2", "3"], ["catch-up", "2"])


async def test_the_connection_exists_only_while_there_are_subscribers(url: str, database: Connection) -> None:
    async with notifier_at(url) as notifier:
        for _ in range(2):
            received, subscription = record(notifier, "a")
            await until(lambda: received)  # noqa: B023 - awaited in the same round
            assert await count_listeners(database) == 1
            subscription.close()
            subscription.close()
            await until(lambda: notifier.connection is None)
        assert notifier.reconnects == 0


async def test_channels_come_and_go_while_notifications_arrive(url: str, database: Connection) -> None:
    async with notifier_at(url, probe_interval_s=0.05) as notifier:
        received, _ = record(notifier, "a")
        await until(lambda: received)
        for number in range(30):
            await notify(database, "a", str(number))
            others, subscription = record(notifier, f"other_{number}")
            await until(lambda: others)  # noqa: B023 - awaited in the same round
            subscription.close()
        await until(lambda: "29" in received)
        assert received == ["catch-up", *map(str, range(30))]
        assert notifier.reconnects == 0


async def test_a_lost_connection_is_rebuilt_and_every_subscriber_catches_up(url: str, database: Connection) -> None:
    async with notifier_at(url, probe_interval_s=0.05) as notifier:
        received, _ = record(notifier, "a")
        await until(lambda: received)
        await database.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
        await until(lambda: received == ["catch-up", "catch-up"])
        assert notifier.reconnects >= 1
        await notify(database, "a", "1")
        await until(lambda: received[-1] == "1")


async def test_a_deaf_connection_is_noticed_by_its_probe_and_rebuilt(url: str, database: Connection) -> None:
    """The connection lives, but nothing arrives, as behind a pooler in transaction mode."""
    async with notifier_at(url, probe_interval_s=0.2, probe_timeout_s=1) as notifier:
        received, _ = record(notifier, "a")
        await until(lambda: received)
        assert notifier.connection is not None
        await notifier.connection.execute("unlisten *")
        await until(lambda: received == ["catch-up", "catch-up"])
        assert notifier.reconnects >= 1
        await notify(database, "a", "1")
        await until(lambda: received[-1] == "1")


async def test_an_error_of_one_subscriber_does_not_reach_the_others(url: str, database: Connection) -> None:
    def fail(*_: str) -> None:
        raise RuntimeError("a mistake")

    async with notifier_at(url) as notifier:
        notifier.subscribe({"a": fail}, fail)
        received, _ = record(notifier, "a")
        await until(lambda: received)
        await notify(database, "a", "1")
        await until(lambda: received[-1] == "1")
        assert notifier.reconnects == 0


async def test_it_stops_twice_and_before_start_and_starts_again(url: str) -> None:
    notifier = Notifier(url)
    await notifier.stop()
    received, _ = record(notifier, "a")
    for starts in (1, 2):
        await notifier.start()
        await notifier.start()
        await until(lambda: len(received) == starts)  # noqa: B023 - awaited in the same round
        await asyncio.gather(notifier.stop(), notifier.stop())
        assert not notifier.is_running
        assert not notifier.is_listening


async def test_it_stops_while_the_database_cannot_be_reached() -> None:
    async with notifier_at("postgresql://x@127.0.0.1:1/x") as notifier:
        record(notifier, "a")
        await until(lambda: notifier.reconnects >= 2)
        assert not notifier.is_listening
