"""Finds the app that a command line names: `package.module:app`.

Invariant: what goes wrong is told in the words of the person who typed the name; an error inside the module itself is
shown as it is.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.client.app import Interlock
from interlock.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType


def load_app(reference: str) -> Interlock:
    """Import the module and give its app; the part after the colon is `app` unless told otherwise."""
    module_name, _, path = reference.partition(":")
    module = _imported(module_name, reference)
    found: object = module
    for part in (path or "app").split("."):
        found = getattr(found, part, None)
    if isinstance(found, Interlock):
        return found
    there = [name for name, value in vars(module).items() if isinstance(value, Interlock)]
    hint = f"there is {module_name}:{there[0]}" if there else "there is none in it"
    if found is None:
        raise ConfigError(f"the module {module_name} has no {path or 'app'!r}; {hint}")
    raise ConfigError(f"{reference} is a {type(found).__name__}, not an Interlock app; {hint}")


def _imported(name: str, reference: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{reference!r} does not name an app; right would be e.g. package.module:app")
    here = str(Path.cwd())
    if not {here, ""} & set(sys.path):
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise ConfigError(f"there is no module {error.name!r} to import {reference!r} from, seen from {here}") from None
