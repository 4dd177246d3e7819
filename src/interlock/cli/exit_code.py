"""Exit code of a command, shared by the entry points `interlock` and `interlock-sort`.

Imports nothing but the standard library: the entry points import it before the command line, so that Ctrl-C during the
imports ends the command without a traceback.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = 130  # exit code that shells give a program ended by SIGINT


def run_for_exit_code(command: Callable[[], None]) -> str | int | None:
    """Run a command and return its exit code; print `interrupted` if Ctrl-C ended it."""
    try:
        command()
    except KeyboardInterrupt:
        code: str | int | None = INTERRUPTED
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    if code == INTERRUPTED:
        sys.stderr.write("interrupted\n")
    return code
