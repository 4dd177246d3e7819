-- Statements that write to `tasks`. Each move is written in one statement, whose header declares it.
--
-- In all of them `now` is null in production and the clock of the test in tests. Times of moves are those of
-- clock_timestamp(), since now() is the start of the transaction, which may be that of a handler; conditions use now(),
-- since a volatile function there prevents the use of an index. `actor` goes into the audit records;
-- it is set for the transaction only, so that a pooler such as PgBouncer can share the connection.

-- name: release_waiting_tasks
-- The function of the same name makes the move and notifies the workers.
select ids
from interlock.release_waiting_tasks(%(actor)s, %(ids)s::uuid[], %(held_by)s::text, %(reason)s, %(now)s::timestamptz)

-- name: hold_pending_tasks
-- moves: task pending -hold-> waiting
update interlock.tasks
set state = 'waiting', event = 'hold', held_by = %(held_by)s,
    reason = interlock.hold_reason(%(held_by)s::text,
        case %(held_by)s::text when 'namespace' then namespace else array_to_string(limit_keys, ', ') end,
        %(detail)s::text),
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
where id = any (%(ids)s::uuid[]) and state = 'pending'
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id

-- name: claim_pending_tasks
-- moves: task pending -claim-> running
-- Each namespace gives at most `each` tasks, so that none starves the others. Of each type the index `tasks_claim` gives
-- the tasks in the order of the claim; the scans of a worker with several types are merged in this order, row by row:
-- store/tasks.py repeats the innermost SELECT for each type. A task is locked only when its turn has come, and tasks that
-- others have locked are passed over; its conditions are checked again on the version that is locked, because it may have
-- been claimed and put back for later since the scan. The array, instead of a join, makes the planner find the rows by the primary key,
-- however small it estimates the table. `least_crashes` and `most_crashes` are both 0 for tasks that may run beside others;
-- a worker that runs nothing else claims one that is suspected of killing workers. With `recent`, tasks that became due
-- earlier than that are not looked at: their index entries may be dead, while an old snapshot is held open.
-- Tasks with a limit are claimed only with `limited_namespaces`, which are null in other claims: the function that takes
-- their tokens is not called then. docs/decisions/0022-limits.md and 0044-claims-by-type.md have the reasons.
-- The inputs of simple steps are gathered here: docs/decisions/0012-step-inputs-in-the-claim.md has the measurements.
with picked as materialized (
    select found.id
    from unnest(%(namespaces)s::text[]) as wanted (namespace)
        cross join lateral (
            select locked.id
            from (
                select place
                from (
                    (select ctid as place, crashes, priority, run_at, id
                    from interlock.tasks
                    where state = 'pending' and limit_keys is null and tasks.namespace = wanted.namespace
                        and type = (%(types)s::text[])[1]
                        and crashes >= %(least_crashes)s::smallint and crashes <= %(most_crashes)s::smallint
                        and run_at <= coalesce(%(now)s::timestamptz, now())
                        and run_at >= coalesce(%(now)s::timestamptz, now()) - %(recent)s::interval
                    order by crashes, priority desc, run_at, id)
                ) as each_type
                order by crashes, priority desc, run_at, id
            ) as next
                cross join lateral (
                    select id
                    from interlock.tasks
                    where ctid = next.place and state = 'pending'
                        and crashes >= %(least_crashes)s and crashes <= %(most_crashes)s
                        and run_at <= coalesce(%(now)s, now())
                    for update skip locked
                ) as locked
            limit %(each)s
        ) as found
    limit %(limit)s
)
update interlock.tasks
set state = 'running', event = 'claim', reason = null, attempt = attempt + 1, tries = tries + 1,
    worker_id = %(actor)s, lease_expires_at = coalesce(%(now)s::timestamptz, now()) + %(lease)s::interval,
    started_at = coalesce(%(now)s, clock_timestamp()), updated_at = coalesce(%(now)s, clock_timestamp()),
    -- Steps are created without an app: one without a webhook URL takes that of the app of the first worker.
    callback_url = coalesce(callback_url, case when job_id is not null then %(callback_url)s::text end)
