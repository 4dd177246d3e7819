"""The code and the output printed in the guide to tasks are true."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from interlock.testing import drain

if TYPE_CHECKING:
    from interlock import Interlock

pytestmark = pytest.mark.flow

GUIDE = Path(__file__).parents[2] / "docs" / "tasks.md"


async def run_block(block: str, names: dict[str, Any]) -> None:
    code = compile(block, "tasks.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    done = eval(code, names)  # noqa: S307 - our own page
    if inspect.iscoroutine(done):
        await done


async def work(app: Interlock) -> None:
    """Run what the guide enqueues, as a worker would beside it."""
    while app.is_open:
        await drain(app)
        await asyncio.sleep(0.05)


async def test_the_blocks_of_the_guide_run_one_after_the_other(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_DATABASE_URL", url)
    blocks = re.findall(r"```python\n(.+?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 10
    names: dict[str, Any] = {"__name__": "guide"}
    worker: asyncio.Task[None] | None = None
    for block in blocks:
        if "await app.close()" in block and worker is not None:
            worker.cancel()
            with suppress(asyncio.CancelledError):
                await worker
        await run_block(block, names)
        if worker is None and names["app"].is_open:
            worker = asyncio.create_task(work(names["app"]))
    app = names["app"]
    view = asyncio.create_task(asyncio.to_thread(names["in_a_view"], "ada@example.org"))
    try:
        while not view.done():
            await asyncio.to_thread(lambda: app.sync.run(drain(app)))
        assert await view == "Hello to ada@example.org"
    finally:
        app.sync.close()
