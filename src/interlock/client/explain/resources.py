"""Explains workers, namespaces, schedules and limits: their state, what they hold up, and what to do."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from interlock.client.explain.capacity import limit_facts, until_heartbeat, worker_facts
from interlock.client.explain.explanation import (
    Evidence,
    Explanation,
    Fact,
    FactCode,
    format_moment,
    holder_evidence,
    list_names,
    move_evidence,
    shell_command,
)
from interlock.errors import UnknownLimitError, UnknownScheduleError
from interlock.lifecycle import SUPERVISED_WORKER, SupervisedWorkerState, TaskRowState
from interlock.store.explain import (
    MAX_EVIDENCE,
    count_due_types,
    count_running_by_worker,
    read_explained_namespace,
    read_schedule_outcome,
    read_tasks_of_worker,
)
from interlock.store.leader import read_clock, read_leader
from interlock.store.limit_overrides import read_limit_holders
from interlock.store.schedules import read_schedules, tick_request_id
from interlock.store.stats import list_limits
from interlock.store.workers import list_live_workers, read_last_worker_move, read_worker

if TYPE_CHECKING:
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.store.schedules import ScheduleState
    from interlock.store.stats import LimitUse

OVERDUE_AFTER = timedelta(seconds=60)  # a tick that is fired later counts as missed


# --- workers ----------------------------------------------------------------------------------------------------


async def explain_worker(connection: Connection, worker_id: str, *, now: datetime | None = None) -> Explanation:
    """Explain a worker: its last move, heartbeat, process and tasks."""
    row = await read_worker(connection, worker_id)
    worker_id = row["id"]  # of the row: tasks name the instance of a process
    last = await read_last_worker_move(connection, worker_id)
    moment = await read_clock(connection, now=now)
    held = await read_tasks_of_worker(connection, [worker_id, row["instance"] or worker_id])
    facts = [_worker_state(row, last), _worker_heartbeat(row, moment)]
    if row["process_note"]:
        restart = f"; it is started again at {format_moment(row['restart_at'])}" if row["restart_at"] else ""
        facts.append(Fact(code=FactCode.PROCESS, text=f"{row['process_note']}{restart}"))
    if held:
        served = f"it runs {held[0]['all_tasks']} tasks" if held[0]["all_tasks"] > 1 else "it runs 1 task"
        facts.append(
            Fact(code=FactCode.TASKS_IN_HAND, text=served, evidence=tuple(holder_evidence(task) for task in held))
        )
    elif row["live"] and row["status"] == SupervisedWorkerState.RUNNING:
        facts.insert(0, await _idle_worker(connection, row, now=now))
    facts.sort(key=lambda fact: fact.code != FactCode.NO_HEARTBEAT)
    return Explanation(
        kind="worker",
        id=worker_id,
        name=worker_id,
        state=row["status"],
        since=row["created_at"] if last is None else last["recorded_at"],
        facts=tuple(facts),
    )


async def _idle_worker(connection: Connection, row: dict[str, Any], *, now: datetime | None) -> Fact:
    """Describe why a worker runs nothing: nothing is due in its namespaces, or only types that it lacks."""
    if not row["namespaces"]:
        return Fact(code=FactCode.IDLE, text="it claims no tasks")
    due = [found for name in row["namespaces"] for found in await count_due_types(connection, name, now=now)]
    missing = [found["type"] for found in due if found["type"] not in row["types"]]
    if due and len(missing) == len(due):
        text = f"it runs nothing: the due tasks of its namespaces have types that it lacks: {list_names(missing)}"
        return Fact(code=FactCode.NO_HANDLER, text=text, remedy="start a worker whose app defines them")
    if due:
        return Fact(code=FactCode.BACKLOG, text="tasks that it can run are due: it claims them next")
    return Fact(code=FactCode.IDLE, text="it runs nothing, and nothing is due in its namespaces")


def _worker_state(row: dict[str, Any], last: dict[str, Any] | None) -> Fact:
    status = row["status"]
    said = f"it is {status}; no move of it is recorded"
    if last is not None:
        said = f"{last['event']} by {last['actor']}" + (f": {last['reason']}" if last["reason"] else "")
    evidence = () if last is None else move_evidence([{**last, "id": last["id"]}])
    if status == SupervisedWorkerState.PAUSED:
        return Fact(
            code=FactCode.WORKERS_PAUSED,
            text=said,
            evidence=evidence,
            remedy="it finishes its tasks and claims nothing new until it is resumed",
            command=shell_command("workers", "resume", row["id"]),
        )
    if status == SupervisedWorkerState.IDLE:
        remedy = f"it claims nothing before it is started: POST /api/workers/{row['id']}/start"
        return Fact(code=FactCode.NOT_STARTED, text=said, evidence=evidence, remedy=remedy)
    if status in SUPERVISED_WORKER.final:
        return Fact(code=FactCode.WORKER_ENDED, text=said, evidence=evidence, remedy="an ended worker stays ended")
    return Fact(code=FactCode.RUNNING, text=said, evidence=evidence)


def _worker_heartbeat(row: dict[str, Any], now: datetime) -> Fact:
    said = until_heartbeat(row["heartbeat_at"], row["seen_until"], now)
    is_open = row["status"] not in SUPERVISED_WORKER.final
    if row["live"] or not is_open:
        return Fact(code=FactCode.HEARTBEAT, text=f"its process {said}", since=row["heartbeat_at"])
    is_supervised = "spec" in row["metadata"]
    return Fact(
        code=FactCode.NO_HEARTBEAT,
        text=f"its process {said}",
        since=row["seen_until"],
        remedy=(
            "its supervisor starts a process for it: is one running?"
            if is_supervised
            else "its process is gone or cannot reach the database; its tasks are recovered when their leases run out"
        ),
        command=shell_command("supervisor") if is_supervised else shell_command("workers", "terminate", row["id"]),
    )


# --- namespaces -------------------------------------------------------------------------------------------------


async def explain_namespace(connection: Connection, name: str, *, now: datetime | None = None) -> Explanation:
    """Explain a namespace: whether it is paused, what is due in it, and who serves it."""
    row = await read_explained_namespace(connection, name, now=now)
    processes = await list_live_workers(connection, now=now)
    running = await count_running_by_worker(connection)
    types = await count_due_types(connection, name, now=now)
    facts = []
    if row["paused_at"] is not None:
        why = f": {row['reason']}" if row["reason"] else ""
        facts.append(
            Fact(
                code=FactCode.NAMESPACE_PAUSED,
                text=f"it was paused at {format_moment(row['paused_at'])} by {row['paused_by']}{why}",
                since=row["paused_at"],
                remedy=f"{row['held']} of its tasks wait for that; resume it",
                command=shell_command("namespaces", "resume", name),
            )
        )
    served = worker_facts(name, None, processes, running)
    facts += [fact for fact in served if fact.code in {FactCode.NO_WORKER, FactCode.WORKERS_PAUSED}]
    if not facts:
        for due in types:
            missing = worker_facts(name, due["type"], processes, running)
            facts += [fact for fact in missing if fact.code == FactCode.NO_HANDLER]
    if not facts and types:
        facts += [fact for fact in served if fact.code == FactCode.WORKERS_BUSY]
    facts.append(_backlog(row, types))
    state = "paused" if row["paused_at"] is not None else "active"
    return Explanation(kind="namespace", id=name, name=name, state=state, since=row["paused_at"], facts=tuple(facts))


def _backlog(row: dict[str, Any], types: list[dict[str, Any]]) -> Fact:
    counts = {
        "due": row["due"],
        "for later": row["later"],
        "running": row["running"],
        "held by its pause": row["held"],
        "waiting for a limit": row["limited"],
    }
    parts = [f"{count} {what}" for what, count in counts.items() if count]
    if not parts:
        return Fact(code=FactCode.IDLE, text="it has no tasks that are due, running or held")
    evidence = tuple(
        Evidence(
            "type",
            due["type"],
            f"{due['tasks']} of type {due['type']}, due since {format_moment(due['oldest_due_at'])}",
        )
        for due in types[:MAX_EVIDENCE]
    )
    return Fact(
        code=FactCode.BACKLOG, text=f"its tasks: {', '.join(parts)}", since=row["oldest_due_at"], evidence=evidence
    )


# --- schedules --------------------------------------------------------------------------------------------------


async def explain_schedule(connection: Connection, name: str, *, now: datetime | None = None) -> Explanation:
    """Explain a schedule: its pause, its last error, its last and next tick, and who fires it."""
    found = await read_schedules(connection, [name])
    if not found:
        raise UnknownScheduleError(f"there is no schedule {name!r}; `interlock schedules list` shows them")
    (schedule,) = found
    moment = await read_clock(connection, now=now)
    facts: list[Fact] = []
    if schedule.error:
        facts.append(
            Fact(
                code=FactCode.SCHEDULE_FAILED,
                text=f"its latest tick failed: {schedule.error}",
                remedy="when the cause is gone, fire it once now",
                command=shell_command("schedules", "run", name),
            )
        )
    if schedule.paused_at is not None:
        who = (schedule.paused or "").removeprefix("paused")
        facts.append(
            Fact(
                code=FactCode.SCHEDULE_PAUSED,
                text=f"it was paused at {format_moment(schedule.paused_at)}{who}",
                since=schedule.paused_at,
                remedy="resume it: it fires from its next tick on",
                command=shell_command("schedules", "resume", name),
            )
        )
    else:
        facts += await _next_tick(connection, schedule, moment, now)
    facts += await _last_tick(connection, schedule)
    state = "paused" if schedule.paused_at is not None else "failing" if schedule.error else "active"
    return Explanation(kind="schedule", id=name, name=name, state=state, since=schedule.paused_at, facts=tuple(facts))


async def _next_tick(
    connection: Connection, schedule: ScheduleState, moment: datetime, now: datetime | None
) -> list[Fact]:
    following = format_moment(schedule.next_at)
    if schedule.next_at > moment - OVERDUE_AFTER:
        evidence = () if schedule.resumed is None else (Evidence("move", "", f"it was {schedule.resumed}"),)
        return [Fact(code=FactCode.NEXT_TICK, text=f"its next tick is at {following}", evidence=evidence)]
    overdue = Fact(code=FactCode.SCHEDULE_OVERDUE, text=f"its tick of {following} is overdue", since=schedule.next_at)
    if await read_leader(connection, now=now) is not None:
        return [overdue]
    no_leader = Fact(
        code=FactCode.NO_LEADER,
        text="no worker leads, and only the leading worker fires schedules",
        remedy="start a worker",
        command=shell_command("worker", "--app", "PACKAGE.MODULE:APP"),
    )
    return [no_leader, overdue]


async def _last_tick(connection: Connection, schedule: ScheduleState) -> list[Fact]:
    if schedule.last_at is None:
        return [Fact(code=FactCode.LAST_TICK, text="it has not fired yet")]
    made = await read_schedule_outcome(connection, tick_request_id(schedule.name, schedule.last_at))
    evidence = tuple(
        Evidence(row["kind"], str(row["id"]), f"{row['kind']} {row['id']} is {row['state']}") for row in made
    )
    text = f"its last tick was at {format_moment(schedule.last_at)}"
    return [Fact(code=FactCode.LAST_TICK, text=text, since=schedule.last_at, evidence=evidence)]


# --- limits -----------------------------------------------------------------------------------------------------


async def explain_limit(connection: Connection, key: str, *, now: datetime | None = None) -> Explanation:
    """Explain a limit: its bounds and their use, the tasks that hold it and those that wait; of a pattern, its keys."""
    used = _find_uses(await list_limits(connection, now=now), key)
    facts: list[Fact] = []
    waiting = 0
    for use in used[:MAX_EVIDENCE] if len(used) > 1 else used:
        if use.key == key and len(used) > 1 and key.endswith("*"):
            continue  # the pattern itself has no counters
        holders = [each._asdict() for each in await read_limit_holders(connection, use.key, limit=MAX_EVIDENCE)]
        waiting += use.waiting
        facts += limit_facts(_as_document(use, holders))
        if use.waiting:
            facts.append(Fact(code=FactCode.BACKLOG, text=f"limit {use.key}: {_tasks_wait(use.waiting)} for it"))
    facts.sort(key=lambda fact: fact.code in {FactCode.LIMIT_HAS_ROOM, FactCode.BACKLOG})
    is_full = any(fact.code in {FactCode.LIMIT_FULL, FactCode.LIMIT_USED_UP} for fact in facts)
    state = "full" if is_full else "open"
    if len(used) > MAX_EVIDENCE:
        names = list_names([use.key for use in used[MAX_EVIDENCE:]])
        facts.append(Fact(code=FactCode.MORE_CAUSES, text=f"it has more keys: {names}"))
    return Explanation(kind="limit", id=key, name=key, state=state, since=None, facts=tuple(facts))


def _find_uses(known: list[LimitUse], key: str) -> list[LimitUse]:
    """Return the use of a key, or of all keys of a rule, the one that is asked for first."""
    used = [use for use in known if key in {use.key, use.rule}]
    if not used:  # a key that no task has now may have a pattern
        patterns = [use for use in known if use.key.endswith("*") and key.startswith(use.key[:-1])]
        used = [use._replace(key=key) for use in sorted(patterns, key=lambda use: len(use.key))[-1:]]
    if not used:
        raise UnknownLimitError(f"there is no limit {key!r}; `interlock limits list` shows them")
    return sorted(used, key=lambda use: (use.key != key, -use.waiting, use.key))


def _tasks_wait(count: int) -> str:
    return "1 task waits" if count == 1 else f"{count} tasks wait"


def _as_document(use: LimitUse, holders: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **use._asdict(),
        "running": use.taken,
        "admitted": sum(holder["state"] == TaskRowState.PENDING for holder in holders),
        "holders": holders,
        "period": None if use.period is None else use.period.total_seconds(),
    }


RESOURCES = {
    "worker": explain_worker,
    "namespace": explain_namespace,
    "schedule": explain_schedule,
    "limit": explain_limit,
}
