"""The README, the examples and the paths in the docs match the tree."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from interlock.model.graph import HEADER_FIELDS, STEP_FIELDS

pytestmark = pytest.mark.flow

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "interlock"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_every_example_runs(example: Path, url: str) -> None:
    environment = os.environ | {"INTERLOCK_DATABASE_URL": url}
    done = subprocess.run(
        [sys.executable, example], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_readme_shows_the_whole_example_which_runs_as_printed() -> None:
    shown = re.search(r"```python\n(.+?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    assert shown[1] == (ROOT / "examples" / "hello.py").read_text(encoding="utf-8")


def test_the_guide_to_limits_shows_its_example_as_it_is() -> None:
    text = (ROOT / "examples" / "limits.py").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.+?)```", (ROOT / "docs" / "limits.md").read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks[:3]:
        assert block in text


def headings(page: Path) -> set[str]:
    """List the anchors of a page as GitHub makes them: lower case, without punctuation, with hyphens for spaces."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_links_between_documents_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            linked = (page.parent / target) if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in headings(linked), f"{page.name} links to {target}#{anchor}"


def test_paths_in_the_map_and_the_recipes_exist() -> None:
    for page in (ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"):
        for path in re.findall(r"`([\w./-]+/[\w.-]*|[\w-]+\.(?:py|sql|toml))`", page.read_text(encoding="utf-8")):
            found = [(base / path).exists() for base in (SOURCE, ROOT, ROOT / "tests")]
            assert any(found), f"{page.name} names {path}, which does not exist"


def test_names_after_a_path_are_defined_in_that_file() -> None:
    """`worker/outcome.py` (`retry_delay`) names a definition of the file, or a statement of an SQL file."""
    checked = 0
    for page in (ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"):
        for path, text in re.findall(r"`([\w./-]+\.(?:py|sql))` \(([^)]*)\)", page.read_text(encoding="utf-8")):
            (file, *_) = [file for file in (SOURCE / path, ROOT / path, ROOT / "tests" / path) if file.exists()]
            source = file.read_text(encoding="utf-8")
            for name in re.findall(r"`([A-Za-z_][\w.]*)`", text):
                if name.endswith((".py", ".sql")):
                    continue
                for part in name.split("."):
                    pattern = rf"(?:def|class|-- name:|function interlock\.) ?{part}\b|^{part}\b.* = "
                    assert re.search(pattern, source, re.MULTILINE), f"{page.name}: {path} does not define {part}"
                    checked += 1
    assert checked > 5, "the pattern still finds them"


def test_the_reference_names_every_field_of_a_definition() -> None:
    page = (ROOT / "docs" / "workflow-semantics.md").read_text(encoding="utf-8")
    fields = {*HEADER_FIELDS, *(field for fields in STEP_FIELDS.values() for field in fields)}
    assert {field for field in fields if f"`{field}`" not in page} == set()


def test_documents_have_no_placeholders_of_recipes() -> None:
    for page in PAGES:
        assert "RECIPE_" not in page.read_text(encoding="utf-8"), page.name


def test_imports_in_code_blocks_resolve() -> None:
    pattern = re.compile(r"^ *from (interlock[\w.]*) import (?:\(([^)]*)\)|([^\n(#]+))", re.MULTILINE)
    found = [match for page in PAGES for match in pattern.findall(page.read_text(encoding="utf-8"))]
    assert len(found) > 5, "the pattern still finds them"
    for module, in_parentheses, plain in found:
        names = [part.split(" as ")[0].strip() for part in (in_parentheses or plain).split(",") if part.strip()]
        missing = [name for name in names if not hasattr(importlib.import_module(module), name)]
        assert not missing, f"{module} has no {', '.join(missing)}"
