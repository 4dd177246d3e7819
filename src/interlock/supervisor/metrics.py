"""The figures of the supervisor: refusals, keys of requests, and the requests themselves.

Invariant: labels are states, codes, methods and paths as they are declared; nothing that a caller sends becomes one.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

http_requests_total = Counter("http_requests_total", "Requests answered", ["method", "route", "status"])
http_request_duration_seconds = Histogram(
    "http_request_duration_seconds",
    "Time to answer a request",
    ["method", "route"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
failed_transitions_total = Counter(
    "failed_transitions_total", "Moves that were refused", ["machine", "from_state", "to_state"]
)
idempotency_requests_total = Counter(
    "idempotency_requests_total", "Requests with a key: hit, miss or conflict", ["outcome"]
)
idempotency_hit_ratio = Gauge("idempotency_hit_ratio", "Of the requests with a key, those whose answer was there")

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"})
UNMATCHED = "unmatched"
_counts = {"hit": 0, "miss": 0, "conflict": 0}


def note_key(outcome: str) -> None:
    """Count a request with a key."""
    _counts[outcome] += 1
    idempotency_requests_total.labels(outcome).inc()
    idempotency_hit_ratio.set(_counts["hit"] / sum(_counts.values()))


def note_request(method: str, route: str | None, status: int, seconds: float) -> None:
    """Count a request that was answered, under the path as it is declared."""
    known = method if method in METHODS else "other"
    http_requests_total.labels(known, route or UNMATCHED, str(status)).inc()
    http_request_duration_seconds.labels(known, route or UNMATCHED).observe(seconds)
