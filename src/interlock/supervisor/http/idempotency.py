"""Idempotency: executes a state-changing request once per key, in one transaction with its stored response.

Invariant: a request does all its work on one connection, in one transaction that also stores its key. The stored
response is replayed for the same request of the same actor with the same rights only. A request that got no response
has changed nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Unpack
from weakref import WeakValueDictionary

from fastapi import Depends, Header, Request
from starlette.responses import Response

from interlock.client.app import Interlock
from interlock.client.job_handle import as_job_id
from interlock.errors import DisconnectedError, InputError, InterlockError
from interlock.postgres.connection import transaction
from interlock.store.access import (
    IdempotentRequest,
    claim_idempotency_key,
    enqueue_for_key,
    read_workflow_namespace,
    store_idempotent_response,
)
from interlock.supervisor.http.auth import AdminCaller, Caller, OperateCaller, ReadCaller, require_job
from interlock.supervisor.http.metrics import count_keyed_request
from interlock.supervisor.http.problems import (
    FIRST_SERVER_ERROR_STATUS,
    MEDIA_TYPE,
    Problem,
    encode_json,
    problem_from_error,
    record_problem,
)
from interlock.tracing import ProducerSpan, continued_request, parse_traceparent_header

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
    from datetime import timedelta

    from interlock.client.job_handle import JobHandle
    from interlock.client.submit import JobRequest, SubmitOptions
    from interlock.client.task_handle import TaskHandle
    from interlock.client.workflow import Workflow
    from interlock.model.options import NewTask
    from interlock.postgres.connection import AsyncConnection, Connection, SyncConnection
    from interlock.supervisor.http.requests import Command

JSON = "application/json"
REPLAYED_HEADER = {"Idempotency-Replayed": "true"}
FIRST_ERROR_STATUS = 400
TAKEN_KEY_SQLSTATE = "IL007"  # a key that a task of another type has

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="Makes the request safe to repeat: the same key gives the same answer. `request_id` does the same.",
    ),
]


class BoundedWaitApp(Interlock):
    """An app for the API: waits at most `connection_timeout_s` for a connection of the pool."""

    def __init__(self, app: Interlock, connection_timeout_s: float) -> None:
        self.__dict__.update(app.__dict__)
        self._connection_timeout_s = connection_timeout_s

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Take a connection from the pool; DisconnectedError after the timeout."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._connection_timeout_s):
                    connection = await stack.enter_async_context(super().connection())
            except TimeoutError:
                raise DisconnectedError(f"no connection was free within {self._connection_timeout_s:g} s") from None
            yield connection


class CallerApp(BoundedWaitApp):
    """An app bound to the caller of a request; what it reads and enqueues is limited to the caller's namespaces."""

    def __init__(self, app: Interlock, caller: Caller) -> None:
        self.__dict__.update(app.__dict__)
        self.actor = caller.actor
        self.caller = caller
        self.reachable_namespaces = None if caller.namespaces is None else sorted(caller.namespaces)


