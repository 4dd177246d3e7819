"""`interlock sort` and `interlock-sort`: declares the commands of the distributed sort and their options.

The commands themselves are in `implementation`, which is imported when one of them runs: it needs numpy and gRPC, which
come with the extra `sort`, and takes longer to import than a small sort to run.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from interlock.cli.main import (
    DatabaseUrl,
    DataDir,
    LogFormat,
    LogLevel,
    ShowVersion,
    create_root_app,
    run_app,
    set_up_logging,
)
from interlock.config import Config
from interlock.errors import ConfigError
from interlock.sort.settings import Compression, Engine

app = typer.Typer(
    help="Sort lines or records spread over many files: sample, sort, shuffle and merge, on one machine or on many.",
    epilog="Text is sorted as lines, by keys as GNU sort takes them. Other data is records of 100 bytes with a key of "
    "10 unless set otherwise. Sizes are written 64MB, 2GB or 1.5GiB. Example: interlock sort run data --output sorted",
    no_args_is_help=True,
)

LOOPBACK = "127.0.0.1"

Inputs = Annotated[list[Path], typer.Argument(help="Directories or files; they are only read.", metavar="INPUT…")]
Output = Annotated[
    Path, typer.Option("--output", "-O", help="Directory for partition.0, partition.1, …", metavar="DIR")
]
OutputOrStream = Annotated[
    Path,
    typer.Option(
        "--output", "-O", help="Directory for partition.0, partition.1, …; - writes to standard output.", metavar="DIR"
    ),
]
WorkDir = Annotated[
    Path | None,
    typer.Option(
        "--temp", help="Directory for unfinished work; a hidden directory in the output unless given.", metavar="DIR"
    ),
]
Memory = Annotated[
    str | None, typer.Option(help="Memory limit for this command and all its workers together; 2GB unless given.")
]
RecordLength = Annotated[
    int | None, typer.Option(help="Bytes of a record, line end included; 100 if not given.", min=1)
]
KeyLength = Annotated[
    int | None, typer.Option(help="Bytes of the key, with which a record begins; 10 if not given.", min=1)
]
Ascii = Annotated[
    bool | None,
    typer.Option(
        "--ascii/--binary", help="Records that are lines of one length with CR LF, or any bytes; detected if not given."
    ),
]
Lines = Annotated[bool, typer.Option("--lines", help="Sort lines of any length; detected unless a format is given.")]
LineKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--key",
        "-k",
        help="Sort lines by this key, F[.C][OPTIONS][,F[.C][OPTIONS]]: from a character of a field to the end of a "
        "field or a character of it, with options b, f, n and r. May be repeated.",
        metavar="KEY",
    ),
]
Separator = Annotated[
    str | None,
    typer.Option("--field-separator", "-t", help="Separator of fields, instead of blanks; \\t is a tab.", metavar="C"),
]
Numeric = Annotated[bool, typer.Option("--numeric-sort", "-n", help="Compare keys as numbers.")]
Reverse = Annotated[bool, typer.Option("--reverse", "-r", help="Sort in descending order.")]
Unique = Annotated[bool, typer.Option("--unique", "-u", help="Keep only the first of lines with equal keys.")]
Stable = Annotated[
    bool,
    typer.Option("--stable", "-s", help="Keep lines with equal keys in input order, instead of comparing them whole."),
]
SkipBlanks = Annotated[bool, typer.Option("--ignore-leading-blanks", "-b", help="Ignore blanks before keys.")]
Fold = Annotated[bool, typer.Option("--ignore-case", "-f", help="Compare lower case as upper case.")]
Partitions = Annotated[
    int | None, typer.Option(help="Output files in total; one for each worker unless given.", min=1, metavar="N")
]
Compress = Annotated[
    Compression | None, typer.Option(help="Compress the output: partition.0.gz, … or partition.0.zst, …")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the partitions in the output directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
ReportPath = Annotated[
    Path | None, typer.Option("--report", help="Write the report as JSON to this file, too.", metavar="FILE")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
RegisterTimeout = Annotated[
    float | None,
    typer.Option("--timeout", help="Seconds to wait until all workers have registered; 600 unless given.", metavar="S"),
]
LostAfter = Annotated[
    float | None,
    typer.Option("--lost", help="Seconds of silence after which a process is lost; 60 unless given.", metavar="S"),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the token of the sort, which only its owner can read; INTERLOCK_SORT_TOKEN unless given.",
        metavar="FILE",
    ),
]
TlsCert = Annotated[
    Path | None, typer.Option(help="Certificate of this machine for TLS, as PEM; needs --tls-key.", metavar="FILE")
]
RayTlsCert = Annotated[
    Path | None,
    typer.Option(
        help="With --engine ray: certificate for TLS, as PEM, at this path on every node; needs --tls-key.",
        metavar="FILE",
    ),
]
TlsKey = Annotated[Path | None, typer.Option(help="Private key of the certificate, as PEM.", metavar="FILE")]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        help="Mutual TLS: the authority, as PEM, that must have signed the certificates of all processes.",
        metavar="FILE",
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        help="Serve /metrics on this port while the sort runs; 0 for a free one.", min=0, max=65535, metavar="PORT"
    ),
]
MetricsHost = Annotated[str, typer.Option(help="The address of /metrics. It has no authentication.", metavar="HOST")]
ShowHistory = Annotated[
    bool, typer.Option("--history/--no-history", help="Show every state transition of master and workers.")
]


def global_options(
    context: typer.Context,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    show_version: ShowVersion = False,
) -> None:
    """Read the global options of `interlock-sort`; each command sets up its own logging."""
    del show_version
    context.obj = Config.load(
        {"database_url": database_url, "data_dir": data_dir, "log_level": log_level, "log_format": log_format}
    )


def run() -> None:
    """Run `interlock-sort`: the commands of `interlock sort` as a program of their own."""
    root = create_root_app("interlock-sort", app.info.help, global_options)
    root.registered_commands = app.registered_commands
    run_app(root)


@app.command()
def generate(
    output: Annotated[Path, typer.Argument(help="Directory for part-00000, part-00001, …", metavar="DIR")],
    records: Annotated[int | None, typer.Option(help="Number of records.", min=0, metavar="N")] = None,
    size: Annotated[str | None, typer.Option(help="Total size instead of --records: 1GB.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same records, in any number of files.", min=0)] = 0,
    files: Annotated[int, typer.Option(help="Number of files.", min=1, metavar="N")] = 1,
    record_length: RecordLength = None,
    key_length: KeyLength = None,
    ascii_: Annotated[bool, typer.Option("--ascii", help="Lines of printable characters that end in CR LF.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Generate random records to sort. The same seed gives the same records.

    Example: interlock sort generate data --size 1GB --files 8
    """
    _commands().generate(
        output,
        records=records,
        size=size,
        seed=seed,
        files=files,
        lengths=(record_length, key_length),
        is_ascii=ascii_,
        quiet=quiet,
        as_json=as_json,
    )


