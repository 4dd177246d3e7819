"""PGMQ, the queue on which step results travel back: the extension where the server offers it, else its own SQL.

Invariant: an installation that is already there is left alone, whoever made it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from pgmq.install import get_embedded_install_sql, get_embedded_sql_version

if TYPE_CHECKING:
    from interlock.store.database import Connection

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


async def install_queue(connection: Connection) -> str:
    """Install PGMQ if it is missing; say in a sentence what there is now. Must run in a transaction."""
    cursor = await connection.execute(_LOOK)
    (found,) = await cursor.fetchall()
    if found["installed"]:
        return f"PGMQ is there already ({found['version'] or 'version unknown'})"
    if found["extension_possible"] and await _try(connection, "create extension pgmq"):
        return "installed PGMQ as an extension"
    if found["sql_possible"] and await _try(connection, _script(schema_there=found["schema_there"])):
        return f"installed PGMQ {get_embedded_sql_version()} from its SQL"
    return (
        "PGMQ could not be installed, because this role may not create its schema. Tasks work without it; jobs need "
        f"it. An administrator can run: create schema pgmq authorization {found['role']} (then migrate again)"
    )


def _script(*, schema_there: bool) -> str:
    script = get_embedded_install_sql()
    if schema_there:
        # Even with IF NOT EXISTS this statement asks for the right to create schemas, which an owner need not have.
        script = script.replace("CREATE SCHEMA IF NOT EXISTS pgmq;", "NULL;", 1)
    return f"{script}\n;comment on schema pgmq is 'PGMQ {get_embedded_sql_version()}, installed from SQL';"


async def _try(connection: Connection, script: str) -> bool:
    try:
        async with connection.transaction():
            await connection.execute(script.encode())
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedFile):
        return False
    return True
