"""Child process groups: exit codes, signals to group and leader, stop with grace, and death with the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from interlock.process_groups import ProcessGroup, describe_exit, open_stream_reader, wait_or_kill
from processes import eventually, is_process_running

pytestmark = pytest.mark.unit

LONG = 600


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exited with code 0"), (3, "exited with code 3"), (-9, "was killed by SIGKILL"), (-99, "killed by signal 99")],
)
def test_describe_exit(code: int, text: str) -> None:
    assert describe_exit(code).endswith(text)


def test_wait_or_kill_kills_only_after_the_timeout() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", ""]) as quick,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as slow,
    ):
        assert wait_or_kill(quick, 60) == 0
        assert wait_or_kill(slow, 0.01) == -signal.SIGKILL


async def test_a_group_leads_its_own_session_and_reports_its_exit_code() -> None:
    group = ProcessGroup.start(["sh", "-c", "read line; exit 5"], stdin=subprocess.PIPE)
    assert os.getsid(group.pid) == os.getpgid(group.pid) == group.pid
    assert not await group.wait(0.01)
    assert group.exit_code is None
    assert group.process.stdin is not None
    group.process.stdin.close()
    assert await group.wait(60)
    assert group.exit_code == await group.exited == 5
    group.kill()  # no effect: the pid may belong to another process by now


async def start_with_child(trap: str, script: str) -> tuple[ProcessGroup, int]:
    """Start a shell that sets a trap and starts a child; return its group and the child's pid."""
    group = ProcessGroup.start(["sh", "-c", f"{trap} sleep {LONG} & echo $!; {script}"], stdout=subprocess.PIPE)
    assert group.process.stdout is not None
    reader, transport = await open_stream_reader(group.process.stdout)
    child = int(await reader.readline())
    transport.close()
    return group, child


async def test_the_rest_of_a_group_is_killed_when_its_leader_exits() -> None:
    group, child = await start_with_child("", "exit 0")
    assert await group.wait(60)
    assert group.exit_code == 0
    eventually(lambda: not is_process_running(child))


async def test_a_signal_to_the_leader_only_spares_the_rest() -> None:
    group, child = await start_with_child("trap : USR1;", "while :; do wait; done")
    group.send_signal(signal.SIGUSR1, leader_only=True)
    await asyncio.sleep(0.05)
    assert is_process_running(child)
    await group.stop(60)
    assert group.exit_code == -signal.SIGTERM
    eventually(lambda: not is_process_running(child))


async def test_stop_kills_a_group_that_ignores_sigterm() -> None:
    group, child = await start_with_child("trap '' TERM;", "while :; do wait; done")
    await group.stop(0.05)
    assert group.exit_code == -signal.SIGKILL
    eventually(lambda: not is_process_running(child))


def test_a_child_gets_sigterm_when_its_parent_closes_the_pipe() -> None:
    script = "import time; from interlock.process_groups import terminate_at_stdin_eof as t; t(); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == -signal.SIGTERM
