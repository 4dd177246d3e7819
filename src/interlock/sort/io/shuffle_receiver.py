"""What the other workers send: slices, taken in piece by piece, checked, kept once.

Invariant: a slice counts as received when all of it came with right checksums; the same slice sent again changes
nothing. A slice is named by its source worker, the block there and the partition, within one epoch.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import xxhash

from interlock.errors import SortError
from interlock.sort.io.buffers import Spilled
from interlock.sort.io.direct_io import AT_ONCE, PAGE, DirectWriter, room
from interlock.sort.io.merge import Slice
from interlock.sort.io.runs import holds, read_note, write_note

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from interlock.sort.data.plan import Plan
    from interlock.sort.io.buffers import Rowstore
    from interlock.sort.io.memory import Celled, Cells
    from interlock.sort.rpc import Piece
    from interlock.sort.wire_pb2 import ShuffleDataChunk


class Name(NamedTuple):
    """Which slice it is."""

    worker: int
    block: int
    partition: int


class Damaged(SortError):  # noqa: N818 - a named outcome: the sender tries again
    """A piece came with a wrong checksum or out of order."""


class Stranger(SortError):  # noqa: N818 - a named outcome: the sender is of another sort
    """A piece came that nobody expects."""


class Inbox:
    """The slices that one worker expects from the others."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        record_length: int,
        place: Path,
        cells: Cells,
        changed: threading.Condition,
    ) -> None:
        self.changed = changed
        self.size = 0
        self._plan = plan
        self._length = record_length
        self._place = place
        self._cells = cells
        self._slices: dict[Name, Slice] = {}
        self._drafts = itertools.count()
        self._owned = plan.owned(worker)
        self._expected = {
            Name(member.index, block, partition)
            for member in plan.roster.members
            if member.index != worker
            for block in range(member.blocks)
            for partition in self._owned
        }

    def expects(self, name: Name) -> bool:
        """Tell whether there can be such a slice for this worker."""
        return name in self._expected

    def has(self, name: Name) -> bool:
        """Tell whether a slice was received."""
        return name in self._slices

    def has_all(self, worker: int, block: int) -> bool:
        """Tell whether all slices of one source block were received."""
        return all(Name(worker, block, partition) in self._slices for partition in self._owned)

    def is_complete(self) -> bool:
        """Tell whether all were received."""
        return len(self._slices) == len(self._expected)

    def progress(self) -> float:
        """Give the share of slices that were received."""
        return len(self._slices) / len(self._expected) if self._expected else 1.0

    def slice(self, name: Name) -> Slice:
        """Give a received slice."""
        return self._slices[name]

    def draft(self, name: Name, counts: list[int]) -> Draft:
        """Begin to take in a slice."""
        if len(counts) != self._plan.windows:
            raise SortError(f"slice {name} has {len(counts)} windows, not {self._plan.windows}")
        most = self._plan.roster.members[name.worker].block_records
        if sum(counts) > most:  # before room is made for them
            raise Stranger(f"slice {tuple(name)} has {sum(counts):,} rows, of a block of at most {most:,}")
        return Draft(self, name, counts, self._length, self._sheet(name, sum(counts)))

    def keep(self, name: Name, rows: Rowstore, counts: list[int]) -> None:
        """Count a slice as received; a second copy of it is dropped."""
        with self.changed:
            if name in self._slices:
                rows.close()
                return
            self._slices[name] = Slice(rows, [0, *itertools.accumulate(counts)])
            self.size += sum(counts) * self._length
            self.changed.notify_all()

    def note(self, name: Name, path: Path, counts: list[int], checksum: str) -> None:
        """Write down what a finished file holds, for a worker that is started again."""
        write_note(path, {"stamp": self._stamp(name), "counts": counts, "checksum": checksum})

    def find(self) -> int:
        """Take in the slices that an earlier start of this worker received whole; give their number."""
        found = 0
        for name in sorted(self._expected):
            path = self._path(name)
            note = read_note(path)
            if note is None or note.get("stamp") != self._stamp(name):
                continue
            rows = np.empty((sum(note["counts"]), self._length), dtype=np.uint8)
            if holds(path, rows, note["checksum"]):
                self.keep(name, Spilled(path, self._length), note["counts"])
                found += 1
        return found

    def close(self) -> None:
        """Let go of files and memory."""
        with self.changed:
            for one in self._slices.values():
                one.rows.close()
            self._slices.clear()

    def _sheet(self, name: Name, rows: int) -> _Sheet:
        """Take memory while there is some, which others of this worker's rows may have given back; then files."""
        celled = self._cells.lend(rows)
        if celled is not None:
            return _Memory(celled)
        suffix = f"{next(self._drafts)}.part"
        return _File(self, name, self._path(name), suffix, self._length, rows * self._length)

    def _path(self, name: Name) -> Path:
        return self._place / f"slice-{name.worker:04}-{name.block:06}-{name.partition:05}"

    def _stamp(self, name: Name) -> str:
        """Give what a slice must be of: block 3 of a sender with smaller blocks holds other records."""
        blocks = self._plan.roster.members[name.worker].block_records
        return f"{self._plan.epoch} {self._plan.digest()} {self._length} {blocks} {tuple(name)}"


