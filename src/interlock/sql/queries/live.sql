-- Sections of the one statement that feeds all open dashboards, once per second. `store/live.py` combines the sections
-- that some page needs; each becomes one column, a JSON array of its rows. No statement here writes.

-- name: live_clock
select coalesce(%(now)s::timestamptz, now()) as now

-- name: live_task_moves
-- Moves by second. Without `by_namespace` the tasks are not looked up.
select floor(extract(epoch from moved.recorded_at))::bigint as second, coalesce(tasks.namespace, '') as namespace,
    moved.from_state, moved.event, moved.to_state, count(*) as moves
from interlock.audit_logs as moved
    left join interlock.tasks on %(by_namespace)s and tasks.id = moved.task_id
where moved.recorded_at >= date_trunc('second', coalesce(%(now)s::timestamptz, now())) - %(window)s::interval
group by second, coalesce(tasks.namespace, ''), moved.from_state, moved.event, moved.to_state

-- name: live_job_moves
select floor(extract(epoch from moved.recorded_at))::bigint as second, coalesce(jobs.namespace, '') as namespace,
    moved.from_state, moved.event, moved.to_state, count(*) as moves
from interlock.job_state_transitions as moved
    left join interlock.jobs on %(by_namespace)s and jobs.id = moved.job_id
where moved.recorded_at >= date_trunc('second', coalesce(%(now)s::timestamptz, now())) - %(window)s::interval
group by second, coalesce(jobs.namespace, ''), moved.from_state, moved.event, moved.to_state

-- name: live_worker_moves
select floor(extract(epoch from recorded_at))::bigint as second, '' as namespace, from_state, event, to_state,
    count(*) as moves
from interlock.worker_state_transitions
where recorded_at >= date_trunc('second', coalesce(%(now)s::timestamptz, now())) - %(window)s::interval
group by second, from_state, event, to_state

-- name: live_namespaces
-- Namespaces with pending tasks, by one probe of the index of claims for each.
with recursive found as (
    select min(namespace) as namespace
    from interlock.tasks
    where state = 'pending' and limit_keys is null
    union all
    select (
        select min(tasks.namespace)
        from interlock.tasks
        where tasks.state = 'pending' and tasks.limit_keys is null and tasks.namespace > found.namespace
    )
    from found
    where found.namespace is not null
)
select namespace
from found
where namespace is not null
limit 1000

-- name: live_processes
-- Processes with a recent heartbeat, and what the heartbeat tells of their machines.
select id, status, coalesce(metadata ->> 'role', 'worker') as role, namespaces, heartbeat_at, seen_until, created_at,
    coalesce((metadata -> 'statistics' ->> 'slots')::int, 0) as slots,
    metadata -> 'statistics' -> 'machines' as machines
from interlock.workers
where seen_until > coalesce(%(now)s::timestamptz, now()) and status in ('IDLE', 'RUNNING', 'PAUSED')
order by created_at, id

-- name: live_worker_states
select '' as namespace, status as state, count(*) as rows
from interlock.workers
group by status

-- name: live_approvals
-- Open approval steps. Signals are held the same way, so the kind of the step decides; `name` is the workflow.
select tasks.id, tasks.namespace, tasks.step, tasks.job_id, tasks.wait_started_at, tasks.wait_until, tasks.assignee,
    jobs.task_description as name
from interlock.tasks
    join interlock.jobs on jobs.id = tasks.job_id
    join interlock.workflow_steps as steps on steps.workflow_id = jobs.workflow_id and steps.step = tasks.step
where tasks.state = 'waiting' and tasks.held_by = 'signal' and steps.kind = 'approval'
order by tasks.wait_started_at, tasks.id
limit 1000

-- name: live_inbox
-- Steps that wait for a signal or an approval.
select tasks.id, jobs.namespace
from interlock.tasks
    join interlock.jobs on jobs.id = tasks.job_id
where tasks.state = 'waiting' and tasks.held_by = 'signal'
order by tasks.wait_started_at, tasks.id
limit 100

-- name: live_tasks
-- The rows that lists of tasks show.
select id, namespace, type, state, reason, tries, max_tries, attempt, run_at, created_at, started_at, finished_at,
    worker_id, held_by, progress, job_id, step, left(error ->> 'type', 100) as error_type,
    left(error ->> 'message', 300) as error
