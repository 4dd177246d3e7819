"""All processes of one pool: looked at, asked to stop, and in the end gone or left to others.

Invariant: a process whose row another supervisor has by now is left alone; only its end is still heard, because nobody
but its parent can. When the crew is disbanded, what is not to be left is dead.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from interlock.lifecycle import SupervisedWorkerState
from interlock.supervisor import pool_metrics as metrics
from interlock.supervisor.children import Child, Ended, adopt_child, environment_of, start_child
from interlock.supervisor.reconcile import Sight, stop_limit
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.config import Config
    from interlock.store.supervision import HeldWorker
    from interlock.supervisor.pool_settings import PoolSettings

HURRY = 8.0  # seconds that processes get once somebody is in a hurry
AGAIN = 0.5  # seconds after which they are told so again
LOOK = 0.05


class Crew:
    """The processes, by the ids of their rows."""

    def __init__(self, supervisor_id: str, host: str, config: Config, settings: PoolSettings) -> None:
        self._supervisor_id = supervisor_id
        self._host = host
        self._config = config
        self._settings = settings
        self._left: list[Child] = []  # started here, and in the hands of another supervisor by now
        self._in_a_hurry = False
        self.children: dict[str, Child] = {}

    def start(self, worker: HeldWorker, generation: int, instance: str) -> Child:
        """Start the process of a row. OSError when the system refuses."""
        environment = environment_of(self._config, worker.spec)
        child = start_child(worker, generation, instance, environment=environment, tied=self._settings.tied)
        self._take_on(worker, child)
        metrics.supervised_process_starts_total.inc()
        self._log("worker_process_started", child)
        return child

    def see(self, worker: HeldWorker) -> Sight:
        """Look at the process of a row, which may be one of an earlier supervisor."""
        child = self.children.get(worker.id)
        if child is None and worker.pid is not None:
            child = adopt_child(worker, self._host)
            if child is None:
                return Sight(ended=Ended())
            self._take_on(worker, child)
            metrics.supervised_process_adoptions_total.inc()
            self._log("worker_process_adopted", child)
        if child is None:
            return Sight()
        ended = child.look()
        asked_for = None if child.asked_at is None else time.monotonic() - child.asked_at
        child.draining &= worker.status == SupervisedWorkerState.PAUSED
        return Sight(ended is None, ended, child.memory(), asked_for, child.draining)

    def keep_only(self, held: Mapping[str, int]) -> None:
        """Leave processes alone whose rows another supervisor has by now, or has given another process."""
        for worker_id, child in list(self.children.items()):
            if held.get(worker_id) != child.generation:
                self._log("worker_process_left", child)
                self._left.append(self.children.pop(worker_id))
        self._left = [child for child in self._left if child.look() is None]

    def kill(self, worker: HeldWorker) -> None:
        """End a process that does not end."""
        child = self.children[worker.id]
        if not child.killed:
            log.warning("worker_process_killed", supervisor_id=self._supervisor_id, worker_id=worker.id, pid=child.pid)
            metrics.supervised_process_kills_total.inc()
        child.kill()

    def hurry(self) -> None:
        """Have processes that stop not wait for running tasks."""
        self._in_a_hurry = True
        for child in self.children.values():
            child.asked_at = None  # the time for it begins anew
            child.ask_to_stop(time.monotonic())

    async def stop(self) -> None:
        """Ask all to stop, and see that they do."""
        for child in self.children.values():
            if child.asked_at is None:
                child.ask_to_stop(time.monotonic())
        repeated_at = time.monotonic()
        while any(child.look() is None for child in self.children.values()):
            now = time.monotonic()
            if self._in_a_hurry and now - repeated_at >= AGAIN:
                # two signals that come at once are one: who has heard but the first would take his time
                repeated_at = now
                for child in self.children.values():
                    child.ask_to_stop(now)
            self._kill_overdue(now)
            await asyncio.sleep(LOOK)

    def _kill_overdue(self, now: float) -> None:
        for child in self.children.values():
            limit = HURRY if self._in_a_hurry else child.stop_limit
            if child.asked_at is not None and now - child.asked_at > limit:
                child.kill()

    def disband(self) -> None:
        """Kill what is still here, whatever went wrong before; what is to be left is left."""
        for child in self.children.values():
            if child.look() is None and not self._settings.leave:
                child.kill()
        for child in (*self.children.values(), *self._left):
            child.disown()

    def _take_on(self, worker: HeldWorker, child: Child) -> None:
        child.stop_limit = stop_limit(worker.spec, self._settings)
        self.children[worker.id] = child

    def _log(self, message: str, child: Child) -> None:
        log.info(message, supervisor_id=self._supervisor_id, worker_id=child.worker_id, pid=child.pid)
