-- Outbox of webhooks: `insert_webhooks` writes those of tasks with the outcome, a trigger those of jobs; delivery deletes
-- them.

-- name: claim_due_webhooks
-- The sender moves the next try forward before it sends: if its process dies, the webhook becomes due again.
update interlock.callbacks
set tries = tries + 1, next_try_at = coalesce(%(now)s::timestamptz, now()) + %(visibility)s::interval
where id = any (array(
    select id
    from interlock.callbacks
    where given_up_at is null and next_try_at <= coalesce(%(now)s::timestamptz, now())
    order by next_try_at
    limit %(limit)s
    for update skip locked
))
returning id, task_id, attempt, job_id, state, url, tries, (
    select jsonb_build_object('workflow', workflows.name, 'version', workflows.version)
    from interlock.jobs
        join interlock.workflows on workflows.id = jobs.workflow_id
    where jobs.id = callbacks.job_id
) as definition

-- name: delete_delivered_webhooks
-- Fenced by the number of tries: a webhook that was claimed again belongs to the later sender.
delete from interlock.callbacks
using unnest(%(ids)s::bigint[], %(tries)s::int[]) as delivered (id, tries)
where callbacks.id = delivered.id and callbacks.tries = delivered.tries
returning callbacks.id

-- name: postpone_failed_webhooks
update interlock.callbacks
set error = failed.error,
    next_try_at = coalesce(%(now)s::timestamptz, now()) + make_interval(secs => coalesce(failed.delay, 0)),
    given_up_at = case when failed.delay is null then coalesce(%(now)s::timestamptz, now()) end
from unnest(%(ids)s::bigint[], %(tries)s::int[], %(errors)s::text[], %(delays)s::float8[])
    as failed (id, tries, error, delay)
where callbacks.id = failed.id and callbacks.tries = failed.tries
returning callbacks.id

-- name: next_callback_at
select next_try_at
from interlock.callbacks
where given_up_at is null
order by next_try_at
limit 1

-- name: list_given_up_webhooks
select id, task_id, attempt, job_id, state, url, tries, error, given_up_at
from interlock.callbacks
where given_up_at is not null and id > %(after)s
order by id
limit %(limit)s

-- name: retry_given_up_webhooks
-- For operators, once the receiver works again.
update interlock.callbacks
set given_up_at = null, tries = 0, next_try_at = coalesce(%(now)s::timestamptz, now())
where given_up_at is not null and (%(ids)s::bigint[] is null or id = any (%(ids)s::bigint[]))
returning id

-- name: discard_given_up_webhooks
-- For operators, when the receiver will never work again.
delete from interlock.callbacks
where given_up_at is not null and (%(ids)s::bigint[] is null or id = any (%(ids)s::bigint[]))
returning id
