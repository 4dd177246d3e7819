"""Acts on all tasks of a filter: which are meant, and what came of it.

Invariant: a preview touches nothing, and finds the same tasks as the act would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlock.errors import InputError
from interlock.lifecycle import TaskRowState
from interlock.store.selection import Filter, TaskSummary, find_pages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.store.database import Connection

UNFINISHED = ("waiting", "pending", "running")
SHOWN = 100


@dataclass(frozen=True, slots=True)
class Affected:
    """What an act by filter touched, or would touch: how many tasks, and the first hundred of them.

    `steps_left_out` are tasks of the filter that belong to jobs, when the act is not for those.
    """

    count: int
    tasks: tuple[TaskSummary, ...]
    preview: bool
    steps_left_out: int = 0


def wanted_tasks(states: Sequence[str] | None, namespace: str | None, type_: str | None, tag: str | None) -> Filter:
    """Make a filter; InputError names a state that there is not."""
    unknown = sorted(set(states or ()) - {str(state) for state in TaskRowState})
    if isinstance(states, str) or unknown:
        known = ", ".join(TaskRowState)
        raise InputError(f"states must be a list of {known}; not {states if isinstance(states, str) else unknown[0]}")
    return Filter(None if states is None else tuple(states), namespace, type_, tag)


async def act_on(
    app: Interlock,
    act: Callable[[Connection, list[UUID]], Awaitable[list[UUID]]],
    wanted: Filter,
    limit: int | None,
    *,
    preview: bool,
) -> Affected:
    """Do something to all tasks of a filter, a page at a time; `act` gives those that it did it to."""
    count = 0
    shown: list[TaskSummary] = []
    async with app.connection() as connection:
        async for page in find_pages(connection, wanted, limit):
            ids = [task.id for task in page]
            touched = set(ids if preview else await act(connection, ids))
            count += len(touched)
            shown += [task for task in page if task.id in touched][: SHOWN - len(shown)]
    return Affected(count, tuple(shown), preview)
