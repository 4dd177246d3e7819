"""`interlock workflows`: list the stored workflows, show the definition of one, and check templates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlock.cli.app_context import InJson, command_config, load_command_app, run_with_app, run_with_connection
from interlock.cli.format import format_fields, format_json, format_table, format_time, print_note
from interlock.client.app import Interlock
from interlock.errors import ConfigError
from interlock.store.workflows import StoredWorkflow, find_changed_workflows, list_workflows, read_workflow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

app = typer.Typer(
    help="List and show workflows, and check templates. An app stores its workflows when it opens.",
    epilog="Example: interlock workflows show order_fulfillment",
    no_args_is_help=True,
)

LIST_HEADER = ("workflow", "version", "namespace", "steps", "registered (UTC)")
STEP_HEADER = ("step", "kind", "type", "depends on")
CHECK_HEADER = ("step", "kind", "depends on")


@app.command("list")
def list_(
    context: typer.Context,
    app_: Annotated[
        str | None,
        typer.Option(
            "--app", help="Also show which workflows of this app differ from the stored ones.", metavar="MODULE:APP"
        ),
    ] = None,
    in_json: InJson = False,
) -> None:
    """List workflows by name, newest version first. With an app, changed definitions are marked as blocked."""
    config = command_config(context, app=app_)
    declaring = None if config.app is None else load_command_app(context, config.app)
    documents = [] if declaring is None else [workflow.document for workflow in declaring.workflows.values()]

    async def read(opened: Interlock) -> tuple[list[StoredWorkflow], dict[tuple[str, str], str]]:
        async with opened.connection() as connection:
            return await list_workflows(connection), await find_changed_workflows(connection, documents)

    found, blocked = run_with_app(Interlock(config=config if declaring is None else declaring.config), read)
    if in_json:
        typer.echo(format_json([{**w._asdict(), "blocked": blocked.get((w.name, w.version))} for w in found]))
        return
    rows = ((w.name, w.version, w.namespace, len(w.definition["steps"]), format_time(w.registered_at)) for w in found)
    typer.echo(format_table(LIST_HEADER, rows))
    for reason in blocked.values():
        typer.echo(f"blocked: {reason}")


@app.command()
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The name of the workflow.", metavar="NAME")],
    version: Annotated[str | None, typer.Option(help="The version; the newest unless given.")] = None,
    in_json: InJson = False,
) -> None:
    """Show the definition of a workflow: its steps and what each depends on."""
    found = run_with_connection(context, lambda connection, _: read_workflow(connection, name, version))
    if found is None:
        which = name if version is None else f"{name} version {version}"
        raise ConfigError(f"there is no workflow {which}; `interlock workflows list` shows the workflows")
    typer.echo(format_json(found._asdict()) if in_json else _format_workflow(found))


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="A template, or a directory of templates.", metavar="PATH")],
    environment: Annotated[str | None, typer.Option(help="The block of `environments` to apply.")] = None,
    in_json: InJson = False,
) -> None:
    """Check YAML templates without their handlers: whether they load, and which fields have no effect.

    Needs no app and no database. An invalid template exits with 1 and the file, the line and the field.
    """
    from interlock.client.templates import check_templates  # noqa: PLC0415 - the YAML parser is needed by few commands

    found = check_templates(path, environment=environment)
    documents = [workflow.document for workflow in found.workflows]
    if in_json:
        typer.echo(format_json({"workflows": documents, "handlers": found.handlers, "warnings": found.warnings}))
        return
    for document in documents:
        typer.echo(f"workflow {document['name']}, version {document['version']}, namespace {document['namespace']}")
        typer.echo(f"{format_table(CHECK_HEADER, map(_check_row, document['steps']))}\n")
    typer.echo(format_fields([("handlers", "\n".join(found.handlers) or None)]))
    for warning in found.warnings:
        print_note(f"warning: {warning}")


def _format_workflow(workflow: StoredWorkflow) -> str:
    head = format_fields(
        (
            ("workflow", workflow.name),
            ("version", workflow.version),
            ("namespace", workflow.namespace),
            ("timeout", workflow.definition.get("timeout")),
            ("registered", f"{format_time(workflow.registered_at)} UTC"),
        )
    )
    return f"{head}\n\n{format_table(STEP_HEADER, map(_step_row, workflow.definition['steps']))}"


def _step_row(step: Mapping[str, Any]) -> Sequence[object]:
    relations = {"after": "{}", "on_failure": "failure of {}", "always": "end of {}", "recovers": "recovers {}"}
    dependencies = [shape.format(name) for field, shape in relations.items() for name in step.get(field) or ()]
    return step["name"], step.get("kind") or "plain", step.get("type"), ", ".join(dependencies)


def _check_row(step: Mapping[str, Any]) -> Sequence[object]:
    name, kind, _, dependencies = _step_row(step)
    return name, kind, dependencies
