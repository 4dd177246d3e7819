"""Examples of the OpenAPI document: written ones for requests, made from the schemas for responses.

Invariant: an example fits its schema; a test checks all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

TASK_ID = "0199a3c4-5b6e-7c1d-8f2a-3b4c5d6e7f80"
JOB_ID = "0199a3c4-5b6e-7c1d-8f2a-3b4c5d6e7f81"
TIME = "2030-01-01T09:00:00Z"

REQUEST_EXAMPLES: Mapping[str, Any] = {
    "NewWorker": {"namespaces": ["mail"], "concurrency": 4},
    "Reasoned": {"reason": "the mail server is down"},
    "NewTask": {"type": "send_mail", "input": {"to": "eva@example.com"}, "tags": ["welcome"], "request_id": "mail-17"},
    "NewTasks": {"tasks": [{"type": "send_mail", "input": {"to": "eva@example.com"}}], "request_id": "newsletter-3"},
    "CancelTask": {"reason": "sent by hand", "force": False},
    "CancelTasks": {"filter": {"type": "send_mail", "state": ["pending"]}, "preview": True},
    "RequeueTasks": {"filter": {"type": "send_mail"}, "reason": "the mail server is back", "limit": 1000},
    "NewJob": {"workflow": "order", "input": {"order": 17}, "request_id": "order-17"},
    "NewJobs": {"jobs": [{"workflow": "order", "input": {"order": 17}}], "request_id": "orders-of-monday"},
    "CancelJobs": {"filter": {"workflow": "order", "tags": ["trial"]}, "preview": True},
    "Retry": {"step": "charge"},
    "SignalSent": {"name": "paid", "payload": {"euros": 30}},
    "Approval": {"step": "release", "approved": True, "comment": "looks good"},
    "NewSchedule": {
        "type": "report",
        "cron": "30 4 * * MON-FRI",
        "timezone": "Europe/Berlin",
        "input": {"region": "eu"},
    },
    "LimitOverride": {"max_running": 5, "max_starts": 100, "period": 60, "reason": "the relay is slow"},
    "NewToken": {"name": "ci", "scope": "operate", "days": 90},
    "Webhooks": {"ids": [7, 9]},
    "Command": {"request_id": "4711"},
}

# values by the name of the field, for those that the type alone does not explain
FIELD_EXAMPLES: Mapping[str, Any] = {
    "id": TASK_ID,
    "task_id": TASK_ID,
    "job_id": JOB_ID,
    "parent_job_id": JOB_ID,
    "worker_id": "w_0199a3c4-5b6e-7c1d-8f2a-3b4c5d6e7f82",
    "namespace": "mail",
    "namespaces": ["mail"],
    "type": "send_mail",
    "types": ["send_mail"],
    "workflow": "order",
    "version": "2",
    "step": "charge",
    "kind": "task",
    "name": "mail",
    "reason": "the mail server is down",
    "actor": "token:ci",
    "created_by": "cli:root",
    "database_role": "interlock",
    "key": "mail:acme",
    "rule": "mail:*",
    "limit_keys": ["mail:acme"],
    "tags": ["welcome"],
    "input": {"to": "eva@example.com"},
    "url": "https://shop.example.com/hook",
    "callback_url": "https://shop.example.com/hook",
    "cron": "30 4 * * MON-FRI",
    "timezone": "Europe/Berlin",
    "next": None,
    "error": None,
    "token": "il_…",
    "scope": "operate",
    "missed": "once",
}
TYPE_EXAMPLES: Mapping[str, Any] = {"string": "…", "integer": 1, "number": 1.0, "boolean": True, "object": {}}
JSON_TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
FORMAT_EXAMPLES: Mapping[str, Any] = {"uuid": TASK_ID, "date-time": TIME}


def make_example(schema: Mapping[str, Any], schemas: Mapping[str, Any], *, optional: bool = True) -> Any:
    """Make a value that fits a schema; without `optional`, with the required members only."""
    return _ExampleMaker(schemas, optional=optional).make("", schema, ())


class _ExampleMaker:
    def __init__(self, schemas: Mapping[str, Any], *, optional: bool) -> None:
        self._schemas = schemas
        self._optional = optional

    def make(self, name: str, schema: Mapping[str, Any], within: tuple[str, ...]) -> Any:
        """Make the value of a member; `within` are the models around it, which a recursive one does not enter again."""
        if name in FIELD_EXAMPLES and self._fits(FIELD_EXAMPLES[name], schema):
            return FIELD_EXAMPLES[name]
        schema, within = self._resolve(schema, within)
        if "const" in schema or "enum" in schema:
            return schema.get("const", (schema.get("enum") or [None])[0])
        kind = schema.get("type", "")
        if kind == "array":
            items = schema.get("items", {})
            return [] if items.get("$ref") in within else [self.make(name, items, within)]
        if "properties" in schema:
            wanted = schema["properties"] if self._optional else schema.get("required", [])
            return {field: self.make(field, schema["properties"][field], within) for field in wanted}
        return FORMAT_EXAMPLES.get(schema.get("format", ""), TYPE_EXAMPLES.get(kind))

    def _resolve(self, schema: Mapping[str, Any], within: tuple[str, ...]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Follow references and take the first of several choices."""
        while True:
            if "$ref" in schema:
                within = (*within, schema["$ref"])
                schema = self._schemas[schema["$ref"].rpartition("/")[2]]
            elif "anyOf" in schema:
                schema = schema["anyOf"][0]
            else:
                return schema, within

    def _fits(self, value: Any, schema: Mapping[str, Any]) -> bool:
        """Tell whether a value is of the type of a schema, or of one of its choices; a test checks the rest."""
        choices = [self._resolve(choice, ())[0] for choice in schema.get("anyOf", [schema])]
        return any(self._is_of_type(value, choice) for choice in choices)

    def _is_of_type(self, value: Any, schema: Mapping[str, Any]) -> bool:
        if "enum" in schema or "const" in schema:
            return value in schema.get("enum", [schema.get("const")])
        kind = schema.get("type")
        if kind == "array" and isinstance(value, list):
            return all(self._fits(item, schema.get("items", {})) for item in value)
        if "format" in schema:
            return value in {"uuid": (TASK_ID, JOB_ID)}.get(schema["format"], ())
        return kind is None or (isinstance(value, JSON_TYPES[kind]) and "properties" not in schema)
