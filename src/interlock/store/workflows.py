"""Stores workflow definitions as rows of `workflows`, `workflow_steps` and `workflow_edges`, for set-based SQL.

Invariant: a definition is written once and never changes, and a job keeps the one that it started with. A name and a
version stay with one definition, unless a development setting replaces it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.errors import DefinitionChangedError
from interlock.model.graph import AFTER, KINDS_WITH_HANDLER, MAP, RECOVERY, SINGLE_TASK_KINDS, edges, output_steps
from interlock.model.joins import compile_joins, required_share
from interlock.model.options import DEFAULT_MAX_TRIES, check_limit_keys, check_limit_weight
from interlock.model.versions import VERSION_LENGTH, derive_version, describe_differences
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, load_statements, run, run_pipeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.postgres.query import StatementCall

WORKFLOWS = load_statements("workflows")
MAX_SIMPLE_UPSTREAMS = 16  # upstream steps whose results the claim statement gathers by itself
MAX_VERSION_LENGTH = 100
MAX_NAMED_UPSTREAMS = 5  # upstream steps that the reason of a waiting step names


class StoredWorkflow(NamedTuple):
    """One version of a workflow, as it was registered."""

    id: UUID
    name: str
    version: str
    namespace: str
    definition: dict[str, Any]
    registered_at: datetime


async def put_workflow(
    connection: Connection, document: Mapping[str, Any], *, replace: bool = False, now: datetime | None = None
) -> UUID:
    """Store a checked definition unless it exists; DefinitionChangedError if its version has another definition.

    With `replace`, such a definition takes the place of the stored one, unless an unfinished job uses that.
    """
    key = _key(document)
    rows = await run(connection, WORKFLOWS["compare_workflow"], key)
    if not rows:
        async with transaction(connection):
            inserted = await _insert_workflow(connection, document, registered_at=now)
        if inserted is not None:
            return inserted
        # another transaction has inserted the version in the meantime
        rows = await run(connection, WORKFLOWS["compare_workflow"], key)
    if not rows[0]["same"]:
        if not replace:
            raise _changed_error(rows[0]["definition"], document)
        return await _replace_workflow(connection, document, now=now)
    found: UUID = rows[0]["id"]
    return found


async def find_changed_workflows(
    connection: Connection, documents: Iterable[Mapping[str, Any]]
) -> dict[tuple[str, str], str]:
    """Map the names and versions of the definitions that `put_workflow` would refuse to the reasons."""
    changed: dict[tuple[str, str], str] = {}
    for document in documents:
        rows = await run(connection, WORKFLOWS["compare_workflow"], _key(document))
        if rows and not rows[0]["same"]:
            changed[document["name"], document["version"]] = str(_changed_error(rows[0]["definition"], document))
    return changed


async def _insert_workflow(
    connection: Connection, document: Mapping[str, Any], *, registered_at: datetime | None
) -> UUID | None:
    """Insert a definition; None if its version exists. Must run in a transaction."""
    steps = step_rows(document)
    header = {**_header_columns(document, steps), **_key(document), "now": registered_at}
    inserted = await run(connection, WORKFLOWS["insert_workflow"], header)
    if not inserted:
        return None
    id_: UUID = inserted[0]["id"]
    await run_pipeline(connection, _insert_graph(id_, document, steps))
    return id_


async def _replace_workflow(connection: Connection, document: Mapping[str, Any], *, now: datetime | None) -> UUID:
    """Move the name and version of a definition to another one, in one transaction.

    The old row stays, for its jobs, under a version that adds its hash. The lock waits for submits that have inserted a
    job; a later one finds the new row, or inserts its job with the old one, whose definition is still complete.
    """
    key = _key(document)
    async with transaction(connection):
        locked = await run(connection, WORKFLOWS["lock_workflow"], key)
        if locked:
            old = locked[0]
            (found,) = await run(connection, WORKFLOWS["count_unfinished_jobs_of_workflow"], {"id": old["id"]})
            if found["jobs"]:
                raise _changed_error(old["definition"], document, found["jobs"])
            retired = {"id": old["id"], "retired_version": _retired_version(old["definition"]), "now": now}
            await run(connection, WORKFLOWS["retire_workflow"], retired)
            moved = {**key, "retired_version": _retired_version(document), "registered_at": old["registered_at"]}
            restored = await run(connection, WORKFLOWS["restore_workflow"], moved)
            if restored:
                id_: UUID = restored[0]["id"]
                return id_
            inserted = await _insert_workflow(connection, document, registered_at=old["registered_at"])
            if inserted is not None:
                return inserted
    # another process has replaced it in the meantime
    return await put_workflow(connection, document, replace=True, now=now)


def _key(document: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": document["name"], "version": str(document["version"]), "definition": as_json(dict(document))}


def _retired_version(definition: Mapping[str, Any]) -> str:
    return f"{definition['version'][: MAX_VERSION_LENGTH - VERSION_LENGTH - 1]}+{derive_version(definition)}"


def _changed_error(
    stored: Mapping[str, Any], declared: Mapping[str, Any], unfinished_jobs: int | None = None
) -> DefinitionChangedError:
    advice = "in development, --dev replaces the stored one"
    if unfinished_jobs is not None:
        advice = f"--dev does not replace the stored one: unfinished jobs use it, {unfinished_jobs} of them"
    return DefinitionChangedError(
        f"workflow {declared['name']!r} version {declared['version']!r} is stored with another definition: "
        f"{describe_differences(stored, declared)}; give the changed definition another version ({advice})"
    )


async def read_workflow(connection: Connection, name: str, version: str | None = None) -> StoredWorkflow | None:
    """Read one workflow; without a version, the one that was registered last."""
    rows = await run(connection, WORKFLOWS["read_workflow"], {"name": name, "version": version})
    return StoredWorkflow(**rows[0]) if rows else None


async def list_workflows(connection: Connection) -> list[StoredWorkflow]:
    """List all workflows by name, the newest version of each first."""
    return [StoredWorkflow(**row) for row in await run(connection, WORKFLOWS["list_workflows"], {})]


async def list_newest_workflows(
    connection: Connection, *, limit: int = 100, after: str | None = None
) -> list[dict[str, Any]]:
    """List the newest version of each workflow by name; `after` is the cursor: the last name of the page before."""
    return await run(connection, WORKFLOWS["list_newest_workflows"], {"limit": limit, "after": after})


async def read_workflow_versions(connection: Connection, name: str) -> list[dict[str, Any]]:
    """List the versions of a workflow, newest first, without definitions."""
    return await run(connection, WORKFLOWS["read_workflow_versions"], {"name": name})


def _insert_graph(id_: UUID, document: Mapping[str, Any], steps: Sequence[dict[str, Any]]) -> list[StatementCall]:
    edge_rows = [edge._asdict() for edge in edges(document)]
    return [
        (WORKFLOWS["insert_workflow_steps"], {"workflow_id": id_, "steps": orjson.dumps(steps).decode()}),
        (WORKFLOWS["insert_workflow_edges"], {"workflow_id": id_, "edges": orjson.dumps(edge_rows).decode()}),
    ]


def _header_columns(document: Mapping[str, Any], steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    roots = [step for step in steps if step["edges"] == 0]
    return {
        "namespace": document.get("namespace") or "default",
        # the other kinds need no worker
        "root_namespaces": sorted({step["namespace"] for step in roots if step["kind"] in KINDS_WITH_HANDLER}),
        "plain_roots": all(step["kind"] in SINGLE_TASK_KINDS and step["condition"] is None for step in roots),
        "timeout_seconds": document.get("timeout"),
        "tags": document.get("tags"),
        "attributes": as_json(document.get("attributes")),
        "callback_url": document.get("callback_url"),
        "key": document.get("key"),
        "on_conflict": document.get("on_conflict"),
    }


def step_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make the rows of `workflow_steps`."""
    upstreams: dict[str, list[str]] = {step["name"]: [] for step in document["steps"]}
    counts: Counter[str] = Counter()
    downstream_counts: Counter[str] = Counter()
    handlers: set[str] = set()  # steps with other dependencies than `after`, or with recovered ones
    for edge in edges(document):
        counts[edge.downstream] += 1
        downstream_counts[edge.upstream] += edge.condition == AFTER
        if edge.condition != RECOVERY:
            upstreams[edge.downstream].append(edge.upstream)
        if edge.condition != AFTER:
            handlers.add(edge.downstream)
    joins = compile_joins(document)
    outputs = _output_names(document, [name for name in upstreams if not downstream_counts[name]])
    maps = {step["name"] for step in document["steps"] if step.get("kind") == MAP}
    return [
        {
            **_option_columns(step, document.get("namespace") or "default"),
            **joins[step["name"]]._asdict(),
            "simple": step["name"] not in handlers and _has_simple_inputs(step, upstreams[step["name"]], maps),
            "handed": _handed_document(step, document),
            "position": position,
            "edges": counts[step["name"]],
            "outputs": outputs.get(step["name"]),
            "waits_for": _describe_wait(upstreams[step["name"]]),
        }
        for position, step in enumerate(document["steps"])
    ]


