-- Everything that is written to `jobs`. Each move stands in exactly one statement, and says so in its header.

-- name: insert_job
insert into interlock.jobs (id, parent_job_id, depth, worker_count, task_description, namespace, input,
    created_at, updated_at)
select coalesce(%(id)s::uuid, interlock.new_id()), %(parent_job_id)s, %(depth)s, %(worker_count)s,
    %(task_description)s, %(namespace)s, %(input)s,
    coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now())
where (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: validate_submitted_job
-- moves: job SUBMITTED -validate-> PENDING
update interlock.jobs
set status = 'PENDING', event = 'validate', reason = %(reason)s, updated_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and status = 'SUBMITTED'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: reject_submitted_job
-- moves: job SUBMITTED -reject-> FAILED
update interlock.jobs
set status = 'FAILED', event = 'reject', reason = %(reason)s, error = %(error)s,
    completed_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and status = 'SUBMITTED'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: start_pending_job
-- moves: job PENDING -allocate_resources-> RUNNING
update interlock.jobs
set status = 'RUNNING', event = 'allocate_resources', reason = %(reason)s,
    started_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and status = 'PENDING'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: complete_running_job
-- moves: job RUNNING -success-> COMPLETED
update interlock.jobs
set status = 'COMPLETED', event = 'success', reason = %(reason)s, output = %(output)s,
    completed_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and status = 'RUNNING'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: fail_running_job
-- moves: job RUNNING -error-> FAILED
update interlock.jobs
set status = 'FAILED', event = 'error', reason = %(reason)s, error = %(error)s,
    completed_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and status = 'RUNNING'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: cancel_unfinished_job
-- moves: job SUBMITTED -cancel-> CANCELED
-- moves: job PENDING -cancel-> CANCELED
-- moves: job RUNNING -cancel-> CANCELED
update interlock.jobs
set status = 'CANCELED', event = 'cancel', reason = %(reason)s,
    completed_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and status in ('SUBMITTED', 'PENDING', 'RUNNING')
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: read_job_history
select from_state, to_state, event, reason, actor, recorded_at
from interlock.job_state_transitions
where job_id = %(id)s
order by id
