-- Tables, indexes and partitions of the schema `interlock`. `interlock migrate` applies this file once, as migration 1;
-- later changes to tables are files `migrations/0002_*.sql` and on. Functions and their triggers are in `functions/`,
-- the triggers that enforce the lifecycles in `guards.sql`.

-- Returns a UUID of version 7, which sorts by time. PostgreSQL 18 has a function for it.
-- Here and not in `functions/`, because column defaults need it before any table exists.
do $$
begin
    if current_setting('server_version_num')::int >= 180000 then
        create function interlock.new_id() returns uuid language sql volatile parallel safe
            as 'select pg_catalog.uuidv7()';
    else
        -- 48 bits of milliseconds in front of a random UUID, whose version bits 0100 become 0111.
        create function interlock.new_id() returns uuid language sql volatile parallel safe as $f$
            select encode(set_bit(set_bit(
                overlay(uuid_send(gen_random_uuid())
                    placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
                    from 1 for 6),
                52, 1), 53, 1), 'hex')::uuid
        $f$;
    end if;
end
$$;

-- Configuration that database functions need. One row.
create table interlock.settings (
    id int primary key default 1,
    orchestration_queue text not null default 'orchestration_step_results',
    constraint settings_one_row check (id = 1),
    constraint settings_orchestration_queue check (orchestration_queue ~ '^[a-z0-9_]{1,47}$')
);

insert into interlock.settings default values;

-- Workflow definitions -------------------------------------------------------------------------------------------

-- A stored definition never changes: another definition gets another version.
create table interlock.workflows (
    id uuid primary key default interlock.new_id(),
    name text not null,
    version text not null,
    namespace text not null default 'default',
    definition jsonb not null,
    -- read by submit instead of the definition
    root_namespaces text[] not null,
    plain_roots boolean not null,
    timeout_seconds double precision,
    -- defaults of its jobs
    tags text[],
    attributes jsonb,
    callback_url text,
    key text,                                -- of its jobs; "input.a" stands for a field of the input
    on_conflict text,
    registered_at timestamptz not null default now(),
    -- set when a development setting replaced the definition; such a row keeps its jobs and is found by its version only
    replaced_at timestamptz,
    unique (name, version)
);

create table interlock.workflow_steps (
    workflow_id uuid not null references interlock.workflows (id),
    step text not null,
    position int not null,
    kind text not null,
    type text,                               -- task type of the handler; null for kinds that the orchestrator completes
    namespace text not null,
    needed int,                              -- dependencies that must be met; null is all
    rule jsonb,                              -- where counts do not decide: see model/joins.py
    condition text,                          -- `when` of the definition
    cancel_rest boolean not null default false,
    strategy double precision,               -- of a map: share of parts that must be done
    edges int not null,
    -- names of its result in the job's output; empty if its result is the output; null if it is not in the output
    outputs text[],
    compensate text,
    waits_for text,
    priority smallint not null,
    max_tries int not null,
    timeout_seconds double precision,
    backoff jsonb,
    spec jsonb not null,                     -- the step as in the definition
    -- whether the claim statement can gather the step's inputs by itself, and the constant part of these inputs
    simple boolean not null default false,
    handed jsonb not null default '{}',
    limit_keys text[],                       -- templates, rendered from the input of the job: mail:{tenant}
    limit_weight text,                       -- a number or a template
    tags text[],
    callback_url text,
    primary key (workflow_id, step)
);

create index workflow_steps_roots on interlock.workflow_steps (workflow_id) where edges = 0;
create index workflow_steps_outputs on interlock.workflow_steps (workflow_id) where outputs is not null;

create table interlock.workflow_edges (
    workflow_id uuid not null references interlock.workflows (id),
    upstream text not null,
    downstream text not null,
    condition text not null,
    branch boolean not null,
    primary key (workflow_id, upstream, downstream),
    constraint workflow_edges_condition check (condition in ('after', 'on_failure', 'always', 'recovers', 'recovery'))
);

create index workflow_edges_downstream on interlock.workflow_edges (workflow_id, downstream);

-- Jobs -----------------------------------------------------------------------------------------------------------

