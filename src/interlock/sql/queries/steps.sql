-- Steps of jobs: inserts, waits, and reads of steps with their definition. None of these statements changes a state.

-- name: insert_steps
-- The function of the same name inserts them.
select interlock.insert_steps(%(ids)s::uuid[], %(now)s::timestamptz)

-- name: read_root_steps
-- Reads and locks the root steps of jobs that start, the steps whose results they reuse, and those that they leave out.
select tasks.id, tasks.job_id, tasks.step, tasks.namespace, tasks.priority, tasks.limit_keys, steps.kind,
    steps.condition, tasks.reused, tasks.output -> 'orchestration_metadata' -> 'chosen' as chosen,
    (jobs.reused -> steps.step ->> 'skipped_by_failure')::boolean as left_out
from interlock.jobs
    cross join lateral (
        select step, kind, condition
        from interlock.workflow_steps
        where workflow_steps.workflow_id = jobs.workflow_id and edges = 0
        union
        select step, kind, condition
        from interlock.workflow_steps
        where workflow_steps.workflow_id = jobs.workflow_id
            and jobs.reused -> step ?| '{result,skipped_by_failure}'
    ) as steps
    cross join lateral (
        select id, job_id, step, namespace, priority, limit_keys, reused, output
        from interlock.tasks
        where tasks.job_id = jobs.id and tasks.step = steps.step and state = 'waiting'
            and held_by in ('start', 'dependency')
        limit 1
        for no key update
    ) as tasks
where jobs.id = any (%(ids)s::uuid[])

-- name: read_special_steps
-- Reads what the activation of steps without a handler of their own needs: map, sleep, signal, approval and child steps.
-- LATERAL with LIMIT, here and below: a plan that is made while the tables are empty still goes by the keys.
select tasks.id, tasks.job_id, tasks.step, tasks.namespace, tasks.priority, steps.kind, steps.spec,
    case when steps.kind = 'map' then interlock.map_size(interlock.map_source(tasks.job_id, steps.spec)) end as parts,
    -- the job input of every part; without the mapped list, of which a part gets its item
    case when steps.spec ->> 'over_input' is not null then jobs.input - (steps.spec ->> 'over_input') end
        as input_without_source,
    case when steps.kind = 'sleep' then jobs.input -> (steps.spec ->> 'until') end as until,
    case when steps.kind = 'child' then interlock.step_inputs(tasks) end as inputs,
    -- of a retry: the done parts of the map, or the child job, that the step goes on with
    array(
        select kept.part
        from interlock.tasks as kept
        where kept.part_of = (jobs.reused -> steps.step ->> 'map_id')::uuid and kept.part_of is not null
            and (kept.state = 'done' or kept.reused)
    ) as kept_parts,
    (jobs.reused -> steps.step ->> 'child_id')::uuid as retried_child_id,
    (jobs.reused -> steps.step ->> 'iteration')::int as retried_iteration,
    -- `input.order.manager` is a path into the input of the job
    case
        when starts_with(steps.spec ->> 'assignee', 'input.')
            then jobs.input #> (string_to_array(steps.spec ->> 'assignee', '.'))[2:]
    end as assignee
from interlock.tasks
    cross join lateral (
        select workflow_id, input, reused from interlock.jobs where jobs.id = tasks.job_id limit 1
    ) as jobs
    cross join lateral (
        select step, position, kind, spec
        from interlock.workflow_steps
        where workflow_steps.workflow_id = jobs.workflow_id and workflow_steps.step = tasks.step
        limit 1
    ) as steps
where tasks.id = any (%(ids)s::uuid[])
order by steps.position

-- name: read_condition_values
-- Reads the values that the conditions of steps compare: the job's input and the results of upstream steps.
select tasks.id, interlock.step_inputs(tasks) as inputs
from interlock.tasks
where tasks.id = any (%(ids)s::uuid[])

-- name: read_upstream_ends
-- Reads the ends of the steps that the rules of waiting steps name.
select wanted.id, upstream.step, upstream.state, upstream.skipped_by_failure, upstream.superseded, upstream.reused,
    upstream.output -> 'orchestration_metadata' -> 'chosen' as chosen
