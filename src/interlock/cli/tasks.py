"""`interlock tasks`: finds tasks, and cancels or requeues them by id or by filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from interlock.cli.acts import Act, listed, perform
from interlock.cli.opening import run
from interlock.cli.output import tell
from interlock.cli.tables import as_json
from interlock.client.acts import UNFINISHED
from interlock.client.app import Interlock
from interlock.client.handle import TaskHandle, refuse_step
from interlock.lifecycle import TaskRowState
from interlock.store.selection import TaskSummary

app = typer.Typer(help="Find tasks; cancel or requeue them, by id or by filter.", no_args_is_help=True)

Ids = Annotated[list[str] | None, typer.Argument(help="The tasks; or use a filter.", metavar="ID")]
States = Annotated[list[TaskRowState] | None, typer.Option("--state", help="In this state; may be given again.")]
Namespace = Annotated[str | None, typer.Option(help="Of this namespace.")]
Type = Annotated[str | None, typer.Option("--type", help="Of this type.")]
Tag = Annotated[str | None, typer.Option(help="With this tag.")]
Most = Annotated[int | None, typer.Option("--limit", min=1, help="At most so many, the newest first.")]
Every = Annotated[bool, typer.Option("--all", help="No filter: all tasks to which it can be done.")]
Reason = Annotated[str | None, typer.Option(help="Why, for the records.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Show nothing first, and do not ask.")]
InJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(
    context: typer.Context,
    state: States = None,
    namespace: Namespace = None,
    type_: Type = None,
    tag: Tag = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many, the newest first.")] = 20,
    before: Annotated[
        str | None, typer.Option(help="Go on after this task, the last of the page before.", metavar="ID")
    ] = None,
    in_json: InJson = False,
) -> None:
    """List tasks, the newest first."""

    async def find(used: Interlock) -> list[TaskSummary]:
        after = None if before is None else used.handle(before).id
        wanted = _wanted(state, namespace, type_, tag, limit)
        return await used.find(**wanted, before=after)

    found = run(Interlock(config=context.obj), find)
    if in_json:
        typer.echo(as_json([asdict(task) for task in found]))
    else:
        typer.echo(listed(found))
    if len(found) == limit:
        tell(f"there may be more: --before {found[-1].id}")


@app.command()
def cancel(
    context: typer.Context,
    ids: Ids = None,
    state: States = None,
    namespace: Namespace = None,
    type_: Type = None,
    tag: Tag = None,
    limit: Most = None,
    every: Every = False,
    reason: Reason = None,
    force: Annotated[
        bool, typer.Option("--force", help="Running ones at once too, without waiting for their workers to stop.")
    ] = False,
    yes: Yes = False,
    in_json: InJson = False,
) -> None:
    """Cancel tasks that have not ended. Of those that run, the workers are asked to stop, unless --force is given."""
    used = Interlock(config=context.obj)

    async def by_id(handle: TaskHandle[Any]) -> str:
        return await handle.cancel(reason, force=force)

    act = Act(
        verb="cancel",
        done="canceled" if force else "canceled, or asked of their workers",
        possible=UNFINISHED,
        usual=UNFINISHED,
        by_filter=partial(used.cancel, reason=reason, force=force),
        by_id=by_id,
    )
    perform(used, act, ids or [], _wanted(state, namespace, type_, tag, limit), every=every, yes=yes, in_json=in_json)


@app.command()
def requeue(
    context: typer.Context,
    ids: Ids = None,
    state: States = None,
    namespace: Namespace = None,
    type_: Type = None,
    tag: Tag = None,
    limit: Most = None,
    every: Every = False,
    reason: Reason = None,
    yes: Yes = False,
    in_json: InJson = False,
) -> None:
    """Give tasks a new set of tries: those in error, or with --state canceled the canceled ones. Not steps of jobs."""
    used = Interlock(config=context.obj)

    async def by_id(handle: TaskHandle[Any]) -> str:
        return "requeued" if await handle.requeue(reason) else "not requeued"

    act = Act(
        verb="requeue",
        done="requeued",
        possible=("error", "canceled"),
        usual=("error",),
        by_filter=partial(used.requeue, reason=reason),
        by_id=by_id,
        check=refuse_step,
    )
    perform(used, act, ids or [], _wanted(state, namespace, type_, tag, limit), every=every, yes=yes, in_json=in_json)


def _wanted(
    states: Sequence[TaskRowState] | None, namespace: str | None, type_: str | None, tag: str | None, limit: int | None
) -> dict[str, Any]:
    names = [str(state) for state in states] if states else None
    return {"states": names, "namespace": namespace, "type": type_, "tag": tag, "limit": limit}
