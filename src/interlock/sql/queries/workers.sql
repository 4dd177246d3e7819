-- Statements that write to `workers`. Each move is written in one statement, whose header declares it.

-- name: insert_worker
insert into interlock.workers (id, workspace_id, metadata, created_at, updated_at)
select coalesce(%(id)s, 'w_' || interlock.new_id()), %(workspace_id)s, %(metadata)s,
    coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now())
where (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: start_idle_worker
-- moves: supervised worker IDLE -start_task-> RUNNING
update interlock.workers
set status = 'RUNNING', event = 'start_task', reason = %(reason)s,
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
where id = %(id)s and status = 'IDLE'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: pause_running_worker
-- moves: supervised worker RUNNING -pause-> PAUSED
update interlock.workers
set status = 'PAUSED', event = 'pause', reason = %(reason)s,
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
where id = %(id)s and status = 'RUNNING'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: resume_paused_worker
-- moves: supervised worker PAUSED -resume-> RUNNING
update interlock.workers
set status = 'RUNNING', event = 'resume', reason = %(reason)s,
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
where id = %(id)s and status = 'PAUSED'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: complete_running_worker
-- moves: supervised worker RUNNING -complete_tasks-> COMPLETED
update interlock.workers
set status = 'COMPLETED', event = 'complete_tasks', reason = %(reason)s,
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
where id = %(id)s and status = 'RUNNING'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: fail_running_worker
-- moves: supervised worker RUNNING -error_unrecoverable-> FAILED
update interlock.workers
set status = 'FAILED', event = 'error_unrecoverable', reason = %(reason)s,
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
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
set status = 'TERMINATED', event = 'terminate', reason = %(reason)s,
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
where id = %(id)s and status <> 'TERMINATED'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: insert_present_worker
-- Registers a process with the namespaces and types that it serves. It is live from its start until seen_until.
insert into interlock.workers (id, metadata, namespaces, types, seen_until, heartbeat_at, created_at, updated_at)
select %(id)s, %(metadata)s, %(namespaces)s::text[], %(types)s::text[],
    coalesce(%(now)s::timestamptz, now()) + %(lease)s::interval, coalesce(%(now)s::timestamptz, now()),
    coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now())
where (select set_config('interlock.actor', %(actor)s, true)) is not null
on conflict (id) do nothing
returning id

-- name: record_heartbeat
-- The heartbeat. Returns no row when the worker row is gone, has ended, or belongs to a process of a later generation:
-- then the process must read its row.
update interlock.workers
set seen_until = coalesce(%(now)s::timestamptz, now()) + %(lease)s::interval,
    heartbeat_at = coalesce(%(now)s::timestamptz, now()), namespaces = %(namespaces)s::text[],
    types = %(types)s::text[],
    metadata = metadata || %(metadata)s, updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
where id = %(id)s and status in ('IDLE', 'RUNNING', 'PAUSED')
    and generation = coalesce(%(generation)s::int, generation)
returning status

-- name: read_worker_status
select status
from interlock.workers
where id = %(id)s

-- name: list_live_workers
-- Every process with a recent heartbeat, orchestrators included. A time that Python cannot read is shown as the nearest one.
select id, status, metadata, namespaces, types, heartbeat_at, least(seen_until, '9998-12-31') as seen_until, created_at
from interlock.workers
where seen_until > coalesce(%(now)s::timestamptz, now()) and status in ('IDLE', 'RUNNING', 'PAUSED')
order by created_at, id

-- name: notify_jobs_of_worker
-- Notifies orchestrators, because jobs may wait for a worker of these namespaces, and the leader, because tasks with a
-- limit may.
select pg_notify('interlock_orchestration', 'workers'), pg_notify('interlock_duties', 'limits')

-- name: notify_control
select pg_notify('interlock_control', %(payload)s)

-- name: notify_answer
select pg_notify('interlock_answers', %(payload)s)

-- name: count_refused_move
select interlock.count_refused_move(%(machine)s, %(from_state)s, %(to_state)s)

-- name: request_kill
update interlock.workers
set kill_requested_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s
returning id

-- name: lock_worker
select status, pid, metadata ? 'spec' as supervised
from interlock.workers
where id = %(id)s
for update

-- name: resolve_worker_id
-- A row by its id or by the instance of one of its processes: the id, the number of the start and eight hexadecimal
-- digits. The row keeps the latest instance only; tasks that ended name earlier ones.
select id
from interlock.workers
where id = any (array[%(name)s, regexp_replace(%(name)s, '-[0-9]+-[0-9a-f]{8}$', '')])
order by id = %(name)s desc
limit 1

-- name: read_worker
select id, workspace_id, status, event, reason, metadata, namespaces, types, heartbeat_at, seen_until, created_at,
    updated_at, coalesce(seen_until > now(), false) and status in ('IDLE', 'RUNNING', 'PAUSED') as live,
    supervisor_id, host, pid, generation, instance, process_note, suspected_tasks, pool, restart_at,
    memory_bytes
from interlock.workers
where id = %(id)s

-- name: find_workers
-- Looks at no more than `window` workers, the newest first, and returns those that meet all conditions, at most `limit`,
-- and the last one of the window, as the statements of `lists.sql` do. Not prepared.
select *
from (
        select id, workspace_id, status, event, reason, metadata, namespaces, types, heartbeat_at, seen_until,
            created_at, updated_at,
            coalesce(seen_until > now(), false) and status in ('IDLE', 'RUNNING', 'PAUSED') as live,
            supervisor_id, host, pid, generation, instance, process_note, suspected_tasks, pool, restart_at,
            memory_bytes, looked_at,
            (%(statuses)s::text[] is null or status = any (%(statuses)s::text[]))
            and (%(namespace)s::text is null or coalesce(%(namespace)s = any (namespaces), false))
            and (%(namespaces)s::text[] is null or coalesce(namespaces && %(namespaces)s::text[], false))
            and (%(host)s::text is null or coalesce(host = %(host)s, false))
            and (%(workspace_id)s::text is null or coalesce(workspace_id = %(workspace_id)s, false))
            and (%(pool)s::text is null or coalesce(pool = %(pool)s, false))
            and (%(role)s::text is null or coalesce(metadata ->> 'role', 'worker') = %(role)s) as matches
        from (
                select *, row_number() over (order by created_at desc, id desc) as looked_at
                from interlock.workers
                where (%(created_after)s::timestamptz is null or created_at >= %(created_after)s)
                    and (%(created_before)s::timestamptz is null or created_at < %(created_before)s)
                    and (%(before_time)s::timestamptz is null or (created_at, id) < (%(before_time)s, %(before_id)s))
                order by created_at desc, id desc
                limit %(window)s
            ) as newest
    ) as found
where matches or looked_at = %(window)s
order by created_at desc, id desc
limit %(limit)s

-- name: read_worker_moves
select id, from_state, to_state, event, reason, actor, database_role, recorded_at
from interlock.worker_state_transitions
where worker_id = %(id)s and id > %(after)s
order by id
limit %(limit)s

-- name: read_last_worker_move
select id, from_state, to_state, event, reason, actor, database_role, recorded_at
from interlock.worker_state_transitions
where worker_id = %(id)s
order by id desc
limit 1
