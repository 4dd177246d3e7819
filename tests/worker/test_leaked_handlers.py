"""Handlers that ignore being stopped: their attempts are settled in time, and they are reported until they end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from factories import enqueue, task_row
from interlock.store.doctor import examine
from interlock.store.task_admin import request_cancel_of_running_tasks
from interlock.store.tasks import read_tasks
from interlock.telemetry import handlers_leaked_total
from worker_app import late, let_go
from worker_support import serving, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


@pytest.fixture(autouse=True)
def handlers_end() -> Iterator[None]:
    """Let the leaked handlers of a test end."""
    let_go.clear()
    late.clear()
    yield
    let_go.set()


async def ended(database: Connection, task: UUID) -> dict[str, Any]:
    """Wait for the end of a task and return its row."""
    while True:
        row = await task_row(database, task)
        if row["finished_at"] is not None:
            return row


async def reported(database: Connection) -> list[str]:
    """Return what `interlock doctor` finds of leaked handlers."""
    return [finding.message for finding in (await examine(database)).findings if finding.code == "handler_leaked"]


@pytest.mark.parametrize("kind", ["swallow_timeout", "block_past_timeout"])
async def test_a_handler_that_ignores_its_timeout_is_settled_and_reported(
    url: str, database: Connection, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    before = handlers_leaked_total.labels(kind)._value.get()  # noqa: SLF001 - the library has no reader
    async with serving(url) as worker:
        task = await enqueue(database, kind, max_tries=1)
        row = await ended(database, task)
        assert (row["state"], row["error"]["message"]) == ("error", "the handler was still running after 0.3 s")
        after = await enqueue(database, "add", {"a": 1, "b": 2})
        assert (await ended(database, after))["output"] == 3, "the slot is free"
        await until(lambda: worker.components.runner.leaks.by_type() == {kind: 1})
        found = f"{worker.worker_id}: 1 handler ignored being stopped and still runs: {kind} (1)"
        while await reported(database) != [found]:
            pass
        assert handlers_leaked_total.labels(kind)._value.get() == before + 1  # noqa: SLF001 - see above
        let_go.set()
        await until(lambda: worker.components.runner.leaks.by_type() == {})
        while await reported(database):
            pass
        (row,) = await read_tasks(database, [task])
        assert (row["state"], row["output"]) == ("error", None), "the late result is discarded"
        assert late == ([False] if kind == "swallow_timeout" else []), "and so are its writes"
        assert worker.context.tasks_processed == 2
    log = capsys.readouterr().out
    assert "handler_leaked" in log
    assert f"where='{kind} (" in log or f"where={kind} (" in log


async def test_a_handler_that_ignores_a_cancel_request_is_settled_and_reported(url: str, database: Connection) -> None:
    async with serving(url) as worker:
        task = await enqueue(database, "swallow_cancel")
        await until(lambda: worker.context.active)
        await request_cancel_of_running_tasks(database, [task], reason="not wanted")
        row = await ended(database, task)
        assert (row["state"], row["reason"]) == ("canceled", "not wanted")
        assert worker.components.runner.leaks.by_type() == {"swallow_cancel": 1}
        await until(lambda: not worker.context.active)
        let_go.set()
        await until(lambda: worker.components.runner.leaks.by_type() == {})


async def test_the_writes_of_a_leaked_transactional_handler_are_rolled_back(url: str, database: Connection) -> None:
    await database.execute("create table public.written (number int)")
    async with serving(url) as worker:
        row = await ended(database, await enqueue(database, "swallow_in_transaction", max_tries=1))
        assert row["state"] == "error"
        let_go.set()
        await until(lambda: worker.components.runner.leaks.by_type() == {})
    assert await (await database.execute("select from public.written")).fetchall() == []


async def test_a_leaked_handler_does_not_hold_up_the_shutdown(url: str, database: Connection) -> None:
    async with serving(url) as worker:
        await ended(database, await enqueue(database, "swallow_timeout", max_tries=1))
    assert not worker.is_running()
    let_go.set()  # before the event loop ends, which waits for it
