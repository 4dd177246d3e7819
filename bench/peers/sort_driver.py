"""Common parts of the peer drivers of the sort benchmark: arguments and report.

A driver reads lines of 100 bytes, or lines with three columns, from the files of one directory and writes them, in
order, to partition.0, partition.1, … in another.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

STARTED_AT = time.monotonic()


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a driver."""

    source: Path
    output: Path
    temp: Path
    memory: int
    workers: int
    has_lines: bool  # with three columns, to be sorted by the second one

    @property
    def files(self) -> list[str]:
        """The input files, in order."""
        return sorted(str(path) for path in self.source.iterdir())


def parse_arguments() -> Arguments:
    """Parse the command line."""
    source, output, temp, memory, workers, kind = sys.argv[1:]
    return Arguments(Path(source), Path(output), Path(temp), int(memory), int(workers), kind == "lines")


def startup_seconds() -> float:
    """Return the seconds since this module was imported; called when the engine is ready to sort."""
    return time.monotonic() - STARTED_AT


def print_report(setting: str, startup: float) -> None:
    """Print the settings and the start-up time for the table."""
    print(json.dumps({"setting": setting, "startup": startup}))


def rename_partitions(parts: list[Path], output: Path) -> None:
    """Rename parts, which are in order, to partition.0, and so on."""
    for number, part in enumerate(parts):
        part.rename(output / f"partition.{number}")
