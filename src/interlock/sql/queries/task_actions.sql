-- Reads for cancellations and requeues by filter. The moves themselves are in tasks.sql.

-- name: read_requeue_obstacles
-- Whether each task is a step, and whether an unfinished task has its unique key.
select tasks.id, tasks.job_id is not null as is_step, tasks.unique_key, tasks.unique_key is not null and exists (
        select
        from interlock.tasks as other
        where other.unique_key = tasks.unique_key and other.state in ('waiting', 'pending', 'running')
    ) as is_taken
from interlock.tasks
where tasks.id = any (%(ids)s::uuid[])
