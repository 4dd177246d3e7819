-- Statements of the orchestrator: the queue of step results, locks on jobs, the steps downstream of ended ones, due jobs.
-- None of them changes a state: moves are made by the statements of tasks.sql and jobs.sql, in the transaction that has
-- locked the jobs.

-- name: lock_jobs
-- Locks jobs and configures the transaction, if it is our own: the statements that follow wait for a lock at most
-- `lock_timeout`, use indexes even while a table is small, and use generic plans, because planning a statement for a few
-- rows costs more than running it.
with configured as materialized (
    -- before the first lock
    select case when %(own)s then set_config('lock_timeout', %(lock_timeout)s, true) end as lock_timeout
)
select jobs.id, jobs.workflow_id, jobs.status, jobs.ending, jobs.ending_reason, jobs.cancel_reason, jobs.compensating,
    jobs.worker_count, jobs.open_steps, jobs.failed_steps, jobs.depth, jobs.parent_job_id, jobs.parent_task_id, jobs.correlation_id,
    jobs.traceparent, jobs.retried_from, jobs.error, coalesce(%(now)s::timestamptz, now()) as now,
    array(select name from interlock.namespaces where paused_at is not null) as paused
from interlock.lock_jobs(case when (select count(*) from configured) = 1 then %(ids)s::uuid[] end) as jobs
where set_config('interlock.actor', %(actor)s, true) is not null
    and case
        when %(own)s
            then set_config('enable_seqscan', 'off', true) || set_config('plan_cache_mode', 'force_generic_plan', true)
        else ''
    end is not null

-- name: advance_plain_steps
-- Advances a whole batch, if every message in it is a plain case; otherwise changes nothing and returns nulls. A transaction
-- that ends no job commits asynchronously, since its messages would repeat it.
select received, released, finalized, traceparents
from interlock.advance_plain_steps(%(actor)s, %(limit)s::int, %(msg_id)s::bigint, %(lock_timeout)s,
    %(now)s::timestamptz)
where case when finalized = 0 then set_config('synchronous_commit', 'off', true) else '' end is not null

-- name: take_messages
-- Reads the next messages, or the one of `msg_id`, which become invisible to other readers, and locks their jobs. Later statements of the transaction see
-- the writes of the transactions that held the locks before. A lock is waited for at most `lock_timeout`.
with taken as materialized (
    select given.msg_id, given.read_ct, given.message, case
            -- a malformed id must not fail the other messages
            when given.message ->> 'job_id' ~* '^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$'
                then (given.message ->> 'job_id')::uuid
        end as job_id
    from interlock.settings
        cross join lateral (
            select msg_id, read_ct, message
            from pgmq.read(settings.orchestration_queue, %(visibility)s::int, %(limit)s::int)
            where %(msg_id)s::bigint is null
            union all
            select msg_id, read_ct, message
            from interlock.read_specific_message(%(msg_id)s::bigint, %(visibility)s::int)
            where %(msg_id)s::bigint is not null
        ) as given
    where (select set_config('lock_timeout', %(lock_timeout)s, true)) is not null
), jobs as materialized (
    select * from interlock.lock_jobs(array(select distinct job_id from taken))
)
select taken.msg_id, taken.read_ct, taken.message, jobs.id, jobs.workflow_id, jobs.status, jobs.ending,
    jobs.ending_reason, jobs.cancel_reason, jobs.compensating, jobs.worker_count, jobs.open_steps, jobs.failed_steps, jobs.depth,
    jobs.parent_job_id, jobs.parent_task_id, jobs.correlation_id, jobs.traceparent, jobs.retried_from, jobs.error,
    coalesce(%(now)s::timestamptz, now()) as now,
    array(select name from interlock.namespaces where paused_at is not null) as paused
from taken
    left join jobs on jobs.id = taken.job_id
where (
        select set_config('interlock.actor', %(actor)s, true) || set_config('enable_seqscan', 'off', true)
            || set_config('plan_cache_mode', 'force_generic_plan', true)
    ) is not null

