"""The signature of a task: its arguments as JSON, its context parameter and its result.

Invariant: arguments are stored by name, so that every parameter can be given by name; another signature raises
DefinitionError when the task is defined.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from interlock.client.context import TaskContext
from interlock.client.dependencies import find_dependencies
from interlock.errors import DefinitionError, InputError, PermanentError
from interlock.model.json_values import Codec, ValueRefusedError, is_storable
from interlock.postgres.connection import UnreadableJson

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

_CONTEXT_ANNOTATION = re.compile(
    r"^(?:[\w.]+\.)?(?:(?:Task|Step)Context(?:\s*\|\s*None)?|Optional\[(?:[\w.]+\.)?(?:Task|Step)Context\])$"
)
_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


class Arguments:
    """Binds, validates and converts the arguments and the result of one function."""

    __slots__ = (
        "_codecs",
        "_extra",
        "_function",
        "_names",
        "_plain",
        "_provided",
        "_required",
        "_signature",
        "_task",
        "context",
        "dependencies",
    )

    def __init__(self, task: str, function: Callable[..., Any]) -> None:
        self._task = task
        self._function = inspect.unwrap(function)
        signature = inspect.signature(function)
        self.dependencies = find_dependencies(f"task {task}", function)
        self.context = self._find_context(signature)
        # the parameters that the worker provides, which are no part of the input
        self._provided = {*self.dependencies, *(() if self.context is None else (self.context,))}
        parameters = [
            self._require_name(parameter)
            for name, parameter in signature.parameters.items()
            if name not in self._provided
        ]
        self._signature = signature.replace(parameters=parameters)
        rest = [parameter.name for parameter in parameters if parameter.kind is _VAR_KEYWORD]
        self._extra = rest[0] if rest else None
        self._names = self._signature.parameters.keys() - set(rest)
        self._required = frozenset(p.name for p in parameters if p.default is p.empty) - set(rest)
        self._codecs: dict[str, Codec] = {}
        # parameters whose values need no conversion if they have exactly one of these types
        self._plain: dict[str, frozenset[type]] = {}
        for name in (*self._signature.parameters, "return"):
            self.codec(name, required=False)

    @property
    def names(self) -> AbstractSet[str]:
        """The names of the parameters."""
        return self._names

    def defaults(self) -> dict[str, Any]:
        """Return the defaults of parameters, as JSON; those that are no JSON are left out."""
        found = {}
        for name in self._names - self._required:
            with suppress(InputError):
                found[name] = self._convert(name, self._signature.parameters[name].default, Codec.encode)
        return found

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Bind and validate arguments and return the JSON object that is stored."""
        if not args and kwargs.keys() >= self._required:
            plain = self._plain
            for name, value in kwargs.items():
                if type(value) not in plain.get(name, ()) or not is_storable(value):
                    break
            else:
                return kwargs
        return {name: self._convert(name, value, Codec.encode) for name, value in self._bind(args, kwargs).items()}

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        for name in self._provided & kwargs.keys():
            what = "the context" if name == self.context else "a dependency"
            raise InputError(f"task {self._task}: {name!r} is {what}, which the worker provides")
        try:
            bound = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            unknown = ", ".join(sorted(kwargs.keys() - self._names))
            if self._extra is not None or not unknown or "missing" not in str(error):
                raise InputError(f"task {self._task}: {error}") from None
            # Python names the missing argument only, and a misspelt name is both
            known = sorted(self._names)
            raise InputError(f"task {self._task}: {error}; unknown argument: {unknown}; known are {known}") from None
        if self._extra in bound:
            bound.update(bound.pop(self._extra))
        return bound

    def decode(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Turn the stored JSON object into arguments by name."""
        if type(stored) is not dict:
            raise InputError(f"task {self._task}: the input {describe_bad_input(stored)}")
        if not stored and not self._required:
            return {}
        self._check_names(stored)
        plain = self._plain
        return {
            name: value if type(value) in plain.get(name, ()) else self._convert(name, value, Codec.decode)
            for name, value in stored.items()
        }

    def encode_result(self, value: Any) -> Any:
        """Return the JSON of a result."""
        try:
            return self.codec("return").encode_result(value)
        except ValueRefusedError as error:
            raise PermanentError(f"task {self._task}: the result cannot be stored: {error}") from None

    def decode_result(self, stored: Any) -> Any:
        """Turn a stored result back into the value that the function returned."""
        try:
            return self.codec("return").decode(stored)
        except ValueRefusedError as error:
            raise InputError(f"task {self._task}: the stored result does not fit the annotation: {error}") from None

    def resolve(self) -> None:
        """Resolve every annotation; DefinitionError names the parameter whose annotation cannot be used."""
        for name in (*self._signature.parameters, "return"):
            codec = self.codec(name)
            if codec.kinds or codec.is_any:
                continue
            try:
                codec.adapter()
            except Exception as error:
                raise DefinitionError(
                    f"task {self._task}: {_described(name)} has an annotation that cannot be converted to JSON: {error}"
                ) from error

    def _require_name(self, parameter: inspect.Parameter) -> inspect.Parameter:
        if parameter.kind in _BY_POSITION:
            raise DefinitionError(
                f"task {self._task}: the parameter {parameter} can be given by position only; "
                "arguments are stored by name, so make it a parameter that can be given by name"
            )
        return parameter

    def _convert(self, name: str, value: Any, convert: Callable[[Codec, Any], Any]) -> Any:
        try:
            return convert(self.codec(name if name in self._names else self._extra or name), value)
        except ValueRefusedError as error:
            raise InputError(f"task {self._task}: argument {name!r}: {error}") from None

    def _check_names(self, stored: dict[str, Any]) -> None:
        if not self._required <= stored.keys():
            missing = ", ".join(sorted(self._required - stored.keys()))
            raise InputError(f"task {self._task}: missing argument: {missing}")
        if not stored.keys().isdisjoint(self._provided) or (self._extra is None and not stored.keys() <= self._names):
            unknown = ", ".join(sorted(stored.keys() - self._names))
            raise InputError(f"task {self._task}: unknown argument: {unknown}; known are {sorted(self._names)}")

    def codec(self, name: str, *, required: bool = True) -> Codec:
        """Return the codec of a parameter; its annotation may name a type that is defined later.

        One that cannot be resolved is an error, or counts as Any if it is not required.
        """
        codec = self._codecs.get(name)
        if codec is not None:
            return codec
        try:
            codec = Codec(self._annotation(name))
        except (NameError, AttributeError, TypeError) as error:
            if not required:
                return Codec(Any)
            raise DefinitionError(
                f"task {self._task}: {_described(name)} has an annotation that cannot be resolved ({error}); "
                "import its types at run time, at the top level of the module"
            ) from None
        self._codecs[name] = codec
        if codec.kinds:
            self._plain[name] = codec.kinds
        return codec

    def _annotation(self, name: str) -> Any:
        signature = self._signature
        annotation = signature.return_annotation if name == "return" else signature.parameters[name].annotation
        return Any if annotation is inspect.Signature.empty else _resolve(annotation, self._function)

    def _find_context(self, signature: inspect.Signature) -> str | None:
        found = [
            name
            for name, parameter in signature.parameters.items()
            if _is_context(parameter.annotation, self._function)
        ]
        if len(found) > 1:
            raise DefinitionError(f"task {self._task}: only one parameter can be the TaskContext, got {found}")
        return found[0] if found else None


def describe_bad_input(stored: Any) -> str:
    """Describe why a stored input cannot be used as arguments."""
    if isinstance(stored, UnreadableJson):
        return str(stored["unreadable"])
    return "must be a JSON object of arguments by name"


def _described(name: str) -> str:
    return "the result" if name == "return" else f"the parameter {name!r}"


def _resolve(annotation: Any, function: Callable[..., Any]) -> Any:
    """Evaluate one annotation in the module of its function; the others may fail to evaluate."""
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    return typing.get_type_hints(holder, getattr(function, "__globals__", {}), include_extras=True)["it"]


def _is_context(annotation: Any, function: Callable[..., Any]) -> bool:
    try:
        resolved = _resolve(annotation, function)
    except (NameError, AttributeError, TypeError):
        # imported under TYPE_CHECKING only
        return isinstance(annotation, str) and bool(_CONTEXT_ANNOTATION.match(annotation.strip()))
    if typing.get_origin(resolved) in (typing.Union, types.UnionType):
        return any(map(_is_context_type, typing.get_args(resolved)))
    return _is_context_type(resolved)


def _is_context_type(resolved: Any) -> bool:
    return isinstance(resolved, type) and issubclass(resolved, TaskContext)
