"""Handlers that run in other processes in the tests of the executors, and the records that describe them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from interlock.client.app import Interlock
from interlock.client.context import TaskContext
from interlock.config import Config
from interlock.errors import PermanentError, RetryableError

if TYPE_CHECKING:
    from collections.abc import Callable

TASK_ID = UUID("01a1e2cf-6c0c-75b3-83a4-94f638565840")
LONG = 600


@dataclass(frozen=True)
class Definition:
    """The parts of a task definition that an executor uses."""

    function: Callable[..., Any] = print
    executor: str = "process"
    command: tuple[str, ...] | None = None
    context_parameter: str | None = None
    transactional: bool = False
    name: str = "example"


class Kept:
    """A context line that records calls and lets a test await the next progress report."""

    def __init__(self, *, stored: bool = True, fails: bool = False) -> None:
        self.checkpoints: list[Any] = []
        self.progress: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._stored = stored
        self._fails = fails

    def save_checkpoint(self, _context: TaskContext, value: Any, /) -> Future[bool]:
        self.checkpoints.append(value)
        future: Future[bool] = Future()
        if self._fails:
            future.set_exception(ConnectionError("the database is away"))
        else:
            future.set_result(self._stored)
        return future

    def progressed(self, context: TaskContext, /) -> None:
        assert context.latest_progress is not None
        self.progress.put_nowait(context.latest_progress)


def attempt_at(given: dict[str, Any] | None = None, line: Kept | None = None, checkpoint: Any = None) -> TaskContext:
    """Make the context of a second attempt."""
    return TaskContext(
        TASK_ID, "example", attempt=7, tries=2, max_tries=3, input_data=given or {}, line=line, checkpoint=checkpoint
    )


def gone(pid: int) -> bool:
    """Return whether a process has ended, zombies included."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def surroundings() -> dict[str, str]:
    """Return an environment in which another process can import the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


WORKER = """
import asyncio
import executor_handlers as handlers
from interlock.worker.executors.dispatch import Executors

class Printed(handlers.Kept):
    def progressed(self, context):
        print(context.latest_progress["pid"], context.latest_progress["child"], flush=True)

async def main(definition):
    executors = Executors(threads=1, processes=1)
    await executors.get(definition).run(definition, handlers.attempt_at({}, Printed()), {})
"""


def kill_worker_of(definition: str) -> list[int]:
    """Run a handler in another worker, kill that worker, and return the process ids that the handler reported."""
    script = f"{WORKER}\nasyncio.run(main(handlers.Definition({definition})))"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=surroundings()) as worker:
        assert worker.stdout is not None
        pids = [int(word) for word in worker.stdout.readline().split()]
        worker.kill()
    assert len(pids) == 2
    return pids


def add(first: int, second: int) -> int:
    return first + second


def process_id() -> int:
    return os.getpid()


async def coroutine(word: str) -> str:
    await asyncio.sleep(0)
    return word.upper()


def fail(how: str) -> None:
    known = {
        "permanent": PermanentError("no such customer"),
        "later": RetryableError("busy", retry_after=12.5),
        "unknown": LookupError("what is this?"),
        "exit": SystemExit("good bye"),
    }
    raise known[how]


def crash(how: str) -> None:
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))


def tell(context: TaskContext) -> dict[str, Any]:
    """Use everything that a context offers."""
    print("printed", flush=True)  # noqa: T201 - output of handlers must not break the protocol
    os.write(1, b'{"type":"nonsense"}\n')
    context.progress(0.25, "a quarter", type="unusual")
    context.cost = 1.5
    context.logger.warning("careful", number=3)
    logging.getLogger("library").error("from a %s", "library")
    stored = context.checkpoint({"done": 1}).wait(30)
    return {
        "stored": stored,
        "restored": context.restore(),
        "fence": context.fence,
        "last": context.is_last_try,
        "id": str(context.task_id),
        "deadline": None if context.deadline is None else context.deadline.isoformat(),
    }


async def tell_in_loop(context: TaskContext) -> bool:
    return await context.checkpoint("awaited")


def restored(context: TaskContext) -> Any:
    return context.restore("nothing")


def stuck(context: TaskContext) -> None:
    """Ignore SIGTERM, in a child process too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    other = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG})"])
    context.progress(0, pid=os.getpid(), child=other.pid)
    time.sleep(LONG)


def polite(context: TaskContext) -> str:
    """Stop when asked."""
    context.progress(0, pid=os.getpid())
    while not context.cancelled:
        time.sleep(0.001)
    return f"stopped: {context.cancel_reason}"


def tidy(context: TaskContext, note: str) -> None:
    """Ignore the context, but clean up when stopped."""
    try:
        context.progress(0, pid=os.getpid())
        time.sleep(LONG)
    finally:
        Path(note).write_text("tidied")


def meet(mine: str, other: str) -> int:
    """Wait for another handler that runs at the same time."""
    Path(mine).touch()
    deadline = time.monotonic() + 60
    while not Path(other).exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return os.getpid()


def repeat(text: str, times: int) -> str:
    return text * times


def not_json() -> object:
    return object()


app = Interlock(config=Config())


@app.task(executor="process")
def next_day(day: date) -> date:
    assert isinstance(day, date)
    return day + timedelta(days=1)
