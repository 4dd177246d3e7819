"""The workflows printed in the guides can be declared."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from guides import blocks, run_page
from interlock import Interlock
from interlock.client.template_yaml import TemplateError
from interlock.model.workflow_diagram import workflow_mermaid

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

HANDLERS = """
def validate(number: int) -> None: ...
def route() -> str: ...
def by_air() -> None: ...
def call_back() -> None: ...
"""


def test_the_python_of_the_guides_runs_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = run_page("workflows.md", monkeypatch)
    assert guide.ship.workflow is guide.wf
    assert [step["kind"] for step in guide.wf2.document["steps"]][2:4] == ["approval", "signal"]
    flow = run_page("control-flow.md", monkeypatch)
    assert workflow_mermaid(flow.payment.document) in blocks("commands.md", "mermaid"), "docs/commands.md shows it"


def test_the_python_of_the_page_about_jobs_is_valid() -> None:
    for block in blocks("jobs.md", "python"):  # each needs a database
        compile(block, "jobs.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_template_of_the_guide_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "orders.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(tmp_path)
    app = Interlock("postgresql://nowhere")

    @app.task
    def send_email(number: int) -> None: ...

    (template,) = blocks("templates.md", "yaml")
    (tmp_path / "orders.yaml").write_text(template)
    (loaded,) = app.load_templates(tmp_path)
    assert [step["name"] for step in loaded.document["steps"]][-1] == "apologize"

    (tmp_path / "orders.yaml").write_text(
        template.replace('"3"', '"4"').replace("[by_air, by_land]\n  - n", "[by_aer]\n  - n")
    )
    with pytest.raises(TemplateError) as refused:
        app.load_templates(tmp_path)
    assert f"{tmp_path}/{blocks('templates.md', 'console')[-1].strip()}" == str(refused.value)
