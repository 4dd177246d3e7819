-- Two triggers at less cost for single rows: no regular expression, and one query where there were two.

-- Records are written by the record functions alone; whoever else inserts, at whatever depth, is told by the stack.
create or replace function interlock.refuse_forgery() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp as $$
declare
    stack text;
begin
    get diagnostics stack = pg_context;
    if strpos(stack, 'function interlock.record_tasks() line') = 0
        and strpos(stack, 'function interlock.record_jobs() line') = 0
        and strpos(stack, 'function interlock.record_workers() line') = 0
    then
        raise exception '% is written by the database itself: INSERT is refused', tg_table_name
            using errcode = 'IL004', schema = tg_table_schema, table = tg_table_name;
    end if;
    return null;
end
$$;

-- One hint per statement and namespace, whoever inserts, and one for limits.
create or replace function interlock.notify_pending() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp as $$
begin
    perform pg_notify(found.channel, found.payload)
    from (
        select distinct case when held_by is null then 'interlock_tasks' else 'interlock_duties' end as channel,
            case when held_by is null then namespace else 'limits' end as payload
        from now_row
        where state = 'pending' and run_at <= now() or held_by = 'limit'
    ) as found;
    return null;
end
$$;
