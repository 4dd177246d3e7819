"""Migrations run once, in order, under a lock, by any role that owns the schema; scripts run again when they change."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from factories import run_sql
from interlock.errors import DisconnectedError, IllegalTransition, MigrationError, StatementError
from interlock.model.options import NewTask
from interlock.postgres.connection import connect, translated
from interlock.postgres.migrate import (
    Migration,
    applied_migrations,
    grant,
    known_migrations,
    migrate,
    missing_migrations,
    pending_migrations,
)
from interlock.store.enqueue import enqueue_task
from interlock.store.tasks import claim_pending_tasks, read_task_history
from processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from interlock.postgres.embedded.server import EmbeddedServer

pytestmark = pytest.mark.store


@pytest.fixture
def empty(make_database: Callable[[], str]) -> str:
    return make_database()


def dump(server: EmbeddedServer, url: str) -> str:
    """Return the output of pg_dump, without the lines that differ between any two dumps."""
    tool = server.psql_path().with_name("pg_dump")
    output = subprocess.run(
        [tool, "--schema-only", "--no-owner", "--schema=interlock", url], capture_output=True, text=True, check=True
    ).stdout
    return "\n".join(line for line in output.splitlines() if not line.startswith(("\\restrict", "\\unrestrict")))


async def test_twenty_concurrent_calls_apply_each_file_once(empty: str) -> None:
    async def one() -> list[Migration]:
        async with connect(empty) as connection:
            return await migrate(connection)

    applied = await asyncio.gather(*(one() for _ in range(20)))
    names = [migration.name for mine in applied for migration in mine]
    assert sorted(names) == [migration.name for migration in known_migrations()], "each by exactly one call"


def with_changed_scripts(known: list[Migration]) -> list[Migration]:
    return [
        migration if migration.version else dataclasses.replace(migration, text=migration.text + "\n-- changed\n")
        for migration in known
    ]


async def test_scripts_run_again_when_they_change_and_leave_the_same_schema(server: EmbeddedServer, empty: str) -> None:
    changed = with_changed_scripts(known_migrations())
    async with connect(empty) as connection:
        await migrate(connection)
        await enqueue_task(connection, NewTask("x", {}), actor="me")
        before = dump(server, empty)
        applied = await migrate(connection, known=changed)
        assert applied == [migration for migration in changed if migration.version is None]
        assert await migrate(connection, known=changed) == []
    assert dump(server, empty) == before


async def test_a_migrated_schema_equals_a_fresh_one(server: EmbeddedServer, make_database: Callable[[], str]) -> None:
    """A later migration runs before the scripts of its release, on a database that has those of the release before."""
    first, *scripts = known_migrations()
    second = Migration(2, "0002_more", "alter table interlock.tasks add column more int")
    dumps = []
    for start in ([], [first, *with_changed_scripts(scripts)]):
        url = make_database()
        async with connect(url) as connection:
            if start:
                await migrate(connection, known=start)
            assert second in await migrate(connection, known=[first, second, *scripts])
        dumps.append(dump(server, url))
    assert dumps[0]
    assert dumps[0] == dumps[1]


async def test_a_database_from_before_the_squash_is_refused(empty: str) -> None:
    run_sql(empty, "create schema interlock")
    run_sql(
        empty,
        "create table interlock.schema_migrations (version int primary key, name text not null, "
        "checksum text not null, applied_at timestamptz not null default now())",
    )
    run_sql(
        empty,
        "insert into interlock.schema_migrations (version, name, checksum) "
        "values (1, '0001_schema', 'a'), (2, '0002_records', 'b')",
    )
    async with connect(empty) as connection:
        with pytest.raises(MigrationError, match=r"made by a version .* Create a new database, or drop"):
            await migrate(connection)
        with pytest.raises(MigrationError, match="made by a version"):
            missing_migrations(known_migrations(), await applied_migrations(connection))


async def test_a_failed_migration_leaves_nothing_behind(empty: str) -> None:
    known = known_migrations()
    broken = Migration(2, "9999_broken", "create table interlock.half (); select 1 / 0;")
    async with connect(empty) as connection:
        with pytest.raises(MigrationError, match=r"9999_broken failed and was rolled back: division by zero"):
            await migrate(connection, known=[*known, broken])
        assert await applied_migrations(connection) == []
        mended = dataclasses.replace(broken, text="create table interlock.half ()")
        assert await migrate(connection, known=[*known, mended]) == [*known, mended]


@pytest.mark.chaos
async def test_a_killed_migration_leaves_nothing_behind(server: EmbeddedServer, empty: str) -> None:
    script = (
        "import asyncio, sys\n"
        "from interlock.postgres.connection import connect\n"
        "from interlock.postgres.migrate import Migration, known_migrations, migrate\n"
        "async def main():\n"
        "    async with connect(sys.argv[1]) as connection:\n"
        "        slow = Migration(2, '0002_slow', 'select pg_sleep(60)')\n"
        "        await migrate(connection, known=[*known_migrations(), slow])\n"
        "asyncio.run(main())\n"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", script, empty)
    with psycopg.connect(server.url("postgres"), autocommit=True) as watcher:
        eventually(lambda: watcher.execute("select from pg_stat_activity where wait_event = 'PgSleep'").fetchall())
        child.kill()
        await child.wait()
        # A backend notices a killed client only at its next write: end it, as a closed connection would.
        watcher.execute("select pg_terminate_backend(pid) from pg_stat_activity where wait_event = 'PgSleep'")
    async with connect(empty) as connection:
        assert await applied_migrations(connection) == []
        assert await migrate(connection) == known_migrations()


def test_migrations_are_numbered_without_a_gap(tmp_path: Path) -> None:
    (tmp_path / "functions").mkdir()
    (tmp_path / "migrations").mkdir()
    for name in ("schema.sql", "guards.sql", "functions/b.sql", "functions/a.sql", "migrations/0002_more.sql"):
        (tmp_path / name).write_text("select 1")
    names = [migration.name for migration in known_migrations(tmp_path)]
    assert names == ["0001_schema", "0002_more", "functions/a", "functions/b", "guards"]
    (tmp_path / "migrations" / "0004_late.sql").write_text("select 1")
    with pytest.raises(MigrationError, match=r"numbered from 0002 on without a gap, got \['0002_more', '0004_late'\]"):
        known_migrations(tmp_path)


async def test_a_changed_past_migration_is_refused(empty: str) -> None:
    known = known_migrations()
    async with connect(empty) as connection:
        await migrate(connection)
        changed = [dataclasses.replace(known[0], text=known[0].text + "\n-- tidied"), *known[1:]]
        with pytest.raises(MigrationError, match=r"0001_schema was applied .* must never change"):
            await migrate(connection, known=changed)
        windows = [dataclasses.replace(m, text=m.text.replace("\n", "\r\n")) for m in known]
        assert await migrate(connection, known=windows) == [], "other line ends are no change"


async def test_a_database_newer_than_the_release_is_refused(empty: str) -> None:
    known = known_migrations()
    newer = [*known, Migration(2, "0002_more", "create table interlock.more ()")]
    async with connect(empty) as connection:
        await migrate(connection, known=newer)
        applied = await applied_migrations(connection)
        with pytest.raises(MigrationError, match="at migration 0002_more, which is newer than this release"):
            await migrate(connection, known=known)
        assert pending_migrations(newer, applied) == []
        assert missing_migrations(known, applied) == [], "processes of both releases run side by side"


def make_role(url: str, name: str) -> str:
    run_sql(url, f"create role {name} login")
    return url.replace("interlock@", f"{name}@", 1)


@pytest.fixture
def role(server: EmbeddedServer, empty: str) -> Any:
    names = ["schema_owner", "runtime"]
    yield make_role(empty, names[0]), make_role(empty, names[1])
    for name in names:
        run_sql(empty, f"drop owned by {name} cascade")
        run_sql(server.url("postgres"), f"drop role {name}")


async def test_the_owner_migrates_and_other_roles_work(empty: str, role: tuple[str, str]) -> None:
    schema_owner, runtime = role
    async with connect(schema_owner) as connection:
        with pytest.raises(MigrationError, match="create schema interlock authorization"):
            await migrate(connection)
        run_sql(empty, "create schema interlock authorization schema_owner")
        notes: list[str] = []
        await migrate(connection, note=notes.append)
        assert "create schema pgmq authorization schema_owner" in notes[-1]
        run_sql(empty, "create schema pgmq authorization schema_owner")
        await migrate(connection, note=notes.append)
        assert "from its SQL" in notes[-1]
        with pytest.raises(MigrationError, match=r"no role 'Stran\"ger' .*: create role \"Stran\"\"ger\"$"):
            await grant(connection, 'Stran"ger')
        await grant(connection, "runtime")
    async with connect(runtime) as connection:
        await enqueue_task(connection, NewTask("x", {}), actor="me")
        (claimed,) = await claim_pending_tasks(connection, actor="w", types=["x"])
        with pytest.raises(IllegalTransition), translated(connection):
            await connection.execute("update interlock.tasks set state = 'skipped'")
        assert [r.event for r in await read_task_history(connection, claimed.id)] == ["create", "claim"]
        for forbidden in (
            "delete from interlock.audit_logs",
            "alter table interlock.tasks disable trigger all",
            "drop table interlock.tasks",
            "insert into interlock.schema_migrations values ('', 99, '')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await connection.execute(sql.SQL(forbidden))


async def test_migrate_without_pending_files_needs_no_ownership(empty: str, role: tuple[str, str]) -> None:
    known = known_migrations()
    pending = Migration(2, "9999_more", "create table interlock.more ()")
    async with connect(empty) as connection:
        await migrate(connection)
        async with connect(role[1]) as runtime:
            with pytest.raises(MigrationError, match=r"may not use .*permission denied for schema.* --grant-to"):
                await applied_migrations(runtime)
        await grant(connection, "runtime")
        await connection.execute(
            "do $$ begin execute 'drop table interlock.' || to_char(now() at time zone 'UTC' + interval '2 months', "
            "'\"worker_state_transitions_\"YYYY_MM'); end $$"  # so that the owner would have a partition to add
        )
    async with connect(role[1]) as runtime:
        assert await migrate(runtime) == []
        with pytest.raises(MigrationError, match="Let the role that owns it run `interlock migrate`"):
            await migrate(runtime, known=[*known, pending])
    command = [sys.executable, "-m", "interlock", "--database-url", role[1]]
    demo = await asyncio.create_subprocess_exec(*command, "demo", stdout=subprocess.PIPE)
    said, _ = await demo.communicate()
    assert demo.returncode == 0, said
    assert b"permission denied for table audit_logs" in said


async def test_connect_translates_errors_of_the_driver(empty: str) -> None:
    with pytest.raises(StatementError, match="division by zero"):
        async with connect(empty) as connection:
            await connection.execute("select 1 / 0")
    with pytest.raises(DisconnectedError, match=r"^terminating connection due to administrator command$"):
        async with connect(empty) as connection:
            await connection.execute("select pg_terminate_backend(pg_backend_pid())")


async def test_an_installed_pgmq_is_not_changed(empty: str) -> None:
    async with connect(empty) as connection:
        notes: list[str] = []
        await migrate(connection, note=notes.append)
        await connection.execute("select pgmq.create('mine')")
        await connection.execute("comment on schema pgmq is 'PGMQ 99.0'")
        await migrate(connection, note=notes.append)
        assert notes[-1] == "PGMQ is there already (PGMQ 99.0)"
        await connection.execute("""select pgmq.send('mine', '{"a": 1}')""")
