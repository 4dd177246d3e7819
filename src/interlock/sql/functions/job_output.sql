-- Returns the results of the last steps by name. Null when they do not fit into one jsonb value.
create or replace function interlock.job_output(ended_job_id uuid, ended_workflow_id uuid) returns jsonb
    language plpgsql stable set enable_seqscan = off as $$
begin
    return (
        select coalesce(jsonb_object_agg(sinks.step,
            interlock.step_result(sinks.kind, found.id, found.reused, found.output)), '{}')
        from interlock.workflow_steps as sinks
            cross join lateral (
                select id, reused, output
                from interlock.tasks
                where job_id = ended_job_id and step = sinks.step and (state = 'done' or reused)
                limit 1
            ) as found
        where sinks.workflow_id = ended_workflow_id and sinks.sink
    );
exception when others then
    return null;
end
$$;
