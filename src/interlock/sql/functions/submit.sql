-- Submits of jobs: one function for every client, `submit_jobs`, which the Python client and interlock.submit() call, and
-- the inserts below it. enable_seqscan is off where a plan may be made while the table is small and kept while it grows.

-- Returns the workflow that a submit of this name and version runs: without a version, the newest one.
create or replace function interlock.used_workflow(wanted_name text, wanted_version text) returns setof interlock.workflows
    language sql stable parallel safe as $$
    select w.*
    from interlock.workflows as w
    where w.name = wanted_name
        and case when wanted_version is null then w.replaced_at is null else w.version = wanted_version end
    order by w.registered_at desc, w.id desc
    limit 1
$$;

-- Says which of the namespaces have no live worker; null if each has one.
create or replace function interlock.unserved_reason(namespaces text[], moment timestamptz) returns text
    language sql stable as $$
    select format('no live worker serves %s %s', case count(*) when 1 then 'namespace' else 'namespaces' end,
            string_agg(format('''%s''', root.namespace), ', ' order by root.place))
    from unnest(namespaces) with ordinality as root (namespace, place)
    where not exists (
        select from interlock.workers
        where status = 'RUNNING' and seen_until > coalesce(moment, now())
            and root.namespace = any (workers.namespaces)
    )
    having count(*) > 0
$$;

-- Inserts jobs as SUBMITTED, without steps, and returns the ids of the new ones. A job whose id or request id exists is
-- left out. What a job does not have itself is that of its workflow. Called by the statement of the same name,
-- submit_jobs() and insert_keyed_jobs().
create or replace function interlock.insert_jobs(given_jobs jsonb, acting text, moment timestamptz) returns setof uuid
    language plpgsql as $$
begin
    if acting is not null then
        perform set_config('interlock.actor', acting, true);
    end if;
    return query
    insert into interlock.jobs (id, parent_job_id, parent_task_id, iteration, depth, reason, worker_count, task_description,
        namespace, input, workflow_id, request_id, correlation_id, traceparent, actor, root_namespaces, timeout_seconds, deadline_at,
        open_steps, retried_from, reused, tags, attributes, callback_url, key, key_order, on_conflict, debounced_since,
        not_before, created_at, updated_at)
    select given.id, given.parent_job_id, given.parent_task_id, coalesce(given.iteration, 1), coalesce(given.depth, 0),
        given.reason,
        given.worker_count, given.workflow, coalesce(given.namespace, w.namespace, 'default'), coalesce(given.input, '{}'),
        given.workflow_id, given.request_id, coalesce(given.correlation_id, given.id), given.traceparent,
        interlock.actor(), w.root_namespaces, coalesce(given.timeout_seconds, w.timeout_seconds),
        -- `least` ignores nulls, hence the case
        case
            when coalesce(given.timeout_seconds, w.timeout_seconds) is not null
                then coalesce(moment, now())
                    + make_interval(secs => least(coalesce(given.timeout_seconds, w.timeout_seconds), 3155760000))
        end,
        (select count(*) from interlock.workflow_steps where workflow_steps.workflow_id = given.workflow_id),
        given.retried_from, given.reused, coalesce(given.tags, w.tags), coalesce(given.attributes, w.attributes),
        coalesce(given.callback_url, w.callback_url, given.default_callback_url), given.key, given.key_order,
        given.on_conflict, given.debounced_since, given.not_before, coalesce(moment, now()), coalesce(moment, now())
    from jsonb_to_recordset(given_jobs) as given (id uuid, parent_job_id uuid, parent_task_id uuid, iteration int, depth int,
            reason text, worker_count int, workflow text, namespace text, input jsonb, workflow_id uuid, request_id text,
            correlation_id uuid, traceparent text, timeout_seconds float8, retried_from uuid, reused jsonb, tags text[],
            attributes jsonb, callback_url text, default_callback_url text, key text, key_order bigint, on_conflict text,
            debounced_since timestamptz, not_before timestamptz)
        left join interlock.workflows as w on w.id = given.workflow_id
    on conflict do nothing
    returning jobs.id;
end
$$;

-- Returns the key of a job: the given one, or else the one that its workflow declares, where "input.a.b" stands for that
-- field of the input and anything else for itself.
create or replace function interlock.job_key(given text, declared text, input jsonb) returns text
    language sql immutable parallel safe as $$
    select coalesce(given, case
            when declared like 'input.%' then input #>> string_to_array(substr(declared, 7), '.')
            else declared
        end)
