"""Load test of the supervisor's API: many concurrent clients on a filled database; no update may be lost.

Run: `./dev bench api`. One durable embedded server in a temporary directory, one `interlock supervisor` process, and
the clients in this process. Afterwards the records are checked: every move that was answered with 200 must be recorded
once, and each must start in the state in which the previous one ended.

For comparison a bare FastAPI app with a psycopg pool is served by uvicorn with the same settings, in a process of its
own: one handler reads a row of `tasks`, one inserts a row. Both are asked in turn, supervisor and bare app, in slices.

At the end one client asks for a page of each list with each filter, most of them with a value that no row has.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx

from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.migrate import migrate
from interlock.store.workers import RegisteredProcess, record_heartbeat, register_worker
from machine import described, processor_time

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from api_support import supervisor_at

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DAY = timedelta(days=1)
EXPECTED = frozenset({200, 201, 409})
READ_SHARE = 0.6  # of all requests
HEARTBEAT_INTERVAL_S = 5.0


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--workers", type=int, default=10, help="rows that all clients pause and resume")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random requests")
    parser.add_argument("--tasks", type=int, default=241_000, help="ended tasks in the database")
    parser.add_argument("--jobs", type=int, default=20_000, help="ended jobs in the database")
    parser.add_argument("--slices", type=int, default=4, help="of the comparison, each --seconds / 30 long")
    parser.add_argument("--pages", type=int, default=50, help="that are read of each list with each filter")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


class Load:
    """The requests of the clients, and their outcomes."""

    def __init__(self, client: httpx.AsyncClient, workers: list[str], seed: int) -> None:
        self._client = client
        self._workers = workers
        self._random = random.Random(seed)  # noqa: S311 - not for security
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.statuses: Counter[str] = Counter()
        self.faults: list[str] = []
        self.shares: dict[str, tuple[float, float]] = {}  # requests a second of the supervisor and of the bare app
        self.pages: dict[str, list[float]] = {}  # seconds of the pages of each list
        self.used = 0.0  # processor time of the supervisor in seconds
        self.moved: Counter[str] = Counter()  # moves of each worker or task that were answered with 200
        self._reads: list[Callable[[], Awaitable[None]]] = [
            *(self._show, self._list, self._history, self._tasks, self._failed_tasks, self._jobs),
        ]
        self._acts: list[Callable[[], Awaitable[None]]] = [self._move, self._move_twice, self._enqueue]

    async def work(self, until: float) -> None:
        """Run one client."""
        while time.monotonic() < until:
            await self._random.choice(self._reads if self._random.random() < READ_SHARE else self._acts)()

    async def _ask(self, kind: str, method: str, path: str, **given: Any) -> httpx.Response | None:
        began = time.perf_counter()
        try:
            answer = await self._client.request(method, path, **given)
        except httpx.HTTPError as error:
            self.faults.append(f"{kind}: {type(error).__name__} {error}")
            return None
        self.seconds[kind].append(time.perf_counter() - began)
        self.statuses[f"{kind} {answer.status_code}"] += 1
        if answer.status_code not in EXPECTED:
            self.faults.append(f"{kind}: {answer.status_code} {answer.text[:200]}")
        return answer

    async def _show(self) -> None:
        await self._ask("read", "GET", f"/api/workers/{self._random.choice(self._workers)}")

    async def _list(self) -> None:
        await self._ask("list", "GET", "/api/workers", params={"limit": 20})

    async def _history(self) -> None:
        await self._ask(
            "read", "GET", f"/api/workers/{self._random.choice(self._workers)}/history", params={"limit": 5}
        )

    async def _tasks(self) -> None:
        await self._ask("list tasks", "GET", "/api/tasks", params={"limit": 20})

    async def _failed_tasks(self) -> None:
        await self._ask("list tasks in error", "GET", "/api/tasks", params={"limit": 20, "state": "error"})

    async def _jobs(self) -> None:
        await self._ask("list jobs", "GET", "/api/jobs", params={"limit": 20, "status": "COMPLETED"})

    async def _move(self) -> None:
        worker, act = self._random.choice(self._workers), self._random.choice(("pause", "resume"))
        answer = await self._ask("move", "POST", f"/api/supervisor/workers/{worker}/{act}")
        if answer is not None and answer.is_success:
            self.moved[worker] += 1

    async def _move_twice(self) -> None:
        """Send one request twice concurrently with one idempotency key: it may move the worker once."""
        worker, act = self._random.choice(self._workers), self._random.choice(("pause", "resume"))
        path, body = f"/api/supervisor/workers/{worker}/{act}", {"request_id": str(uuid4())}
        both = await asyncio.gather(*(self._ask("move with a key", "POST", path, json=body) for _ in range(2)))
        answers = [answer for answer in both if answer is not None]
        if len({(answer.status_code, answer.content) for answer in answers}) > 1:
            self.faults.append("one key got two different answers")
        if answers and answers[0].is_success:
            self.moved[worker] += 1

    async def _enqueue(self) -> None:
        body = {"type": "nothing", "request_id": str(uuid4())}
        made = await self._ask("enqueue", "POST", "/api/tasks", json=body)
        if made is None or not made.is_success:
            return
        task = made.json()["id"]
        answers = await asyncio.gather(*(self._ask("cancel", "POST", f"/api/tasks/{task}/cancel") for _ in range(2)))
        if sorted(answer.status_code for answer in answers if answer is not None) != [200, 409]:
            self.faults.append("a task was canceled twice, or not at all")


# Tasks and jobs that have ended, through the moves of their lifecycles, with their records.
FILL = """
insert into interlock.tasks (type, input)
select 'filled', jsonb_build_object('n', n) from generate_series(1, %(tasks)s) as n;
update interlock.tasks set state = 'running', event = 'claim', attempt = 1, tries = 1, worker_id = 'w',
    lease_expires_at = now() + interval '1 hour';
