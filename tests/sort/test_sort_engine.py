"""The engine `interlock`: steps with leases, retries, progress and history, and the same output."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from embedded_servers import embedded_directory
from interlock import Interlock
from interlock.config import Config
from interlock.sort.data.validate import validate
from processes import eventually
from sort_cli import make_input, members, names, started, unpacked_bytes

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.client.job_handle import JobStatus, StepStatus

pytestmark = pytest.mark.flow


def look(url: str) -> tuple[JobStatus, list[StepStatus]]:
    """Read the only job and its sort workers from the database."""

    async def read() -> tuple[JobStatus, list[StepStatus]]:
        async with Interlock(config=Config(database_url=url)) as app:
            (job,) = await app.find_jobs(workflow="distributed_sort")
            handle = app.job(job.id)
            return await handle.status(), [step for step in await handle.steps() if step.kind == "part"]

    return asyncio.run(read())


def statuses(url: str) -> Counter[str]:
    """Count the sort jobs in the database by their status."""

    async def read() -> Counter[str]:
        async with Interlock(config=Config(database_url=url)) as app:
            return Counter(job.status for job in await app.find_jobs(workflow="distributed_sort"))

    return asyncio.run(read())


def reasons(url: str) -> list[str | None]:
    """Read the reasons of all moves of the only job."""

    async def read() -> list[str | None]:
        async with Interlock(config=Config(database_url=url)) as app:
            (job,) = await app.find_jobs(workflow="distributed_sort")
            return [move.reason for move in await app.job(job.id).history()]

    return asyncio.run(read())


def checkpoint(url: str, task: UUID) -> dict[str, Any]:
    """Read the checkpoint of a sort worker from the database."""
    with psycopg.connect(url) as connection:
        row = connection.execute("select checkpoint from interlock.tasks where id = %s", [task]).fetchone()
    assert row is not None
    found: dict[str, Any] = row[0]
    return found


def sorters(session: int) -> list[int]:
    """List the processes in which steps run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = path.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == session and b"interlock.worker.executors.child" in command:
            found.append(int(path.parent.name))
    return found


