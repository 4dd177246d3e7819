"""A task: a function, or a command, with a name that is stored and the rules under which a worker runs it.

Invariant: a Task that exists can be enqueued and run; what contradicts itself is refused when it is defined.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

from interlock.client.arguments import Arguments, not_arguments
from interlock.client.context import TaskContext
from interlock.client.enqueue import Enqueuer
from interlock.errors import DefinitionError, InputError, PermanentError
from interlock.model.backoff import Backoff
from interlock.model.json_values import ValueRefusedError, check_json
from interlock.model.options import CHECKS, Options, checked, text
from interlock.store.tasks import NewTask

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from interlock.client.app import Interlock


P = ParamSpec("P")
R = TypeVar("R")

ExecutorKind = Literal["coroutine", "thread", "process", "command"]
EXECUTORS: tuple[str, ...] = get_args(ExecutorKind)
DEFAULT_BACKOFF = Backoff()
_CHECKED = ("namespace", "timeout", "max_tries", "priority", "limit_key", "tags", "callback_url")


class Task(Enqueuer[P, R]):
    """Made by `@app.task` or `app.command_task`."""

    namespace: str = "default"
    timeout: float | None = None
    max_tries: int = 5
    priority: int = 0
    limit_key: str | None = None
    tags: tuple[str, ...] | None = None
    callback_url: str | None = None

    def __init__(
        self,
        app: Interlock,
        name: str,
        function: Callable[..., Any],
        *,
        executor: ExecutorKind | None = None,
        command: Sequence[str] | None = None,
        transactional: bool = False,
        backoff: Any = DEFAULT_BACKOFF,
        **options: Any,
    ) -> None:
        self._app = app
        self._task = self
        self._options = Options()
        try:
            self.name = text("the name of a task", name)
        except ValueError as error:
            raise DefinitionError(str(error)) from None
        try:
            self._take(options)
            self.backoff = Backoff.of(backoff)
            self.executor = _executor_of(function, executor, command)
        except (ValueError, DefinitionError) as error:
            raise DefinitionError(f"task {name}: {error}") from None
        self.function = function
        self.command = None if command is None else tuple(command)
        self.transactional = transactional
        self._arguments = None if command is not None else Arguments(name, function)
        self.context_parameter = None if self._arguments is None else self._arguments.context
        # a coroutine that does not ask for its context is run without one
        self.needs_context = self.executor != "coroutine" or self.context_parameter is not None
        if transactional:
            self._check_transactional()
        self.__doc__, self.__name__, self.__qualname__ = function.__doc__, function.__name__, function.__qualname__
        self.__module__, self.__wrapped__ = function.__module__, function

    @property
    def app(self) -> Interlock:
        """The app that it belongs to."""
        return self._app

    def __repr__(self) -> str:
        return f"<Task {self.name} ({self.executor})>"

    def __reduce__(self) -> str:
        # by reference: the module that defines it gives it in another process
        return self.function.__qualname__

    def encode(self, /, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """Bind and validate arguments, and give the JSON object that is stored; InputError names what is wrong."""
        if self._arguments is not None:
            return self._arguments.encode(args, kwargs)
        if args:
            raise InputError(f"task {self.name}: a command takes its arguments by name")
        return self._any_json(dict(kwargs))

    def encode_named(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Do the same for arguments that are in a mapping."""
        if type(arguments) is not dict and not isinstance(arguments, Mapping):
            raise InputError(f"task {self.name}: arguments must be a mapping by name, not {arguments!r}")
        if self._arguments is not None:
            return self._arguments.encode((), dict(arguments))
        return self._any_json(dict(arguments))

    def decode(self, input: Mapping[str, Any]) -> dict[str, Any]:  # noqa: A002 - the name of the column
        """Turn a stored JSON object into arguments by name, without the context; InputError names what is wrong."""
        if self._arguments is not None:
            return self._arguments.decode(input)
        if type(input) is not dict:
            raise InputError(f"task {self.name}: the input {not_arguments(input)}")
        return dict(input)

    def encode_result(self, value: Any) -> Any:
        """Give the JSON of a result; PermanentError if it has none."""
        if self._arguments is not None:
            return self._arguments.encode_result(value)
        try:
            check_json(value)
        except ValueRefusedError as error:
            raise PermanentError(f"task {self.name}: the result cannot be stored: {error}") from None
        return value

    def decode_result(self, stored: Any) -> Any:
        """Turn a stored result into what the function returned."""
        return stored if self._arguments is None else self._arguments.decode_result(stored)

    def resolve(self) -> None:
        """See to it that every annotation can be used; DefinitionError names one that cannot."""
        if self._arguments is not None:
            self._arguments.resolve()

    def _take(self, options: dict[str, Any]) -> None:
        for name, value in options.items():
            if name not in _CHECKED:
                raise ValueError(f"unknown option {name!r}; {_known(name)}")
            if value is not None:
                setattr(self, name, CHECKS[name](name, value))

    def _check_transactional(self) -> None:
        if self.executor != "coroutine":
            raise DefinitionError(
                f"task {self.name}: only a coroutine can be transactional, because its connection is async"
            )
        if self.context_parameter is None:
            raise DefinitionError(
                f"task {self.name}: a transactional task needs a TaskContext parameter, which has the connection"
            )

    def _any_json(self, stored: dict[str, Any]) -> dict[str, Any]:
        try:
            check_json(stored)
        except ValueRefusedError as error:
            raise InputError(f"task {self.name}: {error}") from None
        return stored

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function itself; a context that the caller does not give is made for the call."""
        name = self.context_parameter
        given = name is None or name in kwargs or any(isinstance(arg, TaskContext) for arg in args)
        if name is None or given:
            return self.function(*args, **kwargs)
        kwargs = {**self._by_name(args, kwargs), name: TaskContext(task_type=self.name)}
        return self.function(**kwargs)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        parameters = [name for name in inspect.signature(self.function).parameters if name != self.context_parameter]
        if len(args) > len(parameters):
            raise TypeError(f"{self.name}() takes {len(parameters)} positional arguments but {len(args)} were given")
        return {**dict(zip(parameters, args, strict=False)), **kwargs}


class AsyncTask(Task[P, R]):
    """A task that is a coroutine function."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the function here and now: nothing is stored."""
        running: Coroutine[Any, Any, R] = self._called(args, kwargs)
        return running


