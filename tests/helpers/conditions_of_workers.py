"""Conditions of the writes to worker rows and of the outbox: workers.sql, webhooks.sql, leaders.sql, retention.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from condition_scenarios import (
    HOUR,
    MINUTE,
    NOBODY,
    NOW,
    OTHER,
    SECOND,
    GuardedWrite,
    Needed,
    Redundant,
    beside,
    by_id,
    job,
    record,
    task,
    worker,
)

if TYPE_CHECKING:
    from condition_scenarios import MakeRow

ENDED = UUID(int=2)  # the id of a job that has ended
ELSEWHERE = {"id": NOBODY}


def moving(name: str, before: str, after: MakeRow, risk: str) -> GuardedWrite:
    """List the two conditions of a statement that moves one worker: a second call must change nothing."""
    return GuardedWrite(
        name,
        row=worker(before),
        call=by_id(reason="why"),
        conditions=(
            Needed("id = %(id)s", "every worker is moved at once", call=ELSEWHERE),
            Needed(f"status = '{before}'", risk, row=after),
        ),
    )


def webhook(**columns: Any) -> MakeRow:
    """Make a webhook of the outbox."""
    return record(
        "callbacks",
        **{"task_id": OTHER, "attempt": 1, "state": "done", "url": "http://x", "next_try_at": NOW - HOUR, **columns},
    )


def sent(row: dict[str, Any]) -> dict[str, Any]:
    """Report what became of a webhook that was sent."""
    return {"ids": [row["id"]], "tries": [row["tries"]], "errors": ["x"], "delays": [60.0]}


AGES = {"done": HOUR, "error": HOUR, "canceled": HOUR, "skipped": HOUR, "stretch": 100}

TABLE = (
    moving("start_idle_worker", "IDLE", worker("RUNNING"), "a worker that was started before gets another reason"),
    moving("pause_running_worker", "RUNNING", worker("PAUSED"), "a worker that was paused before gets another reason"),
    moving(
        "resume_paused_worker",
        "PAUSED",
        worker("RUNNING", events=("start_task", "pause", "resume")),
        "a worker that was resumed before gets another reason",
    ),
    moving("complete_running_worker", "RUNNING", worker("COMPLETED"), "an ended worker gets another reason"),
    moving("fail_running_worker", "RUNNING", worker("FAILED"), "the reason of the failure is overwritten"),
    GuardedWrite(
        "terminate_worker",
        row=worker("RUNNING"),
        call=by_id(reason="why"),
        conditions=(
            Needed("id = %(id)s", "every worker is terminated", call=ELSEWHERE),
            Needed("status <> 'TERMINATED'", "an ended worker gets another reason", row=worker("TERMINATED")),
        ),
    ),
    GuardedWrite(
        "request_kill",
        row=worker("RUNNING"),
        call=by_id(),
        conditions=(Needed("id = %(id)s", "the processes of all workers are killed", call=ELSEWHERE),),
    ),
    GuardedWrite(
        "record_heartbeat",
        row=worker("RUNNING", generation=2),
        call=by_id(generation=2, lease=MINUTE, namespaces=[], types=[], metadata="{}"),
        conditions=(
            Needed("id = %(id)s", "one heartbeat keeps every worker alive", call=ELSEWHERE),
            Needed(
                "status in ('IDLE', 'RUNNING', 'PAUSED')",
                "a process goes on although its worker was terminated",
                row=worker("TERMINATED", generation=2),
            ),
            Needed(
                "generation = coalesce(%(generation)s, generation)",
                "the process that was replaced goes on beside the new one, whose row it keeps alive",
                call={"generation": 1},
            ),
        ),
    ),
    GuardedWrite(
        "claim_due_webhooks",
        row=webhook(),
        call=lambda _: {"visibility": MINUTE},
        conditions=(
            Needed("id = any (array(…))", "every webhook is sent again at once", row=webhook(next_try_at=NOW + HOUR)),
            Needed(
                "given_up_at is null",
                "a webhook that was given up is sent for ever",
                row=webhook(given_up_at=NOW - HOUR),
            ),
            Needed("next_try_at <= now", "two senders send one webhook", row=webhook(next_try_at=NOW + SECOND)),
        ),
    ),
    GuardedWrite(
        "delete_delivered_webhooks",
        row=webhook(tries=2),
        call=sent,
        conditions=(
            Needed("callbacks.id = delivered.id", "webhooks that were not sent are deleted", call={"ids": [0]}),
            Needed(
                "callbacks.tries = delivered.tries",
                "a sender that was too slow deletes the webhook of the sender that has it now",
                call={"tries": [1]},
            ),
        ),
    ),
    GuardedWrite(
        "postpone_failed_webhooks",
        row=webhook(tries=2),
        call=sent,
        conditions=(
            Needed("callbacks.id = failed.id", "one failure postpones every webhook", call={"ids": [0]}),
            Needed(
                "callbacks.tries = failed.tries",
                "a sender that was too slow postpones the webhook that another sender is sending",
                call={"tries": [1]},
            ),
        ),
    ),
    GuardedWrite(
        "retry_given_up_webhooks",
        row=webhook(tries=9, given_up_at=NOW - HOUR),
        call=lambda _: {"ids": None},
        conditions=(
            Needed(
                "given_up_at is not null",
                "a webhook that is being sent is sent a second time",
                row=webhook(tries=2, next_try_at=NOW + MINUTE),
            ),
            Needed(
                "(%(ids)s is null or id = any (%(ids)s))", "webhooks that were not named are sent", call={"ids": [0]}
            ),
        ),
    ),
    GuardedWrite(
        "discard_given_up_webhooks",
        row=webhook(given_up_at=NOW - HOUR),
        call=lambda _: {"ids": None},
        conditions=(
            Needed("given_up_at is not null", "webhooks that are to be sent are deleted", row=webhook()),
            Needed(
                "(%(ids)s is null or id = any (%(ids)s))", "webhooks that were not named are deleted", call={"ids": [0]}
            ),
        ),
    ),
    GuardedWrite(
        "delete_given_up_webhooks",
        row=webhook(given_up_at=NOW - HOUR),
        call=lambda _: {"age": HOUR},
        conditions=(Needed("given_up_at <= now - %(age)s", "webhooks that are to be sent are deleted", row=webhook()),),
    ),
    GuardedWrite(
        "shorten_leads",
        row=record("leaders", "duty", duty="d", holder="a", expires_at=NOW + 2 * HOUR),
        call=lambda _: {"longest": HOUR},
        conditions=(
            Needed(
                "expires_at > now + %(longest)s",
                "every leader is deposed",
                row=record("leaders", "duty", duty="d", holder="a", expires_at=NOW + MINUTE),
            ),
        ),
    ),
    GuardedWrite(
        "shorten_worker_leases",
        row=worker("RUNNING", seen_until=NOW + 2 * HOUR),
        call=lambda _: {"longest": HOUR},
        conditions=(
            Redundant(
                "greatest(seen_until, supervised_until) > now + %(longest)s",
                "the leases of other workers keep their values, but every row would be written",
            ),
        ),
    ),
    GuardedWrite(
        "acquire_leadership",
        row=record("leaders", "duty", duty="d", holder="a", expires_at=NOW + MINUTE),
        call=lambda _: {"duty": "d", "holder": "a", "lease": HOUR},
        conditions=(
            Needed(
                "leaders.holder = excluded.holder or leaders.expires_at <= now",
                "two processes are the leader at once",
                call={"holder": "b"},
            ),
        ),
    ),
    GuardedWrite(
        "resign_leadership",
        row=record("leaders", "duty", duty="d", holder="a", expires_at=NOW + MINUTE),
        call=lambda _: {"duty": "d", "holder": "a"},
        conditions=(
            Needed("duty = %(duty)s", "a process resigns all of its leads", call={"duty": "e"}),
            Needed("holder = %(holder)s", "a former leader deposes the present one", call={"holder": "b"}),
        ),
    ),
    GuardedWrite(
        "delete_ended_tasks",
        row=task("done", at=NOW - 2 * HOUR),
        call=lambda _: AGES,
        conditions=(
            Needed(
                "id > coalesce(%(after)s, '00000000-0000-0000-0000-000000000000')",
                "one call walks the whole table instead of a range of it",
                call=lambda row: {"after": row["id"]},
            ),
            Needed(
                "id < coalesce(%(before)s, 'ffffffff-ffff-ffff-ffff-ffffffffffff')",
                "one call walks the whole table instead of a range of it",
                call=lambda row: {"before": row["id"]},
            ),
            Needed("id = any (array(…))", "every ended task is deleted, whatever its age", row=task("done", at=NOW)),
            Needed(
                "since <= now",
                "a task is deleted before its age",
                row=task("done", at=NOW),
            ),
            Needed(
                "job_id is null",
                "a step is deleted while its job needs its result",
                row=task("done", job=job("RUNNING"), at=NOW - 2 * HOUR),
            ),
            Needed(
                "state in ('done', 'error', 'canceled', 'skipped')",
                "a task that is requeued at this moment is deleted",
                row=task("error", at=NOW - 2 * HOUR),
                meanwhile="update interlock.tasks set state = 'pending', event = 'requeue', finished_at = null "
                "where id = %(id)s",
                expect={"state": "pending"},
                caught_by="guard",
            ),
        ),
    ),
    GuardedWrite(
        "delete_steps_of_jobs",
        row=task("error", job=job("COMPLETED", id=ENDED)),
        call=lambda _: {"ids": [ENDED]},
        conditions=(
            Needed("id = any (array(…))", "steps of all jobs are deleted", call={"ids": [OTHER]}),
            Needed("tasks.job_id = wanted.job_id", "steps of another job are deleted", call={"ids": [OTHER]}),
            Redundant(
                "state in ('done', 'error', 'canceled', 'skipped')",
                "repeated for the row that is deleted; here, steps that cannot be deleted do not count for the batch",
            ),
            Needed(
                "state in ('done', 'error', 'canceled', 'skipped') [2]",
                "a step that is requeued by SQL at this moment is deleted",
                meanwhile="update interlock.tasks set state = 'pending', event = 'requeue' where id = %(id)s",
                expect={"state": "pending"},
                caught_by="guard",
            ),
        ),
    ),
    GuardedWrite(
        "delete_jobs_without_steps",
        row=job("COMPLETED"),
        call=by_id(),
        conditions=(
            Needed("id = any (%(ids)s)", "jobs are deleted before their age", call={"ids": [OTHER]}),
            Needed(
                "status in ('COMPLETED', 'FAILED', 'CANCELED')",
                "a job is deleted while it runs",
                row=job("RUNNING"),
                caught_by="guard",
            ),
            Needed(
                "not exists (interlock.tasks …)",
                "the deletion of one job whose steps are not deleted yet fails, and the others of the batch stay",
                row=beside(
                    job("COMPLETED", id=ENDED),
                    after=(record("tasks", type="x", state="pending", job_id=ENDED, step="a"),),
                ),
                caught_by="constraint",
            ),
            Needed(
                "not exists (interlock.jobs …)",
                "the deletion of one job whose children are not deleted yet fails, and the others of the batch stay",
                row=beside(job("COMPLETED", id=ENDED), after=(job("COMPLETED", parent_job_id=ENDED, depth=1),)),
                caught_by="constraint",
            ),
        ),
    ),
    GuardedWrite(
        "delete_ended_workers",
        row=worker("TERMINATED", seen_until=NOW - 2 * HOUR),
        call=lambda _: {"age": HOUR},
        conditions=(
            Needed(
                "id = any (array(…))",
                "the rows of all workers are deleted, whatever their age",
                row=worker("TERMINATED", seen_until=NOW),
            ),
            Needed(
                "status in ('COMPLETED', 'FAILED', 'TERMINATED')",
                "the row of a worker that has not ended is deleted",
                row=worker("RUNNING", seen_until=NOW - 2 * HOUR),
                caught_by="guard",
            ),
            Needed(
                "coalesce(seen_until, heartbeat_at, updated_at) <= now - %(age)s",
                "the row of a worker is deleted before its age",
                row=worker("TERMINATED", seen_until=NOW),
            ),
        ),
    ),
)
