-- Statements that store new tasks: one, many, by COPY, and one whose parameters are all text for any driver.
--
-- Their columns and parameters are those of `OPTIONS` in model/options.py; a test compares them. `actor` goes into the
-- audit records; it is set for the transaction only, so that a pooler such as PgBouncer can share the connection.

-- name: enqueue_task
select id, created
from interlock.enqueue(type => %(type)s, input => %(input)s, namespace => %(namespace)s, priority => %(priority)s,
    delay => %(delay)s::interval, run_at => %(run_at)s::timestamptz, unique_key => %(unique_key)s,
    request_id => %(request_id)s, max_tries => %(max_tries)s, timeout_seconds => %(timeout_seconds)s::float8,
    backoff => %(backoff)s::jsonb, correlation_id => %(correlation_id)s::uuid, limit_keys => %(limit_keys)s::text[],
    limit_weight => %(limit_weight)s, tags => %(tags)s::text[], callback_url => %(callback_url)s,
    traceparent => %(traceparent)s, task_id => %(task_id)s::uuid, actor => %(actor)s)

-- name: enqueue_plain_task
-- The same for a task that has only the options that are never null: eleven null parameters cost the client a tenth of
-- the call.
select id, created
from interlock.enqueue(type => %(type)s, input => %(input)s, namespace => %(namespace)s, priority => %(priority)s,
    max_tries => %(max_tries)s, actor => %(actor)s)

-- name: copy_tasks
-- For tasks that can be neither held nor merged: no limit, no unique key, no request id. The caller makes the ids.
copy interlock.tasks (id, type, input, namespace, priority, run_at, max_tries, timeout_seconds, backoff, correlation_id,
    tags, callback_url, traceparent)
from stdin (format binary)

-- name: insert_plain_task
-- The same as `insert_tasks` for one task that has only the options that are never null: a third of its cost to the server.
-- No row if the namespace is paused or the input too large: the function decides on such a task.
insert into interlock.tasks (id, namespace, type, priority, run_at, max_tries, input)
select %(task_id)s::uuid, %(namespace)s::text, %(type)s::text, %(priority)s::smallint, now(), %(max_tries)s::int,
    %(input)s::jsonb
where (select set_config('interlock.actor', %(actor)s, true)) is not null
    and not exists (select from interlock.namespaces where name = %(namespace)s::text and paused_at is not null)
    and (pg_column_size(%(input)s::jsonb) > nullif(current_setting('interlock.largest_input', true), '')::bigint) is not true
returning case when %(whole)s::boolean then to_jsonb(tasks) end as document

-- name: insert_tasks
-- The rules of the function interlock.enqueue for a set of tasks. Tasks missing from the result existed already, by id,
-- unique key or request id, or are too large; the function decides on them. Sorted, so that two clients that enqueue the
-- same keys wait for each other in the same order and do not deadlock.
insert into interlock.tasks (id, namespace, type, state, held_by, reason, priority, run_at, max_tries, timeout_seconds,
    backoff, unique_key, request_id, limit_keys, limit_weight, tags, callback_url, correlation_id, traceparent,
    input)
select task.task_id, task.namespace, task.type,
    case when paused.name is null and task.limit_keys is null then 'pending' else 'waiting' end,
    case when paused.name is not null then 'namespace' when task.limit_keys is not null then 'limit' end,
    case
        when paused.name is not null
            then interlock.hold_reason('namespace', task.namespace, paused.reason)
        when task.limit_keys is not null then interlock.hold_reason('limit', array_to_string(limits.keys, ', '))
    end,
    task.priority, coalesce(task.run_at, now() + coalesce(task.delay, '0')),
    task.max_tries, task.timeout_seconds, task.backoff, task.unique_key, task.request_id, limits.keys,
    case when task.limit_weight is not null then interlock.render_limit_weight(task.limit_weight, task.input) end,
    task.tags, task.callback_url, task.correlation_id, task.traceparent, task.input