-- name: read_message
-- Reads one message, after its batch has failed. Committed by itself: the read counts even if handling the message fails.
select given.msg_id, given.read_ct, given.message
from interlock.settings
    cross join lateral pgmq.read(settings.orchestration_queue, %(visibility)s::int, 1) as given

-- name: defer_message
-- The job is locked by another transaction: hides the message for 2^read_ct seconds, at most 32.
select pgmq.set_vt(orchestration_queue, %(msg_id)s::bigint, (2 ^ least(%(reads)s, 5))::int)
from interlock.settings

-- name: archive_message
-- Moves a message to the archive and records the failure, also in the reason of the job, unless that is locked. A message
-- that was resent and failed again updates its first failure, and is resent later each time: 1 minute to 6 hours.
with archived as materialized (
    select pgmq.archive(orchestration_queue, %(msg_id)s::bigint) as done
    from interlock.settings
), noted as (
    update interlock.jobs
    set reason = 'a step result was set aside: ' || %(error)s::text,
        updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
    where id = (
            select id
            from interlock.jobs
            where id = %(job_id)s::uuid and status in ('PENDING', 'RUNNING')
            for no key update skip locked
        )
        and (select done from archived)
)
insert into interlock.orchestration_failures as known (msg_id, job_id, task_id, message, error, failed_at, retry_at)
select coalesce(%(failure)s::bigint, %(msg_id)s::bigint), %(job_id)s, %(task_id)s, %(message)s, %(error)s,
    coalesce(%(now)s::timestamptz, now()),
    -- a message without a job is not resent
    case when %(job_id)s::uuid is not null then coalesce(%(now)s::timestamptz, now()) + interval '1 minute' end
from archived
where done
on conflict (msg_id) do update
set error = excluded.error, failed_at = excluded.failed_at, times = known.times + 1,
    retry_at = excluded.failed_at + least(interval '1 minute' * 2 ^ least(known.times, 20), interval '6 hours')
returning msg_id

-- name: resend_failures
-- Resends archived messages that are due, or all of them with `at_once`; again later, in case this message is lost.
with due as (
    update interlock.orchestration_failures
    set retry_at = coalesce(%(now)s::timestamptz, now())
        + least(interval '5 minutes' * 2 ^ least(times, 20), interval '6 hours')
    where msg_id = any (array(
        select msg_id
        from interlock.orchestration_failures
        where job_id is not null and job_id = coalesce(%(job_id)s::uuid, job_id)
            and (%(at_once)s::boolean or retry_at <= coalesce(%(now)s::timestamptz, now()))
        order by msg_id
        limit %(limit)s
        for update skip locked
    ))
    returning msg_id, message
), sent as (
    select pgmq.send_batch(orchestration_queue, array(
        select message || jsonb_build_object('failure', msg_id) from due
    )) as msg_id
    from interlock.settings
    where exists (select from due)
)
select count(*) as sent, case when count(*) > 0 then pg_notify('interlock_orchestration', 'messages') end
from sent

