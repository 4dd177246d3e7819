"""Holds: limits per key on concurrency, starts, weight and cost, and paused namespaces.

Invariant: at most `max_running` tasks of a key are pending or running. In any window of `period`, at most `max_starts`
claims of its tasks are recorded, with at most `max_weight` of weight, and none is made while the reported cost has
reached `max_cost`. The leader admits under all of these bounds, so that every held task says what it waits for; the
claim takes a token for each start, so that the bounds per period hold whatever workers do with admitted tasks.

Tasks with the same keys form a lane. Lanes that share a key are served in turn, in proportion to their shares; within a
lane, tasks are admitted in the order of the claim.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.config import ends_addresses
from interlock.errors import ConfigError
from interlock.postgres.connection import transaction
from interlock.postgres.notifier import BROADCAST
from interlock.postgres.query import as_json, load_statements, run, run_in_order
from interlock.store.leader import duty_transaction
from interlock.store.step_results import SimpleStepMessage, send_messages
from interlock.store.task_admin import hold_pending_tasks, release_waiting_tasks
from interlock.store.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import Outcome

LIMITS = load_statements("limits")
BATCH_SIZE = 5_000  # tasks that one statement holds or releases
MAX_INTEGER = 2**31 - 1  # of the columns
MAX_ADMITTED = 1_000  # tasks of one lane in one round
MAX_CANDIDATES = 5_000  # tasks that one round reads, of all lanes
MIN_CANDIDATES = 10  # of each lane, however many lanes there are
MAX_DUE_UNDER_BUDGET = 100  # pending tasks of a key whose only bound is a cost, which is known at the end
MAX_EXPLAINED = 100  # waiting tasks of a lane whose reason is kept up to date: those that are admitted next
ADMITTED = "admitted and not started yet"
# A reason names the time of the next start only if it is at least so far away; a nearer one would be stale when read.
MIN_ANNOUNCED_WAIT = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Limit:
    """The rule of a key, or of all keys that begin as a pattern such as `mail:*`, each with counters of its own.

    At most `max_running` tasks at once; per `period` at most `max_starts` starts, at most `max_weight` of weight, and
    no start once the reported cost has reached `max_cost`. `share` is the part that tasks of the key get of a limit
    that they have in common with tasks of other keys.
    """

    key: str
    max_running: int | None = None
    max_starts: int | None = None
    period: timedelta | None = None
    max_weight: float | None = None
    max_cost: float | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if any(character in self.key for character in "{}") or "*" in self.key[:-1] or not self.key:
            raise ConfigError(
                f"limit {self.key!r}: a key has no braces, and a * only at its end, where it makes it a pattern"
            )
        if not ends_addresses(self.key):
            raise ConfigError(f"limit {self.key!r}: a key has no control characters, and is not . or ..")
        self._check_amounts()
        per_period = (self.max_starts, self.max_weight, self.max_cost)
        if all(bound is None for bound in per_period) != (self.period is None):
            raise ConfigError(
                f"limit {self.key!r}: max_starts, max_weight and max_cost need a period, and a period one of them"
            )
        if self.period is not None and self.period <= timedelta():
            raise ConfigError(f"limit {self.key!r}: period must be greater than 0, got {self.period}")
        if self.max_running is None and self.period is None and self.share is None:
            raise ConfigError(
                f"limit {self.key!r}: give max_running, or max_starts, max_weight or max_cost with a period; "
                "share alone declares a key without a bound"
            )

    def _check_amounts(self) -> None:
        for name, value in (("max_running", self.max_running), ("max_starts", self.max_starts)):
            if value is not None and not (type(value) is int and 1 <= value <= MAX_INTEGER):
                raise ConfigError(
                    f"limit {self.key!r}: {name} must be a whole number from 1 to {MAX_INTEGER}, not {value!r}"
                )
        for name, amount in (("max_weight", self.max_weight), ("max_cost", self.max_cost), ("share", self.share)):
            if amount is not None and not (type(amount) in {int, float} and 0 < amount < math.inf):
                raise ConfigError(f"limit {self.key!r}: {name} must be a number greater than 0, not {amount!r}")


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


@dataclass(slots=True)
class LimitUsage:
    """The rule of a key and the use of it; admitting a task takes from what is left."""

    key: str
    max_running: int | None
    max_starts: int | None
    max_weight: float | None
    max_cost: float | None
    period: timedelta | None
    share: float
    running: int  # pending or running
    due: int  # pending, and a claim may start them now
    due_weight: float
    starts: int
    weight: float
    cost: float
    # the weight of a task whose turn it is and that waits for the window: nothing else is admitted before it
    reserved: float | None = None

    @property
    def room(self) -> float:
        """The number of tasks that can be admitted now, whatever their weight."""
        free: list[float] = [math.inf]
        if self.max_running is not None:
            free.append(self.max_running - self.running)
        if self.max_starts is not None:
            free.append(self.max_starts - self.starts - self.due)
        if self.max_cost is not None:
            free.append(MAX_DUE_UNDER_BUDGET - self.due if self.cost < self.max_cost else -self.due)
        return min(free)

    @property
    def excess(self) -> tuple[int, bool]:
        """The number of pending tasks beyond the limit, and whether only those that are due are meant."""
        running = 0 if self.max_running is None else self.running - self.max_running
        due = 0 if self.max_starts is None else min(self.due, self.starts + self.due - self.max_starts)
        if self.max_cost is not None and self.cost >= self.max_cost:
            due = self.due
        return (running, False) if running >= due else (due, True)

    def fits(self, weight: float) -> bool:
        """Tell whether a task of this weight can be admitted now; one that is too heavy for any period goes alone."""
        if self.room < 1 or self.reserved is not None:
            return False
        return self._has_weight_left(weight)

    def _has_weight_left(self, weight: float) -> bool:
        if self.max_weight is None:
            return True
        used = self.weight + self.due_weight
        return used == 0 or used + weight <= self.max_weight

    def admit(self, weight: float) -> None:
        """Count a task that is admitted."""
        self.running += 1
        self.due += 1
        self.due_weight += weight

    def reserve(self, weight: float) -> None:
        """Admit nothing more in this round, if only the window keeps a task of this weight waiting."""
        if not self._has_weight_left(weight):
            self.reserved = weight

    def hold_detail(self, weight: float, next_at: datetime | None, now: datetime) -> str:
        """Return the detail in the reason of a task that does not fit."""
        if self.max_running is not None and self.running >= self.max_running:
            return f"{self.running} of {self.max_running} pending or running"
        period = 0.0 if self.period is None else self.period.total_seconds()
        if self.max_cost is not None and self.cost >= self.max_cost:
            detail = f"cost of {self.cost:g} of {self.max_cost:g} per {period:g} s spent"
        elif self.max_starts is not None and self.starts >= self.max_starts:
            detail = f"{self.max_starts} starts per {period:g} s reached"
        elif self.max_starts is not None and self.starts + self.due >= self.max_starts:
            detail = f"{self.starts} of {self.max_starts} starts per {period:g} s used, {self.due} {ADMITTED}"
        elif self.max_weight is not None:
            detail = self._weight_detail(self.max_weight, weight, period)
        else:
            detail = f"{self.due} {ADMITTED}"
        if next_at is not None and next_at - now > MIN_ANNOUNCED_WAIT:
            detail += f", next at {next_at:%Y-%m-%d %H:%M:%S %Z}"
        return detail

    def _weight_detail(self, most: float, weight: float, period: float) -> str:
        detail = f"weight of {self.weight:g} of {most:g} per {period:g} s used"
        if self.due_weight:
            detail += f", {self.due_weight:g} {ADMITTED}"
        detail += f", {weight:g} needed"
        if self.reserved is not None and self._has_weight_left(weight):
            detail += f", after a task of weight {self.reserved:g}"
        return detail


@dataclass(slots=True)
class Lane:
    """The waiting tasks with the same keys; `served` is what they got so far, in proportion to their share."""

    keys: tuple[str, ...]
    served: float | None
    limits: list[LimitUsage] = field(default_factory=list)
    candidates: list[tuple[UUID, float]] = field(default_factory=list)  # id and weight, next one first
    limit: int = 0  # number of candidates that were asked for
    admitted: int = 0

    @property
    def share(self) -> float:
        """The share of the lane: the product of those of its keys."""
        return math.prod(limit.share for limit in self.limits)

    @property
    def next_weight(self) -> float:
        """The weight of the next task."""
        return self.candidates[self.admitted][1] if self.admitted < len(self.candidates) else 1.0

    def blocking_limit(self) -> LimitUsage | None:
        """Return the first limit that has no room for the next task."""
        weight = self.next_weight
        return next((limit for limit in self.limits if not limit.fits(weight)), None)

    def reserve(self) -> None:
        """Keep other lanes from using up the weight that the next task waits for, unless it waits for more than that.

        Otherwise lighter tasks of other lanes would keep the window full for ever.
        """
        if self.admitted < len(self.candidates) and all(
            limit.room >= 1 and limit.reserved is None for limit in self.limits
        ):
            for limit in self.limits:
                limit.reserve(self.next_weight)


async def put_limits(connection: Connection, limits: Iterable[Limit], *, now: datetime | None = None) -> list[str]:
    """Store limits by key; return the keys whose limit is new or changed."""
    wanted = {limit.key: limit for limit in limits}
    parameters = {
        "keys": list(wanted),
        "max_runnings": [limit.max_running for limit in wanted.values()],
        "max_starts": [limit.max_starts for limit in wanted.values()],
        "max_weights": [as_float(limit.max_weight) for limit in wanted.values()],
        "max_costs": [as_float(limit.max_cost) for limit in wanted.values()],
        "periods": [limit.period for limit in wanted.values()],
        "shares": [1.0 if limit.share is None else float(limit.share) for limit in wanted.values()],
        "now": now,
    }
    return await change_limits(connection, "put_limits", parameters)


def as_float(value: float | None) -> float | None:
    """Convert an int: the driver refuses arrays of mixed types."""
    return None if value is None else float(value)


async def delete_limits(
    connection: Connection, keys: Iterable[str], *, actor: str, reason: str | None = None, now: datetime | None = None
) -> list[str]:
    """Delete limits, declared or not; return the keys that had one. The leader admits the tasks that waited."""
    parameters = {"keys": list(keys), "actor": actor, "reason": reason, "now": now}
    return await change_limits(connection, "delete_limits", parameters)


async def change_limits(connection: Connection, name: str, parameters: dict[str, Any]) -> list[str]:
    """Run a statement that changes limits, and wake the leader if it did; return the keys."""
    if not parameters.get("keys", True):
        return []
    changed = [row["key"] for row in await run(connection, LIMITS[name], parameters)]
    if changed:
        await run(connection, TASKS["notify_duties"], {"duties": ["limits"]})
    return changed


# --- Admission ---


async def admit_limited_tasks(
    connection: Connection,
    *,
    actor: str,
    explain: bool = True,
    served_only: bool = False,
    now: datetime | None = None,
) -> Admission:
    """Admit the tasks that the limits allow, in one transaction under the lock of this duty.

    With `served_only`, tasks that no live worker would claim are not admitted: they would take room for nothing.
    Without `explain`, the reasons are updated only when few keys are waited for; a later round updates the rest.
    """
    async with duty_transaction(connection, "limits", now=now) as moment:
        await run(connection, LIMITS["walk_indexes"], {})
        await run(connection, TASKS["stamp_limit_starts"], {"now": now})
        lanes = await _read_lanes(connection, moment)
        await _read_candidates(connection, lanes, moment, served_only=served_only)
        released = await _admit(connection, lanes, actor, moment)
        more = any(lane.admitted >= lane.limit > 0 and lane.blocking_limit() is None for lane in lanes)
        blocked = [(lane, limit) for lane in lanes if (limit := lane.blocking_limit()) is not None]
        openings = await _read_openings(connection, blocked, moment)
        if explain or len(lanes) <= MAX_EXPLAINED:
            holds = _describe_holds(lanes, openings, moment)
            parameters = {"each": MAX_EXPLAINED, "served_only": served_only, "now": moment}
            await run(connection, LIMITS["write_limit_reasons"], {"lanes": as_json(holds), **parameters})
        due = await run(connection, LIMITS["next_limited_run_at"], {"now": moment})
    next_ats = [row["run_at"] for row in due] + [at for at in openings.values() if at is not None]
    return Admission(released, min(next_ats, default=None), more)


async def read_waiting_lanes(connection: Connection) -> list[tuple[str, ...]]:
    """Return the different sets of limit keys that tasks wait for."""
    return [tuple(row["keys"]) for row in await run(connection, LIMITS["read_waiting_lanes"], {})]


async def _read_lanes(connection: Connection, now: datetime) -> list[Lane]:
    """Read the lanes with waiting tasks, and the use of their limits."""
    rows = await run(connection, LIMITS["read_waiting_lanes"], {})
    lanes = [Lane(tuple(row["keys"]), row["served"]) for row in rows]
    keys = {key for lane in lanes for key in lane.keys}
    limits = await _read_limit_usage(connection, keys, now) if keys else {}
    for lane in lanes:
        lane.limits = [limits[key] for key in lane.keys if key in limits]
    return lanes


async def _read_limit_usage(connection: Connection, keys: Iterable[str], now: datetime) -> dict[str, LimitUsage]:
    parameters = {"keys": sorted(keys), "now": now}
    return {row["key"]: LimitUsage(**row) for row in await run(connection, LIMITS["read_limit_usage"], parameters)}


async def _read_candidates(connection: Connection, lanes: Sequence[Lane], now: datetime, *, served_only: bool) -> None:
    """Read the next tasks of the lanes that have room."""
    most = max(MIN_CANDIDATES, MAX_CANDIDATES // max(len(lanes), 1))
    for lane in lanes:
        room = min((limit.room for limit in lane.limits), default=math.inf)
        lane.limit = int(max(min(room, most, MAX_ADMITTED), 0))
    open_ = [lane for lane in lanes if lane.limit]
    if not open_:
        return
    documents = [{"keys": lane.keys, "tasks": lane.limit, "limited": bool(lane.limits)} for lane in open_]
    parameters = {"lanes": as_json(documents), "served_only": served_only, "now": now}
    for row in await run(connection, LIMITS["read_admissible_tasks"], parameters):
        open_[row["place"] - 1].candidates.append((row["id"], row["weight"]))


async def _admit(connection: Connection, lanes: Sequence[Lane], actor: str, now: datetime) -> int:
    """Release the tasks that fit; return their number.

    Start-time fair queueing: the lane that was served least is next. A lane that had nothing to do starts beside the
    one that was served least, so that it neither makes up for the time nor has to wait.
    """
    # New lanes come after those that wait already and were served equally.
    active = sorted((lane for lane in lanes if lane.candidates), key=lambda lane: lane.served is None)
    least = min((lane.served for lane in active if lane.served is not None), default=0.0)
    for lane in active:
        lane.served = least if lane.served is None else lane.served
    ids = _take_turns(active)
    if not ids:
        return 0
    admitted = await release_waiting_tasks(
        connection, ids, actor=actor, reason="admitted by its limit", held_by="limit", now=now
    )
    documents = [{"keys": lane.keys, "served": lane.served} for lane in active if lane.limits]
    await run_in_order(connection, [(LIMITS["put_limit_lanes"], {"lanes": as_json(documents)})])
    return len(admitted)


def _take_turns(lanes: Sequence[Lane]) -> list[UUID]:
    """Choose tasks in turn from the lane that was served least, while its limits have room.

    A lane whose next task is too heavy for the rest of a window reserves it: lanes that were served more wait.
    """
    queue = [(lane.served or 0.0, place) for place, lane in enumerate(lanes)]
    heapq.heapify(queue)
    ids: list[UUID] = []
    while queue:
        served, place = heapq.heappop(queue)
        lane = lanes[place]
        if lane.admitted == len(lane.candidates) or lane.blocking_limit() is not None:
            lane.reserve()
            continue  # nothing more in this round: what others take gives it no room
        id_, weight = lane.candidates[lane.admitted]
        for limit in lane.limits:
            limit.admit(weight)
        lane.admitted += 1
        ids.append(id_)
        lane.served = served + weight / lane.share
        heapq.heappush(queue, (lane.served, place))
    return ids


async def _read_openings(
    connection: Connection, blocked: Sequence[tuple[Lane, LimitUsage]], now: datetime
) -> dict[str, datetime | None]:
    """Return the time at which each key that blocks a lane has room again."""
    first = {limit.key: (lane, limit) for lane, limit in reversed(blocked) if limit.period is not None}
    if not first:
        return {}
    parameters = {
        "keys": list(first),
        "dues": [limit.due for _, limit in first.values()],
        "due_weights": [float(limit.due_weight) for _, limit in first.values()],
        "weights": [float(limit.reserved or lane.next_weight) for lane, limit in first.values()],
        "now": now,
    }
    return {row["key"]: row["next_at"] for row in await run(connection, LIMITS["read_limit_openings"], parameters)}


def _describe_holds(
    lanes: Sequence[Lane], openings: Mapping[str, datetime | None], now: datetime
) -> list[dict[str, Any]]:
    """Return the limit that blocks each lane; without a key if none does, and tasks may only lack a worker."""
    holds: list[dict[str, Any]] = []
    for lane in lanes:
        limit = lane.blocking_limit()
        detail = None if limit is None else limit.hold_detail(lane.next_weight, openings.get(limit.key), now)
        holds.append({"keys": lane.keys, "key": None if limit is None else limit.key, "detail": detail})
    return holds


async def sweep_limits(
    connection: Connection, *, actor: str, served_only: bool = False, now: datetime | None = None
) -> list[UUID]:
    """Hold pending tasks in excess of their limits, and delete what no window contains any more.

    With `served_only`, pending tasks that no live worker would claim are held too.
    """
    async with duty_transaction(connection, "limits", now=now) as moment:
        await run(connection, LIMITS["walk_indexes"], {})
        await run(connection, TASKS["stamp_limit_starts"], {"now": now})
        past = {"batch": BATCH_SIZE, "now": moment}
        await run_in_order(
            connection, [(LIMITS["delete_past_limit_usage"], past), (LIMITS["delete_idle_limit_lanes"], {})]
        )
        held = await _hold_unserved_tasks(connection, actor, moment) if served_only else []
        keys = [row["key"] for row in await run(connection, LIMITS["read_admitted_keys"], {})]
        limits = await _read_limit_usage(connection, keys, moment) if keys else {}
        over = [(key, *limit.excess) for key, limit in limits.items() if limit.excess[0] > 0]
        if not over:
            return held
        names, counts, due_only = (list(column) for column in zip(*over, strict=True))
        parameters = {"keys": names, "tasks": counts, "due_only": due_only, "batch": BATCH_SIZE, "now": moment}
        excess: dict[str, list[UUID]] = {}
        for row in await run(connection, LIMITS["read_excess_tasks"], parameters):
            excess.setdefault(row["key"], []).append(row["id"])
        for key, ids in excess.items():
            limit = limits[key]
            _, is_rate = limit.excess
            detail = limit.hold_detail(1.0, None, moment) if is_rate else f"more than {limit.max_running} running"
            held += await hold_pending_tasks(connection, ids, actor=actor, held_by="limit", detail=detail, now=moment)
    return held


async def _hold_unserved_tasks(connection: Connection, actor: str, now: datetime) -> list[UUID]:
    """Hold pending tasks that no live worker would claim; the next admission writes which worker is missing."""
    rows = await run(connection, LIMITS["read_unserved_tasks"], {"batch": BATCH_SIZE, "now": now})
    if not rows:
        return []
    ids, detail = [row["id"] for row in rows], "no live worker would claim it"
    return await hold_pending_tasks(connection, ids, actor=actor, held_by="limit", detail=detail, now=now)


async def record_reported_usage(
    connection: Connection,
    outcomes: Iterable[Outcome],
    *,
    except_for: Container[UUID] = (),
    now: datetime | None = None,
) -> None:
    """Count the costs and correct the weights that attempts of limited tasks reported.

    Runs in the transaction of the settle. Lost attempts, `except_for`, have settled nothing.
    """
    outcomes = [outcome for outcome in outcomes if outcome.id not in except_for]
    costs = [outcome for outcome in outcomes if outcome.cost is not None]
    if costs:
        parameters = {
            "ids": [outcome.id for outcome in costs],
            "costs": [as_float(outcome.cost) for outcome in costs],
            "now": now,
        }
        await run_in_order(connection, [(LIMITS["insert_limit_costs"], parameters)])
    weights = [outcome for outcome in outcomes if outcome.weight is not None]
    if weights:
        parameters = {
            "ids": [outcome.id for outcome in weights],
            "attempts": [outcome.attempt for outcome in weights],
            "weights": [as_float(outcome.weight) for outcome in weights],
        }
        await run_in_order(connection, [(LIMITS["correct_limit_weights"], parameters)])


# --- Paused namespaces ---


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
