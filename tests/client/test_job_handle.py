"""Jobs as a program sees them: submitted once, waited for, asked about and acted on."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from typing_extensions import TypedDict

from interlock import Interlock, JobState, TaskRowState
from interlock.client.job_handle import JobHandle
from interlock.client.workflow import Workflow
from interlock.config import Config
from interlock.errors import InputError, InterlockError, JobFailedError, RequestReusedError, UnknownJobError
from interlock.store.workflows import put_workflow
from interlock.testing import drain
from jobs_app import chain
from jobs_support import app_at, manual_worker_at, orchestrator_at, register_idle_worker

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store


@dataclass
class Payment:
    """The payload of a signal, as a dataclass."""

    amount: int
    on: date = date(2026, 1, 1)


class Note(TypedDict):
    """The payload of a signal, as a TypedDict."""

    text: str


async def count(database: Connection) -> int:
    (row,) = await (await database.execute("select count(*) as jobs from interlock.jobs")).fetchall()
    return int(row["jobs"])


async def test_opening_an_app_stores_its_workflows(url: str, jobs: Interlock) -> None:
    other = Interlock(config=Config(database_url=url))
    job = await jobs.submit(chain, {"n": 3})
    assert job.created
    assert repr(job) == f"<JobHandle chain {job.id}>"
    async with other:  # which declares nothing
        assert (await other.submit("chain", {"n": 3})).created
        with pytest.raises(InputError, match="there is no workflow 'chains'; known are"):
            await other.submit("chains")


async def test_a_status_tells_what_was_asked_for(jobs: Interlock) -> None:
    parent = await jobs.submit("chain")
    token = uuid4()
    job = await jobs.submit(
        "chain", {"n": 1}, request_id="r1", parent=parent, worker_count=2, timeout=60, correlation_id=token
    )
    status = await job.status()
    assert (status.workflow, status.version, status.namespace, status.status) == (
        "chain",
        chain.version,
        "default",
        "PENDING",
    )
    assert (status.input, status.worker_count, status.request_id) == ({"n": 1}, 2, "r1")
    assert (status.parent_job_id, status.depth, status.correlation_id) == (parent.id, 1, token)
    assert status.deadline_at is not None
    assert (status.actor, status.has_ended) == ("ada", False)
    steps = await job.steps()
    assert [(step.step, step.kind, step.state, step.upstreams) for step in steps] == [
        ("first", "plain", "waiting", []),
        ("second", "plain", "waiting", ["first"]),
        ("third", "plain", "waiting", ["second"]),
    ]
    assert steps[1].reason == "waits for first"
    assert (status.status, steps[0].state) == (JobState.PENDING, TaskRowState.WAITING)
    assert isinstance(status.status, JobState)
    assert isinstance(steps[0].state, TaskRowState)
    assert isinstance((await job.history())[0].to_state, JobState)
    assert (await job.history())[0].database_role == "interlock"
    assert all(isinstance(found.status, JobState) for found in await jobs.find_jobs())


async def test_one_request_is_one_job(jobs: Interlock, database: Connection) -> None:
    first = await jobs.submit("chain", request_id="r")
    again = await jobs.submit("chain", request_id="r")
    assert (first.created, again.created, again.id) == (True, False, first.id)
    with pytest.raises(RequestReusedError, match="another input"):
        await jobs.submit("chain", {"n": 2}, request_id="r")
    assert await count(database) == 1


async def test_a_repeated_request_returns_its_job_after_a_new_version_was_declared(jobs: Interlock) -> None:
    first = await jobs.submit("chain", {"n": 1}, request_id="r")
    wf = Workflow(jobs, "chain", version="2")
    wf.sleep("rest", 1)
    async with jobs.connection() as connection:
        await put_workflow(connection, wf.document)
    again = await jobs.submit(wf, {"n": 1}, request_id="r")
    assert (again.created, again.id) == (False, first.id)
    with pytest.raises(RequestReusedError, match="another version"):
        await jobs.submit(wf, {"n": 1}, request_id="r", version="2")


@pytest.mark.parametrize(
    ("workflow", "given", "options", "told"),
    [
        ("", None, {}, "the name of a workflow"),
        ("chain", [1], {}, "must be"),
        ("chain", {"n": object()}, {}, "not a JSON value"),
        ("chain", None, {"worker_count": 11}, "worker_count must be a whole number from 1 to 10"),
        ("chain", None, {"worker_count": True}, "worker_count must be"),
        ("chain", None, {"timeout": 0}, "timeout must be a positive number"),
        ("chain", None, {"request_id": " "}, "request_id must be a non-empty string"),
        ("chain", None, {"correlation_id": "x"}, "correlation_id must be a UUID"),
        ("chain", None, {"parent": "x"}, "the id of a job must be a UUID"),
        ("chain", None, {"version": "9"}, f"no version '9'; it has {chain.version}"),
        ("chain", None, {"request_id": "a\0b"}, "request_id must be valid Unicode"),
        ("chain", None, {"request_id": "\ud800"}, "request_id must be valid Unicode"),
        ("\ud800", None, {}, "the name of a workflow must be valid Unicode"),
        ("chain", {"n": "a"}, {}, r"input\.n: must be of type integer \(parameter 'n' of step 'first'\)"),
        ("strict", {}, {}, "order"),
        ("strict", {"order": "a"}, {}, "order"),
    ],
)
async def test_invalid_arguments_are_refused_before_storing(
    jobs: Interlock, database: Connection, workflow: str, given: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        await jobs.submit(workflow, given, **options)
    assert await count(database) == 0


async def test_the_schema_holds_for_an_app_that_does_not_declare_the_workflow(url: str, jobs: Interlock) -> None:
    del jobs
    async with Interlock(config=Config(database_url=url)) as other:
        with pytest.raises(InputError, match="order"):
            await other.submit("strict", {"order": "a"})
        assert (await other.submit("strict", {"order": 1})).created
        with pytest.raises(InputError, match=r"input\.n: must be of type integer \(parameter 'n' of step 'first'\)"):
            await other.submit("chain", {"n": "a"})


async def test_a_job_is_stored_with_the_transaction_of_the_caller(url: str, jobs: Interlock) -> None:
    async with await psycopg.AsyncConnection.connect(url) as theirs:
        undone = await jobs.submit("chain", connection=theirs)
        row = await (await theirs.execute("select 1")).fetchone()
        assert row == (1,), "its rows are what they were"
        with pytest.raises(UnknownJobError, match="not committed yet"):
            await undone.status()
        await theirs.rollback()
        with pytest.raises(UnknownJobError):
            await undone.status()
        done = await jobs.submit("chain", connection=theirs)
        await theirs.commit()
        assert (await done.status()).status == "PENDING"
    with psycopg.connect(url) as blocking, pytest.raises(InputError, match="async psycopg connection"):
        await jobs.submit("chain", connection=blocking)


async def test_waiting_ends_with_the_job_or_with_the_time(url: str, jobs: Interlock, database: Connection) -> None:
    job = await jobs.submit("chain")
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.05 s"):
        await job.wait(0.05)
    async with orchestrator_at(url), manual_worker_at(database, {"third": {"n": 3}}):
        outputs = await asyncio.gather(*(jobs.job(job.id).wait(30) for _ in range(3)))
    assert outputs == [{"third": {"n": 3}}] * 3
    assert await jobs.job(str(job.id)).result() == {"third": {"n": 3}}


async def test_a_failed_job_raises_with_its_error(url: str, jobs: Interlock, database: Connection) -> None:
    async with orchestrator_at(url), manual_worker_at(database, {"bad": ValueError("no luck")}):
        job = await jobs.submit("broken")
        with pytest.raises(JobFailedError, match="step bad failed: no luck") as caught:
            await job.wait(30)
    assert caught.value.status == "FAILED"
    assert caught.value.error is not None
    steps = caught.value.error["steps"]
    assert isinstance(steps, dict)
    assert steps["bad"]["message"] == "no luck"
    states = {step.step: (step.state, step.skipped_by_failure) for step in await job.steps()}
    assert states == {"fine": ("done", False), "bad": ("error", False), "never": ("skipped", True)}


async def test_a_canceled_job_raises_and_is_canceled_once(url: str, jobs: Interlock, database: Connection) -> None:
    await register_idle_worker(database)
    async with orchestrator_at(url):
        job = await jobs.submit("gates")
        assert await job.cancel("not wanted")
        with pytest.raises(JobFailedError, match="was canceled: not wanted") as caught:
            await job.wait(30)
    assert caught.value.status == "CANCELED"
    assert not await job.cancel()
    with pytest.raises(UnknownJobError):
        await jobs.job(uuid4()).cancel()


@pytest.mark.parametrize("words", ["a\0b", "\ud800"])
async def test_words_that_the_database_cannot_hold_are_an_error_of_ours(jobs: Interlock, words: str) -> None:
    job = await jobs.submit("chain")
    for refused in (job.cancel(words), jobs.submit("chain", version=words), jobs.find_jobs(workflow=words)):
        with pytest.raises(InterlockError):
            await refused
    with pytest.raises(InputError, match="request_id must be valid Unicode"):
        await job.retry_from("first", request_id=words)
    assert await job.cancel("enough")


async def test_signals_and_approvals_open_the_gates(url: str, jobs: Interlock, database: Connection) -> None:
    async with orchestrator_at(url), manual_worker_at(database):
        job = await jobs.submit("gates")
        assert await job.signal("paid", {"euros": 5}, request_id="r") == "sent"
        assert await job.signal("paid", {"euros": 5}, request_id="r") == "already sent"
        assert await job.signal("paid", {"euros": 6}) == "sent", "one more than is needed"
        assert await job.approve("boss", comment="go", by="grace") == "sent"
        assert await job.wait(30) == {"ship": "ship"}
        sent = [(each.name, each.request_id, each.consumed_by) for each in await job.signals()]
        assert sent == [("paid", "r", "paid"), ("paid", None, None), ("boss", None, "boss")]
        with pytest.raises(InputError):
            await job.signal("paid")
    other = await jobs.submit("gates")
    assert await other.signals() == []
    with pytest.raises(InputError, match="request_id must be a non-empty string"):
        await other.signal("paid", request_id="")
    with pytest.raises(InputError, match="nothing"):
        await other.signal("nothing")
    with pytest.raises(InputError, match=r"signal 'paid': .*object"):
        await other.signal("paid", object())


async def test_a_typed_payload_is_checked_when_it_is_sent_and_decoded_by_the_next_step(
    url: str, database: Connection
) -> None:
    app = Interlock(url)
    typed = app.workflow("typed")
    typed.signal("one", signal="paid", payload=Payment, assignee="input.teller")
    typed.signal("two", signal="paid", payload=Payment, after=["one"])
    typed.signal("note", payload=Note, after=["two"])
    typed.signal("count", payload=int, after=["note"])

    @typed.step(after=["one", "two", "note", "count"])
    async def book(one: Payment, two: Payment, note: Note, count: int) -> str:
        return f"{one.amount + two.amount} on {one.on}: {note['text']} x{count}"

    async with app:
        await register_idle_worker(database)
        job = await app.submit("typed", {"teller": "eva"})
        (item,) = await app.inbox(assignee="eva", workflow="typed", kind="signal")
        assert (item.job_id, item.step, item.signal, item.wait_until) == (job.id, "one", "paid", None)
        assert await app.inbox(after=item) == []
        for wrong, place in (
            ({"amount": "much"}, r"payload"),
            ({"on": "2026-01-01"}, r"payload: 'amount' is a required"),
        ):
            with pytest.raises(InputError, match=rf"job {job.id}: signal 'paid': {place}"):
                await job.signal("paid", wrong)
        assert await job.signals() == []
        await job.signal("paid", Payment(amount=5, on=date(2026, 1, 1)))
        await job.signal("paid", {"amount": 6, "on": "2026-01-02"})
        await job.signal("note", Note(text="thanks"))
        with pytest.raises(InputError, match="signal 'count': payload: must be of type integer"):
            await job.signal("count", "2")
        await job.signal("count", 2)
        assert await app.inbox() == []
        await drain(app)
        assert await job.wait(30) == {"book": "11 on 2026-01-01: thanks x2"}
        with pytest.raises(InputError, match="kind must be one of signal, approval, got 'sleep'"):
            await app.inbox(kind="sleep")


async def test_a_retry_goes_on_from_a_step_in_a_new_job(url: str, jobs: Interlock, database: Connection) -> None:
    async with orchestrator_at(url), manual_worker_at(database, {"bad": ValueError("no luck")}):
        job = await jobs.submit("broken")
        with pytest.raises(JobFailedError):
            await job.wait(30)
    async with orchestrator_at(url), manual_worker_at(database) as worker:
        again = await job.retry_from("bad", request_id="again")
        assert again.created
        assert await again.wait(30) == {"never": "never"}
        assert worker.done == ["bad", "never"]
        assert (await job.retry_from("bad", request_id="again")).id == again.id
        assert await (await job.retry()).wait(30) == {"never": "never"}
        assert worker.done == ["bad", "never", "bad", "never"]
        with pytest.raises(InputError, match="no step of it failed"):
            await again.retry()
    assert (await again.status()).retried_from == job.id
    (fine, *_) = await again.steps()
    assert (fine.state, fine.reused, fine.result) == ("skipped", True, "fine")
    with pytest.raises(InputError):
        await job.retry_from("nowhere")


async def test_jobs_are_found_page_by_page(jobs: Interlock) -> None:
    made = [await jobs.submit("chain") for _ in range(3)] + [await jobs.submit("slow")]
    assert [job.id for job in await jobs.find_jobs()] == [handle.id for handle in reversed(made)]
    assert [job.workflow for job in await jobs.find_jobs(workflow="slow")] == ["slow"]
    (newest, *_) = page = await jobs.find_jobs(status="PENDING", limit=2)
    assert newest.id == made[3].id
    assert [job.id for job in await jobs.find_jobs(before=page[-1].id)] == [made[1].id, made[0].id]
    assert await jobs.find_jobs(namespace="elsewhere") == []
    with pytest.raises(InputError, match="status must be one of SUBMITTED"):
        await jobs.find_jobs(status="done")


async def test_jobs_are_found_by_tag_attribute_parent_and_time(jobs: Interlock) -> None:
    first = await jobs.submit("chain", tags=["eu", "eu"], attributes={"customer": 7, "paid": True})
    child = await jobs.submit("slow", tags=["eu"], parent=first)
    (found,) = await jobs.find_jobs(tags="eu", attributes={"customer": 7})
    assert (found.id, found.tags, found.attributes) == (first.id, ["eu"], {"customer": 7, "paid": True})
    assert [job.id for job in await jobs.find_jobs(parent=first)] == [child.id]
    assert [job.id for job in await jobs.find_jobs(status=["PENDING", "FAILED"], created_after=found.created_at)] == [
        child.id,
        first.id,
    ]
    assert await jobs.find_jobs(created_before=found.created_at) == []
    assert await jobs.find_jobs(workflow="chain", version="no") == []
    refused: list[tuple[dict[str, Any], str]] = [
        ({"version": "1"}, "version '1' needs a workflow"),
        ({"tags": [""]}, "tags must be a sequence of non-empty strings"),
        ({"attributes": {"a": []}}, "must be a string, a number or a boolean"),
        ({"parent": "x"}, "must be a UUID"),
        ({"created_after": datetime(2026, 1, 1)}, "created_after must be a datetime with a time zone"),  # noqa: DTZ001 - that is refused
        ({"status": ["FAILED", "done"]}, "status must be one of SUBMITTED"),
        ({"limit": -1}, "limit must be a whole number from 0 on, got -1"),
        ({"before": "x"}, "before must be a UUID, got 'x'"),
    ]
    for conditions, message in refused:
        with pytest.raises(InputError, match=message):
            await jobs.find_jobs(**conditions)
    with pytest.raises(InputError, match="workflow chain: attributes must be a mapping"):
        await jobs.submit("chain", attributes=7)  # type: ignore[arg-type]  # that is refused


async def test_an_unknown_job_is_named(jobs: Interlock) -> None:
    nobody = jobs.job(uuid4())
    for act in (nobody.status, nobody.steps, nobody.wait):
        with pytest.raises(UnknownJobError, match=str(nobody.id)):
            await act()
    with pytest.raises(InputError, match="must be a UUID"):
        jobs.job("x")
    assert isinstance(nobody, JobHandle)


async def test_code_that_blocks_can_do_the_same(url: str, database: Connection) -> None:
    def block() -> None:
        with app_at(url).sync as blocking:
            job = blocking.submit("chain", {"n": 1}, request_id="x")
            assert job.created
            assert blocking.job(job.id).wait(30) == {"third": "third"}
            assert job.status().status == "COMPLETED"
            assert [step.state for step in job.steps()] == ["done"] * 3
            assert job.history()[-1].event == "success"
            assert not job.cancel()
            assert repr(job) == f"<SyncJob chain {job.id}>"
            gates = blocking.submit("gates")
            assert gates.signal("paid", 1, request_id="p") == "sent"
            assert gates.signal("paid", 1, request_id="p") == "already sent"
            assert [sent.name for sent in gates.signals()] == ["paid"]
            assert [item.step for item in blocking.inbox(kind="approval")] in ([], ["boss"])
            assert gates.approve("boss") == "sent"
            assert gates.wait(30) == {"ship": "ship"}
            assert gates.retry_from("ship").created
            assert len(blocking.find_jobs(workflow="gates")) == 2

    async with orchestrator_at(url), manual_worker_at(database):
        with ThreadPoolExecutor(1) as pool:
            await asyncio.get_running_loop().run_in_executor(pool, block)
