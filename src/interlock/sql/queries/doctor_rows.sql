-- Checks of rows against each other: jobs and their steps, counters, leases, messages, keys, limits, webhooks. A null `limit`
-- or null `ids` means all rows; otherwise the statement reads a bounded number of unfinished ones. `workflows` are workflows
-- whose stored graph is damaged, which is a finding of its own: their jobs are left out.

-- name: check_running_jobs
-- Running jobs that lack a step, whose steps have all ended, or whose counters are wrong; one fault for each job. The
-- transaction that applies the end of a step counts it, and ends the job when it was the last one. A job that waits for
-- child jobs, or for which there is a message, goes on by itself.
with running as materialized (
    select id, workflow_id, ending, open_steps, failed_steps
    from interlock.jobs
    where status = 'RUNNING' and status in ('SUBMITTED', 'PENDING', 'RUNNING')
        and coalesce(workflow_id <> all (%(workflows)s::uuid[]), true)
    order by id
    limit %(limit)s::bigint
), counted as materialized (
    select running.id, count(tasks.id) filter (where not tasks.advanced) as open_steps,
        count(tasks.id) filter (where tasks.advanced and tasks.state in ('error', 'canceled') and not tasks.superseded
            and tasks.part_of is null and tasks.compensates is null) as failed_steps
    from running
        left join interlock.tasks on tasks.job_id = running.id
    group by running.id
), judged as (
    select running.id, case
            when exists (
                select from interlock.workflow_steps as steps
                where steps.workflow_id = running.workflow_id and not exists (
                        select from interlock.tasks where tasks.job_id = running.id and tasks.step = steps.step
                    )
            ) then 'job_steps_missing'
            when counted.open_steps = 0
                then case
                    when not (running.ending is not null and exists (
                            select from interlock.jobs as child
                            where child.parent_job_id = running.id and child.status in ('SUBMITTED', 'PENDING', 'RUNNING')
                        ))
                        and not exists (
                            select from interlock.orchestration_messages
                            where message ->> 'job_id' = running.id::text
                        )
                        then 'job_not_finished'
                end
            when counted.open_steps <> running.open_steps or counted.failed_steps <> running.failed_steps
                then 'job_counters_wrong'
        end as code
    from running
        join counted on counted.id = running.id
)
select code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from judged
where code is not null
group by code
order by code

-- name: check_ended_jobs
-- Ended jobs that have an unfinished step, or that count open ones.
with judged as (
    select jobs.id, case
            when exists (
                select from interlock.tasks
                where tasks.job_id = jobs.id and tasks.state in ('waiting', 'pending', 'running')
            ) then 'job_ended_with_open_steps'
            when jobs.open_steps <> 0 then 'job_counters_wrong'
        end as code
    from interlock.jobs
    where jobs.status in ('COMPLETED', 'FAILED', 'CANCELED')
        and (%(ids)s::uuid[] is null or jobs.id = any (%(ids)s::uuid[]))
)
select code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from judged
where code is not null
group by code
order by code

