"""Sorts: what `interlock sort run`, `sort master` and `sort worker` do.

Invariant: everything is checked before anything is written; standard output has the answer alone, and progress, tables
beside an answer and complaints are on standard error.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Event
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as ProgressBar

from interlock.cli.format import format_json, format_table, print_note
from interlock.cli.sort import read_size
from interlock.config import Config
from interlock.errors import SortError, SortInputError
from interlock.sort.data.checksum import written
from interlock.sort.data.generate import Distribution, Recipe
from interlock.sort.data.generate import generate as make_records
from interlock.sort.data.records import RecordFormat, Source, open_source
from interlock.sort.data.validate import Validation
from interlock.sort.data.validate import validate as check_partitions
from interlock.sort.display import history_table, phase_table, report_tables, size_of, summary_line, view_on
from interlock.sort.engines.base import run_on
from interlock.sort.engines.prefork import usual_workers
from interlock.sort.logging import heeding_interrupts
from interlock.sort.master.master import run_master
from interlock.sort.settings import HIDDEN, Progress, Report, Settings, WorkerReport
from interlock.sort.workdir import (
    check_places,
    claim_output,
    claim_state,
    held_partitions,
    is_resumable,
    make_directory,
    prepare_output,
)
from interlock.sort.worker.worker import run_worker

WIDE = 160  # columns
ADDRESS = re.compile(r"\S+:\d{1,5}")
PORTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Telling:
    """How much is shown, and where the report goes."""

    history: bool
    quiet: bool
    in_json: bool
    report: Path | None


def run(
    config: Config,
    inputs: Sequence[Path],
    output: Path,
    *,
    workers: int | None,
    settings: dict[str, Any],
    temp: Path | None,
    lengths: tuple[int, int],
    is_ascii: bool | None,
    engine: str,
    ray_address: str | None,
    overwrite: bool,
    telling: Telling,
) -> None:
    """Sort with everything that is needed on this machine, or on the cluster of an engine."""
    used = _settings(settings)
    _check_report(telling.report)
    start = run_on(engine, config, ray_address)
    temp = _own(temp, output)
    prepared = _prepared(inputs, output, temp, lengths, is_ascii, overwrite=overwrite, quiet=telling.quiet)
    with prepared as source, _shown(telling) as told:
        report = start(source, output, workers=workers or usual_workers(), settings=used, temp=temp, told=told)
        _forget_others(output, [one.path for one in report.partitions])
    _keep(telling.report, report.json())
    if telling.in_json:
        typer.echo(format_json(report.json()))
        return
    _print_report(report, telling, _console())


def master(
    workers: int, *, host: str, port: int, temp: Path | None, settings: dict[str, Any], telling: Telling
) -> None:
    """Lead a sort on many machines."""
    used = _settings(settings)
    _check_report(telling.report)
    if temp is not None:
        make_directory("temporary", temp)
    stop = Event()
    with nullcontext() if temp is None else claim_state(temp), _shown(telling) as told, heeding_interrupts(stop):
        report = run_master(
            workers, settings=used, host=host, port=port, temp=temp, listening=_say, told=told, stop=stop
        )
    _keep(telling.report, report.json())
    _print_report(report, telling, _console(stderr=True))
    for one in report.workers:
        _say(one.address)


def worker(
    address: str,
    inputs: Sequence[Path],
    output: Path,
    *,
    host: str,
    settings: dict[str, Any],
    temp: Path | None,
    lengths: tuple[int, int],
    is_ascii: bool | None,
    overwrite: bool,
    telling: Telling,
) -> None:
    """Take part in a sort on many machines."""
    used = _settings(settings)
    _check_report(telling.report)
    if not ADDRESS.fullmatch(address) or not 0 < int(address.rpartition(":")[2]) < PORTS:
        raise SortInputError(f"{address!r} is not the address of a master; it looks like 10.0.0.1:40123")
    temp = _own(temp, output)
    prepared = _prepared(inputs, output, temp, lengths, is_ascii, overwrite=overwrite, quiet=telling.quiet)
    stop = Event()
    with prepared as source, _shown(telling) as told, heeding_interrupts(stop):
        report = run_worker(address, source, output, settings=used, temp=temp, host=host, told=told, stop=stop)
        if temp is not None:
            shutil.rmtree(temp, ignore_errors=True)
        _forget_others(output, [one.path for one in report.partitions])
    _keep(telling.report, report.json())
    if telling.in_json:
        typer.echo(format_json(report.json()))
    else:
        _print_worker(report, telling)


def _own(temp: Path | None, output: Path) -> Path | None:
    """Give a directory in the given one that is for this output alone: it is removed with all that is in it."""
    name = blake2b(os.fsencode(output.resolve()), digest_size=6).hexdigest()
    return None if temp is None else temp / f"{HIDDEN}-{name}"


@contextmanager
def _prepared(
    inputs: Sequence[Path],
    output: Path,
    temp: Path | None,
    lengths: tuple[int, int],
    is_ascii: bool | None,
    *,
    overwrite: bool,
    quiet: bool,
) -> Iterator[Source]:
    """Check everything before anything is written; hold the output while it is sorted to."""
    source = open_source(inputs, record_length=lengths[0], key_length=lengths[1], ascii=is_ascii)
    check_places(inputs, output, temp, (extent.path for extent in source.extents))
    resumed = is_resumable(temp or output / HIDDEN)
    prepare_output(output, overwrite=overwrite or resumed)
    if temp is not None:
        make_directory("temporary", temp)
    with claim_output(output):
        if not quiet:
            begins = "going on with" if resumed else "sorting"
            print_note(f"{begins} {source.records:,} {source.format}, {size_of(source.size)}")
        yield source


def _forget_others(output: Path, partitions: Sequence[str]) -> None:
    """Remove partitions that --overwrite allowed to replace, and that have no successor of their name."""
    names = {Path(path).name for path in partitions}
    for path in held_partitions(output):
        if path.name not in names:
            path.unlink()


@contextmanager
def _shown(telling: Telling) -> Iterator[Callable[[Progress], None]]:
    """Show progress on standard error; say in words what the system refused."""
    try:
        if telling.quiet:
            yield lambda _: None
            return
        with view_on(Console(stderr=True)) as view:
            yield view.show
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        raise SortError(f"the sort failed: {where}{error.strerror or error}") from error


def _settings(given: dict[str, Any]) -> Settings:
    if "memory" in given:
        given = {**given, "memory": read_size("--memory", given["memory"])}
    return Settings(**given)


def _check_report(place: Path | None) -> None:
    """Refuse a report that could not be written when all is done."""
    if place is None:
        return
    if place.is_dir():
        raise SortInputError(f"the report cannot be written to {place}, which is a directory: name a file")
    if not os.access(place.absolute().parent, os.W_OK | os.X_OK):
        raise SortInputError(f"the report cannot be written to {place}: there is no such directory, or it is closed")


def _say(text: str) -> None:
    """Write an answer at once, for whoever reads it through a pipe."""
    print(text, flush=True)  # noqa: T201 - the command's answer


def _keep(place: Path | None, document: dict[str, Any]) -> None:
    if place is not None:
        try:
            place.write_text(format_json(document) + "\n", encoding="utf-8")
        except OSError as error:
            raise SortInputError(f"the report cannot be written to {place}: {error.strerror}") from error


def _console(*, stderr: bool = False) -> Console:
    """Give a console for tables; a narrow one lets its lines run over the edge instead of breaking every cell."""
    console = Console(stderr=stderr)
    console.width = max(console.width, WIDE)
    return console


def _print_report(report: Report, telling: Telling, console: Console) -> None:
    for drawing in report_tables(report, history=telling.history):
        console.print(drawing)
        console.print()
    console.print(summary_line(report), highlight=False)


def _print_worker(report: WorkerReport, telling: Telling) -> None:
    console = _console(stderr=True)
    console.print(phase_table([report]))
    if telling.history:
        console.print(history_table([(f"worker {report.index}", report.history)]))
    for one in report.partitions:
        _say(one.path)


# SECTION cli/sort_records
# Makes records and proves that they are sorted: what `interlock sort generate` and `sort validate` do.
#
# Invariant: standard output has the answer alone, and a bar is shown only where there is a terminal.

PARTITIONS = ("partition", "records", "bytes", "checksum", "first key", "last key")


def generate(
    output: Path,
    *,
    records: int | None,
    size: str | None,
    seed: int,
    files: int,
    distribution: str,
    lengths: tuple[int, int],
    is_ascii: bool,
    quiet: bool,
    in_json: bool,
) -> None:
    """Make records."""
    used = RecordFormat(*lengths, ascii=is_ascii)
    if (records is None) == (size is None):
        raise SortInputError("how many records? Give either --records or --size")
    count = records if records is not None else read_size("--size", size or "") // used.record_length
    recipe = Recipe(count, seed, Distribution(distribution), used)
    began = time.monotonic()
    with _bar("generating", count * used.record_length, quiet=quiet) as told:
        made = make_records(output, recipe, files=files, threads=os.cpu_count() or 1, told=told)
    took = time.monotonic() - began
    if in_json:
        typer.echo(format_json({**asdict(made), "digest": written(made.digest), "seconds": took}))
    else:
        typer.echo(
            f"{made.records:,} records, {size_of(made.size)}, in {len(made.paths)} files in {output} "
            f"in {took:.2f} s; checksum {written(made.digest)}"
        )


def validate(
    outputs: Sequence[Path], inputs: Sequence[Path], *, lengths: tuple[int, int], quiet: bool, in_json: bool
) -> None:
    """Prove that an output is sorted; end with 1 when it is not."""
    size = sum(path.stat().st_size for place in outputs if place.is_dir() for path in place.iterdir() if path.is_file())
    began = time.monotonic()
    with _bar("validating", size * (2 if inputs else 1), quiet=quiet) as told:
        found = check_partitions(outputs, inputs, record_length=lengths[0], key_length=lengths[1], told=told)
    if in_json:
        typer.echo(format_json({"valid": found.is_valid, **asdict(found), "largest": found.largest}))
    else:
        typer.echo(_found(found, time.monotonic() - began))
    if not found.is_valid:
        raise typer.Exit(1)


@contextmanager
def _bar(title: str, size: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar that is moved on by bytes, from any thread; nothing where there is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with ProgressBar(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as shown:
        task = shown.add_task(title, total=size)
        lock = threading.Lock()

        def move(done: int) -> None:
            with lock:
                shown.advance(task, done)

        yield move


def _found(found: Validation, took: float) -> str:
    rows = ((p.number, p.records, p.size, p.digest, p.first_key, p.last_key) for p in found.partitions)
    against = "" if found.input_digest is None else ", equal to the input's" if found.is_valid else ""
    largest = "" if found.largest is None else f"; the largest partition is {found.largest:.1%} of an even share"
    lines = [
        format_table(PARTITIONS, rows),
        "",
        f"{found.records:,} records, {size_of(found.size)}; {found.duplicates:,} have the key of the one before",
        f"checksum {found.digest}{against}{largest}",
        f"checked in {took:.2f} s",
    ]
    if found.is_valid:
        return "\n".join([*lines, typer.style("valid", fg=typer.colors.GREEN, bold=True)])
    problems = [f"- {problem}" for problem in found.problems]
    return "\n".join([*lines, typer.style("not valid", fg=typer.colors.RED, bold=True), *problems])
