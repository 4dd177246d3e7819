"""Schedules of workflows: each tick submits at most one job; a tick that fails holds up no other schedule."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from factories import add_live_worker, step, workflow
from interlock import Interlock
from interlock.errors import ConfigError, DefinitionError, InputError
from interlock.postgres.connection import connect
from interlock.store.jobs import JobFilter, find_jobs, read_jobs
from interlock.store.schedules import (
    Schedule,
    delete_schedules,
    list_schedules,
    pause_schedules,
    put_schedules,
    resume_schedules,
)
from interlock.store.workflows import put_workflow
from interlock.worker.maintenance.leader import SchedulesDuty
from interlock.workflow.fire_schedules import fire_due_schedules, run_schedule

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from job_driver import JobDriver

pytestmark = pytest.mark.store

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
SCHEMA = {"type": "object", "required": ["of"], "properties": {"of": {"type": "string"}}}


def hourly(name: str = "nightly", **options: Any) -> Schedule:
    return Schedule(name, **{"cron": "0 * * * *", "workflow": "w", **options})


async def fire(connection: Connection, now: datetime) -> list[UUID]:
    return [id_ for fired in await fire_due_schedules(connection, actor="leader", now=now) for id_ in fired.ids]


async def test_a_tick_submits_one_job_with_what_was_declared(database: Connection) -> None:
    await put_workflow(database, workflow(step("a"), input_schema=SCHEMA))
    options = {"tags": ["nightly"], "attributes": {"n": 1}, "worker_count": 2, "callback_url": "https://a.example/x"}
    schedule = hourly(input={"of": "day"}, options={**options, "timeout": 60.0})
    await put_schedules(database, [schedule], now=NOON)
    assert await fire(database, NOON + HOUR - timedelta(seconds=1)) == []
    (job,) = await fire(database, NOON + HOUR)
    assert await fire(database, NOON + HOUR) == []
    (row,) = await read_jobs(database, [job])
    assert {name: row[name] for name in options} == options
    assert (row["workflow"], row["input"], row["actor"], row["timeout_seconds"]) == ("w", {"of": "day"}, "leader", 60)
    assert row["request_id"] == "schedule:nightly:2030-01-01T13:00:00+00:00"
    (state,) = await list_schedules(database)
    assert (state.last_at, state.next_at, state.workflow, state.type) == (NOON + HOUR, NOON + 2 * HOUR, "w", None)


async def test_the_job_of_a_tick_runs_like_any_other(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("a"), step("b", "a")))
    await put_schedules(driver.connection, [hourly()], now=NOON)
    await add_live_worker(driver.connection, worker="w_2")
    await driver.connection.execute("update interlock.workers set seen_until = '2031-01-01'")
    (job,) = await fire(driver.connection, NOON + HOUR)
    driver.now = NOON + HOUR
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_tick_runs_the_newest_version_unless_one_is_named(database: Connection) -> None:
    await put_workflow(database, workflow(step("a")), now=NOON)
    await put_schedules(database, [hourly(), hourly("fixed", version="1")], now=NOON)
    await put_workflow(database, workflow(step("b"), version="2"), now=NOON + HOUR)
    await fire(database, NOON + HOUR)
    found = {row["request_id"].split(":")[1]: row["version"] for row in await find_jobs(database)}
    assert found == {"nightly": "2", "fixed": "1"}


@pytest.mark.parametrize(
    ("missed", "late", "expected"),
    [("once", HOUR / 2, 1), ("skip", HOUR / 2, 0), ("skip", HOUR / 120, 1), ("all", HOUR / 2, 3)],
)
async def test_missed_ticks_follow_policy(database: Connection, missed: str, late: timedelta, expected: int) -> None:
    await put_workflow(database, workflow(step("a")))
    await put_schedules(database, [hourly(missed=missed)], now=NOON)
    assert len(await fire(database, NOON + 3 * HOUR + late)) == expected
    assert len(await find_jobs(database)) == expected


@pytest.mark.chaos
async def test_several_leaders_at_once_submit_every_tick_once(url: str, database: Connection) -> None:
    await put_workflow(database, workflow(step("a")))
    await put_schedules(database, [hourly(f"s{n}", missed="all") for n in range(10)], now=NOON)

    async def leader() -> int:
        async with connect(url) as connection:
            return sum([len(await fire(connection, NOON + hours * HOUR)) for hours in range(1, 4)])

    assert sum(await asyncio.gather(*(leader() for _ in range(4)))) == 30
    assert len(await find_jobs(database, limit=100)) == 30


@pytest.mark.parametrize(
    ("policy", "jobs", "error"),
    [("return_existing", 1, None), ("queue", 2, None), ("cancel_in_progress", 2, None), ("reject", 1, "key 'k'")],
)
async def test_overlap_with_the_job_of_the_tick_before_follows_the_policy_of_its_key(
    database: Connection, policy: str, jobs: int, error: str | None
) -> None:
    await put_workflow(database, workflow(step("a")))
    await put_schedules(database, [hourly(options={"key": "k", "on_conflict": policy})], now=NOON)
    (first,) = await fire(database, NOON + HOUR)
    await fire(database, NOON + 2 * HOUR)
    found = await find_jobs(database, JobFilter(key="k"))
    assert (len(found), found[-1]["id"]) == (jobs, first)
    (state,) = await list_schedules(database)
    assert (state.error is None) if error is None else (error in str(state.error))


async def test_a_tick_that_was_fired_is_not_fired_again_even_if_its_schedule_is_put_back(database: Connection) -> None:
    await put_workflow(database, workflow(step("a")))
    await put_schedules(database, [hourly()], now=NOON)
    await fire(database, NOON + HOUR)
    await database.execute("update interlock.schedules set next_at = next_at - interval '1 hour'")
    await fire(database, NOON + HOUR)
    assert len(await find_jobs(database)) == 1


async def test_a_schedule_that_fails_records_its_error_and_holds_up_no_other(database: Connection) -> None:
    await put_workflow(database, workflow(step("a"), input_schema=SCHEMA))
    schedules = [
        hourly("good", input={"of": "day"}),
        hourly("misfit", input={"of": 7}),
        hourly("unknown", workflow="nothing"),
        hourly("version", version="9"),
    ]
    await put_schedules(database, schedules, now=NOON)
    with capture_logs() as logs:
        await SchedulesDuty("leader").run_once(database, now=NOON + HOUR)
    assert {line["schedule"] for line in logs if line["event"] == "schedule_failed"} == {"misfit", "unknown", "version"}
    good, misfit, unknown, version = await list_schedules(database)
    assert (good.error, good.last_at) == (None, NOON + HOUR)
    assert misfit.error == "workflow w: input.of: must be of type string"
    assert unknown.error == "there is no workflow 'nothing'; known are w"
    assert version.error == "workflow 'w' has no version '9'; it has 1"
    assert {(each.next_at, each.paused_at) for each in (misfit, unknown, version)} == {(NOON + 2 * HOUR, None)}
    await put_workflow(database, workflow(step("a"), name="nothing"))
    await fire(database, NOON + 2 * HOUR)
    assert (await list_schedules(database))[2].error is None, "it is tried again at each tick"


async def test_it_is_paused_resumed_and_deleted_like_one_of_a_task(database: Connection) -> None:
    await put_workflow(database, workflow(step("a")))
    await put_schedules(database, [hourly()], now=NOON)
    assert await pause_schedules(database, ["nightly"], actor="ada", now=NOON) == ["nightly"]
    assert await fire(database, NOON + HOUR) == []
    assert await resume_schedules(database, ["nightly"], actor="ada", now=NOON + HOUR) == ["nightly"]
    assert len(await fire(database, NOON + 2 * HOUR)) == 1
    assert await delete_schedules(database, ["nightly"]) == ["nightly"]


async def test_a_schedule_is_run_at_once_without_touching_its_ticks(database: Connection) -> None:
    await put_workflow(database, workflow(step("a"), input_schema=SCHEMA))
    await put_schedules(database, [hourly(input={"of": "day"}), Schedule("t", "x", every=HOUR)], now=NOON)
    await pause_schedules(database, ["nightly"], actor="ada", now=NOON)
    before = await list_schedules(database)
    job = await run_schedule(database, "nightly", actor="ada", now=NOON + HOUR / 2)
    task = await run_schedule(database, "t", actor="ada")
    assert job is not None
    assert task is not None
    (row,) = await read_jobs(database, [job])
    assert (row["actor"], row["request_id"]) == ("ada", "schedule:nightly:2030-01-01T12:30:00+00:00")
    assert await list_schedules(database) == before
    assert await run_schedule(database, "none", actor="ada") is None
    await put_schedules(database, [hourly(input={})], now=NOON)
    with pytest.raises(InputError, match="'of' is a required property"):
        await run_schedule(database, "nightly", actor="ada")


async def test_an_app_declares_and_stores_schedules_of_workflows(url: str, database: Connection) -> None:
    app = Interlock(url, callback_url="https://app.example/x")
    report = app.workflow("report", input_schema=SCHEMA)

    @report.step
    async def make(of: str) -> str:
        return of

    app.schedule("nightly", workflow=report, cron="30 4 * * MON-FRI", timezone="Europe/Berlin", input={"of": "day"})
    app.schedule("often", workflow="elsewhere", every=90, missed="skip", version="2", tags=["x"], timeout=HOUR)
    async with app:
        nightly, often = await list_schedules(database)
        assert await run_schedule(database, "nightly", actor="ada") is not None
    assert (nightly.workflow, nightly.version, nightly.input) == ("report", None, {"of": "day"})
    assert (often.every, often.missed, often.version) == (timedelta(seconds=90), "skip", "2")
    assert often.options == {"tags": ["x"], "timeout": 3600.0, "default_callback_url": "https://app.example/x"}
    (job,) = await read_jobs(database, [row["id"] for row in await find_jobs(database)])
    assert job["callback_url"] == "https://app.example/x"


async def test_an_input_that_does_not_fit_a_declared_workflow_is_refused_when_the_app_opens(url: str) -> None:
    app = Interlock(url)
    report = app.workflow("report", input_schema=SCHEMA)

    @report.step
    async def make(of: str) -> str:
        return of

    app.schedule("nightly", workflow="report", every=HOUR, input={"of": 7})
    with pytest.raises(DefinitionError, match="schedule 'nightly': workflow report: input"):
        await app.open()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "schedule 's': give either a cron expression or an interval"),
        ({"every": 0}, "schedule 's': every must be a positive number of seconds"),
        ({"every": 5, "workflow": ""}, "workflow must be a non-empty string"),
        ({"every": 5, "tags": "x"}, "schedule 's': tags must be a sequence of non-empty strings"),
        ({"every": 5, "worker_count": 11}, "schedule 's': worker_count must be a whole number from 1 to 10"),
        ({"every": 5, "request_id": "x"}, "schedule 's': unknown option 'request_id'; known are attributes"),
        ({"every": 5, "input": {"a": object()}}, "schedule 's': .*a object is not a JSON value"),
    ],
)
def test_an_invalid_schedule_is_refused_when_it_is_declared(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        Interlock().schedule("s", **{"workflow": "w", **options})


@pytest.mark.unit
def test_a_schedule_has_a_task_or_a_workflow() -> None:
    wrong: tuple[dict[str, Any], ...] = ({}, {"type": "x", "workflow": "w"})
    for given in wrong:
        with pytest.raises(ConfigError, match="schedule 's': give either the type of a task or a workflow"):
            Schedule("s", every=HOUR, **given)
    app = Interlock()
    app.schedule("s", workflow="w", every=5)
    with pytest.raises(DefinitionError, match="schedule 's' is declared twice"):
        app.schedule("s", workflow="w", every=5)
