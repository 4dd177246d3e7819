"""`interlock jobs`: finds jobs, shows where one is, and cancels, signals, approves, retries or replays it.

Invariant: what is told of a job is what the database stores of it, the reason for which a step waits included.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer

from interlock.cli.app_context import run_with_app
from interlock.cli.format import (
    format_duration,
    format_fields,
    format_json,
    format_relative_time,
    format_table,
    format_time,
    print_note,
)
from interlock.cli.submit import read_json, show_end
from interlock.client.app import Interlock
from interlock.client.job_handle import JobRecord, JobStatus, JobSummary, StepStatus
from interlock.errors import ConfigError
from interlock.lifecycle import JobState
from interlock.store.leader import read_clock
from interlock.store.step_results import replay_results

app = typer.Typer(help="Find jobs; show, cancel, signal, approve, retry or replay one.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(help="The job.", metavar="ID")]
Step = Annotated[str, typer.Argument(help="The step.", metavar="STEP")]
Reason = Annotated[str | None, typer.Option(help="Why, for the records.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Show nothing first, and do not ask.")]
InJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

LISTED = ("id", "status", "workflow", "version", "namespace", "open", "submitted (UTC)", "reason")
STEPS = ("step", "kind", "state", "tries", "took", "reason")
MOVES = ("time (UTC)", "from", "event", "to", "actor", "reason")
TIMES = ("created_at", "started_at", "completed_at", "deadline_at")
PLAIN = ("worker_count", "parent_job_id", "retried_from", "request_id", "correlation_id")
SHOWN_STEPS = 200


@app.command("list")
def list_(
    context: typer.Context,
    status: Annotated[JobState | None, typer.Option(help="In this state.")] = None,
    workflow: Annotated[str | None, typer.Option(help="Of this workflow.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Of this namespace.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many, the newest first.")] = 20,
    before: Annotated[
        str | None, typer.Option(help="Go on after this job, the last of the page before.", metavar="ID")
    ] = None,
    in_json: InJson = False,
) -> None:
    """List jobs, the newest first."""

    async def find(used: Interlock) -> list[JobSummary]:
        return await used.find_jobs(
            status=None if status is None else status.value,
            workflow=workflow,
            namespace=namespace,
            limit=limit,
            before=None if before is None else used.job(before).id,
        )

    found = run_with_app(Interlock(config=context.obj), find)
    typer.echo(format_json([asdict(job) for job in found]) if in_json else _listed(found))
    if len(found) == limit:
        print_note(f"there may be more: --before {found[-1].id}")


@app.command()
def show(
    context: typer.Context,
    id_: Id,
    history: Annotated[bool, typer.Option("--history", help="Every move that the job made, too.")] = False,
    in_json: InJson = False,
) -> None:
    """Show a job and its steps: what is done, what runs, and why the others wait."""

    async def look(used: Interlock) -> str:
        job = used.job(id_)
        found, steps = await job.status(), await job.steps()
        moves = await job.history() if history else []
        async with used.connection() as connection:
            now = await read_clock(connection)
        if in_json:
            document = {**asdict(found), "steps": [asdict(step) for step in steps]}
            return format_json({**document, "history": [asdict(move) for move in moves]} if history else document)
        return "\n\n".join(_shown(found, steps, moves, now))

    typer.echo(run_with_app(Interlock(config=context.obj), look))


@app.command()
def cancel(context: typer.Context, id_: Id, reason: Reason = None, yes: Yes = False) -> None:
    """Cancel a job and its children. Steps that run are asked to stop; done ones are compensated where declared."""
    used = Interlock(config=context.obj)
    if not yes:
        _confirm(id_, run_with_app(used, lambda opened: opened.job(id_).status()))
    if not run_with_app(used, lambda opened: opened.job(id_).cancel(reason)):
        print_note(run_with_app(used, lambda opened: _why_not_canceled(opened, id_)))
        raise typer.Exit(1)
    print_note(f"job {id_} is canceled as soon as what runs has stopped")


@app.command()
def signal(
    context: typer.Context,
    id_: Id,
    name: Annotated[str, typer.Argument(help="The signal.", metavar="NAME")],
    payload: Annotated[str | None, typer.Argument(help="What it carries, as JSON.", metavar="JSON")] = None,
) -> None:
    """Send a signal that a step of the job waits for, or will wait for."""
    carried = read_json("the payload", payload)
    _sent(run_with_app(Interlock(config=context.obj), lambda used: used.job(id_).signal(name, carried)))


@app.command()
def approve(
    context: typer.Context,
    id_: Id,
    step: Step,
    reject: Annotated[bool, typer.Option("--reject", help="Say no: the step fails.")] = False,
    comment: Annotated[str | None, typer.Option(help="What is to be said with it.")] = None,
) -> None:
    """Approve a step that waits for a person, or reject it."""
    _sent(run_with_app(Interlock(config=context.obj), lambda used: used.job(id_).approve(step, not reject, comment)))


@app.command()
def retry(
    context: typer.Context,
    id_: Id,
    step: Step,
    request_id: Annotated[
        str | None, typer.Option(help="Only once for this request, however often it is sent.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end and print the output as JSON.")] = False,
    in_json: InJson = False,
) -> None:
    """Submit a job anew from a step on, with the results that the steps before it had. Prints the new job's id."""

    async def work(used: Interlock) -> bool:
        job = await used.job(id_).retry_from(step, request_id=request_id)
        if wait:
            return await show_end(job, longest=None, in_json=in_json)
        typer.echo(format_json({"id": job.id, "created": job.created}, pretty=False) if in_json else job.id)
        return True

    if not run_with_app(Interlock(config=context.obj), work):
        raise typer.Exit(1)


