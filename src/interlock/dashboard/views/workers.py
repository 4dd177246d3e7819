"""Workers and pools: what runs where, how much of it is used, and the acts of an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import quote, unquote

from fastapi import Query
from starlette.responses import RedirectResponse, Response

from interlock.client.explain.explanation import shell_command
from interlock.dashboard.format import parse_time, whole
from interlock.dashboard.pages import PAGE_HEADERS, View, act_scope, list_version, page_router, sheet_response
from interlock.dashboard.render import render_macro
from interlock.dashboard.states import STYLES
from interlock.dashboard.topics import Moment, Topic, always, topics
from interlock.dashboard.viewer import OfferedActs
from interlock.lifecycle import SUPERVISED_WORKER, SupervisedWorkerState
from interlock.store.explain import count_running_by_worker
from interlock.store.history import read_history_page
from interlock.store.live import LiveParameters, read_live
from interlock.store.pools import read_pool
from interlock.store.workers import find_worker_page, read_worker, resolve_worker_id
from interlock.supervisor.http.pagination import decode_time_and_id, time_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from interlock.dashboard.counts import LiveCounts, Namespaces
    from interlock.postgres.connection import Connection

router = page_router(whole_system=True)
PARTS, SHEETS = "workers_parts.html", "workers_sheets.html"
MACHINE = "supervised-worker"
PAGE_ROWS = 50
MAX_MOVES = 200
EVERY_STATE = "all"  # in the URL: ended workers too


class WorkerRow(NamedTuple):
    """A worker as the pages show it."""

    id: str
    state: str
    role: str
    live: bool
    pool: str | None
    namespaces: list[str]
    slots: int | None
    held: int
    memory_bytes: int | None
    heartbeat_at: datetime | None
    created_at: datetime
    updated_at: datetime
    host: str | None
    pid: int | None
    reason: str | None
    note: str | None
    restart_at: datetime | None
    process_started_at: datetime | None
    spec: dict[str, Any] | None
    supervisor_id: str | None

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor starts and ends its process."""
        return self.spec is not None

    @property
    def acts(self) -> list[tuple[str, str]]:
        """Label and path of the acts that its state allows, besides the end."""
        found = {
            SupervisedWorkerState.IDLE: [("Start", "/api/workers/{}/start")] if self.is_supervised else [],
            SupervisedWorkerState.RUNNING: [("Pause", "/api/supervisor/workers/{}/pause")],
            SupervisedWorkerState.PAUSED: [("Resume", "/api/supervisor/workers/{}/resume")],
        }.get(SupervisedWorkerState(self.state), [])
        return [(label, path.format(quote(self.id, safe=""))) for label, path in found]

    @property
    def has_ended(self) -> bool:
        """Whether it ended."""
        return self.state in SUPERVISED_WORKER.final


def worker_row(row: Mapping[str, Any], held: Mapping[str, int] | None = None) -> WorkerRow:
    """Make the row of a worker from a row of the table, or of the live section."""
    metadata = row.get("metadata") or {}
    spec = row["spec"] if "spec" in row else metadata.get("spec")
    slots = row["slots"] if "slots" in row else (metadata.get("statistics") or {}).get("slots")
    holder = row.get("instance") or row["id"]
    return WorkerRow(
        id=row["id"],
        state=row["status"],
        role=row.get("role") or metadata.get("role", "worker"),
        live=row["live"],
        pool=row["pool"],
        namespaces=row["namespaces"] or (spec or {}).get("namespaces") or [],
        slots=slots or (spec or {}).get("concurrency"),
        held=row["held"] if held is None else held.get(holder, 0),
        memory_bytes=row["memory_bytes"],
        heartbeat_at=parse_time(row["heartbeat_at"]),
        created_at=parse_time(row["created_at"]),  # type: ignore[arg-type] # never null
        updated_at=parse_time(row["updated_at"]),  # type: ignore[arg-type] # never null
        host=row["host"],
        pid=row["pid"],
        reason=row["reason"],
        note=row["process_note"],
        restart_at=parse_time(row["restart_at"]),
        process_started_at=parse_time(row.get("process_started_at")),
        spec=spec,
        supervisor_id=row["supervisor_id"],
    )


def shown_workers(rows: Iterable[Mapping[str, Any]], namespaces: Namespaces) -> list[WorkerRow]:
    """Return the workers that serve one of the namespaces and have not ended."""
    found = [worker_row(row) for row in rows]
    return [
        row for row in found if not row.has_ended and (namespaces is None or not namespaces.isdisjoint(row.namespaces))
    ]