class SyncTask(Task[P, R]):
    """A task that is a plain function."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here and now: nothing is stored."""
        result: R = self._called(args, kwargs)
        return result


_OTHERS = ("name", "executor", "transactional", "backoff")
_OF_SCHEDULES = ("cron", "every", "timezone", "missed")


def _known(name: str) -> str:
    if name in _OF_SCHEDULES:
        return f"a schedule stands above the task: @app.periodic({name}=...)"
    return f"known are {', '.join(sorted((*_CHECKED, *_OTHERS)))}"


def _executor_of(
    function: Callable[..., Any], asked: ExecutorKind | None, command: Sequence[str] | None
) -> ExecutorKind:
    if command is not None:
        return _command(command)
    if asked == "command":
        raise ValueError("a command is defined with app.command_task")
    is_async = inspect.iscoroutinefunction(function)
    if asked is None:
        return "coroutine" if is_async else "thread"
    if asked not in EXECUTORS:
        raise ValueError(f"the executor must be one of {', '.join(EXECUTORS[:3])}, not {asked!r}")
    if is_async != (asked == "coroutine"):
        kind = "an async function runs as a coroutine" if is_async else "a plain function runs in a thread or process"
        raise ValueError(f"{kind}, not as {asked!r}")
    return asked


def _command(command: Any) -> ExecutorKind:
    parts = command if isinstance(command, list | tuple) else ()
    if not parts or not all(isinstance(part, str) and part for part in parts):
        raise ValueError(f"a command is a list of texts, the program first, not {command!r}")
    return "command"


# SECTION client/unchecked
# A task of which nothing is known here but its name: what is asked for is checked, its arguments are not.
#
# Invariant: what comes of it can be stored; whether it can be run is known to the worker alone.


def unchecked_task(
    type_: str, given: dict[str, Any], options: Mapping[str, Any], callback_url: str | None = None
) -> NewTask:
    """Make a task by its name, with the options of `task.options(...)`; `callback_url` is for one that names none."""
    try:
        text("the name of a task", type_)
    except ValueError as error:
        raise InputError(str(error)) from None
    try:
        check_json(given)
        stored = {"callback_url": callback_url, **checked(options)}
    except (ValueRefusedError, ValueError) as error:
        raise InputError(f"task {type_}: {error}") from None
    stored["timeout_seconds"] = stored.pop("timeout", None)
    return NewTask(type_, given, **stored)