class Intake:
    """Takes in what one stream brings: the slices of one or more blocks, one after the other."""

    def __init__(self, inbox: Inbox, epoch: int) -> None:
        self._inbox = inbox
        self._epoch = epoch
        self._draft: Draft | None = None
        self._blocks: set[tuple[int, int]] = set()

    def take_all(self, pieces: Iterable[Piece]) -> None:
        """Take in all that is new; stop early when the rest is known to be here."""
        try:
            for piece in pieces:
                if not self._take(piece.head, piece.data):
                    break
            if self._draft is not None:
                raise Damaged(f"{self._draft} ended too early")
            if not all(self._inbox.has_all(*block) for block in self._blocks):
                raise Damaged(f"not all slices of the blocks {sorted(self._blocks)} came")
        finally:
            if self._draft is not None:
                self._draft.drop()

    def _take(self, chunk: ShuffleDataChunk, data: memoryview) -> bool:
        name = Name(chunk.worker, chunk.block, chunk.partition)
        if chunk.epoch != self._epoch or not self._inbox.expects(name):
            raise Stranger(f"this worker expects no slice {tuple(name)} of sort {chunk.epoch}")
        self._blocks.add((name.worker, name.block))
        if self._draft is None and self._inbox.has(name):
            return not self._inbox.has_all(name.worker, name.block)
        if self._draft is None:
            self._draft = self._inbox.draft(name, list(chunk.counts))
        self._draft.take(name, chunk, data)
        if self._draft.is_whole:
            self._draft.finish()
            self._draft = None
        return True


class Draft:
    """A slice that is being taken in."""

    def __init__(self, inbox: Inbox, name: Name, counts: list[int], record_length: int, sheet: _Sheet) -> None:
        self._inbox = inbox
        self._name = name
        self._counts = counts
        self._size = sum(counts) * record_length
        self._done = 0
        self._sheet = sheet

    def take(self, name: Name, chunk: ShuffleDataChunk, data: memoryview) -> None:
        """Check and add the next piece."""
        if name != self._name:
            raise Damaged(f"{self} ended too early")
        if xxhash.xxh3_64_intdigest(data) != chunk.checksum:
            raise Damaged(f"{self}: wrong checksum of {len(data)} bytes at {chunk.offset}")
        if chunk.offset != self._done or self._done + len(data) > self._size:
            raise Damaged(f"{self}: bytes at {chunk.offset} came when {self._done} of {self._size} were here")
        self._sheet.add(data, self._done)
        self._done += len(data)

    def __str__(self) -> str:
        return f"slice {tuple(self._name)}"

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self._done == self._size

    def finish(self) -> None:
        """Count the slice as received."""
        self._inbox.keep(self._name, self._sheet.finish(self._counts), self._counts)

    def drop(self) -> None:
        """Forget what came of it."""
        self._sheet.drop()


class _Sheet(Protocol):
    """Where the bytes of a draft go."""

    def add(self, data: memoryview, offset: int) -> None:
        """Add bytes."""

    def finish(self, counts: list[int]) -> Rowstore:
        """Make rows of them."""

    def drop(self) -> None:
        """Forget them."""


class _Memory:
    """Memory of the slice's own: that of the messages is used again for the next ones."""

    def __init__(self, rows: Celled) -> None:
        self._rows = rows

    def add(self, data: memoryview, offset: int) -> None:
        self._rows.fill(data, offset)

    def finish(self, counts: list[int]) -> Rowstore:
        del counts
        return self._rows

    def drop(self) -> None:
        self._rows.close()


class _File:
    """A file under a temporary name of its own, so that two copies of a slice at once do not meet."""

    def __init__(self, inbox: Inbox, name: Name, path: Path, suffix: str, record_length: int, size: int) -> None:
        self._inbox = inbox
        self._name = name
        self._path = path
        self._length = record_length
        self._part = path.with_name(f"{path.name}.{suffix}")
        self._file = DirectWriter(self._part, size)
        self._digest = xxhash.xxh3_64()
        self._written = 0
        self._rest = b""  # what does not fill a page waits for the bytes behind it

    def add(self, data: memoryview, offset: int) -> None:
        del offset
        self._digest.update(data)
        with room() as lent:
            for begin in range(0, len(data), AT_ONCE):
                self._add(data[begin : begin + AT_ONCE], lent)

    def finish(self, counts: list[int]) -> Rowstore:
        self._file.write(memoryview(self._rest), self._written)
        self._file.close()
        self._part.rename(self._path)
        self._inbox.note(self._name, self._path, counts, self._digest.hexdigest())
        return Spilled(self._path, self._length)

    def drop(self) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def _add(self, data: memoryview, lent: NDArray[np.uint8]) -> None:
        held = len(self._rest) + len(data)
        lent.data[: len(self._rest)] = self._rest
        lent[len(self._rest) : held] = data
        whole = held // PAGE * PAGE
        self._file.write(lent.data[:whole], self._written)
        self._written += whole
        self._rest = lent[whole:held].tobytes()
