"""`interlock submit`: submits a job; its input is checked against the workflow before it is stored.

Invariant: standard output has the job's id, or with --wait its output as JSON. A job that fails exits with 1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

import typer

from interlock.cli.app_context import InJson, command_config, load_command_app, run_with_app
from interlock.cli.format import format_json, parse_json, print_note
from interlock.client.app import Interlock
from interlock.client.job_handle import JobHandle
from interlock.errors import ConfigError, JobFailedError
from interlock.model.options import ConflictPolicy, parse_attributes

Workflow = Annotated[str, typer.Argument(help="The name of the workflow.", metavar="WORKFLOW")]
App = Annotated[
    str | None,
    typer.Option(
        help="The app that declares the workflow; else the stored definition is used.",
        metavar="PACKAGE.MODULE:APP",
    ),
]
Input = Annotated[str | None, typer.Option("--input", help="The job's input, a JSON object.", metavar="JSON")]
Version = Annotated[str | None, typer.Option(help="The version of the workflow; the newest unless given.")]
RequestId = Annotated[str | None, typer.Option(help="Idempotency key: a repeated key submits one job only.")]
Parent = Annotated[str | None, typer.Option(help="The parent job.", metavar="ID")]
WorkerCount = Annotated[int | None, typer.Option(help="How many of its steps may run at once, 1 to 10.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds after which the job is canceled.", metavar="SECONDS")]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="A tag to find it by; may be repeated.")]
Attributes = Annotated[
    list[str] | None,
    typer.Option("--attribute", help="An attribute to find it by; may be repeated.", metavar="NAME=VALUE"),
]
CallbackUrl = Annotated[
    str | None, typer.Option(help="Webhook: this URL receives a POST when it has ended.", metavar="URL")
]
Key = Annotated[
    str | None,
    typer.Option(help="One job of the workflow with this key runs at a time; by default the workflow's own key."),
]
OnConflict = Annotated[
    ConflictPolicy | None,
    typer.Option(help="What to do while an unfinished job has the key; queue unless given, here or by the workflow."),
]
Debounce = Annotated[
    float | None,
    typer.Option(
        help="Start so many seconds later, unless it is submitted again before; needs a key.", metavar="SECONDS"
    ),
]
DebounceMax = Annotated[
    float | None,
    typer.Option(help="Start so many seconds after the first submit at the latest.", metavar="SECONDS"),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end of the job and print its output as JSON.")]
WaitTimeout = Annotated[
    float | None, typer.Option(help="Wait at most so many seconds; implies --wait.", metavar="SECONDS")
]


def submit(
    context: typer.Context,
    workflow: Workflow,
    app: App = None,
    input_: Input = None,
    version: Version = None,
    request_id: RequestId = None,
    parent: Parent = None,
    worker_count: WorkerCount = None,
    timeout: Timeout = None,
    tags: Tags = None,
    attributes: Attributes = None,
    callback_url: CallbackUrl = None,
    key: Key = None,
    on_conflict: OnConflict = None,
    debounce: Debounce = None,
    debounce_max: DebounceMax = None,
    wait: Wait = False,
    wait_timeout: WaitTimeout = None,
    in_json: InJson = False,
) -> None:
    """Submit a job and print its id; with --wait, print its output, or exit with 1 when it fails.

    Example: `interlock submit order_fulfillment --app shop:app --input '{"number": 7}' --wait`.
    """
    given = _parse_input(input_)
    named = parse_attribute_flags(attributes)
    config = command_config(context, app=app)
    used = Interlock(config=config) if config.app is None else load_command_app(context, config.app)

    async def work(opened: Interlock) -> bool:
        job = await opened.submit(
            workflow,
            given,
            version=version,
            request_id=request_id,
            parent=parent,
            worker_count=worker_count,
            timeout=timeout,
            tags=tags,
            attributes=named,
            callback_url=callback_url,
            key=key,
            on_conflict=on_conflict,
            debounce=debounce,
            debounce_max=debounce_max,
        )
        if not job.created:
            print_note(f"job {job.id} was there already")
        return await show(job)

    waits = wait or wait_timeout is not None
    show: Callable[[JobHandle], Awaitable[bool]] = (
        partial(show_end, longest=wait_timeout, in_json=in_json) if waits else partial(_show_id, in_json=in_json)
    )
    if not run_with_app(used, work):
        raise typer.Exit(1)


async def _show_id(job: JobHandle, *, in_json: bool) -> bool:
    typer.echo(format_json({"id": job.id, "created": job.created}, pretty=False) if in_json else job.id)
    return True


async def show_end(job: JobHandle, *, longest: float | None, in_json: bool) -> bool:
    """Wait for the end of a job and print its output; return whether it completed."""
    print_note(f"submitted job {job.id}" if job.created else f"waiting for job {job.id}")
    failure = await _wait_for_end(job, longest)
    status = await job.status()
    if in_json:
        shown = {name: getattr(status, name) for name in ("id", "status", "reason", "output", "error")}
        typer.echo(format_json({"created": job.created, **shown}, pretty=False))
    elif failure is None:
        typer.echo(format_json(status.output, pretty=False))
    if failure is not None:
        print_note(f"interlock: {failure}")
    return failure is None


async def _wait_for_end(job: JobHandle, longest: float | None) -> str | None:
    """Wait for a job; return the error of one that failed or did not end in time."""
    try:
        await job.wait(longest)
    except TimeoutError as error:
        return f"{error}; the job continues, see `interlock jobs show {job.id}`"
    except JobFailedError as error:
        return str(error)
    return None


def _parse_input(given: str | None) -> dict[str, Any]:
    document = parse_json_option("--input", given)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"--input must be a JSON object, such as '{{\"order\": 1}}', not {given!r}")
    return document


def parse_attribute_flags(given: list[str] | None) -> dict[str, Any] | None:
    """Parse the flags --attribute NAME=VALUE; None when none was given."""
    try:
        return parse_attributes("--attribute", given, "=") if given else None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def parse_json_option(name: str, given: str | None) -> Any:
    """Parse the JSON of a flag or an argument; None when it was not given."""
    try:
        return None if given is None else parse_json(given)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply") from None
