"""Entry point of `python -m interlock.worker`: a worker configured by the environment and interlock.toml."""

import sys

from interlock.config import Config
from interlock.errors import ConfigError, InputError, InterlockError, MigrationError
from interlock.telemetry import configure_logging
from interlock.worker.run import UNRECOVERABLE, read_assignment, run_worker

UNRECOVERABLE_ERRORS = (ConfigError, InputError, MigrationError)


def main() -> None:
    """Run a worker until it is asked to stop; an error is printed, and reported to the supervisor."""
    assignment = read_assignment(sys.argv[1:])
    if assignment is not None:
        assignment.accept()
    try:
        config = Config.load()
        configure_logging(config.log_level, "json" if config.log_format == "json" else "console")
        run_worker(config, assignment)
    except Exception as error:
        if assignment is not None:
            is_ours = isinstance(error, InterlockError)
            assignment.report_exit(str(error) if is_ours else f"{type(error).__name__}: {error}")
        if not isinstance(error, InterlockError):
            raise
        sys.stderr.write(f"interlock: {error}\n")
        is_final = assignment is not None and isinstance(error, UNRECOVERABLE_ERRORS)
        sys.exit(UNRECOVERABLE if is_final else 1)


if __name__ == "__main__":
    main()
