-- Limits per key and paused namespaces. No statement here changes a state: the ids go to `release_waiting_tasks` and
-- `hold_pending_tasks`.

-- name: put_limits
insert into interlock.limits (key, max_running, max_starts, max_weight, max_cost, period, share, updated_at)
select key, max_running, max_starts, max_weight, max_cost, period, share, coalesce(%(now)s::timestamptz, now())
from unnest(%(keys)s::text[], %(max_runnings)s::int[], %(max_starts)s::int[], %(max_weights)s::float8[],
        %(max_costs)s::float8[], %(periods)s::interval[], %(shares)s::float8[])
    as wanted (key, max_running, max_starts, max_weight, max_cost, period, share)
order by key
on conflict (key) do update
set (max_running, max_starts, max_weight, max_cost, period, share) = (
        select excluded.max_running, excluded.max_starts, excluded.max_weight, excluded.max_cost, excluded.period,
            excluded.share
        where limits.overridden_at is null
        union all
        select limits.max_running, limits.max_starts, limits.max_weight, limits.max_cost, limits.period, limits.share
        where limits.overridden_at is not null
    ),
    declared = case when limits.overridden_at is not null then interlock.limit_values(excluded) end,
    updated_at = excluded.updated_at
where case when limits.overridden_at is null then interlock.limit_values(limits) else limits.declared end
    is distinct from interlock.limit_values(excluded)
returning key

-- name: override_limit
-- The rule of a key by an operator. The declared rule is kept beside it, for `restore_limit`.
with old as materialized (
    select interlock.limit_values(limits) as rule from interlock.limits where key = %(key)s
), stored as (
    insert into interlock.limits as limits (key, max_running, max_starts, max_weight, max_cost, period, share, updated_at,
        overridden_by, overridden_at, override_reason)
    values (%(key)s, %(max_running)s, %(max_starts)s, %(max_weight)s, %(max_cost)s, %(period)s::interval, %(share)s,
        coalesce(%(now)s::timestamptz, now()), %(actor)s, coalesce(%(now)s::timestamptz, now()), %(reason)s)
    on conflict (key) do update
    set max_running = excluded.max_running, max_starts = excluded.max_starts, max_weight = excluded.max_weight,
        max_cost = excluded.max_cost, period = excluded.period, share = excluded.share, updated_at = excluded.updated_at,
        declared = case when limits.overridden_at is null then interlock.limit_values(limits) else limits.declared end,
        overridden_by = excluded.overridden_by, overridden_at = excluded.overridden_at,
        override_reason = excluded.override_reason
    returning key, interlock.limit_values(limits) as rule
)
insert into interlock.limit_changes (key, event, before, after, reason, actor, recorded_at)
select stored.key, 'override', old.rule, stored.rule, %(reason)s, %(actor)s,
    coalesce(%(now)s::timestamptz, clock_timestamp())
from stored
    left join old on true
returning key

-- name: restore_limit
-- Takes an override back: the declared rule applies again. Without one the limit is gone.
with old as materialized (
    select key, interlock.limit_values(limits) as rule, declared
    from interlock.limits
    where key = %(key)s and overridden_at is not null
), restored as (
    update interlock.limits
    set max_running = (old.declared ->> 'max_running')::int, max_starts = (old.declared ->> 'max_starts')::int,
        max_weight = (old.declared ->> 'max_weight')::float8, max_cost = (old.declared ->> 'max_cost')::float8,
        period = make_interval(secs => (old.declared ->> 'period')::float8),
        share = (old.declared ->> 'share')::float8, updated_at = coalesce(%(now)s::timestamptz, now()),
        declared = null, overridden_by = null, overridden_at = null, override_reason = null
    from old
    where limits.key = old.key and old.declared is not null
    returning limits.key
), removed as (
    delete from interlock.limits
    using old
    where limits.key = old.key and old.declared is null
    returning limits.key
), changed as (
    select key from restored union all select key from removed
)
insert into interlock.limit_changes (key, event, before, after, reason, actor, recorded_at)
select old.key, 'restore', old.rule, old.declared, %(reason)s, %(actor)s,
    coalesce(%(now)s::timestamptz, clock_timestamp())
from old
    join changed on changed.key = old.key