update interlock.tasks set state = 'error', event = 'fail', lease_expires_at = null, settled_attempt = 1,
    finished_at = clock_timestamp()
where mod((input ->> 'n')::int, 100) = 0;
update interlock.tasks set state = 'done', event = 'succeed', lease_expires_at = null, settled_attempt = 1,
    finished_at = clock_timestamp()
where state = 'running';
insert into interlock.jobs (task_description, input)
select 'filled', jsonb_build_object('n', n) from generate_series(1, %(jobs)s) as n;
update interlock.jobs set status = 'PENDING', event = 'validate';
update interlock.jobs set status = 'RUNNING', event = 'allocate_resources', started_at = clock_timestamp();
update interlock.jobs set status = 'COMPLETED', event = 'success', completed_at = clock_timestamp();
vacuum analyze"""


async def fill(url: str, tasks: int, jobs: int) -> None:
    """Store ended tasks and jobs."""
    async with connect(url) as connection:
        for statement in FILL.split(";"):
            await connection.execute(statement.encode(), {"tasks": tasks, "jobs": jobs} if "%(" in statement else None)


async def play(given: argparse.Namespace, url: str) -> tuple[Load, float]:
    """Run the load, then compare the records with the answers."""
    workers = [f"w_bench_{number}" for number in range(given.workers)]
    async with connect(url) as connection:
        await migrate(connection)
        for worker in workers:
            await register_worker(connection, RegisteredProcess(worker), lease=DAY)
    await fill(url, given.tasks, given.jobs)
    with supervisor_at(url) as (process, address, said):
        limits = httpx.Limits(max_connections=given.clients * 2, max_keepalive_connections=given.clients * 2)
        async with httpx.AsyncClient(base_url=address, headers=said.headers, limits=limits, timeout=30) as client:
            load = Load(client, workers, given.seed)
            beating = asyncio.create_task(beat(url, workers))
            began, used = time.monotonic(), processor_time(process.pid)
            await asyncio.gather(*(load.work(began + given.seconds) for _ in range(given.clients)))
            took, load.used = time.monotonic() - began, processor_time(process.pid) - used
            load.shares = await compare(given, url, client)
            load.pages = await read_pages(given.pages, client, load.faults)
            beating.cancel()
            for name, value in (await metrics(client)).items():
                load.statuses[name] = value
    async with connect(url) as connection:
        for worker in workers:
            load.faults += await lost(connection, worker, load.moved[worker])
    return load, took


BARE_APP = """
import sys, uvicorn
from contextlib import asynccontextmanager
from uuid import UUID
import orjson
from fastapi import FastAPI, Request
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb
from psycopg_pool import AsyncConnectionPool
from starlette.responses import Response

pool = AsyncConnectionPool(sys.argv[1], min_size=1, max_size=10, open=False, kwargs={"autocommit": True})

@asynccontextmanager
async def lifespan(_):
    async with pool:
        yield

app = FastAPI(lifespan=lifespan)

@app.get("/tasks/{id}")
async def show(id: UUID):
    async with pool.connection() as connection:
        cursor = connection.cursor(row_factory=dict_row)
        await cursor.execute("select * from interlock.tasks where id = %s", [id])
        return Response(orjson.dumps(await cursor.fetchone(), default=str), media_type="application/json")

