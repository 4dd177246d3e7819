"""The commands of the sort: `generate`, `run`, `master`, `worker` and `validate`.

Invariant: all arguments are checked before anything is written. Standard output has only the result; progress, tables
beside a result and errors go to standard error, and progress bars are shown only in a terminal.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as ProgressBar

from interlock.cli.format import format_json, format_table, print_note
from interlock.config import Config
from interlock.errors import SortError, SortInputError
from interlock.sort.data.checksum import format_checksum
from interlock.sort.data.generate import Recipe
from interlock.sort.data.generate import generate as generate_records
from interlock.sort.data.line_order import parse_line_order
from interlock.sort.data.plan import overhead_bytes
from interlock.sort.data.records import KEY_LENGTH, RECORD_LENGTH, RecordFormat, Source
from interlock.sort.data.validate import Validation
from interlock.sort.data.validate import validate as validate_output
from interlock.sort.display import format_size, history_table, open_view, phase_table, report_tables, summary_line
from interlock.sort.engines.base import get_engine
from interlock.sort.engines.local import worker_settings
from interlock.sort.engines.prefork import default_worker_count
from interlock.sort.io.compression import COPY_BYTES, unpacked_for_validation
from interlock.sort.logging import sigterm_as_interrupt, stop_on_interrupt
from interlock.sort.master.master import run_master
from interlock.sort.memory_plan import check_worker_memory
from interlock.sort.prepare import InputFormat, own_work_dir, prepared, remove_other_partitions
from interlock.sort.security import Security
from interlock.sort.settings import (
    Engine,
    Progress,
    Report,
    Settings,
    WorkerReport,
    parse_size,
)
from interlock.sort.workdir import (
    lock_state,
    make_directory,
)
from interlock.sort.worker.worker import run_worker

if TYPE_CHECKING:
    from interlock.sort.settings import ProgressCallback, SaveCallback

MIN_TABLE_WIDTH = 160  # columns
ADDRESS = re.compile(r"\S+:\d{1,5}")
MAX_PORT = 65_535
BROKEN_PIPE = 141  # exit code that shells give a program ended by SIGPIPE
STANDARD_OUTPUT = Path("-")
PARTITION_COLUMNS = ("partition", "records", "bytes", "checksum", "first key", "last key")


@dataclass(frozen=True, slots=True)
class DisplayOptions:
    """The output options of a command: the display, JSON, the file of the report, and the address of the metrics."""

    history: bool
    quiet: bool
    as_json: bool
    report_path: Path | None
    metrics: tuple[str, int] | None = None


def run(
    config: Config,
    inputs: Sequence[Path],
    output: Path,
    *,
    workers: int | None,
    settings: dict[str, Any],
    work_dir: Path | None,
    lengths: tuple[int | None, int | None],
    is_ascii: bool | None,
    line_options: dict[str, Any] | None,
    engine: Engine,
    ray_address: str | None,
    tls: Security,
    overwrite: bool,
    display: DisplayOptions,
) -> None:
    """Run a whole sort: a master in this process, and workers that the engine starts."""
    parsed = _parse_settings(settings)
    _check_report_path(display.report_path)
    if output == STANDARD_OUTPUT and display.as_json:
        raise SortInputError("--json and --output - both write to standard output: use --report FILE for the report")
    sort = get_engine(engine, config, ray_address, print_note, tls)
    input_format = _input_format(lengths, is_ascii, line_options)
    count = workers or default_worker_count()

    def check_memory(source: Source) -> None:
        worker_settings(parsed, count, source)

    with ExitStack() as stack:
        place = output
        if output == STANDARD_OUTPUT:
            if work_dir is not None:
                make_directory("temporary", work_dir)
            stack.enter_context(sigterm_as_interrupt())  # nothing in a directory of this run alone can be resumed
            place = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="interlock-sort-", dir=work_dir)), "out"
            )
        work_dir = None if output == STANDARD_OUTPUT else own_work_dir(work_dir, output)
        preparation = _prepared(
            inputs, place, work_dir, input_format, check_memory, overwrite=overwrite, quiet=display.quiet
        )
        with preparation as source, _observed(display) as (on_progress, on_save):
            report = sort(
                source,
                place,
                workers=count,
                settings=parsed,
                work_dir=work_dir,
                on_progress=on_progress,
                on_save=on_save,
            )
            remove_other_partitions(place, [one.path for one in report.partitions])
        _save_report(display.report_path, report.json())
        if output == STANDARD_OUTPUT:
            _write_to_stdout([Path(one.path) for one in report.partitions])
    if display.as_json:
        typer.echo(format_json(report.json()))
    elif output != STANDARD_OUTPUT:
        _print_report(report, display, _wide_console())
    elif not display.quiet:
        _print_report(report, display, _wide_console(stderr=True))


def _write_to_stdout(partitions: Sequence[Path]) -> None:
    """Write the partitions to standard output, one after the other, and remove each."""
    try:
        for path in partitions:
            with path.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer, COPY_BYTES)
            path.unlink()
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        if isinstance(error, BrokenPipeError):  # as in `| head`: no error to the user
            raise typer.Exit(BROKEN_PIPE) from error
        reason = error.strerror or str(error)
        raise SortError(f"the sorted lines or records cannot be written to standard output: {reason}") from error


def master(
    workers: int,
    *,
    host: str,
    port: int,
    work_dir: Path | None,
    security: Security,
    settings: dict[str, Any],
    display: DisplayOptions,
) -> None:
    """Run the master of a sort on many machines."""
    parsed = _parse_settings(settings)
    _check_report_path(display.report_path)
    security.check_host(host)
    if work_dir is not None:
        make_directory("temporary", work_dir)
    lock = nullcontext() if work_dir is None else lock_state(work_dir)
    stop = Event()
    with lock, _observed(display) as (on_progress, on_save), stop_on_interrupt(stop):
        report = run_master(
            workers,
            settings=parsed,
            host=host,
            port=port,
            work_dir=work_dir,
            on_listening=_print_line,
            on_progress=on_progress,
            on_save=on_save,
            stop=stop,
            security=security,
        )
    _save_report(display.report_path, report.json())
    _print_report(report, display, _wide_console(stderr=True))
    for one in report.workers:
        _print_line(one.address)


def worker(
    address: str,
    inputs: Sequence[Path],
    output: Path,
    *,
    host: str,
    security: Security,
    settings: dict[str, Any],
    work_dir: Path | None,
    lengths: tuple[int | None, int | None],
    is_ascii: bool | None,
    line_options: dict[str, Any] | None,
    overwrite: bool,
    display: DisplayOptions,
) -> None:
    """Run one worker of a sort on many machines."""
    parsed = _parse_settings(settings)
    _check_report_path(display.report_path)
    if not ADDRESS.fullmatch(address) or not 0 < int(address.rpartition(":")[2]) <= MAX_PORT:
        raise SortInputError(f"{address!r} is not the address of a master; write HOST:PORT, as in 10.0.0.1:40123")
    security.check_host(host)
    work_dir = own_work_dir(work_dir, output)

    def check_memory(source: Source) -> None:
        check_worker_memory(parsed, source.records, source.format.record_length, overhead_bytes(source, parsed))

    input_format = _input_format(lengths, is_ascii, line_options)
    preparation = _prepared(
        inputs, output, work_dir, input_format, check_memory, overwrite=overwrite, quiet=display.quiet
    )
    stop = Event()
    with preparation as source, _observed(display) as (on_progress, on_save), stop_on_interrupt(stop):
        report = run_worker(
            address,
            source,
            output,
            settings=parsed,
            work_dir=work_dir,
            host=host,
            on_progress=on_progress,
            on_save=on_save,
            stop=stop,
            security=security,
        )
        if work_dir is not None:
            shutil.rmtree(work_dir, ignore_errors=True)
        remove_other_partitions(output, [one.path for one in report.partitions])
    _save_report(display.report_path, report.json())
    if display.as_json:
        typer.echo(format_json(report.json()))
    else:
        _print_worker_report(report, display)


def generate(
    output: Path,
    *,
    records: int | None,
    size: str | None,
    seed: int,
    files: int,
    lengths: tuple[int | None, int | None],
    is_ascii: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Generate records."""
    record_format = RecordFormat(lengths[0] or RECORD_LENGTH, lengths[1] or KEY_LENGTH, ascii=is_ascii)
    if (records is None) == (size is None):
        raise SortInputError("the number of records is missing or ambiguous. Give either --records or --size")
    count = records if records is not None else parse_size("--size", size or "") // record_format.record_length
    recipe = Recipe(count, seed, record_format)
    began = time.monotonic()
    with _progress_bar("generating", count * record_format.record_length, quiet=quiet) as advance:
        made = generate_records(output, recipe, files=files, threads=os.cpu_count() or 1, on_written=advance)
    took = time.monotonic() - began
    if as_json:
        typer.echo(format_json({**asdict(made), "digest": format_checksum(made.digest), "seconds": took}))
    else:
        typer.echo(
            f"{made.records:,} records, {format_size(made.size)}, in {len(made.paths)} files in {output} "
            f"in {took:.2f} s; checksum {format_checksum(made.digest)}"
        )