def guards() -> list[int]:
    """List the guards of jobs that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if command.endswith(b"-m\0interlock.sort.engines.job_guard\0"):
            found.append(int(path.parent.name))
    return found


def test_a_sort_is_a_job_with_a_step_for_each_worker(tmp_path: Path, url: str) -> None:
    make_input(tmp_path / "in")
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--engine", "interlock", "--history")
    with started(*arguments, url=url) as process:
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "State history" in output
    assert names(tmp_path / "out") == ["partition.0", "partition.1"]
    assert validate([tmp_path / "out"], [tmp_path / "in"]).problems == []
    job, steps = look(url)
    assert (job.status, job.namespace) == ("COMPLETED", "sort")
    assert [(step.step, step.state, step.tries) for step in steps] == [
        ("sort_worker[0]", "done", 1),
        ("sort_worker[1]", "done", 1),
    ]
    for index, step in enumerate(steps):
        assert step.result["index"] == index
        assert step.result["history"][-1]["to_state"] == "Completed"
        stored = checkpoint(url, step.id)
        assert stored["state"] == "Completed", "every move is saved in the database too"
        assert stored["history"] == step.result["history"]


@pytest.mark.cold
def test_a_sort_prepares_an_embedded_server_that_is_new(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 1_000)
    with embedded_directory() as place:
        options = ("run", tmp_path / "in", "-O", tmp_path / "out", "--engine", "interlock", "--quiet")
        with started(*options, before=("--data-dir", str(place / "data"))) as process:
            _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    assert names(tmp_path / "out") == ["partition.0"]


def test_packed_lines_are_sorted_to_packed_partitions(tmp_path: Path, url: str) -> None:
    lines = [b"%d,%d\n" % (number * 7919 % 5000, number % 17) for number in range(5000)]
    (tmp_path / "in.gz").write_bytes(gzip.compress(b"".join(lines)))
    options = ("-w", 2, "--engine", "interlock", "--compress", "gzip", "-t", ",", "-k", "2,2nr", "-k", "1,1n")
    with started("run", tmp_path / "in.gz", "-O", tmp_path / "out", *options, url=url) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert names(tmp_path / "out") == ["partition.0.gz", "partition.1.gz"]
    lines.sort(key=lambda line: (-int(line.split(b",")[1]), int(line.split(b",")[0])))
    assert unpacked_bytes(tmp_path / "out", tmp_path / "copies") == b"".join(lines)


def test_a_killed_sort_worker_is_retried_and_the_output_is_the_same(tmp_path: Path, url: str) -> None:
    make_input(tmp_path / "in", 100_000)
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--engine", "interlock")
    with started(*arguments, url=url) as process:
        victim = eventually(lambda: sorters(process.pid))[0]
        eventually((tmp_path / "out" / ".interlock-sort" / "worker-0").exists)
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert validate([tmp_path / "out"], [tmp_path / "in"]).problems == []
    job, steps = look(url)
    assert job.status == "COMPLETED"
    assert sum(step.tries for step in steps) > 2


def test_an_input_error_fails_the_job_and_names_file_and_byte(tmp_path: Path, url: str) -> None:
    make_input(tmp_path / "in", 3_000, files=1, is_ascii=True)
    with (tmp_path / "in" / "part-00000").open("r+b") as file:
        file.seek(120_000)
        file.write(b"y" * 100)
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--engine", "interlock")
    with started(*arguments, url=url) as process:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 1
        assert members(process.pid) == []
    assert "part-00000, byte 120,000: this line of 100 bytes does not end in CR LF" in errors
    assert "Traceback" not in errors
    job, _ = look(url)
    assert job.status in {"FAILED", "CANCELED"}


def test_a_killed_command_does_not_block_the_next_sort(tmp_path: Path, url: str) -> None:
    make_input(tmp_path / "in", 100_000)
    make_input(tmp_path / "other", 1_000)
    with started("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--engine", "interlock", url=url) as process:
        eventually((tmp_path / "out" / ".interlock-sort" / "worker-1").exists)
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
    with psycopg.connect(url) as connection:
        connection.execute("update interlock.tasks set lease_expires_at = now() where lease_expires_at is not null")
    arguments = ("run", tmp_path / "other", "-O", tmp_path / "out2", "-w", 2, "--engine", "interlock", "--timeout", 30)
    with started(*arguments, url=url) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert validate([tmp_path / "out2"], [tmp_path / "other"]).problems == []
    assert statuses(url) == {"CANCELED": 1, "COMPLETED": 1}, "the job of the killed command does not stay"


def test_the_job_of_a_killed_command_ends_by_itself(tmp_path: Path, url: str) -> None:
    make_input(tmp_path / "in", 500_000)
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--engine", "interlock", "--memory", "256MB")
    with started(*arguments, url=url) as process:
        assert process.stderr is not None
        while "Sorting" not in (line := process.stderr.readline()):
            assert line, "it ended before it was killed"
        assert statuses(url) == {"RUNNING": 1}
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: statuses(url) == {"CANCELED": 1}, within=100)
    _, steps = look(url)
    assert "the command of this sort was killed" in reasons(url)
    assert not [step for step in steps if step.state in {"pending", "running"}]
    eventually(lambda: not guards(), within=30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sort_cancels_its_job(tmp_path: Path, url: str, number: signal.Signals) -> None:
    make_input(tmp_path / "in", 500_000)
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--engine", "interlock", "--memory", "256MB")
    with started(*arguments, url=url) as process:
        assert process.stderr is not None
        while "Sorting" not in (line := process.stderr.readline()):
            assert line, "it ended before it was interrupted"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.endswith("interrupted\n")
    assert names(tmp_path / "out") == []
    job, steps = look(url)
    assert job.status == "CANCELED"
    assert not [step for step in steps if step.state in {"pending", "running"}]