$$;

-- Returns the unfinished job with the same key that is directly ahead of a job in the queue.
create or replace function interlock.job_ahead(waiting interlock.jobs) returns uuid language sql stable
    set enable_seqscan = off as $$
    select earlier.id
    from interlock.jobs as earlier
    where earlier.task_description = waiting.task_description and earlier.key = waiting.key
        and earlier.key_order < waiting.key_order and earlier.key is not null
        and earlier.status in ('SUBMITTED', 'PENDING', 'RUNNING')
    order by earlier.key_order desc
    limit 1
$$;

-- Returns the job that replaces an unfinished one: it has the same key, was submitted later, has not started, and cancels
-- what is in progress or is a further submit of the same debounce.
create or replace function interlock.replaced_by(replaced interlock.jobs) returns uuid language sql stable
    set enable_seqscan = off as $$
    select later.id
    from interlock.jobs as later
    where later.task_description = replaced.task_description and later.key = replaced.key
        and later.key_order > replaced.key_order and later.key is not null and later.status in ('SUBMITTED', 'PENDING')
        and (
            later.on_conflict = 'cancel_in_progress'
            or later.debounced_since is not null and replaced.debounced_since is not null
                and replaced.status in ('SUBMITTED', 'PENDING')
        )
    order by later.key_order desc
    limit 1
$$;

-- Inserts jobs that may have a key, one after the other. The transaction holds the lock of each key until its end, so that
-- two submits of one key do not overlap. Returns the outcome for each job:
--   free       inserted, and no unfinished job with its key is ahead
--   queued     inserted behind unfinished jobs with its key
--   debounced  inserted, to be validated and started at not_before
--   existing   not inserted: `job_id` has its request id, or its key and the policy is to return that; a job that is about to
--              fail or to be canceled is not returned, the new one queues behind it
--   conflict   not inserted: `job_id` has its key and has not ended
--   invalid    not inserted: the options contradict each other
create or replace function interlock.insert_keyed_jobs(given_jobs jsonb, acting text, moment timestamptz)
    returns table (given_id uuid, outcome text, job_id uuid, reason text) language plpgsql
    set enable_seqscan = off as $$
#variable_conflict use_variable
declare
    given record;
    last_job record; -- unfinished, with the same key
    holder uuid; -- the last job that is in conflict with the submit
    going_on uuid; -- the last of these that is not about to fail or to be canceled
    own_key text;
    policy text;
    burst timestamptz;
    starts_at timestamptz;
    notifies boolean := false;
