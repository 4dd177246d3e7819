"""Holds: concurrency and rate limits per key, and paused namespaces.

Invariant: at most `max_running` tasks of a key are pending or running, and at most `max_starts` of them were admitted
in any window of `period`. Every held task says in its reason what it waits for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import ConfigError
from interlock.postgres.connection import transaction
from interlock.postgres.notifier import BROADCAST
from interlock.postgres.query import load_statements, run
from interlock.store.leader import duty_transaction
from interlock.store.step_results import SimpleStepMessage, send_messages
from interlock.store.task_admin import hold_pending_tasks, release_waiting_tasks
from interlock.store.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

LIMITS = load_statements("limits")
BATCH_SIZE = 5_000  # tasks that one statement holds or releases
MAX_INTEGER = 2**31 - 1  # of the columns
MAX_ADMITTED_PER_KEY = 1_000  # in one round
MAX_EXPLAINED_PER_KEY = 100  # waiting tasks whose reason is kept up to date: those that are admitted next
# A reason names the time of the next start only if it is at least so far away; a nearer one would be stale when read.
MIN_ANNOUNCED_WAIT = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `max_running` tasks of a key at once, at most `max_starts` per `period`, or both."""

    key: str
    max_running: int | None = None
    max_starts: int | None = None
    period: timedelta | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_running", self.max_running), ("max_starts", self.max_starts)):
            if value is not None and not (type(value) is int and 1 <= value <= MAX_INTEGER):
                raise ConfigError(
                    f"limit {self.key!r}: {name} must be a whole number from 1 to {MAX_INTEGER}, not {value!r}"
                )
        if (self.max_starts is None) != (self.period is None):
            raise ConfigError(f"limit {self.key!r}: max_starts and period must be given together")
        if self.period is not None and self.period <= timedelta():
            raise ConfigError(f"limit {self.key!r}: period must be greater than 0, got {self.period}")
        if self.max_running is None and self.max_starts is None:
            raise ConfigError(f"limit {self.key!r}: give max_running, or max_starts and period")


class Admission(NamedTuple):
    """The result of one round; `next_at` is the time of the next one, None waits for a notification."""

    released: int
    next_at: datetime | None
    more: bool


class NamespaceState(NamedTuple):
    """A namespace with unfinished tasks or a pause: `held` tasks wait for its resume, `limited` ones for a limit."""

    name: str
    paused_at: datetime | None
    paused_by: str | None
    reason: str | None
    pending: int
    running: int
    held: int
    limited: int


class LimitUsage(NamedTuple):
    """A key that tasks wait for, its limit and the use of it."""

    key: str
    max_running: int | None
    max_starts: int | None
    period: timedelta | None
    running: int
    starts: int
    next_at: datetime | None

    @property
    def room(self) -> int:
        """The number of tasks that can be admitted now."""
        free = [MAX_ADMITTED_PER_KEY]
        if self.max_running is not None:
            free.append(self.max_running - self.running)
        if self.max_starts is not None:
            free.append(self.max_starts - self.starts)
        return max(min(free), 0)

    @property
    def is_limited(self) -> bool:
        """Whether the key still has a limit."""
        return self.max_running is not None or self.max_starts is not None

    def hold_detail(self, now: datetime) -> str:
        """Return the detail in the reason of waiting tasks of this key."""
        if self.max_running is not None and self.running >= self.max_running:
            return f"{self.running} of {self.max_running} running"
        period = 0.0 if self.period is None else self.period.total_seconds()
        detail = f"{self.max_starts} starts per {period:g} s reached"
        if self.next_at is not None and self.next_at - now > MIN_ANNOUNCED_WAIT:
            detail += f", next at {self.next_at:%Y-%m-%d %H:%M:%S %Z}"
        return detail


async def put_limits(connection: Connection, limits: Iterable[Limit], *, now: datetime | None = None) -> list[str]:
    """Store limits by key; return the keys whose limit is new or changed."""
    wanted = {limit.key: limit for limit in limits}
    parameters = {
        "keys": list(wanted),
        "max_runnings": [limit.max_running for limit in wanted.values()],
        "max_starts": [limit.max_starts for limit in wanted.values()],
        "periods": [limit.period for limit in wanted.values()],
        "now": now,
    }
    return await _change_limits(connection, "put_limits", parameters)