def shown_pools(rows: Iterable[Mapping[str, Any]], namespaces: Namespaces) -> list[dict[str, Any]]:
    """Return the pools that may serve one of the namespaces."""
    found = []
    for row in rows:
        served = row["spec"].get("namespaces")
        if namespaces is None or served is None or not namespaces.isdisjoint(served):
            found.append({**row, "scaled_at": parse_time(row["scaled_at"])})
    return found


def summary(counts: LiveCounts, namespaces: Namespaces, workers: Iterable[WorkerRow]) -> str:
    """Say how many are live and how many slots are used."""
    live = counts.workers(namespaces)
    slots = counts.slots(namespaces)
    held = sum(row.held for row in workers)
    return f"{whole(live)} live · {whole(held)} of {whole(slots)} slots in use" if live else "none is live"


@router.get("/workers")
async def show_workers(
    view: View,
    state: Annotated[str | None, Query(max_length=40)] = None,
    status: Annotated[str | None, Query(max_length=40)] = None,
    pool: Annotated[str | None, Query(max_length=100)] = None,
    cursor: Annotated[str | None, Query(max_length=400)] = None,
) -> Response:
    """List the pools and the workers: those that have not ended, or all of a state or a pool."""
    state = state or status
    wanted = None if state in {None, "", EVERY_STATE} else state
    is_live = not (state or pool or cursor)
    counts = await view.dashboard.hub.current(view.app, view.namespaces)
    next_cursor = None
    async with view.app.connection() as connection:
        sections = await read_live(connection, frozenset({"workers", "pools"}), LiveParameters(), now=view.app.now())
        if is_live:
            rows = shown_workers(sections["workers"], view.namespaces)
        else:
            rows, next_cursor = await _find(connection, wanted, pool, cursor, view.namespaces)
    pools = shown_pools(sections["pools"], view.namespaces)
    offer = OfferedActs(view.viewer.offered_scope)
    options = ("--status", wanted) if wanted else ("--all",) if state == EVERY_STATE else ()
    return await view.page(
        "workers.html",
        key="workers",
        title="Workers",
        topics=(f"workers:{offer.scope}",) if is_live else (),
        command=shell_command("workers", "list", *options),
        offer=offer,
        pools=pools,
        rows=rows,
        summary=summary(counts, view.namespaces, shown_workers(sections["workers"], view.namespaces)),
        states=[(name, counts.states(MACHINE)[name]) for name in STYLES[MACHINE]],
        state=state,
        pool=pool,
        is_live=is_live,
        version=list_version([row.id for row in rows]),
        pools_version=list_version([found["name"] for found in pools]),
        next_cursor=next_cursor,
    )


async def _find(
    connection: Connection, state: str | None, pool: str | None, cursor: str | None, namespaces: Namespaces
) -> tuple[list[WorkerRow], str | None]:
    page = await find_worker_page(
        connection,
        statuses=None if state is None else [state],
        pool=pool,
        namespaces=None if namespaces is None else sorted(namespaces),
        before=decode_time_and_id(cursor),
        limit=PAGE_ROWS,
    )
    held = await count_running_by_worker(connection)
    shown = time_page(page, lambda row: worker_row(row, held))
    return shown["items"], shown["next"]


@router.get("/workers/{worker_id:path}")
async def show_worker(view: View, worker_id: str, after: Annotated[int, Query(ge=0, lt=2**63)] = 0) -> Response:
    """Show a worker: the tasks in its hands, its process, its settings and its history, a page after the record."""
    parameters = LiveParameters(worker_ids=[worker_id])
    async with view.app.connection() as connection:
        row_id = await resolve_worker_id(connection, worker_id)
        if row_id != worker_id:  # the instance of a process, as tasks name it
            return RedirectResponse(view.url(f"/workers/{quote(row_id, safe='')}"), 303, PAGE_HEADERS)
        stored = await read_worker(connection, worker_id)
        sections = await read_live(connection, frozenset({"workers", "held_tasks"}), parameters, now=view.app.now())
        moves = await read_history_page(connection, "worker", worker_id, after=after, limit=MAX_MOVES + 1)
    row = next(worker_row(found) for found in sections["workers"] if found["id"] == worker_id)
    offer = OfferedActs(view.viewer.offered_scope)
    place = quote(worker_id, safe="")
    return await view.page(
        "worker.html",
        key="workers",
        title=worker_id,
        crumbs=(("Workers", "/workers"),),
        topics=(f"worker:{offer.scope}/{place}", f"held:{place}"),
        command=shell_command("workers", "show", worker_id),
        offer=offer,
        row=row,
        stored=stored,
        held=held_tasks(sections["held_tasks"], worker_id),
        moves=moves[:MAX_MOVES][::-1],
        later=view.here(after=str(moves[MAX_MOVES - 1].id)) if len(moves) > MAX_MOVES else None,
    )


