"""Task options: one table that `enqueue`, task and step defaults, schedules, CLI flags and REST requests follow.

An option is a row of `OPTIONS`, a key of one of the TypedDicts and a field of `NewTask`, all in this module. It is
stored by the function `interlock.enqueue` and the statements of `sql/queries/enqueue.sql`. `tests/unit/test_options.py`
compares every place with the table.

Invariant: values that `check_options` returns can be stored. None means that an option is not given, so that the
default of the task applies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args
from uuid import UUID

import orjson

from interlock.config import ADDRESSABLE, checked_web_url, is_addressable
from interlock.model.backoff import Backoff
from interlock.model.json_values import is_storable
from interlock.model.timing import FIRST_YEAR, LAST_YEAR, MAX_DURATION_S, is_in_calendar
from interlock.tracing import is_traceparent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock.model.backoff import BackoffFunction, Kind

DEFAULT_NAMESPACE = "default"
DEFAULT_MAX_TRIES = 5
MIN_PRIORITY, MAX_PRIORITY = -(2**15), 2**15 - 1  # smallint
MAX_TRIES = 2**31 - 1  # int
MAX_TEXT_BYTES = 2_000  # of a name or a key in UTF-8: a larger one does not fit into a B-tree index
MAX_WORKER_COUNT = 10  # steps of one job that may run at once; the least is 1
MAX_JOB_DEPTH = 5  # of child jobs below the first, which has depth 0
# what a submit does while an unfinished job has its key
ConflictPolicy = Literal["reject", "return_existing", "cancel_in_progress", "queue"]
CONFLICT_POLICIES: tuple[str, ...] = get_args(ConflictPolicy)
MAX_TAGS = 100  # of one job
MAX_LIMIT_KEYS = 8  # of one task
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
MAX_ATTRIBUTES = 50  # of one job

# --- Checks of values: take the name for the message and the value, return it in the form in which it is stored ---


def check_text(name: str, value: Any) -> str:
    """Check a name or a key."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a non-empty string, got {value!r}")
    if not _is_storable(value):
        raise ValueError(f"{name} must be valid Unicode without the character NUL, got {value!r}")
    return _check_size(name, value)


def check_name(name: str, value: Any) -> str:
    """Check a name that is part of addresses, such as that of a namespace, a worker or a schedule."""
    text = check_text(name, value)
    if not is_addressable(text):
        raise ValueError(f"{name} must be {ADDRESSABLE}, got {value!r}")
    return text


def check_seconds(name: str, value: Any) -> float:
    """Check a positive duration, in seconds or as a timedelta."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds or a timedelta, got {value!r}")
    if seconds > MAX_DURATION_S:
        raise ValueError(f"{name} must be at most {MAX_DURATION_S:.0f} seconds (100 years), got {value!r}")
    return float(seconds)


def integer_check(least: int, most: int) -> Callable[[str, Any], int]:
    """Make a check of an integer within bounds."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r}")
        return value

    return check


check_worker_count = integer_check(1, MAX_WORKER_COUNT)


def check_on_conflict(name: str, value: Any) -> str:
    """Check what a submit does while an unfinished job has its key."""
    if value not in CONFLICT_POLICIES:
        raise ValueError(f"{name} must be one of {', '.join(CONFLICT_POLICIES)}, got {value!r}")
    return str(value)


def check_id(name: str, value: Any) -> UUID:
    """Check a UUID, or its text."""
    try:
        return value if isinstance(value, UUID) else UUID(value)
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"{name} must be a UUID, got {value!r}") from None


def _check_delay(name: str, value: Any) -> timedelta:
    if value in (0, timedelta(0)):  # a tuple, because the value may not be hashable
        return timedelta(0)
    return timedelta(seconds=check_seconds(name, value))


