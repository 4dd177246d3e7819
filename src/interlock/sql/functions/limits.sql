-- Limits: keys of tasks from templates, the rule of a key, its use, and the tokens of starts.

-- Returns the bounds of a rule as JSON, the period in seconds.
create or replace function interlock.limit_values(rule interlock.limits) returns jsonb
    language sql immutable parallel safe as $$
    select jsonb_build_object('max_running', rule.max_running, 'max_starts', rule.max_starts, 'max_weight', rule.max_weight,
        'max_cost', rule.max_cost, 'period', extract(epoch from rule.period)::double precision, 'share', rule.share)
$$;

-- Returns the rule of a key: the one with exactly this key, else the pattern with the longest prefix.
create or replace function interlock.limit_rule(wanted text) returns setof interlock.limits
    language sql stable parallel safe rows 1 as $$
    select *
    from interlock.limits
    where key = wanted or prefix is not null and starts_with(wanted, prefix)
    order by prefix is null desc, length(prefix) desc
    limit 1
$$;

-- Returns what was used of a key within the period that ends at a moment.
create or replace function interlock.limit_use(
    wanted text, period interval, moment timestamptz, out starts int, out weight double precision,
    out cost double precision
) language sql stable parallel safe as $$
    select coalesce(sum(starts), 0)::int, coalesce(sum(weight), 0), coalesce(sum(cost), 0)
    from interlock.limit_usage
    where key = wanted and used_at > moment - period
$$;

-- Returns the time at which a key has room for one more start of a weight, while `due` starts of `due_weight` are admitted
-- already; null when nothing within the period is in its way. That is the time at which the newest use leaves the period
-- since which, itself included, too much was used. A task that is heavier than max_weight waits for an empty period.
create or replace function interlock.limit_frees_at(
    wanted text, rule interlock.limits, moment timestamptz, due int, due_weight double precision, wanted_weight double precision
) returns timestamptz language sql stable parallel safe as $$
    select max(used_at) + rule.period
    from (
        select least(used_at, moment) as used_at, weight, sum(starts) over newest as starts_since,
            sum(weight) over newest as weight_since, sum(cost) over newest as cost_since
        from interlock.limit_usage
        where key = wanted and used_at > moment - rule.period
        window newest as (order by used_at desc, id desc)
    ) as usage
    where starts_since > rule.max_starts - due - 1 or cost_since >= rule.max_cost
        or weight > 0 and weight_since > rule.max_weight - due_weight - wanted_weight
$$;

-- Returns the types that live workers run, by namespace.
create or replace function interlock.served_types(moment timestamptz, out namespace text, out type text)
    returns setof record language sql stable parallel safe as $$
    select distinct served.namespace, handled.type
    from interlock.workers
        cross join lateral unnest(workers.namespaces) as served (namespace)
        cross join lateral unnest(workers.types) as handled (type)
    where status = 'RUNNING' and seen_until > moment
$$;

-- Returns a limit key with the values of arguments in the place of {name}. Values must be scalars, and must not contain
-- the characters that have a meaning in keys; if not `strict`, any other value counts as empty.
create or replace function interlock.render_limit_key(template text, arguments jsonb, strict boolean default true)
    returns text language plpgsql immutable parallel safe as $$
declare
    rendered text := template;
    name text;
    value text;
begin
    for name in select distinct placeholder[1] from regexp_matches(template, '\{(\w+)\}', 'g') as placeholder loop
        value := arguments ->> name;
        if jsonb_typeof(arguments -> name) is null or jsonb_typeof(arguments -> name) not in ('string', 'number', 'boolean')
            or value = '' or value ~ '[*{}]'
        then
            if strict then
                raise exception 'limit key %: the argument % must be a number, a boolean or a non-empty string without *, { and }, got %',
                    template, name, coalesce((arguments -> name)::text, 'none')
                    using errcode = 'IL009', schema = 'interlock', table = 'tasks', column = 'limit_keys';
            end if;
            value := '';
        end if;
        rendered := replace(rendered, '{' || name || '}', value);
    end loop;
    return rendered;
end
$$;

-- Returns the limit keys of a new task, rendered; refuses keys for which no limit is declared.
create or replace function interlock.declared_limit_keys(type text, templates text[], arguments jsonb) returns text[]
    language plpgsql stable as $$
declare
    keys text[];
    undeclared text;
