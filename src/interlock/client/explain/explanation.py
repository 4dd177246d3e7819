"""The answer of `explain`: one data structure for tasks, jobs, workers, namespaces, schedules and limits.

Invariant: every sentence states a fact that the database held at one moment. A command is complete: it can be copied to
a shell; words in capitals are the only parts to replace.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

MAX_NAMES = 5  # in a sentence; further ones are only counted


class FactCode(StrEnum):
    """The kinds of facts, for programs; docs/explain.md describes each with its remedy."""

    # why work waits
    LIMIT_FULL = "limit_full"
    LIMIT_USED_UP = "limit_used_up"
    LIMIT_HAS_ROOM = "limit_has_room"
    LIMIT_UNDECLARED = "limit_undeclared"
    NAMESPACE_PAUSED = "namespace_paused"
    WAITS_FOR_RELEASE = "waits_for_release"
    WAITS_FOR_STEPS = "waits_for_steps"
    WAITS_FOR_SIGNAL = "waits_for_signal"
    WAITS_FOR_APPROVAL = "waits_for_approval"
    SLEEPS = "sleeps"
    NOTHING_OPEN = "nothing_open"
    NOT_DUE = "not_due"
    SUSPECTED = "suspected"
    NO_WORKER = "no_worker"
    NO_HANDLER = "no_handler"
    WORKERS_PAUSED = "workers_paused"
    WORKERS_BUSY = "workers_busy"
    ABOUT_TO_BE_CLAIMED = "about_to_be_claimed"
    WAITS_FOR_KEY = "waits_for_key"
    DEBOUNCED = "debounced"
    WAITS_FOR_ORCHESTRATOR = "waits_for_orchestrator"
    NO_ORCHESTRATOR = "no_orchestrator"
    # how work goes on
    RUNNING = "running"
    WORKER_SILENT = "worker_silent"
    LEASE_EXPIRED = "lease_expired"
    CANCEL_REQUESTED = "cancel_requested"
    OPEN_STEPS = "open_steps"
    COMPENSATES = "compensates"
    ENDS_SOON = "ends_soon"
    WAITS_FOR_CHILDREN = "waits_for_children"
    DEADLINE = "deadline"
    DEAD_LETTER = "dead_letter"
    RESULT_LOST = "result_lost"
    RESULT_QUEUED = "result_queued"
    # how work ended
    ENDED = "ended"
    FAILED = "failed"
    TRIES_USED_UP = "tries_used_up"
    CRASHED_WORKERS = "crashed_workers"
    CANCELED = "canceled"
    WEBHOOK_FAILING = "webhook_failing"
    WEBHOOK_GIVEN_UP = "webhook_given_up"
    # workers, namespaces, schedules
    NOT_STARTED = "not_started"
    HEARTBEAT = "heartbeat"
    NO_HEARTBEAT = "no_heartbeat"
    PROCESS = "process"
    TASKS_IN_HAND = "tasks_in_hand"
    WORKER_ENDED = "worker_ended"
    BACKLOG = "backlog"
    IDLE = "idle"
    SCHEDULE_ACTIVE = "schedule_active"
    SCHEDULE_PAUSED = "schedule_paused"
    SCHEDULE_FAILED = "schedule_failed"
    SCHEDULE_OVERDUE = "schedule_overdue"
    NEXT_TICK = "next_tick"
    LAST_TICK = "last_tick"
    NO_LEADER = "no_leader"
    # context
    STEP_OF_JOB = "step_of_job"
    SHARED_CAUSES = "shared_causes"
    MORE_CAUSES = "more_causes"
    NOT_STORED = "not_stored"


@dataclass(frozen=True, slots=True)
class Evidence:
    """A row that a fact refers to: what holds a limit, a worker, a move."""

    kind: str
    id: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact: since when, its evidence, what would unblock the work, and the command for that."""

    code: FactCode
    text: str
    since: datetime | None = None  # None: as long as the state
    evidence: tuple[Evidence, ...] = ()
    remedy: str | None = None
    command: str | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The state of something and its reasons, the most important first.

    `causes` are the tasks and jobs that block it, each by way of the steps in `through`. `at` is set when the question
    was about an earlier moment.
    """

    kind: str
    id: UUID | str
    name: str
    state: str
    since: datetime | None
    facts: tuple[Fact, ...] = ()
    through: tuple[str, ...] = ()
    causes: tuple[Explanation, ...] = ()
    at: datetime | None = None


def format_moment(moment: datetime | str) -> str:
    """Format a time for a sentence; JSON documents of the database have it as text."""
    at = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def list_names(names: Sequence[str], between: str = ", ") -> str:
    """List the first names, and count the others."""
    rest = len(names) - MAX_NAMES
    return between.join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "") or "none"


def shell_command(*words: object) -> str:
    """Return a command of `interlock` as a line for a shell, quoted where needed."""
    return shlex.join(["interlock", *map(str, words)])


def worker_command(namespace: str) -> str:
    """Return the command that starts a worker of a namespace; the app is the part that only the user knows."""
    return shell_command("worker", "--app", "PACKAGE.MODULE:APP", "--namespaces", namespace)


def holder_evidence(holder: dict[str, Any]) -> Evidence:
    """Describe a task that holds a limit, or that a worker runs: where it runs, and its lease."""
    name = holder["step"] or holder["type"]
    if holder["worker_id"] is None or holder["lease_expires_at"] is None:
        text = f"task {holder['id']} ({name}) is {holder['state']}"
    else:
        lease = format_moment(holder["lease_expires_at"])
        text = (
            f"task {holder['id']} ({name}) is {holder['state']}: attempt {holder['attempt']} at worker "
            f"{holder['worker_id']}, lease until {lease}"
        )
    return Evidence("task", str(holder["id"]), text)


def webhook_facts(webhook: dict[str, Any] | None) -> list[Fact]:
    """Describe a webhook that is not delivered yet."""
    if webhook is None or (not webhook["tries"] and webhook["given_up_at"] is None):
        return []
    target = urlsplit(webhook["url"]).hostname or webhook["url"]
    times = f"{webhook['tries']} time{'s' if webhook['tries'] != 1 else ''}"
    failed = f"its webhook to {target} failed {times}" + (f": {webhook['error']}" if webhook["error"] else "")
    evidence = (Evidence("webhook", str(webhook["id"]), f"webhook {webhook['id']}"),)
    if webhook["given_up_at"] is not None:
        return [
            Fact(
                code=FactCode.WEBHOOK_GIVEN_UP,
                text=f"{failed}; it was given up at {format_moment(webhook['given_up_at'])}",
                since=datetime.fromisoformat(webhook["given_up_at"]),
                evidence=evidence,
                remedy="when the receiver is mended, it can be sent again",
                command=shell_command("webhooks", "retry", webhook["id"]),
            )
        ]
    return [
        Fact(
            code=FactCode.WEBHOOK_FAILING,
            text=failed,
            since=datetime.fromisoformat(webhook["created_at"]),
            evidence=evidence,
            remedy=f"it is tried again at {format_moment(webhook['next_try_at'])}",
        )
    ]


def describe_error(error: dict[str, Any] | None) -> str | None:
    """Return the type and the message of a stored error."""
    if not error:
        return None
    return ": ".join(str(error[part]) for part in ("type", "message") if error.get(part)) or None


def move_evidence(moves: Sequence[dict[str, Any]]) -> tuple[Evidence, ...]:
    """Describe recorded moves."""
    return tuple(
        Evidence(
            "move",
            str(move["id"]),
            f"{format_moment(move['recorded_at'])} {move['from_state'] or ''} -{move['event']}-> {move['to_state']} "
            f"by {move['actor']}" + (f": {move['reason']}" if move["reason"] else ""),
        )
        for move in moves
    )
