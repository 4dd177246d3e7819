"""One claimed attempt at a task, from the claim to the settled outcome: the TaskStateMachine.

Invariant: an attempt reports at most once, only while it holds its lease, and its slot is taken until the database
has acknowledged what became of it. An attempt that lost its lease is ABANDONED and writes nothing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from interlock.client.context import TaskContext
from interlock.client.step_context import StepContext
from interlock.lifecycle import TASK, TaskEvent, TaskState
from interlock.machine import StateMachine
from interlock.model.graph import chosen_branches
from interlock.telemetry import TaskTelemetry, series_of
from interlock.worker.outcome import Interruption, described, failed_around, succeeded, unsuccessful

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.client.context import Line
    from interlock.client.task import Task
    from interlock.store.tasks import ClaimedTask, Outcome


# SECTION worker/interruption
# Why a handler is stopped before it is done.


@dataclass(slots=True)
class TaskResult:
    """How an attempt ended, for whoever ran it."""

    task_id: str
    final_state: TaskState
    output: Any = None
    error: str | None = None
    cost: float | None = None
    duration_ms: int | None = None


class Services(Protocol):
    """What an attempt needs of the worker that runs it."""

    async def run_handler(self, attempt: TaskStateMachine, /) -> Any:
        """Run the handler to its end and give its output, ready for JSON."""

    async def settle(self, attempt: TaskStateMachine, outcome: Outcome, /) -> bool:
        """Write the outcome; False when the attempt is lost."""


class TaskStateMachine(StateMachine[TaskState, TaskEvent]):
    """One attempt: its state, its context, and the way from the claim to the outcome."""

    __slots__ = (
        "_completed",
        "_context",
        "_id",
        "_line",
        "answer",
        "chosen",
        "claimed",
        "definition",
        "interruption",
        "is_lost",
        "job",
        "lease_until",
        "number",
        "outcome",
        "output",
        "running",
        "task_type",
        "unwanted",
        "worker_id",
    )

    def __init__(
        self,
        task_id: str | UUID,
        task_type: str,
        worker_id: str,
        *,
        definition: Task[..., Any] | None = None,
        claimed: ClaimedTask | None = None,
        lease_until: float = 0.0,
        line: Line | None = None,
    ) -> None:
        telemetry = TaskTelemetry(task_id, series_of(task_type))
        super().__init__(TASK, TaskState.PENDING, observer=telemetry, history=len(TaskState))
        self._id = task_id
        self.number = 0 if claimed is None else claimed.id.int  # of the task: its hash is Python's own, and fast
        self.task_type = task_type
        self.worker_id = worker_id
        self.definition = definition
        self.claimed = claimed
        # for a step, what it has to know of its job
        self.job: dict[str, Any] | None = None if claimed is None or claimed.extras is None else claimed.extras["job"]
        self.chosen: list[str] | None = None  # by a decision, of its branches
        self.lease_until = lease_until  # by this process's own monotonic clock, whatever the server's shows
        self.running: asyncio.Task[Any] | None = None
        self.unwanted = False  # somebody asked for the task's cancellation
        self.is_lost = False  # it is known, and counted, that the attempt holds the task no more
        # what is to be reported, and who, besides the worker, wants to know whether it was
        self.outcome: Outcome | None = None
        self.answer: asyncio.Future[bool] | None = None
        self.interruption: Interruption | None = None
        self._context: TaskContext | None = None
        self._line = line
        self.output: Any = None
        self._completed = 0.0

    @classmethod
    def of_claim(
        cls,
        claimed: ClaimedTask,
        worker_id: str,
        definition: Task[..., Any],
        *,
        lease_until: float,
        line: Line | None = None,
    ) -> TaskStateMachine:
        """Make the machine of a task that was just claimed; it is about to be processed."""
        attempt = cls(
            claimed.id,
            claimed.type,
            worker_id,
            definition=definition,
            claimed=claimed,
            lease_until=lease_until,
            line=line,
        )
        attempt.transition(TaskEvent.CLAIM_REQUESTED)
        attempt.transition(TaskEvent.CLAIM_SUCCEEDED)
        return attempt

    @property
    def task_id(self) -> str:
        """The id of the task."""
        return str(self._id)

    @property
    def context(self) -> TaskContext:
        """What the handler is told, made when somebody first asks: most handlers never do."""
        if self._context is None:
            claimed = self.claimed
            self._context = TaskContext(task_type=self.task_type) if claimed is None else self._context_of(claimed)
        return self._context

    @property
    def has_context(self) -> bool:
        """Whether somebody has asked for the context."""
        return self._context is not None

    @property
    def latest_progress(self) -> dict[str, Any] | None:
        """What the handler said last of how far it is."""
        return None if self._context is None else self._context.latest_progress

    @property
    def has_failed(self) -> bool:
        """Whether something went wrong with the attempt."""
        return self._context is not None and self._context.error is not None

    def _context_of(self, claimed: ClaimedTask) -> TaskContext:
        kind = TaskContext if self.job is None else partial(StepContext, job=self.job)
        context = kind(
            claimed.id,
            claimed.type,
            namespace=claimed.namespace,
            attempt=claimed.attempt,
            tries=claimed.tries,
            max_tries=claimed.max_tries,
            job_id=claimed.job_id,
            step=claimed.step,
            correlation_id=claimed.correlation_id,
            input_data=claimed.input,
            checkpoint=claimed.own("checkpoint"),
            line=self._line,
        )
        started = self.started_at
        context.lease_acquired_at = context.processing_started_at = started
        left = max(self.lease_until - time.monotonic(), 0.0)
        context.lease_timeout = datetime.now(UTC) + timedelta(seconds=left)
        timeout = self.timeout
        if timeout is not None:
            context.deadline = started + timedelta(seconds=timeout)
        self._tell_result(context)
        return context

    def _tell_result(self, context: TaskContext) -> None:
        if self._completed:
            context.output_data = self.output
            context.processing_completed_at = self.completed_at

    @property
    def step(self) -> str:
        """The name of the step that the task is; none is an empty name."""
        return "" if self.claimed is None else self.claimed.step or ""

    @property
    def started_at(self) -> datetime:
        """When the attempt began to be processed, which is as soon as it was claimed."""
        began = next((move for move in self.history if move.to_state is TaskState.PROCESSING), None)
        return datetime.now(UTC) if began is None else began.at

    @property
    def completed_at(self) -> datetime | None:
        """When the handler had ended."""
        return datetime.fromtimestamp(self._completed, UTC) if self._completed else None

    @property
    def timeout(self) -> float | None:
        """The seconds that the handler has: the task's own, else its definition's."""
        claimed = self.claimed
        own = None if claimed is None or claimed.extras is None else claimed.extras["timeout_seconds"]
        return own if own is not None or self.definition is None else self.definition.timeout

    async def execute(self, services: Services) -> TaskResult:
        """Run the handler, report what came of it, and tell how it ended."""
        outcome = await self.process(services)
        if outcome is not None:
            self.reported(written=await services.settle(self, outcome))
        return self.result()

    async def process(self, services: Services) -> Outcome | None:
        """Run the handler; give what is to be reported, or nothing when the lease is lost."""
        output: Any = None
        error: BaseException | None = None
        timeout = self.timeout
        try:
            if self.interruption is not None:  # before it had its turn
                raise asyncio.CancelledError(self.interruption.value)  # noqa: TRY301 - as it would be in its turn
            if timeout is None:
                output = await services.run_handler(self)
            else:
                async with asyncio.timeout(timeout):
                    output = await services.run_handler(self)
            self._decide(output)
        except BaseException as raised:  # noqa: BLE001 - whatever a handler raises is an outcome
            output, error = None, self._stopped_by(raised, timeout)
        if error is not None and self.unwanted and self.interruption is not Interruption.LEASE_LOST:
            self.interruption = Interruption.CANCELED  # it was asked to stop, and did; a shutdown changes nothing
        if self.interruption is Interruption.LEASE_LOST:
            self.context.error = "the lease was lost"
            self.transition(TaskEvent.LEASE_EXPIRED)
            return None
        self._conclude(output, error)
        return succeeded(self) if error is None else unsuccessful(self, error)

    def fail(self, error: BaseException) -> Outcome | None:
        """Make an outcome of whatever went wrong around the handler itself; nothing when the lease is lost."""
        self.interruption = None
        if self.state is TaskState.PROCESSING:
            self.transition(TaskEvent.PROCESSING_FAILED)
        if self.state is not TaskState.REPORTING:
            return None
        return self.failed_after_all(error)

    def failed_after_all(self, error: BaseException) -> Outcome:
        """Make the outcome of an attempt that failed outside its handler; it is tried again if it may be."""
        return failed_around(self, error)

    def reported(self, *, written: bool) -> None:
        """Hear whether the outcome was written."""
        self.transition(TaskEvent.REPORT_SUCCEEDED if written else TaskEvent.REPORT_FAILED)

    def _stopped_by(self, raised: BaseException, timeout: float | None) -> BaseException:
        """Tell what stopped the handler, by what came out of it."""
        if isinstance(raised, asyncio.CancelledError):
            asyncio.current_task().uncancel()  # type: ignore[union-attr]  # this code runs in a task
        elif isinstance(raised, TimeoutError):
            deadline = self.context.deadline
            if deadline is not None and datetime.now(UTC) >= deadline:
                return TimeoutError(f"the handler was still running after {timeout:g} s")
        return raised

    def _decide(self, output: Any) -> None:
        """See to it that a decision has chosen among its branches."""
        if self.job is not None and self.job.get("kind") == "decision":
            self.chosen = chosen_branches(self.job.get("branches") or (), output)

    def ask_to_stop(self, reason: str | None) -> bool:
        """Tell the handler that its work is not wanted any more; False when it was told before."""
        if self.unwanted:
            return False
        self.unwanted = self.context.cancelled = True
        self.context.cancel_reason = reason or Interruption.CANCELED.value
        return True

    def interrupt(self, why: Interruption, reason: str | None = None) -> None:
        """Stop the handler, as far as its executor can; what then happens depends on why."""
        if self.state is not TaskState.PROCESSING:
            return
        if self.interruption is None or why is Interruption.LEASE_LOST:
            self.interruption = why
        self.context.cancelled = True
        self.context.cancel_reason = self.context.cancel_reason or reason or why.value
        if self.running is not None:
            self.running.cancel(why.value)

    def _conclude(self, output: Any, error: BaseException | None) -> None:
        self._completed = time.time()
        if error is None:
            self.output = output
            self.interruption = None  # it finished all the same, and what is done is done
            if self._context is not None:
                self._tell_result(self._context)
            self.transition(TaskEvent.PROCESSING_SUCCEEDED)
            return
        context = self.context
        self._tell_result(context)
        if self.interruption is Interruption.SHUTDOWN:
            context.error = "the worker shut down before the handler was done"
            self.transition(TaskEvent.SHUTDOWN_REQUESTED)
        else:
            context.error = context.cancel_reason if self.interruption else described(error)
            self.transition(TaskEvent.PROCESSING_FAILED)

    @property
    def is_transactional(self) -> bool:
        """Whether the outcome commits with what the handler wrote."""
        return self.definition is not None and self.definition.transactional

    def result(self) -> TaskResult:
        """Tell how the attempt stands."""
        context = self.context
        started, completed = context.processing_started_at, context.processing_completed_at
        return TaskResult(
            self.task_id,
            self.state,
            output=context.output_data,
            error=context.error,
            cost=context.cost,
            duration_ms=int((completed - started).total_seconds() * 1000) if started and completed else None,
        )

    @property
    def key(self) -> tuple[UUID, int]:
        """Task and attempt: what everything written about this attempt is fenced by."""
        if self.claimed is None:
            raise RuntimeError("an attempt that was never claimed has no fence")
        return self.claimed.id, self.claimed.attempt