create table interlock.jobs (
    id uuid primary key default interlock.new_id(),
    parent_job_id uuid references interlock.jobs (id),
    depth int not null default 0,
    status text not null default 'SUBMITTED',
    -- event and reason of the latest move; the guard keeps them in step with the status
    event text,
    reason text,
    worker_count int,                        -- maximum number of steps that run at once; null is no limit
    task_description text not null,
    namespace text not null default 'default',
    input jsonb not null default '{}',
    output jsonb,
    error jsonb,
    created_at timestamptz not null default now(),
    started_at timestamptz,
    completed_at timestamptz,
    updated_at timestamptz not null default now(),
    workflow_id uuid references interlock.workflows (id),
    request_id text,
    correlation_id uuid,
    traceparent text,                        -- W3C trace context of the span that submitted it
    actor text,
    root_namespaces text[],
    timeout_seconds double precision,
    deadline_at timestamptz,
    -- final status and its reason, stored while running steps end and compensations run
    ending text,
    ending_reason text,
    cancel_reason text,                      -- of a failing job: why the child jobs that it waits for are canceled
    compensating boolean not null default false,
    -- counters that save counting the steps
    open_steps int not null default 0,
    failed_steps int not null default 0,
    retried_from uuid,
    -- by step: the document whose result is taken from `retried_from`; for a step that failed or was canceled there without
    -- consequence and does not run again, whether it counts as failed: {"skipped_by_failure": true}; for a map that runs again,
    -- the map whose done parts are kept: {"map_id": …}; for a child step, the child job to retry: {"child_id": …, "iteration": …}
    reused jsonb,
    parent_task_id uuid,
    iteration int not null default 1,        -- of a child job, among those that its step starts one after another
    -- to find it by
    tags text[],
    attributes jsonb,
    callback_url text,                       -- webhook at its end
    -- failures of the orchestrator with this job, and the time of its next try: other jobs need not wait for it
    advance_failures int not null default 0,
    not_before timestamptz,
    -- jobs of one workflow with the same key run one after the other, in this order
    key text,
    key_order bigint,
    on_conflict text,
    debounced_since timestamptz,             -- first submit of a debounce; the last one starts at not_before
    constraint jobs_key check ((key is null) = (key_order is null) and (key is null) = (on_conflict is null)),
    constraint jobs_on_conflict check (on_conflict in ('reject', 'return_existing', 'cancel_in_progress', 'queue')),
    constraint jobs_depth check (depth between 0 and 5),
    constraint jobs_worker_count check (worker_count between 1 and 10),
    constraint jobs_parent_depth check ((parent_job_id is null) = (depth = 0)),
    constraint jobs_not_own_parent check (parent_job_id <> id),
    constraint jobs_ending check (ending in ('FAILED', 'CANCELED')),
    constraint jobs_timeout check (timeout_seconds > 0),
    constraint jobs_open_steps check (open_steps >= 0),
    constraint jobs_tags check (cardinality(tags) <= 100),
    constraint jobs_attributes check (jsonb_typeof(attributes) = 'object')
) with (
    -- A job row is updated several times, for thousands of jobs per second: vacuum while dead rows are few.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_analyze_threshold = 1000
);

create index jobs_children on interlock.jobs (parent_job_id, id) where parent_job_id is not null;
create index jobs_open on interlock.jobs (status, id) where status in ('SUBMITTED', 'PENDING', 'RUNNING');
create unique index jobs_request on interlock.jobs (request_id) where request_id is not null;
create unique index jobs_parent_task on interlock.jobs (parent_task_id, iteration) where parent_task_id is not null;
create index jobs_workflow on interlock.jobs (workflow_id, id) where workflow_id is not null;
-- No other index has this order of columns, so that the planner takes this one whatever the statistics say.
create index jobs_pending on interlock.jobs (workflow_id, created_at, id) where status = 'PENDING' and key is null;
-- Submitted by SQL, or debounced: an orchestrator validates them when they are due.
create index jobs_submitted on interlock.jobs (coalesce(not_before, created_at)) where status = 'SUBMITTED';
-- At most one job of a key runs. The others wait in their order.
create unique index jobs_key_running on interlock.jobs (task_description, key)
    where key is not null and status = 'RUNNING';
