-- Counts of recorded moves for metrics, between two times, so that no record is counted twice.

-- name: read_complete_until
select now() - %(lag)s::interval as moment

-- name: count_worker_moves
select from_state, to_state, width_bucket(lasted, %(bounds)s::float8[]) as bucket, count(*) as moves,
    sum(lasted) as seconds
from (
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
    where moved.recorded_at >= %(since)s and moved.recorded_at < %(until)s and moved.from_state is not null
) as lasting
group by from_state, to_state, bucket

-- name: count_job_moves
select from_state, to_state, width_bucket(lasted, %(bounds)s::float8[]) as bucket, count(*) as moves,
    sum(lasted) as seconds
from (
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
    where moved.recorded_at >= %(since)s and moved.recorded_at < %(until)s and moved.from_state is not null
) as lasting
group by from_state, to_state, bucket
