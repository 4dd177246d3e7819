"""What requests say: each body is checked here before anything is done, and an unknown member is refused.

Invariant: what passes can be stored: text without NUL, numbers that fit their columns, JSON that PostgreSQL can hold.
"""

from __future__ import annotations

import base64
import binascii
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import orjson
from fastapi import Path, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, create_model, model_validator

from interlock.model.json_values import ValueRefusedError, check_json
from interlock.model.options import (
    DELAY,
    DURATION,
    ID,
    MAX_WORKER_COUNT,
    PRIORITY,
    TEXT,
    TEXTS,
    TIME,
    TRIES,
    URL,
    Scope,
    ValueType,
    options_in,
)
from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


DEEPEST = 100
LONGEST_TIME = 315_360_000  # ten years, in seconds
FIRST, LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
WITHOUT_NUL = r"^[^\x00]*$"
APP = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$"


def _storable(value: Any) -> Any:
    """Refuse JSON that cannot be stored, and say where in it."""
    if _is_deeper(value, DEEPEST):
        raise ValueError(f"is nested deeper than {DEEPEST} levels")
    try:
        check_json(value)
    except ValueRefusedError as error:
        raise ValueError(str(error)) from None
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [
            item
            for outer in layer
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not layer:
            return False
    return True


def _within_time(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("needs a time zone, such as 2030-01-01T09:00:00Z")
    if not FIRST <= value < LAST:
        raise ValueError(f"must be from {FIRST.year} to {LAST.year - 1}")
    return value


def _unicode(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be blank")
    return value


Text = Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=WITHOUT_NUL), AfterValidator(_unicode)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=WITHOUT_NUL), AfterValidator(_unicode)]
Document = Annotated[dict[str, Any], AfterValidator(_storable)]
Moment = Annotated[datetime, AfterValidator(_within_time)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_TIME, allow_inf_nan=False)]

WorkerId = Annotated[str, Path(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$", description="The worker.")]
JobId = Annotated[UUID, Path(description="The job.")]
TaskId = Annotated[UUID, Path(description="The task.")]
NamespaceName = Annotated[
    str, Path(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$", description="The namespace.")
]


class Command(BaseModel):
    """What every request that changes something can say."""

    model_config = ConfigDict(extra="forbid")

    request_id: Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=WITHOUT_NUL)] | None = Field(
        default=None,
        description="The same request again gives the same answer; an Idempotency-Key header does the same.",
    )


class Reasoned(Command):
    """A move, and why."""

    reason: Text | None = Field(default=None, description="Why, for the records.")


class NewWorker(Command):
    """A worker to be made. What is left out is as the supervisor's own settings say."""

    workspace_id: Name = Field(default="default", description="To whom it belongs; a label, and no more.")
    namespaces: Annotated[list[Name], Field(min_length=1, max_length=100)] | None = Field(
        default=None, description="It takes tasks of these."
    )
    concurrency: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        default=None, description="Tasks that it runs at once."
    )
    app: Annotated[str, StringConstraints(pattern=APP, max_length=200)] | None = Field(
        default=None, description="Whose tasks it runs, as package.module:app."
    )
    memory_limit_mb: Annotated[float, Field(gt=0, le=1_048_576, allow_inf_nan=False)] | None = Field(
        default=None, description="With more memory than this it is paused."
    )
    lease: Annotated[float, Field(ge=1, le=86_400, allow_inf_nan=False)] | None = Field(
        default=None, description="Seconds after which a silent process loses its tasks."
    )
    grace: Annotated[float, Field(ge=0, le=25, allow_inf_nan=False)] | None = Field(
        default=None, description="Seconds that its tasks get when it stops."
    )
    labels: Document = Field(default_factory=dict, description="Whatever you want to find with it again.")


class NewJob(Command):
    """A job to be submitted."""

    workflow: Name
    input: Document = Field(default_factory=dict)
    version: Name | None = Field(default=None, description="Of the workflow; the newest unless given.")
    parent_job_id: UUID | None = Field(default=None, description="The job of which it is a child.")
    worker_count: Annotated[int, Field(ge=1, le=MAX_WORKER_COUNT)] | None = Field(
        default=None, description="Steps that may run at once."
    )
    timeout: Seconds | None = Field(default=None, description="Seconds after which it is canceled.")
    correlation_id: UUID | None = None


class Retry(Command):
    """From which step on a job is to be done again."""

    step: Name


