"""Taking back what dead workers held.

Invariant: a task whose lease ran out gets another try, or ends if it has none left; one that somebody wants canceled is
canceled. Whoever waits for it hears of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.store.acts import cancel_unfinished_tasks
from interlock.store.database import run, transaction
from interlock.store.tasks import TASKS, insert_callbacks, notify_ended, notify_tasks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

    from interlock.store.database import Connection


class Recovered(NamedTuple):
    """A task whose lease had run out: `expire` put it back; `exhaust` ended it, or a `cancel` that was asked for."""

    id: UUID
    event: str
    namespace: str
    limit_key: str | None


async def recover_expired_tasks(
    connection: Connection, *, actor: str, limit: int = 500, now: datetime | None = None
) -> list[Recovered]:
    """Take back tasks whose lease ran out, and tell what became of each: us, and whoever waits for it.

    What somebody wants canceled is canceled: there may be no worker any more that could be asked.
    """
    parameters = {"limit": limit, "actor": actor, "now": now}
    async with transaction(connection):
        unwanted = await _cancel_unwanted_tasks(connection, parameters)
        recovered = [Recovered(**row) for row in await run(connection, TASKS["recover_expired_tasks"], parameters)]
        if recovered:
            ended = [task.id for task in recovered if task.event == "exhaust"]
            await insert_callbacks(connection, ended)
            await notify_ended(connection, awaited=ended, limited=any(task.limit_key for task in recovered))
            await notify_tasks(connection, {task.namespace for task in recovered if task.event == "expire"})
    return unwanted + recovered


async def _cancel_unwanted_tasks(connection: Connection, parameters: Mapping[str, Any]) -> list[Recovered]:
    rows = await run(connection, TASKS["lock_unwanted_tasks"], parameters)
    for reason in {row["reason"] for row in rows}:
        alike = [row for row in rows if row["reason"] == reason]
        await cancel_unfinished_tasks(
            connection,
            [row["id"] for row in alike],
            attempts=[row["attempt"] for row in alike],
            running=True,
            actor=parameters["actor"],
            reason=reason,
            now=parameters["now"],
        )
    return [Recovered(row["id"], "cancel", row["namespace"], row["limit_key"]) for row in rows]
