"""Brings a database to the schema of this release.

Two kinds of files, all plain SQL:

- Migrations run once, in order: `sql/schema.sql` is number 1, later ones are `sql/migrations/NNNN_name.sql` from 0002
  on. An applied migration never changes.
- Scripts (`sql/functions/*.sql`, then `sql/guards.sql`) create or replace functions and triggers. They run after the
  migrations, again whenever their checksum changes.

Invariant: all files of one call and their records in `schema_migrations` commit together under one advisory lock, so
that any number of processes can migrate at once, be killed at any point, and find the same schema afterwards.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from interlock.errors import MigrationError
from interlock.postgres.pgmq import install_queue, use_queue
from interlock.postgres.query import load_statements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime
    from importlib.resources.abc import Traversable

    from interlock.postgres.connection import Connection

ADVISORY_LOCK = 7_108_442_263_001  # arbitrary, and the same in every release
MIN_SERVER_VERSION = 150_000

_FILE_NAME = re.compile(r"^(\d{4})_(\w+)\.sql$")
_GRANTS = load_statements("grants")

# A migration of the numbered series that schema.sql replaced; only databases from before have a record of it.
_BEFORE_SQUASH = "0002_records"

_CREATE_LEDGER = """
create table if not exists interlock.schema_migrations (
    name text primary key,
    version int unique,
    checksum text not null,
    applied_at timestamptz not null default now()
)
"""

_RECORD = """
insert into interlock.schema_migrations (name, version, checksum) values (%s, %s, %s)
on conflict (name) do update set checksum = excluded.checksum, applied_at = now()
"""

_IS_OWNER = """
select pg_has_role(relowner, 'usage') as owned from pg_class where oid = to_regclass('interlock.schema_migrations')
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of the schema: a migration, or, without a version, a script."""

    version: int | None
    name: str
    text: str

    @property
    def checksum(self) -> str:
        """Identify the content; the line ends of a checkout make no difference."""
        return hashlib.sha256(self.text.replace("\r\n", "\n").encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Applied:
    """One row of `schema_migrations`."""

    version: int | None
    name: str
    checksum: str
    applied_at: datetime


def sql_directory() -> Traversable:
    """Return the directory of the SQL files of this release."""
    return files("interlock").joinpath("sql")


def known_migrations(source: Traversable | None = None) -> list[Migration]:
    """Read the files of this release in the order in which they are applied."""
    source = source or sql_directory()
    numbered = []
    if (directory := source.joinpath("migrations")).is_dir():
        for path in directory.iterdir():
            if match := _FILE_NAME.match(path.name):
                text = path.read_text(encoding="utf-8")
                numbered.append((int(match[1]), path.name.removesuffix(".sql"), text))
    numbered.sort()
    if [version for version, _, _ in numbered] != list(range(2, len(numbered) + 2)):
        raise MigrationError(
            f"migrations must be numbered from 0002 on without a gap, got {[name for _, name, _ in numbered]}"
        )
    functions = sorted(source.joinpath("functions").iterdir(), key=lambda path: path.name)
    return [
        Migration(1, "0001_schema", source.joinpath("schema.sql").read_text(encoding="utf-8")),
        *(Migration(*found) for found in numbered),
        *(
            Migration(None, f"functions/{path.name.removesuffix('.sql')}", path.read_text(encoding="utf-8"))
            for path in functions
            if path.name.endswith(".sql")
        ),
        Migration(None, "guards", source.joinpath("guards.sql").read_text(encoding="utf-8")),
    ]


async def applied_migrations(connection: Connection) -> list[Applied]:
    """Read the records of a database, migrations in order and then scripts; an empty list when it has no schema."""
    try:
        cursor = await connection.execute("select to_regclass('interlock.schema_migrations') is not null as present")
        (row,) = await cursor.fetchall()
        if not row["present"]:
            return []
        cursor = await connection.execute(
            "select version, name, checksum, applied_at from interlock.schema_migrations order by version, name"
        )
    except psycopg.errors.InsufficientPrivilege as error:
        raise MigrationError(
            f"this role may not use what Interlock has in the database ({error.diag.message_primary}); "
            "let the role that owns it run `interlock migrate --grant-to` with the name of this one"
        ) from None
    return [Applied(**row) for row in await cursor.fetchall()]


def schema_version(applied: Sequence[Applied]) -> str:
    """Return the name of the newest migration that a database has."""
    return next((record.name for record in reversed(applied) if record.version is not None), "none")


def pending_migrations(known: Sequence[Migration], applied: Sequence[Applied]) -> list[Migration]:
    """Return the files that are still to be applied, or raise when release and database do not fit together."""
    _check_not_before_squash(applied)
    records = {record.name: record for record in applied}
    for migration in known:
        record = records.get(migration.name)
        if migration.version is not None and record is not None and record.checksum != migration.checksum:
            raise MigrationError(
                f"migration {record.name} was applied on {record.applied_at:%Y-%m-%d} with another content than it has "
                "in this release; a past migration must never change. "
                "Restore the file, or put the change into a new migration"
            )
    if is_newer(known, applied):
        raise MigrationError(
            f"the database is at migration {schema_version(applied)}, which is newer than this release; "
            "upgrade interlock"
        )
    return [
        migration
        for migration in known
        if migration.name not in records or records[migration.name].checksum != migration.checksum
    ]


def missing_migrations(known: Sequence[Migration], applied: Sequence[Applied]) -> list[Migration]:
    """Return the files that a process of this release needs and the database lacks.

    A database of a newer release lacks none: during an upgrade, processes of both releases run side by side.
    """
    _check_not_before_squash(applied)
    return [] if is_newer(known, applied) else pending_migrations(known, applied)


def is_newer(known: Sequence[Migration], applied: Sequence[Applied]) -> bool:
    """Tell whether the database has migrations that this release does not know."""
    names = {migration.name for migration in known}
    return any(record.version is not None and record.name not in names for record in applied)


async def migrate(
    connection: Connection,
    *,
    known: Sequence[Migration] | None = None,
    note: Callable[[str], None] | None = None,
    queue: str | None = None,
) -> list[Migration]:
    """Apply the pending files in one transaction and return those that this call applied.

    `queue` names the PGMQ queue for step results, if another one is to be used.
    """
    report = note or (lambda _: None)
    known = known_migrations() if known is None else known
    version = connection.info.server_version
    if version < MIN_SERVER_VERSION:
        raise MigrationError(f"PostgreSQL {version // 10000} is too old: Interlock needs 15 or newer")
    applied = await _apply_pending(connection, known)
    for migration in applied:
        report(f"applied {migration.name}")
    cursor = await connection.execute(_IS_OWNER)
    if all([row["owned"] async for row in cursor]):  # another role has nothing to add
        async with connection.transaction():
            await connection.execute("select pg_advisory_xact_lock(%s)", [ADVISORY_LOCK])
            await connection.execute("select interlock.add_record_partitions()")
            report(await install_queue(connection))
            if queue is not None and await use_queue(connection, queue):
                report(f"the results of steps go over the queue {queue}")
    return applied


async def grant(connection: Connection, role: str) -> None:
    """Grant a role that owns nothing the rights to run the engine."""
    cursor = await connection.execute(
        "select to_regclass('interlock.orchestration_messages') is not null as queue, quote_ident(%s) as role", [role]
    )
    (found,) = await cursor.fetchall()
    names = ["grant_runtime_role", *(["grant_runtime_role_queue"] if found["queue"] else [])]
    try:
        async with connection.transaction():
            for name in names:
                await connection.execute(sql.SQL(_GRANTS[name].sql).format(role=sql.Identifier(role)))
    except psycopg.errors.UndefinedObject:
        raise MigrationError(
            f"there is no role {role!r} on this server; create it first: create role {found['role']}"
        ) from None
    except psycopg.errors.InsufficientPrivilege as error:
        raise MigrationError(f"cannot grant to {role!r}: {error.diag.message_primary}") from None


async def _apply_pending(connection: Connection, known: Sequence[Migration]) -> list[Migration]:
    """Apply all pending files in one transaction; concurrent calls wait at the lock and find nothing pending."""
    if not pending_migrations(known, await applied_migrations(connection)):
        return []  # without the lock and the ledger, for which a role needs rights that it may lack
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock(%s)", [ADVISORY_LOCK])
        await _create_ledger(connection)
        pending = pending_migrations(known, await applied_migrations(connection))
        for migration in pending:
            try:
                await connection.execute(migration.text.encode())
            except psycopg.Error as error:
                raise MigrationError(
                    f"migration {migration.name} failed and was rolled back: {error.diag.message_primary or error}"
                ) from error
            await connection.execute(_RECORD, [migration.name, migration.version, migration.checksum])
        return pending


async def reapply_scripts(connection: Connection) -> int:
    """Apply all functions and guards again, whatever their checksums say; return how many files."""
    scripts = [migration for migration in known_migrations() if migration.version is None]
    try:
        async with connection.transaction():
            await connection.execute("select pg_advisory_xact_lock(%s)", [ADVISORY_LOCK])
            for script in scripts:
                await connection.execute(script.text.encode())
                await connection.execute(_RECORD, [script.name, script.version, script.checksum])
    except psycopg.Error as error:
        raise MigrationError(
            f"the functions and guards could not be applied again: {error.diag.message_primary or error}; "
            "only the role that owns the schema can do it"
        ) from error
    return len(scripts)


async def _create_ledger(connection: Connection) -> None:
    """Create the schema and the ledger of migrations; use a schema that an administrator made."""
    cursor = await connection.execute(
        "select to_regnamespace('interlock') is null as missing, quote_ident(current_user) as role"
    )
    (found,) = await cursor.fetchall()
    try:
        if found["missing"]:
            await connection.execute("create schema interlock")
        await connection.execute(_CREATE_LEDGER)
    except psycopg.errors.InsufficientPrivilege as error:
        advice = (
            f"An administrator can give it one: create schema interlock authorization {found['role']}"
            if found["missing"]
            else "Let the role that owns it run `interlock migrate`"
        )
        action = "create the schema" if found["missing"] else "change the schema"
        raise MigrationError(f"this role may not {action} ({error.diag.message_primary}). {advice}") from None


def _check_not_before_squash(applied: Sequence[Applied]) -> None:
    if any(record.name == _BEFORE_SQUASH for record in applied):
        raise MigrationError(
            "this database was made by a version of Interlock from before its migrations were merged into one schema, "
            "and cannot be upgraded; nothing was released then. Create a new database, or drop the old schema with all "
            "of its data: drop schema interlock cascade"
        )