class SignalSent(Command):
    """A signal that a step waits for."""

    name: Name
    payload: Annotated[Any, AfterValidator(_storable)] = None


class Approval(Command):
    """The answer to a step that waits for a person."""

    step: Name
    approved: bool = True
    comment: Text | None = None


class _NewTask(Command):
    """A task to enqueue."""

    type: Name
    input: Document = Field(default_factory=dict, description="The task's arguments, by name.")

    @model_validator(mode="after")
    def _one_time(self) -> _NewTask:
        given = self.model_dump(include={"run_at", "delay"}, exclude_none=True)
        if len(given) > 1:
            raise ValueError("run_at and delay exclude each other; give one of them")
        return self


# The type of a request field for each type of the option table.
OPTION_TYPES: Mapping[ValueType, Any] = {
    TEXT: Name,
    TEXTS: Annotated[list[Name], Field(max_length=100)],
    URL: Annotated[str, StringConstraints(pattern=r"^https?://[^\x00\s]+$", max_length=2000)],
    TIME: Moment,
    DURATION: Seconds,
    DELAY: Annotated[float, Field(ge=0, le=LONGEST_TIME, allow_inf_nan=False)],
    PRIORITY: Annotated[int, Field(ge=PRIORITY.least, le=PRIORITY.most)],
    TRIES: Annotated[int, Field(ge=TRIES.least, le=TRIES.most)],
    ID: UUID,
}

if TYPE_CHECKING:
    NewTask = _NewTask
else:
    # pydantic's create_model gives the fields that the option table allows in requests; request_id is Command's
    NewTask = create_model(
        "NewTask",
        __base__=_NewTask,
        __doc__=_NewTask.__doc__,
        **{
            option.name: (OPTION_TYPES[option.type] | None, Field(default=None, description=option.help))
            for option in options_in(Scope.REST)
            if option.name not in _NewTask.model_fields
        },
    )


class CancelTask(Reasoned):
    """A cancellation."""

    force: bool = Field(default=False, description="Also a running one at once, without waiting for its worker.")


# SECTION supervisor/pages
# Lists, a page at a time: where the next one begins is in a cursor that only this side reads.
#
# Invariant: the order is total and does not change, so that pages neither repeat nor leave out what was there all
# along.

MOST = 200
USUAL = 50

Limit = Annotated[int, Query(ge=1, le=MOST, description="At most so many.")]
Cursor = Annotated[
    str | None, Query(max_length=500, description="`next` of the page before; without it, the first page.")
]


def page(items: Sequence[Any], limit: int, place: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Make a page of what was found, one more than asked for if there is more."""
    shown = list(items[:limit])
    following = _written(place(shown[-1])) if len(items) > limit else None
    return {"items": shown, "next": following}


def slice_of(items: Sequence[Any], limit: int, cursor: str | None) -> dict[str, Any]:
    """Make a page of something that is there as a whole, and only grows at its end."""
    start = read_number(cursor)
    shown = list(items[start : start + limit])
    following = _written([start + limit]) if len(items) > start + limit else None
    return {"items": shown, "next": following}


def read_number(cursor: str | None) -> int:
    """Read a cursor that is a number: how many came before, or the last of them."""
    number: int = 0 if cursor is None else _read(cursor, int)[0]
    return number


def read_id(cursor: str | None) -> UUID | None:
    """Read a cursor that is an id."""
    return None if cursor is None else _read(cursor, UUID)[0]


def read_time_and_id(cursor: str | None) -> tuple[datetime, str] | None:
    """Read a cursor that is a time and an id."""
    if cursor is None:
        return None
    at, id_ = _read(cursor, datetime.fromisoformat, str)
    if at.tzinfo is None or "\0" in id_:
        raise _unreadable()
    return at, id_


def _written(parts: list[Any]) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([str(part) for part in parts])).decode().rstrip("=")


def _read(cursor: str, *kinds: Callable[[str], Any]) -> list[Any]:
    try:
        parts = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        read = [kind(part) for kind, part in zip(kinds, parts, strict=True)]
    except (ValueError, TypeError, AttributeError, binascii.Error):
        raise _unreadable() from None
    if any(isinstance(part, int) and not 0 <= part < 2**63 for part in read):
        raise _unreadable()
    return read


def _unreadable() -> Problem:
    message = "must be `next` of a page that was given for the same list"
    return Problem(
        "invalid_request", f"query.cursor: {message}", {"errors": [{"field": "query.cursor", "message": message}]}
    )
