-- Who does what only one may do. A lead is a lease: whoever holds it renews it, and a dead holder's runs out.

-- name: acquire_leadership
-- Takes a lead that is free or has run out, or prolongs one's own; no row when another holds it.
insert into interlock.leaders (duty, holder, expires_at)
values (%(duty)s, %(holder)s, coalesce(%(now)s::timestamptz, now()) + %(lease)s::interval)
on conflict (duty) do update set holder = excluded.holder, expires_at = excluded.expires_at
where leaders.holder = excluded.holder or leaders.expires_at <= coalesce(%(now)s::timestamptz, now())
returning holder

-- name: resign_leadership
delete from interlock.leaders
where duty = %(duty)s and holder = %(holder)s
returning holder

-- name: read_leader
select holder, expires_at
from interlock.leaders
where duty = %(duty)s and expires_at > coalesce(%(now)s::timestamptz, now())

-- name: lock_duty
-- Held until the transaction ends: even two who both believe that they lead act one after the other.
select pg_advisory_xact_lock(hashtextextended('interlock duty ' || %(duty)s, 0))

-- name: read_clock
-- The time at which the lock was got, not that at which the transaction began: that may lie before what the
-- previous holder wrote.
select coalesce(%(now)s::timestamptz, clock_timestamp()) as now
