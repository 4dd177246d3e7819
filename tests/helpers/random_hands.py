"""Hands that do what workers and orchestrators do, at random: late, twice, at the same time, or only by half."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from psycopg.types.json import Jsonb

from interlock.client.step_context import StepContext, end_step, step_result
from interlock.errors import DisconnectedError, InputError, PermanentError
from interlock.lifecycle import TaskRowEvent
from interlock.model.graph import chosen_branches
from interlock.store.limits import pause_namespace, resume_namespace
from interlock.store.task_admin import cancel_unfinished_tasks, recover_expired_tasks
from interlock.store.tasks import HeldAttempt, Outcome, claim_pending_tasks, renew_running_tasks, settle_running_tasks
from interlock.store.workflows import put_workflow
from interlock.workflow.advance import Advanced, advance, cancel_overdue_jobs, start_waiting_jobs
from interlock.workflow.cancel import cancel_job
from interlock.workflow.dry_run import Failed
from interlock.workflow.new_job import NewJob
from interlock.workflow.signals import expire_overdue_signals, send_signal
from interlock.workflow.submit import submit_job
from random_crew import QUEUE, Act, Brittle, Crew
from random_support import INPUT, LATE, MAIN, PATIENCE, Case, renamed

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.store.tasks import ClaimedTask
    from random_crew import Place

TYPES = ("work", "undo", "interlock.pass")
WORKERS = ("w_1", "w_2")
LEASE = timedelta(seconds=30)
TOGETHER = 3  # acts at the same time, at the most
LONGEST = 200  # acts at random, before what is left is done in good order
OFTEN, SELDOM = 100, 10
PATIENT = 3  # times that nothing came of anything, before somebody looks whether anything is left


class Hands(Crew):
    """Everybody who works on the jobs of one case."""

    def __init__(self, place: Place, case: Case) -> None:
        super().__init__(place, case.seed)
        self.case = case
        self.outcomes = case.outcomes
        self.jobs: list[UUID] = []
        self.done = Counter[str]()
        self.unwanted = 0  # of a hundred attempts that are asked to stop, how many do
        self.handed: list[tuple[str, str, Any]] = []  # job, step, results of those before it
        self._held: list[ClaimedTask] = []
        self._lapsed: list[ClaimedTask] = []
        self._sent: set[tuple[UUID, str]] = set()

    # --- from the beginning to the end

    async def begin(self) -> None:
        """Declare the workflows and submit the jobs, before or after somebody is there to work on them."""
        await self.rows("select pgmq.purge_queue('orchestration_step_results')")
        for document in self.case.documents.values():
            await self.using(partial(put_workflow, document=renamed(document, self.own)))
        if self.chance(50):
            await self.serve()
        new = NewJob(self.own(MAIN), INPUT, worker_count=self.case.worker_count)
        for _ in range(self.case.jobs):
            submitted = await self.using(lambda connection: submit_job(connection, new, actor="ada", now=self.now()))
            self.jobs.append(submitted.id)

    async def run(self) -> None:
        """Do this and that until all is done, or for so long; then do the rest in good order."""
        if not await self.act(LONGEST):
            await self.finish()

    async def act(self, times: int) -> bool:
        """Do this and that so many times; tell whether all is done."""
        acts = self._acts()
        still = 0  # times that nothing came of it
        idle: set[Act] = set()  # those who found nothing to do, and nothing has happened since
        for _ in range(times):
            acts |= {act: SELDOM if act in idle else OFTEN for act in (self.claim, self.advance)}
            acts[self.settle] = OFTEN if self._held else 0
            width = self.random.randint(2, TOGETHER) if self.chance(self.case.chances.together) else 1
            some = self.random.choices(list(acts), weights=list(acts.values()), k=width)
            before = self.done.total()
            # alone: a lease that runs out while somebody claims may use up the last try, which would change the outcome
            await asyncio.gather(*(self.using(act) for act in (some[:1] if self.lapse in some else some)))
            if self.case.worker_count is not None:
                await self.check_worker_count(self.jobs)
            still = still + 1 if self.done.total() == before else 0
            idle = idle | set(some) if still else set()
            if still > PATIENT and not self._held:
                if await self.is_quiet():
                    return True
                await self.nudge()
                still, idle = 0, set()
        return False

    def _acts(self) -> dict[Act, int]:
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
        """Let everything come that is awaited; time, if it is nothing else."""
        before = self.done.total()
        for act in (self.show, self.resume, self.tend, self.signal_all, self.advance_calmly):
            await self.using(act)
        if self.done.total() == before:
            self.time += PATIENCE * 2
            await self.using(self.tend)

    async def finish(self) -> None:
        """Do what is left to do until nothing moves any more."""
        for _ in range(LONGEST):
            before = self.done.total()
            self.time += LEASE * 2  # whatever was held has lapsed
            for act in (self.recover, self.claim_all, self.settle_all):
                await self.using(act)
            await self.nudge()
            if self.done.total() == before:
                return

    # --- what workers do

    async def claim(self, connection: Brittle, most: int | None = None) -> None:
        claimed = await claim_pending_tasks(
            connection,
            actor=self.random.choice(WORKERS),
            types=TYPES,
            namespaces=self.namespaces,
            limit=most or self.random.randint(1, 5),
            lease=LEASE,
            now=self.now(),
        )
        self._held += claimed
        self.done["claimed"] += len(claimed)

    async def claim_all(self, connection: Brittle) -> None:
        await self.claim(connection, 1000)

    async def settle(self, connection: Brittle, most: int | None = None) -> None:
        """End some attempts in one statement, as a worker does; or die before it is committed."""
        held = self._held
        some = [held.pop(self.random.randrange(len(held))) for _ in range(min(len(held), most or 3))]
        some = await self._stop(connection, some) if self.unwanted else some
        if not some:
            return
        dies = most is None and self.chance(self.case.chances.crash)
        outcomes = [self._again(task) or await self._outcome(task) for task in some]
        async with connection.transaction(force_rollback=dies):
            _, lost = await settle_running_tasks(connection, outcomes, actor="w", now=self.now())
        assert not lost, "whoever holds the lease can settle"
        if dies:
            self._held += some
        else:
            self.done["settled"] += len(some)

    async def settle_all(self, connection: Brittle) -> None:
        while self._held:
            await self.settle(connection, 50)

    async def settle_too_late(self, connection: Brittle) -> None:
        """Come back from the dead, and write what nobody wants any more."""
        if self._lapsed:
            task = self.random.choice(self._lapsed)
            wrong = Outcome(task.id, task.attempt, TaskRowEvent.SUCCEED, output={"result": "from the dead"})
            _, lost = await settle_running_tasks(connection, [wrong], actor="w_0", now=self.now())
            assert len(lost) == 1

    async def lapse(self, connection: Brittle) -> None:
        """Let the leases of some run out, and those of the others be renewed."""
        mortal = [task for task in self._held if task.tries < task.max_tries - 1 and self.chance(50)]
        self._lapsed += mortal
        self._held = [task for task in self._held if task not in mortal]
        self.time += LEASE
        held = [HeldAttempt(task.id, task.attempt) for task in self._held]
        _, lost = await renew_running_tasks(connection, held, lease=LEASE, now=self.now())
        assert not lost
        await self.recover(connection)

    async def recover(self, connection: Brittle) -> None:
        for task in await recover_expired_tasks(connection, actor="w", now=self.now()):
            assert task.event in {"expire", "cancel"}
            self._held = [held for held in self._held if held.id != task.id]
            self.done["recovered"] += 1

    async def _stop(self, connection: Brittle, some: list[ClaimedTask]) -> list[ClaimedTask]:
        """Stop attempts whose job was canceled; give those that go on, because they have not heard of it."""
        query = "select id from interlock.tasks where id = any (%s) and cancel_requested_at is not null"
        rows = await self.rows(query, [task.id for task in some])
        asked = {row["id"] for row in rows if self.chance(self.unwanted)}
        stopped = [task for task in some if task.id in asked]
        ids, attempts = [task.id for task in stopped], [task.attempt for task in stopped]
        await cancel_unfinished_tasks(connection, ids, actor="w", attempts=attempts, running=True, now=self.now())
        self.done["stopped"] += len(stopped)
        return [task for task in some if task.id not in asked]

    def _again(self, task: ClaimedTask) -> Outcome | None:
        """Let an attempt end that is not the last one."""
        if task.tries >= task.max_tries - 1 or not self.chance(self.case.chances.retry):
            return None
        event = self.random.choice([TaskRowEvent.RETRY, TaskRowEvent.RETURN])
        return Outcome(task.id, task.attempt, event, error={"message": "again"}, delay=0.0)

    async def _outcome(self, task: ClaimedTask) -> Outcome:
        """Let the handler of a step do what the case says, and the built-in one what it does in a worker."""
        job, step = task.own("job"), str(task.step)
        self.handed.append((task.own("job_id"), step, job["results"]))
        told: dict[str, Any] = {}
        try:
            if task.type == "interlock.pass":
                result = await end_step(StepContext(job=job))
            else:
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
        told = self.outcomes[workflow][step]
        if isinstance(told, Failed):
            raise PermanentError(told.message)
        return told

    # --- what orchestrators do

    async def advance(self, connection: Brittle) -> None:
        """Take some messages, or die after any of the statements that this takes."""
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

    async def crowd(self, connection: Brittle) -> None:
        """Take messages at the same time as others, one each: they may be of the same job, or of the same step."""

        async def one(connection: Brittle) -> None:
            self._note(await advance(connection, actor="o_3", limit=1, now=self.now()))

        await asyncio.gather(one(connection), self.using(one), self.using(one))

    async def advance_calmly(self, connection: Brittle) -> None:
        self._note(await advance(connection, actor="o_2", now=self.now()))

    def _note(self, done: Advanced) -> None:
        assert not done.failed
        self.done["advanced"] += done.advanced
        self.done["duplicates"] += done.duplicates

    async def tend(self, connection: Brittle) -> None:
        """Do what only time brings about."""
        await self.serve()
        self.done["started"] += await start_waiting_jobs(connection, actor="o_1", now=self.now())
        self.done["expired"] += await expire_overdue_signals(connection, actor="o_1", now=self.now())
        assert not await cancel_overdue_jobs(connection, actor="o_1", now=self.now())

    # --- what comes from outside

    async def signal(self, connection: Brittle) -> None:
        """Send a job one of its signals, whether it is time for it or not, and whether it was sent before or not."""
        found = await self._signals()
        if found:
            await self._send(connection, *self.random.choice(found))

    async def signal_all(self, connection: Brittle) -> None:
        for job_id, name, payload in await self._signals():
            if (job_id, name) not in self._sent:
                await self._send(connection, job_id, name, payload)

    async def _signals(self) -> list[tuple[UUID, str, Any]]:
        """Tell the signals of all jobs, of those that come at all."""
        rows = await self.rows(
            "select jobs.id, steps.step, steps.spec ->> 'signal' as signal, split_part(workflows.name, '-', 1) as name "
            "from interlock.jobs join interlock.workflow_steps as steps using (workflow_id) "
            "join interlock.workflows on workflows.id = workflow_id "
            "where jobs.namespace = any (%s) and kind in ('signal', 'approval') order by jobs.id, steps.step",
            self.namespaces,
        )
        names = [(row["id"], row["name"], row["signal"] or row["step"]) for row in rows]
        told = [(id_, name, self.outcomes[workflow][f"signal {name}"]) for id_, workflow, name in names]
        return [(id_, name, payload) for id_, name, payload in told if payload != LATE]

    async def _send(self, connection: Brittle, job_id: UUID, name: str, payload: Any) -> None:
        other = {"approved": True} if isinstance(payload, dict) and "approved" in payload else "other"
        self._sent.add((job_id, name))
        try:
            self.done["signaled"] += await send_signal(connection, job_id, name, payload, actor="eva", now=self.now())
            assert not await send_signal(connection, job_id, name, other, actor="eva", now=self.now())
        except InputError as error:
            if "cannot reach it any more" not in str(error):
                raise

    async def cancel_job(self, job_id: UUID) -> bool:
        found: bool = await self.using(lambda connection: cancel_job(connection, job_id, actor="ada", now=self.now()))
        return found

    async def replay(self, connection: Brittle) -> None:
        """Send messages again, of steps that ended long ago, or are far from it."""
        rows = await self.rows(
            "select job_id, id as task_id, correlation_id from interlock.tasks where namespace = any (%s) order by id",
            self.namespaces,
        )
        for row in self.random.choices(rows, k=3):
            said = Jsonb({key: str(value) for key, value in row.items()})
            await connection.execute("select pgmq.send('orchestration_step_results', %s::jsonb)", [said])

    async def delay(self, connection: Brittle) -> None:
        """Let some messages come after others that were sent later."""
        rows = await self.rows(f"select msg_id from {QUEUE} order by msg_id")
        some = [row["msg_id"] for row in rows if self.chance(50)]
        await connection.execute(f"update {QUEUE} set vt = vt + interval '1 hour' where msg_id = any (%s)", [some])

    async def show(self, connection: Brittle) -> None:
        """Let everything come that was delayed."""
        await connection.execute(f"update {QUEUE} set vt = clock_timestamp() where vt > clock_timestamp()")

    async def pause(self, connection: Brittle) -> None:
        name = self.random.choice(self.namespaces)
        self.done["paused"] += await pause_namespace(connection, name, None, "ada", now=self.now())

    async def resume(self, connection: Brittle) -> None:
        for name in self.namespaces:
            self.done["resumed"] += await resume_namespace(connection, name, "ada", now=self.now())
