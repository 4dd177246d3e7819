"""How the records of one sort are shared out: who takes part, which partitions are whose, where their boundaries are.

Invariant: the plan follows from the input and the order of the workers alone, so that every run of it, and every
process that is started again in it, makes the same blocks, slices and files.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from interlock.sort import wire_pb2 as wire
from interlock.sort.data.checksum import mixed
from interlock.sort.data.keys import Boundary, order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from interlock.sort.data.keys import Rows
    from interlock.sort.data.records import Source
    from interlock.sort.settings import Settings


POSITION_BITS = 44
CHUNK = 13_107_200  # bytes: 131,072 records of 100 bytes, which the cache holds while they are gathered
BLOCKS = 48
SHARE = 12  # blocks and windows take at most this part of the memory each
LARGEST_BLOCK = 1 << 24
MOST_WINDOWS = 20_000
MOST_BOUNDARY_BYTES = 40 << 20
PER_BOUNDARY = 24  # bytes that one takes in a message, at most, beside its key


@dataclass(frozen=True, slots=True)
class Member:
    """One worker as the others see it."""

    index: int
    address: str
    incarnation: int
    records: int
    block_records: int
    completed: bool = False

    @property
    def blocks(self) -> int:
        """Count the source blocks of this worker."""
        return -(-self.records // self.block_records)


@dataclass(frozen=True, slots=True)
class Roster:
    """Whom the workers reach where; a higher version replaces a lower one."""

    version: int
    members: tuple[Member, ...]

    def message(self) -> wire.Roster:
        """Give it as it goes over the wire."""
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
    def of(cls, message: wire.Roster) -> Roster:
        """Read it from the wire."""
        return cls(
            message.version,
            tuple(
                Member(one.index, one.address, one.incarnation, one.records, one.block_records, one.completed)
                for one in message.members
            ),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Boundaries and owners; a partition is `windows` windows in a row, the pieces in which it is merged."""

    epoch: int
    partitions: int
    windows: int
    boundaries: tuple[Boundary, ...]
    roster: Roster

    @property
    def workers(self) -> int:
        """Count the workers."""
        return len(self.roster.members)

    def owned(self, worker: int) -> range:
        """Give the partitions of a worker."""
        return range(worker * self.partitions // self.workers, (worker + 1) * self.partitions // self.workers)

    def edges(self, cuts: list[int], partition: int) -> list[int]:
        """Give the places where the windows of a partition begin and end, from those of all windows."""
        return cuts[partition * self.windows : (partition + 1) * self.windows + 1]

    def extent(self, cuts: list[int], worker: int) -> tuple[int, int]:
        """Give the places where the rows of a worker's partitions begin and end."""
        owned = self.owned(worker)
        return cuts[owned.start * self.windows], cuts[owned.stop * self.windows]

    def digest(self) -> str:
        """Give what tells two plans apart, whatever sort they are for."""
        told = repr((self.partitions, self.windows, self.boundaries, self.workers))
        return xxhash.xxh3_64_hexdigest(told.encode())

    def message(self) -> wire.PartitionConfig:
        """Give it as it goes over the wire."""
        return wire.PartitionConfig(
            epoch=self.epoch,
            partitions=self.partitions,
            windows=self.windows,
            keys=[one.key for one in self.boundaries],
            positions=[one.position for one in self.boundaries],
            roster=self.roster.message(),
        )

    @classmethod
    def of(cls, message: wire.PartitionConfig) -> Plan:
        """Read it from the wire."""
        boundaries = tuple(map(Boundary, message.keys, message.positions))
        return cls(message.epoch, message.partitions, message.windows, boundaries, Roster.of(message.roster))


def first_position(worker: int) -> int:
    """Give the position of a worker's first record in the whole input."""
    return worker << POSITION_BITS


def block_size(source: Source, settings: Settings) -> int:
    """Choose how many records are sorted at a time: a cacheful, or more where there would be too many blocks."""
    length = source.format.record_length
    if settings.block_records is not None:
        return settings.block_records
    wanted = max(CHUNK // length, -(-source.records // BLOCKS))
    return max(1, min(wanted, settings.memory // SHARE // length, LARGEST_BLOCK))


def window_size(source: Source, settings: Settings) -> int:
    """Choose how many records are merged at a time: fewer than a block has, since a sample does not divide exactly."""
    if settings.window_records is not None:
        return settings.window_records
    length = source.format.record_length
    wanted = max(CHUNK // length, block_size(source, settings) * 4 // 5)
    return max(1, min(wanted, settings.memory // SHARE // length))


def stays(block: int, share: float) -> bool:
    """Say whether a sorted block is one of those that stay in memory, which are spread evenly over all."""
    return int((block + 1) * share) > int(block * share)


def most_boundaries(key_length: int) -> int:
    """Say how many boundaries fit the message in which a worker gets them."""
    return min(MOST_WINDOWS, MOST_BOUNDARY_BYTES // (key_length + PER_BOUNDARY))


def window_count(records: int, partitions: int, window_records: int, key_length: int) -> int:
    """Say into how many windows a partition is divided."""
    return max(1, min(-(-records // (partitions * window_records)), most_boundaries(key_length) // partitions))


# SECTION sort/sampling
# Chooses where the sample is taken, and the boundaries by which the records are shared out.
#
# A boundary is a key and an input position, so that records of one key can be divided too. When a partition's end is
# the
# quantile of s independent samples per partition, its size is off by a share of about 1/sqrt(s), and the largest of
# P by
# about sqrt(2 ln(P) / s): 8,000 samples per partition keep the largest of 256 within 4 % of even, and within 5 % in
# nearly every run. The sample is read in small pieces, one from a random place in each of many equal stretches of the
# input: input that is ordered already is met evenly then, and input that is ordered locally in as many places as there
# are pieces. Where neighbours have nearly equal keys a piece tells no more than one sample would, and s is the
# number of
# pieces: 1,000 per partition, up to what `most_reads` says for one worker.
#
# The samples of all workers fit one message together: about 8,000 for each of 256 partitions with keys of 10 bytes,
# fewer
# for each of more partitions, or with longer keys.

PER_PARTITION = 8_000
PER_WINDOW = 64
PER_READ = 8
FEWEST_READS, MOST_READS = 2_000, 32_000  # that one worker may make, by the size of its input:
PER_READ_BYTES = 128 << 10  # a read somewhere else takes about as long as to read so many bytes in a row
MOST_BYTES = 40 << 20  # of keys and positions, of all workers together: the master has to hold and to order them
POSITION = 8  # bytes
READ_AT_ONCE = 1 << 20  # bytes of records, of which only the keys are kept
READERS = 8
SEED = 20251024


class Sample:
    """Some keys of one worker's input, with their positions, and how many records each stands for."""

    def __init__(self, keys: Rows, positions: NDArray[np.uint64], records: int) -> None:
        self.keys = keys
        self.positions = positions
        self.records = records


def wanted_of(records: int, window_records: int, key_length: int, partitions: int, workers: int) -> int:
    """Say how many keys one of several workers is to read: enough for its share of the partitions, and its windows."""
    wanted = max(PER_PARTITION * partitions // workers, PER_WINDOW * records // window_records)
    return max(1, min(wanted, MOST_BYTES // workers // (key_length + POSITION)))


def take_sample(source: Source, first: int, wanted: int) -> Sample:
    """Read about so many keys of a source, of which the first record has the position `first`."""
    key_length = source.format.key_length
    starts, count = places(source.records, wanted, most_reads(source.size))
    if not len(starts):
        return Sample(np.empty((0, key_length), np.uint8), np.empty(0, np.uint64), source.records)
    with ThreadPoolExecutor(READERS) as readers:
        parts = max(READERS, len(starts) * count * source.format.record_length // READ_AT_ONCE)
        shares = (some.tolist() for some in np.array_split(starts, parts))
        pieces = list(readers.map(lambda some: source.read_places(some, count)[:, :key_length].copy(), shares))
    numbers = (starts[:, None] + np.arange(count, dtype=np.int64)).reshape(-1)
    return Sample(np.concatenate(pieces), numbers.astype(np.uint64) + np.uint64(first), source.records)


def most_reads(size: int) -> int:
    """Say in how many places an input of so many bytes may be read, for the sample to take little of the time."""
    return min(max(FEWEST_READS, size // PER_READ_BYTES), MOST_READS)


def places(records: int, wanted: int, most: int) -> tuple[NDArray[np.int64], int]:
    """Say where to read how many records in a row: one place in each of many equal stretches."""
    wanted = min(wanted, records)
    if not wanted:
        return np.empty(0, np.int64), 0
    count = min(wanted, max(PER_READ, -(-wanted // most)))
    reads = wanted // count
    edges = np.arange(reads + 1, dtype=np.int64) * (records - count + 1) // reads
    widths = np.maximum(edges[1:] - edges[:-1], 1)
    chance = (mixed(np.arange(SEED, SEED + reads, dtype=np.uint64)) >> np.uint64(11)) * 2.0**-53
    return np.minimum(edges[:-1] + (chance * widths).astype(np.int64), records - count), count


def choose_boundaries(samples: Sequence[Sample], parts: int) -> list[Boundary]:
    """Give the `parts` - 1 places that divide the records into even parts, as far as the samples can tell."""
    filled = [sample for sample in samples if len(sample.keys)]
    if not filled:
        return [Boundary(b"", 0)] * (parts - 1)
    keys = np.concatenate([sample.keys for sample in filled])
    positions = np.concatenate([sample.positions for sample in filled])
    weights = np.concatenate([np.full(len(one.keys), one.records / len(one.keys)) for one in filled])
    by_position = np.argsort(positions, kind="stable")
    ranked = by_position[order(np.ascontiguousarray(keys[by_position]), keys.shape[1])]
    reached = np.cumsum(weights[ranked])
    marks = reached[-1] * np.arange(1, parts) / parts
    chosen = ranked[np.minimum(np.searchsorted(reached, marks, "left"), len(ranked) - 1)]
    return [Boundary(keys[at].tobytes(), int(positions[at])) for at in chosen]
