"""The receiving side of the shuffle: slices from the other workers are verified and stored once.

Invariant: a slice counts as received when all of it arrived with matching checksums; receiving it again changes
nothing. A slice is identified by its source worker, the block there and the partition, within one epoch.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import xxhash

from interlock.errors import SortError
from interlock.sort.io.buffers import SpilledRows
from interlock.sort.io.direct_io import MAX_IO_BYTES, PAGE_BYTES, DirectWriter, io_buffer
from interlock.sort.io.merge import Slice
from interlock.sort.io.page_checksums import PageChecksums
from interlock.sort.io.runs import MANIFEST_VERSION, read_manifest, verify_file, write_manifest

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from interlock.sort.data.plan import Plan
    from interlock.sort.io.buffers import RowStore
    from interlock.sort.io.memory import PooledRows, RowPool
    from interlock.sort.rpc import Chunk
    from interlock.sort.wire_pb2 import ShuffleDataChunk


class SliceId(NamedTuple):
    """The identity of a slice within a sort."""

    worker: int
    block: int
    partition: int


class DamagedData(SortError):  # noqa: N818 - a named outcome: the sender tries again
    """A chunk arrived with a wrong checksum or out of order."""


class UnexpectedSlice(SortError):  # noqa: N818 - a named outcome: the sender belongs to another sort
    """A chunk arrived of a slice that this worker does not expect."""


class ShuffleReceiver:
    """The slices that one worker expects from the others."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        record_length: int,
        directory: Path,
        pool: RowPool,
        changed: threading.Condition,
    ) -> None:
        self.changed = changed
        self.size = 0
        self._plan = plan
        self._length = record_length
        self._directory = directory
        self._pool = pool
        self._slices: dict[SliceId, Slice] = {}
        self._file_numbers = itertools.count()
        self._owned = plan.owned(worker)
        self._expected = {
            SliceId(member.index, block, partition)
            for member in plan.roster.members
            if member.index != worker
            for block in range(member.blocks)
            for partition in self._owned
        }

    def expects(self, slice_id: SliceId) -> bool:
        """Return whether this worker expects such a slice."""
        return slice_id in self._expected

    def has(self, slice_id: SliceId) -> bool:
        """Return whether a slice was received."""
        return slice_id in self._slices

    def has_all(self, worker: int, block: int) -> bool:
        """Return whether all slices of one source block were received."""
        return all(SliceId(worker, block, partition) in self._slices for partition in self._owned)

    def is_complete(self) -> bool:
        """Return whether all slices were received."""
        return len(self._slices) == len(self._expected)

    def progress(self) -> float:
        """Return the share of slices that were received."""
        return len(self._slices) / len(self._expected) if self._expected else 1.0

    def slice(self, slice_id: SliceId) -> Slice:
        """Return a received slice."""
        return self._slices[slice_id]

    def begin(self, slice_id: SliceId, counts: list[int]) -> IncomingSlice:
        """Begin to receive a slice whose windows have so many rows."""
        if len(counts) != self._plan.windows:
            raise UnexpectedSlice(f"slice {tuple(slice_id)} has {len(counts)} windows, not {self._plan.windows}")
        limit = self._plan.roster.members[slice_id.worker].max_block_records(has_lines=self._length == 1)
        if sum(counts) > limit:  # checked before memory is allocated
            raise UnexpectedSlice(f"slice {tuple(slice_id)} has {sum(counts):,} rows, of a block of at most {limit:,}")
        return IncomingSlice(self, slice_id, counts, self._length, self._open_sink(slice_id, sum(counts)))

    def store(self, slice_id: SliceId, rows: RowStore, counts: list[int]) -> None:
        """Count a slice as received; drop a second copy of it."""
        with self.changed:
            if slice_id in self._slices:
                rows.close()
                return
            self._slices[slice_id] = Slice(rows, [0, *itertools.accumulate(counts)])
            self.size += sum(counts) * self._length
            self.changed.notify_all()

    def write_manifest(self, slice_id: SliceId, path: Path, counts: list[int], checksum: str) -> None:
        """Write the manifest of a complete file, for reuse after a restart."""
        write_manifest(path, {"identity": self._identity(slice_id), "counts": counts, "checksum": checksum})

    def load_spilled(self) -> int:
        """Store the slices that an earlier process of this worker received completely; return their number."""
        loaded = 0
        for slice_id in sorted(self._expected):
            path = self._path(slice_id)
            manifest = read_manifest(path)
            if manifest is None or manifest.get("identity") != self._identity(slice_id):
                continue
            rows = np.empty((sum(manifest["counts"]), self._length), dtype=np.uint8)
            if verify_file(path, rows, manifest["checksum"]):
                rows_in_file = SpilledRows(path, self._length, manifest["checksum"])
                self.store(slice_id, rows_in_file, manifest["counts"])
                loaded += 1
        return loaded

    def close(self) -> None:
        """Release files and memory."""
        with self.changed:
            for one in self._slices.values():
                one.rows.close()
            self._slices.clear()

    def _open_sink(self, slice_id: SliceId, rows: int) -> _Sink:
        """Receive into memory while there is some, which rows that were sent may have released; then into files."""
        pooled = self._pool.allocate(rows)
        if pooled is not None:
            return _MemorySink(pooled)
        suffix = f"{next(self._file_numbers)}.part"
        return _FileSink(self, slice_id, self._path(slice_id), suffix, self._length, rows * self._length)

    def _path(self, slice_id: SliceId) -> Path:
        return self._directory / f"slice-{slice_id.worker:04}-{slice_id.block:06}-{slice_id.partition:05}"

    def _identity(self, slice_id: SliceId) -> str:
        """Return what the manifest of a slice must match; block 3 of a sender with smaller blocks has other records."""
        blocks = self._plan.roster.members[slice_id.worker].block_records
        return f"{MANIFEST_VERSION} {self._plan.epoch} {self._plan.digest()} {self._length} {blocks} {tuple(slice_id)}"


