"""The workflows printed in the guide can be declared."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from interlock import Interlock
from interlock.client.templates import TemplateError

pytestmark = pytest.mark.unit

GUIDE = (Path(__file__).parents[2] / "docs" / "workflows.md").read_text(encoding="utf-8")
HANDLERS = """
def validate(number: int) -> None: ...
def route() -> str: ...
def by_air() -> None: ...
def call_back() -> None: ...
"""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.+?)```", GUIDE, re.DOTALL)


def test_the_python_of_the_guide_runs_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = ModuleType("workflows_guide")
    monkeypatch.setitem(sys.modules, "workflows_guide", guide)  # where annotations are looked up
    runnable = [block for block in blocks("python") if "async with app" not in block]
    assert len(runnable) == len(blocks("python")) - 1 > 4
    for block in runnable:
        exec(compile(block, "workflows.md", "exec"), guide.__dict__)  # noqa: S102 - our own page
    assert guide.ship.workflow is guide.wf
    assert [step["kind"] for step in guide.wf2.document["steps"]][2:4] == ["approval", "signal"]


def test_the_template_of_the_guide_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "orders.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(tmp_path)
    app = Interlock("postgresql://nowhere")

    @app.task
    def send_email(number: int) -> None: ...

    (template,) = blocks("yaml")
    (tmp_path / "orders.yaml").write_text(template)
    (loaded,) = app.load_templates(tmp_path)
    assert [step["name"] for step in loaded.document["steps"]][-1] == "apologize"

    (tmp_path / "orders.yaml").write_text(
        template.replace('"3"', '"4"').replace("[by_air, by_land]\n  - n", "[by_aer]\n  - n")
    )
    with pytest.raises(TemplateError) as refused:
        app.load_templates(tmp_path)
    assert f"{tmp_path}/{blocks('console')[-1].strip()}" == str(refused.value)
