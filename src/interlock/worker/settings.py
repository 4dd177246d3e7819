"""TODO docstring."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from interlock.postgres.notifier import WakeMode
from interlock.store.tasks import DEFAULT_MAX_RESULT_BYTES, MAX_JSON_BYTES

if TYPE_CHECKING:
    from interlock.config import Config

LONGEST_SHUTDOWN = 30.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What can be chosen about a worker. Times are in seconds."""

    namespaces: tuple[str, ...] = ("default",)
    concurrency: int = 1
    lease: float = 30.0
    # how long running tasks may go on after a shutdown was asked for
    grace: float = 20.0
    # how long after that, at most, the worker has stopped, the grace included
    shutdown_limit: float = LONGEST_SHUTDOWN
    # after a cooperative cancellation was asked for, until the handler is stopped
    cancel_grace: float = 5.0
    mode: WakeMode = WakeMode.HYBRID
    poll_base: float = 0.1
    poll_cap: float = 5.0
    recovery_interval: float = 5.0
    # bytes of JSON
    largest_result: int = DEFAULT_MAX_RESULT_BYTES
    processes: int = os.cpu_count() or 1
    app_reference: str | None = None
    duties: bool = True
    # keep the gauges of the queue, for whoever reads the metrics
    gauges: bool = False
    # the supervised row that it works for, and which of that row's processes it is; None makes a row of its own
    row: str | None = None
    generation: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("concurrency", self.concurrency, 1),
            ("lease", self.lease, 0.05),
            ("grace", self.grace, 0),
            ("shutdown_limit", self.shutdown_limit, 0.1),
            ("poll_base", self.poll_base, 0.001),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not 0 < self.largest_result <= MAX_JSON_BYTES:
            raise ValueError(f"largest_result must be from 1 to {MAX_JSON_BYTES} bytes, not {self.largest_result}")
        if self.shutdown_limit > LONGEST_SHUTDOWN:
            raise ValueError(f"shutdown_limit must be at most {LONGEST_SHUTDOWN:g}, not {self.shutdown_limit}")
        if not self.namespaces:
            raise ValueError("a worker needs at least one namespace")

    @classmethod
    def of(cls, config: Config) -> WorkerSettings:
        """Take what a configuration says about workers."""
        return cls(
            namespaces=config.namespaces,
            concurrency=config.concurrency,
            lease=config.lease,
            grace=config.grace,
            largest_result=config.largest_result,
            mode=WakeMode(config.wake_mode),
            app_reference=config.app,
            gauges=config.metrics_port is not None,
        )

    @property
    def lease_time(self) -> timedelta:
        """The lease as SQL takes it."""
        return timedelta(seconds=self.lease)


def get_instance_name(name: str | None = None) -> str:
    """Name this process start: a restarted process must never inherit the leases of the one before."""
    return f"{name or socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
