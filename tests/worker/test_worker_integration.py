"""Workers and PostgreSQL together: real processes, signals, kills, blocked loops and cut connections."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from factories import enqueue, task_row, task_state
from interlock.lifecycle import WorkerState
from interlock.model.options import NewTask
from interlock.store.enqueue import enqueue_task
from interlock.store.task_admin import request_cancel_of_running_tasks
from interlock.store.tasks import claim_pending_tasks, read_task_history
from processes import eventually
from webhook_receiver import Receiver
from worker_support import app_at, serving, until, worker_process

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


async def test_worker_processes_single_task_to_completion(url: str, database: Connection) -> None:
    task = await enqueue(database, "add", {"a": 1, "b": 2})
    with worker_process(url):
        eventually(lambda: task_state(url, task) == "done")
    done = await task_row(database, task)
    assert (done["output"], done["tries"]) == (3, 1)
    assert [record.event for record in await read_task_history(database, task)] == ["create", "claim", "succeed"]


async def test_worker_processes_failing_task(url: str, database: Connection) -> None:
    task = await enqueue(database, "fail", {"message": "no"}, max_tries=2)
    with worker_process(url):
        eventually(lambda: task_state(url, task) == "error")
    failed = await task_row(database, task)
    assert failed["tries"] == 2
    assert failed["error"]["type"] == "ValueError"
    assert failed["error"]["message"] == "no"
    assert "worker_app.py" in failed["error"]["traceback"]
    assert failed["reason"] == "ValueError: no"
    events = [record.event for record in await read_task_history(database, task)]
    assert events == ["create", "claim", "retry", "claim", "fail"]


async def test_worker_recovers_expired_lease_from_other_worker(url: str, database: Connection) -> None:
    task = await enqueue(database, "nap", {"seconds": 3600})
    with worker_process(url, INTERLOCK_LEASE="1") as victim:
        eventually(lambda: task_state(url, task) == "running")
        victim.kill()
        victim.wait()
    async with serving(url, recovery_interval=0.01) as rescuer:
        await until(lambda: rescuer.context.active)
        assert (await task_row(database, task))["attempt"] == 2
        rescuer.stop_now.set()
        rescuer.request_shutdown()
    events = [record.event for record in await read_task_history(database, task)]
    assert events == ["create", "claim", "expire", "claim", "return"]


async def test_worker_graceful_shutdown_completes_active_task(url: str, database: Connection) -> None:
    task = await enqueue(database, "nap", {"seconds": 0.5})
    with worker_process(url) as process:
        eventually(lambda: task_state(url, task) == "running")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert task_state(url, task) == "done"
    stopped = [json.loads(line) for line in output.splitlines() if "worker_stopped" in line]
    assert stopped[0]["tasks_processed"] == 1, "the shutdown is told of before the process is gone"


async def test_worker_backoff_increases_on_empty_queue(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # slow claims, as on a busy machine, shorten some rests for a look at tasks of any age
    monkeypatch.setattr("interlock.worker.fetcher.SLOW_LOOK_S", math.inf)
    async with serving(url, mode="polling", poll_base=0.02, poll_cap=5) as worker:
        await until(lambda: worker.context.backoff_count >= 7)
        rests = [move.lasted for move in worker.history if move.from_state is WorkerState.BACKING_OFF]
    # a busy machine makes a rest longer, but never shorter
    assert all(rest >= 0.8 * 0.02 * 2**looks for looks, rest in enumerate(rests, start=1)), rests
    assert min(rests) < rests[5], "each look that finds nothing makes the next rest longer"


async def test_task_lease_renewal_during_long_processing(url: str, database: Connection) -> None:
    """The handler blocks the worker's whole event loop for three leases; a thread keeps renewing."""
    task = await enqueue(database, "block_the_loop", {"seconds": 9.5})
    with worker_process(url, INTERLOCK_LEASE="3"):
        eventually(lambda: task_state(url, task) == "running")
        async with serving(url, recovery_interval=0.05, namespaces=("elsewhere",)):
            eventually_done = asyncio.to_thread(eventually, lambda: task_state(url, task) == "done")
            await eventually_done
    assert [record.event for record in await read_task_history(database, task)] == ["create", "claim", "succeed"]


