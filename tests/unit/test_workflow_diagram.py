"""Drawings of workflows: every step and dependency is in them, escaped, and the command finds what it draws."""

from __future__ import annotations

import asyncio
import re
import sys
from itertools import combinations
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
import typer
from typer.testing import CliRunner

from factories import step, workflow
from interlock import Interlock
from interlock.cli.diagram import diagram
from interlock.lifecycle import MACHINES
from interlock.model.graph import STEP_KINDS, check_definition
from interlock.model.workflow_diagram import MAX_SVG_STEPS, workflow_mermaid, workflow_svg
from svg_support import SVG, plain, rectangles, texts

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

pytestmark = pytest.mark.unit

EVERY_KIND = workflow(
    step("prepare"),
    step("reserve", "prepare", compensate="w/1/reserve:compensate"),
    step("route", "reserve", kind="decision", branches=["pack", "refund"]),
    step("pack", "route", kind="map", over_input="boxes", strategy=0.9),
    step("refund", "route", compensate="call_back"),
    step("invoice", "pack", kind="child", type=None, workflow="billing", workflow_version="2"),
    step("rest", "invoice", kind="sleep", type=None, seconds=60),
    step("paid", "invoice", kind="signal", type=None, signal="payment"),
    step("thank", "rest", "paid", join="any", cancel_rest=True, when="paid.amount > 100"),
    step("release", "thank", kind="approval", type=None),
    step("poll", "release", kind="child", type=None, workflow="check", repeat_until="output.ready", max_repeats=9),
    step("alert", on_failure=["invoice"]),
    step("by_hand", recovers=["invoice"]),
    step("clean", "prepare", always=["release"]),
)
GOLDEN = """\
flowchart TD
    s0["prepare"]
    s1["reserve<br/>with compensation"]
    s2{"route<br/>decision"}
    s3[/"pack<br/>for each of input.boxes<br/>strategy: 0.9"/]
    s4["refund<br/>compensation: call_back"]
    s5[["invoice<br/>child job: billing 2"]]
    s6(["rest<br/>sleep: 60 s"])
    s7>"paid<br/>signal: payment"]
    s8["thank<br/>join: 1 of 2, cancels the rest<br/>when paid.amount #62; 100"]
    s9{{"release<br/>approval"}}
    s10[["poll<br/>child job: check<br/>until output.ready, at most 9 times"]]
    s11["alert"]
    s12["by_hand"]
    s13["clean"]
    s0 --> s1
    s1 --> s2
    s2 -->|"if chosen"| s3
    s2 -->|"if chosen"| s4
    s3 --> s5
    s5 --> s6
    s5 --> s7
    s6 --> s8
    s7 --> s8
    s8 --> s9
    s9 --> s10
    s5 -.->|"on failure"| s11
    s5 -.->|"recovered by"| s12
    s0 --> s13
    s9 -.->|"always"| s13
"""
APP = """
from interlock import Interlock

app = Interlock("postgresql://nowhere")
first = app.workflow("shop", version="1")
second = app.workflow("shop", version="2")
other = app.workflow("task")


@first.step
def old() -> None: ...


@second.step
def new() -> None: ...


@other.step
def beside() -> None: ...
"""

cli = typer.Typer()
cli.command()(diagram)


