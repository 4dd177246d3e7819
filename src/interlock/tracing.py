"""OpenTelemetry traces (extra `otel`): spans of enqueue, claim, run, settle and advance, linked by `traceparent`.

A task and a job store the W3C `traceparent` of the span that made them; the spans of other processes continue that
trace. Names and attributes follow the semantic conventions for messaging.

Invariant: unless the application has set a tracer provider, OpenTelemetry is not imported, no span is made, and no
`traceparent` is stored but the one that a client gave.
"""

from __future__ import annotations

import re
import sys
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextvars import Token
    from types import TracebackType

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, Tracer, TracerProvider

SYSTEM = "interlock"
TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
HEADER = re.compile(rf"({TRACEPARENT.pattern})(-.*)?")
MAX_LINKS = 128  # of one span; the SDK keeps no more by default

_found: dict[TracerProvider, Tracer] = {}
_caller_span: ContextVar[str | None] = ContextVar("caller_span", default=None)  # of the HTTP request that is answered


def find_tracer(*, enabled: bool) -> Tracer | None:
    """Return the tracer of the application's provider; None if tracing is off.

    An application that has set a provider has imported OpenTelemetry: nothing else imports it here.
    """
    trace: Any = sys.modules.get("opentelemetry.trace") if enabled else None
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    tracer = _found.get(provider)
    if tracer is None:
        if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            return None
        _found.clear()
        tracer = _found[provider] = provider.get_tracer(SYSTEM)
    return tracer


def is_traceparent(text: str) -> bool:
    """Tell whether a text is a valid `traceparent` of the W3C."""
    return TRACEPARENT.fullmatch(text) is not None


def parse_traceparent_header(values: Sequence[str]) -> str | None:
    """Return the `traceparent` of a request's headers, in version 00; None without a single valid one.

    As the W3C demands, an invalid header is ignored, ff is no version, and later versions may have more fields.
    """
    match = HEADER.fullmatch(values[0]) if len(values) == 1 else None
    if match is None:
        return None
    traceparent, trace_id, span_id, flags, more = match.groups()
    version = traceparent[:2]
    if version == "ff" or (version == "00" and more is not None):
        return None
    return f"00-{trace_id}-{span_id}-{int(flags, 16) & 1:02x}"


@contextmanager
def continued_request(traceparent: str | None) -> Iterator[None]:
    """Let what an HTTP request stores continue the trace of its caller.

    With a tracer, the caller's span is the parent of the spans of the request, unless an instrumentation of the server
    has made one already; without a tracer, its `traceparent` is stored.
    """
    token = _caller_span.set(traceparent)
    try:
        with continued(traceparent if current_traceparent() is None else None):
            yield
    finally:
        _caller_span.reset(token)


def current_traceparent() -> str | None:
    """Return the `traceparent` of the active span; None without one."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    return None if trace is None else _format(trace.get_current_span().get_span_context())


@contextmanager
def continued(traceparent: str | None) -> Iterator[None]:
    """Make a stored span the active one: in a child process, for the spans of the handler."""
    if traceparent is None or "opentelemetry.trace" not in sys.modules:
        yield
        return
    from opentelemetry import context  # noqa: PLC0415 - an extra

    token = context.attach(_as_parent(traceparent))
    try:
        yield
    finally:
        context.detach(token)


def _format(span_context: SpanContext) -> str | None:
    if not span_context.is_valid:
        return None
    return f"00-{span_context.trace_id:032x}-{span_context.span_id:016x}-{span_context.trace_flags & 1:02x}"


def _parse(traceparent: str | None) -> SpanContext | None:
    """Return the span that a stored text names; None without one, and for a text that is not a traceparent."""
    match = None if traceparent is None else TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    from opentelemetry.trace import SpanContext, TraceFlags  # noqa: PLC0415 - an extra

    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags & TraceFlags.SAMPLED))


def _as_parent(parent: str | SpanContext | None) -> Context:
    """Return a context whose active span is the parent; an empty one without a parent, so that a root span is made."""
    from opentelemetry.context import Context  # noqa: PLC0415 - an extra
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context  # noqa: PLC0415 - an extra

    found = _parse(parent) if isinstance(parent, str) else parent
    return Context() if found is None else set_span_in_context(NonRecordingSpan(found), Context())


def _attributes(operation: str, type_: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span, without those that are None."""
    named = {"messaging.system": SYSTEM, "messaging.operation.name": operation, "messaging.operation.type": type_}
    return named | {name: value for name, value in more.items() if value is not None}


def _record_error(span: Span, error: BaseException) -> None:
    """Record an error with its type; for one of another process, the type that it had there."""
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - an extra

    name = getattr(error, "error_type", None) or type(error).__qualname__
    span.record_exception(error, attributes={"exception.type": name})
    span.set_attribute("error.type", name)
    span.set_status(Status(StatusCode.ERROR, f"{name}: {error}"))


# --- Enqueue and submit ---


