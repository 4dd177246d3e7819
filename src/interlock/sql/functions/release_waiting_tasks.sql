-- moves: task waiting -release-> pending
-- Makes waiting tasks pending, and notifies the workers of each namespace once. Returns their ids, in a few
-- rows. With `only_held_by`, a task that waits for another cause by now is not released. Called by the statement of
-- the same name and by advance_plain_steps().
--
-- advance_plain_steps() also passes tasks that are not released, with the number of their edges or parts that are resolved:
-- 0 marks an ended step as advanced. One UPDATE for both saves the triggers of a second one, a tenth of an advance.
create or replace function interlock.release_waiting_tasks(
    acting text, task_ids uuid[], only_held_by text, new_reason text, moment timestamptz, counted_ids uuid[] default '{}',
    counted_edges int[] default '{}'
) returns table (ids uuid[]) language plpgsql as $$
begin
    perform set_config('interlock.actor', acting, true);
    return query
    with released as (
        update interlock.tasks
        set state = case when given.edges is null then 'pending' else tasks.state end,
            event = case when given.edges is null then 'release' else tasks.event end,
            reason = case when given.edges is null then new_reason else tasks.reason end,
            held_by = case when given.edges is null then null else tasks.held_by end,
            unresolved = case when given.edges is null then 0 else tasks.unresolved - given.edges end,
            taken = tasks.taken + coalesce(given.edges, 0), advanced = tasks.advanced or given.edges is not distinct from 0,
            updated_at = case
                when given.edges is null then coalesce(moment, clock_timestamp())
                else tasks.updated_at
            end
        from (
            select released.id, null::int as edges from unnest(task_ids) as released (id)
            union all
            select counted.id, counted.edges from unnest(counted_ids, counted_edges) as counted (id, edges)
        ) as given
        where tasks.id = any (task_ids || counted_ids) and tasks.id = given.id
            and case
                when given.edges is not null then true
                when tasks.state = 'waiting' then only_held_by is null or tasks.held_by = only_held_by
                else false
            end
        returning tasks.id, tasks.namespace, given.edges, tasks.limit_keys is not null as limited
    ), notified as materialized (
        select array_agg(released.id) as ids,
            pg_notify(case when released.limited then 'interlock_limited' else 'interlock_released' end, released.namespace)
        from released
        where released.edges is null
        group by released.namespace, released.limited
    )
    select notified.ids from notified;
end
$$;
