"""Response models: the shapes that the OpenAPI document promises, under their names without `Response`."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from urllib.parse import quote
from uuid import UUID

import orjson
from pydantic import BaseModel, ConfigDict, Field

from interlock.client.explain import FactCode
from interlock.lifecycle import JobState, SupervisedWorkerState, TaskRowState
from interlock.store.doctor import Severity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.responses import Response
from interlock.store.access import TokenScope

T = TypeVar("T")


def document_of(value: Any) -> dict[str, Any]:
    """Return a dataclass or a row as a document, in which `state` and `status` are two names of the same value."""
    kind: Any = type(value)
    names = _field_names(kind)
    # not asdict(), which copies every value: they are only written
    document = {name: getattr(value, name) for name in names} if names else dict(value)
    for name, other in (("state", "status"), ("status", "state")):
        if name in document:
            document.setdefault(other, document[name])
    return document


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass; none of any other class."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


# the member `responses` of the routes whose 201 has the header of `with_location`
LOCATION: Mapping[int | str, dict[str, Any]] = {
    201: {"headers": {"Location": {"description": "The address of what was created.", "schema": {"type": "string"}}}}
}


def with_location(response: Response, template: str) -> Response:
    """Add the address of what a request has created, such as /api/tasks/{id}, to a 201, also to a replayed one."""
    if response.status_code == HTTPStatus.CREATED:
        document = orjson.loads(bytes(response.body))
        response.headers["Location"] = template.format_map(_Quoted(document))
    return response


class _Quoted(dict[str, Any]):
    """The members of a document, each quoted for a path when it is looked up."""

    def __getitem__(self, name: str) -> str:
        return quote(super().__getitem__(name), safe="")


class ResponseModel(BaseModel):
    """Base of all responses; a newer supervisor may add members."""

    model_config = ConfigDict(extra="allow")


class Page(ResponseModel, Generic[T]):
    """One page of a list; `next` is the cursor of the following page, null on the last one.

    A page with a `next` may be short, or empty: a request looks at a bounded number of rows.
    """

    items: list[T]
    next: str | None


class ProblemResponse(ResponseModel):
    """Problem details (RFC 9457); `code` is for programs."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    http_request_id: str | None = Field(
        None, description="The id of the HTTP request, as in its `X-Request-ID` header."
    )


class WorkerResponse(ResponseModel):
    """A worker as the supervisor sees it."""

    id: str
    workspace_id: str
    status: SupervisedWorkerState
    state: SupervisedWorkerState = Field(description="The same as `status`.")
    role: str
    live: bool = Field(description="Whether its process sent a heartbeat lately.")
    event: str | None
    reason: str | None
    spec: dict[str, Any] | None = Field(description="The requested settings; null if the process registered itself.")
    labels: dict[str, Any]
    namespaces: list[str]
    types: list[str]
    pool: str | None = Field(description="The pool that it belongs to.")
    process_note: str | None = Field(description="The latest event of its process.")
    suspected_tasks: list[UUID] = Field(description="Tasks that its process ran when it crashed last.")
    heartbeat_at: datetime | None
    created_at: datetime
    updated_at: datetime


class StateTransitionResult(ResponseModel):
    """Result of a state transition."""

    worker_id: str
    from_state: SupervisedWorkerState
    to_state: SupervisedWorkerState
    timestamp: datetime
    success: bool
    error: str | None = None


class PoolResponse(ResponseModel):
    """A pool of workers."""

    name: str
    desired: int = Field(description="The number of workers that the supervisors keep.")
    members: int = Field(description="The number of its workers that have not ended.")
    live: int = Field(description="The number of them whose process sent a heartbeat lately.")
    backing_off: int = Field(description="The number of them that wait to be restarted after a crash.")
    starting: int = Field(description="The number of the others: no process yet, or no heartbeat of it.")
    spec: dict[str, Any] = Field(description="The settings of its workers.")
    labels: dict[str, Any]
    workspace_id: str
    actor: str = Field(description="Who created or scaled it last.")
    bound_to: str | None = Field(description="The supervisor that it ends with.")
    created_at: datetime
    scaled_at: datetime


