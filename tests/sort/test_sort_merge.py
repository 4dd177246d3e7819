"""Blocks become runs, runs become slices, slices become partitions: in input order, verified by checksums."""

from __future__ import annotations

import os
import threading
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.errors import SortError, SortInputError
from interlock.sort.data.keys import Boundary
from interlock.sort.data.plan import (
    Member,
    Plan,
    Roster,
    choose_block_records,
    choose_boundaries,
    choose_window_records,
    first_position,
    is_resident,
    overhead_bytes,
    take_sample,
    window_count,
)
from interlock.sort.data.records import Extent, RecordFormat, Source
from interlock.sort.engines.local import run_local
from interlock.sort.io.buffers import BufferPool
from interlock.sort.io.direct_io import MAX_IO_BYTES, PAGE_BYTES, io_buffer
from interlock.sort.io.memory import MemoryReleased, PooledRows, RowPool
from interlock.sort.io.merge import Merger, Slice, list_windows, plan_windows, split_window, verify_output
from interlock.sort.io.runs import BlockSorter, ResidentShares, Run, read_manifest, write_manifest
from interlock.sort.io.shuffle_receiver import ShuffleReceiver, SliceId
from interlock.sort.settings import Compression, Settings
from interlock.sort.wire_pb2 import ShuffleDataChunk
from interlock.sort.worker.phases import PhaseRunner
from sort_cluster import sorted_bytes, write_source

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.unit


def rows_of(seed: int, count: int, letters: int, length: int = 100) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, letters, (count, length), dtype=np.uint8)


def kept(rows: NDArray[np.uint8], first: int = 0) -> PooledRows:
    """Keep rows in a pool with slabs of seven rows."""
    pooled = RowPool(rows.nbytes + 7 * rows.shape[1], 7, rows.shape[1]).allocate(len(rows), first)
    assert pooled is not None
    pooled.write(np.ascontiguousarray(rows).reshape(-1).data, 0)
    return pooled


def planned(source: Source, workers: int, partitions: int, windows: int, block: int) -> Plan:
    shares = [source.share(number, workers) for number in range(workers)]
    samples = [take_sample(share, first_position(number), 400) for number, share in enumerate(shares)]
    boundaries = tuple(choose_boundaries(samples, partitions * windows))
    members = tuple(Member(number, "", 1, share.records, block) for number, share in enumerate(shares))
    return Plan(1, partitions, windows, boundaries, Roster(1, members))


def sent_rows(run: Run, plan: Plan, worker: int) -> NDArray[np.uint8]:
    """Return the rows of a run for another worker, as they would be sent."""
    low, high = plan.extent(run.cuts, worker)
    with io_buffer() as buffer:
        data = run.rows_for(worker).view(low, high - low, lambda: buffer)
        return np.frombuffer(bytes(data), np.uint8).reshape(-1, 100)


SHARES = [ResidentShares(), ResidentShares(0.5), ResidentShares(1, 0.5), ResidentShares(1, 1)]


@pytest.mark.parametrize("letters", [1, 2, 256])
@pytest.mark.parametrize("shares", SHARES)
def test_merged_records_are_the_sorted_input(tmp_path: Path, letters: int, shares: ResidentShares) -> None:
    rows = rows_of(3, 5_000, letters)
    source = write_source(tmp_path / "in", rows)
    plan = planned(source, 3, 4, 5, 700)
    runs: list[tuple[int, Run]] = []
    for worker in range(3):
        share = source.share(worker, 3)
        place, blocks = tmp_path / str(worker), plan.roster.members[worker].blocks
        place.mkdir()
        pool = RowPool(1_000_000, 8, 100)
        sorter = BlockSorter(share, 700, plan, worker, BufferPool(1, 700, 100), place, pool, shares)
        runs += [(worker, sorter.sort(block)[0]) for block in range(blocks)]
        assert len(list(place.glob("run-??????"))) == blocks - int(blocks * shares.own)
    written = b""
    for partition in range(4):
        owner = next(worker for worker in range(3) if partition in plan.owned(worker))
        slices = []
        for worker, run in runs:
            edges = plan.edges(run.cuts, partition)
            own = run.own if worker == owner else kept(sent_rows(run, plan, owner), plan.extent(run.cuts, owner)[0])
            slices.append(Slice(own, edges))
        path = tmp_path / f"partition.{partition}"
        sizes: list[int] = []
        manifest = Merger(RecordFormat(), BufferPool(2, 200, 100)).merge(slices, path, sizes.append)
        assert sum(sizes) == path.stat().st_size == manifest["rows"] * 100
        assert verify_output(path, manifest)
        written += path.read_bytes()
    assert written == sorted_bytes(rows)
    for _, run in runs:
        run.close()


