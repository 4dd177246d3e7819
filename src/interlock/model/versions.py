"""Versions of workflow definitions: the version that is derived from a document, and the differences of two documents.

Invariant: a derived version depends only on what the document says: not on the order of its keys, on the process or on
the release of Python.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VERSION_LENGTH = 10  # hexadecimal digits of a derived version
MAX_DIFFERENCES = 5  # that a message lists
MAX_VALUE_LENGTH = 80  # characters of a value in a message


def derive_version(document: Mapping[str, Any]) -> str:
    """Return the version of a definition whose author names none: a hash of the document without its version."""
    content = _canonical({key: value for key, value in document.items() if key != "version"})
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()[:VERSION_LENGTH]


def _canonical(value: Any) -> Any:
    """Leave out fields that are null: they mean the same as fields that are not there."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items() if item is not None}
    return [_canonical(item) for item in value] if isinstance(value, list | tuple) else value


def describe_differences(stored: Mapping[str, Any], declared: Mapping[str, Any]) -> str:
    """Describe what a declared definition changes in the stored one: steps and fields, with old and new values."""
    found = list(_differences(stored, declared))
    more = [f"and {len(found) - MAX_DIFFERENCES} more"] if len(found) > MAX_DIFFERENCES else []
    return "; ".join([*found[:MAX_DIFFERENCES], *more])


def _differences(stored: Mapping[str, Any], declared: Mapping[str, Any]) -> Iterator[str]:
    yield from _field_differences("", {**stored, "steps": None}, {**declared, "steps": None})
    old, new = ({step["name"]: step for step in document["steps"]} for document in (stored, declared))
    yield from (f"step {name!r} was removed" for name in old if name not in new)
    for name, step in new.items():
        if name in old:
            yield from _field_differences(f"step {name!r}: ", old[name], step)
        else:
            yield f"step {name!r} was added"
    if old.keys() == new.keys() and list(old) != list(new):
        yield f"the order of the steps: {', '.join(old)} -> {', '.join(new)}"


def _field_differences(place: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for field in {**old, **new}:
        before, after = old.get(field), new.get(field)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _field_differences(f"{place}{field}.", before, after)
        else:
            yield f"{place}{field}: {_shown(before)} -> {_shown(after)}"


def _shown(value: Any) -> str:
    text = "none" if value is None else orjson.dumps(value).decode()
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"
