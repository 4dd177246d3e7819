"""What keeps tasks waiting on purpose: limits per key, and paused namespaces.

Invariant: at most `max_running` tasks of a key are pending or running, and at most `max_starts` of them were let in
during any stretch of time as long as `period`; every task that waits for either says so in its reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.errors import ConfigError
from interlock.postgres.connection import transaction
from interlock.postgres.query import load_statements, run
from interlock.store.leader import duty_transaction
from interlock.store.task_admin import hold_pending_tasks, release_waiting_tasks
from interlock.store.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

LIMITS = load_statements("limits")
ORCHESTRATION = load_statements("orchestration")
BATCH = 5_000
MOST = 2**31 - 1  # what a column for whole numbers holds
ADMITTED_AT_ONCE = 1_000  # of each key
EXPLAINED = 100  # tasks of each key whose reason is kept up to date: those that come next
# A next start that is nearer than this is not told: it would be past before anybody read it.
WORTH_TELLING = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `max_running` tasks of a key at once, at most `max_starts` per `period`, or both."""

    key: str
    max_running: int | None = None
    max_starts: int | None = None
    period: timedelta | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_running", self.max_running), ("max_starts", self.max_starts)):
            if value is not None and not _is_count(value):
                raise ConfigError(f"limit {self.key!r}: {name} must be a whole number from 1 to {MOST}, not {value!r}")
        if (self.max_starts is None) != (self.period is None):
            raise ConfigError(f"limit {self.key!r}: max_starts and period go together; give both or neither")
        if self.period is not None and self.period <= timedelta():
            raise ConfigError(f"limit {self.key!r}: the period must be longer than nothing, not {self.period}")
        if self.max_running is None and self.max_starts is None:
            raise ConfigError(f"limit {self.key!r} limits nothing; give max_running, or max_starts and a period")


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MOST


class Admission(NamedTuple):
    """What one round let in, and when the next one is worth its while (None: when something happens)."""

    released: int
    next_at: datetime | None
    more: bool


class NamespaceState(NamedTuple):
    """A namespace with unfinished tasks or a pause: `held` wait for its resumption, `limited` for a limit."""

    name: str
    paused_at: datetime | None
    paused_by: str | None
    reason: str | None
    pending: int
    running: int
    held: int
    limited: int


class LimitUsage(NamedTuple):
    """A key that tasks wait for, and how much of its limit is taken."""

    key: str
    max_running: int | None
    max_starts: int | None
    period: timedelta | None
    running: int
    starts: int
    next_at: datetime | None

    @property
    def tasks(self) -> int:
        """How many more may come in now."""
        free = [ADMITTED_AT_ONCE]
        if self.max_running is not None:
            free.append(self.max_running - self.running)
        if self.max_starts is not None:
            free.append(self.max_starts - self.starts)
        return max(min(free), 0)

    @property
    def limited(self) -> bool:
        """Whether the key has a limit at all."""
        return self.max_running is not None or self.max_starts is not None

    def hold_detail(self, now: datetime) -> str:
        """Return the detail in the reason of waiting tasks of this key."""
        if self.max_running is not None and self.running >= self.max_running:
            return f"{self.running} of {self.max_running} running"
        period = 0.0 if self.period is None else self.period.total_seconds()
        said = f"{self.max_starts} starts per {period:g} s reached"
        if self.next_at is not None and self.next_at - now > WORTH_TELLING:
            said += f", next at {self.next_at:%Y-%m-%d %H:%M:%S %Z}"
        return said


async def put_limits(connection: Connection, limits: Iterable[Limit], *, now: datetime | None = None) -> list[str]:
    """Store limits by key; give the keys whose limit is new or changed."""
    wanted = {limit.key: limit for limit in limits}
    parameters = {
        "keys": list(wanted),
        "max_runnings": [limit.max_running for limit in wanted.values()],
        "max_starts": [limit.max_starts for limit in wanted.values()],
        "periods": [limit.period for limit in wanted.values()],
        "now": now,
    }
    return await _changed(connection, "put_limits", parameters)


