"""Request models and parameters: each body is validated before any work; unknown members and filters are refused.

The OpenAPI document has the models under their names without `Request`.

Invariant: a valid value can be stored: text without NUL, numbers that fit their columns, JSON that PostgreSQL accepts.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from uuid import UUID

from fastapi import Path, Request, Response
from fastapi.routing import APIRoute
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    StringConstraints,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from interlock.config import MAX_NAME_LENGTH, ends_addresses
from interlock.lifecycle import JobState, SupervisedWorkerState, TaskRowState
from interlock.model.graph import suggestion
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
    NAME,
    PRIORITY,
    TEXT,
    TEXTS,
    TIME,
    TRIES,
    URL,
    ConflictPolicy,
    Scope,
    ValueType,
    check_name,
    check_one_start_time,
    options_in,
)
from interlock.model.timing import FIRST_YEAR, LAST_YEAR, is_in_calendar
from interlock.store.access import MAX_TOKEN_NAME_LENGTH, MAX_TOKEN_NAMESPACES, TokenScope
from interlock.store.limits import MAX_INTEGER
from interlock.store.pools import MAX_DESIRED, NAME_PATTERN
from interlock.store.workers import WorkerSpec
from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from fastapi.dependencies.models import Dependant

MAX_JSON_DEPTH = 100
MAX_ERRORS = 20_000  # of one body that are described; a bulk call with a few in each element has fewer
MAX_URL_LENGTH = 2_000  # characters
MAX_BULK_TASKS = 10_000
MAX_BULK_JOBS = 1_000
MAX_FILTER_IDS = 1_000  # tasks that a filter names
MAX_ACTION_BATCH = 10_000  # tasks that one request changes
MAX_JOB_ACTION_BATCH = 1_000
NO_NUL_PATTERN = r"^[^\x00]*$"
NO_CONTROL_PATTERN = r"^[^\x00-\x1f\x7f]+$"
WORKER_SPEC_MEMBERS = tuple(field.name for field in fields(WorkerSpec))
APP_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$"


class ApiRoute(APIRoute):
    """A route of the API that refuses query parameters which it does not have, if it has any.

    A list with a misspelled filter would otherwise be the list of everything.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that handles a request."""
        handle = super().get_route_handler()
        known = frozenset(field.alias for each in all_dependants(self.dependant) for field in each.query_params)
        if not known:
            return handle

        async def handle_known(request: Request) -> Response:
            if request.scope["query_string"]:
                _check_parameters(request.query_params, known)
            return await handle(request)

        return handle_known


def all_dependants(dependant: Dependant) -> Iterator[Dependant]:
    """Yield a dependant and those that it depends on."""
    yield dependant
    for each in dependant.dependencies:
        yield from all_dependants(each)


def _check_parameters(given: Mapping[str, str], known: frozenset[str]) -> None:
    for name in given:
        if name not in known:
            field, message = f"query.{name:.100}", f"there is no such parameter{suggestion(name, sorted(known))}"
            raise Problem("invalid_request", f"{field}: {message}", {"errors": [{"field": field, "message": message}]})


def _check_number_of_attributes(value: Any) -> Any:
    """Refuse too many at once: the values are checked first otherwise."""
    if isinstance(value, dict) and len(value) > MAX_ATTRIBUTES:
        raise ValueError(f"must be at most {MAX_ATTRIBUTES}, got {len(value)}")
    return value


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


def _check_ends_addresses(value: str) -> str:
    if not ends_addresses(value):
        raise ValueError("must have no control characters, and not be . or ..")
    return value


Text = Annotated[
    str, StringConstraints(min_length=1, max_length=1000, pattern=NO_NUL_PATTERN), AfterValidator(_check_not_blank)
]
NameLength = StringConstraints(min_length=1, max_length=MAX_NAME_LENGTH, pattern=NO_NUL_PATTERN)
Name = Annotated[str, NameLength, AfterValidator(_check_not_blank)]
# A name that is part of addresses: see check_name
AddressableName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MAX_NAME_LENGTH, pattern=r"^[^/\x00-\x1f\x7f]+$"),
    AfterValidator(lambda value: check_name("the name", value)),
]
Document = Annotated[dict[str, Any], AfterValidator(_check_storable)]
Moment = Annotated[datetime, AfterValidator(_check_time)]
Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\x00\s]+$", max_length=MAX_URL_LENGTH)]
AttributeValue = Annotated[
    bool | Annotated[int, Field(ge=-(2**63), lt=2**63)] | float | Annotated[str, StringConstraints(max_length=500)],
    AfterValidator(_check_storable),
]
Attributes = Annotated[
    dict[Name, AttributeValue], Field(max_length=MAX_ATTRIBUTES), BeforeValidator(_check_number_of_attributes)
]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=DURATION.least, le=DURATION.most, allow_inf_nan=False)]

PoolFilter = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
PoolName = Annotated[str, Path(pattern=NAME_PATTERN, description="The pool.")]
PathName = Annotated[str, Path(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]+$", description="The name.")]
WorkerId = Annotated[str, Path(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$", description="The worker.")]
JobId = Annotated[UUID, Path(description="The job.")]
TaskId = Annotated[UUID, Path(description="The task.")]
NamespaceName = Annotated[
    str, Path(min_length=1, max_length=MAX_NAME_LENGTH, pattern=r"^[^\x00-\x1f\x7f]+$", description="The namespace.")
]


def either_name(state: Sequence[str] | None, status: Sequence[str] | None) -> list[str] | None:
    """Join the values of two names of one condition."""
    return None if state is None and status is None else [*(state or ()), *(status or ())]


class RequestModel(BaseModel):
    """A body or a part of it. The description of each error takes time, so that of very many is one error."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def _limit_errors(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(value)
        except ValidationError as error:
            if error.error_count() <= MAX_ERRORS:
                raise
            raise PydanticCustomError("too_many_errors", f"has more than {MAX_ERRORS} errors") from None


