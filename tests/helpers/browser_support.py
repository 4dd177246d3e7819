"""A browser for the tests of the dashboard: Debian's Chromium, one process per test process, and one server per module.

Each test connects to the browser in its own event loop and gets a context of its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import async_playwright

from dashboard_support import TOKEN, served_dashboard
from factories import run_sql

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from playwright.async_api import Browser, Page

    from interlock.postgres.embedded.server import EmbeddedServer

CHROMIUM = shutil.which("chromium")
MISSING = "Chromium is not installed, so that no page was opened in a browser; on Debian: apt-get install chromium"
ARGUMENTS = (
    "--headless",
    "--remote-debugging-port=0",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def browser_address() -> Iterator[str]:
    """Run one browser for all tests of this process; without Chromium, skip and say how to install it."""
    if CHROMIUM is None:
        pytest.skip(MISSING)
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(
            [CHROMIUM, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            found = next(match[1] for line in lines if (match := re.search(r"listening on (ws://\S+)", line)))
            yield found
        finally:
            process.terminate()
            process.communicate()


@pytest.fixture
async def browser(browser_address: str) -> AsyncIterator[Browser]:
    """Connect to the browser."""
    async with async_playwright() as playwright:
        yield await playwright.chromium.connect_over_cdp(browser_address)


@pytest.fixture(scope="module")
def site(server: EmbeddedServer, template: str) -> Iterator[tuple[str, str]]:
    """Serve the dashboard on a database of its own; return its address and the URL of the database."""
    name = "dashboard_site"
    run_sql(server.url("postgres"), f"create database {name} template {template}")
    try:
        with served_dashboard(server.url(name)) as address:
            yield address, server.url(name)
    finally:
        run_sql(server.url("postgres"), f"drop database {name} with (force)")


@pytest.fixture
def open_page(browser: Browser, site: tuple[str, str]) -> Callable[..., AbstractAsyncContextManager[Page]]:
    """Return a function that opens a page of a signed-in browser; errors and CSP violations fail the test.

    `allowed`: a part of the errors that the test provokes.
    """
    address, _ = site

    @asynccontextmanager
    async def opened(
        path: str = "/",
        *,
        width: int = 1280,
        theme: str = "light",
        script: bool = True,
        timezone: str | None = None,
        allowed: str = "",
    ) -> AsyncIterator[Page]:
        context = await browser.new_context(
            base_url=address,
            viewport={"width": width, "height": 900},
            color_scheme="dark" if theme == "dark" else "light",
            reduced_motion="reduce",
            java_script_enabled=script,
            timezone_id=timezone,
        )
        problems: list[str] = []
        try:
            answer = await context.request.post("/ui/session", data={"token": TOKEN}, headers={"Origin": address})
            assert answer.status == 201, await answer.text()
            page = await context.new_page()
            page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on(
                "request",
                lambda request: (
                    None
                    if request.url.startswith(address)
                    else problems.append(f"a request left the origin: {request.url}")
                ),
            )
            if script:
                await page.add_init_script(
                    "addEventListener('securitypolicyviolation',"
                    "(event) => console.error(`CSP: ${event.violatedDirective} ${event.sample}`))"
                )
            await page.goto(path)
            yield page
            assert [text for text in problems if not allowed or allowed not in text] == []
        finally:
            await context.close()

    return opened
