-- Notifies workers, once per namespace and statement, of inserted tasks that are due, and the leader of tasks that wait
-- for a limit.
--
-- enable_sort is off because the plan is made for the session's first statement, often of one row, and kept: for a COPY
-- of many thousand rows it would sort all of them to find one namespace, where a hash table is enough.
create or replace function interlock.notify_pending() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp set enable_sort = off as $$
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

create or replace trigger notify_insert after insert on interlock.tasks
    referencing new table as now_row for each statement execute function interlock.notify_pending();
