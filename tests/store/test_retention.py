"""Retention: ended rows past their age are deleted in batches; unfinished and needed rows stay."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
from structlog.testing import capture_logs

from factories import run_sql
from interlock.postgres.connection import connect
from interlock.postgres.migrate import grant
from interlock.store.doctor import examine
from interlock.store.retention import (
    Retention,
    delete_ended_tasks,
    delete_expired,
    first_id_at,
    maintain_record_partitions,
)
from interlock.store.workers import RegisteredProcess, register_worker
from interlock.telemetry import metrics_registry
from interlock.worker.maintenance import retention as duty_module
from interlock.worker.maintenance.retention import BEHIND_S, DISTANCES, Backlog, RetentionDuty

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection
    from interlock.postgres.embedded.server import EmbeddedServer

pytestmark = pytest.mark.store

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)
ENDS = {
    "done": "state = 'done', event = 'succeed', settled_attempt = 1, lease_expires_at = null",
    "error": "state = 'error', event = 'fail', settled_attempt = 1, lease_expires_at = null",
    "canceled": "state = 'canceled', event = 'cancel', lease_expires_at = null",
    "skipped": "state = 'skipped', event = 'skip'",
}
CLAIM = (
    "update interlock.tasks set state = 'running', event = 'claim', attempt = 1, worker_id = 'w',"
    " lease_expires_at = now()"
)


def id_of(created_at: datetime) -> UUID:
    """Make an id as it was made at that time."""
    return UUID(int=first_id_at(created_at).int | uuid4().int >> 48)


async def ended(database: Connection, state: str, age: timedelta, task: UUID | None = None, **columns: Any) -> UUID:
    """Store a task that ended at a given age."""
    id_ = task or id_of(NOW - age - timedelta(seconds=1))
    start = "waiting" if state == "skipped" else "pending"
    names = ", ".join(["id", "type", "state", *columns])
    marks = ", ".join(["%s"] * (3 + len(columns)))
    query = f"insert into interlock.tasks ({names}) values ({marks})"
    await database.execute(query.encode(), [id_, "x", start, *columns.values()])
    if state in ("done", "error"):
        await database.execute(f"{CLAIM} where id = %s".encode(), [id_])
    end = f"update interlock.tasks set {ENDS[state]}, finished_at = %s where id = %s"
    await database.execute(end.encode(), [NOW - age, id_])
    return id_


async def tasks(database: Connection) -> set[UUID]:
    return {row["id"] for row in await (await database.execute("select id from interlock.tasks")).fetchall()}


async def test_each_state_goes_at_its_own_age_and_unfinished_work_stays(database: Connection) -> None:
    old = {state: await ended(database, state, 8 * DAY) for state in ("done", "canceled", "skipped", "error")}
    young = {await ended(database, state, 6 * DAY) for state in ("done", "canceled", "skipped", "error")}
    await ended(database, "error", 31 * DAY)
    pending = id_of(NOW - 100 * DAY)
    await database.execute("insert into interlock.tasks (id, type) values (%s, 'x')", [pending])
    stretch = await delete_ended_tasks(database, Retention(), now=NOW)
    assert (stretch.walked, stretch.deleted) == (10, 4)
    assert await tasks(database) == young | {old["error"], pending}


async def test_none_keeps_for_good_and_zero_deletes_at_once(database: Connection) -> None:
    kept, _gone = await ended(database, "error", 1000 * DAY), await ended(database, "done", timedelta(0))
    await delete_ended_tasks(database, Retention(done=timedelta(0), error=None), now=NOW)
    assert await tasks(database) == {kept}
    assert Retention(done=timedelta(0)).ages[0] == timedelta(0)
    assert Retention(done=None, canceled=None, skipped=None, error=None).ages == []


async def run_walks(duty: RetentionDuty, connection: Connection, now: datetime) -> int:
    """Run a duty until it rests; return the number of batches."""
    await duty.run_once(connection, now=now)
    batches = 1
    while duty.walks:
        await duty.run_once(connection, now=now)
        batches += 1
    return batches


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the number of tasks that each batch looks at."""
    numbers: list[int] = []

    async def delete_batch(*arguments: Any, **options: Any) -> Any:
        batch = await delete_ended_tasks(*arguments, **options)
        numbers.append(batch.walked)
        return batch

    monkeypatch.setitem(duty_module.TABLES, "tasks", delete_batch)
    return numbers


async def test_a_new_leader_walks_over_the_table_once(database: Connection, walked: list[int]) -> None:
    failed = {await ended(database, "error", 20 * DAY) for _ in range(5)}
    gone = {await ended(database, "done", 20 * DAY) for _ in range(2)}
    await run_walks(RetentionDuty(Retention()), database, NOW)
    assert sum(walked) == len(failed | gone)
    assert await tasks(database) == failed


