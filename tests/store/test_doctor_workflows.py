"""The doctor takes every legal workflow for undamaged, whatever options its steps have."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from factories import workflow
from interlock.model.graph import HEADER_FIELDS, STEP_FIELDS, check_definition
from interlock.store.doctor import examine
from interlock.store.workflows import put_workflow
from random_definitions import random_definition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

EXAMPLES = int(os.environ.get("INTERLOCK_TEST_EXAMPLES") or 60)
URL = "https://example.com/hook?a=1&b=%20"
SCHEMA = {"type": "object", "properties": {"n": {"type": "number", "minimum": 0.1}}, "required": ["n"]}
DOCUMENT: dict[str, Any] = {
    "text": 'ä\u2028"',
    "numbers": [0, -1, 1.0, 0.1, 1e-7, 1e22, 2**53, -0.0],
    "none": None,
    "nested": {"a": [[]]},
}

# Values of each option that are stored in different ways: several keys, one key, templates, integers, floats, limits.
VALUES: dict[str, tuple[Any, ...]] = {
    "namespace": ("reports", "a-b.c"),
    "priority": (-(2**15), 2**15 - 1, 0),
    "max_tries": (1, 2**31 - 1),
    "timeout": (1, 0.1, 3.0, 86400 * 36500),
    "backoff": (
        {"kind": "exponential", "base": 1, "cap": 60.5, "jitter": 0.0},
        {"kind": "none"},
        {"kind": "linear", "base": 0.1},
    ),
    "limit_key": ("mail", "mail:{tenant}", ["mail", "mail:{tenant}", "mail"], ["a"]),
    "limit_weight": (1, 2.0, 0.5, 1e16, 1e-7, "{weight}", "2", "2.50"),
    "tags": (["b", "a", "b"], ["ä"], []),
    "callback_url": (URL,),
    "when": ("input.n > 1.0", "input.name == 'x y'"),
    "config": (DOCUMENT, {}),
    "compensate_tries": (1, 7),
    "compensate_timeout": (1, 2.5),
    "compensate_limit_key": ("undo", ["undo", "undo:{tenant}"]),
    "compensate_limit_weight": (3, "{weight}"),
    "compensate_tags": (["undo", "b"],),
    "compensate_callback_url": (URL,),
    "strategy": ("all", "any", 0.5, 1, 1.0, 1 / 3),
    "workflow_version": ("2.0+a",),
    "wait": (True, False),
    "input": (DOCUMENT, {}),
    "seconds": (0, 1, 0.25, 3.0),
    "until": ("2030-01-01T00:00:00+02:00", "input.at"),
    "signal": ("paid",),
    "assignee": ("ada", "input.manager"),
    "payload_schema": (SCHEMA,),
}
JOINS: tuple[Any, ...] = (None, "all", "any", 1, 2, 0.34, 1.0)


def steps_of_every_kind(rng: random.Random) -> list[dict[str, Any]]:
    """Make steps with all of their options: two of each kind, and one for each field that excludes another."""
    first = {"name": "first", "type": "first"}
    second = {"name": "second", "type": "second", "kind": "plain"}
    repair = {"name": "repair", "type": "repair", "recovers": ["second"]}
    steps: list[dict[str, Any]] = [first, second, repair]
    required: dict[str, tuple[dict[str, Any], ...]] = {
        "plain": ({"type": "plain", "compensate": "undo"},),
        "decision": ({"type": "decide", "branches": ["left", "right"], "compensate": "undo"},),
        "map": ({"type": "part", "over": "first"}, {"type": "part", "over_input": "items"}),
        "child": (
            {"workflow": "other", "compensate": "undo"},
            {"workflow": "other", "repeat_until": "output.n > 2", "max_repeats": 3, "wait": None},
        ),
        "sleep": ({"seconds": 0}, {"until": "input.at"}),
        "signal": ({"signal": "paid", "payload_schema": SCHEMA},),
        "approval": ({},),
    }
    for kind, variants in required.items():
        for number, wanted in enumerate(variants):
            step: dict[str, Any] = {"name": f"{kind}_{number}", "kind": kind, "after": ["first"], **wanted}
            step |= {"on_failure": ["second"], "always": ["repair"], "join": rng.choice(JOINS)}
            step |= {"cancel_rest": step["join"] not in {None, "all"} and rng.random() < 0.8}
            for field in STEP_FIELDS[kind]:
                if field in VALUES and field not in step and not {"seconds", "until"} & {field}:
                    step[field] = rng.choice((None, *VALUES[field], *VALUES[field]))
            steps.append(step)
    steps += [
        {"name": "left", "type": "left", "after": ["decision_0"]},
        {"name": "right", "type": "right", "after": ["decision_0"]},
        {"name": "join.end-1", "type": "end", "after": ["left", "right", "map_0", "second"], "when": "left == 1"},
    ]
    return steps


def with_options(document: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Give the steps of a random definition random options."""
    steps = []
    for step in document["steps"]:
        kind = step.get("kind") or "plain"
        allowed = [field for field in STEP_FIELDS[kind] if field in VALUES and field not in step]
        options = {
            field: rng.choice(VALUES[field])
            for field in rng.sample(allowed, rng.randint(0, len(allowed)))
            if field not in {"seconds", "until", "payload_schema", "when", "wait"}
            and ("compensate" in step or not field.startswith("compensate"))
        }
        steps.append({**step, **options})
    return {"version": "1", "namespace": "default", **document, "steps": steps}


