"""What a sort is told and what it tells: settings, progress, reports. Plain values, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import SortInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Told = Callable[["Progress"], None]

MEBIBYTE = 1 << 20
FAILED = 3  # the exit code of a worker process that has told its master why it failed
UNTOLD = 4  # that of one whose master does not know; the reason is on its standard output
LEAST_MEMORY = 64 * MEBIBYTE
MOST_PARTITIONS = 10_000
HIDDEN = ".interlock-sort"  # in the output directory: unfinished work, when no other place is given


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a sort is run; times in seconds, memory in bytes.

    `memory` is what all processes of a local run may use together, or what one worker of a distributed one may use.
    `partitions` is the number of output files in all; one per worker when it is not given. `registering` is how long
    the master waits for its workers, `sampling` to `merging` how long a phase may take, and `lost` how long a process
    may be silent before the others give it up. `block_records`, `window_records` and `resident` (memory for rows
    between the phases, as a share of what would keep them all from files) follow from the size of the input and the
    memory when they are not given.
    """

    memory: int = 2048 * MEBIBYTE
    partitions: int | None = None
    registering: float = 600.0
    sampling: float = 3600.0
    sorting: float = 24 * 3600.0
    shuffling: float = 24 * 3600.0
    merging: float = 24 * 3600.0
    lost: float = 60.0
    block_records: int | None = None
    window_records: int | None = None
    resident: float | None = None

    def __post_init__(self) -> None:
        if self.memory < LEAST_MEMORY:
            raise SortInputError(f"{self.memory:,} bytes of memory are too few: a worker needs {LEAST_MEMORY:,}")
        if self.partitions is not None and not 1 <= self.partitions <= MOST_PARTITIONS:
            raise SortInputError(f"{self.partitions} partitions: 1 to {MOST_PARTITIONS:,} are possible")
        for name in ("registering", "sampling", "sorting", "shuffling", "merging", "lost"):
            if getattr(self, name) <= 0:
                raise SortInputError(f"a time limit must be positive; {name} is {getattr(self, name)}")


class Moved(NamedTuple):
    """One move of a master or worker, as its history tells it; the time is in seconds since the epoch."""

    from_state: str
    to_state: str
    event: str
    reason: str
    timestamp: float


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """How far one worker is: percent by the weights of the phases, bytes it has finished in this phase."""

    index: int
    address: str
    state: str
    phase: str
    percent: float
    message: str
    bytes_done: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the whole sort is; `bytes_total` is the size of the input."""

    state: str
    workers: tuple[WorkerProgress, ...]
    bytes_total: int
    elapsed: float


@dataclass(frozen=True, slots=True)
class Partition:
    """One finished output file."""

    number: int
    path: str
    records: int
    size: int


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker did.

    `peak_memory` is the largest resident size of its process in bytes, `reused` the number of sorted blocks, received
    slices and output files that an earlier start of it had finished, `starts` how often it was started in this sort.
    """

    index: int
    address: str
    records: int
    partitions: tuple[Partition, ...]
    phases: Mapping[str, float]
    history: tuple[Moved, ...]
    peak_memory: int
    reused: int = 0
    starts: int = 1

    def json(self) -> dict[str, Any]:
        """Give it as a JSON document."""
        return {
            "index": self.index,
            "address": self.address,
            "records": self.records,
            "partitions": [
                {"number": one.number, "path": one.path, "records": one.records, "bytes": one.size}
                for one in self.partitions
            ],
            "phases": dict(self.phases),
            "history": [move._asdict() for move in self.history],
            "peak_memory": self.peak_memory,
            "reused": self.reused,
            "starts": self.starts,
        }

    @classmethod
    def of(cls, document: dict[str, Any]) -> WorkerReport:
        """Make it from its JSON document."""
        partitions = (
            Partition(one["number"], one["path"], one["records"], one["bytes"]) for one in document["partitions"]
        )
        history = (Moved(**move) for move in document["history"])
        return cls(**{**document, "partitions": tuple(partitions), "history": tuple(history)})


@dataclass(frozen=True, slots=True)
class Report:
    """What the whole sort did: output files in order, workers in order, durations of the phases, the master's moves."""

    records: int
    size: int
    seconds: float
    phases: Mapping[str, float]
    history: tuple[Moved, ...]
    workers: tuple[WorkerReport, ...] = field(default=())

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The output files of all workers, in the order of the records."""
        return tuple(partition for worker in self.workers for partition in worker.partitions)

    def json(self) -> dict[str, Any]:
        """Give it as a JSON document."""
        return {
            "records": self.records,
            "bytes": self.size,
            "seconds": self.seconds,
            "phases": dict(self.phases),
            "history": [move._asdict() for move in self.history],
            "workers": [worker.json() for worker in self.workers],
        }
