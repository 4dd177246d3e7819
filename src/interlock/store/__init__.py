"""All that touches PostgreSQL: the embedded server, the schema, the guards and the named statements."""
