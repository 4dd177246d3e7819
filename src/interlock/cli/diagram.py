"""`interlock diagram`: the lifecycles as Mermaid text, as SVG pictures, or as the page docs/lifecycles.md.

Invariant: what is drawn comes from `lifecycle.MACHINES` alone; a name that is not there is refused with the list.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from interlock.lifecycle import MACHINES
from interlock.machine import Machine
from interlock.machine.diagram import mermaid, svg
from interlock.machine.document import document

# What holds things to each table; the tables themselves do not know where they are used.
ENFORCED = {
    "worker": "in memory, one machine per worker process",
    "task-attempt": "in memory, one machine per claimed attempt",
    "task": "in the database, by the guard of table `tasks`",
    "job": "in the database, by the guard of table `jobs`",
    "supervised-worker": "in the database, by the guard of table `workers`",
    "sort-worker": "in memory, one machine per sort worker, saved to a file on every move",
    "sort-master": "in memory, one machine per sort",
}


class Form(StrEnum):
    """How a lifecycle is drawn."""

    MERMAID = "mermaid"
    SVG = "svg"


def diagram(
    machine: Annotated[
        str | None,
        typer.Argument(help=f"Which lifecycle to draw: {', '.join(MACHINES)}. All of them unless given."),
    ] = None,
    form: Annotated[Form, typer.Option("--format", "-f", help="Mermaid text, or an SVG picture.")] = Form.MERMAID,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write to this file; for all pictures at once, into this directory."),
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option("--docs", help="Write the page that documents all lifecycles to this file."),
    ] = None,
) -> None:
    """Draw the lifecycles from the tables that the database enforces."""
    if machine is not None and machine not in MACHINES:
        raise typer.BadParameter(f"no lifecycle is called {machine!r}; there are: {', '.join(MACHINES)}")
    chosen = {machine: MACHINES[machine]} if machine else MACHINES
    if docs is not None:
        _write(document(MACHINES, ENFORCED), docs)
    elif form is Form.SVG:
        _pictures(chosen, output)
    else:
        _write("\n".join(f"%% {name}\n{mermaid(each)}" for name, each in chosen.items()), output)


def _pictures(chosen: Mapping[str, Machine[Any, Any]], output: Path | None) -> None:
    """Write one picture to the output, or several into it."""
    if len(chosen) == 1:
        _write(svg(*chosen.values()), output)
    elif output is not None:
        for name, machine in chosen.items():
            _write(svg(machine), output / f"{name}.svg")
    else:
        raise typer.BadParameter(
            "one SVG holds one lifecycle: name one, or give a directory with --output for all of them; "
            f"there are: {', '.join(MACHINES)}"
        )


def _write(text: str, path: Path | None) -> None:
    if path is None:
        typer.echo(text, nl=False)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from error
    typer.echo(f"wrote {path}", err=True)
