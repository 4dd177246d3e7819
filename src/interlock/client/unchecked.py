"""A task of which nothing is known here but its name: what is asked for is checked, its arguments are not.

Invariant: what comes of it can be stored; whether it can be run is known to the worker alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.client.options import checked, text
from interlock.client.values import ValueRefusedError, check_json
from interlock.errors import InputError
from interlock.store.tasks import NewTask

if TYPE_CHECKING:
    from collections.abc import Mapping


def unchecked_task(
    type_: str, given: dict[str, Any], options: Mapping[str, Any], callback_url: str | None = None
) -> NewTask:
    """Make a task by its name, with the options of `task.options(...)`; `callback_url` is for one that names none."""
    try:
        text("the name of a task", type_)
    except ValueError as error:
        raise InputError(str(error)) from None
    try:
        check_json(given)
        stored = {"callback_url": callback_url, **checked(options)}
    except (ValueRefusedError, ValueError) as error:
        raise InputError(f"task {type_}: {error}") from None
    stored["timeout_seconds"] = stored.pop("timeout", None)
    return NewTask(type_, given, **stored)
