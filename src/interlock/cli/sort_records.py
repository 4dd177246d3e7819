"""Makes records and proves that they are sorted: what `interlock sort generate` and `sort validate` do.

Invariant: standard output has the answer alone, and a bar is shown only where there is a terminal.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from interlock.cli.sizes import read_size
from interlock.cli.tables import as_json, table
from interlock.errors import SortInputError
from interlock.sort.digest import written
from interlock.sort.display import size_of
from interlock.sort.generate import Distribution, Recipe
from interlock.sort.generate import generate as make_records
from interlock.sort.records import RecordFormat
from interlock.sort.validate import Validation
from interlock.sort.validate import validate as check_partitions

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
        typer.echo(as_json({**asdict(made), "digest": written(made.digest), "seconds": took}))
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
        typer.echo(as_json({"valid": found.is_valid, **asdict(found), "largest": found.largest}))
    else:
        typer.echo(_found(found, time.monotonic() - began))
    if not found.is_valid:
        raise typer.Exit(1)


@contextmanager
def _bar(title: str, size: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar that is moved on by bytes, from any thread; nothing where there is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as shown:
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
        table(PARTITIONS, rows),
        "",
        f"{found.records:,} records, {size_of(found.size)}; {found.duplicates:,} have the key of the one before",
        f"checksum {found.digest}{against}{largest}",
        f"checked in {took:.2f} s",
    ]
    if found.is_valid:
        return "\n".join([*lines, typer.style("valid", fg=typer.colors.GREEN, bold=True)])
    problems = [f"- {problem}" for problem in found.problems]
    return "\n".join([*lines, typer.style("not valid", fg=typer.colors.RED, bold=True), *problems])
