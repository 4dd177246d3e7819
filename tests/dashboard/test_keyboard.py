"""Acts without a mouse: every sheet opens, takes the focus and gives it back, and acts on many tasks are undone."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from factories import add_live_worker, claim_tasks, enqueue, step, task_row
from interlock.lifecycle import SupervisedWorkerEvent
from interlock.postgres.connection import connect
from interlock.store.limit_overrides import override_limit
from interlock.store.limits import Limit, put_limits
from interlock.store.pools import NewPool, create_pool
from interlock.store.schedules import Schedule, put_schedules
from interlock.store.workers import WorkerSpec, create_worker, move_worker
from job_driver import JobDriver
from work_support import fail_task

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from playwright.async_api import Page

    from interlock.postgres.connection import Connection

    OpenPage = Callable[..., AbstractAsyncContextManager[Page]]

pytest_plugins = ("browser_support",)
pytestmark = pytest.mark.flow
SHEETS = {
    *(f"/ui/sheet/task/ID/{act}" for act in ("requeue", "cancel", "force")),
    *(f"/ui/sheet/jobs/ID/{act}" for act in ("cancel", "signal", "retry", "approve", "refuse")),
    *(f"/ui/sheet/workers/{act}" for act in ("new", "ID/terminate", "ID/kill")),
    *(f"/ui/sheet/pools/{act}" for act in ("new", "mail/scale", "mail/delete")),
    *(f"/ui/sheet/limits/mail/{act}" for act in ("override", "restore")),
    "/ui/sheet/namespaces/default/pause",
    "/ui/sheet/schedules/nightly/pause",
}


async def add_something_to_act_on(connection: Connection) -> list[str]:
    """Add rows for every act; return the pages that offer them."""
    await add_live_worker(connection, "default")
    failed = await fail_task(connection, "failed")
    pending = await enqueue(connection, "pending")
    running = await enqueue(connection, "running")
    await claim_tasks(connection, actor="w_1", types=["running"])
    driver = JobDriver(connection)
    asking = await driver.submit(
        step("ask", kind="approval", timeout=600), step("paid", kind="signal", signal="payment"), name="asks"
    )
    await driver.advance()
    ended = await driver.submit(step("only", type="only"), name="ended")
    await driver.run()
    worker = await create_worker(connection, spec=WorkerSpec(concurrency=2), actor="test")
    await move_worker(connection, worker, SupervisedWorkerEvent.START_TASK, actor="test")
    await create_pool(connection, NewPool("mail", 0, WorkerSpec()), actor="test")
    await put_limits(connection, [Limit("mail", max_running=2)])
    await override_limit(connection, Limit("mail", max_running=1), actor="test", reason="slow")
    await put_schedules(connection, [Schedule("nightly", type="report", every=timedelta(hours=1))])
    tasks = [f"/tasks/{task}" for task in (failed, pending, running)]
    jobs = [f"/jobs/{job}" for job in (asking, ended)]
    return [*tasks, *jobs, "/approvals", "/workers", f"/workers/{worker}", "/namespaces", "/schedules", "/limits"]


async def test_every_act_works_by_keyboard(open_page: OpenPage, site: tuple[str, str]) -> None:
    """Every button of an act opens its sheet with Enter, moves the focus into it, and gets it back with Escape."""
    async with connect(site[1]) as connection:
        paths = await add_something_to_act_on(connection)
    opened = set()
    async with open_page("/") as page:
        for path in paths:
            await page.goto(path)
            buttons = page.locator("main [data-sheet]")
            for at in range(await buttons.count()):
                url = str(await buttons.nth(at).get_attribute("data-sheet"))
                await buttons.nth(at).press("Enter")
                await expect(page.locator("#sheet form :focus")).to_have_count(1)
                await page.keyboard.press("Escape")
                await expect(page.locator("#sheet form")).to_have_count(0)
                assert await page.evaluate("document.activeElement.dataset.sheet") == url
                opened.add(re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27,}|w_[\w-]+", "ID", url).partition("?")[0])
    assert opened == SHEETS


async def test_many_tasks_are_canceled_and_that_is_undone_by_keyboard(
    open_page: OpenPage, site: tuple[str, str]
) -> None:
    async with connect(site[1]) as connection:
        tasks = [await enqueue(connection, "keyboard_work", tags=["keyboard"]) for _ in range(2)]
    async with open_page("/tasks?tag=keyboard") as page:
        await page.keyboard.press("j")
        await page.keyboard.press("x")
        for _ in range(100):
            if await page.evaluate("document.activeElement.dataset.bulkAct === 'cancel'"):
                break
            await page.keyboard.press("Shift+Tab")
        await page.keyboard.press("Enter")
        await expect(page.locator("#sheet [name=reason]")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator(".toast")).to_contain_text("Cancel 1 task in")
        await page.keyboard.press("u")
        await expect(page.locator(".toast").last).to_have_text("Undone: nothing was changed")
    async with connect(site[1]) as connection:
        assert {(await task_row(connection, task))["state"] for task in tasks} == {"pending"}
