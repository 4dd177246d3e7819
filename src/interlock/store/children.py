"""Child jobs: what a step of kind child starts, or why it cannot.

Invariant: a child is held to the same rules as a job that somebody submits: a workflow that is known, an input that its
schema allows, and no deeper than jobs may nest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.store.database import run
from interlock.store.submission import DEEPEST, NewJob, find_workflows, prepared, unknown_workflow
from interlock.store.workflows import WORKFLOWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from uuid import UUID

    from interlock.store.batches import Batch
    from interlock.store.database import Connection
    from interlock.store.submission import FoundWorkflow, PreparedJob


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
    from interlock.store.schema import find_fault  # noqa: PLC0415 - heavy, and seldom needed

    return find_fault(workflow, schema, given)


async def _refused(connection: Connection, row: dict[str, Any], found: FoundWorkflow, depth: int) -> str | None:
    if depth > DEEPEST:
        return f"jobs nest at most {DEEPEST} deep: this child would be at depth {depth}"
    if row["inputs"].get("refused") is not None:
        return str(row["inputs"]["refused"])
    if found.id is None:
        return await unknown_workflow(connection, row["spec"]["workflow"], row["spec"].get("workflow_version"))
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
    return prepared(new, found, depth=job.depth + 1)


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
