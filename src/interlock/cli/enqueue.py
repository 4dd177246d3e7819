"""`interlock enqueue`: enqueues a task, checked against its signature when the app is known.

The flags for options follow from the option table in `model/options.py`.

Invariant: all arguments and flags are checked before anything is stored; standard output has only ids or results.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import typer

from interlock.cli.app_context import command_config, load_command_app, run_with_app
from interlock.cli.format import format_json, parse_json, print_note
from interlock.client.app import Interlock
from interlock.client.task import unchecked_task
from interlock.client.task_handle import TaskHandle
from interlock.errors import ConfigError, DefinitionError, InterlockError
from interlock.model.backoff import KINDS
from interlock.model.options import (
    DELAY,
    DURATION,
    ID,
    LIMIT_KEYS,
    LIMIT_WEIGHT,
    NAME,
    POLICY,
    PRIORITY,
    TEXT,
    TEXTS,
    TIME,
    TRIES,
    URL,
    NewTask,
    Scope,
    ValueType,
    check_options,
    options_in,
)
from interlock.model.timing import MAX_DURATION_S

MAX_COUNT = 1_000_000
SECONDS_PER_UNIT = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION = re.compile(r"^(\d+(?:\.\d+)?) *([smhd]?)$")


Type = Annotated[str, typer.Argument(help="The name of the task.", metavar="TYPE")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        help="Its arguments: a JSON object, or name=value. A value that is not JSON is taken as a string.",
        metavar="JSON|NAME=VALUE",
    ),
]
App = Annotated[
    str | None,
    typer.Option(help="Check the arguments against the task's signature in this app.", metavar="PACKAGE.MODULE:APP"),
]
Unchecked = Annotated[bool, typer.Option("--unchecked", help="Do not check, even if the settings name an app.")]
Count = Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="Enqueue it this many times.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it has ended and print the result as JSON.")]
WaitTimeout = Annotated[str | None, typer.Option(help="Wait at most this long; implies --wait.", metavar="DURATION")]
InJson = Annotated[bool, typer.Option("--json", help="Print a line of JSON for each task.")]


def enqueue(
    context: typer.Context,
    type_: Type,
    arguments: Arguments = None,
    app: App = None,
    unchecked: Unchecked = False,
    count: Count = 1,
    wait: Wait = False,
    wait_timeout: WaitTimeout = None,
    in_json: InJson = False,
    **flags: Any,
) -> None:
    """Enqueue a task and print its id; with --wait, print its result, or fail as it did.

    Durations are 90, 90s, 5m, 2h or 1d.
    """
    timeout = parse_duration("--wait-timeout", wait_timeout)
    if count > 1 and not {flags["unique_key"], flags["request_id"]} <= {None}:
        raise ConfigError("--count cannot be used with --unique-key or --request-id: they give the same task again")
    task_input = _parse_arguments(arguments)
    options = _parse_options(flags)
    config = command_config(context, app=app)
    if config.app is None or unchecked:
        used = Interlock(config=config)
        task = unchecked_task(
            type_, task_input, options, largest_input=config.largest_input, callback_url=config.callback_url
        )
    else:
        used = load_command_app(context, config.app)
        task = _checked_task(used, config.app, type_, task_input, options)
    show = partial(_wait, seconds=timeout) if wait or timeout is not None else _print_ids
    if not run_with_app(used, partial(_enqueue, tasks=[task] * count, show=partial(show, in_json=in_json))):
        raise typer.Exit(1)


class FlagType(NamedTuple):
    """A flag of the command line: the type that typer reads, its metavar, and the parser of its text."""

    type: Any
    metavar: str | None = None
    parse: Callable[[str, Any], Any] | None = None


def parse_duration(flag: str, text: str | None) -> float | None:
    """Parse a duration such as 90s or 2h into seconds; None when it was not given."""
    if text is None:
        return None
    match = _DURATION.match(text.strip())
    if match is None:
        raise ConfigError(f"{flag} must be a duration such as 90, 90s, 5m, 2h or 1d, got {text!r}")
    seconds = float(match[1]) * SECONDS_PER_UNIT[match[2]]
    if seconds > MAX_DURATION_S:
        raise ConfigError(f"{flag} must be at most {MAX_DURATION_S:.0f} seconds (100 years), got {text!r}")
    return seconds


def parse_time(flag: str, text: str) -> datetime:
    """Parse a time with its zone."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = datetime.min  # noqa: DTZ901 - it has no zone, and is refused for that
    if time.tzinfo is None:
        raise ConfigError(f"{flag} must be a time with its zone, such as 2030-01-01T09:00:00Z, got {text!r}")
    return time


