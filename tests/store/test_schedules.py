"""Schedules fire every tick once: in their time zone, after outages by their policy, never twice."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from structlog.testing import capture_logs

from interlock.errors import ConfigError
from interlock.model.timing import Rhythm
from interlock.postgres.connection import connect
from interlock.store.schedules import (
    Schedule,
    delete_schedules,
    list_schedules,
    next_schedule_at,
    pause_schedules,
    put_schedules,
    resume_schedules,
)
from interlock.worker.maintenance.leader import SCHEDULE_POLL_INTERVAL_S, SchedulesDuty
from interlock.workflow.fire_schedules import fire_due_schedules

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
BERLIN = ZoneInfo("Europe/Berlin")


def hourly(name: str = "report", **options: Any) -> Schedule:
    return Schedule(name, "x", **{"cron": "0 * * * *", **options})


async def ticks(database: Connection) -> list[datetime]:
    found = await (await database.execute("select run_at from interlock.tasks order by run_at")).fetchall()
    return [row["run_at"] for row in found]


async def fire(database: Connection, now: datetime) -> int:
    return sum(len(fired.ids) for fired in await fire_due_schedules(database, actor="leader", now=now))


async def test_a_tick_fires_once_with_what_was_declared(database: Connection) -> None:
    options = {"priority": 3, "max_tries": 2, "tags": ["nightly"], "unique_key": "report", "timeout_seconds": 5.0}
    await put_schedules(database, [hourly(namespace="reports", input={"of": "day"}, options=options)], now=NOON)
    assert await fire(database, NOON + HOUR - MINUTE) == 0
    assert await fire(database, NOON + HOUR) == 1
    assert await fire(database, NOON + HOUR) == 0
    assert await fire(database, NOON + HOUR + MINUTE) == 0
    (task,) = await (await database.execute("select * from interlock.tasks")).fetchall()
    expected = {"type": "x", "namespace": "reports", "input": {"of": "day"}, "run_at": NOON + HOUR, **options}
    assert {name: task[name] for name in expected} == expected
    assert task["request_id"] == "schedule:report:2030-01-01T13:00:00+00:00"
    (state,) = await list_schedules(database)
    assert (state.last_at, state.next_at) == (NOON + HOUR, NOON + 2 * HOUR)


async def test_an_interval_keeps_its_rhythm_however_late_it_is_looked_at(database: Connection) -> None:
    await put_schedules(database, [Schedule("often", "x", every=timedelta(seconds=10))], now=NOON)
    for second in (10, 23, 31, 59):
        await fire(database, NOON + timedelta(seconds=second))
    assert [int((tick - NOON).total_seconds()) for tick in await ticks(database)] == [10, 20, 30, 50]


@pytest.mark.parametrize(
    ("missed", "late", "expected"),
    [
        ("once", timedelta(0), [3]),
        ("once", timedelta(minutes=30), [3]),
        ("skip", timedelta(seconds=30), [3]),
        ("skip", timedelta(minutes=30), []),
        ("all", timedelta(minutes=30), [1, 2, 3]),
    ],
)
async def test_missed_ticks_follow_policy(
    database: Connection, missed: str, late: timedelta, expected: list[int]
) -> None:
    await put_schedules(database, [hourly(missed=missed)], now=NOON)
    await fire(database, NOON + 3 * HOUR + late)
    assert await ticks(database) == [NOON + hours * HOUR for hours in expected]
    assert await next_schedule_at(database) == NOON + 4 * HOUR


async def test_all_missed_ticks_are_at_most_the_latest_thousand(database: Connection) -> None:
    await put_schedules(database, [Schedule("m", "x", cron="* * * * *", missed="all")], now=NOON)
    assert await fire(database, NOON + 5000 * MINUTE) == 1000
    found = await ticks(database)
    assert (found[0], found[-1]) == (NOON + 4001 * MINUTE, NOON + 5000 * MINUTE)


@pytest.mark.chaos
async def test_several_leaders_at_once_fire_every_tick_once(url: str, database: Connection) -> None:
    await put_schedules(database, [hourly(f"s{n}", missed="all") for n in range(20)], now=NOON)

    async def leader() -> int:
        async with connect(url) as connection:
            return sum([await fire(connection, NOON + hours * HOUR) for hours in range(1, 4)])

    assert sum(await asyncio.gather(*(leader() for _ in range(4)))) == 60
    assert len(await ticks(database)) == 60


async def test_a_tick_that_was_fired_is_not_fired_again_even_if_its_schedule_is_put_back(database: Connection) -> None:
    await put_schedules(database, [hourly()], now=NOON)
    await fire(database, NOON + HOUR)
    await database.execute("update interlock.schedules set next_at = next_at - interval '1 hour'")
    await fire(database, NOON + HOUR)
    assert len(await ticks(database)) == 1


async def test_declaring_again_keeps_the_next_tick_unless_the_rhythm_changed(database: Connection) -> None:
    every = Schedule("e", "x", every=HOUR)
    assert await put_schedules(database, [hourly(), every], now=NOON) == ["e", "report"]
    later = NOON + 30 * MINUTE
    assert await put_schedules(database, [hourly(), every], now=later) == []
    assert await put_schedules(database, [Schedule("e", "y", every=HOUR)], now=later) == ["e"]
    assert {state.next_at for state in await list_schedules(database)} == {NOON + HOUR}
    assert await put_schedules(database, [Schedule("e", "y", every=2 * HOUR)], now=later) == ["e"]
    assert [state.next_at for state in await list_schedules(database)] == [later + 2 * HOUR, NOON + HOUR]


async def test_a_paused_schedule_rests_and_goes_on_with_the_next_tick(database: Connection) -> None:
    await put_schedules(database, [hourly(missed="all")], now=NOON)
    assert await pause_schedules(database, ["report", "none"], actor="ada") == ["report"]
    assert await fire(database, NOON + 5 * HOUR) == 0
    assert await resume_schedules(database, ["report"], actor="ada", now=NOON + 5 * HOUR + MINUTE) == ["report"]
    assert await resume_schedules(database, ["report"], actor="ada") == []
    assert await next_schedule_at(database) == NOON + 6 * HOUR
    assert await delete_schedules(database, ["report"]) == ["report"]
    assert await next_schedule_at(database) is None


@pytest.mark.chaos
async def test_a_broken_schedule_is_reported_and_others_fire(database: Connection) -> None:
    await put_schedules(database, [hourly(name) for name in ("broken", "bad", "good")], now=NOON)
    await database.execute("update interlock.schedules set cron = 'nonsense' where name = 'broken'")
    await database.execute("""update interlock.schedules set options = '{"max_tries": 0}' where name = 'bad'""")
    with capture_logs() as logs:
        rest = await SchedulesDuty("leader").run_once(database, now=NOON + HOUR)
    assert rest == SCHEDULE_POLL_INTERVAL_S
    assert {(line["event"], line.get("schedule")) for line in logs} == {
        ("schedule_failed", "broken"),
        ("schedule_failed", "bad"),
    }
    bad, broken, good = await list_schedules(database)
    assert "tasks_tries" in str(bad.error)
    assert (bad.next_at, bad.paused_at, bad.last_at) == (NOON + 2 * HOUR, None, None)
    assert (broken.paused_at, "5 fields" in str(broken.error)) == (NOON + HOUR, True)
    assert (good.error, good.last_at) == (None, NOON + HOUR)


async def test_a_schedule_whose_tick_is_at_infinity_does_not_stop_the_others(database: Connection) -> None:
    every = timedelta(hours=1)
    schedules = [hourly("a"), Schedule("b", "x", every=every), hourly("c"), Schedule("d", "x", every=every)]
    await put_schedules(database, schedules, now=NOON)
    await database.execute("update interlock.schedules set next_at = '-infinity' where name in ('a', 'b')")
    await database.execute("update interlock.schedules set next_at = 'infinity' where name = 'd'")
    assert [state.name for state in await list_schedules(database)] == ["a", "b", "c", "d"]
    assert await next_schedule_at(database) is not None
    assert await fire(database, NOON + HOUR) == 3
    assert await next_schedule_at(database) == NOON + 2 * HOUR


async def test_schedules_that_are_due_together_are_fired_by_one_statement(database: Connection) -> None:
    await put_schedules(database, [hourly(f"report {n}", missed="all") for n in range(40)], now=NOON)
    fired = await fire_due_schedules(database, actor="leader", now=NOON + 2 * HOUR)
    assert [len(each.ids) for each in fired] == [2] * 40
    records = await (await database.execute("select distinct recorded_at from interlock.audit_logs")).fetchall()
    assert len(records) == 1, "the clock of the record is read once by each statement"
    assert {(state.next_at, state.last_at) for state in await list_schedules(database)} == {
        (NOON + 3 * HOUR, NOON + 2 * HOUR)
    }
    assert await fire(database, NOON + 2 * HOUR) == 0


async def test_a_round_leaves_schedules_with_very_many_missed_ticks_to_the_next_one(database: Connection) -> None:
    every_minute = [Schedule(f"s{n}", "x", cron="* * * * *", missed="all") for n in range(12)]
    await put_schedules(database, every_minute, now=NOON)
    moment = NOON + timedelta(days=2)
    assert [await fire(database, moment) for _ in range(3)] == [10_000, 2_000, 0]


async def test_the_duty_rests_until_the_next_tick(database: Connection) -> None:
    duty = SchedulesDuty("leader")
    assert await duty.run_once(database, now=NOON) == SCHEDULE_POLL_INTERVAL_S
    await put_schedules(database, [Schedule("soon", "x", every=timedelta(seconds=7))], now=NOON)
    assert await duty.run_once(database, now=NOON) == 7


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cron": "61 * * * *"}, "schedule 's': '61 [*] [*] [*] [*]' is not a cron expression: bad minute"),
        ({"cron": "* * *"}, "schedule 's': '[*] [*] [*]' is not a cron expression of 5 fields"),
        ({"cron": "0 0 30 2 *"}, "schedule 's': .* is not a cron expression: bad day-of-month"),
        (
            {"cron": "0 0 * 2 MON#5", "timezone": "Mars/Olympus"},
            "'Mars/Olympus' is not a known time zone",
        ),
        ({"cron": "* * * * *", "timezone": "../etc/passwd"}, "schedule 's': .* is not a known time zone"),
        ({"every": timedelta(0)}, "schedule 's': the interval must be greater than 0, got 0:00:00"),
        ({}, "schedule 's': give either a cron expression or an interval"),
        ({"cron": "* * * * *", "every": HOUR}, "schedule 's': give either"),
        ({"every": HOUR, "missed": "never"}, "schedule 's': missed must be one of skip, once, all"),
        ({"every": HOUR, "options": {"prio": 1}}, "schedule 's': unknown option 'prio'; known are backoff"),
    ],
)
def test_an_invalid_schedule_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule("s", "x", **options)


def berlin(text: str, fold: int = 0) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN, fold=fold).astimezone(UTC)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("cron", "begin", "expected"),
    [
        # Clocks go from 2:00 to 3:00 on 2030-03-31: a time of day that does not exist comes right after the gap.
        ("30 2 * * *", "2030-03-30T12:00", [berlin("2030-03-31T03:00"), berlin("2030-04-01T02:30")]),
        ("0 * * * *", "2030-03-31T00:30", [berlin("2030-03-31T01:00"), berlin("2030-03-31T03:00")]),
        # Clocks go from 3:00 back to 2:00 on 2030-10-27: a time of day that comes twice fires the first time only,
        ("30 2 * * *", "2030-10-26T12:00", [berlin("2030-10-27T02:30"), berlin("2030-10-28T02:30")]),
        # and what fires every hour fires in both.
        ("30 * * * *", "2030-10-27T02:00", [berlin("2030-10-27T02:30"), berlin("2030-10-27T02:30", fold=1)]),
    ],
)
def test_ticks_are_right_where_clocks_change(cron: str, begin: str, expected: list[datetime]) -> None:
    rhythm = Rhythm(cron=cron, timezone="Europe/Berlin")
    first = rhythm.after(berlin(begin))
    assert [first, rhythm.after(first)] == expected
    assert rhythm.due(first, expected[-1], 10) == expected


@pytest.mark.unit
@pytest.mark.parametrize("cron", ["30 2 * * *", "*/20 * * * *", "15 1,2,3 * * *", "0 */2 * * *"])
@pytest.mark.parametrize("day", ["2030-03-31", "2030-10-27"])
def test_ticks_come_in_order_whatever_the_moment_they_are_asked_at(cron: str, day: str) -> None:
    rhythm = Rhythm(cron=cron, timezone="Europe/Berlin")
    midnight = berlin(f"{day}T00:00")
    whole = rhythm.due(rhythm.after(midnight), midnight + 30 * HOUR, 1000)
    assert whole == sorted(set(whole))
    for minutes in range(0, 6 * 60, 7):
        moment = midnight + minutes * MINUTE
        assert rhythm.after(moment) == next(tick for tick in whole if tick > moment)
        latest = [tick for tick in whole if tick <= moment][-2:]
        if latest:
            assert rhythm.due(whole[0], moment, 2) == latest


@pytest.mark.unit
def test_a_long_outage_is_reckoned_quickly() -> None:
    now = NOON + timedelta(days=3650)
    assert Rhythm(every=timedelta(milliseconds=1)).due(NOON, now, 1) == [now]
    assert Rhythm(cron="* * * * *", timezone="Europe/Berlin").due(NOON, now, 1) == [now]