-- name: resend_lost_results
-- Resends the results of steps that ended at least `min_age` ago and were not advanced, although the queue has no message
-- that is as old as they are. An update is enough: the trigger send_step_results() sends the message. Steps of an ended
-- job are marked as advanced; those of a job that has not started are advanced when it starts.
with bound as materialized (
    select coalesce(%(now)s::timestamptz, now()) - %(min_age)s::interval
        - make_interval(secs => coalesce(metrics.oldest_msg_age_sec, 0)) as moment
    from interlock.settings
        cross join lateral pgmq.metrics(settings.orchestration_queue) as metrics
), lost as materialized (
    select tasks.id, jobs.status <> 'RUNNING' as is_over
    from interlock.tasks
        cross join lateral (select status from interlock.jobs where jobs.id = tasks.job_id limit 1) as jobs
    where tasks.job_id is not null and not tasks.advanced and tasks.state in ('done', 'error', 'canceled')
        and coalesce(tasks.finished_at, tasks.created_at) < (select moment from bound)
        and tasks.updated_at < (select moment from bound)
        and jobs.status in ('RUNNING', 'COMPLETED', 'FAILED', 'CANCELED')
        and not exists (select from interlock.orchestration_failures as known where known.task_id = tasks.id)
    order by coalesce(tasks.finished_at, tasks.created_at)
    limit %(limit)s
    for no key update of tasks skip locked
), resent as (
    update interlock.tasks
    set advanced = lost.is_over, updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
    from lost
    where tasks.id = any (array(select id from lost)) and tasks.id = lost.id
    returning tasks.advanced
)
select count(*) filter (where not advanced) as sent
from resent

-- name: resend_results_of_job
-- Resends the results of one job's steps that were not advanced, whatever their age.
with resent as (
    update interlock.tasks
    set updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
    where job_id = %(job_id)s and not advanced and state in ('done', 'error', 'canceled')
        and not exists (select from interlock.orchestration_failures as known where known.task_id = tasks.id)
    returning id
)
select count(*) as sent
from resent

-- name: delete_failures
-- Deletes the failure records of messages that have been handled after all, and the reason of their jobs.
with deleted as (
    delete from interlock.orchestration_failures
    where msg_id = any (%(ids)s::bigint[])
    returning job_id
)
update interlock.jobs
set reason = null
where id = any (array(select job_id from deleted)) and status in ('PENDING', 'RUNNING')
    and reason like 'a step result was set aside: %%'

-- name: send_messages
-- Sends messages other than the ends of steps, which a trigger sends: a child job has ended, or a job is to be looked at.
with sent as (
    select pgmq.send_batch(orchestration_queue, array(select jsonb_array_elements(%(messages)s::jsonb))) as msg_id
    from interlock.settings
)
select pg_notify('interlock_orchestration', case count(*) when 1 then max(msg_id)::text else 'messages' end)
from sent
having count(*) > 0

-- name: read_queue_state
select metrics.queue_length as waiting, metrics.oldest_msg_age_sec as oldest_age,
    (select count(*) from interlock.orchestration_failures) as archived
from interlock.settings
    cross join lateral pgmq.metrics(settings.orchestration_queue) as metrics

-- name: read_orchestration_failures
-- Failures without a job come last: they hold up no job.
select msg_id, job_id, task_id, message, error, times, failed_at, retry_at
from interlock.orchestration_failures
order by job_id is null, msg_id desc
limit %(limit)s

-- name: read_ended_steps
select id
from interlock.tasks
where job_id = any (%(ids)s::uuid[]) and state in ('done', 'error', 'canceled') and not advanced

-- name: take_ended_steps
-- Takes ended steps, each once: a repeated message finds nothing to take. A step that ended before its job started is taken
-- when the job starts. Returns a row for each step that waits for an ended one: over an edge, or, for a part, its map.
-- `skipped` are steps that need not be taken, and whose waiting steps are returned as well. Waiting steps are locked: a
-- concurrent cancellation of one is either visible here, or waits until it is resolved.
with taken as (
    update interlock.tasks
    set advanced = true
    where id = any (%(ids)s::uuid[])
        -- CASE keeps the planner from using the index on job_id, which would read all steps of the job
        and case
            when state in ('done', 'error', 'canceled') and not advanced
                then job_id = any (array(
                    select jobs.id
                    from interlock.jobs
                    where jobs.id = any (%(job_ids)s::uuid[]) and jobs.status = 'RUNNING'
                ))
            else false
        end
    returning id, job_id, step, state, part_of, superseded, output -> 'orchestration_metadata' -> 'chosen' as chosen
), ended as materialized (
    select taken.*, jobs.workflow_id
    from (
            select id, job_id, step, state, part_of, superseded, chosen from taken
            union all
            select id, job_id, step, null, part_of, false, null
            from interlock.tasks
            where id = any (%(skipped)s::uuid[])
        ) as taken
        cross join lateral (select workflow_id from interlock.jobs where jobs.id = taken.job_id limit 1) as jobs
)
select ended.id as upstream_id, ended.job_id as upstream_job_id, ended.step as upstream, ended.state, ended.part_of,
    ended.superseded, ended.chosen, edges.condition as on_condition, edges.branch, steps.kind, steps.edges, steps.needed,
    steps.rule, steps.condition, steps.cancel_rest, found.id, found.job_id, found.step, found.namespace, found.priority,
    found.limit_keys, found.unresolved, found.taken, found.failed
