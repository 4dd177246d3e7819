"""Templates with the fields of tasker-core: what is converted, what is reported, and what is refused.

The expectations come from the documentation of that product: its guides for conditional workflows, batch processing and
retries, and the reference of its template.
"""

from __future__ import annotations

import re
import warnings
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from interlock import Backoff, Interlock, StepContext
from interlock.client.template_yaml import TemplateError
from interlock.client.templates import TemplateWarning, check_templates
from interlock.testing import Failed, drain, dry_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from interlock.client.workflow import Workflow

pytestmark = pytest.mark.unit

STEP = "name: orders\nsteps:\n  - name: a\n    handler: {callable: Shop::Handler}\n"
APPROVAL = """
name: approval
namespace_name: finance
version: 1.2.0
description: Approve an amount.
metadata: {author: The shop, tags: [a, b], documentation_url: , created_at: 2026-01-01T00:00:00Z}
system_dependencies: {primary: default, secondary: []}
domain_events: []
input_schema: {type: object, required: [amount], properties: {amount: {type: number}}}
steps:
  - name: check
    type: standard
    system_dependency:
    dependencies: []
    handler: {callable: Finance::CheckHandler, initialization: {currency: CHF}}
    publishes_events: []
  - name: route
    type: decision
    dependencies: [check]
    handler: {callable: Finance::RouteHandler}
  - name: decide
    type: deferred_convergence
    depends_on: [route, automatic, manager, auditor]
    handler: {callable: Finance::DecideHandler}
  - {name: automatic, dependencies: [route], handler: {callable: Finance::AutomaticHandler}}
  - {name: manager, dependencies: [route], handler: {callable: Finance::ManagerHandler}}
  - {name: audit, dependencies: [route], handler: {callable: Finance::AuditHandler}}
  - {name: auditor, dependencies: [audit], handler: {callable: Finance::AuditorHandler}}
  - {name: book, dependencies: [decide], handler: {callable: Finance::BookHandler}}
"""
BATCHES = """
name: import
namespace_name: files
steps:
  - name: analyze
    type: batchable
    handler: {callable: files.Analyzer, initialization: {batch_size: 200}}
  - name: read
    type: batch_worker
    dependencies: [analyze]
    handler: {callable: files.Reader, initialization: {operation: sum}}
    batch_config: {worker_template: read, parallelism: 5, cursor_field: row, failure_strategy: fail_fast}
  - name: total
    type: deferred_convergence
    dependencies: [read]
    handler: {callable: files.Total}
"""


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., Workflow]:
    """Load one template without its handlers; a warning fails the test."""

    def load(text: str, environment: str | None = None) -> Workflow:
        file = tmp_path / "orders.yaml"
        file.write_text(dedent(text))
        (workflow,), _, told = check_templates(file, environment=environment)
        assert told == []
        return workflow

    return load


def warned(place: Path, text: str, environment: str | None = None) -> list[str]:
    """Load one template and return its warnings, without the file."""
    file = place / "orders.yaml"
    file.write_text(dedent(text))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Interlock().load_templates(file, environment=environment, handlers=lambda _: lambda: None)
    assert all((each.category, each.filename) == (TemplateWarning, str(file)) for each in caught)
    return [f"{each.lineno}: {each.message}" for each in caught]


def steps_of(workflow: Workflow) -> dict[str, dict[str, Any]]:
    return {step["name"]: step for step in workflow.document["steps"]}


def test_the_branches_of_a_decision_are_the_steps_after_it_without_the_convergence(
    check: Callable[..., Workflow],
) -> None:
    workflow = check(APPROVAL)
    assert (workflow.name, workflow.version, workflow.namespace) == ("approval", "1.2.0", "finance")
    steps = steps_of(workflow)
    assert steps["route"]["branches"] == ["automatic", "manager", "audit"]
    assert steps["decide"]["after"] == ["route", "automatic", "manager", "auditor"]
    assert (steps["decide"]["kind"], steps["check"]["kind"]) == ("plain", "plain")
    assert steps["check"]["config"] == {"currency": "CHF"}


