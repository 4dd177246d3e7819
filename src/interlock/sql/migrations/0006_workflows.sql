-- Workflows: what was declared, the jobs that run it, the steps as tasks, and the messages that carry a job on.

-- What the database itself must know of the configuration.
create table interlock.settings (
    id int primary key default 1,
    orchestration_queue text not null default 'orchestration_step_results',
    constraint settings_one_row check (id = 1)
);

insert into interlock.settings default values;

-- Declared workflows never change: another definition is another version.
create table interlock.workflows (
    id uuid primary key default interlock.new_id(),
    name text not null,
    version text not null,
    namespace text not null default 'default',
    definition jsonb not null,
    -- what a submit needs to know, so that it need not read the definition
    root_namespaces text[] not null,
    plain_roots boolean not null,
    timeout_seconds double precision,
    registered_at timestamptz not null default now(),
    unique (name, version)
);

create table interlock.workflow_steps (
    workflow_id uuid not null references interlock.workflows (id),
    step text not null,
    position int not null,
    kind text not null,
    type text,                               -- of the handler; kinds without one are carried out by interlock.pass
    namespace text not null,
    join_rule double precision not null,     -- the share of edges that must be taken; 1 is all, 0 is any
    strategy double precision,               -- of a map: the share of parts that must be done
    edges int not null,
    sink boolean not null,
    compensate text,
    waits_for text,
    priority smallint not null,
    max_tries int not null,
    timeout_seconds double precision,
    backoff jsonb,
    spec jsonb not null,                     -- the step as it stands in the definition
    -- whether a claim can gather what the step is handed by itself, and the part of it that is always the same
    simple boolean not null default false,
    handed jsonb not null default '{}',
    primary key (workflow_id, step)
);

create index workflow_steps_roots on interlock.workflow_steps (workflow_id) where edges = 0;
create index workflow_steps_sinks on interlock.workflow_steps (workflow_id) where sink;

create table interlock.workflow_edges (
    workflow_id uuid not null references interlock.workflows (id),
    upstream text not null,
    downstream text not null,
    condition text not null,
    branch boolean not null,
    primary key (workflow_id, upstream, downstream),
    constraint workflow_edges_condition check (condition in ('success', 'failure'))
);

create index workflow_edges_downstream on interlock.workflow_edges (workflow_id, downstream);

alter table interlock.jobs
    alter column worker_count drop not null,
    alter column worker_count drop default,
    add column workflow_id uuid references interlock.workflows (id),
    add column request_id text,
    add column correlation_id uuid,
    add column actor text,
    add column root_namespaces text[],
    add column timeout_seconds double precision,
    add column deadline_at timestamptz,
    -- what it will become once the last step has ended and the compensations are done, and why
    add column ending text,
    add column ending_reason text,
    add column compensating boolean not null default false,
    -- counters, so that nobody has to count the steps
    add column open_steps int not null default 0,
    add column failed_steps int not null default 0,
    add column retried_from uuid,
    add column reused jsonb,                 -- documents of the steps whose results are taken from that job
    add column parent_task_id uuid,
    -- how often it could not be carried on, and when that is tried again: so it holds up no other
    add column stumbles int not null default 0,
    add column not_before timestamptz,
    add constraint jobs_ending check (ending in ('FAILED', 'CANCELED')),
    add constraint jobs_timeout check (timeout_seconds > 0),
    add constraint jobs_open_steps check (open_steps >= 0);

-- A job is written several times in its life, thousands of jobs a second: dead rows must go while they are few.
alter table interlock.jobs set (
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_analyze_threshold = 1000
);

create unique index jobs_request on interlock.jobs (request_id) where request_id is not null;
create unique index jobs_parent_task on interlock.jobs (parent_task_id) where parent_task_id is not null;
create index jobs_workflow on interlock.jobs (workflow_id, id) where workflow_id is not null;
-- By another order than any other index has, so that the planner takes it whatever the statistics say.
create index jobs_pending on interlock.jobs (workflow_id, created_at, id) where status = 'PENDING';
create index jobs_deadline on interlock.jobs (deadline_at)
    where deadline_at is not null and ending is null and status in ('SUBMITTED', 'PENDING', 'RUNNING');

