-- Inserts, moves and reads of `jobs`. Each move is written in exactly one statement or function, as its header says.
--
-- The statements take many jobs at once. A transaction that moves a job, or a step because of another one, has locked the
-- job first, in the order of the ids.

-- name: insert_jobs
insert into interlock.jobs (id, parent_job_id, parent_task_id, depth, worker_count, task_description, namespace, input,
    workflow_id, request_id, correlation_id, actor, root_namespaces, timeout_seconds, deadline_at, open_steps,
    retried_from, reused, created_at, updated_at)
select given.id, given.parent_job_id, given.parent_task_id, coalesce(given.depth, 0), given.worker_count,
    given.workflow, given.namespace, coalesce(given.input, '{}'), given.workflow_id, given.request_id,
    coalesce(given.correlation_id, given.id), %(actor)s, given.root_namespaces, given.timeout_seconds,
    -- `least` ignores nulls, hence the case
    case
        when given.timeout_seconds is not null
        then coalesce(%(now)s::timestamptz, now()) + make_interval(secs => least(given.timeout_seconds, 3155760000))
    end,
    (select count(*) from interlock.workflow_steps where workflow_steps.workflow_id = given.workflow_id),
    given.retried_from, given.reused, coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now())
from jsonb_to_recordset(%(jobs)s::jsonb) as given (id uuid, parent_job_id uuid, parent_task_id uuid, depth int,
    worker_count int, workflow text, namespace text, input jsonb, workflow_id uuid, request_id text,
    correlation_id uuid, root_namespaces text[], timeout_seconds float8, retried_from uuid, reused jsonb)
where (select set_config('interlock.actor', %(actor)s, true)) is not null
on conflict do nothing
returning id

-- name: find_submitted_jobs
-- Finds existing jobs by request id.
select jobs.id, jobs.request_id, workflows.name as workflow
from interlock.jobs
    left join interlock.workflows on workflows.id = jobs.workflow_id
where request_id = any (%(request_ids)s::text[]) and request_id is not null

-- name: validate_submitted_jobs
-- moves: job SUBMITTED -validate-> PENDING
update interlock.jobs
set status = 'PENDING', event = 'validate', reason = given.reason, updated_at = coalesce(%(now)s::timestamptz, now())
from unnest(%(ids)s::uuid[], %(reasons)s::text[]) as given (id, reason)
where jobs.id = any (%(ids)s::uuid[]) and jobs.id = given.id and status = 'SUBMITTED'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning jobs.id

-- name: reject_submitted_jobs
-- moves: job SUBMITTED -reject-> FAILED
update interlock.jobs
set status = 'FAILED', event = 'reject', reason = %(reason)s, error = %(error)s, open_steps = 0,
    completed_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
where id = any (%(ids)s::uuid[]) and status = 'SUBMITTED'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: start_pending_jobs
-- moves: job PENDING -allocate_resources-> RUNNING
update interlock.jobs
set status = 'RUNNING', event = 'allocate_resources', reason = %(reason)s,
    started_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
where id = any (%(ids)s::uuid[]) and status = 'PENDING'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: complete_running_jobs
-- The function of the same name makes the move. Jobs whose output is too large to be stored are not returned.
select id
from interlock.complete_running_jobs(%(actor)s, %(ids)s::uuid[], %(workflow_ids)s::uuid[], %(failed_steps)s::int[],
    %(reason)s, %(now)s::timestamptz)

-- name: fail_running_jobs
-- moves: job RUNNING -error-> FAILED
update interlock.jobs
set status = 'FAILED', event = 'error', reason = given.reason, error = given.error, open_steps = 0,
    failed_steps = coalesce(given.failed_steps, jobs.failed_steps),
    completed_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
from jsonb_to_recordset(%(jobs)s::jsonb) as given (id uuid, reason text, error jsonb, failed_steps int)
where jobs.id = any (%(ids)s::uuid[]) and jobs.id = given.id and status = 'RUNNING'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning jobs.id

