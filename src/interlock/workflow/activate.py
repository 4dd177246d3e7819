"""What happens to steps whose turn has come: each kind is let go, or begins to wait for something of its own.

Invariant: whatever a step leads to, parts, child jobs, steps that are skipped in turn, is written in the same
transaction as the end that led to it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from interlock.model.graph import (
    MAP,
    MAP_SOURCE_ERROR,
    MAX_MAP_PARTS,
    too_many_parts_error,
)
from interlock.model.options import MAX_JOB_DEPTH
from interlock.model.timing import later, wake_at
from interlock.postgres.query import run, run_in_order
from interlock.store.jobs import JOBS, ORCHESTRATION, STEPS
from interlock.store.workflows import HANDLED_KINDS, WORKFLOWS
from interlock.workflow.batch import Release, lock_jobs
from interlock.workflow.finalize import complete_jobs, decide_endings, read_at_zero
from interlock.workflow.new_job import (
    NewJob,
    describe_unknown_workflow,
    find_workflows,
    insert_jobs,
    job_depth_error,
    prepare_job,
)
from interlock.workflow.resolve import Ended, Skipped, Waiting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.batch import Batch
    from interlock.workflow.new_job import FoundWorkflow, PreparedJob


# SECTION store/children
# Child jobs: what a step of kind child starts, or why it cannot.
#
# Invariant: a child is held to the same rules as a job that somebody submits: a workflow that is known, an input
# that its
# schema allows, and no deeper than jobs may nest.


async def prepare_children(
    connection: Connection, batch: Batch, rows: Sequence[dict[str, Any]]
) -> list[PreparedJob | str]:
    """Give, for each of these openings, the child job that it leads to, or why there can be none."""
    wanted = [(row["spec"]["workflow"], row["spec"].get("workflow_version")) for row in rows]
    workflows = await find_workflows(connection, wanted, now=batch.now)
    schemas = await _schemas(connection, workflows)
    children: list[PreparedJob | str] = []
    for row, found in zip(rows, workflows, strict=True):
        refused = await _refused(connection, row, found, batch.jobs[row["job_id"]].depth + 1)
        children.append(refused or _child(batch, row, found, schemas.get(found.id)))
    return children


async def _schemas(connection: Connection, workflows: Iterable[FoundWorkflow]) -> dict[UUID | None, dict[str, Any]]:
    ids = list({found.id for found in workflows if found.id is not None})
    return {row["id"]: row["schema"] for row in await run(connection, WORKFLOWS["read_input_schemas"], {"ids": ids})}


def _fault(workflow: str, schema: dict[str, Any] | None, given: dict[str, Any]) -> str | None:
    if schema is None:
        return None
    # not at the top: the schema's library is slow to import, and most programs need none of it
    from interlock.model.json_schema import find_fault  # noqa: PLC0415 - heavy, and seldom needed

    return find_fault(workflow, schema, given)


async def _refused(connection: Connection, row: dict[str, Any], found: FoundWorkflow, depth: int) -> str | None:
    if depth > MAX_JOB_DEPTH:
        return job_depth_error(depth)
    if row["inputs"].get("refused") is not None:
        return str(row["inputs"]["refused"])
    if found.id is None:
        return await describe_unknown_workflow(connection, row["spec"]["workflow"], row["spec"].get("workflow_version"))
    return None


def _child(batch: Batch, row: dict[str, Any], found: FoundWorkflow, schema: dict[str, Any] | None) -> PreparedJob | str:
    job = batch.jobs[row["job_id"]]
    given = child_input(row["spec"].get("input"), row["inputs"])
    fault = _fault(row["spec"]["workflow"], schema, given)
    if fault is not None:
        return fault
    new = NewJob(
        row["spec"]["workflow"],
        given,
        version=found.version,
        parent_job_id=job.id,
        parent_task_id=row["id"],
        correlation_id=job.correlation_id,
    )
    return prepare_job(new, found, depth=job.depth + 1)


def child_input(mapping: dict[str, Any] | None, inputs: dict[str, Any]) -> dict[str, Any]:
    """Give the input of a child job: its parent's, or what a mapping makes of that and of the results before it.

    In a mapping, the name of an upstream step stands for its result, "input" for the parent's input, "input.x" for a
    field of it; anything else is meant as it is.
    """
    given: Any = inputs["job_input"]
    if mapping is None:
        return dict(given)
    results = inputs["results"]

    def meant(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value in results:
            return results[value]
        if value == "input":
            return given
        field = value.removeprefix("input.")
        return given.get(field) if field != value else value

    return {name: meant(value) for name, value in mapping.items()}


async def carry_out(connection: Connection, batch: Batch, messages: Sequence[int] = ()) -> None:
    """Write everything that a batch leads to, and delete the messages that it came from."""
    await _open_ready(connection, batch)
    writes = batch.writes()
    if _must_look(batch):
        await run_in_order(connection, writes)
        await _admit(connection, batch)
        await decide_endings(connection, batch)
        writes = batch.writes()
    else:
        batch.completed += read_at_zero(batch)
    if batch.completed:
        await run_in_order(connection, writes)
        await complete_jobs(connection, batch)
        writes = batch.writes()
    await run_in_order(connection, [*writes, *batch.write_jobs(messages)])


def _must_look(batch: Batch) -> bool:
    """Tell whether what happens next depends on more than the counters."""
    return any(
        job.changed
        and (job.worker_count is not None or job.ending is not None or (job.failed_steps and not job.open_steps))
        for job in batch.jobs.values()
    )


async def follow(
    connection: Connection, batch: Batch, ended: Collection[Ended], rows: Sequence[dict[str, Any]] | None = None
) -> None:
    """Carry the end of steps on to those that wait for them, and to those that wait for what is skipped for it.

    `rows` are the downstream steps of the first ones, if they were read already.
    """
    batch.note_ended(ended)
    frontier = {step.id: step for step in ended if batch.jobs[step.job_id].goes_on}
    while frontier:
        if rows is None:
            rows = await take_ended_steps(connection, skipped=list(frontier))
        known = len(batch.resolution.skipped)
        frontier = batch.resolution.follow(frontier, rows)
        rows = None
        batch.note_ended(frontier.values())
        batch.note_skipped(batch.resolution.skipped[known:])
    await _name_culprits(connection, batch)


async def _name_culprits(connection: Connection, batch: Batch) -> None:
    """Say for which step others are skipped, where it failed before this batch."""
    ids = [skip.step.id for skip in batch.resolution.skipped if skip.reason is None]
    if ids:
        found = {row["id"]: row["step"] for row in await run(connection, ORCHESTRATION["read_culprits"], {"ids": ids})}
        batch.resolution.skipped = [
            skip._replace(reason=f"step {found[skip.step.id]} failed") if skip.step.id in found else skip
            for skip in batch.resolution.skipped
        ]


async def take_ended_steps(
    connection: Connection, *, ids: Sequence[UUID] = (), job_ids: Sequence[UUID] = (), skipped: Sequence[UUID] = ()
) -> list[dict[str, Any]]:
    """Take steps that have ended, with what waits for each of them."""
    parameters = {"ids": list(ids), "job_ids": list(job_ids), "skipped": list(skipped)}
    return await run(connection, ORCHESTRATION["take_ended_steps"], parameters)


def ended_steps(rows: Iterable[dict[str, Any]]) -> list[Ended]:
    """Give the steps that were taken, each once."""
    found = {
        row["upstream_id"]: Ended(
            row["upstream_id"],
            row["upstream_job_id"],
            row["upstream"],
            row["state"],
            part_of=row["part_of"],
            chosen=row["chosen"],
        )
        for row in rows
    }
    return list(found.values())


async def begin_jobs(connection: Connection, ids: Iterable[UUID], *, actor: str, now: datetime | None) -> Batch:
    """Let the first steps go of jobs that have started, and take over what they reuse. Must run in a transaction."""
    batch = await lock_jobs(connection, ids, actor=actor, now=now)
    await _take_early_ends(connection, batch)
    roots = await run(connection, STEPS["read_roots"], {"ids": list(batch.jobs)})
    await _reuse(connection, batch, [row for row in roots if row["reused"]])
    batch.resolution.ready += [_root(row) for row in roots if not row["reused"]]
    for job in batch.jobs.values():
        job.changed = True
    await carry_out(connection, batch)
    return batch


async def _take_early_ends(connection: Connection, batch: Batch) -> None:
    """Carry on what ended before its job started: somebody canceled a step of it."""
    found = await run(connection, ORCHESTRATION["read_ended_steps"], {"ids": list(batch.jobs)})
    if found:
        rows = await take_ended_steps(connection, ids=[row["id"] for row in found], job_ids=list(batch.jobs))
        await follow(connection, batch, ended_steps(rows), rows)


async def _reuse(connection: Connection, batch: Batch, rows: Sequence[dict[str, Any]]) -> None:
    """Take the results of steps over that another job had done."""
    if not rows:
        return
    # written first, so that none of them is found waiting for another
    batch.resolution.skipped += [
        Skipped(_root(row), poisoned=False, reason=f"result reused from job {batch.jobs[row['job_id']].retried_from}")
        for row in rows
    ]
    await run_in_order(connection, batch.writes())
    ended = [Ended(row["id"], row["job_id"], row["step"], "skipped", chosen=row["chosen"], reused=True) for row in rows]
    await follow(connection, batch, ended)


def _root(row: dict[str, Any]) -> Waiting:
    names = ("id", "job_id", "step", "kind", "namespace", "priority", "limit_key")
    return Waiting(**{name: row[name] for name in names})


async def _open_ready(connection: Connection, batch: Batch) -> None:
    while batch.resolution.ready:
        ready, batch.resolution.ready = batch.resolution.ready, []
        special = {}
        for step in ready:
            if step.kind in HANDLED_KINDS or step.by_parts:
                batch.release(step)
            else:
                special[step.id] = step
        if special:
            await _open_special(connection, batch, special)


async def _open_special(connection: Connection, batch: Batch, steps: dict[UUID, Waiting]) -> None:
    known = len(batch.resolution.skipped)
    children = []
    for row in await run(connection, STEPS["read_openings"], {"ids": list(steps)}):
        if row["kind"] == "child":
            children.append(row)
        else:
            _OPENINGS[row["kind"]](batch, steps[row["id"]], row)
    if children:
        await _open_children(connection, batch, steps, children)
    failed = batch.resolution.skipped[known:]
    if failed:
        batch.note_skipped(failed)
        ended = [Ended(skip.step.id, skip.step.job_id, skip.step.step, "skipped", poisoned=True) for skip in failed]
        await follow(connection, batch, ended)


def _fail(batch: Batch, step: Waiting, reason: str, kind: str) -> None:
    """Let a step that cannot even begin count as failed, like a map that lacks parts."""
    error = {"type": kind, "message": reason, "traceback": None, "retryable": False}
    batch.resolution.skipped.append(Skipped(step, poisoned=True, reason=reason, error=error))


def _open_map(batch: Batch, step: Waiting, row: dict[str, Any]) -> None:
    parts: int | None = row["parts"]
    if parts is None:
        _fail(batch, step, MAP_SOURCE_ERROR, "InputError")
    elif parts > MAX_MAP_PARTS:
        _fail(batch, step, too_many_parts_error(parts), "InputError")
    elif parts == 0:
        batch.release(step)
    else:
        reason = f"waits for {parts} part{'s' if parts > 1 else ''}"
        left = None if row["left_input"] is None else {"job_input": row["left_input"]}
        batch.wait(step.id, unresolved=parts, taken=0, failed=0, held_by="parts", reason=reason, input=left)
        batch.maps.append(step.id)
        batch.created += parts
        job = batch.jobs[step.job_id]
        job.open_steps += parts
        job.changed = True


def _open_sleep(batch: Batch, step: Waiting, row: dict[str, Any]) -> None:
    try:
        until = wake_at(row["spec"], row["until"], batch.moment or datetime.now(UTC))
    except ValueError as error:
        _fail(batch, step, str(error), "InputError")
    else:
        batch.release(step, run_at=until)


def _open_signal(batch: Batch, step: Waiting, row: dict[str, Any]) -> None:
    if row["signaled"]:
        batch.release(step)
        return
    spec = row["spec"]
    reason = f"waits for signal {spec['signal']!r}" if row["kind"] == "signal" else "waits for approval"
    until = None
    if spec.get("timeout") is not None:
        try:
            until = later(batch.moment or datetime.now(UTC), spec["timeout"])
        except ValueError as error:
            _fail(batch, step, str(error), "InputError")
            return
    batch.wait(step.id, held_by="signal", reason=reason, wait_until=until)


_OPENINGS = {MAP: _open_map, "sleep": _open_sleep, "signal": _open_signal, "approval": _open_signal}


async def _open_children(
    connection: Connection, batch: Batch, steps: dict[UUID, Waiting], rows: Sequence[dict[str, Any]]
) -> None:
    children = []
    for row, child in zip(rows, await prepare_children(connection, batch, rows), strict=True):
        step = steps[row["id"]]
        if isinstance(child, str):
            batch.release(step, refused=child)
            continue
        children.append(child)
        if row["spec"].get("wait", True):
            batch.wait(step.id, held_by="job", reason=f"waits for job {child.row['id']}")
        else:
            batch.release(step)
    if children:
        batch.created += len(children)
        await insert_jobs(connection, children, actor=batch.actor, now=batch.now)
        opening = [child.row["id"] for child in children if child.needs_activation]
        if opening:
            await begin_jobs(connection, opening, actor=batch.actor, now=batch.now)


async def _admit(connection: Connection, batch: Batch) -> None:
    """Release steps of jobs with a worker_count, as many as there is room for."""
    capped = [job.id for job in batch.jobs.values() if job.worker_count is not None and job.changed and job.goes_on]
    if not capped:
        return
    parameters = {"ids": capped, "paused": list(batch.paused), "now": batch.now}
    for row in await run(connection, STEPS["read_admissible_steps"], parameters):
        batch.let_go(Release(row["id"], row["namespace"]), row["limit_key"])


async def start_jobs(connection: Connection, ids: Collection[UUID], *, actor: str, now: datetime | None) -> int:
    """Start jobs that wait for it, and let their first steps go. Must run in a transaction, with the jobs locked."""
    parameters = {"ids": list(ids), "reason": None, "actor": actor, "now": now}
    started = [row["id"] for row in await run(connection, JOBS["start_pending_jobs"], parameters)]
    if started:
        await begin_jobs(connection, started, actor=actor, now=now)
    return len(started)
