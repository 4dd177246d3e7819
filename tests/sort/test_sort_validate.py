"""Validation: a sorted output passes, and every kind of damage is found and named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from interlock.errors import SortInputError
from interlock.sort.data.validate import Validation, validate
from sort_distributions import distributed_rows

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

RECORDS = 60_000  # more than one block


def spread(tmp_path: Path, distribution: str = "uniform", partitions: int = 3) -> list[np.ndarray]:
    """Write an input of two files, sort it in memory, and write the partitions."""
    rows = distributed_rows(distribution, RECORDS, seed=4)
    (tmp_path / "in").mkdir()
    for number, half in enumerate(np.array_split(rows, 2)):
        (tmp_path / "in" / f"part-{number:05}").write_bytes(half.tobytes())
    keys = rows[:, :10].copy().view("S10").reshape(-1)  # drops trailing zeros, which changes no order here
    parts = np.array_split(rows[np.argsort(keys, kind="stable")], partitions)
    write(tmp_path, parts)
    return parts


def write(tmp_path: Path, parts: list[np.ndarray]) -> None:
    (tmp_path / "out").mkdir(exist_ok=True)
    for number, part in enumerate(parts):
        (tmp_path / "out" / f"partition.{number}").write_bytes(part.tobytes())


def check(tmp_path: Path) -> Validation:
    return validate([tmp_path / "out"], [tmp_path / "in"])


def test_a_sorted_output_is_valid_and_described(tmp_path: Path) -> None:
    parts = spread(tmp_path)
    found = check(tmp_path)
    assert found.problems == []
    assert found.is_valid
    assert (found.records, found.input_records, found.size) == (RECORDS, RECORDS, RECORDS * 100)
    assert found.digest == found.input_digest
    assert found.duplicates == 0
    assert [partition.records for partition in found.partitions] == [20_000] * 3
    assert found.largest == 1.0
    assert found.partitions[1].first_key == parts[1][0, :10].tobytes().hex()
    assert validate([tmp_path / "out"]).is_valid


def test_equal_keys_are_counted_within_and_across_partitions(tmp_path: Path) -> None:
    spread(tmp_path, "constant")
    found = check(tmp_path)
    assert (found.problems, found.duplicates) == ([], RECORDS - 1)


def test_disorder_within_a_partition_is_named_by_its_byte(tmp_path: Path) -> None:
    parts = [part.copy() for part in spread(tmp_path)]
    parts[1][[7_000, 19_000]] = parts[1][[19_000, 7_000]]
    write(tmp_path, parts)
    (problem,) = check(tmp_path).problems
    assert problem.endswith("partition.1, byte 700,100: smaller key than the record before it")


def test_disorder_between_blocks_is_found(tmp_path: Path) -> None:
    (part,) = spread(tmp_path, partitions=1)
    block = (4 << 20) // 100
    turned = np.concatenate([part[-100:], part[:-100]])
    write(tmp_path, [turned])
    assert "byte 10,000:" in check(tmp_path).problems[0]
    moved = np.concatenate([part[100 : block + 100], part[:100], part[block + 100 :]])
    write(tmp_path, [moved])
    assert f"byte {block * 100:,}:" in check(tmp_path).problems[0]


def test_disorder_across_partitions_is_found(tmp_path: Path) -> None:
    first, second, third = spread(tmp_path)
    write(tmp_path, [second, first, third])
    (problem,) = check(tmp_path).problems
    assert "partition.1: begins with key 00" in problem
    assert "with which the partition before it ends" in problem


@pytest.mark.parametrize("damage", ["lost", "doubled", "changed"])
def test_lost_duplicated_and_changed_records_are_found(tmp_path: Path, damage: str) -> None:
    first, *others = (part.copy() for part in spread(tmp_path))
    if damage == "lost":
        first = first[1:]
    elif damage == "doubled":
        first = np.concatenate([first[:1], first])
    else:
        first[3, 50] ^= 1
    write(tmp_path, [first, *others])
    (problem,) = check(tmp_path).problems
    expected = {
        "lost": "59,999 records, but the input has 60,000",
        "doubled": "60,001 records",
        "changed": "checksum",
    }
    assert problem.startswith(expected[damage])


def test_missing_duplicate_truncated_and_other_files_are_found(tmp_path: Path) -> None:
    spread(tmp_path)
    out = tmp_path / "out"
    (out / "partition.1").rename(out / "partition.01")
    (out / "partition.2").rename(out / "partition.3")
    (out / ".partition.0.tmp").write_bytes(b"")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "partition.0").write_bytes(b"x" * 250)
    with (out / "partition.3").open("ab") as file:
        file.write(b"xx")
    problems = "\n".join(validate([out, tmp_path / "more"]).problems)
    assert ".partition.0.tmp is not a partition, and should not be there" in problems
    assert "there is partition 0 in" in problems
    assert "partition.2 is missing" in problems
    assert "2,000,002 bytes are not a whole number of records" in problems


def test_partitions_of_several_directories_are_one_sequence(tmp_path: Path) -> None:
    spread(tmp_path)
    (tmp_path / "more").mkdir()
    (tmp_path / "out" / "partition.1").rename(tmp_path / "more" / "partition.1")
    found = validate([tmp_path / "more", tmp_path / "out"], [tmp_path / "in"])
    assert found.is_valid
    assert [partition.number for partition in found.partitions] == [0, 1, 2]


def test_nothing_to_validate_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SortInputError, match="is not a directory"):
        validate([tmp_path / "out"])
    with pytest.raises(SortInputError, match=r"there is no partition\.0"):
        validate([tmp_path])


def test_other_lengths_and_long_keys_are_compared_in_full(tmp_path: Path) -> None:
    rows = distributed_rows("constant", 1_000, length=40, key_length=20)
    rows[:, 19] = np.arange(1_000) // 4
    write(tmp_path, [rows])
    found = validate([tmp_path / "out"], record_length=40, key_length=20)
    assert (found.problems, found.duplicates) == ([], 1_000 - 250)
    rows[[3, 4], 19] = rows[[4, 3], 19]
    write(tmp_path, [rows])
    assert "byte 160:" in validate([tmp_path / "out"], record_length=40, key_length=20).problems[0]


def test_dangling_links_and_huge_numbers_are_problems_not_errors(tmp_path: Path) -> None:
    (tmp_path / "partition.0").symlink_to("nowhere")
    (tmp_path / "partition.99999999999").write_bytes(bytes(100))
    found = validate([tmp_path])
    assert any("a link to nowhere" in problem for problem in found.problems)
    assert "partition.1 is missing" in found.problems
