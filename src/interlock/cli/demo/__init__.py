"""`interlock demo`: shows on a real PostgreSQL what Interlock guarantees, with a task and with a workflow."""
