"""The sample keeps partitions even for any keys, within the bounds that `data.plan` states."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from interlock.sort.data.keys import find_boundaries, sort_rows
from interlock.sort.data.line_order import LineOrder, parse_line_order
from interlock.sort.data.plan import (
    MAX_SAMPLE_BYTES,
    POSITION_BYTES,
    SAMPLES_PER_PARTITION,
    Sample,
    choose_boundaries,
    choose_reads,
    first_position,
    max_reads,
    sample_size,
    take_sample,
)
from interlock.sort.data.records import Extent, RecordFormat, Source, open_source
from interlock.sort.rpc import MAX_MESSAGE_BYTES
from interlock.sort.settings import Settings
from interlock.sort.worker.phases import PhaseRunner

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Keys = NDArray[np.uint8]

pytestmark = pytest.mark.unit

RECORDS = 200_000


def keys_of(kind: str) -> Keys:
    rng = np.random.default_rng(11)
    numbers = rng.integers(0, 2**63, RECORDS, dtype=np.uint64)
    if kind == "zipf":
        numbers = np.minimum(rng.zipf(1.3, RECORDS), 2**40).astype(np.uint64)
    elif kind == "constant":
        numbers[:] = 7
    elif kind == "presorted":
        numbers.sort()
    elif kind == "reversed":
        numbers[::-1].sort()
    elif kind == "locally ordered":
        numbers.reshape(-1, 1000).sort(axis=1)
    return packed(numbers)


def packed(numbers: NDArray[np.uint64]) -> Keys:
    keys = np.zeros((len(numbers), 10), dtype=np.uint8)
    keys[:, :8] = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)
    return keys


def largest_of(keys: Keys, path: Path, workers: int, partitions: int) -> float:
    """Sample and divide keys as a sort does; return the largest partition as a multiple of an even share."""
    keys.tofile(path)
    source = Source(RecordFormat(10, 10), (Extent(str(path), 0, len(keys)),))
    shares = [source.share(number, workers) for number in range(workers)]
    wanted = sample_size(shares[0].records, 131_072, 10, partitions, workers)
    samples = [take_sample(share, first_position(number), wanted) for number, share in enumerate(shares)]
    boundaries = choose_boundaries(samples, partitions)
    sizes = np.zeros(partitions, dtype=np.int64)
    for number, share in enumerate(shares):
        rows = share.read_many([0], share.records)
        cuts = find_boundaries(rows, sort_rows(rows, 10), first_position(number), 10, boundaries)
        sizes += np.diff([0, *cuts, len(rows)])
    assert sizes.sum() == len(keys)
    return float(sizes.max() * partitions / len(keys))


@pytest.mark.parametrize("kind", ["uniform", "zipf", "constant", "presorted", "reversed", "locally ordered"])
def test_the_largest_partition_is_within_five_percent_of_even(kind: str, tmp_path: Path) -> None:
    assert largest_of(keys_of(kind), tmp_path / "in", 2, 4) <= 1.05


@pytest.mark.parametrize(("workers", "partitions"), [(1, 256), (2, 256), (1, 64), (8, 8)])
def test_the_bound_holds_for_many_partitions(workers: int, partitions: int, tmp_path: Path) -> None:
    numbers = np.random.default_rng(5).integers(0, 2**63, 5_000_000, dtype=np.uint64)
    assert largest_of(packed(numbers), tmp_path / "in", workers, partitions) <= 1.05


@pytest.mark.parametrize(("workers", "partitions", "reads"), [(8, 8, 1_000), (2, 16, 250), (1, 16, 125)])
def test_similar_neighbours_count_as_one_sample(workers: int, partitions: int, reads: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    near = np.repeat(rng.integers(0, 2**62, 1_000_000 // 64, dtype=np.uint64), 64)
    near += rng.integers(0, 2**40, len(near), dtype=np.uint64)
    bound = math.sqrt(2 * math.log(partitions) / reads)
    assert largest_of(packed(near), tmp_path / "in", workers, partitions) <= 1 + bound


def test_samples_and_reads_are_bounded() -> None:
    assert sample_size(10**9, 10**6, 10, 256, 2) == 8_000 * 128
    for key_length, partitions, workers in ((10, 10_000, 1), (1_000, 64, 2), (1 << 20, 2, 32), (517, 2, 2)):
        wanted = sample_size(10**9, 10**6, key_length, partitions, workers)
        assert wanted >= 1
        assert workers * wanted * (key_length + 8) <= MAX_SAMPLE_BYTES < MAX_MESSAGE_BYTES
    assert [max_reads(size) for size in (0, 10**9, 10**12)] == [2_000, 7_629, 32_000]


@pytest.mark.parametrize("partitions", [16, 256])
def test_the_sample_of_a_large_input_of_long_lines_fits_its_message(partitions: int, tmp_path: Path) -> None:
    line = b"%07d," + b"x" * 991 + b"\n"
    (tmp_path / "in").write_bytes(b"".join(line % (number * 7919 % 1_000) for number in range(1_000)))
    extents = (Extent(str(tmp_path / "in"), 0, 1_000_000),) * 2_000  # as 2 GB in many files
    source = Source(RecordFormat.of_lines(LineOrder()), extents, line_length=1_000)
    runner = PhaseRunner(source, tmp_path, tmp_path, Settings(memory=1 << 30), threading.Condition(), print, print)
    sample = runner.sample(0, 1, partitions)
    assert len(sample.positions) > 1_000 * 16
    assert len(sample.keys) + POSITION_BYTES * len(sample.positions) <= MAX_SAMPLE_BYTES * 9 // 8 < MAX_MESSAGE_BYTES


@pytest.mark.parametrize("partitions", [8, 64, 256])
def test_eight_thousand_samples_per_partition_keep_the_bound(partitions: int) -> None:
    rng = np.random.default_rng(partitions)
    drawn = np.sort(rng.random(SAMPLES_PER_PARTITION * partitions))
    cuts = drawn[np.arange(1, partitions) * SAMPLES_PER_PARTITION - 1]
    largest = np.diff([0.0, *cuts, 1.0]).max() * partitions
    assert largest <= 1.05
    assert largest - 1 <= 1.3 * math.sqrt(2 * math.log(partitions) / SAMPLES_PER_PARTITION)


@pytest.mark.parametrize(("records", "wanted"), [(0, 10), (1, 10), (5, 10), (100, 10), (10_000, 100), (10**12, 8_000)])
def test_the_sample_is_read_in_short_runs_from_the_whole_input(records: int, wanted: int) -> None:
    starts, count = choose_reads(records, wanted, 2_000)
    assert len(starts) * count <= max(wanted, 1)
    assert (np.diff(starts) >= 0).all()
    if records:
        assert starts.min() >= 0
        assert starts.max() + count <= records
        widest = np.diff([0, *starts, records]).max()
        assert widest <= 2 * records / len(starts) + count + 1
    assert choose_reads(records, wanted, 2_000)[0].tolist() == starts.tolist()


def test_a_worker_with_more_records_has_more_weight() -> None:
    def sample(low: int, records: int) -> Sample:
        keys = np.arange(low, low + 100, dtype=">u2").view(np.uint8).reshape(-1, 2)
        return Sample(keys, np.arange(100, dtype=np.uint64), records)

    (middle,) = choose_boundaries([sample(0, 300), sample(1000, 100)], 2)
    assert int.from_bytes(middle.key, "big") == 66


@pytest.mark.parametrize("separator", [",", None])
def test_long_lines_are_divided_evenly_by_a_key_far_behind(tmp_path: Path, separator: str | None) -> None:
    """Of a line that is longer than what is kept of it, the fields of its keys are kept."""
    joint, rng = separator or " ", np.random.default_rng(3)
    keys = [int(key) for key in rng.integers(0, 10**9, 2_000)]
    wide = joint.join("x" * 9 for _ in range(300))
    (tmp_path / "in").write_text("".join(f"{wide}{joint}{key:09}{joint}{wide}\n" for key in keys))
    source = open_source([tmp_path / "in"], lines=parse_line_order(["301,301n"], separator=separator))
    (boundary,) = choose_boundaries([take_sample(source, 0, 2_000)], 2, source.format.lines)
    middle = int(boundary.key.decode().split(separator)[300])
    assert 0.45 < sum(key < middle for key in keys) / len(keys) < 0.55


def test_a_long_line_is_shortened_to_the_fields_of_its_keys() -> None:
    fields = [b"%03d" % number for number in range(500)]
    order = parse_line_order(["100,101", "50.2,50.3"], separator=",")
    short = order.shorten(b",".join(fields), 1_000)
    assert short == b"," * 49 + b"049" + b"," * 50 + b"099,100"
    assert parse_line_order(["3"], separator=",").shorten(b",".join(fields), 100) == b",," + b",".join(fields)[8:106]
    blanks = parse_line_order(["3,3"]).shorten(b"  one\ttwo  three four" + b" more" * 100, 100)
    assert blanks == b" x x  three"
    assert order.shorten(b"a,b,c", 100) == b"a,b,c"
    assert order.shorten(b"a" * 200, 100) == b""
    assert parse_line_order(["1.5,1.9"]).shorten(b"a" * 200, 100) == b"a" * 100
