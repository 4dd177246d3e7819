"""Serves the API over HTTP with uvicorn.

Invariant: a token is needed on every address, unless the settings say otherwise for a loopback address. An address that
other hosts can reach is served only if there are tokens. A stop lets requests in flight finish and ends streams.
Connections are accepted here, within the limits of `ConnectionTable`: a shortage of file descriptors neither stops the
event loop nor fills the log.
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
from interlock.store.access import count_usable_tokens, delete_expired_idempotency_keys, delete_expired_sign_ins
from interlock.supervisor.http.app import create_api
from interlock.supervisor.http.connections import ApiProtocol, ConnectionLimits, ConnectionTable
from interlock.supervisor.http.request_log import request_log
from interlock.supervisor.local_token import ensure_local_token, sign_in_url
from interlock.telemetry import log
from interlock.worker.stats import QueueGauges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fastapi import FastAPI

    from interlock.client.app import Interlock
    from interlock.supervisor.pool.pool import Pool

KEY_CLEANUP_INTERVAL_S = 60.0
KEEP_ALIVE_TIMEOUT_S = 10
GRACEFUL_SHUTDOWN_TIMEOUT_S = 10
BACKLOG = 1024
ACCEPTS_PER_TURN = 32  # of the event loop
ACCEPT_RETRY_S = 0.2  # after a failure for lack of resources
DEADLINE_INTERVAL_S = 1.0
MAX_HEADER_BYTES = 65_536


class ApiServer(BackgroundService):
    """The HTTP server of an app's API.

    `start` binds the address and returns once requests are answered; ConfigError if the address cannot be bound, or
    would be open to other hosts without tokens. `stop` lets requests in flight finish. Without `limits`, those of
    connections follow from the configuration and the file limit of the process.
    """

    stop_timeout_s = None  # uvicorn limits the time of a graceful shutdown

    def __init__(
        self,
        app: Interlock,
        config: Config,
        pool: Pool | None = None,
        *,
        limits: ConnectionLimits | None = None,
        extensions: Sequence[Callable[[FastAPI], None]] = (),
    ) -> None:
        """Serve the API of an app; `pool` runs the worker processes beside it, and readiness tells how that goes."""
        super().__init__("api")
        self._extensions = extensions
        self.url = ""
        self.sign_in_url: str | None = None  # works once, within two minutes; None where there is no local token
        # no token is needed: refuse_public_access allows that on loopback addresses only
        self.is_open = config.supervisor_no_token
        self._pool = pool
        self._app = app
        self._config = config
        self._limits = limits
        self._resources = AsyncExitStack()
        self._api: FastAPI | None = None
        self._server: _UvicornServer | None = None
        self._listener: socket.socket | None = None

    async def start(self) -> None:
        """Bind the address and serve the API."""
        if self.is_running:
            return
        config = self._config
        try:
            await self._resources.enter_async_context(self._app)
            await refuse_public_access(self._app, config)
            self._listener = self._resources.enter_context(bind_socket(config.supervisor_host, config.supervisor_port))
            self._api = api = create_api(self._app, config, pool=self._pool, extensions=self._extensions)
            self._server = _UvicornServer(
                uvicorn.Config(
                    api,
                    http="h11",  # the limit of heads holds with no other parser
                    ws="none",
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    server_header=False,
                    proxy_headers=False,
                    timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
                    timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_TIMEOUT_S,
                    h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ),
                ConnectionTable(self._limits or ConnectionLimits.from_config(config)),
            )
        except BaseException:
            await self._resources.aclose()
            raise
        self.url = socket_url(self._listener)
        await super().start()
        await self._server.answering.wait()
        if self.is_running:
            self.sign_in_url = await self._make_sign_in_url()

    async def _make_sign_in_url(self) -> str | None:
        if self.is_open or not is_loopback(self._config.supervisor_host):
            return None
        app = self._app
        async with app.connection() as connection:
            token = await ensure_local_token(connection, app.config, actor="supervisor", now=app.now())
            return await sign_in_url(connection, self.url, token.name, now=app.now())

    async def run(self) -> None:
        """Serve until `stopping` is set."""
        server, listener, api = self._server, self._listener, self._api
        if server is None or listener is None or api is None:
            raise RuntimeError("ApiServer.run is called by start")
        background = BackgroundTasks()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(self.stopping.wait())
        background.spawn("idempotency key cleanup", _delete_expired_keys(self._app))
        gauges = QueueGauges(self._app.url)
        try:
            await gauges.start()
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            api.state.stopping.set()
            server.should_exit = True
            await serving
        finally:
            api.state.stopping.set()
            server.should_exit = server.force_exit = True
            server.answering.set()  # `start` waits for it, also when the server could not start
            await asyncio.gather(background.stop(), gauges.stop(), cancel_and_wait([stopping]))
            await asyncio.gather(serving, return_exceptions=True)
            await self._resources.aclose()


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that accepts connections itself, tells when it answers, and leaves signals to the caller."""

    def __init__(self, config: uvicorn.Config, table: ConnectionTable) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()
        self._table = table
        self._background = BackgroundTasks()
        self._listeners: list[socket.socket] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer."""
        await super().startup([])
        self._listeners = sockets or []
        for listener in self._listeners:
            self._listen(listener)
        self._background.spawn("deadlines of connections", self._check_deadlines())
        self.answering.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and wait until the requests in flight have ended."""
        loop = asyncio.get_running_loop()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            loop.remove_reader(listener)
        await super().shutdown(sockets)
        await self._background.stop()
        request_log.report_suppressed(at_once=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    def _listen(self, listener: socket.socket) -> None:
        if listener in self._listeners:  # the server has not stopped
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept the connections that wait, a limited number per turn of the event loop."""
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause_accepting(listener, error)
                return
            accepted.setblocking(False)  # noqa: FBT003 - the parameter has no keyword
            self._background.spawn("connection", self._connect(accepted))

    def _pause_accepting(self, listener: socket.socket, error: OSError) -> None:
        """Close a connection that waits for a request, and try again in a moment."""
        request_log.write("error", "connection_not_accepted", error=error.strerror or str(error))
        self._table.evict()
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(ACCEPT_RETRY_S, self._listen, listener)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, accepted)
        except OSError as error:  # the client has left already
            accepted.close()
            request_log.write("warning", "connection_not_accepted", error=error.strerror or str(error))

    def _make_protocol(self) -> ApiProtocol:
        return ApiProtocol(self._table, config=self.config, server_state=self.server_state, app_state={})

    async def _check_deadlines(self) -> None:
        while True:
            await asyncio.sleep(DEADLINE_INTERVAL_S)
            self._table.check_deadlines()
            request_log.report_suppressed()


async def _delete_expired_keys(app: Interlock) -> None:
    """Delete expired idempotency keys, sign-in codes and sessions from time to time, until canceled."""
    while True:
        try:
            async with app.connection() as connection:
                removed = await delete_expired_idempotency_keys(connection, now=app.now())
                await delete_expired_sign_ins(connection, now=app.now())
            if removed:
                log.info("idempotency_keys_removed", keys=removed)
        except (StoreError, OSError) as error:
            log.warning("idempotency_keys_not_removed", error=str(error))
        await asyncio.sleep(KEY_CLEANUP_INTERVAL_S)


async def refuse_public_access(app: Interlock, config: Config) -> None:
    """Raise ConfigError if other hosts could reach the API without a token, or there is none."""
    if is_loopback(config.supervisor_host):
        return
    reason = f"other hosts can reach {config.supervisor_host or 'every address'}"
    if config.supervisor_no_token:
        raise ConfigError(f"{reason}, so a token is needed: --no-token is for loopback addresses")
    async with app.connection() as connection:
        if not await count_usable_tokens(connection):
            raise ConfigError(
                f"{reason}, and there is no token: create one with `interlock token create NAME --scope admin`"
            )


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
