"""Generated records are the same for the same seed, for any number of files and threads."""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from interlock.errors import SortInputError
from interlock.sort.data.checksum import combine_checksums, compute_checksum
from interlock.sort.data.generate import CHUNK_RECORDS, GeneratedFiles, Recipe, generate
from interlock.sort.data.records import RecordFormat, open_source

pytestmark = pytest.mark.unit

MANY = CHUNK_RECORDS + 1_234


def everything(made: GeneratedFiles) -> bytes:
    return b"".join(Path(path).read_bytes() for path in made.paths)


def keys_of(recipe: Recipe) -> list[bytes]:
    firsts = range(0, recipe.records, CHUNK_RECORDS)
    rows = np.concatenate([recipe.rows(first, min(CHUNK_RECORDS, recipe.records - first)) for first in firsts])
    return [bytes(row) for row in rows[:, : recipe.format.key_length]]


@pytest.mark.parametrize("is_ascii", [False, True])
def test_the_number_of_files_and_threads_changes_nothing(
    tmp_path: Path,
    is_ascii: bool,  # noqa: FBT001 - a parameter
) -> None:
    recipe = Recipe(MANY, 7, RecordFormat(ascii=is_ascii))
    one = generate(tmp_path / "one", recipe, files=1, threads=1)
    five = generate(tmp_path / "five", recipe, files=5, threads=3)
    assert everything(one) == everything(five)
    assert (one.records, one.size, one.digest) == (five.records, five.size, five.digest)
    assert len(five.paths) == 5
    assert sorted(path.name for path in (tmp_path / "five").iterdir()) == [f"part-0000{n}" for n in range(5)]
    source = open_source([tmp_path / "five"])
    assert source.format == recipe.format
    assert one.digest == compute_checksum(source.read_many([0], source.records))


@pytest.mark.parametrize("is_ascii", [False, True])
def test_keys_are_different_and_spread_evenly(is_ascii: bool) -> None:  # noqa: FBT001 - a parameter
    keys = keys_of(Recipe(MANY, 3, RecordFormat(ascii=is_ascii)))
    assert len(set(keys)) == MANY
    first_bytes = Counter(key[0] for key in keys)
    assert len(first_bytes) == (95 if is_ascii else 256)
    assert max(first_bytes.values()) < (5 if is_ascii else 2) * MANY / len(first_bytes)


def test_records_depend_on_the_seed_and_not_on_their_number() -> None:
    first, same, other = (Recipe(100, seed).rows(0, 100).tobytes() for seed in (1, 1, 2))
    assert first == same != other
    assert Recipe(333, 1).rows(0, 333)[:100].tobytes() == first


@pytest.mark.parametrize(
    "used", [RecordFormat(1, 1), RecordFormat(17, 5), RecordFormat(64, 30), RecordFormat(12, 9, ascii=True)]
)
def test_records_of_any_format_can_be_generated(tmp_path: Path, used: RecordFormat) -> None:
    made = generate(tmp_path, Recipe(1_000, 5, used), files=3)
    source = open_source([tmp_path], record_length=used.record_length, key_length=used.key_length, ascii=used.ascii)
    assert made.digest == compute_checksum(source.read_many([0], 1_000))


def test_records_contain_their_numbers_after_the_key() -> None:
    rows = Recipe(50, 1).rows(0, 50)
    assert rows[:, 10:18].copy().view(">u8").reshape(-1).tolist() == list(range(50))
    lines = Recipe(50, 1, format=RecordFormat(ascii=True)).rows(0, 50)
    assert bytes(lines[31]).endswith(b"\r\n")
    assert bytes(lines[31])[10:26] == b"000000000000001f"


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "part-00001").write_bytes(b"mine")
    with pytest.raises(SortInputError, match=r"part-00001 exists already"):
        generate(tmp_path, Recipe(10), files=2)
    with pytest.raises(SortInputError, match="files must be at least 1, got 0"):
        generate(tmp_path, Recipe(10), files=0)
    assert [path.name for path in tmp_path.iterdir()] == ["part-00001"]


def test_the_checksum_ignores_order_and_detects_every_change() -> None:
    rows = Recipe(20_000, 1).rows(0, 20_000)
    whole = compute_checksum(rows)
    shuffled = rows[np.random.default_rng(1).permutation(len(rows))]
    assert (
        compute_checksum(shuffled)
        == whole
        == combine_checksums(compute_checksum(rows[:777]), compute_checksum(rows[777:]))
    )
    changed = rows.copy()
    changed[5, 99] ^= 1
    exchanged = rows.copy()
    exchanged[[3, 4], 50] = exchanged[[4, 3], 50]
    doubled = rows.copy()
    doubled[8] = doubled[9]
    assert len({whole, *(compute_checksum(other) for other in (changed, exchanged, doubled, rows[1:]))}) == 5


def test_few_open_files_are_enough_for_many_and_for_empty_ones(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (min(before[0], len(list(Path("/proc/self/fd").iterdir())) + 16), before[1])
    )
    try:
        many = generate(tmp_path / "many", Recipe(MANY, 7), files=2_000, threads=3)
        empty = generate(tmp_path / "empty", Recipe(5, 7), files=12)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert everything(many) == everything(generate(tmp_path / "one", Recipe(MANY, 7)))
    assert [Path(path).stat().st_size // 100 for path in empty.paths] == [0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1]


def test_files_of_a_killed_command_are_replaced(tmp_path: Path) -> None:
    (tmp_path / ".part-00000.unfinished").write_bytes(bytes(9_000))
    made = generate(tmp_path, Recipe(5, 7))
    assert len(everything(made)) == 500
