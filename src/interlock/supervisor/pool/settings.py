"""Settings of a pool of worker processes; the defaults fit one supervisor per host."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlock.model.backoff import Backoff

if TYPE_CHECKING:
    from interlock.config import Config


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings of a pool. Times are in seconds."""

    # between two reconciliations without a notification
    poll_interval: float = 0.5
    # processes that one supervisor runs at most
    max_processes: int = 100
    # how long a row belongs to this supervisor without renewal; it is renewed three times in that time
    lease: float = 10.0
    # from SIGTERM to SIGKILL: the grace of the worker, unless its spec has another one, and the margin in which it
    # returns unfinished tasks
    grace: float = 20.0
    stop_margin: float = 10.0
    # without a heartbeat until a worker is terminated; until the first heartbeat of a new process
    heartbeat_timeout: float = 45.0
    start_timeout: float = 60.0
    # A longer time between two reconciliations means that the pool itself was away (the host slept, the database was
    # gone): missed heartbeats before that do not count.
    max_poll_gap: float = 10.0
    # after this uptime the earlier crashes of a process are forgotten
    stable_after: float = 60.0
    # quick crashes in a row before a worker that belongs to no pool fails, and the exponential backoff between restarts
    max_restarts: int = 3
    restart_backoff: float = 0.5
    max_restart_backoff: float = 30.0
    # how long a pool may be without a live worker until the supervisor is not ready
    ready_timeout: float = 30.0
    # leave the processes running when the supervisor stops; another supervisor may adopt them
    leave_running: bool = False
    # processes shut down when the supervisor dies, however it dies
    tied: bool = False

    def __post_init__(self) -> None:
        for name, value, minimum in (
            ("poll_interval", self.poll_interval, 0.01),
            ("max_processes", self.max_processes, 1),
            ("lease", self.lease, 0.1),
            ("grace", self.grace, 0),
            ("stop_margin", self.stop_margin, 0),
            ("heartbeat_timeout", self.heartbeat_timeout, 0.1),
            ("start_timeout", self.start_timeout, 0.1),
            ("max_restarts", self.max_restarts, 0),
            ("restart_backoff", self.restart_backoff, 0),
        ):
            if value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {value}")
        if self.leave_running and self.tied:
            raise ValueError("leave_running and tied exclude each other: tied processes end with their supervisor")

    @classmethod
    def from_config(cls, config: Config, *, leave_running: bool = False, tied: bool = False) -> PoolSettings:
        """Derive the settings from the configuration of workers."""
        return cls(grace=config.grace, leave_running=leave_running, tied=tied)

    def restart_delay(self, crashes: int) -> float:
        """Seconds to wait before the restart after so many crashes in a row."""
        # without jitter: the delay is written into the row and shown to people
        return Backoff.exponential(self.restart_backoff, cap=self.max_restart_backoff, jitter=0).delay(crashes)


def make_supervisor_id(name: str | None = None) -> str:
    """Make an id that is unique per process start."""
    return f"{name or socket.gethostname()}-supervisor-{os.getpid()}-{secrets.token_hex(4)}"
