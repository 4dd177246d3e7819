"""Brings a database to the schema of this release: plain SQL files, forward only, each in a transaction of its own.

Invariant: a file and its record in `schema_migrations` commit together under one advisory lock, so that any number
of processes can migrate at once, be killed at any point, and find the same schema afterwards.
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

LOCK = 7_108_442_263_001  # an arbitrary number of our own, the same in every release
OLDEST_SERVER = 150_000

_NAME = re.compile(r"^(\d{4})_(\w+)\.sql$")
_GRANTS = load_statements("grants")

_BOOTSTRAP = """
create table if not exists interlock.schema_migrations (
    version int primary key,
    name text not null,
    checksum text not null,
    applied_at timestamptz not null default now()
)
"""

_OWNED = """
select pg_has_role(relowner, 'usage') as owned from pg_class where oid = to_regclass('interlock.schema_migrations')
"""

# In a block, so that it can be asked of a schema that does not have the function yet.
_ADD_PARTITIONS = """
do $$
begin
    if to_regprocedure('interlock.add_record_partitions(int)') is not null then
        perform interlock.add_record_partitions();
    end if;
end
$$
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file."""

    version: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        """Identify the content, whatever line ends a checkout gave it."""
        return hashlib.sha256(self.text.replace("\r\n", "\n").encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Applied:
    """One row of `schema_migrations`."""

    version: int
    name: str
    checksum: str
    applied_at: datetime


def directory() -> Traversable:
    """Tell where the files of this release are."""
    return files("interlock").joinpath("sql", "migrations")


def known_migrations(source: Traversable | None = None) -> list[Migration]:
    """Read the files in order; numbers must run from 1 without a gap."""
    found = []
    for path in (source or directory()).iterdir():
        match = _NAME.match(path.name)
        if match is not None:
            found.append(Migration(int(match[1]), path.name.removesuffix(".sql"), path.read_text(encoding="utf-8")))
    found.sort(key=lambda migration: migration.version)
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise MigrationError(f"the migrations are not numbered 1 to {len(found)}: {[m.name for m in found]}")
    return found


async def applied_migrations(connection: Connection) -> list[Applied]:
    """Read what a database has, in order; nothing when it has no schema yet."""
    try:
        cursor = await connection.execute("select to_regclass('interlock.schema_migrations') as there")
        row = await cursor.fetchone()
        if row is None or row["there"] is None:
            return []
        cursor = await connection.execute(
            "select version, name, checksum, applied_at from interlock.schema_migrations order by version"
        )
    except psycopg.errors.InsufficientPrivilege as error:
        raise MigrationError(
            f"this role may not use what Interlock has in the database ({error.diag.message_primary}); "
            "let the role that owns it run `interlock migrate --grant-to` with the name of this one"
        ) from None
    return [Applied(**row) for row in await cursor.fetchall()]


def pending_migrations(known: Sequence[Migration], applied: Sequence[Applied]) -> list[Migration]:
    """Tell what is still to be applied, or raise when the two do not belong together."""
    for migration, record in zip(known, applied, strict=False):
        if migration.checksum != record.checksum:
            raise MigrationError(
                f"migration {record.name} was applied on {record.applied_at:%Y-%m-%d} with another content than "
                f"{migration.name} of this release has; a past migration must never change. "
                "Restore the file, or put the change into a new migration"
            )
    if len(applied) > len(known):
        raise MigrationError(
            f"the database is at migration {applied[-1].name}, which is newer than this release "
            f"(it ends at {known[-1].name}); upgrade interlock"
        )
    return list(known[len(applied) :])


async def migrate(
    connection: Connection,
    *,
    known: Sequence[Migration] | None = None,
    note: Callable[[str], None] | None = None,
    queue: str | None = None,
) -> list[Migration]:
    """Apply what is pending, one transaction each, and give the migrations that this call applied.

    `queue` is the name of the queue on which the results of steps travel, if it is to be another than before.
    """
    tell = note or (lambda _: None)
    files_of_release = known_migrations() if known is None else known
    await _check_server(connection)
    mine = []
    while (migration := await _apply_next(connection, files_of_release)) is not None:
        tell(f"applied {migration.name}")
        mine.append(migration)
    if await _is_owner(connection):  # any other role has nothing to add
        async with connection.transaction():
            await connection.execute("select pg_advisory_xact_lock(%s)", [LOCK])
            await connection.execute(_ADD_PARTITIONS)
            tell(await install_queue(connection))
            if queue is not None and await use_queue(connection, queue):
                tell(f"the results of steps go over the queue {queue}")
    return mine


async def grant(connection: Connection, role: str) -> None:
    """Let a role that owns nothing run the engine."""
    cursor = await connection.execute(
        "select to_regnamespace('pgmq') is not null as queue, quote_ident(%s) as role", [role]
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


async def _apply_next(connection: Connection, known: Sequence[Migration]) -> Migration | None:
    """Apply the first pending file, if there is one; whoever else migrates waits at the lock."""
    if not pending_migrations(known, await applied_migrations(connection)):
        return None  # without the lock and the table, which are for those who may change the schema
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock(%s)", [LOCK])
        await _bootstrap(connection)
        pending = pending_migrations(known, await applied_migrations(connection))
        if not pending:
            return None
        migration = pending[0]
        try:
            await connection.execute(migration.text.encode())
        except psycopg.Error as error:
            raise MigrationError(
                f"migration {migration.name} failed and was rolled back: {error.diag.message_primary or error}"
            ) from error
        await connection.execute(
            "insert into interlock.schema_migrations (version, name, checksum) values (%s, %s, %s)",
            [migration.version, migration.name, migration.checksum],
        )
        return migration


async def _bootstrap(connection: Connection) -> None:
    """Create the schema and the table of migrations; a schema made by an administrator is used as it is."""
    cursor = await connection.execute(
        "select to_regnamespace('interlock') is null as missing, quote_ident(current_user) as role"
    )
    (found,) = await cursor.fetchall()
    try:
        if found["missing"]:
            await connection.execute("create schema interlock")
        await connection.execute(_BOOTSTRAP)
    except psycopg.errors.InsufficientPrivilege as error:
        advice = (
            f"An administrator can give it one: create schema interlock authorization {found['role']}"
            if found["missing"]
            else "Let the role that owns it run `interlock migrate`"
        )
        what = "create the schema" if found["missing"] else "change the schema"
        raise MigrationError(f"this role may not {what} ({error.diag.message_primary}). {advice}") from None


async def _is_owner(connection: Connection) -> bool:
    """Tell whether what there is, if there is anything, belongs to this role."""
    cursor = await connection.execute(_OWNED)
    return all([row["owned"] async for row in cursor])


async def _check_server(connection: Connection) -> None:
    version = connection.info.server_version
    if version < OLDEST_SERVER:
        raise MigrationError(f"PostgreSQL {version // 10000} is too old: Interlock needs 15 or newer")