@pytest.mark.parametrize(
    ("chosen", "ran"),
    [
        (["automatic"], {"automatic", "decide", "book"}),
        (["manager", "audit"], {"manager", "audit", "auditor", "decide", "book"}),
        ([], set()),
    ],
)
def test_a_convergence_waits_for_the_chosen_branches(
    check: Callable[..., Workflow], chosen: list[str], ran: set[str]
) -> None:
    found = dry_run(check(APPROVAL).document, {"route": chosen}, input={"amount": 3})
    assert found.status == "COMPLETED"
    assert {name for name, ended in found.steps.items() if ended.state == "done"} == {"check", "route", *ran}


def test_declared_branches_are_kept(check: Callable[..., Workflow]) -> None:
    text = APPROVAL.replace("type: decision\n", "type: decision_point\n    branches: [manager]\n")
    assert steps_of(check(text))["route"]["branches"] == ["manager"]


def test_a_decision_before_a_convergence_only_can_choose_it(check: Callable[..., Workflow]) -> None:
    steps = """
        name: short
        steps:
          - {name: route, type: decision, handler: {callable: Route}}
          - {name: end, step_type: deferred, dependencies: [route], handler: {callable: End}}
        """
    assert steps_of(check(steps))["route"]["branches"] == ["end"]


def test_a_batch_worker_is_a_map_over_the_result_of_its_batchable_step(tmp_path: Path) -> None:
    file = tmp_path / "import.yaml"
    file.write_text(BATCHES)
    (workflow,), handlers, told = check_templates(file)
    assert handlers == ["files.Analyzer", "files.Reader", "files.Total"]
    assert [warning.partition(" has no effect here (step read)")[0] for warning in told] == [
        f"{file}, line 12: batch_config.parallelism"
    ]
    analyze, read, total = workflow.document["steps"]
    assert (analyze["kind"], read["kind"], total["kind"]) == ("plain", "map", "plain")
    assert (read["over"], read["after"], total["after"]) == ("analyze", ["analyze"], ["read"])
    assert read["strategy"] == "all"
    assert analyze["config"] == {"batch_size": 200}
    assert (read["config"]["operation"], read["config"]["batch_config"]["cursor_field"]) == ("sum", "row")
    ranges = {"start": 0, "stop": 500, "size": 200}
    found = dry_run(workflow.document, {"analyze": ranges, "read[2]": 7})
    assert found.steps["read"].result == [None, None, 7]
    cursors = [{"batch_id": "001", "start_cursor": 1, "end_cursor": 200}]
    assert dry_run(workflow.document, {"analyze": cursors, "read[0]": 3}).steps["read"].result == [3]
    assert dry_run(workflow.document, {"analyze": []}).steps["total"].state == "done"
    assert dry_run(workflow.document, {"analyze": ranges, "read[0]": Failed()}).status == "FAILED"


@pytest.mark.parametrize("place", ["read", "analyze"])
def test_continue_on_failure_lets_the_convergence_run(tmp_path: Path, place: str) -> None:
    file = tmp_path / "import.yaml"
    config = "batch_config: {worker_template: read, failure_strategy: continue_on_failure}"
    without = re.sub("    batch_config.*\n", "", BATCHES)
    file.write_text(re.sub(rf"(name: {place}\n)", rf"\1    {config}\n", without))
    (workflow,), _, told = check_templates(file)
    assert told == []
    found = dry_run(workflow.document, {"analyze": [1, 2], "read[0]": Failed()})
    assert (found.status, found.steps["total"].state) == ("COMPLETED", "done")


def test_isolate_is_reported_and_fails_the_map(tmp_path: Path) -> None:
    told = warned(tmp_path, BATCHES.replace("parallelism: 5, ", "").replace("fail_fast", "isolate"))
    reason = "a failed part fails the job, which can be retried"
    assert told == [f"12: batch_config.failure_strategy: isolate has no effect here (step read): {reason}"]


@pytest.mark.parametrize(
    ("retry", "tries", "backoff"),
    [
        ("{retryable: true, max_attempts: 3, backoff: exponential, backoff_base_ms: 500}", 3, Backoff(base=0.5)),
        ("{max_attempts: 2, backoff: linear, initial_delay: 2, max_delay: 30}", 2, Backoff.linear(2, cap=30)),
        ("{limit: 4, backoff: fibonacci, base: 1, max_backoff_ms: 2500}", 4, Backoff.fibonacci(1, cap=2.5)),
        ("{retryable: false, max_attempts: 3}", 1, None),
        ("{retryable: false, max_attempts: 0}", 1, None),
    ],
)
def test_retry_is_converted(check: Callable[..., Workflow], retry: str, tries: int, backoff: Backoff | None) -> None:
    step = steps_of(check(f"{STEP}    retry: {retry}\n    timeout_seconds: 30\n"))["a"]
    assert (step["max_tries"], step["timeout"]) == (tries, 30)
    assert step.get("backoff") == (None if backoff is None else backoff.to_json())


