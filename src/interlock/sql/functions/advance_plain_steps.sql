-- Takes a batch of messages, or one by its id, and advances their jobs inside the database, in one call, if the whole batch
-- is plain:
--   - every message is the end of a step, without "failure", and no step is reported twice;
--   - every job is RUNNING, is not about to end, does not compensate and has no worker_count;
--   - every step is done;
--   - no edge that leads on is a branch of a decision or of a failure handler;
--   - every step that becomes ready has all dependencies met, no partial join, no condition, no limit, a handler of its own
--     and a namespace that is not paused; no map has all of its parts ended;
--   - every job that completes has no failed step, no parent job and an output that can be stored.
-- Otherwise it changes nothing and returns nulls; the orchestrator takes the batch with take_messages and applies the full
-- rules (workflow/resolve.py). A test compares both paths.
--
-- Moves are made by release_waiting_tasks() and complete_running_jobs(). As in the orchestrator, jobs are locked first, in
-- the order of their ids, and each statement sees the writes of the transaction that held the locks before. Plans are kept
-- for the life of a session, so none of them may scan a table.
create or replace function interlock.advance_plain_steps(
    acting text, max_messages int, only_message bigint, max_lock_wait text, moment timestamptz,
    out received int, out released int, out finalized int, out traceparents text[]
) language plpgsql as $$
declare
    ended_ids uuid[];
    message_job_ids uuid[]; -- the job of each message
    locked_job_ids uuid[];
    is_plain boolean;
    ready_ids uuid[];
    counted_ids uuid[];
    counted_edges int[];
    -- jobs whose last step has ended, and the others with the number of their ended steps
    finished_ids uuid[];
    finished_workflow_ids uuid[];
    unfinished_ids uuid[];
    unfinished_counts int[];
