"""Executor for CPU-bound handlers: child processes, reused from task to task and killed when a task is cancelled.

Invariant: a child runs one handler at a time, and is reused only after that handler's outcome was received. When `run`
has ended, the handler has ended too.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING, Any

import orjson

from interlock.process_groups import KILL_TIMEOUT_S, ProcessGroup, ProcessGroups, describe_exit
from interlock.worker.executors.base import EngineError, HandlerError, refuse_transactional
from interlock.worker.executors.json_lines import MAX_LINE_BYTES, HandlerSession, task_message

if TYPE_CHECKING:
    from interlock.client.context import TaskContext
    from interlock.worker.executors.base import Runnable

# Output written before the exit is read within this time, even if a descendant keeps the stream open.
DRAIN_TIMEOUT_S = 1.0


class ProcessExecutor:
    """At most `size` child processes, started on demand. They import the app, or the handler's own module."""

    def __init__(
        self,
        size: int,
        groups: ProcessGroups,
        *,
        app_reference: str | None = None,
        database_url: str | None = None,
        grace: float = 1.0,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        if size < 1:
            raise ValueError(f"a process executor needs at least one process, got {size}")
        self._slots = asyncio.Semaphore(size)
        self._groups = groups
        self._app_reference = app_reference
        self._database_url = database_url
        self._grace = grace
        self._max_line_bytes = max_line_bytes
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()
        self._sessions: dict[TaskContext, HandlerSession] = {}
        self._closed = False

    @property
    def pids(self) -> frozenset[int]:
        """The process ids of the children that run."""
        return frozenset(child.group.pid for child in self._children if child.group.exit_code is None)

    async def run(self, task: Runnable, context: TaskContext, arguments: dict[str, Any]) -> Any:
        """Run the handler in a child process; the child decodes the input and encodes the result."""
        refuse_transactional(task)
        message = {
            **task_message(task, context, arguments),
            "app": self._app_reference,
            "function": None if self._app_reference else _import_reference(task),
            "context_parameter": task.context_parameter,
        }
        async with self._slots:
            if self._closed:
                raise EngineError("the worker is closing: its processes take no more handlers")
            child = await self._acquire()
            session = HandlerSession(context, child.reader, child.write)
            self._sessions[context] = session
            try:
                child.idle = False
                session.send(message)
                return await self._receive_outcome(task, child, session)
            finally:
                del self._sessions[context]
                self._release(child)

    def cancel(self, context: TaskContext) -> None:
        """Send the cancel message to the child."""
        if (session := self._sessions.get(context)) is not None:
            session.cancel()

    async def close(self) -> None:
        """Let idle children exit by themselves, and stop the others."""
        self._closed = True
        for child in self._idle:
            child.disconnect()
        await asyncio.gather(*(self._end(child) for child in list(self._children)))
        self._idle.clear()

    async def _receive_outcome(self, task: Runnable, child: _Child, session: HandlerSession) -> Any:
        try:
            output = await session.receive_outcome()
        except HandlerError as error:
            child.idle = error.error_type != "ProtocolError"  # after that, the state of the child is unknown
            raise
        except (EOFError, ConnectionError):  # ConnectionError: killed before it read the task message
            raise await _process_crashed(task, child) from None
        except asyncio.CancelledError:
            try:
                child.idle = await session.cancel_and_wait(self._grace)
                if not child.idle:
                    await child.stop(self._grace)
            finally:
                if not child.idle:
                    child.group.kill()
            raise
        child.idle = True
        return output

    async def _acquire(self) -> _Child:
        while self._idle:
            if (child := self._idle.pop()).is_usable:
                return child
            self._discard(child)
        try:
            child = await _Child.start(self._groups, self._max_line_bytes, self._database_url)
        except OSError as error:
            raise EngineError(f"no process for the handler: {error}") from error
        self._children.add(child)
        return child

    def _release(self, child: _Child) -> None:
        if child.is_usable and not self._closed:
            self._idle.append(child)
        else:
            self._discard(child)

    def _discard(self, child: _Child) -> None:
        child.group.kill()
        child.disconnect()
        self._children.discard(child)

    async def _end(self, child: _Child) -> None:
        if not child.idle or not await child.group.wait(self._grace):
            await child.stop(self._grace)
        self._discard(child)


class _Child:
    """One child process and the socket to it."""

    __slots__ = ("_writer", "group", "idle", "reader")

    def __init__(self, group: ProcessGroup, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.group = group
        self.reader = reader
        self._writer = writer
        self.idle = True
        group.exited.add_done_callback(lambda exited: exited.get_loop().call_later(DRAIN_TIMEOUT_S, writer.close))

    @classmethod
    async def start(cls, groups: ProcessGroups, max_line_bytes: int, database_url: str | None) -> _Child:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                command = [sys.executable, "-m", "interlock.worker.executors.child", str(theirs.fileno())]
                group = groups.start(command, pass_fds=[theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        try:
            child = cls(group, *await asyncio.open_connection(sock=ours, limit=max_line_bytes))
        except BaseException:
            group.kill()
            ours.close()
            raise
        child.write(orjson.dumps({"type": "start", "path": sys.path, "database_url": database_url}) + b"\n")
        return child

    @property
    def is_usable(self) -> bool:
        return self.idle and self.group.exit_code is None and not self.reader.at_eof()

    def write(self, data: bytes) -> None:
        if not self._writer.is_closing():  # closed: the exit code explains the failure
            self._writer.write(data)

    async def stop(self, grace: float) -> None:
        self.write(b'{"type":"stop"}\n')  # a child ignores SIGTERM without it
        await self.group.stop(grace)

    def disconnect(self) -> None:
        self._writer.close()


def _import_reference(task: Runnable) -> str:
    """Return the `module:name` under which another process can import the handler."""
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


async def _process_crashed(task: Runnable, child: _Child) -> HandlerError:
    await child.group.wait(DRAIN_TIMEOUT_S)
    child.group.kill()  # a child that only closed its socket is unusable too
    await child.group.wait(KILL_TIMEOUT_S)
    code = child.group.exit_code
    ending = "does not end after SIGKILL" if code is None else describe_exit(code)
    return HandlerError("ProcessCrashed", f"the process {child.group.pid} that ran task {task.name!r} {ending}")