def test_no_attempts_are_one_as_in_tasker_core(tmp_path: Path) -> None:
    text = f"{STEP}    retry: {{max_attempts: 0}}\n"
    assert warned(tmp_path, text) == [
        "5: retry.max_attempts: 0 has no effect here (step a): the first try is always made"
    ]
    (tmp_path / "orders.yaml").write_text(text)
    (workflow,), _, _ = check_templates(tmp_path / "orders.yaml")
    assert steps_of(workflow)["a"]["max_tries"] == 1


def test_the_maximum_duration_is_the_timeout_of_the_job(tmp_path: Path, check: Callable[..., Workflow]) -> None:
    assert check(f"lifecycle: {{max_duration_minutes: 30}}\n{STEP}").document["timeout"] == 1800
    text = "lifecycle:\n  max_duration_minutes: 30\n  max_waiting_for_retry_minutes: 2\n  staleness_action: dlq\n"
    told = [
        "3: lifecycle.max_waiting_for_retry_minutes has no effect here: max_backoff_ms limits the delay of a retry",
        "4: lifecycle.staleness_action has no effect here: a job that exceeds its timeout is canceled",
    ]
    assert warned(tmp_path, text + STEP) == told
    unlimited = "2: lifecycle.max_duration_minutes has no effect here: staleness_action is none"
    assert warned(tmp_path, text.replace("dlq", "none") + STEP) == [unlimited, *told]


def test_an_environment_overrides_retry_timeout_and_initialization(check: Callable[..., Workflow]) -> None:
    text = """
        name: orders
        steps:
          - name: a
            handler: {callable: A, initialization: {mode: live, kept: 1}}
            retry: {max_attempts: 5, backoff: linear}
            timeout_seconds: 30
          - {name: b, handler: {callable: B}, dependencies: [a]}
        environments:
          production:
          test:
            steps:
              - {name: ALL, timeout_seconds: 10, retry: {max_attempts: 2}}
              - {name: a, timeout_seconds: 5, handler: {initialization: {mode: mock}}}
        """
    plain = steps_of(check(text))
    assert (plain["a"]["timeout"], plain["a"]["max_tries"], plain["a"]["config"]["mode"]) == (30, 5, "live")
    assert steps_of(check(text, "production")) == plain
    steps = steps_of(check(text, "test"))
    assert (steps["a"]["timeout"], steps["a"]["max_tries"]) == (5, 2)
    assert "backoff" not in steps["a"], "retry is replaced as a whole"
    assert steps["a"]["config"] == {"mode": "mock", "kept": 1}
    assert (steps["b"]["timeout"], steps["b"]["max_tries"]) == (10, 2)


