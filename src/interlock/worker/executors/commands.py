"""Runs handlers written in any language: one process per run, which speaks JSON lines on standard input and output.

Invariant: when `run` has ended, so have the process and everything in its group.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import deque
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

from interlock.errors import RetryableError
from interlock.worker.executors.base import HandlerError, refuse_transaction
from interlock.worker.executors.json_lines import LONGEST_LINE, Conversation, order, wind_down
from interlock.worker.executors.processes import DRAIN, describe_end

if TYPE_CHECKING:
    from interlock.client.context import TaskContext
    from interlock.worker.executors.base import Runnable
    from interlock.worker.executors.process_groups import ProcessGroup, ProcessGroups

LONGEST_LOG_LINE = 64 * 1024
KEPT_LINES = 20
KEPT_LENGTH = 500


class _Program:
    """One running program and its three streams."""

    def __init__(self, group: ProcessGroup, longest_line: int) -> None:
        self.group = group
        self.said = asyncio.StreamReader(limit=longest_line)
        self.logged = asyncio.StreamReader(limit=LONGEST_LOG_LINE)
        self.last_words: deque[str] = deque(maxlen=KEPT_LINES)
        self._input: asyncio.WriteTransport | None = None
        self._transports: list[asyncio.BaseTransport] = []
        self._logging: asyncio.Task[None] | None = None
        group.ended.add_done_callback(lambda ended: ended.get_loop().call_later(DRAIN, self.close))

    async def connect(self, process: subprocess.Popen[bytes], context: TaskContext) -> None:
        loop = asyncio.get_running_loop()
        # each has its pipe: it was started so
        stdin, stdout, stderr = (cast("IO[bytes]", it) for it in (process.stdin, process.stdout, process.stderr))
        for pipe, reader in ((stdout, self.said), (stderr, self.logged)):
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await loop.connect_read_pipe(lambda protocol=protocol: protocol, pipe)  # type: ignore[misc]
            self._transports.append(transport)
        self._input, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, stdin)
        self._transports.append(self._input)
        self._logging = loop.create_task(self._log(context))

    def write(self, data: bytes) -> None:
        if self._input is not None and not self._input.is_closing():  # one that ended needs to hear nothing
            self._input.write(data)

    async def finish(self, grace: float) -> None:
        """Let a program that is done end by itself: it reads the end of its input; stop it if it lingers."""
        if self._input is not None:
            self._input.close()
        if not await self.group.wait(grace):
            await self.group.stop(grace)

    async def hear_last_words(self) -> None:
        if self._logging is not None:
            await asyncio.wait([self._logging], timeout=DRAIN)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        if self._logging is not None:
            self._logging.cancel()

    async def _log(self, context: TaskContext) -> None:
        logger = context.logger
        while True:
            try:
                line = await self.logged.readline()
            except ValueError:
                line = f"(a line of more than {LONGEST_LOG_LINE} bytes is left out)\n".encode()
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self.last_words.append(text[:KEPT_LENGTH])
            logger.info("handler_stderr", line=text)


class CommandExecutor:
    """Starts the program that a task names, once for each run."""

    gives_json: ClassVar[bool] = True

    def __init__(self, groups: ProcessGroups, *, grace: float = 1.0, longest_line: int = LONGEST_LINE) -> None:
        self._groups = groups
        self._grace = grace
        self._longest_line = longest_line
        self._programs: set[_Program] = set()
        self._running: dict[TaskContext, Conversation] = {}
        self._closed = False

    @property
    def pids(self) -> frozenset[int]:
        """The process ids of the programs that run."""
        return frozenset(program.group.pid for program in self._programs)

    async def run(self, task: Runnable, context: TaskContext, arguments: dict[str, Any]) -> Any:
        """Run the program and give the output that it reports; null when it ends well without a word."""
        refuse_transaction(task)
        said = order(task, context, arguments)
        program = await self._start(task, context)
        conversation = Conversation(context, program.said, program.write)
        self._running[context] = conversation
        try:
            conversation.say(said)
            return await self._outcome(task, program, conversation)
        finally:
            program.group.send(signal.SIGKILL)  # reached only when it has ended, or was cut short
            program.close()
            self._programs.discard(program)
            del self._running[context]

    def cancel(self, context: TaskContext) -> None:
        """Pass on to the program that it is cancelled."""
        if (conversation := self._running.get(context)) is not None:
            conversation.cancel()

    async def close(self) -> None:
        """Stop all programs that still run."""
        self._closed = True
        await asyncio.gather(*(program.group.stop(self._grace) for program in list(self._programs)))

    async def _start(self, task: Runnable, context: TaskContext) -> _Program:
        if self._closed:
            raise RetryableError("the worker is closing: it starts no more programs")
        if not task.command:
            raise HandlerError("ConfigError", f"task {task.name!r} names no command to run", retryable=False)
        pipe = subprocess.PIPE
        try:
            group, process = self._groups.start(task.command, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            known = f"the command {task.command[0]!r} of task {task.name!r} cannot be started: {error.strerror}"
            raise HandlerError(type(error).__qualname__, known) from None
        program = _Program(group, self._longest_line)
        try:
            await program.connect(process, context)
        except BaseException:
            group.send(signal.SIGKILL)
            program.close()
            raise
        self._programs.add(program)
        return program

    async def _outcome(self, task: Runnable, program: _Program, conversation: Conversation) -> Any:
        try:
            output = await conversation.outcome()
        except EOFError:
            await program.finish(self._grace)
            await program.hear_last_words()
            return _without_result(task, program)
        except HandlerError:
            await program.finish(self._grace)
            raise
        except asyncio.CancelledError:
            if await wind_down(conversation, self._grace):
                await program.finish(self._grace)
            else:
                await program.group.stop(self._grace)
            raise
        await program.finish(self._grace)
        return output


def _without_result(task: Runnable, program: _Program) -> None:
    """Judge a program that ended without a result by its exit status."""
    if program.group.ended.done() and program.group.ended.result() == 0:
        return
    how = f"the command {' '.join(task.command or ())!r} {describe_end(program.group)}"
    last = "\n".join(program.last_words)
    raise HandlerError("CommandFailed", f"{how}: {last}" if last else how)
