-- More ways to store tasks than the one by one of tasks.sql: many in one statement, the announcement of a COPY, and
-- one in which every parameter is text, for whatever driver has the transaction.

-- name: insert_tasks
-- The same rules as in the function interlock.enqueue, for a whole set. What is missing from the answer was there
-- already, under its id, its unique key or its request. Sorted, so that two clients that enqueue the same keys at once
-- wait for each other in one order.
insert into interlock.tasks (id, namespace, type, state, held_by, reason, priority, run_at, max_tries, timeout_seconds,
    backoff, unique_key, request_id, limit_key, tags, callback_url, correlation_id, input)
select task.task_id, task.namespace, task.type,
    case when paused.name is null and task.limit_key is null then 'pending' else 'waiting' end,
    case when paused.name is not null then 'namespace' when task.limit_key is not null then 'limit' end,
    case
        when paused.name is not null
            then format('namespace %%s is paused%%s', task.namespace, ': ' || paused.reason)
        when task.limit_key is not null then format('limit %%s', task.limit_key)
    end,
    task.priority, coalesce(task.run_at, now() + make_interval(secs => coalesce(task.delay_seconds, 0))),
    task.max_tries, task.timeout_seconds, task.backoff, task.unique_key, task.request_id, task.limit_key, task.tags,
    task.callback_url, task.correlation_id, task.input
from rows from (
        jsonb_to_recordset(%(tasks)s::jsonb) as (type text, input jsonb, namespace text, priority int,
            run_at timestamptz, delay_seconds float8, max_tries int, timeout_seconds float8, backoff jsonb,
            unique_key text, request_id text, limit_key text, tags text[], callback_url text, correlation_id uuid,
            task_id uuid)
    ) with ordinality as task (type, input, namespace, priority, run_at, delay_seconds, max_tries, timeout_seconds,
        backoff, unique_key, request_id, limit_key, tags, callback_url, correlation_id, task_id, place)
    left join interlock.namespaces as paused on paused.name = task.namespace and paused.paused_at is not null
where (select set_config('interlock.actor', %(actor)s, true)) is not null
order by task.request_id, task.unique_key, task.place
on conflict do nothing
returning id

-- name: enqueue_tasks
-- One by one within one statement, for what `insert_tasks` found taken: the function settles with whoever has it.
select made.id, made.created
from rows from (
        jsonb_to_recordset(%(tasks)s::jsonb) as (type text, input jsonb, namespace text, priority int,
            run_at timestamptz, delay_seconds float8, max_tries int, timeout_seconds float8, backoff jsonb,
            unique_key text, request_id text, limit_key text, tags text[], callback_url text, correlation_id uuid,
            task_id uuid)
    ) with ordinality as task (type, input, namespace, priority, run_at, delay_seconds, max_tries, timeout_seconds,
        backoff, unique_key, request_id, limit_key, tags, callback_url, correlation_id, task_id, place)
    cross join lateral interlock.enqueue(type => task.type, input => task.input, namespace => task.namespace,
        priority => task.priority, run_at => task.run_at, delay => make_interval(secs => task.delay_seconds),
        max_tries => task.max_tries, timeout_seconds => task.timeout_seconds, backoff => task.backoff,
        unique_key => task.unique_key, request_id => task.request_id, limit_key => task.limit_key,
        tags => task.tags, callback_url => task.callback_url, correlation_id => task.correlation_id,
        task_id => task.task_id, actor => %(actor)s::text) as made
order by task.place

-- name: begin_copy
-- The server's time, so that a client with a fast clock does not put its tasks off; and whether COPY may be used.
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
    request_id => cast(%(request_id)s as text), limit_key => cast(%(limit_key)s as text),
    tags => cast(cast(%(tags)s as text) as text[]), callback_url => cast(%(callback_url)s as text),
    correlation_id => cast(cast(%(correlation_id)s as text) as uuid),
    task_id => cast(cast(%(task_id)s as text) as uuid), actor => cast(%(actor)s as text))