@pytest.mark.parametrize("shares", SHARES)
def test_released_rows_are_produced_by_sorting_their_block_again(tmp_path: Path, shares: ResidentShares) -> None:
    source = write_source(tmp_path / "in", rows_of(1, 900, 3))
    plan = planned(source, 1, 1, 1, 300)
    plan = Plan(1, 3, 2, planned(source, 1, 3, 2, 300).boundaries, Roster(1, plan.roster.members * 3))
    pool = RowPool(1_000_000, 8, 100)
    sorter = BlockSorter(source, 300, plan, 1, BufferPool(1, 300, 100), tmp_path, pool, shares)
    for block in range(3):
        run, _ = sorter.sort(block)
        before = {worker: sent_rows(run, plan, worker).tobytes() for worker in (0, 2)}
        run.release(0)
        assert {worker: sent_rows(run, plan, worker).tobytes() for worker in (0, 2)} == before
        for worker in (0, 2):
            run.release(worker)
        rest = pool.allocate(1_000_000 // 800 * 8)
        assert {worker: sent_rows(run, plan, worker).tobytes() for worker in (0, 2)} == before, "from files"
        if rest is not None:
            rest.close()
        run.close()
    every = pool.allocate(1_000_000 // 800 * 8)
    assert every is not None, "released memory is reusable"
    every.close()
    with (tmp_path / "in").open("r+b") as file:
        file.write(b"another")
    if shares.sent:
        run, _ = sorter.sort(1)
        run.release(0)
        with pytest.raises(SortInputError, match="changed while it was sorted"):
            run.rows_for(0)
        run.close()


def test_rows_are_spilled_when_the_pool_is_full(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", rows_of(1, 900, 256))
    plan = planned(source, 3, 3, 1, 300)
    pool = RowPool(20_000, 8, 100)
    sorter = BlockSorter(
        source.share(0, 3), 300, plan, 0, BufferPool(1, 300, 100), tmp_path, pool, ResidentShares(1, 1)
    )
    run, _ = sorter.sort(0)
    assert len(sent_rows(run, plan, 1)) > 50
    assert (tmp_path / "run-000000").stat().st_size == 300 * 100, "all rows, since those for others do not fit"
    every = pool.allocate(20_000 // 800 * 8)
    assert every is not None, "memory allocated before the pool was full is freed"
    assert pool.allocate(1) is None
    assert pool.allocate(0) is not None
    every.close()
    every.close()
    with pytest.raises(MemoryReleased):
        every.read(0, np.empty((1, 100), np.uint8))
    again = pool.allocate(200)
    assert again is not None
    assert pool.allocate(1) is None, "freed twice, allocated once"
    run.close()


def test_received_rows_reuse_released_memory_and_spill_without_it(tmp_path: Path) -> None:
    plan = planned(write_source(tmp_path / "in", rows_of(1, 600, 256)), 2, 2, 1, 100)
    pool = RowPool(100 * 100, 10, 100)
    receiver = ShuffleReceiver(plan, 1, 100, tmp_path, pool, threading.Condition())
    sent = pool.allocate(60)
    assert sent is not None
    rows = rows_of(2, 50, 256)

    def receive(block: int) -> None:
        begin = receiver.begin(SliceId(0, block, 1), [50])
        for at in (0, 3_000):
            data = rows.reshape(-1)[at : at + 3_000].data
            head = ShuffleDataChunk(offset=at, checksum=xxhash.xxh3_64_intdigest(data))
            begin.add(SliceId(0, block, 1), head, data)
        begin.finish()

    receive(0)
    assert [path.name for path in tmp_path.glob("slice-*") if not path.suffix] == ["slice-0000-000000-00001"]
    sent.close()
    receive(1)
    receive(2)
    assert len([path for path in tmp_path.glob("slice-*") if not path.suffix]) == 1, "the others are in memory"
    for block in range(3):
        found = np.empty((50, 100), np.uint8)
        receiver.slice(SliceId(0, block, 1)).rows.read(0, found)
        assert found.tobytes() == rows.tobytes()
    receiver.close()
    assert pool.allocate(100) is not None


@pytest.mark.parametrize(
    ("memory", "sent", "own"),
    [
        (140_000_000, (0.0, 0.2), (0.0, 0.0)),
        (300_000_000, (0.3, 0.7), (0.0, 0.0)),
        (600_000_000, (1.0, 1.0), (0.2, 0.8)),
        (949_000_000, (1.0, 1.0), (1.0, 1.0)),
    ],
)
def test_resident_shares_depend_on_memory_and_favour_rows_for_others(
    tmp_path: Path, memory: int, sent: tuple[float, float], own: tuple[float, float]
) -> None:
    source = Source(RecordFormat(), (Extent("of a gigabyte", 0, 10_000_000),))
    half = source.share(0, 2)
    changed = threading.Condition()
    runner = PhaseRunner(half, tmp_path, tmp_path, Settings(memory=memory), changed, print, print)
    members = tuple(Member(number, "", 1, half.records, runner.block_records) for number in range(2))
    runner.accept(Plan(1, 2, 1, (Boundary(b"5", 0),), Roster(1, members)), 0)
    assert sent[0] <= runner.shares.sent <= sent[1]
    assert own[0] <= runner.shares.own <= own[1]
    kept = sum(is_resident(block, runner.shares.sent) for block in range(members[0].blocks))
    assert kept == int(members[0].blocks * runner.shares.sent)


@pytest.mark.parametrize("compression", list(Compression))
def test_the_packed_copy_of_a_window_is_in_the_memory_plan(tmp_path: Path, compression: Compression) -> None:
    rows = rows_of(1, 100_000, 256)  # which do not become smaller
    slices = [Slice(kept(rows), [0, len(rows)])]
    buffers = BufferPool(1, len(rows), 100)
    merger = Merger(RecordFormat(), buffers, 1, compression)
    with buffers.borrow():  # allocates the buffer
        pass
    source = Source(RecordFormat(), (Extent("of a gigabyte", 0, 10_000_000),))
    plain, packed = (Settings(memory=150_000_000, compression=one) for one in (None, compression))
    tracemalloc.start()
    try:
        merger.merge(slices, tmp_path / "partition.0", lambda _: None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows.nbytes < peak < len(rows) * overhead_bytes(source, packed) + (1 << 20)
    assert choose_block_records(source, packed) < choose_block_records(source, plain)


def test_a_small_input_allocates_little_memory(tmp_path: Path) -> None:
    rows = rows_of(1, 1_000, 256)
    report = run_local(
        write_source(tmp_path / "in", rows), tmp_path / "out", workers=2, settings=Settings(memory=1 << 50)
    )
    assert report.records == 1_000


def test_a_spilled_block_is_reused_only_if_checksum_and_input_match(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", rows_of(1, 1_000, 256))
    plan = planned(source, 1, 1, 4, 500)
    buffers, pool = BufferPool(1, 500, 100), RowPool(0, 1, 100)
    sorter = BlockSorter(source, 500, plan, 0, buffers, tmp_path, pool, ResidentShares())
    first, reused = sorter.sort(0)
    assert not reused
    again, reused = sorter.sort(0)
    assert reused
    assert again.cuts == first.cuts
    path = tmp_path / "run-000000"
    path.write_bytes(path.read_bytes()[::-1])
    mended, reused = sorter.sort(0)
    assert not reused
    manifest = read_manifest(path)
    assert manifest is not None
    write_manifest(path, {**manifest, "identity": manifest["identity"].removeprefix("3 ")})
    older, reused = sorter.sort(0)
    assert not reused, "a manifest of another version does not match"
    os.utime(tmp_path / "in", ns=(1, 1))
    changed, reused = BlockSorter(source, 500, plan, 0, buffers, tmp_path, pool, ResidentShares()).sort(0)
    assert not reused
    for run in (first, again, mended, older, changed):
        run.close()


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 40), st.sampled_from([1, 2, 256]))
@settings(max_examples=100, deadline=None)
def test_splitting_a_window_keeps_all_rows_in_order(seed: int, pieces: int, most: int, letters: int) -> None:
    rng = np.random.default_rng(seed)
    slices = []
    every = []
    for number in range(pieces):
        rows = rows_of(seed + number, int(rng.integers(0, 50)), letters, 4)
        rows = rows[np.argsort([row[:2].tobytes() for row in rows], kind="stable")] if len(rows) else rows
        every.append(rows)
        slices.append(Slice(kept(rows), [0, len(rows)]))
    written = b""
    for window in plan_windows(slices, most, RecordFormat(4, 2)):
        assert window.rows <= most
        assert window.first * 4 == len(written)
        part = np.empty((window.rows, 4), np.uint8)
        done = 0
        for segment in window.segments:
            segment.rows.read(segment.low, part[done : done + segment.size])
            done += segment.size
        written += sorted_bytes(part, 2)
    assert written == sorted_bytes(np.concatenate(every), 2)


def test_both_parts_of_a_split_window_have_rows() -> None:
    rows = np.zeros((2, 4), np.uint8)
    slices = [Slice(kept(rows[:1]), [0, 1]), Slice(kept(rows[1:]), [0, 1])]
    (window,) = list_windows(slices)
    assert [part.rows for part in split_window(window, 4, 2)] == [1, 1]


class Broken:
    def read(self, low: int, into: NDArray[np.uint8]) -> None:
        raise SortError(f"row {low} of {len(into)} cannot be read")

    def view(self, low: int, count: int, buffer: object) -> memoryview:
        raise SortError(f"rows {low} to {low + count} cannot be seen in {buffer}")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("before", [0, 1], ids=["read here", "read in the second thread"])
def test_a_failed_merge_leaves_no_file_and_raises_the_cause(before: int, tmp_path: Path) -> None:
    rows = rows_of(1, 10, 256)
    slices = [*(Slice(kept(rows), [0, 10]) for _ in range(before)), Slice(Broken(), [0, 10])]
    with pytest.raises(SortError, match="row 0 of 10 cannot be read"):
        Merger(RecordFormat(), BufferPool(2, 100, 100)).merge(slices, tmp_path / "partition.0", print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "sizes", [[100], [3_900, 5_000_000, 1, 199], [PAGE_BYTES] * 3, [MAX_IO_BYTES + 7, 93, 9_000_000]]
)
def test_a_spilled_slice_is_complete_for_any_chunk_sizes(sizes: list[int], tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, -(-sum(sizes) // 100) * 100, dtype=np.uint8)
    rows = len(data) // 100
    members = tuple(Member(number, "", 1, rows, rows) for number in range(2))
    plan = Plan(1, 2, 1, (Boundary(b"", 0),), Roster(1, members))
    receiver = ShuffleReceiver(plan, 1, 100, tmp_path, RowPool(0, 1, 100), threading.Condition())
    begin = receiver.begin(SliceId(0, 0, 1), [rows])
    offset = 0
    for size in [*sizes, len(data) - sum(sizes)]:
        piece = data.data[offset : offset + size]
        chunk = ShuffleDataChunk(offset=offset, checksum=xxhash.xxh3_64_intdigest(piece))
        begin.add(SliceId(0, 0, 1), chunk, piece)
        offset += size
    begin.finish()
    assert (tmp_path / "slice-0000-000000-00001").read_bytes() == data.tobytes()
    assert receiver.has_all(0, 0)
    again = ShuffleReceiver(plan, 1, 100, tmp_path, RowPool(0, 1, 100), threading.Condition())
    assert again.load_spilled() == 1
    for one in (receiver, again):
        one.close()


def test_a_changed_partition_fails_verification(tmp_path: Path) -> None:
    rows = rows_of(1, 100, 256)[np.argsort(np.arange(100))]
    path = tmp_path / "partition.0"
    manifest = Merger(RecordFormat(), BufferPool(2, 30, 100)).merge(
        [Slice(kept(rows[:1]), [0, 1])], path, lambda _: None
    )
    assert verify_output(path, manifest)
    path.write_bytes(b"x" * 100)
    assert not verify_output(path, manifest)
    path.unlink()
    assert not verify_output(path, manifest)


def test_blocks_and_windows_stay_within_the_memory(tmp_path: Path) -> None:
    source = Source(RecordFormat(), (Extent(str(tmp_path), 0, 10**9),))
    settings_ = Settings(memory=1 << 30)
    assert choose_block_records(source, settings_) * 100 <= (1 << 30) // 12
    assert choose_window_records(source, settings_) * 100 <= (1 << 30) // 12
    assert choose_block_records(Source(RecordFormat(), ()), settings_) == 131_072
    assert window_count(0, 2, 10, 10) == 1
    assert window_count(1_000, 2, 100, 10) == 5
    assert window_count(10**12, 2, 100, 10) == 10_000
    assert window_count(10**12, 2, 100, 10_000) == 2_092, "all boundaries fit one message"


def test_no_records_have_empty_boundaries() -> None:
    assert choose_boundaries([], 3) == [Boundary(b"", 0)] * 2
