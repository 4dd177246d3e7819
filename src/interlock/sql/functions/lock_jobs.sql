-- Tells whether canceling an unfinished job has an effect: it is not about to end, or it is failing and waits for its child
-- jobs. A job that compensates does so to the end.
create or replace function interlock.can_be_canceled(job interlock.jobs) returns boolean language sql immutable as $$
    select job.ending is null or job.ending = 'FAILED' and not job.compensating and job.cancel_reason is null
$$;

-- Locks jobs in the order of their ids, which prevents deadlocks. NO KEY UPDATE does not conflict with inserts of rows
-- that reference them. enable_seqscan is off because a plan made while the table is small is kept while it grows.
create or replace function interlock.lock_jobs(wanted uuid[]) returns setof interlock.jobs language plpgsql
    set enable_seqscan = off as $$
begin
    return query
    select * from interlock.jobs where id = any (wanted) order by id for no key update;
end
$$;
