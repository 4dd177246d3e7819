"""Wiring: parameters that nothing can provide, types that do not fit, and the input that the first steps need."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from interlock import Interlock, StepContext, Workflow
from interlock.client.template_yaml import TemplateError
from interlock.errors import InputError
from interlock.model.graph import GraphError
from interlock.model.json_types import element_of, fits, schema_of_annotation
from interlock.model.json_values import Codec

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.unit


class Order(BaseModel):
    number: int
    lines: list[str] = []
    deliver_at: str = "2030-01-01T00:00:00+00:00"


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    number: int


class Price(BaseModel):
    total: int
    currency: str = "EUR"


class Total(BaseModel):
    total: float


class Receipt(BaseModel):
    total: int
    number: int


class Aliased(BaseModel):
    total: int = Field(serialization_alias="sum")


class Tree(BaseModel):
    children: list[Tree] = []


class Forest(BaseModel):
    children: list[Forest] = []
    count: int = 0


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    total: int


def new(**options: Any) -> Workflow:
    return Interlock("postgresql://nowhere").workflow("orders", **options)


def refused(wf: Workflow) -> str:
    """Return the message of the refusal without the place of the step's declaration, which every one ends with."""
    with pytest.raises(GraphError) as error:
        wf.document  # noqa: B018 - it raises
    message, place, line = str(error.value).partition(" (declared at tests/unit/test_wiring.py:")
    assert place
    assert line.removesuffix(")").isdecimal()
    return message


def line_of(function: Callable[..., Any]) -> str:
    code: Any = getattr(function, "function", function).__code__
    return f"tests/unit/test_wiring.py:{code.co_firstlineno}"


# --- Types of results ------------------------------------------------------------------------------------------------


def test_a_result_that_does_not_fit_a_parameter_is_refused_with_both_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    wf = new()

    @wf.step
    def first() -> str:
        return "one"

    @wf.step(after=[first])
    def second(first: int) -> None: ...

    assert refused(wf) == (
        f"workflow orders: step 'second': after: parameter 'first' ({line_of(second)}) is int, "
        f"but step 'first' ({line_of(first)}) returns str"
    )


