-- Counts of moves for metrics. A counting statement adds the records of one window of time to the stored counts and moves
-- the end of the window on, so that no record is counted twice, whichever supervisor does it. It skips a counter that
-- another supervisor is moving on.

-- name: count_worker_moves
with counter as (
    select counted_until as since,
        least(now() - %(lag)s::interval, counted_until + %(window)s::interval) as until
    from interlock.move_counters
    where machine = 'worker'
    for update skip locked
), lasting as (
    select moved.from_state, moved.to_state,
        greatest(extract(epoch from moved.recorded_at - coalesce(before.recorded_at, moved.recorded_at)), 0)::float8
            as lasted
    from interlock.worker_state_transitions as moved
        left join lateral (
            select earlier.recorded_at
            from interlock.worker_state_transitions as earlier
            where earlier.worker_id = moved.worker_id and earlier.id < moved.id
            order by earlier.id desc
            limit 1
        ) as before on true
    where moved.recorded_at >= (select since from counter) and moved.recorded_at < (select until from counter)
        and moved.from_state is not null
), added as (
    insert into interlock.move_counts (machine, from_state, to_state, bucket, moves, seconds)
    select 'worker', from_state, to_state, width_bucket(lasted, %(bounds)s::float8[]), count(*), sum(lasted)
    from lasting
    group by 2, 3, 4
    on conflict (machine, from_state, to_state, bucket) do update
    set moves = move_counts.moves + excluded.moves, seconds = move_counts.seconds + excluded.seconds
)
update interlock.move_counters
set counted_until = counter.until
from counter
where machine = 'worker' and counter.until > counter.since
returning counted_until < now() - %(lag)s::interval as is_behind

-- name: count_job_moves
with counter as (
    select counted_until as since,
        least(now() - %(lag)s::interval, counted_until + %(window)s::interval) as until
    from interlock.move_counters
    where machine = 'job'
    for update skip locked
), lasting as (
    select moved.from_state, moved.to_state,
        greatest(extract(epoch from moved.recorded_at - coalesce(before.recorded_at, moved.recorded_at)), 0)::float8
            as lasted
    from interlock.job_state_transitions as moved
        left join lateral (
            select earlier.recorded_at
            from interlock.job_state_transitions as earlier
            where earlier.job_id = moved.job_id and earlier.id < moved.id
            order by earlier.id desc
            limit 1
        ) as before on true
    where moved.recorded_at >= (select since from counter) and moved.recorded_at < (select until from counter)
        and moved.from_state is not null
), added as (
    insert into interlock.move_counts (machine, from_state, to_state, bucket, moves, seconds)
    select 'job', from_state, to_state, width_bucket(lasted, %(bounds)s::float8[]), count(*), sum(lasted)
    from lasting
    group by 2, 3, 4
    on conflict (machine, from_state, to_state, bucket) do update
    set moves = move_counts.moves + excluded.moves, seconds = move_counts.seconds + excluded.seconds
)
update interlock.move_counters
set counted_until = counter.until
from counter
where machine = 'job' and counter.until > counter.since
returning counted_until < now() - %(lag)s::interval as is_behind

-- name: read_move_counts
select machine, from_state, to_state, bucket, moves, seconds
from interlock.move_counts
order by machine, from_state, to_state, bucket

-- name: read_refused_moves
select machine, from_state, to_state, count
from interlock.refused_moves()

-- name: add_refused_moves
-- Refusals that did not reach the guards: the API answered by itself.
select interlock.count_refused_move(%(machine)s, %(from_state)s, %(to_state)s)
from generate_series(1, %(count)s)

-- name: read_task_state
-- The state of the row and its last record, of one moment.
select state, (select max(id) from interlock.audit_logs where task_id = tasks.id) as last_id
from interlock.tasks
where id = %(id)s

-- name: read_job_state
select status as state, (select max(id) from interlock.job_state_transitions where job_id = jobs.id) as last_id
from interlock.jobs
where id = %(id)s

-- name: read_worker_state
select status as state, (select max(id) from interlock.worker_state_transitions where worker_id = workers.id) as last_id
from interlock.workers
where id = %(id)s
