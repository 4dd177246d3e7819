"""Jobs from the command line: submitted, listed, shown, acted on, and seen in the status."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest

from cli_support import UNKNOWN, Shell
from jobs_app import chain
from processes import eventually

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

pytestmark = pytest.mark.flow

APP = ("--app", "jobs_app:app")


@contextmanager
def orchestrating(shell: Shell, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run an orchestrator until the block ends; then Ctrl-C must stop it cleanly."""
    with shell.begun("orchestrator", *arguments) as process:
        yield process
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "orchestrator_stopped" in errors


def status_of(shell: Shell, job: str) -> str:
    ((status,),) = shell.rows("select status from interlock.jobs where id = %s", job)
    return str(status)


def test_a_key_refuses_returns_queues_or_debounces_a_job(shell: Shell) -> None:
    keyed = ("submit", "chain", *APP, "--key", "k")
    first = shell.answer(*keyed)
    refused = shell.run(*keyed, "--on-conflict", "reject")
    assert refused.returncode == 1
    assert f"workflow chain: job {first} has the key 'k' and has not ended" in refused.stderr
    assert "Traceback" not in refused.stderr
    existing = shell.run(*keyed, "--on-conflict", "return_existing", "--json")
    assert json.loads(existing.stdout) == {"id": first, "created": False}
    queued = shell.answer(*keyed)
    shown = shell.answer("jobs", "show", queued)
    assert f"waits for job {first} with key 'k'" in shown
    assert f"it waits for job {first} with key 'k'" in shell.answer("explain", queued)
    debounced = shell.answer(*keyed, "--debounce", "3600", "--debounce-max", "7200")
    assert status_of(shell, debounced) == "SUBMITTED"
    assert "(debounce)" in shell.answer("explain", debounced)


def test_a_job_is_submitted_listed_and_shown(shell: Shell) -> None:
    request = ("--input", '{"n": 1}', "--request-id", "r", "--worker-count", "2")
    job = shell.answer("submit", "chain", *APP, *request)
    again = shell.run("submit", "chain", *request, "--json")
    assert json.loads(again.stdout) == {"id": job, "created": False}
    assert "was there already" in again.stderr
    listed = shell.answer("jobs", "list", "--status", "PENDING", "--workflow", "chain")
    assert job in listed
    assert "no live worker serves namespace 'default'" in listed
    assert [found["id"] for found in json.loads(shell.answer("jobs", "list", "--json"))] == [job]
    shown = shell.answer("jobs", "show", job, "--history")
    assert f"chain {chain.version}" in shown
    assert "waits for first" in shown
    assert "validate" in shown
    document = json.loads(shell.answer("jobs", "show", job, "--json"))
    assert (document["input"], document["worker_count"]) == ({"n": 1}, 2)
    assert [step["step"] for step in document["steps"]] == ["first", "second", "third"]


def test_jobs_are_listed_by_tag_attribute_status_and_time(shell: Shell) -> None:
    number = shell.answer("submit", "chain", *APP, "--tag", "eu", "--tag", "vip", "--attribute", "customer=7")
    text = shell.answer("submit", "chain", *APP, "--tag", "eu", "--attribute", 'customer="7"', "--attribute", "by=a=b")

    def listed(*flags: str) -> list[str]:
        return [found["id"] for found in json.loads(shell.answer("jobs", "list", "--json", *flags))]

    assert listed("--tag", "eu") == [text, number]
    assert listed("--tag", "eu", "--tag", "vip") == [number]
    assert listed("--attribute", "customer=7", "--status", "PENDING", "--status", "FAILED", "--since", "2h") == [number]
    assert listed("--attribute", "by=a=b") == [text]
    assert listed("--since", "2000-01-01T00:00:00Z", "--until", "2h") == []
    assert listed("--parent", number) == []
    assert listed("--workflow", "chain", "--version", "nope") == []
    shown = shell.answer("jobs", "show", number)
    assert "eu, vip" in shown
    assert '{"customer":7}' in shown
    for flags, message in (
        (("--since", "soon"), "--since must be a duration such as 2h, or a time with its zone"),
        (("--until", "2026-01-01"), "--until must be a time with its zone"),
        (("--attribute", "customer"), "--attribute must be a name and a value, such as customer=7, got 'customer'"),
        (("--version", "1"), "version '1' needs a workflow"),
    ):
        refused = shell.run("jobs", "list", *flags)
        assert refused.returncode == 2, refused
        assert message in refused.stderr


