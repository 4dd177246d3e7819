"""Sort of lines: the same order as GNU sort's for any options, through all phases, on any division and after a kill."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gnu_sort import IS_GNU, gnu_sort, random_field, random_options, random_text, seeded, separator_byte
from interlock.errors import SortInputError
from interlock.sort.data.keys import Boundary
from interlock.sort.data.line_order import LineOrder, parse_line_order
from interlock.sort.data.lines import PADDING_BYTES, SCAN_BYTES, assigns_in_order, gather_lines, sorted_lines
from interlock.sort.data.plan import Member, Plan, Roster, choose_boundaries, first_position, index_bytes, take_sample
from interlock.sort.data.records import open_source
from interlock.sort.data.validate import validate
from interlock.sort.io.buffers import BufferPool
from interlock.sort.io.memory import RowPool
from interlock.sort.io.merge import Merger, Slice, verify_output
from interlock.sort.io.runs import BlockSorter, ResidentShares
from processes import eventually
from sort_cli import sort
from sort_cluster import SortCluster, output_bytes

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 240  # of random options and lines
SPARE_BYTES = 64 << 10  # for dividers

pytestmark = pytest.mark.skipif(not IS_GNU, reason="there is no GNU sort on this machine")


def buffer_of(text: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(bytearray(text + bytes(SPARE_BYTES + PADDING_BYTES)), dtype=np.uint8)


def in_order(text: bytes, order: LineOrder) -> bytes:
    found, _ = sorted_lines(buffer_of(text), 0, len(text), order)
    into = np.empty(found.count, dtype=np.uint8)
    middle = found.count // 3
    found.gather(0, middle, into[:middle])
    found.gather(middle, found.count, into[middle:])
    return into.tobytes()


@pytest.mark.unit
@pytest.mark.parametrize("seed", range(4))
def test_lines_have_the_order_of_gnu_sort_for_random_options(seed: int) -> None:
    source = seeded(seed)
    for number in range(ROUNDS // 4):
        keys, separator, options = random_options(source)
        text = random_text(source, separator_byte(separator), source.choice([0, 1, 2, 5, 50, 200]))
        whole = text if text.endswith(b"\n") or not text else text + b"\n"
        found = in_order(whole, parse_line_order(keys, separator=separator, **options))
        assert found == gnu_sort(text, keys, separator, options), (seed, number, keys, separator, options)


@pytest.mark.unit
@pytest.mark.parametrize(
    "keys", [(), ("2,2",), ("2,2n",), ("1,1", "2,2n"), ("1,1n", "2,2n", "3"), ("1.2,1.4f",), ("1b",)], ids=" ".join
)
@pytest.mark.parametrize("line", [b"same,%d,x", b"%d.5,%d", b"%x,a", b"%d, long,,, %d ............................"])
def test_the_memory_to_sort_lines_is_at_most_that_of_the_plan(
    line: bytes, keys: tuple[str, ...], tmp_path: Path
) -> None:
    made = seeded(3)
    count = 30_000
    numbers = [made.randrange(10**7) for _ in range(2 * count)]
    width = line.count(b"%")
    (tmp_path / "in").write_bytes(
        b"".join(line % tuple(numbers[at : at + width]) + b"\n" for at in range(0, width * count, width))
    )
    order = parse_line_order(keys, separator=",")
    source = open_source([tmp_path / "in"], lines=order)
    text = (tmp_path / "in").read_bytes()
    buffer = buffer_of(text)
    tracemalloc.start()
    try:
        sorted_lines(buffer, 0, len(text), order)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(text) * index_bytes(source) + SCAN_BYTES


@pytest.mark.unit
def test_dividers_cut_where_their_line_is_even_among_equal_lines() -> None:
    source = seeded(5)
    for _ in range(60):
        keys, separator, options = random_options(source)
        text = random_text(source, b" ", 60).rstrip(b"\n") + b"\n"
        order = parse_line_order(keys, separator=separator, **(options | {"unique": False}))
        begins = [0, *(at + 1 for at, byte in enumerate(text[:-1]) if byte == ord("\n"))]
        found, _ = sorted_lines(buffer_of(text), 0, len(text), order)
        ranked = [int(begin) for begin in found.begins]
        chosen = sorted(source.sample(begins, min(len(begins), 5)), key=ranked.index)
        dividers = [Boundary(text[begin : text.index(b"\n", begin)], begin) for begin in chosen]
        again, cuts = sorted_lines(buffer_of(text), 0, len(text), order, dividers)
        assert cuts == [found.offset_of(ranked.index(begin)) for begin in chosen]
        assert again.count == found.count
        before, cuts = sorted_lines(buffer_of(text), 0, len(text), order, dividers, position=10**6)
        assert before.count == found.count
        assert cuts == sorted(cuts)


@pytest.mark.unit
def test_a_huge_line_and_many_empty_ones_are_gathered() -> None:
    lines = [b"", b"x" * 3_000_000, b"", b"y", b"z" * 5000] + [b""] * 3000 + [b"w" * 700] * 5
    text = b"".join(line + b"\n" for line in lines)
    assert in_order(text, LineOrder()) == b"".join(line + b"\n" for line in sorted(lines))


@pytest.mark.unit
@pytest.mark.parametrize("count", [2, 60, 3_000])
@pytest.mark.parametrize("options", [[], ["-r"], ["-f"]], ids=str)
def test_few_and_many_lines_with_long_equal_beginnings_are_in_order(count: int, options: list[str]) -> None:
    """Few lines that are still tied are compared as objects, and many by words."""
    source = seeded(count)
    order = parse_line_order(reverse="-r" in options, fold="-f" in options)
    ends = [bytes(source.choices(b"abAB\0", k=source.randrange(6))) for _ in range(count)]
    lines = [b"Ab" * source.choice([3, 300, 1_300]) + end for end in ends]
    expected = sorted(lines, reverse="-r" in options)
    if "-f" in options:
        expected.sort(key=bytes.upper)
    text = b"".join(line + b"\n" for line in lines)
    assert in_order(text, order) == b"".join(line + b"\n" for line in expected)


@pytest.mark.unit
def test_lines_are_gathered_without_the_order_of_assignments_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert assigns_in_order()
    monkeypatch.setattr("interlock.sort.data.lines.assigns_in_order", lambda: False)
    text = b"".join(b"%d" % (number * 7919 % 1000) * (number % 9) + b"\n" for number in range(500))
    begins = np.array([0, *(at + 1 for at, byte in enumerate(text[:-1]) if byte == ord("\n"))])
    sizes = np.diff([*begins, len(text)])
    into = np.empty(len(text), dtype=np.uint8)
    gather_lines(buffer_of(text), begins[::-1], sizes[::-1], into)
    assert into.tobytes() == b"".join(text.splitlines(keepends=True)[::-1])


@pytest.mark.unit
@pytest.mark.parametrize(
    ("keys", "separator", "message"),
    [
        (["x"], None, "not a sort key"),
        (["0"], None, "fields are numbered from 1"),
        (["1,0"], None, "fields are numbered from 1"),
        (["1.0"], None, "characters are numbered from 1"),
        (["1g"], None, "no option 'g'"),
        (["1,2M"], None, "no option 'M'"),
        ([], "ab", "one byte"),
        ([], "", "one byte"),
        ([], "\n", "one byte"),
    ],
)
def test_wrong_keys_are_refused(keys: list[str], separator: str | None, message: str) -> None:
    with pytest.raises(SortInputError, match=message):
        parse_line_order(keys, separator=separator)


@pytest.mark.unit
def test_an_order_survives_json_and_is_described() -> None:
    order = parse_line_order(["2,2n", "1.3b,4.2r"], separator=",", reverse=True, unique=True)
    assert LineOrder.from_json(json.loads(json.dumps(order.json()))) == order
    assert str(order) == "lines (-t ',' -k 2.1n,2.0 -k 1.3br,4.2 -r -u)"


@pytest.mark.parametrize("resident", [0.0, 1.0], ids=["spilled", "in memory"])
@pytest.mark.parametrize("unique", [False, True], ids=["all", "unique"])
def test_runs_and_windows_of_lines_merge_to_the_sorted_whole(tmp_path: Path, unique: bool, resident: float) -> None:  # noqa: FBT001 - a parameter
    source = seeded(unique + 2 * resident)
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / str(number)).write_bytes(random_text(source, b",", 400))
    texts = [path.read_bytes() for path in sorted((tmp_path / "in").iterdir())]
    text = b"".join(text if text.endswith(b"\n") else text + b"\n" for text in texts)
    order = parse_line_order(["2,2"], separator=",", unique=unique)
    whole = open_source([tmp_path / "in"], lines=order)
    sample = take_sample(whole, first_position(0), 500)
    boundaries = choose_boundaries([sample], 6, order)
    plan = Plan(1, 2, 3, tuple(boundaries), Roster(1, (Member(0, "here", 1, whole.records, 2000),)))
    pool, buffers = RowPool(1 << 20, 4096, 1), BufferPool(1, 2000, 1, SPARE_BYTES)
    sorter = BlockSorter(whole, 2000, plan, 0, buffers, tmp_path, pool, ResidentShares(resident, resident))
    runs = [sorter.sort(block)[0] for block in range(-(-whole.records // 2000))]
    merger = Merger(whole.format, BufferPool(2, 1500, 1, SPARE_BYTES))
    found = b""
    for partition in range(2):
        path = tmp_path / f"partition.{partition}"
        manifest = merger.merge([Slice(run.own, plan.edges(run.cuts, partition)) for run in runs], path, lambda _: None)
        assert verify_output(path, manifest)
        assert manifest["lines"] == path.read_bytes().count(b"\n")
        found += path.read_bytes()
    assert found == gnu_sort(text, ["2,2"], ",", {"unique": unique})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Lines in three files, one of which lacks its last line feed."""
    made = seeded(11)
    (tmp_path / "in").mkdir()
    for number in range(3):
        lines = [b"%d,%d,%s" % (made.randrange(50), made.randrange(-999, 999), random_field(made)) for _ in range(1500)]
        text = b"\n".join(line.replace(b"\n", b"") for line in lines)
        (tmp_path / "in" / f"part-{number}").write_bytes(text + b"\n" * (number != 1))
    return tmp_path / "in"


