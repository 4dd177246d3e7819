"""A task: a function or a command under a stored name, with the defaults under which workers run it.

Invariant: a Task that exists can be enqueued and run; contradictory definitions raise DefinitionError.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

from interlock.client.arguments import Arguments, describe_bad_input
from interlock.client.context import TaskContext
from interlock.client.enqueue import Enqueuer
from interlock.errors import DefinitionError, InputError, PermanentError
from interlock.model.backoff import DEFAULT_BACKOFF, Backoff
from interlock.model.json_values import Codec, ValueRefusedError, check_input_size, check_json
from interlock.model.options import (
    CHECKS,
    TASK_DEFAULTS,
    NewTask,
    TaskDefaults,
    as_columns,
    check_options,
    check_text,
    placeholders,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from interlock.client.app import Interlock
    from interlock.client.dependencies import ProviderCall


P = ParamSpec("P")
R = TypeVar("R")

ExecutorKind = Literal["coroutine", "thread", "process", "command"]
EXECUTORS: tuple[str, ...] = get_args(ExecutorKind)
_DEFAULT_NAMES = tuple(option.name for option in TASK_DEFAULTS)
_OTHER_OPTIONS = ("name", "executor", "transactional", "backoff")
_SCHEDULE_OPTIONS = ("cron", "every", "timezone", "missed")


class Task(Enqueuer[P, R], TaskDefaults):
    """Made by `@app.task` or `app.command_task`."""

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
        **defaults: Any,
    ) -> None:
        self._app = app
        self._task = self
        try:
            self.name = check_text("the name of a task", name)
        except ValueError as error:
            raise DefinitionError(str(error)) from None
        try:
            self._set_defaults(defaults)
            self.backoff = Backoff.of(backoff)
            self.executor = _choose_executor(function, executor, command)
        except (ValueError, DefinitionError) as error:
            raise DefinitionError(f"task {name}: {error}") from None
        columns = {option.column: getattr(self, option.name) for option in TASK_DEFAULTS}
        self._columns = {**columns, "run_at": None, "delay": None}
        self.function = function
        self.command = None if command is None else tuple(command)
        self.transactional = transactional
        self._arguments = None if command is not None else Arguments(name, function)
        self.context_parameter = None if self._arguments is None else self._arguments.context
        self.dependencies: Mapping[str, ProviderCall] = {} if self._arguments is None else self._arguments.dependencies
        # a coroutine without a context parameter or dependencies is run without a context
        self.needs_context = (
            self.executor != "coroutine" or self.context_parameter is not None or bool(self.dependencies)
        )
        try:
            self.check_limit_templates(defaults)
        except InputError as error:
            raise DefinitionError(str(error)) from None
        if transactional:
            self._check_transactional()
        self.__doc__, self.__name__, self.__qualname__ = function.__doc__, function.__name__, function.__qualname__
        self.__module__, self.__wrapped__ = function.__module__, function

    @property
    def app(self) -> Interlock:
        """The app that the task belongs to."""
        return self._app

    def __repr__(self) -> str:
        return f"<Task {self.name} ({self.executor})>"

    def __reduce__(self) -> str:
        # by reference: another process finds the task in the module that defines it
        return self.function.__qualname__

    def encode(self, /, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """Bind and validate arguments and return the JSON object that is stored; InputError names the argument."""
        if self._arguments is not None:
            return self._arguments.encode(args, kwargs)
        if args:
            raise InputError(f"task {self.name}: a command takes its arguments by name, not by position")
        return self._any_json(dict(kwargs))

    def encode_named(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Do the same for a mapping of arguments."""
        if type(arguments) is not dict and not isinstance(arguments, Mapping):
            raise InputError(f"task {self.name}: arguments must be a mapping by name, got {arguments!r}")
        if self._arguments is not None:
            return self._arguments.encode((), dict(arguments))
        return self._any_json(dict(arguments))

    def decode(self, input: Mapping[str, Any]) -> dict[str, Any]:  # noqa: A002 - the name of the column
        """Turn a stored JSON object into arguments by name, without the context; InputError names the argument."""
        if self._arguments is not None:
            return self._arguments.decode(input)
        if type(input) is not dict:
            raise InputError(f"task {self.name}: the input {describe_bad_input(input)}")
        return dict(input)

    def encode_result(self, value: Any) -> Any:
        """Return the JSON of a result; PermanentError if it has none."""
        if self._arguments is not None:
            return self._arguments.encode_result(value)
        try:
            check_json(value)
        except ValueRefusedError as error:
            raise PermanentError(f"task {self.name}: the result cannot be stored: {error}") from None
        return value

    def decode_result(self, stored: Any) -> Any:
        """Turn a stored result back into the value that the function returned."""
        return stored if self._arguments is None else self._arguments.decode_result(stored)

    def codec(self, name: str) -> Codec:
        """Return the codec of a parameter, or of the result (`return`); of Any if its annotation is not known."""
        return Codec(Any) if self._arguments is None else self._arguments.codec(name, required=False)

    def resolve(self) -> None:
        """Resolve every annotation; DefinitionError names the parameter whose annotation cannot be used."""
        if self._arguments is not None:
            try:
                self._arguments.resolve()
            except DefinitionError as error:
                raise located(error, self.function) from error.__cause__

    def _set_defaults(self, given: dict[str, Any]) -> None:
        for name, value in given.items():
            if name in _SCHEDULE_OPTIONS:
                raise ValueError(
                    f"unknown option {name!r}; declare a schedule above the task: @app.periodic({name}=...)"
                )
            if name not in _DEFAULT_NAMES:
                known = ", ".join(sorted((*_DEFAULT_NAMES, *_OTHER_OPTIONS)))
                raise ValueError(f"unknown option {name!r}; known are {known}")
            if value is not None:
                setattr(self, name, CHECKS[name](name, value))

    @property
    def default_arguments(self) -> Mapping[str, Any]:
        """The defaults of the parameters, as JSON, where they have one."""
        return {} if self._arguments is None else self._arguments.defaults()

    def check_limit_templates(self, options: Mapping[str, Any]) -> None:
        """Raise InputError if a limit key or weight among the options names an argument that the task does not have."""
        if self._arguments is None:
            return  # a command takes any argument
        for name in ("limit_key", "limit_weight"):
            given = options.get(name)
            templates = (given,) if isinstance(given, str) else given if isinstance(given, tuple | list) else ()
            for missing in sorted(placeholders(templates) - self._arguments.names):
                known = ", ".join(sorted(self._arguments.names)) or "none"
                raise InputError(
                    f"task {self.name}: {name} {given!r} names the argument {missing!r}, and the task has {known}"
                )

    def _check_transactional(self) -> None:
        if self.executor != "coroutine":
            raise DefinitionError(
                f"task {self.name}: only a coroutine can be transactional, because its connection is async"
            )
        if self.context_parameter is None:
            raise DefinitionError(
                f"task {self.name}: a transactional task needs a TaskContext parameter, which carries the connection"
            )

    def _any_json(self, stored: dict[str, Any]) -> dict[str, Any]:
        try:
            check_json(stored)
        except ValueRefusedError as error:
            raise InputError(f"task {self.name}: {error}") from None
        return stored

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function itself; make a context if it takes one and the caller gives none."""
        if self.dependencies:
            self._require_dependencies(args, kwargs)
        name = self.context_parameter
        given = name is None or name in kwargs or any(isinstance(arg, TaskContext) for arg in args)
        if name is None or given:
            return self.function(*args, **kwargs)
        kwargs = {**self._by_name(args, kwargs), name: TaskContext(task_type=self.name)}
        return self.function(**kwargs)

    def _require_dependencies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError if a direct call leaves out an injected parameter."""
        given = inspect.signature(self.function).bind_partial(*args, **kwargs).arguments
        for name in self.dependencies:
            if name not in given:
                raise TypeError(
                    f"{self.name}() is called directly, which injects nothing: pass {name!r}, or call it with "
                    "interlock.testing.run_inline"
                )

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        parameters = [name for name in inspect.signature(self.function).parameters if name != self.context_parameter]
        if len(args) > len(parameters):
            raise TypeError(f"{self.name}() takes {len(parameters)} positional arguments but {len(args)} were given")
        return {**dict(zip(parameters, args, strict=False)), **kwargs}


