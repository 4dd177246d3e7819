"""Runs handlers in a process of its own, one after the other, as the worker that started it says.

Invariant: this process does not outlive its worker, and what a handler prints never gets between the messages, which
have a socket of their own. Run as `python -m interlock.worker.executors.child FD`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

import orjson
import structlog

from interlock.client.app import load_app
from interlock.client.context import TaskContext
from interlock.client.step_context import StepContext
from interlock.errors import PermanentError
from interlock.worker.executors.base import HandlerError, call

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from types import FrameType


class WorkerLine:
    """The line to the worker: what contexts and loggers say here, the worker hears there."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._unsaved: deque[Future[bool]] = deque()

    def say(self, message: dict[str, Any]) -> None:
        """Send one message; threads of a handler may do so at the same time."""
        data = orjson.dumps(message) + b"\n"
        with self._lock:
            self._connection.sendall(data)

    def save_checkpoint(self, _context: TaskContext, value: Any, /) -> Future[bool]:
        """Ask the worker to store a checkpoint."""
        data = orjson.dumps({"type": "checkpoint", "value": value}) + b"\n"
        future: Future[bool] = Future()
        with self._lock:  # answers come in the order of the questions
            self._unsaved.append(future)
            self._connection.sendall(data)
        return future

    def progressed(self, context: TaskContext, /) -> None:
        """Pass the progress on."""
        details = dict(context.latest_progress or {})
        said: dict[str, Any] = {name: details.pop(name, None) for name in ("fraction", "message")}
        self.say({"type": "progress", **said, "details": details})

    def begin(self) -> None:
        """Forget the questions of the handler before, which nobody answers any more."""
        self._unsaved.clear()

    def saved(self, message: dict[str, Any]) -> None:
        """Take the answer to the oldest question."""
        future = self._unsaved.popleft()
        if future.set_running_or_notify_cancel():
            if "error" in message:
                future.set_exception(HandlerError("CheckpointError", message["error"]))
            else:
                future.set_result(message["stored"])


class Child:
    """The process: a thread that listens, and the main thread, which runs the handlers."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.line = WorkerLine(connection)
        self._orders: SimpleQueue[tuple[dict[str, Any], TaskContext] | None] = SimpleQueue()
        self._context: TaskContext | None = None  # of the handler that runs, from its order to its outcome
        self._stopping = False  # the worker wants an end, now
        self._stopped = False

    def serve(self) -> None:
        """Run handlers until the worker hangs up, or stops the one that runs."""
        signal.signal(signal.SIGTERM, self._terminate)
        threading.Thread(target=self._listen, name="interlock-listen", daemon=True).start()
        while not self._stopped and (given := self._orders.get()) is not None:
            outcome = self._outcome(*given)
            context, self._context = given[1], None
            if context.cost is not None:
                self.line.say({"type": "cost", "value": context.cost})
            if isinstance(context, StepContext) and context.orchestration_metadata:
                self.line.say({"type": "metadata", "values": context.orchestration_metadata})
            self.line.say(outcome)

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        # A service manager may send SIGTERM to all of a worker's processes. Whether a running handler is stopped is
        # for the worker to decide, and it says so on the line. Once only: the handler may be cleaning up by now.
        if self._stopping and not self._stopped:
            self._stopped = True
            raise SystemExit("stopped by the worker")

    def _listen(self) -> None:
        with suppress(OSError), self._connection.makefile("rb") as lines:
            for line in lines:
                self._hear(orjson.loads(line))
        if self._context is not None:
            _vanish()
        self._orders.put(None)

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "task":
            self.line.begin()
            self._context = _context_of(message, self.line)
            self._orders.put((message, self._context))
        elif kind == "saved":
            self.line.saved(message)
        elif kind == "path":
            sys.path[:] = message["path"]
        elif self._context is not None:
            self._interrupt(self._context, message)

    def _interrupt(self, context: TaskContext, message: dict[str, Any]) -> None:
        if message["type"] == "cancel":
            context.cancel_reason = message["reason"]
            context.cancelled = True
        else:
            self._stopping = True
            os.kill(os.getpid(), signal.SIGTERM)  # wakes the main thread from whatever it waits for

    def _outcome(self, given: dict[str, Any], context: TaskContext) -> dict[str, Any]:
        try:
            return {"type": "result", "output": orjson.Fragment(_encoded(*_run(given, context)))}
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            known = HandlerError.of(error)
        return {
            "type": "error",
            "error_type": known.error_type,
            "message": known.message,
            "traceback": known.trace,
            "retryable": known.retryable,
            "retry_after": known.retry_after,
        }


def _run(given: dict[str, Any], context: TaskContext) -> tuple[Any, Any]:
    """Find the handler and run it; give its definition and its value."""
    definition = _definition(given)
    decode: Callable[[Any], dict[str, Any]] = getattr(definition, "decode", dict)
    arguments = decode(given["input"])
    if given["context_parameter"] is not None:
        arguments = {**arguments, given["context_parameter"]: context}
    return definition, call(getattr(definition, "function", definition), arguments)


def _definition(given: dict[str, Any]) -> Any:
    """Give the task of an app, or what a module has under the handler's name: a task too, or a plain function."""
    if given["app"] is None:
        return resolve_name(given["function"])
    try:
        return load_app(given["app"]).tasks[given["task_type"]]
    except KeyError:
        raise PermanentError(f"the app {given['app']} has no task {given['task_type']!r}") from None


