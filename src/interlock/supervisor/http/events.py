"""Server-sent events of recorded transitions: one reader for all subscribers of a supervisor.

Invariant: a subscriber gets each event that it asks for once, in the order of positions, also across reconnects with
`Last-Event-ID`. One that reads too slowly is cut off, and told where to go on. Nothing is read without subscribers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import StreamingResponse

from interlock.errors import StoreError
from interlock.service import wait_for_event
from interlock.store.access import hash_token
from interlock.store.events import (
    MAX_BATCH,
    EventCursor,
    EventPosition,
    RecordedEvent,
    SinceTimes,
    read_events,
    read_horizon,
    read_usable_tokens,
)
from interlock.supervisor.http.auth import BearerToken, ReadCaller, limits_namespaces
from interlock.supervisor.http.problems import Problem, encode_json, problems
from interlock.supervisor.http.requests import ApiRoute, Name
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from interlock.client.app import Interlock

router = APIRouter(tags=["events"], route_class=ApiRoute)

TICK_S = 0.5
HEARTBEAT_INTERVAL_S = 15.0
MAX_BUFFERED_EVENTS = 5_000  # of one subscriber
MAX_RESUME_AGE = timedelta(minutes=15)
EVENTS_PER_CHUNK = 100  # that are handled before others get a turn of the event loop
RECONNECT_DELAY_MS = 2_000
MEDIA_TYPE = "text/event-stream"
EXAMPLE = 'id: …\nevent: task\ndata: {"kind": "task", "event": "claim", "to_state": "running", …}\n\n'


class EventKind(StrEnum):
    """The kinds of rows whose transitions are recorded."""

    TASK = "task"
    JOB = "job"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Conditions on events; None means any. `reachable` are the namespaces that the caller may see."""

    kinds: frozenset[str] | None = None
    members: tuple[tuple[str, str], ...] = ()  # of the event, with the values that they must have
    namespace: str | None = None
    to_states: frozenset[str] | None = None
    reachable: frozenset[str] | None = None

    def matches(self, event: RecordedEvent) -> bool:
        """Tell whether an event meets all conditions."""
        found = event.document
        return (
            (self.kinds is None or found["kind"] in self.kinds)
            and (self.to_states is None or found["to_state"] in self.to_states)
            and all(str(found[name]) == value for name, value in self.members)
            and (self.namespace is None or self.namespace in event.namespaces)
            and (self.reachable is None or self._is_reachable(event, self.reachable))
        )

    @staticmethod
    def _is_reachable(event: RecordedEvent, namespaces: frozenset[str]) -> bool:
        """Tell whether a caller that is limited to namespaces may see an event; workers serve several."""
        return event.document["kind"] != EventKind.WORKER and not namespaces.isdisjoint(event.namespaces)


class Subscriber:
    """One stream: its conditions, and the events that it has not sent yet."""

    def __init__(self, wanted: EventFilter, token_hash: bytes | None) -> None:
        self.wanted = wanted
        self.token_hash = token_hash
        self.events: deque[RecordedEvent] = deque()
        self.wake = asyncio.Event()
        self.end: str | None = None  # why the stream ends: `overflow`, `revoked` or `restored`

    def offer(self, event: RecordedEvent) -> None:
        """Buffer an event; a full buffer ends the stream after the events that it holds."""
        if self.end is not None or not self.wanted.matches(event):
            return
        if len(self.events) >= MAX_BUFFERED_EVENTS:
            self.end = "overflow"
        else:
            self.events.append(event)
        self.wake.set()

    def stop(self, reason: str) -> None:
        """End the stream at once, without the events that it holds."""
        self.end = reason
        self.events.clear()
        self.wake.set()

    @property
    def has_stopped(self) -> bool:
        """Whether the stream ends at once."""
        return self.end is not None and not self.events

    def take(self) -> list[RecordedEvent]:
        """Remove and return the next events, those of one chunk at most."""
        return [self.events.popleft() for _ in range(min(len(self.events), EVENTS_PER_CHUNK))]


