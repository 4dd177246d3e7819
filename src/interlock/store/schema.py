"""The input of a job against the JSON Schema of its workflow, wherever the job comes from.

Invariant: a fault names the place in the input and what would be right there, never the value, which may be a secret;
no schema makes this program fetch anything.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable
from referencing.jsonschema import EMPTY_REGISTRY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jsonschema import SchemaError, ValidationError
    from jsonschema.protocols import Validator

# what these say of a value names only its fields
_WITHOUT_VALUES = frozenset({"required", "additionalProperties", "dependentRequired", "unevaluatedProperties"})


def find_fault(workflow: str, schema: Mapping[str, Any], given: Any) -> str | None:
    """Say what the schema of a workflow does not allow in an input, and where; None when there is nothing."""
    try:
        found = best_match(_validator(orjson.dumps(schema)).iter_errors(given))
    except (Unresolvable, re.error) as error:
        return f"workflow {workflow}: input_schema: {error}"
    return None if found is None else f"workflow {workflow}: input{place_of(found)}: {_rule(found)}"


def place_of(error: ValidationError | SchemaError) -> str:
    """Name the place in a document that an error is about."""
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
