"""The registry of an app: tasks, workflows, schedules and limits, declared before the app is opened.

Invariant: names are unique and every declaration is checked; nothing here touches the database.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

from interlock.client.hooks import check_error_hook
from interlock.client.task import AsyncTask, SyncTask, Task, located
from interlock.client.workflow import Workflow
from interlock.errors import ConfigError, DefinitionError, InputError
from interlock.model.json_values import check_input_size, check_json
from interlock.model.options import (
    JOB_CHECKS,
    TASK_DEFAULTS,
    Scope,
    TaskDefaultOptions,
    check_name,
    check_seconds,
    check_text,
)
from interlock.store.limits import Limit
from interlock.store.schedules import DEFAULT_CALLBACK_URL, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
    from pathlib import Path

    from interlock.client.app import Interlock
    from interlock.client.context import TaskContext
    from interlock.client.hooks import ErrorHook
    from interlock.client.step_decorators import Handler
    from interlock.model.options import ConflictPolicy

P = ParamSpec("P")
R = TypeVar("R")
AnyErrorHook = TypeVar("AnyErrorHook", bound="ErrorHook")
AnyTask = TypeVar("AnyTask", bound=Task[..., Any])
Missed = Literal["once", "skip", "all"]


class TaskOptions(TaskDefaultOptions, total=False):
    """Options of `@app.task(...)`."""

    name: str
    executor: Literal["coroutine", "thread", "process"]
    transactional: bool


class ScheduledJobOptions(TypedDict, total=False):
    """Options of the jobs of `app.schedule(...)`, as in `app.submit`."""

    worker_count: int
    timeout: float | timedelta
    tags: Sequence[str]
    attributes: Mapping[str, str | float | bool]
    callback_url: str
    key: str
    on_conflict: ConflictPolicy


class TaskDecorator:
    """The decorator that `@app.task(...)` returns."""

    __slots__ = ("_app", "_options")

    def __init__(self, app: Definitions, options: TaskOptions) -> None:
        self._app = app
        self._options = options

    # the overloads overlap (a coroutine function is a function too), and the first that fits counts
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
        self._workflows: dict[str, Workflow] = {}  # by path
        self._schedules: dict[str, Schedule] = {}
        self._limits: dict[str, Limit] = {}
        self._error_hooks: list[ErrorHook] = []
        # for tests: provider of `Depends` -> the provider that replaces it
        self.dependency_overrides: dict[Callable[..., Any], Callable[..., Any]] = {}

    @property
    def tasks(self) -> Mapping[str, Task[..., Any]]:
        """All tasks by their stored names, including the handlers of steps."""
        return MappingProxyType(self._tasks)

    @property
    def workflows(self) -> Mapping[tuple[str, str], Workflow]:
        """All workflows, by name and version; GraphError if a definition is invalid, so that it has no version yet."""
        return MappingProxyType({(workflow.name, workflow.version): workflow for workflow in self._workflows.values()})

    @property
    def schedules(self) -> Mapping[str, Schedule]:
        """All declared schedules, by name."""
        return MappingProxyType(self._schedules)

    @property
    def limits(self) -> Mapping[str, Limit]:
        """All declared limits, by key."""
        return MappingProxyType(self._limits)

    @property
    def error_hooks(self) -> Sequence[ErrorHook]:
        """The functions that `@app.on_error` declared, in that order."""
        return tuple(self._error_hooks)

    # in the same order as above
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
        """Define a task: `@app.task`, or `@app.task(...)` with options."""
        decorator = TaskDecorator(self, cast("TaskOptions", options))
        return decorator if function is None else decorator(function)

    def command_task(self, name: str, command: Sequence[str], **options: Unpack[TaskDefaultOptions]) -> Task[..., Any]:
        """Define a task as a program in any language, which a worker runs as a subprocess."""
        task: Task[..., Any] = Task(self._app(), name, _not_callable, command=command, **options)
        self._add(task)
        return task

    def define(self, function: Callable[..., Any], options: TaskOptions) -> Task[..., Any]:
        """Define a task as a function and register it under its name."""
        if not inspect.isroutine(function):
            raise DefinitionError(f"a task is a function, got {function!r}")
        given: dict[str, Any] = dict(options)
        name = given.pop("name", None)
        name = function.__name__ if name is None else name
        kind = AsyncTask if inspect.iscoroutinefunction(function) else SyncTask
        try:
            task: Task[..., Any] = kind(self._app(), name, function, **given)
            self._add(task)
        except DefinitionError as error:
            raise located(error, function) from None
        return task

    def workflow(
        self,
        name: str,
        *,
        namespace: str = "default",
        version: str | None = None,
        input: Any = None,  # noqa: A002 - the name of the column
        input_schema: Mapping[str, Any] | None = None,
        timeout: timedelta | float | None = None,
        output: str | Mapping[str, str] | None = None,
        tags: Sequence[str] | None = None,
        attributes: Mapping[str, Any] | None = None,
        callback_url: str | None = None,
        key: str | None = None,
        on_conflict: ConflictPolicy | None = None,
    ) -> Workflow:
        """Define a workflow; `input` is a pydantic model, a dataclass or a TypedDict of the job's input.

        Without `version`, the version is derived from the definition.
        `output` names the step whose result is the output of a job, or maps the names of the output to steps; without
        it, the output has the results of the final steps. `tags`, `attributes`, `callback_url`, `key` and `on_conflict`
        are the defaults of its jobs; a key such as "input.customer" stands for a field of their input.
        """
        made = Workflow(
            self,
            name,
            namespace=namespace,
            version=version,
            input=input,
            input_schema=input_schema,
            timeout=timeout,
            output=output,
            tags=tags,
            attributes=attributes,
            callback_url=callback_url,
            key=key,
            on_conflict=on_conflict,
        )
        if made.path in self._workflows:
            which = f"workflow {name!r}" if version is None else f"workflow {name!r}, version {version!r}"
            raise DefinitionError(f"{which} is defined twice; give one of them another version: version=...")
        self._workflows[made.path] = made
        return made

    def find_workflow(self, name: str, version: str | None = None) -> Workflow | None:
        """Find a declared workflow; without a version, the one declared last."""
        found = [each for each in self._workflows.values() if each.name == name and version in {None, each.version}]
        return found[-1] if found else None

    def load_templates(
        self,
        path: str | Path,
        *,
        environment: str | None = None,
        handlers: Mapping[str, Handler] | Callable[[str], Handler | None] | None = None,
    ) -> list[Workflow]:
        """Declare the workflows of a YAML file, or of all `.yaml` and `.yml` files in a directory.

        `environment` names the block of `environments` to apply. `handlers` gives the task or function for a name that
        a template uses; a function returns None for a name that it does not know.
        """
        from interlock.client.templates import load_templates  # noqa: PLC0415 - the YAML parser is needed by few apps

        return load_templates(self, path, environment=environment, handlers=handlers)

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
        """Schedule a task: stands above `@app.task`. The schedule is stored when the app is opened."""

        def declare(task: AnyTask) -> AnyTask:
            if not isinstance(task, Task):
                raise DefinitionError(f"@app.periodic must stand above @app.task, which makes the task, got {task!r}")
            rhythm: dict[str, Any] = {"cron": cron, "timezone": timezone, "every": every, "missed": missed}
            with _definition_errors():
                self._add_schedule(
                    task.name if name is None else name,
                    **rhythm,
                    type=task.name,
                    namespace=task.namespace,
                    input=task.encode_named({} if arguments is None else arguments),
                    options=_schedule_options(task, self._app().config.callback_url),
                )
            return task

        return declare

    def schedule(
        self,
        name: str,
        *,
        workflow: str | Workflow,
        input: Mapping[str, Any] | None = None,  # noqa: A002 - the name of the column
        version: str | None = None,
        cron: str | None = None,
        every: timedelta | float | None = None,
        timezone: str = "UTC",
        missed: Missed = "once",
        **options: Unpack[ScheduledJobOptions],
    ) -> None:
        """Schedule jobs of a workflow, of its newest version at each tick unless `version` names one.

        The schedule is stored when the app is opened. The input is checked then, if the app declares the workflow, and
        at each tick.
        """
        rhythm: dict[str, Any] = {"cron": cron, "timezone": timezone, "every": every, "missed": missed}
        with _definition_errors(f"schedule {name!r}: "):
            checked = {key: JOB_CHECKS[key](key, value) for key, value in options.items() if key in JOB_CHECKS}
            document = dict({} if input is None else input)
            check_json(document)
        given = {**options, **checked, DEFAULT_CALLBACK_URL: self._app().config.callback_url}
        with _definition_errors():
            self._add_schedule(
                name,
                **rhythm,
                workflow=workflow.name if isinstance(workflow, Workflow) else check_text("workflow", workflow),
                version=version,
                input=document,
                options={key: value for key, value in given.items() if value is not None},
            )

    def check_scheduled_inputs(self) -> None:
        """Raise DefinitionError if the input of a schedule does not fit the workflow that this app declares."""
        for schedule in self._schedules.values():
            declared = self.find_workflow(schedule.workflow, schedule.version) if schedule.workflow else None
            if declared is not None:
                with _definition_errors(f"schedule {schedule.name!r}: "):
                    declared.encode(schedule.input)

    def _add_schedule(self, name: str, *, every: timedelta | float | None, **fields: Any) -> None:
        if _check_name("the name of a schedule", name, check_name) in self._schedules:
            raise DefinitionError(f"schedule {name!r} is declared twice; give one of them another name")
        check_input_size(f"schedule {name!r}", fields.get("input"), self._app().config.largest_input)
        interval = None if every is None else timedelta(seconds=check_seconds(f"schedule {name!r}: every", every))
        self._schedules[name] = Schedule(name=name, every=interval, **fields)

    def limit(
        self,
        key: str,
        *,
        max_running: int | None = None,
        max_starts: int | None = None,
        max_weight: float | None = None,
        max_cost: float | None = None,
        per: timedelta | float | None = None,
        share: float | None = None,
    ) -> None:
        """Limit the tasks of a key, or of each key that begins as a pattern such as `mail:*`.

        At most `max_running` at once (concurrency limit); in any period `per` at most `max_starts` starts (rate limit)
        and at most `max_weight` of their weights, and no start once they have reported `max_cost` (budget). `share` is
        the part that the tasks of the key get of a limit that they share with others; alone, it declares a key without
        a bound. The limit is stored when the app is opened.
        """
        if _check_name("the key of a limit", key) in self._limits:
            raise DefinitionError(f"limit {key!r} is declared twice")
        try:
            period = None if per is None else timedelta(seconds=check_seconds(f"limit {key!r}: per", per))
            self._limits[key] = Limit(key, max_running, max_starts, period, max_weight, max_cost, share)
        except (ConfigError, ValueError) as error:
            raise DefinitionError(str(error)) from None

    def on_error(self, function: AnyErrorHook) -> AnyErrorHook:
        """Call a function after each failed attempt in a worker: `@app.on_error`.

        It gets the error and a FailedAttempt, and runs beside the worker: a coroutine in its event loop, a function in
        a thread. An error in it is logged and changes nothing.
        """
        try:
            check_error_hook(function)
        except DefinitionError as error:
            raise (located(error, function) if inspect.isroutine(function) else error) from None
        self._error_hooks.append(function)
        return function

    def _app(self) -> Interlock:
        raise NotImplementedError  # Interlock returns itself

    def _add(self, task: Task[..., Any]) -> None:
        if task.name in self._tasks:
            other = self._tasks[task.name].function
            raise DefinitionError(
                f"there are two tasks {task.name!r}; the other is {other.__module__}.{other.__qualname__}; "
                "give one of them another name: @app.task(name=...)"
            )
        self._tasks[task.name] = task


@contextmanager
def _definition_errors(place: str = "") -> Iterator[None]:
    """Raise the errors of checks as DefinitionError."""
    try:
        yield
    except (ConfigError, InputError, ValueError) as error:
        raise DefinitionError(f"{place}{error}") from None


def _check_name(what: str, name: Any, check: Callable[[str, Any], str] = check_text) -> str:
    try:
        return check(what, name)
    except ValueError as error:
        raise DefinitionError(str(error)) from None


def _not_callable(**_: Any) -> Any:
    raise DefinitionError("a command task runs in a worker and cannot be called")


def _schedule_options(task: Task[..., Any], callback_url: str | None) -> dict[str, Any]:
    defaults = {
        option.column: getattr(task, option.name) for option in TASK_DEFAULTS if Scope.SCHEDULE in option.scopes
    }
    defaults["callback_url"] = task.callback_url or callback_url
    return {
        column: list(value) if isinstance(value, tuple) else value
        for column, value in defaults.items()
        if value is not None
    }
