"""Paused namespaces: nothing of them is claimable until they are resumed, whatever crosses with it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import enqueue
from interlock.store import limits
from interlock.store.limits import (
    Limit,
    admit_limited_tasks,
    list_namespaces,
    pause_namespace,
    put_limits,
    read_paused_namespaces,
    resume_namespace,
    sweep_namespaces,
)
from interlock.store.tasks import claim_pending_tasks, read_task_history

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


async def enqueue_at_noon(database: Connection, namespace: str = "mail", **options: Any) -> UUID:
    return await enqueue(database, namespace=namespace, run_at=NOON, **options)


async def state(database: Connection, task: UUID) -> tuple[str, str | None, str | None]:
    query = "select state, held_by, reason from interlock.tasks where id = %s"
    found = await (await database.execute(query, [task])).fetchone()
    assert found is not None
    return found["state"], found["held_by"], found["reason"]


async def test_pausing_holds_what_is_pending_and_what_comes_and_resuming_frees_both(database: Connection) -> None:
    before, elsewhere = await enqueue_at_noon(database), await enqueue_at_noon(database, "other")
    assert await pause_namespace(database, "mail", "the relay is down", "ada") == 1
    after = await enqueue_at_noon(database)
    why = "namespace mail is paused: the relay is down"
    assert [await state(database, task) for task in (before, after)] == [("waiting", "namespace", why)] * 2
    assert (await state(database, elsewhere))[0] == "pending"
    assert await read_paused_namespaces(database) == {"mail"}
    assert await resume_namespace(database, "mail", "ada") == 2
    assert await read_paused_namespaces(database) == set()
    assert [(await state(database, task))[:2] for task in (before, after)] == [("pending", None)] * 2
    history = [(move.event, move.actor) for move in await read_task_history(database, before)]
    assert history == [("create", "me"), ("hold", "ada"), ("release", "ada")]


async def test_running_tasks_continue_in_a_paused_namespace(database: Connection) -> None:
    await enqueue_at_noon(database)
    (running,) = await claim_pending_tasks(database, actor="w", types=["x"], namespaces=["mail"], now=NOON)
    await pause_namespace(database, "mail", None, "ada")
    assert (await state(database, running.id))[0] == "running"
    assert (await state(database, await enqueue_at_noon(database)))[2] == "namespace mail is paused"


async def test_pausing_goes_in_batches_and_says_how_many(database: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BATCH_SIZE", 10)
    await database.execute(
        "insert into interlock.tasks (type, namespace) select 'x', 'mail' from generate_series(1, 35)"
    )
    assert await pause_namespace(database, "mail", None, "ada") == 35
    assert await pause_namespace(database, "mail", "still", "bob") == 0, "a second pause changes the reason only"
    assert await resume_namespace(database, "mail", "ada") == 35
    assert await resume_namespace(database, "mail", "ada") == 0


async def test_limited_tasks_stay_while_paused_and_wait_for_their_limit_afterwards(database: Connection) -> None:
    await put_limits(database, [Limit("relay", max_running=1)])
    first = await enqueue_at_noon(database, limit_key="relay")
    await admit_limited_tasks(database, actor="l", now=NOON)
    second = await enqueue_at_noon(database, limit_key="relay")
    assert await pause_namespace(database, "mail", None, "ada") == 2
    third = await enqueue_at_noon(database, limit_key="relay")
    tasks = (first, second, third)
    assert {(await state(database, task))[1] for task in tasks} == {"namespace"}
    assert (await admit_limited_tasks(database, actor="l", now=NOON)).released == 0
    assert await resume_namespace(database, "mail", "ada") == 3
    assert {await state(database, task) for task in tasks} == {("waiting", "limit", "limit relay")}
    assert (await admit_limited_tasks(database, actor="l", now=NOON)).released == 1


async def test_a_limited_task_that_slips_into_a_paused_namespace_is_not_let_in(database: Connection) -> None:
    slipped = await enqueue_at_noon(database, limit_key="relay")
    await database.execute("insert into interlock.namespaces (name, paused_at) values ('mail', now())")
    assert (await admit_limited_tasks(database, actor="l", now=NOON)).released == 0
    assert await sweep_namespaces(database, actor="l", now=NOON) == 1
    assert (await state(database, slipped))[1] == "namespace"


async def test_the_sweep_sets_right_what_crossed_with_a_pause_or_a_resumption(database: Connection) -> None:
    slipped = await enqueue_at_noon(database)
    await database.execute("insert into interlock.namespaces (name, paused_at) values ('mail', now())")
    stuck = await enqueue_at_noon(database)
    assert await sweep_namespaces(database, actor="l", now=NOON) == 1
    assert (await state(database, slipped))[1] == "namespace"
    await database.execute("update interlock.namespaces set paused_at = null")
    assert await sweep_namespaces(database, actor="l", now=NOON) == 2
    assert {(await state(database, task))[0] for task in (slipped, stuck)} == {"pending"}
    assert await sweep_namespaces(database, actor="l", now=NOON) == 0


async def test_workers_are_notified_of_pauses_and_resumptions(database: Connection) -> None:
    await database.execute("listen interlock_control")
    await pause_namespace(database, "mail", None, "ada")
    await resume_namespace(database, "mail", "ada")
    heard = [notice.payload async for notice in database.notifies(timeout=30, stop_after=2)]
    assert heard[:2] == ["*", "*"]


async def test_namespaces_are_listed_with_what_is_in_them(database: Connection) -> None:
    await put_limits(database, [Limit("relay", max_running=1)])
    await enqueue_at_noon(database, "busy")
    await enqueue_at_noon(database, "busy")
    await claim_pending_tasks(database, actor="w", types=["x"], namespaces=["busy"], now=NOON)
    await enqueue_at_noon(database, "busy", limit_key="relay")
    await pause_namespace(database, "mail", "why", "ada", now=NOON - timedelta(hours=1))
    await enqueue_at_noon(database)
    assert await list_namespaces(database) == [
        ("busy", None, None, None, 1, 1, 0, 1),
        ("mail", NOON - timedelta(hours=1), "ada", "why", 0, 0, 1, 0),
    ]
