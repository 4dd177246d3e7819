-- Overviews of the queue, and the details of one task. No statement here writes.

-- name: read_table_sizes
-- Sizes of the tables in pages: rows of large ones are estimated from a sample.
select pg_relation_size('interlock.tasks') / 8192 as tasks, pg_relation_size('interlock.jobs') / 8192 as jobs

-- name: count_all_tasks
-- One pass over the table, ended tasks included.
select namespace, state, count(*) as tasks,
    min(run_at) filter (where state = 'pending' and run_at <= coalesce(%(now)s::timestamptz, now())) as oldest_due_at
from interlock.tasks
group by namespace, state
order by namespace, state

-- name: count_pending_by_namespace
-- Each part reads its own index, and at most `most` entries of it for each namespace. `is_bound`: there may be more.
-- The namespaces and types of pending tasks are found by one look-up for each pair, and the oldest due task by two for
-- each priority. `is_cut`: there may be more than `pairs` pairs; tasks of others are not counted.
with recursive pairs as (
    (
        select namespace, type
        from interlock.tasks
        where state = 'pending' and limit_keys is null
        order by namespace, type
        limit 1
    )
    union all
    select following.*
    from pairs
        cross join lateral (
            select namespace, type
            from interlock.tasks
            where state = 'pending' and limit_keys is null and (namespace, type) > (pairs.namespace, pairs.type)
            order by namespace, type
            limit 1
        ) as following
), known_pairs as materialized (
    select namespace, type from pairs limit %(pairs)s
), limited_spaces as (
    (select namespace from interlock.tasks where state = 'pending' and limit_keys is not null order by namespace limit 1)
    union all
    select (
            select namespace
            from interlock.tasks
            where state = 'pending' and limit_keys is not null and namespace > limited_spaces.namespace
            order by namespace
            limit 1
        )
    from limited_spaces
    where limited_spaces.namespace is not null
), known_limited_spaces as materialized (
    select namespace from (select namespace from limited_spaces limit %(pairs)s) as found where namespace is not null
), levels as (
    select known_pairs.*, first_of_pair.*
    from known_pairs
        cross join lateral (
            select crashes, priority, run_at
            from interlock.tasks
            where state = 'pending' and limit_keys is null and namespace = known_pairs.namespace
                and type = known_pairs.type
            order by crashes, priority desc, run_at, id
            limit 1
        ) as first_of_pair
    union all
    select levels.namespace, levels.type, next_level.*
    from levels
        cross join lateral (
            (
                select crashes, priority, run_at
                from interlock.tasks
                where state = 'pending' and limit_keys is null and namespace = levels.namespace and type = levels.type
                    and crashes = levels.crashes and priority < levels.priority
                order by crashes, priority desc, run_at, id
                limit 1
            )
            union all
            (
                select crashes, priority, run_at
                from interlock.tasks
                where state = 'pending' and limit_keys is null and namespace = levels.namespace and type = levels.type
                    and crashes > levels.crashes
                order by crashes, priority desc, run_at, id
                limit 1
            )
            limit 1
        ) as next_level
), limited_levels as (
    select limited_spaces.namespace, first_of_level.*
    from known_limited_spaces as limited_spaces
        cross join generate_series(0, 3) as suspicion (crashes)
        cross join lateral (
            select crashes, priority, run_at
            from interlock.tasks
            where state = 'pending' and limit_keys is not null and namespace = limited_spaces.namespace
                and crashes = suspicion.crashes
            order by crashes, priority desc, run_at, id
            limit 1
        ) as first_of_level
    union all
    select limited_levels.namespace, next_level.*
    from limited_levels
        cross join lateral (
            select crashes, priority, run_at
            from interlock.tasks
            where state = 'pending' and limit_keys is not null and namespace = limited_levels.namespace
                and crashes = limited_levels.crashes and priority < limited_levels.priority
            order by crashes, priority desc, run_at, id
            limit 1
        ) as next_level
), bounded as (
    select namespace, counted.tasks, counted.tasks >= %(most)s as is_bound
    from (select distinct namespace from known_pairs) as spaces
        cross join lateral (
            select count(*) as tasks
            from (
                select from interlock.tasks
                where state = 'pending' and limit_keys is null and namespace = spaces.namespace
                limit %(most)s
            ) as found
        ) as counted
    union all
    select namespace, counted.tasks, counted.tasks >= %(most)s
    from known_limited_spaces as limited_spaces
        cross join lateral (
            select count(*) as tasks
            from (
                select from interlock.tasks
                where state = 'pending' and limit_keys is not null and namespace = limited_spaces.namespace
                limit %(most)s
            ) as found
        ) as counted
)
select bounded.namespace, 'pending' as state, sum(tasks)::bigint as tasks, bool_or(is_bound) as is_bound,
    min(due.oldest_at) as oldest_due_at,
    (select count(*) from known_pairs) >= %(pairs)s as is_cut
