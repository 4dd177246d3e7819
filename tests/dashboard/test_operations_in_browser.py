"""The pages of operations in a real browser: every act, changes that arrive without a reload, both themes, a phone."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from playwright.async_api import expect

from factories import enqueue
from interlock.postgres.connection import connect
from interlock.store.limits import Limit, put_limits
from interlock.store.schedules import Schedule, put_schedules
from interlock.store.workers import RegisteredProcess, WorkerSpec, create_worker, register_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from playwright.async_api import Page

    from interlock.postgres.connection import Connection

    OpenPage = Callable[..., AbstractAsyncContextManager[Page]]

pytest_plugins = ("browser_support",)
pytestmark = pytest.mark.flow
LIVE = 30_000  # milliseconds: at most so long until a change is seen
HOSTILE = "<img src=x onerror=alert(1)>"
PAGES = ("/workers", "/namespaces", "/schedules", "/limits", "/sorts", "/audit", "/doctor")
LEASE = timedelta(hours=1)


@pytest.fixture
async def database(site: tuple[str, str]) -> AsyncIterator[Connection]:
    """Connect to the database of the site, which the tests of this module share."""
    async with connect(site[1]) as connection:
        yield connection


async def value(database: Connection, query: str, *parameters: Any) -> Any:
    cursor = await database.execute(query.encode(), list(parameters))
    row = await cursor.fetchone()
    return None if row is None else next(iter(row.values()))


@pytest.mark.parametrize(("theme", "width"), [("light", 390), ("dark", 1280)])
async def test_operations_pages_in_both_themes_and_on_a_phone(
    open_page: OpenPage, database: Connection, theme: str, width: int
) -> None:
    process = RegisteredProcess(f"host-{theme}", namespaces=("default", HOSTILE), types=(HOSTILE,))
    await register_worker(database, process, lease=LEASE)
    await enqueue(database, HOSTILE, limit_key=f"key {theme}")
    async with open_page("/workers", width=width, theme=theme) as page:
        for path in (*PAGES, f"/workers/host-{theme}", f"/limits/key {theme}"):
            await page.goto(path)
            await expect(page.locator("h1")).to_have_count(1)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} at {width}"


async def test_acts_on_a_worker(open_page: OpenPage, database: Connection) -> None:
    worker = await create_worker(database, spec=WorkerSpec(concurrency=2), actor="test")

    async def state() -> Any:
        return await value(database, "select status from interlock.workers where id = %s", worker)

    async with open_page("/workers") as page:
        row = page.locator(f"[id='row-{worker}']")
        for label, word in (("Start", "RUNNING"), ("Pause", "PAUSED"), ("Resume", "RUNNING")):
            await row.get_by_role("button", name=label).press("Enter")
            await expect(row.get_by_text(word)).to_be_visible(timeout=LIVE)
            assert await state() == word
        await page.goto(f"/workers/{worker}")
        await page.get_by_role("button", name="Terminate…").click()
        await page.get_by_label("Reason").fill(HOSTILE)
        await page.get_by_role("button", name="Terminate", exact=True).click()
        await expect(page.locator("#worker-head").get_by_text("TERMINATED")).to_be_visible(timeout=LIVE)
        await page.reload()
        await expect(page.get_by_role("cell", name=HOSTILE)).to_be_visible()
    assert await state() == "TERMINATED"
    actor = "select actor from interlock.worker_state_transitions where worker_id = %s and event = 'terminate'"
    assert await value(database, actor, worker) == "token:browser"


async def test_a_worker_is_created_and_killed(open_page: OpenPage, database: Connection) -> None:
    async with open_page("/workers") as page:
        await page.get_by_role("button", name="Worker…").click()
        await page.get_by_label("Namespaces").fill("red, blue")
        await page.get_by_label("Slots").fill("3")
        await page.get_by_role("button", name="Create").click()
        made = page.locator("tr", has_text="red")
        await expect(made).to_be_visible(timeout=LIVE)
        await made.get_by_role("link").first.click()
        await page.get_by_role("button", name="Kill…").click()
        await page.get_by_role("button", name="Kill", exact=True).click()
        await expect(page.locator("#worker-head").get_by_text("TERMINATED")).to_be_visible(timeout=LIVE)
    spec = await value(database, "select metadata -> 'spec' from interlock.workers where kill_requested_at is not null")
    assert spec == {"namespaces": ["red", "blue"], "concurrency": 3}


async def test_acts_on_a_pool(open_page: OpenPage, database: Connection) -> None:
    async def desired() -> Any:
        return await value(database, "select desired from interlock.pools where name = 'paint'")

    async with open_page("/workers") as page:
        await page.get_by_role("button", name="Pool…").click()
        await page.get_by_label("Name", exact=True).fill("paint")
        await page.get_by_role("button", name="Create").click()
        row = page.locator("#pool-paint")
        await expect(row).to_contain_text("0 of 1 live", timeout=LIVE)
        await row.get_by_role("button", name="One worker more in paint").click()
        await expect(row).to_contain_text("0 of 2 live", timeout=LIVE)
        assert await desired() == 2
        await row.get_by_role("button", name="Scale…").click()
        await page.get_by_label("Desired").fill("5")
        await page.get_by_role("button", name="Scale", exact=True).click()
        await expect(row).to_contain_text("0 of 5 live", timeout=LIVE)
        await row.get_by_role("button", name="One worker less in paint").click()
        await expect(row).to_contain_text("0 of 4 live", timeout=LIVE)
        await row.get_by_role("button", name="Delete…").click()
        await page.get_by_role("button", name="Delete", exact=True).click()
        await expect(row).to_have_count(0, timeout=LIVE)
    assert await desired() is None


async def test_workers_arrive_without_a_reload(open_page: OpenPage, database: Connection) -> None:
    async with open_page("/workers") as page:
        await expect(page.locator("#live")).to_have_text("Live", timeout=LIVE)
        process = RegisteredProcess("late-worker", namespaces=("default",), types=("x",), statistics={"slots": 3})
        await register_worker(database, process, lease=LEASE)
        await expect(page.locator("[id='row-late-worker']")).to_contain_text("0 of 3", timeout=LIVE)


async def test_a_namespace_is_paused_with_a_reason_and_resumed(open_page: OpenPage, database: Connection) -> None:
    await enqueue(database, namespace="press")
    async with open_page("/namespaces") as page:
        row = page.locator("[id='row-press']")
        await row.get_by_role("button", name="Pause…").click()
        await page.get_by_label("Reason").fill("out of paper")
        await page.get_by_role("button", name="Pause", exact=True).click()
        await expect(row).to_contain_text("by token:browser: out of paper", timeout=LIVE)
        await expect(row).to_contain_text("1 waiting", timeout=LIVE)
        await row.get_by_role("button", name="Resume").click()
        await expect(row).to_contain_text("1 pending", timeout=LIVE)
    assert await value(database, "select paused_at from interlock.namespaces where name = 'press'") is None


async def test_a_sheet_that_is_higher_than_the_window_scrolls(open_page: OpenPage, database: Connection) -> None:
    await put_limits(database, [Limit("high", max_running=2)])
    async with open_page("/limits", width=390) as page:
        await page.set_viewport_size({"width": 390, "height": 480})
        await page.locator("[id='row-high']").get_by_role("button", name="Override…").click()
        sheet = page.locator("#sheet form")
        await sheet.wait_for()
        box = await sheet.bounding_box()
        assert box is not None
        assert 0 <= box["y"] <= box["y"] + box["height"] <= 480
        await sheet.get_by_role("button", name="Override").scroll_into_view_if_needed()
        await sheet.get_by_role("button", name="Cancel").click()
        await expect(sheet).to_have_count(0)


async def test_acts_on_a_schedule(open_page: OpenPage, database: Connection) -> None:
    await put_schedules(database, [Schedule("nightly", type="report", cron="30 2 * * *")])
    paused = "select paused_at is not null from interlock.schedules where name = 'nightly'"
    async with open_page("/schedules") as page:
        row = page.locator("#row-nightly")
        await expect(row).to_contain_text("at 02:30, every day")
        await row.get_by_role("button", name="Run now").click()
        await expect(page.locator("#toasts")).to_contain_text("Fired once", timeout=LIVE)
        assert await value(database, "select count(*) from interlock.tasks where type = 'report'") == 1
        await row.get_by_role("button", name="Pause…").click()
        await page.get_by_label("Reason").fill("stock-taking")
        await page.get_by_role("button", name="Pause", exact=True).click()
        await expect(row).to_contain_text("by token:browser: stock-taking", timeout=LIVE)
        assert await value(database, paused)
        await row.get_by_role("button", name="Resume").click()
        await expect(row.get_by_role("button", name="Pause")).to_be_visible(timeout=LIVE)
        assert not await value(database, paused)


async def test_a_limit_is_overridden_and_taken_back(open_page: OpenPage, database: Connection) -> None:
    await put_limits(database, [Limit("psp", max_running=2)])
    async with open_page("/limits") as page:
        row = page.locator("#row-psp")
        await expect(row).to_contain_text("0 of 2 running")
        await row.get_by_role("button", name="Override…").click()
        await page.get_by_label("Running at once").fill("7")
        await page.get_by_label("Reason").fill("sale")
        await page.get_by_role("button", name="Override", exact=True).click()
        await expect(row).to_contain_text("0 of 7 running", timeout=LIVE)
        await row.get_by_role("link", name="psp").click()
        await expect(page.locator("main")).to_contain_text("by token:browser: sale")
        await expect(page.locator("main")).to_contain_text("declared 2 running")
        await page.get_by_role("button", name="Take back…").click()
        await page.get_by_role("button", name="Take back", exact=True).click()
        await expect(page.locator("main")).to_contain_text("0 of 2 running", timeout=LIVE)
    assert await value(database, "select max_running from interlock.limits where key = 'psp'") == 2


async def test_operations_pages_read_without_javascript(open_page: OpenPage, database: Connection) -> None:
    await enqueue(database, namespace="quiet")
    async with open_page("/namespaces", script=False) as page:
        assert "quiet" in await page.inner_text("main")
        await page.goto("/audit")
        await page.get_by_label("Event").fill("nothing_of_the_kind")
        await page.get_by_role("button", name="Search").click()
        assert "No such move" in await page.inner_text("main")
        await page.goto("/doctor")
        await page.get_by_role("link", name="Run again").click()
        assert "Checked" in await page.inner_text("main")


async def test_a_browser_is_switched_to_read_only_and_back(open_page: OpenPage, site: tuple[str, str]) -> None:
    _, url = site
    async with connect(url) as connection:
        await create_worker(connection, spec=WorkerSpec(), actor="test")
    async with open_page("/workers") as page:
        switch = page.get_by_role("button", name="Read only")
        await expect(switch).to_have_attribute("aria-pressed", "false")
        assert await page.locator("[data-act],[data-sheet]").count() > 0
        await switch.click()
        await expect(switch).to_have_attribute("aria-pressed", "true")
        await expect(page.locator("[data-act],[data-sheet]")).to_have_count(0)
        await switch.click()
        await expect(switch).to_have_attribute("aria-pressed", "false")
        await expect(page.locator("[data-act],[data-sheet]").first).to_be_visible()
