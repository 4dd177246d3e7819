"""The output of a job: results of the final steps by default, or what the workflow declares."""

from __future__ import annotations

from typing import Any

import pytest

from factories import step, workflow
from interlock import Interlock
from interlock.model.graph import GraphError, check_definition
from interlock.workflow.dry_run import dry_run
from job_driver import Failed, JobDriver

STEPS = (
    step("price"),
    step("route", "price", kind="decision", branches=["ship", "pick_up"]),
    step("ship", "route"),
    step("pick_up", "route"),
    step("items", kind="map", over_input="list"),
)
OUTCOMES = {"price": 12, "route": "ship", "ship": ["label"], "pick_up": 0, "items[0]": "a", "items[1]": "b"}
GIVEN = {"list": [1, 2]}


@pytest.mark.store
@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (None, {"ship": ["label"], "items": ["a", "b"]}),
        ("ship", ["label"]),
        ("price", 12),
        ("items", ["a", "b"]),
        ("pick_up", None),
        ({"total": "price", "label": "ship"}, {"total": 12, "label": ["label"]}),
        ({"a": "price", "b": "price"}, {"a": 12, "b": 12}),
        ({"label": "ship", "place": "pick_up"}, {"label": ["label"]}),
        ({"place": "pick_up"}, {}),
    ],
)
async def test_a_workflow_declares_the_output_of_its_jobs(driver: JobDriver, output: Any, expected: Any) -> None:
    driver.outcomes = dict(OUTCOMES)
    declared = {} if output is None else {"output": output}
    job = await driver.submit(*STEPS, input=GIVEN, **declared)
    await driver.run()
    row = await driver.job(job)
    assert (row["status"], row["output"]) == ("COMPLETED", expected)
    assert dry_run(workflow(*STEPS, **declared), OUTCOMES, input=GIVEN).output == expected


@pytest.mark.store
async def test_a_parent_gets_the_declared_output_of_its_child(driver: JobDriver) -> None:
    driver.outcomes = {"price": 12}
    await driver.submit(step("price"), name="kid", output="price")
    parent = await driver.submit(step("kid", kind="child", workflow="kid"), name="parent", output="kid")
    await driver.run()
    assert (await driver.job(parent))["output"] == 12


@pytest.mark.store
async def test_a_failed_job_has_no_output(driver: JobDriver) -> None:
    driver.outcomes = {"price": 12, "ship": Failed("no")}
    job = await driver.submit(step("price"), step("ship", "price"), output="price")
    await driver.run()
    row = await driver.job(job)
    assert (row["status"], row["output"]) == ("FAILED", None)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("shipp", "workflow w: output: there is no step 'shipp'; did you mean 'ship'?"),
        ({"label": "shop"}, "workflow w: output: there is no step 'shop'; did you mean 'ship'?"),
        ({}, "workflow w: output: output must be the name of a step, or a mapping of names to steps, not {}"),
        ({"label": ["ship"]}, "output must be the name of a step, or a mapping of names to steps, not "),
        (["ship"], "output must be the name of a step, or a mapping of names to steps, not "),
        ("", "output must be the name of a step, or a mapping of names to steps, not "),
    ],
)
def test_an_output_names_existing_steps(output: Any, message: str) -> None:
    with pytest.raises(GraphError) as refused:
        check_definition(workflow(*STEPS, output=output))
    assert message in str(refused.value)


@pytest.mark.unit
def test_the_definition_has_the_output_that_python_declares() -> None:
    app = Interlock()
    order = app.workflow("order", output={"label": "ship"})

    @order.step
    async def ship() -> str:
        return "label"

    assert order.document["output"] == {"label": "ship"}
    assert dry_run(order.document, {"ship": "x"}).output == {"label": "x"}
