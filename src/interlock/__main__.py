"""Entry point of the `interlock` command and of `python -m interlock`."""

import sys

from interlock.cli.exit_code import run_for_exit_code


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run_for_exit_code(_run))


def _run() -> None:
    from interlock.cli.main import run  # noqa: PLC0415 - Ctrl-C during this import must find `main` running

    run()


if __name__ == "__main__":
    main()
