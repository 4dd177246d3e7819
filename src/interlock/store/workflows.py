"""Declared workflows: what client/graph.py let pass is stored as rows, so that jobs can be carried on in sets.

Invariant: a workflow of a name and a version is written once and never changes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.errors import InputError
from interlock.model.graph import MAP, share
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, load_statements, run, run_together

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

WORKFLOWS = load_statements("workflows")
HANDLED = frozenset({"plain", "decision"})  # kinds whose own row a handler of the user's runs
DEFAULT_TRIES = 5
FEW = 16  # upstream steps whose results a claim gathers by itself
NAMED = 5  # upstream steps that a waiting step names as its reason


class StoredWorkflow(NamedTuple):
    """A workflow as it was declared."""

    id: UUID
    name: str
    version: str
    namespace: str
    definition: dict[str, Any]
    registered_at: datetime


async def put_workflow(connection: Connection, document: Mapping[str, Any], *, now: datetime | None = None) -> UUID:
    """Store a checked definition, unless it is there already; another one of the same version is refused."""
    named = {"name": document["name"], "version": str(document["version"]), "definition": as_json(dict(document))}
    rows = await run(connection, WORKFLOWS["compare_workflow"], named)
    if not rows:
        async with transaction(connection):
            made = await run(connection, WORKFLOWS["insert_workflow"], {**_head(document), **named, "now": now})
            if made:
                id_: UUID = made[0]["id"]
                await _put_steps(connection, id_, document)
                return id_
        rows = await run(connection, WORKFLOWS["compare_workflow"], named)
    if not rows[0]["same"]:
        raise InputError(
            f"workflow {named['name']!r} version {named['version']!r} is stored with another definition, which jobs "
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


async def _put_steps(connection: Connection, id_: UUID, document: Mapping[str, Any]) -> None:
    steps, edges = described_steps(document), described_edges(document)
    asked = [
        (WORKFLOWS["insert_workflow_steps"], {"workflow_id": id_, "steps": orjson.dumps(steps).decode()}),
        (WORKFLOWS["insert_workflow_edges"], {"workflow_id": id_, "edges": orjson.dumps(edges).decode()}),
    ]
    await run_together(connection, asked)


def _head(document: Mapping[str, Any]) -> dict[str, Any]:
    roots = [step for step in described_steps(document) if step["edges"] == 0]
    return {
        "namespace": document.get("namespace") or "default",
        "root_namespaces": sorted({step["namespace"] for step in roots}),
        "plain_roots": all(step["kind"] in HANDLED for step in roots),
        "timeout_seconds": document.get("timeout"),
    }


def described_edges(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give the rows of `workflow_edges`."""
    branches = {(step["name"], branch) for step in document["steps"] for branch in step.get("branches") or ()}
    return [
        {
            "upstream": upstream,
            "downstream": step["name"],
            "condition": condition,
            "branch": condition == "success" and (upstream, step["name"]) in branches,
        }
        for step in document["steps"]
        for key, condition in (("after", "success"), ("after_failure", "failure"))
        for upstream in step.get(key) or ()
    ]


def described_steps(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give the rows of `workflow_steps`."""
    edges = described_edges(document)
    waits = _upstream(document, edges)
    followed = Counter(edge["upstream"] for edge in edges)
    failures = {edge["downstream"] for edge in edges if edge["condition"] == "failure"}
    maps = {step["name"] for step in document["steps"] if step.get("kind") == MAP}
    return [
        {
            **_described(step, document.get("namespace") or "default"),
            "simple": step["name"] not in failures and _is_simple(step, waits[step["name"]], maps),
            "handed": _handed(step, document),
            "position": position,
            "edges": len(waits[step["name"]]),
            "sink": not followed[step["name"]],
            "waits_for": _listed(waits[step["name"]]),
        }
        for position, step in enumerate(document["steps"])
    ]


def _upstream(document: Mapping[str, Any], edges: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Give the steps that each step comes after."""
    found: dict[str, list[str]] = {step["name"]: [] for step in document["steps"]}
    for edge in edges:
        found[edge["downstream"]].append(edge["upstream"])
    return found


def _is_simple(step: Mapping[str, Any], upstream: list[str], maps: set[str]) -> bool:
    """Tell whether a claim can gather what a step, or a part of a map, is handed without the function for all kinds."""
    if (step.get("kind") or "plain") not in {*HANDLED, MAP} or len(upstream) > FEW:
        return False
    return maps.isdisjoint(name for name in upstream if name != step.get("over"))


def _handed(step: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Give what every attempt at a step is handed."""
    return {
        "workflow": document["name"],
        "version": str(document["version"]),
        "kind": step.get("kind") or "plain",
        "config": step.get("config") or {},
        "branches": step.get("branches") or [],
    }


def _described(step: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    kind = step.get("kind") or "plain"
    waits_itself = kind in {"signal", "approval"}  # then the timeout is of the waiting, and not of a handler
    return {
        "step": step["name"],
        "kind": kind,
        "type": step.get("type"),
        "namespace": step.get("namespace") or namespace,
        "join_rule": share(step.get("join")),
        "strategy": share(step.get("strategy")) if kind == MAP else None,
        "compensate": step.get("compensate"),
        "priority": step.get("priority") or 0,
        "max_tries": step.get("max_tries") or DEFAULT_TRIES,
        "timeout_seconds": None if waits_itself else step.get("timeout"),
        "backoff": step.get("backoff"),
        "limit_key": step.get("limit_key"),
        "tags": step.get("tags"),
        "callback_url": step.get("callback_url"),
        "spec": dict(step),
    }


def _listed(upstream: list[str]) -> str | None:
    if not upstream:
        return None
    more = len(upstream) - NAMED
    return f"waits for {', '.join(upstream[:NAMED])}" + (f" and {more} more" if more > 0 else "")
