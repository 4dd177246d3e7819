"""The tables, indexes, constraints, triggers and functions of this release, read from its SQL files.

`interlock doctor` compares them with the catalog of a database. Definitions of triggers and indexes are compared as the
words that they consist of, because PostgreSQL prints a definition with other parentheses, casts and spaces than it was
written with; check constraints as the names and values in them, because it also prints other operators.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from interlock.postgres.guards import render
from interlock.postgres.migrate import known_migrations

RECORD_TABLES = ("audit_logs", "job_state_transitions", "worker_state_transitions")
# Triggers that functions/records.sql creates on each of these tables and their partitions.
RECORD_TRIGGERS = {
    "no_change": "before update or delete on {table} for each row execute function interlock.refuse_change()",
    "no_forgery": "before insert on {table} for each statement execute function interlock.refuse_forgery()",
    "no_truncate": "before truncate on {table} for each statement execute function interlock.refuse_change()",
}
ALWAYS = "A"  # pg_trigger.tgenabled: fires whatever session_replication_role is
DISABLED = "D"
ORIGIN = "O"  # fires unless session_replication_role is replica

_COMMENT = re.compile(r"--[^\n]*")
_TABLE = re.compile(r"create (unlogged )?table interlock\.(\w+) \((.*?)\n\)", re.DOTALL)
_INDEX = re.compile(r"create (?:unique )?index (\w+) on interlock\.(\w+)[^;]*")
_TRIGGER = re.compile(r"create (?:or replace )?trigger (\w+) [^;]*? on interlock\.(\w+)[^;]*")
_ALWAYS = re.compile(r"alter table interlock\.(\w+) enable always trigger (\w+)")
_FUNCTION = re.compile(r"create or replace function interlock\.(\w+)\((.*?) as \$\$(.*?)\$\$;", re.DOTALL)
_NEW_ID = re.compile(r"create function interlock\.new_id\(\) .*? as\s+(?:'(.*?)'|\$f\$(.*?)\$f\$);", re.DOTALL)
_ADDED_CONSTRAINT = re.compile(r"alter table interlock\.(\w+) add constraint (\w+)\s+([^;]*);")
_SETTING = re.compile(r"\bset (\w+) = ([\w ,]+?)(?= set |$)")
_COLUMN = re.compile(r"(\w+) ([a-z].*?)(?= not null| default| primary key| unique| references| generated|$)")
_DEFAULT = re.compile(r" default (.*?)(?= not null| primary key| unique| references|$)")
_VOLATILITY = re.compile(r"\b(immutable|stable)\b")
_TYPES = {"int": "integer", "timestamptz": "timestamp with time zone"}  # as PostgreSQL prints them
_IDENTITY = " generated always as identity"
_NOT_NULL = re.compile(rf" not null| primary key|{_IDENTITY}")
_KEY = re.compile(r"primary key \(([^)]*)\)")
_NO_COLUMN = frozenset({"constraint", "primary", "unique", "foreign", "check"})

_STRING = re.compile(r"'(?:[^']|'')*'")
_CAST = re.compile(
    r"::(?:timestamp with time zone|timestamptz|double precision|text|integer|interval|int|bigint|jsonb|uuid)\b"
)
_WORD = re.compile(r"'(?:[^']|'')*'|[\w.]+|[^\s\w()\[\]]+")
_NOT_DISTINCT = re.compile(r"([\w.]+) is not distinct from ([\w.]+)")
_IN_LIST = re.compile(r" in \(")
_OPTIONS = re.compile(r"\bwith \([^)]*\)")

_ANY_CAST = re.compile(r"::(?:timestamp with time zone|timestamptz|double precision|[a-z]+)(?:\[\])?")
_NAME_OR_VALUE = re.compile(r"'(?:[^']|'')*'|[a-z_]\w*|\d+")
_TIME = re.compile(r"'\d*(?::\d+|-\d+-\d+)[^']*'")  # an interval or a time, printed for the session's settings
# `not valid` is printed of a constraint that was not validated, which is a finding of its own
_SQL_WORDS = frozenset(
    ("check", "and", "or", "not", "is", "null", "between", "in", "any", "array", "distinct", "from", "valid")
)


class Column(NamedTuple):
    """A column: its type as PostgreSQL prints it, whether it must not be null, and the words of its default."""

    type: str
    not_null: bool
    default: str | None = None  # "identity" if the column is generated as such


@dataclass(frozen=True, slots=True)
class ExpectedTrigger:
    """A trigger: its definition and the value of `tgenabled`."""

    definition: str
    enabled: str


@dataclass(frozen=True, slots=True)
class ExpectedFunction:
    """A function: its source, whether it runs as its owner, the settings that it runs with, and its volatility."""

    source: str
    security_definer: bool
    settings: frozenset[str]
    volatility: str  # immutable, stable or volatile
    is_strict: bool = False  # no function of a release is


@dataclass(slots=True)
class ExpectedCatalog:
    """The objects of the schema `interlock`, by name."""

    columns: dict[str, dict[str, Column]] = field(default_factory=dict)  # by table and name
    unlogged: set[str] = field(default_factory=set)  # tables
    indexes: dict[str, str] = field(default_factory=dict)  # definitions
    constraints: dict[tuple[str, str], str] = field(default_factory=dict)  # by table and name: the line that has it
    triggers: dict[tuple[str, str], ExpectedTrigger] = field(default_factory=dict)  # by table and name
    functions: dict[str, ExpectedFunction] = field(default_factory=dict)
    new_id: set[str] = field(default_factory=set)  # sources of this function, by the version of the server


@cache
def expected_catalog() -> ExpectedCatalog:
    """Read the files of this release; the guards are those that `lifecycle.py` leads to."""
    catalog = ExpectedCatalog()
    for migration in known_migrations():
        text = _COMMENT.sub("", migration.text) if migration.version is not None else migration.text
        text = render() if migration.name == "guards" else text
        if migration.version is not None:
            _add_tables(catalog, text)
        else:
            _add_functions(catalog, text)
            text = _COMMENT.sub("", _FUNCTION.sub("", text))
        _add_triggers(catalog, text)
        catalog.constraints |= {(table, name): line for table, name, line in _ADDED_CONSTRAINT.findall(text)}
    return catalog


def _add_tables(catalog: ExpectedCatalog, text: str) -> None:
    for unlogged, table, body in _TABLE.findall(text):
        columns = catalog.columns.setdefault(table, {})
        if unlogged:
            catalog.unlogged.add(table)
        lines = _split(body)
        keys = {name.strip() for line in lines for found in _KEY.findall(line) for name in found.split(",")}
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if first not in _NO_COLUMN and (found := _COLUMN.match(line)):
                columns[first] = _parse_column(line, found[2], is_key=first in keys)
            catalog.constraints |= dict.fromkeys(
                ((table, name) for name in _constraint_names(table, first, line)), line
            )
    catalog.new_id |= {quoted or body for quoted, body in _NEW_ID.findall(text)}
    for found in _INDEX.finditer(text):
        catalog.indexes[found[1]] = " ".join(found[0].split())


def _parse_column(line: str, type_: str, *, is_key: bool) -> Column:
    not_null = is_key or _NOT_NULL.search(line) is not None
    if _IDENTITY in line:
        return Column(_print_type(type_), not_null, "identity")
    default = _DEFAULT.search(line)
    return Column(_print_type(type_), not_null, normalize_definition(default[1]) if default else None)


def _print_type(written: str) -> str:
    """Return a type as PostgreSQL prints it."""
    name, array = written.removesuffix("[]"), written.endswith("[]")
    return _TYPES.get(name, name) + ("[]" if array else "")


def _split(body: str) -> list[str]:
    """Split the body of a table at the commas outside of parentheses and strings."""
    parts, depth, start = [], 0, 0
    masked = _STRING.sub(lambda found: "_" * len(found[0]), body)
    for place, character in enumerate(masked):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append(body[start:place])
            start = place + 1
    return [" ".join(part.split()) for part in (*parts, body[start:]) if part.strip()]


def _constraint_names(table: str, first: str, line: str) -> list[str]:
    """Return the names of the constraints of one line, those that PostgreSQL gives included."""
    if first == "constraint":
        return [line.split()[1]]
    if first == "unique":
        return [f"{table}_{'_'.join(re.findall(r'[a-z_]+', line.partition('(')[2]))}_key"]
    names = []
    if "primary key" in line:
        names.append(f"{table}_pkey")
    if " references " in line:
        names.append(f"{table}_{first}_fkey")
    if first not in _NO_COLUMN and re.search(r"\bunique\b", line):
        names.append(f"{table}_{first}_key")
    return names


def _add_triggers(catalog: ExpectedCatalog, text: str) -> None:
    always = {(table, name) for table, name in _ALWAYS.findall(text)}
    for found in _TRIGGER.finditer(text):
        key = (found[2], found[1])
        catalog.triggers[key] = ExpectedTrigger(found[0], ALWAYS if key in always else ORIGIN)


def _add_functions(catalog: ExpectedCatalog, text: str) -> None:
    for name, head, source in _FUNCTION.findall(text):
        words = " ".join(_COMMENT.sub("", head).split())
        settings = frozenset(f"{key}={value.strip()}" for key, value in _SETTING.findall(words))
        volatility = _VOLATILITY.search(words.rpartition(")")[2])
        catalog.functions[name] = ExpectedFunction(
            source, "security definer" in words, settings, volatility[1] if volatility else "volatile"
        )


def _normalize_array(string: str) -> str:
    """Write an array literal as PostgreSQL prints it, but without quotes; return any other string as it is."""
    if not string.startswith("'{"):
        return string
    return "'{" + ",".join(element.strip(' "') for element in string[2:-2].split(",")) + "}'"


def normalize_definition(definition: str) -> str:
    """Reduce the definition of an index or a trigger to its words, as written or as PostgreSQL prints it."""
    text = " ".join(definition.split())
    strings: list[str] = []

    def keep(found: re.Match[str]) -> str:
        strings.append(_normalize_array(found[0]))
        return f"'{len(strings) - 1}'"

    text = _STRING.sub(keep, text).lower()
    text = text.replace(" or replace ", " ").replace(" on only ", " on ").replace(" using btree", "")
    text = _IN_LIST.sub(" = any (array", _CAST.sub("", _OPTIONS.sub("", text)))
    text = _NOT_DISTINCT.sub(r"not \1 is distinct from \2", text).replace("interlock.", "")
    words = [strings[int(word[1:-1])] if word.startswith("'") else word for word in _WORD.findall(text)]
    # an interval is printed as hours, minutes and seconds
    return " ".join(words).replace("interval '1 minute'", "'00:01:00'")


def names_and_values(constraint: str) -> set[str]:
    """Return the names and values in a check constraint, as written or as PostgreSQL prints it."""
    strings: list[str] = []

    def keep(found: re.Match[str]) -> str:
        strings.append(_normalize_array(found[0]))
        return f"'{len(strings) - 1}'"

    text = constraint.partition("check ")[2] or constraint.partition("CHECK ")[2]
    text = _ANY_CAST.sub("", _STRING.sub(keep, " ".join(text.split())).lower())
    words = {strings[int(word[1:-1])] if word.startswith("'") else word for word in _NAME_OR_VALUE.findall(text)}
    # a negative number is printed as a string, and an interval of '0' as a time
    return {re.sub(r"^'-?(\d+)'$", r"\1", word) for word in words if not _TIME.fullmatch(word)} - _SQL_WORDS - {"0"}
