"""A step as its handler sees it: where its arguments come from, and what is stored of its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest

from interlock import Interlock, StepContext, TaskContext
from interlock.client.step_context import bind, gather, step_result
from interlock.errors import InputError, PermanentError
from interlock.model.graph import chosen_branches, require_approval
from interlock.testing import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.client.task import Task

pytestmark = pytest.mark.unit


@dataclass
class Reservation:
    id: UUID
    until: datetime


def task_of(function: Callable[..., Any]) -> Task[..., Any]:
    task: Task[..., Any] = Interlock("postgresql://nowhere").task(name="orders/1/ship")(function)
    return task


def job(**more: Any) -> dict[str, Any]:
    return {"workflow": "orders", "version": "1", "job_input": {"number": 7}, "results": {}, "config": {}, **more}


def bound(function: Callable[..., Any], claimed: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return bind(task_of(function), claimed or {}, job(**more))


def test_a_parameter_gets_the_result_of_the_step_of_its_name_as_its_type() -> None:
    def ship(reserve: Reservation, price: float, number: int) -> None: ...

    id_, until = uuid4(), datetime(2030, 1, 1, tzinfo=UTC)
    results = {"reserve": {"id": str(id_), "until": "2030-01-01T00:00:00Z"}, "price": 3, "other": None}
    assert bound(ship, results=results) == {"reserve": Reservation(id_, until), "price": 3.0, "number": 7}


def test_each_source_yields_to_the_one_before() -> None:
    def handler(item: Any, result: Any, step: Any, input: Any, field: Any, other: str = "own") -> None: ...  # noqa: A002 - the name that workflows use

    sources = {
        "job_input": {"item": 1, "result": 1, "step": 1, "field": 1},
        "results": {"item": 2, "result": 2, "step": 2},
    }
    assert bound(handler, {"item": 3, "result": None}, **sources) == {
        "item": 3,
        "result": None,
        "step": 2,
        "input": sources["job_input"],
        "field": 1,
    }
    assert bound(handler, {"item": 3, "result": 3}, **{**sources, "results": {"input": 2, "step": 2}})["input"] == 2


def test_parts_and_compensations_take_from_their_own_row() -> None:
    def pack(item: str, index: int, number: int) -> None: ...

    def undo(result: list[int], input: dict[str, int]) -> None: ...  # noqa: A002 - the whole input

    assert bound(pack, {"item": "a", "index": 3}) == {"item": "a", "index": 3, "number": 7}
    assert bound(undo, {"result": [1]}) == {"result": [1], "input": {"number": 7}}


def test_the_context_is_no_argument() -> None:
    def first(ctx: StepContext, number: int) -> None: ...

    def second(number: int, ctx: TaskContext) -> None: ...

    assert bound(first) == bound(second) == {"number": 7}


def test_more_parameters_take_the_other_fields_of_the_input() -> None:
    def handler(number: int, **rest: str) -> None: ...

    assert bound(handler, job_input={"number": 1, "a": "b"}, results={"x": 1}) == {"number": 1, "a": "b"}


def test_a_command_takes_everything_by_name() -> None:
    program = Interlock("postgresql://nowhere").command_task("c", ["true"])
    assert gather(program, {"item": 1}, job(results={"a": 2, "number": 3})) == {"item": 1, "a": 2, "number": 3}


def test_an_input_that_is_no_object_can_be_taken_as_a_whole() -> None:
    def handler(input: list[int]) -> None: ...  # noqa: A002 - the whole input

    assert bound(handler, job_input=[1, 2]) == {"input": [1, 2]}


def test_missing_parameters_are_named_with_their_step() -> None:
    def ship(reserve: str, number: int) -> None: ...

    with pytest.raises(PermanentError, match=r"step orders/1/ship: there is no value for its parameter 'reserve'"):
        bound(ship)
    with pytest.raises(PermanentError, match=r"step 'reserve' failed, so it has no result; give .* a default"):
        bound(ship, errors={"reserve": {"message": "sold out"}})
    with pytest.raises(InputError, match=r"task orders/1/ship: argument 'number'.*valid integer"):
        bound(ship, results={"reserve": "a"}, job_input={"number": "x"})


def test_a_skipped_step_leaves_the_default() -> None:
    def ship(express: str | None = None, standard: str | None = None) -> None: ...

    assert bound(ship, results={"standard": "a"}) == {"standard": "a"}


def context(**more: Any) -> StepContext:
    return StepContext(uuid4(), "orders/1/ship", step="ship", attempt=3, tries=2, max_tries=2, job=job(**more))


def test_a_step_context_is_a_task_context_that_knows_its_job() -> None:
    ctx = context(results={"price": 3}, config={"retries": 1}, errors={"charge": {"message": "no"}})
    assert isinstance(ctx, TaskContext)
    assert (ctx.attempt, ctx.is_last_try, ctx.step, ctx.fence) == (3, True, "ship", 3)
    assert (ctx.job_input, ctx.results, ctx.config) == ({"number": 7}, {"price": 3}, {"retries": 1})
    assert (ctx.get_input("number"), ctx.get_input("x"), ctx.get_input("x", 1)) == (7, None, 1)
    assert (ctx.get_dependency_result("price"), ctx.get_dependency_result("x", 0)) == (3, 0)
    assert (ctx.get_config("retries"), ctx.get_config("x", "y")) == (1, "y")
    assert (ctx.get_dependency_error("charge"), ctx.get_dependency_error("x")) == ({"message": "no"}, None)
    assert not hasattr(ctx, "__dict__")


def test_a_step_context_without_a_job_is_empty() -> None:
    ctx = StepContext(line=Recorder())
    assert (ctx.job_input, ctx.results, ctx.errors, ctx.config) == (None, {}, {}, {})
    assert ctx.get_input("x", 1) == 1
    assert ctx.checkpoint({"at": 3}).wait()
    assert ctx.restore() == {"at": 3}


def test_metadata_is_kept_for_the_orchestrator() -> None:
    ctx = context()
    ctx.set_metadata("rows", 3)
    assert ctx.orchestration_metadata == {"rows": 3}
    with pytest.raises(ValueError, match=r"metadata cannot be stored: \['at'\] a timezone is not a JSON value"):
        ctx.set_metadata("at", UTC)


@pytest.mark.parametrize(("returned", "names"), [("a", ["a"]), (["b", "a", "b"], ["a", "b"]), ((), []), ({"b"}, ["b"])])
def test_a_decision_chooses_among_its_branches(returned: Any, names: list[str]) -> None:
    assert chosen_branches(["a", "b"], returned) == names


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("c", "chose 'c', which is none of its branches: a, b"),
        (["a", None], "chose None"),
        (None, "a list of names, not NoneType; its branches are a, b"),
        ({"a": 1}, "not dict"),
    ],
)
def test_a_choice_that_is_none_is_refused_for_good(returned: Any, told: str) -> None:
    with pytest.raises(PermanentError, match=told):
        chosen_branches(["a", "b"], returned)


def test_the_result_of_a_step_is_a_document() -> None:
    start = datetime(2030, 1, 1, tzinfo=UTC)
    done = step_result(
        "ship",
        success=True,
        result=[1],
        started_at=start,
        completed_at=start + timedelta(milliseconds=12.5),
        worker_id="w-1",
        attempt=2,
        orchestration_metadata={"chosen": ["a"]},
    )
    assert done == {
        "step": "ship",
        "success": True,
        "result": [1],
        "status": "completed",
        "error": None,
        "metadata": {
            "started_at": "2030-01-01T00:00:00+00:00",
            "completed_at": "2030-01-01T00:00:00.012500+00:00",
            "execution_ms": 12.5,
            "worker_id": "w-1",
            "attempt": 2,
            "retryable": False,
        },
        "orchestration_metadata": {"chosen": ["a"]},
    }
    error = {"message": "no", "retryable": True}
    failed = step_result("ship", success=False, error=error)
    assert (failed["status"], failed["error"], failed["metadata"]["retryable"]) == ("failed", error, True)
    assert step_result("a", success=False, error={"retryable": True}, retryable=False)["metadata"]["retryable"] is False
    assert failed["metadata"]["execution_ms"] is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"approved": False, "by": "eva", "comment": "too dear"}, "rejected by eva: too dear$"),
        ({"approved": 1}, "rejected$"),
        (None, "rejected$"),
    ],
)
def test_any_other_answer_is_a_rejection(answer: Any, message: str) -> None:
    with pytest.raises(PermanentError, match=message):
        require_approval(answer)


def test_an_answer_is_given_back_when_it_is_a_yes() -> None:
    assert require_approval({"approved": True}) == {"approved": True}
