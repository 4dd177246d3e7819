-- Statements about pools. A pool is changed under its row lock, so that two supervisors do not both add or end members.
-- Members are the unfinished rows of `workers` that name the pool; the statements in workers.sql move them. A pool that is
-- bound to a supervisor counts only the members of that one: those of a dead one end by themselves.

-- name: insert_pool
insert into interlock.pools (name, desired, spec, workspace_id, labels, actor, created_at, scaled_at)
values (%(name)s, %(desired)s, %(spec)s, %(workspace_id)s, %(labels)s, %(actor)s,
    coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now()))
on conflict (name) do nothing
returning name

-- name: insert_bound_pool
-- A pool that ends with its supervisor. Renews the lease when it is there already; takes over the name of a pool whose
-- supervisor is gone.
insert into interlock.pools (name, desired, spec, actor, bound_to, supervised_until, created_at, scaled_at)
values (%(name)s, %(desired)s, %(spec)s, %(supervisor)s, %(supervisor)s,
    coalesce(%(now)s::timestamptz, now()) + %(lease)s::interval, coalesce(%(now)s::timestamptz, now()),
    coalesce(%(now)s::timestamptz, now()))
on conflict (name) do update
set supervised_until = excluded.supervised_until, bound_to = excluded.bound_to, actor = excluded.actor,
    desired = case when pools.bound_to = excluded.bound_to then pools.desired else excluded.desired end,
    spec = excluded.spec,
    scaled_at = case when pools.bound_to = excluded.bound_to then pools.scaled_at else excluded.scaled_at end
where pools.bound_to = excluded.bound_to
    or pools.supervised_until <= coalesce(%(now)s::timestamptz, now())
returning name

-- name: scale_pool
update interlock.pools
set desired = %(desired)s, actor = %(actor)s, scaled_at = coalesce(%(now)s::timestamptz, now())
where name = %(name)s
returning name

-- name: lock_pool
select name, desired, spec, workspace_id, labels, bound_to
from interlock.pools
where name = %(name)s
for update

-- name: lock_uneven_pool
-- Skips a pool that another supervisor is changing at this moment.
select name, desired, spec, workspace_id, labels, bound_to
from interlock.pools
where name = %(name)s and (bound_to is null or bound_to = %(supervisor)s)
for update skip locked

-- name: delete_pool
delete from interlock.pools
where name = %(name)s and bound_to is not distinct from %(bound_to)s
returning name

-- name: delete_abandoned_pools
-- Pools whose supervisor is gone: their members end when their heartbeats are missed.
delete from interlock.pools
where supervised_until <= coalesce(%(now)s::timestamptz, now()) - %(heartbeat_timeout)s::interval
    and coalesce(%(now)s::timestamptz, now()) - %(heartbeat_timeout)s::interval >= %(watched_since)s::timestamptz
returning name

-- name: find_uneven_pools
-- Pools that have more or fewer members than desired.
select pools.name
from interlock.pools
    cross join lateral (
        select count(*) as members
        from interlock.workers
        where pool = pools.name and status in ('IDLE', 'RUNNING', 'PAUSED')
            and (pools.bound_to is null or metadata ->> 'bound_to' = pools.bound_to)
    ) as counted
where members <> desired and (bound_to is null or bound_to = %(supervisor)s)
order by pools.name

-- name: read_pool_members
-- The members in the order in which they are ended: without a process, idle, the newest.
select workers.id, status
from interlock.workers
    left join lateral (
        select count(*) as tasks
        from interlock.tasks
        where lease_expires_at is not null and worker_id = workers.instance
    ) as held on true
where pool = %(name)s and status in ('IDLE', 'RUNNING', 'PAUSED')
    and (%(bound_to)s::text is null or metadata ->> 'bound_to' = %(bound_to)s)
order by pid is not null, held.tasks, created_at desc, workers.id desc

-- name: insert_pool_member
insert into interlock.workers (workspace_id, metadata, pool, created_at, updated_at)
select %(workspace_id)s, %(metadata)s, %(name)s, coalesce(%(now)s::timestamptz, now()),
    coalesce(%(now)s::timestamptz, now())
where (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: read_pools
-- A member that is not live backs off after a crash, or is starting: it waits for a supervisor or for its first heartbeat.
select name, desired, spec, workspace_id, labels, actor, created_at, scaled_at, bound_to, counted.members, counted.live,
    counted.backing_off, counted.members - counted.live - counted.backing_off as starting
from interlock.pools
    cross join lateral (
        select count(*) as members, count(*) filter (where is_live) as live,
            count(*) filter (where not is_live and restart_at > coalesce(%(now)s::timestamptz, now())) as backing_off
        from interlock.workers
            cross join lateral (
                select coalesce(seen_until > coalesce(%(now)s::timestamptz, now()), false) as is_live
            ) as judged
        where pool = pools.name and status in ('IDLE', 'RUNNING', 'PAUSED')
            and (pools.bound_to is null or metadata ->> 'bound_to' = pools.bound_to)
    ) as counted
where (%(name)s::text is null or name = %(name)s) and (%(after)s::text is null or name > %(after)s)
order by name
limit %(limit)s

-- name: count_dead_pools
-- Pools that should have workers and have had no live one for so long. A row that ended keeps the time of its last
-- heartbeat in seen_until.
select count(*) as pools
from interlock.pools
    cross join lateral (
        select max(seen_until) as at
        from interlock.workers
        where pool = pools.name
    ) as seen
where desired > 0 and (bound_to is null or bound_to = %(supervisor)s)
    and coalesce(greatest(seen.at, scaled_at), scaled_at)
        <= coalesce(%(now)s::timestamptz, now()) - %(start_time)s::interval

-- name: have_given_up
-- Whether nobody runs the pending tasks because supervised workers of no pool have failed: no other worker is live.
select exists (select from interlock.tasks where state = 'pending')
    and exists (select from interlock.workers where status = 'FAILED' and pool is null and metadata ? 'spec')
    and not exists (
        select from interlock.workers
        where status in ('IDLE', 'RUNNING', 'PAUSED') and seen_until > coalesce(%(now)s::timestamptz, now())
            and coalesce(metadata ->> 'role', 'worker') = 'worker'
    ) as given_up
