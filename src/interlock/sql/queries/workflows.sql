-- Workflow definitions with their steps and edges. A version is written once and never changed.

-- name: insert_workflow
insert into interlock.workflows (name, version, namespace, definition, root_namespaces, plain_roots, timeout_seconds,
    registered_at)
values (%(name)s, %(version)s, %(namespace)s, %(definition)s, %(root_namespaces)s::text[], %(plain_roots)s,
    %(timeout_seconds)s::float8, coalesce(%(now)s::timestamptz, now()))
on conflict (name, version) do nothing
returning id

-- name: insert_workflow_steps
insert into interlock.workflow_steps (workflow_id, step, position, kind, type, namespace, join_rule, strategy, edges,
    sink, compensate, waits_for, priority, max_tries, timeout_seconds, backoff, limit_key, tags, callback_url, spec,
    simple, handed)
select %(workflow_id)s, step, position, kind, type, namespace, join_rule, strategy, edges, sink, compensate, waits_for,
    priority, max_tries, timeout_seconds, backoff, limit_key, tags, callback_url, spec, simple, handed
from jsonb_to_recordset(%(steps)s::jsonb) as declared (step text, position int, kind text, type text, namespace text,
    join_rule float8, strategy float8, edges int, sink boolean, compensate text, waits_for text, priority int,
    max_tries int, timeout_seconds float8, backoff jsonb, limit_key text, tags text[], callback_url text, spec jsonb,
    simple boolean, handed jsonb)

-- name: insert_workflow_edges
insert into interlock.workflow_edges (workflow_id, upstream, downstream, condition, branch)
select %(workflow_id)s, upstream, downstream, condition, branch
from jsonb_to_recordset(%(edges)s::jsonb) as declared (upstream text, downstream text, condition text, branch boolean)

-- name: compare_workflow
select id, definition = %(definition)s::jsonb as same
from interlock.workflows
where name = %(name)s and version = %(version)s

-- name: read_workflow
-- Without a version, reads the one that was registered last.
select id, name, version, namespace, definition, registered_at
from interlock.workflows
where name = %(name)s and version = coalesce(%(version)s::text, version)
order by registered_at desc, id desc
limit 1

-- name: list_workflows
select id, name, version, namespace, definition, registered_at
from interlock.workflows
order by name, registered_at desc, id desc

-- name: find_workflows
-- Reads, for a submit, the workflows by name and version, which of their root namespaces have no live worker, and whether
-- the queue exists.
select wanted.place, found.id, found.version, found.namespace, found.root_namespaces, found.plain_roots,
    found.timeout_seconds, array(
        select namespace
        from unnest(found.root_namespaces) as root (namespace)
        where not exists (
            select from interlock.workers
            where status = 'RUNNING' and seen_until > coalesce(%(now)s::timestamptz, now())
                and root.namespace = any (workers.namespaces)
        )
    ) as unserved,
    to_regclass(format('pgmq.%%I', lower('q_' || settings.orchestration_queue))) is not null as queue
from interlock.settings
    cross join unnest(%(names)s::text[], %(versions)s::text[]) with ordinality as wanted (name, version, place)
    left join lateral (
        select id, version, namespace, root_namespaces, plain_roots, timeout_seconds
        from interlock.workflows
        where workflows.name = wanted.name and workflows.version = coalesce(wanted.version, workflows.version)
        order by registered_at desc, id desc
        limit 1
    ) as found on true
order by wanted.place

-- name: read_input_schemas
select id, definition -> 'input_schema' as schema
from interlock.workflows
where id = any (%(ids)s::uuid[]) and jsonb_typeof(definition -> 'input_schema') = 'object'

-- name: list_workflow_versions
select name, array_agg(version order by registered_at) as versions
from interlock.workflows
group by name
order by name
