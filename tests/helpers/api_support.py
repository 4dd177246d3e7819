"""The supervisor's API: in the process of the test without a socket, or as a process on a free port."""

from __future__ import annotations

import functools
import os
import queue
import re
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from interlock import Interlock
from interlock.config import Config
from interlock.store.access import TokenScope, create_token, find_token
from interlock.supervisor.http.app import create_api
from interlock.supervisor.http.openapi import documented_routes
from processes import data_dir

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from fastapi import FastAPI

    from interlock.postgres.connection import Connection

TESTS = Path(__file__).parent
HERE = "http://localhost"
ADMIN_TOKEN = "il_" + "a" * 43
ADMIN_HEADERS = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
ADMIN_ACTOR = "token:test"


async def add_admin_token(connection: Connection) -> dict[str, str]:
    """Store the admin token of tests, unless it is stored; return the header that carries it."""
    if await find_token(connection, ADMIN_TOKEN) is None:
        await create_token(connection, "test", TokenScope.ADMIN, actor="test", secret=ADMIN_TOKEN)
    return ADMIN_HEADERS


async def add_token(connection: Connection, scope: str, name: str | None = None, *namespaces: str) -> dict[str, str]:
    """Make a token, limited to namespaces if they are given; return the header that carries it."""
    _, secret = await create_token(
        connection, name or scope, TokenScope(scope), actor="test", namespaces=namespaces or None
    )
    return {"Authorization": f"Bearer {secret}"}


@asynccontextmanager
async def api_at(
    url: str,
    *,
    app: Interlock | None = None,
    sends_token: bool = True,
    extensions: Sequence[Callable[[FastAPI], None]] = (),
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """Return an HTTP client of an API on a test's database; it sends an admin token, unless told otherwise."""
    config = Config(database_url=url, **settings)
    used = app if app is not None else Interlock(config=config)
    async with used:
        api = create_api(used, config, lag=timedelta(0), extensions=extensions)
        await api.state.transitions.update()
        headers = {}
        if sends_token:
            async with used.connection() as connection:
                headers = await add_admin_token(connection)
        transport = httpx.ASGITransport(app=api)
        hooks: dict[str, list[Callable[..., Any]]] = {"response": [functools.partial(refuse_undocumented, api)]}
        async with httpx.AsyncClient(transport=transport, base_url=HERE, headers=headers, event_hooks=hooks) as client:
            yield client


@functools.cache
def api_document() -> dict[str, Any]:
    """Return the OpenAPI document, which is the same for every app and database: built once, as it takes a second."""
    config = Config(database_url="postgresql://nowhere/none")
    return create_api(Interlock(config=config), config).openapi()


async def refuse_undocumented(api: FastAPI, response: httpx.Response) -> None:
    """Fail the test if an operation answers with a status or a code that the OpenAPI document does not have."""
    method, path = response.request.method, response.request.url.path
    found = [
        route
        for route in documented_routes(api.routes)
        if method in (route.methods or ()) and route.path_regex.match(path)
    ]
    if not found:
        return
    operation = api_document()["paths"][found[0].path_format][method.lower()]
    documented = operation["responses"].get(str(response.status_code))
    assert documented is not None, f"{method} {path}: {response.status_code} is not documented"
    if response.is_error:
        await response.aread()
        code = response.json()["code"]
        assert f"`{code}`" in documented["description"], f"{method} {path}: {code} is not documented"


@contextmanager
def supervisor_at(
    url: str, *arguments: str, file_limit: int | None = None, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str, Said]]:
    """Run `interlock supervisor` on a free port; return the process, its address and its output. Kill it at the end.

    With a `file_limit` it can open no more files than that.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    own = {"INTERLOCK_DATABASE_URL": url, "PYTHONPATH": str(TESTS), "COLUMNS": "150", "INTERLOCK_LOG_LEVEL": "warning"}
    own["INTERLOCK_DATA_DIR"] = data_dir()
    limited = () if file_limit is None else ("sh", "-c", f'ulimit -n {file_limit} && exec "$@"', "sh")
    process = subprocess.Popen(
        [*limited, sys.executable, "-m", "interlock", "supervisor", "--port", "0", *arguments],
        env=inherited | own | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = Said(process)
    try:
        yield process, said.address(), said
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        said.all()


class Said:
    """Reads the stderr of a supervisor in a thread, because a full pipe would block the supervisor."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: list[str] = []
        self._found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._links: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def address(self) -> str:
        """Wait for the address of the API."""
        found = self._found.get(timeout=60)
        assert found is not None, f"the supervisor did not start: {''.join(self._lines)}"
        return found

    def sign_in_url(self) -> str:
        """Wait for the link that signs in once."""
        found = self._links.get(timeout=60)
        assert found is not None, f"the supervisor printed no link: {''.join(self._lines)}"
        return found

    @property
    def headers(self) -> dict[str, str]:
        """Return the header that carries the local token of the supervisor."""
        self._links.put(self.sign_in_url())  # the token is there when the link is
        return {"Authorization": f"Bearer {(Path(data_dir()) / 'api-token').read_text(encoding='ascii').strip()}"}

    def all(self) -> str:
        """Return all output; the process must have ended."""
        self._thread.join()
        return "".join(self._lines)

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr:
            for line in self._process.stderr:
                self._lines.append(line)
                found = re.search(r"the API is at (http://\S+?),", line)
                if found:
                    self._found.put(found[1])
                link = re.search(r"sign in once, within two minutes: (\S+)", line)
                if link:
                    self._links.put(link[1])
        self._found.put(None)
        self._links.put(None)
