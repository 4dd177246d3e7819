"""Every link of every page, and every confirm sheet, leads to a page: the pages are read like a crawler does."""

from __future__ import annotations

import html
import re
from collections import Counter, deque
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from dashboard_support import dashboard_at, sign_in
from factories import add_live_worker, claim_tasks, enqueue
from interlock.lifecycle import SupervisedWorkerEvent
from interlock.store.limits import Limit, put_limits
from interlock.store.pools import NewPool, create_pool
from interlock.store.schedules import Schedule, put_schedules
from interlock.store.supervision import Supervision
from interlock.store.workers import WorkerSpec, create_worker, move_worker
from work_support import fail_task, submit_order

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store
ODD = "odd&name=<b> #1?"  # every character that an address must quote
IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27,}|w_[\w-]+")
TRAVELS_ALONG = {"ns", "range"}  # from page to page
MAX_OF_A_SHAPE = 2


def shape_of(link: str) -> tuple[str, ...]:
    """Return what a link has in common with others: its path without ids, and the names of its parameters."""
    path, _, query = link.partition("?")
    return IDS.sub("ID", path), *sorted({part.partition("=")[0] for part in query.split("&")} - TRAVELS_ALONG)


async def add_work(database: Connection) -> tuple[str, UUID]:
    """Add work of all kinds; return the name under which a worker's process holds a task, and that task."""
    worker = await create_worker(database, spec=WorkerSpec(concurrency=2), actor="test")
    await move_worker(database, worker, SupervisedWorkerEvent.START_TASK, actor="test")
    supervision = Supervision("supervisor", "host", timedelta(hours=1))
    await supervision.lease_workers(database, limit=1)
    (row,) = await supervision.read_held_workers(database)
    instance = f"{worker}-1-0c03324a"
    await supervision.announce_process(database, row, instance)
    await create_pool(database, NewPool("mail", 2, WorkerSpec()), actor="test")
    await put_limits(database, [Limit(ODD, max_running=1)])
    await put_schedules(database, [Schedule(ODD, type=ODD, every=timedelta(hours=1))])
    await add_live_worker(database, worker="w_1")  # that the tasks of the order name
    await submit_order(database)
    await fail_task(database, ODD, namespace=ODD, tags=[ODD], unique_key=ODD)
    await enqueue(database, "waits", limit_keys=(ODD,))
    held = await enqueue(database, "held")
    assert await claim_tasks(database, actor=instance, types=["held"])
    return instance, held


async def test_every_link_and_every_sheet_leads_to_a_page(url: str, database: Connection) -> None:
    instance, held = await add_work(database)
    async with dashboard_at(url) as (client, _):
        await sign_in(client, database)
        found, shapes = {"/", f"/tasks/{held}"}, Counter[tuple[str, ...]]()
        todo = deque((path, "the test") for path in found)
        while todo:
            path, source = todo.popleft()
            answer = await client.get(path, follow_redirects=True)
            assert answer.status_code == 200, f"{path} on {source}: {answer.text[-1000:]}"
            for text in re.findall(r'(?:href|data-sheet)="(/[^"#]*)', answer.text):
                link = html.unescape(text)
                if "/ui/static/" not in link and link not in found and shapes[shape_of(link)] < MAX_OF_A_SHAPE:
                    shapes[shape_of(link)] += 1
                    found.add(link)
                    todo.append((link, path))
        assert f"/workers/{instance}" in found, "no page links the process that holds a task"
        assert (await client.get(f"/workers/{instance}")).status_code == 303
