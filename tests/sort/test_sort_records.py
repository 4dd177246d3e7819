"""Sources of records: any division reads the same bytes, and bad input is refused by file and byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.errors import SortInputError
from interlock.sort.data.line_order import LineOrder
from interlock.sort.data.records import RecordFormat, Source, open_source
from interlock.sort.workdir import check_directories, list_partitions, lock_output, prepare_output

pytestmark = pytest.mark.unit

LINE = b"%-98d\r\n"


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def content(source: Source) -> bytes:
    buffer = np.empty(source.size, dtype=np.uint8)
    source.read(buffer)
    return buffer.tobytes()


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    shares=st.integers(1, 5),
    block=st.integers(1, 7),
)
def test_every_division_reads_the_same_bytes_in_the_same_order(lengths: list[int], shares: int, block: int) -> None:
    with TemporaryDirectory() as place:
        whole = b""
        for number, length in enumerate(lengths):
            piece = bytes([number]) * length * 5
            whole += piece
            write(Path(place, f"part-{number}"), piece)
        source = open_source([Path(place)], record_length=5, key_length=2, ascii=False)
        assert content(source) == whole
        parts = [source.share(number, shares) for number in range(shares)]
        assert b"".join(content(part) for part in parts) == whole
        assert sum(part.records for part in parts) == source.records
        for part in parts:
            blocks = part.blocks(block)
            assert b"".join(content(piece) for piece in blocks) == content(part)
            assert all(whole[piece.position * 5 :].startswith(content(piece)) for piece in blocks)
        assert Source.from_json(source.json()) == source


def test_a_directory_stands_for_all_its_files_by_path_without_hidden_ones(tmp_path: Path) -> None:
    write(tmp_path / "b", b"b" * 100)
    write(tmp_path / "a" / "2", b"2" * 100)
    write(tmp_path / "a" / "10", b"1" * 200)
    write(tmp_path / ".hidden", b"x")
    write(tmp_path / ".cache" / "y", b"x")
    write(tmp_path / "empty", b"")
    source = open_source([tmp_path])
    assert [Path(extent.path).name for extent in source.extents] == ["10", "2", "b"]
    assert source.records == 4
    assert content(source) == b"1" * 200 + b"2" * 100 + b"b" * 100


def test_a_source_may_be_empty(tmp_path: Path) -> None:
    source = open_source([tmp_path])
    assert (source.records, source.size, source.blocks(10), content(source.share(0, 2))) == (0, 0, [], b"")


@pytest.mark.parametrize(
    ("written", "is_ascii"),
    [
        (b"".join(LINE % number for number in range(3)), True),
        (b"\x00" + LINE % 1 + b"x" * 99, False),
        (b"\x00" * 98 + b"\r\n", False),
        (b"\x00" * 300, False),
    ],
)
def test_lines_are_detected_unless_the_format_is_given(tmp_path: Path, written: bytes, is_ascii: bool) -> None:  # noqa: FBT001 - a parameter
    path = write(tmp_path / "file", written)
    assert open_source([path]).format == RecordFormat(100, 10, is_ascii)
    assert not open_source([path], ascii=False).format.ascii


def test_lines_of_another_length_are_refused_as_records_with_the_right_length(tmp_path: Path) -> None:
    path = write(tmp_path / "file", (b"x" * 118 + b"\r\n") * 100)
    with pytest.raises(SortInputError, match=r"lines of 120 bytes: give --record-length 120"):
        open_source([path], record_length=100)
    assert open_source([path], record_length=120).format.ascii
    write(path, b"one\r\nlonger\r\n" * 100)
    with pytest.raises(SortInputError, match=r"lines of 5 to 8 bytes: sort lines without --record-length"):
        open_source([path], key_length=10)


def test_the_heads_of_all_files_decide_whether_there_are_lines(tmp_path: Path) -> None:
    first = write(tmp_path / "a", bytes(99 * 200 + 200))
    write(tmp_path / "b", b"")
    later = write(tmp_path / "c", b"one\ntwo and three\n" * 50)
    with pytest.raises(SortInputError, match=r"c holds lines of other lengths.*a before it holds other bytes"):
        open_source([tmp_path])
    with pytest.raises(SortInputError, match=r"c does not hold records of 100 bytes but lines of 4 to 14 bytes"):
        open_source([tmp_path], record_length=100)
    assert open_source([first, later], lines=LineOrder()).records == 20_000 + 1 + 900
    assert open_source([later, first]).format.lines == LineOrder()
    text = write(tmp_path / "d", b"x" * 200)
    assert open_source([first, text]).format == RecordFormat()
    assert open_source([text, first]).format == RecordFormat()
    crlf = write(tmp_path / "e", LINE % 1 * 2)
    with pytest.raises(SortInputError, match=r"e holds lines of 100 bytes that end in CR LF, and .*d before it"):
        open_source([text, crlf])
    write(later, b"one\ntwo and three\n" * 50 + bytes(100))
    assert open_source([first, later], ascii=False, record_length=50, key_length=10).records == 400 + 20


@pytest.mark.parametrize(
    "text",
    [
        b"one\nand another\n" * 100,
        b"eins\r\nzw\xc3\xb6lf\r\n" * 50,
        b"a\tb\n\n" * 20,
        b"x" * 98 + b"\n\n",
        b"only one\n",
        b"only one, without its end",
        (b"x" * 99 + b"\n") * 70,
        b"\x1b[31mred\x1b[0m\n" * 20,
    ],
    ids=[
        "LF",
        "CR LF",
        "empty lines",
        "an end in the record",
        "one line",
        "no end",
        "LF after 100 bytes",
        "with colours",
    ],
)
def test_text_of_other_lines_is_sorted_as_lines_even_if_its_size_fits(tmp_path: Path, text: bytes) -> None:
    path = write(tmp_path / "file", text)
    assert open_source([path]).format == RecordFormat.of_lines(LineOrder())
    assert open_source([path], record_length=len(text), key_length=1, ascii=False).records == 1


@pytest.mark.parametrize("data", [b"\x00\x01\n\x02" * 25, b"x" * 99 + b"\0", b"x" * 100, b""])
def test_other_data_is_sorted_as_records(tmp_path: Path, data: bytes) -> None:
    found = open_source([write(tmp_path / "file", data)]).format
    assert (found.record_length, found.key_length, found.lines, found.ascii) == (100, 10, None, False)


HEAD = 64  # records, by which the content is detected


@pytest.mark.parametrize(
    ("head", "later", "lengths", "message"),
    [
        (
            LINE % 1,
            b"y" * 49 + b"\n" + b"y" * 48 + b"\r\n",
            {},
            "this line of 100 bytes has a line feed before its end",
        ),
        (LINE % 1, b"y" * 99 + b"\n", {}, "this line of 100 bytes does not end in CR LF"),
        (b"\xc3\xa4" * 49 + b"\r\n", b"y" * 100, {}, "this line of 100 bytes does not end in CR LF"),
        (b"x" * 100, b"y" * 49 + b"\n" + b"y" * 49 + b"\n", {}, "this record of 100 bytes has a line feed"),
        (b"x" * 24 + b"\n", b"y" * 50, {"record_length": 25}, "this line of 25 bytes does not end in a line feed"),
        (b"x" * 24 + b"\n", b"\n" * 25, {"record_length": 25}, "this line of 25 bytes has a line feed before its end"),
    ],
    ids=["CR LF", "CR LF then LF", "CR LF in UTF-8", "no line feed", "LF as given", "LF as given and more"],
)
def test_text_that_only_begins_as_records_is_never_cut(
    tmp_path: Path, head: bytes, later: bytes, lengths: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "file", head * (HEAD + 6) + later + head)
    source = open_source([path], **lengths)
    place = f"{len(head) * (HEAD + 6):,}"
    with pytest.raises(SortInputError, match=rf"file, byte {place}: {message}.*--lines .*--binary"):
        content(source)
    assert content(open_source([path], **lengths, ascii=False)) == path.read_bytes()
    assert content(open_source([path], lines=LineOrder())) == path.read_bytes() + b"\n" * (head[-1:] != b"\n")


def test_shares_and_blocks_of_lines_are_whole_lines_of_all_files(tmp_path: Path) -> None:
    lines = [b"x" * (number * 37 % 91) for number in range(300)]
    (tmp_path / "in").mkdir()
    for number in range(3):
        some = b"\n".join(lines[number * 100 : number * 100 + 100])
        write(tmp_path / "in" / str(number), some + b"\n" * (number != 1))
    write(tmp_path / "in" / "empty", b"")
    source = open_source([tmp_path / "in"], lines=LineOrder())
    whole = b"".join(line + b"\n" for line in lines)
    assert content(source) == whole
    for count in (1, 2, 7, 400):
        shares = [source.share(number, count) for number in range(count)]
        texts = [content(share) for share in shares]
        assert b"".join(texts) == whole
        assert all(text.endswith(b"\n") for text in texts if text)
        assert [whole.find(text, share.position) for text, share in zip(texts, shares, strict=True)] == [
            share.position for share in shares
        ]
    assert b"".join(map(content, source.blocks(50))) == whole
    assert Source.from_json(source.json()) == source


def test_a_line_without_its_end_is_named_by_file_and_byte(tmp_path: Path) -> None:
    good = LINE % 7
    path = write(tmp_path / "file", good * 70 + b"y" * 100 + good)
    source = open_source([path])
    with pytest.raises(SortInputError, match=r"file, byte 7,000: this line .* --binary"):
        content(source)
    with pytest.raises(SortInputError, match=r"file, byte 7,000"):
        content(source.part(69, 3))


def test_a_truncated_record_is_named_by_file_and_byte(tmp_path: Path) -> None:
    write(tmp_path / "file", b"a" * 250)
    with pytest.raises(SortInputError, match=r"file: 250 bytes are not a whole number .* last 50, from byte 200 on"):
        open_source([tmp_path])


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "file", b"a" * 300)
    source = open_source([path])
    write(path, b"a" * 100)
    with pytest.raises(SortInputError, match="became shorter"):
        content(source)
    path.unlink()
    with pytest.raises(SortInputError, match="cannot be read"):
        content(source)


def test_inputs_that_are_missing_given_twice_or_no_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in" / "file", b"a" * 100)
    with pytest.raises(SortInputError, match="gone does not exist"):
        open_source([tmp_path / "gone"])
    with pytest.raises(SortInputError, match="file is given twice"):
        open_source([tmp_path / "in", path])
    with pytest.raises(SortInputError, match="no input"):
        open_source([])
    os.mkfifo(tmp_path / "in" / "pipe")
    with pytest.raises(SortInputError, match="pipe is neither a file nor a directory"):
        open_source([tmp_path / "in"])


def test_an_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "secret", b"a" * 100).chmod(0)
    code = (
        "import os, sys, pathlib; from interlock.errors import SortInputError; "
        "from interlock.sort.data.records import open_source\n"
        "os.getuid() or os.setuid(65534)\n"
        "try: open_source([pathlib.Path('secret')])\n"
        "except SortInputError as error: sys.exit(str(error))"
    )
    on_progress = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (on_progress.returncode, on_progress.stderr) == (1, "input secret cannot be read: Permission denied\n")


@pytest.mark.parametrize(
    ("lengths", "wrong"),
    [
        ((0, 1), "record length must be between"),
        ((100, 0), "key of 0"),
        ((100, 101), "1 to 100"),
        ((2_000_000, 10), "1,048,576"),
    ],
)
def test_impossible_lengths_are_refused(tmp_path: Path, lengths: tuple[int, int], wrong: str) -> None:
    with pytest.raises(SortInputError, match=wrong):
        open_source([tmp_path], record_length=lengths[0], key_length=lengths[1])
    with pytest.raises(SortInputError, match="1 to 98"):
        open_source([tmp_path], key_length=99, ascii=True)


def test_output_and_input_are_kept_apart(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (tmp_path / "link").symlink_to(source)
    check_directories([source], tmp_path / "out", tmp_path)
    for output in (source, source / "deep" / "out", tmp_path / "link" / "out"):
        with pytest.raises(SortInputError, match=r"output directory .* is inside the input"):
            check_directories([source], output)
    with pytest.raises(SortInputError, match=r"temporary directory .* is inside the input"):
        check_directories([source], tmp_path / "out", source / "temp")
    with pytest.raises(SortInputError, match=r"input .* is inside the output directory"):
        check_directories([source], tmp_path)
    file = write(tmp_path / "file", b"")
    with pytest.raises(SortInputError, match=r"output directory .* is a file"):
        check_directories([source], file)


def test_an_output_directory_is_locked_and_keeps_its_content(tmp_path: Path) -> None:
    output = tmp_path / "out"
    prepare_output(output)
    with lock_output(output):
        with pytest.raises(SortInputError, match="another sort writes to the output directory"), lock_output(output):
            pass
        assert list(output.iterdir()) == []
    for number in (10, 9):
        write(output / f"partition.{number}", b"x")
    write(output / "partition.x", b"x")
    with lock_output(output), pytest.raises(SortInputError, match=r"already holds partition.9 and 1 more"):
        prepare_output(output)
    prepare_output(output, overwrite=True)
    assert [path.name for path in list_partitions(output)] == ["partition.9", "partition.10"]
    with pytest.raises(SortInputError, match=r"cannot be used"), lock_output(tmp_path / "gone"):
        pass
