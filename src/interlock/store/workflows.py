"""Stores workflow definitions as rows of `workflows`, `workflow_steps` and `workflow_edges`, for set-based SQL.

Invariant: a workflow of a name and a version is written once and never changes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.errors import InputError
from interlock.model.graph import KINDS_WITH_HANDLER, MAP, SINGLE_TASK_KINDS, edges, required_share
from interlock.model.options import DEFAULT_MAX_TRIES
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, load_statements, run, run_pipeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.postgres.query import StatementCall

WORKFLOWS = load_statements("workflows")
MAX_SIMPLE_UPSTREAMS = 16  # upstream steps whose results the claim statement gathers by itself
MAX_NAMED_UPSTREAMS = 5  # upstream steps that the reason of a waiting step names


class StoredWorkflow(NamedTuple):
    """One version of a workflow, as it was registered."""

    id: UUID
    name: str
    version: str
    namespace: str
    definition: dict[str, Any]
    registered_at: datetime


async def put_workflow(connection: Connection, document: Mapping[str, Any], *, now: datetime | None = None) -> UUID:
    """Store a checked definition unless it exists; InputError if its version is stored with another definition."""
    key = {"name": document["name"], "version": str(document["version"]), "definition": as_json(dict(document))}
    rows = await run(connection, WORKFLOWS["compare_workflow"], key)
    if not rows:
        async with transaction(connection):
            steps = step_rows(document)
            header = {**_header_columns(document, steps), **key, "now": now}
            inserted = await run(connection, WORKFLOWS["insert_workflow"], header)
            if inserted:
                id_: UUID = inserted[0]["id"]
                await run_pipeline(connection, _insert_graph(id_, document, steps))
                return id_
        # another transaction has inserted the version in the meantime
        rows = await run(connection, WORKFLOWS["compare_workflow"], key)
    if not rows[0]["same"]:
        raise InputError(
            f"workflow {key['name']!r} version {key['version']!r} is stored with another definition, which jobs "
            "may depend on; raise the version"
        )
    found: UUID = rows[0]["id"]
    return found


async def read_workflow(connection: Connection, name: str, version: str | None = None) -> StoredWorkflow | None:
    """Read one workflow; without a version, the one that was registered last."""
    rows = await run(connection, WORKFLOWS["read_workflow"], {"name": name, "version": version})
    return StoredWorkflow(**rows[0]) if rows else None


async def list_workflows(connection: Connection) -> list[StoredWorkflow]:
    """List all workflows by name, the newest version of each first."""
    return [StoredWorkflow(**row) for row in await run(connection, WORKFLOWS["list_workflows"], {})]


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
        "root_namespaces": sorted({step["namespace"] for step in roots}),
        "plain_roots": all(step["kind"] in SINGLE_TASK_KINDS for step in roots),
        "timeout_seconds": document.get("timeout"),
    }


def step_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make the rows of `workflow_steps`."""
    upstreams: dict[str, list[str]] = {step["name"]: [] for step in document["steps"]}
    downstream_counts: Counter[str] = Counter()
    after_failure: set[str] = set()
    for edge in edges(document):
        upstreams[edge.downstream].append(edge.upstream)
        downstream_counts[edge.upstream] += 1
        if edge.condition == "failure":
            after_failure.add(edge.downstream)
    maps = {step["name"] for step in document["steps"] if step.get("kind") == MAP}
    return [
        {
            **_option_columns(step, document.get("namespace") or "default"),
            "simple": step["name"] not in after_failure and _has_simple_inputs(step, upstreams[step["name"]], maps),
            "handed": _handed_document(step, document),
            "position": position,
            "edges": len(upstreams[step["name"]]),
            "sink": not downstream_counts[step["name"]],
            "waits_for": _describe_wait(upstreams[step["name"]]),
        }
        for position, step in enumerate(document["steps"])
    ]


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
        "join_rule": required_share(step.get("join")),
        "strategy": required_share(step.get("strategy")) if kind == MAP else None,
        "compensate": step.get("compensate"),
        "priority": step.get("priority") or 0,
        "max_tries": step.get("max_tries") or DEFAULT_MAX_TRIES,
        "timeout_seconds": None if is_wait_timeout else step.get("timeout"),
        "backoff": step.get("backoff"),
        "limit_key": step.get("limit_key"),
        "tags": step.get("tags"),
        "callback_url": step.get("callback_url"),
        "spec": dict(step),
    }


def _describe_wait(upstreams: Sequence[str]) -> str | None:
    if not upstreams:
        return None
    more = len(upstreams) - MAX_NAMED_UPSTREAMS
    return f"waits for {', '.join(upstreams[:MAX_NAMED_UPSTREAMS])}" + (f" and {more} more" if more > 0 else "")
