"""The README, the examples and the paths in the docs match the tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.flow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_every_example_runs(example: Path, url: str) -> None:
    environment = os.environ | {"INTERLOCK_DATABASE_URL": url}
    done = subprocess.run(
        [sys.executable, example], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_readme_shows_the_example_as_it_is() -> None:
    shown = re.search(r"```python\n(.+?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    assert shown[1] in (ROOT / "examples" / "hello.py").read_text(encoding="utf-8")


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_paths_in_the_map_and_the_recipes_exist() -> None:
    source = ROOT / "src" / "interlock"
    for page in (ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"):
        for path in re.findall(r"`([\w./-]+/[\w.-]*|[\w-]+\.(?:py|sql|toml))`", page.read_text(encoding="utf-8")):
            found = [(base / path).exists() for base in (source, ROOT, ROOT / "tests")]
            assert any(found), f"{page.name} names {path}, which does not exist"
