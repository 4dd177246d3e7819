"""Runs commands of the sort for tests, each in a session of its own that must be empty afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.sort.data.generate import Recipe, generate
from interlock.sort.data.records import RecordFormat
from interlock.sort.io.compression import unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = [sys.executable, "-P", "-m", "interlock"]
COMMAND = [*PROGRAM, "sort"]
OWN_PROGRAM = [sys.executable, "-P", "-m", "interlock.cli.sort.main"]  # interlock-sort
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("INTERLOCK_")} | {"COLUMNS": "200"}
TIMEOUT_S = 60.0


def make_input(place: Path, records: int = 20_000, *, seed: int = 1, files: int = 2, is_ascii: bool = False) -> Path:
    """Generate records to sort."""
    generate(place, Recipe(records, seed, RecordFormat(ascii=is_ascii)), files=files)
    return place


def sort(*arguments: object, largest_file: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; check that no process of it is left."""
    limits = {} if largest_file is None else {"RLIMIT_FSIZE": largest_file}  # acts like a full disk
    with started(*arguments, limits=limits) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def limited(limits: dict[str, int]) -> list[str]:
    """Return the program with resource limits."""
    limit_lines = [f"resource.setrlimit(resource.{name}, ({limit}, {limit}))" for name, limit in limits.items()]
    lines = ("import resource", *limit_lines, "from interlock.__main__ import main", "main()")
    return [sys.executable, "-c", "\n".join(lines)]


@contextmanager
def started(
    *arguments: object,
    limits: dict[str, int] | None = None,
    url: str | None = None,
    before: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    command: list[str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Start a command with options before it, under resource limits; afterwards check that no process is left."""
    process = subprocess.Popen(
        [*(command or [*(limited(limits) if limits else PROGRAM), *before, "sort"]), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | ({} if url is None else {"INTERLOCK_DATABASE_URL": url}) | (environment or {}),
        start_new_session=True,
    )
    try:
        yield process
        process.wait(TIMEOUT_S)
        until = time.monotonic() + 30
        while (left := members(process.pid)) and time.monotonic() < until:
            time.sleep(0.02)
        assert left == []
    finally:
        for pid in members(process.pid):
            os.kill(pid, 9)
        process.wait(TIMEOUT_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def members(session: int) -> list[int]:
    """List the running processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def first_line(process: subprocess.Popen[str]) -> str:
    """Read the first line of a command's output."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def names(place: Path) -> list[str]:
    """List the names in a directory."""
    return sorted(path.name for path in place.iterdir())


def unpacked_bytes(place: Path, copies: Path) -> bytes:
    """Read the compressed partitions in a directory, one after the other."""
    with unpacked(sorted(place.iterdir()), copies) as paths:
        return b"".join(path.read_bytes() for path in paths)
