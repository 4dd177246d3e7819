"""Attempts that lost their task, each counted once, whoever finds out.

Invariant: the keeper of the leases, in its thread, and whoever reports an outcome may find out at the same time; one of
them counts.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from interlock.telemetry import leases_lost_total, log

if TYPE_CHECKING:
    from interlock.worker.attempt import TaskStateMachine

ANOTHER_HAS_IT = "another has it"

_finding_out = threading.Lock()


def count_lost(attempt: TaskStateMachine, why: str = ANOTHER_HAS_IT) -> None:
    """Count and log that an attempt does not hold its task any more, unless that is known."""
    with _finding_out:
        if attempt.is_lost:
            return
        attempt.is_lost = True
    leases_lost_total.inc()
    log.warning("lease_lost", task_id=attempt.task_id, attempt=attempt.key[1], reason=why)
