"""The app whose workflows the tests of jobs run, in this process or in others."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from interlock import Interlock, PermanentError

app = Interlock()

chain = app.workflow("chain")


@chain.step
async def first(n: int = 0) -> int:
    return n + 1


@chain.step(after=["first"])
async def second(first: int) -> int:
    return first * 10


@chain.step(after=["second"])
async def third(second: int) -> str:
    return f"got {second}"


strict = app.workflow(
    "strict", input_schema={"type": "object", "required": ["order"], "properties": {"order": {"type": "integer"}}}
)


@strict.step(name="only")
async def only(order: int) -> int:
    return order


broken = app.workflow("broken")


@broken.step
async def fine() -> str:
    return "fine"


@broken.step(after=["fine"], max_tries=1)
async def bad(fine: str) -> None:
    raise PermanentError(f"{fine} no more")


@broken.step(after=["bad"], name="never")
async def never() -> None:
    pass


gates = app.workflow("gates")
gates.signal("paid")
gates.approval("boss", after=["paid"])


@gates.step(after=["boss"])
async def ship(paid: dict[str, int] | None = None) -> str:
    return f"shipped {paid}"


class Form(BaseModel):
    """The payload of a signal."""

    pages: int


desk = app.workflow("desk")
desk.signal("form", payload=Form, assignee="input.clerk")
desk.approval("release", assignee="ops")
desk.sleep("closing_time", 3600)


slow = app.workflow("slow")


@slow.step
async def nap(seconds: float = 60) -> str:
    await asyncio.sleep(seconds)
    return "rested"
