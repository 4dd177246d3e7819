"""Filters of the lists of tasks and jobs: read from the URL, shown as chips and as a form, passed on to acts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from interlock.errors import InputError
from interlock.lifecycle import JobState, TaskRowState
from interlock.store.jobs import JobFilter
from interlock.store.task_admin import TaskFilter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.dashboard.pages import PageView

PAGE_SIZE = 50
TIMES = {"10m": timedelta(minutes=10), "1h": timedelta(hours=1), "24h": timedelta(hours=24), "7d": timedelta(days=7)}
TIME_LABELS = {"10m": "last 10 min", "1h": "last hour", "24h": "last 24 h", "7d": "last 7 d"}
PARTS = {"none": "no job", "job": "a job"}
MAX_VALUE = 300  # characters of a value in the URL


class FilterField(NamedTuple):
    """A field of the form; with `choices`, one of these, else a text."""

    name: str
    label: str
    value: str
    choices: Mapping[str, str] | None = None
    hint: str = ""


class FilterChip(NamedTuple):
    """An active filter and the URL without it."""

    label: str
    value: str
    url: str


@dataclass(frozen=True, slots=True)
class ListFilters:
    """The filters of a list, as the page shows them."""

    fields: tuple[FilterField, ...]
    chips: tuple[FilterChip, ...]
    states: tuple[str, ...]
    cursor: UUID | None
    is_empty: bool  # no filter but the state and the namespace


def _read(view: PageView, name: str) -> str | None:
    value = view.request.query_params.get(name, "").strip()
    if len(value) > MAX_VALUE or "\x00" in value:
        raise InputError(f"{name} must have at most {MAX_VALUE} characters and no NUL")
    return value or None


def _read_id(view: PageView, name: str) -> UUID | None:
    value = _read(view, name)
    try:
        return None if value is None else UUID(value)
    except ValueError:
        raise InputError(f"{name} must be an id such as 0193a4f8-1c07-7000-8000-000000000000, got {value!r}") from None


def _read_states(view: PageView, known: type[TaskRowState | JobState]) -> tuple[str, ...]:
    given = [part for text in view.request.query_params.getlist("state") for part in text.split(",") if part]
    unknown = sorted(set(given) - {str(state) for state in known})
    if unknown:
        raise InputError(f"state must be one of {', '.join(known)}, got {unknown[0]!r}")
    return tuple(given)


def _since(view: PageView, key: str | None) -> datetime | None:
    if key is None:
        return None
    if key not in TIMES:
        raise InputError(f"since must be one of {', '.join(TIMES)}, got {key!r}")
    return view.now - TIMES[key]


def _shown(view: PageView, fields: tuple[FilterField, ...], states: tuple[str, ...]) -> ListFilters:
    chips = tuple(
        FilterChip(
            each.label,
            each.choices[each.value] if each.choices else each.value,
            view.here(**{each.name: None, "cursor": None}),
        )
        for each in fields
        if each.value
    )
    return ListFilters(fields, chips, states, _read_id(view, "cursor"), not chips)


def read_task_filters(view: PageView) -> tuple[TaskFilter, ListFilters]:
    """Read the filters of a list of tasks."""
    states = _read_states(view, TaskRowState)
    values = {name: _read(view, name) for name in ("type", "tag", "key", "since", "part", "worker")}
    if values["part"] not in {None, *PARTS}:
        raise InputError(f"part must be one of {', '.join(PARTS)}, got {values['part']!r}")
    wanted = TaskFilter(
        states=states or None,
        type=values["type"],
        tag=values["tag"],
        standalone=values["part"] == "none",
        steps_only=values["part"] == "job",
        namespaces=None if view.namespaces is None else tuple(sorted(view.namespaces)),
        job_id=_read_id(view, "job"),
        worker=values["worker"],
        correlation_id=_read_id(view, "correlation"),
        unique_key=values["key"],
        created_after=_since(view, values["since"]),
    )
    fields = (
        FilterField("type", "Type", values["type"] or ""),
        FilterField("tag", "Tag", values["tag"] or ""),
        FilterField("key", "Unique key", values["key"] or ""),
        FilterField("correlation", "Correlation id", _read(view, "correlation") or ""),
        FilterField("worker", "Worker", values["worker"] or ""),
        FilterField("job", "Job", _read(view, "job") or ""),
        FilterField("part", "Part of", values["part"] or "", PARTS),
        FilterField("since", "Enqueued", values["since"] or "", TIME_LABELS),
    )
    return wanted, _shown(view, fields, states)


def read_job_filters(view: PageView) -> tuple[JobFilter, ListFilters]:
    """Read the filters of a list of jobs."""
    states = _read_states(view, JobState)
    values = {name: _read(view, name) for name in ("workflow", "tag", "key", "since")}
    wanted = JobFilter(
        statuses=states or None,
        workflow=values["workflow"],
        key=values["key"],
        tags=() if values["tag"] is None else (values["tag"],),
        parent=_read_id(view, "parent"),
        created_after=_since(view, values["since"]),
        namespaces=None if view.namespaces is None else sorted(view.namespaces),
        correlation_id=_read_id(view, "correlation"),
    )
    fields = (
        FilterField("workflow", "Workflow", values["workflow"] or ""),
        FilterField("tag", "Tag", values["tag"] or ""),
        FilterField("key", "Key", values["key"] or ""),
        FilterField("correlation", "Correlation id", _read(view, "correlation") or ""),
        FilterField("parent", "Child of", _read(view, "parent") or ""),
        FilterField("since", "Submitted", values["since"] or "", TIME_LABELS),
    )
    return wanted, _shown(view, fields, states)


def task_filter_body(wanted: TaskFilter, view: PageView) -> dict[str, Any]:
    """Return a filter of tasks as the API takes it."""
    body: dict[str, Any] = {
        "state": None if wanted.states is None else list(wanted.states),
        "namespace": view.namespace,
        "type": wanted.type,
        "tag": wanted.tag,
        "job": wanted.job_id,
        "worker": wanted.worker,
        "correlation_id": wanted.correlation_id,
        "unique_key": wanted.unique_key,
        "created_after": wanted.created_after,
        "standalone": wanted.standalone or None,
        "steps_only": wanted.steps_only or None,
    }
    return {name: value for name, value in body.items() if value is not None}
