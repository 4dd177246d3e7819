"""One transaction's worth of orchestration: the jobs it has locked, and what it is going to write, gathered first.

Invariant: jobs are locked before any of their steps is read or moved because of another, always in the order of their
ids; the counters of a job change only here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import orjson

from interlock.errors import DisconnectedError, StatementError, StoreError
from interlock.postgres.connection import DEADLOCK_DETECTED, LOCK_NOT_AVAILABLE, is_in_transaction, translated
from interlock.postgres.query import as_json, run
from interlock.store.jobs import JOBS, ORCHESTRATION, STEPS
from interlock.store.tasks import TASKS
from interlock.telemetry import log
from interlock.workflow.resolve import Ended, Resolution, Skipped, Waiting

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.postgres.query import StatementCall

T = TypeVar("T")

COMPENSATION = "compensate:"
PATIENCE = "500ms"  # with others who have locked what we need; less than a deadlock takes, so that we give way
A_PERSON_S = "10s"  # patience, before he is told
HELD = "another transaction holds the job and does not let it go; `interlock doctor` names it"
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELED"})


@dataclass(slots=True)
class LockedJob:
    """A job that nobody else changes until the transaction ends."""

    id: UUID
    workflow_id: UUID | None
    status: str
    ending: str | None
    ending_reason: str | None
    compensating: bool
    worker_count: int | None
    open_steps: int
    failed_steps: int
    depth: int
    parent_job_id: UUID | None
    parent_task_id: UUID | None
    correlation_id: UUID | None
    retried_from: UUID | None
    error: dict[str, Any] | None
    reason: str | None = None  # a new one
    changed: bool = False
    known: tuple[Any, ...] = ()  # what the database has of it

    @property
    def goes_on(self) -> bool:
        """Whether its steps may lead to others."""
        return self.status == "RUNNING" and self.ending is None


_OF_A_JOB = tuple(column.name for column in fields(LockedJob) if column.name not in {"reason", "changed", "known"})
_WRITTEN = ("open_steps", "failed_steps", "ending", "ending_reason", "compensating", "reason", "error")
_written = attrgetter(*_WRITTEN)


class Release(NamedTuple):
    """A step that may be claimed now; what is None stays as it is."""

    id: UUID
    namespace: str
    run_at: datetime | None = None
    input: dict[str, Any] | None = None


@dataclass(slots=True)
class Batch:
    """What one transaction does to the jobs that it has locked."""

    actor: str
    now: datetime | None
    jobs: dict[UUID, LockedJob] = field(default_factory=dict)
    moment: datetime | None = None  # the time of the transaction, by the server's clock unless a test has its own
    paused: frozenset[str] = frozenset()
    resolution: Resolution = field(default_factory=Resolution)
    releases: list[Release] = field(default_factory=list)
    waits: dict[UUID, dict[str, Any]] = field(default_factory=dict)
    maps: list[UUID] = field(default_factory=list)
    out_of_turn: set[UUID] = field(default_factory=set)  # jobs of which a compensation was canceled, maybe too early
    messages: list[dict[str, Any]] = field(default_factory=list)
    completed: list[LockedJob] = field(default_factory=list)
    failed: list[LockedJob] = field(default_factory=list)
    canceled: list[LockedJob] = field(default_factory=list)
    released: int = 0
    skipped: int = 0
    created: int = 0

    @property
    def finalized(self) -> int:
        """How many jobs end with it."""
        return len(self.completed) + len(self.failed) + len(self.canceled)

    def note_locked(self, rows: Iterable[dict[str, Any]]) -> None:
        """Take in jobs that were locked, each once."""
        for row in rows:
            self.moment = row["now"]
            if row["id"] is not None and row["id"] not in self.jobs:
                self.paused = frozenset(row["paused"])
                job = self.jobs[row["id"]] = LockedJob(**{name: row[name] for name in _OF_A_JOB})
                job.known = _written(job)

    def note_ended(self, ended: Iterable[Ended]) -> None:
        """Count steps that have ended, or are skipped because others did."""
        for step in ended:
            job = self.jobs[step.job_id]
            job.open_steps -= 1
            job.changed = True
            if step.step.startswith(COMPENSATION):
                self.out_of_turn |= {job.id} if step.state == "canceled" else set()
            elif step.state in {"error", "canceled"} and step.part_of is None:
                job.failed_steps += 1

    def note_skipped(self, skipped: Iterable[Skipped]) -> None:
        """Count maps that failed for their parts."""
        for skip in skipped:
            self.jobs[skip.step.job_id].failed_steps += skip.error is not None

    def release(self, step: Waiting, *, run_at: datetime | None = None, refused: str | None = None) -> None:
        """Let a step go, unless its job runs enough of them. One that sleeps does not run, so it takes up no room."""
        job = self.jobs[step.job_id]
        given = None if refused is None else {"refused": refused}
        sleeps = run_at is not None and self.moment is not None and run_at > self.moment
        if job.worker_count is not None and not sleeps:
            self.wait(step.id, held_by="worker_count", run_at=run_at, input=given)
            job.changed = True
        else:
            self.let_go(Release(step.id, step.namespace, run_at, given), step.limit_key)

    def let_go(self, step: Release, limit_key: str | None) -> None:
        """Let a step be claimed, unless its namespace is paused; one with a limit is let in by that."""
        if step.namespace in self.paused:
            self.wait(step.id, held_by="namespace", run_at=step.run_at, input=step.input)
        elif limit_key is not None:
            self.wait(step.id, held_by="limit", run_at=step.run_at, input=step.input)
        else:
            self.releases.append(step)

    def wait(self, step_id: UUID, *, unresolved: int = 0, **known: Any) -> None:
        """Let a step wait on, with what is known of it by now."""
        self.waits[step_id] = {"id": step_id, "unresolved": unresolved, **known}

    def writes(self) -> list[StatementCall]:
        """Give the statements that write what was gathered about steps, and forget it."""
        for step in self.resolution.still_waiting:
            self.wait(step.id, unresolved=step.unresolved, taken=step.taken, failed=step.failed)
        asked = [*self._skips(), *self._waits(), *self._parts(), *self.write_releases()]
        self.resolution = Resolution(ready=self.resolution.ready)
        return asked

    def write_releases(self) -> list[StatementCall]:
        """Give the statements that release what may go."""
        releases, self.releases = self.releases, []
        if not releases:
            return []
        self.released += len(releases)
        plain = all(release.run_at is None and release.input is None for release in releases)
        parameters = {
            "ids": [release.id for release in releases],
            "run_ats": [] if plain else [release.run_at for release in releases],
            "inputs": [] if plain else [as_json(release.input) for release in releases],
            **self._common(reason=None, held_by=None),
        }
        return [(TASKS["release_waiting_tasks"], parameters)]

    def write_jobs(self, messages: Sequence[int] = ()) -> list[StatementCall]:
        """Give the statements that write what became of the other jobs, and delete the messages that led to it."""
        ended = [*self.completed, *self.failed, *self.canceled]
        for job in ended:
            job.changed = False
        self.messages += [_woken(job) for job in ended if job.parent_task_id is not None]
        return [*self._counters(messages), *self._failures(), *self._messages()]

    def _counters(self, messages: Sequence[int]) -> list[StatementCall]:
        going = [job for job in self.jobs.values() if job.changed and _written(job) != job.known]
        if not going and not messages:
            return []
        parameters = {
            "ids": [job.id for job in going],
            "jobs": _rows(going),
            "messages": list(messages),
            # whoever hears of the end of a job can rely on it
            "repeatable": bool(messages) and not self.finalized,
            "now": self.now,
        }
        return [(JOBS["update_jobs"], parameters)]

    def write_completions(self) -> StatementCall:
        """Give the statement that completes jobs; it leaves those alone whose output is too large."""
        parameters = {
            "ids": [job.id for job in self.completed],
            "workflow_ids": [job.workflow_id for job in self.completed],
            "failed_steps": [job.failed_steps for job in self.completed],
            **self._common(reason=None),
        }
        return JOBS["complete_running_jobs"], parameters

    def _failures(self) -> list[StatementCall]:
        asked: list[StatementCall] = []
        for name, jobs in (("fail_running_jobs", self.failed), ("cancel_unfinished_jobs", self.canceled)):
            if jobs:
                ids = [job.id for job in jobs]
                asked.append((JOBS[name], {"ids": ids, "jobs": _rows(jobs), **self._common()}))
                asked.append((JOBS["notify_ended_jobs"], {"ids": ids}))
        return asked

    def _messages(self) -> list[StatementCall]:
        messages, self.messages = self.messages, []
        return [(ORCHESTRATION["send_messages"], {"messages": orjson.dumps(messages).decode()})] if messages else []

    def _skips(self) -> list[StatementCall]:
        skipped = self.resolution.skipped
        if not skipped:
            return []
        self.skipped += len(skipped)
        parameters = {
            "ids": [skip.step.id for skip in skipped],
            "reasons": [skip.reason for skip in skipped],
            "poisoned": [skip.poisoned for skip in skipped],
            "errors": [as_json(skip.error) for skip in skipped],
            **self._common(),
        }
        return [(TASKS["skip_waiting_tasks"], parameters)]

    def _waits(self) -> list[StatementCall]:
        waits, self.waits = self.waits, {}
        if not waits:
            return []
        document = orjson.dumps(list(waits.values())).decode()
        asked: list[StatementCall] = [(STEPS["update_waiting_steps"], {"ids": list(waits), "steps": document})]
        if any(wait.get("held_by") == "limit" for wait in waits.values()):
            asked.append((TASKS["notify_duties"], {"duties": ["limits"]}))
        return asked

    def _parts(self) -> list[StatementCall]:
        maps, self.maps = self.maps, []
        return [(STEPS["insert_parts"], {"ids": maps, "now": self.now})] if maps else []

    def _common(self, **more: Any) -> dict[str, Any]:
        return {"actor": self.actor, "now": self.now, **more}


async def lock_jobs(
    connection: Connection,
    ids: Iterable[UUID],
    *,
    actor: str,
    now: datetime | None,
    own: bool = False,
    patience: str = PATIENCE,
) -> Batch:
    """Lock jobs and begin a batch with them. Must run in a transaction; its settings are changed if it is our own."""
    batch = Batch(actor, now)
    parameters = {"ids": sorted(set(ids)), "actor": actor, "now": now, "own": own, "patience": patience}
    batch.note_locked(await run(connection, ORCHESTRATION["lock_jobs"], parameters))
    return batch


async def for_a_person(connection: Connection, work: Callable[[bool], Awaitable[T]]) -> T:
    """Do what somebody asked for, who waits for it; `work` is told whether the transaction is its own.

    If it waited in a circle with others, it is done once more: they went on when this one was stopped.
    """
    own = not is_in_transaction(connection)
    try:
        return await work(own)
    except StatementError as error:
        if is_held(error):
            raise StoreError(HELD) from error
        if error.sqlstate != DEADLOCK_DETECTED:
            raise
    return await work(own)


def is_held(error: Exception) -> bool:
    """Tell whether something failed only because somebody else has locked what it needs, and takes his time."""
    return isinstance(error, StatementError) and error.sqlstate == LOCK_NOT_AVAILABLE


async def together_or_apart(
    connection: Connection,
    ids: Collection[UUID],
    work: Callable[[Collection[UUID]], Awaitable[int]],
    *,
    name: str,
    now: datetime | None,
) -> int:
    """Do something to jobs, all of them at once; when that fails, to one at a time."""
    try:
        return await work(ids)
    except DisconnectedError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever is wrong with one job must not hold up the others
        log.warning("orchestration_duty_failed", work=name, jobs=len(ids), error=said(error))
    return await apart(connection, ids, work, name=name, now=now)


async def apart(
    connection: Connection,
    ids: Iterable[UUID],
    work: Callable[[Collection[UUID]], Awaitable[int]],
    *,
    name: str,
    now: datetime | None,
) -> int:
    """Do something to jobs, one at a time; one that fails says so, and is left alone for a while."""
    done = 0
    for id_ in ids:
        try:
            done += await work([id_])
        except DisconnectedError:
            raise
        except Exception as error:  # noqa: BLE001 - the same
            log.warning("orchestration_job_failed", work=name, job_id=str(id_), error=said(error))
            reason = f"could not be {name}: {said(error)}"
            with translated(connection):
                await connection.execute(ORCHESTRATION["note_stumble"].sql, {"id": id_, "reason": reason, "now": now})
    return done


def said(error: Exception) -> str:
    """Say what went wrong, for people."""
    return f"{type(error).__name__}: {error}"


def _woken(job: LockedJob) -> dict[str, Any]:
    return {"job_id": job.parent_job_id, "task_id": job.parent_task_id, "correlation_id": job.correlation_id}


def _rows(jobs: Iterable[LockedJob]) -> str:
    return orjson.dumps([{"id": job.id, **dict(zip(_WRITTEN, _written(job), strict=True))} for job in jobs]).decode()
