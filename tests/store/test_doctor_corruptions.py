"""The doctor finds planted corruptions: each one, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from doctor_support import busy_database, plant
from factories import run_sql
from interlock.postgres.catalog import expected_catalog
from interlock.postgres.connection import connect
from interlock.postgres.migrate import grant
from interlock.store.doctor import CODES, examine
from interlock.store.doctor.fix import FIXABLE_CODES, fix
from interlock.store.task_admin import recover_expired_tasks
from job_driver import JobDriver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from interlock.postgres.connection import Connection
    from interlock.postgres.embedded.server import EmbeddedServer

pytestmark = pytest.mark.store

FORGED = "(task_id, from_state, to_state, event, actor, database_role, attempt, recorded_at)"


def last_record(name: str, records: str = "audit_logs", key: str = "task_id") -> str:
    """Select the last record of a row."""
    return f"select max(id) from interlock.{records} where {key} = %({name})s"


# What a superuser does with the triggers disabled, and the one code that the doctor must report.
CORRUPTIONS: dict[str, tuple[str, str]] = {
    # forged and deleted records
    "all records of a task are deleted": (
        "delete from interlock.audit_logs where task_id = %(done)s",
        "records_missing",
    ),
    "the first record is deleted": (
        "delete from interlock.audit_logs where task_id = %(done)s and event = 'create'",
        "records_missing",
    ),
    "a record in the middle is deleted": (
        "delete from interlock.audit_logs where task_id = %(done)s and event = 'claim'",
        "records_broken",
    ),
    "the last record is deleted": (
        f"delete from interlock.audit_logs where id = ({last_record('done')})",
        "state_unrecorded",
    ),
    "a legal record is forged": (
        (
            f"insert into interlock.audit_logs {FORGED} values "
            "(%(pending)s, 'pending', 'running', 'claim', 'x', 'x', 1, now())"
        ),
        "state_unrecorded",
    ),
    "an illegal record is forged": (
        f"insert into interlock.audit_logs {FORGED} values (%(done)s, 'done', 'pending', 'hold', 'x', 'x', 1, now())",
        "records_illegal",
    ),
    "a record gets another event": (
        "update interlock.audit_logs set event = 'cancel' where task_id = %(done)s and event = 'succeed'",
        "records_illegal",
    ),
    "a record of creation gets a state that is no beginning": (
        (
            "delete from interlock.audit_logs where task_id = %(done)s and event in ('create', 'claim');"
            f"insert into interlock.audit_logs {FORGED.replace('(', '(id, ')} overriding system value values "
            "(0, %(done)s, null, 'running', 'create', 'x', 'x', 1, now())"
        ),
        "records_illegal",
    ),
    "the attempt of a record is changed": (
        "update interlock.audit_logs set attempt = 7 where task_id = %(done)s and event = 'succeed'",
        "records_misnumbered",
    ),
    "the fence of a task is set back": (
        "update interlock.tasks set attempt = 0 where id = %(running)s",
        "records_misnumbered",
    ),
    "the time of a record lies in the future": (
        f"update interlock.audit_logs set recorded_at = now() + interval '1 day' where id = ({last_record('done')})",
        "records_mistimed",
    ),
    "the records of a task are older than the task": (
        "update interlock.audit_logs set recorded_at = recorded_at - interval '2 days' where task_id = %(done)s",
        "records_mistimed",
    ),
    "a task was made in 2099": (
        "update interlock.tasks set created_at = '2099-01-01' where id = %(done)s",
        "records_mistimed",
    ),
    "a task ended before it began": (
        "update interlock.tasks set finished_at = started_at - interval '1 day' where id = %(done)s",
        "row_mistimed",
    ),
    "a task ended at no time": ("update interlock.tasks set finished_at = null where id = %(done)s", "row_mistimed"),
    "a job ended at no time": (
        "update interlock.jobs set completed_at = null where id = %(completed)s",
        "row_mistimed",
    ),
    "a record is repeated": (
        (
            "insert into interlock.audit_logs (task_id, from_state, to_state, event, actor, database_role, attempt, "
            "recorded_at) select task_id, from_state, to_state, event, actor, database_role, attempt, recorded_at "
            "from interlock.audit_logs where task_id = %(done)s and event = 'succeed'"
        ),
        "records_broken",
    ),
    "the attempt of a claim is not counted": (
        "update interlock.audit_logs set attempt = 0 where task_id = %(done)s and event = 'claim'",
        "records_misnumbered",
    ),
    "a job's record is deleted": (
        "delete from interlock.job_state_transitions where job_id = %(completed)s and event = 'validate'",
        "records_broken",
    ),
    "a worker's record is deleted": (
        "delete from interlock.worker_state_transitions where worker_id = 'w_1' and event = 'start_task'",
        "state_unrecorded",
    ),
    "the settled attempt of a task is changed": (
        "update interlock.tasks set settled_attempt = 7 where id = %(done)s",
        "records_misnumbered",
    ),
    # rows changed past the guards
    "a task is set to done": (
        "update interlock.tasks set state = 'done', event = 'succeed' where id = %(pending)s",
        "state_unrecorded",
    ),
    "a failed job is reported as completed": (
        "update interlock.jobs set status = 'FAILED', event = 'error' where id = %(completed)s",
        "state_unrecorded",
    ),
    "a worker is set to idle": (
        "update interlock.workers set status = 'IDLE', event = null where id = 'spare'",
        "state_unrecorded",
    ),
    "a job runs although every step has ended": (
        (
            f"delete from interlock.job_state_transitions where id = "
            f"({last_record('completed', 'job_state_transitions', 'job_id')});"
            "update interlock.jobs set status = 'RUNNING', event = 'allocate_resources' where id = %(completed)s"
        ),
        "job_not_finished",
    ),
    "a completed job has an open step": (
        "update interlock.tasks set job_id = %(completed)s, step = 'z' where id = %(pending)s",
        "job_ended_with_open_steps",
    ),
    "a step is never released": (
        (
            "delete from interlock.audit_logs where task_id = %(completed_b)s and event <> 'create';"
            "delete from interlock.job_state_transitions where job_id = %(completed)s and event = 'success';"
            "update interlock.jobs set status = 'RUNNING', event = 'allocate_resources', open_steps = 1 "
            "where id = %(completed)s;"
            "update interlock.tasks set state = 'waiting', event = null, held_by = 'dependency', attempt = 0, "
            "advanced = false, finished_at = null where id = %(completed_b)s"
        ),
        "step_not_released",
    ),
    "the open steps of a job are counted wrong": (
        "update interlock.jobs set open_steps = 7 where id = %(half)s",
        "job_counters_wrong",
    ),
    "the failed steps of a job are counted wrong": (
        "update interlock.jobs set failed_steps = 1 where id = %(half)s",
        "job_counters_wrong",
    ),
    "an ended job counts open steps": (
        "update interlock.jobs set open_steps = 1 where id = %(completed)s",
        "job_counters_wrong",
    ),
    "the dependencies of a step are counted wrong": (
        "update interlock.tasks set unresolved = 2 where id = %(half_c)s",
        "step_counters_wrong",
    ),
    "a dependency of a step counts as met": (
        "update interlock.tasks set taken = 2 where id = %(half_c)s",
        "step_counters_wrong",
    ),
    "the parts of a map are counted wrong": (
        "update interlock.tasks set unresolved = 9 where id = %(map_m)s",
        "step_counters_wrong",
    ),
    "a lease lasts until 2099": (
        "update interlock.tasks set lease_expires_at = '2099-01-01' where id = %(running)s",
        "lease_too_long",
    ),
    "a running task belongs to nobody": (
        (
            "update interlock.tasks set worker_id = 'nobody', started_at = now() - interval '10 minutes' "
            "where id = %(running)s"
        ),
        "owner_gone",
    ),
    "a lease never ends": (
        "update interlock.tasks set lease_expires_at = 'infinity' where id = %(running)s",
        "lease_too_long",
    ),
    "a lease ended before all times": (
        "update interlock.tasks set lease_expires_at = '-infinity' where id = %(running)s",
        "lease_expired",
    ),
    "a worker is live for ever": (
        "update interlock.workers set seen_until = 'infinity' where id = 'spare'",
        "lease_too_long",
    ),
    "a leader leads until 2099": (
        "insert into interlock.leaders (duty, holder, expires_at) values ('maintenance', 'gone', '2099-01-01')",
        "lease_too_long",
    ),
    "a worker counts as live until 2099": (
        "update interlock.workers set seen_until = '2099-01-01' where id = 'spare'",
        "lease_too_long",
    ),
    "a worker is supervised until 2099": (
        "update interlock.workers set supervisor_id = 'gone', supervised_until = '2099-01-01' where id = 'spare'",
        "lease_too_long",
    ),
    "a pool is supervised until 2099": (
        (
            "insert into interlock.pools (name, desired, actor, bound_to, supervised_until) "
            "values ('p', 1, 'x', 'gone', '2099-01-01')"
        ),
        "lease_too_long",
    ),
    "a lease was not recovered": (
        "update interlock.tasks set lease_expires_at = now() - interval '1 hour' where id = %(running)s",
        "lease_expired",
    ),
    "the job of steps is deleted": (
        (
            "delete from interlock.job_state_transitions where job_id = %(completed)s;"
            "delete from interlock.jobs where id = %(completed)s"
        ),
        "step_orphaned",
    ),
    "a step of a running job is deleted": (
        (
            "delete from interlock.audit_logs where task_id = %(half_d)s;"
            "delete from interlock.tasks where id = %(half_d)s"
        ),
        "job_steps_missing",
    ),
    "a step that others wait for is deleted": (
        (
            "delete from interlock.audit_logs where task_id = %(half_c)s;"
            "delete from interlock.tasks where id = %(half_c)s"
        ),
        "job_steps_missing",
    ),
    "a job has a step that its workflow does not have": (
        (
            "insert into interlock.tasks (type, job_id, step) values ('a', %(half)s, 'e');"
            f"insert into interlock.audit_logs {FORGED} "
            "select id, null, 'pending', 'create', 'x', 'x', 0, now() from interlock.tasks where step = 'e';"
            "update interlock.jobs set open_steps = open_steps + 1 where id = %(half)s"
        ),
        "step_orphaned",
    ),
    "a step that waits counts as ended": (
        (
            "update interlock.tasks set advanced = true where id = %(half_d)s;"
            "update interlock.jobs set open_steps = open_steps - 1 where id = %(half)s"
        ),
        "step_ended_early",
    ),
    "the parent of a job is gone": (
        "update interlock.jobs set parent_job_id = gen_random_uuid(), depth = 1 where id = %(half)s",
        "job_orphaned",
    ),
    "the step of a child job is gone": (
        "update interlock.jobs set parent_task_id = gen_random_uuid() where id = %(half)s",
        "job_orphaned",
    ),
    "the job of a signal is gone": (
        "insert into interlock.signals (job_id, name, sent_by) values (gen_random_uuid(), 's', 'x')",
        "row_orphaned",
    ),
    "a signal was consumed by no step": (
        (
            "insert into interlock.signals (job_id, name, sent_by, consumed_by, consumed_at) "
            "values (%(half)s, 's', 'x', 'z', now())"
        ),
        "row_orphaned",
    ),
    "a signal was consumed by a step that waits for none": (
        (
            "insert into interlock.signals (job_id, name, sent_by, consumed_by, consumed_at) "
            "values (%(half)s, 's', 'x', 'a', now())"
        ),
        "row_orphaned",
    ),
    "a running job is hidden until 2099": (
        "update interlock.jobs set not_before = '2099-01-01' where id = %(half)s",
        "job_postponed",
    ),
    "the workflow of an edge is gone": (
        (
            "insert into interlock.workflow_edges (workflow_id, upstream, downstream, condition, branch) "
            "values (gen_random_uuid(), 'a', 'b', 'after', false)"
        ),
        "row_orphaned",
    ),
    "the token of a session is gone": (
        (
            "insert into interlock.sessions (session_hash, token_id, expires_at) "
            "values (sha256('x'), gen_random_uuid(), now() + interval '1 hour')"
        ),
        "row_orphaned",
    ),
    "the definition of a workflow is unreadable": (
        "update interlock.workflows set definition = '{}' where name = 'half'",
        "workflow_damaged",
    ),
    "a step of a workflow gets more tries": (
        "update interlock.workflow_steps set max_tries = 99 where step = 'd'",
        "workflow_damaged",
    ),
    "an edge of a workflow is deleted": (
        "delete from interlock.workflow_edges where upstream = 'a' and downstream = 'c'",
        "workflow_damaged",
    ),
    "a step of a workflow is deleted": (
        "delete from interlock.workflow_steps where step = 'd'",
        "workflow_damaged",
    ),
    "the workflow of a job is deleted": (
        "update interlock.jobs set workflow_id = gen_random_uuid() where id = %(completed)s",
        "job_orphaned",
    ),
    "a step waits for a child job that was never made": (
        "update interlock.tasks set held_by = 'job' where id = %(half_c)s",
        "step_not_released",
    ),
    "a sleep has no end": ("update interlock.tasks set held_by = 'sleep' where id = %(half_c)s", "step_not_released"),
    "a sleep never ends": (
        "update interlock.tasks set held_by = 'sleep', wait_until = 'infinity' where id = %(half_c)s",
        "step_not_released",
    ),
    "a signal was sent and its step waits on": (
        (
            "update interlock.tasks set held_by = 'signal' where id = %(half_c)s;"
            "insert into interlock.signals (job_id, name, sent_by) values (%(half)s, 'c', 'x')"
        ),
        "step_not_released",
    ),
    "a step waits for a worker_count that is not reached": (
        "update interlock.tasks set held_by = 'worker_count' where id = %(half_c)s",
        "step_not_released",
    ),
    "a compensation waits in a job that undoes nothing": (
        "update interlock.tasks set held_by = 'compensation' where id = %(half_c)s",
        "step_not_released",
    ),
    "the next compensation never starts": (
        (
            "delete from interlock.audit_logs where task_id = %(half_b)s and event <> 'create';"
            "update interlock.tasks set state = 'waiting', event = null, attempt = 0, settled_attempt = null, "
            "worker_id = null, lease_expires_at = null, held_by = 'compensation' where id = %(half_b)s;"
            "update interlock.audit_logs set to_state = 'waiting' where task_id = %(half_b)s;"
            "update interlock.tasks set held_by = 'compensation' where id in (%(half_c)s, %(half_d)s);"
            "update interlock.jobs set ending = 'FAILED' where id = %(half)s"
        ),
        "step_not_released",
    ),
    "the wait of a step is unknown": (
        "update interlock.tasks set held_by = 'nonsense' where id = %(half_c)s",
        "hold_missing",
    ),
    "a task waits for a pause that has ended": (
        (
            f"insert into interlock.audit_logs {FORGED} values "
            "(%(pending)s, 'pending', 'waiting', 'hold', 'x', 'x', 0, now());"
            "update interlock.tasks set state = 'waiting', event = 'hold', held_by = 'namespace', "
            "updated_at = now() - interval '1 hour' where id = %(pending)s"
        ),
        "hold_outdated",
    ),
    "a task waits for a limit that is gone": (
        (
            f"insert into interlock.audit_logs {FORGED} values "
            "(%(pending)s, 'pending', 'waiting', 'hold', 'x', 'x', 0, now());"
            "update interlock.tasks set state = 'waiting', event = 'hold', held_by = 'limit', limit_keys = '{gone}', "
            "updated_at = now() - interval '1 hour' where id = %(pending)s"
        ),
        "hold_outdated",
    ),
    "a task waits for nothing": (
        (
            f"delete from interlock.audit_logs where id = ({last_record('pending')});"
            f"insert into interlock.audit_logs {FORGED} "
            "values (%(pending)s, null, 'waiting', 'create', '', '', 0, now());"
            "update interlock.tasks set state = 'waiting' where id = %(pending)s"
        ),
        "hold_missing",
    ),
    "two unfinished tasks have one unique key": (
        (
            "update pg_index set indisunique = false where indexrelid = 'interlock.tasks_unique'::regclass;"
            "update interlock.tasks set unique_key = 'k' where id in (%(pending)s, %(running)s);"
            "update pg_index set indisunique = true where indexrelid = 'interlock.tasks_unique'::regclass"
        ),
        "key_duplicated",
    ),
    # messages and waits
    "a sleep is over": (
        "update interlock.tasks set held_by = 'sleep', wait_until = now() - interval '1 hour' where id = %(half_c)s",
        "wait_overdue",
    ),
    "the deadline of a job has passed": (
        "update interlock.jobs set deadline_at = now() - interval '1 hour' where id = %(half)s",
        "wait_overdue",
    ),
    "the message of an ended step is lost": (
        (
            "update interlock.tasks set advanced = false, finished_at = now() - interval '1 hour', "
            "started_at = now() - interval '2 hours', created_at = now() - interval '2 hours' where id = %(half_a)s;"
            "update interlock.jobs set open_steps = open_steps + 1 where id = %(half)s;"
            "update interlock.tasks set unresolved = 2, taken = 0 where id = %(half_c)s"
        ),
        "result_not_sent",
    ),
    "a message names a step that does not exist": (
        (
            "insert into pgmq.q_orchestration_step_results (vt, message) values (now() - interval '30 seconds', "
            "jsonb_build_object('job_id', gen_random_uuid(), 'task_id', gen_random_uuid()))"
        ),
        "message_unknown",
    ),
    "a message waits": (
        (
            "insert into pgmq.q_orchestration_step_results (vt, enqueued_at, message) values "
            "(now(), now() - interval '1 hour', jsonb_build_object('job_id', %(half)s::text))"
        ),
        "queue_stalled",
    ),
    "a message failed": (
        (
            "insert into interlock.orchestration_failures (msg_id, job_id, message, error) "
            "values (1, %(half)s, '{}', 'ValueError: x')"
        ),
        "message_failed",
    ),
    "a message without a job failed": (
        "insert into interlock.orchestration_failures (msg_id, message, error) values (1, '{}', 'ValueError: x')",
        "message_ownerless",
    ),
    # schedules, limits, webhooks
    "a schedule is due in 2099": (
        "insert into interlock.schedules (name, type, every, next_at) values ('s', 'add', '1 hour', '2099-01-01')",
        "schedule_misplaced",
    ),
    "a schedule was due long ago": (
        (
            "insert into interlock.schedules (name, type, every, next_at) "
            "values ('s', 'add', '1 hour', now() - interval '3 hours')"
        ),
        "schedule_overdue",
    ),
    "a schedule is never due": (
        "insert into interlock.schedules (name, type, every, next_at) values ('s', 'add', '1 hour', 'infinity')",
        "schedule_misplaced",
    ),
    "a schedule names an unknown workflow": (
        "insert into interlock.schedules (name, workflow, cron, next_at) values ('s', 'gone', '* * * * *', now())",
        "schedule_unknown",
    ),
    "a schedule names an unknown type": (
        "insert into interlock.schedules (name, type, cron, next_at) values ('s', 'gone', '* * * * *', now())",
        "schedule_unknown",
    ),
    "a schedule names an unknown version": (
        (
            "insert into interlock.schedules (name, workflow, version, cron, next_at) "
            "values ('s', 'half', 'gone', '* * * * *', now())"
        ),
        "schedule_unknown",
    ),
    "a schedule failed": (
        (
            "insert into interlock.schedules (name, type, cron, next_at, error) "
            "values ('s', 'add', '* * * * *', now(), 'no such zone')"
        ),
        "schedule_failed",
    ),
    "usage of an unknown limit is stored": (
        "insert into interlock.limit_usage (key, used_at, starts) values ('gone', now() - interval '2 hours', 1)",
        "limit_usage_unknown",
    ),
    "a limit is used up until 2099": (
        (
            "insert into interlock.limits (key, max_starts, period) values ('k', 1, '1 minute');"
            "insert into interlock.limit_usage (key, used_at, starts) values ('k', '2099-01-01', 1)"
        ),
        "limit_usage_misplaced",
    ),
    "a task has a limit that nobody declared": (
        "update interlock.tasks set limit_keys = '{gone}' where id = %(pending)s",
        "limit_undeclared",
    ),
    "a webhook was given up": (
        (
            "insert into interlock.callbacks (job_id, state, url, error, given_up_at) "
            "values (%(completed)s, 'COMPLETED', 'http://x', 'refused', now())"
        ),
        "webhook_given_up",
    ),
    "a webhook is postponed until 2099": (
        (
            "insert into interlock.callbacks (job_id, state, url, next_try_at) "
            "values (%(completed)s, 'COMPLETED', 'http://x', '2099-01-01')"
        ),
        "webhook_overdue",
    ),
    "a webhook is overdue": (
        (
            "insert into interlock.callbacks (job_id, state, url, next_try_at) "
            "values (%(completed)s, 'COMPLETED', 'http://x', now() - interval '1 hour')"
        ),
        "webhook_overdue",
    ),
}

# Changes of the schema. They are not planted within `plant`, which puts the triggers back.
DAMAGES: dict[str, tuple[str, str]] = {
    "a guard is disabled": ("alter table interlock.tasks disable trigger guard_update", "guard_disabled"),
    "all guards of a table are disabled": ("alter table interlock.jobs disable trigger all", "guard_disabled"),
    "a guard does not fire for replicas": ("alter table interlock.tasks enable trigger guard_update", "guard_disabled"),
    "a guard fires for replicas only": (
        "alter table interlock.workers enable replica trigger record_update",
        "guard_disabled",
    ),
    "records of a month are not protected": (
        (
            "do $$ begin execute 'alter table interlock.audit_logs_' || to_char(now() at time zone 'UTC', 'YYYY_MM') "
            "|| ' disable trigger no_forgery'; end $$"
        ),
        "guard_disabled",
    ),
    "a guard is dropped": ("drop trigger guard_delete on interlock.tasks", "guard_missing"),
    "the protection of records is dropped": ("drop trigger no_change on interlock.audit_logs", "guard_missing"),
    "a guard is replaced by a weaker one": (
        (
            "create or replace trigger guard_insert before insert on interlock.tasks for each row "
            "when (new.attempt <> 0) execute function interlock.guard_tasks();"
            "alter table interlock.tasks enable always trigger guard_insert"
        ),
        "guard_changed",
    ),
    "a guard function is replaced": (
        (
            "create or replace function interlock.guard_tasks() returns trigger language plpgsql "
            "set search_path = pg_catalog, pg_temp as 'begin return new; end'"
        ),
        "function_changed",
    ),
    "a guard function runs with another search_path": (
        "alter function interlock.guard_jobs() reset search_path",
        "function_changed",
    ),
    "a function has an overload": (
        "create function interlock.map_items(x int) returns int language sql as 'select 1'",
        "function_changed",
    ),
    "a function is dropped": ("drop function interlock.map_items", "function_changed"),
    "a foreign trigger is added": (
        (
            "create function public.meddle() returns trigger language plpgsql as 'begin return new; end';"
            "create trigger meddle before update on interlock.tasks for each row execute function public.meddle()"
        ),
        "trigger_unknown",
    ),
    "a rule swallows updates": (
        "create rule swallow as on update to interlock.tasks do instead nothing",
        "rule_unknown",
    ),
    "row security hides rows": ("alter table interlock.jobs enable row level security", "rule_unknown"),
    "an index is dropped": ("drop index interlock.tasks_claim", "index_missing"),
    "an index has another predicate": (
        (
            "drop index interlock.tasks_unique; create unique index tasks_unique on interlock.tasks (unique_key) "
            "where unique_key is not null and state in ('waiting', 'pending')"
        ),
        "index_missing",
    ),
    "an index is invalid": (
        "update pg_index set indisvalid = false where indexrelid = 'interlock.tasks_parts'::regclass",
        "index_invalid",
    ),
    "a constraint is dropped": (
        "alter table interlock.tasks drop constraint tasks_leased_while_running",
        "constraint_missing",
    ),
    "a constraint of states is dropped": (
        "alter table interlock.jobs drop constraint jobs_status",
        "constraint_missing",
    ),
    "a constraint is replaced by a weaker one": (
        (
            "alter table interlock.tasks drop constraint tasks_leased_while_running;"
            "alter table interlock.tasks add constraint tasks_leased_while_running check (lease_expires_at is null "
            "or lease_expires_at > '2000-01-01')"
        ),
        "constraint_missing",
    ),
    "a constraint of states allows another": (
        (
            "alter table interlock.jobs drop constraint if exists jobs_status;"
            "alter table interlock.jobs add constraint jobs_status "
            "check (status in ('SUBMITTED', 'PENDING', 'RUNNING', 'COMPLETED', 'FAILED', 'CANCELED', 'X'))"
        ),
        "constraint_missing",
    ),
    "a constraint is not validated": (
        (
            "alter table interlock.tasks drop constraint tasks_attempt; "
            "alter table interlock.tasks add constraint tasks_attempt check (attempt >= 0) not valid"
        ),
        "constraint_invalid",
    ),
    "a function returns null for null": (
        "alter function interlock.can_be_canceled(interlock.jobs) strict",
        "function_changed",
    ),
    "a function is evaluated once": (
        "alter function interlock.replaced_by(interlock.jobs) immutable",
        "function_changed",
    ),
    "the function of ids is replaced": (
        (
            "create or replace function interlock.new_id() returns uuid language sql volatile parallel safe "
            "as 'select gen_random_uuid()'"
        ),
        "function_changed",
    ),
    "a default is dropped": ("alter table interlock.tasks alter column id drop default", "table_changed"),
    "a default is changed": ("alter table interlock.tasks alter column max_tries set default 1", "table_changed"),
    "ids are not generated": ("alter table interlock.callbacks alter column id drop identity", "table_changed"),
    "ids are generated again": (
        (
            "insert into interlock.callbacks (task_id, attempt, state, url) "
            "values (gen_random_uuid(), 1, 'done', 'http://x');"
            "alter table interlock.callbacks alter column id restart"
        ),
        "sequence_behind",
    ),
    "the view of the queue shows nothing": (
        (
            "create or replace view interlock.orchestration_messages as select msg_id, vt, message, read_ct "
            "from pgmq.q_orchestration_step_results where false"
        ),
        "view_changed",
    ),
    "a trigger swallows messages": (
        (
            "create function public.swallow() returns trigger language plpgsql as 'begin return null; end';"
            "create trigger swallow before insert on pgmq.q_orchestration_step_results for each row "
            "execute function public.swallow()"
        ),
        "trigger_unknown",
    ),
    "a table inherits": ("create table public.forged () inherits (interlock.tasks)", "object_unknown"),
    "a unique index is added": ("create unique index one on interlock.tasks (type)", "object_unknown"),
    "a constraint is added": (
        "alter table interlock.tasks add constraint few check (max_tries < 9) not valid",
        "object_unknown",
    ),
    "a mandatory column is added": (
        "alter table interlock.tasks add column price int not null",
        "object_unknown",
    ),
    "foreign keys are disabled": ("alter table interlock.sessions disable trigger all", "constraint_disabled"),
    "records of this month are detached": (
        (
            "do $$ begin execute 'alter table interlock.audit_logs detach partition interlock.audit_logs_' "
            "|| to_char(now() at time zone 'UTC', 'YYYY_MM'); end $$"
        ),
        "partition_missing",
    ),
    "a column is dropped": ("alter table interlock.tasks drop column progress cascade", "table_damaged"),
    "a column may be null": ("alter table interlock.tasks alter column type drop not null", "table_changed"),
    "a column has another type": (
        "alter table interlock.schedules alter column cron type varchar(100)",
        "table_changed",
    ),
    "a table is unlogged": ("alter table interlock.signals set unlogged", "table_changed"),
    "the default partition is dropped": ("drop table interlock.audit_logs_default", "partition_missing"),
    "the settings are deleted": ("delete from interlock.settings", "settings_missing"),
    "the partition of the next month is dropped": (
        (
            "do $$ begin execute 'drop table interlock.audit_logs_' "
            "|| to_char((now() at time zone 'UTC') + interval '1 month', 'YYYY_MM'); end $$"
        ),
        "partition_missing",
    ),
    "autovacuum is off for a table": ("alter table interlock.tasks set (autovacuum_enabled = off)", "autovacuum_off"),
    "the queue is missing": (
        "drop view interlock.orchestration_messages; select pgmq.drop_queue('orchestration_step_results')",
        "queue_missing",
    ),
    "a script of another release was applied": (
        "update interlock.schema_migrations set checksum = 'x' where name = 'guards'",
        "schema_outdated",
    ),
}
NOT_PLANTED = {
    # tested by themselves, because they are no corruption of rows or of the schema
    "database_unreachable", "server_too_old", "server_read_only", "replication_role_set", "privilege_missing",
    "clock_skewed", "table_bloated",
    "check_unfinished", "row_deleted",
    "workers_missing", "orchestrators_missing", "namespace_unserved", "type_unserved", "worker_vanished",
    "handler_leaked", "retention_behind", "transaction_long", "job_not_started",
}  # fmt: skip


@pytest.fixture(scope="session")
def busy_template(server: EmbeddedServer, template: str) -> tuple[str, dict[str, Any]]:
    """Fill the database from which those of the tests are cloned; return its name and the ids in it."""
    run_sql(server.url("postgres"), f"create database busy template {template} strategy file_copy")

    async def fill() -> dict[str, Any]:
        async with connect(server.url("busy")) as connection:
            return await busy_database(connection)

    return "busy", asyncio.run(fill())


@pytest.fixture
async def busy(
    make_database: Callable[[str], str], busy_template: tuple[str, dict[str, Any]]
) -> AsyncIterator[tuple[Connection, dict[str, Any]]]:
    """Return a database with work in many states, and the ids in it."""
    name, ids = busy_template
    async with connect(make_database(name)) as connection:
        yield connection, ids


async def codes(database: Connection, *, full: bool) -> list[str]:
    """Return the codes of the findings, each once."""
    report = await examine(database, full=full)
    assert all(finding.remedy and finding.message and finding.rows >= 1 for finding in report.findings)
    return sorted({finding.code for finding in report.findings})


async def test_a_healthy_database_has_no_findings(
    database: Connection, busy: tuple[Connection, dict[str, Any]]
) -> None:
    for full in (False, True):
        assert await codes(database, full=full) == [], "an empty one"
        report = await examine(busy[0], full=full)
        assert report.findings == ()
        assert report.severity is None


@pytest.mark.parametrize(
    "setting",
    [
        "search_path = interlock, pgmq, public",
        "intervalstyle = iso_8601",
        "datestyle = German",
        "quote_all_identifiers = on",
        "timezone = 'Asia/Kolkata'",
    ],
)
async def test_settings_of_a_session_make_no_findings(busy: tuple[Connection, dict[str, Any]], setting: str) -> None:
    await busy[0].execute(f"set {setting}".encode())
    for full in (False, True):
        assert await codes(busy[0], full=full) == []


@pytest.mark.parametrize(("statements", "code"), CORRUPTIONS.values(), ids=CORRUPTIONS)
async def test_a_planted_corruption_is_found_and_nothing_else(
    busy: tuple[Connection, dict[str, Any]], statements: str, code: str
) -> None:
    database, ids = busy
    await plant(database, statements, ids)
    assert await codes(database, full=False) == [code]
    assert await codes(database, full=True) == [code]


async def test_a_row_that_was_deleted_before_its_end_is_found(busy: tuple[Connection, dict[str, Any]]) -> None:
    database, ids = busy
    await plant(database, "delete from interlock.tasks where id = %(pending)s", ids)
    assert await codes(database, full=True) == ["row_deleted"]
    (finding,) = (await examine(database, full=True)).findings
    assert (finding.rows, finding.sample) == (1, (str(ids["pending"]),))
    assert await codes(database, full=False) == [], "a quick examination begins with the rows"


async def test_records_that_retention_dropped_are_not_missed(busy: tuple[Connection, dict[str, Any]]) -> None:
    database, ids = busy
    await plant(
        database,
        "update interlock.tasks set created_at = now() - interval '1 year', started_at = now() - interval '1 year', "
        "finished_at = now() - interval '1 year' where id = %(done)s;"
        "delete from interlock.audit_logs where task_id = %(done)s;"
        "update interlock.tasks set created_at = now() - interval '1 year' where id = %(running)s;"
        "delete from interlock.audit_logs where task_id = %(running)s and event = 'create'",
        ids,
    )
    for full in (False, True):
        assert await codes(database, full=full) == []


# The files of functions and guards have neither these constraints nor the default partition, and drop no function.
NOT_REPAIRED = {
    "a constraint is dropped",
    "a constraint is replaced by a weaker one",
    "a function has an overload",
    "the function of ids is replaced",
    "the default partition is dropped",
    "records of this month are detached",
}
REPAIRED = {
    "a job runs although every step has ended",
    "the open steps of a job are counted wrong",
    "the failed steps of a job are counted wrong",
    "an ended job counts open steps",
    "a lease lasts until 2099",
    "a leader leads until 2099",
    "a worker counts as live until 2099",
    "a worker is supervised until 2099",
    "a pool is supervised until 2099",
    "the message of an ended step is lost",
    "a schedule is due in 2099",
    "a schedule is never due",
    "a lease never ends",
    "a worker is live for ever",
    "a limit is used up until 2099",
    "a running job is hidden until 2099",
}


@pytest.mark.parametrize("name", sorted(REPAIRED))
async def test_a_repair_goes_by_legal_moves_and_leaves_no_finding(
    busy: tuple[Connection, dict[str, Any]], name: str
) -> None:
    database, ids = busy
    statements, _ = CORRUPTIONS[name]
    await plant(database, statements, ids)
    (said,) = await fix(database, (await examine(database)).findings)
    assert "not repaired" not in said
    driver = JobDriver(database)
    while (await driver.advance()).received:
        pass
    await recover_expired_tasks(database, actor="w_1")
    assert await codes(database, full=True) == [], "the records of all moves included"


async def test_a_repair_puts_guards_functions_and_partitions_back(database: Connection) -> None:
    fixable = [name for name, (_, code) in DAMAGES.items() if code in FIXABLE_CODES and name not in NOT_REPAIRED]
    for name in fixable:
        await database.execute(DAMAGES[name][0].encode())
    report = await examine(database)
    assert {finding.code for finding in report.findings} == {DAMAGES[name][1] for name in fixable}
    assert len(await fix(database, report.findings)) == 3, "all files at once, the partitions and the view"
    assert await codes(database, full=True) == ["constraint_disabled"], (
        "foreign keys of the table with no trigger at all"
    )
    await database.execute("alter table interlock.jobs enable trigger all")
    await fix(database, (await examine(database)).findings)
    assert await codes(database, full=True) == []


async def test_only_the_owner_can_put_guards_back(database: Connection, url: str) -> None:
    await database.execute("alter table interlock.tasks disable trigger guard_update")
    report = await examine(database)
    await database.execute("create role doctor_reader login")
    try:
        await grant(database, "doctor_reader")
        async with connect(url) as other:
            await other.execute("set session authorization doctor_reader")
            (said,) = await fix(other, report.findings)
            assert "only the role that owns the schema can do it" in said
            assert await codes(other, full=True) == ["guard_disabled"], "its rights are enough to examine everything"
            hidden = await other.execute(
                "select relname::text from pg_class where relnamespace = 'interlock'::regnamespace "
                "and relkind in ('r', 'p') and not relispartition and not has_table_privilege(oid, 'select')"
            )
            assert [row["relname"] for row in await hidden.fetchall()] == ["record_token"], "and to run the engine"
        await database.execute("revoke update on interlock.jobs from doctor_reader")
        async with connect(url) as other:
            await other.execute("set session authorization doctor_reader")
            (missing,) = [each for each in (await examine(other)).findings if each.code == "privilege_missing"]
            assert missing.message == "this role lacks rights: update on interlock.jobs"
    finally:
        await database.execute("drop owned by doctor_reader; drop role doctor_reader")


async def test_a_detached_partition_is_attached_by_the_remedy(database: Connection) -> None:
    await database.execute(DAMAGES["records of this month are detached"][0].encode())
    (found,) = (await examine(database)).findings
    assert "is detached" in found.message
    await database.execute(found.remedy.split("`")[1].encode())
    assert await codes(database, full=True) == []


async def test_a_replica_role_of_the_database_is_found(database: Connection, url: str) -> None:
    name = url.rpartition("/")[2].partition("?")[0]
    await database.execute(f"alter database {name} set session_replication_role = replica".encode())
    async with connect(url) as connection:
        assert await codes(connection, full=True) == ["replication_role_set"]


async def test_a_read_only_database_is_found(database: Connection, url: str) -> None:
    await database.execute(
        "alter database {} set default_transaction_read_only = on".format(
            url.rpartition("/")[2].partition("?")[0]
        ).encode()
    )
    async with connect(url) as connection:
        assert await codes(connection, full=True) == ["server_read_only"]


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("clock_timestamp() returns timestamptz as $$select now() + interval '7 seconds'$$", "clock_skewed"),
        ("clock_timestamp() returns timestamptz as $$select now() - interval '7 seconds'$$", "clock_skewed"),
        (
            (
                "current_setting(name text) returns text as $$select case name when 'server_version_num' "
                "then '140011' else pg_catalog.current_setting(name) end$$"
            ),
            "server_too_old",
        ),
        ("pg_is_in_recovery() returns boolean as $$select true$$", "server_read_only"),
    ],
)
async def test_what_the_server_says_of_itself_is_examined(database: Connection, function: str, code: str) -> None:
    """A function that comes first in the search path answers in the place of the server's own."""
    await database.execute("create schema answers")
    await database.execute(f"create function answers.{function} language sql".encode())
    await database.execute("set search_path = answers, pg_catalog")
    assert await codes(database, full=True) == [code]
    await database.execute("reset search_path")
    assert await codes(database, full=True) == []


