-- Why a task or a job is in its state. No statement here writes, and each uses an index: the cost of an answer does not
-- depend on the size of the tables.

-- name: read_explained_tasks
-- Tasks with everything of their own that may hold them: worker, namespace, limit, and a dead letter about their end.
select tasks.id, tasks.type, tasks.namespace, tasks.state, tasks.reason, tasks.held_by, tasks.run_at, tasks.attempt,
    tasks.tries, tasks.crashes, tasks.max_tries, tasks.worker_id, tasks.lease_expires_at,
    tasks.cancel_requested_at, tasks.job_id, tasks.step, tasks.unresolved, tasks.wait_until, tasks.error,
    tasks.job_id is not null and tasks.state in ('done', 'error', 'canceled') and not tasks.advanced
        and jobs.status = 'RUNNING' as unprocessed,
    jobs.status as job_status, jobs.reason as job_reason, jobs.ending,
    coalesce(moved.recorded_at, tasks.updated_at) as since,
    workers.status as worker_status, workers.seen_until as worker_seen_until, workers.heartbeat_at,
    namespaces.paused_at, namespaces.paused_by, namespaces.reason as pause_reason,
    limits.limits,
    dead.failed_at as dead_letter_at, dead.error as dead_letter_error
from interlock.tasks
    left join interlock.jobs on jobs.id = tasks.job_id
    left join interlock.workers on tasks.worker_id in (workers.id, workers.instance) and tasks.state = 'running'
    left join interlock.namespaces on namespaces.name = tasks.namespace and namespaces.paused_at is not null
    left join lateral (
        select recorded_at from interlock.audit_logs where task_id = tasks.id order by id desc limit 1
    ) as moved on true
    left join lateral (
        select jsonb_agg(jsonb_build_object('key', wanted.key, 'rule', rule.key, 'max_running', rule.max_running,
            'max_starts', rule.max_starts, 'max_weight', rule.max_weight, 'max_cost', rule.max_cost,
            'period', extract(epoch from rule.period), 'running', taken.tasks, 'admitted', taken.pending, 'starts', used.starts,
            'weight', used.weight, 'cost', used.cost,
            'next_at', interlock.limit_frees_at(wanted.key, rule, coalesce(%(now)s::timestamptz, now()), 0, 0,
                coalesce(tasks.limit_weight, 1))) order by wanted.place) as limits
        from unnest(tasks.limit_keys) with ordinality as wanted (key, place)
            left join lateral interlock.limit_rule(wanted.key) as rule on true
            left join lateral interlock.limit_use(wanted.key, rule.period, coalesce(%(now)s::timestamptz, now())) as used
                on rule.period is not null
            left join lateral (
                select count(*) as tasks, count(*) filter (where counted.state = 'pending') as pending
                from interlock.tasks as counted
                where counted.limit_keys is not null and counted.state in ('pending', 'running')
                    and wanted.key = any (counted.limit_keys)
            ) as taken on true
    ) as limits on tasks.state in ('waiting', 'pending')
    left join lateral (
        select failed_at, error
        from interlock.orchestration_failures
        where task_id = tasks.id
        order by msg_id desc
        limit 1
    ) as dead on tasks.job_id is not null and not tasks.advanced
where tasks.id = any (%(ids)s::uuid[])

-- name: read_explained_jobs
-- Jobs, with the namespaces of their first steps that no live worker serves, and their dead letters.
select jobs.id, workflows.name as workflow, workflows.version, jobs.namespace, jobs.status, jobs.reason, jobs.ending,
    jobs.ending_reason, jobs.cancel_reason, jobs.compensating, jobs.open_steps,
    (
        select child.id
        from interlock.jobs as child
        where child.parent_job_id = jobs.id and child.parent_job_id is not null and jobs.ending is not null
            and child.status in ('SUBMITTED', 'PENDING', 'RUNNING')
        order by child.id
        limit 1
    ) as unfinished_child,
    case when jobs.timeout_seconds is not null then jobs.deadline_at end as deadline_at,
    coalesce(moved.recorded_at, jobs.updated_at) as since, dead.messages as dead_letters,
    dead.failed_at as dead_letter_at, dead.error as dead_letter_error,
    array(
        select namespace
        from unnest(jobs.root_namespaces) as root (namespace)
        where not exists (
            select from interlock.workers
            where status = 'RUNNING' and seen_until > coalesce(%(now)s::timestamptz, now())
                and root.namespace = any (workers.namespaces)
        )
    ) as unserved,
    interlock.hold_reason('key', jobs.key, interlock.job_ahead(jobs)::text) as key_hold,
    jobs.status = 'SUBMITTED' and jobs.not_before > coalesce(%(now)s::timestamptz, now()) as is_debounced
from interlock.jobs
    left join interlock.workflows on workflows.id = jobs.workflow_id
    left join lateral (
        select recorded_at from interlock.job_state_transitions where job_id = jobs.id order by id desc limit 1
    ) as moved on true
    left join lateral (
        select count(*) as messages, max(failed_at) as failed_at, (array_agg(error order by msg_id desc))[1] as error
        from interlock.orchestration_failures
        where job_id = jobs.id
    ) as dead on jobs.status in ('SUBMITTED', 'PENDING', 'RUNNING')
