"""Common parts of the benchmarks against peers: paired rounds, table rows, and a scratch directory.

Invariant: a ratio is computed within one round; the table shows the median of the ratios of all rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from field import Entrant, settle_environment

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

E = TypeVar("E", bound=Entrant)
V = TypeVar("V")

OURS = "interlock"
SETTINGS = {"shared_buffers": "256MB", "max_wal_size": "4GB"}


@dataclass(slots=True)
class Row:
    """One row of the table: the samples of each entrant by round, and the target of Interlock."""

    name: str
    unit: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    # peer -> target: at least so many times as fast
    ratios: dict[str, float] = field(default_factory=dict)
    target: str = ""

    def add(self, entrant: str, value: float) -> None:
        """Add a sample."""
        self.samples.setdefault(entrant, []).append(value)

    def median(self, entrant: str) -> float | None:
        """Return the median of the samples of an entrant."""
        return statistics.median(self.samples[entrant]) if entrant in self.samples else None

    def ratio(self, peer: str) -> float | None:
        """Return the median of the ratios, each of the two samples of one round."""
        pairs = list(zip(self.samples.get(OURS, []), self.samples.get(peer, []), strict=False))
        return statistics.median(ours / theirs for ours, theirs in pairs if theirs) if pairs else None


def asked(names: str, known: Mapping[str, V]) -> list[V]:
    """Return the peers that `--peers` names; exit on an unknown name."""
    wanted = [name.strip() for name in names.split(",") if name.strip() not in ("", OURS)]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        sys.exit(f"--peers: unknown {', '.join(unknown)}; known are {', '.join(sorted(known.keys() - {OURS}))}")
    return [known[name] for name in wanted]


def turns(entrants: Sequence[E], rounds: int) -> Iterator[E]:
    """Yield the entrants round by round, and show the progress."""
    for number in range(rounds):
        for entrant in entrants:
            print(f"\r  round {number + 1} of {rounds}: {entrant.name:14}", end="", file=sys.stderr, flush=True)
            yield entrant
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)


def shown(value: float | None) -> str:
    """Format a figure with about three significant digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"  # noqa: PLR2004 - three significant digits


def head(entrants: Sequence[Entrant]) -> str:
    """Format the head of the table."""
    cells = ["", *(entrant.name for entrant in entrants), *(f"times {peer.name}" for peer in entrants[1:]), "target"]
    return "\n| " + " | ".join(cells) + " |\n|" + " --- |" * len(cells)


def line(row: Row, entrants: Sequence[Entrant]) -> str:
    """Format one row of the table; ratios only for rates."""
    cells = [f"{row.name}, {row.unit}", *(shown(row.median(entrant.name)) for entrant in entrants)]
    for peer in entrants[1:]:
        ratio, least = row.ratio(peer.name), row.ratios.get(peer.name)
        wanted = f" (≥ {least})" if least is not None else ""
        cells.append(shown(ratio) + wanted if ratio is not None and row.unit.endswith("/s") else "")
    return "| " + " | ".join([*cells, row.target]) + " |"


def run_in_scratch(given: argparse.Namespace, run: Callable[[argparse.Namespace, Path], dict[str, Any]]) -> None:
    """Run a benchmark in a temporary directory; write its samples to the file of `--json`."""
    settle_environment()
    with tempfile.TemporaryDirectory(prefix="interlock-bench-", ignore_cleanup_errors=True) as scratch:
        Path(scratch).chmod(0o755)  # the server may run as another user
        found = run(given, Path(scratch))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
