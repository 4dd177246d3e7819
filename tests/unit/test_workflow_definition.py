"""Workflows declared in Python: their documents, and errors that name the place."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from interlock import Backoff, Interlock, StepContext, TaskContext, Workflow
from interlock.client.workflow import check_nesting
from interlock.errors import DefinitionError, InputError
from interlock.model.graph import GraphError
from interlock.model.json_schema import check_input
from interlock.testing import run_inline

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.unit


class Order(BaseModel):
    number: int
    express: bool = False


class Basket(TypedDict):
    items: list[str]


@dataclass
class Parcel:
    weight: float


def app() -> Interlock:
    return Interlock("postgresql://nowhere")


def new(**options: Any) -> Workflow:
    return app().workflow("orders", **options)


def steps_of(workflow: Workflow) -> dict[str, dict[str, Any]]:
    return {step["name"]: step for step in workflow.document["steps"]}


def nothing() -> None:
    """Stand in for a handler."""


def test_an_order_is_declared_as_a_document() -> None:
    wf = app().workflow("order_fulfillment", namespace="fulfillment", version="2", timeout=timedelta(hours=1))

    @wf.step
    async def validate(number: int) -> dict[str, int]:
        return {"number": number}

    @wf.step(after=[validate], max_tries=3, backoff=Backoff.linear(base=2), timeout=30, compensate=nothing)
    def reserve(validate: dict[str, int]) -> list[str]:
        return [str(validate["number"])]

    @wf.decision(after=[reserve], branches=["express", "standard"])
    def route(reserve: list[str]) -> str:
        return "express" if reserve else "standard"

    wf.sleep("express", 60, after=[route])
    wf.approval("standard", timeout=3600, after=route, namespace="desk")

    @wf.map(over=reserve, after=["express", "standard"], join="any", strategy=0.5, priority=3)
    async def pack(item: str, index: int) -> str:
        return f"{item}{index}"

    wf.child("invoice", "billing", version="1", wait=False, input={"kind": "order"}, after=[pack], config={"a": [1]})
    wf.signal("paid", after="invoice", on_failure=[pack])

    assert wf.document == {
        "name": "order_fulfillment",
        "version": "2",
        "namespace": "fulfillment",
        "input_schema": {
            "$comment": "derived from the parameters of the first steps",
            "type": "object",
            "properties": {"number": {"type": "integer", "x-used-by": ["parameter 'number' of step 'validate'"]}},
            "required": ["number"],
        },
        "timeout": 3600.0,
        "steps": [
            {
                "name": "validate",
                "kind": "plain",
                "type": "order_fulfillment/2/validate",
                "namespace": "fulfillment",
                "after": [],
                "max_tries": 5,
            },
            {
                "name": "reserve",
                "kind": "plain",
                "type": "order_fulfillment/2/reserve",
                "namespace": "fulfillment",
                "after": ["validate"],
                "max_tries": 3,
                "backoff": {"kind": "linear", "base": 2, "cap": 3600.0, "jitter": 0.2},
                "timeout": 30.0,
                "compensate": "order_fulfillment/2/reserve:compensate",
                "compensate_tries": 5,
            },
            {
                "name": "route",
                "kind": "decision",
                "type": "order_fulfillment/2/route",
                "namespace": "fulfillment",
                "after": ["reserve"],
                "branches": ["express", "standard"],
                "max_tries": 5,
            },
            {
                "name": "express",
                "kind": "sleep",
                "namespace": "fulfillment",
                "after": ["route"],
                "seconds": 60.0,
            },
            {
                "name": "standard",
                "kind": "approval",
                "namespace": "desk",
                "after": ["route"],
                "timeout": 3600.0,
            },
            {
                "name": "pack",
                "kind": "map",
                "type": "order_fulfillment/2/pack",
                "namespace": "fulfillment",
                "after": ["reserve", "express", "standard"],
                "over": "reserve",
                "join": "any",
                "strategy": 0.5,
                "priority": 3,
                "max_tries": 5,
            },
            {
                "name": "invoice",
                "kind": "child",
                "namespace": "fulfillment",
                "after": ["pack"],
                "workflow": "billing",
                "workflow_version": "1",
                "wait": False,
                "input": {"kind": "order"},
                "config": {"a": [1]},
            },
            {
                "name": "paid",
                "kind": "signal",
                "namespace": "fulfillment",
                "after": ["invoice"],
                "on_failure": ["pack"],
                "signal": "paid",
            },
        ],
    }


def test_handlers_are_tasks_of_the_app_with_the_options_of_their_step() -> None:
    shop = app()
    wf = shop.workflow("orders", namespace="orders")

    @wf.step(timeout=30, max_tries=2, priority=4, backoff=lambda tries: tries * 60.0, executor="process")
    def charge(number: int) -> int:
        return number

    wf.step(name="refund", compensate=nothing, namespace="bank")(nothing)
    assert set(shop.tasks) == {
        "orders/charge",
        "orders/refund",
        "orders/refund:compensate",
    }
    task = shop.tasks["orders/charge"]
    assert (task.namespace, task.timeout, task.max_tries, task.priority) == ("orders", 30.0, 2, 4)
    assert (task.executor, task.backoff.delay(2)) == ("process", 120.0)
    assert "backoff" not in steps_of(wf)["charge"]
    assert shop.tasks["orders/refund:compensate"].namespace == "bank"
    assert charge.task is task
    assert shop.workflows == {("orders", wf.version): wf}


async def test_a_decorated_function_is_still_the_function() -> None:
    wf = new()

    @wf.step
    async def twice(n: int) -> int:
        """Double it."""
        return 2 * n

    @wf.step(after=[twice])
    def thrice(twice: int) -> int:
        return 3 * twice

    first: int = await twice(3)
    second: int = thrice(twice=4)
    assert (first, second) == (6, 12)
    assert (twice.__name__, twice.__doc__, twice.name, twice.kind) == ("twice", "Double it.", "twice", "plain")
    assert repr(thrice) == "<Step orders/thrice (plain)>"
    assert repr(wf) == "<Workflow orders, 2 steps>"
    assert await run_inline(wf.steps["twice"].task, 4) == 8  # type: ignore[arg-type]


async def test_a_task_of_the_app_can_be_a_step_under_its_own_type() -> None:
    shop = app()

    @shop.task(max_tries=7, priority=2, namespace="mail")
    async def send_email(to: str) -> str:
        return to

    program = shop.command_task("thumbnail", ["sh", "thumbnail.sh"])
    wf = shop.workflow("orders", namespace="orders")
    mail = wf.step(name="mail")(send_email)
    again = wf.task(send_email, name="again", after=[mail], max_tries=1, compensate=send_email)
    wf.task("send_email", after=again)
    wf.task(program, after=["send_email"])
    wf.decision(branches=["last"], after=program, name="choose")(send_email)
    wf.step(name="last", after=["choose"], namespace="mail")(program)
    assert await mail("ada") == "ada"
    found = steps_of(wf)
    assert [step["type"] for step in found.values()] == [
        "send_email",
        "send_email",
        "send_email",
        "thumbnail",
        "send_email",
        "thumbnail",
    ]
    assert (found["mail"]["max_tries"], found["mail"]["priority"], found["mail"]["namespace"]) == (7, 2, "orders")
    assert (found["again"]["max_tries"], found["again"]["compensate"]) == (1, "send_email")
    assert set(shop.tasks) == {"send_email", "thumbnail"}


def test_the_same_function_can_be_two_steps() -> None:
    wf = new()
    first = wf.step(name="first")(nothing)
    wf.step(name="second", after=[first])(nothing)
    wf.step(name="third", after=["second"])(first)
    assert [step["type"] for step in wf.document["steps"]] == ["orders/first", "orders/second", "orders/third"]
    with pytest.raises(GraphError, match=r"workflow orders: step 'fourth': after: 3 steps have the handler"):
        wf.sleep("fourth", 1, after=[nothing])


def test_a_step_can_be_named_by_its_function() -> None:
    wf = new()
    wf.step(name="first")(nothing)
    wf.sleep("second", 1, after=[nothing])
    assert steps_of(wf)["second"]["after"] == ["first"]


def test_steps_can_be_named_before_they_are_declared() -> None:
    wf = new()
    wf.sleep("second", 1, after=["first"])
    with pytest.raises(GraphError, match=r"workflow orders: step 'second': after: there is no step 'first'"):
        wf.document  # noqa: B018 - it raises
    wf.sleep("first", until=datetime(2030, 1, 1, tzinfo=UTC))
    assert steps_of(wf)["first"]["until"] == "2030-01-01T00:00:00+00:00"


def declare(wf: Workflow, how: Callable[[Workflow], Any]) -> None:
    how(wf)
    wf.document  # noqa: B018 - it raises


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda wf: wf.steps, "workflow orders: steps: a workflow needs a list of one step or more"),
        (lambda wf: wf.sleep("a[0]", 1), r"step 'a\[0\]': name: a name consists of at most 500 letters"),
        (lambda wf: (wf.sleep("a", 1), wf.sleep("a", 2)), "step 'a': name: there are two steps of this name"),
        (lambda wf: wf.sleep("a", 1, after=["a"]), "step 'a': after: .*cycle: a -> a"),
        (
            lambda wf: (wf.sleep("a", 1, after=["c"]), wf.sleep("b", 1, after=["a"]), wf.sleep("c", 1, after=["b"])),
            "cycle: a -> b -> c -> a",
        ),
        (lambda wf: (wf.sleep("validate", 1), wf.sleep("b", 1, after=["validat"])), "did you mean 'validate'"),
        (lambda wf: (wf.sleep("a", 1), wf.sleep("b", 1, after=["a", "a"])), "step 'b': after: names 'a' twice"),
        (
            lambda wf: (wf.sleep("a", 1), wf.sleep("b", 1, after=["a"], on_failure=["a"])),
            "step 'b': on_failure: names 'a' in after and in on_failure",
        ),
        (lambda wf: wf.sleep("a", 1, after=[3]), "step 'a': after: after must be a list of the names of steps"),
        (lambda wf: wf.sleep("a"), "step 'a': seconds: a step of kind sleep needs seconds or until, and not both"),
        (lambda wf: wf.sleep("a", 1, until="at"), "seconds or until, and not both"),
        (lambda wf: wf.sleep("a", -1), "step 'a': seconds: .*positive"),
        (lambda wf: wf.sleep("a", until="2030-01-01"), "step 'a': until: until needs a time zone"),
        (lambda wf: wf.sleep("a", until="2030-13-01"), "neither a time in ISO 8601 nor a field"),
        (lambda wf: wf.sleep("a", 1, join="some"), "step 'a': join: join must be 'all', 'any', a whole number"),
        (lambda wf: wf.sleep("a", 1, join=0), "join: .*ratio above 0"),
        (lambda wf: wf.sleep("a", 1, join=True), "join: .*ratio above 0"),
        (lambda wf: wf.sleep("a", 1, join=1.1), "join: .*ratio above 0"),
        (lambda wf: wf.sleep("a", 1, join=["all"]), "join: .*ratio above 0"),
        (lambda wf: wf.sleep("a", 1, priority=10**6), "step 'a': priority: priority must be a whole number"),
        (lambda wf: wf.sleep("a", 1, namespace=""), "step 'a': namespace: .*non-empty string"),
        (lambda wf: wf.sleep("a", 1, config={"at": UTC}), r"step 'a': config: \['at'\] a timezone is not a JSON value"),
        (lambda wf: wf.sleep("a", 1, config=[1]), "step 'a': config: config must be a mapping"),
        (lambda wf: wf.sleep("a", 1, max_tries=3), "max_tries: a step of kind sleep has no such field; it has name"),
        (lambda wf: wf.sleep("a", 1, prioritty=3), "prioritty: there is no such field; did you mean 'priority'"),
        (lambda wf: wf.decision(branches=[], name="a")(nothing), "step 'a': branches: .*one step or more"),
        (lambda wf: wf.decision(branches=["b"], name="a")(nothing), "step 'a': branches: there is no step 'b'"),
        (
            lambda wf: (wf.decision(branches=["b"], name="a")(nothing), wf.sleep("b", 1)),
            "step 'a': branches: 'b' is no branch of it: it does not name 'a' in its after",
        ),
        (lambda wf: wf.map(name="a")(nothing), "step 'a': over: a step of kind map needs over or over_input"),
        (lambda wf: wf.map(name="a", over="b", over_input="c")(nothing), "over or over_input, and not both"),
        (lambda wf: wf.map(name="a", over_input="c", strategy=0)(nothing), "step 'a': strategy: strategy must be"),
        (lambda wf: wf.map(name="a", over_input="c", compensate=nothing)(nothing), "compensate: a step of kind map"),
        (lambda wf: wf.child("a", "no/such"), "step 'a': workflow: "),
        (lambda wf: wf.child("a", "b", version=2), "step 'a': workflow_version: "),
        (lambda wf: wf.child("a", "b", wait="no"), "step 'a': wait: wait must be true or false"),
        (lambda wf: wf.child("a", "b", input=[1]), "step 'a': input: input must be a mapping"),
        (lambda wf: wf.signal("a", payload=type("X", (), {})), "step 'a': payload: no JSON Schema can be made of it"),
        (lambda wf: wf.signal("a", payload=int, payload_schema={}), "payload_schema: give either payload or"),
        (lambda wf: wf.approval("a", assignee=""), "step 'a': assignee: .*non-empty string"),
        (lambda wf: wf.signal("a", signal=""), "step 'a': signal: .*non-empty string"),
        (lambda wf: wf.approval("a", timeout=0), "step 'a': timeout: .*positive"),
        (lambda wf: wf.add("loop", nothing), "step 'nothing': kind: must be one of plain, decision"),
        (lambda wf: wf.add("plain", name="a"), "step 'a': type: a step of kind plain needs a handler"),
        (lambda wf: wf.add("plain", 3), "a step needs a function or a task, got 3"),
        (lambda wf: wf.add("plain", 3, name="a"), "a handler must be a function, a task or the name of a task, got 3"),
        (lambda wf: wf.task("mail"), "step 'mail': type: the app has no task 'mail'; it has none"),
        (lambda wf: wf.step(compensate="undo", name="a")(nothing), "compensate: the app has no task 'undo'"),
        (lambda wf: wf.step(max_tries=0)(nothing), "step 'nothing': max_tries: "),
        (lambda wf: wf.step(backoff="wild")(nothing), "step 'nothing': backoff: .*must be one of none, linear"),
        (lambda wf: wf.step(executor="moon")(nothing), "task orders/nothing: executor must be one of"),
        (lambda wf: wf.task("mail", executor="thread"), "executor: set this in the definition of the task"),
        (lambda wf: wf.step(name="a")(app().task(nothing)), "handler: the task 'nothing' belongs to another app"),
        (lambda wf: wf.sleep("b", 1, after=[new().sleep("a", 1)]), "after: <Step .*> is a step of another workflow"),
    ],
)
def test_invalid_definitions_are_refused_with_their_place(how: Callable[[Workflow], Any], told: str) -> None:
    with pytest.raises(DefinitionError, match=told):
        declare(new(), how)


def test_a_refused_step_is_not_added() -> None:
    shop = app()
    wf = shop.workflow("orders")
    with pytest.raises(GraphError):
        wf.step(max_tries=0)(nothing)
    wf.step()(nothing)
    assert list(wf.steps) == ["nothing"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"name": "a b"}, "workflow a b: name: a name consists of"),
        ({"name": ""}, "workflow: name: "),
        ({"version": "1/2"}, "workflow orders: version: "),
        ({"version": 1}, "version: a version is a string"),
        ({"namespace": " "}, "workflow orders: namespace: "),
        ({"timeout": 0}, "workflow orders: timeout: "),
        ({"input_schema": {"type": "objekt"}}, "workflow orders: input_schema: it is no JSON Schema: .type: "),
        ({"input_schema": {"$ref": "https://example.org/order"}}, "refers to another document"),
        ({"input_schema": [1]}, "input_schema must be a mapping"),
        ({"input": Order, "input_schema": {}}, "input_schema: give either input or input_schema, not both"),
    ],
)
def test_an_invalid_workflow_option_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(DefinitionError, match=told):
        app().workflow(**{"name": "orders", **options})


def test_two_workflows_of_one_version_are_refused() -> None:
    shop = app()
    shop.workflow("orders")
    shop.workflow("orders", version="2")
    with pytest.raises(DefinitionError, match="workflow 'orders' is defined twice; give one of them another version"):
        shop.workflow("orders")
    with pytest.raises(DefinitionError, match="workflow 'orders', version '2' is defined twice"):
        shop.workflow("orders", version="2")


def test_a_parameter_that_can_never_have_a_value_is_refused() -> None:
    closed = {"type": "object", "properties": {"number": {"type": "integer"}}, "additionalProperties": False}
    wf = new(input_schema=closed)

    @wf.step
    def first(number: int, input: dict[str, Any], colour: str = "red") -> None: ...  # noqa: A002 - the whole input

    @wf.step(after=[first])
    def second(ctx: StepContext, first: None, count: int) -> None: ...

    with pytest.raises(GraphError, match=r"step 'second': after: parameter 'count' \(.*\) is neither a step"):
        wf.document  # noqa: B018 - it raises


def test_a_parameter_that_names_a_step_elsewhere_is_refused() -> None:
    wf = new()

    @wf.step
    def first() -> None: ...

    @wf.step
    def second(first: None, colour: str) -> None: ...

    with pytest.raises(GraphError, match=r"step 'second': after: parameter 'first' \(.*\) is neither a step"):
        wf.document  # noqa: B018 - it raises


def test_a_part_of_a_map_is_not_handed_the_whole_list() -> None:
    wf = new()

    @wf.step
    def plan() -> list[int]:
        return [1, 2]

    @wf.map(over=plan)
    def pack(item: int, plan: list[int]) -> None: ...

    with pytest.raises(
        GraphError, match=r"step 'pack': after: parameter 'plan' .*: a part of a map gets its item, not the whole"
    ):
        wf.document  # noqa: B018 - it raises


@pytest.mark.parametrize(
    ("kind", "good", "bad", "told"),
    [
        (Order, {"number": 3}, {"number": "x"}, r"input\.number: must be of type integer"),
        (Order, Order(number=3, express=True), {}, "'number' is a required property"),
        (Basket, {"items": ["a"]}, {"items": ["a", 3]}, r"input\.items\[1\]: must be of type string"),
        (Parcel, Parcel(2.5), {"weight": None}, r"input\.weight: must be of type number"),
        (None, {"any": 1}, [1], "input must be a JSON object, got list"),
        (None, None, {"any": UTC}, r"input: \['any'\] a timezone is not a JSON value"),
        (Order, {"number": 1}, Parcel(1), "input: .*Order"),
    ],
)
def test_the_input_of_a_job_is_checked_against_its_type(kind: Any, good: Any, bad: Any, told: str) -> None:
    wf = new(input=kind)
    wf.sleep("a", 1)
    assert isinstance(wf.encode(good), dict)
    with pytest.raises(InputError, match=told):
        wf.encode(bad)


def test_an_input_model_becomes_the_schema_of_the_document() -> None:
    wf = new(input=Order)
    wf.sleep("a", 1)
    schema = wf.document["input_schema"]
    assert schema["properties"]["number"]["type"] == "integer"
    assert wf.encode(Order(number=3)) == {"number": 3, "express": False}
    assert wf.encode({"number": 3}) == {"number": 3}
    with pytest.raises(GraphError, match="input: the input of a job is a JSON object"):
        declare(new(input=int), lambda wf: wf.sleep("a", 1))
    with pytest.raises(GraphError, match="input: no JSON Schema can be made of it"):
        declare(new(input=Interlock), lambda wf: wf.sleep("a", 1))


@pytest.mark.parametrize(
    ("schema", "value", "told"),
    [
        ({"properties": {"n": {"minimum": 3}}}, {"n": 1}, r"workflow w: input\.n: breaks the rule minimum: 3"),
        ({"properties": {"n": {"type": ["null", "string"]}}}, {"n": 1}, "must be of type null or string"),
        ({"properties": {"n": {"enum": ["a", "b"]}}}, {"n": "secret"}, r'breaks the rule enum: \["a","b"\]$'),
        ({"additionalProperties": False}, {"n": 1}, "Additional properties are not allowed"),
        ({"$ref": "#/$defs/gone"}, {}, "workflow w: input_schema: .*gone"),
        ({"$defs": {"n": {"type": "object"}}, "$ref": "#/$defs/n"}, {}, None),
        (None, {}, None),
    ],
)
def test_schema_errors_name_the_place_only(schema: dict[str, Any] | None, value: Any, told: str | None) -> None:
    document = {"name": "w", "input_schema": schema}
    if told is None:
        check_input(document, value)
        return
    with pytest.raises(InputError, match=told) as refused:
        check_input(document, value)
    assert "secret" not in str(refused.value)


def test_child_jobs_that_would_nest_too_deep_are_refused() -> None:
    def document(name: str, *children: str) -> dict[str, Any]:
        return {
            "name": name,
            "steps": [{"name": f"c{n}", "kind": "child", "workflow": w} for n, w in enumerate(children)],
        }

    chain = [document(f"w{n}", f"w{n + 1}", "w9") for n in range(6)]
    check_nesting(chain[:-1])
    check_nesting([document("a", "a", "b"), document("b", "a")])  # known only while a job runs
    with pytest.raises(
        GraphError, match=r"workflow w0: steps: child jobs nest at most 5 deep, .* 6: w0 -> w1 -> .* -> w6"
    ):
        check_nesting(chain)


def test_a_context_is_known_by_its_annotation() -> None:
    wf = new()

    @wf.step
    def first(context: StepContext, number: int) -> None: ...

    @wf.step(after=[first])
    def second(number: int, context: TaskContext) -> None: ...

    @wf.step(after=[second])
    def third(number: int, context: StepContext | None = None) -> None: ...

    assert [step.task.context_parameter for step in wf.steps.values() if step.task] == ["context"] * 3
