"""The dashboard in a real browser: both themes, a phone, the keyboard, and changes that arrive without a reload."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import psycopg
import pytest
from playwright.async_api import expect

from dashboard_support import TOKEN
from factories import claim_tasks, enqueue, task_events, task_row
from interlock.lifecycle import MACHINES
from interlock.postgres.connection import connect
from interlock.store.figures import MINUTE, add_refused_figures, floor_time

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from playwright.async_api import Browser, Page

    OpenPage = Callable[..., AbstractAsyncContextManager[Page]]

pytest_plugins = ("browser_support",)
pytestmark = pytest.mark.flow
LIVE = 30_000  # milliseconds: at most so long until a change is seen
NARROW = 390


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_pages_show_themselves_in_both_themes_and_on_a_phone(open_page: OpenPage, theme: str) -> None:
    for width in (1280, NARROW):
        async with open_page("/", width=width, theme=theme) as page:
            for path in ("/", "/machines/task", "/machines/worker"):
                await page.goto(path)
                await expect(page.locator("h1")).to_have_count(1)
                await expect(page.locator("#live")).to_have_text("Live", timeout=LIVE)
                assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} at {width}"
            ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert ground == ("rgb(13, 16, 21)" if theme == "dark" else "rgb(246, 247, 249)")


async def test_every_page_reads_without_javascript(open_page: OpenPage) -> None:
    async with open_page("/", script=False) as page:
        for name in ("task", "worker", "sort-master"):
            await page.goto(f"/machines/{name}")
            text = await page.inner_text("main")
            assert all(str(state).replace("_", " ") in text for state in MACHINES[name].states)


async def test_a_change_arrives_without_a_reload(open_page: OpenPage, site: tuple[str, str]) -> None:
    _, url = site
    async with open_page("/") as page:
        async with connect(url) as connection:
            await enqueue(connection, "live_task")
        await expect(page.get_by_role("link", name=re.compile(r"^pending: [1-9]"))).to_be_visible(timeout=LIVE)
        await page.goto("/machines/task")
        box = page.locator("#diagram-wide").get_by_role("link", name=re.compile(r"^running: 1"))
        await expect(box).to_have_count(0)

        async with connect(url) as connection:
            await claim_tasks(connection, actor="w", types=["live_task"])
        await expect(box).to_be_visible(timeout=LIVE)


async def test_the_theme_is_kept_and_needs_no_reload(open_page: OpenPage) -> None:
    async with open_page("/") as page:
        switch = page.locator("[data-theme-switch]")
        await switch.click()
        await switch.click()
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 16, 21)"
        await page.reload()
        assert await page.locator("html").get_attribute("data-theme") == "dark"
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 16, 21)"


async def test_the_keyboard_reaches_everything(open_page: OpenPage) -> None:
    async with open_page("/") as page:
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.keyboard.press("/")
        assert await page.evaluate("document.activeElement.id") == "find"
        await page.keyboard.press("Tab")
        await page.evaluate("document.activeElement.blur()")
        await page.keyboard.press("?")
        await expect(page.locator("#keys")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.locator("#keys")).to_be_hidden()
        await page.keyboard.press("g")
        await page.keyboard.press("m")
        await page.wait_for_url("**/machines/task")
        link = page.locator("#diagram-wide a").first
        await link.focus()
        assert "aria-label" in await link.evaluate("(element) => element.outerHTML")


async def test_refused_move_shows_red_and_changes_nothing(open_page: OpenPage, site: tuple[str, str]) -> None:
    async with connect(site[1]) as connection:
        task = await enqueue(connection, "refused_work")
        for _ in range(2):
            with pytest.raises(psycopg.DatabaseError, match="cannot move"):
                await connection.execute("update interlock.tasks set state = 'done' where id = %s", [task])
        await add_refused_figures(connection, floor_time(datetime.now(UTC), MINUTE))
        async with open_page("/machines/task") as page:
            pill = page.locator("#diagram-wide .reft")
            await expect(pill).to_have_text("✕ 2 refused")
            red = await page.evaluate("getComputedStyle(document.querySelector('#diagram-wide .reft')).fill")
            assert red == "rgb(176, 28, 39)"
            await expect(page.locator("#refused")).to_contain_text("2 in 1 h")
        assert (await task_row(connection, task))["state"] == "pending"
        assert await task_events(connection, task) == ["create"]


async def test_updates_pause_and_resume(open_page: OpenPage) -> None:
    async with open_page("/") as page:
        await expect(page.locator("#live")).to_have_text("Live", timeout=LIVE)
        await page.keyboard.press("p")
        await expect(page.locator("#live")).to_have_text("Paused")
        await page.locator("[data-pause]").click()
        await expect(page.locator("#live")).to_have_text("Live", timeout=LIVE)


async def test_signing_in_with_a_token_leads_to_the_page(browser: Browser, site: tuple[str, str]) -> None:
    address, _ = site
    context = await browser.new_context(base_url=address)
    page = await context.new_page()
    await page.goto("/machines/job")
    await expect(page).to_have_url(re.compile(r"/ui/enter\?next="))
    await page.get_by_label("Token").fill(TOKEN)
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/machines/job")
    await expect(page.locator("h1")).to_have_text("Machines")
    await context.close()


async def test_a_namespace_is_chosen_and_travels_along(open_page: OpenPage, site: tuple[str, str]) -> None:
    _, url = site
    async with open_page("/") as page:
        async with connect(url) as connection:
            await enqueue(connection, namespace="<b>billing<b>")
        while not await page.locator("#ns option", has_text="billing").count():  # a page may be a second behind
            await page.reload()
        await page.locator("#ns").select_option("<b>billing<b>")
        await page.wait_for_url("**ns=*")
        await page.keyboard.press("g")
        await page.keyboard.press("m")
        await page.wait_for_url("**/machines/task?ns=*billing*")
        await expect(page.locator("#diagram-wide").get_by_role("link", name="pending: 1")).to_be_visible(timeout=LIVE)
        assert await page.locator("main b", has_text="billing").count() == 0
