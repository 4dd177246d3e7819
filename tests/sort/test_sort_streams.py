"""Standard input and output, and gzip and zstd files, on both sides of a sort."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import IO

import pytest
import zstandard

from interlock.errors import SortInputError
from interlock.sort.io.compression import compression_of, make_compressor, unpacked
from interlock.sort.settings import Compression
from sort_cli import ENVIRONMENT, OWN_PROGRAM, names, sort

LINES = [b"%d,%d" % (number * 7919 % 5000, number % 17) for number in range(5000)]
TEXT = b"".join(line + b"\n" for line in LINES)
ORDERED = b"".join(line + b"\n" for line in sorted(LINES, key=lambda line: (int(line.split(b",")[0]), line)))
OPTIONS = ("-t", ",", "-k", "1,1n")


def piped(content: bytes, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    command = [*OWN_PROGRAM, "run", *map(str, arguments)]
    return subprocess.run(command, input=content, capture_output=True, env=ENVIRONMENT, timeout=60, check=False)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A plain file, a gzip file of two members, and a zstd file of two frames."""
    place = tmp_path / "in"
    place.mkdir()
    first, second = (TEXT.index(b"\n", at) + 1 for at in (9_000, 20_000))
    (place / "a").write_bytes(TEXT[:first])
    (place / "b.gz").write_bytes(gzip.compress(TEXT[first:12_345]) + gzip.compress(TEXT[12_345:second]))
    frames = zstandard.ZstdCompressor()
    (place / "c.zst").write_bytes(frames.compress(TEXT[second:30_001]) + frames.compress(TEXT[30_001:]))
    return place


@pytest.mark.flow
def test_standard_input_is_sorted_to_standard_output(tmp_path: Path) -> None:
    done = piped(TEXT[:-1], "-", "-O", "-", *OPTIONS, "-q", "--temp", tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == ORDERED
    assert list(tmp_path.iterdir()) == []
    nothing = piped(b"", "-", "-O", "-", "--lines", "-q")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, b"", b"")
    shown = piped(TEXT, "-", "-O", "-", *OPTIONS)
    assert shown.stdout == ORDERED, "progress and tables are on standard error"
    assert b"5,000 records" in shown.stderr
    refused = piped(TEXT, "-", "-O", "-", "--json")
    assert refused.returncode == 2
    assert b"--report FILE" in refused.stderr


@pytest.mark.flow
@pytest.mark.parametrize("compression", list(Compression))
def test_packed_files_are_sorted_to_packed_files(tmp_path: Path, packed: Path, compression: Compression) -> None:
    out = tmp_path / "out"
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    done = sort("run", packed, "-O", out, "-w", 2, "--compress", str(compression), *OPTIONS, "--partitions", 3)
    assert done.returncode == 0, done.stderr
    assert "unpacking 2 of 3 inputs" in done.stderr
    assert names(out) == [f"partition.{number}{compression.suffix}" for number in range(3)]
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before
    with unpacked(sorted(out.iterdir()), tmp_path / "plain") as paths:
        assert b"".join(path.read_bytes() for path in paths) == ORDERED
    assert not (tmp_path / "plain").exists()
    checked = sort("validate", out, "-I", packed, *OPTIONS)
    assert checked.returncode == 0, checked.stdout
    assert sort("run", packed, "-O", out, "-w", 1, *OPTIONS).returncode == 2, "there are partitions"
    assert sort("run", packed, "-O", out, "-w", 1, *OPTIONS, "--overwrite").returncode == 0
    assert names(out) == ["partition.0"]
    assert (out / "partition.0").read_bytes() == ORDERED


@pytest.mark.flow
@pytest.mark.parametrize(("name", "wrong"), [("b.gz", "gzip"), ("c.zst", "zstd")])
def test_a_truncated_packed_file_is_refused_by_its_name(tmp_path: Path, packed: Path, name: str, wrong: str) -> None:
    path = packed / name
    path.write_bytes(path.read_bytes()[:-9])
    done = sort("run", packed, "-O", tmp_path / "out", "-w", 1, "-q")
    assert done.returncode == 2
    assert f"{path} is not a whole {wrong} file" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.flow
def test_a_partition_without_lines_is_a_whole_packed_file(tmp_path: Path) -> None:
    for compression in Compression:
        done = piped(b"", "-", "-O", tmp_path / compression, "--lines", "-q", "--compress", compression)
        assert done.returncode == 0, done.stderr
        paths = [tmp_path / compression / f"partition.0{compression.suffix}"]
        assert paths[0].stat().st_size > 0
        with unpacked(paths, tmp_path / "plain") as plain:
            assert plain[0].read_bytes() == b""


@pytest.mark.unit
def test_packed_bytes_are_those_of_the_common_tools(tmp_path: Path) -> None:
    for compression in Compression:
        compressor = make_compressor(compression)
        whole = compressor.compress(memoryview(TEXT)) + compressor.flush()
        if compression is Compression.GZIP:
            assert gzip.decompress(whole) == TEXT
            assert zlib.decompress(whole, zlib.MAX_WBITS | 16) == TEXT
        else:
            assert zstandard.ZstdDecompressor().decompressobj().decompress(whole) == TEXT
        assert compression_of(tmp_path / f"x{compression.suffix}") is compression
    assert compression_of(tmp_path / "gz") is None


@pytest.mark.unit
def test_a_change_of_a_packed_file_while_it_is_unpacked_is_noticed(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfileobj

    def copy_and_change(content: IO[bytes], file: IO[bytes], size: int) -> None:
        copy(content, file, size)
        with (packed / "b.gz").open("ab") as original:
            original.write(gzip.compress(b"more\n"))

    monkeypatch.setattr(shutil, "copyfileobj", copy_and_change)
    with (
        pytest.raises(SortInputError, match=r"b\.gz changed: its size was .* while it was unpacked"),
        unpacked([packed / "a", packed / "b.gz"], tmp_path / "copies"),
    ):
        pass
    assert names(tmp_path) == ["in"]


@pytest.mark.flow
def test_copies_that_a_killed_sort_left_are_removed(tmp_path: Path, packed: Path) -> None:
    left = tmp_path / "out" / ".interlock-sort-input"
    for source in (packed / "a", packed):
        left.mkdir(parents=True, exist_ok=True)
        (left / "00000007").write_bytes(TEXT)
        done = sort("run", source, "-O", tmp_path / "out", *OPTIONS, "-q", "-w", 1, "--overwrite")
        assert done.returncode == 0, done.stderr
        assert names(tmp_path / "out") == ["partition.0"]


@pytest.mark.flow
def test_a_standard_output_that_takes_nothing_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(TEXT)
    command = [*OWN_PROGRAM, "run", str(tmp_path / "in"), "-O", "-", "-q", "--temp", str(tmp_path / "temp")]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT, timeout=60, check=False)
    assert done.returncode == 1
    assert b"cannot be written to standard output: No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr
    assert names(tmp_path / "temp") == []
    (tmp_path / "file").touch()
    refused = sort("run", tmp_path / "in", "-O", "-", "-q", "--temp", tmp_path / "file" / "temp")
    assert refused.returncode == 2
    assert "the temporary directory" in refused.stderr
    assert "Traceback" not in refused.stderr