-- name: check_waiting_steps
-- Steps of running jobs that wait although what they wait for is there, with no message that would lead an orchestrator to
-- them, or whose counts are wrong. What is met and what has failed is compared where all edges have the condition `after`.
-- Jobs that lack a step are a finding of their own.
with running as materialized (
    select id, workflow_id, worker_count
    from interlock.jobs
    where status = 'RUNNING' and status in ('SUBMITTED', 'PENDING', 'RUNNING') and ending is null
        and coalesce(workflow_id <> all (%(workflows)s::uuid[]), true)
        and not exists (
            select from interlock.workflow_steps as steps
            where steps.workflow_id = jobs.workflow_id and not exists (
                    select from interlock.tasks where tasks.job_id = jobs.id and tasks.step = steps.step
                )
        )
    order by id
    limit %(limit)s::bigint
), waiting as materialized (
    select running.workflow_id, running.worker_count, tasks.id, tasks.job_id, tasks.step, tasks.namespace,
        tasks.held_by, tasks.wait_until, tasks.unresolved, tasks.taken, tasks.failed
    from running
        join interlock.tasks on tasks.job_id = running.id
    where tasks.state = 'waiting' and tasks.held_by not in ('namespace', 'limit')
), counted as (
    select waiting.id, count(*) filter (where upstream.advanced is not true) as unresolved,
        count(*) filter (where upstream.advanced and (upstream.state = 'done' or upstream.reused)) as taken,
        count(*) filter (where upstream.advanced and not upstream.reused and (upstream.skipped_by_failure
            or upstream.state in ('error', 'canceled') and not upstream.superseded)) as failed,
        bool_and(edges.condition = 'after') as is_plain
    from waiting
        join interlock.workflow_edges as edges
            on edges.workflow_id = waiting.workflow_id and edges.downstream = waiting.step
        left join interlock.tasks as upstream on upstream.job_id = waiting.job_id and upstream.step = edges.upstream
    where waiting.held_by = 'dependency'
    group by waiting.id
    union all
    select waiting.id, count(*) filter (where not part.advanced),
        count(*) filter (where part.advanced and (part.state = 'done' or part.reused)),
        count(*) filter (where part.advanced and part.state <> 'done' and not part.reused), true
    from waiting
        join interlock.tasks as part on part.part_of = waiting.id and part.part_of is not null
    where waiting.held_by = 'parts'
    group by waiting.id
), judged as (
    select waiting.id, waiting.job_id, case
            when waiting.held_by in ('start', 'compensation') then 'step_not_released'
            when waiting.held_by in ('dependency', 'parts')
                then case
                    when coalesce(counted.unresolved, 0) = 0 then 'step_not_released'
                    when counted.unresolved <> waiting.unresolved
                        or counted.is_plain and (counted.taken, counted.failed) <> (waiting.taken, waiting.failed)
                        then 'step_counters_wrong'
                end
            when waiting.held_by = 'job' and not exists (
                    select from interlock.jobs as child
                    where child.parent_task_id = waiting.id and child.parent_task_id is not null
                        and child.status in ('SUBMITTED', 'PENDING', 'RUNNING')
                )
                then 'step_not_released'
            when waiting.held_by = 'sleep' and coalesce(waiting.wait_until = 'infinity', true) then 'step_not_released'
            when waiting.held_by = 'signal' and exists (
                    select from interlock.signals
                        join interlock.workflow_steps as steps
                            on steps.workflow_id = waiting.workflow_id and steps.step = waiting.step
                    where signals.job_id = waiting.job_id and signals.consumed_by is null
                        and signals.name = case steps.kind when 'signal' then steps.spec ->> 'signal' else steps.step end
                )
                then 'step_not_released'
            when waiting.held_by = 'worker_count'
                and not exists (
                    select from interlock.namespaces where name = waiting.namespace and paused_at is not null
                )
                and coalesce(waiting.worker_count > (
                    select count(*)
                    from interlock.tasks as active
                    where active.job_id = waiting.job_id and active.capped and not active.advanced
                        and (active.state in ('pending', 'running') or active.held_by in ('namespace', 'limit'))
                ), true)
                then 'step_not_released'
        end as code
    from waiting
        left join counted on counted.id = waiting.id
)
select code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from judged
where code = 'step_counters_wrong'
    or code is not null and not exists (
        select from interlock.orchestration_messages where message ->> 'job_id' = judged.job_id::text
    )
group by code
order by code

-- name: check_compensations
-- Compensations that wait for their turn although all open steps of the job wait for theirs: the next one was not started.
select 'step_not_released' as code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from (
    select held.id
    from (
            select id
            from interlock.jobs
            where status = 'RUNNING' and status in ('SUBMITTED', 'PENDING', 'RUNNING') and ending is not null
            order by id
            limit %(limit)s::bigint
        ) as ending
        cross join lateral (
            select id
            from interlock.tasks
            where job_id = ending.id and state = 'waiting' and held_by = 'compensation'
            order by held_by, priority desc, part, id
            limit 1
        ) as held
    where not exists (
            select from interlock.tasks as other
            where other.job_id = ending.id and not other.advanced
                and (other.state <> 'waiting' or other.held_by <> 'compensation')
        )
        and not exists (
            select from interlock.jobs as child
            where child.parent_job_id = ending.id and child.status in ('SUBMITTED', 'PENDING', 'RUNNING')
        )
        and not exists (
            select from interlock.orchestration_messages where message ->> 'job_id' = ending.id::text
        )
) as stuck
having count(*) > 0