@app.command("run")
def sort(
    context: typer.Context,
    inputs: Inputs,
    output: OutputOrStream,
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", help="Sort workers; one for every two cores unless given.", min=1)
    ] = None,
    memory: Memory = None,
    work_dir: WorkDir = None,
    partitions: Partitions = None,
    record_length: RecordLength = None,
    key_length: KeyLength = None,
    ascii_: Ascii = None,
    lines: Lines = False,
    key: LineKeys = None,
    separator: Separator = None,
    numeric: Numeric = False,
    reverse: Reverse = False,
    unique: Unique = False,
    stable: Stable = False,
    skip_blanks: SkipBlanks = False,
    fold: Fold = False,
    engine: Annotated[
        Engine,
        typer.Option(
            help="local: processes of this command. interlock: steps of a job, with leases, retries and history in the "
            "database. ray: actors that Ray places and restarts on its cluster."
        ),
    ] = Engine.LOCAL,
    ray_address: Annotated[
        str | None, typer.Option(help="The Ray cluster to use; without it, Ray runs on this machine only.")
    ] = None,
    tls_cert: RayTlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    compress: Compress = None,
    overwrite: Overwrite = False,
    timeout: RegisterTimeout = None,
    lost: LostAfter = None,
    history: ShowHistory = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    report: ReportPath = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = LOOPBACK,
) -> None:
    """Sort the inputs into the output directory, with a master and workers on this machine.

    After a kill or a crash, the same command resumes the sort.

    Example: interlock sort run data --output sorted --workers 2 --memory 2GB

    Example: interlock sort run log.csv -O sorted -t , -k 3,3n -k 1
    """
    _set_up_logging(context, engine)
    commands = _commands()
    commands.run(
        context.obj,
        inputs,
        output,
        workers=workers,
        settings=_given(
            memory=memory,
            partitions=partitions,
            register_timeout_s=timeout,
            lost_after_s=lost,
            compression=compress,
        ),
        work_dir=work_dir,
        lengths=(record_length, key_length),
        is_ascii=ascii_,
        line_options=_line_options(
            lines,
            keys=key or [],
            separator=separator,
            numeric=numeric,
            reverse=reverse,
            unique=unique,
            stable=stable,
            skip_blanks=skip_blanks,
            fold=fold,
        ),
        engine=engine,
        ray_address=ray_address,
        tls=_tls_files(tls_cert, tls_key, tls_ca),
        overwrite=overwrite,
        display=commands.DisplayOptions(
            history=history,
            quiet=quiet,
            as_json=as_json,
            report_path=report,
            metrics=None if metrics_port is None else (metrics_host, metrics_port),
        ),
    )


