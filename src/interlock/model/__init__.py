"""Pure values: workflow graphs, task options, backoff, timing and JSON values. No I/O."""
