-- Reads of PostgreSQL's catalogs and settings for `interlock doctor`.

-- name: read_server
select current_setting('server_version_num')::int as version, pg_is_in_recovery() as is_standby,
    current_setting('default_transaction_read_only')::boolean as is_read_only,
    current_setting('autovacuum')::boolean as has_autovacuum,
    current_setting('session_replication_role') as replication_role, clock_timestamp() as clock

-- name: read_triggers
-- The triggers of the tables, those of partitions and of the queue included; those that PGMQ adds to its queue are left out.
-- Triggers of foreign keys are internal.
select classes.relname::text as table, triggers.tgname::text as name, triggers.tgenabled::text as enabled,
    triggers.tgisinternal as is_internal, constraints.conname::text as constraint,
    case when not triggers.tgisinternal then pg_get_triggerdef(triggers.oid) end as definition
from pg_trigger as triggers
    join pg_class as classes on classes.oid = triggers.tgrelid
    left join pg_constraint as constraints on constraints.oid = triggers.tgconstraint
where classes.relnamespace = 'interlock'::regnamespace
    or classes.relnamespace = to_regnamespace('pgmq') and classes.relname = (
        select lower('q_' || orchestration_queue) from interlock.settings
    ) and not triggers.tgisinternal and not exists (
        select from pg_proc where pg_proc.oid = triggers.tgfoid and pronamespace = to_regnamespace('pgmq')
    )
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

-- name: read_detached_partitions
-- Tables with the name of a partition that are none.
select relname::text as name, regexp_replace(relname, '_\d+_\d+$', '') as records,
    to_date(right(relname, 7), 'YYYY_MM') as begins_on,
    (to_date(right(relname, 7), 'YYYY_MM') + interval '1 month')::date as ends_on
from pg_class
where relnamespace = 'interlock'::regnamespace and relkind = 'r' and not relispartition
    and relname ~ '^(audit_logs|job_state_transitions|worker_state_transitions)_\d{4}_\d\d$'
order by 1

-- name: read_functions
select proname::text as name, prosrc as source, prosecdef as security_definer, coalesce(proconfig, '{}') as settings,
    case provolatile when 'i' then 'immutable' when 's' then 'stable' else 'volatile' end as volatility,
    proisstrict as is_strict
from pg_proc
where pronamespace = 'interlock'::regnamespace

-- name: read_tables
-- The tables, those of partitions included: columns with their types, and what hides, changes or loses rows. Rows of tables
-- that inherit are read with those of their parent, and have no guards.
select classes.relname::text as name, classes.relpersistence = 'u' as is_unlogged,
    classes.relrowsecurity as has_row_security, classes.relispartition as is_partition,
    array(select rulename::text from pg_rewrite where ev_class = classes.oid order by 1) as rules,
    array(
        select inhrelid::regclass::text from pg_inherits where inhparent = classes.oid and classes.relkind = 'r' order by 1
    ) as heirs,
    jsonb_object_agg(attname, jsonb_build_array(format_type(atttypid, atttypmod), attnotnull,
        case when attidentity <> '' then 'identity' when attgenerated = '' then pg_get_expr(adbin, adrelid) end)) as columns
from pg_attribute
    join pg_class as classes on classes.oid = attrelid
    left join pg_attrdef on adrelid = attrelid and adnum = attnum
where classes.relnamespace = 'interlock'::regnamespace and classes.relkind in ('r', 'p') and attnum > 0
    and not attisdropped
group by classes.oid

-- name: read_indexes
select classes.relname::text as name, pg_get_indexdef(indexes.indexrelid) as definition,
    indexes.indisvalid and indexes.indisready as is_valid,
    (indexes.indisunique or indexes.indisexclusion) and not classes.relispartition
        and not exists (select from pg_constraint where conindid = indexes.indexrelid) as is_restricting
from pg_index as indexes
    join pg_class as classes on classes.oid = indexes.indexrelid
where classes.relnamespace = 'interlock'::regnamespace

-- name: read_constraints
select classes.relname::text as table, conname::text as name, convalidated as is_valid,
    case when contype = 'c' then pg_get_constraintdef(pg_constraint.oid) end as definition,
    contype in ('c', 'f', 'p', 'u', 'x') and not classes.relispartition as is_restricting
from pg_constraint
    join pg_class as classes on classes.oid = conrelid
where connamespace = 'interlock'::regnamespace

-- name: read_queue_view
-- The view of the queue of step results, and its definition as migrate makes it; no row without a queue.
select pg_get_viewdef(to_regclass('interlock.orchestration_messages')) as definition,
    format('select msg_id, vt, message, read_ct from pgmq.%%I;', lower('q_' || orchestration_queue)) as wanted
from interlock.settings
where to_regclass(format('pgmq.%%I', lower('q_' || orchestration_queue))) is not null

-- name: read_sequences
-- Tables whose next id is one that a row has already.
select found.name
from (
    select 'callbacks' as name, max(id) as highest from interlock.callbacks
    union all
    select 'limit_changes', max(id) from interlock.limit_changes
    union all
    select 'limit_usage', max(id) from interlock.limit_usage
    union all
    select 'signals', max(id) from interlock.signals
    union all
    select 'wait_reasons', max(id) from interlock.wait_reasons
) as found
    join pg_sequences on schemaname = 'interlock'
        and sequencename = split_part(pg_get_serial_sequence('interlock.' || found.name, 'id'), '.', 2)
-- a role without rights does not see the last value
where has_sequence_privilege(pg_get_serial_sequence('interlock.' || found.name, 'id'), 'usage')
    and coalesce(last_value, 0) < found.highest
order by 1

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
