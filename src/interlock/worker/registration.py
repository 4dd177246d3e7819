"""What a worker is to others: a row that says for whom it works, and somebody who can be told to work otherwise.

Invariant: a worker that is paused or disabled takes no new tasks; those that it has are not touched. One whose row has
ended shuts down.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from interlock.errors import InputError, StoreError
from interlock.lifecycle import SUPERVISED_WORKER, SupervisedWorkerState
from interlock.store.control import send_answer
from interlock.store.listening import heed_cancellation
from interlock.telemetry import log
from interlock.worker.control import Control
from interlock.worker.presence import Presence

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from interlock.store.database import Connection
    from interlock.store.presence import Process
    from interlock.worker.control import Answer
    from interlock.worker.statistics import WorkerStatistics

REPAIR_PAUSE = 1.0


class Registration:
    """The row of one worker, and the three sides of it that commands reach."""

    def __init__(
        self,
        row: Process,
        statistics: WorkerStatistics,
        *,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        clock: Callable[[], datetime | None],
        changed: Callable[[], None],
        dismissed: Callable[[], None],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self._worker_id = row.id
        self.namespaces = row.namespaces
        self._statistics = statistics
        self._connect = connect
        self._changed = changed
        self._dismissed = dismissed
        self._describe = describe
        self._enabled = True
        self._paused = False
        self._control = Control(row.id, orchestration=self, handlers=self, system=self)
        self._presence = Presence(
            connect,
            row,
            statistics=statistics.document,
            told=self._hear_status,
            clock=clock,
        )
        self._home = asyncio.get_running_loop()
        self._away: asyncio.AbstractEventLoop | None = None  # where the heartbeat is

    @property
    def takes_tasks(self) -> bool:
        """Whether new tasks are to be claimed."""
        return self._enabled and not self._paused

    # --- the row

    async def keep(self, stop: asyncio.Event) -> None:
        """Keep the row until `stop`, and then end it. Runs in a loop that no handler can block."""
        self._away = asyncio.get_running_loop()
        while not stop.is_set():
            try:
                await self._presence.run(stop)
            except Exception as error:  # noqa: BLE001 - a worker that is here has to say so
                heed_cancellation()
                log.error("heartbeat_failed", worker_id=self._worker_id, error=str(error) or type(error).__name__)
                await asyncio.sleep(REPAIR_PAUSE)

    def poke(self) -> None:
        """Look at the row now, because somebody may have changed it."""
        self._beside(self._presence.poke)

    def _beside(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._away is not None:
            with suppress(RuntimeError):  # its loop is closed: the row has ended
                self._away.call_soon_threadsafe(function, *arguments)

    def _hear_status(self, status: str) -> None:
        with suppress(RuntimeError):  # the worker's loop is closed
            self._home.call_soon_threadsafe(self._heed, SupervisedWorkerState(status))

    def _heed(self, status: SupervisedWorkerState) -> None:
        if status in SUPERVISED_WORKER.final:
            log.warning("worker_dismissed", worker_id=self._worker_id, status=status.value)
            self._dismissed()
        paused = status is SupervisedWorkerState.PAUSED
        if paused is not self._paused:
            self._paused = paused
            self._changed()

    # --- commands

    def hear(self, payload: str) -> Answer | None:
        """Obey a notification that is a command to this worker; give the answer."""
        return self._control.hear(payload)

    async def answer(self, answer: Answer) -> None:
        """Say to whoever asked what came of it."""
        if answer.token is not None:
            with suppress(StoreError, OSError):  # whoever asked asks again
                async with self._connect() as connection:
                    await send_answer(connection, answer.token, self._worker_id, answer.document)

    def subscribe(self, namespace: str) -> tuple[str, ...]:
        """Take tasks of a namespace too; give all namespaces that are served now."""
        return self._serve((*self.namespaces, namespace) if namespace not in self.namespaces else self.namespaces)

    def unsubscribe(self, namespace: str) -> tuple[str, ...]:
        """Take no more tasks of a namespace; give those that are still served."""
        left = tuple(name for name in self.namespaces if name != namespace)
        if not left:
            raise InputError(f"a worker needs at least one namespace, and {namespace!r} is its last one")
        return self._serve(left)

    def _serve(self, namespaces: tuple[str, ...]) -> tuple[str, ...]:
        if namespaces != self.namespaces:
            self.namespaces = namespaces
            self._beside(self._presence.serve, namespaces)
            self._changed()
        return namespaces

    def event_status(self) -> dict[str, Any]:
        """Give the statistics of the event system between the worker and its handlers."""
        return self._statistics.document()["handlers"]

    def status(self) -> dict[str, Any]:
        """Tell how the worker is."""
        return {
            "role": "worker",
            "enabled": self._enabled,
            "paused": self._paused,
            "namespaces": list(self.namespaces),
            "statistics": self._statistics.document(),
            **self._describe(),
        }

    def refresh(self) -> None:
        """Read anew what is kept in memory of the database, and look for tasks."""
        self.poke()
        self._changed()

    def enable(self, enabled: bool) -> None:  # noqa: FBT001 - the one word of the command
        """Take on new tasks, or none until told otherwise."""
        self._enabled = enabled
        self._changed()
