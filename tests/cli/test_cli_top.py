"""`interlock top` in a real pseudo terminal, with a real worker: figures, keys, resizing, and a restored terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cli_support import Shell, environment
from interlock.cli.top.terminal import split_keys
from processes import COMMAND

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.flow

LIMIT_S = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]|\r")
ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


class Screen:
    """A command in a pseudo terminal: sends keys, and waits for text in what was drawn since the last key."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self.fd = fd
        self.raw = ""
        self._drawn = ""
        self._before = termios.tcgetattr(fd)

    def press(self, keys: str) -> None:
        """Send keys."""
        self._drawn = ""
        os.write(self.fd, keys.encode())

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the terminal, as a window does."""
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._drawn = ""
        self.process.send_signal(signal.SIGWINCH)

    def wait_for(self, text: str) -> str:
        """Wait until a text is drawn; return everything drawn since the last key."""
        until = time.monotonic() + LIMIT_S
        while text not in (drawn := ESCAPES.sub("", self._drawn)):
            assert time.monotonic() < until, f"{text!r} is not in {drawn[-3000:]}"
            self.read(0.2)
        return drawn

    def read(self, seconds: float) -> bool:
        """Read what was drawn; False when the command has closed the terminal."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.fd, 65536).decode(errors="replace")
        except OSError:
            return False
        self.raw += data
        self._drawn += data
        return bool(data)

    def end(self) -> int:
        """Wait for the end of the command; return its exit code."""
        until = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < until, "the command does not end"
            self.read(0.1)
        while select.select([self.fd], [], [], 0)[0] and self.read(0):
            pass
        return self.process.returncode

    def is_restored(self) -> bool:
        """Tell whether the terminal is as it was, and its alternate screen is left."""
        left = self.raw.rfind(LEAVE_SCREEN) > self.raw.rfind(ENTER_SCREEN) >= 0
        return left and termios.tcgetattr(self.fd) == self._before


@contextmanager
def top(url: str, *, rows: int = 40, columns: int = 160) -> Iterator[Screen]:
    """Run `interlock top` in a pseudo terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    variables = {
        name: value for name, value in environment(url, TERM="xterm").items() if name not in {"COLUMNS", "LINES"}
    }
    process = subprocess.Popen(
        [*COMMAND, "top"], stdin=theirs, stdout=theirs, stderr=theirs, env=variables, start_new_session=True
    )
    try:
        yield Screen(process, ours)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(theirs)
        os.close(ours)


@pytest.mark.unit
def test_keys_are_told_apart_in_one_read() -> None:
    assert list(split_keys("j\x1b[A\x1b[5~q\t\x1b")) == ["j", "up", "page up", "q", "tab", "escape"]


def row(shell: Shell, statement: str, *parameters: Any) -> tuple[Any, ...]:
    """Read one row."""
    (found,) = shell.rows(statement, *parameters)
    return found


def until(shell: Shell, statement: str, expected: Any) -> None:
    """Wait until a statement has this value."""
    limit = time.monotonic() + LIMIT_S
    while row(shell, statement)[0] != expected:
        assert time.monotonic() < limit, statement
        time.sleep(0.1)


def test_top_shows_the_figures_and_obeys_keys(url: str) -> None:
    shell = Shell(url)
    with shell.begun("worker", "--app", "worker_app:app", "--concurrency", "2"):
        task = shell.answer("enqueue", "nap", "seconds=300", "--app", "worker_app:app")
        until(shell, "select state from interlock.tasks", "running")
        with top(url) as screen:
            drawn = screen.wait_for(task)
            assert "▸ namespaces (1)" in drawn
            assert "RUNNING" in drawn
            assert "1/2" in drawn, "slots of the worker"
            screen.press("p")
            screen.wait_for("namespace default is paused: 0 tasks are held")
            assert row(shell, "select paused_at is not null, reason from interlock.namespaces") == (
                True,
                "interlock top",
            )
            screen.press("e")
            screen.wait_for("interlock namespaces resume default")
            screen.press("\x1b")
            screen.wait_for("namespaces (1)")
            screen.press("r")
            screen.wait_for("namespace default is resumed")
            screen.press("\t")
            screen.wait_for("▸ workers (1)")
            screen.press("p")
            until(shell, "select status from interlock.workers", "PAUSED")
            screen.press("c")
            screen.wait_for("a worker cannot be canceled here")
            screen.resize(12, 100)
            screen.press("\t")
            drawn = screen.wait_for("▸ running tasks (1)")
            assert "jobs (0)" not in drawn, "a small terminal shows the table with the cursor alone"
            screen.press("c")
            screen.wait_for(f"cancel task {task}?")
            screen.press("n")
            screen.wait_for("nothing was changed")
            assert row(shell, "select cancel_requested_at from interlock.tasks") == (None,)
            screen.press("cy")
            screen.wait_for(f"task {task}: requested")
            until(shell, "select state from interlock.tasks", "canceled")
            screen.press("?")
            screen.wait_for("pause the namespace or the worker")
            screen.press("q")
            screen.wait_for("select")
            screen.press("q")
            assert screen.end() == 0
            assert screen.is_restored()


@pytest.mark.parametrize(("how", "code"), [("ctrl-c", 0), ("sigterm", 143)])
def test_the_terminal_is_restored_on_every_exit(url: str, how: str, code: int) -> None:
    with top(url) as screen:
        screen.wait_for("▸ namespaces")
        if how == "ctrl-c":
            screen.process.send_signal(signal.SIGINT)
        else:
            screen.process.terminate()
        assert screen.end() == code
        assert screen.is_restored()
        assert "Traceback" not in screen.raw


def test_without_a_terminal_the_figures_are_printed_once(url: str) -> None:
    shell = Shell(url)
    shell.answer("enqueue", "mail", "--namespace", "post")
    header, values = shell.answer("top").splitlines()[:2]
    assert header.split()[:4] == ["namespace", "pending", "running", "waiting"]
    assert values.split()[:4] == ["post", "1", "0", "0"]
    document = json.loads(shell.answer("top", "--once", "--json"))
    (namespace,) = document["namespaces"]
    assert (namespace["name"], namespace["depth"]) == ("post", {"pending": 1})
    assert namespace["arrived"] > 0
    assert document["workers"] == document["jobs"] == []