-- name: cancel_unfinished_jobs
-- moves: job SUBMITTED -cancel-> CANCELED
-- moves: job PENDING -cancel-> CANCELED
-- moves: job RUNNING -cancel-> CANCELED
update interlock.jobs
set status = 'CANCELED', event = 'cancel', reason = given.reason, error = coalesce(given.error, jobs.error),
    open_steps = 0, failed_steps = coalesce(given.failed_steps, jobs.failed_steps),
    completed_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
from jsonb_to_recordset(%(jobs)s::jsonb) as given (id uuid, reason text, error jsonb, failed_steps int)
where jobs.id = any (%(ids)s::uuid[]) and jobs.id = given.id and status in ('SUBMITTED', 'PENDING', 'RUNNING')
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning jobs.id

-- name: update_jobs
-- Updates the counters and the ending of jobs that go on, and deletes the handled messages. A transaction that its messages
-- would repeat after a crash commits asynchronously: a crash that loses it restores the messages.
with counted as (
    update interlock.jobs
    set open_steps = given.open_steps, failed_steps = given.failed_steps, ending = coalesce(given.ending, jobs.ending),
        ending_reason = coalesce(given.ending_reason, jobs.ending_reason),
        compensating = jobs.compensating or coalesce(given.compensating, false),
        reason = coalesce(given.reason, jobs.reason), error = coalesce(given.error, jobs.error),
        updated_at = coalesce(%(now)s::timestamptz, now())
    from jsonb_to_recordset(%(jobs)s::jsonb) as given (id uuid, open_steps int, failed_steps int, ending text,
        ending_reason text, compensating boolean, reason text, error jsonb)
    where jobs.id = any (%(ids)s::uuid[]) and jobs.id = given.id
    returning jobs.id
)
select (select count(*) from counted) as counted,
    case
        when cardinality(%(messages)s::bigint[]) > 0
            then (select count(*) from interlock.settings, pgmq.delete(orchestration_queue, %(messages)s::bigint[]))
    end as deleted,
    case when %(repeatable)s::boolean then set_config('synchronous_commit', 'off', true) end as commits

-- name: read_jobs
select jobs.id, workflows.name as workflow, workflows.version, jobs.namespace, jobs.status, jobs.event, jobs.reason,
    jobs.input, jobs.output, jobs.error, jobs.worker_count, jobs.depth, jobs.parent_job_id, jobs.parent_task_id,
    jobs.retried_from, jobs.request_id, jobs.correlation_id, jobs.actor, jobs.ending, jobs.open_steps,
    jobs.timeout_seconds, jobs.deadline_at, jobs.created_at, jobs.started_at, jobs.completed_at, jobs.updated_at
from interlock.jobs
    left join interlock.workflows on workflows.id = jobs.workflow_id
where jobs.id = any (%(ids)s::uuid[])
order by jobs.id

-- name: find_jobs
-- Finds jobs, newest first, with cursor pagination: `before` is the last id of the page before. Null means "any".
select jobs.id, workflows.name as workflow, workflows.version, jobs.namespace, jobs.status, jobs.event, jobs.reason,
    jobs.depth, jobs.parent_job_id, jobs.retried_from, jobs.request_id, jobs.correlation_id, jobs.actor, jobs.ending,
    jobs.open_steps, jobs.deadline_at, jobs.created_at, jobs.started_at, jobs.completed_at, jobs.updated_at
from interlock.jobs
    left join interlock.workflows on workflows.id = jobs.workflow_id
where (%(status)s::text is null or jobs.status = %(status)s::text)
    and (%(workflow)s::text is null or jobs.workflow_id = any (array(
        select id from interlock.workflows where name = %(workflow)s::text
    )))
    and (%(namespace)s::text is null or jobs.namespace = %(namespace)s::text)
    and (%(parent)s::uuid is null or jobs.parent_job_id = %(parent)s::uuid)
    and (%(before)s::uuid is null or jobs.id < %(before)s::uuid)
order by jobs.id desc
limit %(limit)s

-- name: read_job_history
select from_state, to_state, event, reason, actor, recorded_at
from interlock.job_state_transitions
where job_id = %(id)s
order by id

-- name: notify_ended_jobs
select pg_notify('interlock_done', id::text)
from unnest(%(ids)s::uuid[]) as ended (id)
where exists (select from interlock.waiters where task_id = ended.id)
