"""Request models and path parameters: each body is validated before any work; unknown members are refused.

The OpenAPI document has the models under their names without `Request`.

Invariant: a valid value can be stored: text without NUL, numbers that fit their columns, JSON that PostgreSQL accepts.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

from fastapi import Path
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, create_model, model_validator

from interlock.model.json_values import ValueRefusedError, check_json
from interlock.model.options import (
    DELAY,
    DURATION,
    ID,
    LIMIT_KEYS,
    LIMIT_WEIGHT,
    MAX_ATTRIBUTES,
    MAX_LIMIT_KEYS,
    MAX_TAGS,
    MAX_WORKER_COUNT,
    PRIORITY,
    TEXT,
    TEXTS,
    TIME,
    TRIES,
    URL,
    ConflictPolicy,
    Scope,
    ValueType,
    check_one_start_time,
    options_in,
)
from interlock.model.timing import FIRST_YEAR, LAST_YEAR, is_in_calendar

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_JSON_DEPTH = 100
# Characters of a name, which may also stand in a path or a header. Shorter than in Python: 200 characters have at most
# 800 bytes in UTF-8, and MAX_TEXT_BYTES of the option table is the limit of the database.
MAX_NAME_LENGTH = 200
MAX_URL_LENGTH = 2_000  # characters
NO_NUL_PATTERN = r"^[^\x00]*$"
APP_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$"


def _check_storable(value: Any) -> Any:
    """Refuse JSON that cannot be stored; the error names the place."""
    if _is_nested_deeper(value, MAX_JSON_DEPTH):
        raise ValueError(f"is nested deeper than {MAX_JSON_DEPTH} levels")
    try:
        check_json(value)
    except ValueRefusedError as error:
        raise ValueError(str(error)) from None
    return value


def _is_nested_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [
            item
            for outer in layer
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not layer:
            return False
    return True


def _check_time(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("needs a time zone, such as 2030-01-01T09:00:00Z")
    if not is_in_calendar(value):
        raise ValueError(f"must be in the years {FIRST_YEAR} to {LAST_YEAR}")
    return value


def _check_not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be blank")
    return value


Text = Annotated[
    str, StringConstraints(min_length=1, max_length=1000, pattern=NO_NUL_PATTERN), AfterValidator(_check_not_blank)
]
NameLength = StringConstraints(min_length=1, max_length=MAX_NAME_LENGTH, pattern=NO_NUL_PATTERN)
Name = Annotated[str, NameLength, AfterValidator(_check_not_blank)]
Document = Annotated[dict[str, Any], AfterValidator(_check_storable)]
Moment = Annotated[datetime, AfterValidator(_check_time)]
Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\x00\s]+$", max_length=MAX_URL_LENGTH)]
AttributeValue = Annotated[
    bool | Annotated[int, Field(ge=-(2**63), lt=2**63)] | float | Annotated[str, StringConstraints(max_length=500)],
    AfterValidator(_check_storable),
]
Seconds = Annotated[float, Field(gt=DURATION.least, le=DURATION.most, allow_inf_nan=False)]

WorkerId = Annotated[str, Path(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$", description="The worker.")]
JobId = Annotated[UUID, Path(description="The job.")]
TaskId = Annotated[UUID, Path(description="The task.")]
NamespaceName = Annotated[
    str, Path(min_length=1, max_length=MAX_NAME_LENGTH, pattern=r"^[^\x00-\x1f\x7f]+$", description="The namespace.")
]


class Command(BaseModel):
    """The body of a request that changes state."""

    model_config = ConfigDict(extra="forbid")

    request_id: Annotated[str, NameLength] | None = Field(
        default=None,
        description="The same request again gives the same answer; an Idempotency-Key header does the same.",
    )


class ReasonedRequest(Command):
    """A transition with an optional reason."""

    reason: Text | None = Field(default=None, description="The reason, for the records.")


class NewWorkerRequest(Command):
    """A worker to create. The supervisor's own settings apply where a member is missing."""

    workspace_id: Name = Field(default="default", description="The owner; a label without further effect.")
    namespaces: Annotated[list[Name], Field(min_length=1, max_length=100)] | None = Field(
        default=None, description="The namespaces whose tasks it claims."
    )
    concurrency: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        default=None, description="Tasks that it runs at once."
    )
    app: Annotated[str, StringConstraints(pattern=APP_PATTERN, max_length=MAX_NAME_LENGTH)] | None = Field(
        default=None, description="The app whose tasks it runs, as package.module:app."
    )
    memory_limit_mb: Annotated[float, Field(gt=0, le=1_048_576, allow_inf_nan=False)] | None = Field(
        default=None, description="It is paused when it uses more memory."
    )
    lease: Annotated[float, Field(ge=1, le=86_400, allow_inf_nan=False)] | None = Field(
        default=None, description="Seconds without a heartbeat after which it loses its tasks."
    )
    grace: Annotated[float, Field(ge=0, le=25, allow_inf_nan=False)] | None = Field(
        default=None, description="Seconds that running tasks get to finish when it stops."
    )
    labels: Document = Field(default_factory=dict, description="Labels of your own.")


