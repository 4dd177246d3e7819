"""Conditions of advance_plain_steps(): a batch that is not plain must stay in the queue, for the full rules.

The conditions of a plain batch are columns that the function tests, so that the table names them by their text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from condition_scenarios import HOUR, NOW, GuardedWrite, Needed, Redundant, Scene, beside, job, record, task
from conditions_of_jobs import IDS_FOR_THE_PLANNER
from conditions_of_steps import ONLY_WHILE_WAITING, OTHER_JOB, OWN_JOB, OWN_WORKFLOW, message, reported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from condition_scenarios import MakeRow, Row

PAUSED = record("namespaces", "name", name="default", paused_at=NOW - HOUR)
PARENT = job("RUNNING", id=UUID(int=9))
MAP = UUID(int=8)
OWN_MAP = {"id": MAP, "held_by": "parts", "unresolved": 2}
MAP_ELSEWHERE = task("waiting", job=job("RUNNING"), held_by="parts", unresolved=2)
EARLIER_MAP = task("waiting", job=job("RUNNING"), id=UUID(int=7), held_by="parts", unresolved=2)
WAITING_ELSEWHERE = task("waiting", job=job("RUNNING"), step="n", unresolved=1)
REPORTED = beside(reported(OWN_JOB, 1), before=(reported(OTHER_JOB, 2),), after=(reported(UUID(int=1), 2),))


def batch(
    *,
    status: str = "RUNNING",
    of_job: Mapping[str, Any] | None = None,
    ended: Mapping[str, Any] | None = None,
    edge: Mapping[str, Any] | None = None,
    definition: Mapping[str, Any] | None = None,
    waiting: Mapping[str, Any] | None = None,
    siblings: bool = False,
    sql: str | None = None,
    returns: str = "message",
) -> MakeRow:
    """Make a plain batch, with these columns in its rows: a step has ended, and the next one waits for it alone.

    Returns the message of the end, or the waiting step. `siblings` are other waiting steps of the job, made before and
    after it; `sql` is run at last.
    """

    async def make(scene: Scene) -> Row:
        plain = {"version": "1", "definition": {}, "root_namespaces": [], "plain_roots": True}
        await scene.insert("workflows", {"id": OWN_WORKFLOW, "name": "w", **plain})
        step = {"workflow_id": OWN_WORKFLOW, "namespace": "default", "priority": 0, "max_tries": 1, "spec": {}}
        await scene.insert("workflow_steps", {**step, "step": "m", "kind": "plain", "edges": 0, "position": 0})
        following = {"step": "n", "kind": "plain", "edges": 1, "position": 1}
        await scene.insert("workflow_steps", {**step, **following, **(definition or {})})
        link = {"upstream": "m", "downstream": "n", "condition": "after", "branch": False}
        await scene.insert("workflow_edges", {"workflow_id": OWN_WORKFLOW, **link, **(edge or {})})
        columns = {"id": OWN_JOB, "workflow_id": OWN_WORKFLOW, "open_steps": 2, **(of_job or {})}
        own = await job(status, **columns)(scene)

        async def given(_: Scene) -> Row:
            return own

        following_steps = {}
        for step_name in ("a", "n", "z") if siblings else ("n",):
            columns = {"unresolved": 1, **(waiting or {})}
            following_steps[step_name] = await task("waiting", job=given, step=step_name, **columns)(scene)
        await task(job=given, step="m", **{"state": "done", **(ended or {})})(scene)
        if sql is not None:
            await scene.execute(sql)
        if returns != "message":
            return following_steps["n"]
        (row,) = await scene.execute("select msg_id from interlock.orchestration_messages")
        return await scene.made("orchestration_messages", row["msg_id"], "msg_id")

    return make


def last_step(**of_job: Any) -> MakeRow:
    """Make a batch that ends the last open step of a job."""
    return batch(of_job={"open_steps": 1, **of_job}, edge={"downstream": "other"})


def not_plain(text: str, risk: str, row: MakeRow, instead: str = "true") -> Needed:
    """List a condition of a plain batch: the message must stay in the queue."""
    return Needed(text, risk, row=row, instead=instead)


TABLE = (
    GuardedWrite(
        "advance_plain_steps()",
        row=batch(),
        call=lambda _: {"lock_timeout": "1s"},
        sql=(
            "select * from interlock.advance_plain_steps(%(actor)s, %(limit)s::int, %(msg_id)s::bigint, "
            "%(lock_timeout)s, %(now)s::timestamptz)"
        ),
        conditions=(
            Needed(
                "msg_id = any (array(…))",
                "messages that another orchestrator handles are taken from it",
                row=message(visible=False),
            ),
            Needed(
                "vt <= clock_timestamp ()",
                "a message that was deferred because its job is locked is taken at once",
                row=message(visible=False),
            ),
            Needed(
                "msg_id between coalesce(only_message, 0) and coalesce(only_message, 9223372036854775807)",
                "an orchestrator that was notified of one message takes others from those that were notified of them",
                call={"msg_id": 0},
            ),
            not_plain(
                "not message ? 'failure'",
                "the record of an earlier failure of the message is never deleted",
                batch(sql="""update interlock.orchestration_messages set message = message || '{"failure": 1}'"""),
            ),
            not_plain(
                "jobs.status = 'RUNNING'",
                "steps of a job that has not started are released",
                batch(status="PENDING"),
            ),
            not_plain(
                "jobs.ending is null",
                "steps of a job that is being canceled are released",
                batch(of_job={"ending": "CANCELED"}),
            ),
            not_plain(
                "not jobs.compensating",
                "steps of a job that compensates are released",
                batch(of_job={"compensating": True}),
            ),
            not_plain(
                "jobs.worker_count is null",
                "a job runs more steps at once than its worker_count",
                batch(of_job={"worker_count": 1}),
            ),
            not_plain(
                "jobs.failed_steps = 0",
                "a job with a failed step completes",
                last_step(failed_steps=1),
            ),
            not_plain(
                "jobs.parent_job_id is null",
                "a child job completes, and its parent is not told",
                beside(last_step(parent_job_id=UUID(int=9), depth=1), before=(PARENT,)),
            ),
            not_plain(
                "not tasks.advanced",
                "a repeated message counts the end of a step twice",
                batch(
                    ended={"advanced": True},
                    sql="insert into interlock.orchestration_messages (vt, message) select clock_timestamp(), "
                    "jsonb_build_object('job_id', job_id, 'task_id', id) from interlock.tasks where step = 'm'",
                ),
            ),
            not_plain(
                "then tasks.job_id = any (locked_job_ids)",
                "the end of a step counts for another job",
                beside(
                    batch(
                        sql=f"update interlock.orchestration_messages set message = message || "
                        f"""'{{"job_id": "{OTHER_JOB}"}}'"""
                    ),
                    before=(job("RUNNING", id=OTHER_JOB, open_steps=5),),
                ),
                instead="then true",
            ),
            not_plain(
                "resolved.is_conditional or",
                "a branch that was not chosen, or the handler of a failure that did not happen, runs",
                batch(edge={"branch": True}),
                instead="",
            ),
            not_plain(
                "edges.branch or",
                "a branch that was not chosen runs",
                batch(edge={"branch": True}),
                instead="",
            ),
            not_plain(
                "or edges.condition <> 'after'",
                "the handler of a failure runs although its step is done",
                batch(edge={"condition": "on_failure"}),
                instead="",
            ),
            not_plain(
                "steps.needed is not null or",
                "the rest of a join of some of several steps is not canceled",
                batch(definition={"needed": 1}),
                instead="",
            ),
            not_plain(
                "found.taken + resolved.edges < steps.edges or",
                "a step runs although another dependency of it has failed",
                batch(definition={"edges": 2}),
                instead="",
            ),
            not_plain(
                "or steps.condition is not null",
                "a step runs although its condition does not hold",
                batch(definition={"condition": "input.a"}),
                instead="",
            ),
            not_plain(
                "or found.limit_keys is not null",
                "a step runs although its limit is used up",
                batch(waiting={"limit_keys": ["k"]}),
                instead="",
            ),
            not_plain(
                "or steps.kind not in ('plain', 'decision')",
                "a worker claims a step that has no handler",
                batch(definition={"kind": "sleep"}),
                instead="",
            ),
            not_plain(
                "found.unresolved <= resolved.parts\n        from",
                "a worker claims a map whose parts have ended, which has no handler",
                batch(waiting={"id": MAP, "held_by": "parts"}, ended={"part_of": MAP, "part": 0}),
                instead="false from",
            ),
            not_plain(
                "bool_and(state = 'done')",
                "the steps after a failed one run",
                batch(ended={"state": "error"}),
            ),
            not_plain(
                "needs_full_rules or",
                "a step runs although its limit is used up",
                batch(waiting={"limit_keys": ["k"]}),
                instead="",
            ),
            not_plain(
                "or is_ready and namespace = any (array(\n"
                "                        select name from interlock.namespaces where paused_at is not null\n"
                "                    ))",
                "a step of a paused namespace runs",
                beside(batch(), before=(PAUSED,)),
                instead="",
            ),
            Needed(
                "reported.id = jobs.id",
                "a batch of two jobs never counts as plain",
                row=REPORTED,
                expect={"open_steps": 9},
            ),
            Redundant("jobs.id = any (locked_job_ids)", IDS_FOR_THE_PLANNER),
            Needed(
                "job_id = resolved.job_id",
                "a step of another job is released, and the own one waits for ever",
                row=beside(batch(returns="step"), before=(WAITING_ELSEWHERE,), after=(WAITING_ELSEWHERE,)),
                expect={"state": "pending"},
            ),
            Needed(
                "step = resolved.downstream",
                "another step of the job is released, and the right one waits for ever",
                row=batch(siblings=True, returns="step"),
                expect={"state": "pending"},
            ),
            Redundant("state = 'waiting'", ONLY_WHILE_WAITING),
            Needed(
                "held_by = 'dependency'",
                "a step that was activated before, and waits for a paused namespace, is released",
                row=batch(waiting={"held_by": "namespace", "unresolved": 0}, returns="step"),
            ),
            Needed(
                "id = resolved.part_of",
                "the end of a part counts for another map",
                row=beside(
                    batch(waiting=OWN_MAP, ended={"part_of": MAP, "part": 0}, returns="step"),
                    before=(MAP_ELSEWHERE, EARLIER_MAP),
                    after=(MAP_ELSEWHERE,),
                ),
                expect={"unresolved": 1},
            ),
            Redundant("state = 'waiting' [2]", ONLY_WHILE_WAITING),
            Needed(
                "held_by = 'parts'",
                "the end of a part counts for a map that was not activated yet",
                row=batch(
                    waiting=OWN_MAP | {"held_by": "dependency"}, ended={"part_of": MAP, "part": 0}, returns="step"
                ),
            ),
            Redundant("jobs.id = any (unfinished_ids)", IDS_FOR_THE_PLANNER),
            Needed(
                "jobs.id = counted.id",
                "a job counts the ended steps of another one, and never ends or ends early",
                row=REPORTED,
                expect={"open_steps": 9},
            ),
        ),
    ),
)
