"""`GET /ui/events`: the stream of server-sent events of one open page."""

from __future__ import annotations

import asyncio
import base64
import binascii
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from interlock.dashboard.live import MAX_ROWS, LiveHub
from interlock.dashboard.render import build_hash
from interlock.dashboard.topics import TICK_S, topics
from interlock.dashboard.viewer import find_viewer
from interlock.service import cancel_and_wait
from interlock.store.access import TokenScope

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from interlock.dashboard.live import LiveViewer

router = APIRouter(include_in_schema=False)

COMMENT_INTERVAL_S = 15.0  # keeps proxies from closing a quiet stream
WRITE_TIMEOUT_S = 10.0
RETRY_MS = 2000
UUID_BYTES = 16
EVENT_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@router.get("/ui/events")
async def show_events(
    request: Request,
    t: Annotated[str, Query(max_length=2000)] = "",
    ns: Annotated[str, Query(max_length=300)] = "all",
    ids: Annotated[str, Query(max_length=2000)] = "",
    last: Annotated[str | None, Query(max_length=40)] = None,
    last_event_id: Annotated[str | None, Header(max_length=40)] = None,
) -> Response:
    """Stream the fragments of the topics `t` as they change; `ids`: the visible rows, as base64url of their UUIDs."""
    viewer = await find_viewer(request)
    viewer.caller.require(TokenScope.READ, "the dashboard")
    namespace = None if ns in {"", "all"} else ns
    viewer.require_namespace(namespace)
    names = [name for name in t.split(",") if name]
    for name in names:
        found = topics.find(name)
        if found is not None and found[0].whole_system(found[1]):
            viewer.require_all_namespaces(f"the topic {found[0].name}")
    hub: LiveHub = request.app.state.dashboard.hub
    joined = hub.join(
        names,
        viewer.namespaces if namespace is None else frozenset({namespace}),
        row_ids=decode_row_ids(ids),
        session=viewer.session,
        last=last_event_id or last,
    )
    return EventStream(hub, joined, request.app.state.dashboard.stopping)


def decode_row_ids(text: str) -> frozenset[str]:
    """Read the ids of visible rows: UUIDs of 16 bytes each, one after the other, as base64url."""
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        return frozenset()
    found = [raw[at : at + UUID_BYTES] for at in range(0, min(len(raw), MAX_ROWS * UUID_BYTES), UUID_BYTES)]
    return frozenset(str(UUID(bytes=part)) for part in found if len(part) == UUID_BYTES)


def encode_event(event: str, data: bytes, event_id: str | None = None) -> bytes:
    """Encode an event; `data` is one line."""
    line = b"" if event_id is None else b"id: " + event_id.encode() + b"\n"
    return b"event: " + event.encode() + b"\n" + line + b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends a viewer the newest fragments until it leaves, is too slow, its session ends or the server stops."""

    media_type = "text/event-stream"

    def __init__(self, hub: LiveHub, viewer: LiveViewer, stopping: asyncio.Event) -> None:
        super().__init__(headers=EVENT_HEADERS)
        del self.headers["content-length"]
        self._hub = hub
        self._viewer = viewer
        self._stopping = stopping
        self._told_stale = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        del scope
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        stopping = asyncio.create_task(self._stopping.wait())
        for task in (gone, stopping):
            task.add_done_callback(lambda _: self._viewer.wake.set())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            hello = {"build": build_hash(), "epoch": self._hub.epoch, "tick": int(TICK_S * 1000)}
            content = b"retry: %d\n" % RETRY_MS + encode_event("hello", orjson.dumps(hello))
            with suppress(TimeoutError, OSError):
                while not gone.done():
                    if content:
                        async with asyncio.timeout(WRITE_TIMEOUT_S):
                            await send({"type": "http.response.body", "body": content, "more_body": True})
                    if self._viewer.ended is not None:
                        break
                    content = await self._next(is_stopping=stopping.done())
            if not gone.done():
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._hub.leave(self._viewer)
            await cancel_and_wait([gone, stopping])

    async def _next(self, *, is_stopping: bool) -> bytes:
        """Wait for something to send."""
        viewer = self._viewer
        if not is_stopping:
            try:
                async with asyncio.timeout(COMMENT_INTERVAL_S):
                    await viewer.wake.wait()
            except TimeoutError:
                return b": still here\n\n"
            viewer.wake.clear()
        if self._stopping.is_set():
            viewer.ended = "bye"
        if viewer.ended is not None:
            return encode_event(viewer.ended, orjson.dumps({"retry": RETRY_MS}))
        patches, rows = viewer.take()
        content = b""
        if self._hub.is_stale != self._told_stale:
            self._told_stale = self._hub.is_stale
            content = encode_event("stale", orjson.dumps(self._told_stale))
        for event, encoded in (("patch", patches), ("row", rows)):
            if encoded:
                content += encode_event(event, b"[" + b",".join(encoded) + b"]", self._hub.event_id())
        return content


async def _wait_for_disconnect(receive: Receive) -> None:
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            return
