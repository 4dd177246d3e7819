"""Random workflows on a real database, with random orders and faults, end as the dry run says."""

from __future__ import annotations

import asyncio
import itertools
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings

from interlock.store.jobs import read_job_history, read_jobs, read_steps
from interlock.workflow.retry_from import retry_job_from
from random_workflows import INPUT, MAIN, STARTED, Case, cases, expected, input_of_child
from workflow_simulation import ConnectionPool, WorkflowSimulation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from interlock.workflow.dry_run import Ended, Verdict

pytestmark = [pytest.mark.store, pytest.mark.chaos, pytest.mark.timeout(1800)]

EXAMPLES = int(os.environ.get("INTERLOCK_TEST_EXAMPLES") or 0)
ENDS = {"COMPLETED", "FAILED", "CANCELED"}
# The same examples every time, unless more of them are asked for.
PROFILE = settings(
    max_examples=EXAMPLES or 40,
    derandomize=not EXAMPLES,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


class SharedDatabase:
    """The database and event loop that the examples of a test share."""

    def __init__(self, url: str, runner: asyncio.Runner) -> None:
        self.pool = ConnectionPool(url)
        self.run = runner.run


@pytest.fixture
def shared(url: str) -> Iterator[SharedDatabase]:
    """Return the database and event loop for the examples of a test."""
    with asyncio.Runner() as runner:
        shared = SharedDatabase(url, runner)
        yield shared
        runner.run(shared.pool.close())


@PROFILE
@given(cases())
def test_random_jobs_end_as_the_dry_run_says(shared: SharedDatabase, case: Case) -> None:
    shared.run(play(shared.pool, case))


@settings(PROFILE, max_examples=EXAMPLES or 15)
@given(cases())
def test_random_canceled_jobs_end_once_and_are_compensated(shared: SharedDatabase, case: Case) -> None:
    shared.run(play_canceled(shared.pool, case))


async def play_canceled(pool: ConnectionPool, case: Case) -> None:
    """Submit the jobs of a case, and cancel some of the jobs that exist by then."""
    simulation = WorkflowSimulation(pool, case)
    await simulation.begin()
    await simulation.act(simulation.random.randint(0, 40))
    rows = await simulation.rows(
        "select id from interlock.jobs where namespace = any (%s) order by id", simulation.namespaces
    )
    unwanted = [row["id"] for row in rows if simulation.chance(60)]
    simulation.unwanted = 50
    canceled = await asyncio.gather(*(simulation.cancel_job(job_id) for job_id in unwanted))
    await simulation.run()
    watch = Watch(simulation)
    ends = await watch.ends()
    for job_id, was_canceled in zip(unwanted, canceled, strict=True):
        if was_canceled:
            assert ends[job_id] == "CANCELED"
    await watch.check_tasks(canceled=True)
    await watch.check_undone()


async def play(pool: ConnectionPool, case: Case) -> None:
    """Submit and advance the jobs of a case; then retry one of them."""
    simulation = WorkflowSimulation(pool, case)
    await simulation.begin()
    await simulation.run()
    watch = Watch(simulation)
    await watch.check_all()
    await watch.retry()


class Watch:
    """Compares the database with the dry run."""

    def __init__(self, simulation: WorkflowSimulation) -> None:
        self.simulation = simulation
        self.case = simulation.case
        self.checked: dict[str, Verdict] = {}

    async def check_all(self) -> None:
        for job_id in self.simulation.jobs:
            await self.check(job_id, MAIN, expected(self.case, MAIN, INPUT, self.simulation.outcomes))
        rows = await self.simulation.rows(
            "select id from interlock.jobs where namespace = any (%s)", self.simulation.namespaces
        )
        assert {str(row["id"]) for row in rows} == set(self.checked), "no job but those that were asked for"
        await self.check_tasks()
        self.check_handed()

    async def check(self, job_id: UUID, workflow: str, verdict: Verdict) -> None:
        """Compare a job and its children."""
        self.checked[str(job_id)] = verdict
        (job,) = await self.simulation.using(lambda connection: read_jobs(connection, [job_id]))
        steps = await self.simulation.using(lambda connection: read_steps(connection, job_id))
        history = await self.simulation.using(lambda connection: read_job_history(connection, job_id))
        found = {row["step"]: row for row in steps if not row["step"].startswith("compensate:")}
        assert {name: _state(row) for name, row in found.items()} == {
            name: (ended.state, ended.poisoned, ended.reused) for name, ended in verdict.steps.items()
        }
        assert (job["status"], normal(job["output"])) == (verdict.status, verdict.output), job["reason"]
        assert [row["to_state"] for row in history] == ["SUBMITTED", "PENDING", "RUNNING", verdict.status]
        for name, ended in verdict.steps.items():
            self.check_step(workflow, name, found[name], ended)
        self.check_error(job, steps, verdict)
        self.check_compensations(steps, set(verdict.compensated))
        await self.check_children(job_id, workflow, job["input"], found, verdict)

    def check_step(self, workflow: str, name: str, row: dict[str, Any], ended: Ended) -> None:
        if ended.has_result:
            assert normal(row["output"]["result"]) == ended.result
        if ended.state == "skipped" and not ended.reused and not ended.poisoned:
            assert row["reason"] == ended.reason
        if ended.poisoned and ended.reason is not None and "parts" in ended.reason:
            assert row["reason"] == ended.reason
        del workflow, name

    def check_error(self, job: dict[str, Any], steps: list[dict[str, Any]], verdict: Verdict) -> None:
        if verdict.error is None:
            assert job["error"] is None
            return
        assert job["error"]["steps"].keys() == verdict.error["steps"].keys()
        failed = {row["step"] for row in steps if row["state"] == "error" and row["step"].startswith("compensate:")}
        assert {f"compensate:{name}" for name in job["error"].get("compensations", ())} == failed
        first = min(job["error"]["steps"], key=lambda name: _ended_at(steps, name))
        assert job["reason"].startswith(f"step {first} failed: ")

    def check_compensations(self, steps: list[dict[str, Any]], wanted: set[str]) -> None:
        """All that was done is undone, the latest first and one after the other."""
        undone = sorted((row for row in steps if row["step"].startswith("compensate:")), key=lambda row: row["part"])
        names = [row["step"].removeprefix("compensate:") for row in undone]
        assert sorted(names) == sorted(wanted)
        moments = [_ended_at(steps, name) for name in names]
        assert moments == sorted(moments, reverse=True)
        for before, after in itertools.pairwise(undone):
            assert before["finished_at"] < after["started_at"]

    async def check_children(
        self, job_id: UUID, workflow: str, given: dict[str, Any], found: dict[str, dict[str, Any]], verdict: Verdict
    ) -> None:
        rows = await self.simulation.rows(
            "select id, parent_task_id, input from interlock.jobs where parent_job_id = %s", job_id
        )
        known = {name: ended.result for name, ended in verdict.steps.items() if ended.has_result}
        started = {}
        for name, step in self.case.steps[workflow].items():
            ran = verdict.steps[name].state != "skipped"
            if step["kind"] == "child" and ran and step["workflow"] in self.case.documents:
                started[found[name]["id"]] = step
        assert {row["parent_task_id"] for row in rows} == started.keys()
        for row in rows:
            step = started[row["parent_task_id"]]
            assert normal(row["input"]) == input_of_child(step, given, known)
            await self.check(
                row["id"],
                step["workflow"],
                expected(self.case, step["workflow"], row["input"], self.simulation.outcomes),
            )

    async def ends(self) -> dict[UUID, str]:
        """Return the ends of all jobs; each has exactly one."""
        rows = await self.simulation.rows(
            "select jobs.id, status, array_agg(to_state order by records.id) as states "
            "from interlock.jobs join interlock.job_state_transitions as records on job_id = jobs.id "
            "where namespace = any (%s) group by jobs.id",
            self.simulation.namespaces,
        )
        for row in rows:
            assert [state for state in row["states"] if state in ENDS] == [row["status"]]
        return {row["id"]: row["status"] for row in rows}

    async def check_undone(self) -> None:
        """Check that exactly the done steps of an uncompleted job were compensated."""
        for job_id, status in (await self.ends()).items():
            steps = await self.simulation.using(partial(read_steps, job_id=job_id))
            workflow = next(iter(name for name, found in self.case.steps.items() if steps[0]["step"] in found))
            declared = self.case.steps[workflow]
            done = {row["step"] for row in steps if row["state"] == "done" and row["step"] in declared}
            undone = {name for name in done if "compensate" in declared[name]} if status != "COMPLETED" else set()
            self.check_compensations(steps, undone)

    async def check_tasks(self, *, canceled: bool = False) -> None:
        """Nothing is left behind, and everything has ended once."""
        assert await self.simulation.is_quiet()
        (row,) = await self.simulation.rows(
            "select count(*) filter (where lease_expires_at is not null) as leases, "
            "count(*) filter (where state not in ('done', 'error', 'skipped', %s)) as unfinished, "
            "count(*) filter (where not advanced and state <> 'canceled') as forgotten, "
            "(select count(*) from interlock.orchestration_failures) as failures "
            "from interlock.tasks where namespace = any (%s)",
            "canceled" if canceled else "done",
            self.simulation.namespaces,
        )
        assert row == {"leases": 0, "unfinished": 0, "forgotten": 0, "failures": 0}
        rows = await self.simulation.rows(
            "select tasks.step, count(*) from interlock.tasks join interlock.audit_logs on task_id = tasks.id "
            "where namespace = any (%s) and to_state in ('done', 'error', 'skipped', 'canceled') "
            "group by tasks.id, tasks.step having count(*) <> 1",
            self.simulation.namespaces,
        )
        assert rows == []

    def check_handed(self) -> None:
        """Every step was handed the results of those right before it, whatever else was going on."""
        for job_id, name, results in self.simulation.handed:
            verdict = self.checked[job_id]
            if name.startswith("compensate:"):
                assert results == {}
                continue
            declared = name.partition("[")[0]
            (workflow,) = [key for key, steps in self.case.steps.items() if declared in steps]
            step = self.case.steps[workflow][declared]
            before = {*step.get("after", ()), *step.get("after_failure", ())}
            before -= {step.get("over")} if declared != name else set()
            assert normal(results) == {up: verdict.steps[up].result for up in before if verdict.steps[up].has_result}

    async def retry(self) -> None:
        """Retry the first job from one of its steps, with other outcomes."""
        simulation, old = self.simulation, self.simulation.jobs[0]
        step = simulation.random.choice(list(self.case.steps[MAIN]))
        verdict = self.checked[str(old)]
        again = self.downstream({step, *verdict.compensated})
        reused = {
            name: ended.result
            for name, ended in verdict.steps.items()
            if ended.has_result and name in self.case.steps[MAIN] and name not in again
        }
        simulation.outcomes = {**simulation.outcomes, MAIN: self.case.again}
        new = await simulation.using(
            lambda connection: retry_job_from(connection, old, step, actor="ada", now=simulation.now())
        )
        simulation.jobs, simulation.handed = [new.id], []
        await simulation.run()
        await self.check(new.id, MAIN, expected(self.case, MAIN, INPUT, simulation.outcomes, reused))
        await self.check_tasks()
        self.check_handed()

    def downstream(self, names: set[str]) -> set[str]:
        """Return these steps of the main workflow and all downstream steps."""
        for step in self.case.documents[MAIN]["steps"]:  # each comes after those that it waits for
            if names & {*step.get("after", ()), *step.get("after_failure", ())}:
                names.add(step["name"])
        return names


def normal(value: Any) -> Any:
    """Remove the ids of child jobs from a result."""
    if isinstance(value, dict):
        return STARTED if value.keys() == {"job_id"} else {key: normal(each) for key, each in value.items()}
    return [normal(each) for each in value] if isinstance(value, list) else value


def _state(row: dict[str, Any]) -> tuple[str, bool, bool]:
    return row["state"], row["poisoned"], row["reused"]


def _ended_at(steps: list[dict[str, Any]], name: str) -> Any:
    return next(row["finished_at"] for row in steps if row["step"] == name)
