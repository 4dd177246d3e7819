-- Returns the stored output (StepExecutionResult) of a step that the orchestrator completes.
create or replace function interlock.engine_output(of_step text, result jsonb, error jsonb, moment timestamptz)
    returns jsonb language sql stable parallel safe as $$
    select jsonb_build_object('step', of_step, 'success', error is null, 'result', result,
        'status', case when error is null then 'completed' else 'failed' end, 'error', error,
        'metadata', jsonb_build_object('started_at', null, 'completed_at', moment, 'execution_ms', null,
            'worker_id', null, 'attempt', 0, 'retryable', false),
        'orchestration_metadata', '{}'::jsonb)
$$;
