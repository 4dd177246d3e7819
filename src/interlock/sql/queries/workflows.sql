-- Workflow definitions with their steps and edges. A definition is written once and never changed; a development setting
-- can move a name and version to another definition (`retire_workflow`, `restore_workflow`).

-- name: insert_workflow
insert into interlock.workflows (name, version, namespace, definition, root_namespaces, plain_roots, timeout_seconds,
    tags, attributes, callback_url, key, on_conflict, registered_at)
values (%(name)s, %(version)s, %(namespace)s, %(definition)s, %(root_namespaces)s::text[], %(plain_roots)s,
    %(timeout_seconds)s::float8, %(tags)s::text[], %(attributes)s::jsonb, %(callback_url)s, %(key)s,
    %(on_conflict)s, coalesce(%(now)s::timestamptz, now()))
on conflict (name, version) do nothing
returning id

-- name: insert_workflow_steps
insert into interlock.workflow_steps (workflow_id, step, position, kind, type, namespace, needed, rule, condition,
    cancel_rest, strategy, edges, outputs, compensate, waits_for, priority, max_tries, timeout_seconds, backoff,
    limit_keys, limit_weight, tags, callback_url, spec, simple, handed)
select %(workflow_id)s, step, position, kind, type, namespace, needed, rule, condition, cancel_rest, strategy, edges,
    outputs, compensate, waits_for, priority, max_tries, timeout_seconds, backoff, limit_keys, limit_weight, tags,
    callback_url, spec, simple, handed
from jsonb_to_recordset(%(steps)s::jsonb) as declared (step text, position int, kind text, type text, namespace text,
    needed int, rule jsonb, condition text, cancel_rest boolean, strategy float8, edges int, outputs text[],
    compensate text, waits_for text, priority int, max_tries int, timeout_seconds float8, backoff jsonb,
    limit_keys text[], limit_weight text, tags text[], callback_url text, spec jsonb, simple boolean, handed jsonb)

-- name: insert_workflow_edges
insert into interlock.workflow_edges (workflow_id, upstream, downstream, condition, branch)
select %(workflow_id)s, upstream, downstream, condition, branch
from jsonb_to_recordset(%(edges)s::jsonb) as declared (upstream text, downstream text, condition text, branch boolean)

-- name: compare_workflow
select id, definition, definition = %(definition)s::jsonb as same
from interlock.workflows
where name = %(name)s and version = %(version)s

-- name: lock_workflow
-- The lock conflicts with the foreign keys of jobs: until the transaction ends, no job of the workflow is inserted.
select id, definition, registered_at
from interlock.workflows
where name = %(name)s and version = %(version)s
for update

-- name: count_unfinished_jobs_of_workflow
select count(*)::int as jobs
from interlock.jobs
where workflow_id = %(id)s and status in ('SUBMITTED', 'PENDING', 'RUNNING')

-- name: retire_workflow
update interlock.workflows
set version = %(retired_version)s, replaced_at = coalesce(%(now)s::timestamptz, now())
where id = %(id)s
returning id

-- name: restore_workflow
-- Returns nothing if the definition was not replaced before.
update interlock.workflows
set version = %(version)s, registered_at = %(registered_at)s, replaced_at = null
where name = %(name)s and version = %(retired_version)s and definition = %(definition)s::jsonb
    and replaced_at is not null
returning id

-- name: read_workflow
-- Without a version, reads the one that was registered last.
select id, name, version, namespace, definition, registered_at
from interlock.workflows
where name = %(name)s and case when %(version)s::text is null then replaced_at is null else version = %(version)s end
order by registered_at desc, id desc
limit 1

-- name: list_workflows
select id, name, version, namespace, definition, registered_at
from interlock.workflows
where replaced_at is null
order by name, registered_at desc, id desc

-- name: list_newest_workflows
-- The newest version of each workflow by name, with the number of versions, without definitions.
select distinct on (name) name, version, namespace, jsonb_array_length(definition -> 'steps') as steps, registered_at,
    count(*) over (partition by name) as versions
from interlock.workflows
where replaced_at is null and (%(after)s::text is null or name > %(after)s::text)
order by name, registered_at desc, id desc
limit %(limit)s

-- name: read_workflow_versions
select version, namespace, jsonb_array_length(definition -> 'steps') as steps, registered_at
from interlock.workflows
where name = %(name)s and replaced_at is null
order by registered_at desc, id desc

-- name: find_workflows
-- Finds workflows by name and version, in the given order.
select found.id, found.version
from unnest(%(names)s::text[], %(versions)s::text[]) with ordinality as wanted (name, version, place)
    left join lateral interlock.used_workflow(wanted.name, wanted.version) as found on true
order by wanted.place

-- name: read_input_schemas
select id, definition -> 'input_schema' as schema
from interlock.workflows
where id = any (%(ids)s::uuid[]) and jsonb_typeof(definition -> 'input_schema') = 'object'

-- name: list_workflow_versions
select name, array_agg(version order by registered_at) as versions
from interlock.workflows
where replaced_at is null
group by name
order by name