class RecordResponse(ResponseModel):
    """One recorded transition."""

    from_state: str | None
    to_state: str
    event: str
    reason: str | None
    actor: str
    database_role: str = Field(description="The role of PostgreSQL that the client logged in with.")
    recorded_at: datetime


class MoveResponse(RecordResponse):
    """One transition of a history."""

    lasted: float | None = Field(description="Seconds in to_state; null while it lasts.")
    problem: str | None = Field(description="How it contradicts the lifecycle, the record before it, or the row.")


class TaskMoveResponse(MoveResponse):
    """One transition of a task's history."""

    attempt: int


class AuditRecordResponse(RecordResponse):
    """One recorded transition of a task, a job or a worker."""

    kind: str
    id: str = Field(description="Of the task, the job or the worker.")
    record: int
    attempt: int | None = Field(description="Of a task.")


class JobSummaryResponse(ResponseModel):
    """A job in a list."""

    id: UUID
    workflow: str | None
    version: str | None
    namespace: str
    status: JobState
    state: JobState = Field(description="The same as `status`.")
    reason: str | None
    ending: str | None = Field(description="The state that it reaches once its steps have stopped.")
    open_steps: int | None
    depth: int
    parent_job_id: UUID | None
    request_id: str | None
    correlation_id: UUID | None
    actor: str | None
    tags: list[str] | None
    attributes: dict[str, Any] | None
    key: str | None
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None


class JobResponse(JobSummaryResponse):
    """A job."""

    input: dict[str, Any]
    output: Any
    error: dict[str, Any] | None
    worker_count: int | None
    callback_url: str | None
    callback: dict[str, Any] | None = Field(description="Its webhook, from the end of the job until it is delivered.")


class SubmittedJobResponse(JobResponse):
    """A submitted job; `created` is false if an earlier request created it."""

    created: bool


class StepResponse(ResponseModel):
    """One step of a job."""

    id: UUID
    step: str
    kind: str
    type: str
    namespace: str
    state: TaskRowState
    status: TaskRowState = Field(description="The same as `state`.")
    reason: str | None
    upstreams: list[str]
    attempt: int
    tries: int
    max_tries: int
    worker_id: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    output: Any
    error: dict[str, Any] | None


class SignaledResponse(ResponseModel):
    """The outcome of a signal or of the answer to an approval."""

    outcome: str = Field(description="sent; already sent: nothing was stored, the first one counts")


class SentSignalResponse(ResponseModel):
    """A signal that was sent to a job; `consumed_by` is null while no step has consumed it."""

    id: int
    name: str
    payload: Any
    request_id: str | None
    sent_by: str
    sent_at: datetime
    consumed_by: str | None
    consumed_at: datetime | None


class InboxItemResponse(ResponseModel):
    """A step that waits for a signal or an approval."""

    id: UUID
    job_id: UUID
    workflow: str
    version: str
    namespace: str
    step: str
    kind: str
    signal: str = Field(description="the name to send; that of an approval is its step")
    assignee: str | None = Field(description="null: it is for anyone")
    wait_started_at: datetime
    wait_until: datetime | None = Field(description="its timeout, if it has one")


class TaskSummaryResponse(ResponseModel):
    """A task in a list."""

    id: UUID
    namespace: str
    type: str
    state: TaskRowState
    status: TaskRowState = Field(description="The same as `state`.")
    reason: str | None
    priority: int
    run_at: datetime
    attempt: int
    tries: int
    max_tries: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    tags: list[str] | None
    worker_id: str | None
    job_id: UUID | None
    step: str | None


class TaskResponse(TaskSummaryResponse):
    """A task."""

    request_id: str | None
    input: dict[str, Any]
    output: Any
    error: dict[str, Any] | None


class EnqueuedTaskResponse(TaskResponse):
    """An enqueued task; `created` is false if an earlier request created it."""

    created: bool


class CanceledTaskResponse(ResponseModel):
    """The outcome of a cancellation."""

    outcome: str = Field(description="canceled; or requested: its worker is asked to stop it")
    task: TaskResponse


