"""Declaration of steps in Python: their options, and the decorators that make steps of functions.

Invariant: a decorated function can still be called as before, also for the type checker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

from interlock.client.task import Task
from interlock.errors import DefinitionError
from interlock.model.backoff import Backoff
from interlock.model.options import PlacementOptions, RunOptions, Scope, check_seconds, options_in

if TYPE_CHECKING:
    from interlock.client.workflow import Workflow
    from interlock.model.backoff import BackoffFunction, Kind

P = ParamSpec("P")
R = TypeVar("R")


class AnyStep:
    """A step of a workflow, which other steps name in `after`."""

    def __init__(
        self,
        workflow: Workflow,
        name: str,
        kind: str,
        task: Task[..., Any] | None = None,
        function: Callable[..., Any] | None = None,
    ) -> None:
        self.workflow = workflow
        self.name = name
        self.kind = kind
        self.task = task
        self.function = function

    def __repr__(self) -> str:
        return f"<Step {self.workflow.path}/{self.name} ({self.kind})>"


class Step(AnyStep, Generic[P, R]):
    """A step that has a function or a task as handler; a call runs the handler directly and stores nothing."""

    __name__: str

    def __init__(
        self, workflow: Workflow, name: str, kind: str, task: Task[..., Any], function: Callable[P, R]
    ) -> None:
        update_wrapper(self, function, updated=())
        super().__init__(workflow, name, kind, task, task.function)
        self._called = function
        # for a child process without an app, which finds this object under the function's name
        self.app = task.app
        self.decode = task.decode
        self.dependencies = task.dependencies
        self.encode_result = task.encode_result

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly."""
        return self._called(*args, **kwargs)


Handler = Callable[..., Any] | Task[..., Any] | str
StepLike = str | AnyStep | Callable[..., Any] | Task[..., Any]
Share = Literal["all", "any"] | float


class StepOptions(PlacementOptions, total=False):
    """Options of every step."""

    after: StepLike | Sequence[StepLike]
    on_failure: StepLike | Sequence[StepLike]
    always: StepLike | Sequence[StepLike]
    recovers: StepLike | Sequence[StepLike]
    join: Literal["all", "any"] | float
    cancel_rest: bool
    when: str
    config: Mapping[str, Any]


class HandlerOptions(StepOptions, RunOptions, total=False):
    """Options of a step that has a handler."""

    name: str
    backoff: Backoff | Kind | BackoffFunction
    executor: Literal["coroutine", "thread", "process"]
    transactional: bool


class PlainOptions(HandlerOptions, total=False):
    """Options of a step that can be compensated."""

    compensate: Handler


class StepDecorator:
    """The decorator that `@wf.step(...)`, `@wf.decision(...)` and `@wf.map(...)` return."""

    __slots__ = ("_kind", "_options", "_workflow")

    def __init__(self, workflow: Workflow, kind: str, options: Mapping[str, Any]) -> None:
        self._workflow = workflow
        self._kind = kind
        self._options = options

    @overload
    def __call__(self, handler: Callable[P, R]) -> Step[P, R]: ...

    @overload
    def __call__(self, handler: Task[P, R]) -> AnyStep: ...

    def __call__(self, handler: Any) -> Any:
        """Declare the step."""
        return self._workflow.add(self._kind, handler, **self._options)


def default_name(handler: Any) -> str:
    """Return the default name of a step: the name of its handler."""
    name = handler if isinstance(handler, str) else getattr(handler, "name", None) or getattr(handler, "__name__", None)
    if name is None:
        raise DefinitionError(f"a step needs a function or a task, got {handler!r}")
    return str(name)


def handler_type(handler: Any, own: str) -> str:
    """Return the type of a handler's task; a function is registered under `own`."""
    if isinstance(handler, str):
        return handler
    if isinstance(handler, Task):
        return handler.name
    if not callable(handler):
        raise DefinitionError(f"a handler must be a function, a task or the name of a task, got {handler!r}")
    return own


def inherited_options(task: Task[..., Any]) -> dict[str, Any]:
    """Return the options that a step and a compensation store from the handler's task."""
    values = {option.name: getattr(task, option.name) for option in options_in(Scope.INHERITED)}
    return {name: _listed(value) for name, value in values.items() if value is not None}


def _seconds(value: Any) -> float:
    return check_seconds("it", value)


def _sleep_seconds(value: Any) -> float:
    if value in (0, timedelta(0)):  # a tuple, because the value may not be hashable
        return 0.0
    try:
        return _seconds(value)
    except ValueError as error:
        raise ValueError(str(error).replace("a positive number", "0 or a positive number")) from None


def _moment(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _policy(value: Any) -> dict[str, Any] | None:
    policy = Backoff.of(value)
    return None if policy.function is not None else policy.to_json()  # a function stays in the definition of its task


def _listed(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)  # a derived version must not depend on the order
    return list(value) if isinstance(value, tuple) else value


def _mapping(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


# how options of a step become JSON
JSON_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "timeout": _seconds,
    "seconds": _sleep_seconds,
    "until": _moment,
    "backoff": _policy,
    "tags": _listed,
    "limit_key": _listed,
    "config": _mapping,
    "input": _mapping,
    "output": _mapping,
    "attributes": _mapping,
}
