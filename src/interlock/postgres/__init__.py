"""Access to PostgreSQL: connections, named SQL, notifications, migrations, guards, PGMQ, the embedded server."""
