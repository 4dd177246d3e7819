"""Metrics and logs of the lifecycles: the names, labels and fields that the requirements give, exactly."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from interlock import telemetry
from interlock.errors import InvalidTransitionError
from interlock.lifecycle import TASK, WORKER, TaskEvent, WorkerEvent
from interlock.machine import StateMachine
from interlock.store.stats import StateCount
from interlock.telemetry import TaskTelemetry, TaskTypeSeries, WorkerTelemetry, metrics_registry, series_of
from interlock.worker.stats import set_queue_gauges

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(telemetry._levels, "info", True)  # noqa: FBT003, SLF001 - simulates configured logging


@pytest.fixture
def name() -> str:
    """Return a label value unique to this test, as the registry is shared by the whole process."""
    return f"test-{uuid4().hex}"


def sample(metric: str, **labels: str) -> float | None:
    return metrics_registry.get_sample_value(metric, labels)


@pytest.mark.parametrize(
    ("metric", "kind", "help_text", "labels"),
    [
        ("worker_state", "gauge", "Current worker state", ("worker_id", "state")),
        (
            "worker_state_transitions_total",
            "counter",
            "Worker state transitions",
            ("worker_id", "from_state", "to_state", "event"),
        ),
        (
            "task_state_transitions_total",
            "counter",
            "Task state transitions",
            ("task_type", "from_state", "to_state", "event"),
        ),
        ("task_state_duration_seconds", "histogram", "Time spent in each task state", ("task_type", "state")),
    ],
)
def test_metrics_have_the_required_shape(metric: str, kind: str, help_text: str, labels: tuple[str, ...]) -> None:
    machine = StateMachine(WORKER, observer=WorkerTelemetry("named"))
    attempt = StateMachine(TASK, observer=TaskTelemetry("named", series_of("named")))
    with capture_logs():
        machine.transition(WorkerEvent.INITIALIZED)
        attempt.transition(TaskEvent.CLAIM_REQUESTED)
    families = {family.name: family for family in metrics_registry.collect()}
    found = families[metric.removesuffix("_total")].samples[0].labels.keys() - {"le"}
    assert found == set(labels)
    page = generate_latest(metrics_registry).decode()
    assert f"# TYPE {metric} {kind}" in page
    assert f"# HELP {metric} {help_text}" in page


def test_each_worker_move_is_counted_by_from_to_and_event(name: str) -> None:
    machine = StateMachine(WORKER, observer=WorkerTelemetry(name))
    with capture_logs():
        machine.transition(WorkerEvent.INITIALIZED)
        for _ in range(3):
            machine.transition(WorkerEvent.CONNECTION_FAILED)
    labels = {"worker_id": name, "from_state": "connecting", "to_state": "connecting", "event": "connection_failed"}
    assert sample("worker_state_transitions_total", **labels) == 3
    labels |= {"from_state": "starting", "event": "initialized"}
    assert sample("worker_state_transitions_total", **labels) == 1


def test_the_state_gauge_shows_the_present_state_alone(name: str) -> None:
    machine = StateMachine(WORKER, observer=WorkerTelemetry(name))
    with capture_logs():
        machine.transition(WorkerEvent.INITIALIZED)
        machine.transition(WorkerEvent.CONNECTION_FAILED)
        assert sample("worker_state", worker_id=name, state="connecting") == 1
        machine.transition(WorkerEvent.CONNECTED)
    shown = {str(state): sample("worker_state", worker_id=name, state=state) for state in WORKER.states}
    assert [state for state, value in shown.items() if value] == ["recovering"]
    assert shown["starting"] == shown["connecting"] == 0


def test_each_task_move_is_counted_and_the_state_it_leaves_is_timed(name: str) -> None:
    times = iter([0.0, 1.0, 1.5, 10.0, 10.0, 10.25])
    series = TaskTypeSeries(name)
    with capture_logs():
        first = StateMachine(TASK, observer=TaskTelemetry("1", series), clock=lambda: next(times))
        first.transition(TaskEvent.CLAIM_REQUESTED)
        first.transition(TaskEvent.CLAIM_SUCCEEDED)
        first.transition(TaskEvent.PROCESSING_SUCCEEDED)
        second = StateMachine(TASK, observer=TaskTelemetry("2", series), clock=lambda: next(times))
        second.transition(TaskEvent.CLAIM_REQUESTED)
    labels = {"task_type": name, "from_state": "pending", "to_state": "claiming", "event": "claim_requested"}
    assert sample("task_state_transitions_total", **labels) == 2
    assert sample("task_state_duration_seconds_count", task_type=name, state="pending") == 2
    assert sample("task_state_duration_seconds_sum", task_type=name, state="pending") == 1.25
    assert sample("task_state_duration_seconds_sum", task_type=name, state="processing") == 8.5
    assert sample("task_state_duration_seconds_count", task_type=name, state="reporting") is None


def test_a_refused_move_is_logged_as_a_warning_and_not_counted(name: str) -> None:
    machine = StateMachine(WORKER, observer=WorkerTelemetry(name))
    with capture_logs() as logs, pytest.raises(InvalidTransitionError) as caught:
        machine.transition(WorkerEvent.SHUTDOWN_COMPLETE)
    assert logs == [
        {
            "event": "invalid_transition_attempted",
            "log_level": "warning",
            "machine": "worker process",
            "current_state": "starting",
            "_event": "shutdown_complete",
            "reason": str(caught.value),
        }
    ]
    assert f'worker_id="{name}"' not in generate_latest(metrics_registry).decode()


def test_an_idle_worker_logs_its_cycle_once_at_info_and_again_after_a_task(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(telemetry._levels, "debug", True)  # noqa: FBT003, SLF001 - simulates configured logging
    machine = StateMachine(WORKER, observer=WorkerTelemetry(name))
    cycle = [WorkerEvent.NO_TASKS_AVAILABLE, WorkerEvent.BACKOFF_COMPLETE, WorkerEvent.RECOVERY_COMPLETE]

    def logged(*events: WorkerEvent) -> dict[str, list[str]]:
        with capture_logs() as logs:
            for event in events:
                machine.transition(event)
        found: dict[str, list[str]] = {"info": [], "debug": []}
        for entry in logs:
            found[entry["log_level"]].append(entry["_event"])
        return found

    logged(WorkerEvent.INITIALIZED, WorkerEvent.CONNECTED, WorkerEvent.RECOVERY_COMPLETE)
    first = logged(*cycle * 100)
    assert first["info"] == ["no_tasks_available", "backoff_complete"]
    assert len(first["debug"]) == 298
    again = logged(WorkerEvent.POLL_CYCLE_COMPLETE, *cycle * 100)
    assert again["info"] == ["poll_cycle_complete", "no_tasks_available", "backoff_complete", "recovery_complete"]


def test_a_refusal_keeps_the_reason_that_the_caller_gave(name: str) -> None:
    machine = StateMachine(TASK, observer=TaskTelemetry("1", TaskTypeSeries(name)))
    with capture_logs() as logs, pytest.raises(InvalidTransitionError):
        machine.transition(TaskEvent.LEASE_EXPIRED, "renewal failed")
    assert [entry["reason"] for entry in logs] == ["renewal failed"]


# Logging is configured once for a process, so what it writes is read from a process of its own.
PROGRAM = """
import sys
from contextlib import suppress
from interlock.errors import InvalidTransitionError
from interlock.lifecycle import TASK, WORKER, TaskEvent, WorkerEvent
from interlock.machine import StateMachine
from interlock.telemetry import TaskTelemetry, TaskTypeSeries, WorkerTelemetry, series_of, configure_logging, log

