"""Finds the conditions of named statements and database functions that write rows, or lock rows for a later write.

A condition is one term of an AND: of the WHERE of the statement, of the subqueries and CTEs that choose its rows, and
of the CASE that chooses the state that it writes. `without` returns the text with one condition replaced by `true`.

A SELECT of `set_config`, which names the actor in the records or asks to advance, is no condition: it is always true.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from interlock.postgres.query import load_statements
from sql_text import AGGREGATES, SQL

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMMENT = re.compile(r"--[^\n]*")
_TOKEN = re.compile(r"'(?:[^']|'')*'|%\(\w+\)s|%%|[\w.]+|::|<>|<=|>=|\|\||->>|->|<@|@>|\S")
_FUNCTION = re.compile(r"^create or replace function interlock\.(\w+).*?\$\$;$", re.MULTILINE | re.DOTALL)
_LOCKS = re.compile(r"\bfor (?:no key )?update\b")
_WRITES = re.compile(r"\b(?:update|delete from|insert into) interlock\.")
_NAMES_ACTOR = "set_config ( 'interlock.actor'"
_ASKS_TO_ADVANCE = "set_config ( 'interlock.advance_at_once'"
_STATE_COLUMNS = {"state", "status"}
_CLAUSES = frozenset(
    {"select", "from", "using", "where", "group", "having", "order", "limit", "offset", "for", "set", "returning"}
    | {"update", "delete", "into"}
)
_JOINS = frozenset({"join", "cross", "left", "inner", "lateral", ","})


class Token(NamedTuple):
    """A word, literal or sign, with its place in the text and the depth of parentheses and CASEs around it."""

    text: str
    start: int
    end: int
    depth: int


@dataclass(frozen=True)
class Condition:
    """One condition of a write. `spans` are its places in the text: a condition of SET may stand in several."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ConditionalStatement:
    """A named statement, or a database function (`name()`), that writes or locks rows under conditions."""

    name: str
    file: str
    sql: str
    conditions: tuple[Condition, ...]

    def without(self, *conditions: str) -> str:
        """Return the text with these conditions replaced by `true`."""
        known = {each.text: each for each in self.conditions}
        spans = [span for condition in conditions for span in known[condition].spans]
        sql = self.sql
        for start, end in sorted(spans, reverse=True):
            sql = f"{sql[:start]}true{sql[end:]}"
        return sql


def conditional_statements(tables: frozenset[str], functions: frozenset[str]) -> dict[str, ConditionalStatement]:
    """Read all named statements and functions that write to these tables or lock rows, by name.

    `functions` are database functions that do neither and whose query counts as well.
    """
    texts = [
        (statement.name, f"queries/{aggregate}.sql", statement.sql)
        for aggregate in AGGREGATES
        for statement in load_statements(aggregate).values()
    ] + [
        (f"{match[1]}()", f"functions/{path.name}", match[0])
        for path in sorted(SQL.joinpath("functions").glob("*.sql"))
        for match in _FUNCTION.finditer(path.read_text(encoding="utf-8"))
    ]
    parsed = [parse(name, file, sql, tables, is_query=name in functions) for name, file, sql in texts]
    return {statement.name: statement for statement in parsed if statement.conditions}


def parse(name: str, file: str, sql: str, tables: frozenset[str], *, is_query: bool = False) -> ConditionalStatement:
    """Find the conditions of a text's writes to these tables and of its locks, or of its query."""
    reader = _Reader(sql)
    if is_query or (not name.endswith("()") and _LOCKS.search(sql) and not _WRITES.search(sql)):
        found = list(reader.conditions_of_query())
    elif name.endswith("()"):
        found = [*reader.conditions_of_writes(tables), *reader.conditions_of_locks()]
    else:
        found = list(reader.conditions_of_writes(tables))
    spans: dict[str, list[tuple[tuple[int, int], ...]]] = {}
    for place in dict.fromkeys(sorted(found)):
        spans.setdefault(reader.normalized(*place[0]), []).append(place)
    conditions = [
        Condition(text if number == 1 else f"{text} [{number}]", place)
        for text, places in spans.items()
        for number, place in enumerate(places, 1)
    ]
    conditions.sort(key=lambda condition: condition.spans)
    return ConditionalStatement(name, file, sql, tuple(conditions))


