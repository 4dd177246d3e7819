-- Recorded transitions in the order of their transactions, for streams of events.
--
-- The id of a record is assigned before its transaction commits, so that records do not appear in the order of their ids.
-- The id of the transaction gives an order in which nothing appears late: a transaction below the horizon has ended. The
-- system column xmin has its lower 32 bits, and the horizon completes it.

-- name: read_horizon
-- `horizon`: all transactions below it have ended. `next_xid`: none from it on had begun to write at `moment`.
-- The upper end of the snapshot says only that none from it on has ended: this statement takes the latest id itself.
select clock_timestamp() as moment, pg_snapshot_xmin(snapshot)::text::bigint as horizon,
    pg_current_xact_id()::text::bigint + 1 as next_xid
from pg_current_snapshot() as snapshot

-- name: read_events
-- The records after one position and up to another, below the horizon. No record after the position is older than `since`.
select found.xid, found.place, found.kind, found.record, found.id, found.from_state, found.to_state, found.event,
    found.reason, found.actor, found.database_role, found.attempt, found.recorded_at,
    coalesce(tasks.namespace, jobs.namespace) as namespace, workers.namespaces, tasks.type, workflows.name as workflow,
    coalesce(tasks.job_id, case when found.kind = 'job' then found.uuid end) as job_id, tasks.step
from (
        select *
        from (
                select %(horizon)s::bigint
                        - (((%(horizon)s::bigint - xmin::text::bigint + 2147483648) & 4294967295) - 2147483648) as xid,
                    1 as place, 'job' as kind, id as record, job_id as uuid, job_id::text as id, from_state, to_state,
                    event, reason, actor, database_role, null::int as attempt, recorded_at
                from interlock.job_state_transitions
                where recorded_at >= %(since)s
                union all
                select %(horizon)s::bigint
                        - (((%(horizon)s::bigint - xmin::text::bigint + 2147483648) & 4294967295) - 2147483648),
                    2, 'task', id, task_id, task_id::text, from_state, to_state, event, reason, actor, database_role,
                    attempt, recorded_at
                from interlock.audit_logs
                where recorded_at >= %(since)s
                union all
                select %(horizon)s::bigint
                        - (((%(horizon)s::bigint - xmin::text::bigint + 2147483648) & 4294967295) - 2147483648),
                    3, 'worker', id, null, worker_id, from_state, to_state, event, reason, actor, database_role, null,
                    recorded_at
                from interlock.worker_state_transitions
                where recorded_at >= %(since)s
            ) as records
        where xid < %(horizon)s::bigint
            and (xid, place, record) > (%(after_xid)s::bigint, %(after_place)s::int, %(after_record)s::bigint)
            and (xid, place, record) <= (%(until_xid)s::bigint, %(until_place)s::int, %(until_record)s::bigint)
        order by xid, place, record
        limit %(limit)s
    ) as found
    left join interlock.tasks on found.kind = 'task' and tasks.id = found.uuid
    left join interlock.jobs on jobs.id = case when found.kind = 'job' then found.uuid else tasks.job_id end
    left join interlock.workflows on workflows.id = jobs.workflow_id
    left join interlock.workers on found.kind = 'worker' and workers.id = found.id
order by found.xid, found.place, found.record

-- name: read_usable_tokens
-- Those of these tokens that are neither revoked nor expired.
select token_hash
from interlock.tokens
where token_hash = any (%(hashes)s::bytea[]) and revoked_at is null and (expires_at is null or expires_at > now())