def _output_names(document: Mapping[str, Any], final_steps: Sequence[str]) -> dict[str, list[str]]:
    """Map the steps whose results are in the job's output to their names there; without a name, it is the output."""
    declared = output_steps(document.get("output")) or zip(final_steps, final_steps, strict=True)
    names: dict[str, list[str]] = {}
    for name, step in declared:
        names.setdefault(step, []).extend([] if name is None else [name])
    return names


def _has_simple_inputs(step: Mapping[str, Any], upstreams: Sequence[str], maps: set[str]) -> bool:
    """Tell whether the claim statement can gather the inputs of a step, or of a map part, without `step_inputs()`."""
    if (step.get("kind") or "plain") not in KINDS_WITH_HANDLER or len(upstreams) > MAX_SIMPLE_UPSTREAMS:
        return False
    return maps.isdisjoint(name for name in upstreams if name != step.get("over"))


def _handed_document(step: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Make the part of a step's context that is the same for every attempt."""
    return {
        "workflow": document["name"],
        "version": str(document["version"]),
        "kind": step.get("kind") or "plain",
        "config": step.get("config") or {},
        "branches": step.get("branches") or [],
    }


def _option_columns(step: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    kind = step.get("kind") or "plain"
    is_wait_timeout = kind in {"signal", "approval"}  # their timeout limits the wait, not a handler
    return {
        "step": step["name"],
        "kind": kind,
        "type": step.get("type"),
        "namespace": step.get("namespace") or namespace,
        "condition": step.get("when"),
        "cancel_rest": bool(step.get("cancel_rest")),
        "strategy": required_share(step.get("strategy")) if kind == MAP else None,
        "compensate": step.get("compensate"),
        "priority": step.get("priority") or 0,
        "max_tries": step.get("max_tries") or DEFAULT_MAX_TRIES,
        "timeout_seconds": None if is_wait_timeout else step.get("timeout"),
        "backoff": step.get("backoff"),
        "limit_keys": None if step.get("limit_key") is None else [*check_limit_keys("limit_key", step["limit_key"])],
        "limit_weight": (
            None if step.get("limit_weight") is None else check_limit_weight("limit_weight", step["limit_weight"])
        ),
        "tags": step.get("tags"),
        "callback_url": step.get("callback_url"),
        "spec": dict(step),
    }


def _describe_wait(upstreams: Sequence[str]) -> str | None:
    if not upstreams:
        return None
    more = len(upstreams) - MAX_NAMED_UPSTREAMS
    return f"waits for {', '.join(upstreams[:MAX_NAMED_UPSTREAMS])}" + (f" and {more} more" if more > 0 else "")
