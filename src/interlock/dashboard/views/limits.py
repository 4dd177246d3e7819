"""Limits: how much of each is used, who holds it, what waits, and an operator's override beside the declared rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from starlette.responses import Response

from interlock.client.explain.explanation import shell_command
from interlock.dashboard.format import duration, whole
from interlock.dashboard.pages import View, act_scope, list_version, page_router, sheet_response
from interlock.dashboard.render import render_macro
from interlock.dashboard.topics import Moment, Topic, always, topics
from interlock.dashboard.viewer import OfferedActs
from interlock.store.limit_overrides import LimitHolder, read_limit_changes, read_limit_holders
from interlock.store.stats import LimitUse, list_limits
from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

router = page_router(whole_system=True)
PARTS, SHEETS = "limits_parts.html", "limits_sheets.html"
INTERVAL_S = 10.0
MAX_ROWS = 200
MAX_KEYS_WITH_HOLDERS = 10
MAX_HOLDERS = 3


class Bound(NamedTuple):
    """One bound of a rule: what of how much, and in which time."""

    label: str
    used: float
    allowed: float
    period: str | None = None

    def __str__(self) -> str:
        """Write it: 5 of 5 starts per 10 s."""
        per = f" per {self.period}" if self.period else ""
        return f"{self.used:g} of {self.allowed:g} {self.label}{per}"

    @property
    def is_full(self) -> bool:
        """Whether nothing more is allowed now."""
        return self.used >= self.allowed

    @property
    def fullness(self) -> float:
        """The part that is used; 1 for a bound that allows nothing."""
        return self.used / self.allowed if self.allowed else 1.0


class LimitRow(NamedTuple):
    """A limit as the page shows it."""

    use: LimitUse
    bounds: list[Bound]
    drains_in: str | None
    holders: list[LimitHolder]

    @property
    def key(self) -> str:
        """Its key."""
        return self.use.key

    @property
    def url(self) -> str:
        """The part of URLs that names it."""
        return quote(self.key, safe="")

    @property
    def fullness(self) -> float:
        """How much of its tightest bound is used; 0 without a bound."""
        return max((bound.fullness for bound in self.bounds), default=0.0)

    @property
    def waiting(self) -> str:
        """The number of waiting tasks; with a plus where counting stopped."""
        return whole(self.use.waiting) + ("+" if self.use.is_bound else "")


def make_row(use: LimitUse, holders: list[LimitHolder]) -> LimitRow:
    """Describe a limit."""
    period = None if use.period is None else duration(use.period.total_seconds())
    bounds = [
        Bound(label, used, allowed, length)
        for label, used, allowed, length in (
            ("running", use.taken, use.max_running, None),
            ("starts", use.starts, use.max_starts, period),
            ("weight", use.weight, use.max_weight, period),
            ("cost", use.cost, use.max_cost, period),
        )
        if allowed is not None
    ]
    return LimitRow(use, bounds, _drain_time(use), holders)


def _drain_time(use: LimitUse) -> str | None:
    """Say how long the waiting tasks take at least; None where that depends on how long tasks run."""
    if not use.waiting or use.max_starts is None or use.period is None:
        return None
    return duration(use.waiting / use.max_starts * use.period.total_seconds())


def describe_rule(rule: dict[str, Any] | None) -> str:
    """Write the bounds of a stored rule, whose period is in seconds."""
    if rule is None:
        return "none"
    period = f" per {duration(rule['period'])}" if rule.get("period") else ""
    parts = [
        f"{rule[name]:g} {label}{per}"
        for name, label, per in (
            ("max_running", "running", ""),
            ("max_starts", "starts", period),
            ("max_weight", "weight", period),
            ("max_cost", "cost", period),
        )
        if rule.get(name) is not None
    ]
    return ", ".join(parts) or "no bound"


async def read_rows(connection: Connection) -> list[LimitRow]:
    """Read the limits, those with the most waiting tasks first, and the first holders of the first of them."""
    rows = []
    for at, use in enumerate((await list_limits(connection))[:MAX_ROWS]):
        holders = []
        if use.taken and at < MAX_KEYS_WITH_HOLDERS:
            holders = await read_limit_holders(connection, use.key, limit=MAX_HOLDERS)
        rows.append(make_row(use, holders))
    return rows


@router.get("/limits")
async def show_limits(view: View) -> Response:
    """List the limits."""
    async with view.app.connection() as connection:
        rows = await read_rows(connection)
    offer = OfferedActs(view.viewer.offered_scope)
    return await view.page(
        "limits.html",
        key="limits",
        title="Limits",
        topics=(f"limits:{offer.scope}",),
        command="interlock limits list",
        rows=rows,
        offer=offer,
        version=list_version([row.key for row in rows]),
    )


@router.get("/limits/{key:path}")
async def show_limit(view: View, key: str) -> Response:
    """Show a limit: all holders, and what operators changed."""
    async with view.app.connection() as connection:
        use = await _read_use(connection, key)
        row = make_row(use, await read_limit_holders(connection, key))
        changes = await read_limit_changes(connection, use.rule or key)
    offer = OfferedActs(view.viewer.offered_scope)
    return await view.page(
        "limit.html",
        key="limits",
        title=key,
        crumbs=(("Limits", "/limits"),),
        topics=(f"limits:{offer.scope}",),
        command=shell_command("limits", "show", key),
        row=row,
        offer=offer,
        changes=[(change, describe_rule(change.before), describe_rule(change.after)) for change in changes],
        declared=describe_rule(use.declared) if use.overridden_at else None,
    )


async def _read_use(connection: Connection, key: str) -> LimitUse:
    for use in await list_limits(connection):
        if use.key == key:
            return use
    raise Problem("unknown_limit", f"there is no limit {key}, and no task has the key")


@router.get("/ui/sheet/limits/{key:path}/override", dependencies=[act_scope("admin")])
async def show_override(view: View, key: str) -> Response:
    """Ask for the bounds of an override and its reason."""
    async with view.app.connection() as connection:
        found = [use for use in await list_limits(connection) if key in {use.rule, use.key}]
    if not found:
        raise Problem("unknown_limit", f"there is no limit {key}")
    return sheet_response(SHEETS, "override", key, found[0])


@router.get("/ui/sheet/limits/{key:path}/restore", dependencies=[act_scope("admin")])
async def show_restore(view: View, key: str) -> Response:
    """Ask whether an override is to be taken back."""
    async with view.app.connection() as connection:
        found = [use for use in await list_limits(connection) if key in {use.rule, use.key}]
    if not found:
        raise Problem("unknown_limit", f"there is no limit {key}")
    return sheet_response(SHEETS, "restore", key, found[0], describe_rule(found[0].declared))


async def _read(connection: Connection, _: Moment) -> list[LimitRow]:
    return await read_rows(connection)


def _render(moment: Moment) -> dict[str, str]:
    rows: list[LimitRow] = moment.data
    offer = OfferedActs(moment.argument)
    fragments: dict[str, str] = {f"row-{row.key}": render_macro(PARTS, "line", row, offer) for row in rows}
    version = list_version([row.key for row in rows])
    fragments["limits-version"] = render_macro("parts.html", "list_version", "limits-version", "#limits", version)
    return fragments


topics.add(Topic(name="limits", render=_render, read=_read, every_s=INTERVAL_S, whole_system=always))