def check_time(name: str, value: Any) -> datetime:
    """Check a time, which has a zone and can be stored."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ValueError(f"{name} must be a datetime with a time zone, got {value!r}")
    if not is_in_calendar(value):
        raise ValueError(f"{name} must be in the years {FIRST_YEAR} to {LAST_YEAR}, got {value!r}")
    return value


def _check_texts(name: str, value: Any) -> tuple[str, ...]:
    ordered = sorted(value, key=str) if isinstance(value, set | frozenset) else value  # the same in every process
    texts = tuple(ordered) if isinstance(ordered, Iterable) and not isinstance(ordered, str) else (None,)
    if not all(isinstance(text, str) and text and _is_storable(text) for text in texts):
        raise ValueError(f"{name} must be a sequence of non-empty strings, got {value!r}")
    return tuple(_check_size(f"each of the {name}", text) for text in texts)


def check_limit_keys(name: str, value: Any) -> tuple[str, ...]:
    """Check one limit key or several; {name} stands for an argument of the task."""
    keys = tuple(dict.fromkeys(_check_texts(name, [value] if isinstance(value, str) else value)))
    for key in keys:
        if not key.strip() or re.search(r"[*{}]", _PLACEHOLDER.sub("", key)):
            raise ValueError(f"{name} must have no * and braces only around the name of an argument, got {key!r}")
    if not 1 <= len(keys) <= MAX_LIMIT_KEYS:
        raise ValueError(f"{name} must be 1 to {MAX_LIMIT_KEYS} keys, got {len(keys)}")
    _check_size(f"the keys of {name} together", "".join(keys))
    return keys


def check_limit_weight(name: str, value: Any) -> str:
    """Check a weight: a positive number, or {name}, which stands for an argument of the task."""
    if isinstance(value, str) and _PLACEHOLDER.fullmatch(value):
        return value
    try:
        weight = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f"{name} must be a positive number, or the name of an argument in braces, got {value!r}")
    return f"{weight:g}" if float(f"{weight:g}") == weight else repr(weight)


def placeholders(templates: Iterable[str]) -> set[str]:
    """List the arguments that limit keys or weights are rendered from."""
    return {name for template in templates for name in _PLACEHOLDER.findall(template)}


def render_limit_key(template: str, arguments: Mapping[str, Any]) -> str:
    """Put the values of arguments into a limit key, as the function of this name in the database does."""

    def value(match: re.Match[str]) -> str:
        argument = arguments.get(match[1])
        if not isinstance(argument, str | int | float):
            raise ValueError(_bad_argument(template, match[1], argument))  # noqa: TRY004 - callers expect a ValueError
        text = orjson.dumps(argument).decode() if not isinstance(argument, str) else argument
        if not text or re.search(r"[*{}]", text):
            raise ValueError(_bad_argument(template, match[1], argument))
        return text

    return _PLACEHOLDER.sub(value, template)


def _bad_argument(template: str, name: str, value: Any) -> str:
    wanted = "a number, a boolean or a non-empty string without *, { and }"
    return f"limit key {template}: the argument {name} must be {wanted}, got {value!r}"


def render_limit_weight(template: str, arguments: Mapping[str, Any]) -> str:
    """Take a weight from an argument, if its template names one."""
    for name in placeholders([template]):
        value = arguments.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"limit weight {template} must be a number greater than 0, got {value!r}")  # noqa: TRY004 - callers expect a ValueError
        return check_limit_weight("limit_weight", value)
    return template


def check_tags(name: str, value: Any) -> tuple[str, ...]:
    """Check the tags of a job, and leave out repeated ones."""
    tags = tuple(dict.fromkeys(_check_texts(name, value)))
    if len(tags) > MAX_TAGS:
        raise ValueError(f"{name} must be at most {MAX_TAGS}, got {len(tags)}")
    return tags


def check_attributes(name: str, value: Any) -> dict[str, str | int | float | bool]:
    """Check the attributes of a job: a flat JSON object of strings, numbers and booleans."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping of names to strings, numbers or booleans, got {value!r}")  # noqa: TRY004 - callers expect a ValueError from every check
    if len(value) > MAX_ATTRIBUTES:
        raise ValueError(f"{name} must be at most {MAX_ATTRIBUTES}, got {len(value)}")
    for key, item in value.items():
        check_text(f"each name of the {name}", key)
        place = f"{name}[{key!r}]"
        if isinstance(item, str):
            _check_size(place, item)
        if type(item) not in {str, int, float, bool} or not is_storable(item):
            raise ValueError(f"{place} must be a string, a number or a boolean, got {item!r}")
    return dict(value)


