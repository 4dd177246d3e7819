"""Activates ready steps: plain steps become pending; map, sleep, signal, approval and child steps enter their own wait.

`apply_batch` is the last stage of every orchestration transaction: it activates, finalizes jobs and writes.

Invariant: everything that the end of a step leads to (activated steps, parts, child jobs, steps skipped in turn) is
written in the same transaction that takes the end.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import TaskRowState
from interlock.model.graph import MAP, MAP_SOURCE_ERROR, MAX_MAP_PARTS, SINGLE_TASK_KINDS, too_many_parts_error
from interlock.model.options import MAX_JOB_DEPTH
from interlock.model.timing import later, wake_at
from interlock.postgres.query import run, run_in_order
from interlock.store.jobs import JOBS, ORCHESTRATION, STEPS
from interlock.store.workflows import WORKFLOWS
from interlock.workflow.batch import Activation, lock_jobs
from interlock.workflow.finalize import complete_jobs, finalize_jobs, jobs_without_open_steps
from interlock.workflow.new_job import (
    NewJob,
    describe_unknown_workflow,
    find_workflows,
    insert_jobs,
    job_depth_error,
    prepare_job,
)
from interlock.workflow.resolve import EndedStep, SkippedStep, WaitingStep

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.batch import Batch
    from interlock.workflow.new_job import FoundWorkflow, PreparedJob


async def apply_batch(connection: Connection, batch: Batch, messages: Sequence[int] = ()) -> None:
    """Activate the ready steps of a batch, finalize its jobs, write all of it and delete the handled messages."""
    await _activate_ready_steps(connection, batch)
    writes = batch.take_step_writes()
    if _needs_reads(batch):
        # the reads that follow must see the writes so far
        await run_in_order(connection, writes)
        await _admit_by_worker_count(connection, batch)
        await finalize_jobs(connection, batch)
        writes = batch.take_step_writes()
    else:
        batch.completed += jobs_without_open_steps(batch)
    if batch.completed:
        await run_in_order(connection, writes)
        await complete_jobs(connection, batch)
        writes = batch.take_step_writes()
    await run_in_order(connection, [*writes, *batch.take_job_writes(messages)])


def _needs_reads(batch: Batch) -> bool:
    """Tell whether a job has a `worker_count`, a failure or an ending, so that its counters do not decide alone."""
    return any(
        job.changed
        and (job.worker_count is not None or job.ending is not None or (job.failed_steps and not job.open_steps))
        for job in batch.jobs.values()
    )


# --- From ended steps to ready ones -----------------------------------------------------------------------------


async def take_ended_steps(
    connection: Connection, *, ids: Sequence[UUID] = (), job_ids: Sequence[UUID] = (), skipped: Sequence[UUID] = ()
) -> list[dict[str, Any]]:
    """Take each ended step once, and return a row for each step that waits for it."""
    parameters = {"ids": list(ids), "job_ids": list(job_ids), "skipped": list(skipped)}
    return await run(connection, ORCHESTRATION["take_ended_steps"], parameters)


def distinct_ended_steps(rows: Iterable[dict[str, Any]]) -> list[EndedStep]:
    """Return the steps that `take_ended_steps` took, each once."""
    found = {
        row["upstream_id"]: EndedStep(
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


async def resolve_ended_steps(
    connection: Connection, batch: Batch, ended: Collection[EndedStep], rows: Sequence[dict[str, Any]] | None = None
) -> None:
    """Resolve the edges of ended steps, then those of the steps that are skipped by it, and so on.

    `rows` are the waiting steps downstream of `ended`, if they have been read.
    """
    batch.count_ended(ended)
    frontier = {step.id: step for step in ended if batch.jobs[step.job_id].is_advancing}
    while frontier:
        if rows is None:
            rows = await take_ended_steps(connection, skipped=list(frontier))
        known = len(batch.resolution.skipped)
        frontier = batch.resolution.resolve(frontier, rows)
        rows = None
        batch.count_ended(frontier.values())
        batch.count_failed_skips(batch.resolution.skipped[known:])
    await _add_skip_reasons(connection, batch)


async def _add_skip_reasons(connection: Connection, batch: Batch) -> None:
    """Name the failed upstream step of skipped steps where it failed in an earlier batch."""
    ids = [skip.step.id for skip in batch.resolution.skipped if skip.reason is None]
    if ids:
        rows = await run(connection, ORCHESTRATION["read_failed_upstreams"], {"ids": ids})
        found = {row["id"]: row["step"] for row in rows}
        batch.resolution.skipped = [
            skip._replace(reason=f"step {found[skip.step.id]} failed") if skip.step.id in found else skip
            for skip in batch.resolution.skipped
        ]


# --- Root steps of a job that starts ----------------------------------------------------------------------------


async def start_pending_jobs(connection: Connection, ids: Collection[UUID], *, actor: str, now: datetime | None) -> int:
    """Start jobs, activate their root steps and return how many started. Must run in a transaction that locked them."""
    parameters = {"ids": list(ids), "reason": None, "actor": actor, "now": now}
    started = [row["id"] for row in await run(connection, JOBS["start_pending_jobs"], parameters)]
    if started:
        await activate_root_steps(connection, started, actor=actor, now=now)
    return len(started)


async def activate_root_steps(
    connection: Connection, ids: Iterable[UUID], *, actor: str, now: datetime | None
) -> Batch:
    """Activate the root steps of jobs that have started, and skip steps with reused results. In a transaction."""
    batch = await lock_jobs(connection, ids, actor=actor, now=now)
    await _resolve_steps_ended_before_start(connection, batch)
    roots = await run(connection, STEPS["read_root_steps"], {"ids": list(batch.jobs)})
    await _skip_reused_steps(connection, batch, [row for row in roots if row["reused"]])
    batch.resolution.ready += [_root_step(row) for row in roots if not row["reused"]]
    for job in batch.jobs.values():
        job.changed = True
    await apply_batch(connection, batch)
    return batch


async def _resolve_steps_ended_before_start(connection: Connection, batch: Batch) -> None:
    """Resolve steps that were canceled while their job was waiting to start."""
    found = await run(connection, ORCHESTRATION["read_ended_steps"], {"ids": list(batch.jobs)})
    if found:
        rows = await take_ended_steps(connection, ids=[row["id"] for row in found], job_ids=list(batch.jobs))
        await resolve_ended_steps(connection, batch, distinct_ended_steps(rows), rows)


async def _skip_reused_steps(connection: Connection, batch: Batch, rows: Sequence[dict[str, Any]]) -> None:
    """Skip steps whose results the job takes over from an earlier job."""
    if not rows:
        return
    # written before they are resolved, so that none of them is read as waiting for another
    batch.resolution.skipped += [
        SkippedStep(
            _root_step(row), poisoned=False, reason=f"result reused from job {batch.jobs[row['job_id']].retried_from}"
        )
        for row in rows
    ]
    await run_in_order(connection, batch.take_step_writes())
    ended = [
        EndedStep(row["id"], row["job_id"], row["step"], TaskRowState.SKIPPED, chosen=row["chosen"], reused=True)
        for row in rows
    ]
    await resolve_ended_steps(connection, batch, ended)


def _root_step(row: dict[str, Any]) -> WaitingStep:
    names = ("id", "job_id", "step", "kind", "namespace", "priority", "limit_key")
    return WaitingStep(**{name: row[name] for name in names})


# --- Activation by kind -----------------------------------------------------------------------------------------


async def _activate_ready_steps(connection: Connection, batch: Batch) -> None:
    while batch.resolution.ready:  # a special step that fails can make others ready
        ready, batch.resolution.ready = batch.resolution.ready, []
        special = {}
        for step in ready:
            if step.kind in SINGLE_TASK_KINDS or step.waits_for_parts:
                batch.activate(step)
            else:
                special[step.id] = step
        if special:
            await _activate_special_steps(connection, batch, special)


async def _activate_special_steps(connection: Connection, batch: Batch, steps: dict[UUID, WaitingStep]) -> None:
    """Start the wait of steps that have no handler of their own."""
    known = len(batch.resolution.skipped)
    children = []
    for row in await run(connection, STEPS["read_special_steps"], {"ids": list(steps)}):
        if row["kind"] == "child":
            children.append(row)
        else:
            _ACTIVATE_BY_KIND[row["kind"]](batch, steps[row["id"]], row)
    if children:
        await _activate_children(connection, batch, steps, children)
    failed = batch.resolution.skipped[known:]
    if failed:
        batch.count_failed_skips(failed)
        await resolve_ended_steps(connection, batch, [skip.as_ended() for skip in failed])


def _fail_on_activation(batch: Batch, step: WaitingStep, reason: str) -> None:
    """Skip a step that cannot be activated, and count it as failed."""
    error = {"type": "InputError", "message": reason, "traceback": None, "retryable": False}
    batch.resolution.skipped.append(SkippedStep(step, poisoned=True, reason=reason, error=error))


def _activate_map(batch: Batch, step: WaitingStep, row: dict[str, Any]) -> None:
    """Insert the parts of a map, and let the map wait for them; a map without parts ends at once."""
    parts: int | None = row["parts"]
    if parts is None:
        _fail_on_activation(batch, step, MAP_SOURCE_ERROR)
    elif parts > MAX_MAP_PARTS:
        _fail_on_activation(batch, step, too_many_parts_error(parts))
    elif parts == 0:
        batch.activate(step)
    else:
        reason = f"waits for {parts} part{'s' if parts > 1 else ''}"
        rest = None if row["input_without_source"] is None else {"job_input": row["input_without_source"]}
        batch.keep_waiting(step.id, unresolved=parts, taken=0, failed=0, held_by="parts", reason=reason, input=rest)
        batch.maps.append(step.id)
        batch.created_count += parts
        job = batch.jobs[step.job_id]
        job.open_steps += parts
        job.changed = True


def _activate_sleep(batch: Batch, step: WaitingStep, row: dict[str, Any]) -> None:
    try:
        until = wake_at(row["spec"], row["until"], batch.moment or datetime.now(UTC))
    except ValueError as error:
        _fail_on_activation(batch, step, str(error))
    else:
        batch.activate(step, run_at=until)


def _activate_signal(batch: Batch, step: WaitingStep, row: dict[str, Any]) -> None:
    """Let a signal or approval step wait, with its timeout, unless the signal has been sent."""
    if row["signaled"]:
        batch.activate(step)
        return
    spec = row["spec"]
    reason = f"waits for signal {spec['signal']!r}" if row["kind"] == "signal" else "waits for approval"
    until = None
    if spec.get("timeout") is not None:
        try:
            until = later(batch.moment or datetime.now(UTC), spec["timeout"])
        except ValueError as error:
            _fail_on_activation(batch, step, str(error))
            return
    batch.keep_waiting(step.id, held_by="signal", reason=reason, wait_until=until)


_ACTIVATE_BY_KIND = {
    MAP: _activate_map,
    "sleep": _activate_sleep,
    "signal": _activate_signal,
    "approval": _activate_signal,
}


async def _admit_by_worker_count(connection: Connection, batch: Batch) -> None:
    """Activate steps that wait for the `worker_count` of their job, as many as may run now."""
    ids = [job.id for job in batch.jobs.values() if job.worker_count is not None and job.changed and job.is_advancing]
    if not ids:
        return
    parameters = {"ids": ids, "paused": list(batch.paused), "now": batch.now}
    for row in await run(connection, STEPS["read_admissible_steps"], parameters):
        batch.activate_unless_held(Activation(row["id"], row["namespace"]), row["limit_key"])


# --- Child jobs -------------------------------------------------------------------------------------------------


async def _activate_children(
    connection: Connection, batch: Batch, steps: dict[UUID, WaitingStep], rows: Sequence[dict[str, Any]]
) -> None:
    """Insert the child jobs of these steps; a step whose child is refused runs at once, and fails with the reason."""
    children = []
    for row, child in zip(rows, await _prepare_children(connection, batch, rows), strict=True):
        step = steps[row["id"]]
        if isinstance(child, str):
            batch.activate(step, refused=child)
            continue
        children.append(child)
        if row["spec"].get("wait", True):
            batch.keep_waiting(step.id, held_by="job", reason=f"waits for job {child.id}")
        else:
            batch.activate(step)
    if children:
        batch.created_count += len(children)
        await insert_jobs(connection, children, actor=batch.actor, now=batch.now)
        ids = [child.id for child in children if child.needs_activation]
        if ids:
            await activate_root_steps(connection, ids, actor=batch.actor, now=batch.now)


async def _prepare_children(
    connection: Connection, batch: Batch, rows: Sequence[dict[str, Any]]
) -> list[PreparedJob | str]:
    """Prepare the child job of each row, or say why it is refused.

    A child obeys the rules of a submitted job: its workflow exists, its input matches the schema, its depth is allowed.
    """
    wanted = [(row["spec"]["workflow"], row["spec"].get("workflow_version")) for row in rows]
    workflows = await find_workflows(connection, wanted, now=batch.now)
    ids = list({found.id for found in workflows if found.id is not None})
    schema_rows = await run(connection, WORKFLOWS["read_input_schemas"], {"ids": ids})
    schemas: dict[UUID | None, dict[str, Any]] = {row["id"]: row["schema"] for row in schema_rows}
    children: list[PreparedJob | str] = []
    for row, found in zip(rows, workflows, strict=True):
        depth = batch.jobs[row["job_id"]].depth + 1
        if depth > MAX_JOB_DEPTH:
            children.append(job_depth_error(depth))
        elif row["inputs"].get("refused") is not None:
            children.append(str(row["inputs"]["refused"]))
        elif found.id is None:
            children.append(await describe_unknown_workflow(connection, *wanted[len(children)]))
        else:
            children.append(_prepare_child(batch, row, found, schemas.get(found.id)))
    return children


def _prepare_child(
    batch: Batch, row: dict[str, Any], found: FoundWorkflow, schema: dict[str, Any] | None
) -> PreparedJob | str:
    job = batch.jobs[row["job_id"]]
    workflow = row["spec"]["workflow"]
    input_ = child_input(row["spec"].get("input"), row["inputs"])
    if schema is not None:
        # not at the top: the schema library is slow to import, and most programs do not need it
        from interlock.model.json_schema import find_fault  # noqa: PLC0415 - heavy, and seldom needed

        fault = find_fault(workflow, schema, input_)
        if fault is not None:
            return fault
    new = NewJob(
        workflow,
        input_,
        version=found.version,
        parent_job_id=job.id,
        parent_task_id=row["id"],
        correlation_id=job.correlation_id,
    )
    return prepare_job(new, found, depth=job.depth + 1)


def child_input(mapping: dict[str, Any] | None, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the input of a child job: its parent's, or the one that a mapping makes.

    In a mapping, the name of an upstream step stands for its result, "input" for the parent's input, "input.x" for a
    field of it; any other value stands for itself.
    """
    job_input: Any = inputs["job_input"]
    if mapping is None:
        return dict(job_input)
    results = inputs["results"]

    def substitute(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value in results:
            return results[value]
        if value == "input":
            return job_input
        field = value.removeprefix("input.")
        return job_input.get(field) if field != value else value

    return {name: substitute(value) for name, value in mapping.items()}
