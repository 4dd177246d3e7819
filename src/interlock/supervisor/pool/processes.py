"""The worker processes of a pool: started here, or adopted from a supervisor that is gone.

An adopted process is not our child, so it has no `ProcessGroup`: its exit code is unknown, and it is identified by pid
and start time.

Invariant: a signal goes to a process only after a check that it is still the same process. A process whose row another
supervisor holds by now is not touched; only its exit is still awaited, because no other process can reap it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import SupervisedWorkerState
from interlock.process_groups import ProcessGroup
from interlock.supervisor.pool import metrics
from interlock.supervisor.pool.process_info import read_memory, read_start_time
from interlock.supervisor.pool.reconcile import Observation, ProcessExit, stop_timeout
from interlock.telemetry import log
from interlock.worker.run import MAX_EXIT_REASON_BYTES, Assignment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.config import Config
    from interlock.store.supervision import HeldWorker
    from interlock.supervisor.pool.settings import PoolSettings

WORKER_MODULE = "interlock.worker"
FORCED_STOP_TIMEOUT_S = 8.0
SIGNAL_REPEAT_INTERVAL_S = 0.5
POLL_INTERVAL_S = 0.05
MEMORY_INTERVAL_S = 1.0  # between two readings: one reads the table of all processes of the host


class WorkerProcesses:
    """The processes of one pool, by the ids of their rows."""

    def __init__(self, supervisor_id: str, host: str, config: Config, settings: PoolSettings) -> None:
        self._supervisor_id = supervisor_id
        self._host = host
        self._config = config
        self._settings = settings
        self._reassigned: list[WorkerProcess] = []  # started here; another supervisor holds their rows by now
        self._forced = False
        self._memory: dict[int, int] = {}
        self._measured_at = float("-inf")
        self.by_worker: dict[str, WorkerProcess] = {}

    def start(self, worker: HeldWorker, generation: int, instance: str) -> WorkerProcess:
        """Start the process of a row. OSError: the system refused."""
        environment = make_environment(self._config, worker.spec)
        process = start_worker_process(worker, generation, instance, environment=environment, tied=self._settings.tied)
        self._add(worker, process)
        metrics.supervised_process_starts_total.inc()
        self._log("worker_process_started", process)
        return process

    def observe(self, worker: HeldWorker) -> Observation:
        """Return the state of a row's process; adopt one that an earlier supervisor started."""
        process = self.by_worker.get(worker.id)
        if process is None and worker.pid is not None:
            process = adopt_worker_process(worker, self._host)
            if process is None:
                return Observation(exit=ProcessExit())
            self._add(worker, process)
            metrics.supervised_process_adoptions_total.inc()
            self._log("worker_process_adopted", process)
        if process is None:
            return Observation()
        process_exit = process.poll()
        since = process.stop_requested_at
        stopping_for = None if since is None else time.monotonic() - since
        process.draining &= worker.status == SupervisedWorkerState.PAUSED
        memory = self._memory.get(process.pid) if process_exit is None else None
        return Observation(process_exit is None, process_exit, memory, stopping_for, process.draining)

    def measure_memory(self) -> None:
        """Read the memory of the processes, with everything that they started, unless it was read just before."""
        now = time.monotonic()
        if now - self._measured_at >= MEMORY_INTERVAL_S:
            self._measured_at = now
            self._memory = read_memory({process.pid for process in self.by_worker.values()})

    def drop_reassigned(self, held: Mapping[str, int]) -> None:
        """Stop to manage processes whose rows another supervisor holds, or whose generation is over."""
        for worker_id, process in list(self.by_worker.items()):
            if held.get(worker_id) != process.generation:
                self._log("worker_process_left", process)
                self._reassigned.append(self.by_worker.pop(worker_id))
        self._reassigned = [process for process in self._reassigned if process.poll() is None]

    def kill(self, worker: HeldWorker) -> None:
        """Kill a process that did not stop in time."""
        process = self.by_worker[worker.id]
        if not process.killed:
            log.warning(
                "worker_process_killed", supervisor_id=self._supervisor_id, worker_id=worker.id, pid=process.pid
            )
            metrics.supervised_process_kills_total.inc()
        process.kill()

    def force_stop(self) -> None:
        """Send SIGTERM again, on which workers do not wait for running tasks, with a new and shorter timeout."""
        self._forced = True
        for process in self.by_worker.values():
            process.stop_requested_at = None
            process.terminate(time.monotonic())

    async def stop(self) -> None:
        """Send SIGTERM to all that have not got it, wait until they exit, and kill those that are late."""
        for process in self.by_worker.values():
            if process.stop_requested_at is None:
                process.terminate(time.monotonic())
        repeated_at = time.monotonic()
        while any(process.poll() is None for process in self.by_worker.values()):
            now = time.monotonic()
            if self._forced and now - repeated_at >= SIGNAL_REPEAT_INTERVAL_S:
                # Two pending SIGTERMs are delivered as one: a worker that saw only one would wait for its tasks.
                repeated_at = now
                for process in self.by_worker.values():
                    process.terminate(now)
            for process in self.by_worker.values():
                timeout = FORCED_STOP_TIMEOUT_S if self._forced else process.stop_timeout
                if process.stop_requested_at is not None and now - process.stop_requested_at > timeout:
                    process.kill()
            await asyncio.sleep(POLL_INTERVAL_S)

    def close(self) -> None:
        """Kill the processes that still run, unless the settings leave them running, and close all pipes."""
        for process in self.by_worker.values():
            if not self._settings.leave_running:
                process.kill()
        for process in (*self.by_worker.values(), *self._reassigned):
            process.close()

    def _add(self, worker: HeldWorker, process: WorkerProcess) -> None:
        process.stop_timeout = stop_timeout(worker.spec, self._settings)
        self.by_worker[worker.id] = process

    def _log(self, message: str, process: WorkerProcess) -> None:
        log.info(message, supervisor_id=self._supervisor_id, worker_id=process.worker_id, pid=process.pid)


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One process of one generation of a row."""

    worker_id: str
    generation: int
    pid: int
    start_time: str | None
    group: ProcessGroup | None = None  # None: adopted
    exit_message_fd: int | None = None  # the process writes there why it exits
    exit: ProcessExit | None = None
    stop_requested_at: float | None = None  # monotonic clock
    stop_timeout: float = 30.0  # seconds from then on
    killed: bool = False
    draining: bool = False  # stops once it holds no task, unless its worker is resumed before

    def poll(self) -> ProcessExit | None:
        """Return how it exited; None while it runs."""
        if self.exit is None:
            if self.group is None:
                if read_start_time(self.pid) != self.start_time:
                    self.exit = ProcessExit()
            elif self.group.exit_code is not None:
                self.exit = ProcessExit(self.group.exit_code, self._read_exit_message())
                self.close()
        return self.exit

    def terminate(self, now: float) -> None:
        """Send SIGTERM: the first lets running tasks finish within the grace, the second does not.

        To the worker only: programs that its handlers started go on until the worker stops them.
        """
        self.stop_requested_at = now if self.stop_requested_at is None else self.stop_requested_at
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process and everything in its group."""
        self.killed = True
        if self.group is not None:
            self.group.kill()
        elif self.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # a worker process leads its group, also an adopted one

    def close(self) -> None:
        """Close our ends of its pipes. Safe to call twice. A process that still runs and is not tied runs on."""
        if self.exit_message_fd is not None:
            os.close(self.exit_message_fd)
            self.exit_message_fd = None
        if self.group is not None and self.group.process.stdin is not None and self.exit is not None:
            self.group.process.stdin.close()

    def _send(self, number: signal.Signals) -> None:
        if self.group is not None:
            self.group.send_signal(number, leader_only=True)
        elif self.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def _read_exit_message(self) -> str:
        message = b""
        if self.exit_message_fd is not None:
            with suppress(BlockingIOError):  # a program that a handler started may still hold the other end
                message = os.read(self.exit_message_fd, MAX_EXIT_REASON_BYTES)
        return message.decode(errors="replace").strip()