async def test_the_duty_walks_in_stretches_and_then_only_over_what_came_of_age(
    database: Connection, monkeypatch: pytest.MonkeyPatch, walked: list[int]
) -> None:
    monkeypatch.setattr(duty_module, "FOLLOW_INTERVAL_S", 0.0)
    old = [await ended(database, "done", 10 * DAY + number * timedelta(hours=1)) for number in range(5)]
    young = {await ended(database, "done", DAY) for _ in range(4)}
    duty = RetentionDuty(Retention(), batch_size=3)
    assert await run_walks(duty, database, NOW) == 4, "three full batches, and the rest"
    assert await tasks(database) == young
    assert sum(walked) == len(old) + len(young), "the first walk goes over everything"
    walked.clear()
    due = await ended(database, "done", 6.5 * DAY)
    follower = next(iter(duty.followers))
    duty.followers[follower] = 0.0
    await run_walks(duty, database, NOW + DAY)
    assert walked == [1], "the next one looks only at the ids since then"
    assert due not in await tasks(database)


@pytest.mark.parametrize("distance", DISTANCES)
async def test_a_task_that_ended_long_after_it_was_made_is_met_by_a_later_walk(
    database: Connection, distance: timedelta
) -> None:
    """Its id comes of age before its end does: the walks that pass it too early leave it to the others."""
    duty = RetentionDuty(Retention())
    await run_walks(duty, database, NOW)
    late = await ended(database, "done", 7 * DAY, id_of(NOW - 7 * DAY - distance / 2))
    assert await tasks(database) == {late}
    for follower in duty.followers:
        duty.followers[follower] = 0.0
        duty.followed[follower] = first_id_at(NOW - follower.age - follower.distance)
    await run_walks(duty, database, NOW + distance)
    assert await tasks(database) == set()


async def test_user_chosen_ids_are_found_by_a_full_scan(database: Connection) -> None:
    await ended(database, "done", 10 * DAY, UUID("ffffffff-0000-4000-8000-000000000000"))
    duty = RetentionDuty(Retention())
    await run_walks(duty, database, NOW)
    assert await tasks(database) == set()
    late = await ended(database, "done", 10 * DAY, UUID("ffffffff-0000-4000-8000-000000000001"))
    duty.next_sweep = 0.0
    await run_walks(duty, database, NOW)
    assert await tasks(database) == {late}, "until the next day's"


