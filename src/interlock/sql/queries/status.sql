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
from (
    select namespace, run_at from interlock.tasks where state = 'pending' and limit_keys is null
    union all
    select namespace, run_at from interlock.tasks where state = 'pending' and limit_keys is not null
) as pending
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
where limit_keys is not null and state = 'waiting' and held_by = 'limit'
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
-- Every key in use with its rule, and every rule that no key uses: tasks that count against it, its use within the
-- period, tasks that wait for it, and the time at which it has room again.
with lanes as materialized (
    select limit_keys, state = 'waiting' as is_waiting, count(*) as tasks,
        count(*) filter (where state = 'pending' and run_at <= coalesce(%(now)s::timestamptz, now())) as due,
        coalesce(sum(coalesce(limit_weight, 1)) filter (
            where state = 'pending' and run_at <= coalesce(%(now)s::timestamptz, now())), 0) as due_weight
    from (
        select limit_keys, state, run_at, limit_weight
        from interlock.tasks
        where limit_keys is not null and state in ('pending', 'running')
        union all
        select limit_keys, state, run_at, limit_weight
        from interlock.tasks
        where limit_keys is not null and state = 'waiting' and held_by = 'limit'
    ) as limited
    group by limit_keys, is_waiting
), counted as (
    select wanted.key, coalesce(sum(tasks) filter (where not is_waiting), 0)::int as taken,
        coalesce(sum(tasks) filter (where is_waiting), 0)::int as waiting, sum(due)::int as due,
        sum(due_weight) as due_weight
    from lanes
        cross join lateral unnest(limit_keys) as wanted (key)
    group by wanted.key
    union all
    select used.key, 0, 0, 0, 0
    from (select distinct key from interlock.limit_usage) as used
    where not exists (select from lanes where used.key = any (limit_keys))
)
select counted.key, rule.key as rule, rule.max_running, rule.max_starts, rule.max_weight, rule.max_cost, rule.period,
    rule.share, counted.taken, coalesce(used.starts, 0) as starts, coalesce(used.weight, 0) as weight,
    coalesce(used.cost, 0) as cost, counted.waiting,
    case
        when counted.waiting > 0 then interlock.limit_frees_at(counted.key, rule,
            coalesce(%(now)s::timestamptz, now()), counted.due, counted.due_weight, 1)
    end as next_at, rule.declared, rule.overridden_by, rule.overridden_at, rule.override_reason
from counted
    left join lateral interlock.limit_rule(counted.key) as rule on true
    left join lateral interlock.limit_use(counted.key, rule.period, coalesce(%(now)s::timestamptz, now())) as used on true
union all
select key, key, max_running, max_starts, max_weight, max_cost, period, share, 0, 0, 0, 0, 0, null, declared,
    overridden_by, overridden_at, override_reason
from interlock.limits
where not exists (select from counted where counted.key = limits.key)
order by waiting desc, key

-- name: read_task_details
-- The whole row of a task, and the state of its webhook until it is delivered.
select tasks.id, tasks.type, tasks.namespace, tasks.state, tasks.event, tasks.reason, tasks.held_by, tasks.priority,
    tasks.run_at, tasks.attempt, tasks.tries, tasks.crashes, tasks.max_tries, tasks.timeout_seconds, tasks.backoff, tasks.worker_id,
    tasks.lease_expires_at, tasks.cancel_requested_at, tasks.progress, tasks.cost, tasks.job_id, tasks.step,
    tasks.limit_keys, tasks.limit_weight, tasks.unique_key, tasks.request_id, tasks.tags, tasks.correlation_id, tasks.callback_url,
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