async def test_a_table_of_dead_rows_is_found_unless_a_vacuum_was_there(database: Connection) -> None:
    fill = "insert into interlock.limit_lanes (keys, served) select array[n::text], 0 from generate_series(1, %s) as n"
    await database.execute("alter table interlock.limit_lanes set (autovacuum_vacuum_threshold = 1000000000)")
    for rows, expected in ((90_000, []), (20_000, ["table_bloated"])):
        await database.execute(fill, [rows])
        await database.execute("delete from interlock.limit_lanes")
        await database.execute("select pg_stat_force_next_flush()")
        assert await codes(database, full=False) == expected
    await database.execute("vacuum interlock.limit_lanes")
    await database.execute("select pg_stat_force_next_flush()")
    assert await codes(database, full=False) == []


async def test_a_check_that_takes_too_long_is_stopped(busy: tuple[Connection, dict[str, Any]]) -> None:
    database, _ = busy
    await database.execute("drop view interlock.orchestration_messages")
    await database.execute(
        "create view interlock.orchestration_messages as select msg_id, vt, message, read_ct "
        "from pgmq.q_orchestration_step_results, pg_sleep(60)"
    )
    await database.execute("select pgmq.send('orchestration_step_results', '{}')")
    report = await examine(database, timeout_s=0.5)
    assert {finding.code for finding in report.findings} == {"check_unfinished", "view_changed"}
    assert "records" in report.checked, "the other checks are made"


