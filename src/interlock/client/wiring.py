"""Checks the wiring of a workflow: where the parameters of handlers get their values; derives the schema of the input.

Invariant: a refusal names both places, the parameter and what should provide its value. What cannot be known when a
workflow is declared (the type of a value without an annotation, the fields of an open input) is not refused.
"""

from __future__ import annotations

import inspect
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.client.step_context import parameters_of
from interlock.client.task import place_of_function
from interlock.model.conditions import parse_condition
from interlock.model.graph import (
    AFTER,
    DEPENDENCY_FIELDS,
    INPUT_PATH_PREFIX,
    KINDS_WITH_HANDLER,
    MAP,
    GraphError,
    recovering_steps,
    suggestion,
)
from interlock.model.joins import alternative_steps, compile_joins, needed_dependencies
from interlock.model.json_types import (
    ANY_LIST,
    ANY_OBJECT,
    INTEGER,
    NULL,
    UNKNOWN,
    USED_BY,
    element_of,
    fits,
    schema_of_annotation,
    schemas_of_annotations,
    share_a_type,
)
from interlock.model.json_values import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from interlock.client.task import Task
    from interlock.model.json_types import Mode, Schema
    from interlock.model.json_values import Codec

DERIVED_COMMENT = "derived from the parameters of the first steps"
_WHOLE_INPUT = "input"
_CHOICE: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


class _Value(NamedTuple):
    """A value that a parameter gets, as far as it is known; `origin` is the clause of an error about it."""

    schema: Schema
    origin: str
    codec: Codec | None = None


