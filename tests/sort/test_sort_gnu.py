"""Whole sorts of random lines by random options, compared with `LC_ALL=C sort`: several workers, blocks and windows.

SORT_COMPARISONS sets the number of random sorts; each number is a seed, which a failure names.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from gnu_sort import IS_GNU, arguments, gnu_sort, random_options, random_text, seeded, separator_byte
from interlock.sort.data.line_order import parse_line_order
from interlock.sort.data.records import open_source
from interlock.sort.data.validate import validate
from sort_cli import names, sort
from sort_cluster import output_bytes
from sort_threads import sort_in_threads

if TYPE_CHECKING:
    import random
    from pathlib import Path

pytestmark = [pytest.mark.flow, pytest.mark.skipif(not IS_GNU, reason="there is no GNU sort on this machine")]

COMPARISONS = int(os.environ.get("SORT_COMPARISONS", "48"))
GROUPS = 4  # tests among which they are divided
COMMANDS = 3


def write_files(source: random.Random, place: Path, separator: bytes, lines: int) -> list[Path]:
    """Write one to four files of random lines: some empty, some without a final newline, some with CR LF."""
    place.mkdir()
    paths = [place / str(number) for number in range(source.randrange(1, 5))]
    for path in paths:
        text = random_text(source, separator, source.choice([0, 1, lines // 20, lines]))
        if source.random() < 0.2:
            text = text.replace(b"\n", b"\r\n")
        if source.random() < 0.2:
            text = text.replace(b"\n", b"\n\n", 30)
        path.write_bytes(text)
    return paths


def random_settings(source: random.Random) -> dict[str, Any]:
    """Return the settings of a sort with many small blocks and windows, in memory, in files, or both."""
    return {
        "workers": source.randrange(1, 4),
        "partitions": source.choice([None, 1, 3, 5]),
        "block_records": source.choice([300, 1_000, 4_000, 20_000]),
        "window_records": source.choice([200, 900, 3_000, 20_000]),
        "resident_share": source.choice([0.0, 0.4, 1.0, None]),
    }


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_sorts_give_the_output_of_gnu_sort(tmp_path: Path, group: int) -> None:
    blocks = windows = 0
    for seed in range(group, COMPARISONS, GROUPS):
        source = seeded(1_000 + seed)
        keys, separator, options = random_options(source)
        place = tmp_path / str(seed)
        paths = write_files(source, place, separator_byte(separator), 300)
        settings = random_settings(source)
        example = (seed, arguments(keys, separator, options), settings)
        if settings["partitions"] is not None:
            settings["partitions"] = max(settings["partitions"], settings["workers"])
        order = parse_line_order(keys, separator=separator, **options)
        lines = open_source(paths, lines=order)
        outputs = [place / f"out-{index}" for index in range(settings["workers"])]
        report = sort_in_threads(lines, place, **settings)
        assert output_bytes(*outputs) == gnu_sort(paths, keys, separator, options), example
        assert sum(one.size for one in report.partitions) == lines.records or order.unique, example
        blocks = max(blocks, -(-lines.records // settings["block_records"] // settings["workers"]))
        windows = max(windows, -(-lines.records // settings["window_records"]))
    assert blocks > 1
    assert windows > 1


@pytest.mark.parametrize("seed", range(COMMANDS))
def test_commands_with_little_memory_give_the_output_of_gnu_sort(tmp_path: Path, seed: int) -> None:
    source = seeded(2_000 + seed)
    keys, separator, options = random_options(source)
    paths = write_files(source, tmp_path / "in", separator_byte(separator), 8_000)
    paths[0].write_bytes(random_text(source, separator_byte(separator), 60_000))
    order = arguments(keys, separator, options)
    command = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 1 + seed, "--partitions", 4, "--lines", *order)
    refused = sort(*command, "--memory", "100MB")
    least = re.search(r"they need (\d+MB)", refused.stderr)
    assert least is not None, refused.stderr
    done = sort(*command, "--memory", least[1], "--quiet")
    assert done.returncode == 0, (order, done.stderr)
    assert names(tmp_path / "out") == [f"partition.{number}" for number in range(4)]
    assert output_bytes(tmp_path / "out") == gnu_sort(paths, keys, separator, options), order
    found = validate(
        [tmp_path / "out"], [tmp_path / "in"], lines=parse_line_order(keys, separator=separator, **options)
    )
    assert found.problems == [], order
