"""The engine `ray`: the sort workers are actors, which Ray places on its cluster and restarts when they die.

Invariant: an actor that Ray restarts, on any node, resumes from the work directory; input, output and work directory
are on a file system that all nodes share.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray  # type: ignore[import-not-found,unused-ignore]

from interlock.errors import ConfigError, InterlockError, SortError, SortInputError
from interlock.sort.data.records import Source
from interlock.sort.engines.base import MasterThread
from interlock.sort.engines.local import worker_settings
from interlock.sort.security import Security, write_token
from interlock.sort.settings import TOKEN_FILE, Settings
from interlock.sort.workdir import open_work_directory
from interlock.sort.worker.worker import run_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.sort.settings import ProgressCallback, Report, SaveCallback

MAX_RESTARTS = 3
STDOUT, STDERR = 1, 2
FAILURE_CHECK_INTERVAL_S = 0.5  # between two checks whether the master has failed
CONNECT_TIMEOUT_S = 10.0
# A cluster of this command's own, even if RAY_ADDRESS or a running node names another one.
OWN_CLUSTER = {"address": "local", "include_dashboard": False}


class SortActor:
    """One worker of a sort, on the node that Ray chose."""

    def run(
        self,
        master: str,
        index: int,
        share: dict[str, Any],
        output: str,
        settings: dict[str, Any],
        tls_files: list[Path | None],
    ) -> dict[str, Any] | None:
        """Run the worker; return its error message, if it failed, and whether the input is the cause."""
        certificate, key, authority = tls_files
        work_dir = Path(settings.pop("work_dir")) / f"worker-{index}"
        host = "127.0.0.1" if master.startswith("127.") else ray.util.get_node_ip_address()
        try:
            run_worker(
                master,
                Source.from_json(share),
                Path(output),
                settings=Settings(**settings),
                work_dir=work_dir,
                index=index,
                host=host,
                security=Security.load(
                    work_dir.parent / TOKEN_FILE, certificate=certificate, key=key, authority=authority
                ),
            )
        except (InterlockError, OSError) as error:  # Ray would add its traceback, or retry
            return {"input": isinstance(error, SortInputError), "message": str(error)}
        return None


def run_on_ray(
    address: str | None,
    tls: Security,
    source: Source,
    output: Path,
    *,
    workers: int,
    settings: Settings,
    work_dir: Path | None,
    on_progress: ProgressCallback,
    on_save: SaveCallback | None = None,
) -> Report:
    """Sort with actors on the Ray cluster at this address, or on a new one of this machine only.

    `tls` has the files of TLS, which every node has at the same paths; the token is a new one.
    """
    with _stdout_to_stderr():
        return _run_on_ray(address, tls, source, output, workers, settings, work_dir, on_progress, on_save)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Let all that Ray and its processes print go to standard error: standard output has only the report."""
    sys.stdout.flush()
    before = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(before, STDOUT)
        os.close(before)


def _run_on_ray(
    address: str | None,
    tls: Security,
    source: Source,
    output: Path,
    workers: int,
    settings: Settings,
    work_dir: Path | None,
    on_progress: ProgressCallback,
    on_save: SaveCallback | None,
) -> Report:
    connects = not ray.is_initialized()
    if connects:
        _connect(address, workers)
    host = "127.0.0.1" if address is None else ray.util.get_node_ip_address()
    security = tls.with_new_token()
    try:
        with (
            open_work_directory(source, output, workers, settings, work_dir) as directory,
            MasterThread(
                workers,
                settings=settings,
                work_dir=directory,
                on_progress=on_progress,
                on_save=on_save,
                security=security,
                host=host,
            ) as master,
        ):
            write_token(directory, security.token)
            # Ray places each actor where a processor is free.
            actor_class = ray.remote(num_cpus=1, max_restarts=MAX_RESTARTS, max_task_retries=MAX_RESTARTS)(SortActor)
            actors = [actor_class.remote() for _ in range(workers)]
            try:
                return _run_actors(master, actors, source, output, directory, settings, security.tls_files())
            finally:
                for actor in actors:
                    ray.kill(actor)
    finally:
        if connects:
            ray.shutdown()


def _connect(address: str | None, workers: int) -> None:
    """Connect to a cluster; check the address first, because Ray would try for minutes to reach a missing one."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    # A cluster of this command's own accepts all workers, even with fewer processors.
    options = {"address": address} if address is not None else {**OWN_CLUSTER, "num_cpus": workers}
    try:
        if host and port.isdecimal():
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        raise ConfigError(f"there is no Ray cluster at {address}: {error}") from error
    except (RuntimeError, ValueError) as error:
        # the cluster refused the connection: another version of Ray, or a missing token
        raise ConfigError(f"the Ray cluster at {address} cannot be used: {error}") from error


def _run_actors(
    master: MasterThread,
    actors: list[Any],
    source: Source,
    output: Path,
    work_dir: Path,
    settings: Settings,
    tls_files: list[Path | None],
) -> Report:
    """Run the workers, and wait for them and the master; when either fails, end the other."""
    count = len(actors)
    given = {**worker_settings(settings, count, source).json(), "work_dir": str(work_dir.absolute())}
    running = [
        actor.run.remote(
            master.address, index, source.share(index, count).json(), str(output.absolute()), given, tls_files
        )
        for index, actor in enumerate(actors)
    ]
    while running:
        done, running = ray.wait(running, timeout=FAILURE_CHECK_INTERVAL_S)
        if master.has_failed:
            return master.result()
        try:
            errors = [error for error in ray.get(done) if error]
        except ray.exceptions.RayError as error:
            master.stop()
            raise SortError(f"a sort worker failed on Ray: {error}") from error
        if errors:
            master.stop()
            raise (SortInputError if errors[0]["input"] else SortError)(errors[0]["message"])
    return master.result()
