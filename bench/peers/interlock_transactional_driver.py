"""Interlock with transactional tasks: each handler inserts a row, which commits together with the outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver import main
from interlock_driver import InterlockDriver, nothing

from interlock import Interlock, TaskContext
from interlock.config import Config
from interlock.postgres.connection import connect
from interlock.telemetry import configure_logging
from interlock.worker.process import WorkerStateMachine
from interlock.worker.settings import WorkerSettings, get_instance_name

if TYPE_CHECKING:
    from collections.abc import Callable


class TransactionalDriver(InterlockDriver):
    """Interlock, with transactional tasks of the same name."""

    async def prepare(self, url: str) -> None:
        """Create the schema and the table of the handlers."""
        await super().prepare(url)
        async with connect(url) as connection:
            await connection.execute("create table public.written (number int)")

    def work(self, url: str, concurrency: int, handled: Callable[[], None] = nothing) -> None:
        """Run the worker that `interlock worker` runs."""
        configure_logging("warning")
        app = Interlock(config=Config(database_url=url))

        @app.task(name="noop", transactional=True)
        async def noop(ctx: TaskContext) -> None:
            handled()
            await ctx.connection.execute("insert into public.written values (1)")

        WorkerStateMachine(get_instance_name(), app, WorkerSettings(concurrency=concurrency)).run()


if __name__ == "__main__":
    main(TransactionalDriver())