def parse_attributes(name: str, texts: Iterable[str], separator: str) -> dict[str, Any]:
    """Parse attributes of a job from texts such as customer=7.

    A value that is a JSON number, boolean or string counts as such, so that "7" in quotes is a string; any other value
    is a string as it stands.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, separated, written = text.partition(separator)
        if not separated:
            raise ValueError(f"{name} must be a name and a value, such as customer{separator}7, got {text!r}")
        try:
            value = orjson.loads(written)
        except ValueError:
            value = written
        found[key] = value if isinstance(value, str | int | float) else written
    return check_attributes(name, found)


def _check_url(name: str, value: Any) -> str:
    try:
        return checked_web_url(value)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def _check_traceparent(name: str, value: Any) -> str:
    if not isinstance(value, str) or not is_traceparent(value):
        example = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        raise ValueError(f"{name} must be a W3C traceparent, such as {example}, got {value!r}")
    return value


def _check_backoff(_: str, value: Any) -> dict[str, Any]:
    return Backoff.of(value).to_json()


def _check_size(name: str, value: str) -> str:
    size = len(value.encode())
    if size > MAX_TEXT_BYTES:
        raise ValueError(f"{name} must have at most {MAX_TEXT_BYTES:,} bytes in UTF-8, got {size:,} in {value[:20]!r}…")
    return value


def _is_storable(value: str) -> bool:
    """Tell whether PostgreSQL can store a text: no NUL and no lone surrogate."""
    return "\0" not in value and (value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value))


# --- The table ---


class Scope(Flag):
    """Where an option is allowed besides the call that enqueues a task, where all of them are."""

    TASK = auto()  # @app.task(...), app.command_task(...): the default for all tasks of a type
    STEP = auto()  # every kind of step
    HANDLER_STEP = auto()  # steps that have a handler
    INHERITED = auto()  # a step, and its compensation, store the value of the handler's task
    SCHEDULE = auto()  # stored with a schedule, for each task that it enqueues
    CLI = auto()  # a flag of `interlock enqueue`
    REST = auto()  # a field of POST /api/tasks
    COPY = auto()  # tasks with it can be stored by COPY: it can neither hold a task nor merge it with another one


@dataclass(frozen=True, slots=True, eq=False)
class ValueType:
    """A type of option values: its check and its SQL type. The CLI and REST map it to their own types."""

    check: Callable[[str, Any], Any]
    sql_type: str
    least: float | None = None
    most: float | None = None


def _integer(least: int, most: int, sql_type: str) -> ValueType:
    return ValueType(integer_check(least, most), sql_type, least, most)


TEXT = ValueType(check_text, "text")
NAME = ValueType(check_name, "text")
TEXTS = ValueType(_check_texts, "text[]")
URL = ValueType(_check_url, "text")
TIME = ValueType(check_time, "timestamptz")
DURATION = ValueType(check_seconds, "float8", 0, MAX_DURATION_S)  # in seconds; more than 0
DELAY = ValueType(_check_delay, "interval", 0, MAX_DURATION_S)  # in seconds
PRIORITY = _integer(MIN_PRIORITY, MAX_PRIORITY, "smallint")
TRIES = _integer(1, MAX_TRIES, "int")
POLICY = ValueType(_check_backoff, "jsonb")
ID = ValueType(check_id, "uuid")
LIMIT_KEYS = ValueType(check_limit_keys, "text[]")
LIMIT_WEIGHT = ValueType(check_limit_weight, "text")
TRACEPARENT = ValueType(_check_traceparent, "text")


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a task; `column` is its name in `NewTask` and in SQL, `flag` its name on the command line."""

    name: str
    type: ValueType
    scopes: Scope
    help: str
    column: str = ""
    flag: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "column", self.column or self.name)
        object.__setattr__(self, "flag", self.flag or self.name)


_CALL = Scope.CLI | Scope.REST
_DEFAULT = _CALL | Scope.TASK | Scope.SCHEDULE
_HANDLER = _DEFAULT | Scope.HANDLER_STEP
_INHERITED = _HANDLER | Scope.INHERITED

OPTIONS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option("namespace", NAME, _CALL | Scope.TASK | Scope.STEP | Scope.COPY, "The namespace to enqueue it in."),
        Option("priority", PRIORITY, _DEFAULT | Scope.STEP | Scope.COPY, "Higher runs sooner."),
        Option("delay", DELAY, _CALL | Scope.COPY, "Run it no sooner than this long from now."),
        Option("run_at", TIME, _CALL | Scope.COPY, "Run it no sooner than this time, given with its zone."),
        Option("unique_key", TEXT, _CALL | Scope.SCHEDULE, "At most one unfinished task has this key."),
        Option("request_id", TEXT, _CALL, "Idempotency key: enqueue once, however often the request is sent."),
        Option("max_tries", TRIES, _HANDLER | Scope.COPY, "Give up after this many tries."),
        Option("timeout", DURATION, _HANDLER | Scope.COPY, "How long one try may take.", column="timeout_seconds"),
        Option("backoff", POLICY, _HANDLER & ~Scope.REST | Scope.COPY, "How the delay between tries grows."),
        Option("correlation_id", ID, _CALL | Scope.COPY, "A UUID that goes into logs and events."),
        Option(
            *("limit_key", LIMIT_KEYS, _INHERITED, "A limit under which it runs; may be repeated."),
            column="limit_keys",
        ),
        Option("limit_weight", LIMIT_WEIGHT, _INHERITED, "What it counts against the weight of its limits."),
        Option("tags", TEXTS, _INHERITED | Scope.COPY, "A tag to find it by; may be repeated.", flag="tag"),
        Option("callback_url", URL, _INHERITED | Scope.COPY, "Webhook: this URL receives a POST when it has ended."),
        Option("traceparent", TRACEPARENT, Scope.COPY, "W3C trace context: its run continues this trace."),
        Option("task_id", ID, Scope(0), "Its id, made by the caller."),
    )
}
CHECKS: Mapping[str, Callable[[str, Any], Any]] = {name: option.type.check for name, option in OPTIONS.items()}
# options of a submit
JOB_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    **{name: CHECKS[name] for name in ("request_id", "timeout", "correlation_id", "callback_url")},
    "worker_count": check_worker_count,
    "key": CHECKS["unique_key"],
    "on_conflict": check_on_conflict,
    "debounce": CHECKS["timeout"],
    "debounce_max": CHECKS["timeout"],
    "tags": check_tags,
    "attributes": check_attributes,
}


