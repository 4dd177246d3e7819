"""Pure values: workflow graphs, options, backoff, timing, JSON values. No I/O."""
