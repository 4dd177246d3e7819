"""Decisions of the pool without I/O, process identity, and the environment of worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from interlock.store.supervision import HeldWorker
from interlock.supervisor.pool import process_info
from interlock.supervisor.pool.metrics import PROCESS_STATES, process_state
from interlock.supervisor.pool.process_info import host_id, read_memory, read_start_time
from interlock.supervisor.pool.processes import adopt_worker_process, make_environment
from interlock.supervisor.pool.reconcile import (
    Kill,
    Observation,
    Pause,
    ProcessExit,
    RecordExit,
    Release,
    ResetCrashes,
    Start,
    Stop,
    Terminate,
    decide,
)
from interlock.supervisor.pool.settings import PoolSettings
from interlock.worker.run import Assignment, read_assignment
from pool_support import config_at

pytestmark = pytest.mark.unit

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = PoolSettings()
ALIVE = Observation(alive=True)
CRASHED = Observation(exit=ProcessExit(9))


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def worker(status: str = "RUNNING", **facts: Any) -> HeldWorker:
    given: dict[str, Any] = {
        "id": "w",
        "status": status,
        "spec": {},
        "bound_to": None,
        "generation": 1,
        "instance": "w-1-x",
        "host": "here",
        "pid": 1,
        "birth": "1",
        "process_started_at": ago(10),
        "seen_until": None,
        "heartbeat_at": ago(1),
        "crashes": 0,
        "restart_at": None,
        "pool": None,
        "kill_requested": False,
        "moment": NOW,
        "holds": 0,
    }
    return HeldWorker(**given | facts)


def memory(megabytes: float, **more: Any) -> Observation:
    return Observation(alive=True, memory=int(megabytes * 1e6), **more)


TOO_MANY_CRASHES = "4 quick crashes in a row; last: the process exited with code 1: no luck"
UNRECOVERABLE_EXIT = "the process exited with code 2: which app?"

CASES: dict[str, tuple[HeldWorker, Observation, object]] = {
    "running without a process": (worker(), Observation(), Start()),
    "restart not due": (worker(restart_at=NOW + timedelta(seconds=1)), Observation(), None),
    "restart due": (worker(restart_at=NOW), Observation(), Start()),
    "running with one": (worker(), ALIVE, None),
    "paused with one": (worker("PAUSED"), ALIVE, None),
    "paused without one": (worker("PAUSED"), Observation(), None),
    "paused, and it crashed": (worker("PAUSED"), CRASHED, RecordExit("the process exited with code 9")),
    "terminated": (worker("TERMINATED"), ALIVE, Stop()),
    "failed": (worker("FAILED"), ALIVE, Stop()),
    "completed and gone": (worker("COMPLETED"), Observation(), Release()),
    "never started": (worker("IDLE"), Observation(), Release()),
    "asked to stop": (worker("TERMINATED"), Observation(alive=True, stopping_for=1), None),
    "asked too long ago": (worker("TERMINATED"), Observation(alive=True, stopping_for=31), Kill()),
    "asked, with a longer grace": (
        worker("FAILED", spec={"grace": 25}),
        Observation(alive=True, stopping_for=31),
        None,
    ),
    "asked, with a shorter grace": (
        worker("FAILED", spec={"grace": 1}),
        Observation(alive=True, stopping_for=11.1),
        Kill(),
    ),
    "to be killed at once": (worker("TERMINATED", kill_requested=True), ALIVE, Kill()),
    "to be killed while it stops": (
        worker("TERMINATED", kill_requested=True),
        Observation(alive=True, stopping_for=1),
        Kill(),
    ),
    "asked, then resumed": (
        worker(),
        Observation(exit=ProcessExit(0), stopping_for=1),
        RecordExit("the process exited with code 0"),
    ),
    "missed heartbeats": (
        worker(heartbeat_at=ago(46), process_started_at=ago(90)),
        ALIVE,
        Terminate("no heartbeat for 46 s"),
    ),
    "missed heartbeats, paused": (
        worker("PAUSED", heartbeat_at=ago(46), process_started_at=ago(90)),
        ALIVE,
        Terminate("no heartbeat for 46 s"),
    ),
    "within the start timeout": (worker(heartbeat_at=ago(90), process_started_at=ago(46)), ALIVE, None),
    "start timeout": (
        worker(heartbeat_at=None, process_started_at=ago(61)),
        ALIVE,
        Terminate("no heartbeat for 61 s"),
    ),
    "within its memory": (worker(spec={"memory_limit_mb": 100}), memory(100), None),
    "above its memory": (
        worker(spec={"memory_limit_mb": 100}),
        memory(120),
        Pause("the process uses 120 MB of memory; its limit is 100 MB"),
    ),
    "paused above it, and at work": (worker("PAUSED", spec={"memory_limit_mb": 100}, holds=1), memory(120), None),
    "paused above it, and done": (worker("PAUSED", spec={"memory_limit_mb": 100}), memory(120), Stop()),
    "paused for it, and done": (
        worker("PAUSED", spec={"memory_limit_mb": 100}),
        memory(90, draining=True),
        Stop(),
    ),
    "a limit that is not a number": (worker(spec={"memory_limit_mb": "much"}), memory(1e6), None),
    "steady after crashes": (worker(crashes=2, process_started_at=ago(60)), ALIVE, ResetCrashes()),
    "not yet steady": (worker(crashes=2), ALIVE, None),
    "first crash": (
        worker(),
        CRASHED,
        RecordExit("the process exited with code 9; restart 1 of 3 in 0.5 s", 1, 0.5),
    ),
    "third crash": (
        worker(crashes=2),
        Observation(exit=ProcessExit(-9)),
        RecordExit("the process was killed by SIGKILL; restart 3 of 3 in 2 s", 3, 2.0),
    ),
    "crash after a stable time": (
        worker(crashes=3, process_started_at=ago(60)),
        Observation(exit=ProcessExit()),
        RecordExit("the process exited; restart 1 of 3 in 0.5 s", 1, 0.5),
    ),
    "too many crashes": (
        worker(crashes=3),
        Observation(exit=ProcessExit(1, "no luck")),
        RecordExit(TOO_MANY_CRASHES, 4, failed=True),
    ),
    "too many crashes, in a pool": (
        worker(crashes=1000, pool="mail"),
        Observation(exit=ProcessExit(1, "no luck")),
        RecordExit("the process exited with code 1: no luck; restart 1001 in 30 s", 1001, 30.0),
    ),
    "unrecoverable exit, in a pool": (
        worker(pool="mail"),
        Observation(exit=ProcessExit(2, "which app?")),
        RecordExit(f"{UNRECOVERABLE_EXIT}; restart 1 in 0.5 s", 1, 0.5),
    ),
    "paused for its memory, and gone, in a pool": (
        worker("PAUSED", pool="mail"),
        Observation(exit=ProcessExit(0), stopping_for=1, draining=True),
        RecordExit("the process exited with code 0", resumed="its process has ended and freed its memory"),
    ),
    "unrecoverable exit": (
        worker(),
        Observation(exit=ProcessExit(2, "which app?")),
        RecordExit(UNRECOVERABLE_EXIT, 1, failed=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_decide(name: str) -> None:
    row, observed, wanted = CASES[name]
    assert decide(row, observed, SETTINGS) == wanted
    assert process_state(row, observed) in PROCESS_STATES


def test_missed_heartbeats_count_only_since_the_pool_watches() -> None:
    silent = worker(heartbeat_at=ago(600), process_started_at=ago(900))
    assert decide(silent, ALIVE, SETTINGS, watched_since=ago(5)) is None
    assert decide(silent, ALIVE, SETTINGS, watched_since=ago(50)) == Terminate("no heartbeat for 50 s")


def test_restart_backoff_grows_up_to_a_maximum() -> None:
    settings = PoolSettings(restart_backoff=1, max_restart_backoff=5)
    assert [settings.restart_delay(crash) for crash in (1, 2, 3, 4, 5000)] == [1, 2, 4, 5, 5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"poll_interval": 0}, "poll_interval must be at least 0.01, got 0"),
        ({"leave_running": True, "tied": True}, "exclude each other"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolSettings(**settings)


def test_a_process_is_identified_by_pid_and_start_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        here = host_id()
        row = worker(pid=process.pid, birth=read_start_time(process.pid), host=here)
        child = adopt_worker_process(row, here)
        assert child is not None
        assert child.poll() is None
        assert adopt_worker_process(row, "elsewhere") is None
        assert adopt_worker_process(row._replace(birth="another"), here) is None
        monkeypatch.setattr(process_info, "HAS_PROC", False)
        assert read_start_time(process.pid)
        assert read_memory([process.pid])[process.pid]
        monkeypatch.undo()
        child.terminate(0.0)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # exited, not reaped
        assert child.poll() == ProcessExit()
        child.kill()  # no effect: the process is gone
    assert process.returncode == -signal.SIGTERM
    assert read_memory([process.pid]) == {}


@pytest.mark.parametrize("has_proc", [process_info.HAS_PROC, False], ids=["as here", "by ps"])
def test_memory_counts_processes_that_a_handler_started(monkeypatch: pytest.MonkeyPatch, *, has_proc: bool) -> None:
    monkeypatch.setattr(process_info, "HAS_PROC", has_proc)
    child = "import sys; kept = bytearray(60_000_000); print(flush=True); input()"
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=0, start_new_session=True)\n"
        "child.wait()"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the child has its memory
        assert read_memory([process.pid])[process.pid] > 60_000_000
        process.communicate(b"\n")


def test_the_spec_of_a_row_overrides_the_configuration() -> None:
    config = config_at("postgresql://x", namespaces=("a", "b"), concurrency=3)
    own = {"app": "shop:app", "namespaces": ["mail"], "concurrency": 2, "lease": 9, "grace": 0}
    for spec, wanted in (
        ({}, ("worker_app:app", "a,b", "3", "30.0", "1.0")),
        (own, ("shop:app", "mail", "2", "9", "0")),
    ):
        given = make_environment(config, spec)
        names = ("APP", "NAMESPACES", "CONCURRENCY", "LEASE", "GRACE")
        assert tuple(given[f"INTERLOCK_{name}"] for name in names) == wanted
        assert given["INTERLOCK_DATABASE_URL"] == "postgresql://x"


def test_an_assignment_round_trips_through_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = Assignment("w_1", 3, "w_1-3-ab", tied=True, last_words=7)
    assert read_assignment(given.arguments) == given
    assert read_assignment([]) is None
    with pytest.raises(SystemExit):
        read_assignment(["--row", "w_1"])
    assert "--row, --generation and --instance belong together" in capsys.readouterr().err
