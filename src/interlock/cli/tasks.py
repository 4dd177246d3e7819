"""`interlock tasks`: finds tasks, and cancels or requeues them by id or by filter."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer

from interlock.cli.app_context import database_running, run_with_app
from interlock.cli.format import format_json, format_table, format_time, print_note
from interlock.client.app import Interlock
from interlock.client.task_handle import UNFINISHED, Affected, TaskHandle, TaskStatus, refuse_step
from interlock.errors import ConfigError
from interlock.lifecycle import TaskRowState
from interlock.store.task_admin import TaskSummary

# SECTION cli/acts
# Acts of an operator on tasks, by id or by filter: previewed, confirmed, done and told.
#
# Invariant: nothing is changed before it was shown how many tasks that touches and which, and a person said yes, or the
# command line did.

PREVIEWED = 10
HEADER = ("id", "state", "namespace", "type", "tries", "due (UTC)", "reason")
IN_VAIN = frozenset({"ended", "not requeued"})

Shown = TaskSummary | TaskStatus


@dataclass(frozen=True, slots=True)
class Act:
    """Something to do to tasks in the `possible` states; by filter it is done to those in the `usual` ones."""

    verb: str
    done: str
    possible: tuple[str, ...]
    usual: tuple[str, ...]
    by_filter: Callable[..., Awaitable[Affected]]
    by_id: Callable[[TaskHandle[Any]], Awaitable[str]]
    check: Callable[[TaskStatus], None] | None = None  # refuses a task that it is not for, before any is touched


def perform(
    app: Interlock, act: Act, ids: Sequence[str], given: dict[str, Any], *, every: bool, yes: bool, in_json: bool
) -> None:
    """Check what was asked for, preview it, ask, do it and tell what came of it."""
    wanted = _checked(act, ids, {name: value for name, value in given.items() if value is not None}, every=every)
    # Asked outside of any event loop, in which Ctrl-C would not end a question.
    with database_running(app):
        if ids:
            _perform_by_id(app, act, list(dict.fromkeys(ids)), yes=yes, in_json=in_json)
        else:
            _perform_by_filter(app, act, wanted, yes=yes, in_json=in_json)


def listed(tasks: Iterable[Shown]) -> str:
    """Write tasks as a table."""
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


def _checked(act: Act, ids: Sequence[str], wanted: dict[str, Any], *, every: bool) -> dict[str, Any]:
    """Refuse a filter that says nothing, something else than the ids do, or something impossible."""
    filtered = every or bool(wanted)
    if ids and filtered:
        raise ConfigError(f"{act.verb} takes ids or a filter, not both")
    if not ids and not filtered:
        raise ConfigError(f"{act.verb} what? Give ids, a filter such as --type, or --all")
    wrong = sorted(set(wanted.get("states", ())) - set(act.possible))
    if wrong:
        raise ConfigError(f"{act.verb} is not for tasks in state {wrong[0]}, only for {', '.join(act.possible)}")
    return {"states": act.usual, **wanted}


def _perform_by_filter(app: Interlock, act: Act, wanted: dict[str, Any], *, yes: bool, in_json: bool) -> None:
    found = run_with_app(app, lambda _: act.by_filter(**wanted, preview=True))
    touched = found
    if found.count:
        _confirm(act, found.count, found.tasks, yes=yes)
        touched = run_with_app(app, lambda _: act.by_filter(**wanted))
    document = {"count": touched.count, "tasks": [asdict(task) for task in touched.tasks]}
    if touched.steps_left_out:
        document["steps_left_out"] = touched.steps_left_out
    typer.echo(format_json(document) if in_json else f"{_number(touched.count)} {act.done}")
    if touched.count < found.count:
        print_note(f"{found.count - touched.count} others changed meanwhile, or another task has their unique key now")
    if touched.steps_left_out:
        steps = f"{touched.steps_left_out} step{'' if touched.steps_left_out == 1 else 's'} of jobs"
        print_note(f"left out {steps}: `interlock jobs retry` submits a job anew from a step on")


def _perform_by_id(app: Interlock, act: Act, ids: Sequence[str], *, yes: bool, in_json: bool) -> None:
    found = run_with_app(app, partial(_read, ids=ids))
    if act.check is not None:
        for task in found:
            act.check(task)
    _confirm(act, len(found), found, yes=yes)
    outcomes = run_with_app(app, partial(_do, act=act, tasks=found))
    typer.echo(
        format_json(outcomes) if in_json else "\n".join(f"{id_}  {outcome}" for id_, outcome in outcomes.items())
    )
    if IN_VAIN & set(outcomes.values()):
        print_note(f"{act.verb} is only for tasks that are {', '.join(act.possible)}")
        raise typer.Exit(1)


async def _read(app: Interlock, *, ids: Sequence[str]) -> list[TaskStatus]:
    return [await app.handle(id_).status() for id_ in ids]


async def _do(app: Interlock, *, act: Act, tasks: Sequence[TaskStatus]) -> dict[str, str]:
    return {str(task.id): await act.by_id(app.handle(task.id)) for task in tasks}


def _confirm(act: Act, count: int, tasks: Sequence[Shown], *, yes: bool) -> None:
    """Show what is about to be changed and have it confirmed."""
    if yes:
        return
    print_note(listed(tasks[:PREVIEWED]))
    if count > PREVIEWED:
        print_note(f"… and {count - PREVIEWED} more")
    if not sys.stdin.isatty():
        raise ConfigError(f"{act.verb} {_number(count)}? There is nobody to ask; --yes does it without asking")
    if not typer.confirm(f"{act.verb} {_number(count)}?", err=True):
        print_note("nothing was changed")
        raise typer.Exit(1)


def _number(count: int) -> str:
    return f"{count} task{'' if count == 1 else 's'}"


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

    found = run_with_app(Interlock(config=context.obj), find)
    if in_json:
        typer.echo(format_json([asdict(task) for task in found]))
    else:
        typer.echo(listed(found))
    if len(found) == limit:
        print_note(f"there may be more: --before {found[-1].id}")


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
