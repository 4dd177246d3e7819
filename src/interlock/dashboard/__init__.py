"""The dashboard: server-rendered pages on the supervisor's HTTP application, kept current by server-sent events."""