def text_of(source: Path) -> bytes:
    return b"".join(path.read_bytes().rstrip(b"\n") + b"\n" for path in sorted(source.iterdir()))


@pytest.mark.chaos
def test_a_sort_of_lines_with_killed_workers_and_master_resumes(tmp_path: Path, source: Path) -> None:
    order = parse_line_order(["2,2n"], separator=",")
    lines = open_source([source], lines=order)
    with SortCluster(
        tmp_path, lines, partitions=4, block_records=9_000, window_records=6_000, resident_share=0.4
    ) as cluster:
        cluster.start_master(("Sampling", "Shuffling", "Merging"))
        cluster.start_worker(0, ("Sorting+", "Shuffling", "Merging+"))
        cluster.start_worker(1, ("WaitingForShuffleSignal", "WaitingForMergeSignal"))
        report = cluster.wait("master")
        assert sorted(cluster.deaths) == ["master"] * 3 + ["worker-0"] * 3 + ["worker-1"] * 2
    assert output_bytes(cluster.output) == gnu_sort(text_of(source), ["2,2n"], ",", {})
    assert report["records"] == 4500


@pytest.mark.chaos
@pytest.mark.parametrize("unique", [False, True], ids=["all", "unique"])
def test_windows_of_lines_that_are_too_large_are_split(tmp_path: Path, source: Path, unique: bool) -> None:  # noqa: FBT001 - a parameter
    order = parse_line_order(["1,1"], separator=",", unique=unique, reverse=True)
    lines = open_source([source], lines=order)
    with SortCluster(tmp_path, lines, workers=3, block_records=1_500, window_records=40_000) as cluster:
        cluster.start_master()
        for index in range(3):
            cluster.start_worker(index)
        cluster.wait("master")
    assert output_bytes(cluster.output) == gnu_sort(text_of(source), ["1,1"], ",", {"unique": unique, "reverse": True})


