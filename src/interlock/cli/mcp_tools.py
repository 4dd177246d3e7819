"""The tools of `interlock mcp`: what an agent can read and, with the scope `operate`, change.

Invariant: an answer has at most MAX_ANSWER_BYTES. With a limit to namespaces, nothing of others is read or changed. An
error of the engine reaches the agent as its message, without a traceback. An argument that a tool does not have is
refused: a misspelled condition must not find, and lead to cancel, everything.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection
from dataclasses import asdict, is_dataclass
from datetime import datetime
from functools import wraps
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import ToolAnnotations
from pydantic import Field

from interlock.cli.enqueue import parse_past_time
from interlock.client.app import Interlock
from interlock.client.explain import ExplainedKind
from interlock.errors import InputError, InterlockError, UnknownJobError, UnknownTaskError
from interlock.store.doctor import examine
from interlock.store.history import MACHINES, read_history
from interlock.store.leader import read_clock
from interlock.store.stats import overview_document, read_overview

MAX_ANSWER_BYTES = 40_000
# Limits that an answer is cut to, one after the other, until it fits: characters of a text, elements of a list.
CUTS = ((2_000, 200), (500, 50), (120, 20), (40, 5))
MAX_ERROR_CHARACTERS = 2_000  # of the message of an error, which may repeat an argument
MAX_FOUND = 200
SCOPED_KINDS = ("task", "step", "job", "namespace")  # that belong to one namespace
INSTRUCTIONS = """\
Interlock runs durable tasks and workflows on PostgreSQL. A task is claimed and run by a worker; a job is one run of a
workflow, and its steps are tasks. Begin with `status`. `find` lists tasks, jobs or what waits for a person. For one
that does not move, `explain` gives the causes and the command that unblocks it; `history` every recorded move.
`doctor` checks the whole database. Times are UTC, in ISO 8601; TIME may also be a duration before now, such as 2h."""

Id = Annotated[
    str, Field(description="The id of a task or a job, or the name of a worker, namespace, schedule or limit.")
]
TaskOrJob = Annotated[str, Field(description="The id of a task or a job.")]
At = Annotated[str | None, Field(description="As of this TIME in the past; now unless given.")]
Reason = Annotated[str | None, Field(description="Why; the records show it.")]
Answer = Callable[..., Awaitable[Any]]


class AgentTools:
    """The tools over one app, which is open."""

    def __init__(self, app: Interlock, namespaces: Collection[str] | None) -> None:
        self._app = app
        self._namespaces = None if namespaces is None else sorted(namespaces)
        app.reachable_namespaces = self._namespaces

    # --- scope read

    async def status(
        self,
        id: Annotated[str | None, Field(description="A task or a job; the overview unless given.")] = None,  # noqa: A002 - the name that the agent sees
    ) -> Any:
        """Show the overview (tasks and jobs by namespace and state, workers, limits, schedules), or one task or job."""
        if id is not None:
            kind, found = await self._find_one(id)
            if kind == "task":
                return {"kind": "task", **asdict(found)}
            return {"kind": "job", **asdict(found), "steps": await self._app.job(id).steps()}
        async with self._app.connection() as connection:
            document = overview_document(await read_overview(connection))
        allowed = self._namespaces
        if allowed is None:
            return document
        by_namespace = {name: {key: document[name].get(key) for key in allowed} for name in ("namespaces", "jobs")}
        paused = [each for each in document["paused"] if each["name"] in allowed]
        return {"now": document["now"], **by_namespace, "paused": paused, "limited_to_namespaces": allowed}

    async def explain(
        self,
        id: Id,  # noqa: A002 - the name that the agent sees
        kind: Annotated[ExplainedKind | None, Field(description="Needed where the name does not tell it.")] = None,
        at: At = None,
    ) -> Any:
        """Explain why a task, job, worker, namespace, schedule or limit does not move, and how to unblock it."""
        await self._check_reach(id, kind)
        found = await self._app.explain(id, kind=kind, at=await self._past_time("at", at))
        return asdict(found)

    async def history(
        self,
        id: Annotated[str, Field(description="The id of a task or a job, or the name of a worker.")],  # noqa: A002 - the name that the agent sees
        kind: Annotated[
            Literal["task", "job", "worker"] | None, Field(description="Found by the id unless given.")
        ] = None,
        at: At = None,
        limit: Annotated[int, Field(ge=1, le=1000, description="At most so many of the newest moves.")] = 100,
    ) -> Any:
        """Show the recorded moves of a task, job or worker, oldest first, each checked against the lifecycle."""
        if kind is None:
            kind = "worker" if _as_uuid(id) is None else (await self._find_one(id))[0]
        await self._check_reach(id, kind)
        wanted: UUID | str = id if kind == "worker" else _require_uuid("id", id)
        moment = await self._past_time("at", at)
        async with self._app.connection() as connection:
            records = await read_history(connection, kind, wanted, at=moment)
        if not records:
            raise InputError(f"there is no record of a {kind} {id}: never stored, or deleted by retention")
        final = MACHINES[kind].final
        return {
            "kind": kind,
            "state": records[-1].to_state,
            "has_ended": records[-1].to_state in final,
            "problems": sum(record.problem is not None for record in records),
            "left_out": max(len(records) - limit, 0),
            "moves": records[-limit:],
        }

    async def doctor(
        self,
        full: Annotated[bool, Field(description="All rows and records, which takes long in a large database.")] = False,
    ) -> Any:
        """Examine whether the database obeys the rules of the engine; each finding has a severity and a remedy."""
        if self._namespaces is not None:
            raise InputError("doctor examines the whole database, and this server is limited to namespaces")
        async with self._app.connection() as connection:
            return (await examine(connection, full=full)).document()

    async def find(
        self,
        what: Annotated[
            Literal["tasks", "jobs", "inbox"],
            Field(description="inbox: steps that wait for an approval or a signal of a person."),
        ],
        states: Annotated[
            list[str] | None,
            Field(
                description="Tasks: waiting, pending, running, done, error, canceled, skipped. Jobs: SUBMITTED, "
                "PENDING, RUNNING, COMPLETED, FAILED, CANCELED."
            ),
        ] = None,
        name: Annotated[str | None, Field(description="The type of the tasks, or the workflow of the jobs.")] = None,
        namespace: str | None = None,
        tag: str | None = None,
        key: Annotated[str | None, Field(description="The unique key of a task, or the key of jobs.")] = None,
        request_id: str | None = None,
        correlation_id: str | None = None,
        worker: Annotated[str | None, Field(description="Only tasks: the worker that holds or held it.")] = None,
        job: Annotated[str | None, Field(description="Only tasks: steps of this job.")] = None,
        created_after: Annotated[str | None, Field(description="TIME.")] = None,
        created_before: Annotated[str | None, Field(description="TIME.")] = None,
        limit: Annotated[int, Field(ge=1, le=MAX_FOUND)] = 20,
        before: Annotated[str | None, Field(description="The last id of the previous page.")] = None,
    ) -> Any:
        """Find tasks or jobs that meet all conditions, newest first, or the steps that wait for a person."""
        common: dict[str, Any] = {
            "namespace": namespace,
            "request_id": request_id,
            "correlation_id": correlation_id,
            "created_after": await self._past_time("created_after", created_after),
            "created_before": await self._past_time("created_before", created_before),
        }
        page: dict[str, Any] = {"limit": limit, "before": None if before is None else _require_uuid("before", before)}
        only_tasks = {"worker": worker, "job": job}
        found: list[Any]
        if what == "tasks":
            conditions = {**common, **only_tasks, "unique_key": key}
            found = await self._app.find(states=states, type=name, tag=tag, **conditions, **page)
        elif what == "jobs":
            _refuse_given(what, only_tasks)
            tags = () if tag is None else (tag,)
            found = await self._app.find_jobs(status=states, workflow=name, key=key, tags=tags, **common, **page)
        else:
            _refuse_given(what, {**common, **only_tasks, "states": states, "tag": tag, "key": key, "before": before})
            found = list(await self._app.inbox(workflow=name, limit=limit))
        return {what: found, "more": len(found) == limit}

    # --- scope operate

    async def cancel(
        self,
        id: TaskOrJob,  # noqa: A002 - the name that the agent sees
        reason: Reason = None,
        force: Annotated[bool, Field(description="A running task: at once, without waiting for its worker.")] = False,
    ) -> Any:
        """Cancel a task, or a job with its children. A running task is asked to stop; done steps are compensated."""
        kind, found = await self._find_one(id)
        outcome: str
        if kind == "task":
            outcome = await self._app.handle(id).cancel(reason, force=force)
        elif force:
            raise InputError(f"{id} is a job: force is for tasks")
        else:
            outcome = "canceled" if await self._app.job(id).cancel(reason) else f"not canceled: it is {found.status}"
        return {"kind": kind, "id": id, "outcome": outcome}

    async def requeue(
        self,
        id: Annotated[str, Field(description="The id of a task that is in error or canceled; not a step.")],  # noqa: A002 - the name that the agent sees
        reason: Reason = None,
    ) -> Any:
        """Make a task that is in error or canceled pending again, with new tries."""
        kind, found = await self._find_one(id)
        if kind == "job":
            raise InputError(f"{id} is a job: requeue is for tasks; `interlock jobs retry {id}` submits it again")
        done = await self._app.handle(id).requeue(reason)
        return {"id": id, "outcome": "requeued" if done else f"not requeued: it is {found.state}"}

    async def approve(
        self,
        job: Annotated[str, Field(description="The id of the job; `find` with inbox lists them.")],
        step: Annotated[str, Field(description="The approval step.")],
        approved: Annotated[bool, Field(description="false rejects it.")],
        comment: Annotated[str | None, Field(description="Why; stored with the answer.")] = None,
    ) -> Any:
        """Answer an approval step of a job, once. Ask the person you work for before you decide."""
        kind, _ = await self._find_one(job)
        if kind != "job":
            raise InputError(f"{job} is a task: approve takes the id of the job, and the name of the step")
        return {"job": job, "step": step, "outcome": await self._app.job(job).approve(step, approved, comment)}

    # --- shared

    async def _find_one(self, id_: str) -> tuple[Literal["task", "job"], Any]:
        """Return the status of the task or the job with this id, if its namespace can be reached."""
        uuid = _require_uuid("the id of a task or a job", id_)
        found: Any
        kind: Literal["task", "job"] = "task"
        try:
            found = await self._app.handle(uuid).status()
        except UnknownTaskError:
            try:
                kind, found = "job", await self._app.job(uuid).status()
            except UnknownJobError:
                found = None
        if found is None or (self._namespaces is not None and found.namespace not in self._namespaces):
            raise UnknownTaskError(f"there is no task or job {id_}: never stored, pruned, or in another namespace")
        return kind, found

    async def _check_reach(self, id_: str, kind: str | None) -> None:
        """Refuse what belongs to another namespace, or to none, if the server is limited to namespaces."""
        if self._namespaces is None:
            return
        if kind == "namespace":
            if id_ not in self._namespaces:
                raise InputError(f"this server is limited to the namespaces {', '.join(self._namespaces)}, got {id_!r}")
        elif kind in SCOPED_KINDS or (kind is None and _as_uuid(id_) is not None):
            await self._find_one(id_)
        else:
            raise InputError(f"this server is limited to namespaces: the kind must be one of {', '.join(SCOPED_KINDS)}")

    async def _past_time(self, name: str, text: str | None) -> datetime | None:
        if text is None:
            return None
        async with self._app.connection() as connection:
            return parse_past_time(name, text, await read_clock(connection))


READ_TOOLS = ("status", "explain", "history", "doctor", "find")
OPERATE_TOOLS = ("cancel", "requeue", "approve")


def create_server(
    app: Interlock, *, version: str, operates: bool = False, namespaces: Collection[str] | None = None
) -> MCPServer[Any]:
    """Create the server with its tools; without `operates`, an agent does not see those that change something."""
    tools = AgentTools(app, namespaces)
    made = []
    for name in (*READ_TOOLS, *(OPERATE_TOOLS if operates else ())):
        reads = name in READ_TOOLS
        hints = ToolAnnotations(read_only_hint=reads, destructive_hint=not reads, open_world_hint=False)
        tool = Tool.from_function(_as_tool(getattr(tools, name)), name, annotations=hints, structured_output=False)
        arguments = tool.fn_metadata.arg_model
        arguments.model_config["extra"] = "forbid"
        arguments.model_rebuild(force=True)
        tool.parameters = arguments.model_json_schema(by_alias=True)
        made.append(tool)
    return MCPServer("interlock", version=version, instructions=INSTRUCTIONS, log_level="WARNING", tools=made)


def _as_tool(answer: Answer) -> Callable[..., Awaitable[str]]:
    """Turn the answer of a method into bounded JSON, and its errors into messages for the agent."""

    @wraps(answer)
    async def tool(**arguments: Any) -> str:
        try:
            return bounded_json(await answer(**arguments))
        except InterlockError as error:
            raise ToolError(_cut(str(error), MAX_ERROR_CHARACTERS, 0)) from None

    # the signature of the bound method, without `self`, but with the answer's true type
    signature = inspect.signature(answer, eval_str=True)
    tool.__signature__ = signature.replace(return_annotation=str)  # type: ignore[attr-defined]
    return tool


def bounded_json(document: Any) -> str:
    """Format a document as JSON of a bounded size: long texts and lists are cut, and the answer says so."""
    text = _dump(document)
    if len(text.encode()) <= MAX_ANSWER_BYTES:
        return text
    plain = orjson.loads(text)
    for characters, elements in CUTS:
        text = _dump(
            {
                "cut_to_fit": f"texts of {characters} characters, lists of {elements}",
                **_cut_top(plain, characters, elements),
            }
        )
        if len(text.encode()) <= MAX_ANSWER_BYTES:
            break
    else:
        text = _dump({"cut_to_fit": "the answer is too large; ask for less", "begins": text[: MAX_ANSWER_BYTES // 4]})
    return text


def _cut_top(document: Any, characters: int, elements: int) -> dict[str, Any]:
    cut = _cut(document, characters, elements)
    return cut if isinstance(cut, dict) else {"answer": cut}


def _cut(value: Any, characters: int, elements: int) -> Any:
    if isinstance(value, str) and len(value) > characters:
        return f"{value[:characters]}… ({len(value) - characters} characters left out)"
    if isinstance(value, list):
        kept = [_cut(each, characters, elements) for each in value[:elements]]
        return kept if len(value) <= elements else [*kept, f"… ({len(value) - elements} elements left out)"]
    if isinstance(value, dict):
        kept_items = list(value.items())[:elements]
        cut = {key: _cut(each, characters, elements) for key, each in kept_items}
        return cut if len(value) <= elements else {**cut, "…": f"{len(value) - elements} fields left out"}
    return value


def _dump(document: Any) -> str:
    return orjson.dumps(document, default=_plain, option=orjson.OPT_NON_STR_KEYS).decode()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    return str(value)


def _refuse_given(what: str, given: dict[str, Any]) -> None:
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise InputError(f"find {what} has no condition {', '.join(names)}")


def _require_uuid(name: str, text: str) -> UUID:
    found = _as_uuid(text)
    if found is None:
        raise InputError(f"{name} must be a UUID, got {text!r}")
    return found


def _as_uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
