-- moves: job RUNNING -success-> COMPLETED
-- Completes jobs with the results of their last steps as output, and notifies the clients that wait for them. Returns the
-- ids of the completed jobs; a job whose output is too large to be stored is not changed. Called by the statement of the
-- same name and by advance_plain_steps().
create or replace function interlock.complete_running_jobs(
    acting text, job_ids uuid[], workflow_ids uuid[], failed_counts int[], new_reason text, moment timestamptz
) returns table (id uuid) language plpgsql as $$
begin
    perform set_config('interlock.actor', acting, true);
    return query
    with completed as (
        update interlock.jobs
        set status = 'COMPLETED', event = 'success', reason = new_reason, open_steps = 0, output = made.output,
            failed_steps = given.failed_steps,
            completed_at = coalesce(moment, clock_timestamp()), updated_at = coalesce(moment, clock_timestamp())
        from unnest(job_ids, workflow_ids, failed_counts) as given (id, workflow_id, failed_steps)
            -- offset 0: computed once, and not again for the condition
            cross join lateral (select interlock.job_output(given.id, given.workflow_id) as output offset 0) as made
        where jobs.id = any (job_ids) and jobs.id = given.id
            and case when jobs.status = 'RUNNING' then made.output is not null else false end
        returning jobs.id
    ), notified as materialized (
        select completed.id, case
                when exists (select from interlock.waiters where waiters.task_id = completed.id)
                    then pg_notify('interlock_done', completed.id::text)
            end
        from completed
    )
    select notified.id from notified;
end
$$;
