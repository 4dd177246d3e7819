"""The TaskStateMachine: one claimed attempt at a task, from the claim to the settled outcome.

Invariant: an attempt is settled at most once, only while it holds its lease, and its worker holds it until the
database has acknowledged the settle. An attempt that lost its lease is ABANDONED and writes nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from interlock.client.context import TaskContext, as_document
from interlock.client.step_context import StepContext
from interlock.lifecycle import TASK, TaskEvent, TaskState
from interlock.machine import StateMachine
from interlock.model.graph import chosen_branches
from interlock.telemetry import TaskTelemetry, leases_lost_total, log, series_of
from interlock.tracing import RunDetails, RunSpan
from interlock.worker.leaks import LEAK_GRACE_S
from interlock.worker.outcome import (
    Interruption,
    describe_error,
    engine_failed,
    returned,
    succeeded,
    unsuccessful,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from uuid import UUID

    from opentelemetry.trace import Tracer

    from interlock.client.context import WorkerChannel
    from interlock.client.task import Task
    from interlock.store.tasks import ClaimedTask, Outcome

TAKEN_OVER = "another has it"

_losing = threading.Lock()


def _timed_out(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"the handler was still running after {timeout:g} s")


@dataclass(slots=True)
class TaskResult:
    """How an attempt ended."""

    task_id: str
    final_state: TaskState
    output: dict[str, Any] | None = None
    error: str | None = None
    cost: float | None = None
    duration_ms: int | None = None


class HandlerRunner(Protocol):
    """Runs the handler of an attempt."""

    async def run_handler(self, attempt: TaskStateMachine, /) -> Any:
        """Run the handler to its end and return its output as a JSON value."""


class AttemptRunner(HandlerRunner, Protocol):
    """Runs an attempt's handler and settles its outcome."""

    async def settle(self, attempt: TaskStateMachine, /) -> None:
        """Write `attempt.outcome`, or queue it for a batch; call `attempt.finish` when it is acknowledged."""

    async def abandon(self, attempt: TaskStateMachine, /) -> None:
        """Undo the uncommitted writes of an attempt that lost its lease, and release its slot."""

    def leak(self, attempt: TaskStateMachine, settling: Coroutine[Any, Any, None], /) -> None:
        """Report a handler that runs on although it was stopped, and run `settling`, which settles without it."""

    def end_leak(self, attempt: TaskStateMachine, /) -> None:
        """Note that a leaked handler has ended."""


