"""Cancels and requeues tasks by filter: a preview that counts, then batches that change what the preview counted.

Invariant: a batch changes only tasks that have not been enqueued, and have not ended, after the horizon, which is the
time of the preview. Each batch is a series of statements by id, so it never locks more than a page, and tasks that
changed since they were found are left alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from interlock.lifecycle import TASK_ROW, TaskRowEvent, TaskRowState
from interlock.postgres.query import load_statements, run
from interlock.store.leader import read_clock
from interlock.store.task_admin import (
    TaskFilter,
    TaskSummary,
    cancel_tasks,
    iterate_task_pages,
    requeue_unless_duplicate,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

TASK_ACTIONS = load_statements("task_actions")
MAX_COUNTED = 10_000  # matching tasks that a preview counts
SAMPLE_SIZE = 10
IS_STEP = "is a step of a job: retry the job instead"
IS_DUPLICATE = "another unfinished task has its unique key"


class TaskAction(StrEnum):
    """An action on all tasks that match a filter."""

    CANCEL = "cancel"
    REQUEUE = "requeue"

    @property
    def possible_states(self) -> frozenset[TaskRowState]:
        """The states of tasks that the action can change."""
        event = TaskRowEvent.CANCEL if self is TaskAction.CANCEL else TaskRowEvent.REQUEUE
        return frozenset(state for state in TaskRowState if TASK_ROW.can(state, event))

    def resolve(self, wanted: TaskFilter) -> TaskFilter:
        """Add the states that the action applies to if the filter names none: unfinished ones, or `error`."""
        if wanted.states is not None:
            return wanted
        if self is TaskAction.REQUEUE:
            return replace(wanted, states=(TaskRowState.ERROR,))
        return replace(wanted, states=tuple(state for state in TaskRowState if state in self.possible_states))


@dataclass(slots=True)
class ActionPreview:
    """The tasks that match a filter at `horizon`: how many the action can change, and why it cannot change the others.

    Counting stops at MAX_COUNTED; then there are more (`capped`). `states` counts the possible ones.
    """

    horizon: datetime
    matched: int = 0
    possible: int = 0
    capped: bool = False
    states: Counter[str] = field(default_factory=Counter)
    obstacles: Counter[str] = field(default_factory=Counter)
    sample: list[TaskSummary] = field(default_factory=list)


@dataclass(slots=True)
class ActionBatch:
    """The result of one batch. Tasks that end once their work has stopped are `requested`; `next_before` is its cursor.

    `next_before` is None when no matching task is left.
    """

    horizon: datetime
    matched: int = 0
    changed: int = 0
    requested: int = 0
    next_before: UUID | None = None
    sample: list[TaskSummary] = field(default_factory=list)


async def preview_task_action(
    connection: Connection,
    action: TaskAction,
    wanted: TaskFilter,
    *,
    horizon: datetime | None = None,
    now: datetime | None = None,
) -> ActionPreview:
    """Count the tasks that match, those that the action can change, and the obstacles of the others."""
    preview = ActionPreview(horizon or await read_horizon(connection, now=now))
    keys: set[str] = set()
    resolved = action.resolve(wanted)
    async for found in iterate_task_pages(connection, resolved, None, horizon=preview.horizon, now=now):
        obstacles = await _find_obstacles(connection, action, found, keys)
        for task in found:
            if preview.matched == MAX_COUNTED:
                preview.capped = True
                return preview
            preview.matched += 1
            if task.id in obstacles:
                preview.obstacles[obstacles[task.id]] += 1
                continue
            preview.possible += 1
            preview.states[str(task.state)] += 1
            if len(preview.sample) < SAMPLE_SIZE:
                preview.sample.append(task)
    return preview


async def apply_task_action(
    connection: Connection,
    action: TaskAction,
    wanted: TaskFilter,
    *,
    limit: int,
    actor: str,
    horizon: datetime | None = None,
    before: UUID | None = None,
    reason: str | None = None,
    force: bool = False,
    now: datetime | None = None,
) -> ActionBatch:
    """Apply the action to the next matching tasks, at most `limit`, newest first; `before` continues a batch."""
    batch = ActionBatch(horizon or await read_horizon(connection, now=now))
    last = None
    # one more than wanted says whether a task is left
    async for page in iterate_task_pages(
        connection, action.resolve(wanted), limit + 1, before=before, horizon=batch.horizon, now=now
    ):
        rest = limit - batch.matched
        if len(page) > rest:
            batch.next_before = page[rest - 1].id if rest else last
        found = page[:rest]
        if not found:
            continue
        last = found[-1].id
        batch.matched += len(found)
        ids = [task.id for task in found]
        if action is TaskAction.CANCEL:
            canceled = await cancel_tasks(connection, ids, actor=actor, reason=reason, force=force, now=now)
            changed = {*canceled.canceled, *canceled.requested}
            batch.requested += len(canceled.requested)
        else:
            requeued = await requeue_unless_duplicate(connection, ids, actor=actor, reason=reason, now=now)
            changed = set(requeued)
        batch.changed += len(changed)
        batch.sample += [task for task in found if task.id in changed][: SAMPLE_SIZE - len(batch.sample)]
    return batch


async def read_horizon(connection: Connection, *, now: datetime | None = None) -> datetime:
    """Return the time until which an action looks: the server's, or that of a clock that is ahead of it."""
    moment = await read_clock(connection)
    return moment if now is None else max(moment, now)


async def _find_obstacles(
    connection: Connection, action: TaskAction, tasks: Sequence[TaskSummary], keys: set[str]
) -> dict[UUID, str]:
    """Say why the action cannot change some of these tasks; `keys` are the unique keys that earlier ones take."""
    obstacles = {task.id: f"is {task.state}" for task in tasks if task.state not in action.possible_states}
    rest = [task.id for task in tasks if task.id not in obstacles]
    if action is TaskAction.CANCEL or not rest:
        return obstacles
    rows = {row["id"]: row for row in await run(connection, TASK_ACTIONS["read_requeue_obstacles"], {"ids": rest})}
    for id_ in rest:
        row = rows.get(id_)
        if row is None:
            obstacles[id_] = "was deleted"
        elif row["is_step"]:
            obstacles[id_] = IS_STEP
        elif row["is_taken"] or row["unique_key"] in keys:
            obstacles[id_] = IS_DUPLICATE
        elif row["unique_key"] is not None:
            keys.add(row["unique_key"])
    return obstacles
