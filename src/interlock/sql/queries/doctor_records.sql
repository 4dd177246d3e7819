-- Checks of recorded moves: every chain of records is complete and legal, and ends in the state of its row. Each statement
-- looks at the rows of a range of ids, or at the rows of given ids, and returns the faults by code with a sample of ids. It
-- is one statement, so that it sees rows and records of one moment while the engine works.
--
-- `horizon` is the time since which all records are kept: retention drops the partitions before it. `moves` has every legal
-- "from event to"; that of a first record begins with "create".

-- name: read_record_horizons
-- The time at which the first partition of each table of records begins.
select parent.relname::text as records,
    min(substring(pg_get_expr(child.relpartbound, child.oid) from 'FROM \(''(.+?)''\)')::timestamptz) as horizon
from pg_inherits
    join pg_class as child on child.oid = inhrelid
    join pg_class as parent on parent.oid = inhparent
where parent.relnamespace = 'interlock'::regnamespace
    and parent.relname in ('audit_logs', 'job_state_transitions', 'worker_state_transitions') and parent.relkind = 'p'
group by parent.relname

-- name: read_open_task_ids
-- Newest tasks, and unfinished ones: of each kind a bounded number, each from an index.
(select id from interlock.tasks order by id desc limit %(limit)s)
union
(select id from interlock.tasks where lease_expires_at is not null order by lease_expires_at desc limit %(limit)s)
union
(select id from interlock.tasks where state = 'pending' and limit_keys is null limit %(limit)s)
union
(select id from interlock.tasks where state = 'pending' and limit_keys is not null limit %(limit)s)
union
(
    select tasks.id
    from (
            select id
            from interlock.jobs
            where status = 'RUNNING' and status in ('SUBMITTED', 'PENDING', 'RUNNING')
            order by id
            limit %(limit)s / 10
        ) as jobs
        join interlock.tasks on tasks.job_id = jobs.id
    limit %(limit)s
)

-- name: read_open_job_ids
(select id from interlock.jobs order by id desc limit %(limit)s)
union
(select id from interlock.jobs where status in ('SUBMITTED', 'PENDING', 'RUNNING') limit %(limit)s)

-- name: read_newest_worker_ids
select id
from interlock.workers
order by created_at desc, id desc
limit %(limit)s

-- name: read_task_range
-- The id at which the next range of about `limit` records ends; no row for the last one.
select task_id as last
from interlock.audit_logs
where task_id > coalesce(%(after)s::uuid, '00000000-0000-0000-0000-000000000000')
order by task_id
offset %(limit)s
limit 1

-- name: read_job_range
select job_id as last
from interlock.job_state_transitions
where job_id > coalesce(%(after)s::uuid, '00000000-0000-0000-0000-000000000000')
order by job_id
offset %(limit)s
limit 1

-- name: read_worker_range
select worker_id as last
from interlock.worker_state_transitions
where worker_id > coalesce(%(after)s::text, '')
order by worker_id
offset %(limit)s
limit 1