-- name: check_tasks
-- Steps whose job is gone or whose workflow has no such step, parts whose map is gone, unfinished steps that count as ended,
-- and waiting tasks that do not say what they wait for.
with judged as (
    select tasks.id, case
            when tasks.job_id is not null and not exists (select from interlock.jobs where jobs.id = tasks.job_id)
                then 'step_orphaned'
            when tasks.part_of is not null and not exists (
                    select from interlock.tasks as map where map.id = tasks.part_of
                ) and tasks.state in ('waiting', 'pending', 'running')
                then 'step_orphaned'
            when tasks.part_of is null and tasks.compensates is null and exists (
                    select from interlock.jobs
                    where jobs.id = tasks.job_id and jobs.status = 'RUNNING' and jobs.workflow_id <> all (%(workflows)s::uuid[])
                        and not exists (
                            select from interlock.workflow_steps as steps
                            where steps.workflow_id = jobs.workflow_id and steps.step = tasks.step
                        )
                        -- its own finding
                        and exists (select from interlock.workflows where workflows.id = jobs.workflow_id)
                ) and tasks.state in ('waiting', 'pending', 'running')
                then 'step_orphaned'
            when tasks.advanced and tasks.state in ('waiting', 'pending', 'running') then 'step_ended_early'
            when tasks.state = 'waiting' and (tasks.held_by is null or tasks.held_by not in ('namespace', 'limit')
                    and (tasks.job_id is null or tasks.held_by not in ('start', 'dependency', 'parts', 'job', 'signal',
                        'sleep', 'worker_count', 'compensation')))
                then 'hold_missing'
        end as code
    from interlock.tasks
    where (%(ids)s::uuid[] is null or tasks.id = any (%(ids)s::uuid[]))
        and (tasks.job_id is not null or tasks.state = 'waiting')
)
select code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from judged
where code is not null
group by code
order by code

-- name: check_holds
-- Tasks that wait for a pause that has ended, or for limits of which none is left, for longer than the leading worker takes.
with held as (
    (
        select id, updated_at
        from interlock.tasks
        where state = 'waiting' and held_by = 'namespace'
            and namespace <> all (array(select name from interlock.namespaces where paused_at is not null))
        limit %(limit)s::bigint
    )
    union all
    (
        select id, updated_at
        from (
            select id, updated_at, limit_keys
            from interlock.tasks
            where state = 'waiting' and held_by = 'limit' and limit_keys is not null
            order by limit_keys, priority desc, run_at, id
            limit %(limit)s::bigint
        ) as limited
        where not exists (
                select from unnest(limit_keys) as wanted (key)
                    cross join lateral interlock.limit_rule(wanted.key)
            )
    )
)
select 'hold_outdated' as code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from held
where updated_at < coalesce(%(now)s::timestamptz, now()) - %(threshold)s::interval
having count(*) > 0

-- name: check_jobs
-- Jobs whose workflow, parent job or parent step is gone.
with judged as (
    select jobs.id
    from interlock.jobs
    where (%(ids)s::uuid[] is null or jobs.id = any (%(ids)s::uuid[]))
        and (
            jobs.workflow_id is not null
                and not exists (select from interlock.workflows where workflows.id = jobs.workflow_id)
            or jobs.parent_job_id is not null
                and not exists (select from interlock.jobs as parent where parent.id = jobs.parent_job_id)
            or jobs.parent_task_id is not null
                and not exists (select from interlock.tasks as starter where starter.id = jobs.parent_task_id)
        )
)
select 'job_orphaned' as code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from judged
having count(*) > 0

