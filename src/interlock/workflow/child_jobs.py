"""Prepares child jobs: finds their workflow, makes and checks their input, and takes over what a retry keeps.

Invariant: a child job obeys the rules of a submitted job; a step whose child is refused fails with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.errors import InputError
from interlock.model.options import MAX_JOB_DEPTH
from interlock.postgres.query import run
from interlock.store.jobs import JOBS
from interlock.store.workflows import WORKFLOWS
from interlock.workflow.kept_steps import read_kept_steps
from interlock.workflow.new_job import (
    NewJob,
    describe_unknown_workflow,
    find_workflows,
    job_depth_error,
    prepare_job,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.batch import Batch
    from interlock.workflow.new_job import FoundWorkflow


async def _with_retried_child(connection: Connection, row: dict[str, Any]) -> dict[str, Any]:
    """Add what the child job of a step takes over from the child job that it retries, unless that cannot be retried."""
    old_id: UUID = row["retried_child_id"]
    for old in await run(connection, JOBS["read_jobs"], {"ids": [old_id]}):
        try:
            reused = await read_kept_steps(connection, old_id, None, old)
        except InputError:  # rejected, or pruned
            break
        return {
            **row,
            "version": old["version"],
            "next_input": old["input"],
            "iteration": row["retried_iteration"],
            "taken_over": {"retried_from": old_id, "reused": reused},
        }
    return row


async def prepare_children(
    connection: Connection, batch: Batch, rows: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any] | str]]:
    """Prepare the child job of each row, or say why it is refused; return the rows with what they take over, too.

    A child obeys the rules of a submitted job: its workflow exists, its input matches the schema, its depth is allowed.
    """
    rows = [row if row.get("retried_child_id") is None else await _with_retried_child(connection, row) for row in rows]
    wanted = [(row["spec"]["workflow"], row.get("version") or row["spec"].get("workflow_version")) for row in rows]
    workflows = await find_workflows(connection, wanted)
    ids = list({found.id for found in workflows if found.id is not None})
    schema_rows = await run(connection, WORKFLOWS["read_input_schemas"], {"ids": ids})
    schemas: dict[UUID | None, dict[str, Any]] = {row["id"]: row["schema"] for row in schema_rows}
    children: list[dict[str, Any] | str] = []
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
    return rows, children


def _prepare_child(
    batch: Batch, row: dict[str, Any], found: FoundWorkflow, schema: dict[str, Any] | None
) -> dict[str, Any] | str:
    job = batch.jobs[row["job_id"]]
    workflow = row["spec"]["workflow"]
    input_ = row["next_input"] if "next_input" in row else _child_input(row["spec"].get("input"), row["inputs"])
    if schema is not None:
        # not at the top: the schema library is slow to import, and most programs do not need it
        from interlock.model.json_schema import find_fault  # noqa: PLC0415 - heavy, and seldom needed

        fault = find_fault(f"workflow {workflow}: input", schema, input_)
        if fault is not None:
            return fault
    new = NewJob(
        workflow,
        input_,
        version=found.version,
        parent_job_id=job.id,
        parent_task_id=row["id"],
        iteration=row.get("iteration", 1),
        correlation_id=job.correlation_id,
        traceparent=job.traceparent,
    )
    return prepare_job(new, depth=job.depth + 1, **row.get("taken_over", {}))


def _child_input(mapping: dict[str, Any] | None, inputs: dict[str, Any]) -> dict[str, Any]:
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
