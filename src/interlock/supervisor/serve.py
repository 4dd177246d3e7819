"""Serves the API on an address until it is told to stop, and does beside it what is due from time to time.

Invariant: an address that others can reach is served only with tokens. A stop lets requests that are under way finish.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from interlock.config import Config, is_loopback
from interlock.errors import ConfigError, StoreError
from interlock.store.idempotency import delete_expired_keys
from interlock.store.tokens import count_usable_tokens
from interlock.supervisor.api import create_api
from interlock.telemetry import log
from interlock.worker.gauges import keep_gauges

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from fastapi import FastAPI

    from interlock.client.app import Interlock

SWEEP = 60.0  # seconds between two looks for expired keys
KEEP_ALIVE = 10
LEAVE = 10  # seconds that requests under way get at a stop
BACKLOG = 256
LARGEST_HEAD = 65_536


class _Server(uvicorn.Server):
    """A server that says when it answers, and leaves the signals to whoever runs it."""

    def __init__(self, config: uvicorn.Config, told: Callable[[], None]) -> None:
        super().__init__(config)
        self._told = told

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self._told()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def serve_api(
    app: Interlock,
    config: Config,
    stop: asyncio.Event,
    *,
    started: Callable[[str], None] = lambda _: None,
    prepared: Callable[[FastAPI], None] = lambda _: None,
) -> None:
    """Open the app and serve its API until `stop`; `started` gets the address once it answers."""
    async with app:
        await refuse_public_without_tokens(app, config)
        with bound(config.supervisor_host, config.supervisor_port) as door:
            api = create_api(app, config)
            prepared(api)
            await _serve(api, app, door, stop, started)


async def _serve(
    api: FastAPI, app: Interlock, door: socket.socket, stop: asyncio.Event, started: Callable[[str], None]
) -> None:
    server = _Server(
        uvicorn.Config(
            api,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=LEAVE,
            h11_max_incomplete_event_size=LARGEST_HEAD,
        ),
        lambda: started(address_of(door)),
    )
    await api.state.moves.look()
    serving = asyncio.create_task(server.serve(sockets=[door]))
    others = [asyncio.create_task(work) for work in _duties(app)]
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        server.should_exit = server.force_exit = True
        for task in (*others, stopping):
            task.cancel()
        await asyncio.gather(serving, *others, stopping, return_exceptions=True)


def _duties(app: Interlock) -> list[Coroutine[Any, Any, None]]:
    return [_sweep(app), keep_gauges(app.connection)]


async def _sweep(app: Interlock) -> None:
    """Remove the keys of requests whose time is over, until this task is canceled."""
    while True:
        try:
            async with app.connection() as connection:
                removed = await delete_expired_keys(connection, now=app.now())
            if removed:
                log.info("idempotency_keys_removed", keys=removed)
        except (StoreError, OSError) as error:
            log.warning("idempotency_keys_not_removed", error=str(error))
        await asyncio.sleep(SWEEP)


async def refuse_public_without_tokens(app: Interlock, config: Config) -> None:
    """Refuse to open the API to others while nobody could be told from anybody."""
    if is_loopback(config.supervisor_host) and not config.supervisor_require_token:
        return
    async with app.connection() as connection:
        if await count_usable_tokens(connection):
            return
    where = f"{config.supervisor_host or 'every address'} would be served to whoever can reach it"
    why = where if not is_loopback(config.supervisor_host) else "tokens are required"
    raise ConfigError(f"{why}, and there is no token: make one with `interlock token create NAME --scope admin`")


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Take an address; ConfigError when it cannot be had."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        door = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"the API cannot be served on {host}:{port}: {error.strerror or error}") from None
    with door:
        try:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(place)
            door.listen(BACKLOG)
        except OSError as error:
            hint = "; is another supervisor running? --port takes another one" if port else ""
            raise ConfigError(f"the API cannot be served on {host}:{port}: {error.strerror}{hint}") from None
        door.setblocking(False)  # noqa: FBT003 - the standard library's own
        yield door


def address_of(door: socket.socket) -> str:
    """Write where a socket is bound as a URL."""
    host, port = door.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