async def delete_limits(connection: Connection, keys: Iterable[str]) -> list[str]:
    """Delete limits; return the keys that had one. The leader admits the tasks that waited for them."""
    return await _change_limits(connection, "delete_limits", {"keys": list(keys)})


async def _change_limits(connection: Connection, name: str, parameters: dict[str, Any]) -> list[str]:
    if not parameters["keys"]:
        return []
    changed = [row["key"] for row in await run(connection, LIMITS[name], parameters)]
    if changed:
        await run(connection, TASKS["notify_duties"], {"duties": ["limits"]})
    return changed


async def admit_limited_tasks(
    connection: Connection, *, actor: str, explain: bool = True, now: datetime | None = None
) -> Admission:
    """Admit the tasks that the limits allow, in one transaction under the lock of this duty.

    Without `explain`, the reasons are updated only when few keys are waited for; a later round updates the rest.
    """
    async with duty_transaction(connection, "limits", now=now) as moment:
        usages = await _read_limit_usage(connection, moment)
        released = await _admit(connection, usages, actor, moment)
        if released:
            usages = await _read_limit_usage(connection, moment)
        if explain or len(usages) <= MAX_EXPLAINED_PER_KEY:
            await _write_reasons(connection, usages, moment)
        due = await run(connection, LIMITS["next_limited_run_at"], {"now": moment})
    next_ats = [row["run_at"] for row in due] + [usage.next_at for usage in usages if usage.next_at is not None]
    more = max(released.values(), default=0) >= MAX_ADMITTED_PER_KEY
    return Admission(sum(released.values()), min(next_ats, default=None), more)


async def _write_reasons(connection: Connection, usages: Sequence[LimitUsage], now: datetime) -> None:
    """Update the reason of the tasks that are admitted next, where it changed."""
    full = [usage for usage in usages if usage.is_limited and not usage.room]
    if full:
        parameters = {
            "keys": [usage.key for usage in full],
            "details": [usage.hold_detail(now) for usage in full],
            "each": MAX_EXPLAINED_PER_KEY,
            "now": now,
        }
        await run(connection, LIMITS["write_limit_reasons"], parameters)


async def _read_limit_usage(connection: Connection, now: datetime) -> list[LimitUsage]:
    return [LimitUsage(**row) for row in await run(connection, LIMITS["read_limit_usage"], {"now": now})]


async def _admit(connection: Connection, usages: Sequence[LimitUsage], actor: str, now: datetime) -> Counter[str]:
    """Release the tasks that fit; return their number per key."""
    free = [(usage.key, usage.room, usage.is_limited) for usage in usages if usage.room]
    if not free:
        return Counter()
    names, rooms, limited = (list(column) for column in zip(*free, strict=True))
    parameters = {"keys": names, "rooms": rooms, "limited": limited, "now": now}
    rows = await run(connection, LIMITS["read_admissible_tasks"], parameters)
    keys: dict[UUID, str] = {row["id"]: row["key"] for row in rows}
    if not keys:
        return Counter()
    admitted = await release_waiting_tasks(
        connection, list(keys), actor=actor, reason="admitted by its limit", held_by="limit", now=now
    )
    released = Counter(keys[id_] for id_ in admitted)
    started = {"keys": list(released), "starts": list(released.values()), "now": now}
    await run(connection, LIMITS["insert_limit_starts"], started)
    return released


async def sweep_limits(connection: Connection, *, actor: str, now: datetime | None = None) -> list[UUID]:
    """Hold pending tasks in excess of their limit, and delete starts that are older than every window."""
    async with duty_transaction(connection, "limits", now=now) as moment:
        await run(connection, LIMITS["delete_past_limit_starts"], {"now": moment})
        excess: dict[str, list[UUID]] = {}
        for row in await run(connection, LIMITS["read_excess_tasks"], {"batch": BATCH_SIZE}):
            excess.setdefault(f"more than {row['max_running']} running", []).append(row["id"])
        held = []
        for detail, ids in excess.items():
            held += await hold_pending_tasks(connection, ids, actor=actor, held_by="limit", detail=detail, now=moment)
    return held


