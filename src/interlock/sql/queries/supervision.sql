-- Statements by which supervisors keep the processes of their workers. The statements in workers.sql move the states,
-- in the same transaction. Each statement here that changes a row checks that the supervisor still holds its lease.

-- name: lease_workers
-- Rows without a supervisor, or whose supervisor's lease has expired. A process on another host is not replaced while
-- it sends heartbeats. A row that is bound to a supervisor belongs to that one alone.
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
-- Also returns the server's clock, and the number of tasks that the process of a paused worker still holds.
select workers.id, workers.status, workers.metadata -> 'spec' as spec, workers.metadata ->> 'bound_to' as bound_to,
    workers.generation, workers.instance, workers.host, workers.pid, workers.birth, workers.process_started_at,
    workers.seen_until, workers.heartbeat_at, workers.crashes, workers.restart_at, workers.pool,
    workers.kill_requested_at is not null as kill_requested,
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
-- A supervisor that moves a row because of its process checks first that the process is still the current one.
select id
from interlock.workers
where id = %(id)s and supervisor_id = %(supervisor)s and supervised_until > coalesce(%(now)s::timestamptz, now())
    and generation = %(generation)s
for update

-- name: announce_process
-- Starts a new generation: processes of earlier ones lose the row.
update interlock.workers
set generation = generation + 1, instance = %(instance)s, host = %(host)s, pid = null, birth = null,
    kill_requested_at = null,
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

-- name: read_tasks_of_process
-- The tasks that a process held when it crashed, the one that it began last first.
select id, type, count(*) over () as held
from interlock.tasks
where lease_expires_at is not null and worker_id = %(instance)s
order by started_at desc, id
limit 10

-- name: record_process_end
-- The process is gone, so that its announced seen_until no longer counts. Suspects are named by a crash only.
update interlock.workers
set pid = null, birth = null, memory_bytes = null, crashes = %(crashes)s, process_note = %(note)s,
    suspected_tasks = coalesce(%(suspects)s::uuid[], suspected_tasks),
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
-- Expires the leases of a process that is gone or presumed gone, so that recovery finds its tasks at once.
update interlock.tasks
set lease_expires_at = coalesce(%(now)s::timestamptz, now()) - interval '1 microsecond'
where lease_expires_at >= coalesce(%(now)s::timestamptz, now()) and worker_id = any (%(holders)s::text[])
returning id

-- name: read_silent_workers
-- Workers without a heartbeat for so long, while heartbeats were being checked: rows that no supervisor keeps, and rows
-- of a supervisor that is gone, which may never have had a process.
select workers.id, instance, metadata ->> 'bound_to' as bound_to,
    coalesce(%(now)s::timestamptz, now()) - heard.at as silent_for
from interlock.workers
    cross join lateral (
        select coalesce(heartbeat_at, supervised_until, case when metadata ? 'bound_to' then created_at end) as at
    ) as heard
where status in ('IDLE', 'RUNNING', 'PAUSED')
    and greatest(heard.at, %(watched_since)s::timestamptz)
        <= coalesce(%(now)s::timestamptz, now()) - %(heartbeat_timeout)s::interval
    and heard.at is not null and (not metadata ? 'spec' or metadata ? 'bound_to')
    and (supervisor_id is null or supervised_until <= coalesce(%(now)s::timestamptz, now()))
order by id
limit 100
for update of workers skip locked

-- name: read_ended_holders
-- Ended workers without a heartbeat that still hold tasks: no process will return these.
select distinct tasks.worker_id as holder
from interlock.tasks
    join interlock.workers on tasks.worker_id in (workers.id, workers.instance)
where tasks.lease_expires_at >= coalesce(%(now)s::timestamptz, now())
    and workers.status in ('COMPLETED', 'FAILED', 'TERMINATED')
    and greatest(workers.heartbeat_at, workers.updated_at, %(watched_since)s::timestamptz)
        <= coalesce(%(now)s::timestamptz, now()) - %(heartbeat_timeout)s::interval

-- name: detach_process
-- The deregistration of a supervised process. The row stays: its supervisor decides about another process.
update interlock.workers
set seen_until = coalesce(%(now)s::timestamptz, now()), heartbeat_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s and generation = %(generation)s
returning id
