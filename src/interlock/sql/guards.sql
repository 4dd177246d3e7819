-- Generated from lifecycle.py by `interlock migrate --generate`. Do not edit: change the table and generate anew.

-- Counts a refused move, for any client. Each pair of states has an unlogged sequence, because a rollback does not undo
-- nextval, and an unlogged sequence writes no WAL. Runs as the owner, so that a client needs no right on the sequences.
-- A value that is not a state has no sequence and is not counted.
create or replace function interlock.count_refused_move(machine text, from_state text, to_state text)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    counter constant regclass := to_regclass(
        format('interlock.%I', concat('refused ', machine, ' ', from_state, '>', to_state)));
begin
    if counter is not null then
        perform nextval(counter);
    end if;
end
$$;

create or replace function interlock.refused_moves()
    returns table (machine text, from_state text, to_state text, count bigint)
    language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select part[1], part[2], part[3], pg_sequence_last_value(seqrelid)
    from pg_sequence join pg_class on pg_class.oid = seqrelid
        cross join regexp_match(relname, '^refused (.+) ([^ >]+)>([^ >]+)$') as part
    where relnamespace = 'interlock'::regnamespace and part is not null
        and pg_sequence_last_value(seqrelid) is not null
    order by 1, 2, 3
$$;

create or replace function interlock.refuse_move(
    machine text, row_id text, from_state text, to_state text, allowed text[], code text, problem text
) returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if code <> 'IL006' then
        perform interlock.count_refused_move(machine, from_state, to_state);
    end if;
    raise exception '% %: %; allowed%: %', machine, row_id, problem,
            case when from_state is null then '' else ' from ' || from_state end,
            coalesce(nullif(array_to_string(allowed, ', '), ''), 'none')
        using errcode = code,
            detail = jsonb_build_object('machine', machine, 'row', row_id, 'from', from_state, 'to', to_state,
                'allowed', to_jsonb(allowed))::text;
end
$$;

-- The arguments of the trigger are the name of the machine, why the columns stay, and the columns.
create or replace function interlock.refuse_rewrite() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp as $$
declare
    changed constant text := array_to_string(array(
        select name
        from unnest(tg_argv[2:]) as name
        where to_jsonb(new) -> name is distinct from to_jsonb(old) -> name
    ), ', ');
begin
    if changed = '' then
        return new;
    end if;
    raise exception '% %: cannot change %: %', tg_argv[0], old.id, changed, tg_argv[1]
        using errcode = 'IL004', schema = tg_table_schema, table = tg_table_name;
end
$$;

create or replace function interlock.actor() returns text language sql stable parallel safe as $$
    select coalesce(nullif(pg_catalog.current_setting('interlock.actor', true), ''), session_user::text)
$$;

-- tasks: the task lifecycle

alter table interlock.tasks drop constraint if exists tasks_state;
alter table interlock.tasks add constraint tasks_state
    check (state = any ('{waiting, pending, running, done, error, canceled, skipped}'::text[])) not valid;
alter table interlock.tasks validate constraint tasks_state;

do $$
declare
    counter text;
begin
    for counter in
        select format('refused task %s>%s', source, target)
        from unnest(array['waiting', 'pending', 'running', 'done', 'error', 'canceled', 'skipped']) as source cross join unnest(array['waiting', 'pending', 'running', 'done', 'error', 'canceled', 'skipped']) as target
    loop
        execute format('create unlogged sequence if not exists interlock.%I', counter);
    end loop;
end
$$;

create or replace function interlock.guard_tasks() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp as $$
declare
    known constant text[] := array['waiting', 'pending', 'running', 'done', 'error', 'canceled', 'skipped'];
    events text[];
    allowed text[];
