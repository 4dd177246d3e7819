"""`interlock explain`: where a task or a job is, since when, and why it is not moving.

Invariant: what holds something up stands below it, down to what waits for nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from interlock.cli.app_context import run_with_app
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
from interlock.lifecycle import MACHINES
from interlock.machine import Machine
from interlock.machine.diagram import document, mermaid, svg
from interlock.postgres.connection import connect, database_url
from interlock.store.doctor import Finding, diagnose
from interlock.store.leader import read_clock

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
        return format_json(asdict(found)) if in_json else "\n".join(_lines(found, now))

    typer.echo(run_with_app(Interlock(config=context.obj), look))


def _lines(found: Explanation, now: datetime, indent: str = "") -> Iterator[str]:
    way = f"by way of {_way(found.through)}: " if found.through else ""
    state = "in error" if found.state == "error" else found.state
    head = f"{way}{found.kind} {found.name} ({found.id}) is {state}, since {format_time(found.since)} UTC, "
    yield escape_control_characters(f"{indent}{head}{format_relative_time(found.since, now)}")
    for fact in found.facts:
        yield escape_control_characters(f"{indent}{STEP}{fact}")
    for cause in found.causes:
        yield from _lines(cause, now, indent + STEP * 2)


def _way(steps: Sequence[str]) -> str:
    if len(steps) <= 2 * NAMED:
        return ", ".join(steps)
    return f"{', '.join(steps[:NAMED])}, {len(steps) - 2 * NAMED} others, {', '.join(steps[-NAMED:])}"


# SECTION cli/doctor
# `interlock doctor`: looks the installation over, and exits with 1 when something needs attention.
#
# Invariant: a finding is one line that says what, how many, and what to do; a database that cannot be reached is one
# too.

HEADER = ("", "about", "found", "what to do")


def doctor(
    context: typer.Context,
    in_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look over the database, the workers, the orchestrators and the queue, and say what needs attention."""
    findings = _findings(context.obj)
    needed = sum(finding.needs_attention for finding in findings)
    if in_json:
        document = {"needs_attention": needed, "findings": [finding._asdict() for finding in findings]}
        typer.echo(format_json(document))
    else:
        typer.echo(_page(findings))
        print_note(f"{needed} need attention" if needed else "all is well")
    if needed:
        raise typer.Exit(1)


def _findings(config: Config) -> list[Finding]:
    try:
        with database_url(config, print_note) as url:
            return asyncio.run(_examined(url))
    except StoreError as error:
        return [Finding("database", needs_attention=True, found=str(error), todo="see that it runs and may be used")]


async def _examined(url: str) -> list[Finding]:
    async with connect(url) as connection:
        return await diagnose(connection)


def _page(findings: Sequence[Finding]) -> str:
    """Write the findings, what needs attention first."""
    ordered = sorted(findings, key=lambda finding: not finding.needs_attention)
    return format_table(
        HEADER,
        ((("!" if f.needs_attention else "ok"), f.about, f.found, f.todo) for f in ordered),
    )


# SECTION cli/diagram
# `interlock diagram`: the lifecycles as Mermaid text, as SVG pictures, or as the page docs/lifecycles.md.
#
# Invariant: what is drawn comes from `lifecycle.MACHINES` alone; a name that is not there is refused with the list.

# What holds things to each table; the tables themselves do not know where they are used.
ENFORCED = {
    "worker": "in memory, one machine per worker process",
    "task-attempt": "in memory, one machine per claimed attempt",
    "task": "in the database, by the guard of table `tasks`",
    "job": "in the database, by the guard of table `jobs`",
    "supervised-worker": "in the database, by the guard of table `workers`",
    "sort-worker": "in memory, one machine per sort worker, saved to a file on every move",
    "sort-master": "in memory, one machine per sort",
}


class Form(StrEnum):
    """How a lifecycle is drawn."""

    MERMAID = "mermaid"
    SVG = "svg"


def diagram(
    machine: Annotated[
        str | None,
        typer.Argument(help=f"Which lifecycle to draw: {', '.join(MACHINES)}. All of them unless given."),
    ] = None,
    form: Annotated[Form, typer.Option("--format", "-f", help="Mermaid text, or an SVG picture.")] = Form.MERMAID,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write to this file; for all pictures at once, into this directory."),
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option("--docs", help="Write the page that documents all lifecycles to this file."),
    ] = None,
) -> None:
    """Draw the lifecycles from the tables that the database enforces."""
    if machine is not None and machine not in MACHINES:
        raise typer.BadParameter(f"no lifecycle is called {machine!r}; there are: {', '.join(MACHINES)}")
    chosen = {machine: MACHINES[machine]} if machine else MACHINES
    if docs is not None:
        _write(document(MACHINES, ENFORCED), docs)
    elif form is Form.SVG:
        _pictures(chosen, output)
    else:
        _write("\n".join(f"%% {name}\n{mermaid(each)}" for name, each in chosen.items()), output)


def _pictures(chosen: Mapping[str, Machine[Any, Any]], output: Path | None) -> None:
    """Write one picture to the output, or several into it."""
    if len(chosen) == 1:
        _write(svg(*chosen.values()), output)
    elif output is not None:
        for name, machine in chosen.items():
            _write(svg(machine), output / f"{name}.svg")
    else:
        raise typer.BadParameter(
            "one SVG holds one lifecycle: name one, or give a directory with --output for all of them; "
            f"there are: {', '.join(MACHINES)}"
        )


def _write(text: str, path: Path | None) -> None:
    if path is None:
        typer.echo(text, nl=False)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from error
    typer.echo(f"wrote {path}", err=True)
