"""What is said between a worker and a handler in another process: JSON objects, one to a line.

Invariant: a line that is no message ends the run with an error that shows the line; nothing is guessed. What a handler
says reaches the context of its own attempt and no other.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.client.step_context import StepContext, gather
from interlock.worker.executors.base import TRACEBACK_LENGTH, HandlerError, mark_cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from interlock.client.context import TaskContext
    from interlock.client.task import Task
    from interlock.worker.executors.base import Runnable

LONGEST_LINE = 16 * 1024 * 1024
SHOWN = 200
LEVELS = frozenset({"debug", "info", "warning", "error", "critical"})


def order(task: Runnable, context: TaskContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Say what is to be done: the first message of every run."""
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
        "input": _input(task, context, arguments),
        "job": context.job if isinstance(context, StepContext) else None,
        "checkpoint": context.stored_checkpoint,
        "deadline": context.deadline,
    }


def _input(task: Runnable, context: TaskContext, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give the arguments as JSON, which the other side converts."""
    if isinstance(context, StepContext):
        return gather(cast("Task[..., Any]", task), context.input_data or {}, context.job)
    return arguments if context.input_data is None else context.input_data


class Conversation:
    """One run of a handler elsewhere, as the worker hears it."""

    __slots__ = ("_context", "_hears", "_reader", "_write", "told")

    def __init__(self, context: TaskContext, reader: asyncio.StreamReader, write: Callable[[bytes], None]) -> None:
        self._context = context
        self._reader = reader
        self._write = write
        self._hears: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "progress": self._hear_progress,
            "cost": self._hear_cost,
            "metadata": self._hear_metadata,
            "log": self._hear_log,
        }
        self.told = False

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        self._write(orjson.dumps(message) + b"\n")

    def cancel(self) -> None:
        """Tell the handler, once, that it is cancelled, and mark its context so if nobody did."""
        mark_cancelled(self._context)
        if not self.told:
            self.told = True
            self.say({"type": "cancel", "reason": self._context.cancel_reason})

    async def outcome(self) -> Any:
        """Listen until the handler is done: its output, its error as HandlerError, EOFError when it ended without."""
        while True:
            line = await self._line()
            message = _parsed(line)
            kind = message["type"]
            if kind == "result":
                return message.get("output")
            if kind == "error":
                raise _failure(message)
            if kind == "checkpoint":
                await self._save(message.get("value"))
            else:
                self._hear(kind, message, line)

    async def _line(self) -> bytes:
        while True:
            try:
                line = await self._reader.readline()
            except ValueError:
                raise _nonsense(
                    "sent a line that is longer than the worker takes; store large data elsewhere"
                ) from None
            if not line:
                raise EOFError
            if line := line.strip():
                return line

    def _hear(self, kind: str, message: Mapping[str, Any], line: bytes) -> None:
        hear = self._hears.get(kind)
        if hear is None:
            raise _nonsense(f"sent a message of unknown type {kind[:SHOWN]!r}: {_shown(line)}")
        try:
            hear(message)
        except (TypeError, ValueError) as error:
            raise _nonsense(f"sent a message that makes no sense ({error}): {_shown(line)}") from None

    def _hear_progress(self, message: Mapping[str, Any]) -> None:
        self._context.progress(message.get("fraction"), message.get("message"), **(message.get("details") or {}))

    def _hear_metadata(self, message: Mapping[str, Any]) -> None:
        if isinstance(self._context, StepContext):
            for key, value in dict(message.get("values") or {}).items():
                self._context.set_metadata(key, value)

    def _hear_cost(self, message: Mapping[str, Any]) -> None:
        self._context.cost = float(message.get("value"))  # type: ignore[arg-type]  # what is no number is refused

    def _hear_log(self, message: Mapping[str, Any]) -> None:
        level = message.get("level")
        details = message.get("details")
        say = getattr(self._context.logger, level if level in LEVELS else "info")
        say(str(message.get("message")), **({"details": details} if details else {}))

    async def _save(self, value: Any) -> None:
        answer: dict[str, Any] = {"type": "saved"}
        try:
            answer["stored"] = await self._context.checkpoint(value)
        except Exception as error:  # noqa: BLE001 - the handler is told, and decides what it means
            answer.update(stored=False, error=f"{type(error).__qualname__}: {error}")
        self.say(answer)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        message = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise _nonsense(f"wrote to standard output what is not JSON: {_shown(line)}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise _nonsense(f"sent JSON that is not an object with a type: {_shown(line)}")
    return message


def _failure(message: Mapping[str, Any]) -> HandlerError:
    after = message.get("retry_after")
    trace = message.get("traceback")
    return HandlerError(
        str(message.get("error_type") or "HandlerError"),
        str(message.get("message") or "the handler gave no message"),
        trace=None if trace is None else str(trace)[-TRACEBACK_LENGTH:],
        retryable=message.get("retryable") is not False,
        retry_after=float(after) if isinstance(after, int | float) else None,
    )


def _nonsense(what: str) -> HandlerError:
    return HandlerError("ProtocolError", f"the handler {what}", retryable=False)


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")


async def wind_down(conversation: Conversation, grace: float) -> bool:
    """Ask a handler whose task was given up to stop; tell whether it answered. One asked before had its time."""
    asked_before = conversation.told
    conversation.cancel()
    if asked_before:
        return False
    try:
        async with asyncio.timeout(grace):
            await conversation.outcome()
    except HandlerError:
        return True
    except (TimeoutError, EOFError):
        return False
    return True
