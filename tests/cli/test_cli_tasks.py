"""Tasks from the command line, enqueued, looked at, canceled, requeued: real processes, no traceback for a mistake."""

from __future__ import annotations

import json
import os
import pty
import signal

import pytest

from cli_support import APP, UNKNOWN, Shell
from processes import eventually

pytestmark = pytest.mark.flow


def test_enqueue_stores_arguments_and_options_as_they_were_typed(shell: Shell) -> None:
    task_id = shell.answer(
        *("enqueue", "mail", '{"to": "ada@example.org"}', "copies=2", "subject=good news", 'zip="01234"', "ratio=NaN"),
        *("--namespace", "post", "--priority", "-5", "--delay", "2h", "--max-tries", "7", "--timeout", "1.5m"),
        *("--tag", "a", "--tag", "b", "--callback-url", "https://example.org/x", "--request-id", "r1"),
        *("--backoff", "fibonacci"),
    )
    ((stored, *options),) = shell.rows(
        "select input, namespace, priority, max_tries, timeout_seconds, tags, callback_url, request_id, "
        "run_at - created_at = '2 hours', backoff ->> 'kind' from interlock.tasks where id = %s",
        task_id,
    )
    assert stored == {"to": "ada@example.org", "copies": 2, "subject": "good news", "zip": "01234", "ratio": "NaN"}
    assert options == ["post", -5, 7, 90, ["a", "b"], "https://example.org/x", "r1", True, "fibonacci"]
    again = shell.run("enqueue", "mail", "--request-id", "r1", "--json")
    assert json.loads(again.stdout) == {"id": task_id, "created": False}
    assert again.stderr == f"task {task_id} was there already\n"
    ((actor,),) = shell.rows("select actor from interlock.audit_logs where task_id = %s", task_id)
    assert actor.startswith("cli")


def test_enqueue_with_an_app_checks_the_arguments_and_takes_the_tasks_own_options(shell: Shell) -> None:
    at = "2030-01-01T09:00:00+01:00"
    ids = shell.answer("enqueue", "fail", 'message="5"', *APP, "--count", "3", "--run-at", at)
    assert len(set(ids.split())) == 3
    ((stored, tries, on_time),) = shell.rows(
        "select distinct input, max_tries, run_at = '2030-01-01 08:00Z' from interlock.tasks"
    )
    assert (stored, tries, on_time) == ({"message": "5"}, 2, True)
    unchecked = shell.answer("enqueue", "fail", "message=5", "--unchecked", INTERLOCK_APP="worker_app:app")
    assert shell.rows("select input, max_tries from interlock.tasks where id = %s", unchecked) == [({"message": 5}, 5)]


def test_enqueue_takes_the_callback_of_the_settings_of_the_app_or_of_the_flag(shell: Shell) -> None:
    """Without an app there is none that could say, but the settings may."""
    variables = {"INTERLOCK_CALLBACK_URL": "https://example.org/all"}
    ids = [
        shell.answer("enqueue", "mail"),
        shell.answer("enqueue", "mail", **variables),
        shell.answer("enqueue", "mail", "--callback-url", "https://example.org/own", **variables),
        shell.answer("enqueue", "fail", "message=x", *APP, **variables),
    ]
    stored = dict(shell.rows("select id::text, callback_url from interlock.tasks"))
    all_, own = "https://example.org/all", "https://example.org/own"
    assert [stored[task_id] for task_id in ids] == [None, all_, own, all_]


MISTAKES = [
    (["enqueue", "add", '{"a": 1'], "not valid JSON"),
    (["enqueue", "add", "a"], "write name=value"),
    (["enqueue", "add", "a=1", '{"a": 2}'], "'a' is given twice"),
    (["enqueue", "add", "a=123456789012345678901234567890"], "must fit into 64 bits"),
    (["enqueue", "add", "--run-at", "tomorrow"], "--run-at must be a time with its zone"),
    (["enqueue", "add", "--run-at", "2030-01-01T09:00:00"], "--run-at must be a time with its zone"),
    (["enqueue", "add", "--delay", "soon"], "--delay must be a duration such as 90"),
    (["enqueue", "add", "--delay", "1h", "--run-at", "2030-01-01T09:00:00Z"], "exclude each other"),
    (["enqueue", "add", "--count", "2", "--unique-key", "k"], "--count"),
    (["enqueue", "x" * 2001], "the name of a task must have at most 2,000 bytes"),
    (["enqueue", "add", "--unique-key", "x" * 2001], "unique_key must have at most 2,000 bytes"),
    (["enqueue", "add", "--request-id", "x" * 2001], "request_id must have at most 2,000 bytes"),
    (["enqueue", "add", "--limit-key", "x" * 2001], "limit_key must have at most 2,000 bytes"),
    (["enqueue", "add", "--namespace", "x" * 2001], "namespace must have at most 2,000 bytes"),
    (["enqueue", "add", "--tag", "x" * 2001, *APP], "each of the tags must have at most 2,000 bytes"),
    (["enqueue", "add", "--backoff", "often"], "the kind must be one of none, linear"),
    (["namespaces", "pause", "x" * 2001], "namespace must have at most 2,000 bytes"),
    (["enqueue", "nothing", *APP], "has no task 'nothing'; it has add,"),
    (["enqueue", "add", "a=1", *APP], "missing argument: b"),
    (["enqueue", "add", "a=1", "b=two", *APP], "argument 'b'"),
    (["status", "one"], "must be a UUID"),
    (["status", UNKNOWN], f"there is no task {UNKNOWN}"),
    (["history", UNKNOWN], f"no record of a task or job {UNKNOWN}"),
    (["tasks", "cancel"], "cancel needs ids"),
    (["tasks", "cancel", UNKNOWN, "--yes"], f"there is no task {UNKNOWN}"),
    (["tasks", "cancel", UNKNOWN, "--type", "x"], "ids or a filter"),
    (["tasks", "cancel", "--state", "done"], "not for tasks in state done"),
    (["tasks", "list", "--state", "lost"], "'lost'"),
    (["namespaces", "pause", " "], "must be a non-empty string"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(mistake[0])[:40] for mistake in MISTAKES])
