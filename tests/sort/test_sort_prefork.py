"""Workers that are started before the command is read: as many as it seems to ask for, and none is left behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from interlock.sort.engines import prefork as standby
from interlock.sort.io.memory import LARGE_PAGE, keep_freed_memory, large_pages, small_pages

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["in", "-O", "out", "--workers", "2"], 2),
        (["in", "-n", "1"], 1),
        (["in", "--workers", "many"], 0),
        (["in", "--workers"], 0),
        (["in", "-n", "2", "--engine", "ray"], 0),
        (["--help"], 0),
        (["in"], min(max(1, (os.cpu_count() or 1) // 2), standby.MOST)),
    ],
)
def test_as_many_workers_are_foreseen_as_the_arguments_ask_for(arguments: list[str], expected: int) -> None:
    assert standby.foreseen(arguments) == expected


FORKED = """
import os, signal, subprocess, sys
from interlock.sort.engines import prefork as standby
standby.foresee(["in", "-n", "3"])
one, other, third = standby.take(), standby.take(), standby.take()
assert standby.waiting == [] and len({one.pid, other.pid, third.pid}) == 3
one.stdin.close()
assert one.wait(20) == one.wait() == 0, "each has a pipe of its own"
one.kill()
try:
    other.wait(0.01)
except subprocess.TimeoutExpired:
    os.kill(other.pid, signal.SIGINT)
    other.kill()
assert other.wait() == -signal.SIGKILL, "deaf to an interrupt"
standby.waiting.append(third)
standby.dismiss()
assert third.returncode == -signal.SIGKILL and standby.waiting == []
third = standby.take()
third.stdin.close()
assert isinstance(third, subprocess.Popen) and third.wait(20) == 0, "a later one is started anew"
"""


def test_forked_workers_are_waited_for_ended_and_dismissed_like_started_ones() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_worker_without_orders_ends_when_the_pipe_closes() -> None:
    process = standby.take()
    standby.close(process)
    assert process.wait(20) == 0


def test_a_mistake_in_the_command_leaves_no_worker_behind() -> None:
    command = [sys.executable, "-m", "interlock", "sort", "run", "none", "-O", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # the pipes end with the last process
    assert done.returncode == 2
    assert "input none does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_memory_settings_can_be_made_more_than_once() -> None:
    keep_freed_memory()
    keep_freed_memory()


def test_memory_in_small_pages_can_be_used_as_it_is() -> None:
    rows = small_pages(1_000_001)
    assert (rows.nbytes, rows.ctypes.data % 4096, int(rows.max())) == (1_000_001, 0, 0)
    rows[:] = 7
    assert int(rows.min()) == 7


@pytest.mark.parametrize("advice", [None, 9_999], ids=["if it gives some", "a system that has none"])
def test_memory_in_large_pages_begins_at_one(advice: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if advice is not None:
        monkeypatch.setattr("mmap.MADV_HUGEPAGE", advice, raising=False)
    array = large_pages(5_000_001)
    assert (array.nbytes, array.ctypes.data % LARGE_PAGE, int(array.max())) == (5_000_001, 0, 0)
    array[:] = 7
    assert int(array.min()) == 7
