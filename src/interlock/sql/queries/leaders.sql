-- Leader election: a lead is a lease that its holder renews; that of a dead holder expires.

-- name: acquire_leadership
-- Takes a lead that is free or expired, or renews one's own; returns no row when another process holds it.
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
-- Held until the transaction ends: two processes that both believe to be the leader act one after the other.
select pg_advisory_xact_lock(hashtextextended('interlock duty ' || %(duty)s, 0))

-- name: read_clock
-- The time at which the lock was acquired, not the start of the transaction, which may be before the writes of the
-- previous holder.
select coalesce(%(now)s::timestamptz, clock_timestamp()) as now
