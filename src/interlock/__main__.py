"""Entry point of the `interlock` command and of `python -m interlock`.

It imports the command line inside `main`, so that Ctrl-C during the imports ends the command without a traceback.
"""

import sys

INTERRUPTED = 130  # the exit code that shells give a program ended by SIGINT


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from interlock.cli.main import run  # noqa: PLC0415 - see the module docstring

        run()
    except KeyboardInterrupt:
        code: str | int | None = INTERRUPTED
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    if code == INTERRUPTED:
        sys.stderr.write("interrupted\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
