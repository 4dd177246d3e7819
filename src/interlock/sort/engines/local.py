"""A whole sort on this machine: the master in this process, the workers as processes of their own.

Invariant: no worker outlives this process: each ends when the pipe from it closes.
"""

from __future__ import annotations

import subprocess
import threading
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import orjson

from interlock.errors import SortError, SortInputError
from interlock.sort.engines import prefork as standby
from interlock.sort.logging import heeding_interrupts, wanted
from interlock.sort.master.master import run_master
from interlock.sort.settings import FAILED, LEAST_MEMORY, MEBIBYTE, UNTOLD, Settings
from interlock.sort.workdir import unfinished

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.sort.data.records import Source
    from interlock.sort.settings import Report, Told

LEADING = 96 * MEBIBYTE  # what the master takes of the memory
RESTARTS = 3
ENDED_WITHIN = 10.0


def run_local(
    source: Source,
    output: Path,
    *,
    workers: int = 2,
    settings: Settings | None = None,
    temp: Path | None = None,
    told: Told | None = None,
) -> Report:
    """Sort a source into partition files in the output directory with so many worker processes."""
    settings = settings or Settings()
    each = _memory_of_each(settings, workers)
    with unfinished(source, output, workers, settings, temp) as place:
        crew = Crew(source, output, place, workers, replace(settings, memory=each))
        try:
            with heeding_interrupts(crew.given_up), crew:
                report = run_master(
                    workers, settings=settings, temp=place, listening=crew.assign, told=told, stop=crew.given_up
                )
                crew.wait()
        except SortError as error:
            if crew.trouble:
                raise SortError(crew.trouble) from error
            raise
    return report


def _memory_of_each(settings: Settings, workers: int) -> int:
    """Give the bytes that every worker gets; refuse what is too few."""
    if workers < 1:
        raise SortInputError(f"a sort needs at least one worker, not {workers}")
    each = max((settings.memory - LEADING) // workers, 0)
    if each < LEAST_MEMORY:
        raise SortInputError(
            f"{settings.memory:,} bytes of memory are too few for {workers} workers: "
            f"they need {LEADING + workers * LEAST_MEMORY:,}"
        )
    return each


class Crew:
    """The worker processes; one that is killed is started again."""

    def __init__(self, source: Source, output: Path, temp: Path, workers: int, settings: Settings) -> None:
        self.given_up = threading.Event()
        self.trouble = ""
        self._orders = [
            {
                "source": source.share(index, workers).json(),
                "output": str(output),
                "temp": str(temp / f"worker-{index}"),
                "index": index,
                "settings": asdict(settings),
                "log": wanted,
            }
            for index in range(workers)
        ]
        self._address: str | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._processes: dict[int, standby.Process] = {}
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> None:
        for index in range(len(self._orders)):
            self._start(index)
        standby.dismiss()

    def __exit__(self, *_: object) -> None:
        """End what still runs."""
        with self._lock:
            self._closing = True
            for process in self._processes.values():
                if process.stdin is not None:
                    process.stdin.close()
        for process in self._processes.values():
            try:
                process.wait(ENDED_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join()
        for process in self._processes.values():
            standby.close(process)

    def assign(self, address: str) -> None:
        """Tell the workers where their master is."""
        with self._lock:
            self._address = address
            for index in self._processes:
                self._brief(index)
        for index in range(len(self._orders)):
            thread = threading.Thread(target=self._watch, args=(index,), name=f"interlock-sort-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self) -> None:
        """Wait for the workers to end by themselves."""
        for thread in self._threads:
            thread.join(ENDED_WITHIN)

    def _start(self, index: int) -> None:
        self._processes[index] = standby.take()

    def _brief(self, index: int) -> None:
        pipe = self._processes[index].stdin
        if pipe is not None:
            try:
                pipe.write(orjson.dumps({**self._orders[index], "master": self._address}) + b"\n")
                pipe.flush()
            except BrokenPipeError:
                return  # it has ended: whoever watches it will see

    def _watch(self, index: int) -> None:
        """Start a worker again that was killed; give the sort up when one ends in another way."""
        for left in range(RESTARTS, -1, -1):
            code = self._processes[index].wait()
            with self._lock:
                if self._closing or code == 0:
                    return
                if code > 0 or not left:
                    self.trouble = self.trouble or self._trouble(index, code)
                    self.given_up.set()
                    return
                standby.close(self._processes[index])
                self._start(index)
                self._brief(index)

    def _trouble(self, index: int, code: int) -> str:
        """Say why a worker ended, unless the master knows it better."""
        if code == FAILED:
            return ""
        answers = self._processes[index].stdout
        if code == UNTOLD and answers is not None:
            return f"worker {index} failed before it took part: {answers.read().decode(errors='replace')}"
        what = f"exit code {code}" if code > 0 else f"signal {-code}, {RESTARTS + 1} times"
        return f"worker {index} ended with {what}"
