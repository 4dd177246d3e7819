"""Workflows from YAML: the same documents as from Python, and refusals with file, line and field."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import TYPE_CHECKING, Any, cast

import pytest

from interlock import Backoff, Interlock
from interlock.client.template_yaml import TemplateError
from interlock.errors import DefinitionError, PermanentError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

ORDERS = """\
name: order_fulfillment
namespace: fulfillment
version: "2"
description: From the order to the parcel.
timeout: 3600
input_schema:
  type: object
  required: [number]
  properties:
    number: {type: integer}
steps:
  - name: validate
    handler: check_order
    retry: {max_tries: 3, backoff: linear, base: 2}
    timeout: 30
  - name: reserve
    handler: template_handlers:reserve
    dependencies: [validate]
    compensate: template_handlers:unreserve
    config: {warehouse: north}
  - name: route
    type: decision
    handler: template_handlers:route
    dependencies: [reserve]
    branches: [express, standard]
  - name: express
    type: sleep
    seconds: 60
    dependencies: [route]
  - name: standard
    type: sleep
    until: 2030-01-01T00:00:00Z
    dependencies: [route]
  - name: pack
    type: map
    handler: template_handlers:pack
    over: reserve
    strategy: 0.9
    dependencies: [reserve, express, standard]
    join: any
  - name: invoice
    type: child
    workflow: billing
    workflow_version: "1"
    wait: false
    input: {kind: order}
    after: [pack]
  - name: paid
    type: signal
    signal: payment
    payload_schema: {type: object, required: [amount], properties: {amount: {type: integer}}}
    assignee: input.clerk
    timeout: 86400
    dependencies: [invoice]
  - name: release
    type: approval
    namespace: desk
    priority: 3
    dependencies: [paid]
  - name: apologize
    handler: template_handlers:apologize
    on_failure: [paid, release]
    join: any
"""

HANDLERS = """\
def reserve(number: int) -> list[str]:
    return [str(number)]

def unreserve(result: list[str]) -> None: ...

def route(reserve: list[str]) -> str:
    return "express"

async def pack(item: str) -> str:
    return item

def apologize(number: int) -> None: ...

class Handlers:
    @staticmethod
    def held() -> None: ...

