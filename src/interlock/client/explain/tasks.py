"""Explains tasks and steps: why one waits, who runs it and until when, how it ended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interlock.client.explain.capacity import is_used_up, limit_facts, until_heartbeat, worker_facts
from interlock.client.explain.explanation import (
    Evidence,
    Fact,
    FactCode,
    describe_error,
    format_moment,
    move_evidence,
    shell_command,
    webhook_facts,
    worker_command,
)
from interlock.lifecycle import JOB, TASK_ROW, TaskRowState
from interlock.store.tasks import MAX_CRASHES

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.store.explain import Cause, Explained

# what a waiting step waits for, by `held_by`, in the count of the open steps of a job
WAITS = {
    "dependency": "other steps",
    "parts": "their parts",
    "worker_count": "their turn",
    "compensation": "the compensations before them",
    "job": "a child job",
    "signal": "a signal",
    "approval": "an approval",
    "sleep": "a time",
    "namespace": "a paused namespace",
    "limit": "a limit",
    "start": "the job to start",
}


def task_facts(cause: Cause, seen: Explained, *, is_root: bool) -> list[Fact]:
    """Explain a task: the causes of its state, the most important first; then its job."""
    row = cause.row
    facts = _FACTS_BY_STATE.get(row["state"], _ended_facts)(cause, seen)
    if row["cancel_requested_at"] is not None and row["state"] in TASK_ROW.unfinished:
        facts.insert(0, _cancel_requested(row))
    if is_root and row["state"] in TASK_ROW.final and facts:
        facts[0] = replace(facts[0], evidence=(*facts[0].evidence, *move_evidence(seen.moves)))
    return facts + (_job_of_step(row) if is_root else [])


def _cancel_requested(row: dict[str, Any]) -> Fact:
    asked_at = row["cancel_requested_at"]
    is_running = row["state"] == TaskRowState.RUNNING
    return Fact(
        code=FactCode.CANCEL_REQUESTED,
        text=f"its cancellation was asked for at {format_moment(asked_at)}",
        since=asked_at,
        remedy="its worker stops it; --force does not wait for that" if is_running else None,
        command=shell_command("tasks", "cancel", row["id"], "--force", "--yes") if is_running else None,
    )


def _job_of_step(row: dict[str, Any]) -> list[Fact]:
    if row["job_id"] is None:
        return []
    reason = f": {row['job_reason']}" if row["job_reason"] else ""
    text = f"it is a step of job {row['job_id']}, which is {row['job_status']}{reason}"
    return [
        Fact(
            code=FactCode.STEP_OF_JOB,
            text=text,
            evidence=(Evidence("job", str(row["job_id"]), f"job {row['job_id']} is {row['job_status']}"),),
        )
    ]


# --- waiting ----------------------------------------------------------------------------------------------------


def _waiting_facts(cause: Cause, seen: Explained) -> list[Fact]:
    """Describe what a waiting task waits for: the stored reason, and its current details."""
    row = cause.row
    held_by = row["held_by"]
    if held_by == "limit":
        return _limited_facts(row, seen)
    if held_by == "namespace":
        return [_paused_namespace(row)]
    if held_by == "signal":
        return [_waits_for_signal(row, seen)]
    reason = row["reason"] or "it waits; no reason is stored"
    if held_by == "sleep":
        until = row["wait_until"]
        is_over = until is not None and until <= seen.now
        over = f"its sleep was over at {format_moment(until)}: an orchestrator completes it" if is_over else None
        return [
            Fact(code=FactCode.SLEEPS, text=reason, remedy=over, command="interlock orchestrator" if is_over else None)
        ]
    return _upstream_facts(cause, reason)


def _limited_facts(row: dict[str, Any], seen: Explained) -> list[Fact]:
    """Describe the use of each limit, those that are in the way first; else the stored reason, and missing workers."""
    facts = [fact for limit in row["limits"] or () for fact in limit_facts(limit)]
    blocking = [fact for fact in facts if fact.code != FactCode.LIMIT_HAS_ROOM]
    with_room = [fact for fact in facts if fact.code == FactCode.LIMIT_HAS_ROOM]
    if blocking:
        return blocking + with_room
    missing = {FactCode.NO_WORKER, FactCode.NO_HANDLER}
    served = worker_facts(row["namespace"], row["type"], seen.processes, seen.running)
    stored = row["reason"] or "it waits for a limit; no reason is stored"
    return [
        *(fact for fact in served if fact.code in missing),
        Fact(code=FactCode.WAITS_FOR_RELEASE, text=stored, remedy="the leading worker admits it when there is room"),
        *with_room,
    ]


def _paused_namespace(row: dict[str, Any]) -> Fact:
    if row["paused_at"] is None:
        text = f"namespace {row['namespace']} is not paused any more: the leading worker lets it go on"
        return Fact(code=FactCode.WAITS_FOR_RELEASE, text=text)
    paused = f"namespace {row['namespace']} was paused at {format_moment(row['paused_at'])} by {row['paused_by']}"
    return Fact(
        code=FactCode.NAMESPACE_PAUSED,
        text=row["reason"] or paused,
        since=row["paused_at"],
        evidence=(Evidence("namespace", row["namespace"], paused),),
        remedy="resume the namespace",
        command=shell_command("namespaces", "resume", row["namespace"]),
    )


def _waits_for_signal(row: dict[str, Any], seen: Explained) -> Fact:
    is_approval = row["step_kind"] == "approval"
    wanted = "answer" if is_approval else "signal"
    until = row["wait_until"]
    evidence: tuple[Evidence, ...] = ()
    if until is not None:
        late = f"its timeout was at {format_moment(until)}: an orchestrator fails it"
        text = late if until <= seen.now else f"it fails if no {wanted} has arrived by {format_moment(until)}"
        evidence = (Evidence("task", str(row["id"]), text),)
    return Fact(
        code=FactCode.WAITS_FOR_APPROVAL if is_approval else FactCode.WAITS_FOR_SIGNAL,
        text=row["reason"] or f"waits for {'approval' if is_approval else 'a signal'}",
        since=row["wait_started_at"],
        evidence=evidence,
        remedy=(
            "approve the step; with --reject the command rejects it"
            if is_approval
            else "send the signal; a payload follows the name as JSON"
        ),
        command=(
            shell_command("jobs", "approve", row["job_id"], row["step"])
            if is_approval
            else shell_command("jobs", "signal", row["job_id"], row["signal"])
        ),
    )


def _upstream_facts(cause: Cause, reason: str) -> list[Fact]:
    row = cause.row
    facts = [Fact(code=FactCode.WAITS_FOR_STEPS, text=reason)]
    if row["held_by"] == "parts":
        text = f"{row['unresolved']} of its parts have not ended"
        facts.append(Fact(code=FactCode.WAITS_FOR_STEPS, text=text))
    if row["ending"] is not None:
        text = f"its job becomes {row['ending']}, and releases nothing more"
        facts.append(Fact(code=FactCode.ENDS_SOON, text=text))
    if not cause.causes and not cause.shared and not cause.more:
        facts.append(
            Fact(
                code=FactCode.NOTHING_OPEN,
                text="nothing that it waits for is open any more: it should be released, or a step result was lost",
                remedy="send the results of the job again",
                command=shell_command("jobs", "replay", row["job_id"]) if row["job_id"] is not None else None,
            )
        )
    return facts


# --- pending and running ----------------------------------------------------------------------------------------


def _pending_facts(cause: Cause, seen: Explained) -> list[Fact]:
    """Describe why a pending task is not claimed."""
    row = cause.row
    if row["run_at"] > seen.now:
        text = f"it is not due before {format_moment(row['run_at'])}"
        retry = describe_error(row["error"])
        after = (Evidence("error", str(row["id"]), f"try {row['tries']} of {row['max_tries']}: {retry}"),)
        return [Fact(code=FactCode.NOT_DUE, text=text, evidence=after if retry else (), remedy="it runs then")]
    reached = [limit for limit in row["limits"] or () if is_used_up(limit)]
    if reached:
        return [fact for limit in reached for fact in limit_facts(limit)]
    facts = []
    if row["crashes"]:
        text = f"{_suspicion(row)}: it waits for a worker that runs nothing else"
        facts.append(Fact(code=FactCode.SUSPECTED, text=text))
    return facts + worker_facts(row["namespace"], row["type"], seen.processes, seen.running)


def _suspicion(row: dict[str, Any]) -> str:
    return f"it is suspected of killing its worker ({row['crashes']} of {MAX_CRASHES} crashes)"


def _running_facts(cause: Cause, seen: Explained) -> list[Fact]:
    """Describe the worker and the lease of a running task, and what happens if the worker is gone."""
    row = cause.row
    lease, worker = row["lease_expires_at"], row["worker_id"]
    then = "it is put back, and runs alone"
    if row["crashes"] + 1 >= MAX_CRASHES:
        then = f"it ends in error, because it has lost {MAX_CRASHES} workers in a row"
    heartbeat = f"its worker {until_heartbeat(row['heartbeat_at'], row['worker_seen_until'], seen.now)}"
    evidence = (Evidence("worker", worker, heartbeat),)
    text = f"{worker} runs attempt {row['attempt']}, try {row['tries']} of {row['max_tries']}"
    running = Fact(code=FactCode.RUNNING, text=text, evidence=evidence)
    facts = [running]
    if row["crashes"]:
        facts.append(Fact(code=FactCode.SUSPECTED, text=f"{_suspicion(row)}: it runs alone"))
    if lease <= seen.now:
        none_live = not any(process.role == "worker" for process in seen.processes)
        text = f"its lease ran out at {format_moment(lease)}; when a live worker recovers it, {then}"
        expired = Fact(
            code=FactCode.LEASE_EXPIRED,
            text=text,
            since=lease,
            evidence=evidence,
            remedy="no worker is live: start one" if none_live else "a live worker recovers it within seconds",
            command=worker_command(row["namespace"]) if none_live else None,
        )
        return [expired, *facts]
    if row["worker_seen_until"] is None or row["worker_seen_until"] <= seen.now:
        text = f"{heartbeat}; if it is gone, the lease runs out at {format_moment(lease)}, and then {then}"
        return [Fact(code=FactCode.WORKER_SILENT, text=text, since=row["heartbeat_at"]), *facts]
    facts[0] = replace(running, remedy=f"its lease lasts until {format_moment(lease)}; unless it is renewed, {then}")
    return facts


# --- ended ------------------------------------------------------------------------------------------------------


def _ended_facts(cause: Cause, seen: Explained) -> list[Fact]:
    """Describe how and why a task ended, and what is left to do."""
    row = cause.row
    facts = [_outcome(row)] if row["state"] != TaskRowState.DONE or row["reason"] else []
    if not facts:
        facts = [
            Fact(code=FactCode.ENDED, text=f"it is {row['state']}, after try {row['tries']} of {row['max_tries']}")
        ]
    if row["unprocessed"]:
        facts.insert(0, unprocessed_fact(row, seen))
    return facts + webhook_facts(row["webhook"])


def _outcome(row: dict[str, Any]) -> Fact:
    error = describe_error(row["error"])
    why = error or row["reason"]
    after = f": {why}" if why else ""
    remedy, command = _again(row)
    if row["state"] == TaskRowState.CANCELED:
        text = row["reason"] or "it was canceled; no reason is stored"
        return Fact(code=FactCode.CANCELED, text=text, remedy=remedy, command=command)
    if row["state"] != TaskRowState.ERROR:
        return Fact(code=FactCode.ENDED, text=row["reason"] or f"it is {row['state']}; no reason is stored")
    if row["event"] == "exhaust":
        text = f"it lost its worker {row['crashes']} of {MAX_CRASHES} times in a row{after}"
        return Fact(code=FactCode.CRASHED_WORKERS, text=text, remedy=remedy, command=command)
    tries = f"{row['tries']} of {row['max_tries']}"
    if row["tries"] >= row["max_tries"]:
        text = f"it used up its tries, {tries}{after}"
        return Fact(code=FactCode.TRIES_USED_UP, text=text, remedy=remedy, command=command)
    text = f"it failed for good with try {tries}{after}" if row["attempt"] else why or "it failed; no reason is stored"
    return Fact(code=FactCode.FAILED, text=text, remedy=remedy, command=command)


def _again(row: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return how a task that ended without success runs again."""
    if row["job_id"] is None:
        return "when the cause is gone, it can run again, with new tries", shell_command("tasks", "requeue", row["id"])
    if row["compensates"] is not None:
        return "nothing runs a compensation again: undo by hand what it should have undone", None
    if row["job_status"] in JOB.final - {"COMPLETED"}:
        whole = "this step" if row["declared_step"] == row["step"] else f"the whole step {row['declared_step']}"
        remedy = f"when the cause is gone, its job can be submitted again from {whole} on"
        return remedy, shell_command("jobs", "retry", row["job_id"], row["declared_step"])
    return None, None


