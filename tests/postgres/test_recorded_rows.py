"""Recorded rows stay as they are: tasks and jobs keep origin and outcome, records carry the role and the true time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from factories import enqueue, run_sql, step, task_row
from interlock.errors import ImmutableRecordError
from interlock.lifecycle import JobState, TaskRowEvent
from interlock.postgres.connection import connect, transaction, translated
from interlock.postgres.guards import GUARDS, Guard
from interlock.postgres.migrate import grant
from interlock.store.task_admin import requeue_ended_tasks
from interlock.store.tasks import Outcome, claim_pending_tasks, read_task_history, settle_running_tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.postgres.embedded.server import EmbeddedServer
    from job_driver import JobDriver

pytestmark = [pytest.mark.store, pytest.mark.lifecycle]

every_guard = pytest.mark.parametrize("guard", GUARDS, ids=[guard.table for guard in GUARDS])
# what the requirements name; values that differ from those of the rows in the tests
TASK_ORIGIN = {
    "type": "'other'",
    "input": """'{"a": 2}'""",
    "created_at": "created_at - interval '1 second'",
    "job_id": "(select id from interlock.jobs limit 1)",
    "step": "'s'",
}
TASK_OUTCOME = {
    "output": """'{"a": 2}'""",
    "error": """'{"message": "another"}'""",
    "cost": "7",
    "finished_at": "now() - interval '1 hour'",
    "started_at": "now() - interval '1 hour'",
    "reason": "'another'",
    "worker_id": "'another'",
    "tries": "tries + 1",
    "crashes": "crashes + 1",
}
JOB_ORIGIN = {"input": """'{"a": 2}'""", "workflow_id": "null", "created_at": "created_at - interval '1 second'"}
JOB_OUTCOME = {
    "output": """'{"a": 2}'""",
    "error": """'{"message": "another"}'""",
    "completed_at": "now() - interval '1 hour'",
    "started_at": "now() - interval '1 hour'",
    "reason": "'another'",
}


@pytest.fixture(params=["owner", "runtime role", "replica session"])
async def client(request: pytest.FixtureRequest, url: str, server: EmbeddedServer) -> AsyncIterator[Connection]:
    """Connect as the owner, as a role that runs the engine and owns nothing, and in a replica session."""
    if request.param == "runtime role":
        run_sql(server.url("postgres"), "create role engine login")
        async with connect(url) as owner:
            await grant(owner, "engine")
        async with connect(url.replace("interlock@", "engine@", 1)) as connection:
            yield connection
        run_sql(url, "drop owned by engine")
        run_sql(server.url("postgres"), "drop role engine")
        return
    async with connect(url) as connection:
        if request.param == "replica session":
            await connection.execute("set session_replication_role = replica")
        yield connection


async def ended_task(client: Connection, event: TaskRowEvent = TaskRowEvent.SUCCEED) -> UUID:
    task = await enqueue(client, "x", {"a": 1})
    (claimed,) = await claim_pending_tasks(client, actor="w", types=["x"])
    outcome = Outcome(task, claimed.attempt, event, output={"a": 1}, cost=0.5, progress=1)
    await settle_running_tasks(client, [outcome], actor="w")
    return task


async def refuse_changes(client: Connection, table: str, row: UUID, changes: dict[str, str]) -> None:
    for column, value in changes.items():
        with pytest.raises(ImmutableRecordError, match=rf"{row}: cannot change {column}: "), translated(client):
            await client.execute(f"update interlock.{table} set {column} = {value} where id = %s".encode(), [row])


async def test_a_task_keeps_its_origin_in_every_state(client: Connection, url: str) -> None:
    run_sql(url, "insert into interlock.jobs (task_description) values ('w')")
    task = await enqueue(client, "x", {"a": 1})
    await refuse_changes(client, "tasks", task, TASK_ORIGIN)
    await claim_pending_tasks(client, actor="w", types=["x"])
    await refuse_changes(client, "tasks", task, TASK_ORIGIN)
    with pytest.raises(ImmutableRecordError), translated(client):  # not with a legal move either
        await client.execute(
            "update interlock.tasks set state = 'canceled', event = 'cancel', lease_expires_at = null, type = 'other'"
        )
    ended = await ended_task(client)
    await refuse_changes(client, "tasks", ended, TASK_ORIGIN)
    # the columns are compared, not their mention
    await client.execute("update interlock.tasks set input = input, type = type")


async def test_an_ended_task_keeps_its_outcome(client: Connection) -> None:
    for event in (TaskRowEvent.SUCCEED, TaskRowEvent.FAIL):
        await refuse_changes(client, "tasks", await ended_task(client, event), TASK_OUTCOME)
    row = await task_row(client, await ended_task(client))
    assert (row["output"], row["cost"], row["reason"]) == ({"a": 1}, 0.5, None)


async def test_a_recorded_move_may_clear_an_outcome(client: Connection) -> None:
    task = await ended_task(client, TaskRowEvent.FAIL)
    assert await requeue_ended_tasks(client, [task], actor="ada", reason="again") == [task]
    row = await task_row(client, task)
    assert (row["state"], row["finished_at"], row["reason"]) == ("pending", None, "again")


async def test_what_is_no_outcome_can_be_changed_after_the_end(client: Connection) -> None:
    task = await ended_task(client)
    await client.execute("update interlock.tasks set advanced = true, priority = 3, tags = '{x}' where id = %s", [task])
    assert (await task_row(client, task))["priority"] == 3


async def test_a_job_keeps_its_origin_and_its_outcome(driver: JobDriver) -> None:
    job = await driver.submit(step("a"))
    await refuse_changes(driver.connection, "jobs", job, JOB_ORIGIN)
    await driver.run()
    assert (await driver.job(job))["status"] == JobState.COMPLETED
    await refuse_changes(driver.connection, "jobs", job, {**JOB_ORIGIN, **JOB_OUTCOME})
    await driver.connection.execute("update interlock.jobs set tags = '{x}' where id = %s", [job])


async def test_the_guard_reads_no_document_that_a_statement_does_not_write(database: Connection) -> None:
    """The comparison of a large document would cost every claim, renewal and settle of its task."""
    found = await database.execute(
        "select tgname, array("
        "select attname::text from pg_attribute where attrelid = tgrelid and attnum = any (tgattr)) as columns "
        "from pg_trigger where tgrelid = 'interlock.tasks'::regclass and tgname like 'guard_%'"
    )
    columns = {row["tgname"]: set(row["columns"]) for row in await found.fetchall()}
    assert "input" in columns["guard_fixed"]
    assert columns["guard_documents"] == {"output", "error", "progress"}
    claim = {
        "state",
        "event",
        "reason",
        "attempt",
        "tries",
        "worker_id",
        "lease_expires_at",
        "started_at",
        "updated_at",
    }
    assert not claim & (columns["guard_fixed"] | columns["guard_documents"])


@every_guard
async def test_updated_at_only_goes_forward(database: Connection, guard: Guard) -> None:
    named = {"tasks": "type", "jobs": "task_description", "workers": "workspace_id"}[guard.table]
    await database.execute(
        f"insert into interlock.{guard.table} ({named}, updated_at) values ('x', '2030-01-01')".encode()
    )

    async def updated_at() -> datetime:
        (row,) = await (await database.execute(f"select updated_at from interlock.{guard.table}".encode())).fetchall()
        value: datetime = row["updated_at"]
        return value

    there = datetime(2030, 1, 1, tzinfo=UTC)
    move = {"tasks": "canceled", "jobs": "CANCELED", "workers": "TERMINATED"}[guard.table]
    for assignments in (
        "updated_at = '2029-12-31'",
        "updated_at = now()",
        f"{guard.column} = '{move}', updated_at = '2029-12-31'",
    ):
        await database.execute(f"update interlock.{guard.table} set {assignments}".encode())
        assert await updated_at() == there
    await database.execute(f"update interlock.{guard.table} set updated_at = '2030-01-02'".encode())
    assert await updated_at() == there + timedelta(days=1)


async def test_a_clock_in_the_past_or_the_future_moves_tasks(database: Connection) -> None:
    for now in (datetime(2020, 1, 1, tzinfo=UTC), datetime(2040, 1, 1, tzinfo=UTC)):
        task = await enqueue(database, run_at=now)
        (claimed,) = await claim_pending_tasks(database, actor="w", types=["x"], now=now)
        outcome = Outcome(task, claimed.attempt, TaskRowEvent.SUCCEED)
        await settle_running_tasks(database, [outcome], actor="w", now=now + timedelta(seconds=5))
        row = await task_row(database, task)
        assert (row["started_at"], row["finished_at"]) == (now, now + timedelta(seconds=5))
        assert row["updated_at"] >= row["created_at"]


async def test_records_carry_the_role_of_the_session_beside_the_declared_actor(
    database: Connection, url: str, server: EmbeddedServer
) -> None:
    run_sql(server.url("postgres"), "create role clerk login")
    try:
        await grant(database, "clerk")
        async with connect(url.replace("interlock@", "clerk@", 1)) as connection:
            task = await enqueue(connection)
            await connection.execute("set interlock.actor = 'interlock'")
            await connection.execute("update interlock.tasks set state = 'canceled', reason = 'forged actor'")
        await requeue_ended_tasks(database, [task], actor="clerk")
        records = await read_task_history(database, task)
        assert [(record.event, record.actor, record.database_role) for record in records] == [
            ("create", "me", "clerk"),
            ("cancel", "interlock", "clerk"),
            ("requeue", "clerk", "interlock"),
        ]
        # SET ROLE does not hide who logged in
        await database.execute("set role clerk")
        await database.execute("update interlock.tasks set state = 'canceled'")
        await database.execute("reset role")
        assert (await read_task_history(database, task))[-1].database_role == "interlock"
    finally:
        run_sql(url, "drop owned by clerk")
        run_sql(server.url("postgres"), "drop role clerk")


@every_guard
async def test_all_records_carry_the_role(database: Connection, guard: Guard) -> None:
    named = {"tasks": "type", "jobs": "task_description", "workers": "workspace_id"}[guard.table]
    await database.execute(f"insert into interlock.{guard.table} ({named}) values ('x')".encode())
    rows = await (await database.execute(f"select database_role from interlock.{guard.records}".encode())).fetchall()
    assert rows == [{"database_role": "interlock"}]


FORGED = (
    "insert into interlock.audit_logs (task_id, to_state, event, actor, database_role, attempt, recorded_at) "
    "values (interlock.new_id(), 'done', 'succeed', 'me', 'me', 1, now())"
)


async def recording(connection: Connection) -> str | None:
    """Return the token that the session shows."""
    (row,) = await (await connection.execute("select current_setting('interlock.recording', true) as token")).fetchall()
    token: str | None = row["token"]
    return token


@pytest.mark.parametrize(
    "attempt",
    [
        FORGED,
        f"/* PL/pgSQL function interlock.record_tasks() line 9 at SQL statement */ {FORGED}",
        # the text of a statement stands in the call stack
        f"do $$ begin execute $f$ /* function interlock.record_tasks() line 9 */ {FORGED} $f$; end $$",
        f"set interlock.recording = ''; {FORGED}",
        f"set interlock.recording = 'on'; {FORGED}",
        f"delete from interlock.record_token; {FORGED}",
    ],
)
@pytest.mark.parametrize("session", ["origin", "replica"])
async def test_a_forged_record_is_refused_for_the_owner(database: Connection, attempt: str, session: str) -> None:
    await database.execute(f"set session_replication_role = {session}".encode())
    with pytest.raises(ImmutableRecordError, match="INSERT is refused"), translated(database):
        await database.execute(attempt.encode())


async def test_no_other_role_can_read_the_token_or_forge_with_a_right_to_insert(
    database: Connection, url: str, server: EmbeddedServer
) -> None:
    run_sql(server.url("postgres"), "create role forger login")
    try:
        await grant(database, "forger")
        await database.execute("grant insert on interlock.audit_logs to forger")
        async with connect(url.replace("interlock@", "forger@", 1)) as connection:
            task = await enqueue(connection)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await connection.execute("select token from interlock.record_token")
            with pytest.raises(ImmutableRecordError, match="INSERT is refused"), translated(connection):
                await connection.execute(FORGED)
            async with connection.transaction(force_rollback=True):
                # a move just before, in the same transaction, leaves nothing that can be used
                await connection.execute("update interlock.tasks set state = 'canceled' where id = %s", [task])
                assert not await recording(connection)
                with pytest.raises(ImmutableRecordError, match="INSERT is refused"), translated(connection):
                    await connection.execute(FORGED)
    finally:
        run_sql(url, "drop owned by forger")
        run_sql(server.url("postgres"), "drop role forger")


async def test_an_error_in_the_recording_leaves_no_token_behind(database: Connection) -> None:
    task = await enqueue(database)
    await database.execute("alter table interlock.audit_logs add constraint fails check (actor <> 'eve')")
    cancel = (
        "do $$ begin perform set_config('interlock.actor', 'eve', true); "
        "update interlock.tasks set state = 'canceled'; exception when check_violation then null; end $$"
    )
    async with database.transaction(force_rollback=True):
        await database.execute(cancel)
        assert (await task_row(database, task))["state"] == "pending"
        assert not await recording(database)
        with pytest.raises(ImmutableRecordError), translated(database):
            await database.execute(FORGED)


async def test_a_settle_in_a_long_transaction_has_the_time_of_the_settle(database: Connection, url: str) -> None:
    """A transactional handler settles in its own transaction, which began before most of its work."""
    task = await enqueue(database)
    async with connect(url) as handler, transaction(handler):
        (began,) = await (await handler.execute("select now() as at")).fetchall()
        (claimed,) = await claim_pending_tasks(database, actor="w", types=["x"])
        outcome = Outcome(task, claimed.attempt, TaskRowEvent.SUCCEED)
        await settle_running_tasks(handler, [outcome], actor="w")
    row = await task_row(database, task)
    assert began["at"] < row["started_at"] <= row["finished_at"]
    assert row["started_at"] <= row["updated_at"]
    times = [record.recorded_at for record in await read_task_history(database, task)]
    assert times == sorted(times)
    assert began["at"] < times[-2] < times[-1], "claim and succeed are recorded at their own times"


async def test_records_of_one_row_are_in_the_order_of_their_times(database: Connection) -> None:
    task = await enqueue(database)
    async with transaction(database):
        for _ in range(20):
            await database.execute("update interlock.tasks set state = 'canceled', event = 'cancel'")
            await requeue_ended_tasks(database, [task], actor="me")
    records = await read_task_history(database, task)
    times = [record.recorded_at for record in records]
    assert len(set(times)) == len(times) == 41
    assert times == sorted(times)
