"""`interlock enqueue`: a task from the command line, checked against its signature where the app is known.

Invariant: everything that was typed is checked before anything is stored; standard output has ids, or results.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any

import typer

from interlock.cli.app_context import command_config, load_command_app, run_with_app
from interlock.cli.format import format_json, print_note
from interlock.client.app import Interlock
from interlock.client.task import unchecked_task
from interlock.client.task_handle import TaskHandle
from interlock.errors import ConfigError, DefinitionError, InterlockError
from interlock.model.backoff import KINDS
from interlock.model.graph import BUILT_IN_HANDLER
from interlock.model.options import checked
from interlock.store.tasks import NewTask

MOST = 1_000_000
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
LONGEST = 1_000 * 366 * SECONDS["d"]  # a thousand years, beyond which sums of times overflow somewhere
_SPAN = re.compile(r"^(\d+(?:\.\d+)?) *([smhd]?)$")


Type = Annotated[str, typer.Argument(help="The name of the task.", metavar="TYPE")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        help="Its arguments: a JSON object, or name=value. A value that is no JSON is a text.",
        metavar="JSON|NAME=VALUE",
    ),
]
App = Annotated[
    str | None,
    typer.Option(help="Check the arguments against the task's signature in this app.", metavar="PACKAGE.MODULE:APP"),
]
Unchecked = Annotated[bool, typer.Option("--unchecked", help="Store as given, even where the settings name an app.")]
Namespace = Annotated[str | None, typer.Option(help="Where to enqueue it.")]
Priority = Annotated[int | None, typer.Option(help="Higher runs sooner.")]
Delay = Annotated[str | None, typer.Option(help="Not before: 90, 90s, 5m, 2h, 1d.", metavar="TIME")]
RunAt = Annotated[
    str | None, typer.Option(help="Not before this time, with its zone: 2030-01-01T09:00:00Z.", metavar="ISO")
]
UniqueKey = Annotated[str | None, typer.Option(help="Only if no unfinished task has this key; else give that task.")]
RequestId = Annotated[str | None, typer.Option(help="Only once for this request, however often it is sent.")]
MaxTries = Annotated[int | None, typer.Option(help="How often to try.")]
Timeout = Annotated[str | None, typer.Option(help="How long one try may take: 90, 5m.", metavar="TIME")]
BackoffKind = Annotated[
    str | None, typer.Option("--backoff", help="How long to rest between tries.", metavar="|".join(KINDS))
]
CorrelationId = Annotated[str | None, typer.Option(help="A UUID that goes into logs and events.", metavar="UUID")]
LimitKey = Annotated[str | None, typer.Option(help="The limit under which it runs.")]
Tags = Annotated[list[str] | None, typer.Option(help="A word to find it by; may be given again.")]
CallbackUrl = Annotated[str | None, typer.Option(help="Where to post how it ended.", metavar="URL")]
Count = Annotated[int, typer.Option(min=1, max=MOST, help="Enqueue it so many times.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for its end and print the result as JSON.")]
WaitTimeout = Annotated[str | None, typer.Option(help="Wait no longer than this; implies --wait.", metavar="TIME")]
InJson = Annotated[bool, typer.Option("--json", help="Print a line of JSON for each task.")]


def enqueue(
    context: typer.Context,
    type_: Type,
    arguments: Arguments = None,
    app: App = None,
    unchecked: Unchecked = False,
    namespace: Namespace = None,
    priority: Priority = None,
    delay: Delay = None,
    run_at: RunAt = None,
    unique_key: UniqueKey = None,
    request_id: RequestId = None,
    max_tries: MaxTries = None,
    timeout: Timeout = None,
    backoff: BackoffKind = None,
    correlation_id: CorrelationId = None,
    limit_key: LimitKey = None,
    tag: Tags = None,
    callback_url: CallbackUrl = None,
    count: Count = 1,
    wait: Wait = False,
    wait_timeout: WaitTimeout = None,
    in_json: InJson = False,
) -> None:
    """Enqueue a task and print its id; with --wait, print its result, or fail as it did."""
    longest = _span("--wait-timeout", wait_timeout)
    if count > 1 and {unique_key, request_id} != {None}:
        raise ConfigError("--count would give the same task again under one --unique-key or --request-id")
    given = _given(arguments)
    options = _options(
        namespace=namespace,
        priority=priority,
        delay=_span("--delay", delay),
        run_at=_time("--run-at", run_at),
        unique_key=unique_key,
        request_id=request_id,
        max_tries=max_tries,
        timeout=_span("--timeout", timeout),
        backoff=backoff,
        correlation_id=correlation_id,
        limit_key=limit_key,
        tags=tag,
        callback_url=callback_url,
    )
    config = command_config(context, app=app)
    if config.app is None or unchecked:
        used, task = Interlock(config=config), unchecked_task(type_, given, options, config.callback_url)
    else:
        used = load_command_app(context, config.app)
        task = _checked_task(used, config.app, type_, given, options)
    show = partial(_wait, longest=longest) if wait or longest is not None else _print_ids
    if not run_with_app(used, partial(_enqueue, tasks=[task] * count, show=partial(show, in_json=in_json))):
        raise typer.Exit(1)


async def _enqueue(
    app: Interlock, *, tasks: Sequence[NewTask], show: Callable[[Sequence[TaskHandle[Any]]], Awaitable[bool]]
) -> bool:
    handles = await app.enqueue_many(tasks)
    for handle in handles:
        if not handle.created:
            print_note(f"task {handle.id} was there already")
    return await show(handles)


async def _print_ids(handles: Sequence[TaskHandle[Any]], *, in_json: bool) -> bool:
    for handle in handles:
        typer.echo(format_json({"id": handle.id, "created": handle.created}, pretty=False) if in_json else handle.id)
    return True


async def _wait(handles: Sequence[TaskHandle[Any]], *, longest: float | None, in_json: bool) -> bool:
    """Wait for all, and print how each ended, in order; tell whether all went well."""
    for handle in handles:
        if handle.created:
            print_note(f"enqueued task {handle.id}")
    failures = await asyncio.gather(*(_failure(handle, longest) for handle in handles))
    for handle, failure in zip(handles, failures, strict=True):
        await _print_end(handle, failure, in_json=in_json)
    return not any(failures)


async def _failure(handle: TaskHandle[Any], longest: float | None) -> InterlockError | None:
    """Wait for the end of a task, and give what went wrong."""
    try:
        await handle.result(longest)
    except TimeoutError as error:
        return InterlockError(f"{error}; it goes on, and `interlock status {handle.id}` tells how")
    except InterlockError as error:
        return error
    return None


async def _print_end(handle: TaskHandle[Any], failure: InterlockError | None, *, in_json: bool) -> None:
    status = await handle.status()
    if in_json:
        shown = {name: getattr(status, name) for name in ("id", "state", "output", "error")}
        typer.echo(format_json({"created": handle.created, **shown}, pretty=False))
    elif failure is None:
        typer.echo(format_json(status.output, pretty=False))
    if failure is not None:
        print_note(f"interlock: {failure}")


def _checked_task(
    app: Interlock, reference: str, type_: str, given: dict[str, Any], options: dict[str, Any]
) -> NewTask:
    task = app.tasks.get(type_)
    if task is None:
        known = ", ".join(sorted(app.tasks.keys() - {BUILT_IN_HANDLER})) or "none"
        raise ConfigError(f"the app {reference} has no task {type_!r}; it has {known}")
    return task.options(**options).prepare(**task.decode(given))


def _options(**given: Any) -> dict[str, Any]:
    options = {name: value for name, value in given.items() if value not in (None, [])}
    try:
        checked(options)
    except (ValueError, DefinitionError) as error:
        raise ConfigError(f"enqueue: {error}") from None
    return options


def _given(arguments: Sequence[str] | None) -> dict[str, Any]:
    """Read the arguments of the task."""
    found: dict[str, Any] = {}
    for argument in arguments or ():
        read = _object(argument) if argument.lstrip().startswith("{") else _pair(argument)
        twice = sorted(found.keys() & read.keys())
        if twice:
            raise ConfigError(f"the argument {twice[0]!r} is given twice")
        found |= read
    return found


def _object(text: str) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ConfigError(f"the arguments are not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError("the arguments are nested too deeply") from None
    return read


def _pair(text: str) -> dict[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"{text!r} is no argument of a task; right would be name=value, or a JSON object")
    try:
        return {name: json.loads(value, parse_constant=_refuse_constant)}
    except (ValueError, RecursionError):
        return {name: value}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _span(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    match = _SPAN.match(text.strip())
    seconds = math.inf if match is None else float(match[1]) * SECONDS[match[2]]
    if seconds > LONGEST:
        raise ConfigError(f"{flag} must be a time such as 90, 90s, 5m, 2h or 1d, not {text!r}")
    return seconds


def _time(flag: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        read = datetime.min  # noqa: DTZ901 - it has no zone, and is refused for that
    if read.tzinfo is None:
        raise ConfigError(f"{flag} must be a time with its zone, such as 2030-01-01T09:00:00Z, not {text!r}")
    return read
