"""Checks of the server and of the schema: guards, functions, indexes, partitions, rights, vacuum, clock."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from interlock.errors import MigrationError
from interlock.postgres.catalog import (
    ALWAYS,
    DISABLED,
    ORIGIN,
    RECORD_TABLES,
    RECORD_TRIGGERS,
    Column,
    ExpectedFunction,
    ExpectedTrigger,
    expected_catalog,
    names_and_values,
    normalize_definition,
)
from interlock.postgres.migrate import (
    MIN_SERVER_VERSION,
    applied_migrations,
    known_migrations,
    pending_migrations,
    schema_version,
)
from interlock.postgres.query import load_statements, run
from interlock.store.doctor.findings import SAMPLE_SIZE, make_finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from interlock.postgres.connection import Connection
    from interlock.store.doctor.findings import Finding

CATALOG = load_statements("doctor_catalog")
MAX_CLOCK_SKEW = timedelta(seconds=5)
BLOAT_ROWS = 100_000  # dead rows, below which a vacuum makes no difference
BLOAT_AGE = timedelta(minutes=10)  # since the last vacuum

_QUALIFIED = re.compile(r"\b\w+\.(?=msg_id|vt\b|message|read_ct)")  # as older servers print columns of a view
_GRANT = re.compile(r"grant ([\w, ]+) on (interlock\.[\w., \n]+) to")


async def check_server(connection: Connection) -> tuple[list[Finding], dict[str, str]]:
    """Check the version of the server, whether it can be written to, and its clock."""
    sent_at = datetime.now(UTC)
    (row,) = await run(connection, CATALOG["read_server"], {})
    received_at = datetime.now(UTC)
    version = row["version"]
    facts = {"database": f"PostgreSQL {version // 10_000}.{version % 10_000}"}
    findings = []
    if version < MIN_SERVER_VERSION:
        findings.append(
            make_finding("server_too_old", f"the server is {facts['database']}; Interlock needs 15 or newer")
        )
    if row["is_standby"] or row["is_read_only"]:
        why = "is a standby" if row["is_standby"] else "has default_transaction_read_only = on"
        findings.append(make_finding("server_read_only", f"the server {why}: nothing can be written"))
    # the clock was read between the two times
    skew = max(sent_at - row["clock"], row["clock"] - received_at, timedelta())
    if skew > MAX_CLOCK_SKEW:
        message = f"the clock of the database differs from that of this host by {skew.total_seconds():.1f} s"
        findings.append(make_finding("clock_skewed", message))
    if row["replication_role"] != "origin":
        message = f"session_replication_role is {row['replication_role']} for this role or database"
        findings.append(make_finding("replication_role_set", message))
    if not row["has_autovacuum"]:
        findings.append(make_finding("autovacuum_off", "autovacuum is off for the whole server"))
    return findings, facts


async def check_schema(connection: Connection) -> tuple[list[Finding], dict[str, str]]:
    """Check that the database has the migrations of this release."""
    applied = await applied_migrations(connection)
    try:
        missing = pending_migrations(known_migrations(), applied)
    except MigrationError as error:
        remedy = "use the release that fits, or `interlock migrate`"
        return [make_finding("schema_outdated", str(error), remedy=remedy)], {}
    if missing:
        found = f"{len(missing)} migrations of this release are missing, from {missing[0].name} on"
        sample = [migration.name for migration in missing]
        return [make_finding("schema_outdated", found, rows=len(missing), sample=sample)], {}
    return [], {"schema": f"{schema_version(applied)}, that of this release"}


async def check_catalog(connection: Connection) -> list[Finding]:
    """Compare the schema with that of this release."""
    tables = {row["name"]: row for row in await run(connection, CATALOG["read_tables"], {})}
    triggers = await run(connection, CATALOG["read_triggers"], {})
    indexes = await run(connection, CATALOG["read_indexes"], {})
    constraints = await run(connection, CATALOG["read_constraints"], {})
    return [
        *_check_tables(tables),
        *_check_triggers(triggers, tables),
        *_check_foreign_keys(triggers),
        *_check_functions(await run(connection, CATALOG["read_functions"], {})),
        *_check_indexes(indexes),
        *_check_constraints(constraints, tables),
        *_check_unknown_objects(tables, indexes, constraints),
    ]


def _check_tables(found: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    missing, changed = [], []
    for table, wanted in expected_catalog().columns.items():
        if table not in found:
            missing.append(table)
            continue
        columns = {name: _read_column(*column) for name, column in found[table]["columns"].items()}
        missing += [f"{table}.{name}" for name in sorted(wanted.keys() - columns.keys())]
        changed += [f"{table}.{name}" for name in sorted(wanted) if columns.get(name, wanted[name]) != wanted[name]]
    unlogged = [table for table, row in found.items() if row["is_unlogged"]]
    changed += [f"{table} (unlogged)" for table in unlogged if table not in expected_catalog().unlogged]
    yield from _group("table_damaged", missing, "the schema lacks {names}")
    yield from _group("table_changed", changed, "tables and columns that are not those of this release: {names}")
    hiding = [f"rule {rule} on {table}" for table, row in found.items() for rule in row["rules"]]
    hiding += [f"row security of {table}" for table, row in found.items() if row["has_row_security"]]
    yield from _group("rule_unknown", hiding, "rules and row security that this release does not know: {names}")


def _read_column(type_: str, not_null: bool, default: str | None) -> Column:  # noqa: FBT001 - the row of a column
    return Column(type_, not_null, None if default is None else normalize_definition(default))


def _check_unknown_objects(
    tables: Mapping[str, dict[str, Any]], indexes: Iterable[dict[str, Any]], constraints: Iterable[dict[str, Any]]
) -> Iterator[Finding]:
    """Report what may refuse rows of the engine, or hold rows without guards."""
    expected = expected_catalog()
    known = {table: columns for table, columns in expected.columns.items() if table in tables}
    names = [f"table {heir} that inherits from {table}" for table in known for heir in tables[table]["heirs"]]
    names += [
        f"column {name} of {table}" for table in known for name in _added_columns(tables[table]["columns"], table)
    ]
    unique = {row["name"] for row in indexes if row["is_restricting"]}
    names += [f"index {name}" for name in unique - expected.indexes.keys()]
    found = {(row["table"], row["name"]) for row in constraints if row["is_restricting"] and row["table"] in known}
    names += [f"constraint {name} on {table}" for table, name in found - expected.constraints.keys()]
    yield from _group("object_unknown", names, "objects that this release does not know: {names}")


def _added_columns(found: Mapping[str, Any], table: str) -> Iterator[str]:
    """Name the columns that an insert of the engine would have to fill, and does not know."""
    for name in found.keys() - expected_catalog().columns[table].keys():
        column = _read_column(*found[name])
        if column.not_null and column.default is None:
            yield name


def _group(code: str, names: Iterable[str], text: str) -> Iterator[Finding]:
    """Make one finding of all objects with the same fault."""
    found = sorted(names)
    if found:
        more = len(found) - SAMPLE_SIZE
        shown = ", ".join(found[:SAMPLE_SIZE]) + (f" and {more} more" if more > 0 else "")
        yield make_finding(code, text.format(names=shown), rows=len(found), sample=found)


def _check_triggers(rows: list[dict[str, Any]], tables: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    expected = _expected_triggers(name for name, row in tables.items() if row["is_partition"] or name in RECORD_TABLES)
    found = _own_triggers(rows, tables)
    faults: dict[str, list[str]] = {"missing": [], "disabled": [], "changed": []}
    for (table, name), want in expected.items():
        row = found.get((table, name))
        if row is None:
            faults["missing"].append(f"{name} on {table}")
        elif row["enabled"] not in {want.enabled, ALWAYS}:
            faults["disabled"].append(f"{name} on {table}")
        elif _in_order_of_events(row["definition"]) != _in_order_of_events(want.definition):
            faults["changed"].append(f"{name} on {table}")
    unknown = [f"{name} on {table}" for table, name in found if (table, name) not in expected]
    yield from _group("guard_missing", faults["missing"], "missing triggers: {names}")
    yield from _group("guard_disabled", faults["disabled"], "triggers that do not fire for every session: {names}")
    yield from _group("guard_changed", faults["changed"], "triggers that are not those of this release: {names}")
    yield from _group("trigger_unknown", unknown, "triggers that this release does not know: {names}")


def _own_triggers(
    rows: Iterable[dict[str, Any]], tables: Mapping[str, dict[str, Any]]
) -> dict[tuple[str, str], dict[str, Any]]:
    """Leave out triggers of foreign keys, and of partitions that were detached, which is a finding of its own."""
    detached = {
        name for name, row in tables.items() if name.startswith(_PARTITION_PREFIXES) and not row["is_partition"]
    }
    return {(row["table"], row["name"]): row for row in rows if not row["is_internal"] and row["table"] not in detached}


def _check_foreign_keys(rows: Iterable[dict[str, Any]]) -> Iterator[Finding]:
    """Check the triggers of foreign keys; on a table all of whose triggers are disabled, that is the finding."""
    internal = [row for row in rows if row["is_internal"] and row["enabled"] != ORIGIN]
    whole = {row["table"] for row in rows if not row["is_internal"] and row["enabled"] == DISABLED}
    disabled = {f"{row['constraint']} ({row['table']})" for row in internal if row["table"] not in whole}
    yield from _group("constraint_disabled", disabled, "foreign keys whose triggers are disabled: {names}")


def _expected_triggers(tables: Iterable[str]) -> dict[tuple[str, str], ExpectedTrigger]:
    """Return the triggers of this release, and those that protect each of these tables and partitions of records."""
    expected = dict(expected_catalog().triggers)
    for table in tables:
        for name, body in RECORD_TRIGGERS.items():
            definition = f"create trigger {name} {body.format(table=f'interlock.{table}')}"
            expected[table, name] = ExpectedTrigger(definition, ALWAYS)
    return expected


_PARTITION_PREFIXES = tuple(f"{table}_" for table in RECORD_TABLES)


def _in_order_of_events(definition: str) -> str:
    """Normalize a definition; PostgreSQL prints the events of a trigger in an order of its own."""
    return normalize_definition(definition).replace("before delete or update on", "before update or delete on")


def _check_functions(rows: list[dict[str, Any]]) -> Iterator[Finding]:
    found: dict[str, list[dict[str, Any]]] = {}  # an overload of a name would be called in its place
    for row in rows:
        found.setdefault(row["name"], []).append(row)
    changed = [
        name
        for name, want in expected_catalog().functions.items()
        if [_read_function(row) for row in found.get(name, [])] != [want]
    ]
    if [row["source"] for row in found.get("new_id", [])] not in ([source] for source in expected_catalog().new_id):
        remedy = "create the function again as `sql/schema.sql` of this release defines it"
        yield make_finding("function_changed", "the function new_id is not that of this release", remedy=remedy)
    yield from _group("function_changed", changed, "functions that are missing or not those of this release: {names}")


def _read_function(row: dict[str, Any]) -> ExpectedFunction:
    settings = frozenset(row["settings"])
    return ExpectedFunction(row["source"], row["security_definer"], settings, row["volatility"], row["is_strict"])


def _check_indexes(rows: list[dict[str, Any]]) -> Iterator[Finding]:
    found = {row["name"]: row for row in rows}
    missing = {
        name: definition
        for name, definition in expected_catalog().indexes.items()
        if name not in found or normalize_definition(found[name]["definition"]) != normalize_definition(definition)
    }
    if missing:
        message = f"missing or changed indexes: {', '.join(sorted(missing)[:SAMPLE_SIZE])}"
        remedy = "; ".join(missing[name] for name in sorted(missing))
        yield make_finding("index_missing", message, rows=len(missing), sample=sorted(missing), remedy=remedy)
    invalid = [name for name, row in found.items() if not row["is_valid"] and name not in missing]
    yield from _group("index_invalid", invalid, "invalid indexes: {names}")


def _check_constraints(rows: list[dict[str, Any]], tables: Iterable[str]) -> Iterator[Finding]:
    found = {(row["table"], row["name"]): row for row in rows}
    existing = set(tables)
    missing = [
        f"{name} on {table}"
        for (table, name), line in expected_catalog().constraints.items()
        if table in existing and not _is_constraint(found.get((table, name)), line)
    ]
    known = expected_catalog().constraints
    invalid = [
        f"{name} on {table}" for (table, name), row in found.items() if not row["is_valid"] and (table, name) in known
    ]
    yield from _group("constraint_missing", missing, "missing or changed constraints: {names}")
    yield from _group("constraint_invalid", invalid, "constraints that were never validated: {names}")


def _is_constraint(row: dict[str, Any] | None, line: str) -> bool:
    """Tell whether a constraint is the one that a line of this release defines."""
    if row is None:
        return False
    return row["definition"] is None or names_and_values(row["definition"]) == names_and_values(line)


async def check_queue_view(connection: Connection) -> list[Finding]:
    """Check the view by which the engine reads the queue of step results, and the ids that sequences give next."""
    wrong = [
        "orchestration_messages"
        for row in await run(connection, CATALOG["read_queue_view"], {})
        if _normalize_view(row["definition"] or "") != _normalize_view(row["wanted"])
    ]
    behind = [row["name"] for row in await run(connection, CATALOG["read_sequences"], {})]
    return [
        *_group("view_changed", wrong, "views that are missing or not those of this release: {names}"),
        *_group("sequence_behind", behind, "tables whose sequence gives ids that are taken: {names}"),
    ]


def _normalize_view(definition: str) -> str:
    """Leave out what differs with the version of the server and with the search path."""
    return _QUALIFIED.sub("", " ".join(definition.lower().split())).replace(" from pgmq.", " from ")


async def check_partitions(connection: Connection, now: datetime) -> list[Finding]:
    """Check that records of this month and the next have partitions, and that no partition between others is gone."""
    rows = await run(connection, CATALOG["read_record_partitions"], {})
    faults = []
    for table in RECORD_TABLES:
        months = [row for row in rows if row["records"] == table and row["begins_at"] is not None]
        if not any(row["records"] == table and row["begins_at"] is None for row in rows):
            faults.append(f"{table} has none for months without one")
        faults += [
            f"{table} has none from {before['ends_at']:%Y-%m-%d} to {after['begins_at']:%Y-%m-%d}"
            for before, after in pairwise(months)
            if before["ends_at"] < after["begins_at"]
        ]
        wanted = {"this month": now, "the next month": (now.replace(day=1) + timedelta(days=32)).replace(day=1)}
        faults += [
            f"{table} has none for {name}"
            for name, moment in wanted.items()
            if not any(row["begins_at"] <= moment < row["ends_at"] for row in months)
            and not any(before["ends_at"] <= moment < after["begins_at"] for before, after in pairwise(months))
        ]
    return _describe_partitions(faults, await run(connection, CATALOG["read_detached_partitions"], {}))


def _describe_partitions(faults: list[str], detached: Iterable[dict[str, Any]]) -> list[Finding]:
    """Make the finding; the remedy of detached partitions is to attach them."""
    remedies = []
    for row in detached:
        faults.append(f"{row['name']} is detached")
        remedies.append(
            f"`alter table interlock.{row['records']} attach partition interlock.{row['name']} for values "
            f"from ('{row['begins_on']} 00:00:00+00') to ('{row['ends_on']} 00:00:00+00')`"
        )
    found = list(_group("partition_missing", faults, "partitions of records: {names}"))
    moved = "; records that were made meanwhile are in the default partition, and have to be moved out of it before"
    return [replace(finding, remedy="; ".join(remedies) + moved) for finding in found] if remedies else found


async def check_privileges(connection: Connection) -> list[Finding]:
    """Check that this role has the rights that `interlock migrate --grant-to` grants."""
    pairs = [
        (relation.strip(), privilege.strip())
        for statement in load_statements("grants").values()
        for privileges, relations in _GRANT.findall(statement.sql)
        for relation in relations.split(",")
        for privilege in privileges.split(",")
    ]
    parameters = {"relations": [relation for relation, _ in pairs], "privileges": [right for _, right in pairs]}
    missing = [row["missing"] for row in await run(connection, CATALOG["read_missing_privileges"], parameters)]
    return list(_group("privilege_missing", missing, "this role lacks rights: {names}"))


async def check_vacuum(connection: Connection, now: datetime | None) -> list[Finding]:
    """Check that tables are vacuumed automatically and do not consist of dead rows."""
    parameters = {"dead_rows": BLOAT_ROWS, "threshold": BLOAT_AGE, "now": now}
    rows = await run(connection, CATALOG["read_vacuum_state"], parameters)
    excluded = [row["name"] for row in rows if row["is_excluded"]]
    bloated = [f"{row['name']} ({row['dead_rows']:,} dead rows)" for row in rows if row["is_bloated"]]
    return [
        *_group("autovacuum_off", excluded, "autovacuum is off for {names}"),
        *_group("table_bloated", bloated, "tables most of whose rows are dead: {names}"),
    ]
