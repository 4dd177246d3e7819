"""What an app is made of: its tasks and workflows, schedules and limits, declared before it is opened.

Invariant: names are unique, and a declaration that exists makes sense; nothing here touches the database.
"""

from __future__ import annotations

import inspect
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

from interlock.client.step_context import end_step
from interlock.client.task import AsyncTask, SyncTask, Task
from interlock.client.workflow import Workflow
from interlock.errors import ConfigError, DefinitionError, InputError
from interlock.model.graph import BUILT_IN_HANDLER
from interlock.model.options import seconds, text
from interlock.store.limits import Limit
from interlock.store.schedules import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from pathlib import Path

    from interlock.client.app import Interlock
    from interlock.client.context import TaskContext
    from interlock.model.backoff import Backoff, BackoffFunction, Kind

P = ParamSpec("P")
R = TypeVar("R")
AnyTask = TypeVar("AnyTask", bound=Task[..., Any])
Missed = Literal["once", "skip", "all"]


class CommonOptions(TypedDict, total=False):
    """What every task can be defined with."""

    namespace: str
    timeout: float | timedelta
    max_tries: int
    backoff: Backoff | Kind | BackoffFunction
    priority: int
    limit_key: str
    tags: Sequence[str]
    callback_url: str


class TaskOptions(CommonOptions, total=False):
    """What a task that is a function can be defined with."""

    name: str
    executor: Literal["coroutine", "thread", "process"]
    transactional: bool


class TaskDecorator:
    """Makes a task of a function, with the options of `@app.task(...)`."""

    __slots__ = ("_app", "_options")

    def __init__(self, app: Definitions, options: TaskOptions) -> None:
        self._app = app
        self._options = options

    # a coroutine function is also a function, and one with a context also one without: the first that fits counts
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[TaskContext, P], Coroutine[Any, Any, R]]
    ) -> AsyncTask[P, R]: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]]
    ) -> AsyncTask[P, R]: ...

    @overload
    def __call__(self, function: Callable[Concatenate[TaskContext, P], R]) -> SyncTask[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R]) -> SyncTask[P, R]: ...

    def __call__(self, function: Callable[..., Any]) -> Task[..., Any]:
        """Define the task."""
        return self._app.define(function, self._options)


