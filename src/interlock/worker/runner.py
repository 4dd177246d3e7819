"""The attempts that a worker has under way, from their start to what came of their report.

Invariant: an attempt takes a slot from its start until the database has acknowledged its outcome, or it is known to be
lost; whatever happens around its handler, the slot does not leak.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import AsyncExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interlock.client.step_context import bind
from interlock.errors import DisconnectedError, InvariantError, StatementError, StoreError
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.connection import connect, translated
from interlock.store.task_admin import cancel_unfinished_tasks
from interlock.store.tasks import insert_callbacks, notify_ended, settle_running_tasks
from interlock.telemetry import log
from interlock.worker.attempt import TaskStateMachine
from interlock.worker.executors.dispatch import Executors, contain_error
from interlock.worker.executors.events import HandlerEvents
from interlock.worker.executors.json_lines import MAX_LINE_BYTES
from interlock.worker.leases import count_lost
from interlock.worker.outcome import Interruption

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.client.task import Task
    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask, Outcome
    from interlock.worker.assembly import Parts
    from interlock.worker.settings import WorkerSettings
    from interlock.worker.settler import Settler


ANEW = "this worker has claimed the task anew"
TURN = 0.004  # seconds for which attempts that do not wait may keep others from the loop


@dataclass(slots=True)
class WorkerContext:
    """What a worker process has at hand."""

    connection: Connection | None = None
    backoff_count: int = 0
    last_recovery_time: datetime | None = None
    shutdown_requested: bool = False
    current_task_sm: TaskStateMachine | None = None
    tasks_processed: int = 0
    tasks_failed: int = 0
    # all attempts under way, by their number;
    # at the default concurrency of 1 that is current_task_sm and nothing else
    active: dict[int, TaskStateMachine] = field(default_factory=dict)


class Running:
    """Runs attempts. `slot_freed` is set whenever one has ended, `wake` when its task may be due again."""

    def __init__(
        self,
        parts: Parts,
        context: WorkerContext,
        *,
        worker_id: str,
        cancel_grace: float,
        wake: asyncio.Event,
        slot_freed: asyncio.Event,
    ) -> None:
        self._parts = parts
        self._context = context
        self._worker_id = worker_id
        self._cancel_grace = cancel_grace
        self._wake = wake
        self._slot_freed = slot_freed

    def start(self, claimed: Iterable[ClaimedTask], lease_until: float) -> None:
        """Start attempts. An earlier one of the same task, which must have lost its lease, is stopped."""
        self._begin(deque([self._attempt_at(task, lease_until) for task in claimed]))

    def _attempt_at(self, claimed: ClaimedTask, lease_until: float) -> TaskStateMachine:
        active, parts = self._context.active, self._parts
        definition = parts.services.definition(claimed.type)
        attempt = TaskStateMachine.of_claim(
            claimed, self._worker_id, definition, lease_until=lease_until, line=parts.keeper
        )
        number = attempt.number
        if number in active:
            count_lost(active[number], ANEW)
            active[number].interrupt(Interruption.LEASE_LOST, ANEW)
        active[number] = self._context.current_task_sm = attempt
        parts.statistics.tasks.dispatched += 1
        if claimed.extras is not None and claimed.extras["unwanted"]:
            self.cancel(attempt, None)
        return attempt

    def _begin(self, ready: deque[TaskStateMachine]) -> None:
        """Run attempts in one task of the loop; as soon as that waits, each of those behind it gets its own."""
        loop = asyncio.get_running_loop()
        asyncio.Task(self._run_in_turn(ready), loop=loop)
        if len(ready) > 1:
            loop.call_soon(self._part, ready)

    def _part(self, ready: deque[TaskStateMachine]) -> None:
        while ready:
            self._begin(deque((ready.popleft(),)))

    async def _run_in_turn(self, ready: deque[TaskStateMachine]) -> None:
        """Run attempts one after the other, unless one waits, or leaves something behind that is not for the next."""
        current, clean = asyncio.current_task(), copy_context()
        if current is None:
            raise InvariantError("attempts run in a task")
        until = time.monotonic() + TURN
        while ready:
            attempt = ready.popleft()
            attempt.running = current
            await self._execute(attempt)
            if current.cancelling() or copy_context() != clean:
                return
            if time.monotonic() > until:
                self._begin(deque(ready))
                ready.clear()

    @staticmethod
    async def give_way() -> None:
        """Let handlers that never wait be done, and their outcomes be sent, before the worker sees to anything else."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _execute(self, attempt: TaskStateMachine) -> None:
        """Run one attempt up to its report. A plain outcome is written with others, and heard of in `reported`."""
        parts = self._parts
        try:
            try:
                outcome = await attempt.process(parts.services)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever it is, it is an outcome
                outcome = attempt.fail(error)
            if outcome is None:
                await parts.services.abandon(attempt)
                self._finish(attempt)
            elif outcome.event is TaskRowEvent.CANCEL or attempt.is_transactional:
                self.reported(attempt, await parts.services.settle(attempt, outcome))
            else:
                parts.settler.report(attempt, outcome)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever it is, the slot must not leak
            await self._let_go(attempt, error)

    async def _let_go(self, attempt: TaskStateMachine, error: BaseException) -> None:
        """Give up an attempt of which nothing can be reported: its lease runs out, and recovery decides."""
        log.error("attempt_let_go", task_id=attempt.task_id, attempt=attempt.key[1], error=repr(error))
        with suppress(Exception):
            await self._parts.services.abandon(attempt)
        if self._context.active.get(attempt.number) is attempt:
            self._finish(attempt)

    def reported(self, attempt: TaskStateMachine, written: bool) -> None:  # noqa: FBT001 - the settler's one word
        """Hear whether an outcome was written; False when the attempt was lost."""
        attempt.reported(written=written)
        seen = self._parts.statistics.tasks
        if written:
            seen.completed += 1
        else:
            seen.mismatched += 1
        self._finish(attempt)

    def _finish(self, attempt: TaskStateMachine) -> None:
        context, number = self._context, attempt.number
        if context.active.get(number) is attempt:
            del context.active[number]
        if context.current_task_sm is attempt:
            context.current_task_sm = next(iter(context.active.values()), None)
        context.tasks_processed += 1
        if attempt.has_failed and attempt.interruption is not Interruption.SHUTDOWN:
            context.tasks_failed += 1
            self._parts.statistics.tasks.failed += 1
            self._wake.set()  # it may be due again before this worker would look
        self._slot_freed.set()

    def cancel(self, attempt: TaskStateMachine, reason: str | None) -> None:
        """Tell a handler that it is not wanted any more; stop it if it does not stop by itself."""
        if attempt.ask_to_stop(reason):
            self._parts.services.pass_on_cancel(attempt)
            later = asyncio.get_running_loop().call_later
            later(self._cancel_grace, attempt.interrupt, Interruption.CANCELED, reason)