from bounded
    left join (
        select namespace, min(run_at) filter (where run_at <= coalesce(%(now)s::timestamptz, now())) as oldest_at
        from (
            select namespace, run_at from levels
            union all
            select namespace, run_at from limited_levels
        ) as first_of_levels
        group by namespace
    ) as due on due.namespace = bounded.namespace
group by bounded.namespace
order by bounded.namespace

-- name: count_running_and_waiting_tasks
-- By a partial index each, at most `most` entries of it. `is_bound`: there may be more.
select namespace, 'running' as state, count(*) as tasks, sum(count(*)) over () >= %(most)s as is_bound
from (select namespace from interlock.tasks where lease_expires_at is not null limit %(most)s) as running
group by namespace
union all
select namespace, 'waiting', count(*), sum(count(*)) over () >= %(most)s
from (select namespace from interlock.tasks where state = 'waiting' order by id desc limit %(most)s) as waiting
group by namespace
order by namespace, state

-- name: count_ended_tasks
-- Those in states that have an index, at most `most` of each.
select namespace, state, sum(tasks)::bigint as tasks, bool_or(is_bound) as is_bound
from (
    select namespace, wanted.state, count(*) as tasks, sum(count(*)) over (partition by wanted.state) >= %(most)s as is_bound
    from unnest(array['error', 'canceled', 'skipped']) as wanted (state)
        cross join lateral (
            select namespace
            from interlock.tasks
            where tasks.state = wanted.state and tasks.state in ('error', 'canceled', 'skipped')
            order by id desc
            limit %(most)s
        ) as found
    group by namespace, wanted.state
) as counted
group by namespace, state
order by namespace, state

-- name: sample_tasks
-- Estimates all counts from a part of the pages, which is the same in each call.
select namespace, state, (count(*) * 100 / %(percent)s::float8)::bigint as tasks
from interlock.tasks tablesample system (%(percent)s::float8) repeatable (1)
group by namespace, state
order by namespace, state

-- name: count_all_jobs
select namespace, status, count(*) as jobs
from interlock.jobs
group by namespace, status
order by namespace, status

-- name: count_unfinished_jobs
-- Those in states that have an index, at most `most` of each.
select namespace, wanted.status, count(*) as jobs, sum(count(*)) over (partition by wanted.status) >= %(most)s as is_bound
from unnest(array['SUBMITTED', 'PENDING', 'RUNNING']) as wanted (status)
    cross join lateral (
        select namespace
        from interlock.jobs
        where jobs.status = wanted.status and jobs.status in ('SUBMITTED', 'PENDING', 'RUNNING')
        order by id desc
        limit %(most)s
    ) as found
group by namespace, wanted.status
order by namespace, wanted.status

-- name: count_unsuccessful_jobs
select namespace, wanted.status, count(*) as jobs, sum(count(*)) over (partition by wanted.status) >= %(most)s as is_bound
from unnest(array['FAILED', 'CANCELED']) as wanted (status)
    cross join lateral (
        select namespace
        from interlock.jobs
        where jobs.status = wanted.status and jobs.status in ('FAILED', 'CANCELED')
        order by id desc
        limit %(most)s
    ) as found
group by namespace, wanted.status
order by namespace, wanted.status