create unique index jobs_key_order on interlock.jobs (task_description, key, key_order)
    where key is not null and status in ('SUBMITTED', 'PENDING', 'RUNNING');
create index jobs_key_waiting on interlock.jobs (task_description, key, key_order)
    where key is not null and status in ('SUBMITTED', 'PENDING');
-- Lists of jobs: by key, tag and attribute, by a correlation id of another request or job, and those that did not
-- complete, which are few. Ids are in the order of time.
create index jobs_key on interlock.jobs (key, id) where key is not null;
create index jobs_tags on interlock.jobs using gin (tags) where tags is not null;
create index jobs_attributes on interlock.jobs using gin (attributes jsonb_path_ops) where attributes is not null;
create index jobs_correlation on interlock.jobs (correlation_id, id) where correlation_id <> id;
create index jobs_unsuccessful on interlock.jobs (status, id) where status in ('FAILED', 'CANCELED');
create index jobs_deadline on interlock.jobs (deadline_at)
    where deadline_at is not null and ending is distinct from 'CANCELED' and status in ('SUBMITTED', 'PENDING', 'RUNNING');
create index jobs_not_before on interlock.jobs (not_before)
    where not_before is not null and status in ('SUBMITTED', 'PENDING', 'RUNNING');

-- A queue per job and name: a step consumes the oldest signal that no other has consumed.
create table interlock.signals (
    id bigint generated always as identity primary key,
    job_id uuid not null references interlock.jobs (id) on delete cascade,
    name text not null,
    payload jsonb,
    request_id text,
    sent_by text not null,
    sent_at timestamptz not null default now(),
    consumed_by text,                        -- step
    consumed_at timestamptz,
    constraint signals_consumed_once check ((consumed_by is null) = (consumed_at is null))
);

create index signals_job on interlock.signals (job_id, name, id);
create unique index signals_request on interlock.signals (job_id, request_id) where request_id is not null;
-- A step consumes one signal.
create unique index signals_consumer on interlock.signals (job_id, consumed_by) where consumed_by is not null;

-- Messages that failed repeatedly and were moved to the archive of the queue (dead letters).
create table interlock.orchestration_failures (
    msg_id bigint primary key,
    job_id uuid,
    task_id uuid,
    message jsonb not null,
    error text not null,
    times int not null default 1,
    failed_at timestamptz not null default now(),
    retry_at timestamptz                     -- time at which the message is sent again
);

create index orchestration_failures_task on interlock.orchestration_failures (task_id) where task_id is not null;

-- Tasks ----------------------------------------------------------------------------------------------------------

