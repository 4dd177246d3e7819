"""One orchestration transaction: the jobs that it has locked, and the writes that it gathers before it runs them.

Invariant: jobs are locked in the order of their ids, before any of their steps is read or moved because of another
step; the counters of a job change only here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import orjson

from interlock.errors import DisconnectedError, StatementError, StoreError
from interlock.lifecycle import JOB, JobState, TaskRowState
from interlock.model.graph import COMPENSATION_PREFIX
from interlock.postgres.connection import DEADLOCK_DETECTED, LOCK_NOT_AVAILABLE, is_in_transaction, translated
from interlock.postgres.query import as_json, run
from interlock.store.jobs import JOBS, ORCHESTRATION, STEPS
from interlock.store.signals import SIGNALS
from interlock.store.step_results import SimpleStepMessage, send_messages
from interlock.store.tasks import TASKS
from interlock.telemetry import log
from interlock.workflow.resolve import EndedStep, Resolution

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.postgres.query import StatementCall
    from interlock.workflow.resolve import WaitingStep

T = TypeVar("T")

BATCH_LOCK_TIMEOUT = "500ms"  # shorter than deadlock_timeout, so that the orchestrator gives way in a deadlock
INTERACTIVE_LOCK_TIMEOUT = "10s"  # for a call whose caller waits, such as a cancellation
JOB_LOCKED_ERROR = "the job is locked by another transaction; `interlock doctor` names it"


@dataclass(slots=True)
class LockedJob:
    """A job whose row this transaction has locked."""

    id: UUID
    workflow_id: UUID | None
    status: str
    ending: str | None
    ending_reason: str | None
    cancel_reason: str | None  # of a failing job: why the child jobs that it waits for are canceled
    compensating: bool
    worker_count: int | None
    open_steps: int
    failed_steps: int
    depth: int
    parent_job_id: UUID | None
    parent_task_id: UUID | None
    correlation_id: UUID | None
    traceparent: str | None
    retried_from: UUID | None
    error: dict[str, Any] | None
    reason: str | None = None  # a new one; None leaves the stored one
    changed: bool = False
    stored: tuple[Any, ...] = ()  # the values of _UPDATED_COLUMNS in the database

    @property
    def is_advancing(self) -> bool:
        """Whether its steps may activate others: it runs, and is not about to fail or to be canceled."""
        return self.status == JobState.RUNNING and self.ending is None

    @property
    def has_started(self) -> bool:
        """Whether it has ever run; a job that has not started compensates nothing."""
        return self.status not in {JobState.SUBMITTED, JobState.PENDING}

    @property
    def is_ending(self) -> bool:
        """Whether it is about to fail or to be canceled, and has not."""
        return self.ending is not None and self.status not in JOB.final

    @property
    def waits_for_children(self) -> bool:
        """Whether it is about to fail, and its child jobs have to end first."""
        return self.status == JobState.RUNNING and self.ending == JobState.FAILED and not self.compensating

    @property
    def is_over(self) -> bool:
        """Whether it has ended or is about to fail or to be canceled."""
        return self.status in JOB.final or self.ending is not None


_UNREAD_FIELDS = frozenset({"reason", "changed", "stored"})
_READ_COLUMNS = tuple(column.name for column in fields(LockedJob) if column.name not in _UNREAD_FIELDS)
_UPDATED_COLUMNS = (
    *("open_steps", "failed_steps", "ending", "ending_reason", "cancel_reason", "compensating", "reason", "error"),
)
_updated_values = attrgetter(*_UPDATED_COLUMNS)


class Activation(NamedTuple):
    """A step that becomes pending."""

    id: UUID
    namespace: str


class KeptPart(NamedTuple):
    """A part of a map whose result is taken over from the job that this one retries."""

    id: UUID  # of the new row
    map_id: UUID
    part: int
    retried_from: UUID | None


@dataclass(slots=True)
class Batch:
    """The locked jobs of one transaction, and the writes to their steps, gathered."""

    actor: str
    now: datetime | None
    jobs: dict[UUID, LockedJob] = field(default_factory=dict)
    moment: datetime | None = None  # the transaction's time: the server's clock, or the clock of a test
    paused: frozenset[str] = frozenset()  # namespaces
    resolution: Resolution = field(default_factory=Resolution)
    activations: list[Activation] = field(default_factory=list)
    succeeded: dict[UUID, str | None] = field(default_factory=dict)  # steps without a handler: results as JSON texts
    failures: dict[UUID, dict[str, Any]] = field(default_factory=dict)  # steps without a handler: errors
    waits: dict[UUID, dict[str, Any]] = field(default_factory=dict)
    consumed: dict[int, str] = field(default_factory=dict)  # signals: the steps that consume them
    maps: list[UUID] = field(default_factory=list)
    kept_parts: list[KeptPart] = field(default_factory=list)
    racing: list[WaitingStep] = field(default_factory=list)  # ready steps with `cancel_rest`
    messages: list[SimpleStepMessage] = field(default_factory=list)
    completed: list[LockedJob] = field(default_factory=list)
    failed: list[LockedJob] = field(default_factory=list)
    canceled: list[LockedJob] = field(default_factory=list)
    activated_count: int = 0
    skipped_count: int = 0
    created_count: int = 0  # parts, compensations and child jobs

    @property
    def finalized_count(self) -> int:
        """The number of jobs that end with this batch."""
        return len(self.completed) + len(self.failed) + len(self.canceled)

    def add_locked_jobs(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add the jobs of these rows, each once; a row without a job has the id None."""
        for row in rows:
            self.moment = row["now"]
            if row["id"] is not None and row["id"] not in self.jobs:
                self.paused = frozenset(row["paused"])
                job = self.jobs[row["id"]] = LockedJob(**{name: row[name] for name in _READ_COLUMNS})
                job.stored = _updated_values(job)

    def count_ended(self, ended: Iterable[EndedStep]) -> None:
        """Update the counters of jobs for steps that have ended or are skipped."""
        for step in ended:
            job = self.jobs[step.job_id]
            job.open_steps -= 1
            job.changed = True
            if step.has_failed_itself and not step.step.startswith(COMPENSATION_PREFIX):
                job.failed_steps += 1

    def succeed(self, step: WaitingStep, result: Any = None, *, json: str | None = None) -> EndedStep:
        """Complete a step that needs no worker, with a result, or with the JSON text of one."""
        self.succeeded[step.id] = (
            json if json is not None else None if result is None else orjson.dumps(result).decode()
        )
        return EndedStep(step.id, step.job_id, step.step, TaskRowState.DONE)

    def fail(self, step: WaitingStep, message: str, error_type: str = "InputError") -> EndedStep:
        """Fail a step that needs no worker."""
        self.failures[step.id] = {"type": error_type, "message": message, "traceback": None, "retryable": False}
        return EndedStep(step.id, step.job_id, step.step, TaskRowState.ERROR)

    def activate(self, step: WaitingStep) -> None:
        """Activate a step that a worker runs; in a job with a `worker_count`, it waits for that first."""
        job = self.jobs[step.job_id]
        if job.worker_count is not None:
            self.keep_waiting(step.id, held_by="worker_count")
            job.changed = True
        else:
            self.activate_unless_held(Activation(step.id, step.namespace), step.limit_keys)

    def activate_unless_held(self, activation: Activation, limit_keys: list[str] | None) -> None:
        """Make a step pending, unless its namespace is paused or a limit admits it later."""
        if activation.namespace in self.paused:
            self.keep_waiting(activation.id, held_by="namespace")
        elif limit_keys is not None:
            self.keep_waiting(activation.id, held_by="limit")
        else:
            self.activations.append(activation)

    def keep_waiting(self, step_id: UUID, *, unresolved: int = 0, **columns: Any) -> None:
        """Update a step that goes on waiting: its counts, or its next cause.

        The reason of a hold (namespace, limit, worker_count) is made in the database by hold_reason().
        """
        self.waits[step_id] = {"id": step_id, "unresolved": unresolved, **columns}

    def take_step_writes(self) -> list[StatementCall]:
        """Return the statements that write the gathered changes of steps, and clear them."""
        for step in self.resolution.still_waiting:
            self.keep_waiting(step.id, unresolved=step.unresolved, taken=step.taken, failed=step.failed)
        calls = [
            *self._take_skips(),
            *self._take_ends(),
            *self._take_signals(),
            *self._take_waits(),
            *self._take_maps(),
            *self._take_activations(),
        ]
        self.resolution = Resolution(ready=self.resolution.ready, decided=self.resolution.decided)
        return calls

    def take_job_writes(self, messages: Sequence[int] = ()) -> list[StatementCall]:
        """Return the statements that write jobs other than completed ones, and delete the handled messages."""
        ended = [*self.completed, *self.failed, *self.canceled]
        for job in ended:
            job.changed = False
        # a child step goes on, or the parent can end
        self.messages += [
            SimpleStepMessage(job.parent_job_id, job.parent_task_id, job.correlation_id, job.traceparent)
            for job in ended
            if job.parent_job_id is not None
        ]
        return [*self._job_updates(messages), *self._job_ends(), *self._take_messages()]

    def complete_statement(self) -> StatementCall:
        """Return the statement that completes jobs; it does not change a job whose output is too large."""
        parameters = {
            "ids": [job.id for job in self.completed],
            "workflow_ids": [job.workflow_id for job in self.completed],
            "failed_steps": [job.failed_steps for job in self.completed],
            **self._common(reason=None),
        }
        return JOBS["complete_running_jobs"], parameters

    def _take_skips(self) -> list[StatementCall]:
        skipped = self.resolution.skipped
        if not skipped:
            return []
        self.skipped_count += len(skipped)
        parameters = {
            "ids": [skip.step.id for skip in skipped],
            "reasons": [skip.reason for skip in skipped],
            "skipped_by_failure": [skip.skipped_by_failure for skip in skipped],
            **self._common(),
        }
        return [(TASKS["skip_waiting_tasks"], parameters)]

    def _take_ends(self) -> list[StatementCall]:
        succeeded, self.succeeded = self.succeeded, {}
        failures, self.failures = self.failures, {}
        calls: list[StatementCall] = []
        if succeeded:
            parameters = {"ids": list(succeeded), "results": list(succeeded.values()), **self._common()}
            calls.append((TASKS["succeed_waiting_tasks"], parameters))
        if failures:
            errors = [as_json(error) for error in failures.values()]
            calls.append((TASKS["fail_waiting_tasks"], {"ids": list(failures), "errors": errors, **self._common()}))
        return calls

    def _take_waits(self) -> list[StatementCall]:
        waits, self.waits = self.waits, {}
        if not waits:
            return []
        document = orjson.dumps(list(waits.values())).decode()
        calls: list[StatementCall] = [(STEPS["update_waiting_steps"], {"ids": list(waits), "steps": document})]
        if any(wait.get("held_by") == "limit" for wait in waits.values()):
            calls.append((TASKS["notify_duties"], {"duties": ["limits"]}))
        return calls

    def _take_maps(self) -> list[StatementCall]:
        maps, self.maps = self.maps, []
        kept, self.kept_parts = self.kept_parts, []
        if not maps:
            return []
        insert = {
            "ids": maps,
            "kept_ids": [part.id for part in kept],
            "kept_steps": [f"{part.map_id} {part.part}" for part in kept],
            "now": self.now,
        }
        skip = {
            "ids": [part.id for part in kept],
            "reasons": [f"result reused from job {part.retried_from}" for part in kept],
            "skipped_by_failure": [False] * len(kept),
            **self._common(),
        }
        return [(STEPS["insert_parts"], insert), *([(TASKS["skip_waiting_tasks"], skip)] if kept else [])]

    def _take_signals(self) -> list[StatementCall]:
        consumed, self.consumed = self.consumed, {}
        parameters = {"ids": list(consumed), "steps": list(consumed.values()), "now": self.now}
        return [(SIGNALS["consume_signals"], parameters)] if consumed else []

    def _take_activations(self) -> list[StatementCall]:
        activations, self.activations = self.activations, []
        if not activations:
            return []
        self.activated_count += len(activations)
        parameters = {
            "ids": [activation.id for activation in activations],
            **self._common(reason=None, held_by=None),
        }
        return [(TASKS["release_waiting_tasks"], parameters)]

    def _job_updates(self, messages: Sequence[int]) -> list[StatementCall]:
        updated = [job for job in self.jobs.values() if job.changed and _updated_values(job) != job.stored]
        if not updated and not messages:
            return []
        parameters = {
            "ids": [job.id for job in updated],
            "jobs": _job_rows(updated),
            "messages": list(messages),
            # a client that is notified of a job's end must find it durable
            "repeatable": bool(messages) and not self.finalized_count,
            "now": self.now,
        }
        return [(JOBS["update_jobs"], parameters)]

    def _job_ends(self) -> list[StatementCall]:
        calls: list[StatementCall] = []
        for name, jobs in (("fail_running_jobs", self.failed), ("cancel_unfinished_jobs", self.canceled)):
            if jobs:
                ids = [job.id for job in jobs]
                calls.append((JOBS[name], {"ids": ids, "jobs": _job_rows(jobs), **self._common()}))
                calls.append((JOBS["notify_ended_jobs"], {"ids": ids}))
        return calls

    def _take_messages(self) -> list[StatementCall]:
        messages, self.messages = self.messages, []
        return [send_messages(messages)] if messages else []

    def _common(self, **more: Any) -> dict[str, Any]:
        return {"actor": self.actor, "now": self.now, **more}


