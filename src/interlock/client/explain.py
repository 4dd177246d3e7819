"""Explains the state of a task or a job in sentences: since when, why it is not moving, what it waits for.

Invariant: every sentence states a fact that the database held at one moment; nothing is guessed, and contradictory rows
are reported as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from interlock.client.job_handle import as_job_id
from interlock.errors import UnknownTaskError
from interlock.lifecycle import JOB, TASK_ROW, JobState, SupervisedWorkerState, TaskRowState
from interlock.store.explain import read_explanation
from interlock.store.tasks import MAX_CRASHES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.store.explain import Cause, Explained
    from interlock.store.workers import LiveProcess


# in these states, a requested cancellation may not have taken effect yet
MAX_NAMES = 5  # in a sentence; further ones are only counted
# values of `held_by` that mean that other tasks or jobs must end first
HELD_BY_OTHERS = frozenset({"dependency", "parts", "worker_count", "compensation", "job", "start"})


def waiting_facts(cause: Cause, seen: Explained) -> list[str]:
    """Describe what a waiting task waits for: the stored reason, and its current details."""
    row = cause.row
    facts = [row["reason"] or "it waits; no reason is stored"]
    if row["held_by"] == "limit":
        facts += _limit_facts(row)
    elif row["held_by"] == "namespace":
        facts += _pause_facts(row)
    elif row["held_by"] in {"signal", "sleep"}:
        facts += _wait_facts(row, seen)
    elif row["held_by"] in HELD_BY_OTHERS:
        facts += _upstream_facts(cause)
    return facts


def _upstream_facts(cause: Cause) -> list[str]:
    row = cause.row
    facts = []
    if row["held_by"] == "parts":
        facts.append(f"{row['unresolved']} of its parts have not ended")
    if row["ending"] is not None:
        facts.append(f"its job becomes {row['ending']}, and releases nothing more")
    if not cause.causes and not cause.shared and not cause.more:
        facts.append("nothing that it waits for is open any more: it should be released, or a step result was lost")
    return facts


def _limit_facts(row: dict[str, Any]) -> list[str]:
    """Describe the use of each limit of a task."""
    return [fact for limit in row["limits"] or () for fact in _use_of_limit(limit)]


def _use_of_limit(limit: dict[str, Any]) -> list[str]:
    key, rule = limit["key"], limit["rule"]
    if rule is None:
        return [f"there is no limit {key} any more: the leading worker lets it go on"]
    name = f"limit {key}" if rule == key else f"limit {key} (rule {rule})"
    facts = []
    if limit["admitted"] and (limit["max_running"] is not None or limit["period"] is not None):
        facts.append(f"{name}: {limit['admitted']} admitted and not started yet")
    if limit["max_running"] is not None:
        facts.append(f"{name}: {limit['running']} of {limit['max_running']} are pending or running")
    if limit["period"] is None:
        return facts or [f"{name} has no bound"]
    window = f"in the last {limit['period']:g} s"
    if limit["max_starts"] is not None:
        facts.append(f"{name}: {limit['starts']} of {limit['max_starts']} {window} were started")
    if limit["max_weight"] is not None:
        facts.append(f"{name}: a weight of {limit['weight']:g} of {limit['max_weight']:g} {window} was used")
    if limit["max_cost"] is not None:
        facts.append(f"{name}: a cost of {limit['cost']:g} of {limit['max_cost']:g} {window} was spent")
    if limit["next_at"] is not None:
        facts.append(f"{name}: it has room again at {at(datetime.fromisoformat(limit['next_at']))}")
    return facts


def _pause_facts(row: dict[str, Any]) -> list[str]:
    if row["paused_at"] is None:
        return [f"namespace {row['namespace']} is not paused any more: the leading worker lets it go on"]
    resume = f"`interlock namespaces resume {row['namespace']}`"
    return [f"it was paused at {at(row['paused_at'])} by {row['paused_by']}; {resume} lets its tasks go on"]


def _wait_facts(row: dict[str, Any], seen: Explained) -> list[str]:
    """Describe the time at which the wait for a signal fails, or a sleep that an orchestrator has not ended yet."""
    until = row["wait_until"]
    if until is None:
        return []
    if row["held_by"] == "sleep":
        return [f"its sleep was over at {at(until)}: an orchestrator completes it"] if until <= seen.now else []
    if until <= seen.now:
        return [f"its timeout was at {at(until)}: an orchestrator fails it"]
    return [f"it fails if no signal has arrived by {at(until)}"]


def pending_facts(row: dict[str, Any], seen: Explained) -> list[str]:
    """Describe why a pending task is not claimed."""
    if row["run_at"] > seen.now:
        return [f"it is not due before {at(row['run_at'])}"]
    reached = [limit for limit in row["limits"] or () if limit["next_at"] is not None]
    if reached:
        return [fact for limit in reached for fact in _use_of_limit(limit)]
    facts = []
    if row["crashes"]:
        facts.append(f"{_suspicion(row)}: it waits for a worker that runs nothing else")
    workers = [process for process in seen.processes if process.role == "worker"]
    serving = [process for process in workers if row["namespace"] in process.namespaces]
    if not serving:
        return [*facts, f"no live worker serves namespace {row['namespace']!r}; {_other_workers(workers)}"]
    return [*facts, _able_workers(serving, row["type"], seen)]


def _suspicion(row: dict[str, Any]) -> str:
    return f"it is suspected of killing its worker ({row['crashes']} of {MAX_CRASHES} crashes)"


def _able_workers(serving: Sequence[LiveProcess], wanted: str, seen: Explained) -> str:
    able = [process for process in serving if wanted in process.types]
    if able:
        return _busy_workers(able, seen)
    have = [f"{process.id} has {_list_names(_by_similarity(process.types, wanted))}" for process in serving]
    return f"no live worker has the handler {wanted}; {_list_names(have, '; ')}"


def _other_workers(workers: Sequence[LiveProcess]) -> str:
    if not workers:
        return "none is live"
    return _list_names([f"{process.id} serves {_list_names(process.namespaces)}" for process in workers])


def _busy_workers(able: Sequence[LiveProcess], seen: Explained) -> str:
    """Describe the workers that could claim a task."""
    active = [process.id for process in able if process.status == SupervisedWorkerState.RUNNING]
    if not active:
        return f"the workers that could run it are paused: {_list_names([process.id for process in able])}"
    idle = [id_ for id_ in active if id_ not in seen.running]
    if idle:
        return f"it is about to be claimed: {_list_names(idle)} could run it, and runs nothing else"
    return f"it waits for its turn at a worker: {_list_names([f'{id_} runs {seen.running[id_]}' for id_ in active])}"


def running_facts(row: dict[str, Any], seen: Explained) -> list[str]:
    """Describe the worker and the lease of a running task, and what happens if the worker is gone."""
    facts = [f"{row['worker_id']} runs attempt {row['attempt']}, try {row['tries']} of {row['max_tries']}"]
    lease, seen_until = row["lease_expires_at"], row["worker_seen_until"]
    then = "it is put back, and runs alone"
    if row["crashes"]:
        facts.append(f"{_suspicion(row)}: it runs alone")
    if row["crashes"] + 1 >= MAX_CRASHES:
        then = f"it ends in error, because it has lost {MAX_CRASHES} workers in a row"
    if lease <= seen.now:
        facts.append(f"its lease ran out at {at(lease)}; when a live worker recovers it, {then}")
        if not any(process.role == "worker" for process in seen.processes):
            facts.append("no worker is live: start one")
    elif seen_until is not None and seen_until > seen.now:
        facts.append(f"its worker is live, and renews its lease, which lasts until {at(lease)}")
    else:
        facts.append(
            f"its worker {_last_heartbeat(row)}; if it is gone, the lease runs out at {at(lease)}, and then {then}"
        )
    return facts


def _last_heartbeat(row: dict[str, Any]) -> str:
    heartbeat_at = row["heartbeat_at"]
    return "has sent no heartbeat" if heartbeat_at is None else f"sent its last heartbeat at {at(heartbeat_at)}"


def _unprocessed_facts(row: dict[str, Any], seen: Explained) -> list[str]:
    """Describe why an orchestrator has not processed the end of a step."""
    if row["dead_letter_at"] is not None:
        dead = f"its step result became a dead letter at {at(row['dead_letter_at'])}: {row['dead_letter_error']}"
        return [dead, f"when the cause is gone, `interlock jobs replay {row['job_id']}` sends it again at once"]
    waiting, age = seen.queue["waiting"], seen.queue["oldest_age"]
    if not waiting:
        replay = f"`interlock jobs replay {row['job_id']}`"
        return [f"its step result is not in the queue: an orchestrator sends it again, {replay} does so at once"]
    queue = f"{waiting} messages are in the queue, the oldest for {age:.0f} s"
    return [f"its step result waits for an orchestrator: {queue}"]


def ended_facts(row: dict[str, Any], seen: Explained) -> list[str]:
    """Describe how and why a task ended."""
    facts = [row["reason"]] if row["reason"] else []
    if row["error"] and row["state"] != TaskRowState.DONE:
        error = ": ".join(str(row["error"][part]) for part in ("type", "message") if row["error"].get(part))
        facts += [error] if error not in facts else []
    return facts + (_unprocessed_facts(row, seen) if row["unprocessed"] else [])


def _by_similarity(types: Iterable[str], wanted: str) -> list[str]:
    """Sort types by similarity to the missing one; usually another version of its workflow comes first."""
    family, name = wanted.partition("/")[0], wanted.rpartition("/")[2]
    return sorted(types, key=lambda type_: (type_.partition("/")[0] != family, type_.rpartition("/")[2] != name, type_))


def _list_names(names: Sequence[str], between: str = ", ") -> str:
    rest = len(names) - MAX_NAMES
    return between.join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "") or "none"


def at(moment: datetime) -> str:
    """Format a time for a sentence."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


