"""Blocks become runs, runs become slices, slices become partitions: in input order, proven by checksums, never half."""

from __future__ import annotations

import json
import os
import threading
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
    block_size,
    choose_boundaries,
    first_position,
    stays,
    take_sample,
    window_count,
    window_size,
)
from interlock.sort.data.records import Extent, RecordFormat, Source
from interlock.sort.engines.local import run_local
from interlock.sort.io.buffers import Buffers
from interlock.sort.io.direct_io import AT_ONCE, PAGE, room
from interlock.sort.io.memory import Celled, Cells, GivenBack
from interlock.sort.io.merge import Merger, Slice, divide, fitting_windows, is_proven, windows_of
from interlock.sort.io.runs import BlockSorter, Run, Shares
from interlock.sort.io.shuffle_receiver import Inbox, Name
from interlock.sort.settings import Settings
from interlock.sort.wire_pb2 import ShuffleDataChunk
from interlock.sort.worker.phases import Workshop

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.unit


def rows_of(seed: int, count: int, letters: int, length: int = 100) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, letters, (count, length), dtype=np.uint8)


def source_of(path: Path, rows: NDArray[np.uint8], key_length: int = 10) -> Source:
    path.write_bytes(rows.tobytes())
    return Source(RecordFormat(rows.shape[1], key_length), (Extent(str(path), 0, len(rows)),))


def in_order(rows: NDArray[np.uint8], key_length: int = 10) -> bytes:
    records = [rows[at].tobytes() for at in range(len(rows))]
    records.sort(key=lambda record: record[:key_length])
    return b"".join(records)


def kept(rows: NDArray[np.uint8], first: int = 0) -> Celled:
    """Keep rows in memory, in cells of seven."""
    celled = Cells(rows.nbytes + 7 * rows.shape[1], 7, rows.shape[1]).lend(len(rows), first)
    assert celled is not None
    celled.fill(np.ascontiguousarray(rows).reshape(-1).data, 0)
    return celled


def planned(source: Source, workers: int, partitions: int, windows: int, block: int) -> Plan:
    shares = [source.share(number, workers) for number in range(workers)]
    samples = [take_sample(share, first_position(number), 400) for number, share in enumerate(shares)]
    boundaries = tuple(choose_boundaries(samples, partitions * windows))
    members = tuple(Member(number, "", 1, share.records, block) for number, share in enumerate(shares))
    return Plan(1, partitions, windows, boundaries, Roster(1, members))


def sent_rows(run: Run, plan: Plan, worker: int) -> NDArray[np.uint8]:
    """Give the rows of a run for another worker, as they would be sent."""
    low, high = plan.extent(run.cuts, worker)
    with room() as lent:
        data = run.rows_for(worker).view(low, high - low, lambda: lent)
        return np.frombuffer(bytes(data), np.uint8).reshape(-1, 100)


SHARES = [Shares(), Shares(0.5), Shares(1, 0.5), Shares(1, 1)]


@pytest.mark.parametrize("letters", [1, 2, 256])
@pytest.mark.parametrize("shares", SHARES)
def test_sampled_sorted_and_merged_records_are_the_sorted_input(tmp_path: Path, letters: int, shares: Shares) -> None:
    rows = rows_of(3, 5_000, letters)
    source = source_of(tmp_path / "in", rows)
    plan = planned(source, 3, 4, 5, 700)
    runs: list[tuple[int, Run]] = []
    for worker in range(3):
        share = source.share(worker, 3)
        place, blocks = tmp_path / str(worker), plan.roster.members[worker].blocks
        place.mkdir()
        cells = Cells(1_000_000, 8, 100)
        sorter = BlockSorter(share, 700, plan, worker, Buffers(1, 700, 100), place, cells, shares)
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
        note = Merger(100, 10, Buffers(2, 200, 100)).merge(slices, path, sizes.append)
        assert sum(sizes) == path.stat().st_size == note["rows"] * 100
        assert is_proven(path, note)
        written += path.read_bytes()
    assert written == in_order(rows)
    for _, run in runs:
        run.close()