begin
    select array_agg(rendered.key order by rendered.place) into keys
    from (
        select interlock.render_limit_key(template, arguments) as key, min(place) as place
        from unnest(templates) with ordinality as given (template, place)
        group by 1
    ) as rendered;
    select wanted.key into undeclared
    from unnest(keys) as wanted (key)
    where not exists (select from interlock.limit_rule(wanted.key))
    limit 1;
    if found then
        raise exception 'task %: no limit is declared for its limit key %; declare one with app.limit(%, ...) or with `interlock limits set`, for the key or for a pattern such as %*',
            type, quote_literal(left(undeclared, 200)), quote_literal(left(undeclared, 200)),
            left(substring(undeclared from '^[^:]*:?'), 200)
            using errcode = 'IL009', schema = 'interlock', table = 'limits';
    end if;
    return keys;
end
$$;

-- Returns the limit weight of a new task: a number, or the value of an argument, {name}.
create or replace function interlock.render_limit_weight(template text, arguments jsonb) returns double precision
    language plpgsql immutable parallel safe as $$
declare
    name text := substring(template from '^\{(\w+)\}$');
    weight double precision;
begin
    if name is null then
        weight := template;
    elsif jsonb_typeof(arguments -> name) = 'number' then
        weight := arguments -> name;
    end if;
    if template is not null and not coalesce(weight > 0 and weight < 'infinity', false) then
        raise exception 'limit weight % must be a number greater than 0, got %', template,
            coalesce((case when name is null then to_jsonb(template) else arguments -> name end)::text, 'none')
            using errcode = 'IL009', schema = 'interlock', table = 'tasks', column = 'limit_weight';
    end if;
    return weight;
end
$$;

-- The same for a step, from the input of its job, and the item and index of a part. It must not raise, because it runs in
-- the orchestrator: what is missing counts as empty. Keys are checked when the workflow is registered.
create or replace function interlock.step_limit_keys(templates text[], job_input jsonb, part jsonb default null)
    returns text[] language sql immutable parallel safe as $$
    select array_agg(rendered.key order by rendered.place)
    from (
        select interlock.render_limit_key(template, arguments.given, strict => false) as key, min(place) as place
        from unnest(templates) with ordinality as declared (template, place)
            cross join lateral (
                select case when jsonb_typeof(job_input) = 'object' then job_input else '{}' end
                    || coalesce(part, '{}') as given
            ) as arguments
        group by 1
    ) as rendered
$$;

create or replace function interlock.step_limit_weight(template text, job_input jsonb, part jsonb default null)
    returns double precision language plpgsql immutable parallel safe as $$
begin
    return interlock.render_limit_weight(template,
        case when jsonb_typeof(job_input) = 'object' then job_input else '{}' end || coalesce(part, '{}'));
exception when sqlstate 'IL009' then
    return null;
end
$$;