where tasks.id = any (array(select id from picked) || array(
        select interlock.take_limited_tasks(%(limited_namespaces)s::text[], %(types)s::text[],
            %(least_crashes)s::smallint, %(most_crashes)s::smallint, %(each)s, %(limit)s, %(now)s::timestamptz)
        where %(limited_namespaces)s::text[] is not null
    ))
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id, type, namespace, attempt, tries, max_tries,
    nullif(input, '{}'),
    -- One column that is mostly null costs the worker less than ten.
    case
        when num_nonnulls(timeout_seconds, backoff, checkpoint, limit_keys, callback_url,
            job_id, correlation_id, traceparent, cancel_requested_at) > 0
        then jsonb_build_object('timeout_seconds', timeout_seconds, 'backoff', backoff,
            'checkpoint', checkpoint, 'limit_keys', limit_keys, 'callback_url', callback_url,
            'job_id', job_id, 'step', step, 'correlation_id', correlation_id,
            'traceparent', traceparent, 'unwanted', cancel_requested_at is not null,
            'job', case when tasks.job_id is not null then coalesce((
                -- Simple steps, which are nearly all. The function step_inputs takes twice as long: its errors are
                -- caught in a subtransaction.
                select steps.handed || jsonb_build_object('job_input', given.input,
                    'results', coalesce(found.results, '{}'), 'item', tasks.input -> 'item',
                    'index', tasks.input -> 'index')
                from (select id, workflow_id, input from interlock.jobs where jobs.id = tasks.job_id limit 1) as jobs
                    cross join lateral (
                        select step, kind, edges, simple, handed, spec
                        from interlock.workflow_steps
                        where workflow_id = jobs.workflow_id and step = case
                                when tasks.part_of is null then tasks.step
                                else left(tasks.step, -length('[' || tasks.part || ']'))
                            end
                        limit 1
                    ) as steps
                    cross join lateral (
                        select case
                                when tasks.part_of is null or steps.spec ->> 'over_input' is null then jobs.input
                                -- The map stores the job's input without the list that it maps over.
                                else (select parts_job_input from interlock.tasks as map where id = tasks.part_of)
                            end as input
                    ) as given
                    left join lateral (
                        select jsonb_object_agg(edges.upstream, upstream.output -> 'result')
                                filter (where upstream.is_done and upstream.is_small) as results,
                            bool_and(upstream.is_small) as are_small
                        from interlock.workflow_edges as edges
                            cross join lateral (
                                select output, state = 'done' or reused as is_done,
                                    coalesce(pg_column_size(output), 0) < 8000 as is_small
                                from interlock.tasks as before
                                where before.job_id = jobs.id and before.step = edges.upstream
                                limit 1
                            ) as upstream
                        where edges.workflow_id = jobs.workflow_id and edges.downstream = steps.step
                            -- A part gets its item, not the whole list again.
                            and (tasks.part_of is null or edges.upstream is distinct from steps.spec ->> 'over')
                    ) as found on steps.edges > 0
                where steps.simple and (steps.kind = 'map') = (tasks.part_of is not null)
                    and coalesce(pg_column_size(given.input), 0) < 8000
                    and found.are_small is not false
            ), interlock.step_inputs(tasks)) end)
    end,
    -- The seconds that it was pending and due.
    extract(epoch from coalesce(%(now)s::timestamptz, now()) - tasks.run_at)::float8

-- name: find_claims_without_reply
-- Tasks that this worker has claimed within a time, for a worker that lost the reply to a claim with its connection.
-- Few tasks are running at a time, and it is rarely asked: the index of leases is good enough.
select id, type, namespace, attempt, tries, max_tries
from interlock.tasks
where lease_expires_at is not null and worker_id = %(worker)s and started_at > now() - %(within)s::interval

