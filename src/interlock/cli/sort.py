"""`interlock sort`: makes records, sorts them on one machine or many, and proves that they are sorted.

Invariant: this module only reads the command line; what it calls needs numpy and gRPC, which come with an extra.
"""

from __future__ import annotations

import re
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from interlock.cli.main import create_root_app, run_app, set_up_logging
from interlock.config import Config
from interlock.errors import ConfigError, SortInputError

app = typer.Typer(
    help="Sort records spread over many files: sample, sort, shuffle and merge, on one machine or on many.",
    epilog="Records have 100 bytes with a key of 10 unless said otherwise, and are binary or lines that end in CR LF. "
    "Sizes are written 64MB, 2GB or 1.5GiB.",
    no_args_is_help=True,
)

RECORDS, SORTING, LOGS = "interlock.cli.sort_commands", "interlock.cli.sort_commands", "interlock.sort.logging"


class Engine(StrEnum):
    """What runs the sort workers."""

    LOCAL = "local"
    INTERLOCK = "interlock"
    RAY = "ray"


class Spread(StrEnum):
    """How the keys of generated records are spread."""

    UNIFORM = "uniform"
    SKEWED = "skewed"
    DUPLICATES = "duplicates"
    PRESORTED = "presorted"
    REVERSED = "reversed"
    CONSTANT = "constant"


Inputs = Annotated[
    list[Path], typer.Argument(help="Directories or files with records; they are only read.", metavar="INPUT…")
]
Output = Annotated[
    Path, typer.Option("--output", "-O", help="Where partition.0, partition.1, … are written.", metavar="DIR")
]
Temp = Annotated[
    Path | None,
    typer.Option(help="Where unfinished work is kept; a hidden directory in the output unless given.", metavar="DIR"),
]
Memory = Annotated[
    str | None, typer.Option(help="The most memory to use, for all workers of this command together; 2GB unless given.")
]
RecordLength = Annotated[int, typer.Option(help="Bytes of a record, line end included.", min=1)]
KeyLength = Annotated[int, typer.Option(help="Bytes at its head by which it is sorted.", min=1)]
Ascii = Annotated[
    bool | None,
    typer.Option("--ascii/--binary", help="Lines that end in CR LF, or any bytes; detected unless given."),
]
Partitions = Annotated[
    int | None, typer.Option(help="Output files in all; one for each worker unless given.", min=1, metavar="N")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace partitions that are in the output directory.")]
InJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
ReportTo = Annotated[
    Path | None, typer.Option("--report", help="Write the report as JSON to this file, too.", metavar="FILE")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Timeout = Annotated[
    float | None, typer.Option(help="Seconds to wait for workers that have not come; 600 unless given.", metavar="S")
]
Lost = Annotated[
    float | None,
    typer.Option(help="Seconds of silence after which a process is given up; 60 unless given.", metavar="S"),
]


@app.command()
def generate(
    output: Annotated[Path, typer.Argument(help="The directory to write part-00000, … to.", metavar="DIR")],
    records: Annotated[int | None, typer.Option(help="How many records.", min=0, metavar="N")] = None,
    size: Annotated[str | None, typer.Option(help="How many bytes, instead: 1GB.")] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal records, in however many files.", min=0)] = 0,
    files: Annotated[int, typer.Option(help="How many files to spread them over.", min=1, metavar="N")] = 1,
    distribution: Annotated[
        Spread, typer.Option(help="How the keys are spread; skewed is a Zipf law, duplicates has 1,000 keys.")
    ] = Spread.UNIFORM,
    record_length: RecordLength = 100,
    key_length: KeyLength = 10,
    ascii_: Annotated[bool, typer.Option("--ascii", help="Lines of printable characters that end in CR LF.")] = False,
    quiet: Quiet = False,
    in_json: InJson = False,
) -> None:
    """Make records to sort. The same seed gives the same records.

    Example: interlock sort generate data --size 1GB --files 8
    """
    _loaded(RECORDS).generate(
        output,
        records=records,
        size=size,
        seed=seed,
        files=files,
        distribution=distribution.value,
        lengths=(record_length, key_length),
        is_ascii=ascii_,
        quiet=quiet,
        in_json=in_json,
    )


@app.command("run")
def sort(
    context: typer.Context,
    inputs: Inputs,
    output: Output,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="Sort workers; one for every two cores unless given.", min=1)
    ] = None,
    memory: Memory = None,
    temp: Temp = None,
    partitions: Partitions = None,
    record_length: RecordLength = 100,
    key_length: KeyLength = 10,
    ascii_: Ascii = None,
    engine: Annotated[
        Engine,
        typer.Option(
            help="local: processes of this command. interlock: steps of a job, with leases, retries and history in the "
            "database. ray: actors that Ray places and restarts on its cluster."
        ),
    ] = Engine.LOCAL,
    ray_address: Annotated[
        str | None, typer.Option(help="The Ray cluster to use; one of this machine's own unless given.")
    ] = None,
    overwrite: Overwrite = False,
    timeout: Timeout = None,
    lost: Lost = None,
    history: Annotated[bool, typer.Option("--history/--no-history", help="Show every move of every machine.")] = True,
    quiet: Quiet = False,
    in_json: InJson = False,
    report: ReportTo = None,
) -> None:
    """Sort on this machine: a master and some workers, from the inputs to the output directory.

    Broken off and started again with the same arguments, it goes on where it was.

    Example: interlock sort run data --output sorted --workers 2 --memory 2GB
    """
    _log(context, engine)
    _loaded(SORTING).run(
        context.obj,
        inputs,
        output,
        workers=workers,
        settings=_given(memory=memory, partitions=partitions, registering=timeout, lost=lost),
        temp=temp,
        lengths=(record_length, key_length),
        is_ascii=ascii_,
        engine=engine.value,
        ray_address=ray_address,
        overwrite=overwrite,
        telling=_loaded(SORTING).Telling(history=history, quiet=quiet, in_json=in_json, report=report),
    )