def _job_rows(jobs: Iterable[LockedJob]) -> str:
    rows = [{"id": job.id, **dict(zip(_UPDATED_COLUMNS, _updated_values(job), strict=True))} for job in jobs]
    return orjson.dumps(rows).decode()


async def lock_jobs(
    connection: Connection,
    ids: Iterable[UUID],
    *,
    actor: str,
    now: datetime | None,
    own: bool = False,
    lock_timeout: str = BATCH_LOCK_TIMEOUT,
) -> Batch:
    """Lock jobs and begin a batch with them. Must run in a transaction.

    `own` says that the transaction is not the caller's: only then are its settings (lock timeout, planner) changed.
    """
    batch = Batch(actor, now)
    parameters = {"ids": sorted(set(ids)), "actor": actor, "now": now, "own": own, "lock_timeout": lock_timeout}
    batch.add_locked_jobs(await run(connection, ORCHESTRATION["lock_jobs"], parameters))
    return batch


async def run_interactive(connection: Connection, work: Callable[[bool], Awaitable[T]]) -> T:
    """Run a transaction whose caller waits; `work` gets True if it runs in a transaction of its own.

    A lock timeout raises a StoreError that says so. After a deadlock, the work is run once more: the transactions that
    it was in conflict with have gone on.
    """
    own = not is_in_transaction(connection)
    try:
        return await work(own)
    except StatementError as error:
        if is_lock_timeout(error):
            raise StoreError(JOB_LOCKED_ERROR) from error
        if error.sqlstate != DEADLOCK_DETECTED:
            raise
    return await work(own)