where jobs.id = any (%(ids)s::uuid[])

-- name: count_open_steps
-- Unfinished steps of a job by the cause of their wait, and steps whose end no orchestrator has processed yet.
select case when state in ('waiting', 'pending', 'running') then state else 'unprocessed' end as state, held_by,
    count(*) as steps
from interlock.tasks
where job_id = %(job_id)s
    and (state in ('waiting', 'pending', 'running') or state in ('done', 'error', 'canceled') and not advanced)
group by 1, 2
order by 1, 2

-- name: read_open_causes
-- Steps that hold up a job: those that wait for no other step. A part comes after its map; steps that only wait to be
-- admitted come last.
select id
from interlock.tasks
where job_id = %(job_id)s and part_of is null
    and (
        state in ('pending', 'running')
        or state = 'waiting' and held_by is distinct from 'dependency'
        or state in ('done', 'error', 'canceled') and not advanced
    )
order by case
        when state in ('done', 'error', 'canceled') then 0
        when state = 'pending' then 1
        when state = 'running' then 2
        when held_by in ('worker_count', 'compensation') then 4
        else 3
    end, id
limit %(limit)s

-- name: read_open_ancestors
-- All upstream steps that have not ended, or whose end no orchestrator has processed, and the edges between them.
-- `root` marks steps that wait for no other step. Each step is read once, however many paths lead to it.
with recursive asked as materialized (
    select id, workflow_id from interlock.jobs where id = %(job_id)s
), reached (step, id, root) as (
    select %(step)s::text, %(id)s::uuid, false
    union
    select found.step, found.id, found.root
    from reached
        cross join asked
        cross join lateral (
            select tasks.step, tasks.id, tasks.held_by is distinct from 'dependency' as root
            from interlock.workflow_edges as edges
                cross join lateral (
                    select step, id, held_by
                    from interlock.tasks
                    where job_id = asked.id and step = edges.upstream
                        and (state in ('waiting', 'pending', 'running')
                            or state in ('done', 'error', 'canceled') and not advanced)
                    limit 1
                ) as tasks
            where edges.workflow_id = asked.workflow_id and edges.downstream = reached.step
            offset 0
        ) as found
)
select edges.downstream, reached.step as upstream, reached.id, reached.root
from reached
    cross join asked
    join interlock.workflow_edges as edges on edges.workflow_id = asked.workflow_id and edges.upstream = reached.step
where edges.downstream in (select step from reached)
order by edges.downstream, reached.step

-- name: read_causes
-- What a waiting task waits for when that is neither an upstream step nor its own: the open parts of a map, the steps
-- that use up the worker_count, the compensation before it, a child job, its own job.
select found.kind, found.id
from interlock.tasks as asked
    cross join lateral (
        (
            select 'task' as kind, id
            from interlock.tasks
            where asked.held_by = 'parts' and part_of = asked.id
                and (state in ('waiting', 'pending', 'running')
                    or state in ('done', 'error', 'canceled') and not advanced)
            order by part
            limit %(limit)s
        )
        union all
        (
            select 'task', id
            from interlock.tasks
            where asked.held_by = 'worker_count' and job_id = asked.job_id and capped
                and (state in ('pending', 'running') or held_by in ('namespace', 'limit'))
            limit %(limit)s
        )
        union all
        (
            select 'task', id
            from interlock.tasks
            where asked.held_by = 'compensation' and job_id = asked.job_id and step like 'compensate:%%'
                and (state in ('pending', 'running') or state in ('done', 'error', 'canceled') and not advanced)
            limit %(limit)s
        )
        union all
        (
            -- the latest one: a step can repeat its child job
            select 'job', id
            from interlock.jobs
            where asked.held_by = 'job' and parent_task_id = asked.id
            order by iteration desc
            limit 1
        )
        union all
        select 'job', asked.job_id where asked.held_by = 'start' and asked.job_id is not null
    ) as found
where asked.id = %(id)s

-- name: count_running_by_worker
select worker_id, count(*) as tasks
from interlock.tasks
where lease_expires_at is not null
group by worker_id

-- name: read_last_moves
-- The latest moves of a task or a job, oldest first.
select from_state, event, to_state, reason, actor, recorded_at
from (
    (
        select id, from_state, event, to_state, reason, actor, recorded_at
        from interlock.audit_logs
        where task_id = %(id)s
        order by id desc
        limit %(limit)s
    )
    union all
    (
        select id, from_state, event, to_state, reason, actor, recorded_at
        from interlock.job_state_transitions
        where job_id = %(id)s
        order by id desc
        limit %(limit)s
    )
) as moves
order by recorded_at, id

-- name: read_queue
-- The queue of step results, and whether it exists.
select orchestration_queue as name, to_regprocedure('pgmq.send_batch(text, jsonb[])') is not null as installed,
    to_regclass(format('pgmq.%%I', lower('q_' || orchestration_queue))) is not null as there
from interlock.settings