class RequestApp(CallerApp):
    """An app bound to one request that changes state: all calls use its connection and record its actor.

    What it enqueues, submits, pauses and resumes must be in the caller's namespaces.
    """

    def __init__(self, app: Interlock, connection: Connection, caller: Caller) -> None:
        super().__init__(app, caller)
        self._request_connection = connection

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Return the request's connection, inside its transaction."""
        yield self._request_connection

    async def enqueue_many(
        self, tasks: Iterable[NewTask], *, connection: AsyncConnection | SyncConnection | None = None
    ) -> Sequence[TaskHandle[Any]]:
        """Store tasks; 403 for a namespace that the caller may not use."""
        given = list(tasks)
        for task in given:
            self.caller.require_namespace(task.namespace)
        try:
            made = await super().enqueue_many(given, connection=connection)
        except InputError as error:
            if self.caller.namespaces is None or getattr(error.__cause__, "sqlstate", None) != TAKEN_KEY_SQLSTATE:
                raise
            raise InputError("a task of another type has the unique_key or request_id; use another") from None
        if self.caller.namespaces is not None:
            await self._require_visible([task for task in made if not task.created])
        return made

    async def submit_many(
        self, jobs: Iterable[JobRequest], *, connection: AsyncConnection | SyncConnection | None = None
    ) -> list[JobHandle]:
        """Submit jobs; 403 for a workflow of a namespace that the caller may not use, 404 for such a parent."""
        given = list(jobs)
        if self.caller.namespaces is not None:
            for job in given:
                await self._require_workflow(job)
        return await super().submit_many(given, connection=connection)

    async def submit(
        self,
        workflow: str | Workflow,
        input: Mapping[str, Any] | Any = None,  # noqa: A002 - the name of the column
        *,
        connection: AsyncConnection | SyncConnection | None = None,
        **options: Unpack[SubmitOptions],
    ) -> JobHandle:
        """Submit a job, as `submit_many` does."""
        if self.caller.namespaces is not None:
            await self._require_workflow({**options, "workflow": workflow, "input": input})
        return await super().submit(workflow, input, connection=connection, **options)

    async def pause(self, namespace: str, reason: str | None = None) -> int:
        """Pause a namespace that the caller may use."""
        self.caller.require_namespace(namespace)
        return await super().pause(namespace, reason)

    async def resume(self, namespace: str) -> int:
        """Resume a namespace that the caller may use."""
        self.caller.require_namespace(namespace)
        return await super().resume(namespace)

    async def _require_visible(self, existing: Sequence[TaskHandle[Any]]) -> None:
        """Refuse a unique key that a task of another namespace has."""
        for task in existing:
            if not self.caller.may_use((await task.status()).namespace):
                raise Problem("not_possible", "a task of another namespace has the unique key")

    async def _require_workflow(self, job: JobRequest) -> None:
        workflow = job["workflow"]
        name, version = (
            (workflow, job.get("version")) if isinstance(workflow, str) else (workflow.name, workflow.version)
        )
        async with self.connection() as connection:
            namespace = await read_workflow_namespace(connection, name, version)
            if namespace is None:  # the text of the submit would list workflows and versions of all namespaces
                which = repr(name) if version is None else f"{name!r} with version {version!r}"
                raise Problem("invalid_input", f"there is no workflow {which} in the namespaces of the token")
            self.caller.require_namespace(namespace)
            if (parent := job.get("parent")) is not None:
                await require_job(connection, self.caller, as_job_id(parent))


