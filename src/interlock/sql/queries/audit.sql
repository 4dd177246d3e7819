-- The audit feed: records of tasks, jobs and workers, newest first. Null means "any". Not prepared, so that the planner
-- knows the kind and which conditions are null. Every statement is for one kind of records.

-- name: walk_ranges_of_records
-- The BRIN indexes of the records: the planner would walk the index of ids for the first of many records that it expects.
select set_config('enable_seqscan', 'off', true), set_config('enable_indexscan', 'off', true),
    set_config('enable_indexonlyscan', 'off', true)

-- name: read_last_record_ids
-- The highest ids that were given to records.
select (select last_value from interlock.audit_logs_id_seq) as task,
    (select last_value from interlock.job_state_transitions_id_seq) as job,
    (select last_value from interlock.worker_state_transitions_id_seq) as worker

-- name: seek_records
-- An id above all records below `below` and between two times, by at most `window` ids; 0 if there are none. Bisects by
-- whether there are records; the first middle is 0. `offset 0` keeps the planner from asking twice.
with recursive search (low, high) as (
    select -%(below)s::bigint, %(below)s::bigint
    union all
    select case when found then middle else low end, case when found then high else middle end
    from search
        cross join lateral (select (low + high) / 2 as middle) as half
        cross join lateral (
            select case %(kind)s::text
                    when 'task' then exists (
                        select from interlock.audit_logs
                        where id >= middle and id < high and recorded_at >= %(since)s
                            and (%(until)s::timestamptz is null or recorded_at < %(until)s::timestamptz)
                    )
                    when 'job' then exists (
                        select from interlock.job_state_transitions
                        where id >= middle and id < high and recorded_at >= %(since)s
                            and (%(until)s::timestamptz is null or recorded_at < %(until)s::timestamptz)
                    )
                    else exists (
                        select from interlock.worker_state_transitions
                        where id >= middle and id < high and recorded_at >= %(since)s
                            and (%(until)s::timestamptz is null or recorded_at < %(until)s::timestamptz)
                    )
                end as found
            offset 0
        ) as probed
    where high - low > %(window)s and high > 0
)
select high
from search
order by high - low
limit 1

-- name: find_records
-- The records with ids from `above` on and below `below`: those that meet all conditions, at most `limit`, and the last
-- one, whether it meets them or not: `matches` tells.
select kind, record, id, from_state, to_state, event, reason, actor, database_role, attempt, recorded_at, matches
from (
        select kind, record, id, from_state, to_state, event, reason, actor, database_role, attempt, recorded_at,
            lead(record) over (order by record desc) is null as is_last,
            (%(actor)s::text is null or actor = %(actor)s::text)
            and (%(event)s::text is null or event = %(event)s::text)
            and (%(from_state)s::text is null or from_state is not distinct from %(from_state)s::text)
            and (%(to_state)s::text is null or to_state = %(to_state)s::text)
            and (%(database_role)s::text is null or database_role = %(database_role)s::text)
            and (%(namespaces)s::text[] is null or case kind
                when 'task' then (select namespace from interlock.tasks where tasks.id = uuid)
                    = any (%(namespaces)s::text[])
                when 'job' then (select namespace from interlock.jobs where jobs.id = uuid) = any (%(namespaces)s::text[])
                else (select workers.namespaces from interlock.workers where workers.id = looked.id)
                    && %(namespaces)s::text[]
            end) is true as matches
        from (
                select 'task' as kind, id as record, task_id as uuid, task_id::text as id, from_state, to_state, event,
                    reason, actor, database_role, attempt, recorded_at
                from interlock.audit_logs
                where %(kind)s::text = 'task' and audit_logs.id >= %(above)s and audit_logs.id < %(below)s
                    and recorded_at >= %(since)s
                    and (%(until)s::timestamptz is null or recorded_at < %(until)s::timestamptz)
                    and (%(uuid)s::uuid is null or task_id = %(uuid)s::uuid)
                union all
                select 'job', id, job_id, job_id::text, from_state, to_state, event, reason, actor, database_role,
                    null::int, recorded_at
                from interlock.job_state_transitions
                where %(kind)s::text = 'job' and job_state_transitions.id >= %(above)s
                    and job_state_transitions.id < %(below)s and recorded_at >= %(since)s
                    and (%(until)s::timestamptz is null or recorded_at < %(until)s::timestamptz)
                    and (%(uuid)s::uuid is null or job_id = %(uuid)s::uuid)
                union all
                select 'worker', id, null, worker_id, from_state, to_state, event, reason, actor, database_role,
                    null, recorded_at
                from interlock.worker_state_transitions
                where %(kind)s::text = 'worker' and worker_state_transitions.id >= %(above)s
                    and worker_state_transitions.id < %(below)s and recorded_at >= %(since)s
                    and (%(until)s::timestamptz is null or recorded_at < %(until)s::timestamptz)
                    and (%(id)s::text is null or worker_id = %(id)s::text)
            ) as looked
    ) as judged
where matches or is_last
order by record desc
limit %(limit)s
