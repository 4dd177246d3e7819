"""StepContext: a step as its handler sees it, its arguments, and the document that stores its outcome.

Invariant: an argument comes from one place, by a fixed order: the row's own input (`item` and `index` of a part,
`result` of a compensation), the results of upstream steps, `input`, the fields of the job's input.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from interlock.client.context import TaskContext
from interlock.errors import PermanentError
from interlock.model.json_values import ValueRefusedError, check_json

if TYPE_CHECKING:
    from collections.abc import Mapping
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
        """The errors of failed steps that are named in `on_failure`, `always` or `recovers`, by name."""
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
        """Return the error of a step in `on_failure`, `always` or `recovers`; None if it did not fail."""
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


@cache
def parameters_of(definition: Task[..., Any]) -> HandlerParameters | None:
    """List the parameters that a handler gets from its job; None for a command, which takes every argument."""
    if definition.command is not None:
        return None
    parameters = [
        parameter
        for name, parameter in inspect.signature(definition.function).parameters.items()
        if name != definition.context_parameter and name not in definition.dependencies
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
) -> StepExecutionResult:
    """Make the document that is stored as the output of a step."""
    return {
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


def _milliseconds(started_at: datetime | None, completed_at: datetime | None) -> float | None:
    if started_at is None or completed_at is None:
        return None
    return round((completed_at - started_at).total_seconds() * 1000, 3)
