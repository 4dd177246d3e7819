"""Conditions of the writes of the orchestrator to steps, messages and signals, and of the writes of limits.

Files: steps.sql, orchestration.sql, signals.sql, limits.sql and the functions that read the queue of step results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from condition_scenarios import (
    HOUR,
    MINUTE,
    NOW,
    OTHER,
    SECOND,
    GuardedWrite,
    Needed,
    Redundant,
    Scene,
    beside,
    changed,
    job,
    record,
    task,
)
from conditions_of_jobs import IDS_FOR_THE_PLANNER, failure, with_others
from interlock.postgres.query import as_json

if TYPE_CHECKING:
    from condition_scenarios import MakeRow, Row

KNOWN = UUID(int=2)  # the id of a row that another one refers to
OWN_JOB, OTHER_JOB = UUID(int=3), UUID(int=4)
OWN_WORKFLOW, OTHER_WORKFLOW = UUID(int=5), UUID(int=6)
REPEATED = "repeated for the row that is written; here it makes the planner use the index"
ONLY_WHILE_WAITING = "held_by is null unless the task waits; here it makes the planner use the index"
NO_JOB = "a task without a job finds no status of one; here it makes the planner use the index"

RUNNING = job("RUNNING")
OLD = NOW - 2 * HOUR


def ended(state: str = "done", job: MakeRow = RUNNING, **columns: Any) -> MakeRow:
    """Make a step that ended long ago, and whose end was not advanced."""
    return task(state, **{"job": job, "at": OLD, "created_at": OLD, "updated_at": OLD, **columns})


# --- steps with dependencies


def edge(upstream: str, downstream: str, condition: str = "after", of: UUID = OWN_WORKFLOW) -> MakeRow:
    """Make an edge of a workflow; return the workflow."""

    async def make(scene: Scene) -> Row:
        definition = {"name": str(of), "version": "1", "definition": {}, "root_namespaces": [], "plain_roots": True}
        if await scene.read({"_table": "workflows", "_key": "id", "id": of}) is None:
            await scene.insert("workflows", {"id": of, **definition})
        columns = {"upstream": upstream, "downstream": downstream, "condition": condition, "branch": False}
        await scene.insert("workflow_edges", {"workflow_id": of, **columns})
        return await scene.made("workflows", of)

    return make


def in_job(state: str, step: str, job_id: UUID = OWN_JOB, **columns: Any) -> MakeRow:
    """Make a step of a job; its workflow must exist."""
    workflow_id = OWN_WORKFLOW if job_id == OWN_JOB else OTHER_WORKFLOW

    async def find_or_make(scene: Scene) -> Row:
        found = await scene.read({"_table": "jobs", "_key": "id", "id": job_id})
        return found or await job("RUNNING", id=job_id, workflow_id=workflow_id)(scene)

    return task(state, job=find_or_make, step=step, **columns)


MET = in_job("waiting", "met", id=KNOWN)


# --- messages


def reported(job_id: UUID, steps: int) -> MakeRow:
    """Make a job of ten steps of which some have ended, each with a message in the queue; return the job."""

    async def make(scene: Scene) -> Row:
        row = await job("RUNNING", id=job_id, open_steps=10)(scene)
        for number in range(steps):
            await task("done", job=lambda _: _given(row), step=f"step_{number}")(scene)
        return row

    return make


async def _given(row: Row) -> Row:
    return row


def message(*, visible: bool) -> MakeRow:
    """Make the message of one ended step; return the message."""

    async def make(scene: Scene) -> Row:
        await reported(OWN_JOB, 1)(scene)
        if not visible:
            await scene.execute("update interlock.orchestration_messages set vt = now() + interval '1 hour'")
        (row,) = await scene.execute("select msg_id from interlock.orchestration_messages")
        return await scene.made("orchestration_messages", row["msg_id"], "msg_id")

    return make


# --- limits


def limited(state: str = "waiting", **columns: Any) -> MakeRow:
    """Make a task that waits for a limit."""
    return task(state, **{"held_by": "limit", "limit_keys": ["k"], **columns})


def paused(**columns: Any) -> MakeRow:
    """Make a task that waits for a paused namespace."""
    return task("waiting", **{"held_by": "namespace", "namespace": "n", **columns})


CAPPED_JOB = job("RUNNING", worker_count=1)

TABLE = (
    GuardedWrite(
        "supersede_upstream_steps",
        row=beside(in_job("running", "a"), before=(edge("a", "met"), MET)),
        call=lambda _: {"ids": [KNOWN]},
        conditions=(
            Needed(
                "id = any (array(…))",
                "the failures of all steps are none of their jobs'",
                row=beside(in_job("running", "b"), before=(edge("a", "met"), MET)),
            ),
            Needed(
                "jobs.id = met.job_id",
                "the edges of another workflow are taken for those of the job",
                row=beside(
                    in_job("running", "b"),
                    before=(
                        edge("b", "met", of=OTHER_WORKFLOW),
                        in_job("waiting", "met", OTHER_JOB),
                        edge("a", "met"),
                        MET,
                    ),
                    after=(job("RUNNING", workflow_id=OTHER_WORKFLOW),),
                ),
            ),
            Needed(
                "workflow_id = jobs.workflow_id",
                "the edges of another workflow are taken for those of the job",
                row=beside(in_job("running", "b"), before=(edge("b", "met", of=OTHER_WORKFLOW), edge("a", "met"), MET)),
            ),
            Needed(
                "downstream = met.step",
                "a dependency of another step counts as not needed",
                row=beside(in_job("running", "b"), before=(edge("b", "c"), MET)),
            ),
            Needed(
                "condition <> 'recovery'",
                "a step whose failure would be recovered counts as not needed",
                row=beside(in_job("running", "a"), before=(edge("a", "met", "recovery"), MET)),
            ),
            Needed(
                "tasks.job_id = met.job_id",
                "the step of another job counts as not needed",
                row=beside(
                    in_job("running", "a", OTHER_JOB),
                    before=(edge("a", "met"), edge("a", "met", of=OTHER_WORKFLOW), MET),
                ),
            ),
            Needed(
                "tasks.step = edges.upstream",
                "a step that is no dependency counts as not needed",
                row=beside(in_job("running", "b"), before=(edge("a", "met"), in_job("done", "met", id=KNOWN))),
            ),
            Needed(
                "state in ('waiting', 'pending', 'running')",
                "a failure that was recorded before the others were met is none of the job's",
                row=beside(in_job("error", "a"), before=(edge("a", "met"), MET)),
            ),
            Needed(
                "met.id = any (%(ids)s)",
                "the dependencies of every step count as not needed",
                call={"ids": [OTHER]},
            ),
        ),
    ),
    GuardedWrite(
        "request_cancel_of_waiting_steps",
        row=task("waiting", job=RUNNING, held_by="parts"),
        call=lambda row: {"ids": [row["id"]], "reason": None},
        conditions=(
            Needed("id = any (%(ids)s)", "every map and every child step is canceled", call={"ids": [OTHER]}),
            Redundant("state = 'waiting'", ONLY_WHILE_WAITING),
            Needed(
                "held_by in ('job', 'parts')",
                "a step that waits for others is canceled as soon as it runs, without having been asked for",
                row=task("waiting", job=RUNNING, held_by="dependency"),
            ),
        ),
    ),
    GuardedWrite(
        "update_waiting_steps",
        row=task("waiting", job=RUNNING, unresolved=3),
        call=lambda row: {"ids": [row["id"]], "steps": as_json([{"id": str(row["id"]), "unresolved": 1}])},
        conditions=(
            Redundant("tasks.id = any (%(ids)s)", IDS_FOR_THE_PLANNER),
            Needed(
                "tasks.id = given.id",
                "a step counts the dependencies of another one",
                call=with_others(unresolved=(2, 1)),
                expect={"unresolved": 2},
            ),
            Needed(
                "tasks.state = 'waiting'",
                "a step that was canceled at the same time gets a cause of a wait",
                row=task("canceled", job=RUNNING, unresolved=3),
            ),
        ),
    ),
    GuardedWrite(
        "take_ended_steps",
        row=ended(),
        call=lambda row: {"ids": [row["id"]], "job_ids": [row["job_id"]], "skipped": []},
        conditions=(
            Needed(
                "id = any (%(ids)s)", "the ends of other steps are lost: they count as applied", call={"ids": [OTHER]}
            ),
            Needed(
                "state in ('done', 'error', 'canceled')",
                "the end of a step that still runs counts as applied, and its job never ends",
                row=ended("running"),
            ),
            Needed("not advanced", "a repeated message applies the end of a step twice", row=ended(advanced=True)),
            Needed(
                "job_id = any (array(…))",
                "the end of a step is applied to a job that is not locked",
                call={"job_ids": []},
            ),
            Needed(
                "jobs.id = any (%(job_ids)s)",
                "the end of a step is applied to a job that is not locked",
                call={"job_ids": [OTHER]},
            ),
            Needed(
                "jobs.status = 'RUNNING'",
                "a step that ended before its job started is not applied when the job starts",
                row=ended(job=job("PENDING")),
            ),
        ),
    ),
    GuardedWrite(
        "resend_lost_results",
        row=ended(),
        call=lambda _: {"min_age": MINUTE},
        conditions=(
            Needed(
                "jobs.id = tasks.job_id",
                "the status of another job decides, and the result is sent before the job has started",
                row=beside(ended(job=job("PENDING")), before=(RUNNING,), after=(RUNNING,)),
            ),
            Redundant("tasks.job_id is not null", NO_JOB),
            Needed("not tasks.advanced", "every result is sent again and again", row=ended(advanced=True)),
            Needed(
                "tasks.state in ('done', 'error', 'canceled')",
                "a step that waits is marked as advanced, or written on every sweep",
                row=ended("waiting"),
            ),
            Redundant(
                "coalesce(tasks.finished_at, tasks.created_at) < (…)",
                "updated_at is never earlier; here it makes the planner use the index",
            ),
            Needed(
                "tasks.updated_at < (…)",
                "a result that was sent again a moment ago is sent once more",
                row=changed(ended(), "update interlock.tasks set updated_at = '2030-01-01 00:00+00' where id = %(id)s"),
            ),
            Needed(
                "jobs.status in ('RUNNING', 'COMPLETED', 'FAILED', 'CANCELED')",
                "a step that ended before its job started counts as advanced, and the job never ends",
                row=ended(job=job("PENDING")),
            ),
            Needed(
                "not exists (interlock.orchestration_failures …)",
                "a message that cannot be handled is sent a second time, beside its own retries",
                row=beside(ended(id=KNOWN), before=(failure(msg_id=1, task_id=KNOWN),)),
            ),
            Redundant("tasks.id = any (array(…))", IDS_FOR_THE_PLANNER),
            Needed(
                "tasks.id = lost.id",
                "a lost result counts as advanced because another one belongs to an ended job",
                row=beside(
                    ended(),
                    before=(ended(job=job("COMPLETED"), at=OLD - HOUR),),
                    after=(ended(job=job("COMPLETED"), at=OLD + SECOND),),
                ),
                expect={"advanced": False},
            ),
        ),
    ),
    GuardedWrite(
        "resend_results_of_job",
        row=ended(),
        call=lambda row: {"job_id": row["job_id"]},
        conditions=(
            Needed("job_id = %(job_id)s", "the results of all jobs are sent again", call={"job_id": OTHER}),
            Needed("not advanced", "results that were applied are sent again", row=ended(advanced=True)),
            Needed(
                "state in ('done', 'error', 'canceled')",
                "steps that have not ended are written",
                row=ended("waiting"),
            ),
            Needed(
                "not exists (interlock.orchestration_failures …)",
                "a message that cannot be handled is sent a second time, beside its own retries",
                row=beside(ended(id=KNOWN), before=(failure(msg_id=1, task_id=KNOWN),)),
            ),
        ),
    ),
    GuardedWrite(
        "read_specific_message()",
        row=message(visible=True),
        call=lambda row: {"msg_id": row["msg_id"]},
        sql="select * from interlock.read_specific_message(%(msg_id)s::bigint, 60)",
        conditions=(
            Needed("given.msg_id = (…)", "all messages become invisible with one", call={"msg_id": 0}),
            Needed("visible.msg_id = wanted_id", "another message is read than the wanted one", call={"msg_id": 0}),
            Needed(
                "visible.vt <= clock_timestamp ()",
                "two orchestrators handle one message",
                row=message(visible=False),
            ),
        ),
    ),
    GuardedWrite(
        "consume_signals",
        row=beside(record("signals", job_id=OWN_JOB, name="s", sent_by="ada"), before=(job("RUNNING", id=OWN_JOB),)),
        call=lambda row: {"ids": [row["id"]], "steps": ["second"]},
        conditions=(
            Redundant("signals.id = any (%(ids)s)", IDS_FOR_THE_PLANNER),
            Needed(
                "signals.id = given.id",
                "a signal counts as consumed by another step",
                call=lambda row: {"ids": [0, row["id"], 0], "steps": ["another", "its own", "another"]},
                expect={"consumed_by": "its own"},
            ),
            Needed(
                "signals.consumed_by is null",
                "two steps consume one signal",
                row=beside(
                    record(
                        "signals", job_id=OWN_JOB, name="s", sent_by="ada", consumed_by="first", consumed_at=NOW - HOUR
                    ),
                    before=(job("RUNNING", id=OWN_JOB),),
                ),
            ),
        ),
    ),
    GuardedWrite(
        "write_limit_reasons",
        row=limited(),
        call=lambda _: {"lanes": as_json([{"keys": ["k"], "key": "k", "detail": "full"}]), "served_only": False},
        conditions=(
            Needed(
                "limit_keys = blocked.keys",
                "a task is said to wait for the limit of another key",
                row=limited(limit_keys=["other"]),
            ),
            Redundant("limit_keys is not null", "no key is null; here it makes the planner use the index"),
            Redundant("state = 'waiting'", REPEATED),
            Redundant("held_by = 'limit'", REPEATED),
            Needed(
                "run_at <= now",
                "a delayed task is said to wait for a limit",
                row=limited(run_at=NOW + SECOND),
            ),
            Needed(
                "(found.is_unserved or blocked.key is not null)",
                "a task that is about to be admitted loses its reason",
                call={"lanes": as_json([{"keys": ["k"], "key": None, "detail": None}])},
            ),
            Needed(
                "found.reason is distinct from hold.reason",
                "waiting tasks are written on every tick",
                row=limited(reason="limit k: full"),
            ),
            Redundant("tasks.id = any (array(…))", IDS_FOR_THE_PLANNER),
            Needed(
                "tasks.id = told.id",
                "a task is said to wait for the limit of another key",
                # neither the first nor the last task that gets a reason
                row=beside(limited(), before=(limited(limit_keys=["a"]),), after=(limited(limit_keys=["z"]),)),
                call={"lanes": as_json([{"keys": [key], "key": key, "detail": "full"} for key in ("a", "k", "z")])},
                expect={"reason": "limit k: full"},
            ),
            Redundant("tasks.state = 'waiting'", ONLY_WHILE_WAITING),
            Needed(
                "tasks.held_by = 'limit'",
                "a task whose namespace is paused at this moment is said to wait for its limit",
                meanwhile="update interlock.tasks set held_by = 'namespace', reason = 'paused' where id = %(id)s",
                expect={"held_by": "namespace", "reason": "paused"},
            ),
        ),
    ),
    GuardedWrite(
        "move_hold_from_namespace_to_job",
        row=paused(job=CAPPED_JOB, capped=True),
        call=lambda _: {"name": "n"},
        conditions=(
            Needed(
                "id = any (array(…))",
                "tasks of other paused namespaces start",
                row=paused(job=CAPPED_JOB, capped=True, namespace="other"),
            ),
            Redundant("state = 'waiting'", REPEATED),
            Redundant("held_by = 'namespace'", REPEATED),
            Needed(
                "namespace = %(name)s",
                "tasks of other paused namespaces start",
                row=paused(job=CAPPED_JOB, capped=True, namespace="other"),
            ),
            Needed(
                "capped",
                "a step waits for the worker_count of a job that has none, for ever",
                row=paused(job=RUNNING),
            ),
            Needed(
                "step not like 'compensate:%%'",
                "a compensation waits for the worker_count, which never admits it",
                row=paused(job=CAPPED_JOB, capped=True, step="compensate:a"),
            ),
            Redundant("state = 'waiting' [2]", ONLY_WHILE_WAITING),
            Needed(
                "held_by = 'namespace' [2]",
                "a step that goes to its limit at this moment waits for its job again",
                meanwhile="update interlock.tasks set held_by = 'limit' where id = %(id)s",
                expect={"held_by": "limit"},
            ),
        ),
    ),
    GuardedWrite(
        "move_hold_from_limit_to_namespace",
        row=limited(namespace="n"),
        call=lambda _: {"name": "n"},
        conditions=(
            Needed(
                "id = any (array(…))",
                "tasks of namespaces that are not paused are held for theirs",
                row=limited(namespace="other"),
            ),
            Redundant(
                "limit_keys is not null", "a task that waits for a limit has a key; it makes the planner use the index"
            ),
            Redundant("state = 'waiting'", REPEATED),
            Redundant("held_by = 'limit'", REPEATED),
            Needed(
                "namespace = %(name)s",
                "tasks of namespaces that are not paused are held for theirs",
                row=limited(namespace="other"),
            ),
            Redundant("state = 'waiting' [2]", ONLY_WHILE_WAITING),
            Needed(
                "held_by = 'limit' [2]",
                "a step that goes back to its job at this moment is held for the namespace",
                meanwhile="update interlock.tasks set held_by = 'worker_count' where id = %(id)s",
                expect={"held_by": "worker_count"},
            ),
        ),
    ),
    GuardedWrite(
        "move_hold_from_namespace_to_limit",
        row=paused(limit_keys=["k"]),
        call=lambda _: {"name": "n"},
        conditions=(
            Needed(
                "id = any (array(…))",
                "tasks of other paused namespaces start",
                row=paused(limit_keys=["k"], namespace="other"),
            ),
            Redundant("state = 'waiting'", REPEATED),
            Redundant("held_by = 'namespace'", REPEATED),
            Needed(
                "namespace = %(name)s",
                "tasks of other paused namespaces start",
                row=paused(limit_keys=["k"], namespace="other"),
            ),
            Needed("limit_keys is not null", "a task without a limit waits for one, for ever", row=paused()),
            Needed(
                "not (capped and step not like 'compensate:%%')",
                "a step is admitted by its limit although its job runs enough steps",
                row=paused(job=CAPPED_JOB, capped=True, limit_keys=["k"]),
            ),
            Redundant("state = 'waiting' [2]", ONLY_WHILE_WAITING),
            Needed(
                "held_by = 'namespace' [2]",
                "a step that goes back to its job at this moment is admitted by its limit",
                meanwhile="update interlock.tasks set held_by = 'worker_count' where id = %(id)s",
                expect={"held_by": "worker_count"},
            ),
        ),
    ),
)
