"""Sorted runs: each source block is read, sorted and kept in memory or spilled to a file.

Rows for other workers stay in memory first: they are released as soon as those workers have them, and their memory is
reused for the rows that arrive. If a restarted worker needs them again, the block is read and sorted again.

Invariant: a spill file has its final name only when it is complete, with a manifest beside it that has the checksums of
its pages. A file of an earlier process is used only if manifest and checksums match.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from interlock.errors import SortInputError
from interlock.sort.data.blocks import sort_buffer, spare_bytes
from interlock.sort.data.checksum import fingerprint
from interlock.sort.data.plan import first_position, is_resident
from interlock.sort.io.buffers import SpilledRows
from interlock.sort.io.direct_io import DirectReader, DirectWriter, align, align_rows
from interlock.sort.io.page_checksums import PageChecksums, compute_checksums
from interlock.sort.workdir import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from interlock.sort.data.keys import Rows, SortedRows
    from interlock.sort.data.plan import Plan
    from interlock.sort.data.records import Source
    from interlock.sort.io.buffers import BufferPool, IoThread, RowStore
    from interlock.sort.io.memory import PooledRows, RowPool

    SortAgain = Callable[["Run", set[int]], dict[int, RowStore]]

MANIFEST_VERSION = 3


class ResidentShares(NamedTuple):
    """The shares of blocks, from 0 to 1, whose rows stay in memory: rows for other workers, and the worker's own."""

    sent: float = 0.0
    own: float = 0.0


class Run:
    """A sorted run: the sorted rows of one source block. `cuts` are the row numbers at which windows begin and end.

    `own` has the rows of the worker's own partitions, `sent` those for each other worker while they are in memory. Rows
    that are not are produced by `sort_again`; without it, `own` has the rows of all partitions.
    """

    def __init__(
        self, block: int, cuts: list[int], own: RowStore, sent: dict[int, PooledRows], sort_again: SortAgain | None
    ) -> None:
        self.block = block
        self.cuts = cuts
        self.own = own
        self._sent: dict[int, RowStore] = {**sent}
        self._sort_again = sort_again
        self._served: set[int] = set()
        self._lock = threading.Lock()

    def rows_for(self, worker: int) -> RowStore:
        """Return the rows for another worker; they are kept until it has received them."""
        if self._sort_again is None:
            return self.own
        with self._lock:
            if worker not in self._sent:
                self._served.discard(worker)
                self._sent |= self._sort_again(self, self._served | self._sent.keys())
            return self._sent[worker]

    def release(self, worker: int) -> None:
        """Release the rows for another worker, which has received them."""
        with self._lock:
            self._served.add(worker)
            rows = self._sent.pop(worker, None)
        if rows is not None:
            rows.close()

    def close(self) -> None:
        """Release files and memory."""
        for worker in list(self._sent):
            self.release(worker)
        self.own.close()


