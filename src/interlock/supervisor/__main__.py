"""Entry point `python -m interlock.supervisor`: a supervisor configured by INTERLOCK_* and interlock.toml."""

import sys

from interlock.config import Config
from interlock.errors import ConfigError, InterlockError
from interlock.supervisor.run import run_supervisor
from interlock.telemetry import configure_logging


def main() -> None:
    """Run a supervisor until it is asked to stop; exit with 2 for a wrong configuration, 1 for other errors."""
    try:
        config = Config.load()
        configure_logging(config.log_level, "json" if config.log_format == "json" else "console")
        run_supervisor(config)
    except InterlockError as error:
        sys.stderr.write(f"interlock: {error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
