"""JSON-lines protocol between a worker and a handler in another process: one JSON object per line.

Invariant: a line that is not a valid message ends the run with a ProtocolError that shows the line. A message reaches
the context of its own attempt only.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.client.step_context import StepContext, gather
from interlock.tracing import current_traceparent
from interlock.worker.executors.base import MAX_TRACEBACK_LENGTH, HandlerError, mark_cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from interlock.client.context import TaskContext
    from interlock.client.task import Task
    from interlock.worker.executors.base import Runnable

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_SHOWN_LENGTH = 200  # characters of an invalid line in the error message
LOG_LEVELS = frozenset({"debug", "info", "warning", "error", "critical"})


def task_message(task: Runnable, context: TaskContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Build the first message of a run; its input is JSON, which the other side decodes."""
    input_data: Mapping[str, Any]
    if isinstance(context, StepContext):
        input_data = gather(cast("Task[..., Any]", task), context.input_data or {}, context.job)
    else:
        input_data = arguments if context.input_data is None else context.input_data
    traceparent = current_traceparent()
    traced = {} if traceparent is None else {"traceparent": traceparent}
    return {
        "type": "task",
        "task_id": context.task_id,
        "task_type": task.name,
        "namespace": context.namespace,
        "attempt": context.attempt,
        "tries": context.tries,
        "max_tries": context.max_tries,
        "job_id": context.job_id,
        "step": context.step,
        "correlation_id": context.correlation_id,
        "input": input_data,
        "job": context.job if isinstance(context, StepContext) else None,
        "checkpoint": context.stored_checkpoint,
        "deadline": context.deadline,
        **traced,
    }


class HandlerSession:
    """The worker's side of the protocol for one run of a handler."""

    __slots__ = ("_context", "_observations", "_reader", "_write", "cancel_sent")

    def __init__(self, context: TaskContext, reader: asyncio.StreamReader, write: Callable[[bytes], None]) -> None:
        self._context = context
        self._reader = reader
        self._write = write
        self._observations: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "progress": self._on_progress,
            "cost": self._on_cost,
            "weight": self._on_weight,
            "metadata": self._on_metadata,
            "log": self._on_log,
        }
        self.cancel_sent = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the handler."""
        self._write(orjson.dumps(message) + b"\n")

    def cancel(self) -> None:
        """Mark the context as cancelled, and send the cancel message once."""
        mark_cancelled(self._context)
        if not self.cancel_sent:
            self.cancel_sent = True
            self.send({"type": "cancel", "reason": self._context.cancel_reason})

    async def cancel_and_wait(self, grace: float) -> bool:
        """Send the cancel message and wait `grace` seconds for the outcome; return whether the handler sent one.

        A handler that got the cancel message earlier has had its time: return False at once.
        """
        sent_before = self.cancel_sent
        self.cancel()
        if sent_before:
            return False
        try:
            async with asyncio.timeout(grace):
                await self.receive_outcome()
        except HandlerError:
            return True
        except (TimeoutError, EOFError):
            return False
        return True

    async def receive_outcome(self) -> Any:
        """Process messages until the outcome: return the output, or raise the handler's HandlerError.

        EOFError: the stream ended without an outcome.
        """
        while True:
            line = await self._read_line()
            message = _parse(line)
            kind = message["type"]
            if kind == "result":
                return message.get("output")
            if kind == "error":
                raise _handler_error(message)
            if kind == "checkpoint":
                await self._save_checkpoint(message.get("value"))
            else:
                self._observe(kind, message, line)

    async def _read_line(self) -> bytes:
        while True:
            try:
                line = await self._reader.readline()
            except ValueError:
                raise _protocol_error(
                    "sent a line longer than the worker accepts; store large data elsewhere"
                ) from None
            if not line:
                raise EOFError
            if line := line.strip():
                return line

    def _observe(self, kind: str, message: Mapping[str, Any], line: bytes) -> None:
        on_message = self._observations.get(kind)
        if on_message is None:
            raise _protocol_error(f"sent a message of unknown type {kind[:MAX_SHOWN_LENGTH]!r}: {_shorten(line)}")
        try:
            on_message(message)
        except (TypeError, ValueError) as error:
            raise _protocol_error(f"sent an invalid {kind} message ({error}): {_shorten(line)}") from None

    def _on_progress(self, message: Mapping[str, Any]) -> None:
        self._context.progress(message.get("fraction"), message.get("message"), **(message.get("details") or {}))

    def _on_metadata(self, message: Mapping[str, Any]) -> None:
        if isinstance(self._context, StepContext):
            for key, value in dict(message.get("values") or {}).items():
                self._context.set_metadata(key, value)

    def _on_cost(self, message: Mapping[str, Any]) -> None:
        self._context.cost = float(message.get("value"))  # type: ignore[arg-type]  # TypeError: not a number

    def _on_weight(self, message: Mapping[str, Any]) -> None:
        self._context.weight = float(message.get("value"))  # type: ignore[arg-type]  # TypeError: not a number

    def _on_log(self, message: Mapping[str, Any]) -> None:
        level = message.get("level")
        fields = {name: message[name] for name in ("logger", "details") if message.get(name)}
        write = getattr(self._context.logger, level if level in LOG_LEVELS else "info")
        write(str(message.get("message")), **fields)

    async def _save_checkpoint(self, value: Any) -> None:
        answer: dict[str, Any] = {"type": "saved"}
        try:
            answer["stored"] = await self._context.checkpoint(value)
        except Exception as error:  # noqa: BLE001 - the handler gets the error and decides
            answer.update(stored=False, error=f"{type(error).__qualname__}: {error}")
        self.send(answer)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise _protocol_error(f"wrote a line to standard output that is not JSON: {_shorten(line)}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise _protocol_error(f"sent JSON that is not an object with a type: {_shorten(line)}")
    return message


def _handler_error(message: Mapping[str, Any]) -> HandlerError:
    retry_after = message.get("retry_after")
    trace = message.get("traceback")
    return HandlerError(
        str(message.get("error_type") or "HandlerError"),
        str(message.get("message") or "the handler gave no message"),
        trace=None if trace is None else str(trace)[-MAX_TRACEBACK_LENGTH:],
        retryable=message.get("retryable") is not False,
        retry_after=float(retry_after) if isinstance(retry_after, int | float) else None,
    )


def _protocol_error(problem: str) -> HandlerError:
    return HandlerError("ProtocolError", f"the handler {problem}", retryable=False)


def _shorten(line: bytes) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= MAX_SHOWN_LENGTH else text[:MAX_SHOWN_LENGTH] + "…")
