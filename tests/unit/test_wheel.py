"""The wheel holds every file that the package reads at run time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder

import interlock
from interlock.dashboard.render import STATIC_FILES, environment

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
PACKAGE = Path(interlock.__file__).parent


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Build the wheel as `pip install` does, and list its files."""
    directory = tmp_path_factory.mktemp("wheel")
    paths: Iterable[str] = WheelBuilder(str(ROOT)).build(directory=str(directory), versions=["standard"])
    (path,) = paths
    with ZipFile(path) as wheel:
        return set(wheel.namelist())


def test_templates_and_static_files_are_packaged(names: set[str]) -> None:
    templates = {f"interlock/dashboard/templates/{name}" for name in environment().list_templates()}
    static = {f"interlock/dashboard/static/{name}" for name in STATIC_FILES}
    assert len(templates) > 1
    assert templates | static <= names


def test_every_file_of_the_package_is_packaged(names: set[str]) -> None:
    files = {
        f"interlock/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files <= names
