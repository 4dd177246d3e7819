"""What an attempt needs of its worker: somebody to run its handler, and a way for its outcome into the database.

Invariant: a transactional task's own writes and its outcome commit together or not at all.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

from interlock.client.steps import bind
from interlock.errors import DisconnectedError, StatementError, StoreError
from interlock.lifecycle import TaskRowEvent
from interlock.store.acts import cancel_unfinished_tasks
from interlock.store.database import connect, translated
from interlock.store.tasks import insert_callbacks, notify_ended, settle_running_tasks
from interlock.worker.conversation import LONGEST_LINE
from interlock.worker.events import HandlerEvents
from interlock.worker.executors import Executors, contained
from interlock.worker.losses import count_lost

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.client.task import Task
    from interlock.store.database import Connection
    from interlock.store.tasks import Outcome
    from interlock.worker.attempt import TaskStateMachine
    from interlock.worker.settings import WorkerSettings
    from interlock.worker.settler import Settler


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
            longest_line=max(LONGEST_LINE, settings.largest_result + AROUND_A_RESULT),
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
            return self.events.complete(number, error=contained(error))
        return self.events.complete(number, output)

    async def _run_with_context(
        self, attempt: TaskStateMachine, definition: Task[..., Any], arguments: dict[str, Any]
    ) -> Any:
        if definition.transactional:
            transaction = self._transactions[attempt.key] = _Transaction()
            attempt.context.connection = await transaction.begin(self._url)
        return await self._executors.of(definition).run(definition, attempt.context, arguments)

    def pass_on_cancel(self, attempt: TaskStateMachine) -> None:
        """Let a handler in another process know that it is not wanted any more."""
        if attempt.definition is not None:
            self._executors.of(attempt.definition).cancel(attempt.context)

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
