"""The public API: the app, tasks and workflows, and handles of what was enqueued and submitted."""
