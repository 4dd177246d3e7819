"""The test kit: run a task inline, drain a queue in the test process, dry-run a workflow, control the clock.

Invariant: arguments and results are converted to JSON and back as in production, and a drained task goes through the
same statements as in a worker.
"""

from __future__ import annotations

from interlock.testing.drain import Ran, drain
from interlock.testing.inline import Clock, Recorder, make_context, run_inline, run_with
from interlock.workflow.dry_run import Ended, Failed, Verdict, dry_run

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