-- name: check_task_records
-- Clients may choose the id of a task, and choose it again after the row was deleted: a chain may begin anew behind a final
-- state.
with steps as (
    select task_id, from_state, to_state, event, attempt, recorded_at, lag(to_state) over chain as state_before,
        lag(attempt) over chain as attempt_before, lag(recorded_at) over chain as recorded_before,
        lead(id) over chain is null as is_last
    from interlock.audit_logs
    where (%(ids)s::uuid[] is null or task_id = any (%(ids)s::uuid[]))
        and (%(after)s::uuid is null or task_id > %(after)s::uuid)
        and (%(last)s::uuid is null or task_id <= %(last)s::uuid)
    window chain as (partition by task_id order by id)
), chains as (
    select task_id as id, max(to_state) filter (where is_last) as last_state,
        max(attempt) filter (where is_last) as last_attempt,
        bool_or(state_before is null and from_state is null) as is_complete,
        bool_or(state_before is not null and from_state is distinct from state_before
            and not (from_state is null and state_before = any (%(final)s::text[]))) as is_broken,
        bool_or(concat_ws(' ', from_state, event, to_state) <> all (%(moves)s::text[])) as is_illegal,
        bool_or(attempt <> case
                when from_state is null then 0
                else coalesce(attempt_before + (event = 'claim')::int, attempt)
            end) as is_misnumbered,
        max(recorded_at) filter (where from_state is null) as begun_at,
        bool_or(recorded_at < recorded_before - %(slack)s::interval
            or recorded_at > coalesce(%(now)s::timestamptz, now()) + %(slack)s::interval) as is_mistimed
    from steps
    group by task_id
), wanted as (
    select id, state, attempt, settled_attempt, created_at, coalesce(finished_at, started_at, created_at) as moved_at,
        state = any (%(final)s::text[]) and finished_at is null or finished_at < created_at - %(slack)s::interval
            or finished_at < started_at - %(slack)s::interval
            or created_at > coalesce(%(now)s::timestamptz, now()) + %(slack)s::interval as is_mistimed
    from interlock.tasks
    where (%(ids)s::uuid[] is null or id = any (%(ids)s::uuid[]))
        and (%(after)s::uuid is null or id > %(after)s::uuid)
        and (%(last)s::uuid is null or id <= %(last)s::uuid)
), judged as (
    select coalesce(wanted.id, chains.id) as id, case
            when chains.id is null
                then case when wanted.moved_at >= %(horizon)s::timestamptz then 'records_missing' end
            when chains.is_broken then 'records_broken'
            when chains.is_illegal then 'records_illegal'
            when not chains.is_complete and (wanted.created_at >= %(horizon)s::timestamptz
                    -- the row is gone: the id has the time of its creation (UUIDv7)
                    or wanted.id is null and chains.id > %(horizon_id)s::uuid and substr(chains.id::text, 15, 1) = '7')
                then 'records_missing'
            when chains.is_misnumbered then 'records_misnumbered'
            when wanted.id is null
                then case when chains.last_state <> all (%(final)s::text[]) then 'row_deleted' end
            when wanted.state <> chains.last_state then 'state_unrecorded'
            when wanted.attempt <> chains.last_attempt
                -- an orchestrator ends steps that no worker claimed
                or wanted.state = 'done' and wanted.settled_attempt is distinct from nullif(wanted.attempt, 0)
                then 'records_misnumbered'
            when chains.is_mistimed or chains.begun_at < wanted.created_at - %(slack)s::interval
                then 'records_mistimed'
            when wanted.is_mistimed then 'row_mistimed'
        end as code
    from wanted
        full join chains on chains.id = wanted.id
)
select code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from judged
where code is not null
group by code
order by code

