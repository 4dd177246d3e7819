"""Reads the SQL files of the package as text: statements, functions, and the moves that they declare and write."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from interlock.postgres.guards import GUARDS
from interlock.postgres.query import load_statements

if TYPE_CHECKING:
    from collections.abc import Iterator

SQL = Path(str(files("interlock").joinpath("sql")))
AGGREGATES = sorted(path.stem for path in SQL.joinpath("queries").glob("*.sql"))
HAND_WRITTEN = sorted(path for path in SQL.rglob("*.sql") if path.name != "guards.sql")

_FUNCTION = re.compile(r"^create or replace function interlock\.(\w+)", re.MULTILINE)
_MOVE = re.compile(r"^-- moves: (?P<machine>[a-z ]+?) (?P<source>\w+) -(?P<event>\w+)-> (?P<target>\w+)$", re.MULTILINE)
_COMMENT = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
_SET = re.compile(r"\bupdate\s+interlock\.(\w+)(?:\s+as\s+\w+)?\s+set\b|\bdo\s+update\s+set\b")
_TOKEN = re.compile(r"'(?:[^']|'')*'|[(),;]|\w+|\s+|.", re.DOTALL)
_END_OF_SET = {"from", "where", "returning"}
_RESULT = re.compile(r"(?:^|\b(?:then|else))\s*'(\w+)'")


class Move(NamedTuple):
    """A transition of a machine."""

    machine: str
    source: str
    event: str
    target: str


@dataclass(frozen=True)
class Writer:
    """A named statement or a database function, with the moves that its headers declare."""

    name: str
    sql: str
    moves: frozenset[Move]


def writers() -> Iterator[Writer]:
    """Read all named statements and all database functions."""
    for aggregate in AGGREGATES:
        for statement in load_statements(aggregate).values():
            moves = frozenset(Move(m.machine, m.source, m.event, m.target) for m in statement.moves)
            yield Writer(statement.name, statement.sql, moves)
    for path in sorted(SQL.joinpath("functions").glob("*.sql")):
        text = path.read_text(encoding="utf-8")
        starts = [match.start() for match in _FUNCTION.finditer(text)]
        begin = 0
        for match, end in zip(_FUNCTION.finditer(text), [*starts[1:], len(text)], strict=True):
            head = text[begin : match.start()].rpartition("$$;")[2]
            moves = frozenset(Move(**found.groupdict()) for found in _MOVE.finditer(head))
            yield Writer(f"{match[1]}()", text[match.start() : end].rpartition("$$;")[0], moves)
            begin = match.start()


def written_targets(sql: str) -> dict[str, set[str]]:
    """Return the states that the updates in a text write, by machine; `?` stands for an expression without literals."""
    columns = {guard.table: (guard.column, guard.machine.name) for guard in GUARDS}
    found: dict[str, set[str]] = {}
    text = _COMMENT.sub("", sql)
    for match in _SET.finditer(text):
        for assignment in _assignments(text[match.end() :]):
            name, _, expression = (part.strip() for part in assignment.partition("="))
            for table, (column, machine) in columns.items():
                # `on conflict do update` does not repeat its table: no guarded table may be written in that way
                if name == column and match[1] in {table, None}:
                    found.setdefault(machine, set()).update(_RESULT.findall(expression) or {"?"})
    return found


def _assignments(text: str) -> list[str]:
    """Split the SET clause at the beginning of a text at its commas."""
    parts, depth = [""], 0
    for token in _TOKEN.findall(text):
        word = token.lower()
        depth += (word in {"(", "case"}) - (word in {")", "end"})
        if depth < 0 or (depth == 0 and (word in _END_OF_SET or word == ";")):
            break
        if depth == 0 and word == ",":
            parts.append("")
        else:
            parts[-1] += token
    return parts
