"""The supervisor's REST API: endpoints by resource, authentication, idempotency, problem details, metrics."""