async def assert_undamaged(database: Connection) -> None:
    for full in (False, True):
        found = (await examine(database, full=full)).findings
        assert [finding.message for finding in found if finding.code == "workflow_damaged"] == []
        assert {finding.code for finding in found} <= {"limit_undeclared"}


async def test_workflows_with_every_option_of_every_kind_are_undamaged(database: Connection) -> None:
    header: Mapping[str, Any] = {
        "input_schema": SCHEMA,
        "timeout": 2.5,
        "output": {"a": "first", "b": "first", "end": "join.end-1"},
        "tags": ["x", "y"],
        "attributes": {"customer": 7, "share": 0.1, "is_new": True, "city": "Zürich"},
        "callback_url": URL,
        "key": "input.order",
        "on_conflict": "queue",
    }
    assert {"name", "version", "namespace", "steps", *header} == set(HEADER_FIELDS)
    given: set[tuple[str, str]] = set()
    for number in range(EXAMPLES):
        rng = random.Random(number)  # noqa: S311 - reproducible choices, not secrets
        steps = steps_of_every_kind(rng)
        given |= {
            (step.get("kind", "plain"), field) for step in steps for field, value in step.items() if value is not None
        }
        document = workflow(*steps, name=f"w{number}", **(header if number % 2 else {"output": "first"}))
        check_definition(document)
        await put_workflow(database, document)
    given |= {("plain", "recovers")}
    missing = {(kind, field) for kind, fields in STEP_FIELDS.items() for field in fields} - given
    assert missing == {
        # the recovery of a step is the same for every kind; these kinds have no handler
        *((kind, "recovers") for kind in STEP_FIELDS if kind != "plain"),
        *((kind, "type") for kind in ("child", "sleep", "signal", "approval")),
    }
    await assert_undamaged(database)


async def test_random_workflows_with_random_options_are_undamaged(database: Connection) -> None:
    for seed in range(EXAMPLES):
        rng = random.Random(seed)  # noqa: S311 - reproducible choices, not secrets
        for document in random_definition(seed, cancel_rest=seed % 2 == 0).documents.values():
            declared = with_options(document, rng)
            check_definition(declared)
            await put_workflow(database, declared)
    await assert_undamaged(database)


async def test_a_damaged_workflow_is_named_with_what_differs(database: Connection) -> None:
    first, second = ({"name": name, "type": name} for name in ("a", "b"))
    await put_workflow(database, workflow(first, {**second, "after": ["a"]}, {"name": "c", "type": "c"}))
    await database.execute("update interlock.workflow_steps set max_tries = 9, kind = 'map' where step = 'b'")
    await database.execute("delete from interlock.workflow_steps where step = 'c'")
    await database.execute("update interlock.workflow_edges set upstream = 'c'")
    (found,) = (await examine(database)).findings
    assert found.message == (
        "1 workflow not stored as defined: w version 1: step c is missing, step b has another kind, max_tries, "
        "the edge a -> b is missing, the edge c -> b is not in the definition"
    )
