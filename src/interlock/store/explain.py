"""Why a task or a job does not move: itself, and behind it what it waits for, down to what waits for nothing else.

Invariant: looking changes nothing; everything is read in one transaction, each thing is told once, and however large a
job is, only so much is told of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.postgres.connection import transaction
from interlock.postgres.query import load_statements, run
from interlock.store.leader import read_clock
from interlock.store.step_results import queue_state
from interlock.store.workers import list_live_workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.workers import LiveProcess

EXPLAIN = load_statements("explain")
CAUSES = 10  # that are told of one task or job
DEEPEST = 16  # causes behind causes
MOST = 100  # tasks and jobs in one answer
MOVES = 3
OPEN = frozenset({"SUBMITTED", "PENDING", "RUNNING"})


@dataclass(slots=True)
class Cause:
    """A task or a job in an answer: its row, the steps that lie between it and what it holds up, and its own causes."""

    kind: str
    row: dict[str, Any]
    through: tuple[str, ...] = ()
    causes: list[Cause] = field(default_factory=list)
    # some of its causes stand elsewhere in the answer already
    shared: bool = False
    # there are more causes than these
    more: bool = False


class Link(NamedTuple):
    """What holds something up, before it is read."""

    id: UUID
    through: tuple[str, ...] = ()


class Explained(NamedTuple):
    """An answer, and what was going on around it at that moment."""

    now: datetime
    root: Cause
    processes: list[LiveProcess]
    running: dict[str, int]  # how many tasks each worker runs
    queue: dict[str, Any]
    steps: list[dict[str, Any]]  # of a job that is open: how many of its steps wait for what
    moves: list[dict[str, Any]]


async def read_explanation(connection: Connection, id_: UUID, *, now: datetime | None = None) -> Explained | None:
    """Read why a task or a job is where it is; None when there is neither of this id."""
    async with transaction(connection):
        found = await _read(connection, [id_], now)
        if not found:
            return None
        root = found[id_]
        await _grow(connection, root, id_, now)
        is_open_job = root.kind == "job" and root.row["status"] in OPEN
        return Explained(
            now=await read_clock(connection, now=now),
            root=root,
            processes=await list_live_workers(connection, now=now),
            running=await count_running_by_worker(connection),
            queue=await read_queue(connection),
            steps=await run(connection, EXPLAIN["count_open_steps"], {"job_id": id_}) if is_open_job else [],
            moves=await run(connection, EXPLAIN["read_last_moves"], {"id": id_, "limit": MOVES}),
        )


async def count_running_by_worker(connection: Connection) -> dict[str, int]:
    """Count the tasks that each worker runs."""
    return {row["worker_id"]: row["tasks"] for row in await run(connection, EXPLAIN["count_running_by_worker"], {})}


async def read_queue(connection: Connection) -> dict[str, Any]:
    """Tell whether PGMQ and the queue are there, what waits in it, and how many messages were set aside."""
    (place,) = await run(connection, EXPLAIN["read_queue_place"], {})
    if not place["installed"] or not place["there"]:
        return {**place, "waiting": 0, "oldest_age": None, "archived": 0}
    return {**place, **await queue_state(connection)}


async def _read(connection: Connection, ids: Sequence[UUID], now: datetime | None) -> dict[UUID, Cause]:
    """Read tasks and jobs by id, whichever they are."""
    found = {}
    if ids:
        parameters = {"ids": list(ids), "now": now}
        for kind in ("job", "task"):
            for row in await run(connection, EXPLAIN[f"read_explained_{kind}s"], parameters):
                found[row["id"]] = Cause(kind, row)
    return found


async def _grow(connection: Connection, root: Cause, id_: UUID, now: datetime | None) -> None:
    """Find what is behind the root, and what is behind that; each level is read at once."""
    told = {id_}
    level = [root]
    for _ in range(DEEPEST):
        links = [(cause, link) for cause in level for link in await _links(connection, cause)]
        found = await _read(connection, list({link.id for _, link in links} - told), now)
        level = _joined(links, found, told)
        if not level or len(told) > MOST:
            break
    for cause in level:  # where it was broken off
        cause.more = _goes_on(cause)


def _joined(links: Iterable[tuple[Cause, Link]], found: dict[UUID, Cause], told: set[UUID]) -> list[Cause]:
    """Put what was found behind what it holds up, each once, and give it."""
    level = []
    for cause, link in links:
        if link.id in told:
            cause.shared = True
        elif link.id in found:
            told.add(link.id)
            behind = found[link.id]
            behind.through = link.through
            cause.causes.append(behind)
            level.append(behind)
    return level


async def _links(connection: Connection, cause: Cause) -> list[Link]:
    row = cause.row
    if not _goes_on(cause):
        return []
    if cause.kind == "job":
        asked = {"job_id": row["id"], "limit": CAUSES + 1}
        found = await run(connection, EXPLAIN["read_open_causes"], asked)
        return _bounded(cause, [Link(step["id"]) for step in found])
    if row["held_by"] == "dependency":
        asked = {"id": row["id"], "job_id": row["job_id"], "step": row["step"]}
        edges = await run(connection, EXPLAIN["read_open_ancestors"], asked)
        return _bounded(cause, list(_ways(row["step"], edges)))
    asked = {"id": row["id"], "limit": CAUSES + 1}
    found = await run(connection, EXPLAIN["read_causes"], asked)
    return _bounded(cause, [Link(behind["id"]) for behind in found])


def _goes_on(cause: Cause) -> bool:
    """Tell whether something else can be behind this."""
    if cause.kind == "job":
        return bool(cause.row["status"] == "RUNNING")
    return bool(cause.row["state"] == "waiting" and cause.row["held_by"] not in {"limit", "namespace", "signal"})


def _bounded(cause: Cause, links: list[Link]) -> list[Link]:
    cause.more = len(links) > CAUSES
    return links[:CAUSES]


def _ways(step: str, edges: Iterable[dict[str, Any]]) -> Iterable[Link]:
    """Give the steps that wait for no other, nearest first, each with the shortest way to it."""
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
                yield Link(edge["id"], _way(reached_from, place))


def _way(reached_from: dict[str, str | None], place: str) -> tuple[str, ...]:
    """Name the steps from the first one, which is left out, to this one."""
    names = []
    step: str | None = place
    while step is not None:
        names.append(step)
        step = reached_from[step]
    return tuple(reversed(names[:-1]))
