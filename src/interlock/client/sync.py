"""The blocking facade of an app, its tasks and its handles, for code that is not async.

A call runs the async implementation in an event loop in which the app is open, and waits for it: the loop of a web
server or of a worker, else one in a background thread, which starts with the first call and ends with the process.

Invariant: nothing is implemented twice, and no call waits for a loop that does not run. A call in a thread whose own
running loop has the app open is refused, because that loop would wait for itself.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, Unpack

from interlock.errors import StoreError
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from concurrent.futures import Future
    from datetime import datetime
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.client.enqueue import Enqueuer
    from interlock.client.explain import Explanation
    from interlock.client.job_handle import (
        InboxItem,
        JobHandle,
        JobStatus,
        JobSummary,
        SentSignal,
        SignalOutcome,
        StepStatus,
    )
    from interlock.client.submit import JobRequest, SubmitOptions
    from interlock.client.task_handle import Affected, CancelOutcome, TaskHandle, TaskStatus
    from interlock.client.workflow import Workflow
    from interlock.model.options import NewTask
    from interlock.store.history import HistoryRecord
    from interlock.store.task_admin import TaskSummary

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

LOOP_CHECK_INTERVAL_S = 0.5  # after which a waiting call checks that the loop still runs
CLOSE_TIMEOUT_S = 10.0  # for the connections at the exit of the process, and for calls of other threads
_VARIABLES = {"Interlock": "app", "Enqueuer": "task", "TaskHandle": "handle", "JobHandle": "job"}  # of a remedy


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class SyncHandle(Generic[R]):
    """The blocking facade of `TaskHandle`."""

    __slots__ = ("_handle", "_run", "created", "id")

    def __init__(self, handle: TaskHandle[R], run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._handle = handle
        self._run = run
        self.id = handle.id
        self.created = handle.created

    def __repr__(self) -> str:
        return repr(self._handle).replace("TaskHandle", "SyncHandle")

    def wait(self, timeout: float | None = None) -> R:
        """Block until the task has ended and return its result, as TaskHandle.result does."""
        result: R = self._run(self._handle.result(timeout))
        return result

    result = wait

    def status(self) -> TaskStatus:
        """Read the current task."""
        status: TaskStatus = self._run(self._handle.status())
        return status

    def history(self, *, at: datetime | None = None) -> list[HistoryRecord]:
        """Read all transitions of the task, oldest first."""
        history: list[HistoryRecord] = self._run(self._handle.history(at=at))
        return history

    def cancel(self, reason: str | None = None, *, force: bool = False) -> CancelOutcome:
        """Cancel the task, as TaskHandle.cancel does."""
        canceled: CancelOutcome = self._run(self._handle.cancel(reason, force=force))
        return canceled

    def requeue(self, reason: str | None = None) -> bool:
        """Make a task that is in error or canceled pending again, as TaskHandle.requeue does."""
        return bool(self._run(self._handle.requeue(reason)))


class SyncJob:
    """The blocking facade of `JobHandle`."""

    __slots__ = ("_job", "_run", "created", "id", "workflow")

    def __init__(self, job: JobHandle, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._job = job
        self._run = run
        self.id = job.id
        self.workflow = job.workflow
        self.created = job.created

    def __repr__(self) -> str:
        return repr(self._job).replace("JobHandle", "SyncJob")

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the job has ended and return its output, as JobHandle.wait does."""
        output: Any = self._run(self._job.wait(timeout))
        return output

    result = wait

    def status(self) -> JobStatus:
        """Read the current job."""
        status: JobStatus = self._run(self._job.status())
        return status

    def steps(self) -> list[StepStatus]:
        """Read all steps."""
        steps: list[StepStatus] = self._run(self._job.steps())
        return steps

    def history(self, *, at: datetime | None = None) -> list[HistoryRecord]:
        """Read all transitions of the job, oldest first."""
        history: list[HistoryRecord] = self._run(self._job.history(at=at))
        return history

    def cancel(self, reason: str | None = None) -> bool:
        """Cancel the job, as JobHandle.cancel does."""
        return bool(self._run(self._job.cancel(reason)))

    def signal(self, name: str, payload: Any = None, *, request_id: str | None = None) -> SignalOutcome:
        """Send a signal, as JobHandle.signal does."""
        sent: SignalOutcome = self._run(self._job.signal(name, payload, request_id=request_id))
        return sent

    def signals(self) -> list[SentSignal]:
        """Read the signals that were sent to the job, oldest first."""
        sent: list[SentSignal] = self._run(self._job.signals())
        return sent

    def approve(self, step: str, approved: bool = True, comment: str | None = None) -> SignalOutcome:  # noqa: FBT001, FBT002 - as JobHandle.approve
        """Answer an approval step."""
        sent: SignalOutcome = self._run(self._job.approve(step, approved, comment))
        return sent

    def retry(self, *, request_id: str | None = None) -> SyncJob:
        """Submit a failed or canceled job again, as JobHandle.retry does."""
        return SyncJob(self._run(self._job.retry(request_id=request_id)), self._run)

    def retry_from(self, step: str, *, request_id: str | None = None) -> SyncJob:
        """Submit the job again from a step on, as JobHandle.retry_from does."""
        return SyncJob(self._run(self._job.retry_from(step, request_id=request_id)), self._run)