class Command(RequestModel):
    """The body of a request that changes state."""

    request_id: Annotated[str, NameLength] | None = Field(
        default=None,
        description="The same request again gives the same answer; an Idempotency-Key header does the same.",
    )


class ReasonedRequest(Command):
    """A transition with an optional reason."""

    reason: Text | None = Field(default=None, description="The reason, for the records.")


class StateTransitionRequest(Command):
    """A transition of a worker to a state."""

    worker_id: Annotated[str, StringConstraints(min_length=1, max_length=300, pattern=NO_CONTROL_PATTERN)] = Field(
        description="Worker identifier; the one of the path."
    )
    to_state: SupervisedWorkerState = Field(description="Target state.")
    reason: Text | None = Field(default=None, description="Reason for transition.")


class TerminateWorkerRequest(ReasonedRequest):
    """A termination."""

    force: bool = Field(default=False, description="Kill the process and its process group at once, without its grace.")


class WorkerSettingsRequest(Command):
    """The settings of a worker. The supervisor's own settings apply where a member is missing."""

    workspace_id: Name = Field(default="default", description="The owner; a label without further effect.")
    namespaces: Annotated[list[AddressableName], Field(min_length=1, max_length=100)] | None = Field(
        default=None, description="The namespaces whose tasks it claims."
    )
    concurrency: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        default=None, description="Tasks that it runs at once."
    )
    app: Annotated[str, StringConstraints(pattern=APP_PATTERN, max_length=MAX_NAME_LENGTH)] | None = Field(
        default=None, description="The app whose tasks it runs, as package.module:app."
    )
    memory_limit_mb: Annotated[float, Field(gt=0, le=1_048_576, allow_inf_nan=False)] | None = Field(
        default=None,
        description="It is paused when its process and all processes that it started use more memory, in megabytes.",
    )
    lease: Annotated[float, Field(ge=1, le=86_400, allow_inf_nan=False)] | None = Field(
        default=None, description="Seconds without a heartbeat after which it loses its tasks."
    )
    grace: Annotated[float, Field(ge=0, le=25, allow_inf_nan=False)] | None = Field(
        default=None, description="Seconds that running tasks get to finish when it stops."
    )
    labels: Document = Field(default_factory=dict, description="Labels of your own.")

    def spec_values(self) -> dict[str, Any]:
        """Return the members that say how its process runs."""
        spec = self.model_dump(include=set(WORKER_SPEC_MEMBERS))
        if spec["namespaces"] is not None:
            spec["namespaces"] = tuple(dict.fromkeys(spec["namespaces"]))
        return spec


class NewWorkerRequest(WorkerSettingsRequest):
    """A worker to create."""


class NewPoolRequest(WorkerSettingsRequest):
    """A pool of workers to create."""

    name: PoolFilter = Field(description="The name: letters, digits, `_`, `.` and `-`.")
    desired: Annotated[int, Field(ge=0, le=MAX_DESIRED)] = Field(
        description="The number of workers that the supervisors keep."
    )


