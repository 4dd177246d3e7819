-- History for charts: table `figures`. Moves are counted from the records and replaced; sums of processes are added.

-- name: summarize_records
select interlock.summarize_records() as ranges

-- name: insert_move_figures
-- Counts the moves recorded within one minute by namespace and type. The hundred pairs with the most moves keep their
-- names; the other types, and then the other namespaces, are counted together as '…'.
with moved as (
    select 'task' as machine, coalesce(tasks.namespace, '') as namespace, coalesce(tasks.type, '') as type,
        coalesce(records.from_state, '') as from_state, records.event, records.to_state, count(*) as total
    from interlock.audit_logs as records
        left join interlock.tasks on tasks.id = records.task_id
    where records.recorded_at >= %(at)s and records.recorded_at < %(at)s::timestamptz + interval '1 minute'
    group by 2, 3, 4, 5, 6
    union all
    select 'job', coalesce(jobs.namespace, ''), '', coalesce(records.from_state, ''), records.event, records.to_state,
        count(*)
    from interlock.job_state_transitions as records
        left join interlock.jobs on jobs.id = records.job_id
    where records.recorded_at >= %(at)s and records.recorded_at < %(at)s::timestamptz + interval '1 minute'
    group by 2, 4, 5, 6
    union all
    select 'supervised-worker', '', '', coalesce(from_state, ''), event, to_state, count(*)
    from interlock.worker_state_transitions
    where recorded_at >= %(at)s and recorded_at < %(at)s::timestamptz + interval '1 minute'
    group by 4, 5, 6
), pairs as (
    select namespace, type, row_number() over (order by sum(total) desc, namespace, type) <= %(pairs)s as is_named
    from moved
    group by namespace, type
), spaces as (
    select namespace, row_number() over (order by sum(total) desc, namespace) <= %(pairs)s as is_named
    from moved
    group by namespace
)
insert into interlock.figures (at, grain, kind, machine, namespace, type, from_state, event, to_state, total)
select %(at)s, 1, 'move', machine, case when spaces.is_named then moved.namespace else '…' end,
    case when pairs.is_named then moved.type else '…' end, from_state, event, to_state, sum(total)
from moved
    join pairs using (namespace, type)
    join spaces using (namespace)
group by 4, 5, 6, 7, 8, 9
returning total

-- name: delete_move_figures
delete from interlock.figures
where grain = 1 and at = %(at)s and kind = 'move' and machine in ('task', 'job', 'supervised-worker')
returning total

-- name: put_sampled_figures
-- Values that are measured and not summed: the depth of a queue, and the time of its oldest due task.
insert into interlock.figures (at, grain, kind, machine, namespace, to_state, total)
select %(at)s, 1, sampled.kind, 'task', sampled.namespace, sampled.state, sampled.total
from unnest(%(kinds)s::text[], %(namespaces)s::text[], %(states)s::text[], %(totals)s::bigint[])
    as sampled (kind, namespace, state, total)
on conflict (grain, at, kind, machine, namespace, type, from_state, event, to_state)
    do update set total = excluded.total
returning total

-- name: add_figures
-- Adds the sums of one process, histograms included, to the current minute.
insert into interlock.figures as known (
    at, grain, kind, machine, namespace, type, from_state, event, to_state, total, positions, counts
)
select date_trunc('minute', coalesce(%(now)s::timestamptz, now())), 1, added.kind, added.machine, added.namespace,
    added.type, added.from_state, added.event, added.to_state, added.total, added.positions, added.counts
from jsonb_to_recordset(%(figures)s) as added (
    kind text, machine text, namespace text, type text, from_state text, event text, to_state text, total bigint,
    positions smallint[], counts bigint[]
)
on conflict (grain, at, kind, machine, namespace, type, from_state, event, to_state) do update
set total = known.total + excluded.total,
    (positions, counts) = (
        select array_agg(position order by position), array_agg(summed order by position)
        from (
            select position, sum(number) as summed
            from (
                select * from unnest(known.positions, known.counts) as mine (position, number)
                union all
                select * from unnest(excluded.positions, excluded.counts) as theirs (position, number)
            ) as both_histograms
            group by position
        ) as merged
    )
returning total

-- name: add_refused_figures
-- Adds the moves that were refused since the last call to a minute. Rows with grain 0 hold the totals that were seen
-- last, so that a new leader goes on; totals that fell were set back by a crash of the server.
with seen as (
    select *
    from unnest(%(machines)s::text[], %(from_states)s::text[], %(to_states)s::text[], %(totals)s::bigint[])
        as counted (machine, from_state, to_state, total)
), stored as (
    insert into interlock.figures (at, grain, kind, machine, from_state, to_state, total)
    select 'epoch', 0, 'refused', machine, from_state, to_state, total
    from seen
    on conflict (grain, at, kind, machine, namespace, type, from_state, event, to_state)
        do update set total = excluded.total
), added as (
    select seen.machine, seen.from_state, seen.to_state,
        case when seen.total < coalesce(known.total, 0) then seen.total else seen.total - coalesce(known.total, 0) end
            as total
    from seen
        left join interlock.figures as known on known.grain = 0 and known.at = 'epoch' and known.kind = 'refused'
            and known.machine = seen.machine and known.from_state = seen.from_state and known.to_state = seen.to_state
)
insert into interlock.figures as minute (at, grain, kind, machine, from_state, to_state, total)
select %(at)s, 1, 'refused', machine, from_state, to_state, total
from added
where total > 0
on conflict (grain, at, kind, machine, namespace, type, from_state, event, to_state)
    do update set total = minute.total + excluded.total
