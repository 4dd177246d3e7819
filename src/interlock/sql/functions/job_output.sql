-- Returns the result of the step that recovered this one. Null if there is none.
create or replace function interlock.recovered_result(of_job uuid, of_workflow uuid, of_step text) returns jsonb
    language plpgsql stable set enable_seqscan = off as $$
begin
    return (
        select coalesce(interlock.step_result(steps.kind, standing.id, standing.reused, standing.output), 'null')
        from interlock.standing_task(of_job, of_workflow, of_step) as standing
            join interlock.workflow_steps as steps on steps.workflow_id = of_workflow and steps.step = standing.step
    );
end
$$;

-- Returns the output of a job that completes: the results of the steps that its workflow declares as output, or of the final
-- steps, by name; steps that have no result are left out. If one step is the whole output, returns its result, or a JSON
-- null. Returns null when the results do not fit into one jsonb value.
create or replace function interlock.job_output(ended_job_id uuid, ended_workflow_id uuid) returns jsonb
    language plpgsql stable set enable_seqscan = off as $$
begin
    return (
        select case
                when bool_or(steps.outputs = '{}') then coalesce(jsonb_agg(found.result) -> 0, 'null')
                else coalesce(jsonb_object_agg(named.name, found.result)
                    filter (where found.result is not null and named.name is not null), '{}')
            end
        from interlock.workflow_steps as steps
            left join lateral unnest(steps.outputs) as named (name) on true
            left join lateral (
                select case
                        when state = 'done' or reused
                            then coalesce(interlock.step_result(steps.kind, id, reused, output), 'null')
                        when state in ('error', 'canceled') or skipped_by_failure
                            then interlock.recovered_result(ended_job_id, ended_workflow_id, steps.step)
                    end as result
                from interlock.tasks
                where job_id = ended_job_id and step = steps.step
                limit 1
            ) as found on true
        where steps.workflow_id = ended_workflow_id and steps.outputs is not null
    );
exception when others then
    return null;
end
$$;
