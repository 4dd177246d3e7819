"""History of the whole installation for charts: throughput, failures, durations and depth, from table `figures`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import TASK_ROW, TaskRowEvent, TaskRowState
from interlock.model.histogram import percentile
from interlock.store.figures import (
    FigureRange,
    floor_time,
    read_depths_over_time,
    read_histograms_over_time,
    read_moves_over_time,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.dashboard.counts import Namespaces
    from interlock.postgres.connection import Connection

# range in the URL -> length, grain of the rows in minutes, step between two points
STEPS: dict[str, tuple[timedelta, int, timedelta]] = {
    "1h": (timedelta(hours=1), 1, timedelta(minutes=1)),
    "6h": (timedelta(hours=6), 1, timedelta(minutes=5)),
    "24h": (timedelta(hours=24), 10, timedelta(minutes=20)),
    "7d": (timedelta(days=7), 10, timedelta(hours=2)),
}
MIN_STEP_S = 25.0  # of the last point
MIN_RATE_S = 120.0  # of its rates: the moves of the current minute are counted seldom under load
# states in which an attempt leaves a task that has ended: other ends are not work
ENDED = frozenset(
    target
    for source, event, target in TASK_ROW.rows
    if source is TaskRowState.RUNNING and target in TASK_ROW.final and event is not TaskRowEvent.CANCEL
)
FAILED_ATTEMPT = frozenset({"fail", "retry", "expire", "exhaust"})
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def figure_range(key: str, now: datetime, namespaces: Namespaces) -> FigureRange:
    """Return the rows to read for a range of the URL."""
    length, grain, step = STEPS[key]
    return FigureRange(floor_time(now, step) - length, grain, step, namespaces)


@dataclass(slots=True)
class History:
    """Series by step of time, oldest first; None where nothing is known."""

    times: list[datetime]
    step_s: float
    done: list[float | None] = field(default_factory=list)  # per second
    errors: list[float | None] = field(default_factory=list)
    failures: list[float | None] = field(default_factory=list)  # attempts that failed, per step
    depth: list[float | None] = field(default_factory=list)
    waits: dict[str, list[float | None]] = field(default_factory=dict)
    runs: dict[str, list[float | None]] = field(default_factory=dict)
    ended: int = 0  # tasks, in the whole range
    failed: int = 0  # attempts
    attempts: int = 0
    in_error: int = 0  # tasks that ended in error
    oldest_due_at: float | None = None  # of the newest sample, in seconds since the epoch

    @property
    def failure_share(self) -> float | None:
        """Failed attempts as a share of all that ended; None if none did."""
        return self.failed / self.attempts if self.attempts else None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known yet."""
        return not self.attempts and not any(self.depth) and not any(value for value in self.waits.get("p50", ()))

    def latest(self, series: Sequence[float | None]) -> float | None:
        """Return the newest known value."""
        return next((value for value in reversed(series) if value is not None), None)


async def read_history(connection: Connection, key: str, now: datetime, namespaces: Namespaces) -> History:
    """Read the history of a range: three statements."""
    wanted = figure_range(key, now, namespaces)
    length, _, step = STEPS[key]
    times = [wanted.since + step * at for at in range(length // step + 1)]
    if (now - times[-1]).total_seconds() < MIN_STEP_S:  # too little is counted yet
        times.pop()
    places = {moment: at for at, moment in enumerate(times)}
    history = History(times, step.total_seconds())
    moves = await read_moves_over_time(connection, wanted, ["task"])
    _add_moves(history, moves, places, now)
    _add_durations(history, await read_histograms_over_time(connection, wanted), places)
    depth: list[float | None] = [None] * len(times)
    for row in await read_depths_over_time(connection, wanted):
        if row["at"] in places:
            depth[places[row["at"]]] = row["pending"] or 0
            history.oldest_due_at = row["oldest_at"]
    history.depth = depth
    return history


def _add_moves(history: History, rows: list[dict[str, Any]], places: dict[datetime, int], now: datetime) -> None:
    size = len(places)
    done, errors, failures = [0.0] * size, [0.0] * size, [0.0] * size
    for row in rows:
        place, total = places.get(row["at"]), row["total"]
        if place is None:
            continue
        if row["to_state"] == "done":
            done[place] += total
        elif row["to_state"] == "error":
            errors[place] += total
            history.in_error += total
        if row["to_state"] in ENDED:
            history.ended += total
        if row["from_state"] == "running" and (row["event"] in FAILED_ATTEMPT or row["event"] == "succeed"):
            history.attempts += total
            if row["event"] in FAILED_ATTEMPT:
                failures[place] += total
                history.failed += total
    lengths = [history.step_s] * size
    lengths[-1] = min(history.step_s, max((now - history.times[-1]).total_seconds(), 1.0))
    history.done = [value / length for value, length in zip(done, lengths, strict=True)]
    history.errors = [value / length for value, length in zip(errors, lengths, strict=True)]
    history.failures = list(failures)
    if lengths[-1] < min(history.step_s, MIN_RATE_S):  # the last step is not over
        history.done[-1] = history.errors[-1] = history.failures[-1] = None


def _add_durations(history: History, rows: list[dict[str, Any]], places: dict[datetime, int]) -> None:
    found: dict[str, dict[str, list[float | None]]] = defaultdict(
        lambda: {name: [None] * len(places) for name in SHARES}
    )
    for row in rows:
        if row["at"] in places:
            for name, share in SHARES.items():
                found[row["kind"]][name][places[row["at"]]] = percentile(row["positions"], row["counts"], share)
    history.waits, history.runs = found["wait"], found["run"]
