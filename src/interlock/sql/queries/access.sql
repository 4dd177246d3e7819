-- Idempotency keys and API tokens.

-- name: claim_idempotency_key
-- The transaction that inserts the row holds the key until it ends; others wait here for that end. An expired key
-- counts as free.
insert into interlock.idempotency_keys (request_id, endpoint, request_hash, created_at, expires_at)
values (%(request_id)s, %(endpoint)s, %(request_hash)s, coalesce(%(now)s::timestamptz, now()),
    coalesce(%(now)s::timestamptz, now()) + %(lifetime)s::interval)
on conflict (request_id) do update
set endpoint = excluded.endpoint, request_hash = excluded.request_hash, response_status = null, response_body = null,
    created_at = excluded.created_at, expires_at = excluded.expires_at
where idempotency_keys.expires_at <= coalesce(%(now)s::timestamptz, now())
returning request_id

-- name: read_idempotency_key
select endpoint, request_hash, response_status, response_body
from interlock.idempotency_keys
where request_id = %(request_id)s

-- name: store_idempotent_response
update interlock.idempotency_keys
set response_status = %(response_status)s, response_body = %(response_body)s
where request_id = %(request_id)s
returning request_id

-- name: create_token
insert into interlock.tokens (name, scope, token_hash, created_by, created_at, expires_at)
values (%(name)s, %(scope)s, %(token_hash)s, %(actor)s, coalesce(%(now)s::timestamptz, now()),
    coalesce(%(now)s::timestamptz, now()) + %(lifetime)s::interval)
on conflict (name) where revoked_at is null do nothing
returning id, name, scope, created_by, created_at, expires_at, revoked_at, revoked_by, last_used_at

-- name: revoke_token
update interlock.tokens
set revoked_at = coalesce(%(now)s::timestamptz, now()), revoked_by = %(actor)s
where name = %(name)s and revoked_at is null
returning id

-- name: list_tokens
select id, name, scope, created_by, created_at, expires_at, revoked_at, revoked_by, last_used_at
from interlock.tokens
where %(revoked)s::boolean or revoked_at is null
order by created_at, id

-- name: authenticate_token
select name, scope, last_used_at is null or last_used_at < coalesce(%(now)s::timestamptz, now()) - interval '1 minute'
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