@app.command()
def master(
    context: typer.Context,
    workers: Annotated[int, typer.Argument(help="Number of workers that take part.", min=1, metavar="N")],
    host: Annotated[
        str, typer.Option(help="Address of this machine to listen on, which the workers can reach.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(help="Port to listen on; a free one unless given.", min=0, max=65535)] = 0,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            "--temp", help="Directory for its state, for a restart; no state is kept unless given.", metavar="DIR"
        ),
    ] = None,
    partitions: Partitions = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    timeout: RegisterTimeout = None,
    lost: LostAfter = None,
    history: ShowHistory = False,
    quiet: Quiet = False,
    report: ReportPath = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = LOOPBACK,
) -> None:
    """Run the master of a sort on many machines.

    Standard output has the address of the master first and, after the sort, the addresses of the workers in order: the
    partitions of the workers, in that order, are the sorted sequence. Everything else goes to standard error.
    An address that other machines can reach needs a token; only processes that have it take part.

    Example: interlock sort master 3 --host 10.0.0.1 --token-file sort.token
    """
    _set_up_logging(context)
    commands = _commands()
    commands.master(
        workers,
        host=host,
        port=port,
        work_dir=work_dir,
        security=_security(token_file, tls_cert, tls_key, tls_ca),
        settings=_given(partitions=partitions, register_timeout_s=timeout, lost_after_s=lost),
        display=commands.DisplayOptions(
            history=history,
            quiet=quiet,
            as_json=False,
            report_path=report,
            metrics=None if metrics_port is None else (metrics_host, metrics_port),
        ),
    )