-- Columns are in the order of their alignment, fixed sizes first, so that no row has padding between them
-- (docs/decisions/0049-bytes-of-a-task.md).
create table interlock.tasks (
    id uuid primary key default interlock.new_id(),
    run_at timestamptz not null default now(),
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    -- the fence: rises with every claim and never falls; max_tries limits tries, not attempts
    attempt int not null default 0,
    tries int not null default 0,
    max_tries int not null default 5,
    unresolved int not null default 0,       -- edges, or parts of a map, whose end is not known yet
    taken int not null default 0,            -- dependencies that are met
    failed int not null default 0,
    -- higher runs sooner
    priority smallint not null default 0,
    -- leases in a row that ran out because the worker was gone, with no settle between them. Such a task is suspected
    -- of killing its worker: it uses up no try, runs alone, and ends in error at a limit of its own
    crashes smallint not null default 0,
    skipped_by_failure boolean not null default false, -- not because of a branch, a condition or an unneeded handler
    superseded boolean not null default false, -- canceled by cancel_rest: its failure is none of the job's
    advanced boolean not null default false, -- its end has been applied to the steps after it
    reused boolean not null default false,
    capped boolean not null default false,   -- its job has a worker_count
    -- the attempt whose outcome was written last: an UPDATE that settles a running task sets it, and the guard compares
    -- it with `attempt`
    settled_attempt int,
    started_at timestamptz,
    finished_at timestamptz,
    lease_expires_at timestamptz,
    namespace text not null default 'default',
    type text not null,
    state text not null default 'pending',
    -- event and reason of the latest move; the guard keeps them in step with the state
    event text,
    reason text,
    worker_id text,
    input jsonb not null default '{}',
    output jsonb,
    error jsonb,
    cost double precision,
    job_id uuid references interlock.jobs (id),
    step text,
    held_by text,                            -- cause of the wait, only while waiting
    limit_keys text[],                       -- all of these limits must have room for it
    limit_weight double precision,           -- counts against max_weight; null is 1
    unique_key text,
    request_id text,
    timeout_seconds double precision,
    backoff jsonb,
    tags text[],
    callback_url text,
    correlation_id uuid,
    traceparent text,                        -- W3C trace context of the span that made it
    progress jsonb,
    checkpoint jsonb,
    cancel_requested_at timestamptz,
    part int,                                -- index among the parts of a map, or among compensations
    part_of uuid,                            -- row of the map
    parts_job_input jsonb,                   -- of a map over a field of the job's input: that input without the field
    compensates uuid,                        -- row of the step that this one undoes, perhaps of a child job
    wait_until timestamptz,
    wait_started_at timestamptz,             -- of a signal or approval step
    assignee text,                           -- who is to send the signal or to answer the approval
    constraint tasks_leased_while_running check ((state = 'running') = (lease_expires_at is not null)),
    constraint tasks_owned_while_running check (state <> 'running' or worker_id is not null),
    constraint tasks_attempt check (attempt >= 0),
    constraint tasks_tries check (tries >= 0 and max_tries >= 1),
    constraint tasks_crashes check (crashes >= 0),
    constraint tasks_step_of_job check ((job_id is null) = (step is null)),
    -- bounds that every client can read back: a hundred years, and years with four digits
    constraint tasks_timeout check (timeout_seconds > 0 and timeout_seconds <= 3155760000),
    constraint tasks_run_at check (run_at >= '1970-01-01 00:00:00+00' and run_at < '9999-01-01 00:00:00+00')
) with (
    -- Thousands of claims per second leave dead entries at the head of the queue: vacuum tables and indexes while
    -- these are few, and without pauses.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_analyze_threshold = 10000,
    vacuum_index_cleanup = on
);

-- The claim walks this index and no other: for each type, its order is exactly the order of the claim, and tasks of types
-- that the worker does not run are in other parts of it. Tasks that are suspected of killing their worker are apart from
-- the others of their type. Tasks with a limit are in an index of their own: a claim that needs no token does not see them.
create index tasks_claim on interlock.tasks (namespace, type, crashes, priority desc, run_at, id)
    where state = 'pending' and limit_keys is null;
create index tasks_claim_limited on interlock.tasks (namespace, crashes, priority desc, run_at, id)
    where state = 'pending' and limit_keys is not null;
-- Recovery walks this one. With the predicate "state = 'running'" the planner would use it for the settle, too.
create index tasks_lease on interlock.tasks (lease_expires_at) where lease_expires_at is not null;
-- One unfinished task per unique key; one task per request id, for as long as the task is kept.
create unique index tasks_unique on interlock.tasks (unique_key)
    where unique_key is not null and state in ('waiting', 'pending', 'running');
create unique index tasks_request on interlock.tasks (request_id) where request_id is not null;
-- Admission counts by the first and walks the second; tasks without a limit are in neither. Tasks with the same keys
-- form a lane: however many wait, a lane is one step of the walk.
create index tasks_limit_taken on interlock.tasks (limit_keys)
    where limit_keys is not null and state in ('pending', 'running');
create index tasks_limit_waiting on interlock.tasks (limit_keys, priority desc, run_at, id)
    where limit_keys is not null and state = 'waiting' and held_by = 'limit';
-- Gives the time at which the next task with a limit becomes due. The last condition, which is always true, keeps the
-- planner from reading this smaller index where a lane is wanted.
create index tasks_limit_due on interlock.tasks (run_at)
    where limit_keys is not null and state = 'waiting' and held_by = 'limit' and run_at > '-infinity';
create index tasks_paused on interlock.tasks (namespace, id) where state = 'waiting' and held_by = 'namespace';
-- Unique: replaying a message creates no second row for a step.
create unique index tasks_job on interlock.tasks (job_id, step) where job_id is not null;
create index tasks_parts on interlock.tasks (part_of, part) where part_of is not null;
-- Steps that count against the worker_count of their job. A step that waits for a limit counts, so that it can start
-- when the limit admits it.
create index tasks_capped on interlock.tasks (job_id)
    where capped and (state in ('pending', 'running') or held_by in ('namespace', 'limit'));