def test_a_usage_error_prints_one_message_and_changes_nothing(shell: Shell, arguments: list[str], message: str) -> None:
    done = shell.run(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert shell.rows("select * from interlock.tasks") == []


def test_status_shows_the_reason_and_history_the_moves(shell: Shell) -> None:
    shell.answer("namespaces", "pause", "post", "--reason", "the relay is down")
    held = shell.answer("enqueue", "mail", "--namespace", "post")
    later = shell.answer("enqueue", "mail", "--delay", "3h")
    due = shell.answer("enqueue", "mail")
    assert "waits       namespace post is paused: the relay is down" in shell.answer("status", held)
    assert json.loads(shell.answer("status", held, "--json"))["held_by"] == "namespace"
    assert "waits       until it is due, in 2 h" in shell.answer("status", later)
    assert "waits       for a free worker that takes mail from namespace default" in shell.answer("status", due)
    assert shell.answer("namespaces", "resume", "post") == "1"
    header, *moves = shell.answer("history", held).splitlines()
    assert header.split() == [
        "time",
        "(UTC)",
        "from",
        "event",
        "to",
        "in",
        "state",
        "attempt",
        "actor",
        "role",
        "reason",
    ]
    assert moves[1].split()[2:5] == ["waiting", "release", "pending"]
    recorded = json.loads(shell.answer("history", held, "--json"))
    assert [move["event"] for move in recorded] == ["create", "release"]
    assert {move["database_role"] for move in recorded} == {"interlock"}


def test_status_without_a_task_shows_the_whole_queue(shell: Shell) -> None:
    assert "no tasks" in shell.answer("status")
    shell.answer("namespaces", "pause", "post", "--reason", "the relay is down")
    shell.rows("insert into interlock.limits (key, max_running) values ('api', 2)")
    shell.rows(
        "insert into interlock.schedules (name, type, cron, next_at) "
        "values ('nightly', 'report', '0 3 * * *', now() + interval '5 hours')"
    )
    shell.rows("select interlock.enqueue('x', namespace => 'post') from generate_series(1, 3)")
    shell.rows("select interlock.enqueue('x', limit_keys => '{api}') from generate_series(1, 4)")
    shell.rows("select interlock.enqueue('x', run_at => now() - interval '7 minutes') from generate_series(1, 2)")
    lines = [line.split() for line in shell.answer("status").splitlines()]
    assert ["default", "4", "2", "0", "0", "0", "0", "0", "7", "min"] in lines
    assert ["post", "3", "0", "0", "0", "0", "0", "0"] in lines
    assert any(line[:1] == ["post"] and line[-4:] == ["the", "relay", "is", "down"] for line in lines)
    assert ["api", "0", "of", "2", "4"] in lines
    assert any(line[:2] == ["nightly", "report"] and line[-1] == "active" for line in lines)
    told = json.loads(shell.answer("status", "--json"))
    assert told["namespaces"]["default"]["tasks"] == {"waiting": 4, "pending": 2}
    assert told["schema"] == "0001_schema"
    assert told["leader"] is None
    assert told["limits"][0]["waiting"] == 4
    listed = json.loads(shell.answer("namespaces", "list", "--json"))
    assert {namespace["name"]: namespace["held"] for namespace in listed} == {"default": 0, "post": 3}


def test_watching_goes_on_until_the_task_has_ended_or_ctrl_c(shell: Shell) -> None:
    task_id = shell.answer("enqueue", "mail")
    with shell.begun("status", task_id, "--watch", "--json") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["state"] == "pending"
        shell.rows("update interlock.tasks set state = 'canceled', event = 'cancel', finished_at = now()")
        eventually(lambda: json.loads(process.stdout.readline())["state"] == "canceled")  # type: ignore[union-attr]
        assert process.wait(60) == 0
    with shell.begun("status", "--watch") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("schema")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in errors


def test_tasks_are_listed_by_filter_and_page_by_page(shell: Shell) -> None:
    shell.rows("select interlock.enqueue('a', tags => array['red']) from generate_series(1, 3)")
    shell.rows("select interlock.enqueue('b', namespace => 'post')")
    found = json.loads(shell.answer("tasks", "list", "--json"))
    assert [task["type"] for task in found] == ["b", "a", "a", "a"]
    page = shell.run("tasks", "list", "--tag", "red", "--limit", "2", "--json")
    last = json.loads(page.stdout)[-1]["id"]
    assert f"--before {last}" in page.stderr
    (rest,) = json.loads(shell.answer("tasks", "list", "--tag", "red", "--before", last, "--json"))
    assert rest["id"] == found[-1]["id"]
    assert shell.answer("tasks", "list", "--namespace", "post", "--state", "pending").count("\n") == 1
    assert json.loads(shell.answer("tasks", "list", "--state", "done", "--state", "error", "--json")) == []


def test_an_action_is_previewed_and_refused_without_a_terminal(shell: Shell) -> None:
    shell.rows("select interlock.enqueue('a') from generate_series(1, 12)")
    refused = shell.run("tasks", "cancel", "--type", "a")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.count(" pending ") == 10
    assert "… and 2 more" in refused.stderr
    assert "cancel 12 tasks? There is no terminal to ask on; --yes does it without asking" in refused.stderr
    assert shell.rows("select distinct state from interlock.tasks") == [("pending",)]
    assert shell.answer("tasks", "cancel", "--type", "a", "--yes").startswith("12 tasks canceled")
    assert shell.answer("tasks", "requeue", "--all", "--yes") == "0 tasks requeued", "by itself only those in error"
    assert shell.answer("tasks", "requeue", "--state", "canceled", "--limit", "5", "--yes") == "5 tasks requeued"


@pytest.mark.parametrize(("reply", "state", "code"), [("y", "canceled", 0), ("n", "pending", 1)])
def test_a_person_at_the_keyboard_is_asked(shell: Shell, reply: str, state: str, code: int) -> None:
    task_id = shell.answer("enqueue", "mail")
    keyboard, terminal = pty.openpty()
    with shell.begun("tasks", "cancel", task_id, "--reason", "a test", stdin=terminal) as process:
        os.write(keyboard, f"{reply}\n".encode())
        _, errors = process.communicate(timeout=60)
    os.close(keyboard)
    os.close(terminal)
    assert process.returncode == code
    assert "cancel 1 task? [y/N]" in errors
    assert shell.state_of(task_id) == state


def test_acting_by_id_reports_each_and_fails_if_one_failed(shell: Shell) -> None:
    first, second = (shell.answer("enqueue", "mail") for _ in range(2))
    canceled = json.loads(shell.answer("tasks", "cancel", first, "--yes", "--json", "--reason", "not wanted"))
    assert canceled == {first: "canceled"}
    half = shell.run("tasks", "requeue", first, second, "--yes")
    assert half.returncode == 1
    assert half.stdout.splitlines() == [f"{first}  requeued", f"{second}  not requeued"]
    assert "only for tasks that are error, canceled" in half.stderr
    reasons = shell.rows("select reason from interlock.audit_logs where task_id = %s and event = 'cancel'", first)
    assert reasons == [("not wanted",)]


def test_stored_text_cannot_send_terminal_escapes(shell: Shell) -> None:
    shell.rows(r"select interlock.enqueue(E'\x1b[2Jevil\nline')")
    listed = shell.answer("tasks", "list")
    assert "\x1b" not in listed
    assert r"\x1b[2Jevil\nline" in listed
    assert listed.count("\n") == 1


def test_steps_are_left_out_of_a_requeue_and_refused_by_id(shell: Shell) -> None:
    ((job,),) = shell.rows("insert into interlock.jobs (task_description) values ('x') returning id")
    shell.rows("insert into interlock.tasks (type, job_id, step) values ('a', %s, 'pack')", job)
    alone = shell.answer("enqueue", "mail")
    ((step,),) = shell.rows("select id from interlock.tasks where job_id = %s", job)
    shell.rows("update interlock.tasks set state = 'canceled', event = 'cancel', finished_at = now()")
    refused = shell.run("tasks", "requeue", alone, str(step), "--yes")
    assert refused.returncode == 2
    assert f"is step 'pack' of job {job}" in refused.stderr
    assert f"interlock jobs retry {job}" in refused.stderr
    assert shell.state_of(alone) == "canceled", "nothing is done by halves"
    done = shell.run("tasks", "requeue", "--state", "canceled", "--yes")
    assert done.stdout.strip() == "1 task requeued"
    assert "left out 1 step of jobs: `interlock jobs retry`" in done.stderr
    told = json.loads(shell.answer("tasks", "requeue", "--state", "canceled", "--yes", "--json"))
    assert told == {"count": 0, "tasks": [], "steps_left_out": 1}