-- name: check_references
-- Rows of a job, a workflow or a token that is gone; foreign keys refuse them unless a superuser disables their triggers.
select 'row_orphaned' as code, count(*) as rows, (array_agg(name order by name))[1:%(sample)s::int] as sample
from (
    select 'signal ' || id as name
    from interlock.signals
    where not exists (select from interlock.jobs where jobs.id = signals.job_id)
        or consumed_by is not null and not exists (
            select from interlock.tasks where tasks.job_id = signals.job_id and tasks.step = signals.consumed_by
        )
        -- a step that waits for no signal has consumed none
        or exists (
            select from interlock.jobs
                join interlock.workflow_steps as steps on steps.workflow_id = jobs.workflow_id
            where jobs.id = signals.job_id and steps.step = signals.consumed_by and steps.kind not in ('signal', 'approval')
        )
    union all
    select 'step ' || step || ' of workflow ' || workflow_id
    from interlock.workflow_steps
    where not exists (select from interlock.workflows where workflows.id = workflow_steps.workflow_id)
    union all
    select 'edge to ' || downstream || ' of workflow ' || workflow_id
    from interlock.workflow_edges
    where not exists (select from interlock.workflows where workflows.id = workflow_edges.workflow_id)
    union all
    select 'session of token ' || token_id
    from interlock.sessions
    where not exists (select from interlock.tokens where tokens.id = sessions.token_id)
    union all
    select 'sign-in code of token ' || token_id
    from interlock.sign_in_codes
    where not exists (select from interlock.tokens where tokens.id = sign_in_codes.token_id)
) as orphaned
having count(*) > 0

-- name: read_workflow_graphs
-- The stored definitions, the newest first, with the rows that were made from them.
select workflows.id, workflows.name, workflows.version, workflows.definition,
    array(
        select to_jsonb(workflow_steps)
        from interlock.workflow_steps
        where workflow_id = workflows.id
        order by position, step
    ) as steps,
    array(
        select jsonb_build_array(upstream, downstream, condition, branch)
        from interlock.workflow_edges
        where workflow_id = workflows.id
    ) as edges
from interlock.workflows
order by workflows.registered_at desc, workflows.id desc
limit %(limit)s::bigint

-- name: check_leases
-- Running tasks with a lease that no worker can have asked for, or whose worker is gone while the lease is valid.
with leased as (
    select tasks.id, case
            when tasks.lease_expires_at > coalesce(%(now)s::timestamptz, now()) + %(longest)s::interval then 'lease_too_long'
            when tasks.started_at < coalesce(%(now)s::timestamptz, now()) - %(threshold)s::interval
                and not exists (
                    select from interlock.workers
                    where workers.id = tasks.worker_id and workers.status in ('IDLE', 'RUNNING', 'PAUSED')
                        and workers.seen_until > coalesce(%(now)s::timestamptz, now()) - %(vanished)s::interval
                )
                and not exists (
                    select from interlock.workers
                    where workers.instance = tasks.worker_id and workers.instance is not null
                        and workers.status in ('IDLE', 'RUNNING', 'PAUSED')
                        and workers.seen_until > coalesce(%(now)s::timestamptz, now()) - %(vanished)s::interval
                )
                then 'owner_gone'
        end as code
    from interlock.tasks
    where lease_expires_at > coalesce(%(now)s::timestamptz, now())
    order by lease_expires_at desc
    limit %(limit)s::bigint
)
select code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from leased
where code is not null
group by code
order by code

-- name: read_versions
select name, version
from interlock.workflows

-- name: check_other_leases
-- Leases of leaders, processes and supervisors that none can have asked for: until they end, nobody takes over.
select 'lease_too_long' as code, count(*) as rows, (array_agg(name order by name))[1:%(sample)s::int] as sample
from (
    select 'duty ' || duty as name
    from interlock.leaders
    where expires_at > coalesce(%(now)s::timestamptz, now()) + %(longest)s::interval
    union all
    select 'worker ' || id
    from interlock.workers
    where greatest(seen_until, supervised_until) > coalesce(%(now)s::timestamptz, now()) + %(longest)s::interval
    union all
    select 'pool ' || name
    from interlock.pools
    where supervised_until > coalesce(%(now)s::timestamptz, now()) + %(longest)s::interval
) as leased
having count(*) > 0