async def delete_limits(connection: Connection, keys: Iterable[str]) -> list[str]:
    """Lift limits; give the keys that had one. What waits for them is let in at once."""
    return await _changed(connection, "delete_limits", {"keys": list(keys)})


async def _changed(connection: Connection, name: str, parameters: dict[str, Any]) -> list[str]:
    if not parameters["keys"]:
        return []
    changed = [row["key"] for row in await run(connection, LIMITS[name], parameters)]
    if changed:
        await run(connection, TASKS["notify_duties"], {"duties": ["limits"]})
    return changed


async def read_limits(connection: Connection) -> list[Limit]:
    """Read all limits."""
    return [Limit(**row) for row in await run(connection, LIMITS["read_limits"], {})]


async def admit_limited_tasks(
    connection: Connection, *, actor: str, explain: bool = True, now: datetime | None = None
) -> Admission:
    """Let in what the limits allow, in one transaction that nobody else can be in at the same time.

    With `explain` off, the reasons of many keys are left for a round that has the time.
    """
    async with duty_transaction(connection, "limits", now=now) as moment:
        rooms = await _read_rooms(connection, moment)
        released = await _admit(connection, rooms, actor, moment)
        if released:
            rooms = await _read_rooms(connection, moment)
        if explain or len(rooms) <= EXPLAINED:
            await _explain(connection, rooms, moment)
        due = await run(connection, LIMITS["next_limited_run_at"], {"now": moment})
    next_ats = [row["run_at"] for row in due] + [room.next_at for room in rooms if room.next_at is not None]
    more = max(released.values(), default=0) >= ADMITTED_AT_ONCE
    return Admission(sum(released.values()), min(next_ats, default=None), more)


async def _explain(connection: Connection, rooms: Sequence[LimitUsage], now: datetime) -> None:
    """Write into the tasks that come next what they wait for, where it changed."""
    full = [room for room in rooms if room.limited and not room.tasks]
    if full:
        details = [room.hold_detail(now) for room in full]
        parameters = {"keys": [room.key for room in full], "details": details, "each": EXPLAINED, "now": now}
        await run(connection, LIMITS["write_limit_reasons"], parameters)


async def _read_rooms(connection: Connection, now: datetime) -> list[LimitUsage]:
    return [LimitUsage(**row) for row in await run(connection, LIMITS["read_limit_usage"], {"now": now})]


async def _admit(connection: Connection, rooms: Sequence[LimitUsage], actor: str, now: datetime) -> Counter[str]:
    """Release what there is room for; give how many of each key."""
    free = [(room.key, room.tasks, room.limited) for room in rooms if room.tasks]
    if not free:
        return Counter()
    names, tasks, limited = (list(column) for column in zip(*free, strict=True))
    parameters = {"keys": names, "rooms": tasks, "limited": limited, "now": now}
    rows = await run(connection, LIMITS["read_admissible_tasks"], parameters)
    keys: dict[UUID, str] = {row["id"]: row["key"] for row in rows}
    if not keys:
        return Counter()
    let_in = await release_waiting_tasks(
        connection, list(keys), actor=actor, reason="let in by its limit", held_by="limit", now=now
    )
    released = Counter(keys[id_] for id_ in let_in)
    started = {"keys": list(released), "starts": list(released.values()), "now": now}
    await run(connection, LIMITS["insert_limit_starts"], started)
    return released


async def sweep_limits(connection: Connection, *, actor: str, now: datetime | None = None) -> list[UUID]:
    """Hold pending tasks beyond their limit, and forget starts that no window reaches back to."""
    async with duty_transaction(connection, "limits", now=now) as moment:
        await run(connection, LIMITS["delete_past_limit_starts"], {"now": moment})
        excess: dict[str, list[UUID]] = {}
        for row in await run(connection, LIMITS["read_excess_tasks"], {"batch": BATCH}):
            excess.setdefault(f"more than {row['max_running']} running", []).append(row["id"])
        held = []
        for detail, ids in excess.items():
            held += await hold_pending_tasks(connection, ids, actor=actor, held_by="limit", detail=detail, now=moment)
    return held


