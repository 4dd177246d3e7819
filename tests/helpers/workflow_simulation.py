"""Random simulation of workers and orchestrators on one database: late, repeated, concurrent and crashing actions."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
from psycopg.rows import DictRow
from psycopg.types.json import Jsonb

from factories import claim_tasks
from interlock.client.step_context import step_result
from interlock.errors import DisconnectedError, InputError, PermanentError
from interlock.lifecycle import TaskRowEvent
from interlock.model.graph import chosen_branches
from interlock.postgres.connection import configure_adapters, connection_arguments
from interlock.store.limits import pause_namespace, resume_namespace
from interlock.store.task_admin import cancel_tasks, cancel_unfinished_tasks, recover_expired_tasks
from interlock.store.tasks import MAX_CRASHES, HeldAttempt, Outcome, renew_running_tasks, settle_running_tasks
from interlock.store.workflows import put_workflow
from interlock.workflow.advance import Advanced, advance, cancel_overdue_jobs, start_waiting_jobs
from interlock.workflow.cancel import cancel_job
from interlock.workflow.new_job import NewJob
from interlock.workflow.signals import end_due_waits, send_signal
from interlock.workflow.submit import submit_job
from random_definitions import RandomDefinition, random_definition
from workflow_oracle import Document, End
from workflow_oracle import Outcome as StepOutcome

if TYPE_CHECKING:
    from interlock.store.tasks import ClaimedTask

WORKERS = ("w_1", "w_2")
LEASE = timedelta(seconds=30)
QUEUE = "pgmq.q_orchestration_step_results"
MAX_CONCURRENT_ACTIONS = 3
MAX_RANDOM_ACTIONS = 200  # the rest is then done in order
OFTEN, SELDOM = 100, 10  # weights
MAX_IDLE_ROUNDS = 3  # rounds without an effect before the end is checked
SIGNAL_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Chances:
    """Percentages of injected faults."""

    crash: int = 0  # an orchestrator or a worker crashes between two statements
    lapse: int = 0  # a lease expires
    repeat: int = 0  # a message is repeated or delayed
    retry: int = 0  # an attempt is retried or returned
    pause: int = 0  # a namespace is paused
    together: int = 0  # several actions run concurrently


@dataclass(frozen=True, slots=True)
class Case:
    """A random definition, and the faults on the way."""

    definition: RandomDefinition
    jobs: int
    worker_count: int | None
    chances: Chances
    seed: int


def random_case(seed: int, *, cancel_rest: bool = False, together: bool = True) -> Case:
    """Make the case of a seed. Without `together`, the order of events is that of their times."""
    choose = random.Random(seed)  # noqa: S311 - reproducible choices, not secrets
    crash, lapse, repeat, retry, pause, concurrent = (choose.choice([0, 10, 30]) for _ in range(6))
    return Case(
        with_signals(random_definition(seed, cancel_rest=cancel_rest), choose),
        jobs=choose.choice([1, 1, 2]),
        worker_count=choose.choice([None, None, 1, 2]),
        chances=Chances(crash, lapse, repeat, retry, pause, concurrent if together else 0),
        seed=seed,
    )


def with_signals(definition: RandomDefinition, choose: random.Random) -> RandomDefinition:
    """Turn some plain steps into steps that wait for a signal; one that fails never gets it."""
    documents = {}
    for name, document in definition.documents.items():
        steps = []
        for step in document["steps"]:
            outcome = definition.outcomes.get(name, {}).get(step["name"], StepOutcome())
            is_plain = step.get("kind", "plain") == "plain" and "compensate" not in step
            if is_plain and outcome.end in {End.DONE, End.ERROR} and choose.randrange(8) == 0:
                kept = {key: value for key, value in step.items() if key not in _HANDLER_FIELDS}
                timeout = {"timeout": SIGNAL_TIMEOUT.total_seconds()} if outcome.end is End.ERROR else {}
                steps.append({**kept, "kind": "signal", "signal": step["name"], **timeout})
            else:
                steps.append(step)
        documents[name] = {**document, "steps": steps}
    return replace(definition, documents=documents)


_HANDLER_FIELDS = frozenset({"kind", "type", "max_tries", "timeout", "backoff"})


def renamed(document: Document, own: Callable[[str], str], choose: random.Random) -> Document:
    """Return a workflow with names that are unique to a case, and its steps in two namespaces."""
    steps = [
        {
            **step,
            "namespace": own(choose.choice(["red", "blue"])),
            **({"workflow": own(step["workflow"])} if "workflow" in step else {}),
        }
        for step in document["steps"]
    ]
    return {"version": "1", **document, "name": own(document["name"]), "namespace": own("red"), "steps": steps}


class BreakableConnection(psycopg.AsyncConnection[DictRow]):
    """A connection that closes after `fuse` statements, like that of a killed process."""

    fuse: int | None = None

    async def execute(self, *given: Any, **options: Any) -> Any:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                await self.close()
        return await super().execute(*given, **options)


Action = Callable[[BreakableConnection], Awaitable[Any]]


class ConnectionPool:
    """Connections to one database that cases reuse one after another, with their prepared statements."""

    def __init__(self, url: str) -> None:
        self.cases = 0
        self._url = url
        self._free: list[BreakableConnection] = []

    async def using(self, action: Action) -> Any:
        """Run an action on a connection of its own."""
        connection = self._free.pop() if self._free else await self._connect()
        try:
            return await action(connection)
        finally:
            connection.fuse = None
            if not connection.closed:
                self._free.append(connection)

    async def close(self) -> None:
        for connection in self._free:
            await connection.close()

    async def _connect(self) -> BreakableConnection:
        connection: Any = await BreakableConnection.connect(**connection_arguments(self._url))
        configure_adapters(connection)
        brittle: BreakableConnection = connection
        return brittle


class WorkflowSimulation:
    """The workers, orchestrators, users and clock of one case; its choices depend on the seed of the case.

    Cases share a database: names are made unique per case, and all work happens in the case's own namespaces.
    """

    def __init__(self, pool: ConnectionPool, case: Case) -> None:
        pool.cases += 1
        self.number = pool.cases
        self.using = pool.using
        self.random = random.Random(case.seed)  # noqa: S311 - reproducible choices, not secrets
        self.time = datetime(2040, 1, 1, tzinfo=UTC)
        self._has_worker = False
        self.case = case
        self.canceled_at: dict[UUID, datetime] = {}  # jobs and steps
        self.first_claims: dict[UUID, datetime] = {}
        self.jobs: list[UUID] = []
        self.done = Counter[str]()
        self.unwanted = 0  # percentage of attempts that obey a cancel request
        self.handed: list[tuple[str, str, Any]] = []  # job, step, results of its dependencies
        self._held: list[ClaimedTask] = []
        self._lapsed: list[ClaimedTask] = []
        self._lapses = Counter[UUID]()
        self._sent: set[tuple[UUID, str]] = set()
        self._types = [
            step[key]
            for document in case.definition.documents.values()
            for step in document["steps"]
            for key in ("type", "compensate")
            if step.get(key) is not None
        ]

    # --- the whole case

    async def begin(self) -> None:
        """Declare the workflows and submit the jobs, with a live worker or without."""
        await self.rows("select pgmq.purge_queue('orchestration_step_results')")
        definition = self.case.definition
        for document in definition.documents.values():
            await self.using(partial(put_workflow, document=renamed(document, self.own, self.random)))
        if self.chance(50):
            await self.serve()
        new = NewJob(self.own(definition.name), definition.job_input, worker_count=self.case.worker_count)
        for _ in range(self.case.jobs):
            submitted = await self.using(lambda connection: submit_job(connection, new, actor="ada", now=self.now()))
            self.jobs.append(submitted.id)

    async def run(self) -> None:
        """Act at random until all jobs have ended, at most MAX_RANDOM_ACTIONS times; then do the rest in order."""
        if not await self.act(MAX_RANDOM_ACTIONS):
            await self.finish()

    async def act(self, times: int) -> bool:
        """Act at random so many times; return whether all jobs have ended."""
        actions = self._actions()
        still = 0  # rounds without an effect
        idle: set[Action] = set()  # actions without an effect since the last effect
        for _ in range(times):
            actions |= {action: SELDOM if action in idle else OFTEN for action in (self.claim, self.advance)}
            actions[self.settle] = OFTEN if self._held else 0
            width = self.random.randint(2, MAX_CONCURRENT_ACTIONS) if self.chance(self.case.chances.together) else 1
            some = self.random.choices(list(actions), weights=list(actions.values()), k=width)
            before = self.done.total()
            # Alone: a lease that expires during a claim may use up the last try, which would change the outcome.
            await asyncio.gather(*(self.using(action) for action in (some[:1] if self.lapse in some else some)))
            if self.case.worker_count is not None:
                await self.check_worker_count(self.jobs)
            still = still + 1 if self.done.total() == before else 0
            idle = idle | set(some) if still else set()
            if still > MAX_IDLE_ROUNDS and not self._held:
                if await self.is_quiet():
                    return True
                await self.nudge()
                still, idle = 0, set()
        return False

    def _actions(self) -> dict[Action, int]:
        chances = self.case.chances
        return {
            self.signal: 20,
            self.tend: 10,
            self.lapse: chances.lapse,
            self.settle_too_late: chances.lapse,
            self.replay: chances.repeat,
            self.delay: chances.repeat,
            self.show: chances.repeat,
            self.pause: chances.pause // 3,
            self.resume: chances.pause,
            self.crowd: chances.together,
        }

    async def nudge(self) -> None:
        """Deliver everything that jobs wait for; if that has no effect, advance the clock."""
        before = self.done.total()
        for action in (self.show, self.resume, self.tend, self.signal_all, self.advance_calmly):
            await self.using(action)
        if self.done.total() == before:
            self.time += SIGNAL_TIMEOUT * 2
            await self.using(self.tend)

    async def finish(self) -> None:
        """Run maintenance, claims and settles in order until nothing changes."""
        for _ in range(MAX_RANDOM_ACTIONS):
            before = self.done.total()
            self.time += LEASE * 2  # every held lease has expired
            for action in (self.recover, self.claim_all, self.settle_all):
                await self.using(action)
            await self.nudge()
            if self.done.total() == before:
                return

    # --- workers

    async def claim(self, connection: BreakableConnection, most: int | None = None) -> None:
        moment = self.now()
        common: Any = {
            "actor": self.random.choice(WORKERS),
            "types": self._types,
            "namespaces": self.namespaces,
            "limit": most or self.random.randint(1, 5),
            "lease": LEASE,
            "now": moment,
        }
        claimed = await claim_tasks(connection, **common)
        claimed += await claim_tasks(connection, suspected=True, **common)
        for task in claimed:
            self.first_claims.setdefault(task.id, moment)
        self._held += claimed
        self.done["claimed"] += len(claimed)

    async def claim_all(self, connection: BreakableConnection) -> None:
        await self.claim(connection, 1000)

    async def settle(self, connection: BreakableConnection, most: int | None = None) -> None:
        """End some attempts in one statement, as a worker does; or die before it is committed."""
        held = self._held
        some = [held.pop(self.random.randrange(len(held))) for _ in range(min(len(held), most or 3))]
        some = await self._stop(connection, some) if self.unwanted else some
        if not some:
            return
        dies = most is None and self.chance(self.case.chances.crash)
        outcomes = [self._again(task) or self._outcome(task) for task in some]
        async with connection.transaction(force_rollback=dies):
            _, lost = await settle_running_tasks(connection, outcomes, actor="w", now=self.now())
        assert not lost, "the holder of the lease can settle"
        if dies:
            self._held += some
        else:
            self.done["settled"] += len(some)

    async def settle_all(self, connection: BreakableConnection) -> None:
        while self._held:
            await self.settle(connection, 50)

    async def settle_too_late(self, connection: BreakableConnection) -> None:
        """Settle an attempt whose lease expired; the settle must be refused."""
        if self._lapsed:
            task = self.random.choice(self._lapsed)
            wrong = Outcome(task.id, task.attempt, TaskRowEvent.SUCCEED, output={"result": "too late"})
            _, lost = await settle_running_tasks(connection, [wrong], actor="w_0", now=self.now())
            assert len(lost) == 1

    async def lapse(self, connection: BreakableConnection) -> None:
        """Let some leases expire and renew the others."""
        # The last lease before the limit is left for `finish`, where all expire.
        mortal = [task for task in self._held if self._lapses[task.id] < MAX_CRASHES - 2 and self.chance(50)]
        self._lapses.update(task.id for task in mortal)
        self._lapsed += mortal
        self._held = [task for task in self._held if task not in mortal]
        self.time += LEASE
        held = [HeldAttempt(task.id, task.attempt) for task in self._held]
        _, lost = await renew_running_tasks(connection, held, lease=LEASE, now=self.now())
        assert not lost
        await self.recover(connection)

    async def recover(self, connection: BreakableConnection) -> None:
        for task in await recover_expired_tasks(connection, actor="w", now=self.now()):
            assert task.event in {"expire", "cancel"}
            self._held = [held for held in self._held if held.id != task.id]
            self.done["recovered"] += 1

    async def _stop(self, connection: BreakableConnection, some: list[ClaimedTask]) -> list[ClaimedTask]:
        """Stop attempts whose job or step was canceled; return those that have not seen the request and go on."""
        query = "select id from interlock.tasks where id = any (%s) and cancel_requested_at is not null"
        rows = await self.rows(query, [task.id for task in some])
        asked = {row["id"] for row in rows if self.chance(self.unwanted)}
        stopped = [task for task in some if task.id in asked]
        ids, attempts = [task.id for task in stopped], [task.attempt for task in stopped]
        await cancel_unfinished_tasks(connection, ids, actor="w", attempts=attempts, running=True, now=self.now())
        self.done["stopped"] += len(stopped)
        return [task for task in some if task.id not in asked]

    def _again(self, task: ClaimedTask) -> Outcome | None:
        """Return a retry or return outcome, unless this is the last try."""
        if task.tries >= task.max_tries - 1 or not self.chance(self.case.chances.retry):
            return None
        event = self.random.choice([TaskRowEvent.RETRY, TaskRowEvent.RETURN])
        return Outcome(task.id, task.attempt, event, error={"message": "again"}, delay=0.0)

    def _outcome(self, task: ClaimedTask) -> Outcome:
        """Return the outcome that the case gives to a step."""
        job, step = task.own("job"), str(task.step)
        self.handed.append((task.own("job_id"), step, job["results"]))
        told: dict[str, Any] = {}
        try:
            result = self._result(job["workflow"].partition("-")[0], step)
            if job["kind"] == "decision":
                told["chosen"] = chosen_branches(job["branches"], result)
        except PermanentError as error:
            said = {"type": "PermanentError", "message": str(error), "traceback": None, "retryable": False}
            output = step_result(step, success=False, error=said)
            return Outcome(task.id, task.attempt, TaskRowEvent.FAIL, output, error=said, reason=str(error))
        output = step_result(step, success=True, result=result, orchestration_metadata=told)
        return Outcome(task.id, task.attempt, TaskRowEvent.SUCCEED, output)

    def _result(self, workflow: str, step: str) -> Any:
        is_undo = step.startswith("compensate:")
        declared, _, part = step.rpartition("/")[2].removeprefix("compensate:").partition("[")
        outcome = self.case.definition.outcomes.get(workflow, {}).get(declared, StepOutcome())
        if is_undo:
            fails = outcome.compensation_fails
        else:
            fails = int(part[:-1]) in outcome.failing_parts if part else outcome.end is End.ERROR
        if fails:
            raise PermanentError("no")
        return None if is_undo or part else outcome.result

    # --- orchestrators

    async def advance(self, connection: BreakableConnection) -> None:
        """Advance some messages, or crash after any of the statements."""
        if self.chance(self.case.chances.crash):
            connection.fuse = self.random.randrange(8)
        limit, visibility = self.random.choice([1, 1, 2, 5, 100]), self.random.choice([0, 1000])
        try:
            done = await advance(connection, actor="o_1", limit=limit, visibility=visibility, now=self.now())
        except DisconnectedError:
            assert connection.fuse is not None
            self.done["crashed"] += 1
        else:
            self._note(done)

    async def crowd(self, connection: BreakableConnection) -> None:
        """Advance three messages concurrently; they may belong to the same job or step."""

        async def one(connection: BreakableConnection) -> None:
            self._note(await advance(connection, actor="o_3", limit=1, now=self.now()))

        await asyncio.gather(one(connection), self.using(one), self.using(one))

    async def advance_calmly(self, connection: BreakableConnection) -> None:
        self._note(await advance(connection, actor="o_2", now=self.now()))

    def _note(self, done: Advanced) -> None:
        assert not done.failed
        self.done["advanced"] += done.advanced
        self.done["duplicates"] += done.duplicates

    async def tend(self, connection: BreakableConnection) -> None:
        """Run the orchestrator's maintenance."""
        await self.serve()
        self.done["started"] += await start_waiting_jobs(connection, actor="o_1", now=self.now())
        self.done["expired"] += await end_due_waits(connection, actor="o_1", now=self.now())
        assert not await cancel_overdue_jobs(connection, actor="o_1", now=self.now())

    # --- users, signals and messages

    async def signal(self, connection: BreakableConnection) -> None:
        """Send a job one of its signals, early, late or again."""
        found = await self._signals()
        if found:
            await self._send(connection, *self.random.choice(found))

    async def signal_all(self, connection: BreakableConnection) -> None:
        for job_id, name, payload in await self._signals():
            if (job_id, name) not in self._sent:
                await self._send(connection, job_id, name, payload)

    async def _signals(self) -> list[tuple[UUID, str, Any]]:
        """List the signals of all jobs, without those that never come."""
        rows = await self.rows(
            "select jobs.id, steps.step, steps.spec ->> 'signal' as signal, split_part(workflows.name, '-', 1) as name "
            "from interlock.jobs join interlock.workflow_steps as steps using (workflow_id) "
            "join interlock.workflows on workflows.id = workflow_id "
            "where jobs.namespace = any (%s) and kind in ('signal', 'approval') order by jobs.id, steps.step",
            self.namespaces,
        )
        outcomes = self.case.definition.outcomes
        found = [(row, outcomes.get(row["name"], {}).get(row["step"], StepOutcome())) for row in rows]
        return [(row["id"], row["step"], outcome.result) for row, outcome in found if outcome.end is End.DONE]

    async def _send(self, connection: BreakableConnection, job_id: UUID, name: str, payload: Any) -> None:
        self._sent.add((job_id, name))
        try:
            for request_id in (f"{name}-1", f"{name}-1", *([None] if self.chance(30) else [])):
                self.done["signaled"] += await send_signal(
                    connection, job_id, name, payload, actor="eva", request_id=request_id, now=self.now()
                )
        except InputError as error:
            if "cannot reach it any more" not in str(error):
                raise

    async def cancel_job(self, job_id: UUID) -> bool:
        moment = self.now()
        found: bool = await self.using(lambda connection: cancel_job(connection, job_id, actor="ada", now=moment))
        if found:
            self.canceled_at[job_id] = moment
        return found

    async def cancel_step(self, task_id: UUID) -> None:
        moment = self.now()
        found = await self.using(lambda connection: cancel_tasks(connection, [task_id], actor="ada", now=moment))
        if found.canceled or found.requested:
            self.canceled_at.setdefault(task_id, moment)

    async def replay(self, connection: BreakableConnection) -> None:
        """Send result messages for steps in any state."""
        rows = await self.rows(
            "select job_id, id as task_id, correlation_id from interlock.tasks where namespace = any (%s) order by id",
            self.namespaces,
        )
        for row in self.random.choices(rows, k=3):
            said = Jsonb({key: str(value) for key, value in row.items()})
            await connection.execute("select pgmq.send('orchestration_step_results', %s::jsonb)", [said])

    async def delay(self, connection: BreakableConnection) -> None:
        """Hide some messages for an hour, so that later ones come first."""
        rows = await self.rows(f"select msg_id from {QUEUE} order by msg_id")
        some = [row["msg_id"] for row in rows if self.chance(50)]
        await connection.execute(f"update {QUEUE} set vt = vt + interval '1 hour' where msg_id = any (%s)", [some])

    async def show(self, connection: BreakableConnection) -> None:
        """Make all delayed messages visible."""
        await connection.execute(f"update {QUEUE} set vt = clock_timestamp() where vt > clock_timestamp()")

    async def pause(self, connection: BreakableConnection) -> None:
        name = self.random.choice(self.namespaces)
        self.done["paused"] += await pause_namespace(connection, name, None, "ada", now=self.now())

    async def resume(self, connection: BreakableConnection) -> None:
        for name in self.namespaces:
            self.done["resumed"] += await resume_namespace(connection, name, "ada", now=self.now())

    # --- clock, names, queries and checks

    def now(self) -> datetime:
        """Advance the clock by 10 ms and return it, so that every action has its own time."""
        self.time += timedelta(milliseconds=10)
        return self.time

    def own(self, name: str) -> str:
        """Make a name unique to this case."""
        return f"{name}-{self.number}"

    @property
    def namespaces(self) -> list[str]:
        return [self.own("red"), self.own("blue")]

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    async def rows(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        async def ask(connection: BreakableConnection) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = await (await connection.execute(query, parameters)).fetchall()
            return found

        asked: list[dict[str, Any]] = await self.using(ask)
        return asked

    async def is_quiet(self) -> bool:
        """Return whether all jobs have ended and the queue is empty."""
        (row,) = await self.rows(
            "select (select count(*) from interlock.jobs where namespace = any (%s) and completed_at is null) as jobs, "
            f"(select count(*) from {QUEUE}) as messages",
            self.namespaces,
        )
        return not row["jobs"] and not row["messages"]

    async def serve(self) -> None:
        """Insert the row of a live worker, once."""
        if not self._has_worker:
            self._has_worker = True
            await self.rows(
                "insert into interlock.workers (id, namespaces, types, seen_until) "
                "values (%s, %s::text[], '{}', 'infinity') returning id",
                self.own("worker"),
                self.namespaces,
            )
            query = "update interlock.workers set status = 'RUNNING', event = 'start_task' where id = %s returning id"
            await self.rows(query, self.own("worker"))

    async def check_worker_count(self, jobs: list[UUID]) -> None:
        """Check that no job exceeds its `worker_count`."""
        rows = await self.rows(
            "select count(*) as steps, worker_count from interlock.jobs join interlock.tasks on job_id = jobs.id "
            "where jobs.id = any (%s) and worker_count is not null and state in ('pending', 'running') "
            "group by jobs.id having count(*) > worker_count",
            jobs,
        )
        assert rows == []
