"""`--reload`: runs the command in a child process, and restarts that when the source of the app changes.

Invariant: the child is stopped gracefully before the next one starts, and ends with this process, however that ends. A
child that fails, as after a mistake in an edit, is not restarted before the next change.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.cli.format import print_note
from interlock.process_groups import describe_exit, wait_or_kill
from interlock.worker.settings import MAX_SHUTDOWN_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

FLAG = "--reload"
CHECK_INTERVAL_S = 0.3
STOP_TIMEOUT_S = MAX_SHUTDOWN_S + 5.0
WATCHED_SUFFIXES = frozenset({".py", ".toml", ".yaml", ".yml"})
SKIPPED_DIRECTORIES = frozenset({"__pycache__", "node_modules"})
# The child of a session of its own gets no Ctrl-C of the terminal; it ends when its standard input, our pipe, closes.
CHILD_PROGRAM = (
    "import sys; from interlock.process_groups import terminate_at_stdin_eof; terminate_at_stdin_eof(); "
    "sys.argv[0] = 'interlock'; from interlock.__main__ import main; main()"
)

Snapshot = dict[str, tuple[int, int]]


def run_reloading(app_reference: str | None) -> int:
    """Run this command without the flag, again and again, until it is asked to stop; return its exit code."""
    arguments = [argument for argument in sys.argv[1:] if argument != FLAG]
    return Reloader([sys.executable, "-c", CHILD_PROGRAM, *arguments], source_directories(app_reference)).run()


def source_directories(app_reference: str | None) -> list[Path]:
    """Return the directories to watch: the current one, and that of the app if it is elsewhere."""
    directories = [Path.cwd()]
    name = (app_reference or "").partition(":")[0].partition(".")[0]
    try:
        spec = find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None:
        place = Path(spec.origin).resolve()
        found = place.parent if spec.submodule_search_locations else place
        if not found.is_relative_to(directories[0]):
            directories.append(found)
    return directories


def source_files(place: Path) -> Iterator[str]:
    """List the watched files of a directory, without hidden directories and virtual environments."""
    if place.is_file():
        yield str(place)
        return
    for folder, folders, files in os.walk(place):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in SKIPPED_DIRECTORIES
            and not Path(folder, name, "pyvenv.cfg").exists()
        ]
        yield from (os.path.join(folder, name) for name in files if Path(name).suffix in WATCHED_SUFFIXES)  # noqa: PTH118 - thousands of them, several times a second


class Reloader:
    """Runs a command and restarts it when a watched file changes."""

    def __init__(self, command: Sequence[str], directories: Sequence[Path]) -> None:
        self._command = command
        self._directories = directories
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Run until a signal, or until the command ends by itself without an error."""
        before = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while True:
                seen = self._snapshot()
                self._child = self._start()
                changed = self._wait_for_change(self._child, seen)
                if changed is not None:
                    print_note(f"{changed} changed: restarting")
                code = self._stop(self._child)
                if changed is None:
                    return code if code >= 0 else 128 - code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603 - ourselves

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self._stopping = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _wait_for_change(self, child: subprocess.Popen[bytes], seen: Snapshot) -> str | None:
        """Return the file that changed; None after a signal, or when the command has ended without an error."""
        is_reported = False
        while not self._stopping:
            code = child.poll()
            if code == 0:
                return None
            if code is not None and not is_reported:
                print_note(f"the process {describe_exit(code)}; it starts again when a file changes")
                is_reported = True
            time.sleep(CHECK_INTERVAL_S)
            changed = _first_difference(seen, self._snapshot())
            if changed is not None:
                return changed
        return None

    def _stop(self, child: subprocess.Popen[bytes]) -> int:
        """Ask the child to end, unless a forwarded signal did, and wait; return its exit code."""
        if child.poll() is None and not self._stopping:
            child.send_signal(signal.SIGTERM)
        code = wait_or_kill(child, STOP_TIMEOUT_S)
        if child.stdin is not None:
            child.stdin.close()
        return code

    def _snapshot(self) -> Snapshot:
        found: Snapshot = {}
        for directory in self._directories:
            for path in source_files(directory):
                try:
                    status = os.stat(path)  # noqa: PTH116 - see source_files
                except OSError:
                    continue  # deleted meanwhile
                found[path] = (status.st_mtime_ns, status.st_size)
        return found


def _first_difference(before: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    """Return a file that was changed, added or deleted, relative to the current directory."""
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            return os.path.relpath(path)
    return None