def test_a_job_is_canceled_after_a_yes_only(shell: Shell) -> None:
    job = shell.answer("submit", "chain", *APP)
    refused = shell.run("jobs", "cancel", job)
    assert refused.returncode == 2
    assert "There is no terminal to ask on" in refused.stderr
    assert status_of(shell, job) == "PENDING"
    shell.answer("jobs", "cancel", job, "--yes", "--reason", "not wanted")
    assert status_of(shell, job) == "CANCELED", "nothing of it ran, so there was nothing to wait for"
    late = shell.run("jobs", "cancel", job, "--yes")
    assert late.returncode == 1
    assert "nothing was changed" in late.stderr
    assert "not wanted" in shell.answer("jobs", "show", job)


def test_archived_messages_can_be_resent(shell: Shell) -> None:
    job = shell.answer("submit", "chain", *APP)
    message = json.dumps({"job_id": job})
    shell.rows(
        "insert into interlock.orchestration_failures (msg_id, job_id, message, error) values (7, %s, %s, 'x') "
        "returning msg_id",
        job,
        message,
    )
    assert "1 sent again" in shell.run("jobs", "replay").stderr
    assert "1 sent again" in shell.run("jobs", "replay", job).stderr
    unknown = shell.run("jobs", "replay", UNKNOWN)
    assert unknown.returncode == 2
    assert "there is no job" in unknown.stderr
    with orchestrating(shell):
        eventually(lambda: shell.rows("select count(*) from interlock.orchestration_failures") == [(0,)])
    assert status_of(shell, job) == "PENDING"


def test_canceling_a_compensating_job_names_the_alternatives(shell: Shell) -> None:
    job = shell.answer("submit", "chain", *APP)
    shell.rows(
        "update interlock.jobs set status = 'RUNNING', event = 'allocate_resources', ending = 'FAILED', "
        "compensating = true, reason = 'compensating after: step x failed' where id = %s returning id",
        job,
    )
    ((undo,),) = shell.rows(
        "insert into interlock.tasks (type, state, job_id, step) values ('undo', 'pending', %s, 'compensate:first') "
        "returning id",
        job,
    )
    done = shell.run("jobs", "cancel", job, "--yes")
    assert done.returncode == 1
    assert "the job is compensating after: step x failed" in done.stderr
    assert f"`interlock tasks cancel {undo}` cancels the compensation compensate:first" in done.stderr


def test_signals_and_approvals_are_sent_once(shell: Shell) -> None:
    job = shell.answer("submit", "gates", *APP)
    assert shell.answer("jobs", "signal", job, "paid", '{"euros": 5}', "--request-id", "r") == "sent"
    again = shell.run("jobs", "signal", job, "paid", '{"euros": 5}', "--request-id", "r")
    assert (again.returncode, again.stdout) == (1, "already sent\n")
    reused = shell.run("jobs", "signal", job, "paid", '{"euros": 6}', "--request-id", "r")
    assert reused.returncode == 2
    assert "request id 'r' was used for a signal with another name or payload" in reused.stderr
    assert shell.answer("jobs", "approve", job, "boss", "--reject", "--comment", "too dear") == "sent"
    rows = shell.rows("select name, payload from interlock.signals order by name")
    assert [name for name, _ in rows] == ["boss", "paid"]
    assert rows[0][1]["approved"] is False
    assert rows[0][1]["comment"] == "too dear"
    assert rows[1][1] == {"euros": 5}
    shown = shell.answer("jobs", "show", job)
    assert '{"euros":5}' in shown
    assert [sent["name"] for sent in json.loads(shell.answer("jobs", "show", job, "--json"))["signals"]] == [
        "paid",
        "boss",
    ]