MORE = "there are more causes than are listed here"
WAITS = {
    "dependency": "other steps",
    "parts": "their parts",
    "worker_count": "their turn",
    "compensation": "the compensations before them",
    "job": "a child job",
    "signal": "a signal",
    "sleep": "a time",
    "namespace": "a paused namespace",
    "limit": "a limit",
    "start": "the job to start",
}
SHARED = "its causes are listed elsewhere in this answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The state of a task or a job and its reasons; `causes` block it, each by way of the steps in `through`."""

    kind: str
    id: UUID
    name: str
    state: str
    since: datetime
    facts: tuple[str, ...]
    through: tuple[str, ...]
    causes: tuple[Explanation, ...]


async def explain(app: Interlock, id_: UUID | str) -> Explanation:
    """Explain the state of the task or job with this id."""
    wanted = as_job_id(id_)
    async with app.connection() as connection:
        found = await read_explanation(connection, wanted, now=app.now())
    if found is None:
        raise UnknownTaskError(f"there is no task and no job {wanted}: not stored, not committed yet, or pruned")
    return _explained(found.root, found, is_root=True)


def _explained(cause: Cause, seen: Explained, *, is_root: bool = False) -> Explanation:
    row = cause.row
    is_job = cause.kind == "job"
    facts = (_job_facts if is_job else _task_facts)(cause, seen, is_root=is_root)
    if cause.shared and not cause.causes:
        facts.append(SHARED)
    if cause.more:
        facts.append(MORE)
    return Explanation(
        kind="step" if row.get("step") else cause.kind,
        id=row["id"],
        name=_name(row, is_job=is_job),
        state=row["status"] if is_job else row["state"],
        since=row["since"],
        facts=tuple(facts),
        through=cause.through,
        causes=tuple(_explained(behind, seen) for behind in cause.causes),
    )


