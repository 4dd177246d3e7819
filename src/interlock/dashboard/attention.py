"""Problems that an operator can act on, most severe first."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode

from interlock.dashboard.format import duration, exact, parse_time, short_id, whole
from interlock.dashboard.views.limits import make_row
from interlock.store.doctor import CODES, Severity
from interlock.store.figures import count_failures_by_type
from interlock.store.limits import read_waiting_lanes
from interlock.store.stats import count_unfinished_tasks, list_limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from interlock.dashboard.counts import LiveCounts, Namespaces
    from interlock.postgres.connection import Connection
    from interlock.store.doctor import DoctorReport

FAILURE_SHARE = 0.2  # of the attempts of a type within the last hour
MIN_FAILURES = 5
MAX_ITEMS = 8
MAX_FINDINGS = 3  # of one severity
SHOWN_OTHERWISE = frozenset({"namespace_unserved"})  # findings that are items of their own
TONES = {Severity.ERROR: ("red", "cross"), Severity.WARNING: ("amber", "warn"), Severity.NOTE: ("slate", "list")}


class Item(NamedTuple):
    """One problem: `code` within the texts is set in a fixed-width font."""

    tone: str
    icon: str
    before: str
    code: str
    after: str
    detail: str
    act: str
    url: str


async def find_attention(
    connection: Connection,
    counts: LiveCounts,
    approvals: list[dict[str, object]],
    namespaces: Namespaces,
    now: datetime,
    report: DoctorReport | None,
) -> list[Item]:
    """List what needs attention; `report`: the latest one of doctor."""
    items = [
        *_findings(report, namespaces, Severity.ERROR),
        *await _unserved(connection, counts, namespaces, now),
        *await _failing(connection, namespaces, now),
        *_failed_workers(counts, namespaces),
        *_approvals(approvals, now),
        *_findings(report, namespaces, Severity.WARNING),
        *await _limits(connection, namespaces),
    ]
    return items[:MAX_ITEMS]


def _url(path: str, **query: str) -> str:
    return f"{path}?{urlencode({name: value for name, value in query.items() if value})}"


def _findings(report: DoctorReport | None, namespaces: Namespaces, severity: Severity) -> list[Item]:
    if report is None or namespaces is not None:  # doctor examines all namespaces together
        return []
    tone, icon = TONES[severity]
    return [
        Item(tone, icon, found.message, "", "", _describe(found.code), "See remedy", "/doctor")
        for found in report.findings
        if found.severity == severity and found.code not in SHOWN_OTHERWISE
    ][:MAX_FINDINGS]


def _describe(code: str) -> str:
    return f"Doctor: {code}. {CODES[code].meaning}" if code in CODES else f"Doctor: {code}."


async def _unserved(connection: Connection, counts: LiveCounts, namespaces: Namespaces, now: datetime) -> list[Item]:
    served = {name for process in counts.processes if process["role"] == "worker" for name in process["namespaces"]}
    items = []
    for count in await count_unfinished_tasks(connection):
        if count.oldest_due_at is None or count.namespace in served:
            continue
        if namespaces is not None and count.namespace not in namespaces:
            continue
        noun = "task" if count.tasks == 1 else "tasks"
        items.append(
            Item(
                "red",
                "warn",
                "Namespace ",
                count.namespace,
                f" has {whole(count.tasks)} pending {noun} and no live worker",
                f"The oldest has been due for {duration((now - count.oldest_due_at).total_seconds())}.",
                "See tasks",
                _url("/tasks", state="pending", ns=count.namespace),
            )
        )
    return items


async def _failing(connection: Connection, namespaces: Namespaces, now: datetime) -> list[Item]:
    found = await count_failures_by_type(connection, within=timedelta(hours=1), namespaces=namespaces, now=now)
    return [
        Item(
            "red",
            "cross",
            "",
            row["type"] or "…",
            f" fails {row['failed'] / row['attempts']:.0%} of attempts",
            f"{whole(row['failed'])} of {whole(row['attempts'])} attempts failed within an hour in namespace "
            f"{row['namespace']}; {whole(row['in_error'] or 0)} tasks ended in error.",
            "See tasks",
            _url("/tasks", state="error", type=row["type"], ns=row["namespace"]),
        )
        for row in found
        if row["failed"] >= MIN_FAILURES and row["failed"] / row["attempts"] >= FAILURE_SHARE
    ]


def _failed_workers(counts: LiveCounts, namespaces: Namespaces) -> list[Item]:
    failed = 0 if namespaces is not None else counts.states("supervised-worker")["FAILED"]
    if not failed:  # or not of these namespaces alone
        return []
    text = "1 worker has" if failed == 1 else f"{whole(failed)} workers have"
    detail = (
        "Its record names the cause and the task that it held." if failed == 1 else "Their records name the causes."
    )
    return [Item("red", "workers", f"{text} failed", "", "", detail, "See workers", "/workers?status=FAILED")]


def _approvals(approvals: list[dict[str, object]], now: datetime) -> list[Item]:
    if not approvals:
        return []
    oldest = approvals[0]
    waited = parse_time(oldest["wait_started_at"])  # type: ignore[arg-type] # a time as text
    ends = parse_time(oldest["wait_until"])  # type: ignore[arg-type] # the same
    text = "1 approval waits" if len(approvals) == 1 else f"{whole(len(approvals))} approvals wait"
    since = "" if waited is None else f", the oldest for {duration((now - waited).total_seconds())}"
    detail = f"{oldest['step']} of {oldest['name']} {short_id(oldest['job_id'])}"
    detail += "." if ends is None else f" expires in {duration((ends - now).total_seconds())}."
    return [Item("amber", "hand", text + since, "", "", detail, "Open inbox", "/approvals")]


async def _limits(connection: Connection, namespaces: Namespaces) -> list[Item]:
    if namespaces is not None:  # a key may be shared with other namespaces
        return []
    rows = [make_row(limit, []) for limit in await list_limits(connection) if limit.waiting]
    holding = _holding_keys({row.key: row.fullness for row in rows}, await read_waiting_lanes(connection))
    items = []
    for row in rows:
        if row.key not in holding:
            continue
        noun = "task" if row.waiting == "1" else "tasks"
        used = ", ".join(str(bound) for bound in [each for each in row.bounds if each.is_full] or row.bounds)
        room = "" if row.use.next_at is None else f"; room again at {exact(row.use.next_at)}"
        items.append(
            Item(
                "amber",
                "limits",
                "Limit ",
                row.key,
                f" holds {row.waiting} {noun}",
                f"{used}{room}.",
                "See limit",
                f"/limits/{row.url}",
            )
        )
    return items[:3]


def _holding_keys(fullness: Mapping[str, float], lanes: Iterable[tuple[str, ...]]) -> set[str]:
    """Return the keys that hold tasks: of the keys that tasks wait for together, the full ones, or the fullest."""
    holding = set()
    for keys in lanes:
        least = min(1.0, max(fullness.get(key, 0.0) for key in keys))
        holding |= {key for key in keys if fullness.get(key, 0.0) >= least}
    return holding
