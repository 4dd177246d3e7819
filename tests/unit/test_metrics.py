"""The table of metrics, and the Grafana dashboard and Prometheus rules that use them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from interlock.cli.main import COMMANDS, GROUPS
from interlock.cli.metrics import MetricRow, list_metrics, metrics_page
from interlock.lifecycle import (
    JobState,
    TaskEvent,
    TaskRowState,
    TaskState,
    WorkerState,
)
from interlock.supervisor.pool.metrics import PROCESS_STATES
from processes import Result, clean_environment, run_interlock

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
ROWS = {row.name: row for row in list_metrics()}
DASHBOARD: dict[str, Any] = json.loads((ROOT / "monitoring" / "grafana-dashboard.json").read_text(encoding="utf-8"))
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "monitoring" / "prometheus-alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
TARGETS = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
EXPRESSIONS = [target["expr"] for _, target in TARGETS] + [rule["expr"] for rule in ALERTS]
OF_PROMETHEUS = {"up": ("job", "instance")}  # of Prometheus itself
TARGET_LABELS = {"job", "instance"}  # that Prometheus adds to every series
LABEL_LIST = re.compile(r"\b(by|without|on|ignoring)\s*\(([^)]*)\)")
SELECTOR = re.compile(r"\b([a-zA-Z_:][\w:]*)\b(\s*\()?(\{[^}]*\})?")
OPERATORS = {"and", "or", "unless", "bool", "offset"}
# the values that the label of a metric can have
VALUES: dict[tuple[str, str], set[str]] = {
    ("worker_state", "state"): set(WorkerState),
    ("task_state_transitions_total", "from_state"): set(TaskState),
    ("task_state_transitions_total", "event"): set(TaskEvent),
    ("task_state_duration_seconds", "state"): set(TaskState),
    ("queue_depth", "state"): set(TaskRowState),
    ("job_transitions_total", "to_state"): set(JobState),
    ("supervised_processes", "state"): set(PROCESS_STATES),
    ("worker_events_total", "system"): {"orchestration", "handlers"},
    ("worker_events_total", "kind"): {"received", "fallback_hits"},
    ("idempotency_requests_total", "outcome"): {"hit", "miss", "conflict"},
    ("http_requests_total", "status"): {"500", "503"},
}


def base_name(name: str) -> str:
    """Return the metric of a series; KeyError if there is none."""
    if name in ROWS or name in OF_PROMETHEUS:
        return name
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    assert base in ROWS, f"no metric {name}"
    assert ROWS[base].type == "histogram", f"{name}: {base} is a {ROWS[base].type}"
    return base


def labels_of(name: str) -> set[str]:
    base = base_name(name)
    own = ROWS[base].labels if base in ROWS else OF_PROMETHEUS[base]
    return {*own, *TARGET_LABELS, *({"le"} if name.endswith("_bucket") else ())}


def selectors(expression: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """List the series of a PromQL expression with their matchers (label, operator, value)."""
    text = re.sub(r"\[[^\]]*\]", "", LABEL_LIST.sub(" ", expression))
    found = []
    for name, call, matchers in SELECTOR.findall(text):
        if not call and name not in OPERATORS:
            found.append((name, re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers)))
    return found


def grouped_labels(expression: str) -> set[str]:
    return {label.strip() for _, names in LABEL_LIST.findall(expression) for label in names.split(",") if label.strip()}


def test_the_documented_table_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == metrics_page(list(ROWS.values())), "run: interlock metrics --docs docs/metrics.md"


@pytest.mark.parametrize(
    ("name", "type_", "labels"),
    [
        ("worker_state", "gauge", ("worker_id", "state")),
        ("worker_state_transitions_total", "counter", ("worker_id", "from_state", "to_state", "event")),
        ("task_state_transitions_total", "counter", ("task_type", "from_state", "to_state", "event")),
        ("task_state_duration_seconds", "histogram", ("task_type", "state")),
        ("supervised_worker_transitions_total", "counter", ("from_state", "to_state")),
        ("supervised_worker_state_duration_seconds", "histogram", ("state",)),
        ("failed_transitions_total", "counter", ("machine", "from_state", "to_state")),
        ("idempotency_hit_ratio", "gauge", ()),
    ],
)
def test_the_metrics_of_the_design_have_their_names_and_labels(name: str, type_: str, labels: tuple[str, ...]) -> None:
    row = ROWS[name]
    assert (row.type, row.labels) == (type_, labels)


def test_the_processes_that_export_a_metric_are_told() -> None:
    expected = {
        "claim_batch_size": ("worker",),
        "worker_events_total": ("worker",),
        "queue_depth": ("worker", "supervisor"),
        "orchestration_queue_depth": ("orchestrator",),
        "http_requests_total": ("supervisor",),
        "job_transitions_total": ("supervisor",),
    }
    assert {name: ROWS[name].processes for name in expected} == expected


def run_command(*arguments: str) -> Result:
    return run_interlock(*arguments, environment=clean_environment("postgresql://unused", COLUMNS="150"))


def test_the_command_lists_every_metric() -> None:
    shown = run_command("metrics", "--json")
    assert shown.returncode == 0, shown.stderr
    assert {MetricRow(**{**row, "labels": tuple(row["labels"]), "processes": tuple(row["processes"])})
            for row in json.loads(shown.stdout)} == set(ROWS.values())  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_use_metrics_and_labels_that_are_exported(expression: str) -> None:
    assert expression.count("(") == expression.count(")")
    series = selectors(expression)
    assert series, expression
    for name, matchers in series:
        labels = labels_of(name)
        for label, operator, value in matchers:
            assert label in labels, f"{name} has no label {label}"
            allowed = VALUES.get((base_name(name), label))
            if not value.startswith("$") and base_name(name) in ROWS:
                assert allowed is not None, f"the values of {label} of {name} are not checked"
                parts = [value] if operator in {"=", "!="} else value.split("|")
                assert all(any(re.fullmatch(part, one) for one in allowed) for part in parts), f"{name}: {value}"
    for label in grouped_labels(expression):
        assert all(label in labels_of(name) for name, _ in series), f"{expression}: no label {label}"


def test_counters_are_used_in_a_rate() -> None:
    for expression in EXPRESSIONS:
        for name, _ in selectors(expression):
            if (ROWS[base_name(name)].type if base_name(name) in ROWS else "") in {"counter", "histogram"}:
                assert re.search(rf"(rate|increase)\({name}\b", expression), expression


@pytest.mark.parametrize(("title", "target"), TARGETS)
def test_legends_name_labels_of_the_result(title: str, target: dict[str, str]) -> None:
    used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    assert used <= grouped_labels(target["expr"]), title


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_alerts_say_what_they_mean_and_how_severe_they_are(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"Interlock[A-Z]\w+", rule["alert"])
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]
    texts = " ".join(rule["annotations"].values())
    known = grouped_labels(rule["expr"]) or {label for name, _ in selectors(rule["expr"]) for label in labels_of(name)}
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= known
    for command in re.findall(r"`interlock ([^`]*)`", texts):
        words = command.split()
        assert words[0] in COMMANDS or words[0] in GROUPS, command
        asked = [word for word in words if word.islower() and not word.startswith("-")][
            : 2 if words[0] in GROUPS else 1
        ]
        shown = run_command(*asked, "--help")
        assert shown.returncode == 0, f"interlock {command}: {shown.stderr}"
        assert all(word in shown.stdout for word in words if word.startswith("--")), command


def test_panels_of_the_dashboard_have_ids_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places)
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            assert label in labels_of(name)