FITTING = [
    (int, float), (float, int), (bool, int), (int | None, int), (None, int | None), (Any, int), (str, Any),
    (str | int, float),
    (str, datetime), (float, datetime), (int, timedelta), (datetime, str), (UUID, str), (bytes, str),
    (Decimal, float), (str, Decimal), (Colour, str), (str, Colour), (Literal["a", "b"], Literal["b"]),
    (list, list[int]), (list[int], list[float]), (set[int], list[int]), (tuple[int, str], list[int]),
    (dict, Price), (dict[str, Any], Price), (Price, dict), (Price, Total), (Point, Price), (Price, Price),
    (Aliased, Aliased),
    (Tree, Forest), (str, Annotated[int, BeforeValidator(int)]), (Annotated[int, PlainSerializer(str)], str),
]  # fmt: skip
CONTRADICTING = [
    (str, int), (str, float), (str, bool), (int, str), (int, bool), (None, int), (datetime, int),
    (str, list[str]), (Price, list),
    (list[str], list[int]), (set[int], list[str]), (dict[str, int], dict[str, str]), (Price, Receipt),
    (Price | None, Receipt),
    (Literal["a"], Literal["b"]), (int, Colour), (Price, str),
    (Annotated[int, PlainSerializer(str, return_type=str)], int),
    (list[Price], list[Receipt]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("returned", "taken", "expected"),
    [*((*pair, True) for pair in FITTING), *((*pair, False) for pair in CONTRADICTING)],
)
def test_types_contradict_each_other_only_if_no_value_can_be_converted(
    returned: Any, taken: Any, *, expected: bool
) -> None:
    wf = new()

    def first() -> None: ...

    def second(first: None) -> None: ...

    first.__annotations__, second.__annotations__ = {"return": returned}, {"first": taken}
    wf.step(first)
    wf.step(after=["first"])(second)
    if expected:
        assert wf.document["steps"]
    else:
        assert "but step 'first'" in refused(wf)


def test_functions_without_annotations_and_commands_are_not_compared() -> None:
    app = Interlock("postgresql://nowhere")
    wf = app.workflow("orders")
    wf.task(app.command_task("thumbnail", ["true"]), name="image")

    @wf.step(after=["image"])
    def first(image: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
        return image

    @wf.step(after=[first])
    def second(first: int, anything) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001

    assert wf.document["steps"]


@pytest.mark.parametrize(
    ("kind", "annotation", "told"),
    [
        ("map", list[int], None),
        ("map", list[str], "is list[str], but step 'up' (tests"),
        ("map", int, "returns list[int]"),
        ("sleep", None, None),
        ("sleep", int, "but step 'up' has no result"),
        ("approval", dict[str, Any], None),
        ("approval", str, "but step 'up' returns an object"),
        ("signal", int, None),
        ("typed signal", Price, None),
        ("typed signal", Total, None),
        ("typed signal", str, "is str, but step 'up' has a payload of type object"),
        ("typed signal", Receipt, "but step 'up' has a payload of type object"),
        ("child", dict[str, Any], None),
        ("child", int, None),
    ],
)
def test_the_result_of_each_kind_of_step_has_its_type(
    kind: str, annotation: Any, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    wf = new()

    def up(item: str) -> int:
        return len(item)

    def down(up: None) -> None: ...

    down.__annotations__ = {"up": annotation}
    declare: dict[str, Callable[[], Any]] = {
        "map": lambda: wf.map(over_input="names", name="up")(up),
        "sleep": lambda: wf.sleep("up", 1),
        "approval": lambda: wf.approval("up"),
        "signal": lambda: wf.signal("up"),
        "typed signal": lambda: wf.signal("up", payload=Price),
        "child": lambda: wf.child("up", "billing"),
    }
    declare[kind]()
    wf.step(after=["up"])(down)
    if told is None:
        assert wf.document["steps"]
    else:
        assert told in refused(wf)


def test_an_item_is_an_element_of_the_list_that_a_map_goes_over() -> None:
    wf = new()

    @wf.step
    def plan() -> list[str]:
        return []

    wf.map(over=plan, name="pack")(lambda item: item)
    assert wf.document["steps"]

    @wf.map(over=plan)
    def count(item: int, index: int) -> None: ...

    assert "parameter 'item'" in refused(wf)
    assert "is int, but step 'plan'" in refused(wf)
    assert refused(wf).endswith("returns list[str], of which a part gets an element")


@pytest.mark.parametrize(
    ("returned", "item", "fine"),
    [
        (dict[str, int], dict[str, int], True),
        (dict[str, int], int, False),
        (list[int] | dict[str, int], int, True),
        (Any, int, True),
        (list[Price], Total, True),
        (list[Price], Receipt, False),
        (str, Any, False),
    ],
)
def test_a_map_goes_over_lists_and_ranges(returned: Any, item: Any, *, fine: bool) -> None:
    wf = new()

    def plan() -> None: ...

    def pack(item: None) -> None: ...

    plan.__annotations__, pack.__annotations__ = {"return": returned}, {"item": item}
    wf.step(plan)
    wf.map(over="plan")(pack)
    if fine:
        assert wf.document["steps"]
    else:
        assert "but step 'plan'" in refused(wf)


def test_a_part_has_a_whole_number_as_its_index() -> None:
    wf = new()

    @wf.map(over_input="names")
    def pack(item: str, index: str) -> None: ...

    assert "parameter 'index'" in refused(wf)


def test_a_step_that_recovers_another_must_return_what_the_steps_after_it_take() -> None:
    wf = new()

    @wf.step
    def charge() -> int:
        return 1

    @wf.step(recovers=[charge])
    def mend() -> str:
        return "paid in cash"

    @wf.step(after=[charge])
    def ship(charge: int) -> None: ...

    assert "step 'mend'" in refused(wf)
    assert ", which recovers 'charge', returns str" in refused(wf)


def test_a_compensation_takes_the_result_of_its_step_as_result() -> None:
    def undo(result: int) -> None: ...

    def undo_by_name(reserve: str) -> None: ...

    def undo_for(result: str, number: int, input: Any) -> None: ...  # noqa: A002 - the whole input

    def reserve() -> str:
        return "r"

    wf = new()
    wf.step(compensate=undo)(reserve)
    assert "step 'reserve': compensate: parameter 'result'" in refused(wf)
    wf = new()
    wf.step(compensate=undo_by_name)(reserve)
    assert "is neither 'result', the result of the step, nor a field of the input" in refused(wf)
    wf = new(input=Order)
    wf.step(compensate=undo_for)(reserve)
    assert wf.document["steps"]


# --- Where values come from ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["on_failure", "always", "recovers"])
def test_a_step_that_may_have_failed_needs_a_default(field: str) -> None:
    wf = new()

    @wf.step
    def charge() -> int:
        return 1

    def tell(charge: int) -> None: ...

    def tell_with_default(charge: int | None = None) -> None: ...

    options: Any = {field: [charge]}
    wf.step(**options, name="fine")(tell_with_default)
    assert wf.document["steps"]
    wf.step(**options)(tell)
    assert f"step 'tell': {field}: parameter 'charge'" in refused(wf)
    assert f"needs a default: step 'charge' is in {field}, so it may have no result" in refused(wf)


@pytest.mark.parametrize(
    ("join", "fine"), [("all", True), ("any", False), (1, False), (0.5, False), (2, True), (0.9, True)]
)
def test_a_join_that_is_met_without_a_dependency_needs_a_default(join: Any, *, fine: bool) -> None:
    wf = new()
    wf.signal("a")
    wf.signal("b")

    @wf.step(after=["a", "b"], join=join)
    def first(a: int, b: int) -> None: ...

    if fine:
        assert wf.document["steps"]
    else:
        assert f"needs a default: step 'a' is not needed with join={join!r}" in refused(wf)


def test_a_parameter_that_the_input_model_lacks_is_refused_with_the_near_name() -> None:
    wf = new(input=Order)

    @wf.step
    def first(nummber: int) -> None: ...

    assert "parameter 'nummber'" in refused(wf)
    assert refused(wf).endswith("is neither a step in its after nor a field of the input; did you mean 'number'?")


def test_a_parameter_that_something_can_provide_is_not_refused() -> None:
    wf = new(input=Order)

    @wf.step
    def first(ctx: StepContext, number: int, input: Order, colour: str = "red", **rest: Any) -> str: ...  # type: ignore[empty-body]  # noqa: A002

    @wf.step(after=[first])
    def second(first: str, input: dict[str, Any], lines: list[str]) -> None: ...  # noqa: A002 - the whole input

    assert wf.document["steps"]
    kinds: list[dict[str, Any]] = [{"input": Open}, {"input_schema": {"properties": {"a": {}}}}, {}]
    for options in kinds:
        wf = new(**options)

        @wf.step
        def other(unknown: int) -> None: ...

        assert wf.document["steps"], "such an input can have other fields"


def test_a_field_of_the_input_fits_its_parameter() -> None:
    wf = new(input=Order)

    @wf.step
    def first(number: str) -> None: ...

    assert refused(wf).endswith("is str, but the field 'number' of the input is of type integer")
    wf = new(input=Order)

    @wf.step
    def second(input: Receipt) -> None: ...  # noqa: A002 - the whole input

    assert "parameter 'input'" in refused(wf)


def test_fields_that_a_step_names_are_fields_of_the_input() -> None:
    wf = new(input=Order)
    wf.map(over_input="linez", name="pack")(lambda item: item)
    assert refused(wf) == (
        "workflow orders: step 'pack': over_input: the input has no field 'linez'; did you mean 'lines'?"
    )
    wf = new(input=Order)
    wf.map(over_input="number", name="pack")(lambda item: item)
    assert "a map goes over a list or a range, but the field 'number' of the input is of type integer" in refused(wf)
    wf = new(input=Order)
    wf.sleep("rest", until="deliver_on")
    assert "until: the input has no field 'deliver_on'; did you mean 'deliver_at'?" in refused(wf)
    wf = new(input=Order)
    wf.child("invoice", "billing", input={"order": "input.numbr", "kind": "input", "text": "linez"})
    assert "input: the input has no field 'numbr'; did you mean 'number'?" in refused(wf)
    wf = new(input=Order)
    wf.approval("release", assignee="input.lined.0")
    assert "assignee: the input has no field 'lined'; did you mean 'lines'?" in refused(wf)
    wf = new(input=Order)
    wf.map(over_input="lines", name="pack")(lambda item: item)
    wf.approval("release", assignee="input.number")
    wf.approval("other", assignee="ops")
    wf.sleep("rest", until="deliver_at")
    wf.sleep("later", until="2030-01-01T00:00:00+00:00")
    wf.child("invoice", "billing", input={"order": "input.number"})
    assert wf.document["steps"]


@pytest.mark.parametrize("path", ["input.numbr", "input.numbr.part"])
def test_a_key_names_a_field_of_the_input(path: str) -> None:
    wf = new(input=Order, key=path)
    wf.step(name="a")(lambda: None)
    with pytest.raises(GraphError, match=r"key: the input has no field 'numbr'; did you mean 'number'\?"):
        _ = wf.document
    for model, fine in ((Order, "input.number"), (Open, "input.numbr")):
        accepted = new(input=model, key=fine)
        accepted.step(name="a")(lambda: None)
        assert accepted.document["key"] == fine


@pytest.mark.parametrize("condition", ["input.numbr > 1", "not (number and input['numbr'])"])
def test_a_condition_names_fields_of_the_input(condition: str) -> None:
    wf = new(input=Order)
    wf.step(name="number")(lambda: None)
    wf.step(name="b", after=["number"], when=condition)(lambda: None)
    with pytest.raises(GraphError, match=r"step 'b': when: the input has no field 'numbr'"):
        _ = wf.document


@pytest.mark.parametrize(
    ("returned", "fine"),
    [
        (str, True),
        (list[str], True),
        (Literal["b"], True),
        (str | None, True),
        (Any, True),
        (int, False),
        (None, False),
    ],
)
def test_a_decision_returns_names_of_branches(returned: Any, *, fine: bool) -> None:
    wf = new()

    def route() -> Any: ...

    route.__annotations__["return"] = returned
    wf.decision(branches=["b"])(route)
    wf.step(name="b", after=["route"])(lambda: None)
    if fine:
        assert wf.document
        return
    with pytest.raises(GraphError, match=r"the handler \(.*test_wiring\.py:\d+\) returns .*, but a decision returns"):
        _ = wf.document


def test_a_template_names_the_file_and_the_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wired_handlers.py").write_text("def a() -> str: ...\ndef b(a: int) -> None: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "orders.yaml"
    file.write_text(
        "name: orders\nsteps:\n"
        "  - {name: a, handler: 'wired_handlers:a'}\n"
        "  - {name: b, handler: 'wired_handlers:b', after: [a]}\n"
    )
    with pytest.raises(TemplateError) as error:
        Interlock("postgresql://nowhere").load_templates(file)
    assert f"{file}, line 4: step 'b', after: parameter 'a' ({tmp_path}/wired_handlers.py:2) is int" in str(error.value)
    assert f"but step 'a' ({tmp_path}/wired_handlers.py:1) returns str" in str(error.value)


# --- The input that the first steps need -----------------------------------------------------------------------------


def test_the_input_is_checked_against_the_parameters_of_the_first_steps() -> None:
    wf = new()

    @wf.step
    def first(number: int, price: Price, ctx: StepContext, colour: str = "red", anything: Any = None) -> None: ...

    @wf.step
    def also(number: float) -> None: ...

    @wf.step(after=[first])
    def second(first: None, size: int) -> None: ...

    @wf.step(when="input.bulk")
    def sometimes(bulk: list[int]) -> None: ...

    good = {"number": 3, "price": {"total": 3}, "more": True}
    assert wf.encode(good) == good
    refusals = {
        "'number' is a required property (parameter 'number' of step 'first', parameter 'number' of step 'also')": {
            "price": {"total": 3}
        },
        "input.number: must be of type integer (parameter 'number' of step": {**good, "number": "three"},
        "input.price: 'total' is a required property (parameter 'price' of step 'first')": {**good, "price": {}},
        "input.price.total: must be of type integer (parameter 'price'": {**good, "price": {"total": None}},
        "input.colour: must be of type string (parameter 'colour' of step 'first')": {**good, "colour": 3},
    }
    for told, given in refusals.items():
        with pytest.raises(InputError) as error:
            wf.encode(given)
        assert told in str(error.value)
    assert wf.document["input_schema"]["$comment"] == "derived from the parameters of the first steps"


@pytest.mark.parametrize(
    ("one", "other", "fine"),
    [
        (int, str, False),
        (list[int], str, False),
        (Price, list[Price], False),
        (int, float, True),
        (int | str, str | None, True),
        (Price, Receipt, True),  # an object can have the fields of both
        (Any, int, True),
    ],
)
def test_first_steps_that_no_input_can_satisfy_together_are_refused(one: Any, other: Any, *, fine: bool) -> None:
    wf = new()

    def first(number: None) -> None: ...

    def also(number: None) -> None: ...

    first.__annotations__, also.__annotations__ = {"number": one}, {"number": other}
    wf.step(first)
    wf.step(also)
    if fine:
        assert wf.document["input_schema"]["required"] == ["number"]
        return
    with pytest.raises(GraphError) as error:
        _ = wf.document
    assert "parameter 'number' of step 'also' is" in str(error.value)
    assert "but parameter 'number' of step 'first' is" in str(error.value)


def test_first_steps_with_defaults_need_no_value_that_fits_both() -> None:
    wf = new()

    @wf.step
    def first(number: int | None = None) -> None: ...

    @wf.step
    def also(number: str = "x") -> None: ...

    assert wf.encode({}) == {}


def test_the_input_has_what_maps_and_sleeps_at_the_beginning_name() -> None:
    wf = new()
    wf.map(over_input="names", name="pack")(lambda item, other: (item, other))
    wf.sleep("rest", until="deliver_at")
    fine: dict[str, Any] = {"names": [], "deliver_at": "2030-01-01T00:00:00+00:00"}
    assert wf.encode(fine) == fine
    assert wf.encode({**fine, "names": {"start": 0, "stop": 9, "size": 3}})
    with pytest.raises(InputError, match=r"'names' is a required property \(over_input of step 'pack'\)"):
        wf.encode({"deliver_at": fine["deliver_at"]})
    with pytest.raises(
        InputError, match=r"input\.names: must be of type array or object \(over_input of step 'pack'\)"
    ):
        wf.encode({**fine, "names": 3})
    with pytest.raises(InputError, match=r"'deliver_at' is a required property \(until of step 'rest'\)"):
        wf.encode({"names": []})


def test_the_whole_input_is_checked_against_a_parameter_that_takes_it() -> None:
    wf = new()

    @wf.step
    def first(input: Order) -> None: ...  # noqa: A002 - the whole input

    assert wf.encode({"number": 3, "more": 1})
    with pytest.raises(InputError, match=r"'number' is a required property \(parameter 'input' of step 'first'\)"):
        wf.encode({"more": 1})


def test_a_workflow_whose_first_steps_need_nothing_takes_any_input() -> None:
    app = Interlock("postgresql://nowhere")
    wf = app.workflow("orders")
    wf.task(app.command_task("thumbnail", ["true"]), name="image")
    wf.step(name="all")(lambda **rest: rest)
    wf.step(name="none")(lambda: None)
    assert wf.document["input_schema"] is None
    assert wf.encode({"any": 1}) == {"any": 1}


def test_models_of_one_name_in_two_steps_are_kept_apart() -> None:
    def make(field: str) -> Any:
        return type("Item", (BaseModel,), {"__annotations__": {field: int}, "__module__": f"{__name__}.{field}"})

    wf = new()

    def first(a: None) -> None: ...

    def second(b: None) -> None: ...

    first.__annotations__, second.__annotations__ = {"a": make("one")}, {"b": make("two")}
    wf.step(first)
    wf.step(second)
    assert wf.encode({"a": {"one": 1}, "b": {"two": 2}})
    with pytest.raises(InputError, match=r"input\.b: 'two' is a required property"):
        wf.encode({"a": {"one": 1}, "b": {"one": 2}})


def test_schemas_of_references_that_cannot_be_followed_fit_everything() -> None:
    assert fits({"$ref": "#/$defs/gone"}, {"type": "string"})
    assert fits({"type": "object", "additionalProperties": True}, {"type": "object", "additionalProperties": {}})
    assert element_of({"type": "string"}) is None
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}, "b": True}}
    assert fits(loop, {"type": "string"})
    assert fits({"$ref": "#/$defs/b", "$defs": loop["$defs"]}, {"type": "string"})
    wf = new(input_schema={"properties": {"a": True, "b": {"type": ["string", "null"]}}})
    wf.step(name="first")(lambda a, b: (a, b))
    assert wf.document["steps"]
    assert schema_of_annotation(Codec(type("Own", (), {})), "validation") == {}


def test_a_parameter_of_an_alternative_needs_a_default() -> None:
    wf = new()

    @wf.decision(branches=["x", "y"])
    def route() -> str:
        return "x"

    @wf.step(after=[route])
    def x() -> int:
        return 1

    @wf.step(after=[route])
    def y() -> int:
        return 2

    @wf.step(after=[x, y])
    def join(x: int, y: int = 0) -> int:
        return x + y

    assert "needs a default: step 'x' is on one of the branches of a decision, so it may have no result" in refused(wf)


def test_a_map_cannot_go_over_an_alternative() -> None:
    wf = new()

    @wf.decision(branches=["first", "second"])
    def route() -> str:
        return "first"

    @wf.step(after=[route])
    def first() -> list[int]:
        return [1]

    @wf.step(after=[route])
    def second() -> list[int]:
        return [2]

    @wf.map(over=first, after=[second])
    def each(item: int) -> int:
        return item

    assert refused(wf) == (
        "workflow orders: step 'each': over: step 'first' may have no result when this step runs, so it cannot be "
        "mapped over"
    )
