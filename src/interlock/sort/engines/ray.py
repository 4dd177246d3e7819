"""The sort on Ray: the sort workers are actors, which Ray places on its cluster and starts again where they die.

Invariant: an actor that Ray starts again, on whichever node, goes on from what is in the temporary directory; input,
output and temporary directory are on a disk that all nodes see.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray  # type: ignore[import-not-found,unused-ignore]

from interlock.errors import ConfigError, InterlockError, SortError, SortInputError
from interlock.sort.data.records import Source
from interlock.sort.engines.base import Leader, of_one
from interlock.sort.settings import Settings
from interlock.sort.workdir import unfinished
from interlock.sort.worker.worker import run_worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.sort.settings import Progress, Report

RESTARTS = 3
LOOK = 0.5  # seconds after which it is seen that the master gave up
CONNECT_TIMEOUT = 10.0
# A Ray of this command's own, also where RAY_ADDRESS or a running node tells of another one.
OWN = {"address": "local", "include_dashboard": False}


class SortActor:
    """One worker of a sort, where Ray put it."""

    def run(
        self, master: str, index: int, share: dict[str, Any], output: str, settings: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Take part in the sort; say what was wrong, if something was, and whether with the input."""
        temp = Path(settings.pop("temp")) / f"worker-{index}"
        host = "127.0.0.1" if master.startswith("127.") else ray.util.get_node_ip_address()
        try:
            run_worker(
                master,
                Source.of(share),
                Path(output),
                settings=Settings(**settings),
                temp=temp,
                index=index,
                host=host,
            )
        except (InterlockError, OSError) as error:  # raised, it would come with the traceback of Ray, or be tried again
            return {"input": isinstance(error, SortInputError), "message": str(error)}
        return None


def run_actors(
    address: str | None,
    source: Source,
    output: Path,
    *,
    workers: int,
    settings: Settings,
    temp: Path | None,
    told: Callable[[Progress], None],
) -> Report:
    """Sort with actors on the Ray cluster at this address, or on one of this machine's own."""
    own = not ray.is_initialized()
    if own:
        _join(address, workers)
    host = "127.0.0.1" if address is None else ray.util.get_node_ip_address()
    try:
        with (
            unfinished(source, output, workers, settings, temp) as place,
            Leader(workers, settings=settings, temp=place, told=told, host=host) as leader,
        ):
            actors = _placed(workers)
            try:
                return _led(leader, actors, source, output, place, settings)
            finally:
                for actor in actors:
                    ray.kill(actor)
    finally:
        if own:
            ray.shutdown()


def _join(address: str | None, workers: int) -> None:
    """Connect to a cluster; Ray itself would look for one that is not there for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    # One of its own has room for all workers, however few processors there are.
    joined = {"address": address} if address is not None else {**OWN, "num_cpus": workers}
    try:
        if host and port.isdecimal():
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
        ray.init(**joined, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        raise ConfigError(f"there is no Ray cluster at {address}: {error}") from error
    except (RuntimeError, ValueError) as error:
        # it refused this process: another version of Ray, a token that is missing
        raise ConfigError(f"the Ray cluster at {address} cannot be used: {error}") from error


def _placed(workers: int) -> list[Any]:
    """Ask for the actors; Ray places each where a processor is free."""
    kind = ray.remote(num_cpus=1, max_restarts=RESTARTS, max_task_retries=RESTARTS)(SortActor)
    return [kind.remote() for _ in range(workers)]


def _led(leader: Leader, actors: list[Any], source: Source, output: Path, place: Path, settings: Settings) -> Report:
    count = len(actors)
    given = {**asdict(of_one(settings, count)), "temp": str(place.absolute())}
    running = [
        actor.run.remote(leader.address, index, source.share(index, count).json(), str(output.absolute()), given)
        for index, actor in enumerate(actors)
    ]
    while running:
        done, running = ray.wait(running, timeout=LOOK)
        if leader.has_failed:
            return leader.result()
        try:
            wrong = [said for said in ray.get(done) if said]
        except ray.exceptions.RayError as error:
            leader.stop()
            raise SortError(f"a sort worker failed on Ray: {error}") from error
        if wrong:
            leader.stop()
            raise (SortInputError if wrong[0]["input"] else SortError)(wrong[0]["message"])
    return leader.result()
