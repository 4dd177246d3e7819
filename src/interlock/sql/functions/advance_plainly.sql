-- Takes a batch of messages, as the orchestrator does, and carries their jobs on: steps that are done let those go that
-- wait for nothing else, and complete jobs. Where anything else is in the batch (a failure, a choice, a step that has
-- no handler of its own, a limit, a duplicate), it does nothing at all, and gives nulls: the orchestrator takes that batch,
-- and the rules that say what follows stand there alone. As there, jobs are locked first, in the order of their
-- ids, each statement sees what the last one who held the locks left, and a transaction that ends no job need not wait
-- for the disk. Its plans are kept for as long as a session lives: none of them may scan a table.
--
-- moves: task waiting -release-> pending
-- moves: job RUNNING -success-> COMPLETED
create or replace function interlock.advance_plainly(
    acting text, most int, patience text, moment timestamptz,
    out received int, out released int, out finalized int
) language plpgsql as $$
declare
    ends uuid[];
    wanted uuid[];
    is_plain boolean;
    counted uuid[]; -- the job of each step that has ended
    namespaces text[];
    completed uuid[];
begin
    perform set_config('lock_timeout', patience, true), set_config('interlock.actor', acting, true),
        set_config('enable_seqscan', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true);

    with given as (
        delete from interlock.orchestration_messages
        where msg_id = any (array(
                select msg_id
                from interlock.orchestration_messages
                where vt <= clock_timestamp()
                order by msg_id
                limit most
                for update skip locked
            ))
        returning message
    )
    select count(*), array_agg((message ->> 'task_id')::uuid), array_agg(distinct (message ->> 'job_id')::uuid),
        bool_and(message ?& '{job_id,task_id}' and not message ?| '{cancel,admit,failure}')
    into received, ends, wanted, is_plain
    from given;
    if received = 0 then
        released := 0; finalized := 0;
        return;
    end if;

    select is_plain and count(*) = cardinality(wanted) and bool_and(locked.goes_on)
    into is_plain
    from (
        select status = 'RUNNING' and ending is null and not compensating and worker_count is null as goes_on
        from interlock.jobs
        where id = any (wanted)
        order by id
        for no key update
    ) as locked;
    if is_plain is not true then
        raise sqlstate 'IL010';
    end if;

    with ended as materialized (
        select tasks.id, tasks.job_id, tasks.step, tasks.state, tasks.part_of, jobs.workflow_id
        from interlock.tasks
            cross join lateral (select workflow_id from interlock.jobs where jobs.id = tasks.job_id limit 1) as jobs
        where tasks.id = any (ends)
            and case
                when tasks.state in ('done', 'error', 'canceled') and not tasks.advanced
                    then tasks.job_id = any (wanted)
                else false
            end
    ), waiting as materialized (
        -- over edges
        select found.id, found.namespace, led.edges, found.unresolved <= led.edges as goes,
            led.is_choice or found.unresolved <= led.edges
                and (found.failed > 0 or found.limit_key is not null or steps.kind not in ('plain', 'decision')) as is_judged
        from (
                select ended.job_id, ended.workflow_id, edges.downstream, count(*)::int as edges,
                    bool_or(edges.branch or edges.condition <> 'success') as is_choice
                from ended
                    cross join lateral (
                        select downstream, condition, branch
                        from interlock.workflow_edges
                        where workflow_id = ended.workflow_id and upstream = ended.step
                        offset 0
                    ) as edges
                where ended.part_of is null
                group by ended.job_id, ended.workflow_id, edges.downstream
            ) as led
            cross join lateral (
                select kind
                from interlock.workflow_steps
                where workflow_id = led.workflow_id and step = led.downstream
                limit 1
            ) as steps
            cross join lateral (
                select id, namespace, limit_key, unresolved, failed
                from interlock.tasks
                where job_id = led.job_id and step = led.downstream and state = 'waiting' and unresolved > 0
                limit 1
                for no key update
            ) as found
        union all
        -- maps, for their parts
        select found.id, found.namespace, led.parts, found.unresolved <= led.parts,
            found.unresolved <= led.parts and found.failed > 0
        from (select part_of, count(*)::int as parts from ended where part_of is not null group by part_of) as led
            cross join lateral (
                select id, namespace, unresolved, failed
                from interlock.tasks
                where id = led.part_of and state = 'waiting' and held_by = 'parts'
                limit 1
                for no key update
            ) as found
    ), verdict as materialized (
        select (select count(*) = received and bool_and(state = 'done') from ended)
            and not exists (
                select from waiting
                where is_judged or goes and namespace = any (array(
                        select name from interlock.namespaces where paused_at is not null
                    ))
            ) as is_plain
    ), written as (
        update interlock.tasks
        set advanced = tasks.advanced or change.edges = 0, unresolved = tasks.unresolved - change.edges,
            taken = tasks.taken + change.edges,
            state = case when change.goes then 'pending' else tasks.state end,
            event = case when change.goes then 'release' else tasks.event end,
            reason = case when change.goes then null else tasks.reason end,
            held_by = case when change.goes then null else tasks.held_by end,
            updated_at = case when change.goes then coalesce(moment, now()) else tasks.updated_at end
        from (
            select id, 0 as edges, false as goes from ended
            union all
            select id, edges, goes from waiting
        ) as change
        where tasks.id = any (array(select id from ended union all select id from waiting)) and tasks.id = change.id
            and (select verdict.is_plain from verdict)
        returning tasks.namespace, change.goes
    )
    select (select verdict.is_plain from verdict), (select array_agg(job_id) from ended),
        count(*) filter (where goes), array_agg(distinct namespace) filter (where goes)
    into is_plain, counted, released, namespaces
    from written;
    if is_plain is not true then
        raise sqlstate 'IL010';
    end if;

    with written as (
        update interlock.jobs
        set open_steps = jobs.open_steps - done.steps,
            status = case when jobs.open_steps = done.steps then 'COMPLETED' else jobs.status end,
            event = case when jobs.open_steps = done.steps then 'success' else jobs.event end,
            reason = case when jobs.open_steps = done.steps then null else jobs.reason end,
            output = case when jobs.open_steps = done.steps then interlock.job_output(jobs.id, jobs.workflow_id) end,
            completed_at = case when jobs.open_steps = done.steps then coalesce(moment, now()) end,
            updated_at = coalesce(moment, now())
        from (select id, count(*)::int as steps from unnest(counted) as ended (id) group by id) as done
        where jobs.id = any (wanted) and jobs.id = done.id
        returning jobs.id, jobs.status = 'COMPLETED' as is_over,
            -- whose output can be stored, which is not to fail, and for which nobody but a waiter waits
            jobs.output is not null and jobs.failed_steps = 0 and jobs.parent_task_id is null as is_plain
    )
    select coalesce(bool_and(written.is_plain) filter (where is_over), true), array_agg(id) filter (where is_over)
    into is_plain, completed
    from written;
    if not is_plain then
        raise sqlstate 'IL010';
    end if;

    perform pg_notify('interlock_tasks', name) from unnest(namespaces) as name;
    if completed is null then
        perform set_config('synchronous_commit', 'off', true);
    else
        perform pg_notify('interlock_done', id::text)
        from unnest(completed) as over (id)
        where exists (select from interlock.waiters where task_id = over.id);
    end if;
    finalized := coalesce(cardinality(completed), 0);
exception when sqlstate 'IL010' or invalid_text_representation then
    -- with this, the taking of the messages is undone too
    received := null; released := null; finalized := null;
end
$$;
