"""The phases of a worker: sample, sort, shuffle, merge, and the clean-up that belongs to each state.

Invariant: the input is only read. All unfinished files are in the work directory, or have a hidden name in the output
directory.
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
from interlock.sort.data.plan import (
    Sample,
    choose_block_records,
    choose_window_records,
    first_position,
    overhead_bytes,
    sample_size,
    sampled_key_bytes,
    take_sample,
)
from interlock.sort.io.buffers import BufferPool
from interlock.sort.io.memory import RowPool
from interlock.sort.io.merge import Merger, Slice, verify_output
from interlock.sort.io.runs import BlockSorter, ResidentShares, Run, read_manifest, write_manifest
from interlock.sort.io.shuffle_receiver import ShuffleReceiver, SliceId
from interlock.sort.io.shuffle_sender import ShuffleSender
from interlock.sort.memory_plan import (
    MEBIBYTE,
    THREADS,
    check_worker_memory,
    edges_bytes,
    fixed_bytes,
)
from interlock.sort.settings import Partition

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from interlock.sort.data.plan import Plan
    from interlock.sort.data.records import Source
    from interlock.sort.security import Security
    from interlock.sort.settings import Settings

SPARE_LINE_BYTES = 512 << 10  # of a buffer of lines, for the end of its last line and for the boundaries
RECEIVE_MARGIN = 1.05  # a worker may receive this much more than an even share
SLABS_PER_SLICE = 16  # unless the slice is very small; half of the last slab is wasted on average
MIN_SLAB_BYTES, MAX_SLAB_BYTES = 4096, MEBIBYTE
POOL_MARGIN = 1.25  # for half-empty slabs, and for shares that differ from the plan
RUNS, SLICES, MANIFESTS = "runs", "slices", "outputs"  # in the work directory


class PhaseRunner:
    """Runs the phases of one worker on its records, and measures their progress."""

    def __init__(
        self,
        source: Source,
        output: Path,
        work_dir: Path,
        settings: Settings,
        changed: threading.Condition,
        on_failure: Callable[[BaseException], None],
        check: Callable[[], None],
    ) -> None:
        self.source = source
        self.output = output
        self.work_dir = work_dir
        self.settings = settings
        check_worker_memory(settings, source.records, source.format.record_length, overhead_bytes(source, settings))
        self.block_records = choose_block_records(source, settings)
        self.window_records = choose_window_records(source, settings)
        self._buffer_records = max(self.block_records, self.window_records * 5 // 4)  # windows differ from the plan
        spare = SPARE_LINE_BYTES if source.format.lines is not None else 0
        self._buffers = BufferPool(THREADS, self._buffer_records, source.format.record_length, spare)
        self.plan: Plan | None = None
        self.worker = -1
        self.receiver: ShuffleReceiver | None = None
        self.sender: ShuffleSender | None = None
        self.reused = 0
        self.done = 0
        self.shares = ResidentShares()
        self._pool = RowPool(0, 1, self._length)
        self._runs: list[Run] = []
        self._changed = changed
        self._on_failure = on_failure
        self._check = check
        self._count_lock = threading.Lock()

    def sample(self, worker: int, workers: int, partitions: int) -> Sample:
        """Sample the keys of this worker's input."""
        source = self.source
        size = sample_size(source.records, self.window_records, sampled_key_bytes(source), partitions, workers)
        return take_sample(self.source, first_position(worker), size)

    def accept(self, plan: Plan, worker: int) -> None:
        """Allocate memory for a plan, and start to receive slices of other workers."""
        self._allocate_pool(plan, worker)
        receiver = ShuffleReceiver(plan, worker, self._length, self._make_directory(SLICES), self._pool, self._changed)
        self.reused += receiver.load_spilled()
        self.plan, self.worker, self.receiver = plan, worker, receiver

    def sort(self) -> None:
        """Sort all blocks into runs."""
        blocks = -(-self.source.records // self.block_records)
        sorter = BlockSorter(
            self.source,
            self.block_records,
            self._accepted_plan(),
            self.worker,
            self._buffers,
            self._make_directory(RUNS),
            self._pool,
            self.shares,
        )

        def sort(block: int) -> None:
            self._check()
            run, reused = sorter.sort(block)
            first = block * self.block_records
            self.count(min(self.block_records, self.source.records - first) * self._length, reused=reused)
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

    def begin_shuffle(self, timeout: float, security: Security) -> ShuffleSender:
        """Create the sender of the shuffle."""
        self.done = 0
        self.sender = ShuffleSender(
            self._accepted_plan(),
            self.worker,
            self._runs,
            self._length,
            timeout,
            security,
            self._changed,
            self._on_failure,
        )
        return self.sender

    def is_shuffled(self) -> bool:
        """Return whether everything was sent and received."""
        if self.sender is None or self.receiver is None:
            return False
        return self.receiver.is_complete() and self.sender.is_done()

    def merge(self) -> list[Partition]:
        """Write this worker's partitions."""
        plan = self._accepted_plan()
        merger = Merger(self.source.format, self._buffers, THREADS, self.settings.compression)
        self.done = 0
        return [self._merge_partition(plan, merger, partition) for partition in plan.owned(self.worker)]

    def progress(self, state: SortWorkerState) -> float:
        """Return the progress of a phase, from 0 to 1."""
        if state is SortWorkerState.SORTING:
            return self.done / self.source.size if self.source.size else 1.0
        if state is SortWorkerState.SHUFFLING and self.sender is not None and self.receiver is not None:
            return (self.sender.progress() + self.receiver.progress()) / 2
        if state is SortWorkerState.MERGING and self.receiver is not None:
            expected = self.receiver.size + self._own_size()
            return self.done / expected if expected else 1.0
        return 0.0

    def bytes_done(self, state: SortWorkerState) -> int:
        """Return the number of bytes that the current phase has processed."""
        if state is SortWorkerState.SHUFFLING and self.sender is not None:
            return self.sender.sent
        return self.done

    def count(self, size: int, *, reused: bool = False) -> None:
        """Count bytes that the current phase has processed."""
        with self._count_lock:
            self.done += size
            self.reused += reused

    def close(self) -> None:
        """Stop to send, and release files and memory."""
        if self.sender is not None:
            self.sender.stop()
        for run in self._runs:
            run.close()
        self._runs = []
        if self.receiver is not None:
            self.receiver.close()

    def reset(self) -> None:
        """Discard the plan and all runs, for a restart with another plan."""
        self.plan, self.receiver, self.sender, self._runs, self.done = None, None, None, [], 0

    def clean_after_failure(self, state: SortWorkerState) -> None:
        """Remove the files of the phase that failed, but none that an earlier phase finished."""
        if state in {SortWorkerState.SORTING, SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL}:
            shutil.rmtree(self.work_dir / RUNS, ignore_errors=True)
        elif state in {SortWorkerState.SHUFFLING, SortWorkerState.WAITING_FOR_MERGE_SIGNAL}:
            shutil.rmtree(self.work_dir / SLICES, ignore_errors=True)
        elif state is SortWorkerState.MERGING:
            self._remove_outputs()
        else:
            self.clean_all()

    def clean_after_kill(self) -> None:
        """Remove the incomplete files of a killed process; complete ones are reused if their checksums match."""
        for path in [*self.work_dir.glob("*/*.part"), *self.work_dir.glob("*.part")]:
            path.unlink(missing_ok=True)

    def clean_after_completion(self) -> None:
        """Remove runs and slices; the manifests, which verify the output, stay."""
        for name in (RUNS, SLICES):
            shutil.rmtree(self.work_dir / name, ignore_errors=True)

    def clean_all(self) -> None:
        """Remove all files of the work directory but the journal."""
        for name in (RUNS, SLICES, MANIFESTS):
            shutil.rmtree(self.work_dir / name, ignore_errors=True)

    @property
    def row_memory(self) -> int:
        """The bytes of memory that are left for rows between the phases."""
        buffers = int(THREADS * self._buffer_records * (self._length + overhead_bytes(self.source, self.settings)))
        edges = edges_bytes(self.settings.workers, self.source.records, min(self.block_records, self.window_records))
        return max(0, self.settings.memory - fixed_bytes(self.settings.workers) - buffers - edges)

    @property
    def _length(self) -> int:
        return self.source.format.record_length

    def _accepted_plan(self) -> Plan:
        if self.plan is None:
            raise SortError("there is no plan yet")
        return self.plan

    def _own_size(self) -> int:
        plan = self._accepted_plan()
        extents = [plan.extent(run.cuts, self.worker) for run in self._runs]
        return sum(high - low for low, high in extents) * self._length

    def _make_directory(self, name: str) -> Path:
        directory = self.work_dir / name
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _allocate_pool(self, plan: Plan, worker: int) -> None:
        """Decide what stays in memory, and allocate it: first rows for others, then the worker's own.

        Rows for others give way to those that arrive, and are neither written and read here nor there, so keeping them
        in memory is worth twice as much as keeping the worker's own.
        """
        total = sum(member.records for member in plan.roster.members) * self._length
        share = total * len(plan.owned(worker)) // plan.partitions
        own = share * self.source.size // total if total else 0
        sent, received = self.source.size - own, int((share - own) * RECEIVE_MARGIN)
        passing = max(sent, received)
        memory = min(self.row_memory, int((own + sent + received) * POOL_MARGIN))
        if self.settings.resident_share is not None:
            memory = int(self.settings.resident_share * (own + passing) * POOL_MARGIN)
        self.shares = ResidentShares(_share(memory, sent), _share(memory - passing, own))
        slice_records = min(self.block_records, self.source.records) // max(plan.partitions, plan.workers)
        min_rows, max_rows = MIN_SLAB_BYTES // self._length, max(MAX_SLAB_BYTES // self._length, 1)
        slab_rows = min(max(slice_records // SLABS_PER_SLICE, min_rows, 1), max_rows)
        self._pool = RowPool(memory, slab_rows, self._length)

    def _merge_partition(self, plan: Plan, merger: Merger, partition: int) -> Partition:
        path = self.output / self.settings.partition_name(partition)
        manifest_path = self.work_dir / MANIFESTS / path.name
        identity = f"{plan.epoch} {plan.digest()} {partition}"
        manifest = read_manifest(manifest_path)
        if manifest is not None and manifest.get("identity") == identity and verify_output(path, manifest):
            self.count(manifest["rows"] * self._length, reused=True)
        else:
            merged = merger.merge(self._list_slices(plan, partition), path, self._count_merged)
            manifest = {**merged, "identity": identity}
            manifest_path.parent.mkdir(parents=True, exist_ok=True)
            write_manifest(manifest_path, manifest)
        return Partition(partition, str(path), manifest["lines"], manifest["rows"] * self._length)

    def _count_merged(self, size: int) -> None:
        self._check()
        self.count(size)

    def _list_slices(self, plan: Plan, partition: int) -> list[Slice]:
        """List the slices of a partition in input order."""
        slices: list[Slice] = []
        for member in plan.roster.members:
            if member.index == self.worker:
                slices += [Slice(run.own, plan.edges(run.cuts, partition)) for run in self._runs]
            elif self.receiver is not None:
                ids = (SliceId(member.index, block, partition) for block in range(member.blocks))
                slices += [self.receiver.slice(slice_id) for slice_id in ids]
        return slices

    def _remove_outputs(self) -> None:
        """Remove the partitions that this sort wrote, but not an older one that it has not replaced yet."""
        for partition in self.plan.owned(self.worker) if self.plan is not None else ():
            path = self.output / self.settings.partition_name(partition)
            manifest = self.work_dir / MANIFESTS / f"{path.name}.json"
            if manifest.exists():
                path.unlink(missing_ok=True)
                manifest.unlink()
            path.with_name(f".{path.name}.part").unlink(missing_ok=True)


def _share(memory: int, size: int) -> float:
    return min(1.0, max(0.0, memory / size)) if size else 1.0


def disk_id(directory: Path) -> str:
    """Return an id of the file system of a directory, the same for all workers that share it."""
    return f"{platform.node()}:{directory.stat().st_dev}"


def free_space(directory: Path) -> int:
    """Return the free bytes of the file system of a directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
