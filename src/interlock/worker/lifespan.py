"""The lifespan of an app in a worker process: what runs before the first claim and after the last task.

Invariant: a worker claims nothing before the lifespan has started. What is started is stopped once, within the time
that the shutdown has left.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from typing import TYPE_CHECKING

from interlock.client.task import format_place, place_of_function
from interlock.errors import LifespanError
from interlock.service import cancel_and_wait
from interlock.telemetry import log
from interlock.worker.failures import traceback_text

if TYPE_CHECKING:
    from interlock.client.app import Interlock

CANCEL_TIMEOUT_S = 0.5


class LifespanRunner:
    """Runs the lifespan of an app in an asyncio task of its own: context managers must exit where they were entered."""

    def __init__(self, app: Interlock | None) -> None:
        self._app = app
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_starting(self) -> bool:
        """Whether the part before the `yield` runs."""
        return self._task is not None and not self._task.done() and not self._ready.is_set()

    async def start(self) -> None:
        """Run the part before the `yield`, once; LifespanError names the place where it failed."""
        if self._app is None or self._app.lifespan is None or self._task is not None:
            return
        self._task = asyncio.create_task(self._run(self._app))
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait([self._task, ready], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await cancel_and_wait([self._task], timeout_s=CANCEL_TIMEOUT_S)
            raise
        finally:
            ready.cancel()
        if self._task.done():
            self._task.result()  # raises LifespanError

    async def stop(self, timeout_s: float) -> None:
        """Run the part after the `yield`; an error in it is logged. Safe twice, and before start."""
        if self._task is None or self._task.done():
            return
        self._closing.set()
        await asyncio.wait([self._task], timeout=timeout_s)
        if not self._task.done():
            log.error("lifespan_stop_timed_out", lifespan=self._place(), timeout_s=round(timeout_s, 3))
            await cancel_and_wait([self._task], timeout_s=CANCEL_TIMEOUT_S)

    async def _run(self, app: Interlock) -> None:
        if app.lifespan is None:
            return
        phase = "start"
        try:
            async with app.lifespan(app) as value:
                if value is not None:
                    raise LifespanError(  # noqa: TRY301 - so that the lifespan can clean up
                        f"the lifespan {self._place()} yields {value!r:.100}, and must yield nothing; values for "
                        "handlers are dependencies: Depends(...)"
                    )
                self._ready.set()
                await self._closing.wait()
                phase = "stop"
        except LifespanError:
            raise
        except Exception as error:
            place = self._place_of(error)
            described = f"{type(error).__qualname__}: {error}"
            log.error("lifespan_failed", phase=phase, place=place, error=described, traceback=traceback_text(error))
            if phase == "start":
                raise LifespanError(f"the lifespan of the app failed at {place}: {described}") from error

    def _place(self) -> str:
        lifespan = None if self._app is None else self._app.lifespan
        return "of the app" if lifespan is None else place_of_function(lifespan) or repr(lifespan)

    def _place_of(self, error: Exception) -> str:
        """Return the file and line in the user's lifespan function where an error came from."""
        lifespan = None if self._app is None else self._app.lifespan
        code = getattr(inspect.unwrap(lifespan) if callable(lifespan) else None, "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
        return format_place(own[-1].filename, own[-1].lineno or 0) if own else self._place()
