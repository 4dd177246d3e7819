"""History of figures: counts from the records, sums of processes, rows of longer times, and their age."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from factories import claim_tasks, enqueue, task_row
from interlock.dashboard.history import read_history
from interlock.dashboard.svg.charts import area_path
from interlock.dashboard.views.overview import charts
from interlock.model.histogram import percentile, position_of
from interlock.store.figures import (
    MINUTE,
    Figure,
    add_figures,
    add_refused_figures,
    count_minute,
    delete_old_figures,
    floor_time,
    roll_up,
)
from interlock.worker.maintenance.figures import FiguresDuty

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store
NOON = datetime(2026, 5, 1, 12, 3, tzinfo=UTC)


async def figures(database: Connection, **wanted: Any) -> list[dict[str, Any]]:
    cursor = await database.execute("select * from interlock.figures order by grain, at, kind, machine, event")
    return [row for row in await cursor.fetchall() if all(row[name] == value for name, value in wanted.items())]


async def recorded_minute(database: Connection) -> datetime:
    cursor = await database.execute("select min(recorded_at) as at from interlock.audit_logs")
    row = await cursor.fetchone()
    assert row is not None
    return floor_time(row["at"], MINUTE)


async def test_moves_of_a_minute_equal_the_records(database: Connection) -> None:
    for _ in range(3):
        await enqueue(database)
    await claim_tasks(database, limit=2, actor="w", types=["x"])
    minute = await recorded_minute(database)
    for _ in range(2):  # again: replaced, not added
        await count_minute(database, minute)
        await count_minute(database, minute + MINUTE)
    counted = {(row["from_state"], row["to_state"]): row["total"] for row in await figures(database, machine="task")}
    records = await database.execute(
        "select coalesce(from_state, '') as a, to_state as b, count(*) as n from interlock.audit_logs group by 1, 2"
    )
    assert counted == {(row["a"], row["b"]): row["n"] for row in await records.fetchall()}
    assert counted["", "pending"] == 3


async def test_types_beyond_a_hundred_are_counted_together(database: Connection) -> None:
    await database.execute(
        "insert into interlock.tasks (type) select 'type ' || number from generate_series(1, 130) as number"
    )
    await count_minute(database, await recorded_minute(database))
    rows = await figures(database, machine="task")
    assert sum(row["total"] for row in rows) == 130
    assert len(rows) == 101
    assert [row["total"] for row in rows if row["type"] == "…"] == [30]


def _waits(*durations: float) -> Figure:
    positions = sorted({position_of(duration) for duration in durations})
    counts = [sum(position_of(duration) == position for duration in durations) for position in positions]
    return Figure("wait", "task", len(durations), "default", "mail", positions=positions, counts=counts)


async def test_sums_of_processes_are_added(database: Connection) -> None:
    await add_figures(database, [_waits(0.001, 0.001, 1.0)], now=NOON)
    await add_figures(database, [_waits(0.001, 30.0)], now=NOON + timedelta(seconds=20))
    (row,) = await figures(database, kind="wait")
    assert row["total"] == 5
    assert dict(zip(row["positions"], row["counts"], strict=True)) == {
        position_of(0.001): 3,
        position_of(1.0): 1,
        position_of(30.0): 1,
    }
    assert row["at"] == NOON


@pytest.mark.unit
@pytest.mark.parametrize("seconds", [0.0002, 0.0137, 0.61, 7.7, 4000.0])
def test_a_percentile_is_right_within_nine_percent(seconds: float) -> None:
    found = percentile([position_of(seconds)], [10], 0.95)
    assert found is not None
    assert abs(found - seconds) / seconds < 0.1


async def test_rows_of_ten_and_sixty_minutes_are_sums(database: Connection) -> None:
    for at in range(20):
        await add_figures(database, [_waits(0.5), Figure("move", "worker", 2, event="e")], now=NOON + at * MINUTE)
    for at in (0, 10, 19):
        await roll_up(database, NOON + at * MINUTE)
        await roll_up(database, NOON + at * MINUTE)
    tens = await figures(database, grain=10, kind="wait")
    assert [(row["at"].minute, row["total"], row["counts"]) for row in tens] == [
        (0, 7, [7]),
        (10, 10, [10]),
        (20, 3, [3]),
    ]
    (hour,) = await figures(database, grain=60, kind="move")
    assert (hour["at"].minute, hour["total"]) == (0, 40)


async def test_old_figures_are_deleted(database: Connection) -> None:
    for age in (timedelta(), timedelta(hours=7)):
        await add_figures(database, [_waits(0.5)], now=NOON - age)
        await roll_up(database, NOON - age)
    await delete_old_figures(database, now=NOON)
    kept = [(row["grain"], row["at"].hour) for row in await figures(database)]
    assert kept == [(1, 12), (10, 5), (10, 12), (60, 5), (60, 12)]
    await delete_old_figures(database, now=NOON + timedelta(days=91))
    assert await figures(database) == []


async def test_the_leader_counts_what_happened_without_a_leader(database: Connection) -> None:
    await enqueue(database)
    await claim_tasks(database, actor="w", types=["x"])
    minute = await recorded_minute(database)
    later = minute + timedelta(minutes=20, seconds=30)
    assert await FiguresDuty().run_once(database, now=later) > 0
    assert sum(row["total"] for row in await figures(database, at=minute, grain=1, kind="move")) == 2
    assert sum(row["total"] for row in await figures(database, grain=10, kind="move")) == 2
    (depth,) = await figures(database, grain=1, kind="depth")
    assert (depth["to_state"], depth["total"]) == ("running", 1)


async def test_refused_moves_are_counted_and_change_nothing(database: Connection) -> None:
    task = await enqueue(database)
    minute = await recorded_minute(database)
    for _ in range(3):
        with pytest.raises(psycopg.DatabaseError, match="cannot move"):
            await database.execute("update interlock.tasks set state = 'done' where id = %s", [task])
    for _ in range(2):
        await add_refused_figures(database, minute)
    rows = await figures(database, grain=1, kind="refused")
    assert [(row["machine"], row["from_state"], row["to_state"], row["total"]) for row in rows] == [
        ("task", "pending", "done", 3)
    ]
    assert (await task_row(database, task))["state"] == "pending"


async def test_history_has_throughput_failures_and_percentiles(database: Connection) -> None:
    moves = [
        Figure("move", "task", 60, "default", "mail", "running", "succeed", "done"),
        Figure("move", "task", 30, "default", "mail", "running", "retry", "pending"),
        Figure("move", "task", 30, "other", "mail", "running", "fail", "error"),
    ]
    await add_figures(database, [*moves, _waits(*[0.1] * 95, *[2.0] * 5)], now=NOON)
    now = NOON + timedelta(minutes=5, seconds=30)
    history = await read_history(database, "1h", now, None)
    at = history.times.index(NOON)
    assert history.done[at] == 1.0
    assert history.errors[at] == 0.5
    assert history.failures[at] == 60
    assert history.failure_share == 0.5
    assert history.waits["p50"][at] == pytest.approx(0.1, rel=0.1)
    assert history.waits["p99"][at] == pytest.approx(2.0, rel=0.1)
    only = await read_history(database, "1h", now, frozenset({"other"}))
    assert (only.ended, only.attempts) == (30, 30)


async def test_a_minute_that_is_not_over_has_no_rate_yet(database: Connection) -> None:
    """Its moves are counted now and then: a sum divided by the time since its start would be too low."""
    ended = Figure("move", "task", 60, "default", "mail", "running", "succeed", "done")
    failed = Figure("move", "task", 1, "default", "mail", "running", "fail", "error")
    await add_figures(database, [ended, failed], now=NOON)
    await add_figures(database, [failed], now=NOON + MINUTE)
    history = await read_history(database, "1h", NOON + timedelta(seconds=118), None)
    assert history.times[-1] == NOON + MINUTE
    assert (history.done[-2:], history.errors[-1], history.failures[-1]) == ([1.0, None], None, None)
    assert history.in_error == 2
    throughput, *_, failures, _ = charts(history)
    assert [drawn.line.shown for drawn in (*throughput.series, *failures.series)] == ["1", "0.017", "1"]


async def test_the_depth_is_sampled_in_each_minute(database: Connection) -> None:
    await enqueue(database)
    duty = FiguresDuty()
    minute = floor_time(datetime.now(UTC), MINUTE)
    for at in (minute, minute + MINUTE, minute + 2 * MINUTE):  # faster than the current minute is counted again
        await duty.run_once(database, now=at + timedelta(seconds=30))
    assert [row["at"] - minute for row in await figures(database, grain=1, kind="depth")] == [
        0 * MINUTE,
        MINUTE,
        2 * MINUTE,
    ]


def test_there_is_no_area_below_a_gap() -> None:
    path = area_path([None, 4.0, 2.0, None, 3.0, None, 1.0, 1.0], 4.0, 70, 100)
    assert path == "M10 0L20 50L20 100L10 100ZM60 75L70 75L70 100L60 100Z"


async def test_the_duty_summarizes_new_records(database: Connection) -> None:
    # autovacuum may do the same, but not while this test looks
    leaves = "select relid::regclass::text as name from pg_partition_tree('interlock.audit_logs_time') where isleaf"
    indexes = [row["name"] for row in await (await database.execute(leaves.encode())).fetchall()]
    for index in indexes:
        await database.execute(f"alter index {index} set (autosummarize = off)".encode())
    await database.execute(b"insert into interlock.tasks (type) select 'x' from generate_series(1, 20000)")
    await FiguresDuty().run_once(database)
    left = f"select sum(brin_summarize_new_values(name::regclass)) as ranges from ({leaves}) as leaf"
    assert await (await database.execute(left.encode())).fetchone() == {"ranges": 0}, "many ranges without the duty"
