"""The supervisor's API put together: its paths, its door, its errors, and the document that describes them.

Invariant: every answer that can be given stands in the OpenAPI document, and every error is a problem detail.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager
from http import HTTPStatus
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import Response

from interlock.config import Config, is_loopback
from interlock.errors import ConfigError, StoreError
from interlock.store.access import count_usable_tokens, delete_expired_idempotency_keys
from interlock.supervisor.http import jobs as api_jobs
from interlock.supervisor.http import system as api_system
from interlock.supervisor.http import tasks as api_tasks
from interlock.supervisor.http import workers as api_workers
from interlock.supervisor.http.auth import Access
from interlock.supervisor.http.idempotency import Served
from interlock.supervisor.http.metrics import LAG, MoveMetrics
from interlock.supervisor.http.middleware import LOOPBACK_NAMES, Door, Rules
from interlock.supervisor.http.problems import CODES, MEDIA_TYPE, Problem, answer_problem
from interlock.supervisor.http.responses import Problem as ProblemDocument
from interlock.telemetry import log
from interlock.worker.stats import QueueGauges

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from datetime import timedelta

    from interlock.client.app import Interlock


ABOUT = """
Workers, jobs and tasks of one Interlock database.

Every request that changes something takes an `Idempotency-Key` header, or `request_id` in its body: the same request
again gives the same answer. Errors are problem details (RFC 9457) with a `code`. Lists come in pages: `next` of one is
the `cursor` of the following.
"""
PATIENCE = 15.0  # seconds to wait for a connection to the database
PUBLIC = frozenset({"/healthz", "/readyz"})


class Api(FastAPI):
    """The API, with every problem that it can answer in its description."""

    def openapi(self) -> dict[str, Any]:
        """Describe it; once, since it does not change."""
        if self.openapi_schema is None:
            document = get_openapi(
                title=self.title, version=self.version, description=self.description, routes=self.routes
            )
            self.openapi_schema = _with_problems(document)
        return self.openapi_schema


def create_api(app: Interlock, config: Config, *, host: str | None = None, lag: timedelta = LAG) -> FastAPI:
    """Make the API of an app, which must be open while it is served; `host` is the address that it is bound to."""
    bound = config.supervisor_host if host is None else host
    local = is_loopback(bound)
    api = Api(
        title="Interlock",
        version=version("interlock"),
        description=ABOUT,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    served = Served(app, min(PATIENCE, config.supervisor_timeout / 2))
    api.state.app = served
    api.state.config = config
    api.state.turns = WeakValueDictionary()
    api.state.access = Access(served, token_required=config.supervisor_require_token or not local)
    api.state.moves = MoveMetrics(served.connection, lag=lag)
    api.state.registry = CollectorRegistry()
    api.state.registry.register(api.state.moves)
    for kind in (Problem, RequestValidationError, HTTPException):
        api.add_exception_handler(kind, answer_problem)
    for part in (api_workers, api_jobs, api_tasks, api_system):
        api.include_router(part.router)
    api.include_router(router)
    names = {name.lower() for name in config.supervisor_names}
    rules = Rules(
        frozenset(LOOPBACK_NAMES | names) if local else frozenset(names) or None,
        config.supervisor_body_limit,
        config.supervisor_timeout,
    )
    api.add_middleware(Door, rules=rules)
    return api


def _with_problems(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            operation["responses"] |= _problems(path, method)
    return document


def _problems(path: str, method: str) -> dict[str, Any]:
    codes: dict[int, list[str]] = {}
    for code, (status, _) in CODES.items():
        if _can_be(status, path, method):
            codes.setdefault(status, []).append(code)
    schema = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        str(status): {"description": ", ".join(f"`{code}`" for code in names), "content": schema}
        for status, names in codes.items()
    }


def _can_be(status: int, path: str, method: str) -> bool:
    """Tell whether a status can be the answer of an operation."""
    if status in {401, 403} and path in PUBLIC:
        return False
    return status != HTTPStatus.CONFLICT or method != "get"


# SECTION supervisor/api_docs
# The pages that describe the API to people: all of it comes from here, nothing from another host.
#
# Invariant: the pages work without a network, and run no script but their own.

router = APIRouter(include_in_schema=False)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {"docs.html": "text/html", "docs.js": "text/javascript", "docs.css": "text/css"}


@router.get("/docs")
async def show_docs() -> Response:
    """Give the page."""
    return _file("docs.html")


@router.get("/docs/docs.js")
async def show_script() -> Response:
    """Give the script that turns the OpenAPI document into the page."""
    return _file("docs.js")


@router.get("/docs/docs.css")
async def show_style() -> Response:
    """Give its style."""
    return _file("docs.css")


def _file(name: str) -> Response:
    content = files("interlock.supervisor.http").joinpath("static", name).read_bytes()
    return Response(content, headers={"Content-Security-Policy": POLICY}, media_type=_TYPES[name])


# SECTION supervisor/serve
# Serves the API on an address until it is told to stop, and does beside it what is due from time to time.
#
# Invariant: an address that others can reach is served only with tokens. A stop lets requests that are under way
# finish.

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
    return [_sweep(app), QueueGauges(app.url).run()]


async def _sweep(app: Interlock) -> None:
    """Remove the keys of requests whose time is over, until this task is canceled."""
    while True:
        try:
            async with app.connection() as connection:
                removed = await delete_expired_idempotency_keys(connection, now=app.now())
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
