"""The declared dependencies: every import has one, and their bounds contain the locked versions.

`./dev test-bounds` runs a smoke test with the lowest and the highest versions that the bounds allow.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRED: dict[str, Requirement] = {
    canonicalize_name(one.name): one for one in map(Requirement, PROJECT["dependencies"])
}
EXTRAS = {
    canonicalize_name(Requirement(one).name)
    for extra in ("sort", "ray", "otel", "mcp")
    for one in PROJECT["optional-dependencies"][extra]
}
# In the environment of the user already when the module that imports it is: pytest loads its plugin.
OF_THE_CALLER = {"pytest"}
# Parts of declared dependencies, which bound their versions: an extra of psycopg, the core of pydantic, the registry
# type of jsonschema.
PARTS = {"psycopg-pool", "pydantic-core", "referencing"}


def runtime_imports(tree: ast.AST) -> Iterator[str]:
    """List the top-level names of all imports that run, which those under `if TYPE_CHECKING:` do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.partition(".")[0]
        yield from runtime_imports(node)


def test_every_import_is_a_declared_dependency() -> None:
    distributions = packages_distributions()
    declared = {*REQUIRED, *EXTRAS, *OF_THE_CALLER, *PARTS, "interlock"}
    undeclared = {}
    for path in (ROOT / "src").rglob("*.py"):
        for name in set(runtime_imports(ast.parse(path.read_text(encoding="utf-8")))) - sys.stdlib_module_names:
            if not {canonicalize_name(found) for found in distributions.get(name, [name])} & declared:
                undeclared[name] = path.name
    assert undeclared == {}


@pytest.mark.parametrize("name", REQUIRED)
def test_every_dependency_has_a_lower_and_an_upper_bound(name: str) -> None:
    operators = {specifier.operator for specifier in REQUIRED[name].specifier}
    assert operators == {">=", "<"}, REQUIRED[name]


@pytest.mark.parametrize("lock", ["run", "dev"])
def test_the_locked_versions_are_within_the_bounds(lock: str) -> None:
    text = (ROOT / "locks" / f"{lock}.txt").read_text(encoding="utf-8")
    locked: dict[str, str] = {
        canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)
    }
    for name, requirement in REQUIRED.items():
        assert requirement.specifier.contains(locked[name]), f"{requirement}, locked is {locked[name]}"
