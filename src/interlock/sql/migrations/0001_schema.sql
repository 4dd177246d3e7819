-- The tables. What may happen to the state columns is not said here but in the guards, which are generated from
-- lifecycle.py into a migration of their own.

-- Ids that sort by time: version 7 of the UUID, from the server where it has it (18 and later).
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

create table interlock.jobs (
    id uuid primary key default interlock.new_id(),
    parent_job_id uuid references interlock.jobs (id),
    depth int not null default 0,
    status text not null default 'SUBMITTED',
    event text,
    reason text,
    worker_count int not null default 1,
    task_description text not null,
    namespace text not null default 'default',
    input jsonb not null default '{}',
    output jsonb,
    error jsonb,
    created_at timestamptz not null default now(),
    started_at timestamptz,
    completed_at timestamptz,
    updated_at timestamptz not null default now(),
    constraint jobs_depth check (depth between 0 and 5),
    constraint jobs_worker_count check (worker_count between 1 and 10),
    constraint jobs_parent_depth check ((parent_job_id is null) = (depth = 0)),
    constraint jobs_not_own_parent check (parent_job_id <> id)
);

create index jobs_children on interlock.jobs (parent_job_id) where parent_job_id is not null;
create index jobs_open on interlock.jobs (status, id) where status in ('SUBMITTED', 'PENDING', 'RUNNING');

create table interlock.tasks (
    id uuid primary key default interlock.new_id(),
    namespace text not null default 'default',
    type text not null,
    state text not null default 'pending',
    -- the event and the reason of the latest move; the guard sees to it that they are never stale
    event text,
    reason text,
    -- higher runs sooner
    priority smallint not null default 0,
    run_at timestamptz not null default now(),
    -- the fence: grows with every claim and never goes back; tries are what max_tries is held against
    attempt int not null default 0,
    tries int not null default 0,
    max_tries int not null default 5,
    worker_id text,
    lease_expires_at timestamptz,
    job_id uuid references interlock.jobs (id),
    step text,
    input jsonb not null default '{}',
    output jsonb,
    error jsonb,
    cost double precision,
    created_at timestamptz not null default now(),
    started_at timestamptz,
    finished_at timestamptz,
    updated_at timestamptz not null default now(),
    constraint tasks_leased_while_running check ((state = 'running') = (lease_expires_at is not null)),
    constraint tasks_owned_while_running check (state <> 'running' or worker_id is not null),
    constraint tasks_attempt check (attempt >= 0),
    constraint tasks_tries check (tries >= 0 and max_tries >= 1),
    constraint tasks_step_of_job check ((job_id is null) = (step is null))
) with (
    -- The queue's head is claimed away thousands of times a second: dead entries must go while they are few, from
    -- the indexes too, and without pauses.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_analyze_threshold = 10000,
    vacuum_index_cleanup = on
);

-- Claiming walks this index and no other; its order is exactly the order of the claim.
create index tasks_claim on interlock.tasks (namespace, priority desc, run_at, id) where state = 'pending';
-- Recovery walks this one. Its predicate is not "state = 'running'", which would tempt the planner to settle by it.
create index tasks_lease on interlock.tasks (lease_expires_at) where lease_expires_at is not null;
create index tasks_job on interlock.tasks (job_id, step) where job_id is not null;

create table interlock.workers (
    id text primary key default 'w_' || interlock.new_id(),
    workspace_id text not null default 'default',
    status text not null default 'IDLE',
    event text,
    reason text,
    metadata jsonb not null default '{}',
    heartbeat_at timestamptz,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint workers_id check (id <> '')
);

create table interlock.idempotency_keys (
    request_id text primary key,
    endpoint text not null,
    request_hash text not null,
    response_status int not null,
    response_body text not null,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null
);

create index idempotency_keys_expiry on interlock.idempotency_keys (expires_at);

-- The records of every move. They only grow; retention drops whole partitions. No foreign keys: history outlives
-- the rows that it tells of.
create table interlock.audit_logs (
    id bigint generated always as identity,
    task_id uuid not null,
    from_state text,
    to_state text not null,
    event text not null,
    reason text,
    actor text not null,
    attempt int not null,
    recorded_at timestamptz not null default now()
) partition by range (recorded_at);

create index audit_logs_task on interlock.audit_logs (task_id, id);

create table interlock.job_state_transitions (
    id bigint generated always as identity,
    job_id uuid not null,
    from_state text,
    to_state text not null,
    event text not null,
    reason text,
    actor text not null,
    recorded_at timestamptz not null default now()
) partition by range (recorded_at);

create index job_state_transitions_job on interlock.job_state_transitions (job_id, id);

create table interlock.worker_state_transitions (
    id bigint generated always as identity,
    worker_id text not null,
    from_state text,
    to_state text not null,
    event text not null,
    reason text,
    actor text not null,
    recorded_at timestamptz not null default now()
) partition by range (recorded_at);

create index worker_state_transitions_worker on interlock.worker_state_transitions (worker_id, id);
