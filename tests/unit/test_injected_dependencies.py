"""Dependencies of handlers: what a declaration may say, that they are no part of the input, and overriding in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import pytest

import resources_app
from interlock import DefinitionError, Depends, InputError, Interlock, TaskContext
from interlock.client.step_context import parameters_of
from interlock.testing import drain, run_inline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytestmark = pytest.mark.unit


def get_one() -> int:
    return 1


def needs_dsn(dsn: str) -> str:
    return dsn


def of_one_attempt(one: Annotated[int, Depends(get_one)]) -> int:
    return one


def with_context(context: TaskContext) -> int:
    return context.attempt


def managed() -> Iterator[int]:
    yield 1


def define(function: Callable[..., Any]) -> None:
    Interlock().task(function)


def test_injected_parameters_are_no_part_of_the_input() -> None:
    task = resources_app.use_session
    assert task.encode(7) == {"number": 7}  # type: ignore[call-arg]  # the form with Annotated, unknown to mypy
    assert resources_app.use_in_thread.encode(7) == {"number": 7}
    assert task.decode({"number": 7}) == {"number": 7}
    with pytest.raises(InputError, match="'session' is a dependency, which the worker provides"):
        task.encode(7, session="mine")
    with pytest.raises(InputError, match="unknown argument: session"):
        task.decode({"number": 7, "session": "mine"})


def test_the_wiring_of_a_workflow_does_not_see_injected_parameters() -> None:
    document = resources_app.flow.document
    assert set(document["input_schema"]["properties"]) == {"number"}
    found = parameters_of(resources_app.app.tasks["resources_flow/store"])
    assert found is not None
    assert found.parameters == (("fetch", True),)


def test_a_declaration_that_cannot_work_is_refused_with_its_place() -> None:
    from contextlib import contextmanager  # noqa: PLC0415 - only this test needs it

    context_manager = contextmanager(managed)

    def not_callable(x: int = Depends("pool")) -> None: ...  # type: ignore[arg-type]  # what the test is about

    def unknown_scope(x: int = Depends(get_one, scope="job")) -> None: ...  # type: ignore[arg-type]  # the same

    def missing(x: int = Depends(needs_dsn)) -> None: ...

    def too_short(x: int = Depends(of_one_attempt, scope="worker")) -> None: ...

    def context_of_worker(x: int = Depends(with_context, scope="worker")) -> None: ...

    def manager(x: int = Depends(context_manager)) -> None: ...

    for function, message in [
        (not_callable, "task not_callable, parameter 'x': Depends takes a function that makes the value, got 'pool'"),
        (unknown_scope, "scope must be one of attempt, worker, got 'job'"),
        (missing, "has no value for its parameter 'dsn'"),
        (too_short, "depends on 'one', which is made for each attempt"),
        (context_of_worker, "cannot take the context of one attempt"),
        (manager, "is a context manager; give the generator function itself"),
    ]:
        with pytest.raises(DefinitionError) as caught:
            define(function)
        assert message in str(caught.value)
        assert f"test_injected_dependencies.py:{function.__code__.co_firstlineno}" in str(caught.value)


def test_a_provider_that_depends_on_itself_is_refused() -> None:
    def again(value: int = 0) -> int:
        return value

    again.__defaults__ = (Depends(again),)

    def handler(x: int = Depends(again)) -> None: ...

    with pytest.raises(DefinitionError, match="depends on itself"):
        define(handler)


async def test_a_direct_call_names_what_it_lacks_and_takes_what_is_given() -> None:
    with pytest.raises(TypeError, match="injects nothing: pass 'session', or call it with"):
        await resources_app.use_session(1)  # type: ignore[call-arg]  # what the test is about
    assert await resources_app.use_session(1, session="mine", region="us") == "mine us 1"


async def test_run_inline_makes_dependencies_and_takes_those_of_the_test() -> None:
    assert await run_inline(resources_app.use_in_thread, 1) == "pool/session eu 1"
    assert await run_inline(resources_app.use_in_thread, 1, session="mine") == "mine eu 1"
    assert await run_inline(resources_app.use_in_process, 1) == "pool/session eu 1"


async def test_overrides_replace_providers_in_run_inline_and_in_what_depends_on_them() -> None:
    async def fake_pool() -> AsyncIterator[resources_app.Pool]:
        yield resources_app.Pool("fake")

    overrides = resources_app.app.dependency_overrides
    overrides[resources_app.open_pool] = fake_pool
    overrides[resources_app.get_region] = lambda: "moon"
    try:
        assert await run_inline(resources_app.use_in_thread, 1) == "fake/session moon 1"
    finally:
        overrides.clear()


async def test_a_value_of_scope_worker_is_made_once_for_concurrent_users_and_again_after_a_failure() -> None:
    import asyncio  # noqa: PLC0415 - only this test needs it

    from interlock.client.dependencies import Resources, find_dependencies  # noqa: PLC0415 - the same

    made: list[str] = []

    async def flaky() -> AsyncIterator[int]:
        made.append("open")
        await asyncio.sleep(0)
        if len(made) == 1:
            raise OSError("not yet")
        yield len(made)
        made.append("close")

    def handler(x: int = Depends(flaky, scope="worker")) -> None: ...

    resources, calls = Resources({}), find_dependencies("test", handler)

    async def use() -> Any:
        async with resources.injected(calls, TaskContext()) as values:
            return values["x"]

    first = await asyncio.gather(use(), use(), return_exceptions=True)
    assert [type(error) for error in first] == [OSError, OSError]
    assert list(await asyncio.gather(use(), use(), use())) == [2, 2, 2]
    await resources.close()
    await resources.close()
    assert made == ["open", "open", "close"]


async def test_drain_makes_dependencies_and_runs_the_steps_of_a_workflow(url: str) -> None:
    app = resources_app.app
    app.config = app.config.with_flags({"database_url": url})
    async with app:
        handle = await resources_app.use_in_thread.enqueue(3)
        job = await app.submit(resources_app.flow, {"number": 5})
        await drain(app)
        assert await handle.result() == "pool/session eu 3"
        assert (await job.status()).output == {"store": "pool/session eu5"}