from ended
    left join lateral (
        select downstream, condition, branch
        from interlock.workflow_edges
        where workflow_id = ended.workflow_id and upstream = ended.step and ended.part_of is null
        offset 0
    ) as edges on true
    left join lateral (
        select kind, edges, needed, rule, condition, cancel_rest
        from interlock.workflow_steps
        where workflow_id = ended.workflow_id and step = edges.downstream
        limit 1
    ) as steps on true
    left join lateral (
        select id, job_id, step, namespace, priority, limit_keys, unresolved, taken, failed
        from interlock.tasks
        where job_id = ended.job_id and step = edges.downstream and state = 'waiting' and held_by = 'dependency'
        limit 1
        for no key update
    ) as found on true
where ended.part_of is null
union all
select ended.id, ended.job_id, ended.step, ended.state, ended.part_of, ended.superseded, null, 'part', false, 'map', 0,
    null, null, null, false, found.id, found.job_id, found.step, found.namespace, found.priority, null, found.unresolved,
    found.taken, found.failed
from ended
    left join lateral (
        select id, job_id, step, namespace, priority, unresolved, taken, failed
        from interlock.tasks
        where id = ended.part_of and state = 'waiting' and held_by = 'parts'
        limit 1
        for no key update
    ) as found on true
where ended.part_of is not null

-- name: read_unmet_dependencies
-- Reads, for steps that are skipped because of upstream steps that ended in earlier batches, the first such step; failures
-- come first.
select tasks.id, found.step, found.condition, found.has_failed
from interlock.tasks
    cross join lateral (select workflow_id from interlock.jobs where jobs.id = tasks.job_id limit 1) as jobs
    cross join lateral (
        select upstream.step, edges.condition, upstream.finished_at, edges.condition = 'after'
                and (upstream.skipped_by_failure or upstream.state in ('error', 'canceled') and not upstream.superseded)
                as has_failed
        from interlock.workflow_edges as edges
            cross join lateral (
                select step, state, skipped_by_failure, superseded, reused, finished_at
                from interlock.tasks as ended
                where ended.job_id = tasks.job_id and ended.step = edges.upstream
                    and state in ('done', 'error', 'canceled', 'skipped')
                limit 1
            ) as upstream
        where edges.workflow_id = jobs.workflow_id and edges.downstream = tasks.step
            and case edges.condition
                when 'after' then upstream.state <> 'done' and not upstream.reused
                else edges.condition in ('on_failure', 'recovers') and not upstream.skipped_by_failure
                    and (upstream.state not in ('error', 'canceled') or upstream.superseded)
            end
        order by 4 desc, upstream.finished_at, upstream.step
        limit 1
    ) as found
where tasks.id = any (%(ids)s::uuid[])

-- name: read_parent_steps
-- Reads child steps that wait for their child job, where that has ended, with the end of that job.
select tasks.id, tasks.job_id, tasks.step, tasks.namespace, tasks.cancel_requested_at is not null as is_to_be_canceled,
    tasks.reason as cancel_reason, child.id as child_id, child.status, child.output::text as output, child.reason, child.iteration, child.input, steps.spec
