"""One name, one idea: no public class name is defined in two modules."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import interlock

pytestmark = pytest.mark.unit

SOURCES = Path(interlock.__file__).parent
SHARED_NAMES: dict[str, str] = {}  # a name that two modules may define, and the reason


def test_a_public_class_name_is_defined_once() -> None:
    """Readers and searches find one class by its name."""
    modules = defaultdict(list)
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(str(path.relative_to(SOURCES)))
    shared = {name: found for name, found in modules.items() if len(found) > 1}
    assert shared.keys() == SHARED_NAMES.keys(), shared