def held_tasks(rows: Iterable[Mapping[str, Any]], worker_id: str) -> list[dict[str, Any]]:
    """Return the tasks in the hands of a worker."""
    return [
        {**row, "started_at": parse_time(row["started_at"]), "lease_expires_at": parse_time(row["lease_expires_at"])}
        for row in rows
        if row["worker"] == worker_id
    ]


# --- sheets


@router.get("/ui/sheet/workers/new", dependencies=[act_scope("admin")])
async def show_new_worker(_: View) -> Response:
    """Ask for the settings of a new worker."""
    return sheet_response(SHEETS, "new_worker")


@router.get("/ui/sheet/pools/new", dependencies=[act_scope("admin")])
async def show_new_pool(_: View) -> Response:
    """Ask for the settings of a new pool."""
    return sheet_response(SHEETS, "new_pool")


@router.get("/ui/sheet/pools/{name}/scale", dependencies=[act_scope("operate")])
async def show_scale(view: View, name: str) -> Response:
    """Ask how many workers a pool should have."""
    async with view.app.connection() as connection:
        return sheet_response(SHEETS, "scale_pool", await read_pool(connection, name))


@router.get("/ui/sheet/pools/{name}/delete", dependencies=[act_scope("admin")])
async def show_delete_pool(view: View, name: str) -> Response:
    """Ask whether a pool is to be deleted."""
    async with view.app.connection() as connection:
        return sheet_response(SHEETS, "delete_pool", await read_pool(connection, name))


@router.get("/ui/sheet/workers/{worker_id:path}/terminate", dependencies=[act_scope("admin")])
async def show_terminate(view: View, worker_id: str) -> Response:
    """Ask whether a worker is to be terminated."""
    return await _ending(view, worker_id, "terminate")


@router.get("/ui/sheet/workers/{worker_id:path}/kill", dependencies=[act_scope("admin")])
async def show_kill(view: View, worker_id: str) -> Response:
    """Ask whether the process of a worker is to be killed."""
    return await _ending(view, worker_id, "kill")


async def _ending(view: View, worker_id: str, macro: str) -> Response:
    async with view.app.connection() as connection:
        row = worker_row(await read_worker(connection, worker_id), await count_running_by_worker(connection))
    return sheet_response(SHEETS, macro, row)


# --- live


def _render_workers(moment: Moment) -> dict[str, str]:
    offer = OfferedActs(moment.argument)
    rows = shown_workers(moment.sections.get("workers", ()), moment.namespaces)
    pools = shown_pools(moment.sections.get("pools", ()), moment.namespaces)
    states = moment.counts.states(MACHINE)
    fragments: dict[str, str] = {f"row-{row.id}": render_macro(PARTS, "worker_line", row, offer) for row in rows}
    fragments |= {f"pool-{pool['name']}": render_macro(PARTS, "pool_line", pool, offer) for pool in pools}
    fragments |= {f"wc-{name}": render_macro(PARTS, "state_count", name, states[name]) for name in STYLES[MACHINE]}
    text = summary(moment.counts, moment.namespaces, rows)
    fragments["workers-summary"] = render_macro(PARTS, "summary_line", text)
    version = list_version([row.id for row in rows])
    fragments["workers-version"] = render_macro("parts.html", "list_version", "workers-version", "#fleet", version)
    names = list_version([pool["name"] for pool in pools])
    fragments["pools-version"] = render_macro("parts.html", "list_version", "pools-version", "#fleet", names)
    return fragments


def _render_worker(moment: Moment) -> dict[str, str]:
    scope, _, place = moment.argument.partition("/")
    for found in moment.sections.get("workers", ()):
        if found["id"] == unquote(place):
            row = worker_row(found)
            return {
                "worker-head": render_macro(PARTS, "worker_head", row, OfferedActs(scope)),
                "worker-process": render_macro(PARTS, "process_card", row),
            }
    return {}


def _render_held(moment: Moment) -> dict[str, str]:
    rows = held_tasks(moment.sections.get("held_tasks", ()), unquote(moment.argument))
    return {"worker-held": render_macro(PARTS, "held_card", rows)}


topics.add(Topic(name="workers", render=_render_workers, sections=frozenset({"workers", "pools"}), whole_system=always))
topics.add(Topic(name="worker", render=_render_worker, sections=frozenset({"workers"}), whole_system=always))
topics.add(
    Topic(
        name="held",
        render=_render_held,
        sections=frozenset({"workers", "held_tasks"}),
        watches=("worker_ids",),
        whole_system=always,
    )
)
