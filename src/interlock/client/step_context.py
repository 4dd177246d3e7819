"""StepContext: a step as its handler sees it, its arguments, and the document that stores its outcome.

Invariant: an argument comes from one place, by a fixed order: the row's own input (`item` and `index` of a part,
`result` of a compensation), the results of upstream steps, `input`, the fields of the job's input.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, cast

from interlock.client.context import TaskContext
from interlock.errors import PermanentError
from interlock.lifecycle import JOB, JobState
from interlock.model.graph import require_approval
from interlock.model.json_values import ValueRefusedError, check_json
from interlock.model.options import MAX_JOB_DEPTH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet
    from datetime import datetime
    from uuid import UUID

    from interlock.client.task import Task

NOTHING: Mapping[str, Any] = {}


class StepContext(TaskContext):
    """One attempt at a step. A handler gets it as the parameter that is annotated with this type."""

    __slots__ = ("job", "orchestration_metadata")

    def __init__(
        self,
        task_id: UUID | None = None,
        task_type: str = "",
        *,
        job: Mapping[str, Any] | None = None,
        **attempt: Any,
    ) -> None:
        super().__init__(task_id, task_type, **attempt)
        self.job: Mapping[str, Any] = job or NOTHING
        self.orchestration_metadata: dict[str, Any] = {}

    @property
    def job_input(self) -> Any:
        """The input of the job."""
        return self.job.get("job_input")

    @property
    def results(self) -> Mapping[str, Any]:
        """The results of upstream steps that are done, by name."""
        return self.job.get("results") or NOTHING

    @property
    def errors(self) -> Mapping[str, Any]:
        """The errors of the steps named in `after_failure`, by name."""
        return self.job.get("errors") or NOTHING

    @property
    def config(self) -> Mapping[str, Any]:
        """The `config` of the step's definition."""
        return self.job.get("config") or NOTHING

    def get_input(self, name: str, default: Any = None) -> Any:
        """Return a field of the job's input."""
        given = self.job.get("job_input")
        return given.get(name, default) if isinstance(given, dict) else default

    def get_dependency_result(self, step: str, default: Any = None) -> Any:
        """Return the result of an upstream step; the default if it was skipped or failed."""
        return self.results.get(step, default)

    def get_dependency_error(self, step: str) -> Any:
        """Return the error of a step named in `after_failure`; None if it did not fail."""
        return self.errors.get(step)

    def get_config(self, name: str, default: Any = None) -> Any:
        """Return a value of the step's `config`."""
        return self.config.get(name, default)

    def set_metadata(self, key: str, value: Any) -> None:
        """Store a value beside the result, as orchestration metadata."""
        try:
            check_json({key: value})
        except ValueRefusedError as error:
            raise ValueError(f"metadata cannot be stored: {error}") from None
        self.orchestration_metadata[key] = value


class HandlerParameters(NamedTuple):
    """The parameters of a handler, each with whether it is required, and whether it takes **kwargs."""

    parameters: tuple[tuple[str, bool], ...]
    takes_more: bool