def is_lock_timeout(error: Exception) -> bool:
    """Tell whether a statement failed only because another transaction holds a lock that it needs."""
    return isinstance(error, StatementError) and error.sqlstate == LOCK_NOT_AVAILABLE


async def run_all_jobs(
    connection: Connection,
    ids: Collection[UUID],
    work: Callable[[Collection[UUID]], Awaitable[int]],
    *,
    name: str,
    now: datetime | None,
) -> int:
    """Run some work for all jobs in one transaction; if that fails, for each job by itself. Return the sum."""
    try:
        return await work(ids)
    except DisconnectedError:
        raise
    except Exception as error:  # noqa: BLE001 - one bad job must not hold up the others
        log.warning("orchestration_duty_failed", work=name, jobs=len(ids), error=format_error(error))
    return await run_each_job(connection, ids, work, name=name, now=now)


async def run_each_job(
    connection: Connection,
    ids: Iterable[UUID],
    work: Callable[[Collection[UUID]], Awaitable[int]],
    *,
    name: str,
    now: datetime | None,
) -> int:
    """Run some work for each job in a transaction of its own; a job that fails is recorded and backs off."""
    total = 0
    for id_ in ids:
        try:
            total += await work([id_])
        except DisconnectedError:
            raise
        except Exception as error:  # noqa: BLE001 - one bad job must not hold up the others
            log.warning("orchestration_job_failed", work=name, job_id=str(id_), error=format_error(error))
            parameters = {"id": id_, "reason": f"could not be {name}: {format_error(error)}", "now": now}
            with translated(connection):
                await connection.execute(ORCHESTRATION["record_job_failure"].sql, parameters)
    return total


def format_error(error: Exception) -> str:
    """Format an error for a log event or a stored reason."""
    return f"{type(error).__name__}: {error}"
