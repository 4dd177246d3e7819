"""The Prometheus metrics of a sort are those of its report, and a command serves them while it runs."""

from __future__ import annotations

import socket
from collections import Counter
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from interlock.lifecycle import SortMasterState, SortWorkerState
from interlock.sort.engines.local import run_local
from interlock.sort.metrics import SortMetrics
from interlock.sort.settings import PHASES
from sort_cli import first_line, make_input, sort, started
from sort_cluster import random_rows, write_source

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from prometheus_client import Metric

pytestmark = pytest.mark.flow

Samples = dict[tuple[str, ...], float]


def samples_of(families: Iterable[Metric]) -> Samples:
    """Return the value of each sample by its name and the values of its labels."""
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_the_metrics_are_those_of_the_report(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", random_rows(1, 2_000))
    metrics = SortMetrics()
    registry = CollectorRegistry()
    registry.register(metrics)
    assert samples_of(registry.collect()) == {}, "nothing is known before the sort"
    report = run_local(source, tmp_path / "out", workers=2, on_progress=metrics.show, on_save=metrics.save)
    found = samples_of(registry.collect())
    assert found["sort_input_bytes",] == source.size
    moves = Counter((one.from_state, one.to_state, one.event) for one in report.history)
    counted = {name[2:]: value for name, value in found.items() if name[0] == "sort_state_transitions_total"}
    assert counted == moves
    took = {name[2]: value for name, value in found.items() if name[0] == "sort_phase_duration_seconds"}
    assert took == report.phases
    assert set(took) == set(map(str, PHASES))
    for process, states in (
        ("master", SortMasterState), ("worker 0", SortWorkerState), ("worker 1", SortWorkerState),
    ):  # fmt: skip
        shown = {name[2]: value for name, value in found.items() if name[:2] == ("sort_state", process)}
        assert shown == {str(state): float(state == "Completed") for state in states}
    assert found["sort_progress_ratio", "worker 0"] == found["sort_progress_ratio", "worker 1"] == 1.0


def test_commands_serve_their_metrics(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 2_000)
    with started("master", 2, "--metrics-port", 0) as master:
        assert master.stderr is not None
        note = master.stderr.readline()
        address = first_line(master)
        assert note.startswith("metrics at http://127.0.0.1:")
        served = samples_of(text_string_to_metric_families(httpx.get(note.split()[-1]).text))
        assert served["sort_state", "master", "Registering"] == 1
        assert served["sort_state", "master", "Completed"] == 0
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            refused = sort("worker", address, "-I", tmp_path / "in", "-O", tmp_path / "out", "--metrics-port", port)
        assert refused.returncode == 2
        assert f"metrics cannot be served on 127.0.0.1:{port}: Address already in use" in refused.stderr
        master.terminate()
