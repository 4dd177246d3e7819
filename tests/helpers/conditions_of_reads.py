"""Conditions of the statements that lock rows for later writes of their transaction, and of the order of a key.

The functions job_ahead() and replaced_by() lock nothing; they decide which job of a key may start or must end.
"""

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
    GuardedRead,
    Needed,
    Redundant,
    Scene,
    beside,
    by_id,
    job,
    record,
    task,
    worker,
)
from conditions_of_jobs import keyed, workflow
from conditions_of_supervision import OLD_PROCESS, WRONG_ROW, WRONG_SUPERVISOR, held

if TYPE_CHECKING:
    from condition_scenarios import MakeRow, Row

KNOWN = UUID(int=2)  # the id of a row that another one refers to
PARENT, STEP = UUID(int=3), UUID(int=4)
# The own workflow is neither the first nor the last, neither by id nor by its place in the table.
BEFORE, OWN, AFTER = UUID(int=5), UUID(int=6), UUID(int=7)

INDEX = "never null here; it makes the planner use the index"
ONLY_WHILE_WAITING = "held_by is null unless the task waits"
IN_REPLACED_BY = "replaced_by() checks the same; here it keeps the search small"
IN_CAN_BE_CANCELED = "can_be_canceled() checks the same; here it makes the planner use the index"

LIVE = worker("RUNNING", namespaces=["moon"], seen_until=NOW + HOUR)
PAUSED = worker("PAUSED", namespaces=["moon"], seen_until=NOW + HOUR)
DEAD = worker("RUNNING", namespaces=["moon"], seen_until=NOW - HOUR)
MOON, MARS = workflow("w", "moon"), workflow("v", "mars")
CANCELING: dict[str, Any] = {"on_conflict": "cancel_in_progress"}


def pool(**columns: Any) -> MakeRow:
    """Make a pool."""

    async def make(scene: Scene) -> Row:
        await scene.insert("pools", {"name": "mail", "desired": 2, "actor": "ada", **columns})
        return await scene.made("pools", "mail", "name")

    return make


def served(row: MakeRow, by: MakeRow = LIVE, after: tuple[MakeRow, ...] = ()) -> MakeRow:
    """Make a row of a database with one worker."""
    return beside(row, before=(by,), after=after)


# --- steps with a definition


def defined(*steps: tuple[UUID, str, str, int]) -> MakeRow:
    """Make workflows with steps, each given by its workflow, name, kind and number of edges; return the own one."""

    async def make(scene: Scene) -> Row:
        columns = {"version": "1", "definition": {}, "root_namespaces": [], "plain_roots": True}
        for id_ in dict.fromkeys([BEFORE, OWN, AFTER]):
            await scene.insert("workflows", {"id": id_, "name": str(id_), **columns})
        for position, (id_, step, kind, edges) in enumerate(steps):
            await scene.insert(
                "workflow_steps",
                {"workflow_id": id_, "step": step, "kind": kind, "edges": edges, "position": position}
                | {"namespace": "default", "priority": 0, "max_tries": 1, "spec": {"kind": kind}},
            )
        return await scene.made("workflows", OWN)

    return make


def step_of(definition: MakeRow, step: str, held_by: str, *, state: str = "waiting", **columns: Any) -> MakeRow:
    """Make a step of a job of the own workflow; columns of the job begin with `job_`."""
    of_job = {name.removeprefix("job_"): value for name, value in columns.items() if name.startswith("job_")}
    own = {name: value for name, value in columns.items() if not name.startswith("job_")}
    return task(state, job=job("RUNNING", workflow=definition, **of_job), step=step, held_by=held_by, **own)


def of_other_workflows(step: str, own: str, other: str, edges: int = 0) -> MakeRow:
    """Define a step of the same name, but of another kind, in other workflows."""
    return defined((BEFORE, step, other, edges), (OWN, step, own, edges), (AFTER, step, other, edges))


def among_others(step: str, own: str, other: str) -> MakeRow:
    """Define steps of another kind beside a step in its workflow."""
    return defined((OWN, "a", other, 0), (OWN, step, own, 0), (OWN, "z", other, 0))


