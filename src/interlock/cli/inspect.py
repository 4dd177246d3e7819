"""`interlock doctor`: whether the rules of the engine hold."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from interlock.cli.app_context import InJson
from interlock.cli.format import (
    format_json,
    format_table,
    print_note,
)
from interlock.config import Config
from interlock.errors import StoreError
from interlock.postgres.connection import connect, database_url
from interlock.store.doctor import DoctorReport, Finding, Severity, examine, make_finding
from interlock.store.doctor.fix import fix

DOCTOR_HEADER = ("", "code", "rows", "found", "remedy")
# 2 is the code of wrong usage
_EXIT_CODES = {Severity.ERROR: 1, Severity.WARNING: 3}


def doctor(
    context: typer.Context,
    full: Annotated[
        bool,
        typer.Option(
            "--full/--quick",
            help="All rows and all records, in ranges; or the catalogs, the unfinished rows and the newest ones.",
        ),
    ] = False,
    fix_: Annotated[
        bool,
        typer.Option("--fix", help="Repair what legal moves and the files of this release can repair; examine again."),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds after which a statement is stopped; 5 with --quick, 120 with --full."),
    ] = None,
    in_json: InJson = False,
) -> None:
    """Examine the database and the processes: whether the engine's rules hold, and what to do where they do not.

    Compares guards, functions, indexes and rights with those of this release; the state of each row with its records;
    each chain of records with its lifecycle; jobs, steps, counters, leases, messages, schedules, limits and webhooks
    with each other. Only reads, unless --fix is given. Each finding has a code, a severity (error, warning, note), the
    number of rows and a remedy.

    Exit code: 0 without findings or with notes only, 1 with an error, 3 with warnings only. As a monitor:
    `interlock doctor --json`, every minute. After an incident or a restore: `interlock doctor --full`.
    """
    report, repairs = _examine(context.obj, full=full, fix_=fix_, timeout_s=timeout)
    if in_json:
        document = report.document()
        typer.echo(format_json({**document, "repairs": repairs} if fix_ else document))
    else:
        for repair in repairs:
            print_note(repair)
        rows: list[tuple[object, ...]] = [
            (f.severity, f.code, f.rows, _with_sample(f), f.remedy) for f in report.findings
        ]
        rows += [("ok", about, "", found, None) for about, found in report.facts.items()]
        typer.echo(format_table(DOCTOR_HEADER, rows))
        print_note(_summary(report))
    if report.severity in _EXIT_CODES:
        raise typer.Exit(_EXIT_CODES[report.severity])


def _with_sample(finding: Finding) -> str:
    hidden = [name for name in finding.sample if name not in finding.message]
    if not hidden:
        return finding.message
    more = ", …" if finding.rows > len(finding.sample) else ""
    return f"{finding.message}: {', '.join(hidden)}{more}"


def _summary(report: DoctorReport) -> str:
    counts = Counter(finding.severity for finding in report.findings)
    found = ", ".join(f"{counts[severity]} {severity}{'s' if counts[severity] > 1 else ''}" for severity in counts)
    scope = "full" if report.is_full else "quick"
    return f"{found or 'all is well'} ({scope} examination, {report.duration_s:.1f} s)"


def _examine(config: Config, *, full: bool, fix_: bool, timeout_s: float | None) -> tuple[DoctorReport, list[str]]:
    """Examine the database, and repair it if asked to; a database that cannot be reached is a finding too."""

    async def connected(url: str) -> tuple[DoctorReport, list[str]]:
        async with connect(url) as connection:
            options: dict[str, Any] = {"full": full, "timeout_s": timeout_s}
            progress = _print_progress if full and sys.stderr.isatty() else None
            report = await examine(connection, **options, progress=progress)
            if not fix_:
                return report, []
            repairs = await fix(connection, report.findings)
            return await examine(connection, **options, progress=progress) if repairs else report, repairs

    begun = datetime.now(UTC)
    try:
        with database_url(config, print_note) as url:
            return asyncio.run(connected(url))
    except StoreError as error:
        finding = make_finding("database_unreachable", str(error))
        spent = (datetime.now(UTC) - begun).total_seconds()
        return DoctorReport((finding,), (), {}, is_full=full, examined_at=begun, duration_s=spent), []


def _print_progress(text: str) -> None:
    """Show on a terminal which part is examined, on one line."""
    typer.echo(f"\r\x1b[Kexamining {text}", err=True, nl=False)