@app.post("/tasks")
async def insert(request: Request):
    body = await request.json()
    async with pool.connection() as connection:
        cursor = connection.cursor(row_factory=dict_row)
        await cursor.execute("insert into interlock.tasks (type, input) values (%s, %s) returning *",
                             [body["type"], Jsonb(body["input"])])
        return Response(orjson.dumps(await cursor.fetchone(), default=str), 201, media_type="application/json")

uvicorn.run(app, port=int(sys.argv[2]), http="h11", log_config=None, access_log=False, server_header=False)
"""


async def compare(given: argparse.Namespace, url: str, client: httpx.AsyncClient) -> dict[str, tuple[float, float]]:
    """Ask the supervisor and the bare app in turn; return the requests a second of both, for GET and POST."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", BARE_APP, url, str(port))
    limits = httpx.Limits(max_connections=given.clients, max_keepalive_connections=given.clients)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=30) as bare:
            await until_answering(bare)
            (task,) = (await client.get("/api/tasks", params={"limit": 1})).json()["items"]
            body = {"type": "nothing", "input": {"n": 1}}
            requests = {
                "GET": (("GET", f"/api/tasks/{task['id']}", None), ("GET", f"/tasks/{task['id']}", None)),
                "POST": (("POST", "/api/tasks", body), ("POST", "/tasks", body)),
                "POST with a key": (("POST", "/api/tasks", body), ("POST", "/tasks", body)),
            }
            shares = {}
            for kind, (ours, theirs) in requests.items():
                counts = [0, 0]
                for _ in range(given.slices):
                    counts[0] += await ask_in_slice(client, given, *ours, keyed=kind == "POST with a key")
                    counts[1] += await ask_in_slice(bare, given, *theirs)
                seconds = given.slices * given.seconds / 30
                shares[kind] = (counts[0] / seconds, counts[1] / seconds)
            return shares
    finally:
        process.terminate()
        await process.wait()


async def ask_in_slice(
    client: httpx.AsyncClient,
    given: argparse.Namespace,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    *,
    keyed: bool = False,
) -> int:
    """Send one request over and over from all clients for one slice; return the number of answers.

    With `keyed`, each has an idempotency key of its own.
    """
    until = time.monotonic() + given.seconds / 30

    async def ask() -> int:
        answers = 0
        while time.monotonic() < until:
            headers = {"Idempotency-Key": str(uuid4())} if keyed else {}
            (await client.request(method, path, json=body, headers=headers)).raise_for_status()
            answers += 1
        return answers

    return sum(await asyncio.gather(*(ask() for _ in range(given.clients))))


# Values that no row has make a page look at as many rows as it may. {task}, {job} and {now} are those of the database.
FILTERS = {
    "/api/tasks": (
        *(
            "",
            "state=done",
            "state=error",
            "state=error&state=canceled&state=pending",
            "state=pending",
            "state=running",
        ),
        *("type=none", "tag=none", "namespace=none", "worker=none", "state=error&type=none", "job={job}"),
        *("correlation_id={task}", "request_id=none", "unique_key=none", "created_after={now}", "created_before={now}"),
    ),
    "/api/jobs": (
        *("", "status=COMPLETED", "status=FAILED", "status=RUNNING&status=PENDING", "workflow=none", "namespace=none"),
        *("tag=none", "attribute=a:1", "key=none", "parent={job}", "correlation_id={job}", "request_id=none"),
        "created_before={now}",
    ),
    "/api/workers": ("", "status=FAILED", "host=none", "namespace=none", "pool=none", "workspace_id=none"),
    "/api/audit": (
        *("", "kind=task", "kind=job", "id={task}", "actor=none", "event=expire", "from_state=waiting"),
        *("to_state=skipped", "database_role=none", "recorded_before={now}", "recorded_after={now}"),
    ),
    "/api/inbox": ("", "assignee=none"),
    "/api/tasks/{task}/history": ("",),
    "/api/jobs/{job}/steps": ("",),
    "/api/jobs/{job}/history": ("",),
}