def run_diagram(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An app in a module, without a database."""
    (tmp_path / "drawn_shop.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "drawn_shop", raising=False)
    monkeypatch.delenv("INTERLOCK_APP", raising=False)
    return "drawn_shop:app"


class TestMermaid:
    def test_every_kind_of_step_and_dependency(self) -> None:
        check_definition(EVERY_KIND)
        assert {each.get("kind", "plain") for each in EVERY_KIND["steps"]} == set(STEP_KINDS), "draw a new kind too"
        assert workflow_mermaid(EVERY_KIND) == GOLDEN

    def test_states_of_a_job_are_written_and_coloured(self) -> None:
        text = workflow_mermaid(workflow(step("a"), step("b", "a")), {"a": "done", "b": "running", "a[0]": "error"})
        assert '    s0["a<br/>state: done"]:::done\n' in text
        assert re.findall(r"classDef (\w+) ", text) == ["running", "done"]

    def test_texts_are_escaped_and_shortened(self) -> None:
        condition = 'input.x == "a\\"`#;<br/>" and input.y in [' + ", ".join(map(str, range(100))) + "]"
        text = workflow_mermaid(workflow(step("end", when=condition)))
        (line,) = [line for line in text.splitlines() if line.startswith("    s0")]
        shown = line.removeprefix('    s0["end<br/>when ').removesuffix('"]')
        assert not set(shown) & set("\"'<>`[]\\")
        assert re.sub(r"#(\d+);", lambda found: chr(int(found[1])), shown) == f"{condition[:54]}…"


class TestSvg:
    def test_every_step_is_written_and_no_boxes_overlap(self) -> None:
        picture = ET.fromstring(workflow_svg(EVERY_KIND))  # noqa: S314 - our own text
        written = texts(picture)
        assert {each["name"] for each in EVERY_KIND["steps"]} <= set(written)
        assert {"on failure", "always", "recovered by", "if chosen", "with compensation", "sleep: 60 s"} <= set(written)
        boxes = [*rectangles(picture, "step"), *rectangles(picture, "label")]
        assert [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])] == []
        dashed = [each for each in picture.iter(f"{SVG}path") if each.get("stroke-dasharray")]
        assert len(dashed) >= 3
        words = picture.findtext(f"{SVG}desc") or ""
        assert "invoice to alert on failure" in words
        assert "prepare to reserve;" in words

    def test_texts_are_escaped(self) -> None:
        written = texts(ET.fromstring(workflow_svg(workflow(step("a", when="input.x < 3 and input.y == '&'")))))  # noqa: S314 - our own text
        assert "when input.x < 3 and input.y == '&'" in written

    def test_a_workflow_that_is_too_large_is_refused(self) -> None:
        steps: list[dict[str, Any]] = [step(f"s{number}") for number in range(MAX_SVG_STEPS + 1)]
        with pytest.raises(ValueError, match="mermaid"):
            workflow_svg(workflow(*steps))


class TestCommand:
    def test_the_newest_version_of_an_app_is_drawn_or_the_one_that_is_named(self, shop: str) -> None:
        assert run_diagram("shop", "--app", shop).stdout == '%% shop, version 2\nflowchart TD\n    s0["new"]\n'
        assert '"old"' in run_diagram("shop", "--app", shop, "--version", "1").stdout

    def test_the_app_of_the_settings_is_used(self, shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("INTERLOCK_APP", shop)
        assert '"new"' in run_diagram("shop").stdout

    def test_a_lifecycle_comes_before_a_workflow_of_its_name_unless_the_app_is_named(
        self, shop: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("INTERLOCK_APP", shop)
        assert "stateDiagram-v2" in run_diagram("task").stdout
        assert '"beside"' in run_diagram("task", "--app", shop).stdout

    def test_all_workflows_of_an_app(self, shop: str, tmp_path: Path) -> None:
        text = run_diagram("--app", shop).stdout
        assert re.findall(r"^%% (\w+), version", text, re.MULTILINE) == ["shop", "task"]
        assert run_diagram("--app", shop, "-f", "svg", "-o", str(tmp_path / "pictures")).exit_code == 0
        (first, second) = sorted(path.name for path in (tmp_path / "pictures").iterdir())
        assert first == "shop-2.svg"
        assert second.startswith("task-")

    def test_an_unknown_name_is_refused_with_what_there_is(self, shop: str) -> None:
        result = run_diagram("shopp", "--app", shop)
        words = re.sub(r"[│\s]+", " ", plain(result.stderr))
        assert result.exit_code == 2
        assert "there is no workflow 'shopp'" in words
        assert "shop 1, shop 2, task" in words
        assert all(name in words for name in MACHINES)
        assert "version '3'" in re.sub(
            r"[│\s]+", " ", plain(run_diagram("shop", "--app", shop, "--version", "3").stderr)
        )

    @pytest.mark.flow
    def test_a_stored_workflow_and_a_job(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("INTERLOCK_DATABASE_URL", url)
        app = Interlock(url)
        pair = app.workflow("pair", version="1")

        @pair.step
        def one() -> None: ...

        pair.approval("two", after=[one])

        async def submit() -> str:
            async with app:
                return str((await app.submit("pair")).id)

        job = asyncio.run(submit())
        assert run_diagram("pair", "--stored").stdout == f"%% pair, version 1\n{workflow_mermaid(pair.document)}"
        drawn = run_diagram(job).stdout
        assert drawn.startswith(f"%% job {job} (")
        assert '(["' not in drawn
        assert re.search(r's1\{\{"two<br/>approval<br/>state: waiting"\}\}:::waiting', drawn)
        unknown = run_diagram("nothing", "--stored")
        assert unknown.exit_code == 2
        assert "pair 1" in re.sub(r"[│\s]+", " ", plain(unknown.stderr))
