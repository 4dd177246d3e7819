"""The app: holds the declared tasks and workflows and, while it is open, the connections to the database.

Invariant: connections belong to the event loop that opened them, and no other loop or process uses them; they close
when `close` was called in that loop as often as `open`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
import traceback
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack
from weakref import WeakKeyDictionary, WeakSet

from interlock.client.enqueue import BulkEnqueue, require_prepared
from interlock.client.group_commit import GroupCommit
from interlock.client.hooks import check_lifespan
from interlock.client.job_handle import (
    JobHandle,
    JobSummary,
    as_job_id,
    find_inbox_items,
    find_job_summaries,
    known_fields,
)
from interlock.client.registry import Definitions
from interlock.client.results import ResultWatcher
from interlock.client.submit import check_requests, submit_as_text, submit_requests
from interlock.client.sync import SyncApp, running_loop
from interlock.client.task import format_path, located
from interlock.client.task_handle import UNFINISHED, TaskHandle, apply_to_tasks, not_open_error, task_filter
from interlock.client.workflow import check_nesting
from interlock.config import Config
from interlock.errors import (
    AppImportError,
    ConfigError,
    DefinitionChangedError,
    DefinitionError,
    InputError,
    InterlockError,
    MigrationError,
)
from interlock.lifecycle import TaskRowState
from interlock.model.options import check_id, check_name, check_text, integer_check
from interlock.postgres.connection import ConnectionPool, connect, database_url
from interlock.postgres.notifier import Notifier
from interlock.store.enqueue import is_copyable
from interlock.store.jobs import find_job_page
from interlock.store.limits import pause_namespace, put_limits, resume_namespace
from interlock.store.lists import ListPage
from interlock.store.schedules import put_schedules
from interlock.store.task_admin import (
    cancel_tasks,
    count_steps,
    find_task_page,
    find_tasks,
    requeue_unless_duplicate,
)
from interlock.store.workflows import put_workflow
from interlock.telemetry import log
from interlock.tracing import find_tracer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime
    from types import ModuleType
    from uuid import UUID

    from opentelemetry.trace import Tracer

    from interlock.client.explain import Explanation
    from interlock.client.hooks import Lifespan
    from interlock.client.job_handle import InboxItem
    from interlock.client.submit import JobRequest, SubmitOptions
    from interlock.client.task_handle import Affected, TaskConditions
    from interlock.client.workflow import Workflow
    from interlock.model.options import NewTask
    from interlock.postgres.connection import AsyncConnection, Connection, SyncConnection
    from interlock.postgres.query import PortableStatement
    from interlock.store.jobs import JobFilter
    from interlock.store.schedules import Schedule
    from interlock.store.task_admin import TaskFilter, TaskSummary


T = TypeVar("T")

MAX_SHOWN_FRAMES = 4  # of a user's module that cannot be imported
_IMPORTLIB = str(Path(importlib.__file__).parent)
_check_max_connections = integer_check(1, 10_000)


@asynccontextmanager
async def running_database(config: Config) -> AsyncIterator[str]:
    """Yield the URL of the database; start the embedded server if it is used, in a thread because that blocks."""
    context = database_url(config)
    url = await _in_thread(context.__enter__)
    try:
        yield url
    finally:
        await _in_thread(lambda: context.__exit__(None, None, None))


async def _in_thread(function: Callable[[], T]) -> T:
    try:
        running = asyncio.get_running_loop().run_in_executor(None, function)
    except RuntimeError:  # the interpreter is exiting and starts no threads; nothing else runs in this loop then
        return function()
    return await running


async def ensure_schema(connection: Connection, *, is_embedded: bool) -> None:
    """Migrate the embedded server; of any other server, only check that it is migrated."""
    from interlock.postgres.migrate import applied_migrations, known_migrations, migrate, missing_migrations  # noqa: PLC0415 - a tenth of the import time, needed once

    if is_embedded:
        await migrate(connection)
        return
    missing = missing_migrations(known_migrations(), await applied_migrations(connection))
    if missing:
        raise MigrationError(
            f"the database lacks {len(missing)} migrations of this release, from {missing[0].name} on; "
            "run `interlock migrate`"
        )


@dataclass(slots=True)
class _Opened:
    """The connections of an app in one event loop."""

    url: str
    pool: ConnectionPool
    group_commit: GroupCommit
    notifier: Notifier
    completions: ResultWatcher
    resources: AsyncExitStack
    openings: int = 0


class Interlock(Definitions):
    """Declares tasks and workflows; inside `async with app:` enqueues, submits, waits, cancels and requeues.

    `lifespan` makes an async context manager around the work of each worker process of the app.
    """

    def __init__(
        self,
        database_url: str | None = None,
        *,
        config: Config | None = None,
        actor: str = "client",
        clock: Callable[[], datetime] | None = None,
        max_connections: int = 10,
        callback_url: str | None = None,
        lifespan: Lifespan | None = None,
    ) -> None:
        super().__init__()
        try:
            self.lifespan = check_lifespan(lifespan)
        except DefinitionError as error:
            raise (located(error, lifespan) if inspect.isroutine(lifespan) else error) from None
        given = {"database_url": database_url, "callback_url": callback_url}
        self.config = Config.load(given) if config is None else config.with_flags(given)
        self.actor = _checked(check_text, "actor", actor, ConfigError)
        self.clock = clock
        # limits what `find`, `find_jobs`, `inbox`, `cancel` and `requeue` reach; set for tokens with such a limit
        self.reachable_namespaces: list[str] | None = None
        self._max_connections = _checked(_check_max_connections, "max_connections", max_connections, ConfigError)
        # one per loop: a lock belongs to the event loop in which it was awaited
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._opened: dict[asyncio.AbstractEventLoop, _Opened] = {}
        self._sync = SyncApp(self)
        self._blocked: dict[tuple[str, str], DefinitionChangedError] = {}
        _apps.add(self)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self, *, keep_connection: bool = True) -> None:
        """Connect, start the embedded server if it is used, and store declared workflows, schedules and limits.

        The app is then open in this event loop. Others can open it too; each has connections of its own. Without
        `keep_connection`, no connection of its pool stays open at rest.
        """
        loop = asyncio.get_running_loop()
        async with self._opening():
            if loop not in self._opened:
                async with AsyncExitStack() as stack:
                    self._opened[loop] = await self._open(stack, keep_connection=keep_connection)
                    self._opened[loop].resources = stack.pop_all()
            self._opened[loop].openings += 1

    async def close(self) -> None:
        """Undo one `open` of this event loop; the last one closes the connections. Does nothing if it is not open."""
        loop = asyncio.get_running_loop()
        async with self._opening():
            if loop not in self._opened:
                return
            self._opened[loop].openings -= 1
            if self._opened[loop].openings == 0:
                await self._opened[loop].resources.aclose()

    @property
    def is_open(self) -> bool:
        """Whether the app is open in the running event loop or, without one, in any."""
        loop = running_loop()
        return bool(self._opened) if loop is None else loop in self._opened

    @property
    def open_loops(self) -> list[asyncio.AbstractEventLoop]:
        """The event loops in which the app is open."""
        return list(self._opened)

    @property
    def sync(self) -> SyncApp:
        """The app for code that is not async: `app.sync.submit(...)`, `app.sync.find(...)`."""
        return self._sync

    @property
    def url(self) -> str:
        """The URL of the database, while the app is open."""
        return self._connections().url

    def refuse_blocked(self, workflow: Workflow) -> None:
        """Raise DefinitionChangedError if a workflow, or one that its child steps start, is blocked."""
        reached = [workflow] if self._blocked else []
        for found in reached:  # the list grows during the loop
            if (found.name, found.version) in self._blocked:
                raise self._blocked[found.name, found.version]
            for step in found.document["steps"]:
                child = self.find_workflow(step.get("workflow", ""), step.get("workflow_version"))
                if child is not None and child not in reached:
                    reached.append(child)

    @property
    def notifier(self) -> Notifier:
        """The notifier that all parts of this process share: one LISTEN connection, from the first subscriber on."""
        return self._connections().notifier

    @property
    def completions(self) -> ResultWatcher:
        """Wakes callers that wait for the end of tasks and jobs."""
        return self._connections().completions

    @property
    def group_commit(self) -> GroupCommit:
        """Stores the tasks of concurrent `enqueue` calls together."""
        return self._connections().group_commit

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """Borrow a connection of the app's pool, in autocommit mode."""
        return self._connections().pool.connection()

    @property
    def tracer(self) -> Tracer | None:
        """The tracer of the program's OpenTelemetry provider; None if it has none, or if tracing is switched off."""
        return find_tracer(enabled=self.config.tracing)

    def now(self) -> datetime | None:
        """Return the time of the clock that a test controls; None means the server's clock."""
        return None if self.clock is None else self.clock()

    def handle(self, task_id: UUID | str) -> TaskHandle[Any]:
        """Return the handle of a task by its id."""
        return TaskHandle(self, _checked(check_id, "task_id", task_id, InputError))

    async def submit(
        self,
        workflow: str | Workflow,
        input: Mapping[str, Any] | Any = None,  # noqa: A002 - the name of the column
        *,
        connection: AsyncConnection | SyncConnection | None = None,
        **options: Unpack[SubmitOptions],
    ) -> JobHandle:
        """Submit a job of a workflow; in the caller's transaction if an async psycopg connection is given.

        `request_id` is an idempotency key: the same request returns the same job, and another input is refused. At most
        `worker_count` (1 to 10) of its steps run at once; after `timeout` seconds it is canceled. `find_jobs` finds it
        by its `tags` and `attributes`; `callback_url` receives a POST when it has ended. These three replace the
        defaults of the workflow.

        Of the jobs of the workflow with one `key`, one runs at a time. While another is unfinished, `on_conflict` says
        what happens: "queue" (the default) runs them in order, "reject" raises JobConflictError, "return_existing"
        returns the other job, "cancel_in_progress" cancels the others first. With `debounce`, the job starts so many
        seconds later, unless it is replaced by another submit before; `debounce_max` limits that.
        """
        request: JobRequest = {**options, "workflow": workflow, "input": input}
        (job,) = await submit_requests(self, [request], connection, as_list=False)
        return job

    async def submit_many(
        self, jobs: Iterable[JobRequest], *, connection: AsyncConnection | SyncConnection | None = None
    ) -> list[JobHandle]:
        """Submit jobs of any workflows, all or none; return their handles in the same order.

        Each is a mapping with `workflow`, `input` and the options of `submit`. ElementsError names all invalid ones.
        """
        return await submit_requests(self, check_requests(jobs), connection)

    def submit_statement(
        self,
        workflow: str | Workflow,
        input: Mapping[str, Any] | Any = None,  # noqa: A002 - the name of the column
        **options: Unpack[SubmitOptions],
    ) -> PortableStatement:
        """Return a statement that submits a job in a transaction of any other driver, with all options but `parent`.

        An orchestrator starts the job after the commit; if the app does not declare the workflow, it checks the input.
        """
        return submit_as_text(self, {**options, "workflow": workflow, "input": input})

    def job(self, id_: UUID | str) -> JobHandle:
        """Return the handle of a job by its id."""
        return JobHandle(self, as_job_id(id_))

    async def explain(self, id_: UUID | str, *, kind: str | None = None, at: datetime | None = None) -> Explanation:
        """Explain a task, job, worker, namespace, schedule or limit: why it does not move, and what would unblock it.

        Without `kind`, the id or the name tells it. With `at`, the answer is that of an earlier moment, as far as the
        records tell.
        """
        from interlock.client.explain import explain  # noqa: PLC0415 - an eighth of the import time, and seldom needed

        return await explain(self, id_, kind=kind, at=at)

    async def find_jobs(
        self,
        *,
        status: str | Sequence[str] | None = None,
        workflow: str | None = None,
        version: str | None = None,
        namespace: str | None = None,
        key: str | None = None,
        tags: str | Sequence[str] = (),
        attributes: Mapping[str, str | float | bool] | None = None,
        parent: UUID | str | JobHandle | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        request_id: str | None = None,
        correlation_id: UUID | str | None = None,
        limit: int = 100,
        before: UUID | None = None,
    ) -> list[JobSummary]:
        """Find jobs that meet all conditions, newest first; `before` is the last id of the previous page.

        A job has one of several statuses, all of the tags and all of the attributes.
        """
        return await find_job_summaries(
            self,
            status=status,
            workflow=workflow,
            version=version,
            namespace=namespace,
            key=key,
            tags=tags,
            attributes=attributes,
            parent=parent,
            created_after=created_after,
            created_before=created_before,
            request_id=request_id,
            correlation_id=correlation_id,
            limit=limit,
            before=before,
        )

    async def find_job_page(self, wanted: JobFilter, *, limit: int, before: UUID | None = None) -> ListPage[JobSummary]:
        """Find one page of jobs by one bounded statement: a page with a `next` may be short, or empty."""
        async with self.connection() as connection:
            reachable = replace(wanted, namespaces=self.reachable_namespaces)
            page = await find_job_page(connection, reachable, limit=limit, before=before, now=self.now())
        return ListPage([JobSummary(**known_fields(JobSummary, row)) for row in page.items], page.next)

    async def inbox(
        self,
        *,
        assignee: str | None = None,
        workflow: str | None = None,
        kind: str | None = None,
        limit: int = 100,
        after: InboxItem | None = None,
    ) -> list[InboxItem]:
        """List the steps that wait for a signal or an approval and meet all conditions, longest wait first.

        `kind` is "signal" or "approval"; `after` is the last item of the previous page.
        """
        cursor = None if after is None else (after.wait_started_at, after.id)
        return await find_inbox_items(self, assignee=assignee, workflow=workflow, kind=kind, limit=limit, after=cursor)

    async def enqueue_many(
        self, tasks: Iterable[NewTask], *, connection: AsyncConnection | SyncConnection | None = None
    ) -> Sequence[TaskHandle[Any]]:
        """Store tasks of `task.prepare(...)`, of any types and with any options: all or none."""
        given = require_prepared(tasks)

        def handle(type_: str, id_: UUID, created: bool) -> TaskHandle[Any]:  # noqa: FBT001 - a column, not a flag
            return TaskHandle(self, id_, self._tasks.get(type_), created)

        return await BulkEnqueue(self, handle).enqueue(
            ((task, task.input) for task in given),
            count=len(given),
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
        **conditions: Unpack[TaskConditions],
    ) -> list[TaskSummary]:
        """Find tasks that meet all conditions, newest first; `before` is the last id of the previous page.

        Further conditions are `job`, `worker`, `correlation_id`, `request_id`, `unique_key`, `created_after` and
        `created_before`.
        """
        matching = self._reachable(task_filter(states, namespace, type, tag, **conditions))
        if limit < 0:
            raise InputError(f"limit must be 0 or more, got {limit}")
        async with self.connection() as connection:
            return await find_tasks(connection, matching, limit=limit, before=before, now=self.now())

    async def find_page(self, wanted: TaskFilter, *, limit: int, before: UUID | None = None) -> ListPage[TaskSummary]:
        """Find one page of tasks by one bounded statement: a page with a `next` may be short, or empty."""
        async with self.connection() as connection:
            return await find_task_page(connection, self._reachable(wanted), limit=limit, before=before, now=self.now())

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
        horizon: datetime | None = None,
    ) -> Affected:
        """Cancel all tasks that match a filter, in batches; ask for running ones to stop, unless `force`.

        `horizon` is that of an earlier preview: tasks that were enqueued after it are left alone.
        """

        async def cancel_page(connection: Connection, ids: list[UUID]) -> list[UUID]:
            found = await cancel_tasks(connection, ids, actor=self.actor, reason=reason, force=force, now=self.now())
            return found.canceled + found.requested

        matching = self._reachable(task_filter(states, namespace, type, tag))
        return await apply_to_tasks(self, cancel_page, matching, limit, preview=preview, horizon=horizon)

    async def requeue(
        self,
        *,
        states: Sequence[str] = (TaskRowState.ERROR,),
        namespace: str | None = None,
        type: str | None = None,  # noqa: A002 - the name of the column
        tag: str | None = None,
        limit: int | None = None,
        reason: str | None = None,
        preview: bool = False,
        horizon: datetime | None = None,
    ) -> Affected:
        """Requeue all tasks that match a filter, with new tries, in batches: those in error, or canceled ones if named.

        Steps are left out and counted in the answer: `job.retry_from(step)` submits their job again. `horizon` is that
        of an earlier preview: tasks that have ended after it are left alone.
        """

        async def requeue_page(connection: Connection, ids: list[UUID]) -> list[UUID]:
            return await requeue_unless_duplicate(connection, ids, actor=self.actor, reason=reason, now=self.now())

        matching = replace(self._reachable(task_filter(states, namespace, type, tag)), standalone=True)
        affected = await apply_to_tasks(self, requeue_page, matching, limit, preview=preview, horizon=horizon)
        async with self.connection() as connection:
            return replace(affected, steps_left_out=await count_steps(connection, matching))

    async def pause(self, namespace: str, reason: str | None = None) -> int:
        """Pause a namespace: no task of it starts until `resume`. Return how many tasks are held."""
        name = _checked(check_name, "namespace", namespace, InputError)
        async with self.connection() as connection:
            return await pause_namespace(connection, name, reason, self.actor, now=self.now())

    async def resume(self, namespace: str) -> int:
        """Resume a namespace; return how many tasks were held."""
        async with self.connection() as connection:
            return await resume_namespace(connection, namespace, self.actor, now=self.now())

    def _reachable(self, wanted: TaskFilter) -> TaskFilter:
        return replace(wanted, namespaces=self.reachable_namespaces)

    def _app(self) -> Interlock:
        return self

    def _connections(self) -> _Opened:
        """Return the connections of the running event loop; without one, of any loop in which the app is open."""
        loop = running_loop()
        found = self._opened.get(loop) if loop is not None else next(iter(self._opened.values()), None)
        if found is None:
            raise not_open_error(in_other_loop=bool(self._opened))
        return found

    def _opening(self) -> asyncio.Lock:
        return self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    async def _open(self, stack: AsyncExitStack, *, keep_connection: bool) -> _Opened:
        for task in self.tasks.values():
            task.resolve()
        documents = [workflow.document for workflow in self.workflows.values()]
        check_nesting(documents)
        self.check_scheduled_inputs()
        url = await stack.enter_async_context(running_database(self.config))
        async with connect(url) as connection:
            await ensure_schema(connection, is_embedded=self.config.database_url is None)
            await put_limits(connection, self.limits.values(), now=self.now())
            for document in documents:
                await self._put_workflow(connection, document)
            await put_schedules(connection, self._unblocked_schedules(), now=self.now())
        pool = ConnectionPool(url, max_size=self._max_connections, keep_one=keep_connection)
        await pool.open()
        stack.push_async_callback(pool.close)
        group_commit = GroupCommit(pool.connection)
        stack.push_async_callback(group_commit.close)
        notifier, completions = Notifier(url), ResultWatcher(self)
        loop = asyncio.get_running_loop()
        stack.callback(lambda: self._opened.pop(loop, None))
        stack.push_async_callback(notifier.stop)
        stack.push_async_callback(completions.stop)
        await notifier.start()
        return _Opened(url, pool, group_commit, notifier, completions, stack)

    async def _put_workflow(self, connection: Connection, document: Mapping[str, Any]) -> None:
        """Store a workflow; one that differs from its stored definition is blocked, and everything else works."""
        key = (document["name"], document["version"])
        self._blocked.pop(key, None)
        try:
            await put_workflow(connection, document, replace=self.config.dev, now=self.now())
        except DefinitionChangedError as error:
            self._blocked[key] = error
            log.warning("workflow_blocked", workflow=key[0], version=key[1], reason=str(error))

    def _unblocked_schedules(self) -> list[Schedule]:
        """Leave out the schedules of blocked workflows: a stored one goes on with the stored definition."""
        found = []
        for schedule in self.schedules.values():
            declared = self.find_workflow(schedule.workflow, schedule.version) if schedule.workflow else None
            try:
                if declared is not None:
                    self.refuse_blocked(declared)
                found.append(schedule)
            except DefinitionChangedError as error:
                log.warning("schedule_blocked", schedule=schedule.name, reason=str(error))
        return found