class NewJobRequest(Command):
    """A job to submit."""

    workflow: Name
    input: Document = Field(default_factory=dict)
    version: Name | None = Field(default=None, description="The version of the workflow; the newest by default.")
    parent_job_id: UUID | None = Field(default=None, description="The parent job.")
    worker_count: Annotated[int, Field(ge=1, le=MAX_WORKER_COUNT)] | None = Field(
        default=None, description="Steps that may run at once."
    )
    timeout: Seconds | None = Field(default=None, description="Seconds after which it is canceled.")
    correlation_id: UUID | None = None
    tags: Annotated[list[Name], Field(max_length=MAX_TAGS)] | None = Field(
        default=None, description="Tags to find it by; those of the workflow by default."
    )
    attributes: Annotated[dict[Name, AttributeValue], Field(max_length=MAX_ATTRIBUTES)] | None = Field(
        default=None, description="Attributes to find it by; those of the workflow by default."
    )
    callback_url: Url | None = Field(default=None, description="Webhook: this URL receives a POST when it has ended.")
    key: Name | None = Field(
        default=None, description="One job of the workflow with this key runs at a time; by default the workflow's key."
    )
    on_conflict: ConflictPolicy | None = Field(
        default=None, description="What to do while an unfinished job has the key: by default `queue`."
    )
    debounce: Seconds | None = Field(
        default=None, description="Seconds after which it starts, unless it is submitted again before; needs a key."
    )
    debounce_max: Seconds | None = Field(
        default=None, description="It starts so many seconds after the first submit at the latest."
    )


class RetryRequest(Command):
    """The step from which to run a job again; by default, the steps that failed."""

    step: Name | None = None


class SignalSentRequest(Command):
    """A signal for a step that waits, or will wait."""

    name: Name
    payload: Annotated[Any, AfterValidator(_check_storable)] = None


class ApprovalRequest(Command):
    """The decision on an approval step."""

    step: Name
    approved: bool = True
    comment: Text | None = None


class _NewTaskRequest(Command):
    """A task to enqueue."""

    type: Name
    input: Document = Field(default_factory=dict, description="The task's arguments, by name.")

    @model_validator(mode="after")
    def _one_time(self) -> _NewTaskRequest:
        check_one_start_time(self.model_dump(include={"run_at", "delay"}, exclude_none=True))
        return self


# The type of a request field for each type of the option table.
OPTION_TYPES: Mapping[ValueType, Any] = {
    TEXT: Name,
    TEXTS: Annotated[list[Name], Field(max_length=MAX_TAGS)],
    URL: Url,
    TIME: Moment,
    DURATION: Seconds,
    DELAY: Annotated[float, Field(ge=DELAY.least, le=DELAY.most, allow_inf_nan=False)],
    PRIORITY: Annotated[int, Field(ge=PRIORITY.least, le=PRIORITY.most)],
    TRIES: Annotated[int, Field(ge=TRIES.least, le=TRIES.most)],
    ID: UUID,
    LIMIT_KEYS: Name | Annotated[list[Name], Field(max_length=MAX_LIMIT_KEYS)],
    LIMIT_WEIGHT: float | Name,
}

if TYPE_CHECKING:
    NewTaskRequest = _NewTaskRequest
else:
    # pydantic's create_model gives the fields that the option table allows in requests; request_id is Command's
    NewTaskRequest = create_model(
        "NewTaskRequest",
        __base__=_NewTaskRequest,
        __doc__=_NewTaskRequest.__doc__,
        **{
            option.name: (OPTION_TYPES[option.type] | None, Field(default=None, description=option.help))
            for option in options_in(Scope.REST)
            if option.name not in _NewTaskRequest.model_fields
        },
    )


class CancelTaskRequest(ReasonedRequest):
    """A cancellation."""

    force: bool = Field(default=False, description="Cancel a running task at once, without waiting for its worker.")