# SECTION worker/services
# What an attempt needs of its worker: somebody to run its handler, and a way for its outcome into the database.
#
# Invariant: a transactional task's own writes and its outcome commit together or not at all.

AROUND_A_RESULT = 1024 * 1024  # bytes that a line of a handler elsewhere may have besides its result


class _Transaction:
    """The connection of one transactional attempt, open from before its handler until after its outcome."""

    __slots__ = ("connection", "stack")

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.connection: Connection | None = None

    async def begin(self, url: str) -> Connection:
        self.connection = await self.stack.enter_async_context(connect(url))
        await self.connection.set_autocommit(False)
        return self.connection

    async def end(self, *, commit: bool) -> None:
        """Commit, which may still be refused, or undo everything, which cannot fail: a lost connection undoes it."""
        try:
            if commit and self.connection is not None:
                with translated(self.connection):
                    await self.connection.commit()
        finally:
            with suppress(StoreError, OSError):
                if self.connection is not None and not self.connection.closed:
                    with translated(self.connection):
                        await self.connection.rollback()
                await self.stack.aclose()


class AttemptServices:
    """The tasks of the app, the executors that run their handlers, and the way of their outcomes."""

    def __init__(self, app: Interlock, settings: WorkerSettings, settler: Settler, url: str) -> None:
        self._tasks = app.tasks
        self._settler = settler
        self._url = url
        self._executors = Executors(
            threads=settings.concurrency,
            processes=settings.processes,
            app_reference=settings.app_reference,
            max_line_bytes=max(MAX_LINE_BYTES, settings.largest_result + AROUND_A_RESULT),
        )
        self._largest_result = settings.largest_result
        self._transactions: dict[tuple[UUID, int], _Transaction] = {}
        self.events = HandlerEvents()

    def definition(self, task_type: str) -> Task[..., Any]:
        """Find the task of a type; the claim asks only for types that are there."""
        return self._tasks[task_type]

    async def run_handler(self, attempt: TaskStateMachine) -> Any:
        """Run the handler to its end and give its output, ready for JSON."""
        definition = attempt.definition
        if definition is None or attempt.claimed is None:
            raise RuntimeError("an attempt that was never claimed has no handler")
        job, given = attempt.job, attempt.claimed.input
        arguments = definition.decode(given) if job is None else bind(definition, given, job)
        number = self.events.publish(attempt, definition, arguments)
        try:
            if definition.needs_context:
                output = await self._run_with_context(attempt, definition, arguments)
            else:
                output = await definition.function(**arguments)
        except BaseException as error:  # noqa: BLE001 - it is raised again by complete()
            return self.events.complete(number, error=contain_error(error))
        return self.events.complete(number, output)

    async def _run_with_context(
        self, attempt: TaskStateMachine, definition: Task[..., Any], arguments: dict[str, Any]
    ) -> Any:
        if definition.transactional:
            transaction = self._transactions[attempt.key] = _Transaction()
            attempt.context.connection = await transaction.begin(self._url)
        return await self._executors.get(definition).run(definition, attempt.context, arguments)

    def pass_on_cancel(self, attempt: TaskStateMachine) -> None:
        """Let a handler in another process know that it is not wanted any more."""
        if attempt.definition is not None:
            self._executors.get(attempt.definition).cancel(attempt.context)

    async def settle(self, attempt: TaskStateMachine, outcome: Outcome) -> bool:
        """Write the outcome; a transactional one commits with what its handler wrote."""
        transaction = self._transactions.pop(attempt.key, None)
        if transaction is not None and outcome.event is TaskRowEvent.SUCCEED and transaction.connection is not None:
            return await self._settle_within(transaction, transaction.connection, attempt, outcome)
        if transaction is not None:
            await transaction.end(commit=False)
        if outcome.event is TaskRowEvent.CANCEL:
            return await self._cancel(attempt, outcome)
        return await self._settler.settle(attempt, outcome)

    async def _settle_within(
        self, transaction: _Transaction, connection: Connection, attempt: TaskStateMachine, outcome: Outcome
    ) -> bool:
        try:
            awaited, lost = await settle_running_tasks(
                connection, [outcome], actor=attempt.worker_id, largest=self._largest_result
            )
            if not lost:
                await insert_callbacks(connection, [outcome.id])
                limited = attempt.claimed is not None and attempt.claimed.own("limit_key") is not None
                await notify_ended(connection, awaited=awaited, limited=limited)
            await transaction.end(commit=not lost)
        except DisconnectedError:
            await transaction.end(commit=False)
            return False  # whether it was committed is not known; if not, the lease runs out
        except (StatementError, TypeError, ValueError) as error:  # the database's refusal, or the encoder's
            # what the handler wrote cannot be committed: that is how it failed
            await transaction.end(commit=False)
            failed = attempt.failed_after_all(error)
            return await self._settler.settle(attempt, failed)
        if lost:
            count_lost(attempt)
        return not lost

    async def _cancel(self, attempt: TaskStateMachine, outcome: Outcome) -> bool:
        """Write that the task is canceled, if this attempt still has it."""
        try:
            async with connect(self._url) as connection:
                canceled = await cancel_unfinished_tasks(
                    connection,
                    [outcome.id],
                    attempts=[outcome.attempt],
                    running=True,
                    actor=attempt.worker_id,
                    reason=outcome.reason,
                )
        except (DisconnectedError, StatementError):
            return False  # the request stays in the row: whoever recovers the task hears of it
        if not canceled:
            count_lost(attempt)
        return bool(canceled)

    async def abandon(self, attempt: TaskStateMachine) -> None:
        """Undo what an attempt that lost its task had begun to write."""
        transaction = self._transactions.pop(attempt.key, None)
        if transaction is not None:
            await transaction.end(commit=False)

    async def close(self) -> None:
        """End the executors and what transactions are left."""
        for transaction in self._transactions.values():
            await transaction.end(commit=False)
        self._transactions.clear()
        await self._executors.close()