@app.command()
def replay(
    context: typer.Context,
    id_: Annotated[str | None, typer.Argument(help="The job; without one, all of them.", metavar="ID")] = None,
) -> None:
    """Send step results again that were set aside because they could not be acted on."""

    async def work(used: Interlock) -> int:
        job = None if id_ is None else (await used.job(id_).status()).id
        async with used.connection() as connection:
            return await replay_results(connection, job, now=used.now())

    print_note(f"{run_with_app(Interlock(config=context.obj), work)} sent again")


async def _why_not_canceled(used: Interlock, id_: str) -> str:
    job = used.job(id_)
    found = await job.status()
    undoing = [step for step in await job.steps() if step.kind == "compensation" and step.finished_at is None]
    if found.has_ended or not undoing:
        return "it has ended, or is about to: nothing was changed"
    return (
        f"it is {found.reason}: what was begun is undone first, and nothing was changed; "
        f"`interlock tasks cancel {undoing[0].id}` gives {undoing[0].step} up"
    )


def _sent(came_of_it: str) -> None:
    typer.echo(came_of_it)
    if came_of_it != "sent":
        print_note("one was there before, and the first one counts")
        raise typer.Exit(1)


def _confirm(id_: str, found: JobStatus) -> None:
    print_note(_listed([found]))
    if not sys.stdin.isatty():
        raise ConfigError(f"cancel job {id_}? There is nobody to ask; --yes does it without asking")
    if not typer.confirm("cancel this job?", err=True):
        print_note("nothing was changed")
        raise typer.Exit(1)


def _listed(jobs: Sequence[JobSummary]) -> str:
    return format_table(
        LISTED,
        (
            (j.id, j.status, j.workflow, j.version, j.namespace, j.open_steps, format_time(j.created_at), j.reason)
            for j in jobs
        ),
    )


def _shown(job: JobStatus, steps: Sequence[StepStatus], moves: Sequence[JobRecord], now: datetime) -> list[str]:
    head = {
        "id": job.id,
        "workflow": f"{job.workflow} {job.version}",
        "namespace": job.namespace,
        "state": job.status,
        "reason": job.reason,
        "ending": job.ending,
        **{name: getattr(job, name) for name in PLAIN},
        **{name: _time(getattr(job, name), now) for name in TIMES},
        **{name: _document(getattr(job, name)) for name in ("input", "output", "error")},
    }
    parts = [format_fields((name.replace("_", " "), value) for name, value in head.items())]
    written = format_table(STEPS, (_step(step, now) for step in steps[:SHOWN_STEPS]))
    left = len(steps) - SHOWN_STEPS
    parts.append(f"{written}\n… and {left} more steps; --json shows them all" if left > 0 else written)
    if moves:
        rows = ((format_time(m.recorded_at), m.from_state, m.event, m.to_state, m.actor, m.reason) for m in moves)
        parts.append(format_table(MOVES, rows))
    return parts


def _step(step: StepStatus, now: datetime) -> Sequence[object]:
    took = None if step.started_at is None else format_duration((step.finished_at or now) - step.started_at)
    return step.step, step.kind, step.state, f"{step.tries}/{step.max_tries}", took, step.reason


def _time(at: datetime | None, now: datetime) -> str | None:
    return None if at is None else f"{format_time(at)} UTC, {format_relative_time(at, now)}"


def _document(value: Any) -> str | None:
    return None if value is None else format_json(value, pretty=False)
