"""Every place that takes, declares or stores options agrees with the option table."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest

from interlock import Interlock
from interlock.cli.enqueue import FLAG_TYPES, enqueue
from interlock.client import registry, step_decorators
from interlock.config import MAX_NAME_LENGTH
from interlock.model import options
from interlock.model.graph import KINDS_WITH_HANDLER, STEP_FIELDS
from interlock.model.options import (
    DELAY,
    DURATION,
    MAX_TEXT_BYTES,
    MIN_PRIORITY,
    OPTIONS,
    TASK_DEFAULTS,
    EnqueueOptions,
    NewTask,
    Scope,
    TaskDefaultOptions,
    TaskDefaults,
    as_columns,
    check_options,
    check_seconds,
    options_in,
)
from interlock.store.enqueue import ENQUEUE, is_copyable
from interlock.store.schedules import TASK_OPTIONS as SCHEDULE_OPTIONS
from interlock.supervisor.http.requests import OPTION_TYPES, NewTaskRequest

pytestmark = pytest.mark.unit

COLUMNS = {option.column: option.type.sql_type for option in OPTIONS.values()}
BASE = {"type": "text", "input": "jsonb"}


def names(scope: Scope) -> set[str]:
    return {option.name for option in options_in(scope)}


def keys(typed_dict: Any) -> set[str]:
    return set(typed_dict.__annotations__)


def columns_of(statement: str, opening: str) -> dict[str, str]:
    """Read `name type, name type` in the parentheses after some text of a statement."""
    text = re.sub(r"\s+", " ", ENQUEUE[statement].sql)
    inside = text.split(opening, 1)[1].split(")", 1)[0]
    return {name: sql_type for name, _, sql_type in (part.strip().partition(" ") for part in inside.split(","))}


def arguments_of(statement: str) -> set[str]:
    return set(re.findall(r"(\w+) =>", ENQUEUE[statement].sql))


def test_a_new_task_has_a_field_for_each_option() -> None:
    assert [field.name for field in fields(NewTask)][:2] == ["type", "input"]
    assert {field.name for field in fields(NewTask)} == {*BASE, *COLUMNS}


def test_typed_dicts_have_a_key_for_each_option_of_their_place() -> None:
    assert keys(EnqueueOptions) == set(OPTIONS)
    assert keys(TaskDefaultOptions) == names(Scope.TASK)
    assert keys(options.PlacementOptions) == names(Scope.STEP)
    assert keys(options.RunOptions) | {"backoff"} == names(Scope.HANDLER_STEP)
    assert keys(registry.TaskOptions) >= names(Scope.TASK)
    assert keys(step_decorators.StepOptions) >= names(Scope.STEP)
    assert keys(step_decorators.HandlerOptions) >= names(Scope.STEP) | names(Scope.HANDLER_STEP)


def test_a_task_has_a_default_for_each_option_that_it_can_define() -> None:
    assert keys(TaskDefaults) == {option.name for option in TASK_DEFAULTS} == names(Scope.TASK) - {"backoff"}
    new = NewTask("t", {})
    assert {name: getattr(TaskDefaults, name) for name in keys(TaskDefaults)} == {
        option.name: getattr(new, option.column) for option in TASK_DEFAULTS
    }


def test_definitions_of_steps_take_the_options_of_their_kind() -> None:
    every, handled = names(Scope.STEP), names(Scope.STEP) | names(Scope.HANDLER_STEP)
    compensation = {f"compensate_{name}" for name in names(Scope.INHERITED)}
    for kind, known in STEP_FIELDS.items():
        wanted = handled if kind in KINDS_WITH_HANDLER else every
        assert set(known) & (set(OPTIONS) - {"timeout"}) == wanted - {"timeout"}, kind
        if "compensate" in known:
            assert set(known) >= compensation


def test_a_schedule_stores_the_options_of_its_scope() -> None:
    assert {option.column for option in options_in(Scope.SCHEDULE)} == SCHEDULE_OPTIONS
    app = Interlock("postgresql://nowhere/none")

    @app.periodic(cron="0 4 * * *")
    @app.task(
        priority=3,
        max_tries=2,
        timeout=9,
        limit_key="l",
        limit_weight=2,
        tags=["a"],
        callback_url="https://example.org/",
    )
    def nightly() -> None: ...

    stored = app.schedules["nightly"].options
    assert stored == {
        "priority": 3,
        "max_tries": 2,
        "timeout_seconds": 9.0,
        "limit_keys": ["l"],
        "limit_weight": "2",
        "tags": ["a"],
        "callback_url": "https://example.org/",
    }
    assert stored.keys() <= SCHEDULE_OPTIONS


def test_the_command_has_a_flag_for_each_option_of_the_cli() -> None:
    flags = set(inspect.signature(enqueue).parameters) - {"context", "type_", "arguments", "app", "unchecked"}
    assert flags - {"count", "wait", "wait_timeout", "in_json"} == {option.flag for option in options_in(Scope.CLI)}
    assert {option.type for option in options_in(Scope.CLI)} <= FLAG_TYPES.keys()


def test_the_request_has_a_field_for_each_option_of_the_rest_api() -> None:
    fields_ = NewTaskRequest.model_fields
    assert set(fields_) == {*BASE, *names(Scope.REST)}
    assert {option.type for option in options_in(Scope.REST)} <= OPTION_TYPES.keys()
    assert not any(fields_[name].is_required() for name in names(Scope.REST))


def test_requests_have_the_bounds_of_the_option_table() -> None:
    longest = check_seconds("timeout", DURATION.most)
    NewTaskRequest.model_validate({"type": "t", "timeout": longest, "delay": DELAY.most})
    for name, value in (
        ("timeout", 0),
        ("timeout", longest + 1),
        ("delay", longest + 1),
        ("priority", MIN_PRIORITY - 1),
    ):
        with pytest.raises(ValueError, match=name):
            NewTaskRequest.model_validate({"type": "t", name: value})
    assert 4 * MAX_NAME_LENGTH <= MAX_TEXT_BYTES, "a character has at most 4 bytes in UTF-8"


@pytest.mark.parametrize("statement", ["insert_tasks", "enqueue_tasks"])
def test_the_recordset_of_many_tasks_has_a_column_for_each_option(statement: str) -> None:
    assert columns_of(statement, "jsonb_to_recordset(%(tasks)s::jsonb) as (") == {**BASE, **COLUMNS}
    aliases = columns_of(statement, "with ordinality as task (")
    assert list(aliases) == [*columns_of(statement, "jsonb_to_recordset(%(tasks)s::jsonb) as ("), "place"]


@pytest.mark.parametrize("statement", ["enqueue_task", "enqueue_tasks", "enqueue_as_text"])
def test_calls_of_the_function_pass_every_option(statement: str) -> None:
    assert arguments_of(statement) == {*BASE, *COLUMNS, "actor"}


def test_the_statement_of_a_plain_task_takes_every_option_that_is_never_null() -> None:
    never_null = {field.name for field in fields(NewTask) if field.default is not None} & COLUMNS.keys()
    parameters = set(re.findall(r"%\((\w+)\)s", ENQUEUE["insert_plain_task"].sql))
    assert parameters == {*BASE, *never_null, "actor", "whole", "task_id"}


def test_the_copy_has_a_column_for_each_option_that_can_be_copied() -> None:
    copied = [option.column for option in options_in(Scope.COPY) if option.type is not DELAY]
    assert list(columns_of("copy_tasks", "interlock.tasks (")) == ["id", "type", "input", *copied]


def test_an_option_that_cannot_be_copied_keeps_a_task_from_being_copied() -> None:
    values = {
        "unique_key": "u",
        "request_id": "r",
        "limit_key": "l",
        "limit_weight": 2,
        "task_id": "0198c0de-0000-7000-8000-000000000001",
    }
    assert values.keys() == OPTIONS.keys() - names(Scope.COPY)
    assert is_copyable(NewTask("t", {}, priority=1, tags=("a",)))
    for name, value in values.items():
        assert not is_copyable(NewTask("t", {}, **as_columns(check_options({name: value}))))
