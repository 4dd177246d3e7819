"""Where metrics may be served.

Invariant: they have no token, so they leave this machine only when a flag on this very command says so.
"""

from __future__ import annotations

from interlock.config import Config, is_loopback
from interlock.errors import ConfigError


def refuse_public_metrics(config: Config, flag: str | None) -> None:
    """Refuse to serve metrics to other machines, unless the flag of the command asks for it."""
    if config.metrics_port is not None and flag is None and not is_loopback(config.metrics_host):
        raise ConfigError(
            f"metrics would be served on {config.metrics_host} to whoever can reach it, without a token; "
            "if that is meant, say so with --metrics-host"
        )