class Wiring:
    """The parameters of all handlers of one definition, and what provides them.

    `document` has passed `check_definition`. With `has_model`, its input schema is that of a Python type, whose fields
    are all that a job's input has unless the type allows more.
    """

    def __init__(self, document: Mapping[str, Any], tasks: Mapping[str, Task[..., Any]], *, has_model: bool) -> None:
        self._workflow = document["name"]
        self._key = str(document.get("key") or "")
        self._tasks = tasks
        self._steps: dict[str, dict[str, Any]] = {step["name"]: step for step in document["steps"]}
        self._recovering = recovering_steps(document)
        self._joins = compile_joins(document)
        self._input: Schema = document["input_schema"] or {}
        self._object = _resolved(self._input)
        self._fields: Mapping[str, Any] = self._object.get("properties", {})
        more = self._object.get("additionalProperties", "properties" not in self._object if has_model else True)
        self._is_closed = more is False and "patternProperties" not in self._object
        self._schemas: dict[tuple[Codec, Mode], Schema] = {}

    def check(self) -> None:
        """Raise GraphError, which names the step and the parameter, if a handler cannot get its arguments."""
        if self._key.startswith(INPUT_PATH_PREFIX):
            field = self._key.removeprefix(INPUT_PATH_PREFIX).split(".")[0]
            if self._is_closed and field not in self._fields:
                raise GraphError(self._no_such_field(field), workflow=self._workflow, path=("key",))
        for index, step in enumerate(self._steps.values()):
            self._check_input_fields(index, step)
            if step["kind"] in KINDS_WITH_HANDLER:
                for name, required in _parameters(self._tasks[step["type"]]):
                    self._check_parameter(index, step, name, required=required)
            if step.get("compensate") is not None:
                for name, required in _parameters(self._tasks[step["compensate"]]):
                    self._check_compensation(index, step, name, required=required)
            if step["kind"] == "decision":
                self._check_choice(index, step)

    def derive_schema(self) -> Schema | None:
        """Make the schema of the input from the parameters of the steps that run first; None if they need nothing."""
        uses = list(self._input_uses())
        if not uses:
            return None
        schemas, definitions = schemas_of_annotations(
            [use.codec for use in uses if use.codec is not None], "validation"
        )
        made = iter(schemas)
        derived: Schema = {"$comment": DERIVED_COMMENT, "type": "object"}
        compared: dict[str, list[tuple[_InputUse, Schema]]] = {}
        for use in uses:
            schema = {**(use.schema if use.codec is None else next(made)), USED_BY: [use.origin]}
            complete = {**schema, "$defs": definitions}
            for earlier, wanted in compared.setdefault(use.name, []):
                if (use.is_required or earlier.is_required) and not share_a_type(complete, wanted):
                    raise self._error(
                        list(self._steps).index(use.step),
                        f"{use.origin} is {_use_type(use)}, but {earlier.origin} is {_use_type(earlier)}: "
                        f"no value of the field {use.name!r} of the input fits both",
                    )
            compared[use.name].append((use, complete))
            if use.name == _WHOLE_INPUT:
                derived.setdefault("allOf", []).append(schema)
                continue
            properties = derived.setdefault("properties", {})
            properties[use.name] = _merged(properties.get(use.name), schema)
            if use.is_required and use.name not in derived.setdefault("required", []):
                derived["required"].append(use.name)
        return {**derived, "$defs": definitions} if definitions else derived

    # --- what a parameter gets

    def _check_parameter(self, index: int, step: dict[str, Any], name: str, *, required: bool) -> None:
        task = self._tasks[step["type"]]
        field = next((field for field in DEPENDENCY_FIELDS if name in (step.get(field) or ())), None)
        if step["kind"] == MAP and name in {"item", "index"}:
            values = self._part_values(index, step, name)
        elif name == step.get("over"):
            values = []
        elif field is not None:
            values = self._dependency_values(name, field)
        else:
            values = self._input_values(step, name)
        problem = self._find_gap(step, name, field, values) if required else None
        if problem is not None:
            raise self._error(index, f"{_parameter(name, task)} {problem}", field or AFTER)
        source = "over" if step.get("over") is not None else "over_input"
        self._check_types(index, task, name, values, source if name == "item" else field or AFTER)

    def _find_gap(self, step: dict[str, Any], name: str, field: str | None, values: list[_Value]) -> str | None:
        """Say why a parameter without a default can be without a value; None if nothing is known against it."""
        if name == step.get("over"):
            return f"gets no value: a part of a map gets its item, not the whole of {name!r}"
        if field is None:
            if values or not self._lacks(step, name):
                return None
            known = (*(each for field in DEPENDENCY_FIELDS for each in step.get(field) or ()), *self._fields)
            return f"is neither a step in its after nor a field of the input{suggestion(name, known)}"
        is_alternative = name in alternative_steps(self._joins[step["name"]])
        if name in self._fields or (field == AFTER and not is_alternative and not _can_run_without(step)):
            return None
        if is_alternative:
            why = "is on one of the branches of a decision"
        else:
            why = f"is in {field}" if field != AFTER else f"is not needed with join={step['join']!r}"
        return f"needs a default: step {name!r} {why}, so it may have no result"

    def _check_compensation(self, index: int, step: dict[str, Any], name: str, *, required: bool) -> None:
        task = self._tasks[step["compensate"]]
        values = self._dependency_values(step["name"], "") if name == "result" else self._input_values(step, name)
        if required and not values and self._lacks(step, name):
            message = f"{_parameter(name, task)} is neither 'result', the result of the step, nor a field of the input"
            raise self._error(index, message, "compensate")
        self._check_types(index, task, name, values, "compensate")

    def _check_choice(self, index: int, step: dict[str, Any]) -> None:
        task = self._tasks[step["type"]]
        codec = task.codec("return")
        if not fits(self._schema(codec, "serialization"), _CHOICE):
            message = f"the handler{_place(task)} returns {_type_name(codec)}"
            raise self._error(index, f"{message}, but a decision returns the name of a branch, or several", "branches")

    def _check_types(self, index: int, task: Task[..., Any], name: str, values: list[_Value], field: str) -> None:
        codec = task.codec(name)
        for value in values:
            is_same = value.codec is not None and value.codec.annotation == codec.annotation
            if not is_same and not fits(value.schema, self._schema(codec, "validation")):
                message = f"{_parameter(name, task)} is {_type_name(codec)}, but {value.origin}"
                raise self._error(index, message, field)

    def _dependency_values(self, name: str, field: str) -> list[_Value]:
        """Return the result of a step, and those of steps that stand in for it when it failed."""
        if field not in {AFTER, "always", ""}:
            return []  # it has failed
        names = [name]
        for each in names if field == AFTER else ():  # the list grows during the loop
            names += [recoverer for recoverer in self._recovering.get(each, ()) if recoverer not in names]
        return [self._result(each, "" if each == name else f", which recovers {name!r},") for each in names]

    def _result(self, name: str, role: str) -> _Value:
        step = self._steps[name]
        kind = step["kind"]
        if kind not in KINDS_WITH_HANDLER:
            known = {"sleep": (NULL, "has no result"), "approval": (ANY_OBJECT, "returns an object")}
            if (payload := step.get("payload_schema")) is not None:
                known["signal"] = (payload, f"has a payload of type {_json_type(_resolved(payload))}")
            schema, what = known.get(kind, (UNKNOWN, "returns any value"))
            return _Value(schema, f"step {name!r}{role} {what}")
        task = self._tasks[step["type"]]
        codec = task.codec("return")
        schema = self._schema(codec, "serialization")
        if kind == MAP:
            listed = {**ANY_LIST, "items": schema, "$defs": schema.get("$defs", {})}
            return _Value(listed, f"step {name!r}{_place(task)}{role} returns list[{_type_name(codec)}]")
        return _Value(schema, f"step {name!r}{_place(task)}{role} returns {_type_name(codec)}", codec)

    def _part_values(self, index: int, step: dict[str, Any], name: str) -> list[_Value]:
        if name == "index":
            return [_Value(INTEGER, "a part of a map gets a whole number")]
        return list(self._elements(index, step))

    def _elements(self, index: int, step: dict[str, Any]) -> Iterator[_Value]:
        """Return the elements of each value over which a map may go."""
        over = step.get("over")
        values = self._dependency_values(over, AFTER) if over is not None else self._field_values(step["over_input"])
        for value in values:
            element = element_of(value.schema)
            if element is None:
                message = f"a map goes over a list or a range, but {value.origin}"
                raise self._error(index, message, "over_input" if over is None else "over")
            yield _Value(element, f"{value.origin}, of which a part gets an element")

    # --- the input

    def _input_values(self, step: dict[str, Any], name: str) -> list[_Value]:
        if name == _WHOLE_INPUT:
            return [_Value(self._input, "the input of the workflow has another type")]
        return [] if name == step.get("over_input") else self._field_values(name)

    def _field_values(self, name: str) -> list[_Value]:
        if name not in self._fields:
            return []
        field = self._fields[name]
        schema = {**(field if isinstance(field, dict) else UNKNOWN), "$defs": self._input.get("$defs", {})}
        return [_Value(schema, f"the field {name!r} of the input is of type {_json_type(schema)}")]

    def _lacks(self, step: dict[str, Any], name: str) -> bool:
        """Tell whether no field of the input can have a name: the input is closed, or the name is that of a step."""
        return self._is_closed or name in self._steps or name == step.get("over_input")

    def _check_input_fields(self, index: int, step: dict[str, Any]) -> None:
        """Check the fields of the input that a step names in its definition."""
        named = [("over_input", step.get("over_input")), ("until", _field_of_until(step))]
        if step.get("when") is not None:
            named += [("when", field) for field in sorted(parse_condition(step["when"]).input_fields)]
        if (assignee := str(step.get("assignee"))).startswith(INPUT_PATH_PREFIX):
            named.append(("assignee", assignee.split(".")[1]))
        mapping = step.get("input") or {}
        mapped = [value for value in mapping.values() if isinstance(value, str) and value.startswith("input.")]
        named += [("input", value.removeprefix("input.")) for value in mapped]
        for field, name in named:
            if name is not None and name not in self._fields and self._is_closed:
                raise self._error(index, self._no_such_field(name), field)
        if step.get("kind") == MAP:
            over = step.get("over")
            if over in alternative_steps(self._joins[step["name"]]):
                message = f"step {over!r} may have no result when this step runs, so it cannot be mapped over"
                raise self._error(index, message, "over")
            list(self._elements(index, step))

    def _input_uses(self) -> Iterator[_InputUse]:
        """List the fields of the input that the first steps need; they run in any case, as they have no condition."""
        for step in self._steps.values():
            if step.get("when") is not None or any(step.get(field) for field in DEPENDENCY_FIELDS):
                continue
            name = step["name"]
            if step.get("over_input") is not None:
                schema = {"type": ["array", "object"]}
                yield _InputUse(
                    name, step["over_input"], schema, None, f"over_input of step {name!r}", is_required=True
                )
            elif (until := _field_of_until(step)) is not None:
                yield _InputUse(name, until, {"type": "string"}, None, f"until of step {name!r}", is_required=True)
            elif step["kind"] in KINDS_WITH_HANDLER:
                task = self._tasks[step["type"]]
                for parameter, required in _parameters(task):
                    origin = f"parameter {parameter!r} of step {name!r}"
                    yield _InputUse(name, parameter, UNKNOWN, task.codec(parameter), origin, required)

    # --- helpers

    def _schema(self, codec: Codec, mode: Mode) -> Schema:
        if (codec, mode) not in self._schemas:
            self._schemas[codec, mode] = schema_of_annotation(codec, mode)
        return self._schemas[codec, mode]

    def _no_such_field(self, name: str) -> str:
        return f"the input has no field {name!r}{suggestion(name, self._fields)}"

    def _error(self, index: int, message: str, field: str = AFTER) -> GraphError:
        step = list(self._steps)[index]
        return GraphError(message, workflow=self._workflow, step=step, path=("steps", index, field))


