"""Conditions of the writes to tasks: sql/queries/tasks.sql, and the function that releases waiting tasks."""

from __future__ import annotations

from condition_scenarios import (
    HOUR,
    MINUTE,
    NOW,
    OTHER,
    SECOND,
    GuardedWrite,
    Needed,
    Redundant,
    beside,
    by_id,
    job,
    task,
)
from interlock.postgres.query import as_json

IDS_FOR_THE_PLANNER = "the join by id selects the same rows; the array makes the planner use the primary key"
JOB = job("RUNNING")


TABLE = (
    GuardedWrite(
        "shorten_leases",
        row=task("running", lease_expires_at=NOW + 2 * HOUR),
        call=lambda _: {"longest": HOUR},
        conditions=(
            Needed(
                "lease_expires_at > now + %(longest)s",
                "the tasks of all workers are taken from them",
                row=task("running", lease_expires_at=NOW + MINUTE),
            ),
        ),
    ),
    GuardedWrite(
        "hold_pending_tasks",
        row=task("pending", limit_keys=["k"]),
        call=by_id(held_by="limit"),
        conditions=(
            Needed("id = any (%(ids)s)", "every pending task of the database is held", call={"ids": [OTHER]}),
            Needed(
                "state = 'pending'",
                "a task that a worker has claimed in the meantime is taken from it",
                row=task("running"),
                caught_by="guard",
            ),
        ),
    ),
    GuardedWrite(
        "claim_pending_tasks",
        row=task("pending"),
        call=lambda _: {
            "namespaces": ["default"],
            "types": ["x"],
            "lease": MINUTE,
            "least_crashes": 0,
            "most_crashes": 0,
            "recent": HOUR,
        },
        conditions=(
            Needed(
                "crashes >= %(least_crashes)s",
                "a worker that runs one task alone claims one that is not suspected of killing workers",
                call={"least_crashes": 1, "most_crashes": 9},
                along_with=("crashes >= %(least_crashes)s [2]",),
            ),
            Needed(
                "crashes >= %(least_crashes)s [2]",
                "the same, if it was claimed and put back after the scan",
                call={"least_crashes": 1, "most_crashes": 9},
                along_with=("crashes >= %(least_crashes)s",),
            ),
            Needed(
                "crashes <= %(most_crashes)s",
                "a task that is suspected of killing its worker runs beside others",
                row=task("pending", crashes=1),
                along_with=("crashes <= %(most_crashes)s [2]",),
            ),
            Needed(
                "crashes <= %(most_crashes)s [2]",
                "the same, if its worker died after the scan",
                row=task("pending", crashes=1),
                along_with=("crashes <= %(most_crashes)s",),
            ),
            Needed(
                "state = 'pending'",
                "a task that waits for its dependencies is run",
                row=task("waiting"),
                caught_by="guard",
                along_with=("state = 'pending' [2]",),
            ),
            Needed(
                "state = 'pending' [2]",
                "a task that another worker claimed before its row was locked is claimed again",
                row=task("waiting"),
                caught_by="guard",
                along_with=("state = 'pending'",),
            ),
            Needed(
                "ctid = next.place",
                "every task of the table is claimed, whatever its namespace",
                row=beside(task("pending", namespace="elsewhere"), after=(task("pending"),)),
            ),
            Needed(
                "run_at >= now - %(recent)s",
                "a claim of recent tasks walks the entries of all tasks that were ever pending",
                row=task("pending", run_at=NOW - MINUTE),
                call={"recent": SECOND},
            ),
            Needed(
                "tasks.namespace = wanted.namespace",
                "a worker runs tasks of a namespace that it does not serve",
                row=task("pending", namespace="elsewhere"),
            ),
            Needed(
                "run_at <= now",
                "a delayed task starts at once",
                row=task("pending", run_at=NOW + SECOND),
                along_with=("run_at <= now [2]",),
            ),
            Needed(
                "run_at <= now [2]",
                "a retry that was stored after the scan starts before its backoff",
                row=task("pending", run_at=NOW + SECOND),
                along_with=("run_at <= now",),
            ),
            Needed(
                "type = (%(types)s)[1]",
                "a worker claims tasks that it has no handler for",
                row=task("pending", type="y"),
            ),
            Needed(
                "limit_keys is null",
                "a task starts without the tokens of its limits",
                row=task("pending", limit_keys=["k"]),
            ),
            Redundant(
                "%(limited_namespaces)s is not null",
                "without namespaces the function finds no task; so it is not even called",
            ),
            Needed(
                "tasks.id = any (array(…) || array(…))",
                "every task of the table is claimed, whatever its namespace",
                row=task("pending", namespace="elsewhere"),
            ),
        ),
    ),
    GuardedWrite(
        "renew_running_tasks",
        row=task("running", claims=2),
        call=lambda row: {"ids": [row["id"]], "attempts": [row["attempt"]], "progresses": [None], "lease": 2 * MINUTE},
        conditions=(
            Redundant("id = any (%(ids)s)", "the join by id selects the same rows; here it chooses the rows to lock"),
            Needed(
                "tasks.id = any (array(…))",
                "one locked row holds up the renewal of all others, whose leases run out",
                meanwhile="select from interlock.tasks where id = %(id)s for update",
                expect={"lease_expires_at": NOW + MINUTE},
            ),
            Needed(
                "tasks.id = held.id",
                "a lost lease is renewed with the attempt of another task",
                call=lambda row: {
                    "ids": [row["id"], OTHER],
                    "attempts": [1, row["attempt"]],
                    "progresses": [None, None],
                },
            ),
            Needed(
                "tasks.attempt = held.attempt",
                "a worker that lost its lease keeps the next attempt alive, and writes its progress",
                call={"attempts": [1]},
            ),
            Needed(
                "state = 'running'",
                "a task that was returned gets a lease although nobody runs it",
                row=task("pending", claims=1),
                caught_by="constraint",
            ),
        ),
    ),
    GuardedWrite(
        "save_checkpoint",
        row=task("running", claims=2),
        call=lambda row: {"id": row["id"], "attempt": row["attempt"], "checkpoint": as_json({"at": 7})},
        conditions=(
            Needed("id = %(id)s", "the checkpoint of one task overwrites those of others", call={"id": OTHER}),
            Needed(
                "attempt = %(attempt)s",
                "a worker that lost its lease overwrites the checkpoint of the attempt that runs now",
                call={"attempt": 1},
            ),
            Needed(
                "state = 'running'",
                "a handler that runs on after its task was returned still writes to it",
                row=task("pending", claims=1),
            ),
        ),
    ),
    GuardedWrite(
        "settle_running_tasks",
        row=task("running", claims=2),
        call=lambda row: {
            "ids": [row["id"]],
            "attempts": [row["attempt"]],
            "outputs": [as_json({})],
            "others": as_json([]),
            "expected": 1,
        },
        conditions=(
            Redundant("tasks.id = any (array(…))", IDS_FOR_THE_PLANNER),
            Needed(
                "tasks.id = outcome.id",
                "a task ends with the outcome of another task of the batch",
                call=lambda row: {
                    "ids": [row["id"], OTHER],
                    "attempts": [1, row["attempt"]],
                    "outputs": [as_json({})] * 2,
                },
            ),
            Needed(
                "tasks.attempt = outcome.attempt",
                "a worker that lost its lease ends the attempt of another worker",
                call={"attempts": [1]},
                caught_by="guard",
            ),
            Needed(
                "tasks.state = 'running'",
                "a task that was returned to the queue, and that another worker may claim, ends",
                row=task("pending", claims=1),
                caught_by="guard",
            ),
        ),
    ),
    GuardedWrite(
        "recover_expired_tasks",
        row=task("running", lease_expires_at=NOW - SECOND),
        call=lambda _: {"max_crashes": 3, "message": "killed its worker %s times", "recent": MINUTE},
        conditions=(
            Needed(
                "crashes + 1 < %(max_crashes)s",
                "a task that kills its workers kills them for ever",
                row=task("running", lease_expires_at=NOW - SECOND, crashes=2),
                expect={"state": "error", "event": "exhaust"},
            ),
            Needed(
                "id = any (array(…))",
                "running tasks with a valid lease are taken from their workers",
                row=task("running"),
            ),
            Needed(
                "lease_expires_at < now",
                "a running task with a valid lease is taken from its worker",
                row=task("running", lease_expires_at=NOW + SECOND),
            ),
            Needed(
                "lease_expires_at >= coalesce(now - %(recent)s, '-infinity')",
                "a recovery walks the entries of all leases that there ever were",
                row=task("running", lease_expires_at=NOW - HOUR),
            ),
            Needed(
                "cancel_requested_at is null",
                "a task that is to be canceled runs again",
                row=task("running", lease_expires_at=NOW - SECOND, cancel_requested_at=NOW - HOUR),
            ),
        ),
    ),
    GuardedWrite(
        "exonerate_tasks",
        row=task("pending", crashes=1),
        call=lambda row: {"ids": [row["id"]], "attempts": [row["attempt"]]},
        conditions=(
            Redundant("tasks.id = any (%(ids)s)", IDS_FOR_THE_PLANNER),
            Needed(
                "tasks.id = held.id",
                "a suspected task is cleared because another one ran with the number of its attempt",
                call=lambda row: {"ids": [row["id"], OTHER], "attempts": [7, row["attempt"]]},
            ),
            Needed(
                "tasks.attempt = held.attempt",
                "the end of an old attempt clears the suspicion against a later one",
                call={"attempts": [7]},
            ),
            Needed(
                "state = 'pending'",
                "the suspicion is cleared while the attempt that may kill its worker runs",
                row=task("running", crashes=1),
            ),
            Needed(
                "crashes > 0", "a task that is not suspected is written, and its workers are woken", row=task("pending")
            ),
        ),
    ),
    GuardedWrite(
        "cancel_unfinished_tasks",
        row=task("running", claims=2),
        call=lambda row: {"ids": [row["id"]], "attempts": [row["attempt"]], "running": True},
        conditions=(
            Needed("tasks.id = unwanted.id", "one cancel ends every task", call={"ids": [OTHER]}),
            Needed(
                "tasks.attempt = coalesce(unwanted.attempt, tasks.attempt)",
                "a worker that lost its lease cancels the attempt of another worker",
                call={"attempts": [1]},
            ),
            Needed(
                "(state in ('waiting', 'pending') and (%(running)s or coalesce(held_by not in ('job', 'parts'), true)) "
                "or state = 'running' and %(running)s)",
                "a task that is done becomes canceled",
                row=task("done"),
                caught_by="guard",
            ),
            Needed(
                "state in ('waiting', 'pending')",
                "a task that is done becomes canceled",
                row=task("done"),
                caught_by="guard",
            ),
            Needed(
                "(%(running)s or coalesce(held_by not in ('job', 'parts'), true))",
                "a step ends before the child job that it waits for",
                row=task("waiting", job=JOB, held_by="job"),
                call={"running": False},
            ),
            Needed(
                "state = 'running'",
                "a task that is done becomes canceled",
                row=task("done"),
                caught_by="guard",
            ),
            Needed(
                "%(running)s",
                "a running task is canceled under its worker, instead of being asked to end",
                call={"running": False},
            ),
        ),
    ),
    GuardedWrite(
        "request_cancel_of_running_tasks",
        row=task("running"),
        call=by_id(reason="canceled by ada"),
        conditions=(
            Needed("id = any (%(ids)s)", "every running task is asked to end", call={"ids": [OTHER]}),
            Needed(
                "state = 'running'",
                "a task that was returned is canceled in its next attempt without having been asked for",
                row=task("pending"),
            ),
        ),
    ),
    GuardedWrite(
        "skip_waiting_tasks",
        row=task("waiting", job=JOB),
        call=by_id(reasons=["no"], skipped_by_failure=[False]),
        conditions=(
            Redundant("tasks.id = any (%(ids)s)", IDS_FOR_THE_PLANNER),
            Needed(
                "tasks.id = unwanted.id",
                "steps of the batch get the reasons of others",
                call=lambda row: {
                    "ids": [OTHER, row["id"], OTHER],
                    "reasons": ["of another", "its own", "of another"],
                    "skipped_by_failure": [True, False, True],
                },
                expect={"reason": "its own"},
            ),
            Needed(
                "tasks.state = 'waiting'",
                "a step that runs already is skipped",
                row=task("running", job=JOB),
                caught_by="guard",
            ),
        ),
    ),
    GuardedWrite(
        "succeed_waiting_tasks",
        row=task("waiting", job=JOB, held_by="sleep"),
        call=by_id(results=["1"]),
        conditions=(
            Redundant("tasks.id = any (%(ids)s)", IDS_FOR_THE_PLANNER),
            Needed(
                "tasks.id = ended.id",
                "steps of the batch get the results of others",
                call=lambda row: {"ids": [OTHER, row["id"], OTHER], "results": ["2", "null", "2"]},
                expect={"state": "done", "output": {"result": None}},
            ),
            Needed(
                "tasks.state = 'waiting'",
                "a step that a worker runs gets a result that the worker did not give",
                row=task("running", job=JOB),
                caught_by="guard",
            ),
        ),
    ),
    GuardedWrite(
        "fail_waiting_tasks",
        row=task("waiting", job=JOB, held_by="signal"),
        call=by_id(errors=[as_json({"message": "its own"})]),
        conditions=(
            Redundant("tasks.id = any (%(ids)s)", IDS_FOR_THE_PLANNER),
            Needed(
                "tasks.id = ended.id",
                "steps of the batch get the errors of others",
                call=lambda row: {
                    "ids": [OTHER, row["id"], OTHER],
                    "errors": [as_json({"message": of}) for of in ("of another", "its own", "of another")],
                },
                expect={"reason": "its own"},
            ),
            Needed(
                "tasks.state = 'waiting'",
                "a step that a worker runs fails under it",
                row=task("running", job=JOB),
                caught_by="guard",
            ),
        ),
    ),
    GuardedWrite(
        "requeue_ended_tasks",
        row=task("error"),
        call=by_id(),
        conditions=(
            Needed("id = any (%(ids)s)", "every failed task runs again", call={"ids": [OTHER]}),
            Needed(
                "state in ('error', 'canceled')",
                "a task that is done runs again",
                row=task("done"),
                caught_by="guard",
            ),
            Needed(
                "job_id is null",
                "a step runs again although its job has taken its failure into account",
                row=task("error", job=JOB),
            ),
        ),
    ),
    GuardedWrite(
        "release_waiting_tasks()",
        row=task("waiting", held_by="limit", limit_keys=["k"]),
        call=by_id(held_by="limit"),
        sql=(
            "select ids from interlock.release_waiting_tasks(%(actor)s, %(ids)s::uuid[], %(held_by)s::text, "
            "%(reason)s::text, %(now)s::timestamptz, coalesce(%(counted_ids)s::uuid[], '{}'), "
            "coalesce(%(counted_edges)s::int[], '{}'))"
        ),
        conditions=(
            Needed(
                "given.edges is null",
                "a step of which one dependency has ended starts before the others have",
                row=task("waiting", job=JOB, unresolved=2),
                call=lambda row: {"ids": [], "counted_ids": [row["id"]], "counted_edges": [1]},
                expect={"state": "waiting", "unresolved": 1, "taken": 1},
            ),
            Redundant("tasks.id = any (task_ids || counted_ids)", IDS_FOR_THE_PLANNER),
            Needed(
                "tasks.id = given.id",
                "tasks that are only counted are released with the others of the call",
                row=task("waiting", job=JOB, unresolved=2),
                call=lambda row: {"ids": [OTHER], "held_by": None, "counted_ids": [row["id"]], "counted_edges": [1]},
                expect={"state": "waiting", "unresolved": 1, "taken": 1},
            ),
            Needed(
                "given.edges is not null",
                "a task that waits for another cause by now is released",
                row=task("waiting", held_by="namespace"),
            ),
            Needed(
                "tasks.state = 'waiting'",
                "a running task is taken from its worker",
                row=task("running"),
                call={"held_by": None},
                caught_by="guard",
            ),
            Needed(
                "only_held_by is null or tasks.held_by = only_held_by",
                "a task of a paused namespace is released because its limit has room",
                row=task("waiting", held_by="namespace", limit_keys=["k"]),
            ),
        ),
    ),
)