SLEEP = defined((OWN, "m", "sleep", 0))
CHILD = defined((OWN, "m", "child", 0))
ROOT = defined((OWN, "m", "plain", 0))
INNER = defined((OWN, "m", "plain", 1))
RESULT = {"m": {"result": 1}}  # of the step in the job that is retried
OTHER_JOB_OF_OWN = job("RUNNING", workflow_id=OWN)


def child(status: str, of_step: UUID = STEP, **columns: Any) -> MakeRow:
    """Make the child job of a step."""
    return job(status, **{"parent_job_id": PARENT, "depth": 1, "parent_task_id": of_step, **columns})


ENDED_CHILD = child("COMPLETED")


def parent_step(definition: MakeRow = CHILD, *children: MakeRow, held_by: str = "job") -> MakeRow:
    """Make a step that waits for its child job, which has ended unless another one is given."""
    own = step_of(definition, "m", held_by, id=STEP, job_id=PARENT)
    return beside(own, after=children or (ENDED_CHILD,))


def due_wait(definition: MakeRow = SLEEP, held_by: str = "sleep", **columns: Any) -> MakeRow:
    """Make a step whose sleep is over."""
    return step_of(definition, "m", held_by, **{"wait_until": NOW - SECOND, **columns})


def silent(status: str = "RUNNING", **columns: Any) -> MakeRow:
    """Make a worker without a heartbeat for two hours."""
    return worker(status, **{"heartbeat_at": NOW - 2 * HOUR, **columns})


