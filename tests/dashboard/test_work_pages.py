"""The pages of jobs, tasks and approvals in a browser: every act, changes without a reload, hostile values, a phone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from factories import add_live_worker, claim_tasks, enqueue, step, task_events, task_row, workflow
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.connection import connect
from interlock.store.workflows import put_workflow
from job_driver import JobDriver
from work_support import TRACEBACK, fail_attempt, fail_task, submit_order

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from playwright.async_api import Page

    OpenPage = Callable[..., AbstractAsyncContextManager[Page]]

pytest_plugins = ("browser_support",)
pytestmark = pytest.mark.flow
LIVE = 30_000  # milliseconds: at most so long until a change is seen
HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
HOSTILE_NAMESPACE = "<img src=x onerror=alert(3)>"  # names that are part of addresses have no slash
Site = tuple[str, str]


async def test_pages_of_work_fit_a_phone_and_read_without_javascript(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        _, job = await submit_order(connection, name="phone_order")
        task = await fail_task(connection, "a_task_with_a_name_that_is_longer_than_a_phone_is_wide")
    paths = ("/tasks", "/tasks?state=error", f"/tasks/{task}", "/jobs", f"/jobs/{job}", "/approvals")
    for theme, width in (("dark", 390), ("light", 1280)):
        async with open_page("/", width=width, theme=theme) as page:
            for path in paths:
                await page.goto(path)
                await expect(page.locator("h1")).to_have_count(1)
                await expect(page.locator("#live")).to_have_text("Live", timeout=LIVE)
                assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} at {width}"
    async with open_page("/", script=False) as page:
        await page.goto(f"/jobs/{job}?step=charge_card")
        text = await page.inner_text("main")
        for wanted in ("charge_card", "boss", "Why is it not moving?", "psp.example:443 did not answer", "pay.py"):
            assert wanted in text
        await page.goto(f"/tasks/{task}")
        text = await page.inner_text("main")
        assert "It used up its tries, 1 of 1" in text
        assert TRACEBACK.splitlines()[1] in text
        assert f"interlock tasks requeue {task}" in text


async def test_hostile_payload_is_text(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        task = await enqueue(
            connection, HOSTILE, {"value": HOSTILE}, namespace=HOSTILE_NAMESPACE, tags=[HOSTILE], unique_key=HOSTILE
        )
        large = await enqueue(connection, "large", {"text": "y" * 100_000})
    async with open_page(f"/tasks/{task}") as page:
        await expect(page.locator("h1")).to_have_text(HOSTILE)
        assert HOSTILE.replace('"', '\\"') in await page.inner_text("#payloads")
        await page.goto("/tasks")
        row = page.locator(f"#row-{task}")
        await expect(row.locator("a").first).to_have_text(HOSTILE)
        await page.locator(f"[data-pick='{task}']").check()
        await page.locator("[data-bulk-act=cancel]").click()
        await expect(page.locator("#sheet")).to_contain_text(HOSTILE)
        await page.goto(f"/tasks/{large}")
        text = await page.inner_text("#payloads pre")
        assert 60_000 < len(text) <= 64 * 1024
        assert "more characters are not shown" in await page.inner_text("#payloads")


async def test_a_task_changes_without_a_reload(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        task = await enqueue(connection, "live_work", max_tries=1)
        async with open_page("/tasks?type=live_work") as page:
            row = page.locator(f"#row-{task}")
            await expect(row).to_contain_text("pending")
            (claimed,) = await claim_tasks(connection, actor="w_1", types=["live_work"])
            await expect(row).to_contain_text("running", timeout=LIVE)
            await page.goto(f"/tasks/{task}")
            await expect(page.locator("#task-state")).to_have_text("running")
            await fail_attempt(connection, claimed.id, claimed.attempt, event=TaskRowEvent.FAIL)
            await expect(page.locator("#task-state")).to_have_text("error", timeout=LIVE)
            await expect(page.locator("#payloads")).to_contain_text("ConnectTimeout", timeout=LIVE)
            await expect(page.locator("#history")).to_contain_text("fail", timeout=LIVE)
            await expect(page.locator("#why")).to_contain_text("used up its tries", timeout=LIVE)


async def test_newer_tasks_are_announced_and_not_inserted(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection, open_page("/tasks") as page:
        await expect(page.locator("#live")).to_have_text("Live", timeout=LIVE)
        task = await enqueue(connection, "newer")
        await expect(page.locator("#newer")).to_have_text("1 newer, show", timeout=LIVE)
        await expect(page.locator(f"#row-{task}")).to_have_count(0)
        await page.locator("#newer").click()
        await expect(page.locator(f"#row-{task}")).to_be_visible()


async def test_bulk_preview_equals_effect(open_page: OpenPage, site: Site) -> None:
    """The selection of two failed tasks and one pending task: two can be requeued, and two are."""
    async with connect(site[1]) as connection:
        failed = [await fail_task(connection, "bulk_work") for _ in range(2)]
        pending = await enqueue(connection, "bulk_other", tags=["bulk"])
        async with open_page("/tasks") as page:
            for task in (*failed, pending):
                await page.locator(f"[data-pick='{task}']").check()
            await expect(page.locator("[data-selected]")).to_have_text("3 selected")
            await page.locator("[data-bulk-act=requeue]").click()
            sheet = page.locator("#sheet form")
            await expect(sheet.locator("h2")).to_have_text("Requeue 2 tasks?")
            await expect(sheet).to_contain_text("1, is pending")
            await sheet.locator("[name=reason]").fill("bank is back")
            await sheet.get_by_role("button", name="Requeue 2 tasks").click()
            await expect(page.locator(".toast")).to_contain_text("Requeue 2 tasks in")
            assert [(await task_row(connection, task))["state"] for task in failed] == ["error"] * 2  # not sent yet
            await expect(page.locator(".toast").last).to_have_text("Requeued 2 tasks", timeout=LIVE)
        assert [(await task_row(connection, task))["state"] for task in failed] == ["pending"] * 2
        assert (await task_events(connection, pending)) == ["create"]


async def test_an_act_on_all_that_match_can_be_undone_and_then_done(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        tasks = [await enqueue(connection, "undo_work", tags=["undo"]) for _ in range(3)]
        other = await enqueue(connection, "undo_other")
        async with open_page("/tasks?tag=undo") as page:
            await page.locator("[data-pick]").first.check()
            await page.locator("[data-all]").click()
            await page.locator("[data-bulk-act=cancel]").click()
            await page.get_by_role("button", name="Cancel 3 tasks").click()
            await page.get_by_role("button", name="Undo").click()
            await expect(page.locator(".toast").last).to_have_text("Undone: nothing was changed")
            assert {(await task_row(connection, task))["state"] for task in tasks} == {"pending"}

            await page.locator("[data-bulk-act=cancel]").click()
            await page.get_by_role("button", name="Cancel 3 tasks").click()
            await expect(page.locator(".toast").last).to_have_text("Canceled 3 tasks", timeout=LIVE)
        assert {(await task_row(connection, task))["state"] for task in tasks} == {"canceled"}
        assert (await task_row(connection, other))["state"] == "pending"


async def test_every_act_on_a_task(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        task = await fail_task(connection, "act_work")
        async with open_page(f"/tasks/{task}") as page:
            await page.get_by_role("button", name="Requeue…").click()
            await page.locator("#sheet [name=reason]").fill("again")
            await page.keyboard.press("Enter")
            await expect(page.locator("#task-state")).to_have_text("pending", timeout=LIVE)
            await claim_tasks(connection, actor="w_1", types=["act_work"])
            await expect(page.get_by_role("button", name="Force…")).to_be_visible(timeout=LIVE)
            await page.get_by_role("button", name="Cancel…").click()
            await page.get_by_role("button", name="Cancel the task").click()
            await expect(page.locator(".toast").last).to_have_text("Cancellation requested")
            await page.get_by_role("button", name="Force…").click()
            await page.get_by_role("button", name="Cancel by force").click()
            await expect(page.locator("#task-state")).to_have_text("canceled", timeout=LIVE)
        events = await task_events(connection, task)
        assert events == ["create", "claim", "fail", "requeue", "claim", "cancel"]


async def test_double_click_acts_once(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        task = await fail_task(connection, "double_work")
        async with open_page(f"/tasks/{task}") as page:
            await page.get_by_role("button", name="Requeue…").click()
            await page.locator("#sheet").get_by_role("button", name="Requeue", exact=True).dblclick()
            await expect(page.locator("#task-state")).to_have_text("pending", timeout=LIVE)
            await expect(page.locator(".toast.t-red")).to_have_count(0)
        assert (await task_events(connection, task)).count("requeue") == 1


async def test_a_job_is_drawn_live_and_approved(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        driver, job = await submit_order(connection, name="live_order")
        async with open_page(f"/jobs/{job}?step=boss") as page:
            boss = page.locator("#job-graph [data-step=boss]")
            await expect(boss).to_have_attribute("aria-label", "boss, waiting · approval")
            await expect(boss).to_have_attribute("aria-current", "")
            assert await page.locator("#attempts .bx").count() >= 5
            widths = await page.locator("#attempts .bx").evaluate_all(
                "(bars) => bars.map((bar) => +bar.getAttribute('width'))"
            )
            assert min(widths) >= 4
            await page.locator("#why").get_by_role("button", name="Approve boss…").click()
            await page.locator("#sheet [name=comment]").fill("fine")
            await page.keyboard.press("Enter")
            await expect(page.locator(".toast").last).to_have_text("Approved")
            await driver.advance()
            await expect(boss).to_have_attribute("aria-label", re.compile("boss, done"), timeout=LIVE)
            await expect(page.locator("#step")).to_contain_text("fine", timeout=LIVE)


async def test_a_job_is_canceled_and_retried_from_a_step(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        driver, job = await submit_order(connection, name="canceled_order")
        async with open_page(f"/jobs/{job}") as page:
            await page.get_by_role("button", name="Cancel…").click()
            await page.locator("#sheet [name=reason]").fill("wrong order")
            await page.get_by_role("button", name="Cancel the job").click()
            await expect(page.locator(".toast").last).to_have_text("Cancellation requested")
            await driver.run()
            await expect(page.locator("#job-state .badge")).to_have_text("CANCELED", timeout=LIVE)
            await page.get_by_role("button", name="Retry from…").click(timeout=LIVE)  # without a reload
            await page.locator("#sheet select").select_option("validate")
            await page.get_by_role("button", name="Retry", exact=True).click()
            await page.wait_for_url(lambda url: "/jobs/" in url and str(job) not in url)
            await expect(page.locator("#job-meta")).to_contain_text("retry of")


async def test_parts_that_a_job_gets_later_arrive_without_a_reload(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        await add_live_worker(connection, worker="w_children")
        driver = JobDriver(connection)
        await put_workflow(connection, workflow(step("only", type="only"), name="small"))
        job = await driver.submit(
            step("first", type="before"), step("sub", "first", kind="child", workflow="small"), name="parent"
        )
        await driver.advance()
        async with open_page(f"/jobs/{job}?step=first") as page:
            await expect(page.locator("#live")).to_have_text("Live", timeout=LIVE)
            await expect(page.locator("#children")).to_be_hidden()
            await driver.run()
            await expect(page.locator("#children")).to_contain_text("small", timeout=LIVE)
            await expect(page.locator("#acts")).to_contain_text("Retry from…", timeout=LIVE)
            await expect(page.locator("#job-graph [data-step=first]")).to_have_attribute("aria-current", "")


async def test_the_inbox_refuses_with_a_reason_and_sends_signals(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        driver = JobDriver(connection)
        job = await driver.submit(
            step("ask", kind="approval", timeout=600), step("paid", kind="signal", signal="payment"), name="asks"
        )
        await driver.advance()
        async with open_page("/approvals") as page:
            items = page.locator(".item", has=page.locator(f"[data-copy='{job}']"))
            await expect(items).to_have_count(2)
            await items.get_by_role("button", name="Refuse…").click()
            await page.locator("#sheet [name=comment]").fill("too dear")
            await page.keyboard.press("Enter")
            await expect(page.locator(".toast").last).to_have_text("Refused")
            await driver.advance()
            await expect(items).to_have_count(1, timeout=LIVE)
            await items.get_by_role("button", name="Send payment…").click()
            await page.locator("#sheet textarea").fill('{"paid": 12}')
            await page.get_by_role("button", name="Send", exact=True).click()
            await expect(page.locator(".toast").last).to_have_text("Signal sent")
            await driver.advance()
            await expect(items).to_have_count(0, timeout=LIVE)
        steps = await driver.steps(job)
        assert steps["ask"]["state"] == "error"
        assert "too dear" in str(steps["ask"])
        assert steps["paid"]["output"]["result"] == {"paid": 12}


async def test_the_keyboard_selects_rows_and_opens_one(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        older, newer = [await enqueue(connection, "key_work", tags=["keys"]) for _ in range(2)]
    async with open_page("/tasks?tag=keys") as page:
        await page.keyboard.press("j")
        await page.keyboard.press("x")
        await expect(page.locator("[data-selected]")).to_have_text("1 selected")
        await expect(page.locator(f"#row-{newer} input")).to_be_checked()
        await page.locator(f"#row-{newer} a").focus()
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await page.wait_for_url(f"**/tasks/{older}")


async def test_the_search_finds_ids_keys_types_and_tags(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        task = await enqueue(connection, "find_type", unique_key="find:1", tags=["find_tag"])
    async with open_page("/tasks") as page:
        for text, where in (
            (str(task), f"/tasks/{task}"),
            ("find:1", "/tasks?key=find%3A1"),
            ("find_type", "/tasks?type=find_type"),
            ("find_tag", "/tasks?tag=find_tag"),
        ):
            await page.locator("#find").fill(text)
            await page.keyboard.press("Enter")
            await page.wait_for_url(f"**{where}")
            await expect(page.locator("main")).to_contain_text("find_type")


async def test_a_filter_of_the_form_is_in_the_address(open_page: OpenPage, site: Site) -> None:
    async with connect(site[1]) as connection:
        await enqueue(connection, "form_work", tags=["form"])
    async with open_page("/tasks?state=pending") as page:
        await page.locator(".adder summary").click()
        await page.locator(".adder [name=tag]").fill("form")
        await page.get_by_role("button", name="Apply").click()
        await page.wait_for_url("**/tasks?tag=form&state=pending")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await page.get_by_role("link", name="Remove the filter Tag form").click()
        await page.wait_for_url("**/tasks?state=pending")
