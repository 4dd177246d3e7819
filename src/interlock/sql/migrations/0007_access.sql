-- Who may use the API, and how records of moves are found by their time.

-- Tokens are shown once, when they are made; here is only what is needed to recognise them.
create table interlock.tokens (
    id uuid primary key default interlock.new_id(),
    name text not null,
    scope text not null,
    token_hash bytea not null,
    created_by text not null,
    created_at timestamptz not null default now(),
    expires_at timestamptz,
    revoked_at timestamptz,
    revoked_by text,
    last_used_at timestamptz,
    constraint tokens_name check (name <> ''),
    constraint tokens_scope check (scope in ('read', 'operate', 'admin')),
    constraint tokens_hash check (octet_length(token_hash) = 32)
);

create unique index tokens_hash_known on interlock.tokens (token_hash);
-- A name is an actor in the records: it may be used again once its token is revoked.
create unique index tokens_name_in_use on interlock.tokens (name) where revoked_at is null;

-- A key stands in its row from the first moment of its request on, and its answer comes in the same transaction: a row
-- without an answer is never seen by anybody else.
alter table interlock.idempotency_keys
    alter column response_status drop not null,
    alter column response_body drop not null;

-- Records grow at their end, so the time of a block tells nearly as much as an index of all rows, at next to no cost.
create index worker_state_transitions_time on interlock.worker_state_transitions
    using brin (recorded_at) with (pages_per_range = 16, autosummarize = on);
create index job_state_transitions_time on interlock.job_state_transitions
    using brin (recorded_at) with (pages_per_range = 16, autosummarize = on);

create index workers_newest on interlock.workers (created_at desc, id desc);