class TaskResultResponse(ResponseModel):
    """The result of a task, if it has ended."""

    id: UUID
    state: TaskRowState
    status: TaskRowState = Field(description="The same as `state`.")
    ended: bool
    output: Any
    error: dict[str, Any] | None


class NamespaceResponse(ResponseModel):
    """A namespace and its unfinished tasks."""

    name: str
    paused_at: datetime | None
    paused_by: str | None
    reason: str | None
    pending: int
    running: int
    held: int
    limited: int


class NamespaceMovedResponse(ResponseModel):
    """The outcome of pausing or resuming a namespace."""

    name: str
    paused: bool
    tasks: int = Field(description="Tasks that are held now, or were released.")


class EvidenceResponse(ResponseModel):
    """A row that a fact refers to."""

    kind: str = Field(description="task, job, worker, namespace, type, webhook, move, error")
    id: str
    text: str


class FactResponse(ResponseModel):
    """One fact of an explanation."""

    code: FactCode
    text: str
    since: datetime | None = Field(description="null: as long as the state")
    evidence: list[EvidenceResponse]
    remedy: str | None = Field(description="What would unblock it.")
    command: str | None = Field(description="The command for the remedy, as a line for a shell.")


class ExplanationResponse(ResponseModel):
    """The state of something, and why it makes no progress: facts and causes, the most important first."""

    kind: str
    id: str
    name: str
    state: str
    since: datetime | None
    facts: list[FactResponse]
    through: list[str]
    causes: list[ExplanationResponse]
    at: datetime | None = Field(description="The earlier moment that was asked for.")


class StatusResponse(ResponseModel):
    """Counts of tasks, jobs and processes at one moment."""

    now: datetime
    namespaces: dict[str, Any]
    jobs: dict[str, Any]
    processes: list[dict[str, Any]]


class FindingResponse(ResponseModel):
    """One finding of the doctor."""

    code: str
    severity: Severity
    rows: int
    message: str
    remedy: str = Field(description="The command to run, or what to do.")
    fixable: bool = Field(description="Whether `interlock doctor --fix` can repair it.")
    sample: list[str] = Field(description="Ids or names of the first rows, at most 5.")


class DoctorResponse(ResponseModel):
    """The report of a quick examination."""

    severity: Severity | None = Field(description="Of the worst finding; null if there is none.")
    full: bool
    examined_at: datetime
    duration_s: float
    checked: list[str]
    facts: dict[str, str]
    findings: list[FindingResponse]


class HealthResponse(ResponseModel):
    """The health or readiness of the supervisor."""

    status: str


class EnqueuedItemResponse(ResponseModel):
    """A task or job of a bulk request; `created` is false if an earlier request created it."""

    id: UUID
    created: bool


class BulkResponse(ResponseModel):
    """The tasks or jobs of a bulk request, in the order of the request."""

    items: list[EnqueuedItemResponse]
    created: int = Field(description="How many of them are new.")


class ObstacleResponse(ResponseModel):
    """Why rows that match cannot be changed, and how many."""

    reason: str
    count: int


class ActionPreviewResponse(ResponseModel, Generic[T]):
    """The rows that match a filter; nothing was changed."""

    preview: Literal[True]
    horizon: datetime = Field(description="Give it to the action: it leaves out what was created or has ended since.")
    matched: int
    possible: int = Field(description="How many the action can change.")
    capped: bool = Field(description="Counting stopped at 10,000: there are more.")
    states: dict[str, int] = Field(description="How many of the possible ones are in each state.")
    obstacles: list[ObstacleResponse]
    sample: list[T] = Field(description="The newest of the possible ones.")


class ActionBatchResponse(ResponseModel, Generic[T]):
    """One batch of an action; repeat the request with `next` as `cursor` until it is null."""

    preview: Literal[False]
    horizon: datetime
    matched: int
    changed: int
    requested: int = Field(description="How many of the changed ones end when their work has stopped.")
    next: str | None
    sample: list[T] = Field(description="The newest of the changed ones, as they were before.")


