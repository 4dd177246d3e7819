"""Short programs import no slow library that they do not need: modules are counted, not seconds."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

from interlock.cli.main import COMMANDS, GROUPS, SUMMARIES

pytestmark = [pytest.mark.unit, pytest.mark.cold]

SLOW = ("structlog", "rich", "pydantic", "fastapi", "starlette", "uvicorn", "httpx", "jsonschema", "yaml", "psutil")
SLOW_FOR_HELP = (
    "psycopg",
    "structlog",
    "pydantic",
    "fastapi",
    "starlette",
    "httpx",
    "jsonschema",
    "yaml",
    "prometheus_client",
)


def imported(program: str, *arguments: str) -> set[str]:
    """Run a program in a new interpreter and return the names of its modules."""
    code = f"{program}\nimport sys\nprint('modules:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("modules:")[2].split())


def test_an_app_imports_no_library_for_logs_http_or_schemas() -> None:
    modules = imported("from interlock import Interlock")
    assert "psycopg" in modules
    assert modules & set(SLOW) == set()


def test_the_help_imports_no_module_of_a_command() -> None:
    modules = imported("from interlock.cli.main import run\ntry:\n    run()\nexcept SystemExit: pass", "--help")
    assert "typer" in modules
    assert modules & set(SLOW_FOR_HELP) == set()


def test_the_summaries_are_those_of_the_commands() -> None:
    texts = {name: inspect.getdoc(getattr(import_module(f"interlock.cli.{COMMANDS[name]}"), name)) for name in COMMANDS}
    texts |= {name: import_module(f"interlock.cli.{GROUPS[name]}").app.info.help for name in GROUPS}
    assert {name: " ".join(str(text).partition("\n\n")[0].split()) for name, text in texts.items()} == SUMMARIES
    assert list(SUMMARIES) == [*COMMANDS, *GROUPS]