TABLE = (
    GuardedRead(
        "read_submitted_jobs",
        row=job("SUBMITTED", workflow=MOON),
        call=lambda _: {},
        conditions=(
            Needed(
                "workflows.id = jobs.workflow_id",
                "the input of a job is checked against the schema of another workflow",
                row=beside(job("SUBMITTED"), before=(MOON,)),
            ),
            Needed("jobs.status = 'SUBMITTED'", "a job is validated again", row=job("PENDING", workflow=MOON)),
            Needed(
                "jobs.ending is null",
                "a job that is being canceled is validated",
                row=job("SUBMITTED", workflow=MOON, ending="CANCELED"),
            ),
            Needed(
                "coalesce(jobs.not_before, jobs.created_at) <= now",
                "a debounced job starts with its first submit",
                row=job("SUBMITTED", workflow=MOON, not_before=NOW + SECOND),
            ),
            Needed(
                "(jobs.key is null or interlock.replaced_by (jobs) is null)",
                "a job that a later one replaces is validated and started",
                row=beside(keyed("SUBMITTED", workflow=MOON), after=(keyed("SUBMITTED", 2, **CANCELING),)),
            ),
        ),
    ),
    GuardedRead(
        "read_queued_jobs",
        row=served(keyed("PENDING", workflow=MOON)),
        call=lambda _: {},
        conditions=(
            Needed(
                "status = 'RUNNING'",
                "a job starts although the only worker of its namespace is paused",
                row=served(keyed("PENDING", workflow=MOON), by=PAUSED),
            ),
            Needed(
                "seen_until > now",
                "a job starts although the only worker of its namespace is dead",
                row=served(keyed("PENDING", workflow=MOON), by=DEAD),
            ),
            Needed(
                "key is not null",
                "a job without a key is taken for the first of a key, and read by two sweeps",
                row=served(job("PENDING", workflow=MOON)),
            ),
            Needed(
                "status in ('SUBMITTED', 'PENDING')",
                "a job that has ended stays the first of its key, and no later one starts",
                row=served(keyed("PENDING", 2, workflow=MOON), after=(keyed("COMPLETED"),)),
                expect={},
            ),
            Needed(
                "workflows.id = firsts.workflow_id",
                "a job starts because a worker serves the namespaces of another workflow",
                row=beside(keyed("PENDING", workflow=MARS), before=(LIVE, MOON)),
            ),
            Needed(
                "jobs.id = firsts.id",
                "another job is started in the place of the first one of the key",
                row=beside(
                    keyed("PENDING", 2, workflow=MOON),
                    before=(LIVE, keyed("PENDING", 3), keyed("PENDING", 4)),
                    after=(keyed("PENDING", 5), keyed("PENDING", 6)),
                ),
                expect={},
            ),
            Needed(
                "status = 'PENDING'",
                "a job starts that was not validated",
                row=served(keyed("SUBMITTED", workflow=MOON)),
            ),
            Needed(
                "ending is null",
                "a job starts that is being canceled",
                row=served(keyed("PENDING", workflow=MOON, ending="CANCELED")),
            ),
            Needed(
                "interlock.replaced_by (jobs) is null",
                "a job starts that a later one replaces",
                row=served(keyed("PENDING", workflow=MOON), after=(keyed("PENDING", 2, **CANCELING),)),
            ),
            Needed(
                "(not_before is null or not_before <= now)",
                "a job that could not be started is tried without a pause",
                row=served(keyed("PENDING", workflow=MOON, not_before=NOW + SECOND)),
            ),
            Needed(
                "workflows.root_namespaces <@ (…)",
                "a job starts although no worker serves it",
                row=keyed("PENDING", workflow=MOON),
            ),
            Needed(
                "not exists (interlock.jobs …)",
                "the next job of a key starts while the one before it runs",
                row=served(keyed("PENDING", 2, workflow=MOON), after=(keyed("RUNNING"),)),
            ),
        ),
    ),
    GuardedRead(
        "read_replaced_jobs",
        row=beside(keyed("RUNNING"), after=(keyed("PENDING", 2, **CANCELING),)),
        call=lambda _: {},
        conditions=(
            Redundant("key is not null", INDEX),
            Redundant("status in ('SUBMITTED', 'PENDING')", IN_REPLACED_BY),
            Redundant("(on_conflict = 'cancel_in_progress' or debounced_since is not null)", IN_REPLACED_BY),
            Redundant("jobs.task_description = keys.task_description", IN_REPLACED_BY),
            Redundant("jobs.key = keys.key", IN_REPLACED_BY),
            Redundant("jobs.key is not null", INDEX),
            Needed(
                "jobs.status in ('SUBMITTED', 'PENDING', 'RUNNING')",
                "a job that has completed is canceled on every tick",
                row=beside(keyed("COMPLETED"), after=(keyed("PENDING", 2, **CANCELING),)),
            ),
            Needed(
                "interlock.can_be_canceled (jobs)",
                "a job that is being canceled is read on every tick, and canceled jobs fill the limit of the read",
                row=beside(keyed("RUNNING", ending="CANCELED"), after=(keyed("PENDING", 2, **CANCELING),)),
            ),
            Needed(
                "replacing.id is not null",
                "the latest job of a key is canceled like those that it replaces",
                row=beside(keyed("PENDING", 2, **CANCELING), before=(keyed("RUNNING"),)),
            ),
        ),
    ),
    GuardedRead(
        "read_startable_jobs",
        row=served(job("PENDING", workflow=MOON)),
        call=lambda _: {},
        conditions=(
            Needed(
                "status = 'RUNNING'",
                "a job starts although the only worker of its namespace is paused",
                row=served(job("PENDING", workflow=MOON), by=PAUSED),
            ),
            Needed(
                "seen_until > now",
                "a job starts although the only worker of its namespace is dead",
                row=served(job("PENDING", workflow=MOON), by=DEAD),
            ),
            Needed(
                "workflow_id = workflows.id",
                "a job starts because a worker serves the namespaces of another workflow",
                row=beside(job("PENDING", workflow=MARS), before=(LIVE, MOON)),
            ),
            Needed("status = 'PENDING'", "a job starts twice", row=served(job("RUNNING", workflow=MOON))),
            Needed("key is null", "a job does not wait for its key", row=served(keyed("PENDING", workflow=MOON))),
            Needed(
                "ending is null",
                "a job starts that is being canceled",
                row=served(job("PENDING", workflow=MOON, ending="CANCELED")),
            ),
            Needed(
                "(not_before is null or not_before <= now)",
                "a job that could not be started is tried without a pause",
                row=served(job("PENDING", workflow=MOON, not_before=NOW + SECOND)),
            ),
            Needed(
                "workflows.root_namespaces <@ (…)",
                "a job starts although no worker serves it",
                row=job("PENDING", workflow=MOON),
            ),
        ),
    ),
    GuardedRead(
        "read_overdue_jobs",
        row=job("RUNNING", deadline_at=NOW),
        call=lambda _: {},
        conditions=(
            Needed(
                "deadline_at <= now", "a job fails before its deadline", row=job("RUNNING", deadline_at=NOW + SECOND)
            ),
            Redundant("deadline_at is not null", INDEX),
            Redundant("ending is distinct from 'CANCELED'", IN_CAN_BE_CANCELED),
            Needed(
                "status in ('SUBMITTED', 'PENDING', 'RUNNING')",
                "a job that has completed in time is read on every tick",
                row=job("COMPLETED", deadline_at=NOW),
            ),
            Needed(
                "interlock.can_be_canceled (jobs)",
                "a job that compensates is read on every tick",
                row=job("RUNNING", deadline_at=NOW, ending="FAILED", compensating=True),
            ),
            Needed(
                "interlock.can_be_canceled (jobs)",
                "a failing job that already cancels its child jobs is read on every tick",
                row=job("RUNNING", deadline_at=NOW, ending="FAILED", cancel_reason="the job's timeout of 1 s is over"),
            ),
            Needed(
                "(not_before is null or not_before <= now)",
                "a job that could not be ended is tried without a pause",
                row=job("RUNNING", deadline_at=NOW, not_before=NOW + SECOND),
            ),
        ),
    ),
    GuardedRead(
        "read_due_waits",
        row=due_wait(),
        call=lambda _: {},
        conditions=(
            Needed(
                "jobs.id = tasks.job_id",
                "another job is locked, and the pause of the own one is ignored",
                row=beside(due_wait(job_not_before=NOW + SECOND), after=(OTHER_JOB_OF_OWN, OTHER_JOB_OF_OWN)),
            ),
            Needed(
                "(not_before is null or not_before <= now)",
                "a job that could not be advanced is tried without a pause",
                row=due_wait(job_not_before=NOW + SECOND),
            ),
            Needed(
                "workflow_id = job.workflow_id",
                "a step ends like a step of another workflow",
                row=due_wait(of_other_workflows("m", "sleep", "signal")),
                expect={"kind": "sleep"},
            ),
            Needed(
                "workflow_steps.step = tasks.step",
                "a step ends like another step",
                row=due_wait(among_others("m", "sleep", "signal")),
                expect={"kind": "sleep"},
            ),
            Needed("wait_until <= now", "a sleep ends early", row=due_wait(wait_until=NOW + SECOND)),
            Redundant("wait_until is not null", INDEX),
            Redundant("state = 'waiting'", ONLY_WHILE_WAITING),
            Needed(
                "held_by in ('signal', 'sleep')",
                "a step that waits for its child job by now is completed",
                row=due_wait(held_by="job"),
            ),
        ),
    ),
    GuardedRead(
        "read_due_schedules",
        row=record("schedules", "name", name="s", type="x", cron="* * * * *", next_at=NOW),
        call=lambda _: {},
        conditions=(
            Needed(
                "paused_at is null",
                "a paused schedule enqueues tasks",
                row=record("schedules", "name", name="s", type="x", cron="* * * * *", next_at=NOW, paused_at=NOW),
            ),
            Needed(
                "next_at <= now",
                "a schedule enqueues tasks without end",
                row=record("schedules", "name", name="s", type="x", cron="* * * * *", next_at=NOW + SECOND),
            ),
        ),
    ),
    GuardedRead(
        "read_parent_steps",
        row=parent_step(),
        call=lambda row: {"ids": [row["id"]], "job_ids": [row["job_id"]]},
        conditions=(
            Needed(
                "jobs.id = tasks.job_id",
                "the step is looked for in the workflow of another job, and never completed",
                row=beside(parent_step(), before=(job("RUNNING"),), after=(job("RUNNING"),)),
                expect={},
            ),
            Needed(
                "workflow_steps.workflow_id = jobs.workflow_id",
                "a child step ends by the rules of another workflow",
                row=parent_step(of_other_workflows("m", "child", "sleep")),
                expect={"spec": {"kind": "child"}},
            ),
            Needed(
                "workflow_steps.step = tasks.step",
                "a child step ends by the rules of another step",
                row=parent_step(among_others("m", "child", "sleep")),
                expect={"spec": {"kind": "child"}},
            ),
            Needed(
                "latest.parent_task_id = tasks.id",
                "a step ends with the child job of another step",
                row=parent_step(CHILD, child("RUNNING"), child("COMPLETED", OTHER, iteration=2)),
            ),
            Redundant("latest.parent_task_id is not null", INDEX),
            Needed("tasks.id = any (%(ids)s)", "other child steps are completed as well", call={"ids": [OTHER]}),
            Redundant("tasks.state = 'waiting'", ONLY_WHILE_WAITING),
            Needed(
                "tasks.held_by = 'job'",
                "a step is completed before it has been activated",
                row=parent_step(held_by="dependency"),
            ),
            Needed(
                "tasks.job_id = any (%(job_ids)s)",
                "a step of a job that is not locked is completed",
                call={"job_ids": [OTHER]},
            ),
            Needed(
                "child.status in ('COMPLETED', 'FAILED', 'CANCELED')",
                "a step ends before its child job",
                row=parent_step(CHILD, child("RUNNING")),
            ),
        ),
    ),
    GuardedRead(
        "read_root_steps",
        row=step_of(ROOT, "m", "start"),
        call=lambda row: {"ids": [row["job_id"]]},
        conditions=(
            Needed(
                "workflow_steps.workflow_id = jobs.workflow_id",
                "a step starts with its job because a root step of another workflow has its name",
                row=step_of(defined((OWN, "m", "plain", 1), (AFTER, "m", "plain", 0)), "m", "dependency"),
            ),
            Needed(
                "edges = 0",
                "a step starts with its job although it has dependencies",
                row=step_of(INNER, "m", "dependency"),
            ),
            Needed(
                "workflow_steps.workflow_id = jobs.workflow_id [2]",
                "a step whose result is reused is also taken for one of another workflow",
                row=step_of(of_other_workflows("m", "plain", "sleep", 1), "m", "dependency", job_reused=RESULT),
                expect={"kind": "plain"},
            ),
            Needed(
                "jobs.reused -> step ? | '{result,skipped_by_failure}'",
                "a map that runs again for some of its parts starts before the steps that it depends on",
                row=step_of(defined((OWN, "m", "map", 1)), "m", "dependency", job_reused={"m": {"map_id": str(KNOWN)}}),
            ),
            Needed(
                "{result,skipped_by_failure}",
                "a step that a retry leaves out is not skipped, and runs again",
                row=step_of(INNER, "m", "dependency", job_reused={"m": {"skipped_by_failure": False}}),
                expect={"left_out": False},
                instead="{result}",
            ),
            Needed(
                "tasks.job_id = jobs.id",
                "a step of another job starts",
                row=beside(step_of(ROOT, "m", "start"), after=(job("RUNNING", id=KNOWN, workflow_id=OWN),)),
                call={"ids": [KNOWN]},
            ),
            Needed(
                "tasks.step = steps.step",
                "another step starts in the place of a root step",
                row=step_of(ROOT, "x", "dependency"),
            ),
            Redundant("state = 'waiting'", ONLY_WHILE_WAITING),
            Needed(
                "held_by in ('start', 'dependency')",
                "a root step that was activated with its job is activated again",
                row=step_of(ROOT, "m", "worker_count"),
            ),
            Needed("jobs.id = any (%(ids)s)", "the steps of all jobs start", call={"ids": [OTHER]}),
        ),
    ),
    GuardedRead(
        "lock_unfinished_steps",
        row=task("running", job=job("RUNNING")),
        call=lambda row: {"ids": [row["job_id"]]},
        conditions=(
            Needed("job_id = any (%(ids)s)", "the steps of all jobs are canceled", call={"ids": [OTHER]}),
            Needed(
                "state in ('waiting', 'pending', 'running')",
                "a step that is done counts as canceled",
                row=task("done", job=job("RUNNING")),
            ),
        ),
    ),
    GuardedRead(
        "lock_expired_tasks_to_cancel",
        row=task("running", lease_expires_at=NOW - SECOND, cancel_requested_at=NOW - MINUTE),
        call=lambda _: {"recent": MINUTE},
        conditions=(
            Needed(
                "lease_expires_at >= coalesce(now - %(recent)s, '-infinity')",
                "a recovery walks the entries of all leases that there ever were",
                row=task("running", lease_expires_at=NOW - HOUR, cancel_requested_at=NOW - HOUR),
            ),
            Needed(
                "lease_expires_at < now",
                "a task is canceled under its worker, instead of being asked to end",
                row=task("running", cancel_requested_at=NOW - MINUTE),
            ),
            Needed(
                "cancel_requested_at is not null",
                "every task whose lease expires is canceled instead of running again",
                row=task("running", lease_expires_at=NOW - SECOND),
            ),
        ),
    ),
    GuardedRead(
        "lock_held_worker",
        row=held(),
        call=by_id(supervisor="one", generation=2),
        conditions=(
            Needed("id = %(id)s", "another worker is moved", call=WRONG_ROW),
            Needed("supervisor_id = %(supervisor)s", "a supervisor that lost the row moves it", call=WRONG_SUPERVISOR),
            Needed(
                "supervised_until > now",
                "a supervisor whose lease has expired moves a worker that another one takes",
                row=held(supervised_until=NOW),
            ),
            Needed("generation = %(generation)s", "the end of an old process fails the worker", call=OLD_PROCESS),
        ),
    ),
    GuardedRead(
        "lock_pool",
        row=pool(),
        call=lambda _: {"name": "mail"},
        conditions=(Needed("name = %(name)s", "another pool is deleted", call={"name": "other"}),),
    ),
    GuardedRead(
        "lock_uneven_pool",
        row=pool(),
        call=lambda _: {"name": "mail", "supervisor": "one"},
        conditions=(
            Needed("name = %(name)s", "members of another pool are added and ended", call={"name": "other"}),
            Needed(
                "(bound_to is null or bound_to = %(supervisor)s)",
                "a supervisor starts workers that end with another one",
                row=pool(bound_to="two", supervised_until=NOW + MINUTE),
            ),
        ),
    ),
    GuardedRead(
        "lock_worker",
        row=worker("RUNNING"),
        call=by_id(),
        conditions=(Needed("id = %(id)s", "the status of another worker decides about a move", call={"id": NOBODY}),),
    ),
    GuardedRead(
        "lock_workflow",
        row=MOON,
        call=lambda _: {"name": "w", "version": "1"},
        conditions=(
            Needed("name = %(name)s", "another workflow is replaced", call={"name": "v"}),
            Needed("version = %(version)s", "another version is replaced", call={"version": "2"}),
        ),
    ),
    GuardedRead(
        "read_silent_workers",
        row=silent(),
        call=lambda _: {"watched_since": NOW - 3 * HOUR, "heartbeat_timeout": HOUR},
        conditions=(
            Needed(
                "status in ('IDLE', 'RUNNING', 'PAUSED')",
                "a worker that has ended fails again on every tick",
                row=silent("TERMINATED"),
            ),
            Needed(
                "greatest(heard.at, %(watched_since)s) <= now - %(heartbeat_timeout)s",
                "a live worker loses its tasks",
                row=silent(heartbeat_at=NOW),
            ),
            Needed(
                "heard.at is not null",
                "a worker that was created and not started yet counts as silent",
                row=silent(heartbeat_at=None),
            ),
            Needed(
                "(not metadata ? 'spec' or metadata ? 'bound_to')",
                "a worker whose process the supervisors restart is failed",
                row=silent(metadata={"spec": {}}),
            ),
            Needed(
                "(supervisor_id is null or supervised_until <= now)",
                "a worker is failed while its supervisor restarts it",
                row=silent(
                    metadata={"spec": {}, "bound_to": "one"}, supervisor_id="one", supervised_until=NOW + MINUTE
                ),
            ),
        ),
    ),
    GuardedRead(
        "lock_jobs()",
        row=job("RUNNING"),
        call=by_id(),
        sql="select id from interlock.lock_jobs(%(ids)s::uuid[])",
        conditions=(Needed("id = any (wanted)", "one batch locks all jobs", call={"ids": [OTHER]}),),
    ),
    GuardedRead(
        "job_ahead()",
        row=beside(keyed("RUNNING"), after=(keyed("PENDING", 2, id=KNOWN),)),
        call=lambda _: {},
        sql=f"select interlock.job_ahead(jobs) as id from interlock.jobs where id = '{KNOWN}'",
        conditions=(
            Needed(
                "earlier.task_description = waiting.task_description",
                "a job waits for a job of another workflow with the same key",
                row=beside(keyed("RUNNING", task_description="v"), after=(keyed("PENDING", 2, id=KNOWN),)),
            ),
            Needed(
                "earlier.key = waiting.key",
                "a job waits for a job with another key",
                row=beside(keyed("RUNNING", key="other"), after=(keyed("PENDING", 2, id=KNOWN),)),
            ),
            Needed(
                "earlier.key_order < waiting.key_order",
                "a job waits for one behind it, which waits for this one",
                row=beside(keyed("PENDING", 3), after=(keyed("PENDING", 2, id=KNOWN),)),
            ),
            Redundant("earlier.key is not null", INDEX),
            Needed(
                "earlier.status in ('SUBMITTED', 'PENDING', 'RUNNING')",
                "a job waits for one that has ended",
                row=beside(keyed("COMPLETED"), after=(keyed("PENDING", 2, id=KNOWN),)),
            ),
        ),
    ),
    GuardedRead(
        "replaced_by()",
        row=beside(keyed("PENDING", 2, **CANCELING), after=(keyed("RUNNING", id=KNOWN),)),
        call=lambda _: {},
        sql=f"select interlock.replaced_by(jobs) as id from interlock.jobs where id = '{KNOWN}'",
        conditions=(
            Needed(
                "later.task_description = replaced.task_description",
                "a job is canceled for a job of another workflow with the same key",
                row=beside(keyed("PENDING", 2, task_description="v", **CANCELING), after=(keyed("RUNNING", id=KNOWN),)),
            ),
            Needed(
                "later.key = replaced.key",
                "a job is canceled for a job with another key",
                row=beside(keyed("PENDING", 2, key="other", **CANCELING), after=(keyed("RUNNING", id=KNOWN),)),
            ),
            Needed(
                "later.key_order > replaced.key_order",
                "a job is canceled for one that was submitted before it, or for itself",
                row=beside(keyed("PENDING", 1, **CANCELING), after=(keyed("PENDING", 2, id=KNOWN),)),
            ),
            Redundant("later.key is not null", INDEX),
            Needed(
                "later.status in ('SUBMITTED', 'PENDING')",
                "a job is canceled for one that has ended",
                row=beside(keyed("COMPLETED", 2, **CANCELING), after=(keyed("RUNNING", id=KNOWN),)),
            ),
            Needed(
                "(later.on_conflict = 'cancel_in_progress' or later.debounced_since is not null "
                "and replaced.debounced_since is not null and replaced.status in ('SUBMITTED', 'PENDING'))",
                "a job is canceled for one that queues behind it",
                row=beside(keyed("PENDING", 2), after=(keyed("RUNNING", id=KNOWN),)),
            ),
            Needed(
                "later.debounced_since is not null",
                "a debounced job is canceled for one that was submitted by itself",
                row=beside(keyed("PENDING", 2), after=(keyed("PENDING", id=KNOWN, debounced_since=NOW),)),
            ),
            Needed(
                "replaced.debounced_since is not null",
                "a job that was submitted by itself is canceled for a debounced one",
                row=beside(keyed("PENDING", 2, debounced_since=NOW), after=(keyed("PENDING", id=KNOWN),)),
            ),
            Needed(
                "replaced.status in ('SUBMITTED', 'PENDING')",
                "a debounced job that runs is canceled for the next one",
                row=beside(
                    keyed("PENDING", 2, debounced_since=NOW), after=(keyed("RUNNING", id=KNOWN, debounced_since=NOW),)
                ),
            ),
        ),
    ),
)