from interlock.tasks
    cross join lateral (select workflow_id from interlock.jobs where jobs.id = tasks.job_id limit 1) as jobs
    cross join lateral (
        select spec
        from interlock.workflow_steps
        where workflow_steps.workflow_id = jobs.workflow_id and workflow_steps.step = tasks.step
        limit 1
    ) as steps
    cross join lateral (
        -- the latest one: a step can repeat its child job
        select id, status, output, reason, iteration, input
        from interlock.jobs as latest
        where latest.parent_task_id = tasks.id and latest.parent_task_id is not null
        order by iteration desc
        limit 1
    ) as child
where tasks.id = any (%(ids)s::uuid[])
    and case
        when tasks.state = 'waiting' and tasks.held_by = 'job' then tasks.job_id = any (%(job_ids)s::uuid[])
        else false
    end
    and child.status in ('COMPLETED', 'FAILED', 'CANCELED')
for no key update of tasks

-- name: read_ends_of_jobs
-- Reads the ends of all steps of jobs without open steps, and, with the first step of each job, its definition. Parts and
-- compensations are left out: a map stands for its parts.
select tasks.job_id, tasks.step, tasks.state, tasks.skipped_by_failure, tasks.superseded, tasks.reused, tasks.reason,
    -- a step that was canceled by SQL may have no time
    coalesce(tasks.finished_at, tasks.updated_at) as finished_at, case
        when row_number() over (partition by tasks.job_id order by tasks.step) = 1
            then workflows.definition
    end as definition,
    case
        when tasks.state in ('error', 'canceled')
            then coalesce(tasks.error, jsonb_build_object('type', tasks.state, 'message', tasks.reason))
    end as error
from unnest(%(ids)s::uuid[]) as wanted (id)
    cross join lateral (select id, workflow_id from interlock.jobs where jobs.id = wanted.id limit 1) as jobs
    cross join lateral (
        select definition from interlock.workflows where workflows.id = jobs.workflow_id limit 1
    ) as workflows
    cross join lateral (
        select job_id, step, state, skipped_by_failure, superseded, reused, reason, finished_at, updated_at, error
        from interlock.tasks
        where tasks.job_id = jobs.id and part_of is null and compensates is null
        offset 0
    ) as tasks
order by tasks.job_id, tasks.step

-- name: read_failing_jobs
-- What a cancellation can still change of jobs that are about to fail: the child jobs that they wait for.
select jobs.id, jobs.compensating, jobs.cancel_reason, children.has_children
from unnest(%(ids)s::uuid[]) as wanted (id)
    join interlock.jobs on jobs.id = wanted.id
    cross join lateral (
        select exists (
                select
                from interlock.jobs as child
                where child.parent_job_id = jobs.id and child.parent_job_id is not null
                    -- CASE keeps the planner from walking the index of all open jobs
                    and case when child.status in ('SUBMITTED', 'PENDING', 'RUNNING') then true else false end
                offset 0
            ) as has_children
    ) as children

-- name: read_unfinished_children
select parent.id as parent_job_id, child.id
from unnest(%(ids)s::uuid[]) as parent (id)
    cross join lateral (
        select jobs.id
        from interlock.jobs
        where jobs.parent_job_id = parent.id and jobs.parent_job_id is not null
            -- CASE keeps the planner from walking the index of all open jobs
            and case when jobs.status in ('SUBMITTED', 'PENDING', 'RUNNING') then true else false end
        offset 0
    ) as child
order by child.id

-- name: read_children_of_steps
-- Reads the unfinished child jobs of steps.
select child.id, starter.id as parent_task_id
from unnest(%(ids)s::uuid[]) as starter (id)
    cross join lateral (
        select jobs.id
        from interlock.jobs
        where jobs.parent_task_id = starter.id and jobs.parent_task_id is not null
            and case when jobs.status in ('SUBMITTED', 'PENDING', 'RUNNING') then true else false end
        limit 1
    ) as child
order by child.id

