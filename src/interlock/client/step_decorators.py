"""How a step is declared in Python: the options that it takes, and what a decorator makes of a function.

Invariant: a decorated function is still the function that it was, for its callers and for the type checker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
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
    """A step of a workflow, to be named in `after` of others."""

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
        return f"<Step {self.workflow.name}/{self.workflow.version}/{self.name} ({self.kind})>"


class Step(AnyStep, Generic[P, R]):
    """A step that is a function, or a task of the app; calling it calls that, and stores nothing."""

    __name__: str

    def __init__(
        self, workflow: Workflow, name: str, kind: str, task: Task[..., Any], function: Callable[P, R]
    ) -> None:
        update_wrapper(self, function, updated=())
        super().__init__(workflow, name, kind, task, task.function)
        self._called = function
        # for a process that has no app and finds this under the function's name
        self.decode = task.decode
        self.encode_result = task.encode_result

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here and now."""
        return self._called(*args, **kwargs)


Handler = Callable[..., Any] | Task[..., Any] | str
StepLike = str | AnyStep | Callable[..., Any] | Task[..., Any]
Share = Literal["all", "any"] | float


class StepOptions(PlacementOptions, total=False):
    """Options of every step."""

    after: StepLike | Sequence[StepLike]
    after_failure: StepLike | Sequence[StepLike]
    join: Share
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
    """Makes a step of a function or of a task, with the options of `@wf.step(...)` and its like."""

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


def own_name(handler: Any) -> str:
    """Give the name that a step has when it is given none: that of its handler."""
    name = handler if isinstance(handler, str) else getattr(handler, "name", None) or getattr(handler, "__name__", None)
    if name is None:
        raise DefinitionError(f"a step is made of a function or a task, not of {handler!r}")
    return str(name)


def type_of(handler: Any, own: str) -> str:
    """Give the type of a handler's task: its own, or the one that a function is registered under."""
    if isinstance(handler, str):
        return handler
    if isinstance(handler, Task):
        return handler.name
    if not callable(handler):
        raise DefinitionError(f"a handler is a function, a task or the type of one, not {handler!r}")
    return own


def carried(task: Task[..., Any]) -> dict[str, Any]:
    """Give what a task says of all its rows, steps or not."""
    values = {option.name: getattr(task, option.name) for option in options_in(Scope.INHERITED)}
    return {name: _listed(value) for name, value in values.items() if value is not None}


def _seconds(value: Any) -> float:
    return check_seconds("it", value)


def _moment(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _policy(value: Any) -> dict[str, Any] | None:
    policy = Backoff.of(value)
    return None if policy.function is not None else policy.to_json()  # a function stays with its task


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | set | frozenset) else value


def _mapping(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


# how what a person writes in Python becomes JSON
PLAIN: Mapping[str, Callable[[Any], Any]] = {
    "timeout": _seconds,
    "seconds": _seconds,
    "until": _moment,
    "backoff": _policy,
    "tags": _listed,
    "config": _mapping,
    "input": _mapping,
}