class SyncApp:
    """The blocking facade of an app, `app.sync`. It works from any thread and needs no opening.

    `with app.sync:` opens the app at once, where errors are expected, and closes it at the end of the block.
    """

    def __init__(self, app: Interlock) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._has_warned = False  # of a blocking call in a coroutine

    def __repr__(self) -> str:
        return f"<SyncApp of {self._app!r}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Open the app in the background thread, unless a running event loop has it open."""
        self._find_loop()

    def close(self) -> None:
        """Close the app in the background thread and end the thread; the next call starts it again."""
        self._close(None)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in an event loop in which the app is open, and wait for it."""
        future: Future[T] | None = None
        try:
            loop = self._find_loop(coroutine)
            with suppress(RuntimeError):  # the loop was closed since it was found
                future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        finally:
            if future is None:
                coroutine.close()
        if future is None:
            raise _loop_ended_error()
        return _wait(future, loop)

    def forget_loop_of_parent(self) -> None:
        """Start again in a forked process: the background thread runs in its parent only."""
        if self._loop is not None:
            atexit.unregister(self._close_at_exit)
        self._lock, self._loop, self._thread = threading.Lock(), None, None

    def enqueue(self, task: Enqueuer[P, R], /, *args: P.args, **kwargs: P.kwargs) -> SyncHandle[R]:
        """Store one task: `enqueue(send_email, to=...)`, or `enqueue(send_email.options(priority=5), to=...)`."""
        return SyncHandle(self.run(task.enqueue(*args, **kwargs)), self.run)

    def enqueue_many(self, task: Enqueuer[P, R], inputs: Iterable[Mapping[str, Any]]) -> list[SyncHandle[R]]:
        """Store one task per mapping of arguments, all or none."""
        return [SyncHandle(handle, self.run) for handle in self.run(task.enqueue_many(inputs))]

    def enqueue_prepared(self, tasks: Iterable[NewTask]) -> list[SyncHandle[Any]]:
        """Store tasks of `task.prepare(...)`, of any types: all or none."""
        return [SyncHandle(handle, self.run) for handle in self.run(self._app.enqueue_many(tasks))]

    def submit(
        self,
        workflow: str | Workflow,
        input: Mapping[str, Any] | Any = None,  # noqa: A002 - the name of the column
        **options: Unpack[SubmitOptions],
    ) -> SyncJob:
        """Submit a job of a workflow, as Interlock.submit does."""
        return SyncJob(self.run(self._app.submit(workflow, input, **options)), self.run)

    def submit_many(self, jobs: Iterable[JobRequest]) -> list[SyncJob]:
        """Submit jobs of any workflows, all or none, as Interlock.submit_many does."""
        return [SyncJob(job, self.run) for job in self.run(self._app.submit_many(jobs))]

    def job(self, id_: UUID | str) -> SyncJob:
        """Return the handle of a job by its id."""
        return SyncJob(self._app.job(id_), self.run)

    def explain(self, id_: UUID | str, *, kind: str | None = None, at: datetime | None = None) -> Explanation:
        """Explain a task, job, worker, namespace, schedule or limit, as Interlock.explain does."""
        return self.run(self._app.explain(id_, kind=kind, at=at))

    def find_jobs(self, **wanted: Any) -> list[JobSummary]:
        """Find jobs, newest first, as Interlock.find_jobs does."""
        return self.run(self._app.find_jobs(**wanted))

    def inbox(self, **wanted: Any) -> list[InboxItem]:
        """List the steps that wait for a signal or an approval, as Interlock.inbox does."""
        return self.run(self._app.inbox(**wanted))

    def handle(self, task_id: UUID | str) -> SyncHandle[Any]:
        """Return the handle of a task by its id."""
        return SyncHandle(self._app.handle(task_id), self.run)

    def find(self, **wanted: Any) -> list[TaskSummary]:
        """Find tasks, newest first, as Interlock.find does."""
        return self.run(self._app.find(**wanted))

    def cancel(self, **wanted: Any) -> Affected:
        """Cancel all tasks that match a filter, as Interlock.cancel does."""
        return self.run(self._app.cancel(**wanted))

    def requeue(self, **wanted: Any) -> Affected:
        """Requeue all tasks that match a filter, as Interlock.requeue does."""
        return self.run(self._app.requeue(**wanted))

    def pause(self, namespace: str, reason: str | None = None) -> int:
        """Pause a namespace, as Interlock.pause does."""
        return self.run(self._app.pause(namespace, reason))

    def resume(self, namespace: str) -> int:
        """Resume a namespace, as Interlock.resume does."""
        return self.run(self._app.resume(namespace))

    def _find_loop(self, waiting: Coroutine[Any, Any, Any] | None = None) -> asyncio.AbstractEventLoop:
        """Return a running event loop in which the app is open; start the background thread if there is none."""
        loops = self._app.open_loops
        running = running_loop()
        if waiting is not None and running is not None:
            if running in loops:
                raise _deadlock_error(waiting)
            self._warn_of_blocked_loop(waiting)
        for loop in loops:
            if loop is not self._loop and loop.is_running():
                return loop
        with self._lock:
            return self._start() if self._loop is None else self._loop

    def _warn_of_blocked_loop(self, waiting: Coroutine[Any, Any, Any]) -> None:
        if not self._has_warned:
            self._has_warned = True
            remedy = f"open the app in this event loop and write `await {_name_of_call(waiting)}(...)`"
            log.warning(
                "event_loop_blocked", reason="a blocking call in a coroutine holds up its event loop", remedy=remedy
            )

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="interlock-sync", daemon=True)
        thread.start()
        self._loop, self._thread = loop, thread
        try:
            _wait(asyncio.run_coroutine_threadsafe(self._app.open(), loop), loop)
        except BaseException:
            self._stop()
            raise
        atexit.register(self._close_at_exit)
        return loop

    def _close_at_exit(self) -> None:
        with suppress(TimeoutError):  # the server does not answer: let the process end
            self._close(CLOSE_TIMEOUT_S)

    def _close(self, timeout: float | None) -> None:
        with self._lock:
            if self._loop is None:
                return
            atexit.unregister(self._close_at_exit)
            try:
                asyncio.run_coroutine_threadsafe(self._app.close(), self._loop).result(timeout)
            finally:
                self._stop()

    def _stop(self) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(CLOSE_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _wait(future: Future[T], loop: asyncio.AbstractEventLoop) -> T:
    """Wait for a coroutine in another thread's loop; StoreError if the loop ends first."""
    try:
        while not wait([future], timeout=LOOP_CHECK_INTERVAL_S).done and loop.is_running():
            pass
        if future.done():
            return future.result()
    except CancelledError:
        pass
    finally:
        future.cancel()  # if it has not ended: after Ctrl-C the coroutine must not go on
    raise _loop_ended_error()


async def _cancel_others() -> None:
    """Cancel what still runs in the background loop: calls of other threads, which raise StoreError then."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _name_of_call(coroutine: Coroutine[Any, Any, Any]) -> str:
    """Return the call that made a coroutine as the user would write it, such as `task.enqueue`."""
    name: str = getattr(coroutine, "__qualname__", "the call")
    owner, _, method = name.rpartition(".")
    return f"{_VARIABLES[owner]}.{method}" if owner in _VARIABLES else name


def _deadlock_error(coroutine: Coroutine[Any, Any, Any]) -> StoreError:
    return StoreError(
        "a blocking call in the event loop in which the app is open would wait for itself: "
        f"write `await {_name_of_call(coroutine)}(...)`"
    )


def _loop_ended_error() -> StoreError:
    return StoreError("the event loop in which the app is open ended before the call did; open the app again")