-- name: until_next_run
-- Returns the time until the next pending task without a limit of these namespaces is due, by the server's clock. A task
-- that became due within the last second counts: it was not due at the worker's latest claim, and no notification may come
-- for it.
-- At most a day, because an interval cannot hold some far times.
with recursive levels as (
    -- The first such task of each namespace, type and priority, one index look-up each: within a priority, the claim
    -- index is in the order of run_at. Tasks that were due before are not read: they may be many, and other workers'.
    select served.namespace, handled.type, first.priority, first.run_at
    from unnest(%(namespaces)s::text[]) as served (namespace)
        cross join unnest(%(types)s::text[]) as handled (type)
        cross join lateral (
            select priority, run_at
            from interlock.tasks
            where state = 'pending' and limit_keys is null and tasks.namespace = served.namespace
                and tasks.type = handled.type and crashes = 0
                and tasks.run_at > coalesce(%(now)s::timestamptz, now()) - interval '1 second'
            order by priority desc, run_at, id
            limit 1
        ) as first
    union all
    select levels.namespace, levels.type, lower.priority, lower.run_at
    from levels
        cross join lateral (
            select priority, run_at
            from interlock.tasks
            where state = 'pending' and limit_keys is null and tasks.namespace = levels.namespace
                and tasks.type = levels.type and crashes = 0 and tasks.priority < levels.priority
                and tasks.run_at > coalesce(%(now)s::timestamptz, now()) - interval '1 second'
            order by priority desc, run_at, id
            limit 1
        ) as lower
)
select least(min(run_at) - coalesce(%(now)s::timestamptz, now()), '1 day') as remaining,
    coalesce(%(now)s::timestamptz, clock_timestamp()) as server_time
from levels

-- name: stamp_limit_starts
-- Runs after the commit of a claim of tasks with a limit.
select from interlock.stamp_limit_starts(%(now)s::timestamptz)

-- name: until_limited_start
select interlock.until_limited_start(%(namespaces)s::text[], %(types)s::text[], %(now)s::timestamptz) as remaining

-- name: renew_running_tasks
-- Renews leases (the heartbeat of tasks), stores new progress, and returns tasks with a cancel request. Rows that are
-- locked, by a client or by their own settle, are returned without being renewed: waiting for one would let the leases
-- of the others run out, and holding the others meanwhile would block their settles.
with free as materialized (
    select id
    from interlock.tasks
    where id = any (%(ids)s::uuid[]) and case when state = 'running' then true else false end
    for no key update skip locked
), renewed as (
    update interlock.tasks
    set lease_expires_at = coalesce(%(now)s::timestamptz, now()) + %(lease)s::interval,
        progress = coalesce(held.progress, tasks.progress),
        updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
    from unnest(%(ids)s::uuid[], %(attempts)s::int[], %(progresses)s::jsonb[]) as held (id, attempt, progress)
    where tasks.id = any (array(select id from free)) and tasks.id = held.id and tasks.attempt = held.attempt
    returning tasks.id, tasks.cancel_requested_at, tasks.reason
)
select id, true as renewed, cancel_requested_at, reason
from renewed
union all
select tasks.id, false, null, null
from unnest(%(ids)s::uuid[], %(attempts)s::int[]) as held (id, attempt)
    join interlock.tasks on tasks.id = held.id and tasks.attempt = held.attempt
        and case when state = 'running' then true else false end
where tasks.id = any (%(ids)s::uuid[]) and tasks.id not in (select id from renewed)

-- name: save_checkpoint
update interlock.tasks
set checkpoint = %(checkpoint)s, updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
where id = %(id)s and attempt = %(attempt)s and state = 'running'
returning id

-- name: settle_running_tasks
-- moves: task running -succeed-> done
-- moves: task running -fail-> error
-- moves: task running -retry-> pending
-- moves: task running -return-> pending
-- An attempt that is not the current one writes nothing: the fence. Returns one row, which names the tasks only if some
-- are missing: reading a hundred ids costs the worker more than writing a hundred outcomes costs the database. The
-- array and the CASE make the planner use the primary key, whatever the statistics say about running rows. With `advance`, the
-- trigger that sends the end of a step also advances its job, if that is plain (docs/decisions/0061-advance-in-the-settle.md).
with outcome as materialized (
    select id, attempt, 'succeed' as event, output, null::jsonb as error, null as reason, null::float8 as cost,
        null::float8 as delay, null::jsonb as progress
    from unnest(%(ids)s::uuid[], %(attempts)s::int[], %(outputs)s::jsonb[]) as plain (id, attempt, output)
    union all
    select *
    from jsonb_to_recordset(%(others)s::jsonb) as other (id uuid, attempt int, event text, output jsonb, error jsonb,
        reason text, cost float8, delay float8, progress jsonb)
), settled as (
    update interlock.tasks
    set state = case outcome.event
            when 'succeed' then 'done' when 'fail' then 'error' when 'retry' then 'pending' when 'return' then 'pending'
        end,
        event = outcome.event, reason = outcome.reason, output = outcome.output, error = outcome.error,
        settled_attempt = outcome.attempt,
        cost = coalesce(outcome.cost, tasks.cost), run_at = coalesce(
            coalesce(%(now)s::timestamptz, clock_timestamp()) + make_interval(secs => outcome.delay), tasks.run_at),
        tries = tasks.tries - (outcome.event = 'return')::int, crashes = 0, lease_expires_at = null,
        progress = coalesce(outcome.progress, tasks.progress),
        finished_at = case
            when outcome.event in ('succeed', 'fail') then coalesce(%(now)s::timestamptz, clock_timestamp())
        end,
        updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
    from outcome
    where tasks.id = any (array(select id from outcome)) and tasks.id = outcome.id
        and tasks.attempt = outcome.attempt and case when tasks.state = 'running' then true else false end
        and (select set_config('interlock.actor', %(actor)s, true)) is not null
        and (select set_config('interlock.advance_at_once', %(advance)s::boolean::text, true)) is not null
    returning tasks.id, tasks.state in ('done', 'error') as ended
)
select count(*) as settled,
    array(
        select distinct task_id from interlock.waiters where task_id = any (array(select id from settled where ended))
    ) as awaited,
    case when count(*) < %(expected)s then array_agg(id) end as ids
