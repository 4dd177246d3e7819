"""The code of the guides to logs, errors and metrics, and to lifespan and dependencies, does what they say."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING

import pytest

from factories import enqueue, task_row, task_state
from guides import blocks, run_page
from processes import HELPERS, eventually
from worker_support import worker_process

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow

# The functions of sentry_sdk that the guide uses; it is not among our dependencies.
SENTRY = """
from contextlib import contextmanager

class Scope:
    def set_tag(self, *_): ...
    def set_context(self, *_): ...

@contextmanager
def new_scope():
    yield Scope()

def capture_exception(error):
    print("captured", repr(error), flush=True)
"""


def guide_process_variables(page: str, directory: Path) -> dict[str, str]:
    """Write the Python blocks of a page as the module `guide`, and return the variables of a worker that runs it."""
    (directory / "sentry_sdk.py").write_text(SENTRY, encoding="utf-8")
    (directory / "guide.py").write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    return {"INTERLOCK_APP": "guide:app", "PYTHONPATH": f"{directory}:{HELPERS}"}


async def test_the_guide_to_errors_reports_them_and_its_records_carry_the_ids(
    url: str, database: Connection, tmp_path: Path
) -> None:
    task = await enqueue(database, "charge", {"order": 7}, max_tries=1)
    with worker_process(url, **guide_process_variables("observability.md", tmp_path)) as process:
        eventually(lambda: task_state(url, task) == "error")
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert "captured ConnectionError('the payment provider does not answer')" in output
    entries = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    (record,) = [entry for entry in entries if entry["message"] == "charging order 7"]
    assert (record["task_id"], record["task_type"], record["order"]) == (str(task), "charge", 7)
    (failed,) = [entry for entry in entries if entry["message"] == "task_failed"]
    assert "guide.py" in failed["exception"]


def test_the_logging_and_the_metrics_of_the_guide_work_in_a_program_of_its_own(tmp_path: Path) -> None:
    import subprocess  # noqa: PLC0415 - only this test needs it

    guide_process_variables("observability.md", tmp_path)
    program = (
        "import guide, logging; guide.configure_logging(); logging.warning('hello'); "
        "page = guide.metrics_page().decode(); assert 'queue_depth' in page and 'python_info' in page"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == "WARNING None None hello\n"


async def test_the_guide_to_dependencies_runs_in_a_worker(url: str, database: Connection, tmp_path: Path) -> None:
    task = await enqueue(database, "summarize", {"name": "report"})
    with worker_process(url, **guide_process_variables("dependencies.md", tmp_path)) as process:
        eventually(lambda: task_state(url, task) == "done")
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert (await task_row(database, task))["output"] == "report: True"
    messages = [json.loads(line)["message"] for line in output.splitlines() if line.startswith("{")]
    assert "load the model" in messages
    assert "release the model" in messages


async def test_the_tests_in_the_guide_to_dependencies_pass(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    guide = run_page("dependencies.md", monkeypatch)
    await guide.test_fetch()
    await guide.test_summarize()
