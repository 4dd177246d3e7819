"""`interlock demo`: both parts, interruption at any moment, and no process left behind."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cli_support import Shell
from factories import run_sql
from interlock import Interlock
from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.store.task_admin import recover_expired_tasks
from processes import COMMAND, eventually, is_process_running

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.flow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


class Demo:
    """A demo that runs beside the test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""

    def until(self, word: str) -> str:
        """Read up to the line that has a word in it, and give that line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if word in line:
                return line
        pytest.fail(f"the demo ended without {word!r}: {self.said}")

    def pids(self) -> list[int]:
        """Wait until its processes are started, and give their ids: three workers and an orchestrator."""
        line = self.until("as processes")
        return [int(pid) for pid in re.findall(r"\d+", line.partition("as processes")[2])]

    def end(self) -> tuple[int, str]:
        """Wait for its end; give its exit code and what it said on standard error."""
        said, wrong = self.process.communicate(timeout=100)
        self.said += said
        return self.process.returncode, wrong


@contextmanager
def demo_at(shell: Shell, *arguments: str) -> Iterator[Demo]:
    with shell.begun("demo", *arguments) as process:
        yield Demo(process)


def jobs(shell: Shell) -> list[str]:
    return [status for (status,) in shell.rows("select status from interlock.jobs")]


@pytest.mark.cold
def test_both_parts_run_on_the_embedded_server_which_stops_afterwards(embedded_dir: Path) -> None:
    place = embedded_dir / "db"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("INTERLOCK_")}
    done = subprocess.run(
        [*COMMAND, "--data-dir", str(place), "demo"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=environment | {"COLUMNS": "150"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("enqueued", "crashed", "fenced", "IllegalTransition", "ImmutableRecordError"):
        assert word in done.stdout
    assert done.stdout.count("claim ") == 2
    assert "SUBMITTED, PENDING, RUNNING, COMPLETED" in done.stdout
    assert "Order 7: 6 parcels are on the night flight. That is 84.90 euros." in done.stdout
    assert "SUBMITTED, PENDING, RUNNING, FAILED: step pack failed: 1 of 2 parts failed: pack[1]" in done.stdout
    assert "order 8 was not shipped: step pack failed" in done.stdout
    eventually(lambda: not EmbeddedServer(place).status().running)
    with EmbeddedServer(place) as server:
        check_timeline(done.stdout, Shell(server.url()))


def check_timeline(said: str, shell: Shell) -> None:
    """Compare what the demo printed with what its database recorded."""
    ((job,),) = shell.rows("select id from interlock.jobs where status = 'COMPLETED'")
    assert f"interlock jobs show {job}" in said
    recorded = shell.rows(
        "select tasks.step, audit_logs.attempt, audit_logs.actor from interlock.audit_logs "
        "join interlock.tasks on tasks.id = task_id where audit_logs.event = 'claim' and job_id = %s",
        job,
    )
    shown, _, undone = said.partition("timeline")[2].partition("A workflow fails and is undone")
    for step, attempt, actor in recorded:
        worker = actor.rsplit("-", 2)[0]
        assert re.search(rf"^{re.escape(step)} +\w+ +{worker} +{attempt} +\d", shown, re.MULTILINE), step
    assert re.search(r"^standard +skipped +branch not chosen", shown, re.MULTILINE)
    assert re.search(r"^tell_support +skipped +step ship did not fail", shown, re.MULTILINE)
    ((failed,),) = shell.rows("select id from interlock.jobs where status = 'FAILED'")
    assert f"interlock diagram {failed}" in undone
    for line in (r"ship +skipped", r"tell_support +done +worker", r"compensate:reserve +done +worker"):
        assert re.search(rf"^{line}", undone, re.MULTILINE), line

    (killed, held) = re.findall(r"kill -9 (worker-\d) \(pid \d+\), which holds (\S+)", said)[0]
    ((lost_by,),) = shell.rows(
        "select audit_logs.actor from interlock.audit_logs join interlock.tasks on tasks.id = task_id "
        "where tasks.step = %s and job_id = %s and audit_logs.event = 'claim' and audit_logs.attempt = 1",
        held,
        job,
    )
    assert lost_by.startswith(f"{killed}-")
    assert re.search(rf"^{re.escape(held)} +lost +{killed} +1 ", shown, re.MULTILINE)
    assert re.search(rf"^{re.escape(held)} +done +worker-\d +2 ", shown, re.MULTILINE)
    assert f"{killed} sends no more heartbeats" in shown
    assert f"claims {held} as attempt 2" in shown


def test_a_terminal_shows_a_live_table_and_then_the_timeline(shell: Shell) -> None:
    terminal = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("INTERLOCK_")}
    done = subprocess.run(
        [sys.executable, "-c", terminal, *COMMAND, "demo", "workflow"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=inherited | {"INTERLOCK_DATABASE_URL": shell.url, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout)
    assert done.returncode == 0, said
    live, _, rest = said.partition("The job's timeline")
    assert "10 steps have ended" in live
    assert "16 of 16 steps have ended" in live
    assert "waits for 6 parts" in live
    assert re.search(r"worker-\d \(pid \d+\)  killed", live)
    assert "\x1b[1A\x1b[2K" in done.stdout  # it is drawn over itself
    assert "steps have ended" not in rest


async def test_demos_run_concurrently_and_beside_another_recovery(shell: Shell) -> None:
    with demo_at(shell) as one, demo_at(shell) as other:
        ended = asyncio.gather(*(asyncio.to_thread(demo.end) for demo in (one, other)))
        async with connect(shell.url) as connection:
            while not ended.done():
                await recover_expired_tasks(connection, actor="rival")
                await asyncio.sleep(0.01)
        for demo, (code, wrong) in zip((one, other), await ended, strict=True):
            assert (code, wrong) == (0, "")
            assert demo.said.count("claim ") == 2
            assert "RUNNING, COMPLETED" in demo.said
    assert sorted(jobs(shell)) == ["COMPLETED", "COMPLETED", "FAILED", "FAILED"]


def test_an_interrupt_cancels_the_job_and_stops_the_processes(shell: Shell) -> None:
    with demo_at(shell, "workflow") as demo:
        pids = demo.pids()
        demo.until("kill -9")
        demo.process.send_signal(signal.SIGTERM)  # the next test sends SIGINT
        assert demo.end() == (130, "interrupted\n")
    assert "stopping" in demo.said
    assert len(pids) == 4
    assert not any(map(is_process_running, pids))
    eventually(lambda: jobs(shell) == ["CANCELED"])
    ((undone,),) = shell.rows("select state from interlock.tasks where step = 'compensate:reserve'")
    assert undone == "done"


def test_an_interrupt_while_the_processes_start(shell: Shell) -> None:
    with demo_at(shell, "workflow") as demo:
        pids = demo.pids()
        demo.process.send_signal(signal.SIGINT)
        assert demo.end() == (130, "interrupted\n")
    assert not any(map(is_process_running, pids))
    assert jobs(shell) in ([], ["CANCELED"])  # they may have been quicker than the signal


def test_a_killed_demo_leaves_no_process(shell: Shell) -> None:
    with demo_at(shell, "workflow") as demo:
        pids = demo.pids()
        demo.until("running on")
        demo.process.kill()
        eventually(lambda: not any(map(is_process_running, pids)))


def test_an_unexpected_exit_of_a_process_is_one_line(shell: Shell) -> None:
    with demo_at(shell, "workflow") as demo:
        pids = demo.pids()
        demo.until("running on")
        os.kill(pids[-1], signal.SIGKILL)
        code, wrong = demo.end()
    assert (code, wrong) == (1, "interlock: the demo's orchestrator was killed by SIGKILL\n")
    assert not any(map(is_process_running, pids))


def test_a_lost_database_is_one_line(shell: Shell, server: EmbeddedServer) -> None:
    ((name,),) = shell.rows("select current_database()")
    with demo_at(shell, "workflow") as demo:
        pids = demo.pids()
        demo.until("running on")
        run_sql(server.url("postgres"), f"alter database {name} allow_connections false")
        run_sql(
            server.url("postgres"), f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"
        )
        code, wrong = demo.end()
    # the server's last word, or the driver's if that was lost with the connection
    assert (code, wrong.count("\n")) == (1, 1)
    assert re.match(
        "interlock: (terminating connection due to administrator command|.*server closed the connection)", wrong
    )
    assert not any(map(is_process_running, pids))


def test_an_unknown_part_is_refused(shell: Shell) -> None:
    refused = shell.run("demo", "opera")
    assert refused.returncode == 2
    assert "workflow" in refused.stderr


def test_the_demo_runs_the_workflow_of_the_example() -> None:
    def steps(path: Path) -> str:
        text = path.read_text(encoding="utf-8")
        return text[text.index("@wf.step\n") :].partition("\n\n\nasync def main")[0].strip()

    assert steps(ROOT / "src/interlock/cli/demo/orders.py") == steps(EXAMPLES / "order_workflow.py")


def test_the_yaml_template_equals_the_python_workflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    declared = importlib.import_module("order_workflow").wf
    (loaded,) = Interlock("postgresql://nowhere").load_templates(EXAMPLES / "order_template.yaml")

    def shape(document: dict[str, Any]) -> list[dict[str, Any]]:
        told = ("name", "kind", "namespace", "max_tries", "timeout", "branches", "over", "on_failure")
        return [{**{key: step.get(key) for key in told}, "after": set(step["after"])} for step in document["steps"]]

    assert shape(loaded.document) == shape(declared.document)


def test_the_readme_shows_the_examples_verbatim() -> None:
    blocks = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    examples = [path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")]
    assert blocks
    assert all(any(block in example for example in examples) for block in blocks)