-- Picks pending tasks with a limit and a number of crashes in the order of the claim, locks them, and takes their tokens; the caller claims them
-- in the same statement. A key whose tokens another claim is taking at the moment is passed over.
--
-- No window of a period has more than max_starts starts: `moment`, or the start of the statement, is not after the record
-- of the claim. A token has no time (infinity) before stamp_limit_starts() gives it one after the commit, which is not
-- before that record. So whatever lies within a period before the record counts here.
create or replace function interlock.take_limited_tasks(
    namespaces text[], types text[], least_crashes smallint, most_crashes smallint, most_of_each bigint, most bigint,
    moment timestamptz
) returns setof uuid language plpgsql as $$
#variable_conflict use_column
declare
    checked_at timestamptz := coalesce(moment, now());
    candidate record;
    rule interlock.limits;
    used record;
    wanted text;
    place int;
    fits boolean;
    taken int := 0;
    of_namespace jsonb := '{}';
    -- of each key that was met, at the same place
    keys text[] := '{}';
    metered boolean[] := '{}';
    weighed boolean[] := '{}';
    starts_left double precision[] := '{}';
    weight_left double precision[] := '{}';
    untouched boolean[] := '{}';             -- the whole weight is left
    starts int[] := '{}';
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'tasks with a limit can only be claimed under read committed, not under %',
            current_setting('transaction_isolation') using errcode = 'object_not_in_prerequisite_state';
    end if;
    for candidate in
        select found.id, found.attempt, found.namespace, found.limit_keys, found.weight
        from unnest(namespaces) as served (namespace)
            cross join lateral (
                select id, attempt, tasks.namespace, limit_keys, coalesce(limit_weight, 1) as weight
                from interlock.tasks
                where state = 'pending' and limit_keys is not null and tasks.namespace = served.namespace
                    and crashes >= least_crashes and crashes <= most_crashes
                    and run_at <= checked_at and type = any (types)
                order by crashes, priority desc, run_at, id
                limit 1000
                for update skip locked
            ) as found
    loop
        exit when taken = most;
        continue when (of_namespace ->> candidate.namespace)::int >= most_of_each;
        fits := true;
        foreach wanted in array candidate.limit_keys loop
            place := array_position(keys, wanted);
            if place is null then
                place := cardinality(keys) + 1;
                select * into rule from interlock.limit_rule(wanted);
                keys[place] := wanted;
                metered[place] := rule.period is not null;
                weighed[place] := rule.max_weight is not null;
                starts[place] := 0;
                starts_left[place] := 'infinity';
                weight_left[place] := 'infinity';
                untouched[place] := false;
                if metered[place] then
                    if pg_try_advisory_xact_lock(hashtextextended('interlock limit ' || wanted, 0)) then
                        -- A statement of its own: it sees what the last holder of the lock has committed.
                        select * into used from interlock.limit_use(wanted, rule.period, checked_at);
                        starts_left[place] := case
                            when used.cost >= rule.max_cost then 0
                            else coalesce((rule.max_starts - used.starts)::double precision, 'infinity')
                        end;
                        weight_left[place] := coalesce(rule.max_weight - used.weight, 'infinity');
                        untouched[place] := used.weight = 0;
                    else
                        starts_left[place] := 0;
                    end if;
                end if;
            end if;
            fits := fits and starts_left[place] >= 1 and (weight_left[place] >= candidate.weight or untouched[place]);
        end loop;
        continue when not fits;
        foreach wanted in array candidate.limit_keys loop
            place := array_position(keys, wanted);
            starts_left[place] := starts_left[place] - 1;
            weight_left[place] := weight_left[place] - candidate.weight;
            untouched[place] := false;
            if weighed[place] then
                insert into interlock.limit_usage (key, used_at, starts, weight, task_id, attempt)
                values (wanted, 'infinity', 1, candidate.weight, candidate.id, candidate.attempt + 1);
            else
                starts[place] := starts[place] + 1;
            end if;
        end loop;
        taken := taken + 1;
        of_namespace := of_namespace || jsonb_build_object(candidate.namespace,
            coalesce((of_namespace ->> candidate.namespace)::int, 0) + 1);
        return next candidate.id;
    end loop;
    insert into interlock.limit_usage (key, used_at, starts)
    select started.key, 'infinity', started.starts
    from unnest(keys, starts, metered) as started (key, starts, metered)
    where started.starts > 0 and started.metered;
end
$$;

-- Gives the starts of committed claims a time. Skips those that another call is about to write.
create or replace function interlock.stamp_limit_starts(moment timestamptz) returns void language sql as $$
    update interlock.limit_usage
    set used_at = coalesce(moment, clock_timestamp())
    where id = any (array(
            select id from interlock.limit_usage where used_at = 'infinity' order by id for update skip locked
        ))
        and used_at = 'infinity'
$$;

-- Returns the time until a claim finds a pending task with a limit: a task becomes due, or a key has room again.
create or replace function interlock.until_limited_start(served_namespaces text[], served_types text[], moment timestamptz)
    returns interval language sql stable as $$
    select case
            when count(*) > 0
                then least(min(greatest(found.run_at, frees.at)) - coalesce(moment, now()), interval '1 day')
        end
    from unnest(served_namespaces) as served (namespace)
        cross join lateral (
            select limit_keys, min(run_at) as run_at, min(weight) as weight
            from (
                select limit_keys, run_at, coalesce(limit_weight, 1) as weight
                from interlock.tasks
                where state = 'pending' and limit_keys is not null and namespace = served.namespace and crashes = 0
                    and type = any (served_types)
                order by priority desc, run_at, id
                limit 1000
            ) as next
            group by limit_keys
        ) as found
        cross join lateral (
            select max(interlock.limit_frees_at(wanted.key, rule, coalesce(moment, now()), 0, 0, found.weight)) as at
            from unnest(found.limit_keys) as wanted (key)
                cross join lateral interlock.limit_rule(wanted.key) as rule
            where rule.period is not null
        ) as frees
$$;
