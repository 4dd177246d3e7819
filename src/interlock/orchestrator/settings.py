"""Settings of an orchestrator; the defaults suit one of several."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlock.model.backoff import Backoff
from interlock.postgres.notifier import WakeMode

if TYPE_CHECKING:
    from interlock.config import Config


MAX_TICK_S = (
    60.0  # a due time that is further away is stored without a notification (sql/functions/notify_due_time.sql)
)


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """Settings of one orchestrator. Times are in seconds."""

    mode: WakeMode = WakeMode.HYBRID
    # polling interval of the queue, and maximum interval of the maintenance, which also runs when something is due
    tick: float = 0.5
    # polling interval of the queue in events mode, while notifications arrive
    events_tick: float = 30.0
    batch: int = 100
    # visibility timeout: a message comes back after it when its orchestrator died with an open transaction
    visibility: float = 30.0
    # how long a heartbeat lasts; HEARTBEATS_PER_LEASE of them are sent in that time
    presence: float = 15.0
    # backoff while the database cannot be reached
    retry_base: float = 0.1
    retry_cap: float = 5.0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("tick", self.tick, 0.001),
            ("events_tick", self.events_tick, 0.001),
            ("batch", self.batch, 1),
            ("visibility", self.visibility, 1),
            ("presence", self.presence, 0.05),
            ("retry_base", self.retry_base, 0.001),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.tick > MAX_TICK_S:
            raise ValueError(f"tick must be at most {MAX_TICK_S:g}, got {self.tick}")

    @classmethod
    def of(cls, config: Config) -> OrchestratorSettings:
        """Take the settings of orchestrators from a configuration."""
        return cls(mode=WakeMode(config.wake_mode))

    @property
    def backoff(self) -> Backoff:
        """The backoff between tries to reach the database, half of each delay random."""
        return Backoff.exponential(self.retry_base, cap=self.retry_cap, jitter=0.5)


def name_orchestrator(name: str | None = None) -> str:
    """Make an id for this start of an orchestrator; no two starts share one."""
    return f"{name or socket.gethostname()}-orchestrator-{os.getpid()}-{secrets.token_hex(4)}"
