"""The app of the tests of traces: sets a tracer provider at import, which writes spans to the file SPANS as JSON lines.

`python traced_app.py` runs an orchestrator with that provider.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from interlock import Interlock
from interlock.model.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan

app = Interlock()
started: list[None] = []
released = asyncio.Event()  # for one test, in whose event loop it is awaited
writing = threading.Lock()


class FileExporter(SpanExporter):
    """Appends spans to a file that several processes share."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with writing, Path(os.environ["SPANS"]).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(as_document(span)) + "\n" for span in spans)
        return SpanExportResult.SUCCESS


def as_document(span: ReadableSpan) -> dict[str, Any]:
    """Describe a span by what the tests compare."""
    context = span.get_span_context()
    assert context is not None
    return {
        "name": span.name,
        "kind": span.kind.name,
        "trace": f"{context.trace_id:032x}",
        "span": f"{context.span_id:016x}",
        "parent": None if span.parent is None else f"{span.parent.span_id:016x}",
        "links": [f"{link.context.trace_id:032x}-{link.context.span_id:016x}" for link in span.links],
        "status": span.status.status_code.name,
        "attributes": dict(span.attributes or {}),
        "events": [{"name": event.name, **dict(event.attributes or {})} for event in span.events],
        "pid": os.getpid(),
    }


if "SPANS" in os.environ:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(FileExporter()))
    trace.set_tracer_provider(provider)


def make_span(name: str) -> None:
    trace.get_tracer("handlers").start_span(name).end()


@app.task
async def in_coroutine() -> int:
    make_span("of the coroutine")
    return 1


@app.task
def in_thread(in_coroutine: int) -> int:
    make_span("of the thread")
    return in_coroutine + 1


@app.task(executor="process")
def in_process(in_thread: int) -> int:
    make_span("of the process")
    return in_thread + 1


@app.task
async def released_together() -> None:
    started.append(None)
    await released.wait()


@app.task(max_tries=2, backoff=Backoff.none())
async def fails() -> None:
    raise KeyError("missing")


@app.task(max_tries=1, timeout=0.05)
async def hangs() -> None:
    await asyncio.Event().wait()


chain = app.workflow("chain")
chain.step(in_coroutine)
chain.step(after=["in_coroutine"])(in_thread)
chain.step(after=["in_thread"])(in_process)

if __name__ == "__main__":
    from interlock.orchestrator.run import run_orchestrator

    run_orchestrator()