from settled

-- name: insert_webhooks
-- Runs in the transaction of the settle, for the tasks that it settled. The sender of webhooks is notified at the
-- commit.
with noted as (
    insert into interlock.callbacks (task_id, attempt, state, url)
    select id, attempt, state, callback_url
    from interlock.tasks
    where id = any (%(ids)s::uuid[]) and callback_url is not null and state in ('done', 'error', 'canceled')
    returning id
)
select pg_notify('interlock_duties', 'callbacks')
from noted
limit 1

-- name: lock_expired_tasks_to_cancel
-- Tasks whose lease expired before their worker read the cancel request; with `recent`, within that time.
select id, attempt, namespace, limit_keys, reason
from interlock.tasks
where lease_expires_at < coalesce(%(now)s::timestamptz, now()) and cancel_requested_at is not null
    and lease_expires_at >= coalesce(coalesce(%(now)s::timestamptz, now()) - %(recent)s::interval, '-infinity')
order by lease_expires_at
limit %(limit)s
for update skip locked

-- name: recover_expired_tasks
-- moves: task running -expire-> pending
-- moves: task running -exhaust-> error
-- A lease that ran out is a crash: it gives the try back and is counted apart. With `recent`, leases that ran out before
-- that are not looked at: their index entries may be dead, while an old snapshot is held open. The array, instead of a join, makes the
-- planner use the primary key, however many rows it expects. A step that ends here gets a result document like any
-- other, for readers of its job.
update interlock.tasks
set state = case when crashes + 1 < %(max_crashes)s then 'pending' else 'error' end,
    event = case when crashes + 1 < %(max_crashes)s then 'expire' else 'exhaust' end,
    tries = greatest(tries - 1, 0), crashes = crashes + 1,
    reason = format('the lease of %%s on attempt %%s ran out at %%s; ', worker_id, attempt, lease_expires_at)
        || case when crashes + 1 < %(max_crashes)s
            then format('it may have killed its worker (%%s of %%s times)', crashes + 1, %(max_crashes)s::int)
            else format(%(message)s, crashes + 1) end,
    error = case when crashes + 1 < %(max_crashes)s then error else jsonb_build_object('type', 'WorkerCrashed',
        'traceback', null, 'message', format(%(message)s, crashes + 1), 'retryable', true) end,
    output = case when crashes + 1 < %(max_crashes)s or job_id is null then output else jsonb_build_object('step', step,
        'success', false, 'result', null, 'status', 'failed', 'error', jsonb_build_object('type', 'WorkerCrashed',
            'traceback', null, 'message', format(%(message)s, crashes + 1), 'retryable', true),
        'metadata', jsonb_build_object('started_at', started_at,
            'completed_at', coalesce(%(now)s::timestamptz, clock_timestamp()), 'execution_ms', null,
            'worker_id', worker_id, 'attempt', attempt, 'retryable', true),
        'orchestration_metadata', jsonb_build_object()) end,
    lease_expires_at = null,
    finished_at = case when crashes + 1 < %(max_crashes)s then null else coalesce(%(now)s::timestamptz, clock_timestamp()) end,
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
where id = any (array(
        select id
        from interlock.tasks
        where lease_expires_at < coalesce(%(now)s::timestamptz, now()) and cancel_requested_at is null
            and lease_expires_at >= coalesce(coalesce(%(now)s::timestamptz, now()) - %(recent)s::interval, '-infinity')
        order by lease_expires_at
        limit %(limit)s
        for update skip locked
    ))
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id, event, namespace, limit_keys