-- name: check_messages
-- Messages of steps that do not exist. One that was sent a moment ago may belong to a job that retention has just deleted.
with named as (
    select msg_id, message ->> 'task_id' as task_id
    from interlock.orchestration_messages
    where vt < coalesce(%(now)s::timestamptz, now()) - %(threshold)s::interval
    order by msg_id
    limit %(limit)s::bigint
)
select 'message_unknown' as code, count(*) as rows, (array_agg(msg_id::text order by msg_id))[1:%(sample)s::int] as sample
from named
where task_id is not null and not exists (
        select from interlock.tasks
        where tasks.id = case
                when named.task_id ~* '^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$' then named.task_id::uuid
            end
    )
having count(*) > 0

-- name: check_results
-- Steps that ended a while ago and whose job was not advanced, although the queue has no message about them.
with ended as (
    select tasks.id, tasks.job_id
    from interlock.tasks
        join interlock.jobs on jobs.id = tasks.job_id and jobs.status = 'RUNNING'
    where tasks.job_id is not null and not tasks.advanced and tasks.state in ('done', 'error', 'canceled')
        and coalesce(tasks.finished_at, tasks.created_at)
            < coalesce(%(now)s::timestamptz, now()) - %(threshold)s::interval
        and not exists (select from interlock.orchestration_failures as known where known.task_id = tasks.id)
    order by coalesce(tasks.finished_at, tasks.created_at)
    limit %(limit)s::bigint
)
select 'result_not_sent' as code, count(*) as rows, (array_agg(distinct job_id::text))[1:%(sample)s::int] as sample
from ended
where not exists (
        select from interlock.orchestration_messages where message ->> 'task_id' = ended.id::text
    )
having count(*) > 0

-- name: check_waits
-- Sleeps and signals with a timeout that were over a while ago, whose step goes on waiting, and jobs that passed their
-- deadline and are not being canceled.
select 'wait_overdue' as code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from (
    (
    select tasks.id
    from interlock.tasks
        join interlock.jobs on jobs.id = tasks.job_id and jobs.status = 'RUNNING'
            and (jobs.not_before is null or jobs.not_before <= coalesce(%(now)s::timestamptz, now()))
    where tasks.wait_until < coalesce(%(now)s::timestamptz, now()) - %(threshold)s::interval and tasks.wait_until is not null
        and tasks.state = 'waiting'
    order by tasks.wait_until
    limit %(limit)s::bigint
    )
    union all
    (
    select id
    from interlock.jobs
    where deadline_at < coalesce(%(now)s::timestamptz, now()) - %(threshold)s::interval and deadline_at is not null
        and ending is distinct from 'CANCELED' and status in ('SUBMITTED', 'PENDING', 'RUNNING')
        and interlock.can_be_canceled(jobs)
        and (not_before is null or not_before <= coalesce(%(now)s::timestamptz, now()))
    order by deadline_at
    limit %(limit)s::bigint
    )
) as overdue
having count(*) > 0

-- name: check_postponed_jobs
-- Running jobs that are hidden from orchestrators for longer than after any failure: an hour, and one for clocks.
select 'job_postponed' as code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from interlock.jobs
where not_before > coalesce(%(now)s::timestamptz, now()) + interval '2 hours' and status = 'RUNNING'
having count(*) > 0

-- name: check_unique_keys
-- Keys that two unfinished tasks, or two running jobs of a workflow, have.
select 'key_duplicated' as code, count(*) as rows, (array_agg(key order by key))[1:%(sample)s::int] as sample
from (
    select unique_key as key
    from interlock.tasks
    where unique_key is not null and state in ('waiting', 'pending', 'running')
    group by unique_key
    having count(*) > 1
    union all
    select key
    from interlock.jobs
    where key is not null and status = 'RUNNING'
    group by task_description, key
    having count(*) > 1
) as duplicated
having count(*) > 0

-- name: check_limit_usage
-- Usage and lanes of keys that have no limit; those of a limit that was deleted an hour ago are gone.
select 'limit_usage_unknown' as code, count(*) as rows, (array_agg(key order by key))[1:%(sample)s::int] as sample
from (
    (
        select key
        from (
            select distinct key
            from interlock.limit_usage
            where used_at < coalesce(%(now)s::timestamptz, now()) - interval '1 hour'
        ) as used
        where not exists (select from interlock.limit_rule(used.key))
    )
    union
    (
        select array_to_string(keys, ', ')
        from interlock.limit_lanes
        where not exists (
                select from unnest(limit_lanes.keys) as wanted (key)
                    cross join lateral interlock.limit_rule(wanted.key) as rule
            )
            and not exists (
                select from interlock.tasks
                where limit_keys = limit_lanes.keys and limit_keys is not null and state = 'waiting' and held_by = 'limit'
            )
    )
) as unknown
having count(*) > 0