class AsyncTask(Task[P, R]):
    """A task that is a coroutine function."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the function directly; nothing is stored."""
        running: Coroutine[Any, Any, R] = self._called(args, kwargs)
        return running


class SyncTask(Task[P, R]):
    """A task that is a plain function."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly; nothing is stored."""
        result: R = self._called(args, kwargs)
        return result


def located(error: DefinitionError, function: Callable[..., Any]) -> DefinitionError:
    """Add the file and line where the user's function is defined."""
    place = place_of_function(function)
    return error if place is None else type(error)(f"{error} (defined at {place})")


def place_of_function(function: Callable[..., Any]) -> str | None:
    """Return the file and line where a function is defined, relative to the current directory: shop.py:14."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else format_place(code.co_filename, code.co_firstlineno)


def place_of_caller() -> str | None:
    """Return the file and line outside of this package from which the current call came."""
    package = str(Path(__file__).parents[1])
    frame = sys._getframe(1)  # noqa: SLF001 - inspect.stack() reads the sources of all frames
    while frame.f_code.co_filename.startswith(package):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return format_place(frame.f_code.co_filename, frame.f_lineno)


def format_place(file: str, line: int) -> str:
    """Return a file, relative to the current directory, and a line: shop.py:14."""
    return f"{format_path(file)}:{line}"


def format_path(file: str) -> str:
    """Return the path of a file, relative to the current directory if it is below that."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _choose_executor(
    function: Callable[..., Any], asked: ExecutorKind | None, command: Sequence[str] | None
) -> ExecutorKind:
    if command is not None:
        if not isinstance(command, list | tuple) or not command or not all(isinstance(p, str) and p for p in command):
            raise ValueError(f"a command is a list of non-empty strings, the program first, got {command!r}")
        return "command"
    if asked == "command":
        raise ValueError("a command is defined with app.command_task")
    is_async = inspect.iscoroutinefunction(function)
    if asked is None:
        return "coroutine" if is_async else "thread"
    if asked not in EXECUTORS:
        raise ValueError(f"executor must be one of {', '.join(EXECUTORS[:3])}, got {asked!r}")
    if is_async != (asked == "coroutine"):
        kind = "an async function runs as a coroutine" if is_async else "a plain function runs in a thread or process"
        raise ValueError(f"{kind}, not as {asked!r}")
    return asked


def unchecked_task(
    type_: str,
    input: dict[str, Any],  # noqa: A002 - the name of the column
    options: Mapping[str, Any],
    *,
    largest_input: int,
    callback_url: str | None = None,
) -> NewTask:
    """Make a task of which only the type is known here: its options are checked, its arguments only by the worker.

    `callback_url` applies when the options name none.
    """
    try:
        check_text("the name of a task", type_)
    except ValueError as error:
        raise InputError(str(error)) from None
    try:
        check_json(input)
        columns = {"callback_url": callback_url, **as_columns(check_options(options))}
    except (ValueRefusedError, ValueError) as error:
        raise InputError(f"task {type_}: {error}") from None
    check_input_size(f"task {type_}", input, largest_input)
    return NewTask(type_, input, **columns)
