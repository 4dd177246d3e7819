"""Child process of the process executor: runs handlers one after another for the worker that started it.

Started as `python -m interlock.worker.executors.child FD`, where FD is a socket to the worker.

Invariant: this process does not outlive its worker. Messages have their own socket, so the output of a handler cannot
get between them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from datetime import datetime
from functools import partial
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from uuid import UUID

import orjson
import structlog

from interlock.client.app import load_app
from interlock.client.context import TaskContext
from interlock.client.dependencies import Resources
from interlock.client.step_context import StepContext
from interlock.client.task import Task
from interlock.errors import PermanentError
from interlock.log_context import TASK_ID_FIELDS, add_filter_to_root_handlers, running_task
from interlock.tracing import continued
from interlock.worker.executors.base import HandlerError, call_handler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, MutableMapping
    from types import FrameType


T = TypeVar("T")


class WorkerConnection:
    """Sends the messages of contexts and loggers in this process to the worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._checkpoints: deque[Future[bool]] = deque()  # not answered yet

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. Safe to call from several threads of a handler."""
        data = orjson.dumps(message) + b"\n"
        with self._lock:
            self._socket.sendall(data)

    def save_checkpoint(self, _context: TaskContext, value: Any, /) -> Future[bool]:
        """Ask the worker to store a checkpoint; the future tells whether it is stored."""
        data = orjson.dumps({"type": "checkpoint", "value": value}) + b"\n"
        future: Future[bool] = Future()
        with self._lock:  # the worker answers in order
            self._checkpoints.append(future)
            self._socket.sendall(data)
        return future

    def progressed(self, context: TaskContext, /) -> None:
        """Send the progress of a context."""
        details = dict(context.latest_progress or {})
        message: dict[str, Any] = {name: details.pop(name, None) for name in ("fraction", "message")}
        self.send({"type": "progress", **message, "details": details})

    def forget_checkpoints(self) -> None:
        """Drop checkpoints of the previous handler that the worker did not answer."""
        self._checkpoints.clear()

    def resolve_checkpoint(self, message: dict[str, Any]) -> None:
        """Resolve the oldest checkpoint with the worker's answer."""
        future = self._checkpoints.popleft()
        if future.set_running_or_notify_cancel():
            if "error" in message:
                future.set_exception(HandlerError("CheckpointError", message["error"]))
            else:
                future.set_result(message["stored"])


class Child:
    """Runs handlers in the main thread, while another thread receives messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.worker = WorkerConnection(connection)
        self._tasks: SimpleQueue[tuple[dict[str, Any], TaskContext] | None] = SimpleQueue()
        self._context: TaskContext | None = None  # of the running handler, from task message to outcome
        self._stopping = False  # the worker sent the stop message
        self._stopped = False
        self._resources = ChildResources()
        self._database_url: str | None = None  # the worker's, set by its first message

    def serve(self) -> None:
        """Run handlers until the worker closes the socket or stops the running handler."""
        signal.signal(signal.SIGTERM, self._terminate)
        threading.Thread(target=self._receive, name="interlock-receive", daemon=True).start()
        try:
            self._run_handlers()
        finally:
            self._resources.close()

    def _run_handlers(self) -> None:
        while not self._stopped and (task := self._tasks.get()) is not None:
            message, context = task
            token = running_task.set(context)
            outcome = _run_to_outcome(message, context, self._resources, self._database_url)
            running_task.reset(token)
            self._context = None
            if context.cost is not None:
                self.worker.send({"type": "cost", "value": context.cost})
            if context.weight is not None:
                self.worker.send({"type": "weight", "value": context.weight})
            if isinstance(context, StepContext) and context.orchestration_metadata:
                self.worker.send({"type": "metadata", "values": context.orchestration_metadata})
            self.worker.send(outcome)

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        # A service manager may send SIGTERM to all processes of a worker. Only the worker decides whether a running
        # handler stops, with the stop message. Raise once: the handler may already be cleaning up.
        if self._stopping and not self._stopped:
            self._stopped = True
            raise SystemExit("stopped by the worker")

    def _receive(self) -> None:
        with suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._dispatch(orjson.loads(line))
        if self._context is not None:
            _kill_own_group()
        self._tasks.put(None)

    def _dispatch(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "task":
            self.worker.forget_checkpoints()
            self._context = _make_context(message, self.worker)
            self._tasks.put((message, self._context))
        elif kind == "saved":
            self.worker.resolve_checkpoint(message)
        elif kind == "start":
            sys.path[:] = message["path"]
            self._database_url = message["database_url"]
        elif self._context is not None:
            self._interrupt(self._context, message)

    def _interrupt(self, context: TaskContext, message: dict[str, Any]) -> None:
        if message["type"] == "cancel":
            context.cancel_reason = message["reason"]
            context.cancelled = True
        else:
            self._stopping = True
            os.kill(os.getpid(), signal.SIGTERM)  # interrupts the main thread, also in a blocking call


class ChildResources:
    """The dependencies of handlers in this process; an event loop that runs only while they are made or cleaned up."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._resources: Resources | None = None

    @contextmanager
    def injected(self, definition: Any, context: TaskContext) -> Iterator[dict[str, Any]]:
        """Make the values of a handler's injected parameters, and clean up after it."""
        dependencies = getattr(definition, "dependencies", None)
        if not dependencies:
            yield {}
            return
        if self._runner is None or self._resources is None:
            self._runner = asyncio.Runner()
            self._resources = Resources(definition.app.dependency_overrides)
        manager, run = self._resources.injected(dependencies, context), self._runner.run
        values = run(_awaited(manager.__aenter__()), context=copy_context())
        try:
            yield values
        except BaseException as error:
            run(_awaited(manager.__aexit__(type(error), error, error.__traceback__)), context=copy_context())
            raise
        run(_awaited(manager.__aexit__(None, None, None)), context=copy_context())

    def close(self) -> None:
        """Clean up the values of scope "worker"."""
        if self._runner is not None and self._resources is not None:
            self._runner.run(self._resources.close())
            self._runner.close()


