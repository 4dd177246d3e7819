-- Wakes the orchestrators when a due time is stored that comes before the others: the deadline of a job, or the end of
-- a step's wait. An orchestrator waits for the earliest due time that it knows, at most a minute (MAX_TICK_S in
-- orchestrator/settings.py), so that no other time needs a notification: it is read in time.
--
-- Triggers for rows, because those of statements cannot be restricted to a column: an update that does not write the
-- column pays nothing. They run after the statement and see all of its rows, so that only the earliest row notifies.
--
-- Runs as the owner, so that a client that submits a job needs no right to read others.
create or replace function interlock.notify_due_time() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
declare
    due_at timestamptz;
begin
    case tg_relid
        when 'interlock.jobs'::regclass then due_at := new.deadline_at;
        when 'interlock.tasks'::regclass then due_at := new.wait_until;
    end case;
    if not exists (
            select from interlock.jobs
            where deadline_at > now() and deadline_at < due_at and deadline_at is not null and ending is null
                and status in ('SUBMITTED', 'PENDING', 'RUNNING')
        ) and not exists (
            select from interlock.tasks
            where wait_until > now() and wait_until < due_at and wait_until is not null and state = 'waiting'
        )
    then
        perform pg_notify('interlock_orchestration', 'due');
    end if;
    return null;
end
$$;

revoke execute on function interlock.notify_due_time() from public;

create or replace trigger notify_deadline after insert or update of deadline_at on interlock.jobs
    for each row when (new.deadline_at <= now() + interval '1 minute')
    execute function interlock.notify_due_time();

create or replace trigger notify_wait after update of wait_until on interlock.tasks
    for each row when (
        new.state = 'waiting' and new.wait_until is distinct from old.wait_until
        and new.wait_until <= now() + interval '1 minute'
    )
    execute function interlock.notify_due_time();
