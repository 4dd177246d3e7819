"""Loads the named SQL statements: `sql/<aggregate>.sql`, in blocks that begin with `-- name:`.

Invariant: a statement says in `-- moves:` headers which transitions it writes, so that a test can hold all of them
to the lifecycle tables.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files

_HEADER = re.compile(r"^-- (name|moves): (.+)$")
_MOVE = re.compile(r"^(?P<machine>[a-z ]+?) (?P<source>\w+) -(?P<event>\w+)-> (?P<target>\w+)$")


@dataclass(frozen=True, slots=True)
class WrittenMove:
    """A transition that a statement says it writes."""

    machine: str
    source: str
    event: str
    target: str


@dataclass(frozen=True, slots=True)
class Statement:
    """One named statement and the moves that it writes."""

    name: str
    sql: str
    moves: tuple[WrittenMove, ...]


def load_statements(aggregate: str) -> dict[str, Statement]:
    """Read all statements of one aggregate, by name."""
    text = files("interlock.store").joinpath("sql", f"{aggregate}.sql").read_text(encoding="utf-8")
    found: dict[str, Statement] = {}
    for block in re.split(r"^(?=-- name: )", text, flags=re.MULTILINE)[1:]:
        statement = _parse(block, aggregate)
        if statement.name in found:
            raise ValueError(f"{aggregate}.sql: statement {statement.name} is defined twice")
        found[statement.name] = statement
    return found


def _parse(block: str, aggregate: str) -> Statement:
    name = ""
    moves = []
    body = []
    for line in block.splitlines():
        header = _HEADER.match(line)
        if header is None:
            body.append(line.strip())
        elif header[1] == "name":
            name = header[2].strip()
        else:
            move = _MOVE.match(header[2].strip())
            if move is None:
                raise ValueError(f"{aggregate}.sql: {name}: cannot read the header {line!r}")
            moves.append(WrittenMove(**move.groupdict()))
    # What is only for readers stays here: the driver keeps what it found in a statement only if that is a short one.
    return Statement(name, "\n".join(line for line in body if line and not line.startswith("--")), tuple(moves))
