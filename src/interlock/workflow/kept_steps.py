"""Reads what a retry keeps of an ended job: results, failures without consequence, parts of maps, child jobs.

Invariant: a result is not reused if its step comes after a step that runs again, was compensated, or comes after a
compensated step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.errors import InputError
from interlock.lifecycle import JobEvent, JobState, TaskRowState
from interlock.model.graph import AFTER, RECOVERY, edges
from interlock.model.joins import EndedJobStep, StepEnd, standing_failures
from interlock.postgres.query import run
from interlock.store.jobs import STEPS
from interlock.workflow.resolve import step_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from interlock.postgres.connection import Connection


async def read_kept_steps(
    connection: Connection, job_id: UUID, step: str | None, old: dict[str, Any]
) -> dict[str, Any]:
    """Read what a retry of a job from a step takes over, by step, as it is stored in `jobs.reused`; `old` is the job.

    InputError if it cannot be retried.
    """
    rows = {row["step"]: row for row in await run(connection, STEPS["read_reusable_steps"], {"job_id": job_id})}
    _check_steps(job_id, step, old, rows)
    ends = {name: _end(row) for name, row in rows.items()}
    (found,) = await run(connection, STEPS["read_job_definition"], {"job_id": job_id})
    failed = _failed_steps(found["definition"], ends, old)
    if step is None and not failed:
        raise InputError(
            f"job {job_id} is {old['status']}, and no step of it failed{_because(old)}; name the step to retry from"
        )
    start = failed | {name for name, row in rows.items() if name == step or row["undone"]}
    step_ends = {name: end.end for name, end in ends.items()}
    again = steps_to_run_again(found["definition"], step_ends, start)
    partly = {
        name: rows[name]["unfinished"]
        for name in start - {step}
        if rows[name]["unfinished"] is not None
        and not rows[name]["undone"]
        # behind another step that runs again, the items or the input may be others
        and name not in steps_to_run_again(found["definition"], step_ends, start - {name})
    }
    return partly | _keep_ended({name: row for name, row in rows.items() if name not in again}, step_ends)


def _keep_ended(rows: Mapping[str, dict[str, Any]], ends: Mapping[str, StepEnd]) -> dict[str, Any]:
    """Return what is kept of steps that do not run again: results, and failures without consequence."""
    kept: dict[str, Any] = {}
    for name, row in rows.items():
        if row["document"] is not None:
            kept[name] = row["document"]
        elif row["state"] != TaskRowState.SKIPPED or row["is_left_out"]:
            # failed without consequence, or canceled by cancel_rest; here or in the job that this one retried
            kept[name] = {"skipped_by_failure": ends[name] is StepEnd.FAILED}
    return kept


def _check_steps(job_id: UUID, step: str | None, old: dict[str, Any], rows: Mapping[str, dict[str, Any]]) -> None:
    """Raise InputError unless the step exists and the steps of the old job are still stored."""
    if step is not None and step not in rows:
        raise InputError(f"workflow {old['workflow']!r} has no step {step!r}; it has {', '.join(rows)}")
    missing = [name for name, row in rows.items() if row["is_missing"]]
    if missing == list(rows) and old["event"] == JobEvent.REJECT:
        raise InputError(f"job {job_id} was rejected and cannot be retried: {old['reason']}; submit it anew")
    if missing:
        raise InputError(
            f"job {job_id} cannot be retried: its steps were pruned ({', '.join(missing[:5])}), and their results are "
            "not known any more; submit it anew"
        )


def _end(row: dict[str, Any]) -> EndedJobStep:
    end = step_end(
        row["state"], skipped_by_failure=row["skipped_by_failure"], superseded=row["superseded"], reused=row["reused"]
    )
    return EndedJobStep(end, ran=row["state"] != TaskRowState.SKIPPED or row["reused"])


def _because(old: dict[str, Any]) -> str:
    return f" ({old['reason']})" if old["reason"] else ""


def _failed_steps(definition: Mapping[str, Any], ends: Mapping[str, EndedJobStep], old: dict[str, Any]) -> set[str]:
    """List the steps whose failure failed the job; of a job that was canceled, at least the steps that were."""
    failed = standing_failures(definition, ends)
    if failed or old["status"] != JobState.CANCELED:
        return failed
    return {name for name, step in ends.items() if step.end is StepEnd.FAILED and step.ran}


def steps_to_run_again(definition: Mapping[str, Any], ends: Mapping[str, StepEnd], start: Iterable[str]) -> set[str]:
    """Return these steps and the steps after them, without done steps that a partial join ran in spite of a failure."""
    downstreams: dict[str, list[str]] = {}
    for edge in edges(definition):
        is_success = edge.condition in {AFTER, RECOVERY}
        if is_success and ends[edge.upstream] is StepEnd.FAILED and ends[edge.downstream] is StepEnd.DONE:
            continue
        downstreams.setdefault(edge.upstream, []).append(edge.downstream)
    seen = set(start)
    left = list(seen)
    while left:
        for name in downstreams.get(left.pop(), ()):
            if name not in seen:
                seen.add(name)
                left.append(name)
    return seen
