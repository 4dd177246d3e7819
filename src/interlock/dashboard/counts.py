"""Live numbers of every lifecycle: entities by state, and moves per second.

The number of tasks in a state is a full count, taken at most every ten minutes, plus the moves recorded since. Moves
are kept by second. A record becomes visible when its transaction commits, so that the latest seconds are read again and
replaced.

Invariant: the count of a state equals the table's, up to rows that retention deleted since the last full count and
transactions that stayed open longer than `LATE_COMMIT_S` after a move.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.lifecycle import SortMasterState, SortWorkerState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    Namespaces = frozenset[str] | None  # None: all

RECENT_S = 3  # seconds of moves that each reading replaces
LATE_COMMIT_S = 30  # and that a reading replaces every ten seconds
KEPT_S = 75  # seconds of moves that are kept: a minute for sparklines, and what may still change
RATE_S = 5  # seconds over which a rate is averaged
# the state of the master of a sort, from that of its slowest worker; a worker that waits has done its part of the phase
MASTER_OF = {
    SortWorkerState.INITIALIZING: SortMasterState.REGISTERING,
    SortWorkerState.SAMPLING: SortMasterState.SAMPLING,
    SortWorkerState.WAITING_FOR_PARTITION_CONFIG: SortMasterState.SAMPLING,
    SortWorkerState.SORTING: SortMasterState.SORTING,
    SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL: SortMasterState.SORTING,
    SortWorkerState.SHUFFLING: SortMasterState.SHUFFLING,
    SortWorkerState.WAITING_FOR_MERGE_SIGNAL: SortMasterState.SHUFFLING,
    SortWorkerState.MERGING: SortMasterState.MERGING,
    SortWorkerState.COMPLETED: SortMasterState.MERGING,
}
STORED_MACHINES = {"task": "task", "job": "job", "supervised-worker": "worker"}  # machine -> name in the sections


class Transition(NamedTuple):
    """A move of a lifecycle; `source` is None where an entity begins."""

    source: str | None
    event: str
    target: str


class MachineCounts:
    """The entities of one lifecycle by namespace and state, and its moves of the last minute."""

    def __init__(self) -> None:
        self._base: Counter[tuple[str, str]] = Counter()
        self._base_second = 0  # the moves of this second and later are not in the base
        self.seconds: dict[int, Counter[tuple[str, Transition]]] = {}

    def replace_moves(self, rows: Iterable[Mapping[str, Any]], since: int) -> None:
        """Replace the moves of all seconds from `since` on, and add seconds that no longer change to the base."""
        for second in [second for second in self.seconds if second >= since]:
            del self.seconds[second]
        for row in rows:
            if row["second"] >= since:
                moves = self.seconds.setdefault(row["second"], Counter())
                move = Transition(row["from_state"], row["event"], row["to_state"])
                moves[row["namespace"], move] += row["moves"]

    def replace_base(self, counted: Iterable[Mapping[str, Any]], since: int) -> None:
        """Take a full count of the same snapshot as the moves since `since`."""
        self._base = Counter({(row["namespace"], row["state"]): row["rows"] for row in counted})
        for second, moves in self.seconds.items():
            if second >= since:
                self._apply(moves, -1)
        self._base_second = since

    def fold(self, before: int) -> None:
        """Add the moves of earlier seconds to the base, and forget them."""
        for second in sorted(second for second in self.seconds if second < before):
            moves = self.seconds.pop(second)
            if second >= self._base_second:
                self._apply(moves, 1)
        self._base_second = max(self._base_second, before)

    def _apply(self, moves: Counter[tuple[str, Transition]], sign: int) -> None:
        for (namespace, move), count in moves.items():
            self._base[namespace, move.target] += sign * count
            if move.source is not None:
                self._base[namespace, move.source] -= sign * count

    def states(self, namespaces: Namespaces = None) -> Counter[str]:
        """Count the entities by state."""
        found: Counter[str] = Counter()
        for (namespace, state), count in self._base.items():
            if namespaces is None or namespace in namespaces:
                found[state] += count
        for second, moves in self.seconds.items():
            if second < self._base_second:
                continue
            for (namespace, move), count in moves.items():
                if namespaces is None or namespace in namespaces:
                    found[move.target] += count
                    if move.source is not None:
                        found[move.source] -= count
        return Counter({state: max(count, 0) for state, count in found.items()})

    def namespaces(self) -> set[str]:
        """List the namespaces that have entities."""
        found = {namespace for (namespace, _), count in self._base.items() if count > 0}
        found.update(namespace for moves in self.seconds.values() for namespace, _ in moves)
        return found - {""}

    def rates(self, second: int, namespaces: Namespaces = None) -> dict[Transition, float]:
        """Return moves per second, over the last complete seconds before `second`."""
        found: dict[Transition, float] = defaultdict(float)
        for at in range(second - RATE_S, second):
            for (namespace, move), count in self.seconds.get(at, {}).items():
                if namespaces is None or namespace in namespaces:
                    found[move] += count / RATE_S
        return dict(found)

    def history(self, second: int, length: int, namespaces: Namespaces = None) -> dict[str, list[int]]:
        """Return the number of entities by state at the end of each of the last seconds, oldest first."""
        now = self.states(namespaces)
        lines: dict[str, list[int]] = {state: [count] for state, count in now.items()}
        running = Counter(now)
        for at in range(second, second - length, -1):
            for (namespace, move), count in self.seconds.get(at, {}).items():
                if namespaces is None or namespace in namespaces:
                    running[move.target] -= count
                    if move.source is not None:
                        running[move.source] += count
            for state, line in lines.items():
                line.append(max(running[state], 0))
        return {state: line[::-1] for state, line in lines.items()}


def master_state(workers: Collection[str]) -> str:
    """Return the state of a sort's master while its workers are in these states."""
    order = [str(state) for state in MASTER_OF]
    slowest = min((order.index(state) for state in workers if state in order), default=0)
    return MASTER_OF[SortWorkerState(order[slowest])]


