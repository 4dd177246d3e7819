-- Limits per key and paused namespaces. No statement here changes a state: the ids go to `release_waiting_tasks` and
-- `hold_pending_tasks`.

-- name: put_limits
insert into interlock.limits (key, max_running, max_starts, period, updated_at)
select key, max_running, max_starts, period, coalesce(%(now)s::timestamptz, now())
from unnest(%(keys)s::text[], %(max_runnings)s::int[], %(max_starts)s::int[], %(periods)s::interval[])
    as wanted (key, max_running, max_starts, period)
order by key
on conflict (key) do update
set max_running = excluded.max_running, max_starts = excluded.max_starts, period = excluded.period,
    updated_at = excluded.updated_at
where (limits.max_running, limits.max_starts, limits.period)
    is distinct from (excluded.max_running, excluded.max_starts, excluded.period)
returning key

-- name: delete_limits
delete from interlock.limits
where key = any (%(keys)s::text[])
returning key

-- name: read_limit_usage
-- Every key with waiting tasks, and the use of its limit. A recursive skip scan finds the keys in the index: a million
-- tasks of one key cost one step.
with recursive waiting (key) as (
    (
        select limit_key
        from interlock.tasks
        where limit_key is not null and state = 'waiting' and held_by = 'limit'
        order by limit_key
        limit 1
    )
    union all
    select (
            select limit_key
            from interlock.tasks
            where limit_key > waiting.key and limit_key is not null and state = 'waiting' and held_by = 'limit'
            order by limit_key
            limit 1
        )
    from waiting
    where waiting.key is not null
)
select waiting.key, limits.max_running, limits.max_starts, limits.period, coalesce(taken.tasks, 0) as running,
    coalesce(begun.starts, 0) as starts, next_start.started_at + limits.period as next_at
from waiting
    left join interlock.limits on limits.key = waiting.key
    left join lateral (
        select count(*) as tasks
        from interlock.tasks
        where limit_key = waiting.key and limit_key is not null and state in ('pending', 'running')
    ) as taken on limits.max_running is not null
    left join lateral (
        select sum(starts)::int as starts
        from interlock.limit_starts
        where key = limits.key and started_at > coalesce(%(now)s::timestamptz, now()) - limits.period
    ) as begun on limits.max_starts is not null
    -- The start that must leave the window before the next one is admitted.
    left join lateral (
        select started_at
        from (
            select started_at, sum(starts) over (order by started_at desc) as since
            from interlock.limit_starts
            where key = limits.key and started_at > coalesce(%(now)s::timestamptz, now()) - limits.period
        ) as counted
        where since >= limits.max_starts
        order by started_at desc
        limit 1
    ) as next_start on limits.max_starts is not null
where waiting.key is not null

-- name: read_admissible_tasks
-- The next tasks of each key, as many as its limit admits, in the order of the claim. Tasks that are not due count for
-- nothing, and tasks of paused namespaces keep waiting.
select room.key, found.id
from unnest(%(keys)s::text[], %(rooms)s::int[], %(limited)s::bool[]) as room (key, tasks, limited)
    cross join lateral (
        select id
        from interlock.tasks
        where limit_key = room.key and limit_key is not null and state = 'waiting' and held_by = 'limit'
            and (run_at <= coalesce(%(now)s::timestamptz, now()) or not room.limited)
            and not exists (
                select from interlock.namespaces where name = tasks.namespace and paused_at is not null
            )
        order by priority desc, run_at, id
        limit room.tasks
    ) as found

-- name: insert_limit_starts
insert into interlock.limit_starts (key, started_at, starts)
select started.key, coalesce(%(now)s::timestamptz, now()), started.starts
from unnest(%(keys)s::text[], %(starts)s::int[]) as started (key, starts)
    join interlock.limits on limits.key = started.key and limits.max_starts is not null
returning key

-- name: delete_past_limit_starts
delete from interlock.limit_starts
using interlock.limits
where limits.key = limit_starts.key
    and (limits.period is null or started_at <= coalesce(%(now)s::timestamptz, now()) - limits.period)
returning limit_starts.key

-- name: write_limit_reasons
-- Only for the tasks that are admitted next: a changed reason must not rewrite a million rows.
update interlock.tasks
set reason = told.reason
from (
    select found.id, hold.reason
    from unnest(%(keys)s::text[], %(details)s::text[]) as blocked (key, detail)
        cross join lateral (select interlock.hold_reason('limit', blocked.key, blocked.detail) as reason) as hold
        cross join lateral (
            select id, reason
            from interlock.tasks
            where limit_key = blocked.key and limit_key is not null and state = 'waiting' and held_by = 'limit'
                and run_at <= coalesce(%(now)s::timestamptz, now())
            order by priority desc, run_at, id
            limit %(each)s
        ) as found
    where found.reason is distinct from hold.reason
) as told
where tasks.id = told.id and tasks.state = 'waiting' and tasks.held_by = 'limit'
returning tasks.id

-- name: next_limited_run_at
select run_at
from interlock.tasks
where limit_key is not null and state = 'waiting' and held_by = 'limit'
    and run_at > coalesce(%(now)s::timestamptz, now())
order by run_at
limit 1

