-- The audit feed: records of tasks, jobs and workers, newest first. Null means "any". Not prepared, so that the planner
-- knows which conditions are null.

-- name: find_records
-- Between two times; before the record `before_record` of a table if it is as old as `until`.
select place, kind, record, id, from_state, to_state, event, reason, actor, database_role, attempt, recorded_at
from (
        select 1 as place, 'job' as kind, id as record, job_id::text as id, from_state, to_state, event, reason, actor,
            database_role, null::int as attempt, recorded_at
        from interlock.job_state_transitions
        where 'job' = any (%(kinds)s::text[]) and recorded_at >= %(since)s and recorded_at <= %(until)s
            and (%(uuid)s::uuid is null or job_id = %(uuid)s::uuid)
            and (%(namespaces)s::text[] is null or exists (
                select from interlock.jobs where jobs.id = job_id and jobs.namespace = any (%(namespaces)s::text[])
            ))
        union all
        select 2, 'task', id, task_id::text, from_state, to_state, event, reason, actor, database_role, attempt,
            recorded_at
        from interlock.audit_logs
        where 'task' = any (%(kinds)s::text[]) and recorded_at >= %(since)s and recorded_at <= %(until)s
            and (%(uuid)s::uuid is null or task_id = %(uuid)s::uuid)
            and (%(namespaces)s::text[] is null or exists (
                select from interlock.tasks where tasks.id = task_id and tasks.namespace = any (%(namespaces)s::text[])
            ))
        union all
        select 3, 'worker', id, worker_id, from_state, to_state, event, reason, actor, database_role, null, recorded_at
        from interlock.worker_state_transitions
        where 'worker' = any (%(kinds)s::text[]) and recorded_at >= %(since)s and recorded_at <= %(until)s
            and (%(id)s::text is null or worker_id = %(id)s::text)
            and (%(namespaces)s::text[] is null or exists (
                select from interlock.workers
                where workers.id = worker_id and workers.namespaces && %(namespaces)s::text[]
            ))
    ) as records
where (recorded_at, place, record) < (%(until)s::timestamptz, %(before_place)s::int, %(before_record)s::bigint)
    and (%(actor)s::text is null or actor = %(actor)s::text)
    and (%(event)s::text is null or event = %(event)s::text)
    and (%(from_state)s::text is null or from_state = %(from_state)s::text)
    and (%(to_state)s::text is null or to_state = %(to_state)s::text)
    and (%(database_role)s::text is null or database_role = %(database_role)s::text)
order by recorded_at desc, place desc, record desc
limit %(limit)s

-- name: count_records
-- The records between two times, of all that a page looks at.
select (
        select count(*) from interlock.job_state_transitions
        where 'job' = any (%(kinds)s::text[]) and recorded_at >= %(since)s and recorded_at < %(until)s
    ) + (
        select count(*) from interlock.audit_logs
        where 'task' = any (%(kinds)s::text[]) and recorded_at >= %(since)s and recorded_at < %(until)s
    ) + (
        select count(*) from interlock.worker_state_transitions
        where 'worker' = any (%(kinds)s::text[]) and recorded_at >= %(since)s and recorded_at < %(until)s
    ) as records
