-- Creates the PGMQ queue that the settings name, unless it exists, and points the view `orchestration_messages` to its
-- table. Does nothing while PGMQ is not installed. See docs/decisions/0011-pgmq.md for the statements that use the
-- view.
create or replace function interlock.create_orchestration_queue() returns void language plpgsql as $$
declare
    queue text;
    queue_table text;
begin
    if to_regprocedure('pgmq.create(text)') is null then
        return;
    end if;
    select settings.orchestration_queue, lower('q_' || settings.orchestration_queue) into queue, queue_table
    from interlock.settings;
    if to_regclass(format('pgmq.%I', queue_table)) is null then
        perform pgmq.create(queue);
        -- Every message is written twice and deleted: vacuum while dead entries are few.
        execute format('alter table pgmq.%I set (autovacuum_vacuum_scale_factor = 0.01, '
            'autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0, vacuum_index_cleanup = on)',
            queue_table);
    end if;
    execute format('create or replace view interlock.orchestration_messages as '
        'select msg_id, vt, message, read_ct from pgmq.%I', queue_table);
end
$$;
