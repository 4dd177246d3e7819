"""`interlock top`: reads the figures every second, draws them, and carries out what keys ask for."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated
from uuid import UUID

import typer
from rich.console import Console
from rich.live import Live

from interlock.cli.app_context import InJson, run_with_app
from interlock.cli.explain import explanation_lines
from interlock.cli.format import format_json, format_table
from interlock.cli.top.terminal import Terminal
from interlock.cli.top.view import HELP, PANELS, Row, TopView
from interlock.client.app import Interlock
from interlock.errors import InterlockError
from interlock.lifecycle import SupervisedWorkerEvent
from interlock.service import BackgroundTasks
from interlock.store.leader import read_clock
from interlock.store.top import Depths, TopSnapshot, read_depths, read_top
from interlock.store.workers import move_worker

READ_INTERVAL_S = 1.0
DEPTH_COST = 10  # counts are read again after this many times as long as reading them took
PAGE_LINES = 10
REASON = "interlock top"
WRITTEN_BY_SIGTERM = 128 + signal.SIGTERM


def top(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once and exit.")] = False,
    in_json: InJson = False,
) -> None:
    """Watch the installation live: namespaces, rates, latencies, workers, running tasks and jobs.

    Keys pause, resume, cancel and explain what is selected; `?` lists them. Without a terminal, or with --once or
    --json, the figures are printed once.
    """
    used = Interlock(config=context.obj)
    if once or in_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        seen = run_with_app(used, _read_once)
        typer.echo(format_json(asdict(seen)) if in_json else _format_once(seen))
        return
    screen = TopScreen(Console())
    try:
        run_with_app(used, screen.run)
    except KeyboardInterrupt:  # a normal way to quit
        return
    if screen.was_terminated:
        raise typer.Exit(WRITTEN_BY_SIGTERM)


async def _read_once(app: Interlock) -> TopSnapshot:
    async with app.connection() as connection:
        return await read_top(connection, await read_depths(connection))


def _format_once(seen: TopSnapshot) -> str:
    parts = []
    for panel in PANELS:
        header = tuple(column.lstrip(">") for column in panel.columns)
        parts.append(format_table(header, (row.cells for row in panel.rows(seen))))
    return "\n\n".join(parts)


class TopScreen:
    """The live view: a reader of figures, a reader of keys, and the screen between them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view = TopView()
        self._wake = asyncio.Event()
        self._quit = False
        self._acts = BackgroundTasks()
        self._question: Callable[[], Awaitable[str]] | None = None  # asked; carried out by y
        self.was_terminated = False

    async def run(self, app: Interlock) -> None:
        """Show the figures until a key or a signal ends it; the terminal is as before afterwards."""
        self._app = app
        reading = asyncio.create_task(self._read_figures())
        keys = Terminal(sys.stdin.fileno(), on_key=self._on_key, on_resize=self._wake.set, on_stop=self._on_stop)
        try:
            with keys, Live(console=self._console, screen=True, auto_refresh=False) as live:
                while not self._quit:
                    self._wake.clear()
                    live.update(self._view.render(*self._console.size), refresh=True)
                    await self._wake.wait()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await self._acts.stop()

    def _on_stop(self) -> None:
        self.was_terminated = self._quit = True
        self._wake.set()

    async def _read_figures(self) -> None:
        """Read the figures every second; the counts less often when reading them takes long."""
        depths: Depths | None = None
        depths_due = 0.0
        failure = ""
        while True:
            try:
                async with self._app.connection() as connection:
                    started = time.monotonic()
                    if depths is None or started >= depths_due:
                        depths = await read_depths(connection)
                        depths_due = time.monotonic() + DEPTH_COST * (time.monotonic() - started)
                    self._view.seen = await read_top(connection, depths)
                if self._view.message == failure:
                    self._view.message = ""
            except InterlockError as error:
                self._view.message = failure = str(error)
            self._wake.set()
            await asyncio.sleep(READ_INTERVAL_S)

    # --- keys

    def _on_key(self, key: str) -> None:
        view = self._view
        view.message = ""
        if self._question is not None:
            question, self._question = self._question, None
            if key == "y":
                self._act(question)
            else:
                view.message = "nothing was changed"
        elif view.overlay is not None and key in {"q", "e", "?", "escape", "enter"}:
            view.overlay = None
        elif key == "q":
            self._quit = True
        else:
            self._on_command(key)
        self._wake.set()

    def _on_command(self, key: str) -> None:
        view = self._view
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -PAGE_LINES, "page down": PAGE_LINES}
        if key in moves:
            view.move(moves[key])
        elif key in {"tab", "back tab"}:
            view.next_panel(1 if key == "tab" else -1)
        elif key == "?":
            view.show(HELP)
        elif key in {"p", "r", "c", "e", "enter"} and view.overlay is None:
            row = view.current()
            if row is None:
                view.message = "nothing is selected"
            else:
                self._on_action(key, row)

    def _on_action(self, key: str, row: Row) -> None:
        """Start what a key asks for the selected row."""
        if key in {"e", "enter"}:
            self._act(lambda: self._explain(row))
        elif key in {"p", "r"} and row.kind in {"namespace", "worker"}:
            self._act(lambda: self._pause_or_resume(row, pauses=key == "p"))
        elif key == "c" and row.kind in {"task", "job"}:
            self._question = lambda: self._cancel(row)
            self._view.message = f"cancel {row.kind} {row.id}? y cancels it, any other key does not"
        else:
            word = {"p": "paused", "r": "resumed", "c": "canceled"}[key]
            self._view.message = f"a {row.kind} cannot be {word} here"

    def _act(self, act: Callable[[], Awaitable[str]]) -> None:
        self._acts.spawn("act", self._carry_out(act))

    async def _carry_out(self, act: Callable[[], Awaitable[str]]) -> None:
        try:
            self._view.message = await act()
        except InterlockError as error:
            self._view.message = str(error)
        self._wake.set()

    async def _explain(self, row: Row) -> str:
        found = await self._app.explain(row.id, kind=row.kind)
        async with self._app.connection() as connection:
            now = await read_clock(connection)
        self._view.show(list(explanation_lines(found, now)))
        return "Esc closes this; ↑↓ scroll"

    async def _pause_or_resume(self, row: Row, *, pauses: bool) -> str:
        word = "paused" if pauses else "resumed"
        if row.kind == "namespace":
            tasks = await (self._app.pause(row.id, REASON) if pauses else self._app.resume(row.id))
            return f"namespace {row.id} is {word}: {tasks} tasks are {'held' if pauses else 'released'}"
        event = SupervisedWorkerEvent.PAUSE if pauses else SupervisedWorkerEvent.RESUME
        async with self._app.connection() as connection:
            await move_worker(connection, row.id, event, actor=self._app.actor, reason=REASON, now=self._app.now())
        return f"worker {row.id} is {word}"

    async def _cancel(self, row: Row) -> str:
        if row.kind == "task":
            return f"task {row.id}: {await self._app.handle(UUID(row.id)).cancel(REASON)}"
        changed = await self._app.job(row.id).cancel(REASON)
        return f"job {row.id} is being canceled" if changed else f"job {row.id} has ended or is about to end"
