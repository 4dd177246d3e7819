"""The input of a job against the JSON Schema of its workflow.

Invariant: a refusal names the place in the input and what would be right there, never the value, which may be a secret;
no schema makes this program fetch anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import validator_for

from interlock.client.values import ValueRefusedError, check_json
from interlock.errors import InputError
from interlock.store.schema import find_fault, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from interlock.client.values import Codec


def check_schema(schema: dict[str, Any]) -> None:
    """Refuse what is no JSON Schema, or needs another one from elsewhere; ValueError names the place in it."""
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"it is no JSON Schema: {place_of(error)}: {error.message}") from None
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise ValueError(f"$ref {reference!r} leads out of the schema; put what it names under $defs")


def check_input(document: Mapping[str, Any], input: Any) -> None:  # noqa: A002 - the name of the column
    """Refuse an input that the workflow's schema does not allow; InputError names the place."""
    told = f"workflow {document['name']}: input"
    if not isinstance(input, dict):
        raise InputError(f"{told} must be a JSON object, not {type(input).__name__}")
    try:
        check_json(input)
    except ValueRefusedError as error:
        raise InputError(f"{told}: {error}") from None
    schema = document.get("input_schema")
    if schema is None:
        return
    fault = find_fault(document["name"], schema, input)
    if fault is not None:
        raise InputError(fault)


def schema_of(codec: Codec) -> dict[str, Any]:
    """Make the schema of a model, a dataclass or a TypedDict; ValueError when that cannot be."""
    try:
        schema: dict[str, Any] = codec.adapter().json_schema()
    except Exception as error:
        raise ValueError(f"no JSON Schema can be made of it: {str(error).splitlines()[0]}") from error
    if schema.get("type", "object") != "object":
        raise ValueError("the input of a job is a JSON object: a model, a dataclass or a TypedDict")
    return schema


def is_json(value: Any) -> bool:
    """Tell whether a value can be stored as it is."""
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
