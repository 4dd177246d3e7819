-- Stores the reasons of waits that change without a move, in the statement that changes them, so that `explain --at` can
-- answer for an earlier moment. A move has its reason in its own record. The functions run as the owner, so that a client
-- needs no right to insert reasons, and refuse to run for another table, as those that write records do.

create or replace function interlock.store_wait_reason(kind text, subject text, cause text, reason text,
    since timestamptz default null, until timestamptz default null, details jsonb default null
) returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    insert into interlock.wait_reasons (kind, subject, cause, reason, since, until, details, actor)
    values (kind, subject, cause, reason, coalesce(since, clock_timestamp()), until, details, interlock.actor());
end
$$;

revoke execute on function interlock.store_wait_reason(text, text, text, text, timestamptz, timestamptz, jsonb) from public;

create or replace function interlock.store_task_reason() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp as $$
begin
    if tg_relid <> 'interlock.tasks'::regclass then
        raise exception 'store_task_reason() is a trigger of interlock.tasks only' using errcode = 'IL004';
    end if;
    -- Numbers in a reason (the use of a limit, the time of its next start) change all the time, and are no other reason.
    if old.held_by is distinct from new.held_by
        or translate(old.reason, '0123456789', '') is distinct from translate(new.reason, '0123456789', '') then
        perform interlock.store_wait_reason('task', new.id::text, new.held_by, new.reason);
    end if;
    return null;
end
$$;

revoke execute on function interlock.store_task_reason() from public;

create or replace trigger store_reason after update of held_by, reason on interlock.tasks for each row
    when (old.state = 'waiting' and new.state = 'waiting') execute function interlock.store_task_reason();

create or replace function interlock.store_job_reason() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp as $$
begin
    if tg_relid <> 'interlock.jobs'::regclass then
        raise exception 'store_job_reason() is a trigger of interlock.jobs only' using errcode = 'IL004';
    end if;
    perform interlock.store_wait_reason('job', new.id::text,
        case when new.compensating then 'compensating' when new.ending is not null then 'ending' end,
        case when new.ending is null then new.reason else format('becomes %s: %s', new.ending, new.ending_reason) end);
    return null;
end
$$;

revoke execute on function interlock.store_job_reason() from public;

create or replace trigger store_reason after update of reason, ending, ending_reason, compensating on interlock.jobs
    for each row when (old.status = new.status and (old.reason is distinct from new.reason
        or old.ending is distinct from new.ending or old.ending_reason is distinct from new.ending_reason
        or old.compensating <> new.compensating))
    execute function interlock.store_job_reason();

create or replace function interlock.store_namespace_reason() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp as $$
begin
    if tg_relid <> 'interlock.namespaces'::regclass then
        raise exception 'store_namespace_reason() is a trigger of interlock.namespaces only' using errcode = 'IL004';
    end if;
    perform interlock.store_wait_reason('namespace', new.name, case when new.paused_at is not null then 'paused' end,
        case
            when new.paused_at is not null then format('paused by %s%s', new.paused_by, ': ' || new.reason)
            else 'resumed'
        end);
    return null;
end
$$;

revoke execute on function interlock.store_namespace_reason() from public;

create or replace trigger store_reason_of_new after insert on interlock.namespaces for each row
    when (new.paused_at is not null) execute function interlock.store_namespace_reason();
create or replace trigger store_reason after update of paused_at, paused_by, reason on interlock.namespaces for each row
    when (old.paused_at is distinct from new.paused_at or old.paused_by is distinct from new.paused_by
        or old.reason is distinct from new.reason)
    execute function interlock.store_namespace_reason();

create or replace function interlock.store_schedule_reason() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp as $$
begin
    if tg_relid <> 'interlock.schedules'::regclass then
        raise exception 'store_schedule_reason() is a trigger of interlock.schedules only' using errcode = 'IL004';
    end if;
    perform interlock.store_wait_reason('schedule', new.name,
        case when new.paused_at is not null then 'paused' when new.error is not null then 'failing' end,
        case
            when new.paused_at is not null
                then concat_ws('; its latest tick failed: ', 'paused' || coalesce(format(' by %s', new.paused_by), '')
                    || coalesce(': ' || new.pause_reason, ''), new.error)
            when new.error is not null then new.error
            when new.resumed_by is not null then format('resumed by %s%s', new.resumed_by, ': ' || new.resume_reason)
            else 'active'
        end);
    return null;
end
$$;

revoke execute on function interlock.store_schedule_reason() from public;

create or replace trigger store_reason_of_new after insert on interlock.schedules for each row
    execute function interlock.store_schedule_reason();
create or replace trigger store_reason after update of paused_at, paused_by, pause_reason, error on interlock.schedules
    for each row
    when ((old.paused_at is null) <> (new.paused_at is null) or old.paused_by is distinct from new.paused_by
        or old.pause_reason is distinct from new.pause_reason or old.error is distinct from new.error)
    execute function interlock.store_schedule_reason();

-- What a process serves, and a time without heartbeats that is over: a process that does not come back has the time of its
-- last heartbeat in its row.
create or replace function interlock.store_worker_reason() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp as $$
begin
    if tg_relid <> 'interlock.workers'::regclass then
        raise exception 'store_worker_reason() is a trigger of interlock.workers only' using errcode = 'IL004';
    end if;
    if tg_op = 'UPDATE' then
        if old.seen_until < new.heartbeat_at and new.heartbeat_at > old.heartbeat_at then
            perform interlock.store_wait_reason('worker', new.id, 'silent', 'no heartbeat', old.seen_until, new.heartbeat_at);
        end if;
        if old.namespaces = new.namespaces and old.types = new.types then
            return null;
        end if;
    end if;
    perform interlock.store_wait_reason('worker', new.id, 'serves', array_to_string(new.namespaces, ', '),
        details => jsonb_build_object('namespaces', new.namespaces, 'types', new.types,
            'role', coalesce(new.metadata ->> 'role', 'worker')));
    return null;
end
$$;

revoke execute on function interlock.store_worker_reason() from public;

create or replace trigger store_reason_of_new after insert on interlock.workers for each row
    execute function interlock.store_worker_reason();
create or replace trigger store_reason after update of namespaces, types, heartbeat_at on interlock.workers for each row
    when (old.namespaces <> new.namespaces or old.types <> new.types
        or old.seen_until < new.heartbeat_at and new.heartbeat_at > old.heartbeat_at)
    execute function interlock.store_worker_reason();