class StreamReceiver:
    """Receives one ShuffleData stream: the slices of one or more blocks, one after the other."""

    def __init__(self, receiver: ShuffleReceiver, epoch: int) -> None:
        self._receiver = receiver
        self._epoch = epoch
        self._incoming: IncomingSlice | None = None
        self._blocks: set[tuple[int, int]] = set()

    def receive(self, chunks: Iterable[Chunk]) -> None:
        """Receive all slices that are new; stop early when the rest was received before."""
        try:
            for chunk in chunks:
                if not self._receive_chunk(chunk.head, chunk.data):
                    break
            if self._incoming is not None:
                raise DamagedData(f"{self._incoming} ended too early")
            if not all(self._receiver.has_all(*block) for block in self._blocks):
                raise DamagedData(f"some slices of the blocks {sorted(self._blocks)} did not arrive")
        finally:
            if self._incoming is not None:
                self._incoming.discard()

    def _receive_chunk(self, head: ShuffleDataChunk, data: memoryview) -> bool:
        """Receive one chunk; return False if the rest of its block was received before."""
        slice_id = SliceId(head.worker, head.block, head.partition)
        if head.epoch != self._epoch or not self._receiver.expects(slice_id):
            raise UnexpectedSlice(f"this worker expects no slice {tuple(slice_id)} of sort {head.epoch}")
        self._blocks.add((slice_id.worker, slice_id.block))
        if self._incoming is None and self._receiver.has(slice_id):
            return not self._receiver.has_all(slice_id.worker, slice_id.block)
        if self._incoming is None:
            self._incoming = self._receiver.begin(slice_id, list(head.counts))
        self._incoming.add(slice_id, head, data)
        if self._incoming.is_complete:
            self._incoming.finish()
            self._incoming = None
        return True


