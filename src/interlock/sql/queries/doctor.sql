-- Checks of the running system. No statement here writes, and finished tasks are not read.

-- name: limit_statements
-- For the transaction of an examination. Definitions and times are printed as the checks expect them, whatever the settings
-- of the role or the database are.
select set_config('statement_timeout', %(timeout)s, true), set_config('lock_timeout', '1s', true),
    set_config('datestyle', 'ISO, YMD', true), set_config('intervalstyle', 'postgres', true),
    set_config('quote_all_identifiers', 'off', true)

-- name: read_due_types
-- Due tasks by namespace and type, of each at most so many. A recursive skip scan of the index of claims finds the types.
-- Tasks with a limit have an index of their own.
with recursive known as (
    (
        select namespace, type
        from interlock.tasks
        where state = 'pending' and limit_keys is null
        order by namespace, type
        limit 1
    )
    union all
    select next.namespace, next.type
    from known
        cross join lateral (
            select namespace, type
            from interlock.tasks
            where state = 'pending' and limit_keys is null
                and (tasks.namespace, tasks.type) > (known.namespace, known.type)
            order by namespace, type
            limit 1
        ) as next
)
select due.namespace, due.type, count(*) as tasks, min(due.run_at) as oldest_at
from (
    select known.namespace, known.type, found.run_at
    from known
        cross join lateral (
            select run_at
            from interlock.tasks
            where state = 'pending' and limit_keys is null and tasks.namespace = known.namespace
                and tasks.type = known.type and run_at <= coalesce(%(now)s::timestamptz, now())
            order by crashes, priority desc, run_at, id
            limit %(each)s
        ) as found
    union all
    select namespace, type, run_at
    from interlock.tasks
    where state = 'pending' and limit_keys is not null and run_at <= coalesce(%(now)s::timestamptz, now())
) as due
group by due.namespace, due.type
order by due.namespace, due.type

-- name: read_undeclared_keys
-- Limit keys of pending and running tasks that have no rule.
select wanted.key, count(*) as tasks
from interlock.tasks
    cross join lateral unnest(limit_keys) as wanted (key)
where limit_keys is not null and state in ('pending', 'running')
    and not exists (select from interlock.limit_rule(wanted.key))
group by wanted.key
order by wanted.key
limit %(limit)s

-- name: has_limited_tasks
-- Whether tasks wait for a limit: a leading worker admits them.
select exists (
        select from interlock.tasks
        where state = 'waiting' and held_by = 'limit' and limit_keys is not null and run_at > '-infinity'
            and run_at <= coalesce(%(now)s::timestamptz, now())
    ) as found

-- name: count_unrecovered_tasks
-- Leases that expired a while ago and were not recovered.
select count(*) as tasks, greatest(min(lease_expires_at), '0002-01-01') as oldest_at,
    (array_agg(id::text order by lease_expires_at))[1:5] as sample
from interlock.tasks
where lease_expires_at < coalesce(%(now)s::timestamptz, now()) - %(threshold)s::interval

-- name: read_vanished_workers
-- Processes without a recent heartbeat that did not deregister, latest first.
select id, coalesce(metadata ->> 'role', 'worker') as role, seen_until
from interlock.workers
where status = 'RUNNING' and seen_until < coalesce(%(now)s::timestamptz, now()) - %(threshold)s::interval
    and seen_until > coalesce(%(now)s::timestamptz, now()) - %(reported_for)s::interval
order by seen_until desc
limit %(limit)s

-- name: read_oldest_jobs
-- Number of unfinished jobs by status, and the oldest of each that does not wait on purpose: for its time, or for another
-- job with its key.
select counted.status, counted.jobs, oldest.id, oldest.reason,
    greatest(oldest.not_before, oldest.created_at, (
        -- it may have waited until now for another job with its key
        select max(ended.completed_at)
        from interlock.jobs as ended
        where ended.key = oldest.key and ended.key is not null and ended.task_description = oldest.task_description
    )) as due_at
from (
        select status, count(*) as jobs
        from interlock.jobs
        where status in ('SUBMITTED', 'PENDING', 'RUNNING')
        group by status
    ) as counted
    left join lateral (
        select id, created_at, not_before, reason, task_description, key
        from interlock.jobs
        where status = counted.status and status in ('SUBMITTED', 'PENDING', 'RUNNING')
            and (not_before is null or not_before <= coalesce(%(now)s::timestamptz, now()))
            and not (status <> 'RUNNING' and key is not null and exists (
                    select from interlock.jobs as earlier
                    where earlier.task_description = jobs.task_description and earlier.key = jobs.key
                        and earlier.key is not null and earlier.status in ('SUBMITTED', 'PENDING', 'RUNNING')
                        and earlier.key_order < jobs.key_order
                ))
        order by id
        limit 1
    ) as oldest on true
order by counted.status

-- name: count_given_up_webhooks
select count(*) as callbacks, (array_agg(error order by id desc))[1] as error
from interlock.callbacks
where given_up_at is not null

-- name: read_long_transactions
-- Transactions that have been open for a while and hold locks on tables of Interlock: they block every other move of
-- those rows. A role without privileges sees that transactions of other roles exist, but not their statements.
select activity.pid, activity.usename as role, activity.application_name as application, activity.state,
    activity.xact_start as since, held.relations
from pg_stat_activity as activity
    cross join lateral (
        select array_agg(distinct classes.relname::text order by classes.relname::text) as relations
        from pg_locks as locks
            join pg_class as classes on classes.oid = locks.relation
        where locks.pid = activity.pid and locks.locktype = 'relation' and locks.granted
            and locks.database = activity.datid and locks.mode in ('RowShareLock', 'RowExclusiveLock')
            and classes.oid = any (array['interlock.jobs'::regclass, 'interlock.tasks'::regclass])
    ) as held
where activity.datname = current_database() and activity.pid <> pg_backend_pid() and held.relations is not null
    and activity.xact_start < coalesce(%(now)s::timestamptz, now()) - %(threshold)s::interval
order by activity.xact_start
limit %(limit)s