from interlock.tasks
where id = any (%(task_ids)s::uuid[])

-- name: live_jobs
-- The rows that lists of jobs show, and the jobs whose pages are open.
select jobs.id, jobs.namespace, jobs.task_description as name, workflows.name as workflow, workflows.version, jobs.status,
    jobs.reason, jobs.created_at, jobs.started_at, jobs.completed_at, jobs.open_steps, jobs.failed_steps, jobs.ending,
    jobs.ending_reason, jobs.parent_job_id, jobs.key, jobs.tags, jobs.deadline_at,
    (select count(*) from interlock.workflow_steps as steps where steps.workflow_id = jobs.workflow_id) as steps,
    case
        when jobs.status = 'RUNNING' then (
            select count(*)
            from (
                select from interlock.tasks
                where tasks.job_id = jobs.id and tasks.part_of is null and tasks.compensates is null
                    and tasks.state in ('done', 'error', 'canceled', 'skipped')
                limit 1000
            ) as ended
        )
    end as ended_steps
from interlock.jobs
    left join interlock.workflows on workflows.id = jobs.workflow_id
where jobs.id = any (%(job_ids)s::uuid[])

-- name: live_steps
-- The steps of the jobs whose pages are open.
select id, job_id, namespace, step, type, state, event, reason, tries, max_tries, attempt, run_at, created_at, started_at,
    finished_at, worker_id, held_by, wait_until, wait_started_at, part, part_of, progress
from interlock.tasks
where job_id = any (%(step_job_ids)s::uuid[])
order by job_id, created_at, id

-- name: live_job_steps
-- The steps of the jobs whose pages are open, without the parts of maps.
select id, job_id, namespace, step, type, state, event, reason, tries, max_tries, attempt, run_at, created_at, started_at,
    finished_at, worker_id, lease_expires_at, held_by, wait_until, wait_started_at, part, reused, progress,
    compensates is not null as is_compensation
from interlock.tasks
where job_id = any (%(step_job_ids)s::uuid[]) and part_of is null
order by job_id, created_at, id

-- name: live_parts
-- The parts of the maps of these jobs, by state.
select job_id, namespace, part_of, state, count(*) as parts, min(started_at) as started_at, max(finished_at) as finished_at
from interlock.tasks
where job_id = any (%(step_job_ids)s::uuid[]) and part_of is not null
group by job_id, namespace, part_of, state

-- name: live_workers
-- Workers that have not ended, the newest ones, and those whose pages are open. `held` is the number of tasks that they
-- hold leases of, among the 10000 leases that were renewed last.
select workers.id, workers.status, workers.event, workers.reason, coalesce(workers.metadata ->> 'role', 'worker') as role,
    workers.metadata -> 'spec' as spec, workers.metadata -> 'statistics' -> 'slots' as slots, workers.namespaces,
    workers.heartbeat_at, workers.created_at, workers.updated_at, workers.supervisor_id, workers.host, workers.pid,
    workers.generation, workers.process_started_at, workers.process_note, workers.pool, workers.restart_at,
    workers.memory_bytes,
    coalesce(workers.seen_until > coalesce(%(now)s::timestamptz, now()), false)
        and workers.status in ('IDLE', 'RUNNING', 'PAUSED') as live,
    coalesce(held.tasks, 0) as held
from (
        (
            select * from interlock.workers
            where status in ('IDLE', 'RUNNING', 'PAUSED')
            order by created_at desc, id desc
            limit 100
        )
        union
        select * from interlock.workers where id = any (%(worker_ids)s::text[])
    ) as workers
    left join (
        select leased.worker_id, count(*) as tasks
        from (
            select worker_id from interlock.tasks
            where lease_expires_at is not null
            order by lease_expires_at desc
            limit 10000
        ) as leased
        group by leased.worker_id
    ) as held on held.worker_id = coalesce(workers.instance, workers.id)
order by workers.created_at desc, workers.id desc

