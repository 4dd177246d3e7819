"""Submitting many jobs at once, over the async and the blocking API; keys that a workflow declares."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from interlock import Interlock
from interlock.config import Config
from interlock.errors import DefinitionError, InputError, JobFailedError, RequestReusedError
from interlock.testing import Clock, drain
from jobs_support import app_at, register_idle_worker

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.postgres.connection import Connection


async def count(database: Connection, table: str = "jobs") -> int:
    (row,) = await (await database.execute(f"select count(*) as n from interlock.{table}".encode())).fetchall()
    found: int = row["n"]
    return found


async def test_many_jobs_of_mixed_workflows_are_submitted_in_one_transaction(
    jobs: Interlock, database: Connection
) -> None:
    await register_idle_worker(database)
    names = ["chain", "gates", "chain"] * 100
    made = await jobs.submit_many(
        [{"workflow": name, "input": {"n": n}, "request_id": f"r{n}"} for n, name in enumerate(names)]
    )
    assert [job.workflow for job in made] == names
    assert all(job.created for job in made)
    rows = await (await database.execute("select id, input, status, xmin::text from interlock.jobs")).fetchall()
    inputs = {row["id"]: row["input"] for row in rows}
    assert [inputs[job.id] for job in made] == [{"n": n} for n in range(300)], "in the order of the requests"
    assert {row["status"] for row in rows} == {"RUNNING"}
    assert len({row["xmin"] for row in rows}) == 1
    assert await count(database, "tasks") == 900
    again = await jobs.submit_many([{"workflow": "chain", "input": {"n": 0}, "request_id": "r0"}, {"workflow": "slow"}])
    assert [job.created for job in again] == [False, True]
    assert again[0].id == made[0].id
    assert await jobs.submit_many([]) == []


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ({"workflow": "strict", "input": {"order": "x"}}, "workflow strict: input.order"),
        ({"workflow": "nothing"}, "there is no workflow 'nothing'"),
        ({"workflow": "chain", "worker_count": 11}, "worker_count must be"),
        ({"workflow": "chain", "color": "red"}, "element 1 has the unknown option 'color'"),
        ({"input": {}}, "element 1 is {'input': {}}"),
        ("chain", "element 1 is 'chain'"),
    ],
)
async def test_of_many_jobs_all_are_stored_or_none(
    jobs: Interlock, database: Connection, second: Any, told: str
) -> None:
    with pytest.raises(InputError) as refused:
        await jobs.submit_many([{"workflow": "chain"}, second])
    assert told in str(refused.value)
    with pytest.raises(RequestReusedError):
        await jobs.submit_many([{"workflow": "chain", "input": {"n": n}, "request_id": "same"} for n in (1, 2)])
    with pytest.raises(InputError, match="takes a list of jobs, got a str"):
        await jobs.submit_many("chain")  # type: ignore[arg-type]
    assert await count(database) == 0


async def test_many_jobs_are_stored_with_the_transaction_of_the_caller(url: str, jobs: Interlock) -> None:
    async with await psycopg.AsyncConnection.connect(url) as own:
        made = await jobs.submit_many([{"workflow": "chain"}, {"workflow": "slow"}], connection=own)
        assert await jobs.find_jobs() == []
        await own.commit()
    assert {job.id for job in await jobs.find_jobs()} == {job.id for job in made}


async def test_workflows_that_the_app_does_not_declare_are_checked_against_the_stored_ones(
    url: str, jobs: Interlock
) -> None:
    async with Interlock(config=Config(database_url=url)) as other:
        with pytest.raises(InputError, match=r"workflow strict: input\.order"):
            await other.submit_many([{"workflow": "strict", "input": {"order": n}} for n in (1, "x")])
        made = await other.submit_many([{"workflow": "strict", "input": {"order": n}} for n in (1, 2)])
    assert {job.id for job in await jobs.find_jobs()} == {job.id for job in made}


async def test_blocking_code_submits_many_jobs(url: str) -> None:
    def block() -> None:
        with app_at(url).sync as blocking:
            made = blocking.submit_many([{"workflow": "chain", "input": {"n": n}} for n in (1, 2)])
            assert [job.status().input for job in made] == [{"n": 1}, {"n": 2}]

    await asyncio.to_thread(block)


def test_a_workflow_declares_the_key_of_its_jobs_in_python_and_yaml(tmp_path: Path) -> None:
    app = Interlock("postgresql://nowhere")
    wf = app.workflow("sync", key="input.customer", on_conflict="reject")
    wf.sleep("rest", 1)
    assert (wf.document["key"], wf.document["on_conflict"]) == ("input.customer", "reject")
    with pytest.raises(DefinitionError, match="on_conflict: it needs a key"):
        app.workflow("other", on_conflict="reject")
    with pytest.raises(DefinitionError, match="on_conflict must be one of reject, return_existing"):
        app.workflow("other", key="all", on_conflict="explode")  # type: ignore[arg-type]
    template = tmp_path / "sync.yaml"
    template.write_text(
        "name: nightly\nversion: '1'\nkey: all\non_conflict: queue\nsteps: [{name: rest, type: sleep, seconds: 1}]\n"
    )
    (loaded,) = app.load_templates(template)
    assert (loaded.document["key"], loaded.document["on_conflict"]) == ("all", "queue")


async def test_drain_runs_queued_and_debounced_jobs_by_the_clock_of_the_test(url: str) -> None:
    clock = Clock()
    app = Interlock(config=Config(database_url=url), clock=clock)
    wf = app.workflow("sync", key="input.customer")
    ran: list[int] = []

    @wf.step
    async def note(n: int) -> None:
        ran.append(n)

    async with app:
        for n in range(3):
            await app.submit("sync", {"customer": 7, "n": n})
        await drain(app)
        assert ran == [0, 1, 2]
        burst = [await app.submit("sync", {"customer": 7, "n": n}, debounce=60) for n in (3, 4)]
        await drain(app)
        assert ran == [0, 1, 2], "not due yet"
        clock.advance(timedelta(seconds=60))
        await drain(app)
        assert ran == [0, 1, 2, 4]
        with pytest.raises(JobFailedError, match=f"replaced by job {burst[1].id}"):
            await burst[0].wait(30)
