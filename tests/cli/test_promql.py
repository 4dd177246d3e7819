"""The expressions of the Grafana dashboard and the Prometheus rules, read by a parser of PromQL."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.unit

MONITORING = Path(__file__).parents[2] / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))
RULES: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus-alerts.yml").read_text(encoding="utf-8"))
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())] + [
    rule["expr"] for group in RULES["groups"] for rule in group["rules"]
]


def parse(expression: str) -> None:
    """Parse an expression with a value in the place of Grafana's interval; ValueError where it is wrong."""
    import_module("promql_parser").parse(expression.replace("$__rate_interval", "5m"))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_valid(expression: str) -> None:
    parse(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "sum by (le) (rate(task_wait_seconds_bucket[5x]))",
        "sum by le (rate(task_wait_seconds_bucket[5m]))",
        "sum(rate(task_wait_seconds_bucket[5m]) by (le)",
        "histogram_quantile(0.9)",
        "rate(queue_depth)",
        "queue_depth{state=pending}",
        "queue_depth > > 1",
    ],
)
def test_a_mistake_is_noticed(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(expression)
