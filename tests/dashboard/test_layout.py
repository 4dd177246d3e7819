"""All pages: nothing is cut off at any width or leaves the origin; axe-core and the security policy have no finding."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

import pytest
from playwright.async_api import expect

from factories import add_live_worker, claim_tasks, enqueue
from interlock.dashboard.svg.machine import MachineNumbers, draw
from interlock.lifecycle import MACHINES
from interlock.postgres.connection import connect
from interlock.store.limits import Limit, put_limits
from interlock.store.schedules import Schedule, put_schedules
from interlock.store.workers import RegisteredProcess, WorkerSpec, create_worker, register_worker
from work_support import fail_task, submit_order

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from playwright.async_api import Page

    OpenPage = Callable[..., AbstractAsyncContextManager[Page]]
    Site = tuple[str, str]

pytest_plugins = ("browser_support",)
LIVE = 30_000  # milliseconds: at most so long until a page is live
LISTS = ("/", "/jobs", "/tasks", "/tasks?state=error", "/approvals", "/workers", "/schedules", "/limits", "/namespaces")
# Pages that are made from the same template as another one, which axe-core examines.
SAME_TEMPLATE = {"/tasks?state=error", *(f"/machines/{name}" for name in MACHINES if name not in {"task", "worker"})}
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# The tables and diagrams whose content is wider than their place, so that a part of it is out of sight.
CUT_OFF = """
[...document.querySelectorAll("main .scroll, main .card")]
    .filter((part) => part.offsetParent && part.scrollWidth > part.clientWidth + 1)
    .map((part) => part.getAttribute("aria-label") || part.id || part.className)
