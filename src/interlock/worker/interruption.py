"""Why a handler is stopped before it is done."""

from __future__ import annotations

from enum import StrEnum


class Interruption(StrEnum):
    """Why a handler is stopped before it is done."""

    LEASE_LOST = "lease lost"
    CANCELED = "canceled"
    SHUTDOWN = "shutdown"