async def test_worker_reconnects_after_db_failure(url: str, database: Connection) -> None:
    """Every connection of the worker is cut while its handler runs: the outcome is kept and written later."""
    task = await enqueue(database, "nap", {"seconds": 0.4})
    async with serving(url, poll_base=0.01) as worker:
        await until(lambda: worker.context.active)
        await database.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
        await until(lambda: worker.context.tasks_processed == 1)
        anew = (WorkerState.CONNECTING, WorkerState.RECOVERING)
        await until(lambda: anew in [(move.from_state, move.to_state) for move in worker.history][2:])
        again = await enqueue(database, "add", {"a": 1, "b": 1})
        await until(lambda: worker.context.tasks_processed == 2)
    done = await task_row(database, task)
    assert (done["state"], done["attempt"], done["output"]) == ("done", 1, 1)
    assert (await task_row(database, again))["state"] == "done"


async def test_notify_api_called_on_task_completion(url: str, database: Connection) -> None:
    """A worker process posts the webhook of a finished task, and a client that waits for it is notified."""
    app = app_at(url)
    async with app, Receiver().listen() as receiver:
        callback = f"http://127.0.0.1:{receiver.port}/done"
        with worker_process(url, INTERLOCK_CALLBACK_ALLOW_PRIVATE="true") as process:
            new = NewTask("add", {"a": 20, "b": 22}, callback_url=callback)
            handle = app.handle((await enqueue_task(database, new, actor="me")).id)
            assert await handle.result(timeout=30) == 42
            await until(lambda: receiver.received)
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.communicate, timeout=60)
    (posted,) = receiver.received
    assert posted.line == "POST /done HTTP/1.1"
    notice = json.loads(posted.body)
    assert (notice["task_id"], notice["state"], notice["attempt"]) == (str(handle.id), "done", 1)


async def test_a_second_signal_stops_at_once_and_returns_the_task(url: str, database: Connection) -> None:
    task = await enqueue(database, "nap", {"seconds": 3600})
    with worker_process(url, INTERLOCK_GRACE="25") as process:
        eventually(lambda: task_state(url, task) == "running")
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        for line in process.stdout:
            if '"shutting_down"' in line:
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)  # less than the grace
    assert process.returncode == 0
    done = await task_row(database, task)
    assert (done["state"], done["event"], done["tries"]) == ("pending", "return", 0)


async def test_a_blocked_thread_does_not_keep_a_worker_from_stopping(url: str, database: Connection) -> None:
    task = await enqueue(database, "block", {"seconds": 3600})
    with worker_process(url, INTERLOCK_GRACE="0") as process:
        eventually(lambda: task_state(url, task) == "running")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert (await task_row(database, task))["state"] == "pending"


async def test_a_task_goes_on_from_its_checkpoint_after_a_crash(url: str, database: Connection) -> None:
    task = await enqueue(database, "careful")
    with worker_process(url, INTERLOCK_LEASE="1") as first:
        first.communicate(timeout=60)
    assert first.returncode == 9
    async with serving(url, recovery_interval=0.01, poll_cap=0.1):
        await until(lambda: task_state(url, task) == "done")
    assert (await task_row(database, task))["output"] == 3


async def test_a_lost_lease_stops_the_handler_and_writes_nothing(url: str, database: Connection) -> None:
    task = await enqueue(database, "nap", {"seconds": 3600})
    async with serving(url, lease=1.5, recovery_interval=3600) as worker:
        await until(lambda: worker.context.active)
        (attempt,) = worker.context.active.values()
        # another client takes the task from the worker
        await database.execute(
            "update interlock.tasks set state = 'pending', event = 'expire', lease_expires_at = null"
        )
        await claim_pending_tasks(database, actor="thief", types=["nap"], lease=timedelta(hours=1))
        await until(attempt.is_terminal)
    assert attempt.state == "abandoned"
    assert (await task_row(database, task))["worker_id"] == "thief"


