-- What is no longer needed goes, a little at a time.

-- name: delete_ended_tasks
-- Walks a stretch of the primary key, and deletes what in it ended long enough ago; tells how far it came. An age that
-- is null keeps its state. The steps of a job stay while the job goes on.
with walked as materialized (
    select id, state, finished_at, job_id
    from interlock.tasks
    where id > coalesce(%(after)s::uuid, '00000000-0000-0000-0000-000000000000')
        and id < coalesce(%(before)s::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
    order by id
    limit %(stretch)s
), deleted as (
    delete from interlock.tasks
    where id = any (array(
            select id
            from walked
            where finished_at <= coalesce(%(now)s::timestamptz, now()) - case state
                    when 'done' then %(done)s::interval
                    when 'canceled' then %(canceled)s::interval
                    when 'skipped' then %(skipped)s::interval
                    when 'error' then %(error)s::interval
                end
                and not exists (
                    select from interlock.jobs
                    where jobs.id = walked.job_id and status in ('SUBMITTED', 'PENDING', 'RUNNING')
                )
        ))
        -- said again, for a row that was requeued at this very moment
        and finished_at is not null and state in ('done', 'canceled', 'skipped', 'error')
    returning id
)
select (select count(*) from walked) as walked, (select count(*) from deleted) as deleted,
    (select id from walked order by id desc limit 1) as last

-- name: delete_expired_idempotency_keys
delete from interlock.idempotency_keys
where request_id = any (array(
    select request_id
    from interlock.idempotency_keys
    where expires_at <= coalesce(%(now)s::timestamptz, now())
    order by expires_at
    limit %(batch)s
))
returning request_id

-- name: delete_expired_waiters
delete from interlock.waiters
where expires_at <= coalesce(%(now)s::timestamptz, now())
returning task_id

-- name: delete_given_up_callbacks
delete from interlock.callbacks
where given_up_at <= coalesce(%(now)s::timestamptz, now()) - %(age)s::interval
returning id

-- name: limit_lock_wait
-- Adding and dropping partitions locks their table: rather give way than let every writer queue up behind.
select set_config('lock_timeout', '2s', true)

-- name: add_record_partitions
select interlock.add_record_partitions() as made

-- name: drop_records_before
select interlock.drop_records_before(coalesce(%(now)s::timestamptz, now()) - %(age)s::interval) as partition
