"""Whole sorts: the output is the sorted input for any keys, shapes and numbers, and no phase hangs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from interlock.errors import SortError, SortInputError
from interlock.sort.data.records import Extent, RecordFormat, Source
from interlock.sort.engines.local import run_local
from interlock.sort.master.master import run_master
from interlock.sort.settings import MIN_WORKER_MEMORY, Settings
from interlock.sort.worker.worker import run_worker
from sort_cluster import SortCluster, output_bytes, random_rows, sorted_bytes, write_source
from sort_distributions import DISTRIBUTIONS, distributed_rows
from sort_threads import sort_in_threads

if TYPE_CHECKING:
    from interlock.sort.settings import Progress

pytestmark = pytest.mark.flow


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("resident_share", [0.0, 0.5, 1.0])
def test_the_output_is_the_input_in_order_and_even(tmp_path: Path, distribution: str, resident_share: float) -> None:
    rows = distributed_rows(distribution, 3_000)
    report = sort_in_threads(write_source(tmp_path / "in", rows), tmp_path, resident_share=resident_share, partitions=3)
    assert output_bytes(tmp_path / "out-0", tmp_path / "out-1") == sorted_bytes(rows)
    assert report.records == len(rows)
    assert [one.number for one in report.partitions] == [0, 1, 2]
    assert max(one.records for one in report.partitions) <= 1.1 * len(rows) / 3
    assert sorted(path.name for path in (tmp_path / "out-1").iterdir()) == ["partition.1", "partition.2"]


@pytest.mark.parametrize(
    ("length", "key_length", "count", "workers", "partitions"),
    [(1, 1, 500, 2, 2), (5, 2, 700, 3, 2), (20, 20, 900, 1, 4), (100, 10, 1, 2, None), (100, 10, 0, 2, None),
     (3000, 12, 900, 2, 2), (1_500, 1_400, 6_000, 2, 30)],
)  # fmt: skip
def test_any_shape_of_records_any_number_of_workers_and_partitions(
    tmp_path: Path, length: int, key_length: int, count: int, workers: int, partitions: int | None
) -> None:
    rows = random_rows(8, count, 4, length)
    source = write_source(tmp_path / "in", rows, key_length)
    report = sort_in_threads(source, tmp_path, workers, partitions=partitions)
    assert output_bytes(*tmp_path.glob("out-*")) == sorted_bytes(rows, key_length)
    assert len(report.partitions) == (partitions or workers)


def test_progress_durations_and_history_are_reported(tmp_path: Path) -> None:
    reported: list[Progress] = []
    rows = random_rows(1, 2_000)
    report = sort_in_threads(write_source(tmp_path / "in", rows), tmp_path, on_progress=reported.append)
    assert set(report.phases) == {"Sampling", "Sorting", "Shuffling", "Merging"}
    assert [move.to_state for move in report.history] == ["Sampling", "Sorting", "Shuffling", "Merging", "Completed"]
    for worker in report.workers:
        assert set(worker.phases) == {"Sampling", "Sorting", "Shuffling", "Merging"}
        assert worker.history[0].from_state == "Initializing"
        assert worker.history[-1].to_state == "Completed"
    assert reported[-1].state == "Completed"
    assert reported[-1].bytes_total == 200_000
    assert [one.percent for one in reported[-1].workers] == [100.0, 100.0]
    assert {one.index for one in reported[-1].workers} == {0, 1}


def test_a_local_run_sorts_in_processes_of_its_own_and_leaves_only_its_output(tmp_path: Path) -> None:
    rows = distributed_rows("skewed", 5_000)
    report = run_local(write_source(tmp_path / "in", rows), tmp_path / "out", workers=2)
    assert output_bytes(tmp_path / "out") == sorted_bytes(rows)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["partition.0", "partition.1"]
    assert report.json()["workers"][1]["peak_memory"] > 0
    assert children() == []


def test_unfinished_work_of_another_sort_is_removed_and_nothing_else(tmp_path: Path) -> None:
    with SortCluster(tmp_path, write_source(tmp_path / "other", random_rows(9, 1_000))) as cluster:
        cluster.start_master(("Sorting",), forever=True)
        cluster.start_worker(0)
        cluster.start_worker(1)
        cluster.ended("master")
    work_dir = tmp_path / "temp"
    (work_dir / "master" / "state.json").rename(work_dir / "state.json")
    (work_dir / "mine").touch()
    rows = random_rows(4, 1_000)
    run_local(write_source(tmp_path / "in", rows), tmp_path / "fresh", workers=2, work_dir=work_dir)
    assert output_bytes(tmp_path / "fresh") == sorted_bytes(rows)
    assert (work_dir / "mine").exists()
    assert not (work_dir / "state.json").exists()


def test_a_failure_in_a_thread_of_a_worker_reaches_the_master(tmp_path: Path) -> None:
    write_source(tmp_path / "in", random_rows(4, 5_000))
    source = Source(RecordFormat(), (Extent(str(tmp_path / "in"), 0, 6_000),))
    with pytest.raises(SortError, match=r"worker 1 .* failed: input .*in became shorter"):
        run_local(source, tmp_path / "out", workers=2)
    assert list((tmp_path / "out").iterdir()) == []
    assert children() == []


def test_workers_end_when_the_process_of_a_local_run_is_killed(tmp_path: Path) -> None:
    rows = random_rows(4, 50_000)
    source = write_source(tmp_path / "in", rows)
    script = (
        "import json, sys; from pathlib import Path; from interlock.sort.engines.local import run_local;"
        "from interlock.sort.data.records import Source\n"
        "run_local(Source.from_json(json.loads(sys.argv[1])), Path(sys.argv[2]))"
    )
    process = subprocess.Popen([sys.executable, "-c", script, json.dumps(source.json()), str(tmp_path / "out")])
    while len(workers := children(process.pid)) < 2:
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    for worker in workers:
        gone(worker)
    run_local(source, tmp_path / "out")
    assert output_bytes(tmp_path / "out") == sorted_bytes(rows)


def test_a_missing_worker_fails_the_sort_after_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(SortError, match=r"phase Registering did not end within 0\.2 s: 0 of 2 workers registered"):
        run_master(2, settings=Settings(register_timeout_s=0.2))
    source = write_source(tmp_path / "in", random_rows(1, 10))
    with pytest.raises(SortError, match=r"RegisterWorker at the master \(127\.0\.0\.1:1\): no answer within 0\.2 s"):
        run_worker("127.0.0.1:1", source, tmp_path / "out", settings=Settings(register_timeout_s=0.2))


def test_a_lost_worker_is_named_and_the_others_end(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", random_rows(1, 2_000))
    with SortCluster(tmp_path, source, lost_after_s=6.0) as cluster:
        cluster.start_master()
        cluster.start_worker(0)
        cluster.start_worker(1, ("Sorting",), forever=True)
        message = cluster.failure("master")
        assert "worker 1 (127.0.0.1:" in message
        assert "is lost in phase Sorting: no heartbeat for 6 s" in message
        assert "is lost in phase Sorting" in cluster.failure("worker-0")
    assert output_bytes(cluster.output) == b""


def test_a_master_and_a_worker_end_when_stopped(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(SortError, match="the sort was stopped in phase Registering"):
        run_master(1, stop=stop)
    source = write_source(tmp_path / "in", random_rows(1, 10))
    with pytest.raises(SortError, match="the worker was stopped"):
        run_worker("127.0.0.1:1", source, tmp_path / "out", stop=stop)


def test_too_little_memory_or_too_few_workers_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", random_rows(1, 10))
    with pytest.raises(SortInputError, match="too few for 8 workers"):
        run_local(source, tmp_path / "out", workers=8, settings=Settings(memory=MIN_WORKER_MEMORY))
    with pytest.raises(SortInputError, match="number of workers must be at least 1, got 0"):
        run_local(source, tmp_path / "out", workers=0)
    with pytest.raises(SortInputError, match="too few: a worker needs"):
        Settings(memory=1)
    assert not (tmp_path / "out").exists()


def children(parent: int | None = None) -> list[int]:
    """List the sort worker processes of a parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
            command = path.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == (parent or os.getpid()) and b"interlock.sort" in command and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def gone(process: int) -> None:
    """Wait until a process that is not our child has ended."""
    watched = os.pidfd_open(process) if Path(f"/proc/{process}").exists() else -1
    if watched >= 0:
        assert select.select([watched], [], [], 20)[0], f"process {process} still runs"
        os.close(watched)