-- name: read_reasons_to_cancel
-- Reads, for unfinished child jobs, why they must be canceled: the parent job is canceled, or the step that started them.
select jobs.id, case
        when parent.ending = 'CANCELED' or parent.status = 'CANCELED'
            then format('job %%s, which it belongs to, was canceled', parent.id)
        when parent.cancel_reason is not null
            then format('job %%s, which it belongs to, failed, and was canceled then: %%s', parent.id, parent.cancel_reason)
        when starter.superseded then 'its result is not needed any more'
        else 'the step that waited for it was canceled'
    end as reason
from interlock.jobs
    cross join lateral (
        select id, status, ending, cancel_reason from interlock.jobs as parent where parent.id = jobs.parent_job_id limit 1
    ) as parent
    left join lateral (
        select state, superseded, cancel_requested_at from interlock.tasks where tasks.id = jobs.parent_task_id limit 1
    ) as starter on true
where jobs.id = any (%(ids)s::uuid[])
    and case
        when jobs.status in ('SUBMITTED', 'PENDING', 'RUNNING') then interlock.can_be_canceled(jobs) else false
    end
    and (parent.ending = 'CANCELED' or parent.status = 'CANCELED' or parent.cancel_reason is not null
        or starter.state = 'canceled' or starter.cancel_requested_at is not null)

-- name: read_lost_cancellations
-- Finds unfinished children of jobs that are being canceled, and steps that are to be canceled and wait for their parts or
-- their child job, in case a message was lost. A step is to be looked at again, a child job by itself.
(select child.id as job_id, null::uuid as task_id
from interlock.jobs
    join interlock.jobs as child on child.parent_job_id = jobs.id
        and child.status in ('SUBMITTED', 'PENDING', 'RUNNING') and interlock.can_be_canceled(child)
where jobs.status in ('SUBMITTED', 'PENDING', 'RUNNING')
    and (jobs.ending = 'CANCELED' or jobs.cancel_reason is not null)
    and child.parent_job_id is not null
limit %(limit)s)
union all
(select job_id, id
from interlock.tasks
where cancel_requested_at is not null and state = 'waiting' and held_by in ('job', 'parts')
limit %(limit)s)

-- name: record_job_failure
-- Records that the orchestrator could not start, cancel or advance a job, and hides it for 1 second to 1 hour, doubling
-- each time, so that it holds up no other. A job that is locked is not changed: it is read again once the lock is gone.
update interlock.jobs
set advance_failures = advance_failures + 1, reason = %(reason)s,
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp()),
    not_before = coalesce(%(now)s::timestamptz, now())
        + least(interval '1 second' * 2 ^ least(advance_failures, 20), interval '1 hour')
where id = (
        select id
        from interlock.jobs
        where id = %(id)s and status in ('SUBMITTED', 'PENDING', 'RUNNING')
        for no key update skip locked
    )

-- name: refresh_pending_reasons
-- Updates the reason of jobs that wait for workers: other namespaces may be served now than when they were submitted.
with live as materialized (
    select coalesce(array_agg(distinct served.namespace), '{}') as namespaces
    from interlock.workers
        cross join lateral unnest(workers.namespaces) as served (namespace)
    where status = 'RUNNING' and seen_until > coalesce(%(now)s::timestamptz, now())
), unserved as materialized (
    select workflows.id, format('no live worker serves %%s %%s',
            case count(*) when 1 then 'namespace' else 'namespaces' end,
            string_agg(format('''%%s''', root.namespace), ', ' order by root.place)) as reason
    from interlock.workflows
        cross join lateral unnest(workflows.root_namespaces) with ordinality as root (namespace, place)
    where root.namespace <> all (array(select unnest(namespaces) from live))
    group by workflows.id
)
update interlock.jobs
set reason = unserved.reason, updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
from unserved
where jobs.workflow_id = unserved.id and jobs.id = any (array(
        select found.id
        from unserved
            cross join lateral (
                select id
                from interlock.jobs
                where workflow_id = unserved.id and status = 'PENDING' and key is null and not_before is null
                    and reason is distinct from unserved.reason
                limit %(limit)s
                for no key update skip locked
            ) as found
    ))
