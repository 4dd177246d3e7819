-- Returns the inputs of a step that is not simple (see `claim_pending_tasks`, which gathers those of simple steps). The
-- field `refused` says why the step must fail. The claim calls this function, so it must not raise: one step would
-- prevent the claim of all others.
create or replace function interlock.step_inputs(task interlock.tasks) returns jsonb language plpgsql stable
    set enable_seqscan = off as $$
declare
    declared_as text := task.step;
    compensates boolean := task.step like 'compensate:%';
    declared record;
    signal interlock.signals;
    child jsonb;
    refused text := task.input ->> 'refused';
    given jsonb;
    document jsonb;
begin
    if task.part_of is not null then
        declared_as := left(task.step, -length('[' || task.part || ']'));
    elsif compensates then
        declared_as := substr(task.step, length('compensate:') + 1);
    end if;
    select case when task.part_of is null or steps.spec ->> 'over_input' is null then jobs.input end as input,
        workflows.name, workflows.version, steps.kind, steps.spec, upstream.results, upstream.errors
    into declared
    from interlock.jobs
        join interlock.workflows on workflows.id = jobs.workflow_id
        join interlock.workflow_steps as steps on steps.workflow_id = jobs.workflow_id and steps.step = declared_as
        left join lateral (
            select jsonb_object_agg(edges.upstream,
                        interlock.step_result(kinds.kind, found.id, found.reused, found.output))
                    filter (where found.state = 'done' or found.reused) as results,
                jsonb_object_agg(edges.upstream, coalesce(found.error,
                        jsonb_build_object('type', found.state, 'message', found.reason)))
                    filter (where edges.condition = 'failure'
                        and (found.state in ('error', 'canceled') or found.poisoned)) as errors
            from interlock.workflow_edges as edges
                cross join lateral (
                    select kind
                    from interlock.workflow_steps
                    where workflow_id = edges.workflow_id and step = edges.upstream
                    limit 1
                ) as kinds
                cross join lateral (
                    select id, state, reused, poisoned, reason, output, error
                    from interlock.tasks
                    where job_id = task.job_id and step = edges.upstream
                    limit 1
                ) as found
            where edges.workflow_id = jobs.workflow_id and edges.downstream = declared_as
                -- A part gets its item, not the whole list again.
                and (task.part_of is null or edges.upstream is distinct from steps.spec ->> 'over')
        ) as upstream on steps.edges > 0 and not compensates
    where jobs.id = task.job_id;
    if declared.kind in ('signal', 'approval') then
        select * into signal
        from interlock.signals
        where job_id = task.job_id
            and name = case declared.kind when 'signal' then declared.spec ->> 'signal' else declared_as end;
        if declared.kind = 'approval' and signal.job_id is not null
            and signal.payload -> 'approved' is distinct from 'true'
        then
            refused := coalesce(refused, format('rejected by %s%s', coalesce(signal.payload ->> 'by', signal.sent_by),
                ': ' || (signal.payload ->> 'comment')));
        end if;
    elsif declared.kind = 'child' and not compensates then
        select jsonb_build_object('job_id', id, 'status', status, 'output', output, 'error', error),
            case when status in ('FAILED', 'CANCELED')
                    and coalesce((declared.spec ->> 'wait')::boolean, true)
                then coalesce(refused, format('child job %s %s%s', id, lower(status), ': ' || reason)) else refused end
        into child, refused
        from interlock.jobs
        where parent_task_id = task.id;
        refused := coalesce(refused, task.input ->> 'refused');
        child := coalesce(child, jsonb_build_object('job_id', null, 'status', null, 'output', null,
            'error', jsonb_build_object('message', refused)));
    end if;
    given := declared.input;
    if task.part_of is not null and declared.spec ->> 'over_input' is not null then
        -- The map stores the job's input without the list that it maps over.
        select input -> 'job_input' into given from interlock.tasks where id = task.part_of;
    end if;
    document := jsonb_build_object('workflow', declared.name, 'version', declared.version, 'job_input', given,
        'results', coalesce(declared.results, '{}'), 'errors', coalesce(declared.errors, '{}'),
        'config', coalesce(declared.spec -> 'config', '{}'), 'item', task.input -> 'item',
        'index', task.input -> 'index', 'kind', case when compensates then 'compensation' else declared.kind end,
        'branches', coalesce(declared.spec -> 'branches', '[]'), 'signal', signal.payload,
        'timed_out', declared.kind in ('signal', 'approval') and task.input ->> 'refused' is not null,
        'child', child, 'wait', coalesce((declared.spec ->> 'wait')::boolean, true),
        'result', task.input -> 'result', 'refused', refused);
    if pg_column_size(document) > 128 * 1024 * 1024 then
        -- As text it may be six times as long, and the server can send at most a gigabyte.
        raise program_limit_exceeded using message = 'they exceed 128 MB';
    end if;
    return document;
exception when others then
    return '{"workflow": null, "version": null, "job_input": null, "results": {}, "errors": {}, "config": {},
        "item": null, "index": null, "kind": null, "branches": [], "signal": null, "timed_out": false, "child": null,
        "wait": true, "result": null}'::jsonb || jsonb_build_object('refused',
            coalesce(refused, format('the inputs of the step cannot be gathered: %s', sqlerrm)));
end
$$;
