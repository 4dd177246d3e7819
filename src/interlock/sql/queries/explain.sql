-- Why a task or a job is in its state. No statement here writes, and each uses an index: the cost of an answer does not
-- depend on the size of the tables.

-- name: read_explained_tasks
-- Tasks with everything of their own that may hold them: worker, namespace, limits with the tasks that hold them, the signal
-- that a step waits for, a dead letter about their end, and a webhook that is not delivered.
select tasks.id, tasks.type, tasks.namespace, tasks.state, tasks.event, tasks.reason, tasks.held_by, tasks.run_at,
    tasks.attempt, tasks.tries, tasks.crashes, tasks.max_tries, tasks.worker_id, tasks.lease_expires_at,
    tasks.cancel_requested_at, tasks.job_id, tasks.step, tasks.unresolved, tasks.wait_until, tasks.wait_started_at,
    tasks.assignee, tasks.error, tasks.compensates,
    -- the step of the workflow that it is, or is a part of
    coalesce((select map.step from interlock.tasks as map where map.id = tasks.part_of), tasks.step) as declared_step,
    tasks.job_id is not null and tasks.state in ('done', 'error', 'canceled') and not tasks.advanced
        and jobs.status = 'RUNNING' as unprocessed,
    jobs.status as job_status, jobs.reason as job_reason, jobs.ending,
    steps.kind as step_kind, steps.spec ->> 'signal' as signal,
    coalesce(moved.recorded_at, tasks.updated_at) as since,
    workers.status as worker_status, workers.seen_until as worker_seen_until, workers.heartbeat_at,
    namespaces.paused_at, namespaces.paused_by, namespaces.reason as pause_reason,
    limits.limits,
    dead.failed_at as dead_letter_at, dead.error as dead_letter_error, notice.webhook
from interlock.tasks
    left join interlock.jobs on jobs.id = tasks.job_id
    left join interlock.workflow_steps as steps on steps.workflow_id = jobs.workflow_id and steps.step = tasks.step
    left join interlock.workers on tasks.worker_id in (workers.id, workers.instance) and tasks.state = 'running'
    left join interlock.namespaces on namespaces.name = tasks.namespace and namespaces.paused_at is not null
    left join lateral (
        select recorded_at from interlock.audit_logs where task_id = tasks.id order by id desc limit 1
    ) as moved on true
    left join lateral (
        select jsonb_agg(jsonb_build_object('key', wanted.key, 'rule', bounds.key, 'max_running', bounds.max_running,
            'max_starts', bounds.max_starts, 'max_weight', bounds.max_weight, 'max_cost', bounds.max_cost,
            'period', extract(epoch from bounds.period), 'share', bounds.share, 'running', taken.tasks,
            'admitted', taken.pending, 'holders', holding.holders, 'starts', used.starts,
            'weight', used.weight, 'cost', used.cost,
            'next_at', interlock.limit_frees_at(wanted.key, bounds, coalesce(%(now)s::timestamptz, now()), 0, 0,
                coalesce(tasks.limit_weight, 1))) order by wanted.place) as limits
        from unnest(tasks.limit_keys) with ordinality as wanted (key, place)
            left join lateral interlock.limit_rule(wanted.key) as bounds on true
            left join lateral interlock.limit_use(wanted.key, bounds.period, coalesce(%(now)s::timestamptz, now())) as used
                on bounds.period is not null
            left join lateral (
                select count(*) as tasks, count(*) filter (where counted.state = 'pending') as pending
                from interlock.tasks as counted
                where counted.limit_keys is not null and counted.state in ('pending', 'running')
                    and wanted.key = any (counted.limit_keys)
            ) as taken on true
            left join lateral (
                select jsonb_agg(to_jsonb(held)) as holders
                from (
                    select holder.id, holder.type, holder.step, holder.state, holder.worker_id,
                        holder.lease_expires_at, holder.attempt
                    from interlock.tasks as holder
                    where holder.limit_keys is not null and holder.state in ('pending', 'running')
                        and wanted.key = any (holder.limit_keys) and holder.id <> tasks.id
                    order by holder.state desc, holder.started_at, holder.id
                    limit %(holders)s
                ) as held
            ) as holding on bounds.max_running is not null
    ) as limits on tasks.state in ('waiting', 'pending')
    left join lateral (
        select failed_at, error
        from interlock.orchestration_failures
        where task_id = tasks.id
        order by msg_id desc
        limit 1
    ) as dead on tasks.job_id is not null and not tasks.advanced
    left join lateral (
        select jsonb_build_object('id', callbacks.id, 'url', callbacks.url, 'tries', callbacks.tries,
            'next_try_at', callbacks.next_try_at, 'given_up_at', callbacks.given_up_at, 'error', callbacks.error,
            'created_at', callbacks.created_at) as webhook
        from interlock.callbacks
        where callbacks.task_id = tasks.id
        order by callbacks.id desc
        limit 1
    ) as notice on tasks.callback_url is not null and tasks.state in ('done', 'error', 'canceled', 'skipped')
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
    dead.failed_at as dead_letter_at, dead.error as dead_letter_error, notice.webhook,
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
    left join lateral (
        select jsonb_build_object('id', callbacks.id, 'url', callbacks.url, 'tries', callbacks.tries,
            'next_try_at', callbacks.next_try_at, 'given_up_at', callbacks.given_up_at, 'error', callbacks.error,
            'created_at', callbacks.created_at) as webhook
        from interlock.callbacks
        where callbacks.job_id = jobs.id and callbacks.job_id is not null
    ) as notice on jobs.callback_url is not null and jobs.status in ('COMPLETED', 'FAILED', 'CANCELED')
