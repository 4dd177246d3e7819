"""The local engine: the master in this process, each worker in a process of its own.

Invariant: no worker outlives this process: each exits when its pipe from this process closes.
"""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from interlock.errors import SortError
from interlock.process_groups import describe_exit, wait_or_kill
from interlock.sort.data.plan import (
    MAX_SAMPLE_BYTES,
    POSITION_BYTES,
    SAMPLES_PER_PARTITION,
    overhead_bytes,
    sampled_key_bytes,
)
from interlock.sort.engines import prefork
from interlock.sort.logging import log, log_settings, stop_on_interrupt
from interlock.sort.master.master import run_master
from interlock.sort.memory_plan import divide_memory
from interlock.sort.security import Security
from interlock.sort.settings import (
    EXIT_FAILURE_REPORTED,
    EXIT_FAILURE_UNREPORTED,
    Settings,
)
from interlock.sort.workdir import open_work_directory

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.sort.data.records import Source
    from interlock.sort.settings import ProgressCallback, Report, SaveCallback

MAX_RESTARTS = 3  # of one worker process
EXIT_TIMEOUT_S = 10.0


def run_local(
    source: Source,
    output: Path,
    *,
    workers: int = 2,
    settings: Settings | None = None,
    work_dir: Path | None = None,
    on_progress: ProgressCallback | None = None,
    stop: threading.Event | None = None,
    on_save: SaveCallback | None = None,
) -> Report:
    """Sort a source into partition files in the output directory with so many worker processes.

    Setting `stop` aborts the sort. `on_save` receives the state of the master on every transition.
    """
    settings = settings or Settings()
    for_workers = worker_settings(settings, workers, source)
    with open_work_directory(source, output, workers, settings, work_dir) as directory:
        security = Security.generate()
        processes = SortWorkerProcesses(source, output, directory, workers, for_workers, security)
        processes.failed = stop or processes.failed
        try:
            with stop_on_interrupt(processes.failed), processes:
                report = run_master(
                    workers,
                    settings=settings,
                    work_dir=directory,
                    on_listening=processes.assign,
                    on_progress=on_progress,
                    stop=processes.failed,
                    security=security,
                    on_save=on_save,
                )
                processes.wait()
        except SortError as error:
            if processes.failure:
                raise SortError(processes.failure) from error
            raise
    return report


def worker_settings(settings: Settings, workers: int, source: Source) -> Settings:
    """Return the settings of one of several workers that share the memory; raise if it is too little."""
    record_format = source.format
    partitions = settings.partitions or workers
    sample = partitions * SAMPLES_PER_PARTITION * (sampled_key_bytes(source) + POSITION_BYTES)
    memory = divide_memory(
        settings,
        workers,
        source.records,
        record_format.record_length,
        min(sample, MAX_SAMPLE_BYTES),
        overhead_bytes(source, settings),
    )
    return replace(settings, memory=memory, workers=workers)


def describe_kill(code: int) -> str:
    """Describe the likely cause if a process was ended by the system."""
    return " (out of memory?)" if code == -signal.SIGKILL else ""


class SortWorkerProcesses:
    """The worker processes; one that is killed is restarted.

    `failed` is set when a worker ends in another way, with the reason in `failure` unless the master knows it.
    """

    def __init__(
        self, source: Source, output: Path, work_dir: Path, workers: int, settings: Settings, security: Security
    ) -> None:
        self.failed = threading.Event()
        self.failure = ""
        self._instructions = [
            {
                "source": source.share(index, workers).json(),
                "output": str(output),
                "work_dir": str(work_dir / f"worker-{index}"),
                "index": index,
                "settings": settings.json(),
                "log": log_settings,
                "token": security.token,
            }
            for index in range(workers)
        ]
        self._master_address: str | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._processes: dict[int, prefork.Process] = {}
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> None:
        for index in range(len(self._instructions)):
            self._processes[index] = prefork.take_worker()
        prefork.discard_workers()

    def __exit__(self, *_: object) -> None:
        """End the processes that still run."""
        with self._lock:
            self._closing = True
            for process in self._processes.values():
                if process.stdin is not None:
                    with suppress(BrokenPipeError):
                        process.stdin.close()
        for process in self._processes.values():
            wait_or_kill(process, EXIT_TIMEOUT_S)
        for thread in self._threads:
            thread.join()
        for process in self._processes.values():
            prefork.close_pipes(process)

    def assign(self, address: str) -> None:
        """Send the workers their instructions, with the address of the master."""
        with self._lock:
            self._master_address = address
            for index in self._processes:
                self._send_instructions(index)
        for index in range(len(self._instructions)):
            thread = threading.Thread(
                target=self._watch_or_fail, args=(index,), name=f"interlock-sort-{index}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def wait(self) -> None:
        """Wait for the workers to exit by themselves."""
        for thread in self._threads:
            thread.join(EXIT_TIMEOUT_S)

    def _send_instructions(self, index: int) -> None:
        pipe = self._processes[index].stdin
        if pipe is not None:
            try:
                pipe.write(orjson.dumps({**self._instructions[index], "master": self._master_address}) + b"\n")
                pipe.flush()
            except BrokenPipeError:
                return  # it has exited, which its watching thread handles

    def _watch_or_fail(self, index: int) -> None:
        """Watch a worker; an error of this process fails the sort, which would wait for the worker otherwise."""
        try:
            self._watch(index)
        except Exception as error:  # noqa: BLE001 - reported as the failure of the sort
            self.failure = self.failure or f"worker {index} cannot be restarted: {error}"
            self.failed.set()

    def _watch(self, index: int) -> None:
        """Restart a worker that was killed; fail the sort when it exits with an error."""
        for restarts_left in range(MAX_RESTARTS, -1, -1):
            code = self._processes[index].wait()
            with self._lock:
                if self._closing or code == 0:
                    return
                if code < 0 and restarts_left:
                    log.warning("worker %d %s%s; it is restarted", index, describe_exit(code), describe_kill(code))
                if code > 0 or not restarts_left:
                    self.failure = self.failure or self._describe_failure(index, code)
                    self.failed.set()
                    return
                prefork.close_pipes(self._processes[index])
                self._processes[index] = prefork.take_worker()
                self._send_instructions(index)

    def _describe_failure(self, index: int, code: int) -> str:
        """Describe why a worker ended; empty if it reported the reason to the master."""
        if code == EXIT_FAILURE_REPORTED:
            return ""
        stdout = self._processes[index].stdout
        if code == EXIT_FAILURE_UNREPORTED and stdout is not None:
            return f"worker {index} failed before it was registered: {stdout.read().decode(errors='replace')}"
        times = "" if code > 0 else f", {MAX_RESTARTS + 1} times"
        return f"worker {index} {describe_exit(code)}{times}{describe_kill(code)}"