-- name: has_suspected_tasks
-- Whether due tasks of these namespaces are suspected of killing their worker, so that they wait for a worker that runs
-- nothing else.
select exists (
    select from interlock.tasks
    where state = 'pending' and limit_keys is null and namespace = any (%(namespaces)s::text[]) and crashes > 0
        and run_at <= coalesce(%(now)s::timestamptz, now()) and type = any (%(types)s::text[])
) or exists (
    select from interlock.tasks
    where state = 'pending' and limit_keys is not null and namespace = any (%(namespaces)s::text[]) and crashes > 0
        and run_at <= coalesce(%(now)s::timestamptz, now()) and type = any (%(types)s::text[])
) as found

-- name: exonerate_tasks
-- Clears the suspicion against tasks whose lease ran out although their worker lives. Returns these with their
-- namespace, and, without one, those whose lease has not been recovered yet.
with cleared as (
    update interlock.tasks
    set crashes = 0, updated_at = coalesce(%(now)s::timestamptz, now())
    from unnest(%(ids)s::uuid[], %(attempts)s::int[]) as held (id, attempt)
    where tasks.id = any (%(ids)s::uuid[]) and tasks.id = held.id and tasks.attempt = held.attempt
        and state = 'pending' and crashes > 0
    returning tasks.id, tasks.namespace
)
select id, namespace
from cleared
union all
select tasks.id, null
from unnest(%(ids)s::uuid[], %(attempts)s::int[]) as held (id, attempt)
    join interlock.tasks on tasks.id = held.id and tasks.attempt = held.attempt and state = 'running'
where tasks.id = any (%(ids)s::uuid[])

-- name: lock_jobs_of_steps
-- A client that moves several waiting steps locks their jobs first, as the orchestrator does, which prevents deadlocks.
select count(*) as jobs
from interlock.lock_jobs(array(
    select distinct job_id
    from interlock.tasks
    where id = any (%(ids)s::uuid[]) and job_id is not null and state in ('waiting', 'pending')
))

-- name: cancel_unfinished_tasks
-- moves: task waiting -cancel-> canceled
-- moves: task pending -cancel-> canceled
-- moves: task running -cancel-> canceled
-- `attempt` is the fence, which the guard checks, too; null cancels any attempt. With `running`, running tasks are
-- canceled as well, and steps that wait for their parts or their child job.
update interlock.tasks
set state = 'canceled', event = 'cancel', reason = coalesce(%(reason)s, 'canceled by ' || %(actor)s::text),
    held_by = null, lease_expires_at = null,
    settled_attempt = coalesce(case when state = 'running' then unwanted.attempt end, settled_attempt),
    finished_at = coalesce(%(now)s::timestamptz, clock_timestamp()),
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
from unnest(%(ids)s::uuid[], %(attempts)s::int[]) as unwanted (id, attempt)
where tasks.id = unwanted.id and tasks.attempt = coalesce(unwanted.attempt, tasks.attempt)
    and (
        state in ('waiting', 'pending') and (%(running)s or coalesce(held_by not in ('job', 'parts'), true))
        or state = 'running' and %(running)s
    )
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning tasks.id, tasks.limit_keys, tasks.worker_id,
    exists (select from interlock.waiters where task_id = tasks.id) as awaited

-- name: request_cancel_of_running_tasks
-- The worker that runs the task reads the request with its next lease renewal; a notification makes it look at once.
update interlock.tasks
set cancel_requested_at = coalesce(cancel_requested_at, %(now)s::timestamptz, now()), reason = %(reason)s
where id = any (%(ids)s::uuid[]) and state = 'running'
returning id, worker_id

-- name: skip_waiting_tasks
-- moves: task waiting -skip-> skipped
-- The caller has resolved the steps after these already: no message is sent.
update interlock.tasks
set state = 'skipped', event = 'skip', reason = unwanted.reason, held_by = null,
    skipped_by_failure = unwanted.skipped_by_failure, advanced = true, unresolved = 0,
    finished_at = coalesce(%(now)s::timestamptz, clock_timestamp()),
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
from unnest(%(ids)s::uuid[], %(reasons)s::text[], %(skipped_by_failure)s::boolean[])
        as unwanted (id, reason, skipped_by_failure)
