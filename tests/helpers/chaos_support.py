"""Chaos runs: worker and orchestrator processes killed at random, and the check of the rows afterwards."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos_app import GATE, NAMES, app, expected, input_of, steps_of
from interlock.postgres.connection import connect
from interlock.store.workflows import put_workflow
from interlock.workflow.new_job import NewJob
from interlock.workflow.signals import send_signal
from interlock.workflow.submit import submit_jobs

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from interlock.postgres.connection import Connection

TESTS = Path(__file__).parent
QUEUE = "pgmq.q_orchestration_step_results"
WORKER, ORCHESTRATOR = "worker", "orchestrator"
MANY = 10
# faults and their weights
HARMS = {"kill": 60, "cut": 20, "freeze": 10, "repeat": 10}


@dataclass(slots=True)
class Running:
    """One worker or orchestrator process."""

    role: str
    name: str
    process: subprocess.Popen[bytes]
    frozen: bool = False


@dataclass(slots=True)
class Findings:
    """The findings of a run. All but the first two must be empty."""

    jobs: int = 0
    steps: int = 0
    missing: list[UUID] = field(default_factory=list)  # jobs that have not ended
    wrong: list[str] = field(default_factory=list)  # jobs with another end than expected
    ends: list[str] = field(default_factory=list)  # jobs and steps that did not end exactly once
    left: dict[str, int] = field(default_factory=dict)  # messages, leases, failures
    idle_deaths: int = 0  # killed workers, if none of them held a task

    @property
    def faults(self) -> list[str]:
        """Describe the violations, at most a few of each kind."""
        said = [f"job {id_} has not ended" for id_ in self.missing[:5]] + self.wrong[:5] + self.ends[:5]
        said += [f"{count} {what} left" for what, count in self.left.items() if count]
        return said + [f"none of {self.idle_deaths} killed workers had anything to do"] * (self.idle_deaths >= MANY)


class Chaos:
    """Keeps a number of workers and orchestrators running, and kills them at random."""

    def __init__(
        self,
        url: str,
        logs: Path,
        *,
        seed: int = 0,
        workers: int = 2,
        orchestrators: int = 2,
        concurrency: int = 20,
        at_once: int = 200,
        backlog: int = 1_500,
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.counts = Counter[str]()
        self.jobs: dict[UUID, tuple[str, int]] = {}
        self._url = url
        self._logs = logs
        self._random = random.Random(seed)  # noqa: S311 - reproducible choices, not secrets
        self._fate = random.Random(seed)  # noqa: S311 - a second one: the order of faults must not depend on victims
        self._wanted = [WORKER] * workers + [ORCHESTRATOR] * orchestrators
        self._concurrency = concurrency
        self._at_once = at_once  # jobs per submit
        self._backlog = backlog  # unfinished jobs to keep, so that faults hit busy processes
        self._told = told
        self._running: list[Running] = []
        self._thawing: set[asyncio.Task[None]] = set()

    async def run(self, steps: int, *, every: float, harms: int | None = None, within: float = 3600) -> Findings:
        """Run jobs of `steps` steps in all; inject a fault every `every` seconds, `harms` times or until all jobs end.

        With `harms`, some jobs are submitted directly before each fault, so that every fault hits unfinished jobs.
        """
        began = time.monotonic()
        self._plan(steps)
        async with connect(self._url) as connection:
            for workflow in app.workflows.values():
                await put_workflow(connection, workflow.document)
            try:
                self._replace()
                await self._rage(connection, every, harms, began + within)
            finally:
                self._end()
            return await self._look(connection)

    def _plan(self, steps: int) -> None:
        planned, n = 0, 0
        self._left: list[tuple[str, int]] = []
        while planned < steps:
            job = NAMES[n % len(NAMES)], n
            self._left.append(job)
            planned += steps_of(*job)
            n += 1
        self.counts["steps"], self.counts["jobs"] = planned, n
        self._left.reverse()

    async def _rage(self, connection: Connection, every: float, harms: int | None, until: float) -> None:
        fates = self._fate.choices(list(HARMS), weights=list(HARMS.values()), k=harms or 0)
        while True:
            unfinished = await self._unfinished(connection)
            if not unfinished and not self._left:
                return
            if time.monotonic() > until:
                return
            ended = max(len(self.jobs) - unfinished, 0)
            self._told(f"about {ended:,} of {self.counts['jobs']:,} jobs have ended, {self.counts['killed']:,} kills")
            await asyncio.sleep(every)
            kept = self.counts["jobs"] * (len(fates) - 1) // harms if harms and fates else 0
            while len(self._left) > kept and unfinished < self._backlog:
                unfinished += await self._submit(connection)
            if harms is None:
                await self._harm(connection, *self._fate.choices(list(HARMS), weights=list(HARMS.values())))
            elif fates and await self._harm(connection, fates[-1]):
                fates.pop()
            self._replace()

    async def _harm(self, connection: Connection, harm: str) -> bool:
        """Inject a fault; return whether it had a target."""
        act = {"kill": self._kill, "cut": self._cut, "freeze": self._freeze, "repeat": self._repeat}[harm]
        has_met = await act(connection)
        self.counts["harms"] += has_met
        return has_met

    async def _unfinished(self, connection: Connection) -> int:
        query = (
            "select (select count(*) from interlock.jobs where status in ('SUBMITTED', 'PENDING', 'RUNNING')) "
            f"+ (select count(*) from {QUEUE}) as unfinished"
        )
        (row,) = await (await connection.execute(query)).fetchall()
        found: int = row["unfinished"]
        return found

    async def _submit(self, connection: Connection) -> int:
        some = [self._left.pop() for _ in range(min(self._at_once, len(self._left)))]
        new = [NewJob(name, input_of(name, n), worker_count=2 if name == "fan" and n % 2 else None) for name, n in some]
        submitted = await submit_jobs(connection, new, actor="chaos")
        for (name, n), job in zip(some, submitted, strict=True):
            self.jobs[job.id] = (name, n)
            if name == "gate":
                await send_signal(connection, job.id, GATE, n, actor="chaos")
        return len(some)

    # --- the processes

    def _replace(self) -> None:
        """Start the missing processes."""
        self._running = [each for each in self._running if each.process.poll() is None]
        missing = Counter(self._wanted) - Counter(each.role for each in self._running)
        for role in missing.elements():
            self.counts["started"] += 1
            self._running.append(self._start(role, f"{role[0]}{self.counts['started']}"))

    def _start(self, role: str, name: str) -> Running:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("INTERLOCK_")}
        environment |= {
            "INTERLOCK_DATABASE_URL": self._url,
            "INTERLOCK_APP": "chaos_app:app",
            "INTERLOCK_WORKER_NAME": name,
            "INTERLOCK_CONCURRENCY": str(self._concurrency),
            "INTERLOCK_LEASE": "1",
            "INTERLOCK_LOG_LEVEL": "warning",
            "INTERLOCK_LOG_FORMAT": "json",
            "PYTHONPATH": str(TESTS),
        }
        with (self._logs / f"{role}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"interlock.{role}"], env=environment, stdout=log, stderr=log
            )
        return Running(role, name, process)

    def _end(self) -> None:
        for each in self._running:
            each.process.send_signal(signal.SIGCONT)
            each.process.terminate()
        for each in self._running:
            try:
                each.process.wait(15)
            except subprocess.TimeoutExpired:
                self.counts["hung"] += 1
                each.process.kill()
                each.process.wait()
        self._running = []

    async def _victim(self, connection: Connection) -> Running | None:
        """Choose a process, usually one that has registered and, if a worker, has tasks; both kinds equally likely."""
        rows = await (
            await connection.execute("select split_part(id, '-', 1) as name from interlock.workers")
        ).fetchall()
        arrived = {row["name"] for row in rows} if self._random.random() < 0.9 else None
        role = self._random.choice([WORKER, ORCHESTRATOR])
        found = [each for each in self._running if each.role == role and (arrived is None or each.name in arrived)]
        if role == WORKER and arrived is not None:
            busy = await self._busy_workers(connection)
            found = [each for each in found if each.name in busy]
        return self._random.choice(found) if found else None

    async def _busy_workers(self, connection: Connection) -> set[str]:
        """Return the names of the workers that hold tasks, as soon as some do; none after two seconds."""
        held = (
            "select distinct split_part(worker_id, '-', 1) as name from interlock.tasks where lease_expires_at > now()"
        )
        until = time.monotonic() + 2
        while not (rows := await _rows(connection, held)) and time.monotonic() < until:
            await asyncio.sleep(0.001)
        return {row["name"] for row in rows}

    # --- the faults

    async def _kill(self, connection: Connection) -> bool:
        victim = await self._victim(connection)
        if victim is None:
            return False
        victim.process.kill()
        victim.process.wait()
        self.counts["killed"] += 1
        self.counts[f"killed {victim.role}s"] += 1
        return True

    async def _cut(self, connection: Connection) -> bool:
        """Terminate some backends at random."""
        rows = await (
            await connection.execute(
                "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() "
                "and backend_type = 'client backend' order by pid"
            )
        ).fetchall()
        for row in self._random.sample(rows, min(len(rows), self._random.randint(1, 3))):
            await connection.execute("select pg_terminate_backend(%s)", [row["pid"]])
            self.counts["cut connections"] += 1
        return bool(rows)

    async def _freeze(self, connection: Connection) -> bool:
        """Freeze a process (SIGSTOP) for longer than its leases last, then let it continue."""
        victim = await self._victim(connection)
        if victim is None or victim.frozen:
            return False
        victim.process.send_signal(signal.SIGSTOP)
        victim.frozen = True
        self.counts["frozen"] += 1
        task = asyncio.create_task(self._thaw(victim))
        self._thawing.add(task)
        task.add_done_callback(self._thawing.discard)
        return True

    async def _thaw(self, victim: Running) -> None:
        await asyncio.sleep(self._random.uniform(1.2, 2.5))
        with suppress(ProcessLookupError):
            victim.process.send_signal(signal.SIGCONT)
        victim.frozen = False

    async def _repeat(self, connection: Connection) -> bool:
        """Send queue messages again that were processed, or are about to be."""
        rows = await (
            await connection.execute(
                "select pgmq.send(orchestration_queue, jsonb_build_object('job_id', job_id, 'task_id', ended.id)) "
                "from interlock.settings cross join lateral ("
                "select job_id, id from interlock.tasks where job_id is not null order by random() limit 50) as ended"
            )
        ).fetchall()
        self.counts["repeated messages"] += len(rows)
        return bool(rows)

    # --- the check

    async def _look(self, connection: Connection) -> Findings:
        rows = partial(_rows, connection)
        found = Findings(jobs=len(self.jobs))
        compensated = {
            row["job_id"]: tuple(row["steps"])
            for row in await rows(
                "select job_id, array_agg(substr(step, 12) order by substr(step, 12)) as steps "
                "from interlock.tasks where step like 'compensate:%' and state = 'done' group by job_id"
            )
        }
        for row in await rows("select id, status, output, parent_job_id from interlock.jobs"):
            if row["parent_job_id"] is not None:
                continue
            told = row["status"], row["output"], compensated.get(row["id"], ())
            if row["status"] not in {"COMPLETED", "FAILED"}:
                found.missing.append(row["id"])
            elif told != expected(*self.jobs[row["id"]]):
                found.wrong.append(f"job {row['id']} {self.jobs[row['id']]} ended as {told}")
        await self._count(found, rows)
        self.counts["lost outcomes refused"] = sum(
            path.read_text(encoding="utf-8", errors="replace").count('"lease_lost"')
            for path in self._logs.glob("*.log")
        )
        return found

    async def _count(self, found: Findings, rows: Callable[[str], Any]) -> None:
        ends = await rows(
            "select 'job ' || job_id as what, count(*) as ends from interlock.job_state_transitions "
            "where to_state in ('COMPLETED', 'FAILED', 'CANCELED') group by job_id having count(*) <> 1 "
            "union all select 'step ' || step || ' of job ' || job_id, ends from interlock.tasks, lateral ("
            "select count(*) as ends from interlock.audit_logs where task_id = tasks.id "
            "and to_state in ('done', 'error', 'skipped', 'canceled')) as ended where ends <> 1"
        )
        found.ends = [f"{row['what']} ended {row['ends']} times" for row in ends]
        (row,) = await rows(
            "select count(*) as steps, "
            "count(*) filter (where state not in ('done', 'error', 'skipped')) as unfinished, "
            "count(*) filter (where lease_expires_at is not null) as leases, "
            "count(*) filter (where error ->> 'type' = 'WorkerCrashed' and state = 'error') as exhausted, "
            f"(select count(*) from {QUEUE}) as messages, "
            "(select count(*) from interlock.orchestration_failures) as failures, sum(attempt) as attempts "
            "from interlock.tasks"
        )
        found.steps = row["steps"]
        found.left = {
            "unfinished steps": row["unfinished"] + abs(row["steps"] - self.counts["steps"]),
            "leases": row["leases"],
            "steps that ended because of crashes": row["exhausted"],
            "messages": row["messages"],
            "messages put aside": row["failures"],
        }
        events = await rows("select event, count(*) as times from interlock.audit_logs group by event")
        times = {row["event"]: row["times"] for row in events}
        self.counts["recoveries"] = times.get("expire", 0) + times.get("exhaust", 0)
        self.counts["attempts"] = row["attempts"]
        found.idle_deaths = 0 if self.counts["recoveries"] else self.counts["killed workers"]


async def _rows(connection: Connection, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = await (await connection.execute(query.encode())).fetchall()
    return found
