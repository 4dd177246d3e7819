"""What a task waits for, state by state, in sentences: the words behind `explain`.

Invariant: each function says only what the rows that it is given say; a contradiction in them is told as one.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from interlock.store.explain import Cause, Explained
    from interlock.store.presence import LiveProcess

NAMED = 5  # names in a sentence, before the others are only counted
BEHIND = frozenset({"dependency", "parts", "worker_count", "compensation", "job", "start"})


def waiting_facts(cause: Cause, seen: Explained) -> list[str]:
    """Say what a waiting task waits for: the reason that is stored, and what it comes to at this moment."""
    row = cause.row
    facts = [row["reason"] or "it waits, for no reason that is stored"]
    if row["held_by"] == "limit":
        facts += _limit_facts(row)
    elif row["held_by"] == "namespace":
        facts += _pause_facts(row)
    elif row["held_by"] == "signal":
        facts += _signal_facts(row, seen)
    elif row["held_by"] in BEHIND:
        facts += _behind_facts(cause)
    return facts


def _behind_facts(cause: Cause) -> list[str]:
    row = cause.row
    facts = []
    if row["held_by"] == "parts":
        facts.append(f"{row['unresolved']} of its parts have not come in")
    if row["ending"] is not None:
        facts.append(f"its job becomes {row['ending']}, and releases nothing more")
    if not cause.causes and not cause.shared and not cause.more:
        facts.append("what it waits for is not open any more: it should be released, or the message of it was lost")
    return facts


def _limit_facts(row: dict[str, Any]) -> list[str]:
    if row["max_running"] is None and row["max_starts"] is None:
        return [f"there is no limit {row['limit_key']} any more: the leading worker lets it go on"]
    facts = []
    if row["max_running"] is not None:
        facts.append(f"limit {row['limit_key']}: {row['limit_taken']} of {row['max_running']} are pending or running")
    if row["max_starts"] is not None:
        starts = f"{row['limit_starts']} of {row['max_starts']} in the last {row['period'].total_seconds():g} s"
        facts.append(f"limit {row['limit_key']}: {starts} were started")
    return facts


def _pause_facts(row: dict[str, Any]) -> list[str]:
    if row["paused_at"] is None:
        return [f"namespace {row['namespace']} is not paused any more: the leading worker lets it go on"]
    resume = f"`interlock namespaces resume {row['namespace']}`"
    return [f"it was paused at {at(row['paused_at'])} by {row['paused_by']}; {resume} lets its tasks go on"]


def _signal_facts(row: dict[str, Any], seen: Explained) -> list[str]:
    if row["wait_until"] is None:
        return []
    if row["wait_until"] <= seen.now:
        return [f"its time was over at {at(row['wait_until'])}: an orchestrator fails it"]
    return [f"it fails if nothing has come at {at(row['wait_until'])}"]


def pending_facts(row: dict[str, Any], seen: Explained) -> list[str]:
    """Say why nobody has claimed a task."""
    if row["run_at"] > seen.now:
        return [f"it is not due before {at(row['run_at'])}"]
    workers = [process for process in seen.processes if process.role == "worker"]
    serving = [process for process in workers if row["namespace"] in process.namespaces]
    if not serving:
        return [f"no live worker serves namespace {row['namespace']!r}; {_others(workers)}"]
    return [_taker(serving, row["type"], seen)]


def _taker(serving: Sequence[LiveProcess], wanted: str, seen: Explained) -> str:
    able = [process for process in serving if wanted in process.types]
    if able:
        return _turn(able, seen)
    have = [f"{process.id} has {_some(_likest(process.types, wanted))}" for process in serving]
    return f"no live worker has the handler {wanted}; {_some(have, '; ')}"


def _others(workers: Sequence[LiveProcess]) -> str:
    if not workers:
        return "none is live"
    return _some([f"{process.id} serves {_some(process.namespaces)}" for process in workers])


def _turn(able: Sequence[LiveProcess], seen: Explained) -> str:
    """Say what those do who could claim a task."""
    active = [process.id for process in able if process.status == "RUNNING"]
    if not active:
        return f"those who could run it are paused: {_some([process.id for process in able])}"
    idle = [id_ for id_ in active if id_ not in seen.running]
    if idle:
        return f"it is about to be claimed: {_some(idle)} could run it, and runs nothing else"
    return f"it waits for its turn at a worker: {_some([f'{id_} runs {seen.running[id_]}' for id_ in active])}"


def running_facts(row: dict[str, Any], seen: Explained) -> list[str]:
    """Say who runs a task, and what happens if that worker is gone."""
    facts = [f"{row['worker_id']} runs attempt {row['attempt']}, try {row['tries']} of {row['max_tries']}"]
    lease, seen_until = row["lease_expires_at"], row["worker_seen_until"]
    then = "it is put back" if row["tries"] < row["max_tries"] else "it ends in error, for it was the last try"
    if lease <= seen.now:
        facts.append(f"its lease ran out at {at(lease)}; when a live worker recovers it, {then}")
        if not any(process.role == "worker" for process in seen.processes):
            facts.append("no worker is live: start one")
    elif seen_until is not None and seen_until > seen.now:
        facts.append(f"its worker is live, and renews its lease, which lasts until {at(lease)}")
    else:
        facts.append(f"its worker {_heard(row)}; if it is gone, the lease runs out at {at(lease)}, and then {then}")
    return facts


def _heard(row: dict[str, Any]) -> str:
    heard = row["heartbeat_at"]
    return "never said that it is here" if heard is None else f"was last heard of at {at(heard)}"


def _unheard_facts(row: dict[str, Any], seen: Explained) -> list[str]:
    """Say why the end of a step has led to nothing yet."""
    if row["aside_at"] is not None:
        told = f"the message of its end was set aside at {at(row['aside_at'])}: {row['aside_error']}"
        return [told, f"when the cause is gone, `interlock jobs replay {row['job_id']}` sends it again at once"]
    waiting, age = seen.queue["waiting"], seen.queue["oldest_age"]
    if not waiting:
        replay = f"`interlock jobs replay {row['job_id']}`"
        return [f"the message of its end is not in the queue: an orchestrator sends it again, {replay} does so at once"]
    return [f"its end waits for an orchestrator: {waiting} messages are in the queue, the oldest for {age:.0f} s"]


def ended_facts(row: dict[str, Any], seen: Explained) -> list[str]:
    """Say how a task ended, and why, and what its end leads to."""
    facts = [row["reason"]] if row["reason"] else []
    if row["error"] and row["state"] != "done":
        told = ": ".join(str(row["error"][part]) for part in ("type", "message") if row["error"].get(part))
        facts += [told] if told not in facts else []
    return facts + (_unheard_facts(row, seen) if row["unheard"] else [])


def _likest(types: Iterable[str], wanted: str) -> list[str]:
    """Give the types that are most like the one that is missing first: another version of its workflow, mostly."""
    family, name = wanted.partition("/")[0], wanted.rpartition("/")[2]
    return sorted(types, key=lambda type_: (type_.partition("/")[0] != family, type_.rpartition("/")[2] != name, type_))


def _some(names: Sequence[str], between: str = ", ") -> str:
    rest = len(names) - NAMED
    return between.join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "") or "none"


def at(moment: datetime) -> str:
    """Write a time in a sentence."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