create index tasks_held_steps on interlock.tasks (job_id, held_by, priority desc, part, id)
    where state = 'waiting' and held_by in ('worker_count', 'compensation');
-- Steps that have ended and whose end is not applied yet: few, and briefly, unless a message was lost.
create index tasks_unadvanced on interlock.tasks (coalesce(finished_at, created_at))
    where job_id is not null and not advanced and state in ('done', 'error', 'canceled');
create index tasks_compensations on interlock.tasks (job_id, part) where compensates is not null;
create index tasks_wait_until on interlock.tasks (wait_until) where wait_until is not null and state = 'waiting';
-- Steps that are to be canceled, until their parts or their child job have ended: few.
create index tasks_to_be_canceled on interlock.tasks (cancel_requested_at)
    where cancel_requested_at is not null and state = 'waiting' and held_by in ('job', 'parts');
create index tasks_inbox on interlock.tasks (wait_started_at, id) where state = 'waiting' and held_by = 'signal';
create index tasks_inbox_assignee on interlock.tasks (assignee, wait_started_at, id)
    where state = 'waiting' and held_by = 'signal' and assignee is not null;
-- Lists of tasks (queries/lists.sql). A task that is enqueued without these features and succeeds is in none of them: other
-- conditions of lists have no index, because each claim and each settle would write to it.
create index tasks_not_done on interlock.tasks (state, id) where state in ('error', 'canceled', 'skipped');
create index tasks_waiting on interlock.tasks (id) where state = 'waiting';
create index tasks_unique_key on interlock.tasks (unique_key, id) where unique_key is not null;
create index tasks_correlation on interlock.tasks (correlation_id, id)
    where correlation_id is not null and job_id is null;

create table interlock.namespaces (
    name text primary key,
    paused_at timestamptz,
    paused_by text,
    reason text
);

-- Rules of limits. The key is that of tasks, or a pattern such as mail:*, which gives each key that begins so counters of
-- its own. Per key: at most max_running tasks pending or running; per period at most max_starts starts and max_weight of
-- weight, and no start once tasks have reported max_cost.
create table interlock.limits (
    key text primary key,
    prefix text generated always as (case when right(key, 1) = '*' then left(key, -1) end) stored, -- of a pattern
    max_running int,
    max_starts int,
    max_weight double precision,
    max_cost double precision,
    period interval,
    share double precision not null default 1, -- of a limit that several keys have in common
    updated_at timestamptz not null default now(),
    -- An operator's override, until it is taken back: the columns above have its values, `declared` those that an app
    -- declares, null if none does.
    declared jsonb,
    overridden_by text,
    overridden_at timestamptz,
    override_reason text,
    constraint limits_overridden check (
        (overridden_by is null) = (overridden_at is null) and (overridden_at is not null or declared is null)
    ),
    constraint limits_key check (key <> '' and left(key, -1) !~ '[*{}]' and right(key, 1) !~ '[{}]'),
    constraint limits_max_running check (max_running >= 1),
    constraint limits_period check (
        (period is null) = (num_nonnulls(max_starts, max_weight, max_cost) = 0) and period > '0'
    ),
    constraint limits_bounds check (max_starts >= 1 and max_weight > 0 and max_cost > 0),
    constraint limits_share check (share > 0)
);

create index limits_prefix on interlock.limits (prefix) where prefix is not null;

-- What operators changed: overrides, their end, deletions. Append-only; functions/records.sql protects it.
create table interlock.limit_changes (
    id bigint generated always as identity primary key,
    key text not null,
    event text not null,
    before jsonb,                            -- the rule before and after; null where there was none
    after jsonb,
    reason text,
    actor text not null,
    database_role text not null default session_user,
    recorded_at timestamptz not null,
    constraint limit_changes_event check (event in ('override', 'restore', 'delete'))
);

create index limit_changes_key on interlock.limit_changes (key, id);

