"""Lets `python -m interlock` be the `interlock` command."""

from interlock.cli.main import main

main()
