"""`interlock workers`: list and show worker processes, move them through their lifecycle, and send them commands.

A move (pause, resume, terminate) is stored in the worker's row and outlives a restart of its process. A command
(status, refresh, subscribe, unsubscribe) is a notification that the running process answers.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlock.cli.app_context import InJson, Reason, command_config, run_with_app, run_with_connection
from interlock.cli.format import (
    format_fields,
    format_json,
    format_relative_time,
    format_table,
    format_time,
    format_time_and_distance,
    print_note,
)
from interlock.client.app import Interlock
from interlock.errors import InputError
from interlock.lifecycle import SupervisedWorkerEvent, SupervisedWorkerState
from interlock.postgres.notifier import BROADCAST
from interlock.store.explain import count_running_by_worker
from interlock.store.history import read_history
from interlock.store.leader import read_clock
from interlock.store.pools import (
    MAX_DESIRED,
    MAX_NAME,
    NAME_PATTERN,
    NewPool,
    create_pool,
    delete_pool,
    list_pools,
    scale_pool,
)
from interlock.store.remote_commands import (
    ANSWER_TIMEOUT_S,
    Command,
    EventStatus,
    Refresh,
    Status,
    Subscribe,
    Unsubscribe,
    call_processes,
)
from interlock.store.workers import (
    WorkerSpec,
    find_workers,
    kill_worker,
    move_worker,
    read_worker,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from interlock.postgres.connection import Connection

app = typer.Typer(
    help="List and show workers and orchestrators; pause, resume or terminate one, or send it a command.",
    epilog="Example: interlock workers pause host-4711-0a1b --reason 'disk replacement'",
    no_args_is_help=True,
)

LIST_HEADER = ("id", "role", "status", "live", "running", "namespaces", "last heartbeat", "reason")
POOLS_HEADER = ("name", "desired", "members", "live", "workers", "last changed by")
HISTORY_HEADER = ("time (UTC)", "from", "event", "to", "actor", "role", "reason")
TIMES = ("created_at", "updated_at", "heartbeat_at", "seen_until", "restart_at")
PLAIN_FIELDS = (
    "workspace_id",
    "supervisor_id",
    "host",
    "pid",
    "generation",
    "instance",
    "pool",
    "process_note",
    "memory_bytes",
)

Id = Annotated[str, typer.Argument(help="The worker.", metavar="ID")]
PoolName = Annotated[str, typer.Argument(help="The pool.", metavar="NAME")]
Desired = Annotated[int, typer.Argument(help="The desired number of workers.", metavar="N", min=0, max=MAX_DESIRED)]
OptionalId = Annotated[str, typer.Argument(help="The process; all live ones unless given.", metavar="ID")]
Namespace = Annotated[str, typer.Argument(help="The namespace.", metavar="NAMESPACE")]
Seconds = Annotated[float, typer.Option("--timeout", min=0.1, max=600, help="Seconds to wait for answers.")]


@app.command("list")
def list_(
    context: typer.Context,
    status: Annotated[SupervisedWorkerState | None, typer.Option(help="In this state.")] = None,
    role: Annotated[str | None, typer.Option(help="worker or orchestrator.")] = None,
    ended: Annotated[bool, typer.Option("--all", help="Include processes that have ended or vanished.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many workers.")] = 100,
    in_json: InJson = False,
) -> None:
    """List live workers and orchestrators, newest first, with the number of tasks that each runs."""

    async def read(connection: Connection, _: Interlock) -> str:
        found = await find_workers(connection, statuses=None if status is None else [status], role=role, limit=limit)
        running = await count_running_by_worker(connection)
        # a supervised worker claims under the name of its process, `instance`
        rows = [
            row
            | {"role": row["metadata"].get("role", "worker"), "running": running.get(row["instance"] or row["id"], 0)}
            for row in found
            if ended or status is not None or row["live"]
        ]
        if in_json:
            return format_json(rows)
        now = await read_clock(connection)
        return format_table(LIST_HEADER, (_list_row(row, now) for row in rows))

    typer.echo(run_with_connection(context, read))


@app.command()
def show(context: typer.Context, worker_id: Id, in_json: InJson = False) -> None:
    """Show the row of a worker and its recorded moves."""

    async def read(connection: Connection, _: Interlock) -> str:
        row = await read_worker(connection, worker_id)
        moves = [asdict(record) for record in await read_history(connection, "worker", worker_id)]
        if in_json:
            return format_json({**row, "history": moves})
        now = await read_clock(connection)
        head = {
            "id": row["id"],
            "role": row["metadata"].get("role", "worker"),
            "status": row["status"],
            "reason": row["reason"],
            "namespaces": ", ".join(row["namespaces"] or ()) or None,
            "types": ", ".join(row["types"] or ()) or None,
            "leaked_handlers": _format_leaks(row["metadata"].get("statistics") or {}),
            **{name: row.get(name) for name in PLAIN_FIELDS},
            "suspected_tasks": ", ".join(map(str, row["suspected_tasks"])) or None,
            **{name: format_time_and_distance(row.get(name), now) for name in TIMES},
        }
        rows = (
            (
                *(format_time(m["recorded_at"]), m["from_state"], m["event"], m["to_state"]),
                *(m["actor"], m["database_role"], m["reason"]),
            )
            for m in moves
        )
        fields = format_fields((name.replace("_", " "), value) for name, value in head.items())
        return f"{fields}\n\n{format_table(HISTORY_HEADER, rows)}"

    typer.echo(run_with_connection(context, read))


@app.command()
def pause(context: typer.Context, worker_id: Id, reason: Reason = None) -> None:
    """Pause a RUNNING worker: it finishes its tasks and claims nothing new."""
    _move(context, worker_id, SupervisedWorkerEvent.PAUSE, reason)


@app.command()
def resume(context: typer.Context, worker_id: Id, reason: Reason = None) -> None:
    """Resume a PAUSED worker."""
    _move(context, worker_id, SupervisedWorkerEvent.RESUME, reason)


@app.command()
def terminate(
    context: typer.Context,
    worker_id: Id,
    reason: Reason = None,
    force: Annotated[
        bool, typer.Option("--force", help="Kill its process and the process group at once, without its grace.")
    ] = False,
) -> None:
    """Terminate a worker in any state: running tasks get its grace, the others return to the queue."""
    if not force:
        _move(context, worker_id, SupervisedWorkerEvent.TERMINATE, reason)
        return
    run_with_connection(
        context,
        lambda connection, app: kill_worker(connection, worker_id, actor=app.actor, reason=reason, now=app.now()),
    )
    print_note(f"worker {worker_id}: its supervisor kills the process")


@app.command()
def pools(context: typer.Context, in_json: InJson = False) -> None:
    """List the pools of workers, with the numbers of workers that they should have and have."""

    async def read(connection: Connection, _: Interlock) -> str:
        found = await list_pools(connection)
        if in_json:
            return format_json(found)
        rows = (
            (pool["name"], pool["desired"], pool["members"], pool["live"], _format_spec(pool["spec"]), pool["actor"])
            for pool in found
        )
        return format_table(POOLS_HEADER, rows)

    typer.echo(run_with_connection(context, read))


@app.command("add-pool")
def add_pool(
    context: typer.Context,
    name: PoolName,
    desired: Desired,
    app_: Annotated[
        str | None,
        typer.Option(
            "--app",
            help="The app whose tasks they run; that of the supervisor unless given.",
            metavar="PACKAGE.MODULE:APP",
        ),
    ] = None,
    namespaces: Annotated[str | None, typer.Option(help="Claim tasks of these namespaces only.", metavar="A,B")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="The number of concurrent tasks of each worker.")
    ] = None,
    lease: Annotated[
        float | None, typer.Option(min=1, max=86_400, help="Seconds without a renewal after which tasks are recovered.")
    ] = None,
    grace: Annotated[
        float | None, typer.Option(min=0, max=25, help="Seconds that running tasks get when a worker stops.")
    ] = None,
    memory_limit_mb: Annotated[
        float | None, typer.Option(min=1, help="Pause and restart a worker that uses more memory, in megabytes.")
    ] = None,
) -> None:
    """Create a pool of workers: supervisors start the desired number and replace those that end.

    Example: `interlock workers add-pool mail 3 --app shop.tasks:app --namespaces mail`.
    """
    if re.match(NAME_PATTERN, name) is None:
        raise InputError(f"{name!r} is not a name of a pool: up to {MAX_NAME} letters, digits, `_`, `.` and `-`")
    spec = WorkerSpec(
        app=app_,
        namespaces=None if namespaces is None else command_config(context, namespaces=namespaces).namespaces,
        concurrency=concurrency,
        memory_limit_mb=memory_limit_mb,
        lease=lease,
        grace=grace,
    )
    run_with_connection(
        context,
        lambda connection, used: create_pool(
            connection, NewPool(name, desired, spec), actor=used.actor, now=used.now()
        ),
    )
    print_note(f"pool {name}: {desired} desired")


@app.command()
def scale(context: typer.Context, name: PoolName, desired: Desired) -> None:
    """Set the desired number of workers of a pool. Workers too many finish their tasks within their grace."""
    run_with_connection(
        context,
        lambda connection, used: scale_pool(connection, name, desired, actor=used.actor, now=used.now()),
    )
    print_note(f"pool {name}: {desired} desired")


@app.command("delete-pool")
def delete_pool_(context: typer.Context, name: PoolName) -> None:
    """Delete a pool and end its workers, which finish their tasks within their grace."""
    run_with_connection(
        context, lambda connection, used: delete_pool(connection, name, actor=used.actor, now=used.now())
    )
    print_note(f"pool {name}: deleted")


@app.command()
def status(
    context: typer.Context,
    worker_id: OptionalId = BROADCAST,
    events: Annotated[
        bool, typer.Option("--events", help="Only the counters of the event system between worker and handlers.")
    ] = False,
    timeout: Seconds = ANSWER_TIMEOUT_S,
) -> None:
    """Ask running processes for their state. Prints JSON by process."""
    _call(context, EventStatus() if events else Status(), worker_id, timeout)


@app.command()
def refresh(context: typer.Context, worker_id: OptionalId = BROADCAST, timeout: Seconds = ANSWER_TIMEOUT_S) -> None:
    """Ask running processes to reread paused namespaces and look for work at once. Prints JSON by process."""
    _call(context, Refresh(), worker_id, timeout)


@app.command()
def subscribe(context: typer.Context, worker_id: Id, namespace: Namespace, timeout: Seconds = ANSWER_TIMEOUT_S) -> None:
    """Ask a running worker to claim tasks of a namespace too, until its process ends. Prints its answer as JSON."""
    _call(context, Subscribe(namespace), worker_id, timeout)


@app.command()
def unsubscribe(
    context: typer.Context, worker_id: Id, namespace: Namespace, timeout: Seconds = ANSWER_TIMEOUT_S
) -> None:
    """Ask a running worker to claim no more tasks of a namespace, until its process ends. Prints its answer as JSON."""
    _call(context, Unsubscribe(namespace), worker_id, timeout)


def _format_leaks(statistics: Mapping[str, Any]) -> str | None:
    leaked: Mapping[str, int] = statistics.get("leaked") or {}
    return ", ".join(f"{type_} ({count})" for type_, count in sorted(leaked.items())) or None


def _format_spec(spec: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={','.join(value) if isinstance(value, list) else value}" for name, value in sorted(spec.items())
    )


def _list_row(row: dict[str, Any], now: datetime) -> Sequence[object]:
    heartbeat = None if row["heartbeat_at"] is None else format_relative_time(row["heartbeat_at"], now)
    live = "yes" if row["live"] else "no"
    namespaces = ", ".join(row["namespaces"] or ())
    return row["id"], row["role"], row["status"], live, row["running"], namespaces, heartbeat, row["reason"]


def _move(context: typer.Context, worker_id: str, event: SupervisedWorkerEvent, reason: str | None) -> None:
    move = run_with_connection(
        context,
        lambda connection, app: move_worker(
            connection, worker_id, event, actor=app.actor, reason=reason, now=app.now()
        ),
    )
    print_note(f"worker {worker_id}: {move.from_state} -> {move.to_state}")


def _call(context: typer.Context, command: Command, to: str, timeout: float) -> None:
    async def call(app: Interlock) -> dict[str, dict[str, Any]]:
        return await call_processes(app.url, command, to, seconds=timeout)

    answers = run_with_app(Interlock(config=context.obj), call)
    typer.echo(format_json(answers))
    if not answers:
        print_note(f"no answer within {timeout:g} s; `interlock workers list` shows the live processes")
    if not answers or any("error" in answer for answer in answers.values()):
        raise typer.Exit(1)
