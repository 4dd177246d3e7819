"""The sorting of source blocks into runs, whose rows stay in memory or go to a file.

Rows for other workers stay first: they are let go as soon as those have them, and their memory takes what comes from
others. Should a worker that was started again want them once more, the block is read and sorted again.

Invariant: a file has its final name only when all of it is written, and beside it a note with its checksum; a file that
is found again is used only when note and checksum are right.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import xxhash

from interlock.errors import SortInputError
from interlock.sort.direct import DirectReader, DirectWriter, placed
from interlock.sort.keys import boundary_cuts, gather, order
from interlock.sort.plan import first_position, stays
from interlock.sort.rowstores import Ordered, Spilled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from interlock.sort.cells import Celled, Cells
    from interlock.sort.keys import Index, Rows
    from interlock.sort.plan import Plan
    from interlock.sort.pouring import Buffers, Spout
    from interlock.sort.records import Source
    from interlock.sort.rowstores import Rowstore, Viewed

    Again = Callable[["Run"], AbstractContextManager[Viewed]]


class Shares(NamedTuple):
    """Of how many blocks the rows stay in memory, from 0 to 1: those for other workers, and the worker's own."""

    sent: float = 0.0
    own: float = 0.0


class Run:
    """The sorted rows of one source block; `cuts` are the row numbers at which windows begin and end.

    `own` are those of the worker's own partitions, or all if there is no way to sort the block `again`.
    """

    def __init__(
        self, block: int, cuts: list[int], own: Rowstore, sent: dict[int, Celled], again: Again | None
    ) -> None:
        self.block = block
        self.cuts = cuts
        self.own = own
        self._sent = sent
        self._again = again

    @contextmanager
    def rows_for(self, worker: int) -> Iterator[Viewed]:
        """Lend the rows for another worker, wherever they are by now."""
        kept = self._sent.get(worker)
        if kept is not None:
            yield kept
        elif self._again is None:
            yield self.own
        else:
            with self._again(self) as rows:
                yield rows

    def let_go(self, worker: int) -> None:
        """Hear that another worker has its rows."""
        kept = self._sent.pop(worker, None)
        if kept is not None:
            kept.close()

    def close(self) -> None:
        """Let go of files and memory."""
        for worker in list(self._sent):
            self.let_go(worker)
        self.own.close()


