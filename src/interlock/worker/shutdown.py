"""The end of a worker: running tasks get their grace, the others are returned, and everything is closed.

Invariant: it ends within the limit, whatever handlers and the database do. While there is time, a database that is lost
is looked for, so that what is finished can be reported; what could not be written is left to its lease.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from interlock.errors import StoreError
from interlock.lifecycle import TaskState
from interlock.telemetry import log
from interlock.worker.cancellation import end, within
from interlock.worker.fetcher import backoff
from interlock.worker.outcome import Interruption

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock.worker.assembly import Connections, Parts
    from interlock.worker.attempt import TaskStateMachine
    from interlock.worker.settings import WorkerSettings


LAST_PART = 1 / 6  # of the limit, kept for stopping handlers, reporting and closing
TICK = 0.1


class Shutdown:
    """One worker's way from SHUTTING_DOWN to STOPPED."""

    def __init__(
        self,
        parts: Parts,
        settings: WorkerSettings,
        active: dict[int, TaskStateMachine],
        connections: Connections,
        *,
        asked_at: float,
        connect: Callable[[], Awaitable[object]],
        hurry: asyncio.Event,
        changed: asyncio.Event,
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._active = active
        self._connections = connections
        self._deadline = asked_at + settings.shutdown_limit
        self._asked_at = asked_at
        self._connect = connect
        self._hurry = hurry
        self._changed = changed

    async def run(self) -> None:
        """Wind everything up."""
        self._parts.resign()
        looking = asyncio.create_task(self._stay_connected())
        kept = self._settings.shutdown_limit * LAST_PART
        await self._until(self._is_idle, min(self._asked_at + self._settings.grace, self._deadline - kept))
        # An event loop that was blocked may have left less of the time than was to be kept.
        part = max(min(kept, self._deadline - time.monotonic()), 0.0) / 10
        for attempt in list(self._active.values()):
            attempt.interrupt(Interruption.SHUTDOWN)
        await self._until(self._is_idle, time.monotonic() + 4 * part, in_a_hurry_too=True)
        await self._until(self._is_reported, self._deadline - 6 * part)
        await end(looking, courtesy=part / 2)
        await self._return_the_rest(part)
        await self._parts.close(3 * part)
        await self._connections.close(courtesy=part / 2)

    # --- what is waited for

    def _is_idle(self) -> bool:
        return not self._active

    def _is_reported(self) -> bool:
        """Whether all there is left to do is to return those that cannot be stopped, and that can be done."""
        return self._is_idle() or (len(self._running()) == len(self._active) and self._connections.are_up)

    def _running(self) -> list[TaskStateMachine]:
        return [attempt for attempt in self._active.values() if attempt.state is TaskState.PROCESSING]

    async def _until(self, seen: Callable[[], bool], moment: float, *, in_a_hurry_too: bool = False) -> None:
        """Wait for something, at most until a moment, and in a hurry only where that makes sense."""
        while not seen() and (left := moment - time.monotonic()) > 0:
            if self._hurry.is_set() and not in_a_hurry_too:
                return
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(TICK, left)):
                    await self._changed.wait()

    # --- the database

    async def _stay_connected(self) -> None:
        """Look for the database whenever it is lost, with growing pauses."""
        failures = 0
        while True:
            if self._connections.are_up:
                failures = 0
                await self._connections.lost.wait()
            try:
                await self._connect()
            except (StoreError, OSError) as error:
                failures += 1
                log.warning("shutdown_without_database", error=str(error) or type(error).__name__)
                await asyncio.sleep(backoff(self._settings, failures))

    async def _return_the_rest(self, seconds: float) -> None:
        """Put back what could not be stopped: a thread that will not end, a coroutine that swallows everything."""
        claimed = [attempt.claimed for attempt in self._running() if attempt.claimed is not None]
        with suppress(TimeoutError):
            await within(seconds, self._parts.claims.give_back(self._connections.claiming, claimed))


