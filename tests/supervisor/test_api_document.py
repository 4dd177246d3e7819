"""The OpenAPI document: operation ids, examples that fit, exact problems; and the client that is generated from it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator
from openapi_python_client import (
    Project,  # noqa: F401 - fails early when the generator is not installed
    generate,
)
from openapi_python_client.config import Config as GeneratorConfig
from openapi_python_client.config import ConfigFile, MetaType

from api_support import ADMIN_ACTOR, ADMIN_TOKEN, add_admin_token, supervisor_at
from interlock import Interlock
from interlock.config import Config
from interlock.supervisor.http.app import create_api
from worker_support import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    config = Config(database_url="postgresql://localhost/none")
    return create_api(Interlock(config=config), config).openapi()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    return ((path, method, found) for path, each in document["paths"].items() for method, found in each.items())


def statuses(document: dict[str, Any], path: str, method: str) -> set[str]:
    return set(document["paths"][path][method]["responses"])


def test_every_operation_has_an_id_a_summary_a_description_and_a_known_tag(document: dict[str, Any]) -> None:
    found = list(operations(document))
    ids = [operation["operationId"] for _, _, operation in found]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", id_) for id_ in ids), "snake case, as functions of a client"
    assert {"enqueue_task", "list_tasks", "submit_job", "cancel_tasks", "show_result"} <= set(ids)
    tags = {tag["name"] for tag in document["tags"]}
    for path, method, operation in found:
        assert operation["summary"], (path, method)
        assert operation["description"].startswith(operation["summary"]), (path, method)
        assert set(operation["tags"]) <= tags, (path, method)


def test_every_body_and_response_has_examples_that_fit_their_schema(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        contents = [operation.get("requestBody", {}), *operation["responses"].values()]
        for media_type, content in [item for each in contents for item in each.get("content", {}).items()]:
            examples = [content["example"]] if "example" in content else list(content.get("examples", {}).values())
            assert examples, (path, method, media_type)
            validator = Draft202012Validator({**content["schema"], "components": document["components"]})
            for example in examples:
                value = example.get("value", example) if isinstance(example, dict) else example
                assert [error.message for error in validator.iter_errors(value)] == [], (path, method, media_type)


def test_an_operation_documents_only_statuses_that_it_can_answer_with(document: dict[str, Any]) -> None:
    always = {"421", "429", "431", "500", "503"}
    assert statuses(document, "/healthz", "get") == {"200", "421", "431", "500"}
    assert statuses(document, "/readyz", "get") == {"200", "421", "431", "500", "503"}
    assert "`no_live_worker`" in document["paths"]["/readyz"]["get"]["responses"]["503"]["description"]
    assert statuses(document, "/api/events", "get") == always | {"200", "401", "410", "422"}
    assert "`stopping`" in document["paths"]["/api/events"]["get"]["responses"]["503"]["description"]
    assert "`stopping`" not in document["paths"]["/api/tasks"]["get"]["responses"]["503"]["description"]
    assert statuses(document, "/api/workers", "get") == always | {"200", "401", "403", "422"}
    assert document["paths"]["/api/workers"]["get"]["responses"]["403"]["description"] == "`namespace_not_allowed`"
    assert statuses(document, "/api/namespaces", "get") == always | {"200", "401"}
    assert statuses(document, "/api/tasks", "get") == always | {"200", "401", "422"}
    assert statuses(document, "/api/tasks/{task_id}", "get") == always | {"200", "401", "404", "422"}
    body = {"400", "401", "403", "408", "413", "415", "422"}
    assert statuses(document, "/api/tasks", "post") == always | body | {"200", "201", "409"}
    assert statuses(document, "/api/tasks/{task_id}/cancel", "post") == always | body | {"200", "404", "409"}
    assert statuses(document, "/api/workers", "post") == always | body | {"201"}
    codes = document["paths"]["/api/jobs"]["post"]["responses"]
    assert codes["409"]["description"] == "`not_possible`, `job_conflict`"
    assert codes["422"]["description"] == "`invalid_request`, `invalid_input`, `key_reused`"
    assert codes["403"]["description"] == "`insufficient_scope`, `namespace_not_allowed`, `cross_origin`"


def test_every_operation_that_creates_one_thing_documents_its_location(document: dict[str, Any]) -> None:
    created = {
        path: "Location" in operation["responses"]["201"].get("headers", {})
        for path, _, operation in operations(document)
        if "201" in operation["responses"]
    }
    without = {path for path, located in created.items() if not located}
    # many things; a token cannot be read
    assert without == {"/api/tasks/bulk", "/api/jobs/bulk", "/api/tokens"}


def test_pages_of_browsers_are_not_in_the_document(document: dict[str, Any]) -> None:
    assert [
        path for path in document["paths"] if not path.startswith(("/api/", "/metrics", "/healthz", "/readyz"))
    ] == []
    methods = {method for _, method, _ in operations(document)}
    assert methods == {"get", "post", "put", "delete"}


@pytest.fixture(scope="module")
def generated(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Generate a client from the document; yield the name of its package."""
    place = tmp_path_factory.mktemp("generated")
    source = place / "openapi.json"
    source.write_text(json.dumps(document), encoding="utf-8")
    config = GeneratorConfig.from_sources(
        config_file=ConfigFile(post_hooks=[]),
        meta_type=MetaType.NONE,
        document_source=source,
        file_encoding="utf-8",
        overwrite=True,
        output_path=place / "generated_interlock",
    )
    complaints = generate(config=config)
    assert [complaint.detail for complaint in complaints if "image/svg" not in str(complaint.detail)] == []
    sys.path.insert(0, str(place))
    try:
        yield "generated_interlock"
    finally:
        sys.path.remove(str(place))
        for name in [name for name in sys.modules if name.partition(".")[0] == "generated_interlock"]:
            del sys.modules[name]