class IncomingSlice:
    """A slice that is being received."""

    def __init__(
        self, receiver: ShuffleReceiver, slice_id: SliceId, counts: list[int], record_length: int, sink: _Sink
    ) -> None:
        self._receiver = receiver
        self._id = slice_id
        self._counts = counts
        self._size = sum(counts) * record_length
        self._done = 0
        self._sink = sink

    def add(self, slice_id: SliceId, head: ShuffleDataChunk, data: memoryview) -> None:
        """Verify and add the next chunk."""
        if slice_id != self._id:
            raise DamagedData(f"{self} ended too early")
        if xxhash.xxh3_64_intdigest(data) != head.checksum:
            raise DamagedData(f"{self}: wrong checksum of {len(data)} bytes at {head.offset}")
        if head.offset != self._done or self._done + len(data) > self._size:
            raise DamagedData(
                f"{self}: bytes at {head.offset} arrived after {self._done} of {self._size} bytes were received"
            )
        self._sink.add(data, self._done)
        self._done += len(data)

    def __str__(self) -> str:
        return f"slice {tuple(self._id)}"

    @property
    def is_complete(self) -> bool:
        """Whether all bytes were received."""
        return self._done == self._size

    def finish(self) -> None:
        """Count the slice as received."""
        self._receiver.store(self._id, self._sink.finish(self._counts), self._counts)

    def discard(self) -> None:
        """Discard the bytes received so far."""
        self._sink.discard()


class _Sink(Protocol):
    """The destination of the bytes of a slice."""

    def add(self, data: memoryview, offset: int) -> None:
        """Add bytes."""

    def finish(self, counts: list[int]) -> RowStore:
        """Return the rows that were received."""

    def discard(self) -> None:
        """Release the bytes."""


class _MemorySink:
    """Pool memory of the slice's own: the memory of the messages is reused for the next ones."""

    def __init__(self, rows: PooledRows) -> None:
        self._rows = rows

    def add(self, data: memoryview, offset: int) -> None:
        self._rows.write(data, offset)

    def finish(self, counts: list[int]) -> RowStore:
        del counts
        return self._rows

    def discard(self) -> None:
        self._rows.close()


class _FileSink:
    """A spill file under a temporary name of its own, so that two copies of a slice at once do not collide."""

    def __init__(
        self, receiver: ShuffleReceiver, slice_id: SliceId, path: Path, suffix: str, record_length: int, size: int
    ) -> None:
        self._receiver = receiver
        self._id = slice_id
        self._path = path
        self._length = record_length
        self._part = path.with_name(f"{path.name}.{suffix}")
        self._file = DirectWriter(self._part, size)
        self._checksums = PageChecksums()
        self._written = 0
        self._partial_page = b""  # written with the bytes after it

    def add(self, data: memoryview, offset: int) -> None:
        del offset
        self._checksums.update(data)
        with io_buffer() as buffer:
            for begin in range(0, len(data), MAX_IO_BYTES):
                self._write_pages(data[begin : begin + MAX_IO_BYTES], buffer)

    def finish(self, counts: list[int]) -> RowStore:
        self._file.write(memoryview(self._partial_page), self._written)
        self._file.close()
        self._part.rename(self._path)
        checksum = self._checksums.hexdigest()
        self._receiver.write_manifest(self._id, self._path, counts, checksum)
        return SpilledRows(self._path, self._length, checksum)

    def discard(self) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def _write_pages(self, data: memoryview, buffer: NDArray[np.uint8]) -> None:
        """Write the whole pages of the partial page before and the data; keep the rest."""
        before = len(self._partial_page)
        held = before + len(data)
        buffer.data[:before] = self._partial_page
        buffer[before:held] = data
        whole = held // PAGE_BYTES * PAGE_BYTES
        self._file.write(buffer.data[:whole], self._written)
        self._written += whole
        self._partial_page = buffer[whole:held].tobytes()
