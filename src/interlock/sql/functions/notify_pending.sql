-- Notifies workers of inserted tasks, once per namespace and statement: of tasks that are due, or were due a while ago, which
-- is another channel because some claims look at recent tasks only (worker/fetcher.py), or else of the time
-- (seconds since the epoch, before the namespace) at which the first one becomes due; and the leader of tasks that wait for a limit.
--
-- enable_sort is off because the plan is made for the session's first statement, often of one row, and kept: for a COPY
-- of many thousand rows it would sort all of them to find one namespace, where a hash table is enough.
create or replace function interlock.notify_pending() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp set enable_sort = off as $$
begin
    perform case
            when found.held then pg_notify('interlock_duties', 'limits')
            when found.first_at < clock_timestamp() - interval '1 second'
                then pg_notify('interlock_released', found.namespace)
            when found.first_at <= now() then pg_notify('interlock_tasks', found.namespace)
            else pg_notify('interlock_due', extract(epoch from found.first_at) || ' ' || found.namespace)
        end
    from (
        select case when held_by is null then namespace end as namespace, held_by is not null as held,
            min(run_at) as first_at
        from now_row
        where state = 'pending' and run_at <= now() + interval '1 minute' or held_by = 'limit'
        group by 1, 2
    ) as found;
    return null;
end
$$;

-- Notifies workers of the time at which a task becomes due that goes back into the queue for later: a retry with a
-- backoff, which another worker than the one that settled it may run. A worker reads the next due time at least once a
-- minute (MAX_IDLE_WAIT_S in worker/process.py), so that later times need no notification.
--
-- A trigger for rows, because one for statements cannot be restricted to a column: the claim, which does not write
-- run_at, pays nothing. Within a transaction, a time is sent only if it comes before the one that was sent last for its
-- namespace: some five of a hundred retries in random order.
create or replace function interlock.notify_due() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp as $$
declare
    due numeric := extract(epoch from new.run_at);
    sent text := current_setting('interlock.due_sent', true);
begin
    if new.run_at is not distinct from old.run_at or new.run_at > now() + interval '1 minute' then
        return null;
    end if;
    if sent <> '' and split_part(sent, ' ', 1)::numeric <= due and substr(sent, strpos(sent, ' ') + 1) = new.namespace then
        return null;
    end if;
    sent := due || ' ' || new.namespace;
    perform pg_notify('interlock_due', sent), set_config('interlock.due_sent', sent, true);
    return null;
end
$$;

create or replace trigger notify_insert after insert on interlock.tasks
    referencing new table as now_row for each statement execute function interlock.notify_pending();

create or replace trigger notify_due after update of run_at on interlock.tasks
    for each row when (new.state = 'pending' and new.run_at > now())
    execute function interlock.notify_due();
