"""Leader election: one leader at a time, replaced after a crash, without disturbing its worker."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Self

import pytest

from interlock.config import Config
from interlock.errors import ConfigError, DisconnectedError, StoreError
from interlock.model.options import NewTask
from interlock.postgres.connection import connect
from interlock.store.enqueue import enqueue_task
from interlock.store.leader import acquire_leadership, duty_transaction, read_leader, resign_leadership
from interlock.store.limits import Limit, put_limits
from interlock.store.workers import RegisteredProcess, register_worker
from interlock.worker.maintenance.leader import Maintenance, MaintenanceSettings
from worker_support import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
QUICK = MaintenanceSettings(lease=timedelta(seconds=2))


async def test_of_many_contenders_exactly_one_takes_the_lead(url: str) -> None:
    async def contend(name: str) -> bool:
        async with connect(url) as connection:
            return await acquire_leadership(connection, name)

    assert sum(await asyncio.gather(*(contend(f"w{n}") for n in range(8)))) == 1


async def test_a_dead_leader_is_replaced_when_its_lease_ends_and_not_before(database: Connection) -> None:
    assert await acquire_leadership(database, "dead", now=NOON)
    assert not await acquire_leadership(database, "next", now=NOON + 9.9 * SECOND)
    assert await read_leader(database, now=NOON + 9.9 * SECOND) == ("dead", NOON + 10 * SECOND)
    assert await acquire_leadership(database, "next", now=NOON + 10 * SECOND)
    assert not await acquire_leadership(database, "dead", now=NOON + 11 * SECOND), "a zombie cannot come back"
    assert not await resign_leadership(database, "dead"), "nor give up what is another's"
    assert await read_leader(database, now=NOON + 11 * SECOND) == ("next", NOON + 20 * SECOND)


async def test_a_leader_that_renews_keeps_the_lead_and_one_that_resigns_frees_it_at_once(database: Connection) -> None:
    for second in range(0, 60, 3):
        assert await acquire_leadership(database, "keen", now=NOON + second * SECOND)
        assert not await acquire_leadership(database, "other", now=NOON + (second + 2) * SECOND)
    assert await resign_leadership(database, "keen")
    assert await read_leader(database, now=NOON) is None
    assert await acquire_leadership(database, "other", now=NOON)


async def test_two_leaders_act_one_after_the_other(url: str) -> None:
    inside: list[str] = []

    async def act(name: str) -> datetime:
        async with connect(url) as connection, duty_transaction(connection, "limits") as now:
            inside.append(name)
            await connection.execute("select pg_sleep(0.05)")
            assert inside == [name]
            inside.clear()
            return now

    moments = await asyncio.gather(*(act(f"w{n}") for n in range(4)))
    gaps = [after - before for before, after in zip(sorted(moments), sorted(moments)[1:], strict=False)]
    assert min(gaps) > timedelta(milliseconds=40), "each sees the time at which it got the lock"


class Team:
    """The maintenance of several workers over one database."""

    def __init__(self, url: str, size: int) -> None:
        self.members = [Maintenance(url, actor=f"w{n}", settings=QUICK) for n in range(size)]

    @property
    def leading(self) -> list[int]:
        return [number for number, member in enumerate(self.members) if member.is_leader]

    async def __aenter__(self) -> Self:
        for member in self.members:
            await member.start()
        await until(lambda: len(self.leading) == 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        async with asyncio.timeout(30):
            await asyncio.gather(*(member.stop() for member in self.members))


async def test_a_leader_that_stops_resigns_and_another_takes_over(url: str, database: Connection) -> None:
    async with Team(url, 3) as team:
        (first,) = team.leading
        async with asyncio.timeout(30):
            await team.members[first].stop()
        assert not team.members[first].is_leader
        await until(lambda: len(team.leading) == 1 and team.leading != [first])
    assert await read_leader(database) is None, "the last one has resigned too"


@pytest.mark.chaos
async def test_a_leader_that_is_killed_is_replaced(url: str) -> None:
    async with Team(url, 3) as team:
        (first,) = team.leading
        team.members[first].cancel()
        await until(lambda: team.leading not in ([], [first]))


@pytest.mark.chaos
async def test_cut_off_leaders_step_down_and_are_reelected(url: str, database: Connection) -> None:
    async with Team(url, 2) as team:
        for _ in range(3):
            await database.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
                " and datname = current_database()"
            )
            await until(lambda: len(team.leading) == 1)
        assert all(member.is_running for member in team.members)


@pytest.mark.chaos
async def test_an_error_in_one_duty_stops_no_other(url: str, database: Connection) -> None:
    await database.execute("alter table interlock.schedules rename to gone")
    async with Team(url, 1) as team:
        await put_limits(database, [Limit("k", max_running=1)])
        await register_worker(database, RegisteredProcess("w", namespaces=("default",), types=("x",)))
        task = (await enqueue_task(database, NewTask("x", {}, limit_keys=("k",)), actor="me")).id
        team.members[0].wake("limits")
        released = f"select from interlock.tasks where id = '{task}' and state = 'pending'"
        async with asyncio.timeout(30):
            while not (await database.execute(released.encode())).rowcount:
                await asyncio.sleep(0.01)
        await database.execute("alter table interlock.gone rename to schedules")
        assert team.leading == [0]


@pytest.mark.chaos
async def test_a_database_that_is_away_at_first_is_tried_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    @asynccontextmanager
    async def connect_later(_: str) -> AsyncIterator[Connection]:
        tried.append(len(tried))
        if len(tried) < 3:
            raise StoreError("cannot connect")
        async with connect(url) as connection:
            yield connection

    monkeypatch.setattr("interlock.worker.maintenance.leader.connect", connect_later)
    maintenance = Maintenance(url, actor="w", settings=QUICK)
    await maintenance.start()
    await until(lambda: maintenance.is_leader)
    await maintenance.stop()


@pytest.mark.unit
def test_the_settings_of_duties_come_from_the_configuration_and_hide_the_secret() -> None:
    environment = {"INTERLOCK_CALLBACK_SECRET": "hunter2", "INTERLOCK_CALLBACK_ALLOW_PRIVATE": "yes"}
    config = Config.load(environment=environment)
    settings = MaintenanceSettings.of(config)
    assert (settings.webhooks.secret, settings.webhooks.allow_private) == ("hunter2", True)
    assert "hunter2" not in f"{settings!r} {config!r}"
    with pytest.raises(ConfigError, match="CALLBACK_ALLOW_PRIVATE: callback_allow_private must be true or false"):
        Config.load(environment={"INTERLOCK_CALLBACK_ALLOW_PRIVATE": "maybe"})


@asynccontextmanager
async def lend_nothing() -> AsyncIterator[Connection]:
    """Have lost the connection that is lent."""
    raise DisconnectedError("the worker is not connected")
    yield


@asynccontextmanager
async def lend_late() -> AsyncIterator[Connection]:
    """Use the connection that is lent for long."""
    await asyncio.Event().wait()
    raise AssertionError
    yield


@pytest.mark.parametrize("lend", [lend_nothing, lend_late])
async def test_a_worker_whose_connection_is_lost_or_busy_takes_part_in_the_election(
    url: str, lend: Callable[[], AbstractAsyncContextManager[Connection]]
) -> None:
    maintenance = Maintenance(url, actor="w", settings=QUICK, lend=lend)
    await maintenance.start()
    await until(lambda: maintenance.is_leader)
    await maintenance.stop()
    async with connect(url) as connection:
        assert await read_leader(connection) is None, "it has resigned"