-- name: read_excess_tasks
-- Pending tasks beyond the limit of their key, last in line first: the limit was lowered, or they were not admitted by
-- it.
select limits.key, limits.max_running, found.id
from interlock.limits
    cross join lateral (
        select count(*) as tasks
        from interlock.tasks
        where limit_key = limits.key and limit_key is not null and state in ('pending', 'running')
    ) as taken
    cross join lateral (
        select id
        from interlock.tasks
        where limit_key = limits.key and limit_key is not null and state in ('pending', 'running') and state = 'pending'
        order by priority, run_at desc, id desc
        limit greatest(taken.tasks - limits.max_running, 0)
    ) as found
where limits.max_running is not null
limit %(batch)s

-- name: put_paused_namespace
insert into interlock.namespaces (name, paused_at, paused_by, reason)
values (%(name)s, coalesce(%(now)s::timestamptz, now()), %(actor)s, %(reason)s)
on conflict (name) do update
set paused_at = coalesce(namespaces.paused_at, excluded.paused_at), paused_by = excluded.paused_by,
    reason = excluded.reason
returning name

-- name: put_resumed_namespace
update interlock.namespaces
set paused_at = null, paused_by = null, reason = null
where name = %(name)s and paused_at is not null
returning name

-- name: read_paused_namespaces
select name, reason
from interlock.namespaces
where paused_at is not null

-- name: read_held_namespaces
-- Namespaces that tasks are held for although they are not paused: a resume ran at the same time as a hold.
with recursive held (name) as (
    (select namespace from interlock.tasks where state = 'waiting' and held_by = 'namespace' order by namespace limit 1)
    union all
    select (
            select namespace
            from interlock.tasks
            where state = 'waiting' and held_by = 'namespace' and namespace > held.name
            order by namespace
            limit 1
        )
    from held
    where held.name is not null
)
select held.name
from held
where held.name is not null
    and not exists (select from interlock.namespaces where namespaces.name = held.name and paused_at is not null)

-- name: read_pending_of_namespace
select id
from interlock.tasks
where state = 'pending' and namespace = %(name)s
order by crashes, priority desc, run_at, id
limit %(batch)s

-- name: read_held_of_namespace
select id
from interlock.tasks
where state = 'waiting' and held_by = 'namespace' and namespace = %(name)s and limit_key is null
    -- A job with a worker_count admits its steps itself, except compensations.
    and not (capped and step not like 'compensate:%%')
order by namespace, id
limit %(batch)s

-- name: move_hold_from_namespace_to_job
-- Steps of jobs with a worker_count, which admits them when it has room. Compensations do not count against it:
-- `read_held_of_namespace` releases them.
update interlock.tasks
set held_by = 'worker_count', reason = (
        select interlock.hold_reason('worker_count', worker_count::text)
        from interlock.jobs
        where jobs.id = tasks.job_id
    )
where id = any (array(
        select id
        from interlock.tasks
        where state = 'waiting' and held_by = 'namespace' and namespace = %(name)s and capped
            and step not like 'compensate:%%'
        order by namespace, id
        limit %(batch)s
    ))
    and state = 'waiting' and held_by = 'namespace'
returning job_id, capped

-- name: read_capped_jobs
-- Jobs with a worker_count of steps that are held now, which gives other steps room.
select distinct job_id
from interlock.tasks
where id = any (%(ids)s::uuid[]) and capped

-- name: move_hold_from_limit_to_namespace
-- Tasks that waited for a limit are held for the namespace instead; steps give up their place in the worker_count of
-- their job.
update interlock.tasks
set held_by = 'namespace', reason = interlock.hold_reason('namespace', namespace, %(detail)s::text)
where id = any (array(
        select id
        from interlock.tasks
        where limit_key is not null and state = 'waiting' and held_by = 'limit' and namespace = %(name)s
        limit %(batch)s
    ))
    and state = 'waiting' and held_by = 'limit'
returning job_id, capped

-- name: move_hold_from_namespace_to_limit
-- The reverse: the limit admits each of them. Steps of jobs with a worker_count return to their job first.
update interlock.tasks
set held_by = 'limit', reason = interlock.hold_reason('limit', limit_key)
where id = any (array(
        select id
        from interlock.tasks
        where state = 'waiting' and held_by = 'namespace' and namespace = %(name)s and limit_key is not null
            and not (capped and step not like 'compensate:%%')
        order by namespace, id
        limit %(batch)s
    ))
    and state = 'waiting' and held_by = 'namespace'
returning id

-- name: list_namespaces
-- Each count uses its own index; finished tasks are not read.
with pending as (
    select namespace, count(*) as tasks from interlock.tasks where state = 'pending' group by namespace
), running as (
    select namespace, count(*) as tasks from interlock.tasks where lease_expires_at is not null group by namespace
), held as (
    select namespace, count(*) as tasks
    from interlock.tasks
    where state = 'waiting' and held_by = 'namespace'
    group by namespace
), limited as (
    select namespace, count(*) as tasks
    from interlock.tasks
    where limit_key is not null and state = 'waiting' and held_by = 'limit'
    group by namespace
), known (name) as (
    select name from interlock.namespaces
    union select namespace from pending
    union select namespace from running
    union select namespace from held
    union select namespace from limited
)
select known.name, namespaces.paused_at, namespaces.paused_by, namespaces.reason,
    coalesce(pending.tasks, 0) as pending, coalesce(running.tasks, 0) as running,
    coalesce(held.tasks, 0) as held, coalesce(limited.tasks, 0) as limited
from known
    left join interlock.namespaces on namespaces.name = known.name
    left join pending on pending.namespace = known.name
    left join running on running.namespace = known.name
    left join held on held.namespace = known.name
    left join limited on limited.namespace = known.name
order by known.name
