-- Enqueues a task, for every client that speaks SQL; the Python client calls it, too. `created` is false when a task
-- with this id, unique key or request id exists already: then `id` is the id of that task, which must have the same
-- type. The Python client limits the size of inputs by its setting `largest_input`. For clients that speak SQL an
-- administrator sets a limit, in bytes of the stored value: alter database ... set interlock.largest_input = 16777216
create or replace function interlock.enqueue(
    type text,
    input jsonb default '{}',
    namespace text default 'default',
    priority int default 0,
    run_at timestamptz default null,
    delay interval default null,
    max_tries int default 5,
    timeout_seconds double precision default null,
    backoff jsonb default null,
    unique_key text default null,
    request_id text default null,
    limit_keys text[] default null,
    limit_weight text default null,
    tags text[] default null,
    callback_url text default null,
    correlation_id uuid default null,
    traceparent text default null,
    task_id uuid default null,
    actor text default null,
    out id uuid,
    out created boolean
) language plpgsql as $$
#variable_conflict use_variable
declare
    wanted uuid := coalesce(task_id, interlock.new_id());
    pause_reason text;
    hold text;
    why text;
    kind text;
    taken text;
    largest bigint := nullif(current_setting('interlock.largest_input', true), '');
begin
    if pg_column_size(input) > largest then
        raise exception 'task %: the input has % bytes, and at most % are stored (setting interlock.largest_input); '
                'store it elsewhere and pass a reference to it', type, pg_column_size(input), largest
            using errcode = 'program_limit_exceeded', schema = 'interlock', table = 'tasks';
    end if;
    -- the rule of config.py: is_addressable
    if namespace ~ '[/[:cntrl:]]' or namespace in ('.', '..') or length(namespace) > 200 then
        raise exception 'namespace must be a name of at most 200 characters without slashes and control characters, and '
                'not . or .., got %', quote_literal(namespace)
            using errcode = 'invalid_parameter_value', schema = 'interlock', table = 'tasks';
    end if;
    if actor is not null then
        perform set_config('interlock.actor', actor, true);
    end if;
    if limit_keys is not null then
        limit_keys := interlock.declared_limit_keys(type, limit_keys, input);
        hold := 'limit';
        why := interlock.hold_reason('limit', array_to_string(limit_keys, ', '));
    end if;
    select n.reason into pause_reason
    from interlock.namespaces n where n.name = namespace and n.paused_at is not null;
    if found then
        hold := 'namespace';
        why := interlock.hold_reason('namespace', namespace, pause_reason);
    end if;
    loop
        insert into interlock.tasks as t (id, namespace, type, state, held_by, reason, priority, run_at, max_tries,
            timeout_seconds, backoff, unique_key, request_id, limit_keys, limit_weight, tags, callback_url, correlation_id,
            traceparent, input)
        values (wanted, namespace, type, case when hold is null then 'pending' else 'waiting' end, hold, why, priority,
            coalesce(run_at, now() + coalesce(delay, '0')), max_tries, timeout_seconds, backoff, unique_key,
            request_id, limit_keys,
            case when limit_weight is not null then interlock.render_limit_weight(limit_weight, input) end, tags,
            callback_url, correlation_id, traceparent, input)
        on conflict do nothing
        returning t.id into id;
        created := id is not null;
        exit when created;
        select t.id, t.type, case
                when t.id = task_id then format('task_id %s', task_id)
                when t.request_id = request_id then format('request_id %s', quote_literal(request_id))
                else format('unique_key %s', quote_literal(unique_key))
            end
        into id, kind, taken
        from interlock.tasks t
        where t.id = task_id or t.request_id = request_id
            or t.unique_key = unique_key and t.state in ('waiting', 'pending', 'running')
        limit 1;
        -- Not found: that task has ended in the meantime, the key is free, and the next round takes it.
        exit when found;
    end loop;
    if not created and kind is distinct from type then
        raise exception 'the % is taken by task %, of type %; one of type % needs its own', taken, id, kind, type
            using errcode = 'IL007', schema = 'interlock', table = 'tasks';
    end if;
end
$$;