-- name: sample_jobs
select namespace, status, (count(*) * 100 / %(percent)s::float8)::bigint as jobs
from interlock.jobs tablesample system (%(percent)s::float8) repeatable (1)
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
-- Tasks with the same keys form a lane. Recursive skip scans find the lanes; of each, a bounded number of tasks is counted,
-- about `most` in all. `is_bound`: there may be more.
with recursive waiting_lanes (keys) as (
    (
        select limit_keys
        from interlock.tasks
        where limit_keys is not null and state = 'waiting' and held_by = 'limit'
        order by limit_keys
        limit 1
    )
    union all
    select (
            select limit_keys
            from interlock.tasks
            where limit_keys > waiting_lanes.keys and limit_keys is not null and state = 'waiting' and held_by = 'limit'
            order by limit_keys
            limit 1
        )
    from waiting_lanes
    where waiting_lanes.keys is not null
), taken_lanes (keys) as (
    (
        select limit_keys
        from interlock.tasks
        where limit_keys is not null and state in ('pending', 'running')
        order by limit_keys
        limit 1
    )
    union all
    select (
            select limit_keys
            from interlock.tasks
            where limit_keys > taken_lanes.keys and limit_keys is not null and state in ('pending', 'running')
            order by limit_keys
            limit 1
        )
    from taken_lanes
    where taken_lanes.keys is not null
), known_lanes as materialized (
    select keys from waiting_lanes where keys is not null
    union
    select keys from taken_lanes where keys is not null
), bound as materialized (
    select greatest(%(most)s / greatest(count(*), 1), 100) as most from known_lanes
), lanes as materialized (
    select keys as limit_keys, waiting.tasks as waiting, taken.tasks as taken, taken.due, taken.due_weight,
        greatest(waiting.tasks, taken.tasks) >= bound.most as is_bound
    from known_lanes
        cross join bound
        cross join lateral (
            select count(*) as tasks
            from (
                select from interlock.tasks
                where limit_keys = keys and limit_keys is not null and state = 'waiting' and held_by = 'limit'
                limit bound.most
            ) as found
        ) as waiting
        cross join lateral (
            select count(*) as tasks,
                count(*) filter (where state = 'pending' and run_at <= coalesce(%(now)s::timestamptz, now())) as due,
                coalesce(sum(coalesce(limit_weight, 1)) filter (
                    where state = 'pending' and run_at <= coalesce(%(now)s::timestamptz, now())), 0) as due_weight
            from (
                select state, run_at, limit_weight
                from interlock.tasks
                where limit_keys = keys and limit_keys is not null and state in ('pending', 'running')
                limit bound.most
            ) as found
        ) as taken
), counted as (
    select wanted.key, sum(taken)::int as taken, sum(waiting)::int as waiting, sum(due)::int as due,
        sum(due_weight) as due_weight, bool_or(is_bound) as is_bound
    from lanes
        cross join lateral unnest(limit_keys) as wanted (key)
    group by wanted.key
    union all
    select used.key, 0, 0, 0, 0, false
    from (select distinct key from interlock.limit_usage) as used
    where not exists (select from lanes where used.key = any (limit_keys))
)
select counted.key, rule.key as rule, rule.max_running, rule.max_starts, rule.max_weight, rule.max_cost, rule.period,
    rule.share, counted.taken, coalesce(used.starts, 0) as starts, coalesce(used.weight, 0) as weight,
    coalesce(used.cost, 0) as cost, counted.waiting,
    case
        when counted.waiting > 0 then interlock.limit_frees_at(counted.key, rule,
            coalesce(%(now)s::timestamptz, now()), counted.due, counted.due_weight, 1)
    end as next_at, rule.declared, rule.overridden_by, rule.overridden_at, rule.override_reason, counted.is_bound
from counted
    left join lateral interlock.limit_rule(counted.key) as rule on true
    left join lateral interlock.limit_use(counted.key, rule.period, coalesce(%(now)s::timestamptz, now())) as used on true
union all
select key, key, max_running, max_starts, max_weight, max_cost, period, share, 0, 0, 0, 0, 0, null, declared,
    overridden_by, overridden_at, override_reason, false
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
