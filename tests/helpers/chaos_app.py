"""The workflows of the chaos runs, and the expected end of each job, which depends on `n` alone."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from interlock import Interlock, PermanentError, RetryableError, StepContext

TRIES = 30  # so that killed workers do not use up the tries of a step
GATE = "go"

app = Interlock()


async def work() -> None:
    """Sleep for a moment, so that there is something to interrupt."""
    await asyncio.sleep(random.uniform(0, 0.1))  # noqa: S311 - no secret


chain = app.workflow("chain")


@chain.step(max_tries=TRIES)
async def first(n: int) -> int:
    await work()
    return n + 1


@chain.step(after=["first"], max_tries=TRIES)
async def second(first: int) -> int:
    await work()
    return first * 10


@chain.step(after=["second"], max_tries=TRIES)
async def third(second: int) -> str:
    await work()
    return f"got {second}"


order = app.workflow("order")


@app.task(max_tries=TRIES)
async def give_back(result: Any) -> Any:
    await work()
    return result


@order.step(max_tries=TRIES)
async def validate(n: int) -> int:
    await work()
    return n


@order.step(after=["validate"], max_tries=TRIES, compensate=give_back)
async def reserve(validate: int) -> str:
    await work()
    return f"reserved {validate}"


@order.step(after=["validate"], max_tries=TRIES, compensate=give_back)
async def price(validate: int) -> int:
    await work()
    return validate * 2


@order.decision(after=["reserve", "price"], branches=["express", "standard"], max_tries=TRIES)
async def route(n: int) -> str:
    await work()
    return "express" if n % 2 else "standard"


@order.step(after=["route"], max_tries=TRIES)
async def express() -> str:
    await work()
    return "by air"


@order.step(after=["route"], max_tries=TRIES)
async def standard() -> str:
    await work()
    return "by land"


@order.step(after=["express", "standard"], max_tries=TRIES)
async def boxes(n: int) -> list[int]:
    await work()
    return list(range(n % 4))


@order.map(over="boxes", max_tries=TRIES)
async def pack(item: int, n: int) -> int:
    await work()
    return item + n


@order.step(after=["pack", "price"], max_tries=TRIES)
async def ship(pack: list[int], price: int, n: int) -> int:
    await work()
    if n % 5 == 0:
        raise PermanentError("no ship today")
    return sum(pack) + price


mend = app.workflow("mend")


@mend.step(max_tries=TRIES)
async def risky(n: int) -> str:
    await work()
    if n % 2:
        raise PermanentError("it broke")
    return "whole"


@mend.step(recovers=["risky"], max_tries=TRIES)
async def repair() -> str:
    await work()
    return "repaired"


@mend.step(after=["risky", "repair"], join="any", max_tries=TRIES)
async def use(risky: str | None = None, repair: str | None = None) -> str:
    await work()
    return risky or repair or "nothing"


family = app.workflow("family")
family.child("delegate", chain)


@family.step(after=["delegate"], max_tries=TRIES)
async def report(delegate: dict[str, str]) -> str:
    await work()
    return f"they {delegate['third']}"


gate = app.workflow("gate")
gate.sleep("rest", 0.05)
gate.signal(GATE, after=["rest"])


@gate.step(after=[GATE], max_tries=TRIES)
async def leave(go: int) -> int:
    await work()
    return go


bumpy = app.workflow("bumpy")


@bumpy.step(max_tries=TRIES)
async def stumble(ctx: StepContext, n: int) -> int:
    await work()
    if ctx.attempt == 1:
        raise RetryableError("not yet", retry_after=0.01)
    return n


fan = app.workflow("fan")


@fan.map(over_input="items", max_tries=TRIES, strategy=0.5)
async def part(item: int, index: int) -> int:
    await work()
    if index == 1:
        raise PermanentError("this one never works")
    return item


@fan.step(after=["part"], max_tries=TRIES)
async def join(part: list[int]) -> int:
    await work()
    return sum(part)


NAMES = ("chain", "order", "mend", "family", "gate", "bumpy", "fan")
WIDTH = 6  # parts of a fan


def input_of(workflow: str, n: int) -> dict[str, Any]:
    """Return the input of a job."""
    return {"n": n, "items": [n + i for i in range(WIDTH)]} if workflow == "fan" else {"n": n}


def expected(workflow: str, n: int) -> tuple[str, dict[str, Any] | None, tuple[str, ...]]:
    """Return the expected end of a job: status, output, and the compensated steps."""
    if workflow == "order":
        packed = sum(item + n for item in range(n % 4))
        failed = ("FAILED", None, ("price", "reserve"))
        return failed if n % 5 == 0 else ("COMPLETED", {"ship": packed + n * 2}, ())
    got = f"got {(n + 1) * 10}"
    output: dict[str, dict[str, Any]] = {
        "chain": {"third": got},
        "mend": {"use": "repaired" if n % 2 else "whole"},
        "family": {"report": f"they {got}"},
        "gate": {"leave": n},
        "bumpy": {"stumble": n},
        "fan": {"join": sum(n + i for i in range(WIDTH) if i != 1)},
    }
    return "COMPLETED", output[workflow], ()


def steps_of(workflow: str, n: int) -> int:
    """Return the number of steps a job ends with, including map parts, compensations and children."""
    if workflow == "order":
        return 9 + n % 4 + (2 if n % 5 == 0 else 0)
    return {"chain": 3, "mend": 3, "family": 5, "gate": 3, "bumpy": 1, "fan": 2 + WIDTH}[workflow]