returning key

-- name: delete_limits
with removed as (
    delete from interlock.limits
    where key = any (%(keys)s::text[])
    returning key, interlock.limit_values(limits) as rule
)
insert into interlock.limit_changes (key, event, before, reason, actor, recorded_at)
select key, 'delete', rule, %(reason)s, %(actor)s, coalesce(%(now)s::timestamptz, clock_timestamp())
from removed
returning key

-- name: read_limit_changes
select event, before, after, reason, actor, database_role, recorded_at
from interlock.limit_changes
where key = %(key)s
order by id desc
limit %(limit)s

-- name: read_limit_holders
-- Tasks that take a place of a key, or of the keys of a pattern: running ones first.
select id, namespace, type, state, worker_id, lease_expires_at, attempt, limit_keys, coalesce(limit_weight, 1) as weight,
    run_at, started_at, job_id, step
from interlock.tasks
where limit_keys is not null and state in ('pending', 'running')
    and exists (
        select
        from unnest(limit_keys) as held (key)
        where held.key = %(key)s or starts_with(held.key, %(prefix)s::text)
    )
order by state desc, run_at, id
limit %(limit)s

-- name: walk_indexes
-- For the transaction of an admission. The planner does not know that tasks with a limit are few among the pending ones,
-- nor how many a lane has: it would scan the table, or read and sort a whole lane.
select set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)

-- name: read_waiting_lanes
-- The different sets of limit keys of waiting tasks, and how much each was served. A recursive skip scan finds them in the
-- index: a million tasks of one lane cost one step.
with recursive waiting (keys) as (
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
            where limit_keys > waiting.keys and limit_keys is not null and state = 'waiting' and held_by = 'limit'
            order by limit_keys
            limit 1
        )
    from waiting
    where waiting.keys is not null
)
select waiting.keys, lanes.served
from waiting
    left join interlock.limit_lanes as lanes on lanes.keys = waiting.keys
where waiting.keys is not null

-- name: read_limit_usage
-- The rule of each key and the use of it: tasks that are admitted, those of them that a claim may start now, and what was
-- used within the period. Keys without a rule are missing.
with taken as materialized (
    select wanted.key, sum(lanes.tasks)::int as tasks, sum(lanes.due)::int as due, sum(lanes.due_weight) as due_weight
    from (
            select limit_keys, count(*) as tasks,
                count(*) filter (where state = 'pending' and run_at <= coalesce(%(now)s::timestamptz, now())) as due,
                sum(coalesce(limit_weight, 1)) filter (
                    where state = 'pending' and run_at <= coalesce(%(now)s::timestamptz, now())) as due_weight
            from interlock.tasks
            where limit_keys is not null and state in ('pending', 'running')
            group by limit_keys
        ) as lanes
        cross join lateral unnest(limit_keys) as wanted (key)
    where wanted.key = any (%(keys)s::text[])
    group by wanted.key
)
select wanted.key, rule.max_running, rule.max_starts, rule.max_weight, rule.max_cost, rule.period, rule.share,
    coalesce(taken.tasks, 0) as running, coalesce(taken.due, 0) as due, coalesce(taken.due_weight, 0) as due_weight,
    coalesce(used.starts, 0) as starts, coalesce(used.weight, 0) as weight, coalesce(used.cost, 0) as cost
from unnest(%(keys)s::text[]) as wanted (key)
    cross join lateral interlock.limit_rule(wanted.key) as rule
    left join taken on taken.key = wanted.key
    left join lateral interlock.limit_use(wanted.key, rule.period, coalesce(%(now)s::timestamptz, now())) as used
        on rule.period is not null

