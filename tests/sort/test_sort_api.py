"""The sort from Python: awaited, cancelled, as a step of a workflow, and the example of the documentation."""

from __future__ import annotations

import asyncio
import gc
import os
import runpy
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import interlock.sort
from interlock import Interlock, StepContext, serving
from interlock.config import Config
from interlock.errors import SortInputError
from interlock.lifecycle import SORT_MASTER, SortMasterState
from interlock.orchestrator.run import orchestrating
from interlock.sort import sort
from sort_cli import make_input, members, names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.sort.settings import Partition, Progress

pytestmark = pytest.mark.flow

EXAMPLE = Path(__file__).parents[2] / "examples" / "sort_and_load.py"
STATES = [str(state) for state in SORT_MASTER.states if state is not SortMasterState.FAILED]
MARK = "SORT_OF_TEST"  # an environment variable that the processes of a sort inherit


def write_lines(path: Path, count: int = 5_000) -> list[bytes]:
    lines = [b"%d,%d\n" % (number * 7919 % count, number % 17) for number in range(count)]
    path.write_bytes(b"".join(lines))
    return sorted(lines, key=lambda line: int(line.split(b",")[0]))


def content(partitions: Sequence[Partition | str]) -> bytes:
    """Read partitions, one after the other."""
    return b"".join(Path(one if isinstance(one, str) else one.path).read_bytes() for one in partitions)


async def test_a_sort_is_awaited_and_reports(tmp_path: Path) -> None:
    expected = write_lines(tmp_path / "in")
    seen: list[Progress] = []
    report = await sort(
        tmp_path / "in",
        str(tmp_path / "out"),
        key="1,1n",
        separator=",",
        workers=2,
        memory="600MB",
        on_progress=seen.append,
    )
    assert report.records == 5_000
    assert content(report.partitions) == b"".join(expected)
    assert [move.to_state for move in report.history] == STATES[1:]
    assert seen[-1].state == SortMasterState.COMPLETED
    with pytest.raises(SortInputError, match=r"already holds partition\.0"):
        await sort([tmp_path / "in"], tmp_path / "out", lines=True)
    keys = ["2,2nr", "1"]
    again = await sort([tmp_path / "in"], tmp_path / "out", key=keys, separator=",", overwrite=True, workers=1)
    assert names(tmp_path / "out") == ["partition.0"]
    expected.sort(key=lambda line: (-int(line.split(b",")[1]), line))
    assert content(again.partitions) == b"".join(expected)


async def test_records_are_sorted_with_lengths_and_packed(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 3_000)
    report = await sort(
        tmp_path / "in",
        tmp_path / "out",
        record_length=100,
        key_length=10,
        workers=1,
        compression="gzip",
        temp=tmp_path / "t",
    )
    assert (report.records, report.size) == (3_000, 300_000)
    assert Path(report.partitions[0].path).name == "partition.0.gz"


async def test_the_directory_for_temporary_files_keeps_those_of_others(tmp_path: Path) -> None:
    expected = write_lines(tmp_path / "in")
    temp = tmp_path / "t"
    (temp / "worker-x").mkdir(parents=True)
    foreign = ["state.json", "sort", "token", "worker-x/results"]
    for name in foreign:
        (temp / name).write_text("of another program")
    report = await sort(tmp_path / "in", tmp_path / "out", key="1,1n", separator=",", workers=1, temp=temp)
    assert content(report.partitions) == b"".join(expected)
    assert names(temp) == ["sort", "state.json", "token", "worker-x"]
    assert {(temp / name).read_text() for name in foreign} == {"of another program"}


async def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_lines(tmp_path / "in")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"key": "0"}, "numbered from 1"),
        ({"separator": ""}, "the field separator '' must be one byte"),
        ({"memory": "much"}, "is not a size"),
        ({"memory": 5}, "memory"),
        ({"compression": "lzma"}, "compression must be gzip or zstd, got 'lzma'"),
        ({"memory": "100MB", "temp": tmp_path / "temp"}, r"too few for 1 workers and this input: they need \d+MB"),
        ({"workers": 0}, "the number of workers must be at least 1, got 0"),
        ({"workers": 10**9}, r"for 1000000000 workers .* it would be enough for --workers \d\d$"),
    ]
    for options, message in wrong:
        with pytest.raises(SortInputError, match=message):
            await sort(tmp_path / "in", tmp_path / "out", **{"workers": 1, **options})
    assert names(tmp_path) == ["in"]
    with pytest.raises(AttributeError, match="no attribute 'sorted'"):
        _ = interlock.sort.sorted


def marked_processes(mark: str) -> list[int]:
    """List the running processes that inherited a mark in their environment."""
    found = []
    for pid in members(os.getsid(0)):
        with suppress(OSError):  # it has ended
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


async def test_a_cancelled_sort_ends_its_processes_and_leaves_no_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    make_input(tmp_path / "in", 300_000)
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def show(progress: Progress) -> None:
        if progress.state != SortMasterState.REGISTERING:
            loop.call_soon_threadsafe(begun.set)

    task = asyncio.create_task(sort(tmp_path / "in", tmp_path / "out", workers=1, on_progress=show))
    await asyncio.wait_for(begun.wait(), 60)
    assert len(marked_processes(str(tmp_path))) == 1
    task.cancel()
    logged: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: logged.append(context))
    await asyncio.wait({task})
    assert task.cancelled()
    del task
    gc.collect()
    assert logged == []
    assert marked_processes(str(tmp_path)) == []
    assert names(tmp_path / "out") == []


async def test_a_step_of_a_workflow_has_progress_history_and_a_retry_that_resumes(tmp_path: Path, url: str) -> None:
    expected = write_lines(tmp_path / "in")
    app = Interlock(config=Config(database_url=url))
    workflow = app.workflow("sorting", version="1")
    attempts: list[dict[str, Any] | None] = []

    @workflow.step(max_tries=2)
    async def ordered(ctx: StepContext) -> list[str]:
        attempts.append(ctx.restore())
        report = await sort(
            tmp_path / "in", tmp_path / "out", key="1,1n", separator=",", workers=1, context=ctx, overwrite=True
        )
        if len(attempts) == 1:
            raise OSError("the network of the first attempt")
        return [one.path for one in report.partitions]

    async with app, serving(app), orchestrating(app):
        job = await app.submit(workflow, {})
        (path,) = (await job.wait(90))["ordered"]
        (step,) = await job.steps()
    assert content([path]) == b"".join(expected)
    assert step.progress is not None
    assert (step.progress["fraction"], step.progress["message"]) == (1.0, "Completed")
    first, second = attempts
    assert first is None
    assert second is not None
    assert second["state"] == "Completed"
    assert [move["to_state"] for move in second["history"]] == STATES[1:]


async def test_the_step_of_the_example_can_be_retried_after_its_sort(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLOCK_DATABASE_URL", url)
    example = runpy.run_path(str(EXAMPLE))
    example["measure"](tmp_path / "in")
    first, again = [await example["ordered"].function(str(tmp_path / "in"), str(tmp_path), ctx=None) for _ in range(2)]
    assert first == again
    assert content(again).count(b"\n") == 20_000


def test_the_example_sorts_and_loads(url: str) -> None:
    environment = {**os.environ, "INTERLOCK_DATABASE_URL": url}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()  # with those of the log
    assert {"20000 rows", "the sort was Completed"} <= set(lines), done.stdout
    assert sum(line.startswith("('sensor-0', ") for line in lines) == 3
