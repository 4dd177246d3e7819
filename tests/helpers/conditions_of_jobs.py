"""Conditions of the writes to jobs: sql/queries/jobs.sql, those of orchestration.sql, and functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from condition_scenarios import (
    HOUR,
    NOW,
    OTHER,
    GuardedWrite,
    Needed,
    Redundant,
    beside,
    by_id,
    changed,
    job,
    record,
    task,
    worker,
)
from interlock.postgres.query import as_json

if TYPE_CHECKING:
    from condition_scenarios import Call, MakeRow, Row

AHEAD = UUID(int=2)  # the job ahead in the queue of a key
IDS_FOR_THE_PLANNER = "the join by id selects the same rows; the array makes the planner use the primary key"


def with_others(**of_each: tuple[Any, Any]) -> Call:
    """Pass values of the row between those of two others, so that the first and the last one are wrong."""

    def call(row: Row) -> Row:
        lists = {name: [others, own, others] for name, (own, others) in of_each.items()}
        ids = [OTHER, row["id"], OTHER]
        names = list(lists)
        documents = [{"id": str(id_), **{name: lists[name][place] for name in names}} for place, id_ in enumerate(ids)]
        return {"ids": ids, "jobs": as_json(documents), "steps": as_json(documents), **lists}

    return call


def documents(row: Row) -> Row:
    """Pass one job as a document."""
    document = {"id": str(row["id"]), "reason": "why", "open_steps": 1, "failed_steps": 0}
    return {"ids": [row["id"]], "jobs": as_json([document])}


def keyed(status: str, order: int = 1, **columns: Any) -> MakeRow:
    """Make a job with a key."""
    return job(status, **{"key": "k", "key_order": order, "on_conflict": "queue", **columns})


def workflow(name: str, namespace: str) -> MakeRow:
    """Make a workflow whose only root step is in a namespace."""
    return record("workflows", name=name, version="1", definition={}, root_namespaces=[namespace], plain_roots=True)


def lonely(status: str = "PENDING", **columns: Any) -> MakeRow:
    """Make a job of a workflow that no worker serves."""
    return job(status, workflow=workflow("lonely", "moon"), **columns)


UNSERVED = "no live worker serves namespace 'moon'"
SET_ASIDE = "a step result was set aside: x"


def message_of(row_of: MakeRow) -> MakeRow:
    """Make a job with a message of its own in the queue, whose id is the tag of the job."""
    return changed(
        row_of,
        "update interlock.jobs set tags = array[sent.msg_id::text] "
        "from (select pgmq.send(orchestration_queue, '{}') as msg_id from interlock.settings) as sent "
        "where jobs.id = %(id)s",
    )


def archive(row: Row) -> Row:
    """Archive the message of a job."""
    return {"msg_id": int(row["tags"][0]), "job_id": row["id"], "message": as_json({}), "error": "x"}


def failure(**columns: Any) -> MakeRow:
    """Make the record of a message that could not be handled."""
    return record("orchestration_failures", "msg_id", message={}, error="x", **columns)


TABLE = (
    GuardedWrite(
        "show_postponed_jobs",
        row=job("RUNNING", not_before=NOW + 3 * HOUR),
        call=lambda _: {},
        conditions=(
            Needed(
                "not_before > now + interval '2 hours'",
                "a job that the orchestrator has just failed with is tried again at once",
                row=job("RUNNING", not_before=NOW + HOUR),
            ),
            Needed(
                "status = 'RUNNING'",
                "a job that was submitted for later starts at once",
                row=job("PENDING", not_before=NOW + 3 * HOUR),
            ),
        ),
    ),
    GuardedWrite(
        "recount_steps",
        row=job("RUNNING", open_steps=7),
        call=by_id(),
        conditions=(
            Needed(
                "job_id = %(id)s",
                "a job counts the steps of all jobs, and never ends",
                row=beside(job("RUNNING", open_steps=0), after=(task("pending", job=job("RUNNING")),)),
                expect={"open_steps": 0},
            ),
            Needed("jobs.id = %(id)s", "the counters of all jobs become those of one", call={"id": OTHER}),
            Needed(
                "jobs.status in ('RUNNING', 'COMPLETED', 'FAILED', 'CANCELED')",
                "a job that waits to start has no open steps, and completes without having run",
                row=job("PENDING", open_steps=7),
            ),
        ),
    ),
    GuardedWrite(
        "validate_submitted_jobs()",
        row=job("SUBMITTED"),
        call=by_id(reasons=["why"]),
        conditions=(
            Redundant("jobs.id = any (job_ids)", IDS_FOR_THE_PLANNER),
            Needed(
                "jobs.id = given.id",
                "a job waits for the reason of another one",
                call=with_others(reasons=("its own", "of another")),
                expect={"reason": "its own"},
            ),
            Needed(
                "jobs.status = 'SUBMITTED'",
                "the reason of a job that was validated before is overwritten",
                row=job("PENDING"),
            ),
        ),
    ),
    GuardedWrite(
        "reject_submitted_jobs",
        row=job("SUBMITTED"),
        call=by_id(reason="invalid", error=as_json({})),
        conditions=(
            Needed("id = any (%(ids)s)", "one invalid input fails all submitted jobs", call={"ids": [OTHER]}),
            Needed(
                "status = 'SUBMITTED'",
                "the error of a job that was rejected before is overwritten",
                row=job("FAILED", events=("reject",)),
                caught_by="guard",
            ),
        ),
    ),
    GuardedWrite(
        "start_pending_jobs()",
        row=job("PENDING"),
        call=by_id(),
        conditions=(
            Needed("jobs.id = any (job_ids)", "jobs start although no worker serves them", call={"ids": [OTHER]}),
            Needed("jobs.status = 'PENDING'", "a job that runs starts again, at a later time", row=job("RUNNING")),
        ),
    ),
    GuardedWrite(
        "fail_running_jobs",
        row=job("RUNNING"),
        call=documents,
        conditions=(
            Redundant("jobs.id = any (%(ids)s)", IDS_FOR_THE_PLANNER),
            Needed(
                "jobs.id = given.id",
                "a job fails with the reason of another one",
                call=with_others(reason=("its own", "of another")),
                expect={"reason": "its own"},
            ),
            Needed(
                "status = 'RUNNING'",
                "the reason of a job that has failed is overwritten",
                row=job("FAILED"),
                caught_by="guard",
            ),
        ),
    ),
    GuardedWrite(
        "cancel_unfinished_jobs",
        row=job("RUNNING"),
        call=documents,
        conditions=(
            Redundant("jobs.id = any (%(ids)s)", IDS_FOR_THE_PLANNER),
            Needed(
                "jobs.id = given.id",
                "a job is canceled with the reason of another one",
                call=with_others(reason=("its own", "of another")),
                expect={"reason": "its own"},
            ),
            Needed(
                "status in ('SUBMITTED', 'PENDING', 'RUNNING')",
                "the reason of a job that was canceled before is overwritten",
                row=job("CANCELED"),
                caught_by="guard",
            ),
        ),
    ),
    GuardedWrite(
        "update_jobs",
        row=job("RUNNING"),
        call=documents,
        conditions=(
            Redundant("jobs.id = any (%(ids)s)", IDS_FOR_THE_PLANNER),
            Needed(
                "jobs.id = given.id",
                "a job counts the steps of another one, and never ends or ends early",
                call=with_others(open_steps=(3, 7), failed_steps=(0, 0)),
                expect={"open_steps": 3},
            ),
        ),
    ),
    GuardedWrite(
        "complete_running_jobs()",
        row=job("RUNNING"),
        call=by_id(workflow_ids=[None], failed_steps=[0]),
        conditions=(
            Redundant("jobs.id = any (job_ids)", IDS_FOR_THE_PLANNER),
            Needed(
                "jobs.id = given.id",
                "a job gets the output and the counts of another one",
                call=with_others(failed_steps=(1, 2), workflow_ids=(None, None)),
                expect={"failed_steps": 1},
            ),
            Needed(
                "jobs.status = 'RUNNING'",
                "the output of a job that has completed is overwritten",
                row=job("COMPLETED"),
                caught_by="guard",
            ),
            Needed(
                "made.output is not null",
                "a job whose output is too large completes without one",
                # A quarter of a gigabyte of results takes seconds: the function returns what it returns for these.
                row=changed(
                    job("RUNNING"),
                    "create or replace function interlock.job_output(ended_job_id uuid, ended_workflow_id uuid) "
                    "returns jsonb language sql stable as 'select null::jsonb'",
                ),
            ),
        ),
    ),
    GuardedWrite(
        "refresh_key_reasons",
        row=keyed("PENDING", reason="waits for job 1 with key 'k'"),
        call=lambda _: {},
        conditions=(
            Needed(
                "waiting.key is not null",
                "a job without a key is said to be the next of its key",
                row=job("PENDING", reason="waits for job 1 with key 'k'"),
            ),
            Redundant("waiting.status in ('SUBMITTED', 'PENDING')", "the predicate of the index jobs_key_order"),
            Needed(
                "waiting.status = 'PENDING'",
                "a job that has not been validated is said to be the next of its key",
                row=keyed("SUBMITTED", reason="waits for job 1 with key 'k'"),
            ),
            Needed(
                "waiting.reason like 'waits for job %%'",
                "a job that waits for a worker is said to wait for its key",
                row=keyed("PENDING", reason=UNSERVED),
            ),
            Needed(
                "waiting.reason <> held.reason",
                "every waiting job is written on every tick",
                row=beside(
                    keyed("PENDING", 2, reason=f"waits for job {AHEAD} with key 'k'"),
                    before=(keyed("RUNNING", id=AHEAD),),
                ),
            ),
            Needed(
                "jobs.id = found.id",
                "every job gets the reason of one that waits for its key",
                row=beside(job("PENDING"), before=(keyed("PENDING", reason="waits for job 1 with key 'k'"),)),
            ),
        ),
    ),
    GuardedWrite(
        "archive_message",
        row=message_of(job("RUNNING")),
        call=archive,
        conditions=(
            Needed("id = (…)", "every job gets the error of one message", call={"job_id": None}),
            Needed("id = %(job_id)s", "another job gets the error of the message", call={"job_id": None}),
            Needed(
                "status in ('PENDING', 'RUNNING')",
                "the reason of a job that has completed is overwritten",
                row=message_of(job("COMPLETED")),
                caught_by="guard",
            ),
            Needed(
                "(…)",
                "a job gets the error of a message that another orchestrator has handled",
                call={"msg_id": 0},
            ),
        ),
    ),
    GuardedWrite(
        "delete_failures",
        row=beside(job("RUNNING", id=AHEAD, reason=SET_ASIDE), before=(failure(msg_id=1, job_id=AHEAD),)),
        call=lambda _: {"ids": [1]},
        conditions=(
            Needed("id = any (array(…))", "every job loses the reason of its failure", call={"ids": [2]}),
            Needed(
                "status in ('PENDING', 'RUNNING')",
                "a job that ended while a message was set aside loses the reason of its end",
                row=beside(job("CANCELED", id=AHEAD, reason=SET_ASIDE), before=(failure(msg_id=1, job_id=AHEAD),)),
                caught_by="guard",
            ),
            Needed(
                "reason like 'a step result was set aside: %%'",
                "a job loses a reason that says something else",
                row=beside(
                    job("RUNNING", id=AHEAD, reason="waits for its children"),
                    before=(failure(msg_id=1, job_id=AHEAD),),
                ),
            ),
        ),
    ),
    GuardedWrite(
        "record_job_failure",
        row=job("RUNNING"),
        call=by_id(reason="why"),
        conditions=(
            Needed("id = (…)", "one failure hides every job from the orchestrator", call={"id": OTHER}),
            Needed("id = %(id)s", "another job is hidden from the orchestrator", call={"id": OTHER}),
            Needed(
                "status in ('SUBMITTED', 'PENDING', 'RUNNING')",
                "a job that has completed gets the reason of a failure",
                row=job("COMPLETED"),
                caught_by="guard",
            ),
        ),
    ),
    GuardedWrite(
        "refresh_pending_reasons",
        row=lonely(),
        call=lambda _: {},
        conditions=(
            Needed(
                "status = 'RUNNING'",
                "a paused worker counts as one that serves the namespace, and the job does not say why it waits",
                row=beside(lonely(), before=(worker("PAUSED", namespaces=["moon"], seen_until=NOW + HOUR),)),
                expect={"reason": UNSERVED},
            ),
            Needed(
                "seen_until > now",
                "a dead worker counts as one that serves the namespace, and the job does not say why it waits",
                row=beside(lonely(), before=(worker("RUNNING", namespaces=["moon"], seen_until=NOW - HOUR),)),
                expect={"reason": UNSERVED},
            ),
            Needed(
                "root.namespace <> all (array(…))",
                "a job is said to wait for a worker although one serves its namespace",
                row=beside(lonely(), before=(worker("RUNNING", namespaces=["moon"], seen_until=NOW + HOUR),)),
            ),
            Needed(
                "jobs.workflow_id = unserved.id",
                "a job is said to wait for the namespace of another workflow",
                row=beside(lonely(), before=(workflow("a", "mars"),), after=(workflow("b", "venus"),)),
                expect={"reason": UNSERVED},
            ),
            Needed(
                "jobs.id = any (array(…))",
                "a job that runs is said to wait for a worker",
                row=lonely("RUNNING"),
            ),
            Needed(
                "workflow_id = unserved.id",
                "jobs that wait with the right reason are written on every tick",
                row=beside(
                    lonely(reason=UNSERVED),
                    before=(workflow("a", "mars"),),
                    after=(workflow("b", "venus"),),
                ),
            ),
            Needed("status = 'PENDING'", "a job that runs is said to wait for a worker", row=lonely("RUNNING")),
            Needed(
                "key is null",
                "a job that waits for its key is said to wait for a worker",
                row=lonely(key="k", key_order=1, on_conflict="queue"),
            ),
            Needed(
                "not_before is null",
                "the reason of a job that could not be started is overwritten",
                row=lonely(not_before=NOW + HOUR),
            ),
            Needed(
                "reason is distinct from unserved.reason",
                "every waiting job is written on every tick",
                row=lonely(reason=UNSERVED),
            ),
        ),
    ),
)