def bind(definition: Task[..., Any], claimed_input: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the arguments of a step's handler by name, without the context, converted to its annotations."""
    return definition.decode(gather(definition, claimed_input, job))


def gather(definition: Task[..., Any], claimed_input: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the same arguments as JSON, for a handler in another process, which converts them itself."""
    raise_if_refused(job)
    whole = job.get("job_input")
    fields: Mapping[str, Any] = whole if isinstance(whole, dict) else NOTHING
    taken = parameters_of(definition)
    if taken is None:
        return {**fields, **(job.get("results") or NOTHING), **claimed_input}
    given = {**fields, "input": whole, **(job.get("results") or NOTHING), **claimed_input}
    arguments = {**fields} if taken.takes_more else {}
    for name, required in taken.parameters:
        if name in given:
            arguments[name] = given[name]
        elif required:
            raise PermanentError(_missing(definition.name, name, job))
    return arguments


def raise_if_refused(job: Mapping[str, Any]) -> None:
    """Raise PermanentError if the job's document says that the step must fail without running its handler."""
    refused = job.get("refused")
    if refused is not None:
        raise PermanentError(str(refused))


def unbindable(
    definition: Task[..., Any], step: Mapping[str, Any], steps: AbstractSet[str], schema: Mapping[str, Any]
) -> str | None:
    """Find a required parameter of a step's handler for which the definition can never provide a value."""
    taken = parameters_of(definition)
    required = set() if taken is None else {name for name, needed in taken.parameters if needed}
    upstreams = {*step.get("after", ()), *step.get("after_failure", ())}
    if step["kind"] == "map":  # a part gets its item, not the whole list
        upstreams = {*upstreams, "item", "index"} - {step.get("over")}
    listed = {step.get("over_input")}
    missing = required - upstreams - (set(schema.get("properties", ())) - listed) - {"input"}
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return min(missing if is_closed else missing & (steps | listed), default=None)


@cache
def parameters_of(definition: Task[..., Any]) -> HandlerParameters | None:
    """List the parameters of a handler except its context; None for a command, which takes every argument."""
    if definition.command is not None:
        return None
    parameters = [
        parameter
        for name, parameter in inspect.signature(definition.function).parameters.items()
        if name != definition.context_parameter
    ]
    named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    return HandlerParameters(
        tuple((parameter.name, parameter.default is parameter.empty) for parameter in named),
        takes_more=len(named) < len(parameters),
    )


def _missing(step: str, name: str, job: Mapping[str, Any]) -> str:
    message = f"step {step}: there is no value for its parameter {name!r}: "
    if name in (job.get("errors") or NOTHING):
        return f"{message}step {name!r} failed, so it has no result; give the parameter a default"
    return (
        f"{message}no upstream step of that name has a result, and the job's input has no such field; "
        "give the parameter a default if this can happen"
    )


class StepExecutionMetadata(TypedDict):
    """When, where and how one attempt at a step ran."""

    started_at: str | None
    completed_at: str | None
    execution_ms: float | None
    worker_id: str | None
    attempt: int
    retryable: bool


class StepExecutionResult(TypedDict):
    """The document that is stored as the output of a step, done or in error."""

    step: str
    success: bool
    result: Any
    status: Literal["completed", "failed"]
    error: Mapping[str, Any] | None
    metadata: StepExecutionMetadata
    orchestration_metadata: Mapping[str, Any]


def step_result(
    step: str,
    *,
    success: bool,
    result: Any = None,
    error: Mapping[str, Any] | None = None,
    started_at: datetime | None = None,
    completed_at: datetime | None = None,
    worker_id: str | None = None,
    attempt: int = 0,
    retryable: bool | None = None,
    orchestration_metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the document that is stored as the output of a step."""
    document: StepExecutionResult = {
        "step": step,
        "success": success,
        "result": result,
        "status": "completed" if success else "failed",
        "error": error,
        "metadata": {
            "started_at": None if started_at is None else started_at.isoformat(),
            "completed_at": None if completed_at is None else completed_at.isoformat(),
            "execution_ms": _milliseconds(started_at, completed_at),
            "worker_id": worker_id,
            "attempt": attempt,
            "retryable": bool(error and error.get("retryable")) if retryable is None else retryable,
        },
        "orchestration_metadata": orchestration_metadata or {},
    }
    return cast("dict[str, Any]", document)


def _milliseconds(started_at: datetime | None, completed_at: datetime | None) -> float | None:
    if started_at is None or completed_at is None:
        return None
    return round((completed_at - started_at).total_seconds() * 1000, 3)


async def end_step(ctx: StepContext) -> Any:
    """Complete a step without a user's handler (sleep, signal, approval, child) from the job's document.

    The document says so if the step must fail: a child job that is too deep, a signal that came too late.
    """
    raise_if_refused(ctx.job)
    complete = _COMPLETIONS.get(ctx.job.get("kind", ""))
    return None if complete is None else complete(ctx.job)


def _child_result(job: Mapping[str, Any]) -> Any:
    child = job.get("child") or NOTHING
    id_, status, error = child.get("job_id"), child.get("status"), child.get("error")
    if id_ is None:
        raise PermanentError(
            f"the child job was not started: {_format_error(error) or f'jobs nest at most {MAX_JOB_DEPTH} deep'}"
        )
    if job.get("wait") is False or status not in JOB.final:
        return {"job_id": id_}
    if status == JobState.COMPLETED:
        return child.get("output")
    raise PermanentError(": ".join(filter(None, (f"the child job {id_} ended as {status}", _format_error(error)))))


def _format_error(error: Any) -> str | None:
    if isinstance(error, dict):
        message = error.get("reason") or error.get("message")
        steps = error.get("steps")
        if message is None and isinstance(steps, dict):
            message = "; ".join(f"step {name} failed: {_format_error(each) or each}" for name, each in steps.items())
        return None if message is None else str(message)
    return None if error is None else str(error)


_COMPLETIONS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "signal": lambda job: job.get("signal"),
    "approval": lambda job: require_approval(job.get("signal")),
    "child": _child_result,
}
