"""The Runner: starts claimed attempts, runs their handlers, settles their outcomes and releases their slots.

Invariant: an attempt occupies a slot from its start until its outcome is known, and is held from its claim until the
database has acknowledged that outcome, or it is known to be lost; whatever fails around its handler, both end. No more
attempts than slots run. A transactional task's own writes and its outcome commit together or not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from interlock.client.dependencies import Resources
from interlock.client.step_context import bind
from interlock.errors import DisconnectedError, FenceError, InvariantError, StoreError
from interlock.lifecycle import TaskEvent, TaskRowEvent, TaskState
from interlock.log_context import running_task
from interlock.postgres.connection import is_fault_of_session
from interlock.postgres.transactions import TransactionSessions
from interlock.service import BackgroundTasks
from interlock.store.tasks import TASKS, Outcome
from interlock.telemetry import log
from interlock.tracing import BatchSpan, find_tracer, parse_all
from interlock.worker.attempt import TaskStateMachine
from interlock.worker.executors.base import EngineError
from interlock.worker.executors.dispatch import Executors, contain_error
from interlock.worker.executors.events import HandlerEvents, StepExecutionCompletionEvent
from interlock.worker.executors.json_lines import MAX_LINE_BYTES
from interlock.worker.failures import FailureReports
from interlock.worker.figures import ProcessFigures
from interlock.worker.leaks import LeakedHandlers, coroutine_position
from interlock.worker.leases import LeaseKeeper
from interlock.worker.outcome import Interruption, engine_failed, rolled_back
from interlock.worker.prefetch import Prefetch
from interlock.worker.settler import Settler, max_batch_size, settle
from interlock.worker.stats import WorkerStatistics

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable
    from uuid import UUID

    from opentelemetry.trace import Tracer

    from interlock.client.app import Interlock
    from interlock.postgres.transactions import HandlerTransaction
    from interlock.store.tasks import ClaimedTask
    from interlock.worker.executors.events import StepExecutionEvent
    from interlock.worker.isolation import Isolation
    from interlock.worker.loop_thread import LoopThread
    from interlock.worker.process import WorkerStateMachine

FAILURES = frozenset({TaskRowEvent.FAIL, TaskRowEvent.RETRY})
CLAIMED_AGAIN = "this worker has claimed the task anew"
MAX_LOOP_HOLD_S = 0.004  # how long attempts that never wait may keep other tasks from the event loop
RESULT_LINE_OVERHEAD = 1024 * 1024  # bytes that a child process's line may have besides the result


class Runner:
    """The attempts of one worker, their executors, settler and leases."""

    def __init__(self, worker: WorkerStateMachine, app: Interlock, thread: LoopThread, isolation: Isolation) -> None:
        settings = worker.settings
        self._worker = worker
        self._context = worker.context
        self._isolation = isolation
        self._tasks = app.tasks
        self._sessions = TransactionSessions(app.url, TASKS["settle_running_tasks"])
        self._max_result_size = settings.largest_result
        self._leaving = BackgroundTasks()
        self._refills = False  # the slots that are free will be filled as soon as the loop comes round
        self._tracing = app.config.tracing
        self._tracer: Tracer | None = None
        self._transactions: dict[tuple[UUID, int], HandlerTransaction] = {}
        self.leaks = LeakedHandlers(self._on_leaks_changed)
        self._executors = Executors(
            threads=settings.concurrency,
            processes=settings.processes,
            app_reference=settings.app_reference,
            database_url=app.url,
            max_line_bytes=max(MAX_LINE_BYTES, settings.largest_result + RESULT_LINE_OVERHEAD),
            leaks=self.leaks,
        )
        self._failures = FailureReports(app.error_hooks)
        self.resources = Resources(app.dependency_overrides)
        self.events = HandlerEvents()
        self.statistics = WorkerStatistics(self.events.statistics, self.leaks)
        self.figures = ProcessFigures()
        self.prefetch = Prefetch(settings.concurrency, self._on_overdue)
        self.settler = Settler(
            self,
            worker.worker_id,
            max_batch=max_batch_size(settings.concurrency),
            max_result_size=settings.largest_result,
        )
        self.leases = LeaseKeeper(app.url, settings, worker.context.active, thread=thread, runner=self)

    # --- starting

    def start(self, claimed: Iterable[ClaimedTask], lease_until: float, requested_at: float | None = None) -> None:
        """Start attempts in the free slots, and let the others wait for one.

        An earlier attempt at the same task, which must have lost its lease, is stopped.
        """
        self._tracer = find_tracer(enabled=self._tracing)
        if self._tracer is not None:
            claimed = list(claimed)
            self._trace_claim(self._tracer, claimed, requested_at)
        self.prefetch.add([self._attempt_at(task, lease_until, requested_at) for task in claimed])
        self._fill_slots()
        self.prefetch.watch()

    def _trace_claim(self, tracer: Tracer, claimed: list[ClaimedTask], requested_at: float | None) -> None:
        related = parse_all(task.traceparent for task in claimed)
        if not related:
            return
        namespaces = {task.namespace for task in claimed}
        details = {
            "messaging.destination.name": namespaces.pop() if len(namespaces) == 1 else None,
            "messaging.client.id": self._worker.worker_id,
        }
        with BatchSpan(
            tracer, "claim", "receive", related, count=len(claimed), began_s=requested_at, attributes=details
        ):
            pass

    def _attempt_at(self, claimed: ClaimedTask, lease_until: float, requested_at: float | None) -> TaskStateMachine:
        active = self._context.active
        attempt = TaskStateMachine.of_claim(
            claimed,
            self._worker.worker_id,
            self._tasks[claimed.type],
            lease_until=lease_until,
            line=self.leases,
            requested_at=requested_at,
            waits=True,
        )
        key = attempt.slot_key
        if key in active:
            active[key].record_lost_lease(CLAIMED_AGAIN)
            active[key].interrupt(Interruption.LEASE_LOST, CLAIMED_AGAIN)
        active[key] = attempt
        self.statistics.tasks.dispatched += 1
        return attempt

    def _fill_slots(self) -> None:
        """Run attempts that wait in the slots that are free."""
        ready: deque[TaskStateMachine] = deque()
        while (attempt := self._begin_next()) is not None:
            ready.append(attempt)
        if ready:
            self._spawn(ready)

    def _refill_slots(self) -> None:
        self._refills = False
        if self._worker.is_accepting_tasks():
            self._fill_slots()

    def _begin_next(self) -> TaskStateMachine | None:
        """Give a free slot to the attempt that has waited for longest; None if no slot is free, or none waits."""
        context = self._context
        while self.prefetch and context.occupied < self._worker.settings.concurrency:
            attempt = self.prefetch.take()
            if attempt.is_lost or attempt.lease_until <= time.monotonic():
                self._drop(attempt)
                continue
            attempt.begin()
            attempt.occupies_slot = True
            context.occupied += 1
            context.current_task_sm = attempt
            if attempt.claimed is not None and attempt.claimed.extras and attempt.claimed.extras["unwanted"]:
                self.cancel(attempt, None)
            return attempt
        return None

    def _drop(self, attempt: TaskStateMachine) -> None:
        """Let go of an attempt that lost its lease while it waited for a slot."""
        attempt.record_lost_lease("it could not be renewed in time")
        attempt.transition(TaskEvent.CLAIM_FAILED, "the lease was lost")
        self.finish(attempt, written=False)

    def return_waiting(self, event: TaskEvent, why: str) -> None:
        """Return the tasks that wait for a slot to the queue; they use up no try."""
        self._return(self.prefetch.take_all(), event, why)

    def _on_overdue(self, attempts: list[TaskStateMachine]) -> None:
        self._return(attempts, TaskEvent.CLAIM_FAILED, "whose slots stayed busy")

    def _return(self, attempts: Iterable[TaskStateMachine], event: TaskEvent, why: str) -> None:
        for attempt in attempts:
            if attempt.is_lost:
                self._drop(attempt)
            else:
                attempt.give_back(event, why)
                self.settler.add(attempt)

    def _spawn(self, ready: deque[TaskStateMachine]) -> None:
        """Run attempts in one asyncio task; as soon as that waits, each attempt behind it gets a task of its own.

        Most handlers of a full queue never wait, and a task for each would cost more than the handler.
        """
        loop = asyncio.get_running_loop()
        asyncio.Task(self._run_attempts(ready), loop=loop)
        if len(ready) > 1:
            loop.call_soon(self._spawn_each, ready)

    def _spawn_each(self, ready: deque[TaskStateMachine]) -> None:
        while ready:
            self._spawn(deque((ready.popleft(),)))

    async def _run_attempts(self, ready: deque[TaskStateMachine]) -> None:
        """Run attempts one after the other, until one waits, or leaves a cancellation or context variables behind.

        Those that wait for a slot come last: each takes the slot of the one before.
        """
        current, clean = asyncio.current_task(), copy_context()
        if current is None:
            raise InvariantError("attempts run in a task")
        until = time.monotonic() + MAX_LOOP_HOLD_S
        while ready or (self.prefetch and self._worker.is_accepting_tasks()):
            attempt = ready.popleft() if ready else self._begin_next()
            if attempt is None:  # no slot is free
                return
            attempt.running = current
            try:
                await attempt.execute(self)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the slot must not leak
                await self._give_up(attempt, error)
            if current.cancelling() or copy_context() != clean:
                return
            if time.monotonic() > until:
                if ready:
                    self._spawn(deque(ready))
                    ready.clear()
                return

    # --- running: the AttemptRunner of TaskStateMachine.execute

    def run_handler(self, attempt: TaskStateMachine) -> Coroutine[Any, Any, Any]:
        """Run the handler to its end and return its output as a JSON value."""
        return self._run_handler(attempt) if self._tracer is None else self._run_traced(attempt, self._tracer)

    async def _run_traced(self, attempt: TaskStateMachine, tracer: Tracer) -> Any:
        with attempt.start_span(tracer).active():
            return await self._run_handler(attempt)

    async def _run_handler(self, attempt: TaskStateMachine) -> Any:
        definition = attempt.definition
        if definition is None or attempt.claimed is None:
            raise RuntimeError("an attempt that was never claimed has no handler")
        job, given = attempt.job, attempt.claimed.input
        arguments = definition.decode(given) if job is None else bind(definition, given, job)
        event = self.events.publish(attempt, definition, arguments)
        token = running_task.set(attempt)  # for the handler's log records
        try:
            if definition.needs_context:
                output = await self._run_with_context(event)
            else:
                output = await definition.function(**arguments)
            completion = StepExecutionCompletionEvent(event.correlation_id, output)
        except BaseException as error:  # noqa: BLE001 - complete() raises it again
            completion = StepExecutionCompletionEvent(event.correlation_id, error=contain_error(error))
        running_task.reset(token)
        return self.events.complete(completion)

    async def _run_with_context(self, event: StepExecutionEvent) -> Any:
        _, attempt, definition, arguments = event
        if definition.transactional:
            try:
                transaction = self._transactions[attempt.key] = await self._sessions.begin()
            except (StoreError, OSError) as error:
                raise EngineError(f"no connection for its transaction: {error}") from error
            attempt.context.connection = transaction.connection
        executor = self._executors.get(definition)
        if not definition.dependencies or definition.executor == "process":  # a child process makes its own
            return await executor.run(definition, attempt.context, arguments)
        async with self.resources.injected(definition.dependencies, attempt.context) as injected:
            return await executor.run(definition, attempt.context, {**arguments, **injected})

    async def settle(self, attempt: TaskStateMachine) -> None:
        """Commit the outcome of a transactional attempt with its writes; queue any other for the settler."""
        if attempt.span is not None and attempt.outcome is not None:
            event = attempt.outcome.event
            attempt.span.end(event.value, attempt.failure if event in FAILURES else None)
        if attempt.is_transactional and not await self._settle_in_transaction(attempt):
            return
        if attempt.failure is not None:
            self._failures.report(attempt)
        self.settler.add(attempt)
        self._vacate(attempt)

    async def _settle_in_transaction(self, attempt: TaskStateMachine) -> bool:
        """Settle a success in its handler's transaction, roll back any other; True if an outcome is left to settle."""
        transaction = self._transactions.pop(attempt.key, None)
        if transaction is None:
            return True
        if attempt.is_leaked:
            await transaction.abort()
            return True
        if attempt.outcome is None or attempt.outcome.event is not TaskRowEvent.SUCCEED:
            await _roll_back(transaction)
            return True
        is_written = False
        try:
            lost = await settle(
                await transaction.take_back(),
                [attempt],
                actor=attempt.worker_id,
                max_result_size=self._max_result_size,
            )
            is_written = not lost
            await transaction.end(commit=is_written)
        except DisconnectedError as error:
            # The server may have committed: then the return finds that outcome and changes nothing.
            await _roll_back(transaction)
            attempt.outcome = engine_failed(attempt, error)
            self.settler.add(attempt, is_unconfirmed=True)
            self._vacate(attempt)
            return False
        except FenceError:
            await _roll_back(transaction)
            attempt.record_lost_lease()
            lost = {attempt.key[0]}
        except (StoreError, TypeError, ValueError) as error:  # refused by the database, or by the encoder
            if is_fault_of_session(error):  # such as a handler that removes all prepared statements
                self._sessions.stop_preparing()
            await _roll_back(transaction)
            attempt.outcome, attempt.failure = rolled_back(attempt, error), error
            # The COMMIT was refused, or it was not, and the reset of the session after it was.
            self._failures.report(attempt)
            self.settler.add(attempt, is_unconfirmed=is_written)
            self._vacate(attempt)
            return False
        self.finish(attempt, written=not lost)
        return False

    async def abandon(self, attempt: TaskStateMachine) -> None:
        """Roll back the writes of an attempt that lost its lease, and release its slot."""
        if attempt.span is not None:
            attempt.span.end("lease_lost", FenceError("the lease was lost"))
        transaction = self._transactions.pop(attempt.key, None)
        if transaction is not None:
            await (transaction.abort() if attempt.is_leaked else _roll_back(transaction))
        self._release(attempt)

    @property
    def is_idle(self) -> bool:
        """Tell whether one attempt is held and no other, and it was claimed after a rest: no backlog is waiting."""
        return len(self._context.active) == 1 and self._context.rested

    def finish(self, attempt: TaskStateMachine, *, written: bool) -> None:
        """Let go of an attempt whose settle was acknowledged (`written`), or that is lost."""
        attempt.finish(written=written)
        self.figures.record(attempt)
        tasks = self.statistics.tasks
        if written:
            tasks.completed += 1
            self.prefetch.settled += 1
        else:
            tasks.mismatched += 1
            if attempt.is_lost:
                self._isolation.survive(attempt)  # its handler has ended, and the worker lives
        self._release(attempt)

    async def _give_up(self, attempt: TaskStateMachine, error: BaseException) -> None:
        """Release an attempt that cannot be settled: its lease expires, and recovery decides."""
        if attempt.span is not None:
            attempt.span.end("let_go", error)
        log.error("attempt_let_go", task_id=attempt.task_id, attempt=attempt.key[1], error=repr(error))
        self._isolation.survive(attempt)
        transaction = self._transactions.pop(attempt.key, None)
        if transaction is not None:
            with suppress(Exception):
                await _roll_back(transaction)
        self._vacate(attempt)  # also if the same task was claimed again and has its place in `active`
        if self._context.active.get(attempt.slot_key) is attempt:
            self._release(attempt)

    def _vacate(self, attempt: TaskStateMachine) -> None:
        """Free the slot of an attempt whose outcome is known, or that has none."""
        if attempt.occupies_slot:
            attempt.occupies_slot = False
            self._context.occupied -= 1
            if self.prefetch and not self._refills:
                self._refills = True
                asyncio.get_running_loop().call_soon(self._refill_slots)
            self._worker.slot_freed.set()

    def _release(self, attempt: TaskStateMachine) -> None:
        self._vacate(attempt)
        context, key = self._context, attempt.slot_key
        if context.active.get(key) is attempt:
            del context.active[key]
        if context.current_task_sm is attempt:
            context.current_task_sm = next(iter(context.active.values()), None)
        context.tasks_processed += 1
        if attempt.has_failed and attempt.interruption is not Interruption.SHUTDOWN:
            context.tasks_failed += 1
            self.statistics.tasks.failed += 1
            if attempt.claimed is not None and attempt.claimed.own("limit_keys"):
                self._worker.components.fetcher.expect_limited_tasks()
            self._worker.wake.set()  # the retry may be due before the next poll
        self._worker.slot_freed.set()

    # --- stopping

    def lose(self, attempt: TaskStateMachine, reason: str, *, has_stalled: bool) -> None:
        """Stop a handler whose lease is lost; unless the process itself stood still, its task is not to blame."""
        if not has_stalled:
            self._isolation.survive(attempt)
        if attempt.state is TaskState.CLAIMING:
            self.prefetch.remove(attempt)
            self._drop(attempt)
            return
        attempt.interrupt(Interruption.LEASE_LOST, f"lease lost: {reason}")

    def leak(self, attempt: TaskStateMachine, settling: Coroutine[Any, Any, None]) -> None:
        """Report a coroutine that runs on although it was stopped, and settle its attempt without it."""
        definition = attempt.definition
        where = None if definition is None else coroutine_position(attempt.running, definition.function)
        self.events.close(attempt)
        self.leaks.add(attempt, attempt.context, where)
        self._leaving.spawn("settle without handler", self._settle_leaked(attempt, settling))

    async def _settle_leaked(self, attempt: TaskStateMachine, settling: Coroutine[Any, Any, None]) -> None:
        try:
            await settling
        except Exception as error:  # noqa: BLE001 - the slot must not leak
            await self._give_up(attempt, error)

    def end_leak(self, attempt: TaskStateMachine) -> None:
        """Note that the coroutine of a leaked handler has ended."""
        self.leaks.remove(attempt)

    def _on_leaks_changed(self) -> None:
        self._worker.components.registration.reread()  # a heartbeat, which writes the statistics

    def cancel(self, attempt: TaskStateMachine, reason: str | None) -> None:
        """Ask a handler to stop, and stop it after the cancel grace; at once if it cannot see the request.

        A task that waits for a slot is canceled without being started.
        """
        if attempt.state is TaskState.CLAIMING:
            self.prefetch.remove(attempt)
            attempt.transition(TaskEvent.CLAIM_FAILED, "canceled before it had a slot")
            attempt.outcome = Outcome(*attempt.key, TaskRowEvent.CANCEL, reason=reason or Interruption.CANCELED.value)
            self.settler.add(attempt)
            return
        if not attempt.request_cancel(reason):
            return
        definition = attempt.definition
        if definition is not None:
            self._executors.get(definition).cancel(attempt.context)
            if definition.executor == "coroutine" and definition.context_parameter is None:
                attempt.interrupt(Interruption.CANCELED, reason)
                return
        later = asyncio.get_running_loop().call_later
        later(self._worker.settings.cancel_grace, attempt.interrupt, Interruption.CANCELED, reason)

    async def close(self) -> None:
        """Roll back the transactions that are left, and close the executors."""
        for transaction in self._transactions.values():
            await _roll_back(transaction)
        self._transactions.clear()
        await self._sessions.close()
        await self._leaving.stop()
        await self._executors.close()
        await self._failures.close()


async def _roll_back(transaction: HandlerTransaction) -> None:
    """Roll back, which cannot fail: a lost connection rolls back too."""
    with suppress(StoreError, OSError):
        await transaction.end(commit=False)
