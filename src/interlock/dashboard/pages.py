"""The frame of every page: navigation, the viewer, namespace and time range from the URL, and errors as pages.

A page is a route of a router made with `page_router`, with a parameter of type `View`; see "Add a page" in
CONTRIBUTING.md.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import HTMLResponse, RedirectResponse, Response

from interlock.client.app import Interlock
from interlock.dashboard.render import CONTENT_SECURITY_POLICY, render, render_macro
from interlock.dashboard.viewer import Viewer, find_viewer
from interlock.store.access import TokenScope
from interlock.supervisor.http.problems import Problem, problem_from_error, record_problem
from interlock.supervisor.local_token import SIGN_IN_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from interlock.dashboard.app import Dashboard
    from interlock.dashboard.counts import LiveCounts

ALL = "all"  # namespaces
PAGE_HEADERS = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "Cache-Control": "no-store"}
UNAUTHENTICATED = 401


class NavigationItem(NamedTuple):
    """An entry of the navigation; `g` and the key open it."""

    key: str
    title: str
    url: str
    shortcut: str
    # the counter beside the entry, if `live` has one of this name
    counter: str | None = None
    # whether the page shows the whole system, and so nothing to tokens that are limited to namespaces
    whole_system: bool = False


NAVIGATION: tuple[tuple[str, tuple[NavigationItem, ...]], ...] = (
    (
        "",
        (
            NavigationItem("overview", "Overview", "/", "o"),
            NavigationItem("machines", "Machines", "/machines/task", "m"),
            NavigationItem("approvals", "Approvals", "/approvals", "a", "approvals"),
        ),
    ),
    (
        "Work",
        (
            NavigationItem("jobs", "Jobs", "/jobs", "j"),
            NavigationItem("tasks", "Tasks", "/tasks", "t"),
            NavigationItem("schedules", "Schedules", "/schedules", "s", whole_system=True),
            NavigationItem("sorts", "Sorts", "/sorts", "r", whole_system=True),
        ),
    ),
    (
        "Capacity",
        (
            NavigationItem("workers", "Workers", "/workers", "w", "workers", whole_system=True),
            NavigationItem("limits", "Limits", "/limits", "l", whole_system=True),
            NavigationItem("namespaces", "Namespaces", "/namespaces", "n"),
        ),
    ),
    (
        "Trust",
        (
            NavigationItem("audit", "Audit", "/audit", "u", whole_system=True),
            NavigationItem("doctor", "Doctor", "/doctor", "d", "findings", whole_system=True),
        ),
    ),
)
NAVIGATION_ICONS = {"approvals": "inbox"}  # where the icon has another name than the page


def navigation_of(viewer: Viewer) -> list[tuple[str, list[NavigationItem]]]:
    """Return the navigation without pages that a token limited to namespaces may not see."""
    groups = [
        (title, [item for item in items if viewer.namespaces is None or not item.whole_system])
        for title, items in NAVIGATION
    ]
    return [(title, items) for title, items in groups if items]


class TimeRange(NamedTuple):
    """A range of time that charts show."""

    key: str
    length: timedelta


RANGES = {
    found.key: found
    for found in (
        TimeRange("1h", timedelta(hours=1)),
        TimeRange("6h", timedelta(hours=6)),
        TimeRange("24h", timedelta(hours=24)),
        TimeRange("7d", timedelta(days=7)),
    )
}
DEFAULT_RANGE = "1h"


@dataclass(slots=True)
class PageView:
    """One request for a page: the viewer, the app, and the part of the URL that travels from page to page."""

    request: Request
    dashboard: Dashboard
    viewer: Viewer
    namespace: str | None  # None: all that the viewer may see
    range: TimeRange
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def app(self) -> Interlock:
        """The app; its connections wait a bounded time."""
        app: Interlock = self.request.app.state.app
        return app

    @property
    def namespaces(self) -> frozenset[str] | None:
        """The namespaces to show: the chosen one, or all that the viewer may see (None: no limit)."""
        return self.viewer.namespaces if self.namespace is None else frozenset({self.namespace})

    def url(self, path: str, **changes: str | None) -> str:
        """Return the URL of a page, with the namespace and the range of this one; None removes a parameter."""
        kept: dict[str, str | None] = {
            "ns": self.namespace,
            "range": None if self.range.key == DEFAULT_RANGE else self.range.key,
        }
        query = {name: value for name, value in (kept | changes).items() if value is not None}
        return f"{path}?{urlencode(query)}" if query else path

    def here(self, **changes: str | None) -> str:
        """Return the URL of this page with changed parameters; None removes one."""
        query: dict[str, str | None] = dict(self.request.query_params)
        left = {name: value for name, value in (query | changes).items() if value is not None}
        path = self.request.url.path
        return f"{path}?{urlencode(left)}" if left else path

    async def page(
        self,
        template: str,
        *,
        key: str,
        title: str,
        topics: tuple[str, ...] = (),
        crumbs: tuple[tuple[str, str], ...] = (),
        status: int = 200,
        command: str | None = None,
        **values: Any,
    ) -> Response:
        """Render a page.

        `key`: its entry in the navigation. `topics`: what its live updates subscribe to. `command`: the command that
        shows the same, for "Copy as command". `crumbs`: pairs of a title and a URL that lead here.
        """
        hub = self.dashboard.hub
        counts = await hub.current(self.app, self.namespaces)
        frame = {
            "view": self,
            "viewer": self.viewer,
            "now": self.now,
            "page_key": key,
            "page_title": title,
            "topics": topics,
            "crumbs": crumbs,
            "command": command,
            "navigation": navigation_of(self.viewer),
            "navigation_icons": NAVIGATION_ICONS,
            "ranges": RANGES,
            "counters": hub.counters(self.viewer.namespaces),
            "namespace_names": self._namespace_names(counts),
            "server_version": hub.server_version,
            "stream": f"/ui/events?{urlencode({'t': ','.join(('nav', *topics)), 'ns': self.namespace or ALL})}",
        }
        return page_response(self.request, template, status, **frame, **values)

    def _namespace_names(self, counts: LiveCounts) -> list[str]:
        names = counts.namespaces()
        if self.namespace is not None:
            names.add(self.namespace)
        return sorted(names if self.viewer.namespaces is None else names & self.viewer.namespaces)


def page_response(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """Render a template with the theme that the viewer chose."""
    theme = request.cookies.get("interlock_theme", "")
    html = render(template, theme=theme if theme in {"light", "dark"} else "", **values)
    return HTMLResponse(html, status, PAGE_HEADERS)


class PageRoute(APIRoute):
    """A route whose errors are pages: a missing session leads to sign-in, everything else is shown."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler with its errors turned into pages."""
        handle = super().get_route_handler()

        async def respond(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError:
                problem = Problem("unknown_path", "there is no such page")
                error: Exception = problem
            except Exception as caught:  # noqa: BLE001 - as the handler of problems does, for a person
                problem, error = problem_from_error(caught), caught
            if problem.status == UNAUTHENTICATED:
                return sign_in_redirect(request)
            record_problem(problem, error, request.method, request.url.path)
            return error_page(request, problem)

        return respond


def sign_in_redirect(request: Request) -> Response:
    """Send the viewer to the sign-in page, and back afterwards."""
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    query = f"?{urlencode({'next': path})}" if path != "/" else ""
    return RedirectResponse(f"{SIGN_IN_PATH}{query}", 303, PAGE_HEADERS)


def error_page(request: Request, problem: Problem) -> Response:
    """Show a problem."""
    return page_response(request, "error.html", problem.status, problem=problem.document(request.url.path))


def sheet_response(template: str, macro: str, *values: Any) -> Response:
    """Render a confirm sheet, which is a macro."""
    return HTMLResponse(render_macro(template, macro, *values), headers=PAGE_HEADERS)


def list_version(keys: Iterable[str]) -> str:
    """Return a text that changes when a list gets or loses a row."""
    return f"{zlib.crc32(chr(0).join(keys).encode()):x}"


async def _open_view(request: Request, ns: str | None = None, range: str = DEFAULT_RANGE) -> PageView:  # noqa: A002 - the name in the URL
    viewer = await find_viewer(request)
    viewer.caller.require(TokenScope.READ, "the dashboard")
    namespace = None if ns in {None, "", ALL} else ns
    viewer.require_namespace(namespace)
    return PageView(request, request.app.state.dashboard, viewer, namespace, RANGES.get(range, RANGES[DEFAULT_RANGE]))


View = Annotated[PageView, Depends(_open_view)]


def page_router(*, whole_system: bool = False) -> APIRouter:
    """Make a router for pages; those that show the `whole_system` are refused to tokens limited to namespaces."""
    dependencies = [Depends(_require_all_namespaces)] if whole_system else []
    return APIRouter(include_in_schema=False, route_class=PageRoute, dependencies=dependencies)


async def _require_all_namespaces(view: View) -> None:
    view.viewer.require_all_namespaces("this page")


def act_scope(scope: str) -> Any:
    """Return the dependency of a confirm sheet: the scope that its act needs."""

    async def require(view: View) -> None:
        view.viewer.require_act(scope)

    return Depends(require)