_apps: WeakSet[Interlock] = WeakSet()
_of_parent: list[object] = []  # kept, because deleted connections would warn that they are not closed


def _forget_connections_of_parent() -> None:
    """Treat all apps as closed in a forked process: its parent uses the connections, and no loop runs here."""
    for app in _apps:
        _of_parent.append(app._opened)  # noqa: SLF001 - of this module
        app._opened, app._locks = {}, WeakKeyDictionary()  # noqa: SLF001 - of this module
        app.sync.forget_loop_of_parent()


os.register_at_fork(after_in_child=_forget_connections_of_parent)


def _checked(check: Callable[[str, Any], T], name: str, value: Any, error_type: type[InterlockError]) -> T:
    try:
        return check(name, value)
    except ValueError as error:
        raise error_type(str(error)) from None


def load_app(reference: str) -> Interlock:
    """Import the app that `package.module:app` names; the part after the colon is `app` by default.

    ConfigError names a part of the reference that is wrong; AppImportError shows where the module itself is wrong.
    """
    module_name, _, path = reference.partition(":")
    module = _import_module(module_name, reference)
    found: object = module
    for part in (path or "app").split("."):
        found = getattr(found, part, None)
    if isinstance(found, Interlock):
        return found
    apps = [name for name, value in vars(module).items() if isinstance(value, Interlock)]
    hint = f"did you mean {module_name}:{apps[0]}?" if apps else "it has no Interlock app"
    if found is None:
        place = format_path(getattr(module, "__file__", None) or "a package without a file")
        raise ConfigError(f"module {module_name} ({place}) has no {path or 'app'!r}; {hint}")
    raise ConfigError(f"{reference} is a {type(found).__name__}, not an Interlock app; {hint}")


