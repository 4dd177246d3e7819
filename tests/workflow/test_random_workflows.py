"""Random workflows on a real database, with random orders and faults, end as the independent oracle says."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest

from workflow_history import ObservedCompensation, ObservedJob, ObservedStep, check_history
from workflow_oracle import End, JobStatus, JobVerdict, possible_verdicts
from workflow_simulation import Case, ConnectionPool, WorkflowSimulation, random_case

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from datetime import datetime
    from uuid import UUID

pytestmark = [pytest.mark.store, pytest.mark.chaos, pytest.mark.timeout(1800)]

# The same cases every time, unless more of them are asked for.
EXAMPLES = int(os.environ.get("INTERLOCK_TEST_EXAMPLES") or 0)
FIRST_SEED = int(os.environ.get("INTERLOCK_TEST_SEED") or 0)
ENDS = {"COMPLETED", "FAILED", "CANCELED"}


class SharedDatabase:
    """The database and event loop that the cases of a test share."""

    def __init__(self, url: str, runner: asyncio.Runner) -> None:
        self.pool = ConnectionPool(url)
        self.run = runner.run


@pytest.fixture
def shared(url: str) -> Iterator[SharedDatabase]:
    """Return the database and event loop for the cases of a test."""
    with asyncio.Runner() as runner:
        shared = SharedDatabase(url, runner)
        yield shared
        runner.run(shared.pool.close())


def seeds(count: int) -> range:
    return range(FIRST_SEED, FIRST_SEED + (EXAMPLES or count))


@pytest.mark.parametrize("first", range(4))
def test_random_jobs_end_as_the_oracle_says(shared: SharedDatabase, first: int) -> None:
    for seed in seeds(40)[first::4]:
        shared.run(play(shared.pool, random_case(seed)))


@pytest.mark.parametrize("first", range(2))
def test_random_jobs_keep_the_rules_at_any_time(shared: SharedDatabase, first: int) -> None:
    for seed in seeds(16)[first::2]:
        case = random_case(seed, cancel_rest=True, together=False)
        shared.run(play_observed(shared.pool, case))


def test_random_canceled_jobs_keep_the_rules(shared: SharedDatabase) -> None:
    for seed in seeds(12):
        shared.run(play_observed(shared.pool, random_case(seed, together=False), cancel_some_jobs))


def test_random_jobs_with_canceled_steps_keep_the_rules(shared: SharedDatabase) -> None:
    for seed in seeds(16):
        case = random_case(seed, cancel_rest=seed % 2 == 0, together=False)
        shared.run(play_observed(shared.pool, case, cancel_some_steps))


async def play(pool: ConnectionPool, case: Case) -> None:
    """Run the jobs of a case to their ends, and compare these with the verdicts of the oracle."""
    simulation = WorkflowSimulation(pool, case)
    await simulation.begin()
    await simulation.run()
    definition = case.definition
    allowed = list(
        possible_verdicts(definition.documents, definition.name, definition.outcomes, job_input=definition.job_input)
    )
    for job_id in simulation.jobs:
        observed = await observe(simulation, job_id)
        found = verdict_of(observed)
        assert found in [expected_ends(verdict) for verdict in allowed], f"seed {case.seed}"
    await check_tasks(simulation)


async def cancel_some_jobs(simulation: WorkflowSimulation) -> None:
    """Cancel half of the jobs and child jobs, at one time."""
    await simulation.act(simulation.random.randint(0, 40))
    rows = await simulation.rows(
        "select id from interlock.jobs where namespace = any (%s) order by id", simulation.namespaces
    )
    for row in rows:
        if simulation.chance(50):
            await simulation.cancel_job(row["id"])


async def cancel_some_steps(simulation: WorkflowSimulation) -> None:
    """Cancel unfinished steps, above all those that wait for their parts or their child job, at several times."""
    for _ in range(3):
        await simulation.act(simulation.random.randint(0, 15))
        rows = await simulation.rows(
            "select id, coalesce(held_by in ('job', 'parts'), false) as waits from interlock.tasks "
            "where namespace = any (%s) and part_of is null and compensates is null "
            "and state in ('waiting', 'pending', 'running') order by id",
            simulation.namespaces,
        )
        for row in rows:
            if simulation.chance(50 if row["waits"] else 5):
                await simulation.cancel_step(row["id"])


async def play_observed(
    pool: ConnectionPool, case: Case, cancel: Callable[[WorkflowSimulation], Awaitable[None]] | None = None
) -> None:
    """Run the jobs of a case, perhaps cancel some of it, and check their histories by the rules."""
    simulation = WorkflowSimulation(pool, case)
    await simulation.begin()
    if cancel is not None:
        simulation.unwanted = 50
        await cancel(simulation)
    await simulation.run()
    assert await simulation.is_quiet(), f"seed {case.seed}: a job has not ended"
    definition = case.definition
    for job_id in simulation.jobs:
        violations = check_history(
            definition.documents,
            definition.name,
            definition.outcomes,
            await observe(simulation, job_id),
            job_input=definition.job_input,
        )
        assert violations == [], f"seed {case.seed}"
    await check_tasks(simulation)


# --- What happened -------------------------------------------------------------------------------------------------


async def observe(simulation: WorkflowSimulation, job_id: UUID) -> ObservedJob:
    """Read the history of an ended job and of its child jobs."""
    (job,) = await simulation.rows("select status, completed_at from interlock.jobs where id = %s", job_id)
    rows = await simulation.rows(
        "select tasks.*, child.id as child_id from interlock.tasks "
        "left join interlock.jobs as child on child.parent_task_id = tasks.id "
        "where tasks.job_id = %s order by tasks.finished_at",
        job_id,
    )
    requested = None
    if job["status"] == "CANCELED":
        # a child job is canceled with its parent or its step, at a time that no row has: not later than its first step
        canceled = [
            row["finished_at"]
            for row in rows
            if row["state"] == "canceled" and not row["superseded"] and row["id"] not in simulation.canceled_at
        ]
        requested = moment(simulation.canceled_at.get(job_id) or min(canceled, default=job["completed_at"]))
    children = {row["step"]: await observe(simulation, row["child_id"]) for row in rows if row["child_id"] is not None}
    compensations = []
    for row in rows:
        if row["compensates"] is not None:
            *path, step = row["step"].removeprefix("compensate:").split("/")
            undone = ObservedCompensation(
                step, moment(row["started_at"]), moment(row["finished_at"]), failed=row["state"] != "done"
            )
            if path:
                children[path[0]] = with_compensation(children[path[0]], path[1:], undone)
            else:
                compensations.append(undone)
    steps = [row for row in rows if row["compensates"] is None and row["part_of"] is None]
    return ObservedJob(
        JobStatus(job["status"]),
        moment(job["completed_at"]),
        tuple(observed_step(simulation, row, rows) for row in steps),
        tuple(compensations),
        children,
        cancel_requested=requested,
    )


def with_compensation(job: ObservedJob, path: list[str], undone: ObservedCompensation) -> ObservedJob:
    """Add a compensation that ran as part of a parent job to the child job whose step it undoes."""
    if not path:
        return _replaced(job, compensations=(*job.compensations, undone))
    return _replaced(
        job, children={**job.children, path[0]: with_compensation(job.children[path[0]], path[1:], undone)}
    )


def _replaced(job: ObservedJob, **changes: Any) -> ObservedJob:
    return ObservedJob(**{**{name: getattr(job, name) for name in ObservedJob.__dataclass_fields__}, **changes})


def observed_step(simulation: WorkflowSimulation, row: dict[str, Any], rows: list[dict[str, Any]]) -> ObservedStep:
    parts = [part for part in rows if part["part_of"] == row["id"]]
    started = simulation.first_claims.get(row["id"])
    requested = simulation.canceled_at.get(row["id"])
    return ObservedStep(
        row["step"] if row["part_of"] is None else str(row["part"]),
        end_of(row),
        moment(row["finished_at"]),
        None if started is None else moment(started),
        cancel_requested=None if requested is None else moment(requested),
        parts=tuple(observed_step(simulation, part, []) for part in sorted(parts, key=lambda part: int(part["part"]))),
    )


def end_of(row: dict[str, Any]) -> End:
    """Classify a stored end."""
    if row["state"] == "skipped":
        return End.SKIPPED if row["skipped_by_failure"] else End.PASSED_OVER
    if row["superseded"] and row["state"] in {"error", "canceled"}:
        return End.REST_CANCELED
    return {"done": End.DONE, "error": End.ERROR, "canceled": End.CANCELED}[row["state"]]


def moment(time: datetime) -> float:
    return time.timestamp()


# --- Comparisons ---------------------------------------------------------------------------------------------------


def expected_ends(verdict: JobVerdict) -> tuple[Any, ...]:
    """Return the status, the ends of steps and the compensated steps of a verdict, and those of its children."""
    children = {name: expected_ends(child) for name, child in verdict.children.items()}
    return verdict.status, verdict.ends, sorted(verdict.compensations()), children


def verdict_of(job: ObservedJob) -> tuple[Any, ...]:
    """Return the same of an observed job."""
    undone = [undo.step for undo in job.compensations]
    for name, child in job.children.items():
        if child.status is JobStatus.COMPLETED:
            undone += [f"{name}/{step}" for step in _undone_within(child)]
    children = {name: _without_inner(child) for name, child in job.children.items()}
    return job.status, {step.name: step.end for step in job.steps}, sorted(undone), children


def _undone_within(job: ObservedJob) -> list[str]:
    found = [undo.step for undo in job.compensations]
    for name, child in job.children.items():
        found += [f"{name}/{step}" for step in _undone_within(child)] if child.status is JobStatus.COMPLETED else []
    return found


def _without_inner(job: ObservedJob) -> tuple[Any, ...]:
    """Return the verdict of a child; the compensations of a completed one belong to its parent."""
    status, ends, undone, children = verdict_of(job)
    return status, ends, [] if job.status is JobStatus.COMPLETED else undone, children


async def check_tasks(simulation: WorkflowSimulation) -> None:
    """Nothing is left behind, and every job and every task has ended once."""
    assert await simulation.is_quiet()
    (row,) = await simulation.rows(
        "select count(*) filter (where lease_expires_at is not null) as leases, "
        "count(*) filter (where state not in ('done', 'error', 'skipped', 'canceled')) as unfinished, "
        "count(*) filter (where not advanced and state not in ('canceled', 'error')) as forgotten, "
        "(select count(*) from interlock.orchestration_failures) as failures "
        "from interlock.tasks where namespace = any (%s)",
        simulation.namespaces,
    )
    assert row == {"leases": 0, "unfinished": 0, "forgotten": 0, "failures": 0}
    rows = await simulation.rows(
        "select tasks.step, count(*) from interlock.tasks join interlock.audit_logs on task_id = tasks.id "
        "where namespace = any (%s) and to_state in ('done', 'error', 'skipped', 'canceled') "
        "group by tasks.id, tasks.step having count(*) <> 1",
        simulation.namespaces,
    )
    assert rows == []
    rows = await simulation.rows(
        "select tasks.step, tasks.state, array_agg(signals.payload) filter (where signals.id is not null) as payloads, "
        "tasks.output -> 'result' as result "
        "from interlock.tasks left join interlock.signals "
        "on signals.job_id = tasks.job_id and signals.consumed_by = tasks.step "
        "where namespace = any (%s) and tasks.type = 'interlock.signal' group by tasks.id",
        simulation.namespaces,
    )
    for step in rows:
        assert step["payloads"] == ([step["result"]] if step["state"] == "done" else None), "consumed once, or never"
    rows = await simulation.rows(
        "select jobs.id, status, array_agg(to_state order by records.id) as states "
        "from interlock.jobs join interlock.job_state_transitions as records on job_id = jobs.id "
        "where namespace = any (%s) group by jobs.id",
        simulation.namespaces,
    )
    for job in rows:
        assert [state for state in job["states"] if state in ENDS] == [job["status"]]
