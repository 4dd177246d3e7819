"""The dashboard on a test's database: in the process of the test, or served over HTTP to a browser."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from api_support import api_at
from interlock import Interlock
from interlock.config import Config
from interlock.dashboard.app import Dashboard, add_dashboard
from interlock.store.access import TokenScope, create_token
from interlock.supervisor.http.server import ApiServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import httpx
    from fastapi import FastAPI

    from interlock.postgres.connection import Connection

TOKEN = "il_" + "b" * 43  # of the browser's session


@asynccontextmanager
async def dashboard_at(url: str, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Dashboard]]:
    """Return an HTTP client without a token, and the dashboard that it talks to."""
    found: list[Dashboard] = []

    def extend(api: FastAPI) -> None:
        add_dashboard(api)
        found.append(api.state.dashboard)

    async with api_at(url, sends_token=False, extensions=[extend], **settings) as client:
        yield client, found[0]


async def sign_in(
    client: httpx.AsyncClient, connection: Connection, scope: str = "admin", *namespaces: str
) -> dict[str, str]:
    """Begin a session of a new token; return the headers of an act, without a key."""
    _, secret = await create_token(
        connection, f"viewer-{scope}", TokenScope(scope), actor="test", namespaces=namespaces or None
    )
    answer = await client.post("/ui/session", json={"token": secret})
    assert answer.status_code == 201, answer.text
    return {"X-CSRF-Token": answer.json()["csrf_token"]}


@contextmanager
def served_dashboard(url: str, **settings: Any) -> Iterator[str]:
    """Serve the dashboard in a thread, with an admin token `TOKEN`; return its address."""
    started: list[str] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()

    async def serve() -> None:
        config = Config(database_url=url, supervisor_port=0, **settings)
        async with Interlock(config=config) as app:
            async with app.connection() as connection:
                await create_token(connection, "browser", TokenScope.ADMIN, actor="test", secret=TOKEN)
            server = ApiServer(app, config, extensions=[add_dashboard])
            await server.start()
            started.append(server.url)
            ready.set()
            await stopping.wait()
            await server.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    try:
        assert ready.wait(60), "the server did not start"
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()
