"""What hands that work at random share: a die, a clock, and connections to a real database that may break."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import DictRow

from interlock.postgres.connection import configure_adapters, connection_arguments

if TYPE_CHECKING:
    from uuid import UUID

QUEUE = "pgmq.q_orchestration_step_results"


class Brittle(psycopg.AsyncConnection[DictRow]):
    """A connection that breaks after so many statements, as it does when its process is killed."""

    fuse: int | None = None

    async def execute(self, *given: Any, **options: Any) -> Any:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                await self.close()
        return await super().execute(*given, **options)


Act = Callable[[Brittle], Awaitable[Any]]


class Place:
    """A database, and connections to it, which one case leaves to the next, with what they have prepared."""

    def __init__(self, url: str) -> None:
        self.cases = 0
        self._url = url
        self._free: list[Brittle] = []

    async def using(self, act: Act) -> Any:
        """Do something over a connection that nobody else uses meanwhile."""
        connection = self._free.pop() if self._free else await self._connect()
        try:
            return await act(connection)
        finally:
            connection.fuse = None
            if not connection.closed:
                self._free.append(connection)

    async def close(self) -> None:
        for connection in self._free:
            await connection.close()

    async def _connect(self) -> Brittle:
        connection: Any = await Brittle.connect(**connection_arguments(self._url))
        configure_adapters(connection)
        brittle: Brittle = connection
        return brittle


class Crew:
    """One case on a database that it shares with others. What is done depends on the seed, as far as it can."""

    def __init__(self, place: Place, seed: int) -> None:
        place.cases += 1
        self.number = place.cases
        self.using = place.using
        self.random = random.Random(seed)  # noqa: S311 - a die
        self.time = datetime(2040, 1, 1, tzinfo=UTC)
        self._served = False

    def now(self) -> datetime:
        """Give the moment of an act; each has one of its own."""
        self.time += timedelta(milliseconds=10)
        return self.time

    def own(self, name: str) -> str:
        """Name something so that it is told from those of other cases."""
        return f"{name}-{self.number}"

    @property
    def namespaces(self) -> list[str]:
        return [self.own("red"), self.own("blue")]

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    async def rows(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        async def ask(connection: Brittle) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = await (await connection.execute(query, parameters)).fetchall()
            return found

        asked: list[dict[str, Any]] = await self.using(ask)
        return asked

    async def is_quiet(self) -> bool:
        """Tell whether all jobs have ended and all messages were taken."""
        (row,) = await self.rows(
            "select (select count(*) from interlock.jobs where namespace = any (%s) and completed_at is null) as jobs, "
            f"(select count(*) from {QUEUE}) as messages",
            self.namespaces,
        )
        return not row["jobs"] and not row["messages"]

    async def serve(self) -> None:
        """Let there be a live worker."""
        if not self._served:
            self._served = True
            await self.rows(
                "insert into interlock.workers (id, namespaces, types, seen_until) "
                "values (%s, %s::text[], '{}', 'infinity') returning id",
                self.own("worker"),
                self.namespaces,
            )
            query = "update interlock.workers set status = 'RUNNING', event = 'start_task' where id = %s returning id"
            await self.rows(query, self.own("worker"))

    async def check_worker_count(self, jobs: list[UUID]) -> None:
        """See that no job runs more steps at once than it may; one that has slept takes up no room until it wakes."""
        rows = await self.rows(
            "select count(*) as steps, worker_count from interlock.jobs join interlock.tasks on job_id = jobs.id "
            "left join interlock.workflow_steps as steps using (workflow_id, step) "
            "where jobs.id = any (%s) and worker_count is not null and state in ('pending', 'running') "
            "and steps.kind is distinct from 'sleep' group by jobs.id having count(*) > worker_count",
            jobs,
        )
        assert rows == []
