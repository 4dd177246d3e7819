"""The commands and the Python code of the guide of the sort, as they are written there."""

from __future__ import annotations

import ast
import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gnu_sort import IS_GNU, gnu_sort
from guides import blocks
from sort_cli import ENVIRONMENT
from sort_cluster import output_bytes

pytestmark = pytest.mark.flow

PAGE = "sort.md"
LINES = [b"%d,name-%d,%d\n" % (number, number % 7, number * 7919 % 1000) for number in range(3_000)]


def commands(block: str) -> list[str]:
    """List the commands of a block that run on this machine alone."""
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ") and "interlock" in line]


def run(place: Path, command: str) -> bytes:
    """Run a command of the guide with a smaller input."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shell = ["/bin/bash", "-o", "pipefail", "-c", command.replace("1GB", "1MB")]
    done = subprocess.run(
        shell, cwd=place, capture_output=True, env={**ENVIRONMENT, "PATH": path}, timeout=100, check=False
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


@pytest.mark.skipif(not IS_GNU, reason="there is no GNU sort on this machine")
def test_the_commands_of_the_guide_run(tmp_path: Path) -> None:
    first, with_keys, piped = (commands(block) for block in blocks(PAGE, "console")[:3])
    assert [line.split()[1] for line in first[1:]] == ["generate", "run", "validate"]
    outputs = [run(tmp_path, command) for command in first[1:]]
    assert b"valid" in outputs[-1].splitlines()[-1]
    place = tmp_path / "lines"
    (place / "logs").mkdir(parents=True)
    (place / "logs" / "a").write_bytes(b"".join(LINES))
    (command,) = with_keys
    run(place, command)
    assert output_bytes(place / "sorted") == gnu_sort(b"".join(LINES), ["3,3nr", "1"], ",", {})
    (place / "big.gz").write_bytes(gzip.compress(b"".join(line.replace(b",", b" ") for line in LINES)))
    (command,) = piped
    expected = gnu_sort(gzip.decompress((place / "big.gz").read_bytes()), ["2,2n"], None, {"unique": True})
    assert run(place, command) == b"".join(expected.splitlines(keepends=True)[:10])


@pytest.mark.skipif(not IS_GNU, reason="there is no GNU sort on this machine")
async def test_the_python_code_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a").write_bytes(b"".join(LINES))
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(PAGE, "python")
    names: dict[str, Any] = {}
    await eval(compile(code, PAGE, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)  # noqa: S307 - our own page
    assert names["report"].records == len(LINES)
    assert output_bytes(tmp_path / "sorted") == gnu_sort(b"".join(LINES), ["1,1", "2,2n"], ",", {})
