"""`interlock explain`: why work does not move, what would unblock it, and the command for that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import typer

from interlock.cli.app_context import InJson, run_with_app
from interlock.cli.enqueue import parse_past_time
from interlock.cli.format import escape_control_characters, format_json, format_relative_time, format_time
from interlock.client.app import Interlock
from interlock.client.explain import ExplainedKind, Explanation, Fact
from interlock.errors import ConfigError
from interlock.lifecycle import TaskRowState
from interlock.store.leader import read_clock

MAX_NAMED_STEPS = 3  # at either end of a long path
INDENT = "  "
AtTime = Annotated[
    str | None,
    typer.Option("--at", help="As of this time, with its zone, or so long ago, such as 2h.", metavar="TIME"),
]


def explain(
    context: typer.Context,
    words: Annotated[
        list[str], typer.Argument(help=f"The kind ({', '.join(ExplainedKind)}) and the id.", metavar="[KIND] ID")
    ],
    at: AtTime = None,
    in_json: InJson = False,
) -> None:
    """Explain why a task, job, worker, namespace, schedule or limit does not move, and how to unblock it.

    Causes are indented below what they block, down to the root causes. A line that begins with `interlock` is a command
    to copy. The kind can be left out where the id or name tells it.

    Examples: `interlock explain ID`, `interlock explain limit mail`, `interlock explain ID --at 2h`.
    """
    kind, id_ = split_kind(words)

    async def look(app: Interlock) -> str:
        async with app.connection() as connection:
            now = await read_clock(connection)
        found = await app.explain(id_, kind=kind, at=parse_past_time("--at", at, now))
        return format_json(asdict(found)) if in_json else "\n".join(explanation_lines(found, found.at or now))

    typer.echo(run_with_app(Interlock(config=context.obj), look))


def split_kind(words: Sequence[str]) -> tuple[str | None, str]:
    """Return the kind, if it was given, and the id."""
    if len(words) == 1:
        return None, words[0]
    if len(words) == 2:  # noqa: PLR2004 - KIND ID
        return words[0], words[1]
    raise ConfigError(f"give a kind and an id, or an id alone, got {len(words)} words: {' '.join(words)}")


def explanation_lines(found: Explanation, now: datetime, indent: str = "") -> Iterator[str]:
    """Yield the lines of an explanation, each cause indented below what it blocks."""
    way = f"by way of {_format_path(found.through)}: " if found.through else ""
    state = "in error" if found.state == TaskRowState.ERROR else found.state
    verb = "is" if found.at is None else f"was at {format_time(found.at)} UTC"
    name = f"{found.name} ({found.id})" if str(found.id) != found.name else found.name
    since = "" if found.since is None else f", since {_format_since(found.since, now)}"
    yield escape_control_characters(f"{indent}{way}{found.kind} {name} {verb} {state}{since}")
    for fact in found.facts:
        yield from (escape_control_characters(f"{indent}{INDENT}{line}") for line in fact_lines(fact, found, now))
    for cause in found.causes:
        yield from explanation_lines(cause, now, indent + INDENT * 2)


def fact_lines(fact: Fact, of: Explanation, now: datetime) -> Iterator[str]:
    """Yield a fact, and indented below it its evidence, what unblocks it, and the command alone on its line."""
    has_own_time = fact.since is not None and fact.since != of.since
    yield fact.text + (f" (since {_format_since(fact.since, now)})" if has_own_time and fact.since else "")
    for evidence in fact.evidence:
        yield f"{INDENT}{evidence.text}"
    if fact.remedy is not None:
        yield f"{INDENT}{fact.remedy}{':' if fact.command else ''}"
    if fact.command is not None:
        yield f"{INDENT}{INDENT}{fact.command}"


def _format_since(since: datetime, now: datetime) -> str:
    return f"{format_time(since)} UTC, {format_relative_time(since, now)}"


def _format_path(steps: Sequence[str]) -> str:
    first, last = ", ".join(steps[:MAX_NAMED_STEPS]), ", ".join(steps[-MAX_NAMED_STEPS:])
    left_out = len(steps) - 2 * MAX_NAMED_STEPS
    return f"{first}, {left_out} others, {last}" if left_out > 0 else ", ".join(steps)
