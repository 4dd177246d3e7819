"""The workflow engine: submits jobs, activates steps, advances, cancels and finalizes jobs."""