# SECTION worker/watchdog
# Ends the process when a shutdown was asked for and the worker does not manage it in time.
#
# Invariant: it hears signals by itself, in a thread of its own, so that a handler that blocks the event loop keeps
# nobody
# from being heard. It acts only after a shutdown was asked for, and passes on every signal that it hears.

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
EXIT_CODE = 1
SHORT_MOMENT = 1.0  # for the loop to show that it lives, once somebody is in a hurry
LAST_WORDS = 1.0  # for the log, which may be just what is blocked
ASKED_OTHERWISE = b"\0"  # no signal has this number


class Watchdog:
    """Watches over a process that is one worker's alone, for as long as the context lasts."""

    def __init__(self, worker_id: str, limit: float) -> None:
        self._worker_id = worker_id
        self._limit = limit
        self._ear, self._mouth = socket.socketpair()
        self._mouth.settimeout(0)  # who writes to it must never wait
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loops_own: int | None = None
        self._answered = threading.Event()
        self._answer_due: float | None = None
        self.asked_at: float | None = None  # when the shutdown was first asked for, by the monotonic clock
        self._thread = threading.Thread(target=self._watch, name="interlock-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):  # not the main thread, which has no signals to give back
            other = signal.set_wakeup_fd(-1)
            if other not in {-1, self._mouth.fileno()}:
                signal.set_wakeup_fd(other)
        self._mouth.close()
        self._thread.join()
        self._ear.close()
        if self._loops_own is not None:
            os.close(self._loops_own)

    def overhear(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear the signals of a loop before it does, also while it is blocked. It has its handlers already."""
        with suppress(ValueError):  # not the main thread: there are none to be heard
            before = signal.set_wakeup_fd(self._mouth.fileno())
            self._loop = loop
            self._loops_own = None if before == -1 else os.dup(before)  # our own, which nobody closes under us

    def arm(self) -> None:
        """Hear that a shutdown was asked for otherwise than by a signal."""
        with suppress(OSError):
            self._mouth.send(ASKED_OTHERWISE)

    # --- the thread

    def _watch(self) -> None:
        while True:
            self._ear.settimeout(self._patience())
            try:
                heard = self._ear.recv(64)
            except TimeoutError:
                self._judge(time.monotonic())
                continue
            if not heard:
                return  # the context has ended
            for number in heard:
                self._note(number, time.monotonic())
            self._pass_on(heard)

    def _patience(self) -> float | None:
        """Seconds until it is time to judge; None while nobody has asked for anything."""
        if self.asked_at is None:
            return None
        due = self.asked_at + self._limit
        if self._answer_due is not None:
            due = min(due, self._answer_due)
        return max(due - time.monotonic(), 0.001)

    def _pass_on(self, heard: bytes) -> None:
        if self._loops_own is not None:
            with suppress(OSError):
                os.write(self._loops_own, heard)

    def _note(self, number: int, now: float) -> None:
        if self.asked_at is None and (number in SIGNALS or number == ASKED_OTHERWISE[0]):
            self.asked_at = now
        elif number in SIGNALS:
            self._ask_for_life(now)

    def _ask_for_life(self, now: float) -> None:
        """Somebody is in a hurry: a loop that lives hurries by itself, and shows so."""
        self._answered.clear()
        self._answer_due = now + SHORT_MOMENT
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed: there is nothing left but the way out
                self._loop.call_soon_threadsafe(self._answered.set)

    def _judge(self, now: float) -> None:
        if self._answer_due is not None and now >= self._answer_due:
            if not self._answered.is_set():
                self._kill("a second signal came while the event loop was blocked")
            self._answer_due = None
        if self.asked_at is not None and now >= self.asked_at + self._limit:
            self._kill(f"the worker has not stopped within {self._limit:g} s")

    def _kill(self, reason: str) -> None:
        speaking = threading.Thread(target=self._say, args=(reason,), daemon=True)
        speaking.start()
        speaking.join(LAST_WORDS)
        os._exit(EXIT_CODE)

    def _say(self, reason: str) -> None:
        log.error("worker_killed_by_watchdog", worker_id=self._worker_id, reason=reason, blocked_in=_main_thread())
        sys.stdout.flush()
        sys.stderr.flush()


def _main_thread() -> str | None:
    """Tell what the main thread is doing."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the one way to see it
    if frame is None:
        return None
    place = traceback.extract_stack(frame, limit=1)[-1]
    return f"{place.name} ({place.filename}:{place.lineno})"