-- name: live_pools
select name, desired, spec, actor, scaled_at, bound_to, counted.members, counted.live
from interlock.pools
    cross join lateral (
        select count(*) as members,
            count(*) filter (where seen_until > coalesce(%(now)s::timestamptz, now())) as live
        from interlock.workers
        where pool = pools.name and status in ('IDLE', 'RUNNING', 'PAUSED')
            and (pools.bound_to is null or metadata ->> 'bound_to' = pools.bound_to)
    ) as counted
order by name
limit 100

-- name: live_held_tasks
-- The tasks that the workers whose pages are open hold leases of, among the 10000 leases that were renewed last.
select tasks.id, tasks.namespace, tasks.type, tasks.attempt, tasks.started_at, tasks.lease_expires_at, tasks.progress,
    tasks.job_id, tasks.step, workers.id as worker
from (
        select * from interlock.tasks
        where lease_expires_at is not null
        order by lease_expires_at desc
        limit 10000
    ) as tasks
    join interlock.workers on tasks.worker_id = coalesce(workers.instance, workers.id)
where workers.id = any (%(worker_ids)s::text[])
order by tasks.started_at, tasks.id
limit 200

-- name: live_paused_namespaces
-- Paused namespaces, and those that were paused once.
select name as namespace, paused_at, paused_by, reason
from interlock.namespaces
order by name
limit 1000

-- name: live_sorts
-- Sorts that run on the engine, the newest ones and those whose pages are open, with their workers: the parts of a map.
select jobs.id, jobs.namespace, jobs.status, jobs.reason, jobs.created_at, jobs.started_at, jobs.completed_at,
    jobs.input ->> 'output' as output, workers.rows as workers
from interlock.jobs
    cross join lateral (
        select coalesce(jsonb_agg(jsonb_build_object('id', tasks.id, 'part', tasks.part, 'state', tasks.state,
            'progress', tasks.progress, 'attempt', tasks.attempt, 'worker_id', tasks.worker_id, 'started_at',
            tasks.started_at, 'finished_at', tasks.finished_at, 'error', tasks.error ->> 'message')
            order by tasks.part), '[]') as rows
        from interlock.tasks
        where tasks.job_id = jobs.id and tasks.part is not null
    ) as workers
where jobs.id = any (array(
        select latest.id
        from interlock.workflows
            cross join lateral (
                select id from interlock.jobs where workflow_id = workflows.id order by id desc limit 20
            ) as latest
        where workflows.name = 'distributed_sort'
        order by latest.id desc
        limit 20
    ) || %(job_ids)s::uuid[])
    and jobs.workflow_id in (select id from interlock.workflows where name = 'distributed_sort')
order by jobs.id desc

-- name: live_running_sorts
-- The states of the workers of sorts that run on the engine, as their steps report them: one row for each sort.
select jobs.namespace,
    (select coalesce(jsonb_agg(case tasks.state when 'done' then 'Completed' when 'error' then 'Failed'
            else coalesce(tasks.progress ->> 'state', 'Initializing') end), '[]')
        from interlock.tasks
        where tasks.job_id = jobs.id and tasks.part is not null) as states
from interlock.jobs
where jobs.status = 'RUNNING' and jobs.id = any (array(
    select latest.id
    from interlock.workflows
        cross join lateral (
            select id from interlock.jobs where workflow_id = workflows.id order by id desc limit 20
        ) as latest
    where workflows.name = 'distributed_sort'
))

-- name: live_task_states
-- The base of the live counts: one pass over the table. In the same statement, and so in the same snapshot, as the moves
-- of the last seconds.
select namespace, state, count(*) as rows
from interlock.tasks
group by namespace, state

-- name: live_job_states
select namespace, status as state, count(*) as rows
from interlock.jobs
group by namespace, status

-- name: live_sessions
-- Those of the given sessions that still stand: the same conditions as authenticate_session.
select encode(sessions.session_hash, 'hex') as session
from interlock.sessions
    join interlock.tokens on tokens.id = sessions.token_id
where sessions.session_hash = any (%(session_hashes)s::bytea[])
    and sessions.expires_at > coalesce(%(now)s::timestamptz, now())
    and sessions.last_used_at > coalesce(%(now)s::timestamptz, now()) - %(session_idle)s::interval
    and tokens.revoked_at is null
    and (tokens.expires_at is null or tokens.expires_at > coalesce(%(now)s::timestamptz, now()))

-- name: read_server_version
select current_setting('server_version') as version
