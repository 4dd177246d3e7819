"""The attempts that a worker has under way, from their start to what came of their report.

Invariant: an attempt takes a slot from its start until the database has acknowledged its outcome, or it is known to be
lost; whatever happens around its handler, the slot does not leak.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from interlock.errors import InvariantError
from interlock.lifecycle import TaskRowEvent
from interlock.telemetry import log
from interlock.worker.attempt import TaskStateMachine
from interlock.worker.interruption import Interruption
from interlock.worker.losses import count_lost

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from interlock.store.database import Connection
    from interlock.store.tasks import ClaimedTask
    from interlock.worker.parts import Parts

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
