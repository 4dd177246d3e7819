"""Display of a sort: lines without a terminal, bars in one, tables at the end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from interlock.sort.display import (
    SortLineView,
    SortLiveView,
    Throughput,
    format_remaining_time,
    format_size,
    open_view,
    overall_percent,
    report_tables,
    summary_line,
)
from interlock.sort.settings import Partition, Progress, Report, TransitionRecord, WorkerProgress, WorkerReport

pytestmark = pytest.mark.unit


def seen(state: str, percents: tuple[float, ...], done: int = 0, elapsed: float = 1.0) -> Progress:
    workers = tuple(
        WorkerProgress(index, f"127.0.0.1:{index}", state, state, percent, f"{state}: {percent}%", done)
        for index, percent in enumerate(percents)
    )
    return Progress(state, workers, 1_000_000_000, elapsed)


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=140, color_system=None, legacy_windows=False)


def written(used: Console) -> str:
    assert isinstance(used.file, io.StringIO)
    return used.file.getvalue()


def test_without_a_terminal_there_is_one_line_for_each_phase() -> None:
    used = console(terminal=False)
    view = open_view(used)
    assert isinstance(view, SortLineView)
    with view:
        view.show(seen("Sorting", (15.0, 15.0)))
        view.show(seen("Sorting", (35.0, 25.0), 50_000_000, 2.0))
        view.show(seen("Merging", (90.0, 80.0), 0, 3.0))
    lines = written(used).splitlines()
    assert len(lines) == 2
    assert " ".join(lines[0].split()) == "1.0 s Sorting 15 % ETA 6 s worker 0 Sorting 15 %, worker 1 Sorting 15 %"
    assert "Merging" in lines[1]


def test_a_terminal_shows_a_bar_for_each_worker_and_one_for_all() -> None:
    used = console(terminal=True)
    view = open_view(used)
    assert isinstance(view, SortLiveView)
    with view:
        view.show(seen("Shuffling", (55.0, 65.0), 100_000_000, 2.0))
    text = written(used)
    assert "worker 0" in text
    assert "Shuffling: 65.0%" in text
    assert "Shuffling, 1.00 GB" in text
    assert "60 %" in text


def test_throughput_is_of_the_phase_and_eta_of_the_whole_sort() -> None:
    throughput = Throughput()
    assert throughput.describe(seen("Sorting", (20.0,), 0, 1.0)) == "ETA 4 s"
    assert throughput.describe(seen("Sorting", (50.0,), 300_000_000, 3.0)) == "150.00 MB/s  ETA 3 s"
    assert throughput.describe(seen("Merging", (80.0,), 10, 4.0)) == "ETA 1 s"
    assert throughput.describe(seen("Completed", (100.0,), 10, 4.0)) == ""
    assert overall_percent(()) == 0.0


def test_the_report_shows_durations_partitions_and_transitions() -> None:
    moves = (
        TransitionRecord("Initializing", "Sampling", "register", "registered", 1_000.0, 0.25),
        TransitionRecord("Sampling", "Failed", "fail", "[red]disk[/red] full", 1_001.5, 1.75),
    )
    workers = tuple(
        WorkerReport(
            index=index,
            address=f"127.0.0.1:{index}",
            records=50,
            partitions=(Partition(index, f"/out/partition.{index}", 40 + 20 * index, 100),),
            phases={"Sampling": 0.5, "Merging": 1.25},
            history=moves,
            peak_memory=500_000_000,
        )
        for index in range(2)
    )
    report = Report(100, 10_000, 2.0, {"Sampling": 0.5}, moves, workers)
    used = console(terminal=False)
    for table in report_tables(report):
        used.print(table)
    text = written(used)
    assert [line.split() for line in text.splitlines() if line.startswith("Merging")] == [
        ["Merging", "1.25", "s", "1.25", "s"]
    ]
    assert "80%" in text
    assert "120%" in text
    assert text.count("[red]disk[/red] full") == 3
    assert "+1.50 s" in text
    assert summary_line(report) == (
        "100 records, 10.00 kB, in 2.00 s (5.00 kB/s), 2 partitions, workers' peak memory 1.00 GB together"
    )
    assert len(report_tables(report, history=False)) == 2


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1_000, "1.00 kB"), (2_500_000_000, "2.50 GB"), (3e15, "3000.00 TB")]
)
def test_sizes_have_the_unit_that_fits(size: float, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (61, "1 min 1 s"), (7_300, "2 h 1 min")])
def test_durations_have_at_most_two_units(seconds: float, text: str) -> None:
    assert format_remaining_time(seconds) == text