class BlockSorter:
    """Sorts the blocks of one worker's source, each into a run."""

    def __init__(
        self,
        source: Source,
        block_records: int,
        plan: Plan,
        worker: int,
        buffers: Buffers,
        place: Path,
        cells: Cells,
        shares: Shares,
    ) -> None:
        self.source = source
        self._block_records = block_records
        self._plan = plan
        self._worker = worker
        self._buffers = buffers
        self._place = place
        self._cells = cells
        self._shares = shares
        self._fingerprint = fingerprint(source)
        self._stamp = f"{plan.digest()} {worker} {block_records} {self._fingerprint}"

    def sort(self, block: int) -> tuple[Run, bool]:
        """Sort one block, or find it sorted already; tell which."""
        found = self._found(block)
        if found is not None:
            return found, True
        with self._buffers.lent() as (unsorted, spout):
            rows, index, cuts = self._ordered(block, unsorted)
            sent = self._keep_for_others(block, cuts, rows, index)
            if sent is None:
                return Run(block, cuts, self._spill(block, cuts, rows, index, 0, spout), {}, None), False
            low, high = self._plan.extent(cuts, self._worker)
            own: Rowstore | None = None
            if stays(block, self._shares.own):
                own = self._keep(rows, index[low:high], low)
            if own is None:
                own = self._spill(block, cuts, rows, index[low:high], low, spout)
            return Run(block, cuts, own, sent, self._sorted_again), False

    def _ordered(self, block: int, room: NDArray[np.uint8]) -> tuple[Rows, Index, list[int]]:
        """Read a block; give its rows, their order, and the places of the boundaries in it."""
        start = block * self._block_records
        count = min(self._block_records, self.source.records - start)
        part, key_length = self.source.part(start, count), self.source.format.key_length
        rows = placed(room, count, self.source.format.record_length, part.extents[0].offset)
        part.read(rows)
        index = order(rows, key_length)
        position = first_position(self._worker) + start
        return rows, index, [0, *boundary_cuts(rows, index, position, key_length, self._plan.boundaries), count]

    @contextmanager
    def _sorted_again(self, run: Run) -> Iterator[Viewed]:
        """Lend the rows of a run that are kept nowhere."""
        with self._buffers.lent() as (unsorted, _):
            rows, index, cuts = self._ordered(run.block, unsorted)
            if cuts != run.cuts or fingerprint(self.source) != self._fingerprint:
                raise SortInputError("the input of this worker changed while it was sorted; sort it anew")
            yield Ordered(rows, index)

    def _keep_for_others(self, block: int, cuts: list[int], rows: Rows, index: Index) -> dict[int, Celled] | None:
        """Keep the rows for all other workers in memory; None when this block is none of those, or memory is short."""
        if not stays(block, self._shares.sent):
            return None
        kept: dict[int, Celled] = {}
        for worker in range(self._plan.workers):
            low, high = self._plan.extent(cuts, worker)
            if worker == self._worker:
                continue
            celled = self._keep(rows, index[low:high], low)
            if celled is None:
                for one in kept.values():
                    one.close()
                return None
            kept[worker] = celled
        return kept

    def _keep(self, rows: Rows, index: Index, first: int) -> Celled | None:
        """Copy rows in order into memory; `first` is the number of the first one."""
        kept = self._cells.lend(len(index), first)
        if kept is not None:
            at = 0
            for part in kept.parts():
                gather(rows, index[at : at + len(part)], part)
                at += len(part)
        return kept

    def _spill(self, block: int, cuts: list[int], rows: Rows, index: Index, first: int, spout: Spout) -> Spilled:
        """Write rows in order to a file and the note beside it; neither has its name before it is whole."""
        path = self._path(block)
        part = path.with_name(f"{path.name}.part")
        file = DirectWriter(part, len(index) * rows.shape[1])
        try:
            checksum = spout.pour(rows, index, file, 0)
        finally:
            file.close()
        part.rename(path)
        write_note(path, {"stamp": self._stamp, "cuts": cuts, "first": first, "rows": len(index), "checksum": checksum})
        return Spilled(path, rows.shape[1], first)

    def _path(self, block: int) -> Path:
        return self._place / f"run-{block:06}"

    def _found(self, block: int) -> Run | None:
        """Give what an earlier start of this worker wrote of a block, if it is whole."""
        path = self._path(block)
        note = read_note(path)
        if note is None or note.get("stamp") != self._stamp:
            return None
        length = self.source.format.record_length
        with self._buffers.lent() as (room, _):
            if not holds(path, placed(room, note["rows"], length, 0), note["checksum"]):
                return None
        cuts = note["cuts"]
        is_whole = note["rows"] == cuts[-1]
        return Run(block, cuts, Spilled(path, length, note["first"]), {}, None if is_whole else self._sorted_again)


def fingerprint(source: Source) -> str:
    """Give what tells two sources apart: their format and extents, and the sizes and times of their files."""
    digest = xxhash.xxh3_64(str(source.format).encode())
    for extent in source.extents:
        status = Path(extent.path).stat()
        digest.update(os.fsencode(f"{extent}{status.st_size}{status.st_mtime_ns}"))
    return digest.hexdigest()


def holds(path: Path, room: Rows, checksum: str) -> bool:
    """Read a file into an array of exactly its size and tell whether its checksum is right."""
    if not path.exists() or path.stat().st_size != room.nbytes:
        return False
    file = DirectReader(path)
    try:
        data = room.reshape(-1).data
        file.read(data, 0)
        return bool(xxhash.xxh3_64_hexdigest(data) == checksum)
    finally:
        file.close()


def write_note(path: Path, note: dict[str, Any]) -> None:
    """Write the note beside a file."""
    final = path.with_name(f"{path.name}.json")
    part = path.with_name(f"{path.name}.json.part")
    part.write_bytes(orjson.dumps(note))
    part.rename(final)


def read_note(path: Path) -> dict[str, Any] | None:
    """Read the note beside a file; None when there is none, or none that can be read."""
    try:
        found = orjson.loads(path.with_name(f"{path.name}.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return found if isinstance(found, dict) else None
