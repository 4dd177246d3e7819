"""Runs the code of the documentation in tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, kind: str) -> list[str]:
    """List the code blocks of one kind on a page."""
    return re.findall(rf"```{kind}\n(.+?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def run_page(page: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Run the Python blocks of a page one after the other, as one module."""
    module = ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)  # where annotations are looked up
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), module.__dict__)  # noqa: S102 - our own page
    return module
