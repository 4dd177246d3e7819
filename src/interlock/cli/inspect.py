"""`interlock explain` and `doctor`: why work does not move, and health checks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import typer

from interlock.cli.app_context import InJson, run_with_app
from interlock.cli.format import (
    escape_control_characters,
    format_json,
    format_relative_time,
    format_table,
    format_time,
    print_note,
)
from interlock.client.app import Interlock
from interlock.client.explain import Explanation
from interlock.config import Config
from interlock.errors import StoreError
from interlock.lifecycle import TaskRowState
from interlock.postgres.connection import connect, database_url
from interlock.store.doctor import Finding, diagnose
from interlock.store.leader import read_clock

MAX_NAMED_STEPS = 3  # at either end of a long path
INDENT = "  "
DOCTOR_HEADER = ("", "about", "found", "what to do")


def explain(
    context: typer.Context,
    id_: Annotated[str, typer.Argument(help="A task, a step or a job.", metavar="ID")],
    in_json: InJson = False,
) -> None:
    """Explain why a task or a job does not move: what it waits for, and what that waits for in turn.

    Causes are indented below what they block, down to the root causes. Example: `interlock explain ID`.
    """

    async def look(app: Interlock) -> str:
        found = await app.explain(id_)
        async with app.connection() as connection:
            now = await read_clock(connection)
        return format_json(asdict(found)) if in_json else "\n".join(_explanation_lines(found, now))

    typer.echo(run_with_app(Interlock(config=context.obj), look))


def _explanation_lines(found: Explanation, now: datetime, indent: str = "") -> Iterator[str]:
    way = f"by way of {_format_path(found.through)}: " if found.through else ""
    state = "in error" if found.state == TaskRowState.ERROR else found.state
    head = f"{way}{found.kind} {found.name} ({found.id}) is {state}, since {format_time(found.since)} UTC, "
    yield escape_control_characters(f"{indent}{head}{format_relative_time(found.since, now)}")
    for fact in found.facts:
        yield escape_control_characters(f"{indent}{INDENT}{fact}")
    for cause in found.causes:
        yield from _explanation_lines(cause, now, indent + INDENT * 2)


def _format_path(steps: Sequence[str]) -> str:
    first, last = ", ".join(steps[:MAX_NAMED_STEPS]), ", ".join(steps[-MAX_NAMED_STEPS:])
    left_out = len(steps) - 2 * MAX_NAMED_STEPS
    return f"{first}, {left_out} others, {last}" if left_out > 0 else ", ".join(steps)


def doctor(context: typer.Context, in_json: InJson = False) -> None:
    """Check the database, the workers, the orchestrators and the queue; exit with 1 when something needs attention."""
    findings = _diagnose(context.obj)
    needed = sum(finding.needs_attention for finding in findings)
    if in_json:
        document = {"needs_attention": needed, "findings": [finding._asdict() for finding in findings]}
        typer.echo(format_json(document))
    else:
        ordered = sorted(findings, key=lambda finding: not finding.needs_attention)
        rows = ((("!" if f.needs_attention else "ok"), f.about, f.found, f.todo) for f in ordered)
        typer.echo(format_table(DOCTOR_HEADER, rows))
        print_note(f"{needed} need attention" if needed else "all is well")
    if needed:
        raise typer.Exit(1)


def _diagnose(config: Config) -> list[Finding]:
    """Run the checks; a database that cannot be reached is a finding too."""

    async def connected(url: str) -> list[Finding]:
        async with connect(url) as connection:
            return await diagnose(connection)

    try:
        with database_url(config, print_note) as url:
            return asyncio.run(connected(url))
    except StoreError as error:
        todo = "check that the server runs and that this role may connect"
        return [Finding("database", needs_attention=True, found=str(error), todo=todo)]