begin
    if tg_op = 'INSERT' and (new.attempt <> 0 or new.settled_attempt is not null) then
        perform interlock.refuse_move('task', new.id::text, null, new.state, array[]::text[], 'IL005',
            format('begins at attempt 0, not %s, and without a settled attempt', new.attempt));
    end if;
    if tg_op = 'INSERT' then
        perform interlock.refuse_move('task', new.id::text, null, new.state, array['waiting', 'pending'],
            case when new.state = any (known) then 'IL003' else 'IL002' end,
            format('cannot begin as %L', new.state));
    elsif tg_op = 'DELETE' then
        perform interlock.refuse_move('task', old.id::text, old.state, old.state, array['done', 'error', 'canceled', 'skipped'], 'IL006',
            format('cannot be deleted while %L, only when it has ended', old.state));
    end if;
    if new.id is distinct from old.id then
        perform interlock.refuse_move('task', old.id::text, old.state, new.state, array[]::text[], 'IL005',
            'an id never changes');
    end if;
    if new.state is distinct from old.state then
        case old.state
            when 'waiting' then allowed := array['pending', 'canceled', 'skipped', 'done', 'error'];
            when 'pending' then allowed := array['running', 'waiting', 'canceled'];
            when 'running' then allowed := array['done', 'error', 'pending', 'canceled'];
            when 'error' then allowed := array['pending'];
            when 'canceled' then allowed := array['pending'];
            else allowed := array[]::text[];
        end case;
        case old.state || '>' || new.state
            when 'waiting>pending' then events := array['release'];
            when 'waiting>canceled' then events := array['cancel'];
            when 'waiting>skipped' then events := array['skip'];
            when 'waiting>done' then events := array['succeed'];
            when 'waiting>error' then events := array['fail'];
            when 'pending>running' then events := array['claim'];
            when 'pending>waiting' then events := array['hold'];
            when 'pending>canceled' then events := array['cancel'];
            when 'running>done' then events := array['succeed'];
            when 'running>error' then events := array['fail', 'exhaust'];
            when 'running>pending' then events := array['retry', 'expire', 'return'];
            when 'running>canceled' then events := array['cancel'];
            when 'error>pending' then events := array['requeue'];
            when 'canceled>pending' then events := array['requeue'];
            else
                perform interlock.refuse_move('task', old.id::text, old.state, new.state, allowed,
                    case when new.state = any (known) then 'IL001' else 'IL002' end,
                    format('cannot move from %L to %L', old.state, new.state));
        end case;
        if (new.event = any (events)) is not true then
            -- The client did not name the event: it follows from the two states if only one fits. A reason that the
            -- client did not set belongs to the move before and is cleared.
            if new.event is distinct from old.event or cardinality(events) > 1 then
                perform interlock.refuse_move('task', old.id::text, old.state, new.state, allowed, 'IL001',
                    format('moves from %L to %L by setting "event" to one of %s, not to %L',
                        old.state, new.state, events, new.event));
            end if;
            new.event := events[1];
            if new.reason is not distinct from old.reason then
                new.reason := null;
            end if;
        end if;
        if new.updated_at is not distinct from old.updated_at then
            new.updated_at := clock_timestamp();
        end if;
    elsif new.event is distinct from old.event then
        perform interlock.refuse_move('task', old.id::text, old.state, new.state, array[]::text[], 'IL001',
            format('stays %L, so that its event cannot become %L', old.state, new.event));
    end if;
    if new.attempt <> old.attempt + (new.state = 'running' and old.state <> 'running')::int then
        perform interlock.refuse_move('task', old.id::text, old.state, new.state, coalesce(allowed, '{}'), 'IL005',
            format('attempt %s cannot follow attempt %s; the fence rises by one with every claim, and only then',
                new.attempt, old.attempt));
    end if;
    if (case
            when old.state = 'running' and new.state is distinct from old.state
                then new.settled_attempt is distinct from old.attempt
                    and (new.event = any (array['succeed', 'fail', 'retry', 'return'])
                        or new.settled_attempt is distinct from old.settled_attempt)
            else new.settled_attempt is distinct from old.settled_attempt
        end) then
        perform interlock.refuse_move('task', old.id::text, old.state, new.state, coalesce(allowed, '{}'), 'IL005',
            case
                when old.state = 'running' and new.state is distinct from old.state
                    then format('%L settles attempt %s: set "settled_attempt" to %s, not to %s; '
                            'a worker that holds an earlier attempt has lost the task',
                        new.event, old.attempt, old.attempt, coalesce(new.settled_attempt::text, 'null'))
                else format('"settled_attempt" changes only when a running task moves, not from %s to %s',
                        coalesce(old.settled_attempt::text, 'null'), coalesce(new.settled_attempt::text, 'null'))
            end);
    end if;
    -- The later time stays: a transaction that began long ago and a clock that was set back do not fail for it.
    new.updated_at := greatest(new.updated_at, old.updated_at);
    return new;
