"""A workflow whose steps write what they do into a file, for tests that kill the processes that run it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from interlock import Interlock

app = Interlock()
recovery = app.workflow("recovery")


def record(log: str, line: str) -> int:
    """Append a line to the file; return how often it is in there now."""
    path = Path(log)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    return path.read_text(encoding="utf-8").splitlines().count(line)


@recovery.step
async def step_one(log: str, gate: str) -> str:
    record(log, "step_one")
    while not os.path.exists(gate):  # noqa: ASYNC240, PTH110 - a local file, looked at between two awaits
        await asyncio.sleep(0.01)
    return "one"


# the condition is always true; only an orchestrator can evaluate one
@recovery.step(after=["step_one"], max_tries=5, when="input.gate != ''")
async def step_two(log: str, kill: bool, step_one: str) -> str:  # noqa: FBT001 - a field of the input
    if record(log, "step_two") == 1 and kill:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{step_one}-two"


@recovery.step(after=["step_two"])
async def step_three(log: str, step_two: str) -> str:
    record(log, "step_three")
    return f"{step_two}-three"
