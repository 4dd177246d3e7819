"""`interlock worker` as a process: start, stop, drain, and its effects."""

from __future__ import annotations

import json
import random
import signal
import socket
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest

from cli_support import APP, Shell
from processes import eventually

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.flow


@contextmanager
def working(shell: Shell, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a worker until the block ends; then Ctrl-C must stop it cleanly."""
    with shell.begun("worker", *APP, *arguments) as process:
        yield process
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "worker_stopped" in errors


def free_port() -> int:
    """Return a free port that the system does not hand out as an ephemeral port."""
    for port in random.sample(range(20_000, 30_000), 100):
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    pytest.fail("a hundred ports are taken")


def test_a_worker_runs_tasks_under_its_flags_and_waiting_gives_their_results(shell: Shell) -> None:
    port = free_port()
    flags = ("--namespaces", "default,post", "--concurrency", "4", "--name", "ada", "--lease", "9", "--grace", "1")
    with working(shell, *flags, "--mode", "polling", "--metrics-port", str(port)):
        assert shell.answer("enqueue", "add", "a=1", "b=41", *APP, "--wait") == "42"
        assert shell.answer("enqueue", "add", "a=1", "b=1", "--namespace", "post", "--wait", "--count", "2") == "2\n2"
        failed = shell.run("enqueue", "fail", "message=no luck", *APP, "--wait", "--json")
        assert failed.returncode == 1
        assert json.loads(failed.stdout)["error"]["message"] == "no luck"
        assert "ended in error: ValueError: no luck" in failed.stderr
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert b"worker_state" in answer.read()
        ((worker,),) = shell.rows("select distinct worker_id from interlock.tasks")
        assert worker.startswith("ada-")
        assert f"leader  {worker}" in shell.answer("status")
        died = json.loads(failed.stdout)["id"]
        told = shell.answer("status", died)
        assert "tries        2 of 2" in told
        assert "ValueError: no luck\n             Traceback" in told
        assert shell.answer("tasks", "requeue", "--type", "fail", "--yes") == "1 task requeued"
        eventually(lambda: shell.state_of(died) == "error")
        moves = [move["event"] for move in json.loads(shell.answer("history", died, "--json"))]
        assert moves == ["create", "claim", "retry", "claim", "fail", "requeue", "claim", "retry", "claim", "fail"]


def test_a_running_task_is_asked_to_stop_or_canceled_by_force(shell: Shell) -> None:
    with working(shell, "--concurrency", "2"):
        asked, forced = (shell.answer("enqueue", name, *args) for name, *args in (["obedient"], ["nap", "seconds=60"]))
        eventually(lambda: {shell.state_of(asked), shell.state_of(forced)} == {"running"})
        eventually(lambda: "progress" in shell.answer("status", forced))  # it is written about once a second
        assert shell.answer("tasks", "cancel", asked, "--yes") == f"{asked}  requested"
        assert shell.answer("tasks", "cancel", forced, "--yes", "--force") == f"{forced}  canceled"
        eventually(lambda: shell.state_of(asked) == "canceled")
        assert shell.state_of(forced) == "canceled"


def test_waiting_ends_with_its_timeout_and_says_that_the_task_goes_on(shell: Shell) -> None:
    late = shell.run("enqueue", "add", "--wait-timeout", "0.2")
    assert late.returncode == 1
    assert late.stdout == ""
    assert "has not ended within 0.2 s; it is still running" in late.stderr
    assert shell.rows("select state from interlock.tasks") == [("pending",)]


def test_ctrl_c_while_waiting_leaves_no_traceback(shell: Shell) -> None:
    with shell.begun("enqueue", "add", "--wait") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("enqueued task ")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "which app?"),
        (["--app", "nowhere:app"], {}, "no module 'nowhere'"),
        (["--app", "worker_app:nothing"], {}, "did you mean worker_app:app?"),
        ([*APP, "--concurrency", "0"], {}, "--concurrency: concurrency must be a whole number"),
        ([*APP, "--mode", "loud"], {}, "'loud'"),
        ([*APP, "--metrics-port", "0"], {"INTERLOCK_METRICS_HOST": "::"}, "metrics have no authentication"),
        (
            [*APP, "--metrics-port", "1", "--metrics-host", "203.0.113.1"],
            {},
            "metrics cannot be served on 203.0.113.1:1",
        ),
    ],
    ids=["no_app", "no_module", "no_such_app", "concurrency", "mode", "public_metrics", "metrics_elsewhere"],
)
def test_a_worker_that_cannot_start_prints_one_message(
    shell: Shell, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    done = shell.run("worker", *arguments, **variables)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_database_flag_overrides_the_app(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.py").write_text(
        "from interlock import Interlock\n\napp = Interlock('postgresql://nobody@127.0.0.1:1/nowhere')\n"
    )
    monkeypatch.chdir(tmp_path)  # the directory of the module is the working directory
    with shell.begun("--database-url", shell.url, "worker", "--app", "elsewhere") as process:
        assert process.stderr is not None
        assert "warning: the app elsewhere has no tasks" in process.stderr.readline()
        eventually(lambda: shell.rows("select * from interlock.leaders"))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_worker_that_cannot_reach_its_database_warns_and_goes_on_looking(shell: Shell) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound without listening, so that no other process can listen
        look_in_vain(shell, f"127.0.0.1:{taken.getsockname()[1]}")


def look_in_vain(shell: Shell, place: str) -> None:
    flags = ("--log-level", "warning", "--log-format", "json", "--database-url", f"postgresql://me:secret@{place}/db")
    with shell.begun(*flags, "worker", *APP) as process:
        assert process.stderr is not None
        for _ in range(2):
            line = process.stderr.readline()
            warning = json.loads(line)
            assert (warning["level"], warning["message"], warning["event"]) == (
                "warning",
                "worker_state_transition",
                "connection_failed",
            )
            assert warning["reason"].startswith(f"cannot connect to db at {place}: ")
            assert "secret" not in line
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