where jobs.id = any (%(ids)s::uuid[])

-- name: count_open_steps
-- Unfinished steps of a job by the cause of their wait, and steps whose end no orchestrator has processed yet. A step that
-- waits for an approval is held by a signal, and counted as an approval.
select case when tasks.state in ('waiting', 'pending', 'running') then tasks.state else 'unprocessed' end as state,
    case when tasks.held_by = 'signal' and steps.kind = 'approval' then 'approval' else tasks.held_by end as held_by,
    count(*) as steps
from interlock.tasks
    join interlock.jobs on jobs.id = tasks.job_id
    left join interlock.workflow_steps as steps on steps.workflow_id = jobs.workflow_id and steps.step = tasks.step
        and tasks.held_by = 'signal'
where tasks.job_id = %(job_id)s
    and (tasks.state in ('waiting', 'pending', 'running')
        or tasks.state in ('done', 'error', 'canceled') and not tasks.advanced)
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
-- By the name under which the worker claims, and by the id of its row, which differs for a supervised worker.
select running.worker_id, running.tasks, workers.id
from (
    select worker_id, count(*) as tasks
    from interlock.tasks
    where lease_expires_at is not null
    group by worker_id
) as running
    left join interlock.workers on workers.instance = running.worker_id

-- name: read_tasks_of_worker
-- The tasks that a worker runs, the lease that ends first before the others.
select id, type, step, state, worker_id, lease_expires_at, attempt, count(*) over () as all_tasks
from interlock.tasks
where lease_expires_at is not null and worker_id = any (%(names)s::text[])
order by lease_expires_at
limit %(limit)s

-- name: read_explained_namespace
-- The pause of a namespace and its unfinished tasks; each count uses its own index.
select wanted.name, namespaces.paused_at, namespaces.paused_by, namespaces.reason, pending.due, pending.oldest_due_at,
    pending.later, running.tasks as running, held.tasks as held, limited.tasks as limited
from (select %(name)s::text as name) as wanted
    left join interlock.namespaces on namespaces.name = wanted.name
    cross join lateral (
        select count(*) filter (where run_at <= coalesce(%(now)s::timestamptz, now())) as due,
            min(run_at) filter (where run_at <= coalesce(%(now)s::timestamptz, now())) as oldest_due_at,
            count(*) filter (where run_at > coalesce(%(now)s::timestamptz, now())) as later
        from (
            select run_at from interlock.tasks
            where state = 'pending' and limit_keys is null and namespace = wanted.name
            union all
            select run_at from interlock.tasks
            where state = 'pending' and limit_keys is not null and namespace = wanted.name
        ) as pending
    ) as pending
    cross join lateral (
        select count(*) as tasks from interlock.tasks where lease_expires_at is not null and namespace = wanted.name
    ) as running
    cross join lateral (
        select count(*) as tasks from interlock.tasks
        where state = 'waiting' and held_by = 'namespace' and namespace = wanted.name
    ) as held
    cross join lateral (
        select count(*) as tasks from interlock.tasks
        where limit_keys is not null and state = 'waiting' and held_by = 'limit' and namespace = wanted.name
    ) as limited

