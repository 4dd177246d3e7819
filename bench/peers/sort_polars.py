"""Polars: the lines as one column, sorted by the streaming engine, sunk into one file."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from sorting import given, started, tell


def main() -> None:
    """Sort."""
    asked = given()
    os.environ["POLARS_MAX_THREADS"] = str(asked.workers)
    os.environ["POLARS_TEMP_DIR"] = str(asked.temp)
    polars: Any = import_module("polars")
    startup = started()
    lines = polars.scan_csv(
        asked.files,
        has_header=False,
        separator="\x01",
        quote_char=None,
        eol_char="\n",
        schema={"line": polars.String},
    )
    lines.sort("line").sink_csv(
        asked.output / "partition.0",
        include_header=False,
        separator="\x01",
        quote_style="never",
        line_terminator="\r\n",
    )
    tell(f"{asked.workers} threads, streaming; it knows no limit of memory", startup)


if __name__ == "__main__":
    main()