begin
    -- in one order, so that two submits of several keys do not deadlock
    perform pg_advisory_xact_lock(locks.id)
    from (
        select distinct hashtextextended(format('interlock job key %s %s', one.workflow, found.key), 0) as id
        from jsonb_to_recordset(given_jobs) as one (workflow text, workflow_id uuid, input jsonb, key text)
            join interlock.workflows as w on w.id = one.workflow_id
            cross join lateral (select interlock.job_key(one.key, w.key, one.input) as key) as found
        where found.key is not null
        order by 1
    ) as locks;

    for given in
        select one.document, one.document ->> 'workflow' as workflow, (one.document ->> 'id')::uuid as id,
            one.document ->> 'request_id' as request_id, (one.document ->> 'parent_job_id')::uuid as parent_job_id,
            (one.document ->> 'parent_task_id')::uuid as parent_task_id, one.document ->> 'on_conflict' as policy,
            one.document ->> 'key' as key, (one.document ->> 'debounce')::float8 as debounce,
            (one.document ->> 'debounce_max')::float8 as debounce_max, one.document -> 'input' as input,
            w.key as declared_key, w.on_conflict as declared_policy
        from jsonb_array_elements(given_jobs) with ordinality as one (document, place)
            join interlock.workflows as w on w.id = (one.document ->> 'workflow_id')::uuid
        order by one.place
    loop
        given_id := given.id;
        job_id := given.id;
        reason := null;
        starts_at := null;
        burst := null;
        own_key := interlock.job_key(given.key, given.declared_key, given.input);
        policy := coalesce(given.policy, given.declared_policy, 'queue');

        select j.id into job_id from interlock.jobs as j where j.request_id = given.request_id;
        if found then
            outcome := 'existing';
            return next;
            continue;
        end if;
        job_id := given.id;

        if own_key is null and given.declared_key is not null then
            reason := format('workflow %s: its key is %s, which the input does not have', given.workflow,
                given.declared_key);
        elsif own_key is null and (given.policy is not null or given.debounce is not null) then
            reason := format('workflow %s: on_conflict and debounce need a key', given.workflow);
        elsif octet_length(own_key) > 2000 then
            reason := format('workflow %s: its key has %s bytes; the limit is 2000', given.workflow,
                octet_length(own_key));
        end if;
        if reason is not null then
            outcome := 'invalid';
            return next;
            continue;
        end if;

        select j.id, j.key_order into last_job
        from interlock.jobs as j
        where j.task_description = given.workflow and j.key = own_key and j.key is not null
            and j.status in ('SUBMITTED', 'PENDING', 'RUNNING')
        order by j.key_order desc
        limit 1;
        holder := last_job.id;
        if given.debounce is not null then
            -- waiting jobs of the same debounce are replaced, and no conflict
            select j.id into holder
            from interlock.jobs as j
            where j.task_description = given.workflow and j.key = own_key and j.key is not null
                and j.status in ('SUBMITTED', 'PENDING', 'RUNNING')
                and (j.debounced_since is null or j.status = 'RUNNING')
            order by j.key_order desc
            limit 1;
            select j.debounced_since into burst
            from interlock.jobs as j
            where j.task_description = given.workflow and j.key = own_key and j.key is not null
                and j.status in ('SUBMITTED', 'PENDING') and j.debounced_since is not null
            order by j.key_order desc
            limit 1;
        end if;

        select j.id into going_on
        from interlock.jobs as j
        where j.task_description = given.workflow and j.key = own_key and j.key is not null
            and j.status in ('SUBMITTED', 'PENDING', 'RUNNING') and j.ending is null
            and (given.debounce is null or j.debounced_since is null or j.status = 'RUNNING')
        order by j.key_order desc
        limit 1;

        outcome := case when last_job.key_order is null then 'free' else 'queued' end;
        if holder is not null then
            if policy = 'reject' or policy = 'return_existing' and given.parent_task_id is not null then
                outcome := 'conflict';
                reason := format('workflow %s: job %s has the key %L and has not ended', given.workflow,
                    holder, own_key);
            elsif policy = 'return_existing' and going_on is not null then
                outcome := 'existing';
                holder := going_on;
            elsif given.parent_job_id is not null and exists (
                with recursive ancestors as (
                    select j.id, j.parent_job_id, j.task_description, j.key
                    from interlock.jobs as j
                    where j.id = given.parent_job_id
                    union all
                    select j.id, j.parent_job_id, j.task_description, j.key
                    from ancestors
                        join interlock.jobs as j on j.id = ancestors.parent_job_id
                )
                select from ancestors as a where a.task_description = given.workflow and a.key = own_key
            ) then
                outcome := 'conflict';
                reason := format('workflow %s: a job that it belongs to has the key %L, so that it would wait for itself',
                    given.workflow, own_key);
            end if;
        end if;
        if outcome in ('existing', 'conflict') then
            job_id := holder;
            return next;
            continue;
        end if;

        if given.debounce is not null then
            outcome := 'debounced';
            burst := coalesce(burst, moment, now());
            -- `least` ignores a null
            starts_at := least(coalesce(moment, now()) + make_interval(secs => given.debounce),
                burst + make_interval(secs => given.debounce_max));
            reason := format('starts at %s unless it is submitted again before (debounce)',
                to_char(starts_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'));
        elsif outcome = 'queued' then
            reason := interlock.hold_reason('key', own_key, last_job.id::text);
        end if;
        if not exists (
            select from interlock.insert_jobs(jsonb_build_array(given.document || jsonb_build_object(
                'key', own_key, 'key_order', case when own_key is not null then coalesce(last_job.key_order, 0) + 1 end,
                'on_conflict', case when own_key is not null then policy end, 'debounced_since', burst,
                'not_before', starts_at, 'reason', reason
            )), acting, moment)
        ) then
            -- a job with this id or parent step exists, or one with this request id was inserted in the meantime
            outcome := 'existing';
            select j.id into job_id
            from interlock.jobs as j
            where j.id = given.id or j.request_id = given.request_id
                or j.parent_task_id = given.parent_task_id and j.iteration = (given.document ->> 'iteration')::int
            limit 1;
        end if;
        notifies := notifies or outcome in ('queued', 'debounced');
        return next;
    end loop;
    if notifies then
        perform pg_notify('interlock_orchestration', 'jobs');
    end if;
end
$$;

-- Submits jobs: looks up their workflows, inserts them, and starts those that can start, with their steps. The rules of a
-- submit are here for every client. Returns the outcome for each job, in the given order; besides those of
-- insert_keyed_jobs():
--   unknown    there is no such workflow, or version; no job of the call is inserted
--   deferred   no job of the call is inserted, because one needs its root steps activated, which the caller may not do
-- `checked`: the caller has checked the inputs; an orchestrator validates and starts other jobs. `needs_activation`: the
-- job has started, and the transaction must activate its root steps, for which an insert is not enough.
--
-- The settings hold for the functions that it calls, too: planning the insert of the steps for each call takes ten times as
-- long as running it.
create or replace function interlock.submit_jobs(
    given_jobs jsonb, acting text, moment timestamptz, checked boolean, may_activate boolean default false
) returns table (given_id uuid, outcome text, job_id uuid, reason text, needs_activation boolean) language plpgsql
    set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
#variable_conflict use_column
declare
    resolved jsonb;
    ids uuid[];
    waits text[]; -- the reason for which each job cannot start yet
    complex boolean[]; -- whether its root steps need to be activated
    keyed boolean;
    made uuid[];
    outcomes text[];
    reasons text[];
begin
    with given as materialized (
        select one.document, one.place, one.document ->> 'workflow' as name, one.document ->> 'version' as version
        from jsonb_array_elements(given_jobs) with ordinality as one (document, place)
    ), used as materialized (
        select wanted.name, wanted.version, w.id, w.key, w.plain_roots,
            interlock.unserved_reason(w.root_namespaces, moment) as wait
        from (select distinct given.name, given.version from given) as wanted
            left join lateral interlock.used_workflow(wanted.name, wanted.version) as w on true
    )
    select jsonb_agg(given.document || jsonb_build_object('workflow_id', used.id) order by given.place),
        array_agg((given.document ->> 'id')::uuid order by given.place), array_agg(used.wait order by given.place),
        array_agg(used.wait is null and (
            not used.plain_roots or coalesce(jsonb_typeof(given.document -> 'reused'), 'null') <> 'null'
        ) order by given.place),
        bool_or(coalesce(used.key, given.document ->> 'key', given.document ->> 'on_conflict',
            given.document ->> 'debounce') is not null),
        array_agg(case when used.id is null then 'unknown' end order by given.place)
    into resolved, ids, waits, complex, keyed, outcomes
    from given
        join used on used.name = given.name and used.version is not distinct from given.version;
    if array_position(outcomes, 'unknown') is not null or checked and not may_activate and true = any (complex) then
        return query
        select each.id, coalesce(each.outcome, 'deferred'), each.id, null::text, false
        from unnest(ids, outcomes) as each (id, outcome);
        return;
    end if;
    if checked and not exists (
        select from interlock.settings
        where to_regclass(format('pgmq.%I', lower('q_' || settings.orchestration_queue))) is not null
    ) then
        raise exception 'jobs need PGMQ and its queue, which this database does not have; run `interlock migrate` as a role '
                'that may create the schema pgmq'
            using errcode = 'object_not_in_prerequisite_state', schema = 'interlock', table = 'jobs';
    end if;

    if keyed then
        select array_agg(each.job_id), array_agg(each.outcome), array_agg(each.reason) into made, outcomes, reasons
        from interlock.insert_keyed_jobs(resolved, acting, moment) as each;
    else
        made := array(select interlock.insert_jobs(resolved, acting, moment));
        select array_agg(found.outcome order by each.place), array_agg(case found.outcome
                when 'free' then each.id
                else coalesce((
                    select j.id from interlock.jobs as j where j.request_id = each.document ->> 'request_id'
                ), each.id)
            end order by each.place)
        into outcomes, made
        from rows from (jsonb_array_elements(resolved), unnest(ids)) with ordinality as each (document, id, place)
            cross join lateral (
                select case when each.id = any (made) then 'free' else 'existing' end as outcome
            ) as found;
    end if;

    if checked then
        -- A debounced job is validated when it is due. An UPDATE of no row costs as much as one of a single row.
        perform interlock.validate_submitted_jobs(acting, array_agg(each.id),
            array_agg(case each.outcome when 'queued' then each.reason else each.wait end), moment)
        from unnest(ids, outcomes, reasons, waits) as each (id, outcome, reason, wait)
        where each.outcome in ('free', 'queued')
        having count(*) > 0;
        perform interlock.start_pending_jobs(acting, array_agg(each.id), null, moment)
        from unnest(ids, outcomes, waits) as each (id, outcome, wait)
        where each.outcome = 'free' and each.wait is null
        having count(*) > 0;
        perform interlock.insert_steps(array_agg(each.id), moment)
        from unnest(ids, outcomes) as each (id, outcome)
        where each.outcome in ('free', 'queued')
        having count(*) > 0;
    end if;
    return query
    select each.id, each.outcome, each.made, each.reason, checked and each.outcome = 'free' and each.complex
    from unnest(ids, outcomes, made, reasons, complex) as each (id, outcome, made, reason, complex);
end
$$;

-- Compares given jobs with the existing ones of the same request ids, and names what differs. A version counts if it is
-- named: without one, the newest may be another now than when the request was made first.
create or replace function interlock.find_submitted_jobs(given_jobs jsonb)
    returns table (given_id uuid, id uuid, request_id text, differing text[]) language sql stable as $$
    select given.id, jobs.id, jobs.request_id, array_remove(array[
            case when jobs.task_description <> given.workflow then 'workflow' end,
            case when jobs.workflow_id <> w.id and given.names_version then 'version' end,
            case when jobs.input <> coalesce(given.input, '{}') then 'input' end,
            case when jobs.parent_job_id is distinct from given.parent_job_id then 'parent' end,
            case when jobs.worker_count is distinct from given.worker_count then 'worker_count' end,
            case when jobs.key is distinct from coalesce(given.key, jobs.key) then 'key' end,
            case when same.version and jobs.timeout_seconds
                is distinct from coalesce(given.timeout_seconds, w.timeout_seconds) then 'timeout' end,
            case when same.version and jobs.tags is distinct from coalesce(given.tags, w.tags) then 'tags' end,
            case when same.version and jobs.attributes
                is distinct from coalesce(given.attributes, w.attributes) then 'attributes' end,
            case when jobs.retried_from is distinct from given.retried_from then 'job to retry' end,
            case when jobs.reused is distinct from given.reused then 'step to retry from' end
        ], null)
    from jsonb_to_recordset(given_jobs) as given (id uuid, workflow text, version text, names_version boolean,
            input jsonb, request_id text, parent_job_id uuid, worker_count int, timeout_seconds float8,
            retried_from uuid, reused jsonb, tags text[], attributes jsonb, key text)
        join interlock.jobs on jobs.request_id = given.request_id
        left join lateral interlock.used_workflow(given.workflow, given.version) as w on true
        -- options that the workflow declares may differ with its version
        cross join lateral (select jobs.workflow_id = w.id as version) as same
$$;

-- Says what is wrong with the options of a job; null if nothing. The checks of the Python client (model/options.py) for
-- clients that speak SQL.
create or replace function interlock.fault_of_job_options(
    request_id text, key text, on_conflict text, debounce interval, debounce_max interval, worker_count int,
    timeout_seconds double precision, tags text[], attributes jsonb, callback_url text
) returns text language sql immutable parallel safe as $$
    select case
        when btrim(request_id) = '' then 'request_id must be a non-empty string'
        when octet_length(request_id) > 2000 then 'request_id must have at most 2000 bytes'
        when btrim(key) = '' then 'key must be a non-empty string'
        when on_conflict not in ('reject', 'return_existing', 'cancel_in_progress', 'queue') then format(
            'on_conflict must be one of reject, return_existing, cancel_in_progress, queue, got %L', on_conflict)
        when debounce <= '0' then format('debounce must be greater than 0, got %s', debounce)
        when debounce_max <= '0' then format('debounce_max must be greater than 0, got %s', debounce_max)
        when worker_count not between 1 and 10 then format('worker_count must be from 1 to 10, got %s', worker_count)
        when (timeout_seconds > 0 and timeout_seconds <= 3155760000) is false then format(
            'timeout_seconds must be greater than 0 and at most 3155760000 (100 years), got %s', timeout_seconds)
        when cardinality(tags) > 100 then format('tags must be at most 100, got %s', cardinality(tags))
        when exists (select from unnest(tags) as tag where tag is null or tag = '' or octet_length(tag) > 2000)
            then 'each of the tags must be a non-empty string of at most 2000 bytes'
        when jsonb_typeof(attributes) <> 'object' then 'attributes must be a JSON object'
        when (select count(*) from jsonb_object_keys(attributes)) > 50 then 'attributes must be at most 50'
        when exists (
            select from jsonb_each(attributes) as attribute
            where btrim(attribute.key) = '' or octet_length(attribute.key) > 2000
                or jsonb_typeof(attribute.value) not in ('string', 'number', 'boolean')
                or octet_length(attribute.value #>> '{}') > 2000
        ) then 'attributes must be a flat object of strings, numbers and booleans, each of at most 2000 bytes'
        when callback_url !~ '^https?://[^/\s[:cntrl:]]+[^\s[:cntrl:]]*$'
            then 'callback_url must be an http or https URL that names a host'
    end
$$;

-- Submits a job, for every client that speaks SQL. The job is stored in the caller's transaction. After its commit an
-- orchestrator checks the input, inserts the steps and starts it, or fails it with the reason. `created` is false when a
-- job with this request id exists, or one with this key if the policy is to return that: then `id` is the id of that job.
create or replace function interlock.submit(
    workflow text,
    input jsonb default '{}',
    version text default null,
    request_id text default null,
    key text default null,
    on_conflict text default null,
    debounce interval default null,
    debounce_max interval default null,
    worker_count int default null,
    timeout_seconds double precision default null,
    correlation_id uuid default null,
    traceparent text default null,
    tags text[] default null,
    attributes jsonb default null,
    callback_url text default null,
    actor text default null,
    out id uuid,
    out created boolean
) language plpgsql as $$
#variable_conflict use_variable
declare
    document jsonb;
    made record;
    known text;
begin
    if jsonb_typeof(input) is distinct from 'object' then
        raise exception 'workflow %: input must be a JSON object', workflow
            using errcode = 'IL009', schema = 'interlock', table = 'jobs', column = 'input';
    end if;
    known := interlock.fault_of_job_options(request_id, key, on_conflict, debounce, debounce_max, worker_count,
        timeout_seconds, tags, attributes, callback_url);
    if known is not null then
        raise exception 'workflow %: %', workflow, known
            using errcode = 'IL009', schema = 'interlock', table = 'jobs';
    end if;
    -- submit_statement() always has a version, so that it is not compared when a request is repeated
    document := jsonb_build_object('id', interlock.new_id(), 'workflow', workflow, 'version', version,
        'names_version', false, 'input', input, 'request_id', request_id,
        'key', key, 'on_conflict', on_conflict, 'debounce', extract(epoch from debounce),
        'debounce_max', extract(epoch from debounce_max), 'worker_count', worker_count,
        'timeout_seconds', timeout_seconds, 'correlation_id', correlation_id, 'traceparent', traceparent, 'tags', tags,
        'attributes', attributes, 'callback_url', callback_url);
    select * into made from interlock.submit_jobs(jsonb_build_array(document), actor, null, checked => false);
    if made.outcome = 'unknown' then
        select string_agg(distinct w.name, ', ') into known
        from interlock.workflows as w
        where w.replaced_at is null;
        raise exception 'there is no workflow %; known are %', workflow || coalesce(' version ' || version, ''),
                coalesce(known, 'none')
            using errcode = 'IL009', schema = 'interlock', table = 'workflows';
    end if;
    if made.outcome in ('conflict', 'invalid') then
        raise exception '%', made.reason
            using errcode = case made.outcome when 'conflict' then 'IL008' else 'IL009' end,
                schema = 'interlock', table = 'jobs', detail = made.job_id;
    end if;
    id := made.job_id;
    created := made.outcome <> 'existing';
    if created then
        perform pg_notify('interlock_orchestration', 'jobs');
        return;
    end if;
    select array_to_string(differing, ', ') into known
    from interlock.find_submitted_jobs(jsonb_build_array(document)) as same
    where cardinality(same.differing) > 0;
    if found then
        raise exception 'request_id % was used before, for job % with another %; a different request needs an id of its own',
                quote_literal(request_id), id, known
            using errcode = 'IL007', schema = 'interlock', table = 'jobs';
    end if;
end
$$;

-- Wakes the orchestrators when a job has ended for whose key another one waits. A job that is submitted at the same time
-- notifies by itself.
create or replace function interlock.notify_free_key() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp as $$
begin
    if exists (
        select from interlock.jobs
        where task_description = new.task_description and key = new.key and key is not null
            and status in ('SUBMITTED', 'PENDING')
    ) then
        perform pg_notify('interlock_orchestration', 'jobs');
    end if;
    return null;
end
$$;

create or replace trigger notify_free_key after update of status on interlock.jobs for each row
    when (new.key is not null and new.status in ('COMPLETED', 'FAILED', 'CANCELED') and old.status <> new.status)
    execute function interlock.notify_free_key();
