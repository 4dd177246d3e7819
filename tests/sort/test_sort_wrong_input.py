"""Errors around a sort: each has a clear message, damages nothing and leaves no process behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from interlock.errors import SortError
from interlock.sort.data.validate import validate
from interlock.sort.logging import stop_on_interrupt
from sort_cli import first_line, make_input, names, sort, started

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.flow


def snapshot(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """Generate an input, and check afterwards that it is unchanged."""
    place = make_input(tmp_path / "in", 2_000)
    before = snapshot(place)
    yield place
    assert {path: content for path, content in snapshot(place).items() if path in before} == before


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_truncated_record_is_refused_before_anything_is_written(tmp_path: Path, source: Path) -> None:
    (source / "part-00002").write_bytes(b"x" * 250)
    done = sort("run", source, "-O", tmp_path / "out")
    refused(done, 2, "part-00002: 250 bytes are not a whole number of records", "from byte 200 on")
    assert not (tmp_path / "out").exists()


def test_a_missing_directory_is_refused_before_anything_is_written(tmp_path: Path, source: Path) -> None:
    refused(sort("run", source, tmp_path / "gone", "-O", tmp_path / "out"), 2, f"input {tmp_path}/gone does not exist")
    assert not (tmp_path / "out").exists()


def test_an_unreadable_file_is_refused_before_anything_is_written(tmp_path: Path, source: Path) -> None:
    (source / "part-00001").chmod(0)
    code = (  # the first run is for imports that other users may not be allowed to read
        "import os, sys; from interlock.__main__ import main\n"
        "sys.argv = ['interlock', 'sort', 'run', 'gone', '-O', 'out']\n"
        "try: main()\n"
        "except SystemExit: os.getuid() or (os.setgroups([]), os.setgid(65534), os.setuid(65534))\n"
        "sys.argv[3] = 'in'; main()"
    )
    for place in (tmp_path, *tmp_path.parents):
        if place.stat().st_uid == os.getuid() and place != Path("/") and "pytest" in str(place):
            place.chmod(0o755)
    try:
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    finally:
        (source / "part-00001").chmod(0o644)
    refused(done, 2, "part-00001 cannot be read: Permission denied")
    assert not (tmp_path / "out").exists()


def test_an_output_inside_the_input_is_refused(source: Path) -> None:
    refused(sort("run", source, "-O", source / "out"), 2, "out is inside the input", "which is only read")
    assert names(source) == ["part-00000", "part-00001"]


def test_a_full_disk_is_a_clear_error_that_leaves_no_partition(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 50_000)
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--lost", 10)
    done = sort(*arguments, largest_file=1_000_000)
    refused(done, 1, "File too large")
    assert not [name for name in names(tmp_path / "out") if name.startswith("partition")]
    again = sort(*arguments)
    assert again.returncode == 0, again.stderr
    assert validate([tmp_path / "out"], [tmp_path / "in"]).problems == []


def test_a_second_worker_on_one_output_is_refused(tmp_path: Path, source: Path) -> None:
    other = make_input(tmp_path / "other", 3_000, seed=2)
    with ExitStack() as stack:
        master = stack.enter_context(started("master", 2, "--quiet"))
        address = first_line(master)
        first = stack.enter_context(started("worker", address, "-I", source, "-O", tmp_path / "out"))
        assert first.stderr is not None
        first.stderr.readline()  # it says what it sorts as soon as the output is its own
        refused(sort("worker", address, "-I", other, "-O", tmp_path / "out"), 2, "another sort writes to the output")
        second = stack.enter_context(started("worker", address, "-I", other, "-O", tmp_path / "out2"))
        for process in (first, second, master):
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
    assert validate([tmp_path / "out", tmp_path / "out2"], [source, other]).problems == []


def test_a_missing_worker_ends_the_master_and_the_other_workers(tmp_path: Path, source: Path) -> None:
    with started("master", 2, "--timeout", 10, "--quiet") as master:
        address = first_line(master)
        with started("worker", address, "-I", source, "-O", tmp_path / "out", "--timeout", 11, "--lost", 2) as worker:
            _, errors = worker.communicate(timeout=60)
        _, complaint = master.communicate(timeout=60)
    assert (master.returncode, worker.returncode) == (1, 1), (complaint, errors)
    assert "1 of 2 workers" in complaint
    assert "Traceback" not in complaint + errors
    assert [name for name in names(tmp_path / "out") if name.startswith("partition")] == []


def test_a_missing_master_is_a_clear_error(tmp_path: Path, source: Path) -> None:
    with closing(socket.socket()) as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = sort("worker", address, "-I", source, "-O", tmp_path / "out", "--timeout", 1, "--lost", 1)
    refused(done, 1, address)


@pytest.mark.parametrize(
    ("host", "wrong"),
    [("203.0.113.9", "203.0.113.9:0: Cannot assign requested address"), ("no.invalid", "no.invalid:0: "),
     ("fe80::9", "[fe80::9]:0: ")],
)  # fmt: skip
def test_an_address_of_another_machine_is_one_clear_line(host: str, wrong: str) -> None:
    with started("master", 1, "--host", host, environment={"INTERLOCK_SORT_TOKEN": "a-token-of-a-sort"}) as process:
        output, errors = process.communicate(timeout=60)
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    refused(done, 1, f"cannot listen on {wrong}", "; name an address of this machine, and a port that is free")
    assert len(done.stderr.splitlines()) == 1


def test_a_client_with_another_protocol_does_not_disturb_the_sort(tmp_path: Path, source: Path) -> None:
    with started("master", 1, "--quiet") as master:
        address = first_line(master)
        host, _, port = address.partition(":")
        with closing(socket.create_connection((host, int(port)))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
        with grpc.insecure_channel(address) as channel:
            for service, method in (("MasterService", "RegisterWorker"), ("MasterService", "SendSample"), ("No", "No")):
                call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                    f"/interlock.sort.{service}/{method}"
                )
                with pytest.raises(grpc.RpcError):
                    call(b"\xff" * 64, timeout=10)
        done = sort("worker", address, "-I", source, "-O", tmp_path / "out")
        assert done.returncode == 0, done.stderr
        _, errors = master.communicate(timeout=60)
        assert master.returncode == 0, errors
    assert validate([tmp_path / "out"], [source]).problems == []


def test_a_master_with_another_protocol_is_a_clear_error(tmp_path: Path, source: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with started("worker", address, "-I", source, "-O", tmp_path / "out", "--timeout", 2, "--lost", 2) as worker:
            connection, _ = server.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            connection.close()
            server.close()
            _, errors = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert address in errors
    assert "Traceback" not in errors


def test_an_interrupted_sort_leaves_no_process_and_no_partition(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 600_000)
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--memory", "256MB")
    with started(*arguments) as process:
        assert process.stderr is not None
        while "Sorting" not in (line := process.stderr.readline()):
            assert line, "it ended before it was interrupted"
        process.send_signal(2)
        process.communicate(timeout=60)
        assert process.returncode == 130
    assert names(tmp_path / "out") == []
    done = sort(*arguments)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "out") == ["partition.0", "partition.1"]
    assert validate([tmp_path / "out"], [tmp_path / "in"]).problems == []


def test_an_input_that_links_into_the_output_is_refused(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    assert sort("run", source, "-O", out, "-w", 1).returncode == 0
    before = snapshot(out)
    for name, target in (("file", "../out/partition.0"), ("directory", "../out")):
        linked = tmp_path / f"linked-{name}"
        linked.mkdir()
        (linked / name).symlink_to(target)
        refused(sort("run", linked, "-O", out, "-w", 1, "--overwrite"), 2, "is in the output directory")
    assert snapshot(out) == before


def test_names_that_are_not_utf8_are_refused_in_one_line(tmp_path: Path, source: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    odd.mkdir()
    (odd / "file").write_bytes(bytes(100))
    refused(sort("run", odd, "-O", tmp_path / "out"), 2, "has a name that is not UTF-8")
    refused(sort("run", source, "-O", odd), 2, "the output directory", "has a name that is not UTF-8")


def test_a_report_that_could_not_be_written_is_refused_before_the_sort(tmp_path: Path, source: Path) -> None:
    done = sort("run", source, "-O", tmp_path / "out", "--report", tmp_path / "gone" / "r.json")
    refused(done, 2, "the report cannot be written")
    assert not (tmp_path / "out").exists()


def test_few_open_files_are_enough_for_many_partitions(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 600_000)
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--memory", "290MB", "--partitions", 100)
    with started(*arguments, limits={"RLIMIT_NOFILE": 128}) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert validate([tmp_path / "out"], [tmp_path / "in"]).problems == []


def interrupted(stop: threading.Event, times: int, reached: list[int]) -> None:
    with stop_on_interrupt(stop):
        for time in range(times):
            signal.raise_signal(signal.SIGINT)
            reached.append(time)
        raise SortError("given up")


def test_an_interrupt_stops_the_sort_and_raises_when_it_has_ended() -> None:
    stop, reached = threading.Event(), list[int]()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as raised:
        interrupted(stop, 1, reached)
    assert stop.is_set()
    assert reached == [0]
    assert isinstance(raised.value.__cause__, SortError)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_raises_at_once() -> None:
    reached = list[int]()
    with pytest.raises(KeyboardInterrupt):
        interrupted(threading.Event(), 2, reached)
    assert reached == [0]


def test_a_result_from_before_an_interrupt_stands() -> None:
    stop = threading.Event()
    with stop_on_interrupt(stop):
        signal.raise_signal(signal.SIGINT)
    assert stop.is_set()


def test_a_waiting_master_and_worker_can_be_interrupted(tmp_path: Path, source: Path) -> None:
    with started("master", 2) as master:
        with started("worker", first_line(master), "-I", source, "-O", tmp_path / "out") as worker:
            assert worker.stderr is not None
            while "WaitingForPartitionConfig" not in (line := worker.stderr.readline()):
                assert line, "it ended before it was interrupted"
            worker.send_signal(signal.SIGINT)
            worker.communicate(timeout=60)
            assert worker.returncode == 130
        master.send_signal(signal.SIGINT)
        _, errors = master.communicate(timeout=60)
    assert master.returncode in {1, 130, -signal.SIGINT}, (
        errors
    )  # it may have noticed the worker's failure, or have ended
    assert "Traceback" not in errors
    assert not any(name.startswith("partition") for name in names(tmp_path / "out"))
