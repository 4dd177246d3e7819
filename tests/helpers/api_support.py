"""The supervisor's API: in the process of the test without a socket, or as a process on a free port."""

from __future__ import annotations

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
from interlock.supervisor.http.app import create_api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

TESTS = Path(__file__).parent
HERE = "http://localhost"


@asynccontextmanager
async def api_at(url: str, *, app: Interlock | None = None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Return an HTTP client of an API on a test's database."""
    config = Config(database_url=url, **settings)
    used = app if app is not None else Interlock(config=config)
    async with used:
        api = create_api(used, config, lag=timedelta(0))
        await api.state.transitions.update()
        transport = httpx.ASGITransport(app=api)
        async with httpx.AsyncClient(transport=transport, base_url=HERE) as client:
            yield client


@contextmanager
def supervisor_at(url: str, *arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str, Said]]:
    """Run `interlock supervisor` on a free port; return the process, its address and its output. Kill it at the end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    own = {"INTERLOCK_DATABASE_URL": url, "PYTHONPATH": str(TESTS), "COLUMNS": "150", "INTERLOCK_LOG_LEVEL": "warning"}
    process = subprocess.Popen(
        [sys.executable, "-m", "interlock", "supervisor", "--port", "0", *arguments],
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
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def address(self) -> str:
        """Wait for the address of the API."""
        found = self._found.get(timeout=60)
        assert found is not None, f"the supervisor did not start: {''.join(self._lines)}"
        return found

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
        self._found.put(None)
