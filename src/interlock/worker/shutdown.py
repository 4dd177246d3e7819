"""The end of a worker: the bounded shutdown, and the watchdog that ends a process which does not manage it.

Invariant: a shutdown ends within the limit, whatever handlers and the database do. While there is time, a lost database
is reconnected, so that finished attempts can be settled; the rest is left to its leases. The watchdog receives signals
in a thread of its own, so that a handler which blocks the event loop does not delay them. It acts only after a shutdown
was requested, and passes every signal on to the loop.
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

from interlock.lifecycle import TaskEvent, TaskRowEvent, TaskState
from interlock.postgres.retry import retry
from interlock.service import cancel_and_wait, wait_for_event
from interlock.telemetry import log, shutdown_tasks_total
from interlock.worker.cancellation import run_within
from interlock.worker.outcome import Interruption, returned
from interlock.worker.settler import return_attempts

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.worker.attempt import TaskStateMachine
    from interlock.worker.process import WorkerStateMachine

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
FINAL_SHARE = 1 / 6  # of the limit, kept for stopping handlers, settling and closing
CHECK_INTERVAL_S = 0.1
WATCHDOG_EXIT_CODE = 1
LOOP_REPLY_TIMEOUT_S = 1.0  # for the event loop to react after a second signal
LOG_TIMEOUT_S = 1.0  # for the watchdog's log record: the log may be what is blocked
NO_SIGNAL = b"\0"  # requests a shutdown without a signal; no signal has this number


class Shutdown:
    """One worker's way from SHUTTING_DOWN to STOPPED."""

    def __init__(self, worker: WorkerStateMachine, requested_at: float) -> None:
        self._worker = worker
        self._components = worker.components
        self._connections = worker.connections
        self._active = worker.context.active
        self._requested_at = requested_at
        self._deadline = requested_at + worker.settings.shutdown_limit

    async def run(self) -> None:
        """Wait for running tasks, interrupt those left after the grace, return what does not stop, close everything."""
        settings = self._worker.settings
        held = list(self._active.values())
        self._components.runner.return_waiting(TaskEvent.SHUTDOWN_REQUESTED, "which shuts down")
        self._components.resign()
        reconnecting = asyncio.create_task(self._stay_connected())
        final_s = settings.shutdown_limit * FINAL_SHARE
        await self._wait_until(self._is_idle, min(self._requested_at + settings.grace, self._deadline - final_s))
        # A blocked event loop may have left less time than was to be kept.
        tenth_s = max(min(final_s, self._deadline - time.monotonic()), 0.0) / 10
        for attempt in list(self._active.values()):
            attempt.interrupt(Interruption.SHUTDOWN)
        await self._wait_until(self._is_idle, time.monotonic() + 4 * tenth_s, even_if_forced=True)
        await self._wait_until(self._is_settled, self._deadline - 6 * tenth_s)
        await cancel_and_wait([reconnecting], timeout_s=tenth_s)
        await self._return_unstoppable(tenth_s)
        for attempt in held:
            shutdown_tasks_total.labels(_end_of(attempt)).inc()
        await self._components.stop(3 * tenth_s)
        await self._connections.close(timeout_s=tenth_s)

    def _is_idle(self) -> bool:
        return not self._active

    def _is_settled(self) -> bool:
        """Tell whether only attempts that do not stop are left, and can be returned."""
        return self._is_idle() or (len(self._processing()) == len(self._active) and self._connections.are_open)

    def _processing(self) -> list[TaskStateMachine]:
        return [attempt for attempt in self._active.values() if attempt.state is TaskState.PROCESSING]

    async def _wait_until(self, holds: Callable[[], bool], deadline: float, *, even_if_forced: bool = False) -> None:
        """Wait for a condition until a deadline; a forced shutdown waits only if `even_if_forced`."""
        slot_freed = self._worker.slot_freed
        while not holds() and (left := deadline - time.monotonic()) > 0:
            if self._worker.stop_now.is_set() and not even_if_forced:
                return
            slot_freed.clear()
            await wait_for_event(slot_freed, min(CHECK_INTERVAL_S, left))

    async def _stay_connected(self) -> None:
        """Reconnect whenever the database is lost, with backoff."""
        while True:
            if self._connections.are_open:
                await self._connections.lost.wait()
            await retry(self._reconnect, on_failure=self._on_reconnect_failed)

    async def _reconnect(self) -> None:
        await self._worker.open_connections()

    def _on_reconnect_failed(self, error: Exception, _: float) -> None:
        log.warning("shutdown_without_database", error=str(error) or type(error).__name__)

    async def _return_unstoppable(self, seconds: float) -> None:
        """Return the tasks of handlers that do not stop: threads, and coroutines that swallow their cancellation."""
        attempts = [attempt for attempt in self._processing() if attempt.claimed is not None]
        for attempt in attempts:
            attempt.outcome = returned(attempt)
        with suppress(TimeoutError):
            await run_within(seconds, self._return(attempts))

    async def _return(self, attempts: list[TaskStateMachine]) -> None:
        async with self._connections.in_use:
            await return_attempts(self._connections.claiming, attempts, actor=self._worker.worker_id)


