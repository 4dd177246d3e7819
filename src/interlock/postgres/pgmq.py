"""Installs PGMQ, the message queue on which step results travel to the orchestrator, and creates its queue.

Invariant: an installed PGMQ is never changed; the queue that `interlock.settings` names exists whenever PGMQ does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import psycopg

from interlock.errors import ConfigError

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

_QUEUE_NAME = re.compile(r"[a-z0-9_]{1,47}")

_FIND_PGMQ = """
select to_regprocedure('pgmq.send_batch(text, jsonb[])') is not null as installed,
    coalesce((select extversion from pg_extension where extname = 'pgmq'),
        obj_description(to_regnamespace('pgmq'), 'pg_namespace')) as version,
    to_regnamespace('pgmq') is not null as schema_exists,
    to_regnamespace('pgmq') is null
        and exists (select from pg_available_extensions where name = 'pgmq') as extension_possible,
    to_regnamespace('pgmq') is not null
        or has_database_privilege(current_database(), 'create') as sql_possible,
    quote_ident(current_user) as role
"""

_CREATE_QUEUE = "select interlock.create_orchestration_queue()"

_LOCK_OTHER_QUEUE = """
select orchestration_queue as name,
    to_regclass(format('pgmq.%%I', lower('q_' || orchestration_queue))) is not null as exists
from interlock.settings
where orchestration_queue <> %(name)s
for update
"""


async def install_queue(connection: Connection) -> str:
    """Install PGMQ and create the queue where they are missing; return a sentence for the operator.

    Must run in a transaction.
    """
    report = await _install(connection)
    try:
        async with connection.transaction():
            await connection.execute(_CREATE_QUEUE)
    except psycopg.errors.InsufficientPrivilege as error:
        return f"{report}, but this role may not create its queue ({error.diag.message_primary}): jobs need it"
    return report


async def use_queue(connection: Connection, name: str) -> bool:
    """Send step results over the queue of this name, creating it if needed; return False if it was in use already.

    Raises `ConfigError` while the queue in use still holds messages.
    """
    if not _QUEUE_NAME.fullmatch(name):
        raise ConfigError(f"orchestration_queue must be made of a-z, 0-9 and _, at most 47 of them, not {name!r}")
    async with connection.transaction():
        if not await (await connection.execute(_LOCK_OTHER_QUEUE, {"name": name})).fetchall():
            return False
        # Wait for transactions that send messages, and block new ones until this one commits.
        await connection.execute("lock table interlock.tasks in share row exclusive mode")
        found = await (await connection.execute(_LOCK_OTHER_QUEUE, {"name": name})).fetchall()
        if found and found[0]["exists"]:
            metrics = await connection.execute("select queue_length from pgmq.metrics(%s)", [found[0]["name"]])
            (row,) = await metrics.fetchall()
            if row["queue_length"]:
                raise ConfigError(
                    f"the queue {found[0]['name']!r} still has {row['queue_length']} messages; let an orchestrator "
                    f"take them before the results of steps go over {name!r}"
                )
        await connection.execute("update interlock.settings set orchestration_queue = %s", [name])
        await connection.execute(_CREATE_QUEUE)
    return True


async def _install(connection: Connection) -> str:
    """Install the extension where the server offers it, else the SQL of the `pgmq` package."""
    cursor = await connection.execute(_FIND_PGMQ)
    (found,) = await cursor.fetchall()
    if found["installed"]:
        return f"PGMQ is there already ({found['version'] or 'version unknown'})"
    if found["extension_possible"] and await _try(connection, "create extension pgmq"):
        return "installed PGMQ as an extension"
    script, version = _embedded_script(schema_exists=found["schema_exists"])
    if found["sql_possible"] and await _try(connection, script):
        return f"installed PGMQ {version} from its SQL"
    return (
        "PGMQ could not be installed, because this role may not create its schema. Tasks work without it; jobs need "
        f"it. An administrator can run: create schema pgmq authorization {found['role']} (then migrate again)"
    )


def _embedded_script(*, schema_exists: bool) -> tuple[str, str]:
    """Return PGMQ's own SQL and its version."""
    # Not at the top: the package imports all of its clients and SQLAlchemy.
    from pgmq.install import get_embedded_install_sql, get_embedded_sql_version  # noqa: PLC0415 - heavy, seldom needed

    script, version = get_embedded_install_sql(), get_embedded_sql_version()
    if schema_exists:
        # Even with IF NOT EXISTS this statement needs the right to create schemas, which an owner of one may lack.
        script = script.replace("CREATE SCHEMA IF NOT EXISTS pgmq;", "NULL;", 1)
    return f"{script}\n;comment on schema pgmq is 'PGMQ {version}, installed from SQL';", version


async def _try(connection: Connection, script: str) -> bool:
    """Run a script in a savepoint; return False if this role or server does not allow it."""
    try:
        async with connection.transaction():
            await connection.execute(script.encode())
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedFile):
        return False
    return True
