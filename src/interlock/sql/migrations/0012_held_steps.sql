-- Steps are held by the limits of their tasks, and carry their tags and callbacks.

alter table interlock.workflow_steps
    add column limit_key text,
    add column tags text[],
    add column callback_url text;

-- A step that waits for a limit takes up room in its job, so that it has it when the limit lets it in.
drop index interlock.tasks_capped;
create index tasks_capped on interlock.tasks (job_id)
    where capped and (state in ('pending', 'running') or held_by in ('namespace', 'limit'));

-- To let such a step go takes a judgment. All else of the function stays as it is.
do $$
declare
    known text := pg_get_functiondef('interlock.advance_plainly(text, int, text, timestamptz)'::regprocedure);
    made text := replace(replace(known,
        'steps.kind not in (''plain'', ''decision'')',
        'found.limit_key is not null or steps.kind not in (''plain'', ''decision'')'),
        'select id, namespace, unresolved, failed
                from interlock.tasks
                where job_id = led.job_id',
        'select id, namespace, limit_key, unresolved, failed
                from interlock.tasks
                where job_id = led.job_id');
begin
    if length(made) <> length(known) + length('found.limit_key is not null or ') + length('limit_key, ') then
        raise exception 'advance_plainly() is not as it was left by the migrations before';
    end if;
    execute made;
end
$$;