number = 3
"""


@pytest.fixture(autouse=True)
def handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "template_handlers.py").write_text(HANDLERS)
    (tmp_path / "template_broken.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)


def shop() -> Interlock:
    app = Interlock("postgresql://nowhere")

    @app.task
    async def check_order(number: int) -> int:
        return number

    return app


def write(place: Path, text: str, name: str = "orders.yaml") -> Path:
    file = place / name
    file.write_text(dedent(text))
    return file


def test_a_template_gives_the_same_document_as_python(tmp_path: Path) -> None:
    import template_handlers as written  # type: ignore[import-not-found]  # noqa: PLC0415 - it is written by a fixture

    (loaded,) = shop().load_templates(write(tmp_path, ORDERS))

    app = shop()
    schema = {"type": "object", "required": ["number"], "properties": {"number": {"type": "integer"}}}
    wf = app.workflow("order_fulfillment", namespace="fulfillment", version="2", input_schema=schema, timeout=3600)
    linear = Backoff.linear(base=2)
    wf.task("check_order", name="validate", max_tries=3, backoff=linear, timeout=30)
    wf.step(after=["validate"], compensate=written.unreserve, config={"warehouse": "north"})(written.reserve)
    wf.decision(after=["reserve"], branches=["express", "standard"])(written.route)
    wf.sleep("express", 60, after=["route"])
    wf.sleep("standard", until="2030-01-01T00:00:00Z", after=["route"])
    wf.map(over="reserve", strategy=0.9, after=["reserve", "express", "standard"], join="any")(written.pack)
    wf.child("invoice", "billing", version="1", wait=False, input={"kind": "order"}, after=["pack"])
    amount = {"type": "object", "required": ["amount"], "properties": {"amount": {"type": "integer"}}}
    wf.signal("paid", signal="payment", payload_schema=amount, assignee="input.clerk", timeout=86400, after=["invoice"])
    wf.approval("release", namespace="desk", priority=3, after=["paid"])
    wf.step(on_failure=["paid", "release"], join="any")(written.apologize)

    assert loaded.document == wf.document
    assert loaded.steps["reserve"].task is not None
    assert loaded.document["steps"][1]["compensate"] == "order_fulfillment/2/reserve:compensate"


def test_the_names_of_the_older_product_are_known(tmp_path: Path) -> None:
    template = """\
        name: linear
        namespace_name: math
        version: 1.10
        timeout_seconds: 60
        steps:
          - name: square
            description: Square it.
            handler:
              callable: check_order
              initialization: {operation: square}
            type: standard
            config: {step: 1}
            dependencies: []
            retry: {retryable: true, limit: 4, backoff: exponential, backoff_base_ms: 500, max_backoff_ms: 30000}
            timeout_seconds: 30
          - name: choose
            type: decision_point
            handler: {callable: "template_handlers:route"}
            dependencies: [square]
            branches: [last]
            retry: {retryable: false}
          - name: last
            handler: "template_handlers:Handlers.held"
            dependencies: [choose]
            retry: {max_attempts: 2}
        """
    (loaded,) = shop().load_templates(write(tmp_path, template))
    document = loaded.document
    assert (document["namespace"], document["version"], document["timeout"]) == ("math", "1.10", 60.0)
    square, choose, last = document["steps"]
    assert square["config"] == {"operation": "square", "step": 1}
    assert square["max_tries"] == 4
    assert Backoff.from_json(square["backoff"]) == Backoff.exponential(base=0.5, cap=30.0)
    assert (square["timeout"], choose["kind"], choose["max_tries"], last["max_tries"]) == (30.0, "decision", 1, 2)


def test_every_field_of_a_definition_can_be_written(tmp_path: Path) -> None:
    template = """\
        name: orders
        output: mail
        tags: [shop]
        attributes: {region: north}
        callback_url: https://example.org/hook
        steps:
          - {name: a, handler: check_order}
          - {name: b, handler: check_order, when: input.number > 3}
          - {name: c, handler: check_order, recovers: [a], on_failure: b}
          - {name: d, handler: check_order, always: [a, b], after: [c], join: 2, cancel_rest: true}
          - {name: mail, handler: check_order, on_failure: [d]}
        """
    (loaded,) = shop().load_templates(write(tmp_path, template))
    app = shop()
    wf = app.workflow(
        "orders",
        output="mail",
        tags=["shop"],
        attributes={"region": "north"},
        callback_url="https://example.org/hook",
    )
    wf.task("check_order", name="a")
    wf.task("check_order", name="b", when="input.number > 3")
    wf.task("check_order", name="c", recovers=["a"], on_failure=["b"])
    wf.task("check_order", name="d", always=["a", "b"], after=["c"], join=2, cancel_rest=True)
    wf.task("check_order", name="mail", on_failure=["d"])
    assert loaded.document == wf.document


def test_a_directory_and_a_file_of_several_documents_are_loaded_in_order(tmp_path: Path) -> None:
    def one(name: str) -> str:
        return f"name: {name}\nsteps:\n  - {{name: a, type: sleep, seconds: 1}}\n"

    write(tmp_path, one("second"), "b.yml")
    write(tmp_path, one("first") + "---\n" + one("also"), "a.yaml")
    write(tmp_path, "nothing", "notes.txt")
    app = Interlock("postgresql://nowhere")
    assert [workflow.name for workflow in app.load_templates(str(tmp_path))] == ["first", "also", "second"]
    assert [name for name, _ in app.workflows] == ["first", "also", "second"]


STEPS = "name: orders\nsteps:\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: [", "line 1: it is not YAML: "),
        ("- a", "line 1: expected a mapping of fields"),
        ("name: orders", "line 1: steps: a template needs a list of steps"),
        ("name: orders\nsteps: 3", "line 2: steps: a template needs a list of steps"),
        ("name: orders\nsteps: []", "line 2: steps: a workflow needs a list of one step or more"),
        ("nam: orders\nsteps: []", "line 1: unknown field: nam; known are attributes"),
        ("name: a b\nsteps: []", "line 1: name: a name consists of at most 500 letters"),
        ("steps: []", "line 1: name: a name consists of at most 500 letters"),
        ("name: orders\nversion: 1/2\nsteps: []", "line 2: version: a version is a string"),
        ("name: orders\nname: other\nsteps: []", "line 2: the key 'name' is given twice"),
        ("name: orders\ninput_schema:\n  type: objekt\nsteps: []", "line 2: input_schema: it is no JSON Schema"),
        (STEPS + "  - 3", "line 3: steps[0]: expected a mapping of fields"),
        (STEPS + "  - type: sleep", "line 3: steps[0], name: a step needs a name"),
        (STEPS + "  - name: a\n    typ: sleep", "line 4: steps[0]: unknown field: typ; known are after"),
        (STEPS + "  - name: a\n    type: loop", "line 4: step 'a', type: must be one of plain"),
        (
            STEPS + "  - name: a\n    handler: gone",
            "line 4: step 'a', handler: the app has no task 'gone'; it has check_",
        ),
        (STEPS + "  - name: a", "line 3: step 'a', type: a step of kind plain needs a handler"),
        (STEPS + "  - name: a\n    handler: [1]", "line 4: step 'a', handler: a handler must be the name of a task"),
        (STEPS + "  - name: a\n    handler: {klass: b}", "line 4: step 'a', handler: unknown field: klass"),
        (STEPS + "  - name: a\n    handler: no_such_module:b", "there is no module 'no_such_module'"),
        (STEPS + "  - name: a\n    handler: template_handlers:b", "cannot import 'template_handlers:b'"),
        (STEPS + "  - name: a\n    handler: ':b'", "cannot import ':b'"),
        (
            STEPS + "  - name: a\n    handler: template_handlers:number",
            "a handler must be a function, a task or",
        ),
        (STEPS + "  - name: a\n    type: sleep\n    handler: check_order", "line 5: step 'a', handler: a step of type"),
        (STEPS + "  - name: a\n    type: sleep\n    seconds: -1", "line 5: step 'a', seconds: it must be"),
        (
            STEPS + "  - name: a\n    handler: check_order\n    dependencies: [b]",
            "line 5: step 'a', dependencies: there is no step 'b'",
        ),
        (
            STEPS + "  - {name: a, handler: check_order, after: [b]}\n  - {name: b, handler: check_order, after: [a]}",
            "after: the steps form a cycle: ",
        ),
        (
            STEPS + "  - name: a\n    handler: check_order\n    after: []\n    dependencies: []",
            "line 6: steps[0]: the field dependencies is given twice",
        ),
        (
            STEPS + "  - name: a\n    handler: check_order\n    retry: {max_tries: 0}",
            "line 5: step 'a', retry: max_tries must be a whole number",
        ),
        (
            STEPS + "  - name: a\n    handler: check_order\n    retry: {backoff: wild}",
            "line 5: step 'a', retry: backoff: the kind must be one of",
        ),
        (
            STEPS + "  - name: a\n    handler: check_order\n    retry:\n      tries: 3",
            "line 6: step 'a', retry: unknown field: tries; known are backoff",
        ),
        (
            STEPS + "  - name: a\n    handler: check_order\n    compensate: gone",
            "line 5: step 'a', compensate: the app has no task 'gone'",
        ),
        (
            STEPS + "  - {name: a, type: sleep, seconds: 1}\n  - {name: a, type: sleep, seconds: 1}",
            "line 4: step 'a', name: there are two steps of this name",
        ),
    ],
)
def test_a_refusal_names_file_line_and_field(tmp_path: Path, text: str, told: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(TemplateError, match=re.escape(told)) as refused:
        shop().load_templates(file)
    assert str(refused.value).startswith(f"{file}, line ")


def test_two_templates_of_one_version_are_refused(tmp_path: Path) -> None:
    text = STEPS + "  - {name: a, type: sleep, seconds: 1}\n"
    file = write(tmp_path, f"{text}---\n{text}")
    with pytest.raises(TemplateError, match=re.escape("line 5: name: workflow 'orders' is defined twice")):
        shop().load_templates(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match=r"template .*gone.yaml cannot be read"):
        shop().load_templates(tmp_path / "gone.yaml")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DefinitionError, match="there are no templates in"):
        shop().load_templates(tmp_path / "empty")
    with pytest.raises(DefinitionError, match="path of a file or a directory, got 5"):
        shop().load_templates(cast("Path", 5))


def test_an_error_inside_a_handler_module_is_shown_as_it_is(tmp_path: Path) -> None:
    file = write(tmp_path, STEPS + "  - {name: a, handler: 'template_broken:b'}\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        shop().load_templates(file)


def test_yaml_can_name_no_python_objects(tmp_path: Path) -> None:
    file = write(tmp_path, STEPS + "  - {name: a, type: sleep, seconds: !!python/name:os.system }\n")
    with pytest.raises(TemplateError, match="line 3"):
        shop().load_templates(file)


async def test_a_function_of_a_template_is_run_as_a_step(tmp_path: Path) -> None:
    app = shop()
    (loaded,) = app.load_templates(write(tmp_path, ORDERS))
    task: Any = loaded.steps["reserve"].task
    assert task.function(number=3) == ["3"]
    with pytest.raises(PermanentError):
        task.encode_result({3: 4})


def test_an_empty_template_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing yet\n", encoding="utf-8")
    with pytest.raises(DefinitionError, match=r"template .*empty\.yaml is empty"):
        Interlock().load_templates(file)


def test_an_unknown_step_kind_is_reported_before_its_handler(tmp_path: Path) -> None:
    app = Interlock()

    @app.task
    def h() -> None: ...

    file = tmp_path / "wrong.yaml"
    file.write_text("name: w\nsteps:\n  - {name: a, handler: h, type: foo}\n", encoding="utf-8")
    with pytest.raises(TemplateError, match=r"must be one of plain, decision, .* not 'foo'"):
        app.load_templates(file)