@pytest.mark.parametrize(("statements", "code"), DAMAGES.values(), ids=DAMAGES)
async def test_a_damage_of_the_schema_is_found_and_nothing_else(
    database: Connection, statements: str, code: str
) -> None:
    await database.execute(statements.encode())
    found = await codes(database, full=False)
    assert code in found
    # a dropped column takes its indexes, constraints and triggers with it
    assert found == [code] or code == "table_damaged"


def test_every_code_is_planted() -> None:
    planted = {code for _, code in (*CORRUPTIONS.values(), *DAMAGES.values())}
    assert planted | NOT_PLANTED == set(CODES)
    assert planted.isdisjoint(NOT_PLANTED)
    assert {code for code, known in CODES.items() if known.is_fixable} == FIXABLE_CODES


async def test_the_expected_catalog_is_that_of_a_fresh_database(database: Connection) -> None:
    """Nothing of the schema is left out of the comparison, except what the server or `migrate` itself makes."""
    expected = expected_catalog()
    rows = [
        (row["kind"], row["name"])
        for row in await (
            await database.execute(
                "select 'table' as kind, relname::text as name from pg_class "
                "where relnamespace = 'interlock'::regnamespace and relkind in ('r', 'p') and not relispartition "
                "union all select 'function', proname from pg_proc where pronamespace = 'interlock'::regnamespace "
                "union all select 'constraint', relname || '.' || conname from pg_constraint "
                "join pg_class on pg_class.oid = conrelid "
                "where connamespace = 'interlock'::regnamespace and contype in ('c', 'f', 'p', 'u') "
                "union all select 'index', classes.relname from pg_index join pg_class as classes "
                "on classes.oid = indexrelid where classes.relnamespace = 'interlock'::regnamespace "
                "and not classes.relispartition and not exists (select from pg_constraint where conindid = indexrelid)"
            )
        ).fetchall()
    ]
    made = {
        *(("table", name) for name in expected.columns),
        *(("function", name) for name in expected.functions),
        *(("constraint", f"{table}.{name}") for table, name in expected.constraints),
        *(("index", name) for name in expected.indexes),
    }
    assert made ^ set(rows) == {
        ("function", "new_id"),  # differs with the version of the server
        ("table", "schema_migrations"),
        ("constraint", "schema_migrations.schema_migrations_pkey"),
        ("constraint", "schema_migrations.schema_migrations_version_key"),
    }


@pytest.mark.unit
def test_the_page_lists_every_code() -> None:
    page = Path(__file__).parent.parent.parent.joinpath("docs/doctor.md").read_text(encoding="utf-8")
    for code, known in CODES.items():
        fix_column = "yes |" if known.is_fixable else "|"
        assert f"| `{code}` | {known.severity} | {known.meaning} | {known.remedy} | {fix_column}\n" in page
    assert page.count("\n| `") == len(CODES)
