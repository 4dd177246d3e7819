"""`interlock explain`: where a task or a job is, since when, and why it is not moving.

Invariant: what holds something up stands below it, down to what waits for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import typer

from interlock.cli.opening import run
from interlock.cli.tables import as_json, distance, moment, printable
from interlock.client.app import Interlock
from interlock.client.explain import Explanation
from interlock.store.leaders import read_clock

NAMED = 3  # steps of a way at either end, when it is long
STEP = "  "


def explain(
    context: typer.Context,
    id_: Annotated[str, typer.Argument(help="A task, a step or a job.", metavar="ID")],
    in_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say where a task or a job is, and why it is not moving: what it waits for, and what that waits for."""

    async def look(app: Interlock) -> str:
        found = await app.explain(id_)
        async with app.connection() as connection:
            now = await read_clock(connection)
        return as_json(asdict(found)) if in_json else "\n".join(_lines(found, now))

    typer.echo(run(Interlock(config=context.obj), look))


def _lines(found: Explanation, now: datetime, indent: str = "") -> Iterator[str]:
    way = f"by way of {_way(found.through)}: " if found.through else ""
    state = "in error" if found.state == "error" else found.state
    head = f"{way}{found.kind} {found.name} ({found.id}) is {state}, since {moment(found.since)} UTC, "
    yield printable(f"{indent}{head}{distance(found.since, now)}")
    for fact in found.facts:
        yield printable(f"{indent}{STEP}{fact}")
    for cause in found.causes:
        yield from _lines(cause, now, indent + STEP * 2)


def _way(steps: Sequence[str]) -> str:
    if len(steps) <= 2 * NAMED:
        return ", ".join(steps)
    return f"{', '.join(steps[:NAMED])}, {len(steps) - 2 * NAMED} others, {', '.join(steps[-NAMED:])}"
