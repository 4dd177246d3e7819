"""Lets `python -m interlock.worker` be a worker process, set up by the environment and interlock.toml."""

import sys

from interlock.config import Config
from interlock.errors import InterlockError
from interlock.telemetry import configure_logging
from interlock.worker.run import run_worker

if __name__ == "__main__":
    try:
        config = Config.load()
        configure_logging(config.log_level, "json" if config.log_format == "json" else "console")
        run_worker(config)
    except InterlockError as error:
        sys.exit(f"interlock: {error}")
