"""Dependencies of handlers: values that a worker makes and injects, which are no part of a task's input.

Invariant: a value of scope "worker" is made once per process, at its first use, and cleaned up when the process stops;
one of scope "attempt" is made for each attempt and cleaned up when its handler has ended. Cleanups run in reverse
order, and an error in one is logged and changes no outcome.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
import types
import typing
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from interlock.client.context import TaskContext
from interlock.errors import DefinitionError
from interlock.log_context import running_task
from interlock.service import cancel_and_wait
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from types import TracebackType

Scope = Literal["attempt", "worker"]
SCOPES: tuple[str, ...] = get_args(Scope)


@dataclass(frozen=True, slots=True)
class Dependency:
    """The marker that `Depends` makes."""

    provider: Callable[..., Any]
    scope: str


def Depends(provider: Callable[..., Any], *, scope: Scope = "attempt") -> Any:  # noqa: N802 - the field's name for it
    """Mark a parameter of a handler that the worker provides.

    `pool: Pool = Depends(open_pool, scope="worker")` or `pool: Annotated[Pool, Depends(open_pool, scope="worker")]`.
    The provider is a function, a coroutine function, or a generator of either kind that yields once; what follows its
    `yield` cleans up. Its own parameters may be dependencies too. It is called once per attempt, or once per process.
    """
    return Dependency(provider, scope)


@dataclass(frozen=True, slots=True)
class ProviderCall:
    """A provider with the values that its own parameters get."""

    provider: Callable[..., Any]
    scope: str
    dependencies: Mapping[str, ProviderCall]
    context_parameter: str | None


def find_dependencies(what: str, function: Callable[..., Any]) -> dict[str, ProviderCall]:
    """Return the injected parameters of a function; DefinitionError names `what` and the parameter."""
    return _dependencies_of(what, function, ())


def _dependencies_of(what: str, function: Callable[..., Any], callers: tuple[Any, ...]) -> dict[str, ProviderCall]:
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        marker = _find_marker(what, function, parameter)
        if marker is not None:
            found[name] = _provider_call(f"{what}, parameter {name!r}", marker, callers)
    return found


def _provider_call(what: str, marker: Dependency, callers: tuple[Any, ...]) -> ProviderCall:
    provider, scope = marker.provider, marker.scope
    if not callable(provider):
        raise DefinitionError(f"{what}: Depends takes a function that makes the value, got {provider!r}")
    if scope not in SCOPES:
        raise DefinitionError(f"{what}: scope must be one of {', '.join(SCOPES)}, got {scope!r}")
    shown = f"{what}: the provider {_name(provider)}"
    if provider in callers:
        raise DefinitionError(f"{shown} depends on itself")
    if _kind(provider) == "function" and _is_generator(inspect.unwrap(provider)):
        raise DefinitionError(
            f"{shown} is a context manager; give the generator function itself, without @contextmanager or "
            "@asynccontextmanager"
        )
    dependencies = _dependencies_of(shown, provider, (*callers, provider))
    shorter = [name for name, each in dependencies.items() if scope == "worker" and each.scope != "worker"]
    if shorter:
        raise DefinitionError(
            f'{shown} has the scope "worker" and depends on {shorter[0]!r}, which is made for each attempt; '
            'give that the scope "worker" too'
        )
    return ProviderCall(provider, scope, dependencies, _context_parameter(shown, provider, scope, dependencies))


def _context_parameter(
    shown: str, provider: Callable[..., Any], scope: str, dependencies: Mapping[str, ProviderCall]
) -> str | None:
    """Return the parameter that takes the TaskContext; every other needs a dependency or a default."""
    context = None
    for name, parameter in inspect.signature(provider).parameters.items():
        if name in dependencies or parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            continue
        annotation = _resolved(provider, parameter.annotation)
        if isinstance(annotation, type) and issubclass(annotation, TaskContext):
            if scope == "worker":
                raise DefinitionError(f'{shown} has the scope "worker" and cannot take the context of one attempt')
            context = name
        elif parameter.default is parameter.empty:
            raise DefinitionError(
                f"{shown} has no value for its parameter {name!r}; give it a default, Depends(...), or the type "
                "TaskContext"
            )
    return context


def _find_marker(what: str, function: Callable[..., Any], parameter: inspect.Parameter) -> Dependency | None:
    if isinstance(parameter.default, Dependency):
        return parameter.default
    annotation = _resolved(function, parameter.annotation)
    if isinstance(annotation, str) and "Depends(" in annotation:
        raise DefinitionError(
            f"{what}: the annotation of the parameter {parameter.name!r} cannot be resolved; import its types at run "
            "time, at the top level of the module"
        )
    markers = (
        [each for each in get_args(annotation)[1:] if isinstance(each, Dependency)] if _is_annotated(annotation) else []
    )
    return markers[0] if markers else None


def _is_annotated(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated


def _resolved(function: Callable[..., Any], annotation: Any) -> Any:
    """Evaluate an annotation in the module of its function; one that cannot be evaluated stays as it is."""
    if not isinstance(annotation, str):
        return annotation
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        names = getattr(inspect.unwrap(function), "__globals__", {})
        return typing.get_type_hints(holder, names, include_extras=True)["it"]
    except (NameError, AttributeError, TypeError):
        return annotation


def _is_generator(function: Any) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _kind(provider: Any) -> Literal["function", "coroutine", "generator", "async generator"]:
    called = provider if inspect.isroutine(provider) or inspect.isclass(provider) else type(provider).__call__
    if inspect.isasyncgenfunction(provider) or inspect.isasyncgenfunction(called):
        return "async generator"
    if inspect.isgeneratorfunction(provider) or inspect.isgeneratorfunction(called):
        return "generator"
    is_coroutine = inspect.iscoroutinefunction(provider) or inspect.iscoroutinefunction(called)
    return "coroutine" if is_coroutine else "function"


def _name(provider: Any) -> str:
    code = getattr(inspect.unwrap(provider), "__code__", None)
    name = getattr(provider, "__qualname__", repr(provider))
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


@dataclass(eq=False, slots=True)
class _Owner:
    """The asyncio task that makes a value of scope "worker", keeps it, and cleans it up."""

    ready: asyncio.Future[Any]
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Resources:
    """Makes injected values in one process, and keeps those of scope "worker" until `close`.

    `overrides` replaces providers; it is read at each use, so that a test can change it.
    """

    def __init__(self, overrides: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        self._overrides = overrides
        self._owners: dict[Callable[..., Any], _Owner] = {}
        # a value of scope "worker" does not belong to the attempt that needs it first
        self._variables = copy_context()
        self._variables.run(running_task.set, None)

    @asynccontextmanager
    async def injected(
        self, dependencies: Mapping[str, ProviderCall], context: TaskContext
    ) -> AsyncIterator[dict[str, Any]]:
        """Make the values of a handler's injected parameters, and clean up after it.

        The error of a handler is thrown into the generators at their `yield`; it stays the outcome, whatever they do.
        """
        stack = AsyncExitStack()
        made: dict[Callable[..., Any], Any] = {}
        try:
            yield {name: await self._value(call, context, stack, made) for name, call in dependencies.items()}
        except BaseException as error:
            await stack.__aexit__(type(error), error, error.__traceback__)
            raise
        await stack.aclose()

    async def close(self) -> None:
        """Clean up the values of scope "worker", the last one first. Safe twice, and before any was made."""
        while self._owners:
            _, owner = self._owners.popitem()
            owner.closing.set()
            if owner.task is not None:
                try:
                    await asyncio.wait([owner.task])
                except asyncio.CancelledError:
                    await cancel_and_wait([owner.task], timeout_s=0.1)
                    raise

    async def _value(
        self,
        call: ProviderCall,
        context: TaskContext | None,
        stack: AsyncExitStack,
        made: dict[Callable[..., Any], Any],
    ) -> Any:
        override = self._overrides.get(call.provider)
        if override is not None and override is not call.provider:
            scope: Scope = "worker" if call.scope == "worker" else "attempt"
            call = _provider_call(f"override of {_name(call.provider)}", Dependency(override, scope), ())
        if call.scope == "worker":
            return await self._kept_value(call)
        if call.provider not in made:
            made[call.provider] = await self._make(call, context, stack, made)
        return made[call.provider]

    async def _kept_value(self, call: ProviderCall) -> Any:
        owner = self._owners.get(call.provider)
        if owner is None:
            loop = asyncio.get_running_loop()
            owner = self._owners[call.provider] = _Owner(loop.create_future())
            owner.task = loop.create_task(self._own(call, owner), context=self._variables.copy())
        return await asyncio.shield(owner.ready)

    async def _own(self, call: ProviderCall, owner: _Owner) -> None:
        """Make a value, wait until it is not needed any more, and clean up, all in one asyncio task."""
        async with AsyncExitStack() as stack:
            try:
                value = await self._make(call, None, stack, {})
            except BaseException as error:  # noqa: BLE001 - raised where the value is needed
                if self._owners.get(call.provider) is owner:
                    del self._owners[call.provider]  # the next attempt tries again
                if isinstance(error, Exception):
                    owner.ready.set_exception(error)
                    owner.ready.exception()  # who needed it may have been canceled
                else:
                    owner.ready.cancel()
                return
            owner.ready.set_result(value)
            # The providers that it depends on come before it in `_owners`, because they were made for it.
            self._owners[call.provider] = self._owners.pop(call.provider, owner)
            await owner.closing.wait()

    async def _make(
        self,
        call: ProviderCall,
        context: TaskContext | None,
        stack: AsyncExitStack,
        made: dict[Callable[..., Any], Any],
    ) -> Any:
        """Call a provider: asynchronous ones in the event loop, others in a thread."""
        arguments = {name: await self._value(each, context, stack, made) for name, each in call.dependencies.items()}
        if call.context_parameter is not None:
            arguments[call.context_parameter] = context
        provider = call.provider
        kind = _kind(provider)
        if kind == "coroutine":
            return await provider(**arguments)
        if kind == "function":
            return await asyncio.to_thread(provider, **arguments)
        if kind == "async generator":
            waiting = asynccontextmanager(provider)(**arguments)
            value = await waiting.__aenter__()
            stack.push_async_exit(_logged_exit(provider, waiting.__aexit__))
            return value
        blocking = contextmanager(provider)(**arguments)
        value = await asyncio.to_thread(blocking.__enter__)
        stack.push_async_exit(_logged_exit(provider, lambda *error: asyncio.to_thread(blocking.__exit__, *error)))
        return value


def _logged_exit(
    provider: Callable[..., Any], leave: Callable[..., Awaitable[Any]]
) -> Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], Awaitable[bool]]:
    """Log the errors of a cleanup; an error of the handler passes through it."""

    async def leave_and_log(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            await leave(kind, error, trace)
        except Exception as raised:  # noqa: BLE001 - the provider is the user's code
            if raised is not error:
                log.error(
                    "dependency_cleanup_failed",
                    provider=_name(provider),
                    error=f"{type(raised).__qualname__}: {raised}",
                    traceback="".join(traceback.format_exception(raised)),
                )
        except BaseException as raised:
            if raised is not error:
                raise
        return False

    return leave_and_log
