"""Lets `python -m interlock.worker` be a worker process, set up by the environment and interlock.toml."""

import sys

from interlock.config import Config
from interlock.errors import ConfigError, InputError, InterlockError, MigrationError
from interlock.telemetry import configure_logging
from interlock.worker.run import UNRECOVERABLE, read_assignment, run_worker

OF_NO_USE = (ConfigError, InputError, MigrationError)  # to try again after


def main() -> None:
    """Be a worker until asked to stop; say why when that cannot be."""
    assignment = read_assignment(sys.argv[1:])
    if assignment is not None:
        assignment.take_up()
    try:
        config = Config.load()
        configure_logging(config.log_level, "json" if config.log_format == "json" else "console")
        run_worker(config, assignment)
    except Exception as error:
        if assignment is not None:
            assignment.say_why(str(error) if isinstance(error, InterlockError) else f"{type(error).__name__}: {error}")
        if not isinstance(error, InterlockError):
            raise
        sys.stderr.write(f"interlock: {error}\n")
        sys.exit(UNRECOVERABLE if assignment is not None and isinstance(error, OF_NO_USE) else 1)


if __name__ == "__main__":
    main()