class Definitions:
    """Declares tasks, workflows, schedules and limits."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task[..., Any]] = {}
        self._workflows: dict[tuple[str, str], Workflow] = {}
        self._schedules: dict[str, Schedule] = {}
        self._limits: dict[str, Limit] = {}
        self.define(end_step, {"name": BUILT_IN_HANDLER})

    @property
    def tasks(self) -> Mapping[str, Task[..., Any]]:
        """All tasks, by the name under which they are stored; the handlers of steps and `interlock.pass` too."""
        return MappingProxyType(self._tasks)

    @property
    def workflows(self) -> Mapping[tuple[str, str], Workflow]:
        """All workflows, by name and version."""
        return MappingProxyType(self._workflows)

    @property
    def schedules(self) -> Mapping[str, Schedule]:
        """All declared schedules, by name."""
        return MappingProxyType(self._schedules)

    @property
    def limits(self) -> Mapping[str, Limit]:
        """All declared limits, by key."""
        return MappingProxyType(self._limits)

    # the same order as above, for the same reason
    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[TaskContext, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...

    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...

    @overload
    def task(self, function: Callable[Concatenate[TaskContext, P], R], /) -> SyncTask[P, R]: ...

    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...

    @overload
    def task(self, **options: Unpack[TaskOptions]) -> TaskDecorator: ...

    def task(self, function: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]  # mypy 2.4 sees no Unpack here
        """Make a task of a function: `@app.task`, or `@app.task(...)` with options."""
        decorator = TaskDecorator(self, cast("TaskOptions", options))
        return decorator if function is None else decorator(function)

    def command_task(self, name: str, command: Sequence[str], **options: Unpack[CommonOptions]) -> Task[..., Any]:
        """Make a task of a program in any language, which a worker runs as a subprocess."""
        task: Task[..., Any] = Task(self._app(), name, _run_by_the_worker, command=command, **options)
        self._add(task)
        return task

    def define(self, function: Callable[..., Any], options: TaskOptions) -> Task[..., Any]:
        """Make a task of a function and remember it by its name."""
        if not inspect.isroutine(function):
            raise DefinitionError(f"a task is made of a function, not of {function!r}")
        given: dict[str, Any] = dict(options)
        name = given.pop("name", None)
        name = function.__name__ if name is None else name
        kind = AsyncTask if inspect.iscoroutinefunction(function) else SyncTask
        task: Task[..., Any] = kind(self._app(), name, function, **given)
        self._add(task)
        return task

    def workflow(
        self,
        name: str,
        *,
        namespace: str = "default",
        version: str = "1",
        input: Any = None,  # noqa: A002 - the name of the column
        input_schema: Mapping[str, Any] | None = None,
        timeout: timedelta | float | None = None,
    ) -> Workflow:
        """Begin a workflow, to declare steps on. `input` is a model, a dataclass or a TypedDict of the job's input."""
        made = Workflow(
            self,
            name,
            namespace=namespace,
            version=version,
            input=input,
            input_schema=input_schema,
            timeout=timeout,
        )
        if (name, version) in self._workflows:
            raise DefinitionError(f"there are two workflows {name!r} of version {version!r}; raise the version of one")
        self._workflows[name, version] = made
        return made

    def load_templates(self, path: str | Path) -> list[Workflow]:
        """Declare the workflows of a YAML file, or of all `.yaml` and `.yml` files in a directory."""
        # not at the top: the parser is for those who have templates
        from interlock.client.templates import load_templates  # noqa: PLC0415 - needed once, if at all

        return load_templates(self, path)

    def periodic(
        self,
        *,
        cron: str | None = None,
        every: timedelta | float | None = None,
        timezone: str = "UTC",
        missed: Missed = "once",
        name: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> Callable[[AnyTask], AnyTask]:
        """Enqueue a task again and again: stands above `@app.task`. Stored when the app is opened."""

        def declare(task: AnyTask) -> AnyTask:
            if not isinstance(task, Task):
                raise DefinitionError("@app.periodic stands above @app.task, which makes the task")
            schedule_name = task.name if name is None else _declared("the name of a schedule", name)
            if schedule_name in self._schedules:
                raise DefinitionError(f"there are two schedules {schedule_name!r}; give one of them another name")
            try:
                rest = None if every is None else seconds(f"schedule {schedule_name!r}: every", every)
                self._schedules[schedule_name] = Schedule(
                    name=schedule_name,
                    type=task.name,
                    namespace=task.namespace,
                    cron=cron,
                    timezone=timezone,
                    every=None if rest is None else timedelta(seconds=rest),
                    missed=missed,
                    input=task.encode_named({} if arguments is None else arguments),
                    options=_schedule_options(task, self._app().config.callback_url),
                )
            except (ConfigError, InputError, ValueError) as error:
                raise DefinitionError(str(error)) from None
            return task

        return declare

    def limit(
        self,
        key: str,
        *,
        max_running: int | None = None,
        max_starts: int | None = None,
        per: timedelta | float | None = None,
    ) -> None:
        """Let at most `max_running` tasks of a key run at once, or `max_starts` start per time. Stored on opening."""
        if _declared("the key of a limit", key) in self._limits:
            raise DefinitionError(f"limit {key!r} is declared twice")
        try:
            period = None if per is None else timedelta(seconds=seconds(f"limit {key!r}: per", per))
            self._limits[key] = Limit(key, max_running, max_starts, period)
        except (ConfigError, ValueError) as error:
            raise DefinitionError(str(error)) from None

    def _app(self) -> Interlock:
        raise NotImplementedError

    def _add(self, task: Task[..., Any]) -> None:
        if task.name in self._tasks:
            other = self._tasks[task.name].function
            raise DefinitionError(
                f"there are two tasks {task.name!r}; the other is {other.__module__}.{other.__qualname__}. "
                "Give one of them another name: @app.task(name=...)"
            )
        self._tasks[task.name] = task


def _declared(what: str, name: Any) -> str:
    try:
        return text(what, name)
    except ValueError as error:
        raise DefinitionError(str(error)) from None


def _run_by_the_worker(**_: Any) -> Any:
    raise DefinitionError("a command is run by a worker; it cannot be called")


def _schedule_options(task: Task[..., Any], callback_url: str | None) -> dict[str, Any]:
    options = {
        "priority": task.priority,
        "max_tries": task.max_tries,
        "timeout_seconds": task.timeout,
        "limit_key": task.limit_key,
        "tags": None if task.tags is None else list(task.tags),
        "callback_url": task.callback_url or callback_url,
    }
    return {name: value for name, value in options.items() if value is not None}