def options_in(scope: Scope) -> tuple[Option, ...]:
    """List the options that are allowed in a place, in the order of the table."""
    return tuple(option for option in OPTIONS.values() if scope in option.scopes)


# The defaults of a task that are plain values. A backoff may also be a function, which is not stored.
TASK_DEFAULTS = tuple(option for option in options_in(Scope.TASK) if option.type is not POLICY)


def check_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check options by name and leave out those that are None; ValueError names the option that is wrong."""
    unknown = given.keys() - OPTIONS.keys()
    if unknown:
        raise ValueError(f"unknown option: {', '.join(sorted(unknown))}; known are {', '.join(OPTIONS)}")
    values = {name: CHECKS[name](name, value) for name, value in given.items() if value is not None}
    check_one_start_time(values)
    return values


def check_one_start_time(given: Mapping[str, Any]) -> None:
    """Refuse options that give both a time and a delay."""
    if "run_at" in given and "delay" in given:
        raise ValueError("run_at and delay exclude each other; give one of them")


def as_columns(values: Mapping[str, Any]) -> dict[str, Any]:
    """Give checked options under the names that they have in `NewTask` and in SQL."""
    return {OPTIONS[name].column: value for name, value in values.items()}


# --- The same for the type checker ---


class PlacementOptions(TypedDict, total=False):
    """Options of tasks and of every step."""

    namespace: str
    priority: int


class RunOptions(TypedDict, total=False):
    """Options of tasks and of steps that have a handler."""

    timeout: float | timedelta
    max_tries: int
    limit_key: str | Sequence[str]
    limit_weight: float | str
    tags: Sequence[str]
    callback_url: str


class EnqueueOptions(PlacementOptions, RunOptions, total=False):
    """Options of one call: `task.options(...)`."""

    backoff: Backoff | Kind
    run_at: datetime
    delay: float | timedelta
    unique_key: str
    request_id: str
    correlation_id: UUID | str
    traceparent: str
    task_id: UUID | str


class TaskDefaultOptions(PlacementOptions, RunOptions, total=False):
    """Options in the definition of a task: the defaults of its calls."""

    backoff: Backoff | Kind | BackoffFunction


class TaskDefaults:
    """The defaults of a task as attributes, checked."""

    namespace: str = DEFAULT_NAMESPACE
    priority: int = 0
    timeout: float | None = None
    max_tries: int = DEFAULT_MAX_TRIES
    limit_key: tuple[str, ...] | None = None
    limit_weight: str | None = None
    tags: tuple[str, ...] | None = None
    callback_url: str | None = None


@dataclass(frozen=True, slots=True)
class NewTask:
    """A task to be stored: its type, its arguments by name, and its options."""

    type: str
    input: dict[str, Any]
    namespace: str = DEFAULT_NAMESPACE
    priority: int = 0
    run_at: datetime | None = None
    delay: timedelta | None = None
    max_tries: int = DEFAULT_MAX_TRIES
    timeout_seconds: float | None = None
    backoff: dict[str, Any] | None = None
    unique_key: str | None = None
    request_id: str | None = None
    limit_keys: tuple[str, ...] | None = None
    limit_weight: str | None = None
    tags: tuple[str, ...] | None = None
    callback_url: str | None = None
    correlation_id: UUID | None = None
    traceparent: str | None = None
    task_id: UUID | None = None
