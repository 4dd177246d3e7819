"""Arguments and results between Python and JSON: bound, validated, converted, and the same after the way back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional
from uuid import UUID, uuid4

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from interlock import Interlock, TaskContext
from interlock.errors import DefinitionError, InputError, PermanentError

if TYPE_CHECKING:
    from collections import OrderedDict as OnlyForTheChecker
    from collections.abc import Callable

    from interlock.client.task import Task

pytestmark = pytest.mark.unit


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


@dataclass
class Parcel:
    size: Size
    sent_at: datetime


class Customer(BaseModel):
    id: UUID
    emails: list[str]


def task_of(function: Callable[..., Any]) -> Task[..., Any]:
    task: Task[..., Any] = Interlock("postgresql://nowhere").task(function)
    return task


def stored(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value))


def plain(to: str, n: int = 3, ratio: float | None = None, *, urgent: bool = False) -> str:
    return f"{to}{n}{ratio}{urgent}"


def test_arguments_are_stored_by_name_however_they_are_given() -> None:
    task = task_of(plain)
    assert task.encode("a", 1) == task.encode(to="a", n=1) == {"to": "a", "n": 1}
    assert task.encode("a", urgent=True) == {"to": "a", "urgent": True}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "missing a required argument: 'to'"),
        (
            {"too": "a"},
            r"missing a required argument: 'to'; unknown argument: too; known are \['n', 'ratio', 'to', 'urgent'\]",
        ),
        ({"to": "a", "subject": "b"}, "unexpected keyword argument 'subject'"),
        ({"to": 3}, "argument 'to'.*valid string"),
        ({"to": None}, "argument 'to'"),
        ({"to": "a", "n": "many"}, "argument 'n'.*valid integer"),
        ({"to": "a\0"}, "argument 'to'.*NUL"),
        ({"to": "\ud800"}, "argument 'to'.*(Unicode|unicode)"),
        ({"to": "a", "n": 2**64}, "argument 'n'.*64 bits"),
        ({"to": "a", "ratio": math.nan}, "argument 'ratio'.*finite"),
        ({"to": "a", "ratio": math.inf}, "argument 'ratio'.*finite"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=f"task plain: .*{told}"):
        task_of(plain).encode(**arguments)


def test_a_refusal_does_not_show_the_value_which_may_be_a_secret() -> None:
    with pytest.raises(InputError) as caught:
        task_of(plain).encode("a", n="hunter2")
    assert "hunter2" not in str(caught.value)


def test_values_are_converted_where_they_can_be() -> None:
    assert task_of(plain).encode("a", n="4", ratio=1) == {"to": "a", "n": 4, "ratio": 1.0}


def rich(
    at: datetime,
    day: date,
    wait: timedelta,
    price: Decimal,
    who: UUID,
    where: Path,
    raw: bytes,
    pair: tuple[int, str],
    names: frozenset[str],
    by_number: dict[int, Size],
    parcel: Parcel,
    customer: Customer,
    mode: Literal["fast", "safe"],
    share: Annotated[float, Field(ge=0, le=1)],
) -> None: ...


RICH: dict[str, Any] = {
    "at": datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=UTC),
    "day": date(2030, 1, 2),
    "wait": timedelta(seconds=1.5),
    "price": Decimal("12.30"),
    "who": uuid4(),
    "where": Path("/tmp/x"),  # noqa: S108 - nothing is written there
    "raw": b"\xff\x00",
    "pair": (1, "a"),
    "names": frozenset({"a", "b"}),
    "by_number": {1: Size.SMALL},
    "parcel": Parcel(Size.LARGE, datetime(2030, 1, 1, tzinfo=UTC)),
    "customer": Customer(id=uuid4(), emails=["a@b"]),
    "mode": "fast",
    "share": 0.5,
}


def test_typed_values_are_the_same_after_the_way_through_json() -> None:
    task = task_of(rich)
    assert task.decode(stored(task.encode(**RICH))) == RICH
    with pytest.raises(InputError, match=r"argument 'share'.*less than or equal to 1"):
        task.encode(**{**RICH, "share": 2})


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    # an escaped text of any kind but the two that PostgreSQL cannot store
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\\n', max_size=3), inner, max_size=3),
    max_leaves=8,
)


def anything(value, other: Any = None, **more: object):  # type: ignore[no-untyped-def]  # noqa: ANN201, ANN001 - the point
    return value, other, more


@given(value=json_values)
def test_without_annotations_every_json_value_goes_through(value: Any) -> None:
    task = task_of(anything)
    given_arguments = {"value": value, "other": value, "extra": value}
    assert task.decode(stored(task.encode(**given_arguments))) == given_arguments
    assert task.encode_result([value]) == [value]


@pytest.mark.parametrize("value", [datetime.now(UTC), {1: 2}, {"a": {1, 2}}, object(), [math.nan], {"a": ["x\0"]}])
def test_without_annotations_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="argument 'value'"):
        task_of(anything).encode(value)


@pytest.mark.parametrize(
    ("given_input", "told"),
    [
        ({}, "missing argument: to"),
        ({"to": "a", "x": 1}, "unknown argument: x"),
        ({"to": 1}, "argument 'to'"),
        ([], "object"),
    ],
)
def test_stored_values_are_checked_before_they_run(given_input: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        task_of(plain).decode(given_input)


def test_values_written_by_sql_are_converted() -> None:
    assert task_of(plain).decode({"to": "a", "ratio": 1, "n": "7"}) == {"to": "a", "ratio": 1.0, "n": 7}


def first(ctx: TaskContext, to: str) -> None: ...
def last(to: str, ctx: TaskContext | None = None) -> None: ...
def optional(to: str, ctx: Optional[TaskContext] = None) -> None: ...  # noqa: UP045 - the older way to write it
def no_context(to: str) -> None: ...


@pytest.mark.parametrize("function", [first, last, optional])
def test_the_context_is_found_by_its_type_and_is_no_argument(function: Callable[..., Any]) -> None:
    task = task_of(function)
    assert task.context_parameter == "ctx"
    assert task.encode("a") == task.encode(to="a") == {"to": "a"}
    with pytest.raises(InputError, match="ctx"):
        task.encode(to="a", ctx=TaskContext())
    with pytest.raises(InputError, match="ctx"):
        task.decode({"to": "a", "ctx": {}})


@pytest.mark.parametrize(
    "written", ["interlock.TaskContext", "interlock.TaskContext | None", "typing.Optional[interlock.TaskContext]"]
)
def test_a_context_that_is_imported_for_the_type_checker_only_is_found_too(written: str) -> None:
    def handler(ctx: TaskContext, to: str) -> None: ...

    handler.__annotations__["ctx"] = written  # names that this module does not have at run time
    assert task_of(handler).context_parameter == "ctx"
    assert task_of(no_context).context_parameter is None


def test_an_annotation_that_does_not_exist_at_run_time_is_named_when_it_is_needed() -> None:
    def handler(value: OnlyForTheChecker[str, int]) -> None: ...

    task = task_of(handler)
    for use in (task.resolve, lambda: task.encode(value={})):
        with pytest.raises(DefinitionError, match=r"task handler: the parameter 'value'.*OnlyForTheChecker"):
            use()


def by_position(to: str, /) -> None: ...
def starred(*to: str) -> None: ...
def two_contexts(a: TaskContext, b: TaskContext) -> None: ...


@pytest.mark.parametrize("function", [by_position, starred, two_contexts])
def test_a_signature_that_cannot_be_stored_by_name_is_refused_at_definition(function: Callable[..., Any]) -> None:
    with pytest.raises(DefinitionError, match=f"task {function.__name__}"):
        task_of(function)


def test_an_annotation_that_has_no_json_is_refused_when_the_app_is_opened() -> None:
    def handler(connect: Callable[[], int]) -> None: ...

    handler.__annotations__["connect"] = type("Opaque", (), {})
    with pytest.raises(DefinitionError, match="'connect' has an annotation that cannot be converted to JSON"):
        task_of(handler).resolve()


def gives_model() -> Customer: ...  # type: ignore[empty-body]
def gives_number() -> float: ...  # type: ignore[empty-body]
def gives_numbers() -> list[int]: ...  # type: ignore[empty-body]
def gives_nothing() -> None: ...


def test_results_go_through_json_by_the_annotation_of_the_function() -> None:
    customer = Customer(id=uuid4(), emails=["a@b"])
    task = task_of(gives_model)
    assert task.decode_result(stored(task.encode_result(customer))) == customer
    assert task_of(gives_number).encode_result(3) == 3
    assert task_of(gives_nothing).encode_result(None) is None


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (gives_number, "much"),
        (gives_numbers, ["a"]),
        (gives_number, math.nan),
        (anything, object()),
        (gives_nothing, 1),
    ],
)
def test_a_result_that_cannot_be_stored_is_a_permanent_error(function: Callable[..., Any], value: Any) -> None:
    with pytest.raises(PermanentError, match="the result cannot be stored"):
        task_of(function).encode_result(value)