@pytest.mark.parametrize("shares", SHARES)
def test_rows_that_were_let_go_are_had_again_by_sorting_their_block_again(tmp_path: Path, shares: Shares) -> None:
    source = source_of(tmp_path / "in", rows_of(1, 900, 3))
    plan = planned(source, 1, 1, 1, 300)
    plan = Plan(1, 3, 2, planned(source, 1, 3, 2, 300).boundaries, Roster(1, plan.roster.members * 3))
    cells = Cells(1_000_000, 8, 100)
    sorter = BlockSorter(source, 300, plan, 1, Buffers(1, 300, 100), tmp_path, cells, shares)
    for block in range(3):
        run, _ = sorter.sort(block)
        before = {worker: sent_rows(run, plan, worker).tobytes() for worker in (0, 2)}
        run.let_go(0)
        assert {worker: sent_rows(run, plan, worker).tobytes() for worker in (0, 2)} == before
        for worker in (0, 2):
            run.let_go(worker)
        rest = cells.lend(1_000_000 // 800 * 8)
        assert {worker: sent_rows(run, plan, worker).tobytes() for worker in (0, 2)} == before, "from files"
        if rest is not None:
            rest.close()
        run.close()
    every = cells.lend(1_000_000 // 800 * 8)
    assert every is not None, "what was let go is there for others"
    every.close()
    with (tmp_path / "in").open("r+b") as file:
        file.write(b"another")
    if shares.sent:
        run, _ = sorter.sort(1)
        run.let_go(0)
        with pytest.raises(SortInputError, match="changed while it was sorted"):
            run.rows_for(0)
        run.close()


def test_what_has_no_room_in_memory_goes_to_a_file(tmp_path: Path) -> None:
    source = source_of(tmp_path / "in", rows_of(1, 900, 256))
    plan = planned(source, 3, 3, 1, 300)
    cells = Cells(20_000, 8, 100)
    sorter = BlockSorter(source.share(0, 3), 300, plan, 0, Buffers(1, 300, 100), tmp_path, cells, Shares(1, 1))
    run, _ = sorter.sort(0)
    assert len(sent_rows(run, plan, 1)) > 50
    assert (tmp_path / "run-000000").stat().st_size == 300 * 100, "all of them, since those for others have no room"
    every = cells.lend(20_000 // 800 * 8)
    assert every is not None, "what was had before there was too little is given back"
    assert cells.lend(1) is None
    assert cells.lend(0) is not None
    every.close()
    every.close()
    with pytest.raises(GivenBack):
        every.read(0, np.empty((1, 100), np.uint8))
    again = cells.lend(200)
    assert again is not None
    assert cells.lend(1) is None, "given back twice, lent once"
    run.close()


def test_what_comes_has_the_memory_of_what_was_sent_and_files_only_while_there_is_none(tmp_path: Path) -> None:
    plan = planned(source_of(tmp_path / "in", rows_of(1, 600, 256)), 2, 2, 1, 100)
    cells = Cells(100 * 100, 10, 100)
    inbox = Inbox(plan, 1, 100, tmp_path, cells, threading.Condition())
    sent = cells.lend(60)
    assert sent is not None
    rows = rows_of(2, 50, 256)

    def receive(block: int) -> None:
        draft = inbox.draft(Name(0, block, 1), [50])
        for at in (0, 3_000):
            data = rows.reshape(-1)[at : at + 3_000].data
            head = ShuffleDataChunk(offset=at, checksum=xxhash.xxh3_64_intdigest(data))
            draft.take(Name(0, block, 1), head, data)
        draft.finish()

    receive(0)
    assert [path.name for path in tmp_path.glob("slice-*") if not path.suffix] == ["slice-0000-000000-00001"]
    sent.close()
    receive(1)
    receive(2)
    assert len([path for path in tmp_path.glob("slice-*") if not path.suffix]) == 1, "the others are in memory"
    for block in range(3):
        found = np.empty((50, 100), np.uint8)
        inbox.slice(Name(0, block, 1)).rows.read(0, found)
        assert found.tobytes() == rows.tobytes()
    inbox.close()
    assert cells.lend(100) is not None


@pytest.mark.parametrize(
    ("memory", "sent", "own"),
    [
        (64 << 20, (0.0, 0.0), (0.0, 0.0)),
        (300_000_000, (0.3, 0.7), (0.0, 0.0)),
        (600_000_000, (1.0, 1.0), (0.2, 0.8)),
        (949_000_000, (1.0, 1.0), (1.0, 1.0)),
    ],
)
def test_the_memory_decides_what_stays_in_it_and_rows_for_others_come_first(
    tmp_path: Path, memory: int, sent: tuple[float, float], own: tuple[float, float]
) -> None:
    source = Source(RecordFormat(), (Extent("of a gigabyte", 0, 10_000_000),))
    half = source.share(0, 2)
    changed = threading.Condition()
    workshop = Workshop(half, tmp_path, tmp_path, Settings(memory=memory), changed, print, print)
    members = tuple(Member(number, "", 1, half.records, workshop.block_records) for number in range(2))
    workshop.accept(Plan(1, 2, 1, (Boundary(b"5", 0),), Roster(1, members)), 0)
    assert sent[0] <= workshop.shares.sent <= sent[1]
    assert own[0] <= workshop.shares.own <= own[1]
    kept = sum(stays(block, workshop.shares.sent) for block in range(members[0].blocks))
    assert kept == int(members[0].blocks * workshop.shares.sent)


def test_memory_beyond_what_there_is_is_not_asked_for_when_the_input_is_small(tmp_path: Path) -> None:
    rows = rows_of(1, 1_000, 256)
    report = run_local(source_of(tmp_path / "in", rows), tmp_path / "out", workers=2, settings=Settings(memory=1 << 50))
    assert report.records == 1_000


def test_a_sorted_block_is_found_again_only_while_its_checksum_and_its_input_are_the_same(tmp_path: Path) -> None:
    source = source_of(tmp_path / "in", rows_of(1, 1_000, 256))
    plan = planned(source, 1, 1, 4, 500)
    buffers, cells = Buffers(1, 500, 100), Cells(0, 1, 100)
    sorter = BlockSorter(source, 500, plan, 0, buffers, tmp_path, cells, Shares())
    first, reused = sorter.sort(0)
    assert not reused
    again, reused = sorter.sort(0)
    assert reused
    assert again.cuts == first.cuts
    path = tmp_path / "run-000000"
    path.write_bytes(path.read_bytes()[::-1])
    mended, reused = sorter.sort(0)
    assert not reused
    note = json.loads(path.with_name("run-000000.json").read_bytes())
    of_old = {"stamp": note["stamp"].removeprefix("2 "), "cuts": note["cuts"], "checksum": note["checksum"]}
    path.with_name("run-000000.json").write_text(json.dumps(of_old))
    older, reused = sorter.sort(0)
    assert not reused, "what another version left is not taken for what this one leaves"
    os.utime(tmp_path / "in", ns=(1, 1))
    changed, reused = BlockSorter(source, 500, plan, 0, buffers, tmp_path, cells, Shares()).sort(0)
    assert not reused
    for run in (first, again, mended, older, changed):
        run.close()


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 40), st.sampled_from([1, 2, 256]))
@settings(max_examples=100, deadline=None)
def test_a_window_that_is_too_large_is_divided_without_losing_or_disordering_rows(
    seed: int, pieces: int, most: int, letters: int
) -> None:
    rng = np.random.default_rng(seed)
    slices = []
    every = []
    for number in range(pieces):
        rows = rows_of(seed + number, int(rng.integers(0, 50)), letters, 4)
        rows = rows[np.argsort([row[:2].tobytes() for row in rows], kind="stable")] if len(rows) else rows
        every.append(rows)
        slices.append(Slice(kept(rows), [0, len(rows)]))
    written = b""
    for window in fitting_windows(slices, most, 4, 2):
        assert window.rows <= most
        assert window.first * 4 == len(written)
        part = np.empty((window.rows, 4), np.uint8)
        done = 0
        for stretch in window.stretches:
            stretch.rows.read(stretch.low, part[done : done + stretch.size])
            done += stretch.size
        written += in_order(part, 2)
    assert written == in_order(np.concatenate(every), 2)


def test_both_parts_of_a_divided_window_have_rows() -> None:
    rows = np.zeros((2, 4), np.uint8)
    slices = [Slice(kept(rows[:1]), [0, 1]), Slice(kept(rows[1:]), [0, 1])]
    (window,) = windows_of(slices)
    assert [part.rows for part in divide(window, 4, 2)] == [1, 1]


class Broken:
    def read(self, low: int, into: NDArray[np.uint8]) -> None:
        raise SortError(f"row {low} of {len(into)} cannot be read")

    def view(self, low: int, count: int, lent: object) -> memoryview:
        raise SortError(f"rows {low} to {low + count} cannot be seen in {lent}")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("before", [0, 1], ids=["read here", "read in the thread beside"])
def test_a_merge_that_fails_leaves_no_file_and_raises_what_happened(before: int, tmp_path: Path) -> None:
    rows = rows_of(1, 10, 256)
    slices = [*(Slice(kept(rows), [0, 10]) for _ in range(before)), Slice(Broken(), [0, 10])]
    with pytest.raises(SortError, match="row 0 of 10 cannot be read"):
        Merger(100, 10, Buffers(2, 100, 100)).merge(slices, tmp_path / "partition.0", print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sizes", [[100], [3_900, 5_000_000, 1, 199], [PAGE] * 3, [AT_ONCE + 7, 93, 9_000_000]])
def test_a_slice_that_goes_to_a_file_is_whole_in_whatever_pieces_it_came(sizes: list[int], tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, -(-sum(sizes) // 100) * 100, dtype=np.uint8)
    rows = len(data) // 100
    members = tuple(Member(number, "", 1, rows, rows) for number in range(2))
    plan = Plan(1, 2, 1, (Boundary(b"", 0),), Roster(1, members))
    inbox = Inbox(plan, 1, 100, tmp_path, Cells(0, 1, 100), threading.Condition())
    draft = inbox.draft(Name(0, 0, 1), [rows])
    offset = 0
    for size in [*sizes, len(data) - sum(sizes)]:
        piece = data.data[offset : offset + size]
        chunk = ShuffleDataChunk(offset=offset, checksum=xxhash.xxh3_64_intdigest(piece))
        draft.take(Name(0, 0, 1), chunk, piece)
        offset += size
    draft.finish()
    assert (tmp_path / "slice-0000-000000-00001").read_bytes() == data.tobytes()
    assert inbox.has_all(0, 0)
    again = Inbox(plan, 1, 100, tmp_path, Cells(0, 1, 100), threading.Condition())
    assert again.find() == 1
    for one in (inbox, again):
        one.close()


def test_a_partition_whose_bytes_changed_is_not_proven(tmp_path: Path) -> None:
    rows = rows_of(1, 100, 256)[np.argsort(np.arange(100))]
    path = tmp_path / "partition.0"
    note = Merger(100, 10, Buffers(2, 30, 100)).merge([Slice(kept(rows[:1]), [0, 1])], path, lambda _: None)
    assert is_proven(path, note)
    path.write_bytes(b"x" * 100)
    assert not is_proven(path, note)
    path.unlink()
    assert not is_proven(path, note)


def test_blocks_and_windows_stay_within_the_memory(tmp_path: Path) -> None:
    source = Source(RecordFormat(), (Extent(str(tmp_path), 0, 10**9),))
    settings_ = Settings(memory=1 << 30)
    assert block_size(source, settings_) * 100 <= (1 << 30) // 12
    assert window_size(source, settings_) * 100 <= (1 << 30) // 12
    assert block_size(Source(RecordFormat(), ()), settings_) == 131_072
    assert window_count(0, 2, 10, 10) == 1
    assert window_count(1_000, 2, 100, 10) == 5
    assert window_count(10**12, 2, 100, 10) == 10_000
    assert window_count(10**12, 2, 100, 10_000) == 2_092, "all boundaries fit one message"


def test_boundaries_of_no_records_share_nothing_out() -> None:
    assert choose_boundaries([], 3) == [Boundary(b"", 0)] * 2
