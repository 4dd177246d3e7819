"""`interlock doctor`: proves that a database obeys the rules of the engine, and says what to do where it does not.

Invariant: an examination only reads, in read-only transactions of one snapshot each, so that a busy system gives no
false alarm; every statement has a timeout. A quick examination reads the catalogs, the unfinished rows and the newest
ones, a bounded number of each; a full one reads all rows and all records.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from interlock.errors import MigrationError, StatementError
from interlock.postgres.connection import INSUFFICIENT_PRIVILEGE, QUERY_CANCELED, transaction, translated
from interlock.postgres.query import run
from interlock.store.doctor.catalog import (
    check_catalog,
    check_partitions,
    check_privileges,
    check_queue_view,
    check_schema,
    check_server,
    check_vacuum,
)
from interlock.store.doctor.findings import CODES, DoctorReport, Finding, Severity, make_finding
from interlock.store.doctor.processes import (
    DOCTOR,
    check_expired_leases,
    check_failed_messages,
    check_given_up_webhooks,
    check_limits,
    check_processes,
    check_queue,
    check_transactions,
    check_vanished_workers,
)
from interlock.store.doctor.records import check_all_records, check_open_records
from interlock.store.doctor.rows import (
    ROWS,
    check_deliveries,
    check_jobs,
    check_leases,
    check_messages,
    check_schedules,
)
from interlock.store.explain import read_queue
from interlock.store.leader import read_clock
from interlock.store.workers import list_live_workers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.store.workers import LiveProcess

__all__ = ["CODES", "DOCTOR", "DoctorReport", "Finding", "Severity", "examine", "make_finding"]

QUICK_TIMEOUT_S = 5.0  # of one statement
FULL_TIMEOUT_S = 120.0


class _Examination:
    """The findings of one examination, gathered check by check."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self.connection = connection
        self.timeout_s = timeout_s
        self.findings: list[Finding] = []
        self.facts: dict[str, str] = {}
        self.checked: list[str] = []

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[None]:
        """Open a read-only transaction that sees one moment, and in which no statement runs for long."""
        async with transaction(self.connection):
            with translated(self.connection):
                await self.connection.execute("set transaction isolation level repeatable read, read only")
            await run(self.connection, DOCTOR["limit_statements"], {"timeout": f"{round(self.timeout_s * 1000)}ms"})
            yield

    async def check(self, name: str, made: Coroutine[Any, Any, Any]) -> None:
        """Add the findings of a check; one that is stopped by the timeout, or may not read, is a finding itself."""
        self.checked.append(name)
        try:
            # a savepoint, if a transaction is open: the other checks go on in the same snapshot
            async with transaction(self.connection):
                found = await made
        except StatementError as error:
            self._add_failed_check(name, error)
            return
        except MigrationError as error:  # this role may not read the schema
            self.findings.append(make_finding("privilege_missing", str(error)))
            return
        finally:
            made.close()  # an examination that is canceled may not have begun it
        findings, facts = found if isinstance(found, tuple) else (found, {})
        self.findings += findings
        self.facts |= facts

    async def check_in_own_snapshots(self, name: str, made: Awaitable[list[Finding]]) -> None:
        """Add the findings of a check that opens its snapshots itself."""
        self.checked.append(name)
        try:
            self.findings += await made
        except StatementError as error:
            self._add_failed_check(name, error)

    def _add_failed_check(self, name: str, error: StatementError) -> None:
        if error.sqlstate == QUERY_CANCELED:
            message = f"the check of {name} took longer than {self.timeout_s:g} s and was stopped"
            self.findings.append(make_finding("check_unfinished", message, sample=[name]))
        elif error.sqlstate == INSUFFICIENT_PRIVILEGE:
            self.findings.append(make_finding("privilege_missing", f"the check of {name}: {error}", sample=[name]))
        else:  # a value that the check cannot read, perhaps a corruption itself
            self.findings.append(
                make_finding("check_unfinished", f"the check of {name} failed: {error}", sample=[name])
            )


async def examine(
    connection: Connection,
    *,
    full: bool = False,
    timeout_s: float | None = None,
    now: datetime | None = None,
    progress: Callable[[str], None] | None = None,
) -> DoctorReport:
    """Examine a database. Must not run in a transaction; `timeout_s` limits each statement.

    Without the schema of this release, only the server and the schema are examined.
    """
    begun = time.monotonic()
    examination = _Examination(connection, timeout_s or (FULL_TIMEOUT_S if full else QUICK_TIMEOUT_S))
    async with examination.snapshot():
        moment = await read_clock(connection, now=now)
        await examination.check("server", check_server(connection))
        await examination.check("schema", check_schema(connection))
        has_schema = "schema" in examination.facts
        has_tables = has_schema and await _check_database(examination, moment, now)
        if has_tables:
            if progress is not None:
                progress("jobs, steps and messages")
            await _check_rows(examination, moment, now, full=full)
    if full and has_tables:
        records = check_all_records(connection, now, examination.snapshot, progress=progress)
        await examination.check_in_own_snapshots("records", records)
    order = list(Severity)
    return DoctorReport(
        findings=tuple(sorted(examination.findings, key=lambda finding: order.index(finding.severity))),
        checked=tuple(examination.checked),
        facts=examination.facts,
        is_full=full,
        examined_at=moment,
        duration_s=time.monotonic() - begun,
    )


async def _check_database(examination: _Examination, moment: datetime, now: datetime | None) -> bool:
    """Check the catalogs; return whether all tables are there, so that their rows can be read."""
    connection = examination.connection
    await examination.check("guards, functions, indexes and constraints", check_catalog(connection))
    await examination.check("view of the queue, sequences", check_queue_view(connection))
    await examination.check("partitions", check_partitions(connection, moment))
    await examination.check("rights", check_privileges(connection))
    await examination.check("vacuum", check_vacuum(connection, now))
    return not any(finding.code == "table_damaged" for finding in examination.findings)


async def _check_rows(examination: _Examination, moment: datetime, now: datetime | None, *, full: bool) -> None:
    connection = examination.connection
    queue: dict[str, Any] = {}
    processes: list[LiveProcess] = []
    workflows: set[tuple[str, str]] = set()

    async def read_common() -> tuple[list[Finding], dict[str, str]]:
        queue.update(await read_queue(connection))
        processes.extend(await list_live_workers(connection, now=now))
        workflows.update((row["name"], row["version"]) for row in await run(connection, ROWS["read_versions"], {}))
        return check_queue(queue)

    await examination.check("queue", read_common())
    if not queue:
        return  # this role may not read it
    await examination.check("processes", check_processes(connection, processes, moment, now))
    await examination.check("vanished workers", check_vanished_workers(connection, moment, now))
    await examination.check("long transactions", check_transactions(connection, moment, now))
    await examination.check("expired leases", check_expired_leases(connection, moment, now))
    await examination.check("leases", check_leases(connection, now, full=full))
    if queue["installed"] and queue["there"]:
        await examination.check("dead letters", check_failed_messages(connection, queue["archived"]))
        await examination.check("messages and waits", check_messages(connection, now, full=full))
        await examination.check("jobs and steps", check_jobs(connection, now, full=full))
    await examination.check("schedules", check_schedules(connection, moment, processes, workflows))
    await examination.check("limits", check_limits(connection))
    await examination.check("given up webhooks", check_given_up_webhooks(connection))
    await examination.check("webhooks and usage of limits", check_deliveries(connection, now))
    if not full:
        await examination.check("records", check_open_records(connection, now))