def _import_module(name: str, reference: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{reference!r} does not name an app; write package.module:app")
    here = str(Path.cwd())
    if not {here, ""} & set(sys.path):
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # otherwise the module exists, and a module that it imports does not
        if missing is not None and f"{name}.".startswith(f"{missing}.") and not _frames_of_user(error):
            raise ConfigError(f"cannot import {reference!r} from {here}: there is no module {missing!r}") from None
        raise _app_import_error(name, error) from error


def _frames_of_user(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of a traceback that are neither of the import system nor of this package."""
    package = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith((package, "<frozen importlib", _IMPORTLIB))]


def _app_import_error(name: str, error: BaseException) -> AppImportError:
    """Make the error of a module that cannot be imported: the exception and the last lines of its traceback."""
    frames = _frames_of_user(error)[-MAX_SHOWN_FRAMES:]
    shown = [f"  {format_path(frame.filename)}:{frame.lineno}, in {frame.name}\n    {frame.line}" for frame in frames]
    if isinstance(error, SyntaxError) and error.filename is not None:
        text = (error.text or "").strip()
        shown.append(f"  {format_path(error.filename)}:{error.lineno}\n    {text}")
    kind = type(error).__name__
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return AppImportError("\n".join([f"cannot import {name}: {kind}: {message}", *shown]))
