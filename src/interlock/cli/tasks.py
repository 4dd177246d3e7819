"""`interlock tasks`: list tasks; cancel or requeue them by id or by filter.

Invariant: before anything changes, the command shows how many tasks it affects and which, and the user confirms, on the
terminal or with --yes.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer

from interlock.cli.app_context import InJson, Reason, Yes, database_running, run_with_app
from interlock.cli.enqueue import parse_past_time
from interlock.cli.format import format_json, format_table, format_time, print_note
from interlock.client.app import Interlock
from interlock.client.task_handle import UNFINISHED, Affected, TaskHandle, TaskStatus, refuse_step, task_filter
from interlock.errors import ConfigError
from interlock.lifecycle import TASK_ROW, TaskRowEvent, TaskRowState
from interlock.store.leader import read_clock
from interlock.store.lists import MAX_LOOKED_AT, ListPage
from interlock.store.task_admin import TaskSummary

app = typer.Typer(
    help="List tasks; cancel or requeue them, by id or by filter.",
    epilog="Example: interlock tasks requeue --type charge --reason 'bank is back'",
    no_args_is_help=True,
)

PREVIEW_SIZE = 10
HEADER = ("id", "state", "namespace", "type", "tries", "due (UTC)", "reason")
NO_EFFECT = frozenset({"ended", "not requeued"})
REQUEUEABLE = tuple(state for state in TaskRowState if TASK_ROW.can(state, TaskRowEvent.REQUEUE))

Shown = TaskSummary | TaskStatus

Ids = Annotated[list[str] | None, typer.Argument(help="The tasks; or give a filter.", metavar="ID")]
States = Annotated[list[TaskRowState] | None, typer.Option("--state", help="In this state; can be repeated.")]
Namespace = Annotated[str | None, typer.Option(help="Of this namespace.")]
Type = Annotated[str | None, typer.Option("--type", help="Of this type.")]
Tag = Annotated[str | None, typer.Option(help="With this tag.")]
Most = Annotated[int | None, typer.Option("--limit", min=1, help="At most so many tasks, newest first.")]
Every = Annotated[bool, typer.Option("--all", help="All tasks in a state that allows it.")]
Preview = Annotated[bool, typer.Option("--preview", help="Show how many tasks match the filter, and change nothing.")]


@app.command("list")
def list_(
    context: typer.Context,
    state: States = None,
    namespace: Namespace = None,
    type_: Type = None,
    tag: Tag = None,
    job: Annotated[str | None, typer.Option(help="Steps of this job.", metavar="ID")] = None,
    worker: Annotated[str | None, typer.Option(help="Held by this worker now or last.", metavar="ID")] = None,
    correlation_id: Annotated[str | None, typer.Option(help="With this correlation id.", metavar="ID")] = None,
    request_id: Annotated[str | None, typer.Option(help="Enqueued with this request id.", metavar="ID")] = None,
    unique_key: Annotated[str | None, typer.Option(help="With this unique key.", metavar="KEY")] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Enqueued at this time or later: 2h (ago), or a time with its zone.", metavar="TIME"),
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Enqueued before this time: 2h (ago), or a time with its zone.", metavar="TIME")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many tasks.")] = 20,
    before: Annotated[
        str | None, typer.Option(help="Continue after this task, the last of the previous page.", metavar="ID")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Search the whole table, which takes long with millions of tasks.")
    ] = False,
    in_json: InJson = False,
) -> None:
    """List tasks that meet all conditions, newest first.

    Types, tags, namespaces and the state done are looked for among the newest 10,000 tasks; --before goes on there.

    Example: `interlock tasks list --state error --type charge --since 2h`.
    """

    async def find(used: Interlock) -> ListPage[TaskSummary]:
        async with used.connection() as connection:
            now = await read_clock(connection, now=used.now())
        wanted = task_filter(
            [str(each) for each in state] if state else None,
            namespace,
            type_,
            tag,
            job=job,
            worker=worker,
            correlation_id=correlation_id,
            request_id=request_id,
            unique_key=unique_key,
            created_after=parse_past_time("--since", since, now),
            created_before=parse_past_time("--until", until, now),
        )
        cursor = None if before is None else used.handle(before).id
        page = await used.find_page(wanted, limit=limit, before=cursor)
        found = list(page.items)
        while every and page.next is not None and len(found) < limit:
            page = await used.find_page(wanted, limit=limit - len(found), before=page.next)
            found += page.items
        return ListPage(found, page.next)

    page = run_with_app(Interlock(config=context.obj), find)
    if in_json:
        typer.echo(format_json([asdict(task) for task in page.items]))
    else:
        typer.echo(format_tasks(page.items))
    if page.next is not None:
        looked = (
            "there may be more" if len(page.items) == limit else f"looked at {MAX_LOOKED_AT} tasks, --all at every one"
        )
        print_note(f"{looked}: --before {page.next}")


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
        bool, typer.Option("--force", help="Cancel running tasks at once, without waiting for their workers.")
    ] = False,
    preview: Preview = False,
    yes: Yes = False,
    in_json: InJson = False,
) -> None:
    """Cancel unfinished tasks. Workers are asked to stop running ones; --force cancels them at once."""
    used = Interlock(config=context.obj)

    async def by_id(handle: TaskHandle[Any]) -> str:
        return await handle.cancel(reason, force=force)

    act = BulkAction(
        verb="cancel",
        done="canceled" if force else "canceled, or asked of their workers",
        allowed=UNFINISHED,
        default=UNFINISHED,
        by_filter=partial(used.cancel, reason=reason, force=force),
        by_id=by_id,
    )
    asked = Asked(every=every, preview=preview, yes=yes, in_json=in_json)
    perform(used, act, ids or [], _wanted(state, namespace, type_, tag, limit), asked)


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
    preview: Preview = False,
    yes: Yes = False,
    in_json: InJson = False,
) -> None:
    """Give ended tasks a new set of tries: those in error, or with --state canceled the canceled ones.

    Steps are left out: `interlock jobs retry` submits a new job from a step on.
    """
    used = Interlock(config=context.obj)

    async def by_id(handle: TaskHandle[Any]) -> str:
        return "requeued" if await handle.requeue(reason) else "not requeued"

    act = BulkAction(
        verb="requeue",
        done="requeued",
        allowed=REQUEUEABLE,
        default=(TaskRowState.ERROR,),
        by_filter=partial(used.requeue, reason=reason),
        by_id=by_id,
        check=refuse_step,
    )
    asked = Asked(every=every, preview=preview, yes=yes, in_json=in_json)
    perform(used, act, ids or [], _wanted(state, namespace, type_, tag, limit), asked)


def _wanted(
    states: Sequence[TaskRowState] | None, namespace: str | None, type_: str | None, tag: str | None, limit: int | None
) -> dict[str, Any]:
    names = [str(state) for state in states] if states else None
    return {"states": names, "namespace": namespace, "type": type_, "tag": tag, "limit": limit}


@dataclass(frozen=True, slots=True)
class BulkAction:
    """An operation on tasks in the states `allowed`; by filter it applies to those in the states `default`."""

    verb: str
    done: str
    allowed: tuple[str, ...]
    default: tuple[str, ...]
    by_filter: Callable[..., Awaitable[Affected]]
    by_id: Callable[[TaskHandle[Any]], Awaitable[str]]
    check: Callable[[TaskStatus], None] | None = None  # raises for a task that it does not apply to, before any changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How an operation is to be performed: the flags of the command."""

    every: bool
    preview: bool
    yes: bool
    in_json: bool