-- name: count_due_types
-- The types of due tasks of a namespace, with at most so many tasks of each. A recursive skip scan finds the types.
with recursive known as (
    (
        select type
        from interlock.tasks
        where state = 'pending' and limit_keys is null and namespace = %(name)s
        order by type
        limit 1
    )
    union all
    select next.type
    from known
        cross join lateral (
            select type
            from interlock.tasks
            where state = 'pending' and limit_keys is null and namespace = %(name)s and tasks.type > known.type
            order by type
            limit 1
        ) as next
)
select known.type, count(*) as tasks, min(due.run_at) as oldest_due_at
from known
    cross join lateral (
        select run_at
        from interlock.tasks
        where state = 'pending' and limit_keys is null and namespace = %(name)s and tasks.type = known.type
            and crashes = 0 and run_at <= coalesce(%(now)s::timestamptz, now())
        order by priority desc, run_at, id
        limit %(limit)s
    ) as due
group by known.type
order by min(due.run_at), known.type

-- name: read_kinds_of_name
-- The kinds of what has this name. A namespace exists as soon as it is paused, has unfinished tasks or is served.
select 'worker' as kind
where exists (
        select from interlock.workers
        where id = any (array[%(name)s, regexp_replace(%(name)s, '-[0-9]+-[0-9a-f]{8}$', '')])
    )
union all
select 'namespace'
where exists (select from interlock.namespaces where name = %(name)s)
    or exists (select from interlock.workers where %(name)s = any (namespaces))
    or exists (select from interlock.tasks where state = 'pending' and limit_keys is null and namespace = %(name)s)
    or exists (select from interlock.tasks where state = 'pending' and limit_keys is not null and namespace = %(name)s)
    or exists (select from interlock.tasks where state = 'waiting' and held_by = 'namespace' and namespace = %(name)s)
    or exists (
        select from interlock.tasks
        where limit_keys is not null and state = 'waiting' and held_by = 'limit' and namespace = %(name)s
    )
    or exists (select from interlock.tasks where lease_expires_at is not null and namespace = %(name)s)
union all
select 'schedule' where exists (select from interlock.schedules where name = %(name)s)
union all
select 'limit'
where exists (select from interlock.limit_rule(%(name)s)) and (
        exists (select from interlock.limits where key = %(name)s)
        or exists (select from interlock.limit_usage where key = %(name)s)
        or exists (
            select from interlock.tasks
            where limit_keys is not null and state in ('pending', 'running') and %(name)s = any (limit_keys)
        )
        or exists (
            select from interlock.tasks
            where limit_keys is not null and state = 'waiting' and held_by = 'limit' and %(name)s = any (limit_keys)
        )
    )

-- name: read_schedule_outcome
-- The task or the job of one tick of a schedule.
select 'task' as kind, id, state, reason from interlock.tasks where request_id = %(request_id)s
union all
select 'job', id, status, reason from interlock.jobs where request_id = %(request_id)s

-- name: read_last_moves
-- The latest moves of a task or a job, oldest first.
select id, from_state, event, to_state, reason, actor, recorded_at
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
-- The queue of step results, and whether it exists; no name without the row of settings.
select orchestration_queue as name, to_regprocedure('pgmq.send_batch(text, jsonb[])') is not null as installed,
    to_regclass('pgmq.' || quote_ident(lower('q_' || orchestration_queue))) is not null as there
from (select 1) as one
    left join interlock.settings on true

-- name: read_past_task
-- The state of a task at a moment, by its records: the move into it, the reason that held then, and the next move.
select tasks.type, tasks.namespace, tasks.step, tasks.job_id, tasks.run_at, moved.id, moved.from_state, moved.to_state,
    moved.event, moved.reason, moved.actor, moved.attempt, moved.recorded_at, told.cause, told.reason as told,
    told.since as told_since, following.to_state as next_state, following.event as next_event,
    following.actor as next_actor, following.recorded_at as next_at, opened.recorded_at as first_at
from (select %(id)s::uuid as id) as wanted
    left join interlock.tasks on tasks.id = wanted.id
    left join lateral (
        select * from interlock.audit_logs
        where task_id = wanted.id and recorded_at <= %(at)s
        order by id desc
        limit 1
    ) as moved on true
    left join lateral (
        select cause, reason, since from interlock.wait_reasons
        where kind = 'task' and subject = wanted.id::text and since <= %(at)s and since >= moved.recorded_at
        order by id desc
        limit 1
    ) as told on true
    left join lateral (
        select to_state, event, actor, recorded_at from interlock.audit_logs
        where task_id = wanted.id and recorded_at > %(at)s
        order by id
        limit 1
    ) as following on true
    left join lateral (
        select recorded_at from interlock.audit_logs where task_id = wanted.id order by id limit 1
    ) as opened on true

