"""Response models: the shapes that the OpenAPI document promises, under their names without `Response`."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from interlock.lifecycle import JobState, SupervisedWorkerState, TaskRowState

T = TypeVar("T")


class ResponseModel(BaseModel):
    """Base of all responses; a newer supervisor may add members."""

    model_config = ConfigDict(extra="allow")


class Page(ResponseModel, Generic[T]):
    """One page of a list; `next` is the cursor of the following page, null on the last one."""

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


class WorkerResponse(ResponseModel):
    """A worker as the supervisor sees it."""

    id: str
    workspace_id: str
    status: SupervisedWorkerState
    role: str
    live: bool = Field(description="Whether its process sent a heartbeat lately.")
    event: str | None
    reason: str | None
    spec: dict[str, Any] | None = Field(description="The requested settings; null if the process registered itself.")
    labels: dict[str, Any]
    namespaces: list[str]
    types: list[str]
    heartbeat_at: datetime | None
    created_at: datetime
    updated_at: datetime


class MoveResponse(ResponseModel):
    """One transition of a history."""

    from_state: str | None
    to_state: str
    event: str
    reason: str | None
    actor: str
    database_role: str = Field(description="The role of PostgreSQL that the client logged in with.")
    recorded_at: datetime


class TaskMoveResponse(MoveResponse):
    """One transition of a task's history."""

    attempt: int


class JobSummaryResponse(ResponseModel):
    """A job in a list."""

    id: UUID
    workflow: str | None
    version: str | None
    namespace: str
    status: JobState
    reason: str | None
    ending: str | None = Field(description="The state that it reaches once its steps have stopped.")
    open_steps: int | None
    depth: int
    parent_job_id: UUID | None
    request_id: str | None
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
    reason: str | None
    priority: int
    run_at: datetime
    attempt: int
    tries: int
    max_tries: int
    created_at: datetime
    finished_at: datetime | None
    tags: list[str] | None


class TaskResponse(TaskSummaryResponse):
    """A task."""

    worker_id: str | None
    job_id: UUID | None
    step: str | None
    request_id: str | None
    input: dict[str, Any]
    output: Any
    error: dict[str, Any] | None
    started_at: datetime | None


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


class ExplanationResponse(ResponseModel):
    """The state of a task, step, job or worker, and why it makes no progress."""

    kind: str
    id: str
    name: str
    state: str
    since: datetime
    facts: list[str]
    through: list[str]
    causes: list[ExplanationResponse]


class StatusResponse(ResponseModel):
    """Counts of tasks, jobs and processes at one moment."""

    now: datetime
    namespaces: dict[str, Any]
    jobs: dict[str, Any]
    processes: list[dict[str, Any]]


class HealthResponse(ResponseModel):
    """The health or readiness of the supervisor."""

    status: str
