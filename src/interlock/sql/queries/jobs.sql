-- Inserts, moves and reads of `jobs`. Each move is written in exactly one statement or function, as its header says.
--
-- The statements take many jobs at once. A transaction that moves a job, or a step because of another one, has locked the
-- job first, in the order of the ids.

-- name: insert_jobs
select id
from interlock.insert_jobs(%(jobs)s::jsonb, %(actor)s, %(now)s::timestamptz) as inserted (id)

-- name: submit_jobs
-- Submits jobs whose inputs are checked, and returns the outcome for each.
select given_id, outcome, job_id, reason, needs_activation
from interlock.submit_jobs(%(jobs)s::jsonb, %(actor)s, %(now)s::timestamptz, checked => true,
    may_activate => %(may_activate)s)

-- name: submit_as_text
select id, created
from interlock.submit(workflow => cast(%(workflow)s as text), input => cast(cast(%(input)s as text) as jsonb),
    version => cast(%(version)s as text), request_id => cast(%(request_id)s as text), key => cast(%(key)s as text),
    on_conflict => cast(%(on_conflict)s as text), debounce => cast(cast(%(debounce)s as text) as interval),
    debounce_max => cast(cast(%(debounce_max)s as text) as interval),
    worker_count => cast(cast(%(worker_count)s as text) as int),
    timeout_seconds => cast(cast(%(timeout)s as text) as double precision),
    correlation_id => cast(cast(%(correlation_id)s as text) as uuid), traceparent => cast(%(traceparent)s as text),
    tags => cast(cast(%(tags)s as text) as text[]),
    attributes => cast(cast(%(attributes)s as text) as jsonb), callback_url => cast(%(callback_url)s as text),
    actor => cast(%(actor)s as text))

-- name: find_submitted_jobs
-- Finds existing jobs by the request ids of given ones, and in what they differ.
select given_id, id, request_id, differing
from interlock.find_submitted_jobs(%(jobs)s::jsonb)

-- name: validate_submitted_jobs
-- The function of the same name makes the move.
select id
from interlock.validate_submitted_jobs(%(actor)s, %(ids)s::uuid[], %(reasons)s::text[], %(now)s::timestamptz)

-- name: reject_submitted_jobs
-- moves: job SUBMITTED -reject-> FAILED
update interlock.jobs
set status = 'FAILED', event = 'reject', reason = %(reason)s, error = %(error)s, open_steps = 0,
    completed_at = coalesce(%(now)s::timestamptz, clock_timestamp()),
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
where id = any (%(ids)s::uuid[]) and status = 'SUBMITTED'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: start_pending_jobs
-- The function of the same name makes the move.
select id
from interlock.start_pending_jobs(%(actor)s, %(ids)s::uuid[], %(reason)s, %(now)s::timestamptz)

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
    completed_at = coalesce(%(now)s::timestamptz, clock_timestamp()),
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
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
    completed_at = coalesce(%(now)s::timestamptz, clock_timestamp()),
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
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
        cancel_reason = coalesce(given.cancel_reason, jobs.cancel_reason),
        compensating = jobs.compensating or coalesce(given.compensating, false),
        reason = coalesce(given.reason, jobs.reason), error = coalesce(given.error, jobs.error),
        updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
    from jsonb_to_recordset(%(jobs)s::jsonb) as given (id uuid, open_steps int, failed_steps int, ending text,
        ending_reason text, cancel_reason text, compensating boolean, reason text, error jsonb)
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
    jobs.timeout_seconds, jobs.deadline_at, jobs.created_at, jobs.started_at, jobs.completed_at, jobs.updated_at,
    jobs.tags, jobs.attributes, jobs.callback_url, jobs.key, jobs.on_conflict, notice.callback
from interlock.jobs
    left join interlock.workflows on workflows.id = jobs.workflow_id
    left join lateral (
        select jsonb_build_object('tries', tries, 'next_try_at', next_try_at, 'given_up_at', given_up_at,
            'error', callbacks.error) as callback
        from interlock.callbacks
        where callbacks.job_id = jobs.id
    ) as notice on jobs.callback_url is not null
where jobs.id = any (%(ids)s::uuid[])
order by jobs.id

-- name: read_job_history
-- From the record `after` on; all of them if `limit` is null.
select id, from_state, to_state, event, reason, actor, database_role, recorded_at
from interlock.job_state_transitions
where job_id = %(id)s and id > %(after)s
order by id
limit %(limit)s