@app.command()
def worker(
    context: typer.Context,
    address: Annotated[str, typer.Argument(help="Address of the master, as it printed it.", metavar="HOST:PORT")],
    inputs: Annotated[
        list[Path],
        typer.Option("--input", "-I", help="A directory or file with records; may be repeated.", metavar="DIR"),
    ],
    output: Output,
    host: Annotated[
        str, typer.Option(help="Address of this machine to listen on, which the other workers can reach.")
    ] = LOOPBACK,
    memory: Annotated[str | None, typer.Option(help="Memory limit of this worker; 2GB unless given.")] = None,
    work_dir: WorkDir = None,
    record_length: RecordLength = None,
    key_length: KeyLength = None,
    ascii_: Ascii = None,
    lines: Lines = False,
    key: LineKeys = None,
    separator: Separator = None,
    numeric: Numeric = False,
    reverse: Reverse = False,
    unique: Unique = False,
    stable: Stable = False,
    skip_blanks: SkipBlanks = False,
    fold: Fold = False,
    compress: Compress = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    overwrite: Overwrite = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to try to reach the master; 600 unless given.", metavar="S")
    ] = None,
    lost: Annotated[
        float | None,
        typer.Option(help="Seconds without an answer after which the master is lost; 60 unless given.", metavar="S"),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Show every state transition of the worker.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    report: ReportPath = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = LOOPBACK,
) -> None:
    """Take part in a sort on many machines: read this machine's records and write its share of the partitions.

    After a kill or a crash, the same command resumes.

    Example: interlock sort worker 10.0.0.1:40123 -I /data/a -O /data/sorted --host 10.0.0.2 --token-file sort.token
    """
    _set_up_logging(context)
    commands = _commands()
    commands.worker(
        address,
        inputs,
        output,
        host=host,
        security=_security(token_file, tls_cert, tls_key, tls_ca),
        settings=_given(memory=memory, register_timeout_s=timeout, lost_after_s=lost, compression=compress),
        work_dir=work_dir,
        lengths=(record_length, key_length),
        is_ascii=ascii_,
        line_options=_line_options(
            lines,
            keys=key or [],
            separator=separator,
            numeric=numeric,
            reverse=reverse,
            unique=unique,
            stable=stable,
            skip_blanks=skip_blanks,
            fold=fold,
        ),
        overwrite=overwrite,
        display=commands.DisplayOptions(
            history=history,
            quiet=quiet,
            as_json=as_json,
            report_path=report,
            metrics=None if metrics_port is None else (metrics_host, metrics_port),
        ),
    )


@app.command()
def validate(
    outputs: Annotated[
        list[Path],
        typer.Argument(
            help="The output directory; after a sort on many machines, those of all workers.", metavar="DIR…"
        ),
    ],
    inputs: Annotated[
        list[Path] | None,
        typer.Option("--input", "-I", help="The input of the sort, to compare with; may be repeated.", metavar="DIR"),
    ] = None,
    record_length: RecordLength = None,
    key_length: KeyLength = None,
    lines: Lines = False,
    key: LineKeys = None,
    separator: Separator = None,
    numeric: Numeric = False,
    reverse: Reverse = False,
    unique: Unique = False,
    stable: Stable = False,
    skip_blanks: SkipBlanks = False,
    fold: Fold = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Verify that an output is sorted: order within and across partitions; with --input, count and checksum as well.

    The exit code is 0 if the output is valid and 1 if it is not.

    Example: interlock sort validate sorted --input data
    """
    _commands().validate(
        outputs,
        inputs or [],
        lengths=(record_length, key_length),
        line_options=_line_options(
            lines,
            keys=key or [],
            separator=separator,
            numeric=numeric,
            reverse=reverse,
            unique=unique,
            stable=stable,
            skip_blanks=skip_blanks,
            fold=fold,
        ),
        quiet=quiet,
        as_json=as_json,
    )


def _security(token_file: Path | None, certificate: Path | None, key: Path | None, authority: Path | None) -> object:
    security = _import("interlock.sort.security").Security
    return security.load(token_file, certificate=certificate, key=key, authority=authority)


def _tls_files(certificate: Path | None, key: Path | None, authority: Path | None) -> object:
    """Return the files of TLS for a sort that generates its own token."""
    security = _import("interlock.sort.security").Security(certificate=certificate, key=key, authority=authority)
    security.check_files()
    return security


def _commands() -> ModuleType:
    return _import("interlock.cli.sort.implementation")


def _import(name: str) -> ModuleType:
    """Import a module that needs the extra `sort`; if that is missing, tell what to install."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the sort needs {error.name}: pip install 'interlock[sort]'") from error


def _set_up_logging(context: typer.Context, engine: Engine = Engine.LOCAL) -> None:
    """Log only warnings and errors unless a level was chosen: the display shows the rest."""
    config: Config = context.obj
    is_chosen = context.find_root().params.get("log_level") is not None or config.log_level != "info"
    level = config.log_level if is_chosen else "warning"
    _import("interlock.sort.logging").set_up_logging(level, config.log_format)
    if engine is not Engine.LOCAL:
        set_up_logging(level, config.log_format)


def _line_options(has_lines: bool, **options: object) -> dict[str, object] | None:
    """Return the options of an order of lines; None if none was given."""
    given = {name: value for name, value in options.items() if value not in (None, False, [])}
    return given if given or has_lines else None


def _given(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}
