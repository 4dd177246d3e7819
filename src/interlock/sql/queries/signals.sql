-- Signals and answers to approvals, and the steps that wait for them. None of these statements changes a state. Writes run in
-- a transaction that has locked the job.

-- name: read_signal_steps
-- Reads the signal and approval steps of a job in the order of the definition, and whether each waits now or has failed.
-- A job that waits to be validated has no tasks yet: its signals are kept for them.
select tasks.id, tasks.job_id, tasks.step, tasks.namespace, tasks.priority, steps.kind, steps.spec,
    coalesce(tasks.state = 'waiting' and tasks.held_by = 'signal', false) as is_waiting,
    coalesce(tasks.state = 'error', false) as has_failed,
    steps.kind = 'approval' and exists (
        select from interlock.signals where signals.job_id = jobs.id and signals.name = steps.step
    ) as is_answered
from interlock.jobs
    join interlock.workflow_steps as steps on steps.workflow_id = jobs.workflow_id
        and steps.kind in ('signal', 'approval')
    left join interlock.tasks on tasks.job_id = jobs.id and tasks.step = steps.step
where jobs.id = %(job_id)s
order by steps.position

-- name: read_sent_signal
-- Reads whether a request id was used in the job before, and whether for the same signal.
select name = %(name)s and payload is not distinct from %(payload)s::jsonb as is_same
from interlock.signals
where job_id = %(job_id)s and request_id = %(request_id)s

-- name: insert_signal
insert into interlock.signals (job_id, name, payload, request_id, sent_by, sent_at)
values (%(job_id)s, %(name)s, %(payload)s, %(request_id)s, %(actor)s, coalesce(%(now)s::timestamptz, now()))
returning id

-- name: read_unconsumed_signals
-- Reads the oldest signals that no step has consumed, of each job and name as many as its steps can consume.
select wanted.job_id, wanted.name, found.id, found.payload, found.sent_by
from unnest(%(job_ids)s::uuid[], %(names)s::text[], %(counts)s::int[]) as wanted (job_id, name, steps)
    cross join lateral (
        select id, payload, sent_by
        from interlock.signals
        where signals.job_id = wanted.job_id and signals.name = wanted.name and consumed_by is null
        order by id
        limit wanted.steps
    ) as found
order by found.id

-- name: consume_signals
update interlock.signals
set consumed_by = given.step, consumed_at = coalesce(%(now)s::timestamptz, now())
from unnest(%(ids)s::bigint[], %(steps)s::text[]) as given (id, step)
where signals.id = any (%(ids)s::bigint[]) and signals.id = given.id and signals.consumed_by is null

-- name: read_signals
-- Reads the signals of a job in the order in which they were sent, after the one with the id `after`; all of them if
-- `limit` is null.
select id, name, payload, request_id, sent_by, sent_at, consumed_by, consumed_at
from interlock.signals
where job_id = %(job_id)s and id > %(after)s
order by id
limit %(limit)s

-- name: read_inbox
-- Looks at no more than `window` steps that wait for a signal or an approval, longest wait first, and returns those that
-- meet all conditions, at most `limit`, and the last one of the window, as the statements of `lists.sql` do. `after` and
-- `after_id` belong to the last step that the page before looked at. Not prepared, so that the planner knows which
-- conditions are null.
select *
from (
        select tasks.id, tasks.job_id, waiting.workflow, waiting.version, tasks.namespace, tasks.step, waiting.kind,
            waiting.signal, tasks.assignee, tasks.wait_started_at, tasks.wait_until, tasks.looked_at,
            waiting.kind is not null
            and (%(workflow)s::text is null or waiting.workflow = %(workflow)s::text)
            and (%(kind)s::text is null or waiting.kind = %(kind)s::text)
            and (%(namespaces)s::text[] is null or waiting.namespace = any (%(namespaces)s::text[])) as matches
        from (
                select *, row_number() over (order by wait_started_at, id) as looked_at
                from (
                        select id, job_id, namespace, step, assignee, wait_started_at, wait_until
                        from interlock.tasks
                        where state = 'waiting' and held_by = 'signal'
                            and (%(assignee)s::text is null or assignee = %(assignee)s::text)
                            and (%(after)s::timestamptz is null
                                or (wait_started_at, id) > (%(after)s::timestamptz, %(after_id)s::uuid))
                        order by wait_started_at, id
                        limit %(window)s
                    ) as longest
            ) as tasks
            left join lateral (
                select workflows.name as workflow, workflows.version, jobs.namespace, steps.kind,
                    case steps.kind when 'signal' then steps.spec ->> 'signal' else steps.step end as signal
                from interlock.jobs
                    join interlock.workflows on workflows.id = jobs.workflow_id
                    join interlock.workflow_steps as steps
                        on steps.workflow_id = jobs.workflow_id and steps.step = tasks.step
                where jobs.id = tasks.job_id
                limit 1 -- read for each step, whatever the statistics say of the other tables
            ) as waiting on true
    ) as found
where matches or looked_at = %(window)s
order by wait_started_at, id
limit %(limit)s
