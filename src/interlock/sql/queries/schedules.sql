-- Schedules of tasks and jobs. Python computes the ticks; these statements find the schedules that are due.
-- Python cannot read a time of infinity: it is shown as a time that no clock reaches.

-- name: put_schedules
-- A schedule whose cron or interval did not change keeps its next tick: declaring it again neither skips nor repeats
-- one.
insert into interlock.schedules (name, type, workflow, version, namespace, cron, timezone, every, missed, input, options,
    next_at, updated_at)
select name, type, workflow, version, namespace, cron, timezone, every, missed, input, options, next_at,
    coalesce(%(now)s::timestamptz, now())
from unnest(%(names)s::text[], %(types)s::text[], %(workflows)s::text[], %(versions)s::text[],
    %(namespaces)s::text[], %(crons)s::text[], %(timezones)s::text[], %(everies)s::interval[], %(misseds)s::text[],
    %(inputs)s::jsonb[], %(options)s::jsonb[], %(next_ats)s::timestamptz[])
    as wanted (name, type, workflow, version, namespace, cron, timezone, every, missed, input, options, next_at)
order by name
on conflict (name) do update
set type = excluded.type, workflow = excluded.workflow, version = excluded.version, namespace = excluded.namespace,
    cron = excluded.cron, timezone = excluded.timezone, every = excluded.every, missed = excluded.missed, input = excluded.input, options = excluded.options,
    next_at = case
        when (schedules.cron, schedules.timezone, schedules.every)
            is not distinct from (excluded.cron, excluded.timezone, excluded.every)
        then schedules.next_at
        else excluded.next_at
    end,
    error = null, updated_at = excluded.updated_at
where (schedules.type, schedules.workflow, schedules.version, schedules.namespace, schedules.cron, schedules.timezone,
        schedules.every, schedules.missed, schedules.input, schedules.options)
    is distinct from (excluded.type, excluded.workflow, excluded.version, excluded.namespace, excluded.cron,
        excluded.timezone, excluded.every, excluded.missed, excluded.input, excluded.options)
returning name

-- name: delete_schedules
delete from interlock.schedules
where name = any (%(names)s::text[])
returning name

-- name: pause_schedules
update interlock.schedules
set paused_at = coalesce(paused_at, %(now)s::timestamptz, now()), paused_by = %(actor)s, pause_reason = %(reason)s,
    resumed_by = null, resume_reason = null
where name = any (%(names)s::text[])
returning name

-- name: resume_schedules
-- Ticks during a pause do not count as missed: the caller gives the next one.
update interlock.schedules
set paused_at = null, paused_by = null, pause_reason = null, resumed_by = %(actor)s, resume_reason = %(reason)s,
    error = null, next_at = resumed.next_at
from unnest(%(names)s::text[], %(next_ats)s::timestamptz[]) as resumed (name, next_at)
where schedules.name = resumed.name and paused_at is not null
returning schedules.name

-- name: list_schedules
select name, type, workflow, version, namespace, cron, timezone, every, missed, input, options,
    least(greatest(next_at, '0002-01-01'), '9998-12-31') as next_at, last_at,
    paused_at, paused_by, pause_reason, resumed_by, resume_reason, error
from interlock.schedules
order by name

-- name: read_schedules
select name, type, workflow, version, namespace, cron, timezone, every, missed, input, options,
    least(greatest(next_at, '0002-01-01'), '9998-12-31') as next_at, last_at,
    paused_at, paused_by, pause_reason, resumed_by, resume_reason, error
from interlock.schedules
where name = any (%(names)s::text[])

-- name: read_due_schedules
select name, type, workflow, version, namespace, cron, timezone, every, missed, input, options,
    least(greatest(next_at, '0002-01-01'), '9998-12-31') as next_at, last_at,
    paused_at, paused_by, pause_reason, resumed_by, resume_reason, error
from interlock.schedules
where paused_at is null and next_at <= coalesce(%(now)s::timestamptz, now())
order by schedules.next_at
limit %(limit)s
for update skip locked

-- name: advance_schedules
update interlock.schedules
set next_at = fired.next_at, last_at = coalesce(fired.last_at, schedules.last_at), error = fired.error
from unnest(%(names)s::text[], %(next_ats)s::timestamptz[], %(last_ats)s::timestamptz[], %(errors)s::text[])
    as fired (name, next_at, last_at, error)
where schedules.name = fired.name
returning schedules.name

-- name: stop_broken_schedule
update interlock.schedules
set paused_at = coalesce(%(now)s::timestamptz, now()), paused_by = %(actor)s, pause_reason = null, resumed_by = null,
    resume_reason = null, error = %(error)s
where name = %(name)s
returning name

-- name: next_schedule_at
select least(greatest(next_at, '0002-01-01'), '9998-12-31') as next_at
from interlock.schedules
where paused_at is null
order by schedules.next_at
limit 1

-- name: read_schedule_outcomes
-- The tasks and jobs that ticks made.
select request_id, 'task' as kind, id, state
from interlock.tasks
where request_id = any (%(request_ids)s::text[]) and request_id is not null
union all
select request_id, 'job', id, status
from interlock.jobs
where request_id = any (%(request_ids)s::text[]) and request_id is not null
