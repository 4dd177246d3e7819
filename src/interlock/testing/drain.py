"""Drains a queue in the test process: claims, runs and settles due tasks and advances jobs.

Invariant: a drained task goes through the same statements as in a worker.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from interlock.client.step_context import bind
from interlock.errors import StoreError
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.connection import transaction
from interlock.postgres.ids import new_id
from interlock.store.limits import admit_limited_tasks
from interlock.store.tasks import ClaimedTask, Outcome, claim_limited_tasks, claim_pending_tasks, save_checkpoint
from interlock.store.workers import RegisteredProcess, deregister_worker, register_worker
from interlock.testing.inline import call, resources_of
from interlock.worker.attempt import TaskStateMachine
from interlock.worker.outcome import rolled_back
from interlock.worker.settler import settle
from interlock.workflow.advance import advance, cancel_overdue_jobs, start_waiting_jobs
from interlock.workflow.queued_jobs import cancel_replaced_jobs, start_queued_jobs, validate_submitted_jobs
from interlock.workflow.signals import end_due_waits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from concurrent.futures import Future
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.client.context import TaskContext
    from interlock.client.dependencies import Resources
    from interlock.postgres.connection import Connection

LEASE = timedelta(minutes=5)
_JOB_SWEEPS = (
    cancel_replaced_jobs,
    validate_submitted_jobs,
    start_queued_jobs,
    start_waiting_jobs,
    cancel_overdue_jobs,
    end_due_waits,
)


@dataclass(frozen=True, slots=True)
class Ran:
    """One attempt that `drain` made: its task, and the event with which it ended, or "lost"."""

    id: UUID
    type: str
    attempt: int
    event: str
    error: dict[str, Any] | None


async def drain(
    app: Interlock, *, namespaces: Sequence[str] | None = None, until_empty: bool = True, limit: int = 10_000
) -> list[Ran]:
    """Run due tasks one after the other in this process, including due tasks that they enqueue.

    Jobs advance too, without a worker or an orchestrator. Retries and sleeps that are not due stay pending: advance the
    clock and drain again. With `until_empty=False`, only tasks that were due at the start of the call run.
    """
    ran: list[Ran] = []
    async with resources_of(app) as resources:
        runner = _Runner(app, list(namespaces or _namespaces(app)), resources)
        async with runner.present():
            while batch := await runner.claim(limit - len(ran), one=until_empty):
                ran += [await runner.run(claimed) for claimed in batch]
                if not until_empty:
                    break
    return ran


class _Runner:
    """Claims, runs and settles for `drain`."""

    def __init__(self, app: Interlock, namespaces: list[str], resources: Resources) -> None:
        self._app = app
        self._resources = resources
        self._namespaces = namespaces
        self._types = list(app.tasks)
        self._actor = f"drain-{new_id()}"

    @asynccontextmanager
    async def present(self) -> AsyncIterator[None]:
        """Register as a worker, so that jobs that wait for one start."""
        if not self._app.workflows:
            yield
            return
        process = RegisteredProcess(self._actor, namespaces=tuple(self._namespaces), types=tuple(self._types))
        async with self._app.connection() as connection:
            await register_worker(connection, process, lease=LEASE, now=self._app.now())
        try:
            yield
        finally:
            async with self._app.connection() as connection:
                await deregister_worker(connection, self._actor, now=self._app.now())

    async def claim(self, limit: int, *, one: bool) -> list[ClaimedTask]:
        """Claim due tasks; if there are none, advance limits and jobs and try again."""
        while not (claimed := await self._claim(limit, one=one)) and limit > 0 and await self._advance():
            pass
        return claimed

    async def _advance(self) -> bool:
        """Admit tasks under limits and do the work of an orchestrator; tell whether anything changed."""
        common: Any = {"actor": self._actor, "now": self._app.now()}
        async with self._app.connection() as connection:
            done = (await admit_limited_tasks(connection, **common)).released
            if self._app.workflows:
                for duty in _JOB_SWEEPS:
                    done += await duty(connection, **common)
                done += (await advance(connection, **common)).received
        return done > 0

    async def _claim(self, limit: int, *, one: bool) -> list[ClaimedTask]:
        if limit <= 0:
            return []
        common: Any = {
            "actor": self._actor,
            "types": self._types,
            "namespaces": self._namespaces,
            "lease": LEASE,
            "callback_url": self._app.config.callback_url,
            "now": self._app.now(),
        }
        async with self._app.connection() as connection:
            most = 1 if one else limit
            claimed = await claim_pending_tasks(connection, limit=most, **common)
            claimed = claimed or await claim_limited_tasks(connection, limit=most, **common)
            # A task that is suspected of killing its worker runs alone, as every drained task does.
            claimed = claimed or await claim_pending_tasks(connection, limit=1, suspected=True, **common)
            return claimed or await claim_limited_tasks(connection, limit=1, suspected=True, **common)

    async def run(self, claimed: ClaimedTask) -> Ran:
        task = self._app.tasks[claimed.type]
        line = _Saver(self._app, asyncio.get_running_loop())
        until = time.monotonic() + LEASE.total_seconds()
        attempt = TaskStateMachine.of_claim(claimed, self._actor, task, lease_until=until, line=line)
        async with self._app.connection() as connection:
            outcome = await self._run_and_settle(connection, attempt)
        if outcome is None:
            return Ran(claimed.id, claimed.type, claimed.attempt, "lost", None)
        return Ran(claimed.id, claimed.type, claimed.attempt, outcome.event.value, outcome.error)

    async def _run_and_settle(self, connection: Connection, attempt: TaskStateMachine) -> Outcome | None:
        """Run the handler and settle in one transaction; roll back the writes of a failed handler first."""
        try:
            async with transaction(connection):
                outcome = _succeeded(await attempt.process(_Inline(connection, self._resources)))
                await self._settle(connection, attempt, outcome)
        except _LostError:
            return None
        except _HandlerFailedError as rollback:
            failed = rollback.outcome
        except StoreError as error:  # its writes cannot be committed
            failed = rolled_back(attempt, error)
        else:
            return outcome
        if failed is not None:
            with suppress(_LostError):
                async with transaction(connection):
                    await self._settle(connection, attempt, failed)
        return failed

    async def _settle(self, connection: Connection, attempt: TaskStateMachine, outcome: Outcome) -> None:
        attempt.outcome = outcome
        limit = self._app.config.largest_result
        if await settle(connection, [attempt], actor=self._actor, max_result_size=limit, now=self._app.now()):
            raise _LostError


class _LostError(Exception):
    """The attempt was lost while it ran: roll its transaction back."""


class _HandlerFailedError(Exception):
    """The handler failed: roll its transaction back, then write the outcome."""

    def __init__(self, outcome: Outcome | None) -> None:
        self.outcome = outcome
        super().__init__()


def _succeeded(outcome: Outcome | None) -> Outcome:
    if outcome is None or outcome.event is not TaskRowEvent.SUCCEED:
        raise _HandlerFailedError(outcome)
    return outcome


class _Inline:
    """Replaces the worker of an attempt: runs the handler here and leaves the settle to `drain`."""

    def __init__(self, connection: Connection, resources: Resources) -> None:
        self._connection = connection
        self._resources = resources

    async def run_handler(self, attempt: TaskStateMachine, /) -> Any:
        task = attempt.definition
        if task is None or attempt.claimed is None:
            raise RuntimeError("an attempt that was never claimed has no handler")
        context = attempt.context
        context.connection = self._connection if task.transactional else None
        given = attempt.claimed.input
        arguments = task.decode(given) if attempt.job is None else bind(task, given, attempt.job)
        return task.encode_result(await call(task, context, arguments, self._resources))


class _Saver:
    """Stores the checkpoints of a drained attempt."""

    def __init__(self, app: Interlock, loop: asyncio.AbstractEventLoop) -> None:
        self._app = app
        self._loop = loop

    def save_checkpoint(self, context: TaskContext, value: Any, /) -> Future[bool]:
        return asyncio.run_coroutine_threadsafe(self._save(context, value), self._loop)

    def progressed(self, _: TaskContext, /) -> None:
        """Do nothing: the latest progress is written with the outcome."""

    async def _save(self, context: TaskContext, value: Any) -> bool:
        if context.task_id is None:
            return False
        async with self._app.connection() as connection:
            return await save_checkpoint(connection, context.task_id, context.attempt, value, now=self._app.now())


def _namespaces(app: Interlock) -> set[str]:
    of_steps = {step["namespace"] for workflow in app.workflows.values() for step in workflow.document["steps"]}
    return {task.namespace for task in app.tasks.values()} | of_steps | {"default"}
