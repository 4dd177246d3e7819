"""The first part of the demo: the life of one task, with a crash, a zombie worker and three illegal moves."""

from __future__ import annotations

import asyncio
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from interlock.errors import StoreError
from interlock.lifecycle import TaskRowEvent
from interlock.model.options import NewTask
from interlock.postgres.connection import translated
from interlock.store.enqueue import enqueue_task
from interlock.store.task_admin import recover_expired_tasks
from interlock.store.tasks import Outcome, claim_pending_tasks, read_task_history, settle_running_tasks

if TYPE_CHECKING:
    from uuid import UUID

    from rich.console import Console

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask

TASK_TYPE = "send_email"
SHORT_LEASE = timedelta(milliseconds=50)
LEASE = timedelta(seconds=30)


async def show_task(console: Console, connection: Connection) -> None:
    """Run a task through its life, try illegal moves, and show what the database recorded."""
    console.rule("[bold]A task's life")
    task_id = await _run_task(console, connection)
    console.rule("[bold]What the database refuses")
    await _try_illegal_moves(console, connection, task_id)
    console.rule("[bold]What the database recorded")
    await _show_history(console, connection, task_id)
    console.print(
        "\nEvery line above was written by the database, in the statement that made the move. "
        "[bold]interlock diagram task[/bold] draws the lifecycle; "
        "[bold]interlock db psql[/bold] lets you try to break it.\n"
    )


async def _run_task(console: Console, connection: Connection) -> UUID:
    namespace = f"interlock-demo-{secrets.token_hex(4)}"  # of its own: no other worker claims the task
    task = NewTask(TASK_TYPE, {"to": "ada@example.org"}, namespace=namespace)
    task_id = (await enqueue_task(connection, task, actor="you")).id
    console.print(f"[green]enqueued[/green]  send_email as task {task_id}")
    (first,) = await _claim(connection, "worker-1", namespace, SHORT_LEASE)
    seconds = SHORT_LEASE.total_seconds()
    console.print(f"[green]claimed[/green]   by worker-1 as attempt {first.attempt}, for {seconds:.2f} s")
    console.print("[red]crashed[/red]   worker-1 hangs and does not renew its lease")
    while (recovered_by := await _recover(connection, task_id)) is None:  # noqa: ASYNC110 - the lease must expire
        await asyncio.sleep(seconds / 5)
    console.print(f"[yellow]recovered[/yellow] by {escape(recovered_by)}, which found the lease expired")
    (second,) = await _claim(connection, "worker-2", namespace, LEASE, suspected=True)
    console.print(f"[green]claimed[/green]   by worker-2 as attempt {second.attempt}")
    late = Outcome(task_id, first.attempt, TaskRowEvent.SUCCEED, output="from the dead")
    _, (lost,) = await settle_running_tasks(connection, [late], actor="worker-1")
    console.print(f"[yellow]fenced[/yellow]    worker-1 wakes up and reports attempt {lost.attempt}: lost")
    done = Outcome(task_id, second.attempt, TaskRowEvent.SUCCEED, output={"sent": True}, cost=0.01)
    await settle_running_tasks(connection, [done], actor="worker-2")
    console.print("[green]done[/green]      worker-2 reports success")
    return task_id


async def _claim(
    connection: Connection, worker: str, namespace: str, lease: timedelta, *, suspected: bool = False
) -> list[ClaimedTask]:
    return await claim_pending_tasks(
        connection, actor=worker, types=[TASK_TYPE], namespaces=[namespace], lease=lease, suspected=suspected
    )


async def _recover(connection: Connection, task_id: UUID) -> str | None:
    """Recover expired leases; return which worker recovered the task: any worker of this database may be first."""
    await recover_expired_tasks(connection, actor="worker-2")
    history = await read_task_history(connection, task_id)
    return next((record.actor for record in history if record.event == TaskRowEvent.EXPIRE), None)


async def _try_illegal_moves(console: Console, connection: Connection, task_id: UUID) -> None:
    for text, statement in (
        ("a finished task back to running", "update interlock.tasks set state = 'running' where id = %s"),
        ("a made-up state", "update interlock.tasks set state = 'almost done' where id = %s"),
        ("rewriting history", "update interlock.audit_logs set actor = 'nobody' where task_id = %s"),
    ):
        console.print(f"[bold]{text}[/bold]: [dim]{statement}[/dim]")
        try:
            with translated(connection):
                await connection.execute(statement, [task_id])
        except StoreError as refused:
            console.print(f"  [red]{type(refused).__name__}[/red]: {escape(str(refused))}")
        else:
            raise StoreError(f"the database did not refuse this: {statement}")


async def _show_history(console: Console, connection: Connection, task_id: UUID) -> None:
    table = Table("time (UTC)", "from", "event", "to", "attempt", "actor", "reason", box=None, header_style="bold")
    for record in await read_task_history(connection, task_id):
        table.add_row(
            f"{record.recorded_at:%H:%M:%S.%f}"[:-3],
            record.from_state or "",
            f"[cyan]{record.event}[/cyan]",
            record.to_state,
            str(record.attempt),
            record.actor,
            record.reason or "",
        )
    console.print(table)