class LiveCounts:
    """The numbers of all lifecycles that the database enforces, and of those that live in processes."""

    def __init__(self) -> None:
        self.machines = {machine: MachineCounts() for machine in STORED_MACHINES}
        self.second = 0  # the last second that was read, by the server's clock
        self.counted_second: int | None = None  # of the last full count
        self.by_namespace = False
        self.processes: list[dict[str, Any]] = []
        self.sorts: list[dict[str, Any]] = []  # that run on the engine: namespace, and the states of the workers
        self._pending_in: set[str] = set()

    def update(self, read: Mapping[str, list[dict[str, Any]]], second: int, window_s: int) -> None:
        """Take the sections of one reading."""
        since = second - window_s
        for machine, section in STORED_MACHINES.items():
            counts = self.machines[machine]
            if f"{section}_moves" in read:
                counts.replace_moves(read[f"{section}_moves"], since)
            if f"{section}_states" in read:
                counts.replace_base(read[f"{section}_states"], since)
            counts.fold(second - KEPT_S)
        if "processes" in read:
            self.processes = read["processes"]
        self.sorts = read.get("running_sorts", self.sorts)
        self._pending_in = {row["namespace"] for row in read.get("namespaces", ())}
        if "task_states" in read:
            self.counted_second = second
        self.second = second

    def states(self, machine: str, namespaces: Namespaces = None) -> Counter[str]:
        """Count the entities of a lifecycle by state; of those in memory, as heartbeats and steps report them."""
        if machine in self.machines:
            return self.machines[machine].states(None if machine == "supervised-worker" else namespaces)
        found: Counter[str] = Counter()
        if machine in {"sort-worker", "sort-master"}:
            for sort in self.sorts:
                if namespaces is None or sort["namespace"] in namespaces:
                    found.update(sort["states"] if machine == "sort-worker" else [master_state(sort["states"])])
            return found
        for process in self._shown_processes(namespaces):
            found.update((process.get("machines") or {}).get(machine) or {})
        return found

    def rates(self, machine: str, namespaces: Namespaces = None) -> dict[Transition, float]:
        """Return the moves per second of a lifecycle."""
        if machine not in self.machines:
            return {}
        return self.machines[machine].rates(self.second, None if machine == "supervised-worker" else namespaces)

    def namespaces(self) -> set[str]:
        """List the namespaces that are known: of pending tasks, of workers, and of the last full count."""
        served = {name for process in self.processes for name in process["namespaces"]}
        return served.union(self._pending_in, *(counts.namespaces() for counts in self.machines.values()))

    def slots(self, namespaces: Namespaces = None) -> int:
        """Return the number of tasks that the live workers can run at once."""
        return sum(process["slots"] for process in self._shown_processes(namespaces))

    def workers(self, namespaces: Namespaces = None) -> int:
        """Return the number of live workers."""
        return sum(1 for process in self._shown_processes(namespaces) if process["role"] == "worker")

    def _shown_processes(self, namespaces: Namespaces) -> list[dict[str, Any]]:
        if namespaces is None:
            return self.processes
        return [process for process in self.processes if namespaces.intersection(process["namespaces"])]