def _name(row: dict[str, Any], *, is_job: bool) -> str:
    if is_job:
        return f"{row['workflow']} {row['version']}" if row["workflow"] else str(row["id"])
    return str(row["step"] or row["type"])


def _task_facts(cause: Cause, seen: Explained, *, is_root: bool) -> list[str]:
    row = cause.row
    facts = _job_of_step(row) if is_root else []
    if row["cancel_requested_at"] is not None and row["state"] in TASK_ROW.unfinished:
        facts.append(f"its cancellation was asked for at {at(row['cancel_requested_at'])}")
    if row["state"] == TaskRowState.WAITING:
        return facts + waiting_facts(cause, seen)
    if row["state"] == TaskRowState.PENDING:
        return facts + pending_facts(row, seen)
    if row["state"] == TaskRowState.RUNNING:
        return facts + running_facts(row, seen)
    return facts + ended_facts(row, seen) + (_moves(seen) if is_root else [])


def _job_of_step(row: dict[str, Any]) -> list[str]:
    if row["job_id"] is None:
        return []
    reason = f": {row['job_reason']}" if row["job_reason"] else ""
    return [f"it is a step of job {row['job_id']}, which is {row['job_status']}{reason}"]


def _job_facts(cause: Cause, seen: Explained, *, is_root: bool) -> list[str]:
    row = cause.row
    if row["status"] in JOB.final:
        facts = [str(row["reason"])] if row["reason"] else []
        return facts + (_moves(seen) if is_root else [])
    facts = (
        _start_facts(row, seen) if row["status"] != JobState.RUNNING else _progress_facts(cause, seen, is_root=is_root)
    )
    if row["deadline_at"] is not None and row["ending"] is None:
        facts.append(f"it is canceled if it has not ended at {at(row['deadline_at'])}")
    elif row["deadline_at"] is not None and _waits_for_children(row):
        facts.append(f"its child jobs are canceled if they have not ended at {at(row['deadline_at'])}")
    return facts


