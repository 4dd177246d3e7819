-- The figures of `interlock top`. Each statement is bounded, because it runs every second.

-- name: read_rates
-- Moves of tasks in the last seconds by namespace: what came in, started, ended and failed, and how long tasks waited and
-- ran. Every move is counted, by the BRIN index on the time; at most `sample` of them are joined with their tasks, and
-- stand for the others.
with recent as materialized (
    select task_id, event, to_state, recorded_at
    from interlock.audit_logs
    where recorded_at > coalesce(%(now)s::timestamptz, now()) - %(window)s::interval
        and recorded_at <= coalesce(%(now)s::timestamptz, now())
), counted as (
    select count(*)::float8 as moves from recent
), sampled as materialized (
    select recent.event, recent.to_state, recent.recorded_at, tasks.namespace, tasks.run_at, tasks.started_at
    from (select * from recent limit %(sample)s) as recent
        join interlock.tasks on tasks.id = recent.task_id
)
select sampled.namespace, greatest(counted.moves / %(sample)s::float8, 1) as scale,
    count(*) filter (where event in ('create', 'requeue')) as arrived,
    count(*) filter (where event = 'claim') as started,
    count(*) filter (where to_state in ('done', 'error', 'canceled', 'skipped')) as ended,
    count(*) filter (where event in ('fail', 'retry', 'exhaust', 'expire')) as failed,
    percentile_cont(array[0.5, 0.99]) within group (
        order by case when event = 'claim' then greatest(extract(epoch from recorded_at - run_at), 0)::float8 end
    ) as waited,
    percentile_cont(array[0.5, 0.99]) within group (
        order by case
            when event in ('succeed', 'fail') and started_at is not null
                then greatest(extract(epoch from recorded_at - started_at), 0)::float8
        end
    ) as ran
from sampled
    cross join counted
group by sampled.namespace, counted.moves
order by sampled.namespace

-- name: list_running_tasks
-- The tasks that have been running longest.
select id, type, step, namespace, worker_id, attempt, tries, max_tries, started_at, lease_expires_at, cancel_requested_at
from interlock.tasks
where lease_expires_at is not null
order by started_at, id
limit %(limit)s

-- name: list_open_jobs
-- The unfinished jobs, the oldest of each state first.
select jobs.id, workflows.name as workflow, workflows.version, jobs.namespace, jobs.status, jobs.ending, jobs.open_steps,
    jobs.created_at, jobs.reason
from (
        select id from (
            (select id from interlock.jobs where status = 'RUNNING' order by status, id limit %(limit)s)
            union all
            (select id from interlock.jobs where status = 'PENDING' order by status, id limit %(limit)s)
            union all
            (select id from interlock.jobs where status = 'SUBMITTED' order by status, id limit %(limit)s)
        ) as found
        order by id
        limit %(limit)s
    ) as open
    join interlock.jobs on jobs.id = open.id
    left join interlock.workflows on workflows.id = jobs.workflow_id
order by jobs.id
