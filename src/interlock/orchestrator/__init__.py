"""The orchestrator process: consumes step results, activates the next steps and finalizes jobs."""
