"""The machines: every lifecycle as its diagram, with live counts, rates and refused moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.responses import RedirectResponse, Response

from interlock.dashboard.counts import STORED_MACHINES, Transition
from interlock.dashboard.format import compact, rate_number, whole
from interlock.dashboard.history import figure_range
from interlock.dashboard.pages import ALL, PAGE_HEADERS, View, page_router
from interlock.dashboard.render import render_macro
from interlock.dashboard.states import STYLES
from interlock.dashboard.svg.charts import stacked
from interlock.dashboard.svg.machine import MachineNumbers, draw, summary
from interlock.dashboard.topics import Moment, Topic, topics
from interlock.lifecycle import MACHINES
from interlock.store.figures import MINUTE, floor_time, read_moves_over_time
from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.dashboard.counts import LiveCounts, Namespaces
    from interlock.postgres.connection import Connection

router = page_router()
PARTS = "machines_parts.html"
ORDER = ("task", "job", "supervised-worker", "worker", "task-attempt", "sort-worker", "sort-master")
GUARDED = {"task": "tasks", "job": "jobs", "supervised-worker": "workers"}  # machine -> table
LISTS = {"task": "/tasks?state={}", "job": "/jobs?state={}", "supervised-worker": "/workers?state={}"}
BY_NAMESPACE = ("task", "job")  # whose entities have a namespace
NOW = "now"  # rates of the last seconds, in place of a range
WINDOWS = {NOW: "now", "1h": "1 h", "24h": "24 h"}
REFUSED_INTERVAL_S = 10.0
SPARK_S = 60
MAX_WIDE = 1250  # a longer diagram is shown from top to bottom, beside the tables
SPARK_STEP_S = 4


class Tab(NamedTuple):
    """One lifecycle among the others."""

    name: str
    note: str
    parts: list[tuple[str, float, float]]


class MoveRow(NamedTuple):
    """One move of the table."""

    source: str
    event: str
    target: str
    per_second: str
    total: str


@router.get("/machines")
async def show_first_machine(view: View) -> Response:
    """Lead to the lifecycle of tasks."""
    return RedirectResponse(view.url("/machines/task"), 303, PAGE_HEADERS)


@router.get("/machines/{name}")
async def show_machine(view: View, name: str) -> Response:
    """Show a lifecycle."""
    if name not in MACHINES:
        raise Problem("unknown_path", f"there is no lifecycle {name}; there are {', '.join(ORDER)}")
    if is_of_all(name):
        view.viewer.require_all_namespaces(f"the lifecycle {name}")
    shown = ORDER if view.viewer.namespaces is None else BY_NAMESPACE
    counts = await view.dashboard.hub.current(view.app, view.namespaces)
    window = view.request.query_params.get("rates", NOW)
    window = window if window in WINDOWS else NOW
    async with view.app.connection() as connection:
        totals = await read_totals(connection, name, "1h" if window == NOW else window, view)
    numbers = machine_numbers(name, counts, view.namespaces, totals, None if window == NOW else window)
    wide, tall = draw(name, numbers, "wide"), draw(name, numbers, "tall")
    return await view.page(
        "machines.html",
        key="machines",
        title=name,
        crumbs=(("Machines", "/machines/task"),),
        topics=(
            f"tabs:{ALL}" if shown is ORDER else "tabs",
            *((f"machine:{name}",) if window == NOW else ()),
            f"moves:{name}",
        ),
        command=f"interlock diagram {name}",
        name=name,
        table=GUARDED.get(name),
        about=summary(name),
        tabs=tabs(counts, view.namespaces, shown),
        wide=wide,
        tall=tall,
        beside=wide.width > MAX_WIDE,
        rows=move_rows(name, numbers.rates, totals.moves),
        refused=totals.refused,
        windows=WINDOWS,
        window=window,
    )


@dataclass(frozen=True, slots=True)
class Totals:
    """Moves and refused moves of a time, from the figures."""

    moves: dict[Transition, int] = field(default_factory=dict)
    refused: dict[tuple[str, str], int] | None = field(default_factory=dict)  # None: not known by namespace
    seconds: float = 3600.0
    latest: dict[Transition, int] = field(default_factory=dict)  # moves of the last complete minute


async def read_totals(connection: Connection, name: str, key: str, view: Any) -> Totals:
    """Read how often each move was made and refused within a range."""
    namespaces = view.namespaces if name in {"task", "job"} else None
    wanted = figure_range(key, view.now, namespaces)
    moves: dict[Transition, int] = {}
    latest: dict[Transition, int] = {}
    last_minute = floor_time(view.now, MINUTE) - MINUTE
    for row in await read_moves_over_time(connection, wanted, [name]):
        move = Transition(row["from_state"] or None, row["event"], row["to_state"])
        moves[move] = moves.get(move, 0) + row["total"]
        if row["at"] == last_minute:
            latest[move] = row["total"]
    refused: dict[tuple[str, str], int] | None = None
    if namespaces is None:
        refused = {}
        for row in await read_moves_over_time(connection, wanted, [name], kind="refused"):
            pair = (row["from_state"], row["to_state"])
            refused[pair] = refused.get(pair, 0) + row["total"]
    length = timedelta(hours=24) if key == "24h" else timedelta(hours=1)
    return Totals(moves, refused, length.total_seconds(), latest)


def machine_numbers(
    name: str, counts: LiveCounts, namespaces: Namespaces, totals: Totals, window: str | None
) -> MachineNumbers:
    """Gather the numbers of a lifecycle: rates of the last seconds, or averages of a window."""
    states = counts.states(name, namespaces)
    if window is not None:
        rates: Mapping[Transition, float] = {move: total / totals.seconds for move, total in totals.moves.items()}
    elif name not in STORED_MACHINES:  # in memory: processes add their moves to the figures
        rates = {move: total / MINUTE.total_seconds() for move, total in totals.latest.items()}
    else:
        rates = counts.rates(name, namespaces)
    sparks: dict[str, list[int]] = {}
    if name in counts.machines:
        history = counts.machines[name].history(
            counts.second, SPARK_S, namespaces if name != "supervised-worker" else None
        )
        sparks = {state: line[::SPARK_STEP_S] for state, line in history.items()}
    place = LISTS.get(name)
    return MachineNumbers(
        dict(states),
        rates,
        _facts(name, counts, namespaces, totals),
        sparks,
        totals.refused or {},
        {str(state): place.format(state) for state in MACHINES[name].states} if place else {},
    )


def _facts(name: str, counts: LiveCounts, namespaces: Namespaces, totals: Totals) -> dict[str, str]:
    """Say one thing about each state."""
    machine = MACHINES[name]
    facts = {str(state): "final" for state in machine.final}
    entered: dict[str, int] = {}
    for move, total in totals.moves.items():
        entered[move.target] = entered.get(move.target, 0) + total
    within = "1 h" if totals.seconds <= 3600 else "24 h"  # noqa: PLR2004 - seconds of an hour
    for state, total in entered.items():
        facts[state] = f"+{compact(total)} in {within}"
    slots = counts.slots(namespaces)
    if name == "task":
        facts["running"] = f"of {whole(slots)} slots" if slots else "no live worker"
    if name == "task-attempt":
        facts["processing"] = f"of {whole(slots)} slots" if slots else "no live worker"
    return facts


def is_of_all(name: str) -> bool:
    """Return whether the numbers of a lifecycle are those of all namespaces together."""
    return name not in BY_NAMESPACE


def tabs(counts: LiveCounts, namespaces: Namespaces, shown: tuple[str, ...]) -> list[Tab]:
    """Return the lifecycles with their number of entities."""
    found = []
    for name in shown:
        states = counts.states(name, namespaces)
        total = sum(states.values())
        moved = sum(counts.rates(name, namespaces).values())
        parts = stacked(
            [(STYLES[name][str(state)].tone, states[str(state)]) for state in MACHINES[name].states], least=24
        )
        if name in STORED_MACHINES:
            note = f"{compact(total)} · {rate_number(moved)}/s"
        elif name == "worker":
            note = "1 process" if total == 1 else f"{whole(total)} processes"
        elif name == "task-attempt":
            note = f"{whole(total)} in hand"
        else:
            note = f"{whole(total)} now" if total else "none now"
        found.append(Tab(name, note, parts))
    return found


def move_rows(name: str, rates: Mapping[Transition, float], totals: Mapping[Transition, int]) -> list[MoveRow]:
    """Return every move of a lifecycle; those made most often come first."""
    moves = [Transition(str(source), str(event), str(target)) for source, event, target in MACHINES[name].rows]
    moves.sort(key=lambda move: (-rates.get(move, 0.0), -totals.get(move, 0)))
    return [
        MoveRow(
            move.source or "",
            move.event,
            move.target,
            rate_number(rates[move]) if rates.get(move) else "0",
            compact(totals.get(move, 0)),
        )
        for move in moves
    ]


# --- live


def _render_tabs(moment: Moment) -> dict[str, str]:
    shown = ORDER if moment.argument == ALL else BY_NAMESPACE
    found = tabs(moment.counts, moment.namespaces, shown)
    return {f"tab-{tab.name}": render_macro(PARTS, "tab_body", tab) for tab in found}


def _render_diagram(moment: Moment) -> dict[str, str]:
    name = moment.argument
    if name not in MACHINES:
        return {}
    totals = moment.known.get("moves") or Totals()
    numbers = machine_numbers(name, moment.counts, moment.namespaces, totals, None)
    return {
        "diagram-wide": render_macro(PARTS, "diagram", draw(name, numbers, "wide"), name),
        "diagram-tall": render_macro(PARTS, "diagram", draw(name, numbers, "tall"), name),
    }


async def _read_moves(connection: Connection, moment: Moment) -> Totals:
    if moment.argument not in MACHINES:
        return Totals()
    return await read_totals(connection, moment.argument, "1h", moment)


def _render_moves(moment: Moment) -> dict[str, str]:
    name = moment.argument
    if name not in MACHINES:
        return {}
    totals: Totals = moment.data
    rates = machine_numbers(name, moment.counts, moment.namespaces, totals, None).rates
    return {
        "moves": render_macro(PARTS, "moves_card", name, move_rows(name, rates, totals.moves), "1 h"),
        "refused": render_macro(PARTS, "refused_card", name, totals.refused, "1 h"),
    }


topics.add(Topic(name="tabs", render=_render_tabs, whole_system=lambda argument: argument == ALL))
topics.add(Topic(name="machine", render=_render_diagram, whole_system=is_of_all))
topics.add(
    Topic(name="moves", render=_render_moves, read=_read_moves, every_s=REFUSED_INTERVAL_S, whole_system=is_of_all)
)