-- name: read_admissible_tasks
-- The next tasks of each lane, at most so many, in the order of the claim. Tasks that are not due are left out unless
-- nothing limits their lane any more; tasks of paused namespaces keep waiting, and with `served_only` those that no live
-- worker would claim: they would take room from tasks that can start.
with served as materialized (
    select namespace, type from interlock.served_types(coalesce(%(now)s::timestamptz, now()))
)
select lane.place, found.id, found.weight
from rows from (
        jsonb_to_recordset(%(lanes)s::jsonb) as (keys text[], tasks int, limited boolean)
    ) with ordinality as lane (keys, tasks, limited, place)
    cross join lateral (
        select id, coalesce(limit_weight, 1) as weight, priority, run_at
        from interlock.tasks
        where limit_keys = lane.keys and limit_keys is not null and state = 'waiting' and held_by = 'limit'
            and (run_at <= coalesce(%(now)s::timestamptz, now()) or not lane.limited)
            and not exists (
                select from interlock.namespaces where name = tasks.namespace and paused_at is not null
            )
            and (not %(served_only)s or (tasks.namespace, tasks.type) in (select namespace, type from served))
        order by priority desc, run_at, id
        limit lane.tasks
    ) as found
order by lane.place, found.priority desc, found.run_at, found.id

-- name: put_limit_lanes
insert into interlock.limit_lanes (keys, served)
select keys, served
from jsonb_to_recordset(%(lanes)s::jsonb) as lane (keys text[], served float8)
order by keys
on conflict (keys) do update set served = excluded.served

-- name: delete_idle_limit_lanes
delete from interlock.limit_lanes
where not exists (
    select from interlock.tasks
    where limit_keys = limit_lanes.keys and limit_keys is not null and state = 'waiting' and held_by = 'limit'
)

-- name: read_limit_openings
-- The time at which each key has room for one more start of a weight; null when only its tasks are in the way.
select wanted.key, interlock.limit_frees_at(wanted.key, rule, coalesce(%(now)s::timestamptz, now()), wanted.due,
    wanted.due_weight, wanted.weight) as next_at
from unnest(%(keys)s::text[], %(dues)s::int[], %(due_weights)s::float8[], %(weights)s::float8[])
        as wanted (key, due, due_weight, weight)
    cross join lateral interlock.limit_rule(wanted.key) as rule
where rule.period is not null

-- name: insert_limit_costs
-- Costs that attempts reported at their end, for keys whose rule has a budget.
insert into interlock.limit_usage (key, used_at, cost)
select wanted.key, coalesce(%(now)s::timestamptz, clock_timestamp()), reported.cost
from unnest(%(ids)s::uuid[], %(costs)s::float8[]) as reported (id, cost)
    join interlock.tasks on tasks.id = reported.id
    cross join lateral unnest(tasks.limit_keys) as wanted (key)
    cross join lateral interlock.limit_rule(wanted.key) as rule
where rule.max_cost is not null and reported.cost > 0

-- name: correct_limit_weights
-- Replaces the weight with which an attempt was started by the one that it reported.
update interlock.limit_usage
set weight = reported.weight
from unnest(%(ids)s::uuid[], %(attempts)s::int[], %(weights)s::float8[]) as reported (id, attempt, weight)
where limit_usage.task_id = reported.id and limit_usage.attempt = reported.attempt and task_id is not null

-- name: delete_past_limit_usage
-- What no window contains any more. Skips rows that a settle is correcting.
delete from interlock.limit_usage
where id = any (array(
    select id
    from interlock.limit_usage
        left join lateral interlock.limit_rule(limit_usage.key) as rule on true
    where used_at < 'infinity'
        and (rule.period is null or used_at <= coalesce(%(now)s::timestamptz, now()) - rule.period)
    limit %(batch)s
    for update of limit_usage skip locked
))

-- name: write_limit_reasons
-- Only for the tasks that are admitted next: a changed reason must not rewrite a million rows. A lane without a key is
-- not blocked; only tasks that no live worker would claim wait in it.
with served as materialized (
    select namespace, type from interlock.served_types(coalesce(%(now)s::timestamptz, now()))
), told as materialized (
    select found.id, hold.reason
    from jsonb_to_recordset(%(lanes)s::jsonb) as blocked (keys text[], key text, detail text)
        cross join lateral (
            select id, reason, namespace, type,
                %(served_only)s and (namespace, type) not in (select namespace, type from served) as is_unserved
            from interlock.tasks
            where limit_keys = blocked.keys and limit_keys is not null and state = 'waiting' and held_by = 'limit'
                and run_at <= coalesce(%(now)s::timestamptz, now())
            order by priority desc, run_at, id
            limit %(each)s
        ) as found
        cross join lateral (
            select case
                    when not found.is_unserved then interlock.hold_reason('limit', blocked.key, blocked.detail)
                    when found.namespace in (select namespace from served) then interlock.hold_reason('limit',
                        array_to_string(blocked.keys, ', '),
                        format('no live worker of namespace %%L has the handler %%s', found.namespace, found.type))
                    else interlock.hold_reason('limit', array_to_string(blocked.keys, ', '),
                        format('no live worker serves namespace %%L', found.namespace))
                end as reason
        ) as hold
    where (found.is_unserved or blocked.key is not null) and found.reason is distinct from hold.reason
)
update interlock.tasks
set reason = told.reason
from told
-- The array and the CASE make the planner use the primary key instead of reading all waiting tasks.
where tasks.id = any (array(select id from told)) and tasks.id = told.id
    and case when tasks.state = 'waiting' and tasks.held_by = 'limit' then true else false end