returning total

-- name: roll_up_figures
-- Sums the rows of the finer grain within [at, at + grain) into rows of the coarser one; sampled values take the highest.
insert into interlock.figures (
    at, grain, kind, machine, namespace, type, from_state, event, to_state, total, positions, counts
)
select %(at)s, %(grain)s, kind, machine, namespace, type, from_state, event, to_state,
    case when kind in ('depth', 'oldest') then max(total) else sum(total) end,
    (select array_agg(position order by position) from (
        select distinct position from interlock.figures as finer, unnest(finer.positions) as position
        where finer.grain = %(finer)s and finer.at >= %(at)s
            and finer.at < %(at)s::timestamptz + make_interval(mins => %(grain)s)
            and (finer.kind, finer.machine, finer.namespace, finer.type, finer.from_state, finer.event, finer.to_state)
                = (figures.kind, figures.machine, figures.namespace, figures.type, figures.from_state, figures.event,
                    figures.to_state)
    ) as found),
    (select array_agg(summed order by position) from (
        select position, sum(number) as summed
        from interlock.figures as finer, unnest(finer.positions, finer.counts) as histogram (position, number)
        where finer.grain = %(finer)s and finer.at >= %(at)s
            and finer.at < %(at)s::timestamptz + make_interval(mins => %(grain)s)
            and (finer.kind, finer.machine, finer.namespace, finer.type, finer.from_state, finer.event, finer.to_state)
                = (figures.kind, figures.machine, figures.namespace, figures.type, figures.from_state, figures.event,
                    figures.to_state)
        group by position
    ) as found)
from interlock.figures
where grain = %(finer)s and at >= %(at)s and at < %(at)s::timestamptz + make_interval(mins => %(grain)s)
group by kind, machine, namespace, type, from_state, event, to_state
on conflict (grain, at, kind, machine, namespace, type, from_state, event, to_state)
    do update set total = excluded.total, positions = excluded.positions, counts = excluded.counts
returning total

-- name: read_last_counted_minute
-- The latest minute whose moves were counted, at most an hour ago: a new leader goes on from there.
select max(at) as at
from interlock.figures
where grain = 1 and kind = 'move' and machine in ('task', 'job', 'supervised-worker')
    and at > coalesce(%(now)s::timestamptz, now()) - interval '1 hour'

-- name: delete_old_figures
delete from interlock.figures
where (grain = 1 and at < coalesce(%(now)s::timestamptz, now()) - interval '6 hours 15 minutes')
    or (grain = 10 and at < coalesce(%(now)s::timestamptz, now()) - interval '7 days 1 hour')
    or (grain = 60 and at < coalesce(%(now)s::timestamptz, now()) - interval '90 days')
returning grain

-- name: read_moves_over_time
-- Moves by step of time; without `namespaces`, of all.
select date_bin(%(step)s::interval, at, %(since)s) as at, machine, from_state, event, to_state, sum(total)::bigint as total
from interlock.figures
where grain = %(grain)s and at >= %(since)s and kind = %(kind)s and machine = any (%(machines)s::text[])
    and (%(namespaces)s::text[] is null or namespace = any (%(namespaces)s))
group by 1, 2, 3, 4, 5
order by 1

-- name: read_histograms_over_time
-- Durations by step of time: kind is run or wait.
select at, kind, array_agg(position order by position) as positions, array_agg(number order by position) as counts
from (
    select date_bin(%(step)s::interval, at, %(since)s) as at, kind, position, sum(number)::bigint as number
    from interlock.figures, unnest(positions, counts) as histogram (position, number)
    where grain = %(grain)s and at >= %(since)s and kind in ('run', 'wait')
        and (%(namespaces)s::text[] is null or namespace = any (%(namespaces)s))
    group by 1, 2, 3
) as summed
group by at, kind
order by at

-- name: read_depths_over_time
-- The depth of the queue by step of time, the highest of each step; of several namespaces the sum. `oldest_at` is the
-- time of the oldest due task, in seconds since the epoch.
select at, sum(depth)::bigint as pending, min(oldest_at) as oldest_at
from (
    select date_bin(%(step)s::interval, at, %(since)s) as at, namespace,
        max(total) filter (where kind = 'depth' and to_state = 'pending') as depth,
        max(total) filter (where kind = 'oldest') as oldest_at
    from interlock.figures
    where grain = %(grain)s and at >= %(since)s and kind in ('depth', 'oldest')
        and (%(namespaces)s::text[] is null or namespace = any (%(namespaces)s))
    group by 1, 2
) as depths
group by at
order by at

-- name: count_failures_by_type
-- Attempts that ended within a time, and how many of them failed, by namespace and type; those that failed most first.
select namespace, type, sum(total) filter (where event in ('fail', 'retry', 'expire', 'exhaust'))::bigint as failed,
    sum(total) filter (where event in ('fail', 'exhaust'))::bigint as in_error, sum(total)::bigint as attempts
from interlock.figures
where grain = 1 and at >= coalesce(%(now)s::timestamptz, now()) - %(within)s::interval and kind = 'move'
    and machine = 'task' and from_state = 'running' and event in ('succeed', 'fail', 'retry', 'expire', 'exhaust')
    and (%(namespaces)s::text[] is null or namespace = any (%(namespaces)s))
group by namespace, type
having sum(total) filter (where event in ('fail', 'retry', 'expire', 'exhaust')) > 0
order by failed desc, namespace, type
limit %(limit)s
