"""Administration commands: schedules, limits, workflows, workers and webhooks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from processes import eventually

if TYPE_CHECKING:
    from pathlib import Path

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
    paused = shell.answer("schedules", "pause", "pulse", "nightly", "--reason", "stock-taking")
    assert paused == "pulse  paused\nnightly  paused"
    ((actor,),) = shell.rows("select distinct paused_by from interlock.schedules")
    assert f"paused by {actor}: stock-taking" in shell.answer("schedules", "list")
    assert shell.answer("schedules", "resume", "pulse") == "pulse  resumed"
    again = shell.run("schedules", "resume", "pulse")
    assert again.returncode == 1
    assert "not resumed: pulse; `interlock schedules list`" in again.stderr
    task = shell.answer("schedules", "run", "nightly")
    assert shell.rows("select type, state from interlock.tasks where id = %s", task) == [("report", "pending")]
    unknown = shell.run("schedules", "run", "hourly")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "there is no schedule 'hourly'" in unknown.stderr
    assert shell.answer("schedules", "delete", "nightly") == "nightly  deleted"
    assert shell.rows("select name, paused_at is null from interlock.schedules") == [("pulse", True)]


def test_limits_are_set_listed_and_deleted(shell: Shell) -> None:
    first = shell.run("limits", "set", "mail", "--max-running", "5", "--max-starts", "100", "--period", "60")
    assert (first.returncode, first.stderr) == (0, "limit mail is set\n")
    assert "0 of 5" in shell.answer("limits", "list")
    (limit,) = json.loads(shell.answer("limits", "list", "--json"))
    assert (limit["key"], limit["max_starts"], limit["period"]) == ("mail", 100, 60)
    needed = "max_starts, max_weight and max_cost need a period, and a period one of them"
    pattern = "a key has no braces, and a * only at its end, where it makes it a pattern"
    bounds = "give max_running, or max_starts, max_weight or max_cost with a period"
    for arguments, message in (
        (["mail"], f"limit 'mail': {bounds}; share alone declares a key without a bound"),
        (["mail", "--max-starts", "3"], f"limit 'mail': {needed}"),
        (["a*b", "--share", "1"], f"limit 'a*b': {pattern}"),
        (["mail", "--max-starts", "3", "--period", "0"], "limit 'mail': period must be greater than 0, got 0:00:00"),
    ):
        refused = shell.run("limits", "set", *arguments)
        assert (refused.returncode, refused.stderr) == (2, f"interlock: {message}\n")
    (limit,) = json.loads(shell.answer("limits", "list", "--json"))
    assert (limit["declared"], limit["overridden_by"]) == (None, limit["overridden_by"] or "cli")
    shell.rows("select interlock.enqueue('x', limit_keys => '{mail}')")
    shell.rows("update interlock.tasks set state = 'pending', event = 'release', held_by = null")
    shown = json.loads(shell.answer("limits", "show", "mail", "--json"))
    assert ([h["state"] for h in shown["holders"]], [c["event"] for c in shown["changes"]]) == (
        ["pending"],
        ["override"],
    )
    assert "max_running 5" in shell.answer("limits", "show", "mail")
    assert shell.run("limits", "restore", "mail", "--reason", "over").stderr == "limit mail is restored\n"
    again = shell.run("limits", "restore", "mail")
    assert (again.returncode, "not overridden" in again.stderr) == (1, True)
    shell.run("limits", "set", "mail", "--max-running", "5")
    assert shell.run("limits", "delete", "mail").stderr == "limit mail is deleted\n"
    missing = shell.run("limits", "delete", "mail")
    assert missing.returncode == 1
    assert "there is no limit mail" in missing.stderr


def test_the_list_shows_each_key_with_its_rule_and_use(shell: Shell) -> None:
    shell.run("limits", "set", "llm:*", "--max-weight", "100", "--max-cost", "5", "--period", "60", "--share", "2")
    shell.rows("select interlock.enqueue('x', limit_keys => '{llm:acme}', limit_weight => '7')")
    shell.rows("insert into interlock.limit_usage (key, used_at, weight, cost) values ('llm:acme', now(), 98, 6)")
    lines = shell.answer("limits", "list").splitlines()
    (line,) = (line.split() for line in lines if line.startswith("llm:acme"))
    assert " ".join(line).startswith("llm:acme llm:* 98 of 100 per 60 s 6 of 5 per 60 s 1 2")
    found = {limit["key"]: limit for limit in json.loads(shell.answer("limits", "list", "--json"))}
    assert (found["llm:acme"]["waiting"], found["llm:*"]["share"]) == (1, 2)
    assert found["llm:acme"]["next_at"] is not None


def test_templates_are_checked_without_an_app(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "orders.yaml"
    template = """
