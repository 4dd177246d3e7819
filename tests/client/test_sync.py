"""The blocking facade: the same answers for code that is not async, from any thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from interlock import Interlock
from interlock.errors import InputError, MigrationError, StoreError, TaskFailedError
from interlock.sync import SyncHandle, SyncInterlock
from interlock.testing import drain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.store


@pytest.fixture
def tasks(url: str) -> Iterator[SyncInterlock]:
    with SyncInterlock(make_app(url)) as opened:
        yield opened


def make_app(url: str) -> Interlock:
    app = Interlock(url, actor="django")

    @app.task
    def double(n: int) -> int:
        return n * 2

    @app.task(max_tries=1)
    def fail() -> None:
        raise ValueError("no")

    return app


def test_enqueue_and_wait_block_until_there_is_a_result(tasks: SyncInterlock) -> None:
    double = tasks.app.tasks["double"]
    handle = tasks.enqueue(double.options(priority=3), n=4)
    assert handle.created
    assert repr(handle) == f"<SyncHandle double {handle.id}>"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.wait, 30)
        tasks.run(drain(tasks.app))
        assert waiting.result() == 8
    assert tasks.handle(str(handle.id)).result() == 8
    assert handle.status().state == "done"
    assert [line.to_state for line in handle.history()] == ["pending", "running", "done"]


def test_errors_come_through_as_they_are(tasks: SyncInterlock) -> None:
    with pytest.raises(InputError, match="argument 'n'"):
        tasks.enqueue(tasks.app.tasks["double"], n="x")
    handle = tasks.enqueue(tasks.app.tasks["fail"])
    with pytest.raises(TimeoutError):
        handle.wait(0.05)
    tasks.run(drain(tasks.app))
    with pytest.raises(TaskFailedError, match="ValueError: no"):
        handle.wait()
    assert handle.requeue("again")
    assert handle.cancel("enough") == "canceled"


def test_bulk_and_acts_by_filter_block_too(tasks: SyncInterlock) -> None:
    double = tasks.app.tasks["double"]
    handles = tasks.enqueue_many(double, [{"n": n} for n in range(100)])
    assert all(isinstance(handle, SyncHandle) for handle in handles)
    (prepared,) = tasks.enqueue_prepared([double.options(tags=["x"]).prepare(1)])
    assert len(tasks.find(states=["pending"], limit=500)) == 101
    assert tasks.cancel(tag="x", preview=True).count == 1
    assert tasks.cancel(tag="x").count == 1
    assert tasks.requeue(states=["canceled"]).count == 1
    assert prepared.status().state == "pending"
    assert tasks.pause("default", "lunch") == 101
    assert tasks.resume("default") == 101


def test_many_threads_share_one_facade(tasks: SyncInterlock) -> None:
    double = tasks.app.tasks["double"]
    with ThreadPoolExecutor(16) as pool:
        handles = list(pool.map(lambda n: tasks.enqueue(double, n=n), range(100)))
    assert len({handle.id for handle in handles}) == 100


def test_it_is_safe_to_open_and_close_twice_and_nothing_stays_behind(url: str) -> None:
    facade = SyncInterlock(make_app(url))
    facade.close()
    for _ in range(2):
        facade.open()
        facade.open()
        assert facade.find() == []
        facade.close()
        facade.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "interlock-sync"]
    with pytest.raises(StoreError, match="with SyncInterlock"):
        facade.find()


def test_an_app_that_cannot_be_opened_leaves_no_thread_behind(make_database: Callable[[str], str]) -> None:
    with pytest.raises(MigrationError):
        SyncInterlock(make_app(make_database("template0"))).open()
    assert not [thread for thread in threading.enumerate() if thread.name == "interlock-sync"]


def test_a_blocking_call_in_the_app_s_own_loop_is_refused_instead_of_hanging(tasks: SyncInterlock) -> None:
    async def inside() -> None:
        tasks.find()

    with pytest.raises(StoreError, match="would deadlock"):
        tasks.run(inside())


async def test_an_app_belongs_to_the_loop_that_opened_it(url: str) -> None:
    app = make_app(url)
    async with app:
        with pytest.raises(StoreError, match="another event loop"):
            await asyncio.to_thread(SyncInterlock(app).open)
