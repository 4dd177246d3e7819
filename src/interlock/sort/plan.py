"""How the records of one sort are shared out: who takes part, which partitions are whose, where their boundaries are.

Invariant: the plan follows from the input and the order of the workers alone, so that every run of it, and every
process that is started again in it, makes the same blocks, slices and files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from interlock.sort import wire_pb2 as wire
from interlock.sort.keys import Boundary

if TYPE_CHECKING:
    from interlock.sort.job import Settings
    from interlock.sort.records import Source

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
