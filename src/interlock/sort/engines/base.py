"""Common parts of the engines: the lookup by name, and a master in a thread for engines that only place workers.

Invariant: state machines, shuffle and output are the same for every engine.
"""

from __future__ import annotations

import threading
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, Self

from interlock.errors import ConfigError, SortError, SortInputError
from interlock.sort.engines.local import run_local
from interlock.sort.master.master import run_master
from interlock.sort.rpc import NO_SECURITY
from interlock.sort.settings import Engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from interlock.config import Config
    from interlock.sort.data.records import Source
    from interlock.sort.security import Security
    from interlock.sort.settings import ProgressCallback, Report, SaveCallback, Settings

START_TIMEOUT_S = 30.0


class SortFunction(Protocol):
    """Sorts a source into an output directory with some engine."""

    def __call__(
        self,
        source: Source,
        output: Path,
        *,
        workers: int,
        settings: Settings,
        work_dir: Path | None,
        on_progress: ProgressCallback,
        on_save: SaveCallback | None = None,
    ) -> Report:
        """Sort."""


def get_engine(
    engine: Engine,
    config: Config,
    ray_address: str | None = None,
    report_progress: Callable[[str], None] | None = None,
    tls: Security = NO_SECURITY,
) -> SortFunction:
    """Return the function that sorts with this engine; raise ConfigError if it is not installed.

    `tls` has the files of TLS for Ray; the processes of the other engines are all on this machine.
    """
    if engine is not Engine.RAY and (tls.certificate is not None or ray_address is not None):
        option = "--tls-cert" if tls.certificate is not None else "--ray-address"
        raise SortInputError(f"{option} is for --engine ray: the processes of --engine {engine} are on this machine")
    if engine is Engine.LOCAL:
        return run_local
    if engine is Engine.INTERLOCK:
        module = import_module("interlock.sort.engines.interlock")
        return partial(module.run_as_job, config, report_progress=report_progress)
    try:
        module = import_module("interlock.sort.engines.ray")
    except ModuleNotFoundError as error:
        raise ConfigError(f"--engine ray needs {error.name}: pip install 'interlock[sort,ray]'") from error
    return partial(module.run_on_ray, ray_address, tls)


class MasterThread:
    """A master in a thread of its own."""

    def __init__(
        self,
        workers: int,
        *,
        settings: Settings,
        work_dir: Path,
        on_progress: ProgressCallback,
        security: Security,
        host: str = "127.0.0.1",
        on_save: SaveCallback | None = None,
    ) -> None:
        self._security = security
        self._on_save = on_save
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._address = ""
        self._report: Report | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(workers, settings, work_dir, on_progress, host), name="sort-master", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """The address for workers; waits until the master listens."""
        self._ready.wait(START_TIMEOUT_S)
        if self._error is not None:
            raise self._error
        if not self._address:
            raise SortError(f"the master does not listen after {START_TIMEOUT_S:g} s")
        return self._address

    @property
    def has_failed(self) -> bool:
        """Whether the master has ended with an error."""
        return self._error is not None

    def result(self) -> Report:
        """Wait for the master to end; return its report, or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise SortError("the master ended without a report")
        return self._report

    def stop(self) -> None:
        """Abort the sort if it has not ended, and wait for the master; safe to call twice."""
        self._stop.set()
        self._thread.join(START_TIMEOUT_S)

    def _run(self, workers: int, settings: Settings, work_dir: Path, on_progress: ProgressCallback, host: str) -> None:
        try:
            self._report = run_master(
                workers,
                settings=settings,
                host=host,
                work_dir=work_dir,
                on_listening=self._set_address,
                on_progress=on_progress,
                stop=self._stop,
                security=self._security,
                on_save=self._on_save,
            )
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self._error = error
        finally:
            self._ready.set()

    def _set_address(self, address: str) -> None:
        self._address = address
        self._ready.set()