def perform(app: Interlock, act: BulkAction, ids: Sequence[str], given: dict[str, Any], asked: Asked) -> None:
    """Check the arguments, show a preview, ask, execute, and print the result."""
    wanted = {name: value for name, value in given.items() if value is not None}
    wanted = _check_filter(act, ids, wanted, every=asked.every)
    # The question is asked outside of an event loop: inside one, Ctrl-C would not end it.
    with database_running(app):
        if ids and asked.preview:
            raise ConfigError("--preview is for a filter; `interlock tasks list` and `interlock status ID` show tasks")
        if ids:
            _perform_by_id(app, act, list(dict.fromkeys(ids)), yes=asked.yes, in_json=asked.in_json)
        else:
            _perform_by_filter(app, act, wanted, asked)


def format_tasks(tasks: Iterable[Shown]) -> str:
    """Format tasks as a table."""
    return format_table(
        HEADER,
        (
            (
                task.id,
                task.state,
                task.namespace,
                task.type,
                f"{task.tries}/{task.max_tries}",
                format_time(task.run_at),
                task.reason,
            )
            for task in tasks
        ),
    )


def _check_filter(act: BulkAction, ids: Sequence[str], wanted: dict[str, Any], *, every: bool) -> dict[str, Any]:
    """Refuse a missing filter, a filter beside ids, and states that the action does not apply to."""
    filtered = every or bool(wanted)
    if ids and filtered:
        raise ConfigError(f"{act.verb} takes ids or a filter, not both")
    if not ids and not filtered:
        raise ConfigError(f"{act.verb} needs ids, a filter such as --type, or --all")
    wrong = sorted(set(wanted.get("states", ())) - set(act.allowed))
    if wrong:
        raise ConfigError(f"{act.verb} is not for tasks in state {wrong[0]}, only for {', '.join(act.allowed)}")
    return {"states": act.default, **wanted}