"""


@pytest.fixture(scope="module")
def pages(site: Site) -> list[str]:
    """Fill the database with something for every page; return the paths of all pages."""
    return asyncio.run(fill(site[1]))


async def fill(url: str) -> list[str]:
    async with connect(url) as connection:
        _, job = await submit_order(connection, name="layout")
        task = await fail_task(connection, "layout_failed")
        names = ("default", "billing", "shipping", "reports")
        statistics = {"slots": 8, "held": 3, "memory_bytes": 70_000_000}
        process = RegisteredProcess(
            "w_01a1effa-39a4-7260-8f12-41446b2dadb1-1-dcdd6780", namespaces=names, types=("x",), statistics=statistics
        )
        await register_worker(connection, process, lease=timedelta(hours=1))
        worker = await create_worker(connection, spec=WorkerSpec(concurrency=2, namespaces=names), actor="test")
        await put_limits(connection, [Limit("layout", max_running=2)])
        await enqueue(connection, "layout_limited", limit_key="layout")
        await put_schedules(connection, [Schedule("layout", type="report", cron="30 2 * * 1-5")])
    one = (f"/jobs/{job}", f"/tasks/{task}", f"/workers/{worker}", "/limits/layout")
    return [*LISTS, *(f"/machines/{name}" for name in MACHINES), "/sorts", "/audit", "/doctor", *one]


@pytest.mark.flow
@pytest.mark.timeout(300)
async def test_axe_finds_nothing_on_any_page(open_page: OpenPage, pages: list[str]) -> None:
    async with open_page("/") as page:
        for path in pages:
            if path in SAME_TEMPLATE:
                continue
            await page.goto(path)
            await page.evaluate(AXE)
            found = (await page.evaluate("axe.run({resultTypes: ['violations']})"))["violations"]
            assert [(each["id"], each["nodes"][0]["html"]) for each in found] == [], path


@pytest.mark.flow
async def test_nothing_is_cut_off_on_any_page(open_page: OpenPage, pages: list[str]) -> None:
    async with open_page("/") as page:
        for path in pages:
            await page.goto(path)
            assert await page.evaluate(CUT_OFF) == [], path


@pytest.mark.flow
async def test_no_page_scrolls_sideways_at_390(open_page: OpenPage, pages: list[str]) -> None:
    async with open_page("/", width=390) as page:
        for path in pages:
            await page.goto(path)
            assert await page.evaluate(SIDEWAYS) == 0, path


@pytest.mark.flow
async def test_no_request_leaves_the_origin(open_page: OpenPage, site: Site, pages: list[str]) -> None:
    async with open_page("/") as page:
        requested: list[str] = []
        page.on("request", lambda request: requested.append(request.url))
        for path in pages:
            await page.goto(path)
            await expect(page.locator("#live")).to_have_text("Live", timeout=LIVE)
        assert len(requested) > 2 * len(pages)  # the page itself and its stream
        assert [url for url in requested if not url.startswith(f"{site[0]}/")] == []


@pytest.mark.flow
async def test_csp_has_no_violation_on_any_page(open_page: OpenPage, pages: list[str]) -> None:
    async with open_page("/", allowed="style-src") as page:
        found: list[str] = []
        page.on("console", lambda message: found.append(message.text))
        for path in pages:
            await page.goto(path)
            await expect(page.locator("#live")).to_have_text("Live", timeout=LIVE)
        assert [text for text in found if text.startswith("CSP:")] == []
        async with page.expect_console_message(lambda message: message.text.startswith("CSP: style-src-attr")):
            await page.evaluate("document.body.setAttribute('style', 'color:red')")  # what a violation looks like


@pytest.mark.unit
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("direction", ["wide", "tall"])
def test_the_badge_of_every_state_fits_its_box(name: str, direction: Literal["wide", "tall"]) -> None:
    drawn = draw(name, MachineNumbers({}, {}), direction)
    for state in drawn.states:
        assert state.badge_width + 2 * 10 <= state.width, state.name
        assert state.x >= 0
        assert state.x + state.width <= drawn.width


@pytest.mark.flow
async def test_an_unknown_page_is_a_page_and_an_unknown_path_of_the_api_a_problem(open_page: OpenPage) -> None:
    async with open_page("/", allowed="status of 404") as page:
        answer = await page.goto("/nothing/of/the/kind")
        assert answer is not None
        assert answer.status == 404
        await expect(page.locator("h1")).to_have_text("There is no such path")
        await page.get_by_role("link", name="Overview").click()
        await expect(page.locator("h1")).to_have_text("Overview")
        problem = await page.request.get("/api/nothing", headers={"Accept": "text/html"})
        assert problem.headers["content-type"] == "application/problem+json"


@pytest.mark.flow
async def test_times_are_shown_and_entered_in_the_zone_of_the_viewer(open_page: OpenPage, site: Site) -> None:
    """Kolkata is five and a half hours ahead of UTC all the year."""
    async with connect(site[1]) as connection:
        await enqueue(connection, "in_a_zone")
        later = await enqueue(connection, "in_a_zone", run_at=datetime(2040, 1, 1, 12, tzinfo=UTC))
    async with open_page("/", timezone="Asia/Kolkata") as page:
        axis = page.locator("time[data-as=clock]").first
        moment = datetime.fromisoformat(str(await axis.get_attribute("datetime"))) + timedelta(hours=5, minutes=30)
        await expect(axis).to_have_text(f"{moment:%H:%M}")
        await page.goto(f"/tasks/{later}")
        await expect(page.locator("#why time").first).to_have_text(re.compile(r"Jan 1, 2040, 5:30:00\sPM"))
        await page.goto("/audit?since=2026-01-31T20:00")
        field = page.locator("[name=since]")
        await expect(field).to_have_value("2026-02-01T01:30")
        await field.fill("2026-02-01T05:30")
        await page.get_by_role("button", name="Search").click()
        await page.wait_for_url("**since=2026-02-01T00%3A00*")
        await expect(page.locator("[name=since]")).to_have_value("2026-02-01T05:30")


@pytest.mark.flow
async def test_a_running_task_shows_its_progress_as_a_bar(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        task = await enqueue(connection, "long_import")
        await add_live_worker(connection, worker="w_one")
        await claim_tasks(connection, actor="w_one", types=["long_import"])
        progress = '{"fraction": 0.25, "message": "<b>row 5", "rows": 20}'
        await connection.execute("update interlock.tasks set progress = %s where id = %s", [progress, task])
    async with open_page(f"/tasks/{task}") as page:
        await expect(page.locator("#why h2")).to_have_text("What is it doing?")
        await expect(page.locator("#why .lead")).to_have_text(re.compile("^w_one runs attempt 1"))
        await expect(page.locator("#payloads .prog")).to_have_text("25 % · <b>row 5")
        await expect(page.locator("#payloads pre").last).to_have_text('{"rows": 20}')


@pytest.mark.flow
async def test_ten_tabs_do_not_block(open_page: OpenPage) -> None:
    """A browser opens six connections to an origin: tabs that are not seen hold none."""
    async with open_page("/") as page:
        others = [await page.context.new_page() for _ in range(9)]
        for other in others:
            await other.goto("/machines/task")
            await other.evaluate(
                "Object.defineProperty(document, 'hidden', {value: true}); "
                "document.dispatchEvent(new Event('visibilitychange'))"
            )
        await page.goto("/tasks")
        await expect(page.locator("#live")).to_have_text("Live", timeout=LIVE)