-- Starts with their weight, and reported costs, of keys whose rule has a period. A start is written by the statement that
-- claims the task, without a time (infinity); it gets one that is not before the record of the claim.
create table interlock.limit_usage (
    id bigint generated always as identity primary key,
    key text not null,
    used_at timestamptz not null,
    starts int not null default 0,
    weight double precision not null default 0,
    cost double precision not null default 0,
    task_id uuid,                            -- where the weight can be corrected at the end of the attempt
    attempt int
);

create index limit_usage_key on interlock.limit_usage (key, used_at);
create index limit_usage_unstamped on interlock.limit_usage (id) where used_at = 'infinity';
create index limit_usage_task on interlock.limit_usage (task_id, attempt) where task_id is not null;

-- Fair queueing between the lanes of a limit: the lane that was served least, in proportion to its share, is next.
create table interlock.limit_lanes (
    keys text[] primary key,
    served double precision not null
);

-- A tick enqueues a task of a type, or submits a job of a workflow, of its newest version unless one is named.
create table interlock.schedules (
    name text primary key,
    type text,
    workflow text,
    version text,
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
    paused_by text,                          -- while it is paused
    pause_reason text,
    resumed_by text,                         -- of the latest resume, until the next pause
    resume_reason text,
    error text,                              -- of the latest run, when it failed
    updated_at timestamptz not null default now(),
    constraint schedules_subject check ((type is null) <> (workflow is null)),
    constraint schedules_rhythm check ((cron is null) <> (every is null) and every > '0'),
    constraint schedules_missed check (missed in ('skip', 'once', 'all'))
);

create index schedules_due on interlock.schedules (next_at) where paused_at is null;

-- Outbox of webhooks: a row is written in the transaction of the outcome and deleted after delivery.
create table interlock.callbacks (
    id bigint generated always as identity primary key,
    task_id uuid,
    attempt int,
    job_id uuid,
    state text not null,
    url text not null,
    tries int not null default 0,
    next_try_at timestamptz not null default now(),
    error text,
    given_up_at timestamptz,
    created_at timestamptz not null default now(),
    constraint callbacks_subject check ((task_id is null) <> (job_id is null) and (task_id is null) = (attempt is null))
);

create index callbacks_due on interlock.callbacks (next_try_at) where given_up_at is null;
-- A job ends once.
create unique index callbacks_job on interlock.callbacks (job_id) where job_id is not null;

create table interlock.leaders (
    duty text primary key,
    holder text not null,
    expires_at timestamptz not null
);

-- Clients that wait for the end of a task or job: settles notify only these. Unlogged, because notifications are hints.
create unlogged table interlock.waiters (
    task_id uuid not null,
    waiter uuid not null,
    expires_at timestamptz not null,
    primary key (task_id, waiter)
);

-- Workers --------------------------------------------------------------------------------------------------------

