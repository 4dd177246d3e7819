"""What several test files share and pytest cannot hand over as a fixture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psycopg

if TYPE_CHECKING:
    import signal
    import subprocess
    from collections.abc import Callable

T = TypeVar("T")


def run_sql(url: str, statement: str) -> None:
    """Run one statement as any client would."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


def eventually(look: Callable[[], T], within: float = 60) -> T:
    """Look again and again at what another process does, until it is true."""
    deadline = time.monotonic() + within
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {within} s"
        time.sleep(0.01)
    return seen


def is_taken(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Tell whether a process has taken the signal that it was sent; until then another of its kind would be lost."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return not any(mask >> (number - 1) & 1 for mask in pending)
