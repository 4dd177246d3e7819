"""Embedded servers in tests: client processes, waiting for a stop, and directories without leftover servers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.postgres.embedded import keeper
from interlock.postgres.embedded.server import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRIPT = Path(__file__).with_name("embedded_client.py")
QUICK = {"fsync": "off"}
MEMORY, DISK = "/dev/shm", "/tmp"  # noqa: S108 - a directory of its own is made there
ROOM = 3 << 30


class User:
    """A child process that uses the server until `leave` or `kill`."""

    def __init__(self, data_dir: Path) -> None:
        command = [sys.executable, str(SCRIPT), str(data_dir)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def joined(self) -> int:
        """Wait until it has joined; return the server's process id as the child sees it."""
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert said.get("role") == "interlock", said
        return int(said["pid"])

    def leave(self) -> None:
        self.process.communicate()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.005)


def wait_until_stopped(data_dir: Path) -> None:
    wait_until(lambda: not keeper.is_held(data_dir / keeper.SERVER_LOCK), "the server is gone")
    wait_until(lambda: not keeper.is_held(data_dir / keeper.KEEPER_LOCK), "its keeper is gone")


def stop_servers(place: Path) -> None:
    # Not rglob, which fails when a stopping server removes a file.
    for data_dir in [Path(top) for top, _, names in os.walk(place) if keeper.SERVER_LOCK in names]:
        EmbeddedServer(data_dir).stop()
        wait_until_stopped(data_dir)


@cache
def roomy_place() -> str:
    """Return where test servers live: in memory if there is room, as a database is a thousand small files."""
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return DISK
    is_roomy = found.f_bavail * found.f_frsize >= ROOM and not found.f_flag & os.ST_NOEXEC
    return MEMORY if is_roomy and os.access(MEMORY, os.W_OK | os.X_OK) else DISK


@contextmanager
def embedded_directory() -> Iterator[Path]:
    """Make a directory; stop all servers in it before removing it."""
    # Not pytest's: a socket's path has to be short, and the server of root runs as another user that must reach it.
    place = Path(tempfile.mkdtemp(prefix="il-", dir=roomy_place()))
    place.chmod(0o711)
    try:
        yield place
    finally:
        stop_servers(place)
        shutil.rmtree(place)