def _start_facts(row: dict[str, Any], seen: Explained) -> list[str]:
    """Describe why a job has not started, by the current state and not that of the submit."""
    unserved = row["unserved"]
    if row["is_debounced"]:
        return [f"it {row['reason']}"]
    if row["key_hold"] is not None:
        return [f"it {row['key_hold']}", *_no_orchestrator(seen)]
    if unserved:
        word = "namespaces" if len(unserved) > 1 else "namespace"
        return [f"no live worker serves {word} {', '.join(map(repr, unserved))}: start one that does"]
    return ["live workers serve its first steps: it starts when an orchestrator looks next", *_no_orchestrator(seen)]


def _progress_facts(cause: Cause, seen: Explained, *, is_root: bool) -> list[str]:
    """Describe the progress of a running job."""
    row = cause.row
    facts = []
    if row["compensating"]:
        facts.append(f"it compensates, and becomes {row['ending']} then: {row['ending_reason']}")
    elif row["unfinished_child"] is not None:
        facts += _ending_with_children(row)
    elif row["ending"] is not None:
        facts.append(f"it becomes {row['ending']} once its last step has stopped: {row['ending_reason']}")
    facts.append(f"{_count_open_steps(seen) if is_root else row['open_steps']} of its steps are open")
    if row["dead_letters"]:
        latest = f"the latest at {at(row['dead_letter_at'])}: {row['dead_letter_error']}"
        facts.append(f"{row['dead_letters']} of its step results became dead letters, {latest}")
        facts.append(f"when the cause is gone, `interlock jobs replay {row['id']}` sends them again at once")
    if not cause.causes and not cause.shared and row["unfinished_child"] is None:
        facts.append("none of its steps is active, and it has not ended: a step result was lost")
    return facts + _no_orchestrator(seen)


def _waits_for_children(row: dict[str, Any]) -> bool:
    """Tell whether a job has failed and waits for child jobs that are not being canceled."""
    return row["ending"] == JobState.FAILED and row["unfinished_child"] is not None and row["cancel_reason"] is None


def _ending_with_children(row: dict[str, Any]) -> list[str]:
    child = row["unfinished_child"]
    facts = [f"it becomes {row['ending']} once its steps and its child job {child} have ended: {row['ending_reason']}"]
    if _waits_for_children(row):
        facts.append(f"`interlock jobs cancel {row['id']}` cancels its child jobs; it becomes FAILED then")
    elif row["cancel_reason"] is not None:
        facts.append(f"its child jobs are being canceled: {row['cancel_reason']}")
    return facts


def _count_open_steps(seen: Explained) -> str:
    """Count the open steps of the job by what they wait for."""
    parts = [f"{counted['steps']} {_described(counted['state'], counted['held_by'])}" for counted in seen.steps]
    return f"{sum(counted['steps'] for counted in seen.steps)} ({', '.join(parts)})" if parts else "0"


def _described(state: str, held_by: str | None) -> str:
    if state == "unprocessed":
        return "ended, but not processed by an orchestrator"
    if state != TaskRowState.WAITING or held_by is None:
        return state
    return f"waiting for {WAITS.get(held_by, held_by)}"


def _no_orchestrator(seen: Explained) -> list[str]:
    if any(
        process.role == "orchestrator" and process.status == SupervisedWorkerState.RUNNING for process in seen.processes
    ):
        return []
    return ["no orchestrator is live, and without one no job goes on: run `interlock orchestrator`"]


def _moves(seen: Explained) -> list[str]:
    return [
        f"{at(move['recorded_at'])} {move['from_state'] or ''} -{move['event']}-> {move['to_state']} by {move['actor']}"
        + (f": {move['reason']}" if move["reason"] else "")
        for move in seen.moves
    ]
