"""The planner takes the index that each hot statement was given, with and without knowing the parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import psycopg
import pytest

from interlock.store.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.postgres.embedded.server import EmbeddedServer

pytestmark = pytest.mark.store

CLAIM = {
    "namespaces": "array['default', 'other']",
    "types": "array['x']",
    "each": "50",
    "limit": "100",
    "lease": "'30 s'",
    "actor": "'w'",
    "callback_url": "null",
}
OUTCOME = """{"id": "01a1e2cf-6c0c-75b3-83a4-94f638565840", "attempt": 1, "event": "succeed"}"""
IDS = "array_fill('01a1e2cf-6c0c-75b3-83a4-94f638565840'::uuid, array[100])"
FILL = """
insert into interlock.tasks (type) select 'x' from generate_series(1, 40000);
update interlock.tasks set state = 'running', event = 'claim', attempt = 1, worker_id = 'w', lease_expires_at = now()
where id in (select id from interlock.tasks limit 30000);
update interlock.tasks set state = 'done', event = 'succeed', lease_expires_at = null, updated_at = clock_timestamp()
where id in (select id from interlock.tasks where state = 'running' limit 28000);
"""


@pytest.fixture(scope="module")
def filled(template: str, server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    """Fill a database with 28,000 finished, 2,000 running and 10,000 pending tasks."""
    with psycopg.connect(server.url("postgres"), autocommit=True) as admin:
        admin.execute(f"create database plans template {template}".encode())
        with psycopg.connect(server.url("plans"), autocommit=True, prepare_threshold=None) as connection:
            connection.execute(FILL)
            connection.execute("vacuum analyze interlock.tasks")
            yield connection
        admin.execute("drop database plans with (force)")


def plan(connection: psycopg.Connection, name: str, **parameters: str) -> str:
    """Explain a statement as the server plans it for a prepared statement with these parameters."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    text = re.sub(r"%\((\w+)\)s", number, TASKS[name].sql).replace("%%", "%")
    connection.execute("deallocate all", prepare=False)
    connection.execute(f"prepare hot as {text}".encode())
    values = ", ".join(parameters.get(name, "null") for name in names)
    return "\n".join(line for (line,) in connection.execute(f"explain execute hot({values})".encode()))


@pytest.fixture(params=["force_generic_plan", "force_custom_plan"])
def mode(request: pytest.FixtureRequest, filled: psycopg.Connection) -> psycopg.Connection:
    filled.execute(f"set plan_cache_mode = {request.param}".encode())
    return filled


def test_claiming_walks_the_claim_index_in_its_order(mode: psycopg.Connection) -> None:
    text = plan(mode, "claim_pending_tasks", **CLAIM)
    assert "Index Scan using tasks_claim" in text
    assert "Sort" not in text
    assert "Seq Scan" not in text


def test_looking_for_the_next_due_task_walks_the_claim_index(mode: psycopg.Connection) -> None:
    text = plan(mode, "until_next_run", namespaces=CLAIM["namespaces"], types=CLAIM["types"])
    assert "tasks_claim" in text
    assert "Seq Scan" not in text


def test_settling_goes_by_primary_key_and_not_by_the_lease_index(mode: psycopg.Connection) -> None:
    text = plan(mode, "settle_running_tasks", actor="'w'", outcomes=f"'[{OUTCOME}]'")
    assert "Index Scan using tasks_pkey" in text
    assert "tasks_lease" not in text
    assert "Seq Scan on tasks" not in text


@pytest.fixture
def fresh(url: str) -> Iterator[psycopg.Connection]:
    """Return a small table whose statistics know pending rows only, as after a bulk enqueue."""
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
        connection.execute("insert into interlock.tasks (type) select 'x' from generate_series(1, 3000)")
        connection.execute("vacuum analyze interlock.tasks")
        yield connection


def test_a_small_table_with_stale_statistics_is_not_scanned_for_every_batch(fresh: psycopg.Connection) -> None:
    claim = plan(fresh, "claim_pending_tasks", **CLAIM)
    settle = plan(fresh, "settle_running_tasks", actor="'w'", expected="1", outcomes=f"'[{OUTCOME}]'")
    for text in (claim, settle):
        assert "Index Scan using tasks_pkey" in text
        assert "Seq Scan on tasks" not in text


def test_renewing_goes_by_primary_key(mode: psycopg.Connection) -> None:
    text = plan(mode, "renew_running_tasks", ids=IDS, attempts="array_fill(1, array[100])", lease="'30 s'")
    assert "Index Scan using tasks_pkey" in text
    assert "Seq Scan on tasks" not in text


def test_recovery_walks_the_lease_index(mode: psycopg.Connection) -> None:
    text = plan(mode, "recover_expired_tasks", limit="100", actor="'w'")
    assert "Index Scan using tasks_lease" in text
    assert "Seq Scan" not in text
