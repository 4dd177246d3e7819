"""Workflow: declares steps in Python and makes the definition document that is stored.

Invariant: each step is checked when it is declared, and the document as a whole before it is stored; every handler in
it is a task of the app.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from interlock.client.step_decorators import (
    JSON_CONVERSIONS,
    AnyStep,
    HandlerOptions,
    PlainOptions,
    Share,
    Step,
    StepDecorator,
    StepLike,
    StepOptions,
    default_name,
    handler_type,
    inherited_options,
)
from interlock.client.task import Task, place_of_caller
from interlock.client.wiring import Wiring
from interlock.errors import DefinitionError, InputError
from interlock.model.graph import (
    DEPENDENCY_FIELDS,
    KINDS_WITH_HANDLER,
    GraphError,
    check_definition,
    check_header,
    check_step,
)
from interlock.model.json_values import Codec, ValueRefusedError
from interlock.model.options import MAX_JOB_DEPTH
from interlock.model.versions import derive_version

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from interlock.client.registry import Definitions
    from interlock.client.step_decorators import Handler
    from interlock.model.options import ConflictPolicy

P = ParamSpec("P")
R = TypeVar("R")

_TASK_OPTIONS = ("timeout", "max_tries", "backoff", "priority", "executor", "transactional")
_TASK_ONLY_OPTIONS = ("executor", "transactional")
_UNNAMED_VERSION = "derived"  # until the document is complete
_STEP_NAME_FIELDS = (*DEPENDENCY_FIELDS, "branches")


class Workflow:
    """A DAG of steps, on which steps are declared; jobs of it are submitted by its name."""

    def __init__(
        self,
        app: Definitions,
        name: str,
        *,
        namespace: str = "default",
        version: str | None = None,
        input: Any = None,  # noqa: A002 - the name of the column
        input_schema: Mapping[str, Any] | None = None,
        timeout: float | timedelta | None = None,
        output: str | Mapping[str, str] | None = None,
        tags: Sequence[str] | None = None,
        attributes: Mapping[str, Any] | None = None,
        callback_url: str | None = None,
        key: str | None = None,
        on_conflict: ConflictPolicy | None = None,
    ) -> None:
        self._app = app
        self.name = name
        self.namespace = namespace
        self._named_version = version
        if input is not None and input_schema is not None:
            raise self._error("input_schema", "give either input or input_schema, not both")
        self._codec = None if input is None else Codec(input)
        self._schema = input_schema
        self._timeout = None if timeout is None else self._to_json(None, "timeout", timeout)
        job_options = {
            "output": output,
            "tags": tags,
            "attributes": attributes,
            "callback_url": callback_url,
            "key": key,
            "on_conflict": on_conflict,
        }
        self._job_options = {
            key: self._to_json(None, key, value) for key, value in job_options.items() if value is not None
        }
        self._steps: dict[str, AnyStep] = {}
        self._documents: dict[str, dict[str, Any]] = {}
        self._places: dict[str, str] = {}  # of the declarations of steps, for errors
        self._document: dict[str, Any] | None = None
        check_header(self._header(input_schema))

    def __repr__(self) -> str:
        return f"<Workflow {self.path}, {len(self._steps)} steps>"

    @property
    def path(self) -> str:
        """The name with which the types of its own handlers begin: that of the workflow, with the version if named."""
        return self.name if self._named_version is None else f"{self.name}/{self._named_version}"

    @property
    def version(self) -> str:
        """The version that the author names, or else the one that is derived from the definition."""
        return self._named_version or str(self.document["version"])

    @property
    def steps(self) -> Mapping[str, AnyStep]:
        """The steps declared so far, by name."""
        return self._steps

    @property
    def document(self) -> dict[str, Any]:
        """The definition that is stored; GraphError names the step and the field that are wrong."""
        if self._document is None:
            try:
                self._document = self._make_document()
            except GraphError as error:
                place = self._places.get(error.step or "")
                if place is None:
                    raise
                raise GraphError(
                    error.message, workflow=error.workflow, step=error.step, path=error.path, declared_at=place
                ) from None
        return self._document

    def _make_document(self) -> dict[str, Any]:
        schema = self._input_schema()
        document = self._header(schema)
        document["steps"] = [
            self._with_task_options(index, step) for index, step in enumerate(self._documents.values())
        ]
        check_definition(document)
        wiring = Wiring(document, self._app.tasks, has_model=self._codec is not None)
        wiring.check()
        if schema is None:
            document["input_schema"] = wiring.derive_schema()
        if self._named_version is None:
            document["version"] = derive_version(document)
        return document

    @overload
    def step(self, function: Callable[P, R], /) -> Step[P, R]: ...

    @overload
    def step(self, **options: Unpack[PlainOptions]) -> StepDecorator: ...

    def step(self, function: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]  # as in app.task
        """Declare a step with a function or a task as handler: `@wf.step`, or `@wf.step(after=[...])`."""
        decorator = StepDecorator(self, "plain", options)
        return decorator if function is None else decorator(function)

    def decision(self, *, branches: Sequence[StepLike], **options: Unpack[PlainOptions]) -> StepDecorator:
        """Declare a decision: a step whose function returns the names of the branches to run."""
        return StepDecorator(self, "decision", {**options, "branches": branches})

    def map(
        self,
        *,
        over: StepLike | None = None,
        over_input: str | None = None,
        strategy: Share = "all",
        **options: Unpack[HandlerOptions],
    ) -> StepDecorator:
        """Declare a fan-out: its function runs once per element of an upstream result or of an input field."""
        given = {"over": over, "over_input": over_input, "strategy": _unless("all", strategy)}
        return StepDecorator(self, "map", {**options, **given})

    def task(self, handler: Task[..., Any] | str, **options: Unpack[PlainOptions]) -> AnyStep:
        """Declare a step with a task of the app as handler; a name may be defined later."""
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
        """Declare a step that starts a job of another workflow and, with `wait`, waits until it has ended."""
        given = {
            "workflow": workflow.name if isinstance(workflow, Workflow) else workflow,
            "workflow_version": version,
            "wait": _unless(True, wait),  # noqa: FBT003 - the default
            "input": input,
            "compensate": compensate,
        }
        return self.add("child", name=name, **given, **options)

    def repeat(
        self,
        name: str,
        workflow: str | Workflow,
        *,
        until: str,
        max_repeats: int,
        version: str | None = None,
        input: Mapping[str, Any] | None = None,  # noqa: A002 - the name of the column
        compensate: Handler | None = None,
        **options: Unpack[StepOptions],
    ) -> AnyStep:
        """Declare a child step that runs jobs of a workflow one after another until a condition on the output is true.

        `until` compares `output`, `input` and `iteration`. The next job gets the input of the last one, updated with
        its output. The step fails if the condition is not true after `max_repeats` jobs.
        """
        given: dict[str, Any] = {
            "workflow": workflow.name if isinstance(workflow, Workflow) else workflow,
            "workflow_version": version,
            "repeat_until": until,
            "max_repeats": max_repeats,
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
        """Declare a step that ends after a duration, or at a time: a datetime or the input field that holds one."""
        return self.add("sleep", name=name, seconds=seconds, until=until, **options)

    def signal(
        self,
        name: str,
        *,
        signal: str | None = None,
        payload: Any = None,
        payload_schema: Mapping[str, Any] | None = None,
        timeout: float | timedelta | None = None,
        assignee: str | None = None,
        **options: Unpack[StepOptions],
    ) -> AnyStep:
        """Declare a step that waits for a signal, by default of its own name; its result is the payload.

        `payload` is the type of the payload: a pydantic model, a dataclass, a TypedDict or any other JSON type.
        """
        given: dict[str, Any] = {
            "signal": name if signal is None else signal,
            "payload_schema": self._payload_schema(name, payload, payload_schema),
            "timeout": timeout,
            "assignee": assignee,
        }
        return self.add("signal", name=name, **given, **options)

    def approval(
        self,
        name: str,
        *,
        timeout: float | timedelta | None = None,
        assignee: str | None = None,
        **options: Unpack[StepOptions],
    ) -> AnyStep:
        """Declare a step that waits for an approval; a rejection fails it.

        `assignee` is who is to answer: a name, or a path into the job's input such as `input.manager`.
        """
        return self.add("approval", name=name, timeout=timeout, assignee=assignee, **options)

    def add(
        self,
        kind: str,
        handler: Handler | None = None,
        *,
        name: str | None = None,
        compensate: Handler | None = None,
        **options: Any,
    ) -> AnyStep:
        """Declare a step of any kind; the other methods call this one."""
        name = default_name(handler) if name is None else name
        if name in self._documents:
            raise self._error("name", "there are two steps of this name; give one of them another: name=...", name)
        own = f"{self.path}/{name}"
        task_options = {key: options[key] for key in _TASK_OPTIONS if options.get(key) is not None}
        document = self._step_document(kind, name, options)
        if kind in KINDS_WITH_HANDLER and handler is not None:
            document["type"] = handler_type(handler, own)
        if compensate is not None:
            document["compensate"] = handler_type(compensate, f"{own}:compensate")
        check_step(self.name, len(self._documents), document)
        namespace = document["namespace"]
        step = self._register(kind, name, handler, own, {**task_options, "namespace": namespace})
        if compensate is not None:
            self._register(kind, name, compensate, f"{own}:compensate", {"namespace": namespace})
        self._documents[name], self._steps[name], self._document = document, step, None
        place = place_of_caller()
        if place is not None:
            self._places[name] = place
        return step

    def encode(self, input: Any = None) -> dict[str, Any]:  # noqa: A002 - the name of the column
        """Check the input of a job and return it as JSON; InputError names the place that is wrong."""
        from interlock.model.json_schema import check_input, is_json  # noqa: PLC0415 - jsonschema is slow to import

        given: Any = {} if input is None else dict(input) if isinstance(input, Mapping) else input
        if self._codec is not None and not is_json(given):
            try:
                given = self._codec.encode(given)
            except ValueRefusedError as error:
                raise InputError(f"workflow {self.name}: input: {error}") from None
        check_input(self.document, given)
        encoded: dict[str, Any] = given
        return encoded

    def _header(self, schema: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": _UNNAMED_VERSION if self._named_version is None else self._named_version,
            "namespace": self.namespace,
            "input_schema": schema,
            "timeout": self._timeout,
            **self._job_options,
        }

    def _input_schema(self) -> Mapping[str, Any] | None:
        if self._codec is None:
            return self._schema
        from interlock.model.json_schema import input_schema_of  # noqa: PLC0415 - jsonschema is slow to import

        try:
            return input_schema_of(self._codec)
        except ValueError as error:
            raise self._error("input", str(error)) from error

    def _payload_schema(self, step: str, payload: Any, schema: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if payload is None:
            return schema
        if schema is not None:
            raise self._error("payload_schema", "give either payload or payload_schema, not both", step)
        from interlock.model.json_schema import schema_of  # noqa: PLC0415 - jsonschema is slow to import

        try:
            return schema_of(Codec(payload))
        except ValueError as error:
            raise self._error("payload", str(error), step) from error

    def _error(self, field: str, message: str, step: str | None = None) -> GraphError:
        path = (field,) if step is None else ("steps", len(self._documents), field)
        return GraphError(message, workflow=str(self.name), step=step, path=path)

    def _step_document(self, kind: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        fields = {
            key: self._to_json(name, key, value)
            for key, value in options.items()
            if value is not None and key not in _TASK_ONLY_OPTIONS
        }
        if fields.get("over") is not None and fields["over"] not in fields.get("after", ()):
            fields["after"] = [fields["over"], *fields.get("after", ())]
        document = {"name": name, "kind": kind, "namespace": self.namespace, "after": [], **fields}
        return {key: value for key, value in document.items() if value is not None}

    def _to_json(self, step: str | None, field: str, value: Any) -> Any:
        try:
            if field == "over":
                return self._step_name(value)
            if field in _STEP_NAME_FIELDS:
                several = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
                names = [self._step_name(each) for each in several]
                # a derived version must not depend on the order
                return sorted(names, key=str) if isinstance(value, set | frozenset) else names
            return JSON_CONVERSIONS[field](value) if field in JSON_CONVERSIONS else value
        except (ValueError, DefinitionError) as error:
            raise self._error(field, str(error), step) from None

    def _step_name(self, given: Any) -> Any:
        """Return the name of a step that is given by name, by object, or by its function or task."""
        if isinstance(given, AnyStep):
            if given.workflow is not self:
                raise ValueError(f"{given!r} is a step of another workflow")
            return given.name
        if not callable(given) and not isinstance(given, Task):
            return given
        found = [step.name for step in self._steps.values() if given in (step.function, step.task)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} steps have the handler {given!r}; give the name of the step")
        return found[0]

    def _register(self, kind: str, name: str, handler: Any, own: str, task_options: dict[str, Any]) -> AnyStep:
        """Register a task for the handler if it is a function, and return the step."""
        function = handler.function if isinstance(handler, Step) else handler
        if function is not None and not isinstance(function, str | Task):
            options: Any = {**task_options, "name": own}
            return Step(self, name, kind, self._app.define(function, options), function)
        for option in _TASK_ONLY_OPTIONS:
            if option in task_options:
                raise self._error(option, "set this in the definition of the task, @app.task(...)", name)
        if not isinstance(function, Task):
            return AnyStep(self, name, kind)
        if self._app.tasks.get(function.name) is not function:
            raise self._error("handler", f"the task {function.name!r} belongs to another app", name)
        called: Any = function
        return Step(self, name, kind, function, called) if callable(called) else AnyStep(self, name, kind, function)

    def _with_task_options(self, index: int, step: dict[str, Any]) -> dict[str, Any]:
        """Add the options of the handler's task that the step does not set."""
        for field in ("type", "compensate"):
            if step.get(field) is not None and step[field] not in self._app.tasks:
                known = ", ".join(sorted(self._app.tasks)) or "none"
                message = f"the app has no task {step[field]!r}; it has {known}"
                raise GraphError(message, workflow=self.name, step=step["name"], path=("steps", index, field))
        step = {**step, **self._compensation_options(step.get("compensate"))}
        if step["kind"] not in KINDS_WITH_HANDLER:
            return step
        task = self._app.tasks[step["type"]]
        priority = {"priority": task.priority} if task.priority else {}
        return {**priority, "max_tries": task.max_tries, **inherited_options(task), **step}

    def _compensation_options(self, compensate: str | None) -> dict[str, Any]:
        """Return the options of the task that compensates a step."""
        task = self._app.tasks.get(compensate or "")
        if task is None:
            return {}
        options = {"tries": task.max_tries, "timeout": task.timeout, **inherited_options(task)}
        return {f"compensate_{key}": value for key, value in options.items() if value is not None}


def check_nesting(documents: Iterable[Mapping[str, Any]]) -> None:
    """Raise GraphError if child jobs would nest too deep; a workflow that starts itself is checked at run time."""
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
            problem = (
                f"child jobs nest at most {MAX_JOB_DEPTH} deep, and here it is {len(found) - 1}: {' -> '.join(found)}"
            )
            raise GraphError(problem, workflow=name, path=("steps",))


def _unless(default: Any, value: Any) -> Any:
    return None if value == default else value
