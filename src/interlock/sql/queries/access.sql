-- Idempotency keys, API tokens, and the sign-in codes and sessions of browsers.

-- name: claim_idempotency_key
-- The transaction that inserts the row holds the key until it ends; others wait here for that end. An expired key
-- counts as free.
insert into interlock.idempotency_keys (actor, request_id, endpoint, request_hash, created_at, expires_at)
values (%(actor)s, %(request_id)s, %(endpoint)s, %(request_hash)s, coalesce(%(now)s::timestamptz, now()),
    coalesce(%(now)s::timestamptz, now()) + %(lifetime)s::interval)
on conflict (actor, request_id) do update
set endpoint = excluded.endpoint, request_hash = excluded.request_hash, response_status = null, response_body = null,
    created_at = excluded.created_at, expires_at = excluded.expires_at
where idempotency_keys.expires_at <= coalesce(%(now)s::timestamptz, now())
returning request_id

-- name: read_idempotency_key
select endpoint, request_hash, response_status, response_body
from interlock.idempotency_keys
where actor = %(actor)s and request_id = %(request_id)s

-- name: store_idempotent_response
update interlock.idempotency_keys
set response_status = %(response_status)s, response_body = %(response_body)s
where actor = %(actor)s and request_id = %(request_id)s
returning request_id

-- name: create_token
insert into interlock.tokens (name, scope, namespaces, token_hash, created_by, created_at, expires_at)
values (%(name)s, %(scope)s, %(namespaces)s::text[], %(token_hash)s, %(actor)s, coalesce(%(now)s::timestamptz, now()),
    coalesce(%(now)s::timestamptz, now()) + %(lifetime)s::interval)
on conflict (name) where revoked_at is null do nothing
returning id, name, scope, namespaces, created_by, created_at, expires_at, revoked_at, revoked_by, last_used_at

-- name: revoke_token
update interlock.tokens
set revoked_at = coalesce(%(now)s::timestamptz, now()), revoked_by = %(actor)s
where name = %(name)s and revoked_at is null
returning id

-- name: list_tokens
select id, name, scope, namespaces, created_by, created_at, expires_at, revoked_at, revoked_by, last_used_at
from interlock.tokens
where %(revoked)s::boolean or revoked_at is null
order by created_at, id

-- name: authenticate_token
select name, scope, namespaces, last_used_at is null or last_used_at < coalesce(%(now)s::timestamptz, now()) - interval '1 minute'
    as is_stale
from interlock.tokens
where token_hash = %(token_hash)s and revoked_at is null
    and (expires_at is null or expires_at > coalesce(%(now)s::timestamptz, now()))

-- name: touch_token
-- The last use, to the minute. Skips a locked row: the transaction that holds it writes the same.
update interlock.tokens
set last_used_at = coalesce(%(now)s::timestamptz, now())
where id = (
    select id
    from interlock.tokens
    where token_hash = %(token_hash)s
    for update skip locked
)
returning id

-- name: count_usable_tokens
select count(*) as tokens
from interlock.tokens
where revoked_at is null and (expires_at is null or expires_at > coalesce(%(now)s::timestamptz, now()))

-- name: find_token
-- A token by its hash, also when it is revoked or expired.
select name, revoked_at is null and (expires_at is null or expires_at > coalesce(%(now)s::timestamptz, now())) as is_usable
from interlock.tokens
where token_hash = %(token_hash)s

-- name: create_sign_in_code
insert into interlock.sign_in_codes (code_hash, token_id, created_at, expires_at)
select %(code_hash)s, id, coalesce(%(now)s::timestamptz, now()),
    coalesce(%(now)s::timestamptz, now()) + %(lifetime)s::interval
from interlock.tokens
where name = %(name)s and revoked_at is null
    and (expires_at is null or expires_at > coalesce(%(now)s::timestamptz, now()))
returning token_id

-- name: create_session_by_code
-- The code is deleted in the same statement, so that it works once; also when it has expired.
with code as (
    delete from interlock.sign_in_codes
    where code_hash = %(code_hash)s
    returning token_id, expires_at
)
insert into interlock.sessions (session_hash, token_id, created_at, last_used_at, expires_at)
select %(session_hash)s, tokens.id, coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now()),
    coalesce(%(now)s::timestamptz, now()) + %(lifetime)s::interval
from code
    join interlock.tokens on tokens.id = code.token_id
where code.expires_at > coalesce(%(now)s::timestamptz, now()) and tokens.revoked_at is null
    and (tokens.expires_at is null or tokens.expires_at > coalesce(%(now)s::timestamptz, now()))
returning token_id

-- name: create_session_by_token
insert into interlock.sessions (session_hash, token_id, created_at, last_used_at, expires_at)
select %(session_hash)s, id, coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now()),
    coalesce(%(now)s::timestamptz, now()) + %(lifetime)s::interval
from interlock.tokens
where token_hash = %(token_hash)s and revoked_at is null
    and (expires_at is null or expires_at > coalesce(%(now)s::timestamptz, now()))
returning token_id

-- name: authenticate_session
select tokens.name, tokens.scope, tokens.namespaces,
    sessions.last_used_at < coalesce(%(now)s::timestamptz, now()) - interval '1 minute' as is_stale
from interlock.sessions
    join interlock.tokens on tokens.id = sessions.token_id
where sessions.session_hash = %(session_hash)s and sessions.expires_at > coalesce(%(now)s::timestamptz, now())
    and sessions.last_used_at > coalesce(%(now)s::timestamptz, now()) - %(idle)s::interval
    and tokens.revoked_at is null
    and (tokens.expires_at is null or tokens.expires_at > coalesce(%(now)s::timestamptz, now()))

-- name: touch_session
-- The last use, to the minute, of the session and of its token.
with used as (
    update interlock.sessions
    set last_used_at = coalesce(%(now)s::timestamptz, now())
    where session_hash = %(session_hash)s
    returning token_id
)
update interlock.tokens
set last_used_at = coalesce(%(now)s::timestamptz, now())
where id = (
    select tokens.id
    from interlock.tokens
        join used on used.token_id = tokens.id
    for update of tokens skip locked
)
returning id

-- name: delete_session
delete from interlock.sessions
where session_hash = %(session_hash)s
returning token_id

-- name: read_task_namespace
select namespace
from interlock.tasks
where id = %(id)s

-- name: read_job_namespace
select namespace
from interlock.jobs
where id = %(id)s

-- name: read_workflow_namespace
-- Of the newest version, unless one is named.
select namespace
from interlock.workflows
where name = %(name)s
    and (version = %(version)s::text or (%(version)s::text is null and replaced_at is null))
order by registered_at desc, id desc
limit 1