@pytest.mark.chaos
def test_workers_with_other_orders_do_not_sort_together(tmp_path: Path, source: Path) -> None:
    one, other = (open_source([source], lines=parse_line_order([key])) for key in ("1", "2"))
    with SortCluster(tmp_path, one) as cluster:
        cluster.start_master()
        cluster.start_worker(0)
        cluster.start_worker(1, source=other.share(1, 2).json(), output=str(tmp_path / "other"))
        eventually(lambda: cluster.results)  # the one that registers second is refused
        ((_, text, errors),) = cluster.results.values()
    assert "it sorts lines (-k " in text + errors


@pytest.mark.chaos
def test_a_worker_that_is_restarted_with_another_order_names_it(tmp_path: Path, source: Path) -> None:
    one, other = (open_source([source], lines=parse_line_order([key], separator=",")) for key in ("1,1", "2,2n"))
    with SortCluster(tmp_path, one, resident_share=0.0) as cluster:
        cluster.start_master()
        cluster.start_worker(0)
        cluster.start_worker(1, ("Sorting",), forever=True)
        cluster.ended("worker-1")
        cluster.start_worker(1, source=other.share(1, 2).json())
        message = cluster.failure("worker-1")
        assert "before, it sorted lines (-t ',' -k 1.1,1.0), and now lines (-t ',' -k 2.1n,2.0)" in message
        assert "bytes of lines is none of them" in message
        cluster.start_worker(1)
        cluster.wait("master")
    assert output_bytes(cluster.output) == gnu_sort(text_of(source), ["1,1"], ",", {})


