"""Prefork of workers before the command line is parsed: their number, and none is left behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from interlock.sort.engines import prefork
from interlock.sort.io.memory import HUGE_PAGE_BYTES, allocate_huge_pages, allocate_pages, keep_freed_memory

pytestmark = [pytest.mark.unit, pytest.mark.cold]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["in", "-O", "out", "--workers", "2"], 2),
        (["in", "-w", "1"], 1),
        (["in", "-w3"], 3),
        (["in", "--workers=3", "--engine", "local"], 3),
        (["in", "--engine=local", "-w", "2"], 2),
        (["in", "--engine=ray", "-w", "2"], 0),
        (["in", "--workers", "many"], 0),
        (["in", "--workers"], 0),
        (["in", "-w", "2", "--engine", "ray"], 0),
        (["--help"], 0),
        (["in"], min(max(1, (os.cpu_count() or 1) // 2), prefork.MAX_PREFORKED)),
    ],
)
def test_the_worker_count_is_predicted_from_the_arguments(arguments: list[str], expected: int) -> None:
    assert prefork.predict_worker_count(arguments) == expected


def test_the_pipes_of_a_worker_that_did_not_read_its_instructions_are_closed() -> None:
    process = subprocess.Popen(["/bin/true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.wait()
    assert process.stdin is not None
    process.stdin.write(b"instructions")  # kept in the buffer of the pipe
    prefork.close_pipes(process)
    assert process.stdin.closed


FORKED = """
import os, signal, subprocess, sys
from interlock.sort.engines import prefork
prefork.start_workers(["in", "-w", "3"])
one, other, third = prefork.take_worker(), prefork.take_worker(), prefork.take_worker()
assert prefork.idle_workers == [] and len({one.pid, other.pid, third.pid}) == 3
one.stdin.close()
assert one.wait(20) == one.wait() == 0, "each has a pipe of its own"
one.kill()
try:
    other.wait(0.01)
except subprocess.TimeoutExpired:
    os.kill(other.pid, signal.SIGINT)
    other.kill()
assert other.wait() == -signal.SIGKILL, "ignores SIGINT"
prefork.idle_workers.append(third)
prefork.discard_workers()
assert third.returncode == -signal.SIGKILL and prefork.idle_workers == []
third = prefork.take_worker()
third.stdin.close()
assert isinstance(third, subprocess.Popen) and third.wait(20) == 0, "a later one is started anew"
"""


def test_forked_workers_behave_like_spawned_ones() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_worker_without_instructions_exits_when_its_pipe_closes() -> None:
    process = prefork.take_worker()
    prefork.close_pipes(process)
    assert process.wait(20) == 0


def test_a_usage_error_leaves_no_worker() -> None:
    command = [sys.executable, "-m", "interlock", "sort", "run", "none", "-O", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # the pipes end with the last process
    assert done.returncode == 2
    assert "input none does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_malloc_can_be_configured_more_than_once() -> None:
    keep_freed_memory()
    keep_freed_memory()


def test_allocated_pages_are_zero_and_writable() -> None:
    rows = allocate_pages(1_000_001)
    assert (rows.nbytes, rows.ctypes.data % 4096, int(rows.max())) == (1_000_001, 0, 0)
    rows[:] = 7
    assert int(rows.min()) == 7


@pytest.mark.parametrize("advice", [None, 9_999], ids=["if it gives some", "a system that has none"])
def test_huge_page_memory_is_aligned(advice: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if advice is not None:
        monkeypatch.setattr("mmap.MADV_HUGEPAGE", advice, raising=False)
    array = allocate_huge_pages(5_000_001)
    assert (array.nbytes, array.ctypes.data % HUGE_PAGE_BYTES, int(array.max())) == (5_000_001, 0, 0)
    array[:] = 7
    assert int(array.min()) == 7
