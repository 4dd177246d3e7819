-- Everything that is written to `workers`. Each move stands in exactly one statement, and says so in its header.

-- name: insert_worker
insert into interlock.workers (id, workspace_id, metadata, created_at, updated_at)
select coalesce(%(id)s, 'w_' || interlock.new_id()), %(workspace_id)s, %(metadata)s,
    coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now())
where (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: start_idle_worker
-- moves: supervised worker IDLE -start_task-> RUNNING
update interlock.workers
set status = 'RUNNING', event = 'start_task', reason = %(reason)s, updated_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and status = 'IDLE'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: pause_running_worker
-- moves: supervised worker RUNNING -pause-> PAUSED
update interlock.workers
set status = 'PAUSED', event = 'pause', reason = %(reason)s, updated_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and status = 'RUNNING'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: resume_paused_worker
-- moves: supervised worker PAUSED -resume-> RUNNING
update interlock.workers
set status = 'RUNNING', event = 'resume', reason = %(reason)s, updated_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and status = 'PAUSED'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: complete_running_worker
-- moves: supervised worker RUNNING -complete_tasks-> COMPLETED
update interlock.workers
set status = 'COMPLETED', event = 'complete_tasks', reason = %(reason)s, updated_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and status = 'RUNNING'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: fail_running_worker
-- moves: supervised worker RUNNING -error_unrecoverable-> FAILED
update interlock.workers
set status = 'FAILED', event = 'error_unrecoverable', reason = %(reason)s, updated_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and status = 'RUNNING'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: terminate_worker
-- moves: supervised worker IDLE -terminate-> TERMINATED
-- moves: supervised worker RUNNING -terminate-> TERMINATED
-- moves: supervised worker PAUSED -terminate-> TERMINATED
-- moves: supervised worker COMPLETED -terminate-> TERMINATED
-- moves: supervised worker FAILED -terminate-> TERMINATED
update interlock.workers
set status = 'TERMINATED', event = 'terminate', reason = %(reason)s, updated_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and status <> 'TERMINATED'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: read_worker_history
select from_state, to_state, event, reason, actor, recorded_at
from interlock.worker_state_transitions
where worker_id = %(id)s
order by id