class ScaleRequest(Command):
    """The desired number of workers of a pool."""

    desired: Annotated[int, Field(ge=0, le=MAX_DESIRED, strict=True)] = Field(
        description="The number of workers that the supervisors keep."
    )


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
    attributes: Attributes | None = Field(
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
    NAME: AddressableName,
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


class NewTasksRequest(Command):
    """Tasks to enqueue, all or none. `request_id` of a task deduplicates that task, the one of the body the request."""

    tasks: Annotated[list[NewTaskRequest], Field(min_length=1, max_length=MAX_BULK_TASKS)]


class NewJobsRequest(Command):
    """Jobs to submit, all or none. `request_id` of a job deduplicates that job, the one of the body the request."""

    jobs: Annotated[list[NewJobRequest], Field(min_length=1, max_length=MAX_BULK_JOBS)]


class TaskFilterRequest(RequestModel):
    """Conditions that a task must meet; a missing one means any."""

    state: Annotated[list[TaskRowState], Field(min_length=1, max_length=len(TaskRowState))] | None = Field(
        default=None, description="In one of these states."
    )
    status: Annotated[list[TaskRowState], Field(min_length=1, max_length=len(TaskRowState))] | None = Field(
        default=None, description="The same as `state`."
    )
    namespace: Name | None = Field(default=None, description="Of this namespace.")
    type: Name | None = Field(default=None, description="Of this type.")
    tag: Name | None = Field(default=None, description="With this tag.")
    ids: Annotated[list[UUID], Field(min_length=1, max_length=MAX_FILTER_IDS)] | None = Field(
        default=None, description="One of these tasks."
    )
    standalone: bool = Field(default=False, description="No steps of jobs.")
    steps_only: bool = Field(default=False, description="Only steps of jobs.")
    job: UUID | None = Field(default=None, description="Steps of this job.")
    worker: Name | None = Field(
        default=None, description="Held now, or held last, by this worker: its id, or that of one of its processes."
    )
    correlation_id: UUID | None = Field(default=None, description="With this correlation id.")
    request_id: Name | None = Field(
        default=None, description="Enqueued with this request id, or by the caller with this key."
    )
    unique_key: Name | None = Field(default=None, description="With this unique key.")
    created_after: Moment | None = Field(default=None, description="Enqueued at this time or later.")
    created_before: Moment | None = Field(default=None, description="Enqueued before this time.")


class JobFilterRequest(RequestModel):
    """Conditions that a job must meet; a missing one means any."""

    status: Annotated[list[JobState], Field(min_length=1, max_length=len(JobState))] | None = Field(
        default=None, description="In one of these states; by default unfinished."
    )
    state: Annotated[list[JobState], Field(min_length=1, max_length=len(JobState))] | None = Field(
        default=None, description="The same as `status`."
    )
    workflow: Name | None = Field(default=None, description="Of this workflow.")
    version: Name | None = Field(default=None, description="Of this version of the workflow.")
    namespace: Name | None = Field(default=None, description="Of this namespace.")
    key: Name | None = Field(default=None, description="With this key.")
    tags: Annotated[list[Name], Field(max_length=MAX_TAGS)] | None = Field(
        default=None, description="With all of these tags."
    )
    attributes: Attributes | None = Field(default=None, description="With all of these attributes.")
    parent: UUID | None = Field(default=None, description="Children of this job.")
    created_after: Moment | None = Field(default=None, description="Submitted at this time or later.")
    created_before: Moment | None = Field(default=None, description="Submitted before this time.")
    request_id: Name | None = Field(
        default=None, description="Submitted with this request id, or by the caller with this key."
    )
    correlation_id: UUID | None = Field(default=None, description="With this correlation id.")


class _ActionRequest(ReasonedRequest):
    """An action on all rows that match a filter."""

    all: bool = Field(default=False, description="Needed if the filter is empty: the action is meant for all rows.")
    preview: bool = Field(default=False, description="Change nothing; count what matches.")
    horizon: Moment | None = Field(
        default=None, description="`horizon` of the preview: leaves out what was created or has ended since."
    )
    cursor: Annotated[str, StringConstraints(min_length=1, max_length=500)] | None = Field(
        default=None, description="`next` of the batch before; the horizon travels with it."
    )


class _TaskActionRequest(_ActionRequest):
    filter: TaskFilterRequest = Field(default_factory=TaskFilterRequest)
    limit: Annotated[int, Field(ge=1, le=MAX_ACTION_BATCH)] = Field(
        default=1000, description="Tasks of one batch, which is one transaction."
    )

    @model_validator(mode="after")
    def _is_meant(self) -> _TaskActionRequest:
        _refuse_empty_filter(self.filter, meant=self.all)
        return self


class CancelTasksRequest(_TaskActionRequest):
    """A cancellation of all tasks that match a filter; by default of unfinished ones."""

    force: bool = Field(default=False, description="Cancel running tasks at once, without waiting for their workers.")


class RequeueTasksRequest(_TaskActionRequest):
    """A requeue of all tasks that match a filter; by default of those in error."""


class CancelJobsRequest(_ActionRequest):
    """A cancellation of all jobs that match a filter; by default of unfinished ones."""

    filter: JobFilterRequest = Field(default_factory=JobFilterRequest)
    limit: Annotated[int, Field(ge=1, le=MAX_JOB_ACTION_BATCH)] = Field(
        default=100, description="Jobs of one batch, which is one transaction."
    )

    @model_validator(mode="after")
    def _is_meant(self) -> CancelJobsRequest:
        _refuse_empty_filter(self.filter, meant=self.all)
        return self


def _refuse_empty_filter(wanted: BaseModel, *, meant: bool) -> None:
    if not meant and not wanted.model_dump(exclude_defaults=True):
        raise ValueError("the filter is empty: give a condition, or all: true")


class LimitOverrideRequest(ReasonedRequest):
    """A rule that overrides the declared one of a key, until it is restored."""

    max_running: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = Field(
        default=None, description="Concurrency limit: tasks at once."
    )
    max_starts: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = Field(
        default=None, description="Rate limit: starts per period."
    )
    max_weight: Amount | None = Field(default=None, description="Weight of the starts per period.")
    max_cost: Amount | None = Field(default=None, description="Budget: reported cost per period.")
    period: Seconds | None = Field(default=None, description="The period in seconds.")
    share: Amount | None = Field(default=None, description="Share of a limit in common with other keys; 1 by default.")


class NewScheduleRequest(Command):
    """A schedule: a task of a `type` or a job of a `workflow` at the ticks of `cron` or of `every`."""

    type: Name | None = Field(default=None, description="The type of the task.")
    workflow: Name | None = Field(default=None, description="The workflow of the job.")
    version: Name | None = Field(default=None, description="Of the workflow; the newest at each tick by default.")
    namespace: Name = Field(default="default", description="Of the task.")
    cron: Name | None = Field(default=None, description="Five fields: minute, hour, day, month, day of week.")
    timezone: Name = Field(default="UTC", description="Of the cron expression.")
    every: Seconds | None = Field(default=None, description="The interval in seconds.")
    missed: Literal["skip", "once", "all"] = Field(default="once", description="What happens to missed ticks.")
    input: Document = Field(default_factory=dict, description="Of the task or job.")
    options: Document = Field(default_factory=dict, description="Options of the task or job, as in Python.")


class NewTokenRequest(RequestModel):
    """A token to create. There is no idempotency key: the name is one, and the secret is stored nowhere."""

    name: Annotated[
        Name,
        StringConstraints(max_length=MAX_TOKEN_NAME_LENGTH, pattern=r"^[^\x00-\x1f\x7f]*$"),
        AfterValidator(_check_ends_addresses),
    ] = Field(description="Records show it as the actor: token:NAME.")
    scope: TokenScope = Field(default=TokenScope.READ, description="The rights; each includes those before it.")
    namespaces: Annotated[list[AddressableName], Field(min_length=1, max_length=MAX_TOKEN_NAMESPACES)] | None = Field(
        default=None, description="The namespaces that it is limited to; all by default."
    )
    days: Annotated[int, Field(ge=1, le=36_500)] | None = Field(default=None, description="Days until it expires.")


class WebhooksRequest(Command):
    """Given-up webhooks: those of `ids`, or with `all` every one."""

    ids: Annotated[list[Annotated[int, Field(ge=1, lt=2**63)]], Field(min_length=1, max_length=1000)] | None = None
    all: bool = False

    @model_validator(mode="after")
    def _one_choice(self) -> WebhooksRequest:
        if self.all == (self.ids is not None):
            raise ValueError("give ids, or all: true, not both")
        return self


class CancelTaskRequest(ReasonedRequest):
    """A cancellation."""

    force: bool = Field(default=False, description="Cancel a running task at once, without waiting for its worker.")