@pytest.mark.parametrize(("task_type", "final"), [("obedient", "canceled"), ("nap", "canceled")])
async def test_cooperative_then_forced_cancellation(url: str, database: Connection, task_type: str, final: str) -> None:
    task = await enqueue(database, task_type, {"seconds": 3600} if task_type == "nap" else {})
    async with serving(url, cancel_grace=0.2):
        await until(lambda: task_state(url, task) == "running")
        await request_cancel_of_running_tasks(database, [task], reason="enough")
        await until(lambda: task_state(url, task) == final)
    assert (await task_row(database, task))["reason"] == "enough"


async def test_a_transactional_task_commits_with_its_outcome_or_not_at_all(url: str, database: Connection) -> None:
    await database.execute("create table public.written (x int)")
    bad = await enqueue(database, "transact", {"good": False}, max_tries=1)
    good = await enqueue(database, "transact", {"good": True})
    async with serving(url) as worker:
        await until(lambda: worker.context.tasks_processed == 2)
    assert ((await task_row(database, bad))["state"], (await task_row(database, good))["state"]) == ("error", "done")
    assert len(await (await database.execute("select * from public.written")).fetchall()) == 1


async def test_outcomes_of_all_kinds(url: str, database: Connection) -> None:
    permanent = await enqueue(database, "fail_for_good")
    later = await enqueue(database, "fail_later", max_tries=3)
    slow = await enqueue(database, "too_slow", max_tries=1)
    costly = await enqueue(database, "costly")
    wrong = await enqueue(database, "add", {"a": "one", "b": 2})
    threaded = await enqueue(database, "block", {"seconds": 0.01})
    async with serving(url, concurrency=4) as worker:
        await until(lambda: worker.context.tasks_processed == 8)
    rows = {name: await task_row(database, id_) for name, id_ in locals().items() if name in NAMES}
    assert {name: found["state"] for name, found in rows.items()} == NAMES
    assert rows["permanent"]["tries"] == 1
    assert rows["later"]["output"] == 3
    assert "still running after 0.05 s" in rows["slow"]["error"]["message"]
    assert rows["costly"]["cost"] == 1.25
    assert rows["wrong"]["error"]["type"] == "InputError"
    assert rows["threaded"]["output"] == "woke up"


NAMES = {
    "permanent": "error",
    "later": "done",
    "slow": "error",
    "costly": "done",
    "wrong": "error",
    "threaded": "done",
}


async def test_a_non_json_result_fails_only_its_own_task(url: str, database: Connection) -> None:
    error = await enqueue(database, "fail_strangely", max_tries=1)
    result = await enqueue(database, "answer_strangely", max_tries=1)
    others = [await enqueue(database, "add", {"a": n, "b": n}) for n in range(8)]
    async with serving(url, concurrency=10) as worker:
        await until(lambda: worker.context.tasks_processed == 10)
    assert "ValueError: a" in (await task_row(database, error))["reason"]
    assert (await task_row(database, result))["state"] == "error"
    assert {(await task_row(database, other))["state"] for other in others} == {"done"}


async def test_progress_is_written_while_the_task_runs(url: str, database: Connection) -> None:
    task = await enqueue(database, "nap", {"seconds": 3600})
    async with serving(url, grace=0) as worker:
        await until(lambda: worker.context.active)

        async def written() -> bool:
            return bool((await task_row(database, task))["progress"] == {"fraction": 0.5, "message": "half way"})

        while not await written():
            await asyncio.sleep(0.02)


def test_run_worker_creates_state_machine(url: str) -> None:
    with worker_process(url) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
    assert first["message"] == "worker_state_transition"
    assert (first["from_state"], first["to_state"], first["event"]) == ("starting", "connecting", "initialized")


def test_run_worker_uses_instance_name_as_worker_id(url: str) -> None:
    names = []
    for _ in range(2):
        with worker_process(url, INTERLOCK_WORKER_NAME="ada") as process:
            assert process.stdout is not None
            names.append(json.loads(process.stdout.readline())["worker_id"])
    assert all(name.startswith("ada-") for name in names)
    assert names[0] != names[1], "a restarted worker never inherits the leases of the one before"


@pytest.mark.cold
def test_worker_entrypoint_unchanged() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from interlock.worker import run_worker; print('OK')"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "OK\n"
    missing = subprocess.run([sys.executable, "-m", "interlock.worker"], capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert "which app?" in missing.stderr
    assert "Traceback" not in missing.stderr
