"""The hub of live updates: one statement per second for all viewers, none without viewers.

Invariant: a viewer never has a queue. The hub holds the newest version of every fragment; a viewer holds the versions
that it was sent, and a slow one skips those between. Each fragment is rendered and encoded once per topic, argument and
set of namespaces.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from uuid import UUID

import orjson

from interlock.dashboard.counts import LATE_COMMIT_S, RECENT_S, STORED_MACHINES, LiveCounts
from interlock.dashboard.topics import TICK_S, Moment, Topic, count_findings, topics
from interlock.errors import StoreError
from interlock.store.live import LiveParameters, read_live, read_server_version
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from interlock.client.app import Interlock
    from interlock.dashboard.counts import Namespaces
    from interlock.postgres.connection import Connection
    from interlock.supervisor.http.system import SharedExamination

FULL_COUNT_INTERVAL_S = 600.0
LATE_READ_INTERVAL_S = 10.0  # between two readings of the seconds in which late commits may have appeared
MAX_GAP_S = 60.0  # after a longer pause without viewers the states are counted anew
FIRST_COUNT_TIMEOUT_S = 2.0  # a page waits so long for the very first count
PAGE_READ_TIMEOUT_S = 0.04  # and so long for a newer reading, before it shows the last one
MAX_ROWS = 50  # visible rows of one viewer
ERROR_PAUSE_S = 5.0
EXAMINATION_INTERVAL_S = 60.0
BASE_SECTIONS = frozenset(
    {
        "clock",
        "processes",
        "approvals",
        "namespaces",
        "running_sorts",
        *(f"{name}_moves" for name in STORED_MACHINES.values()),
        "worker_states",
    }
)
TEXT_IDS = frozenset({"worker_ids"})  # parameters whose ids are texts, quoted in the argument
STATE_SECTIONS = frozenset(f"{name}_states" for name in STORED_MACHINES.values())


@dataclass(slots=True)
class Fragment:
    """The newest version of a fragment, encoded as a JSON pair of its id and its HTML."""

    version: int
    html: str
    encoded: bytes


@dataclass(slots=True, eq=False)
class TopicSubscription:
    """A topic with an argument and namespaces, shared by its viewers."""

    topic: Topic
    argument: str
    namespaces: Namespaces
    fragments: dict[str, Fragment] = field(default_factory=dict)
    due_at: float = 0.0
    data: Any = None  # of the last `Topic.read`
    viewers: int = 0


@dataclass(slots=True, eq=False)
class LiveViewer:
    """One open page: what it subscribed to, the rows that it shows, and the versions that it was sent."""

    subscriptions: list[TopicSubscription]
    row_ids: frozenset[str] = frozenset()
    session: bytes | None = None
    sent: dict[tuple[int, str], int] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: str | None = None  # the event that ends the stream: session or bye

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the encoded fragments, and the rows, that are newer than those sent, and mark them as sent."""
        patches: list[bytes] = []
        rows: list[bytes] = []
        for subscription in self.subscriptions:
            is_row = subscription.topic.row_ids is not None
            for name, fragment in subscription.fragments.items():
                if is_row and name.removeprefix("row-") not in self.row_ids:
                    continue
                key = (id(subscription), name)
                if self.sent.get(key, -1) < fragment.version:
                    self.sent[key] = fragment.version
                    (rows if is_row else patches).append(fragment.encoded)
        return patches, rows