async def test_a_backlog_is_logged_once_and_measured_until_it_is_gone(
    database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    backlog = Backlog()
    monkeypatch.setattr(duty_module, "backlog", backlog)
    for number in range(8):
        await ended(database, "done", 8 * DAY + number * timedelta(seconds=1))
    before = metrics_registry.get_sample_value("retention_deleted_total", {"table": "tasks"}) or 0
    duty = RetentionDuty(Retention(), batch_size=4)
    with capture_logs() as logs:
        await duty.run_once(database, now=NOW)
        assert metrics_registry.get_sample_value("retention_overdue_seconds") == pytest.approx(
            DAY.total_seconds(), abs=20
        )
        assert backlog.document()["retention_overdue_s"] > BEHIND_S
        await run_walks(duty, database, NOW)
    assert [line["event"] for line in logs] == ["retention_behind"]
    assert metrics_registry.get_sample_value("retention_overdue_seconds") == 0
    assert backlog.document() == {}
    assert metrics_registry.get_sample_value("retention_deleted_total", {"table": "tasks"}) == before + 8


@pytest.mark.parametrize("age", [None, timedelta(days=1_000_000)])
async def test_ages_that_nothing_reaches_let_the_duty_rest(database: Connection, age: timedelta | None) -> None:
    kept = await ended(database, "done", 1000 * DAY)
    duty = RetentionDuty(Retention(done=age, canceled=age, skipped=age, error=age))
    assert await duty.run_once(database, now=NOW) > 1.0, "seconds"
    assert await tasks(database) == {kept}


async def test_one_task_that_is_long_overdue_is_no_backlog(database: Connection) -> None:
    """It waited for days, or has an id that a client chose."""
    await ended(database, "done", 20 * DAY)
    duty = RetentionDuty(Retention(), batch_size=4)
    with capture_logs() as logs:
        await run_walks(duty, database, NOW)
    assert logs == []
    assert await tasks(database) == set()


async def test_the_doctor_reports_a_backlog_that_a_heartbeat_tells_of(database: Connection) -> None:
    await register_worker(database, RegisteredProcess("leading", statistics={"retention_overdue_s": 7200}))
    await register_worker(database, RegisteredProcess("other"))
    found = [finding for finding in (await examine(database)).findings if finding.code == "retention_behind"]
    assert [finding.sample for finding in found] == [("leading",)]
    assert "7200 s past their retention age" in found[0].message


async def test_all_expired_keys_go_however_many(database: Connection) -> None:
    await database.execute(
        "insert into interlock.idempotency_keys (actor, request_id, endpoint, request_hash, expires_at)"
        " select 'api', n::text, '', '', %s from generate_series(1, 25) as n",
        [NOW],
    )
    duty = RetentionDuty(Retention(), batch_size=10)
    for _ in range(3):
        await duty.run_once(database, now=NOW)
    rows = await (await database.execute("select from interlock.idempotency_keys")).fetchall()
    assert rows == []


@pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan"])
async def test_a_stretch_reads_no_more_than_itself(database: Connection, mode: str) -> None:
    database.prepare_threshold = 0
    await database.execute(f"set plan_cache_mode = {mode}".encode())
    await database.execute("insert into interlock.tasks (type) select 'x' from generate_series(1, 20000)")
    await database.execute("analyze interlock.tasks")
    async with database.transaction():
        await delete_ended_tasks(database, Retention(), stretch=100)
        query = "select seq_scan, idx_tup_fetch from pg_stat_xact_user_tables where relname = 'tasks'"
        seen = await (await database.execute(query)).fetchone()
    assert seen is not None
    assert (seen["seq_scan"], seen["idx_tup_fetch"] <= 200) == (0, True)


async def test_expired_keys_waiters_and_notices_go(database: Connection) -> None:
    for name, expires_at in (("old", NOW), ("new", NOW + DAY)):
        await database.execute(
            "insert into interlock.idempotency_keys (actor, request_id, endpoint, request_hash, response_status,"
            " response_body, expires_at) values ('api', %s, '', '', 200, '', %s)",
            [name, expires_at],
        )
        await database.execute("insert into interlock.waiters values (%s, %s, %s)", [uuid4(), uuid4(), expires_at])
    for given_up_at in (NOW - 30 * DAY, NOW, None):
        await database.execute(
            "insert into interlock.callbacks (task_id, attempt, state, url, given_up_at)"
            " values (%s, 1, 'done', '', %s)",
            [uuid4(), given_up_at],
        )
    assert (await delete_expired(database, Retention(), now=NOW)).deleted == 3
    assert (await delete_expired(database, Retention(), now=NOW)).deleted == 0


async def test_messages_set_aside_that_belong_to_no_job_go_like_tasks_in_error(database: Connection) -> None:
    (job,) = await (
        await database.execute("insert into interlock.jobs (task_description) values ('w') returning id")
    ).fetchall()
    for number, (owner, days) in enumerate([(None, 31), (uuid4(), 31), (job["id"], 31), (None, 29)]):
        await database.execute(
            "insert into interlock.orchestration_failures (msg_id, job_id, message, error, failed_at)"
            " values (%s, %s, '{}', 'no', %s)",
            [number, owner, NOW - days * DAY],
        )
    assert (await delete_expired(database, Retention(error=None), now=NOW)).deleted == 0, "kept for good"
    assert (await delete_expired(database, Retention(), now=NOW)).deleted == 2
    left = await (await database.execute("select msg_id from interlock.orchestration_failures order by 1")).fetchall()
    assert [row["msg_id"] for row in left] == [2, 3]


async def partitions(database: Connection) -> set[str]:
    query = (
        "select relname as name from pg_inherits join pg_class on pg_class.oid = inhrelid"
        " where inhparent = 'interlock.audit_logs'::regclass"
    )
    return {row["name"] for row in await (await database.execute(query)).fetchall()}


async def test_records_go_by_whole_months_and_the_months_to_come_are_made(database: Connection) -> None:
    today = datetime.now(UTC)
    first = today.replace(day=1)
    coming = f"audit_logs_{today:%Y_%m}"
    await database.execute(
        "create table interlock.audit_logs_2001_01 partition of interlock.audit_logs"
        " for values from ('2001-01-01Z') to ('2001-02-01Z')"
    )
    later = f"audit_logs_{first + 70 * DAY:%Y_%m}"
    await database.execute(f"drop table interlock.{later}".encode())
    assert await maintain_record_partitions(database, Retention(records=None)) == [], "kept for good"
    assert await maintain_record_partitions(database, Retention()) == ["audit_logs_2001_01"]
    assert {coming, later} <= await partitions(database)


async def test_a_role_without_ownership_warns_once(database: Connection, url: str, server: EmbeddedServer) -> None:
    run_sql(server.url("postgres"), "drop role if exists retention_runner; create role retention_runner login")
    await grant(database, "retention_runner")
    await database.execute(
        "create table interlock.audit_logs_2001_01 partition of interlock.audit_logs"
        " for values from ('2001-01-01Z') to ('2001-02-01Z')"
    )
    await ended(database, "done", 10 * DAY)
    async with connect(url) as runner:
        await runner.execute("set role retention_runner")
        duty = RetentionDuty(Retention())
        with capture_logs() as logs:
            await duty.run_once(runner, now=NOW)
    assert [line["event"] for line in logs] == ["record_partitions_not_renewed"]
    assert await tasks(database) == set()


@pytest.mark.chaos
async def test_busy_records_are_not_waited_for(database: Connection, url: str) -> None:
    await database.execute(
        "create table interlock.audit_logs_2001_01 partition of interlock.audit_logs"
        " for values from ('2001-01-01Z') to ('2001-02-01Z')"
    )
    async with connect(url) as reader, reader.transaction():
        await reader.execute("select from interlock.audit_logs limit 1")
        assert await maintain_record_partitions(database, Retention()) is None
    assert await maintain_record_partitions(database, Retention()) == ["audit_logs_2001_01"]