class _Reader:
    """A recursive reader of one text. Ranges are pairs of token numbers, the second one excluded."""

    def __init__(self, sql: str) -> None:
        self._tokens = list(_tokens(sql))
        self._ctes = list(self._find_ctes())

    def conditions_of_writes(self, tables: frozenset[str]) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield the places of each condition of each write to these tables, as offsets in the text."""
        for at in range(len(self._tokens)):
            if self._table_written_at(at) in tables:
                yield from self._write(at, self._end(at))

    def conditions_of_query(self) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield the places of each condition of the outermost SELECT."""
        start = next(at for at, token in enumerate(self._tokens) if token.text == "select" and token.depth == 0)
        return self._query(start, len(self._tokens))

    def conditions_of_locks(self) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield the places of each condition of the SELECTs that lock rows, without the queries around them."""
        for at, token in enumerate(self._tokens):
            words = [following.text for following in self._tokens[at : at + 4]]
            if words[:2] == ["for", "update"] or words == ["for", "no", "key", "update"]:
                start = next(
                    place
                    for place in range(at, -1, -1)
                    if self._tokens[place].depth == token.depth and self._tokens[place].text == "select"
                )
                yield from self._query(start, self._end(start))

    def normalized(self, start: int, end: int) -> str:
        """Write a condition in one line, with `now` for the clock, without casts, and with … for subqueries."""
        inside = [token for token in self._tokens if start <= token.start < end]
        words: list[str] = []
        hidden = None
        for token, following in pairwise([*inside, Token("", end, end, -1)]):
            if hidden is not None and token.depth >= hidden:
                continue
            hidden = None
            if token.text == "(" and following.text == "select":
                # EXISTS has no other sign than its table
                words += ["(", *self._first_table(token.start, end) * (words[-1:] == ["exists"]), "…"]
                hidden = following.depth
            else:
                words.append(token.text)
        text = " ".join(words)
        text = re.sub(r" :: \w+(?: \[ \])?", "", text)
        text = re.sub(r"coalesce \( %\(now\)s , (?:now|clock_timestamp) \( \) \)", "now", text)
        text = re.sub(r"(?<=[(\[]) | (?=[),\]\[])", "", text)
        return re.sub(r"\b(array|coalesce|interval|greatest|least|starts_with|cardinality) \(", r"\1(", text)

    def _first_table(self, start: int, end: int) -> list[str]:
        tokens = (token for token in self._tokens if start < token.start < end)
        return [token.text for token in tokens if token.text.startswith("interlock.")][:1]

    # --- writes

    def _table_written_at(self, at: int) -> str | None:
        words = [token.text for token in self._tokens[at : at + 3]]
        if words[:1] == ["update"] and words[1:2] and words[1].startswith("interlock."):
            return words[1].removeprefix("interlock.")
        if words[:2] == ["delete", "from"] and words[2].startswith("interlock."):
            return words[2].removeprefix("interlock.")
        if words == ["do", "update", "set"]:
            before = [token.text for token in self._tokens[:at]]
            place = len(before) - before[::-1].index("insert") - 1
            return before[place + 2].removeprefix("interlock.")
        return None

    def _write(self, first: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
        # `delete from` has no FROM clause of other tables; its `using` is one
        begin = first + 3 if self._tokens[first].text == "delete" else first
        for keyword, start, stop in self._clauses(begin, end):
            if keyword == "set":
                yield from self._choices_of_state(start, stop)
            elif keyword in {"from", "using"}:
                yield from self._sources(start, stop)
            elif keyword == "where":
                yield from self._terms(start, stop)
                yield from self._referenced_ctes(start, stop)

    def _choices_of_state(self, start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield the conditions of `state = case when …`, each with all of its places in the SET clause."""
        depth = self._tokens[start].depth
        for at in range(start, end - 3):
            name, sign, case, when = (token.text for token in self._tokens[at : at + 4])
            assigns = self._tokens[at].depth == depth and name in _STATE_COLUMNS and sign == "="
            if assigns and (case, when) == ("case", "when"):
                then = self._find(("then",), at + 4, end, self._tokens[at + 3].depth)
                wanted = [token.text for token in self._tokens[at + 3 : then + 1]]
                places = [
                    self._offsets(place + 1, place + len(wanted) - 1)
                    for place in range(start, end)
                    if [token.text for token in self._tokens[place : place + len(wanted)]] == wanted
                ]
                yield tuple(places)

    # --- queries

    def _query(self, start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield the conditions of a SELECT, or of several with UNION between them."""
        for first, stop in self._split("union", start, end):
            begin = first + (self._tokens[first].text == "all")
            if self._tokens[begin].text == "(":
                yield from self._query(begin + 1, stop - 1)
                continue
            for keyword, clause, clause_end in self._clauses(begin, stop):
                if keyword == "from":
                    yield from self._sources(clause, clause_end)
                elif keyword == "where":
                    yield from self._terms(clause, clause_end)
                    yield from self._referenced_ctes(clause, clause_end)

    def _sources(self, start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield the conditions of a FROM clause: of its subqueries, its joins and the CTEs that it names."""
        depth = self._tokens[start].depth if start < end else 0
        for at in range(start, end):
            token = self._tokens[at]
            if token.depth != depth:
                continue
            if token.text == "(" and self._tokens[at + 1].text in {"select", "("}:
                yield from self._query(at + 1, self._closing(at))
            elif token.text == "on":
                yield from self._terms(at + 1, self._find(_JOINS, at + 1, end, depth))
        yield from self._referenced_ctes(start, end)

    def _referenced_ctes(self, start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield the conditions of the CTEs that a range names, if these stand in the same statement and only read."""
        names = {token.text for token in self._tokens[start:end]}
        for name, (first, stop) in self._ctes:
            is_before = stop <= start and all(token.text != ";" for token in self._tokens[stop:start])
            if name in names and is_before and self._table_written_at(first) is None:
                yield from self._query(first, stop)

    # --- expressions

    def _terms(self, start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield the terms of a boolean expression that can be removed one by one."""
        inner = self._without_parentheses(start, end)
        alternatives = self._split("or", *inner)
        if len(alternatives) > 1:
            yield (self._offsets(start, end),)
            # A term that is an alternative by itself is removed with the whole.
            terms = [term for each in alternatives for term in self._split("and", *each) if term != each]
        elif inner != (start, end):
            terms = [inner]
        else:
            terms = self._split("and", start, end)
        if terms != [(start, end)]:
            for term in terms:
                yield from self._terms(*term)
        elif [token.text for token in self._tokens[start : start + 2]] == ["case", "when"]:
            yield from self._cases(start, end)
        elif [token.text for token in self._tokens[start:end]] not in (["true"], ["false"]):
            yield from self._term(start, end)

    def _without_parentheses(self, start: int, end: int) -> tuple[int, int]:
        """Return the range inside the parentheses around a range, if there are any and these hold no subquery."""
        words = [token.text for token in self._tokens[start : start + 2]]
        is_group = words[0] == "(" and words[1] != "select" and self._closing(start) == end - 1
        return (start + 1, end - 1) if is_group else (start, end)

    def _cases(self, start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield the conditions and the results of a CASE that is itself a condition."""
        depth = self._tokens[start + 1].depth
        marks = [
            at
            for at in range(start + 1, end)
            if self._tokens[at].depth == depth and self._tokens[at].text in {"when", "then", "else"}
        ]
        for mark, following in pairwise([*marks, end - 1]):
            yield from self._terms(mark + 1, following)

    def _term(self, start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
        words = " ".join(token.text for token in self._tokens[start:end])
        if _NAMES_ACTOR in words or _ASKS_TO_ADVANCE in words:
            return
        yield (self._offsets(start, end),)
        # EXISTS and scalar subqueries are removed as a whole
        if re.search(r"(= any \( array|=|\bin) \( select\b", words):
            at = start
            while at < end - 1:
                if self._tokens[at].text == "(" and self._tokens[at + 1].text == "select":
                    yield from self._query(at + 1, self._closing(at))
                    at = self._closing(at)
                at += 1

    # --- ranges of tokens

    def _find_ctes(self) -> Iterator[tuple[str, tuple[int, int]]]:
        words = [token.text for token in self._tokens]
        for at, word in enumerate(words):
            if word in {"with", "recursive"} or (word == "," and words[at - 1] == ")"):
                name = at + 1
                opening = name + (3 if words[name + 2 : name + 3] == ["materialized"] else 2)
                if words[name + 1 : name + 2] == ["as"] and words[opening : opening + 1] == ["("]:
                    yield words[name], (opening + 1, self._closing(opening))

    def _clauses(self, start: int, end: int) -> Iterator[tuple[str, int, int]]:
        depth = self._tokens[start].depth
        marks = [
            at
            for at in range(start, end)
            if self._tokens[at].depth == depth
            and self._tokens[at].text in _CLAUSES
            and not (self._tokens[at].text == "from" and self._tokens[at - 1].text == "distinct")
        ]
        for mark, following in pairwise([*marks, end]):
            yield self._tokens[mark].text, mark + 1, following

    def _split(self, word: str, start: int, end: int) -> list[tuple[int, int]]:
        """Split a range at a word, but not at the AND of BETWEEN."""
        depth = self._tokens[start].depth
        marks = []
        between = False
        for at in range(start, end):
            token = self._tokens[at]
            if token.depth != depth:
                continue
            if token.text == "between":
                between = True
            elif token.text == word and between and word == "and":
                between = False
            elif token.text == word:
                marks.append(at)
        return list(zip([start, *(mark + 1 for mark in marks)], [*marks, end], strict=True))

    def _find(self, words: frozenset[str] | tuple[str, ...], start: int, end: int, depth: int) -> int:
        return next(
            (at for at in range(start, end) if self._tokens[at].depth == depth and self._tokens[at].text in words), end
        )

    def _closing(self, opening: int) -> int:
        depth = self._tokens[opening].depth
        return next(
            at
            for at in range(opening + 1, len(self._tokens))
            if self._tokens[at].depth == depth and self._tokens[at].text == ")"
        )

    def _end(self, start: int) -> int:
        """Return the end of the statement that begins here: its `;`, the parenthesis around it, or the end."""
        depth = self._tokens[start].depth
        return next(
            (
                at
                for at in range(start, len(self._tokens))
                if self._tokens[at].depth < depth or (self._tokens[at].depth == depth and self._tokens[at].text == ";")
            ),
            len(self._tokens),
        )

    def _offsets(self, start: int, end: int) -> tuple[int, int]:
        return self._tokens[start].start, self._tokens[end - 1].end


def _tokens(sql: str) -> Iterator[Token]:
    """Split a text, whose comments are blanked. Parentheses, `case` and `end` have the depth outside of them."""
    text = _COMMENT.sub(lambda match: " " * len(match[0]), sql)
    depth = 0
    opened: list[str] = []
    for match in _TOKEN.finditer(text):
        word = match[0] if match[0].startswith(("'", "%")) else match[0].lower()
        if word == ")" or (word == "end" and opened[-1:] == ["case"]):
            depth -= 1
            opened.pop()
        yield Token(word, match.start(), match.end(), depth)
        if word in {"(", "case"}:
            depth += 1
            opened.append(word)
