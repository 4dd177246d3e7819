"""Where the commands talk: standard output is for the answer, standard error for what goes on meanwhile."""

from __future__ import annotations

import typer


def tell(text: str) -> None:
    """Say on standard error what is going on."""
    typer.echo(text, err=True)
