"""The worker process: claims tasks, runs their handlers and settles the outcomes."""
