"""All lifecycles of Interlock, declared once: the enums, the transition tables, and nothing else.

The in-memory machines, the database guards, the 409 answers of the API, the diagrams, docs/lifecycles.md and the
exhaustive tests are derived from these tables. After a change, run `interlock migrate --generate` and
`interlock diagram --docs docs/lifecycles.md`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from interlock.machine import Machine, Phrases

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# --- 1. Worker process: in memory, one per process -------------------------------------------------------------


class WorkerState(StrEnum):
    """The state of a worker process."""

    STARTING = "starting"
    CONNECTING = "connecting"
    RUNNING = "running"
    RECOVERING = "recovering"
    BACKING_OFF = "backing_off"
    SHUTTING_DOWN = "shutting_down"
    STOPPED = "stopped"


class WorkerEvent(StrEnum):
    """Events of a worker process."""

    INITIALIZED = "initialized"
    CONNECTED = "connected"
    CONNECTION_FAILED = "connection_failed"
    RECOVERY_COMPLETE = "recovery_complete"
    POLL_CYCLE_COMPLETE = "poll_cycle_complete"
    NO_TASKS_AVAILABLE = "no_tasks_available"
    BACKOFF_COMPLETE = "backoff_complete"
    SHUTDOWN_REQUESTED = "shutdown_requested"
    SHUTDOWN_COMPLETE = "shutdown_complete"
    ERROR = "error"


WORKER = Machine(
    "worker process",
    WorkerState,
    WorkerEvent,
    (
        (WorkerState.STARTING, WorkerEvent.INITIALIZED, WorkerState.CONNECTING),
        (WorkerState.CONNECTING, WorkerEvent.CONNECTED, WorkerState.RECOVERING),
        (WorkerState.CONNECTING, WorkerEvent.CONNECTION_FAILED, WorkerState.CONNECTING),
        (WorkerState.RECOVERING, WorkerEvent.RECOVERY_COMPLETE, WorkerState.RUNNING),
        (WorkerState.RUNNING, WorkerEvent.NO_TASKS_AVAILABLE, WorkerState.BACKING_OFF),
        (WorkerState.RUNNING, WorkerEvent.POLL_CYCLE_COMPLETE, WorkerState.RUNNING),
        (WorkerState.BACKING_OFF, WorkerEvent.BACKOFF_COMPLETE, WorkerState.RECOVERING),
        (WorkerState.RUNNING, WorkerEvent.SHUTDOWN_REQUESTED, WorkerState.SHUTTING_DOWN),
        (WorkerState.BACKING_OFF, WorkerEvent.SHUTDOWN_REQUESTED, WorkerState.SHUTTING_DOWN),
        (WorkerState.RECOVERING, WorkerEvent.SHUTDOWN_REQUESTED, WorkerState.SHUTTING_DOWN),
        (WorkerState.CONNECTING, WorkerEvent.SHUTDOWN_REQUESTED, WorkerState.SHUTTING_DOWN),
        (WorkerState.SHUTTING_DOWN, WorkerEvent.SHUTDOWN_COMPLETE, WorkerState.STOPPED),
        (WorkerState.RUNNING, WorkerEvent.ERROR, WorkerState.CONNECTING),
        (WorkerState.RECOVERING, WorkerEvent.ERROR, WorkerState.CONNECTING),
    ),
    initial=[WorkerState.STARTING],
    final=[WorkerState.STOPPED],
)
WORKER_TRANSITIONS: Mapping[tuple[WorkerState, WorkerEvent], WorkerState] = WORKER.transitions

# --- 2. Task attempt: in memory, one per claimed attempt ---------------------------------------------------------


class TaskState(StrEnum):
    """The state of one attempt, in the memory of the worker that runs it. For the task itself see TaskRowState."""

    PENDING = "pending"
    CLAIMING = "claiming"
    PROCESSING = "processing"
    REPORTING = "reporting"
    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"


class TaskEvent(StrEnum):
    """Events of an attempt."""

    CLAIM_REQUESTED = "claim_requested"
    CLAIM_SUCCEEDED = "claim_succeeded"
    CLAIM_FAILED = "claim_failed"
    PROCESSING_SUCCEEDED = "processing_succeeded"
    PROCESSING_FAILED = "processing_failed"
    REPORT_SUCCEEDED = "report_succeeded"
    REPORT_FAILED = "report_failed"
    LEASE_EXPIRED = "lease_expired"
    SHUTDOWN_REQUESTED = "shutdown_requested"


TASK = Machine(
    "task attempt",
    TaskState,
    TaskEvent,
    (
        (TaskState.PENDING, TaskEvent.CLAIM_REQUESTED, TaskState.CLAIMING),
        (TaskState.CLAIMING, TaskEvent.CLAIM_SUCCEEDED, TaskState.PROCESSING),
        (TaskState.PROCESSING, TaskEvent.PROCESSING_SUCCEEDED, TaskState.REPORTING),
        (TaskState.REPORTING, TaskEvent.REPORT_SUCCEEDED, TaskState.COMPLETED),
        (TaskState.CLAIMING, TaskEvent.CLAIM_FAILED, TaskState.FAILED),
        (TaskState.PROCESSING, TaskEvent.PROCESSING_FAILED, TaskState.REPORTING),
        (TaskState.REPORTING, TaskEvent.REPORT_FAILED, TaskState.FAILED),
        (TaskState.PROCESSING, TaskEvent.LEASE_EXPIRED, TaskState.ABANDONED),
        (TaskState.PROCESSING, TaskEvent.SHUTDOWN_REQUESTED, TaskState.REPORTING),
        (TaskState.CLAIMING, TaskEvent.SHUTDOWN_REQUESTED, TaskState.ABANDONED),
    ),
    initial=[TaskState.PENDING],
    final=[TaskState.COMPLETED, TaskState.FAILED, TaskState.ABANDONED],
)
TASK_TRANSITIONS: Mapping[tuple[TaskState, TaskEvent], TaskState] = TASK.transitions

# --- 3. Task row: enforced in the database ----------------------------------------------------------------------


class TaskRowState(StrEnum):
    """The state of a task, as stored in its row of `tasks`."""

    WAITING = "waiting"
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    ERROR = "error"
    CANCELED = "canceled"
    SKIPPED = "skipped"


class TaskRowEvent(StrEnum):
    """Events of a task row."""

    RELEASE = "release"
    CLAIM = "claim"
    SUCCEED = "succeed"
    FAIL = "fail"
    RETRY = "retry"
    EXPIRE = "expire"
    EXHAUST = "exhaust"
    RETURN = "return"
    HOLD = "hold"
    CANCEL = "cancel"
    SKIP = "skip"
    REQUEUE = "requeue"


TASK_ROW = Machine(
    "task",
    TaskRowState,
    TaskRowEvent,
    (
        (TaskRowState.WAITING, TaskRowEvent.RELEASE, TaskRowState.PENDING),
        (TaskRowState.PENDING, TaskRowEvent.CLAIM, TaskRowState.RUNNING),
        (TaskRowState.RUNNING, TaskRowEvent.SUCCEED, TaskRowState.DONE),
        (TaskRowState.RUNNING, TaskRowEvent.FAIL, TaskRowState.ERROR),
        (TaskRowState.RUNNING, TaskRowEvent.RETRY, TaskRowState.PENDING),
        (TaskRowState.RUNNING, TaskRowEvent.EXPIRE, TaskRowState.PENDING),
        (TaskRowState.RUNNING, TaskRowEvent.EXHAUST, TaskRowState.ERROR),
        (TaskRowState.RUNNING, TaskRowEvent.RETURN, TaskRowState.PENDING),
        (TaskRowState.PENDING, TaskRowEvent.HOLD, TaskRowState.WAITING),
        (TaskRowState.WAITING, TaskRowEvent.CANCEL, TaskRowState.CANCELED),
        (TaskRowState.PENDING, TaskRowEvent.CANCEL, TaskRowState.CANCELED),
        (TaskRowState.RUNNING, TaskRowEvent.CANCEL, TaskRowState.CANCELED),
        (TaskRowState.WAITING, TaskRowEvent.SKIP, TaskRowState.SKIPPED),
        # steps that the orchestrator completes: sleep, signal, approval, map join, child job
        (TaskRowState.WAITING, TaskRowEvent.SUCCEED, TaskRowState.DONE),
        (TaskRowState.WAITING, TaskRowEvent.FAIL, TaskRowState.ERROR),
        (TaskRowState.ERROR, TaskRowEvent.REQUEUE, TaskRowState.PENDING),
        (TaskRowState.CANCELED, TaskRowEvent.REQUEUE, TaskRowState.PENDING),
    ),
    initial=[TaskRowState.WAITING, TaskRowState.PENDING],
    final=[TaskRowState.DONE, TaskRowState.ERROR, TaskRowState.CANCELED, TaskRowState.SKIPPED],
    reopening=[TaskRowEvent.REQUEUE],
)

# --- 4. Job: enforced in the database ---------------------------------------------------------------------------


class JobState(StrEnum):
    """The state of a job: one run of a workflow."""

    SUBMITTED = "SUBMITTED"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"


class JobEvent(StrEnum):
    """Events of a job."""

    VALIDATE = "validate"
    REJECT = "reject"
    ALLOCATE_RESOURCES = "allocate_resources"
    SUCCESS = "success"
    ERROR = "error"
    CANCEL = "cancel"


class _JobPhrases(Phrases):
    """Messages for jobs: an ended job is never reopened, so they say what to do instead."""

    __slots__ = ()

    def terminal(self, source: str, target: str) -> str:  # noqa: ARG002 - the message does not need the target
        return f"Cannot transition from terminal state {source}. Create new job instead."

    def invalid(self, source: str, target: str, allowed: Sequence[str]) -> str:
        return f"Invalid transition: {source} → {target}. Allowed: {', '.join(allowed)}"


JOB = Machine(
    "job",
    JobState,
    JobEvent,
    (
        (JobState.SUBMITTED, JobEvent.VALIDATE, JobState.PENDING),
        (JobState.SUBMITTED, JobEvent.REJECT, JobState.FAILED),
        (JobState.SUBMITTED, JobEvent.CANCEL, JobState.CANCELED),
        (JobState.PENDING, JobEvent.ALLOCATE_RESOURCES, JobState.RUNNING),
        (JobState.PENDING, JobEvent.CANCEL, JobState.CANCELED),
        (JobState.RUNNING, JobEvent.SUCCESS, JobState.COMPLETED),
        (JobState.RUNNING, JobEvent.ERROR, JobState.FAILED),
        (JobState.RUNNING, JobEvent.CANCEL, JobState.CANCELED),
    ),
    initial=[JobState.SUBMITTED],
    final=[JobState.COMPLETED, JobState.FAILED, JobState.CANCELED],
    phrases=_JobPhrases("Job"),
)

# --- 5. Supervised worker: enforced in the database ------------------------------------------------------------


class SupervisedWorkerState(StrEnum):
    """The state of a supervised worker, as stored in its row of `workers`."""

    IDLE = "IDLE"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    TERMINATED = "TERMINATED"


class SupervisedWorkerEvent(StrEnum):
    """Events of a supervised worker."""

    START_TASK = "start_task"
    PAUSE = "pause"
    RESUME = "resume"
    COMPLETE_TASKS = "complete_tasks"
    ERROR_UNRECOVERABLE = "error_unrecoverable"
    TERMINATE = "terminate"


SUPERVISED_WORKER = Machine(
    "supervised worker",
    SupervisedWorkerState,
    SupervisedWorkerEvent,
    (
        (SupervisedWorkerState.IDLE, SupervisedWorkerEvent.START_TASK, SupervisedWorkerState.RUNNING),
        (SupervisedWorkerState.RUNNING, SupervisedWorkerEvent.PAUSE, SupervisedWorkerState.PAUSED),
        (SupervisedWorkerState.PAUSED, SupervisedWorkerEvent.RESUME, SupervisedWorkerState.RUNNING),
        (SupervisedWorkerState.RUNNING, SupervisedWorkerEvent.COMPLETE_TASKS, SupervisedWorkerState.COMPLETED),
        (SupervisedWorkerState.RUNNING, SupervisedWorkerEvent.ERROR_UNRECOVERABLE, SupervisedWorkerState.FAILED),
        *(
            (state, SupervisedWorkerEvent.TERMINATE, SupervisedWorkerState.TERMINATED)
            for state in SupervisedWorkerState
            if state is not SupervisedWorkerState.TERMINATED
        ),
    ),
    initial=[SupervisedWorkerState.IDLE],
    final=[SupervisedWorkerState.COMPLETED, SupervisedWorkerState.FAILED, SupervisedWorkerState.TERMINATED],
    reopening=[SupervisedWorkerEvent.TERMINATE],
    phrases=Phrases("Worker"),
)

# --- 6. Sort worker: in memory, saved to a file on every transition ---------------------------------------------------


class SortWorkerState(StrEnum):
    """The phase of a sort worker."""

    INITIALIZING = "Initializing"
    SAMPLING = "Sampling"
    WAITING_FOR_PARTITION_CONFIG = "WaitingForPartitionConfig"
    SORTING = "Sorting"
    WAITING_FOR_SHUFFLE_SIGNAL = "WaitingForShuffleSignal"
    SHUFFLING = "Shuffling"
    WAITING_FOR_MERGE_SIGNAL = "WaitingForMergeSignal"
    MERGING = "Merging"
    COMPLETED = "Completed"
    FAILED = "Failed"

    def can_transition_to(self, target: SortWorkerState) -> bool:
        """Return whether one transition leads from this state to another one."""
        return target in SORT_WORKER.allowed_targets(self)


class SortWorkerEvent(StrEnum):
    """Events of a sort worker."""

    REGISTER = "register"
    SEND_SAMPLE = "send_sample"
    RECEIVE_CONFIG = "receive_config"
    FINISH_SORTING = "finish_sorting"
    START_SHUFFLE = "start_shuffle"
    FINISH_SHUFFLE = "finish_shuffle"
    START_MERGE = "start_merge"
    COMPLETE = "complete"
    FAIL = "fail"
    RESTART = "restart"


SORT_WORKER = Machine(
    "sort worker",
    SortWorkerState,
    SortWorkerEvent,
    (
        (SortWorkerState.INITIALIZING, SortWorkerEvent.REGISTER, SortWorkerState.SAMPLING),
        (SortWorkerState.SAMPLING, SortWorkerEvent.SEND_SAMPLE, SortWorkerState.WAITING_FOR_PARTITION_CONFIG),
        (SortWorkerState.WAITING_FOR_PARTITION_CONFIG, SortWorkerEvent.RECEIVE_CONFIG, SortWorkerState.SORTING),
        (SortWorkerState.SORTING, SortWorkerEvent.FINISH_SORTING, SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL),
        (SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL, SortWorkerEvent.START_SHUFFLE, SortWorkerState.SHUFFLING),
        (SortWorkerState.SHUFFLING, SortWorkerEvent.FINISH_SHUFFLE, SortWorkerState.WAITING_FOR_MERGE_SIGNAL),
        (SortWorkerState.WAITING_FOR_MERGE_SIGNAL, SortWorkerEvent.START_MERGE, SortWorkerState.MERGING),
        (SortWorkerState.MERGING, SortWorkerEvent.COMPLETE, SortWorkerState.COMPLETED),
        *(
            (state, SortWorkerEvent.FAIL, SortWorkerState.FAILED)
            for state in SortWorkerState
            if state not in (SortWorkerState.COMPLETED, SortWorkerState.FAILED)
        ),
        (SortWorkerState.FAILED, SortWorkerEvent.RESTART, SortWorkerState.INITIALIZING),
    ),
    initial=[SortWorkerState.INITIALIZING],
    final=[SortWorkerState.COMPLETED, SortWorkerState.FAILED],
    reopening=[SortWorkerEvent.RESTART],
)

# --- 7. Sort master: in memory, saved to a file on every transition ---------------------------------------------------


class SortMasterState(StrEnum):
    """The phase of the sort master."""

    REGISTERING = "Registering"
    SAMPLING = "Sampling"
    SORTING = "Sorting"
    SHUFFLING = "Shuffling"
    MERGING = "Merging"
    COMPLETED = "Completed"
    FAILED = "Failed"

    def can_transition_to(self, target: SortMasterState) -> bool:
        """Return whether one transition leads from this state to another one."""
        return target in SORT_MASTER.allowed_targets(self)


class SortMasterEvent(StrEnum):
    """Events of the sort master."""

    START_SAMPLING = "start_sampling"
    SET_BOUNDARIES = "set_boundaries"
    START_SHUFFLE = "start_shuffle"
    START_MERGE = "start_merge"
    COMPLETE = "complete"
    FAIL = "fail"
    RESTART = "restart"


SORT_MASTER = Machine(
    "sort master",
    SortMasterState,
    SortMasterEvent,
    (
        (SortMasterState.REGISTERING, SortMasterEvent.START_SAMPLING, SortMasterState.SAMPLING),
        (SortMasterState.SAMPLING, SortMasterEvent.SET_BOUNDARIES, SortMasterState.SORTING),
        (SortMasterState.SORTING, SortMasterEvent.START_SHUFFLE, SortMasterState.SHUFFLING),
        (SortMasterState.SHUFFLING, SortMasterEvent.START_MERGE, SortMasterState.MERGING),
        (SortMasterState.MERGING, SortMasterEvent.COMPLETE, SortMasterState.COMPLETED),
        *(
            (state, SortMasterEvent.FAIL, SortMasterState.FAILED)
            for state in SortMasterState
            if state not in (SortMasterState.COMPLETED, SortMasterState.FAILED)
        ),
        (SortMasterState.FAILED, SortMasterEvent.RESTART, SortMasterState.REGISTERING),
    ),
    initial=[SortMasterState.REGISTERING],
    final=[SortMasterState.COMPLETED, SortMasterState.FAILED],
    reopening=[SortMasterEvent.RESTART],
)

MACHINES: Mapping[str, Machine[Any, Any]] = {
    "worker": WORKER,
    "task-attempt": TASK,
    "task": TASK_ROW,
    "job": JOB,
    "supervised-worker": SUPERVISED_WORKER,
    "sort-worker": SORT_WORKER,
    "sort-master": SORT_MASTER,
}
