"""Settings, progress and reports of a sort: plain values without I/O."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import SortInputError
from interlock.lifecycle import SortWorkerState
from interlock.sort.memory_plan import format_megabytes, least_worker_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    ProgressCallback = Callable[["Progress"], None]
    SaveCallback = Callable[[dict[str, Any]], object]

MEBIBYTE = 1 << 20
MIN_WORKER_MEMORY = least_worker_memory(1, 0, 1)
MAX_PARTITIONS = 10_000
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
UNIT_EXPONENTS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
# States in which work is done, of master and workers alike; their durations are reported.
PHASES = (SortWorkerState.SAMPLING, SortWorkerState.SORTING, SortWorkerState.SHUFFLING, SortWorkerState.MERGING)
UNPACKED_DIRECTORY = ".interlock-sort-input"  # copies of compressed inputs and of standard input
WORK_DIRECTORY = ".interlock-sort"  # default name of the work directory, inside the output directory
TOKEN_FILE = "token"  # noqa: S105 - the name of a file in the work directory, for workers that an engine places
EXIT_FAILURE_REPORTED = 3  # exit code of a worker process that reported its failure to the master
EXIT_FAILURE_UNREPORTED = 4  # exit code of one that could not; the reason is on its standard output


class Engine(StrEnum):
    """The engine that starts the workers of a sort."""

    LOCAL = "local"
    INTERLOCK = "interlock"
    RAY = "ray"


class Compression(StrEnum):
    """How output files are compressed."""

    GZIP = "gzip"
    ZSTD = "zstd"

    @property
    def suffix(self) -> str:
        """The end of the names of such files."""
        return {"gzip": ".gz", "zstd": ".zst"}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a sort runs; durations in seconds, memory in bytes.

    `memory` is the limit of all processes of a local sort together, or of one worker of a distributed one.
    `workers` is their number, for the plan of the memory; unknown to a worker that is started by itself if it is None.
    `partitions` is the number of output files in total; one per worker if it is None. `register_timeout_s` is how long
    the master waits for its workers to register, `sample_timeout_s` to `merge_timeout_s` how long a phase may take, and
    `lost_after_s` how long a process may send no heartbeat before the others consider it lost. `block_records`,
    `window_records` and `resident_share` (memory for rows between the phases, as a share of what would keep all of
    them out of files) are derived from the input size and the memory if they are None. `compression` is that of the
    output files.
    """

    memory: int = 2048 * MEBIBYTE
    workers: int | None = None
    partitions: int | None = None
    register_timeout_s: float = 600.0
    sample_timeout_s: float = 3600.0
    sort_timeout_s: float = 24 * 3600.0
    shuffle_timeout_s: float = 24 * 3600.0
    merge_timeout_s: float = 24 * 3600.0
    lost_after_s: float = 60.0
    block_records: int | None = None
    window_records: int | None = None
    resident_share: float | None = None
    compression: Compression | None = None

    def __post_init__(self) -> None:
        if self.compression is not None:  # a plain string, from JSON
            object.__setattr__(self, "compression", parse_compression(self.compression))
        if self.memory < MIN_WORKER_MEMORY:
            raise SortInputError(
                f"{self.memory:,} bytes of memory are too few: a worker needs {format_megabytes(MIN_WORKER_MEMORY)}"
            )
        if self.partitions is not None and not 1 <= self.partitions <= MAX_PARTITIONS:
            raise SortInputError(f"partitions must be between 1 and {MAX_PARTITIONS:,}, got {self.partitions}")
        for name in (
            "register_timeout_s",
            "sample_timeout_s",
            "sort_timeout_s",
            "shuffle_timeout_s",
            "merge_timeout_s",
            "lost_after_s",
        ):
            if getattr(self, name) <= 0:
                raise SortInputError(f"{name} must be greater than 0, got {getattr(self, name):g}")

    def json(self) -> dict[str, Any]:
        """Return the settings as a JSON document, of which the constructor takes the values."""
        return {**asdict(self), "compression": None if self.compression is None else str(self.compression)}

    def partition_name(self, number: int) -> str:
        """Return the name of an output file."""
        return f"partition.{number}{self.compression.suffix if self.compression is not None else ''}"


def parse_compression(name: str) -> Compression:
    """Parse the name of a compression."""
    try:
        return Compression(name)
    except ValueError as error:
        raise SortInputError(f"compression must be {' or '.join(Compression)}, got {name!r}") from error


def parse_size(option: str, text: str) -> int:
    """Parse a number of bytes: 64MB, 2GB, 1.5GiB, 1000."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise SortInputError(f"{option} {text!r} is not a size; write 64MB, 2GB, 1.5GiB or a number of bytes")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** UNIT_EXPONENTS[unit.lower()])


class TransitionRecord(NamedTuple):
    """One state transition of a master or worker in its history.

    The timestamp is in seconds since the epoch; `elapsed` in seconds since the process started, by a clock that is
    never set, after those of earlier processes.
    """

    from_state: str
    to_state: str
    event: str
    reason: str
    timestamp: float
    elapsed: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Progress of one worker: percent of the whole sort, weighted by phase, and bytes done in the current phase."""

    index: int
    address: str
    state: str
    phase: str
    percent: float
    message: str
    bytes_done: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the whole sort; `bytes_total` is the size of the input, `elapsed` in seconds."""

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
    """The report of one worker.

    `peak_memory` is the largest resident set size of its process in bytes, `reused` the number of sorted blocks,
    received slices and output files that an earlier start of it had finished, `starts` the number of its starts.
    """

    index: int
    address: str
    records: int
    partitions: tuple[Partition, ...]
    phases: Mapping[str, float]
    history: tuple[TransitionRecord, ...]
    peak_memory: int
    reused: int = 0
    starts: int = 1

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {
            "index": self.index,
            "address": self.address,
            "records": self.records,
            "partitions": [
                {"number": one.number, "path": one.path, "records": one.records, "bytes": one.size}
                for one in self.partitions
            ],
            "phases": dict(self.phases),
            "history": [transition._asdict() for transition in self.history],
            "peak_memory": self.peak_memory,
            "reused": self.reused,
            "starts": self.starts,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> WorkerReport:
        """Read the report from its JSON document."""
        partitions = (
            Partition(one["number"], one["path"], one["records"], one["bytes"]) for one in document["partitions"]
        )
        history = (TransitionRecord(**one) for one in document["history"])
        return cls(**{**document, "partitions": tuple(partitions), "history": tuple(history)})


@dataclass(frozen=True, slots=True)
class Report:
    """The report of the whole sort: workers in order, durations of the phases in seconds, history of the master."""

    records: int
    size: int
    seconds: float
    phases: Mapping[str, float]
    history: tuple[TransitionRecord, ...]
    workers: tuple[WorkerReport, ...] = field(default=())

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The output files of all workers, in the order of their records."""
        return tuple(partition for worker in self.workers for partition in worker.partitions)

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {
            "records": self.records,
            "bytes": self.size,
            "seconds": self.seconds,
            "phases": dict(self.phases),
            "history": [transition._asdict() for transition in self.history],
            "workers": [worker.json() for worker in self.workers],
        }