from rows from (
        jsonb_to_recordset(%(tasks)s::jsonb) as (type text, input jsonb, namespace text, priority smallint,
            delay interval, run_at timestamptz, unique_key text, request_id text, max_tries int, timeout_seconds float8,
            backoff jsonb, correlation_id uuid, limit_keys text[], limit_weight text, tags text[],
            callback_url text, traceparent text, task_id uuid)
    ) with ordinality as task (type, input, namespace, priority, delay, run_at, unique_key, request_id, max_tries,
        timeout_seconds, backoff, correlation_id, limit_keys, limit_weight, tags, callback_url, traceparent, task_id,
        place)
    left join interlock.namespaces as paused on paused.name = task.namespace and paused.paused_at is not null
    cross join lateral (
        select case
                when task.limit_keys is not null
                    then interlock.declared_limit_keys(task.type, task.limit_keys, task.input)
            end as keys
        offset 0
    ) as limits
where (select set_config('interlock.actor', %(actor)s, true)) is not null
    and (select set_config('lock_timeout', coalesce(%(lock_timeout)s, current_setting('lock_timeout')), true)) is not null
    and (pg_column_size(task.input) > nullif(current_setting('interlock.largest_input', true), '')::bigint) is not true
order by task.request_id, task.unique_key, task.place
on conflict do nothing
returning id, case when %(whole)s::boolean then to_jsonb(tasks) end as document

-- name: enqueue_tasks
-- One by one in one statement, for tasks that `insert_tasks` found to exist: the function returns the existing task or
-- retries.
select made.id, made.created
from rows from (
        jsonb_to_recordset(%(tasks)s::jsonb) as (type text, input jsonb, namespace text, priority smallint,
            delay interval, run_at timestamptz, unique_key text, request_id text, max_tries int, timeout_seconds float8,
            backoff jsonb, correlation_id uuid, limit_keys text[], limit_weight text, tags text[],
            callback_url text, traceparent text, task_id uuid)
    ) with ordinality as task (type, input, namespace, priority, delay, run_at, unique_key, request_id, max_tries,
        timeout_seconds, backoff, correlation_id, limit_keys, limit_weight, tags, callback_url, traceparent, task_id,
        place)
    cross join lateral interlock.enqueue(type => task.type, input => task.input, namespace => task.namespace,
        priority => task.priority, run_at => task.run_at, delay => task.delay,
        max_tries => task.max_tries, timeout_seconds => task.timeout_seconds, backoff => task.backoff,
        unique_key => task.unique_key, request_id => task.request_id, limit_keys => task.limit_keys,
        limit_weight => task.limit_weight, tags => task.tags, callback_url => task.callback_url, correlation_id => task.correlation_id,
        traceparent => task.traceparent, task_id => task.task_id, actor => %(actor)s::text) as made
order by task.place

-- name: begin_copy
-- Returns the server's time, so that a fast clock of the client does not delay its tasks, and whether COPY may be used.
select now() as now, set_config('interlock.actor', %(actor)s, true) as actor,
    exists (
        select from interlock.namespaces where name = any (%(namespaces)s::text[]) and paused_at is not null
    ) as paused

-- name: enqueue_as_text
select id, created
from interlock.enqueue(type => cast(%(type)s as text), input => cast(cast(%(input)s as text) as jsonb),
    namespace => cast(%(namespace)s as text), priority => cast(cast(%(priority)s as text) as int),
    run_at => cast(cast(%(run_at)s as text) as timestamptz), delay => cast(cast(%(delay)s as text) as interval),
    max_tries => cast(cast(%(max_tries)s as text) as int),
    timeout_seconds => cast(cast(%(timeout_seconds)s as text) as double precision),
    backoff => cast(cast(%(backoff)s as text) as jsonb), unique_key => cast(%(unique_key)s as text),
    request_id => cast(%(request_id)s as text), limit_keys => cast(cast(%(limit_keys)s as text) as text[]),
    limit_weight => cast(%(limit_weight)s as text),
    tags => cast(cast(%(tags)s as text) as text[]), callback_url => cast(%(callback_url)s as text),
    correlation_id => cast(cast(%(correlation_id)s as text) as uuid), traceparent => cast(%(traceparent)s as text),
    task_id => cast(cast(%(task_id)s as text) as uuid), actor => cast(%(actor)s as text))
