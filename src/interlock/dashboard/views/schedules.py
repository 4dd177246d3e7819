"""Schedules: when each fires next, what its last tick made, and how that ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from starlette.responses import Response

from interlock.dashboard.cron_words import describe_cron
from interlock.dashboard.format import duration
from interlock.dashboard.pages import View, act_scope, list_version, page_router, sheet_response
from interlock.dashboard.render import render_macro
from interlock.dashboard.topics import Moment, Topic, always, topics
from interlock.dashboard.viewer import OfferedActs
from interlock.store.schedules import ScheduleOutcome, ScheduleState, list_schedules, read_schedule_outcomes

if TYPE_CHECKING:
    from interlock.dashboard.counts import Namespaces
    from interlock.postgres.connection import Connection

router = page_router(whole_system=True)
PARTS, SHEETS = "schedules_parts.html", "schedules_sheets.html"
INTERVAL_S = 10.0
MAX_ROWS = 500


class ScheduleRow(NamedTuple):
    """A schedule as the page shows it."""

    schedule: ScheduleState
    words: str | None
    rhythm: str  # the expression, or the interval
    outcome: ScheduleOutcome | None  # of the last tick

    @property
    def name(self) -> str:
        """Its name."""
        return self.schedule.name

    @property
    def url(self) -> str:
        """The part of URLs that names it."""
        return quote(self.name, safe="")


async def read_rows(connection: Connection, namespaces: Namespaces) -> list[ScheduleRow]:
    """Read the schedules with the outcomes of their last ticks; those that fire next come first."""
    found = [
        schedule
        for schedule in await list_schedules(connection)
        if namespaces is None or schedule.namespace in namespaces
    ]
    found.sort(key=lambda schedule: (schedule.paused_at is not None, schedule.next_at, schedule.name))
    found = found[:MAX_ROWS]
    outcomes = await read_schedule_outcomes(connection, found)
    return [make_row(schedule, outcomes.get(schedule.name)) for schedule in found]


def make_row(schedule: ScheduleState, outcome: ScheduleOutcome | None) -> ScheduleRow:
    """Describe a schedule."""
    if schedule.every is not None:
        return ScheduleRow(schedule, None, f"every {duration(schedule.every.total_seconds())}", outcome)
    cron = schedule.cron or ""
    return ScheduleRow(schedule, describe_cron(cron), cron, outcome)


@router.get("/schedules")
async def show_schedules(view: View) -> Response:
    """List the schedules."""
    async with view.app.connection() as connection:
        rows = await read_rows(connection, view.namespaces)
    offer = OfferedActs(view.viewer.offered_scope)
    return await view.page(
        "schedules.html",
        key="schedules",
        title="Schedules",
        topics=(f"schedules:{offer.scope}",),
        command="interlock schedules list",
        rows=rows,
        offer=offer,
        version=list_version([row.name for row in rows]),
    )


@router.get("/ui/sheet/schedules/{name:path}/pause", dependencies=[act_scope("operate")])
async def show_pause(name: str) -> Response:
    """Ask for the reason of a pause."""
    return sheet_response(SHEETS, "pause", name)


async def _read(connection: Connection, moment: Moment) -> list[ScheduleRow]:
    return await read_rows(connection, moment.namespaces)


def _render(moment: Moment) -> dict[str, str]:
    rows: list[ScheduleRow] = moment.data
    offer = OfferedActs(moment.argument)
    fragments: dict[str, str] = {f"row-{row.name}": render_macro(PARTS, "line", row, offer) for row in rows}
    version = list_version([row.name for row in rows])
    fragments["schedules-version"] = render_macro(
        "parts.html", "list_version", "schedules-version", "#schedules", version
    )
    return fragments


topics.add(Topic(name="schedules", render=_render, read=_read, every_s=INTERVAL_S, whole_system=always))
