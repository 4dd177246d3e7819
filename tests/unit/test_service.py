"""The start/stop contract, and retries with backoff."""

from __future__ import annotations

import asyncio

import pytest

from interlock.errors import ConfigError, DisconnectedError, MigrationError
from interlock.model.backoff import Backoff
from interlock.postgres.retry import RetryState, raise_if_canceled, retry
from interlock.service import BackgroundService, BackgroundTasks

pytestmark = pytest.mark.unit

QUICK = Backoff.exponential(0.001, cap=0.002, jitter=0.5)


class Recorder(BackgroundService):
    """Records how it ends."""

    def __init__(self, *, swallows: int = 0) -> None:
        super().__init__("recorder")
        self.events: list[str] = []
        self._swallows = swallows

    async def run(self) -> None:
        self.events.append("started")
        try:
            await self.stopping.wait()
            self.events.append("finished")
        except asyncio.CancelledError:
            self.events.append("canceled")
            for _ in range(self._swallows):
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    self.events.append("swallowed")
            raise


async def test_stop_is_safe_before_start_twice_and_at_the_same_time() -> None:
    service = Recorder()
    await service.stop()
    await service.start()
    await service.start()
    await asyncio.sleep(0)
    assert service.is_running
    await asyncio.gather(service.stop(), service.stop())
    await service.stop()
    assert not service.is_running
    assert service.events == ["started", "canceled"]


async def test_a_stopped_service_starts_again_and_a_start_during_the_stop_waits_for_it() -> None:
    service = Recorder()
    await service.start()
    await asyncio.sleep(0)
    await asyncio.gather(service.stop(), service.start())
    await asyncio.sleep(0)
    assert service.is_running
    assert service.events == ["started", "canceled", "started"]
    await service.stop()


async def test_a_service_with_a_stop_timeout_finishes_by_itself() -> None:
    service = Recorder()
    service.stop_timeout_s = None
    await service.start()
    await asyncio.sleep(0)
    await service.stop()
    assert service.events == ["started", "finished"]


async def test_a_cancel_ends_a_stop_that_waits() -> None:
    class Stubborn(BackgroundService):
        stop_timeout_s = None

        async def run(self) -> None:
            await asyncio.sleep(600)

    service = Stubborn("stubborn")
    await service.start()
    stopping = asyncio.create_task(service.stop())
    await asyncio.sleep(0.01)
    assert not stopping.done()
    service.cancel()
    async with asyncio.timeout(10):
        await stopping


async def test_a_task_that_swallows_its_first_cancel_is_canceled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.service.CANCEL_INTERVAL_S", 0.01)
    service = Recorder(swallows=2)
    await service.start()
    await asyncio.sleep(0)
    await service.stop()
    assert service.events == ["started", "canceled", "swallowed", "swallowed"]


async def test_with_a_timeout_a_task_that_swallows_two_cancels_is_left_running() -> None:
    service = Recorder(swallows=3)
    service.cancel_timeout_s = 0.02
    await service.start()
    await asyncio.sleep(0)
    await service.stop()
    assert service.is_running
    service.cancel_timeout_s = None
    await service.stop()
    assert not service.is_running


async def test_an_error_ends_the_service_and_a_stop_raises_nothing() -> None:
    class Failing(BackgroundService):
        async def run(self) -> None:
            raise RuntimeError("a mistake")

    service = Failing("failing")
    await service.start()
    await asyncio.sleep(0)
    assert not service.is_running
    await service.stop()


async def test_background_tasks_end_with_the_stop() -> None:
    tasks = BackgroundTasks()
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    tasks.spawn("work", work())
    await asyncio.sleep(0)
    await tasks.stop()
    await tasks.stop()
    assert ended.is_set()


async def test_retry_ends_with_the_first_success_and_delays_grow_to_the_cap() -> None:
    delays: list[float] = []

    async def operation() -> None:
        if len(delays) < 5:
            raise DisconnectedError("gone")

    await retry(operation, on_failure=lambda _, delay_s: delays.append(delay_s), state=RetryState(QUICK))
    assert all(0.0005 <= delay <= 0.002 for delay in delays)
    assert len(delays) == 5


def test_a_success_resets_the_delay() -> None:
    state = RetryState(Backoff.exponential(1, cap=100, jitter=0))
    assert [state.next_delay_s() for _ in range(3)] == [1, 2, 4]
    state.reset()
    assert state.next_delay_s() == 1


@pytest.mark.parametrize("error", [MigrationError("old"), ConfigError("bad")])
async def test_errors_that_a_retry_cannot_mend_are_raised(error: Exception) -> None:
    async def operation() -> None:
        raise error

    with pytest.raises(type(error)):
        await retry(operation, on_failure=lambda *_: None, give_up_on=(MigrationError,))


async def test_a_stop_ends_the_wait_between_two_tries() -> None:
    stopping = asyncio.Event()

    async def operation() -> None:
        raise DisconnectedError("gone")

    async with asyncio.timeout(10):
        await retry(
            operation,
            on_failure=lambda *_: stopping.set(),
            state=RetryState(Backoff.exponential(600)),
            stopping=stopping,
        )


async def test_a_cancel_that_the_driver_replaced_by_an_error_still_ends_the_loop() -> None:
    async def operation() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise DisconnectedError("the connection died meanwhile") from None

    task = asyncio.create_task(retry(operation, on_failure=lambda *_: None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    raise_if_canceled()  # this task was not