from unnest(%(ids)s::uuid[], %(job_ids)s::uuid[], %(upstreams)s::text[]) as wanted (id, job_id, step)
    cross join lateral (
        select step, state, skipped_by_failure, superseded, reused, output
        from interlock.tasks
        where tasks.job_id = wanted.job_id and tasks.step = wanted.step
        limit 1
    ) as upstream
where upstream.state in ('done', 'error', 'canceled', 'skipped')

-- name: read_ended_parts
-- Reads how many parts of maps are done, the first names of the others, and the share that must be done.
select map.id, steps.strategy, parts.parts, parts.done, parts.failed, map.reason,
    map.cancel_requested_at is not null as is_to_be_canceled
from interlock.tasks as map
    cross join lateral (select workflow_id from interlock.jobs where jobs.id = map.job_id limit 1) as jobs
    cross join lateral (
        select strategy
        from interlock.workflow_steps
        where workflow_steps.workflow_id = jobs.workflow_id and workflow_steps.step = map.step
        limit 1
    ) as steps
    cross join lateral (
        select count(*) as parts, count(*) filter (where state = 'done' or reused) as done,
            (array_agg(step order by part) filter (where state <> 'done' and not reused))[1:%(names)s::int] as failed
        from interlock.tasks as part
        where part.part_of = map.id
    ) as parts
where map.id = any (%(ids)s::uuid[])

-- name: read_unfinished_parts
select id
from interlock.tasks
where part_of = any (%(ids)s::uuid[]) and part_of is not null and state in ('waiting', 'pending', 'running')
order by id

-- name: request_cancel_of_waiting_steps
-- Marks steps that wait for their parts or their child job: these are canceled, and the step ends with them.
update interlock.tasks
set cancel_requested_at = coalesce(cancel_requested_at, %(now)s::timestamptz, now()),
    reason = case
        when cancel_requested_at is null then coalesce(%(reason)s, 'canceled by ' || %(actor)s::text)
        else reason
    end
where id = any (%(ids)s::uuid[]) and state = 'waiting' and held_by in ('job', 'parts')
returning id, job_id, held_by

-- name: read_steps_to_cancel
-- Reads the steps among these that are to be canceled, and wait for their parts or their child job.
select id
from interlock.tasks
where id = any (%(ids)s::uuid[])
    and case when state = 'waiting' and cancel_requested_at is not null then held_by in ('job', 'parts') else false end

-- name: supersede_upstream_steps
-- Marks the unfinished dependencies of steps that have what they need: their end does not fail the job.
update interlock.tasks
set superseded = true
where id = any (array(
        select upstream.id
        from interlock.tasks as met
            cross join lateral (select workflow_id from interlock.jobs where jobs.id = met.job_id limit 1) as jobs
            cross join lateral (
                select workflow_edges.upstream
                from interlock.workflow_edges
                where workflow_id = jobs.workflow_id and downstream = met.step and condition <> 'recovery'
                offset 0
            ) as edges
            cross join lateral (
                select id
                from interlock.tasks
                where tasks.job_id = met.job_id and tasks.step = edges.upstream
                    and state in ('waiting', 'pending', 'running')
                limit 1
                for no key update
            ) as upstream
        where met.id = any (%(ids)s::uuid[])
        order by upstream.id
    ))
returning id, job_id, step

-- name: insert_parts
-- Inserts one task for each element of a map's source. The map's own row has their number already. Kept parts, whose ids
-- are given, get the result of the same part of the map that this one retries; the caller skips them.
insert into interlock.tasks (id, namespace, type, state, held_by, reason, priority, run_at, max_tries, timeout_seconds,
    backoff, limit_keys, limit_weight, tags, callback_url, job_id, step, correlation_id, traceparent, capped, part, part_of, input,
    reused, output)
select coalesce(kept.id, interlock.new_id()), map.namespace, steps.type,
    case when hold.held_by is null then 'pending' else 'waiting' end, hold.held_by,
    hold.reason, map.priority, coalesce(%(now)s::timestamptz, now()), steps.max_tries, steps.timeout_seconds,
    steps.backoff, limits.keys, limits.weight, steps.tags, steps.callback_url, map.job_id,
    format('%%s[%%s]', map.step, items.index), map.correlation_id, map.traceparent, map.capped, items.index, map.id,
    jsonb_build_object('item', items.item, 'index', items.index), kept.id is not null, source.output
from interlock.tasks as map
    join interlock.jobs on jobs.id = map.job_id
    join interlock.workflow_steps as steps on steps.workflow_id = jobs.workflow_id and steps.step = map.step
    left join interlock.namespaces as paused on paused.name = map.namespace and paused.paused_at is not null
    cross join lateral interlock.map_items(interlock.map_source(map.job_id, steps.spec)) as items
    cross join lateral (
        select case
                when steps.limit_keys is not null
                    then interlock.step_limit_keys(steps.limit_keys, jobs.input, to_jsonb(items))
            end as keys,
            case
                when steps.limit_weight is not null
                    then interlock.step_limit_weight(steps.limit_weight, jobs.input, to_jsonb(items))
            end as weight
        offset 0
    ) as limits
    -- one key: by the map alone, the planner would compare each part with all others
    left join unnest(%(kept_ids)s::uuid[], %(kept_steps)s::text[]) as kept (id, step)
        on kept.step = format('%%s %%s', map.id, items.index)
    left join lateral (
        select output
        from interlock.tasks as old
        where old.part_of = (jobs.reused -> map.step ->> 'map_id')::uuid and old.part_of is not null
            and old.part = items.index and kept.id is not null
        limit 1
    ) as source on true
    cross join lateral (
        select case
                when kept.id is not null then 'start'
                when map.capped then 'worker_count'
                when paused.name is not null then 'namespace'
                when steps.limit_keys is not null then 'limit'
            end as held_by,
            case
                when map.capped then interlock.hold_reason('worker_count', jobs.worker_count::text)
                when paused.name is not null then interlock.hold_reason('namespace', paused.name, paused.reason)
                when steps.limit_keys is not null then interlock.hold_reason('limit', array_to_string(limits.keys, ', '))
            end as reason
    ) as hold
where map.id = any (%(ids)s::uuid[])
order by map.id, items.index

-- name: update_waiting_steps
-- Updates steps that go on waiting: their counts, or their next cause. The reason of a hold follows from `held_by`.
update interlock.tasks
set unresolved = coalesce(given.unresolved, tasks.unresolved), taken = coalesce(given.taken, tasks.taken),
    failed = coalesce(given.failed, tasks.failed), held_by = coalesce(given.held_by, tasks.held_by),
    reason = coalesce(given.reason, case given.held_by
            when 'namespace' then (
                select interlock.hold_reason('namespace', name, namespaces.reason)
                from interlock.namespaces
                where name = tasks.namespace
            )
            when 'limit' then interlock.hold_reason('limit', array_to_string(tasks.limit_keys, ', '))
            when 'worker_count' then (
                select interlock.hold_reason('worker_count', worker_count::text)
                from interlock.jobs
                where jobs.id = tasks.job_id
            )
        end, tasks.reason),
    wait_until = coalesce(given.wait_until, tasks.wait_until),
    parts_job_input = coalesce(given.parts_job_input, tasks.parts_job_input),
    wait_started_at = coalesce(given.wait_started_at, tasks.wait_started_at),
    assignee = coalesce(given.assignee, tasks.assignee)
from jsonb_to_recordset(%(steps)s::jsonb) as given (id uuid, unresolved int, taken int, failed int, held_by text,
    reason text, wait_until timestamptz, parts_job_input jsonb, wait_started_at timestamptz, assignee text)
where tasks.id = any (%(ids)s::uuid[]) and tasks.id = given.id
    and case when tasks.state = 'waiting' then true else false end

-- name: read_admissible_steps
-- Reads, for jobs with a worker_count, the ready steps that may run now. A step that waits for a limit counts against
-- worker_count, since the limit admits it without asking the job. A step that waits for a paused namespace does not count.
-- Of each paused namespace one step is returned, to wait for the namespace: its resumption leads to the job.
select found.id, found.namespace, found.limit_keys
from interlock.jobs
    cross join lateral (
        select count(*) as steps
        from interlock.tasks
        where job_id = jobs.id and capped and (state in ('pending', 'running') or held_by = 'limit')
            and not advanced -- requeued after its end was advanced
    ) as active
    cross join lateral (
        (
            select id, namespace, limit_keys
            from interlock.tasks
            where job_id = jobs.id and state = 'waiting' and held_by = 'worker_count'
                and namespace <> all (%(paused)s::text[])
            order by held_by, priority desc, part, id
            limit greatest(jobs.worker_count - active.steps, 0)
        )
        union all
        select held.id, held.namespace, held.limit_keys
        from unnest(%(paused)s::text[]) as paused (name)
            cross join lateral (
                select id, namespace, limit_keys
                from interlock.tasks
                where job_id = jobs.id and state = 'waiting' and held_by = 'worker_count' and namespace = paused.name
                order by held_by, priority desc, part, id
                limit 1
            ) as held
        where not exists (
            select from interlock.tasks
            where job_id = jobs.id and capped and held_by = 'namespace' and namespace = paused.name
        )
    ) as found
where jobs.id = any (%(ids)s::uuid[]) and jobs.worker_count is not null

-- name: insert_compensations
-- Inserts compensations in the order in which they run: the step that ended last first. Steps of a completed child job are
-- undone at the place of the child step, after the compensation of that step itself and before steps that ended earlier.
-- Tries, backoff, timeout, limit, tags and callback are those of the compensating task, where the definition has them.
with recursive tree as (
    select id as root_id, id, workflow_id, input, correlation_id, traceparent, '{}'::numeric[] as place, '' as path
    from interlock.jobs
    where id = any (%(ids)s::uuid[])
    union all
    select tree.root_id, child.id, child.workflow_id, child.input, tree.correlation_id, tree.traceparent,
        tree.place || array[extract(epoch from greatest(child.completed_at, starter.finished_at)),
            coalesce(starter.position, -1), extract(epoch from child.completed_at), child.iteration],
        tree.path || coalesce(starter.step, child.id::text)
            || case when child.iteration > 1 then '#' || child.iteration else '' end || '/'
    from tree
        cross join lateral (
            select id, workflow_id, input, parent_task_id, iteration, completed_at
            from interlock.jobs
            where parent_job_id = tree.id and parent_job_id is not null and status = 'COMPLETED'
            offset 0
        ) as child
        left join lateral (
            select tasks.step, tasks.finished_at, steps.position
            from interlock.tasks
                cross join lateral (
                    select position
                    from interlock.workflow_steps
                    where workflow_steps.workflow_id = tree.workflow_id and workflow_steps.step = tasks.step
                    limit 1
                ) as steps
            where tasks.id = child.parent_task_id
            limit 1
        ) as starter on true
)
insert into interlock.tasks (namespace, type, state, held_by, reason, run_at, max_tries, timeout_seconds, backoff,
    limit_keys, limit_weight, tags, callback_url, job_id, step, compensates, correlation_id, traceparent, capped, part, input)
select done.namespace, steps.compensate, 'waiting', 'compensation', 'waits for the compensations before it',
    coalesce(%(now)s::timestamptz, now()), coalesce((steps.spec ->> 'compensate_tries')::int, steps.max_tries),
    coalesce((steps.spec ->> 'compensate_timeout')::float8, steps.timeout_seconds),
    case when steps.spec ? 'compensate_tries' then null else steps.backoff end,
    case
        when steps.spec ? 'compensate_limit_key' then interlock.step_limit_keys(array(
                select jsonb_path_query(steps.spec, 'lax $.compensate_limit_key[*]') #>> '{}'
            ), tree.input)
    end,
    case
        when steps.spec ? 'compensate_limit_weight'
            then interlock.step_limit_weight(steps.spec ->> 'compensate_limit_weight', tree.input)
    end,
    case
        when steps.spec ? 'compensate_tags'
            then array(select jsonb_array_elements_text(steps.spec -> 'compensate_tags'))
    end,
    steps.spec ->> 'compensate_callback_url', tree.root_id, 'compensate:' || tree.path || done.step, done.id,
    tree.correlation_id, tree.traceparent, (select worker_count is not null from interlock.jobs as root where root.id = tree.root_id),
    row_number() over (
        partition by tree.root_id
        -- by time, then by the order of the definition; infinity: the compensation of a child step comes before those of
        -- the child's steps
        order by tree.place || array[extract(epoch from done.finished_at), steps.position, 'infinity'] desc
    ) - 1,
    jsonb_build_object('result', interlock.step_result(steps.kind, done.id, done.reused, done.output))
from tree
    join interlock.workflow_steps as steps on steps.workflow_id = tree.workflow_id and steps.compensate is not null
    join interlock.tasks as done on done.job_id = tree.id and done.step = steps.step and done.state = 'done'
order by tree.root_id, tree.place || array[extract(epoch from done.finished_at), steps.position, 'infinity'] desc
returning id, job_id, part

-- name: read_next_compensations
-- Reads the next compensation of each job, if all of its open steps are waiting compensations: no two run at once.
select found.id, found.namespace, found.limit_keys
from unnest(%(ids)s::uuid[], %(open_steps)s::int[]) as wanted (job_id, open_steps)
    cross join lateral (
        select id, namespace, limit_keys
        from interlock.tasks
        where tasks.job_id = wanted.job_id and state = 'waiting' and held_by = 'compensation'
        order by held_by, priority desc, part, id
        limit 1
    ) as found
where wanted.open_steps = (
        select count(*)
        from interlock.tasks
        where tasks.job_id = wanted.job_id and state = 'waiting' and held_by = 'compensation'
    )

-- name: read_failed_compensations
select tasks.job_id, substr(step, length('compensate:') + 1) as step,
    coalesce(error, jsonb_build_object('type', state, 'message', reason)) as error
from interlock.tasks
where job_id = any (%(ids)s::uuid[]) and step like 'compensate:%%' and state in ('error', 'canceled')

-- name: lock_unfinished_steps
-- Locks them, so that no step returns from running to pending between the statements that cancel either.
select id, state
from interlock.tasks
where job_id = any (%(ids)s::uuid[]) and state in ('waiting', 'pending', 'running')
order by id
for no key update

-- name: find_steps
-- The ids of one page of the steps of a job, in the order of read_steps; `after` is the last one of the page before. Goes
-- through the declared steps and reads the parts of a map in the order of their index, up to the end of the page.
with last as materialized (
    select coalesce(steps.position, mapped.position, 2147483647) as position, tasks.part_of is not null as is_part,
        coalesce(tasks.part, -1) as part
    from interlock.tasks
        join interlock.jobs on jobs.id = tasks.job_id
        left join interlock.workflow_steps as steps
            on steps.workflow_id = jobs.workflow_id and steps.step = tasks.step
        left join interlock.tasks as map on map.id = tasks.part_of
        left join interlock.workflow_steps as mapped
            on mapped.workflow_id = jobs.workflow_id and mapped.step = map.step
    where tasks.id = %(after)s::uuid and tasks.job_id = %(job_id)s::uuid
    union all
    select -1, false, -1
    where %(after)s::uuid is null
), declared as (
    select steps.step, steps.position, last.position as last_position, last.is_part, last.part as last_part
    from interlock.jobs
        join interlock.workflow_steps as steps on steps.workflow_id = jobs.workflow_id
        join last on steps.position >= last.position
    where jobs.id = %(job_id)s::uuid
    order by steps.position
)
select id
from (
        (
            select found.id, declared.position, found.is_part, found.part
            from declared
                cross join lateral (
                    select tasks.id, false as is_part, -1 as part
                    from interlock.tasks
                    where tasks.job_id = %(job_id)s::uuid and tasks.step = declared.step
                        and declared.position > declared.last_position
                    union all
                    (
                        select parts.id, true, parts.part
                        from interlock.tasks as map
                            join interlock.tasks as parts on parts.part_of = map.id
                        where map.job_id = %(job_id)s::uuid and map.step = declared.step
                            and (declared.position > declared.last_position or not declared.is_part
                                or parts.part > declared.last_part)
                        order by parts.part
                        limit %(limit)s
                    )
                ) as found
            order by declared.position, found.is_part, found.part
            limit %(limit)s
        )
        union all
        (
            select tasks.id, 2147483647, false, coalesce(tasks.part, -1)
            from interlock.tasks
                cross join last
            where tasks.job_id = %(job_id)s::uuid and tasks.compensates is not null
                and (2147483647, coalesce(tasks.part, -1)) > (last.position, last.part)
            order by tasks.part
            limit %(limit)s
        )
    ) as steps
order by position, is_part, part
limit %(limit)s

-- name: read_steps
-- Reads all steps of a job, or those with these ids, in the order of the definition, each map followed by its parts,
-- compensations last.
select tasks.id, tasks.step, coalesce(steps.kind, case when tasks.part_of is null then 'compensation' else 'part' end)
        as kind,
    tasks.type, tasks.namespace, tasks.state, tasks.event, tasks.reason, tasks.held_by, tasks.priority, tasks.run_at,
    tasks.attempt, tasks.tries, tasks.max_tries, tasks.worker_id, tasks.unresolved, tasks.skipped_by_failure,
    tasks.reused, tasks.part, tasks.part_of, tasks.progress, tasks.input, tasks.error,
    case
        when steps.kind = 'map' and tasks.state = 'done'
            then coalesce(tasks.output, '{}') || jsonb_build_object('result', interlock.map_result(tasks.id))
        else tasks.output
    end as output,
    array(
        select upstream
        from interlock.workflow_edges
        where workflow_id = jobs.workflow_id and downstream = tasks.step
        order by upstream
    ) as upstreams,
    tasks.wait_until, tasks.created_at, tasks.started_at, tasks.finished_at, tasks.updated_at
from interlock.jobs
    join interlock.tasks on tasks.job_id = jobs.id
    left join interlock.workflow_steps as steps
        on steps.workflow_id = jobs.workflow_id and steps.step = tasks.step
    left join interlock.tasks as map on map.id = tasks.part_of
    left join interlock.workflow_steps as mapped
        on mapped.workflow_id = jobs.workflow_id and mapped.step = map.step
where jobs.id = %(job_id)s and (%(ids)s::uuid[] is null or tasks.id = any (%(ids)s::uuid[]))
order by coalesce(steps.position, mapped.position), tasks.part_of is not null, tasks.part, tasks.id

-- name: read_reusable_steps
-- Reads the ends of the steps of a job, and the results that a retry can reuse: those of done steps. `undone` steps were
-- compensated; a missing step has been pruned. `unfinished` names what a step that runs again can go on with: the done
-- parts of a map, or the last child job, if that did not complete.
select steps.step, steps.kind, tasks.id is null as is_missing, compensation.undone, tasks.state, tasks.skipped_by_failure,
    tasks.superseded, tasks.reused, jobs.reused -> steps.step -> 'skipped_by_failure' is not null as is_left_out,
    case
        when (tasks.state = 'done' or tasks.reused)
            then coalesce(tasks.output, '{}') || jsonb_build_object('result',
                interlock.step_result(steps.kind, tasks.id, tasks.reused, tasks.output))
    end as document,
    coalesce(
        case
            when steps.kind = 'map' and exists (select from interlock.tasks as part where part.part_of = tasks.id)
                then jsonb_build_object('map_id', tasks.id)
        end,
        (
            select case
                    when child.status in ('FAILED', 'CANCELED')
                        then jsonb_build_object('child_id', child.id, 'iteration', child.iteration)
                    else 'null'
                end
            from interlock.jobs as child
            where steps.kind = 'child' and child.parent_task_id = tasks.id and child.parent_task_id is not null
            order by child.iteration desc
            limit 1
        ),
        -- the retried job did not come to this step itself
        case when jobs.reused -> steps.step ?| '{map_id,child_id}' then jobs.reused -> steps.step end
    ) as unfinished
from interlock.jobs
    join interlock.workflow_steps as steps on steps.workflow_id = jobs.workflow_id
    left join interlock.tasks on tasks.job_id = jobs.id and tasks.step = steps.step
    cross join lateral (
        select exists (
            select from interlock.tasks as undo
            where undo.job_id = jobs.id and (undo.step = 'compensate:' || steps.step
                    -- a step of its child job
                    or starts_with(undo.step, 'compensate:' || steps.step || '/')
                    or starts_with(undo.step, 'compensate:' || steps.step || '#'))
        ) as undone
    ) as compensation
where jobs.id = %(job_id)s
order by steps.position

-- name: read_job_definition
select definition
from interlock.jobs
    join interlock.workflows on workflows.id = jobs.workflow_id
where jobs.id = %(job_id)s
