"""Pictures and page of the lifecycles: all of the table is in them, readable, and the command says what is wrong."""

from __future__ import annotations

import re
from enum import StrEnum
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import typer
from typer.testing import CliRunner

from interlock.cli.diagram import ENFORCED, diagram
from interlock.lifecycle import MACHINES
from interlock.machine import Machine
from interlock.machine.diagram import document, mermaid, svg
from svg_support import SVG, Rectangle, plain, rectangles, texts

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]

every_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())

app = typer.Typer()
app.command()(diagram)
runner = CliRunner()


def drawn(machine: Machine[Any, Any]) -> ET.Element:
    return ET.fromstring(svg(machine))  # noqa: S314 - our own text


class TestMermaid:
    @every_machine
    def test_every_move_is_drawn_and_no_other(self, machine: Machine[Any, Any]) -> None:
        lines = mermaid(machine).splitlines()
        assert lines[0] == "stateDiagram-v2"
        moves = [found.groups() for found in map(re.compile(r" +(\w+) --> (\w+) : (.+)").fullmatch, lines) if found]
        drawn_moves = [(source, event, target) for source, target, label in moves for event in label.split(" / ")]
        assert sorted(drawn_moves) == sorted((str(a), str(event), str(b)) for a, event, b in machine.rows)

    @every_machine
    def test_beginnings_and_ends_are_marked(self, machine: Machine[Any, Any]) -> None:
        text = mermaid(machine)
        assert set(re.findall(r"\[\*\] --> (\w+)", text)) == machine.initial
        assert set(re.findall(r"(\w+) --> \[\*\]", text)) == machine.final

    def test_events_between_the_same_states_share_an_arrow(self) -> None:
        text = mermaid(MACHINES["task"])
        assert "    running --> pending : retry / expire / return\n" in text
        assert text.count("running --> pending") == 1


class TestSvg:
    @every_machine
    def test_every_state_and_event_is_written(self, machine: Machine[Any, Any]) -> None:
        written = texts(drawn(machine))
        assert {*machine.states, *machine.events} <= set(written)
        assert len([text for text in written if text in set(machine.states)]) == len(machine.states)

    @every_machine
    def test_boxes_and_labels_do_not_overlap_and_are_inside_the_picture(self, machine: Machine[Any, Any]) -> None:
        picture = drawn(machine)
        left, top, width, height = map(float, picture.get("viewBox", "").split())
        boxes, labels = rectangles(picture, "state"), rectangles(picture, "label")
        assert len(boxes) == len(machine.states)
        assert [pair for pair in combinations([*boxes, *labels], 2) if pair[0].overlaps(pair[1])] == []
        canvas = Rectangle(left, top, left + width, top + height)
        assert all(canvas.holds(rectangle) for rectangle in [*boxes, *labels])

    @every_machine
    def test_a_diagram_has_a_text_alternative(self, machine: Machine[Any, Any]) -> None:
        picture = drawn(machine)
        assert picture.get("role") == "img"
        ids = [element.get("id") for element in picture.iter() if element.get("id")]
        assert picture.get("aria-labelledby", "").split() == ids
        assert picture.findtext(f"{SVG}title") == f"Lifecycle: {machine.name}"
        words = picture.findtext(f"{SVG}desc") or ""
        assert all(f"{source} to {target} on " in words for source, _, target in machine.rows)

    @every_machine
    def test_it_is_the_same_every_time(self, machine: Machine[Any, Any]) -> None:
        assert svg(machine) == svg(machine)

    def test_names_are_escaped(self) -> None:
        class Odd(StrEnum):
            A = "a<b"
            B = 'b&"c'

        class Go(StrEnum):
            GO = "<go>"

        machine = Machine("x & <y>", Odd, Go, ((Odd.A, Go.GO, Odd.B),), initial=[Odd.A], final=[Odd.B])
        assert {"x & <y>", "a<b", 'b&"c', "<go>"} <= set(texts(drawn(machine)))


