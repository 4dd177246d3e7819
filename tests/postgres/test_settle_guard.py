"""The database demands the fence: an UPDATE that settles a running task presents its attempt, for any client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from factories import enqueue, run_sql, task_row
from interlock.errors import FenceError
from interlock.postgres.connection import translated
from interlock.store.task_admin import cancel_unfinished_tasks, requeue_ended_tasks
from interlock.store.tasks import claim_pending_tasks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.postgres.connection import Connection
    from interlock.postgres.embedded.server import EmbeddedServer

pytestmark = [pytest.mark.store, pytest.mark.lifecycle]

# the moves by which an attempt settles itself (rule 3 of correctness), and those that others make
SETTLES = [("succeed", "done"), ("fail", "error"), ("retry", "pending"), ("return", "pending")]
MOVES_OF_OTHERS = [("cancel", "canceled"), ("expire", "pending"), ("exhaust", "error")]
CLAIM = """update interlock.tasks set state = 'running', event = 'claim', attempt = attempt + 1, worker_id = 'w',
    lease_expires_at = now() where id = %s"""


@pytest.fixture(params=["owner", "runtime role", "replica session"])
def client(request: pytest.FixtureRequest, url: str, server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    """Connect with the driver alone: as the owner, as a role that owns nothing, and in a replica session."""
    if request.param == "runtime role":
        run_sql(server.url("postgres"), "create role settling login")
        run_sql(url, "grant usage on schema interlock to settling")
        run_sql(url, "grant select, insert, update on interlock.tasks to settling")
        with psycopg.connect(url, user="settling", autocommit=True) as connection:
            yield connection
        run_sql(url, "drop owned by settling")
        run_sql(server.url("postgres"), "drop role settling")
        return
    with psycopg.connect(url, autocommit=True) as connection:
        if request.param == "replica session":
            connection.execute("set session_replication_role = replica")
        yield connection


def running_task(client: psycopg.Connection) -> str:
    """Store a task that runs its third attempt; the first was settled, the second expired."""
    (row,) = client.execute("insert into interlock.tasks (type) values ('x') returning id").fetchall()
    task = str(row[0])
    client.execute(CLAIM, [task])
    move(client, task, "retry", "pending", 1)
    client.execute(CLAIM, [task])
    move(client, task, "expire", "pending")
    client.execute(CLAIM, [task])
    return task


def move(client: psycopg.Connection, task: str, event: str | None, state: str, fence: int | None = None) -> None:
    presented = "" if fence is None else ", settled_attempt = %(fence)s"
    named = "" if event is None else ", event = %(event)s"
    client.execute(
        f"update interlock.tasks set state = %(state)s, lease_expires_at = null{named}{presented} "
        "where id = %(task)s".encode(),
        {"state": state, "event": event, "fence": fence, "task": task},
    )


def stored(client: psycopg.Connection, task: str) -> tuple[Any, ...]:
    (row,) = client.execute(
        "select state, attempt, settled_attempt from interlock.tasks where id = %s", [task]
    ).fetchall()
    return row


@pytest.mark.parametrize(("event", "state"), SETTLES, ids=[event for event, _ in SETTLES])
def test_a_settle_without_the_current_attempt_is_refused(client: psycopg.Connection, event: str, state: str) -> None:
    task = running_task(client)
    for fence in (None, 1, 2, 4, 2_147_483_647):
        with (
            pytest.raises(FenceError, match='settles attempt 3: set "settled_attempt" to 3') as refused,
            translated(client),
        ):
            move(client, task, event, state, fence)
        assert refused.value.__cause__.sqlstate == "IL005"  # type: ignore[union-attr]  # the error of the driver
        assert stored(client, task) == ("running", 3, 1)
    with pytest.raises(FenceError), translated(client):
        client.execute(
            "update interlock.tasks set state = %s, event = %s, lease_expires_at = null, settled_attempt = null "
            "where id = %s",
            [state, event, task],
        )
    move(client, task, event, state, 3)
    assert stored(client, task) == (state, 3, 3)


def test_an_event_that_the_guard_derives_needs_the_fence_too(client: psycopg.Connection) -> None:
    task = running_task(client)
    for fence in (None, 2, 4):
        with pytest.raises(FenceError), translated(client):
            move(client, task, None, "done", fence)
    move(client, task, None, "done", 3)
    assert stored(client, task) == ("done", 3, 3)


@pytest.mark.parametrize(("event", "state"), MOVES_OF_OTHERS, ids=[event for event, _ in MOVES_OF_OTHERS])
def test_moves_that_others_make_need_no_fence_but_may_not_present_a_wrong_one(
    client: psycopg.Connection, event: str, state: str
) -> None:
    task = running_task(client)
    for fence in (2, 4):
        with pytest.raises(FenceError), translated(client):
            move(client, task, event, state, fence)
    move(client, task, event, state)
    assert stored(client, task) == (state, 3, 1)
    task = running_task(client)
    move(client, task, event, state, 3)
    assert stored(client, task) == (state, 3, 3)


def test_the_fence_cannot_be_presented_ahead_of_the_settle(client: psycopg.Connection) -> None:
    task = running_task(client)
    for fence in (None, 3, 4):
        with pytest.raises(FenceError, match="changes only when a running task moves"), translated(client):
            client.execute("update interlock.tasks set settled_attempt = %s where id = %s", [fence, task])
    move(client, task, "retry", "pending", 3)
    with pytest.raises(FenceError), translated(client):
        client.execute(CLAIM.replace("worker_id", "settled_attempt = 4, worker_id").encode(), [task])
    client.execute(CLAIM, [task])
    move(client, task, "succeed", "done", 4)
    for fence in (None, 3, 5):  # what is recorded of the settle stays, too
        with pytest.raises(FenceError), translated(client):
            client.execute("update interlock.tasks set settled_attempt = %s where id = %s", [fence, task])
    with pytest.raises(FenceError, match="without a settled attempt"), translated(client):
        client.execute("insert into interlock.tasks (type, settled_attempt) values ('x', 1)")


def test_one_stale_settle_refuses_the_whole_statement(client: psycopg.Connection) -> None:
    current, stale = running_task(client), running_task(client)
    move(client, stale, "expire", "pending")
    client.execute(CLAIM, [stale])
    with pytest.raises(FenceError, match=stale), translated(client):
        client.execute(
            "update interlock.tasks set state = 'done', event = 'succeed', settled_attempt = 3, "
            "lease_expires_at = null where id = any (%s)",
            [[current, stale]],
        )
    assert stored(client, current)[0] == "running"


async def test_a_waiting_step_that_the_engine_completes_has_no_fence(database: Connection) -> None:
    task = await enqueue(database)
    await database.execute("update interlock.tasks set state = 'waiting', event = 'hold', held_by = 'limit'")
    await database.execute("update interlock.tasks set state = 'done', event = 'succeed', held_by = null")
    assert (await task_row(database, task))["state"] == "done"


async def test_the_cancel_of_a_worker_presents_its_attempt_and_that_of_a_person_does_not(database: Connection) -> None:
    presented = "select settled_attempt from interlock.tasks where id = %s"
    task = await enqueue(database)
    for attempts, settled in ((None, None), ([2], 2)):
        (claimed,) = await claim_pending_tasks(database, actor="w", types=["x"])
        canceled = await cancel_unfinished_tasks(database, [task], actor="me", attempts=attempts, running=True)
        assert canceled == [claimed.id]
        assert await (await database.execute(presented, [task])).fetchall() == [{"settled_attempt": settled}]
        await requeue_ended_tasks(database, [task], actor="me")
        # of a pending task, no attempt is settled
        assert await cancel_unfinished_tasks(database, [task], actor="me", attempts=[claimed.attempt]) == [task]
        assert await (await database.execute(presented, [task])).fetchall() == [{"settled_attempt": settled}]
        await requeue_ended_tasks(database, [task], actor="me")
