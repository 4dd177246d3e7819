"""What runs the workers of a sort: processes of this command, steps of a job, or actors on a Ray cluster.

Invariant: whoever runs the workers, the machines, the shuffle and the output are the same.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, Self

from interlock.errors import ConfigError, SortError
from interlock.sort.engines.local import run_local
from interlock.sort.master.master import run_master

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from interlock.config import Config
    from interlock.sort.data.records import Source
    from interlock.sort.settings import Progress, Report, Settings

START_TIMEOUT = 30.0


class Start(Protocol):
    """Sorts a source to an output directory, and tells how it goes."""

    def __call__(
        self,
        source: Source,
        output: Path,
        *,
        workers: int,
        settings: Settings,
        temp: Path | None,
        told: Callable[[Progress], None],
    ) -> Report:
        """Sort."""


def run_on(engine: str, config: Config, ray_address: str | None = None) -> Start:
    """Give what sorts on this engine; refuse one that is not installed."""
    if engine == "local":
        return run_local
    if engine == "interlock":
        return partial(import_module("interlock.sort.engines.interlock").run_steps, config)
    try:
        actors = import_module("interlock.sort.engines.ray")
    except ModuleNotFoundError as error:
        raise ConfigError(f"--engine ray needs {error.name}: pip install 'interlock[sort,ray]'") from error
    return partial(actors.run_actors, ray_address)


def of_one(settings: Settings, workers: int) -> Settings:
    """Give the settings of one of several workers that share the memory; refuse a share that is too small."""
    return replace(settings, memory=settings.memory // workers)


class Leader:
    """A master in a thread of its own, for engines that only place workers."""

    def __init__(
        self, workers: int, *, settings: Settings, temp: Path, told: Callable[[Progress], None], host: str = "127.0.0.1"
    ) -> None:
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._address = ""
        self._report: Report | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._lead, args=(workers, settings, temp, told, host), name="sort-master", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Where workers find it; waits until it listens."""
        self._ready.wait(START_TIMEOUT)
        if self._error is not None:
            raise self._error
        if not self._address:
            raise SortError(f"the master does not listen after {START_TIMEOUT:g} s")
        return self._address

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._error is not None

    def result(self) -> Report:
        """Wait for its end; give its report, or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise SortError("the master ended without a report")
        return self._report

    def stop(self) -> None:
        """Make it give up, if it has not ended, and wait for that."""
        self._stop.set()
        self._thread.join(START_TIMEOUT)

    def _lead(self, workers: int, settings: Settings, temp: Path, told: Callable[[Progress], None], host: str) -> None:
        try:
            self._report = run_master(
                workers, settings=settings, host=host, temp=temp, listening=self._listens, told=told, stop=self._stop
            )
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            self._error = error
        finally:
            self._ready.set()

    def _listens(self, address: str) -> None:
        self._address = address
        self._ready.set()
