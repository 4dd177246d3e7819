-- What a task can ask for, and the small tables behind limits, paused namespaces, schedules and completion notices.

alter table interlock.tasks
    add column held_by text,                 -- says only while waiting: limit, namespace or dependency
    add column limit_key text,
    add column unique_key text,
    add column request_id text,
    add column timeout_seconds double precision,
    add column backoff jsonb,
    add column tags text[],
    add column callback_url text,
    add column correlation_id uuid,
    add column progress jsonb,
    add column checkpoint jsonb,
    add column cancel_requested_at timestamptz,
    add constraint tasks_timeout check (timeout_seconds > 0);

-- One unfinished task per key; one task per request, for as long as the task is kept.
create unique index tasks_unique on interlock.tasks (unique_key)
    where unique_key is not null and state in ('waiting', 'pending', 'running');
create unique index tasks_request on interlock.tasks (request_id) where request_id is not null;
-- Admission by limits counts the one and walks the other; tasks without a limit are in neither.
create index tasks_limit_taken on interlock.tasks (limit_key)
    where limit_key is not null and state in ('pending', 'running');
create index tasks_limit_waiting on interlock.tasks (limit_key, priority desc, run_at, id)
    where limit_key is not null and state = 'waiting' and held_by = 'limit';
-- When the next task with a limit becomes due.
create index tasks_limit_due on interlock.tasks (run_at)
    where limit_key is not null and state = 'waiting' and held_by = 'limit';
create index tasks_paused on interlock.tasks (namespace, id) where state = 'waiting' and held_by = 'namespace';

create table interlock.namespaces (
    name text primary key,
    paused_at timestamptz,
    paused_by text,
    reason text
);

-- At most max_running tasks of a key pending or running; at most max_starts released per period.
create table interlock.limits (
    key text primary key,
    max_running int,
    max_starts int,
    period interval,
    updated_at timestamptz not null default now(),
    constraint limits_max_running check (max_running >= 1),
    constraint limits_rate check ((max_starts is null) = (period is null) and max_starts >= 1 and period > '0')
);

create table interlock.limit_starts (
    key text not null references interlock.limits (key) on delete cascade,
    started_at timestamptz not null,
    starts int not null
);

create index limit_starts_key on interlock.limit_starts (key, started_at);

create table interlock.schedules (
    name text primary key,
    type text not null,
    namespace text not null default 'default',
    cron text,
    timezone text not null default 'UTC',
    every interval,
    missed text not null default 'once',
    input jsonb not null default '{}',
    options jsonb not null default '{}',
    next_at timestamptz not null,
    last_at timestamptz,
    paused_at timestamptz,
    error text,                              -- why the latest firing failed
    updated_at timestamptz not null default now(),
    constraint schedules_rhythm check ((cron is null) <> (every is null) and every > '0'),
    constraint schedules_missed check (missed in ('skip', 'once', 'all'))
);

create index schedules_due on interlock.schedules (next_at) where paused_at is null;

-- Completion notices to be posted: written in the transaction of the outcome, deleted when delivered.
create table interlock.callbacks (
    id bigint generated always as identity primary key,
    task_id uuid not null,
    attempt int not null,
    state text not null,
    url text not null,
    tries int not null default 0,
    next_try_at timestamptz not null default now(),
    error text,
    given_up_at timestamptz,
    created_at timestamptz not null default now()
);

create index callbacks_due on interlock.callbacks (next_try_at) where given_up_at is null;

create table interlock.leaders (
    duty text primary key,
    holder text not null,
    expires_at timestamptz not null
);

-- Who waits for the end of which task: a hint for whom to wake, lost without harm in a crash.
create unlogged table interlock.waiters (
    task_id uuid not null,
    waiter uuid not null,
    expires_at timestamptz not null,
    primary key (task_id, waiter)
);

-- One hint per statement and namespace, whoever inserts.
create function interlock.notify_pending() returns trigger language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform pg_notify('interlock_tasks', found.namespace)
    from (select distinct namespace from now_row where state = 'pending' and run_at <= now()) as found;
    if exists (select from now_row where held_by = 'limit') then
        perform pg_notify('interlock_duties', 'limits');
    end if;
    return null;
end
$$;

create trigger notify_insert after insert on interlock.tasks
    referencing new table as now_row for each statement execute function interlock.notify_pending();

-- Enqueueing for every client that speaks SQL; the Python client calls it too. `created` is false when the id, the
-- unique key or the request was there already: then `id` is that task's.
create function interlock.enqueue(
    type text,
    input jsonb default '{}',
    namespace text default 'default',
    priority int default 0,
    run_at timestamptz default null,
    delay interval default null,
    max_tries int default 5,
    timeout_seconds double precision default null,
    backoff jsonb default null,
    unique_key text default null,
    request_id text default null,
    limit_key text default null,
    tags text[] default null,
    callback_url text default null,
    correlation_id uuid default null,
    task_id uuid default null,
    actor text default null,
    out id uuid,
    out created boolean
) language plpgsql as $$
#variable_conflict use_variable
declare
    wanted uuid := coalesce(task_id, interlock.new_id());
    paused text;
    hold text;
    why text;
begin
    if actor is not null then
        perform set_config('interlock.actor', actor, true);
    end if;
    if limit_key is not null then
        hold := 'limit';
        why := format('limit %s', limit_key);
    end if;
    select coalesce(': ' || n.reason, '') into paused
    from interlock.namespaces n where n.name = namespace and n.paused_at is not null;
    if found then
        hold := 'namespace';
        why := format('namespace %s is paused%s', namespace, paused);
    end if;
    loop
        insert into interlock.tasks as t (id, namespace, type, state, held_by, reason, priority, run_at, max_tries,
            timeout_seconds, backoff, unique_key, request_id, limit_key, tags, callback_url, correlation_id, input)
        values (wanted, namespace, type, case when hold is null then 'pending' else 'waiting' end, hold, why, priority,
            coalesce(run_at, now() + coalesce(delay, '0')), max_tries, timeout_seconds, backoff, unique_key,
            request_id, limit_key, tags, callback_url, correlation_id, input)
        on conflict do nothing
        returning t.id into id;
        created := id is not null;
        exit when created;
        select t.id into id
        from interlock.tasks t
        where t.id = task_id or t.request_id = request_id
            or t.unique_key = unique_key and t.state in ('waiting', 'pending', 'running')
        limit 1;
        -- The other may have ended since: then the key is free, and the next round takes it.
        exit when found;
    end loop;
end
$$;
