"""Polars: the lines as one column, or as three, sorted by the streaming engine, sunk into one file."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from sort_driver import parse_arguments, print_report, startup_seconds


def main() -> None:
    """Sort the input into the output directory."""
    arguments = parse_arguments()
    os.environ["POLARS_MAX_THREADS"] = str(arguments.workers)
    os.environ["POLARS_TEMP_DIR"] = str(arguments.temp)
    polars: Any = import_module("polars")
    startup = startup_seconds()
    if arguments.has_lines:
        columns = dict.fromkeys("abc", polars.String)
        table = polars.scan_csv(arguments.files, has_header=False, quote_char=None, schema=columns)
        table.sort("b", "a", "c").sink_csv(
            arguments.output / "partition.0", include_header=False, quote_style="never", line_terminator="\n"
        )
        print_report(f"{arguments.workers} threads, streaming; no memory limit", startup)
        return
    lines = polars.scan_csv(
        arguments.files,
        has_header=False,
        separator="\x01",
        quote_char=None,
        eol_char="\n",
        schema={"line": polars.String},
    )
    lines.sort("line").sink_csv(
        arguments.output / "partition.0",
        include_header=False,
        separator="\x01",
        quote_style="never",
        line_terminator="\r\n",
    )
    print_report(f"{arguments.workers} threads, streaming; no memory limit", startup)


if __name__ == "__main__":
    main()
