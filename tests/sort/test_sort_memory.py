"""The memory of a sort: too little is refused with the least that works, and the least that is named works."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from interlock.errors import SortError, SortInputError
from interlock.sort.engines.local import run_local
from interlock.sort.io.direct_io import IO_BUFFER_BYTES
from interlock.sort.memory_plan import (
    IO_BUFFERS_BYTES,
    MASTER_BYTES,
    THREADS,
    edges_bytes,
    fixed_bytes,
    least_worker_memory,
    max_buffer_records,
)
from interlock.sort.settings import Settings
from interlock.sort.worker.worker import run_worker
from sort_cli import ENVIRONMENT, OWN_PROGRAM, make_input, members, names, sort
from sort_cluster import random_rows, write_source

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.flow

GIGABYTE = 10_000_000  # records of 100 bytes
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def own_group() -> tuple[Path, str, str] | None:
    """Return a control group below which others can be made, and the names of its limit and of its count of kills."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return CONTROL_GROUPS / "memory" / path.lstrip("/"), "memory.limit_in_bytes", "memory.oom_control"
        if not controllers and "memory" in _controllers(CONTROL_GROUPS / path.lstrip("/")):
            return CONTROL_GROUPS / path.lstrip("/"), "memory.max", "memory.events"
    return None


def _controllers(group: Path) -> list[str]:
    file = group / "cgroup.subtree_control"
    return file.read_text().split() if file.exists() else []


@contextmanager
def limited_to(memory: int) -> Iterator[Path | None]:
    """Make a control group with this limit; None where the machine does not allow it."""
    parent = own_group()
    group = parent[0] / f"interlock-sort-test-{os.getpid()}" if parent is not None else None
    try:
        if parent is None or group is None:
            raise PermissionError
        group.mkdir()
        (group / parent[1]).write_text(str(memory))
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        until = time.monotonic() + 30
        while group.exists() and time.monotonic() < until:
            with suppress(OSError):
                group.rmdir()


def count_kills(group: Path) -> int:
    """Return how many processes of a control group were killed because of its limit."""
    name = "memory.events" if (group / "memory.events").exists() else "memory.oom_control"
    counts = dict(line.split() for line in (group / name).read_text().splitlines())
    return int(counts["oom_kill"])


def proportional_bytes(session: int) -> int:
    """Return the memory of all processes of a session; a page that several share counts once."""
    total = 0
    for pid in members(session):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(int(size) for size in re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)) * 1024
    return total


def least_memory(*arguments: object) -> str:
    """Run a sort with too little memory; return the least that its refusal names."""
    done = sort(*arguments, "--memory", "100MB")
    assert done.returncode == 2, done.stderr
    found = re.search(r"100,000,000 bytes of memory are too few for .*: they need (\d+MB)", done.stderr)
    assert found is not None, done.stderr
    return found[1]


def make_lines(place: Path, count: int, *, packed: bool = False) -> None:
    """Write short lines, whose index takes more memory than they themselves."""
    place.mkdir()
    for number in range(2):
        numbers = np.random.default_rng(number).integers(0, 1 << 30, count // 2)
        text = b"".join(b"%x,%d\n" % (one % 9973, one) for one in numbers.tolist())
        (place / f"{number}{'.gz' if packed else ''}").write_bytes(gzip.compress(text, 1) if packed else text)


@pytest.mark.parametrize(
    ("workers", "form", "options"),
    [
        (1, "records", ()),
        (4, "records", ()),
        (1, "records", ("--compress", "zstd")),
        (2, "lines", ("-t", ",", "-k", "2,2n")),
        (1, "lines", ("-t", ",", "-k", "1,1", "-k", "2,2n", "-u", "--compress", "gzip")),
        (1, "packed lines", ("-r",)),
    ],
    ids=lambda value: "" if value == () else str(value),
)
def test_a_sort_keeps_the_least_memory_that_its_refusal_names(
    tmp_path: Path, workers: int, form: str, options: tuple[str, ...]
) -> None:
    """In a control group with this limit no process is killed; without one, the memory measured stays below it."""
    if form == "records":
        make_input(tmp_path / "in", 3_000_000 if not options else 1_000_000)
    else:
        make_lines(tmp_path / "in", 600_000, packed=form == "packed lines")
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", workers, "--quiet", *options)
    least = least_memory(*arguments)
    assert names(tmp_path / "out") == [] if form == "packed lines" else not (tmp_path / "out").exists()
    size = int(least.removesuffix("MB")) * 1_000_000
    with limited_to(size) as group:
        program = [*OWN_PROGRAM, *map(str, arguments), "--memory", least]
        if group is not None:  # a shell enters the control group and becomes the program
            program = ["/bin/sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", *program]
        process = subprocess.Popen(
            program,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
            start_new_session=True,
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, proportional_bytes(process.pid))
            time.sleep(0.05)
        assert process.stderr is not None
        errors = process.stderr.read()
        process.stderr.close()
        assert process.returncode == 0, errors
        assert "killed" not in errors
        if group is not None:
            assert count_kills(group) == 0
    assert peak < size
    order = options[: options.index("--compress")] if "--compress" in options else options
    checked = sort("validate", tmp_path / "out", "-I", tmp_path / "in", *order)
    assert checked.returncode == 0, checked.stdout


def test_the_plan_counts_everything() -> None:
    assert IO_BUFFERS_BYTES == 2 * THREADS * IO_BUFFER_BYTES
    for workers in (1, 2, 4, 16):
        for records in (0, 1_000, GIGABYTE, 40 * GIGABYTE):
            for length in (10, 100, 5_000):
                least = least_worker_memory(workers, records, length)
                rows = min(max_buffer_records(least, workers, length), max(records, 1))
                buffers = THREADS * rows * (length + 40)
                assert fixed_bytes(workers) + buffers + edges_bytes(workers, records, rows) <= least
    growing = [least_worker_memory(2, records, 100) for records in (0, GIGABYTE, 10 * GIGABYTE, 100 * GIGABYTE)]
    assert growing == sorted(growing)
    assert least_worker_memory(8, GIGABYTE, 100) > least_worker_memory(1, GIGABYTE, 100)


def test_memory_that_is_too_little_is_refused_with_what_would_do(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", random_rows(1, 1_000))
    with pytest.raises(SortInputError, match=r"for 8 workers and this input: they need \d+MB; it would be enough for "):
        run_local(source, tmp_path / "out", workers=8, settings=Settings(memory=300_000_000))
    with pytest.raises(SortInputError, match=r"too few: this worker needs \d+MB"):
        run_worker("127.0.0.1:1", source, tmp_path / "out", settings=Settings(memory=80_000_000))
    assert MASTER_BYTES + 4 * least_worker_memory(4, 250, 100) > 400_000_000, "four workers were killed with this much"


def test_a_worker_that_is_killed_again_and_again_may_lack_memory(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", random_rows(1, 2_000))
    ended = threading.Event()

    def kill_workers() -> None:
        while not ended.wait(0.01):
            for path in Path("/proc").glob("[0-9]*/stat"):
                with suppress(OSError):
                    fields = path.read_text().rpartition(")")[2].split()
                    command = path.with_name("cmdline").read_bytes()
                    if int(fields[1]) == os.getpid() and command.endswith(b"-m\0interlock.sort\0"):
                        os.kill(int(path.parent.name), signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_workers)
        try:
            with pytest.raises(SortError, match=r"worker 0 was killed by SIGKILL, 4 times \(out of memory\?\)"):
                run_local(source, tmp_path / "out", workers=1)
        finally:
            ended.set()
            killing.result()
