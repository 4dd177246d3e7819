"""Serves the API over HTTP with uvicorn.

Invariant: an address that other hosts can reach is served only if there are tokens. A stop lets requests in flight
finish.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING

import uvicorn

from interlock.config import Config, is_loopback
from interlock.errors import ConfigError, StoreError
from interlock.service import BackgroundService, BackgroundTasks, cancel_and_wait
from interlock.store.access import count_usable_tokens, delete_expired_idempotency_keys
from interlock.supervisor.http.app import create_api
from interlock.telemetry import log
from interlock.worker.stats import QueueGauges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.client.app import Interlock

KEY_CLEANUP_INTERVAL_S = 60.0
KEEP_ALIVE_TIMEOUT_S = 10
GRACEFUL_SHUTDOWN_TIMEOUT_S = 10
BACKLOG = 256
MAX_HEADER_BYTES = 65_536


class ApiServer(BackgroundService):
    """The HTTP server of an app's API.

    `start` binds the address and returns once requests are answered; ConfigError if the address cannot be bound, or
    would be open to other hosts without tokens. `stop` lets requests in flight finish.
    """

    stop_timeout_s = None  # uvicorn limits the time of a graceful shutdown

    def __init__(self, app: Interlock, config: Config) -> None:
        super().__init__("api")
        self.url = ""
        self._app = app
        self._config = config
        self._resources = AsyncExitStack()
        self._server: _UvicornServer | None = None
        self._listener: socket.socket | None = None

    async def start(self) -> None:
        """Bind the address and serve the API."""
        if self.is_running:
            return
        config = self._config
        try:
            await self._resources.enter_async_context(self._app)
            await refuse_public_without_tokens(self._app, config)
            self._listener = self._resources.enter_context(bind_socket(config.supervisor_host, config.supervisor_port))
            api = create_api(self._app, config)
            await api.state.transitions.update()  # transitions count from here on
            self._server = _UvicornServer(
                uvicorn.Config(
                    api,
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    server_header=False,
                    proxy_headers=False,
                    timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
                    timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_TIMEOUT_S,
                    h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                )
            )
        except BaseException:
            await self._resources.aclose()
            raise
        self.url = socket_url(self._listener)
        await super().start()
        await self._server.answering.wait()

    async def run(self) -> None:
        """Serve until `stopping` is set."""
        server, listener = self._server, self._listener
        if server is None or listener is None:
            raise RuntimeError("ApiServer.run is called by start")
        background = BackgroundTasks()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(self.stopping.wait())
        background.spawn("idempotency key cleanup", _delete_expired_keys(self._app))
        gauges = QueueGauges(self._app.url)
        try:
            await gauges.start()
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            await serving
        finally:
            server.should_exit = server.force_exit = True
            server.answering.set()  # `start` waits for it, also when the server could not start
            await asyncio.gather(background.stop(), gauges.stop(), cancel_and_wait([stopping]))
            await asyncio.gather(serving, return_exceptions=True)
            await self._resources.aclose()


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that tells when it answers, and leaves signals to the caller."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer."""
        await super().startup(sockets)
        self.answering.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


async def _delete_expired_keys(app: Interlock) -> None:
    """Delete expired idempotency keys from time to time, until canceled."""
    while True:
        try:
            async with app.connection() as connection:
                removed = await delete_expired_idempotency_keys(connection, now=app.now())
            if removed:
                log.info("idempotency_keys_removed", keys=removed)
        except (StoreError, OSError) as error:
            log.warning("idempotency_keys_not_removed", error=str(error))
        await asyncio.sleep(KEY_CLEANUP_INTERVAL_S)


async def refuse_public_without_tokens(app: Interlock, config: Config) -> None:
    """Raise ConfigError if tokens are required, or other hosts could reach the API, and there is no token."""
    if is_loopback(config.supervisor_host) and not config.supervisor_require_token:
        return
    async with app.connection() as connection:
        if await count_usable_tokens(connection):
            return
    if is_loopback(config.supervisor_host):
        reason = "tokens are required"
    else:
        reason = f"other hosts can reach {config.supervisor_host or 'every address'}"
    raise ConfigError(f"{reason}, and there is no token: create one with `interlock token create NAME --scope admin`")


@contextmanager
def bind_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a listening socket; ConfigError if the address cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"the API cannot be served on {host}:{port}: {error.strerror or error}") from None
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            hint = "; is another supervisor running? --port takes another one" if port else ""
            raise ConfigError(f"the API cannot be served on {host}:{port}: {error.strerror}{hint}") from None
        listener.setblocking(False)  # noqa: FBT003 - the parameter has no keyword
        yield listener


def socket_url(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
