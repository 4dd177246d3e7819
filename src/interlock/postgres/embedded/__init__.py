"""The embedded PostgreSQL server: installation, data directory, start, sharing and stop."""
