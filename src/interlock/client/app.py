"""The app: one object that knows the tasks and holds the connections to the database while it is open.

Invariant: an app belongs to the event loop that opened it; it closes with the last of those who opened it.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import WeakKeyDictionary

from interlock.client.enqueue import BulkEnqueue, require_prepared
from interlock.client.explain import explain
from interlock.client.job_handle import JobHandle, find_summaries, job_id, submit_checked
from interlock.client.registry import Definitions
from interlock.client.results import ResultWatcher
from interlock.client.task_handle import UNFINISHED, TaskHandle, act_on, not_open, wanted_tasks
from interlock.client.workflow import check_nesting
from interlock.config import Config
from interlock.errors import ConfigError, InputError, InterlockError, MigrationError, StoreError
from interlock.model.options import CHECKS, check_text, integer_check
from interlock.postgres.connection import ConnectionPool, connect, database_url
from interlock.postgres.notifier import Notifier
from interlock.store.enqueue import is_copyable
from interlock.store.limits import pause_namespace, put_limits, resume_namespace
from interlock.store.schedules import put_schedules
from interlock.store.task_admin import (
    cancel_unfinished_tasks,
    count_steps,
    find_tasks,
    request_cancel_of_running_tasks,
    requeue_unless_duplicate,
)
from interlock.store.workflows import put_workflow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta
    from types import ModuleType
    from uuid import UUID

    from interlock.client.explain import Explanation
    from interlock.client.job_handle import JobSummary
    from interlock.client.task_handle import Affected
    from interlock.client.workflow import Workflow
    from interlock.model.options import NewTask
    from interlock.postgres.connection import AsyncConnection, Connection, SyncConnection
    from interlock.store.task_admin import TaskSummary


# SECTION client/opening
# What an app does before it connects: finds its server, and sees to it that the schema is there.
#
# Invariant: the embedded server is migrated by whoever opens it; any other is left as it is.


@asynccontextmanager
async def located(config: Config) -> AsyncIterator[str]:
    """Give the URL of the server; the embedded one is started and left in a thread, because that takes its time."""
    context = database_url(config)
    url = await asyncio.to_thread(context.__enter__)
    try:
        yield url
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


async def see_to_schema(connection: Connection, *, is_embedded: bool) -> None:
    """Migrate the embedded server, which is ours; of any other, see that somebody has."""
    # not at the top: with the installer of the queue it is a tenth of what an import of the app costs
    from interlock.postgres.migrate import applied_migrations, known_migrations, migrate, missing_migrations  # noqa: PLC0415 - needed once, when opening

    if is_embedded:
        await migrate(connection)
        return
    missing = missing_migrations(known_migrations(), await applied_migrations(connection))
    if missing:
        raise MigrationError(
            f"the database lacks {len(missing)} migrations of this release, from {missing[0].name} on; "
            "run `interlock migrate`"
        )


T = TypeVar("T")

_CONNECTIONS = integer_check(1, 10_000)


class Interlock(Definitions):
    """Declare tasks on it, then `async with app:` enqueue them, wait for them and act on them."""

    def __init__(
        self,
        database_url: str | None = None,
        *,
        config: Config | None = None,
        actor: str = "client",
        clock: Callable[[], datetime] | None = None,
        max_connections: int = 10,
        callback_url: str | None = None,
    ) -> None:
        super().__init__()
        given = {"database_url": database_url, "callback_url": callback_url}
        self.config = Config.load(given) if config is None else config.with_flags(given)
        self.actor = _checked(check_text, "actor", actor, ConfigError)
        self._clock = clock
        self._max_connections = _checked(_CONNECTIONS, "max_connections", max_connections, ConfigError)
        self._openings = 0
        # one per loop: a lock belongs to the loop in which somebody waited for it
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._held = AsyncExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._url: str | None = None
        self._pool: ConnectionPool | None = None
        self._completions: ResultWatcher | None = None
        self._notifier: Notifier | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect; bring the embedded server up first if it is the one. Store what is declared."""
        if self._loop not in (None, asyncio.get_running_loop()):
            raise StoreError("the app is open in another event loop; an app belongs to the loop that opened it")
        async with self._opening():
            if self._openings == 0:
                async with AsyncExitStack() as stack:
                    await self._open(stack)
                    self._held = stack.pop_all()
            self._openings += 1

    async def close(self) -> None:
        """Undo one opening; the last one closes the connections. Safe when it is not open."""
        async with self._opening():
            if self._openings == 1:
                await self._held.aclose()
            self._openings = max(self._openings - 1, 0)

    @property
    def is_open(self) -> bool:
        """Whether the app can be used."""
        return self._pool is not None

    @property
    def url(self) -> str:
        """Where the database is, while the app is open."""
        if self._url is None:
            raise not_open()
        return self._url

    @property
    def notifier(self) -> Notifier:
        """The notifier that all parts of this process share: one LISTEN connection, from the first subscriber on."""
        if self._notifier is None:
            raise not_open()
        return self._notifier

    @property
    def completions(self) -> ResultWatcher:
        """What wakes those who wait for results."""
        if self._completions is None:
            raise not_open()
        return self._completions

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """Lend a connection of the app's pool, which commits each statement unless told otherwise."""
        if self._pool is None:
            raise not_open()
        return self._pool.connection()

    def now(self) -> datetime | None:
        """Give the time of the clock that tests control; None means the server's own."""
        return None if self._clock is None else self._clock()

    def handle(self, task_id: UUID | str) -> TaskHandle[Any]:
        """Give a handle of a task by its id."""
        return TaskHandle(self, _checked(CHECKS["task_id"], "task_id", task_id, InputError))

    async def submit(
        self,
        workflow: str | Workflow,
        input: Mapping[str, Any] | Any = None,  # noqa: A002 - the name of the column
        *,
        version: str | None = None,
        request_id: str | None = None,
        parent: UUID | str | JobHandle | None = None,
        worker_count: int | None = None,
        timeout: float | timedelta | None = None,  # noqa: ASYNC109 - the job's, not the call's
        correlation_id: UUID | str | None = None,
        connection: AsyncConnection | SyncConnection | None = None,
    ) -> JobHandle:
        """Start a job of a workflow; in the caller's transaction if an async psycopg connection is given.

        One `request_id` gives one job, however often it is sent. `worker_count` (1 to 10) is how many of its steps may
        run at once; after `timeout` seconds it is canceled.
        """
        return await submit_checked(
            self,
            workflow,
            input,
            version=version,
            parent=parent,
            worker_count=worker_count,
            connection=connection,
            request_id=request_id,
            timeout=timeout,
            correlation_id=correlation_id,
        )

    def job(self, id_: UUID | str) -> JobHandle:
        """Give a handle of a job by its id."""
        return JobHandle(self, job_id(id_))

    async def explain(self, id_: UUID | str) -> Explanation:
        """Say where a task or a job is, since when, and why it is not moving: what holds it up, down to the cause."""
        return await explain(self, id_)

    async def find_jobs(
        self,
        *,
        status: str | None = None,
        workflow: str | None = None,
        namespace: str | None = None,
        limit: int = 100,
        before: UUID | None = None,
    ) -> list[JobSummary]:
        """Find jobs, newest first; `before` is the last id of the page before."""
        return await find_summaries(
            self, status=status, workflow=workflow, namespace=namespace, limit=limit, before=before
        )

    async def enqueue_many(
        self, tasks: Iterable[NewTask], *, connection: AsyncConnection | SyncConnection | None = None
    ) -> Sequence[TaskHandle[Any]]:
        """Store what `task.prepare(...)` gave, of any tasks and with any options: all of them or none."""
        given = require_prepared(tasks)

        def handle(type_: str, id_: UUID, created: bool) -> TaskHandle[Any]:  # noqa: FBT001 - a column, not a flag
            return TaskHandle(self, id_, self._tasks.get(type_), created)

        return await BulkEnqueue(self, handle).enqueue(
            ((task, task.input) for task in given),
            copy_to=sorted({task.namespace for task in given}) if all(map(is_copyable, given)) else None,
            connection=connection,
        )

    async def find(
        self,
        *,
        states: Sequence[str] | None = None,
        namespace: str | None = None,
        type: str | None = None,  # noqa: A002 - the name of the column
        tag: str | None = None,
        limit: int = 100,
        before: UUID | None = None,
    ) -> list[TaskSummary]:
        """Find tasks, newest first; `before` is the last id of the page before."""
        wanted = wanted_tasks(states, namespace, type, tag)
        if limit < 0:
            raise InputError(f"limit must not be negative, and {limit} is")
        async with self.connection() as connection:
            return await find_tasks(connection, wanted, limit=limit, before=before)

    async def cancel(
        self,
        *,
        states: Sequence[str] = UNFINISHED,
        namespace: str | None = None,
        type: str | None = None,  # noqa: A002 - the name of the column
        tag: str | None = None,
        limit: int | None = None,
        reason: str | None = None,
        force: bool = False,
        preview: bool = False,
    ) -> Affected:
        """Cancel all tasks of a filter, in batches: running ones by asking their workers, or at once with `force`."""

        async def act(connection: Connection, ids: list[UUID]) -> list[UUID]:
            canceled = await cancel_unfinished_tasks(
                connection, ids, actor=self.actor, reason=reason, running=force, now=self.now()
            )
            rest = [id_ for id_ in ids if id_ not in set(canceled)]
            return canceled + await request_cancel_of_running_tasks(connection, rest, reason=reason, now=self.now())

        return await act_on(self, act, wanted_tasks(states, namespace, type, tag), limit, preview=preview)

    async def requeue(
        self,
        *,
        states: Sequence[str] = ("error",),
        namespace: str | None = None,
        type: str | None = None,  # noqa: A002 - the name of the column
        tag: str | None = None,
        limit: int | None = None,
        reason: str | None = None,
        preview: bool = False,
    ) -> Affected:
        """Give all tasks of a filter a new set of tries, in batches: those in error, or `canceled` ones if named.

        Steps are left out, and counted in the answer: `job.retry_from(step)` submits their job anew.
        """

        async def act(connection: Connection, ids: list[UUID]) -> list[UUID]:
            return await requeue_unless_duplicate(connection, ids, actor=self.actor, reason=reason, now=self.now())

        wanted = replace(wanted_tasks(states, namespace, type, tag), standalone=True)
        affected = await act_on(self, act, wanted, limit, preview=preview)
        async with self.connection() as connection:
            return replace(affected, steps_left_out=await count_steps(connection, wanted))

    async def pause(self, namespace: str, reason: str | None = None) -> int:
        """Let no task of a namespace start until it is resumed; give how many are held now."""
        name = _checked(check_text, "namespace", namespace, InputError)
        async with self.connection() as connection:
            return await pause_namespace(connection, name, reason, self.actor, now=self.now())

    async def resume(self, namespace: str) -> int:
        """Let the tasks of a namespace start again; give how many were held."""
        async with self.connection() as connection:
            return await resume_namespace(connection, namespace, self.actor, now=self.now())

    def _app(self) -> Interlock:
        return self

    def _opening(self) -> asyncio.Lock:
        return self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    async def _open(self, stack: AsyncExitStack) -> None:
        for task in self.tasks.values():
            task.resolve()
        documents = [workflow.document for workflow in self.workflows.values()]
        check_nesting(documents)
        url = await stack.enter_async_context(located(self.config))
        async with connect(url) as connection:
            await see_to_schema(connection, is_embedded=self.config.database_url is None)
            await put_limits(connection, self.limits.values(), now=self.now())
            await put_schedules(connection, self.schedules.values(), now=self.now())
            for document in documents:
                await put_workflow(connection, document, now=self.now())
        pool = ConnectionPool(url, max_size=self._max_connections)
        await pool.open()
        stack.push_async_callback(self._forget, pool)
        self._notifier = Notifier(url)
        await self._notifier.start()
        self._url, self._pool, self._completions = url, pool, ResultWatcher(self)
        self._loop = asyncio.get_running_loop()

    async def _forget(self, pool: ConnectionPool) -> None:
        try:
            await self.completions.stop()
            await self.notifier.stop()
        finally:
            self._url = self._pool = self._notifier = self._completions = self._loop = None
            await pool.close()