def _perform_by_filter(app: Interlock, act: BulkAction, wanted: dict[str, Any], asked: Asked) -> None:
    found = run_with_app(app, lambda _: act.by_filter(**wanted, preview=True))
    touched, done = found, act.done
    if asked.preview:
        done = f"would be {act.done}"
        if found.count and not asked.in_json:
            print_note(_format_preview(found.count, found.tasks))
    elif found.count:
        _confirm(act, found.count, found.tasks, yes=asked.yes)
        touched = run_with_app(app, lambda _: act.by_filter(**wanted, horizon=found.horizon))
    document: dict[str, Any] = {"count": touched.count, "tasks": [asdict(task) for task in touched.tasks]}
    if touched.steps_left_out:
        document["steps_left_out"] = touched.steps_left_out
    if asked.preview:
        document["preview"] = True
    typer.echo(format_json(document) if asked.in_json else f"{_number(touched.count)} {done}")
    if touched.count < found.count:
        print_note(f"{found.count - touched.count} others changed meanwhile, or another task has their unique key")
    if touched.steps_left_out:
        steps = f"{touched.steps_left_out} step{'' if touched.steps_left_out == 1 else 's'} of jobs"
        print_note(f"left out {steps}: `interlock jobs retry` submits a new job from a step on")


def _perform_by_id(app: Interlock, act: BulkAction, ids: Sequence[str], *, yes: bool, in_json: bool) -> None:
    found = run_with_app(app, partial(_read_tasks, ids=ids))
    if act.check is not None:
        for task in found:
            act.check(task)
    _confirm(act, len(found), found, yes=yes)
    outcomes = run_with_app(app, partial(_execute, act=act, tasks=found))
    typer.echo(
        format_json(outcomes) if in_json else "\n".join(f"{id_}  {outcome}" for id_, outcome in outcomes.items())
    )
    if NO_EFFECT & set(outcomes.values()):
        print_note(f"{act.verb} is only for tasks that are {', '.join(act.allowed)}")
        raise typer.Exit(1)


async def _read_tasks(app: Interlock, *, ids: Sequence[str]) -> list[TaskStatus]:
    return [await app.handle(id_).status() for id_ in ids]


async def _execute(app: Interlock, *, act: BulkAction, tasks: Sequence[TaskStatus]) -> dict[str, str]:
    return {str(task.id): await act.by_id(app.handle(task.id)) for task in tasks}


def _confirm(act: BulkAction, count: int, tasks: Sequence[Shown], *, yes: bool) -> None:
    """Show the tasks that are about to change and ask for confirmation."""
    if yes:
        return
    print_note(_format_preview(count, tasks))
    if not sys.stdin.isatty():
        raise ConfigError(f"{act.verb} {_number(count)}? There is no terminal to ask on; --yes does it without asking")
    if not typer.confirm(f"{act.verb} {_number(count)}?", err=True):
        print_note("nothing was changed")
        raise typer.Exit(1)


def _format_preview(count: int, tasks: Sequence[Shown]) -> str:
    shown = format_tasks(tasks[:PREVIEW_SIZE])
    return f"{shown}\n… and {count - PREVIEW_SIZE} more" if count > PREVIEW_SIZE else shown


def _number(count: int) -> str:
    return f"{count} task{'' if count == 1 else 's'}"