where tasks.id = any (%(ids)s::uuid[]) and tasks.id = unwanted.id
    and case when tasks.state = 'waiting' then true else false end
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning tasks.id

-- name: succeed_waiting_tasks
-- moves: task waiting -succeed-> done
-- Completes steps that need no worker: sleep, signal, approval, map and child steps. Results are JSON texts. The caller has
-- resolved the steps after these already: no message is sent.
update interlock.tasks
set state = 'done', event = 'succeed', reason = null, held_by = null, wait_until = null, advanced = true, unresolved = 0,
    output = interlock.engine_output(tasks.step, ended.result::jsonb, null,
        coalesce(%(now)s::timestamptz, clock_timestamp())),
    finished_at = coalesce(%(now)s::timestamptz, clock_timestamp()),
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
from unnest(%(ids)s::uuid[], %(results)s::text[]) as ended (id, result)
where tasks.id = any (%(ids)s::uuid[]) and tasks.id = ended.id
    and case when tasks.state = 'waiting' then true else false end
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning tasks.id

-- name: fail_waiting_tasks
-- moves: task waiting -fail-> error
-- Fails steps that need no worker, such as a map with too many failed parts or a rejected approval.
update interlock.tasks
set state = 'error', event = 'fail', reason = ended.error ->> 'message', held_by = null, wait_until = null,
    advanced = true, unresolved = 0, error = ended.error,
    output = interlock.engine_output(tasks.step, null, ended.error,
        coalesce(%(now)s::timestamptz, clock_timestamp())),
    finished_at = coalesce(%(now)s::timestamptz, clock_timestamp()),
    updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
from unnest(%(ids)s::uuid[], %(errors)s::jsonb[]) as ended (id, error)
where tasks.id = any (%(ids)s::uuid[]) and tasks.id = ended.id
    and case when tasks.state = 'waiting' then true else false end
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning tasks.id

-- name: requeue_ended_tasks
-- moves: task error -requeue-> pending
-- moves: task canceled -requeue-> pending
-- Resets tries and crashes; the attempt, which is the fence, keeps rising. Not for steps: the job is retried as a whole.
update interlock.tasks
set state = 'pending', event = 'requeue', reason = %(reason)s, tries = 0, crashes = 0, finished_at = null,
    cancel_requested_at = null,
    run_at = coalesce(%(now)s::timestamptz, now()), updated_at = coalesce(%(now)s::timestamptz, clock_timestamp())
where id = any (%(ids)s::uuid[]) and state in ('error', 'canceled') and job_id is null
    and (select set_config('interlock.actor', %(actor)s, true)) is not null
returning id, namespace, limit_keys

-- name: read_tasks
select id, namespace, type, state, event, reason, held_by, priority, run_at, attempt, tries, crashes, max_tries,
    worker_id, lease_expires_at, job_id, step, limit_keys, unique_key, request_id, tags, correlation_id, input, output,
    error, cost, progress, created_at, started_at, finished_at, updated_at
from interlock.tasks
where id = any (%(ids)s::uuid[])

-- name: notify_tasks
-- Of tasks that became pending again, with the time at which they were due before.
select pg_notify('interlock_released', namespace),
    case when %(limited)s then pg_notify('interlock_limited', namespace) end
from (select distinct unnest(%(namespaces)s::text[]) as namespace) as changed

-- name: notify_ended_tasks
select pg_notify('interlock_done', id)
from (select distinct unnest(%(ids)s::text[]) as id) as ended

-- name: notify_duties
select pg_notify('interlock_duties', duty)
from (select distinct unnest(%(duties)s::text[]) as duty) as wanted

-- name: notify_worker
select pg_notify('interlock_control', worker)
from (select distinct unnest(%(workers)s::text[]) as worker) as told

-- name: read_task_history
-- From the record `after` on; all of them if `limit` is null.
select id, from_state, to_state, event, reason, actor, database_role, attempt, recorded_at
from interlock.audit_logs
where task_id = %(id)s and id > %(after)s
order by id
limit %(limit)s