def parse_past_time(flag: str, text: str | None, now: datetime) -> datetime | None:
    """Parse a time, or a duration before now."""
    if text is None:
        return None
    if "-" in text:
        try:
            return parse_time(flag, text).astimezone(UTC)
        except OverflowError:
            raise ConfigError(f"{flag} is out of range: {text}") from None
    try:
        return now - timedelta(seconds=parse_duration(flag, text) or 0)
    except ConfigError:
        example = "a duration such as 2h, or a time with its zone such as 2030-01-01T09:00:00Z"
        raise ConfigError(f"{flag} must be {example}, got {text!r}") from None


FLAG_TYPES: Mapping[ValueType, FlagType] = {
    TEXT: FlagType(str),
    NAME: FlagType(str),
    TEXTS: FlagType(list[str]),
    URL: FlagType(str, "URL"),
    TIME: FlagType(str, "ISO", parse_time),
    DURATION: FlagType(str, "DURATION", parse_duration),
    DELAY: FlagType(str, "DURATION", parse_duration),
    PRIORITY: FlagType(int),
    TRIES: FlagType(int),
    POLICY: FlagType(str, "|".join(KINDS)),
    ID: FlagType(str, "UUID"),
    LIMIT_KEYS: FlagType(list[str]),
    LIMIT_WEIGHT: FlagType(str, "NUMBER"),
}


def _with_option_flags(signature: inspect.Signature) -> inspect.Signature:
    """Put a flag for each option of the table in the place of **flags, before --count."""
    flags = [
        inspect.Parameter(
            option.flag,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                FLAG_TYPES[option.type].type | None,
                typer.Option(help=option.help, metavar=FLAG_TYPES[option.type].metavar),
            ],
        )
        for option in options_in(Scope.CLI)
    ]
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "flags"
    ]
    place = [parameter.name for parameter in own].index("count")
    return signature.replace(parameters=[*own[:place], *flags, *own[place:]])


# typer reads the flags of a command from its signature
cast("Any", enqueue).__signature__ = _with_option_flags(inspect.signature(enqueue, eval_str=True))


def _parse_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for option in options_in(Scope.CLI):
        value = flags[option.flag]
        parse = FLAG_TYPES[option.type].parse
        if value in (None, []):
            continue
        options[option.name] = value if parse is None else parse(f"--{option.flag.replace('_', '-')}", value)
    try:
        check_options(options)
    except (ValueError, DefinitionError) as error:
        raise ConfigError(f"enqueue: {error}") from None
    return options


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


async def _wait(handles: Sequence[TaskHandle[Any]], *, seconds: float | None, in_json: bool) -> bool:
    """Wait for all tasks and print the outcome of each, in order; tell whether all succeeded."""
    for handle in handles:
        if handle.created:
            print_note(f"enqueued task {handle.id}")
    failures = await asyncio.gather(*(_failure(handle, seconds) for handle in handles))
    for handle, failure in zip(handles, failures, strict=True):
        await _print_outcome(handle, failure, in_json=in_json)
    return not any(failures)


async def _failure(handle: TaskHandle[Any], seconds: float | None) -> InterlockError | None:
    """Wait until a task has ended, and return its error."""
    try:
        await handle.result(seconds)
    except TimeoutError as error:
        return InterlockError(f"{error}; it is still running, see `interlock status {handle.id}`")
    except InterlockError as error:
        return error
    return None


async def _print_outcome(handle: TaskHandle[Any], failure: InterlockError | None, *, in_json: bool) -> None:
    status = await handle.status()
    if in_json:
        shown = {name: getattr(status, name) for name in ("id", "state", "output", "error")}
        typer.echo(format_json({"created": handle.created, **shown}, pretty=False))
    elif failure is None:
        typer.echo(format_json(status.output, pretty=False))
    if failure is not None:
        print_note(f"interlock: {failure}")


def _checked_task(
    app: Interlock, reference: str, type_: str, task_input: dict[str, Any], options: dict[str, Any]
) -> NewTask:
    task = app.tasks.get(type_)
    if task is None:
        known = ", ".join(sorted(app.tasks)) or "none"
        raise ConfigError(f"app {reference} has no task {type_!r}; it has {known}")
    return task.options(**options).prepare(**task.decode(task_input))


def _parse_arguments(arguments: Sequence[str] | None) -> dict[str, Any]:
    """Read the arguments of the task: JSON objects and name=value pairs."""
    found: dict[str, Any] = {}
    for argument in arguments or ():
        read = _parse_object(argument) if argument.lstrip().startswith("{") else _parse_pair(argument)
        twice = sorted(found.keys() & read.keys())
        if twice:
            raise ConfigError(f"the argument {twice[0]!r} is given twice")
        found |= read
    return found


def _parse_object(text: str) -> dict[str, Any]:
    try:
        read: dict[str, Any] = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"the arguments are not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError("the arguments are nested too deeply") from None
    return read


def _parse_pair(text: str) -> dict[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"{text!r} is not an argument; write name=value or a JSON object")
    try:
        return {name: parse_json(value)}
    except (ValueError, RecursionError):
        return {name: value}
