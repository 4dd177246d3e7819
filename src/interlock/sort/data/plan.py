"""The plan of a sort: the roster of workers, the owners of partitions, the boundaries, and the sample they come from.

A boundary is a key and an input position, so that records with one key can be divided too. If the end of a partition is
a quantile of s independent samples per partition, its size is off by about 1/sqrt(s), and the largest of P partitions
by about sqrt(2 ln(P) / s): 8,000 samples per partition keep the largest of 256 within 4 % of an even share, and within
5 % in nearly every run.

The sample is read in short runs of records, each from a random position in one of many equal sections of the input.
Input that is already sorted is thus sampled evenly, and input that is sorted locally in as many places as there are
reads. If neighbouring records have nearly equal keys, one read is worth no more than one sample, and s is the number of
reads: 1,000 per partition, limited by `max_reads` for one worker. The samples of all workers together fit one message:
about 8,000 for each of 256 partitions with keys of 10 bytes, fewer for more partitions or longer keys.

Invariant: the plan depends only on the input and the order of the workers, so that every process that is restarted
makes the same blocks, slices and files.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from interlock.sort import wire_pb2 as wire
from interlock.sort.data.checksum import mix_bits
from interlock.sort.data.keys import Boundary, sort_rows
from interlock.sort.data.line_order import LineOrder
from interlock.sort.data.lines import PADDING_BYTES, scan_lines, sort_lines
from interlock.sort.memory_plan import INDEX_BYTES_PER_ROW, max_buffer_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from interlock.sort.data.keys import Rows
    from interlock.sort.data.records import Source
    from interlock.sort.settings import Settings

POSITION_BITS = 44  # of an input position; the worker's index is above them

# Sizes of blocks and windows
CACHED_BYTES = 13_107_200  # 131,072 records of 100 bytes, which stay in the processor's cache while they are gathered
TARGET_BLOCKS = 48  # per worker, at most
MEMORY_DIVISOR = 12  # a block, and a window, takes at most this fraction of the memory
MAX_BLOCK_RECORDS = 1 << 24
BLOCK_COST_PER_LINE = 96  # bytes by which blocks of short lines are smaller: their index should fit the cache
BYTES_KEY_INDEX_BYTES = 168  # to sort a line, beside the line itself, at the most; measured for keys of bytes
NUMBER_KEY_INDEX_BYTES = 208  # and for numeric keys
PACKED_SHARE = 1.25  # of the rows, for a packed copy of rows that do not become smaller and its spare room
LONG_LINE_BYTES = 96  # lines from this length on are sorted in blocks as large as those of records
MAX_LINE_BYTES = 1 << 30  # by which a block of lines may be larger than planned

# Limits of the message that carries the boundaries
MAX_WINDOWS = 20_000
MAX_BOUNDARIES_BYTES = 40 << 20
BOUNDARY_OVERHEAD_BYTES = 24  # of a boundary in the message, at most, beside its key

# Sampling
SAMPLES_PER_PARTITION = 8_000
SAMPLES_PER_WINDOW = 64
RECORDS_PER_READ = 8
MIN_READS, MAX_READS = 2_000, 32_000  # of one worker, by the size of its input
READ_COST_BYTES = 128 << 10  # a read at a random position takes about as long as reading this many bytes in sequence
MAX_SAMPLE_BYTES = 40 << 20  # keys and positions of all workers together, which the master holds and sorts
POSITION_BYTES = 8
MAX_DIVIDER_BYTES = 1024  # of a sampled line; of a longer one, fields that are in no key are left out, then the rest
MIN_LINE_READ_BYTES = 1024
LINE_FEED = ord("\n")
READ_BATCH_BYTES = 1 << 20  # records read at once, of which only the keys are kept
READER_THREADS = 8
SAMPLE_SEED = 20251024


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a sort, as the other workers see it."""

    index: int
    address: str
    incarnation: int
    records: int
    block_records: int
    completed: bool = False

    @property
    def blocks(self) -> int:
        """The number of source blocks of this worker."""
        return -(-self.records // self.block_records)

    def max_block_records(self, *, has_lines: bool) -> int:
        """Return how many records a block may have; one of lines extends to the end of its last line."""
        return self.block_records + (MAX_LINE_BYTES if has_lines else 0)


@dataclass(frozen=True, slots=True)
class Roster:
    """The workers of a sort and their addresses; a higher version replaces a lower one."""

    version: int
    members: tuple[Member, ...]

    def message(self) -> wire.Roster:
        """Return the roster as a message."""
        return wire.Roster(
            version=self.version,
            members=[
                wire.Member(
                    index=one.index,
                    address=one.address,
                    incarnation=one.incarnation,
                    records=one.records,
                    block_records=one.block_records,
                    completed=one.completed,
                )
                for one in self.members
            ],
        )

    @classmethod
    def from_message(cls, message: wire.Roster) -> Roster:
        """Read the roster from a message."""
        return cls(
            message.version,
            tuple(
                Member(one.index, one.address, one.incarnation, one.records, one.block_records, one.completed)
                for one in message.members
            ),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Boundaries and owners of the partitions; a partition is merged in `windows` consecutive windows."""

    epoch: int
    partitions: int
    windows: int
    boundaries: tuple[Boundary, ...]
    roster: Roster

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.roster.members)

    def owned(self, worker: int) -> range:
        """Return the partitions that a worker writes."""
        return range(worker * self.partitions // self.workers, (worker + 1) * self.partitions // self.workers)

    def edges(self, cuts: list[int], partition: int) -> list[int]:
        """Return the row numbers at which the windows of a partition begin and end; `cuts` has those of all windows."""
        return cuts[partition * self.windows : (partition + 1) * self.windows + 1]

    def extent(self, cuts: list[int], worker: int) -> tuple[int, int]:
        """Return the row numbers at which the rows of a worker's partitions begin and end."""
        owned = self.owned(worker)
        return cuts[owned.start * self.windows], cuts[owned.stop * self.windows]

    def digest(self) -> str:
        """Return a hash of the division of records, independent of the epoch and the addresses of the workers."""
        division = repr((self.partitions, self.windows, self.boundaries, self.workers))
        return xxhash.xxh3_64_hexdigest(division.encode())

    def message(self) -> wire.PartitionConfig:
        """Return the plan as a message."""
        return wire.PartitionConfig(
            epoch=self.epoch,
            partitions=self.partitions,
            windows=self.windows,
            keys=[one.key for one in self.boundaries],
            positions=[one.position for one in self.boundaries],
            roster=self.roster.message(),
        )

    @classmethod
    def from_message(cls, message: wire.PartitionConfig) -> Plan:
        """Read the plan from a message."""
        boundaries = tuple(map(Boundary, message.keys, message.positions))
        return cls(message.epoch, message.partitions, message.windows, boundaries, Roster.from_message(message.roster))


def first_position(worker: int) -> int:
    """Return the position of a worker's first record in the whole input."""
    return worker << POSITION_BITS


def choose_block_records(source: Source, settings: Settings) -> int:
    """Return how many records are sorted at once: as many as fit the cache, or more to avoid too many blocks."""
    length = row_cost(source)
    if settings.block_records is not None:
        return settings.block_records
    wanted = max(int(CACHED_BYTES / length), -(-source.records // TARGET_BLOCKS))
    most = MAX_BLOCK_RECORDS if source.format.lines is None else MAX_LINE_BYTES
    return max(1, min(wanted, _max_records(source, settings), most))


def choose_window_records(source: Source, settings: Settings) -> int:
    """Return how many records are merged at once: fewer than a block has, since sampled boundaries are inexact."""
    if settings.window_records is not None:
        return settings.window_records
    length = row_cost(source)
    wanted = max(int(CACHED_BYTES / length), choose_block_records(source, settings) * 4 // 5)
    return max(1, min(wanted, _max_records(source, settings) * 4 // 5))


def _max_records(source: Source, settings: Settings) -> int:
    """Return how many records a block may have, as the memory allows."""
    by_memory = int(settings.memory / MEMORY_DIVISOR / row_cost(source))
    length = source.format.record_length
    return min(
        by_memory, max_buffer_records(settings.memory, settings.workers, length, overhead_bytes(source, settings))
    )


def index_bytes(source: Source) -> float:
    """Return the bytes that it takes to sort a row, beside the row itself."""
    if source.format.lines is None:
        return INDEX_BYTES_PER_ROW
    has_numbers = any(key.numeric for key in source.format.lines.comparisons)
    return (NUMBER_KEY_INDEX_BYTES if has_numbers else BYTES_KEY_INDEX_BYTES) / max(source.line_length, 1)


def overhead_bytes(source: Source, settings: Settings) -> float:
    """Return the bytes of a buffer for each row beside the row: its index, and its packed copy if any."""
    packed = 0 if settings.compression is None else PACKED_SHARE * source.format.record_length
    return index_bytes(source) + packed


def row_cost(source: Source) -> float:
    """Return the bytes by which blocks are measured for each row: the index of short lines counts too."""
    if source.format.lines is None:
        return source.format.record_length
    cost = BLOCK_COST_PER_LINE / max(source.line_length, 1)
    return max(1.0, (1 + cost) / (1 + BLOCK_COST_PER_LINE / LONG_LINE_BYTES))


def is_resident(block: int, share: float) -> bool:
    """Return whether a sorted block stays in memory, if a share of all blocks does; those are spread evenly."""
    return int((block + 1) * share) > int(block * share)


def max_boundaries(key_length: int) -> int:
    """Return how many boundaries fit the message that carries them to a worker."""
    return min(MAX_WINDOWS, MAX_BOUNDARIES_BYTES // (key_length + BOUNDARY_OVERHEAD_BYTES))


def window_count(records: int, partitions: int, window_records: int, key_length: int) -> int:
    """Return into how many windows each partition is divided."""
    return max(1, min(-(-records // (partitions * window_records)), max_boundaries(key_length) // partitions))


class Sample:
    """Sampled keys of one worker's input with their positions, and the number of records of that input.

    The keys of lines are the lines themselves, one behind the other, or MAX_DIVIDER_BYTES of them.
    """

    def __init__(self, keys: Rows, positions: NDArray[np.uint64], records: int) -> None:
        self.keys = keys
        self.positions = positions
        self.records = records


def sampled_key_bytes(source: Source) -> int:
    """Return the bytes of a sampled key: of a line, those that are kept, by the estimated length of lines."""
    return max(source.format.key_length, min(source.line_length, MAX_DIVIDER_BYTES))


def sample_size(records: int, window_records: int, key_length: int, partitions: int, workers: int) -> int:
    """Return how many keys one worker samples: enough for its share of the partitions, and for its windows."""
    wanted = max(SAMPLES_PER_PARTITION * partitions // workers, SAMPLES_PER_WINDOW * records // window_records)
    return max(1, min(wanted, MAX_SAMPLE_BYTES // workers // (key_length + POSITION_BYTES)))


def take_sample(source: Source, first: int, size: int) -> Sample:
    """Read about `size` keys of a source whose first record has the position `first`."""
    if source.format.lines is not None:
        return _take_sample_of_lines(source, first, size)
    key_length = source.format.key_length
    starts, count = choose_reads(source.records, size, max_reads(source.size))
    if not len(starts):
        return Sample(np.empty((0, key_length), np.uint8), np.empty(0, np.uint64), source.records)
    with ThreadPoolExecutor(READER_THREADS) as readers:
        parts = max(READER_THREADS, len(starts) * count * source.format.record_length // READ_BATCH_BYTES)
        batches = (batch.tolist() for batch in np.array_split(starts, parts))
        pieces = list(readers.map(lambda batch: source.read_many(batch, count)[:, :key_length].copy(), batches))
    numbers = (starts[:, None] + np.arange(count, dtype=np.int64)).reshape(-1)
    return Sample(np.concatenate(pieces), numbers.astype(np.uint64) + np.uint64(first), source.records)


class _SampledLine(NamedTuple):
    """A line of the sample with its line feed, and whether all of it was read."""

    position: int
    line: bytes
    is_whole: bool


def _take_sample_of_lines(source: Source, first: int, size: int) -> Sample:
    """Read about `size` lines.

    What is read of the last line of each read divides the lines too, unless its keys may be behind that.
    """
    order = source.format.lines or LineOrder()
    some_lines = (RECORDS_PER_READ + 1) * min(source.line_length, MAX_DIVIDER_BYTES)
    read = max(MIN_LINE_READ_BYTES, some_lines, 2 * source.line_length)  # at least one whole line
    reads = min(-(-size // RECORDS_PER_READ), max_reads(source.size), -(-source.records // read))
    if not reads:
        return Sample(np.empty(0, np.uint8), np.empty(0, np.uint64), 0)
    starts, read = choose_reads(source.records, reads * read, reads)
    wanted = -(-size // len(starts))

    def sample(batch: list[int]) -> list[_SampledLine]:
        found: list[_SampledLine] = []
        for start, row in zip(batch, source.read_many(batch, read).reshape(-1, read), strict=True):
            text = row.tobytes()
            begin = 0 if not start else text.find(b"\n") + 1
            for _ in range(wanted if begin or not start else 0):
                if begin >= len(text):
                    break
                end = text.find(b"\n", begin)
                is_whole, end = end >= 0, len(text) if end < 0 else end
                line = order.shorten(text[begin:end], MAX_DIVIDER_BYTES) + b"\n"
                found.append(_SampledLine(first + start + begin, line, is_whole))
                begin = end + 1
        return found

    with ThreadPoolExecutor(READER_THREADS) as readers:
        parts = max(READER_THREADS, len(starts) * read // READ_BATCH_BYTES)
        batches = (batch.tolist() for batch in np.array_split(starts, parts))
        found = list(chain.from_iterable(readers.map(sample, batches)))
    if order.needs_fields:
        found = [one for one in found if one.is_whole] or found
    keys = np.frombuffer(b"".join(one.line for one in found), np.uint8)
    return Sample(keys, np.array([one.position for one in found], dtype=np.uint64), source.records)


def max_reads(size: int) -> int:
    """Return how many reads the sample of an input of `size` bytes may take, so that it costs little of the time."""
    return min(max(MIN_READS, size // READ_COST_BYTES), MAX_READS)


def choose_reads(records: int, wanted: int, limit: int) -> tuple[NDArray[np.int64], int]:
    """Return the first record of every read, one in each of many equal sections, and the records per read."""
    wanted = min(wanted, records)
    if not wanted:
        return np.empty(0, np.int64), 0
    count = min(wanted, max(RECORDS_PER_READ, -(-wanted // limit)))
    reads = wanted // count
    edges = np.arange(reads + 1, dtype=np.int64) * (records - count + 1) // reads
    widths = np.maximum(edges[1:] - edges[:-1], 1)
    chance = (mix_bits(np.arange(SAMPLE_SEED, SAMPLE_SEED + reads, dtype=np.uint64)) >> np.uint64(11)) * 2.0**-53
    return np.minimum(edges[:-1] + (chance * widths).astype(np.int64), records - count), count


def choose_boundaries(samples: Sequence[Sample], parts: int, order: LineOrder | None = None) -> list[Boundary]:
    """Return the `parts` - 1 boundaries that divide the records into even parts, estimated from the samples.

    `order` is that of lines, if these are samples of lines.
    """
    filled = [sample for sample in samples if len(sample.keys)]
    if not filled:
        return [Boundary(b"", 0)] * (parts - 1)
    if order is not None:
        return _choose_lines(filled, parts, order)
    keys = np.concatenate([sample.keys for sample in filled])
    positions = np.concatenate([sample.positions for sample in filled])
    weights = np.concatenate([np.full(len(one.keys), one.records / len(one.keys)) for one in filled])
    by_position = np.argsort(positions, kind="stable")
    ranked = by_position[sort_rows(np.ascontiguousarray(keys[by_position]), keys.shape[1])]
    return [Boundary(keys[at].tobytes(), int(positions[at])) for at in _quantiles(ranked, weights, parts)]


def are_ordered(boundaries: Sequence[Boundary], order: LineOrder | None) -> bool:
    """Return whether boundaries are in ascending order, which is that of lines if one is given."""
    if order is None:
        return all(before <= after for before, after in pairwise(boundaries))
    text = b"".join(one.key + b"\n" for one in boundaries) + bytes(PADDING_BYTES)
    lines = scan_lines(np.frombuffer(text, dtype=np.uint8), 0, len(text) - PADDING_BYTES, order)
    ranked, _ = sort_lines(lines, order)
    return bool(ranked.tolist() == list(range(len(boundaries))))


def _choose_lines(samples: Sequence[Sample], parts: int, order: LineOrder) -> list[Boundary]:
    """Choose boundaries among sampled lines; a line stands for as many bytes as it has in the sample."""
    samples = sorted(samples, key=lambda sample: int(sample.positions[0]))
    text = np.concatenate([*(sample.keys for sample in samples), np.zeros(PADDING_BYTES, dtype=np.uint8)])
    positions = np.concatenate([sample.positions for sample in samples])
    lines = scan_lines(text, 0, len(text) - PADDING_BYTES, order)
    factors = np.repeat([one.records / len(one.keys) for one in samples], [len(one.positions) for one in samples])
    ranked, _ = sort_lines(lines, order)
    chosen = _quantiles(ranked, (lines.ends - lines.begins + 1) * factors, parts)
    return [Boundary(text[lines.begins[at] : lines.ends[at]].tobytes(), int(positions[at])) for at in chosen]


def _quantiles(ranked: NDArray[np.int64], weights: NDArray[np.float64], parts: int) -> NDArray[np.int64]:
    """Return the rows, in the order `ranked`, that divide the sum of the weights into even parts."""
    cumulated = np.cumsum(weights[ranked])
    quantiles = cumulated[-1] * np.arange(1, parts) / parts
    chosen: NDArray[np.int64] = ranked[np.minimum(np.searchsorted(cumulated, quantiles, "left"), len(ranked) - 1)]
    return chosen
