"""TaskContext: one attempt as its handler sees it, with progress, checkpoints and cancellation.

Invariant: progress and checkpoints are written under the attempt's number (the fence); a lost attempt writes nothing.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from interlock.model.json_values import ValueRefusedError, check_json
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Generator
    from datetime import datetime
    from uuid import UUID

    from structlog.typing import FilteringBoundLogger


MAX_COST = 1e300


def as_document(result: Any) -> dict[str, Any]:
    """Return a handler's result as a document: itself if it is a JSON object, else under the name `result`.

    So a handler that returned nothing has an output too: `{"result": null}`.
    """
    return result if isinstance(result, dict) else {"result": result}


class Saved:
    """A checkpoint that is being stored: `await` it in a coroutine, `wait()` for it in a thread; True when stored."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[bool]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, bool]:
        return asyncio.wrap_future(self._future).__await__()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the checkpoint is stored; False if the attempt was lost before."""
        return self._future.result(timeout)


class WorkerChannel(Protocol):
    """The channel from a context to its worker: the lease keeper in the same process, a pipe from a child process."""

    def save_checkpoint(self, context: TaskContext, value: Any, /) -> Future[bool]:
        """Store a checkpoint under the attempt's number."""

    def progressed(self, context: TaskContext, /) -> None:
        """Note that there is new progress to write."""


class _DetachedChannel:
    """Takes the place of the worker's channel after the attempt was settled, and stores nothing."""

    __slots__ = ()

    def save_checkpoint(self, _context: TaskContext, _value: Any, /) -> Future[bool]:
        future: Future[bool] = Future()
        future.set_result(False)
        return future

    def progressed(self, _context: TaskContext, /) -> None:
        pass


class TaskContext:
    """One attempt, as its handler sees it. A handler gets it by naming a parameter of this type."""

    __slots__ = (
        "_cost",
        "_line",
        "_weight",
        "attempt",
        "cancel_reason",
        "cancelled",
        "connection",
        "correlation_id",
        "deadline",
        "error",
        "input_data",
        "job_id",
        "latest_progress",
        "lease_acquired_at",
        "lease_timeout",
        "max_tries",
        "namespace",
        "output_data",
        "processing_completed_at",
        "processing_started_at",
        "step",
        "stored_checkpoint",
        "task_id",
        "task_type",
        "tries",
    )

    def __init__(
        self,
        task_id: UUID | None = None,
        task_type: str = "",
        *,
        namespace: str = "default",
        attempt: int = 0,
        tries: int = 0,
        max_tries: int = 1,
        job_id: UUID | None = None,
        step: str | None = None,
        correlation_id: UUID | None = None,
        lease_acquired_at: datetime | None = None,
        lease_timeout: datetime | None = None,
        input_data: dict[str, Any] | None = None,
        output_data: dict[str, Any] | None = None,
        error: str | None = None,
        cost: float | None = None,
        processing_started_at: datetime | None = None,
        processing_completed_at: datetime | None = None,
        checkpoint: Any = None,
        line: WorkerChannel | None = None,
    ) -> None:
        self.task_id = task_id
        self.task_type = task_type
        self.namespace = namespace
        self.attempt = attempt
        self.tries = tries
        self.max_tries = max_tries
        self.job_id = job_id
        self.step = step
        self.correlation_id = correlation_id
        self.input_data = input_data
        self.stored_checkpoint = checkpoint
        self._line = line
        self.output_data = output_data  # the result as a document: see as_document
        self.error = error
        self.cost = cost
        self._weight: float | None = None
        self.deadline: datetime | None = None
        self.lease_acquired_at = lease_acquired_at
        self.lease_timeout = lease_timeout
        self.processing_started_at = processing_started_at
        self.processing_completed_at = processing_completed_at
        self.latest_progress: dict[str, Any] | None = None
        self.cancelled = False
        self.cancel_reason: str | None = None
        # of a transactional task: the connection whose transaction also settles the task
        self.connection: Any = None

    @property
    def cost(self) -> float | None:
        """The cost of the attempt, in any unit; it is stored with the outcome."""
        return self._cost

    @cost.setter
    def cost(self, value: float | None) -> None:
        if value is not None and (type(value) not in (int, float) or not 0 <= value < MAX_COST):
            raise ValueError(f"cost must be a finite number that is not negative, got {value!r:.100}")
        self._cost = value

    @property
    def weight(self) -> float | None:
        """The weight that the attempt used of its limits; it replaces the weight with which it was started."""
        return self._weight

    @weight.setter
    def weight(self, value: float | None) -> None:
        if value is not None and (type(value) not in (int, float) or not 0 <= value < MAX_COST):
            raise ValueError(f"weight must be a finite number that is not negative, got {value!r:.100}")
        self._weight = value

    @property
    def fence(self) -> int:
        """The number of this attempt; other systems can use it to refuse writes with a lower one."""
        return self.attempt

    @property
    def is_last_try(self) -> bool:
        """Whether no try is left after this one."""
        return self.tries >= self.max_tries

    @property
    def logger(self) -> FilteringBoundLogger:
        """A logger that binds the ids of this attempt."""
        return log.bind(**self.log_ids())

    def log_ids(self) -> dict[str, Any]:
        """Return the ids for log records; those of a job only for a step."""
        ids: dict[str, Any] = {"task_id": str(self.task_id), "task_type": self.task_type, "attempt": self.attempt}
        if self.job_id is not None:
            ids.update(job_id=str(self.job_id), step=self.step)
        ids["correlation_id"] = str(self.correlation_id or self.task_id)
        return ids

    def progress(self, fraction: float | None = None, message: str | None = None, **details: Any) -> None:
        """Report progress (0 to 1). Cheap: the latest value is written about once a second."""
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"progress must be a fraction from 0 to 1, got {fraction}")
        given = {"fraction": fraction, "message": message, **details}
        progress = {name: value for name, value in given.items() if value is not None}
        try:
            check_json(progress)
        except ValueRefusedError as error:
            raise ValueError(f"progress cannot be stored: {error}") from None
        self.latest_progress = progress
        if self._line is not None:
            self._line.progressed(self)

    def checkpoint(self, value: Any) -> Saved:
        """Store a value from which a later attempt can continue; `await` the answer, or `wait()` in a thread."""
        if self._line is None:
            raise RuntimeError("a checkpoint can only be stored while a worker runs the task")
        try:
            check_json(value)
        except ValueRefusedError as error:
            raise ValueError(f"the checkpoint cannot be stored: {error}") from None
        self.stored_checkpoint = value
        return Saved(self._line.save_checkpoint(self, value))

    def detach(self) -> None:
        """Cut the context off from the worker: progress is no longer written, and a checkpoint is not stored."""
        self._line = _DetachedChannel()

    def restore(self, default: Any = None) -> Any:
        """Return the latest checkpoint of this or an earlier attempt."""
        return default if self.stored_checkpoint is None else self.stored_checkpoint