@app.command()
def master(
    context: typer.Context,
    workers: Annotated[int, typer.Argument(help="How many workers to wait for.", min=1, metavar="N")],
    host: Annotated[
        str, typer.Option(help="The address of this machine to listen on, which the workers can reach.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; a free one unless given.", min=0, max=65535)] = 0,
    temp: Annotated[
        Path | None,
        typer.Option(
            help="Where its state is kept, so that it can be started again; nowhere unless given.", metavar="DIR"
        ),
    ] = None,
    partitions: Partitions = None,
    timeout: Timeout = None,
    lost: Lost = None,
    history: Annotated[bool, typer.Option("--history/--no-history", help="Show every move of every machine.")] = True,
    quiet: Quiet = False,
    report: ReportTo = None,
) -> None:
    """Lead a sort on many machines. Standard output has the master's address and, in the end, the workers in order.

    The partitions of the workers, in that order, are the sorted sequence. Everything else is on standard error.
    There is no authentication: listen only where all who can connect are trusted.

    Example: interlock sort master 3 --host 10.0.0.1
    """
    _log(context)
    _loaded(SORTING).master(
        workers,
        host=host,
        port=port,
        temp=temp,
        settings=_given(partitions=partitions, registering=timeout, lost=lost),
        telling=_loaded(SORTING).Telling(history=history, quiet=quiet, in_json=False, report=report),
    )


@app.command()
def worker(
    context: typer.Context,
    address: Annotated[str, typer.Argument(help="The master, as it printed itself.", metavar="HOST:PORT")],
    inputs: Annotated[
        list[Path],
        typer.Option("--input", "-I", help="A directory or file with records; may be given again.", metavar="DIR"),
    ],
    output: Output,
    host: Annotated[
        str, typer.Option(help="The address of this machine to listen on, which the other workers can reach.")
    ] = "127.0.0.1",
    memory: Annotated[
        str | None, typer.Option(help="The most memory that this worker may use; 2GB unless given.")
    ] = None,
    temp: Temp = None,
    record_length: RecordLength = 100,
    key_length: KeyLength = 10,
    ascii_: Ascii = None,
    overwrite: Overwrite = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to look for the master; 600 unless given.", metavar="S")
    ] = None,
    lost: Annotated[
        float | None,
        typer.Option(help="Seconds of silence after which the master is given up; 60 unless given.", metavar="S"),
    ] = None,
    history: Annotated[bool, typer.Option("--history/--no-history", help="Show every move of the worker.")] = True,
    quiet: Quiet = False,
    in_json: InJson = False,
    report: ReportTo = None,
) -> None:
    """Take part in a sort on many machines: read this machine's records, and write its share of the partitions.

    Killed and started again with the same arguments, it goes on where it was.

    Example: interlock sort worker 10.0.0.1:40123 -I /data/a -I /data/b -O /data/sorted --host 10.0.0.2
    """
    _log(context)
    _loaded(SORTING).worker(
        address,
        inputs,
        output,
        host=host,
        settings=_given(memory=memory, registering=timeout, lost=lost),
        temp=temp,
        lengths=(record_length, key_length),
        is_ascii=ascii_,
        overwrite=overwrite,
        telling=_loaded(SORTING).Telling(history=history, quiet=quiet, in_json=in_json, report=report),
    )


@app.command()
def validate(
    outputs: Annotated[
        list[Path],
        typer.Argument(help="The output directory; those of all workers of a sort on many machines.", metavar="DIR…"),
    ],
    inputs: Annotated[
        list[Path] | None,
        typer.Option("--input", "-I", help="What was sorted, to compare with; may be given again.", metavar="DIR"),
    ] = None,
    record_length: RecordLength = 100,
    key_length: KeyLength = 10,
    quiet: Quiet = False,
    in_json: InJson = False,
) -> None:
    """Prove that an output is sorted: order within and across partitions, and against the input count and checksum.

    The exit code is 0 when all is well and 1 when something is wrong.

    Example: interlock sort validate sorted --input data
    """
    _loaded(RECORDS).validate(outputs, inputs or [], lengths=(record_length, key_length), quiet=quiet, in_json=in_json)


def run() -> None:
    """Run `interlock-sort`: the commands of `interlock sort` under a name of their own."""
    alone = create_root_app("interlock-sort", app.info.help)
    alone.registered_commands = app.registered_commands
    run_app(alone)


def _log(context: typer.Context, engine: Engine = Engine.LOCAL) -> None:
    """Let the display tell of what goes on, and the log of warnings only, unless more is asked for."""
    config: Config = context.obj
    is_asked = context.find_root().params.get("log_level") is not None or config.log_level != "info"
    level = config.log_level if is_asked else "warning"
    _loaded(LOGS).log_from(level, config.log_format)
    if engine is not Engine.LOCAL:
        set_up_logging(level, config.log_format)


def _loaded(name: str) -> ModuleType:
    """Import what a command calls, which takes time; say what to install where that is not possible."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the sort needs {error.name}: pip install 'interlock[sort]'") from error


def _given(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


# SECTION cli/sizes
# How a person writes a number of bytes.

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def read_size(name: str, text: str) -> int:
    """Read a number of bytes: 64MB, 2GB, 1.5GiB, 1000."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise SortInputError(f"{name} {text!r} is not a size; write 64MB, 2GB, 1.5GiB or a number of bytes")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** POWERS[unit.lower()])