alter table interlock.tasks
    add column unresolved int not null default 0,   -- edges, or of a map that has begun parts, whose end is not known
    add column taken int not null default 0,
    add column failed int not null default 0,
    add column poisoned boolean not null default false, -- skipped because something failed, not for a branch
    add column advanced boolean not null default false, -- its end has been carried on to the steps after it
    add column reused boolean not null default false,
    add column capped boolean not null default false,   -- its job has a worker_count
    add column part int,                            -- its place among the parts of a map, or among compensations
    add column part_of uuid,                        -- the map's own row
    add column wait_until timestamptz;

-- A step is made once, whatever is replayed.
drop index interlock.tasks_job;
create unique index tasks_job on interlock.tasks (job_id, step) where job_id is not null;
create index tasks_parts on interlock.tasks (part_of, part) where part_of is not null;
create index tasks_capped on interlock.tasks (job_id)
    where capped and (state in ('pending', 'running') or held_by = 'namespace');
create index tasks_held_steps on interlock.tasks (job_id, held_by, priority desc, part, id)
    where state = 'waiting' and held_by in ('worker_count', 'compensation');
-- What has ended and was not carried on: few, and for a moment only, unless a message was lost.
create index tasks_unadvanced on interlock.tasks (coalesce(finished_at, created_at))
    where job_id is not null and not advanced and state in ('done', 'error', 'canceled');
create index tasks_wait_until on interlock.tasks (wait_until) where wait_until is not null and state = 'waiting';

-- Which processes are there, and for whom they work: a worker is live while it runs and until seen_until.
alter table interlock.workers
    add column namespaces text[] not null default '{}',
    add column types text[] not null default '{}',
    add column seen_until timestamptz;

create index workers_live on interlock.workers (seen_until) where status = 'RUNNING';

-- The first signal of a name counts.
create table interlock.signals (
    job_id uuid not null references interlock.jobs (id) on delete cascade,
    name text not null,
    payload jsonb,
    sent_by text not null,
    sent_at timestamptz not null default now(),
    primary key (job_id, name)
);

-- Messages that failed again and again, and were put into the archive of the queue.
create table interlock.orchestration_failures (
    msg_id bigint primary key,
    job_id uuid,
    task_id uuid,
    message jsonb not null,
    error text not null,
    times int not null default 1,
    failed_at timestamptz not null default now(),
    retry_at timestamptz                     -- when it is sent again
);

create index orchestration_failures_task on interlock.orchestration_failures (task_id) where task_id is not null;

-- The end of a step goes to the orchestrator in the transaction that ends it, whoever does. What is marked as
-- advanced has been there already. One scan of the changed rows, and nothing else, when there are no steps.
-- As the owner, so that whoever moves a task needs no right to send; on this table alone, lest he send what he likes.
create function interlock.send_step_results() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp as $$
declare
    messages jsonb[];
    latest bigint;
begin
    if tg_relid <> 'interlock.tasks'::regclass then
        raise exception 'send_step_results() tells of interlock.tasks alone' using errcode = 'IL004';
    end if;
    select array_agg(jsonb_build_object('job_id', job_id, 'task_id', id, 'correlation_id', correlation_id))
    into messages
    from now_row
    where job_id is not null and not advanced and state in ('done', 'error', 'canceled');
    if messages is not null then
        select max(sent) into latest
        from interlock.settings, pgmq.send_batch(settings.orchestration_queue, messages) as sent;
        perform pg_notify('interlock_orchestration', latest::text);
    end if;
    return null;
end
$$;

revoke execute on function interlock.send_step_results() from public;

create trigger send_update after update on interlock.tasks
    referencing new table as now_row for each statement execute function interlock.send_step_results();
alter table interlock.tasks enable always trigger send_update;

-- Locks jobs in the order of their ids, so that nobody waits in a circle, and not against what others insert for them.
-- By the index even when the table looks small at the moment: a plan that was made then is kept while it grows.
create function interlock.lock_jobs(wanted uuid[]) returns setof interlock.jobs language plpgsql
    set enable_seqscan = off as $$
begin
    return query
    select * from interlock.jobs where id = any (wanted) order by id for no key update;
end
$$;

-- The functions below are run for single steps of jobs of any size. Their plans are kept for as long as a session lives,
-- and may have been made while the tables were empty: so none of them may scan a table, and none goes by the job alone.

-- Raises when the results are more than a document can hold.
create function interlock.whole_map_result(map_id uuid) returns jsonb language plpgsql stable
    set enable_seqscan = off as $$
