"""Explains jobs: why one has not started, what its open steps wait for, how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.client.explain.explanation import (
    Evidence,
    Fact,
    FactCode,
    format_moment,
    move_evidence,
    shell_command,
    webhook_facts,
    worker_command,
)
from interlock.client.explain.tasks import WAITS
from interlock.lifecycle import JOB, JobState, SupervisedWorkerState, TaskRowState

if TYPE_CHECKING:
    from interlock.store.explain import Cause, Explained


def job_facts(cause: Cause, seen: Explained, *, is_root: bool) -> list[Fact]:
    """Explain a job: the causes of its state, the most important first."""
    row = cause.row
    if row["status"] in JOB.final:
        return _ended_facts(row, seen, is_root=is_root)
    facts = (
        _start_facts(row, seen) if row["status"] != JobState.RUNNING else _progress_facts(cause, seen, is_root=is_root)
    )
    return facts + _deadline_facts(row)


def _ended_facts(row: dict[str, Any], seen: Explained, *, is_root: bool) -> list[Fact]:
    has_failed = row["status"] != JobState.COMPLETED
    retry = "when the cause is gone, it can be submitted again; results of done steps are kept" if has_failed else None
    outcome = Fact(
        code=FactCode.FAILED if row["status"] == JobState.FAILED else FactCode.ENDED,
        text=str(row["reason"] or f"it is {row['status']}"),
        evidence=move_evidence(seen.moves) if is_root else (),
        remedy=retry,
        command=shell_command("jobs", "retry", row["id"]) if has_failed else None,
    )
    return [outcome, *webhook_facts(row["webhook"])]


def _start_facts(row: dict[str, Any], seen: Explained) -> list[Fact]:
    """Describe why a job has not started, by the current state and not that of the submit."""
    unserved = row["unserved"]
    if row["is_debounced"]:
        return [Fact(code=FactCode.DEBOUNCED, text=f"it {row['reason']}", remedy="it starts then")]
    if row["key_hold"] is not None:
        ahead = str(row["key_hold"]).partition("job ")[2].partition(" ")[0]
        fact = Fact(
            code=FactCode.WAITS_FOR_KEY,
            text=f"it {row['key_hold']}",
            evidence=(Evidence("job", ahead, f"job {ahead} has the key"),),
            remedy="that job ends",
            command=shell_command("explain", "job", ahead),
        )
        return [fact, *_no_orchestrator(seen)]
    if unserved:
        word = "namespaces" if len(unserved) > 1 else "namespace"
        return [
            Fact(
                code=FactCode.NO_WORKER,
                text=f"no live worker serves {word} {', '.join(map(repr, unserved))}",
                evidence=tuple(Evidence("namespace", name, f"{name} has no live worker") for name in unserved),
                remedy="start one that does",
                command=worker_command(",".join(unserved)),
            )
        ]
    text = "live workers serve its first steps: it starts when an orchestrator looks next"
    return [*_no_orchestrator(seen), Fact(code=FactCode.WAITS_FOR_ORCHESTRATOR, text=text)]


def _progress_facts(cause: Cause, seen: Explained, *, is_root: bool) -> list[Fact]:
    """Describe the progress of a running job."""
    row = cause.row
    facts = _no_orchestrator(seen)
    if row["compensating"]:
        text = f"it compensates, and becomes {row['ending']} then: {row['ending_reason']}"
        facts.append(Fact(code=FactCode.COMPENSATES, text=text))
    elif row["unfinished_child"] is not None:
        facts.append(_ending_with_children(row))
    elif row["ending"] is not None:
        text = f"it becomes {row['ending']} once its last step has stopped: {row['ending_reason']}"
        facts.append(Fact(code=FactCode.ENDS_SOON, text=text))
    if row["dead_letters"]:
        latest = f"the latest at {format_moment(row['dead_letter_at'])}: {row['dead_letter_error']}"
        facts.append(
            Fact(
                code=FactCode.DEAD_LETTER,
                text=f"{row['dead_letters']} of its step results became dead letters, {latest}",
                since=row["dead_letter_at"],
                remedy="when the cause is gone, they can be sent again at once",
                command=shell_command("jobs", "replay", row["id"]),
            )
        )
    if not cause.causes and not cause.shared and row["unfinished_child"] is None:
        facts.append(
            Fact(
                code=FactCode.NOTHING_OPEN,
                text="none of its steps is active, and it has not ended: a step result was lost",
                remedy="send its step results again",
                command=shell_command("jobs", "replay", row["id"]),
            )
        )
    opened = _count_open_steps(seen) if is_root else f"{row['open_steps']} of its steps are open"
    return [*facts, Fact(code=FactCode.OPEN_STEPS, text=opened)]


def _deadline_facts(row: dict[str, Any]) -> list[Fact]:
    if row["deadline_at"] is None:
        return []
    deadline = format_moment(row["deadline_at"])
    if row["ending"] is None:
        text = f"it is canceled if it has not ended at {deadline}"
    elif _waits_for_children(row):
        text = f"its child jobs are canceled if they have not ended at {deadline}"
    else:
        return []
    return [Fact(code=FactCode.DEADLINE, text=text)]


def _waits_for_children(row: dict[str, Any]) -> bool:
    """Tell whether a job has failed and waits for child jobs that are not being canceled."""
    return row["ending"] == JobState.FAILED and row["unfinished_child"] is not None and row["cancel_reason"] is None


def _ending_with_children(row: dict[str, Any]) -> Fact:
    child = row["unfinished_child"]
    text = f"it becomes {row['ending']} once its steps and its child job {child} have ended: {row['ending_reason']}"
    evidence = [Evidence("job", str(child), f"child job {child} has not ended")]
    waits = _waits_for_children(row)
    if row["cancel_reason"] is not None:
        evidence.append(Evidence("job", str(child), f"its child jobs are being canceled: {row['cancel_reason']}"))
    return Fact(
        code=FactCode.WAITS_FOR_CHILDREN,
        text=text,
        evidence=tuple(evidence),
        remedy="its child jobs end, or are canceled with it; it becomes FAILED then" if waits else None,
        command=shell_command("jobs", "cancel", row["id"]) if waits else None,
    )


def _count_open_steps(seen: Explained) -> str:
    """Count the open steps of the job, and then by what they wait for."""
    parts = [f"{counted['steps']} {_described(counted['state'], counted['held_by'])}" for counted in seen.steps]
    return f"{sum(counted['steps'] for counted in seen.steps)} of its steps are open: {', '.join(parts) or 'none'}"


def _described(state: str, held_by: str | None) -> str:
    if state == "unprocessed":
        return "ended, but not processed by an orchestrator"
    if state != TaskRowState.WAITING or held_by is None:
        return state
    return f"waiting for {WAITS.get(held_by, held_by)}"


def _no_orchestrator(seen: Explained) -> list[Fact]:
    if any(
        process.role == "orchestrator" and process.status == SupervisedWorkerState.RUNNING for process in seen.processes
    ):
        return []
    return [
        Fact(
            code=FactCode.NO_ORCHESTRATOR,
            text="no orchestrator is live, and without one no job goes on",
            remedy="start one",
            command="interlock orchestrator",
        )
    ]
