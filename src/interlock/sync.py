"""The blocking facade: runs an app in a background thread with its own event loop.

Invariant: every call runs the async implementation in that loop and waits for it; nothing is implemented twice.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, Unpack

from interlock.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.client.enqueue import Enqueuer
    from interlock.client.job_handle import (
        InboxItem,
        JobHandle,
        JobRecord,
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
    from interlock.store.task_admin import TaskSummary
    from interlock.store.tasks import TaskRecord

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


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

    def history(self) -> list[TaskRecord]:
        """Read all transitions of the task, oldest first."""
        history: list[TaskRecord] = self._run(self._handle.history())
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

    def history(self) -> list[JobRecord]:
        """Read all transitions of the job, oldest first."""
        history: list[JobRecord] = self._run(self._job.history())
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


class SyncInterlock:
    """The blocking facade of an app: `with SyncInterlock(app) as tasks: tasks.enqueue(send_email, to=...)`."""

    def __init__(self, app: Interlock) -> None:
        self.app = app
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Start the thread and open the app in it; a second call does nothing."""
        with self._lock:
            if self._loop is not None:
                return
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="interlock-sync", daemon=True)
            thread.start()
            self._loop, self._thread = loop, thread
            try:
                asyncio.run_coroutine_threadsafe(self.app.open(), loop).result()
            except BaseException:
                self._stop()
                raise

    def close(self) -> None:
        """Close the app and end the thread; does nothing if it is not open."""
        with self._lock:
            if self._loop is None:
                return
            try:
                asyncio.run_coroutine_threadsafe(self.app.close(), self._loop).result()
            finally:
                self._stop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the app's event loop and wait for it."""
        loop = self._loop
        if loop is None or threading.current_thread() is self._thread:
            coroutine.close()
            if loop is None:
                raise StoreError("the app is not open: use `with SyncInterlock(app) as tasks:`, or tasks.open()")
            raise StoreError("a blocking call in the app's own event loop would deadlock; await the app instead")
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after Ctrl-C the coroutine must not go on
            raise

    def enqueue(self, task: Enqueuer[P, R], /, *args: P.args, **kwargs: P.kwargs) -> SyncHandle[R]:
        """Store one task: `enqueue(send_email, to=...)`, or `enqueue(send_email.options(priority=5), to=...)`."""
        return SyncHandle(self.run(task.enqueue(*args, **kwargs)), self.run)

    def enqueue_many(self, task: Enqueuer[P, R], inputs: Iterable[Mapping[str, Any]]) -> list[SyncHandle[R]]:
        """Store one task per mapping of arguments, all or none."""
        return [SyncHandle(handle, self.run) for handle in self.run(task.enqueue_many(inputs))]

    def enqueue_prepared(self, tasks: Iterable[NewTask]) -> list[SyncHandle[Any]]:
        """Store tasks of `task.prepare(...)`, of any types: all or none."""
        return [SyncHandle(handle, self.run) for handle in self.run(self.app.enqueue_many(tasks))]

    def submit(
        self,
        workflow: str | Workflow,
        input: Mapping[str, Any] | Any = None,  # noqa: A002 - the name of the column
        **options: Unpack[SubmitOptions],
    ) -> SyncJob:
        """Submit a job of a workflow, as Interlock.submit does."""
        return SyncJob(self.run(self.app.submit(workflow, input, **options)), self.run)

    def submit_many(self, jobs: Iterable[JobRequest]) -> list[SyncJob]:
        """Submit jobs of any workflows, all or none, as Interlock.submit_many does."""
        return [SyncJob(job, self.run) for job in self.run(self.app.submit_many(jobs))]

    def job(self, id_: UUID | str) -> SyncJob:
        """Return the handle of a job by its id."""
        return SyncJob(self.app.job(id_), self.run)

    def find_jobs(self, **wanted: Any) -> list[JobSummary]:
        """Find jobs, newest first, as Interlock.find_jobs does."""
        return self.run(self.app.find_jobs(**wanted))

    def inbox(self, **wanted: Any) -> list[InboxItem]:
        """List the steps that wait for a signal or an approval, as Interlock.inbox does."""
        return self.run(self.app.inbox(**wanted))

    def handle(self, task_id: UUID | str) -> SyncHandle[Any]:
        """Return the handle of a task by its id."""
        return SyncHandle(self.app.handle(task_id), self.run)

    def find(
        self,
        *,
        states: Sequence[str] | None = None,
        namespace: str | None = None,
        type: str | None = None,  # noqa: A002 - the name of the column
        tag: str | None = None,
        limit: int = 100,
    ) -> list[TaskSummary]:
        """Find tasks, newest first."""
        return self.run(self.app.find(states=states, namespace=namespace, type=type, tag=tag, limit=limit))

    def cancel(self, **wanted: Any) -> Affected:
        """Cancel all tasks that match a filter, as Interlock.cancel does."""
        return self.run(self.app.cancel(**wanted))

    def requeue(self, **wanted: Any) -> Affected:
        """Requeue all tasks that match a filter, as Interlock.requeue does."""
        return self.run(self.app.requeue(**wanted))

    def pause(self, namespace: str, reason: str | None = None) -> int:
        """Pause a namespace, as Interlock.pause does."""
        return self.run(self.app.pause(namespace, reason))

    def resume(self, namespace: str) -> int:
        """Resume a namespace, as Interlock.resume does."""
        return self.run(self.app.resume(namespace))

    def _stop(self) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
