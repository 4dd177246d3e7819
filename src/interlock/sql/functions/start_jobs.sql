-- Starts submitted jobs: each move, and the insert of the steps. Called by the statements of the same names and by
-- submit_jobs().

-- moves: job SUBMITTED -validate-> PENDING
-- Validates jobs, each with the reason for which it waits; null if it is about to start. Returns their ids.
create or replace function interlock.validate_submitted_jobs(
    acting text, job_ids uuid[], reasons text[], moment timestamptz
) returns table (id uuid) language plpgsql as $$
begin
    perform set_config('interlock.actor', acting, true);
    return query
    update interlock.jobs
    set status = 'PENDING', event = 'validate', reason = given.reason, updated_at = coalesce(moment, clock_timestamp())
    from unnest(job_ids, reasons) as given (id, reason)
    where jobs.id = any (job_ids) and jobs.id = given.id and jobs.status = 'SUBMITTED'
    returning jobs.id;
end
$$;

-- moves: job PENDING -allocate_resources-> RUNNING
-- Starts jobs, and returns their ids.
create or replace function interlock.start_pending_jobs(
    acting text, job_ids uuid[], new_reason text, moment timestamptz
) returns table (id uuid) language plpgsql as $$
begin
    perform set_config('interlock.actor', acting, true);
    return query
    update interlock.jobs
    set status = 'RUNNING', event = 'allocate_resources', reason = new_reason,
        started_at = coalesce(moment, clock_timestamp()), updated_at = coalesce(moment, clock_timestamp())
    where jobs.id = any (job_ids) and jobs.status = 'PENDING'
    returning jobs.id;
end
$$;

-- Inserts all steps of new jobs. Root steps of a started job that have a handler are pending at once, up to worker_count.
create or replace function interlock.insert_steps(job_ids uuid[], moment timestamptz) returns void language plpgsql as $$
#variable_conflict use_column
begin
    insert into interlock.tasks (namespace, type, state, held_by, reason, priority, run_at, max_tries, timeout_seconds,
        backoff, limit_keys, limit_weight, tags, callback_url, job_id, step, unresolved, correlation_id, traceparent, capped, reused,
        output)
    select namespace, type, case when goes and paused is null and limit_keys is null then 'pending' else 'waiting' end,
        case
            when goes and paused is not null then 'namespace'
            when goes and limit_keys is not null then 'limit'
            when goes then null
            when edges > 0 then 'dependency'
            when may_go then 'worker_count'
            else 'start'
        end,
        case
            when goes and paused is not null then interlock.hold_reason('namespace', paused, pause_reason)
            when goes and limit_keys is not null then interlock.hold_reason('limit', array_to_string(limit_keys, ', '))
            when goes then null
            when edges > 0 then waits_for
            when may_go then interlock.hold_reason('worker_count', worker_count::text)
            else 'waits for the job to start'
        end,
        priority, coalesce(moment, now()), max_tries, timeout_seconds, backoff, limit_keys,
        limit_weight, tags, callback_url, job_id, step, edges, correlation_id, traceparent, worker_count is not null,
        reused is not null, reused
    from (
        select steps.*, jobs.id as job_id, jobs.worker_count, jobs.correlation_id, jobs.traceparent,
            case when jobs.reused -> steps.step ? 'result' then jobs.reused -> steps.step end as reused,
            paused.name as paused, paused.reason as pause_reason, may_go.may_go,
            may_go.may_go and (jobs.worker_count is null or row_number() over (
                -- steps of a paused namespace do not count against worker_count
                partition by jobs.id, may_go.may_go, paused.name order by steps.priority desc, steps.position
            ) <= jobs.worker_count) as goes
        from interlock.jobs
            cross join lateral (
                select step, position, namespace, priority, max_tries, edges, waits_for, backoff, kind, condition,
                    case when kind in ('plain', 'decision') then type else 'interlock.' || kind end as type,
                    case when kind in ('plain', 'decision') then timeout_seconds end as timeout_seconds,
                    case
                        when kind in ('plain', 'decision') and limit_keys is not null
                            then interlock.step_limit_keys(limit_keys, jobs.input)
                    end as limit_keys,
                    case
                        when kind in ('plain', 'decision') and limit_weight is not null
                            then interlock.step_limit_weight(limit_weight, jobs.input)
                    end as limit_weight, tags,
                    case when kind in ('plain', 'decision') then callback_url end as callback_url
                from interlock.workflow_steps
                where workflow_steps.workflow_id = jobs.workflow_id
                -- the steps are looked up by the job, also by a plan that was made while the tables were small
                offset 0
            ) as steps
            left join interlock.namespaces as paused on paused.name = steps.namespace and paused.paused_at is not null
            cross join lateral (
                select jobs.status = 'RUNNING' and jobs.reused is null and steps.edges = 0
                    and steps.kind in ('plain', 'decision') and steps.condition is null as may_go
            ) as may_go
        where jobs.id = any (job_ids) and jobs.status in ('PENDING', 'RUNNING')
    ) as made
    order by job_id, position;
end
$$;