def start_worker_process(
    worker: HeldWorker, generation: int, instance: str, *, environment: Mapping[str, str], tied: bool
) -> WorkerProcess:
    """Start a process for a row. OSError: the system refused."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    assignment = Assignment(worker.id, generation, instance, tied=tied, last_words=writer)
    try:
        group = ProcessGroup.start(
            # -P: a file of the working directory must not shadow a module
            [sys.executable, "-P", "-m", WORKER_MODULE, *assignment.arguments],
            stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
            env=environment,
            pass_fds=(writer,),
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return WorkerProcess(worker.id, generation, group.pid, read_start_time(group.pid), group, reader)


def adopt_worker_process(worker: HeldWorker, host: str) -> WorkerProcess | None:
    """Find the process that a row names, by pid and start time; None if it is gone or on another host."""
    if worker.pid is None or worker.birth is None or worker.host != host or read_start_time(worker.pid) != worker.birth:
        return None
    return WorkerProcess(worker.id, worker.generation, worker.pid, worker.birth)


def make_environment(config: Config, spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a worker process: the supervisor's configuration, overridden by the row's spec."""
    namespaces = spec.get("namespaces") or config.namespaces
    settings = {
        "DATABASE_URL": config.database_url,
        "DATA_DIR": config.data_dir,
        "LOG_LEVEL": config.log_level,
        "LOG_FORMAT": config.log_format,
        "WAKE_MODE": config.wake_mode,
        "APP": spec.get("app") or config.app,
        "DEV": config.dev,
        "NAMESPACES": ",".join(map(str, namespaces)) if isinstance(namespaces, list | tuple) else namespaces,
        "CONCURRENCY": spec.get("concurrency", config.concurrency),
        "LEASE": spec.get("lease", config.lease),
        "GRACE": spec.get("grace", config.grace),
    }
    return os.environ | {f"INTERLOCK_{name}": str(value) for name, value in settings.items() if value is not None}
