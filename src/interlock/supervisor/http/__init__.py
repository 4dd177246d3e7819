"""The REST API of the supervisor: routes, requests and responses, idempotency, authentication, middleware."""
