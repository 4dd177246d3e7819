"""The commands of the sort: on one machine, on many, and their output."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from interlock.sort.data.validate import validate
from sort_cli import first_line, make_input, names, sort, started

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.flow


@pytest.mark.cold
def test_a_whole_round_of_generate_run_and_validate(tmp_path: Path) -> None:
    made = sort("generate", tmp_path / "in", "--size", "2MB", "--files", 3, "--ascii", "--json")
    assert made.returncode == 0, made.stderr
    document = json.loads(made.stdout)
    assert (document["records"], document["size"], len(document["paths"])) == (20_000, 2_000_000, 3)
    done = sort("run", tmp_path / "in", "--output", tmp_path / "out", "--workers", 2, "--memory", "256MB", "--history")
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "out") == ["partition.0", "partition.1"]
    assert "20,000 lines of 100 bytes with keys of 10" in done.stderr
    for shown in ("Phase durations", "Partitions", "State history", "WaitingForShuffleSignal", "20,000 records"):
        assert shown in done.stdout
    checked = sort("validate", tmp_path / "out", "--input", tmp_path / "in", "--json")
    assert checked.returncode == 0, checked.stdout
    found = json.loads(checked.stdout)
    assert found["valid"]
    assert found["digest"] == found["input_digest"] == document["digest"]
    assert found["largest"] < 1.05


def test_the_json_report_has_phases_and_history(tmp_path: Path) -> None:
    make_input(tmp_path / "in")
    (tmp_path / "temp").mkdir()
    (tmp_path / "temp" / "mine").touch()
    places = ("-O", tmp_path / "out", "--temp", tmp_path / "temp", "--report", tmp_path / "r")
    done = sort("run", tmp_path / "in", *places, "-w", 2, "--partitions", 5, "--json")
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "temp") == ["mine"]
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "r").read_text())
    assert (report["records"], report["bytes"]) == (20_000, 2_000_000)
    for worker in report["workers"]:
        assert set(worker["phases"]) == {"Sampling", "Sorting", "Shuffling", "Merging"}
        assert [move["to_state"] for move in worker["history"]][-1] == "Completed"
    assert [one["number"] for worker in report["workers"] for one in worker["partitions"]] == list(range(5))
    assert validate([tmp_path / "out"], [tmp_path / "in"]).is_valid


def test_a_master_of_many_machines_prints_only_addresses(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("a", "b", "c")]
    for seed, place in enumerate(places):
        make_input(place / "in", 5_000 * (seed + 1), seed=seed)
    with ExitStack() as stack:
        master = stack.enter_context(started("master", 3, "--quiet", "--history"))
        address = first_line(master)
        workers = [
            stack.enter_context(
                started("worker", address, "-I", place / "in", "-O", place / "out", "--temp", place / "t")
            )
            for place in places
        ]
        ends = [worker.communicate(timeout=60) for worker in workers]
        output, errors = master.communicate(timeout=60)
    assert [process.returncode for process in (master, *workers)] == [0] * 4, (errors, ends)
    lines = output.splitlines()
    assert len(lines) == 3
    assert len(set(lines)) == 3
    assert all(line.startswith("127.0.0.1:") for line in lines)
    assert "State history" in errors
    found = validate([place / "out" for place in places], [place / "in" for place in places])
    assert found.problems == []
    assert [names(place / "out") for place in places] != [[], [], []]
    printed = [path for out, _ in ends for path in out.splitlines()]
    assert sorted(printed) == sorted(str(path) for place in places for path in (place / "out").iterdir())


def test_partitions_of_another_sort_are_replaced_only_on_request(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 1_000)
    out = tmp_path / "out"
    out.mkdir()
    (out / "partition.7").write_bytes(b"precious")
    refused = sort("run", tmp_path / "in", "-O", out, "-w", 1)
    assert refused.returncode == 2
    assert "already holds partition.7" in refused.stderr
    assert (out / "partition.7").read_bytes() == b"precious"
    done = sort("run", tmp_path / "in", "-O", out, "-w", 1, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert names(out) == ["partition.0"]


def test_other_lengths_and_no_records_at_all_are_sorted(tmp_path: Path) -> None:
    made = sort("generate", tmp_path / "in", "--records", 3_000, "--record-length", 33, "--key-length", 7)
    assert made.returncode == 0, made.stderr
    lengths = ("--record-length", 33, "--key-length", 7)
    done = sort("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, *lengths)
    assert done.returncode == 0, done.stderr
    assert validate([tmp_path / "out"], [tmp_path / "in"], record_length=33, key_length=7).is_valid
    (tmp_path / "none").mkdir()
    empty = sort("run", tmp_path / "none", "-O", tmp_path / "empty", "-w", 2)
    assert empty.returncode == 0, empty.stderr
    assert validate([tmp_path / "empty"]).records == 0


def test_a_failed_validation_exits_with_one_and_names_the_problem(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "partition.0").write_bytes(b"b" * 100 + b"a" * 100)
    found = sort("validate", tmp_path / "out")
    assert found.returncode == 1
    assert "not valid" in found.stdout
    assert "byte 100: smaller key than the record before it" in found.stdout


MISTAKES = [
    (["generate", "x"], "Give either --records or --size"),
    (["generate", "x", "--size", "many"], "--size 'many' is not a size; write 64MB"),
    (["generate", "x", "--size", "1MB", "--key-length", "101"], "a key of 101 bytes in a record of 100"),
    (["run", ".", "-O", "y", "--memory", "lots"], "--memory 'lots' is not a size"),
    (["run", ".", "-O", "y", "--memory", "1MB"], "1,000,000 bytes of memory are too few"),
    (["run", ".", "-O", "y", "--lost", "0"], "lost_after_s must be greater than 0, got 0"),
    (["run", ".", "-O", "y", "-t", ""], "the field separator '' must be one byte"),
    (["validate", "x", "-t", ""], "the field separator '' must be one byte"),
    (["run", ".", "-O", "/dev/null/y"], "the output directory /dev/null/y cannot be made: Not a directory"),
    (["run", ".", "-O", "y", "--engine", "ray"], "--engine ray needs ray: pip install 'interlock[sort,ray]'"),
    (["validate", "x"], "output x is not a directory"),
    (["worker", "nowhere", "-I", ".", "-O", "y"], "'nowhere' is not the address of a master"),
    (["worker", "here:65536", "-I", ".", "-O", "y"], "'here:65536' is not the address of a master"),
    (["worker", "here:0", "-I", ".", "-O", "y"], "'here:0' is not the address of a master"),
    (["master", "2", "--temp", "/dev/null"], "the temporary directory /dev/null cannot be made: File exists"),
    (["run", ".", "-O", "y", "--report", "."], "the report cannot be written to ., which is a directory: name a file"),
]


@pytest.mark.cold
def test_usage_errors_are_one_line_and_exit_with_2(tmp_path: Path) -> None:
    code = (  # all in one process: most of the time is that of its start
        "import json, sys; sys.modules['ray'] = None\n"
        "from interlock.__main__ import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['interlock', 'sort', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as end: print('exit', end.code, file=sys.stderr)\n"
    )
    given = json.dumps([arguments for arguments, _ in MISTAKES])
    done = subprocess.run(
        [sys.executable, "-c", code, given], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert "Traceback" not in done.stderr
    response = done.stderr.split("exit 2\n")
    assert len(response) == len(MISTAKES) + 1, done.stderr
    for (_, wrong), answer in zip(MISTAKES, response, strict=False):
        assert wrong in answer
        assert len(answer.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cold
def test_without_the_extra_the_error_names_the_package_to_install() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from interlock.__main__ import main\n"
        "sys.argv = ['interlock', 'sort', 'generate', 'x', '--size', '1MB']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("the sort needs numpy: pip install 'interlock[sort]'")


def test_text_whose_head_looks_like_records_is_sorted_as_lines_or_refused(tmp_path: Path) -> None:
    head = [b"%099d" % (7919 * number % 101) for number in range(70)]
    later = [b"%049d" % number for number in range(20)]  # two of them have 100 bytes
    (tmp_path / "lf").write_bytes(b"".join(line + b"\n" for line in [*head, *later]))
    done = sort("run", tmp_path / "lf", "-O", tmp_path / "out", "-w", 1)
    assert done.returncode == 0, done.stderr
    assert "sorting lines, " in done.stderr
    assert (tmp_path / "out" / "partition.0").read_bytes() == b"".join(line + b"\n" for line in sorted([*head, *later]))
    crlf = [line[:-1] + b"\r" for line in [*head, *later]]
    (tmp_path / "crlf").write_bytes(b"".join(line + b"\n" for line in crlf))
    done = sort("run", tmp_path / "crlf", "-O", tmp_path / "not", "-w", 1)
    assert done.returncode in {1, 2}
    assert "crlf, byte 7,000: this line of 100 bytes has a line feed before its end" in done.stderr
    assert "--lines" in done.stderr
    assert names(tmp_path / "not") == []
    assert sort("run", tmp_path / "crlf", "-O", tmp_path / "not", "-w", 1, "--lines").returncode == 0
    assert (tmp_path / "not" / "partition.0").read_bytes() == b"".join(line + b"\n" for line in sorted(crlf))
