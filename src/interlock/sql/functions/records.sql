-- Records of moves cannot be changed, deleted or forged, and live in monthly partitions.

create or replace function interlock.refuse_change() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp as $$
begin
    raise exception '% is a record of what happened: % is refused', tg_table_name, tg_op
        using errcode = 'IL004', schema = tg_table_schema, table = tg_table_name,
            hint = 'Records leave only with a whole partition: select interlock.drop_records_before(...)';
end
$$;

-- Only the functions record_tasks, record_jobs and record_workers insert records: while they do, they present the
-- token, which no role but the owner can read. Runs as the owner to compare it.
create or replace function interlock.refuse_forgery() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp as $$
begin
    if (current_setting('interlock.recording', true) = (select token from interlock.record_token)) is not true then
        raise exception '% is written by the database itself: INSERT is refused', tg_table_name
            using errcode = 'IL004', schema = tg_table_schema, table = tg_table_name;
    end if;
    return null;
end
$$;

revoke execute on function interlock.refuse_forgery() from public;

-- Partitions inherit row triggers but not statement triggers: each partition gets its own.
create or replace function interlock.protect_records(records regclass) returns void language plpgsql as $$
begin
    execute format('create or replace trigger no_forgery before insert on %s for each statement '
        'execute function interlock.refuse_forgery()', records);
    execute format('alter table %s enable always trigger no_forgery', records);
    execute format('create or replace trigger no_truncate before truncate on %s for each statement '
        'execute function interlock.refuse_change()', records);
    execute format('alter table %s enable always trigger no_truncate', records);
end
$$;

-- Creates the partitions of this month and of the months ahead; returns how many. `interlock migrate` and the leader
-- call it.
create or replace function interlock.add_record_partitions(months_ahead int default 3) returns int
    language plpgsql as $$
declare
    records text;
    partition text;
    month timestamp; -- in UTC: months in a session's time zone differ in length
    made int := 0;
begin
    perform pg_advisory_xact_lock(hashtext('interlock.add_record_partitions'));
    foreach records in array array['audit_logs', 'job_state_transitions', 'worker_state_transitions'] loop
        for ahead in 0 .. months_ahead loop
            month := date_trunc('month', now() at time zone 'UTC') + make_interval(months => ahead);
            partition := records || to_char(month, '"_"YYYY"_"MM');
            continue when to_regclass('interlock.' || partition) is not null;
            begin
                execute format('create table interlock.%I partition of interlock.%I for values from (%L) to (%L)',
                    partition, records, month at time zone 'UTC', (month + interval '1 month') at time zone 'UTC');
            exception when check_violation then
                continue; -- the default partition has records of that month already: all of them stay there
            end;
            perform interlock.protect_records(to_regclass('interlock.' || partition));
            made := made + 1;
        end loop;
    end loop;
    return made;
end
$$;

-- Summarizes the ranges of the BRIN indexes of records that are full and not summarized yet; returns how many. A scan
-- reads such ranges whole. The leader calls it every few seconds: autovacuum summarizes them as well, but drops requests
-- that come faster than it works, until it vacuums the whole table. Runs as the owner, as it must be. It gives way to a
-- vacuum within 100 ms: after deadlock_timeout the vacuum would be canceled.
create or replace function interlock.summarize_records() returns int language plpgsql
    security definer set search_path = pg_catalog, pg_temp set lock_timeout = 100 as $$
declare
    ranges regclass;
    made int := 0;
begin
    for ranges in
        select leaf.relid
        from unnest(array['interlock.audit_logs_time', 'interlock.job_state_transitions_time',
                'interlock.worker_state_transitions_time']::regclass[]) as whole (index)
            cross join pg_partition_tree(whole.index) as leaf
        where leaf.isleaf
    loop
        begin
            made := made + brin_summarize_new_values(ranges);
        exception when lock_not_available then
            null; -- a vacuum of this partition is at work, which summarizes too
        end;
    end loop;
    return made;
end
$$;

-- Retention: drops the partitions that end at or before the cutoff, and returns their names.
create or replace function interlock.drop_records_before(cutoff timestamptz) returns setof text language plpgsql as $$
declare
    old record;
begin
    if cutoff is null then
        raise exception 'drop_records_before needs a time; null would mean everything' using errcode = 'IL004';
    end if;
    for old in
        select child.relname as partition,
            substring(pg_get_expr(child.relpartbound, child.oid) from 'TO \(''(.+?)''\)')::timestamptz as ends_at
        from pg_inherits
            join pg_class child on child.oid = inhrelid
            join pg_class parent on parent.oid = inhparent
        where parent.relnamespace = 'interlock'::regnamespace
            and parent.relname in ('audit_logs', 'job_state_transitions', 'worker_state_transitions')
            and parent.relkind = 'p'
        order by child.relname
    loop
        continue when old.ends_at is null or old.ends_at > cutoff;
        execute format('drop table interlock.%I', old.partition);
        return next old.partition;
    end loop;
end
$$;

do $$
declare
    records regclass;
begin
    foreach records in array array['interlock.audit_logs', 'interlock.job_state_transitions',
        'interlock.worker_state_transitions']::regclass[]
    loop
        execute format('create or replace trigger no_change before update or delete on %s for each row '
            'execute function interlock.refuse_change()', records);
        execute format('alter table %s enable always trigger no_change', records);
        perform interlock.protect_records(relid) from pg_partition_tree(records);
    end loop;
    create or replace trigger no_change before update or delete on interlock.limit_changes for each row
        execute function interlock.refuse_change();
    create or replace trigger no_truncate before truncate on interlock.limit_changes for each statement
        execute function interlock.refuse_change();
    alter table interlock.limit_changes enable always trigger no_change;
    alter table interlock.limit_changes enable always trigger no_truncate;
end
$$;