def _checked(check: Callable[[str, Any], T], name: str, value: Any, refusal: type[InterlockError]) -> T:
    try:
        return check(name, value)
    except ValueError as error:
        raise refusal(str(error)) from None


# SECTION client/loading
# Finds the app that a command line names: `package.module:app`.
#
# Invariant: what goes wrong is told in the words of the person who typed the name; an error inside the module itself is
# shown as it is.


def load_app(reference: str) -> Interlock:
    """Import the module and give its app; the part after the colon is `app` unless told otherwise."""
    module_name, _, path = reference.partition(":")
    module = _imported(module_name, reference)
    found: object = module
    for part in (path or "app").split("."):
        found = getattr(found, part, None)
    if isinstance(found, Interlock):
        return found
    there = [name for name, value in vars(module).items() if isinstance(value, Interlock)]
    hint = f"there is {module_name}:{there[0]}" if there else "there is none in it"
    if found is None:
        raise ConfigError(f"the module {module_name} has no {path or 'app'!r}; {hint}")
    raise ConfigError(f"{reference} is a {type(found).__name__}, not an Interlock app; {hint}")


def _imported(name: str, reference: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{reference!r} does not name an app; right would be e.g. package.module:app")
    here = str(Path.cwd())
    if not {here, ""} & set(sys.path):
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise ConfigError(f"there is no module {error.name!r} to import {reference!r} from, seen from {here}") from None
