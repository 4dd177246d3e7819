"""The overview: whether anything is wrong, where, and what helps."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from starlette.responses import Response

from interlock.client.explain.explanation import shell_command
from interlock.dashboard.attention import Item, find_attention
from interlock.dashboard.format import NOTHING, about, axis_seconds, compact, duration, rate_number, seconds, whole
from interlock.dashboard.history import ENDED, History, read_history
from interlock.dashboard.pages import DEFAULT_RANGE, RANGES, View, page_router
from interlock.dashboard.render import render_macro
from interlock.dashboard.states import STYLES
from interlock.dashboard.svg.charts import Chart, Line, chart, sparkline, stacked
from interlock.dashboard.topics import Moment, Topic, count_findings, topics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.dashboard.counts import LiveCounts, Namespaces
    from interlock.postgres.connection import Connection

router = page_router()
CHART_INTERVAL_S = 10.0
ATTENTION_INTERVAL_S = 60.0
MIN_CHANGE = 0.05  # tasks per second: below it the depth counts as steady
COUNT_IS_OLD_S = 60.0
PARTS = "overview_parts.html"


class Tile(NamedTuple):
    """One of the figures: the value with its unit, a line below it, and whether that is good or bad news."""

    key: str
    title: str
    value: str
    unit: str
    note: str
    news: str = ""  # a part of the note, before it
    tone: str = ""  # of the news: ok or bad


@router.get("/")
async def show_overview(view: View) -> Response:
    """Show the overview."""
    hub = view.dashboard.hub
    counts = await hub.current(view.app, view.namespaces)
    async with view.app.connection() as connection:
        history = await read_history(connection, view.range.key, view.now, view.namespaces)
        items = await find_attention(
            connection,
            counts,
            Moment(counts, hub.sections, view.namespaces).rows("approvals"),
            view.namespaces,
            view.now,
            hub.doctor.latest,
        )
    states = task_states(counts, view.namespaces)
    return await view.page(
        "overview.html",
        key="overview",
        title="Overview",
        topics=("overview", f"charts:{view.range.key}", "attention"),
        command=shell_command("status", *(() if view.namespace is None else ("--namespace", view.namespace))),
        tiles={
            tile.key: tile
            for tile in (*live_tiles(counts, view.namespaces), *history_tiles(history, view.range.key, view.now))
        },
        sparks=sparks(history),
        charts=charts(history),
        items=items,
        states=states,
        parts=stacked([(STYLES["task"][state].tone, count) for state, count in states]),
        is_old=hub.age_s > COUNT_IS_OLD_S,
        is_new=not sum(count for _, count in states),
    )


def task_states(counts: LiveCounts, namespaces: Namespaces) -> list[tuple[str, int]]:
    """Count the tasks by state, in the order of the lifecycle."""
    found = counts.states("task", namespaces)
    return [(state, found[state]) for state in STYLES["task"]]


def live_tiles(counts: LiveCounts, namespaces: Namespaces) -> list[Tile]:
    """Return the tiles that change every second."""
    rates = counts.rates("task", namespaces)
    states = counts.states("task", namespaces)
    ended = sum(value for move, value in rates.items() if move.target in ENDED)
    change = sum(value for move, value in rates.items() if move.target == "pending") - sum(
        value for move, value in rates.items() if move.source == "pending"
    )
    note, news, tone = f"{whole(states['running'])} running", "", ""
    if change <= -MIN_CHANGE:
        news, tone = f"-{rate_number(-change)}/s", "ok"
        note = f"empty in about {about(states['pending'] / -change)}" if states["pending"] else note
    elif change >= MIN_CHANGE:
        news, tone = f"+{rate_number(change)}/s", "bad"
    slots = counts.slots(namespaces)
    running = f"{whole(states['running'])} of {whole(slots)} slots in use" if slots else "no live worker"
    return [
        Tile("throughput", "Throughput", rate_number(ended) if ended else "0", "tasks/s", running),
        Tile("depth", "Queue depth", whole(states["pending"]), "", note, news, tone),
    ]


def history_tiles(history: History, key: str, now: datetime) -> list[Tile]:
    """Return the tiles that the history gives."""
    run_p95, wait_p95 = history.latest(history.runs["p95"]), history.latest(history.waits["p95"])
    run_value, _, run_unit = seconds(run_p95).partition(" ")
    wait_value, _, wait_unit = seconds(wait_p95).partition(" ")
    p50, p99 = history.latest(history.runs["p50"]), history.latest(history.runs["p99"])
    oldest = "no task is due"
    if history.oldest_due_at:
        oldest = f"oldest due {duration(now.timestamp() - history.oldest_due_at)}"
    share = history.failure_share
    within = key.replace("h", " h").replace("d", " d")
    return [
        Tile("latency", "Latency p95", run_value, run_unit, f"p50 {seconds(p50)} · p99 {seconds(p99)}"),
        Tile("wait", "Wait p95", wait_value, wait_unit, oldest),
        Tile(
            "failures",
            "Failures",
            _percent(share),
            "" if share is None else "%",
            f"in error, of {compact(history.ended)} in {within}",
            whole(history.in_error),
            "bad" if history.in_error else "",
        ),
    ]


def _percent(share: float | None) -> str:
    if share is None:
        return NOTHING
    return f"{share * 100:.2g}" if share < 0.1 else f"{share * 100:.0f}"  # noqa: PLR2004 - two digits


def sparks(history: History) -> dict[str, tuple[str, tuple[str, str]]]:
    """Return tone and paths of the sparkline of each tile."""
    return {
        "throughput": ("green", sparkline(_ended(history))),
        "latency": ("blue", sparkline(history.runs["p95"])),
        "wait": ("violet", sparkline(history.waits["p95"])),
        "depth": ("amber", sparkline(history.depth)),
        "failures": ("red", sparkline(history.failures)),
    }


def _ended(history: History) -> list[float | None]:
    """Return how many tasks ended per second, in either way."""
    return [
        None if done is None or errors is None else done + errors
        for done, errors in zip(history.done, history.errors, strict=True)
    ]


def charts(history: History) -> list[Chart]:
    """Draw the charts."""
    times = history.times

    def percentiles(found: Mapping[str, list[float | None]]) -> list[Line]:
        return [
            Line(name, tone, found[name], seconds(history.latest(found[name])), dashed=name == "p99")
            for name, tone in (("p50", "slate"), ("p95", "blue"), ("p99", "violet"))
        ]

    per = "minute" if history.step_s == 60 else f"{history.step_s / 60:.0f} min"  # noqa: PLR2004 - seconds of a minute
    return [
        chart(
            "Throughput",
            [
                Line("done/s", "green", history.done, rate_number(history.latest(history.done) or 0), area=True),
                Line("error/s", "red", history.errors, rate_number(history.latest(history.errors) or 0), area=True),
            ],
            times,
            rate_number,
        ),
        chart("Latency of attempts", percentiles(history.runs), times, axis_seconds),
        chart("Wait before start", percentiles(history.waits), times, axis_seconds),
        chart(
            f"Failures per {per}",
            [Line("attempts failed", "red", history.failures, whole(history.latest(history.failures) or 0))],
            times,
            compact,
            bars=True,
            whole_numbers=True,
        ),
        chart(
            "Queue depth",
            [Line("pending", "amber", history.depth, compact(history.latest(history.depth) or 0), area=True)],
            times,
            compact,
            whole_numbers=True,
        ),
    ]


# --- live


def _render_live(moment: Moment) -> dict[str, str]:
    states = task_states(moment.counts, moment.namespaces)
    parts = stacked([(STYLES["task"][state].tone, count) for state, count in states])
    fragments = {
        f"tile-{tile.key}": render_macro(PARTS, "tile_value", tile)
        for tile in live_tiles(moment.counts, moment.namespaces)
    }
    return {**fragments, "states": render_macro(PARTS, "states_card", states, parts, _ns(moment.namespaces))}


def _ns(namespaces: Namespaces) -> str:
    return next(iter(namespaces)) if namespaces is not None and len(namespaces) == 1 else ""


async def _read_charts(connection: Connection, moment: Moment) -> History:
    return await read_history(connection, _range(moment), moment.now, moment.namespaces)


def _range(moment: Moment) -> str:
    return moment.argument if moment.argument in RANGES else DEFAULT_RANGE


def _render_charts(moment: Moment) -> dict[str, str]:
    history: History = moment.data
    fragments: dict[str, str] = {
        f"tile-{tile.key}": render_macro(PARTS, "tile_value", tile)
        for tile in history_tiles(history, _range(moment), moment.now)
    }
    for key, (tone, paths) in sparks(history).items():
        fragments[f"spark-{key}"] = render_macro(PARTS, "tile_spark", key, tone, paths)
    for at, drawn in enumerate(charts(history)):
        fragments[f"chart-{at}"] = render_macro(PARTS, "chart_place", at, drawn)
    return fragments


async def _read_attention(connection: Connection, moment: Moment) -> list[Item]:
    return await find_attention(
        connection, moment.counts, moment.rows("approvals"), moment.namespaces, moment.now, moment.report
    )


def _render_attention(moment: Moment) -> dict[str, str]:
    return {"attention": render_macro(PARTS, "attention_card", moment.data, moment.namespaces is None)}


topics.add(Topic(name="overview", render=_render_live))
topics.add(Topic(name="charts", render=_render_charts, read=_read_charts, every_s=CHART_INTERVAL_S))
topics.add(
    Topic(
        name="attention",
        render=_render_attention,
        read=_read_attention,
        every_s=ATTENTION_INTERVAL_S,
        shows_findings=True,
    )
)


def _render_navigation(moment: Moment) -> dict[str, str]:
    counters = {"approvals": len(moment.rows("approvals"))}
    if moment.namespaces is None:
        counters |= {"workers": moment.counts.workers(), "findings": count_findings(moment.report)}
    return {f"n-{name}": render_macro("parts.html", "counter", name, count) for name, count in counters.items()}


topics.add(Topic(name="nav", render=_render_navigation))