class _InputUse(NamedTuple):
    """A use of a field of the input by a step; its type is that of an annotation, or else a schema."""

    step: str
    name: str
    schema: Schema
    codec: Codec | None
    origin: str
    is_required: bool


def _parameters(task: Task[..., Any]) -> tuple[tuple[str, bool], ...]:
    taken = parameters_of(task)
    return () if taken is None else taken.parameters


def _can_run_without(step: Mapping[str, Any]) -> bool:
    """Tell whether the join of a step can be met without one of its dependencies."""
    count = sum(len(step.get(field) or ()) for field in DEPENDENCY_FIELDS)
    needed = needed_dependencies(step.get("join"), count)
    return needed is not None and needed < count


def _parameter(name: str, task: Task[..., Any]) -> str:
    return f"parameter {name!r}{_place(task)}"


def _place(task: Task[..., Any]) -> str:
    place = place_of_function(task.function) if task.command is None else None
    return "" if place is None else f" ({place})"


def _type_name(codec: Codec) -> str:
    return (
        "None"
        if codec.annotation is None or codec.annotation is NOTHING
        else inspect.formatannotation(codec.annotation)
    )


def _use_type(use: _InputUse) -> str:
    return _json_type(use.schema) if use.codec is None else _type_name(use.codec)


def _json_type(schema: Schema) -> str:
    wanted = schema.get("type")
    items = schema.get("items")
    if wanted == "array" and isinstance(items, dict) and isinstance(items.get("type"), str):
        return f"array of {items['type']}"
    return " or ".join(wanted) if isinstance(wanted, list) else str(wanted or "another kind")


def _resolved(schema: Schema) -> Schema:
    """Follow the reference of a schema that refers to one of its own definitions, as that of a recursive model does."""
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    found: Schema = schema.get("$defs", {}).get(name, schema)
    return found


def _merged(one: Schema | None, other: Schema) -> Schema:
    """Combine two uses of a field: its value must fit both."""
    if one is None:
        return other
    used_by = [*one[USED_BY], *other[USED_BY]]
    first, second = ({key: value for key, value in each.items() if key != USED_BY} for each in (one, other))
    if not first or not second or first == second:
        return {**first, **second, USED_BY: used_by}
    return {"allOf": [*first.get("allOf", [first]), second], USED_BY: used_by}


def _field_of_until(step: Mapping[str, Any]) -> str | None:
    """Return the field of the input that holds the time of a sleep; None if the definition has the time itself."""
    until = step.get("until")
    if until is None:
        return None
    try:
        datetime.fromisoformat(until)
    except ValueError:
        return str(until)
    return None