def _encoded(definition: Any, value: Any) -> bytes:
    encode: Callable[[Any], Any] | None = getattr(definition, "encode_result", None)
    try:
        return orjson.dumps(value if encode is None else encode(value))
    except orjson.JSONEncodeError as error:
        raise PermanentError(f"the handler's result is not JSON: {error}") from None


def _context_of(given: dict[str, Any], line: WorkerLine) -> TaskContext:
    def identity(name: str) -> UUID | None:
        return None if given[name] is None else UUID(given[name])

    kind = TaskContext if given.get("job") is None else partial(StepContext, job=given["job"])
    context = kind(
        identity("task_id"),
        given["task_type"],
        namespace=given["namespace"],
        attempt=given["attempt"],
        tries=given["tries"],
        max_tries=given["max_tries"],
        job_id=identity("job_id"),
        step=given["step"],
        correlation_id=identity("correlation_id"),
        input_data=given["input"],
        checkpoint=given["checkpoint"],
        line=line,
    )
    if given["deadline"] is not None:
        context.deadline = datetime.fromisoformat(given["deadline"])
    return context


class _LogHandler(logging.Handler):
    """Sends what the standard library's loggers say to the worker."""

    def __init__(self, line: WorkerLine) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        details = {"logger": record.name}
        with suppress(OSError):
            self._line.say({"type": "log", "level": level, "message": self.format(record), "details": details})


def _send_logs(line: WorkerLine) -> None:
    """Log through the worker, which knows where logs go; an app that sets up its own logging overrides this."""

    def send(_logger: Any, level: str, event: MutableMapping[str, Any]) -> NoReturn:
        message = str(event.pop("event", ""))
        known = {"task_id", "task_type", "attempt", "correlation_id"}  # the worker adds them again
        details = {name: value for name, value in event.items() if name not in known}
        said = {"type": "log", "level": level, "message": message, "details": details}
        with suppress(OSError):
            line.say(orjson.loads(orjson.dumps(said, default=repr)))
        raise structlog.DropEvent

    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.format_exc_info, send]
    )
    logging.getLogger().addHandler(_LogHandler(line))


def _vanish() -> NoReturn:
    """End at once with everything the handler started: the worker is gone, and with it the right to run."""
    with suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Serve the worker at the other end of the socket that the command line names."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)  # noqa: FBT003 - the parameter has no keyword
    child = Child(connection)
    _send_logs(child.line)
    with suppress(BrokenPipeError, ConnectionResetError):  # the worker hung up first
        child.serve()


if __name__ == "__main__":
    main()