-- name: notify_ended_jobs
select pg_notify('interlock_done', id::text)
from unnest(%(ids)s::uuid[]) as ended (id)
where exists (select from interlock.waiters where task_id = ended.id)

-- name: read_submitted_jobs
-- Reads jobs that are due and were stored without being validated: by SQL, or debounced. Here and below, locked jobs are
-- left to the next call.
select jobs.id, jobs.task_description as workflow, jobs.input,
    nullif(workflows.definition -> 'input_schema', 'null') as schema,
    coalesce(interlock.hold_reason('key', jobs.key, interlock.job_ahead(jobs)::text),
        interlock.unserved_reason(jobs.root_namespaces, %(now)s::timestamptz)) as hold
from interlock.jobs
    join interlock.workflows on workflows.id = jobs.workflow_id
where jobs.status = 'SUBMITTED' and jobs.ending is null
    and coalesce(jobs.not_before, jobs.created_at) <= coalesce(%(now)s::timestamptz, now())
    and (jobs.key is null or interlock.replaced_by(jobs) is null)
order by coalesce(jobs.not_before, jobs.created_at)
limit %(limit)s
for no key update of jobs skip locked

-- name: read_queued_jobs
-- Reads the PENDING jobs that are first in the queue of their key, while no job with that key runs, all of whose root
-- namespaces have a live worker.
with live as materialized (
    select coalesce(array_agg(distinct served.namespace), '{}') as namespaces
    from interlock.workers
        cross join lateral unnest(workers.namespaces) as served (namespace)
    where status = 'RUNNING' and seen_until > coalesce(%(now)s::timestamptz, now())
), firsts as materialized (
    select distinct on (task_description, key) id, task_description, key, workflow_id
    from interlock.jobs
    where key is not null and status in ('SUBMITTED', 'PENDING')
    order by task_description, key, key_order
)
select jobs.id
from firsts
    join interlock.workflows on workflows.id = firsts.workflow_id
    cross join lateral (
        select id
        from interlock.jobs
        where jobs.id = firsts.id and status = 'PENDING' and ending is null and interlock.replaced_by(jobs) is null
            and (not_before is null or not_before <= coalesce(%(now)s::timestamptz, now()))
        limit 1
        for no key update skip locked
    ) as jobs
where workflows.root_namespaces <@ (select namespaces from live)
    and not exists (
        select from interlock.jobs as running
        where running.task_description = firsts.task_description and running.key = firsts.key
            and running.key is not null and running.status = 'RUNNING'
    )
limit %(limit)s

-- name: read_replaced_jobs
-- Reads unfinished jobs that a later one with the same key replaces, and that one.
select replaced.id, replacing.id as replaced_by
from (
        select distinct task_description, key
        from interlock.jobs
        where key is not null and status in ('SUBMITTED', 'PENDING')
            and (on_conflict = 'cancel_in_progress' or debounced_since is not null)
    ) as keys
    cross join lateral (
        select jobs.*
        from interlock.jobs
        where jobs.task_description = keys.task_description and jobs.key = keys.key and jobs.key is not null
            and jobs.status in ('SUBMITTED', 'PENDING', 'RUNNING') and interlock.can_be_canceled(jobs)
        for no key update skip locked
    ) as replaced
    cross join lateral (select interlock.replaced_by(replaced::interlock.jobs) as id offset 0) as replacing
where replacing.id is not null
limit %(limit)s

-- name: refresh_key_reasons
-- Updates the reason of jobs that wait for their key: the job ahead may be another one now, or none.
update interlock.jobs
set reason = found.reason, updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
from (
        select waiting.id, held.reason
        from interlock.jobs as waiting
            cross join lateral (
                select coalesce(interlock.hold_reason('key', waiting.key, interlock.job_ahead(waiting)::text),
                    format('is the next job with key %%L', waiting.key)) as reason
            ) as held
        where waiting.key is not null and waiting.status in ('SUBMITTED', 'PENDING') and waiting.status = 'PENDING'
            and waiting.reason like 'waits for job %%' and waiting.reason <> held.reason
        limit %(limit)s
        for no key update of waiting skip locked
    ) as found
where jobs.id = found.id
returning jobs.id
