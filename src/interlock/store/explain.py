"""Reads why a task or a job does not move: the tree of the tasks and jobs that block it, down to the root causes.

Invariant: the functions only read, in one transaction. Each task and job appears once in a tree, and the size of a tree
is bounded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.lifecycle import JOB, JobState, TaskRowState
from interlock.postgres.connection import transaction
from interlock.postgres.query import load_statements, run
from interlock.store.leader import read_clock
from interlock.store.step_results import read_queue_state
from interlock.store.workers import LiveProcess, list_live_workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

EXPLAIN = load_statements("explain")
MAX_CAUSES = 10  # of one task or job
MAX_DEPTH = 16
MAX_NODES = 100  # of one tree
MAX_EVIDENCE = 5  # rows that one fact names
MAX_EXAMINED_TASKS = 1_000  # due tasks whose types are examined
LAST_MOVES = 3


@dataclass(slots=True)
class Cause:
    """A node of the tree: a task or job, the steps between it and the node it blocks (`through`), and its causes."""

    kind: str
    row: dict[str, Any]
    through: tuple[str, ...] = ()
    causes: list[Cause] = field(default_factory=list)
    # some of its causes appear elsewhere in the tree
    shared: bool = False
    # the causes are cut off
    more: bool = False


class CauseLink(NamedTuple):
    """An edge of the tree: the id of a cause that is not read yet."""

    id: UUID
    through: tuple[str, ...] = ()


class Explained(NamedTuple):
    """The tree, and the state of the installation at the same moment."""

    now: datetime
    root: Cause
    processes: list[LiveProcess]
    running: dict[str, int]  # running tasks by worker
    queue: dict[str, Any]
    steps: list[dict[str, Any]]  # of an unfinished job: the number of steps by what they wait for
    moves: list[dict[str, Any]]


async def read_explanation(connection: Connection, id_: UUID, *, now: datetime | None = None) -> Explained | None:
    """Read the tree of a task or a job; None when no task or job has this id."""
    async with transaction(connection):
        found = await _read(connection, [id_], now)
        if not found:
            return None
        root = found[id_]
        await _grow_tree(connection, root, id_, now)
        is_open_job = root.kind == "job" and root.row["status"] not in JOB.final
        return Explained(
            now=await read_clock(connection, now=now),
            root=root,
            processes=await list_live_workers(connection, now=now),
            running=await count_running_by_worker(connection),
            queue=await read_queue(connection),
            steps=await run(connection, EXPLAIN["count_open_steps"], {"job_id": id_}) if is_open_job else [],
            moves=await run(connection, EXPLAIN["read_last_moves"], {"id": id_, "limit": LAST_MOVES}),
        )


async def count_running_by_worker(connection: Connection) -> dict[str, int]:
    """Count the running tasks of each worker, by the name under which it claims and by the id of its row."""
    counts: dict[str, int] = {}
    for row in await run(connection, EXPLAIN["count_running_by_worker"], {}):
        counts[row["worker_id"]] = row["tasks"]
        if row["id"] is not None:
            counts[row["id"]] = row["tasks"]
    return counts


async def read_tasks_of_worker(connection: Connection, names: Sequence[str]) -> list[dict[str, Any]]:
    """Read the first tasks that a worker runs; `all_tasks` is the number of all of them."""
    return await run(connection, EXPLAIN["read_tasks_of_worker"], {"names": list(names), "limit": MAX_EVIDENCE})


async def read_explained_namespace(connection: Connection, name: str, *, now: datetime | None = None) -> dict[str, Any]:
    """Read the pause of a namespace and the numbers of its unfinished tasks."""
    (row,) = await run(connection, EXPLAIN["read_explained_namespace"], {"name": name, "now": now})
    return row


async def count_due_types(connection: Connection, name: str, *, now: datetime | None = None) -> list[dict[str, Any]]:
    """Count the types of the first due tasks of a namespace, the longest wait first."""
    parameters = {"name": name, "limit": MAX_EXAMINED_TASKS, "now": now}
    return await run(connection, EXPLAIN["count_due_types"], parameters)


async def read_kinds_of_name(connection: Connection, name: str) -> list[str]:
    """List the kinds of what has this name: worker, namespace, schedule, limit."""
    return [row["kind"] for row in await run(connection, EXPLAIN["read_kinds_of_name"], {"name": name})]


async def read_schedule_outcome(connection: Connection, request_id: str) -> list[dict[str, Any]]:
    """Read the task or the job of one tick of a schedule, by its request id."""
    return await run(connection, EXPLAIN["read_schedule_outcome"], {"request_id": request_id})


async def read_past_task(connection: Connection, id_: UUID, at: datetime) -> dict[str, Any]:
    """Read the state of a task at a moment, by its records; `first_at` is null when there are none."""
    (row,) = await run(connection, EXPLAIN["read_past_task"], {"id": id_, "at": at})
    return row


async def read_past_job(connection: Connection, id_: UUID, at: datetime) -> dict[str, Any]:
    """Read the state of a job at a moment, by its records."""
    (row,) = await run(connection, EXPLAIN["read_past_job"], {"id": id_, "at": at})
    return row


async def read_past_worker(connection: Connection, worker_id: str, at: datetime) -> dict[str, Any]:
    """Read the state of a worker at a moment, by its records."""
    (row,) = await run(connection, EXPLAIN["read_past_worker"], {"id": worker_id, "at": at})
    return row


async def read_past_steps(connection: Connection, job_id: UUID, at: datetime, *, limit: int) -> list[UUID]:
    """Read the steps of a job that were open at a moment."""
    rows = await run(connection, EXPLAIN["read_past_steps"], {"id": job_id, "at": at, "limit": limit})
    return [row["id"] for row in rows]


async def read_past_workers(connection: Connection, at: datetime) -> list[LiveProcess]:
    """Read the processes that were live at a moment, with what they served then."""
    return [
        LiveProcess(
            id=row["id"],
            status=row["status"],
            metadata={"role": row["details"]["role"]},
            namespaces=row["details"]["namespaces"],
            types=row["details"]["types"],
            heartbeat_at=None,
            seen_until=at,
            created_at=row["recorded_at"],
        )
        for row in await run(connection, EXPLAIN["read_past_workers"], {"at": at})
    ]


async def read_past_reason(connection: Connection, kind: str, subject: str, at: datetime) -> dict[str, Any] | None:
    """Read the reason of a namespace, a schedule or a worker that held at a moment; None when none is stored."""
    rows = await run(connection, EXPLAIN["read_past_reason"], {"kind": kind, "subject": subject, "at": at})
    return rows[0] if rows else None


async def read_queue(connection: Connection) -> dict[str, Any]:
    """Read whether PGMQ and its queue exist, the waiting messages, and the number of archived ones."""
    (place,) = await run(connection, EXPLAIN["read_queue"], {})
    if not place["installed"] or not place["there"]:
        return {**place, "waiting": 0, "oldest_age": None, "archived": 0}
    return {**place, **await read_queue_state(connection)}


async def _read(connection: Connection, ids: Sequence[UUID], now: datetime | None) -> dict[UUID, Cause]:
    """Read tasks and jobs by id."""
    found = {}
    if ids:
        parameters = {"ids": list(ids), "holders": MAX_EVIDENCE, "now": now}
        for kind in ("job", "task"):
            for row in await run(connection, EXPLAIN[f"read_explained_{kind}s"], parameters):
                found[row["id"]] = Cause(kind, row)
    return found


async def _grow_tree(connection: Connection, root: Cause, id_: UUID, now: datetime | None) -> None:
    """Add causes below the root, level by level; each level is read by one statement per kind."""
    included = {id_}
    level = [root]
    for _ in range(MAX_DEPTH):
        links = [(cause, link) for cause in level for link in await _links(connection, cause)]
        found = await _read(connection, list({link.id for _, link in links} - included), now)
        level = _attach(links, found, included)
        if not level or len(included) > MAX_NODES:
            break
    for cause in level:  # cut off by the bounds
        cause.more = _can_have_causes(cause)


def _attach(links: Iterable[tuple[Cause, CauseLink]], found: dict[UUID, Cause], included: set[UUID]) -> list[Cause]:
    """Attach found causes to the nodes they block, each once; return them."""
    level = []
    for cause, link in links:
        if link.id in included:
            cause.shared = True
        elif link.id in found:
            included.add(link.id)
            child = found[link.id]
            child.through = link.through
            cause.causes.append(child)
            level.append(child)
    return level


async def _links(connection: Connection, cause: Cause) -> list[CauseLink]:
    row = cause.row
    if not _can_have_causes(cause):
        return []
    if cause.kind == "job":
        asked = {"job_id": row["id"], "limit": MAX_CAUSES + 1}
        found = await run(connection, EXPLAIN["read_open_causes"], asked)
        return _bounded(cause, [CauseLink(step["id"]) for step in found])
    if row["held_by"] == "dependency":
        asked = {"id": row["id"], "job_id": row["job_id"], "step": row["step"]}
        edges = await run(connection, EXPLAIN["read_open_ancestors"], asked)
        return _bounded(cause, list(_root_steps(row["step"], edges)))
    asked = {"id": row["id"], "limit": MAX_CAUSES + 1}
    found = await run(connection, EXPLAIN["read_causes"], asked)
    return _bounded(cause, [CauseLink(child["id"]) for child in found])


def _can_have_causes(cause: Cause) -> bool:
    """Tell whether another task or job can block this one."""
    if cause.kind == "job":
        return bool(cause.row["status"] == JobState.RUNNING)
    return bool(
        cause.row["state"] == TaskRowState.WAITING
        and cause.row["held_by"] not in {"limit", "namespace", "signal", "sleep"}
    )


def _bounded(cause: Cause, links: list[CauseLink]) -> list[CauseLink]:
    cause.more = len(links) > MAX_CAUSES
    return links[:MAX_CAUSES]


def _root_steps(step: str, edges: Iterable[dict[str, Any]]) -> Iterable[CauseLink]:
    """Yield the unfinished ancestors that wait for no other step, nearest first, each with the shortest path to it."""
    upstreams: dict[str, list[dict[str, Any]]] = {}
    for edge in edges:
        upstreams.setdefault(edge["downstream"], []).append(edge)
    reached_from: dict[str, str | None] = {step: None}
    queue = deque([step])
    while queue:
        place = queue.popleft()
        for edge in upstreams.get(place, ()):
            name = edge["upstream"]
            if name in reached_from:
                continue
            reached_from[name] = place
            queue.append(name)
            if edge["root"]:
                yield CauseLink(edge["id"], _path(reached_from, place))


def _path(reached_from: dict[str, str | None], place: str) -> tuple[str, ...]:
    """Name the steps between the start, which is left out, and this one."""
    names = []
    step: str | None = place
    while step is not None:
        names.append(step)
        step = reached_from[step]
    return tuple(reversed(names[:-1]))