def test_the_inbox_lists_what_waits_and_a_wrong_payload_is_refused(shell: Shell) -> None:
    job = shell.answer("submit", "desk", *APP, "--input", '{"clerk": "eva"}')
    found = shell.answer("jobs", "inbox")
    assert [line.split()[:5] for line in found.splitlines()[1:]] == [
        [job, "desk", "form", "signal", "form"],
        [job, "desk", "release", "approval", "release"],
    ]
    assert found.splitlines()[1].split()[5] == "eva"
    (item,) = json.loads(shell.answer("jobs", "inbox", "--assignee", "ops", "--kind", "approval", "--json"))
    assert (item["step"], item["assignee"], item["wait_until"]) == ("release", "ops", None)
    assert shell.answer("jobs", "inbox", "--assignee", "nobody").count("\n") == 0
    wrong = shell.run("jobs", "signal", job, "form", '{"pages": "two"}')
    assert wrong.returncode == 2
    assert "signal 'form': payload.pages: must be of type integer" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert shell.answer("jobs", "signal", job, "form", '{"pages": 2}') == "sent"
    assert "form" not in shell.answer("jobs", "inbox")
    assert shell.answer("jobs", "approve", job, "release") == "sent"
    again = shell.run("jobs", "approve", job, "release", "--reject")
    assert (again.returncode, again.stdout) == (1, "already sent\n")
    assert "the first one counts" in again.stderr
    assert shell.run("jobs", "inbox", "--kind", "sleep").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "nothing", *APP], "there is no workflow 'nothing'"),
        (["submit", "chain", *APP, "--input", "[1]"], "--input must be a JSON object"),
        (["submit", "chain", *APP, "--input", "{"], "--input is not valid JSON"),
        (["submit", "chain", *APP, "--input", '{"n": NaN}'], "NaN is not valid in JSON"),
        (["submit", "strict", *APP, "--input", "{}"], "order"),
        (["submit", "chain", *APP, "--input", '{"n": "a"}'], "must be of type integer (parameter 'n' of step 'first')"),
        (["submit", "chain", *APP, "--worker-count", "0"], "worker_count must be"),
        (["submit", "chain", *APP, "--debounce", "5"], "on_conflict and debounce need a key"),
        (["submit", "chain", *APP, "--key", "k", "--debounce-max", "5"], "debounce_max needs debounce"),
        (["jobs", "show", UNKNOWN], "there is no job"),
        (["jobs", "show", "x"], "must be a UUID"),
        (["jobs", "signal", UNKNOWN, "paid", "{"], "the payload is not valid JSON"),
        (["orchestrator", "--mode", "loud"], "'loud'"),
    ],
)
def test_a_usage_error_is_one_message(shell: Shell, arguments: list[str], message: str) -> None:
    done = shell.run(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_metrics_of_an_orchestrator_stay_on_this_machine(shell: Shell) -> None:
    done = shell.run("orchestrator", "--metrics-port", "0", INTERLOCK_METRICS_HOST="::")
    assert done.returncode == 2
    assert "metrics have no authentication" in done.stderr


def test_status_shows_jobs_the_queue_and_processes(shell: Shell) -> None:
    assert "jobs of" not in shell.answer("status")
    shell.answer("submit", "chain", *APP)
    with orchestrating(shell, "--name", "ada"):
        eventually(lambda: "ada-orchestrator-" in shell.answer("status"))
        told = shell.answer("status")
        assert "jobs of" in told
        assert "orchestrators  1" in told
        assert "0 wait for an orchestrator" in told
        assert "fallback_hits" in told
        document = json.loads(shell.answer("status", "--json"))
        assert document["jobs"] == {"default": {"PENDING": 1}}
        assert document["orchestration"]["waiting"] == 0
        (process,) = document["processes"]
        assert (process["role"], process["status"]) == ("orchestrator", "RUNNING")
    with psycopg.connect(shell.url) as connection:
        (state,) = connection.execute("select status from interlock.workers").fetchone() or ("",)
    assert state == "COMPLETED"


def test_a_job_is_done_by_a_worker_and_an_orchestrator(shell: Shell) -> None:
    with orchestrating(shell), shell.begun("worker", *APP, "--concurrency", "4") as worker:
        assert shell.answer("submit", "chain", *APP, "--input", '{"n": 1}', "--wait") == '{"third":"got 20"}'
        failed = shell.run("submit", "broken", *APP, "--wait", "--json")
        assert failed.returncode == 1
        assert json.loads(failed.stdout)["status"] == "FAILED"
        assert "fine no more" in failed.stderr
        late = shell.run("submit", "gates", *APP, "--wait-timeout", "0.2")
        assert late.returncode == 1
        assert "the job continues" in late.stderr
        for step in (["bad"], []):
            retried = shell.run("jobs", "retry", json.loads(failed.stdout)["id"], *step, "--wait")
            assert retried.returncode == 1
            assert "fine no more" in retried.stderr
        worker.send_signal(signal.SIGINT)
        worker.communicate(timeout=60)
    assert worker.returncode == 0


def test_a_job_id_given_as_a_task_id_names_the_job_command(shell: Shell) -> None:
    job = shell.answer("submit", "chain", *APP, "--input", '{"n": 1}')
    done = shell.run("status", job)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"interlock: {job} is a job, not a task: `interlock jobs show {job}`\n"
    assert job in shell.answer("jobs", "show", job), "and that is so"
