-- Clients that wait for the end of a task or job. The statements that end one notify only these.

-- name: insert_waiters
insert into interlock.waiters (task_id, waiter, expires_at)
select task_id, %(waiter)s::uuid, now() + interval '1 hour'
from unnest(%(ids)s::uuid[]) as wanted (task_id)
on conflict (task_id, waiter) do update set expires_at = excluded.expires_at

-- name: delete_waiters
delete from interlock.waiters
where task_id = any (%(ids)s::uuid[]) and waiter = %(waiter)s or expires_at < now()

-- name: find_ended
-- For tasks and jobs. A row that was deleted has ended, too: its waiters must not wait forever.
select wanted.id
from unnest(%(ids)s::uuid[]) as wanted (id)
    left join interlock.tasks on tasks.id = wanted.id
    left join interlock.jobs on jobs.id = wanted.id
where coalesce(tasks.state in ('done', 'error', 'canceled', 'skipped'), true)
    and coalesce(jobs.status in ('COMPLETED', 'FAILED', 'CANCELED'), true)
