"""What answers say: the shapes that the OpenAPI document promises."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from interlock.lifecycle import JobState, SupervisedWorkerState, TaskRowState

T = TypeVar("T")


class Answer(BaseModel):
    """An answer; a newer supervisor may say more."""

    model_config = ConfigDict(extra="allow")


class Page(Answer, Generic[T]):
    """Some of a list; `next` is the cursor of the following page, null on the last one."""

    items: list[T]
    next: str | None


class Problem(Answer):
    """Problem details as RFC 9457 has them; `code` is for programs."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str


class Worker(Answer):
    """A worker as the supervisor sees it."""

    id: str
    workspace_id: str
    status: SupervisedWorkerState
    role: str
    live: bool = Field(description="Whether its process said lately that it is here.")
    event: str | None
    reason: str | None
    spec: dict[str, Any] | None = Field(description="What it was asked to be; null when its process came by itself.")
    labels: dict[str, Any]
    namespaces: list[str]
    types: list[str]
    heartbeat_at: datetime | None
    created_at: datetime
    updated_at: datetime


class Move(Answer):
    """One line of a history."""

    from_state: str | None
    to_state: str
    event: str
    reason: str | None
    actor: str
    recorded_at: datetime


class TaskMove(Move):
    """One line of a task's history."""

    attempt: int


class JobSummary(Answer):
    """What a list of jobs tells of each."""

    id: UUID
    workflow: str | None
    version: str | None
    namespace: str
    status: JobState
    reason: str | None
    ending: str | None = Field(description="What it becomes once its steps have stopped.")
    open_steps: int | None
    depth: int
    parent_job_id: UUID | None
    request_id: str | None
    actor: str | None
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None


class Job(JobSummary):
    """All that is stored of a job."""

    input: dict[str, Any]
    output: dict[str, Any] | None
    error: dict[str, Any] | None
    worker_count: int | None


class SubmittedJob(Job):
    """A job that was submitted; `created` is false when the request was there already."""

    created: bool


class Step(Answer):
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


class Signaled(Answer):
    """What came of a signal: the first of a name counts."""

    outcome: str = Field(description="sent, or already sent")


class TaskSummary(Answer):
    """What a list of tasks tells of each."""

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


class Task(TaskSummary):
    """All that is stored of a task."""

    worker_id: str | None
    job_id: UUID | None
    step: str | None
    request_id: str | None
    input: dict[str, Any]
    output: Any
    error: dict[str, Any] | None
    started_at: datetime | None


class EnqueuedTask(Task):
    """A task that was enqueued; `created` is false when it was there already."""

    created: bool


class CanceledTask(Answer):
    """What came of a cancellation."""

    outcome: str = Field(description="canceled, or requested of the worker that runs it")
    task: Task


class TaskResult(Answer):
    """How a task ended, if it has."""

    id: UUID
    state: TaskRowState
    ended: bool
    output: Any
    error: dict[str, Any] | None


class Namespace(Answer):
    """A namespace and its unfinished tasks."""

    name: str
    paused_at: datetime | None
    paused_by: str | None
    reason: str | None
    pending: int
    running: int
    held: int
    limited: int


class NamespaceMoved(Answer):
    """What came of pausing or resuming a namespace."""

    name: str
    paused: bool
    tasks: int = Field(description="How many tasks are held now, or were freed.")


class Explanation(Answer):
    """Where something is, and why it is not moving."""

    kind: str
    id: str
    name: str
    state: str
    since: datetime
    facts: list[str]
    through: list[str]
    causes: list[Explanation]


class Status(Answer):
    """The whole queue at one moment."""

    now: datetime
    namespaces: dict[str, Any]
    jobs: dict[str, Any]
    processes: list[dict[str, Any]]


class Health(Answer):
    """Whether the supervisor is there, or ready."""

    status: str
