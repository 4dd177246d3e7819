"""`interlock doctor`: looks the installation over, and exits with 1 when something needs attention.

Invariant: a finding is one line that says what, how many, and what to do; a database that cannot be reached is one too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer

from interlock.cli.output import tell
from interlock.cli.tables import as_json, table
from interlock.config import Config
from interlock.errors import StoreError
from interlock.store.database import connect, database_url
from interlock.store.doctor import Finding, examine

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
        typer.echo(as_json(document))
    else:
        typer.echo(_page(findings))
        tell(f"{needed} need attention" if needed else "all is well")
    if needed:
        raise typer.Exit(1)


def _findings(config: Config) -> list[Finding]:
    try:
        with database_url(config, tell) as url:
            return asyncio.run(_examined(url))
    except StoreError as error:
        return [Finding("database", needs_attention=True, found=str(error), todo="see that it runs and may be used")]


async def _examined(url: str) -> list[Finding]:
    async with connect(url) as connection:
        return await examine(connection)


def _page(findings: Sequence[Finding]) -> str:
    """Write the findings, what needs attention first."""
    ordered = sorted(findings, key=lambda finding: not finding.needs_attention)
    return table(
        HEADER,
        ((("!" if f.needs_attention else "ok"), f.about, f.found, f.todo) for f in ordered),
    )
