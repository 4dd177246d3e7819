-- Deletes old rows in small batches.

-- name: delete_ended_tasks
-- Walks a range of the primary key and deletes tasks that ended long enough ago; returns the end of the range, and how
-- long the oldest of them has been past its age. A null age keeps tasks of that state. Steps are deleted with their job.
with walked as materialized (
    select id, state, finished_at, job_id
    from interlock.tasks
    where id > coalesce(%(after)s::uuid, '00000000-0000-0000-0000-000000000000')
        and id < coalesce(%(before)s::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
    order by id
    limit %(stretch)s
), due as materialized (
    select id, since
    from (
            select id, job_id, finished_at + case state
                    when 'done' then %(done)s::interval
                    when 'canceled' then %(canceled)s::interval
                    when 'skipped' then %(skipped)s::interval
                    when 'error' then %(error)s::interval
                end as since
            from walked
        ) as aged
    where since <= coalesce(%(now)s::timestamptz, now()) and job_id is null
), deleted as (
    delete from interlock.tasks
    where id = any (array(select id from due))
        -- Repeated, for a row that is requeued at this moment.
        and state in ('done', 'error', 'canceled', 'skipped')
    returning id
)
select (select count(*) from walked) as walked, (select count(*) from deleted) as deleted,
    (select id from walked order by id desc limit 1) as last,
    (select coalesce(%(now)s::timestamptz, now()) - min(since) from due) as overdue

-- name: read_outdated_jobs
-- Walks a range of jobs and returns those that ended long enough ago. A step of a parent may still read the result of
-- its child, and a child refers to its parent: children are deleted after the end of their parent and before it.
with walked as materialized (
    select id, status, parent_job_id, coalesce(completed_at, updated_at) as ended_at
    from interlock.jobs
    where id > coalesce(%(after)s::uuid, '00000000-0000-0000-0000-000000000000')
        and id < coalesce(%(before)s::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
    order by id
    limit %(stretch)s
), due as materialized (
    select id, since
    from (
            select id, parent_job_id, ended_at + case status
                    when 'COMPLETED' then %(done)s::interval
                    when 'CANCELED' then %(canceled)s::interval
                    when 'FAILED' then %(error)s::interval
                end as since
            from walked
        ) as aged
    where since <= coalesce(%(now)s::timestamptz, now())
        and not exists (
            select from interlock.jobs as parent
            where parent.id = aged.parent_job_id and parent.status in ('SUBMITTED', 'PENDING', 'RUNNING')
        )
        and not exists (select from interlock.jobs as child where child.parent_job_id = aged.id)
)
select (select count(*) from walked) as walked, (select id from walked order by id desc limit 1) as last,
    array(select id from due) as ids,
    (select coalesce(%(now)s::timestamptz, now()) - min(since) from due) as overdue

-- name: delete_steps_of_jobs
with deleted as (
    delete from interlock.tasks
    where id = any (array(
            select found.id
            from unnest(%(ids)s::uuid[]) as wanted (job_id)
                cross join lateral (
                    select id
                    from interlock.tasks
                    where tasks.job_id = wanted.job_id and state in ('done', 'error', 'canceled', 'skipped')
                    limit %(batch)s
                ) as found
            limit %(batch)s
        ))
        and state in ('done', 'error', 'canceled', 'skipped')
    returning id
)
select count(*) as steps
from deleted

-- name: delete_jobs_without_steps
-- With their signals and their dead letters.
with deleted as (
    delete from interlock.jobs
    where id = any (%(ids)s::uuid[]) and status in ('COMPLETED', 'FAILED', 'CANCELED')
        and not exists (select from interlock.tasks where tasks.job_id = jobs.id)
        and not exists (select from interlock.jobs as child where child.parent_job_id = jobs.id)
    returning id
), forgotten as (
    delete from interlock.orchestration_failures where job_id in (select id from deleted)
)
select id
from deleted

-- name: read_unseen_workers
-- Processes that ended long ago without deregistering. A supervised row may stay without a process for any time.
select id
from interlock.workers
where seen_until <= coalesce(%(now)s::timestamptz, now()) - %(age)s::interval
    and status in ('IDLE', 'RUNNING', 'PAUSED') and (not metadata ? 'spec' or metadata ? 'bound_to')
order by id
limit %(batch)s

-- name: delete_ended_workers
delete from interlock.workers
where id = any (array(
        select id
        from interlock.workers
        where status in ('COMPLETED', 'FAILED', 'TERMINATED')
            and coalesce(seen_until, heartbeat_at, updated_at)
                <= coalesce(%(now)s::timestamptz, now()) - %(age)s::interval
        order by id
        limit %(batch)s
    ))
returning id

-- name: delete_expired_idempotency_keys
-- The expiry is checked again: a request may have taken the expired key for itself meanwhile.
delete from interlock.idempotency_keys
where (actor, request_id) in (
        select actor, request_id
        from interlock.idempotency_keys
        where expires_at <= coalesce(%(now)s::timestamptz, now())
        order by expires_at
        limit %(batch)s
    )
    and expires_at <= coalesce(%(now)s::timestamptz, now())
returning request_id

-- name: delete_expired_sign_in_codes
delete from interlock.sign_in_codes
where expires_at <= coalesce(%(now)s::timestamptz, now())
returning token_id

-- name: delete_expired_sessions
delete from interlock.sessions
where expires_at <= coalesce(%(now)s::timestamptz, now())
    or last_used_at <= coalesce(%(now)s::timestamptz, now()) - %(idle)s::interval
returning token_id

-- name: delete_expired_waiters
delete from interlock.waiters
where expires_at <= coalesce(%(now)s::timestamptz, now())
returning task_id

-- name: delete_given_up_webhooks
delete from interlock.callbacks
where given_up_at <= coalesce(%(now)s::timestamptz, now()) - %(age)s::interval
returning id

-- name: delete_ownerless_failures
-- Dead letters that belong to no job, and so are not deleted with one.
delete from interlock.orchestration_failures
where failed_at <= coalesce(%(now)s::timestamptz, now()) - %(age)s::interval
    and (job_id is null or not exists (select from interlock.jobs where jobs.id = job_id))
returning msg_id

-- name: delete_old_wait_reasons
-- What holds still is kept, however old: the latest reason of a namespace or a schedule, and what a process serves.
delete from interlock.wait_reasons
where id = any (array(
        select id
        from interlock.wait_reasons as old
        where since <= coalesce(%(now)s::timestamptz, now()) - %(age)s::interval
            and (kind in ('task', 'job') or until is not null
                or kind = 'worker' and not exists (select from interlock.workers where workers.id = old.subject)
                or exists (
                    select from interlock.wait_reasons as later
                    where later.kind = old.kind and later.subject = old.subject and later.id > old.id
                        and later.until is null
                        and later.since <= coalesce(%(now)s::timestamptz, now()) - %(age)s::interval
                ))
        order by since
        limit %(batch)s
    ))
returning id

-- name: limit_lock_wait
-- Adding and dropping partitions locks their table: a short lock timeout keeps writers from queueing behind.
select set_config('lock_timeout', '2s', true)

-- name: add_record_partitions
select interlock.add_record_partitions() as made

-- name: drop_records_before
select interlock.drop_records_before(coalesce(%(now)s::timestamptz, now()) - %(age)s::interval) as partition