class ProducerSpan:
    """The span of a client that stores tasks or jobs, which carry its `traceparent`.

    Without a tracer it does nothing, and `traceparent` is that of the HTTP request that is answered, or None.
    """

    __slots__ = ("_attributes", "_name", "_span", "_token", "_tracer", "traceparent")

    def __init__(
        self,
        tracer: Tracer | None,
        operation: str,
        subject: str | None,
        *,
        namespace: str | None,
        count: int | None = None,
    ) -> None:
        self._tracer = tracer
        self._span: Span | None = None
        self._token: Token[Context] | None = None
        self.traceparent: str | None = _caller_span.get() if tracer is None else None
        if tracer is not None:
            self._name = operation if subject is None else f"{operation} {subject}"
            more = {"messaging.destination.name": namespace, "messaging.batch.message_count": count}
            self._attributes = _attributes(operation, "send", more)

    def __enter__(self) -> Self:
        if self._tracer is not None:
            from opentelemetry import context, trace  # noqa: PLC0415 - an extra

            self._span = self._tracer.start_span(
                self._name, kind=trace.SpanKind.PRODUCER, attributes=self._attributes, record_exception=False
            )
            self._token = context.attach(trace.set_span_in_context(self._span))
            self.traceparent = _format(self._span.get_span_context())
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if self._span is None or self._token is None:
            return
        from opentelemetry import context  # noqa: PLC0415 - an extra

        if error is not None:
            _record_error(self._span, error)
        context.detach(self._token)
        self._span.end()

    def stored(self, id_: object, *, created: bool) -> None:
        """Name the task or job that was stored, or that existed before."""
        if self._span is not None:
            self._span.set_attribute("messaging.message.id", str(id_))
            if not created:
                self._span.set_attribute("interlock.existed", True)  # noqa: FBT003 - the parameter has no keyword


# --- Run ---


class RunDetails(NamedTuple):
    """One attempt at a task, as its span describes it."""

    task_type: str
    namespace: str
    task_id: str
    attempt: int
    worker_id: str
    correlation_id: str | None
    job_id: str | None
    step: str | None


class RunSpan:
    """The span of one attempt, from before its handler until its outcome is known."""

    __slots__ = ("_span", "span_context", "tracer")

    def __init__(self, tracer: Tracer, traceparent: str | None, run: RunDetails) -> None:
        from opentelemetry.trace import Link, SpanKind  # noqa: PLC0415 - an extra

        producer = _parse(traceparent)
        self.tracer = tracer
        self._span = tracer.start_span(
            f"process {run.task_type}",
            context=_as_parent(producer),
            kind=SpanKind.CONSUMER,
            links=[] if producer is None else [Link(producer)],
            attributes=_attributes(
                "process",
                "process",
                {
                    "messaging.destination.name": run.namespace,
                    "messaging.message.id": run.task_id,
                    "messaging.message.conversation_id": run.correlation_id,
                    "messaging.client.id": run.worker_id,
                    "interlock.task.type": run.task_type,
                    "interlock.attempt": run.attempt,
                    "interlock.job.id": run.job_id,
                    "interlock.step": run.step,
                },
            ),
            record_exception=False,
            set_status_on_exception=False,
        )
        self.span_context = self._span.get_span_context()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make it the active span: coroutines and threads of the handler see it."""
        from opentelemetry import context, trace  # noqa: PLC0415 - an extra

        token = context.attach(trace.set_span_in_context(self._span))
        try:
            yield
        finally:
            context.detach(token)

    def end(self, outcome: str, error: BaseException | None = None) -> None:
        """End it with the event that settles the attempt, and the error of a handler that failed."""
        if self._span.is_recording():
            self._span.set_attribute("interlock.outcome", outcome)
            if error is not None:
                _record_error(self._span, error)
            self._span.end()


# --- Claim, settle and advance: batches ---


class BatchSpan:
    """The span of one statement or transaction that handles messages of several traces, with a link to each.

    If all belong to one trace, the span is part of it; otherwise it is the root of a trace of its own.
    """

    def __init__(
        self,
        tracer: Tracer,
        operation: str,
        type_: str,
        related: Sequence[SpanContext],
        *,
        count: int,
        began_s: float | None = None,
        attributes: Mapping[str, Any],
    ) -> None:
        from opentelemetry.trace import Link, SpanKind  # noqa: PLC0415 - an extra

        distinct = list({(each.trace_id, each.span_id): each for each in related}.values())
        is_one_trace = len({each.trace_id for each in distinct}) == 1
        self._span = tracer.start_span(
            operation,
            context=_as_parent(distinct[0] if is_one_trace else None),
            kind=SpanKind.CONSUMER if type_ == "process" else SpanKind.CLIENT,
            links=[Link(each) for each in distinct[:MAX_LINKS]],
            start_time=None if began_s is None else int(began_s * 1e9),
            attributes=_attributes(operation, type_, {**attributes, "messaging.batch.message_count": count}),
            record_exception=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if error is not None:
            _record_error(self._span, error)
        self._span.end(time.time_ns())


def parse_all(traceparents: Iterable[str | None]) -> list[SpanContext]:
    """Return the spans that stored texts name."""
    return [found for found in map(_parse, traceparents) if found is not None]
