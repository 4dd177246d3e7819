"""Namespaces: how much waits in each, since when, which workers serve it, and who paused it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from starlette.responses import Response

from interlock.dashboard.format import parse_time
from interlock.dashboard.pages import View, act_scope, list_version, page_router, sheet_response
from interlock.dashboard.render import render_macro
from interlock.dashboard.svg.charts import stacked
from interlock.dashboard.topics import Moment, Topic, topics
from interlock.dashboard.viewer import OfferedActs
from interlock.store.live import LiveParameters, read_live
from interlock.store.stats import count_unfinished_tasks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from interlock.dashboard.counts import LiveCounts, Namespaces
    from interlock.postgres.connection import Connection

router = page_router()
PARTS, SHEETS = "namespaces_parts.html", "namespaces_sheets.html"
DEFAULT = "default"
OLDEST_INTERVAL_S = 10.0
UNFINISHED = (("waiting", "violet"), ("pending", "amber"), ("running", "blue"))


class NamespaceRow(NamedTuple):
    """A namespace as the page shows it."""

    name: str
    states: dict[str, int]
    parts: list[tuple[str, float, float]]  # of the bar of unfinished tasks
    workers: list[str]  # live ones that serve it
    paused_at: datetime | None
    paused_by: str | None
    reason: str | None

    @property
    def url(self) -> str:
        """The part of URLs that names it."""
        return quote(self.name, safe="")


def namespace_rows(
    counts: LiveCounts, stored: Iterable[Mapping[str, Any]], namespaces: Namespaces, due: Iterable[str] = ()
) -> list[NamespaceRow]:
    """Gather the namespaces that have tasks (among them those with due ones) or workers, or were paused."""
    known = {row["namespace"]: row for row in stored}
    served: dict[str, list[str]] = {}
    for process in counts.processes:
        for name in process["namespaces"] if process["role"] == "worker" else ():
            served.setdefault(name, []).append(process["id"])
    names = counts.machines["task"].namespaces().union(known, served, due) or {DEFAULT}
    rows = []
    for name in sorted(names if namespaces is None else names & namespaces):
        states = counts.states("task", frozenset({name}))
        paused = known.get(name, {})
        parts = stacked([(tone, states[state]) for state, tone in UNFINISHED])
        rows.append(
            NamespaceRow(
                name,
                dict(states),
                parts,
                served.get(name, []),
                parse_time(paused.get("paused_at")),
                paused.get("paused_by"),
                paused.get("reason"),
            )
        )
    return rows


@router.get("/namespaces")
async def show_namespaces(view: View) -> Response:
    """List the namespaces."""
    hub = view.dashboard.hub
    hub.count_by_namespace()
    counts = await hub.current(view.app, view.namespaces)
    async with view.app.connection() as connection:
        sections = await read_live(connection, frozenset({"paused_namespaces"}), LiveParameters(), now=view.app.now())
        oldest = await read_oldest(connection)
    rows = namespace_rows(counts, sections["paused_namespaces"], view.namespaces, oldest)
    offer = OfferedActs(view.viewer.offered_scope)
    return await view.page(
        "namespaces.html",
        key="namespaces",
        title="Namespaces",
        topics=(f"namespaces:{offer.scope}", "oldest"),
        command="interlock namespaces list",
        rows=rows,
        oldest=oldest,
        offer=offer,
        version=list_version([row.name for row in rows]),
    )


async def read_oldest(connection: Connection) -> dict[str, datetime]:
    """Read the time since which the oldest due task of each namespace waits."""
    found: dict[str, datetime] = {}
    for count in await count_unfinished_tasks(connection):
        if count.oldest_due_at is not None:
            found[count.namespace] = min(count.oldest_due_at, found.get(count.namespace, count.oldest_due_at))
    return found


@router.get("/ui/sheet/namespaces/{name:path}/pause", dependencies=[act_scope("operate")])
async def show_pause(view: View, name: str) -> Response:
    """Ask for the reason of a pause."""
    view.viewer.require_namespace(name)
    counts = await view.dashboard.hub.current(view.app, frozenset({name}))
    return sheet_response(SHEETS, "pause", name, counts.states("task", frozenset({name})))


# --- live


def _render_namespaces(moment: Moment) -> dict[str, str]:
    rows = namespace_rows(moment.counts, moment.sections.get("paused_namespaces", ()), moment.namespaces)
    offer = OfferedActs(moment.argument)
    fragments: dict[str, str] = {}
    for row in rows:
        fragments[f"depth-{row.name}"] = render_macro(PARTS, "depth_cell", row)
        fragments[f"served-{row.name}"] = render_macro(PARTS, "served_cell", row)
        fragments[f"pause-{row.name}"] = render_macro(PARTS, "pause_cell", row)
        fragments[f"acts-{row.name}"] = render_macro(PARTS, "acts_cell", row, offer)
    version = list_version([row.name for row in rows])
    fragments["namespaces-version"] = render_macro(
        "parts.html", "list_version", "namespaces-version", "#namespaces", version
    )
    return fragments


async def _read_oldest(connection: Connection, _: Moment) -> dict[str, datetime]:
    return await read_oldest(connection)


def _render_oldest(moment: Moment) -> dict[str, str]:
    found: dict[str, datetime] = moment.data
    names = moment.counts.machines["task"].namespaces() | found.keys()
    return {
        f"oldest-{name}": render_macro(PARTS, "oldest_cell", name, found.get(name))
        for name in (names if moment.namespaces is None else names & moment.namespaces)
    }


topics.add(Topic(name="namespaces", render=_render_namespaces, sections=frozenset({"paused_namespaces"})))
topics.add(Topic(name="oldest", render=_render_oldest, read=_read_oldest, every_s=OLDEST_INTERVAL_S))