-- name: read_past_job
-- The same of a job.
select workflows.name as workflow, workflows.version, moved.id, moved.from_state, moved.to_state, moved.event,
    moved.reason, moved.actor, moved.recorded_at, told.cause, told.reason as told, told.since as told_since,
    following.to_state as next_state, following.event as next_event, following.actor as next_actor,
    following.recorded_at as next_at, opened.recorded_at as first_at
from (select %(id)s::uuid as id) as wanted
    left join interlock.jobs on jobs.id = wanted.id
    left join interlock.workflows on workflows.id = jobs.workflow_id
    left join lateral (
        select * from interlock.job_state_transitions
        where job_id = wanted.id and recorded_at <= %(at)s
        order by id desc
        limit 1
    ) as moved on true
    left join lateral (
        select cause, reason, since from interlock.wait_reasons
        where kind = 'job' and subject = wanted.id::text and since <= %(at)s and since >= moved.recorded_at
        order by id desc
        limit 1
    ) as told on true
    left join lateral (
        select to_state, event, actor, recorded_at from interlock.job_state_transitions
        where job_id = wanted.id and recorded_at > %(at)s
        order by id
        limit 1
    ) as following on true
    left join lateral (
        select recorded_at from interlock.job_state_transitions where job_id = wanted.id order by id limit 1
    ) as opened on true

-- name: read_past_steps
-- The steps of a job that were open at a moment, those that could run before those that waited.
select tasks.id
from interlock.tasks
    cross join lateral (
        select to_state from interlock.audit_logs
        where task_id = tasks.id and recorded_at <= %(at)s
        order by id desc
        limit 1
    ) as moved
where tasks.job_id = %(id)s and moved.to_state in ('waiting', 'pending', 'running')
order by case moved.to_state when 'pending' then 0 when 'running' then 1 else 2 end, tasks.id
limit %(limit)s

-- name: read_past_worker
-- The same of a worker.
select moved.id, moved.from_state, moved.to_state, moved.event, moved.reason, moved.actor, moved.recorded_at,
    following.to_state as next_state, following.event as next_event, following.actor as next_actor,
    following.recorded_at as next_at, opened.recorded_at as first_at
from (select %(id)s::text as id) as wanted
    left join lateral (
        select * from interlock.worker_state_transitions
        where worker_id = wanted.id and recorded_at <= %(at)s
        order by id desc
        limit 1
    ) as moved on true
    left join lateral (
        select to_state, event, actor, recorded_at from interlock.worker_state_transitions
        where worker_id = wanted.id and recorded_at > %(at)s
        order by id
        limit 1
    ) as following on true
    left join lateral (
        select recorded_at from interlock.worker_state_transitions where worker_id = wanted.id order by id limit 1
    ) as opened on true

-- name: read_past_workers
-- The processes that were live at a moment, with what they served then, by the records. A process whose row has been
-- deleted counts as live until its record says that it ended.
select served.subject as id, moved.to_state as status, served.details, moved.recorded_at
from (
        select distinct on (subject) subject, details
        from interlock.wait_reasons
        where kind = 'worker' and cause = 'serves' and since <= %(at)s
        order by subject, id desc
    ) as served
    cross join lateral (
        select to_state, recorded_at from interlock.worker_state_transitions
        where worker_id = served.subject and recorded_at <= %(at)s
        order by id desc
        limit 1
    ) as moved
    left join interlock.workers on workers.id = served.subject
where moved.to_state in ('IDLE', 'RUNNING', 'PAUSED')
    and (workers.id is null or workers.seen_until > %(at)s)
    and not exists (
        select from interlock.wait_reasons as silent
        where silent.kind = 'worker' and silent.subject = served.subject and silent.cause = 'silent'
            and silent.since <= %(at)s and silent.until > %(at)s
    )
order by served.subject

-- name: read_past_reason
-- The latest reason of a namespace, a schedule or a worker at a moment; for a worker, a time without heartbeats.
select cause, reason, details, actor, since, until
from interlock.wait_reasons
where kind = %(kind)s and subject = %(subject)s and since <= %(at)s and (until is null or until > %(at)s)
order by id desc
limit 1