configure_logging(sys.argv[1], sys.argv[2], sys.stdout)
worker = StateMachine(WORKER, observer=WorkerTelemetry("w-1"))
worker.transition(WorkerEvent.INITIALIZED, "settings read")
task = StateMachine(TASK, observer=TaskTelemetry("t-1", TaskTypeSeries("resize")))
task.transition(TaskEvent.CLAIM_REQUESTED)
with suppress(InvalidTransitionError):
    task.transition(TaskEvent.REPORT_FAILED, "too early")
"""


def output(level: str, form: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", PROGRAM, level, form], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def test_logs_as_json_have_the_required_names_and_fields() -> None:
    entries = [json.loads(line) for line in output("info", "json")]
    assert all(entry.pop("timestamp").endswith("Z") for entry in entries)
    assert entries == [
        {
            "message": "worker_state_transition",
            "level": "info",
            "worker_id": "w-1",
            "from_state": "starting",
            "to_state": "connecting",
            "event": "initialized",
            "reason": "settings read",
        },
        {
            "message": "task_state_transition",
            "level": "info",
            "task_id": "t-1",
            "task_type": "resize",
            "from_state": "pending",
            "to_state": "claiming",
            "event": "claim_requested",
            "reason": None,
        },
        {
            "message": "invalid_transition_attempted",
            "level": "warning",
            "machine": "task attempt",
            "current_state": "claiming",
            "event": "report_failed",
            "reason": "too early",
        },
    ]


def test_the_log_level_leaves_out_what_is_below_it() -> None:
    assert [json.loads(line)["message"] for line in output("warning", "json")] == ["invalid_transition_attempted"]


def test_logs_for_people_name_the_event_and_both_states() -> None:
    first, *_ = output("info", "console")
    for words in ("worker_state_transition", "event=initialized", "from_state=starting", "to_state=connecting"):
        assert words in first


def test_the_gauges_of_a_namespace_that_ran_empty_go_back_to_zero(name: str) -> None:
    seen: set[str] = set()
    set_queue_gauges([StateCount(name, "pending", 3, datetime.now(UTC) - timedelta(seconds=60))], seen)
    assert sample("queue_depth", namespace=name, state="pending") == 3
    assert sample("oldest_pending_age_seconds", namespace=name) == pytest.approx(60, abs=30)
    set_queue_gauges([], seen)
    assert sample("queue_depth", namespace=name, state="pending") == 0
    assert sample("oldest_pending_age_seconds", namespace=name) == 0


# A module of the same name and content as in an application that has metrics of our names.
APPLICATION = """
from prometheus_client import Counter, Gauge
Gauge("queue_depth", "of the application").set(7)
Counter("http_requests_total", "of the application")
Gauge("leases_lost_total", "of the application")
Counter("mails_sent_total", "of the application").inc(3)
"""
OURS = """
import interlock.worker.stats, interlock.orchestrator.stats, interlock.supervisor.http.metrics
import interlock.supervisor.pool.metrics
"""
PAGE = """
from prometheus_client import generate_latest
from interlock.telemetry import served_registry
print(generate_latest(served_registry()).decode())
"""


@pytest.mark.parametrize("order", [APPLICATION + OURS, OURS + APPLICATION], ids=["theirs-first", "ours-first"])
def test_an_application_with_metrics_of_our_names_imports_us_and_keeps_its_own(order: str) -> None:
    program = order + "from prometheus_client import REGISTRY\nprint(REGISTRY.get_sample_value('queue_depth'))" + PAGE
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, *page = run.stdout.splitlines()
    assert float(first) == 7
    assert sum(line.startswith("# HELP queue_depth Tasks that have not ended") for line in page) == 1
    # What the application has under our names is left out: a page with a name twice is refused by Prometheus.
    declared = [line.split()[2] for line in page if line.startswith("# TYPE")]
    assert len(declared) == len(set(declared))
    assert "# HELP leases_lost_total of the application" not in page
    assert "mails_sent_total 3.0" in page
    assert any(line.startswith("python_info") for line in page)


def test_no_metric_of_ours_is_in_the_default_registry() -> None:
    program = OURS + "from prometheus_client import REGISTRY\nprint([f.name for f in REGISTRY.collect()])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {name.split("_")[0] for name in ast.literal_eval(run.stdout)} <= {"python", "process"}
