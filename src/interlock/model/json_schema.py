"""Checks the input of a job and the payload of a signal against the JSON Schema of the definition.

Invariant: an error names the place in the value and the rule, never the value, which may be a secret; no schema makes
this program fetch anything.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson
from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable
from referencing.jsonschema import EMPTY_REGISTRY

from interlock.errors import InputError
from interlock.model.json_types import USED_BY
from interlock.model.json_values import ValueRefusedError, check_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jsonschema import ValidationError
    from jsonschema.protocols import Validator

    from interlock.model.json_values import Codec


# keywords whose error messages contain names of fields but no values
_WITHOUT_VALUES = frozenset({"required", "additionalProperties", "dependentRequired", "unevaluatedProperties"})


def find_fault(place: str, schema: Mapping[str, Any], given: Any) -> str | None:
    """Describe the first violation of the schema in a value; None if there is none.

    `place` ends with the name of the value (`workflow w: input`), of which the schema is the `input_schema`.
    """
    try:
        found = best_match(_validator(orjson.dumps(schema)).iter_errors(given))
    except (Unresolvable, re.error) as error:
        return f"{place}_schema: {error}"
    if found is None:
        return None
    return f"{place}{place_of(found)}: {_rule(found)}{_users(schema, found)}"


def place_of(error: ValidationError | SchemaError) -> str:
    """Format the path of an error in its document."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)


@lru_cache(maxsize=256)
def _validator(schema: bytes) -> Validator:
    loaded = orjson.loads(schema)
    return validator_for(loaded, default=Draft202012Validator)(loaded, registry=EMPTY_REGISTRY)


def _rule(error: ValidationError) -> str:
    if error.validator in _WITHOUT_VALUES:
        return str(error.message)
    if error.validator == "type":
        wanted: Any = error.validator_value
        return f"must be of type {wanted if isinstance(wanted, str) else ' or '.join(wanted)}"
    return f"breaks the rule {error.validator}: {orjson.dumps(error.validator_value).decode()}"


def _users(schema: Any, error: ValidationError) -> str:
    """Name the parameters that need a field, if the schema was derived from them."""
    path: list[Any] = list(error.absolute_schema_path)
    if path == ["required"]:
        required: Any = error.validator_value
        missing = [name for name in required if error.message.startswith(f"{name!r} is")]
        path = ["properties", *missing, "required"]
    found: list[str] = []
    for part in path:
        if isinstance(schema, dict):
            found = schema.get(USED_BY, found)
            schema = schema.get(part)
        else:
            schema = schema[part] if isinstance(schema, list) else None
    return f" ({', '.join(found)})" if found else ""


def check_schema(schema: dict[str, Any]) -> None:
    """Raise ValueError, which names the place, if this is not a JSON Schema or refers to another document."""
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"it is no JSON Schema: {place_of(error)}: {error.message}") from None
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise ValueError(f"$ref {reference!r} refers to another document; put that schema under $defs")


def check_input(document: Mapping[str, Any], input: Any) -> None:  # noqa: A002 - the name of the column
    """Raise InputError, which names the place, if the workflow's schema does not allow an input."""
    place = f"workflow {document['name']}: input"
    if not isinstance(input, dict):
        raise InputError(f"{place} must be a JSON object, got {type(input).__name__}")
    try:
        check_json(input)
    except ValueRefusedError as error:
        raise InputError(f"{place}: {error}") from None
    schema = document.get("input_schema")
    if schema is None:
        return
    fault = find_fault(place, schema, input)
    if fault is not None:
        raise InputError(fault)


def schema_of(codec: Codec) -> dict[str, Any]:
    """Make the schema of a type, such as a pydantic model or a dataclass; ValueError if there is none."""
    try:
        schema: dict[str, Any] = codec.adapter().json_schema()
    except Exception as error:
        raise ValueError(f"no JSON Schema can be made of it: {str(error).splitlines()[0]}") from error
    return schema


def input_schema_of(codec: Codec) -> dict[str, Any]:
    """Make the schema of the input of a job; ValueError if there is none, or if it allows no JSON object."""
    schema = schema_of(codec)
    if schema.get("type", "object") != "object":
        raise ValueError("the input of a job is a JSON object: use a pydantic model, a dataclass or a TypedDict")
    return schema


def is_json(value: Any) -> bool:
    """Tell whether a value can be stored as JSON without conversion."""
    try:
        check_json(value)
    except ValueRefusedError:
        return False
    return True


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        found = schema.get("$ref")
        if isinstance(found, str):
            yield found
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)
