"""Data directories with unusual names work or are refused; a server leaves nothing outside of its own."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psycopg
import pytest

from embedded_servers import QUICK, wait_until, wait_until_stopped
from interlock.errors import EmbeddedServerError
from interlock.postgres.embedded import keeper
from interlock.postgres.embedded.server import EmbeddedServer

pytestmark = pytest.mark.store


@pytest.mark.parametrize("name", ["one,two", "x -D y", "it's \\ é %d"])
def test_a_server_lives_in_a_directory_of_any_printable_name(embedded_dir: Path, name: str) -> None:
    server = EmbeddedServer(embedded_dir / name, settings=QUICK)
    with server, psycopg.connect(server.url()) as connection:
        row = connection.execute("select pg_backend_pid()").fetchone()
        assert row is not None
        pid = server.status().pid
        assert pid is not None
        assert Path(f"/proc/{row[0]}/stat").read_text().rpartition(")")[2].split()[1] == str(pid)
    wait_until_stopped(embedded_dir / name)
    assert not keeper.socket_dir(embedded_dir / name).is_relative_to("/tmp") or not list(  # noqa: S108 - where it would be
        Path("/tmp").glob(keeper.socket_dir(embedded_dir / name).name)  # noqa: S108 - where the sockets are
    )


@pytest.mark.parametrize("name", ["two\nlines", "a\tb", "\udcff"])
def test_unprintable_paths_are_refused_before_anything_is_made(embedded_dir: Path, name: str) -> None:
    with pytest.raises(EmbeddedServerError, match="in this name"):
        EmbeddedServer(embedded_dir / name).acquire()
    assert list(embedded_dir.iterdir()) == []


def test_a_file_in_the_path_is_named_in_the_error(embedded_dir: Path) -> None:
    (embedded_dir / "file").touch()
    for data_dir, culprit in (
        (Path("/dev/null/x"), "/dev/null"),
        (embedded_dir / "file", f"{embedded_dir}/file"),
        (embedded_dir / "file" / "deep" / "data", f"{embedded_dir}/file"),
    ):
        server = EmbeddedServer(data_dir)
        with pytest.raises(EmbeddedServerError, match=f"because {culprit} is not a directory"):
            server.acquire()
        assert server.status().running is False
        assert server.stop() is False


def test_an_unknown_home_is_refused() -> None:
    with pytest.raises(EmbeddedServerError, match="~nosuch"):
        EmbeddedServer(Path("~nosuch/x"))


@pytest.mark.chaos
def test_a_killed_server_is_followed_by_one_that_leaves_no_socket_directory(embedded_dir: Path) -> None:
    server = EmbeddedServer(embedded_dir / ("long" * 30), settings=QUICK)
    server.acquire()
    pid = server.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with EmbeddedServer(server.data_dir, settings=QUICK) as newcomer, psycopg.connect(newcomer.url()):
        pass
    server.release()
    wait_until_stopped(server.data_dir)
    assert not keeper.socket_dir(server.data_dir).exists()


@pytest.mark.chaos
def test_a_new_server_waits_for_the_old_keeper(embedded_dir: Path) -> None:
    server = EmbeddedServer(embedded_dir / ("long" * 30), settings=QUICK)
    server.acquire()
    pid = server.status().pid
    assert pid is not None
    kept_by = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    starting = threading.Event()
    newcomer = EmbeddedServer(server.data_dir, settings=QUICK, report_progress=lambda _: starting.set())
    starter = threading.Thread(target=newcomer.acquire)
    os.kill(kept_by, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGINT)
        wait_until(lambda: not server.status().running, "the server is gone, and its keeper has not heard of it")
        starter.start()
        assert not starting.wait(1)
    finally:
        os.kill(kept_by, signal.SIGCONT)
    starter.join()
    with psycopg.connect(newcomer.url()):
        newcomer.release()
    server.release()