name: orders
namespace_name: shop
version: 1.0.0
steps:
  - {name: charge, handler: {callable: Shop::Charge}, result_schema: {type: object}, timeout_seconds: 30}
  - {name: ship, handler: {callable: Shop::Ship}, dependencies: [charge]}
environments: {test: {steps: [{name: ALL, timeout_seconds: 5}]}}
"""
    file.write_text(template)
    checked = shell.run("workflows", "check", str(file))
    assert checked.returncode == 0
    assert checked.stdout.splitlines()[0] == "workflow orders, version 1.0.0, namespace shop"
    assert "ship    plain  charge" in checked.stdout
    assert [line.split()[-1] for line in checked.stdout.splitlines()[-2:]] == ["Shop::Charge", "Shop::Ship"]
    warning = f"warning: {file}, line 6: result_schema has no effect here (step charge): "
    assert checked.stderr.startswith(warning)
    found = json.loads(shell.answer("workflows", "check", str(tmp_path), "--environment", "test", "--json"))
    assert [step["timeout"] for step in found["workflows"][0]["steps"]] == [5, 5]
    assert (found["handlers"], len(found["warnings"])) == (["Shop::Charge", "Shop::Ship"], 1)
    file.write_text(template.replace("[charge]", "[pay]"))
    refused = shell.run("workflows", "check", str(file))
    assert refused.returncode == 1
    assert refused.stderr == f"interlock: {file}, line 7: step 'ship', dependencies: there is no step 'pay'\n"
    assert shell.rows("select name from interlock.workflows where name = 'orders'") == []


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
    assert chain["blocked"] is None
    strict = "update interlock.workflows set definition = jsonb_set(definition, '{timeout}', '9') where name = 'strict'"
    shell.rows(f"{strict} returning id")
    listed = shell.answer("workflows", "list", "--app", "jobs_app:app").splitlines()
    assert "is stored with another definition: timeout: 9 -> none" in listed[-1]
    assert listed[-1].startswith("blocked: workflow 'strict' version")
    unknown = shell.run("workflows", "show", "chain", "--version", "none")
    assert unknown.returncode == 2
    assert "there is no workflow chain version none; `interlock workflows list`" in unknown.stderr


def test_a_changed_definition_is_refused_and_replaced_in_development(shell: Shell) -> None:
    submit = ("submit", "strict", "--app", "jobs_app:app", "--input", '{"order": 1}')
    shell.answer("submit", "chain", "--app", "jobs_app:app")
    change = "update interlock.workflows set definition = jsonb_set(definition, '{timeout}', %s) where name = 'strict'"
    shell.rows(change, "9")
    refused = shell.run(*submit)
    assert refused.returncode == 1
    assert "is stored with another definition: timeout: 9 -> none; give the changed definition" in refused.stderr
    assert "Traceback" not in refused.stderr
    with shell.begun("worker", "--app", "jobs_app:app", "--dev"):
        _wait_for_worker(shell)
    shell.answer(*submit)
    replaced = shell.rows(
        "select strpos(version, '+') > 0 from interlock.workflows where name = 'strict' "
        "order by replaced_at nulls first"
    )
    assert replaced == [(False,), (True,)]
    shell.rows(change + " and replaced_at is null", "8")
    again = shell.run(*submit, INTERLOCK_DEV="true")
    assert "--dev does not replace the stored one: unfinished jobs use it, 1 of them" in again.stderr


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
    assert shell.answer("webhooks", "discard", str(second)) == "1"
    assert shell.answer("webhooks", "retry", "--all") == "0"
    assert shell.rows("select id from interlock.callbacks where given_up_at is not null") == []
    assert second != first
