-- Sends the end of a step to the orchestrator, in the transaction that ends it, whichever client that is. Steps that
-- are marked as advanced were sent before. Costs one scan of the changed rows when no steps are among them.
--
-- With the setting interlock.advance_at_once, which a worker sets while it settles a single step, the message is also taken
-- here, if its job is plain and not locked: that saves a notification, a round trip and a commit. Else, and after any
-- error, it is left to the orchestrators. See docs/decisions/0061-advance-in-the-settle.md.
--
-- Runs as the owner, so that a client that moves a task needs no right to send; on this table alone, so that no client
-- can send messages of its own by a trigger on another table.
create or replace function interlock.send_step_results() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp as $$
declare
    messages jsonb[];
    sent_ids bigint[];
    is_advanced boolean := false;
    given_lock_timeout constant text := current_setting('lock_timeout');
begin
    if tg_relid <> 'interlock.tasks'::regclass then
        raise exception 'send_step_results() is a trigger of interlock.tasks only' using errcode = 'IL004';
    end if;
    select array_agg(jsonb_build_object('job_id', job_id, 'task_id', id, 'correlation_id', correlation_id)
        || case when traceparent is null then '{}' else jsonb_build_object('traceparent', traceparent) end)
    into messages
    from now_row
    where job_id is not null and not advanced and state in ('done', 'error', 'canceled');
    if messages is not null then
        with sent as (
            insert into interlock.orchestration_messages (vt, message)
            select clock_timestamp(), message from unnest(messages) as message
            returning msg_id
        )
        select array_agg(msg_id) into sent_ids from sent;
        if cardinality(sent_ids) = 1 and current_setting('interlock.advance_at_once', true) = 'true' then
            begin
                -- who holds the lock of the job may wait for the step that is settled here
                select received = 1
                into is_advanced
                from interlock.advance_plain_steps(interlock.actor(), 1, sent_ids[1], '1ms', null);
                -- the commit of a notification waits for a lock too
                perform set_config('lock_timeout', given_lock_timeout, true);
            exception when others then
                is_advanced := false;
            end;
        end if;
        if is_advanced is not true then
            perform pg_notify('interlock_orchestration',
                case cardinality(sent_ids) when 1 then sent_ids[1]::text else 'messages' end);
        end if;
    end if;
    return null;
end
$$;

revoke execute on function interlock.send_step_results() from public;

create or replace trigger send_update after update on interlock.tasks
    referencing new table as now_row for each statement execute function interlock.send_step_results();
alter table interlock.tasks enable always trigger send_update;
