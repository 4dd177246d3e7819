"""A workflow: steps declared in Python, and the definition document that is made of them.

Invariant: a step that was declared makes sense by itself; a document that was given makes sense as a whole, and every
handler that it names is a task of the app.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from interlock.client.step_context import unbindable
from interlock.client.step_decorators import (
    PLAIN,
    AnyStep,
    HandlerOptions,
    PlainOptions,
    Share,
    Step,
    StepDecorator,
    StepLike,
    StepOptions,
    carried,
    own_name,
    type_of,
)
from interlock.client.task import Task
from interlock.errors import DefinitionError, InputError
from interlock.model.graph import (
    BUILT_IN_HANDLER,
    KINDS_WITH_HANDLER,
    GraphError,
    check_definition,
    check_header,
    check_step,
)
from interlock.model.json_values import Codec, ValueRefusedError
from interlock.model.options import MAX_JOB_DEPTH

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from interlock.client.registry import Definitions
    from interlock.client.step_decorators import Handler

P = ParamSpec("P")
R = TypeVar("R")

_OF_A_TASK = ("timeout", "max_tries", "backoff", "priority", "executor", "transactional")
_ONLY_OF_A_TASK = ("executor", "transactional")
_NAMES = ("after", "after_failure", "branches")


class Workflow:
    """A DAG of steps: declare them on it, and submit jobs of it by its name."""

    def __init__(
        self,
        app: Definitions,
        name: str,
        *,
        namespace: str = "default",
        version: str = "1",
        input: Any = None,  # noqa: A002 - the name of the column
        input_schema: Mapping[str, Any] | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        self._app = app
        self.name = name
        self.namespace = namespace
        self.version = version
        if input is not None and input_schema is not None:
            raise self._refused("input_schema", "give this or input, not both")
        self._codec = None if input is None else Codec(input)
        self._schema = input_schema
        self._timeout = None if timeout is None else self._plain(None, "timeout", timeout)
        self._steps: dict[str, AnyStep] = {}
        self._documents: dict[str, dict[str, Any]] = {}
        self._whole: dict[str, Any] | None = None
        check_header(self._head(input_schema))

    def __repr__(self) -> str:
        return f"<Workflow {self.name}/{self.version}, {len(self._steps)} steps>"

    @property
    def steps(self) -> Mapping[str, AnyStep]:
        """The steps that are declared so far, by name."""
        return self._steps

    @property
    def document(self) -> dict[str, Any]:
        """The definition as it is stored; GraphError names the place when it makes no sense as a whole."""
        if self._whole is None:
            schema = self._input_schema()
            whole = self._head(schema)
            whole["steps"] = [self._completed(index, step) for index, step in enumerate(self._documents.values())]
            check_definition(whole)
            for index, step in enumerate(whole["steps"]):
                self._check_parameters(index, step, schema)
            self._whole = whole
        return self._whole

    @overload
    def step(self, function: Callable[P, R], /) -> Step[P, R]: ...

    @overload
    def step(self, **options: Unpack[PlainOptions]) -> StepDecorator: ...

    def step(self, function: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]  # as in app.task
        """Make a step of a function, or of a task of the app: `@wf.step`, or `@wf.step(after=[...])`."""
        decorator = StepDecorator(self, "plain", options)
        return decorator if function is None else decorator(function)

    def decision(self, *, branches: Sequence[StepLike], **options: Unpack[PlainOptions]) -> StepDecorator:
        """Make a step whose function returns the names of those branches that are to run."""
        return StepDecorator(self, "decision", {**options, "branches": branches})

    def map(
        self,
        *,
        over: StepLike | None = None,
        over_input: str | None = None,
        strategy: Share = "all",
        **options: Unpack[HandlerOptions],
    ) -> StepDecorator:
        """Make a step that runs its function once per element of an upstream result, or of a field of the input."""
        given = {"over": over, "over_input": over_input, "strategy": _unless("all", strategy)}
        return StepDecorator(self, "map", {**options, **given})

    def task(self, handler: Task[..., Any] | str, **options: Unpack[PlainOptions]) -> AnyStep:
        """Make a step of a task of the app, or of its type, which may be defined later."""
        return self.add("plain", handler, **options)

    def child(
        self,
        name: str,
        workflow: str | Workflow,
        *,
        version: str | None = None,
        wait: bool = True,
        input: Mapping[str, Any] | None = None,  # noqa: A002 - the name of the column
        compensate: Handler | None = None,
        **options: Unpack[StepOptions],
    ) -> AnyStep:
        """Make a step that starts a job of another workflow, and waits for its end unless told otherwise."""
        given = {
            "workflow": workflow.name if isinstance(workflow, Workflow) else workflow,
            "workflow_version": version,
            "wait": _unless(True, wait),  # noqa: FBT003 - the default
            "input": input,
            "compensate": compensate,
        }
        return self.add("child", name=name, **given, **options)

    def sleep(
        self,
        name: str,
        seconds: float | timedelta | None = None,
        *,
        until: datetime | str | None = None,
        **options: Unpack[StepOptions],
    ) -> AnyStep:
        """Make a step that ends after a time, or at one: a moment, or a field of the input that holds one."""
        return self.add("sleep", name=name, seconds=seconds, until=until, **options)

    def signal(
        self,
        name: str,
        *,
        signal: str | None = None,
        timeout: float | timedelta | None = None,
        **options: Unpack[StepOptions],
    ) -> AnyStep:
        """Make a step that waits for a signal, of its own name unless told otherwise; its result is the payload."""
        return self.add("signal", name=name, signal=name if signal is None else signal, timeout=timeout, **options)

    def approval(
        self, name: str, *, timeout: float | timedelta | None = None, **options: Unpack[StepOptions]
    ) -> AnyStep:
        """Make a step that waits for a person's yes; a no fails it."""
        return self.add("approval", name=name, timeout=timeout, **options)

    def add(
        self,
        kind: str,
        handler: Handler | None = None,
        *,
        name: str | None = None,
        compensate: Handler | None = None,
        **options: Any,
    ) -> AnyStep:
        """Declare a step of any kind; `@wf.step` and the others come here."""
        name = own_name(handler) if name is None else name
        if name in self._documents:
            raise self._refused("name", "there are two steps of this name; give one of them another: name=...", name)
        own = f"{self.name}/{self.version}/{name}"
        of_task = {key: options[key] for key in _OF_A_TASK if options.get(key) is not None}
        document = self._document_of(kind, name, options)
        if kind in KINDS_WITH_HANDLER and handler is not None:
            document["type"] = type_of(handler, own)
        if compensate is not None:
            document["compensate"] = type_of(compensate, f"{own}:compensate")
        check_step(self.name, len(self._documents), document)
        home = document["namespace"]
        step = self._registered(kind, name, handler, own, {**of_task, "namespace": home})
        if compensate is not None:
            self._registered(kind, name, compensate, f"{own}:compensate", {"namespace": home})
        self._documents[name], self._steps[name], self._whole = document, step, None
        return step

    def encode(self, input: Any = None) -> dict[str, Any]:  # noqa: A002 - the name of the column
        """Give the input of a job as JSON, if the workflow takes it; InputError names the place that is wrong."""
        # not at the top: the schema's library is slow to import, and many programs only enqueue tasks
        from interlock.model.json_schema import check_input, is_json  # noqa: PLC0415 - heavy, and seldom needed

        given: Any = {} if input is None else dict(input) if isinstance(input, Mapping) else input
        if self._codec is not None and not is_json(given):
            try:
                given = self._codec.encode(given)
            except ValueRefusedError as error:
                raise InputError(f"workflow {self.name}: input: {error}") from None
        check_input(self.document, given)
        encoded: dict[str, Any] = given
        return encoded

    def _head(self, schema: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": self.version,
            "namespace": self.namespace,
            "input_schema": schema,
            "timeout": self._timeout,
        }

    def _input_schema(self) -> Mapping[str, Any] | None:
        if self._codec is None:
            return self._schema
        from interlock.model.json_schema import schema_of  # noqa: PLC0415 - the same as in encode

        try:
            return schema_of(self._codec)
        except ValueError as error:
            raise self._refused("input", str(error)) from error

    def _refused(self, field: str, message: str, step: str | None = None) -> GraphError:
        path = (field,) if step is None else ("steps", len(self._documents), field)
        return GraphError(message, workflow=str(self.name), step=step, path=path)

    def _document_of(self, kind: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        fields = {
            key: self._plain(name, key, value)
            for key, value in options.items()
            if value is not None and key not in _ONLY_OF_A_TASK
        }
        if fields.get("over") is not None and fields["over"] not in fields.get("after", ()):
            fields["after"] = [fields["over"], *fields.get("after", ())]
        made_of = {} if kind in KINDS_WITH_HANDLER else {"type": BUILT_IN_HANDLER}
        document = {"name": name, "kind": kind, **made_of, "namespace": self.namespace, "after": [], **fields}
        return {key: value for key, value in document.items() if value is not None}

    def _plain(self, step: str | None, field: str, value: Any) -> Any:
        try:
            if field == "over":
                return self._name_of(value)
            if field in _NAMES:
                several = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
                return [self._name_of(each) for each in several]
            return PLAIN[field](value) if field in PLAIN else value
        except (ValueError, DefinitionError) as error:
            raise self._refused(field, str(error), step) from None

    def _name_of(self, given: Any) -> Any:
        """Give the name of a step that is named by its name, by itself, or by its function or task."""
        if isinstance(given, AnyStep):
            if given.workflow is not self:
                raise ValueError(f"{given!r} is a step of another workflow")
            return given.name
        if not callable(given) and not isinstance(given, Task):
            return given
        found = [step.name for step in self._steps.values() if given in (step.function, step.task)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} steps are made of {given!r}; name the step that is meant")
        return found[0]

    def _registered(self, kind: str, name: str, handler: Any, own: str, of_task: dict[str, Any]) -> AnyStep:
        """See to it that the app has a task for the handler, and give the step."""
        function = handler.function if isinstance(handler, Step) else handler
        if function is not None and not isinstance(function, str | Task):
            options: Any = {**of_task, "name": own}
            return Step(self, name, kind, self._app.define(function, options), function)
        for option in _ONLY_OF_A_TASK:
            if option in of_task:
                raise self._refused(option, "this is for the definition of the task to say", name)
        if not isinstance(function, Task):
            return AnyStep(self, name, kind)
        if self._app.tasks.get(function.name) is not function:
            raise self._refused("handler", f"the task {function.name!r} belongs to another app", name)
        called: Any = function
        return Step(self, name, kind, function, called) if callable(called) else AnyStep(self, name, kind, function)

    def _check_parameters(self, index: int, step: dict[str, Any], schema: Mapping[str, Any] | None) -> None:
        if step["kind"] not in KINDS_WITH_HANDLER:
            return
        name = unbindable(self._app.tasks[step["type"]], step, self._documents.keys(), schema or {})
        if name is not None:
            told = f"the parameter {name!r} of its handler is no step that it comes after, and no field of the input"
            if name == step.get("over"):
                told = f"a part of a map is handed its item, and not the whole of {name!r}"
            raise GraphError(told, workflow=self.name, step=step["name"], path=("steps", index, "after"))

    def _completed(self, index: int, step: dict[str, Any]) -> dict[str, Any]:
        """Add what the handler's task says where the step says nothing."""
        for field in ("type", "compensate"):
            if step.get(field) is not None and step[field] not in self._app.tasks:
                known = ", ".join(sorted(name for name in self._app.tasks if name != BUILT_IN_HANDLER)) or "none"
                told = f"the app has no task {step[field]!r}; it has {known}"
                raise GraphError(told, workflow=self.name, step=step["name"], path=("steps", index, field))
        step = {**step, **self._undone(step.get("compensate"))}
        if step["kind"] not in KINDS_WITH_HANDLER:
            return step
        task = self._app.tasks[step["type"]]
        priority = {"priority": task.priority} if task.priority else {}
        return {**priority, "max_tries": task.max_tries, **carried(task), **step}

    def _undone(self, compensate: str | None) -> dict[str, Any]:
        """Give what the task says that undoes a step: its own tries, and what else it has of its own."""
        task = self._app.tasks.get(compensate or "")
        if task is None:
            return {}
        told = {"tries": task.max_tries, "timeout": task.timeout, **carried(task)}
        return {f"compensate_{key}": value for key, value in told.items() if value is not None}


def check_nesting(documents: Iterable[Mapping[str, Any]]) -> None:
    """Refuse workflows whose child jobs would nest deeper than jobs can; one that starts itself is left to run."""
    children: dict[str, list[str]] = {}
    for document in documents:
        started = [step["workflow"] for step in document["steps"] if step.get("kind") == "child"]
        children.setdefault(document["name"], []).extend(started)
    chains: dict[str, tuple[str, ...]] = {}

    def chain(name: str, above: frozenset[str]) -> tuple[str, ...]:
        if name not in chains:
            below = [chain(child, above | {name}) for child in children.get(name, ()) if child not in above | {name}]
            chains[name] = (name, *max(below, key=len, default=()))
        return chains[name]

    for name in children:
        found = chain(name, frozenset())
        if len(found) > MAX_JOB_DEPTH + 1:
            told = (
                f"child jobs nest at most {MAX_JOB_DEPTH} deep, and here it is {len(found) - 1}: {' -> '.join(found)}"
            )
            raise GraphError(told, workflow=name, path=("steps",))


def _unless(default: Any, value: Any) -> Any:
    return None if value == default else value
