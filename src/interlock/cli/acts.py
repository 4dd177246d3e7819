"""Acts of an operator on tasks, by id or by filter: previewed, confirmed, done and told.

Invariant: nothing is changed before it was shown how many tasks that touches and which, and a person said yes, or the
command line did.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import typer

from interlock.cli.opening import located, run
from interlock.cli.output import tell
from interlock.cli.tables import as_json, moment, table
from interlock.client.acts import Affected
from interlock.client.app import Interlock
from interlock.client.handle import TaskHandle, TaskStatus
from interlock.errors import ConfigError
from interlock.store.selection import TaskSummary

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
    with located(app):
        if ids:
            _perform_by_id(app, act, list(dict.fromkeys(ids)), yes=yes, in_json=in_json)
        else:
            _perform_by_filter(app, act, wanted, yes=yes, in_json=in_json)


def listed(tasks: Iterable[Shown]) -> str:
    """Write tasks as a table."""
    return table(
        HEADER,
        (
            (
                task.id,
                task.state,
                task.namespace,
                task.type,
                f"{task.tries}/{task.max_tries}",
                moment(task.run_at),
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
    found = run(app, lambda _: act.by_filter(**wanted, preview=True))
    touched = found
    if found.count:
        _confirm(act, found.count, found.tasks, yes=yes)
        touched = run(app, lambda _: act.by_filter(**wanted))
    document = {"count": touched.count, "tasks": [asdict(task) for task in touched.tasks]}
    if touched.steps_left_out:
        document["steps_left_out"] = touched.steps_left_out
    typer.echo(as_json(document) if in_json else f"{_number(touched.count)} {act.done}")
    if touched.count < found.count:
        tell(f"{found.count - touched.count} others changed meanwhile, or another task has their unique key now")
    if touched.steps_left_out:
        steps = f"{touched.steps_left_out} step{'' if touched.steps_left_out == 1 else 's'} of jobs"
        tell(f"left out {steps}: `interlock jobs retry` submits a job anew from a step on")


def _perform_by_id(app: Interlock, act: Act, ids: Sequence[str], *, yes: bool, in_json: bool) -> None:
    found = run(app, partial(_read, ids=ids))
    if act.check is not None:
        for task in found:
            act.check(task)
    _confirm(act, len(found), found, yes=yes)
    outcomes = run(app, partial(_do, act=act, tasks=found))
    typer.echo(as_json(outcomes) if in_json else "\n".join(f"{id_}  {outcome}" for id_, outcome in outcomes.items()))
    if IN_VAIN & set(outcomes.values()):
        tell(f"{act.verb} is only for tasks that are {', '.join(act.possible)}")
        raise typer.Exit(1)


async def _read(app: Interlock, *, ids: Sequence[str]) -> list[TaskStatus]:
    return [await app.handle(id_).status() for id_ in ids]


async def _do(app: Interlock, *, act: Act, tasks: Sequence[TaskStatus]) -> dict[str, str]:
    return {str(task.id): await act.by_id(app.handle(task.id)) for task in tasks}


def _confirm(act: Act, count: int, tasks: Sequence[Shown], *, yes: bool) -> None:
    """Show what is about to be changed and have it confirmed."""
    if yes:
        return
    tell(listed(tasks[:PREVIEWED]))
    if count > PREVIEWED:
        tell(f"… and {count - PREVIEWED} more")
    if not sys.stdin.isatty():
        raise ConfigError(f"{act.verb} {_number(count)}? There is nobody to ask; --yes does it without asking")
    if not typer.confirm(f"{act.verb} {_number(count)}?", err=True):
        tell("nothing was changed")
        raise typer.Exit(1)


def _number(count: int) -> str:
    return f"{count} task{'' if count == 1 else 's'}"
