"""The test kit: run a task inline, drain a queue in the test's own process, try a workflow dry, control the clock.

Invariant: arguments and results take the same way through JSON as in production, and a drained task goes through the
same statements as one that a worker runs.
"""

from __future__ import annotations

from interlock.client.interpreter import Ended, Failed, Verdict, dry_run
from interlock.testing.clock import Clock
from interlock.testing.drain import Ran, drain
from interlock.testing.inline import Recorder, make_context, run_inline, run_with

__all__ = [
    "Clock",
    "Ended",
    "Failed",
    "Ran",
    "Recorder",
    "Verdict",
    "drain",
    "dry_run",
    "make_context",
    "run_inline",
    "run_with",
]
