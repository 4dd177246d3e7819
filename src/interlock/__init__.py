"""Interlock: durable tasks and workflows on PostgreSQL, every lifecycle a state machine that the database enforces."""