def test_fields_without_an_effect_are_reported_once_with_their_steps(tmp_path: Path) -> None:
    text = """\
        name: orders
        system_dependencies: {primary: bank, secondary: []}
        domain_events: [{name: order.done}]
        task_handler: {callable: Orders::Handler}
        steps:
          - name: a
            handler: {callable: A, resolver: explicit_mapping}
            result_schema: {type: object}
            publishes_events: [{name: a.done, delivery_mode: durable}]
          - name: b
            handler: {callable: B}
            system_dependency: bank
            result_schema: {type: object}
            lifecycle: {max_retries: 3}
        environments: {test: {task_handler: {initialization: {a: 1}}}}
        """
    told = [re.sub(": [^:]*$", "", warning) for warning in warned(tmp_path, text, "test")]
    assert told == [
        "2: system_dependencies has no effect here",
        "3: domain_events has no effect here",
        "4: task_handler has no effect here",
        "7: handler.resolver has no effect here (step a)",
        "8: result_schema has no effect here (steps a, b)",
        "9: publishes_events has no effect here (step a)",
        "12: system_dependency has no effect here (step b)",
        "14: lifecycle has no effect here (step b)",
        "15: environments.test.task_handler has no effect here",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{STEP}    composition: {{}}", "line 5: steps[0]: unknown field: composition"),
        (
            f"{STEP}    batch_config: {{}}",
            "line 5: step 'a', batch_config: only steps of type batchable and batch_worker",
        ),
        (f"{STEP}    type: batchable", "line 5: step 'a', type: no step of type batch_worker depends on this step"),
        (f"{STEP}    type: batch_worker", "line 5: step 'a', type: a step of type batch_worker depends on exactly one"),
        (f"{STEP}    type: decision", "line 5: step 'a', type: a decision needs branches, and no step depends on it"),
        (BATCHES.replace("worker_template: read", "worker_template: other"), "worker_template must be 'read'"),
        (BATCHES.replace("fail_fast", "fail_slow"), "failure_strategy: must be one of fail_fast, isolate, continue_on"),
        (BATCHES.replace("fail_fast}", "fail_fast}\n    strategy: 0.5"), "strategy: give strategy or failure_strategy"),
        (
            BATCHES.replace("type: batchable", "type: batchable\n    batch_config: {worker_template: total}"),
            "line 7: step 'analyze', batch_config: worker_template names 'total', which is no batch_worker",
        ),
        (f"{STEP}    retry: {{backoff_base_ms: true}}", "step 'a', retry, backoff_base_ms: must be a number, not True"),
        (f"{STEP}    retry: {{retryable: 1}}", "step 'a', retry, retryable: must be true or false, not 1"),
        (f"{STEP}    retry: {{base: 1, initial_delay: 2}}", "retry, initial_delay: the field base is given twice"),
        (f"{STEP}    retry: {{max_tries: 0}}", "step 'a', retry: max_tries must be a whole number"),
        (f"{STEP}    retry: {{limit: 1, max_attempts: 2}}", "retry: the field max_attempts is given twice"),
        (f"{STEP}    depends_on: []\n    dependencies: []", "line 6: steps[0]: the field dependencies is given twice"),
        (
            f"lifecycle: {{max_duration_minutes: soon}}\n{STEP}",
            "line 1: lifecycle, max_duration_minutes: must be a number",
        ),
        (f"lifecycle: {{max_minutes: 3}}\n{STEP}", "line 1: lifecycle: unknown field: max_minutes"),
        (f"timeout: 3\nlifecycle: {{max_duration_minutes: 3}}\n{STEP}", "line 2: lifecycle: max_duration_minutes and"),
        (f"environments: []\n{STEP}", "line 1: environments: must be a mapping"),
        (f"environments: {{test: {{steps: 3}}}}\n{STEP}", "line 1: environment 'test', steps: must be a list, not 3"),
        (
            f"environments: {{test: {{steps: [{{name: b}}]}}}}\n{STEP}",
            "line 1: environment 'test', name: there is no step 'b'; ALL stands for all steps",
        ),
        (
            f"environments: {{test: {{steps: [{{name: a, handler: {{callable: B}}}}]}}}}\n{STEP}",
            "line 1: environment 'test', step 'a', handler: unknown field: callable; known are initialization",
        ),
        ("name: a\nsteps:\n  - name: a\n    handler: {}", "step 'a', handler, callable: a handler needs the name"),
        ("name: a\nsteps:\n  - name: a\n    handler: {callable: [1]}", "handler, callable: must be a string, not [1]"),
        (
            "name: a\nsteps:\n  - name: a\n    handler: {callable: A, initialization: 3}",
            "step 'a', handler, initialization: must be a mapping, not 3",
        ),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "orders.yaml"
    file.write_text(text)
    with pytest.raises(TemplateError, match=re.escape(told)):
        check_templates(file, environment="test")


def test_handlers_are_given_by_the_caller(tmp_path: Path) -> None:
    file = tmp_path / "orders.yaml"
    file.write_text("""
name: orders
steps:
  - {name: a, handler: {callable: Shop::Charge}}
  - {name: b, handler: {callable: shop.Handler, method: refund}, dependencies: [a]}
  - {name: c, handler: {callable: Shop::Mail, method: call}, dependencies: [b]}
  - {name: d, handler: {callable: pack}, dependencies: [c]}
""")
    app = Interlock("postgresql://nowhere")

    @app.task
    def pack() -> None: ...

    @app.task
    def mail() -> None: ...

    def charge() -> int:
        return 3

    handlers: dict[str, Any] = {"Shop::Charge": charge, "shop.Handler.refund": mail, "Shop::Mail": "mail"}
    (workflow,) = app.load_templates(file, handlers=handlers)
    types = [step["type"] for step in workflow.document["steps"]]
    assert types[1:] == ["mail", "mail", "pack"]
    assert app.tasks[types[0]].function is charge
    del handlers["Shop::Mail"]
    with pytest.raises(TemplateError, match=r"line 6: step 'c', handler, callable: the app has no task 'Shop::Mail'"):
        app.load_templates(file, handlers=handlers.get)


def test_a_function_is_found_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dotted_handlers.py").write_text("def charge() -> int:\n    return 3\n\n\nclass Charge: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "orders.yaml"
    file.write_text(STEP.replace("Shop::Handler", "dotted_handlers.charge"))
    (workflow,) = Interlock("postgresql://nowhere").load_templates(file)
    (step,) = workflow.document["steps"]
    assert step["type"] == "orders/a"
    for name, told in (
        ("dotted_handlers.gone", "cannot import 'dotted_handlers.gone': module 'dotted_handlers' has no attribute"),
        ("no_such_place.charge", "cannot import 'no_such_place.charge': there is no module 'no_such_place'"),
        (".charge", "cannot import '.charge'"),
        ("..a:b", "cannot import '..a:b': '..a' is a relative name"),
        ("dotted_handlers.Charge", "a task is a function, got <class"),
    ):
        file.write_text(STEP.replace("Shop::Handler", f"'{name}'"))
        with pytest.raises(TemplateError, match=re.escape(told)):
            Interlock("postgresql://nowhere").load_templates(file)


def test_an_invalid_template_declares_nothing(tmp_path: Path) -> None:
    file = tmp_path / "orders.yaml"
    file.write_text(f"{STEP}    retry: {{tries: 3}}")
    app = Interlock("postgresql://nowhere")
    with pytest.raises(TemplateError):
        app.load_templates(file, handlers=lambda _: lambda: None)
    assert dict(app.workflows) == {}


@pytest.mark.store
async def test_a_template_with_a_decision_and_batches_runs_to_its_end(tmp_path: Path, url: str) -> None:
    """The diamond, the decision and the batches of one template of that product, with handlers of our own."""
    file = tmp_path / "numbers.yaml"
    file.write_text("""
name: numbers
namespace_name: math
steps:
  - {name: evens, handler: {callable: Math::Evens}}
  - {name: odds, handler: {callable: Math::Odds, initialization: {rest: 1}}}
  - {name: route, type: decision, dependencies: [evens, odds], handler: {callable: Math::Route}}
  - name: even_batches
    type: batchable
    dependencies: [route]
    handler: {callable: Math::Analyze, initialization: {batch_size: 2}}
  - name: even_sums
    type: batch_worker
    dependencies: [even_batches]
    handler: {callable: Math::Sum}
    retry: {max_attempts: 2, initial_delay: 0}
  - {name: odd_batches, type: batchable, dependencies: [route], handler: {callable: Math::Analyze}}
  - {name: odd_sums, type: batch_worker, dependencies: [odd_batches], handler: {callable: Math::Sum}}
  - name: total
    type: deferred_convergence
    dependencies: [even_sums, odd_sums]
    handler: {callable: Math::Total}
""")

    def numbers(ctx: StepContext, limit: int) -> list[int]:
        return [number for number in range(limit) if number % 2 == ctx.config.get("rest", 0)]

    def route(evens: list[int], odds: list[int]) -> str:
        return "even_batches" if len(evens) > len(odds) else "odd_batches"

    def analyze(ctx: StepContext, limit: int) -> dict[str, int]:
        return {"start": 0, "stop": limit, "size": ctx.config.get("batch_size", 100)}

    def add(item: dict[str, int]) -> int:
        return sum(range(item["start"], item["stop"]))

    def total(ctx: StepContext) -> dict[str, Any]:
        return dict(ctx.results)

    handlers: dict[str, Callable[..., Any]] = {
        "Math::Evens": numbers,
        "Math::Odds": numbers,
        "Math::Route": route,
        "Math::Analyze": analyze,
        "Math::Sum": add,
        "Math::Total": total,
    }
    app = Interlock(url)
    app.load_templates(file, handlers=handlers)
    async with app:
        job = await app.submit("numbers", {"limit": 5})
        await drain(app)
        assert await job.wait(30) == {"total": {"even_sums": [1, 5, 4]}}
        other = await app.submit("numbers", {"limit": 4})
        await drain(app)
        assert await other.wait(30) == {"total": {"odd_sums": [6]}}