end
$$;

drop trigger if exists guard_insert on interlock.tasks;
create trigger guard_insert before insert on interlock.tasks for each row
    when ((new.state = any ('{waiting, pending}'::text[])) is not true or new.attempt <> 0 or new.settled_attempt is not null)
    execute function interlock.guard_tasks();
alter table interlock.tasks enable always trigger guard_insert;

drop trigger if exists guard_update on interlock.tasks;
create trigger guard_update before update on interlock.tasks for each row
    when (
        new.id is distinct from old.id
        or case
            when new.state = old.state
                then new.event is distinct from old.event or new.updated_at < old.updated_at
                    or new.attempt <> old.attempt or new.settled_attempt is distinct from old.settled_attempt
            else (old.state || ' ' || new.event || ' ' || new.state = any ('{
                    waiting release pending,
                    pending claim running,
                    running succeed done,
                    running fail error,
                    running retry pending,
                    running expire pending,
                    running exhaust error,
                    running return pending,
                    pending hold waiting,
                    waiting cancel canceled,
                    pending cancel canceled,
                    running cancel canceled,
                    waiting skip skipped,
                    waiting succeed done,
                    waiting fail error,
                    error requeue pending,
                    canceled requeue pending
                }'::text[])) is not true
                or new.updated_at <= old.updated_at
                or new.attempt <> old.attempt + (new.state = 'running')::int
                or new.settled_attempt is distinct from case
                    when old.state = 'running' and new.event = any ('{succeed, fail, retry, return}'::text[]) then old.attempt
                    else old.settled_attempt
                end
        end
    )
    execute function interlock.guard_tasks();
alter table interlock.tasks enable always trigger guard_update;

drop trigger if exists guard_fixed on interlock.tasks;
create trigger guard_fixed before update of type, input, job_id, step, part, part_of, compensates, request_id, created_at on interlock.tasks for each row
    when (new.type is distinct from old.type
        or new.input is distinct from old.input
        or new.job_id is distinct from old.job_id
        or new.step is distinct from old.step
        or new.part is distinct from old.part
        or new.part_of is distinct from old.part_of
        or new.compensates is distinct from old.compensates
        or new.request_id is distinct from old.request_id
        or new.created_at is distinct from old.created_at)
    execute function interlock.refuse_rewrite('task', 'a task keeps what it was created with', 'type', 'input', 'job_id', 'step', 'part', 'part_of', 'compensates', 'request_id', 'created_at');
alter table interlock.tasks enable always trigger guard_fixed;

drop trigger if exists guard_outcome on interlock.tasks;
create trigger guard_outcome before update of reason, tries, crashes, worker_id, cost, started_at, finished_at on interlock.tasks for each row
    when (new.state = old.state and old.state = any ('{done, error, canceled, skipped}'::text[]))
    execute function interlock.refuse_rewrite('task', 'the outcome of a task that has ended changes only with a move, which is recorded', 'reason', 'tries', 'crashes', 'worker_id', 'cost', 'started_at', 'finished_at');
alter table interlock.tasks enable always trigger guard_outcome;

drop trigger if exists guard_documents on interlock.tasks;
create trigger guard_documents before update of output, error, progress on interlock.tasks for each row
    when (new.state = old.state and old.state = any ('{done, error, canceled, skipped}'::text[]))
    execute function interlock.refuse_rewrite('task', 'the outcome of a task that has ended changes only with a move, which is recorded', 'output', 'error', 'progress');
alter table interlock.tasks enable always trigger guard_documents;

drop trigger if exists guard_delete on interlock.tasks;
create trigger guard_delete before delete on interlock.tasks for each row
    when ((old.state = any ('{done, error, canceled, skipped}'::text[])) is not true)
    execute function interlock.guard_tasks();
alter table interlock.tasks enable always trigger guard_delete;

create or replace function interlock.refuse_truncate_tasks() returns trigger language plpgsql as $$
begin
    raise exception 'tasks cannot be truncated: it may hold unfinished work'
        using errcode = 'IL006', schema = 'interlock', table = 'tasks',
            hint = 'Delete rows that have ended: delete from interlock.tasks where state in (''done'', ''error'', ''canceled'', ''skipped'')';
end
$$;

drop trigger if exists guard_truncate on interlock.tasks;
create trigger guard_truncate before truncate on interlock.tasks for each statement
    execute function interlock.refuse_truncate_tasks();
alter table interlock.tasks enable always trigger guard_truncate;

-- Writes the records as the owner, so that a client that moves a row needs no right to insert records. Refuses to run
-- for another table: a trigger on a client's own table could write any record, as the owner.
-- enable_nestloop is off because the plan is made for the session's first statement and kept: a nested loop is fine for
-- one row, but compares a million pairs for a thousand.
create or replace function interlock.record_tasks() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
declare
    who constant text := interlock.actor();
    session_role constant text := session_user;
    moment constant timestamptz := clock_timestamp();
begin
    if tg_relid <> 'interlock.tasks'::regclass then
        raise exception 'record_tasks() is a trigger of interlock.tasks only' using errcode = 'IL004';
    end if;
    -- refuse_forgery() accepts an INSERT while this is set. An error sets it back, with its (sub)transaction.
    perform set_config('interlock.recording', token, true) from interlock.record_token;
    if tg_op = 'INSERT' then
        insert into interlock.audit_logs (task_id, from_state, to_state, event, reason, actor, database_role,
            recorded_at, attempt)
        select now_row.id, null, now_row.state, 'create', now_row.reason, who, session_role, moment, now_row.attempt
        from now_row;
    else
        insert into interlock.audit_logs (task_id, from_state, to_state, event, reason, actor, database_role,
            recorded_at, attempt)
        select now_row.id, was_row.state, now_row.state, now_row.event, now_row.reason, who, session_role,
            moment, now_row.attempt
        from now_row join was_row on was_row.id = now_row.id
        where was_row.state <> now_row.state;
    end if;
    perform set_config('interlock.recording', '', true);
    return null;
end
$$;

revoke execute on function interlock.record_tasks() from public;

drop trigger if exists record_insert on interlock.tasks;
create trigger record_insert after insert on interlock.tasks
    referencing new table as now_row for each statement execute function interlock.record_tasks();
alter table interlock.tasks enable always trigger record_insert;

drop trigger if exists record_update on interlock.tasks;
create trigger record_update after update on interlock.tasks
    referencing old table as was_row new table as now_row for each statement
    execute function interlock.record_tasks();
alter table interlock.tasks enable always trigger record_update;

-- jobs: the job lifecycle

alter table interlock.jobs drop constraint if exists jobs_status;
alter table interlock.jobs add constraint jobs_status
    check (status = any ('{SUBMITTED, PENDING, RUNNING, COMPLETED, FAILED, CANCELED}'::text[])) not valid;
alter table interlock.jobs validate constraint jobs_status;

do $$
declare
    counter text;
begin
    for counter in
        select format('refused job %s>%s', source, target)
        from unnest(array['SUBMITTED', 'PENDING', 'RUNNING', 'COMPLETED', 'FAILED', 'CANCELED']) as source cross join unnest(array['SUBMITTED', 'PENDING', 'RUNNING', 'COMPLETED', 'FAILED', 'CANCELED']) as target
    loop
        execute format('create unlogged sequence if not exists interlock.%I', counter);
    end loop;
end
$$;

create or replace function interlock.guard_jobs() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp as $$
declare
    known constant text[] := array['SUBMITTED', 'PENDING', 'RUNNING', 'COMPLETED', 'FAILED', 'CANCELED'];
    events text[];
    allowed text[];
begin
    if tg_op = 'INSERT' then
        perform interlock.refuse_move('job', new.id::text, null, new.status, array['SUBMITTED'],
            case when new.status = any (known) then 'IL003' else 'IL002' end,
            format('cannot begin as %L', new.status));
    elsif tg_op = 'DELETE' then
        perform interlock.refuse_move('job', old.id::text, old.status, old.status, array['COMPLETED', 'FAILED', 'CANCELED'], 'IL006',
            format('cannot be deleted while %L, only when it has ended', old.status));
    end if;
    if new.id is distinct from old.id then
        perform interlock.refuse_move('job', old.id::text, old.status, new.status, array[]::text[], 'IL005',
            'an id never changes');
    end if;
    if new.status is distinct from old.status then
        case old.status
            when 'SUBMITTED' then allowed := array['PENDING', 'FAILED', 'CANCELED'];
            when 'PENDING' then allowed := array['RUNNING', 'CANCELED'];
            when 'RUNNING' then allowed := array['COMPLETED', 'FAILED', 'CANCELED'];
            else allowed := array[]::text[];
        end case;
        case old.status || '>' || new.status
            when 'SUBMITTED>PENDING' then events := array['validate'];
            when 'SUBMITTED>FAILED' then events := array['reject'];
            when 'SUBMITTED>CANCELED' then events := array['cancel'];
            when 'PENDING>RUNNING' then events := array['allocate_resources'];
            when 'PENDING>CANCELED' then events := array['cancel'];
            when 'RUNNING>COMPLETED' then events := array['success'];
            when 'RUNNING>FAILED' then events := array['error'];
            when 'RUNNING>CANCELED' then events := array['cancel'];
            else
                perform interlock.refuse_move('job', old.id::text, old.status, new.status, allowed,
                    case when new.status = any (known) then 'IL001' else 'IL002' end,
                    format('cannot move from %L to %L', old.status, new.status));
        end case;
        if (new.event = any (events)) is not true then
            -- The client did not name the event: it follows from the two states if only one fits. A reason that the
            -- client did not set belongs to the move before and is cleared.
            if new.event is distinct from old.event or cardinality(events) > 1 then
                perform interlock.refuse_move('job', old.id::text, old.status, new.status, allowed, 'IL001',
                    format('moves from %L to %L by setting "event" to one of %s, not to %L',
                        old.status, new.status, events, new.event));
            end if;
            new.event := events[1];
            if new.reason is not distinct from old.reason then
                new.reason := null;
            end if;
        end if;
        if new.updated_at is not distinct from old.updated_at then
            new.updated_at := clock_timestamp();
        end if;
    elsif new.event is distinct from old.event then
        perform interlock.refuse_move('job', old.id::text, old.status, new.status, array[]::text[], 'IL001',
            format('stays %L, so that its event cannot become %L', old.status, new.event));
    end if;

    -- The later time stays: a transaction that began long ago and a clock that was set back do not fail for it.
    new.updated_at := greatest(new.updated_at, old.updated_at);
    return new;
end
$$;

drop trigger if exists guard_insert on interlock.jobs;
create trigger guard_insert before insert on interlock.jobs for each row
    when ((new.status = any ('{SUBMITTED}'::text[])) is not true)
    execute function interlock.guard_jobs();
alter table interlock.jobs enable always trigger guard_insert;

drop trigger if exists guard_update on interlock.jobs;
create trigger guard_update before update on interlock.jobs for each row
    when (
        new.id is distinct from old.id
        or case
            when new.status = old.status
                then new.event is distinct from old.event or new.updated_at < old.updated_at
            else (old.status || ' ' || new.event || ' ' || new.status = any ('{
                    SUBMITTED validate PENDING,
                    SUBMITTED reject FAILED,
                    SUBMITTED cancel CANCELED,
                    PENDING allocate_resources RUNNING,
                    PENDING cancel CANCELED,
                    RUNNING success COMPLETED,
                    RUNNING error FAILED,
                    RUNNING cancel CANCELED
                }'::text[])) is not true
                or new.updated_at <= old.updated_at
        end
    )
    execute function interlock.guard_jobs();
alter table interlock.jobs enable always trigger guard_update;

drop trigger if exists guard_fixed on interlock.jobs;
create trigger guard_fixed before update of task_description, workflow_id, input, parent_job_id, parent_task_id, request_id, created_at on interlock.jobs for each row
    when (new.task_description is distinct from old.task_description
        or new.workflow_id is distinct from old.workflow_id
        or new.input is distinct from old.input
        or new.parent_job_id is distinct from old.parent_job_id
        or new.parent_task_id is distinct from old.parent_task_id
        or new.request_id is distinct from old.request_id
        or new.created_at is distinct from old.created_at)
    execute function interlock.refuse_rewrite('job', 'a job keeps what it was created with', 'task_description', 'workflow_id', 'input', 'parent_job_id', 'parent_task_id', 'request_id', 'created_at');
alter table interlock.jobs enable always trigger guard_fixed;

drop trigger if exists guard_outcome on interlock.jobs;
create trigger guard_outcome before update of reason, failed_steps, started_at, completed_at on interlock.jobs for each row
    when (new.status = old.status and old.status = any ('{COMPLETED, FAILED, CANCELED}'::text[]))
    execute function interlock.refuse_rewrite('job', 'the outcome of a job that has ended changes only with a move, which is recorded', 'reason', 'failed_steps', 'started_at', 'completed_at');
alter table interlock.jobs enable always trigger guard_outcome;

drop trigger if exists guard_documents on interlock.jobs;
create trigger guard_documents before update of output, error on interlock.jobs for each row
    when (new.status = old.status and old.status = any ('{COMPLETED, FAILED, CANCELED}'::text[]))
    execute function interlock.refuse_rewrite('job', 'the outcome of a job that has ended changes only with a move, which is recorded', 'output', 'error');
alter table interlock.jobs enable always trigger guard_documents;

drop trigger if exists guard_delete on interlock.jobs;
create trigger guard_delete before delete on interlock.jobs for each row
    when ((old.status = any ('{COMPLETED, FAILED, CANCELED}'::text[])) is not true)
    execute function interlock.guard_jobs();
alter table interlock.jobs enable always trigger guard_delete;

create or replace function interlock.refuse_truncate_jobs() returns trigger language plpgsql as $$
begin
    raise exception 'jobs cannot be truncated: it may hold unfinished work'
        using errcode = 'IL006', schema = 'interlock', table = 'jobs',
            hint = 'Delete rows that have ended: delete from interlock.jobs where status in (''COMPLETED'', ''FAILED'', ''CANCELED'')';
end
$$;

drop trigger if exists guard_truncate on interlock.jobs;
create trigger guard_truncate before truncate on interlock.jobs for each statement
    execute function interlock.refuse_truncate_jobs();
alter table interlock.jobs enable always trigger guard_truncate;

-- Writes the records as the owner, so that a client that moves a row needs no right to insert records. Refuses to run
-- for another table: a trigger on a client's own table could write any record, as the owner.
-- enable_nestloop is off because the plan is made for the session's first statement and kept: a nested loop is fine for
-- one row, but compares a million pairs for a thousand.
create or replace function interlock.record_jobs() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
declare
    who constant text := interlock.actor();
    session_role constant text := session_user;
    moment constant timestamptz := clock_timestamp();
begin
    if tg_relid <> 'interlock.jobs'::regclass then
        raise exception 'record_jobs() is a trigger of interlock.jobs only' using errcode = 'IL004';
    end if;
    -- refuse_forgery() accepts an INSERT while this is set. An error sets it back, with its (sub)transaction.
    perform set_config('interlock.recording', token, true) from interlock.record_token;
    if tg_op = 'INSERT' then
        insert into interlock.job_state_transitions (job_id, from_state, to_state, event, reason, actor, database_role,
            recorded_at)
        select now_row.id, null, now_row.status, 'create', now_row.reason, who, session_role, moment
        from now_row;
    else
        insert into interlock.job_state_transitions (job_id, from_state, to_state, event, reason, actor, database_role,
            recorded_at)
        select now_row.id, was_row.status, now_row.status, now_row.event, now_row.reason, who, session_role,
            moment
        from now_row join was_row on was_row.id = now_row.id
        where was_row.status <> now_row.status;
    end if;
    perform set_config('interlock.recording', '', true);
    return null;
end
$$;

revoke execute on function interlock.record_jobs() from public;

drop trigger if exists record_insert on interlock.jobs;
create trigger record_insert after insert on interlock.jobs
    referencing new table as now_row for each statement execute function interlock.record_jobs();
alter table interlock.jobs enable always trigger record_insert;

drop trigger if exists record_update on interlock.jobs;
create trigger record_update after update on interlock.jobs
    referencing old table as was_row new table as now_row for each statement
    execute function interlock.record_jobs();
alter table interlock.jobs enable always trigger record_update;

-- workers: the supervised worker lifecycle

alter table interlock.workers drop constraint if exists workers_status;
alter table interlock.workers add constraint workers_status
    check (status = any ('{IDLE, RUNNING, PAUSED, COMPLETED, FAILED, TERMINATED}'::text[])) not valid;
alter table interlock.workers validate constraint workers_status;

do $$
declare
    counter text;
begin
    for counter in
        select format('refused supervised worker %s>%s', source, target)
        from unnest(array['IDLE', 'RUNNING', 'PAUSED', 'COMPLETED', 'FAILED', 'TERMINATED']) as source cross join unnest(array['IDLE', 'RUNNING', 'PAUSED', 'COMPLETED', 'FAILED', 'TERMINATED']) as target
    loop
        execute format('create unlogged sequence if not exists interlock.%I', counter);
    end loop;
end
$$;

create or replace function interlock.guard_workers() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp as $$
declare
    known constant text[] := array['IDLE', 'RUNNING', 'PAUSED', 'COMPLETED', 'FAILED', 'TERMINATED'];
    events text[];
    allowed text[];
begin
    if tg_op = 'INSERT' then
        perform interlock.refuse_move('supervised worker', new.id::text, null, new.status, array['IDLE'],
            case when new.status = any (known) then 'IL003' else 'IL002' end,
            format('cannot begin as %L', new.status));
    elsif tg_op = 'DELETE' then
        perform interlock.refuse_move('supervised worker', old.id::text, old.status, old.status, array['COMPLETED', 'FAILED', 'TERMINATED'], 'IL006',
            format('cannot be deleted while %L, only when it has ended', old.status));
    end if;
    if new.id is distinct from old.id then
        perform interlock.refuse_move('supervised worker', old.id::text, old.status, new.status, array[]::text[], 'IL005',
            'an id never changes');
    end if;
    if new.status is distinct from old.status then
        case old.status
            when 'IDLE' then allowed := array['RUNNING', 'TERMINATED'];
            when 'RUNNING' then allowed := array['PAUSED', 'COMPLETED', 'FAILED', 'TERMINATED'];
            when 'PAUSED' then allowed := array['RUNNING', 'TERMINATED'];
            when 'COMPLETED' then allowed := array['TERMINATED'];
            when 'FAILED' then allowed := array['TERMINATED'];
            else allowed := array[]::text[];
        end case;
        case old.status || '>' || new.status
            when 'IDLE>RUNNING' then events := array['start_task'];
            when 'IDLE>TERMINATED' then events := array['terminate'];
            when 'RUNNING>PAUSED' then events := array['pause'];
            when 'RUNNING>COMPLETED' then events := array['complete_tasks'];
            when 'RUNNING>FAILED' then events := array['error_unrecoverable'];
            when 'RUNNING>TERMINATED' then events := array['terminate'];
            when 'PAUSED>RUNNING' then events := array['resume'];
            when 'PAUSED>TERMINATED' then events := array['terminate'];
            when 'COMPLETED>TERMINATED' then events := array['terminate'];
            when 'FAILED>TERMINATED' then events := array['terminate'];
            else
                perform interlock.refuse_move('supervised worker', old.id::text, old.status, new.status, allowed,
                    case when new.status = any (known) then 'IL001' else 'IL002' end,
                    format('cannot move from %L to %L', old.status, new.status));
        end case;
        if (new.event = any (events)) is not true then
            -- The client did not name the event: it follows from the two states if only one fits. A reason that the
            -- client did not set belongs to the move before and is cleared.
            if new.event is distinct from old.event or cardinality(events) > 1 then
                perform interlock.refuse_move('supervised worker', old.id::text, old.status, new.status, allowed, 'IL001',
                    format('moves from %L to %L by setting "event" to one of %s, not to %L',
                        old.status, new.status, events, new.event));
            end if;
            new.event := events[1];
            if new.reason is not distinct from old.reason then
                new.reason := null;
            end if;
        end if;
        if new.updated_at is not distinct from old.updated_at then
            new.updated_at := clock_timestamp();
        end if;
    elsif new.event is distinct from old.event then
        perform interlock.refuse_move('supervised worker', old.id::text, old.status, new.status, array[]::text[], 'IL001',
            format('stays %L, so that its event cannot become %L', old.status, new.event));
    end if;

    -- The later time stays: a transaction that began long ago and a clock that was set back do not fail for it.
    new.updated_at := greatest(new.updated_at, old.updated_at);
    return new;
end
$$;

drop trigger if exists guard_insert on interlock.workers;
create trigger guard_insert before insert on interlock.workers for each row
    when ((new.status = any ('{IDLE}'::text[])) is not true)
    execute function interlock.guard_workers();
alter table interlock.workers enable always trigger guard_insert;

drop trigger if exists guard_update on interlock.workers;
create trigger guard_update before update on interlock.workers for each row
    when (
        new.id is distinct from old.id
        or case
            when new.status = old.status
                then new.event is distinct from old.event or new.updated_at < old.updated_at
            else (old.status || ' ' || new.event || ' ' || new.status = any ('{
                    IDLE start_task RUNNING,
                    RUNNING pause PAUSED,
                    PAUSED resume RUNNING,
                    RUNNING complete_tasks COMPLETED,
                    RUNNING error_unrecoverable FAILED,
                    IDLE terminate TERMINATED,
                    RUNNING terminate TERMINATED,
                    PAUSED terminate TERMINATED,
                    COMPLETED terminate TERMINATED,
                    FAILED terminate TERMINATED
                }'::text[])) is not true
                or new.updated_at <= old.updated_at
        end
    )
    execute function interlock.guard_workers();
alter table interlock.workers enable always trigger guard_update;

drop trigger if exists guard_fixed on interlock.workers;
create trigger guard_fixed before update of created_at on interlock.workers for each row
    when (new.created_at is distinct from old.created_at)
    execute function interlock.refuse_rewrite('supervised worker', 'a supervised worker keeps what it was created with', 'created_at');
alter table interlock.workers enable always trigger guard_fixed;

drop trigger if exists guard_delete on interlock.workers;
create trigger guard_delete before delete on interlock.workers for each row
    when ((old.status = any ('{COMPLETED, FAILED, TERMINATED}'::text[])) is not true)
    execute function interlock.guard_workers();
alter table interlock.workers enable always trigger guard_delete;

create or replace function interlock.refuse_truncate_workers() returns trigger language plpgsql as $$
begin
    raise exception 'workers cannot be truncated: it may hold unfinished work'
        using errcode = 'IL006', schema = 'interlock', table = 'workers',
            hint = 'Delete rows that have ended: delete from interlock.workers where status in (''COMPLETED'', ''FAILED'', ''TERMINATED'')';
end
$$;

drop trigger if exists guard_truncate on interlock.workers;
create trigger guard_truncate before truncate on interlock.workers for each statement
    execute function interlock.refuse_truncate_workers();
alter table interlock.workers enable always trigger guard_truncate;

-- Writes the records as the owner, so that a client that moves a row needs no right to insert records. Refuses to run
-- for another table: a trigger on a client's own table could write any record, as the owner.
-- enable_nestloop is off because the plan is made for the session's first statement and kept: a nested loop is fine for
-- one row, but compares a million pairs for a thousand.
create or replace function interlock.record_workers() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
declare
    who constant text := interlock.actor();
    session_role constant text := session_user;
    moment constant timestamptz := clock_timestamp();
begin
    if tg_relid <> 'interlock.workers'::regclass then
        raise exception 'record_workers() is a trigger of interlock.workers only' using errcode = 'IL004';
    end if;
    -- refuse_forgery() accepts an INSERT while this is set. An error sets it back, with its (sub)transaction.
    perform set_config('interlock.recording', token, true) from interlock.record_token;
    if tg_op = 'INSERT' then
        insert into interlock.worker_state_transitions (worker_id, from_state, to_state, event, reason, actor, database_role,
            recorded_at)
        select now_row.id, null, now_row.status, 'create', now_row.reason, who, session_role, moment
        from now_row;
    else
        insert into interlock.worker_state_transitions (worker_id, from_state, to_state, event, reason, actor, database_role,
            recorded_at)
        select now_row.id, was_row.status, now_row.status, now_row.event, now_row.reason, who, session_role,
            moment
        from now_row join was_row on was_row.id = now_row.id
        where was_row.status <> now_row.status;
    end if;
    perform set_config('interlock.recording', '', true);
    return null;
end
$$;

revoke execute on function interlock.record_workers() from public;

drop trigger if exists record_insert on interlock.workers;
create trigger record_insert after insert on interlock.workers
    referencing new table as now_row for each statement execute function interlock.record_workers();
alter table interlock.workers enable always trigger record_insert;

drop trigger if exists record_update on interlock.workers;
create trigger record_update after update on interlock.workers
    referencing old table as was_row new table as now_row for each statement
    execute function interlock.record_workers();
alter table interlock.workers enable always trigger record_update;
