"""`interlock demo`: what Interlock does, shown on a real PostgreSQL: a task's life, then a workflow on real processes.

Invariant: nothing is acted. What is shown was read from the database, or said by it, and what is started is stopped.
"""

from __future__ import annotations

import asyncio
import signal
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from interlock.cli.demo.task import play_task
from interlock.cli.demo.workflow import play_workflow
from interlock.config import Config
from interlock.postgres.connection import connect, database_url
from interlock.postgres.migrate import migrate


class Act(StrEnum):
    """The parts of the demo."""

    TASK = "task"
    WORKFLOW = "workflow"


def demo(
    context: typer.Context,
    act: Annotated[Act | None, typer.Argument(help="Play this act only.", show_default=False)] = None,
) -> None:
    """See a task survive a crash and the database refuse illegal moves; then a workflow that loses a worker."""
    config: Config = context.obj
    console = Console(highlight=False)
    with database_url(config, lambda text: console.print(f"[dim]{escape(text)}[/dim]")) as url:
        try:
            asyncio.run(_demo(console, url, list(Act) if act is None else [act]))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _demo(console: Console, url: str, acts: list[Act]) -> None:
    if (playing := asyncio.current_task()) is not None:
        for number in (signal.SIGTERM, signal.SIGHUP):  # as good as Ctrl-C: what was started is stopped
            asyncio.get_running_loop().add_signal_handler(number, playing.cancel)
    async with connect(url) as connection:
        await migrate(connection, note=lambda text: console.print(f"[dim]{escape(text)}[/dim]"))
        if Act.TASK in acts:
            await play_task(console, connection)
        if Act.WORKFLOW in acts:
            await play_workflow(console, connection, url)
