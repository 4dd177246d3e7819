"""Names of any length, direction and script in every place: they are text, and no page grows wider for them."""

from __future__ import annotations

import json
import shlex
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from playwright.async_api import expect

from factories import claim_tasks, enqueue, step
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.connection import connect
from interlock.store.limits import Limit, put_limits
from interlock.store.schedules import Schedule, put_schedules
from interlock.store.tasks import Outcome, settle_running_tasks
from interlock.store.workers import RegisteredProcess, register_worker
from job_driver import JobDriver

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from playwright.async_api import Page

    from interlock.postgres.connection import Connection

    OpenPage = Callable[..., AbstractAsyncContextManager[Page]]
    Site = tuple[str, str]

pytest_plugins = ("browser_support",)
pytestmark = pytest.mark.flow
NAMES = {
    "long": "a_very_long_name_" * 11,
    "markup": "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>",
    "shell": "$(touch /tmp/x); `id` & 'quoted' #",
    "right to left": "\u202eevil \u05e9\u05dc\u05d5\u05dd",  # with an override that has no end
    "emoji": "\U0001f98a \u00e9mile \U0001f469\u200d\U0001f467",
}
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Buttons of rows that are beyond the right edge of their table's place.
ACTS_OUT_OF_SIGHT = """
[...document.querySelectorAll("main td .btn")]
    .filter((button) => button.getBoundingClientRect().right > button.closest(".card").getBoundingClientRect().right)
    .map((button) => button.closest("tr").innerText)
"""
LISTS = ("/", "/tasks", "/tasks?state=error", "/jobs", "/approvals", "/limits", "/schedules", "/workers", "/namespaces")


async def add_named(connection: Connection, name: str) -> tuple[str, str]:
    """Put the name into every place that takes one; return a failed task and a job that waits."""
    plain = "".join(letter for letter in name if letter.isprintable() and letter != "/")
    await enqueue(connection, name, {"value": name}, tags=[name], unique_key=name, namespace=plain)
    await put_limits(connection, [Limit(name, max_running=1)])
    for _ in range(2):
        await enqueue(connection, name, limit_key=name)
    await put_schedules(connection, [Schedule(name, type=name, every=timedelta(hours=1))])
    process = RegisteredProcess(f"w {name}", namespaces=(plain,), types=(name,), statistics={"slots": 8, "held": 3})
    await register_worker(connection, process, lease=timedelta(hours=1))
    failing = await enqueue(connection, "failing", max_tries=1)
    (claimed,) = await claim_tasks(connection, actor=f"w {name}", types=["failing"])
    progress = json.dumps({"fraction": 0.4, "message": name * 5})
    await connection.execute("update interlock.tasks set progress = %s where id = %s", [progress, failing])
    error = {"type": name, "message": name * 5, "traceback": name * 20}
    outcome = Outcome(claimed.id, claimed.attempt, TaskRowEvent.FAIL, error=error)
    await settle_running_tasks(connection, [outcome], actor=f"w {name}")
    driver = JobDriver(connection)
    job = await driver.submit(
        step("boss", kind="approval", timeout=600), name="named", input={"value": name}, tags=[name]
    )
    await driver.advance()
    return str(failing), str(job)


@pytest.mark.parametrize("kind", NAMES)
async def test_no_name_makes_a_page_wider(open_page: OpenPage, site: Site, kind: str) -> None:
    name = NAMES[kind]
    async with connect(site[1]) as connection:
        failing, job = await add_named(connection, name)
    paths = (*LISTS, f"/tasks/{failing}", f"/jobs/{job}", f"/limits/{quote(name, safe='')}")
    for width in (1280, 390):
        async with open_page("/", width=width) as page:
            for path in (*paths, f"/workers/{quote('w ' + name, safe='')}", "/audit"):
                answer = await page.goto(path)
                assert answer is not None
                assert answer.status == 200, path
                assert await page.evaluate(SIDEWAYS) == 0, f"{path} at {width}"
                if width > 760:  # on a phone, diagrams scroll in their card
                    assert await page.evaluate(ACTS_OUT_OF_SIGHT) == [], path


async def test_a_command_to_copy_quotes_names_for_the_shell(open_page: OpenPage, site: Site) -> None:
    name, namespace = NAMES["shell"], NAMES["shell"].replace("/", "")
    async with connect(site[1]) as connection:
        await put_limits(connection, [Limit(name, max_running=1)])
    commands = {
        f"/limits/{quote(name, safe='')}": ["limits", "show", name],
        f"/?ns={quote(namespace)}": ["status", "--namespace", namespace],
        f"/audit?id={quote(name)}": ["history", name],
    }
    async with open_page("/") as page:
        for path, words in commands.items():
            await page.goto(path)
            button = page.get_by_role("button", name="Copy as command")
            assert shlex.split(str(await button.get_attribute("data-copy"))) == ["interlock", *words]


async def test_tasks_of_the_same_moment_have_different_short_ids(open_page: OpenPage, site: Site) -> None:
    """The first half of a UUIDv7 is its time: tasks that are enqueued together share it."""
    async with connect(site[1]) as connection:
        await connection.execute(
            "insert into interlock.tasks (type, tags) select 'together', '{together}' from generate_series(1, 5)"
        )
    async with open_page("/tasks?tag=together") as page:
        await expect(page.locator("tbody tr")).to_have_count(5)
        assert len(set(await page.locator("tbody .chip").all_inner_texts())) == 5
