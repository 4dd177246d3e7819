"""Runs CPU-bound handlers in child processes, which are reused from task to task and killed when a task is given up.

Invariant: a child runs one handler at a time, and is used again only after that handler's outcome was heard. When
`run` has ended, so has the handler.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from interlock.errors import RetryableError
from interlock.worker.executors.base import HandlerError, refuse_transaction
from interlock.worker.executors.json_lines import LONGEST_LINE, Conversation, order, wind_down
from interlock.worker.executors.process_groups import UNKILLABLE, ProcessGroup, ProcessGroups

if TYPE_CHECKING:
    from interlock.client.context import TaskContext
    from interlock.worker.executors.base import Runnable

# What a process wrote before it ended is read by then, even if something that it left behind holds the stream open.
DRAIN = 1.0


class _Child:
    """One child process and the socket to it."""

    __slots__ = ("_writer", "free", "group", "reader")

    def __init__(self, group: ProcessGroup, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.group = group
        self.reader = reader
        self._writer = writer
        self.free = True
        group.ended.add_done_callback(lambda ended: ended.get_loop().call_later(DRAIN, writer.close))

    @classmethod
    async def start(cls, groups: ProcessGroups, longest_line: int) -> _Child:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                command = [sys.executable, "-m", "interlock.worker.executors.child", str(theirs.fileno())]
                group, _ = groups.start(command, pass_fds=[theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        try:
            child = cls(group, *await asyncio.open_connection(sock=ours, limit=longest_line))
        except BaseException:
            group.send(signal.SIGKILL)
            ours.close()
            raise
        child.write(orjson.dumps({"type": "path", "path": sys.path}) + b"\n")
        return child

    @property
    def usable(self) -> bool:
        return self.free and not self.group.ended.done() and not self.reader.at_eof()

    def write(self, data: bytes) -> None:
        if not self._writer.is_closing():  # what it cannot hear any more, its exit status explains
            self._writer.write(data)

    async def stop(self, grace: float) -> None:
        self.write(b'{"type":"stop"}\n')  # without it, a child takes SIGTERM for somebody else's
        await self.group.stop(grace)

    def hang_up(self) -> None:
        self._writer.close()


class ProcessExecutor:
    """At most `size` child processes, started when needed. They import the app, or the handler's own module."""

    gives_json: ClassVar[bool] = True

    def __init__(
        self,
        size: int,
        groups: ProcessGroups,
        *,
        app_reference: str | None = None,
        grace: float = 1.0,
        longest_line: int = LONGEST_LINE,
    ) -> None:
        if size < 1:
            raise ValueError(f"a process executor needs at least one process, not {size}")
        self._slots = asyncio.Semaphore(size)
        self._groups = groups
        self._app_reference = app_reference
        self._grace = grace
        self._longest_line = longest_line
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()
        self._running: dict[TaskContext, Conversation] = {}
        self._closed = False

    @property
    def pids(self) -> frozenset[int]:
        """The process ids of the children that live."""
        return frozenset(child.group.pid for child in self._children if not child.group.ended.done())

    async def run(self, task: Runnable, context: TaskContext, arguments: dict[str, Any]) -> Any:
        """Run the handler in a child process; the child decodes the input and encodes the result."""
        refuse_transaction(task)
        said = {
            **order(task, context, arguments),
            "app": self._app_reference,
            "function": None if self._app_reference else _reference(task),
            "context_parameter": task.context_parameter,
        }
        async with self._slots:
            if self._closed:
                raise RetryableError("the worker is closing: its processes take no more handlers")
            child = await self._take()
            conversation = Conversation(context, child.reader, child.write)
            self._running[context] = conversation
            try:
                child.free = False
                conversation.say(said)
                return await self._outcome(task, child, conversation)
            finally:
                del self._running[context]
                self._give_back(child)

    def cancel(self, context: TaskContext) -> None:
        """Pass on to the child that the handler is cancelled."""
        if (conversation := self._running.get(context)) is not None:
            conversation.cancel()

    async def close(self) -> None:
        """Let idle children end by themselves, and stop the others."""
        self._closed = True
        for child in self._idle:
            child.hang_up()
        await asyncio.gather(*(self._end(child) for child in list(self._children)))
        self._idle.clear()

    async def _outcome(self, task: Runnable, child: _Child, conversation: Conversation) -> Any:
        try:
            output = await conversation.outcome()
        except HandlerError as error:
            child.free = error.error_type != "ProtocolError"  # after that, nobody knows what it would say next
            raise
        except (EOFError, ConnectionError):  # the latter when it was killed before it read its order
            raise await _crash(task, child) from None
        except asyncio.CancelledError:
            try:
                child.free = await wind_down(conversation, self._grace)
                if not child.free:
                    await child.stop(self._grace)
            finally:
                if not child.free:
                    child.group.send(signal.SIGKILL)
            raise
        child.free = True
        return output

    async def _take(self) -> _Child:
        while self._idle:
            if (child := self._idle.pop()).usable:
                return child
            self._discard(child)
        child = await _Child.start(self._groups, self._longest_line)
        self._children.add(child)
        return child

    def _give_back(self, child: _Child) -> None:
        if child.usable and not self._closed:
            self._idle.append(child)
        else:
            self._discard(child)

    def _discard(self, child: _Child) -> None:
        child.group.send(signal.SIGKILL)
        child.hang_up()
        self._children.discard(child)

    async def _end(self, child: _Child) -> None:
        if not child.free or not await child.group.wait(self._grace):
            await child.stop(self._grace)
        self._discard(child)


def _reference(task: Runnable) -> str:
    """Name the handler so that another process can import it."""
    function = task.function
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", "")
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = "" if spec is None else spec.name
    if not module or not name or "<" in name:
        raise HandlerError(
            "ConfigError",
            f"task {task.name!r} runs in a process, which must import it: define it at the top level of a module, "
            "or start the worker with a reference to the app (pkg.module:app)",
            retryable=False,
        )
    return f"{module}:{name}"


async def _crash(task: Runnable, child: _Child) -> HandlerError:
    await child.group.wait(DRAIN)
    child.group.send(signal.SIGKILL)  # one that only closed its socket is of no use either
    await child.group.wait(UNKILLABLE)
    how = describe_end(child.group)
    return HandlerError("ProcessCrashed", f"the process {child.group.pid} that ran task {task.name!r} {how}")


def describe_end(group: ProcessGroup) -> str:
    """Say in words how a process ended."""
    if not group.ended.done():
        return "does not end"
    status = group.ended.result()
    if status >= 0:
        return f"ended with exit status {status}"
    name = str(-status)
    with suppress(ValueError):
        name = signal.Signals(-status).name
    return f"was killed by {name}"
