-- Rights of a role that runs the engine but owns nothing. `{role}` is replaced by its quoted name.

-- name: grant_runtime_role
grant usage on schema interlock to {role};
grant select, insert, update, delete on interlock.tasks, interlock.jobs, interlock.workers,
    interlock.idempotency_keys, interlock.namespaces, interlock.limits, interlock.limit_usage, interlock.limit_lanes, interlock.schedules,
    interlock.callbacks, interlock.leaders, interlock.waiters, interlock.signals, interlock.orchestration_failures,
    interlock.tokens, interlock.sign_in_codes, interlock.sessions, interlock.pools, interlock.move_counts,
    interlock.figures to {role};
grant select, update on interlock.move_counters to {role};
grant select, insert on interlock.workflows, interlock.workflow_steps, interlock.workflow_edges,
    interlock.limit_changes to {role};
grant select on interlock.settings to {role};
grant select, delete on interlock.wait_reasons to {role};
grant select on interlock.audit_logs, interlock.job_state_transitions, interlock.worker_state_transitions,
    interlock.schema_migrations to {role};
grant select on sequence interlock.audit_logs_id_seq, interlock.job_state_transitions_id_seq,
    interlock.worker_state_transitions_id_seq to {role};

-- name: grant_runtime_role_queue
grant select, insert, update, delete on interlock.orchestration_messages to {role};
grant usage on schema pgmq to {role};
grant select, insert, update, delete on all tables in schema pgmq to {role};
grant usage, select on all sequences in schema pgmq to {role};