-- name: check_job_records
-- Clients may choose the id of a job, and choose it again after the row was deleted: a chain may begin anew behind a final
-- state.
with steps as (
    select job_id, from_state, to_state, event, recorded_at, lag(to_state) over chain as state_before,
        lag(recorded_at) over chain as recorded_before, lead(id) over chain is null as is_last
    from interlock.job_state_transitions
    where (%(ids)s::uuid[] is null or job_id = any (%(ids)s::uuid[]))
        and (%(after)s::uuid is null or job_id > %(after)s::uuid)
        and (%(last)s::uuid is null or job_id <= %(last)s::uuid)
    window chain as (partition by job_id order by id)
), chains as (
    select job_id as id, max(to_state) filter (where is_last) as last_state,
        bool_or(state_before is null and from_state is null) as is_complete,
        bool_or(state_before is not null and from_state is distinct from state_before
            and not (from_state is null and state_before = any (%(final)s::text[]))) as is_broken,
        bool_or(concat_ws(' ', from_state, event, to_state) <> all (%(moves)s::text[])) as is_illegal,
        bool_or(recorded_at < recorded_before - %(slack)s::interval
            or recorded_at > coalesce(%(now)s::timestamptz, now()) + %(slack)s::interval) as is_mistimed
    from steps
    group by job_id
), wanted as (
    select id, status, created_at, coalesce(completed_at, started_at, created_at) as moved_at,
        status = any (%(final)s::text[]) and completed_at is null or completed_at < created_at - %(slack)s::interval
            or completed_at < started_at - %(slack)s::interval
            or created_at > coalesce(%(now)s::timestamptz, now()) + %(slack)s::interval as is_mistimed
    from interlock.jobs
    where (%(ids)s::uuid[] is null or id = any (%(ids)s::uuid[]))
        and (%(after)s::uuid is null or id > %(after)s::uuid)
        and (%(last)s::uuid is null or id <= %(last)s::uuid)
), judged as (
    select coalesce(wanted.id, chains.id) as id, case
            when chains.id is null
                then case when wanted.moved_at >= %(horizon)s::timestamptz then 'records_missing' end
            when chains.is_broken then 'records_broken'
            when chains.is_illegal then 'records_illegal'
            when not chains.is_complete and (wanted.created_at >= %(horizon)s::timestamptz
                    or wanted.id is null and chains.id > %(horizon_id)s::uuid and substr(chains.id::text, 15, 1) = '7')
                then 'records_missing'
            when wanted.id is null
                then case when chains.last_state <> all (%(final)s::text[]) then 'row_deleted' end
            when wanted.status <> chains.last_state then 'state_unrecorded'
            when chains.is_mistimed then 'records_mistimed'
            when wanted.is_mistimed then 'row_mistimed'
        end as code
    from wanted
        full join chains on chains.id = wanted.id
)
select code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from judged
where code is not null
group by code
order by code

-- name: check_worker_records
-- An id can be used again after its row was deleted: a chain may begin anew behind a final state.
with steps as (
    select worker_id, from_state, to_state, event, recorded_at, lag(to_state) over chain as state_before,
        lag(recorded_at) over chain as recorded_before, lead(id) over chain is null as is_last
    from interlock.worker_state_transitions
    where (%(ids)s::text[] is null or worker_id = any (%(ids)s::text[]))
        and (%(after)s::text is null or worker_id > %(after)s::text)
        and (%(last)s::text is null or worker_id <= %(last)s::text)
    window chain as (partition by worker_id order by id)
), chains as (
    select worker_id as id, max(to_state) filter (where is_last) as last_state,
        bool_or(state_before is null and from_state is null) as is_complete,
        bool_or(state_before is not null and from_state is distinct from state_before
            and not (from_state is null and state_before = any (%(final)s::text[]))) as is_broken,
        bool_or(concat_ws(' ', from_state, event, to_state) <> all (%(moves)s::text[])) as is_illegal,
        bool_or(recorded_at < recorded_before - %(slack)s::interval
            or recorded_at > coalesce(%(now)s::timestamptz, now()) + %(slack)s::interval) as is_mistimed
    from steps
    group by worker_id
), wanted as (
    select id, status, created_at
    from interlock.workers
    where (%(ids)s::text[] is null or id = any (%(ids)s::text[]))
        and (%(after)s::text is null or id > %(after)s::text)
        and (%(last)s::text is null or id <= %(last)s::text)
), judged as (
    select coalesce(wanted.id, chains.id) as id, case
            when chains.id is null
                then case when wanted.created_at >= %(horizon)s::timestamptz then 'records_missing' end
            when chains.is_broken then 'records_broken'
            when chains.is_illegal then 'records_illegal'
            when not chains.is_complete and wanted.created_at >= %(horizon)s::timestamptz then 'records_missing'
            when wanted.id is null
                then case when chains.last_state <> all (%(final)s::text[]) then 'row_deleted' end
            when wanted.status <> chains.last_state then 'state_unrecorded'
            when chains.is_mistimed then 'records_mistimed'
        end as code
    from wanted
        full join chains on chains.id = wanted.id
)
select code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from judged
where code is not null
group by code
order by code
