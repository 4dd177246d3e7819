"""Lets `python -m interlock` be the `interlock` command."""

from interlock.cli import main

main()
