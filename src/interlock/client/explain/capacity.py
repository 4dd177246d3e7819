"""Explains whether live workers and limits have room for a task: who serves it, who holds what, since when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.client.explain.explanation import (
    Evidence,
    Fact,
    FactCode,
    format_moment,
    holder_evidence,
    list_names,
    shell_command,
    worker_command,
)
from interlock.lifecycle import SupervisedWorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from interlock.store.workers import LiveProcess


def worker_facts(
    namespace: str, type_: str | None, processes: Sequence[LiveProcess], running: Mapping[str, int]
) -> list[Fact]:
    """Describe the workers that could claim a task of this namespace and type; without a type, of any."""
    workers = [process for process in processes if process.role == "worker"]
    serving = [process for process in workers if namespace in process.namespaces]
    if not serving:
        return [_no_worker(namespace, type_, workers)]
    able = [process for process in serving if type_ is None or type_ in process.types]
    if not able and type_ is not None:
        return [_no_handler(namespace, type_, serving)]
    return [_capable_workers(namespace, able, running)]


def _capable_workers(namespace: str, able: Sequence[LiveProcess], running: Mapping[str, int]) -> Fact:
    """Describe the workers that serve the namespace and have the handler: paused, with a free slot, or busy."""
    active = [process for process in able if process.status == SupervisedWorkerState.RUNNING]
    if not active:
        return Fact(
            code=FactCode.WORKERS_PAUSED,
            text=f"the workers that could run it are paused: {list_names([process.id for process in able])}",
            evidence=_workers(able),
            remedy="resume one of them",
            command=shell_command("workers", "resume", able[0].id),
        )
    free = [process.id for process in active if running.get(process.id, 0) < (process.slots or 1)]
    if free:
        text = f"it is about to be claimed: {list_names(free)} could run it, and has a free slot"
        return Fact(code=FactCode.ABOUT_TO_BE_CLAIMED, text=text, evidence=_workers(active))
    busy = [f"{process.id} holds {running[process.id]}{_of_slots(process)}" for process in active]
    return Fact(
        code=FactCode.WORKERS_BUSY,
        text=f"it waits for its turn at a worker: {list_names(busy)}",
        evidence=_workers(active),
        remedy="a task of them ends, or another worker starts",
        command=worker_command(namespace),
    )


def _of_slots(process: LiveProcess) -> str:
    return "" if process.slots is None else f" of {process.slots}"


def _workers(processes: Iterable[LiveProcess]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            "worker",
            process.id,
            f"worker {process.id} is {process.status}"
            + ("" if process.heartbeat_at is None else f", last heartbeat at {format_moment(process.heartbeat_at)}"),
        )
        for process in list(processes)[:5]
    )


def _no_worker(namespace: str, type_: str | None, workers: Sequence[LiveProcess]) -> Fact:
    others = list_names([f"{process.id} serves {list_names(process.namespaces)}" for process in workers])
    text = f"no live worker serves namespace {namespace!r}; {others if workers else 'none is live'}"
    skilled = [
        process
        for process in workers
        if process.status == SupervisedWorkerState.RUNNING and type_ is not None and type_ in process.types
    ]
    if skilled:
        remedy = f"{skilled[0].id} has the handler {type_}, and can serve the namespace too"
        command = shell_command("workers", "subscribe", skilled[0].id, namespace)
    else:
        remedy, command = "start a worker that serves it", worker_command(namespace)
    return Fact(
        code=FactCode.NO_WORKER, text=text, evidence=_workers(skilled or workers), remedy=remedy, command=command
    )


def _no_handler(namespace: str, type_: str, serving: Sequence[LiveProcess]) -> Fact:
    have = [f"{process.id} has {list_names(_by_similarity(process.types, type_))}" for process in serving]
    return Fact(
        code=FactCode.NO_HANDLER,
        text=f"no live worker has the handler {type_}; {list_names(have, '; ')}",
        evidence=_workers(serving),
        remedy="start a worker whose app defines it, of the version that the name contains for a step",
        command=worker_command(namespace),
    )


def _by_similarity(types: Iterable[str], wanted: str) -> list[str]:
    """Sort types by similarity to the missing one; usually another version of its workflow comes first."""
    family, name = wanted.partition("/")[0], wanted.rpartition("/")[2]
    return sorted(types, key=lambda type_: (type_.partition("/")[0] != family, type_.rpartition("/")[2] != name, type_))


def limit_facts(limit: Mapping[str, Any]) -> list[Fact]:
    """Describe the use of one limit key: those of its bounds that are reached first."""
    key, rule = limit["key"], limit["rule"]
    if rule is None:
        text = f"there is no limit {key} any more: the leading worker lets it go on"
        return [Fact(code=FactCode.LIMIT_UNDECLARED, text=text)]
    name = f"limit {key}" if rule == key else f"limit {key} (rule {rule})"
    facts = _concurrency_facts(limit, name) + _window_facts(limit, name)
    facts.sort(key=lambda fact: fact.code == FactCode.LIMIT_HAS_ROOM)
    return facts or [Fact(code=FactCode.LIMIT_HAS_ROOM, text=f"{name} has no bound")]


def _concurrency_facts(limit: Mapping[str, Any], name: str) -> list[Fact]:
    most, taken = limit["max_running"], limit["running"]
    if most is None:
        return []
    waiting = f", {limit['admitted']} of them admitted and not started yet" if limit.get("admitted") else ""
    text = f"{name}: {taken} of {most} are pending or running{waiting}"
    evidence = tuple(holder_evidence(holder) for holder in limit.get("holders") or ())
    if taken < most:
        return [Fact(code=FactCode.LIMIT_HAS_ROOM, text=text, evidence=evidence)]
    return [
        Fact(
            code=FactCode.LIMIT_FULL,
            text=text,
            evidence=evidence,
            remedy="one of these tasks ends, or the limit is raised",
            command=_raise(limit, max_running=most + 1),
        )
    ]


def _window_facts(limit: Mapping[str, Any], name: str) -> list[Fact]:
    if limit["period"] is None:
        return []
    window = f"in the last {_number(limit['period'])} s"
    next_at = limit["next_at"]
    opens = None if next_at is None else f"it has room again at {format_moment(next_at)}"
    facts = []
    for bound, used, text in (
        ("max_starts", "starts", "{used} of {most} {window} were started"),
        ("max_weight", "weight", "a weight of {used} of {most} {window} was used"),
        ("max_cost", "cost", "a cost of {used} of {most} {window} was spent"),
    ):
        most = limit[bound]
        if most is None:
            continue
        amount = limit[used] or 0
        is_used_up = (next_at is not None and amount >= most) or (bound == "max_weight" and next_at is not None)
        facts.append(
            Fact(
                code=FactCode.LIMIT_USED_UP if is_used_up else FactCode.LIMIT_HAS_ROOM,
                text=f"{name}: {text.format(used=_number(amount), most=_number(most), window=window)}",
                remedy=opens if is_used_up else None,
                command=_raise(limit, **{bound: most + 1}) if is_used_up else None,
            )
        )
    return facts


def _raise(limit: Mapping[str, Any], **changed: float) -> str:
    """Return the command that replaces a rule by one with a higher bound; it names the bounds that stay, too."""
    words: list[object] = ["limits", "set", limit["rule"]]
    for bound in ("max_running", "max_starts", "max_weight", "max_cost", "period", "share"):
        value = changed.get(bound, limit[bound])
        if value is not None and not (bound == "share" and value == 1):
            words += [f"--{bound.replace('_', '-')}", _number(value)]
    return shell_command(*words)


def _number(value: float) -> str:
    """Write a number as the command line reads it: without an exponent, and a whole one without a fraction."""
    return f"{value:f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def is_used_up(limit: Mapping[str, Any]) -> bool:
    """Tell whether a limit per period has no token for another start now."""
    return limit["next_at"] is not None


def until_heartbeat(heartbeat_at: datetime | None, seen_until: datetime | None, now: datetime) -> str:
    """Describe the last heartbeat of a process: facts only, because a process that died lately still counts as live."""
    if heartbeat_at is None:
        return "has sent no heartbeat"
    age = max((now - heartbeat_at).total_seconds(), 0.0)
    said = f"sent its last heartbeat at {format_moment(heartbeat_at)}, {age:.1f} s before this answer"
    if seen_until is None or seen_until <= now:
        return f"{said}, and counts as gone"
    return f"{said}; without another one it counts as gone at {format_moment(seen_until)}"
