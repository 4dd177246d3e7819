"""Submits jobs: one, many, in the caller's transaction.

Invariant: options and input are checked before a job is stored, the input against the schema of its workflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Required, TypedDict

import orjson

from interlock.client.job_handle import JobHandle, as_job_id
from interlock.client.workflow import Workflow
from interlock.errors import ElementsError, InputError
from interlock.model.json_values import check_input_size
from interlock.model.options import JOB_CHECKS, check_text
from interlock.postgres.connection import user_connection
from interlock.postgres.query import PortableStatement, array_literal
from interlock.store.jobs import JOBS
from interlock.store.workflows import read_workflow
from interlock.tracing import ProducerSpan, current_traceparent
from interlock.workflow.new_job import NewJob, describe_unknown_workflow
from interlock.workflow.submit import submit_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.model.options import ConflictPolicy
    from interlock.postgres.connection import AsyncConnection, SyncConnection
    from interlock.store.workflows import StoredWorkflow
    from interlock.workflow.new_job import Submitted


class SubmitOptions(TypedDict, total=False):
    """Options of `app.submit` and of the elements of `app.submit_many`; None means that an option is not given."""

    version: str | None
    request_id: str | None
    parent: UUID | str | JobHandle | None
    worker_count: int | None
    timeout: float | timedelta | None
    correlation_id: UUID | str | None
    tags: Sequence[str] | None
    attributes: Mapping[str, str | float | bool] | None
    callback_url: str | None
    key: str | None
    on_conflict: ConflictPolicy | None
    debounce: float | timedelta | None
    debounce_max: float | timedelta | None


class JobRequest(SubmitOptions, total=False):
    """One job of `app.submit_many`."""

    workflow: Required[str | Workflow]
    input: Any


_KNOWN = JobRequest.__required_keys__ | JobRequest.__optional_keys__


async def submit_requests(
    app: Interlock,
    requests: Sequence[JobRequest],
    connection: AsyncConnection | SyncConnection | None,
    *,
    as_list: bool = True,
) -> list[JobHandle]:
    """Check jobs and store them, all or none, in the caller's transaction if a connection is given.

    ElementsError names all jobs that are invalid; without `as_list`, InputError the first.
    """
    stored = await _read_undeclared(app, requests)
    jobs: list[NewJob] = []
    errors: list[tuple[int, str]] = []
    for place, request in enumerate(requests):
        try:
            jobs.append(_new_job(app, request, stored))
        except InputError as error:
            if not as_list:
                raise
            errors.append((place, str(error)))
    if (
        as_list and connection is None
    ):  # a transaction of the caller may have stored workflows that are not visible here
        errors += await _find_unknown(app, requests, stored)
    if errors:
        raise ElementsError(sorted(errors))
    made = await _store_jobs(app, jobs, connection)
    return [
        JobHandle(app, found.id, workflow=job.workflow, created=found.created)
        for job, found in zip(jobs, made, strict=True)
    ]


async def _store_jobs(
    app: Interlock, jobs: list[NewJob], connection: AsyncConnection | SyncConnection | None
) -> list[Submitted]:
    """Store jobs in one span, whose trace they continue."""
    workflows = {job.workflow for job in jobs}
    workflow = workflows.pop() if len(workflows) == 1 else None
    count = len(jobs) if len(jobs) > 1 else None
    with ProducerSpan(app.tracer, "submit", workflow, namespace=None, count=count) as span:
        if span.traceparent is not None:
            jobs = [replace(job, traceparent=span.traceparent) for job in jobs]
        if connection is None:
            async with app.connection() as own:
                made = await submit_jobs(own, jobs, actor=app.actor, now=app.now())
        else:
            async with user_connection(connection) as theirs:
                made = await submit_jobs(theirs, jobs, actor=app.actor, now=app.now())
        if len(made) == 1:
            span.stored(made[0].id, created=made[0].created)
    return made


def check_requests(requests: Iterable[Any]) -> list[JobRequest]:
    """List the elements given to `app.submit_many`; InputError names the first that is wrong."""
    if isinstance(requests, str | bytes | Mapping) or not isinstance(requests, Iterable):
        raise InputError(f"submit_many takes a list of jobs, got a {type(requests).__name__}")
    given = list(requests)
    for place, request in enumerate(given):
        if not isinstance(request, Mapping) or "workflow" not in request:
            shape = "{'workflow': ..., 'input': {...}}"
            raise InputError(f"submit_many takes a list of {shape}, but element {place} is {request!r}")
        unknown = sorted(map(str, request.keys() - _KNOWN))
        if unknown:
            raise InputError(
                f"submit_many: element {place} has the unknown option {unknown[0]!r}; known are "
                f"{', '.join(sorted(_KNOWN))}"
            )
    return given


_TEXT: Mapping[str, Callable[[Any], str]] = {
    "debounce": lambda value: f"{value} seconds",
    "debounce_max": lambda value: f"{value} seconds",
    "tags": lambda value: array_literal(tuple(value)),
    "attributes": lambda value: orjson.dumps(value).decode(),
}


def submit_as_text(app: Interlock, request: JobRequest) -> PortableStatement:
    """Give a statement that submits one job, and its parameters, all of them text.

    The input of a workflow that the app does not declare is checked by the orchestrator.
    """
    if request.get("parent") is not None:
        raise InputError(f"workflow {_workflow_name(request)}: a submit_statement takes no parent; use app.submit")
    job = _new_job(app, request, None)
    values: dict[str, str | None] = {
        "workflow": job.workflow,
        "input": orjson.dumps(job.input).decode(),
        "version": job.version,
        "traceparent": None if app.tracer is None else current_traceparent(),
        "actor": app.actor,
    }
    for name in JOB_CHECKS:
        value = getattr(job, name)
        values[name] = None if value is None else _TEXT.get(name, str)(value)
    declared = _find_declared(app, request)
    if job.callback_url is None and declared is not None and "callback_url" not in declared.document:
        values["callback_url"] = job.default_callback_url  # that of a stored workflow is not known here
    return PortableStatement(JOBS["submit_as_text"], values)


def _workflow_name(request: JobRequest) -> str:
    workflow = request["workflow"]
    if isinstance(workflow, Workflow):
        return workflow.name
    try:
        return check_text("the name of a workflow", workflow)
    except ValueError as error:
        raise InputError(f"workflow {workflow}: {error}") from None


def _new_job(app: Interlock, request: JobRequest, stored: Mapping[Any, StoredWorkflow | None] | None) -> NewJob:
    """Check the options and the input of one job; the latter without its schema if neither declared nor stored."""
    name, version, parent = _workflow_name(request), request.get("version"), request.get("parent")
    given: Mapping[str, Any] = request
    try:
        options = {key: check(key, given[key]) for key, check in JOB_CHECKS.items() if given.get(key) is not None}
    except ValueError as error:
        raise InputError(f"workflow {name}: {error}") from None
    used_version: str | None
    declared = _find_declared(app, request)
    if declared is not None:
        app.refuse_blocked(declared)
        input_, used_version = declared.encode(given.get("input")), declared.version
    else:
        input_, used_version = _check_against_stored(
            None if stored is None else stored[name, version], name, version, given.get("input")
        )
    check_input_size(f"workflow {name}", input_, app.config.largest_input)
    return NewJob(
        name,
        input_,
        version=used_version,
        names_version=version is not None,
        parent_job_id=None if parent is None else as_job_id(parent),
        default_callback_url=app.config.callback_url,
        **options,
    )


def _find_declared(app: Interlock, request: JobRequest) -> Workflow | None:
    """Find a workflow that the app declares; without a version, the one declared last."""
    workflow, version = request["workflow"], request.get("version")
    return workflow if isinstance(workflow, Workflow) else app.find_workflow(workflow, version)


async def _read_undeclared(
    app: Interlock, requests: Iterable[JobRequest]
) -> dict[tuple[str, str | None], StoredWorkflow | None]:
    """Read the stored definitions of workflows that the app does not declare, each once."""
    undeclared = (request for request in requests if _find_declared(app, request) is None)
    wanted = dict.fromkeys((_workflow_name(request), request.get("version")) for request in undeclared)
    if not wanted:
        return {}
    async with app.connection() as connection:
        return {(name, version): await read_workflow(connection, name, version) for name, version in wanted}


async def _find_unknown(
    app: Interlock,
    requests: Sequence[JobRequest],
    stored: Mapping[tuple[str, str | None], StoredWorkflow | None],
) -> list[tuple[int, str]]:
    """Return the places of jobs whose workflow is neither declared nor stored, each with the message."""
    unknown = [key for key, found in stored.items() if found is None]
    if not unknown:
        return []
    async with app.connection() as connection:
        messages = {key: await describe_unknown_workflow(connection, *key) for key in unknown}
    wanted = [(_workflow_name(request), request.get("version")) for request in requests]
    return [(place, messages[key]) for place, key in enumerate(wanted) if key in messages]


def _check_against_stored(
    found: StoredWorkflow | None, name: str, version: str | None, given: Any
) -> tuple[dict[str, Any], str | None]:
    """Check an input against a workflow in the database; the submit itself refuses one that is not there."""
    from interlock.model.json_schema import check_input  # noqa: PLC0415 - jsonschema is slow to import, and many programs only enqueue tasks

    encoded: Any = {} if given is None else dict(given) if isinstance(given, Mapping) else given
    check_input({"name": name} if found is None else found.definition, encoded)
    return encoded, version if found is None else found.version