def _end_of(attempt: TaskStateMachine) -> str:
    """Return how an attempt that was running at the request has ended: finished, returned or abandoned."""
    outcome = attempt.outcome
    if outcome is not None and outcome.event is TaskRowEvent.RETURN:
        return "returned"
    return "finished" if attempt.state is TaskState.COMPLETED else "abandoned"


class Watchdog:
    """Ends a process that belongs to one worker, if it does not stop within the limit; used as a context manager."""

    def __init__(self, worker_id: str, limit: float, on_kill: Callable[[], None] | None = None) -> None:
        self._worker_id = worker_id
        self._limit = limit
        self._on_kill = on_kill
        self._receiver, self._sender = socket.socketpair()
        self._sender.settimeout(0)  # a signal handler must never block
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_wakeup_fd: int | None = None
        self._loop_replied = threading.Event()
        self._reply_due: float | None = None
        self._signal_follows = False
        self.requested_at: float | None = None  # of the first shutdown request, on the monotonic clock
        self._thread = threading.Thread(target=self._watch, name="interlock-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):  # not the main thread, which alone has a wakeup descriptor
            current = signal.set_wakeup_fd(-1)
            if current not in {-1, self._sender.fileno()}:
                signal.set_wakeup_fd(current)
        _intercepting.discard(self)
        # Not only closed: a process that a handler forked holds a copy of it.
        self._sender.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sender.close()
        self._receiver.close()
        if self._loop_wakeup_fd is not None:
            os.close(self._loop_wakeup_fd)

    def intercept_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive the signals of a loop before it does, also while it is blocked; it must have its handlers already."""
        with suppress(ValueError):  # not the main thread: it receives no signals
            before = signal.set_wakeup_fd(self._sender.fileno())
            self._loop = loop
            _intercepting.add(self)
            # A duplicate, which asyncio does not close under us.
            self._loop_wakeup_fd = None if before == -1 else os.dup(before)

    def arm(self, *, signal_follows: bool = False) -> None:
        """Record a shutdown request that is no signal; with `signal_follows`, the next signal only repeats it."""
        self._signal_follows = signal_follows
        with suppress(OSError):
            self._sender.send(NO_SIGNAL)

    # --- the thread

    def _watch(self) -> None:
        while True:
            self._receiver.settimeout(self._seconds_until_check())
            try:
                received = self._receiver.recv(64)
            except TimeoutError:
                self._check(time.monotonic())
                continue
            if not received:
                return  # the context has ended
            for number in received:
                self._record(number, time.monotonic())
            if self._loop_wakeup_fd is not None:
                with suppress(OSError):
                    os.write(self._loop_wakeup_fd, received)

    def _seconds_until_check(self) -> float | None:
        """Return the seconds until the next check; None before a shutdown is requested."""
        if self.requested_at is None:
            return None
        due = self.requested_at + self._limit
        if self._reply_due is not None:
            due = min(due, self._reply_due)
        return max(due - time.monotonic(), 0.001)

    def _record(self, number: int, now: float) -> None:
        """Record the first request; at the next signal, test whether the event loop still runs."""
        if self.requested_at is None and (number in SIGNALS or number == NO_SIGNAL[0]):
            self.requested_at = now
        elif number in SIGNALS and self._signal_follows:
            self._signal_follows = False
        elif number in SIGNALS:
            self._loop_replied.clear()
            self._reply_due = now + LOOP_REPLY_TIMEOUT_S
            if self._loop is not None:
                with suppress(RuntimeError):  # it is closed
                    self._loop.call_soon_threadsafe(self._loop_replied.set)

    def _check(self, now: float) -> None:
        if self._reply_due is not None and now >= self._reply_due:
            if not self._loop_replied.is_set():
                self._kill("a second signal came while the event loop was blocked")
            self._reply_due = None
        if self.requested_at is not None and now >= self.requested_at + self._limit:
            self._kill(f"the worker has not stopped within {self._limit:g} s")

    def _kill(self, reason: str) -> None:
        logging = threading.Thread(target=self._log, args=(reason,), daemon=True)
        logging.start()
        logging.join(LOG_TIMEOUT_S)
        if self._on_kill is not None:
            self._on_kill()
        os._exit(WATCHDOG_EXIT_CODE)

    def _log(self, reason: str) -> None:
        log.error("worker_killed_by_watchdog", worker_id=self._worker_id, reason=reason, blocked_in=_main_thread())
        sys.stdout.flush()
        sys.stderr.flush()


_intercepting: set[Watchdog] = set()


def _reset_signals_after_fork() -> None:
    """Give a process that a handler forked signals of its own: it would report them to this worker as the worker's.

    SIGTERM ends it, as `Process.terminate()` expects. SIGINT, which a terminal sends to all processes, is ignored: the
    worker lets its handlers finish, and they may need the process.
    """
    if _intercepting:
        _intercepting.clear()
        with suppress(ValueError):  # not the main thread, which it is after a fork
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)


os.register_at_fork(after_in_child=_reset_signals_after_fork)


def _main_thread() -> str | None:
    """Return the function and line that the main thread executes."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the only way to see it
    if frame is None:
        return None
    place = traceback.extract_stack(frame, limit=1)[-1]
    return f"{place.name} ({place.filename}:{place.lineno})"