def validate(
    outputs: Sequence[Path],
    inputs: Sequence[Path],
    *,
    lengths: tuple[int | None, int | None],
    line_options: dict[str, Any] | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Verify that an output is sorted; exit with 1 if it is not."""
    size = sum(path.stat().st_size for place in outputs if place.is_dir() for path in place.iterdir() if path.is_file())
    began = time.monotonic()
    with _progress_bar("validating", size * (2 if inputs else 1), quiet=quiet) as advance:
        lines = None if line_options is None else parse_line_order(**line_options)
        with unpacked_for_validation(outputs, inputs) as (places, originals):
            result = validate_output(
                places, originals, record_length=lengths[0], key_length=lengths[1], lines=lines, on_read=advance
            )
    if as_json:
        typer.echo(format_json({"valid": result.is_valid, **asdict(result), "largest": result.largest}))
    else:
        typer.echo(_format_validation(result, time.monotonic() - began))
    if not result.is_valid:
        raise typer.Exit(1)


def _parse_settings(given: dict[str, Any]) -> Settings:
    if "memory" in given:
        given = {**given, "memory": parse_size("--memory", given["memory"])}
    return Settings(**given)


def _check_report_path(path: Path | None) -> None:
    """Refuse a path before the sort to which the report could not be written after it."""
    if path is None:
        return
    if path.is_dir():
        raise SortInputError(f"the report cannot be written to {path}, which is a directory: name a file")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise SortInputError(f"the report cannot be written to {path}: its directory does not exist or is not writable")


@contextmanager
def _prepared(
    inputs: Sequence[Path],
    output: Path,
    work_dir: Path | None,
    input_format: InputFormat,
    check_memory: Callable[[Source], None],
    *,
    overwrite: bool,
    quiet: bool,
) -> Iterator[Source]:
    """Prepare a sort, and tell what is sorted."""
    note = (lambda _: None) if quiet else print_note
    with prepared(inputs, output, work_dir, input_format, overwrite=overwrite, check=check_memory, on_note=note) as (
        source,
        is_resumed,
    ):
        verb = "resuming the sort of" if is_resumed else "sorting"
        count = f"{source.records:,} " if source.format.lines is None else ""
        note(f"{verb} {count}{source.format}, {format_size(source.size)}")
        yield source


def _input_format(
    lengths: tuple[int | None, int | None], is_ascii: bool | None, line_options: dict[str, Any] | None
) -> InputFormat:
    """Return the format that the options give."""
    lines = None if line_options is None else parse_line_order(**line_options)
    return InputFormat(record_length=lengths[0], key_length=lengths[1], ascii=is_ascii, lines=lines)


@contextmanager
def _observed(display: DisplayOptions) -> Iterator[tuple[ProgressCallback, SaveCallback | None]]:
    """Show the progress, and serve the metrics if an address is given; yield what takes progress and states."""
    with _progress_shown(display) as show:
        if display.metrics is None:
            yield show, None
            return
        from interlock.sort.metrics import serve_metrics, sort_metrics  # noqa: PLC0415 - slow to import, and seldom used

        host, port = display.metrics
        print_note(f"metrics at http://{host}:{serve_metrics(host, port)}/metrics")

        def on_progress(progress: Progress) -> None:
            sort_metrics.show(progress)
            show(progress)

        yield on_progress, sort_metrics.save


@contextmanager
def _progress_shown(display: DisplayOptions) -> Iterator[ProgressCallback]:
    """Show progress on standard error; turn an operating system error into one line."""
    try:
        if display.quiet:
            yield lambda _: None
            return
        with open_view(Console(stderr=True)) as view:
            yield view.show
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        raise SortError(f"the sort failed: {where}{error.strerror or error}") from error


@contextmanager
def _progress_bar(title: str, size: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in a terminal; the function yielded advances it by bytes, from any thread."""
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with ProgressBar(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(title, total=size)
        lock = threading.Lock()

        def advance(done: int) -> None:
            with lock:
                bar.advance(task, done)

        yield advance


def _print_line(text: str) -> None:
    """Print a line of the result and flush it, for a reader at the other end of a pipe."""
    print(text, flush=True)  # noqa: T201 - the result of the command


def _save_report(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        try:
            path.write_text(format_json(document) + "\n", encoding="utf-8")
        except OSError as error:
            raise SortInputError(f"the report cannot be written to {path}: {error.strerror}") from error


def _wide_console(*, stderr: bool = False) -> Console:
    """Return a console for tables: in a narrow terminal, lines wrap as a whole instead of within every cell."""
    console = Console(stderr=stderr)
    console.width = max(console.width, MIN_TABLE_WIDTH)
    return console


def _print_report(report: Report, display: DisplayOptions, console: Console) -> None:
    for drawing in report_tables(report, history=display.history):
        console.print(drawing)
        console.print()
    console.print(summary_line(report), highlight=False)


def _print_worker_report(report: WorkerReport, display: DisplayOptions) -> None:
    console = _wide_console(stderr=True)
    console.print(phase_table([report]))
    if display.history:
        console.print(history_table([(f"worker {report.index}", report.history)]))
    for one in report.partitions:
        _print_line(one.path)


def _format_validation(result: Validation, took: float) -> str:
    rows = ((p.number, p.records, p.size, p.digest, p.first_key, p.last_key) for p in result.partitions)
    against = "" if result.input_digest is None else ", equal to the input's" if result.is_valid else ""
    largest = "" if result.largest is None else f"; the largest partition is {result.largest:.1%} of an even share"
    lines = [
        format_table(PARTITION_COLUMNS, rows),
        "",
        f"{result.records:,} records, {format_size(result.size)}; {result.duplicates:,} have the key of the one before",
        f"checksum {result.digest}{against}{largest}",
        f"checked in {took:.2f} s",
    ]
    if result.is_valid:
        return "\n".join([*lines, typer.style("valid", fg=typer.colors.GREEN, bold=True)])
    problems = [f"- {problem}" for problem in result.problems]
    return "\n".join([*lines, typer.style("not valid", fg=typer.colors.RED, bold=True), *problems])
