-- Reads of PostgreSQL's catalogs and settings for `interlock doctor`.

-- name: read_server
select current_setting('server_version_num')::int as version, pg_is_in_recovery() as is_standby,
    current_setting('default_transaction_read_only')::boolean as is_read_only,
    current_setting('autovacuum')::boolean as has_autovacuum, clock_timestamp() as clock

-- name: read_triggers
-- The triggers of the tables, those of partitions included.
select classes.relname::text as table, triggers.tgname::text as name, triggers.tgenabled::text as enabled,
    pg_get_triggerdef(triggers.oid) as definition
from pg_trigger as triggers
    join pg_class as classes on classes.oid = triggers.tgrelid
where classes.relnamespace = 'interlock'::regnamespace and not triggers.tgisinternal
order by 1, 2

-- name: read_record_partitions
select parent.relname::text as records, child.relname::text as name,
    substring(pg_get_expr(child.relpartbound, child.oid) from 'FROM \(''(.+?)''\)')::timestamptz as begins_at,
    substring(pg_get_expr(child.relpartbound, child.oid) from 'TO \(''(.+?)''\)')::timestamptz as ends_at
from pg_inherits
    join pg_class as child on child.oid = inhrelid
    join pg_class as parent on parent.oid = inhparent
where parent.relnamespace = 'interlock'::regnamespace
    and parent.relname in ('audit_logs', 'job_state_transitions', 'worker_state_transitions') and parent.relkind = 'p'
order by 1, 3

-- name: read_functions
select proname::text as name, prosrc as source, prosecdef as security_definer,
    coalesce(proconfig, '{}') as settings
from pg_proc
where pronamespace = 'interlock'::regnamespace

-- name: read_tables
-- The tables, those of partitions included: columns with their types, and what hides, changes or loses rows.
select classes.relname::text as name, classes.relpersistence = 'u' as is_unlogged,
    classes.relrowsecurity as has_row_security,
    array(select rulename::text from pg_rewrite where ev_class = classes.oid order by 1) as rules,
    jsonb_object_agg(attname, jsonb_build_array(format_type(atttypid, atttypmod), attnotnull)) as columns
from pg_attribute
    join pg_class as classes on classes.oid = attrelid
where classes.relnamespace = 'interlock'::regnamespace and classes.relkind in ('r', 'p') and attnum > 0
    and not attisdropped
group by classes.oid

-- name: read_indexes
select classes.relname::text as name, pg_get_indexdef(indexes.indexrelid) as definition,
    indexes.indisvalid and indexes.indisready as is_valid
from pg_index as indexes
    join pg_class as classes on classes.oid = indexes.indexrelid
where classes.relnamespace = 'interlock'::regnamespace

-- name: read_constraints
select classes.relname::text as table, conname::text as name, convalidated as is_valid,
    case when contype = 'c' then pg_get_constraintdef(pg_constraint.oid) end as definition
from pg_constraint
    join pg_class as classes on classes.oid = conrelid
where connamespace = 'interlock'::regnamespace

-- name: read_missing_privileges
-- The rights that a role which runs the engine needs and the current one lacks.
select wanted.privilege || ' on ' || wanted.relation as missing
from unnest(%(relations)s::text[], %(privileges)s::text[]) as wanted (relation, privilege)
where to_regclass(wanted.relation) is not null
    and not has_table_privilege(current_user, to_regclass(wanted.relation), wanted.privilege)
order by 1

-- name: read_vacuum_state
-- Tables that are not vacuumed automatically, and tables most of whose rows are dead although a vacuum should have come.
select classes.relname::text as name, coalesce(classes.reloptions @> array['autovacuum_enabled=false']
        or classes.reloptions @> array['autovacuum_enabled=off'], false) as is_excluded,
    coalesce(stats.n_dead_tup > %(dead_rows)s and stats.n_dead_tup > stats.n_live_tup
        and coalesce(greatest(stats.last_vacuum, stats.last_autovacuum), '-infinity')
            < coalesce(%(now)s::timestamptz, now()) - %(threshold)s::interval, false) as is_bloated,
    stats.n_dead_tup as dead_rows, stats.n_live_tup as live_rows
from pg_class as classes
    left join pg_stat_all_tables as stats on stats.relid = classes.oid
where classes.relkind = 'r' and (classes.relnamespace = 'interlock'::regnamespace
    or classes.relnamespace = to_regnamespace('pgmq') and classes.relname = (
        select lower('q_' || orchestration_queue) from interlock.settings
    ))
order by 1