-- name: check_future_usage
-- Usage of limits in the future: until then, the limit has less room. A start has no time (infinity) for a moment only.
select 'limit_usage_misplaced' as code, count(*) as rows, (array_agg(distinct key))[1:%(sample)s::int] as sample
from interlock.limit_usage
where used_at > coalesce(%(now)s::timestamptz, now()) + interval '1 hour' and used_at < 'infinity'
having count(*) > 0

-- name: check_webhooks
-- Webhooks that should have been sent a while ago, or that wait for longer than between any two tries.
select 'webhook_overdue' as code, count(*) as rows, (array_agg(id::text order by id))[1:%(sample)s::int] as sample
from (
    select id
    from interlock.callbacks
    where given_up_at is null and (
            next_try_at < coalesce(%(now)s::timestamptz, now()) - %(threshold)s::interval
            or next_try_at > coalesce(%(now)s::timestamptz, now()) + %(longest)s::interval
        )
    order by next_try_at
    limit %(limit)s::bigint
) as overdue
having count(*) > 0

-- name: recount_steps
-- Corrects the counters of a job, which the transaction has locked; they follow from its steps.
with counted as (
    select count(*) filter (where not advanced) as open_steps,
        count(*) filter (where advanced and state in ('error', 'canceled') and not superseded and part_of is null
            and compensates is null) as failed_steps
    from interlock.tasks
    where job_id = %(id)s::uuid
)
update interlock.jobs
set open_steps = case when jobs.status = 'RUNNING' then counted.open_steps else 0 end,
    failed_steps = case when jobs.status = 'RUNNING' then counted.failed_steps else jobs.failed_steps end,
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
from counted
where jobs.id = %(id)s::uuid and jobs.status in ('RUNNING', 'COMPLETED', 'FAILED', 'CANCELED')
returning jobs.id

-- name: shorten_leases
-- Lets leases that no worker can have asked for end now: the tasks are recovered like those of a worker that is gone.
update interlock.tasks
set lease_expires_at = coalesce(%(now)s::timestamptz, now())
where lease_expires_at > coalesce(%(now)s::timestamptz, now()) + %(longest)s::interval
returning id

-- name: shorten_leads
update interlock.leaders
set expires_at = coalesce(%(now)s::timestamptz, now())
where expires_at > coalesce(%(now)s::timestamptz, now()) + %(longest)s::interval
returning duty

-- name: shorten_worker_leases
-- A process that lives sends its next heartbeat, and its supervisor renews its lease.
update interlock.workers
set seen_until = case
        when seen_until > coalesce(%(now)s::timestamptz, now()) + %(longest)s::interval
            then coalesce(%(now)s::timestamptz, now())
        else seen_until
    end,
    supervised_until = case
        when supervised_until > coalesce(%(now)s::timestamptz, now()) + %(longest)s::interval
            then coalesce(%(now)s::timestamptz, now())
        else supervised_until
    end
where greatest(seen_until, supervised_until) > coalesce(%(now)s::timestamptz, now()) + %(longest)s::interval
returning id

-- name: shorten_pool_leases
update interlock.pools
set supervised_until = coalesce(%(now)s::timestamptz, now())
where supervised_until > coalesce(%(now)s::timestamptz, now()) + %(longest)s::interval
returning name

-- name: show_postponed_jobs
update interlock.jobs
set not_before = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
where not_before > coalesce(%(now)s::timestamptz, now()) + interval '2 hours' and status = 'RUNNING'
returning id

-- name: delete_future_usage
delete from interlock.limit_usage
where used_at > coalesce(%(now)s::timestamptz, now()) + interval '1 hour' and used_at < 'infinity'
returning id

-- name: restore_queue_view
select interlock.create_orchestration_queue()
