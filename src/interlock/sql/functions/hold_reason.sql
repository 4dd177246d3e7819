-- Returns the reason of a task that waits on purpose, for each value of `held_by` that means a hold, and of a job that
-- waits for its key. `subject` is the name of the namespace, the key of the limit or of the job, or the worker_count of
-- the job; `detail` says more. Stable and a single expression, so that the planner inlines it.
create or replace function interlock.hold_reason(held_by text, subject text, detail text default null) returns text
    language sql stable parallel safe as $$
    select case held_by
        when 'namespace' then format('namespace %s is paused%s', subject, ': ' || detail)
        when 'limit' then format('limit %s%s', subject, ': ' || detail)
        when 'key' then 'waits for job ' || detail || format(' with key %L', subject)
        when 'worker_count'
            then format('the job runs at most %s step%s at once', subject, case when subject <> '1' then 's' end)
    end
$$;
