-- Who waits for the end of which task or job: whoever ends one looks here whether to send a notification.

-- name: insert_waiters
insert into interlock.waiters (task_id, waiter, expires_at)
select task_id, %(waiter)s::uuid, now() + interval '1 hour'
from unnest(%(ids)s::uuid[]) as wanted (task_id)
on conflict (task_id, waiter) do update set expires_at = excluded.expires_at

-- name: delete_waiters
delete from interlock.waiters
where task_id = any (%(ids)s::uuid[]) and waiter = %(waiter)s or expires_at < now()

-- name: find_ended
-- Of tasks and jobs alike. What is gone has ended too: whoever waits for it must not wait forever.
select wanted.id
from unnest(%(ids)s::uuid[]) as wanted (id)
    left join interlock.tasks on tasks.id = wanted.id
    left join interlock.jobs on jobs.id = wanted.id
where coalesce(tasks.state in ('done', 'error', 'canceled', 'skipped'), true)
    and coalesce(jobs.status in ('COMPLETED', 'FAILED', 'CANCELED'), true)
