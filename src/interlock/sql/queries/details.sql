-- Reads of pages about one task or one job. No statement here writes.

-- name: read_task_page_details
-- The columns of a task that lists and results leave out, and its webhook until that is delivered.
select tasks.checkpoint, tasks.callback_url, tasks.cancel_requested_at, tasks.timeout_seconds, tasks.wait_until, tasks.part,
    tasks.part_of, jobs.task_description as workflow, jobs.status as job_status, notice.webhook
from interlock.tasks
    left join interlock.jobs on jobs.id = tasks.job_id
    left join lateral (
        select jsonb_build_object('id', callbacks.id, 'tries', tries, 'next_try_at', next_try_at, 'given_up_at', given_up_at,
            'error', callbacks.error) as webhook
        from interlock.callbacks
        where callbacks.task_id = tasks.id
        order by callbacks.id desc
        limit 1
    ) as notice on tasks.callback_url is not null
where tasks.id = %(id)s

-- name: read_step_moves
-- The recorded moves of the steps of a job, without the parts of maps; at most `limit`, those of the first steps.
select moved.task_id, moved.id, moved.from_state, moved.to_state, moved.event, moved.reason, moved.actor, moved.attempt,
    moved.recorded_at
from interlock.tasks
    cross join lateral (
        select *
        from interlock.audit_logs
        where audit_logs.task_id = tasks.id
        order by audit_logs.id
        limit %(moves_of_step)s
    ) as moved
where tasks.job_id = %(job_id)s and tasks.part_of is null
order by tasks.created_at, tasks.id, moved.id
limit %(limit)s

-- name: read_latest_task_moves
-- The latest recorded moves of a task, newest first; `before` is the record that ended the page before.
select id, from_state, to_state, event, reason, actor, attempt, recorded_at
from interlock.audit_logs
where task_id = %(id)s and (%(before)s::bigint is null or id < %(before)s::bigint)
order by id desc
limit %(limit)s

-- name: read_latest_job_moves
-- The same of a job.
select id, from_state, to_state, event, reason, actor, recorded_at
from interlock.job_state_transitions
where job_id = %(id)s and (%(before)s::bigint is null or id < %(before)s::bigint)
order by id desc
limit %(limit)s

-- name: count_recent_errors
-- The latest tasks in error by type and kind of error: `window` tasks are looked at. `offset 0` keeps the planner on the
-- index of tasks in error.
select type, error_type, count(*) as tasks, max(finished_at) as latest_at, (array_agg(message order by id desc))[1] as message
from (
        select id, type, namespace, finished_at, tags, job_id, coalesce(error ->> 'type', '') as error_type,
            left(coalesce(error ->> 'message', reason), 300) as message
        from interlock.tasks
        where state = 'error' and state in ('error', 'canceled', 'skipped')
        order by id desc
        limit %(window)s
        offset 0
    ) as failed
where (%(namespaces)s::text[] is null or namespace = any (%(namespaces)s::text[]))
    and (%(type)s::text is null or type = %(type)s::text)
    and (%(tag)s::text is null or tags @> array[%(tag)s::text])
group by type, error_type
order by tasks desc, type, error_type
limit %(limit)s

-- name: read_job_inputs
-- The inputs of jobs, each cut at `size` characters.
select id, left(input::text, %(size)s) as input
from interlock.jobs
where id = any (%(ids)s::uuid[])