@dataclass(frozen=True, slots=True)
class MutationResult:
    """The document to answer with, and the status if it differs from the endpoint's usual one."""

    document: Any
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Mutation:
    """A request that changes state."""

    request: Request
    caller: Caller
    key: str | None

    async def execute(
        self, body: Command, work: Callable[[RequestApp], Awaitable[MutationResult | Any]], *, status: int = 200
    ) -> Response:
        """Do the work in one transaction, or replay the stored response of the request's key."""
        app: Interlock = self.request.app.state.app
        keyed = self._keyed_request(body)
        sent = self.request.headers.getlist("traceparent") if app.config.tracing else ()
        with continued_request(parse_traceparent_header(sent)):
            if keyed is not None:
                async with self._key_lock(keyed):
                    return await self._execute_once(app, keyed, work, status)
            async with app.connection() as connection, transaction(connection):
                content, code = _encode_result(await work(RequestApp(app, connection, self.caller)), status)
        return Response(content, code, media_type=_media_type(code))

    async def enqueue(
        self, body: Command, prepare: Callable[[], NewTask], show: Callable[[dict[str, Any]], Any]
    ) -> Response | None:
        """Store a new task without a unique key in the fewest statements, and answer with the row that `show` makes.

        None, with nothing changed, if the request is refused, repeated, or needs more: `execute` decides on it then.
        """
        app: Interlock = self.request.app.state.app
        keyed = self._keyed_request(body)
        sent = self.request.headers.getlist("traceparent") if app.config.tracing else ()
        try:
            task = prepare()
            if task.unique_key is not None or not self.caller.may_use(task.namespace):
                return None
            with (
                continued_request(parse_traceparent_header(sent)),
                ProducerSpan(app.tracer, "enqueue", task.type, namespace=task.namespace) as span,
            ):
                if span.traceparent is not None and task.traceparent is None:
                    task = replace(task, traceparent=span.traceparent)
                content = await self._insert(app, keyed, task, show)
        except DisconnectedError:
            raise
        except InterlockError:  # refused: nothing is stored
            return None
        return None if content is None else Response(content, HTTPStatus.CREATED, media_type=JSON)

    async def _insert(
        self,
        app: Interlock,
        keyed: IdempotentRequest | None,
        task: NewTask,
        show: Callable[[dict[str, Any]], Any],
    ) -> bytes | None:
        state = self.request.app.state
        if keyed is None:
            row = await state.group_commit.insert(task, actor=self.caller.actor)
            return None if row is None else encode_json(show(row))

        def respond(row: dict[str, Any]) -> tuple[int, str]:
            return HTTPStatus.CREATED, encode_json(show(row)).decode()

        lifetime: timedelta = state.config.idempotency_lifetime
        async with self._key_lock(keyed), app.connection() as connection:
            stored = await enqueue_for_key(connection, keyed, task, respond=respond, lifetime=lifetime, now=app.now())
        if stored is None:
            return None
        count_keyed_request("miss")
        return stored[1].encode()

    def request_id(self, body: Command) -> str | None:
        """Return the key under which the engine itself deduplicates the request; keys of other actors are others."""
        return self.caller.scoped_key(self._sent_key(body))

    def _sent_key(self, body: Command) -> str | None:
        return body.request_id if body.request_id is not None else self.key

    def _keyed_request(self, body: Command) -> IdempotentRequest | None:
        if body.request_id is not None and self.key is not None and body.request_id != self.key:
            message = "differs from the Idempotency-Key header; send one of them, or the same in both"
            raise Problem(
                "invalid_request", f"request_id: {message}", {"errors": [{"field": "request_id", "message": message}]}
            )
        key = self._sent_key(body)
        if key is None:
            return None
        reach = None if self.caller.namespaces is None else sorted(self.caller.namespaces)
        sent = body.model_dump(mode="json", exclude={"request_id"})
        content = json.dumps([self.caller.scope, reach, sent], sort_keys=True)
        return IdempotentRequest(
            self.caller.actor,
            key,
            f"{self.request.method} {self.request.url.path}",
            hashlib.sha256(content.encode()).hexdigest(),
        )

    def _key_lock(self, keyed: IdempotentRequest) -> asyncio.Lock:
        """Return the lock of a key in this process: requests that wait for it hold no connection of the pool."""
        locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = self.request.app.state.key_locks
        return locks.setdefault((keyed.actor, keyed.key), asyncio.Lock())

    async def _execute_once(
        self,
        app: Interlock,
        keyed: IdempotentRequest,
        work: Callable[[RequestApp], Awaitable[MutationResult | Any]],
        status: int,
    ) -> Response:
        lifetime: timedelta = self.request.app.state.config.idempotency_lifetime
        async with app.connection() as connection, transaction(connection):
            stored = await claim_idempotency_key(connection, keyed, lifetime=lifetime, now=app.now())
            if stored is not None:
                return _replay(stored.status, stored.body, fits=stored.fits)
            content, code = await self._do_work(RequestApp(app, connection, self.caller), work, status)
            await store_idempotent_response(connection, keyed, code, content.decode())
        count_keyed_request("miss")
        return Response(content, code, media_type=_media_type(code))

    async def _do_work(
        self, app: RequestApp, work: Callable[[RequestApp], Awaitable[MutationResult | Any]], status: int
    ) -> tuple[bytes, int]:
        """Do the work in a savepoint: a refusal (4xx) is a response to store, a failure (5xx) is not."""
        path = self.request.url.path
        try:
            async with app.connection() as connection, transaction(connection):
                return _encode_result(await work(app), status)
        except Exception as error:
            problem = problem_from_error(error)
            if problem.status >= FIRST_SERVER_ERROR_STATUS:
                raise
            record_problem(problem, error, self.request.method, path)
            return encode_json(problem.document(path)), problem.status


def _encode_result(result: MutationResult | Any, status: int) -> tuple[bytes, int]:
    if isinstance(result, MutationResult):
        return encode_json(result.document), result.status or status
    return encode_json(result), status


def _replay(status: int, body: str, *, fits: bool) -> Response:
    """Answer with the stored response of a key; 422 if the key was used for another request."""
    if not fits:
        count_keyed_request("conflict")
        detail = "the key was used before for another path or body, or with other rights; use a new key"
        raise Problem("key_reused", detail)
    count_keyed_request("hit")
    return Response(body, status, REPLAYED_HEADER, _media_type(status))


def _media_type(status: int) -> str:
    return MEDIA_TYPE if status >= FIRST_ERROR_STATUS else JSON


def json_response(document: Any, status: int = 200) -> Response:
    """Answer with a document."""
    return Response(encode_json(document), status, media_type=JSON)


async def _operate(request: Request, caller: OperateCaller, key: IdempotencyKey = None) -> Mutation:
    return Mutation(request, caller, key)


async def _administer(request: Request, caller: AdminCaller, key: IdempotencyKey = None) -> Mutation:
    return Mutation(request, caller, key)


async def _read(request: Request, caller: ReadCaller) -> CallerApp:
    return CallerApp(request.app.state.app, caller)


# Parameters of endpoints, by the scope that they require
OperateMutation = Annotated[Mutation, Depends(_operate)]
AdminMutation = Annotated[Mutation, Depends(_administer)]
ReadApp = Annotated[CallerApp, Depends(_read)]
