-- Sources, parts and results of map steps.
--
-- These functions run for single steps of jobs of any size. Their plans are kept as long as the session lives and may
-- have been made while the tables were empty: none of them may scan a table, and none may find a step by its job alone.

-- Returns the results of all parts as an array. Raises when they exceed the size of a jsonb value.
create or replace function interlock.whole_map_result(map_id uuid) returns jsonb language plpgsql stable
    set enable_seqscan = off as $$
begin
    return (
        select coalesce(jsonb_agg(output -> 'result' order by part), '[]')
        from interlock.tasks
        where part_of = map_id and (state = 'done' or reused)
    );
end
$$;

-- Returns the same for readers, and null when the results are too large.
create or replace function interlock.map_result(map_id uuid) returns jsonb language plpgsql stable as $$
begin
    return interlock.whole_map_result(map_id);
exception when others then
    return null;
end
$$;

-- Returns the result of a step as its dependents see it. The result of a map consists of the results of its parts.
create or replace function interlock.step_result(kind text, step_id uuid, reused boolean, output jsonb) returns jsonb
    language sql stable as $$
    select case when kind = 'map' and not reused then interlock.whole_map_result(step_id) else output -> 'result' end
$$;

-- Returns the items of a map: the result of a step, or a field of the job's input. Null when they are too large.
create or replace function interlock.map_source(map_job_id uuid, map jsonb) returns jsonb language plpgsql stable
    set enable_seqscan = off as $$
begin
    if map ->> 'over' is null then
        return (select input -> (map ->> 'over_input') from interlock.jobs where id = map_job_id);
    end if;
    return (
        select interlock.step_result(steps.kind, over.id, over.reused, over.output)
        from interlock.jobs
            cross join lateral interlock.standing_task(jobs.id, jobs.workflow_id, map ->> 'over') as over
            cross join lateral (
                select kind
                from interlock.workflow_steps
                where workflow_id = jobs.workflow_id and step = over.step
                limit 1
            ) as steps
        where jobs.id = map_job_id and over.id is not null
    );
exception when program_limit_exceeded then
    return null;
end
$$;

-- Returns the number of parts of a map; null when the source is neither an array nor a range of whole numbers. The
-- number of parts of a range is capped at 1e15, far above the limit of parts.
create or replace function interlock.map_size(source jsonb) returns bigint language plpgsql immutable as $$
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

-- Returns the items of a map with their indexes.
create or replace function interlock.map_items(source jsonb) returns table (index int, item jsonb)
    language plpgsql immutable as $$
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