@pytest.mark.chaos
def test_a_killed_sort_that_is_started_with_another_order_starts_over_and_says_so(tmp_path: Path, source: Path) -> None:
    one, other = (open_source([source], lines=parse_line_order([key], separator=",")) for key in ("1,1", "2,2n"))
    with SortCluster(tmp_path, one, resident_share=0.0) as cluster:
        cluster.kill_local("Merging")
        report = cluster.restart_local(other)
        _, said, errors = cluster.results["local"]
    assert "lines (-t ',' -k 1.1,1.0) became lines (-t ',' -k 2.1n,2.0) since an earlier sort" in said + errors
    assert sum(worker["reused"] for worker in report["workers"]) == 0
    assert output_bytes(cluster.output) == gnu_sort(text_of(source), ["2,2n"], ",", {})


@pytest.mark.chaos
def test_the_command_sorts_and_validates_lines(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    options = ("-t", ",", "-k", "2,2nr", "-k", "1")
    done = sort("run", source, "-O", out, "-w", 2, *options)
    assert done.returncode == 0, done.stderr
    assert "sorting lines (-t ',' -k 2.1nr,2.0 -k 1.1)" in done.stderr
    assert output_bytes(out) == gnu_sort(text_of(source), ["2,2nr", "1"], ",", {})
    checked = sort("validate", out, "-I", source, *options, "--json")
    assert checked.returncode == 0, checked.stdout
    assert json.loads(checked.stdout)["records"] == 4500
    assert sort("validate", out, "-t", ",", "-k", "2,2n").returncode == 1
    assert sort("run", source, "-O", tmp_path / "all", "-w", 1, "-q", "--lines").returncode == 0
    assert sort("validate", tmp_path / "all", "-I", source, "--lines").returncode == 0
    refused = sort("run", source, "-O", tmp_path / "not", "-k", "1x")
    assert refused.returncode == 2
    assert "there is no option 'x'" in refused.stderr
    refused = sort("run", source, "-O", tmp_path / "not", "-k", "1", "--record-length", 100)
    assert refused.returncode == 2
    assert not (tmp_path / "not").exists()


@pytest.mark.unit
def test_validation_finds_lines_that_are_lost_changed_or_out_of_order(tmp_path: Path, source: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    order = parse_line_order(["2,2n"], separator=",")
    whole = gnu_sort(text_of(source), ["2,2n"], ",", {}).splitlines(keepends=True)

    def problems(*parts: list[bytes]) -> str:
        for number, part in enumerate(parts):
            (place / f"partition.{number}").write_bytes(b"".join(part))
        return "; ".join(validate([place], [source], lines=order).problems)

    assert problems(whole[:2000], whole[2000:]) == ""
    assert "out of order" in problems(whole[:2000], [*whole[2001:], whole[2000]])
    assert "does not belong behind" in problems(whole[2000:], whole[:2000])
    assert "4,499 records, but the input has 4,500" in problems(whole[:2000], whole[2001:])
    assert "some records differ" in problems(whole[:2000], [*whole[2000:-1], whole[-1].replace(b"\n", b"x\n")])
    assert "last line does not end" in problems(whole[:2000], [*whole[2000:-1], whole[-1].rstrip(b"\n")])
    unique = parse_line_order(["1,1"], separator=",", unique=True)
    (place / "partition.1").unlink()
    (place / "partition.0").write_bytes(gnu_sort(text_of(source), ["1,1"], ",", {"unique": True}))
    assert validate([place], [source], lines=unique).is_valid
    (place / "partition.0").write_bytes(b"1,a\n1,b\n")
    assert "out of order" in validate([place], lines=unique).problems[0]


@pytest.mark.unit
@pytest.mark.parametrize("seed", range(2))
def test_validation_agrees_with_gnu_sort(tmp_path: Path, seed: int) -> None:
    source = seeded(100 + seed)
    for _ in range(60):
        keys, separator, options = random_options(source)
        text = random_text(source, separator_byte(separator), 40)
        order = parse_line_order(keys, separator=separator, **options)
        (tmp_path / "partition.0").write_bytes(gnu_sort(text, keys, separator, options))
        assert validate([tmp_path], lines=order).problems == [], (keys, separator, options)
