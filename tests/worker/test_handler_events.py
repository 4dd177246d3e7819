"""Event system 2: executions go to handlers and completions come back, matched by correlation id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from interlock import (
    Interlock,
    StepExecutionCompletionEvent,
    StepExecutionEvent,
    StepExecutionResult,
    TaskContext,
    TaskStateMachine,
    WorkerSettings,
)
from interlock.config import Config
from interlock.orchestrator.run import orchestrating
from interlock.worker.executors.events import HandlerEvents
from interlock.worker.run import serving

if TYPE_CHECKING:
    from interlock import Task
    from interlock.postgres.connection import Connection


def defined() -> Task[..., Any]:
    @Interlock().task
    async def add(a: int, b: int) -> int:
        return a + b

    return add


@pytest.mark.unit
def test_a_completion_closes_its_own_execution_only() -> None:
    events, definition = HandlerEvents(), defined()
    attempt = TaskStateMachine("t", "add", "w")
    first, second = (events.publish(attempt, definition, {"a": number, "b": 1}) for number in (1, 2))
    assert first == StepExecutionEvent(1, attempt, definition, {"a": 1, "b": 1})
    assert second.correlation_id != first.correlation_id
    assert events.complete(StepExecutionCompletionEvent(second.correlation_id, 3)) == 3
    # a late or foreign completion changes nothing
    assert events.complete(StepExecutionCompletionEvent(second.correlation_id, 4)) is None
    assert events.complete(StepExecutionCompletionEvent(99, 5)) is None
    with pytest.raises(ZeroDivisionError):
        events.complete(StepExecutionCompletionEvent(first.correlation_id, error=ZeroDivisionError()))
    seen = events.statistics
    assert (seen.dispatched, seen.received, seen.completed, seen.failed, seen.mismatched) == (2, 4, 1, 1, 2)


@pytest.mark.flow
async def test_every_handler_runs_between_an_execution_and_its_completion(
    url: str, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Interlock(config=Config(database_url=url))
    flow = app.workflow("flow")

    @flow.step
    async def coroutine() -> int:
        return 1

    @flow.step(after=["coroutine"])
    def thread(coroutine: int, ctx: TaskContext) -> int:
        return coroutine + ctx.attempt

    passed: list[StepExecutionEvent | StepExecutionCompletionEvent] = []
    publish, complete = HandlerEvents.publish, HandlerEvents.complete

    def record_published(events: HandlerEvents, *arguments: Any) -> StepExecutionEvent:
        event = publish(events, *arguments)
        passed.append(event)
        return event

    def record_completed(events: HandlerEvents, completion: StepExecutionCompletionEvent) -> Any:
        passed.append(completion)
        return complete(events, completion)

    monkeypatch.setattr(HandlerEvents, "publish", record_published)
    monkeypatch.setattr(HandlerEvents, "complete", record_completed)
    async with app, orchestrating(app), serving(app, WorkerSettings(duties=False)):
        job = await app.submit("flow")
        assert await job.wait(30) == {"thread": 2}
    assert [type(event) for event in passed] == [StepExecutionEvent, StepExecutionCompletionEvent] * 2
    assert [event.correlation_id for event in passed] == [1, 1, 2, 2]
    outputs = await (await database.execute("select output from interlock.tasks")).fetchall()
    assert len(outputs) == 2
    for row in outputs:
        assert row["output"].keys() == StepExecutionResult.__annotations__.keys()
