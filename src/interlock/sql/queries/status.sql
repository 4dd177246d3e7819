-- Overviews of the queue, and the details of one task. No statement here writes.

-- name: read_tasks_size
-- Size of the table: a large one is counted by its indexes only.
select pg_relation_size('interlock.tasks') as bytes

-- name: count_all_tasks
-- One pass over the table, finished tasks included.
select namespace, state, count(*) as tasks,
    min(run_at) filter (where state = 'pending' and run_at <= coalesce(%(now)s::timestamptz, now())) as oldest_due_at
from interlock.tasks
group by namespace, state
order by namespace, state

-- name: count_unfinished_tasks
-- Each part uses its own index; finished tasks are not read. Tasks that wait for something other than a namespace or a
-- limit have no index and are not counted.
select namespace, 'pending' as state, count(*) as tasks,
    min(run_at) filter (where run_at <= coalesce(%(now)s::timestamptz, now())) as oldest_due_at
from interlock.tasks
where state = 'pending'
group by namespace
union all
select namespace, 'running', count(*), null
from interlock.tasks
where lease_expires_at is not null
group by namespace
union all
select namespace, 'waiting', count(*), null
from interlock.tasks
where state = 'waiting' and held_by = 'namespace'
group by namespace
union all
select namespace, 'waiting', count(*), null
from interlock.tasks
where limit_key is not null and state = 'waiting' and held_by = 'limit'
group by namespace
order by namespace, state

-- name: count_all_jobs
select namespace, status, count(*) as jobs
from interlock.jobs
group by namespace, status
order by namespace, status

-- name: count_unfinished_jobs
select namespace, status, count(*) as jobs
from interlock.jobs
where status in ('SUBMITTED', 'PENDING', 'RUNNING')
group by namespace, status
order by namespace, status

-- name: list_paused_namespaces
select name, paused_at, paused_by, reason
from interlock.namespaces
where paused_at is not null
order by name

-- name: list_limits
-- Every limit, the tasks that count against it, the starts in its period, and the tasks that wait for it.
select limits.key, limits.max_running, limits.max_starts, limits.period, taken.tasks as taken, begun.starts,
    held.tasks as waiting
from interlock.limits
    cross join lateral (
        select count(*) as tasks
        from interlock.tasks
        where limit_key = limits.key and limit_key is not null and state in ('pending', 'running')
    ) as taken
    cross join lateral (
        select coalesce(sum(starts), 0)::int as starts
        from interlock.limit_starts
        where key = limits.key and started_at > coalesce(%(now)s::timestamptz, now()) - limits.period
    ) as begun
    cross join lateral (
        select count(*) as tasks
        from interlock.tasks
        where limit_key = limits.key and limit_key is not null and state = 'waiting' and held_by = 'limit'
    ) as held
order by held.tasks desc, limits.key

-- name: read_task_details
-- The whole row of a task, and the state of its webhook until it is delivered.
select tasks.id, tasks.type, tasks.namespace, tasks.state, tasks.event, tasks.reason, tasks.held_by, tasks.priority,
    tasks.run_at, tasks.attempt, tasks.tries, tasks.crashes, tasks.max_tries, tasks.timeout_seconds, tasks.backoff, tasks.worker_id,
    tasks.lease_expires_at, tasks.cancel_requested_at, tasks.progress, tasks.cost, tasks.job_id, tasks.step,
    tasks.limit_key, tasks.unique_key, tasks.request_id, tasks.tags, tasks.correlation_id, tasks.callback_url,
    notice.callback, tasks.created_at, tasks.started_at, tasks.finished_at, tasks.updated_at, tasks.input,
    tasks.checkpoint, tasks.output, tasks.error
from interlock.tasks
    left join lateral (
        select jsonb_build_object('tries', callbacks.tries, 'next_try_at', callbacks.next_try_at,
            'given_up_at', callbacks.given_up_at, 'error', callbacks.error) as callback
        from interlock.callbacks
        where callbacks.task_id = tasks.id
        order by callbacks.id desc
        limit 1
    ) as notice on tasks.callback_url is not null
where tasks.id = %(id)s
