"""Converts typed Python values to stored JSON and back: one codec per annotation.

Invariant: PostgreSQL can store the result of `encode`, and `decode` turns it back into a value of the annotated type.
Scalars of exactly the annotated type take a fast path; pydantic is imported only for other types.
"""

from __future__ import annotations

import math
import types
import typing
from typing import TYPE_CHECKING, Any

import orjson

from interlock.errors import InputError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

NOTHING = type(None)
SCALARS = frozenset({str, int, float, bool, NOTHING})
MAX_DEPTH = 200  # nested lists and objects; orjson encodes 254 levels, some of which surround the value
_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1
_CONFIG: dict[str, Any] = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}


class ValueRefusedError(ValueError):
    """A value does not fit its annotation or JSON; the message omits the value, which may be a secret."""


def is_storable(value: Any) -> bool:
    """Tell whether a jsonb column stores a scalar unchanged."""
    kind = type(value)
    if kind is str:
        return "\0" not in value and (value.isascii() or _is_unicode(value))
    if kind is int:
        return bool(_MIN_INTEGER <= value <= _MAX_INTEGER)
    if kind is float:
        return math.isfinite(value)
    return kind is bool or value is None


def storable_text(text: str) -> str:
    """Replace the characters of a text that PostgreSQL cannot store."""
    if is_storable(text):
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def check_input_size(subject: str, value: Any, largest: int) -> None:
    """Raise InputError if an input has more than `largest` bytes of JSON (setting `largest_input`)."""
    size = len(orjson.dumps(value, default=str))
    if size > largest:
        raise InputError(
            f"{subject}: the input has {size:,} bytes of JSON, and at most {largest:,} are stored (setting "
            "`largest_input`); store it elsewhere and pass a reference to it"
        )


def check_json(value: Any, place: str = "", depth: int = 0) -> None:
    """Raise ValueRefusedError, which names the place, if jsonb cannot hold a value or Python cannot read it back."""
    kind = type(value)
    if kind in SCALARS:
        if not is_storable(value):
            raise ValueRefusedError(f"{place}{_unstorable(value)}")
    elif depth > MAX_DEPTH:
        raise ValueRefusedError(f"it is nested more than {MAX_DEPTH} levels deep")
    elif kind is dict:
        for key, item in value.items():
            _check_key(key, place)
            check_json(item, f"{place}[{key!r}] ", depth + 1)
    elif kind in {list, tuple}:
        for index, item in enumerate(value):
            check_json(item, f"{place}[{index}] ", depth + 1)
    else:
        raise ValueRefusedError(f"{place}a {kind.__name__} is not a JSON value; annotate it with its type")


def to_json(value: Any) -> Any:
    """Return the JSON of a value without an annotation: JSON as it is, models, dataclasses and times converted."""
    try:
        check_json(value)
    except ValueRefusedError:
        from pydantic_core import PydanticSerializationError, to_jsonable_python  # noqa: PLC0415 - as in Codec.adapter

        try:
            value = to_jsonable_python(value, bytes_mode="base64", inf_nan_mode="constants")
        except PydanticSerializationError as error:
            raise ValueRefusedError(str(error)) from None
        check_json(value)
    return value


def _check_key(key: Any, place: str) -> None:
    if type(key) is not str:
        raise ValueRefusedError(f"{place}the keys of a JSON object must be strings, got {type(key).__name__}")
    if not is_storable(key):
        raise ValueRefusedError(f"{place}{_unstorable(key)}")


class Codec:
    """Converts values of one annotation."""

    __slots__ = ("_adapter", "annotation", "kinds")

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation
        # scalar types whose values are stored as they are; empty for other annotations
        self.kinds = _plain_kinds(annotation)
        self._adapter: TypeAdapter[Any] | None = None

    @property
    def is_any(self) -> bool:
        """Whether every JSON value fits."""
        return self.annotation is Any or self.annotation is object

    def encode(self, value: Any) -> Any:
        """Validate a value, with the conversions of pydantic, and return its JSON."""
        if type(value) in self.kinds and is_storable(value):
            return value
        if not self.is_any:
            value = self._dumped(self._validated(value))
        check_json(value)
        return value

    def encode_result(self, value: Any) -> Any:
        """Return the JSON of a value that should have the annotated type; validate it only if it does not."""
        if type(value) in self.kinds and is_storable(value):
            return value
        if self.is_any:
            return self.encode(value)
        try:
            dumped = self._dumped(value)
        except ValueRefusedError:
            return self.encode(value)
        check_json(dumped)
        return dumped

    def decode(self, value: Any) -> Any:
        """Turn JSON into a value of the annotated type."""
        if self.is_any or type(value) in self.kinds:
            return value
        adapter = self.adapter()
        try:
            return adapter.validate_json(orjson.dumps(value))
        except ValueError as error:
            raise ValueRefusedError(_first_reason(error)) from None

    def adapter(self) -> TypeAdapter[Any]:
        """Return the pydantic adapter of the annotation, made on first use."""
        if self._adapter is None:
            from pydantic import PydanticUserError, TypeAdapter  # noqa: PLC0415 - takes 0.1 s, and many programs never need it

            try:
                self._adapter = TypeAdapter(self.annotation, config=typing.cast("Any", _CONFIG))
            except PydanticUserError:  # models and dataclasses have their own configuration
                self._adapter = TypeAdapter(self.annotation)
        return self._adapter

    def _validated(self, value: Any) -> Any:
        adapter = self.adapter()
        try:
            return adapter.validate_python(value)
        except ValueError as error:
            raise ValueRefusedError(_first_reason(error)) from None

    def _dumped(self, value: Any) -> Any:
        adapter = self.adapter()
        try:
            return adapter.dump_python(value, mode="json", warnings="error")
        except ValueError as error:  # the base class of pydantic's errors
            raise ValueRefusedError(_without_value(str(error))) from None


def _plain_kinds(annotation: Any) -> frozenset[type]:
    if annotation is None:
        return frozenset({NOTHING})
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = frozenset(typing.get_args(annotation))
        return members if members <= SCALARS else frozenset()
    return frozenset({annotation}) if isinstance(annotation, type) and annotation in SCALARS else frozenset()


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unstorable(value: Any) -> str:
    if isinstance(value, str):
        return "text must be valid Unicode without the character NUL"
    if isinstance(value, int):
        return "an integer must fit into 64 bits"
    return "a number must be finite: JSON has no NaN and no infinity"


def _first_reason(error: ValueError) -> str:
    """Format the first error of pydantic without the value, which may be a secret."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    first = errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def _without_value(text: str) -> str:
    line = text.splitlines()[-1].strip()
    return line.split(" [input_value=")[0].removeprefix("PydanticSerializationUnexpectedValue(")
