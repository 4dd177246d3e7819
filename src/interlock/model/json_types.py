"""JSON types of annotations: the schema of the values of an annotation, and whether values of one fit another.

Invariant: `fits` says no only when the types contradict each other; an annotation whose JSON cannot be known (a
validator or serializer in Python, an unknown type) has the empty schema, which fits everything.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from interlock.model.json_values import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic.json_schema import GenerateJsonSchema

    from interlock.model.json_values import Codec

Mode = Literal["validation", "serialization"]
Schema = dict[str, Any]
USED_BY = "x-used-by"  # in the derived schema of an input: the parameters that take the field
UNKNOWN: Schema = {}
ANY_LIST: Schema = {"type": "array"}
ANY_OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
INTEGER: Schema = {"type": "integer"}

_SCALAR_TYPES: Mapping[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean", NOTHING: "null"}
# types of which values are converted to each type without loss, beside that type itself; a number may be whole
_CONVERTED_FROM: Mapping[str, frozenset[str]] = {
    "integer": frozenset({"boolean", "number"}),
    "number": frozenset({"boolean", "integer"}),
}


def schema_of_annotation(codec: Codec, mode: Mode) -> Schema:
    """Return the JSON schema of the values that an annotation takes (validation) or gives (serialization)."""
    (schema,), definitions = schemas_of_annotations([codec], mode)
    return {**schema, "$defs": definitions} if definitions else schema


def schemas_of_annotations(codecs: Sequence[Codec], mode: Mode) -> tuple[list[Schema], Schema]:
    """Return the schemas of several annotations, and the definitions (`$defs`) that they share."""
    schemas = {place: _scalar_schema(codec) for place, codec in enumerate(codecs) if codec.kinds}
    others = [(place, codec) for place, codec in enumerate(codecs) if not codec.kinds and _has_schema(codec, mode)]
    definitions: Schema = {}
    if others:
        from pydantic import TypeAdapter  # noqa: PLC0415 - slow to import, and many programs never need it

        inputs: Any = [(place, mode, codec.adapter()) for place, codec in others]
        found, shared = TypeAdapter.json_schemas(inputs, by_alias=mode == "validation", schema_generator=_generator())
        schemas |= {place: dict(schema) for (place, _), schema in found.items()}
        definitions = shared.get("$defs", {})
    return [schemas.get(place, UNKNOWN) for place in range(len(codecs))], definitions


def _scalar_schema(codec: Codec) -> Schema:
    names = [name for kind, name in _SCALAR_TYPES.items() if kind in codec.kinds]
    return {"type": names[0] if len(names) == 1 else names}


def _has_schema(codec: Codec, mode: Mode) -> bool:
    if codec.is_any:
        return False
    try:
        codec.adapter().json_schema(by_alias=mode == "validation", mode=mode, schema_generator=_generator())
    except Exception:  # noqa: BLE001 - pydantic raises many kinds for a type that has no schema
        return False
    return True


@cache
def _generator() -> type[GenerateJsonSchema]:
    """Return a generator for which the JSON of a Python function is unknown, and a time may be a number."""
    from pydantic.json_schema import GenerateJsonSchema  # noqa: PLC0415 - slow to import

    def unknown_before(name: str) -> Any:
        def generate(self: GenerateJsonSchema, schema: Any) -> Any:
            if self.mode == "validation" and schema.get("json_schema_input_schema") is None:
                return {}
            return getattr(super(Generator, self), name)(schema)

        return generate

    def time_or_number(name: str) -> Any:
        def generate(self: GenerateJsonSchema, schema: Any) -> Any:
            found = getattr(super(Generator, self), name)(schema)
            return {**found, "type": ["string", "number"]} if self.mode == "validation" else found

        return generate

    class Generator(GenerateJsonSchema):
        function_before_schema = unknown_before("function_before_schema")
        function_wrap_schema = unknown_before("function_wrap_schema")
        function_plain_schema = unknown_before("function_plain_schema")
        datetime_schema = time_or_number("datetime_schema")
        date_schema = time_or_number("date_schema")
        time_schema = time_or_number("time_schema")
        timedelta_schema = time_or_number("timedelta_schema")

        def decimal_schema(self, schema: Any) -> Any:
            # stored as text, from which pydantic makes any kind of number
            return {"type": ["string", "number"]} if self.mode == "serialization" else super().decimal_schema(schema)

        def ser_schema(self, schema: Any) -> Any:
            if schema["type"] in {"function-plain", "function-wrap"} and schema.get("return_schema") is None:
                return {}
            return super().ser_schema(schema)

    return Generator


def fits(given: Schema, wanted: Schema) -> bool:
    """Tell whether some value of one schema can be a value of another."""
    return _Comparison(given.get("$defs", {}), wanted.get("$defs", {})).fits(given, wanted)


def share_a_type(one: Schema, other: Schema) -> bool:
    """Tell whether a value can have the JSON type of both schemas; the fields of objects are not compared."""
    return any(
        _type_fits(given.get("type"), wanted.get("type")) or _type_fits(wanted.get("type"), given.get("type"))
        for given in _options(one, one.get("$defs", {}))
        for wanted in _options(other, other.get("$defs", {}))
    )


def element_of(schema: Schema) -> Schema | None:
    """Return the schema of the elements that a map over such a value has; None if it cannot be mapped over."""
    definitions = schema.get("$defs", {})
    found: list[Schema] = []
    for option in _options(schema, definitions):
        if option.get("type") == "array":
            found.append(option.get("items", UNKNOWN))
        elif option.get("type") == "object":  # a range, whose parts are ranges
            found.append(ANY_OBJECT)
        elif "type" not in option:
            found.append(UNKNOWN)
    return {"anyOf": found, "$defs": definitions} if found else None


class _Comparison:
    """Compares two schemas; a pair of definitions that is being compared counts as fitting, which ends recursion."""

    def __init__(self, given_definitions: Schema, wanted_definitions: Schema) -> None:
        self._given_definitions = given_definitions
        self._wanted_definitions = wanted_definitions
        self._compared: set[tuple[str, str]] = set()

    def fits(self, given: Any, wanted: Any) -> bool:
        if not isinstance(given, dict) or not isinstance(wanted, dict):  # true stands for any value
            return True
        pair = (str(given.get("$ref")), str(wanted.get("$ref")))
        if "$ref" in given and "$ref" in wanted:
            if pair in self._compared:
                return True
            self._compared.add(pair)
        return any(
            self._option_fits(one, other)
            for one in _options(given, self._given_definitions)
            for other in _options(wanted, self._wanted_definitions)
        )

    def _option_fits(self, given: Schema, wanted: Schema) -> bool:
        have, need = given.get("type"), wanted.get("type")
        if have is None or need is None:
            return True
        if not _type_fits(have, need):
            return False
        if "enum" in given and "enum" in wanted:
            return any(value in wanted["enum"] for value in given["enum"])
        if need == "array":
            return self.fits(given.get("items", UNKNOWN), wanted.get("items", UNKNOWN))
        return need != "object" or self._object_fits(given, wanted)

    def _object_fits(self, given: Schema, wanted: Schema) -> bool:
        fields, wanted_fields = given.get("properties", {}), wanted.get("properties", {})
        if fields and not given.get("additionalProperties") and not fields.keys() >= set(wanted.get("required", ())):
            return False
        if not all(self.fits(fields[name], wanted_fields[name]) for name in fields.keys() & wanted_fields.keys()):
            return False
        values, wanted_values = given.get("additionalProperties"), wanted.get("additionalProperties")
        return self.fits(values, wanted_values) if not fields and not wanted_fields else True


def _type_fits(given: str | None, wanted: str | None) -> bool:
    """Tell whether a value of one JSON type can be one of another; None is any type."""
    return given is None or wanted is None or given == wanted or given in _CONVERTED_FROM.get(wanted, ())


def _options(schema: Any, definitions: Schema, seen: frozenset[str] = frozenset()) -> Iterator[Schema]:
    """List the alternatives of a schema, each with at most one type; one without a type can be anything."""
    if not isinstance(schema, dict) or "allOf" in schema:
        yield UNKNOWN
    elif "$ref" in schema:
        name = str(schema["$ref"]).removeprefix("#/$defs/")
        is_known = name in definitions and name not in seen
        yield from _options(definitions[name] if is_known else UNKNOWN, definitions, seen | {name})
    elif any(key in schema for key in ("anyOf", "oneOf")):
        for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from _options(option, definitions, seen)
    elif "const" in schema or "enum" in schema:
        for value in schema.get("enum") or [schema.get("const")]:
            yield {"type": _type_of(value), "enum": [value]}
    elif isinstance(schema.get("type"), list):
        yield from ({**schema, "type": name} for name in schema["type"])
    else:
        yield schema


def _type_of(value: Any) -> str | None:
    if isinstance(value, list | dict):
        return "array" if isinstance(value, list) else "object"
    return _SCALAR_TYPES.get(type(value))
