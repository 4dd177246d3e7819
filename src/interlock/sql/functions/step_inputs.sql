-- Returns the task whose result counts as that of a step: its own if it is done, else that of the first done step that
-- recovers it, or recovers such a step. Null if there is none.
create or replace function interlock.standing_task(of_job uuid, of_workflow uuid, of_step text) returns interlock.tasks
    language plpgsql stable set enable_seqscan = off as $$
declare
    task interlock.tasks;
    recoverer text;
begin
    select * into task from interlock.tasks where job_id = of_job and step = of_step limit 1;
    if task.state = 'done' or task.reused then
        return task;
    end if;
    for recoverer in
        select steps.step
        from interlock.workflow_edges as edges
            join interlock.workflow_steps as steps
                on steps.workflow_id = edges.workflow_id and steps.step = edges.downstream
        where edges.workflow_id = of_workflow and edges.upstream = of_step and edges.condition = 'recovers'
        order by steps.position
    loop
        task := interlock.standing_task(of_job, of_workflow, recoverer);
        if task.id is not null then
            return task;
        end if;
    end loop;
    return null;
end
$$;

-- Returns the inputs of a step that is not simple (see `claim_pending_tasks`, which gathers those of simple steps). The
-- field `refused` says why the step must fail. The claim calls this function, so it must not raise: one step would
-- prevent the claim of all others.
create or replace function interlock.step_inputs(task interlock.tasks) returns jsonb language plpgsql stable
    set enable_seqscan = off as $$
declare
    of_job uuid := task.job_id;
    declared_as text := task.step;
    compensates boolean := task.compensates is not null;
    declared record;
    given jsonb;
    document jsonb;
begin
    if task.part_of is not null then
        declared_as := left(task.step, -length('[' || task.part || ']'));
    elsif compensates then
        -- the step that it undoes may be one of a child job
        select job_id, step into of_job, declared_as from interlock.tasks where id = task.compensates;
    end if;
    select case when task.part_of is null or steps.spec ->> 'over_input' is null then jobs.input end as input,
        workflows.name, workflows.version, steps.kind, steps.spec, upstream.results, upstream.errors
    into declared
    from interlock.jobs
        join interlock.workflows on workflows.id = jobs.workflow_id
        join interlock.workflow_steps as steps on steps.workflow_id = jobs.workflow_id and steps.step = declared_as
        left join lateral (
            select jsonb_object_agg(edges.upstream,
                        interlock.step_result(kinds.kind, standing.id, standing.reused, standing.output))
                    filter (where standing.id is not null) as results,
                jsonb_object_agg(edges.upstream, coalesce(found.error,
                        jsonb_build_object('type', found.state, 'message', found.reason)))
                    filter (where edges.condition <> 'after'
                        and (found.state in ('error', 'canceled') or found.skipped_by_failure)) as errors
            from interlock.workflow_edges as edges
                cross join lateral (
                    select id, step, state, reused, skipped_by_failure, reason, output, error
                    from interlock.tasks
                    where job_id = of_job and step = edges.upstream
                    limit 1
                ) as found
                left join lateral (
                    select found.id, found.step, found.reused, found.output
                    where found.state = 'done' or found.reused
                    union all
                    -- only after a failure: a step that recovers this one stands in for it
                    select recovery.id, recovery.step, recovery.reused, recovery.output
                    from interlock.standing_task(of_job, edges.workflow_id, edges.upstream) as recovery
                    where edges.condition = 'after' and recovery.id is not null
                        and (found.state in ('error', 'canceled') or found.skipped_by_failure)
                ) as standing on true
                left join lateral (
                    select kind
                    from interlock.workflow_steps
                    where workflow_id = edges.workflow_id and step = standing.step
                    limit 1
                ) as kinds on true
            where edges.workflow_id = jobs.workflow_id and edges.downstream = declared_as
                and edges.condition <> 'recovery'
                -- A part gets its item, not the whole list again.
                and (task.part_of is null or edges.upstream is distinct from steps.spec ->> 'over')
        ) as upstream on steps.edges > 0 and not compensates
    where jobs.id = of_job;
    given := declared.input;
    if task.part_of is not null and declared.spec ->> 'over_input' is not null then
        -- The map stores the job's input without the list that it maps over.
        select parts_job_input into given from interlock.tasks where id = task.part_of;
    end if;
    document := jsonb_build_object('workflow', declared.name, 'version', declared.version, 'job_input', given,
        'results', coalesce(declared.results, '{}'), 'errors', coalesce(declared.errors, '{}'),
        'config', coalesce(declared.spec -> 'config', '{}'), 'item', task.input -> 'item',
        'index', task.input -> 'index', 'kind', case when compensates then 'compensation' else declared.kind end,
        'branches', coalesce(declared.spec -> 'branches', '[]'), 'result', task.input -> 'result', 'refused', null);
    if pg_column_size(document) > 128 * 1024 * 1024 then
        -- As text it may be six times as long, and the server can send at most a gigabyte.
        raise program_limit_exceeded using message = 'they exceed 128 MB';
    end if;
    return document;
exception when others then
    return '{"workflow": null, "version": null, "job_input": null, "results": {}, "errors": {}, "config": {},
        "item": null, "index": null, "kind": null, "branches": [], "result": null}'::jsonb
        || jsonb_build_object('refused', format('the inputs of the step cannot be gathered: %s', sqlerrm));
end
$$;
