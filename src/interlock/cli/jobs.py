"""`interlock jobs`: list and show jobs and what waits for an answer; cancel, signal, approve, retry or replay one.

Invariant: what is shown of a job and its steps, including the reason why a step waits, is stored in the database.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.app_context import InJson, Reason, Yes, run_with_app, run_with_connection
from interlock.cli.enqueue import parse_past_time
from interlock.cli.format import (
    format_duration,
    format_fields,
    format_json,
    format_table,
    format_time,
    format_time_and_distance,
    print_note,
)
from interlock.cli.status import format_callback
from interlock.cli.submit import parse_attribute_flags, parse_json_option, show_end
from interlock.client.app import Interlock
from interlock.client.job_handle import (
    InboxItem,
    JobStatus,
    JobSummary,
    SentSignal,
    SignalOutcome,
    StepStatus,
)
from interlock.errors import ConfigError
from interlock.lifecycle import JobState
from interlock.store.leader import read_clock
from interlock.store.step_results import replay_results

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection
    from interlock.store.history import HistoryRecord

app = typer.Typer(
    help="List and show jobs and what waits for an answer; cancel, signal, approve, retry or replay one.",
    epilog="Example: interlock jobs list --status FAILED, then interlock jobs show ID --history",
    no_args_is_help=True,
)

Id = Annotated[str, typer.Argument(help="The job.", metavar="ID")]
Step = Annotated[str, typer.Argument(help="The step.", metavar="STEP")]

Since = Annotated[
    str | None, typer.Option(help="Submitted at this time or later: 2h (ago), or a time with its zone.", metavar="TIME")
]
Until = Annotated[
    str | None, typer.Option(help="Submitted before this time: 2h (ago), or a time with its zone.", metavar="TIME")
]


LIST_HEADER = ("id", "status", "workflow", "version", "namespace", "open", "submitted (UTC)", "reason")
STEP_HEADER = ("step", "kind", "state", "tries", "took", "reason")
INBOX_HEADER = ("job", "workflow", "step", "kind", "signal", "assignee", "since (UTC)", "until (UTC)")
SIGNAL_HEADER = ("sent (UTC)", "signal", "by", "consumed by", "payload")
HISTORY_HEADER = ("time (UTC)", "from", "event", "to", "actor", "role", "reason")
TIMES = ("created_at", "started_at", "completed_at", "deadline_at")
PLAIN_FIELDS = ("worker_count", "parent_job_id", "retried_from", "request_id", "correlation_id", "key")
MAX_SHOWN_STEPS = 200


@app.command("list")
def list_(
    context: typer.Context,
    status: Annotated[list[JobState] | None, typer.Option(help="In this state; may be repeated.")] = None,
    workflow: Annotated[str | None, typer.Option(help="Of this workflow.")] = None,
    version: Annotated[str | None, typer.Option(help="Of this version of the workflow.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Of this namespace.")] = None,
    key: Annotated[str | None, typer.Option(help="With this key.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="With this tag; may be repeated.")] = None,
    attribute: Annotated[
        list[str] | None, typer.Option(help="With this attribute; may be repeated.", metavar="NAME=VALUE")
    ] = None,
    parent: Annotated[str | None, typer.Option(help="Children of this job.", metavar="ID")] = None,
    correlation_id: Annotated[str | None, typer.Option(help="With this correlation id.", metavar="ID")] = None,
    request_id: Annotated[str | None, typer.Option(help="Submitted with this request id.", metavar="ID")] = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many jobs.")] = 20,
    before: Annotated[
        str | None, typer.Option(help="Continue after this job, the last of the previous page.", metavar="ID")
    ] = None,
    in_json: InJson = False,
) -> None:
    """List jobs that meet all conditions, newest first.

    Example: `interlock jobs list --tag eu --attribute customer=7 --status FAILED --since 2h`.
    """
    attributes = parse_attribute_flags(attribute)

    async def find(used: Interlock) -> list[JobSummary]:
        async with used.connection() as connection:
            now = await read_clock(connection, now=used.now())
        return await used.find_jobs(
            status=[each.value for each in status] if status else None,
            workflow=workflow,
            version=version,
            namespace=namespace,
            key=key,
            tags=tag or (),
            attributes=attributes,
            parent=parent,
            correlation_id=correlation_id,
            request_id=request_id,
            created_after=parse_past_time("--since", since, now),
            created_before=parse_past_time("--until", until, now),
            limit=limit,
            before=None if before is None else used.job(before).id,
        )

    found = run_with_app(Interlock(config=context.obj), find)
    typer.echo(format_json([asdict(job) for job in found]) if in_json else _format_list(found))
    if len(found) == limit:
        print_note(f"there may be more: --before {found[-1].id}")


@app.command()
def show(
    context: typer.Context,
    id_: Id,
    history: Annotated[bool, typer.Option("--history", help="Include the recorded moves of the job.")] = False,
    in_json: InJson = False,
) -> None:
    """Show a job and its steps, with the reason of each step that waits."""

    async def look(used: Interlock) -> str:
        job = used.job(id_)
        found, steps, signals = await job.status(), await job.steps(), await job.signals()
        moves = await job.history() if history else []
        async with used.connection() as connection:
            now = await read_clock(connection)
        if in_json:
            lists = {"steps": [asdict(step) for step in steps], "signals": [asdict(signal) for signal in signals]}
            document = {**asdict(found), **lists}
            return format_json({**document, "history": [asdict(move) for move in moves]} if history else document)
        return "\n\n".join(_format_job(found, steps, signals, moves, now))

    typer.echo(run_with_app(Interlock(config=context.obj), look))


@app.command()
def inbox(
    context: typer.Context,
    assignee: Annotated[str | None, typer.Option(help="For this assignee.")] = None,
    workflow: Annotated[str | None, typer.Option(help="Of this workflow.")] = None,
    kind: Annotated[str | None, typer.Option(help="Of this kind: signal or approval.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many steps.")] = 20,
    in_json: InJson = False,
) -> None:
    """List the steps that wait for a signal or an approval, longest wait first.

    Example: `interlock jobs inbox --assignee ops`, then `interlock jobs approve ID STEP`.
    """

    async def find(used: Interlock) -> list[InboxItem]:
        return await used.inbox(assignee=assignee, workflow=workflow, kind=kind, limit=limit)

    found = run_with_app(Interlock(config=context.obj), find)
    if in_json:
        typer.echo(format_json([asdict(item) for item in found]))
    else:
        typer.echo(format_table(INBOX_HEADER, map(_inbox_row, found)))
    if len(found) == limit:
        print_note("there may be more: --limit shows more of them")


@app.command()
def cancel(context: typer.Context, id_: Id, reason: Reason = None, yes: Yes = False) -> None:
    """Cancel a job and its children. Running steps are asked to stop; done steps are compensated where declared."""
    used = Interlock(config=context.obj)
    if not yes:
        _confirm(id_, run_with_app(used, lambda opened: opened.job(id_).status()))
    if not run_with_app(used, lambda opened: opened.job(id_).cancel(reason)):
        print_note(run_with_app(used, lambda opened: _explain_refused_cancel(opened, id_)))
        raise typer.Exit(1)
    found = run_with_app(used, lambda opened: opened.job(id_).status())
    if found.ending == JobState.FAILED:
        print_note(f"job {id_} has failed: its child jobs are canceled, and it becomes FAILED when they have ended")
    else:
        print_note(f"job {id_} is canceled as soon as its running steps have stopped")


@app.command()
def signal(
    context: typer.Context,
    id_: Id,
    name: Annotated[str, typer.Argument(help="The signal.", metavar="NAME")],
    payload: Annotated[str | None, typer.Argument(help="The payload, as JSON.", metavar="JSON")] = None,
    request_id: Annotated[
        str | None, typer.Option(help="Idempotency key: a repeated key sends one signal only.")
    ] = None,
) -> None:
    """Send a signal to a step that waits for it now or later.

    Each signal is consumed by one step, in the order of sending.

    Example: `interlock jobs signal ID payment_received '{"amount": 12}'`.
    """
    carried = parse_json_option("the payload", payload)

    async def send(used: Interlock) -> SignalOutcome:
        return await used.job(id_).signal(name, carried, request_id=request_id)

    _print_sent(run_with_app(Interlock(config=context.obj), send))


@app.command()
def approve(
    context: typer.Context,
    id_: Id,
    step: Step,
    reject: Annotated[bool, typer.Option("--reject", help="Reject: the step fails.")] = False,
    comment: Annotated[str | None, typer.Option(help="A comment, stored with the answer.")] = None,
) -> None:
    """Approve or reject a step that waits for approval."""
    _print_sent(
        run_with_app(Interlock(config=context.obj), lambda used: used.job(id_).approve(step, not reject, comment))
    )


@app.command()
def retry(
    context: typer.Context,
    id_: Id,
    step: Annotated[
        str | None, typer.Argument(help="The step to start from; the failed steps unless given.", metavar="STEP")
    ] = None,
    request_id: Annotated[
        str | None, typer.Option(help="Idempotency key: a repeated key submits one job only.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end of the job and print its output.")] = False,
    in_json: InJson = False,
) -> None:
    """Submit a job again that failed or was canceled, and print the id of the new job.

    The failed steps, or the given step, and the steps after them run again; the results of the other steps are reused.
    """

    async def work(used: Interlock) -> bool:
        old = used.job(id_)
        retried = old.retry(request_id=request_id) if step is None else old.retry_from(step, request_id=request_id)
        job = await retried
        if wait:
            return await show_end(job, longest=None, in_json=in_json)
        typer.echo(format_json({"id": job.id, "created": job.created}, pretty=False) if in_json else job.id)
        return True

    if not run_with_app(Interlock(config=context.obj), work):
        raise typer.Exit(1)


@app.command()
def replay(
    context: typer.Context,
    id_: Annotated[str | None, typer.Argument(help="The job; all jobs unless given.", metavar="ID")] = None,
) -> None:
    """Send dead letters again: step results that failed repeatedly."""

    async def work(connection: Connection, used: Interlock) -> int:
        job = None if id_ is None else (await used.job(id_).status()).id
        return await replay_results(connection, job, now=used.now())

    print_note(f"{run_with_connection(context, work)} sent again")


async def _explain_refused_cancel(used: Interlock, id_: str) -> str:
    job = used.job(id_)
    found = await job.status()
    undoing = [step for step in await job.steps() if step.kind == "compensation" and step.finished_at is None]
    if found.has_ended or not undoing:
        return "the job has ended or is about to end: nothing was changed"
    return (
        f"the job is {found.reason}: its compensations run first, and nothing was changed; "
        f"`interlock tasks cancel {undoing[0].id}` cancels the compensation {undoing[0].step}"
    )


def _print_sent(result: str) -> None:
    typer.echo(result)
    if result != "sent":
        print_note("it was sent before, or the approval has been answered; the first one counts")
        raise typer.Exit(1)


def _confirm(id_: str, found: JobStatus) -> None:
    print_note(_format_list([found]))
    if not sys.stdin.isatty():
        raise ConfigError(f"cancel job {id_}? There is no terminal to ask on; --yes cancels without asking")
    if not typer.confirm("cancel this job?", err=True):
        print_note("nothing was changed")
        raise typer.Exit(1)


def _format_list(jobs: Sequence[JobSummary]) -> str:
    return format_table(
        LIST_HEADER,
        (
            (j.id, j.status, j.workflow, j.version, j.namespace, j.open_steps, format_time(j.created_at), j.reason)
            for j in jobs
        ),
    )


def _format_job(
    job: JobStatus,
    steps: Sequence[StepStatus],
    signals: Sequence[SentSignal],
    moves: Sequence[HistoryRecord],
    now: datetime,
) -> list[str]:
    head = {
        "id": job.id,
        "workflow": f"{job.workflow} {job.version}",
        "namespace": job.namespace,
        "state": job.status,
        "reason": job.reason,
        "ending": job.ending,
        **{name: getattr(job, name) for name in PLAIN_FIELDS},
        "tags": ", ".join(job.tags) if job.tags else None,
        "attributes": format_json(job.attributes, pretty=False) if job.attributes else None,
        "callback": format_callback(job.callback_url, job.callback),
        **{name: format_time_and_distance(getattr(job, name), now) for name in TIMES},
        **{
            name: None if (value := getattr(job, name)) is None else format_json(value, pretty=False)
            for name in ("input", "output", "error")
        },
    }
    parts = [format_fields((name.replace("_", " "), value) for name, value in head.items())]
    written = format_table(STEP_HEADER, (_step_row(step, now) for step in steps[:MAX_SHOWN_STEPS]))
    left = len(steps) - MAX_SHOWN_STEPS
    parts.append(f"{written}\n… and {left} more steps; --json shows them all" if left > 0 else written)
    if signals:
        parts.append(format_table(SIGNAL_HEADER, map(_signal_row, signals)))
    if moves:
        rows = (
            (format_time(m.recorded_at), m.from_state, m.event, m.to_state, m.actor, m.database_role, m.reason)
            for m in moves
        )
        parts.append(format_table(HISTORY_HEADER, rows))
    return parts


def _signal_row(signal: SentSignal) -> Sequence[object]:
    payload = None if signal.payload is None else format_json(signal.payload, pretty=False)
    return format_time(signal.sent_at), signal.name, signal.sent_by, signal.consumed_by, payload


def _inbox_row(item: InboxItem) -> Sequence[object]:
    since, until = format_time(item.wait_started_at), format_time(item.wait_until)
    return item.job_id, item.workflow, item.step, item.kind, item.signal, item.assignee, since, until


def _step_row(step: StepStatus, now: datetime) -> Sequence[object]:
    took = None if step.started_at is None else format_duration((step.finished_at or now) - step.started_at)
    return step.step, step.kind, step.state, f"{step.tries}/{step.max_tries}", took, step.reason
