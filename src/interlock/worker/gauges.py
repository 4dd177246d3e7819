"""Shows how long the queue is, and how old its oldest due task, for whoever scrapes this worker's metrics."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from interlock.errors import StoreError
from interlock.lifecycle import TaskRowState
from interlock.store.listening import heed_cancellation
from interlock.store.status import count_unfinished_tasks
from interlock.telemetry import log, oldest_pending_age_seconds, queue_depth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from interlock.store.database import Connection
    from interlock.store.status import StateCount

INTERVAL = 15.0
UNFINISHED = (TaskRowState.WAITING, TaskRowState.PENDING, TaskRowState.RUNNING)


async def keep_gauges(connect: Callable[[], AbstractAsyncContextManager[Connection]]) -> None:
    """Measure the queue every now and then, until this task is canceled."""
    seen: set[str] = set()
    while True:
        try:
            async with connect() as connection:
                show(await count_unfinished_tasks(connection), seen)
        except (StoreError, OSError) as error:
            heed_cancellation()
            log.warning("queue_not_measured", error=str(error))
        await asyncio.sleep(INTERVAL)


def show(counts: Sequence[StateCount], seen: set[str]) -> None:
    """Set the gauges of all namespaces that have tasks, or had some when they were last looked at."""
    now = datetime.now(UTC)
    seen.update(count.namespace for count in counts)
    for namespace in seen:
        for state in UNFINISHED:
            queue_depth.labels(namespace, state.value).set(0)
        oldest_pending_age_seconds.labels(namespace).set(0)
    for count in counts:
        queue_depth.labels(count.namespace, count.state).set(count.tasks)
        if count.oldest_due_at is not None:
            age = (now - count.oldest_due_at).total_seconds()
            oldest_pending_age_seconds.labels(count.namespace).set(max(age, 0.0))
