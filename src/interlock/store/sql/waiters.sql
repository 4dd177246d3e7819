-- Who waits for the end of which task: whoever ends one looks here whether to send a notification.

-- name: insert_waiters
insert into interlock.waiters (task_id, waiter, expires_at)
select task_id, %(waiter)s, now() + interval '1 hour'
from unnest(%(ids)s::uuid[]) as wanted (task_id)
on conflict (task_id, waiter) do update set expires_at = excluded.expires_at

-- name: delete_waiters
delete from interlock.waiters
where task_id = any (%(ids)s::uuid[]) and waiter = %(waiter)s or expires_at < now()

-- name: find_ended_tasks
-- A task that is gone has ended too: whoever waits for it must not wait forever.
select wanted.id
from unnest(%(ids)s::uuid[]) as wanted (id)
    left join interlock.tasks on tasks.id = wanted.id
where tasks.id is null or tasks.state in ('done', 'error', 'canceled', 'skipped')