class TestPage:
    def test_the_committed_page_is_what_the_tables_give(self) -> None:
        page = (ROOT / "docs" / "lifecycles.md").read_text(encoding="utf-8")
        assert page == document(MACHINES, ENFORCED), "run: interlock diagram --docs docs/lifecycles.md"

    def test_it_says_that_it_is_generated_and_how(self) -> None:
        assert "interlock diagram --docs docs/lifecycles.md" in document(MACHINES, ENFORCED).splitlines()[0]

    @every_machine
    def test_every_move_is_listed(self, machine: Machine[Any, Any]) -> None:
        page = document({"x": machine}, {"x": "nowhere"})
        assert all(f"| `{source}` | `{event}` | `{target}` |" in page for source, event, target in machine.rows)

    def test_it_says_of_each_lifecycle_where_it_is_enforced(self) -> None:
        assert set(ENFORCED) == set(MACHINES)
        assert "- Enforced in the database, by the guard of table `tasks`." in document(MACHINES, ENFORCED)

    def test_it_says_which_states_never_follow(self) -> None:
        page = document({"job": MACHINES["job"]}, {"job": "here"})
        assert "| `SUBMITTED` | `RUNNING`, `COMPLETED` |" in page
        assert "| `COMPLETED` | anything |" in page


class TestCommand:
    def test_without_a_name_it_prints_all_lifecycles_each_under_its_name(self) -> None:
        result = runner.invoke(app, [])
        assert result.exit_code == 0
        assert re.findall(r"^%% (.+)$", result.stdout, re.MULTILINE) == list(MACHINES)
        assert all(mermaid(machine) in result.stdout for machine in MACHINES.values())

    @pytest.mark.parametrize("name", MACHINES)
    def test_one_lifecycle_is_printed_by_name(self, name: str) -> None:
        assert runner.invoke(app, [name]).stdout == f"%% {name}\n{mermaid(MACHINES[name])}"
        assert runner.invoke(app, [name, "--format", "svg"]).stdout == svg(MACHINES[name])

    def test_an_unknown_name_is_refused_with_the_names_there_are(self) -> None:
        result = runner.invoke(app, ["tusk"])
        assert result.exit_code == 2
        assert "tusk" in plain(result.stderr)
        assert all(name in plain(result.stderr) for name in MACHINES)
        assert "Traceback" not in result.output

    def test_one_picture_cannot_show_all_and_the_refusal_says_what_to_do(self) -> None:
        result = runner.invoke(app, ["--format", "svg"])
        assert result.exit_code == 2
        assert "--output" in plain(result.stderr)
        assert all(name in plain(result.stderr) for name in MACHINES)
        assert result.stdout == ""

    def test_all_pictures_are_written_into_a_directory(self, tmp_path: Path) -> None:
        assert runner.invoke(app, ["--format", "svg", "--output", str(tmp_path / "pictures")]).exit_code == 0
        assert {path.name for path in (tmp_path / "pictures").iterdir()} == {f"{name}.svg" for name in MACHINES}

    def test_one_picture_is_written_into_an_existing_directory_under_its_name(self, tmp_path: Path) -> None:
        assert runner.invoke(app, ["job", "--format", "svg", "--output", str(tmp_path)]).exit_code == 0
        assert (tmp_path / "job.svg").read_text(encoding="utf-8") == svg(MACHINES["job"])

    def test_output_goes_to_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "job.mmd"
        result = runner.invoke(app, ["job", "--output", str(path)])
        assert (result.exit_code, result.stdout) == (0, "")
        assert path.read_text(encoding="utf-8") == f"%% job\n{mermaid(MACHINES['job'])}"

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        result = runner.invoke(app, ["job", "--output", str(tmp_path)])
        assert result.exit_code == 2
        assert "cannot write" in plain(result.stderr)
        assert "Traceback" not in result.output

    def test_the_page_is_written_where_asked(self, tmp_path: Path) -> None:
        path = tmp_path / "lifecycles.md"
        assert runner.invoke(app, ["--docs", str(path)]).exit_code == 0
        assert path.read_text(encoding="utf-8") == document(MACHINES, ENFORCED)
