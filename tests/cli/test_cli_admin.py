"""Administration commands: schedules, limits, workflows, workers and webhooks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from processes import eventually

if TYPE_CHECKING:
    from cli_support import Shell

pytestmark = pytest.mark.flow


def test_schedules_are_listed_paused_resumed_and_deleted(shell: Shell) -> None:
    shell.rows(
        "insert into interlock.schedules (name, type, every, next_at) "
        "values ('pulse', 'beat', '90 s', now()), ('nightly', 'report', '1 day', now())"
    )
    listed = shell.answer("schedules", "list")
    assert "every 90 s" in listed
    assert [schedule["name"] for schedule in json.loads(shell.answer("schedules", "list", "--json"))] == [
        "nightly",
        "pulse",
    ]
    assert shell.answer("schedules", "pause", "pulse", "nightly") == "pulse  paused\nnightly  paused"
    assert "paused" in shell.answer("schedules", "list")
    assert shell.answer("schedules", "resume", "pulse") == "pulse  resumed"
    again = shell.run("schedules", "resume", "pulse")
    assert again.returncode == 1
    assert "not resumed: pulse; `interlock schedules list`" in again.stderr
    assert shell.answer("schedules", "delete", "nightly") == "nightly  deleted"
    assert shell.rows("select name, paused_at is null from interlock.schedules") == [("pulse", True)]


def test_limits_are_set_listed_and_deleted(shell: Shell) -> None:
    first = shell.run("limits", "set", "mail", "--max-running", "5", "--max-starts", "100", "--period", "60")
    assert (first.returncode, first.stderr) == (0, "limit mail is stored\n")
    same = shell.run("limits", "set", "mail", "--max-running", "5", "--max-starts", "100", "--period", "60")
    assert same.stderr == "limit mail is unchanged\n"
    assert "0 of 5" in shell.answer("limits", "list")
    (limit,) = json.loads(shell.answer("limits", "list", "--json"))
    assert (limit["key"], limit["max_starts"], limit["period"]) == ("mail", 100, 60)
    for arguments, message in (
        (["mail"], "limit 'mail': give max_running, or max_starts and period"),
        (["mail", "--max-starts", "3"], "limit 'mail': max_starts and period must be given together"),
        (["mail", "--max-starts", "3", "--period", "0"], "limit 'mail': period must be greater than 0, got 0:00:00"),
    ):
        refused = shell.run("limits", "set", *arguments)
        assert (refused.returncode, refused.stderr) == (2, f"interlock: {message}\n")
    assert shell.run("limits", "delete", "mail").stderr == "limit mail is deleted\n"
    missing = shell.run("limits", "delete", "mail")
    assert missing.returncode == 1
    assert "there is no limit mail" in missing.stderr


def test_workflows_are_listed_and_shown(shell: Shell) -> None:
    shell.answer("submit", "chain", "--app", "jobs_app:app")
    (chain,) = [
        workflow for workflow in json.loads(shell.answer("workflows", "list", "--json")) if workflow["name"] == "chain"
    ]
    assert "chain" in shell.answer("workflows", "list")
    shown = shell.answer("workflows", "show", "chain")
    assert [line.split()[0] for line in shown.split("\n\n")[1].splitlines()[1:]] == ["first", "second", "third"]
    document = json.loads(shell.answer("workflows", "show", "chain", "--version", chain["version"], "--json"))
    assert document["definition"] == chain["definition"]
    unknown = shell.run("workflows", "show", "chain", "--version", "none")
    assert unknown.returncode == 2
    assert "there is no workflow chain version none; `interlock workflows list`" in unknown.stderr


def test_workers_are_listed_moved_and_asked(shell: Shell) -> None:
    with shell.begun("worker", "--app", "worker_app:app", "--name", "here"):
        worker = _wait_for_worker(shell)
        assert worker["role"] == "worker"
        id_ = worker["id"]
        assert "RUNNING" in shell.answer("workers", "list")
        answers = json.loads(shell.answer("workers", "status", id_))
        assert answers[id_]["namespaces"] == ["default"]
        assert json.loads(shell.answer("workers", "subscribe", id_, "mail"))[id_] == {"namespaces": ["default", "mail"]}
        shell.answer("workers", "unsubscribe", id_, "mail")
        last = shell.run("workers", "unsubscribe", id_, "default")
        assert last.returncode == 1
        assert "at least one namespace" in last.stdout
        assert json.loads(shell.answer("workers", "refresh", id_))[id_] == {"refreshed": True}
        moved = shell.run("workers", "pause", id_, "--reason", "disk replacement")
        assert (moved.returncode, moved.stderr) == (0, f"worker {id_}: RUNNING -> PAUSED\n")
        refused = shell.run("workers", "pause", id_)
        assert refused.returncode == 1
        assert "PAUSED" in refused.stderr
        shell.answer("workers", "resume", id_)
        shown = shell.answer("workers", "show", id_)
        assert "disk replacement" in shown
        assert "resume" in shown
        document = json.loads(shell.answer("workers", "show", id_, "--json"))
        assert [move["to_state"] for move in document["history"]][-2:] == ["PAUSED", "RUNNING"]
    silent = shell.run("workers", "status", "nobody", "--timeout", "0.2")
    assert (silent.returncode, silent.stdout) == (1, "{}\n")
    assert "no answer within 0.2 s" in silent.stderr
    unknown = shell.run("workers", "show", "nobody")
    assert (unknown.returncode, unknown.stderr) == (2, "interlock: there is no worker nobody\n")


def _wait_for_worker(shell: Shell) -> dict[str, str]:
    found: list[dict[str, str]] = []

    def is_running() -> bool:
        found[:] = json.loads(shell.answer("workers", "list", "--status", "RUNNING", "--json"))
        return bool(found)

    eventually(is_running)
    return found[0]


def test_webhooks_that_were_given_up_are_listed_and_retried(shell: Shell) -> None:
    for url in ("http://a", "http://b"):
        shell.rows(
            "insert into interlock.callbacks (task_id, attempt, state, url, error, given_up_at) "
            "values (gen_random_uuid(), 1, 'done', %s, 'answered 500', now())",
            url,
        )
    listed = shell.answer("webhooks", "list")
    assert "http://a" in listed
    assert "answered 500" in listed
    first, second = (webhook["id"] for webhook in json.loads(shell.answer("webhooks", "list", "--json")))
    neither = shell.run("webhooks", "retry")
    assert neither.returncode == 2
    assert "retry needs the ids of webhooks, or --all" in neither.stderr
    assert shell.answer("webhooks", "retry", str(first)) == "1"
    gone = shell.run("webhooks", "retry", str(first))
    assert (gone.returncode, gone.stdout) == (1, "0\n")
    assert shell.answer("webhooks", "retry", "--all") == "1"
    assert shell.rows("select id from interlock.callbacks where given_up_at is not null") == []
    assert second != first