class TaskStateMachine(StateMachine[TaskState, TaskEvent]):
    """One attempt: its state, its handler's context and its outcome."""

    __slots__ = (
        "_completed",
        "_context",
        "_id",
        "_line",
        "_runner",
        "cancel_requested",
        "chosen",
        "claimed",
        "definition",
        "failure",
        "interruption",
        "is_leaked",
        "is_lost",
        "job",
        "lease_until",
        "occupies_slot",
        "outcome",
        "output",
        "running",
        "slot_key",
        "span",
        "task_type",
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
        line: WorkerChannel | None = None,
        since: float | None = None,
    ) -> None:
        telemetry = TaskTelemetry(task_id, series_of(task_type))
        super().__init__(TASK, TaskState.PENDING, observer=telemetry, history=len(TaskState), since=since)
        self._id = task_id
        self.slot_key = 0 if claimed is None else claimed.id.int  # an int hashes in C; a UUID's hash is Python code
        self.task_type = task_type
        self.worker_id = worker_id
        self.definition = definition
        self.claimed = claimed
        # The job document of a step; None for a standalone task.
        self.job: dict[str, Any] | None = None if claimed is None or claimed.extras is None else claimed.extras["job"]
        self.chosen: list[str] | None = None  # branches, if the step is a decision
        self.lease_until = lease_until  # on this process's monotonic clock, independent of the server's clock
        self.running: asyncio.Task[Any] | None = None
        self.cancel_requested = False
        self.is_leaked = False  # settled although the handler runs on
        self.occupies_slot = False
        self._runner: AttemptRunner | None = None
        self.span: RunSpan | None = None  # its trace; None unless traced
        self.is_lost = False  # the lost lease has been counted
        self.outcome: Outcome | None = None
        self.failure: BaseException | None = None  # to be reported with the outcome
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
        line: WorkerChannel | None = None,
        requested_at: float | None = None,
        waits: bool = False,
    ) -> TaskStateMachine:
        """Make the attempt of a task that was just claimed, in PROCESSING; in CLAIMING if it waits for a slot.

        It was PENDING since it was due, and CLAIMING since the claim was sent at `requested_at` (since the epoch).
        """
        sent_at = time.time() if requested_at is None else requested_at
        attempt = cls(
            claimed.id,
            claimed.type,
            worker_id,
            definition=definition,
            claimed=claimed,
            lease_until=lease_until,
            line=line,
            since=sent_at - claimed.waited_s,
        )
        attempt.transition(TaskEvent.CLAIM_REQUESTED, at=sent_at)
        if not waits:
            attempt.begin()
        return attempt

    @classmethod
    def not_started(
        cls, claimed: ClaimedTask, worker_id: str, event: TaskEvent, reason: str, *, requested_at: float | None = None
    ) -> TaskStateMachine:
        """Make the attempt of a task that was claimed and is not started, to be returned to the queue.

        It is ABANDONED because of a shutdown during the claim, or FAILED because the claim failed.
        """
        sent_at = time.time() if requested_at is None else requested_at
        attempt = cls(claimed.id, claimed.type, worker_id, claimed=claimed, since=sent_at - claimed.waited_s)
        attempt.transition(TaskEvent.CLAIM_REQUESTED, at=sent_at)
        attempt.give_back(event, reason)
        return attempt

    def begin(self) -> None:
        """Leave CLAIMING, because the attempt has a slot."""
        self.transition(TaskEvent.CLAIM_SUCCEEDED)

    def give_back(self, event: TaskEvent, reason: str) -> None:
        """End an attempt in CLAIMING, whose task goes back to the queue."""
        self.transition(event, reason)
        self.outcome = returned(self, reason)

    # --- the run: handler, outcome, settle

    async def execute(self, runner: AttemptRunner) -> None:
        """Run the handler and settle its outcome.

        The runner may settle in a batch with other attempts: the final state is reached in `finish`.
        """
        self._runner = runner
        timeout, timer = self.timeout, None
        if timeout is not None:
            timer = asyncio.get_running_loop().call_later(timeout + LEAK_GRACE_S, self._leave_handler)
        try:
            outcome = await self.process(runner)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - any failure is an outcome
            outcome = self._stop_after_engine_failure(error)
        if timer is not None:
            timer.cancel()
        if self.is_leaked:
            runner.end_leak(self)
        else:
            await self._settle(runner, outcome)

    async def _settle(self, runner: AttemptRunner, outcome: Outcome | None) -> None:
        if outcome is None:
            await runner.abandon(self)
        else:
            self.outcome = outcome
            await runner.settle(self)

    async def process(self, runner: HandlerRunner) -> Outcome | None:
        """Run the handler and return the outcome to settle; None if the lease is lost."""
        output: Any = None
        error: BaseException | None = None
        timeout = self.timeout
        try:
            if self.interruption is not None:  # interrupted before it started
                raise asyncio.CancelledError(self.interruption.value)  # noqa: TRY301 - as if the handler were cancelled
            if timeout is None:
                output = await runner.run_handler(self)
            else:
                async with asyncio.timeout(timeout):
                    output = await runner.run_handler(self)
            self._record_choice(output)
        except BaseException as raised:  # noqa: BLE001 - whatever a handler raises is an outcome
            output, error = None, self._cause(raised, timeout)
        return None if self.is_leaked else self._end_processing(output, error)

    def _end_processing(self, output: Any, error: BaseException | None) -> Outcome | None:
        """Leave PROCESSING and return the outcome to settle; None if the lease is lost."""
        if error is not None and self.cancel_requested and self.interruption is not Interruption.LEASE_LOST:
            self.interruption = Interruption.CANCELED  # also when the worker shuts down meanwhile
        if self.interruption is Interruption.LEASE_LOST:
            self.context.error = "the lease was lost"
            self.transition(TaskEvent.LEASE_EXPIRED)
            return None
        self.failure = error
        self._conclude(output, error)
        return succeeded(self) if error is None else unsuccessful(self, error)

    def finish(self, *, written: bool) -> None:
        """Reach the final state: the outcome was written, or refused because the attempt is lost."""
        if self.state is not TaskState.REPORTING and self.machine.is_terminal(self.state):
            return  # it was never started
        self.transition(TaskEvent.REPORT_SUCCEEDED if written else TaskEvent.REPORT_FAILED)

    def _stop_after_engine_failure(self, error: BaseException) -> Outcome | None:
        """Return the outcome of a failure in the engine around the handler; None if the lease is lost."""
        self.interruption = None
        self.failure = error
        if self.state is TaskState.PROCESSING:
            self.context.error = describe_error(error)
            self.transition(TaskEvent.PROCESSING_FAILED)
        if self.state is not TaskState.REPORTING:
            return None
        return engine_failed(self, error)

    def _cause(self, raised: BaseException, timeout: float | None) -> BaseException:
        """Return the error that ended the handler; a TimeoutError past the deadline is the task's own timeout."""
        if isinstance(raised, asyncio.CancelledError):
            asyncio.current_task().uncancel()  # type: ignore[union-attr]  # this code runs in a task
        elif isinstance(raised, TimeoutError):
            deadline = self.context.deadline
            if deadline is not None and datetime.now(UTC) >= deadline:
                return _timed_out(timeout)
        return raised

    def _record_choice(self, output: Any) -> None:
        """Validate and keep the branches that a decision step chose."""
        if self.job is not None and self.job.get("kind") == "decision":
            self.chosen = chosen_branches(self.job.get("branches") or (), output)

    def _conclude(self, output: Any, error: BaseException | None) -> None:
        """Move from PROCESSING to REPORTING."""
        self._completed = time.time()
        if error is None:
            self.output = output
            self.interruption = None  # the handler finished although it was interrupted
            if self._context is not None:
                self._set_result(self._context)
            self.transition(TaskEvent.PROCESSING_SUCCEEDED)
            return
        context = self.context
        if self.interruption is Interruption.SHUTDOWN:
            context.error = "the worker shut down before the handler was done"
        else:
            context.error = context.cancel_reason if self.interruption else describe_error(error)
        self._set_result(context)
        is_shutdown = self.interruption is Interruption.SHUTDOWN
        self.transition(TaskEvent.SHUTDOWN_REQUESTED if is_shutdown else TaskEvent.PROCESSING_FAILED)

    # --- stopping the handler

    def request_cancel(self, reason: str | None) -> bool:
        """Set the cancellation flag that a cooperative handler polls; False if it was set before."""
        if self.cancel_requested:
            return False
        self.cancel_requested = self.context.cancelled = True
        self.context.cancel_reason = reason or Interruption.CANCELED.value
        return True

    def interrupt(self, why: Interruption, reason: str | None = None) -> None:
        """Stop the handler as far as its executor can. A lost lease overrides any earlier interruption."""
        if self.state is not TaskState.PROCESSING:
            return
        if self.interruption is None or why is Interruption.LEASE_LOST:
            self.interruption = why
        self.context.cancelled = True
        self.context.cancel_reason = self.context.cancel_reason or reason or why.value
        if self.running is not None:
            self.running.cancel(why.value)
            self.running.get_loop().call_later(LEAK_GRACE_S, self._leave_handler)

    def _leave_handler(self) -> None:
        """Settle the attempt without its handler, if that is a coroutine which swallowed its cancellation.

        Threads are left by their executor, and processes are killed.
        """
        definition, runner = self.definition, self._runner
        if self.state is not TaskState.PROCESSING or runner is None or self.is_leaked:
            return
        if definition is None or definition.executor != "coroutine":
            return
        self.is_leaked = True
        error = asyncio.CancelledError() if self.interruption is not None else _timed_out(self.timeout)
        runner.leak(self, self._settle(runner, self._end_processing(None, error)))

    def record_lost_lease(self, reason: str = TAKEN_OVER) -> None:
        """Count and log that the attempt no longer holds its task, once.

        The lease keeper's thread and the settle on the worker's loop may find out at the same time.
        """
        with _losing:
            if self.is_lost:
                return
            self.is_lost = True
        leases_lost_total.inc()
        log.warning("lease_lost", task_id=self.task_id, attempt=self.key[1], reason=reason)

    # --- what is known of the attempt

    def log_ids(self) -> dict[str, Any]:
        """Return the ids for log records; those of a job only for a step."""
        ids: dict[str, Any] = {"task_id": self.task_id, "task_type": self.task_type}
        claimed = self.claimed
        if claimed is not None:
            ids["attempt"] = claimed.attempt
            if claimed.job_id is not None:
                ids.update(job_id=str(claimed.job_id), step=claimed.step)
            ids["correlation_id"] = str(claimed.correlation_id or claimed.id)
        return {**ids, "worker_id": self.worker_id}

    def start_span(self, tracer: Tracer) -> RunSpan:
        """Start the span of this attempt, in the trace of the client that made the task."""
        claimed = self.claimed
        if claimed is None:
            raise RuntimeError("an attempt that was never claimed has no trace")
        job_id, correlation_id = claimed.job_id, claimed.correlation_id
        run = RunDetails(
            task_type=self.task_type,
            namespace=claimed.namespace,
            task_id=self.task_id,
            attempt=claimed.attempt,
            worker_id=self.worker_id,
            correlation_id=None if correlation_id is None else str(correlation_id),
            job_id=None if job_id is None else str(job_id),
            step=claimed.step,
        )
        self.span = RunSpan(tracer, claimed.traceparent, run)
        return self.span

    @property
    def task_id(self) -> str:
        """The id of the task."""
        return str(self._id)

    @property
    def key(self) -> tuple[UUID, int]:
        """Task id and attempt number: the fence of every write for this attempt."""
        if self.claimed is None:
            raise RuntimeError("an attempt that was never claimed has no fence")
        return self.claimed.id, self.claimed.attempt

    @property
    def step(self) -> str:
        """The name of the step; empty for a standalone task."""
        return "" if self.claimed is None else self.claimed.step or ""

    @property
    def is_transactional(self) -> bool:
        """Whether the outcome commits together with the handler's own writes."""
        return self.definition is not None and self.definition.transactional

    @property
    def timeout(self) -> float | None:
        """Seconds that the handler may run: the task's own option, else its definition's."""
        claimed = self.claimed
        own = None if claimed is None or claimed.extras is None else claimed.extras["timeout_seconds"]
        return own if own is not None or self.definition is None else self.definition.timeout

    @property
    def started_at(self) -> datetime:
        """When the attempt entered PROCESSING: when it was claimed, unless it waited for a slot."""
        began = next((move for move in self.history if move.to_state is TaskState.PROCESSING), None)
        return datetime.now(UTC) if began is None else began.at

    @property
    def completed_at(self) -> datetime | None:
        """When the handler ended."""
        return datetime.fromtimestamp(self._completed, UTC) if self._completed else None

    @property
    def context(self) -> TaskContext:
        """The handler's context, created on first use: most handlers take none."""
        if self._context is None:
            claimed = self.claimed
            self._context = TaskContext(task_type=self.task_type) if claimed is None else self._context_of(claimed)
        return self._context

    @property
    def has_context(self) -> bool:
        """Whether the context was created."""
        return self._context is not None

    @property
    def latest_progress(self) -> dict[str, Any] | None:
        """The progress that the handler reported last."""
        return None if self._context is None else self._context.latest_progress

    @property
    def has_failed(self) -> bool:
        """Whether the handler raised, was stopped, or the engine failed around it."""
        return self._context is not None and self._context.error is not None

    def result(self) -> TaskResult:
        """Return the attempt's current state with its output or error."""
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
        self._set_result(context)
        return context

    def _set_result(self, context: TaskContext) -> None:
        if self._completed:
            context.output_data = None if context.error is not None else as_document(self.output)
            context.processing_completed_at = self.completed_at
