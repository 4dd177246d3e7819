"""`interlock diagram`: draws lifecycles, workflows and jobs as Mermaid or SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import typer

from interlock.cli.app_context import command_config, load_command_app, run_with_connection
from interlock.client.app import Interlock
from interlock.errors import UnknownJobError
from interlock.lifecycle import MACHINES
from interlock.machine.diagram import document, mermaid, svg
from interlock.model.options import check_id
from interlock.model.workflow_diagram import workflow_mermaid, workflow_svg
from interlock.postgres.connection import Connection
from interlock.store.jobs import read_jobs, read_steps
from interlock.store.workflows import list_workflows, read_workflow

# How each lifecycle is enforced, for the page docs/lifecycles.md.
ENFORCED = {
    "worker": "in memory, one machine per worker process",
    "task-attempt": "in memory, one machine per claimed attempt",
    "task": "in the database, by the guard of table `tasks`",
    "job": "in the database, by the guard of table `jobs`",
    "supervised-worker": "in the database, by the guard of table `workers`",
    "sort-worker": "in memory, one machine per sort worker, saved to a file on every move",
    "sort-master": "in memory, one machine per sort",
}


class DiagramFormat(StrEnum):
    """The output format of a diagram."""

    MERMAID = "mermaid"
    SVG = "svg"


class Drawing(NamedTuple):
    """A lifecycle, a workflow or a job, in each format."""

    name: str
    mermaid: Callable[[], str]
    svg: Callable[[], str]


def diagram(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            help=f"A lifecycle ({', '.join(MACHINES)}), a workflow, or the id of a job; all lifecycles unless given."
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(help="Draw a workflow of this app; all of them without NAME.", metavar="PACKAGE.MODULE:APP"),
    ] = None,
    stored: Annotated[
        bool, typer.Option("--stored", help="Draw a workflow as it is stored in the database; all without NAME.")
    ] = False,
    version: Annotated[str | None, typer.Option(help="The version of the workflow; the newest unless given.")] = None,
    form: Annotated[
        DiagramFormat, typer.Option("--format", "-f", help="Mermaid text, or an SVG picture.")
    ] = DiagramFormat.MERMAID,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write to this file, or SVG pictures into this directory."),
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option("--docs", help="Write the documentation page of all lifecycles to this file."),
    ] = None,
) -> None:
    """Draw a lifecycle, a workflow, or a job with the states of its steps.

    A lifecycle is drawn from the transition tables that the engine runs on. In a workflow, the shape of a step shows
    its kind; dashed arrows lead to steps that handle failures. A job is drawn by its id.

    Examples: `interlock diagram task`, `interlock diagram order --app shop:app`,
    `interlock diagram order --stored --version 2 --format svg --output order.svg`.
    """
    if docs is not None:
        _write(document(MACHINES, ENFORCED), docs)
        return
    drawings = _find_drawings(context, name, app=app, stored=stored, version=version)
    if form is DiagramFormat.SVG:
        _write_pictures(drawings, output)
    else:
        _write("\n".join(f"%% {drawing.name}\n{drawing.mermaid()}" for drawing in drawings), output)


def _find_drawings(
    context: typer.Context, name: str | None, *, app: str | None, stored: bool, version: str | None
) -> list[Drawing]:
    """Find what a name means: a lifecycle, unless a flag asks for a workflow; a job; a workflow of the app."""
    asks_for_workflow = app is not None or stored or version is not None
    if not asks_for_workflow and (name is None or name in MACHINES):
        chosen = MACHINES if name is None else {name: MACHINES[name]}
        return [Drawing(key, partial(mermaid, machine), partial(svg, machine)) for key, machine in chosen.items()]
    if name is not None and (job_id := _as_id(name)) is not None:
        return [run_with_connection(context, lambda connection, _: _read_job(connection, job_id))]
    reference = None if stored else command_config(context, app=app).app
    if reference is not None:
        declared = load_command_app(context, reference)
        return _choose_workflows(_declared_documents(declared), name, version, f"workflows of {reference}")
    if stored:
        documents = run_with_connection(context, lambda connection, _: _stored_documents(connection, name, version))
        return _choose_workflows(documents, name, version, "stored workflows")
    raise typer.BadParameter(
        f"there is no lifecycle {name!r}; lifecycles: {', '.join(MACHINES)}. "
        "Draw a workflow with --app PACKAGE.MODULE:APP, or with --stored from the database"
    )


def _choose_workflows(
    documents: Sequence[Mapping[str, Any]], name: str | None, version: str | None, source: str
) -> list[Drawing]:
    """Draw the newest version of one workflow, or of all; `documents` has older versions first."""
    wanted = {each["name"]: each for each in documents if version in {None, each["version"]}}
    if name is not None:
        wanted = {key: each for key, each in wanted.items() if key == name}
    if not wanted:
        which = "workflow" if name is None else f"workflow {name!r}"
        there = ", ".join(dict.fromkeys(f"{each['name']} {each['version']}" for each in documents)) or "none"
        with_version = "" if version is None else f" version {version!r}"
        raise typer.BadParameter(
            f"there is no {which}{with_version}; {source}: {there}; lifecycles: {', '.join(MACHINES)}"
        )
    return [_draw_workflow(each) for each in wanted.values()]


def _draw_workflow(definition: Mapping[str, Any], states: Mapping[str, str] | None = None, of: str = "") -> Drawing:
    return Drawing(
        f"{of}{definition['name']}, version {definition['version']}",
        partial(workflow_mermaid, definition, states),
        partial(workflow_svg, definition, states),
    )


def _declared_documents(app: Interlock) -> list[Mapping[str, Any]]:
    return [workflow.document for workflow in app.workflows.values()]


async def _stored_documents(connection: Connection, name: str | None, version: str | None) -> list[Mapping[str, Any]]:
    found = None if name is None else await read_workflow(connection, name, version)
    if found is not None:
        return [found.definition]
    return [each.definition for each in reversed(await list_workflows(connection))]


async def _read_job(connection: Connection, id_: UUID) -> Drawing:
    rows = await read_jobs(connection, [id_])
    found = await read_workflow(connection, rows[0]["workflow"], rows[0]["version"]) if rows else None
    if found is None:
        raise UnknownJobError(f"there is no job {id_}; `interlock jobs list` shows the jobs")
    states = {row["step"]: str(row["state"]) for row in await read_steps(connection, id_)}
    return _draw_workflow(found.definition, states, f"job {id_} ({rows[0]['status']}) of ")


def _as_id(name: str) -> UUID | None:
    try:
        return check_id("job", name)
    except ValueError:
        return None


def _write_pictures(drawings: Sequence[Drawing], output: Path | None) -> None:
    """Write one picture to the file `output`, or any number into the directory `output`."""
    try:
        pictures = {drawing.name: drawing.svg() for drawing in drawings}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if len(pictures) > 1 and output is None:
        message = "an SVG file holds one diagram: name one, or give a directory with --output"
        raise typer.BadParameter(f"{message}; there are: {', '.join(pictures)}")
    for name, drawn in pictures.items():
        path = output
        if path is not None and (len(pictures) > 1 or path.is_dir()):
            path /= f"{name.replace(', version ', '-')}.svg"
        _write(drawn, path)


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
