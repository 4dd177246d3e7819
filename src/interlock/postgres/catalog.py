"""The tables, indexes, constraints, triggers and functions of this release, read from its SQL files.

`interlock doctor` compares them with the catalog of a database. Definitions are compared as the words that they consist
of: PostgreSQL prints a definition with other parentheses, casts and spaces than it was written with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

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
ORIGIN = "O"  # fires unless session_replication_role is replica

_COMMENT = re.compile(r"--[^\n]*")
_TABLE = re.compile(r"create (?:unlogged )?table interlock\.(\w+) \((.*?)\n\)", re.DOTALL)
_INDEX = re.compile(r"create (?:unique )?index (\w+) on interlock\.(\w+)[^;]*")
_TRIGGER = re.compile(r"create (?:or replace )?trigger (\w+) [^;]*? on interlock\.(\w+)[^;]*")
_ALWAYS = re.compile(r"alter table interlock\.(\w+) enable always trigger (\w+)")
_FUNCTION = re.compile(r"create or replace function interlock\.(\w+)\((.*?) as \$\$(.*?)\$\$;", re.DOTALL)
_ADDED_CONSTRAINT = re.compile(r"alter table interlock\.(\w+) add constraint (\w+)")
_SETTING = re.compile(r"\bset (\w+) = ([\w ,]+?)(?= set |$)")
_COLUMN = re.compile(r"(\w+) [a-z]")
_NO_COLUMN = frozenset({"constraint", "primary", "unique", "foreign", "check"})

_STRING = re.compile(r"'(?:[^']|'')*'")
_CAST = re.compile(
    r"::(?:timestamp with time zone|timestamptz|double precision|text|integer|interval|int|bigint|jsonb|uuid)\b"
)
_WORD = re.compile(r"'(?:[^']|'')*'|[\w.]+|[^\s\w()\[\]]+")
_NOT_DISTINCT = re.compile(r"([\w.]+) is not distinct from ([\w.]+)")
_IN_LIST = re.compile(r" in \(")
_OPTIONS = re.compile(r"\bwith \([^)]*\)")


@dataclass(frozen=True, slots=True)
class ExpectedTrigger:
    """A trigger: its definition and the value of `tgenabled`."""

    definition: str
    enabled: str


@dataclass(frozen=True, slots=True)
class ExpectedFunction:
    """A function: its source, whether it runs as its owner, and the settings that it runs with."""

    source: str
    security_definer: bool
    settings: frozenset[str]


@dataclass(slots=True)
class ExpectedCatalog:
    """The objects of the schema `interlock`, by name."""

    columns: dict[str, set[str]] = field(default_factory=dict)  # by table
    indexes: dict[str, str] = field(default_factory=dict)  # definitions
    constraints: set[tuple[str, str]] = field(default_factory=set)  # table and name
    triggers: dict[tuple[str, str], ExpectedTrigger] = field(default_factory=dict)  # by table and name
    functions: dict[str, ExpectedFunction] = field(default_factory=dict)


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
        catalog.constraints |= {(table, name) for table, name in _ADDED_CONSTRAINT.findall(text)}
    return catalog


def _add_tables(catalog: ExpectedCatalog, text: str) -> None:
    for table, body in _TABLE.findall(text):
        columns = catalog.columns.setdefault(table, set())
        for line in _split(body):
            first = line.split(maxsplit=1)[0]
            if first not in _NO_COLUMN and _COLUMN.match(line):
                columns.add(first)
            catalog.constraints |= {(table, name) for name in _constraint_names(table, first, line)}
    for found in _INDEX.finditer(text):
        catalog.indexes[found[1]] = " ".join(found[0].split())


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
        catalog.functions[name] = ExpectedFunction(source, "security definer" in words, settings)


def normalize_definition(definition: str) -> str:
    """Reduce the definition of an index or a trigger to its words, as written or as PostgreSQL prints it."""
    text = " ".join(definition.split())
    strings: list[str] = []

    def keep(found: re.Match[str]) -> str:
        strings.append(found[0])
        return f"'{len(strings) - 1}'"

    text = _STRING.sub(keep, text).lower()
    text = text.replace(" or replace ", " ").replace(" on only ", " on ").replace(" using btree", "")
    text = _IN_LIST.sub(" = any (array", _CAST.sub("", _OPTIONS.sub("", text)))
    text = _NOT_DISTINCT.sub(r"not \1 is distinct from \2", text).replace("interlock.", "")
    words = [strings[int(word[1:-1])] if word.startswith("'") else word for word in _WORD.findall(text)]
    # an interval is printed as hours, minutes and seconds
    return " ".join(words).replace("interval '1 minute'", "'00:01:00'")