returning tasks.id

-- name: next_limited_run_at
select run_at
from interlock.tasks
where limit_keys is not null and state = 'waiting' and held_by = 'limit' and run_at > '-infinity'
    and run_at > coalesce(%(now)s::timestamptz, now())
order by run_at
limit 1

-- name: read_admitted_keys
-- The keys of pending tasks, which may exceed their limits.
select distinct wanted.key
from interlock.tasks
    cross join lateral unnest(limit_keys) as wanted (key)
where state = 'pending' and limit_keys is not null

-- name: read_excess_tasks
-- Pending tasks beyond the limit of a key, last in line first: the limit was lowered, or they came back from an attempt
-- and there is no token for them. Retries that are not due keep their place, and count against max_running only.
select excess.key, found.id
from unnest(%(keys)s::text[], %(tasks)s::int[], %(due_only)s::bool[]) as excess (key, tasks, due_only)
    cross join lateral (
        select id
        from interlock.tasks
        where state = 'pending' and limit_keys is not null and excess.key = any (limit_keys)
            and (run_at <= coalesce(%(now)s::timestamptz, now()) or not excess.due_only)
        order by priority, run_at desc, id desc
        limit excess.tasks
    ) as found
limit %(batch)s

-- name: read_unserved_tasks
-- Pending tasks with a limit that no live worker would claim.
with served as materialized (
    select namespace, type from interlock.served_types(coalesce(%(now)s::timestamptz, now()))
)
select id
from interlock.tasks
where state = 'pending' and limit_keys is not null
    and (namespace, type) not in (select namespace, type from served)
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
(
    select id
    from interlock.tasks
    where state = 'pending' and limit_keys is null and namespace = %(name)s
    order by type, crashes, priority desc, run_at, id
    limit %(batch)s
)
union all
(
    select id
    from interlock.tasks
    where state = 'pending' and limit_keys is not null and namespace = %(name)s
    order by crashes, priority desc, run_at, id
    limit %(batch)s
)
limit %(batch)s

-- name: read_held_of_namespace
select id
from interlock.tasks
where state = 'waiting' and held_by = 'namespace' and namespace = %(name)s and limit_keys is null
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
        where limit_keys is not null and state = 'waiting' and held_by = 'limit' and namespace = %(name)s
        limit %(batch)s
    ))
    and state = 'waiting' and held_by = 'limit'
returning job_id, capped

-- name: move_hold_from_namespace_to_limit
-- The reverse: the limit admits each of them. Steps of jobs with a worker_count return to their job first.
update interlock.tasks
set held_by = 'limit', reason = interlock.hold_reason('limit', array_to_string(limit_keys, ', '))
where id = any (array(
        select id
        from interlock.tasks
        where state = 'waiting' and held_by = 'namespace' and namespace = %(name)s and limit_keys is not null
            and not (capped and step not like 'compensate:%%')
        order by namespace, id
        limit %(batch)s
    ))
    and state = 'waiting' and held_by = 'namespace'
returning id

-- name: list_namespaces
-- Each count uses its own index; finished tasks are not read.
with pending as (
    select namespace, count(*) as tasks
    from (
        select namespace from interlock.tasks where state = 'pending' and limit_keys is null
        union all
        select namespace from interlock.tasks where state = 'pending' and limit_keys is not null
    ) as pending
    group by namespace
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
    where limit_keys is not null and state = 'waiting' and held_by = 'limit'
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
