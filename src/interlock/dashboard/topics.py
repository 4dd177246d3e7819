"""Topics: what an open page subscribes to, and how its fragments are rendered.

A topic is rendered once per argument and set of namespaces, whatever the number of viewers, and its fragments are sent
as bytes that all of them share. A fragment is the whole element with its `id`, so that any version may be skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from interlock.store.doctor import Severity

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from interlock.dashboard.counts import LiveCounts, Namespaces
    from interlock.postgres.connection import Connection
    from interlock.store.doctor import DoctorReport

TICK_S = 1.0


def count_findings(report: DoctorReport | None) -> int:
    """Count the findings that ask for an act; 0 before the first examination."""
    return 0 if report is None else sum(found.severity != Severity.NOTE for found in report.findings)


def never(_: str) -> bool:
    """Say that a topic shows only the namespaces of its subscription."""
    return False


def always(_: str) -> bool:
    """Say that a topic shows the whole system."""
    return True


@dataclass(frozen=True, slots=True)
class Moment:
    """The input of a topic: the live numbers, the sections of this reading, and the subscription."""

    counts: LiveCounts
    sections: Mapping[str, list[dict[str, Any]]]
    namespaces: Namespaces
    argument: str = ""
    data: Any = None  # of `Topic.read`
    known: Mapping[str, Any] = field(default_factory=dict)  # the latest `data` of topics with the same argument
    report: DoctorReport | None = None  # the latest one; about all namespaces
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def rows(self, section: str) -> list[dict[str, Any]]:
        """Return the rows of a section that the viewer may see."""
        found = self.sections.get(section, [])
        if self.namespaces is None:
            return found
        return [row for row in found if row.get("namespace") in self.namespaces]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One kind of live update.

    `sections`: names in `sql/queries/live.sql` that it needs, besides the moves, counts and processes that every topic
    has. `render` returns the fragments by element id. `every_s`: seconds between two renderings. `channels`: a
    notification on one of these makes it due at the next tick. `read`: a statement of its own, for topics that are due
    every ten seconds or less often; its result is `Moment.data`. `watches`: the section parameters that the argument,
    an id, is added to.
    `whole_system`: whether the topic, with an argument, shows more than the namespaces of the subscription; then it is
    refused to tokens that are limited to namespaces.
    `shows_findings`: a new examination by doctor makes it due.
    `row_ids`: the section parameter that gets the ids of the visible rows; then `render` returns one fragment per row,
    named `row-ID`, and a viewer gets those of its own rows.
    """

    name: str
    render: Callable[[Moment], Mapping[str, str]]
    sections: frozenset[str] = frozenset()
    every_s: float = TICK_S
    channels: frozenset[str] = frozenset()
    read: Callable[[Connection, Moment], Awaitable[Any]] | None = None
    watches: tuple[str, ...] = ()
    row_ids: str | None = None
    whole_system: Callable[[str], bool] = never
    shows_findings: bool = False


class Topics:
    """All topics, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Topic] = {}

    def add(self, topic: Topic) -> Topic:
        """Register a topic; its name must be new."""
        if topic.name in self._by_name:
            raise ValueError(f"topic {topic.name} is registered twice")
        self._by_name[topic.name] = topic
        return topic

    @property
    def names(self) -> list[str]:
        """The names of all topics."""
        return list(self._by_name)

    def find(self, subscription: str) -> tuple[Topic, str] | None:
        """Return the topic and the argument of `name` or `name:argument`; None if there is no such topic."""
        name, _, argument = subscription.partition(":")
        topic = self._by_name.get(name)
        return None if topic is None else (topic, argument)


topics = Topics()