class WorkflowSummaryResponse(ResponseModel):
    """The newest version of a workflow."""

    name: str
    version: str
    namespace: str
    steps: int
    registered_at: datetime
    versions: int = Field(description="How many versions are stored.")


class WorkflowVersionResponse(ResponseModel):
    """One version of a workflow."""

    version: str
    namespace: str
    steps: int
    registered_at: datetime


class WorkflowResponse(ResponseModel):
    """A version of a workflow with its definition, and all versions, newest first."""

    name: str
    version: str
    namespace: str
    definition: dict[str, Any]
    registered_at: datetime
    versions: list[WorkflowVersionResponse]


class ScheduleResponse(ResponseModel):
    """A schedule with its last and next tick."""

    name: str
    type: str | None
    workflow: str | None
    version: str | None
    namespace: str
    cron: str | None
    timezone: str
    every: float | None = Field(description="seconds")
    missed: str
    input: dict[str, Any]
    options: dict[str, Any]
    next_at: datetime
    last_at: datetime | None
    paused_at: datetime | None
    paused_by: str | None
    pause_reason: str | None
    resumed_by: str | None = Field(description="of the latest resume, until the next pause")
    resume_reason: str | None
    error: str | None = Field(description="of the latest tick, if it failed")


class RanScheduleResponse(ResponseModel):
    """The task or job that a schedule made."""

    name: str
    kind: Literal["task", "job"]
    id: UUID


class RemovedResponse(ResponseModel):
    """The name of what was deleted."""

    name: str
    deleted: bool


class LimitRuleResponse(ResponseModel):
    """The bounds of a rule; the period in seconds."""

    max_running: int | None
    max_starts: int | None
    max_weight: float | None
    max_cost: float | None
    period: float | None
    share: float | None


class LimitResponse(LimitRuleResponse):
    """A limit key with its rule and the use of it."""

    key: str
    rule: str | None = Field(description="the key or the pattern that applies; null if no limit is declared")
    taken: int = Field(description="pending and running tasks")
    starts: int = Field(description="within the period")
    weight: float = Field(description="of the starts within the period")
    cost: float = Field(description="reported within the period")
    waiting: int
    next_at: datetime | None = Field(description="when tasks that wait for the period go on")
    declared: LimitRuleResponse | None = Field(description="while it is overridden: the rule that an app declares")
    overridden_by: str | None
    overridden_at: datetime | None
    override_reason: str | None
    is_bound: bool = Field(description="more tasks than `taken` and `waiting` say may be there: counting stopped")


class LimitHolderResponse(ResponseModel):
    """A task that takes a place of a limit."""

    id: UUID
    namespace: str
    type: str
    state: TaskRowState
    worker_id: str | None
    lease_expires_at: datetime | None
    attempt: int
    limit_keys: list[str]
    weight: float
    run_at: datetime
    started_at: datetime | None
    job_id: UUID | None
    step: str | None


class LimitChangeResponse(ResponseModel):
    """A change of a limit by an operator."""

    event: str = Field(description="override, restore or delete")
    before: LimitRuleResponse | None
    after: LimitRuleResponse | None
    reason: str | None
    actor: str
    database_role: str
    recorded_at: datetime


class LimitDetailsResponse(LimitResponse):
    """A limit key with the tasks that hold it (running ones first, at most 100) and its latest 100 changes."""

    holders: list[LimitHolderResponse]
    changes: list[LimitChangeResponse]


class TokenResponse(ResponseModel):
    """A token without its secret."""

    id: UUID
    name: str
    scope: TokenScope
    namespaces: list[str] | None = Field(description="The namespaces that it is limited to; null: all.")
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    revoked_by: str | None
    last_used_at: datetime | None


class CreatedTokenResponse(TokenResponse):
    """A new token with its secret, which is never shown again."""

    token: str


class GivenUpWebhookResponse(ResponseModel):
    """A webhook that was given up after repeated failures."""

    id: int
    task_id: UUID | None
    attempt: int | None
    job_id: UUID | None
    state: str
    url: str
    tries: int
    error: str | None
    given_up_at: datetime


class ChangedWebhooksResponse(ResponseModel):
    """The webhooks that were changed."""

    ids: list[int]
    count: int
