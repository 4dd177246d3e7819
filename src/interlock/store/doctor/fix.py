"""`interlock doctor --fix`: repairs what can be repaired by the engine's own files, statements and legal moves.

No repair writes a state or a record: the functions and guards of this release are applied again, counters are counted
again, leases end, messages are sent, and the engine does the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from interlock.errors import StoreError
from interlock.postgres.connection import transaction
from interlock.postgres.migrate import reapply_scripts
from interlock.postgres.query import run
from interlock.store.doctor.findings import number
from interlock.store.doctor.rows import MAX_LEASE, ROWS
from interlock.store.jobs import ORCHESTRATION
from interlock.store.retention import RETENTION
from interlock.store.schedules import pause_schedules, resume_schedules
from interlock.store.step_results import SimpleStepMessage, replay_results, send_messages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.store.doctor.findings import Finding

LOCK_TIMEOUT = "10s"


async def fix(connection: Connection, findings: Iterable[Finding], *, now: datetime | None = None) -> list[str]:
    """Repair findings as far as possible; return what was done, and what was refused, one line for each repair."""
    done: list[str] = []
    are_scripts_restored = False
    for finding in findings:
        repair = _REPAIRS.get(finding.code)
        if repair is None or (repair is _restore_scripts and are_scripts_restored):
            continue
        are_scripts_restored = are_scripts_restored or repair is _restore_scripts
        try:
            done.append(await repair(connection, finding, now))
        except StoreError as error:
            done.append(f"{finding.code}: not repaired: {error}")
    return done


async def _restore_scripts(connection: Connection, finding: Finding, now: datetime | None) -> str:
    del finding, now
    return f"applied {number(await reapply_scripts(connection), 'file')} of functions and guards again"


async def _restore_view(connection: Connection, finding: Finding, now: datetime | None) -> str:
    del finding, now
    await run(connection, ROWS["restore_queue_view"], {})
    return "created the view of the queue again"


async def _add_partitions(connection: Connection, finding: Finding, now: datetime | None) -> str:
    del finding, now
    async with transaction(connection):
        await run(connection, RETENTION["limit_lock_wait"], {})
        (row,) = await run(connection, RETENTION["add_record_partitions"], {})
    return f"created {number(row['made'], 'partition')} of records"


async def _recount_jobs(connection: Connection, finding: Finding, now: datetime | None) -> str:
    """Count the steps of jobs again, and let an orchestrator look at them: it ends them if no step is open."""
    ids = [UUID(id_) for id_ in finding.sample]
    lock = {"ids": sorted(ids), "actor": "doctor", "now": now, "own": True, "lock_timeout": LOCK_TIMEOUT}
    async with transaction(connection):
        await run(connection, ORCHESTRATION["lock_jobs"], lock)
        for id_ in ids:
            await run(connection, ROWS["recount_steps"], {"id": id_, "now": now})
        await run(connection, *send_messages(SimpleStepMessage(id_) for id_ in ids))
    return f"counted the steps of {number(len(ids), 'job')} again and asked an orchestrator to look at them"


async def _resend_results(connection: Connection, finding: Finding, now: datetime | None) -> str:
    sent = 0
    for id_ in finding.sample:
        sent += await replay_results(connection, UUID(id_), now=now)
    return f"sent {number(sent, 'result')} again"


async def _shorten_leases(connection: Connection, finding: Finding, now: datetime | None) -> str:
    del finding
    ended = 0
    for name in ("shorten_leases", "shorten_leads", "shorten_worker_leases", "shorten_pool_leases"):
        ended += len(await run(connection, ROWS[name], {"longest": MAX_LEASE, "now": now}))
    return f"let {number(ended, 'lease')} end; live processes take over"


async def _replace_ticks(connection: Connection, finding: Finding, now: datetime | None) -> str:
    """Pause and resume a schedule: its next tick is computed again."""
    async with transaction(connection):
        await pause_schedules(connection, finding.sample, actor="doctor", now=now)
        resumed = await resume_schedules(
            connection, finding.sample, actor="doctor", reason="its next tick was misplaced", now=now
        )
    return f"computed the next tick of {', '.join(resumed)} again"


async def _delete_future_usage(connection: Connection, finding: Finding, now: datetime | None) -> str:
    deleted = await run(connection, ROWS["delete_future_usage"], {"now": now})
    return f"deleted {number(len(deleted), 'row')} of usage of {', '.join(finding.sample)}"


async def _show_postponed_jobs(connection: Connection, finding: Finding, now: datetime | None) -> str:
    del finding
    shown = await run(connection, ROWS["show_postponed_jobs"], {"now": now})
    return f"let orchestrators look at {number(len(shown), 'job')} again"


_REPAIRS: dict[str, Callable[[Connection, Finding, datetime | None], Awaitable[str]]] = {
    "guard_missing": _restore_scripts,
    "guard_disabled": _restore_scripts,
    "guard_changed": _restore_scripts,
    "function_changed": _restore_scripts,
    "constraint_missing": _restore_scripts,
    "view_changed": _restore_view,
    "partition_missing": _add_partitions,
    "job_counters_wrong": _recount_jobs,
    "job_not_finished": _recount_jobs,
    "job_postponed": _show_postponed_jobs,
    "result_not_sent": _resend_results,
    "lease_too_long": _shorten_leases,
    "schedule_misplaced": _replace_ticks,
    "limit_usage_misplaced": _delete_future_usage,
}
FIXABLE_CODES = frozenset(_REPAIRS)
