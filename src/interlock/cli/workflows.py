"""`interlock workflows`: list the stored workflows, and show the definition of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlock.cli.app_context import InJson, run_with_connection
from interlock.cli.format import format_fields, format_json, format_table, format_time
from interlock.errors import ConfigError
from interlock.store.workflows import StoredWorkflow, list_workflows, read_workflow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

app = typer.Typer(
    help="List and show workflows. An app stores its workflows when it opens.",
    epilog="Example: interlock workflows show order_fulfillment",
    no_args_is_help=True,
)

LIST_HEADER = ("workflow", "version", "namespace", "steps", "registered (UTC)")
STEP_HEADER = ("step", "kind", "type", "depends on")


@app.command("list")
def list_(context: typer.Context, in_json: InJson = False) -> None:
    """List workflows by name, newest version first."""
    found = run_with_connection(context, lambda connection, _: list_workflows(connection))
    if in_json:
        typer.echo(format_json([workflow._asdict() for workflow in found]))
        return
    rows = ((w.name, w.version, w.namespace, len(w.definition["steps"]), format_time(w.registered_at)) for w in found)
    typer.echo(format_table(LIST_HEADER, rows))


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
    dependencies = [*(step.get("after") or ()), *(f"failure of {name}" for name in step.get("after_failure") or ())]
    return step["name"], step.get("kind") or "plain", step.get("type"), ", ".join(dependencies)
