"""The sample keeps partitions even, whatever the keys: the figures that the module states."""

from __future__ import annotations

import math

import numpy as np
import pytest

from interlock.sort.keys import boundary_cuts, order
from interlock.sort.plan import first_position
from interlock.sort.records import Extent, RecordFormat, Source
from interlock.sort.sampling import PER_PARTITION, Sample, choose_boundaries, places, take_sample

pytestmark = pytest.mark.unit

RECORDS = 200_000


def keys_of(kind: str) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
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
    keys = np.zeros((RECORDS, 10), dtype=np.uint8)
    keys[:, :8] = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)
    return keys


@pytest.mark.parametrize("kind", ["uniform", "zipf", "constant", "presorted", "reversed", "locally ordered"])
def test_the_largest_partition_is_within_five_percent_of_even(kind: str, tmp_path: object) -> None:
    partitions = 4
    keys = keys_of(kind)
    path = f"{tmp_path}/in"
    keys.tofile(path)
    source = Source(RecordFormat(10, 10), (Extent(path, 0, RECORDS),))
    shares = [source.share(number, 2) for number in range(2)]
    wanted = PER_PARTITION * partitions // 2
    samples = [take_sample(share, first_position(number), wanted) for number, share in enumerate(shares)]
    boundaries = choose_boundaries(samples, partitions)
    sizes = np.zeros(partitions, dtype=np.int64)
    for number in range(2):
        rows = shares[number].read_at(0, shares[number].records)
        index = order(rows, 10)
        cuts = boundary_cuts(rows, index, first_position(number), 10, boundaries)
        sizes += np.diff([0, *cuts, len(rows)])
    assert sizes.sum() == RECORDS
    assert sizes.max() <= RECORDS / partitions * 1.05


@pytest.mark.parametrize("partitions", [8, 64, 256])
def test_eight_thousand_samples_per_partition_keep_the_stated_bound(partitions: int) -> None:
    rng = np.random.default_rng(partitions)
    drawn = np.sort(rng.random(PER_PARTITION * partitions))
    cuts = drawn[np.arange(1, partitions) * PER_PARTITION - 1]
    largest = np.diff([0.0, *cuts, 1.0]).max() * partitions
    assert largest <= 1.05
    assert largest - 1 <= 1.3 * math.sqrt(2 * math.log(partitions) / PER_PARTITION)


@pytest.mark.parametrize(("records", "wanted"), [(0, 10), (1, 10), (5, 10), (100, 10), (10_000, 100), (10**12, 8_000)])
def test_the_sample_is_read_in_small_pieces_from_all_over_the_input(records: int, wanted: int) -> None:
    starts, count = places(records, wanted)
    assert len(starts) * count <= max(wanted, 1)
    assert (np.diff(starts) >= 0).all()
    if records:
        assert starts.min() >= 0
        assert starts.max() + count <= records
        widest = np.diff([0, *starts, records]).max()
        assert widest <= 2 * records / len(starts) + count + 1
    assert places(records, wanted)[0].tolist() == starts.tolist()


def test_a_worker_with_more_records_has_more_weight() -> None:
    def sample(low: int, records: int) -> Sample:
        keys = np.arange(low, low + 100, dtype=">u2").view(np.uint8).reshape(-1, 2)
        return Sample(keys, np.arange(100, dtype=np.uint64), records)

    (middle,) = choose_boundaries([sample(0, 300), sample(1000, 100)], 2)
    assert int.from_bytes(middle.key, "big") == 66
