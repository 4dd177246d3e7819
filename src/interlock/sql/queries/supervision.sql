-- What supervisors write about the processes of their workers. States are moved by the statements in workers.sql, in
-- the same transaction; each statement here that changes a row asks whether it is still held by who changes it.

-- name: lease_workers
-- Rows that nobody keeps, or whose keeper's lease ran out. A process on another host is nobody's to replace while it
-- says that it is here. A row that is bound to a supervisor is that one's alone.
update interlock.workers
set supervisor_id = %(supervisor)s, supervised_until = coalesce(%(now)s::timestamptz, now()) + %(lease)s::interval
where id = any (array(
        select id
        from interlock.workers
        where metadata ? 'spec' and (status = 'RUNNING' or pid is not null)
            and (supervisor_id is null or supervised_until <= coalesce(%(now)s::timestamptz, now()))
            and (pid is null or host = %(host)s or seen_until is null
                or seen_until <= coalesce(%(now)s::timestamptz, now()))
            and coalesce(metadata ->> 'bound_to', %(supervisor)s) = %(supervisor)s
        order by id
        limit %(limit)s
        for update skip locked
    ))
returning id

-- name: renew_held_workers
update interlock.workers
set supervised_until = coalesce(%(now)s::timestamptz, now()) + %(lease)s::interval
where supervisor_id = %(supervisor)s and metadata ? 'spec'
returning id

-- name: read_held_workers
-- Beside the rows, the server's clock, and how many tasks the process of a paused one still holds.
select workers.id, workers.status, workers.metadata -> 'spec' as spec, workers.metadata ->> 'bound_to' as bound_to,
    workers.generation, workers.instance, workers.host, workers.pid, workers.birth, workers.process_started_at,
    workers.seen_until, workers.heartbeat_at, workers.crashes, workers.restart_at,
    coalesce(%(now)s::timestamptz, now()) as moment,
    case
        when workers.status = 'PAUSED' then (
            select count(*) from interlock.tasks where lease_expires_at is not null and worker_id = workers.instance
        )
        else 0
    end::int as holds
from interlock.workers
where supervisor_id = %(supervisor)s and supervised_until > coalesce(%(now)s::timestamptz, now())
    and metadata ? 'spec'
order by id

-- name: lock_held_worker
-- Whoever moves the state of a row by what it knows of its process asks first whether that is still so.
select id
from interlock.workers
where id = %(id)s and supervisor_id = %(supervisor)s and supervised_until > coalesce(%(now)s::timestamptz, now())
    and generation = %(generation)s
for update

-- name: announce_process
-- A new generation: from here on, no process of an earlier one keeps the row.
update interlock.workers
set generation = generation + 1, instance = %(instance)s, host = %(host)s, pid = null, birth = null,
    process_started_at = coalesce(%(now)s::timestamptz, now()), restart_at = null, memory_bytes = null
where id = %(id)s and supervisor_id = %(supervisor)s and supervised_until > coalesce(%(now)s::timestamptz, now())
    and generation = %(generation)s and status = 'RUNNING'
returning generation

-- name: record_process
update interlock.workers
set pid = %(pid)s, birth = %(birth)s
where id = %(id)s and supervisor_id = %(supervisor)s and generation = %(generation)s
returning id

-- name: record_memory
update interlock.workers
set memory_bytes = used.bytes
from unnest(%(ids)s::text[], %(bytes)s::bigint[]) as used (id, bytes)
where workers.id = used.id and supervisor_id = %(supervisor)s
returning workers.id

-- name: record_process_end
-- There is no process any more. It may have said until when it would be here: that counts no longer.
update interlock.workers
set pid = null, birth = null, memory_bytes = null, crashes = %(crashes)s, process_note = %(note)s,
    restart_at = coalesce(%(now)s::timestamptz, now()) + make_interval(secs => %(delay)s::float8),
    seen_until = least(seen_until, coalesce(%(now)s::timestamptz, now()))
where id = %(id)s and supervisor_id = %(supervisor)s and generation = %(generation)s
returning id

-- name: reset_crashes
update interlock.workers
set crashes = 0
where id = %(id)s and supervisor_id = %(supervisor)s and generation = %(generation)s and crashes > 0
returning id

-- name: release_held_worker
update interlock.workers
set supervisor_id = null, supervised_until = null
where id = %(id)s and supervisor_id = %(supervisor)s and generation = %(generation)s
returning id

-- name: release_held_workers
update interlock.workers
set supervisor_id = null, supervised_until = null
where supervisor_id = %(supervisor)s
returning id

-- name: expire_leases_of_workers
-- What a process held that is gone, or is taken for it: recovery finds it at once.
update interlock.tasks
set lease_expires_at = coalesce(%(now)s::timestamptz, now()) - interval '1 microsecond'
where lease_expires_at >= coalesce(%(now)s::timestamptz, now()) and worker_id = any (%(holders)s::text[])
returning id

-- name: read_silent_workers
-- Not heard of for so long, although somebody has been listening: rows of processes that no supervisor keeps, and those
-- that belong to a supervisor that is gone, which may not have got as far as a process.
select workers.id, instance, metadata ->> 'bound_to' as bound_to, coalesce(%(now)s::timestamptz, now()) - heard.at as silent_for
from interlock.workers
    cross join lateral (
        select coalesce(heartbeat_at, supervised_until, case when metadata ? 'bound_to' then created_at end) as at
    ) as heard
where status in ('IDLE', 'RUNNING', 'PAUSED')
    and greatest(heard.at, %(watched_since)s::timestamptz)
        <= coalesce(%(now)s::timestamptz, now()) - %(patience)s::interval
    and heard.at is not null and (not metadata ? 'spec' or metadata ? 'bound_to')
    and (supervisor_id is null or supervised_until <= coalesce(%(now)s::timestamptz, now()))
order by id
limit 100
for update of workers skip locked

-- name: read_ended_holders
-- Workers that were ended, are silent since, and have tasks all the same: nobody will return them.
select distinct tasks.worker_id as holder
from interlock.tasks
    join interlock.workers on tasks.worker_id in (workers.id, workers.instance)
where tasks.lease_expires_at >= coalesce(%(now)s::timestamptz, now())
    and workers.status in ('COMPLETED', 'FAILED', 'TERMINATED')
    and greatest(workers.heartbeat_at, workers.updated_at, %(watched_since)s::timestamptz)
        <= coalesce(%(now)s::timestamptz, now()) - %(patience)s::interval

-- name: detach_process
-- The farewell of a supervised process: its row stays, since whether there is another process is not for it to say.
update interlock.workers
set seen_until = coalesce(%(now)s::timestamptz, now()), heartbeat_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and generation = %(generation)s
returning id
