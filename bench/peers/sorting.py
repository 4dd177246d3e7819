"""What the drivers of other sorts have in common: their arguments, and what they say of themselves.

Invariant: a driver reads lines of 100 bytes from the files of one directory and writes them, in order, to partition.0,
partition.1, … in another.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

STARTED = time.monotonic()


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a driver."""

    source: Path
    output: Path
    temp: Path
    memory: int
    workers: int

    @property
    def files(self) -> list[str]:
        """Name the input files, in order."""
        return sorted(str(path) for path in self.source.iterdir())


def given() -> Given:
    """Read the arguments."""
    source, output, temp, memory, workers = sys.argv[1:]
    return Given(Path(source), Path(output), Path(temp), int(memory), int(workers))


def started() -> float:
    """Tell how long it took from here to the start of the work, once the engine is up."""
    return time.monotonic() - STARTED


def tell(setting: str, startup: float) -> None:
    """Say how it was set, for the table."""
    print(json.dumps({"setting": setting, "startup": startup}))


def number(parts: list[Path], output: Path) -> None:
    """Give the parts, which are in order, their names."""
    for place, part in enumerate(parts):
        part.rename(output / f"partition.{place}")
