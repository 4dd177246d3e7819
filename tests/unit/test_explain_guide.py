"""docs/explain.md lists exactly the facts that the code can state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import interlock
from interlock.client.explain import FactCode

pytestmark = pytest.mark.unit

SOURCE = Path(interlock.__file__).parent / "client" / "explain"
PAGE = Path(__file__).parents[2] / "docs" / "explain.md"


def test_the_guide_has_a_row_for_each_fact() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(FactCode)


def test_every_fact_is_stated_somewhere() -> None:
    modules = [path for path in SOURCE.glob("*.py") if path.name != "explanation.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in modules)
    text += (SOURCE / "explanation.py").read_text(encoding="utf-8").partition("class Evidence")[2]
    assert [code for code in FactCode if f"FactCode.{code.name}" not in text] == []


def test_the_commands_in_the_guide_exist() -> None:
    named = set(re.findall(r"`interlock ([a-z]+(?: [a-z]+)?)", PAGE.read_text(encoding="utf-8")))
    from interlock.cli.main import COMMANDS, GROUPS  # noqa: PLC0415 - only here

    assert {name.split()[0] for name in named} <= {*COMMANDS, *GROUPS}
