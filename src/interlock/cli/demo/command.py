"""The command `interlock demo`: the life of one task, then a workflow on real processes.

Invariant: nothing is simulated. All output is read from the database, and every process that is started is stopped.
"""

from __future__ import annotations

import asyncio
import signal
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from interlock.cli.demo.task import show_task
from interlock.cli.demo.workflow import show_workflow
from interlock.config import Config
from interlock.postgres.connection import connect, database_url
from interlock.postgres.migrate import migrate


class Part(StrEnum):
    """The parts of the demo."""

    TASK = "task"
    WORKFLOW = "workflow"


def demo(
    context: typer.Context,
    part: Annotated[Part | None, typer.Argument(help="Show only this part.", show_default=False)] = None,
) -> None:
    """Show a task that survives a crash, moves that the database refuses, and a workflow that loses a worker."""
    config: Config = context.obj
    console = Console(highlight=False)
    with database_url(config, lambda text: console.print(f"[dim]{escape(text)}[/dim]")) as url:
        try:
            asyncio.run(_demo(console, url, list(Part) if part is None else [part]))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _demo(console: Console, url: str, parts: list[Part]) -> None:
    if (current := asyncio.current_task()) is not None:
        for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the processes are stopped
            asyncio.get_running_loop().add_signal_handler(number, current.cancel)
    async with connect(url) as connection:
        await migrate(connection, note=lambda text: console.print(f"[dim]{escape(text)}[/dim]"))
        if Part.TASK in parts:
            await show_task(console, connection)
        if Part.WORKFLOW in parts:
            await show_workflow(console, connection, url)
