"""Where metrics may be served.

Invariant: they have no token, so they leave this machine only when a flag on this very command says so.
"""

from __future__ import annotations

import ipaddress

from interlock.config import Config
from interlock.errors import ConfigError


def refuse_public_metrics(config: Config, flag: str | None) -> None:
    """Refuse to serve metrics to other machines, unless the flag of the command asks for it."""
    if config.metrics_port is not None and flag is None and not _is_loopback(config.metrics_host):
        raise ConfigError(
            f"metrics would be served on {config.metrics_host} to whoever can reach it, without a token; "
            "if that is meant, say so with --metrics-host"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, or empty, which means every address
