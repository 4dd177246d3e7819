"""What a pool does about a worker, decided from facts alone; and what the system tells of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from interlock.store.supervision import HeldWorker
from interlock.supervisor.pool import processes as system
from interlock.supervisor.pool.processes import Ended, adopt_child, birth_of, environment_of, memory_of, name_host
from interlock.supervisor.pool.reconcile import Forgive, Kill, LetGo, Note, Pause, Sight, Start, Stop, Terminate, decide
from interlock.supervisor.pool.settings import STATES, PoolSettings, describe
from interlock.worker.run import Assignment, read_assignment
from pool_support import config_at

pytestmark = pytest.mark.unit

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = PoolSettings()
ALIVE = Sight(alive=True)
CRASHED = Sight(ended=Ended(9))


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
        "moment": NOW,
        "holds": 0,
    }
    return HeldWorker(**given | facts)


def memory(megabytes: float, **more: Any) -> Sight:
    return Sight(alive=True, memory=int(megabytes * 1e6), **more)


TOO_OFTEN = "the process has ended quickly 4 times in a row; the last time, it has ended with exit code 1: no luck"
OF_NO_USE = "it has ended with exit code 2: which app?"

CASES: dict[str, tuple[HeldWorker, Sight, object]] = {
    "running without a process": (worker(), Sight(), Start()),
    "its time has not come": (worker(restart_at=NOW + timedelta(seconds=1)), Sight(), None),
    "its time has come": (worker(restart_at=NOW), Sight(), Start()),
    "running with one": (worker(), ALIVE, None),
    "paused with one": (worker("PAUSED"), ALIVE, None),
    "paused without one": (worker("PAUSED"), Sight(), None),
    "paused, and it crashed": (worker("PAUSED"), CRASHED, Note("it has ended with exit code 9")),
    "terminated": (worker("TERMINATED"), ALIVE, Stop()),
    "failed": (worker("FAILED"), ALIVE, Stop()),
    "completed and gone": (worker("COMPLETED"), Sight(), LetGo()),
    "never started": (worker("IDLE"), Sight(), LetGo()),
    "asked to stop": (worker("TERMINATED"), Sight(alive=True, asked_for=1), None),
    "asked too long ago": (worker("TERMINATED"), Sight(alive=True, asked_for=31), Kill()),
    "asked, with a longer grace": (worker("FAILED", spec={"grace": 25}), Sight(alive=True, asked_for=31), None),
    "asked, then resumed": (worker(), Sight(ended=Ended(0), asked_for=1), Note("it has ended with exit code 0")),
    "silent": (worker(heartbeat_at=ago(46), process_started_at=ago(90)), ALIVE, Terminate("no heartbeat for 46 s")),
    "silent and paused": (
        worker("PAUSED", heartbeat_at=ago(46), process_started_at=ago(90)),
        ALIVE,
        Terminate("no heartbeat for 46 s"),
    ),
    "it may take its time to begin": (worker(heartbeat_at=ago(90), process_started_at=ago(46)), ALIVE, None),
    "it never began": (
        worker(heartbeat_at=None, process_started_at=ago(61)),
        ALIVE,
        Terminate("no heartbeat for 61 s"),
    ),
    "within its memory": (worker(spec={"memory_limit_mb": 100}), memory(100), None),
    "above its memory": (
        worker(spec={"memory_limit_mb": 100}),
        memory(120),
        Pause("its process uses 120 MB of memory, and its limit is 100 MB"),
    ),
    "paused above it, and at work": (worker("PAUSED", spec={"memory_limit_mb": 100}, holds=1), memory(120), None),
    "paused above it, and done": (worker("PAUSED", spec={"memory_limit_mb": 100}), memory(120), Stop()),
    "paused for it, and done": (
        worker("PAUSED", spec={"memory_limit_mb": 100}),
        memory(90, draining=True),
        Stop(),
    ),
    "a limit that is none": (worker(spec={"memory_limit_mb": "much"}), memory(1e6), None),
    "steady after crashes": (worker(crashes=2, process_started_at=ago(60)), ALIVE, Forgive()),
    "not yet steady": (worker(crashes=2), ALIVE, None),
    "it crashed": (
        worker(),
        CRASHED,
        Note("it has ended with exit code 9; try 1 of 3 to start it again after 0.5 s", 1, 0.5),
    ),
    "it crashed a third time": (
        worker(crashes=2),
        Sight(ended=Ended(-9)),
        Note("it was killed by SIGKILL; try 3 of 3 to start it again after 2 s", 3, 2.0),
    ),
    "it crashed after it had lasted": (
        worker(crashes=3, process_started_at=ago(60)),
        Sight(ended=Ended()),
        Note("it has ended; try 1 of 3 to start it again after 0.5 s", 1, 0.5),
    ),
    "it crashed too often": (
        worker(crashes=3),
        Sight(ended=Ended(1, "no luck")),
        Note(TOO_OFTEN, 4, failed=TOO_OFTEN),
    ),
    "no restart can mend it": (
        worker(),
        Sight(ended=Ended(2, "which app?")),
        Note(OF_NO_USE, 1, failed=OF_NO_USE),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_done_about_a_worker(name: str) -> None:
    row, sight, wanted = CASES[name]
    assert decide(row, sight, SETTINGS) == wanted
    assert describe(row, sight) in STATES


def test_silence_counts_only_while_somebody_has_listened() -> None:
    silent = worker(heartbeat_at=ago(600), process_started_at=ago(900))
    assert decide(silent, ALIVE, SETTINGS, watched_since=ago(5)) is None
    assert decide(silent, ALIVE, SETTINGS, watched_since=ago(50)) == Terminate("no heartbeat for 50 s")


def test_pauses_grow_up_to_a_cap() -> None:
    settings = PoolSettings(restart_base=1, restart_cap=5)
    assert [settings.pause_before(crash) for crash in (1, 2, 3, 4, 5000)] == [1, 2, 4, 5, 5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"tick": 0}, "tick must be at least 0.01, not 0"), ({"leave": True, "tied": True}, "cannot be left behind")],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolSettings(**settings)


def test_a_process_is_known_by_its_id_and_its_birth(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        here = name_host()
        row = worker(pid=process.pid, birth=birth_of(process.pid), host=here)
        child = adopt_child(row, here)
        assert child is not None
        assert child.look() is None
        assert child.memory()
        assert adopt_child(row, "elsewhere") is None
        assert adopt_child(row._replace(birth="another"), here) is None
        monkeypatch.setattr(system, "HAS_PROC", False)
        assert birth_of(process.pid)
        assert memory_of(process.pid)
        monkeypatch.undo()
        child.ask_to_stop(0.0)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has reaped it
        assert child.look() == Ended()
        child.kill()  # which finds nobody, and signals nobody
    assert process.returncode == -signal.SIGTERM
    assert memory_of(process.pid) is None


def test_a_row_asks_for_what_differs_from_the_settings_of_its_supervisor() -> None:
    config = config_at("postgresql://x", namespaces=("a", "b"), concurrency=3)
    own = {"app": "shop:app", "namespaces": ["mail"], "concurrency": 2, "lease": 9, "grace": 0}
    for spec, wanted in (
        ({}, ("worker_app:app", "a,b", "3", "30.0", "1.0")),
        (own, ("shop:app", "mail", "2", "9", "0")),
    ):
        given = environment_of(config, spec)
        names = ("APP", "NAMESPACES", "CONCURRENCY", "LEASE", "GRACE")
        assert tuple(given[f"INTERLOCK_{name}"] for name in names) == wanted
        assert given["INTERLOCK_DATABASE_URL"] == "postgresql://x"


def test_an_assignment_is_read_as_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    given = Assignment("w_1", 3, "w_1-3-ab", tied=True, last_words=7)
    assert read_assignment(given.arguments) == given
    assert read_assignment([]) is None
    with pytest.raises(SystemExit):
        read_assignment(["--row", "w_1"])
    assert "--row, --generation and --instance belong together" in capsys.readouterr().err
