"""Explains why work does not move: tasks, jobs, workers, namespaces, schedules and limits."""

from __future__ import annotations

from datetime import UTC
from enum import StrEnum
from typing import TYPE_CHECKING

from interlock.client.explain.explanation import Evidence, Explanation, Fact, FactCode
from interlock.client.explain.jobs import job_facts
from interlock.client.explain.past import explain_past_resource, explain_past_work
from interlock.client.explain.resources import RESOURCES
from interlock.client.explain.tasks import task_facts
from interlock.errors import (
    InputError,
    UnknownJobError,
    UnknownNameError,
    UnknownNamespaceError,
    UnknownTaskError,
)
from interlock.model.options import check_id
from interlock.store.explain import read_explanation, read_kinds_of_name
from interlock.store.leader import read_clock

if TYPE_CHECKING:
    from datetime import datetime
    from typing import Any
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.store.explain import Cause, Explained

__all__ = [
    "Evidence",
    "ExplainedKind",
    "Explanation",
    "Fact",
    "FactCode",
    "as_work_id",
    "explain",
    "unknown_id_error",
]

MORE = Fact(code=FactCode.MORE_CAUSES, text="there are more causes than are listed here")
SHARED = Fact(code=FactCode.SHARED_CAUSES, text="its causes are listed elsewhere in this answer")


class ExplainedKind(StrEnum):
    """The kinds that can be explained; a step is a task of a job."""

    TASK = "task"
    STEP = "step"
    JOB = "job"
    WORKER = "worker"
    NAMESPACE = "namespace"
    SCHEDULE = "schedule"
    LIMIT = "limit"


async def explain(
    app: Interlock, id_: UUID | str, *, kind: str | None = None, at: datetime | None = None
) -> Explanation:
    """Explain the state of what has this id or name; without a kind it is found by the id."""
    wanted = None if kind is None else as_kind(kind)
    if wanted is None:
        wanted = await _guess_kind(app, id_)
    if at is not None:
        return await _explain_past(app, id_, wanted, at)
    if wanted in RESOURCES:
        async with app.connection() as connection:
            if wanted is ExplainedKind.NAMESPACE and wanted not in await read_kinds_of_name(connection, str(id_)):
                raise UnknownNamespaceError(
                    f"there is no namespace {str(id_)!r}: no task, no worker and no pause names it"
                )
            return await RESOURCES[wanted](connection, str(id_), now=app.now())
    return await _explain_work(app, as_work_id(id_, wanted), wanted)


async def _explain_past(app: Interlock, id_: UUID | str, kind: ExplainedKind | None, at: datetime) -> Explanation:
    try:
        at = at.astimezone(UTC)
    except OverflowError:
        raise InputError(f"the time is out of range: {at.isoformat()}") from None
    async with app.connection() as connection:
        if at > await read_clock(connection, now=app.now()):
            raise InputError(f"the time must not be in the future, got {at.isoformat()}")
        if kind is not None and kind in RESOURCES:
            return await explain_past_resource(connection, kind, str(id_), at)
        found = await explain_past_work(connection, as_work_id(id_, kind), at)
    if found is None:
        raise unknown_id_error(id_, kind, "never stored, or its records are deleted by retention")
    return _require_kind(found, kind)


def as_kind(kind: str) -> ExplainedKind:
    """Return a kind by its name; InputError lists the kinds."""
    try:
        return ExplainedKind(kind)
    except ValueError:
        raise InputError(f"the kind must be one of {', '.join(ExplainedKind)}, got {kind!r}") from None


def as_work_id(id_: UUID | str, kind: ExplainedKind | None = None) -> UUID:
    """Return the id of a task or a job, which may be given as text; InputError names the kind."""
    try:
        return check_id(f"the id of a {kind or 'task or a job'}", id_)
    except ValueError as error:
        raise InputError(str(error)) from None


async def _guess_kind(app: Interlock, id_: UUID | str) -> ExplainedKind | None:
    """Find the kind of a name; None for the id of a task or a job."""
    try:
        as_work_id(id_)
    except InputError:
        pass
    else:
        return None
    async with app.connection() as connection:
        kinds = await read_kinds_of_name(connection, str(id_))
    if not kinds:
        raise UnknownNameError(
            f"{str(id_)!r} is neither the id of a task or a job nor the name of a worker, a namespace, a schedule or a "
            "limit"
        )
    if len(kinds) > 1:
        listed = ", ".join(f"`interlock explain {kind} {id_}`" for kind in kinds)
        raise InputError(f"{str(id_)!r} is the name of several things; say which: {listed}")
    return ExplainedKind(kinds[0])


async def _explain_work(app: Interlock, id_: UUID, kind: ExplainedKind | None) -> Explanation:
    async with app.connection() as connection:
        found = await read_explanation(connection, id_, now=app.now())
    if found is None:
        raise unknown_id_error(id_, kind)
    return _require_kind(_explained(found.root, found, is_root=True), kind)


def unknown_id_error(
    id_: UUID | str, kind: ExplainedKind | None, why: str = "not stored, not committed yet, or pruned"
) -> UnknownTaskError | UnknownJobError:
    """Return the error of an id that neither a task nor a job has; its type and text are those of the kind."""
    asked = "task and no job" if kind is None else str(kind)
    unknown = UnknownJobError if kind is ExplainedKind.JOB else UnknownTaskError
    return unknown(f"there is no {asked} {id_}: {why}")


def _require_kind(explained: Explanation, kind: ExplainedKind | None) -> Explanation:
    """Return the explanation if it is of this kind; UnknownTaskError or UnknownJobError else."""
    if kind is not None and (explained.kind == "job") is not (kind is ExplainedKind.JOB):
        unknown = UnknownJobError if kind is ExplainedKind.JOB else UnknownTaskError
        raise unknown(f"there is no {kind} {explained.id}: it is a {explained.kind}")
    return explained


def _explained(cause: Cause, seen: Explained, *, is_root: bool = False) -> Explanation:
    row = cause.row
    is_job = cause.kind == "job"
    facts = (job_facts if is_job else task_facts)(cause, seen, is_root=is_root)
    if cause.shared and not cause.causes:
        facts.append(SHARED)
    if cause.more:
        facts.append(MORE)
    return Explanation(
        kind="step" if row.get("step") else cause.kind,
        id=row["id"],
        name=name_of_work(row, is_job=is_job),
        state=row["status"] if is_job else row["state"],
        since=row["since"],
        facts=tuple(facts),
        through=cause.through,
        causes=tuple(_explained(behind, seen) for behind in cause.causes),
    )


def name_of_work(row: dict[str, Any], *, is_job: bool) -> str:
    """Name a job by its workflow, a step by its name, a task by its type."""
    if is_job:
        return f"{row['workflow']} {row['version']}" if row["workflow"] else str(row["id"])
    return str(row["step"] or row["type"])