begin
    return (
        select coalesce(jsonb_agg(output -> 'result' order by part), '[]')
        from interlock.tasks
        where part_of = map_id and state = 'done'
    );
end
$$;

-- For those who only look: null when there is too much of it.
create function interlock.map_result(map_id uuid) returns jsonb language plpgsql stable as $$
begin
    return interlock.whole_map_result(map_id);
exception when others then
    return null;
end
$$;

-- The result of a step as others see it. That of a map is made of its parts.
create function interlock.step_result(kind text, step_id uuid, reused boolean, output jsonb) returns jsonb
    language sql stable as $$
    select case when kind = 'map' and not reused then interlock.whole_map_result(step_id) else output -> 'result' end
$$;

-- What a map goes over: the result of a step, or a field of the job's input. Null when that is too large.
create function interlock.map_source(map_job_id uuid, map jsonb) returns jsonb language plpgsql stable
    set enable_seqscan = off as $$
begin
    if map ->> 'over' is null then
        return (select input -> (map ->> 'over_input') from interlock.jobs where id = map_job_id);
    end if;
    return (
        select interlock.step_result(steps.kind, over.id, over.reused, over.output)
        from interlock.jobs
            cross join lateral (
                select kind
                from interlock.workflow_steps
                where workflow_id = jobs.workflow_id and step = map ->> 'over'
                limit 1
            ) as steps
            join interlock.tasks as over on over.job_id = map_job_id and over.step = map ->> 'over'
        where jobs.id = map_job_id and (over.state = 'done' or over.reused)
    );
exception when program_limit_exceeded then
    return null;
end
$$;

-- How many parts a map has; null when what it goes over is neither a list nor a range of whole numbers. A range may have
-- more of them than anybody can count: then it is only said that they are too many.
create function interlock.map_size(source jsonb) returns bigint language plpgsql immutable as $$
begin
    if jsonb_typeof(source) = 'array' then
        return jsonb_array_length(source);
    elsif jsonb_typeof(source) = 'object' and jsonb_typeof(source -> 'start') = 'number'
        and jsonb_typeof(source -> 'stop') = 'number' and jsonb_typeof(source -> 'size') = 'number'
        and (source ->> 'size')::numeric >= 1
        and (source ->> 'start')::numeric % 1 = 0 and (source ->> 'stop')::numeric % 1 = 0
        and (source ->> 'size')::numeric % 1 = 0
    then
        return least(greatest(ceil(((source ->> 'stop')::numeric - (source ->> 'start')::numeric)
            / (source ->> 'size')::numeric), 0), 1e15);
    end if;
    return null;
end
$$;

create function interlock.map_items(source jsonb) returns table (index int, item jsonb) language plpgsql immutable as $$
begin
    if jsonb_typeof(source) = 'array' then
        return query
        select (items.place - 1)::int, items.value
        from jsonb_array_elements(source) with ordinality as items (value, place);
    else
        return query
        select place, jsonb_build_object('start', begins, 'stop', least(begins + size, stop))
        from (select (source ->> 'start')::numeric as start, (source ->> 'stop')::numeric as stop,
                (source ->> 'size')::numeric as size) as range,
            generate_series(0, interlock.map_size(source)::int - 1) as place,
            lateral (select start + place * size as begins) as part;
    end if;
end
$$;

-- The results of the last steps, by name. Null when they cannot be told: too much for one document.
create function interlock.job_output(ended_job_id uuid, ended_workflow_id uuid) returns jsonb
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

-- What a worker is handed with a step that is not a simple one. `refused` says why the step must fail. It is gathered within the claim, and must
-- not raise: one step would keep all others from being claimed.
create function interlock.step_inputs(task interlock.tasks) returns jsonb language plpgsql stable
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
                -- a part is handed its item, and not again the whole list that it is from
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
        -- the map has noted what is left of the input without the list that it goes over
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
        -- as text it may be six times as long, and the server can send no more than a gigabyte
        raise program_limit_exceeded using message = 'together they are more than 128 MB';
    end if;
    return document;
exception when others then
    return '{"workflow": null, "version": null, "job_input": null, "results": {}, "errors": {}, "config": {},
        "item": null, "index": null, "kind": null, "branches": [], "signal": null, "timed_out": false, "child": null,
        "wait": true, "result": null}'::jsonb || jsonb_build_object('refused',
            coalesce(refused, format('what the step needs cannot be handed to it: %s', sqlerrm)));
end
$$;
