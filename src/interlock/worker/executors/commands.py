"""Executor for handlers in any language: one program per run, which speaks JSON lines on standard input and output.

Invariant: when `run` has ended, the program and everything in its process group have ended too.
"""

from __future__ import annotations

import asyncio
import errno
import subprocess
from collections import deque
from typing import IO, TYPE_CHECKING, Any, cast

from interlock.process_groups import describe_exit, open_stream_reader
from interlock.worker.executors.base import EngineError, HandlerError, refuse_transactional
from interlock.worker.executors.json_lines import MAX_LINE_BYTES, HandlerSession, task_message
from interlock.worker.executors.processes import DRAIN_TIMEOUT_S

if TYPE_CHECKING:
    from interlock.client.context import TaskContext
    from interlock.process_groups import ProcessGroup, ProcessGroups
    from interlock.worker.executors.base import Runnable

MAX_STDERR_LINE_BYTES = 64 * 1024
# the end of standard error that goes into the error of a failed program
KEPT_STDERR_LINES = 20
KEPT_STDERR_LINE_LENGTH = 500
# the system has no process, memory or descriptor left; anything else is the fault of the command
EXHAUSTED = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


class CommandExecutor:
    """Starts the program of a task once per run."""

    def __init__(self, groups: ProcessGroups, *, grace: float = 1.0, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._groups = groups
        self._grace = grace
        self._max_line_bytes = max_line_bytes
        self._programs: set[_Program] = set()
        self._sessions: dict[TaskContext, HandlerSession] = {}
        self._closed = False

    @property
    def pids(self) -> frozenset[int]:
        """The process ids of the programs that run."""
        return frozenset(program.group.pid for program in self._programs)

    async def run(self, task: Runnable, context: TaskContext, arguments: dict[str, Any]) -> Any:
        """Run the program and return the output that it reports; None if it exits with code 0 without a result."""
        refuse_transactional(task)
        message = task_message(task, context, arguments)
        program = await self._start(task, context)
        session = HandlerSession(context, program.stdout, program.write)
        self._sessions[context] = session
        try:
            session.send(message)
            return await self._receive_outcome(task, program, session)
        finally:
            program.group.kill()  # it has exited by now, or `run` was cancelled twice
            program.close()
            self._programs.discard(program)
            del self._sessions[context]

    def cancel(self, context: TaskContext) -> None:
        """Send the cancel message to the program."""
        if (session := self._sessions.get(context)) is not None:
            session.cancel()

    async def close(self) -> None:
        """Stop all programs that still run."""
        self._closed = True
        await asyncio.gather(*(program.group.stop(self._grace) for program in list(self._programs)))

    async def _start(self, task: Runnable, context: TaskContext) -> _Program:
        if self._closed:
            raise EngineError("the worker is closing and starts no more programs")
        if not task.command:
            raise HandlerError("ConfigError", f"task {task.name!r} has no command to run", retryable=False)
        pipe = subprocess.PIPE
        try:
            group = self._groups.start(task.command, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise EngineError(f"no process for the command: {error.strerror}") from error
            message = f"the command {task.command[0]!r} of task {task.name!r} cannot be started: {error.strerror}"
            raise HandlerError(type(error).__qualname__, message) from None
        program = _Program(group)
        try:
            await program.connect(context, self._max_line_bytes)
        except BaseException:
            group.kill()
            program.close()
            raise
        self._programs.add(program)
        return program

    async def _receive_outcome(self, task: Runnable, program: _Program, session: HandlerSession) -> Any:
        try:
            output = await session.receive_outcome()
        except EOFError:
            await program.finish(self._grace)
            await program.drain_stderr()
            if program.group.exit_code != 0:
                raise _command_failed(task, program) from None
            return None
        except HandlerError:
            await program.finish(self._grace)
            raise
        except asyncio.CancelledError:
            if await session.cancel_and_wait(self._grace):
                await program.finish(self._grace)
            else:
                await program.group.stop(self._grace)
            raise
        await program.finish(self._grace)
        return output


class _Program:
    """One running program and its three streams."""

    stdout: asyncio.StreamReader
    _stdin: asyncio.WriteTransport | None = None
    _logging: asyncio.Task[None] | None = None

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.last_stderr_lines: deque[str] = deque(maxlen=KEPT_STDERR_LINES)
        self._transports: list[asyncio.BaseTransport] = []
        group.exited.add_done_callback(lambda exited: exited.get_loop().call_later(DRAIN_TIMEOUT_S, self.close))

    async def connect(self, context: TaskContext, max_line_bytes: int) -> None:
        process = self.group.process
        stdin, stdout, stderr = (cast("IO[bytes]", pipe) for pipe in (process.stdin, process.stdout, process.stderr))
        self.stdout, transport = await open_stream_reader(stdout, max_line_bytes)
        self._transports.append(transport)
        logged, transport = await open_stream_reader(stderr, MAX_STDERR_LINE_BYTES)
        self._transports.append(transport)
        loop = asyncio.get_running_loop()
        self._stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, stdin)
        self._transports.append(self._stdin)
        self._logging = loop.create_task(self._log_stderr(logged, context))

    def write(self, data: bytes) -> None:
        if self._stdin is not None and not self._stdin.is_closing():  # closed: the program has exited
            self._stdin.write(data)

    async def finish(self, grace: float) -> None:
        """Close standard input so that the program exits by itself; stop it if it does not."""
        if self._stdin is not None:
            self._stdin.close()
        if not await self.group.wait(grace):
            await self.group.stop(grace)

    async def drain_stderr(self) -> None:
        if self._logging is not None:
            await asyncio.wait([self._logging], timeout=DRAIN_TIMEOUT_S)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        if self._logging is not None:
            self._logging.cancel()

    async def _log_stderr(self, stderr: asyncio.StreamReader, context: TaskContext) -> None:
        logger = context.logger
        while True:
            try:
                line = await stderr.readline()
            except ValueError:
                line = f"(a line of more than {MAX_STDERR_LINE_BYTES} bytes is left out)\n".encode()
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self.last_stderr_lines.append(text[:KEPT_STDERR_LINE_LENGTH])
            logger.info("handler_stderr", line=text)


def _command_failed(task: Runnable, program: _Program) -> HandlerError:
    code = program.group.exit_code
    ending = "does not end after SIGKILL" if code is None else describe_exit(code)
    message = f"the command {' '.join(task.command or ())!r} {ending}"
    stderr = "\n".join(program.last_stderr_lines)
    return HandlerError("CommandFailed", f"{message}: {stderr}" if stderr else message)