-- Pools: supervisors keep the number of unfinished rows of `workers` that belong to a pool at the desired one.
create table interlock.pools (
    name text primary key,
    desired int not null,
    spec jsonb not null default '{}',        -- of its workers
    workspace_id text not null default 'default',
    labels jsonb not null default '{}',
    actor text not null,                     -- who made or scaled it last
    created_at timestamptz not null default now(),
    scaled_at timestamptz not null default now(),
    -- a pool that ends with one supervisor, and the lease of that one on it
    bound_to text,
    supervised_until timestamptz,
    constraint pools_name check (name ~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$'),
    constraint pools_desired check (desired between 0 and 1000),
    constraint pools_bound check ((bound_to is null) = (supervised_until is null))
);

-- A row is supervised when its metadata has a `spec`; other rows belong to processes that register themselves.
create table interlock.workers (
    id text primary key default 'w_' || interlock.new_id(),
    workspace_id text not null default 'default',
    status text not null default 'IDLE',
    -- event and reason of the latest move; the guard keeps them in step with the status
    event text,
    reason text,
    metadata jsonb not null default '{}',
    heartbeat_at timestamptz,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    -- a worker is live while it is RUNNING and until seen_until
    namespaces text[] not null default '{}',
    types text[] not null default '{}',
    seen_until timestamptz,
    -- lease of the supervisor on this row; that of a dead supervisor expires
    supervisor_id text,
    supervised_until timestamptz,
    -- the fence of process starts: rises with each and never falls; a process that reads another number stops
    generation int not null default 0,
    instance text,                           -- the worker_id of tasks that the process holds
    host text,                               -- host on which pid is valid
    pid int,                                 -- null while no process is known
    birth text,                              -- start time of the process as its host reports it: pids are reused
    process_started_at timestamptz,
    memory_bytes bigint,
    -- crashes in a row shortly after a start, the time of the next start, and the latest event of the process
    crashes int not null default 0,
    restart_at timestamptz,
    process_note text,
    suspected_tasks uuid[] not null default '{}', -- tasks that the process held when it crashed last
    pool text,                               -- the pool that it belongs to
    kill_requested_at timestamptz,           -- its process is killed without a grace
    constraint workers_id check (id <> ''),
    constraint workers_supervised check ((supervisor_id is null) = (supervised_until is null)),
    constraint workers_generation check (generation >= 0 and crashes >= 0)
);

create index workers_live on interlock.workers (seen_until) where status = 'RUNNING';
create index workers_newest on interlock.workers (created_at desc, id desc);
create index workers_supervised on interlock.workers (supervisor_id) where metadata ? 'spec';
create index workers_pool on interlock.workers (pool, status) where pool is not null;
-- The worker_id of a task is the id of a worker row, or the instance of a supervised row.
create index workers_instance on interlock.workers (instance) where instance is not null;

-- API ------------------------------------------------------------------------------------------------------------

-- A row and its response are written in one transaction: no other transaction sees a row without a response.
-- The keys of each actor are its own.
create table interlock.idempotency_keys (
    actor text not null,
    request_id text not null,
    endpoint text not null,
    request_hash text not null,
    response_status int,
    response_body text,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null,
    primary key (actor, request_id)
);

create index idempotency_keys_expiry on interlock.idempotency_keys (expires_at);

-- A token is shown once, when it is created; the table stores its hash. Null namespaces mean all.
create table interlock.tokens (
    id uuid primary key default interlock.new_id(),
    name text not null,
    scope text not null,
    namespaces text[],
    token_hash bytea not null,
    created_by text not null,
    created_at timestamptz not null default now(),
    expires_at timestamptz,
    revoked_at timestamptz,
    revoked_by text,
    last_used_at timestamptz,
    constraint tokens_name check (name <> ''),
    constraint tokens_scope check (scope in ('read', 'operate', 'admin')),
    constraint tokens_namespaces check (cardinality(namespaces) > 0 and array_position(namespaces, null) is null),
    constraint tokens_hash check (octet_length(token_hash) = 32)
);

create unique index tokens_hash_known on interlock.tokens (token_hash);
-- The name is the actor in the records; it can be used again after its token is revoked.
create unique index tokens_name_in_use on interlock.tokens (name) where revoked_at is null;

-- Sign-in of browsers. A code is deleted by its use. A session acts as its token, and ends when that is revoked.
create table interlock.sign_in_codes (
    code_hash bytea primary key,
    token_id uuid not null references interlock.tokens (id) on delete cascade,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null,
    constraint sign_in_codes_hash check (octet_length(code_hash) = 32)
);

create table interlock.sessions (
    session_hash bytea primary key,
    token_id uuid not null references interlock.tokens (id) on delete cascade,
    created_at timestamptz not null default now(),
    last_used_at timestamptz not null default now(),
    expires_at timestamptz not null,
    constraint sessions_hash check (octet_length(session_hash) = 32)
);

-- History of figures, for charts ---------------------------------------------------------------------------------

-- Moves, waits, runs and depths by time. `grain` is the length of a row in minutes: 1, 10 or 60. `positions` and `counts`
-- are a sparse histogram: position p holds durations of 2^(p/4) times 100 µs. A row with grain 0 holds the running total
-- of refused moves that was counted last.
create table interlock.figures (
    at timestamptz not null,
    grain smallint not null,
    kind text not null,
    machine text not null,
    namespace text not null default '',
    type text not null default '',
    from_state text not null default '',
    event text not null default '',
    to_state text not null default '',
    total bigint not null,
    positions smallint[],
    counts bigint[],
    primary key (grain, at, kind, machine, namespace, type, from_state, event, to_state),
    constraint figures_grain check (grain in (0, 1, 10, 60)),
    constraint figures_kind check (kind in ('move', 'refused', 'run', 'wait', 'depth', 'oldest')),
    constraint figures_histogram check (cardinality(positions) = cardinality(counts))
);

-- Records of moves -----------------------------------------------------------------------------------------------

-- A secret that only the owner can read. The functions that write records present it; see functions/records.sql.
create table interlock.record_token (
    id int primary key default 1,
    token text not null default gen_random_uuid()::text || gen_random_uuid()::text,
    constraint record_token_one_row check (id = 1)
);

insert into interlock.record_token default values;

-- Append-only, in monthly partitions, which retention drops whole. No foreign keys: records outlive their rows.
-- functions/records.sql creates the partitions and protects them.
-- The index has no id: equal keys share one entry, and a task has few records, which are sorted when they are read.
create table interlock.audit_logs (
    id bigint generated always as identity,
    recorded_at timestamptz not null,
    task_id uuid not null,
    attempt int not null,
    from_state text,
    to_state text not null,
    event text not null,
    reason text,
    actor text not null,                     -- as the client declares it
    database_role text not null              -- the role that the session logged in with
) partition by range (recorded_at);

create index audit_logs_task on interlock.audit_logs (task_id);
-- Records are appended in order of time and of ids: a BRIN index finds ranges of both at next to no cost.
create index audit_logs_time on interlock.audit_logs
    using brin (recorded_at, id) with (pages_per_range = 16, autosummarize = on);

create table interlock.job_state_transitions (
    id bigint generated always as identity,
    recorded_at timestamptz not null,
    job_id uuid not null,
    from_state text,
    to_state text not null,
    event text not null,
    reason text,
    actor text not null,
    database_role text not null
) partition by range (recorded_at);

create index job_state_transitions_job on interlock.job_state_transitions (job_id);
create index job_state_transitions_time on interlock.job_state_transitions
    using brin (recorded_at, id) with (pages_per_range = 16, autosummarize = on);

create table interlock.worker_state_transitions (
    id bigint generated always as identity,
    recorded_at timestamptz not null,
    worker_id text not null,
    from_state text,
    to_state text not null,
    event text not null,
    reason text,
    actor text not null,
    database_role text not null
) partition by range (recorded_at);

create index worker_state_transitions_worker on interlock.worker_state_transitions (worker_id);
create index worker_state_transitions_time on interlock.worker_state_transitions
    using brin (recorded_at, id) with (pages_per_range = 16, autosummarize = on);

-- Counts of the recorded moves of workers and jobs, for metrics: they outlive supervisors and records. `bucket` bounds of
-- the histogram were reached by the time spent in `from_state`. `counted_until` is the time up to which records are counted.
create table interlock.move_counts (
    machine text not null,
    from_state text not null,
    to_state text not null,
    bucket int not null,
    moves bigint not null,
    seconds double precision not null,
    primary key (machine, from_state, to_state, bucket)
);

create table interlock.move_counters (
    machine text primary key,
    counted_until timestamptz not null default now()
);

insert into interlock.move_counters (machine) values ('job'), ('worker');

-- A default partition takes records of months that have no partition yet: a late call of add_record_partitions loses
-- none.
create table interlock.audit_logs_default partition of interlock.audit_logs default;
create table interlock.job_state_transitions_default partition of interlock.job_state_transitions default;
create table interlock.worker_state_transitions_default partition of interlock.worker_state_transitions default;

-- Reasons of waits that change without a move: why a task or a job waits now, pauses of namespaces, pauses and errors of
-- schedules, what each process serves and when it sent no heartbeat. A row holds from `since` until the next one of the
-- same subject, unless it has an `until`. functions/wait_reasons.sql writes it; retention deletes it with the records.
create table interlock.wait_reasons (
    id bigint generated always as identity primary key,
    kind text not null,                      -- task, job, namespace, schedule, worker
    subject text not null,                   -- its id or name
    cause text,                              -- of a task `held_by`; null when nothing is in the way any more
    reason text,
    details jsonb,
    actor text not null,
    since timestamptz not null,
    until timestamptz
);

create index wait_reasons_subject on interlock.wait_reasons (kind, subject, id);
create index wait_reasons_since on interlock.wait_reasons (since);