def unprocessed_fact(row: dict[str, Any], seen: Explained) -> Fact:
    """Describe why an orchestrator has not processed the end of a step."""
    replay = shell_command("jobs", "replay", row["job_id"])
    if row["dead_letter_at"] is not None:
        dead_at = format_moment(row["dead_letter_at"])
        return Fact(
            code=FactCode.DEAD_LETTER,
            text=f"its step result became a dead letter at {dead_at}: {row['dead_letter_error']}",
            since=row["dead_letter_at"],
            remedy="when the cause is gone, it can be sent again at once",
            command=replay,
        )
    waiting, age = seen.queue["waiting"], seen.queue["oldest_age"]
    if not waiting:
        text = "its step result is not in the queue: an orchestrator sends it again"
        return Fact(code=FactCode.RESULT_LOST, text=text, remedy="this does so at once", command=replay)
    queue = f"{waiting} messages are in the queue, the oldest for {age:.0f} s"
    return Fact(code=FactCode.RESULT_QUEUED, text=f"its step result waits for an orchestrator: {queue}")


_FACTS_BY_STATE: dict[str, Callable[[Cause, Explained], list[Fact]]] = {
    TaskRowState.WAITING: _waiting_facts,
    TaskRowState.PENDING: _pending_facts,
    TaskRowState.RUNNING: _running_facts,
}