class BlockSorter:
    """Sorts the blocks of one worker's source, each into a run."""

    def __init__(
        self,
        source: Source,
        block_records: int,
        plan: Plan,
        worker: int,
        buffers: BufferPool,
        directory: Path,
        pool: RowPool,
        shares: ResidentShares,
    ) -> None:
        self.source = source
        self._block_records = block_records
        self._plan = plan
        self._worker = worker
        self._others = set(range(plan.workers)) - {worker}
        self._buffers = buffers
        self._directory = directory
        self._pool = pool
        self._shares = shares
        self._fingerprint = fingerprint(source)
        self._identity = f"{MANIFEST_VERSION} {plan.digest()} {worker} {block_records} {self._fingerprint}"

    def sort(self, block: int) -> tuple[Run, bool]:
        """Sort one block, or reuse the spill file of an earlier process; return the run and whether it was reused."""
        reused = self._find_spilled(block)
        if reused is not None:
            return reused, True
        with self._buffers.borrow() as (buffer, io_thread):
            rows, cuts = self._read_and_sort(block, buffer)
            sent = self._keep_for_others(block, cuts, rows)
            if sent is None:
                return Run(block, cuts, self._spill(block, cuts, rows, (0, rows.count), io_thread), {}, None), False
            low, high = self._plan.extent(cuts, self._worker)
            try:
                own: RowStore | None = None
                if is_resident(block, self._shares.own):
                    own = self._keep(rows, low, high)
                if own is None:
                    own = self._spill(block, cuts, rows, (low, high), io_thread)
            except BaseException:
                _close_all(sent)
                raise
            return Run(block, cuts, own, sent, self._sort_again), False

    def _read_and_sort(self, block: int, buffer: NDArray[np.uint8]) -> tuple[SortedRows, list[int]]:
        """Read a block; return its rows in order, and the row numbers at which windows begin and end."""
        part, boundaries = self.source.block(block, self._block_records), self._plan.boundaries
        room = align(buffer, part.extents[0].offset if part.extents else 0)
        needed = part.size + spare_bytes(part.format, boundaries)
        if needed > len(room):  # lines that are longer than others
            room = np.empty(needed, dtype=np.uint8)
        part.read(room[: part.size])
        position = first_position(self._worker) + part.position - self.source.position
        rows, counts = sort_buffer(room, part.records, part.format, boundaries, position)
        return rows, [0, *counts, rows.count]

    def _sort_again(self, run: Run, excluded: set[int]) -> dict[int, RowStore]:
        """Sort the block of a run again; return the rows for all other workers but the excluded ones."""
        found: dict[int, RowStore] = {}
        with self._buffers.borrow() as (buffer, io_thread):
            rows, cuts = self._read_and_sort(run.block, buffer)
            if cuts != run.cuts or fingerprint(self.source) != self._fingerprint:
                raise SortInputError("the input of this worker changed while it was sorted; start a new sort")
            try:
                for worker in self._others - excluded:
                    low, high = self._plan.extent(cuts, worker)
                    found[worker] = self._keep(rows, low, high) or self._spill_for(
                        run.block, worker, rows, (low, high), io_thread
                    )
            except BaseException:
                _close_all(found)
                raise
        return found

    def _keep_for_others(self, block: int, cuts: list[int], rows: SortedRows) -> dict[int, PooledRows] | None:
        """Keep the rows for all other workers in memory; None if this block is to be spilled, or memory is short."""
        if not is_resident(block, self._shares.sent):
            return None
        kept: dict[int, PooledRows] = {}
        for worker in self._others:
            low, high = self._plan.extent(cuts, worker)
            pooled = self._keep(rows, low, high)
            if pooled is None:
                _close_all(kept)
                return None
            kept[worker] = pooled
        return kept

    def _keep(self, rows: SortedRows, low: int, high: int) -> PooledRows | None:
        """Copy some rows in order into pool memory; None if memory is short."""
        kept = self._pool.allocate(high - low, low)
        if kept is not None:
            for part in kept.parts():
                rows.gather(low, low + len(part), part.reshape(-1))
                low += len(part)
        return kept

    def _spill(
        self, block: int, cuts: list[int], rows: SortedRows, span: tuple[int, int], io_thread: IoThread
    ) -> SpilledRows:
        """Write some rows in order to a spill file with a manifest, for reuse by a later process."""
        path, (low, high) = self._spill_path(block), span
        checksum = _write_run(path, rows, span, io_thread)
        write_manifest(
            path,
            {"identity": self._identity, "cuts": cuts, "first": low, "rows": high - low, "checksum": checksum},
        )
        return SpilledRows(path, rows.unit, checksum, low)

    def _spill_for(
        self, block: int, worker: int, rows: SortedRows, span: tuple[int, int], io_thread: IoThread
    ) -> SpilledRows:
        """Write rows for one worker, which were sorted again, to a spill file that only this process uses."""
        path = self._directory / f"sent-{block:06}-{worker:04}"
        checksum = _write_run(path, rows, span, io_thread)
        return SpilledRows(path, rows.unit, checksum, span[0])

    def _spill_path(self, block: int) -> Path:
        return self._directory / f"run-{block:06}"

    def _find_spilled(self, block: int) -> Run | None:
        """Return the run of a block that an earlier process spilled, if its file is intact."""
        path = self._spill_path(block)
        manifest = read_manifest(path)
        if manifest is None or manifest.get("identity") != self._identity:
            return None
        length = self.source.format.record_length
        with self._buffers.borrow() as (buffer, _):
            if manifest["rows"] * length > len(buffer):
                buffer = np.empty(manifest["rows"] * length, dtype=np.uint8)  # noqa: PLW2901 - lines that are long
            if not verify_file(path, align_rows(buffer, manifest["rows"], length, 0), manifest["checksum"]):
                return None
        cuts = manifest["cuts"]
        has_all_rows = manifest["rows"] == cuts[-1]
        own = SpilledRows(path, length, manifest["checksum"], manifest["first"])
        return Run(block, cuts, own, {}, None if has_all_rows else self._sort_again)


def _write_run(path: Path, rows: SortedRows, span: tuple[int, int], io_thread: IoThread) -> str:
    """Write some rows in order to a file, which gets its name when it is complete; return its pages' checksums."""
    part = path.with_name(f"{path.name}.part")
    low, high = span
    file = DirectWriter(part, (high - low) * rows.unit)
    try:
        checksum = io_thread.write_sorted(rows, low, high, file, 0, PageChecksums())
    finally:
        file.close()
    part.rename(path)
    return checksum


def _close_all(stores: Mapping[int, RowStore]) -> None:
    for store in stores.values():
        store.close()


def verify_file(path: Path, buffer: Rows, checksum: str) -> bool:
    """Read a file into an array of exactly its size; return whether size and checksums match."""
    if not path.exists() or path.stat().st_size != buffer.nbytes:
        return False
    file = DirectReader(path)
    try:
        data = buffer.reshape(-1).data
        file.read(data, 0)
        return compute_checksums(data) == checksum
    finally:
        file.close()


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest beside a file."""
    write_json(path.with_name(f"{path.name}.json"), manifest)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Read the manifest beside a file; None if it is missing or damaged."""
    return read_json(path.with_name(f"{path.name}.json")) or None
