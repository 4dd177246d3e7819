-- Reads one message of the queue of step results, as pgmq.read reads the next ones: other readers do not see it for
-- `visibility_s` seconds, and the read counts. Returns nothing if the message is gone, invisible, or locked by a reader.
-- PGMQ has no such function; see docs/decisions/0011-pgmq.md.
create or replace function interlock.read_specific_message(wanted_id bigint, visibility_s int)
    returns table (msg_id bigint, read_ct int, message jsonb) language plpgsql as $$
begin
    return query
    update interlock.orchestration_messages as given
    set vt = clock_timestamp() + make_interval(secs => visibility_s), read_ct = given.read_ct + 1
    where given.msg_id = (
            select visible.msg_id
            from interlock.orchestration_messages as visible
            where visible.msg_id = wanted_id and visible.vt <= clock_timestamp()
            for update skip locked
        )
    returning given.msg_id, given.read_ct, given.message;
end
$$;
