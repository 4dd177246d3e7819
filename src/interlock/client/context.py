"""What a handler is told about its attempt, and what it can say back while it runs.

Invariant: everything said goes out under this attempt's number; once the attempt is lost, nothing said is written.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from interlock.model.json_values import ValueRefusedError, check_json
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Generator
    from concurrent.futures import Future
    from datetime import datetime
    from uuid import UUID

    from structlog.typing import FilteringBoundLogger


MOST = 1e300  # that a cost can be


class Saved:
    """A checkpoint on its way: `await` it in a coroutine, `wait()` for it in a thread. True when it is stored."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[bool]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, bool]:
        return asyncio.wrap_future(self._future).__await__()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the checkpoint is stored; False when the attempt was lost before."""
        return self._future.result(timeout)


class Line(Protocol):
    """How a context reaches the worker that runs it; a process of its own has another kind than a coroutine."""

    def save_checkpoint(self, context: TaskContext, value: Any, /) -> Future[bool]:
        """Store a checkpoint under the attempt's number."""

    def progressed(self, context: TaskContext, /) -> None:
        """Hear that there is new progress to write."""


class TaskContext:
    """One attempt, as its handler sees it. A handler gets it by naming a parameter of this type."""

    __slots__ = (
        "_cost",
        "_line",
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
        input_data: dict[str, Any] | None = None,
        checkpoint: Any = None,
        line: Line | None = None,
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
        self.output_data: Any = None
        self.error: str | None = None
        self._cost: float | None = None
        self.deadline: datetime | None = None
        self.lease_acquired_at: datetime | None = None
        self.lease_timeout: datetime | None = None
        self.processing_started_at: datetime | None = None
        self.processing_completed_at: datetime | None = None
        self.latest_progress: dict[str, Any] | None = None
        self.cancelled = False
        self.cancel_reason: str | None = None
        # for a transactional task: the connection whose commit is the task's commit
        self.connection: Any = None

    @property
    def cost(self) -> float | None:
        """What the attempt cost, in whatever unit; it is stored with the outcome."""
        return self._cost

    @cost.setter
    def cost(self, value: float | None) -> None:
        if value is not None and (type(value) not in (int, float) or not abs(value) < MOST):
            raise ValueError(f"the cost must be a finite number, not {value!r:.100}")
        self._cost = value

    @property
    def fence(self) -> int:
        """The number of this attempt, to pass on to other systems: they refuse what comes with a lower one."""
        return self.attempt

    @property
    def is_last_try(self) -> bool:
        """Whether a failure now is final."""
        return self.tries >= self.max_tries

    @property
    def logger(self) -> FilteringBoundLogger:
        """A logger that names this attempt in every line."""
        return log.bind(
            task_id=str(self.task_id),
            task_type=self.task_type,
            attempt=self.attempt,
            correlation_id=str(self.correlation_id or self.task_id),
        )

    def progress(self, fraction: float | None = None, message: str | None = None, **details: Any) -> None:
        """Say how far the work is (0 to 1). Cheap: the latest word is written about once a second."""
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"progress is a fraction from 0 to 1, not {fraction}")
        said = {"fraction": fraction, "message": message, **details}
        told = {name: value for name, value in said.items() if value is not None}
        try:
            check_json(told)
        except ValueRefusedError as error:
            raise ValueError(f"progress cannot be stored: {error}") from None
        self.latest_progress = told
        if self._line is not None:
            self._line.progressed(self)

    def checkpoint(self, value: Any) -> Saved:
        """Store what a later attempt can go on from; `await` the answer, or `wait()` for it in a thread."""
        if self._line is None:
            raise RuntimeError("a checkpoint can be stored only while a worker runs the task")
        try:
            check_json(value)
        except ValueRefusedError as error:
            raise ValueError(f"the checkpoint cannot be stored: {error}") from None
        self.stored_checkpoint = value
        return Saved(self._line.save_checkpoint(self, value))

    def restore(self, default: Any = None) -> Any:
        """Give the latest checkpoint, of this attempt or an earlier one."""
        return default if self.stored_checkpoint is None else self.stored_checkpoint
