"""The sorting of source blocks into runs, whose rows stay in memory or go to a file.

Rows for other workers stay first: they are let go as soon as those have them, and their memory takes what comes from
others. Should a worker that was started again want them once more, the block is read and sorted again.

Invariant: a file has its final name only when all of it is written, and beside it a note with its checksum; a file that
is found again is used only when note and checksum are right.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import xxhash

from interlock.errors import SortInputError
from interlock.sort.data.checksum import fingerprint
from interlock.sort.data.keys import boundary_cuts, gather, order
from interlock.sort.data.plan import first_position, stays
from interlock.sort.io.buffers import Spilled
from interlock.sort.io.direct_io import DirectReader, DirectWriter, placed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from interlock.sort.data.keys import Index, Rows
    from interlock.sort.data.plan import Plan
    from interlock.sort.data.records import Source
    from interlock.sort.io.buffers import Buffers, Rowstore, Spout
    from interlock.sort.io.memory import Celled, Cells

    Again = Callable[["Run", set[int]], dict[int, Rowstore]]

NOTES = 2  # the version of what notes say


class Shares(NamedTuple):
    """Of how many blocks the rows stay in memory, from 0 to 1: those for other workers, and the worker's own."""

    sent: float = 0.0
    own: float = 0.0


class Run:
    """The sorted rows of one source block; `cuts` are the row numbers at which windows begin and end.

    `own` are those of the worker's own partitions, `sent` those for others, as long as they are kept. Those that are
    not are had by sorting the block `again`; without that, `own` has the rows of all.
    """

    def __init__(
        self, block: int, cuts: list[int], own: Rowstore, sent: dict[int, Celled], again: Again | None
    ) -> None:
        self.block = block
        self.cuts = cuts
        self.own = own
        self._sent: dict[int, Rowstore] = {**sent}
        self._again = again
        self._served: set[int] = set()
        self._changing = threading.Lock()

    def rows_for(self, worker: int) -> Rowstore:
        """Give the rows for another worker, wherever they are; they stay there until it has them."""
        if self._again is None:
            return self.own
        with self._changing:
            if worker not in self._sent:
                self._served.discard(worker)
                self._sent |= self._again(self, self._served | self._sent.keys())
            return self._sent[worker]

    def let_go(self, worker: int) -> None:
        """Hear that another worker has its rows."""
        with self._changing:
            self._served.add(worker)
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
        self._others = set(range(plan.workers)) - {worker}
        self._buffers = buffers
        self._place = place
        self._cells = cells
        self._shares = shares
        self._fingerprint = fingerprint(source)
        self._stamp = f"{NOTES} {plan.digest()} {worker} {block_records} {self._fingerprint}"

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
            try:
                own: Rowstore | None = None
                if stays(block, self._shares.own):
                    own = self._keep(rows, index[low:high], low)
                if own is None:
                    own = self._spill(block, cuts, rows, index[low:high], low, spout)
            except BaseException:
                _close_all(sent)
                raise
            return Run(block, cuts, own, sent, self._sort_again), False

    def _ordered(self, block: int, array: NDArray[np.uint8]) -> tuple[Rows, Index, list[int]]:
        """Read a block; give its rows, their order, and the places of the boundaries in it."""
        start = block * self._block_records
        count = min(self._block_records, self.source.records - start)
        part, key_length = self.source.part(start, count), self.source.format.key_length
        rows = placed(array, count, self.source.format.record_length, part.extents[0].offset)
        part.read(rows)
        index = order(rows, key_length)
        position = first_position(self._worker) + start
        return rows, index, [0, *boundary_cuts(rows, index, position, key_length, self._plan.boundaries), count]

    def _sort_again(self, run: Run, but: set[int]) -> dict[int, Rowstore]:
        """Give rows of a run that are kept nowhere: those for all others but some."""
        found: dict[int, Rowstore] = {}
        with self._buffers.lent() as (unsorted, spout):
            rows, index, cuts = self._ordered(run.block, unsorted)
            if cuts != run.cuts or fingerprint(self.source) != self._fingerprint:
                raise SortInputError("the input of this worker changed while it was sorted; sort it anew")
            try:
                for worker in self._others - but:
                    low, high = self._plan.extent(cuts, worker)
                    found[worker] = self._keep(rows, index[low:high], low) or self._put_aside(
                        run.block, worker, rows, index[low:high], low, spout
                    )
            except BaseException:
                _close_all(found)
                raise
        return found

    def _put_aside(self, block: int, worker: int, rows: Rows, index: Index, first: int, spout: Spout) -> Spilled:
        """Write rows that were sorted again to a file of their own, which nobody uses after this process."""
        path = self._place / f"sent-{block:06}-{worker:04}"
        _write(path, rows, index, spout)
        return Spilled(path, rows.shape[1], first)

    def _keep_for_others(self, block: int, cuts: list[int], rows: Rows, index: Index) -> dict[int, Celled] | None:
        """Keep the rows for all other workers in memory; None when this block is none of those, or memory is short."""
        if not stays(block, self._shares.sent):
            return None
        kept: dict[int, Celled] = {}
        for worker in self._others:
            low, high = self._plan.extent(cuts, worker)
            celled = self._keep(rows, index[low:high], low)
            if celled is None:
                _close_all(kept)
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
        checksum = _write(path, rows, index, spout)
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
        with self._buffers.lent() as (array, _):
            if not holds(path, placed(array, note["rows"], length, 0), note["checksum"]):
                return None
        cuts = note["cuts"]
        is_whole = note["rows"] == cuts[-1]
        return Run(block, cuts, Spilled(path, length, note["first"]), {}, None if is_whole else self._sort_again)


def _write(path: Path, rows: Rows, index: Index, spout: Spout) -> str:
    """Write rows in order to a file, which has its name when it is whole; give its checksum."""
    part = path.with_name(f"{path.name}.part")
    file = DirectWriter(part, len(index) * rows.shape[1])
    try:
        checksum = spout.pour(rows, index, file, 0)
    finally:
        file.close()
    part.rename(path)
    return checksum


def _close_all(kept: Mapping[int, Rowstore]) -> None:
    for one in kept.values():
        one.close()


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
