"""`interlock up`: everything with one command, and nothing left of it after one Ctrl-C or a kill."""

from __future__ import annotations

import re
import signal
import socket
from typing import TYPE_CHECKING

import httpx
import pytest

from cli_support import APP, Shell
from processes import eventually, has_taken_signal, is_process_running

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.flow

PIDS = "select pid from interlock.workers where pid is not null and heartbeat_at is not null"


def address(process: subprocess.Popen[str]) -> str:
    """Read the output until all parts have started; return the address of the API."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("Ctrl-C"):
            break
    found = re.search(r"^API +(http://127\.0\.0\.1:\d+),", said, re.MULTILINE)
    assert found, said
    return found[1]


def test_one_command_runs_everything_and_one_ctrl_c_ends_it(shell: Shell) -> None:
    with shell.begun("up", *APP, "--workers", "1", "--port", "0") as process:
        api = address(process)
        assert httpx.get(f"{api}/healthz").status_code == 200
        sum_ = shell.answer("enqueue", "add", "a=1", "b=2", "--wait")
        assert sum_ == "3"
        ((pid,),) = eventually(lambda: shell.rows(PIDS))
        assert httpx.get(f"{api}/api/workers").status_code == 401
        token = {"Authorization": f"Bearer {shell.answer('token', 'local')}"}
        rows = httpx.get(f"{api}/api/workers", headers=token).json()["items"]
        (worker,) = [row for row in rows if row["id"].startswith("w_")]
        assert (worker["status"], worker["pid"]) == ("RUNNING", pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert not is_process_running(pid)
    assert {status for (status,) in shell.rows("select status from interlock.workers")} == {"COMPLETED"}


def test_a_second_ctrl_c_does_not_wait_for_what_runs_which_is_returned(shell: Shell) -> None:
    task = shell.answer("enqueue", "nap", "seconds=3600", *APP)
    with shell.begun("up", *APP, "--workers", "1", "--port", "0", INTERLOCK_GRACE="25") as process:
        address(process)
        eventually(lambda: shell.state_of(task) == "running")
        process.send_signal(signal.SIGINT)
        eventually(lambda: has_taken_signal(process, signal.SIGINT))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)  # less than the grace
    assert process.returncode == 0
    assert shell.rows("select state, tries from interlock.tasks") == [("pending", 0)]


def test_nothing_goes_on_for_long_after_it_was_killed(shell: Shell) -> None:
    with shell.begun("up", *APP, "--workers", "1", "--port", "0") as process:
        ((pid,),) = eventually(lambda: shell.rows(PIDS))
        process.kill()
        eventually(lambda: not is_process_running(pid))


def test_a_command_that_cannot_run_prints_one_message(shell: Shell) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = str(taken.getsockname()[1])
        for arguments, message in (
            (["--workers", "2"], "which app should 2 workers run?"),
            (["--workers", "-1"], "Invalid value for '--workers'"),
            ([*APP, "--port", busy], f"the API cannot be served on 127.0.0.1:{busy}"),
        ):
            done = shell.run("up", *arguments)
            assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
            assert message in done.stderr
    assert shell.rows("select 1 from interlock.workers where status in ('IDLE', 'RUNNING', 'PAUSED')") == []
