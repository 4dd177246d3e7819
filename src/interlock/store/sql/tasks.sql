-- Everything that is written to `tasks`. Each move stands in exactly one statement, and says so in its header.
--
-- In all of them: `now` is null in production and the test's clock in tests; `actor` goes into the records, set for
-- this transaction only, so that it works behind a pooler too.

-- name: insert_task
-- A second task with the id of a first is the first: enqueueing can be repeated.
insert into interlock.tasks (id, namespace, type, state, reason, priority, run_at, max_tries, job_id, step, input,
    created_at, updated_at)
select coalesce(%(id)s::uuid, interlock.new_id()), %(namespace)s, %(type)s, %(state)s, %(reason)s, %(priority)s,
    coalesce(%(run_at)s::timestamptz, %(now)s, now()), %(max_tries)s, %(job_id)s, %(step)s, %(input)s,
    coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now())
where (select set_config('interlock.actor', %(actor)s, true)) is not null
on conflict (id) do nothing
returning id

-- name: release_waiting_tasks
-- moves: task waiting -release-> pending
update interlock.tasks
set state = 'pending', event = 'release', reason = %(reason)s, updated_at = coalesce(%(now)s::timestamptz, now())
where id = any (%(ids)s::uuid[]) and state = 'waiting'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: hold_pending_tasks
-- moves: task pending -hold-> waiting
update interlock.tasks
set state = 'waiting', event = 'hold', reason = %(reason)s, updated_at = coalesce(%(now)s::timestamptz, now())
where id = any (%(ids)s::uuid[]) and state = 'pending'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: claim_pending_tasks
-- moves: task pending -claim-> running
-- The order is exactly that of the index `tasks_claim`: any other lets the planner walk something longer.
with picked as materialized (
    select id
    from interlock.tasks
    where state = 'pending' and namespace = %(namespace)s and run_at <= coalesce(%(now)s::timestamptz, now())
    order by priority desc, run_at, id
    limit %(limit)s
    for update skip locked
)
update interlock.tasks
set state = 'running', event = 'claim', reason = null, attempt = attempt + 1, tries = tries + 1,
    worker_id = %(actor)s, lease_expires_at = coalesce(%(now)s::timestamptz, now()) + %(lease)s::interval,
    started_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
from picked
where tasks.id = picked.id and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning tasks.id, tasks.type, tasks.attempt, tasks.tries, tasks.max_tries, tasks.input, tasks.lease_expires_at

-- name: renew_running_tasks
update interlock.tasks
set lease_expires_at = coalesce(%(now)s::timestamptz, now()) + %(lease)s::interval,
    updated_at = coalesce(%(now)s::timestamptz, now())
from unnest(%(ids)s::uuid[], %(attempts)s::int[]) as held (id, attempt)
where tasks.id = held.id and tasks.attempt = held.attempt and state = 'running'
returning tasks.id

-- name: settle_running_tasks
-- moves: task running -succeed-> done
-- moves: task running -fail-> error
-- moves: task running -retry-> pending
-- moves: task running -return-> pending
-- An attempt that is no longer the one that runs writes nothing: its row is missing from what is returned.
update interlock.tasks
set state = case outcome.event
        when 'succeed' then 'done' when 'fail' then 'error' when 'retry' then 'pending' when 'return' then 'pending'
    end,
    event = outcome.event, reason = outcome.reason, output = outcome.output, error = outcome.error,
    cost = coalesce(outcome.cost, tasks.cost), run_at = coalesce(outcome.run_at, tasks.run_at),
    tries = tasks.tries - (outcome.event = 'return')::int, lease_expires_at = null,
    finished_at = case when outcome.event in ('succeed', 'fail') then coalesce(%(now)s::timestamptz, now()) end,
    updated_at = coalesce(%(now)s::timestamptz, now())
from unnest(%(ids)s::uuid[], %(attempts)s::int[], %(events)s::text[], %(reasons)s::text[], %(outputs)s::jsonb[],
    %(errors)s::jsonb[], %(costs)s::float8[], %(run_ats)s::timestamptz[])
    as outcome (id, attempt, event, reason, output, error, cost, run_at)
where tasks.id = outcome.id and tasks.attempt = outcome.attempt and tasks.state = 'running'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning tasks.id

-- name: recover_expired_tasks
-- moves: task running -expire-> pending
-- moves: task running -exhaust-> error
-- An array, not a join: the planner then goes by the primary key, however many it thinks there may be.
update interlock.tasks
set state = case when tries < max_tries then 'pending' else 'error' end,
    event = case when tries < max_tries then 'expire' else 'exhaust' end,
    reason = format('the lease of %%s on attempt %%s ran out at %%s', worker_id, attempt, lease_expires_at),
    lease_expires_at = null,
    finished_at = case when tries < max_tries then null else coalesce(%(now)s::timestamptz, now()) end,
    updated_at = coalesce(%(now)s::timestamptz, now())
where id = any (array(
        select id
        from interlock.tasks
        where lease_expires_at < coalesce(%(now)s::timestamptz, now())
        order by lease_expires_at
        limit %(limit)s
        for update skip locked
    ))
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id, event

-- name: cancel_unfinished_tasks
-- moves: task waiting -cancel-> canceled
-- moves: task pending -cancel-> canceled
-- moves: task running -cancel-> canceled
update interlock.tasks
set state = 'canceled', event = 'cancel', reason = %(reason)s, lease_expires_at = null,
    finished_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
where id = any (%(ids)s::uuid[]) and state in ('waiting', 'pending', 'running')
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: skip_waiting_tasks
-- moves: task waiting -skip-> skipped
update interlock.tasks
set state = 'skipped', event = 'skip', reason = %(reason)s,
    finished_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
where id = any (%(ids)s::uuid[]) and state = 'waiting'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: requeue_ended_tasks
-- moves: task error -requeue-> pending
-- moves: task canceled -requeue-> pending
-- The tries begin anew; the attempt, which is the fence, goes on from where it was.
update interlock.tasks
set state = 'pending', event = 'requeue', reason = %(reason)s, tries = 0, finished_at = null,
    run_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, now())
where id = any (%(ids)s::uuid[]) and state in ('error', 'canceled')
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: read_task
select id, namespace, type, state, event, reason, priority, run_at, attempt, tries, max_tries, worker_id,
    lease_expires_at, job_id, step, input, output, error, cost, created_at, started_at, finished_at, updated_at
from interlock.tasks
where id = %(id)s

-- name: read_task_history
select from_state, to_state, event, reason, actor, attempt, recorded_at
from interlock.audit_logs
where task_id = %(id)s
order by id
