"""PGMQ, the queue on which step results travel back: the extension where the server offers it, else its own SQL.

Invariant: an installation that is already there is left alone, whoever made it; the queue whose name the database
knows is there whenever PGMQ is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import psycopg

from interlock.errors import ConfigError

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

_NAME = re.compile(r"[a-z0-9_]{1,47}")
_LOOK = """
select to_regprocedure('pgmq.send_batch(text, jsonb[])') is not null as installed,
    coalesce((select extversion from pg_extension where extname = 'pgmq'),
        obj_description(to_regnamespace('pgmq'), 'pg_namespace')) as version,
    to_regnamespace('pgmq') is not null as schema_there,
    to_regnamespace('pgmq') is null
        and exists (select from pg_available_extensions where name = 'pgmq') as extension_possible,
    to_regnamespace('pgmq') is not null
        or has_database_privilege(current_database(), 'create') as sql_possible,
    quote_ident(current_user) as role
"""


# In a block, so that it can be asked of a schema that has no settings yet.
_CREATE_QUEUE = """
do $$
declare
    name text;
begin
    if to_regclass('interlock.settings') is not null and to_regprocedure('pgmq.create(text)') is not null then
        execute 'select orchestration_queue from interlock.settings' into name;
        if to_regclass(format('pgmq.%I', lower('q_' || name))) is null then
            perform pgmq.create(name);
            -- every message is written twice and deleted: dead entries must go while they are few
            execute format('alter table pgmq.%I set (autovacuum_vacuum_scale_factor = 0.01, '
                'autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0, vacuum_index_cleanup = on)',
                lower('q_' || name));
        end if;
    end if;
end
$$
"""

_OTHER_NAME = """
select orchestration_queue as name,
    to_regclass(format('pgmq.%%I', lower('q_' || orchestration_queue))) is not null as there
from interlock.settings
where orchestration_queue <> %(name)s
for update
"""


async def install_queue(connection: Connection) -> str:
    """Install PGMQ and make the queue, if they are missing; say in a sentence what there is now.

    Must run in a transaction.
    """
    told = await _install(connection)
    try:
        async with connection.transaction():
            await connection.execute(_CREATE_QUEUE)
    except psycopg.errors.InsufficientPrivilege as error:
        return f"{told}, but this role may not create its queue ({error.diag.message_primary}): jobs need it"
    return told


async def use_queue(connection: Connection, name: str) -> bool:
    """Have the results of steps go over the queue of this name, which is made if need be; False if they did already.

    A queue that still holds messages is not left behind.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"orchestration_queue must be made of a-z, 0-9 and _, at most 47 of them, not {name!r}")
    async with connection.transaction():
        if not await (await connection.execute(_OTHER_NAME, {"name": name})).fetchall():
            return False
        # until all who send have sent, and before anybody else does
        await connection.execute("lock table interlock.tasks in share row exclusive mode")
        found = await (await connection.execute(_OTHER_NAME, {"name": name})).fetchall()
        if found and found[0]["there"]:
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
    cursor = await connection.execute(_LOOK)
    (found,) = await cursor.fetchall()
    if found["installed"]:
        return f"PGMQ is there already ({found['version'] or 'version unknown'})"
    if found["extension_possible"] and await _try(connection, "create extension pgmq"):
        return "installed PGMQ as an extension"
    script, version = _script(schema_there=found["schema_there"])
    if found["sql_possible"] and await _try(connection, script):
        return f"installed PGMQ {version} from its SQL"
    return (
        "PGMQ could not be installed, because this role may not create its schema. Tasks work without it; jobs need "
        f"it. An administrator can run: create schema pgmq authorization {found['role']} (then migrate again)"
    )


def _script(*, schema_there: bool) -> tuple[str, str]:
    """Give PGMQ's own SQL, and which version it is."""
    # not at the top: the package imports all of its clients, and SQLAlchemy, for the sake of a file
    from pgmq.install import get_embedded_install_sql, get_embedded_sql_version  # noqa: PLC0415 - heavy, seldom needed

    script, version = get_embedded_install_sql(), get_embedded_sql_version()
    if schema_there:
        # Even with IF NOT EXISTS this statement asks for the right to create schemas, which an owner need not have.
        script = script.replace("CREATE SCHEMA IF NOT EXISTS pgmq;", "NULL;", 1)
    return f"{script}\n;comment on schema pgmq is 'PGMQ {version}, installed from SQL';", version


async def _try(connection: Connection, script: str) -> bool:
    try:
        async with connection.transaction():
            await connection.execute(script.encode())
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedFile):
        return False
    return True