class LiveHub:
    """Reads, renders and hands out live updates while there are viewers; gives pages the current numbers."""

    def __init__(self, app: Interlock, doctor: SharedExamination) -> None:
        self.app = app
        self.doctor = doctor
        self.counts = LiveCounts()
        self.epoch = secrets.token_hex(4)
        self.tick = 0
        self.statements = 0  # that were run, for the tests
        self.server_version = ""
        self.is_stale = False  # the latest tick could not read the database
        self._subscriptions: dict[tuple[str, str, Namespaces], TopicSubscription] = {}
        self._viewers: set[LiveViewer] = set()
        self._running: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self.sections: dict[str, list[dict[str, Any]]] = {}
        self._read_at = 0.0  # monotonic, of the last reading
        self._counted_at = 0.0
        self._late_read_at = 0.0
        self._reading = asyncio.Lock()
        self._dirty: set[str] = set()
        self._checked: set[bytes] = set()  # sessions that the last statement asked about

    # --- viewers

    @property
    def viewers(self) -> int:
        """The number of open streams."""
        return len(self._viewers)

    def join(
        self,
        names: Iterable[str],
        namespaces: Namespaces,
        *,
        row_ids: frozenset[str] = frozenset(),
        session: bytes | None = None,
        last: str | None = None,
    ) -> LiveViewer:
        """Add a viewer; unknown topics are ignored. `last`: the id of the last event that the page has seen."""
        viewer = LiveViewer(
            [self._subscribe(*found, namespaces) for name in names if (found := topics.find(name)) is not None],
            row_ids,
            session,
        )
        seen = self._tick_of(last)
        for subscription in viewer.subscriptions:
            for name, fragment in subscription.fragments.items():
                if fragment.version <= seen:
                    viewer.sent[id(subscription), name] = fragment.version
        self._viewers.add(viewer)
        if namespaces is not None:
            self.count_by_namespace()
        if row_ids:
            for subscription in viewer.subscriptions:
                subscription.due_at = 0.0
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(), name="interlock dashboard")
        viewer.wake.set()
        return viewer

    def leave(self, viewer: LiveViewer) -> None:
        """Remove a viewer; without any, nothing is read."""
        self._viewers.discard(viewer)
        for subscription in viewer.subscriptions:
            subscription.viewers -= 1
            if not subscription.viewers:
                key = (subscription.topic.name, subscription.argument, subscription.namespaces)
                self._subscriptions.pop(key, None)
        if not self._viewers and self._running is not None:
            self._running.cancel()
            self._running = None

    def event_id(self) -> str:
        """Return the id of an event sent now."""
        return f"{self.epoch}.{self.tick}"

    def _tick_of(self, last: str | None) -> int:
        epoch, _, tick = (last or "").partition(".")
        return int(tick) if epoch == self.epoch and tick.isdecimal() else -1

    def _subscribe(self, topic: Topic, argument: str, namespaces: Namespaces) -> TopicSubscription:
        key = (topic.name, argument, namespaces)
        found = self._subscriptions.get(key)
        if found is None:
            found = self._subscriptions[key] = TopicSubscription(topic, argument, namespaces)
        found.viewers += 1
        return found

    # --- reading

    async def _run(self) -> None:
        """Tick until there are no viewers."""
        channels = frozenset[str]().union(*(found.topic.channels for found in self._subscriptions.values()))
        listening = self.app.notifier.subscribe({channel: self._mark_dirty(channel) for channel in channels})
        examining = asyncio.create_task(self._examine(), name="interlock dashboard doctor")
        try:
            while True:
                started = time.monotonic()
                try:
                    await self._tick()
                    self._tell(is_stale=False)
                except (StoreError, OSError) as error:
                    log.warning("dashboard_not_updated", error=str(error) or type(error).__name__)
                    self._tell(is_stale=True)
                    await asyncio.sleep(ERROR_PAUSE_S)
                await asyncio.sleep(max(0.0, started + TICK_S - time.monotonic()))
        finally:
            listening.close()
            examining.cancel()

    def _tell(self, *, is_stale: bool) -> None:
        if is_stale != self.is_stale:
            self.is_stale = is_stale
            for viewer in self._viewers:
                viewer.wake.set()

    async def _examine(self) -> None:
        """Examine the database every minute while there are viewers, beside the ticks, which do not wait for it."""
        while True:
            try:
                await self.doctor.read(EXAMINATION_INTERVAL_S)
            except (StoreError, OSError) as error:
                log.warning("dashboard_not_examined", error=str(error) or type(error).__name__)
            for found in self._subscriptions.values():
                if found.topic.shows_findings:
                    found.due_at = 0.0
            await asyncio.sleep(EXAMINATION_INTERVAL_S)

    def _mark_dirty(self, channel: str) -> Any:
        def mark(_: str) -> None:
            self._dirty.add(channel)

        return mark

    async def _tick(self) -> None:
        now = time.monotonic()
        dirty, self._dirty = self._dirty, set()
        due = [
            found
            for found in self._subscriptions.values()
            if found.due_at <= now or not dirty.isdisjoint(found.topic.channels)
        ]
        if not due:
            return
        async with self.app.connection() as connection:
            await self._read(connection, due)
            for found in due:
                if found.topic.read is not None:
                    found.data = await found.topic.read(connection, self._moment(found))
        self.tick += 1
        for found in due:  # after all reads: a topic shows what others have read in this tick
            found.due_at = now + found.topic.every_s - TICK_S / 2
            self._render(found, self._moment(found))
        standing = {row["session"] for row in self.sections.get("sessions", ())}
        for viewer in self._viewers:
            if viewer.session is not None and viewer.session in self._checked and viewer.session.hex() not in standing:
                viewer.ended = "session"
            viewer.wake.set()

    def _moment(self, found: TopicSubscription) -> Moment:
        known = {
            other.topic.name: other.data
            for other in self._subscriptions.values()
            if (other.argument, other.namespaces) == (found.argument, found.namespaces) and other.data is not None
        }
        return Moment(
            self.counts,
            self.sections,
            found.namespaces,
            found.argument,
            data=found.data,
            known=known,
            report=self.doctor.latest,
        )

    def _render(self, found: TopicSubscription, moment: Moment) -> None:
        try:
            rendered = found.topic.render(moment)
        except Exception as error:  # noqa: BLE001 - one topic must not stop the others
            log.error("dashboard_topic_failed", topic=found.topic.name, error=repr(error), exc_info=True)
            return
        for name, html in rendered.items():
            before = found.fragments.get(name)
            text = str(html)
            if before is None or before.html != text:
                found.fragments[name] = Fragment(self.tick, text, orjson.dumps([name, text]))
        for name in found.fragments.keys() - rendered.keys():
            del found.fragments[name]

    async def _read(self, connection: Connection, due: Iterable[TopicSubscription] = ()) -> None:
        """Run the one statement for these subscriptions, and update the numbers."""
        async with self._reading:
            now = time.monotonic()
            gap = now - self._read_at
            counts_all = not self._counted_at or now - self._counted_at > FULL_COUNT_INTERVAL_S or gap > MAX_GAP_S
            window_s = RECENT_S + int(gap) if gap < LATE_COMMIT_S else LATE_COMMIT_S + int(gap)
            if counts_all or now - self._late_read_at >= LATE_READ_INTERVAL_S:
                window_s = LATE_COMMIT_S if counts_all else max(window_s, LATE_COMMIT_S)
                self._late_read_at = now
            sections = BASE_SECTIONS.union(*(found.topic.sections for found in due))
            if counts_all:
                sections |= STATE_SECTIONS
            self._checked = {viewer.session for viewer in self._viewers if viewer.session is not None}
            if self._checked:
                sections |= {"sessions"}
            self.sections = read = await read_live(
                connection, sections, self._parameters(due, window_s), now=self.app.now()
            )
            self.statements += 1
            clock = datetime.fromisoformat(str(read["clock"][0]["now"]))
            self.counts.update(read, int(clock.timestamp()), window_s)
            self._read_at = time.monotonic()
            if counts_all:
                self._counted_at = self._read_at
            if not self.server_version:
                self.server_version = await read_server_version(connection)

    def _parameters(self, due: Iterable[TopicSubscription], window_s: int) -> LiveParameters:
        ids: dict[str, set[Any]] = defaultdict(set)
        rows = [text for viewer in self._viewers for text in viewer.row_ids]
        for found in due:
            for parameter in found.topic.watches:
                wanted = {unquote(found.argument)} if parameter in TEXT_IDS else _as_uuids([found.argument])
                ids[parameter].update(wanted)
            if found.topic.row_ids is not None:
                ids[found.topic.row_ids].update(_as_uuids(rows))
        return LiveParameters(
            session_hashes=sorted(self._checked),
            window=timedelta(seconds=window_s),
            by_namespace=self.counts.by_namespace,
            **{name: sorted(found) for name, found in ids.items()},
        )

    # --- for pages

    def count_by_namespace(self) -> None:
        """Count moves by namespace from now on; without it, only those of all namespaces are known."""
        if not self.counts.by_namespace:
            self.counts.by_namespace, self._counted_at = True, 0.0

    def counters(self, namespaces: Namespaces) -> dict[str, int]:
        """Return the numbers beside entries of the navigation: live workers, open approvals, findings."""
        moment = Moment(self.counts, self.sections, namespaces)
        return {
            "workers": self.counts.workers(namespaces),
            "approvals": len(moment.rows("approvals")),
            "findings": count_findings(self.doctor.latest),
        }

    async def current(self, app: Interlock, namespaces: Namespaces = None) -> LiveCounts:
        """Return numbers that are at most a second old, or the last ones if reading takes too long."""
        if namespaces is not None:
            self.count_by_namespace()
        is_first = not self._counted_at
        if time.monotonic() - self._read_at >= TICK_S:
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = asyncio.create_task(self._refresh(app), name="interlock dashboard refresh")
            timeout = FIRST_COUNT_TIMEOUT_S if is_first else PAGE_READ_TIMEOUT_S
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await asyncio.shield(self._refreshing)
        return self.counts

    async def _refresh(self, app: Interlock) -> None:
        try:
            async with app.connection() as connection:
                await self._read(connection)
        except (StoreError, OSError) as error:
            log.warning("dashboard_not_updated", error=str(error) or type(error).__name__)

    @property
    def age_s(self) -> float:
        """Seconds since the last reading."""
        return time.monotonic() - self._read_at


def _as_uuids(texts: Iterable[str]) -> set[UUID]:
    found = set()
    for text in texts:
        with suppress(ValueError):
            found.add(UUID(text))
    return found