begin
    perform set_config('lock_timeout', max_lock_wait, true), set_config('interlock.actor', acting, true),
        set_config('enable_seqscan', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true);

    with given as (
        delete from interlock.orchestration_messages
        where msg_id = any (array(
                select msg_id
                from interlock.orchestration_messages
                where vt <= clock_timestamp()
                    -- a range, which the generic plan can use
                    and msg_id between coalesce(only_message, 0) and coalesce(only_message, 9223372036854775807)
                order by msg_id
                limit max_messages
                for update skip locked
            ))
        returning message
    )
    select count(*), array_agg((message ->> 'task_id')::uuid), array_agg((message ->> 'job_id')::uuid),
        array_agg(distinct (message ->> 'job_id')::uuid),
        bool_and(message ?& '{job_id,task_id}' and not message ? 'failure'),
        array_agg(message ->> 'traceparent') filter (where message ? 'traceparent')
    into received, ended_ids, message_job_ids, locked_job_ids, is_plain, traceparents
    from given;
    if received = 0 then
        released := 0; finalized := 0;
        return;
    end if;

    -- a batch in which a step is reported twice is refused below, so that messages count ended steps
    select is_plain and count(*) = cardinality(locked_job_ids) and bool_and(locked.is_advancing)
            and coalesce(bool_and(locked.can_complete) filter (where locked.is_finished), true),
        array_agg(locked.id) filter (where locked.is_finished),
        array_agg(locked.workflow_id) filter (where locked.is_finished),
        array_agg(locked.id) filter (where not locked.is_finished),
        array_agg(locked.steps) filter (where not locked.is_finished)
    into is_plain, finished_ids, finished_workflow_ids, unfinished_ids, unfinished_counts
    from (
        select jobs.id, jobs.workflow_id, reported.steps, jobs.open_steps = reported.steps as is_finished,
            jobs.failed_steps = 0 and jobs.parent_job_id is null as can_complete,
            jobs.status = 'RUNNING' and jobs.ending is null and not jobs.compensating and jobs.worker_count is null
                as is_advancing
        from interlock.jobs
            join (
                select id, count(*)::int as steps from unnest(message_job_ids) as reported (id) group by id
            ) as reported on reported.id = jobs.id
        where jobs.id = any (locked_job_ids)
        order by jobs.id
        for no key update of jobs
    ) as locked;
    if is_plain is not true then
        raise sqlstate 'IL010';
    end if;

    with ended as materialized (
        select tasks.id, tasks.job_id, tasks.step, tasks.state, tasks.part_of, jobs.workflow_id
        from interlock.tasks
            cross join lateral (select workflow_id from interlock.jobs where jobs.id = tasks.job_id limit 1) as jobs
        where tasks.id = any (ended_ids)
            and case
                when tasks.state in ('done', 'error', 'canceled') and not tasks.advanced
                    then tasks.job_id = any (locked_job_ids)
                else false
            end
    ), waiting as materialized (
        -- steps downstream of ended ones
        select found.id, found.namespace, resolved.edges, found.unresolved <= resolved.edges as is_ready,
            resolved.is_conditional or steps.needed is not null or found.unresolved <= resolved.edges and (
                found.taken + resolved.edges < steps.edges or steps.condition is not null
                or found.limit_keys is not null or steps.kind not in ('plain', 'decision')
            ) as needs_full_rules
        from (
                select ended.job_id, ended.workflow_id, edges.downstream, count(*)::int as edges,
                    bool_or(edges.branch or edges.condition <> 'after') as is_conditional
                from ended
                    cross join lateral (
                        select downstream, condition, branch
                        from interlock.workflow_edges
                        where workflow_id = ended.workflow_id and upstream = ended.step
                        offset 0
                    ) as edges
                where ended.part_of is null
                group by ended.job_id, ended.workflow_id, edges.downstream
            ) as resolved
            cross join lateral (
                select kind, edges, needed, condition
                from interlock.workflow_steps
                where workflow_id = resolved.workflow_id and step = resolved.downstream
                limit 1
            ) as steps
            cross join lateral (
                select id, namespace, limit_keys, unresolved, taken
                from interlock.tasks
                where job_id = resolved.job_id and step = resolved.downstream and state = 'waiting' and held_by = 'dependency'
                limit 1
                for no key update
            ) as found
        union all
        -- maps whose parts have ended
        select found.id, found.namespace, resolved.parts, found.unresolved <= resolved.parts,
            found.unresolved <= resolved.parts
        from (select part_of, count(*)::int as parts from ended where part_of is not null group by part_of) as resolved
            cross join lateral (
                select id, namespace, unresolved
                from interlock.tasks
                where id = resolved.part_of and state = 'waiting' and held_by = 'parts'
                limit 1
                for no key update
            ) as found
    ), verdict as materialized (
        select (select count(*) = received and bool_and(state = 'done') from ended)
            and not exists (
                select from waiting
                where needs_full_rules or is_ready and namespace = any (array(
                        select name from interlock.namespaces where paused_at is not null
                    ))
            ) as is_plain
    ), counted as (
        -- ended steps are taken; steps that are not ready yet count their resolved edges or parts
        select array_agg(id) as ids, array_agg(edges) as edges
        from (select id, 0 as edges from ended union all select id, edges from waiting where not is_ready) as found
    )
    select verdict.is_plain, (select array_agg(id) from waiting where is_ready), counted.ids, counted.edges
    into is_plain, ready_ids, counted_ids, counted_edges
    from verdict
        cross join counted;
    if is_plain is not true then
        raise sqlstate 'IL010';
    end if;
    released := coalesce(cardinality(ready_ids), 0);
    perform from interlock.release_waiting_tasks(acting, coalesce(ready_ids, '{}'), null, null, moment, counted_ids,
        counted_edges);

    if cardinality(unfinished_ids) > 0 then
        update interlock.jobs
        set open_steps = jobs.open_steps - counted.steps, updated_at = coalesce(moment, clock_timestamp())
        from unnest(unfinished_ids, unfinished_counts) as counted (id, steps)
        where jobs.id = any (unfinished_ids) and jobs.id = counted.id;
    end if;
    finalized := coalesce(cardinality(finished_ids), 0);
    if finalized > 0 and finalized > (
        select count(*)
        from interlock.complete_running_jobs(acting, finished_ids, finished_workflow_ids,
            array_fill(0, array[finalized]), null, moment)
    ) then
        raise sqlstate 'IL010';
    end if;
exception when sqlstate 'IL010' or invalid_text_representation then
    -- this also undoes the deletion of the messages
    received := null; released := null; finalized := null; traceparents := null;
end
$$;
