"""TODO docstring."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlock.postgres.notifier import WakeMode

if TYPE_CHECKING:
    from interlock.config import Config


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """What can be chosen about an orchestrator. Times are in seconds."""

    mode: WakeMode = WakeMode.HYBRID
    # between two looks at the queue that nobody asked for, and at what only time brings about
    tick: float = 0.5
    # the same in events mode, while the listener hears its own probes
    events_tick: float = 30.0
    batch: int = 100
    # after which a message that an orchestrator took comes back, should that one have died with its transaction open
    visibility: float = 30.0
    probe_interval: float = 10.0
    # how long a heartbeat lasts; there are three in that time
    presence: float = 15.0
    # between two tries to reach a database that is away
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
                raise ValueError(f"{name} must be at least {least}, not {value}")

    @classmethod
    def of(cls, config: Config) -> OrchestratorSettings:
        """Take what a configuration says about orchestrators."""
        return cls(mode=WakeMode(config.wake_mode))


def name_orchestrator(name: str | None = None) -> str:
    """Name this process start, so that no two are ever taken for one."""
    return f"{name or socket.gethostname()}-orchestrator-{os.getpid()}-{secrets.token_hex(4)}"