async def _awaited(value: Awaitable[T]) -> T:
    return await value


def _run_to_outcome(
    message: dict[str, Any], context: TaskContext, resources: ChildResources, database_url: str | None
) -> dict[str, Any]:
    """Run the handler; return the result message or the error message."""
    try:
        definition = _find_definition(message)
        if isinstance(definition, Task) and database_url is not None:
            # the handler enqueues where its worker claims, whatever flags and variables say
            definition.app.config = replace(definition.app.config, database_url=database_url)
        add_filter_to_root_handlers()  # the app may have configured some when it was imported
        with continued(message.get("traceparent")), resources.injected(definition, context) as injected:
            value = _call_definition(definition, message, context, injected)
        return {"type": "result", "output": orjson.Fragment(_encode(definition, value))}
    except BaseException as error:  # noqa: BLE001 - every exception of a handler is an outcome
        failure = HandlerError.from_exception(error)
    return {
        "type": "error",
        "error_type": failure.error_type,
        "message": failure.message,
        "traceback": failure.trace,
        "retryable": failure.retryable,
        "retry_after": failure.retry_after,
    }


def _find_definition(message: dict[str, Any]) -> Any:
    """Return the task of the app, or the task or plain function that a module has under the handler's name."""
    if message["app"] is None:
        return resolve_name(message["function"])
    try:
        return load_app(message["app"]).tasks[message["task_type"]]
    except KeyError:
        raise PermanentError(f"the app {message['app']} has no task {message['task_type']!r}") from None


def _call_definition(definition: Any, message: dict[str, Any], context: TaskContext, injected: dict[str, Any]) -> Any:
    decode: Callable[[Any], dict[str, Any]] = getattr(definition, "decode", dict)
    arguments = {**decode(message["input"]), **injected}
    if message["context_parameter"] is not None:
        arguments = {**arguments, message["context_parameter"]: context}
    return call_handler(getattr(definition, "function", definition), arguments)


def _encode(definition: Any, value: Any) -> bytes:
    encode: Callable[[Any], Any] | None = getattr(definition, "encode_result", None)
    try:
        return orjson.dumps(value if encode is None else encode(value))
    except orjson.JSONEncodeError as error:
        raise PermanentError(f"the handler's result is not JSON: {error}") from None


def _make_context(message: dict[str, Any], worker: WorkerConnection) -> TaskContext:
    def identity(name: str) -> UUID | None:
        return None if message[name] is None else UUID(message[name])

    kind = TaskContext if message.get("job") is None else partial(StepContext, job=message["job"])
    context = kind(
        identity("task_id"),
        message["task_type"],
        namespace=message["namespace"],
        attempt=message["attempt"],
        tries=message["tries"],
        max_tries=message["max_tries"],
        job_id=identity("job_id"),
        step=message["step"],
        correlation_id=identity("correlation_id"),
        input_data=message["input"],
        checkpoint=message["checkpoint"],
        line=worker,
    )
    if message["deadline"] is not None:
        context.deadline = datetime.fromisoformat(message["deadline"])
    return context


class _LogHandler(logging.Handler):
    """Sends the records of the standard library's loggers to the worker."""

    def __init__(self, worker: WorkerConnection) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        message = {"type": "log", "level": level, "message": self.format(record), "logger": record.name}
        with suppress(OSError):
            self._worker.send(message)


def _send_logs(worker: WorkerConnection) -> None:
    """Send logs to the worker, which has the logging configuration; an app may override this with its own."""

    def send(_logger: Any, level: str, event: MutableMapping[str, Any]) -> NoReturn:
        message = str(event.pop("event", ""))
        # the worker's logger adds the ids
        details = {name: value for name, value in event.items() if name not in TASK_ID_FIELDS}
        record = {"type": "log", "level": level, "message": message, "details": details}
        with suppress(OSError):
            worker.send(orjson.loads(orjson.dumps(record, default=repr)))
        raise structlog.DropEvent

    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.format_exc_info, send]
    )
    logging.getLogger().addHandler(_LogHandler(worker))


def _kill_own_group() -> NoReturn:
    """Kill this process and everything the handler started: the worker is dead, and its lease with it."""
    with suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Run handlers for the worker at the other end of the socket FD."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)  # noqa: FBT003 - the parameter has no keyword
    child = Child(connection)
    _send_logs(child.worker)
    with suppress(BrokenPipeError, ConnectionResetError):  # the worker closed the socket first
        child.serve()


if __name__ == "__main__":
    main()