async def read_pages(count: int, client: httpx.AsyncClient, faults: list[str]) -> dict[str, list[float]]:
    """Read the first page of each list with each filter so many times, one after the other; return the seconds."""
    known = {"now": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
    for kind in ("task", "job"):
        (item,) = (await client.get(f"/api/{kind}s", params={"limit": 1})).json()["items"]
        known[kind] = item["id"]
    found: dict[str, list[float]] = {}
    for path, queries in FILTERS.items():
        for query in queries:
            times = found[f"{path}?{query}".rstrip("?")] = []
            for _ in range(count):
                began = time.perf_counter()
                answer = await client.get(f"{path}?{query}".format_map(known))
                times.append(time.perf_counter() - began)
                if answer.status_code != 200:  # noqa: PLR2004 - the status of a page
                    faults.append(f"{path}?{query}: {answer.status_code} {answer.text[:200]}")
    return found


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def until_answering(client: httpx.AsyncClient) -> None:
    """Wait until a server answers."""
    async with asyncio.timeout(60):
        while True:
            try:
                await client.get("/")
            except httpx.HTTPError:
                await asyncio.sleep(0.1)
            else:
                return


async def beat(url: str, workers: list[str]) -> None:
    """Send heartbeats for the workers; the supervisor terminates workers without heartbeats."""
    async with connect(url) as connection:
        while True:
            for worker in workers:
                await record_heartbeat(connection, RegisteredProcess(worker), lease=DAY)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)


async def metrics(client: httpx.AsyncClient) -> dict[str, int]:
    """Return the supervisor's counters of idempotency keys."""
    lines = (await client.get("/metrics")).text.splitlines()
    return {
        line.partition(" ")[0]: int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith("idempotency_requests_total")
    }


async def lost(connection: Any, worker: str, moved: int) -> list[str]:
    """Return the faults in the records of a worker."""
    found = await connection.execute(
        "select from_state, to_state from interlock.worker_state_transitions where worker_id = %s order by id", [worker]
    )
    records = await found.fetchall()
    row = await (await connection.execute("select status from interlock.workers where id = %s", [worker])).fetchone()
    faults = []
    if len(records) != moved + 2:  # creation and start
        faults.append(f"{worker}: {moved} moves were answered, {len(records) - 2} were recorded")
    if any(one["to_state"] != two["from_state"] for one, two in itertools.pairwise(records)):
        faults.append(f"{worker}: a move does not start in the state in which the previous one ended")
    if records[-1]["to_state"] != row["status"]:
        faults.append(f"{worker}: the row is {row['status']}, and the last record {records[-1]['to_state']}")
    return faults


def at_rank(values: list[float], share: float) -> float:
    """Return the value below which such a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def report(load: Load, took: float, clients: int) -> dict[str, Any]:
    """Print and return the figures."""
    total = sum(map(len, load.seconds.values()))
    print(f"{described()}\n{clients} clients, {took:.0f} s, {total} requests, {total / took:.0f} a second")
    print(f"the supervisor used {load.used / max(total, 1) * 1000:.1f} ms of processor time per request")
    print(f"{'request':22}{'number':>8}{'a second':>10}{'50 % ms':>9}{'95 % ms':>9}{'99 % ms':>9}")
    figures: dict[str, Any] = {}
    for kind, seconds in sorted(load.seconds.items()):
        marks = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else seconds * 99
        figures[kind] = [len(seconds), *(round(marks[place] * 1000, 1) for place in (49, 94, 98))]
        number, *times = figures[kind]
        print(f"{kind:22}{number:8}{number / took:10.1f}{times[0]:9}{times[1]:9}{times[2]:9}")
    for method, (ours, bare) in load.shares.items():
        print(f"{method}: {ours:.0f} a second, a bare FastAPI app {bare:.0f}: {ours / max(bare, 1):.0%} of it")
    pages = {
        name: [round(at_rank(seconds, share) * 1000, 1) for share in (0.5, 0.99)]
        for name, seconds in load.pages.items()
    }
    print(f"{'page of a list, one client':52}{'50 % ms':>9}{'99 % ms':>9}")
    for name, marks in pages.items():
        print(f"{name:52}{marks[0]:9}{marks[1]:9}")
    print(f"moves recorded: {sum(load.moved.values())}; answers: {dict(sorted(load.statuses.items()))}")
    for fault in load.faults[:20]:
        print(f"FAULT {fault}")
    print(f"{len(load.faults)} faults")
    answers = dict(load.statuses)
    return {
        "seconds": took,
        "requests": total,
        "used": load.used,
        "shares": load.shares,
        "kinds": figures,
        "pages": pages,
        "answers": answers,
        "faults": load.faults,
    }


def main() -> None:
    """Run in a temporary directory; exit with 1 if a check failed."""
    given = options()
    with tempfile.TemporaryDirectory(prefix="interlock-bench-", ignore_cleanup_errors=True) as scratch:
        Path(scratch).chmod(0o755)  # the server may run as another user
        server = EmbeddedServer(Path(scratch) / "db")
        server.acquire()
        try:
            load, took = asyncio.run(play(given, server.url("postgres")))
        finally:
            server.stop()
    found = report(load, took, given.clients)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if found["faults"] else 0)


if __name__ == "__main__":
    main()
