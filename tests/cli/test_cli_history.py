"""`interlock history`: every recorded move, checked against the lifecycle, of any moment, as it happens."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from cli_support import UNKNOWN, Shell
from interlock.lifecycle import TASK_ROW
from interlock.store.history import HistoryRecord, check_records

pytestmark = pytest.mark.flow

START = datetime(2026, 1, 1, tzinfo=UTC)


def record(place: int, from_state: str | None, event: str, to_state: str, attempt: int) -> HistoryRecord:
    return HistoryRecord(
        id=place,
        from_state=from_state,
        event=event,
        to_state=to_state,
        attempt=attempt,
        reason=None,
        actor="w",
        database_role="interlock",
        recorded_at=START + timedelta(seconds=place),
    )


LEGAL = (
    record(0, None, "create", "pending", 0),
    record(1, "pending", "claim", "running", 1),
    record(2, "running", "retry", "pending", 1),
    record(3, "pending", "claim", "running", 2),
    record(4, "running", "succeed", "done", 2),
)


@pytest.mark.unit
def test_a_legal_history_has_no_problem_and_the_time_in_each_state() -> None:
    checked = check_records(TASK_ROW, LEGAL)
    assert [record.problem for record in checked] == [None] * 5
    assert [record.lasted for record in checked] == [timedelta(seconds=1)] * 4 + [None]


@pytest.mark.unit
def test_an_id_that_is_used_again_has_no_problem() -> None:
    again = [replace(each, id=each.id + 5, recorded_at=each.recorded_at + timedelta(hours=1)) for each in LEGAL]
    assert [each.problem for each in check_records(TASK_ROW, [*LEGAL, *again])] == [None] * 10


@pytest.mark.unit
@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ((*LEGAL[:1], *LEGAL[2:]), "it begins in 'running', but the record before it ended in 'pending'"),
        (LEGAL[1:], "the records before it are missing"),
        ((record(0, None, "create", "running", 0),), "it cannot begin as 'running'"),
        ((record(0, None, "claim", "pending", 0),), "the first record has the event 'claim', not 'create'"),
        ((*LEGAL[:1], record(1, "pending", "succeed", "done", 0)), "the lifecycle has no 'succeed' in 'pending'"),
        (
            (*LEGAL[:1], record(1, "pending", "claim", "done", 1)),
            "'claim' leads from 'pending' to 'running', not to 'done'",
        ),
        ((*LEGAL[:1], record(1, "pending", "claim", "running", 3)), "attempt 3 cannot follow attempt 0"),
        ((*LEGAL[:1], record(1, "pending", "claim", "gone", 1)), "'gone' is no state of the task lifecycle"),
    ],
)
def test_a_broken_history_is_found(records: tuple[HistoryRecord, ...], problem: str) -> None:
    found = [record.problem for record in check_records(TASK_ROW, records) if record.problem]
    assert any(problem in text for text in found), found


def test_histories_of_tasks_jobs_and_workers_are_shown_and_checked(url: str) -> None:
    shell = Shell(url)
    task = shell.answer("enqueue", "add", "a=1", "b=2", "--app", "worker_app:app")
    shell.answer("tasks", "cancel", task, "--yes")
    said = shell.answer("history", task)
    assert "pending  cancel  canceled" in said
    assert "every record follows from the lifecycle" in said
    assert "the task is canceled, for " in said
    records = json.loads(shell.answer("history", "task", task, "--json"))
    assert [one["event"] for one in records] == ["create", "cancel"]
    assert records[0]["lasted"] > 0
    assert (records[1]["lasted"], records[1]["problem"]) == (None, None)
    middle = datetime.fromisoformat(records[0]["recorded_at"]) + timedelta(seconds=records[0]["lasted"] / 2)
    said = shell.answer("history", task, "--at", middle.isoformat())
    assert "cancel" not in said
    assert "the task was pending at " in said
    job = shell.answer("submit", "chain", "--app", "jobs_app:app")
    assert "validate" in shell.answer("history", job)
    shell.rows("insert into interlock.workers (id) values ('w-1')")
    shell.rows("update interlock.workers set status = 'RUNNING', event = 'start_task' where id = 'w-1'")
    assert "IDLE  start_task  RUNNING" in shell.answer("history", "worker", "w-1")


def test_a_row_without_its_record_is_shown_in_red_and_exits_with_1(url: str) -> None:
    shell = Shell(url)
    task = shell.answer("enqueue", "add", "a=1", "b=2", "--app", "worker_app:app")
    shell.rows("alter table interlock.tasks disable trigger user")
    shell.rows("update interlock.tasks set state = 'done', event = 'succeed' where id = %s", task)
    shell.rows("alter table interlock.tasks enable always trigger record_update")
    done = shell.run("history", task)
    assert done.returncode == 1
    assert "! the row is 'done', which no record says" in done.stdout
    assert "1 records contradict the lifecycle" in done.stdout


def test_questions_without_an_answer_exit_with_2(url: str) -> None:
    shell = Shell(url)
    for arguments, message in (
        (("history", UNKNOWN), f"there is no record of a task or job {UNKNOWN}"),
        (("history", "nobody"), "there is no record of a worker nobody"),
        (("history", "limit", "mail"), "the kind must be one of task, job, worker, got 'limit'"),
        (("history", UNKNOWN, "--at", "yesterday"), "--at must be a duration such as 2h"),
        (("history", UNKNOWN, "--at", "2h", "--follow"), "give one of them"),
        (("explain", "a", "b", "c"), "give a kind and an id"),
    ):
        done = shell.run(*arguments)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr


def test_follow_prints_new_moves_until_the_end(url: str) -> None:
    shell = Shell(url)
    task = shell.answer("enqueue", "add", "a=1", "b=2", "--app", "worker_app:app")
    with shell.begun("history", task, "--follow", "--json") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "create"
        shell.answer("tasks", "cancel", task, "--yes")
        assert json.loads(process.stdout.readline())["event"] == "cancel"
        assert process.wait(timeout=60) == 0


def test_follow_connects_again_after_a_lost_connection(url: str) -> None:
    shell = Shell(url)
    task = shell.answer("enqueue", "add", "a=1", "b=2", "--app", "worker_app:app")
    with shell.begun("history", task, "--follow", "--json") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "create"
        ended = (
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
        assert shell.rows(ended)
        shell.answer("tasks", "cancel", task, "--yes")
        assert json.loads(process.stdout.readline())["event"] == "cancel"
        assert process.wait(timeout=60) == 0