async def pause_namespace(
    connection: Connection, name: str, reason: str | None, actor: str, *, now: datetime | None = None
) -> int:
    """Hold the tasks of a namespace until it is resumed; return the number held now.

    Running tasks continue. Commits in batches, unless the caller is in a transaction.
    """
    await run(connection, LIMITS["put_paused_namespace"], {"name": name, "reason": reason, "actor": actor, "now": now})
    await run(connection, TASKS["notify_worker"], {"workers": [BROADCAST]})
    return await _hold_namespace(connection, name, reason, actor=actor, now=now)


async def resume_namespace(connection: Connection, name: str, actor: str, *, now: datetime | None = None) -> int:
    """Release the tasks of a paused namespace; return their number. Those with a limit wait for it again."""
    await run(connection, LIMITS["put_resumed_namespace"], {"name": name})
    await run(connection, TASKS["notify_worker"], {"workers": [BROADCAST]})
    return await _release_namespace(connection, name, actor=actor, now=now)


async def read_paused_namespaces(connection: Connection) -> set[str]:
    """Return the names of paused namespaces."""
    return {row["name"] for row in await run(connection, LIMITS["read_paused_namespaces"], {})}


async def list_namespaces(connection: Connection) -> list[NamespaceState]:
    """List the namespaces that are paused or have unfinished tasks, with counts."""
    return [NamespaceState(**row) for row in await run(connection, LIMITS["list_namespaces"], {})]


async def sweep_namespaces(connection: Connection, *, actor: str, now: datetime | None = None) -> int:
    """Correct holds that raced with a pause or a resume; return the number of corrected tasks."""
    corrected = 0
    for row in await run(connection, LIMITS["read_paused_namespaces"], {}):
        corrected += await _hold_namespace(connection, row["name"], row["reason"], actor=actor, now=now)
    for row in await run(connection, LIMITS["read_held_namespaces"], {}):
        corrected += await _release_namespace(connection, row["name"], actor=actor, now=now)
    return corrected


async def _hold_namespace(
    connection: Connection, name: str, reason: str | None, *, actor: str, now: datetime | None
) -> int:
    held = 0
    batch = {"name": name, "batch": BATCH_SIZE, "detail": reason}
    while ids := [row["id"] for row in await run(connection, LIMITS["read_pending_of_namespace"], batch)]:
        async with transaction(connection):
            ids = await hold_pending_tasks(connection, ids, actor=actor, held_by="namespace", detail=reason, now=now)
            held += len(ids)
            await _request_admission(connection, await run(connection, LIMITS["read_capped_jobs"], {"ids": ids}))
    return held + await _move_holds(connection, "move_hold_from_limit_to_namespace", batch)


async def _release_namespace(connection: Connection, name: str, *, actor: str, now: datetime | None) -> int:
    why = f"namespace {name} was resumed"
    freed = 0
    batch = {"name": name, "batch": BATCH_SIZE, "now": now}
    while ids := [row["id"] for row in await run(connection, LIMITS["read_held_of_namespace"], batch)]:
        released = await release_waiting_tasks(connection, ids, actor=actor, reason=why, held_by="namespace", now=now)
        freed += len(released)
    freed += await _move_holds(connection, "move_hold_from_namespace_to_job", batch)
    limited = 0
    while rows := await run(connection, LIMITS["move_hold_from_namespace_to_limit"], batch):
        limited += len(rows)
    if limited:
        await run(connection, TASKS["notify_duties"], {"duties": ["limits"]})
    return freed + limited


async def _move_holds(connection: Connection, statement: str, batch: dict[str, Any]) -> int:
    """Change what tasks are held by, in batches, and request admission for the jobs of capped steps."""
    moved = 0
    while True:
        async with transaction(connection):
            rows = await run(connection, LIMITS[statement], batch)
            await _request_admission(connection, [row for row in rows if row["capped"]])
        if not rows:
            return moved
        moved += len(rows)


async def _request_admission(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Ask the orchestrator to admit steps of these jobs under their `worker_count`."""
    ids = sorted({row["job_id"] for row in rows})
    if ids:
        await run(connection, *send_messages(SimpleStepMessage(id_) for id_ in ids))