async def pause_namespace(
    connection: Connection, name: str, reason: str | None, actor: str, *, now: datetime | None = None
) -> int:
    """Keep the tasks of a namespace from being claimed until it is resumed; give how many are held now.

    What runs goes on. Committed in batches, unless the caller's transaction is around it.
    """
    await run(connection, LIMITS["put_paused_namespace"], {"name": name, "reason": reason, "actor": actor, "now": now})
    await run(connection, TASKS["notify_worker"], {"workers": ["*"]})
    return await _hold_namespace(connection, name, reason, actor=actor, now=now)


async def resume_namespace(connection: Connection, name: str, actor: str, *, now: datetime | None = None) -> int:
    """Let the tasks of a paused namespace go on; give how many do. Limited ones wait for their limit again."""
    await run(connection, LIMITS["put_resumed_namespace"], {"name": name})
    await run(connection, TASKS["notify_worker"], {"workers": ["*"]})
    return await _free_namespace(connection, name, actor=actor, now=now)


async def paused_namespaces(connection: Connection) -> set[str]:
    """Tell which namespaces are paused."""
    return {row["name"] for row in await run(connection, LIMITS["read_paused_namespaces"], {})}


async def list_namespaces(connection: Connection) -> list[NamespaceState]:
    """List the namespaces that are paused or have unfinished tasks, with how many."""
    return [NamespaceState(**row) for row in await run(connection, LIMITS["list_namespaces"], {})]


async def sweep_namespaces(connection: Connection, *, actor: str, now: datetime | None = None) -> int:
    """Set right what crossed with a pause or a resumption; give how many tasks that were."""
    touched = 0
    for row in await run(connection, LIMITS["read_paused_namespaces"], {}):
        touched += await _hold_namespace(connection, row["name"], row["reason"], actor=actor, now=now)
    for row in await run(connection, LIMITS["read_held_namespaces"], {}):
        touched += await _free_namespace(connection, row["name"], actor=actor, now=now)
    return touched


async def _hold_namespace(
    connection: Connection, name: str, reason: str | None, *, actor: str, now: datetime | None
) -> int:
    held = 0
    batch = {"name": name, "batch": BATCH, "detail": reason}
    while ids := [row["id"] for row in await run(connection, LIMITS["read_pending_of_namespace"], batch)]:
        async with transaction(connection):
            ids = await hold_pending_tasks(connection, ids, actor=actor, held_by="namespace", detail=reason, now=now)
            held += len(ids)
            await _ask_for_admission(connection, await run(connection, LIMITS["read_capped_jobs"], {"ids": ids}))
    return held + await _pass_steps(connection, "move_hold_from_limit_to_namespace", batch)


async def _free_namespace(connection: Connection, name: str, *, actor: str, now: datetime | None) -> int:
    why = f"namespace {name} was resumed"
    freed = 0
    batch = {"name": name, "batch": BATCH, "now": now}
    while ids := [row["id"] for row in await run(connection, LIMITS["read_held_of_namespace"], batch)]:
        released = await release_waiting_tasks(connection, ids, actor=actor, reason=why, held_by="namespace", now=now)
        freed += len(released)
    freed += await _pass_steps(connection, "move_hold_from_namespace_to_job", batch)
    limited = 0
    while rows := await run(connection, LIMITS["move_hold_from_namespace_to_limit"], batch):
        limited += len(rows)
    if limited:
        await run(connection, TASKS["notify_duties"], {"duties": ["limits"]})
    return freed + limited


async def _pass_steps(connection: Connection, name: str, batch: dict[str, Any]) -> int:
    """Let tasks wait for something else, in batches; what that changes in the jobs of steps is seen to by them."""
    passed = 0
    while True:
        async with transaction(connection):
            rows = await run(connection, LIMITS[name], batch)
            await _ask_for_admission(connection, [row for row in rows if row["capped"]])
        if not rows:
            return passed
        passed += len(rows)


async def _ask_for_admission(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Have the orchestrator look again which steps of these jobs there is room for."""
    ids = sorted({row["job_id"] for row in rows})
    if ids:
        messages = orjson.dumps([{"job_id": id_, "admit": True} for id_ in ids]).decode()
        await run(connection, ORCHESTRATION["send_messages"], {"messages": messages})