returning jobs.id

-- name: read_startable_jobs
-- Reads PENDING jobs all of whose root namespaces have a live worker now; read_queued_jobs reads those with a key. By
-- workflow, so that the jobs of unserved workflows, of which there may be many, are not read. Here and below, locked jobs
-- are left to the next call.
with live as materialized (
    select coalesce(array_agg(distinct served.namespace), '{}') as namespaces
    from interlock.workers
        cross join lateral unnest(workers.namespaces) as served (namespace)
    where status = 'RUNNING' and seen_until > coalesce(%(now)s::timestamptz, now())
)
select jobs.id
from interlock.workflows
    cross join lateral (
        select id
        from interlock.jobs
        where workflow_id = workflows.id and status = 'PENDING' and key is null and ending is null
            and (not_before is null or not_before <= coalesce(%(now)s::timestamptz, now()))
        order by workflow_id, created_at, id
        limit %(limit)s
        for no key update skip locked
    ) as jobs
where workflows.root_namespaces <@ (select namespaces from live)
order by jobs.id
limit %(limit)s

-- name: read_overdue_jobs
select id, timeout_seconds
from interlock.jobs
where deadline_at <= coalesce(%(now)s::timestamptz, now()) and deadline_at is not null
    and ending is distinct from 'CANCELED' and status in ('SUBMITTED', 'PENDING', 'RUNNING')
    and interlock.can_be_canceled(jobs)
    and (not_before is null or not_before <= coalesce(%(now)s::timestamptz, now()))
order by deadline_at
limit %(limit)s
for no key update skip locked

-- name: read_due_waits
-- Reads steps whose sleep is over, or whose signal did not come in time.
select tasks.id, tasks.job_id, tasks.step, tasks.namespace, tasks.priority, steps.kind, steps.spec
from interlock.tasks
    cross join lateral (
        select workflow_id
        from interlock.jobs
        where jobs.id = tasks.job_id
            and (not_before is null or not_before <= coalesce(%(now)s::timestamptz, now()))
        limit 1
        for no key update skip locked
    ) as job
    cross join lateral (
        select kind, spec
        from interlock.workflow_steps
        where workflow_id = job.workflow_id and workflow_steps.step = tasks.step
        limit 1
    ) as steps
where wait_until <= coalesce(%(now)s::timestamptz, now()) and wait_until is not null and state = 'waiting'
    and held_by in ('signal', 'sleep')
order by wait_until
limit %(limit)s

-- name: until_next_due
-- Returns the time until the next deadline of a job, end of a step's wait, or next try of a job that failed here. A time that
-- has passed does not count: the sweeps have handled it, or left it because the job is locked. At most a day, also when
-- nothing is due, because an interval cannot hold some far times.
select least(min(due.due_at) - coalesce(%(now)s::timestamptz, now()), '1 day') as remaining
from (
        (
            select deadline_at as due_at
            from interlock.jobs
            where deadline_at > coalesce(%(now)s::timestamptz, now()) and deadline_at is not null
                and ending is distinct from 'CANCELED' and status in ('SUBMITTED', 'PENDING', 'RUNNING')
                and interlock.can_be_canceled(jobs)
            order by deadline_at
            limit 1
        ) union all (
            select not_before
            from interlock.jobs
            where not_before > coalesce(%(now)s::timestamptz, now()) and not_before is not null
                and status in ('SUBMITTED', 'PENDING', 'RUNNING')
            order by not_before
            limit 1
        ) union all (
            select wait_until
            from interlock.tasks
            where wait_until > coalesce(%(now)s::timestamptz, now()) and wait_until is not null and state = 'waiting'
            order by wait_until
            limit 1
        )
    ) as due
