"""Standard input and output, and gzip and zstd files, on both sides of a sort."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import threading
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard

from interlock.errors import SortError, SortInputError
from interlock.sort.io.compression import compression_of, make_compressor, unpacked
from interlock.sort.settings import Compression
from processes import eventually
from sort_cli import ENVIRONMENT, OWN_PROGRAM, make_input, names, sort

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
def test_an_error_in_the_content_of_a_packed_file_names_it(tmp_path: Path) -> None:
    for name, records in (("good.gz", bytes(200)), ("bad.gz", bytes(150)), ("\U0001f5c3" * 62 + ".gz", bytes(100))):
        (tmp_path / name).write_bytes(gzip.compress(records))
    done = sort("run", *tmp_path.iterdir(), "-O", tmp_path / "out", "-w", 1, "-q")
    assert done.returncode == 2
    assert re.search(r"-bad: 150 bytes are not a whole number of records", done.stderr), done.stderr


@pytest.mark.flow
def test_one_line_without_its_end_is_text(tmp_path: Path) -> None:
    done = piped(b"only one", "-", "-O", "-", "-q")
    assert (done.returncode, done.stdout) == (0, b"only one\n"), done.stderr
    (tmp_path / "in").write_bytes(b"x" * 250)
    refused = sort("run", tmp_path / "in", "-O", tmp_path / "out", "-q")
    assert "are a truncated record, or --record-length is wrong; --lines sorts lines of any length" in refused.stderr


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


def make_huge(path: Path) -> Path:
    """Write a small gzip file of many gigabytes, which take minutes to unpack."""
    path.write_bytes(gzip.compress(b"line\n" * 12_000_000, 1) * 400)
    return path


@pytest.mark.flow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("source", ["standard input", "gzip"])
@pytest.mark.parametrize("output", ["directory", "-"])
def test_an_interrupt_while_input_is_unpacked_ends_the_command_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, source: str, output: str
) -> None:
    given = make_huge(tmp_path / "in.gz") if source == "gzip" else "-"
    target = "-" if output == "-" else tmp_path / "out"
    temp = tmp_path / "temp"
    command = [*OWN_PROGRAM, "run", str(given), "-O", str(target), "--lines", "--temp", str(temp)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"the first line\n")  # and the pipe stays open
        process.stdin.flush()
        eventually(lambda: list(temp.rglob("00000000-*")))
        process.send_signal(number)
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait(60) == 130, errors
    assert b"Traceback" not in errors
    assert errors.endswith(b"interrupted\n")
    assert names(temp) == []
    assert target == "-" or names(tmp_path / "out") == []


@pytest.mark.flow
def test_sigterm_leaves_nothing_of_a_sort_to_standard_output(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 600_000)
    command = [*OWN_PROGRAM, "run", str(tmp_path / "in"), "-O", "-", "--temp", str(tmp_path / "temp")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        while b"Sorting" not in (line := process.stderr.readline()):
            assert line, "it ended before the signal"
        process.terminate()
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, b""), errors
    assert b"Traceback" not in errors
    assert names(tmp_path / "temp") == []


@pytest.mark.unit
def test_a_stopped_copy_ends_before_its_input(tmp_path: Path) -> None:
    stop = threading.Event()
    place = tmp_path / "copies"
    path = make_huge(tmp_path / "in.gz")

    def stop_when_begun() -> None:
        eventually((place / "00000000-in").exists)
        stop.set()

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_when_begun)
        with pytest.raises(SortError, match="stopped while its input was unpacked"), unpacked([path], place, stop):
            pass
        stopping.result()
    assert names(tmp_path) == ["in.gz"]


@pytest.mark.unit
def test_the_error_of_one_file_stops_the_copies_of_the_others(tmp_path: Path) -> None:
    paths = [make_huge(tmp_path / "a.gz"), tmp_path / "b.gz"]
    paths[1].write_bytes(b"damaged")
    with pytest.raises(SortInputError, match=r"b\.gz is not a whole gzip file"), unpacked(paths, tmp_path / "copies"):
        pass


@pytest.mark.unit
def test_a_small_zstd_file_of_many_lines_is_unpacked_in_little_memory(tmp_path: Path) -> None:
    compressor = zstandard.ZstdCompressor().compressobj()
    text = b"the same line\n" * 700_000
    path = tmp_path / "in.zst"
    path.write_bytes(b"".join(compressor.compress(text) for _ in range(40)) + compressor.flush())
    tracemalloc.start()
    try:
        with unpacked([path], tmp_path / "copies") as (copy,):
            assert copy.stat().st_size == 40 * len(text)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.flow
def test_a_reader_that_ends_early_ends_the_command_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(TEXT * 200)  # more than a pipe holds
    command = [*OWN_PROGRAM, "run", str(tmp_path / "in"), "-O", "-", "-q", "--temp", str(tmp_path / "temp"), *OPTIONS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == ORDERED.splitlines(keepends=True)[0]
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == 141
    assert errors == b""
    assert names(tmp_path / "temp") == []


@pytest.mark.flow
def test_a_command_without_standard_input_sorts_files_only(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(TEXT)
    closed = ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *OWN_PROGRAM, "run"]
    for given, code, words in ((tmp_path / "in", 0, b""), ("-", 2, b"standard input is closed")):
        command = [*closed, str(given), "-O", "-", *OPTIONS, "-q", "--lost", "20"]
        done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        assert b"Traceback" not in done.stderr
        assert words in done.stderr


@pytest.mark.flow
def test_a_packed_input_that_is_no_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.gz")
    done = sort("run", tmp_path / "in.gz", "-O", tmp_path / "out")
    assert done.returncode == 2
    assert "in.gz is neither a file nor a directory" in done.stderr
    assert names(tmp_path) == ["in.gz"]


@pytest.mark.flow
def test_a_killed_sort_of_packed_input_is_cleaned_by_the_next_one(tmp_path: Path, packed: Path) -> None:
    huge = make_huge(tmp_path / "in.gz")
    for place in (("--temp", str(tmp_path / "temp")), ()):
        command = [*OWN_PROGRAM, "run", str(huge), "-O", str(tmp_path / "out"), "-q", "-w", "1", "--overwrite", *place]
        with subprocess.Popen(command, env=ENVIRONMENT) as process:
            eventually(lambda: list(tmp_path.rglob("00000000-*")))
            process.kill()
        assert list(tmp_path.rglob("00000000-*"))
        done = sort("run", packed, "-O", tmp_path / "out", *OPTIONS, "-q", "-w", 1, "--overwrite", *place)
        assert done.returncode == 0, done.stderr
        assert names(tmp_path / "out") == ["partition.0"]
        assert not place or names(tmp_path / "temp") == []


@pytest.mark.unit
def test_a_change_of_a_packed_file_while_it_is_unpacked_is_noticed(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = gzip.GzipFile.read

    def read_and_change(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        found = read(self, size)
        if not found:
            with (packed / "b.gz").open("ab") as original:
                original.write(gzip.compress(b"more\n"))
        return found

    monkeypatch.setattr(gzip.GzipFile, "read", read_and_change)
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
