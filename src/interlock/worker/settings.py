"""WorkerSettings: how a worker process claims, runs, wakes and shuts down; and the name of a process start."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from interlock.errors import ConfigError
from interlock.model.graph import suggestion
from interlock.model.options import check_name
from interlock.postgres.notifier import WakeMode
from interlock.store.tasks import DEFAULT_MAX_RESULT_BYTES, MAX_JSON_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.config import Config

MAX_SHUTDOWN_S = 30.0
_WHOLE_NUMBER: tuple[tuple[type, ...], str] = (int,), "a whole number"
_SECONDS: tuple[tuple[type, ...], str] = (int, float), "a number of seconds"
_FLAG: tuple[tuple[type, ...], str] = (bool,), "True or False"
_TYPES = {
    "concurrency": _WHOLE_NUMBER,
    "lease": _SECONDS,
    "grace": _SECONDS,
    "shutdown_limit": _SECONDS,
    "cancel_grace": _SECONDS,
    "poll_base": _SECONDS,
    "poll_cap": _SECONDS,
    "events_poll": _SECONDS,
    "recovery_interval": _SECONDS,
    "largest_result": _WHOLE_NUMBER,
    "processes": _WHOLE_NUMBER,
    "duties": _FLAG,
    "gauges": _FLAG,
}


class WorkerOptions(TypedDict, total=False):
    """The options of `serving(app, ...)`: those of WorkerSettings that do not belong to a supervisor."""

    namespaces: Sequence[str]
    concurrency: int
    lease: float
    grace: float
    shutdown_limit: float
    cancel_grace: float
    mode: WakeMode | str
    poll_base: float
    poll_cap: float
    events_poll: float
    recovery_interval: float
    largest_result: int
    processes: int
    app_reference: str | None
    duties: bool
    gauges: bool


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The options of a worker. Times are in seconds."""

    namespaces: tuple[str, ...] = ("default",)
    concurrency: int = 1
    lease: float = 30.0
    # how long running tasks may go on after a shutdown request
    grace: float = 20.0
    # by when the process has stopped after a shutdown request, the grace included
    shutdown_limit: float = MAX_SHUTDOWN_S
    # from a cooperative cancellation request until the handler is stopped
    cancel_grace: float = 5.0
    mode: WakeMode = WakeMode.HYBRID
    # polling interval while the queue is empty: from the first to the second, growing with every empty poll
    poll_base: float = 0.1
    poll_cap: float = 0.5
    # polling interval in events mode, while notifications arrive
    events_poll: float = 30.0
    recovery_interval: float = 5.0
    # bytes of JSON
    largest_result: int = DEFAULT_MAX_RESULT_BYTES
    processes: int = os.cpu_count() or 1
    app_reference: str | None = None
    # take part in the election of the leader, which does maintenance for all workers
    duties: bool = True
    # measure the queue for the metrics endpoint
    gauges: bool = False
    # the supervised row that this process works for, and its generation; None registers a row of its own
    row: str | None = None
    generation: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        for name, value, minimum in (
            ("concurrency", self.concurrency, 1),
            ("lease", self.lease, 0.05),
            ("grace", self.grace, 0),
            ("shutdown_limit", self.shutdown_limit, 0.1),
            ("poll_base", self.poll_base, 0.001),
            ("poll_cap", self.poll_cap, 0.001),
            ("events_poll", self.events_poll, 0.001),
        ):
            if value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {value}")
        if not 0 < self.largest_result <= MAX_JSON_BYTES:
            raise ValueError(f"largest_result must be from 1 to {MAX_JSON_BYTES} bytes, got {self.largest_result}")
        if self.shutdown_limit > MAX_SHUTDOWN_S:
            raise ValueError(f"shutdown_limit must be at most {MAX_SHUTDOWN_S:g}, got {self.shutdown_limit}")
        if not self.namespaces:
            raise ValueError("namespaces must have at least one name, got none")

    def _check_types(self) -> None:
        for name, (kinds, described) in _TYPES.items():
            value = getattr(self, name)
            if type(value) not in kinds:  # not isinstance: True is no number
                raise ValueError(f"{name} must be {described}, got {value!r}")
        if not all(isinstance(namespace, str) for namespace in self.namespaces):
            raise ValueError(f"namespaces must be a list of names, got {list(self.namespaces)!r}")
        for namespace in self.namespaces:
            check_name("each of the namespaces", namespace)

    @classmethod
    def of(cls, config: Config) -> WorkerSettings:
        """Take the settings from a configuration."""
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

    def with_options(self, **options: Unpack[WorkerOptions]) -> WorkerSettings:
        """Replace some settings; ConfigError names an unknown or an invalid one."""
        given: dict[str, Any] = {**options}
        known = WorkerOptions.__annotations__
        for name in given.keys() - known:
            raise ConfigError(f"unknown worker setting {name!r}{suggestion(name, known)}; known: {', '.join(known)}")
        if isinstance(given.get("namespaces"), str):
            raise ConfigError(f"namespaces must be a list of names, got {given['namespaces']!r}")
        try:
            if "namespaces" in given:
                given["namespaces"] = tuple(given["namespaces"])
            if "mode" in given:
                given["mode"] = WakeMode(given["mode"])
            return replace(self, **given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"worker settings: {error}") from None

    @property
    def lease_time(self) -> timedelta:
        """The lease as a timedelta, for SQL parameters."""
        return timedelta(seconds=self.lease)


def get_instance_name(name: str | None = None) -> str:
    """Return a name unique to this process start: a restarted process must never inherit the leases of the last one."""
    return f"{name or socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