class EventFeed:
    """Reads the recorded transitions once for all subscribers, while there are any."""

    def __init__(self, app: Interlock, *, tick_s: float = TICK_S) -> None:
        self._app = app
        self.tick_s = tick_s
        self.reads = 0
        self.cursor: EventCursor | None = None  # up to which events have been read
        self.offered: EventCursor | None = None  # up to which the subscribers have been given all of them
        self._subscribers: set[Subscriber] = set()
        self._times: SinceTimes | None = None
        self._starting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def subscribe(self, subscriber: Subscriber) -> EventCursor:
        """Give the subscriber all events after the returned cursor."""
        async with self._starting:
            if self.cursor is None:
                async with self._app.connection() as connection:
                    start = (await read_horizon(connection)).start
                self.cursor, self._times = start, SinceTimes(start)
            self._subscribers.add(subscriber)
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="interlock event feed", context=Context())
            return self.cursor

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Remove a subscriber; the reader ends with the last one."""
        self._subscribers.discard(subscriber)

    async def _run(self) -> None:
        while self._subscribers:
            try:
                events = await self._read()
            except (StoreError, OSError) as error:
                log.warning("events_not_read", error=str(error))
                events = []
            for chunk in _chunks(events):
                for subscriber in self._subscribers:
                    for event in chunk:
                        subscriber.offer(event)
                await asyncio.sleep(0)
            self.offered = self.cursor
            await asyncio.sleep(self.tick_s if len(events) < MAX_BATCH else 0)
        self.cursor = self.offered = self._times = self._task = None

    async def _read(self) -> list[RecordedEvent]:
        if self.cursor is None or self._times is None:
            raise RuntimeError("the feed is started by subscribe")
        self.reads += 1
        async with self._app.connection() as connection:
            horizon = await read_horizon(connection)
            events = await read_events(connection, self.cursor, horizon)
            # not those that subscribe while the tokens are read
            checked = [(each, each.token_hash) for each in self._subscribers if each.token_hash is not None]
            usable = await read_usable_tokens(connection, [hash_ for _, hash_ in checked]) if checked else set()
        for subscriber, hash_ in checked:
            if hash_ not in usable:
                subscriber.stop("revoked")
        if not horizon.has_reached(self.cursor):
            self.cursor, self._times = horizon.start, SinceTimes(horizon.start)
            for subscriber in self._subscribers:
                subscriber.stop("restored")
            return []
        self._times.add(horizon)
        full = len(events) >= MAX_BATCH
        position = events[-1].cursor.position if full else EventPosition(horizon.horizon, 0, 0)
        if position > self.cursor.position:
            self.cursor = EventCursor(position, self._times.since(position.xid))
        return events

    async def catch_up(self, after: EventCursor, until: EventCursor) -> AsyncIterator[Sequence[RecordedEvent]]:
        """Yield the events after one cursor and up to another in chunks; empty ones while a transaction delays them."""
        while after.position < until.position:
            async with self._app.connection() as connection:
                horizon = await read_horizon(connection)
                events = await read_events(connection, after, horizon, until=until.position)
            for chunk in _chunks(events):
                yield chunk
            if events:
                after = events[-1].cursor
            if len(events) < MAX_BATCH:
                if horizon.horizon >= until.position.xid:
                    return
                yield ()
                await asyncio.sleep(self.tick_s)


LastEventId = Annotated[
    str | None, Header(alias="Last-Event-ID", max_length=100, description="The `id` of the last event that arrived.")
]


@router.get(
    "/api/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}, "example": EXAMPLE}},
            "description": "The events, without end.",
        }
    },
)
@limits_namespaces
@problems("event_expired", "stopping")
async def stream_events(
    request: Request,
    caller: ReadCaller,
    token: BearerToken,
    kind: Annotated[list[EventKind] | None, Query(description="Of one of these kinds.")] = None,
    id: Annotated[Name | None, Query(description="Of this task, job or worker.")] = None,  # noqa: A002 - the name of the member
    job: Annotated[UUID | None, Query(description="Of this job and its steps.")] = None,
    namespace: Annotated[Name | None, Query(description="Of this namespace.")] = None,
    type: Annotated[Name | None, Query(description="Of tasks of this type.")] = None,  # noqa: A002 - the name of the member
    workflow: Annotated[Name | None, Query(description="Of jobs of this workflow, and their steps.")] = None,
    to_state: Annotated[list[Name] | None, Query(max_length=20, description="To one of these states.")] = None,
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """Stream the recorded transitions of tasks, jobs and workers, from now on or after the event `Last-Event-ID`."""
    members = {"id": id, "job_id": job, "type": type, "workflow": workflow}
    wanted = EventFilter(
        kinds=None if kind is None else frozenset(kind),
        members=tuple((name, str(value)) for name, value in members.items() if value is not None),
        namespace=namespace,
        to_states=None if to_state is None else frozenset(to_state),
        reachable=caller.namespaces,
    )
    resumed = await _decode_resumed(request, last_event_id)
    subscriber = Subscriber(wanted, None if token is None else hash_token(token.credentials))
    return StreamingResponse(
        _write_events(request.app.state.events, subscriber, resumed),
        media_type=MEDIA_TYPE,
        headers={"X-Accel-Buffering": "no"},
    )


async def _decode_resumed(request: Request, last_event_id: str | None) -> EventCursor | None:
    if not last_event_id:
        return None
    try:
        cursor = EventCursor.decode(last_event_id)
    except ValueError as error:
        message = f"header.Last-Event-ID: {error}"
        raise Problem(
            "invalid_request", message, {"errors": [{"field": "header.Last-Event-ID", "message": str(error)}]}
        ) from None
    app: Interlock = request.app.state.app
    async with app.connection() as connection:
        horizon = await read_horizon(connection)
    if not horizon.has_reached(cursor):
        detail = "the event is not one of this database, or was lost when it was restored; start a new stream"
        raise Problem("event_expired", detail)
    if cursor.since < horizon.moment - MAX_RESUME_AGE:
        minutes = MAX_RESUME_AGE // timedelta(minutes=1)
        detail = f"a stream resumes within {minutes} minutes; read older events from /api/audit, and start a new stream"
        raise Problem("event_expired", detail)
    return cursor


async def _write_events(feed: EventFeed, subscriber: Subscriber, resumed: EventCursor | None) -> AsyncIterator[bytes]:
    try:
        start = await feed.subscribe(subscriber)
        last = resumed or start
        yield f"retry: {RECONNECT_DELAY_MS}\n\n".encode() + _encode("ready", last, {})
        if resumed is not None:
            async for position, content in _catch_up(feed, subscriber, resumed, start):
                last = position
                yield content
                await asyncio.sleep(0)  # a write waits only for a client that reads slowly
        while True:
            chunk, reason = await _next_events(feed, subscriber)
            if chunk:
                # another supervisor may have sent some before the reconnect
                new = [event for event in chunk if event.cursor.position > last.position]
                last = new[-1].cursor if new else last
                yield _encode_chunk(new)
                await asyncio.sleep(0)
            elif reason is not None:
                yield _encode("end", last, {"reason": reason})
                return
            else:
                # the id moves on although nothing has happened: it would become too old to resume from
                last = feed.offered if feed.offered is not None and feed.offered.position > last.position else last
                yield _encode_heartbeat(last)
    finally:
        feed.unsubscribe(subscriber)


async def _catch_up(
    feed: EventFeed, subscriber: Subscriber, after: EventCursor, until: EventCursor
) -> AsyncIterator[tuple[EventCursor, bytes]]:
    """Yield what a resumed stream sends before the new events: each part with the cursor to go on from."""
    clock = asyncio.get_running_loop().time
    heartbeat_at = clock() + HEARTBEAT_INTERVAL_S
    async for chunk in feed.catch_up(after, until):
        if subscriber.has_stopped:
            return
        if chunk:
            after = chunk[-1].cursor
            yield after, _encode_chunk(event for event in chunk if subscriber.wanted.matches(event))
        elif clock() >= heartbeat_at:
            yield after, _encode_heartbeat(after)
        else:
            continue
        heartbeat_at = clock() + HEARTBEAT_INTERVAL_S


async def _next_events(feed: EventFeed, subscriber: Subscriber) -> tuple[list[RecordedEvent], str | None]:
    """Return the next events, or the reason why the stream ends, or neither when a heartbeat is due."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + HEARTBEAT_INTERVAL_S
    while True:
        if subscriber.events:
            return subscriber.take(), None
        if subscriber.end is not None:
            return [], subscriber.end
        if loop.time() >= deadline:
            return [], None
        subscriber.wake.clear()
        await wait_for_event(subscriber.wake, feed.tick_s)


def _chunks(events: Sequence[RecordedEvent]) -> Iterator[Sequence[RecordedEvent]]:
    for start in range(0, len(events), EVENTS_PER_CHUNK):
        yield events[start : start + EVENTS_PER_CHUNK]


def _encode_chunk(events: Iterable[RecordedEvent]) -> bytes:
    return b"".join(_encode(event.document["kind"], event.cursor, event.document) for event in events)


def _encode_heartbeat(cursor: EventCursor) -> bytes:
    return f": heartbeat\nid: {cursor.encode()}\n\n".encode()


def _encode(kind: str, cursor: EventCursor, document: dict[str, Any]) -> bytes:
    return f"id: {cursor.encode()}\nevent: {kind}\ndata: ".encode() + encode_json(document) + b"\n\n"
