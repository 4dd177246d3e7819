"""What a sort worker does with its records: sample, sort, send, merge, and clean up by the state it was in.

Invariant: it reads the input and never writes there; all that is unfinished is in the temporary directory or has a
hidden name in the output directory.
"""

from __future__ import annotations

import os
import platform
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from interlock.errors import SortError
from interlock.lifecycle import SortWorkerState
from interlock.sort.data.plan import Sample, block_size, first_position, take_sample, wanted_of, window_size
from interlock.sort.io.buffers import Buffers
from interlock.sort.io.memory import Cells
from interlock.sort.io.merge import Merger, Slice, is_proven
from interlock.sort.io.runs import BlockSorter, Run, Shares, read_note, write_note
from interlock.sort.io.shuffle_receiver import Inbox, Name
from interlock.sort.io.shuffle_sender import Sender
from interlock.sort.settings import MEBIBYTE, Partition

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from interlock.sort.data.plan import Plan
    from interlock.sort.data.records import Source
    from interlock.sort.settings import Settings

THREADS = 3  # more than the two cores that a worker is for: some wait for the disk while others sort
OVERHEAD = 96 * MEBIBYTE  # of the interpreter, its libraries, rooms, and what is under way between processes
INDEXED = 40  # bytes that are used to bring one row in order, beside the row itself
UNEVEN = 1.05  # how much more than its share a worker may receive
CELLS = 16  # of which a slice consists, unless it is a very small one: half of the last is waste
LEAST_CELL, LARGEST_CELL = 4096, MEBIBYTE
SLACK = 1.25  # room for halves of cells, and for shares that differ from what was planned
RUNS, SLICES, NOTES = "runs", "slices", "outputs"


