"""`python -m interlock.orchestrator`: run an orchestrator, configured by the environment and interlock.toml."""

import sys

from interlock.config import Config
from interlock.errors import InterlockError
from interlock.orchestrator.run import run_orchestrator
from interlock.telemetry import configure_logging

if __name__ == "__main__":
    try:
        config = Config.load()
        configure_logging(config.log_level, "json" if config.log_format == "json" else "console")
        run_orchestrator(config)
    except InterlockError as error:
        sys.exit(f"interlock: {error}")