async def test_the_generated_client_enqueues_lists_waits_submits_and_cancels(
    generated: str, url: str, database: Connection
) -> None:
    await add_admin_token(database)

    def part(path: str) -> Any:
        return importlib.import_module(f"{generated}.{path}")

    with supervisor_at(url) as (_, address, _):
        await use_client(part, part("client").AuthenticatedClient(base_url=address, token=ADMIN_TOKEN), url)


async def use_client(part: Callable[[str], Any], client: Any, url: str) -> None:
    models = part("models")
    async with client:
        async with serving(url):
            body = models.NewTask.from_dict({"type": "add", "input": {"a": 1, "b": 2}, "tags": ["sums"]})
            made = await part("api.tasks.enqueue_task").asyncio(client=client, body=body, idempotency_key="sum-1")
            assert isinstance(made, models.EnqueuedTask)
            again = await part("api.tasks.enqueue_task").asyncio(client=client, body=body, idempotency_key="sum-1")
            assert again.id == made.id
            result = await part("api.tasks.show_result").asyncio(task_id=made.id, client=client, wait=20)
            assert (result.ended, result.output) == (True, 3)
        listed = await part("api.tasks.list_tasks").asyncio(client=client, tag="sums", state=[models.TaskRowState.DONE])
        assert [task.id for task in listed.items] == [made.id]
        bulk = models.NewTasks.from_dict({"tasks": [{"type": "add", "input": {"a": n, "b": 0}} for n in range(3)]})
        assert (await part("api.tasks.enqueue_tasks").asyncio(client=client, body=bulk)).created == 3
        wanted = models.CancelTasks.from_dict({"filter": {"type": "add", "state": ["pending"]}, "preview": True})
        preview = await part("api.tasks.cancel_tasks").asyncio(client=client, body=wanted)
        assert (preview.preview, preview.possible) == (True, 3)
        wanted.preview, wanted.horizon = False, preview.horizon
        assert (await part("api.tasks.cancel_tasks").asyncio(client=client, body=wanted)).changed == 3
        unknown = await part("api.jobs.submit_job").asyncio(
            client=client, body=models.NewJob.from_dict({"workflow": "none"})
        )
        assert isinstance(unknown, models.Problem)
        assert unknown.code == "invalid_input"
        rule = models.LimitOverride.from_dict({"max_running": 3})
        limit = await part("api.limits.set_limit").asyncio(limit_key="mail/a:*", client=client, body=rule)
        assert (limit.key, limit.max_running) == ("mail/a:*", 3)
        shown = await part("api.limits.show_limit").asyncio(limit_key="mail/a:*", client=client)
        assert shown.overridden_by == ADMIN_ACTOR
        pool = models.NewPool.from_dict({"name": "mail", "desired": 0, "namespaces": ["mail"]})
        assert (await part("api.pools.make_pool").asyncio(client=client, body=pool)).name == "mail"
        listed = await part("api.pools.show_pools").asyncio(client=client)
        assert [(pool.name, pool.desired) for pool in listed.items] == [("mail", 0)]