class Workshop:
    """The records of one worker on their way, and how far they are."""

    def __init__(
        self,
        source: Source,
        output: Path,
        temp: Path,
        settings: Settings,
        changed: threading.Condition,
        failed: Callable[[BaseException], None],
        check: Callable[[], None],
    ) -> None:
        self.source = source
        self.output = output
        self.temp = temp
        self.settings = settings
        self.block_records = block_size(source, settings)
        self.window_records = window_size(source, settings)
        self._at_once = max(self.block_records, self.window_records * 5 // 4)  # windows differ from what was planned
        self._buffers = Buffers(THREADS, self._at_once, source.format.record_length)
        self.plan: Plan | None = None
        self.worker = -1
        self.inbox: Inbox | None = None
        self.sender: Sender | None = None
        self.reused = 0
        self.done = 0
        self.shares = Shares()
        self._cells = Cells(0, 1, self._length)
        self._runs: list[Run] = []
        self._changed = changed
        self._failed = failed
        self._check = check
        self._counting = threading.Lock()

    def sample(self, worker: int, workers: int, partitions: int) -> Sample:
        """Take this worker's part of the sample."""
        source = self.source
        wanted = wanted_of(source.records, self.window_records, source.format.key_length, partitions, workers)
        return take_sample(self.source, first_position(worker), wanted)

    def accept(self, plan: Plan, worker: int) -> None:
        """Make ready for a plan: from now on slices of others can be taken in."""
        self._make_room(plan, worker)
        inbox = Inbox(plan, worker, self._length, self._place(SLICES), self._cells, self._changed)
        self.reused += inbox.find()
        self.plan, self.worker, self.inbox = plan, worker, inbox

    def sort(self) -> None:
        """Sort all blocks."""
        plan = self._planned()
        blocks = -(-self.source.records // self.block_records)
        place = self._place(RUNS)
        sorter = BlockSorter(
            self.source, self.block_records, plan, self.worker, self._buffers, place, self._cells, self.shares
        )

        def sort(block: int) -> None:
            self._check()
            run, reused = sorter.sort(block)
            self.count(run.cuts[-1] * self._length, reused=reused)
            self._runs.append(run)

        self.done = 0
        with ThreadPoolExecutor(THREADS) as pool:
            try:
                for _ in pool.map(sort, range(blocks)):
                    continue
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        self._runs.sort(key=lambda run: run.block)

    def begin_shuffle(self, patience: float) -> Sender:
        """Make ready to send."""
        self.done = 0
        self.sender = Sender(
            self._planned(), self.worker, self._runs, self._length, patience, self._changed, self._failed
        )
        return self.sender

    def is_shuffled(self) -> bool:
        """Tell whether everything was sent and received."""
        return self.sender is not None and self.inbox is not None and self.inbox.is_complete() and self.sender.is_done()

    def merge(self) -> list[Partition]:
        """Write this worker's partitions."""
        plan = self._planned()
        merger = Merger(self._length, self.source.format.key_length, self._buffers, THREADS)
        self.done = 0
        return [self._merge(plan, merger, partition) for partition in plan.owned(self.worker)]

    def progress(self, state: SortWorkerState) -> float:
        """Say how far a phase is, from 0 to 1."""
        if state is SortWorkerState.SORTING:
            return self.done / self.source.size if self.source.size else 1.0
        if state is SortWorkerState.SHUFFLING and self.sender is not None and self.inbox is not None:
            return (self.sender.progress() + self.inbox.progress()) / 2
        if state is SortWorkerState.MERGING and self.inbox is not None:
            expected = self.inbox.size + self._own_size()
            return self.done / expected if expected else 1.0
        return 0.0

    def bytes_done(self, state: SortWorkerState) -> int:
        """Count the bytes that the present phase has dealt with."""
        if state is SortWorkerState.SHUFFLING and self.sender is not None:
            return self.sender.sent
        return self.done

    def close(self) -> None:
        """Send no more, and let go of files and memory."""
        if self.sender is not None:
            self.sender.stop()
        for run in self._runs:
            run.close()
        self._runs = []
        if self.inbox is not None:
            self.inbox.close()

    def clean_after_failure(self, state: SortWorkerState) -> None:
        """Remove what a failure in a state leaves behind, and nothing that an earlier phase finished."""
        if state in {SortWorkerState.SORTING, SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL}:
            shutil.rmtree(self.temp / RUNS, ignore_errors=True)
        elif state in {SortWorkerState.SHUFFLING, SortWorkerState.WAITING_FOR_MERGE_SIGNAL}:
            shutil.rmtree(self.temp / SLICES, ignore_errors=True)
        elif state is SortWorkerState.MERGING:
            self._remove_outputs()
        else:
            self.clean_all()

    def clean_after_kill(self) -> None:
        """Remove what a killed process had not finished; what it had is used again if its checksum proves it."""
        for path in [*self.temp.glob("*/*.part"), *self.temp.glob("*.part")]:
            path.unlink(missing_ok=True)

    def clean_after_completion(self) -> None:
        """Remove what only an unfinished sort needs; the notes that prove the output stay."""
        for name in (RUNS, SLICES):
            shutil.rmtree(self.temp / name, ignore_errors=True)

    def forget(self) -> None:
        """Begin anew, with another plan."""
        self.plan, self.inbox, self.sender, self._runs, self.done = None, None, None, [], 0

    def clean_all(self) -> None:
        """Remove all temporary files."""
        for name in (RUNS, SLICES, NOTES):
            shutil.rmtree(self.temp / name, ignore_errors=True)

    @property
    def _length(self) -> int:
        return self.source.format.record_length

    def _planned(self) -> Plan:
        if self.plan is None:
            raise SortError("there is no plan yet")
        return self.plan

    def count(self, size: int, *, reused: bool = False) -> None:
        """Count bytes that the present phase has dealt with."""
        with self._counting:
            self.done += size
            self.reused += reused

    def _own_size(self) -> int:
        plan = self._planned()
        extents = [plan.extent(run.cuts, self.worker) for run in self._runs]
        return sum(high - low for low, high in extents) * self._length

    def _place(self, name: str) -> Path:
        """Give the directory for sorted rows that do not stay in memory."""
        place = self.temp / name
        place.mkdir(parents=True, exist_ok=True)
        return place

    @property
    def room(self) -> int:
        """The bytes of memory that are left for records beside all else."""
        buffers = THREADS * self._at_once * (self._length + INDEXED)
        return max(0, self.settings.memory - OVERHEAD - buffers)

    def _make_room(self, plan: Plan, worker: int) -> None:
        """Say what stays in memory: first rows for others, which give way to those that come, then the worker's own.

        What stays of the former need be written and read neither here nor there, so it is worth twice the latter.
        """
        total = sum(member.records for member in plan.roster.members) * self._length
        share = total * len(plan.owned(worker)) // plan.partitions
        own = share * self.source.size // total if total else 0
        sent, received = self.source.size - own, int((share - own) * UNEVEN)
        passing = max(sent, received)
        room = min(self.room, int((own + sent + received) * SLACK))
        if self.settings.resident is not None:
            room = int(self.settings.resident * (own + passing) * SLACK)
        self.shares = Shares(_share(room, sent), _share(room - passing, own))
        slice_records = min(self.block_records, self.source.records) // max(plan.partitions, plan.workers)
        cell = min(max(slice_records // CELLS, LEAST_CELL // self._length, 1), max(LARGEST_CELL // self._length, 1))
        self._cells = Cells(room, cell, self._length)

    def _merge(self, plan: Plan, merger: Merger, partition: int) -> Partition:
        path = self.output / f"partition.{partition}"
        beside = self.temp / NOTES / path.name
        stamp = f"{plan.epoch} {plan.digest()} {partition}"
        note = read_note(beside)
        if note is not None and note.get("stamp") == stamp and is_proven(path, note):
            self.count(note["rows"] * self._length, reused=True)
        else:
            note = {**merger.merge(self._slices(plan, partition), path, self._written), "stamp": stamp}
            beside.parent.mkdir(parents=True, exist_ok=True)
            write_note(beside, note)
        return Partition(partition, str(path), note["rows"], note["rows"] * self._length)

    def _written(self, size: int) -> None:
        self._check()
        self.count(size)

    def _slices(self, plan: Plan, partition: int) -> list[Slice]:
        """List the slices of a partition in input order."""
        slices: list[Slice] = []
        for member in plan.roster.members:
            if member.index == self.worker:
                slices += [Slice(run.own, plan.edges(run.cuts, partition)) for run in self._runs]
            elif self.inbox is not None:
                names = (Name(member.index, block, partition) for block in range(member.blocks))
                slices += [self.inbox.slice(name) for name in names]
        return slices

    def _remove_outputs(self) -> None:
        """Remove the partitions that this sort wrote; one that it did not come to replace stays."""
        for partition in self.plan.owned(self.worker) if self.plan is not None else ():
            path = self.output / f"partition.{partition}"
            note = self.temp / NOTES / f"{path.name}.json"
            if note.exists():
                path.unlink(missing_ok=True)
                note.unlink()
            path.with_name(f".{path.name}.part").unlink(missing_ok=True)


def _share(room: int, size: int) -> float:
    return min(1.0, max(0.0, room / size)) if size else 1.0


def disk_of(place: Path) -> str:
    """Name the file system of a directory, so that two workers on one can be told from two on two."""
    return f"{platform.node()}:{place.stat().st_dev}"


def free_space(place: Path) -> int:
    """Give the bytes that can still be written to the file system of a directory."""
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize
