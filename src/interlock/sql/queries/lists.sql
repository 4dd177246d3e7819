-- Lists of tasks and jobs, newest first. A statement looks at no more than `window` rows, in the order of their ids, from
-- below the id `below` down to the id `above`. It returns the rows that meet all conditions, at most `limit`, and the
-- last row of the window, whether it meets them or not: `matches` and `looked_at` tell. A condition that is null holds.
--
-- Two statements for each table: one walks the primary key; one walks the index of the most selective condition, and
-- then reads the rows by id. The indexes are the partial ones that a task or a job without that feature never touches.
-- Not prepared: constants remove the branches that are not used, and make partial indexes usable.

-- name: walk_indexes_of_lists
select set_config('enable_seqscan', 'off', true)

-- name: count_pending_tasks
-- Counts pending tasks up to `most`.
select (
        select count(*)
        from (select from interlock.tasks where state = 'pending' and limit_keys is null limit %(most)s) as found
    ) + (
        select count(*)
        from (select from interlock.tasks where state = 'pending' and limit_keys is not null limit %(most)s) as found
    ) as tasks

-- name: find_tasks
-- Walks the primary key.
select *
from (
        select id, namespace, type, state, reason, priority, run_at, attempt, tries, max_tries, created_at, started_at,
            finished_at, tags, worker_id, job_id, step, looked_at,
            (%(states)s::text[] is null or state = any (%(states)s::text[]))
            and (%(namespace)s::text is null or namespace = %(namespace)s::text)
            and (%(namespaces)s::text[] is null or namespace = any (%(namespaces)s::text[]))
            and (%(type)s::text is null or type = %(type)s::text)
            and (%(tag)s::text is null or tags @> array[%(tag)s::text])
            and (not %(standalone)s::boolean or job_id is null)
            and (not %(steps_only)s::boolean or job_id is not null)
            and (%(worker)s::text is null or worker_id = %(worker)s::text
                or starts_with(worker_id, %(worker)s::text || '-'))
            and (%(created_after)s::timestamptz is null or created_at >= %(created_after)s::timestamptz)
            and (%(created_before)s::timestamptz is null or created_at < %(created_before)s::timestamptz) as matches
        from (
                select id, namespace, type, state, reason, priority, run_at, attempt, tries, max_tries, created_at,
                    started_at, finished_at, tags, worker_id, job_id, step, row_number() over (order by id desc) as looked_at
                from interlock.tasks
                where id < %(below)s and id >= %(above)s
                order by id desc
                limit %(window)s
            ) as looked
    ) as judged
where matches or looked_at = %(window)s
order by id desc
limit %(limit)s

-- name: find_tasks_by_index
-- Walks the indexes of states (`indexed_states`: any but done), or that of one of the other conditions. Pending and running
-- tasks have no index in the order of ids, which every claim and settle would write to: all of them are read and sorted.
-- A running task holds a slot of a worker; pending ones are counted before. `offset 0` keeps the planner from walking the
-- primary key instead.
-- The steps of a job have its correlation id, and are found by their job.
select *
from (
        select id, namespace, type, state, reason, priority, run_at, attempt, tries, max_tries, created_at, started_at,
            finished_at, tags, worker_id, job_id, step, looked_at,
            (%(states)s::text[] is null or state = any (%(states)s::text[]))
            and (%(namespace)s::text is null or namespace = %(namespace)s::text)
            and (%(namespaces)s::text[] is null or namespace = any (%(namespaces)s::text[]))
            and (%(type)s::text is null or type = %(type)s::text)
            and (%(tag)s::text is null or tags @> array[%(tag)s::text])
            and (not %(standalone)s::boolean or job_id is null)
            and (not %(steps_only)s::boolean or job_id is not null)
            and (%(worker)s::text is null or worker_id = %(worker)s::text
                or starts_with(worker_id, %(worker)s::text || '-'))
            and (%(job_id)s::uuid is null or job_id = %(job_id)s::uuid)
            and (%(correlation_id)s::uuid is null or correlation_id = %(correlation_id)s::uuid)
            and (%(request_ids)s::text[] is null or request_id = any (%(request_ids)s::text[]))
            and (%(unique_key)s::text is null or unique_key = %(unique_key)s::text)
            and (%(created_after)s::timestamptz is null or created_at >= %(created_after)s::timestamptz)
            and (%(created_before)s::timestamptz is null or created_at < %(created_before)s::timestamptz) as matches
        from (
                select tasks.*, row_number() over (order by candidates.id desc) as looked_at
                from (
                        select id
                        from (
                            select found.id
                            from unnest(%(indexed_states)s::text[]) as wanted (state)
                                cross join lateral (
                                    select id
                                    from interlock.tasks
                                    where tasks.state = wanted.state and tasks.state in ('error', 'canceled', 'skipped')
                                        and id < %(below)s and id >= %(above)s
                                    order by id desc
                                    limit %(window)s
                                ) as found
                            union all
                            (
                                select id
                                from interlock.tasks
                                where 'waiting' = any (%(indexed_states)s::text[]) and state = 'waiting'
                                    and id < %(below)s and id >= %(above)s
                                order by id desc
                                limit %(window)s
                            )
                            union all
                            select id
                            from (
                                select id
                                from interlock.tasks
                                where 'running' = any (%(indexed_states)s::text[]) and lease_expires_at is not null
                                offset 0
                            ) as running
                            where id < %(below)s and id >= %(above)s
                            union all
                            select id
                            from (
                                select id
                                from interlock.tasks
                                where 'pending' = any (%(indexed_states)s::text[]) and state = 'pending'
                                    and limit_keys is null
                                offset 0
                            ) as pending
                            where id < %(below)s and id >= %(above)s
                            union all
                            select id
                            from (
                                select id
                                from interlock.tasks
                                where 'pending' = any (%(indexed_states)s::text[]) and state = 'pending'
                                    and limit_keys is not null
                                offset 0
                            ) as limited
                            where id < %(below)s and id >= %(above)s
                            union all
                            select id
                            from interlock.tasks
                            where request_id = any (%(request_ids)s::text[])
                                and id < %(below)s and id >= %(above)s
                            union all
                            (
                                select id
                                from interlock.tasks
                                where %(source)s::text = 'unique_key' and unique_key = %(unique_key)s::text
                                    and id < %(below)s and id >= %(above)s
                                order by id desc
                                limit %(window)s
                            )
                            union all
                            select id
                            from (
                                select id
                                from interlock.tasks
                                where %(source)s::text = 'job_id' and job_id = %(job_id)s::uuid
                                offset 0
                            ) as steps
                            where id < %(below)s and id >= %(above)s
                            union all
                            (
                                select id
                                from interlock.tasks
                                where %(source)s::text = 'correlation_id' and correlation_id = %(correlation_id)s::uuid
                                    and job_id is null
                                    and id < %(below)s and id >= %(above)s
                                order by id desc
                                limit %(window)s
                            )
                            union all
                            select id
                            from (
                                select steps.id
                                from (
                                        select id
                                        from interlock.jobs
                                        where correlation_id = %(correlation_id)s::uuid and correlation_id <> id
                                        union all
                                        select %(correlation_id)s::uuid
                                    ) as jobs
                                    join interlock.tasks as steps on steps.job_id = jobs.id
                                where %(source)s::text = 'correlation_id'
                                offset 0
                            ) as correlated
                            where id < %(below)s and id >= %(above)s
                        ) as sources
                        order by id desc
                        limit %(window)s
                    ) as candidates
                    cross join lateral (
                        select id, namespace, type, state, reason, priority, run_at, attempt, tries, max_tries, created_at,
                            started_at, finished_at, tags, worker_id, job_id, step, correlation_id, request_id, unique_key
                        from interlock.tasks
                        where tasks.id = candidates.id
                        offset 0
                    ) as tasks
                order by candidates.id desc
                limit %(window)s
            ) as looked
    ) as judged
where matches or looked_at = %(window)s
order by id desc
limit %(limit)s

-- name: find_tasks_by_id
-- Those of the given tasks that meet the conditions of a selection: state and namespace.
select id, namespace, type, state, reason, priority, run_at, attempt, tries, max_tries, created_at, started_at, finished_at,
    tags, worker_id, job_id, step, 0 as looked_at, true as matches
from interlock.tasks
where id = any (%(ids)s::uuid[]) and id < %(below)s and id >= %(above)s
    and (%(states)s::text[] is null or state = any (%(states)s::text[]))
    and (%(namespace)s::text is null or namespace = %(namespace)s::text)
    and (%(namespaces)s::text[] is null or namespace = any (%(namespaces)s::text[]))
    and (%(type)s::text is null or type = %(type)s::text)
    and (%(tag)s::text is null or tags @> array[%(tag)s::text])
    and (not %(standalone)s::boolean or job_id is null)
    and (not %(steps_only)s::boolean or job_id is not null)
    and (%(job_id)s::uuid is null or job_id = %(job_id)s::uuid)
    and (%(worker)s::text is null or worker_id = %(worker)s::text or starts_with(worker_id, %(worker)s::text || '-'))
    and (%(correlation_id)s::uuid is null or correlation_id = %(correlation_id)s::uuid)
    and (%(request_ids)s::text[] is null or request_id = any (%(request_ids)s::text[]))
    and (%(unique_key)s::text is null or unique_key = %(unique_key)s::text)
    and (%(created_after)s::timestamptz is null or created_at >= %(created_after)s::timestamptz)
    and (%(created_before)s::timestamptz is null or created_at < %(created_before)s::timestamptz)
order by id desc
limit %(limit)s

-- name: estimate_labeled_jobs
-- The planner's estimate of how many jobs have these tags and attributes, from the statistics of the table.
explain (format json)
select
from interlock.jobs
where (%(tags)s::text[] is null or tags @> %(tags)s::text[])
    and (%(attributes)s::jsonb is null or attributes @> %(attributes)s::jsonb)

-- name: find_jobs
-- Walks the primary key.
select judged.*, workflows.name as workflow, workflows.version
from (
        select id, workflow_id, namespace, status, event, reason, depth, parent_job_id, retried_from, request_id,
            correlation_id, actor, ending, open_steps, deadline_at, created_at, started_at, completed_at, updated_at, tags,
            attributes, key, looked_at,
            (%(statuses)s::text[] is null or status = any (%(statuses)s::text[]))
            and (%(workflow_ids)s::uuid[] is null or workflow_id = any (%(workflow_ids)s::uuid[]))
            and (%(namespace)s::text is null or namespace = %(namespace)s::text)
            and (%(namespaces)s::text[] is null or namespace = any (%(namespaces)s::text[]))
            and (%(tags)s::text[] is null or tags @> %(tags)s::text[])
            and (%(attributes)s::jsonb is null or attributes @> %(attributes)s::jsonb)
            and (%(created_after)s::timestamptz is null or created_at >= %(created_after)s::timestamptz)
            and (%(created_before)s::timestamptz is null or created_at < %(created_before)s::timestamptz) as matches
        from (
                select id, workflow_id, namespace, status, event, reason, depth, parent_job_id, retried_from, request_id,
                    correlation_id, actor, ending, open_steps, deadline_at, created_at, started_at, completed_at,
                    updated_at, tags, attributes, key, row_number() over (order by id desc) as looked_at
                from interlock.jobs
                where id < %(below)s and id >= %(above)s
                order by id desc
                limit %(window)s
            ) as looked
    ) as judged
    left join interlock.workflows on workflows.id = judged.workflow_id
where matches or looked_at = %(window)s
order by judged.id desc
limit %(limit)s

-- name: find_jobs_by_index
-- Walks the indexes of states (`indexed_statuses`: any but COMPLETED), that of the workflow (`indexed_workflow_ids`), or
-- that of one of the other conditions. `labeled`: all jobs with the tags and attributes are read and sorted; they are few.
select judged.*, workflows.name as workflow, workflows.version
from (
        select id, workflow_id, namespace, status, event, reason, depth, parent_job_id, retried_from, request_id,
            correlation_id, actor, ending, open_steps, deadline_at, created_at, started_at, completed_at, updated_at, tags,
            attributes, key, looked_at,
            (%(statuses)s::text[] is null or status = any (%(statuses)s::text[]))
            and (%(workflow_ids)s::uuid[] is null or workflow_id = any (%(workflow_ids)s::uuid[]))
            and (%(namespace)s::text is null or namespace = %(namespace)s::text)
            and (%(namespaces)s::text[] is null or namespace = any (%(namespaces)s::text[]))
            and (%(parent)s::uuid is null or parent_job_id = %(parent)s::uuid)
            and (%(key)s::text is null or key = %(key)s::text)
            and (%(request_ids)s::text[] is null or request_id = any (%(request_ids)s::text[]))
            and (%(correlation_id)s::uuid is null or correlation_id = %(correlation_id)s::uuid)
            and (%(tags)s::text[] is null or tags @> %(tags)s::text[])
            and (%(attributes)s::jsonb is null or attributes @> %(attributes)s::jsonb)
            and (%(created_after)s::timestamptz is null or created_at >= %(created_after)s::timestamptz)
            and (%(created_before)s::timestamptz is null or created_at < %(created_before)s::timestamptz) as matches
        from (
                select jobs.*, row_number() over (order by candidates.id desc) as looked_at
                from (
                        select id
                        from (
                            select found.id
                            from unnest(%(indexed_statuses)s::text[]) as wanted (status)
                                cross join lateral (
                                    (
                                        select id
                                        from interlock.jobs
                                        where jobs.status = wanted.status and jobs.status in ('FAILED', 'CANCELED')
                                            and id < %(below)s and id >= %(above)s
                                        order by id desc
                                        limit %(window)s
                                    )
                                    union all
                                    (
                                        select id
                                        from interlock.jobs
                                        where jobs.status = wanted.status
                                            and jobs.status in ('SUBMITTED', 'PENDING', 'RUNNING')
                                            and id < %(below)s and id >= %(above)s
                                        order by id desc
                                        limit %(window)s
                                    )
                                ) as found
                            union all
                            select found.id
                            from unnest(%(indexed_workflow_ids)s::uuid[]) as wanted (workflow_id)
                                cross join lateral (
                                    select id
                                    from interlock.jobs
                                    where jobs.workflow_id = wanted.workflow_id
                                        and id < %(below)s and id >= %(above)s
                                    order by id desc
                                    limit %(window)s
                                ) as found
                            union all
                            select id
                            from interlock.jobs
                            where request_id = any (%(request_ids)s::text[])
                                and id < %(below)s and id >= %(above)s
                            union all
                            (
                                select id
                                from interlock.jobs
                                where %(source)s::text = 'key' and key = %(key)s::text
                                    and id < %(below)s and id >= %(above)s
                                order by id desc
                                limit %(window)s
                            )
                            union all
                            (
                                select id
                                from interlock.jobs
                                where %(source)s::text = 'parent' and parent_job_id = %(parent)s::uuid
                                    and id < %(below)s and id >= %(above)s
                                order by id desc
                                limit %(window)s
                            )
                            union all
                            (
                                select id
                                from interlock.jobs
                                where %(source)s::text = 'correlation_id' and correlation_id = %(correlation_id)s::uuid
                                    and correlation_id <> id and id < %(below)s and id >= %(above)s
                                order by id desc
                                limit %(window)s
                            )
                            union all
                            select id
                            from interlock.jobs
                            where %(source)s::text = 'correlation_id' and id = %(correlation_id)s::uuid
                                and correlation_id = id and id < %(below)s and id >= %(above)s
                            union all
                            select id
                            from (
                                select id
                                from interlock.jobs
                                where %(source)s::text = 'labels'
                                    and (%(tags)s::text[] is null or tags @> %(tags)s::text[])
                                    and (%(attributes)s::jsonb is null or attributes @> %(attributes)s::jsonb)
                                offset 0
                            ) as labeled
                            where id < %(below)s and id >= %(above)s
                        ) as sources
                        order by id desc
                        limit %(window)s
                    ) as candidates
                    cross join lateral (
                        select id, workflow_id, namespace, status, event, reason, depth, parent_job_id, retried_from,
                            request_id, correlation_id, actor, ending, open_steps, deadline_at, created_at, started_at,
                            completed_at, updated_at, tags, attributes, key
                        from interlock.jobs
                        where jobs.id = candidates.id
                        offset 0
                    ) as jobs
                order by candidates.id desc
                limit %(window)s
            ) as looked
    ) as judged
    left join interlock.workflows on workflows.id = judged.workflow_id
where matches or looked_at = %(window)s
order by judged.id desc
limit %(limit)s

-- name: read_workflow_ids
-- The ids of the versions of a workflow, or of one of them.
select id
from interlock.workflows
where name = %(workflow)s::text and version = coalesce(%(version)s::text, version)
