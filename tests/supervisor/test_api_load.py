"""A short run of bench/api.py: no fault, and the figures that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.flow

BENCH = Path(__file__).parents[2] / "bench" / "api.py"


def test_the_load_test_finds_no_fault_and_prints_times_and_shares(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    small = ("--seconds", "2", "--clients", "4", "--tasks", "300", "--jobs", "30", "--slices", "1", "--pages", "1")
    ran = subprocess.run(
        [sys.executable, str(BENCH), *small, "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, ran.stderr), ran.stdout + ran.stderr
    assert "0 faults" in ran.stdout
    found = json.loads(figures.read_text())
    assert set(found["shares"]) == {"GET", "POST", "POST with a key"}
    assert all(min(both) > 0 for both in found["shares"].values())
    assert found["kinds"]
    assert {"/api/tasks?type=none", "/api/jobs?workflow=none", "/api/audit?actor=none"} <= set(found["pages"])
